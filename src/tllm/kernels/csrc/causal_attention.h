/* Attention over whole documents with gradients: what it is given, and how it goes through documents and heads. */
#ifndef TLLM_CAUSAL_ATTENTION_H
#define TLLM_CAUSAL_ATTENTION_H

#include "exponential.h"

#define KEYS 64 /* that are taken at once */

typedef struct {
    const void *q, *keys, *values; /* [tokens, heads, width], [tokens, kv heads, width]; tokens are strides apart */
    void *out;                     /* [tokens, heads, width] */
    float *log_sums;               /* [heads, tokens] */
    const void *d_out;             /* gradients: of what came out; */
    void *d_q, *d_keys, *d_values; /* and those that are computed, without gaps as `out` */
    const int64_t *first_token;    /* [documents + 1] */
    void *scratch;
    int64_t documents, tokens, longest, heads, kv_heads, width, q_stride, k_stride, v_stride, window;
    int32_t dtype;
    float scale;
} CausalAttention;

/* A document and a kv head. */
typedef struct {
    int64_t token, tokens, kv_head;
} Item;

/* The next rows of an item: a query head, the first of them in the document, and how many. */
typedef struct {
    int64_t head, row, count;
} Rows;

/* The n-th item of work. */
INLINE Item item_of(const CausalAttention *a, int64_t n) {
    const int64_t document = n / a->kv_heads, token = a->first_token[document];
    return (Item){token, a->first_token[document + 1] - token, n % a->kv_heads};
}

/* A pass over some rows, with a thread's buffers. */
typedef void (*AttendRows)(const CausalAttention *a, Item item, Rows rows, void *buffers);

/* All rows of an item, `at_once` of a query head at a time. */
INLINE void attend_item(const CausalAttention *a, Item item, int64_t at_once, AttendRows attend, void *buffers) {
    const int64_t group = a->heads / a->kv_heads;
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; head++)
        for (int64_t row = 0; row < item.tokens; row += at_once)
            attend(a, item, (Rows){head, row, least(at_once, item.tokens - row)}, buffers);
}

/* An item's gradients [tokens, width] to where they belong. */
INLINE void store_gradients(const CausalAttention *a, Item item, const float *d_keys, const float *d_values) {
    for (int64_t token = 0; token < item.tokens; token++)
        for (int64_t i = 0; i < a->width; i += LANES) {
            const int64_t at = ((item.token + token) * a->kv_heads + item.kv_head) * a->width + i;
            store_some(a->d_keys, at, LANES, a->dtype, load16(d_keys, token * a->width + i, FLOAT32));
            store_some(a->d_values, at, LANES, a->dtype, load16(d_values, token * a->width + i, FLOAT32));
        }
}

/* Which of 16 rows from `row` on see a key of their document. */
INLINE i32x16 sees(const CausalAttention *a, int64_t row, int64_t key) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 distance = lanes + (int32_t)(row - key);
    return (distance >= 0) & (distance < (int32_t)a->window);
}

/* The first key that is taken for rows from `row` on, which may see it. */
INLINE int64_t first_key(const CausalAttention *a, int64_t row) {
    return row < a->window ? 0 : (row - a->window + 1) / KEYS * KEYS;
}

/* Whether `count` rows from `row` on all see the block of keys from `key` on. */
INLINE int all_see(const CausalAttention *a, int64_t row, int64_t count, int64_t key) {
    return key + KEYS - 1 <= row && row + count - 1 - key < a->window;
}

/* Whether products of tiles are for these, what memory a thread then takes, and the passes by them. */
int tiles_attend(int64_t width, int dtype);
int64_t tiled_causal_attention_bytes(int64_t width, int64_t tokens, int backward);
void tiled_causal_attention(const CausalAttention *attention, int threads);

#endif
