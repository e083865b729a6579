/* Y = A B for matrices of float32, row by row of B: the gradients of a product x W^T, which are dY W and
 * dY^T x. Both B lie as they are multiplied, row by row, and A comes either way. (float_matmul.c multiplies rows by rows.)
 *
 * Sums of some rows with a panel of columns are in registers together (Goto and van de Geijn, 2008). A piece of B, as many
 * steps of a panel as stay in the first cache, is copied there and meets all rows of a block of A, whose piece stays in the
 * second cache for the panels that come next.
 *
 * A number of Y is the sum of its products in the order of steps, PIECE of them by themselves, and these sums one after
 * another: whatever is computed beside it, and by whom.
 */
#include "threads.h"
#include "vectors.h"

/* Rows whose sums with a panel, which is two registers, are in registers. */
#if defined(__AVX512F__)
#define ROWS 12
#else
#define ROWS 6
#endif
#define PANEL (2 * WIDTH)
#define PIECE 128       /* steps: of a panel at most 16 KiB */
#define TILES 40        /* of ROWS rows in a block of A, whose piece is at most 240 KiB */
#define PACKED (1 << 20) /* numbers of A that are copied at once, if there are not more rows than that for a piece */

typedef struct {
    const float *a, *b; /* [rows, steps], or if it is turned [steps, rows]; [steps, columns] */
    float *packed, *y;  /* steps [first, last) of A by pieces, of each the tiles of its rows; [rows, columns] */
    int64_t rows, steps, columns, first, last;
    int is_turned;
} Product;

INLINE Part load_part(const float *from) {
    Part some;
    memcpy(&some, from, sizeof some);
    return some;
}

#if WIDTH == 16
INLINE Part to_all_lanes(float x) { return (Part){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#elif WIDTH == 8
INLINE Part to_all_lanes(float x) { return (Part){x, x, x, x, x, x, x, x}; }
#else
INLINE Part to_all_lanes(float x) { return (Part){x, x, x, x}; }
#endif

INLINE int64_t tiles_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

INLINE int64_t panels_of(const Product *p) { return (p->columns + PANEL - 1) / PANEL; }

/* Steps of the piece that begins with this one. */
INLINE int64_t steps_of(const Product *p, int64_t step) { return least(p->last - step, PIECE); }

/* Where the piece of a tile that begins with a step is. */
INLINE float *piece_of(const Product *p, int64_t tile, int64_t step) {
    const int64_t steps = p->is_turned ? steps_of(p, step) : PIECE;
    return p->packed + ROWS * ((step - p->first) * tiles_of(p->rows) + tile * steps);
}

/* Copies tiles: of A as it lies each row's piece after another, of A turned the rows of each step. Rows after the last one
 * are zeros. */
static void pack(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    for (int64_t step = p->first; step < p->last; step += PIECE)
        for (int64_t tile = first; tile < last; tile++) {
            const int64_t row = tile * ROWS, rows = least(p->rows - row, ROWS), steps = steps_of(p, step);
            float *to = piece_of(p, tile, step);
            if (rows < ROWS) memset(to, 0, sizeof(float) * ROWS * (size_t)(p->is_turned ? steps : PIECE));
            if (p->is_turned)
                for (int64_t k = 0; k < steps; k++, to += ROWS) {
                    const float *from = p->a + (step + k) * p->rows + row;
                    if (rows == ROWS)
                        memcpy(to, from, sizeof(float) * ROWS);
                    else
                        memcpy(to, from, sizeof(float) * (size_t)rows);
                }
            else
                for (int64_t r = 0; r < rows; r++)
                    memcpy(to + r * PIECE, p->a + (row + r) * p->steps + step, sizeof(float) * (size_t)steps);
        }
}

/* The sums of a tile with a panel over the steps of a piece. */
INLINE void multiply(const float *a, const float *b, int64_t steps, int is_turned, float *y, int64_t stride, int is_first) {
    const int64_t of_row = is_turned ? 1 : PIECE, of_step = is_turned ? ROWS : 1;
    Part sums[ROWS][2] = {0};
    for (int64_t k = 0; k < steps; k++, b += PANEL, a += of_step) {
        const Part left = load_part(b), right = load_part(b + WIDTH);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const Part all = to_all_lanes(a[r * of_row]);
            sums[r][0] = MULTIPLY_ADD(all, left, sums[r][0]);
            sums[r][1] = MULTIPLY_ADD(all, right, sums[r][1]);
        }
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int half = 0; half < 2; half++) {
            float *to = y + r * stride + half * WIDTH;
            if (!is_first) sums[r][half] += load_part(to);
            memcpy(to, &sums[r][half], sizeof(Part));
        }
}

/* A tile with a panel of so many rows and columns, in Y. */
INLINE void multiply_tile(const Product *p, const float *a, const float *b, int64_t steps, int is_turned, int64_t row,
                          int64_t column, int is_first) {
    const int64_t rows = least(p->rows - row, ROWS), columns = least(p->columns - column, PANEL);
    float *y = p->y + row * p->columns + column;
    if (rows == ROWS && columns == PANEL) {
        multiply(a, b, steps, is_turned, y, p->columns, is_first);
        return;
    }
    float some[ROWS * PANEL] = {0};
    for (int64_t r = 0; r < rows && !is_first; r++)
        memcpy(some + r * PANEL, y + r * p->columns, sizeof(float) * (size_t)columns);
    multiply(a, b, steps, is_turned, some, PANEL, is_first);
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * p->columns, some + r * PANEL, sizeof(float) * (size_t)columns);
}

