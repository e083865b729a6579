/* The small operations of a layer, a row of activations at a time: each reads and writes memory once.
 *
 * Numbers are computed in float32 and rounded to the rows' dtype where torch's own operations would. Sums are over 16
 * lanes, then over the lanes in a fixed order.
 */
#include <math.h>

#include "gates.h"
#include "recorded_calls.h"
#include "threads.h"

typedef struct {
    const void *x, *weight;
    void *y;
    float *scales;
    int64_t width, x_stride, y_stride;
    int x_dtype, w_dtype, adds_one, activation;
    float eps, limit, alpha;
} Job;

INLINE f32x16 rounded(f32x16 x, int dtype) {
    if (dtype == BFLOAT16) return f32_of_bf16(bf16_of_f32(x));
    if (dtype == FLOAT16) return __builtin_convertvector(__builtin_convertvector(x, f16x16), f32x16);
    return x;
}

static void norm_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Job *job = of;
    for (int64_t row = first; row < last; row++) {
        int64_t in = row * job->x_stride, out = row * job->y_stride;
        f32x16 squares = {};
        for (int64_t k = 0; k < job->width; k += LANES) {
            f32x16 x = load_up_to(job->x, in + k, job->width - k, job->x_dtype);
            squares += x * x;
        }
        float scale = 1 / sqrtf(sum_of_lanes(squares) / (float)job->width + job->eps);
        if (job->scales) job->scales[row] = scale;
        for (int64_t k = 0; k < job->width; k += LANES) {
            int64_t left = job->width - k;
            f32x16 x = load_up_to(job->x, in + k, left, job->x_dtype) * scale;
            f32x16 w = load_up_to(job->weight, k, left, job->w_dtype);
            x = job->adds_one ? x * (1 + w) : rounded(x, job->x_dtype) * w;
            store_some(job->y, out + k, lanes_of(left), job->x_dtype, x);
        }
    }
}

/* y = w x / sqrt(mean(x^2) + eps), or (1 + w) in w's place, for each of `rows` rows; what x is multiplied by is kept in
 * `scales` [rows]. */
void tllm_rms_norm_kept(const void *x, int dtype, int64_t rows, int64_t width, const void *weight, int w_dtype, float eps,
                        int adds_one, void *y, float *scales, int threads) {
    Job job = {.x = x, .weight = weight, .y = y, .scales = scales, .width = width, .x_stride = width, .y_stride = width,
               .x_dtype = dtype, .w_dtype = w_dtype, .adds_one = adds_one, .eps = eps};
    run_parallel(norm_rows, &job, rows, 1, rows * width < 65536 ? 1 : threads);
}

/* The same, and nothing is kept. */
void tllm_rms_norm(const void *x, int dtype, int64_t rows, int64_t width, const void *weight, int w_dtype, float eps,
                   int adds_one, void *y, int threads) {
    tllm_rms_norm_kept(x, dtype, rows, width, weight, w_dtype, eps, adds_one, y, NULL, threads);
}

/* 16 gates and ups, or `left` at a row's end. */
INLINE void gate_lanes(const Job *job, int64_t row, int64_t k, int64_t left, const int dtype, const int activation) {
    const int64_t at = row * job->x_stride + k;
    const f32x16 gate = load_up_to(job->x, at, left, dtype), up = load_up_to(job->x, at + job->width, left, dtype);
    f32x16 slope;
    const f32x16 act = activated(gate, activation, &slope);
    store_some(job->y, row * job->y_stride + k, lanes_of(left), dtype, rounded(act, dtype) * up);
}

static void gate_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Job *job = of;
    FOR_GATES(gate_lanes, job, first, last, job->width, job->x_dtype, job->activation);
}

/* y [rows, width] = activation(x[:, :width]) * x[:, width:], for x [rows, 2 width]. */
void tllm_gated(const void *x, int dtype, int64_t rows, int64_t width, int activation, void *y, int threads) {
    Job job = {.x = x, .y = y, .width = width, .x_stride = 2 * width, .y_stride = width,
               .x_dtype = dtype, .activation = activation};
    run_parallel(gate_rows, &job, rows, 1, rows * width < 65536 ? 1 : threads);
}

