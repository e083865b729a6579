/* y = x W^T, where W has codes of 4 or 8 bits and scales for groups of columns, and x is rounded to 8 bits by groups.
 *
 * Codes are whole numbers, or numbers of float8 (e4m3). Below, i of the latter is a sum in float32, column by column: a
 * product has 11 bits and is exact, and each sum is rounded once.
 *
 * For a row and an output: over the weight's groups in order, y = y + (sum over x's groups in it of i * d) * scale, and
 * y = y - (sum of s * d) * minimum where there are minima, with i the exact sum of (code - offset) * x_code, s that of
 * x_code, d x's scale. Each operation is rounded to float32 once, in this order, so that an output has the same bits on
 * every processor, for any number of rows, threads and outputs beside it.
 *
 * For sums that ranks share, y in float64 adds i * d * scale and s * d * minimum of each of x's groups, rounded to
 * multiples of 2^-30. Such sums are exact up to 2^23, so it does not matter how the columns are cut among ranks, if only
 * at x's groups, nor in which order these are added.
 *
 * Several weights are multiplied in one call: the parts of one weight that lie beside each other, of which y has the
 * outputs side by side, and the experts of a stack, each of which has some of the rows.
 *
 * W is packed in blocks of 16 outputs. A block of 8 bits has 64 bytes for 4 columns: of each output its 4 codes. One of
 * 4 bits has 64 bytes for 8 columns: the low halves are the codes of the first 4. Scales and minima lie [group, 16].
 */
#include "dot.h"
#include "quantize_rows.h"
#include "recorded_calls.h"
#include "threads.h"
#include "tiles.h"

#define AHEAD 4096             /* bytes of codes that are fetched before they are needed */
#define TURN 32                /* rows that share what is read of a weight */
#define TILES_TURN 64          /* the same of products by tiles */
#define NEAR 8                 /* blocks that stay in a cache while all turns, one after another, are multiplied by them */
#define TILES_AHEAD 3          /* of which so many are begun before they are needed */
#define PIECE 512              /* columns of which codes and scales stay near while these rows are multiplied */
#define MOST_GROUPS (PIECE / 16)
#define UNROLLED _Pragma("clang loop unroll(full)")

enum { NIBBLES, NIBBLES_BY_TABLE, BYTES, FLOATS };

typedef struct {
    const uint8_t *codes;     /* [blocks, padded / 8 or / 4, 64] */
    const void *scales;       /* [blocks, groups, 16] of scale_dtype */
    const void *super_scales; /* [blocks, super groups, 16] of super_dtype, or none */
    const void *minima;       /* as scales, or none */
    const void *super_minima;
    int64_t outputs, columns, padded; /* padded: columns up to a whole group of 32 */
    int64_t group, super_group;       /* columns; group is 16 or a multiple of 32 */
    int32_t kind, offset, scale_dtype, super_dtype;
    uint8_t table[16];
} PackedWeight;

struct WeightPart {
    PackedWeight weight;
    int64_t expert, first_output; /* whose rows are multiplied by it, and where its outputs begin in a row of y */
};

typedef struct {
    const PackedWeight *weight;
    QuantizedRows x;
    void *y;
    int64_t first_output, stride; /* stride: elements between y's rows */
    int32_t y_dtype;
} Product;

typedef struct {
    const WeightPart *parts;
    int64_t count;
    const int64_t *first_rows; /* of each expert, and after the last one how many rows there are */
    Product product;           /* without its weight */
    int by_tiles;
} Products;

/* The scales (or minima) of a group of a block. */
INLINE f32x16 of_group(const PackedWeight *w, const void *codes, const void *super, int64_t block, int64_t group,
                       int64_t groups) {
    f32x16 scale = load16(codes, (block * groups + group) * LANES, w->scale_dtype);
    if (super == 0) return scale;
    int64_t super_groups = (w->columns + w->super_group - 1) / w->super_group;
    int64_t at = block * super_groups + group * w->group / w->super_group;
    return load16(super, at * LANES, w->super_dtype) * scale;
}

