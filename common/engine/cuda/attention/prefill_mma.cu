/* Prefill attention on sm_80 and newer: as prefill_wgmma.cu, but with cp.async and mma.sync in
 * place of Hopper's copy engine and WGMMA. Eight warps compute 16 rows of a tile each. Four more
 * warps copy the queries and, ahead of them, K and V through two rings; one warp would reserve as
 * many registers as these four. Tiles of KV are small, so that a block fits into 99 KiB of shared
 * memory, the least among these devices. */
#include "common/engine/cuda/attention/prefill_tile.cuh"
#include "common/engine/cuda/copy_async.cuh"

#define WARPS      (BM / 16)
#define COPIERS    128 /* threads */
#define THREADS    (WARPS * 32 + COPIERS)
#define MAX_STAGES 3 /* of K and of V */

struct mma_bars {
    uint64_t q_full, q_empty, tile_full, tile_empty;
    uint64_t k_full[MAX_STAGES], k_empty[MAX_STAGES], v_full[MAX_STAGES], v_empty[MAX_STAGES];
    int tile, next; /* tile: for the computing warps; next: for the copying warps */
};

/* Shared memory: queries, K's stages, V's. Each [D / 64][rows] of 128 bytes, swizzled. */
template <int D, int BN> struct mma_layout {
    static constexpr uint32_t q = BM * D * 2, kv = BN * D * 2;
};

/* ---- the copying warps ---- */

template <int D>
static __device__ __forceinline__ void
copy_queries(const struct prefill_args &a, const struct bt_attn_item &it, int head, uint32_t to)
{
    const int group = (int)a.group, tokens = min(it.n, BM / group);
    for (int i = threadIdx.x % COPIERS; i < BM * (D / 8); i += COPIERS) {
        int row = i / (D / 8), c = i % (D / 8), token = row / group;
        uint32_t at = to + c / 8 * (BM * 128) + swizzled<128>((uint32_t)row, (uint32_t)c % 8);
        const uint8_t *from = a.q +
                              ((size_t)(it.row + min(token, tokens - 1)) * a.q_stride +
                               (size_t)(head * group + row % group) * D) *
                                  2 +
                              c * 16;
        if (token < tokens) {
            async_load(at, from);
        } else {
            async_zero(at, from);
        }
    }
}

/* Copies K (plane 0) or V (1) of BN tokens from `token` on. Writes zeros behind the sequence: the
 * pages may have NaN there, and 0 * NaN is not 0. */
template <int D, int BN>
static __device__ __forceinline__ void copy_kv(const struct prefill_args &a,
                                               const struct bt_attn_item &it, const int32_t *table,
                                               int head, int plane, int token, uint32_t to)
{
    constexpr int row = D * 2, at_once = COPIERS / (D / 8); /* rows */
    const int pt = (int)a.page_tokens, last = (it.len - 1) / pt;
    const int c = threadIdx.x % (D / 8), r0 = threadIdx.x % COPIERS / (D / 8);
    const uint8_t *first = a.kv + (a.layer_row + (size_t)(head * 2 + plane) * pt) * row + c * 16;
    const uint32_t column = to + c / 8 * (BN * 128);
#pragma unroll
    for (int i = 0; i < BN; i += at_once) {
        int r = i + r0, t = token + r;
        size_t page = (size_t)table[min(t / pt, last)];
        const uint8_t *from = first + (page * a.page_rows + t % pt) * row;
        uint32_t dst = column + swizzled<128>((uint32_t)r, (uint32_t)c % 8);
        if (t < it.len) {
            async_load(dst, from);
        } else {
            async_zero(dst, from);
        }
    }
}

