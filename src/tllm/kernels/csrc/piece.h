/* Some groups of a block's columns, which all rows of a turn are multiplied by before the next ones. */
#ifndef TLLM_PIECE_H
#define TLLM_PIECE_H

#include "grid_sums.h"
#include "packed_weight.h"
#include "tiles.h"

#define PIECE 512 /* columns */
#define MOST_GROUPS (PIECE / 16)

/* Groups [first, last) of the weight with their scales and minima, and signed codes where tiles multiply these. */
typedef struct {
    const Product *product;
    const uint8_t *codes;     /* of the whole block */
    const uint8_t *following; /* those of the piece that is multiplied next, which products by tiles fetch; or none */
    int64_t first, last;
    uint32_t off_grid; /* bit n: parts of the n-th rows that are multiplied at once have had no place on the grid */
    f32x16 scales[MOST_GROUPS], minima[MOST_GROUPS];
    int8_t signed_codes[PIECE * LANES];
} Piece;

/* How sums are kept while a piece is multiplied: in float32; in float64; as whole numbers (grid_sums.h). */
enum { ROUNDED, EXACT, ON_GRID };

/* What is known of a row's outputs so far. */
typedef union {
    f32x16 rounded;
    f64x16 exact;
} Sums;

INLINE void take_up(Row *rows, GridSums *on_grid, const Sums *sums, int count) {
    UNROLLED for (int r = 0; r < count; r++) {
        rows[r] = (Row){.y = sums[r].rounded, .y64 = sums[r].exact};
        on_grid[r] = (GridSums){};
    }
}

/* On the grid a piece adds less than 128, and the first that has no place there is the last that is tried: so below 2^24
 * columns no sum is rounded on the way. */
INLINE void put_down(Sums *sums, const Row *rows, const GridSums *on_grid, int count, int kept) {
    UNROLLED for (int r = 0; r < count; r++) {
        if (kept == ROUNDED) sums[r].rounded = rows[r].y;
        if (kept == EXACT) sums[r].exact = rows[r].y64;
        if (kept == ON_GRID) sums[r].exact += of_grid(on_grid + r);
    }
}

/* A group of the piece by its place there; on the grid, scale and minimum are multiplied by 2^30. */
INLINE Group group_of_piece(const Piece *piece, int64_t number, int has_minimum, int is_wide, int kept) {
    const float by = kept == ON_GRID ? GRID : 1;
    Group group = {piece->scales[number] * by, {}, has_minimum, is_wide, kept != ROUNDED};
    if (has_minimum) group.minimum = piece->minima[number] * by;
    return group;
}

/* `add_sums`, also on the grid. */
INLINE void add_part(Row *row, GridSums *on_grid, i32x16 *least, const Group *group, int kept, f32x16 sums, float d) {
    if (kept == ON_GRID)
        add_to_grid(on_grid, least, sums * d * group->scale);
    else
        add_sums(row, group, sums, d);
}

/* `take_minimum`, also on the grid. */
INLINE void take_part(Row *row, GridSums *on_grid, i32x16 *least, const Group *group, int kept, float sum_of_x) {
    if (kept == ON_GRID)
        add_to_grid(on_grid, least, group->minimum * -sum_of_x);
    else
        take_minimum(row, group, sum_of_x);
}

/* Whether tiles can multiply a weight: whose codes are whole numbers, and whose groups a piece has room for. */
INLINE int fits_tiles(const PackedWeight *w) { return HAS_TILES && w->kind != FLOATS && w->group <= PIECE; }

/* Tells the processor of the tiles that products of so many rows with a weight take, unless they are `configured` so; that is
 * 0 at first. It takes as long as a tile's product does, and the next ones wait for it. */
void configure_for(int *configured, const PackedWeight *w, int64_t rows);

/* Adds a piece's part to the sums of `rows` rows from `row` on, for which tiles are configured; there is room for whole tiles
 * of sums. `exact`: in float64. */
void multiply_by_tiles(Piece *piece, Sums *sums, int64_t row, int64_t rows, int exact);

#endif
