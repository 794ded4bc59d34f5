/* Prefill attention on Hopper: chunks of prompts over their cached prefix and themselves, causal,
 * from pages. The tensor cores limit the speed, so the design keeps them busy:
 *   - a tile is 128 rows of one KV head, its query heads packed as rows (token-major), against KV
 *     tiles of BN tokens. Both products are WGMMA, and the scores' 16-bit copy stays in registers;
 *   - one warp copies through TMA (a page's head is one box) for two warpgroups of 64 rows, three
 *     tiles ahead, so that the softmax of one warpgroup can run during the products of the other
 *     (named barriers that force them to alternate made it 1 to 4 % slower);
 *   - within a warpgroup the scores of the next KV tile are computed while the last tile's output
 *     is summed;
 *   - blocks are persistent and take tiles from a counter, head by head and the longest of a KV
 *     head first, so that a head's KV stays in the L2 cache. */
#include "common/engine/cuda/attention/prefill_tile.cuh"
#include "common/engine/cuda/hopper.cuh"

#define GROUPS     2 /* computing warpgroups */
#define THREADS    ((GROUPS + 1) * 128)
#define MAX_STAGES 3       /* of K and of V */
#define SMEM_MAX   232448u /* of a block, sm_90 */
#define NAMED_WG0  1       /* + warpgroup */

struct prefill_bars {
    uint64_t q_full, q_empty, tile_full, tile_empty;
    uint64_t k_full[MAX_STAGES], k_empty[MAX_STAGES], v_full[MAX_STAGES], v_empty[MAX_STAGES];
    int tile;
};

/* ---- the copying warp ---- */

template <int D, int BN> struct smem_layout {
    static constexpr uint32_t q = BM * D * 2, kv = BN * D * 2, stages = D == 256 ? 2 : MAX_STAGES;
    static constexpr uint32_t k_at = q, v_at = q + stages * kv, bytes = q + 2 * stages * kv;
};

/* K or V of BN tokens: [D / 64][BN] rows of 128 bytes. plane: 0 for K, 1 for V. */
template <int D, int BN>
static __device__ __forceinline__ void copy_tile(const struct prefill_args &a,
                                                 const CUtensorMap *map, uint32_t dst, uint32_t bar,
                                                 int ids, int shift, int row0, int plane)
{
    const int pt = a.page_tokens, per_tile = BN / pt;
    for (int p = 0; p < per_tile; p++) {
        int page = __shfl_sync(~0u, ids, shift + p);
        int row = page * (int)a.page_rows + row0 + plane * pt;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int h = 0; h < D / 64; h++) {
                tma_load_2d(dst + h * (BN * 128) + p * pt * 128, map, bar, h * 64, row,
                            TMA_EVICT_NORMAL);
            }
        }
    }
}

template <int D, int BN>
static __device__ __forceinline__ void produce(const struct prefill_args &a,
                                               const CUtensorMap *q_map, const CUtensorMap *kv_map,
                                               struct prefill_bars *b, uint32_t smem)
{
    typedef smem_layout<D, BN> at;
    const int lane = threadIdx.x % 32, pt = a.page_tokens, per_tile = BN / pt;
    struct ring r = {0, 1};
    uint32_t phase = 1;
    int tile = blockIdx.x;
    for (;;) {
        if (lane == 0) {
            bar_wait(smem_addr(&b->tile_empty), phase);
            b->tile = tile < (int)a.tiles ? tile : -1;
            bar_arrive(smem_addr(&b->tile_full));
        }
        if (tile >= (int)a.tiles) {
            break;
        }
        int head = tile / (int)a.n_items;
        const struct bt_attn_item it = a.items[tile % (int)a.n_items];
        struct span kv = kv_span<BN>(it, a.window);
        const int32_t *table = a.table + (size_t)it.slot * a.table_stride;
        int last = (it.len - 1) / pt, row0 = (int)a.layer_row + head * 2 * pt, ids = 0;
        if (lane == 0) {
            uint32_t bar = smem_addr(&b->q_full);
            bar_wait(smem_addr(&b->q_empty), phase);
            bar_expect(bar, BM / a.group * a.group * D * 2);
#pragma unroll
            for (int h = 0; h < D / 64; h++) {
                tma_load_3d(smem + h * (BM * 128), q_map, bar, h * 64, head * (int)a.group, it.row);
            }
        }
        /* From the last tile to the first, so that all masked tiles come first. Page ids are read
         * 32 at a time. */
        for (int n = kv.end - 1, i = 0; n >= kv.first; n--, i++) {
            int shift = i * per_tile % 32;
            if (shift == 0) { /* lane l: page l % per_tile of tile n - l / per_tile */
                int page = (n - lane / per_tile) * per_tile + lane % per_tile;
                ids = table[min(max(page, 0), last)];
            }
            if (lane == 0) {
                bar_wait(smem_addr(&b->k_empty[r.at]), r.phase);
                bar_expect(smem_addr(&b->k_full[r.at]), at::kv);
            }
            copy_tile<D, BN>(a, kv_map, smem + at::k_at + r.at * at::kv,
                             smem_addr(&b->k_full[r.at]), ids, shift, row0, 0);
            if (lane == 0) {
                bar_wait(smem_addr(&b->v_empty[r.at]), r.phase);
                bar_expect(smem_addr(&b->v_full[r.at]), at::kv);
            }
            copy_tile<D, BN>(a, kv_map, smem + at::v_at + r.at * at::kv,
                             smem_addr(&b->v_full[r.at]), ids, shift, row0, 1);
            r.next(at::stages);
        }
        if (lane == 0) {
            tile = (int)(gridDim.x + atomicAdd(a.tickets, 1));
        }
        tile = __shfl_sync(~0u, tile, 0);
        phase ^= 1;
    }
    if (lane == 0) {
        end_tickets(a);
    }
}

