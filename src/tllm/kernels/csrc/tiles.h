/* Sums for 16 rows and 16 outputs at once, on processors that multiply tiles of memory (AMX).
 *
 * A tile is a register of up to 16 rows of 64 bytes. A product multiplies one with rows of x by one with codes: each
 * row of the result has, for 16 outputs, exact sums over 16 or 32 columns; of bfloat16 (bfloat16_tiles.c) it adds to
 * sums in float32. HAS_TILES: 0 where the processor has none; nothing here is called then.
 */
#ifndef TLLM_TILES_H
#define TLLM_TILES_H

#include "vectors.h"

#define TILE_ROWS 16

/* Sums of int32, a row after another. */
typedef struct {
    i32x16 rows[TILE_ROWS];
} TileSums;

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include <immintrin.h>

#define HAS_TILES 1

/* What the processor is told of each register: its rows, and their bytes. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Register 0 has sums, 1 rows of x, 2 codes. */
INLINE void configure_tiles(int rows, int columns) {
    TileConfig config = {
        .palette = 1,
        .bytes = {64, (uint16_t)columns, 64},
        .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)(columns / 4)},
    };
    _tile_loadconfig(&config);
}

/* Eight whole registers. */
INLINE void configure_all_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = TILE_ROWS;
    _tile_loadconfig(&config);
}

INLINE void release_tiles(void) { _tile_release(); }

#define STEP 32 /* numbers of bfloat16 in a row of a tile: what a product of tiles sums over */
#define TILE_BYTES 1024

/* Adds to sums [32, 32] what 32 numbers of each row give. `first` has rows, `pitch` bytes apart, the second 16 of them `lower`
 * bytes behind the others; `second` has columns as tiles, the second 16, if there are `both`, `apart` bytes behind the others.
 * Registers 0 and 1 have the sums of the first 16 columns with the first and the second 16 rows, 2 and 3 of the others. */
INLINE void multiply_tiles(const uint8_t *first, int64_t pitch, int64_t lower, const uint8_t *second, int64_t apart, int both) {
    _tile_loadd(6, second, 64);
    _tile_loadd(4, first, pitch);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, first + lower, pitch);
    _tile_dpbf16ps(1, 5, 6);
    if (both) {
        _tile_loadd(7, second + apart, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

typedef __bf16 bf16x32 __attribute__((vector_size(64)));

/* Of 32 numbers, those of the lower half and those of the upper one by turns. */
#define INTERLEAVED(x)                                                                                                 \
    SHUFFLE(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, \
            30, 15, 31)

#define LOG2_E 1.44269504f

/* 2^x with a relative error below 3e-6, far less than the rounding of what comes out to bfloat16. NaN stays NaN. */
INLINE __m512 exponential_of_2(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, 0), rest = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Has the compiler compute a vector here, before the quarter of a product that follows. */
#define HERE(x) __asm__ volatile("" : "+v"(x))

enum { LOAD_ROWS, LOAD_CODES, MULTIPLY, STORE };

/* A quarter of what makes a product; in this order, one after another, they put it to `sums`. What else is to be computed
 * should lie between them: a processor does not come to what follows all of them while it waits for tiles.
 *
 * x: codes of the configured rows, `pitch` bytes apart. codes: signed, [columns / 4, 16 outputs, 4]. */
INLINE void tile_step(int step, TileSums *sums, const int8_t *x, int64_t pitch, const int8_t *codes) {
    if (step == LOAD_ROWS) _tile_loadd(1, x, pitch);
    if (step == LOAD_CODES) _tile_loadd(2, codes, 64);
    if (step == MULTIPLY) _tile_zero(0), _tile_dpbssd(0, 1, 2);
    if (step == STORE) _tile_stored(0, sums, 64);
}

#else

#define HAS_TILES 0

INLINE void release_tiles(void) {}

#endif

#endif
