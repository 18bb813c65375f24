"""Steps of a hybrid on a CPU in C: keys and values in few bits become numbers in registers as they are attended to.

PyTorch's operations (rounding.py, hybrid_attention.py) write all keys and values of a cache out as numbers at every
token, by a hundred calls a layer, which takes more time than what they compute. The functions here return what those
do that launch Triton kernels on a GPU, in rounding_kernel.py, row_attention_kernel.py and hybrid_step_kernel.py. All
is in float32.

The C compiler of the machine makes a library of them when the first is called, in a second, which is kept beside the
code that transformers downloads. Where there is no compiler, PyTorch's operations do the same.

Shapes: B batch, H heads, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state, F
planes and other dims, F' slow planes and other slow dims, T columns, W bytes of a row.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging
from transformers.utils.hub import HF_MODULES_CACHE

from ..mixers.ssd import requested_backend
from .hybrid_step_kernel import as_operator, is_traced
from .rounding_kernel import empty_rows

logger = logging.get_logger(__name__)

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 }; /* floats in a register */
#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { TILE = 64 }; /* columns whose scores are known before their values are read */
enum { TOGETHER = 4 }; /* vectors that are multiplied by a matrix together */
/* gcc leaves loops over these scalar by itself */
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
static const float NONE = -1e30f; /* less than any score */
static const float SMALLEST_SCALE = 6.103515625e-05f; /* that of rounding.py, 2^-14 */

/* bits: of a number, 16 and 32 those of bfloat16 and float32. step: bytes from one row to the next. */
typedef struct { int bits, groups, step; } Rounding;

static float from_half(const uint8_t *bytes)
{
    _Float16 half;
    memcpy(&half, bytes, 2);
    return half;
}

/* The second where one is NaN, so that what must not be lost comes second. */
static inline float larger(float one, float other)
{
    return one > other ? one : other;
}

/* e^x for x <= 0, to 1e-7 of it; 0 below -87. By hand, since libm's is not for vectors. */
static inline float exponential(float x)
{
    float scaled = larger(-87.0f, x) * 1.44269504f;
    float whole = rintf(scaled);
    float t = (scaled - whole) * 0.693147181f;
    float sum = 1.0f + t * (1.0f + t * (0.5f + t * (0.166666667f + t * (0.0416666667f + t * (0.00833333333f
        + t * 0.00138888889f)))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : sum * power;
}

/* Products of vectors of N numbers and a matrix (N, width), width a multiple of LANES. */
static void multiply(const float *vectors, const float *matrix, float *products, int N, int width)
{
    for (int first = 0; first < width; first += LANES) {
        Lanes sum[TOGETHER] = {{0}};
        for (int n = 0; n < N; n++) {
            Lanes row = *(const Lanes *)(matrix + n * width + first);
            for (int i = 0; i < TOGETHER; i++)
                sum[i] += vectors[i * N + n] * row;
        }
        for (int i = 0; i < TOGETHER; i++)
            *(Lanes *)(products + i * width + first) = sum[i];
    }
}

static float signs[LANES * LANES]; /* a Hadamard matrix */

__attribute__((constructor)) static void fill_signs(void)
{
    for (int i = 0; i < LANES * LANES; i++)
        signs[i] = __builtin_parity(i / LANES & i % LANES) ? -1.0f : 1.0f;
}

/* Multiply a vector by the matrix `hadamard` of rounding.py, whose blocks have `part` rows. */
static void rotate(float *t, int P, int part)
{
    float norm = 1.0f / sqrtf(part);
    int half = 1, step = TOGETHER * LANES;
    if (part >= LANES && P % step == 0) {
        float products[TOGETHER * LANES];
        for (int first = 0; first < P; first += step) {
            multiply(t + first, signs, products, LANES, LANES);
            memcpy(t + first, products, sizeof products);
        }
        half = LANES;
    }
    for (; half < part; half *= 2)
        for (int first = 0; first < P; first += 2 * half)
            for (int i = first; i < first + half; i++) {
                float one = t[i], other = t[i + half];
                t[i] = one + other;
                t[i + half] = one - other;
            }
    for (int i = 0; i < P; i++)
        t[i] *= norm;
}

/* The codes of P numbers, in the upper bits of a byte. */
static void unpack_bytes(const uint8_t *codes, float *t, int P, int bits)
{
    if (bits == 8)
        for (int i = 0; i < P; i++)
            t[i] = (int8_t)codes[i];
    else if (bits == 6) {
        int quarter = P / 4;
        for (int i = 0; i < 3 * quarter; i++)
            t[i] = (int8_t)(codes[i] & 252);
        for (int i = 0; i < quarter; i++)
            t[3 * quarter + i] = (int8_t)((codes[i] & 3) << 6 | (codes[quarter + i] & 3) << 4
                | (codes[2 * quarter + i] & 3) << 2);
    } else {
        int bytes = P * bits / 8, upper = 256 - (1 << (8 - bits));
        for (int j = 0; j < 8 / bits; j++)
            for (int i = 0; i < bytes; i++)
                t[j * bytes + i] = (int8_t)(codes[i] << (8 - bits - bits * j) & upper);
    }
}

#ifdef __AVX2__
/* LANES bytes, each in the lowest bits of a word. */
static inline Words words_of(const uint8_t *bytes)
{
#ifdef __AVX512F__
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#else
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#endif
}

/* The numbers whose codes are the highest 8 bits of words, times their scale. */
static inline Lanes numbers_of(Words words, float scale)
{
    words >>= 24;
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps((__m512i)words) * scale;
#else
    return _mm256_cvtepi32_ps((__m256i)words) * scale;
#endif
}

/* Numbers times `scale`; false if their codes do not fill registers, or are of too few bits to gain by it. */
static inline int unpack_lanes(const uint8_t *codes, float scale, float *t, int P, int bits)
{
    if (P % (4 * LANES) != 0 || bits < 4)
        return 0;
    int bytes = bits == 6 ? P / 4 : P * bits / 8;
    for (int i = 0; i < bytes; i += LANES) {
        Words words = words_of(codes + i);
        Lanes *out = (Lanes *)(t + i);
        if (bits == 8)
            *out = numbers_of(words << 24, scale);
        else if (bits == 4) {
            *out = numbers_of(words << 28, scale);
            *(Lanes *)(t + bytes + i) = numbers_of(words >> 4 << 28, scale);
        } else {
            Words second = words_of(codes + bytes + i), third = words_of(codes + 2 * bytes + i);
            *out = numbers_of(words >> 2 << 26, scale);
            *(Lanes *)(t + bytes + i) = numbers_of(second >> 2 << 26, scale);
            *(Lanes *)(t + 2 * bytes + i) = numbers_of(third >> 2 << 26, scale);
            *(Lanes *)(t + 3 * bytes + i) = numbers_of(words << 30 | (second & 3) << 28 | (third & 3) << 26, scale);
        }
    }
    return 1;
}
#endif

/* The vector in a row, as it is stored, which is rotated where it is rounded. */
static inline void unpack(const uint8_t *row, float *t, int P, Rounding rounding)
{
    int bits = rounding.bits, groups = rounding.groups;
    if (bits == 32) {
        memcpy(t, row, 4 * P);
        return;
    }
    if (bits == 16) {
        for (int i = 0; i < P; i++) {
            uint32_t number = (uint32_t)((const uint16_t *)row)[i] << 16;
            memcpy(t + i, &number, 4);
        }
        return;
    }
    const uint8_t *codes = row + 2 * groups;
    int done = 0;
#ifdef __AVX2__
    done = unpack_lanes(codes, groups == 1 ? from_half(row) : 1.0f, t, P, bits);
#endif
    if (done && groups == 1)
        return;
    if (!done)
        unpack_bytes(codes, t, P, bits);
    int size = P / groups;
    for (int g = 0; g < groups; g++) {
        float scale = from_half(row + 2 * g);
        for (int i = 0; i < size; i++)
            t[g * size + i] *= scale;
    }
}

/* The row of a vector that is rotated already; see rounding.py. */
static void pack(const float *t, uint8_t *row, int P, Rounding rounding)
{
    int bits = rounding.bits, groups = rounding.groups;
    if (bits == 32) {
        memcpy(row, t, 4 * P);
        return;
    }
    if (bits == 16) {
        for (int i = 0; i < P; i++)
            memcpy(row + 2 * i, (const uint8_t *)(t + i) + 2, 2); /* exact: t was made of bfloat16 */
        return;
    }
    int size = P / groups, shift = 1 << (8 - bits);
    float largest = 128 - shift;
    int8_t code[P];
    for (int g = 0; g < groups; g++) {
        /* as integers magnitudes have the same order, and NaN, which the scale must not hide, is the largest */
        int32_t greatest = 0, number;
        for (int i = g * size; i < (g + 1) * size; i++) {
            memcpy(&number, t + i, 4);
            number &= 0x7fffffff;
            greatest = number > greatest ? number : greatest;
        }
        float magnitude;
        memcpy(&magnitude, &greatest, 4);
        _Float16 half = larger(SMALLEST_SCALE / shift, magnitude / largest);
        memcpy(row + 2 * g, &half, 2);
        float step = (float)half * shift;
        for (int i = g * size; i < (g + 1) * size; i++)
            code[i] = (int8_t)(int32_t)rintf(t[i] / step);
    }
    uint8_t *codes = row + 2 * groups;
    if (bits == 8)
        memcpy(codes, code, P);
    else if (bits == 6) {
        int quarter = P / 4;
        for (int j = 0; j < 3; j++)
            for (int i = 0; i < quarter; i++)
                codes[j * quarter + i] = code[j * quarter + i] << 2 | (code[3 * quarter + i] >> (4 - 2 * j) & 3);
    } else {
        int bytes = P * bits / 8, mask = (1 << bits) - 1;
        for (int i = 0; i < bytes; i++) {
            int byte = 0;
            for (int j = 0; j < 8 / bits; j++)
                byte |= (code[j * bytes + i] & mask) << (bits * j);
            codes[i] = byte;
        }
    }
}

/* Offset of vector number n of a tensor (., heads, length, P) with these strides. */
static int64_t offset(int64_t n, const int64_t *sizes, const int64_t *strides)
{
    int64_t heads = sizes[0], length = sizes[1];
    return n / length / heads * strides[0] + n / length % heads * strides[1] + n % length * strides[2];
}

void encode_rows(const float *vectors, uint8_t *rows, int64_t count, const int64_t *sizes, const int64_t *strides,
                 int P, int bits, int groups, int width, int threads)
{
    Rounding rounding = {bits, groups, width};
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < count; n++) {
        float t[P];
        memcpy(t, vectors + offset(n, sizes, strides), 4 * P);
        rotate(t, P, P & -P);
        pack(t, rows + n * width, P, rounding);
    }
}

void decode_rows(const uint8_t *rows, float *vectors, int64_t count, const int64_t *sizes, const int64_t *strides,
                 int P, int bits, int groups, int width, int rotates, int threads)
{
    Rounding rounding = {bits, groups, width};
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < count; n++) {
        unpack(rows + offset(n, sizes, strides), vectors + n * P, P, rounding);
        if (rotates)
            rotate(vectors + n * P, P, P & -P);
    }
}

/* The results of `attend` before the first column. */
static void begin(int R, int P, float *output, float *highest, float *total)
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
static inline __attribute__((always_inline)) void attend_dims(
    const float *query, const float *sink_query, const float *sink_shift, int sinks, const uint8_t *keys,
    Rounding of_keys, const uint8_t *values, Rounding of_values, int first, int last, const float *bias, int biased,
    float softcap, int R, int P, float *output, float *highest, float *total)
{
    float score[R + TOGETHER][TILE], t[TILE * P];
    memset(score[R], 0, TOGETHER * sizeof score[0]);
    for (; first < last; first += TILE) {
        int columns = last - first < TILE ? last - first : TILE;
        for (int c = 0; c < columns; c++) {
            int is_sink = first + c < sinks;
            const float *q = is_sink ? sink_query : query;
            unpack(keys + (int64_t)(first + c) * of_keys.step, t, P, of_keys);
            for (int r = 0; r < R; r++) {
                float sum = is_sink ? sink_shift[r] : 0.0f;
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

/* Softmax attention of the queries of R heads to some columns, beside those before; the sum of values is not yet
   divided by `total`.

   query, sink_query: R x P, rotated as keys are, times the scale; the second is for the first `sinks` columns, to
   whose scores sink_shift (R) is added.
   bias: added to the scores of the first `biased` columns, -inf where one is hidden. */
static void attend(const float *query, const float *sink_query, const float *sink_shift, int sinks,
                   const uint8_t *keys, Rounding of_keys, const uint8_t *values, Rounding of_values, int first,
                   int last, const float *bias, int biased, float softcap, int R, int P, float *output,
                   float *highest, float *total)
{
    /* loops over a number of dims that is known need no remainders, which takes a third of the time */
    #define ATTEND(P) attend_dims(query, sink_query, sink_shift, sinks, keys, of_keys, values, of_values, first, \
                                  last, bias, biased, softcap, R, P, output, highest, total)
    if (P == 64)
        ATTEND(64);
    else if (P == 128)
        ATTEND(128);
    else
        ATTEND(P);
    #undef ATTEND
}

/* The queries of R heads, times the scale and rotated as keys are. */
static void scaled_query(const float *query, float *t, int R, int P, float scale, Rounding of_keys)
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
                attend(t, t, 0, 0, keys + page * strides[0] + k * strides[1], of_keys,
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

/* Of a slow dimension, the dimension of the head: planes' first halves, their second, and what is not rotated. */
static int slow_dim(int s, int planes, int slow_planes)
{
    return s + (s < slow_planes ? 1 : 2) * (planes - slow_planes);
}

/* Sizes of a hybrid layer, K that of its heads with a window. */
typedef struct { int K, R, P, N, T, E, sinks, S, planes, slow_planes; float scale, softcap; } Layer;

/* Column of the token with this number, whose block is open. */
static int column_of(int64_t number, Layer layer)
{
    int64_t left = number / layer.E - ((layer.T - layer.S) / layer.E - 1);
    return layer.S + number - (left > 0 ? left : 0) * layer.E;
}

/* One token of a key/value head: the mixed outputs (R, P) and the features (R, 3, P).

   rank: salience of the columns. sums: the state. offset (P): what was taken off the keys, or none. mass: of the R
   heads. */
static void mix_head(const uint8_t *keys, Rounding of_keys, const uint8_t *values, Rounding of_values,
                     const float *rank, const float *sums, int64_t number, const float *query, const float *sink_query,
                     const float *offset, const float *mass, float *output, float *features, Layer layer)
{
    int R = layer.R, P = layer.P, N = layer.N, S = layer.S, planes = layer.planes, slow_planes = layer.slow_planes;
    int masses = 2 + N - slow_planes + P - planes, held_sinks = 0;
    float near[R * P], highest[R], total[R], q[R * P], sink_q[R * P], bias[S + 1], sink_shift[R];
    for (int c = 0; c < S; c++)
        bias[c] = rank[c] == -INFINITY ? -INFINITY : 0.0f;
    scaled_query(query, q, R, P, layer.scale, of_keys);
    if (sink_query) {
        while (held_sinks < layer.sinks && rank[held_sinks] == INFINITY)
            held_sinks++;
        scaled_query(sink_query, sink_q, R, P, layer.scale, of_keys);
        /* all other scores lack q . offset, and those of sinks sink_q . offset */
        for (int r = 0; r < R; r++) {
            sink_shift[r] = 0.0f;
            for (int d = 0; d < P && offset; d++)
                sink_shift[r] += layer.scale * (sink_query[r * P + d] - query[r * P + d]) * offset[d];
        }
    }
    begin(R, P, near, highest, total);
    attend(q, sink_q, sink_shift, held_sinks, keys, of_keys, values, of_values, 0, column_of(number, layer) + 1, bias,
           S, layer.softcap, R, P, near, highest, total);

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

/* strides: of a row of the batch, in bytes of keys and of values, and in numbers of salience and of the state */
void mix_one(const uint8_t *keys, const uint8_t *values, const float *salience, const float *state,
             const int64_t *seen, const int64_t *strides, const float *query, const float *sink_query,
             const float *offset, const float *mass, float *output, float *features, const int *key_rounding,
             const int *value_rounding, Layer layer, int B, int threads)
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
                 offset ? offset + k * layer.P : 0, mass + k * layer.R * masses, output + (int64_t)n * size,
                 features + 3 * (int64_t)n * size, layer);
    }
}

/* Put a column among those that hold a place, the most salient first and the first of equals first, unless S others
   are more salient; there is room for S + 1. Returns how many hold one. */
static int compete(int column, const float *rank, int *place, int held, int S)
{
    if (rank[column] == -INFINITY)
        return held;
    int at = held;
    for (; at > 0 && rank[place[at - 1]] < rank[column]; at--)
        place[at] = place[at - 1];
    place[at] = column;
    return held < S ? held + 1 : S;
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
"""
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    # vectors of float sums, which need another order of addition; infinities and NaN stay what they are
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
ARCHITECTURES = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
"""Options for the instructions that PyTorch itself uses on this machine, by its name for them."""
LIBRARY_FOLDER = Path(HF_MODULES_CACHE) / "hybrid_kernels"
"""Folder in which compiled libraries are kept, below transformers' own for remote code."""
COMPILE_VARIABLE = "HYBRID_COMPILE_C"
"""Environment variable that keeps a hybrid from compiling, with 0."""
TYPES = {torch.float32: 32, torch.bfloat16: 16}
"""Types of a model that is computed here, and their bits."""
SPAN = 512
"""Columns of a part at least, where several threads attend to one head."""