/* Adds the exact sums over `columns` of a block, 16 or 32, for some rows of x. */
INLINE void dots(i32x16 *sums, const uint8_t *codes, const int8_t *x, int columns, int kind, u8x16 table, int rows) {
    SmallSums small[8];
    for (int r = 0; r < rows; r++) small[r] = (SmallSums){};
    for (int k = 0; k < columns; k += kind == BYTES ? 4 : 8) {
        u8x64 bytes;
        const uint8_t *here = codes + (kind == BYTES ? k * 16 : k * 8);
        memcpy(&bytes, here, sizeof bytes);
        __builtin_prefetch(here + AHEAD);
        for (int part = 0; part < (kind == BYTES ? 1 : 2); part++) {
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * X_GROUP + k + 4 * part, 4);
                if (kind == NIBBLES)
                    small[r] = dot_small(small[r], some, four);
                else
                    sums[r] = dot(sums[r], some, four);
            }
        }
    }
    for (int r = 0; r < rows && kind == NIBBLES; r++) sums[r] += of_small(small[r]);
}

INLINE u32x16 shifted(u32x16 words, int left) { return left < 0 ? words >> -left : words << left; }

/* Column j of four in each lane, as e4m3: exponent and mantissa of a float32 whose exponent counts from 120 lower. */
INLINE f32x16 column_of_floats(u32x16 words, int j) {
    u32x16 size = shifted(words, 20 - 8 * j) & 0x07f00000u, sign = (words << (24 - 8 * j)) & 0x80000000u;
    return (f32x16)(size | sign) * 0x1p120f;
}

/* The same sums of codes that are float8 numbers, column by column. */
INLINE void dots_of_floats(f32x16 *sums, const uint8_t *codes, const int8_t *x, int columns, int rows) {
    for (int k = 0; k < columns; k += 4) {
        u32x16 words;
        memcpy(&words, codes + k * 16, sizeof words);
        __builtin_prefetch(codes + k * 16 + AHEAD);
        f32x4 four[8];
        for (int r = 0; r < rows; r++) {
            i8x4 some;
            memcpy(&some, x + r * X_GROUP + k, sizeof some);
            four[r] = __builtin_convertvector(some, f32x4);
        }
        for (int j = 0; j < 4; j++) {
            f32x16 w = column_of_floats(words, j);
            for (int r = 0; r < rows; r++) sums[r] = multiply_add(w, splat(four[r][j]), sums[r]);
        }
    }
}

/* The sums over `columns` of a block for some rows of x, which are exact but for those of float8. */
INLINE void group_sums(f32x16 *sums, const PackedWeight *w, const uint8_t *codes, const int8_t *x, int columns,
                       const int32_t *sums_of_codes, int rows, int kind) {
    if (kind == FLOATS) {
        for (int r = 0; r < rows; r++) sums[r] = (f32x16){};
        dots_of_floats(sums, codes, x, columns, rows);
        return;
    }
    const int32_t offset = w->offset - (kind == NIBBLES ? 0 : CODE_BIAS);
    u8x16 table;
    memcpy(&table, w->table, sizeof table);
    i32x16 exact[8];
    for (int r = 0; r < rows; r++) exact[r] = (i32x16){} - offset * sums_of_codes[r];
    dots(exact, codes, x, columns, kind, table, rows);
    for (int r = 0; r < rows; r++) sums[r] = __builtin_convertvector(exact[r], f32x16);
}

/* To the nearest multiple of 2^-30: numbers of this size have no finer ones. */
INLINE f64x16 on_grid(f32x16 x) {
    const double size = 6291456.0; /* 1.5 * 2^22 */
    return (__builtin_convertvector(x, f64x16) + size) - size;
}

/* Some groups of a block's columns. Their scales and minima are there where several rows share them, and signed codes
 * where tiles multiply these. */
