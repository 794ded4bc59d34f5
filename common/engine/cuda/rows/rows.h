/* The kernels between the products: one pass over a step's rows each. All pointers are device
 * memory; every launch is asynchronous on its stream. Activations are bf16, the residual stream and
 * sums f32. */
#ifndef BT_CUDA_ROWS_H
#define BT_CUDA_ROWS_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/engine/cuda/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_CU_ID_LAST (-1) /* the token its slot sampled last, on the device */

/* Copies bytes, a multiple of 16 as both addresses, from the host's pinned memory. One block: for
 * a few KB. */
cudaError_t bt_cu_fetch(const void *pinned, void *to, size_t bytes, cudaStream_t s);
struct bt_cu_embed {
    const int32_t *ids, *slots, *pos; /* [n]; slot -1: the row is padding, zeros */
    const int32_t *last_token;        /* of each slot, for BT_CU_ID_LAST */
    const void *embed, *positions;    /* [ids][hidden] and [positions][hidden] bf16, or NULL */
    uint32_t n, hidden;
    float *x; /* [n][hidden] */
};
/* x[t] = embed[id of t] + positions[position of t] */
cudaError_t bt_cu_embed(const struct bt_cu_embed *a, cudaStream_t s);
/* a[t] = norm(x[rows ? rows[t] : t]) * w in bf16. */
cudaError_t bt_cu_norm(const float *x, const int32_t *rows, const float *w, uint32_t n,
                       uint32_t hidden, float eps, void *a, cudaStream_t s);
struct bt_cu_layer_norm {
    float *x;            /* [n][hidden], or more rows where `rows` chooses some */
    const int32_t *rows; /* NULL: all */
    const float *add;    /* [hidden], or NULL: the bias of the product that x was added to */
    bool keep;           /* x += add; not with rows */
    const float *w, *bias;
    uint32_t n, hidden;
    float eps;
    void *a;
};
/* a[t] = (x + add - mean) / sqrt(variance + eps) * w + bias in bf16 (Ba et al. 2016), of rows[t].
 */
cudaError_t bt_cu_layer_norm(const struct bt_cu_layer_norm *a, cudaStream_t s);
/* a = gelu(y + bias) in bf16, by the tanh form (Hendrycks and Gimpel 2016); y [n][width] f32. */
cudaError_t bt_cu_gelu(const float *y, const float *bias, uint32_t n, uint32_t width, void *a,
                       cudaStream_t s);
/* bt_cu_norm in f16, limited to its range. */
cudaError_t bt_cu_norm_f16(const float *x, const int32_t *rows, const float *w, uint32_t n,
                           uint32_t hidden, float eps, void *a, cudaStream_t s);
/* a = silu(gate) * up; gu [n][2 * inter] bf16, a [n][inter] bf16. */
cudaError_t bt_cu_swiglu(const void *gu, uint32_t n, uint32_t inter, void *a, cudaStream_t s);

struct bt_cu_append {                    /* QKV product -> queries and pages */
    const float *qkv;                    /* [n][(heads + 2 kv_heads) * head_dim] */
    const float *bias, *q_norm, *k_norm; /* may be NULL */
    const float *rope;                   /* [positions][head_dim]: cosines, sines */
    const int32_t *pos, *slots;          /* [n]; slot -1: padding */
    const int32_t *table;
    void *q; /* [n][heads * head_dim] f16 */
    void *pool;
    bool e4m3;                                /* else f16 */
    uint64_t page_rows, layer_row, scale_row; /* as in attention.h */
    uint32_t n, heads, kv_heads, head_dim, page_tokens, table_stride;
    float eps;
};
/* Bias, QK norm, RoPE; K and V go to their pages as f16 or as e4m3 with their scales. */
cudaError_t bt_cu_append(const struct bt_cu_append *a, cudaStream_t s);

/* Whether gemv.cu is for products of m rows with weights [n][k]: m up to 8, and not so long a k
 * that cuBLASLt was measured faster. */
bool bt_cu_gemv_fits(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind);
/* y[m][n] (+)= x[m][k] * w[n][k]^T; x bf16, or f16 if w is e4m3. */
cudaError_t bt_cu_gemv(struct bt_cu_weight w, const void *x, float *y, uint32_t m, uint32_t n,
                       uint32_t k, bool add, cudaStream_t s);
/* w: gate's n / 2 rows, then up's. y[m][n / 2] = silu(gate) * up, as x; not in x's place. */
cudaError_t bt_cu_gemv_swiglu(struct bt_cu_weight w, const void *x, void *y, uint32_t m, uint32_t n,
                              uint32_t k, cudaStream_t s);

/* Makes n (even) bf16 values f16 in their place. */
cudaError_t bt_cu_bf16_to_f16(void *w, size_t n, cudaStream_t s);
/* Random values of about the size that trained weights have. */
cudaError_t bt_cu_dummy_bf16(void *w, size_t n, float sigma, uint32_t seed, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
