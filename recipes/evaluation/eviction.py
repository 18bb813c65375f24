"""Eviction after a context: few keys and values of it are kept, chosen before anything asks for them.

The choice is KVzip's (arXiv 2505.23416): the model reads the context, is asked to repeat it and reads it again; a pair
of key and value scores as the largest weight that any query of the second reading gives it. The pairs of the highest
scores are kept, of all heads and layers together, so that heads which look back keep more.

What was evicted can be summed up as MomentKV does (arXiv 2606.01563): number, mean key, mean value and their
covariance, for each head, stand for one more column, to first order. Nothing is fitted. MomentKV's own rule of
eviction is not used here.

Layers with a window of their own are left alone: a context that is read again is out of their sight.

One pass over a text in two copies judges the tokens after several contexts. The first copy attends to everything,
as a prompt is read; of the second, tokens after a context attend to what is kept of the first copy and to each other.

Shapes: B batch, L length, H heads, K key/value heads, P head dim, T columns, Q queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .metrics import Reader
from .other_caches import BFLOAT16, QUERIES, Call, LayerShape, OtherCache, attending

REPEAT = "\n\nRepeat the previous context exactly.\n\n"
Scores = list[torch.Tensor | None]
"""Scores (K, T) of every layer; None of a layer with a window or a state."""
Kept = list[torch.Tensor | None]
"""Pairs that are kept (K, T), of every layer; None of a layer with a window or a state, which stays as it is."""


def kept_bytes(shapes: list[LayerShape], pairs: int, moments: bool, length: int) -> int:
    """Bytes of a sequence of `length` tokens of which so many pairs are kept, of all heads together."""
    limited = [shape for shape in shapes if shape.limit is not None]
    evicting = [shape for shape in shapes if shape.limit is None]
    # of the widest layer, so that the bytes hold whichever pairs are kept
    pair = max(shape.key_dim + shape.value_dim for shape in shapes) * BFLOAT16
    size = OtherCache().nbytes(limited, length) + min(pairs, length * sum(s.heads for s in evicting)) * pair
    numbers = sum(s.heads * (1 + s.key_dim + s.value_dim + s.key_dim * s.value_dim) for s in evicting)
    return size + (numbers * BFLOAT16 if moments else 0)


def pairs_of_bytes(shapes: list[LayerShape], nbytes: int, moments: bool, length: int) -> int | None:
    """Number of pairs that fit into so many bytes at `length` tokens; None if not a single one does."""
    pair = max(shape.key_dim + shape.value_dim for shape in shapes) * BFLOAT16
    left = nbytes - kept_bytes(shapes, 0, moments, length)
    return left // pair if left >= pair else None


@torch.no_grad()
def reading_scores(
    model: PreTrainedModel, own: Reader, shapes: list[LayerShape], tokenizer: Any, context: torch.Tensor
) -> Scores:
    """KVzip's scores of a context (T,): the largest weight of each pair while the context is read again."""
    told = tokenizer(REPEAT, add_special_tokens=False, return_tensors="pt").input_ids[0].to(context.device)
    end = len(context)
    found: dict[int, torch.Tensor] = {}

    def attend(call: Call) -> torch.Tensor:
        kept_heads = call.key.shape[1]
        heads = call.query.shape[1] // kept_heads
        key, value = (t.repeat_interleave(heads, 1) for t in (call.key, call.value))
        parts, largest = [], key.new_zeros(kept_heads, end)
        for start in range(0, key.shape[2], QUERIES):
            stop = min(start + QUERIES, key.shape[2])
            scores = call.score(call.query[:, :, start:stop], key[:, :, :stop])
            weights = call.weights(scores + call.mask[:, :, start:stop, :stop])
            again = weights[0, :, max(end + len(told) - start, 0) :, :end]
            if again.shape[1]:
                largest = torch.maximum(largest, again.amax(1).view(kept_heads, heads, end).amax(1))
            parts.append(weights @ value[:, :, :stop].float())
        found[call.layer] = largest
        return torch.cat(parts, 2)

    with attending(model, attend):
        own.states(torch.cat([context, told, context])[None])
    return [found[layer] if shape.limit is None else None for layer, shape in enumerate(shapes)]


