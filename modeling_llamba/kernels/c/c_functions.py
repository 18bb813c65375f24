"""Functions in C on a CPU: keys and values in few bits become numbers in registers as they are attended to.

PyTorch's operations (hybrid/rounding.py, hybrid/step.py) write all keys and values of a cache out as numbers at every
token, by a hundred calls a layer, which takes more time than what they compute; of a prompt they do what surrounds
softmax attention by as many. The functions here return the same. All is in float32.

Shapes: B batch, L length, H heads, H' heads with a window, K key/value heads, R heads per key/value head, P head dim,
N state, F planes and other dims, F' slow planes and other slow dims, E block, n whole blocks, S places, T columns,
M mixed blocks, J groups of blocks, W bytes of a row.
"""

import ctypes
import math

import torch

from ...hybrid.rounding import Rounding, width_of
from ..operators import as_operator
from .c_library import SPAN, TYPES, Layer, int64s, ints, library, pointer


def empty_rows(t: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Memory for rows of vectors (..., P)."""
    return t.new_empty(*t.shape[:-1], width_of(bits, t.shape[-1], groups), dtype=torch.uint8)


def _places(t: torch.Tensor) -> tuple[ctypes.Array, ctypes.Array]:
    """Heads and length of a tensor of vectors, and the strides of batch, heads and length, for `offset`."""
    _, heads, length = (1, 1, 1, *t.shape[:-1])[-3:]
    return int64s(heads, length), int64s(*(0, 0, 0, *t.stride()[:-1])[-3:])


def _lined_up(t: torch.Tensor) -> torch.Tensor:
    """Vectors with at most three dimensions before their own, whose numbers follow one another."""
    if t.ndim > 4 or t.stride(-1) != 1:
        return t.contiguous().view(-1, t.shape[-1])
    return t


@as_operator
def encode_rows(t: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Rows (..., W) uint8 of vectors (..., P)."""
    rows = empty_rows(t, bits, groups)
    t = _lined_up(t.float())
    library().encode_rows(
        pointer(t), pointer(rows), ctypes.c_int64(math.prod(t.shape[:-1])), *_places(t), t.shape[-1], bits, groups,
        rows.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    return rows


@encode_rows.register_fake
def _(t, bits, groups):
    return empty_rows(t, bits, groups)


@as_operator
def decode_rows(rows: torch.Tensor, bits: int, dim: int, groups: int, rotated: bool) -> torch.Tensor:
    """Vectors (..., P) of rows (..., W) in float32; as they are stored, which is rotated, if `rotated`."""
    vectors = _empty_vectors(rows, bits, dim, groups, rotated)
    rows = _lined_up(rows)
    library().decode_rows(
        pointer(rows), pointer(vectors), ctypes.c_int64(math.prod(rows.shape[:-1])), *_places(rows), dim, bits,
        groups, rows.shape[-1], not rotated, torch.get_num_threads(),
    )  # fmt: skip
    return vectors


@decode_rows.register_fake
def _empty_vectors(rows: torch.Tensor, bits: int, dim: int, groups: int, rotated: bool) -> torch.Tensor:
    """Memory for `decode_rows`."""
    return rows.new_empty(*rows.shape[:-1], dim, dtype=torch.float32)


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
        keys, values: rows (B, K, T, W).
        bias: (B, T), to be added to the scores, -inf where a column is hidden; None where none is.
        scale, softcap: of the scores, softcap 0 for none.
    """
    P = query.shape[3]
    kv_heads, columns = keys.shape[1:3]
    keys, values = (_readable(t) for t in (keys, values))
    keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    bias = None if bias is None else bias.float().contiguous()
    strides = [stride * t.element_size() for t in (keys, values) for stride in t.stride()[:2]]
    rows = (
        pointer(keys),
        pointer(values),
        int64s(*strides),
        _rows_of(keys, key_bits, P),
        _rows_of(values, value_bits, P),
    )
    return _attend(query, rows, (None, 0, columns, None, pointer(bias)), kv_heads, columns, scale, softcap)


def _attend(query: torch.Tensor, rows: tuple, places: tuple, kv_heads: int, columns: int, scale, softcap):
    """Call the function; rows and places are arguments of its own."""
    batch, heads, _, P = query.shape
    shared = heads // kv_heads
    threads = torch.get_num_threads()
    parts = 1 if threads == 1 else min(-(-columns // SPAN), 2 * threads)
    queries = query.float().contiguous()
    output = queries.new_empty(batch, 1, heads, P)
    scratch = queries.new_empty(batch * kv_heads * parts, shared, P + 2)
    library().attend_to_rows(
        pointer(queries), *rows, *places, pointer(output), pointer(scratch), batch, kv_heads, shared, P, columns,
        parts, ctypes.c_float(scale), ctypes.c_float(softcap), threads,
    )  # fmt: skip
    return output.to(query.dtype)


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
    """See `triton_rows.attend_to_pages`; each row of the batch has one token at least."""
    table, lengths = table.int(), lengths.long().contiguous()
    widths = [rounding.width(query.dtype) for rounding in roundings]
    strides = int64s(pages.shape[1], widths[0], pages.shape[1], widths[1])
    of_rows = (in_c(rounding, query.dtype, kv_heads) for rounding in roundings)
    rows = *(pointer(pages, first) for first in firsts), strides, *of_rows
    places = pointer(table), table.stride(0), block, pointer(lengths), None
    return _attend(query, rows, places, kv_heads, int(lengths.max()), scale, softcap)


@attend_to_rows.register_fake
def _(query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P)


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

    The arguments are those of the function of triton_step.py.
    """
    batch, heads, _, P = query.shape
    _, kv_heads, columns, _ = keys.shape
    held = _readable(keys), _readable(values), salience, state
    keys, values, salience, state = (t if t[0].is_contiguous() else t.contiguous() for t in held)
    strides = keys.stride(0) * keys.element_size(), values.stride(0) * values.element_size()
    seen = seen.contiguous()
    queries = query.float().contiguous()
    mass = mass.float().contiguous()
    sink_query = None if sink_query is None else sink_query.float().contiguous()
    output, features = queries.new_empty(batch, 1, heads, P), queries.new_empty(batch, 1, 3 * heads * P)
    library().mix_one(
        *map(pointer, (keys, values, salience, state, seen)),
        int64s(*strides, salience.stride(0), state.stride(0)),
        *map(pointer, (queries, sink_query, mass, output, features)),
        _rows_of(keys, key_bits, P), _rows_of(values, value_bits, P),
        Layer(
            kv_heads, heads // kv_heads, P, state.shape[-1] - 1, columns, block, sinks, places, planes, slow_planes,
            scale, softcap,
        ),
        batch, torch.get_num_threads(),
    )  # fmt: skip
    return output.to(query.dtype), features.to(query.dtype)


@mix_one.register_fake
def _(keys, values, salience, state, seen, query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P), query.new_empty(batch, 1, 3 * heads * P)


def open_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    state: torch.Tensor | None,
    next_index: torch.Tensor,
    shape,
) -> int:
    """Do what `open_blocks` of eviction.py does, in place; return in how many rows.

    Args:
        keys, values, salience, state: of `Held`, each row without gaps. next_index: (B,), the next token's number.
        shape: `BlockShape` of the layer.
    """
    _, kv_heads, columns, _ = keys.shape
    P = shape.key_rounding.dim
    strides = keys.stride(0) * keys.element_size(), values.stride(0) * values.element_size(), salience.stride(0)
    planes, slow_planes = shape.slow or (0, 0)
    layer = Layer(
        K=kv_heads, P=P, N=0 if state is None else state.shape[-1] - 1, T=columns, E=shape.block, S=shape.places,
        planes=planes, slow_planes=slow_planes,
    )  # fmt: skip
    next_index = next_index.contiguous()
    return library().open_rows(
        *map(pointer, (keys, values, salience, state, next_index)),
        int64s(*strides, 0 if state is None else state.stride(0)), _rows_of(keys, shape.key_rounding.bits, P),
        _rows_of(values, shape.value_rounding.bits, P), layer, len(keys), torch.get_num_threads(),
    )  # fmt: skip


def _readable(t: torch.Tensor) -> torch.Tensor:
    """Rows as they are, or numbers of a type that C reads: autocast may have made them float16."""
    return t if t.dtype in (torch.uint8, *TYPES) else t.float()


def _rows_of(t: torch.Tensor, bits: int, dim: int) -> ctypes.Array:
    """Bits, groups and bytes from one row to the next of rows (..., T, W)."""
    step = t.stride(-2) * t.element_size()
    if t.dtype != torch.uint8:
        return ints(TYPES[t.dtype], 0, step)
    return ints(bits, (t.shape[-1] - dim * bits // 8) // torch.float16.itemsize, step)


def in_c(rounding: Rounding, dtype: torch.dtype, heads: int) -> ctypes.Array:
    """Bits, groups and bytes from one row to the next of rows (T, heads, W), where the model's type is `dtype`."""
    bits, groups = (rounding.bits, rounding.groups) if rounding.rounds else (TYPES[dtype], 0)
    return ints(bits, groups, heads * rounding.width(dtype))


def choose_columns(
    salience: torch.Tensor, present: torch.Tensor, places: int, block: int, window: int, before: int, blocks: int,
    leaving: int, mixed: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The columns that hold a place (B, M, S) and `until` (B, T), as `Layout.select` returns them.

    Args:
        salience: (B, T) in float32. present: (B, T), which columns hold a token.
        places, window: columns of the salient cache and of the window. before: blocks of context before the first
            slot. blocks, mixed: number of all blocks and of those that are mixed. leaving: blocks that leave.
    """
    batch, columns = salience.shape
    holders = salience.new_empty(batch, mixed, places, dtype=torch.int64)
    until = salience.new_empty(batch, columns, dtype=torch.int64)
    layer = Layer(T=places + window, S=places, E=block)
    salience, present = salience.contiguous(), present.contiguous()
    library().choose_columns(
        *map(pointer, (salience, present, holders, until)), layer, *salience.shape, before, blocks, leaving, mixed,
        torch.get_num_threads(),
    )  # fmt: skip
    return holders, until


def hide_columns(
    holders: torch.Tensor, until: torch.Tensor, least: float, shared: int, block: int, window: int, before: int,
    first: int, group: int,
) -> torch.Tensor:  # fmt: skip
    """Bias (B, J, E R M/J, S + n E + E M/J) of `Layout.bias`, repeated for the R heads of each key/value head.

    Args:
        least: number where nothing is attended to. first: the first block that is mixed. group: blocks of a group.
            The others are those of `choose_columns`.
    """
    batch, mixed, places = holders.shape
    width = places + window + (group - 1) * block
    bias = until.new_empty(batch, mixed // group, group * shared * block, width, dtype=torch.float32)
    layer = Layer(R=shared, T=places + window, S=places, E=block)
    holders, until = holders.contiguous(), until.contiguous()
    library().hide_columns(
        *map(pointer, (holders, until, bias)), ctypes.c_float(least), layer, batch, until.shape[1], before, first,
        mixed, group, torch.get_num_threads(),
    )  # fmt: skip
    return bias


def mix_blocks(
    query: torch.Tensor,
    near: torch.Tensor,
    log_mass: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    until: torch.Tensor,
    state: torch.Tensor | None,
    begin: torch.Tensor | None,
    mass: torch.Tensor,
    scale: float,
    planes: int,
    slow_planes: int,
    first: int,
    offset: int,
    tokens: int,
    last: int,
    with_features: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Mix what the state returns into the outputs of softmax attention to window and salient tokens.

    Args:
        query, near: (B, J, K, M/J, R, E, P). log_mass: (B, J, K, M/J, R, E), Z. keys, values: (B, K, T, P), all
            columns. until: (B, T). state: (B, K, P + 1, N + 1) before the first block, or None for zero. begin:
            outputs of tokens before those that are mixed, which are put before theirs.
        mass, scale, planes, slow_planes: as in `mix_one` of triton_step.py. first: number of the first block
            that is mixed. offset: the slot of the first token. tokens: their number. last: block, of those that are
            mixed, of the last token.

    Returns:
        Outputs (B, L, H', P), features (B, tokens, 3 H' P) if they are asked for, and the state while the
        block of the last token is open.
    """
    dtype = near.dtype
    query, near, log_mass, keys, values, mass = (t.float() for t in (query, near, log_mass, keys, values, mass))
    query, near, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, near, keys, values))
    mass, until = mass.contiguous(), until.contiguous()
    state = None if state is None else state.float().contiguous()
    batch, groups, K, group, R, E, P = query.shape
    before = 0 if begin is None else begin.shape[1]
    output = query.new_empty(batch, before + tokens, K * R, P)
    if begin is not None:
        output[:, :before] = begin
    N = P - 2 * (planes - slow_planes)
    features = query.new_empty(batch, tokens, 3 * K * R * P) if with_features else None
    final = query.new_empty(batch, K, P + 1, N + 1)
    layer = Layer(K=K, R=R, P=P, N=N, E=E, planes=planes, slow_planes=slow_planes, scale=scale)
    library().mix_blocks(
        pointer(query), int64s(*query.stride()[:6]), pointer(near), int64s(*near.stride()[:6]),
        pointer(log_mass), int64s(*log_mass.stride()), pointer(keys), pointer(values),
        int64s(*keys.stride()[:3], *values.stride()[:3]), *map(pointer, (until, state, mass)),
        pointer(output[:, before:]), ctypes.c_int64(output.stride(0)), pointer(features), pointer(final), layer,
        batch, until.shape[1], first, groups * group, group, offset, tokens, last, torch.get_num_threads(),
    )  # fmt: skip
    return output.to(dtype), None if features is None else features.to(dtype), final
