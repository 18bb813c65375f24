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

    const float *of_keys_sums = sums + P * (N + 1);
    float count = of_keys_sums[0], least = larger(count, 1.0f);
    for (int r = 0; r < R; r++) {
        const float *of_head = mass + r * masses, *raw = query + r * P;
        const float *alpha = of_head + 2, *beta = alpha + N - slow_planes;
        float *mixed = output + r * P, *feature = features + 3 * r * P, slow[N + 1];
        float log_mass = of_head[0] + of_head[1] * logf(least), tilt = 0.0f;
        for (int d = 0; d < P; d++)
            log_mass += beta[d < planes ? d : d - planes] * (raw[d] * layer.scale) * (raw[d] * layer.scale);
        for (int s = 0; s < N; s++) {
            slow[s] = raw[slow_dim(s, planes, slow_planes)] * layer.scale;
            float product = slow[s] * of_keys_sums[1 + s] / least;
            tilt += product;
            log_mass += alpha[s < slow_planes ? s : s - slow_planes] * product;
        }
        float *own = near + r * P;
        for (int d = 0; d < P; d++)
            own[d] /= total[r];
        if (of_values.groups > 0)
            rotate(own, P, P & -P);
        float gate = count > 0.5f ? 1.0f / (1.0f + expf(highest[r] + logf(total[r]) - log_mass)) : 0.0f;
        for (int d = 0; d < P; d++) {
            float mean = sums[d * (N + 1)] / least, product = 0.0f;
            for (int s = 0; s < N; s++)
                product += sums[d * (N + 1) + 1 + s] * slow[s];
            float far = mean + product / least - mean * tilt;
            mixed[d] = own[d] + gate * (far - own[d]);
            feature[d] = gate * own[d];
            feature[P + d] = gate * mean;
            feature[2 * P + d] = gate * far;
        }
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
