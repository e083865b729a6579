/* Attention over whole documents with gradients as in causal_attention.c, of bfloat16 by products of AMX: 64 rows and 64 keys
 * at a time. Weights and their gradients are rounded to bfloat16 for the products that they are factors of.
 *
 * In a product of tiles the first factor has 32 numbers of a sum in a row, and the second has them in pairs, a column for each
 * result. A document's keys and values lie as the former, and turned as well where they are summed over. The queries of 64
 * rows, and the gradients of what came out, lie as the latter: in pairs of columns, and in pairs of rows.
 */
#include <math.h>

#include "attention_tiles.h"
#include "causal_attention.h"
#include "threads.h"

#if HAS_TILES

#define ROWS 64
#define PANEL 32 /* rows or columns of a product: two tiles */

/* What a thread has of a document and a kv head, and of 64 rows. Steps are of 32 keys or rows, tiles of 16. */
typedef struct {
    uint16_t *keys, *values;         /* [keys, width], zeros up to a whole block */
    uint16_t *turned;                /* [steps of keys, tiles of the width, 16, 32]: values, or keys for gradients */
    float *d_keys, *d_values;        /* [keys, width] */
    uint16_t *q, *d_out;             /* [64, width] */
    uint16_t *q_pairs, *d_out_pairs; /* of columns: [steps of the width, 4 tiles of rows, 16 pairs, 16 rows, 2] */
    uint16_t *q_sums, *d_out_sums;   /* of rows: [2 steps, tiles of the width, 16 pairs, 16, 2] */
    float *out_t;                    /* [width, 64]: what comes out, or the gradient of q */
    float *scores, *d_scores;        /* [64 keys, 64 rows] */
    uint16_t *weights, *d_weights;   /* the same as bfloat16 */
    uint16_t *pairs;                 /* of keys: [2 steps, 4 tiles of rows, 16 pairs, 16 rows, 2] */
    float largest[ROWS], sums[ROWS], dots[ROWS];
} Buffers;

INLINE int64_t padded(int64_t tokens) { return (tokens + KEYS - 1) / KEYS * KEYS; }

/* Bytes of a thread's buffers, with gradients or without. */
static int64_t buffer_bytes(int64_t width, int64_t tokens, int backward) {
    const int64_t keys = padded(tokens) * width, rows = ROWS * width, scores = KEYS * ROWS;
    return 6 * keys + (backward ? 8 * keys : 0) + 6 * 2 * rows + 4 * rows + 2 * 4 * scores + 3 * 2 * scores;
}

static void *taken(uint8_t **at, int64_t bytes) {
    void *here = *at;
    *at += bytes;
    return here;
}

static Buffers buffers_of(const CausalAttention *a, int thread) {
    const int64_t keys = padded(a->longest) * a->width, rows = ROWS * a->width, scores = KEYS * ROWS;
    const int backward = a->d_out != NULL;
    uint8_t *at = (uint8_t *)(((uintptr_t)a->scratch + 63) / 64 * 64) + thread * buffer_bytes(a->width, a->longest, backward);
    Buffers b = {.keys = taken(&at, 2 * keys), .values = taken(&at, 2 * keys), .turned = taken(&at, 2 * keys)};
    if (backward) b.d_keys = taken(&at, 4 * keys), b.d_values = taken(&at, 4 * keys);
    b.q = taken(&at, 2 * rows), b.d_out = taken(&at, 2 * rows);
    b.q_pairs = taken(&at, 2 * rows), b.d_out_pairs = taken(&at, 2 * rows);
    b.q_sums = taken(&at, 2 * rows), b.d_out_sums = taken(&at, 2 * rows);
    b.out_t = taken(&at, 4 * rows), b.scores = taken(&at, 4 * scores), b.d_scores = taken(&at, 4 * scores);
    b.weights = taken(&at, 2 * scores), b.d_weights = taken(&at, 2 * scores), b.pairs = taken(&at, 2 * scores);
    return b;
}

