/* Products of several rows with weights in few bits by vectors: a piece of a block is read from memory once for a turn of rows.
 *
 * As many rows are multiplied at once as there are registers for their sums. What a step takes from the sums of x's codes is
 * found once for all outputs: it comes out of memory to all lanes. Found here, even a step before, it takes a twentieth of the
 * time.
 */
#include "vector_products.h"

#include "piece.h"

typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

void sum_steps(StepSums into, const QuantizedRows *x, const PackedWeight *w) {
    const int32_t offset = offset_of(w, w->kind);
    const int64_t steps = w->group < X_GROUP ? 2 : 1; /* of a group of x */
    for (int64_t step = 0; step < steps * x->groups; step++) {
        const int32_t *halves = x->sums + 2 / steps * step * x->pitch;
        for (int64_t row = 0; row < x->pitch; row += 8) {
            i32x8 sums, other_half;
            memcpy(&sums, halves + row, sizeof sums);
            memcpy(&other_half, halves + x->pitch + row, sizeof other_half);
            if (steps == 1) sums += other_half;
            const i32x8 starts = -offset * sums;
            memcpy(into.starts + step * x->pitch + row, &starts, sizeof starts);
            if (!w->minima) continue;
            f32x8 d;
            memcpy(&d, x->scales + step / steps * x->pitch + row, sizeof d);
            d *= __builtin_convertvector(sums, f32x8);
            memcpy(into.sums_of_x + step * x->pitch + row, &d, sizeof d);
        }
    }
}

/* Chains of a row's sums. Of eight rows on the grid, there are no registers for more than one. */
INLINE int chains_of(int rows, int kept) { return rows == 8 && kept == ON_GRID ? 1 : CHAINS; }

/* Adds a piece's part to the sums of rows [row, row + rows). `is_wide`: a group of the weight has more columns than a step.
 * Returns whether it was done: on the grid it may not be possible. */
INLINE int add_rows(const Piece *piece, Sums *sums_of_rows, int64_t row, int rows, int kind, int kept, int step, int is_wide,
                    int has_minimum) {
    const PackedWeight *w = piece->product->weight;
    const QuantizedRows x = piece->product->x;
    const StepSums of_x = piece->product->steps;
    const int64_t width = is_wide ? w->group : step, end = piece->last * width < w->padded ? piece->last * width : w->padded;
    Row row_of[8];
    GridSums on_grid[8];
    take_up(row_of, on_grid, sums_of_rows, rows);
    for (int64_t number = 0, at = piece->first * width; at < end; number++) {
        const Group group = group_of_piece(piece, number, has_minimum, is_wide, kept);
        begin_group(row_of, rows);
        for (const int64_t stop = at + width < end ? at + width : end; at < stop; at += step) {
            const int64_t place = (int64_t)((uint64_t)at / X_GROUP) * x.pitch + row;
            const int64_t of_step = (int64_t)((uint64_t)at / (unsigned)step) * x.pitch + row;
            f32x16 sums[8];
            group_sums(sums, w, piece->codes + at * column_bytes(kind), x.codes + place * X_GROUP + (uint64_t)at % X_GROUP,
                       step, of_x.starts + of_step, rows, kind, chains_of(rows, kept), AHEAD);
            UNROLLED for (int r = 0; r < rows; r++)
                add_part(row_of + r, on_grid + r, &group, kept, sums[r], x.scales[place + r]);
            if (!has_minimum) continue;
            UNROLLED for (int r = 0; r < rows; r++) take_part(row_of + r, on_grid + r, &group, kept, of_x.sums_of_x[of_step + r]);
        }
        end_group(row_of, &group, rows);
    }
    if (kept == ON_GRID && !all_on_grid(on_grid, rows)) return 0;
    put_down(sums_of_rows, row_of, on_grid, rows, kept);
    return 1;
}

/* Each of these is compiled by itself, and has all registers; by themselves, too, the steps of the most common weights, which
 * have no minima. */
