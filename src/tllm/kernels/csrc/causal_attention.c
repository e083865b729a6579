/* Attention over whole documents with gradients, for training: a token sees those of its document up to itself, or the last
 * `window` of these. No scores are kept. The backward pass computes them anew from what the forward pass has kept of each
 * row, the logarithm of its sum of exponentials (FlashAttention-2, 2307.08691).
 *
 * All is transposed. A lane is a row: a query head of a token. So scores are [keys, rows], and what is done to them takes no
 * sums over lanes. Rows are taken 32 at a time, and with them 64 keys:
 *
 *     scores^T = K q^T            dP^T  = V dO^T
 *     out^T   += V^T P^T          dq^T += K^T dS^T
 *     dV      += P^T dO           dK   += dS^T q
 *
 * An item of work is a document with a kv head and all its query heads, so that nobody else adds to these dK and dV.
 */
#include <math.h>

#include "causal_attention.h"
#include "threads.h"

#define ROWS 32

/* Sums that registers hold beside what they are made of: so many rows of so many vectors. */
#if defined(__AVX512F__)
#define AT_ONCE 8
#define VECTORS 2
#else
#define AT_ONCE 4
#define VECTORS 1
#endif

/* What a thread has of 32 rows and 64 keys, and of a document's gradients. */
typedef struct {
    float *q, *q_t, *d_out, *d_out_t; /* [32, width], and transposed */
    float *out_t;                     /* [width, 32]: what comes out, or the gradient of q */
    float *keys, *values;             /* [64, width] */
    float *scores, *d_scores;         /* [64, 32] */
    float *d_keys, *d_values;         /* [tokens of the document, width] */
    f32x16 largest[2], sums[2], dots[2];
} Buffers;

/* Numbers of a thread's buffers. */
INLINE int64_t buffer_size(int64_t width, int64_t tokens) {
    return 5 * ROWS * width + 2 * KEYS * width + 2 * KEYS * ROWS + 2 * tokens * width;
}

static Buffers buffers_of(const CausalAttention *a, int thread) {
    const int64_t kept = a->d_out ? a->longest : 0, rows = ROWS * a->width, keys = KEYS * a->width;
    float *at = (float *)(((uintptr_t)a->scratch + 63) / 64 * 64) + thread * buffer_size(a->width, kept);
    Buffers b = {.q = at, .q_t = at + rows, .d_out = at + 2 * rows, .d_out_t = at + 3 * rows, .out_t = at + 4 * rows};
    at += 5 * rows;
    b.keys = at, b.values = at + keys, b.scores = at + 2 * keys, b.d_scores = b.scores + KEYS * ROWS;
    b.d_keys = b.d_scores + KEYS * ROWS, b.d_values = b.d_keys + kept * a->width;
    return b;
}

