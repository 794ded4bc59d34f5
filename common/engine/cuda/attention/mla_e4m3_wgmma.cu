/* Decode attention over latent KV (mla.h) in e4m3, on Hopper. mla_wgmma.cu explains what this
 * kernel has in common with it: the transposed products, the list of tiles, the pieces, and the
 * references of the softmax.
 *
 *   S^T [64 tokens x N]   = K [64 x 576] * Q^T          K from registers
 *   O^T [512 latent x N] += V^T [512 x 64] * P^T        V^T from registers
 *
 * A tile is a page as it lies in memory: 64 rows of 656 bytes (common/kv/latent.h), copied in one
 * piece. The warps that need a value as operand of a product read its byte and make f16 of it. So
 * nothing is written back to shared memory: 64 KiB of f16 would have to be written once and read
 * twice for each tile, and the bandwidth of shared memory would be the limit. In return each value
 * is converted twice, 1,024 instructions of a warp for each tile, 512 cycles of a multiprocessor.
 * The products take 68 instructions of N / 2 cycles. Rows are 656 bytes apart, that is four
 * banks more than a multiple of 32, so that eight rows of 16 bytes lie in different banks.
 *
 * A block has four warpgroups:
 *   0  copies: one thread
 *   1  scores: S^T, softmax, P
 *   2  the first 256 rows of O^T, in registers
 *   3  the others
 * With 64 columns the products are the limit. The second half's outputs then wait until the next
 * tile has its scores, so that products run during the softmax (mla_rows_wgmma.cu).
 *
 * More than 64 query rows take several blocks, which read the same KV: two of them are a cluster,
 * and so read it at about the same time. */
#include "common/engine/cuda/attention/mla_e4m3_outputs.cuh"
#include "common/engine/cuda/attention/mla_e4m3_scores.cuh"

/* ---- the copying warp ---- */

template <int N, int C>
static __device__ __forceinline__ void produce(const struct mla_args &a, const CUtensorMap *q_map,
                                               const uint8_t *kv, struct walk w, uint32_t smem,
                                               struct e4m3_shared *b)
{
    typedef e4m3_shape<N> at;
    const int lane = threadIdx.x % 32;
    struct ring r = {0, 1}, qr = {0, 1}; /* all stages are free at first */
    for (; walk_piece(w); walk_next(a, w)) {
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
                uint32_t bar = smem_addr(&b->full[r.at]);
                bar_wait(smem_addr(&b->empty[r.at]), r.phase);
                bar_expect(bar, E4M3_TILE);
                bulk_load(smem + at::tiles_at + r.at * E4M3_TILE, kv + (size_t)row * E4M3_ROW,
                          E4M3_TILE, bar, a.evict);
                if (t == 0) { /* behind the first tile, which need not wait for the last piece */
                    bar = smem_addr(&b->q_full[qr.at]);
                    bar_wait(smem_addr(&b->q_empty[qr.at]), qr.phase);
                    bar_expect(bar, at::q_bytes);
#pragma unroll 1
                    for (int i = 0; i < BOXES; i++) {
                        tma_load_2d(smem + qr.at * at::q_bytes + i * (N * 128), q_map, bar, i * 64,
                                    first_row(a, w) + group_of<C>(w) * N, TMA_EVICT_NORMAL);
                    }
                }
            }
            r.next(at::stages);
        }
        qr.next(at::q_stages);
    }
    __syncwarp();
}

/* ---- kernel and launch ---- */

template <int N> static __device__ __forceinline__ void init_barriers(struct e4m3_shared *b)
{
    for (uint32_t i = 0; i < e4m3_shape<N>::stages; i++) {
        bar_init(smem_addr(&b->full[i]), 1);
        bar_init(smem_addr(&b->empty[i]), 8);
    }
    for (int i = 0; i < WEIGHTS; i++) {
        bar_init(smem_addr(&b->scored[i]), 4);
        bar_init(smem_addr(&b->weighed[i]), 4);
        bar_init(smem_addr(&b->weights_empty[i]), 8);
        bar_init(smem_addr(&b->q_full[i]), 1);
        bar_init(smem_addr(&b->q_empty[i]), 4);
    }
    bar_init_fence();
}

template <int N> static __device__ __forceinline__ void score_regs(void)
{
    constexpr int AT_START = 65536 / THREADS;
    if constexpr (e4m3_shape<N>::score_regs > AT_START) {
        regs_take<e4m3_shape<N>::score_regs>();
    } else {
        regs_give<e4m3_shape<N>::score_regs>();
    }
}

template <int N, int C>
static __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1)
    mla_e4m3_kernel(const __grid_constant__ CUtensorMap q_map, const uint8_t *kv,
                    const __grid_constant__ mla_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    struct e4m3_shared *b = (struct e4m3_shared *)(smem + e4m3_shape<N>::shared_at);
    early_next();
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        init_barriers<N>(b);
    }
    __syncthreads();
    early_wait();
    struct walk w = run_walk<C>(a);
    if (threadIdx.x < 128) {
        regs_give<e4m3_shape<N>::copy_regs>();
        if (threadIdx.x < 32) {
            produce<N, C>(a, &q_map, kv, w, smem_addr(smem), b);
        }
    } else if (threadIdx.x < 128 * WG_OUT) {
        score_regs<N>();
        score_e4m3<N, C>(a, w, smem, b);
    } else {
        regs_take<e4m3_shape<N>::out_regs>();
        sum_e4m3<N, C>(a, w, smem, b);
    }
}

template <int N, int C>
static cudaError_t launch(struct bt_mla *m, const struct bt_mla_decode *d,
                          const struct mla_args &args, cudaStream_t s)
{
    const uint32_t bytes = e4m3_shape<N>::bytes, blocks = C == 1 ? m->blocks : m->clusters * 2;
    CUtensorMap q_map;
    cudaError_t e = mla_q_map(&q_map, args, d->tokens, N);
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(mla_e4m3_kernel<N, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)bytes);
    }
    return e == cudaSuccess ? launch_early(mla_e4m3_kernel<N, C>, blocks, THREADS, bytes, s, q_map,
                                           (const uint8_t *)m->pool.kv, args)
                            : e;
}

extern "C" cudaError_t bt_mla_decode_e4m3(struct bt_mla *m, const struct bt_mla_decode *d,
                                          const struct bt_mla_shape *shape, uint32_t layer_row,
                                          cudaStream_t s)
{
    const struct mla_args a = mla_args_of(m, d, shape, layer_row);
    switch (shape->columns) {
    case 16: return launch<16, 1>(m, d, a, s);
    case 32: return launch<32, 1>(m, d, a, s);
    case 64: return shape->blocks == 2 ? launch<64, 2>(m, d, a, s) : launch<64, 1>(m, d, a, s);
    default: return cudaErrorInvalidValue;
    }
}
