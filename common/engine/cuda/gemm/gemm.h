/* Products of activations with weights through cuBLASLt: y[m][n] (+)= a[m][k] * w[n][k]^T, a and w
 * in bf16, or both in e4m3 with scales; sums in f32. Algorithms are chosen once per shape. Also
 * remembers which products of few rows are left to skinny.h. One thread. */
#ifndef BT_CUDA_GEMM_H
#define BT_CUDA_GEMM_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/gemm/skinny.h"

/* Up to so many rows, tiles of 128 to 256 rows are few, and one more row may cost a wave of them:
 * what is best changes from step to step. */
#define BT_CU_CLOSE_ROWS 1536u
#define BT_CU_CLOSE_STEP 64u

#define BT_CU_GEMM_PROPOSALS 32u

struct bt_cu_gemm;

cudaError_t bt_cu_gemm_create(struct bt_cu_gemm **g_p);
void bt_cu_gemm_destroy(struct bt_cu_gemm *g);
/* y is f32, or bf16 if so said. add: y += (f32 only). cudaErrorUnknown: cuBLASLt refused. */
cudaError_t bt_cu_gemm_run(struct bt_cu_gemm *g, const void *w, const void *a, void *y, uint32_t m,
                           uint32_t n, uint32_t k, bool bf16, bool add, cudaStream_t s);
/* The same with w, a and y in f16, for values that bf16 would round more. */
cudaError_t bt_cu_gemm_run_f16(struct bt_cu_gemm *g, const void *w, const void *a, void *y,
                               uint32_t m, uint32_t n, uint32_t k, cudaStream_t s);
/* The least number of rows, m or more, whose algorithm m rows take where theirs was not timed. */
uint32_t bt_cu_gemm_bucket(uint32_t m);
/* Times cuBLASLt's first `proposals` (at most BT_CU_GEMM_PROPOSALS) for this shape on the device
 * and keeps the fastest. w: weights of several layers, so that each use reads memory and no cache.
 */
cudaError_t bt_cu_gemm_tune(struct bt_cu_gemm *g, const void *const *w, uint32_t layers,
                            const void *a, void *y, uint32_t m, uint32_t n, uint32_t k, bool bf16,
                            bool add, uint32_t proposals, cudaStream_t s);

/* The same with e4m3 weights and activations. On Hopper a product of 128 columns is summed in the
 * tensor cores with less than f32's bits (about 14); cuBLASLt adds these sums, times their scales,
 * in f32. y has room for bt_cu_e4m3_stride(m) rows; those from m on are undefined afterwards. */
struct bt_cu_e4m3_product {
    struct bt_cu_weight w; /* BLOCKS or ROWS */
    struct bt_cu_e4m3_rows a;
    void *y;
    uint32_t m, n, k;
    bool bf16, add;
};
/* A Hopper device, n a multiple of 16, k of 128. */
bool bt_cu_gemm_e4m3_fits(uint32_t n, uint32_t k);
cudaError_t bt_cu_gemm_e4m3_run(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *p,
                                cudaStream_t s);
/* p->w is not used: w[i] are of the same kind. */
cudaError_t bt_cu_gemm_e4m3_tune(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *p,
                                 const struct bt_cu_weight *w, uint32_t layers, uint32_t proposals,
                                 cudaStream_t s);

/* The way of skinny.h that this product takes with as many rows, up to a power of two of them; -1:
 * none, as at first (e4m3: then way 0 where gemv.cu does not fit). Set takes some products' ways
 * and forgets what is beyond. */
int bt_cu_gemm_way(const struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                   enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end);
void bt_cu_gemm_set_way(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end, int way);

#endif
