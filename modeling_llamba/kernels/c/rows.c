/* Rows of all vectors of a tensor, and back. */

#include "rows.h"

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
