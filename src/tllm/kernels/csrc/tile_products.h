/* Products of several rows by tiles: csrc/tile_products.c. */
#ifndef TLLM_TILE_PRODUCTS_H
#define TLLM_TILE_PRODUCTS_H

#include "tile_piece.h"

#define TILES_TURN 128 /* rows that share what is read of a weight */

/* Whether tiles can multiply a weight: whose codes are whole numbers, and whose groups a piece has room for. */
INLINE int fits_tiles(const PackedWeight *w) { return HAS_TILES && w->kind != FLOATS && w->group <= PIECE; }

#if HAS_TILES

/* What is loaded next: some rows, and columns of a piece. */
typedef struct {
    const TilePiece *piece;
    int64_t row, column;
} Place;

/* Products with rows [first_row, last_row), a tile of these after another. While one is scaled, the sums of the next one go to
 * memory. That is made from the beginning meanwhile; if sums are in float32, it was multiplied before, the third one is
 * multiplied, and the fourth is loaded. */
typedef struct {
    TilePiece pieces[2];
    int now;           /* which of both is multiplied */
    int has_following; /* whether the other one is multiplied next */
    int has_begun;     /* whether the first products of the piece that is multiplied have been made with the last one's */
    int configured;    /* for which tiles the processor is told so far */
    int64_t first_row, last_row;
    Place place;
    TileSums sums[2];
    int scaled;        /* which of both */
    uint32_t off_grid; /* bit n: parts of the n-th tile of rows have had no place on the grid */
} TileProducts;

/* Nothing is known of what is multiplied next. */
INLINE void begin_tiles(TileProducts *of) { of->now = of->has_following = of->has_begun = of->configured = 0; }

/* Rows [row, last), at most a turn, of y for one block. `goes_on`: the next block follows with the same rows. */
void multiply_rows_by_tiles(TileProducts *of, const Product *p, int64_t block, int64_t row, int64_t last, int goes_on);

#else

typedef struct {
    int none;
} TileProducts;

INLINE void begin_tiles(TileProducts *of) { (void)of; }

INLINE void multiply_rows_by_tiles(TileProducts *of, const Product *p, int64_t block, int64_t row, int64_t last, int goes_on) {
    (void)of, (void)p, (void)block, (void)row, (void)last, (void)goes_on;
}

#endif

#endif