/* ---- the computing warpgroups ---- */

template <class T, int D, int BN>
static __device__ __forceinline__ void scores(struct tile_state<T, D, BN> &t, uint64_t q,
                                              uint64_t k)
{
#pragma unroll
    for (int i = 0; i < D / 16; i++) { /* 16 columns are 32 bytes; 64 fill a row of 128 bytes */
        uint64_t qi = q + (uint64_t)(i / 4 * (BM * 128) + i % 4 * 32) / 16;
        uint64_t ki = k + (uint64_t)(i / 4 * (BN * 128) + i % 4 * 32) / 16;
        wgmma_ss<T>(t.s, qi, ki, i > 0);
    }
    wgmma_commit();
}
template <class T, int D, int BN>
static __device__ __forceinline__ void outputs(struct tile_state<T, D, BN> &t, uint64_t v)
{
#pragma unroll
    for (int i = 0; i < BN / 16; i++) { /* 16 tokens are 16 rows of 128 bytes */
        wgmma_rs<T>(t.o, t.p + i * 4, v + (uint64_t)(i * 16 * 128) / 16);
    }
    wgmma_commit();
}

/* Clears rows of V behind the sequence: they may be NaN, and 0 * NaN is not 0. Both warpgroups do
 * this; they write the same values. */
template <int D, int BN> static __device__ __forceinline__ void clear_tail(uint8_t *v, int from)
{
    for (int i = threadIdx.x % 128; i < (BN - from) * 8 * (D / 64); i += 128) {
        int h = i / ((BN - from) * 8), j = i % ((BN - from) * 8);
        *(uint4 *)(v + h * (BN * 128) + from * 128 + j * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
}

/* Computes the scores of this warp's rows again, with instructions that need only this warp. q and
 * k must be unchanged. */
template <class T, int D, int BN>
static __device__ __forceinline__ void scores_again(struct tile_state<T, D, BN> &t, uint32_t q,
                                                    uint32_t k)
{
    const uint32_t lane = threadIdx.x % 32, q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        t.s[i] = 0;
    }
#pragma unroll 1
    /* Rows of 128 bytes; their 16-byte pieces are permuted by row. */
    for (uint32_t c = 0; c < D / 16; c++) {
        uint32_t a[4], b[4], piece = c % 4 * 2;
        ldmatrix4(a, q + c / 4 * (BM * 128) + q_row * 128 + ((piece + lane / 16) ^ q_row % 8) * 16);
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            ldmatrix4(b, k + c / 4 * (BN * 128) + (n * 16 + k_row) * 128 +
                             ((piece + lane / 8 % 2) ^ k_row % 8) * 16);
            mma16816<T>(*(float(*)[4])(t.s + n * 8), a, b[0], b[1]);
            mma16816<T>(*(float(*)[4])(t.s + n * 8 + 4), a, b[2], b[3]);
        }
    }
}

/* A warpgroup's state, kept over all its tiles. */
struct consumer {
    struct prefill_bars *b;
    uint32_t smem, group_bar; /* named barrier of this warpgroup */
    uint32_t q_warp;          /* this warp's rows of Q */
    uint64_t q;
    struct ring k, v;
    float scale;
};

