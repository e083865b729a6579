/* y = x W^T for some rows of x, where both are bfloat16 and the processor multiplies them two by two.
 *
 * A sum is over 16 lanes, each in the order of columns, and then over the lanes, whatever else is computed beside it. In a
 * lane both products are added one after another, the second one first, and each sum is rounded.
 *
 * Sums of eight rows with three outputs are in registers together: 24 products take eleven loads. The rows' columns are a
 * piece that stays in the first cache, while a panel of outputs comes by from the second one, once for each eight rows.
 * Meanwhile the next panel is fetched from memory into the second cache, some lines in each step, so that memory is read all
 * the time: with 32 rows it would wait three quarters of it else. Up to eight rows read it all the time by themselves. The
 * first panel of a part, which nobody has fetched, is a small one.
 */
#include "bfloat16_pairs.h"

#if HAS_PAIRS

#include <immintrin.h>

#include "threads.h"

#define MOST_ROWS 8
#define SUMS 24        /* that registers hold beside what they are made of */
#define MOST_OUTPUTS 8 /* whose sums are made together */
#define FIRST_PANEL LANES
#define PANEL (3 * LANES)
#define PIECE 1024 /* columns at most: so many of eight rows are half of a first cache of 32 KiB */
#define LINE 32    /* numbers */
#define MOST_LINES 4
#define MANY_ROWS 64 /* from so many on, threads copy them together */

typedef struct {
    const uint16_t *weight; /* [outputs, columns] */
    const uint16_t *x;      /* of each eight rows [columns / 32, 8, 32]; of the last ones, as many as `together_of` has */
    void *y;                /* [rows, outputs] of y_dtype */
    int64_t outputs, columns, rows;
    int y_dtype;
} Product;

typedef struct {
    const uint16_t *from;
    uint16_t *to;
    int64_t rows, columns;
} Copy;

/* What is fetched next from memory, up to `end`, `lines` in each step. */
typedef struct {
    const uint16_t *next, *end;
    int lines;
} Fetch;

typedef struct {
    __m512 sums[MOST_ROWS][PANEL];
} PanelSums;

INLINE __m512bh load_pairs(const uint16_t *from) { return (__m512bh)_mm512_loadu_si512(from); }

/* Adds the products of columns [from, to) of `outputs` outputs, whose columns begin at `weight`, with `rows` rows that lie
 * side by side in x. The same columns of the next outputs are brought into the first cache. */
INLINE void multiply(const Product *p, __m512 (*sums)[PANEL], const uint16_t *weight, int outputs, const uint16_t *x, int rows,
                     int64_t from, int64_t to, Fetch *fetch) {
    __m512 here[MOST_ROWS][MOST_OUTPUTS];
    const uint16_t *next = fetch->next;
    const int lines = next < fetch->end ? fetch->lines : 0;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) here[r][o] = from ? sums[r][o] : _mm512_setzero_ps();
    for (int64_t k = from; k < to; k += PAIR) {
        __m512bh w[MOST_OUTPUTS];
        for (int o = 0; o < outputs; o++) {
            w[o] = load_pairs(weight + o * p->columns + k);
            _mm_prefetch(weight + (o + outputs) * p->columns + k, _MM_HINT_T0);
        }
        if (lines > 0) _mm_prefetch(next, _MM_HINT_T1);
        if (lines > 1) _mm_prefetch(next + LINE, _MM_HINT_T1);
        if (lines > 2) _mm_prefetch(next + 2 * LINE, _MM_HINT_T1);
        if (lines > 3) _mm_prefetch(next + 3 * LINE, _MM_HINT_T1);
        next += lines * LINE;
        for (int r = 0; r < rows; r++) {
            const __m512bh some = load_pairs(x + k * rows + r * PAIR);
            for (int o = 0; o < outputs; o++) here[r][o] = _mm512_dpbf16_ps(here[r][o], w[o], some);
        }
    }
    fetch->next = next;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) sums[r][o] = here[r][o];
}

/* Outputs whose sums are in registers together with those of so many rows. */
INLINE int outputs_beside(int rows) { return SUMS / rows < MOST_OUTPUTS ? SUMS / rows : MOST_OUTPUTS; }

