/* Between attention.c (create, choice of kernels), plan.cu and the kernels. */
#ifndef BT_CUDA_ATTN_PRIV_H
#define BT_CUDA_ATTN_PRIV_H

#include "common/engine/cuda/attention/attention.h"
#include "common/engine/cuda/tensor_map.h"

#define DECODE_TILE 64 /* tokens that the decode kernel's warps take at once */

/* Work of a decode step: the tiles of all (sequence, kv head), one after another, cut into equal
 * runs, one per block of the grid. A sequence and head that lies in several runs has its pieces
 * combined by the block that finishes last. */
struct bt_cu_decode_seq {
    int32_t first; /* tiles of the sequences before it, one head each; MLA: not used */
    int32_t tiles; /* of one head */
    int32_t tile0; /* first tile that the window shows */
    int32_t len;
    int32_t row, n, slot; /* as in struct bt_attn_queries */
    int32_t pad;
};
struct bt_cu_decode_run {
    int32_t seq, head, tile; /* where it begins */
    int32_t n;               /* tiles; 0: none */
};
struct bt_cu_decode_plan {
    int32_t total, runs; /* tiles; runs of at least one tile */
    int32_t pad[2];
};

/* The at-th of n segments that a row sees, whose results lie from part `first` on. n 0: no part. */
struct bt_attn_part {
    int32_t first, n, at;
};
/* What a launch computes at a time, for each KV head: an item, or a segment of one. */
struct bt_attn_unit {
    int32_t item;
    int32_t segment, part, parts; /* part: the first of KV head 0; parts 0: all segments */
};
/* Of bt_attn_prefill with `invariant`; device memory. */
struct bt_attn_segments {
    uint32_t tokens; /* of the smallest segments; 0: none */
    struct bt_attn_unit *units;
    int32_t *n_units;
    float *kept; /* [blocks][threads][head_dim / 2]: a thread's outputs of the segments so far */
    float *part_o, *part_ml; /* [parts][group][head_dim] and [2] */
    uint32_t *arrived;       /* [parts]: those of a row that are written; 0 between launches */
};
#define BT_ATTN_PARTS 8192u /* with more, single tokens are not divided */

struct bt_attn {
    struct bt_attn_pool pool;
    uint32_t max_batch, blocks;
    uint32_t shared;      /* bytes of shared memory that a block may have */
    uint32_t columns;     /* decode: query rows (tokens x heads of a group) of an entry */
    bool hopper;          /* else the kernels for sm_80 and newer, and no tensor maps */
    CUtensorMap kv_pair;  /* box: 128 bytes of a row (or all) x K and V of a page's head */
    CUtensorMap kv_plane; /* the same of K or V; not for E4M3 */
    float scale_log2;
    struct bt_cu_decode_plan *plan;
    struct bt_cu_decode_seq *seqs;
    struct bt_cu_decode_run *decode_runs;
    uint32_t *arrived; /* [max_batch][kv_heads] pieces of the combine */
    float *part_o;     /* [blocks][2][columns][head_dim] */
    float *part_ml;    /* [blocks][2][columns][2] */
    uint32_t *tickets; /* prefill: next tile, finished blocks */
    struct bt_attn_segments segments;
    void *memory, *segments_memory;
};

#ifdef __cplusplus
extern "C" {
#endif

/* One piece of device memory, all zeros, for n tables; *places[i]: the i-th, of sizes[i] bytes. */
cudaError_t bt_cu_take(void **memory_p, const size_t *sizes, void **const *places, int n);

/* attention.h's calls, by Hopper's copy engine (and WGMMA) or by cp.async and mma.sync. */
cudaError_t bt_attn_decode_tma(struct bt_attn *a, const struct bt_attn_decode *d,
                               uint32_t layer_row, cudaStream_t s);
cudaError_t bt_attn_decode_mma(struct bt_attn *a, const struct bt_attn_decode *d,
                               uint32_t layer_row, cudaStream_t s);
cudaError_t bt_attn_prefill_tma(struct bt_attn *a, const struct bt_attn_prefill *f,
                                uint32_t layer_row, cudaStream_t s);
cudaError_t bt_attn_prefill_mma(struct bt_attn *a, const struct bt_attn_prefill *f,
                                uint32_t layer_row, cudaStream_t s);
/* The most query rows of an entry for which shared memory has room; 0: not even a token's. */
uint32_t bt_attn_decode_columns(const struct bt_attn *a);

#ifdef __cplusplus
}
#endif

#endif
