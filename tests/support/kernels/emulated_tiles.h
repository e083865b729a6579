/* In front of each of our kernels (-include): the processor seems to have tiles, whose instructions are calls of
 * emulated_tiles.c. */
#ifndef TLLM_EMULATED_TILES_H
#define TLLM_EMULATED_TILES_H

#define _POSIX_C_SOURCE 200809L /* as shared_sum.c has it, before any header */
#include <immintrin.h>
#include <stdint.h>

void emulated_loadconfig(const void *config);
void emulated_release(void);
void emulated_zero(int tile);
void emulated_loadd(int tile, const void *base, int64_t stride);
void emulated_stored(int tile, void *base, int64_t stride);
void emulated_dpbf16ps(int sums, int first, int second);
void emulated_dpbssd(int sums, int first, int second);

#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd emulated_dpbssd

#endif
