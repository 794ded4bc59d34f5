/* Decode attention over latent KV (mla.h) on Hopper. A token's 1,152 bytes serve all query heads,
 * as key (576 values) and as value (the first 512), so they are read once and never copied.
 *
 * The products are transposed, so that the query rows of a sequence are the dimension N of WGMMA,
 * which can be small. Tokens and latent values fill its 64 rows whatever the number of heads:
 *   S^T [64 tokens x N]   = K [64 x 576] * Q^T          K and Q from shared memory
 *   O^T [512 latent x N] += V^T [512 x 64] * P^T        V^T is K's tile, with M contiguous
 *
 * A block has four warpgroups:
 *   0  copies: one warp, with the copy engine. A tile is a page: nine boxes of 64 x 64 values.
 *   1  scores: S^T, softmax, P. P replaces the tile's RoPE box, which only the scores read.
 *   2  the first 256 rows of O^T, in registers
 *   3  the others
 * While 1 computes the weights of a tile, 2 and 3 sum the outputs of the one before. There are two
 * tiles in shared memory; a further one waits in the L2 cache. Each quarter of a tile's latent
 * values is copied anew as soon as its warpgroup has summed it.
 *
 * Softmax: the weights of a column are relative to a reference, which is its largest score in the
 * piece's first tile. The reference rises only if a weight would leave the range of f16. So most
 * tiles need neither a maximum per column nor a change of O^T.
 *
 * The tiles of all sequences are one list, cut evenly over the blocks (plan.cu). A sequence that
 * lies within one block's run is written at once. The block that finishes the last piece of a cut
 * sequence adds up all pieces, in their order.
 *
 * More than 64 query rows take several blocks, which read the same KV. Two of them are a cluster:
 * each copies half of a tile into both, so the L2 cache gives out each byte once.
 *
 * Least time of a tile on one multiprocessor (at 1.75 GHz and 4.3 TB/s for all): its bytes take
 * 3,960 cycles. Products of N columns take 68 instructions of N / 2 cycles, but at least the 16 to
 * 20 cycles that the A operand takes out of shared memory: 1,360 at N = 16 or 32, 2,180 at 64. Two
 * blocks that share the bytes (1,980 cycles each) are bound by the products. */
#include "common/engine/cuda/attention/mla_outputs.cuh"
#include "common/engine/cuda/attention/mla_scores.cuh"

/* ---- the copying warp ---- */

template <int C>
static __device__ __forceinline__ void copy_boxes(const struct mla_args &a, const CUtensorMap *map,
                                                  uint32_t to, uint32_t bar, uint32_t rank, int row,
                                                  int from, int n)
{
    bar_expect(bar, n * BOX);
#pragma unroll 1
    for (int i = from; i < from + n; i++) {
        if (C == 1) {
            tma_load_2d(to + i * BOX, map, bar, i * 64, row, a.evict);
        } else if (i % 2 == (int)rank) {
            tma_load_2d_both(to + i * BOX, map, bar, i * 64, row);
        }
    }
}

template <int N, int C>
static __device__ __forceinline__ void produce(const struct mla_args &a, const CUtensorMap *q_map,
                                               const CUtensorMap *kv_map, struct walk w,
                                               uint32_t smem, struct mla_shared *b)
{
    typedef shape<N, C> at;
    const int lane = threadIdx.x % 32;
    const uint32_t rank = C == 1 ? 0 : cluster_rank();
    struct ring r = {0, 1}, qr = {0, 1}; /* all stages are free at first */
    for (; walk_piece(w); walk_next(a, w)) {
        const int32_t *table = a.table + (size_t)w.slot * a.table_stride;
        const int last = (w.s.len - 1) / TOKENS;
        int ids = 0, more = table[min(w.tile + lane, last)];
        for (int t = 0; t < w.n; t++) {
            if (t % 32 == 0) {
                ids = more;
                more = table[min(w.tile + t + 32 + lane, last)];
            }
            int soon = t % 32 + (int)a.ahead;
            int row = __shfl_sync(~0u, ids, t % 32) * (int)a.page_rows + (int)a.layer_row;
            int later = __shfl_sync(~0u, soon < 32 ? ids : more, soon % 32);
            if (lane == 0) {
                uint32_t to = smem + r.at * TILE;
#pragma unroll 1
                for (int part = 0; part < PARTS; part++) {
                    bar_wait(smem_addr(&b->empty[r.at][part]), r.phase);
                    copy_boxes<C>(a, kv_map, to, smem_addr(&b->full[r.at][part]), rank, row,
                                  part * 2, part < PARTS - 1 ? 2 : 1);
                }
                if (t == 0) { /* behind the first tile, which need not wait for the last piece */
                    uint32_t bar = smem_addr(&b->q_full[qr.at]);
                    bar_wait(smem_addr(&b->q_empty[qr.at]), qr.phase);
                    bar_expect(bar, at::q_bytes);
#pragma unroll 1
                    for (int i = 0; i < BOXES; i++) {
                        tma_load_3d(smem + at::q_at + qr.at * at::q_bytes + i * (N * 128), q_map,
                                    bar, i * 64, group_of<C>(w) * N, w.seq);
                    }
                }
                if (a.ahead && rank == 0 && t + (int)a.ahead < w.n) {
                    size_t at_row = (size_t)later * a.page_rows + a.layer_row;
                    bulk_prefetch(a.kv + at_row * (BT_MLA_ROW * 2), TILE);
                }
            }
            r.next(STAGES);
        }
        qr.next(at::q_stages);
    }
    __syncwarp();
}

