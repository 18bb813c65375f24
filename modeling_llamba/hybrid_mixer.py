"""A layer that holds both: softmax attention to a window and sinks, and a matrix mixer for what lies beyond.

    out = near_proj(attention(u))                while window and sinks see all there is
    out = out_proj([attention(u), mixer(u)])     from then on

The two share their input and one out_proj, and add up. With `mixer_sees` "beyond" a token reaches the mixer's state
when it leaves the window, and a sink never does, so that no token is counted twice; with "all" the mixer is as it is
alone, and out_proj serves every token.

near_proj is the teacher's own o_proj, so that the first tokens come out exactly as the teacher has them: everything
after them attends to them, and a small error there costs more than any other (docs/guide/hybrid_layers.md).

With `hybrid_read` "normalised" there is no mixer, and the far past is read as softmax would (normalised_read.py):

    out = out_proj([(1 - gate) attention(u), gate v_mean, gate tilt])

With mixer "none" the layer is the window and the sinks alone, out = out_proj(attention(u)), nothing of it changed.

Shapes: B batch, L length, H heads, E features of the mixer, D head dim.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache

from .mamba1 import Mamba1
from .mamba2 import DiscreteMamba2, Mamba2
from .normalised_read import NormalisedRead
from .window_attention import Near, WindowAttention, WindowInputs

Unrolled = tuple[torch.Tensor, torch.Tensor]
"""A matrix and what it is applied to."""
MIXER_CLASSES = {"discrete_mamba2": DiscreteMamba2, "mamba2": Mamba2, "mamba1": Mamba1}


class HybridMixer(nn.Module):
    """Window attention and a matrix mixer, side by side."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.attention = WindowAttention(config, layer_idx)
        self.attention_size = self.attention.heads * self.attention.head_dim
        self.ssd, self.read = None, None
        self.sizes = [self.attention_size]
        """Features of each part of what out_proj takes."""
        if config.hybrid_read == "normalised":
            self.read = NormalisedRead(config, layer_idx)
            self.sizes += [self.attention_size] * 2
        elif config.mixer != "none":
            self.ssd = MIXER_CLASSES[config.mixer](config, layer_idx)
            self.sizes.append(self.ssd.out_proj.in_features)
            self.ssd.out_proj = nn.Identity()
        if self.ssd is not None and config.mixer_sees == "beyond":
            self.ssd.delay, self.ssd.skipped = self.attention.window, config.hybrid_sinks
        with_bias = config.attention_out_bias or (config.mixer_out_bias and len(self.sizes) > 1)
        self.out_proj = nn.Linear(sum(self.sizes), config.hidden_size, bias=with_bias)
        # how many tokens of a sequence the window serves alone
        self.near_tokens = 0
        if config.mixer_sees == "beyond":
            self.near_tokens = self.attention.window + config.hybrid_sinks
            bias = config.attention_out_bias
            self.near_proj = nn.Linear(self.attention_size, config.hidden_size, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        window: WindowInputs | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, L, hidden) -> (B, L, hidden); without `window`, rows begin here and hold no padding.

        `kwargs` go to transformers' attention function, for heads with full attention.
        """
        window = unpadded(hidden_states) if window is None else window
        projected = self.attention.project(hidden_states, position_embeddings, window)
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        of_full = self.attention.attend_fully(projected, window.causal_mask, past, **kwargs)
        one = self.read is not None and hidden_states.shape[1] == 1
        if one and self.read.takes_window(projected, window, past_key_values):
            near, features = self.read.mix_one(projected, window.index, of_full, past_key_values)
            return self._project_out(near.flatten(2), features, window)
        if past is not None:
            past.in_order()
        seen = self.attention.attend_nearby(projected, window, of_full, past, seq_idx)
        mixed = self.combine(seen, hidden_states, position_embeddings, padding_mask, seq_idx, past_key_values, window)
        if past is not None and past.most is not None and self.read.takes_window(projected, window, past_key_values):
            past.in_ring()  # where the tokens to come will find it, compiled or captured as they may be
        return mixed

    def combine(
        self,
        seen: Near,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        padding_mask: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        past_key_values: Cache | None,
        window: WindowInputs,
    ) -> torch.Tensor:
        """`forward`, once it is known what the attention sees."""
        near = seen.output.flatten(2)
        if self.read is not None:
            features = self.read(seen, seq_idx, past_key_values)
        elif self.ssd is None:
            return self.out_proj(near)
        else:
            index = {"index": window.index} if self.config.mixer_sees == "beyond" else {}
            far = self.ssd(hidden_states, position_embeddings, padding_mask, seq_idx, past_key_values, **index)
            features = torch.cat([near, far], dim=-1)
        return self._project_out(near, features, window)

    def _project_out(self, near: torch.Tensor, features: torch.Tensor, window: WindowInputs) -> torch.Tensor:
        """(B, L, hidden), by near_proj where the window serves alone."""
        mixed = self.out_proj(features)
        if not self.near_tokens or window.all_behind(self.near_tokens):
            return mixed
        return torch.where((window.index < self.near_tokens)[..., None], self.near_proj(near), mixed)

    def materialize(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        window: WindowInputs | None = None,
    ) -> tuple[Unrolled, Unrolled | None]:
        """Both halves unrolled, before the mixer's gate and out_proj: the attention's (M, v); and the mixer's (M, x),
        that of the normalised read, v_mean and tilt added up, or None.

        M (B, H, L, L), v and x (B, H, L, head dim).
        """
        window = unpadded(hidden_states) if window is None else window
        near = self.attention.materialize(hidden_states, position_embeddings, window, seq_idx)
        if self.read is not None:
            seen = self.attention(hidden_states, position_embeddings, window, seq_idx)
            gate, (mean, tilt) = self.read.matrices(seen, seq_idx)
            gate = gate.transpose(1, 2)[..., None]
            return ((1 - gate) * near[0], near[1]), (gate * (mean + tilt), near[1])
        if self.ssd is None:
            return near, None
        index = {"index": window.index} if self.config.mixer_sees == "beyond" else {}
        return near, self.ssd.materialize(hidden_states, position_embeddings, padding_mask, seq_idx, **index)


def unpadded(hidden_states: torch.Tensor) -> WindowInputs:
    """For rows (B, L, hidden) that begin here and hold no padding."""
    batch, length = hidden_states.shape[:2]
    return WindowInputs(torch.arange(length, device=hidden_states.device).expand(batch, length))


def make_mixer(config, layer_idx: int) -> nn.Module:
    """The mixer of a layer that is not plain attention: hybrid where `layer_types` says so, else the matrix mixer."""
    if config.layer_types[layer_idx] == "hybrid":
        return HybridMixer(config, layer_idx)
    return MIXER_CLASSES[config.mixer](config, layer_idx)
