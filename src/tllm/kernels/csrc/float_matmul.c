/* y = x W^T for a few rows of x, where W has plain numbers, row by row as torch has them: bound by reading W once.
 *
 * Sums of some outputs with some rows are in registers together, as many as there are: what is read of W then serves
 * several rows, and what is read of x several outputs. Of several outputs W is read side by side: a processor that
 * fetches ahead in each of them has more of memory on the way than in a single one. Others fetch the most where W is read
 * one output after another, as it lies; then a row's whole columns are a piece.
 *
 * A sum is over 16 lanes, each in the order of columns, and then over the lanes, whatever else is computed beside it. Of
 * numbers of 16 bits products are exact, and so their sums have the same bits on every processor.
 *
 * Some processors multiply numbers of bfloat16 two by two (bfloat16_pairs.c): half as many operations, other roundings of
 * sums.
 */
#include "bfloat16_pairs.h"
#include "recorded_calls.h"
#include "threads.h"
#include "vectors.h"

/* Sums that registers hold beside what they are made of. */
#if defined(__AVX512F__)
#define SUMS 24
#define MOST_ROWS 8
#else
#define SUMS 12
#define MOST_ROWS 4
#endif
#define MOST_OUTPUTS 8

#define PANEL 48     /* outputs that a piece of x is multiplied with, a few after another */
#define TURN 16      /* rows that share what is read of W */
#define NEAR_X 20480 /* bytes of x in a piece at most: so many stay in the first cache */
#define NEAR_W 16384 /* bytes of W that are multiplied by a piece at a time, and fetched meanwhile, at most */
#define AHEAD 8192   /* bytes of W that are fetched before they are needed, where it is read as it lies */

/* How outputs are read, or that numbers are multiplied two by two. As kernels/product_ways.py numbers them. */
enum { ONE_BY_ONE, SIDE_BY_SIDE = 2, BY_PAIRS };

typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef _Float16 Halves __attribute__((vector_size(2 * WIDTH)));

typedef struct {
    const void *weight; /* [outputs, columns] of w_dtype */
    const float *x;     /* of each turn [columns / 16, its rows, 16], as `widen` puts it */
    void *y;            /* [rows, outputs] of y_dtype */
    int64_t outputs, columns, rows;
    int w_dtype, y_dtype, way;
} Product;

/* Sums lane by lane, of rows from `row` on with the outputs of a panel. */
typedef struct {
    const float *x;
    int64_t row, rows;
    f32x16 sums[TURN][PANEL];
} Turn;

/* Where the lanes from `lane` on of a sum are. */
INLINE float *part_of(Turn *turn, int64_t row, int64_t output, int lane) { return (float *)&turn->sums[row][output] + lane; }

INLINE int size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* Columns that are multiplied at a time. */
INLINE int step_of(int dtype) { return dtype == BFLOAT16 ? PAIR : LANES; }

/* Vectors of x that are multiplied in a step: so many parts of its columns. */
INLINE int parts_of(int dtype) { return dtype == BFLOAT16 ? 2 : 1; }

/* WIDTH of 16 numbers, from `lane` on. Of bfloat16 they are of 32, in each 32 bits two, of which the one that comes first
 * has the lower half: those with even or with odd numbers. */
INLINE Part load_part(const void *from, int64_t at, int lane, int dtype, int is_odd) {
    if (dtype == FLOAT32) {
        Part some;
        memcpy(&some, (const float *)from + at + lane, sizeof some);
        return some;
    }
    if (dtype == FLOAT16) {
        Halves some;
        memcpy(&some, (const _Float16 *)from + at + lane, sizeof some);
        return __builtin_convertvector(some, Part);
    }
    Bits two;
    memcpy(&two, (const uint16_t *)from + at + 2 * lane, sizeof two);
    return (Part)(is_odd ? two & 0xffff0000u : two << 16);
}

/* Adds the products of columns [from, to), which are whole steps, to sums of `outputs` outputs from `output` on with
 * `rows` rows. `first` and `row`: where these are in the turn's sums. Of W is fetched what is multiplied next: what lies
 * ahead if these are all columns of a single output, else the same ones of as many outputs after these. */
