/* y = x W^T, where W has codes of 4 or 8 bits and scales for groups of columns, and x is rounded to 8 bits by groups.
 *
 * For a row and an output: over the weight's groups in order, y = y + (sum over x's groups in it of i * d) * scale, and
 * y = y - (sum of s * d) * minimum where there are minima, with i the exact sum of (code - offset) * x_code, s that of
 * x_code, d x's scale. Each operation is rounded to float32 once, in this order, so that an output has the same bits on
 * every processor, for any number of rows, threads and outputs beside it.
 *
 * For sums that ranks share, y in float64 adds i * d * scale and s * d * minimum of each of x's groups, rounded to
 * multiples of 2^-30. Such sums are exact up to 2^23, so it does not matter how the columns are cut among ranks, if only
 * at x's groups, nor in which order these are added.
 *
 * W is packed in blocks of 16 outputs. A block of 8 bits has 64 bytes for 4 columns: of each output its 4 codes. One of
 * 4 bits has 64 bytes for 8 columns: the low halves are the codes of the first 4. Scales and minima lie [group, 16].
 */
#include "dot.h"
#include "quantize_rows.h"
#include "threads.h"

#define AHEAD 4096 /* bytes of codes that are fetched before they are needed */

enum { NIBBLES, NIBBLES_BY_TABLE, BYTES };

typedef struct {
    const uint8_t *codes;     /* [blocks, padded / 8 or / 4, 64] */
    const void *scales;       /* [blocks, groups, 16] of scale_dtype */
    const void *super_scales; /* [blocks, super groups, 16] of super_dtype, or none */
    const void *minima;       /* as scales, or none */
    const void *super_minima;
    int64_t outputs, columns, padded; /* padded: columns up to a whole group of 32 */
    int64_t group, super_group;       /* columns; group is 16 or a multiple of 32 */
    int32_t kind, offset, scale_dtype, super_dtype;
    uint8_t table[16];
} PackedWeight;

typedef struct {
    const PackedWeight *weight;
    QuantizedRows x;
    void *y;
    int64_t rows, stride; /* stride: elements between y's rows */
    int32_t y_dtype;
} Product;

/* The scales (or minima) of a group of a block. */
INLINE f32x16 of_group(const PackedWeight *w, const void *codes, const void *super, int64_t block, int64_t group,
                       int64_t groups) {
    f32x16 scale = load16(codes, (block * groups + group) * LANES, w->scale_dtype);
    if (super == 0) return scale;
    int64_t super_groups = (w->columns + w->super_group - 1) / w->super_group;
    int64_t at = block * super_groups + group * w->group / w->super_group;
    return load16(super, at * LANES, w->super_dtype) * scale;
}

/* Adds the exact sums over columns [first, last) of a block, of which there are 16 or 32, for some rows of x. */
INLINE void dots(i32x16 *sums, const uint8_t *codes, const int8_t *x, int64_t pitch, int64_t first, int64_t last,
                 int kind, u8x16 table, int rows) {
    for (int64_t k = first; k < last; k += kind == BYTES ? 4 : 8) {
        u8x64 bytes;
        const uint8_t *here = codes + (kind == BYTES ? k * 16 : k * 8);
        memcpy(&bytes, here, sizeof bytes);
        __builtin_prefetch(here + AHEAD);
        for (int part = 0; part < (kind == BYTES ? 1 : 2); part++) {
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * pitch + k + 4 * part, 4);
                sums[r] = kind == NIBBLES ? dot_small(sums[r], some, four) : dot(sums[r], some, four);
            }
        }
    }
}

/* To the nearest multiple of 2^-30: numbers of this size have no finer ones. */
INLINE f64x16 on_grid(f32x16 x) {
    const double size = 6291456.0; /* 1.5 * 2^22 */
    return (__builtin_convertvector(x, f64x16) + size) - size;
}

