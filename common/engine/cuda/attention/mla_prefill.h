/* Prefill attention of models with latent attention (MLA; DeepSeek-V2, 2.1), on Hopper. Prompts are
 * computed with keys and values of each head, which kv_b_proj makes of the latents: a key has 128
 * dimensions of its own and 64 with RoPE that all heads share, a value has 128. That is a third of
 * the arithmetic of the absorbed form (mla.h), which reads latents as they are.
 * All pointers are device memory unless they say host. A launch is asynchronous on its stream. */
#ifndef BT_CUDA_MLA_PREFILL_H
#define BT_CUDA_MLA_PREFILL_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BT_MLA_HEAD_NOPE  128 /* dimensions of a key without position */
#define BT_MLA_HEAD_ROPE  64
#define BT_MLA_HEAD_VALUE 128
#define BT_MLA_HEAD_Q     (BT_MLA_HEAD_NOPE + BT_MLA_HEAD_ROPE)
#define BT_MLA_HEAD_KV    (BT_MLA_HEAD_NOPE + BT_MLA_HEAD_VALUE)

/* Consecutive query tokens of one sequence, at most bt_mla_prefill_tokens() of them. */
struct bt_mla_prefill_item {
    int32_t row;   /* of the first token in q and out */
    int32_t n;     /* tokens */
    int32_t pos;   /* position of the first */
    int32_t first; /* row in kv and k_rope of the sequence's position 0 */
};

struct bt_mla_prefill {
    const void *q;      /* f16 [rows][heads][192], the part without position first */
    void *out;          /* bf16 or f16 [rows][heads][128] */
    const void *kv;     /* f16 [kv_rows][heads][256]: key without position, then value */
    const void *k_rope; /* f16 [kv_rows][64] */
    uint64_t q_stride, out_stride, kv_stride, rope_stride; /* values from row to row */
    uint32_t heads, rows, kv_rows;
    const struct bt_mla_prefill_item *items; /* largest pos first balances best */
    uint32_t n_items;
    float scale; /* of the scores, above 0 */
    bool out_f16;
    uint32_t *tickets; /* [2], 0 before the first launch and after each. Launches that may run at
                          the same time need their own */
};

/* Query tokens that fit an item. */
uint32_t bt_mla_prefill_tokens(void);

/* Causal attention: the query at position p sees rows first to first + p of kv and k_rope. Rows
 * that no query of an item sees may hold anything, NaN too. cudaErrorInvalidValue: q, kv, k_rope or
 * one of their strides is not a multiple of 16 bytes, out of 4 bytes; heads, rows, kv_rows or scale
 * is 0. cudaErrorNotSupported: the device is not a Hopper GPU. */
cudaError_t bt_mla_prefill(const struct bt_mla_prefill *f, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
