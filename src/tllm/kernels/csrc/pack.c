/* Weights as they are loaded: plain numbers to codes and scales, and codes to the kernels' order. */
#include <math.h>

#include "threads.h"
#include "vectors.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *out;
    int64_t rows, columns, padded;
    int bits;
} Packing;

static void pack_blocks(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Packing *p = of;
    const int64_t step = p->bits == 8 ? 4 : 8;
    for (int64_t block = first; block < last; block++) {
        uint8_t *out = p->out + block * p->padded / step * 64;
        for (int64_t k = 0; k < p->padded; k += step, out += 64)
            for (int n = 0; n < LANES; n++) {
                int64_t row = block * LANES + n, left = row < p->rows ? p->columns - k : 0;
                uint8_t some[8] = {0};
                if (left > 0) memcpy(some, p->codes + row * p->columns + k, (size_t)(left < step ? left : step));
                for (int j = 0; j < 4; j++) out[4 * n + j] = p->bits == 8 ? some[j] : (uint8_t)(some[j] | some[4 + j] << 4);
            }
    }
}

/* codes [rows, columns], one a byte, to blocks of 16 rows as quantized_matmul.c reads them. */
void tllm_pack_codes(const uint8_t *codes, int64_t rows, int64_t columns, int64_t padded, int bits, uint8_t *out,
                     int threads) {
    Packing packing = {codes, out, rows, columns, padded, bits};
    run_parallel(pack_blocks, &packing, (rows + LANES - 1) / LANES, 1, threads);
}

#define GROUP 32

typedef struct {
    const void *weights;
    uint8_t *codes;
    _Float16 *scales;
    int64_t columns, groups;
    int dtype, bits;
} Rounding;

static void round_group(uint8_t *codes, _Float16 *scale, const float *x, int count, int bits) {
    float extreme = 0;
    for (int i = 0; i < GROUP; i++)
        if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    *scale = (_Float16)(bits == 8 ? fabsf(extreme) / 127 : extreme / -8);
    float inverse = *scale == 0 ? 0 : 1 / (float)*scale, low = bits == 8 ? -127 : -8, high = bits == 8 ? 127 : 7;
    float offset = bits == 8 ? 128 : 8;
    for (int i = 0; i < count; i++) {
        float code = rintf(x[i] * inverse);
        code = code < low ? low : code > high ? high : code;
        codes[i] = (uint8_t)(int)(code + offset);
    }
}

static void round_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Rounding *r = of;
    for (int64_t row = first; row < last; row++)
        for (int64_t group = 0; group < r->groups; group++) {
            int64_t at = row * r->columns + group * GROUP, left = r->columns - group * GROUP;
            float x[GROUP];
            for (int half = 0; half < 2; half++) {
                f32x16 some = load_up_to(r->weights, at + half * LANES, left - half * LANES, r->dtype);
                memcpy(x + half * LANES, &some, sizeof some);
            }
            round_group(r->codes + at, r->scales + row * r->groups + group, x, left < GROUP ? (int)left : GROUP, r->bits);
        }
}

/* Weights [rows, columns] to the nearest codes of 8 or 4 bits, groups of 32 columns sharing a scale [rows, groups]. */
void tllm_round_weights(const void *weights, int dtype, int64_t rows, int64_t columns, int bits, uint8_t *codes,
                        void *scales, int threads) {
    Rounding rounding = {weights, codes, scales, columns, (columns + GROUP - 1) / GROUP, dtype, bits};
    run_parallel(round_rows, &rounding, rows, 1, threads);
}
