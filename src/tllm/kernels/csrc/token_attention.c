/* Attention of single new tokens over the paged cache, many sequences at once.
 *
 * A token's scores are kept, so that every sum goes over its keys in the order of their positions: an output has the
 * same bits wherever its pages lie and whatever else is in the batch.
 *
 * A cache of codes has a scale for each kv head and slot. With c s in the place of a key, q k = (q c) s, and with it in
 * the place of a value, w v = (w s) c: so scales meet one number for each head and key, and not every number of a row.
 */
#include "exponential.h"
#include "threads.h"

/* Slots [first, first + count) of the cache. */
typedef struct {
    int64_t first, count;
} Run;

typedef struct {
    const void *q;               /* [tokens, heads, width], tokens q_stride apart */
    const void *keys, *values;   /* [kv heads, slots, width] */
    const float *key_scales, *value_scales; /* [kv heads, slots] where keys and values are codes, else NULL */
    void *out;                   /* [tokens, heads, width] */
    const Run *runs;             /* of all tokens one after another, in the order of positions */
    const int64_t *first_run;    /* [tokens + 1]: token t has runs first_run[t] to first_run[t + 1] */
    const int64_t *first_head;   /* [kv heads + 1]: kv head k is that of heads first_head[k] to first_head[k + 1] */
    float *scores;               /* [threads, heads of one kv head, most keys] */
    int64_t tokens, q_stride, heads, kv_heads, width, slots, most_keys, most_heads;
    int32_t dtype, cache_dtype; /* of queries and what comes out, and of keys and values */
    float scale, softcap; /* softcap 0: none */
} Attention;

#define MOST_VECTORS 40 /* of a head: a width of up to 640 */
#define MOST_HEADS 128  /* that share a kv head */

INLINE float largest_of(const float *x, int64_t count) {
    float largest = x[0];
    for (int64_t i = 1; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* exp(x - largest) in place; what is beyond `count` up to whole vectors becomes 0. Returns the sum. */
static float exponentials(float *x, int64_t count, float largest) {
    f32x16 sums = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 some;
        for (int64_t j = count; j < i + LANES; j++) x[j] = -1e30f;
        memcpy(&some, x + i, sizeof some);
        some = exponential(some - largest);
        memcpy(x + i, &some, sizeof some);
        sums += some;
    }
    return sum_of_lanes(sums);
}

static void capped(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 some;
        for (int64_t j = count; j < i + LANES; j++) x[j] = 0;
        memcpy(&some, x + i, sizeof some);
        some = hyperbolic_tangent(some / cap) * cap;
        memcpy(x + i, &some, sizeof some);
    }
}

/* The slots of a token's keys, one after another. */
typedef struct {
    const Run *run, *end;
    int64_t within;
} Slots;

INLINE Slots slots_of(const Attention *a, int64_t token) {
    return (Slots){a->runs + a->first_run[token], a->runs + a->first_run[token + 1], 0};
}

/* A kv head's keys or values: rows of numbers, or of codes with their scales. */
typedef struct {
    const void *rows;
    const float *scales;
} Cached;

/* The next rows of a kv head as float32, [16, width], and their scales, zeros after the last; returns their number. */
INLINE int read_16(const Attention *a, Slots *slots, Cached from, int64_t kv_head, f32x16 *into, float *scales,
                   int64_t vectors, int dtype) {
    int count = 0;
    for (; count < LANES && slots->run < slots->end; count++) {
        int64_t row = kv_head * a->slots + slots->run->first + slots->within;
        for (int64_t v = 0; v < vectors; v++)
            into[count * vectors + v] = load16(from.rows, (row * vectors + v) * LANES, dtype);
        if (from.scales) scales[count] = from.scales[row];
        if (++slots->within == slots->run->count) slots->run++, slots->within = 0;
    }
    for (int64_t v = count * vectors; v < LANES * vectors; v++) into[v] = (f32x16){};
    for (int i = count; i < LANES; i++) scales[i] = 0;
    return count;
}

/* The same with a loop of its own for each kind of codes. */
INLINE int next_16(const Attention *a, Slots *slots, Cached from, int64_t kv_head, f32x16 *into, float *scales,
                   int64_t vectors) {
    switch (a->cache_dtype) {
    case INT8: return read_16(a, slots, from, kv_head, into, scales, vectors, INT8);
    case FLOAT8: return read_16(a, slots, from, kv_head, into, scales, vectors, FLOAT8);
    default: return read_16(a, slots, from, kv_head, into, scales, vectors, a->cache_dtype);
    }
}

#define PAIR(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)

