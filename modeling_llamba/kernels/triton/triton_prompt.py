"""A prompt of a hybrid layer by seven Triton kernels, in place of some 300 of a layer's 390 launches.

Without a gradient, for rows that are alike (block_layout.py), they do what lies before and behind the fused attention
to window and salient tokens. The equations are those of hybrid_attention.py, in float32; PyTorch's operations run
wherever these kernels do not.

    triton_columns.py   when each column is lost, the mask of flex_attention, and what a cache holds afterwards
    sum_kernel          what the state takes up in each chunk of blocks
    mix_kernel          chunk by chunk: the state block by block, its readout, and the gate

A state is the sum over the columns that were lost, each at its block; so it needs no list of those that hold a place.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state,
E block, S places, T columns, M mixed blocks.
"""

import torch
import triton
import triton.language as tl

from ...hybrid.block_layout import Blocks
from ...hybrid.eviction import BlockShape
from ..operators import remembered
from .triton_columns import COUNTS, Lost, padded
from .triton_step import gate_of, mass_of_query, mass_of_slow, slow_dims

CHUNK = 256
"""Tokens of a chunk, whose blocks one program mixes one after the other."""
SUM_ROWS = 32
"""Lost columns that are summed up together."""
STATE = 1024
"""Numbers of a state that one program holds."""
LARGEST = {"block": 64, "places": 128, "window": 1024, "slow dims": 128}
"""Sizes up to which the kernels were compiled: beyond, that takes minutes, or a program holds too much."""


def fits(shape: BlockShape, head_dim: int, least: int = 16) -> bool:
    """Return True for a layer of sizes that the kernels are made for, with `least` dimensions in a head."""
    slow = head_dim - 2 * (shape.slow.planes - shape.slow.slow_planes)
    sizes = {"block": shape.block, "places": shape.places, "window": shape.window, "slow dims": slow}
    return head_dim >= least and all(size <= LARGEST[name] for name, size in sizes.items())


