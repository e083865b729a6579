/* The kernels that a recording may have, as they are called. */
#ifndef TLLM_RECORDED_CALLS_H
#define TLLM_RECORDED_CALLS_H

#include <stdint.h>

typedef struct WeightPart WeightPart;
typedef struct Attention Attention;
typedef struct CacheRows CacheRows;
typedef struct SharedSum SharedSum;

void tllm_quantized_matmul(const WeightPart *parts, int64_t count, const int64_t *first_rows, int64_t experts,
                           const void *x, int x_dtype, void *y, int64_t stride, int y_dtype, void *scratch, int way,
                           int threads);
void tllm_float_matmul(const void *weight, int w_dtype, int64_t outputs, int64_t columns, const void *x, int x_dtype,
                       int64_t rows, void *y, int y_dtype, float *scratch, int way, int threads);
void tllm_bfloat16_matmul(const void *weight, int64_t outputs, int64_t columns, const void *x, int64_t rows, void *y,
                          void *scratch, int threads);
void tllm_rms_norm(const void *x, int dtype, int64_t rows, int64_t width, const void *weight, int w_dtype, float eps,
                   int adds_one, void *y, int threads);
void tllm_gated(const void *x, int dtype, int64_t rows, int64_t width, int activation, void *y, int threads);
void tllm_rotate(void *x, int dtype, int64_t rows, int64_t stride, int64_t heads, int64_t width, int64_t dim,
                 const void *cos, const void *sin);
void tllm_add(const void *x, const void *y, int dtype, int64_t rows, int64_t width, int64_t y_stride, void *sum);
void tllm_scale(const void *x, int dtype, int64_t count, float factor, void *y);
void tllm_convert(const void *x, int dtype, int64_t count, void *y, int y_dtype);
void tllm_copy_rows(const void *x, int64_t rows, int64_t bytes, int64_t stride, int64_t before, int64_t after, void *y);
void tllm_paged_attention(const Attention *attention, int threads);
void tllm_write_codes(const CacheRows *rows, int threads);
int tllm_shared_sum(SharedSum *sum, void *x, int64_t count, int dtype);

#endif
