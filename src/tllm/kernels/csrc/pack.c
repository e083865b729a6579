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

/* Four columns of 8 bits, or eight of 4: the low half of each byte is of the first four. */
INLINE void pack_word(const uint8_t *codes, int bits, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, codes, 4);
        return;
    }
    uint64_t eight;
    memcpy(&eight, codes, sizeof eight);
    uint32_t four = (uint32_t)eight | (uint32_t)(eight >> 32) << 4;
    memcpy(out, &four, sizeof four);
}

/* Columns [k, k + step) of 16 rows, where some rows or columns may be missing: those are 0. */
static void pack_edge(const Packing *p, int64_t block, int64_t k, int64_t step, uint8_t *out) {
    for (int n = 0; n < LANES; n++) {
        int64_t row = block * LANES + n, left = row < p->rows ? p->columns - k : 0;
        uint8_t some[8] = {0};
        if (left > 0) memcpy(some, p->codes + row * p->columns + k, (size_t)(left < step ? left : step));
        pack_word(some, p->bits, out + 4 * n);
    }
}

static void pack_blocks(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Packing *p = of;
    const int64_t step = p->bits == 8 ? 4 : 8, whole = p->columns / step * step;
    for (int64_t block = first; block < last; block++) {
        const uint8_t *codes = p->codes + block * LANES * p->columns;
        const int64_t inside = (block + 1) * LANES <= p->rows ? whole : 0;
        uint8_t *out = p->out + block * p->padded / step * 64;
        for (int64_t k = 0; k < inside; k += step, out += 64)
            for (int n = 0; n < LANES; n++) pack_word(codes + n * p->columns + k, p->bits, out + 4 * n);
        for (int64_t k = inside; k < p->padded; k += step, out += 64) pack_edge(p, block, k, step, out);
    }
}

/* codes [rows, columns], one a byte, to blocks of 16 rows as quantized_matmul.c reads them. */
void tllm_pack_codes(const uint8_t *codes, int64_t rows, int64_t columns, int64_t padded, int bits, uint8_t *out,
                     int threads) {
    Packing packing = {codes, out, rows, columns, padded, bits};
    run_parallel(pack_blocks, &packing, (rows + LANES - 1) / LANES, 1, threads);
}

typedef struct {
    const uint8_t *from;
    uint8_t *codes;
    int64_t pitch, bytes, run;
} Nibbles;

static void split_blocks(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Nibbles *s = of;
    for (int64_t block = first; block < last; block++) {
        const uint8_t *from = s->from + block * s->pitch;
        uint8_t *codes = s->codes + block * s->bytes * 2;
        for (int64_t at = 0; at < s->bytes; at += s->run, from += s->run, codes += 2 * s->run)
            for (int64_t i = 0; i < s->run; i += LANES) {
                u8x16 some;
                memcpy(&some, from + i, sizeof some);
                u8x16 low = some & 15, high = some >> 4;
                memcpy(codes + i, &low, sizeof low);
                memcpy(codes + s->run + i, &high, sizeof high);
            }
    }
}

/* `bytes` bytes every `pitch` bytes to codes of 4 bits, one a byte: of each `run` (a multiple of 16) the low halves and
 * then the high ones. */
void tllm_split_nibbles(const uint8_t *from, int64_t blocks, int64_t pitch, int64_t bytes, int64_t run, uint8_t *codes,
                        int threads) {
    Nibbles split = {from, codes, pitch, bytes, run};
    run_parallel(split_blocks, &split, blocks, 64, threads);
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