/* `count` rows that lie `stride` apart, zeros up to `all`. */
static void copy_rows(uint16_t *to, const void *from, int64_t at, int64_t stride, int64_t count, int64_t all, int64_t width) {
    for (int64_t row = 0; row < count; row++)
        memcpy(to + row * width, (const uint16_t *)from + at + row * stride, 2 * (size_t)width);
    memset(to + count * width, 0, 2 * (size_t)((all - count) * width));
}

/* Rows in pairs of columns, as a second factor that is summed over those. */
static void pair_columns(uint16_t *to, const uint16_t *rows, int64_t width) {
    for (int64_t column = 0; column < width; column += STEP)
        for (int64_t row = 0; row < ROWS; row += TILE_ROWS, to += TILE_BYTES / 2) {
            u32x16 tile[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) memcpy(tile + i, rows + (row + i) * width + column, sizeof *tile);
            transpose(tile);
            memcpy(to, tile, sizeof tile);
        }
}

/* Rows in pairs, as a second factor that is summed over rows; turned, they are a first factor: [16 columns, 32 rows]. */
static void pair_rows(uint16_t *to, const uint16_t *rows, int64_t count, int64_t width, int turned) {
    for (int64_t row = 0; row < count; row += STEP)
        for (int64_t column = 0; column < width; column += TILE_ROWS, to += TILE_BYTES / 2) {
            u32x16 pairs[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) {
                const uint16_t *even = rows + (row + 2 * i) * width + column;
                pairs[i] = pairs_of(even, even + width);
            }
            if (turned) transpose(pairs);
            memcpy(to, pairs, sizeof pairs);
        }
}

/* Where a factor's tiles lie: bytes from a row of a tile to the next one, to the second tile, and to the next 32 numbers. */
typedef struct {
    const uint8_t *at;
    int64_t pitch, second, step;
} Factor;

/* to [32, 32], rows `pitch` apart: the product of two factors over `steps` x 32 numbers; added, or in place of what was. */
INLINE void multiply_panel(float *to, int64_t pitch, int adds, Factor first, Factor second, int64_t steps) {
    float *lower = to + TILE_ROWS * pitch;
    if (adds) {
        _tile_loadd(0, to, 4 * pitch), _tile_loadd(1, lower, 4 * pitch);
        _tile_loadd(2, to + TILE_ROWS, 4 * pitch), _tile_loadd(3, lower + TILE_ROWS, 4 * pitch);
    } else {
        _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; step++)
        multiply_tiles(first.at + step * first.step, first.pitch, first.second, second.at + step * second.step,
                       second.second, 1);
    _tile_stored(0, to, 4 * pitch), _tile_stored(1, lower, 4 * pitch);
    _tile_stored(2, to + TILE_ROWS, 4 * pitch), _tile_stored(3, lower + TILE_ROWS, 4 * pitch);
}

/* The same for any number of whole panels: to [rows, columns]. */
static void multiply(float *to, int64_t rows, int64_t columns, int adds, Factor first, Factor second, int64_t steps) {
    for (int64_t row = 0; row < rows; row += PANEL, first.at += 2 * first.second) {
        Factor here = second;
        for (int64_t column = 0; column < columns; column += PANEL, here.at += 2 * here.second)
            multiply_panel(to + row * columns + column, columns, adds, first, here, steps);
    }
}

/* A first factor of 64 rows that lie one after another. */
INLINE Factor rows_of(const uint16_t *rows, int64_t width) {
    return (Factor){(const uint8_t *)rows, 2 * width, 2 * TILE_ROWS * width, 2 * STEP};
}

/* A factor that lies by tiles: all of `columns` for each step. */
INLINE Factor tiles_of(const uint16_t *tiles, int64_t columns) {
    return (Factor){(const uint8_t *)tiles, 64, TILE_BYTES, columns / TILE_ROWS * TILE_BYTES};
}

/* scores [64 keys, 64 rows] = keys [64, width] times rows in pairs of columns. */
static void score(float *scores, const uint16_t *keys, const uint16_t *pairs, int64_t width) {
    multiply(scores, KEYS, ROWS, 0, rows_of(keys, width), tiles_of(pairs, ROWS), width / STEP);
}

