/* Numbers of bfloat16 in pairs, as a product of tiles wants them of its second factor. */
#ifndef TLLM_ATTENTION_TILES_H
#define TLLM_ATTENTION_TILES_H

#include "tiles.h"

#if HAS_TILES

/* Of 16 numbers of two rows, each with the one below it. */
INLINE u32x16 pairs_of(const uint16_t *even_row, const uint16_t *odd_row) {
    u16x16 even, odd;
    memcpy(&even, even_row, sizeof even);
    memcpy(&odd, odd_row, sizeof odd);
    return __builtin_convertvector(even, u32x16) | __builtin_convertvector(odd, u32x16) << 16;
}

/* The even and the odd numbers of two vectors as bfloat16, by turns. */
INLINE void store_pairs(uint16_t *to, __m512 even, __m512 odd) {
    const bf16x32 both = (bf16x32)_mm512_cvtne2ps_pbh(odd, even);
    const bf16x32 pairs = INTERLEAVED(both);
    memcpy(to, &pairs, sizeof pairs);
}

#endif

#endif