/* A number in all lanes. (`splat` adds it to zeros, which takes as long as a product.) */
INLINE f32x16 broadcast(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* out [rows, vectors of 16] = a b, or what there was and that: a's numbers lie `row` and `step` apart. */
INLINE void multiply_some(float *out, int64_t pitch, const float *a, int64_t row, int64_t step, const float *b,
                          int64_t b_pitch, int64_t steps, int adds, const int rows, const int vectors) {
    f32x16 sums[AT_ONCE][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = adds ? load16(out, i * pitch + j * LANES, FLOAT32) : splat(0);
    for (int64_t k = 0; k < steps; k++, a += step, b += b_pitch) {
        f32x16 x[VECTORS];
        for (int j = 0; j < vectors; j++) x[j] = load16(b, j * LANES, FLOAT32);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++) sums[i][j] = multiply_add(broadcast(a[i * row]), x[j], sums[i][j]);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) memcpy(out + i * pitch + j * LANES, &sums[i][j], sizeof sums[i][j]);
}

/* The same for any number of rows and lanes (whole vectors). */
INLINE void multiply(float *out, int64_t pitch, const float *a, int64_t row, int64_t step, int64_t rows, const float *b,
                     int64_t b_pitch, int64_t lanes, int64_t steps, int adds) {
    for (int64_t j = 0; j < lanes; j += VECTORS * LANES) {
        const int whole = lanes - j >= VECTORS * LANES;
        int64_t i = 0;
        for (; i + AT_ONCE <= rows && whole; i += AT_ONCE)
            multiply_some(out + i * pitch + j, pitch, a + i * row, row, step, b + j, b_pitch, steps, adds, AT_ONCE, VECTORS);
        for (; i < rows && whole; i++)
            multiply_some(out + i * pitch + j, pitch, a + i * row, row, step, b + j, b_pitch, steps, adds, 1, VECTORS);
        for (; i < rows; i++)
            multiply_some(out + i * pitch + j, pitch, a + i * row, row, step, b + j, b_pitch, steps, adds, 1, 1);
    }
}

/* x_t [width, 32] = x [32, width] transposed. */
static void transpose_rows(float *x_t, const float *x, int64_t width) {
    for (int64_t row = 0; row < ROWS; row += LANES)
        for (int64_t column = 0; column < width; column += LANES) {
            u32x16 tile[LANES];
            for (int i = 0; i < LANES; i++) memcpy(tile + i, x + (row + i) * width + column, sizeof *tile);
            transpose(tile);
            for (int i = 0; i < LANES; i++) memcpy(x_t + (column + i) * ROWS + row, tile + i, sizeof *tile);
        }
}

/* x [count, width] of a dtype in float32, zeros up to `padded`. Rows of x are `stride` apart, the first at `at`. */
static void widen_rows(float *rows, const void *x, int64_t at, int64_t stride, int64_t count, int64_t padded, int64_t width,
                       int dtype) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t column = 0; column < width; column += LANES) {
            const f32x16 some = load16(x, at + row * stride + column, dtype);
            memcpy(rows + row * width + column, &some, sizeof some);
        }
    memset(rows + count * width, 0, (size_t)((padded - count) * width) * sizeof *rows);
}

/* x_t [width, 32], of which the first `count` of the 32 are, to rows of a dtype. */
static void narrow_transposed(void *to, int64_t at, int64_t stride, const float *x_t, int64_t count, int64_t width, int dtype) {
    for (int64_t row = 0; row < count; row += LANES)
        for (int64_t column = 0; column < width; column += LANES) {
            u32x16 tile[LANES];
            for (int i = 0; i < LANES; i++) memcpy(tile + i, x_t + (column + i) * ROWS + row, sizeof *tile);
            transpose(tile);
            for (int64_t i = 0; i < least(LANES, count - row); i++)
                store_some(to, at + (row + i) * stride + column, LANES, dtype, (f32x16)tile[i]);
        }
}

/* Keys of the document that are multiplied next, by float32. */
typedef struct {
    const float *keys, *values;
    int64_t k_pitch, v_pitch, first, count;
} Block;

static Block block_of(const CausalAttention *a, Item item, Rows rows, int64_t first, Buffers *b) {
    const int64_t count = least(KEYS, rows.row + rows.count - first), token = item.token + first;
    const int64_t k_at = token * a->k_stride + item.kv_head * a->width, v_at = token * a->v_stride + item.kv_head * a->width;
    if (a->dtype == FLOAT32)
        return (Block){(const float *)a->keys + k_at, (const float *)a->values + v_at, a->k_stride, a->v_stride, first, count};
    widen_rows(b->keys, a->keys, k_at, a->k_stride, count, count, a->width, a->dtype);
    widen_rows(b->values, a->values, v_at, a->v_stride, count, count, a->width, a->dtype);
    return (Block){b->keys, b->values, a->width, a->width, first, count};
}

/* Whether all bits of any lane are set. */
INLINE int is_any(i32x16 lanes) {
    uint64_t pairs[LANES / 2], all = 0;
    memcpy(pairs, &lanes, sizeof pairs);
    for (int i = 0; i < LANES / 2; i++) all |= pairs[i];
    return all != 0;
}