template <int D, int BN>
static __device__ void produce(const struct prefill_args &a, struct mma_bars *b, uint32_t smem,
                               uint32_t stages)
{
    typedef mma_layout<D, BN> at;
    const bool leader = threadIdx.x % COPIERS == 0;
    const uint32_t k_at = smem + at::q, v_at = k_at + stages * at::kv;
    struct ring r = {0, 1}; /* all stages are free at first */
    int tile = blockIdx.x;
    for (uint32_t phase = 1;; phase ^= 1) {
        bar_wait(smem_addr(&b->tile_empty), phase);
        if (leader) {
            b->tile = tile < (int)a.tiles ? tile : -1;
            bar_arrive(smem_addr(&b->tile_full));
        }
        if (tile >= (int)a.tiles) {
            break;
        }
        int head = tile / (int)a.n_items;
        const struct bt_attn_item it = a.items[tile % (int)a.n_items];
        const int32_t *table = a.table + (size_t)it.slot * a.table_stride;
        struct span kv = kv_span<BN>(it, a.window);
        bar_wait(smem_addr(&b->q_empty), phase);
        copy_queries<D>(a, it, head, smem);
        async_arrive(smem_addr(&b->q_full));
        for (int n = kv.end - 1; n >= kv.first; n--) {
            bar_wait(smem_addr(&b->k_empty[r.at]), r.phase);
            copy_kv<D, BN>(a, it, table, head, 0, n * BN, k_at + r.at * at::kv);
            async_arrive(smem_addr(&b->k_full[r.at]));
            bar_wait(smem_addr(&b->v_empty[r.at]), r.phase);
            copy_kv<D, BN>(a, it, table, head, 1, n * BN, v_at + r.at * at::kv);
            async_arrive(smem_addr(&b->v_full[r.at]));
            r.next(stages);
        }
        if (leader) {
            b->next = (int)(gridDim.x + atomicAdd(a.tickets, 1));
        }
        named_sync(1, COPIERS);
        tile = *(volatile int *)&b->next;
        named_sync(1, COPIERS); /* all copying threads have read it */
    }
    if (leader) {
        end_tickets(a.tickets);
    }
}

/* ---- the computing warps ---- */

/* s = queries of the warp's 16 rows x keys of BN tokens. */
template <class T, int D, int BN>
static __device__ __forceinline__ void scores(struct tile_state<T, D, BN> &t, uint32_t q,
                                              uint32_t k)
{
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
    const uint32_t token = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        t.s[i] = 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++) {
        uint32_t x[4], c = i % 4 * 2;
        ldmatrix4(x, q + i / 4 * (BM * 128) + swizzled<128>(row, c + lane / 16));
#pragma unroll
        for (uint32_t j = 0; j < BN / 16; j++) {
            uint32_t y[4];
            ldmatrix4(y, k + i / 4 * (BN * 128) + swizzled<128>(j * 16 + token, c + lane / 8 % 2));
            mma16816<T>(*(float(*)[4]) & t.s[j * 8], x, y[0], y[1]);
            mma16816<T>(*(float(*)[4]) & t.s[j * 8 + 4], x, y[2], y[3]);
        }
    }
}

/* o += weights x values of BN tokens. */
template <class T, int D, int BN>
static __device__ __forceinline__ void outputs(struct tile_state<T, D, BN> &t, uint32_t v)
{
    const uint32_t lane = threadIdx.x % 32, token = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (uint32_t i = 0; i < BN / 16; i++) {
        const uint32_t w[4] = {t.p[i * 4], t.p[i * 4 + 1], t.p[i * 4 + 2], t.p[i * 4 + 3]};
#pragma unroll
        for (uint32_t j = 0; j < D / 16; j++) {
            uint32_t y[4];
            ldmatrix4_t(y, v + j / 4 * (BN * 128) +
                               swizzled<128>(i * 16 + token, j % 4 * 2 + lane / 16));
            mma16816<T>(*(float(*)[4]) & t.o[j * 8], w, y[0], y[1]);
            mma16816<T>(*(float(*)[4]) & t.o[j * 8 + 4], w, y[2], y[3]);
        }
    }
}