/* Computes the scores of KV tile n while the output of the previous tile is summed, then the
 * softmax of n. In a tile without mask every row has a base already, and no maximum is searched.
 * Only if a row's weights have so large a sum that one of them may exceed the range of f16, the
 * tile is computed again. */
template <bool MASK, class T, int D, int BN>
static __device__ __forceinline__ void step(struct consumer &c, struct tile_state<T, D, BN> &t,
                                            int n)
{
    typedef smem_layout<D, BN> at;
    const uint32_t k = c.smem + at::k_at + c.k.at * at::kv;
    bar_wait(smem_addr(&c.b->k_full[c.k.at]), c.k.phase);
    wgmma_hold(t.s);
    wgmma_hold(t.o);
    wgmma_fence();
    scores(t, c.q, wgmma_desc(k, 0, 1024));
    bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
    wgmma_fence();
    outputs(t, wgmma_desc(c.smem + at::v_at + c.v.at * at::kv, BN * 128, 1024));
    wgmma_wait<1>();
    wgmma_hold(t.s);
    if (MASK) {
        release(smem_addr(&c.b->k_empty[c.k.at]));
        mask(t, n * BN);
        softmax(t, c.scale);
    } else {
        float sum[2];
        weigh(t, c.scale, sum);
        t.moved = __any_sync(~0u, sum[0] >= 0x1p15f || sum[1] >= 0x1p15f);
        if (t.moved) {
            scores_again(t, c.q_warp, k);
            softmax(t, c.scale);
        } else {
            t.l[0] += sum[0];
            t.l[1] += sum[1];
        }
        release(smem_addr(&c.b->k_empty[c.k.at]));
    }
    c.k.next(at::stages);
    wgmma_wait<0>();
    wgmma_hold(t.o);
    release(smem_addr(&c.b->v_empty[c.v.at]));
    c.v.next(at::stages);
    rescale(t);
    to_weights(t);
}

/* The first KV tile, which is the sequence's last: there is no earlier output to sum. */
template <class T, int D, int BN>
static __device__ __forceinline__ void
first_step(struct consumer &c, struct tile_state<T, D, BN> &t, int n, int len, uint8_t *smem)
{
    typedef smem_layout<D, BN> at;
    bar_wait(smem_addr(&c.b->k_full[c.k.at]), c.k.phase);
    wgmma_hold(t.s);
    wgmma_fence();
    scores(t, c.q, wgmma_desc(c.smem + at::k_at + c.k.at * at::kv, 0, 1024));
    wgmma_wait<0>();
    wgmma_hold(t.s);
    release(smem_addr(&c.b->k_empty[c.k.at]));
    c.k.next(at::stages);
    mask(t, n * BN);
    softmax(t, c.scale);
    to_weights(t);
    if (len < (n + 1) * BN) {
        bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
        clear_tail<D, BN>(smem + at::v_at + c.v.at * at::kv, len - n * BN);
        named_sync(c.group_bar, 128);
    }
}

template <class T, int D, int BN>
static __device__ __forceinline__ void last_step(struct consumer &c, struct tile_state<T, D, BN> &t)
{
    typedef smem_layout<D, BN> at;
    release(smem_addr(&c.b->q_empty));
    bar_wait(smem_addr(&c.b->v_full[c.v.at]), c.v.phase);
    wgmma_hold(t.o);
    wgmma_fence();
    outputs(t, wgmma_desc(c.smem + at::v_at + c.v.at * at::kv, BN * 128, 1024));
    wgmma_wait<0>();
    wgmma_hold(t.o);
    release(smem_addr(&c.b->v_empty[c.v.at]));
    c.v.next(at::stages);
}