class Layer(ctypes.Structure):
    """Sizes of a hybrid layer, as the functions in C read them."""

    _fields_ = [(name, ctypes.c_int) for name in "K R P N T E sinks S planes slow_planes".split()] + [
        (name, ctypes.c_float) for name in ("scale", "softcap")
    ]


def compilers() -> list[str]:
    """The machine's C compilers, first that of the environment variable CC if it is set."""
    found = map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))
    return [*dict.fromkeys(path for path in found if path is not None)]


@functools.cache
def library(more: str = "") -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be compiled, which is said once, or must not be.

    Args:
        more: source of functions that belong to another module and call these.
    """
    if os.environ.get(COMPILE_VARIABLE) == "0":
        return None
    text = SOURCE + more
    flags = FLAGS + ARCHITECTURES.get(torch.backends.cpu.get_cpu_capability(), ())
    # OpenMP's functions are PyTorch's own, which are in the process already if they are those of this compiler
    variants = [(found, (*flags, *openmp)) for found in compilers() for openmp in (("-fopenmp",), ())]
    for _, options in variants:
        kept = LIBRARY_FOLDER / _name_of(text, options)
        if kept.is_file():
            with contextlib.suppress(OSError):  # of another C library: then it is made once more
                return ctypes.CDLL(str(kept))
    causes: dict[Path | None, str] = {}
    # a temporary folder serves where that of the libraries is full, or must not be written to or run from
    for folder in (LIBRARY_FOLDER, None):
        for found, options in variants:
            try:
                return _compiled(text, found, options, folder)
            except (OSError, subprocess.CalledProcessError) as error:
                causes[folder] = _cause(found, error)
    problem = "; ".join(dict.fromkeys(causes.values())) or "there is no C compiler; install gcc"
    logger.warning(
        f"A hybrid is slower on a CPU without its functions in C ({problem}). Set {COMPILE_VARIABLE}=0 to do without."
    )
    return None


def _name_of(text: str, options: tuple[str, ...]) -> str:
    """File name of a library that was made of this source with these options for such a machine."""
    made_of = "\n".join([text, *options, sys.platform, platform.machine()])
    return f"{hashlib.sha256(made_of.encode()).hexdigest()}.so"


def _compiled(text: str, found: str, options: tuple[str, ...], folder: Path | None) -> ctypes.CDLL:
    """Compile a source into a library and load it.

    Args:
        folder: the library is made and kept here; None for a temporary folder, for this process alone.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be compiled, or cannot be loaded.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, compiled, linked = (Path(scratch) / name for name in ("kernels.c", "kernels.o", "kernels.so"))
        source.write_text(text)
        for arguments in ([*options, "-c", source, "-o", compiled], ["-shared", compiled, "-o", linked, "-lm"]):
            subprocess.run([found, *map(str, arguments)], check=True, capture_output=True)
        loaded = ctypes.CDLL(str(linked))
        if folder is not None:
            os.replace(linked, folder / _name_of(text, options))  # another process may do the same
        return loaded


