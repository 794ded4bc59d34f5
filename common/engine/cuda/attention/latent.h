/* The kernels of a layer with latent attention (MLA; DeepSeek-V2, 2.1) beside its products and the
 * attention itself. A head's query has 128 values without position (nope) and 64 with it (rope);
 * keys and values of all heads come from one latent of 512 values, and one key part of 64 values is
 * common to all heads. kv_b is [heads][256][512] f16: a head's first 128 rows make keys from
 * latents, the others values. All pointers are device memory; every launch is asynchronous. */
#ifndef BT_CUDA_LATENT_H
#define BT_CUDA_LATENT_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/attention/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_LATENT      512
#define BT_LATENT_ROPE 64
#define BT_LATENT_ROW  576 /* values of a token in its page */
#define BT_LATENT_NOPE 128
#define BT_LATENT_V    128
#define BT_LATENT_HEAD 192 /* values of a head's query */

/* How RoPE turns 64 values. table: [positions][64], 32 cosines, then 32 sines. pairs: values 2i and
 * 2i + 1 turn together, otherwise i and i + 32. */
struct bt_cu_rope {
    const float *table;
    const int32_t *pos; /* [n] */
    bool pairs;
};

/* The first products' sums -> pages, and the input of the queries' second product. */
struct bt_cu_latent_append {
    const float *in;          /* [n][in_stride]: q_rank or other values, latent, key part */
    uint32_t in_stride;       /* the last 576 values of a row are latent and key part */
    const float *latent_norm; /* [512] */
    const float *q_norm;      /* [q_rank] */
    void *q;                  /* [n][q_rank] bf16 or f16: norm of the first q_rank values */
    bool q_f16;
    uint32_t q_rank; /* 0: no such norm; else a multiple of 4 */
    struct bt_cu_rope rope;
    const int32_t *slots; /* [n]; -1: padding */
    const int32_t *table;
    void *pool;                    /* rows of 576 values, as in mla.h: f16, or */
    bool e4m3;                     /* as bt_kv_latent_store makes them of the same f32 values */
    uint64_t page_rows, layer_row; /* as in mla.h */
    uint32_t n, page_tokens, table_stride;
    float eps;
};
/* Norm of the latent, RoPE of the key part, both to their page; norm of q. */
cudaError_t bt_cu_latent_append(const struct bt_cu_latent_append *a, cudaStream_t s);

struct bt_cu_latent_queries {
    const float *in; /* [n][in_stride], the heads' queries of 192 values first */
    const void *kv_b;
    void *out;
    struct bt_cu_rope rope;
    uint32_t in_stride, n, heads;
};
/* out [n][heads][192] f16: queries of prompts. in_stride is a multiple of 4. */
cudaError_t bt_cu_latent_queries(const struct bt_cu_latent_queries *a, cudaStream_t s);
/* out [n][heads][576] f16: queries of single tokens, multiplied by their head's key rows, so that
 * they are compared with the latents themselves. append: NULL, or what the same launch does, too;
 * neither needs the other's results. */
cudaError_t bt_cu_latent_absorb(const struct bt_cu_latent_queries *a,
                                const struct bt_cu_latent_append *append, cudaStream_t s);
/* mix [n][heads][512] f16, out [n][heads][128] bf16 or f16: the heads' outputs from mixes of
 * latents. */
cudaError_t bt_cu_latent_values(const void *mix, const void *kv_b, uint32_t n, uint32_t heads,
                                void *out, bool f16, cudaStream_t s);

struct bt_cu_latent_gather {
    const void *pool;
    bool e4m3; /* as in bt_cu_latent_append */
    uint64_t page_rows, layer_row;
    const struct bt_attn_span *spans; /* first: row of `latent` that the sequence begins at */
    uint32_t n_spans, rows;           /* rows: of all spans, each up to the next one's first */
    const int32_t *table;
    uint32_t table_stride, page_tokens;
    void *latent, *k_rope; /* [rows][512] and [rows][64] f16 */
};
/* The latents of sequences side by side, out of their pages. e4m3 times its scale is a number of
 * f16; key parts that f16 lacks become its nearest number. */
cudaError_t bt_cu_latent_gather(const struct bt_cu_latent_gather *a, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
