/* Attention of new tokens over the paged cache, many sequences at once.
 *
 * Tokens that follow one another in a sequence are computed together, as a tile: each key is read once for all of them.
 * A token's scores are kept, so that every sum goes over its keys in the order of their positions: an output has the
 * same bits wherever its pages lie, whatever tile it is in and whatever else is in the batch.
 *
 * A cache of codes has a scale for each kv head and slot. With c s in the place of a key, q k = (q c) s, and with it in
 * the place of a value, w v = (w s) c: so scales meet one number for each head and key, and not every number of a row.
 */
#include "attention.h"
#include "threads.h"

#define MOST_VECTORS 40 /* of a head: a width of up to 640 */

INLINE float largest_of(const float *x, int64_t count) {
    float largest = x[0], lanes[LANES];
    int64_t i = 0;
    if (count >= LANES) {
        f32x16 most, some;
        memcpy(&most, x, sizeof most);
        for (i = LANES; i + LANES <= count; i += LANES) {
            memcpy(&some, x + i, sizeof some);
            most = greater(some, most);
        }
        memcpy(lanes, &most, sizeof lanes);
        for (int n = 0; n < LANES; n++) largest = lanes[n] > largest ? lanes[n] : largest;
    }
    for (; i < count; i++) largest = x[i] > largest ? x[i] : largest;
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

/* Of the 16 keys from `key` on of a tile, those that a token sees: [from, to). */
typedef struct {
    int64_t from, to;
} Seen;

INLINE Seen seen_of(const Attention *a, int64_t token, int64_t key) {
    int64_t from = a->first_key[token] - key, to = from + a->num_keys[token];
    return (Seen){from > 0 ? from : 0, to < LANES ? to : LANES};
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

/* Scores of the rows of a tile for one kv head: row by row, from the first key that a token sees. */
INLINE void score(const Attention *a, int64_t tile, int64_t kv_head, float *scores, int64_t vectors) {
    const Rows rows = rows_of(a, tile, kv_head);
    const Cached cached = {a->keys, a->key_scales};
    f32x16 keys[LANES * MOST_VECTORS], key_scales;
    float scales[LANES];
    Slots slots = slots_of(a, tile);
    for (int64_t key = 0; slots.run < slots.end; key += LANES) {
        next_16(a, &slots, cached, kv_head, keys, scales, vectors);
        memcpy(&key_scales, scales, sizeof scales);
        for (int64_t t = 0; t < rows.tokens; t++) {
            const Seen seen = seen_of(a, rows.token + t, key);
            if (seen.from >= seen.to) continue;
            const int64_t q = (rows.token + t) * a->q_stride + rows.head * vectors * LANES;
            float *of_token = scores + t * rows.heads * a->most_keys + key - a->first_key[rows.token + t];
            for (int64_t g = 0; g < rows.heads; g++) {
                f32x16 sums[LANES];
                for (int i = 0; i < LANES; i++) sums[i] = (f32x16){};
                for (int64_t v = 0; v < vectors; v++) {
                    f32x16 some = load16(a->q, q + (g * vectors + v) * LANES, a->dtype);
                    for (int i = 0; i < LANES; i++) sums[i] += some * keys[i * vectors + v];
                }
                f32x16 found = sums_of_16(sums);
                if (cached.scales) found *= key_scales;
                found *= a->scale;
                memcpy(of_token + g * a->most_keys + seen.from, (float *)&found + seen.from,
                       (size_t)(seen.to - seen.from) * sizeof(float));
            }
        }
    }
}

/* Weights in the place of a row's scores, but for the division by what is returned. */
static float weigh(const Attention *a, float *scores, int64_t count, int64_t head) {
    if (a->softcap > 0) capped(scores, count, a->softcap);
    float largest = largest_of(scores, count);
    if (a->sinks == 0) return exponentials(scores, count, largest);
    float sink = a->sinks[head];
    largest = sink > largest ? sink : largest;
    return exponentials(scores, count, largest) + exponential(splat(sink - largest))[0];
}

/* Adds the values that a row sees of 16 keys, each times its weight. */
INLINE void add_values(f32x16 *sums, const f32x16 *values, const float *weights, Seen seen, int64_t vectors) {
    for (int64_t i = seen.from; i < seen.to; i++)
        for (int64_t v = 0; v < vectors; v++) sums[v] += weights[i] * values[i * vectors + v];
}

/* The rows of a tile for one kv head. */
INLINE void attend(const Attention *a, int64_t tile, int64_t kv_head, float *scores, int64_t vectors) {
    const Rows rows = rows_of(a, tile, kv_head);
    const Cached cached = {a->values, a->value_scales};
    float totals[MOST_ROWS], scales[LANES];
    f32x16 values[LANES * MOST_VECTORS], sums[MOST_ROWS * MOST_VECTORS];
    score(a, tile, kv_head, scores, vectors);
    for (int64_t row = 0; row < rows.tokens * rows.heads; row++) {
        const int64_t count = a->num_keys[rows.token + row / rows.heads];
        totals[row] = weigh(a, scores + row * a->most_keys, count, rows.head + row % rows.heads);
        for (int64_t v = 0; v < vectors; v++) sums[row * vectors + v] = (f32x16){};
    }
    Slots slots = slots_of(a, tile);
    for (int64_t key = 0; slots.run < slots.end; key += LANES) {
        next_16(a, &slots, cached, kv_head, values, scales, vectors);
        for (int64_t row = 0; row < rows.tokens * rows.heads; row++) {
            const int64_t token = rows.token + row / rows.heads;
            const Seen seen = seen_of(a, token, key);
            float *weights = scores + row * a->most_keys + key - a->first_key[token];
            if (cached.scales)
                for (int64_t i = seen.from; i < seen.to; i++) weights[i] *= scales[i];
            if (seen.from == 0 && seen.to == LANES)
                add_values(sums + row * vectors, values, weights, (Seen){0, LANES}, vectors);
            else
                add_values(sums + row * vectors, values, weights, seen, vectors);
        }
    }
    for (int64_t row = 0; row < rows.tokens * rows.heads; row++) {
        const int64_t token = rows.token + row / rows.heads, head = rows.head + row % rows.heads;
        for (int64_t v = 0; v < vectors; v++)
            store_some(a->out, ((token * a->heads + head) * vectors + v) * LANES, LANES, a->dtype,
                       sums[row * vectors + v] / totals[row]);
    }
}

static void attend_some(void *of, int64_t first, int64_t last, int thread) {
    const Attention *a = of;
    float *scores = a->scores + thread * a->most_rows * a->most_keys;
    for (int64_t item = first; item < last; item++) {
        int64_t tile = in_turn(item % a->tiles, a->tiles), kv_head = item / a->tiles;
        switch (a->width) { /* widths that are common have loops of a length that the compiler knows */
        case 64: attend(a, tile, kv_head, scores, 4); break;
        case 128: attend(a, tile, kv_head, scores, 8); break;
        case 256: attend(a, tile, kv_head, scores, 16); break;
        default: attend(a, tile, kv_head, scores, a->width / LANES);
        }
    }
}

/* out [tokens, heads, width]: softmax(q k^T scale) v of each token over its own keys. */
void tllm_paged_attention(const Attention *attention, int threads) {
    run_parallel(attend_some, (void *)attention, attention->tiles * attention->kv_heads, 1, threads);
}