typedef struct {
    const Product *product;
    const uint8_t *codes;       /* of the whole block */
    int64_t block, first, last; /* groups [first, last) of the weight */
    f32x16 scales[MOST_GROUPS], minima[MOST_GROUPS];
    int8_t signed_codes[PIECE * LANES];
} Piece;

/* What is known of a row's outputs so far. */
typedef union {
    f32x16 rounded;
    f64x16 exact;
} Sums;

/* A row's outputs while they are in registers, and the sums of the weight's group that is being multiplied. */
typedef struct {
    f32x16 y, scaled;
    f64x16 y64;
    float sum_of_x;
} Row;

INLINE void take_up(Row *rows, const Sums *sums, int count) {
    UNROLLED for (int r = 0; r < count; r++) rows[r] = (Row){.y = sums[r].rounded, .y64 = sums[r].exact};
}

INLINE void put_down(Sums *sums, const Row *rows, int count, int exact) {
    UNROLLED for (int r = 0; r < count; r++) sums[r] = exact ? (Sums){.exact = rows[r].y64} : (Sums){.rounded = rows[r].y};
}

/* What is the same for all rows of a group of the weight. */
typedef struct {
    f32x16 scale, minimum;
    int has_minimum, is_wide, exact;
} Group;

/* To a row, what one of x's groups adds: `sums` are those of codes by x's codes, `sum_of_x` is s * d. */
INLINE void add_sums(Row *row, const Group *group, f32x16 sums, float d, float sum_of_x) {
    f32x16 part = sums * d;
    if (group->exact) {
        row->y64 += on_grid(part * group->scale);
        if (group->has_minimum) row->y64 -= on_grid(group->minimum * sum_of_x);
    } else if (group->is_wide) {
        row->scaled += part;
        row->sum_of_x += sum_of_x;
    } else {
        row->y += part * group->scale;
        if (group->has_minimum) row->y -= group->minimum * sum_of_x;
    }
}

INLINE void begin_group(Row *rows, int count) {
    UNROLLED for (int r = 0; r < count; r++) rows[r].scaled = (f32x16){}, rows[r].sum_of_x = 0;
}

INLINE void end_group(Row *rows, const Group *group, int count) {
    if (!group->is_wide || group->exact) return;
    UNROLLED for (int r = 0; r < count; r++) {
        rows[r].y += rows[r].scaled * group->scale;
        if (group->has_minimum) rows[r].y -= group->minimum * rows[r].sum_of_x;
    }
}

/* Adds a piece's part to the sums of rows [row, row + rows). `step`: columns of which a sum is exact, those of x's groups
 * or of the weight's if these are fewer; `is_wide`: a group of the weight has more of them. */
INLINE void multiply(const Piece *piece, Sums *sums_of_rows, int64_t row, int rows, int kind, int exact, int step,
                     int is_wide) {
    const PackedWeight *w = piece->product->weight;
    const QuantizedRows *x = &piece->product->x;
    const int64_t width = is_wide ? w->group : step;
    Row row_of[8];
    take_up(row_of, sums_of_rows, rows);
    for (int64_t number = piece->first; number < piece->last; number++) {
        Group group = {.has_minimum = w->minima != 0, .is_wide = is_wide, .exact = exact};
        if (rows == 1) {
            const int64_t groups = (w->columns + width - 1) / width;
            group.scale = of_group(w, w->scales, w->super_scales, piece->block, number, groups);
            if (w->minima) group.minimum = of_group(w, w->minima, w->super_minima, piece->block, number, groups);
        } else {
            group.scale = piece->scales[number - piece->first];
            if (w->minima) group.minimum = piece->minima[number - piece->first];
        }
        begin_group(row_of, rows);
        int64_t at = number * width, end = is_wide && at + width > w->padded ? w->padded : at + width;
        for (; at < end; at += step) {
            const int64_t here = at / X_GROUP * x->rows + row;
            const int32_t *halves = x->sums + at / X_HALF * x->rows + row;
            f32x16 sums[8];
            int32_t sums_of_codes[8];
            for (int r = 0; r < rows; r++) sums_of_codes[r] = step == X_HALF ? halves[r] : halves[r] + halves[x->rows + r];
            group_sums(sums, w, piece->codes + at * (kind >= BYTES ? 16 : 8), x->codes + here * X_GROUP + at % X_GROUP, step,
                       sums_of_codes, rows, kind);
            for (int r = 0; r < rows; r++) {
                float d = x->scales[here + r];
                add_sums(row_of + r, &group, sums[r], d, (float)sums_of_codes[r] * d);
            }
        }
        end_group(row_of, &group, rows);
    }
    put_down(sums_of_rows, row_of, rows, exact);
}

