/* Decode attention over latent KV (mla.h) on Hopper, for up to 32 query rows of a sequence; more
 * are mla_rows_wgmma.cu's. A token's 1,152 bytes serve all query heads, as key (576 values) and as
 * value (the first 512), so they are read once and never copied.
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
 * tiles in shared memory. Each quarter of a tile's latent values is copied anew as soon as its
 * warpgroup has summed it.
 *
 * Softmax: the weights of a query row are relative to a reference, which is its largest score in
 * the piece's first tile. The reference rises only if a weight would leave the range of f16. So
 * most tiles need neither a maximum nor a change of O.
 *
 * Each block has a run of tiles (mla_plan.cu). A sequence that lies within one run is written at
 * once. The blocks that have pieces of a cut sequence add them up together (mla_pieces.cuh).
 *
 * Least time of a tile on one multiprocessor (at 1.75 GHz and 4.3 TB/s for all): its bytes take
 * 3,960 cycles. Its products take 68 instructions of N / 2 cycles, but at least the 16 to 20 cycles
 * that the A operand takes out of shared memory: 1,360. */
#include "common/engine/cuda/attention/mla_outputs.cuh"
#include "common/engine/cuda/attention/mla_scores.cuh"

/* ---- the copying warp ---- */

static __device__ __forceinline__ void copy_boxes(const CUtensorMap *map, uint32_t to, uint32_t bar,
                                                  int row, int from, int n)
{
    bar_expect(bar, n * BOX);
#pragma unroll 1
    for (int i = from; i < from + n; i++) {
        tma_load_2d(to + i * BOX, map, bar, i * 64, row, TMA_EVICT_FIRST);
    }
}

template <int N>
static __device__ __forceinline__ void produce(const struct mla_args &a, const CUtensorMap *q_map,
                                               const CUtensorMap *kv_map, struct walk w,
                                               uint32_t smem, struct mla_shared *b)
{
    typedef shape<N> at;
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
                uint32_t to = smem + r.at * TILE;
#pragma unroll 1
                for (int part = 0; part < PARTS; part++) {
                    bar_wait(smem_addr(&b->empty[r.at][part]), r.phase);
                    copy_boxes(kv_map, to, smem_addr(&b->full[r.at][part]), row, part * 2,
                               part < PARTS - 1 ? 2 : 1);
                }
                if (t == 0) { /* behind the first tile, which need not wait for the last piece */
                    uint32_t bar = smem_addr(&b->q_full[qr.at]);
                    bar_wait(smem_addr(&b->q_empty[qr.at]), qr.phase);
                    bar_expect(bar, at::q_bytes);
#pragma unroll 1
                    for (int i = 0; i < BOXES; i++) {
                        tma_load_2d(smem + at::q_at + qr.at * at::q_bytes + i * (N * 128), q_map,
                                    bar, i * 64, first_row(a, w), TMA_EVICT_NORMAL);
                    }
                }
            }
            r.next(STAGES);
        }
        qr.next(at::q_stages);
    }
    __syncwarp();
}

/* ---- kernel and launch ---- */

template <int N>
static __global__ void __launch_bounds__(THREADS, 1)
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
                bar_init(smem_addr(&b.empty[i][part]), part < PARTS - 1 ? 4 : 8);
            }
            bar_init(smem_addr(&b.weighed[i]), 4);
            bar_init(smem_addr(&b.q_full[i]), 1);
            bar_init(smem_addr(&b.q_empty[i]), 4);
        }
        bar_init_fence();
    }
    __syncthreads();
    early_wait();
    struct walk w = run_walk<1>(a);
    if (threadIdx.x < 128) {
        regs_give<88>();
        if (threadIdx.x < 32) {
            produce<N>(a, &q_map, &kv_map, w, smem_addr(smem), &b);
        }
    } else if (threadIdx.x < 128 * WG_OUT) {
        regs_take<136>();
        score<N>(a, w, smem, &b);
    } else {
        regs_take<144>();
        sum<N>(a, w, smem_addr(smem), &b);
    }
}

template <int N>
static cudaError_t launch(struct bt_mla *m, const struct bt_mla_decode *d,
                          const struct mla_args &args, cudaStream_t s)
{
    CUtensorMap q_map;
    cudaError_t e = mla_q_map(&q_map, args, d->tokens, N);
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(mla_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shape<N>::bytes);
    }
    return e == cudaSuccess ? launch_early(mla_kernel<N>, m->blocks, THREADS, shape<N>::bytes, s,
                                           q_map, m->kv, args)
                            : e;
}

extern "C" cudaError_t bt_mla_decode_wgmma(struct bt_mla *m, const struct bt_mla_decode *d,
                                           const struct bt_mla_shape *shape, uint32_t layer_row,
                                           cudaStream_t s)
{
    const struct mla_args a = mla_args_of(m, d, shape, layer_row);
    switch (shape->columns) {
    case 16: return launch<16>(m, d, a, s);
    case 32: return launch<32>(m, d, a, s);
    default: return cudaErrorInvalidValue;
    }
}
