"""Softmax attention of one token to keys and values in rows of bytes, which Triton kernels unpack in registers.

PyTorch's operations (rounding.py) would write all keys and values of a cache out as numbers at every token, which
takes more time than reading them in 16 bits. Here a program reads a part of the columns of one head, and a second
kernel puts the parts together: two launches, whatever the number of columns. All in float32; where rows are rounded
the query is rotated before, and the output after.

Shapes: B batch, H heads, K key/value heads, R heads per key/value head, P head dim, T columns, W bytes of a row.
"""

import torch
import triton
import triton.language as tl

from ...hybrid.rounding import WHOLE, Rounding
from ..operators import as_operator
from .triton_rounding import numbers
from .triton_step import on_device_of, rotated, tile_of

SPAN, MOST_PARTS = 256, 64
"""Columns of a part at least, and the largest number of parts."""
WARPS = 8


def rotated_part(dim: int, bits: int) -> int:
    """Size of a block of the matrix that vectors of so many bits are multiplied by; 1 where they are not."""
    if bits == WHOLE:
        return 1
    return dim & -dim


@as_operator
def attend_to_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
    key_bits: int,
    value_bits: int,
) -> torch.Tensor:
    """Outputs (B, 1, H, P) of attention of queries (B, H, 1, P).

    Args:
        keys, values: rows (B, K, T, W), each head's one after the other.
        bias: (B, T) float, to be added to the scores, -inf where a column is hidden; None where none is.
        scale, softcap: of the scores, softcap 0 for none.
    """
    batch, heads, _, P = query.shape
    kv_heads, columns = keys.shape[1:3]
    span = max(SPAN, -(-columns // MOST_PARTS))
    parts = -(-columns // span)
    keys, values = (t if t.stride()[2:] == (t.shape[3], 1) else t.contiguous() for t in (keys, values))
    part_output = query.new_empty(batch * heads, parts, P, dtype=torch.float32)
    part_mass = query.new_empty(batch * heads, parts, 2, dtype=torch.float32)
    output = query.new_empty(batch, 1, heads, P)
    has_bias = bias is not None
    dims, tile = tile_of(P, columns)
    with on_device_of(query):
        attend_kernel[(batch * heads, parts)](
            query.contiguous(), keys, values, bias.contiguous() if has_bias else query, part_output, part_mass,
            scale, softcap, columns, span, *keys.stride()[:2], *values.stride()[:2],
            kv_heads, heads // kv_heads, P, rotated_part(P, key_bits), keys.shape[3], values.shape[3], key_bits,
            value_bits, Rounding(key_bits, P).groups, Rounding(value_bits, P).groups, has_bias, dims, min(tile, SPAN),
            num_warps=WARPS,
        )  # fmt: skip
        combine_kernel[(batch * heads,)](
            part_output, part_mass, output, parts, P, rotated_part(P, value_bits), dims, MOST_PARTS, num_warps=WARPS
        )
    return output


@attend_to_rows.register_fake
def _(query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P)


@triton.jit
def held_vectors(row, visible, d, in_d, P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Vectors (columns, DIMS), still rotated, of the rows that begin at these pointers."""
    if BITS == 16:
        vectors = tl.load(row[:, None] + d[None, :], mask=visible[:, None] & in_d[None, :], other=0.0)
    else:
        vectors = numbers(row, visible, d, in_d, P, BITS, GROUPS)
    return vectors.to(tl.float32)


@triton.jit
def attend_kernel(
    query, keys, values, bias, part_output, part_mass, scale, softcap, columns, span,
    key_row, key_head, value_row, value_head,
    K: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PART: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, BIAS: tl.constexpr,
    DIMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One query head of one row of the batch, one part of the columns."""
    at = tl.program_id(0)
    part = tl.program_id(1)
    b = (at // (K * R)).to(tl.int64)
    kv = (at // R % K).to(tl.int64)
    keys += b * key_row + kv * key_head
    values += b * value_row + kv * value_head
    d = tl.arange(0, DIMS)
    in_d = d < P
    q = rotated(tl.load(query + at * P + d, mask=in_d, other=0.0).to(tl.float32) * scale, PART)
    end = tl.minimum((part + 1) * span, columns)
    highest, total, output = -1e30, 0.0, tl.zeros([DIMS], tl.float32)
    for first in range(part * span, end, COLUMNS):
        column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        visible = column < end
        k = held_vectors(keys + column * KEY_WIDTH, visible, d, in_d, P, KEY_BITS, KEY_GROUPS)
        score = tl.sum(k * q[None, :], axis=1)
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        if BIAS:
            added = tl.load(bias + b * columns + column, mask=visible, other=0.0).to(tl.float32)
            visible = visible & (added > -1e30)
            score += added
        above = tl.maximum(highest, tl.max(tl.where(visible, score, -1e30)))
        share, shrink = tl.where(visible, tl.exp(score - above), 0.0), tl.exp(highest - above)
        v = held_vectors(values + column * VALUE_WIDTH, visible, d, in_d, P, VALUE_BITS, VALUE_GROUPS)
        output = output * shrink + tl.sum(share[:, None] * v, axis=0)
        highest, total = above, total * shrink + tl.sum(share)
    place = at * tl.num_programs(1) + part
    tl.store(part_output + place * P + d, output, mask=in_d)
    tl.store(part_mass + 2 * place, highest)
    tl.store(part_mass + 2 * place + 1, total)


@triton.jit
def combine_kernel(
    part_output, part_mass, output, parts,
    P: tl.constexpr, PART: tl.constexpr, DIMS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """All parts of one query head of one row of the batch."""
    at = tl.program_id(0)
    part = tl.arange(0, MOST)
    d = tl.arange(0, DIMS)
    in_d = d < P
    place = at * parts + part
    highest = tl.load(part_mass + 2 * place, mask=part < parts, other=-1e30)
    total = tl.load(part_mass + 2 * place + 1, mask=part < parts, other=0.0)
    share = tl.exp(highest - tl.max(highest))
    in_tile = (part < parts)[:, None] & in_d[None, :]
    found = tl.load(part_output + place[:, None] * P + d[None, :], mask=in_tile, other=0.0)
    # 1 at least, of the highest score, unless every column is hidden
    mixed = tl.sum(share[:, None] * found, axis=0) / tl.maximum(tl.sum(share * total), 1.0)
    tl.store(output + at * P + d, rotated(mixed, PART), mask=in_d)