def _cause(found: str, error: OSError | subprocess.CalledProcessError) -> str:
    """The reason for which compiling or loading failed, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{found}: {error.stderr.decode(errors='replace').strip().partition(chr(10))[0]}"
    if "failed to map segment" in str(error) or "Operation not permitted" in str(error):
        folder = Path(str(error).partition(":")[0]).parent.parent
        return f"nothing in {folder} may be run, by its mount option noexec; set HF_HOME to another folder"
    return f"{found}: {error}"


def can_run_on_cpu(device: torch.device, dtype: torch.dtype, backend: str, more: str = "") -> bool:
    """Return True if the functions run here, for numbers of this type and the configuration's `mixer_backend`.

    Args:
        more: source of other functions, see `library`.
    """
    if device.type != "cpu" or dtype not in TYPES or requested_backend(backend) == "torch":
        return False
    return _is_there(more)


@torch.compiler.assume_constant_result
def _is_there(more: str) -> bool:
    return library(more) is not None


def pointer(t: torch.Tensor | None, offset: int = 0) -> ctypes.c_void_p:
    """Address of a tensor's first byte, or of another `offset` bytes behind it; NULL for None."""
    return ctypes.c_void_p(None if t is None else t.data_ptr() + offset)


@functools.cache
def _ints(*numbers: int) -> ctypes.Array:
    return (ctypes.c_int * len(numbers))(*numbers)


