/* One token of a hybrid layer, for all heads, and blocks that open for it. */

#include <stdlib.h>
#include "layer.h"

/* strides: of a row of the batch, in bytes of keys and of values, and in numbers of salience and of the state */
void mix_one(const uint8_t *keys, const uint8_t *values, const float *salience, const float *state,
             const int64_t *seen, const int64_t *strides, const float *query, const float *sink_query,
             const float *mass, float *output, float *features, const int *key_rounding, const int *value_rounding,
             Layer layer, int B, int threads)
{
    Rounding of_keys = {key_rounding[0], key_rounding[1], key_rounding[2]};
    Rounding of_values = {value_rounding[0], value_rounding[1], value_rounding[2]};
    int K = layer.K, size = layer.R * layer.P, masses = 2 + layer.N - layer.slow_planes + layer.P - layer.planes;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int n = 0; n < B * K; n++) {
        int b = n / K, k = n % K;
        mix_head(keys + b * strides[0] + (int64_t)k * layer.T * of_keys.step, of_keys,
                 values + b * strides[1] + (int64_t)k * layer.T * of_values.step, of_values, salience + b * strides[2],
                 state + b * strides[3] + (int64_t)k * (layer.P + 1) * (layer.N + 1), seen[b] > 0 ? seen[b] - 1 : 0,
                 query + (int64_t)n * size, sink_query ? sink_query + (int64_t)n * size : 0,
                 mass + k * layer.R * masses, output + (int64_t)n * size, features + 3 * (int64_t)n * size, layer);
    }
}

/* Open a block in the rows whose next token begins one while the window is full, see `open_block` of eviction.py.

   next: number of the next token of each row. strides: as in `mix_one`. Returns how many rows there are. */
int open_rows(uint8_t *keys, uint8_t *values, float *salience, float *state, const int64_t *next,
              const int64_t *strides, const int *key_rounding, const int *value_rounding, Layer layer, int B,
              int threads)
{
    Rounding of_keys = {key_rounding[0], key_rounding[1], key_rounding[2]};
    Rounding of_values = {value_rounding[0], value_rounding[1], value_rounding[2]};
    int S = layer.S, E = layer.E, T = layer.T, P = layer.P, N = layer.N, candidates = S + E, opened = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : opened)
    for (int b = 0; b < B; b++) {
        if (next[b] % E || next[b] < T - S)
            continue;
        opened++;
        float *rank = salience + b * strides[2], of_place[S + 1];
        int place[S + 1], held = 0;
        uint8_t lost[candidates];
        for (int c = 0; c < candidates; c++) {
            lost[c] = c >= S || rank[c] > -INFINITY;
            held = compete(c, rank, place, held, S);
        }
        for (int i = 0; i < S; i++)
            of_place[i] = i < held ? rank[place[i]] : -INFINITY;
        for (int i = 0; i < held; i++)
            lost[place[i]] = 0;
        for (int k = 0; k < layer.K; k++) {
            uint8_t *key = keys + b * strides[0] + (int64_t)k * T * of_keys.step;
            uint8_t *value = values + b * strides[1] + (int64_t)k * T * of_values.step;
            float *sums = state ? state + b * strides[3] + (int64_t)k * (P + 1) * (N + 1) : 0, t[P], v[P];
            for (int c = 0; sums && c < candidates; c++) {
                if (!lost[c])
                    continue;
                unpack(key + c * of_keys.step, t, P, of_keys);
                unpack(value + c * of_values.step, v, P, of_values);
                if (of_keys.groups > 0)
                    rotate(t, P, P & -P);
                if (of_values.groups > 0)
                    rotate(v, P, P & -P);
                float one[N + 1];
                one[0] = 1.0f;
                for (int s = 0; s < N; s++)
                    one[1 + s] = t[slow_dim(s, layer.planes, layer.slow_planes)];
                for (int d = 0; d <= P; d++) {
                    float number = d < P ? v[d] : 1.0f, *row = sums + d * (N + 1);
                    for (int s = 0; s <= N; s++)
                        row[s] += number * one[s];
                }
            }
            for (int which = 0; which < 2; which++) {
                uint8_t *rows = which ? value : key;
                int step = which ? of_values.step : of_keys.step;
                uint8_t *placed = malloc((size_t)S * step + 1); /* of any size, which a stack has no room for */
                for (int i = 0; i < held; i++)
                    memcpy(placed + i * step, rows + place[i] * step, step);
                memcpy(rows, placed, held * step);
                free(placed);
                memset(rows + held * step, 0, (S - held) * step);
                memmove(rows + S * step, rows + candidates * step, (T - candidates) * step);
                memset(rows + (T - E) * step, 0, E * step);
            }
        }
        memcpy(rank, of_place, 4 * S);
        memmove(rank + S, rank + candidates, 4 * (T - candidates));
        for (int c = T - E; c < T; c++)
            rank[c] = -INFINITY;
    }
    return opened;
}