template <class T, int D, int BN>
static __device__ __forceinline__ void consume(const struct prefill_args &a, struct prefill_bars *b,
                                               uint8_t *smem)
{
    const int wg = threadIdx.x / 128 - 1;
    const int row = wg * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct consumer c = {b,
                         smem_addr(smem),
                         (uint32_t)(NAMED_WG0 + wg),
                         smem_addr(smem) + (threadIdx.x / 32 - 4) * (16 * 128),
                         wgmma_desc(smem_addr(smem) + wg * (64 * 128), 0, 1024),
                         {0, 0},
                         {0, 0},
                         a.scale_log2};
    for (uint32_t phase = 0;; phase ^= 1) {
        bar_wait(smem_addr(&b->tile_full), phase);
        int tile = *(volatile int *)&b->tile;
        release(smem_addr(&b->tile_empty));
        if (tile < 0) {
            return;
        }
        int head = tile / (int)a.n_items;
        const struct bt_attn_item it = a.items[tile % (int)a.n_items];
        struct span kv = kv_span<BN>(it, a.window);
        int clear = it.pos / BN; /* all rows see the KV tiles below this one, and then have a
                                    base */
        int edge = a.window ? max(it.pos + it.n - (int)a.window + BN - 1, 0) / BN : 0;
        struct tile_state<T, D, BN> t;
        start_tile(a, t, it, row);
        bar_wait(smem_addr(&b->q_full), phase);
        int n = kv.end - 1;
        first_step(c, t, n, it.len, smem);
        for (n--; n >= max(kv.first, clear); n--) {
            step<true>(c, t, n);
        }
        for (; n >= max(kv.first, edge); n--) {
            step<false>(c, t, n);
        }
        for (; n >= kv.first; n--) { /* tiles that the window cuts */
            step<true>(c, t, n);
        }
        last_step(c, t);
        store(a, t, it, head, row);
    }
}

template <class T, int D, int BN>
static __global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map,
                   const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ struct prefill_bars b;
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        tma_prefetch(&kv_map);
        bar_init(smem_addr(&b.q_full), 1);
        bar_init(smem_addr(&b.q_empty), GROUPS * 4);
        bar_init(smem_addr(&b.tile_full), 1);
        bar_init(smem_addr(&b.tile_empty), GROUPS * 4);
        for (int i = 0; i < MAX_STAGES; i++) {
            bar_init(smem_addr(&b.k_full[i]), 1);
            bar_init(smem_addr(&b.k_empty[i]), GROUPS * 4);
            bar_init(smem_addr(&b.v_full[i]), 1);
            bar_init(smem_addr(&b.v_empty[i]), GROUPS * 4);
        }
        bar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        regs_give<40>();
        if (threadIdx.x < 32) {
            produce<D, BN>(a, &q_map, &kv_map, &b, smem_addr(smem));
        }
    } else {
        regs_take<232>();
        consume<T, D, BN>(a, &b, smem);
    }
}

/* ---- launches ---- */

template <class T, int D, int BN>
static cudaError_t launch(struct bt_attn *a, const CUtensorMap &q_map,
                          const struct prefill_args &args, cudaStream_t s)
{
    uint32_t bytes = smem_layout<D, BN>::bytes;
    static_assert(smem_layout<D, BN>::bytes + 2048 <= SMEM_MAX, "tile does not fit");
    cudaError_t e = cudaFuncSetAttribute(prefill_kernel<T, D, BN>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess) {
        return e;
    }
    uint32_t grid = args.tiles < a->blocks ? args.tiles : a->blocks;
    prefill_kernel<T, D, BN><<<grid, THREADS, bytes, s>>>(q_map, a->kv_plane, args);
    return cudaGetLastError();
}

template <class T>
static cudaError_t launch_dim(struct bt_attn *a, const CUtensorMap &q_map,
                              const struct prefill_args &args, cudaStream_t s)
{
    switch (a->pool.head_dim) {
    case 64: return launch<T, 64, 128>(a, q_map, args, s);
    case 128: return launch<T, 128, 128>(a, q_map, args, s);
    case 256: return launch<T, 256, 64>(a, q_map, args, s);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t bt_attn_prefill_tma(struct bt_attn *a, const struct bt_attn_prefill *f,
                                           uint32_t layer_row, cudaStream_t s)
{
    const struct bt_attn_pool *p = &a->pool;
    const uint32_t group = p->heads / p->kv_heads;
    CUtensorMap q_map;
    const uint64_t dims[3] = {p->head_dim, p->heads, f->rows};
    const uint64_t strides[2] = {p->head_dim * 2ull, f->q_stride * 2ull};
    const uint32_t box[3] = {64, group, BM / group};
    cudaError_t e = bt_cu_tensor_map(&q_map, p->type, f->q, 3, dims, strides, box);
    if (e != cudaSuccess) {
        return e;
    }
    const struct prefill_args args = prefill_args_of(a, f, layer_row);
    return p->type == BT_CU_F16 ? launch_dim<__half>(a, q_map, args, s)
                                : launch_dim<__nv_bfloat16>(a, q_map, args, s);
}