/* to [width, 64 rows] += what is turned, of 64 keys, times numbers of keys and rows in pairs of keys. */
static void add_over_keys(float *to, const uint16_t *turned, const uint16_t *pairs, int64_t width) {
    multiply(to, width, ROWS, 1, tiles_of(turned, width), tiles_of(pairs, ROWS), KEYS / STEP);
}

/* to [64 keys, width] += weights [64 keys, 64 rows] times rows in pairs. */
static void add_over_rows(float *to, const uint16_t *weights, const uint16_t *pairs, int64_t width) {
    multiply(to, KEYS, width, 1, rows_of(weights, ROWS), tiles_of(pairs, width), ROWS / STEP);
}

/* Where the pairs of this key and row lie. */
INLINE uint16_t *pairs_at(const Buffers *b, int64_t key, int64_t row) {
    return b->pairs + (key / STEP * (ROWS / TILE_ROWS) + row / TILE_ROWS) * (TILE_BYTES / 2) + key % STEP * TILE_ROWS;
}

/* A score times log2 e; HIDDEN where a row does not see the key. */
INLINE __m512 score_of(const CausalAttention *a, const float *score, int64_t row, int64_t key, int all) {
    const __m512 some = _mm512_mul_ps(_mm512_loadu_ps(score), _mm512_set1_ps(a->scale * LOG2_E));
    return all ? some : (__m512)blend(sees(a, row, key), (f32x16)some, splat(HIDDEN));
}

/* Weights of a block of keys, but for the division by their sum; what came out before is scaled for the largest score by
 * now. */
static void weigh(const CausalAttention *a, Rows rows, int64_t first, Buffers *b) {
    const int all = all_see(a, rows.row, ROWS, first);
    for (int64_t row = 0; row < ROWS; row += TILE_ROWS) {
        float *scores = b->scores + row;
        const __m512 before = _mm512_loadu_ps(b->largest + row);
        __m512 most = before, even_sums = _mm512_setzero_ps(), odd_sums = _mm512_setzero_ps();
        for (int64_t key = 0; key < KEYS; key++) {
            const __m512 some = score_of(a, scores + key * ROWS, rows.row + row, first + key, all);
            _mm512_storeu_ps(scores + key * ROWS, some);
            most = _mm512_max_ps(some, most);
        }
        for (int64_t key = 0; key < KEYS; key += 2) {
            const __m512 even = exponential_of_2(_mm512_sub_ps(_mm512_loadu_ps(scores + key * ROWS), most));
            const __m512 odd = exponential_of_2(_mm512_sub_ps(_mm512_loadu_ps(scores + (key + 1) * ROWS), most));
            even_sums = _mm512_add_ps(even_sums, even), odd_sums = _mm512_add_ps(odd_sums, odd);
            store_pairs(pairs_at(b, key, row), even, odd);
        }
        const __m512 shrunk = exponential_of_2(_mm512_sub_ps(before, most));
        const int is_larger = _mm512_cmp_ps_mask(before, most, _CMP_NEQ_UQ) != 0;
        for (int64_t i = 0; i < (is_larger ? a->width : 0); i++) {
            float *out = b->out_t + i * ROWS + row;
            _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), shrunk));
        }
        const __m512 sums = _mm512_mul_ps(_mm512_loadu_ps(b->sums + row), shrunk);
        _mm512_storeu_ps(b->sums + row, _mm512_add_ps(sums, _mm512_add_ps(even_sums, odd_sums)));
        _mm512_storeu_ps(b->largest + row, most);
    }
}

/* The first `count` of 64 rows of out_t, divided by `sums` if there are any, as bfloat16. */
static void store_rows(void *to, int64_t at, int64_t stride, const Buffers *b, const float *sums, int64_t count, int64_t width) {
    for (int64_t row = 0; row < count; row += TILE_ROWS)
        for (int64_t column = 0; column < width; column += TILE_ROWS) {
            f32x16 tile[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) {
                tile[i] = load16(b->out_t, (column + i) * ROWS + row, FLOAT32);
                if (sums) tile[i] /= load16(sums, row, FLOAT32);
            }
            transpose((u32x16 *)tile);
            for (int64_t i = 0; i < least(TILE_ROWS, count - row); i++)
                store_some(to, at + (row + i) * stride + column, TILE_ROWS, BFLOAT16, tile[i]);
        }
}

