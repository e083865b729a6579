/* Attention of prompts over the paged cache, of bfloat16, by products of AMX: keys are taken in blocks, and what came out
 * for the blocks before is scaled whenever a larger score is met (FlashAttention, 2205.14135).
 *
 * All is transposed. A lane is a row: a query head of a token. A block's scores are [keys, rows], so that the largest of
 * a row, exponentials and sums go key by key over whole vectors, and what comes out is [width, rows]:
 *
 *     scores^T = K q^T      K lies in the cache as a product wants its first factor; q is packed once
 *     out^T   += V^T e^T    V^T is packed once for each block and for all rows; e^T are the exponentials, as bfloat16
 *
 * A product of tiles sums over 32 numbers: columns of a head in the first, keys in the second. Scores are times log2 e, and
 * exponentials of 2, which the processor scales by.
 */
#include "attention.h"
#include "attention_tiles.h"
#include "threads.h"

#define KEYS 256       /* of a block */
#define MOST_WIDTH 256 /* of a head */
#define PAIR 32        /* rows that are computed together: two tiles of them */

#if HAS_TILES

/* What a thread has of a tile of tokens and a kv head. */
typedef struct {
    _Alignas(64) uint16_t q[MOST_ROWS * MOST_WIDTH];  /* [tiles of rows, steps, 16 pairs of columns, 16 rows, 2] */
    _Alignas(64) uint16_t keys[KEYS * MOST_WIDTH];    /* [keys, width] */
    _Alignas(64) uint16_t values[KEYS * MOST_WIDTH];  /* [tiles of width, steps, 16 of the width, 32 keys] */
    _Alignas(64) float scores[2][KEYS * TILE_ROWS];   /* of a pair: [keys, 16 rows] */
    _Alignas(64) uint16_t weights[2][KEYS * TILE_ROWS]; /* of a pair: [steps, 16 pairs of keys, 16 rows, 2] */
    _Alignas(64) float out[MOST_ROWS * MOST_WIDTH];   /* [tiles of rows, tiles of width, 16 of the width, 16 rows] */
    struct {
        f32x16 largest, sums;
        i32x16 from, to;                   /* keys of the tile that each row sees: [from, to) */
        int64_t all_from, all_to, some_to; /* those that all rows see, and where those end that any does */
    } rows[MOST_ROWS / TILE_ROWS];
} Buffers;

/* `multiply_tiles` for `steps` x 32 numbers of each row: those of the next step lie `apart` bytes behind in `first`, and are
 * the next tile of `second`, whose second 16 columns lie `second_half` bytes behind the others. */
INLINE void multiply(const uint8_t *first, int64_t pitch, int64_t half, int64_t apart, const uint8_t *second,
                     int64_t second_half, int64_t steps) {
    for (int64_t step = 0; step < steps; step++, first += apart, second += TILE_BYTES)
        multiply_tiles(first, pitch, half, second, second_half, 1);
}

/* The queries of a tile's rows, up to whole pairs of tiles; behind the last row are zeros, which see no key. Which keys
 * each row sees, and nothing seen yet. */
static void begin_rows(const Attention *a, Rows rows, Buffers *w) {
    const int64_t steps = a->width / STEP, count = rows.tokens * rows.heads, padded = (count + PAIR - 1) / PAIR * PAIR;
    memset(w->out, 0, (size_t)(padded * a->width) * sizeof(float));
    for (int64_t tile = 0; tile < padded / TILE_ROWS; tile++) {
        int32_t from[TILE_ROWS] = {0}, to[TILE_ROWS] = {0};
        int64_t all_from = 0, all_to = INT32_MAX, some_to = 0;
        float largest[TILE_ROWS], sums[TILE_ROWS] = {0};
        for (int r = 0; r < TILE_ROWS; r++) {
            const int64_t row = tile * TILE_ROWS + r, token = rows.token + row / rows.heads;
            largest[r] = LEAST;
            if (row < count) {
                from[r] = (int32_t)a->first_key[token], to[r] = (int32_t)(a->first_key[token] + a->num_keys[token]);
                if (a->sinks) largest[r] = a->sinks[rows.head + row % rows.heads] * LOG2_E, sums[r] = 1;
            }
            all_from = from[r] > all_from ? from[r] : all_from;
            all_to = to[r] < all_to ? to[r] : all_to;
            some_to = to[r] > some_to ? to[r] : some_to;
        }
        memcpy(&w->rows[tile].from, from, sizeof from), memcpy(&w->rows[tile].to, to, sizeof to);
        memcpy(&w->rows[tile].largest, largest, sizeof largest), memcpy(&w->rows[tile].sums, sums, sizeof sums);
        w->rows[tile].all_from = all_from, w->rows[tile].all_to = all_to, w->rows[tile].some_to = some_to;
        for (int64_t step = 0; step < steps; step++) {
            u32x16 some[TILE_ROWS] = {};
            for (int r = 0; r < TILE_ROWS && tile * TILE_ROWS + r < count; r++) {
                const int64_t row = tile * TILE_ROWS + r;
                const int64_t at = (rows.token + row / rows.heads) * a->q_stride + (rows.head + row % rows.heads) * a->width;
                memcpy(some + r, (const uint16_t *)a->q + at + step * STEP, sizeof *some);
            }
            transpose(some);
            memcpy(w->q + (tile * steps + step) * (TILE_BYTES / 2), some, sizeof some);
        }
    }
}