def slice_of(dims: int, slow_dims: int) -> tuple[int, int]:
    """Sides of the part of a state that one program holds: some dimensions of values, all slow ones of keys."""
    width = padded(slow_dims)
    return max(min(padded(dims), STATE // width), 16), width


def warps_of(slow_dims: int) -> int:
    """Warps of a program whose part of the state has so many slow dimensions."""
    return 4 if slow_dims <= 64 else 8


@remembered
def numbered_slots(
    slots: int, first: int, block: int, first_column: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and column of each slot, (slots,) int32; the same in most layers."""
    number = torch.arange(slots, dtype=torch.int32, device=device)
    return number // block + first, number + first_column


def mix_blocks(
    query: torch.Tensor,
    near: torch.Tensor,
    log_mass: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lost: Lost,
    state: torch.Tensor | None,
    mass: torch.Tensor,
    scale: float,
    blocks: Blocks,
    output: torch.Tensor,
    with_features: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Mix what the state returns into the outputs of softmax attention, and write them to `output` (B, L, H', P).

    Args:
        query: (B, H', L, P). near, log_mass: (B, H', slots, P) and (B, H', slots), softmax attention of the slots.
        keys, values: (B, K, T, P), the columns. state: (B, K, P + 1, N + 1) before the first block, or None for zero.
        mass, scale: as in `mix_one` of triton_step.py.

    Returns:
        The features (B, L', 3 H' P) of the mixed tokens, None unless asked for, and the state while the block of the
        last token is open.
    """
    batch, heads, _, P = query.shape
    kv_heads, columns = keys.shape[1:3]
    planes, slow_planes = blocks.shape.slow
    slow = P - 2 * (planes - slow_planes)
    per_chunk = max(CHUNK // blocks.shape.block, 1)
    chunks = triton.cdiv(blocks.mixed, per_chunk)
    features = None
    if with_features:
        features = output.new_empty(batch, blocks.new_tokens, 3 * heads * P)
    if keys.dtype != values.dtype:  # under autocast rotated keys are in float32
        keys, values = keys.float(), values.float()
    sums = torch.empty(batch, kv_heads, chunks, P + 1, slow + 1, dtype=torch.float32, device=query.device)
    final = torch.empty_like(sums[:, :, 0])
    slice_dims, slow_dims = slice_of(P, slow)
    slices = triton.cdiv(P, slice_dims)
    warps = warps_of(slow_dims)
    query, near, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, near, keys, values))
    mass = mass.contiguous()
    if state is not None:
        state = state.contiguous()
    sizes = kv_heads, P, slow, planes, slow_planes, per_chunk, slice_dims, slow_dims
    sum_kernel[(chunks, batch * kv_heads, slices)](
        keys, values, lost.order, lost.bounds, state, sums, columns, blocks.mixed,
        *keys.stride()[:3], *values.stride()[:3], state is not None, *sizes, SUM_ROWS,
        num_warps=warps,
    )  # fmt: skip
    sums.cumsum_(2)  # of the chunks before each
    mix_kernel[(chunks, batch * kv_heads, slices)](
        query, near, log_mass, keys, values, lost.order, lost.bounds, sums, mass, output, features, final, scale,
        columns, blocks.mixed, blocks.first, blocks.offset, blocks.length, blocks.last - blocks.first,
        *query.stride()[:3], *near.stride()[:3], *log_mass.stride(), *keys.stride()[:3], *values.stride()[:3],
        with_features, heads // kv_heads, blocks.shape.block, *sizes, padded(P), padded(blocks.shape.block),
        num_warps=warps,
    )  # fmt: skip
    return features, final


@triton.jit(do_not_specialize=COUNTS)
def sum_kernel(
    keys, values, order, bounds, state, sums, columns, mixed,
    key_row, key_head, key_column, value_row, value_head, value_column, HAS_STATE: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr,
    PER_CHUNK: tl.constexpr, SLICE: tl.constexpr, SLOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums over the columns that are lost in the chunk before this one, for the first chunk the state at first: a
    cumulative sum makes them the state before each chunk."""
    chunk, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv = at // K, at % K
    d, slow = tl.program_id(2) * SLICE + tl.arange(0, SLICE), tl.arange(0, SLOW)
    in_d, in_slow = d < P, slow < N
    of_slow = slow_dims(slow, PLANES, SLOW_PLANES)
    cells, in_cells = d[:, None] * (N + 1) + 1 + slow[None, :], in_d[:, None] & in_slow[None, :]
    total = tl.zeros([SLICE, SLOW], tl.float32)
    of_values, of_keys, count = tl.zeros([SLICE], tl.float32), tl.zeros([SLOW], tl.float32), 0.0
    bounds += b * (mixed + 1)
    sums += (at * tl.num_programs(0) + chunk) * (P + 1) * (N + 1)
    if chunk == 0:
        if HAS_STATE:
            state += at * (P + 1) * (N + 1)
            total = tl.load(state + cells, mask=in_cells, other=0.0)
            of_values = tl.load(state + d * (N + 1), mask=in_d, other=0.0)
            of_keys = tl.load(state + P * (N + 1) + 1 + slow, mask=in_slow, other=0.0)
            count = tl.load(state + P * (N + 1))
    else:
        begin = tl.load(bounds + (chunk - 1) * PER_CHUNK)
        end = tl.load(bounds + chunk * PER_CHUNK)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)
            exists = row < end
            column = tl.load(order + b * columns + row, mask=exists, other=0)[:, None]
            k = tl.load(keys + b * key_row + kv * key_head + column * key_column + of_slow[None, :],
                        mask=exists[:, None] & in_slow[None, :], other=0.0)  # fmt: skip
            v = tl.load(values + b * value_row + kv * value_head + column * value_column + d[None, :],
                        mask=exists[:, None] & in_d[None, :], other=0.0)  # fmt: skip
            total = tl.dot(tl.trans(v), k, total, input_precision="tf32x3")
            of_values += tl.sum(v.to(tl.float32), axis=0)
            of_keys += tl.sum(k.to(tl.float32), axis=0)
        count = (end - begin).to(tl.float32)
    tl.store(sums + cells, total, mask=in_cells)
    tl.store(sums + d * (N + 1), of_values, mask=in_d)
    tl.store(sums + P * (N + 1) + 1 + slow, of_keys, mask=in_slow)
    tl.store(sums + P * (N + 1), count)


@triton.jit(do_not_specialize=COUNTS)
def mix_kernel(
    query, near, log_mass, keys, values, order, bounds, sums, mass, output, features, final, scale,
    columns, mixed, first, offset, length, last,
    query_row, query_head, query_token, near_row, near_head, near_slot, mass_row, mass_head, mass_slot,
    key_row, key_head, key_column, value_row, value_head, value_column,
    FEATURES: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr,
    PER_CHUNK: tl.constexpr, SLICE: tl.constexpr, SLOW: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of blocks of one key/value head of one row."""
    chunk, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv = at // K, at % K
    d, slow = tl.program_id(2) * SLICE + tl.arange(0, SLICE), tl.arange(0, SLOW)
    in_d, in_slow = d < P, slow < N
    of_slow = slow_dims(slow, PLANES, SLOW_PLANES)
    every_d = tl.arange(0, DIMS)
    cells, in_cells = d[:, None] * (N + 1) + 1 + slow[None, :], in_d[:, None] & in_slow[None, :]
    sums += (at * tl.num_programs(0) + chunk) * (P + 1) * (N + 1)
    total = tl.load(sums + cells, mask=in_cells, other=0.0)
    of_values = tl.load(sums + d * (N + 1), mask=in_d, other=0.0)
    of_keys = tl.load(sums + P * (N + 1) + 1 + slow, mask=in_slow, other=0.0)
    count = tl.load(sums + P * (N + 1))
    bounds += b * (mixed + 1)
    order += b * columns
    keys += b * key_row + kv * key_head
    values += b * value_row + kv * value_head
    final += at * (P + 1) * (N + 1)
    rows = tl.arange(0, ROWS)  # of a block: the columns it loses, and its queries
    for block in range(chunk * PER_CHUNK, tl.minimum((chunk + 1) * PER_CHUNK, mixed)):
        begin = tl.load(bounds + block)
        end = tl.load(bounds + block + 1)
        row = begin + rows
        exists = row < end
        column = tl.load(order + row, mask=exists, other=0)[:, None]
        k = tl.load(keys + column * key_column + of_slow[None, :],
                    mask=exists[:, None] & in_slow[None, :], other=0.0)  # fmt: skip
        v = tl.load(values + column * value_column + d[None, :],
                    mask=exists[:, None] & in_d[None, :], other=0.0)  # fmt: skip
        total = tl.dot(tl.trans(v), k, total, input_precision="tf32x3")
        of_values += tl.sum(v.to(tl.float32), axis=0)
        of_keys += tl.sum(k.to(tl.float32), axis=0)
        count += (end - begin).to(tl.float32)
        if block == last:
            tl.store(final + cells, total, mask=in_cells)
            tl.store(final + d * (N + 1), of_values, mask=in_d)
            tl.store(final + P * (N + 1) + 1 + slow, of_keys, mask=in_slow)
            tl.store(final + P * (N + 1), count)
        least = tl.maximum(count, 1.0)
        value_mean, key_mean = of_values / least, of_keys / least
        covariance = total / least - value_mean[:, None] * key_mean[None, :]
        token = first * E + block * E + rows - offset
        real = (rows < E) & (token >= 0) & (token < length)
        in_tile = real[:, None] & in_d[None, :]
        for r in range(R):
            head = kv * R + r
            of_head = mass + head * (2 + N - SLOW_PLANES + P - PLANES)
            of_query = query + b * query_row + head * query_head
            place = token[:, None] * query_token
            q = tl.load(of_query + place + every_d[None, :], mask=real[:, None] & (every_d < P)[None, :], other=0.0)
            q = q.to(tl.float32) * scale
            slow_q = tl.load(of_query + place + of_slow[None, :], mask=real[:, None] & in_slow[None, :], other=0.0)
            slow_q = slow_q.to(tl.float32) * scale
            far_mass = mass_of_query(of_head, count, q, every_d, P, N, PLANES, SLOW_PLANES)
            far_mass += mass_of_slow(of_head, slow_q, key_mean, slow, N, SLOW_PLANES)
            far = tl.dot(slow_q, tl.trans(covariance), input_precision="tf32x3") + value_mean[None, :]
            slot = block * E + rows
            near_mass = tl.load(log_mass + b * mass_row + head * mass_head + slot * mass_slot, mask=real, other=0.0)
            gate = gate_of(far_mass, near_mass.to(tl.float32), count)[:, None]
            y = tl.load(near + b * near_row + head * near_head + slot[:, None] * near_slot + d[None, :],
                        mask=in_tile, other=0.0).to(tl.float32)  # fmt: skip
            place = (token[:, None] * K * R) * P + d[None, :]
            tl.store(output + (b * length * K * R + head) * P + place, y + gate * (far - y), mask=in_tile)
            if FEATURES:
                place = (token - first * E).to(tl.int64)[:, None] * (K * R * 3 * P) + d[None, :]
                of_features = features + (b * (length - first * E) * K * R + head) * (3 * P)
                tl.store(of_features + place, gate * y, mask=in_tile)
                tl.store(of_features + P + place, gate * value_mean[None, :], mask=in_tile)
                tl.store(of_features + 2 * P + place, gate * far, mask=in_tile)