/* ---- kernel and launch ---- */

template <int N, int C>
static __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1)
    mla_kernel(const __grid_constant__ CUtensorMap q_map,
               const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ mla_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ struct mla_shared b;
    early_next();
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        tma_prefetch(&kv_map);
        for (int i = 0; i < STAGES; i++) {
            for (int part = 0; part < PARTS; part++) {
                bar_init(smem_addr(&b.full[i][part]), 1);
                bar_init(smem_addr(&b.empty[i][part]), (part < PARTS - 1 ? 4 : 8) * C);
            }
            bar_init(smem_addr(&b.weighed[i]), 4);
            bar_init(smem_addr(&b.q_full[i]), 1);
            bar_init(smem_addr(&b.q_empty[i]), 4);
        }
        bar_init_fence();
    }
    if (C == 1) {
        __syncthreads();
    } else {
        cluster_sync(); /* the other block has initialized its barriers */
    }
    early_wait();
    struct bt_cu_decode_run run = run_at(a.runs + blockIdx.x / C);
    struct walk w = {run.seq, run.head, run.tile, run.n, 0, 0, {}};
    walk_seq(a, w);
    if (threadIdx.x < 128) {
        regs_give<shape<N, C>::copy_regs>();
        if (threadIdx.x < 32) {
            produce<N, C>(a, &q_map, &kv_map, w, smem_addr(smem), &b);
        }
    } else if (threadIdx.x < 128 * WG_OUT) {
        if constexpr (N == 64) {
            regs_give<shape<N, C>::score_regs>();
        } else {
            regs_take<shape<N, C>::score_regs>();
        }
        score<N, C>(a, w, smem, &b);
    } else {
        regs_take<shape<N, C>::sum_regs>();
        sum<N, C>(a, w, smem_addr(smem), &b);
    }
    if (C > 1) {
        cluster_sync(); /* neither block ends while the other copies to it or arrives at its
                           barriers */
    }
}

template <int N, int C>
static cudaError_t launch(struct bt_mla *m, const struct bt_mla_decode *d,
                          const struct mla_args &args, cudaStream_t s)
{
    /* A box that has more rows than the sequence gets zeros for them. */
    const uint64_t dims[3] = {BT_MLA_ROW, args.rows, d->batch};
    const uint64_t strides[2] = {BT_MLA_ROW * 2, (uint64_t)args.rows * BT_MLA_ROW * 2};
    const uint32_t box[3] = {64, N, 1};
    CUtensorMap q_map;
    cudaError_t e = bt_cu_tensor_map(&q_map, BT_CU_F16, d->q, 3, dims, strides, box);
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(mla_kernel<N, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shape<N, C>::bytes);
    }
    return e == cudaSuccess ? launch_early(mla_kernel<N, C>, m->blocks / C * C, THREADS,
                                           shape<N, C>::bytes, s, q_map, m->kv, args)
                            : e;
}

extern "C" cudaError_t bt_mla_decode_wgmma(struct bt_mla *m, const struct bt_mla_decode *d,
                                           const struct bt_mla_shape *shape, uint32_t layer_row,
                                           cudaStream_t s)
{
    struct mla_args a = {};
    a.out = (__half *)d->out;
    a.kv = (const uint8_t *)m->pool.kv;
    a.slots = d->slots;
    a.table = d->table;
    a.table_stride = d->table_stride;
    a.page_rows = m->pool.page_rows;
    a.layer_row = layer_row;
    a.kv_heads = shape->sets;
    a.heads = m->pool.heads;
    a.rows = m->pool.heads * d->queries;
    a.queries = d->queries;
    a.ahead = m->ahead;
    a.scale_log2 = m->scale_log2;
    a.evict = shape->sets == 1 ? TMA_EVICT_FIRST : TMA_EVICT_NORMAL;
    a.plan = m->plan;
    a.seqs = m->seqs;
    a.runs = m->runs;
    a.arrived = m->arrived;
    a.part_o = m->part_o;
    a.part_ml = m->part_ml;
    if (shape->blocks == 2) {
        return launch<64, 2>(m, d, a, s);
    }
    switch (shape->columns) {
    case 16: return launch<16, 1>(m, d, a, s);
    case 32: return launch<32, 1>(m, d, a, s);
    case 64: return launch<64, 1>(m, d, a, s);
    default: return cudaErrorInvalidValue;
    }
}