/* The next keys and values of a kv head, up to a block of them; behind the last one are zeros up to a whole step. */
static int64_t next_block(const Attention *a, Slots *slots, int64_t kv_head, Buffers *w) {
    static const uint16_t nothing[MOST_WIDTH];
    const uint16_t *values[KEYS];
    int64_t count = 0;
    for (; count < KEYS && slots->run < slots->end; count++) {
        const int64_t at = (kv_head * a->slots + slots->run->first + slots->within) * a->width;
        memcpy(w->keys + count * a->width, (const uint16_t *)a->keys + at, 2 * (size_t)a->width);
        values[count] = (const uint16_t *)a->values + at;
        if (++slots->within == slots->run->count) slots->run++, slots->within = 0;
    }
    const int64_t steps = (count + STEP - 1) / STEP;
    for (int64_t key = count; key < steps * STEP; key++) {
        memset(w->keys + key * a->width, 0, 2 * (size_t)a->width);
        values[key] = nothing;
    }
    for (int64_t tile = 0; tile < a->width / TILE_ROWS; tile++)
        for (int64_t step = 0; step < steps; step++) {
            u32x16 pairs[TILE_ROWS];
            for (int p = 0; p < TILE_ROWS; p++) {
                const uint16_t *const *even = values + step * STEP + 2 * p;
                pairs[p] = pairs_of(even[0] + tile * TILE_ROWS, even[1] + tile * TILE_ROWS);
            }
            transpose(pairs);
            memcpy(w->values + (tile * (KEYS / STEP) + step) * (TILE_BYTES / 2), pairs, sizeof pairs);
        }
    return count;
}

/* The weights of a tile of rows for `keys` keys from `first` on, as bfloat16 and but for the division by their sum; and
 * what was summed before, scaled for the largest score that there is now. */
static void weigh(const Attention *a, Buffers *w, int64_t tile, int64_t half, int64_t first, int64_t keys) {
    float *scores = w->scores[half];
    const __m512i from = (__m512i)(w->rows[tile].from - (int32_t)first), to = (__m512i)(w->rows[tile].to - (int32_t)first);
    const int64_t all_from = w->rows[tile].all_from - first, all_to = w->rows[tile].all_to - first;
    const __m512 before = (__m512)w->rows[tile].largest;
    __m512 most = before, even_sums = _mm512_setzero_ps(), odd_sums = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key++) {
        __m512 some = _mm512_loadu_ps(scores + key * TILE_ROWS);
        if (a->softcap > 0)
            some = (__m512)(hyperbolic_tangent((f32x16)some * (a->scale / a->softcap)) * (a->softcap * LOG2_E));
        else
            some = _mm512_mul_ps(some, _mm512_set1_ps(a->scale * LOG2_E));
        if (key < all_from || key >= all_to) {
            const __m512i at = _mm512_set1_epi32((int32_t)key);
            const __mmask16 seen = _mm512_cmple_epi32_mask(from, at) & _mm512_cmplt_epi32_mask(at, to);
            some = _mm512_mask_blend_ps(seen, _mm512_set1_ps(HIDDEN), some);
        }
        _mm512_storeu_ps(scores + key * TILE_ROWS, some);
        most = _mm512_max_ps(some, most);
    }
    for (int64_t key = 0; key < keys; key += 2) {
        const float *both_scores = scores + key * TILE_ROWS;
        const __m512 even = exponential_of_2(_mm512_sub_ps(_mm512_loadu_ps(both_scores), most));
        const __m512 odd = exponential_of_2(_mm512_sub_ps(_mm512_loadu_ps(both_scores + TILE_ROWS), most));
        even_sums = _mm512_add_ps(even_sums, even);
        odd_sums = _mm512_add_ps(odd_sums, odd);
        store_pairs(w->weights[half] + key * TILE_ROWS, even, odd);
    }
    const f32x16 scale = (f32x16)exponential_of_2(_mm512_sub_ps(before, most));
    f32x16 *out = (f32x16 *)(w->out + tile * TILE_ROWS * a->width);
    for (int64_t i = 0; i < a->width; i++) out[i] *= scale;
    w->rows[tile].sums = w->rows[tile].sums * scale + (f32x16)_mm512_add_ps(even_sums, odd_sums);
    w->rows[tile].largest = (f32x16)most;
}

