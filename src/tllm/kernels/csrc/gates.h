/* Gates of gated linear units: their activations, and the loop over rows in which gates and ups lie side by side. */
#ifndef TLLM_GATES_H
#define TLLM_GATES_H

#include "exponential.h"

enum { SILU, GELU_TANH };

/* act(gate), and its slope there. */
INLINE f32x16 activated(f32x16 gate, const int activation, f32x16 *slope) {
    if (activation == SILU) {
        const f32x16 share = sigmoid(gate), act = gate * share;
        *slope = share + act * (1 - share);
        return act;
    }
    const f32x16 near = lesser(splat(12), greater(splat(-12), gate)); /* beyond, it is 0 or the gate itself */
    const f32x16 square = 0.044715f * near * near;
    const f32x16 share = sigmoid(near * 1.59576912f * (1 + square)); /* (1 + tanh(x)) / 2 = sigmoid(2 x) */
    *slope = share + near * share * (1 - share) * 1.59576912f * (1 + 3 * square);
    return gate * share;
}

/* gates_of(of, row, column, left, dtype, activation) for 16 columns at a time of rows [first, last), or for the `left` at a
 * row's end. What the compiler knows is not asked for each vector: the dtype and activation of most models. */
#define FOR_GATES_AS(gates_of, of, first, last, width, dtype, activation)                      \
    for (int64_t row = first, whole = (width) / LANES * LANES; row < last; row++) {            \
        for (int64_t k = 0; k < whole; k += LANES) gates_of(of, row, k, LANES, dtype, activation); \
        if (whole < (width)) gates_of(of, row, whole, (width) - whole, dtype, activation);     \
    }

#define FOR_GATES(gates_of, of, first, last, width, dtype, activation)                  \
    do {                                                                                \
        if (dtype == BFLOAT16 && activation == SILU) {                                  \
            FOR_GATES_AS(gates_of, of, first, last, width, BFLOAT16, SILU)              \
        } else if (dtype == FLOAT32 && activation == SILU) {                            \
            FOR_GATES_AS(gates_of, of, first, last, width, FLOAT32, SILU)               \
        } else {                                                                        \
            FOR_GATES_AS(gates_of, of, first, last, width, dtype, activation)           \
        }                                                                               \
    } while (0)

#endif
