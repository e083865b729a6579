/* Sums of numbers in float32 that are first rounded to multiples of 2^-30, as whole numbers of 32 bits.
 *
 * `add_to_grid` takes a number times 2^30. A sum, of 32,768 numbers at the most, is kept modulo 2^32 beside the sum of
 * their higher halves, from which `of_grid` finds it whole. `least` tells whether one had no place in 32 bits, or was no
 * number: it is INT32_MIN then, as it is of -2 alone of those that have a place. HAS_GRID_SUMS: 0 where this takes no fewer
 * operations than float64 does; nothing here is called then.
 */
#ifndef TLLM_GRID_SUMS_H
#define TLLM_GRID_SUMS_H

#include "vectors.h"

#define GRID 0x1p30f

typedef struct {
    i32x16 sum, of_halves;
} GridSums;

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define HAS_GRID_SUMS 1

INLINE void add_to_grid(GridSums *sums, i32x16 *least, f32x16 x) {
    __m512i whole = _mm512_cvtps_epi32((__m512)x); /* ties to even; what has no place becomes INT32_MIN */
    *least = (i32x16)_mm512_min_epi32((__m512i)*least, whole);
    sums->sum = (i32x16)_mm512_add_epi32((__m512i)sums->sum, whole);
    sums->of_halves = (i32x16)_mm512_dpwssd_epi32((__m512i)sums->of_halves, whole, _mm512_set1_epi32(1 << 16));
}

#else

#define HAS_GRID_SUMS 0

INLINE void add_to_grid(GridSums *sums, i32x16 *least, f32x16 x) { (void)sums, (void)least, (void)x; }

#endif

/* Whether all of the numbers had a place. */
INLINE int all_on_grid(i32x16 least) { return __builtin_reduce_min(least) != INT32_MIN; }

INLINE f64x16 of_grid(const GridSums *sums) {
    u32x16 of_lower_halves = (u32x16)sums->sum - ((u32x16)sums->of_halves << 16);
    f64x16 higher = __builtin_convertvector(sums->of_halves, f64x16), lower = __builtin_convertvector(of_lower_halves, f64x16);
    return higher * 0x1p-14 + lower * 0x1p-30;
}

#endif
