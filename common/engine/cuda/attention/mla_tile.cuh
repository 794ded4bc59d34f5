/* What the warpgroups of the MLA decode kernel (mla_wgmma.cu) share: sizes, arguments, shared
 * memory. Device code only. */
#ifndef BT_CUDA_MLA_TILE_CUH
#define BT_CUDA_MLA_TILE_CUH

#include "common/engine/cuda/attention/mla_priv.h"

#include <math.h>

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
    const __half *q;
    __half *out;
    const int32_t *table;
    uint32_t table_stride, page_rows, layer_row;
    uint32_t kv_heads; /* sets */
    uint32_t heads;
    float scale_log2;
    uint64_t evict;
    const struct bt_cu_decode_seq *seqs;
    const struct bt_cu_decode_run *runs;
    const struct bt_mla_cut *cuts;
    uint32_t *arrived;
    float *part_o, *part_ml;
    int unit;      /* of segments, in tiles; 0: sequences are cut anywhere */
    uint32_t kept; /* parts that blocks keep for themselves */
};

/* Of the sequence whose pieces the block adds up. */
struct mla_totals {
    float m[64], f[64]; /* of the query rows: references and inverse sums */
};

/* What the outputs need beside the weights of a tile, of two tiles: valid from `weighed` until the
 * outputs' warpgroups release the weights. Threads read two columns of these at once. */
struct __align__(sizeof(float2)) mla_weights
{
    float factor[2][64]; /* of earlier outputs, if raised */
    float m[2][64];      /* piece's last tile: reference, and the warps' sums of weights */
    float l[2][4][64];
    float top[4][64]; /* largest score of the warps' tokens */
    struct mla_totals total;
    int raised[2];
};

struct mla_shared {
    uint64_t full[STAGES][PARTS], empty[STAGES][PARTS], weighed[STAGES], q_full[2], q_empty[2];
    struct mla_weights w; /* of the tile in a stage */
};
static_assert(STAGES == 2, "mla_weights has place for two tiles");

/* N columns of query rows. */
template <int N> struct shape {
    static constexpr uint32_t q_bytes = N * BT_MLA_ROW * 2, q_stages = 2;
    static constexpr uint32_t q_at = STAGES * TILE, bytes = q_at + q_stages * q_bytes;
    static_assert(bytes + sizeof(struct mla_shared) + 1024 <= SMEM_MAX, "tiles do not fit");
};

static inline struct mla_args mla_args_of(const struct bt_mla *m, const struct bt_mla_decode *d,
                                          const struct bt_mla_shape *shape, uint32_t layer_row)
{
    struct mla_args a = {};
    a.q = (const __half *)d->q;
    a.out = (__half *)d->out;
    a.table = d->table;
    a.table_stride = d->table_stride;
    a.page_rows = m->pool.page_rows;
    a.layer_row = layer_row;
    a.kv_heads = shape->sets;
    a.heads = m->pool.heads;
    a.scale_log2 = m->scale_log2;
    a.evict = shape->sets == 1 ? TMA_EVICT_FIRST : TMA_EVICT_NORMAL;
    a.seqs = m->seqs;
    a.runs = m->runs;
    a.cuts = m->cuts;
    a.arrived = m->arrived;
    a.part_o = m->part_o;
    a.part_ml = m->part_ml;
    return a;
}

/* The tensor map of the queries of `tokens` tokens; its box: 64 columns of `rows` query rows. A box
 * that has more rows than the sequence gets those of others behind it, or zeros at the end. Nothing
 * of them is stored. */
static inline cudaError_t mla_q_map(CUtensorMap *map, const struct mla_args &a, uint32_t tokens,
                                    uint32_t rows)
{
    const uint64_t dims[2] = {BT_MLA_ROW, (uint64_t)tokens * a.heads};
    const uint64_t strides[1] = {BT_MLA_ROW * 2};
    const uint32_t box[2] = {64, rows};
    return bt_cu_tensor_map(map, BT_CU_F16, a.q, 2, dims, strides, box);
}

/* Query rows of the sequence (tokens x heads), and where they begin in q and out. */
static __device__ __forceinline__ int rows_of(const struct mla_args &a, const struct walk &w)
{
    return w.s.n * (int)a.heads;
}
static __device__ __forceinline__ int first_row(const struct mla_args &a, const struct walk &w)
{
    return w.s.row * (int)a.heads;
}

/* A warp's arrival at a barrier, in all C blocks of a cluster: all its threads have done what the
 * waiting ones rely on. */
template <int C> static __device__ __forceinline__ void release(uint64_t *barrier)
{
    __syncwarp();
    if (C == 1) {
        if (threadIdx.x % 32 == 0) {
            bar_arrive(smem_addr(barrier));
        }
    } else if (threadIdx.x % 32 < C) {
        cluster_arrive(smem_addr(barrier), threadIdx.x % 32);
    }
}

/* The query rows of this block: [group * N, ...) of the sequence. */
template <int C> static __device__ __forceinline__ int group_of(const struct walk &w)
{
    return C == 1 ? w.head : w.head * C + (int)cluster_rank();
}

#endif