def keep_highest(scores: Scores, pairs: int) -> Kept:
    """Pairs that are kept of every layer: those of the highest scores."""
    flat = torch.cat([layer.flatten() for layer in scores if layer is not None])
    kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    kept[flat.topk(min(pairs, len(flat))).indices] = True
    parts = iter(kept.split([layer.numel() for layer in scores if layer is not None]))
    return [None if layer is None else next(parts).view_as(layer) for layer in scores]


@dataclass(frozen=True)
class Eviction:
    """Attention of two copies of one text (2, L); the second attends to the pairs that are kept of each context.

    kept: for each end of a context (T), in rising order, the pairs that are kept of every layer.
    """

    kept: dict[int, Kept]
    moments: bool

    def attend(self, call: Call) -> torch.Tensor:
        """Attend with both copies."""
        length = call.key.shape[2]
        heads = call.query.shape[1] // call.key.shape[1]
        key, value = (t.float().repeat_interleave(heads, 1) for t in (call.key, call.value))
        tensors = (t[:1] for t in (call.query, call.key, call.value, call.mask))
        whole = OtherCache().attend(Call(call.layer, *tensors, call.score, call.sinks))
        ends = [*self.kept, length]
        parts = [whole[:, :, : ends[0]]]
        for start, stop in zip(ends, ends[1:], strict=False):
            if start == stop:
                continue
            query = call.query[1:, :, start:stop]
            columns = [torch.cat([t[:1, :, :start], t[1:, :, start:stop]], 2) for t in (key, value)]
            scores = call.score(query, columns[0]) + call.mask[:1, :, start:stop, :stop]
            kept = self.kept[start][call.layer]
            if kept is not None:
                kept = kept.repeat_interleave(heads, 0)
                scores[..., :start].masked_fill_(~kept[None, :, None], -torch.inf)
            if kept is None or not self.moments:
                parts.append(call.weights(scores) @ columns[1])
                continue
            mass, read = read_moments(query, key[:1, :, :start], value[:1, :, :start], ~kept, call.score)
            weights = call.weights(torch.cat([scores, mass], -1))
            parts.append(weights[..., :-1] @ columns[1] + weights[..., -1:] * read)
        return torch.cat([whole, torch.cat(parts, 2)])


def read_moments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, evicted: torch.Tensor, score: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log mass (1, H, Q, 1) and value (1, H, Q, P) of evicted pairs, to first order around their mean key.

    Args:
        query: (1, H, Q, P). key, value: (1, H, T, P). evicted: (H, T).
    """
    share = evicted[None, :, :, None].float()
    count = share.sum(2, keepdim=True)
    mean_key, mean_value = ((t * share).sum(2, keepdim=True) / count.clamp(min=1) for t in (key, value))
    spread = ((key - mean_key) * share).transpose(-1, -2) @ (value - mean_value) / count.clamp(min=1)
    # where nothing is evicted the log of 0 is -inf, and the column gets no weight
    mass = score(query, mean_key) + count.log()
    return mass, mean_value + score(query, spread.transpose(-1, -2))


def read_after(
    model: PreTrainedModel,
    own: Reader,
    scores_of: Callable[[torch.Tensor], Scores],
    ends: Sequence[int],
    pairs: int,
    moments: bool,
) -> Reader:
    """A reader of single texts (1, L) with eviction after each of the contexts that end at `ends`.

    Args:
        scores_of: scores of the pairs of a context (T,).
        pairs: number of pairs that are kept, of all heads and layers together.
    """

    def states(ids: torch.Tensor) -> torch.Tensor:
        kept = {end: keep_highest(scores_of(ids[0, :end]), pairs) for end in ends}
        with attending(model, Eviction(kept, moments).attend):
            return own.states(ids.expand(2, -1))[1:]

    return Reader(states, own.head)