/* Lane i is the sum of the lanes of x[i], in the order of sum_of_lanes. */
INLINE f32x16 sums_of_16(const f32x16 *x) {
    f32x16 by_8[8], by_4[4], by_2[2];
    for (int i = 0; i < 8; i++)
        by_8[i] = PAIR(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  PAIR(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        by_4[i] = PAIR(by_8[2 * i], by_8[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  PAIR(by_8[2 * i], by_8[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        by_2[i] = PAIR(by_4[2 * i], by_4[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                  PAIR(by_4[2 * i], by_4[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return PAIR(by_2[0], by_2[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PAIR(by_2[0], by_2[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Scores of all query heads of one kv head, for one token; returns how many keys it has. */
INLINE int64_t score(const Attention *a, int64_t token, int64_t kv_head, float *scores, int64_t vectors) {
    const int64_t width = vectors * LANES, first = a->first_head[kv_head], heads = a->first_head[kv_head + 1] - first;
    const Cached cached = {a->keys, a->key_scales};
    f32x16 keys[LANES * MOST_VECTORS], key_scales;
    float scales[LANES];
    Slots slots = slots_of(a, token);
    int64_t count = 0;
    while (slots.run < slots.end) {
        int more = next_16(a, &slots, cached, kv_head, keys, scales, vectors);
        memcpy(&key_scales, scales, sizeof scales);
        for (int64_t g = 0; g < heads; g++) {
            f32x16 sums[LANES];
            for (int i = 0; i < LANES; i++) sums[i] = (f32x16){};
            for (int64_t v = 0; v < vectors; v++) {
                f32x16 q = load16(a->q, token * a->q_stride + (first + g) * width + v * LANES, a->dtype);
                for (int i = 0; i < LANES; i++) sums[i] += q * keys[i * vectors + v];
            }
            f32x16 found = sums_of_16(sums);
            if (cached.scales) found *= key_scales;
            found *= a->scale;
            memcpy(scores + g * a->most_keys + count, &found, sizeof found);
        }
        count += more;
    }
    return count;
}

/* All query heads of one kv head, for one token. */
INLINE void attend(const Attention *a, int64_t token, int64_t kv_head, float *scores, int64_t vectors) {
    const int64_t width = vectors * LANES, first = a->first_head[kv_head], heads = a->first_head[kv_head + 1] - first;
    const Cached cached = {a->values, a->value_scales};
    float totals[MOST_HEADS], scales[LANES];
    f32x16 values[LANES * MOST_VECTORS], sums[MOST_HEADS * MOST_VECTORS];
    int64_t keys = score(a, token, kv_head, scores, vectors);
    for (int64_t g = 0; g < heads; g++) {
        float *of_head = scores + g * a->most_keys;
        if (a->softcap > 0) capped(of_head, keys, a->softcap);
        totals[g] = exponentials(of_head, keys, largest_of(of_head, keys));
        for (int64_t v = 0; v < vectors; v++) sums[g * vectors + v] = (f32x16){};
    }
    Slots slots = slots_of(a, token);
    for (int64_t key = 0; slots.run < slots.end; key += LANES) {
        int more = next_16(a, &slots, cached, kv_head, values, scales, vectors);
        for (int64_t g = 0; g < heads; g++) {
            float *weights = scores + g * a->most_keys + key;
            if (cached.scales)
                for (int i = 0; i < LANES; i++) weights[i] *= scales[i];
            for (int i = 0; i < more; i++)
                for (int64_t v = 0; v < vectors; v++) sums[g * vectors + v] += weights[i] * values[i * vectors + v];
        }
    }
    for (int64_t g = 0; g < heads; g++)
        for (int64_t v = 0; v < vectors; v++)
            store_some(a->out, (token * a->heads + first + g) * width + v * LANES, LANES, a->dtype,
                       sums[g * vectors + v] / totals[g]);
}

static void attend_some(void *of, int64_t first, int64_t last, int thread) {
    const Attention *a = of;
    float *scores = a->scores + thread * a->most_heads * a->most_keys;
    for (int64_t item = first; item < last; item++) {
        int64_t token = item / a->kv_heads, kv_head = item % a->kv_heads;
        switch (a->width) { /* widths that are common have loops of a length that the compiler knows */
        case 64: attend(a, token, kv_head, scores, 4); break;
        case 128: attend(a, token, kv_head, scores, 8); break;
        case 256: attend(a, token, kv_head, scores, 16); break;
        default: attend(a, token, kv_head, scores, a->width / LANES);
        }
    }
}

/* out [tokens, heads, width]: softmax(q k^T scale) v of each token over its own keys. */
void tllm_token_attention(const Attention *attention, int threads) {
    run_parallel(attend_some, (void *)attention, attention->tokens * attention->kv_heads, 1, threads);
}