#define ADD_ROWS(name, rows, kind, kept)                                                                               \
    static int name(const Piece *piece, Sums *sums, int64_t row) {                                                     \
        const int64_t group = piece->product->weight->group;                                                           \
        const int minima = piece->product->weight->minima != 0;                                                        \
        if (group < X_GROUP) return add_rows(piece, sums, row, rows, kind, kept, X_HALF, 0, minima);                   \
        if (group > X_GROUP) return add_rows(piece, sums, row, rows, kind, kept, X_GROUP, 1, minima);                  \
        if (minima) return add_rows(piece, sums, row, rows, kind, kept, X_GROUP, 0, 1);                                \
        return add_rows(piece, sums, row, rows, kind, kept, X_GROUP, 0, 0);                                            \
    }

#define ADD_ROWS_OF_KIND(name, rows, kind)                                                                             \
    ADD_ROWS(name##_##rows##_rounded, rows, kind, ROUNDED)                                                             \
    ADD_ROWS(name##_##rows##_exact, rows, kind, EXACT)                                                                 \
    ADD_ROWS(name##_##rows##_on_grid, rows, kind, ON_GRID)

#define ADD_ROWS_OF_EACH_KIND(rows)                                                                                    \
    ADD_ROWS_OF_KIND(nibbles, rows, NIBBLES)                                                                           \
    ADD_ROWS_OF_KIND(by_table, rows, NIBBLES_BY_TABLE)                                                                 \
    ADD_ROWS_OF_KIND(bytes, rows, BYTES)                                                                               \
    ADD_ROWS_OF_KIND(floats, rows, FLOATS)

#define OF_KIND(name, rows)                                                                                            \
    { name##_##rows##_rounded, name##_##rows##_exact, name##_##rows##_on_grid }
#define OF_EACH_KIND(rows) {OF_KIND(nibbles, rows), OF_KIND(by_table, rows), OF_KIND(bytes, rows), OF_KIND(floats, rows)}

typedef int (*AddRows)(const Piece *piece, Sums *sums, int64_t row);

ADD_ROWS_OF_EACH_KIND(1)
ADD_ROWS_OF_EACH_KIND(2)
#if MOST_ROWS >= 4
ADD_ROWS_OF_EACH_KIND(4)
#endif
#if MOST_ROWS >= 8
ADD_ROWS_OF_EACH_KIND(8)
#endif

/* By the rows' number as a power of two, the weight's kind, and how sums are kept. */
static const AddRows adding[][4][3] = {
    OF_EACH_KIND(1), OF_EACH_KIND(2),
#if MOST_ROWS >= 4
    OF_EACH_KIND(4),
#endif
#if MOST_ROWS >= 8
    OF_EACH_KIND(8),
#endif
};

void multiply_rows_by_vectors(const Product *p, int64_t block, int64_t row, int64_t last) {
    const PackedWeight *w = p->weight;
    const int64_t groups = groups_of(w), rows = last - row;
    const int exact = p->y_dtype == FLOAT64, may_be_on_grid = HAS_GRID_SUMS && w->group <= PIECE;
    Piece piece;
    Sums sums[VECTORS_TURN];
    uint32_t off_grid = 0; /* bit r: parts of the rows from the r-th on have had no place on the grid */
    begin_block(&piece, p, block);
    for (int64_t r = 0; r < rows; r++) sums[r] = (Sums){.exact = {}};
    while (piece.last < groups) {
        next_piece(&piece, block, groups);
        for (int64_t r = 0, power; r < rows; r += 1 << power) {
            for (power = 0; 2 << power <= MOST_ROWS && 2 << power <= rows - r;) power++;
            const AddRows *add = adding[power][w->kind];
            if (exact && may_be_on_grid && !(off_grid >> r & 1)) {
                if (add[ON_GRID](&piece, sums + r, row + r)) continue;
                off_grid |= 1u << r;
            }
            add[exact ? EXACT : ROUNDED](&piece, sums + r, row + r);
        }
    }
    for (int64_t r = 0; r < rows; r++) store_row(p, block, row + r, sums[r].rounded, sums[r].exact, exact);
}
