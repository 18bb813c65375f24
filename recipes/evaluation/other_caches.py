"""Caches that a teacher may be given in place of becoming a hybrid, emulated on any decoder of transformers.

Keys and values stay as they are in memory. An attention function reads of them what the other cache would hold when
each token is decoded, so that one pass over a text judges every position. Bytes are counted, not measured.

- Few bits: KIVI's rounding (arXiv 2402.02750). Keys are rounded per channel in groups of 32 tokens, values per token
  in groups of 32 channels, each group to codes between its least and largest number, with scale and zero in float16.
  A group of tokens is rounded once `whole` later tokens are there; newer tokens are whole.
- Window and sinks: StreamingLLM's (arXiv 2309.17453), with every token's own position.

Shapes: B batch, L length, H heads, K key/value heads, P head dim, Q queries.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_llamba.compatibility import cache_of
from modeling_llamba.model.attention import probabilities

from .metrics import Reader

NAME = "other_cache"
GROUP = 32
"""Tokens of a group of keys, and channels of a group of values."""
QUERIES = 512
"""Queries whose scores are in memory at once."""
SINKS = 4
BFLOAT16 = 2
"""Bytes of a number that is not rounded."""
SCALE = 4
"""Bytes of a group's scale and zero."""


class LayerShape(NamedTuple):
    """Size of a layer's cache.

    limit: largest number of tokens, of a layer with a window; 0 of one with a state. state: bytes of that.
    """

    heads: int
    key_dim: int
    value_dim: int
    limit: int | None
    state: int = 0


class Call(NamedTuple):
    """Tensors a layer attends with: query (B, H, Q, P), key and value (B, K, L, P), mask (B or 1, 1, Q, L) to add.

    score: queries and keys of one head each (..., Q, P) and (..., L, P) to scores (..., Q, L). sinks (H,): learned
    scores of attention to no token, or None.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    sinks: torch.Tensor | None = None

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Softmax of scores (B, H, Q, L)."""
        return probabilities(scores, self.sinks)


