"""Offsets of keys, which are taken off before keys are rounded.

Softmax does not notice it, so nothing is added again, and nothing is computed when keys are read. What a key has in
common with all others of its head is then not rounded. Of a vector that is the same before rotation, planes that turn
slowly keep much over a context; the offset is its mean over the context's positions. Planes that turn farther have no
offset, which would be wrong at both ends of a context. Nor have those that a state does not see, since its mass has to
change as that of other tokens does.

Shapes: B batch, L length, D model width, K key/value heads, P head dim.
"""

from collections.abc import Iterable

import torch

from modeling_llamba.attention import TeacherAttention
from modeling_llamba.rotary import Rotary, rotate_keys

from .layer_data import LayerData

SEQUENCES = 2
"""Sequences on which an offset is measured."""
LEAST_KEPT = 0.75
"""Least length of the mean of a plane's unit vectors over a context: at that length, its ends just gain nothing."""
FIRST = 4
"""First tokens that are left out: keys of sinks are like no others."""


@torch.no_grad()
def key_offset(attention: TeacherAttention, inputs: Iterable[torch.Tensor], positions: Rotary) -> torch.Tensor:
    """The offset (K, P) of a layer's keys.

    Args:
        inputs: the layer's inputs (B, L, D).
        positions: rotary embedding (1, L', .) of the positions of a context.
    """
    total = 0.0
    count = 0
    for u in inputs:
        keys = attention.project_heads(u)[1][:, :, FIRST:]
        total = total + keys.sum((0, 2))
        count += keys.shape[0] * keys.shape[2]
    mean = (total / count)[None, :, None]  # (1, K, 1, P)
    cos, sin = (t.mean(1, keepdim=True) for t in positions[:2])
    offset = rotate_keys(mean, (cos, sin))[0, :, 0]
    turned = cos.shape[-1] // 2
    fast = torch.hypot(cos, sin).flatten() < LEAST_KEPT
    of_no_state = turned - max(turned // 2, 1)
    for first in (0, turned):
        fast[first : first + of_no_state] = True
    offset[:, : 2 * turned].masked_fill_(fast, 0)
    return offset


def fit_key_offset(attention: TeacherAttention, data: LayerData) -> None:
    """Measure the offset of a layer's keys, in place; nothing where the layer has none."""
    if attention.key_offset is not None:
        attention.key_offset.copy_(offset_on(attention, data))


def offset_on(attention: TeacherAttention, data: LayerData) -> torch.Tensor:
    """The offset (K, P) of a layer's keys, on some sequences to fit on."""
    inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SEQUENCES]))
    return key_offset(attention, inputs, data.rotary if data.positions is None else data.positions)
