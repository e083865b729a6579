/* Products of many rows by tiles, whose sums are then scaled by vectors.
 *
 * A processor computes both at once only if they come to it by turns: while it waits for a tile, it looks a few hundred
 * operations ahead. So products of tiles are made in quarters between the vectors' operations on one that was begun before,
 * also where the next rows follow. Of sums in float32 each quarter belongs to another product, so that none of them waits
 * for the one before it; exact sums, whose operations are about twice as many, lost by that.
 */
#include "tile_products.h"

#if HAS_TILES

/* Of numbers [columns / width, rows], the place of the one for a column and a row. Without a sign the division is a shift. */
INLINE int64_t place_of(const QuantizedRows *x, int64_t row, int64_t column, uint64_t width) {
    return (int64_t)((uint64_t)column / width) * x->pitch + row;
}

/* x's codes of a row, from a column on. */
INLINE const int8_t *codes_at(const QuantizedRows *x, int64_t row, int64_t column) {
    return x->codes + place_of(x, row, column, X_GROUP) * X_GROUP + (uint64_t)column % X_GROUP;
}

/* A quarter of the next step of the products, the sums of one going to `sums`. */
INLINE void step_quarter(const TileProducts *of, const QuantizedRows *x, Place *at, int quarter, int64_t columns, TileSums *sums,
                         int staged) {
    static const int of_one[] = {LOAD_ROWS, LOAD_CODES, MULTIPLY, STORE};
    static const int of_several[] = {STORE, MULTIPLY, LOAD_ROWS, LOAD_CODES};
    const int step = staged ? of_several[quarter] : of_one[quarter];
    const TilePiece *piece = at->piece;
    tile_step(step, sums, codes_at(x, at->row, piece->first + at->column), X_GROUP, piece->codes + at->column * LANES);
    if (step != LOAD_CODES) return;
    at->column += columns;
    if (at->column < piece->columns) return;
    at->column = 0, at->row += TILE_ROWS;
    if (at->row < of->last_row) return;
    at->row = of->first_row;
    if (of->has_following) at->piece = of->pieces + !of->now; /* if nothing follows, what is loaded is not used */
}

/* Adds the piece's part to `rows` rows, 8 or 16, from `row` on, of which the first product has been made. `step`: columns
 * of which a sum is exact, those of x's groups or of the weight's if these are fewer; `is_wide`: a group of the weight has
 * more of them. Returns whether it was done: on the grid it may not be possible. */
