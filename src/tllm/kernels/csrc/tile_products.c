/* Products of many rows by tiles, whose sums are then scaled by vectors.
 *
 * A processor computes both at once only if they come to it by turns: while it waits for a tile, it looks a few hundred
 * operations ahead. So products of tiles are made in quarters between the vectors' operations on one that was begun before,
 * also where the next rows follow. Of sums in float32 each quarter belongs to another product, so that none of them waits
 * for the one before it; exact sums, whose operations are about twice as many, lost by that.
 */
#include "piece.h"

#if HAS_TILES

/* Products of columns [first, last) of a piece with rows [first_row, last_row), a tile of these after another. While one is
 * scaled, the sums of the next one go to memory. That is made from the beginning meanwhile; if they are `staged`, it was
 * multiplied before, the third one is multiplied, and the fourth is loaded. `row` and `column`: of what is loaded next. */
typedef struct {
    Piece *piece;
    int64_t first, last, first_row, last_row, row, column;
    int64_t step; /* columns of a product */
    TileSums sums[2];
    int scaled; /* which of both */
} TileProducts;

/* Of numbers [columns / width, rows], the place of the one for a column and a row. Without a sign the division is a shift. */
INLINE int64_t place_of(const QuantizedRows *x, int64_t row, int64_t column, uint64_t width) {
    return (int64_t)((uint64_t)column / width) * x->pitch + row;
}

/* x's codes of a row, from a column on. */
INLINE const int8_t *codes_at(const QuantizedRows *x, int64_t row, int64_t column) {
    return x->codes + place_of(x, row, column, X_GROUP) * X_GROUP + (uint64_t)column % X_GROUP;
}

/* Fetches of the piece that is multiplied next, if any, the codes that lie where `columns` from the `column`-th of this one
 * have theirs: memory is read while products are made, and not only while codes are unpacked. */
INLINE void fetch_following(const Piece *piece, int64_t column, int columns) {
    const int64_t bytes = piece->product->weight->kind == BYTES ? LANES : LANES / 2;
    if (piece->following == 0) return;
    for (int64_t at = column * bytes; at < (column + columns) * bytes; at += 64) __builtin_prefetch(piece->following + at);
}

/* A quarter of the next step of the products, the sums of one going to `sums`. */
INLINE void step_quarter(TileProducts *of, int quarter, TileSums *sums, int staged) {
    static const int of_one[] = {LOAD_ROWS, LOAD_CODES, MULTIPLY, STORE};
    static const int of_several[] = {STORE, MULTIPLY, LOAD_ROWS, LOAD_CODES};
    const int step = staged ? of_several[quarter] : of_one[quarter];
    const int8_t *codes = of->piece->signed_codes + (of->column - of->first) * LANES;
    tile_step(step, sums, codes_at(&of->piece->product->x, of->row, of->column), X_GROUP, codes);
    if (step != LOAD_CODES) return;
    of->column += of->step;
    if (of->column < of->last) return;
    of->column = of->first, of->row += TILE_ROWS;
    if (of->row >= of->last_row) of->row = of->first_row; /* to be loaded and not used */
}

/* Adds the piece's part to `rows` rows, 8 or 16, from `row` on, of which the first product has been made. `step`: columns
 * of which a sum is exact, those of x's groups or of the weight's if these are fewer; `is_wide`: a group of the weight has
 * more of them. `rest` times the sum of x's codes is still to be taken from sums of signed codes. Returns whether it was
 * done: on the grid it may not be possible. */
INLINE int add_tiles(TileProducts *of, Sums *sums_of_rows, int64_t row, int rows, int kept, int step, int is_wide,
                     int has_minimum, int32_t rest) {
    const Piece *piece = of->piece;
    const QuantizedRows x = piece->product->x;
    const int64_t width = is_wide ? piece->product->weight->group : step, first = of->first, last = of->last;
    Row row_of[TILE_ROWS];
    GridSums on_grid[TILE_ROWS];
    i32x16 least = {};
    int scaled = of->scaled;
    take_up(row_of, on_grid, sums_of_rows, rows);
    for (int64_t number = 0, at = first; at < last; number++) {
        const Group group = group_of_piece(piece, number, has_minimum, is_wide, kept);
        begin_group(row_of, rows);
        for (const int64_t end = at + width < last ? at + width : last; at < end; at += step) {
            TileSums *here = of->sums + scaled, *next = of->sums + (scaled ^= 1);
            fetch_following(piece, at - first, step);
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
                if (4 * r % rows == 0) step_quarter(of, 4 * r / rows, next, kept == ROUNDED);
                f32x16 sums = __builtin_convertvector(here->rows[r], f32x16);
                add_part(row_of + r, on_grid + r, &least, &group, kept, sums, d[r]);
                if (has_minimum) take_part(row_of + r, on_grid + r, &least, &group, kept, of_rows.sum_of_x[r]);
                if (kept == ON_GRID) HERE(on_grid[r].of_halves);
                if (kept == ROUNDED && is_wide) HERE(row_of[r].scaled);
                if (kept == ROUNDED && !is_wide) HERE(row_of[r].y);
            }
        }
        end_group(row_of, &group, rows);
    }
    of->scaled = scaled;
    if (!all_on_grid(least)) return 0;
    put_down(sums_of_rows, row_of, on_grid, rows, kept);
    return 1;
}