/* The sums over columns [at, at + step) to their place in a ring. */
INLINE void sums_at(TileSums *ring, const Piece *piece, const QuantizedRows *x, int64_t row, int64_t at, int64_t first,
                    int step) {
    const int64_t number = (at - first) / step;
    tile_sums(ring + number % (TILES_AHEAD + 1), x->codes + (at / X_GROUP * x->rows + row) * X_GROUP + at % X_GROUP, X_GROUP,
              piece->signed_codes + (at - first) * LANES, number & 1);
}

/* The same by tiles, of which the configured one has at most `rows` rows, 8 or 16: what is computed of others is not
 * used. `rest` times the sum of x's codes is still to be taken from sums of signed codes. */
INLINE void multiply_tiles(const Piece *piece, Sums *sums_of_rows, int64_t row, int rows, int exact, int step, int is_wide,
                           int has_minimum, int32_t rest) {
    const PackedWeight *w = piece->product->weight;
    const QuantizedRows x = piece->product->x;
    const int64_t width = is_wide ? w->group : step, first = piece->first * width;
    const int64_t last = piece->last * width < w->padded ? piece->last * width : w->padded;
    Row row_of[TILE_ROWS];
    TileSums found[TILES_AHEAD + 1];
    take_up(row_of, sums_of_rows, rows);
    for (int64_t at = first; at < last && at < first + TILES_AHEAD * step; at += step)
        sums_at(found, piece, &x, row, at, first, step);
    for (int64_t number = piece->first; number < piece->last; number++) {
        Group group = {piece->scales[number - piece->first], {}, has_minimum, is_wide, exact};
        if (has_minimum) group.minimum = piece->minima[number - piece->first];
        begin_group(row_of, rows);
        int64_t at = number * width, end = at + width < last ? at + width : last;
        for (; at < end; at += step) {
            if (at + TILES_AHEAD * step < last) sums_at(found, piece, &x, row, at + TILES_AHEAD * step, first, step);
            TileSums *here = found + (at - first) / step % (TILES_AHEAD + 1);
            const float *d = x.scales + at / X_GROUP * x.rows + row;
            const int32_t *halves = x.sums + at / X_HALF * x.rows + row;
            float sums_of_x[TILE_ROWS];
            if (has_minimum || rest)
                for (int r = 0; r < rows; r++) {
                    int32_t sum_of_codes = step == X_HALF ? halves[r] : halves[r] + halves[x.rows + r];
                    sums_of_x[r] = (float)sum_of_codes * d[r];
                    if (rest) here->rows[r] -= rest * sum_of_codes;
                }
            UNROLLED for (int r = 0; r < rows; r++) {
                f32x16 sums = __builtin_convertvector(here->rows[r], f32x16);
                add_sums(row_of + r, &group, sums, d[r], has_minimum ? sums_of_x[r] : 0);
            }
        }
        end_group(row_of, &group, rows);
    }
    put_down(sums_of_rows, row_of, rows, exact);
}

