/* Products of numbers of bfloat16 two by two: csrc/bfloat16_pairs.c. */
#ifndef TLLM_BFLOAT16_PAIRS_H
#define TLLM_BFLOAT16_PAIRS_H

#include "vectors.h"

#define PAIR (2 * LANES) /* columns that are multiplied at a time */

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if HAS_PAIRS

/* y [rows, outputs] = x [rows, columns] W^T, both of bfloat16, with columns a multiple of PAIR; `scratch` has room for rows x
 * columns of 32 bits. */
void multiply_by_pairs(const uint16_t *weight, int64_t outputs, int64_t columns, const uint16_t *x, int64_t rows, void *y,
                       int y_dtype, uint16_t *scratch, int threads);

#endif

#endif
