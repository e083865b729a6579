/* Keys and values of new tokens written to their slots of the cache, as they are or in one byte each.
 *
 * A row x of one head becomes codes c and a scale s, with x about c s: s = max|x| / L, but the smallest normal number
 * at least, and c = x / s to the nearest code, ties to even. L is the largest code, 127 of int8 and 448 of e4m3. A row
 * with something that is not finite has codes of 0 and that scale, so that what reads it is not a number.
 *
 * Rows are rounded one by one in single operations of float32, so a token's codes are the same in every batch and on
 * every processor. engine/compute/cache_codes.py says the same in torch.
 */
#include "recorded_calls.h"
#include "threads.h"
#include "vectors.h"

struct CacheRows {
    const void *x;        /* [rows, heads, width], rows `stride` numbers apart */
    const int64_t *places; /* [rows]: the slot of each */
    uint8_t *codes;       /* [heads, slots, width] of `coding` */
    float *scales;        /* [heads, slots], of codes */
    int64_t rows, stride, heads, width, slots;
    int32_t dtype, coding; /* coding: what is written, of the numbers' own dtype the numbers themselves */
};

#define SMALLEST_NORMAL 0x1p-126f

/* The largest |x| of a row; not a number where one of them is none. */
INLINE float largest_size(const CacheRows *of, int64_t at) {
    f32x16 largest = {};
    for (int64_t i = 0; i < of->width; i += LANES) {
        f32x16 x = load_up_to(of->x, at + i, of->width - i, of->dtype);
        f32x16 size = (f32x16)((u32x16)x & 0x7fffffff);
        largest = blend((size > largest) | (size != size), size, largest);
    }
    float all = 0;
    for (int i = 0; i < LANES; i++) all = largest[i] > all || largest[i] != largest[i] ? largest[i] : all;
    return all;
}

/* |y| <= 127 to the nearest integer, ties to even: such a large number added leaves no bits for a fraction. */
INLINE u32x16 int8_of_f32(f32x16 y) { return (u32x16)(y + 0x1.8p23f) - 0x4b400000; }

/* |y| <= 448 to e4m3. Below 2^-6 its numbers are the multiples of 2^-9. */
INLINE u32x16 e4m3_of_f32(f32x16 y) {
    u32x16 bits = (u32x16)y, size = bits & 0x7fffffff;
    u32x16 normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
    u32x16 small = (u32x16)((f32x16)size + 0x1p14f) - 0x46800000;
    u32x16 is_small = (u32x16)((f32x16)size < 0x1p-6f);
    return (bits >> 24 & 0x80) | blend_bits(is_small, small, normal);
}

static void write_row(const CacheRows *of, int64_t row, int64_t head) {
    int64_t at = row * of->stride + head * of->width, to = head * of->slots + of->places[row];
    if (of->coding == of->dtype) {
        const int64_t bytes = of->width * (of->dtype == FLOAT32 ? 4 : 2);
        memcpy(of->codes + to * bytes, (const char *)of->x + at * (bytes / of->width), (size_t)bytes);
        return;
    }
    float scale = largest_size(of, at) / (of->coding == INT8 ? 127.0f : 448.0f);
    if (scale < SMALLEST_NORMAL) scale = SMALLEST_NORMAL;
    of->scales[to] = scale;
    for (int64_t i = 0; i < of->width; i += LANES) {
        int64_t left = of->width - i;
        f32x16 y = load_up_to(of->x, at + i, left, of->dtype) / scale;
        u32x16 codes = (of->coding == INT8 ? int8_of_f32(y) : e4m3_of_f32(y)) & 0xff;
        if (!(scale <= 0x1.fffffep127f)) codes = (u32x16){};
        u8x16 bytes = __builtin_convertvector(codes, u8x16);
        memcpy(of->codes + to * of->width + i, &bytes, (size_t)lanes_of(left));
    }
}

static void write_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const CacheRows *rows = of;
    for (int64_t row = first; row < last; row++)
        for (int64_t head = 0; head < rows->heads; head++) write_row(rows, row, head);
}

void tllm_write_codes(const CacheRows *rows, int threads) {
    run_parallel(write_some, (void *)rows, rows->rows, 1, rows->rows < 16 ? 1 : threads);
}
