/* A vector in few bits is a row of bytes; hybrid/rounding.py has its layout. */

#pragma once

#include "vectors.h"

static const float SMALLEST_SCALE = 6.103515625e-05f; /* that of rounding.py, 2^-14 */

/* bits: of a number, 16 and 32 those of bfloat16 and float32. step: bytes from one row to the next. */
typedef struct {
    int bits, groups, step;
} Rounding;

static float from_half(const uint8_t *bytes)
{
    _Float16 half;
    memcpy(&half, bytes, 2);
    return half;
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
            t[3 * quarter + i] =
                (int8_t)((codes[i] & 3) << 6 | (codes[quarter + i] & 3) << 4 | (codes[2 * quarter + i] & 3) << 2);
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
static inline void pack(const float *t, uint8_t *row, int P, Rounding rounding)
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
