#include "quantize_rows.h"

#include <math.h>

#include "threads.h"

typedef struct {
    QuantizedRows into;
    const void *x;
    int64_t columns;
    int dtype;
} Job;

static void quantize_group(int8_t *codes, float *scale, int32_t *sums, const float *x) {
    float largest = 0, wrong = 0;
    for (int i = 0; i < X_GROUP; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];
        largest = size > largest ? size : largest;
        wrong += x[i] * 0;
    }
    int is_finite = wrong == 0;
    float inverse = largest > 0 && is_finite ? 127 / largest : 0;
    if (inverse > 3.4e38f) inverse = 0; /* of a group too small to have an inverse: it counts as zeros */
    *scale = is_finite ? (inverse > 0 ? largest / 127 : 0) : NAN;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
        for (int i = 0; i < X_HALF; i++) {
            float scaled = is_finite ? x[half * X_HALF + i] * inverse : 0;
            int32_t code = (int32_t)__builtin_rintf(scaled);
            codes[half * X_HALF + i] = (int8_t)code;
            sum += code;
        }
        sums[half] = sum;
    }
}

static void quantize_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Job *job = of;
    const QuantizedRows *into = &job->into;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / into->groups, group = item % into->groups;
        int64_t column = group * X_GROUP, left = job->columns - column;
        float x[X_GROUP];
        for (int half = 0; half < 2; half++) {
            int64_t at = row * job->columns + column + half * X_HALF;
            f32x16 some = load_up_to(job->x, at, left - half * X_HALF, job->dtype);
            memcpy(x + half * X_HALF, &some, sizeof some);
        }
        quantize_group(into->codes + row * into->padded + column, into->scales + item, into->sums + 2 * item, x);
    }
}

void quantize_rows(QuantizedRows into, const void *x, int64_t rows, int64_t columns, int dtype, int threads) {
    Job job = {into, x, columns, dtype};
    int64_t items = rows * into.groups;
    run_parallel(quantize_some, &job, items, 64, items < 1024 ? 1 : threads);
}
