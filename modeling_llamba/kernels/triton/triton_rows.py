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
from .triton_rounding import held_vectors, on_device_of, rotated
from .triton_step import tile_of

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
    keys, values = (t if t.stride()[2:] == (t.shape[3], 1) else t.contiguous() for t in (keys, values))
    bias = None if bias is None else bias.contiguous()
    strides = [(*t.stride()[:2], t.shape[3]) for t in (keys, values)]
    of_rows = [(Rounding(bits, query.shape[3]), t) for bits, t in ((key_bits, keys), (value_bits, values))]
    return _attend(query, of_rows, strides, keys.shape[1], keys.shape[2], bias, scale, softcap)


@attend_to_rows.register_fake
def _(query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P)


def attend_to_pages(
    query: torch.Tensor,
    pages: torch.Tensor,
    firsts: tuple[int, int],
    kv_heads: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    block: int,
    scale: float,
    softcap: float,
    roundings: tuple[Rounding, Rounding],
) -> torch.Tensor:
    """Outputs (B, 1, H, P) of attention of queries (B, H, 1, P) to rows in pages, at addresses that stay.

    Args:
        pages: (pages, bytes), in each the rows (`block`, K, W) of keys from byte `firsts[0]` on, and of values from
            byte `firsts[1]` on. table: (B, most pages), those of each row of the batch. lengths: (B,), its tokens.
    """
    typed, strides = [], []
    for rounding, first in zip(roundings, firsts, strict=True):
        rows = pages if rounding.rounds else pages.view(query.dtype)
        width = rounding.width(query.dtype) // rows.element_size()
        typed.append((rounding, rows.view(-1)[first // rows.element_size() :]))
        strides.append((rows.stride(0), width, kv_heads * width))
    in_pages = table.contiguous(), lengths, block
    return _attend(query, typed, strides, kv_heads, table.shape[1] * block, None, scale, softcap, in_pages)


def _attend(query, of_rows, strides, kv_heads, columns, bias, scale, softcap, in_pages=None) -> torch.Tensor:
    """Launch both kernels: see `attend_to_rows`.

    Args:
        of_rows: rounding and rows, of keys and of values. strides: for each, from one row of the batch to the next, or
            from one page; from one head to the next, from one token. in_pages: table, lengths and block, or None.
    """
    batch, heads, _, P = query.shape
    span = max(SPAN, -(-columns // MOST_PARTS))
    parts = -(-columns // span)
    part_output = query.new_empty(batch * heads, parts, P, dtype=torch.float32)
    part_mass = query.new_empty(batch * heads, parts, 2, dtype=torch.float32)
    output = query.new_empty(batch, 1, heads, P)
    dims, tile = tile_of(P, columns)
    (of_keys, keys), (of_values, values) = of_rows
    table, lengths, block = (query, query, 1) if in_pages is None else in_pages
    with on_device_of(query):
        attend_kernel[(batch * heads, parts)](
            query.contiguous(), keys, values, query if bias is None else bias, table, lengths, part_output, part_mass,
            scale, softcap, columns, span, block, columns // block, *strides[0][:2], *strides[1][:2],
            kv_heads, heads // kv_heads, P, rotated_part(P, of_keys.bits), strides[0][2], strides[1][2], of_keys.bits,
            of_values.bits, of_keys.groups, of_values.groups, bias is not None, in_pages is not None, dims,
            min(tile, SPAN), num_warps=WARPS,
        )  # fmt: skip
        combine_kernel[(batch * heads,)](
            part_output, part_mass, output, parts, P, rotated_part(P, of_values.bits), dims, MOST_PARTS,
            num_warps=WARPS,
        )  # fmt: skip
    return output


@triton.jit
def attend_kernel(
    query, keys, values, bias, table, lengths, part_output, part_mass, scale, softcap, columns, span, block, most,
    key_row, key_head, value_row, value_head,
    K: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PART: tl.constexpr,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    BIAS: tl.constexpr, PAGED: tl.constexpr, DIMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One query head of one row of the batch, one part of the columns.

    Of pages, `key_row` and `value_row` lead from one page to the next.
    """
    at = tl.program_id(0)
    part = tl.program_id(1)
    b = (at // (K * R)).to(tl.int64)
    kv = (at // R % K).to(tl.int64)
    keys += kv * key_head
    values += kv * value_head
    d = tl.arange(0, DIMS)
    in_d = d < P
    q = rotated(tl.load(query + at * P + d, mask=in_d, other=0.0).to(tl.float32) * scale, PART)
    end = tl.minimum((part + 1) * span, columns)
    if PAGED:
        end = tl.minimum(end, tl.load(lengths + b).to(tl.int32))
    highest, total, output = -1e30, 0.0, tl.zeros([DIMS], tl.float32)
    for first in range(part * span, end, COLUMNS):
        column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        visible = column < end
        row = b
        token = column
        if PAGED:
            row = tl.load(table + b * most + column // block, mask=visible, other=0).to(tl.int64)
            token = column % block
        k = held_vectors(keys + row * key_row + token * KEY_TOKEN, visible, d, in_d, P, KEY_BITS, KEY_GROUPS)
        score = tl.sum(k * q[None, :], axis=1)
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        if BIAS:
            added = tl.load(bias + b * columns + column, mask=visible, other=0.0).to(tl.float32)
            visible = visible & (added > -1e30)
            score += added
        above = tl.maximum(highest, tl.max(tl.where(visible, score, -1e30)))
        share, shrink = tl.where(visible, tl.exp(score - above), 0.0), tl.exp(highest - above)
        at_value = values + row * value_row + token * VALUE_TOKEN
        v = held_vectors(at_value, visible, d, in_d, P, VALUE_BITS, VALUE_GROUPS)
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
