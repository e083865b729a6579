/* A weight in few bits as it lies in memory, and the sums over its groups of columns: csrc/quantized_matmul.c says which. */
#ifndef TLLM_PACKED_WEIGHT_H
#define TLLM_PACKED_WEIGHT_H

#include "dot.h"
#include "quantize_rows.h"

#define AHEAD 4096 /* bytes of codes that are fetched before they are needed */

enum { NIBBLES, NIBBLES_BY_TABLE, BYTES, FLOATS };

/* Bytes of a block's codes for a column. */
INLINE int column_bytes(int kind) { return kind >= BYTES ? 16 : 8; }

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

/* Of each step of columns over which a sum is exact, [steps, pitch]: -offset_of(a weight) times the sum of x's codes, and if the
 * weight has minima, this sum times x's scale. Steps are x's groups, or halves of them where the weight's groups are. */
typedef struct {
    int32_t *starts;
    float *sums_of_x;
} StepSums;

typedef struct {
    const PackedWeight *weight;
    QuantizedRows x;
    StepSums steps;
    void *y;
    int64_t first_output, stride; /* stride: elements between y's rows */
    int32_t y_dtype;
} Product;

/* Bytes of a group's scale. */
INLINE int64_t size_of_scale(int dtype) { return dtype == FLOAT32 ? 4 : dtype == FLOAT16 || dtype == BFLOAT16 ? 2 : 1; }

/* The scales (or minima) of a group of a block. */
INLINE f32x16 of_group(const PackedWeight *w, const void *codes, const void *super, int64_t block, int64_t group,
                       int64_t groups) {
    f32x16 scale = load16(codes, (block * groups + group) * LANES, w->scale_dtype);
    if (super == 0) return scale;
    int64_t super_groups = (w->columns + w->super_group - 1) / w->super_group;
    int64_t at = block * super_groups + group * w->group / w->super_group;
    return load16(super, at * LANES, w->super_dtype) * scale;
}

/* The same of groups [first, last), one after another. */
INLINE void of_groups(f32x16 *to, const PackedWeight *w, const void *codes, const void *super, int64_t block, int64_t first,
                      int64_t last, int64_t groups) {
    const int is_common = super == 0 && w->scale_dtype == FLOAT16; /* of these the compiler makes a short loop */
    for (int64_t group = first; is_common && group < last; group++)
        to[group - first] = load16(codes, (block * groups + group) * LANES, FLOAT16);
    for (int64_t group = first; !is_common && group < last; group++)
        to[group - first] = of_group(w, codes, super, block, group, groups);
}

/* Adds the exact sums over `columns` of a block, 16 or 32, for some rows of x, of each in so many `chains`. Codes are fetched so
 * many bytes `ahead`. */
INLINE void dots(i32x16 *sums, const uint8_t *codes, const int8_t *x, int columns, int kind, u8x16 table, int rows,
                 int chains, int ahead) {
    /* Where `dot` has a bias, which offset_of does not take from these codes, and where theirs have sums of their own. */
    const int is_small = kind == NIBBLES && CODE_BIAS != 0;
    SmallSums small[CHAINS][8];
    i32x16 large[CHAINS][8];
    for (int chain = 0; chain < chains; chain++)
        for (int r = 0; r < rows; r++) small[chain][r] = (SmallSums){}, large[chain][r] = chain ? (i32x16){} : sums[r];
    UNROLLED for (int k = 0; k < columns; k += 8) {
        u8x64 bytes;
        for (int part = 0; part < 2; part++) {
            const uint8_t *here = codes + (k + 4 * part) * column_bytes(kind);
            if (kind == BYTES || part == 0) memcpy(&bytes, here, sizeof bytes), __builtin_prefetch(here + ahead);
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            const int chain = part % chains;
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * X_GROUP + k + 4 * part, 4);
                if (is_small)
                    small[chain][r] = dot_small(small[chain][r], some, four);
                else
                    large[chain][r] = dot(large[chain][r], some, four);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        sums[r] = is_small ? sums[r] + of_small(small[0][r]) : large[0][r];
        for (int chain = 1; chain < chains; chain++) sums[r] += is_small ? of_small(small[chain][r]) : large[chain][r];
    }
}

INLINE u32x16 shifted(u32x16 words, int left) { return left < 0 ? words >> -left : words << left; }

/* Column j of four in each lane, as e4m3: exponent and mantissa of a float32 whose exponent counts from 120 lower. */
INLINE f32x16 column_of_floats(u32x16 words, int j) {
    u32x16 size = shifted(words, 20 - 8 * j) & 0x07f00000u, sign = (words << (24 - 8 * j)) & 0x80000000u;
    return (f32x16)(size | sign) * 0x1p120f;
}