static void clamp_and_gate_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Job *job = of;
    const f32x16 limit = splat(job->limit);
    for (int64_t row = first; row < last; row++)
        for (int64_t k = 0; k < job->width; k += LANES) {
            int64_t left = job->width - k, at = row * job->x_stride + 2 * k;
            f32x16 low = load_up_to(job->x, at, 2 * left, job->x_dtype);
            f32x16 high = load_up_to(job->x, at + LANES, 2 * left - LANES, job->x_dtype);
            f32x16 gate = SHUFFLE(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            f32x16 up = SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            gate = lesser(limit, gate), up = -lesser(limit, -lesser(limit, up)); /* what is no number stays none */
            gate = rounded(gate * sigmoid(rounded(gate * job->alpha, job->x_dtype)), job->x_dtype);
            store_some(job->y, row * job->y_stride + k, lanes_of(left), job->x_dtype, gate * rounded(up + 1, job->x_dtype));
        }
}

/* y [rows, width] = gate sigmoid(alpha gate) (up + 1) of gates and ups that take turns in x [rows, 2 width], the gate at
 * most `limit` and up within it. */
void tllm_clamped_swiglu(const void *x, int dtype, int64_t rows, int64_t width, float limit, float alpha, void *y,
                         int threads) {
    Job job = {.x = x, .y = y, .width = width, .x_stride = 2 * width, .y_stride = width,
               .x_dtype = dtype, .limit = limit, .alpha = alpha};
    run_parallel(clamp_and_gate_rows, &job, rows, 1, rows * width < 65536 ? 1 : threads);
}

/* Turn the first `dim` columns of each of `heads` heads in place: (a, b) -> (a cos - b sin, b cos + a sin), a and b its
 * halves. cos and sin [rows, dim] of the heads' dtype, the first half of sin negative; rows are `stride` apart. */
void tllm_rotate(void *x, int dtype, int64_t rows, int64_t stride, int64_t heads, int64_t width, int64_t dim,
                 const void *cos, const void *sin) {
    int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = row * stride + head * width, angle = row * dim;
            for (int64_t k = 0; k < half; k += LANES) {
                int64_t left = half - k;
                f32x16 a = load_up_to(x, at + k, left, dtype), b = load_up_to(x, at + half + k, left, dtype);
                f32x16 turned_a = a * load_up_to(cos, angle + k, left, dtype) + b * load_up_to(sin, angle + k, left, dtype);
                f32x16 turned_b =
                    b * load_up_to(cos, angle + half + k, left, dtype) + a * load_up_to(sin, angle + half + k, left, dtype);
                store_some(x, at + k, lanes_of(left), dtype, turned_a);
                store_some(x, at + half + k, lanes_of(left), dtype, turned_b);
            }
        }
}

/* sum = x + y of rows [rows, width], y's being y_stride apart: 0 for one that is added to each. */
void tllm_add(const void *x, const void *y, int dtype, int64_t rows, int64_t width, int64_t y_stride, void *sum) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t left = width - k, at = row * width + k;
            f32x16 of_y = load_up_to(y, row * y_stride + k, left, dtype);
            store_some(sum, at, lanes_of(left), dtype, load_up_to(x, at, left, dtype) + of_y);
        }
}

/* y [count] = x times a number, as torch has it: in float32, rounded once. */
void tllm_scale(const void *x, int dtype, int64_t count, float factor, void *y) {
    for (int64_t k = 0; k < count; k += LANES) {
        int64_t left = count - k;
        store_some(y, k, lanes_of(left), dtype, load_up_to(x, k, left, dtype) * factor);
    }
}

/* The first of 16 float64 as float32. */
INLINE f32x16 narrowed(const double *x, int count) {
    f64x16 wide = {};
    memcpy(&wide, x, sizeof(double) * (size_t)count);
    return __builtin_convertvector(wide, f32x16);
}

/* y [count] = x in another dtype; float64 becomes float32 first, as in torch. */
void tllm_convert(const void *x, int dtype, int64_t count, void *y, int y_dtype) {
    for (int64_t k = 0; k < count; k += LANES) {
        int64_t left = count - k;
        f32x16 here = dtype == FLOAT64 ? narrowed((const double *)x + k, lanes_of(left)) : load_up_to(x, k, left, dtype);
        store_some(y, k, lanes_of(left), y_dtype, here);
    }
}

/* Rows of so many bytes, `stride` bytes apart, one after another, with so many bytes of zeros before and after each. */
void tllm_copy_rows(const void *x, int64_t rows, int64_t bytes, int64_t stride, int64_t before, int64_t after, void *y) {
    char *to = y;
    for (int64_t row = 0; row < rows; row++, to += before + bytes + after) {
        memset(to, 0, (size_t)before);
        memcpy(to + before, (const char *)x + row * stride, (size_t)bytes);
        memset(to + before + bytes, 0, (size_t)after);
    }
}
