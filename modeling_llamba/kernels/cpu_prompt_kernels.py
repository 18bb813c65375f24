"""A prompt of a hybrid layer on a CPU in C: all but its matrix products and its fused attention.

PyTorch's operations (block_layout.py, eviction.py, hybrid_attention.py) do the same by some hundred calls a layer,
most of which copy tensors. The functions here follow hybrid_prompt_kernel.py: a state is the sum over the columns that
were lost, each at its block. All is in float32.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state,
E block, n whole blocks, S places, T columns, M mixed blocks, J groups of blocks.
"""

import ctypes

import torch

from .cpu_kernels import Layer, int64s, library, pointer

SOURCE = r"""
/* Which columns hold a place while each mixed block is open, and `until`, the first block to which a column is no
   longer visible.

   present: which columns hold a token. before: blocks between places and the first slot. */
void choose_columns(const float *salience, const uint8_t *present, int64_t *holders, int64_t *until, Layer layer,
                    int B, int T, int before, int blocks, int leaving, int mixed, int threads)
{
    int S = layer.S, E = layer.E, window = (layer.T - S) / E;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int b = 0; b < B; b++) {
        const float *rank = salience + (int64_t)b * T;
        int64_t *gone = until + (int64_t)b * T, *out = holders + (int64_t)b * mixed * S;
        int place[S + 1], held = 0;
        for (int c = 0; c < T; c++)
            gone[c] = c >= S && present[(int64_t)b * T + c] ? (c - S) / E - before + window : 0;
        for (int stage = 0; stage <= leaving; stage++) {
            int first = stage ? S + (stage - 1) * E : 0, last = stage ? first + E : S;
            for (int c = first; c < last; c++)
                held = compete(c, rank, place, held, S);
            int number = blocks - leaving + stage, m = stage - (leaving + 1 - mixed);
            for (int i = 0; i < held; i++)
                if (gone[place[i]] < number)
                    gone[place[i]] = number;
            for (int i = 0; m >= 0 && i < S; i++)
                out[m * S + i] = i < held ? place[i] : -1;
        }
    }
}

/* A bias for the queries of each group of blocks, those of R heads after one another: 0 where one attends to a column
   among the places when its first block opens and the window, else `least`. first: the first block that is mixed. */
void hide_columns(const int64_t *holders, const int64_t *until, float *bias, float least, Layer layer, int B, int T,
                  int before, int first, int mixed, int group, int threads)
{
    int S = layer.S, E = layer.E, whole = (layer.T - S) / E - 1, width = S + (whole + group) * E;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int n = 0; n < B * (mixed / group); n++) {
        int b = n / (mixed / group), opens = first + n % (mixed / group) * group;
        const int64_t *gone = until + (int64_t)b * T, *in_window = gone + S + (int64_t)(before + opens - whole) * E;
        const int64_t *placed = holders + ((int64_t)b * mixed + opens - first) * S;
        float row[width], *of_group = bias + (int64_t)n * group * layer.R * E * width;
        for (int m = 0; m < group; m++) {
            for (int s = 0; s < S; s++)
                row[s] = placed[s] >= 0 && gone[placed[s]] > opens + m ? 0.0f : least;
            for (int w = S; w < width; w++)
                row[w] = in_window[w - S] > opens + m ? 0.0f : least;
            for (int r = 0; r < layer.R; r++)
                for (int e = 0; e < E; e++) {
                    float *of_query = of_group + ((int64_t)(m * layer.R + r) * E + e) * width;
                    memcpy(of_query, row, 4 * width);
                    for (int w = S + (whole + m) * E + e + 1; w < width; w++)
                        of_query[w] = least; /* later tokens */
                }
        }
    }
}

/* Block by block the state, its readout and the gate, see `mix_head`.

   query, near, log_mass: (B, J, K, M/J, R, E, P) and without P, with strides. keys, values: (B, K, T, P), with
   strides. output (B, ., H', P), features (B, tokens, 3 H' P): of `tokens` tokens, the first in slot `offset`.
   state, final: (B, K, P + 1, N + 1), before the first block and while mixed block `last` is open. */
void mix_blocks(const float *query, const int64_t *query_strides, const float *near, const int64_t *near_strides,
                const float *log_mass, const int64_t *mass_strides, const float *keys, const float *values,
                const int64_t *strides, const int64_t *until, const float *state, const float *mass, float *output,
                int64_t output_stride, float *features, float *final, Layer layer, int B, int T, int first, int mixed,
                int group, int offset, int tokens, int last, int threads)
{
    int K = layer.K, R = layer.R, P = layer.P, N = layer.N, E = layer.E, planes = layer.planes;
    int slow_planes = layer.slow_planes, masses = 2 + N - slow_planes + P - planes;
    int width = (P + LANES - 1) / LANES * LANES, row = K * R * P;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int n = 0; n < B * K; n++) {
        int b = n / K, k = n % K, begins[mixed + 1], lost[T];
        const float *key = keys + b * strides[0] + k * strides[1], *value = values + b * strides[3] + k * strides[4];
        const int64_t *gone = until + (int64_t)b * T;
        float sums[N][width], of_values[P], of_keys[N], count = 0.0f;
        memset(sums, 0, sizeof sums);
        memset(of_values, 0, sizeof of_values);
        memset(of_keys, 0, sizeof of_keys);
        if (state) {
            const float *held = state + (int64_t)n * (P + 1) * (N + 1);
            for (int d = 0; d < P; d++) {
                of_values[d] = held[d * (N + 1)];
                for (int s = 0; s < N; s++)
                    sums[s][d] = held[d * (N + 1) + 1 + s];
            }
            memcpy(of_keys, held + P * (N + 1) + 1, sizeof of_keys);
            count = held[P * (N + 1)];
        }
        /* the columns in the order in which they are lost, and where those of each block begin; block 0 loses none */
        memset(begins, 0, sizeof begins);
        for (int c = 0; c < T; c++)
            if (gone[c] > 0 && gone[c] >= first && gone[c] < first + mixed)
                begins[gone[c] - first + 1]++;
        for (int m = 0; m < mixed; m++)
            begins[m + 1] += begins[m];
        for (int c = 0; c < T; c++)
            if (gone[c] > 0 && gone[c] >= first && gone[c] < first + mixed)
                lost[begins[gone[c] - first]++] = c; /* after which each begin is the next one's */

        for (int m = 0, i = 0; m < mixed; m++) {
            for (; i < begins[m]; i++) {
                const float *v = value + lost[i] * strides[5], *of_column = key + lost[i] * strides[2];
                for (int s = 0; s < N; s++) {
                    float number = of_column[slow_dim(s, planes, slow_planes)];
                    of_keys[s] += number;
                    for (int d = 0; d < P; d++)
                        sums[s][d] += number * v[d];
                }
                for (int d = 0; d < P; d++)
                    of_values[d] += v[d];
                count += 1.0f;
            }
            if (m == last) {
                float *held = final + (int64_t)n * (P + 1) * (N + 1);
                for (int d = 0; d < P; d++) {
                    held[d * (N + 1)] = of_values[d];
                    for (int s = 0; s < N; s++)
                        held[d * (N + 1) + 1 + s] = sums[s][d];
                }
                held[P * (N + 1)] = count;
                memcpy(held + P * (N + 1) + 1, of_keys, sizeof of_keys);
            }
            float least = larger(count, 1.0f), mean[P];
            for (int d = 0; d < P; d++)
                mean[d] = of_values[d] / least;
            for (int r = 0; r < R; r++) {
                int head = k * R + r;
                const float *of_head = mass + head * masses, *alpha = of_head + 2, *beta = alpha + N - slow_planes;
                const int64_t *qs = query_strides, *ns = near_strides, *ms = mass_strides;
                int j = m / group, in_group = m % group;
                const float *q = query + b * qs[0] + j * qs[1] + k * qs[2] + in_group * qs[3] + r * qs[4];
                const float *y = near + b * ns[0] + j * ns[1] + k * ns[2] + in_group * ns[3] + r * ns[4];
                const float *Z = log_mass + b * ms[0] + j * ms[1] + k * ms[2] + in_group * ms[3] + r * ms[4];
                float weight[P], of_alpha[N], constant = of_head[0] + of_head[1] * logf(least);
                for (int d = 0; d < P; d++)
                    weight[d] = beta[d < planes ? d : d - planes] * layer.scale * layer.scale;
                for (int s = 0; s < N; s++)
                    of_alpha[s] = alpha[s < slow_planes ? s : s - slow_planes] * of_keys[s] / least;
                for (int e = 0; e < E; e += TOGETHER) {
                    float slow[TOGETHER][N], products[TOGETHER][width];
                    memset(slow, 0, sizeof slow);
                    for (int i = 0; i < TOGETHER && e + i < E; i++)
                        for (int s = 0; s < N; s++)
                            slow[i][s] = q[(e + i) * qs[5] + slow_dim(s, planes, slow_planes)] * layer.scale;
                    multiply(slow[0], sums[0], products[0], N, width);
                    for (int i = 0; i < TOGETHER && e + i < E; i++) {
                        int token = m * E + e + i - offset;
                        if (token < 0 || token >= tokens)
                            continue;
                        const float *raw = q + (e + i) * qs[5], *own = y + (e + i) * ns[5];
                        float log_far = constant, tilt = 0.0f;
                        for (int d = 0; d < P; d++)
                            log_far += weight[d] * raw[d] * raw[d];
                        for (int s = 0; s < N; s++) {
                            log_far += of_alpha[s] * slow[i][s];
                            tilt += slow[i][s] * of_keys[s];
                        }
                        tilt /= least;
                        float gate = count > 0.5f ? 1.0f / (1.0f + expf(Z[(e + i) * ms[5]] - log_far)) : 0.0f;
                        float *mixed_to = output + b * output_stride + (int64_t)token * row + head * P;
                        int64_t of_features = 3 * (((int64_t)b * tokens + token) * row + head * P);
                        for (int d = 0; d < P; d++) {
                            float far = mean[d] + products[i][d] / least - mean[d] * tilt;
                            mixed_to[d] = own[d] + gate * (far - own[d]);
                            products[i][d] = gate * far;
                        }
                        if (!features)
                            continue;
                        float *feature = features + of_features;
                        for (int d = 0; d < P; d++) {
                            feature[d] = gate * own[d];
                            feature[P + d] = gate * mean[d];
                        }
                        memcpy(feature + 2 * P, products[i], 4 * P);
                    }
                }
            }
        }
    }
}
"""


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
    library(SOURCE).choose_columns(
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
    library(SOURCE).hide_columns(
        *map(pointer, (holders, until, bias)), ctypes.c_float(least), layer, batch, until.shape[1], before, first,
        mixed, group, torch.get_num_threads(),
    )  # fmt: skip
    return bias


def mix_blocks_on_cpu(
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
        mass, scale, planes, slow_planes: as in `mix_one` of hybrid_step_kernel.py. first: number of the first block
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
    library(SOURCE).mix_blocks(
        pointer(query), int64s(*query.stride()[:6]), pointer(near), int64s(*near.stride()[:6]),
        pointer(log_mass), int64s(*log_mass.stride()), pointer(keys), pointer(values),
        int64s(*keys.stride()[:3], *values.stride()[:3]), *map(pointer, (until, state, mass)),
        pointer(output[:, before:]), ctypes.c_int64(output.stride(0)), pointer(features), pointer(final), layer,
        batch, until.shape[1], first, groups * group, group, offset, tokens, last, torch.get_num_threads(),
    )  # fmt: skip
    return output.to(dtype), None if features is None else features.to(dtype), final