/* Rows [row, row + rows) of y for one block. */
INLINE void multiply(const Product *p, int64_t block, int64_t row, int rows, int kind, int exact) {
    const PackedWeight *w = p->weight;
    const int64_t groups = (w->columns + w->group - 1) / w->group, step = w->group < X_GROUP ? X_HALF : X_GROUP;
    const uint8_t *codes = w->codes + block * w->padded * (kind == BYTES ? 16 : 8);
    const int8_t *x = p->x.codes + row * p->x.padded;
    const int32_t offset = w->offset - (kind == NIBBLES ? 0 : CODE_BIAS);
    u8x16 table;
    memcpy(&table, w->table, sizeof table);
    f32x16 y[8];
    f64x16 y64[8];
    for (int r = 0; r < rows; r++) y[r] = (f32x16){}, y64[r] = (f64x16){};
    for (int64_t group = 0; group < groups; group++) {
        f32x16 scaled[8], scale = of_group(w, w->scales, w->super_scales, block, group, groups), minimum = {};
        float sums_of_x[8];
        if (w->minima) minimum = of_group(w, w->minima, w->super_minima, block, group, groups);
        for (int r = 0; r < rows; r++) scaled[r] = (f32x16){}, sums_of_x[r] = 0;
        int64_t end = (group + 1) * w->group < w->padded ? (group + 1) * w->group : w->padded;
        for (int64_t at = group * w->group; at < end; at += step) {
            i32x16 sums[8];
            int32_t sums_of_codes[8];
            for (int r = 0; r < rows; r++) {
                int64_t half = 2 * (row + r) * p->x.groups + at / X_HALF;
                sums_of_codes[r] = p->x.sums[half] + (step == X_HALF ? 0 : p->x.sums[half + 1]);
                sums[r] = (i32x16){} - offset * sums_of_codes[r];
            }
            if (step == X_HALF)
                dots(sums, codes, x, p->x.padded, at, at + X_HALF, kind, table, rows);
            else
                dots(sums, codes, x, p->x.padded, at, at + X_GROUP, kind, table, rows);
            for (int r = 0; r < rows; r++) {
                float d = p->x.scales[(row + r) * p->x.groups + at / X_GROUP], sum_of_x = (float)sums_of_codes[r] * d;
                f32x16 part = __builtin_convertvector(sums[r], f32x16) * d;
                if (exact) {
                    y64[r] += on_grid(part * scale);
                    if (w->minima) y64[r] -= on_grid(minimum * sum_of_x);
                } else {
                    scaled[r] += part;
                    sums_of_x[r] += sum_of_x;
                }
            }
        }
        for (int r = 0; r < rows && !exact; r++) {
            y[r] += scaled[r] * scale;
            if (w->minima) y[r] -= minimum * sums_of_x[r];
        }
    }
    int64_t first = block * LANES, count = w->outputs - first < LANES ? w->outputs - first : LANES;
    for (int r = 0; r < rows && exact; r++)
        memcpy((double *)p->y + (row + r) * p->stride + first, &y64[r], (size_t)count * sizeof(double));
    for (int r = 0; r < rows && !exact; r++) store_some(p->y, (row + r) * p->stride + first, (int)count, p->y_dtype, y[r]);
}

INLINE void multiply_rows(const Product *p, int64_t block, int kind, int exact) {
    int64_t row = 0;
    for (; row + 8 <= p->rows; row += 8) multiply(p, block, row, 8, kind, exact);
    for (; row + 4 <= p->rows; row += 4) multiply(p, block, row, 4, kind, exact);
    for (; row + 2 <= p->rows; row += 2) multiply(p, block, row, 2, kind, exact);
    for (; row < p->rows; row++) multiply(p, block, row, 1, kind, exact);
}

INLINE void multiply_block(const Product *p, int64_t block, int kind) {
    if (p->y_dtype == FLOAT64)
        multiply_rows(p, block, kind, 1);
    else
        multiply_rows(p, block, kind, 0);
}

static void multiply_blocks(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    for (int64_t block = first; block < last; block++) {
        if (p->weight->kind == NIBBLES)
            multiply_block(p, block, NIBBLES);
        else if (p->weight->kind == NIBBLES_BY_TABLE)
            multiply_block(p, block, NIBBLES_BY_TABLE);
        else
            multiply_block(p, block, BYTES);
    }
}

/* Bytes of scratch memory that rounding x takes. */
int64_t tllm_scratch_bytes(int64_t rows, int64_t padded) {
    return rows * (padded + padded / X_GROUP * (int64_t)(sizeof(float) + 2 * sizeof(int32_t)));
}

/* y [rows, outputs] (rows `stride` elements apart) = x [rows, columns] W^T. */
void tllm_quantized_matmul(const PackedWeight *weight, const void *x, int x_dtype, int64_t rows, void *y, int64_t stride,
                           int y_dtype, void *scratch, int is_rounded, int threads) {
    int64_t padded = weight->padded, groups = padded / X_GROUP;
    float *scales = scratch;
    int32_t *sums = (int32_t *)(scales + rows * groups);
    QuantizedRows rounded = {(int8_t *)(sums + 2 * rows * groups), scales, sums, padded, groups};
    if (!is_rounded) quantize_rows(rounded, x, rows, weight->columns, x_dtype, threads);
    Product product = {weight, rounded, y, rows, stride, y_dtype};
    run_parallel(multiply_blocks, &product, (weight->outputs + LANES - 1) / LANES, 1, threads);
}
