/* What attention over the paged cache is given, and how it goes through a tile's keys and rows. */
#ifndef TLLM_ATTENTION_H
#define TLLM_ATTENTION_H

#include "exponential.h"
#include "recorded_calls.h"

/* Slots [first, first + count) of the cache. */
typedef struct {
    int64_t first, count;
} Run;

struct Attention {
    const void *q;                          /* [tokens, heads, width], tokens q_stride apart */
    const void *keys, *values;              /* [kv heads, slots, width] */
    const float *key_scales, *value_scales; /* [kv heads, slots] where keys and values are codes, else NULL */
    const float *sinks;                     /* [heads]: a score of each head that has no value, or NULL */
    void *out;                              /* [tokens, heads, width] */
    const Run *runs;                        /* of all tiles one after another, in the order of positions */
    const int64_t *first_run;               /* [tiles + 1]: tile t has runs first_run[t] to first_run[t + 1] */
    const int64_t *first_token;             /* [tiles + 1]: and tokens first_token[t] to first_token[t + 1] */
    const int64_t *first_key, *num_keys;    /* [tokens]: which keys of its tile a token sees, one at least */
    const int64_t *first_head; /* [kv heads + 1]: kv head k is that of heads first_head[k] to first_head[k + 1] */
    float *scores;             /* [threads, most rows, most keys] */
    int64_t tiles, q_stride, heads, kv_heads, width, slots, most_keys, most_rows;
    int32_t dtype, cache_dtype; /* of queries and what comes out, and of keys and values */
    float scale, softcap; /* softcap 0: none */
};

#define MOST_ROWS 128   /* of a tile: each of its tokens has one for each query head that shares the kv head */

/* The slots of a tile's keys, one after another. */
typedef struct {
    const Run *run, *end;
    int64_t within;
} Slots;

INLINE Slots slots_of(const Attention *a, int64_t tile) {
    return (Slots){a->runs + a->first_run[tile], a->runs + a->first_run[tile + 1], 0};
}

/* The tokens of a tile and the query heads of a kv head: `heads` rows for each token. */
typedef struct {
    int64_t token, tokens, head, heads;
} Rows;

INLINE Rows rows_of(const Attention *a, int64_t tile, int64_t kv_head) {
    int64_t token = a->first_token[tile], head = a->first_head[kv_head];
    return (Rows){token, a->first_token[tile + 1] - token, head, a->first_head[kv_head + 1] - head};
}

/* The i-th tile to compute: the first, the last, the second and so on, so that threads, which have tiles that follow one
 * another, get as many keys each though later tokens of a prompt see more of them. */
INLINE int64_t in_turn(int64_t i, int64_t tiles) { return i % 2 ? tiles - 1 - i / 2 : i / 2; }

#endif
