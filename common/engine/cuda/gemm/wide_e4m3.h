/* Products of many rows in e4m3, with scales, that end in what follows them: y = x * w^T. For
 * prompts of models with fp8 weights. Sums of 128 columns in the tensor cores (about 14 bits),
 * added in f32 and always in the same order. */
#ifndef BT_CUDA_WIDE_E4M3_H
#define BT_CUDA_WIDE_E4M3_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bt_cu_wide_e4m3 {
    struct bt_cu_weight w;    /* [n][k], BLOCKS or ROWS */
    struct bt_cu_e4m3_rows x; /* [m][k] */
    uint32_t m, n, k;
};

/* A Hopper device, n a multiple of 16, k of 128. */
bool bt_cu_wide_e4m3_fits(uint32_t m, uint32_t n, uint32_t k);
/* y[m][n] f32 (+)= the product */
cudaError_t bt_cu_wide_e4m3_sum(const struct bt_cu_wide_e4m3 *p, float *y, bool add,
                                cudaStream_t s);
/* w: gate's n / 2 rows, then up's, n / 2 a multiple of 16 (BLOCKS: of 128). to[m][n / 2] =
 * silu(gate)
 * * up, rounded to e4m3; not in x's place. */
cudaError_t bt_cu_wide_e4m3_swiglu(const struct bt_cu_wide_e4m3 *p,
                                   const struct bt_cu_e4m3_rows *to, cudaStream_t s);
/* w: rows of queries, keys and values. What bt_cu_append does with the product, whose f32 is not
 * needed (a->qkv is not read); pages in f16 alone, heads of 64, 128 or 256. */
cudaError_t bt_cu_wide_e4m3_append(const struct bt_cu_wide_e4m3 *p, const struct bt_cu_append *a,
                                   cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