/* Panels [first, last) of a block. */
INLINE void multiply_block(const Product *p, int64_t block, int64_t first, int64_t last, int is_turned) {
    const int64_t end = least((block + 1) * TILES, tiles_of(p->rows));
    float b[PIECE * PANEL] __attribute__((aligned(64))) = {0};
    for (int64_t step = p->first; step < p->last; step += PIECE) {
        const int64_t steps = steps_of(p, step);
        for (int64_t panel = first; panel < last; panel++) {
            const int64_t column = panel * PANEL, columns = least(p->columns - column, PANEL);
            for (int64_t k = 0; k < steps; k++) {
                const float *from = p->b + (step + k) * p->columns + column;
                if (columns == PANEL)
                    memcpy(b + k * PANEL, from, sizeof(float) * PANEL);
                else
                    memcpy(b + k * PANEL, from, sizeof(float) * (size_t)columns);
            }
            for (int64_t tile = block * TILES; tile < end; tile++)
                multiply_tile(p, piece_of(p, tile, step), b, steps, is_turned, tile * ROWS, column, step == 0);
        }
    }
}

/* Panels of blocks, counted one block after another. */
static void multiply_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    const int64_t panels = panels_of(p);
    for (int64_t to; first < last; first = to) {
        const int64_t block = first / panels;
        to = least(last, (block + 1) * panels);
        if (p->is_turned)
            multiply_block(p, block, first - block * panels, to - block * panels, 1);
        else
            multiply_block(p, block, first - block * panels, to - block * panels, 0);
    }
}

/* Steps of A that are copied at once. */
INLINE int64_t most_steps(int64_t rows, int64_t steps) {
    const int64_t fitting = PACKED / (tiles_of(rows) * ROWS) / PIECE * PIECE;
    return least(fitting > PIECE ? fitting : PIECE, steps);
}

/* Numbers of float32 that `scratch` has. */
int64_t tllm_float_gradient_scratch(int64_t rows, int64_t steps, int is_turned) {
    const int64_t most = most_steps(rows, steps);
    return tiles_of(rows) * ROWS * (is_turned ? most : (most + PIECE - 1) / PIECE * PIECE);
}

/* y [rows, columns] = A B, where B is [steps, columns] and A [rows, steps], or if `is_turned` lies as [steps, rows]. */
void tllm_float_gradient(const float *a, const float *b, int64_t rows, int64_t steps, int64_t columns, int is_turned, float *y,
                         float *scratch, int threads) {
    Product product = {a, b, scratch, y, rows, steps, columns, 0, 0, is_turned};
    const int64_t tiles = tiles_of(rows), blocks = (tiles + TILES - 1) / TILES, most = most_steps(rows, steps);
    if (steps == 0) memset(y, 0, sizeof(float) * (size_t)(rows * columns));
    for (; product.first < steps; product.first = product.last) {
        product.last = least(product.first + most, steps);
        run_parallel(pack, &product, tiles, 1, threads);
        run_parallel(multiply_some, &product, blocks * panels_of(&product), 1, threads);
    }
}