static void attend_rows(const CausalAttention *a, Item item, Rows rows, void *buffers) {
    Buffers *b = buffers;
    const int64_t width = a->width, token = item.token + rows.row, at = rows.head * width, stride = a->heads * width;
    copy_rows(b->q, a->q, token * a->q_stride + at, a->q_stride, rows.count, ROWS, width);
    pair_columns(b->q_pairs, b->q, width);
    memset(b->out_t, 0, (size_t)(ROWS * width) * sizeof(float));
    for (int row = 0; row < ROWS; row++) b->largest[row] = LEAST, b->sums[row] = 0;
    for (int64_t key = first_key(a, rows.row); key < rows.row + rows.count; key += KEYS) {
        score(b->scores, b->keys + key * width, b->q_pairs, width);
        weigh(a, rows, key, b);
        add_over_keys(b->out_t, b->turned + key * width, b->pairs, width);
    }
    for (int64_t row = 0; row < rows.count; row++)
        a->log_sums[rows.head * a->tokens + token + row] = b->largest[row] / LOG2_E + logf(b->sums[row]);
    store_rows(a->out, token * stride + at, stride, b, b->sums, rows.count, width);
}

/* What the backward pass needs of some rows: q, the gradient of what came out, and its products with what came out. */
static void begin_backward(const CausalAttention *a, Item item, Rows rows, Buffers *b) {
    const int64_t width = a->width, token = item.token + rows.row, at = rows.head * width, stride = a->heads * width;
    copy_rows(b->q, a->q, token * a->q_stride + at, a->q_stride, rows.count, ROWS, width);
    copy_rows(b->d_out, a->d_out, token * stride + at, stride, rows.count, ROWS, width);
    pair_columns(b->q_pairs, b->q, width), pair_columns(b->d_out_pairs, b->d_out, width);
    pair_rows(b->q_sums, b->q, ROWS, width, 0), pair_rows(b->d_out_sums, b->d_out, ROWS, width, 0);
    memset(b->out_t, 0, (size_t)(ROWS * width) * sizeof(float));
    memset(b->dots, 0, sizeof b->dots), memset(b->sums, 0, sizeof b->sums);
    for (int64_t row = 0; row < rows.count; row++) {
        f32x16 dots = splat(0);
        for (int64_t i = 0; i < width; i += LANES)
            dots += load16(b->d_out, row * width + i, BFLOAT16) * load16(a->out, (token + row) * stride + at + i, BFLOAT16);
        b->dots[row] = sum_of_lanes(dots);
        b->sums[row] = a->log_sums[rows.head * a->tokens + token + row] * LOG2_E;
    }
}

/* Scores become weights P, and their gradients those of the scores before they were scaled: P (dP - dots) scale. */
static void weigh_backward(const CausalAttention *a, Rows rows, int64_t first, Buffers *b) {
    const int all = all_see(a, rows.row, ROWS, first);
    const __m512 scale = _mm512_set1_ps(a->scale);
    for (int64_t key = 0; key < KEYS; key += 2)
        for (int64_t row = 0; row < ROWS; row += PANEL) {
            __m512 weights[2][2], gradients[2][2]; /* of two keys and two tiles of rows */
            for (int odd = 0; odd < 2; odd++)
                for (int half = 0; half < 2; half++) {
                    const int64_t r = row + half * TILE_ROWS, at = (key + odd) * ROWS + r;
                    const __m512 some = score_of(a, b->scores + at, rows.row + r, first + key + odd, all);
                    const __m512 weight = exponential_of_2(_mm512_sub_ps(some, _mm512_loadu_ps(b->sums + r)));
                    const __m512 from = _mm512_sub_ps(_mm512_loadu_ps(b->d_scores + at), _mm512_loadu_ps(b->dots + r));
                    weights[odd][half] = weight, gradients[odd][half] = _mm512_mul_ps(_mm512_mul_ps(weight, from), scale);
                }
            for (int odd = 0; odd < 2; odd++) {
                const bf16x32 weight = (bf16x32)_mm512_cvtne2ps_pbh(weights[odd][1], weights[odd][0]);
                const bf16x32 gradient = (bf16x32)_mm512_cvtne2ps_pbh(gradients[odd][1], gradients[odd][0]);
                memcpy(b->weights + (key + odd) * ROWS + row, &weight, sizeof weight);
                memcpy(b->d_weights + (key + odd) * ROWS + row, &gradient, sizeof gradient);
            }
            for (int half = 0; half < 2; half++)
                store_pairs(pairs_at(b, key, row + half * TILE_ROWS), gradients[0][half], gradients[1][half]);
        }
}

