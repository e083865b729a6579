/* Rows of activations as 8-bit numbers: groups of 32 columns that share a scale. */
#ifndef TLLM_QUANTIZE_ROWS_H
#define TLLM_QUANTIZE_ROWS_H

#include "vectors.h"

#define X_GROUP 32
#define X_HALF 16

/* Rows of columns padded to whole groups, of which each group lies as one: codes [groups, pitch, 32], scales
 * [groups, pitch], and the sums of the codes of each half group, [2 groups, pitch]. So some rows of a group lie together,
 * whichever are the first and the last. From `rows` to `pitch` scales are 0, and the rest is anything. */
typedef struct {
    int8_t *codes;
    float *scales;
    int32_t *sums;
    int64_t rows, groups, pitch;
} QuantizedRows;

/* Rows for which there is room: eights, so that tiles of them read no other memory than that of rows. */
INLINE int64_t pitch_of(int64_t rows) { return rows == 1 ? 1 : (rows + 7) / 8 * 8; }

/* x [rows, columns] of a dtype. scale = largest / 127, code = x * (127 / largest) to the nearest, ties to even. A group
 * with a number that is not finite has the scale NaN, so that its products are NaN. */
void quantize_rows(QuantizedRows into, const void *x, int64_t columns, int dtype, int threads);

#endif
