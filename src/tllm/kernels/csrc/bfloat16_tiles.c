/* y = x W^T of bfloat16 by tiles (AMX), with sums in float32. W lies row by row, as torch has it.
 *
 * A product of tiles adds to 16 x 16 sums what 32 columns give: in two sums, of the even and of the odd columns, each in
 * their order, and these two to what there was. Columns are taken in their order, so that an output has the same bits
 * whatever rows and outputs are computed beside it. Numbers of less than 2^-126 count as 0.
 *
 * One factor lies row by row, in the other each row of a tile has the pairs of two columns. The latter is x, which is
 * packed once for all outputs: to pack W would take longer. So sums are [outputs, rows].
 *
 * For few rows the time is that of reading W once, in its order. For many it is that of loading tiles: W is taken in blocks,
 * which are copied so that the first cache holds one; what x has for these columns stays in the second one meanwhile, and so
 * do the sums of a group of outputs.
 */
#include "recorded_calls.h"
#include "threads.h"
#include "tiles.h"

#if HAS_TILES

#define SUMS (TILE_ROWS * TILE_ROWS) /* of a tile */
#define PANEL (2 * TILE_ROWS)        /* outputs, and rows, that are multiplied at once: four tiles of sums */
#define FEW_ROWS 128                 /* up to so many, W is read where it lies */
#define BLOCK 256                    /* columns of more rows that are taken at once, one block after another */
#define GROUP 128                    /* outputs whose sums are kept meanwhile, */
#define MOST_ROWS 512                /* and rows */

typedef struct {
    const uint16_t *weight; /* [outputs, columns] */
    const uint16_t *x;      /* [rows, columns] */
    uint8_t *packed;        /* x: [panels of rows, columns / 32, 2 tiles of rows, 16 pairs of columns, 16 rows, 2] */
    float *sums;            /* [threads, panels of a group, panels of rows, 2 tiles of rows, 2 of outputs, 16, 16 rows] */
    uint16_t *y;            /* [rows, outputs] */
    int64_t outputs, columns, rows;
} Product;

/* A panel of W's outputs with the columns of a block: where it lies, or a copy. */
typedef struct {
    const uint8_t *at;
    int64_t pitch, lower, step; /* bytes from a row to the next one; to the second tile; to the next 32 columns */
} Panel;

/* Lines of memory that are multiplied next: in each of `rows` rows `pitch` bytes apart, as many as there are steps. */
typedef struct {
    const uint8_t *at;
    int64_t pitch, rows;
} Fetched;

INLINE int64_t panels_of(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

/* The sums of a panel of outputs with one or `both` tiles of rows of x: [tiles of rows, tiles of outputs]. `first`: there are
 * none from columns before. */
INLINE void multiply(float *sums, Panel w, const uint8_t *x, int64_t steps, int both, int first, Fetched next) {
    _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
    if (!first) {
        _tile_loadd(0, sums, 64), _tile_loadd(1, sums + SUMS, 64);
        if (both) _tile_loadd(2, sums + 2 * SUMS, 64), _tile_loadd(3, sums + 3 * SUMS, 64);
    }
    for (int64_t step = 0; step < steps; step++, w.at += w.step, x += 2 * TILE_BYTES, next.at += 2 * STEP) {
        multiply_tiles(w.at, w.pitch, w.lower, x, TILE_BYTES, both);
        for (int64_t row = 0; row < next.rows; row++) __builtin_prefetch(next.at + row * next.pitch, 0, 2);
    }
    _tile_stored(0, sums, 64), _tile_stored(1, sums + SUMS, 64);
    if (both) _tile_stored(2, sums + 2 * SUMS, 64), _tile_stored(3, sums + 3 * SUMS, 64);
}

/* The sums of 16 rows from `row` on, with a panel of outputs, to their places in y. */
static void store_outputs(const Product *p, const float *sums, int64_t output, int64_t row) {
    u32x16 pairs[TILE_ROWS]; /* of two outputs that are neighbours, for each row */
    for (int i = 0; i < TILE_ROWS; i++) {
        const float *even = sums + 2 * i * TILE_ROWS, *odd = even + TILE_ROWS;
        const bf16x32 both = (bf16x32)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd), _mm512_loadu_ps(even));
        pairs[i] = (u32x16)INTERLEAVED(both);
    }
    transpose(pairs);
    for (int64_t r = 0; r < least(p->rows - row, TILE_ROWS); r++)
        memcpy(p->y + (row + r) * p->outputs + output, pairs + r, sizeof *pairs);
}

/* A copy of a panel's block, in the order in which tiles are loaded. */
static void copy_panel(uint8_t *copy, const uint16_t *weight, int64_t columns, int64_t steps) {
    for (int64_t output = 0; output < PANEL; output++)
        for (int64_t step = 0; step < steps; step++)
            memcpy(copy + (2 * step + output / TILE_ROWS) * TILE_BYTES + output % TILE_ROWS * 64,
                   weight + output * columns + step * STEP, 64);
}

/* Outputs [output, output + PANEL) of rows [first_row, last_row), with `steps` x 32 columns from `column` on; what lies
 * `behind` in W is fetched meanwhile. */
