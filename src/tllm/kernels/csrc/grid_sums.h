/* Sums of numbers in float32 that are first rounded to multiples of 2^-30, as whole numbers of 32 bits.
 *
 * `add_to_grid` takes a number times 2^30. A sum, of 32,768 numbers at the most, is kept modulo 2^32 beside the sum of
 * their higher halves, from which `of_grid` finds it whole. A number that has no place in 32 bits, or is none, makes the
 * processor set its flag of invalid operations, which `all_on_grid` reads: so looking takes no operation for each number.
 * HAS_GRID_SUMS: 0 where that flag is not known; nothing here is called then.
 */
#ifndef TLLM_GRID_SUMS_H
#define TLLM_GRID_SUMS_H

#include "vectors.h"

#define GRID 0x1p30f

typedef struct {
    i32x16 sum, of_halves;
} GridSums;

#if defined(__SSE2__)
#include <immintrin.h>

#define HAS_GRID_SUMS 1

#if defined(__AVX512VNNI__)

INLINE void add_to_grid(GridSums *sums, f32x16 x) {
    __m512i whole = _mm512_cvtps_epi32((__m512)x); /* ties to even */
    sums->sum = (i32x16)_mm512_add_epi32((__m512i)sums->sum, whole);
    /* The compiler would make two operations of the intrinsic, as a chain of these is shorter; here chains do not matter. */
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums->of_halves) : "v"(whole), "v"(_mm512_set1_epi32(1 << 16)));
}

/* Has the compiler make a sum here, not later. */
#define MADE_HERE(x) __asm__ volatile("" : "+v"(x))

#else

/* Ties to even. */
INLINE i32x16 whole_of(f32x16 x) {
#if defined(__AVX2__)
    union {
        f32x16 all;
        __m256 part[2];
    } of = {.all = x};
    union {
        i32x16 all;
        __m256i part[2];
    } whole;
    for (int i = 0; i < 2; i++) whole.part[i] = _mm256_cvtps_epi32(of.part[i]);
#else
    union {
        f32x16 all;
        __m128 part[4];
    } of = {.all = x};
    union {
        i32x16 all;
        __m128i part[4];
    } whole;
    for (int i = 0; i < 4; i++) whole.part[i] = _mm_cvtps_epi32(of.part[i]);
#endif
    return whole.all;
}

INLINE void add_to_grid(GridSums *sums, f32x16 x) {
    const i32x16 whole = whole_of(x);
    sums->sum += whole;
    sums->of_halves += whole >> 16;
}

#define MADE_HERE(x) IN_MEMORY(x)

#endif

/* From here on `all_on_grid` tells of what comes. */
INLINE void watch_grid(void) { _mm_setcsr(_mm_getcsr() & ~(unsigned)_MM_EXCEPT_INVALID); }

/* Whether all numbers that were added to `count` sums had a place. */
INLINE int all_on_grid(GridSums *sums, int count) {
    _Pragma("clang loop unroll(full)") for (int i = 0; i < count; i++) {
        MADE_HERE(sums[i].sum);
        MADE_HERE(sums[i].of_halves);
    }
    if (!(_mm_getcsr() & _MM_EXCEPT_INVALID)) return 1;
    watch_grid();
    return 0;
}

#else

#define HAS_GRID_SUMS 0

INLINE void add_to_grid(GridSums *sums, f32x16 x) { (void)sums, (void)x; }

INLINE void watch_grid(void) {}

INLINE int all_on_grid(GridSums *sums, int count) { return (void)sums, (void)count, 1; }

#endif

INLINE f64x16 of_grid(const GridSums *sums) {
    u32x16 of_lower_halves = (u32x16)sums->sum - ((u32x16)sums->of_halves << 16);
    f64x16 higher = __builtin_convertvector(sums->of_halves, f64x16), lower = __builtin_convertvector(of_lower_halves, f64x16);
    return higher * 0x1p-14 + lower * 0x1p-30;
}

#endif
