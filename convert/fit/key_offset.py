"""Offsets of keys, which are taken off before keys are rounded.

Softmax is the same without it, so nothing is added again, and nothing is computed when keys are read. What a key has
in common with all others of its head is then not rounded. Of a vector that is the same before rotation, planes that
turn slowly keep much over a context; the offset is its mean over the context's positions. Planes that turn farther
have no offset, which would be wrong at both ends of a context. Nor have those that a state does not hold, since its
mass has to change as that of other tokens does.

Shapes: B batch, L length, D model width, K key/value heads, P head dim.
"""

from collections.abc import Iterable

import torch

from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.model.attention import TeacherAttention
from modeling_llamba.model.rotary import Rotary, rotate_keys

from .layer_data import LayerData

SEQUENCES = 2
"""Sequences on which an offset is measured."""
LEAST_KEPT = 0.75
"""Least length of the mean of a plane's unit vectors over a context: at that length, its ends just gain nothing."""
FIRST = 4
"""First tokens that are left out: keys of sinks are like no others."""


@torch.no_grad()
def key_offset(attention: TeacherAttention, inputs: Iterable[torch.Tensor], mean_rotary: Rotary) -> torch.Tensor:
    """The offset (K, P) of a layer's keys.

    Args:
        inputs: the layer's inputs (B, L, D).
        mean_rotary: see `TeacherModel.mean_rotary`.
    """
    total = 0.0
    count = 0
    for u in inputs:
        keys = attention.project_heads(u)[1][:, :, FIRST:]
        total = total + keys.sum((0, 2))
        count += keys.shape[0] * keys.shape[2]
    mean = (total / count)[None, :, None]  # (1, K, 1, P)
    cos, sin, at_one = mean_rotary
    offset = rotate_keys(mean, (cos, sin))[0, :, 0]
    fast = (torch.hypot(cos, sin) < LEAST_KEPT * at_one).flatten()
    slow = attention.shape.slow if isinstance(attention, HybridAttention) else None
    if slow is not None:
        for first in (0, slow.planes):
            fast[first : first + slow.planes - slow.slow_planes] = True
    offset[:, : len(fast)].masked_fill_(fast, 0)
    return offset


def fit_key_offset(attention: TeacherAttention, data: LayerData) -> None:
    """Measure the offset of a layer's keys, in place; nothing where the layer has none."""
    if attention.key_offset is not None:
        attention.key_offset.copy_(offset_on(attention, data))


def offset_on(attention: TeacherAttention, data: LayerData) -> torch.Tensor:
    """The offset (K, P) of a layer's keys, on some sequences to fit on."""
    inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SEQUENCES]))
    return key_offset(attention, inputs, data.mean_rotary)
