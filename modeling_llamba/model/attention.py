"""Softmax attention, for the layers a hybrid keeps, and keys and values that grow in place.

transformers' dynamic cache concatenates: every token copies all keys and values there are, which at a context of 4,096
is more than half of a small model's step. Here a layer of it, itself unchanged, gets room for the tokens to come.

Shapes: B batch, L length, D model width, H heads, K key/value heads, P head dim, T columns, W bytes of a row.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.utils import is_torchdynamo_compiling

from ..hybrid.rounding import DECODED, Rounding
from ..kernels.backend import backend_for
from .norms import head_norm
from .rotary import Rotary

# tokens; or an eighth of what there is, where that is more
MIN_ROOM = 128


class TeacherAttention(nn.Module):
    """The teacher's attention but for what its heads attend to: projections, norms, gates, learned sinks."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        config = config.of_kind(config.layer_types[layer_idx])
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        # transformers' attention functions read these two of a module
        self.is_causal = True
        self.num_key_value_groups = heads // kv_heads
        self.scaling = config.score_scale
        self.softcap = config.attn_logit_softcapping
        q_size = heads * self.head_dim
        kv_size = kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        norm = config.qk_norm, config.head_dim
        self.q_norm = head_norm(*norm, heads, config.norm_eps, config.norm_unit_offset)
        self.k_norm = head_norm(*norm, kv_heads, config.norm_eps, config.norm_unit_offset)
        self.v_norm = self.gate_proj = self.sinks = None
        if config.value_norm:
            self.v_norm = nn.RMSNorm(config.head_dim, config.norm_eps, elementwise_affine=False)
        if config.attention_gate:
            self.gate_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        if config.learned_sinks:  # scores (H,) of attention to no token
            self.sinks = nn.Parameter(torch.zeros(heads))

    def make_key_offset(self, heads: int, rounding: Rounding) -> nn.Parameter | None:
        """Offset (heads, P) of keys that are rounded so; None in a model without such.

        Softmax is the same if one vector is taken off all keys of a head.
        """
        if not (self.config.key_offsets and rounding.rounds and heads):
            return None
        return nn.Parameter(torch.zeros(heads, self.head_dim), requires_grad=False)

    def less_offset(self, key: torch.Tensor) -> torch.Tensor:
        """Rotated keys (B, heads, L, P) as they are attended to and held."""
        if self.key_offset is None:
            return key
        return key - self.key_offset.detach()[:, None].to(key.dtype)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw learned sinks; offsets are zero."""
        if self.sinks is not None:
            init.normal_(self.sinks, mean=0.0, std=self.config.initializer_range)
        if self.key_offset is not None:
            init.zeros_(self.key_offset)

    @property
    def dropout(self) -> float:
        """Share of attention's probabilities that is dropped: 0 outside of training."""
        if self.training:
            return self.config.attention_dropout
        return 0.0

    def project_heads(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query (B, H, L, P), key and value (B, K, L, P) of hidden states (B, L, D), normed but not yet rotated."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape)
        if self.q_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
        if self.v_norm is not None:
            value = self.v_norm(value)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def head_gates(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gates (B, L, H, P) on what the heads return."""
        return torch.sigmoid(self.gate_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))


class SoftmaxAttention(TeacherAttention):
    """Grouped-query attention with the options of the supported teachers."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.roundings = Rounding.of_attention(config, layer_idx)
        kv_heads = config.num_attention_heads // self.num_key_value_groups  # of this kind of layer
        self.key_offset = self.make_key_offset(kv_heads, self.roundings[0])

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, L, D) -> (B, L, D) and the probabilities (B, H, L, L) when the backend returns them."""
        query, key, value = self.project_heads(hidden_states)
        query, key = backend_for(query, self.config.backend).rotate(query, key, position_embeddings)
        key = self.less_offset(key)
        store = None
        if cache is not None:
            store = functools.partial(update_keys, cache, self.layer_idx)
        output, probabilities = attend_rounded(
            self,
            self.roundings,
            store,
            query,
            key,
            value,
            attention_mask=attention_mask,
            dropout=self.dropout,
            scaling=self.scaling,
            softcap=self.softcap,
            sinks=self.sinks,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if self.gate_proj is not None:
            output = output * self.head_gates(hidden_states)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), probabilities


def probabilities(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores (B, H, L, T) over T, beside the learned sinks (H,) of their heads, if any."""
    if sinks is None:
        return scores.softmax(-1)
    learned = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, learned], dim=-1).softmax(-1)[..., :-1]


