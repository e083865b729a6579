#include "quantize_rows.h"

#include <math.h>

#include "threads.h"

typedef struct {
    QuantizedRows into;
    const void *x;
    int64_t columns;
    int dtype;
} Job;

INLINE f32x16 size_of(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }

/* To the nearest whole number, ties to even, by the bits of a sum whose last one counts as 1. |x| is small. */
INLINE i32x16 nearest(f32x16 x) {
    const float one_in_last_bit = 12582912.0f; /* 1.5 * 2^23 */
    return (i32x16)(x + one_in_last_bit) - (i32x16)splat(one_in_last_bit);
}

/* The codes of 32 numbers, and the sums of each half of them, `pitch` apart. */
INLINE void quantize_group(int8_t *codes, float *scale, int32_t *sums, int64_t pitch, const f32x16 *x) {
    f32x16 sizes[2] = {size_of(x[0]), size_of(x[1])};
    /* As whole numbers the bits of sizes have the same order, and what is not finite is above all. */
    u32x16 largest_bits = __builtin_elementwise_max((u32x16)sizes[0], (u32x16)sizes[1]);
    uint32_t bits = __builtin_reduce_max(largest_bits);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    int is_finite = bits < 0x7f800000u;
    float inverse = bits && is_finite ? 127 / largest : 0;
    if (inverse > 3.4e38f) inverse = 0; /* of a group too small to have an inverse: it counts as zeros */
    *scale = is_finite ? (inverse > 0 ? largest / 127 : 0) : NAN;
    for (int half = 0; half < 2; half++) {
        i32x16 some = is_finite ? nearest(x[half] * inverse) : (i32x16){};
        i8x16 narrow = __builtin_convertvector(some, i8x16);
        memcpy(codes + half * X_HALF, &narrow, sizeof narrow);
        sums[half * pitch] = __builtin_reduce_add(some);
    }
}

static void quantize_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Job *job = of;
    const QuantizedRows *into = &job->into;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / into->groups, group = item % into->groups;
        int64_t column = group * X_GROUP, left = job->columns - column;
        f32x16 x[2];
        for (int half = 0; half < 2; half++) {
            int64_t at = row * job->columns + column + half * X_HALF;
            x[half] = load_up_to(job->x, at, left - half * X_HALF, job->dtype);
        }
        int64_t to = group * into->pitch + row;
        int32_t *sums = into->sums + 2 * group * into->pitch + row;
        quantize_group(into->codes + to * X_GROUP, into->scales + to, sums, into->pitch, x);
    }
}

void quantize_rows(QuantizedRows into, const void *x, int64_t columns, int dtype, int threads) {
    Job job = {into, x, columns, dtype};
    for (int64_t group = 0; group < into.groups; group++)
        for (int64_t row = into.rows; row < into.pitch; row++) into.scales[group * into.pitch + row] = 0;
    int64_t items = into.rows * into.groups;
    run_parallel(quantize_some, &job, items, 64, items < 1024 ? 1 : threads);
}
