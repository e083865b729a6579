/* One row of x with a weight in few bits: bound by reading the weight once.
 *
 * Side by side, groups of several blocks come by turns: a processor that fetches ahead in each of them may have more of
 * memory on the way than in a single one. One by one is faster on others. The bits are the same.
 */
#include "packed_weight.h"

#define BLOCKS 8 /* that are read side by side */
#define SCALES_AHEAD 512 /* bytes of scales that are fetched before they are needed */
#define NOT_UNROLLED _Pragma("clang loop unroll(disable)")

/* The scales and minima of a group of a block; those of later groups are fetched. */
INLINE Group next_group(const PackedWeight *w, int64_t block, int64_t number, int64_t groups, int is_wide, int exact) {
    const int64_t size = LANES * size_of_scale(w->scale_dtype);
    __builtin_prefetch((const uint8_t *)w->scales + (block * groups + number) * size + SCALES_AHEAD);
    return group_at(w, block, number, groups, is_wide, exact);
}

/* Outputs of blocks [block, block + blocks), at most BLOCKS. `step` and `is_wide`: as for several rows. */
INLINE void multiply(const Product *p, int64_t block, int blocks, int64_t row, int kind, int exact, int step, int is_wide) {
    const PackedWeight *w = p->weight;
    const QuantizedRows *x = &p->x;
    const int64_t width = is_wide ? w->group : step, groups = (w->columns + width - 1) / width;
    const int64_t bytes = column_bytes(kind);
    const uint8_t *codes = w->codes + block * w->padded * bytes;
    const int ahead = AHEAD / blocks;
    Row row_of[BLOCKS];
    Group group[BLOCKS];
    NOT_UNROLLED for (int b = 0; b < blocks; b++) row_of[b] = (Row){};
    for (int64_t number = 0; number < groups; number++) {
        NOT_UNROLLED for (int b = 0; is_wide && b < blocks; b++) {
            group[b] = next_group(w, block + b, number, groups, is_wide, exact);
            begin_group(row_of + b, 1);
        }
        const int64_t last = (number + 1) * width < w->padded ? (number + 1) * width : w->padded;
        for (int64_t at = number * width; at < last; at += step) {
            const int64_t here = at / X_GROUP * x->pitch + row;
            const int32_t *halves = x->sums + at / X_HALF * x->pitch + row;
            const int32_t sum_of_codes = step == X_HALF ? halves[0] : halves[0] + halves[x->pitch];
            const int32_t start = -offset_of(w, kind) * sum_of_codes;
            const float d = x->scales[here];
            NOT_UNROLLED for (int b = 0; b < blocks; b++) {
                f32x16 sums;
                const Group of_block = is_wide ? group[b] : next_group(w, block + b, number, groups, is_wide, exact);
                group_sums(&sums, w, codes + (b * w->padded + at) * bytes, x->codes + here * X_GROUP + at % X_GROUP, step,
                           &start, 1, kind, CHAINS, ahead);
                add_sums(row_of + b, &of_block, sums, d);
                if (of_block.has_minimum) take_minimum(row_of + b, &of_block, (float)sum_of_codes * d);
            }
        }
        NOT_UNROLLED for (int b = 0; is_wide && b < blocks; b++) end_group(row_of + b, group + b, 1);
    }
    NOT_UNROLLED for (int b = 0; b < blocks; b++) store_row(p, block + b, row, row_of[b].y, row_of[b].y64, exact);
}

/* Compiled by themselves are, where that is faster, each way to go through the groups, and a single block, whose sums
 * then stay in registers. */
INLINE void multiply_some(const Product *p, int64_t block, int blocks, int64_t row, int kind, int exact) {
    if (p->weight->group < X_GROUP)
        multiply(p, block, blocks, row, kind, exact, X_HALF, 0);
    else if (p->weight->group == X_GROUP && kind != FLOATS && !exact)
        multiply(p, block, blocks, row, kind, exact, X_GROUP, 0);
    else
        multiply(p, block, blocks, row, kind, exact, X_GROUP, 1);
}

INLINE void multiply_blocks(const Product *p, int64_t block, int blocks, int64_t row, int kind, int exact) {
    if (blocks == 1)
        multiply_some(p, block, 1, row, kind, exact);
    else
        multiply_some(p, block, blocks, row, kind, exact);
}

#define MULTIPLY(name, kind)                                                                                           \
    static void name(const Product *p, int64_t block, int blocks, int64_t row) {                                       \
        if (p->y_dtype == FLOAT64)                                                                                     \
            multiply_blocks(p, block, blocks, row, kind, 1);                                                           \
        else                                                                                                           \
            multiply_blocks(p, block, blocks, row, kind, 0);                                                           \
    }

MULTIPLY(by_nibbles, NIBBLES)
MULTIPLY(by_table, NIBBLES_BY_TABLE)
MULTIPLY(by_bytes, BYTES)
MULTIPLY(by_floats, FLOATS)

void multiply_row(const Product *product, int64_t first, int64_t last, int64_t row, int side_by_side) {
    const int32_t kind = product->weight->kind;
    const int most = side_by_side ? BLOCKS : 1;
    for (int64_t block = first; block < last; block += most) {
        const int blocks = last - block < most ? (int)(last - block) : most;
        (kind == NIBBLES ? by_nibbles : kind == NIBBLES_BY_TABLE ? by_table : kind == BYTES ? by_bytes : by_floats)(
            product, block, blocks, row);
    }
}
