/* e^x in 16 lanes, the same bits everywhere: a polynomial after Cody and Waite's reduction, as in Cephes' expf. */
#ifndef TLLM_EXPONENTIAL_H
#define TLLM_EXPONENTIAL_H

#include "vectors.h"

#define HIDDEN -2e30f /* the score of a key that a row of attention does not see: its exponential, beside LEAST, is 0 */
#define LEAST -1e30f  /* the largest score of a row before it has seen any */

/* Relative error below 2e-7. 0 below -87.3; largest at 88.7, where it would leave float32. NaN stays NaN. */
INLINE f32x16 exponential(f32x16 x) {
    f32x16 limit = splat(88.37f), least = splat(-87.33f);
    i32x16 is_tiny = x < least, is_nan = x != x;
    f32x16 bounded = blend(is_tiny, least, lesser(x, limit));
    bounded = (f32x16)((i32x16)bounded & ~is_nan);
    /* x = n ln 2 + rest: n to the nearest by adding and taking away 1.5 * 2^23 */
    f32x16 shifted = bounded * 1.44269504f + 12582912.0f;
    f32x16 n = shifted - 12582912.0f;
    f32x16 rest = bounded - n * 0.693359375f;
    rest = rest - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 y = p * (f32x16)exponent;
    y = (f32x16)((i32x16)y & ~is_tiny);
    return blend(is_nan, x, y);
}

INLINE f32x16 sigmoid(f32x16 x) { return splat(1) / (1 + exponential(-x)); }

INLINE f32x16 hyperbolic_tangent(f32x16 x) { return 2 * sigmoid(2 * x) - 1; }

#endif
