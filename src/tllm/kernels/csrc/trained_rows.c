/* Gradients of the small operations of a layer (row_operations.c), a row at a time: each reads and writes memory once.
 *
 * Numbers are computed in float32 and rounded once, to the rows' dtype.
 */
#include "gates.h"
#include "threads.h"

typedef struct {
    const void *x, *d_y;
    void *d_x;
    int64_t width;
    int dtype, activation;
} Gates;

/* Of 16 gates and ups, or `left` at a row's end. */
INLINE void gate_lanes(const Gates *g, int64_t row, int64_t k, int64_t left, const int dtype, const int activation) {
    const int64_t at = row * 2 * g->width + k;
    const f32x16 gate = load_up_to(g->x, at, left, dtype), up = load_up_to(g->x, at + g->width, left, dtype);
    const f32x16 d_y = load_up_to(g->d_y, row * g->width + k, left, dtype);
    f32x16 slope;
    const f32x16 act = activated(gate, activation, &slope);
    store_some(g->d_x, at, lanes_of(left), dtype, d_y * up * slope);
    store_some(g->d_x, at + g->width, lanes_of(left), dtype, d_y * act);
}

static void gate_rows_backward(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Gates *g = of;
    FOR_GATES(gate_lanes, g, first, last, g->width, g->dtype, g->activation);
}

/* The gradient of x [rows, 2 width] from d_y [rows, width], that of y = activation(x[:, :width]) * x[:, width:]. */
void tllm_gated_backward(const void *x, int dtype, int64_t rows, int64_t width, int activation, const void *d_y, void *d_x,
                         int threads) {
    Gates gates = {x, d_y, d_x, width, dtype, activation};
    run_parallel(gate_rows_backward, &gates, rows, 1, rows * width < 65536 ? 1 : threads);
}

#define ROWS 64 /* whose part of a weight's gradient is summed by one thread */

typedef struct {
    const void *x, *weight, *d_y;
    const float *scales;
    void *d_x, *d_weight;
    float *parts; /* [blocks of ROWS rows, padded width] of d_weight, which is NULL where it is not wanted */
    int64_t rows, width, padded;
    int dtype, w_dtype, adds_one;
} Norm;

INLINE f32x16 norm_weight(const Norm *n, int64_t k, int64_t left, const int dtype) {
    const f32x16 weight = load_up_to(n->weight, k, left, dtype);
    return n->adds_one ? 1 + weight : weight;
}

/* With g = w dy and the row's scale s: dx = s (g - x s^2 mean(g x)); dw is the sum of dy x s over rows. */
INLINE void norm_row(const Norm *n, int64_t row, float *part, const int dtype, const int w_dtype) {
    const int64_t width = n->width, whole = width / LANES * LANES, at = row * width;
    f32x16 dots = {};
    for (int64_t k = 0; k < whole; k += LANES)
        dots += load16(n->d_y, at + k, dtype) * norm_weight(n, k, LANES, w_dtype) * load16(n->x, at + k, dtype);
    if (whole < width)
        dots += load_up_to(n->d_y, at + whole, width - whole, dtype) * norm_weight(n, whole, width - whole, w_dtype) *
                load_up_to(n->x, at + whole, width - whole, dtype);
    const float scale = n->scales[row], shift = sum_of_lanes(dots) * scale * scale / (float)width;
    for (int64_t k = 0; k < width; k += LANES) {
        const int64_t left = k < whole ? LANES : width - k;
        const f32x16 x = load_up_to(n->x, at + k, left, dtype), d_y = load_up_to(n->d_y, at + k, left, dtype);
        const f32x16 d_x = scale * (d_y * norm_weight(n, k, left, w_dtype) - x * shift);
        store_some(n->d_x, at + k, lanes_of(left), dtype, d_x);
        if (part) {
            const f32x16 sum = load16(part, k, FLOAT32) + d_y * (x * scale);
            memcpy(part + k, &sum, sizeof sum);
        }
    }
}

static void norm_blocks_backward(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Norm *n = of;
    for (int64_t block = first; block < last; block++) {
        float *part = n->d_weight ? n->parts + block * n->padded : NULL;
        if (part) memset(part, 0, (size_t)n->padded * sizeof *part);
        const int64_t end = (block + 1) * ROWS < n->rows ? (block + 1) * ROWS : n->rows;
        for (int64_t row = block * ROWS; row < end; row++) {
            if (n->dtype == BFLOAT16 && n->w_dtype == BFLOAT16)
                norm_row(n, row, part, BFLOAT16, BFLOAT16);
            else if (n->dtype == FLOAT32 && n->w_dtype == FLOAT32)
                norm_row(n, row, part, FLOAT32, FLOAT32);
            else
                norm_row(n, row, part, n->dtype, n->w_dtype);
        }
    }
}

