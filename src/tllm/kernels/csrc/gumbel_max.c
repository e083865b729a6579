/* Tokens drawn from rows of logits by the Gumbel-max trick, with top-p; kernels/gumbel_max.py says what is drawn, and
 * does the same by torch.
 *
 * The noise of a token is -log(-log(u)) of a uniform number u of 24 bits. With v = 1 - u and p = e^score, e^(score +
 * noise) = p / -log(u) lies between p / v / 17.33 and p / v. So p / v, which needs no logarithm, tells which few tokens
 * can win; only of these the noise itself is computed, in float64. Each row is one thread's, in the order of tokens.
 */
#include <math.h>

#include "exponential.h"
#include "threads.h"

typedef uint64_t u64x16 __attribute__((vector_size(128)));

#define UNIFORM_BITS 24
#define SPREAD 17.5f /* 17.33, and far more than is rounded */

/* splitmix64 (Steele, Lea, Flood 2014) without its last step, which its first 24 bits do not need. */
#define GAMMA 0x9E3779B97F4A7C15u
#define MIX(x)                                        \
    do {                                              \
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;    \
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;    \
    } while (0)

static uint64_t splitmix(uint64_t x) {
    x += GAMMA;
    MIX(x);
    return x ^ (x >> 31);
}

/* Of each row: what its logits are divided by, the least score that is left, the part of the probability that top-p
 * leaves, and what the noise follows from. */
typedef struct {
    const float *logits;
    const double *temperatures, *least, *top_p;
    const int64_t *seeds, *positions;
    float *scratch;
    int64_t *ids;
    int64_t rows, width, stride;
} Draws;

typedef struct {
    const float *logits;
    float largest, temperature, least, *races;
    int64_t width;
    uint64_t start;
} Row;

INLINE f32x16 scores_at(const Row *row, int64_t at) {
    f32x16 x = load_up_to(row->logits, at, row->width - at, FLOAT32);
    return (x - splat(row->largest)) / splat(row->temperature);
}

/* All bits where a token counts: its score is `least` or more, and the row does not end before it. */
INLINE i32x16 counts_at(const Row *row, int64_t at, f32x16 scores) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (scores >= row->least) & (lanes < lanes_of(row->width - at));
}

INLINE f32x16 only(f32x16 x, i32x16 where) { return (f32x16)((i32x16)x & where); }

