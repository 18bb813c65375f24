"""Offsets of keys, which are taken off before keys are rounded.

Softmax is the same without it, so nothing is added again, and nothing is computed when keys are read. What a key has
in common with all others of its head is then not rounded. The offset is a mean of keys, each with the weight that an
error of its score has in the outputs of attention: a^2 |v - o|^2, with a the attention that it gets. Sinks get most of
it, so that their keys are rounded least.

Of a vector that is the same before rotation, planes that turn slowly keep much over a context, and the mean over the
context's positions is taken. Planes that turn farther have no offset, which would be wrong at both ends of a context.
Nor have the windows of hybrid layers: the fitted log mass of their states depends on distances, as an offset does not,
and in 8 bits keys lose next to nothing. In 6 bits they were not measured with offsets. A teacher's own windows have
one.

Shapes: B batch, L length, D model width, K key/value heads, R heads per key/value head, P head dim, Q queries.
"""

from collections.abc import Iterable

import torch

from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.model.attention import TeacherAttention
from modeling_llamba.model.rotary import Rotary, rotate_keys, rotate_queries

from .layer_data import LayerData

SEQUENCES = 2
"""Sequences on which an offset is measured."""
LEAST_KEPT = 0.75
"""Least length of the mean of a plane's unit vectors over a context: at that length, its ends just gain nothing."""
FIRST = 4
"""First tokens, which get most of the attention, and lie at the beginning of every context."""
QUERIES = 64
"""Queries of a sequence whose attention weighs keys."""


@torch.no_grad()
def key_offset(
    attention: TeacherAttention, inputs: Iterable[torch.Tensor], rotary: Rotary, mean_rotary: Rotary
) -> torch.Tensor:
    """The offset (heads, P) of the keys of a layer's heads, or, in a hybrid layer, of those that are kept.

    Args:
        inputs: the layer's inputs (B, L, D). rotary: the embedding of their positions.
        mean_rotary: see `TeacherModel.mean_rotary`.
    """
    of_sinks = of_others = total = 0.0
    for u in inputs:
        query, key, value = attention.project_heads(u)
        rotated = rotate_keys(key, rotary)
        weights = score_weights(attention, rotate_queries(query, rotary), rotated, value)[..., None]
        total = total + weights.sum((0, 2))
        of_sinks = of_sinks + (weights * rotated)[:, :, :FIRST].sum((0, 2))
        of_others = of_others + (weights * key)[:, :, FIRST:].sum((0, 2))
    cos, sin, at_one = mean_rotary
    offset = of_sinks + rotate_keys(of_others[None, :, None], (cos, sin))[0, :, 0]
    offset = offset / total.clamp(min=torch.finfo(total.dtype).tiny)
    fast = (torch.hypot(cos, sin) < LEAST_KEPT * at_one).flatten()
    offset[:, : len(fast)].masked_fill_(fast, 0)
    return offset[attention.kept] if isinstance(attention, HybridAttention) else offset


def score_weights(
    attention: TeacherAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Squared change of attention's outputs with the score of each key (B, K, L), summed over some queries.

    Args:
        query, key, value: (B, heads, L, P), rotated.
    """
    length = key.shape[2]
    # earlier queries have few keys to attend to
    rows = torch.linspace(length // 4, length - 1, QUERIES, device=key.device).long()
    query = query[:, :, rows].unflatten(1, (key.shape[1], -1))  # (B, K, R, Q, P)
    scores = query @ key[:, :, None].mT * attention.scaling
    column = torch.arange(length, device=key.device)
    hidden = column > rows[:, None]
    if (window := getattr(attention, "sliding_window", None)) is not None:
        hidden |= column <= rows[:, None] - window
    share = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    output = share @ value[:, :, None]
    away = value.square().sum(-1)[:, :, None, None] + output.square().sum(-1, keepdim=True)
    away = away - 2 * output @ value[:, :, None].mT
    return (share.square() * away.clamp(min=0)).sum((2, 3))


def fit_key_offset(attention: TeacherAttention, data: LayerData) -> None:
    """Measure the offset of a layer's keys, in place; nothing where the layer has none."""
    if attention.key_offset is not None:
        attention.key_offset.copy_(offset_on(attention, data))


def offset_on(attention: TeacherAttention, data: LayerData) -> torch.Tensor:
    """See `key_offset`, on some sequences to fit on."""
    inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SEQUENCES]))
    return key_offset(attention, inputs, data.rotary, data.mean_rotary)
