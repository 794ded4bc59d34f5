/* Attention over paged KV: what the launches take. The pool is one run of rows of head_dim values
 * (f16 or bf16, or e4m3 with scales); a segment (common/kv/layout.h) is kv_heads x {K, V} x
 * page_tokens of them, and the scales.
 * Row 0 of a segment: layer_row + page * page_rows, so that pools ordered by page or by layer both
 * fit. Page ids are int32, one table row of table_stride ids per sequence slot. All pointers are
 * device memory unless they say host. Every launch is asynchronous on its stream. */
#ifndef BT_CUDA_ATTN_H
#define BT_CUDA_ATTN_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/value.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bt_attn_pool {
    const void *kv;
    uint64_t rows;            /* of the whole pool; below 2^31 */
    uint32_t page_rows;       /* from a segment to the same layer's segment of the next page */
    uint32_t page_tokens;     /* 16, 32 or 64 */
    uint32_t heads, kv_heads; /* heads / kv_heads: 1 to 16 */
    uint32_t head_dim;        /* 64, 128 or 256 */
    int type;                 /* of q and KV; BT_CU_E4M3: of KV, q is f16 */
    uint32_t scale_row;       /* E4M3: rows from a segment to its scales */
    int out_type;             /* of the output */
    uint32_t window;          /* a token sees itself and the window - 1 before it; 0: all */
    float scale;              /* of the scores; 0: 1 / sqrt(head_dim) */
    uint32_t segment;         /* tokens of the smallest segments of invariant prefills
                                 (segments.cuh), a multiple of 128; 0: there are none */
    uint32_t items;           /* most items of such a prefill */
};

struct bt_attn; /* tensor maps and scratch for one pool */

/* max_batch: entries of a decode step. cudaErrorInvalidValue: a shape that
 * the kernels lack, or for which the device has too little shared memory. An E4M3 pool has no
 * prefill: chunks attend to pages that bt_attn_expand wrote. */
cudaError_t bt_attn_create(const struct bt_attn_pool *pool, uint32_t max_batch,
                           struct bt_attn **attn_p);
void bt_attn_destroy(struct bt_attn *a);

/* A sequence's query tokens in a decode step: a new token, and drafts behind it. Query j sees the
 * first len - n + 1 + j tokens of the sequence. */
struct bt_attn_queries {
    int32_t row;  /* of the first in q and out; the others follow */
    int32_t n;    /* at most bt_attn_decode_most */
    int32_t slot; /* row of table */
    int32_t len;  /* tokens in the pages, the queries' own included; 0: the entry is left out */
};

/* Tokens at the end of a sequence that a step may write, if it has drafts: more than a row with
 * drafts has. */
#define BT_ATTN_FRESH 32

struct bt_attn_decode {
    const void *q; /* [rows][heads][head_dim], q_stride values from row to row */
    void *out;     /* the same with out_stride */
    uint32_t q_stride, out_stride;
    uint32_t most; /* as in the plan */
    const int32_t *table;
    uint32_t table_stride;
    uint32_t fresh; /* last tokens of a sequence that the step writes: 1, or up to BT_ATTN_FRESH */
    /* KV of earlier steps is asked for while the kernel launched right before still runs. All that
     * this one reads but q and each sequence's fresh tokens, which that kernel may write, must have
     * been there when it began: plan, table, the other KV. */
    bool early;
};

/* Query tokens that fit an entry. More tokens of a sequence take several entries, and KV is read
 * for each. */
uint32_t bt_attn_decode_most(const struct bt_attn *a);
/* Splits the step's KV over the multiprocessors by tokens; once per step, before the decodes of all
 * its layers. most: the largest n, 1 to bt_attn_decode_most; steps of single tokens have kernels of
 * their own. */
cudaError_t bt_attn_decode_plan(struct bt_attn *a, const struct bt_attn_queries *queries,
                                uint32_t n, uint32_t most, cudaStream_t s);
/* Attention of the plan's queries, whose K and V must be in the pages already. */
cudaError_t bt_attn_decode(struct bt_attn *a, const struct bt_attn_decode *d, uint32_t layer_row,
                           cudaStream_t s);

/* Consecutive query tokens of one sequence, at most bt_attn_prefill_tokens of them. */
struct bt_attn_item {
    int32_t row;  /* of the first token in q and out */
    int32_t n;    /* tokens */
    int32_t pos;  /* position of the first */
    int32_t slot; /* row of table */
    int32_t len;  /* tokens of the sequence that are in its pages, these included */
    int32_t pad[3];
};

struct bt_attn_prefill {
    const void *q;
    void *out;
    uint32_t q_stride, out_stride, rows; /* rows: of q */
    const struct bt_attn_item *items;    /* [n_items]; largest pos first balances best */
    uint32_t n_items;
    const int32_t *table;
    uint32_t table_stride;
    /* A token's result depends on neither the other tokens nor on how they are divided into items:
     * KV is cut at the same positions for all, and what a token gets from each segment is added up
     * from the last one to the first. Needs bt_attn_segments_plan. On Hopper only; about a
     * tenth slower. */
    bool invariant;
};

/* Query tokens that fit an item. */
uint32_t bt_attn_prefill_tokens(const struct bt_attn *a);
/* Shares the segments of an invariant prefill's single tokens among the multiprocessors; once per
 * step, before the prefills of all its layers. cudaErrorInvalidValue: the pool has no segments, or
 * more items than bt_attn_create was told. */
cudaError_t bt_attn_segments_plan(struct bt_attn *a, const struct bt_attn_item *items,
                                  uint32_t n_items, cudaStream_t s);
/* Causal attention of prompt chunks over their prefix and themselves, all in pages.
 * cudaErrorNotSupported: invariant, and the device is not a Hopper GPU. */
cudaError_t bt_attn_prefill(struct bt_attn *a, const struct bt_attn_prefill *p, uint32_t layer_row,
                            cudaStream_t s);

/* The first pages of one sequence. */
struct bt_attn_span {
    int32_t slot;  /* row of table */
    int32_t first; /* page of `to` that its first page goes to; rising in a list */
};

/* Writes spans' pages of one layer of an E4M3 pool to an f16 pool of one layer (`to`: page i is
 * page i, layer_row 0), `pages` of them, each span up to the next one's first. */
cudaError_t bt_attn_expand(const struct bt_attn *from, uint32_t layer_row, void *to,
                           const struct bt_attn_span *spans, uint32_t n_spans, uint32_t pages,
                           const int32_t *table, uint32_t table_stride, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