Attend = Callable[[Call], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def attending(model: PreTrainedModel, attend: Attend) -> Iterator[PreTrainedModel]:
    """Let all layers of a model, which it yields, attend by `attend`, which returns (B, H, Q, P).

    Sequences must not be padded on the left where `attend` counts places from the first token.
    """

    def interface(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **_: Any):
        def score(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            scores = q.float() @ k.float().transpose(-1, -2) * scaling
            return scores if softcap is None else softcap * torch.tanh(scores / softcap)

        found = attend(Call(module.layer_idx, query, key, value, attention_mask, score, s_aux))
        return found.to(query.dtype).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(f"{type(model).__name__} has an attention of its own, which no other cache can be put into.")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def read_with(model: PreTrainedModel, own: Reader, attend: Attend) -> Reader:
    """A reader of a model whose layers attend by `attend`, made from its own reader."""

    def states(ids: torch.Tensor) -> torch.Tensor:
        with attending(model, attend):
            return own.states(ids)

    return Reader(states, own.head)


@torch.no_grad()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Sizes of the cache that a model fills, layer by layer."""
    probe = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    cache = cache_of(model(probe, use_cache=True, logits_to_keep=1))
    return [_layer_shape(layer) for layer in cache.layers]


def _layer_shape(layer: CacheLayerMixin | LinearAttentionLayer) -> LayerShape:
    if isinstance(layer, LinearAttentionLayer):
        conv, state = (
            sum(t.numel() for t in tensors.values() if t is not None)
            for tensors in (layer.conv_states, layer.recurrent_states)
        )
        # states count in float32, as in the bytes of a hybrid (`recurrent_bytes`)
        return LayerShape(0, 0, 0, 0, conv * BFLOAT16 + 4 * state)
    limit = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else None
    return LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], limit)


@dataclass(frozen=True)
class OtherCache:
    """Cache of a teacher that rounds what it holds, or that holds the last and the first tokens only."""

    bits: int = 16
    whole: int = GROUP
    """Number of last tokens that are never rounded."""
    window: int | None = None
    """Number of last tokens that are held, the current one included; none is forgotten without."""

    def nbytes(self, shapes: list[LayerShape], length: int) -> int:
        """Bytes that a sequence of `length` tokens takes, scales included."""
        return sum(self._layer_bytes(shape, length) for shape in shapes)

    def _layer_bytes(self, shape: LayerShape, length: int) -> int:
        tokens = length if self.window is None else min(length, self.window + SINKS)
        tokens = tokens if shape.limit is None else min(tokens, shape.limit)
        rounded = 0 if self.bits == 16 else self.first_whole(tokens)
        codes = rounded * (shape.key_dim + shape.value_dim) * self.bits // 8
        scales = rounded // GROUP * shape.key_dim + rounded * (shape.value_dim // group_of(shape.value_dim))
        whole = (tokens - rounded) * (shape.key_dim + shape.value_dim) * BFLOAT16
        return shape.state + shape.heads * (codes + scales * SCALE + whole)

    def first_whole(self, tokens: Any) -> Any:
        """Number of tokens that are rounded when so many are there; an int or a tensor of them."""
        past = tokens - self.whole
        return (past.clamp(min=0) if isinstance(past, torch.Tensor) else max(past, 0)) // GROUP * GROUP

    def attend(self, call: Call) -> torch.Tensor:
        """Attend to what the cache would hold."""
        heads = call.query.shape[1] // call.key.shape[1]
        key, value = (t.float().repeat_interleave(heads, 1) for t in (call.key, call.value))
        rounded = (key, value)
        if self.bits < 16:
            rounded = round_groups(key, self.bits, -2), round_groups(value, self.bits, -1)
        before = key.shape[2] - call.query.shape[2]
        parts = [
            self._attend_rows(call, rows, before, (key, value), rounded)
            for rows in torch.arange(call.query.shape[2], device=key.device).split(QUERIES)
        ]
        return torch.cat(parts, 2)

    def _attend_rows(self, call: Call, rows: torch.Tensor, before: int, whole: Pair, rounded: Pair) -> torch.Tensor:
        """Attend with some queries, to the columns that are visible to any of them.

        Args:
            before: number of tokens before the first query. whole, rounded: keys and values (B, H, L, P).
        """
        now = rows[:, None] + before
        first, last = now[0].item(), now[-1].item()
        oldest = 0 if self.window is None else max(first - self.window + 1, 0)
        columns = torch.arange(last + 1, device=rows.device)
        columns = columns[(columns < SINKS) | (columns >= oldest)]
        query, mask = call.query[:, :, rows], call.mask[:, :, rows][..., columns]
        if self.window is not None:
            forgotten = (now - columns >= self.window) & (columns >= SINKS)
            mask = mask.masked_fill(forgotten, torch.finfo(mask.dtype).min)
        if self.bits == 16:
            key, value = (t[:, :, columns] for t in whole)
            return call.weights(call.score(query, key) + mask) @ value
        # columns before `low` are rounded for all of these queries, those from `high` on for none
        low, high = ((columns < self.first_whole(place + 1)).sum().item() for place in (first, last))
        is_whole = columns >= self.first_whole(now + 1)
        old_key, old_value = (t[:, :, columns[:high]] for t in rounded)
        key, value = (t[:, :, columns[low:]] for t in whole)
        old_scores, scores = call.score(query, old_key), call.score(query, key)
        either = torch.where(is_whole[:, low:high], scores[..., : high - low], old_scores[..., low:])
        scores = torch.cat([old_scores[..., :low], either, scores[..., high - low :]], -1)
        weights = call.weights(scores + mask)
        of_whole = (weights[..., low:] * is_whole[:, low:]) @ value
        return of_whole + (weights[..., :high] * ~is_whole[:, :high]) @ old_value


def group_of(channels: int) -> int:
    """Channels of a group of values: 32, or fewer where 32 does not divide the head."""
    return math.gcd(channels, GROUP)


def round_groups(t: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Round (..., L, P) to so many bits, in groups along the tokens (-2) or the channels (-1).

    Tokens after the last full group stay as they are.
    """
    size = group_of(t.shape[-1]) if dim == -1 else GROUP
    end = t.shape[dim] // size * size
    groups = t.narrow(dim, 0, end).float().unflatten(dim, (-1, size))
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    # a group of equal numbers would be divided by zero
    scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float16).tiny).half().float()
    zero = low.half().float()
    codes = ((groups - zero) / scale).round().clamp(0, 2**bits - 1)
    rounded = (codes * scale + zero).flatten(dim - 1, dim).to(t.dtype)
    return torch.cat([rounded, t.narrow(dim, end, t.shape[dim] - end)], dim)


def window_of_bytes(shapes: list[LayerShape], nbytes: int, bits: int = 16) -> OtherCache | None:
    """A window with sinks of at most so many bytes at any length, and hardly fewer; None if there is none."""
    low, high, whole = 0, 2**24, 0  # eight bits lose nothing, not even of the last tokens
    while high - low > 1:
        middle = (low + high) // 2
        # 2**25 tokens are more than any window that is tried, so that each is counted full
        fits = OtherCache(bits, whole, middle).nbytes(shapes, 2**25) <= nbytes
        low, high = (middle, high) if fits else (low, middle)
    return OtherCache(bits, whole, low) if low else None
