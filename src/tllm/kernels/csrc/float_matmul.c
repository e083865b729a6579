/* y = x W^T for a few rows of x, where W has plain numbers, row by row as torch has them: bound by reading W once. */
#include "recorded_calls.h"
#include "threads.h"
#include "vectors.h"

#define PAIR (2 * LANES)

typedef struct {
    const void *weight; /* [outputs, columns] of w_dtype */
    const float *x;     /* [rows, columns] */
    void *y;            /* [rows, outputs] of y_dtype */
    int64_t outputs, columns, rows;
    int w_dtype, y_dtype;
} Product;

INLINE void store_one(void *y, int64_t at, int dtype, float value) { store_some(y, at, 1, dtype, splat(value)); }

/* Adds to the sums of `rows` rows the products of two vectors of bfloat16, whose x lies as `widen` puts it. */
INLINE void add_pair(f32x16 *sums, const uint16_t *w, const float *x, int64_t pitch, int rows) {
    u32x16 two; /* in each 32 bits two numbers, of which the one that comes first has the lower half */
    memcpy(&two, w, sizeof two);
    f32x16 even = (f32x16)(two << 16), odd = (f32x16)(two & 0xffff0000u);
    for (int r = 0; r < rows; r++) {
        sums[r] = multiply_add(even, load16(x, r * pitch, FLOAT32), sums[r]);
        sums[r] = multiply_add(odd, load16(x, r * pitch + LANES, FLOAT32), sums[r]);
    }
}

/* Rows [row, row + rows) of one output. A weight's row is read from its beginning to its end, as memory is fastest;
 * `chains` sums go on side by side, so that additions do not wait for each other. */
INLINE void multiply(const Product *p, int64_t output, int64_t row, int rows, int chains, int dtype) {
    const int64_t columns = p->columns, from = output * columns, pairs = columns / PAIR * PAIR;
    const float *x = p->x + row * columns;
    f32x16 sums[4][8];
    for (int c = 0; c < chains; c++)
        for (int r = 0; r < rows; r++) sums[c][r] = (f32x16){};
    int64_t k = 0;
    if (dtype == BFLOAT16) {
        const uint16_t *w = (const uint16_t *)p->weight + from;
        for (; k + PAIR * chains <= pairs; k += PAIR * chains)
            for (int c = 0; c < chains; c++) add_pair(sums[c], w + k + c * PAIR, x + k + c * PAIR, columns, rows);
        for (; k < pairs; k += PAIR) add_pair(sums[0], w + k, x + k, columns, rows);
    }
    for (; k + chains * LANES <= columns; k += chains * LANES)
        for (int c = 0; c < chains; c++) {
            f32x16 w = load16(p->weight, from + k + c * LANES, dtype);
            for (int r = 0; r < rows; r++)
                sums[c][r] = multiply_add(w, load16(x, r * columns + k + c * LANES, FLOAT32), sums[c][r]);
        }
    for (; k < columns; k += LANES) {
        int left = columns - k < LANES ? (int)(columns - k) : LANES;
        f32x16 w = load_some(p->weight, from + k, left, dtype);
        for (int r = 0; r < rows; r++)
            sums[0][r] = multiply_add(w, load_some(x, r * columns + k, left, FLOAT32), sums[0][r]);
    }
    for (int r = 0; r < rows; r++) {
        for (int c = 1; c < chains; c++) sums[0][r] += sums[c][r];
        store_one(p->y, (row + r) * p->outputs + output, p->y_dtype, sum_of_lanes(sums[0][r]));
    }
}

INLINE void multiply_outputs(const Product *p, int64_t first, int64_t last, int dtype) {
    for (int64_t output = first; output < last; output++) {
        int64_t row = 0;
        for (; row + 8 <= p->rows; row += 8) multiply(p, output, row, 8, 1, dtype);
        for (; row + 4 <= p->rows; row += 4) multiply(p, output, row, 4, 2, dtype);
        for (; row + 2 <= p->rows; row += 2) multiply(p, output, row, 2, 4, dtype);
        for (; row < p->rows; row++) multiply(p, output, row, 1, 4, dtype);
    }
}

static void multiply_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    if (p->w_dtype == BFLOAT16)
        multiply_outputs(p, first, last, BFLOAT16);
    else if (p->w_dtype == FLOAT16)
        multiply_outputs(p, first, last, FLOAT16);
    else
        multiply_outputs(p, first, last, FLOAT32);
}

/* x as float32. Where weights are bfloat16, of each 32 columns those with even numbers come first, as `add_pair` wants. */
static void widen(float *wide, const void *x, int x_dtype, int64_t rows, int64_t columns, int is_paired) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t k = 0, at = row * columns;
        for (; is_paired && k + PAIR <= columns; k += PAIR) {
            f32x16 two[2] = {load16(x, at + k, x_dtype), load16(x, at + k + LANES, x_dtype)};
            float some[PAIR];
            memcpy(some, two, sizeof some);
            for (int i = 0; i < LANES; i++) wide[at + k + i] = some[2 * i], wide[at + k + LANES + i] = some[2 * i + 1];
        }
        for (; k < columns; k += LANES) {
            int left = columns - k < LANES ? (int)(columns - k) : LANES;
            store_some(wide, at + k, left, FLOAT32, load_some(x, at + k, left, x_dtype));
        }
    }
}

/* y [rows, outputs] = x [rows, columns] W^T with sums in float32; `scratch` has room for rows x columns of float32. */
void tllm_float_matmul(const void *weight, int w_dtype, int64_t outputs, int64_t columns, const void *x, int x_dtype,
                       int64_t rows, void *y, int y_dtype, float *scratch, int threads) {
    widen(scratch, x, x_dtype, rows, columns, w_dtype == BFLOAT16);
    Product product = {weight, scratch, y, outputs, columns, rows, w_dtype, y_dtype};
    run_parallel(multiply_some, &product, outputs, 4, threads);
}
