/* Between mla.c (create, shapes) and mla_wgmma.cu. */
#ifndef BT_CUDA_MLA_PRIV_H
#define BT_CUDA_MLA_PRIV_H

#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/attention/mla.h"

/* How the query rows of a sequence (queries x heads) are computed: `sets` times by a cluster of
 * `blocks` blocks that read the same KV, each for `columns` of the rows. */
struct bt_mla_shape {
    uint32_t columns; /* 16, 32 or 64: the product's N */
    uint32_t sets;
    uint32_t blocks; /* 1 or 2 */
};

struct bt_mla {
    struct bt_mla_pool pool;
    uint32_t max_batch, blocks, ahead;
    float scale_log2;
    CUtensorMap kv; /* box: 64 columns of a page */
    struct bt_cu_decode_plan *plan;
    struct bt_cu_decode_seq *seqs;
    struct bt_cu_decode_run *runs;
    uint32_t *arrived; /* [max_batch][groups of columns] pieces of the combine */
    float *part_o;     /* [blocks][2][columns x 512], in the order of the products' registers */
    float *part_ml;    /* [blocks][2][columns][2] */
    void *memory;
};

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t bt_mla_decode_wgmma(struct bt_mla *m, const struct bt_mla_decode *d,
                                const struct bt_mla_shape *shape, uint32_t layer_row,
                                cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
