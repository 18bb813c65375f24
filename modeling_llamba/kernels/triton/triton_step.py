"""One token of a hybrid layer by Triton kernels: what a GPU would spend on dozens of launches is one to three.

For a single token of each row without a gradient, `mix_one` does what lies between the layer's
projections once the token is written into what is held: attention to window, sinks and salient tokens, the readout of
the state, and the gate between the two. The equations are those of hybrid_attention.py, in float32; its PyTorch
operations run wherever this does not. Keys and values in rows of few bits (rounding.py) become numbers in registers:
the query is rotated before they are attended to, and the output after.

`write_one` writes the token and opens a block in the rows that begin one, also where only the device holds the lengths
that decide it: rows of different lengths, and a cache whose length is a tensor, as a CUDA graph needs it. PyTorch's
operations (`open_blocks` of eviction.py) would there open one in every row at every token, and keep it where needed.

Shapes: B batch, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state, F planes
and other dims, F' slow planes and other slow dims, E block, C columns of the window, S places.
"""

import functools

import torch
import triton
import triton.language as tl

from ...hybrid.rounding import Rounding
from ..operators import as_operator
from .triton_rounding import held_vectors, on_device_of, rotated

TILE = 4096  # numbers of keys, values or state at a time, 16 of each thread
WARPS = 8
ROWS = 16
"""Columns that the state takes up together, and that move together."""


