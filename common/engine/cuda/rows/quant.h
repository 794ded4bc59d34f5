/* Rounding to e4m3 with scales: activations for fp8 products, and a model's weights while they are
 * loaded. In both, 16 neighbouring columns are in the order of weight.h. All pointers are device
 * memory; every launch is asynchronous on its stream. */
#ifndef BT_CUDA_QUANT_H
#define BT_CUDA_QUANT_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to = norm(x) * w as bt_cu_norm, rounded to e4m3 instead of bf16. */
cudaError_t bt_cu_norm_e4m3(const float *x, const float *w, uint32_t m, uint32_t hidden, float eps,
                            const struct bt_cu_e4m3_rows *to, cudaStream_t s);
/* to = silu(gate) * up as bt_cu_swiglu; gu [m][2 * inter] bf16. */
cudaError_t bt_cu_swiglu_e4m3(const void *gu, uint32_t m, uint32_t inter,
                              const struct bt_cu_e4m3_rows *to, cudaStream_t s);
/* to = a [m][k] f16 */
cudaError_t bt_cu_rows_e4m3(const void *a, uint32_t m, uint32_t k, const struct bt_cu_e4m3_rows *to,
                            cudaStream_t s);

/* Rounds bf16 [n][k] to blocks (BT_CU_WEIGHT_BLOCKS), with the same results as bt_fp8_quantize
 * (common/engine/fp8.h). *bad is set to 1 if a value is not finite. */
cudaError_t bt_cu_quantize(const void *from, uint32_t n, uint32_t k, uint8_t *w, float *scale,
                           uint32_t *bad, cudaStream_t s);
/* Brings e4m3 values into the order of weight.h. *bad is set to 1 if one is not a number. */
cudaError_t bt_cu_order(const uint8_t *from, uint32_t n, uint32_t k, uint8_t *w, uint32_t *bad,
                        cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