/* Each way to go through the groups is compiled by itself only where that is faster. */
INLINE void multiply_some(const Piece *piece, Sums *sums, int64_t row, int rows, int kind, int exact) {
    const int64_t group = piece->product->weight->group;
    if (group < X_GROUP)
        multiply(piece, sums, row, rows, kind, exact, X_HALF, 0);
    else if (group == X_GROUP && kind != FLOATS && !exact)
        multiply(piece, sums, row, rows, kind, exact, X_GROUP, 0);
    else
        multiply(piece, sums, row, rows, kind, exact, X_GROUP, 1);
}

/* Each of these is compiled by itself, for codes of any kind. */
#define MULTIPLY_TILE(name, rows, exact, has_minimum)                                                                  \
    static void name(const Piece *piece, Sums *sums, int64_t row, int32_t rest) {                                      \
        const int64_t group = piece->product->weight->group;                                                           \
        if (group < X_GROUP)                                                                                           \
            multiply_tiles(piece, sums, row, rows, exact, X_HALF, 0, has_minimum, rest);                               \
        else if (group == X_GROUP)                                                                                     \
            multiply_tiles(piece, sums, row, rows, exact, X_GROUP, 0, has_minimum, rest);                              \
        else                                                                                                           \
            multiply_tiles(piece, sums, row, rows, exact, X_GROUP, 1, has_minimum, rest);                              \
    }

MULTIPLY_TILE(tile, TILE_ROWS, 0, 0)
MULTIPLY_TILE(tile_with_minima, TILE_ROWS, 0, 1)
MULTIPLY_TILE(exact_tile, TILE_ROWS, 1, 0)
MULTIPLY_TILE(exact_tile_with_minima, TILE_ROWS, 1, 1)
MULTIPLY_TILE(half_tile, TILE_ROWS / 2, 0, 0)
MULTIPLY_TILE(half_tile_with_minima, TILE_ROWS / 2, 0, 1)

/* Codes of a piece less `bias`, [columns / 4, 16 outputs, 4]. Whether 8 bits with a sign hold all of them. */
INLINE int unpack(Piece *piece, int64_t first, int64_t columns, int kind, int bias) {
    const uint8_t *codes = piece->codes + first * (kind == BYTES ? 16 : 8);
    u8x16 table;
    memcpy(&table, piece->product->weight->table, sizeof table);
    u8x64 largest = {}, least = ~largest;
    for (int64_t k = 0; k < columns; k += kind == BYTES ? 4 : 8, codes += 64) {
        u8x64 bytes;
        memcpy(&bytes, codes, sizeof bytes);
        __builtin_prefetch(codes + AHEAD);
        for (int part = 0; part < (kind == BYTES ? 1 : 2); part++) {
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            largest = __builtin_elementwise_max(largest, some), least = __builtin_elementwise_min(least, some);
            some -= (uint8_t)bias;
            memcpy(piece->signed_codes + (k + 4 * part) * LANES, &some, sizeof some);
        }
    }
    return __builtin_reduce_max(largest) - bias <= 127 && __builtin_reduce_min(least) - bias >= -128;
}

/* A piece by tiles, for `rows` rows from `row` on. */
INLINE void multiply_by_tiles(Piece *piece, Sums *sums, int64_t row, int64_t rows, int kind, int exact) {
    const PackedWeight *w = piece->product->weight;
    const int64_t first = piece->first * w->group, end = piece->last * w->group;
    const int64_t columns = (end < w->padded ? end : w->padded) - first;
    int32_t rest = 0;
    if (!unpack(piece, first, columns, kind, w->offset)) {
        unpack(piece, first, columns, kind, 128);
        rest = w->offset - 128;
    }
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        int here = rows - r < TILE_ROWS ? (int)(rows - r) : TILE_ROWS;
        if (r == 0 || here < TILE_ROWS) configure_tiles(here, w->group < X_GROUP ? X_HALF : X_GROUP);
        if (exact)
            (w->minima ? exact_tile_with_minima : exact_tile)(piece, sums + r, row + r, rest);
        else if (here <= TILE_ROWS / 2)
            (w->minima ? half_tile_with_minima : half_tile)(piece, sums + r, row + r, rest);
        else
            (w->minima ? tile_with_minima : tile)(piece, sums + r, row + r, rest);
    }
}