@functools.cache
def tile_of(dims: int, width: int) -> tuple[int, int]:
    """Sides of the tile, powers of two, for a matrix that is so many dimensions high and is read `width` at a time."""
    rows = max(triton.next_power_of_2(dims), 16)
    return rows, min(max(triton.next_power_of_2(width), 16), TILE // rows)


def constants_of(dim: int, *bits: int) -> tuple[int, ...]:
    """Size of a block of the matrix; bits, and numbers of groups, of keys and of values."""
    return dim & -dim, *bits, *(Rounding(each, dim).groups for each in bits)


@functools.partial(as_operator, changes=("keys", "values", "salience", "state", "seen"))
def write_one(
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    state: torch.Tensor,
    seen: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    new_salience: torch.Tensor,
    index: torch.Tensor,
    block: int,
    places: int,
    planes: int,
    slow_planes: int,
    dim: int,
    key_bits: int,
    value_bits: int,
) -> None:
    """Write one token of each row into what is held, in place; first open a block in the rows in which it begins one.

    Args:
        keys, values, salience, state, seen: `Held` of eviction.py, contiguous.
        new_keys, new_values, new_salience, index: `NewTokens` with one token of each row, -1 in `index` for none.
        block, places: of `BlockShape`. planes, slow_planes: of `SlowDims`. dim: P.
        key_bits, value_bits: of the rows, 16 where nothing is rounded.
    """
    batch, kv_heads, columns, key_width = keys.shape
    value_width, slow = values.shape[3], state.shape[-1] - 1
    candidates = max(triton.next_power_of_2(places + block), 16)
    dims, slow_tile = tile_of(dim, slow)
    with on_device_of(keys):
        write_kernel[(batch * kv_heads,)](
            keys, values, salience, state, new_keys.contiguous(), new_values.contiguous(), index.contiguous(),
            kv_heads, dim, slow, key_width, value_width, triton.next_power_of_2(key_width),
            triton.next_power_of_2(value_width), *constants_of(dim, key_bits, value_bits), planes, slow_planes,
            places, columns - places, block, candidates, dims, max(slow_tile, 16), ROWS, num_warps=WARPS,
        )  # fmt: skip
        note_kernel[(batch,)](
            salience, seen, new_salience.contiguous(), index.contiguous(), places, columns - places, block, candidates,
            triton.next_power_of_2(columns - places),
        )  # fmt: skip


@as_operator
def mix_one(
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    state: torch.Tensor,
    seen: torch.Tensor,
    query: torch.Tensor,
    sink_query: torch.Tensor | None,
    mass: torch.Tensor,
    scale: float,
    softcap: float,
    block: int,
    sinks: int,
    places: int,
    planes: int,
    slow_planes: int,
    key_bits: int,
    value_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed outputs (B, 1, H', P) of one token, and the features (B, 1, 3 H' P) of the low-rank map.

    Args:
        keys, values, salience, state, seen: `Held` of eviction.py, which holds the token already.
        query, sink_query: (B, H', 1, P); the second attends to sinks that have left the window, where it is given.
        mass: (H', 2 + F' + F). scale, softcap: of the scores, softcap 0 for none.
        block, sinks, places: of `BlockShape`. planes, slow_planes: of `SlowDims`.
        key_bits, value_bits: of the rows, 16 where nothing is rounded.
    """
    batch, heads, _, P = query.shape
    (_, kv_heads, columns, key_width), slow = keys.shape, state.shape[-1] - 1
    output, features = query.new_empty(batch, 1, heads, P), query.new_empty(batch, 1, 3 * heads * P)
    if sink_query is None:
        sink_query = query
    inputs = keys, values, salience, state, seen, query, sink_query, mass
    with on_device_of(query):
        mix_one_kernel[(batch * heads,)](
            *(t.contiguous() for t in inputs), output, features, scale, softcap, kv_heads, heads // kv_heads, P, slow,
            key_width, values.shape[3], *constants_of(P, key_bits, value_bits), planes, slow_planes,
            sinks, places, columns - places, block, *tile_of(P, columns), tile_of(P, slow)[1],
            num_warps=WARPS,
        )  # fmt: skip
    return output, features


@mix_one.register_fake
def _(keys, values, salience, state, seen, query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P), query.new_empty(batch, 1, 3 * heads * P)


@triton.jit
def slow_dims(slow, PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr):
    """Dimensions of the slow part: of its planes the first halves, the second, and what is not rotated."""
    return slow + tl.where(slow < SLOW_PLANES, 1, 2) * (PLANES - SLOW_PLANES)


@triton.jit
def mass_of_query(of_head, count, q, d, P: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr,
                  SLOW_PLANES: tl.constexpr):  # fmt: skip
    """The log mass of a state of `count` tokens for scaled queries (., DIMS), without that of their slow parts."""
    part = tl.where(d < PLANES, d, d - PLANES)  # both dimensions of a plane have one number
    beta = tl.load(of_head + 2 + N - SLOW_PLANES + part, mask=d < P, other=0.0).to(tl.float32)
    constant = tl.load(of_head).to(tl.float32)
    constant += tl.load(of_head + 1).to(tl.float32) * tl.log(tl.maximum(count, 1.0))
    return constant + tl.sum(q * q * beta, axis=-1)


@triton.jit
def mass_of_slow(of_head, slow_q, key_mean, slow, N: tl.constexpr, SLOW_PLANES: tl.constexpr):
    """The part of the log mass that comes from slow parts (., SLOW) of scaled queries."""
    part = tl.where(slow < SLOW_PLANES, slow, slow - SLOW_PLANES)
    alpha = tl.load(of_head + 2 + part, mask=slow < N, other=0.0).to(tl.float32)
    return tl.sum(slow_q * (alpha * key_mean), axis=-1)


@triton.jit
def gate_of(log_far, log_near, count):
    """Share of the state beside softmax attention, 0 while it is empty."""
    return tl.where(count > 0.5, tl.sigmoid(log_far - log_near), 0.0)


@triton.jit
def sortable(rank, column):
    """Numbers that sort as salience does, and by column where it is the same, as 0 and -0 are."""
    bits = tl.where(rank == 0, 0.0, rank).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - column.to(tl.int64))


@triton.jit
def by_salience(salience, S: tl.constexpr, E: tl.constexpr, CANDIDATES: tl.constexpr):
    """The places and the block that leaves, as sorted numbers: those of the next holders of the S places first."""
    column = tl.arange(0, CANDIDATES)
    there = column < S + E
    rank = tl.load(salience + column, mask=there, other=float("-inf")).to(tl.float32)
    return tl.sort(tl.where(there, sortable(rank, column), -0x7FFFFFFFFFFFFFFF), descending=True)


@triton.jit
def move_columns(
    rows, ordered, empty,
    WIDTH: tl.constexpr, PART: tl.constexpr, S: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    CANDIDATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bring the next holders to their places and move the window up by a block, in place.

    No thread writes before all have read: rows are read and written by different threads.
    """
    place = tl.arange(0, CANDIDATES)
    holder = (0x7FFFFFFF - (ordered & 0x7FFFFFFF)).to(tl.int32)
    step = tl.arange(0, ROWS)
    for first in range(0, WIDTH, ROWS):
        part = first + step
        in_places = (place < S)[:, None] & (part < WIDTH)[None, :]
        held = tl.load(rows + holder[:, None] * WIDTH + part[None, :], mask=in_places)
        tl.debug_barrier()
        tl.store(rows + place[:, None] * WIDTH + part[None, :], held, mask=in_places)
    i = tl.arange(0, PART)
    for first in range(S, S + C, ROWS):
        column = first + step
        in_tile = (column < S + C)[:, None] & (i < WIDTH)[None, :]
        stays = in_tile & (column < S + C - E)[:, None]
        moved = tl.load(rows + (column + E)[:, None] * WIDTH + i[None, :], mask=stays, other=empty)
        tl.debug_barrier()
        tl.store(rows + column[:, None] * WIDTH + i[None, :], moved, mask=in_tile)


@triton.jit
def add_to(cells, amount, there):
    """Add to numbers in memory that no other program reads."""
    tl.store(cells, tl.load(cells, mask=there, other=0.0) + amount, mask=there)


@triton.jit
def column_of(number, S: tl.constexpr, C: tl.constexpr, E: tl.constexpr):
    """Column of a token, once its block is open."""
    return S + number - tl.maximum(number // E - (C // E - 1), 0) * E


@triton.jit
def write_kernel(
    keys, values, salience, state, new_keys, new_values, index,
    K: tl.constexpr, P: tl.constexpr, N: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PART: tl.constexpr, VALUE_PART: tl.constexpr, PART: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr, S: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    CANDIDATES: tl.constexpr, DIMS: tl.constexpr, SLOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys, values and state of one key/value head of one row."""
    at = tl.program_id(0).to(tl.int64)
    b = at // K
    number = tl.load(index + b).to(tl.int32)
    keys += at * (S + C) * KEY_WIDTH
    values += at * (S + C) * VALUE_WIDTH
    if (number >= C) & (number % E == 0):
        salience += b * (S + C)
        state += at * (P + 1) * (N + 1)
        ordered = by_salience(salience, S, E, CANDIDATES)
        # of the last that gets a place; whatever is less and was there is lost
        least = tl.max(tl.where(tl.arange(0, CANDIDATES) >= S - 1, ordered, -0x7FFFFFFFFFFFFFFF))
        d = tl.arange(0, DIMS)
        in_d = d < P
        for first in range(0, N, SLOW):
            slow = first + tl.arange(0, SLOW)
            in_slow = slow < N
            of_slow = tl.minimum(slow_dims(slow, PLANES, SLOW_PLANES), P - 1)
            total = tl.zeros([DIMS, SLOW], tl.float32)
            of_values, of_keys, count = tl.zeros([DIMS], tl.float32), tl.zeros([SLOW], tl.float32), 0.0
            for begin in range(0, S + E, ROWS):
                column = begin + tl.arange(0, ROWS)
                there = column < S + E
                rank = tl.load(salience + column, mask=there, other=float("-inf")).to(tl.float32)
                lost = there & ((column >= S) | (rank > float("-inf")))
                if S > 0:
                    lost = lost & (sortable(rank, column) < least)
                k = held_vectors(keys + column * KEY_WIDTH, lost, d, in_d, P, KEY_BITS, KEY_GROUPS)
                v = held_vectors(values + column * VALUE_WIDTH, lost, d, in_d, P, VALUE_BITS, VALUE_GROUPS)
                if KEY_BITS < 16:
                    k = rotated(k, PART)
                if VALUE_BITS < 16:
                    v = rotated(v, PART)
                k = tl.gather(k, tl.broadcast_to(of_slow[None, :], [ROWS, SLOW]), axis=1)
                k = tl.where(in_slow[None, :], k, 0.0)
                total = tl.dot(tl.trans(v), k, total, input_precision="tf32x3")
                of_values += tl.sum(v, axis=0)
                of_keys += tl.sum(k, axis=0)
                count += tl.sum(lost.to(tl.float32))
            in_cells = in_d[:, None] & in_slow[None, :]
            add_to(state + d[:, None] * (N + 1) + 1 + slow[None, :], total, in_cells)
            add_to(state + P * (N + 1) + 1 + slow, of_keys, in_slow)
            add_to(state + d * (N + 1), of_values, in_d & (first == 0))
            add_to(state + P * (N + 1), count, first == 0)
        tl.debug_barrier()
        move_columns(keys, ordered, 0, KEY_WIDTH, KEY_PART, S, C, E, CANDIDATES, ROWS)
        move_columns(values, ordered, 0, VALUE_WIDTH, VALUE_PART, S, C, E, CANDIDATES, ROWS)
        tl.debug_barrier()
    if number >= 0:
        column = column_of(number, S, C, E)
        i = tl.arange(0, KEY_PART)
        row = tl.load(new_keys + at * KEY_WIDTH + i, mask=i < KEY_WIDTH)
        tl.store(keys + column * KEY_WIDTH + i, row, mask=i < KEY_WIDTH)
        i = tl.arange(0, VALUE_PART)
        row = tl.load(new_values + at * VALUE_WIDTH + i, mask=i < VALUE_WIDTH)
        tl.store(values + column * VALUE_WIDTH + i, row, mask=i < VALUE_WIDTH)


@triton.jit
def note_kernel(
    salience, seen, new_salience, index,
    S: tl.constexpr, C: tl.constexpr, E: tl.constexpr, CANDIDATES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Salience and number of tokens of one row, which `write_kernel` reads for each of its heads."""
    b = tl.program_id(0).to(tl.int64)
    number = tl.load(index + b).to(tl.int32)
    salience += b * (S + C)
    if (number >= C) & (number % E == 0):
        ordered = by_salience(salience, S, E, CANDIDATES)
        place = tl.arange(0, CANDIDATES)
        window = tl.arange(0, WINDOW)
        held = tl.load(salience + (0x7FFFFFFF - (ordered & 0x7FFFFFFF)), mask=place < S)
        moved = tl.load(salience + S + E + window, mask=window < C - E, other=float("-inf"))
        tl.debug_barrier()
        tl.store(salience + place, held, mask=place < S)
        tl.store(salience + S + window, moved, mask=window < C)
        tl.debug_barrier()
    if number >= 0:
        tl.store(salience + column_of(number, S, C, E), tl.load(new_salience + b))
        tl.store(seen + b, tl.load(seen + b) + 1)


@triton.jit
def mix_one_kernel(
    keys, values, salience, state, seen, query, sink_query, mass, output, features, scale, softcap,
    K: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PART: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr,
    SINKS: tl.constexpr, S: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    DIMS: tl.constexpr, COLUMNS: tl.constexpr, SLOW: tl.constexpr,
):  # fmt: skip
    """One query head of one row."""
    at = tl.program_id(0)
    b, head, kv = at // (K * R), at % (K * R), (at // R).to(tl.int64)  # kv counts through all rows, as `at` does
    keys += kv * (S + C) * KEY_WIDTH
    values += kv * (S + C) * VALUE_WIDTH
    state += kv * (P + 1) * (N + 1)
    salience += b * (S + C)
    mass += head * (2 + N - SLOW_PLANES + P - PLANES)
    d = tl.arange(0, DIMS)
    in_d = d < P
    q = tl.load(query + at * P + d, mask=in_d, other=0.0).to(tl.float32) * scale
    sink_q = tl.load(sink_query + at * P + d, mask=in_d, other=0.0).to(tl.float32) * scale
    near_q = q
    if KEY_BITS < 16:
        near_q, sink_q = rotated(q, PART), rotated(sink_q, PART)

    # softmax attention: the places that are held, and the window up to the token's own column
    number = tl.maximum(tl.load(seen + b) - 1, 0).to(tl.int32)
    last = column_of(number, S, C, E)
    highest, total, near = -1e30, 0.0, tl.zeros([DIMS], tl.float32)
    for first in range(0, last + 1, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        rank = tl.load(salience + column, mask=column < S, other=0.0)
        visible = (column <= last) & (rank > float("-inf"))
        is_sink = (column < SINKS) & (rank == float("inf"))
        k = held_vectors(keys + column * KEY_WIDTH, visible, d, in_d, P, KEY_BITS, KEY_GROUPS)
        score = tl.sum(k * tl.where(is_sink[:, None], sink_q[None, :], near_q[None, :]), axis=1)
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        above = tl.maximum(highest, tl.max(tl.where(visible, score, -1e30)))
        share, shrink = tl.where(visible, tl.exp(score - above), 0.0), tl.exp(highest - above)
        v = held_vectors(values + column * VALUE_WIDTH, visible, d, in_d, P, VALUE_BITS, VALUE_GROUPS)
        near = near * shrink + tl.sum(share[:, None] * v, axis=0)
        highest, total = above, total * shrink + tl.sum(share)
    near /= total
    if VALUE_BITS < 16:
        near = rotated(near, PART)

    # the readout of the state: [sum of v, sum of v k'] in each row, and [m, sum of k'] in the last
    sums = state + P * (N + 1)
    count = tl.load(sums)
    least = tl.maximum(count, 1.0)
    value_mean, tilt = tl.load(state + d * (N + 1), mask=in_d, other=0.0) / least, tl.zeros([DIMS], tl.float32)
    log_mass = mass_of_query(mass, count, q, d, P, N, PLANES, SLOW_PLANES)
    for first in range(0, N, SLOW):
        slow = first + tl.arange(0, SLOW)
        in_slow = slow < N
        of_slow = slow_dims(slow, PLANES, SLOW_PLANES)
        slow_q = tl.load(query + at * P + of_slow, mask=in_slow, other=0.0).to(tl.float32) * scale
        key_mean = tl.load(sums + 1 + slow, mask=in_slow, other=0.0) / least
        log_mass += mass_of_slow(mass, slow_q, key_mean, slow, N, SLOW_PLANES)
        cells, in_tile = d[:, None] * (N + 1) + 1 + slow[None, :], in_d[:, None] & in_slow[None, :]
        covariance = tl.load(state + cells, mask=in_tile, other=0.0) / least
        covariance -= value_mean[:, None] * key_mean[None, :]
        tilt += tl.sum(covariance * slow_q[None, :], axis=1)

    gate = gate_of(log_mass, highest + tl.log(total), count)
    tl.store(output + at * P + d, near + gate * (value_mean + tilt - near), mask=in_d)
    tl.store(features + 3 * at * P + d, gate * near, mask=in_d)
    tl.store(features + (3 * at + 1) * P + d, gate * value_mean, mask=in_d)
    tl.store(features + (3 * at + 2) * P + d, gate * (value_mean + tilt), mask=in_d)
