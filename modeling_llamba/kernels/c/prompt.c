/* The blocks of a prompt of a hybrid layer. */

#include "layer.h"

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

/* Block by block the state and its readout.

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
            float value_mean[P], of_slow[N + 1], of_square[P];
            for (int d = 0; d < P; d++)
                value_mean[d] = of_values[d] / larger(count, 1.0f);
            for (int r = 0; r < R; r++) {
                int head = k * R + r;
                Readout readout =
                    readout_of(count, value_mean, of_keys, mass + head * masses, of_slow, of_square, layer);
                const int64_t *qs = query_strides, *ns = near_strides, *ms = mass_strides;
                int j = m / group, in_group = m % group;
                const float *q = query + b * qs[0] + j * qs[1] + k * qs[2] + in_group * qs[3] + r * qs[4];
                const float *y = near + b * ns[0] + j * ns[1] + k * ns[2] + in_group * ns[3] + r * ns[4];
                const float *Z = log_mass + b * ms[0] + j * ms[1] + k * ms[2] + in_group * ms[3] + r * ms[4];
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
                        float *mixed_to = output + b * output_stride + (int64_t)token * row + head * P;
                        int64_t of_features = 3 * (((int64_t)b * tokens + token) * row + head * P);
                        mix_query(readout, q + (e + i) * qs[5], slow[i], y + (e + i) * ns[5], Z[(e + i) * ms[5]],
                                  products[i], mixed_to, features ? features + of_features : NULL, layer);
                    }
                }
            }
        }
    }
}