/* The same sums of codes that are float8 numbers, column by column. */
INLINE void dots_of_floats(f32x16 *sums, const uint8_t *codes, const int8_t *x, int columns, int rows, int ahead) {
    for (int k = 0; k < columns; k += 4) {
        u32x16 words;
        memcpy(&words, codes + k * 16, sizeof words);
        __builtin_prefetch(codes + k * 16 + ahead);
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

/* What is taken from a weight's codes, as `dot` has them, to get what they stand for. */
INLINE int32_t offset_of(const PackedWeight *w, int kind) {
    return kind == FLOATS ? 0 : w->offset - (kind == NIBBLES ? 0 : CODE_BIAS);
}

/* The sums over `columns` of a block for some rows of x, which are exact but for those of float8. `starts`: of each row, the
 * sum of its codes times -offset_of(w, kind). */
INLINE void group_sums(f32x16 *sums, const PackedWeight *w, const uint8_t *codes, const int8_t *x, int columns,
                       const int32_t *starts, int rows, int kind, int chains, int ahead) {
    if (kind == FLOATS) {
        for (int r = 0; r < rows; r++) sums[r] = (f32x16){};
        dots_of_floats(sums, codes, x, columns, rows, ahead);
        return;
    }
    u8x16 table;
    memcpy(&table, w->table, sizeof table);
    i32x16 exact[8];
    const int is_last = rows == 1 && chains > 1; /* whether starts are added last: a single row's chains do not wait for one */
    for (int r = 0; r < rows; r++) exact[r] = (i32x16){} + (is_last ? 0 : starts[r]);
    dots(exact, codes, x, columns, kind, table, rows, chains, ahead);
    for (int r = 0; r < rows; r++) sums[r] = __builtin_convertvector(exact[r] + (is_last ? starts[r] : 0), f32x16);
}

/* To the nearest multiple of 2^-30: numbers of this size have no finer ones. */
INLINE f64x16 on_grid(f32x16 x) {
    const double size = 6291456.0; /* 1.5 * 2^22 */
    return (__builtin_convertvector(x, f64x16) + size) - size;
}

/* A row's outputs while they are in registers, and the sums of the weight's group that is being multiplied. */
typedef struct {
    f32x16 y, scaled;
    f64x16 y64;
    float sum_of_x;
} Row;

/* What is the same for all rows of a group of the weight. */
typedef struct {
    f32x16 scale, minimum;
    int has_minimum, is_wide, exact;
} Group;

INLINE Group group_at(const PackedWeight *w, int64_t block, int64_t number, int64_t groups, int is_wide, int exact) {
    Group group = {.has_minimum = w->minima != 0, .is_wide = is_wide, .exact = exact};
    group.scale = of_group(w, w->scales, w->super_scales, block, number, groups);
    if (w->minima) group.minimum = of_group(w, w->minima, w->super_minima, block, number, groups);
    return group;
}

/* To a row, what one of x's groups adds: `sums` are those of codes by x's codes. */
INLINE void add_sums(Row *row, const Group *group, f32x16 sums, float d) {
    f32x16 part = sums * d;
    if (group->exact)
        row->y64 += on_grid(part * group->scale);
    else if (group->is_wide)
        row->scaled += part;
    else
        row->y += part * group->scale;
}

/* Of a weight that has minima, what the same group takes: `sum_of_x` is s * d. */
INLINE void take_minimum(Row *row, const Group *group, float sum_of_x) {
    if (group->exact)
        row->y64 -= on_grid(group->minimum * sum_of_x);
    else if (group->is_wide)
        row->sum_of_x += sum_of_x;
    else
        row->y -= group->minimum * sum_of_x;
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

/* Outputs of a block of a row to their place in y; `exact`: those in float64. */
INLINE void store_row(const Product *p, int64_t block, int64_t row, f32x16 y, f64x16 y64, int exact) {
    const int count = lanes_of(p->weight->outputs - block * LANES);
    const int64_t at = row * p->stride + p->first_output + block * LANES;
    if (exact)
        copy_some((double *)p->y + at, &y64, count, sizeof(double));
    else
        store_some(p->y, at, count, p->y_dtype, y);
}

/* Outputs of blocks [first, last) of a row of x. */
void multiply_row(const Product *product, int64_t first, int64_t last, int64_t row, int side_by_side);

#endif
