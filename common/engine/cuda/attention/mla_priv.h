/* Between mla.c (create, shapes) and the decode kernels. */
#ifndef BT_CUDA_MLA_PRIV_H
#define BT_CUDA_MLA_PRIV_H

#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/attention/mla.h"

/* How the query rows of a sequence (queries x heads) are computed: `sets` times by a cluster of
 * `blocks` blocks that read the same KV, each for `columns` of the rows. */
struct bt_mla_shape {
    uint32_t columns; /* 16 or 32: mla_wgmma.cu; 64: mla_rows_wgmma.cu; e4m3: mla_e4m3_wgmma.cu */
    uint32_t sets;
    uint32_t blocks; /* 1 or 2 */
};

/* Which runs (attention_priv.h) have pieces of a sequence and set. If these are several, each
 * leaves a part of the result. */
struct bt_mla_cut {
    int32_t first, last;
    int32_t slot; /* of the part of run `first`: 1 if the run has pieces before it. Others: 0.
                     bt_mla_invariant: number of the first segment's part */
    int32_t pad;
};

/* Parts of segments that a launch of bt_mla_invariant may have: eight for each of 132
 * multiprocessors. A sequence that finds none is not divided. */
#define BT_MLA_SEGMENT_PARTS 1056u

struct bt_mla {
    struct bt_mla_pool pool;
    uint32_t max_batch, blocks;
    uint32_t clusters; /* of two blocks that fit on the device at once */
    float scale_log2;
    CUtensorMap kv; /* box: 64 columns of a page */
    struct bt_cu_decode_seq *seqs;
    struct bt_cu_decode_run *runs;
    struct bt_mla_cut *cuts; /* [max_batch][sets] */
    uint32_t *arrived;       /* [max_batch][groups of rows][2]: counts of parts */
    /* Parts: [blocks][2], or with segments [blocks + BT_MLA_SEGMENT_PARTS]. */
    float *part_o;  /* of [columns x 512], in the order of the products' registers */
    float *part_ml; /* of [columns][2] */
    void *memory;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the plan of a step: seqs, runs and cuts. pieces: about how many a sequence may have. */
cudaError_t bt_mla_plan(struct bt_mla *m, const struct bt_attn_queries *queries, uint32_t n,
                        const struct bt_mla_shape *shape, uint32_t pieces, cudaStream_t s);
/* The same for items. */
cudaError_t bt_mla_items_plan(struct bt_mla *m, const struct bt_attn_item *items, uint32_t n,
                              const struct bt_mla_shape *shape, cudaStream_t s);
/* How many clusters of two blocks of bt_mla_decode_rows run at once on a device of `blocks`
 * multiprocessors. */
cudaError_t bt_mla_rows_clusters(uint32_t blocks, uint32_t *clusters_p);
cudaError_t bt_mla_decode_wgmma(struct bt_mla *m, const struct bt_mla_decode *d,
                                const struct bt_mla_shape *shape, uint32_t layer_row,
                                cudaStream_t s);
cudaError_t bt_mla_decode_rows(struct bt_mla *m, const struct bt_mla_decode *d,
                               const struct bt_mla_shape *shape, uint32_t layer_row,
                               cudaStream_t s);
/* Any number of columns, for a pool in e4m3. Takes no more shared memory than bt_mla_decode_rows,
 * so that as many clusters run at once. */
cudaError_t bt_mla_decode_e4m3(struct bt_mla *m, const struct bt_mla_decode *d,
                               const struct bt_mla_shape *shape, uint32_t layer_row,
                               cudaStream_t s);
cudaError_t bt_mla_invariant_rows(struct bt_mla *m, const struct bt_mla_invariant *d,
                                  const struct bt_mla_shape *shape, uint32_t layer_row,
                                  cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
