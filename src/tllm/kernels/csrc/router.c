/* What chooses the experts of a token: a router's product, and the scores that its logits become.
 *
 * A score that differs in its last bit may choose another expert, so these have the same bits on every processor, for
 * any number of rows and threads. A product of two numbers of float32 or less is exact in float64; sixteen sums of them,
 * column k in sum k % 16, are added in the order of columns, and then the sums by halves.
 */
#include "exponential.h"
#include "threads.h"

typedef struct {
    const void *weight, *x;
    float *y;
    int64_t outputs, columns, rows;
    int w_dtype, x_dtype;
} Product;

INLINE float sum_by_halves(f64x16 x) {
    double lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return (float)lanes[0];
}

INLINE f64x16 widened(const void *from, int64_t at, int64_t left, int dtype) {
    return __builtin_convertvector(load_up_to(from, at, left, dtype), f64x16);
}

INLINE void multiply(const Product *p, int64_t output, int64_t row, int rows) {
    f64x16 sums[4];
    for (int r = 0; r < rows; r++) sums[r] = (f64x16){};
    for (int64_t k = 0; k < p->columns; k += LANES) {
        int64_t left = p->columns - k;
        f64x16 w = widened(p->weight, output * p->columns + k, left, p->w_dtype);
        for (int r = 0; r < rows; r++)
            sums[r] = MULTIPLY_ADD(w, widened(p->x, (row + r) * p->columns + k, left, p->x_dtype), sums[r]);
    }
    for (int r = 0; r < rows; r++) p->y[(row + r) * p->outputs + output] = sum_by_halves(sums[r]);
}

static void multiply_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    for (int64_t output = first; output < last; output++) {
        int64_t row = 0;
        for (; row + 4 <= p->rows; row += 4) multiply(p, output, row, 4);
        for (; row < p->rows; row++) multiply(p, output, row, 1);
    }
}

/* y [rows, outputs] in float32 = x [rows, columns] W^T, W [outputs, columns]; each number is rounded once. */
void tllm_router_matmul(const void *weight, int w_dtype, int64_t outputs, int64_t columns, const void *x, int x_dtype,
                        int64_t rows, float *y, int threads) {
    Product product = {weight, x, y, outputs, columns, rows, w_dtype, x_dtype};
    run_parallel(multiply_some, &product, outputs, 1, rows * outputs * columns < 65536 ? 1 : threads);
}

enum { SOFTMAX, SIGMOID };

/* The largest of a row's numbers, which are not compared where they are none. */
static float largest_of(const float *x, int64_t width) {
    float largest = x[0];
    for (int64_t k = 1; k < width; k++) largest = x[k] > largest ? x[k] : largest;
    return largest;
}

static void softmax_row(const float *x, int64_t width, float *y) {
    const f32x16 largest = splat(largest_of(x, width));
    f32x16 sums = {};
    for (int64_t k = 0; k < width; k += LANES) {
        int64_t left = width - k;
        f32x16 some = exponential(load_up_to(x, k, left, FLOAT32) - largest);
        store_some(y, k, lanes_of(left), FLOAT32, some);
        sums += load_up_to(y, k, left, FLOAT32); /* zeros past the end of the row */
    }
    const f32x16 sum = splat(sum_of_lanes(sums));
    for (int64_t k = 0; k < width; k += LANES) {
        int64_t left = width - k;
        store_some(y, k, lanes_of(left), FLOAT32, load_up_to(y, k, left, FLOAT32) / sum);
    }
}

/* y [rows, width] = the softmax of each row of x, or the sigmoid of each number. */
void tllm_router_scores(const float *x, int64_t rows, int64_t width, int kind, float *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        if (kind == SOFTMAX) {
            softmax_row(x, width, y);
            continue;
        }
        for (int64_t k = 0; k < width; k += LANES)
            store_some(y, k, lanes_of(width - k), FLOAT32, sigmoid(load_up_to(x, k, width - k, FLOAT32)));
    }
}