INLINE int add_tiles(TileProducts *of, Sums *sums_of_rows, int64_t row, int rows, int kept, int step, int is_wide,
                     int has_minimum) {
    const TilePiece *now = of->pieces + of->now;
    const Piece *piece = &now->piece;
    TilePiece *following = row == of->first_row && of->has_following ? of->pieces + !of->now : 0;
    const QuantizedRows x = piece->product->x;
    const int64_t width = is_wide ? piece->product->weight->group : step;
    const int64_t first = now->first, last = first + now->columns;
    const int32_t rest = now->rest;
    Row row_of[TILE_ROWS];
    GridSums on_grid[TILE_ROWS];
    int scaled = of->scaled;
    Place place = of->place;
    take_up(row_of, on_grid, sums_of_rows, rows);
    for (int64_t number = 0, at = first; at < last; number++) {
        const Group group = group_of_piece(piece, number, has_minimum, is_wide, kept);
        begin_group(row_of, rows);
        for (const int64_t end = at + width < last ? at + width : last; at < end; at += step) {
            TileSums *here = of->sums + scaled, *next = of->sums + (scaled ^= 1);
            if (following && following->unpacked < following->columns) unpack(following, step);
            const float *d = x.scales + place_of(&x, row, at, X_GROUP);
            const int32_t *halves = x.sums + place_of(&x, row, at, X_HALF);
            union {
                i32x16 codes;
                f32x16 numbers;
                int32_t sum_of_codes[TILE_ROWS];
                float sum_of_x[TILE_ROWS];
            } of_rows;
            if (has_minimum || rest) {
                f32x16 d_of_rows;
                i32x16 other_half;
                memcpy(&d_of_rows, d, sizeof d_of_rows);
                memcpy(&of_rows, halves, sizeof of_rows);
                memcpy(&other_half, halves + x.pitch, sizeof other_half);
                if (step == X_GROUP) of_rows.codes += other_half;
                for (int r = 0; rest && r < rows; r++) here->rows[r] -= rest * of_rows.sum_of_codes[r];
                of_rows.numbers = __builtin_convertvector(of_rows.codes, f32x16) * d_of_rows;
            }
            UNROLLED for (int r = 0; r < rows; r++) {
                if (4 * r % rows == 0) step_quarter(of, &x, &place, 4 * r / rows, step, next, kept == ROUNDED);
                f32x16 sums = __builtin_convertvector(here->rows[r], f32x16);
                add_part(row_of + r, on_grid + r, &group, kept, sums, d[r]);
                if (has_minimum) take_part(row_of + r, on_grid + r, &group, kept, of_rows.sum_of_x[r]);
                if (kept == ON_GRID) HERE(on_grid[r].of_halves);
                if (kept == ROUNDED && is_wide) HERE(row_of[r].scaled);
                if (kept == ROUNDED && !is_wide) HERE(row_of[r].y);
            }
        }
        end_group(row_of, &group, rows);
    }
    of->scaled = scaled, of->place = place;
    if (kept == ON_GRID && !all_on_grid(on_grid, rows)) return 0;
    put_down(sums_of_rows, row_of, on_grid, rows, kept);
    return 1;
}

/* Each of these is compiled by itself. */
#define ADD_TILES(name, rows, kept, has_minimum)                                                                       \
    static int name(TileProducts *of, Sums *sums, int64_t row) {                                                       \
        const int64_t group = of->pieces[of->now].piece.product->weight->group;                                        \
        if (group < X_GROUP) return add_tiles(of, sums, row, rows, kept, X_HALF, 0, has_minimum);                      \
        if (group == X_GROUP) return add_tiles(of, sums, row, rows, kept, X_GROUP, 0, has_minimum);                    \
        return add_tiles(of, sums, row, rows, kept, X_GROUP, 1, has_minimum);                                          \
    }

ADD_TILES(add_tile, TILE_ROWS, ROUNDED, 0)
ADD_TILES(add_tile_with_minima, TILE_ROWS, ROUNDED, 1)
ADD_TILES(add_half_tile, TILE_ROWS / 2, ROUNDED, 0)
ADD_TILES(add_half_tile_with_minima, TILE_ROWS / 2, ROUNDED, 1)
ADD_TILES(add_exact_tile, TILE_ROWS, EXACT, 0)
ADD_TILES(add_exact_tile_with_minima, TILE_ROWS, EXACT, 1)
ADD_TILES(add_tile_on_grid, TILE_ROWS, ON_GRID, 0)
ADD_TILES(add_tile_with_minima_on_grid, TILE_ROWS, ON_GRID, 1)
ADD_TILES(add_exact_half_tile, TILE_ROWS / 2, EXACT, 0)
ADD_TILES(add_exact_half_tile_with_minima, TILE_ROWS / 2, EXACT, 1)
ADD_TILES(add_half_tile_on_grid, TILE_ROWS / 2, ON_GRID, 0)
ADD_TILES(add_half_tile_with_minima_on_grid, TILE_ROWS / 2, ON_GRID, 1)

typedef int (*AddTiles)(TileProducts *of, Sums *sums, int64_t row);

/* By how sums are kept, whether there are minima, and whether there are so few rows that half a tile holds them. */
static const AddTiles adding[3][2][2] = {
    [ROUNDED] = {{add_tile, add_half_tile}, {add_tile_with_minima, add_half_tile_with_minima}},
    [EXACT] = {{add_exact_tile, add_exact_half_tile}, {add_exact_tile_with_minima, add_exact_half_tile_with_minima}},
    [ON_GRID] = {{add_tile_on_grid, add_half_tile_on_grid},
                 {add_tile_with_minima_on_grid, add_half_tile_with_minima_on_grid}},
};

