/* Tiles of AMX in plain C, as Intel's manual has them (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBSSD,
 * TDPBF16PS, …).
 *
 * What a processor would refuse, and end the process for, is not done, and `emulated_fault` says so; also of a thread that
 * keeps its tiles after a kernel.
 */
#include "emulated_tiles.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#define TILES 8
#define ROWS 16
#define ROW_BYTES 64

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

typedef union {
    uint8_t bytes[ROW_BYTES];
    int8_t codes[ROW_BYTES];
    uint16_t halves[ROW_BYTES / 2];
    uint32_t sums[ROW_BYTES / 4]; /* which overflow as they do on the processor */
    float numbers[ROW_BYTES / 4];
} Row;

/* What a thread has. */
static _Thread_local struct {
    Config config; /* palette 0: none */
    Row tiles[TILES][ROWS];
} own;

static _Atomic(const char *) fault;
static _Atomic int configured; /* threads whose tiles are */

/* The first thing since the last call of this that a processor would have refused, or NULL. */
const char *emulated_fault(void) {
    const char *first = atomic_exchange(&fault, NULL);
    return first || !atomic_load(&configured) ? first : "a thread has not released its tiles";
}

static int refused(const char *what) {
    const char *none = NULL;
    atomic_compare_exchange_strong(&fault, &none, what);
    return 1;
}

static int is_unknown(int tile) {
    if (own.config.palette == 0) return refused("this thread has not configured its tiles");
    if (own.config.rows[tile] == 0) return refused("the tile is not among those that are configured");
    return 0;
}

void emulated_loadconfig(const void *at) {
    static const uint8_t zeros[sizeof(Config)];
    Config config;
    memcpy(&config, at, sizeof config);
    int is_wrong = config.palette != 1 || config.start != 0 || memcmp(config.reserved, zeros, sizeof config.reserved);
    for (int i = 0; i < 16; i++) {
        is_wrong |= config.bytes[i] > (i < TILES ? ROW_BYTES : 0) || config.rows[i] > (i < TILES ? ROWS : 0);
        is_wrong |= (config.bytes[i] == 0) != (config.rows[i] == 0);
    }
    if (is_wrong) return (void)refused("no such configuration");
    if (own.config.palette == 0) configured++;
    own.config = config;
    memset(own.tiles, 0, sizeof own.tiles);
}

void emulated_release(void) {
    if (own.config.palette) configured--;
    memset(&own, 0, sizeof own);
}

void emulated_zero(int tile) {
    if (!is_unknown(tile)) memset(own.tiles[tile], 0, sizeof own.tiles[tile]);
}

void emulated_loadd(int tile, const void *base, int64_t stride) {
    if (is_unknown(tile)) return;
    memset(own.tiles[tile], 0, sizeof own.tiles[tile]);
    for (int row = 0; row < own.config.rows[tile]; row++)
        memcpy(own.tiles[tile] + row, (const uint8_t *)base + row * stride, own.config.bytes[tile]);
}

void emulated_stored(int tile, void *base, int64_t stride) {
    if (is_unknown(tile)) return;
    for (int row = 0; row < own.config.rows[tile]; row++)
        memcpy((uint8_t *)base + row * stride, own.tiles[tile] + row, own.config.bytes[tile]);
}

/* Whether a product of these is none. */
static int is_no_product(int sums, int first, int second) {
    const Config *c = &own.config;
    if (is_unknown(sums) || is_unknown(first) || is_unknown(second)) return 1;
    if (sums == first || sums == second || first == second) return refused("a tile is twice in a product");
    if ((c->bytes[sums] | c->bytes[first] | c->bytes[second]) % 4) return refused("rows of a product are not of whole words");
    if (c->rows[sums] != c->rows[first]) return refused("a product has other rows than its first factor");
    if (c->bytes[sums] != c->bytes[second]) return refused("a product has other columns than its second factor");
    if (c->bytes[first] / 4 != c->rows[second]) return refused("the factors of a product do not meet");
    return 0;
}

void emulated_dpbssd(int sums, int first, int second) {
    if (is_no_product(sums, first, second)) return;
    const int rows = own.config.rows[sums], columns = own.config.bytes[sums] / 4, steps = own.config.rows[second];
    for (int row = 0; row < rows; row++)
        for (int step = 0; step < steps; step++)
            for (int i = 0; i < 4; i++) {
                const int x = own.tiles[first][row].codes[4 * step + i];
                for (int column = 0; column < columns; column++)
                    own.tiles[sums][row].sums[column] += (uint32_t)(x * own.tiles[second][step].codes[4 * column + i]);
            }
}

/* Numbers of less than 2^-126 are zeros, where they are read and where they come out. */
static inline float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static inline float number_of(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

void emulated_dpbf16ps(int sums, int first, int second) {
    if (is_no_product(sums, first, second)) return;
    const int rows = own.config.rows[sums], steps = own.config.rows[second];
    float factors[ROWS][2][ROW_BYTES / 4]; /* of the second tile, the first and the second ones of pairs */
    for (int step = 0; step < ROWS; step++)
        for (int column = 0; column < ROW_BYTES / 2; column++)
            factors[step][column % 2][column / 2] = number_of(own.tiles[second][step].halves[column]);
    for (int row = 0; row < rows; row++) {
        float parts[2][ROW_BYTES / 4] = {0}, *to = own.tiles[sums][row].numbers;
        for (int step = 0; step < steps; step++)
            for (int i = 0; i < 2; i++) {
                const float x = number_of(own.tiles[first][row].halves[2 * step + i]);
                for (int column = 0; column < ROW_BYTES / 4; column++)
                    parts[i][column] = flushed(fmaf(x, factors[step][i][column], parts[i][column]));
            }
        for (int column = 0; column < own.config.bytes[sums] / 4; column++)
            to[column] = flushed(flushed(to[column]) + flushed(parts[0][column] + parts[1][column]));
    }
}
