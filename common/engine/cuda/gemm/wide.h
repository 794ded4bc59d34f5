/* Products of many rows that end in what follows them: x * w^T with x [m][k] and w [n][k] in bf16,
 * sums in f32 and always in the same order. Bound by the tensor cores; for prompts. What a
 * pass over the sums would do happens while they are in registers, so they are never written. */
#ifndef BT_CUDA_WIDE_H
#define BT_CUDA_WIDE_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A Hopper device, n a multiple of 16, k of 8 and more than 256. */
bool bt_cu_wide_fits(uint32_t m, uint32_t n, uint32_t k);
/* w: gate's n / 2 rows, then up's. y[m][n / 2] = silu(gate) * up in bf16; not in x's place. */
cudaError_t bt_cu_wide_swiglu(const void *w, const void *x, void *y, uint32_t m, uint32_t n,
                              uint32_t k, cudaStream_t s);
/* w: rows of queries, keys and values. What bt_cu_append does with the product of a->n rows, whose
 * f32 is not needed (a->qkv is not read); pages in f16 alone. */
cudaError_t bt_cu_wide_append(const void *w, const void *x, uint32_t k,
                              const struct bt_cu_append *a, cudaStream_t s);
/* y[m][n] f32 (+)= the product over a part of k: steps [first, end) of 64 columns. The sums have
 * the same bits as those of skinny.h over the same columns. */
struct bt_cu_wide_part {
    uint32_t first, end;
};
cudaError_t bt_cu_wide_sum(const void *w, const void *x, float *y, uint32_t m, uint32_t n,
                           uint32_t k, struct bt_cu_wide_part part, bool add, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
