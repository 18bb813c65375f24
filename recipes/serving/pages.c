/* A token of each request, in pages of vLLM. */

#include "layer.h"

/* Slots of a request, one behind another in the pages with the numbers `rows`. */
typedef struct {
    uint8_t *memory;
    int64_t size;
    const int64_t *rows;
} Slots;

static uint8_t *byte_at(Slots slots, int64_t place)
{
    return slots.memory + slots.rows[place / slots.size] * slots.size + place % slots.size;
}

/* How many of these bytes lie in the page of the first. */
static int64_t in_page(Slots slots, int64_t place, int64_t count)
{
    int64_t left = slots.size - place % slots.size;
    return left < count ? left : count;
}

/* Bytes of slots: where they are, or their copy in `scratch` if they do not lie in one page. */
static const void *held(Slots slots, int64_t place, int64_t count, uint8_t *scratch)
{
    if (in_page(slots, place, count) == count)
        return byte_at(slots, place);
    for (int64_t here, done = 0; done < count; done += here) {
        here = in_page(slots, place + done, count - done);
        memcpy(scratch + done, byte_at(slots, place + done), here);
    }
    return scratch;
}

static void write(Slots slots, int64_t place, const void *bytes, int64_t count)
{
    for (int64_t here, done = 0; done < count; done += here) {
        here = in_page(slots, place + done, count - done);
        memcpy(byte_at(slots, place + done), (const uint8_t *)bytes + done, here);
    }
}

static void encode(const float *vector, uint8_t *row, int P, Rounding rounding)
{
    float t[P];
    memcpy(t, vector, 4 * P);
    if (rounding.groups > 0)
        rotate(t, P, P & -P);
    pack(t, row, P, rounding);
}

/* Write a token of each request into its slot and mix it.

   places: of salience, state, keys and values in a request's slots. heads: queries of R K heads, where there are any
   those to sinks, keys and values of K heads. room: bytes of `scratch`
   for each key/value head. */
void step_in_slots(uint8_t *memory, int64_t size, const int64_t *rows, int pages, const int64_t *places,
                   const int64_t *number, const float *salience, const float *heads, int has_sinks, const float *mass,
                   float *output, float *features, const int *key_rounding, const int *value_rounding, Layer layer,
                   int B, uint8_t *scratch, int64_t room, int threads)
{
    Rounding of_keys = {key_rounding[0], key_rounding[1], key_rounding[2]};
    Rounding of_values = {value_rounding[0], value_rounding[1], value_rounding[2]};
    int K = layer.K, R = layer.R, P = layer.P, T = layer.T, N = layer.N, group = R * P;
    int width = (1 + has_sinks) * K * group + 2 * K * P, masses = 2 + N - layer.slow_planes + P - layer.planes;
    int64_t key_bytes = (int64_t)T * of_keys.step, value_bytes = (int64_t)T * of_values.step;
    int64_t state_bytes = 4 * (int64_t)(P + 1) * (N + 1);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int n = 0; n < B * K; n++) {
            int b = n / K, k = n % K, column = column_of(number[b], layer);
            Slots slots = {memory, size, rows + b * pages};
            const float *value = heads + (int64_t)(b + 1) * width - (K - k) * P;
            uint8_t row[4 * P];
            encode(value - K * P, row, P, of_keys);
            write(slots, places[2] + k * key_bytes + column * of_keys.step, row, of_keys.step);
            encode(value, row, P, of_values);
            write(slots, places[3] + k * value_bytes + column * of_values.step, row, of_values.step);
            if (k == 0)
                write(slots, places[0] + 4 * column, salience + b, 4);
        }
#pragma omp for
        for (int n = 0; n < B * K; n++) {
            int b = n / K, k = n % K;
            Slots slots = {memory, size, rows + b * pages};
            uint8_t *for_state = scratch + n * room, *for_salience = for_state + state_bytes;
            uint8_t *for_keys = for_salience + 4 * T, *for_values = for_keys + key_bytes;
            const float *query = heads + (int64_t)b * width + k * group;
            mix_head(held(slots, places[2] + k * key_bytes, key_bytes, for_keys), of_keys,
                     held(slots, places[3] + k * value_bytes, value_bytes, for_values), of_values,
                     held(slots, places[0], 4 * layer.S, for_salience),
                     held(slots, places[1] + k * state_bytes, state_bytes, for_state), number[b], query,
                     has_sinks ? query + K * group : 0, mass + k * R * masses, output + (int64_t)n * group,
                     features + 3 * (int64_t)n * group, layer);
        }
    }
}
