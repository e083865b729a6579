/* Exact sums for 16 rows and 16 outputs at once, on processors that multiply tiles of memory (AMX).
 *
 * A tile is a register of up to 16 rows of 64 bytes. `tile_sums` multiplies one with rows of x by one with codes: each
 * row of the result has, for 16 outputs, sums over 16 or 32 columns. HAS_TILES: 0 where the processor has none; nothing
 * here is called then.
 */
#ifndef TLLM_TILES_H
#define TLLM_TILES_H

#include "vectors.h"

#define TILE_ROWS 16

/* Sums of int32, a row after another. */
typedef struct {
    i32x16 rows[TILE_ROWS];
} TileSums;

#if defined(__AMX_INT8__)
#include <immintrin.h>

#define HAS_TILES 1

/* Registers 0 and 1 have sums, 2 and 3 rows of x, 4 and 5 codes. */
INLINE void configure_tiles(int rows, int columns) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        config.rows[i] = (uint8_t)rows, config.bytes[i] = 64;
        config.rows[2 + i] = (uint8_t)rows, config.bytes[2 + i] = (uint16_t)columns;
        config.rows[4 + i] = (uint8_t)(columns / 4), config.bytes[4 + i] = 64;
    }
    _tile_loadconfig(&config);
}

INLINE void release_tiles(void) { _tile_release(); }

/* x: codes of the configured rows, `pitch` bytes apart. codes: signed, [columns / 4, 16 outputs, 4]. `odd`: which of two
 * sets of registers, so that a product need not wait for the one before. */
INLINE void tile_sums(TileSums *sums, const int8_t *x, int64_t pitch, const int8_t *codes, int odd) {
    if (odd) {
        _tile_zero(1);
        _tile_loadd(3, x, pitch);
        _tile_loadd(5, codes, 64);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, sums, 64);
    } else {
        _tile_zero(0);
        _tile_loadd(2, x, pitch);
        _tile_loadd(4, codes, 64);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, sums, 64);
    }
}

#else

#define HAS_TILES 0

INLINE void configure_tiles(int rows, int columns) { (void)rows, (void)columns; }

INLINE void release_tiles(void) {}

INLINE void tile_sums(TileSums *sums, const int8_t *x, int64_t pitch, const int8_t *codes, int odd) {
    (void)sums, (void)x, (void)pitch, (void)codes, (void)odd;
}

#endif

#endif