/* Two tiles of rows from `tile` on, with `count` keys of a block from `first` on. */
static void attend_block(const Attention *a, Buffers *w, int64_t tile, int64_t first, int64_t count) {
    const int64_t to = w->rows[tile].some_to, other_to = w->rows[tile + 1].some_to;
    const int64_t seen = (to > other_to ? to : other_to) - first;
    const int64_t keys = ((seen < count ? seen : count) + STEP - 1) / STEP * STEP;
    const int64_t steps = a->width / STEP, pitch = 2 * a->width;
    if (keys <= 0) return;
    for (int64_t key = 0; key < keys; key += PAIR) {
        _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
        multiply((const uint8_t *)(w->keys + key * a->width), pitch, TILE_ROWS * pitch, 2 * STEP,
                 (const uint8_t *)(w->q + tile * steps * (TILE_BYTES / 2)), steps * TILE_BYTES, steps);
        float *scores = w->scores[0] + key * TILE_ROWS, *behind = w->scores[1] + key * TILE_ROWS;
        _tile_stored(0, scores, 64), _tile_stored(1, scores + TILE_ROWS * TILE_ROWS, 64);
        _tile_stored(2, behind, 64), _tile_stored(3, behind + TILE_ROWS * TILE_ROWS, 64);
    }
    weigh(a, w, tile, 0, first, keys);
    weigh(a, w, tile + 1, 1, first, keys);
    for (int64_t i = 0; i < a->width / TILE_ROWS; i += 2) {
        float *out = w->out + tile * TILE_ROWS * a->width + i * TILE_ROWS * TILE_ROWS, *behind = out + TILE_ROWS * a->width;
        float *const places[] = {out, out + TILE_ROWS * TILE_ROWS, behind, behind + TILE_ROWS * TILE_ROWS};
        _tile_loadd(0, places[0], 64), _tile_loadd(1, places[1], 64);
        _tile_loadd(2, places[2], 64), _tile_loadd(3, places[3], 64);
        multiply((const uint8_t *)(w->values + i * (KEYS / STEP) * (TILE_BYTES / 2)), 64, KEYS / STEP * TILE_BYTES,
                 TILE_BYTES, (const uint8_t *)w->weights[0], sizeof w->weights[0], keys / STEP);
        _tile_stored(0, places[0], 64), _tile_stored(1, places[1], 64);
        _tile_stored(2, places[2], 64), _tile_stored(3, places[3], 64);
    }
}

/* What came out for a tile's rows, divided by the sums of their weights. */
static void end_rows(const Attention *a, Rows rows, const Buffers *w) {
    const int64_t count = rows.tokens * rows.heads;
    for (int64_t tile = 0; tile * TILE_ROWS < count; tile++)
        for (int64_t i = 0; i < a->width / TILE_ROWS; i++) {
            f32x16 found[TILE_ROWS];
            memcpy(found, w->out + tile * TILE_ROWS * a->width + i * TILE_ROWS * TILE_ROWS, sizeof found);
            for (int n = 0; n < TILE_ROWS; n++) found[n] /= w->rows[tile].sums;
            transpose((u32x16 *)found);
            for (int r = 0; r < TILE_ROWS && tile * TILE_ROWS + r < count; r++) {
                const int64_t row = tile * TILE_ROWS + r;
                const int64_t at = (rows.token + row / rows.heads) * a->heads + rows.head + row % rows.heads;
                store_some(a->out, at * a->width + i * TILE_ROWS, TILE_ROWS, BFLOAT16, found[r]);
            }
        }
}

static void attend_some(void *of, int64_t first, int64_t last, int thread) {
    const Attention *a = of;
    Buffers *w = (Buffers *)(((uintptr_t)a->scores + 63) / 64 * 64) + thread;
    configure_all_tiles();
    for (int64_t item = first; item < last; item++) {
        const int64_t tile = in_turn(item % a->tiles, a->tiles), kv_head = item / a->tiles;
        const Rows rows = rows_of(a, tile, kv_head);
        Slots slots = slots_of(a, tile);
        begin_rows(a, rows, w);
        for (int64_t key = 0; slots.run < slots.end; key += KEYS) {
            const int64_t count = next_block(a, &slots, kv_head, w);
            for (int64_t row = 0; row < rows.tokens * rows.heads; row += PAIR)
                attend_block(a, w, row / TILE_ROWS, key, count);
        }
        end_rows(a, rows, w);
    }
    release_tiles();
}

/* Bytes of scratch memory (`scores`) that attention of bfloat16 takes. */
int64_t tllm_tiled_attention_scratch_bytes(int threads) { return threads * (int64_t)sizeof(Buffers) + 64; }

/* out [tokens, heads, width]: softmax(q k^T scale) v of each token over its own keys. The width is a multiple of 32. */
void tllm_tiled_attention(const Attention *attention, int threads) {
    run_parallel(attend_some, (void *)attention, attention->tiles * attention->kv_heads, 1, threads);
}

#else

int64_t tllm_tiled_attention_scratch_bytes(int threads) {
    (void)threads;
    return 0;
}

void tllm_tiled_attention(const Attention *attention, int threads) { (void)attention, (void)threads; }

#endif
