/* Decode attention over latent KV (mla.h) on Hopper for more than 32 query rows of a sequence: a
 * block takes 64 of them as dimension M of its products. mla_wgmma.cu, for fewer rows, explains
 * what both kernels have in common: the list of tiles, the pieces, and the references of the
 * softmax.
 *
 *   S [64 rows x 64 tokens] = Q [64 x 576] * K^T          Q from registers and shared memory
 *   O [64 rows x 512]      += P [64 x 64] * V [64 x 512]  V is K's tile, with N contiguous
 *
 * A block has four warpgroups:
 *   0  copies: one warp
 *   1  scores: S, softmax, P. P replaces the tile's RoPE box, which only the scores read.
 *   2  the first 256 columns of O, in 128 registers a thread
 *   3  the others
 *
 * Four of the nine boxes of Q are in registers. So shared memory has room for two and a half tiles:
 * a ring of five halves (four boxes of 64 x 64 values), and three RoPE boxes. A half is copied anew
 * as soon as its warpgroup has summed it.
 *
 * The products of a tile take 36 * 32 + 8 * 128 = 2,176 cycles, whatever the order, if there is
 * always one to execute. The scores and the outputs of the tile before run together; they would end
 * together, too, and nothing would run during the softmax. So the second half's outputs wait until
 * the next tile has its scores. The first half's do not, as the tile after the next one needs their
 * place.
 *
 * More than 64 query rows take several blocks, which read the same KV. Two of them are a cluster:
 * each copies half of a tile into both, so the L2 cache gives out each byte once. */
#include "common/engine/cuda/attention/mla_rows_outputs.cuh"
#include "common/engine/cuda/attention/mla_rows_scores.cuh"

/* ---- the copying warp ---- */

template <int C>
static __device__ __forceinline__ void copy(const struct mla_args &a, const CUtensorMap *map,
                                            uint32_t to, uint32_t bar, uint32_t rank, int row,
                                            int from, int n)
{
    bar_expect(bar, n * BOX);
#pragma unroll 1
    for (int i = from; i < from + n; i++, to += BOX) {
        if (C == 1) {
            tma_load_2d(to, map, bar, i * 64, row, a.evict);
        } else if (i % 2 == (int)rank) {
            tma_load_2d_both(to, map, bar, i * 64, row);
        }
    }
}

template <int C, bool FIXED>
static __device__ __forceinline__ void produce(const struct mla_args &a, const CUtensorMap *q_map,
                                               const CUtensorMap *kv_map, struct walk w,
                                               uint32_t smem, struct rows_shared *b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t rank = C == 1 ? 0 : cluster_rank();
    struct ring h = {0, 1}, r = {0, 1}; /* all is free at first */
    uint32_t q_phase = 1;
    bool begins = true;
    for (; piece<FIXED>(a, w); walk_next(a, w)) {
        const int32_t *table = a.table + (size_t)w.s.slot * a.table_stride;
        const int last = (w.s.len - 1) / TOKENS;
        int ids = 0, more = table[min(w.tile + lane, last)];
        for (int t = 0; t < w.n; t++) {
            if (t % 32 == 0) {
                ids = more;
                more = table[min(w.tile + t + 32 + lane, last)];
            }
            int row = __shfl_sync(~0u, ids, t % 32) * (int)a.page_rows + (int)a.layer_row;
            if (lane == 0) {
#pragma unroll 1
                for (int from = 0; from < BOXES - 1; from += 4) {
                    bar_wait(smem_addr(&b->empty[h.at]), h.phase);
                    copy<C>(a, kv_map, smem + h.at * HALF, smem_addr(&b->full[h.at]), rank, row,
                            from, 4);
                    h.next(HALVES);
                }
                if (t == 0 &&
                    begins) { /* behind the first tile, which need not wait for the last piece */
                    uint32_t bar = smem_addr(&b->q_full);
                    bar_wait(smem_addr(&b->q_empty), q_phase);
                    bar_expect(bar, (BOXES - Q_REGS) * BOX);
#pragma unroll 1
                    for (int i = Q_REGS; i < BOXES; i++) {
                        tma_load_2d(smem + Q_AT + (i - Q_REGS) * BOX, q_map, bar, i * 64,
                                    first_row(a, w) + group_of<C>(w) * ROWS, TMA_EVICT_NORMAL);
                    }
                }
                bar_wait(smem_addr(&b->rope_empty[r.at]), r.phase);
                copy<C>(a, kv_map, smem + ROPE_AT + r.at * BOX, smem_addr(&b->rope_full[r.at]),
                        rank, row, BOXES - 1, 1);
            }
            r.next(ROPES);
        }
        q_phase ^= begins;
        begins = ends<FIXED>(w);
    }
    __syncwarp();
}

/* ---- kernel and launch ---- */

