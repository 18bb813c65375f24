"""One token of a hybrid layer as one Triton kernel: what a GPU would spend on dozens of launches is one.

For a single token of each row without a gradient, `mix_one` does what lies between the layer's
projections once the token is written into what is held: attention to window, sinks and salient tokens, the readout of
the state, and the gate between the two. The equations are those of hybrid_attention.py, in float32; its PyTorch
operations run wherever this does not. Keys and values in rows of 8 bits (rounding.py) become numbers in registers: the
query is rotated before they are attended to, and the output after.

Shapes: B batch, H' query heads with a window, K key/value heads with a window, R = H' / K, D head dim, N slow dims,
P places, C columns of the window, F' and F planes and dimensions that are not rotated, of the slow part and of all.
"""

import contextlib
import functools
import re
from collections.abc import Callable

import torch
from transformers.utils import is_torchdynamo_compiling

try:
    import triton
    import triton.language as tl
except ImportError:  # then `can_run` says no
    triton = None

TILE = 4096  # numbers of keys, values or state at a time, 16 of each thread
WARPS = 8
CURRENT = contextlib.nullcontext()


def can_run(on_cuda: bool, dtype: torch.dtype) -> bool:
    """Return True if the kernel runs here, for keys of this type: it computes in float32."""
    return triton is not None and on_cuda and dtype != torch.float64


