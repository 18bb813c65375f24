/* Numbers that a register holds together, and what is computed of them. */

#pragma once

#include <math.h>
#include <stdint.h>
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
enum { TOGETHER = 4 }; /* vectors that are multiplied by a matrix together */
/* gcc leaves loops over these scalar by itself */
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
static const float NONE = -1e30f; /* less than any score */

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
    float sum =
        1.0f +
        t * (1.0f + t * (0.5f + t * (0.166666667f + t * (0.0416666667f + t * (0.00833333333f + t * 0.00138888889f)))));
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
