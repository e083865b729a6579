/* y = x W^T of bfloat16 for some rows by tiles (AMX), with sums in float32: bound by reading W once, which lies row by row
 * as torch has it.
 *
 * A product of tiles adds to 16 x 16 sums what 32 columns give: in two sums, of the even and of the odd columns, each in
 * their order, and these two to what there was. Columns are taken in their order, so that an output has the same bits
 * whatever rows and outputs are computed beside it. Numbers of less than 2^-126 count as 0.
 *
 * One factor lies row by row, in the other each row of a tile has the pairs of two columns. The latter is x, which is
 * packed once for all outputs: to pack W would take longer than the product. So sums are [outputs, rows].
 */
#include "recorded_calls.h"
#include "threads.h"
#include "tiles.h"

#if HAS_TILES

#define SUMS (TILE_ROWS * TILE_ROWS) /* of a tile */
#define PANEL (2 * TILE_ROWS)        /* outputs, and rows, that are multiplied at once: four tiles of sums */

typedef struct {
    const uint16_t *weight; /* [outputs, columns] */
    const uint16_t *x;      /* [rows, columns] */
    uint8_t *packed;        /* x: [panels of rows, columns / 32, 2 tiles of rows, 16 pairs of columns, 16 rows, 2] */
    uint16_t *y;            /* [rows, outputs] */
    int64_t outputs, columns, rows;
} Product;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t panels_of(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

/* The sums of a panel of outputs, from W's rows on, with one or `both` tiles of rows of x: [tiles of rows, tiles of outputs].
 * The panel that lies behind this one is fetched meanwhile, if it is asked for: it comes next. */
INLINE void multiply(float *sums, const uint8_t *w, const uint8_t *x, int64_t columns, int both, int fetches) {
    const int64_t pitch = 2 * columns;
    const uint8_t *behind = w + PANEL * pitch;
    _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
    for (int64_t step = 0; step < columns / STEP; step++, w += 2 * STEP, x += 2 * TILE_BYTES) {
        _tile_loadd(6, x, 64);
        _tile_loadd(4, w, pitch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w + TILE_ROWS * pitch, pitch);
        _tile_dpbf16ps(1, 5, 6);
        if (both) {
            _tile_loadd(7, x + TILE_BYTES, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; fetches && i < PANEL; i++, behind += 2 * STEP) __builtin_prefetch(behind, 0, 2);
    }
    _tile_stored(0, sums, 64), _tile_stored(1, sums + SUMS, 64);
    _tile_stored(2, sums + 2 * SUMS, 64), _tile_stored(3, sums + 3 * SUMS, 64);
}

/* The sums of 16 rows from `row` on, with a panel of outputs, to their places in y. */
static void store_outputs(const Product *p, const float *sums, int64_t output, int64_t row) {
    u32x16 lower[TILE_ROWS], upper[TILE_ROWS];
    memcpy(lower, sums, sizeof lower);
    memcpy(upper, sums + SUMS, sizeof upper);
    transpose(lower);
    transpose(upper);
    for (int64_t r = 0; r < least(p->rows - row, TILE_ROWS); r++) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)upper[r], (__m512)lower[r]);
        memcpy(p->y + (row + r) * p->outputs + output, &both, sizeof both);
    }
}

static void multiply_outputs(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    configure_all_tiles();
    for (int64_t output = first; output < last; output += PANEL)
        for (int64_t row = 0; row < p->rows; row += PANEL) {
            const uint8_t *w = (const uint8_t *)(p->weight + output * p->columns), *x = p->packed + 2 * row * p->columns;
            const int both = p->rows - row > TILE_ROWS, fetches = row == 0 && output + PANEL < p->outputs;
            _Alignas(64) float sums[4 * SUMS];
            if (both)
                multiply(sums, w, x, p->columns, 1, fetches);
            else
                multiply(sums, w, x, p->columns, 0, fetches);
            store_outputs(p, sums, output, row);
            if (both) store_outputs(p, sums + 2 * SUMS, output, row + TILE_ROWS);
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

/* Bytes of scratch memory that a product takes. */
int64_t tllm_bfloat16_scratch_bytes(int64_t rows, int64_t columns) { return panels_of(rows) * PANEL * columns * 2 + 64; }

/* y [rows, outputs] = x [rows, columns] W^T. Outputs and columns are multiples of 32. */
void tllm_bfloat16_matmul(const void *weight, int64_t outputs, int64_t columns, const void *x, int64_t rows, void *y,
                          void *scratch, int threads) {
    uint8_t *packed = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    Product product = {weight, x, packed, y, outputs, columns, rows};
    run_parallel(pack_tiles, &product, panels_of(rows) * 2 * columns / STEP, 2, threads);
    run_parallel(multiply_outputs, &product, outputs, PANEL, threads);
}

#else

int64_t tllm_bfloat16_scratch_bytes(int64_t rows, int64_t columns) {
    (void)rows, (void)columns;
    return 0;
}

void tllm_bfloat16_matmul(const void *weight, int64_t outputs, int64_t columns, const void *x, int64_t rows, void *y,
                          void *scratch, int threads) {
    (void)weight, (void)outputs, (void)columns, (void)x, (void)rows, (void)y, (void)scratch, (void)threads;
}

#endif