/* Columns of a product with a weight. */
INLINE int64_t columns_of(const PackedWeight *w) { return w->group < X_GROUP ? X_HALF : X_GROUP; }

/* From the products of the tile of rows from `row` on: the first is made, and if they are `staged`, the second multiplied and
 * the third loaded. */
static void begin(TileProducts *of, const Product *p, int64_t row, int staged) {
    of->scaled = 0, of->place = (Place){of->pieces + of->now, row, 0};
    for (int product = 0; product < (staged ? 3 : 1); product++)
        for (int quarter = staged ? 2 - product : 0; quarter < 4; quarter++)
            step_quarter(of, &p->x, &of->place, quarter, columns_of(p->weight), of->sums, staged);
}

/* Adds to the sums of the n-th tile of rows: exact ones on the grid unless that failed before. What lies behind the last row
 * may make it fail as well. */
static void add_products(TileProducts *of, const Product *p, int n, Sums *sums, int exact) {
    const int64_t row = of->first_row + n * TILE_ROWS;
    const int has_minima = p->weight->minima != 0, is_half = of->last_row - row <= TILE_ROWS / 2;
    if (exact && !(of->off_grid >> n & 1)) {
        if (adding[ON_GRID][has_minima][is_half](of, sums, row)) return;
        of->off_grid |= 1u << n;
        begin(of, p, row, 0);
    }
    adding[exact ? EXACT : ROUNDED][has_minima][is_half](of, sums, row);
}

/* Tells the processor of the tiles that products of so many rows with a weight take, unless it knows. It takes as long as a
 * tile's product does, and the next ones wait for it. */
static void configure_for(TileProducts *of, const PackedWeight *w, int64_t rows) {
    const int tile_rows = rows <= TILE_ROWS / 2 ? TILE_ROWS / 2 : TILE_ROWS;
    const int columns = (int)columns_of(w), wanted = tile_rows << 8 | columns;
    if (of->configured != wanted) configure_tiles(tile_rows, columns);
    of->configured = wanted;
}

#define FEW 4 /* products of a piece that are too few for the next one's to begin among them */

/* The other piece is multiplied next. */
static void go_on(TileProducts *of, const PackedWeight *w) {
    TilePiece *now = of->pieces + of->now, *following = of->pieces + !of->now;
    const int64_t few = FEW * columns_of(w);
    of->has_begun = of->has_following && now->columns >= few && following->columns >= few;
    if (of->has_following && !unpack_rest(following)) of->has_begun = 0;
    of->now = !of->now;
}

void multiply_rows_by_tiles(TileProducts *of, const Product *p, int64_t block, int64_t row, int64_t last, int goes_on) {
    const int64_t groups = groups_of(p->weight), rows = last - row;
    const int exact = p->y_dtype == FLOAT64;
    Sums sums[TILES_TURN];
    for (int64_t r = 0; r < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; r++) sums[r] = (Sums){.exact = {}};
    if (!of->has_following) {
        begin_piece(of->pieces + of->now, p, block, 0);
        unpack_rest(of->pieces + of->now);
    }
    of->first_row = row, of->last_row = last, of->off_grid = 0;
    configure_for(of, p->weight, rows);
    for (int64_t group = 0; group < groups;) {
        group = of->pieces[of->now].piece.last;
        of->has_following = group < groups || goes_on;
        if (group < groups) begin_piece(of->pieces + !of->now, p, block, group);
        if (group == groups && goes_on) begin_piece(of->pieces + !of->now, p, block + 1, 0);
        if (!of->has_begun) begin(of, p, row, !exact);
        for (int n = 0; n * TILE_ROWS < rows; n++) add_products(of, p, n, sums + n * TILE_ROWS, exact);
        go_on(of, p->weight);
    }
    for (int64_t r = 0; r < rows; r++) store_row(p, block, row + r, sums[r].rounded, sums[r].exact, exact);
}

#endif
