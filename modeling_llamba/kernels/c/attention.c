/* Softmax attention of a token to all columns of its heads. */

#include <stdlib.h>
#include "attention.h"

enum { TILE = 64 }; /* columns whose scores are known before their values are read */

void begin(int R, int P, float *output, float *highest, float *total)
{
    for (int r = 0; r < R; r++) {
        highest[r] = NONE;
        total[r] = 0.0f;
    }
    memset(output, 0, 4 * R * P);
}

/* Weighted sums of vectors (columns, P), for R heads: added to `sums` (R, P).

   weights: (., TILE), of which the rows up to the next multiple of TOGETHER are read. */
static inline void add_weighted(const float *weights, const float *vectors, int columns, int R, int P, float *sums)
{
    int whole = P / LANES * LANES;
    for (int r = 0; r < R; r += TOGETHER)
        for (int d = 0; d < whole; d += LANES) {
            Lanes sum[TOGETHER] = {{0}};
            for (int c = 0; c < columns; c++)
                for (int i = 0; i < TOGETHER; i++)
                    sum[i] += weights[(r + i) * TILE + c] * *(const Lanes *)(vectors + c * P + d);
            for (int i = 0; i < TOGETHER && r + i < R; i++)
                *(Lanes *)(sums + (r + i) * P + d) += sum[i];
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < columns; c++)
            for (int d = whole; d < P; d++)
                sums[r * P + d] += weights[r * TILE + c] * vectors[c * P + d];
}

/* What `attend` does; inlined, so that P may be a constant. */
static inline __attribute__((always_inline)) void
attend_dims(const float *query, const float *sink_query, int sinks, const uint8_t *keys, Rounding of_keys,
            const uint8_t *values, Rounding of_values, int first, int last, const float *bias, int biased,
            float softcap, int R, int P, float *output, float *highest, float *total)
{
    float score[R + TOGETHER][TILE], t[TILE * P];
    memset(score[R], 0, TOGETHER * sizeof score[0]);
    for (; first < last; first += TILE) {
        int columns = last - first < TILE ? last - first : TILE;
        for (int c = 0; c < columns; c++) {
            const float *q = first + c < sinks ? sink_query : query;
            unpack(keys + (int64_t)(first + c) * of_keys.step, t, P, of_keys);
            for (int r = 0; r < R; r++) {
                float sum = 0.0f;
                for (int d = 0; d < P; d++)
                    sum += q[r * P + d] * t[d];
                score[r][c] = sum;
            }
        }
        for (int r = 0; r < R; r++) {
            float above = highest[r], sum = 0.0f;
            if (softcap > 0)
                for (int c = 0; c < columns; c++)
                    score[r][c] = softcap * tanhf(score[r][c] / softcap);
            for (int c = 0; c < columns && first + c < biased; c++)
                score[r][c] = larger(NONE, score[r][c] + bias[first + c]);
            for (int c = 0; c < columns; c++)
                above = larger(score[r][c], above);
            for (int c = 0; c < columns; c++) {
                score[r][c] = score[r][c] <= NONE ? 0.0f : exponential(score[r][c] - above);
                sum += score[r][c];
            }
            float shrink = exponential(highest[r] - above);
            highest[r] = above;
            total[r] = total[r] * shrink + sum;
            for (int d = 0; d < P; d++)
                output[r * P + d] *= shrink;
        }
        for (int c = 0; c < columns; c++)
            unpack(values + (int64_t)(first + c) * of_values.step, t + c * P, P, of_values);
        add_weighted(score[0], t, columns, R, P, output);
    }
}

void attend(const float *query, const float *sink_query, int sinks, const uint8_t *keys, Rounding of_keys,
            const uint8_t *values, Rounding of_values, int first, int last, const float *bias, int biased,
            float softcap, int R, int P, float *output, float *highest, float *total)
{
/* loops over a number of dims that is known need no remainders, which takes a third of the time */
#define ATTEND(P)                                                                                                     \
    attend_dims(query, sink_query, sinks, keys, of_keys, values, of_values, first, last, bias, biased, softcap, R, P, \
                output, highest, total)
    if (P == 64)
        ATTEND(64);
    else if (P == 128)
        ATTEND(128);
    else
        ATTEND(P);
#undef ATTEND
}

void scaled_query(const float *query, float *t, int R, int P, float scale, Rounding of_keys)
{
    for (int i = 0; i < R * P; i++)
        t[i] = query[i] * scale;
    if (of_keys.groups > 0)
        for (int r = 0; r < R; r++)
            rotate(t + r * P, P, P & -P);
}

/* Columns lie in pages of `block` each: of request b in those that its `most` numbers in `table` name, or, without a
   table, all in page b. strides: from a page to the next and from a head to the next, in bytes of keys and of values.
   lengths: columns of each request; without them T. */
void attend_to_rows(const float *query, const uint8_t *keys, const uint8_t *values, const int64_t *strides,
                    const int *key_rounding, const int *value_rounding, const int32_t *table, int most, int block,
                    const int64_t *lengths, const float *bias, float *output, float *part, int B, int K, int R, int P,
                    int T, int parts, float scale, float softcap, int threads)
{
    Rounding of_keys = {key_rounding[0], key_rounding[1], key_rounding[2]};
    Rounding of_values = {value_rounding[0], value_rounding[1], value_rounding[2]};
    int size = R * (P + 2), span = (T + parts - 1) / parts;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int n = 0; n < B * K * parts; n++) {
            int head = n / parts, b = head / K, k = head % K, column = n % parts * span;
            int length = lengths ? lengths[b] : T, end = column + span < length ? column + span : length;
            float t[R * P], *found = part + (int64_t)n * size;
            scaled_query(query + (int64_t)head * R * P, t, R, P, scale, of_keys);
            begin(R, P, found, found + R * P, found + R * P + R);
            while (column < end) {
                int before = column / block * block, last = before + block < end ? block : end - before;
                int64_t page = table ? table[b * most + column / block] : b;
                attend(t, t, 0, keys + page * strides[0] + k * strides[1], of_keys,
                       values + page * strides[2] + k * strides[3], of_values, column - before, last,
                       bias ? bias + (int64_t)b * T : 0, bias ? T : 0, softcap, R, P, found, found + R * P,
                       found + R * P + R);
                column = before + last;
            }
        }
#pragma omp for
        for (int n = 0; n < B * K * R; n++) {
            int head = n / R, r = n % R;
            float above = NONE, total = 0.0f, *mixed = output + (int64_t)n * P;
            const float *of_head = part + (int64_t)head * parts * size;
            for (int i = 0; i < parts; i++)
                above = larger(above, of_head[i * size + R * P + r]);
            memset(mixed, 0, 4 * P);
            for (int i = 0; i < parts; i++) {
                float share = exponential(of_head[i * size + R * P + r] - above);
                total += share * of_head[i * size + R * P + R + r];
                for (int d = 0; d < P; d++)
                    mixed[d] += share * of_head[i * size + r * P + d];
            }
            /* 1 at least, of the highest score, unless every column is hidden */
            for (int d = 0; d < P; d++)
                mixed[d] /= larger(total, 1.0f);
            if (of_values.groups > 0)
                rotate(mixed, P, P & -P);
        }
    }
}