def attend_rounded(
    module: nn.Module,
    roundings: tuple[Rounding, Rounding],
    store: Callable | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention (B, L, H, P) to keys and values as a cache holds them, rounded or not, and probabilities.

    Gradients pass to the new tokens' keys and values where a cache ends with these, as all but static ones do.

    Args:
        module: passed on to transformers' attention function, with the keyword arguments; has a `config`.
        store: adds new keys and values to a cache and returns all that it holds; None where there is no cache.
        query, key, value: (B, H, L, P) and (B, K, L, P) of the new tokens.
        sinks: learned scores (H,), or None.
    """
    attend = functools.partial(
        attention_function(module.config),
        module,
        attention_mask=attention_mask,
        dropout=dropout,
        scaling=scaling,
        **score_options(softcap, sinks),
        **kwargs,
    )
    of_keys, of_values = roundings
    key_rows, value_rows = of_keys.encode(key), of_values.encode(value)
    if store is not None:
        key_rows, value_rows = store(key_rows, value_rows)
    if store is None or (key.requires_grad and (of_keys.rounds or of_values.rounds)):
        key, value = _with_past(of_keys, key, key_rows), _with_past(of_values, value, value_rows)
        return attend(query, key, value)
    step = one_token(module.config, roundings, query, attention_mask, dropout, scaling, softcap, sinks)
    if step is not None:
        return step(query, key_rows, value_rows), None
    # what is held is not rotated back: there is much of it, and of queries and outputs little
    query = of_keys.rotate(query)
    batch, heads, length = key_rows.shape[:3]
    at_once = heads
    # a compiled graph would be one for a number of parts
    if (of_keys.rounds or of_values.rounds) and not is_torchdynamo_compiling():
        at_once = max(DECODED // (batch * length * of_keys.dim), 1)
    shared = query.shape[1] // heads
    outputs = []
    probabilities = []
    for first in range(0, heads, at_once):
        of_heads = slice(first, first + at_once)
        key = of_keys.decode(key_rows[:, of_heads], query.dtype, rotated=True)
        value = of_values.decode(value_rows[:, of_heads], query.dtype, rotated=True)
        part = attend(query[:, first * shared : (first + at_once) * shared], key, value)
        outputs.append(part[0])
        probabilities.append(part[1])
    if len(outputs) == 1:
        return of_values.rotate(outputs[0]), probabilities[0]
    whole = None if probabilities[0] is None else torch.cat(probabilities, dim=1)
    return of_values.rotate(torch.cat(outputs, dim=2)), whole


def one_token(
    config,
    roundings: tuple[Rounding, Rounding],
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> Callable | None:
    """Attention of one token's queries (B, H, 1, P) to rows of keys and of values, which returns (B, 1, H, P); None
    where transformers' own function attends: with gradients, dropout, learned sinks, another implementation."""
    if query.shape[2] > 1 or sinks is not None or dropout or torch.is_grad_enabled():
        return None
    if config._attn_implementation not in (None, "sdpa"):
        return None
    bias = None
    if mask is not None:
        bias = mask[:, 0, 0].expand(len(query), -1)
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, -torch.inf)
    attend = backend_for(query, config.backend).attend_to_rows
    return functools.partial(attend, roundings=roundings, bias=bias, scaling=scaling, softcap=softcap)


def _with_past(rounding: Rounding, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """All vectors of rows (B, K, T, W), through the last of which, those of `new` (B, K, L, P), gradients pass."""
    past = rows.shape[2] - new.shape[2]
    rounded = rounding.round(new, rows[:, :, past:])
    if past == 0:
        return rounded
    return torch.cat([rounding.decode(rows[:, :, :past], new.dtype), rounded], dim=2)


def attention_function(config) -> Callable:
    """transformers' function for the model's attention implementation; eager is Gemma 2's, which caps scores, or
    `attend_beside_sinks`."""
    # here, since they take seconds to import, and a plan makes layers without running them
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    eager = attend_beside_sinks if config.learned_sinks else eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)


def attend_beside_sinks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    s_aux: torch.Tensor,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with learned sinks in transformers' interface, whose own takes them from the module alone."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(probabilities(scores, s_aux), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def score_options(softcap: float | None, sinks: torch.Tensor | None) -> dict[str, Any]:
    """The arguments that cap scores and add learned ones (H,); what is None is left out, since not every function
    takes it."""
    given = {"softcap": softcap, "s_aux": sinks}
    return {name: value for name, value in given.items() if value is not None}


def update_keys(
    cache: Cache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update` with the new tokens' keys and values (B, K, L, P); returns all of them."""
    if cache.offloading or layer_idx >= len(cache.layers):
        return cache.update(keys, values, layer_idx)
    return append_keys(cache.layers[layer_idx], keys, values)


def append_keys(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer.update`, in place where the layer is a dynamic one and nothing needs its former tensors.

    Args:
        keys, values: (B, K, L, P) of the new tokens.

    Returns:
        All keys and values of the layer, views into its room once it has grown.
    """
    # with a gradient wanted of the queries alone, attention would keep views of the room for its backward pass
    recording = torch.is_grad_enabled()
    grows = type(layer) is DynamicLayer and layer.is_initialized and layer.keys.numel() > 0
    if not grows or recording or layer.keys.requires_grad or is_torchdynamo_compiling():
        layer.room = None
        return layer.update(keys, values)
    held, past = (layer.keys, layer.values), layer.keys.shape[-2]
    total = past + keys.shape[-2]
    room = getattr(layer, "room", None)
    if room is None or not all(_begins(r, t) and total <= r.shape[-2] for r, t in zip(room, held, strict=True)):
        size = total + max(MIN_ROOM, total // 8)
        room = tuple(t.new_empty(*t.shape[:2], size, t.shape[-1]) for t in held)
        for r, t in zip(room, held, strict=True):
            r[:, :, :past] = t
        layer.room = room
    for r, new in zip(room, (keys, values), strict=True):
        r[:, :, past:total] = new
    layer.keys, layer.values = (r[:, :, :total] for r in room)
    return layer.keys, layer.values


def _begins(room: torch.Tensor, held: torch.Tensor) -> bool:
    """Return True if `room` begins with `held` itself; reordering, moving or copying a cache makes other tensors."""
    return held.data_ptr() == room.data_ptr() and held.stride() == room.stride() and len(held) == len(room)