/* The next groups after `last`: as many as PIECE columns have, at least one; all of them where rows share nothing. */
INLINE void next_piece(Piece *piece, int64_t block, int64_t groups, int is_shared) {
    const PackedWeight *w = piece->product->weight;
    int64_t count = w->group < PIECE ? PIECE / w->group : 1;
    piece->first = piece->last;
    piece->last = is_shared && piece->first + count < groups ? piece->first + count : groups;
    if (!is_shared) return;
    for (int64_t group = piece->first; group < piece->last; group++) {
        piece->scales[group - piece->first] = of_group(w, w->scales, w->super_scales, block, group, groups);
        if (w->minima)
            piece->minima[group - piece->first] = of_group(w, w->minima, w->super_minima, block, group, groups);
    }
}

/* Rows [row, last), at most a turn, of y for one block: a piece is read from memory once for all of them. */
INLINE void multiply_rows(const Product *p, int64_t block, int64_t row, int64_t last, int kind, int exact, int by_tiles) {
    const PackedWeight *w = p->weight;
    const int64_t groups = (w->columns + w->group - 1) / w->group, rows = last - row;
    Piece piece;
    piece.product = p, piece.block = block, piece.last = 0;
    piece.codes = w->codes + block * w->padded * (kind >= BYTES ? 16 : 8);
    Sums sums[TILES_TURN];
    for (int64_t r = 0; r < rows; r++) sums[r] = (Sums){.exact = {}};
    while (piece.last < groups) {
        next_piece(&piece, block, groups, rows > 1 || by_tiles);
        if (by_tiles) {
            multiply_by_tiles(&piece, sums, row, rows, kind, exact);
            continue;
        }
        int64_t r = 0;
        for (; MOST_ROWS >= 8 && r + 8 <= rows; r += 8) multiply_some(&piece, sums + r, row + r, 8, kind, exact);
        for (; MOST_ROWS >= 4 && r + 4 <= rows; r += 4) multiply_some(&piece, sums + r, row + r, 4, kind, exact);
        for (; MOST_ROWS >= 2 && r + 2 <= rows; r += 2) multiply_some(&piece, sums + r, row + r, 2, kind, exact);
        for (; r < rows; r++) multiply_some(&piece, sums + r, row + r, 1, kind, exact);
    }
    int64_t count = w->outputs - block * LANES < LANES ? w->outputs - block * LANES : LANES;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (row + r) * p->stride + p->first_output + block * LANES;
        if (exact)
            memcpy((double *)p->y + at, &sums[r].exact, (size_t)count * sizeof(double));
        else
            store_some(p->y, at, (int)count, p->y_dtype, sums[r].rounded);
    }
}

/* Whether tiles can multiply a weight: whose codes are whole numbers, and whose groups a piece has room for. */
INLINE int fits_tiles(const PackedWeight *w) { return HAS_TILES && w->kind != FLOATS && w->group <= PIECE; }

INLINE void multiply_block(const Product *p, int64_t block, int64_t row, int64_t last, int kind, int by_tiles) {
    const int exact = p->y_dtype == FLOAT64;
    if (HAS_TILES && by_tiles)
        exact ? multiply_rows(p, block, row, last, kind, 1, 1) : multiply_rows(p, block, row, last, kind, 0, 1);
    else
        exact ? multiply_rows(p, block, row, last, kind, 1, 0) : multiply_rows(p, block, row, last, kind, 0, 0);
}

INLINE int64_t blocks_of(const PackedWeight *w) { return (w->outputs + LANES - 1) / LANES; }

/* Rows of a part that share what is read of the weight. */
INLINE int64_t turn_of(const Products *all, const WeightPart *part) {
    return all->by_tiles && fits_tiles(&part->weight) ? TILES_TURN : TURN;
}

