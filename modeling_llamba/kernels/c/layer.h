/* One token of a hybrid layer, for one key/value head; hybrid/hybrid_attention.py has the equations. */

#pragma once

#include "attention.h"

/* Of a slow dimension, the dimension of the head: planes' first halves, their second, and what is not rotated. */
static int slow_dim(int s, int planes, int slow_planes)
{
    return s + (s < slow_planes ? 1 : 2) * (planes - slow_planes);
}

/* Sizes of a hybrid layer, K that of its heads with a window. */
typedef struct {
    int K, R, P, N, T, E, sinks, S, planes, slow_planes;
    float scale, softcap;
} Layer;

/* Column of the token with this number, whose block is open. */
static int column_of(int64_t number, Layer layer)
{
    int64_t left = number / layer.E - ((layer.T - layer.S) / layer.E - 1);
    return layer.S + number - (left > 0 ? left : 0) * layer.E;
}

/* A state of `count` tokens as a head's queries read it: the mean of its values, the sum of its keys, and what the log
   mass takes from no query, from a slow dimension of it and from the square of a dimension. */
typedef struct {
    float count, constant;
    const float *value_mean, *of_keys;
    float *of_slow, *of_square;
} Readout;

/* The readout of a state by a head with these numbers of `mass`. of_slow: (N). of_square: (P). */
static inline Readout readout_of(float count, const float *value_mean, const float *of_keys, const float *of_head,
                                 float *of_slow, float *of_square, Layer layer)
{
    int P = layer.P, N = layer.N, planes = layer.planes, slow_planes = layer.slow_planes;
    const float *alpha = of_head + 2, *beta = alpha + N - slow_planes;
    float least = larger(count, 1.0f);
    for (int s = 0; s < N; s++)
        of_slow[s] = alpha[s < slow_planes ? s : s - slow_planes] * of_keys[s] / least;
    for (int d = 0; d < P; d++)
        of_square[d] = beta[d < planes ? d : d - planes] * layer.scale * layer.scale;
    return (Readout){count, of_head[0] + of_head[1] * logf(least), value_mean, of_keys, of_slow, of_square};
}

/* Mix what a state returns for a query into its output of softmax attention, with the log-sum-exp `log_near`.

   slow: the scaled slow part (N) of the query. far: (P), the sums of v k' times it, which are changed. feature: (3,
   P), or NULL. */
static inline void mix_query(Readout state, const float *query, const float *slow, const float *near, float log_near,
                             float *restrict far, float *restrict mixed, float *restrict feature, Layer layer)
{
    int P = layer.P, N = layer.N;
    float least = larger(state.count, 1.0f), log_far = state.constant, tilt = 0.0f;
    for (int d = 0; d < P; d++)
        log_far += state.of_square[d] * query[d] * query[d];
    for (int s = 0; s < N; s++) {
        log_far += state.of_slow[s] * slow[s];
        tilt += slow[s] * state.of_keys[s];
    }
    tilt /= least;
    float gate = state.count > 0.5f ? 1.0f / (1.0f + expf(log_near - log_far)) : 0.0f;
    for (int d = 0; d < P; d++) {
        far[d] = state.value_mean[d] + far[d] / least - state.value_mean[d] * tilt;
        mixed[d] = near[d] + gate * (far[d] - near[d]);
    }
    for (int d = 0; feature && d < P; d++) {
        feature[d] = gate * near[d];
        feature[P + d] = gate * state.value_mean[d];
        feature[2 * P + d] = gate * far[d];
    }
}

/* One token of a key/value head: the mixed outputs (R, P) and the features (R, 3, P).

   rank: salience of the columns. sums: the state. mass: of the R heads. */
static inline void mix_head(const uint8_t *keys, Rounding of_keys, const uint8_t *values, Rounding of_values,
                            const float *rank, const float *sums, int64_t number, const float *query,
                            const float *sink_query, const float *mass, float *output, float *features, Layer layer)
{
    int R = layer.R, P = layer.P, N = layer.N, S = layer.S, planes = layer.planes, slow_planes = layer.slow_planes;
    int masses = 2 + N - slow_planes + P - planes, held_sinks = 0;
    float near[R * P], highest[R], total[R], q[R * P], sink_q[R * P], bias[S + 1];
    for (int c = 0; c < S; c++)
        bias[c] = rank[c] == -INFINITY ? -INFINITY : 0.0f;
    scaled_query(query, q, R, P, layer.scale, of_keys);
    if (sink_query) {
        while (held_sinks < layer.sinks && rank[held_sinks] == INFINITY)
            held_sinks++;
        scaled_query(sink_query, sink_q, R, P, layer.scale, of_keys);
    }
    begin(R, P, near, highest, total);
    attend(q, sink_q, held_sinks, keys, of_keys, values, of_values, 0, column_of(number, layer) + 1, bias, S,
           layer.softcap, R, P, near, highest, total);

    const float *last_row = sums + P * (N + 1);
    float count = last_row[0], value_mean[P], of_slow[N + 1], of_square[P];
    for (int d = 0; d < P; d++)
        value_mean[d] = sums[d * (N + 1)] / larger(count, 1.0f);
    for (int r = 0; r < R; r++) {
        Readout state = readout_of(count, value_mean, last_row + 1, mass + r * masses, of_slow, of_square, layer);
        float *own = near + r * P, slow[N + 1], far[P];
        for (int s = 0; s < N; s++)
            slow[s] = query[r * P + slow_dim(s, planes, slow_planes)] * layer.scale;
        for (int d = 0; d < P; d++)
            own[d] /= total[r];
        if (of_values.groups > 0)
            rotate(own, P, P & -P);
        for (int d = 0; d < P; d++) {
            far[d] = 0.0f;
            for (int s = 0; s < N; s++)
                far[d] += sums[d * (N + 1) + 1 + s] * slow[s];
        }
        mix_query(state, query + r * P, slow, own, highest[r] + logf(total[r]), far, output + r * P,
                  features + 3 * r * P, layer);
    }
}

/* Put a column among those that hold a place, the most salient first and the first of equals first, unless S others
   are more salient; there is room for S + 1. Returns how many hold one. */
static inline int compete(int column, const float *rank, int *place, int held, int S)
{
    if (rank[column] == -INFINITY)
        return held;
    int at = held;
    for (; at > 0 && rank[place[at - 1]] < rank[column]; at--)
        place[at] = place[at - 1];
    place[at] = column;
    return held < S ? held + 1 : S;
}
