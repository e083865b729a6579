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
 * at x's groups, nor in which order these are added. Where the parts of a piece are below 2, some rows or a tile of them
 * are added as whole numbers (grid_sums.h), which takes half the operations.
 *
 * Several weights are multiplied in one call: the parts of one weight that lie beside each other, of which y has the
 * outputs side by side, and the experts of a stack, each of which has some of the rows.
 *
 * W is packed in blocks of 16 outputs. A block of 8 bits has 64 bytes for 4 columns: of each output its 4 codes. One of
 * 4 bits has 64 bytes for 8 columns: the low halves are the codes of the first 4. Scales and minima lie [group, 16].
 */
#include "recorded_calls.h"
#include "threads.h"
#include "tile_products.h"
#include "vector_products.h"

#define NEAR 8                 /* blocks that stay in a cache while all turns, one after another, are multiplied by them */

/* How products are made: with a block of outputs after another; by tiles, of several rows; of a single row with several
 * blocks side by side. As kernels/product_ways.py numbers them. */
enum { ONE_BY_ONE, BY_TILES, SIDE_BY_SIDE };

struct WeightPart {
    PackedWeight weight;
    int64_t expert, first_output; /* whose rows are multiplied by it, and where its outputs begin in a row of y */
};

typedef struct {
    const WeightPart *parts;
    int64_t count;
    const int64_t *first_rows; /* of each expert, and after the last one how many rows there are */
    Product product;           /* without its weight */
    int way;
} Products;

INLINE int64_t blocks_of(const PackedWeight *w) { return (w->outputs + LANES - 1) / LANES; }

/* Rows of a part that share what is read of the weight. */
INLINE int64_t turn_of(const Products *all, const WeightPart *part) {
    return all->way == BY_TILES && fits_tiles(&part->weight) ? TILES_TURN : VECTORS_TURN;
}

/* How many turns of rows, the last of them maybe shorter, a part is multiplied with. */
INLINE int64_t turns_of(const Products *all, const WeightPart *part) {
    const int64_t turn = turn_of(all, part);
    return (all->first_rows[part->expert + 1] - all->first_rows[part->expert] + turn - 1) / turn;
}

/* A block of a part and the rows of a turn. */
typedef struct {
    int64_t block, row, last;
} Item;

/* The n-th item of a part, of whose expert the rows are [first, last): NEAR blocks with the first turn, then with the next. */
INLINE Item item_of(const WeightPart *part, int64_t n, int64_t turn, int64_t first, int64_t last) {
    const int64_t blocks = blocks_of(&part->weight), turns = (last - first + turn - 1) / turn;
    const int64_t near = n / (NEAR * turns) * NEAR, here = n % (NEAR * turns);
    const int64_t count = blocks - near < NEAR ? blocks - near : NEAR, row = first + here / count * turn;
    return (Item){near + here % count, row, row + turn < last ? row + turn : last};
}

/* An item is a block of a part with a turn of rows: threads have as much to do each, whatever experts are chosen. */
static void multiply_items(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Products *all = of;
    TileProducts tiles;
    begin_tiles(&tiles);
    watch_grid();
    for (int64_t i = 0, begin = 0; i < all->count && begin < last; i++) {
        const WeightPart *part = all->parts + i;
        const int64_t turn = turn_of(all, part), end = begin + turns_of(all, part) * blocks_of(&part->weight);
        const int64_t rows = all->first_rows[part->expert], last_row = all->first_rows[part->expert + 1];
        Product p = all->product;
        p.weight = &part->weight, p.first_output = part->first_output;
        const int64_t from = begin > first ? begin : first, stop = end < last ? end : last;
        if (last_row - rows == 1) multiply_row(&p, from - begin, stop - begin, rows, all->way == SIDE_BY_SIDE);
        for (int64_t n = from - begin; last_row - rows > 1 && n < stop - begin; n++) {
            const Item item = item_of(part, n, turn, rows, last_row);
            const Item next = n + 1 < stop - begin ? item_of(part, n + 1, turn, rows, last_row) : (Item){};
            const int goes_on = next.row == item.row && next.block == item.block + 1;
            if (HAS_TILES && turn == TILES_TURN)
                multiply_rows_by_tiles(&tiles, &p, item.block, item.row, item.last, goes_on);
            else
                multiply_rows_by_vectors(&p, item.block, item.row, item.last);
        }
        begin = end;
    }
    if (HAS_TILES && all->way == BY_TILES) release_tiles();
}

/* Whether products of these kernels can be made by tiles. */
int tllm_has_tiles(void) { return HAS_TILES; }

/* Bytes of scratch memory behind all else: a tile, and eight rows by vectors, have rows behind the last one, whose codes are
 * read, and scales of 0. */
#define BEHIND (TILE_ROWS * X_GROUP)

/* Bytes of scratch memory that rounding x takes. */
int64_t tllm_scratch_bytes(int64_t rows, int64_t padded) {
    const int64_t of_group = X_GROUP + (int64_t)(3 * sizeof(float) + 4 * sizeof(int32_t));
    return pitch_of(rows) * (padded / X_GROUP) * of_group + BEHIND;
}

/* Whether steps of both weights begin with the same sums. */
INLINE int begins_alike(const PackedWeight *a, const PackedWeight *b) {
    return offset_of(a, a->kind) == offset_of(b, b->kind) && (a->group < X_GROUP) == (b->group < X_GROUP) &&
           (a->minima == 0) == (b->minima == 0);
}

/* y [rows, …] (rows `stride` elements apart) = x [rows, columns] W^T for each of `count` parts, all of which have as many
 * columns. The rows of expert e are [first_rows[e], first_rows[e + 1]); the last of these numbers, of `experts` + 1, is
 * how many rows there are. `way`: with the same bits in another way, where it fits a part. */
void tllm_quantized_matmul(const WeightPart *parts, int64_t count, const int64_t *first_rows, int64_t experts,
                           const void *x, int x_dtype, void *y, int64_t stride, int y_dtype, void *scratch, int way,
                           int threads) {
    if (count == 0) return;
    int64_t rows = first_rows[experts], groups = parts[0].weight.padded / X_GROUP, pitch = pitch_of(rows);
    int8_t *codes = scratch;
    int32_t *sums = (int32_t *)(codes + pitch * groups * X_GROUP);
    float *scales = (float *)(sums + 2 * pitch * groups);
    StepSums steps = {(int32_t *)(scales + pitch * groups + TILE_ROWS), scales + 3 * pitch * groups + TILE_ROWS};
    QuantizedRows rounded = {codes, scales, sums, rows, groups, pitch};
    memset(scales + pitch * groups, 0, TILE_ROWS * sizeof *scales);
    quantize_rows(rounded, x, parts[0].weight.columns, x_dtype, threads);
    Product product = {.x = rounded, .steps = steps, .y = y, .stride = stride, .y_dtype = y_dtype};
    for (int64_t i = 0, end; i < count; i = end) {
        int64_t items = 0;
        for (end = i; end < count && begins_alike(&parts[i].weight, &parts[end].weight); end++) continue;
        Products all = {parts + i, end - i, first_rows, product, way};
        if (rows > 1) sum_steps(steps, &rounded, &parts[i].weight);
        for (int64_t n = i; n < end; n++) items += turns_of(&all, parts + n) * blocks_of(&parts[n].weight);
        run_parallel(multiply_items, &all, items, 1, threads);
    }
}
