/* y = x W^T for a few rows of x, where W has plain numbers, row by row as torch has them: bound by reading W once. */
#include "threads.h"
#include "vectors.h"

typedef struct {
    const void *weight; /* [outputs, columns] of w_dtype */
    const float *x;     /* [rows, columns] */
    void *y;            /* [rows, outputs] of y_dtype */
    int64_t outputs, columns, rows;
    int w_dtype, y_dtype;
} Product;

INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE void store_one(void *y, int64_t at, int dtype, float value) { store_some(y, at, 1, dtype, splat(value)); }

/* `outputs` outputs of `rows` rows at once, so that there are enough sums for additions not to wait for each other. */
INLINE void multiply(const Product *p, int64_t output, int outputs, int64_t row, int rows, int dtype) {
    const int64_t columns = p->columns, whole = columns / LANES * LANES;
    f32x16 sums[4][8];
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++) sums[o][r] = (f32x16){};
    for (int64_t k = 0; k < whole; k += LANES) {
        f32x16 x[8];
        for (int r = 0; r < rows; r++) x[r] = load16(p->x, (row + r) * columns + k, FLOAT32);
        for (int o = 0; o < outputs; o++) {
            f32x16 w = load16(p->weight, (output + o) * columns + k, dtype);
            for (int r = 0; r < rows; r++) sums[o][r] = multiply_add(w, x[r], sums[o][r]);
        }
    }
    if (whole < columns) {
        int left = (int)(columns - whole);
        for (int o = 0; o < outputs; o++) {
            f32x16 w = load_some(p->weight, (output + o) * columns + whole, left, dtype);
            for (int r = 0; r < rows; r++) {
                f32x16 x = load_some(p->x, (row + r) * columns + whole, left, FLOAT32);
                sums[o][r] = multiply_add(w, x, sums[o][r]);
            }
        }
    }
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++)
            store_one(p->y, (row + r) * p->outputs + output + o, p->y_dtype, sum_of_lanes(sums[o][r]));
}

INLINE void multiply_outputs(const Product *p, int64_t first, int64_t last, int dtype) {
    int64_t output = first;
    for (; output + 4 <= last; output += 4) {
        int64_t row = 0;
        for (; row + 4 <= p->rows; row += 4) multiply(p, output, 4, row, 4, dtype);
        for (; row + 2 <= p->rows; row += 2) multiply(p, output, 4, row, 2, dtype);
        for (; row < p->rows; row++) multiply(p, output, 4, row, 1, dtype);
    }
    for (; output < last; output++)
        for (int64_t row = 0; row < p->rows; row++) multiply(p, output, 1, row, 1, dtype);
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

/* y [rows, outputs] = x [rows, columns] W^T with sums in float32; `scratch` has room for rows x columns of float32. */
void tllm_float_matmul(const void *weight, int w_dtype, int64_t outputs, int64_t columns, const void *x, int x_dtype,
                       int64_t rows, void *y, int y_dtype, float *scratch, int threads) {
    const float *wide = x;
    if (x_dtype != FLOAT32) {
        int64_t count = rows * columns, at = 0;
        for (; at + LANES <= count; at += LANES) {
            f32x16 some = load16(x, at, x_dtype);
            memcpy(scratch + at, &some, sizeof some);
        }
        f32x16 last = load_some(x, at, (int)(count - at), x_dtype);
        memcpy(scratch + at, &last, 4 * (size_t)(count - at));
        wide = scratch;
    }
    Product product = {weight, wide, y, outputs, columns, rows, w_dtype, y_dtype};
    run_parallel(multiply_some, &product, outputs, 4, threads);
}
