/* Products of several rows by vectors: csrc/vector_products.c. */
#ifndef TLLM_VECTOR_PRODUCTS_H
#define TLLM_VECTOR_PRODUCTS_H

#include "packed_weight.h"

#define VECTORS_TURN 32 /* rows that share what is read of a weight */

/* Rows [row, last), at most a turn, of y for one block. */
void multiply_rows_by_vectors(const Product *p, int64_t block, int64_t row, int64_t last);

#endif