/* How many turns of rows, the last of them maybe shorter, a part is multiplied with. */
INLINE int64_t turns_of(const Products *all, const WeightPart *part) {
    const int64_t turn = turn_of(all, part);
    return (all->first_rows[part->expert + 1] - all->first_rows[part->expert] + turn - 1) / turn;
}

/* An item is a block of a part with a turn of rows: threads have as much to do each, whatever experts are chosen. */
static void multiply_items(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Products *all = of;
    for (int64_t i = 0, begin = 0; i < all->count && begin < last; i++) {
        const WeightPart *part = all->parts + i;
        const int64_t blocks = blocks_of(&part->weight), turn = turn_of(all, part), turns = turns_of(all, part);
        const int64_t end = begin + turns * blocks;
        const int64_t rows = all->first_rows[part->expert], last_row = all->first_rows[part->expert + 1];
        Product p = all->product;
        p.weight = &part->weight, p.first_output = part->first_output;
        for (int64_t item = begin > first ? begin : first; item < end && item < last; item++) {
            const int64_t near = (item - begin) / (NEAR * turns) * NEAR, here = (item - begin) % (NEAR * turns);
            const int64_t count = blocks - near < NEAR ? blocks - near : NEAR, block = near + here % count;
            const int64_t row = rows + here / count * turn, stop = row + turn < last_row ? row + turn : last_row;
            if (p.weight->kind == NIBBLES)
                multiply_block(&p, block, row, stop, NIBBLES, turn == TILES_TURN);
            else if (p.weight->kind == NIBBLES_BY_TABLE)
                multiply_block(&p, block, row, stop, NIBBLES_BY_TABLE, turn == TILES_TURN);
            else if (p.weight->kind == BYTES)
                multiply_block(&p, block, row, stop, BYTES, turn == TILES_TURN);
            else
                multiply_block(&p, block, row, stop, FLOATS, 0);
        }
        begin = end;
    }
    if (HAS_TILES && all->by_tiles) release_tiles();
}

/* Whether products of these kernels can be made by tiles. */
int tllm_has_tiles(void) { return HAS_TILES; }

/* Bytes of scratch memory that rounding x takes; behind them are some that a tile's rows may reach. */
int64_t tllm_scratch_bytes(int64_t rows, int64_t padded) {
    return rows * (padded + padded / X_GROUP * (int64_t)(sizeof(float) + 2 * sizeof(int32_t))) + 64;
}

/* y [rows, …] (rows `stride` elements apart) = x [rows, columns] W^T for each of `count` parts, all of which have as many
 * columns. The rows of expert e are [first_rows[e], first_rows[e + 1]); the last of these numbers, of `experts` + 1, is
 * how many rows there are. `by_tiles`: with the same bits by tiles, where there are some that fit a part. */
void tllm_quantized_matmul(const WeightPart *parts, int64_t count, const int64_t *first_rows, int64_t experts,
                           const void *x, int x_dtype, void *y, int64_t stride, int y_dtype, void *scratch, int by_tiles,
                           int threads) {
    if (count == 0) return;
    int64_t rows = first_rows[experts], padded = parts[0].weight.padded, groups = padded / X_GROUP, items = 0;
    float *scales = scratch;
    int32_t *sums = (int32_t *)(scales + rows * groups);
    QuantizedRows rounded = {(int8_t *)(sums + 2 * rows * groups), scales, sums, rows, groups};
    quantize_rows(rounded, x, parts[0].weight.columns, x_dtype, threads);
    Products all = {parts, count, first_rows, {.x = rounded, .y = y, .stride = stride, .y_dtype = y_dtype}, by_tiles};
    for (int64_t i = 0; i < count; i++) items += turns_of(&all, parts + i) * blocks_of(&parts[i].weight);
    run_parallel(multiply_items, &all, items, 1, threads);
}
