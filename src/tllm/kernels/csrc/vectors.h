/* Vectors of 16 lanes, in the compiler's own vector types: one source for every processor.
 *
 * A lane is always the same output of a product, whatever the width of the processor's registers, and nothing is
 * contracted or reordered (the build says -ffp-contract=off), so each lane has the same bits everywhere.
 */
#ifndef TLLM_VECTORS_H
#define TLLM_VECTORS_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")

typedef double f64x16 __attribute__((vector_size(128)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x4 __attribute__((vector_size(4)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef _Float16 f16x16 __attribute__((vector_size(32)));

/* Lanes of a register, and as many numbers. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float Part __attribute__((vector_size(4 * WIDTH)));

/* The dtypes of numbers, as kernels/library.py numbers them. */
enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, UINT8 = 3, INT8 = 4, FLOAT64 = 5, FLOAT8 = 6, EXPONENT = 7 };

/* Has the compiler read numbers of an array from memory again: from there one comes to all lanes at no price, and out of a
 * vector by operations of the units that the sums need. */
#define IN_MEMORY(x) __asm__ volatile("" : "+m"(x))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE f32x16 splat(float x) { return (f32x16){} + x; }

/* The lanes of `a` where all bits of `where` are set, and those of `b` where none is. */
INLINE u32x16 blend_bits(u32x16 where, u32x16 a, u32x16 b) { return (a & where) | (b & ~where); }

INLINE f32x16 blend(i32x16 where, f32x16 a, f32x16 b) {
    return (f32x16)blend_bits((u32x16)where, (u32x16)a, (u32x16)b);
}

/* Where one of the two is no number, that of `b`. */
INLINE f32x16 greater(f32x16 a, f32x16 b) { return blend(a > b, a, b); }

INLINE f32x16 lesser(f32x16 a, f32x16 b) { return blend(a < b, a, b); }

INLINE f32x16 f32_of_bf16(u16x16 bits) {
    u32x16 wide = __builtin_convertvector(bits, u32x16) << 16;
    return (f32x16)wide;
}

/* To the nearest, ties to even; what is no number stays none. */
INLINE u16x16 bf16_of_f32(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 quiet = (bits >> 16) | 0x40;
    u32x16 is_nan = (u32x16)(x != x);
    return __builtin_convertvector(blend_bits(is_nan, quiet, rounded), u16x16);
}

/* Finite numbers of 4 bits of exponent and 3 of mantissa (e4m3): a float16 whose exponent counts from 8 lower. */
INLINE f32x16 f32_of_e4m3(u8x16 codes) {
    u16x16 wide = __builtin_convertvector(codes, u16x16);
    f16x16 halves = (f16x16)(((wide & 0x80) << 8) | ((wide & 0x7f) << 7));
    return __builtin_convertvector(halves, f32x16) * 256.0f;
}

/* 2^(code - 128), by the bits of float32; the two smallest are denormal. */
INLINE f32x16 power_of_two(u8x16 codes) {
    u32x16 exponents = __builtin_convertvector(codes, u32x16), is_tiny = (u32x16)(exponents < 2);
    return (f32x16)blend_bits(is_tiny, 0x200000u << (exponents & 1), (exponents - 1) << 23);
}

/* 16 numbers of a dtype, anywhere in memory, as float32. */
INLINE f32x16 load16(const void *from, int64_t at, int dtype) {
    switch (dtype) {
    case FLOAT32: {
        f32x16 x;
        memcpy(&x, (const float *)from + at, sizeof x);
        return x;
    }
    case FLOAT16: {
        f16x16 x;
        memcpy(&x, (const _Float16 *)from + at, sizeof x);
        return __builtin_convertvector(x, f32x16);
    }
    case BFLOAT16: {
        u16x16 x;
        memcpy(&x, (const uint16_t *)from + at, sizeof x);
        return f32_of_bf16(x);
    }
    case UINT8: {
        u8x16 x;
        memcpy(&x, (const uint8_t *)from + at, sizeof x);
        return __builtin_convertvector(x, f32x16);
    }
    case FLOAT8: {
        u8x16 x;
        memcpy(&x, (const uint8_t *)from + at, sizeof x);
        return f32_of_e4m3(x);
    }
    case EXPONENT: {
        u8x16 x;
        memcpy(&x, (const uint8_t *)from + at, sizeof x);
        return power_of_two(x);
    }
    default: {
        i8x16 x;
        memcpy(&x, (const int8_t *)from + at, sizeof x);
        return __builtin_convertvector(x, f32x16);
    }
    }
}

/* The first `count` of 16 numbers, zeros after them. */
INLINE f32x16 load_some(const void *from, int64_t at, int count, int dtype) {
    float few[LANES] = {0};
    for (int i = 0; i < count; i++) {
        if (dtype == FLOAT32) {
            few[i] = ((const float *)from)[at + i];
        } else if (dtype == FLOAT16) {
            few[i] = (float)((const _Float16 *)from)[at + i];
        } else {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[at + i] << 16;
            memcpy(&few[i], &bits, 4);
        }
    }
    f32x16 x;
    memcpy(&x, few, sizeof x);
    return x;
}

/* How many of the next 16 numbers of a row there are, of which `left` are left. */
INLINE int lanes_of(int64_t left) { return left < LANES ? (int)left : LANES; }

/* 16 numbers of a row of which `left` are left, zeros after its end. */
INLINE f32x16 load_up_to(const void *from, int64_t at, int64_t left, int dtype) {
    return left >= LANES ? load16(from, at, dtype) : load_some(from, at, left > 0 ? (int)left : 0, dtype);
}

/* The first `count` of 16 numbers of `size` bytes each. If the compiler knows how many, a copy is one operation, else a call. */
INLINE void copy_some(void *to, const void *from, int count, size_t size) {
    if (count == LANES)
        memcpy(to, from, LANES * size);
    else
        memcpy(to, from, (size_t)count * size);
}

/* The first `count` of 16 numbers to memory, rounded to a dtype. */
INLINE void store_some(void *to, int64_t at, int count, int dtype, f32x16 x) {
    if (dtype == FLOAT32) {
        copy_some((float *)to + at, &x, count, sizeof(float));
    } else if (dtype == FLOAT16) {
        f16x16 halves = __builtin_convertvector(x, f16x16);
        copy_some((_Float16 *)to + at, &halves, count, sizeof(_Float16));
    } else {
        u16x16 halves = bf16_of_f32(x);
        copy_some((uint16_t *)to + at, &halves, count, sizeof(uint16_t));
    }
}

/* a b + c of vectors, rounded once where the processor has an instruction for it: the same bits everywhere if a b is
 * exact. */
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
#define MULTIPLY_ADD(a, b, c) __builtin_elementwise_fma(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) { return MULTIPLY_ADD(a, b, c); }

INLINE float sum_of_lanes(f32x16 x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)

/* Lane i is the sum of the lanes of x[i], in the order of sum_of_lanes. */
INLINE f32x16 sums_of_16(const f32x16 *x) {
    f32x16 by_8[8], by_4[4], by_2[2];
    for (int i = 0; i < 8; i++)
        by_8[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  SHUFFLE(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        by_4[i] = SHUFFLE(by_8[2 * i], by_8[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  SHUFFLE(by_8[2 * i], by_8[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        by_2[i] = SHUFFLE(by_4[2 * i], by_4[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                  SHUFFLE(by_4[2 * i], by_4[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(by_2[0], by_2[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(by_2[0], by_2[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Rows of 16 numbers become columns. */
INLINE void transpose(u32x16 *x) {
    u32x16 y[LANES];
    for (int i = 0; i < 16; i += 2) {
        y[i] = SHUFFLE(x[i], x[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        y[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const u32x16 a = y[i + j], b = y[i + 2 + j];
            x[i + 2 * j] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            x[i + 2 * j + 1] = SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            const u32x16 a = x[i + j], b = x[i + 4 + j];
            y[i + j] = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            y[i + 4 + j] = SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = SHUFFLE(y[j], y[8 + j], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[8 + j] = SHUFFLE(y[j], y[8 + j], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

#endif