INLINE float largest_lane(f32x16 x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* p / v of every token; the largest of them. */
static float run_races(const Row *row) {
    const u64x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u64x16 states = lanes * GAMMA + row->start;
    f32x16 most = {};
    for (int64_t at = 0; at < row->width; at += LANES, states += (uint64_t)LANES * GAMMA) {
        u64x16 x = states;
        MIX(x);
        i32x16 bits = __builtin_convertvector(x >> (64 - UNIFORM_BITS), i32x16);
        f32x16 v = __builtin_convertvector((1 << UNIFORM_BITS) - 1 - bits, f32x16) + 0.5f;
        f32x16 scores = scores_at(row, at);
        f32x16 races = only(exponential(scores) / v, counts_at(row, at, scores));
        memcpy(row->races + at, &races, sizeof races);
        most = greater(races, most);
    }
    return largest_lane(most);
}

/* Within some 2^-50: the series of the inverse hyperbolic tangent, the same bits everywhere. */
static double logarithm(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = (bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFF) | (int64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m /= 2;
        exponent++;
    }
    double z = (m - 1) / (m + 1), square = z * z, sum = 0;
    for (int k = 27; k > 0; k -= 2) sum = sum * square + 1.0 / k;
    return 2 * z * sum + (double)exponent * 0.6931471805599453;
}

static double noisy(const Row *row, int64_t id) {
    uint64_t x = row->start + (uint64_t)id * GAMMA;
    MIX(x);
    double uniform = ((double)(x >> (64 - UNIFORM_BITS)) + 0.5) / (1 << UNIFORM_BITS);
    float score = (row->logits[id] - row->largest) / row->temperature;
    return (double)score - logarithm(-logarithm(uniform));
}

/* The first token with the largest sum of score and noise, of those whose race is near enough to the best. */
static int64_t winner_of(const Row *row, float best) {
    const f32x16 enough = splat(best / SPREAD);
    int64_t winner = row->width;
    double most = -INFINITY;
    for (int64_t at = 0; at < row->width; at += LANES) {
        f32x16 races;
        memcpy(&races, row->races + at, sizeof races);
        i32x16 near = (races >= enough) & (races > 0);
        if (!__builtin_reduce_or(near)) continue;
        for (int i = 0; i < LANES; i++) {
            if (!near[i]) continue;
            double sum = noisy(row, at + i);
            if (sum > most) most = sum, winner = at + i;
        }
    }
    return winner;
}

/* The probability of the tokens that are likelier than `score`, in units of the likeliest one's. */
static double weight_above(const Row *row, float score) {
    f64x16 sums = {};
    for (int64_t at = 0; at < row->width; at += LANES) {
        f32x16 scores = scores_at(row, at);
        f32x16 p = only(exponential(scores), counts_at(row, at, scores) & (scores > score));
        sums += __builtin_convertvector(p, f64x16);
    }
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* No token that is as likely as `score` or less may win; the largest race of the others. */
static float exclude_below(const Row *row, float score) {
    f32x16 most = {};
    for (int64_t at = 0; at < row->width; at += LANES) {
        f32x16 races;
        memcpy(&races, row->races + at, sizeof races);
        races = only(races, scores_at(row, at) > score);
        memcpy(row->races + at, &races, sizeof races);
        most = greater(races, most);
    }
    return largest_lane(most);
}

/* The largest of a row's numbers; NaN where one is none. */
static float largest_of(const float *x, int64_t width) {
    f32x16 most = splat(-INFINITY);
    i32x16 is_nan = {};
    for (int64_t at = 0; at + LANES <= width; at += LANES) {
        f32x16 some = load16(x, at, FLOAT32);
        is_nan |= some != some;
        most = greater(some, most);
    }
    float largest = largest_lane(most);
    for (int64_t at = width / LANES * LANES; at < width; at++) {
        if (x[at] != x[at]) return NAN;
        if (x[at] > largest) largest = x[at];
    }
    return __builtin_reduce_or(is_nan) ? NAN : largest;
}

/* Top-p (1904.09751) leaves a token if those that are likelier have less than its part together. So the winner among
 * all is asked whether it is left, and if it is not, the winner among those that are likelier. */
static int64_t draw(const Row *row, double top_p) {
    float best = run_races(row);
    int64_t winner = winner_of(row, best);
    if (top_p >= 1) return winner;
    const double total = weight_above(row, -INFINITY);
    while (winner < row->width) {
        float score = (row->logits[winner] - row->largest) / row->temperature;
        double above = weight_above(row, score);
        if (!(above > 0) || above < top_p * total) break;
        winner = winner_of(row, exclude_below(row, score));
    }
    return winner;
}

static void draw_rows(void *of, int64_t first, int64_t last, int thread) {
    const Draws *draws = of;
    int64_t room = (draws->width + LANES - 1) / LANES * LANES;
    for (int64_t at = first; at < last; at++) {
        const float *logits = draws->logits + at * draws->stride;
        float largest = largest_of(logits, draws->width);
        Row row = {.logits = logits, .largest = largest, .temperature = (float)draws->temperatures[at],
                   .least = (float)draws->least[at], .races = draws->scratch + thread * room, .width = draws->width,
                   .start = splitmix(splitmix((uint64_t)draws->seeds[at]) ^ (uint64_t)draws->positions[at])};
        draws->ids[at] = isfinite(largest) ? draw(&row, draws->top_p[at]) : draws->width;
    }
}

/* A token of each row; `width` where a row has numbers that are none. `scratch`: [threads, width up to whole lanes]. */
void tllm_gumbel_max(const void *draws, int threads) {
    const Draws *d = draws;
    run_parallel(draw_rows, (void *)draws, d->rows, 1, d->rows * d->width < 65536 ? 1 : threads);
}
