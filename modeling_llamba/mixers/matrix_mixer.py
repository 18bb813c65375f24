"""The interface every mixer shares: project the input, mix along the sequence, gate and project out.

A matrix mixer is a linear map y = M x along the sequence whose matrix M (L, L, per head) depends on the input.
`forward` computes it by a scan; `materialize` returns M itself.

Shapes: B batch, L length, D model width, H heads, G groups, U states, P head dim, N state, I inner width.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..model.cache import conv_state, is_token, record, recurrent_state
from ..model.norms import RMSNorm, head_norm
from ..model.rotary import Rotary, apply_rotary, scale_queries
from .short_conv import ShortConv
from .ssd import repeat_groups, ssd_advance, ssd_matrix, ssd_scan, ssd_step

# silu(z) = 1 here, so a gate whose projection is zero lets everything through.
OPEN_GATE = 1.278464542761074


def gate_bias(config, size: int) -> nn.Parameter | None:
    """The bias of the gate, which opens it at first; None where the configuration has none."""
    if not config.mixer_gate_bias:
        return None
    return nn.Parameter(torch.full((size,), OPEN_GATE))


def initialise_gate(mixer: nn.Module) -> None:
    """Open the gate of a mixer, and let its input pass beside the state."""
    init.ones_(mixer.D)
    if mixer.z_bias is not None:
        init.constant_(mixer.z_bias, OPEN_GATE)


def inverse_softplus_step(like: torch.Tensor) -> torch.Tensor:
    """Step sizes log-uniform in [1e-3, 1e-1], as Mamba draws them, before the softplus."""
    dt = torch.empty_like(like, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
    return dt + torch.log(-torch.expm1(-dt))


def output_norm(config, size: int) -> RMSNorm | None:
    """The norm before the output projection, over each head or all of them; None where the mixer has none."""
    if config.mixer_norm == "none":
        return None
    eps = config.mixer_norm_eps
    if eps is None:
        eps = config.norm_eps
    if config.mixer_norm == "head":
        return RMSNorm(size, eps, config.mixer_head_dim)
    return RMSNorm(size, eps)


class Streams(NamedTuple):
    """Inputs of the recurrence, from the projections.

    x (B, L, G, P), log_a (B, L, U), B (B, L, G, N), C (B, L, H, N), gate (B, L, H P), and the step size
    (B, L, U) that multiplies x, or None.
    """

    x: torch.Tensor
    log_a: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    gate: torch.Tensor
    step: torch.Tensor | None


class SSDMixer(nn.Module):
    """Base of the two mixers with a scalar decay per head.

    A subclass has `project`, which takes the arguments of `forward` and returns the `Streams` of its input after
    projection, convolution, norm and rotary embedding.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.mixer_num_heads
        self.num_groups = config.mixer_num_kv_heads
        self.head_dim = config.mixer_head_dim
        self.d_state = config.mixer_d_state
        self.num_states = self.num_groups if config.mixer_shared_state else self.num_heads
        self.inner_size = self.num_heads * self.head_dim
        self.x_size = self.num_groups * self.head_dim
        self.B_size = self.num_groups * self.d_state
        self.C_size = self.num_heads * self.d_state
        self.conv_size = self.x_size + self.B_size + self.C_size
        in_size = self.conv_size + self.inner_size + self.num_states
        self.in_proj = nn.Linear(config.hidden_size, in_size, bias=config.mixer_in_bias)
        self.conv1d = ShortConv(self.conv_size, config.mixer_d_conv, config.mixer_activation, config)
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.z_bias = gate_bias(config, self.inner_size)
        self.B_norm = head_norm(config.mixer_qk_norm, self.d_state, self.num_groups, config.norm_eps)
        self.C_norm = head_norm(config.mixer_qk_norm, self.d_state, self.num_heads, config.norm_eps)
        self.norm = output_norm(config, self.inner_size)
        self.out_proj = nn.Linear(self.inner_size, config.hidden_size, bias=config.mixer_out_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | None = None,
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Mix along the sequence.

        Args:
            hidden_states: (B, L, D).
            position_embeddings: the layer's rotary embedding; used when `config.mixer_rotary`.
            padding_mask: (B, L), 0 at padding, or None. seq_idx: (B, L) ids of packed sequences, or None.
            cache: the cache to continue from and to update, or None.

        Returns:
            (B, L, D).
        """
        streams = self.project(hidden_states, position_embeddings, padding_mask, seq_idx, cache)
        state = None if cache is None else recurrent_state(cache, self.layer_idx)
        stepped = self.stepped(streams)
        x, B = stepped
        if record(cache, self.layer_idx, state, (x, streams.log_a, B), _replay) and state is not None:
            state = state.clone()  # a step works in place, and the recording holds what there was
        y, new_state = self.mix(streams, state, seq_idx, stepped)
        # a step works in place, and transformers would copy the state onto itself
        if cache is not None and new_state is not state:
            cache.update_recurrent_state(new_state, self.layer_idx)
        elif cache is not None:
            cache.layers[self.layer_idx].recurrent_states[0] = new_state
        return self.finish(y, streams.gate)

    def mix(
        self,
        streams: Streams,
        state: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        stepped: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the recurrence from `state` (B, U, P, N): y (B, L, H, P) and the final state, float32 or wider.

        Args:
            stepped: x and B as the method of that name returns them, where it was called already.
        """
        x, B = stepped or self.stepped(streams)
        log_a = streams.log_a
        if state is not None and x.shape[1] == 1 and seq_idx is None:
            y, state = ssd_step(state, x[:, 0], log_a[:, 0], B[:, 0], streams.C[:, 0])
            y = y[:, None]
        else:
            size = self.config.mixer_chunk_size
            y, state = ssd_scan(x, log_a, B, streams.C, state, seq_idx, size, self.config.backend)
        return self._skip(y, streams), state

    def _skip(self, y, streams):
        x = repeat_groups(streams.x, self.num_heads)
        return torch.addcmul(y, self.D.to(y.dtype)[:, None], x.to(y.dtype))

    def stepped(self, streams: Streams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x, times the step size where there is one, and B, of as many heads as there are states then."""
        if streams.step is None:
            return streams.x, streams.B
        x = repeat_groups(streams.x, self.num_states) * streams.step[..., None]
        return x, repeat_groups(streams.B, self.num_states)

    def finish(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate (B, L, H, P), normalise if asked, and project to (B, L, D)."""
        if self.z_bias is not None:
            gate = gate + self.z_bias
        y = y.flatten(2) * F.silu(gate.to(y.dtype))
        if self.norm is not None:
            y = self.norm(y)
        return self.out_proj(y.to(gate.dtype))

    def materialize(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | None = None,
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The unrolled matrix M (B, H, L, L), skip connection included, and x (B, H, L, P) with y = M x."""
        streams = self.project(hidden_states, position_embeddings, padding_mask, seq_idx)
        matrix = ssd_matrix(streams.log_a, streams.B, streams.C, seq_idx)
        if streams.step is not None:
            step = streams.step.repeat_interleave(self.num_heads // self.num_states, dim=-1)
            matrix = matrix * step.transpose(1, 2)[..., None, :].to(matrix.dtype)
        matrix = matrix + torch.diag_embed(self.D.to(matrix.dtype)[:, None].expand(-1, matrix.shape[-1]))
        return matrix, repeat_groups(streams.x, self.num_heads).transpose(1, 2)

    def _convolve(self, xBC, padding_mask, seq_idx, cache):
        """The short convolution over [x, B, C] with its cached inputs; all are zero at padding."""
        xBC = convolve_with_cache(self.conv1d, xBC, padding_mask, seq_idx, cache, self.layer_idx)
        x, BC = xBC.split([self.x_size, self.B_size + self.C_size], dim=-1)
        return x.unflatten(-1, (self.num_groups, self.head_dim)), BC.unflatten(-1, (-1, self.d_state))

    def _norm_and_rotate(self, BC, position_embeddings):
        """B (B, L, G, N) and C (B, L, H, N) from both side by side, which are rotated in one go."""
        heads = [self.num_groups, self.num_heads]
        if self.B_norm is not None:
            B, C = BC.split(heads, dim=2)
            BC = torch.cat([self.B_norm(B), self.C_norm(C)], dim=2)
        if self.config.mixer_rotary:
            BC = apply_rotary(BC, *position_embeddings[:2], head_dim_axis=2)
        B, C = BC.split(heads, dim=2)
        return B, scale_queries(C, position_embeddings, head_dim_axis=2)


def convolve_with_cache(
    conv: ShortConv,
    x: torch.Tensor,
    padding_mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cache: Cache | None,
    layer_idx: int,
) -> torch.Tensor:
    """Convolve (B, L, I), continuing from the inputs in the cache, which are updated; 0 at padding."""
    records = cache is not None and getattr(cache.layers[layer_idx], "record_past", False)
    if padding_mask is None and not records:
        return _convolve(conv, x, seq_idx, cache, layer_idx)
    if padding_mask is None:
        padding_mask = x.new_ones(x.shape[:2])
    real = padding_mask[..., None].to(x.dtype)
    if seq_idx is None:
        return _convolve_around_padding(conv, x * real, padding_mask.bool(), cache, layer_idx, records) * real
    return _convolve(conv, x * real, seq_idx, cache, layer_idx) * real


def _convolve_around_padding(
    conv: ShortConv, x: torch.Tensor, real: torch.Tensor, cache: Cache | None, layer_idx: int, records: bool
) -> torch.Tensor:
    """Convolve each row as if its padding were not there, by moving it before all that the row has seen.

    Args:
        real: (B, L), False at padding, where x is zero.
        records: the cache keeps all inputs where they are, for `crop`.
    """
    past = None if cache is None else conv_state(cache, layer_idx)
    inputs = x
    if past is not None:
        inputs = torch.cat([past.mT, x], dim=1)
        real = torch.cat([is_token(past), real], dim=1)
    order = real.byte().argsort(dim=1, stable=True)[..., None].expand_as(inputs)
    moved = inputs.gather(1, order)
    if cache is not None:
        cache.update_conv_state(x.mT, layer_idx, conv_kernel_size=conv.kernel_size)
    if cache is not None and not records:
        state = cache.layers[layer_idx].conv_states[0]
        state.copy_(F.pad(moved.mT, (max(state.shape[-1] - moved.shape[1], 0), 0))[..., -state.shape[-1] :])
    y = conv(moved)
    return torch.empty_like(y).scatter(1, order, y)[:, -x.shape[1] :]


def _convolve(
    conv: ShortConv, x: torch.Tensor, seq_idx: torch.Tensor | None, cache: Cache | None, layer_idx: int
) -> torch.Tensor:
    if cache is None:
        return conv(x, seq_idx)
    past = conv_state(cache, layer_idx)
    continues = past is not None
    if continues and x.shape[1] == 1:
        found = conv.step(x, past)
        if found is not None:
            return found
    inputs = cache.update_conv_state(x.mT, layer_idx, conv_kernel_size=conv.kernel_size)
    inputs = F.pad(inputs, (max(conv.kernel_size + x.shape[1] - inputs.shape[-1], 0), 0))
    if not continues:
        return conv(x, seq_idx)
    if x.shape[1] == 1:
        return conv(x, joined=inputs)
    return conv(x, seq_idx, inputs[..., : -x.shape[1]])


def _replay(state: torch.Tensor | None, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The state after some tokens' x, log_a and B; see `ssd_advance`."""
    x, log_a, B = inputs
    if state is None:
        wide = torch.promote_types(x.dtype, torch.float32)
        state = x.new_zeros(len(x), log_a.shape[-1], x.shape[-1], B.shape[-1], dtype=wide)
    return ssd_advance(state.clone(), x, log_a, B)


def hold_state_at_padding(log_a: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
    """Decay 1 at padding: together with x = 0 it leaves the state as it was."""
    if padding_mask is None:
        return log_a
    return log_a * padding_mask[..., None].to(log_a.dtype)
