/* Softmax attention of the queries of a few heads to columns that lie in rows. */

#pragma once

#include "rows.h"

/* The results of `attend` before the first column. */
void begin(int R, int P, float *output, float *highest, float *total);

/* Softmax attention of the queries of R heads to some columns, beside those before; the sum of values is not yet
   divided by `total`.

   query, sink_query: R x P, rotated as keys are, times the scale; the second is for the first `sinks` columns.
   bias: added to the scores of the first `biased` columns, -inf where one is hidden. */
void attend(const float *query, const float *sink_query, int sinks, const uint8_t *keys, Rounding of_keys,
            const uint8_t *values, Rounding of_values, int first, int last, const float *bias, int biased,
            float softcap, int R, int P, float *output, float *highest, float *total);

/* The queries of R heads, times the scale and rotated as keys are. */
void scaled_query(const float *query, float *t, int R, int P, float scale, Rounding of_keys);