/* The gradients of x [rows, width] and of the weight from d_y, that of y = w x s, or of (1 + w) x s, with the scales s
 * [rows] that the forward pass kept.
 *
 * Blocks of rows are summed one after another, whichever threads made them. `parts`: room for a number for each block of 64
 * rows and each column, these padded to whole vectors. d_weight is NULL if the weight's gradient is not wanted. */
void tllm_rms_norm_backward(const void *x, int dtype, int64_t rows, int64_t width, const void *weight, int w_dtype,
                            int adds_one, const float *scales, const void *d_y, void *d_x, void *d_weight, float *parts,
                            int threads) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, padded = (width + LANES - 1) / LANES * LANES;
    Norm norm = {x, weight, d_y, scales, d_x, d_weight, parts, rows, width, padded, dtype, w_dtype, adds_one};
    run_parallel(norm_blocks_backward, &norm, blocks, 1, rows * width < 65536 ? 1 : threads);
    for (int64_t k = 0; d_weight && k < width; k += LANES) {
        f32x16 sum = {};
        for (int64_t block = 0; block < blocks; block++) sum += load16(parts, block * padded + k, FLOAT32);
        store_some(d_weight, k, lanes_of(width - k), w_dtype, sum);
    }
}

typedef struct {
    const void *x, *cos, *sin;
    void *y;
    int64_t x_stride, heads, width, dim;
    int dtype, is_back;
} Turn;

/* 16 of both halves of a head, or `left` at their end. */
INLINE void turn_lanes(const Turn *t, int64_t in, int64_t out, int64_t angle, int64_t left, const int dtype) {
    const int64_t half = t->dim / 2, back = t->is_back ? half : 0;
    const f32x16 a = load_up_to(t->x, in, left, dtype), b = load_up_to(t->x, in + half, left, dtype);
    const f32x16 sin_a = load_up_to(t->sin, angle + back, left, dtype);
    const f32x16 sin_b = load_up_to(t->sin, angle + half - back, left, dtype);
    const f32x16 turned_a = a * load_up_to(t->cos, angle, left, dtype) + b * sin_a;
    const f32x16 turned_b = b * load_up_to(t->cos, angle + half, left, dtype) + a * sin_b;
    store_some(t->y, out, lanes_of(left), dtype, turned_a);
    store_some(t->y, out + half, lanes_of(left), dtype, turned_b);
}

INLINE void turn_rows_as(const Turn *t, int64_t first, int64_t last, const int dtype) {
    const int64_t half = t->dim / 2, whole = half / LANES * LANES, size = dtype == FLOAT32 ? 4 : 2;
    const size_t rest = (size_t)((t->width - t->dim) * size);
    for (int64_t row = first; row < last; row++)
        for (int64_t head = 0; head < t->heads; head++) {
            const int64_t in = row * t->x_stride + head * t->width, out = (row * t->heads + head) * t->width;
            const int64_t angle = row * t->dim;
            for (int64_t k = 0; k < whole; k += LANES) turn_lanes(t, in + k, out + k, angle + k, LANES, dtype);
            if (whole < half) turn_lanes(t, in + whole, out + whole, angle + whole, half - whole, dtype);
            memcpy((char *)t->y + (out + t->dim) * size, (const char *)t->x + (in + t->dim) * size, rest);
        }
}

static void turn_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Turn *t = of;
    if (t->dtype == BFLOAT16)
        turn_rows_as(t, first, last, BFLOAT16);
    else if (t->dtype == FLOAT32)
        turn_rows_as(t, first, last, FLOAT32);
    else
        turn_rows_as(t, first, last, FLOAT16);
}

/* y [rows, heads, width]: x turned as tllm_rotate does it, or with `is_back` its gradient from that of what was turned, for
 * which the halves of the sines change places. Rows of x are `x_stride` apart. */
void tllm_rotate_rows(const void *x, int dtype, int64_t rows, int64_t x_stride, int64_t heads, int64_t width, int64_t dim,
                      const void *cos, const void *sin, int is_back, void *y, int threads) {
    Turn turn = {x, cos, sin, y, x_stride, heads, width, dim, dtype, is_back};
    run_parallel(turn_rows, &turn, rows, 1, rows * heads * width < 65536 ? 1 : threads);
}