static void multiply_panel(const Product *p, float *sums, int64_t output, int64_t first_row, int64_t last_row, int64_t column,
                           int64_t steps, const uint16_t *behind) {
    _Alignas(64) uint8_t copy[PANEL * BLOCK * sizeof(uint16_t)];
    const int64_t pitch = 2 * p->columns, panels = panels_of(last_row - first_row), fetched = (PANEL + panels - 1) / panels;
    const uint16_t *weight = p->weight + output * p->columns + column;
    const int is_first = column == 0, is_last = column + steps * STEP == p->columns;
    Panel w = {(const uint8_t *)weight, pitch, TILE_ROWS * pitch, 2 * STEP};
    if (p->rows > FEW_ROWS) {
        copy_panel(copy, weight, p->columns, steps);
        w = (Panel){copy, 2 * STEP, TILE_BYTES, 2 * TILE_BYTES};
    }
    for (int64_t n = 0; n < panels; n++, sums += 4 * SUMS) {
        const int64_t row = first_row + n * PANEL, at = n * fetched;
        const uint8_t *x = p->packed + row * pitch + 2 * column * PANEL;
        const Fetched next = {(const uint8_t *)behind + at * pitch, pitch, at < PANEL ? fetched : 0};
        const int both = last_row - row > TILE_ROWS;
        if (both)
            multiply(sums, w, x, steps, 1, is_first, next);
        else
            multiply(sums, w, x, steps, 0, is_first, next);
        if (is_last) store_outputs(p, sums, output, row);
        if (is_last && both) store_outputs(p, sums + 2 * SUMS, output, row + TILE_ROWS);
    }
}

/* Bytes of a thread's sums. */
INLINE int64_t bytes_of_sums(int64_t rows) {
    return GROUP * panels_of(least(rows, MOST_ROWS)) * PANEL * (int64_t)sizeof(float);
}

static void multiply_outputs(void *of, int64_t first, int64_t last, int thread) {
    const Product *p = of;
    float *sums = p->sums + thread * bytes_of_sums(p->rows) / (int64_t)sizeof *sums;
    const int64_t columns = p->columns, block = p->rows > FEW_ROWS ? BLOCK : columns;
    configure_all_tiles();
    for (int64_t row = 0; row < p->rows; row += MOST_ROWS) {
        const int64_t last_row = least(row + MOST_ROWS, p->rows), of_panel = panels_of(last_row - row) * 4 * SUMS;
        for (int64_t group = first; group < last; group += GROUP)
            for (int64_t column = 0; column < columns; column += block) {
                const int64_t end = least(group + GROUP, last), steps = least(block, columns - column) / STEP;
                const int64_t following = column + block < columns ? group * columns + column + block : end * columns;
                for (int64_t output = group; output < end; output += PANEL) {
                    const int64_t behind = output + PANEL < end ? (output + PANEL) * columns + column : following;
                    float *here = sums + (output - group) / PANEL * of_panel;
                    multiply_panel(p, here, output, row, last_row, column, steps, p->weight + behind);
                }
            }
    }
    release_tiles();
}

/* An item is 16 rows of x with 32 columns: a tile of a panel of rows. Behind the last row are zeros. */
static void pack_tiles(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    const int64_t in_panel = 2 * p->columns / STEP;
    for (int64_t item = first; item < last; item++) {
        const int64_t row = item / in_panel * PANEL + item % 2 * TILE_ROWS, column = item % in_panel / 2 * STEP;
        u32x16 tile[TILE_ROWS] = {};
        for (int64_t r = 0; r < least(p->rows - row, TILE_ROWS); r++)
            memcpy(tile + r, p->x + (row + r) * p->columns + column, sizeof *tile);
        transpose(tile);
        memcpy(p->packed + item * TILE_BYTES, tile, sizeof tile);
    }
}

INLINE int64_t packed_bytes(int64_t rows, int64_t columns) { return panels_of(rows) * PANEL * columns * 2; }

/* Bytes of scratch memory that a product takes. */
int64_t tllm_bfloat16_scratch_bytes(int64_t rows, int64_t columns, int threads) {
    return packed_bytes(rows, columns) + threads * bytes_of_sums(rows) + 64;
}

/* y [rows, outputs] = x [rows, columns] W^T. Outputs and columns are multiples of 32. */
void tllm_bfloat16_matmul(const void *weight, int64_t outputs, int64_t columns, const void *x, int64_t rows, void *y,
                          void *scratch, int threads) {
    uint8_t *packed = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    float *sums = (float *)(packed + packed_bytes(rows, columns));
    Product product = {weight, x, packed, sums, y, outputs, columns, rows};
    run_parallel(pack_tiles, &product, panels_of(rows) * 2 * columns / STEP, 2, threads);
    run_parallel(multiply_outputs, &product, outputs, PANEL, threads);
}

#else

int64_t tllm_bfloat16_scratch_bytes(int64_t rows, int64_t columns, int threads) {
    (void)rows, (void)columns, (void)threads;
    return 0;
}

void tllm_bfloat16_matmul(const void *weight, int64_t outputs, int64_t columns, const void *x, int64_t rows, void *y,
                          void *scratch, int threads) {
    (void)weight, (void)outputs, (void)columns, (void)x, (void)rows, (void)y, (void)scratch, (void)threads;
}

#endif
