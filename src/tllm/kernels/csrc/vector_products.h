/* Products of several rows by vectors: csrc/vector_products.c. */
#ifndef TLLM_VECTOR_PRODUCTS_H
#define TLLM_VECTOR_PRODUCTS_H

#include "packed_weight.h"

#define VECTORS_TURN 32 /* rows that share what is read of a weight */

/* What steps of the products of several rows with weights like this one begin with: `into` has room for two of each group. */
void sum_steps(StepSums into, const QuantizedRows *x, const PackedWeight *w);

/* Rows [row, last), at most a turn, of y for one block; the product has the sums of steps for such weights. */
void multiply_rows_by_vectors(const Product *p, int64_t block, int64_t row, int64_t last);

#endif
