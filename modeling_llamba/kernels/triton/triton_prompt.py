"""A prompt of a hybrid layer by six Triton kernels, in place of some 300 of a layer's 390 launches.

Without a gradient, for rows that are alike (block_layout.py), they do what lies before and behind the fused attention
to window and salient tokens. The equations are those of hybrid_attention.py, in float32; PyTorch's operations run
wherever these kernels do not.

    leave_kernel   the block at which each column is no longer visible: a column of the window is not once S columns
                   that left are more salient, which is counted for each column alone
    mask_kernel    the tiles of columns visible to each tile of queries, for flex_attention
    sum_kernel     what the state takes up in each chunk of blocks
    mix_kernel     chunk by chunk: the state block by block, its readout, and the gate
    place_kernel   the columns that hold a place at the end
    hold_kernel    what a cache holds afterwards

A state is the sum over the columns that were lost, each at its block; so it needs no list of those that hold a place.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state,
E block, S places, T columns, M mixed blocks.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from ...hybrid.block_layout import Blocks
from ...hybrid.eviction import BlockShape, Held, NewTokens
from ..flex import FLEX_BLOCK
from .triton_step import slow_dims, sortable

CHUNK = 256
"""Tokens of a chunk, whose blocks one program mixes one after the other."""
TILE = FLEX_BLOCK
"""Queries and columns of a tile of flex_attention's mask."""
MASK_TILES = 16
"""Tiles of columns that are looked at together for the mask."""
COUNTS = (
    "columns", "leaving", "first_leaves", "absent", "skipped", "left", "last", "held", "begin", "end", "first_new",
    "tiles", "slots", "first", "first_column", "mixed", "offset", "length",
)  # fmt: skip
"""Arguments of kernels whose values differ from prompt to prompt: Triton would compile anew for some of them."""
HOLD_COLUMNS = 16
"""Columns that are copied together."""
SUM_ROWS = 32
"""Lost columns that are summed up together."""
STATE = 1024
"""Numbers of a state that one program holds."""
LARGEST = {"block": 64, "places": 128, "window": 1024, "slow dims": 128}
"""Sizes up to which the kernels were compiled: beyond, that takes minutes, or a program holds too much."""


class Lost(NamedTuple):
    """Columns in the order in which they are lost.

    until (B, T) int32: the first block to which a column is visible neither in a window nor in a place; 0 without a
    token. order (B, T): columns sorted by it. bounds (B, M + 1): where in `order` those begin that are lost at each
    mixed block, and where the last of them end.
    """

    until: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor


def fits(shape: BlockShape, head_dim: int, least: int = 16) -> bool:
    """Return True for a layer of sizes that the kernels are made for, with `least` dimensions in a head."""
    slow = head_dim - 2 * (shape.slow.planes - shape.slow.slow_planes)
    sizes = {"block": shape.block, "places": shape.places, "window": shape.window, "slow dims": slow}
    return head_dim >= least and all(size <= LARGEST[name] for name, size in sizes.items())


def padded(size: int) -> int:
    """Round a size up to a side of a tile."""
    return max(triton.next_power_of_2(size), 16)


