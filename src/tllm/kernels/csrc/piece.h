/* Some groups of a block's columns, which all rows of a turn are multiplied by before the next ones. */
#ifndef TLLM_PIECE_H
#define TLLM_PIECE_H

#include "grid_sums.h"
#include "packed_weight.h"
#include "tiles.h"

#define PIECE 512 /* columns */
#define MOST_GROUPS (PIECE / 16)

/* Groups [first, last) of the weight with their scales and minima. */
typedef struct {
    const Product *product;
    const uint8_t *codes; /* of the whole block */
    int64_t first, last;
    f32x16 scales[MOST_GROUPS], minima[MOST_GROUPS];
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
INLINE void add_part(Row *row, GridSums *on_grid, const Group *group, int kept, f32x16 sums, float d) {
    if (kept == ON_GRID)
        add_to_grid(on_grid, sums * d * group->scale);
    else
        add_sums(row, group, sums, d);
}

/* `take_minimum`, also on the grid. */
INLINE void take_part(Row *row, GridSums *on_grid, const Group *group, int kept, float sum_of_x) {
    if (kept == ON_GRID)
        add_to_grid(on_grid, group->minimum * -sum_of_x);
    else
        take_minimum(row, group, sum_of_x);
}

INLINE int64_t groups_of(const PackedWeight *w) { return (w->columns + w->group - 1) / w->group; }

/* The first piece of a block comes next. */
INLINE void begin_block(Piece *piece, const Product *p, int64_t block) {
    piece->product = p, piece->last = 0;
    piece->codes = p->weight->codes + block * p->weight->padded * column_bytes(p->weight->kind);
}

/* Fetches the scales (or minima) of `count` groups from the n-th of all blocks on: in memory they lie one after another. */
INLINE void fetch_groups(const PackedWeight *w, const void *scales, int64_t n, int64_t count) {
    const int64_t size = LANES * size_of_scale(w->scale_dtype);
    for (int64_t at = 0; at < count * size; at += 64) __builtin_prefetch((const uint8_t *)scales + n * size + at);
}

/* The next groups after `last`: as many as PIECE columns have, at least one. Those after them are fetched. */
INLINE void next_piece(Piece *piece, int64_t block, int64_t groups) {
    const PackedWeight *w = piece->product->weight;
    int64_t count = w->group < PIECE ? PIECE / w->group : 1;
    piece->first = piece->last;
    piece->last = piece->first + count < groups ? piece->first + count : groups;
    fetch_groups(w, w->scales, block * groups + piece->last, count);
    if (w->minima) fetch_groups(w, w->minima, block * groups + piece->last, count);
    of_groups(piece->scales, w, w->scales, w->super_scales, block, piece->first, piece->last, groups);
    if (w->minima) of_groups(piece->minima, w, w->minima, w->super_minima, block, piece->first, piece->last, groups);
}

#endif