/* Scores become weights, but for the division by their sum; what came out before is scaled for the largest score by now. */
static void weigh(const CausalAttention *a, Rows rows, Block block, Buffers *b) {
    const int all = all_see(a, rows.row, ROWS, block.first);
    for (int half = 0; half < ROWS / LANES; half++) {
        float *scores = b->scores + half * LANES;
        const f32x16 before = b->largest[half];
        f32x16 largest = before, sums = splat(0);
        for (int64_t key = 0; key < block.count; key++) {
            f32x16 some = load16(scores, key * ROWS, FLOAT32) * a->scale;
            if (!all) some = blend(sees(a, rows.row + half * LANES, block.first + key), some, splat(HIDDEN));
            memcpy(scores + key * ROWS, &some, sizeof some);
            largest = greater(some, largest);
        }
        for (int64_t key = 0; key < block.count; key++) {
            const f32x16 some = exponential(load16(scores, key * ROWS, FLOAT32) - largest);
            memcpy(scores + key * ROWS, &some, sizeof some);
            sums += some;
        }
        const f32x16 shrunk = exponential(before - largest);
        for (int64_t i = 0; i < (is_any(before != largest) ? a->width : 0); i++) {
            const f32x16 out = load16(b->out_t, i * ROWS + half * LANES, FLOAT32) * shrunk;
            memcpy(b->out_t + i * ROWS + half * LANES, &out, sizeof out);
        }
        b->sums[half] = b->sums[half] * shrunk + sums;
        b->largest[half] = largest;
    }
}

static void attend_rows(const CausalAttention *a, Item item, Rows rows, void *buffers) {
    Buffers *b = buffers;
    const int64_t width = a->width, token = item.token + rows.row, at = rows.head * width;
    widen_rows(b->q, a->q, token * a->q_stride + at, a->q_stride, rows.count, ROWS, width, a->dtype);
    transpose_rows(b->q_t, b->q, width);
    memset(b->out_t, 0, (size_t)(ROWS * width) * sizeof(float));
    for (int half = 0; half < ROWS / LANES; half++) b->largest[half] = splat(LEAST), b->sums[half] = splat(0);
    for (int64_t key = first_key(a, rows.row); key < rows.row + rows.count; key += KEYS) {
        const Block block = block_of(a, item, rows, key, b);
        multiply(b->scores, ROWS, block.keys, block.k_pitch, 1, block.count, b->q_t, ROWS, ROWS, width, 0);
        weigh(a, rows, block, b);
        multiply(b->out_t, ROWS, block.values, 1, block.v_pitch, width, b->scores, ROWS, ROWS, block.count, 1);
    }
    float log_sums[ROWS];
    for (int half = 0; half < ROWS / LANES; half++)
        for (int lane = 0; lane < LANES; lane++)
            log_sums[half * LANES + lane] = b->largest[half][lane] + logf(b->sums[half][lane]);
    memcpy(a->log_sums + rows.head * a->tokens + token, log_sums, (size_t)rows.count * sizeof *log_sums);
    for (int64_t i = 0; i < width; i++)
        for (int half = 0; half < ROWS / LANES; half++) {
            const f32x16 out = load16(b->out_t, i * ROWS + half * LANES, FLOAT32) / b->sums[half];
            memcpy(b->out_t + i * ROWS + half * LANES, &out, sizeof out);
        }
    narrow_transposed(a->out, token * a->heads * width + at, a->heads * width, b->out_t, rows.count, width, a->dtype);
}

/* What the backward pass needs of some rows: q, the gradient of what came out, and its products with what came out. */
static void begin_backward(const CausalAttention *a, Item item, Rows rows, Buffers *b) {
    const int64_t width = a->width, token = item.token + rows.row, at = rows.head * width, stride = a->heads * width;
    widen_rows(b->q, a->q, token * a->q_stride + at, a->q_stride, rows.count, ROWS, width, a->dtype);
    widen_rows(b->d_out, a->d_out, token * stride + at, stride, rows.count, ROWS, width, a->dtype);
    float dots[ROWS] = {0};
    for (int64_t row = 0; row < rows.count; row++) {
        f32x16 sums = splat(0);
        for (int64_t i = 0; i < width; i += LANES)
            sums += load16(b->d_out, row * width + i, FLOAT32) * load16(a->out, (token + row) * stride + at + i, a->dtype);
        dots[row] = sum_of_lanes(sums);
    }
    float log_sums[ROWS] = {0};
    memcpy(log_sums, a->log_sums + rows.head * a->tokens + token, (size_t)rows.count * sizeof *log_sums);
    memcpy(b->dots, dots, sizeof dots), memcpy(b->sums, log_sums, sizeof log_sums);
    transpose_rows(b->q_t, b->q, width), transpose_rows(b->d_out_t, b->d_out, width);
    memset(b->out_t, 0, (size_t)(ROWS * width) * sizeof(float));
}