def int64s(*numbers: int) -> ctypes.Array:
    """Numbers as an array in C."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


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
def encode_on_cpu(t: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Rows (..., W) uint8 of vectors (..., P)."""
    rows = empty_rows(t, bits, groups)
    t = _lined_up(t.float())
    library().encode_rows(
        pointer(t), pointer(rows), ctypes.c_int64(math.prod(t.shape[:-1])), *_places(t), t.shape[-1], bits, groups,
        rows.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    return rows


@encode_on_cpu.register_fake
def _(t, bits, groups):
    return empty_rows(t, bits, groups)


@as_operator
def decode_on_cpu(rows: torch.Tensor, bits: int, dim: int, groups: int, rotated: bool) -> torch.Tensor:
    """Vectors (..., P) of rows (..., W) in float32; as they are stored, which is rotated, if `rotated`."""
    vectors = _empty_vectors(rows, bits, dim, groups, rotated)
    rows = _lined_up(rows)
    library().decode_rows(
        pointer(rows), pointer(vectors), ctypes.c_int64(math.prod(rows.shape[:-1])), *_places(rows), dim, bits,
        groups, rows.shape[-1], not rotated, torch.get_num_threads(),
    )  # fmt: skip
    return vectors


@decode_on_cpu.register_fake
def _empty_vectors(rows: torch.Tensor, bits: int, dim: int, groups: int, rotated: bool) -> torch.Tensor:
    """Memory for `decode_on_cpu`."""
    return rows.new_empty(*rows.shape[:-1], dim, dtype=torch.float32)


@as_operator
def attend_on_cpu(
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
    batch, heads, _, P = query.shape
    kv_heads, columns = keys.shape[1:3]
    shared = heads // kv_heads
    threads = torch.get_num_threads()
    parts = 1 if threads == 1 else min(-(-columns // SPAN), 2 * threads)
    keys, values = (_readable(t) for t in (keys, values))
    keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    queries = query.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    strides = [stride * t.element_size() for t in (keys, values) for stride in t.stride()[:2]]
    output = queries.new_empty(batch, 1, heads, P)
    scratch = queries.new_empty(batch * kv_heads * parts, shared, P + 2)
    library().attend_to_rows(
        pointer(queries), pointer(keys), pointer(values), int64s(*strides), _rows_of(keys, key_bits, P),
        _rows_of(values, value_bits, P), None, 0, columns, None, pointer(bias), pointer(output), pointer(scratch),
        batch, kv_heads, shared, P, columns, parts, ctypes.c_float(scale), ctypes.c_float(softcap), threads,
    )  # fmt: skip
    return output.to(query.dtype)


@attend_on_cpu.register_fake
def _(query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P)


@as_operator
def mix_one_on_cpu(
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    state: torch.Tensor,
    seen: torch.Tensor,
    query: torch.Tensor,
    sink_query: torch.Tensor | None,
    offset: torch.Tensor | None,
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

    The arguments are those of hybrid_step_kernel.py's function, and the bits of keys and of values.
    """
    batch, heads, _, P = query.shape
    _, kv_heads, columns, _ = keys.shape
    held = _readable(keys), _readable(values), salience, state
    keys, values, salience, state = (t if t[0].is_contiguous() else t.contiguous() for t in held)
    strides = keys.stride(0) * keys.element_size(), values.stride(0) * values.element_size()
    seen = seen.contiguous()
    queries = query.float().contiguous()
    mass = mass.float().contiguous()
    sink_query, offset = (None if t is None else t.float().contiguous() for t in (sink_query, offset))
    output, features = queries.new_empty(batch, 1, heads, P), queries.new_empty(batch, 1, 3 * heads * P)
    library().mix_one(
        *map(pointer, (keys, values, salience, state, seen)),
        int64s(*strides, salience.stride(0), state.stride(0)),
        *map(pointer, (queries, sink_query, offset, mass, output, features)),
        _rows_of(keys, key_bits, P), _rows_of(values, value_bits, P),
        Layer(
            kv_heads, heads // kv_heads, P, state.shape[-1] - 1, columns, block, sinks, places, planes, slow_planes,
            scale, softcap,
        ),
        batch, torch.get_num_threads(),
    )  # fmt: skip
    return output.to(query.dtype), features.to(query.dtype)


@mix_one_on_cpu.register_fake
def _(keys, values, salience, state, seen, query, *others):
    batch, heads, _, P = query.shape
    return query.new_empty(batch, 1, heads, P), query.new_empty(batch, 1, 3 * heads * P)


def open_on_cpu(
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    state: torch.Tensor | None,
    next_index: torch.Tensor,
    shape,
) -> int:
    """Do what `open_blocks` of eviction.py does, in place, where `can_open_on_cpu`; return in how many rows.

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


def can_open_on_cpu(held, backend: str) -> bool:
    """Return True if `open_on_cpu` runs here, for the tensors of a `Held`."""
    keys, values, salience, state, _ = held
    if is_traced() or type(keys) is not torch.Tensor or not {keys.dtype, values.dtype} <= {torch.uint8, *TYPES}:
        return False
    if not all(t is None or t[0].is_contiguous() for t in (keys, values, salience, state)):
        return False
    return can_run_on_cpu(salience.device, salience.dtype, backend)


def _readable(t: torch.Tensor) -> torch.Tensor:
    """Rows as they are, or numbers of a type that C reads: autocast may have made them float16."""
    return t if t.dtype in (torch.uint8, *TYPES) else t.float()


def _rows_of(t: torch.Tensor, bits: int, dim: int) -> ctypes.Array:
    """Bits, groups and bytes from one row to the next of rows (..., T, W)."""
    step = t.stride(-2) * t.element_size()
    if t.dtype != torch.uint8:
        return _ints(TYPES[t.dtype], 0, step)
    return _ints(bits, (t.shape[-1] - dim * bits // 8) // torch.float16.itemsize, step)