/* Each of these is compiled by itself. */
#define ADD_TILES(name, rows, kept, has_minimum)                                                                       \
    static int name(TileProducts *of, Sums *sums, int64_t row, int32_t rest) {                                         \
        const int64_t group = of->piece->product->weight->group;                                                       \
        if (group < X_GROUP) return add_tiles(of, sums, row, rows, kept, X_HALF, 0, has_minimum, rest);                \
        if (group == X_GROUP) return add_tiles(of, sums, row, rows, kept, X_GROUP, 0, has_minimum, rest);              \
        return add_tiles(of, sums, row, rows, kept, X_GROUP, 1, has_minimum, rest);                                    \
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

typedef int (*AddTiles)(TileProducts *of, Sums *sums, int64_t row, int32_t rest);

/* By how sums are kept, whether there are minima, and whether there are so few rows that half a tile holds them. */
static const AddTiles adding[3][2][2] = {
    [ROUNDED] = {{add_tile, add_half_tile}, {add_tile_with_minima, add_half_tile_with_minima}},
    [EXACT] = {{add_exact_tile, add_exact_half_tile}, {add_exact_tile_with_minima, add_exact_half_tile_with_minima}},
    [ON_GRID] = {{add_tile_on_grid, add_half_tile_on_grid},
                 {add_tile_with_minima_on_grid, add_half_tile_with_minima_on_grid}},
};

/* From the products of the tile of rows from `row` on: the first is made, and if they are `staged`, the second multiplied and
 * the third loaded. */
static void begin(TileProducts *of, int64_t row, int staged) {
    of->scaled = 0, of->column = of->first, of->row = row;
    for (int product = 0; product < (staged ? 3 : 1); product++)
        for (int quarter = staged ? 2 - product : 0; quarter < 4; quarter++)
            step_quarter(of, quarter, of->sums, staged);
}

/* Adds to the sums of the n-th tile of rows: exact ones on the grid unless that failed before. What lies behind the last row
 * may make it fail as well. */
static void add_products(TileProducts *of, int n, Sums *sums, int exact, int32_t rest) {
    const int64_t row = of->first_row + n * TILE_ROWS;
    const int has_minima = of->piece->product->weight->minima != 0, is_half = of->last_row - row <= TILE_ROWS / 2;
    if (exact && !(of->piece->off_grid >> n & 1)) {
        if (adding[ON_GRID][has_minima][is_half](of, sums, row, rest)) return;
        of->piece->off_grid |= 1u << n;
        begin(of, row, 0);
    }
    adding[exact ? EXACT : ROUNDED][has_minima][is_half](of, sums, row, rest);
}

/* Codes of a piece less `bias`, [columns / 4, 16 outputs, 4]. Whether 8 bits with a sign hold all of them, which is
 * looked at if `is_open`. */
INLINE int unpack_codes(Piece *piece, int64_t first, int64_t columns, int kind, int bias, int is_open) {
    const uint8_t *codes = piece->codes + first * column_bytes(kind);
    u8x16 table;
    memcpy(&table, piece->product->weight->table, sizeof table);
    u8x64 largest = {}, least = ~largest;
    for (int64_t k = 0; k < columns; k += kind == BYTES ? 4 : 8, codes += 64) {
        u8x64 bytes;
        memcpy(&bytes, codes, sizeof bytes);
        for (int part = 0; part < (kind == BYTES ? 1 : 2); part++) {
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            if (is_open) largest = __builtin_elementwise_max(largest, some), least = __builtin_elementwise_min(least, some);
            some -= (uint8_t)bias;
            memcpy(piece->signed_codes + (k + 4 * part) * LANES, &some, sizeof some);
        }
    }
    return !is_open || (__builtin_reduce_max(largest) - bias <= 127 && __builtin_reduce_min(least) - bias >= -128);
}

static int unpack(Piece *piece, int64_t first, int64_t columns, int bias) {
    const int kind = piece->product->weight->kind;
    if (kind == NIBBLES) return unpack_codes(piece, first, columns, NIBBLES, bias, bias > 128);
    if (kind == BYTES && bias == 128) return unpack_codes(piece, first, columns, BYTES, bias, 0);
    return kind == BYTES ? unpack_codes(piece, first, columns, BYTES, bias, 1)
                         : unpack_codes(piece, first, columns, NIBBLES_BY_TABLE, bias, 1);
}

void configure_for(int *configured, const PackedWeight *w, int64_t rows) {
    const int tile_rows = rows <= TILE_ROWS / 2 ? TILE_ROWS / 2 : TILE_ROWS;
    const int columns = w->group < X_GROUP ? X_HALF : X_GROUP, wanted = tile_rows << 8 | columns;
    if (*configured != wanted) configure_tiles(tile_rows, columns);
    *configured = wanted;
}

void multiply_by_tiles(Piece *piece, Sums *sums, int64_t row, int64_t rows, int exact) {
    const PackedWeight *w = piece->product->weight;
    const int64_t first = piece->first * w->group, end = piece->last * w->group;
    const int64_t last = end < w->padded ? end : w->padded, step = w->group < X_GROUP ? X_HALF : X_GROUP;
    int32_t rest = 0;
    if (!unpack(piece, first, last - first, w->offset)) {
        unpack(piece, first, last - first, 128);
        rest = w->offset - 128;
    }
    TileProducts products;
    products.piece = piece, products.first = first, products.last = last, products.step = step;
    products.first_row = row, products.last_row = row + rows;
    begin(&products, row, !exact);
    for (int n = 0; n * TILE_ROWS < rows; n++) {
        if (n > 0) piece->following = 0; /* it was fetched with the first rows */
        add_products(&products, n, sums + n * TILE_ROWS, exact, rest);
    }
}

#endif