static void attend_rows_backward(const CausalAttention *a, Item item, Rows rows, void *buffers) {
    Buffers *b = buffers;
    const int64_t width = a->width, stride = a->heads * width;
    begin_backward(a, item, rows, b);
    for (int64_t key = first_key(a, rows.row); key < rows.row + rows.count; key += KEYS) {
        score(b->scores, b->keys + key * width, b->q_pairs, width);
        score(b->d_scores, b->values + key * width, b->d_out_pairs, width);
        weigh_backward(a, rows, key, b);
        add_over_rows(b->d_values + key * width, b->weights, b->d_out_sums, width);
        add_over_rows(b->d_keys + key * width, b->d_weights, b->q_sums, width);
        add_over_keys(b->out_t, b->turned + key * width, b->pairs, width);
    }
    store_rows(a->d_q, (item.token + rows.row) * stride + rows.head * width, stride, b, NULL, rows.count, width);
}

/* A document's keys and values, as its products want them; no gradients of them yet. */
static void begin_item(const CausalAttention *a, Item item, Buffers *b) {
    const int64_t width = a->width, keys = padded(item.tokens), at = item.kv_head * width;
    copy_rows(b->keys, a->keys, item.token * a->k_stride + at, a->k_stride, item.tokens, keys, width);
    copy_rows(b->values, a->values, item.token * a->v_stride + at, a->v_stride, item.tokens, keys, width);
    pair_rows(b->turned, a->d_out ? b->keys : b->values, keys, width, 1);
    const size_t bytes = (size_t)(keys * width) * sizeof(float);
    if (a->d_out) memset(b->d_keys, 0, bytes), memset(b->d_values, 0, bytes);
}

static void attend_items(void *of, int64_t first, int64_t last, int thread) {
    const CausalAttention *a = of;
    Buffers b = buffers_of(a, thread);
    configure_all_tiles();
    for (int64_t n = first; n < last; n++) {
        const Item item = item_of(a, n);
        begin_item(a, item, &b);
        attend_item(a, item, ROWS, a->d_out ? attend_rows_backward : attend_rows, &b);
        if (a->d_out) store_gradients(a, item, b.d_keys, b.d_values);
    }
    release_tiles();
}

int tiles_attend(int64_t width, int dtype) { return dtype == BFLOAT16 && width % STEP == 0; }

int64_t tiled_causal_attention_bytes(int64_t width, int64_t tokens, int backward) {
    return buffer_bytes(width, tokens, backward);
}

void tiled_causal_attention(const CausalAttention *attention, int threads) {
    run_parallel(attend_items, (void *)attention, attention->documents * attention->kv_heads, 1, threads);
}

#else

int tiles_attend(int64_t width, int dtype) {
    (void)width, (void)dtype;
    return 0;
}

int64_t tiled_causal_attention_bytes(int64_t width, int64_t tokens, int backward) {
    (void)width, (void)tokens, (void)backward;
    return 0;
}

void tiled_causal_attention(const CausalAttention *attention, int threads) { (void)attention, (void)threads; }

#endif
