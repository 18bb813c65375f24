"""The columns of a prompt by Triton kernels: when each is lost, which are visible, and which are held at the end.

    lay_kernel     keys, values and salience in columns, and queries in slots; rows of bytes become numbers
    leave_kernel   the block at which each column is no longer visible: a column of the window is not once S columns
                   that left are more salient, which is counted for each column alone
    mask_kernel    the tiles of columns visible to each tile of queries, for flex_attention
    place_kernel   the columns that hold a place at the end
    hold_kernel    what a cache holds afterwards

Shapes: B batch, L length, H' heads with a window, K key/value heads, P head dim, E block, S places, T columns, M mixed
blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...hybrid.block_layout import Blocks
from ...hybrid.eviction import Held, NewTokens
from ...hybrid.inputs import Projected
from ..flex import FLEX_BLOCK
from ..operators import remembered
from .triton_rounding import held_vectors, rotated
from .triton_step import sortable

TILE = FLEX_BLOCK
"""Queries and columns of a tile of flex_attention's mask."""
MASK_TILES = 16
"""Tiles of columns that are looked at together for the mask."""
COUNTS = (
    "columns", "leaving", "first_leaves", "absent", "skipped", "left", "last", "held", "begin", "end", "first_new",
    "tiles", "slots", "first", "first_column", "mixed", "offset", "length", "first_past",
)  # fmt: skip
"""Arguments of kernels whose values differ from prompt to prompt: Triton would compile anew for some of them."""
LAY_TILE = 2048
"""Numbers of keys, values or queries that a program lays out."""
HOLD_COLUMNS = 16
"""Columns that are copied together."""


def padded(size: int) -> int:
    """Round a size up to a side of a tile."""
    return max(triton.next_power_of_2(size), 16)


class Lost(NamedTuple):
    """Columns in the order in which they are lost.

    until (B, T) int32: the first block to which a column is visible neither in a window nor in a place; 0 without a
    token. order (B, T): columns sorted by it. bounds (B, M + 1): where in `order` those begin that are lost at each
    mixed block, and where the last of them end.
    """

    until: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor


class Columns(NamedTuple):
    """keys, values (B, K, T, P) and salience (B, T) of all columns; query (B, H', slots, P) in whole tiles."""

    keys: torch.Tensor
    values: torch.Tensor
    salience: torch.Tensor
    query: torch.Tensor


