/* The one step that processors do in their own ways: sums of four products of 8-bit numbers in each of 16 lanes.
 *
 * `dot(sums, codes, x)`: to lane n add, over j = 0..3, (codes[4 n + j] - CODE_BIAS) * x[j], where codes are 0..255 and
 * x are four signed bytes, -127..127. `dot_small` is for codes of at most 15 and has no bias: it adds to `SmallSums`,
 * which hold eight such steps and which `of_small` makes sums. All are exact.
 *
 * MOST_ROWS: of how many rows the sums stay in registers, where each row has so many CHAINS: sums that steps are added to by
 * turns. A step waits for the one before it in its chain, and this for several cycles.
 */
#ifndef TLLM_DOT_H
#define TLLM_DOT_H

#include "vectors.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define CODE_BIAS 0
#define MOST_ROWS 8
#define CHAINS 2

INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
}

INLINE i32x16 dot_small(i32x16 sums, u8x64 codes, int32_t x) { return dot(sums, codes, x); }

INLINE u8x64 look_up(u8x64 codes, u8x16 table) {
    return (u8x64)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)codes);
}

#elif defined(__AVX2__)
#include <immintrin.h>

typedef union {
    u8x64 bytes;
    i32x16 sums;
    __m256i half[2];
} Halves;

#if defined(__AVXVNNI__)

#define CODE_BIAS 0

INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    Halves into = {.sums = sums}, of = {.bytes = codes};
    for (int i = 0; i < 2; i++) into.half[i] = _mm256_dpbusd_avx_epi32(into.half[i], of.half[i], _mm256_set1_epi32(x));
    return into.sums;
}

INLINE i32x16 dot_small(i32x16 sums, u8x64 codes, int32_t x) { return dot(sums, codes, x); }

#else

#define CODE_BIAS 128

/* Sums of two products stay below 2^15: |code| is at most 128, |x| at most 127. */
INLINE __m256i add_pairs(__m256i sums, __m256i unsigned_bytes, __m256i signed_bytes) {
    __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    Halves into = {.sums = sums}, of = {.bytes = codes ^ 0x80};
    for (int i = 0; i < 2; i++) {
        __m256i w = of.half[i], signs = _mm256_sign_epi8(_mm256_set1_epi32(x), w);
        into.half[i] = add_pairs(into.half[i], _mm256_abs_epi8(w), signs);
    }
    return into.sums;
}

/* Sums of two products in 16 bits: eight times 2 * 15 * 127 is less than 2^15. */
typedef union {
    i16x32 sums;
    __m256i half[2];
} SmallHalves;

typedef i16x32 SmallSums;
#define HAS_SMALL_SUMS

INLINE SmallSums dot_small(SmallSums sums, u8x64 codes, int32_t x) {
    SmallHalves into = {.sums = sums};
    Halves of = {.bytes = codes};
    for (int i = 0; i < 2; i++)
        into.half[i] = _mm256_add_epi16(into.half[i], _mm256_maddubs_epi16(of.half[i], _mm256_set1_epi32(x)));
    return into.sums;
}

INLINE i32x16 of_small(SmallSums sums) {
    SmallHalves of = {.sums = sums};
    Halves pairs;
    for (int i = 0; i < 2; i++) pairs.half[i] = _mm256_madd_epi16(of.half[i], _mm256_set1_epi16(1));
    return pairs.sums;
}

#endif

INLINE u8x64 look_up(u8x64 codes, u8x16 table) {
    Halves of = {.bytes = codes};
    for (int i = 0; i < 2; i++) of.half[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), of.half[i]);
    return of.bytes;
}

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

#define CODE_BIAS 128

typedef union {
    u8x64 bytes;
    i32x16 sums;
    uint8x16_t codes[4];
    int8x16_t quarter[4];
    int32x4_t sum[4];
} Quarters;

INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    Quarters into = {.sums = sums}, of = {.bytes = codes ^ 0x80};
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
    for (int i = 0; i < 4; i++) into.sum[i] = vdotq_s32(into.sum[i], of.quarter[i], four);
    return into.sums;
}

INLINE i32x16 dot_small(i32x16 sums, u8x64 codes, int32_t x) {
    Quarters into = {.sums = sums}, of = {.bytes = codes};
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
    for (int i = 0; i < 4; i++) into.sum[i] = vdotq_s32(into.sum[i], of.quarter[i], four);
    return into.sums;
}

INLINE u8x64 look_up(u8x64 codes, u8x16 table) {
    Quarters of = {.bytes = codes};
    for (int i = 0; i < 4; i++) of.codes[i] = vqtbl1q_u8((uint8x16_t)table, of.codes[i]);
    return of.bytes;
}

#elif defined(__SSE2__)
#include <emmintrin.h>

#define CODE_BIAS 0

typedef union {
    u8x64 bytes;
    i32x16 sums;
    __m128i quarter[4];
} Quarters;

/* Codes with even and with odd numbers, made 16 bits wide, by those of x. */
INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    Quarters into = {.sums = sums}, of = {.bytes = codes};
    __m128i four = _mm_set1_epi32(x);
    __m128i x_even = _mm_srai_epi16(_mm_slli_epi16(four, 8), 8), x_odd = _mm_srai_epi16(four, 8);
    for (int i = 0; i < 4; i++) {
        __m128i even = _mm_and_si128(of.quarter[i], _mm_set1_epi16(255)), odd = _mm_srli_epi16(of.quarter[i], 8);
        __m128i pairs = _mm_add_epi32(_mm_madd_epi16(even, x_even), _mm_madd_epi16(odd, x_odd));
        into.quarter[i] = _mm_add_epi32(into.quarter[i], pairs);
    }
    return into.sums;
}

INLINE i32x16 dot_small(i32x16 sums, u8x64 codes, int32_t x) { return dot(sums, codes, x); }

INLINE u8x64 look_up(u8x64 codes, u8x16 table) {
    u8x64 values;
    for (int i = 0; i < 64; i++) values[i] = table[codes[i] & 15];
    return values;
}

#else

#define CODE_BIAS 0

INLINE i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
    int8_t four[4];
    memcpy(four, &x, 4);
    for (int n = 0; n < LANES; n++)
        for (int j = 0; j < 4; j++) sums[n] += (int32_t)codes[4 * n + j] * four[j];
    return sums;
}

INLINE i32x16 dot_small(i32x16 sums, u8x64 codes, int32_t x) { return dot(sums, codes, x); }

INLINE u8x64 look_up(u8x64 codes, u8x16 table) {
    u8x64 values;
    for (int i = 0; i < 64; i++) values[i] = table[codes[i] & 15];
    return values;
}

#endif

#ifndef HAS_SMALL_SUMS
typedef i32x16 SmallSums;

INLINE i32x16 of_small(SmallSums sums) { return sums; }
#endif

#ifndef MOST_ROWS
#define CHAINS 1
#ifdef __AVX2__
#define MOST_ROWS 4
#else
#define MOST_ROWS 2
#endif
#endif

#endif