template <class T, int D, int BN>
static __device__ void consume(const struct prefill_args &a, struct mma_bars *b, uint32_t smem,
                               uint32_t stages)
{
    typedef mma_layout<D, BN> at;
    const uint32_t k_at = smem + at::q, v_at = k_at + stages * at::kv;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    struct ring r = {0, 0};
    for (uint32_t phase = 0;; phase ^= 1) {
        bar_wait(smem_addr(&b->tile_full), phase);
        int tile = *(volatile int *)&b->tile;
        release(smem_addr(&b->tile_empty));
        if (tile < 0) {
            return;
        }
        const struct bt_attn_item it = a.items[tile % (int)a.n_items];
        struct span kv = kv_span<BN>(it, a.window);
        int clear = (it.pos + 1) / BN; /* tiles below this one need no causal mask */
        int edge = a.window ? max(it.pos + it.n - (int)a.window + BN - 1, 0) / BN : 0;
        struct tile_state<T, D, BN> t;
        start_tile(a, t, it.n, it.pos, row);
        bar_wait(smem_addr(&b->q_full), phase);
        for (int n = kv.end - 1; n >= kv.first; n--) {
            bar_wait(smem_addr(&b->k_full[r.at]), r.phase);
            scores(t, smem, k_at + r.at * at::kv);
            release(smem_addr(&b->k_empty[r.at]));
            if (n >= clear || n < edge) {
                mask(t, n * BN);
            }
            softmax<false>(t, a.scale_log2);
            rescale(t);
            to_weights(t);
            bar_wait(smem_addr(&b->v_full[r.at]), r.phase);
            outputs(t, v_at + r.at * at::kv);
            release(smem_addr(&b->v_empty[r.at]));
            r.next(stages);
        }
        release(smem_addr(&b->q_empty));
        const float sum[2] = {row_sum(t.l[0]), row_sum(t.l[1])};
        store(a, t, sum, it.row, it.n, tile / (int)a.n_items, row);
    }
}

template <class T, int D, int BN>
static __global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const __grid_constant__ prefill_args a, uint32_t stages)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ struct mma_bars b;
    if (threadIdx.x == 0) {
        bar_init(smem_addr(&b.q_full), COPIERS);
        bar_init(smem_addr(&b.q_empty), WARPS);
        bar_init(smem_addr(&b.tile_full), 1);
        bar_init(smem_addr(&b.tile_empty), WARPS);
        for (int i = 0; i < MAX_STAGES; i++) {
            bar_init(smem_addr(&b.k_full[i]), COPIERS);
            bar_init(smem_addr(&b.k_empty[i]), WARPS);
            bar_init(smem_addr(&b.v_full[i]), COPIERS);
            bar_init(smem_addr(&b.v_empty[i]), WARPS);
        }
    }
    __syncthreads();
    if (threadIdx.x >= WARPS * 32) {
        produce<D, BN>(a, &b, smem_addr(smem), stages);
    } else {
        consume<T, D, BN>(a, &b, smem_addr(smem), stages);
    }
}

/* ---- launches ---- */

template <class T, int D, int BN>
static cudaError_t launch(struct bt_attn *a, const struct prefill_args &args, cudaStream_t s)
{
    typedef mma_layout<D, BN> at;
    uint32_t fit = a->shared < at::q + 2048 ? 0 : (a->shared - at::q - 2048) / (2 * at::kv);
    uint32_t stages = min(fit, MAX_STAGES), bytes = at::q + stages * 2 * at::kv;
    if (stages == 0) {
        return cudaErrorInvalidValue;
    }
    cudaError_t e = cudaFuncSetAttribute(prefill_kernel<T, D, BN>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess) {
        return e;
    }
    uint32_t grid = min(args.tiles, a->blocks);
    prefill_kernel<T, D, BN><<<grid, THREADS, bytes, s>>>(args, stages);
    return cudaGetLastError();
}

template <class T>
static cudaError_t launch_dim(struct bt_attn *a, const struct prefill_args &args, cudaStream_t s)
{
    switch (a->pool.head_dim) {
    case 64: return launch<T, 64, 64>(a, args, s);
    case 128: return launch<T, 128, 64>(a, args, s);
    case 256: return launch<T, 256, 32>(a, args, s);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t bt_attn_prefill_mma(struct bt_attn *a, const struct bt_attn_prefill *f,
                                           uint32_t layer_row, cudaStream_t s)
{
    const struct prefill_args args = prefill_args_of(a, f, layer_row);
    return a->pool.type == BT_CU_F16 ? launch_dim<__half>(a, args, s)
                                     : launch_dim<__nv_bfloat16>(a, args, s);
}
