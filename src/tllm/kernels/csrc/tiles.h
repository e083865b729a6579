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

/* Register 0 has sums, 1 rows of x, 2 codes. */
INLINE void configure_tiles(int rows, int columns) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {
        .palette = 1,
        .bytes = {64, (uint16_t)columns, 64},
        .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)(columns / 4)},
    };
    _tile_loadconfig(&config);
}

/* Eight whole registers. */
INLINE void configure_all_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = TILE_ROWS;
    _tile_loadconfig(&config);
}

INLINE void release_tiles(void) { _tile_release(); }

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
