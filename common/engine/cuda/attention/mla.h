/* Decode attention of models with latent attention (MLA; DeepSeek-V2, 2.1), on Hopper. The pages
 * have one row of 576 values for each token: the latent (512), then the key part with RoPE (64), as
 * f16 or with the latent as e4m3, see common/kv/layout.h. The queries are absorbed, that is
 * multiplied by the key half of kv_b_proj, so that all heads share the row as their key and the
 * latent as their value. The result is a mix of latents; the value half of kv_b_proj makes the
 * heads' outputs of it. It is f16, as that product reads it. Row 0 of a page's segment: layer_row +
 * page * page_rows. All pointers are device memory unless they say host. Every launch is
 * asynchronous on its stream. The blocks of a decode wait for each other, so two decodes must not
 * run at once on a device (streams, or processes under MPS): each could hold the multiprocessors
 * that the other one waits for. */
#ifndef BT_CUDA_MLA_H
#define BT_CUDA_MLA_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/attention/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_MLA_LATENT      512
#define BT_MLA_ROW         576 /* values: latent and RoPE part */
#define BT_MLA_PAGE_TOKENS 64
#define BT_MLA_MAX_HEADS   128
#define BT_MLA_MAX_BATCH   8192
#define BT_MLA_MAX_QUERIES 8 /* query tokens of a sequence in one step */

/* A row in e4m3 (common/kv/latent.h), in bytes: latent, scales, key part. */
#define BT_MLA_E4M3_ROW    656
#define BT_MLA_E4M3_SCALES 512
#define BT_MLA_E4M3_ROPE   528

struct bt_mla_pool {
    const void *kv;     /* aligned to 16 bytes */
    uint64_t rows;      /* of the whole pool; below 2^31 */
    uint32_t page_rows; /* from a segment to the same layer's segment of the next page */
    uint32_t heads;     /* query heads, 1 to 128 */
    float scale;        /* of the scores, above 0. It does not follow from the row: the heads that
                           the model was trained with have 192 dimensions, and YaRN adds a factor */
    bool e4m3;          /* rows of BT_MLA_E4M3_ROW bytes instead of 576 f16 values */
    uint32_t segment;   /* tokens of bt_mla_invariant's smallest segments (segments.cuh), a multiple
                           of 64; 0: not used. f16 pools alone */
};

struct bt_mla; /* tensor map, plan and scratch for one pool */

/* max_batch: sequences or items of a step, at most BT_MLA_MAX_BATCH. cudaErrorInvalidValue: a shape
 * that the kernel lacks; cudaErrorNotSupported: the device is not a Hopper GPU. */
cudaError_t bt_mla_create(const struct bt_mla_pool *pool, uint32_t max_batch, struct bt_mla **m_p);
void bt_mla_destroy(struct bt_mla *m);

struct bt_mla_decode {
    const void *q; /* [tokens][heads][576] f16, aligned to 16 bytes */
    void *out;     /* [tokens][heads][512] f16, aligned to 16 bytes; zeros where a query sees
                      nothing */
    uint32_t tokens;
    uint32_t most;        /* as in the plan */
    const int32_t *table; /* page ids, table_stride of them in a row */
    uint32_t table_stride;
};

/* Splits the step's KV over the multiprocessors by tokens; once per step, before the decodes of all
 * its layers. most: the largest n of the queries, 1 to 8; each sequence takes the time of so many.
 */
cudaError_t bt_mla_decode_plan(struct bt_mla *m, const struct bt_attn_queries *queries, uint32_t n,
                               uint32_t most, cudaStream_t s);
/* The plan's queries, whose rows must be in the pages already. cudaErrorInvalidValue: n or most is
 * out of range, or q or out is not aligned. */
cudaError_t bt_mla_decode(struct bt_mla *m, const struct bt_mla_decode *d, uint32_t layer_row,
                          cudaStream_t s);

/* Attention of single tokens and of prompts in this one form. A token's result has the same bits
 * whatever the other tokens are and however they are divided into items: KV is cut at the
 * same positions for all, a segment is summed by itself from its first token to its last, and the
 * segments are added up in their order. */
struct bt_mla_invariant {
    const void *q;          /* [tokens][heads][576] f16, aligned to 16 bytes */
    void *out;              /* [tokens][heads][512] f16, aligned to 16 bytes */
    uint32_t tokens;        /* of q */
    uint32_t n_items, most; /* as in the plan */
    const int32_t *table;
    uint32_t table_stride;
};
/* The most tokens of an item. */
uint32_t bt_mla_item_tokens(uint32_t heads);
/* Once per step, as bt_mla_decode_plan. most: tokens of the largest item; items' len is not read.
 */
cudaError_t bt_mla_invariant_plan(struct bt_mla *m, const struct bt_attn_item *items,
                                  uint32_t n_items, uint32_t most, cudaStream_t s);
/* The tokens' rows must be in the pages already. cudaErrorInvalidValue: the pool has no segments,
 * or something is out of range or not aligned. */
cudaError_t bt_mla_invariant(struct bt_mla *m, const struct bt_mla_invariant *d, uint32_t layer_row,
                             cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
