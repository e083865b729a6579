/* Kernel calls that were written down while a batch was computed, made again one after another by one call: a step
 * spends no time in Python between them, and threads find the next work before they fall asleep. */
#include "recorded_calls.h"

#include <stddef.h>

/* In the order of kernels/recording/recorder.py. */
enum {
    QUANTIZED_MATMUL,
    FLOAT_MATMUL,
    BFLOAT16_MATMUL,
    RMS_NORM,
    GATED,
    ROTATE,
    ADD,
    SCALE,
    CONVERT,
    COPY_ROWS,
    PAGED_ATTENTION,
    WRITE_CODES,
    SHARED_SUM,
};

#define MOST_WORDS 12

/* A kernel's arguments in their order: addresses and whole numbers as words, and its only float apart. */
typedef struct {
    int64_t kernel;
    int64_t words[MOST_WORDS];
    double number;
} Call;

#define AT(i) ((void *)(intptr_t)w[i])
#define INT(i) ((int)w[i])

/* Whether it is made: a sum is not while other ranks are waited for. */
static int make(const Call *call) {
    const int64_t *w = call->words;
    switch (call->kernel) {
    case QUANTIZED_MATMUL:
        tllm_quantized_matmul(AT(0), w[1], AT(2), w[3], AT(4), INT(5), AT(6), w[7], INT(8), AT(9), INT(10), INT(11));
        break;
    case FLOAT_MATMUL:
        tllm_float_matmul(AT(0), INT(1), w[2], w[3], AT(4), INT(5), w[6], AT(7), INT(8), AT(9), INT(10), INT(11));
        break;
    case BFLOAT16_MATMUL: tllm_bfloat16_matmul(AT(0), w[1], w[2], AT(3), w[4], AT(5), AT(6), INT(7)); break;
    case RMS_NORM:
        tllm_rms_norm(AT(0), INT(1), w[2], w[3], AT(4), INT(5), (float)call->number, INT(6), AT(7), INT(8));
        break;
    case GATED: tllm_gated(AT(0), INT(1), w[2], w[3], INT(4), AT(5), INT(6)); break;
    case ROTATE: tllm_rotate(AT(0), INT(1), w[2], w[3], w[4], w[5], w[6], AT(7), AT(8)); break;
    case ADD: tllm_add(AT(0), AT(1), INT(2), w[3], w[4], w[5], AT(6)); break;
    case SCALE: tllm_scale(AT(0), INT(1), w[2], (float)call->number, AT(3)); break;
    case CONVERT: tllm_convert(AT(0), INT(1), w[2], AT(3), INT(4)); break;
    case COPY_ROWS: tllm_copy_rows(AT(0), w[1], w[2], w[3], w[4], w[5], AT(6)); break;
    case PAGED_ATTENTION: tllm_paged_attention(AT(0), INT(1)); break;
    case WRITE_CODES: tllm_write_codes(AT(0), INT(1)); break;
    case SHARED_SUM: return tllm_shared_sum(AT(0), AT(1), w[2], INT(3));
    }
    return 1;
}

/* How many were made: all, or those before the first that could not be. */
int64_t tllm_play(const Call *calls, int64_t count) {
    int64_t made = 0;
    while (made < count && make(calls + made)) made++;
    return made;
}
