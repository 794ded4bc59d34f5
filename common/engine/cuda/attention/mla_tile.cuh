/* What the warpgroups of the MLA decode kernel (mla_wgmma.cu) share: sizes, arguments, shared
 * memory. Device code only. */
#ifndef BT_CUDA_MLA_TILE_CUH
#define BT_CUDA_MLA_TILE_CUH

#include "common/engine/cuda/attention/mla_priv.h"

#include <math.h>
#include <stddef.h>

#include "common/engine/cuda/attention/runs.cuh"
#include "common/engine/cuda/hopper.cuh"
#include "common/engine/cuda/mma.cuh"

#define TOKENS   BT_MLA_PAGE_TOKENS
#define BOXES    (BT_MLA_ROW / 64)
#define BOX      (TOKENS * 128) /* bytes */
#define TILE     (BOXES * BOX)
#define P_BOX    (BOXES - 1)
#define STAGES   2
#define PARTS    5 /* of a tile: two boxes each, and RoPE; two parts for each outputs' warpgroup */
#define THREADS  512
#define WG_OUT   2  /* first warpgroup that sums outputs */
#define NAMED_S  1  /* barriers: of the scores' warpgroup, */
#define NAMED_O  2  /* of the outputs' */
#define BIAS     4  /* log2 of the weight at the reference */
#define LIMIT    14 /* log2 of the largest weight */
#define SMEM_MAX 232448

struct mla_args {
    __half *out;
    const uint8_t *kv;
    const int32_t *slots, *table;
    uint32_t table_stride, page_rows, layer_row;
    uint32_t kv_heads;                    /* sets */
    uint32_t heads, rows, queries, ahead; /* rows: queries x heads */
    float scale_log2;
    uint64_t evict;
    const struct bt_cu_decode_plan *plan;
    const struct bt_cu_decode_seq *seqs;
    const struct bt_cu_decode_run *runs;
    uint32_t *arrived;
    float *part_o, *part_ml;
};

struct mla_shared {
    uint64_t full[STAGES][PARTS], empty[STAGES][PARTS], weighed[STAGES], q_full[2], q_empty[2];
    /* Of the tile in a stage, valid from `weighed` until the outputs' warpgroups release it. */
    float factor[STAGES][64]; /* of earlier outputs, if raised */
    float m[STAGES][64];      /* piece's last tile: reference, and the warps' sums of weights */
    float l[STAGES][4][64];
    float top[4][64];               /* largest score of the warps' tokens */
    float total_m[64], total_f[64]; /* of a block that combines: references and inverse sums */
    int raised[STAGES];
    int last; /* this block combines */
};
/* Threads read two columns of these at once. */
static_assert(offsetof(struct mla_shared, factor) % sizeof(float2) == 0 &&
                  offsetof(struct mla_shared, total_m) % sizeof(float2) == 0 &&
                  offsetof(struct mla_shared, total_f) % sizeof(float2) == 0 &&
                  alignof(struct mla_shared) % sizeof(float2) == 0,
              "pairs of columns are not aligned");

/* N columns of query rows, C blocks in a cluster. */
template <int N, int C> struct shape {
    static constexpr uint32_t q_bytes = N * BT_MLA_ROW * 2, q_stages = N == 64 ? 1 : 2;
    static constexpr uint32_t q_at = STAGES * TILE, bytes = q_at + q_stages * q_bytes;
    /* Registers of the roles; together 512. */
    static constexpr int copy_regs = N == 64 ? 32 : 88, score_regs = N == 64 ? 96 : 136;
    static constexpr int sum_regs = N == 64 ? 192 : 144;
    static_assert(bytes + sizeof(struct mla_shared) + 1024 <= SMEM_MAX, "tiles do not fit");
};

/* The query rows of this block: [group * N, ...) of the sequence. */
template <int C> static __device__ __forceinline__ int group_of(const struct walk &w)
{
    return C == 1 ? w.head : w.head * C + (int)cluster_rank();
}

#endif