@functools.cache
def tile_of(dims: int, width: int) -> tuple[int, int]:
    """Sides of the tile, powers of two, for a matrix that is so many dimensions high and is read `width` at a time."""
    rows = max(triton.next_power_of_2(dims), 16)
    return rows, min(max(triton.next_power_of_2(width), 16), TILE // rows)


def as_operator(launch: Callable) -> Callable:
    """Make what launches kernels an operator of its own while torch.compile runs, which cannot look into it.

    Otherwise it is called as it is: an operator takes as much of the host's time as a launch. Operators are named
    after the file, of which every checkpoint brings its own.
    """
    name = re.sub(r"\W", "_", launch.__module__, flags=re.ASCII)
    operator = torch.library.custom_op(f"{name}::{launch.__name__}", launch, mutates_args=())

    @functools.wraps(launch)
    def run(*inputs, **options):
        if is_torchdynamo_compiling():
            return operator(*inputs, **options)
        return launch(*inputs, **options)

    run.register_fake = operator.register_fake
    return run


def on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which Triton, which launches on the current device, launches on that of a tensor."""
    if t.device.index == torch.cuda.current_device():
        return CURRENT
    return torch.cuda.device(t.device)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed outputs (B, 1, H', D) of one token, and the features (B, 1, 3 H' D) of the low-rank map.

    Args:
        keys, values, salience, state, seen: `Held` of eviction.py, which holds the token already.
        query, sink_query: (B, H', 1, D); the second looks at sinks that have left the window, where it is given.
        mass: (H', 2 + F' + F). scale, softcap: of the scores, softcap 0 for none.
        block, sinks, places: of `BlockShape`. planes, slow_planes: of `SlowDims`.
    """
    batch, heads, _, D = query.shape
    (_, kv_heads, columns, key_width), slow = keys.shape, state.shape[-1] - 1
    output, features = query.new_empty(batch, 1, heads, D), query.new_empty(batch, 1, 3 * heads * D)
    if sink_query is None:
        sink_query = query
    inputs = keys, values, salience, state, seen, query, sink_query, mass
    with on_device_of(query):
        mix_one_kernel[(batch * heads,)](
            *(t.contiguous() for t in inputs), output, features, scale, softcap, kv_heads, heads // kv_heads, D, slow,
            key_width, values.shape[3], D & -D, planes, slow_planes, sinks, places, columns - places, block,
            *tile_of(D, columns), tile_of(D, slow)[1],
            num_warps=WARPS,
        )  # fmt: skip
    return output, features


@mix_one.register_fake
def _(keys, values, salience, state, seen, query, *others):
    batch, heads, _, D = query.shape
    return query.new_empty(batch, 1, heads, D), query.new_empty(batch, 1, 3 * heads * D)


if triton is not None:

    @triton.jit
    def vectors(start, column, visible, d, in_d, WIDTH: tl.constexpr):
        """Keys or values (columns, DIMS), of rows of bytes as they are stored; 0 where nothing is visible."""
        row = start + column * WIDTH
        in_tile = visible[:, None] & in_d[None, :]
        if start.dtype.element_ty == tl.uint8:
            scale = tl.load(row.to(tl.pointer_type(tl.float16)), mask=visible, other=0.0).to(tl.float32)
            codes = tl.load(row[:, None] + 2 + d[None, :], mask=in_tile, other=0)
            return codes.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
        else:
            return tl.load(row[:, None] + d[None, :], mask=in_tile, other=0.0).to(tl.float32)

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
    def mix_one_kernel(
        keys, values, salience, state, seen, query, sink_query, mass, output, features, scale, softcap,
        K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
        KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PART: tl.constexpr,
        PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr,
        S: tl.constexpr, P: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
        DIMS: tl.constexpr, COLUMNS: tl.constexpr, SLOW: tl.constexpr,
    ):  # fmt: skip
        """One query head of one row."""
        at = tl.program_id(0)
        b, head, kv = at // (K * R), at % (K * R), (at // R).to(tl.int64)  # kv counts through all rows, as `at` does
        keys += kv * (P + C) * KEY_WIDTH
        values += kv * (P + C) * VALUE_WIDTH
        state += kv * (D + 1) * (N + 1)
        salience += b * (P + C)
        mass += head * (2 + N - SLOW_PLANES + D - PLANES)
        d = tl.arange(0, DIMS)
        in_d = d < D
        q = tl.load(query + at * D + d, mask=in_d, other=0.0).to(tl.float32) * scale
        sink_q = tl.load(sink_query + at * D + d, mask=in_d, other=0.0).to(tl.float32) * scale
        near_q = q
        if keys.dtype.element_ty == tl.uint8:
            near_q, sink_q = rotated(q, PART), rotated(sink_q, PART)

        # softmax attention: the places that are held, and the window up to the token's own column
        number = tl.maximum(tl.load(seen + b) - 1, 0).to(tl.int32)
        last = P + number - tl.maximum(number // E - (C // E - 1), 0) * E
        highest, total, near = -1e30, 0.0, tl.zeros([DIMS], tl.float32)
        for first in range(0, last + 1, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            rank = tl.load(salience + column, mask=column < P, other=0.0)
            visible = (column <= last) & (rank > float("-inf"))
            is_sink = (column < S) & (rank == float("inf"))
            k = vectors(keys, column, visible, d, in_d, KEY_WIDTH)
            score = tl.sum(k * tl.where(is_sink[:, None], sink_q[None, :], near_q[None, :]), axis=1)
            if softcap > 0:
                score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
            above = tl.maximum(highest, tl.max(tl.where(visible, score, -1e30)))
            share, shrink = tl.where(visible, tl.exp(score - above), 0.0), tl.exp(highest - above)
            v = vectors(values, column, visible, d, in_d, VALUE_WIDTH)
            near = near * shrink + tl.sum(share[:, None] * v, axis=0)
            highest, total = above, total * shrink + tl.sum(share)
        near /= total
        if values.dtype.element_ty == tl.uint8:
            near = rotated(near, PART)

        # the readout of the state: [sum of v, sum of v k'] in each row, and [m, sum of k'] in the last
        sums = state + D * (N + 1)
        count = tl.load(sums)
        least = tl.maximum(count, 1.0)
        value_mean, tilt = tl.load(state + d * (N + 1), mask=in_d, other=0.0) / least, tl.zeros([DIMS], tl.float32)
        part = tl.where(d < PLANES, d, d - PLANES)  # both dimensions of a plane have one number
        beta = tl.load(mass + 2 + N - SLOW_PLANES + part, mask=in_d, other=0.0).to(tl.float32)
        log_mass = tl.load(mass).to(tl.float32) + tl.load(mass + 1).to(tl.float32) * tl.log(least)
        log_mass += tl.sum(q * beta * q)
        for first in range(0, N, SLOW):
            slow = first + tl.arange(0, SLOW)
            in_slow = slow < N
            # dimensions of the slow part: of its planes the first halves, the second, and what is not rotated
            of_slow = slow + tl.where(slow < SLOW_PLANES, 1, 2) * (PLANES - SLOW_PLANES)
            slow_q = tl.load(query + at * D + of_slow, mask=in_slow, other=0.0).to(tl.float32) * scale
            slow_part = tl.where(slow < SLOW_PLANES, slow, slow - SLOW_PLANES)
            alpha = tl.load(mass + 2 + slow_part, mask=in_slow, other=0.0).to(tl.float32)
            key_mean = tl.load(sums + 1 + slow, mask=in_slow, other=0.0) / least
            log_mass += tl.sum(slow_q * alpha * key_mean)
            cells, in_tile = d[:, None] * (N + 1) + 1 + slow[None, :], in_d[:, None] & in_slow[None, :]
            covariance = tl.load(state + cells, mask=in_tile, other=0.0) / least
            covariance -= value_mean[:, None] * key_mean[None, :]
            tilt += tl.sum(covariance * slow_q[None, :], axis=1)

        gate = tl.where(count > 0.5, tl.sigmoid(log_mass - highest - tl.log(total)), 0.0)
        tl.store(output + at * D + d, near + gate * (value_mean + tilt - near), mask=in_d)
        tl.store(features + 3 * at * D + d, gate * near, mask=in_d)
        tl.store(features + (3 * at + 1) * D + d, gate * value_mean, mask=in_d)
        tl.store(features + (3 * at + 2) * D + d, gate * (value_mean + tilt), mask=in_d)