INLINE void multiply(const Product *p, Turn *turn, int64_t output, int64_t first, int outputs, int64_t row, int rows,
                     int64_t from, int64_t to, int dtype) {
    const int64_t columns = p->columns;
    const int64_t ahead = outputs == 1 && to - from + PAIR > columns ? AHEAD : outputs * columns * size_of(dtype);
    const int step = step_of(dtype), size = size_of(dtype);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Part sums[MOST_ROWS][MOST_OUTPUTS];
        const float *x = turn->x + from / step * parts_of(dtype) * turn->rows * LANES + row * LANES + lane;
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) memcpy(&sums[r][o], part_of(turn, row + r, first + o, lane), sizeof(Part));
        for (int64_t k = from; k < to; k += step) {
            for (int half = 0; half < parts_of(dtype); half++, x += turn->rows * LANES) {
                Part w[MOST_OUTPUTS];
                for (int o = 0; o < outputs; o++) {
                    const int64_t at = (output + o) * columns + k;
                    w[o] = load_part(p->weight, at, lane, dtype, half);
                    if (lane == 0 && half == 0) __builtin_prefetch((const uint8_t *)p->weight + at * size + ahead);
                }
                for (int r = 0; r < rows; r++) {
                    Part here;
                    memcpy(&here, x + r * LANES, sizeof here);
                    for (int o = 0; o < outputs; o++) sums[r][o] = MULTIPLY_ADD(w[o], here, sums[r][o]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) memcpy(part_of(turn, row + r, first + o, lane), &sums[r][o], sizeof(Part));
    }
}

/* The same for all rows of a turn, `most` at a time; what is read of the weight stays in a cache for the next rows. */
INLINE void multiply_rows(const Product *p, Turn *turn, int64_t output, int64_t first, int outputs, int most, int64_t from,
                          int64_t to, int dtype) {
    int64_t row = 0;
    for (; most >= 8 && row + 8 <= turn->rows; row += 8) multiply(p, turn, output, first, outputs, row, 8, from, to, dtype);
    for (; most >= 4 && row + 4 <= turn->rows; row += 4) multiply(p, turn, output, first, outputs, row, 4, from, to, dtype);
    for (; most >= 2 && row + 2 <= turn->rows; row += 2) multiply(p, turn, output, first, outputs, row, 2, from, to, dtype);
    for (; row < turn->rows; row++) multiply(p, turn, output, first, outputs, row, 1, from, to, dtype);
}

/* Columns after the last whole step. */
INLINE void multiply_rest(const Product *p, Turn *turn, int64_t output, int64_t outputs, int64_t from, int dtype) {
    for (int64_t k = from; k < p->columns; k += LANES)
        for (int64_t o = 0; o < outputs; o++) {
            f32x16 w = load_up_to(p->weight, (output + o) * p->columns + k, p->columns - k, dtype);
            for (int64_t r = 0; r < turn->rows; r++) {
                f32x16 x = load16(turn->x, (k / LANES * turn->rows + r) * LANES, FLOAT32);
                turn->sums[r][o] = multiply_add(w, x, turn->sums[r][o]);
            }
        }
}

/* Outputs [output, output + outputs), at most PANEL, of a turn's rows, so many of both at a time. */
INLINE void multiply_panel(const Product *p, Turn *turn, int64_t output, int64_t outputs, int most, int together, int dtype) {
    const int64_t whole = p->columns / step_of(dtype) * step_of(dtype);
    const int64_t of_x = NEAR_X / (4 * turn->rows), of_w = NEAR_W / (together * size_of(dtype));
    const int64_t pieces = together == 1 ? 1 : (whole - 1) / (of_x < of_w ? of_x : of_w) + 1;
    const int64_t piece = (whole / pieces + PAIR - 1) / PAIR * PAIR;
    for (int64_t r = 0; r < turn->rows; r++) memset(turn->sums[r], 0, sizeof turn->sums[r]);
    for (int64_t from = 0; from < whole; from += piece) {
        const int64_t to = from + piece < whole ? from + piece : whole;
        int64_t first = 0;
        for (; first + together <= outputs; first += together)
            multiply_rows(p, turn, output + first, first, together, most, from, to, dtype);
        for (; first < outputs; first++) multiply_rows(p, turn, output + first, first, 1, most, from, to, dtype);
    }
    multiply_rest(p, turn, output, outputs, whole, dtype);
    for (int64_t r = 0; r < turn->rows; r++)
        for (int64_t o = 0; o < outputs; o += LANES)
            store_some(p->y, (turn->row + r) * p->outputs + output + o, lanes_of(outputs - o), p->y_dtype,
                       sums_of_16(turn->sums[r] + o));
}

/* Outputs whose sums are in registers together with those of so many rows. */
INLINE int outputs_beside(int rows) { return SUMS / rows < MOST_OUTPUTS ? SUMS / rows : MOST_OUTPUTS; }

INLINE void multiply_of(const Product *p, int64_t first, int64_t last, int dtype) {
    Turn turn;
    for (int64_t output = first; output < last; output += PANEL) {
        const int64_t outputs = last - output < PANEL ? last - output : PANEL;
        for (turn.row = 0; turn.row < p->rows; turn.row += TURN) {
            turn.rows = p->rows - turn.row < TURN ? p->rows - turn.row : TURN;
            turn.x = p->x + turn.row * ((p->columns + LANES - 1) / LANES * LANES);
            if (MOST_ROWS >= 8 && turn.rows >= 8)
                multiply_panel(p, &turn, output, outputs, 8, outputs_beside(8), dtype);
            else if (turn.rows >= 4)
                multiply_panel(p, &turn, output, outputs, 4, outputs_beside(4), dtype);
            else if (turn.rows >= 2)
                multiply_panel(p, &turn, output, outputs, 2, outputs_beside(2), dtype);
            else if (p->way == ONE_BY_ONE && p->rows == 1)
                multiply_panel(p, &turn, output, outputs, 1, 1, dtype);
            else
                multiply_panel(p, &turn, output, outputs, 1, outputs_beside(1), dtype);
        }
    }
}

static void multiply_some(void *of, int64_t first, int64_t last, int thread) {
    (void)thread;
    const Product *p = of;
    if (p->w_dtype == BFLOAT16)
        multiply_of(p, first, last, BFLOAT16);
    else if (p->w_dtype == FLOAT16)
        multiply_of(p, first, last, FLOAT16);
    else
        multiply_of(p, first, last, FLOAT32);
}

/* x as float32, rows side by side in steps of 16 columns, zeros after the last. Where weights are bfloat16, of each 32
 * columns those with even numbers come first, as `load_part` has them. */
static void widen(float *wide, const void *x, int x_dtype, int64_t rows, int64_t columns, int is_paired) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t k = 0, at = row * columns;
        float *to = wide + row * LANES;
        for (; is_paired && k + PAIR <= columns; k += PAIR) {
            f32x16 two[2] = {load16(x, at + k, x_dtype), load16(x, at + k + LANES, x_dtype)};
            float some[PAIR];
            memcpy(some, two, sizeof some);
            for (int i = 0; i < LANES; i++) {
                to[k * rows + i] = some[2 * i];
                to[(k + LANES) * rows + i] = some[2 * i + 1];
            }
        }
        for (; k < columns; k += LANES) store_some(to, k * rows, LANES, FLOAT32, load_up_to(x, at + k, columns - k, x_dtype));
    }
}

/* y [rows, outputs] = x [rows, columns] W^T with sums in float32; `scratch` has room for rows x columns of float32, the
 * columns rounded up to 16. `way`: how a single row of x is multiplied, with the same bits; or by
 * pairs, if x and W are bfloat16, and columns a multiple of 32. */
void tllm_float_matmul(const void *weight, int w_dtype, int64_t outputs, int64_t columns, const void *x, int x_dtype,
                       int64_t rows, void *y, int y_dtype, float *scratch, int way, int threads) {
#if HAS_PAIRS
    if (way == BY_PAIRS) {
        multiply_by_pairs(weight, outputs, columns, x, rows, y, y_dtype, (uint16_t *)scratch, threads);
        return;
    }
#endif
    const int64_t padded = (columns + LANES - 1) / LANES * LANES, size = x_dtype == FLOAT32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row += TURN) {
        const int64_t some = rows - row < TURN ? rows - row : TURN;
        widen(scratch + row * padded, (const char *)x + row * columns * size, x_dtype, some, columns, w_dtype == BFLOAT16);
    }
    Product product = {weight, scratch, y, outputs, columns, rows, w_dtype, y_dtype, way};
    run_parallel(multiply_some, &product, outputs, LANES, threads);
}