/* The same for all outputs of a panel. */
INLINE void multiply_outputs(const Product *p, PanelSums *of, int64_t output, int64_t outputs, const uint16_t *x, int rows,
                             int64_t from, int64_t to, Fetch *fetch) {
    const int most = outputs_beside(rows);
    const uint16_t *weight = p->weight + output * p->columns;
    int64_t o = 0;
    for (; o + most <= outputs; o += most)
        multiply(p, (__m512(*)[PANEL])(of->sums[0] + o), weight + o * p->columns, most, x, rows, from, to, fetch);
    for (; o < outputs; o++)
        multiply(p, (__m512(*)[PANEL])(of->sums[0] + o), weight + o * p->columns, 1, x, rows, from, to, fetch);
}

/* Columns [from, to) of a panel with `together` rows. */
static void multiply_rows(const Product *p, PanelSums *of, int64_t output, int64_t outputs, const uint16_t *x, int64_t together,
                          int64_t from, int64_t to, Fetch *fetch) {
    if (together == 8) multiply_outputs(p, of, output, outputs, x, 8, from, to, fetch);
    if (together == 4) multiply_outputs(p, of, output, outputs, x, 4, from, to, fetch);
    if (together == 2) multiply_outputs(p, of, output, outputs, x, 2, from, to, fetch);
    if (together == 1) multiply_outputs(p, of, output, outputs, x, 1, from, to, fetch);
}

/* Rows that are multiplied together where so many are left: a power of two, the last of them maybe zeros. */
INLINE int64_t together_of(int64_t rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

/* All rows with the outputs of a panel; the next `following` outputs are fetched. */
static void multiply_panel(const Product *p, int64_t output, int64_t outputs, int64_t following) {
    const uint16_t *end = p->weight + (output + outputs) * p->columns;
    const int64_t pieces = (p->columns + PIECE - 1) / PIECE, steps = p->columns / PAIR;
    const int64_t piece = (steps + pieces - 1) / pieces * PAIR;
    const int beside = outputs_beside((int)together_of(p->rows));
    const int64_t in_all = (p->rows + MOST_ROWS - 1) / MOST_ROWS * steps * ((outputs + beside - 1) / beside);
    const int64_t lines = (following * p->columns / LINE + in_all - 1) / in_all;
    Fetch fetch = {end, end, (int)(lines < MOST_LINES ? lines : MOST_LINES)};
    if (p->rows > MOST_ROWS) fetch.end += following * p->columns;
    PanelSums of;
    for (int64_t row = 0; row < p->rows; row += MOST_ROWS) {
        const int64_t rows = p->rows - row < MOST_ROWS ? p->rows - row : MOST_ROWS;
        for (int64_t from = 0; from < p->columns; from += piece) {
            const int64_t to = from + piece < p->columns ? from + piece : p->columns;
            multiply_rows(p, &of, output, outputs, p->x + row * p->columns, together_of(rows), from, to, &fetch);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < outputs; o += LANES)
                store_some(p->y, (row + r) * p->outputs + output + o, lanes_of(outputs - o), p->y_dtype,
                           sums_of_16((const f32x16 *)of.sums[r] + o));
    }
}

static void multiply_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    for (int64_t output = first, outputs; output < last; output += outputs) {
        const int64_t most = output == first && last - first > PANEL ? FIRST_PANEL : PANEL;
        outputs = last - output < most ? last - output : most;
        const int64_t left = last - output - outputs;
        multiply_panel(p, output, outputs, left < PANEL ? left : PANEL);
    }
}

/* Brings some eights of rows into the order of `Product.x`. */
static void copy_rows(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Copy *copy = of;
    const int64_t columns = copy->columns;
    for (int64_t row = first * MOST_ROWS; row < last * MOST_ROWS && row < copy->rows; row += MOST_ROWS) {
        const int64_t together = together_of(copy->rows - row);
        for (int64_t r = 0; r < together; r++) {
            const uint16_t *from = copy->from + (row + r) * columns;
            uint16_t *to = copy->to + row * columns + r * PAIR;
            for (int64_t k = 0; k < columns; k += PAIR) {
                const __m512i some = row + r < copy->rows ? _mm512_loadu_si512(from + k) : _mm512_setzero_si512();
                _mm512_storeu_si512(to + k * together, some);
            }
        }
    }
}

void multiply_by_pairs(const uint16_t *weight, int64_t outputs, int64_t columns, const uint16_t *x, int64_t rows, void *y,
                       int y_dtype, uint16_t *scratch, int threads) {
    Copy copy = {x, scratch, rows, columns};
    run_parallel(copy_rows, &copy, (rows + MOST_ROWS - 1) / MOST_ROWS, 1, rows < MANY_ROWS ? 1 : threads);
    Product product = {weight, scratch, y, outputs, columns, rows, y_dtype};
    run_parallel(multiply_some, &product, outputs, LANES, threads);
}

#endif