def lay_out(projected: Projected, held: Held | None, blocks: Blocks) -> Columns:
    """Lay out new tokens behind what is held, keys and values as they are rounded."""
    query, salience, key_rows, value_rows = (
        projected.query, projected.salience, projected.key_rows, projected.value_rows,
    )  # fmt: skip
    batch, heads, length, P = query.shape
    kv_heads, shape = key_rows.shape[1], blocks.shape
    of_keys, of_values = shape.key_rounding, shape.value_rounding
    slots = blocks.offset + blocks.new_tokens
    slots += -slots % TILE
    found = Columns(
        key_rows.new_empty(batch, kv_heads, blocks.columns, P, dtype=projected.key.dtype),
        value_rows.new_empty(batch, kv_heads, blocks.columns, P, dtype=projected.value.dtype),
        salience.new_empty(batch, blocks.columns),
        query.new_empty(batch, heads, slots, P),
    )
    past = (key_rows, value_rows, salience) if held is None else (t.contiguous() for t in held[:3])
    new = [t if t.stride(-1) == 1 else t.contiguous() for t in (key_rows, value_rows, query)]
    dims = padded(P)
    rows = max(LAY_TILE // dims, 1)
    first_new = shape.places + blocks.context + blocks.offset
    lay_kernel[(triton.cdiv(max(blocks.columns, slots), rows), batch * heads, 4)](
        *past, *new, salience, *found, blocks.columns, shape.places + shape.window,
        shape.places + blocks.context - blocks.before, first_new, length, slots, blocks.offset,
        length - blocks.new_tokens, *(s for t in new for s in t.stride()[:3]), *salience.stride(), held is not None,
        batch, kv_heads, heads, shape.places, key_rows.shape[-1], value_rows.shape[-1], of_keys.bits, of_values.bits,
        of_keys.groups, of_values.groups, P, P & -P, dims, rows,
    )  # fmt: skip
    return found


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
    numbers = numbered_blocks(batch, blocks.first, blocks.blocks + 1, until.device)
    bounds = torch.searchsorted(ordered, numbers, out_int32=True)
    return Lost(until, order, bounds)


@remembered
def numbered_blocks(batch: int, first: int, end: int, device: torch.device) -> torch.Tensor:
    """Numbers (B, blocks) int32 of the blocks up to `end`, 1 for the first; the same in most layers."""
    numbers = torch.arange(first, end, dtype=torch.int32, device=device).clamp_(min=1)
    return numbers.expand(batch, -1).contiguous()


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


@triton.jit
def laid(start, row, visible, d, P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr):
    """Vectors (ROWS, DIMS) in float32 that begin `row` numbers or bytes behind a pointer; 0 where none is visible."""
    t = held_vectors(start + row, visible, d, d < P, P, BITS, GROUPS)
    if BITS < 16:
        t = rotated(t, PART)
    return t


@triton.jit
def lay_head(
    past, new, target, past_row, new_row, in_past, is_new, own, columns, HAS_PAST: tl.constexpr,
    P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Write some columns of one head of the keys or values."""
    d = tl.arange(0, DIMS)
    t = laid(new, new_row, is_new, d, P, BITS, GROUPS, PART)
    if HAS_PAST:
        t += laid(past, past_row, in_past, d, P, BITS, GROUPS, PART)
    tl.store(target + own[:, None] * P + d[None, :], t, mask=(own < columns)[:, None] & (d < P)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def lay_kernel(
    past_keys, past_values, past_salience, new_keys, new_values, new_query, new_salience,
    keys, values, salience, query, columns, held, first_past, first_new, length, slots, offset, skipped,
    key_row, key_head, key_token, value_row, value_head, value_token, query_row, query_head, query_token,
    salience_row, salience_token, HAS_PAST: tl.constexpr, BATCH: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    P: tl.constexpr, PART: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Lay out one head of the keys (0), values (1) or queries (2) of a row, or the salience (3)."""
    at, what = tl.program_id(1).to(tl.int64), tl.program_id(2)
    own = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_past = (own < S) | ((own >= first_past) & (own < first_new))
    past = at * held + tl.where(own < S, own, S + own - first_past)
    token = own - first_new
    is_new = (token >= 0) & (token < length)
    if (what < 2) & (at < BATCH * K):
        b, kv = at // K, at % K
        if what == 0:
            lay_head(past_keys, new_keys + b * key_row + kv * key_head, keys + at * columns * P, past * KEY_WIDTH,
                     token * key_token, in_past, is_new, own, columns, HAS_PAST, P, KEY_BITS, KEY_GROUPS, PART,
                     DIMS)  # fmt: skip
        else:
            lay_head(past_values, new_values + b * value_row + kv * value_head, values + at * columns * P,
                     past * VALUE_WIDTH, token * value_token, in_past, is_new, own, columns, HAS_PAST, P, VALUE_BITS,
                     VALUE_GROUPS, PART, DIMS)  # fmt: skip
    if what == 2:
        d = tl.arange(0, DIMS)[None, :]
        slot_token = own - offset
        asks = (slot_token >= 0) & (slot_token + skipped < length)
        of_head = new_query + at // H * query_row + at % H * query_head
        asked = tl.load(of_head + (slot_token + skipped)[:, None] * query_token + d, mask=asks[:, None] & (d < P),
                        other=0.0)  # fmt: skip
        tl.store(query + (at * slots + own)[:, None] * P + d, asked, mask=(own < slots)[:, None] & (d < P))
    if (what == 3) & (at < BATCH):
        rank = tl.load(new_salience + at * salience_row + token * salience_token, mask=is_new, other=float("-inf"))
        if HAS_PAST:
            former = tl.load(past_salience + past, mask=in_past, other=float("-inf"))
            rank = tl.where(in_past, former, rank)
        tl.store(salience + at * columns + own, rank, mask=own < columns)


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
