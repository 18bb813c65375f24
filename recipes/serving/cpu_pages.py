"""A token of each request on a CPU in C, which reads and writes vLLM's pages where they lie.

PyTorch's operations copy a slot out of its pages and back, by dozens of calls a layer, which takes ten times as long
as what they compute. The functions here are those of cpu_kernels.py around the same arithmetic.

Shapes: B batch (requests), H heads, H' heads with a window, K key/value heads, R heads per key/value head, P head dim,
T columns.
"""

import ctypes

import torch

from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.cpu_kernels import SPAN, TYPES, Layer, int64s, library, pointer

SOURCE = r"""
/* Slots of a request, one behind another in the pages with the numbers `rows`. */
typedef struct { uint8_t *memory; int64_t size; const int64_t *rows; } Slots;

static uint8_t *byte_at(Slots slots, int64_t place)
{
    return slots.memory + slots.rows[place / slots.size] * slots.size + place % slots.size;
}

/* How many of these bytes lie in the page of the first. */
static int64_t in_page(Slots slots, int64_t place, int64_t count)
{
    int64_t left = slots.size - place % slots.size;
    return left < count ? left : count;
}

/* Bytes of slots: where they are, or their copy in `scratch` if they do not lie in one page. */
static const void *held(Slots slots, int64_t place, int64_t count, uint8_t *scratch)
{
    if (in_page(slots, place, count) == count)
        return byte_at(slots, place);
    for (int64_t here, done = 0; done < count; done += here) {
        here = in_page(slots, place + done, count - done);
        memcpy(scratch + done, byte_at(slots, place + done), here);
    }
    return scratch;
}

static void write(Slots slots, int64_t place, const void *bytes, int64_t count)
{
    for (int64_t here, done = 0; done < count; done += here) {
        here = in_page(slots, place + done, count - done);
        memcpy(byte_at(slots, place + done), (const uint8_t *)bytes + done, here);
    }
}

static void encode(const float *vector, uint8_t *row, int P, Rounding rounding)
{
    float t[P];
    memcpy(t, vector, 4 * P);
    if (rounding.groups > 0)
        rotate(t, P, P & -P);
    pack(t, row, P, rounding);
}

/* Write a token of each request into its slot and mix it.

   places: of salience, state, keys and values in a request's slots. heads: queries of R K heads, where there are any
   those to sinks, keys and values of K heads. offset (K, P): what was taken off the keys. room: bytes of `scratch`
   for each key/value head. */
void step_in_slots(uint8_t *memory, int64_t size, const int64_t *rows, int pages, const int64_t *places,
                   const int64_t *number, const float *salience, const float *heads, int has_sinks,
                   const float *offset, const float *mass, float *output, float *features, const int *key_rounding,
                   const int *value_rounding, Layer layer, int B, uint8_t *scratch, int64_t room, int threads)
{
    Rounding of_keys = {key_rounding[0], key_rounding[1], key_rounding[2]};
    Rounding of_values = {value_rounding[0], value_rounding[1], value_rounding[2]};
    int K = layer.K, R = layer.R, P = layer.P, T = layer.T, N = layer.N, group = R * P;
    int width = (1 + has_sinks) * K * group + 2 * K * P, masses = 2 + N - layer.slow_planes + P - layer.planes;
    int64_t key_bytes = (int64_t)T * of_keys.step, value_bytes = (int64_t)T * of_values.step;
    int64_t state_bytes = 4 * (int64_t)(P + 1) * (N + 1);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for
        for (int n = 0; n < B * K; n++) {
            int b = n / K, k = n % K, column = column_of(number[b], layer);
            Slots slots = {memory, size, rows + b * pages};
            const float *value = heads + (int64_t)(b + 1) * width - (K - k) * P;
            uint8_t row[4 * P];
            encode(value - K * P, row, P, of_keys);
            write(slots, places[2] + k * key_bytes + column * of_keys.step, row, of_keys.step);
            encode(value, row, P, of_values);
            write(slots, places[3] + k * value_bytes + column * of_values.step, row, of_values.step);
            if (k == 0)
                write(slots, places[0] + 4 * column, salience + b, 4);
        }
        #pragma omp for
        for (int n = 0; n < B * K; n++) {
            int b = n / K, k = n % K;
            Slots slots = {memory, size, rows + b * pages};
            uint8_t *for_state = scratch + n * room, *for_salience = for_state + state_bytes;
            uint8_t *for_keys = for_salience + 4 * T, *for_values = for_keys + key_bytes;
            const float *query = heads + (int64_t)b * width + k * group;
            mix_head(held(slots, places[2] + k * key_bytes, key_bytes, for_keys), of_keys,
                     held(slots, places[3] + k * value_bytes, value_bytes, for_values), of_values,
                     held(slots, places[0], 4 * layer.S, for_salience),
                     held(slots, places[1] + k * state_bytes, state_bytes, for_state), number[b], query,
                     has_sinks ? query + K * group : 0, offset ? offset + k * P : 0, mass + k * R * masses,
                     output + (int64_t)n * group, features + 3 * (int64_t)n * group, layer);
        }
    }
}

/* Write rows of vectors (B, K, P) into their places of pages, from byte `first` of each. */
void write_heads(uint8_t *memory, int64_t size, int64_t first, int block, const int64_t *places, const float *vectors,
                 const int *rounding, int B, int K, int P)
{
    Rounding one = {rounding[0], rounding[1], rounding[2]};
    for (int n = 0; n < B * K; n++) {
        int64_t place = places[n / K];
        uint8_t *of_page = memory + place / block * size + first;
        encode(vectors + (int64_t)n * P, of_page + (place % block * K + n % K) * one.step, P, one);
    }
}
"""