def slice_of(dims: int, slow_dims: int) -> tuple[int, int]:
    """Sides of the part of a state that one program holds: some dimensions of values, all slow ones of keys."""
    width = padded(slow_dims)
    return max(min(padded(dims), STATE // width), 16), width


def warps_of(slow_dims: int) -> int:
    """Warps of a program whose part of the state has so many slow dimensions."""
    return 4 if slow_dims <= 64 else 8


def lose_columns(salience: torch.Tensor, blocks: Blocks) -> Lost:
    """Find when each column is lost, from the salience (B, T) in float32, -inf in columns without a token."""
    batch, columns = salience.shape
    until = torch.empty(batch, columns, dtype=torch.int32, device=salience.device)
    candidates = max(triton.next_power_of_2(max(blocks.shape.places, blocks.shape.block)), 16)
    groups = 1 + triton.cdiv(columns - blocks.shape.places, blocks.shape.block)
    leave_kernel[(groups, batch)](
        salience, until, columns, blocks.leaving, blocks.blocks - blocks.leaving, blocks.context - blocks.before,
        blocks.shape.places, blocks.shape.block, candidates, TILE,
    )  # fmt: skip
    ordered, order = until.sort(dim=1, stable=True)
    numbers = torch.arange(blocks.first, blocks.blocks + 1, dtype=torch.int32, device=until.device).clamp_(min=1)
    bounds = torch.searchsorted(ordered, numbers.expand(batch, -1).contiguous(), out_int32=True)
    return Lost(until, order, bounds)


def last_places(salience: torch.Tensor, lost: Lost, blocks: Blocks) -> torch.Tensor:
    """The columns (B, S) that hold a place while the block of the last token is open, as in `Blocks.held_after`."""
    batch, columns = salience.shape
    S, E = blocks.shape.places, blocks.shape.block
    left = S + max(blocks.last - (blocks.blocks - blocks.leaving) + 1, 0) * E  # columns that have left the window
    # what is still visible is lost last
    candidates = columns - (left - S)
    places = lost.order.new_empty(batch, S)
    if S > 0:
        place_kernel[(batch,)](
            salience, lost.until, lost.order, places, columns, left - S, left, blocks.last, S,
            triton.next_power_of_2(candidates),
        )  # fmt: skip
    return places


def hold(
    held: Held | None,
    new: NewTokens,
    salience: torch.Tensor,
    places: torch.Tensor,
    state: torch.Tensor,
    blocks: Blocks,
) -> Held:
    """`Blocks.held_after` by one kernel."""
    batch, kv_heads, _, key_width = new.keys.shape
    value_width = new.values.shape[3]
    shape = blocks.shape
    S, columns = shape.places, shape.places + shape.window
    keys = new.keys.new_empty(batch, kv_heads, columns, key_width)
    values = new.values.new_empty(batch, kv_heads, columns, value_width)
    ranks = torch.empty(batch, columns, dtype=salience.dtype, device=salience.device)
    if held is None:
        past_keys, past_values, seen = keys, values, new.index.new_full((batch,), blocks.length)
    else:
        past_keys, past_values, seen = held.keys, held.values, held.seen + blocks.length
    new_keys, new_values = (t if t.stride(-1) == 1 else t.contiguous() for t in new[:2])
    hold_kernel[(triton.cdiv(columns, HOLD_COLUMNS), batch * kv_heads)](
        past_keys.contiguous(), past_values.contiguous(), new_keys, new_values, salience, places, keys, values, ranks,
        salience.shape[1], columns, blocks.window_columns.start, blocks.window_columns.stop,
        blocks.context - blocks.before, S + blocks.context + blocks.offset,
        *new_keys.stride()[:3], *new_values.stride()[:3], kv_heads, S, key_width, value_width,
        triton.next_power_of_2(key_width), triton.next_power_of_2(value_width), HOLD_COLUMNS,
    )  # fmt: skip
    return Held(keys, values, ranks, state, seen)


def in_tiles(query: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Queries (B, H', L, P) of the blocks that are mixed, (B, H', slots, P) in whole tiles."""
    room = -(blocks.offset + blocks.new_tokens) % TILE
    return F.pad(query[:, :, blocks.length - blocks.new_tokens :], (0, 0, blocks.offset, room))


@functools.lru_cache(maxsize=64)
def numbered_slots(
    slots: int, first: int, block: int, first_column: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and column of each slot, (slots,) int32; the same in most layers."""
    number = torch.arange(slots, dtype=torch.int32, device=device)
    return number // block + first, number + first_column


def visible_tiles(until: torch.Tensor, slots: int, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (B, 1, queries' tiles) and indices (B, 1, queries' tiles, columns' tiles) of the tiles of columns that
    are visible to so many slots, in the terms of flex_attention's BlockMask."""
    batch, columns = until.shape
    of_queries, of_columns = triton.cdiv(slots, TILE), triton.cdiv(columns, TILE)
    numbers = torch.empty(batch, 1, of_queries, dtype=torch.int32, device=until.device)
    indices = torch.empty(batch, 1, of_queries, of_columns, dtype=torch.int32, device=until.device)
    mask_kernel[(of_queries, batch)](
        until,
        numbers,
        indices,
        columns,
        of_columns,
        slots,
        blocks.first,
        blocks.first_column,
        blocks.shape.block,
        TILE,
        MASK_TILES,
    )
    return numbers, indices


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


@triton.jit
def more_salient(salience, other, exists, rank, column):
    """True (candidates, TILE) where these other columns are more salient, or as much and earlier."""
    others = tl.load(salience + other, mask=exists, other=float("-inf"))[None, :]
    rank = rank[:, None]
    earlier = other[None, :] < column[:, None]
    return (others > float("-inf")) & ((others > rank) | ((others == rank) & earlier))


@triton.jit(do_not_specialize=COUNTS)
def leave_kernel(
    salience, until, columns, leaving, first_leaves, absent,
    S: tl.constexpr, E: tl.constexpr, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The places that are held at first (group 0), or the columns of block `group` - 1.

    Openings of blocks count from 1: at opening i the columns of groups 0 .. i compete for the places. `lost` is
    the opening at which a column gets none or loses it, `leaving` + 1 if there is no such opening.
    """
    group = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    salience += b * columns
    until += b * columns
    i = tl.arange(0, CANDIDATES)
    tile = tl.arange(0, TILE)
    column = tl.where(group == 0, i, S + (group - 1) * E + i)
    mine = (i < tl.where(group == 0, S, E)) & (column < columns)
    rank = tl.load(salience + column, mask=mine, other=float("-inf"))
    competes = mine & (rank > float("-inf")) & (group <= leaving)
    opening = tl.maximum(group, 1)  # at which these columns compete first
    end = S + leaving * E
    competing = tl.minimum(S + opening * E, end)
    count = tl.zeros([CANDIDATES], tl.int32)
    at = competing
    while (at > 0) & (tl.max((competes & (count < S)).to(tl.int32)) > 0):
        at -= TILE
        other = at + tile
        better = more_salient(salience, other, (other >= 0) & (other < competing), rank, column)
        count += tl.sum(better.to(tl.int32), axis=1)
    holds = competes & (count < S)
    lost = tl.where(holds, leaving + 1, opening)
    at = competing
    while (at < end) & (tl.max(holds.to(tl.int32)) > 0):
        other = at + tile
        better = more_salient(salience, other, other < end, rank, column).to(tl.int32)
        more = tl.sum(((count[:, None] + tl.cumsum(better, axis=1)) < S).to(tl.int32), axis=1)
        loses = holds & (more < TILE)
        lost = tl.where(loses, (at + more - S) // E + 1, lost)
        holds = holds & (more == TILE)
        count += tl.sum(better, axis=1)
        at += TILE
    block = first_leaves - 1 + tl.where(group <= leaving, lost, group)
    exists = tl.where(group == 0, rank > float("-inf"), column - S >= absent)
    tl.store(until + column, tl.where(exists, block, 0), mask=mine)


@triton.jit(do_not_specialize=COUNTS)
def place_kernel(
    salience, until, order, places, columns, skipped, left, last,
    S: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One row: its most salient columns among the last of `order`, the first of equals first."""
    b = tl.program_id(0).to(tl.int64)
    i = skipped + tl.arange(0, CANDIDATES)
    column = tl.load(order + b * columns + i, mask=i < columns, other=0)
    holds = (i < columns) & (column < left)
    holds = holds & (tl.load(until + b * columns + column, mask=holds, other=0) > last)
    rank = tl.load(salience + b * columns + column, mask=holds, other=float("-inf")).to(tl.float32)
    holds = holds & (rank > float("-inf"))
    key = tl.sort(tl.where(holds, sortable(rank, column), -0x7FFFFFFFFFFFFFFF), descending=True)
    found = tl.where(key == -0x7FFFFFFFFFFFFFFF, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    place = tl.arange(0, CANDIDATES)
    tl.store(places + b * S + place, found, mask=place < S)


@triton.jit(do_not_specialize=COUNTS)
def hold_kernel(
    past_keys, past_values, new_keys, new_values, salience, places, keys, values, ranks,
    columns, held, begin, end, absent, first_new,
    key_row, key_head, key_token, value_row, value_head, value_token,
    K: tl.constexpr, S: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PART: tl.constexpr, VALUE_PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load some columns of the keys and values that one row holds of one key/value head."""
    at = tl.program_id(1).to(tl.int64)
    b, kv = at // K, at % K
    own = tl.program_id(0) * TILE + tl.arange(0, TILE)
    placed = tl.load(places + b * S + own, mask=own < S, other=-1).to(tl.int32)
    column = tl.where(own < S, placed, begin + own - S)
    exists = (own < held) & (column >= 0) & ((own < S) | (column < end))
    is_new = (column >= first_new)[:, None]
    past = (at * held + tl.where(column < S, column, column - absent))[:, None]
    token = (column - first_new).to(tl.int64)[:, None]
    i = tl.arange(0, KEY_PART)[None, :]
    in_tile = exists[:, None] & (i < KEY_WIDTH)
    row = tl.load(past_keys + past * KEY_WIDTH + i, mask=in_tile & ~is_new, other=0)
    new = tl.load(new_keys + b * key_row + kv * key_head + token * key_token + i, mask=in_tile & is_new, other=0)
    target = (at * held + own)[:, None]
    in_held = (own < held)[:, None]
    tl.store(keys + target * KEY_WIDTH + i, tl.where(is_new, new, row), mask=in_held & (i < KEY_WIDTH))
    i = tl.arange(0, VALUE_PART)[None, :]
    in_tile = exists[:, None] & (i < VALUE_WIDTH)
    row = tl.load(past_values + past * VALUE_WIDTH + i, mask=in_tile & ~is_new, other=0)
    new = tl.load(
        new_values + b * value_row + kv * value_head + token * value_token + i, mask=in_tile & is_new, other=0
    )
    tl.store(values + target * VALUE_WIDTH + i, tl.where(is_new, new, row), mask=in_held & (i < VALUE_WIDTH))
    if kv == 0:
        rank = tl.load(salience + b * columns + column, mask=exists, other=float("-inf"))
        tl.store(ranks + b * held + own, rank, mask=own < held)


@triton.jit(do_not_specialize=COUNTS)
def mask_kernel(
    until, numbers, indices, columns, tiles, slots, first, first_column, block,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row; indices after the last that counts are 0."""
    q, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + q
    open_first = first + q * TILE // block
    last = first_column + tl.minimum((q + 1) * TILE, slots) - 1
    indices += row * tiles
    found = 0
    for begin in range(0, tiles, TILES):
        tile = begin + tl.arange(0, TILES)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        latest = tl.max(tl.load(until + b * columns + column, mask=column < columns, other=0), axis=1)
        visible = (latest > open_first) & (tile * TILE <= last) & (tile < tiles)
        place = found + tl.cumsum(visible.to(tl.int32), axis=0) - 1
        tl.store(indices + place, tile, mask=visible)
        found += tl.sum(visible.to(tl.int32))
    for begin in range(0, tiles, TILES):
        tile = begin + tl.arange(0, TILES)
        tl.store(indices + tile, tl.zeros_like(tile), mask=(tile >= found) & (tile < tiles))
    tl.store(numbers + row, found)


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
    part = tl.where(every_d < PLANES, every_d, every_d - PLANES)  # both dimensions of a plane have one number
    slow_part = tl.where(slow < SLOW_PLANES, slow, slow - SLOW_PLANES)
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
            beta = tl.load(of_head + 2 + N - SLOW_PLANES + part, mask=every_d < P, other=0.0).to(tl.float32)
            slow_q = tl.load(of_query + place + of_slow[None, :], mask=real[:, None] & in_slow[None, :], other=0.0)
            slow_q = slow_q.to(tl.float32) * scale
            alpha = tl.load(of_head + 2 + slow_part, mask=in_slow, other=0.0).to(tl.float32)
            far_mass = tl.load(of_head).to(tl.float32) + tl.load(of_head + 1).to(tl.float32) * tl.log(least)
            far_mass += tl.sum(q * q * beta[None, :], axis=1)
            far_mass += tl.sum(slow_q * (alpha * key_mean)[None, :], axis=1)
            far = tl.dot(slow_q, tl.trans(covariance), input_precision="tf32x3") + value_mean[None, :]
            slot = block * E + rows
            near_mass = tl.load(log_mass + b * mass_row + head * mass_head + slot * mass_slot, mask=real, other=0.0)
            gate = tl.where(count > 0.5, tl.sigmoid(far_mass - near_mass.to(tl.float32)), 0.0)[:, None]
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
