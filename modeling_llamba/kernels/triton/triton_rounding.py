"""Rows of bytes (rounding.py) of vectors, and vectors of rows, in one launch of a Triton kernel each.

PyTorch's operations are two dozen launches, and a token's keys and values are so few that a GPU only waits for them.
All is in float32. One warp takes a few rows, whether there are six of them or a quarter of a million.

Shapes: P head dim, W bytes of a row.
"""

import contextlib
import functools
import math

import torch
import triton
import triton.language as tl

from ...hybrid.rounding import width_of
from ..operators import as_operator

TILE = 512  # numbers at a time, 16 of each thread
WARPS = 1
CURRENT = contextlib.nullcontext()


def on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which Triton, which launches on the current device, launches on that of a tensor."""
    if t.device.index == torch.cuda.current_device():
        return CURRENT
    return torch.cuda.device(t.device)


@as_operator
def encode_rows(t: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Rows (..., W) uint8 of vectors (..., P)."""
    rows = empty_rows(t, bits, groups)
    launch(encode_kernel, t, rows, sizes_of(bits, t.shape[-1], groups))
    return rows


@encode_rows.register_fake
def empty_rows(t: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Memory for `encode_rows`."""
    return t.new_empty(*t.shape[:-1], width_of(bits, t.shape[-1], groups), dtype=torch.uint8)


def encode_pair(key: torch.Tensor, value: torch.Tensor, bits: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of keys and of values (..., P), as `encode_rows` makes them, in one launch."""
    rows = [empty_rows(t, bits, groups) for t in (key, value)]
    launch(encode_kernel, key, rows[0], sizes_of(bits, key.shape[-1], groups), other=(value, rows[1]))
    return tuple(rows)


@as_operator
def decode_rows(
    rows: torch.Tensor, bits: int, dim: int, groups: int, dtype: torch.dtype, still_rotated: bool
) -> torch.Tensor:
    """Vectors (..., P) of rows (..., W); as they are stored, which is multiplied by the matrix, if `still_rotated`."""
    vectors = empty_vectors(rows, bits, dim, groups, dtype, still_rotated)
    launch(decode_kernel, rows, vectors, sizes_of(bits, dim, groups), ROTATED=still_rotated)
    return vectors


@decode_rows.register_fake
def empty_vectors(rows: torch.Tensor, bits: int, dim: int, groups: int, dtype: torch.dtype, still_rotated: bool):
    """Memory for `decode_rows`."""
    return rows.new_empty(*rows.shape[:-1], dim, dtype=dtype)


def launch(
    kernel,
    source: torch.Tensor,
    target: torch.Tensor,
    sizes: dict[str, int],
    other: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: bool,
) -> None:
    """Run a kernel over all vectors or rows of `source`, whose leading dimensions may have any strides.

    Args:
        other: a second source of this shape and type, and its target, for kernels that take two.
    """
    source, (heads, length, *strides) = strided(source)
    count = math.prod(source.shape[:-1])
    tensors = [source, target]
    programs = (-(-count // sizes["ROWS"]),)
    if kernel is encode_kernel:
        second, (*_, a, b, c) = strided(source if other is None else other[0])
        tensors += [second, target if other is None else other[1], a, b, c]
        programs = *programs, 1 if other is None else 2
    with on_device_of(source):
        kernel[programs](*tensors, count, heads, length, *strides, **sizes, **options, num_warps=WARPS)


def strided(t: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor (batch, heads, length, .) or its copy, with its heads, its length, and three strides."""
    if t.ndim > 4 or t.stride(-1) != 1:
        t = t.contiguous().view(-1, t.shape[-1])
    return t, (*(1, 1, *t.shape[:-1])[-2:], *(0, 0, 0, *t.stride()[:-1])[-3:])


@functools.cache
def sizes_of(bits: int, dim: int, groups: int) -> dict[str, int]:
    """The constants of both kernels."""
    dims = max(triton.next_power_of_2(dim), 16)
    constants = {"P": dim, "PART": dim & -dim, "BITS": bits, "GROUPS": groups}
    constants["WIDTH"] = width_of(bits, dim, groups)
    return constants | {"DIMS": dims, "ROWS": max(TILE // dims, 1)}


@triton.jit
def rotated(t, PART: tl.constexpr):
    """Vectors (..., DIMS) times the matrix `hadamard` of rounding.py, of which PART is the size of a block."""
    for bit in tl.static_range(16):
        if 1 << bit < PART:  # sums and differences of all numbers whose places differ in this bit alone
            pairs = tl.reshape(t, [t.numel // (2 << bit), 2, 1 << bit])
            sign = 1.0 - 2.0 * tl.arange(0, 2)[None, :, None]
            sums = tl.sum(pairs, axis=1, keep_dims=True)
            differences = tl.sum(pairs * sign, axis=1, keep_dims=True)
            t = tl.reshape(tl.where(sign > 0, sums, differences), t.shape)
    return t / tl.sqrt(PART + 0.0)


@triton.jit
def numbers(row, visible, d, in_d, P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Vectors (columns, DIMS), still rotated, of the rows that begin at these pointers; see rounding.py."""
    in_tile = visible[:, None] & in_d[None, :]
    scales = row.to(tl.pointer_type(tl.float16))
    if GROUPS == 1:
        scale = tl.load(scales, mask=visible, other=0.0)[:, None]
    else:
        scale = tl.load(scales[:, None] + (d // (P // GROUPS))[None, :], mask=in_tile, other=0.0)
    first = row[:, None] + 2 * GROUPS
    if BITS == 8:
        code = tl.load(first + d[None, :], mask=in_tile, other=0)
    elif BITS == 6:
        QUARTER: tl.constexpr = P // 4
        upper = in_tile & (d < 3 * QUARTER)[None, :]
        cut = in_tile & (d >= 3 * QUARTER)[None, :]
        i = d - 3 * QUARTER
        code = tl.load(first + d[None, :], mask=upper, other=0).to(tl.int32) & 252
        for part in tl.static_range(3):
            bits = tl.load(first + part * QUARTER + i[None, :], mask=cut, other=0).to(tl.int32) & 3
            code = code | (bits << (6 - 2 * part))
    else:
        WIDTH: tl.constexpr = P * BITS // 8
        byte = tl.load(first + (d % WIDTH)[None, :], mask=in_tile, other=0).to(tl.int32)
        code = (byte << (8 - BITS - BITS * (d // WIDTH))[None, :]) & (256 - (1 << (8 - BITS)))
    signed = code.to(tl.uint8).to(tl.int8, bitcast=True)
    return signed.to(tl.float32) * scale.to(tl.float32)


@triton.jit
def held_vectors(row, visible, d, in_d, P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Vectors (columns, DIMS), still rotated, of the rows that begin at these pointers."""
    if BITS == 16:
        vectors = tl.load(row[:, None] + d[None, :], mask=visible[:, None] & in_d[None, :], other=0.0)
    else:
        vectors = numbers(row, visible, d, in_d, P, BITS, GROUPS)
    return vectors.to(tl.float32)


@triton.jit
def taken(t, which, ROWS: tl.constexpr):
    """Take from each row of a tile (ROWS, .) the entries with these numbers."""
    return tl.gather(t, tl.broadcast_to(which[None, :], [ROWS, which.shape[0]]), axis=1)


@triton.jit
def start_of(row, heads, length, batch_stride, head_stride, place_stride):
    """Offset of each vector in a tensor (batch, heads, length, .) with these strides."""
    head = row // length
    return head // heads * batch_stride + head % heads * head_stride + row % length * place_stride


@triton.jit(do_not_specialize=["count", "heads", "length"])
def encode_kernel(
    vectors, rows, other, other_rows, other_batch, other_head, other_place,
    count, heads, length, batch_stride, head_stride, place_stride,
    P: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round some vectors; see rounding.py for the equations and for where the bits of a code stand."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < count
    d = tl.arange(0, DIMS)
    first = start_of(row, heads, length, batch_stride, head_stride, place_stride)
    if tl.program_id(1) == 1:
        first = start_of(row, heads, length, other_batch, other_head, other_place)
        vectors, rows = other, other_rows
    in_tile = there[:, None] & (d < P)[None, :]
    t = tl.load(vectors + first[:, None] + d[None, :], mask=in_tile, other=0.0).to(tl.float32)
    SIZE: tl.constexpr = DIMS if GROUPS == 1 else P // GROUPS  # numbers with one scale
    SHIFT: tl.constexpr = 1 << (8 - BITS)
    LARGEST: tl.constexpr = 128.0 - SHIFT  # code, in the upper bits of a byte
    t = tl.reshape(rotated(t, PART), [ROWS, DIMS // SIZE, SIZE])
    # of NaN and a number tl.max takes the number, and a scale would hide that a vector has become NaN
    magnitude = tl.max(tl.where(t == t, tl.abs(t), float("inf")), axis=2)
    scale = tl.math.div_rn(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32))
    scale = tl.maximum(scale, 2.0**-14 / SHIFT).to(tl.float16)  # SMALLEST_SCALE of rounding.py
    step = tl.broadcast_to(scale.to(tl.float32)[:, :, None] * SHIFT, t.shape)
    # a float32 of this size has no bits for fractions, so that the sum is rounded, halves to the even side
    whole = tl.math.div_rn(t, step) + 12582912.0 - 12582912.0
    code = tl.reshape(whole.to(tl.int32), [ROWS, DIMS])

    rows += row * WIDTH
    group = tl.arange(0, DIMS // SIZE)
    scales = rows.to(tl.pointer_type(tl.float16))[:, None] + group[None, :]
    tl.store(scales, scale, mask=there[:, None] & (group < GROUPS)[None, :])
    i = d
    if BITS == 8:
        byte = code
    elif BITS == 6:
        QUARTER: tl.constexpr = P // 4
        cut = taken(code, 3 * QUARTER + d % QUARTER, ROWS) >> tl.maximum(4 - 2 * (d // QUARTER), 0)[None, :]
        byte = code << 2 | cut & 3
    else:
        CODES: tl.constexpr = 8 // BITS
        i = tl.arange(0, DIMS // CODES)
        byte = tl.zeros([ROWS, DIMS // CODES], tl.int32)
        for j in tl.static_range(CODES):
            byte = byte | (taken(code, i + j * (P // CODES), ROWS) & (1 << BITS) - 1) << BITS * j
    in_row = there[:, None] & (i < P * BITS // 8)[None, :]
    tl.store(rows[:, None] + 2 * GROUPS + i[None, :], (byte & 255).to(tl.uint8), mask=in_row)


# rows of bytes are not aligned, so that nothing is gained by a kernel for each way a growing cache is laid out
@triton.jit(do_not_specialize=["rows", "count", "heads", "length", "batch_stride", "head_stride", "place_stride"])
def decode_kernel(
    rows, vectors, count, heads, length, batch_stride, head_stride, place_stride,
    P: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    DIMS: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Take the vectors out of some rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < count
    d = tl.arange(0, DIMS)
    first = start_of(row, heads, length, batch_stride, head_stride, place_stride)
    t = numbers(rows + first, there, d, d < P, P, BITS, GROUPS)
    if not ROTATED:
        t = rotated(t, PART)
    tl.store(vectors + row[:, None] * P + d[None, :], t, mask=there[:, None] & (d < P)[None, :])