static __device__ __forceinline__ void init_barriers(struct rows_shared *b, int blocks)
{
    for (int i = 0; i < HALVES; i++) {
        bar_init(smem_addr(&b->full[i]), 1);
        bar_init(smem_addr(&b->empty[i]), 4 * blocks);
    }
    for (int i = 0; i < ROPES; i++) {
        bar_init(smem_addr(&b->rope_full[i]), 1);
        bar_init(smem_addr(&b->rope_empty[i]), 8 * blocks);
        bar_init(smem_addr(&b->scored[i]), 4);
        bar_init(smem_addr(&b->weighed[i]), 4);
    }
    bar_init(smem_addr(&b->q_full), 1);
    bar_init(smem_addr(&b->q_empty), 4);
    bar_init_fence();
}

template <int C, bool FIXED>
static __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1)
    mla_rows_kernel(const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ mla_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    struct rows_shared *b = (struct rows_shared *)(smem + SHARED);
    early_next();
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        tma_prefetch(&kv_map);
        init_barriers(b, C);
    }
    if (C == 1) {
        __syncthreads();
    } else {
        cluster_sync(); /* the other block has initialized its barriers */
    }
    early_wait();
    struct walk w = run_walk<C>(a);
    if (threadIdx.x < 128) {
        regs_give<24>();
        if (threadIdx.x < 32) {
            produce<C, FIXED>(a, &q_map, &kv_map, w, smem_addr(smem), b);
        }
    } else if (threadIdx.x < 128 * WG_OUT) {
        regs_take<168>();
        score<C, FIXED>(a, w, smem, b);
    } else {
        regs_take<160>();
        sum<C, FIXED>(a, w, smem_addr(smem), b);
    }
    if (C > 1) {
        cluster_sync(); /* neither block ends while the other copies to it or arrives at its
                           barriers */
    }
}

#define SHARED_BYTES (SHARED + sizeof(struct rows_shared))

extern "C" cudaError_t bt_mla_rows_clusters(uint32_t blocks, uint32_t *clusters_p)
{
    cudaLaunchAttribute pair[1];
    cudaLaunchConfig_t c = {};
    int n = 0;
    pair[0].id = cudaLaunchAttributeClusterDimension;
    pair[0].val.clusterDim.x = 2;
    pair[0].val.clusterDim.y = pair[0].val.clusterDim.z = 1;
    c.gridDim = dim3(blocks / 2 * 2);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = SHARED_BYTES;
    c.attrs = pair;
    c.numAttrs = 1;
    cudaError_t e = cudaFuncSetAttribute(
        mla_rows_kernel<2, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)SHARED_BYTES);
    if (e == cudaSuccess) {
        e = cudaOccupancyMaxActiveClusters(&n, mla_rows_kernel<2, false>, &c);
    }
    *clusters_p = (uint32_t)n;
    return e == cudaSuccess && n == 0 ? cudaErrorNotSupported : e;
}

/* tokens: of q. */
template <int C, bool FIXED>
static cudaError_t launch(struct bt_mla *m, const struct mla_args &args, uint32_t tokens,
                          cudaStream_t s)
{
    const uint32_t bytes = SHARED_BYTES, blocks = C == 1 ? m->blocks : m->clusters * 2;
    CUtensorMap q_map;
    cudaError_t e = mla_q_map(&q_map, args, tokens, ROWS);
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(mla_rows_kernel<C, FIXED>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    }
    return e == cudaSuccess ? launch_early(mla_rows_kernel<C, FIXED>, blocks, THREADS, bytes, s,
                                           q_map, m->kv, args)
                            : e;
}

extern "C" cudaError_t bt_mla_decode_rows(struct bt_mla *m, const struct bt_mla_decode *d,
                                          const struct bt_mla_shape *shape, uint32_t layer_row,
                                          cudaStream_t s)
{
    const struct mla_args a = mla_args_of(m, d, shape, layer_row);
    return shape->blocks == 2 ? launch<2, false>(m, a, d->tokens, s)
                              : launch<1, false>(m, a, d->tokens, s);
}

extern "C" cudaError_t bt_mla_invariant_rows(struct bt_mla *m, const struct bt_mla_invariant *d,
                                             const struct bt_mla_shape *shape, uint32_t layer_row,
                                             cudaStream_t s)
{
    const struct bt_mla_decode decode = {.q = d->q,
                                         .out = d->out,
                                         .tokens = d->tokens,
                                         .most = d->most,
                                         .table = d->table,
                                         .table_stride = d->table_stride};
    struct mla_args a = mla_args_of(m, &decode, shape, layer_row);
    a.unit = (int)m->pool.segment / TOKENS;
    a.evict = d->most > 1 ? TMA_EVICT_NORMAL : TMA_EVICT_FIRST; /* a prompt's items share KV */
    a.kept = m->blocks;
    return shape->blocks == 2 ? launch<2, true>(m, a, d->tokens, s)
                              : launch<1, true>(m, a, d->tokens, s);
}