/* Scores become weights P, and their gradients those of the scores before they were scaled: P (dP - dots) scale. */
static void weigh_backward(const CausalAttention *a, Rows rows, Block block, Buffers *b) {
    const int all = all_see(a, rows.row, ROWS, block.first);
    for (int64_t key = 0; key < block.count; key++)
        for (int half = 0; half < ROWS / LANES; half++) {
            float *scores = b->scores + key * ROWS + half * LANES, *d_scores = b->d_scores + key * ROWS + half * LANES;
            f32x16 weight = exponential(load16(scores, 0, FLOAT32) * a->scale - b->sums[half]);
            if (!all) weight = blend(sees(a, rows.row + half * LANES, block.first + key), weight, splat(0));
            const f32x16 gradient = weight * (load16(d_scores, 0, FLOAT32) - b->dots[half]) * a->scale;
            memcpy(scores, &weight, sizeof weight), memcpy(d_scores, &gradient, sizeof gradient);
        }
}

static void attend_rows_backward(const CausalAttention *a, Item item, Rows rows, void *buffers) {
    Buffers *b = buffers;
    const int64_t width = a->width, token = item.token + rows.row;
    begin_backward(a, item, rows, b);
    for (int64_t key = first_key(a, rows.row); key < rows.row + rows.count; key += KEYS) {
        const Block block = block_of(a, item, rows, key, b);
        float *d_keys = b->d_keys + key * width, *d_values = b->d_values + key * width;
        multiply(b->scores, ROWS, block.keys, block.k_pitch, 1, block.count, b->q_t, ROWS, ROWS, width, 0);
        multiply(b->d_scores, ROWS, block.values, block.v_pitch, 1, block.count, b->d_out_t, ROWS, ROWS, width, 0);
        weigh_backward(a, rows, block, b);
        multiply(d_values, width, b->scores, ROWS, 1, block.count, b->d_out, width, width, ROWS, 1);
        multiply(d_keys, width, b->d_scores, ROWS, 1, block.count, b->q, width, width, ROWS, 1);
        multiply(b->out_t, ROWS, block.keys, 1, block.k_pitch, width, b->d_scores, ROWS, ROWS, block.count, 1);
    }
    const int64_t stride = a->heads * width;
    narrow_transposed(a->d_q, token * stride + rows.head * width, stride, b->out_t, rows.count, width, a->dtype);
}

static void attend_items(void *of, int64_t first, int64_t last, int thread) {
    const CausalAttention *a = of;
    Buffers b = buffers_of(a, thread);
    for (int64_t n = first; n < last; n++) {
        const Item item = item_of(a, n);
        const size_t bytes = (size_t)(item.tokens * a->width) * sizeof(float);
        if (a->d_out) memset(b.d_keys, 0, bytes), memset(b.d_values, 0, bytes);
        attend_item(a, item, ROWS, a->d_out ? attend_rows_backward : attend_rows, &b);
        if (a->d_out) store_gradients(a, item, b.d_keys, b.d_values);
    }
}

/* Bytes of scratch memory, where the longest document has so many tokens. */
int64_t tllm_causal_attention_scratch_bytes(int64_t width, int64_t tokens, int dtype, int backward, int threads) {
    const int64_t by_vectors = buffer_size(width, backward ? tokens : 0) * (int64_t)sizeof(float);
    return threads * (tiles_attend(width, dtype) ? tiled_causal_attention_bytes(width, tokens, backward) : by_vectors) + 64;
}

/* The forward pass, or with `d_out` the backward pass. The width is a multiple of 16. */
void tllm_causal_attention(const CausalAttention *attention, int threads) {
    if (tiles_attend(attention->width, attention->dtype))
        tiled_causal_attention(attention, threads);
    else
        run_parallel(attend_items, (void *)attention, attention->documents * attention->kv_heads, 1, threads);
}