def _rounding(rounding: Rounding, dtype: torch.dtype, rows: int) -> ctypes.Array:
    """Bits, groups and bytes from one row to the next, between which other heads' may lie."""
    bits, groups = (rounding.bits, rounding.groups) if rounding.rounds else (TYPES[dtype], 0)
    return (ctypes.c_int * 3)(bits, groups, rows * rounding.width(dtype))


class SlotStep:
    """One token of a hybrid layer's heads with a window, in slots.

    Args:
        attention: the layer. places: first byte of each tensor of the layer among a request's slots. dtype: the
            model's.
    """

    def __init__(self, attention, places: dict[str, int], dtype: torch.dtype):
        shape = attention.shape
        K, R = attention.kv_groups
        P, planes, slow_planes = attention.head_dim, shape.slow.planes, shape.slow.slow_planes
        self.attention = attention
        self.places = int64s(*(places[name] for name in ("salience", "state", "keys", "values")))
        self.layer = Layer(
            K, R, P, P - 2 * (planes - slow_planes), shape.places + shape.window, shape.block, shape.sinks,
            shape.places, planes, slow_planes, attention.scaling, attention.softcap or 0.0,
        )  # fmt: skip
        self.roundings = [_rounding(rounding, dtype, 1) for rounding in (shape.key_rounding, shape.value_rounding)]
        layer = self.layer
        of_column = 4 + sum(rounding[2] for rounding in self.roundings)
        self.room = 4 * (P + 1) * (layer.N + 1) + layer.T * of_column + 3 & ~3

    def __call__(
        self,
        memory: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        salience: torch.Tensor,
        heads: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, 1, H', P) and features (B, 1, 3 H' P) of a token of each request.

        Args:
            memory: all pages. rows: (B, pages), those of each request. index: (B, 1), numbers of the tokens in their
                sequences. salience: (B, 1). heads: (B, 1, heads, P), queries, if there are any those to sinks that are
                far away, keys and values.
        """
        K, R, P = self.layer.K, self.layer.R, self.layer.P
        batch = len(rows)
        dtype = heads.dtype
        rows, index, salience = rows.contiguous(), index.contiguous(), salience.contiguous()
        heads = heads.float().contiguous()
        mass = self.attention.mass.detach().float().contiguous()
        has_sinks = heads.shape[2] > K * (R + 2)
        offset = self.attention.windowed_offset if has_sinks else None
        offset = None if offset is None else offset.float().contiguous()
        output, features = heads.new_empty(batch, 1, K * R, P), heads.new_empty(batch, 1, 3 * K * R * P)
        scratch = memory.new_empty(batch * K * self.room)
        library(SOURCE).step_in_slots(
            pointer(memory), ctypes.c_int64(memory.shape[1]), pointer(rows), rows.shape[1], self.places,
            pointer(index), pointer(salience), pointer(heads), has_sinks,
            *map(pointer, (offset, mass, output, features)), *self.roundings, self.layer, batch, pointer(scratch),
            ctypes.c_int64(self.room), torch.get_num_threads(),
        )  # fmt: skip
        return output.to(dtype), features.to(dtype)


class HeadStep:
    """One token of a layer's kept heads, in pages.

    Args:
        attention: the layer. rows: the rows of its kept heads.
    """

    def __init__(self, attention, rows, dtype: torch.dtype):
        self.attention, self.rows = attention, rows
        self.to_write = [_rounding(rounding, dtype, 1) for rounding in rows.roundings]
        self.to_read = [_rounding(rounding, dtype, rows.heads) for rounding in rows.roundings]
        self.firsts = [region.start for region in rows.regions]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Outputs (B, H, P) of queries (B, H, P) whose keys and values (B, K, P) are written into their places.

        Args:
            lengths: (B,), the tokens of each request with this one. longest: the most of them.
        """
        memory, block = self.rows.memory.memory, self.rows.memory.heads.block
        table, places = self.rows.metadata
        batch, heads, P = query.shape
        K = self.rows.heads
        size = memory.shape[1]
        threads = torch.get_num_threads()
        parts = 1 if threads == 1 else min(-(-longest // SPAN), 2 * threads)
        queries, *new = (t.float().contiguous() for t in (query, key, value))
        kernels = library(SOURCE)
        for first, vectors, rounding in zip(self.firsts, new, self.to_write, strict=True):
            kernels.write_heads(
                pointer(memory), ctypes.c_int64(size), ctypes.c_int64(first), block, pointer(places),
                pointer(vectors), rounding, batch, K, P,
            )  # fmt: skip
        strides = int64s(size, self.to_write[0][2], size, self.to_write[1][2])
        output = torch.empty_like(queries)
        scratch = queries.new_empty(batch * K * parts, heads // K, P + 2)
        kernels.attend_to_rows(
            pointer(queries), *(pointer(memory, first) for first in self.firsts), strides, *self.to_read,
            pointer(table), table.stride(0), block, pointer(lengths), None, pointer(output), pointer(scratch),
            batch, K, heads // K, P, longest, parts, ctypes.c_float(self.attention.scaling),
            ctypes.c_float(self.attention.softcap or 0.0), threads,
        )  # fmt: skip
        return output.to(query.dtype)
