/* Prefill attention on Hopper: chunks of prompts over their cached prefix and themselves, causal,
 * from pages (prefill_hopper.cuh). A tile is 128 rows of one KV head, its query heads packed as
 * rows (token-major). A page's head is one box of the copy engine. Tiles are taken head by head and
 * the longest of a KV head first, so that a head's KV stays in the L2 cache. */
#include "common/engine/cuda/attention/prefill_hopper.cuh"

/* A tile: the rows of one item and KV head. */
template <class S> struct paged_work {
    const struct prefill_args &a;
    const CUtensorMap *q_map, *kv_map;
    const struct prefill_work *tile;
    int pages_log2; /* of a KV tile */
    int ids;

    __device__ paged_work(const struct prefill_args &args, const CUtensorMap *q,
                          const CUtensorMap *kv)
        : a(args), q_map(q), kv_map(kv), pages_log2(31 - __clz(S::BN / (int)args.page_tokens))
    {
    }

    __device__ __forceinline__ struct prefill_work make(int i) const
    {
        const struct bt_attn_item it = a.items[i % (int)a.n_items];
        const struct span kv = kv_span<S::BN>(it, a.window);
        /* A tile that is computed again because one row's weights are too large would change the
         * other rows. So where that matters every tile counts as masked: its maximum is searched.
         */
        int clear = a.invariant ? 0 : it.pos / S::BN;
        int edge = a.window ? max(it.pos + it.n - (int)a.window + S::BN - 1, 0) / S::BN : 0;
        return {i / (int)a.n_items, it.row, it.n, it.pos, kv.first,
                kv.end - 1,         clear,  edge, it.len, it.slot};
    }

    __device__ __forceinline__ void load_q(uint32_t to, uint32_t bar) const
    {
        bar_expect(bar, BM / a.group * a.group * S::DK * 2);
#pragma unroll
        for (int h = 0; h < S::DK / 64; h++) {
            tma_load_3d(to + h * (BM * 128), q_map, bar, h * 64, tile->head * (int)a.group,
                        tile->row);
        }
    }

    /* K (plane 0) or V (1) of BN tokens. Page ids are read 32 at a time. */
    __device__ __forceinline__ void load(uint32_t to, uint32_t bar, int n, int i, int plane,
                                         bool one)
    {
        const int pt = a.page_tokens, at = i << pages_log2, lane = threadIdx.x % 32;
        const int pages = 1 << pages_log2, head_row = (int)a.layer_row + tile->head * 2 * pt;
        if (at % 32 == 0) { /* lane l: of page l % pages of KV tile n - l / pages */
            int page = ((n - (lane >> pages_log2)) << pages_log2) + (lane & (pages - 1));
            int last = (tile->end - 1) >> (31 - __clz(pt));
            ids = a.table[(size_t)tile->place * a.table_stride + min(max(page, 0), last)];
        }
        for (int p = 0; p < pages; p++) {
            int row = __shfl_sync(~0u, ids, at % 32 + p) * (int)a.page_rows + head_row + plane * pt;
            if (one) {
#pragma unroll
                for (int h = 0; h < S::DK / 64; h++) {
                    tma_load_2d(to + h * (S::BN * 128) + p * pt * 128, kv_map, bar, h * 64, row,
                                TMA_EVICT_NORMAL);
                }
            }
        }
    }
    __device__ __forceinline__ void load_k(uint32_t to, uint32_t bar, int n, int i, bool one)
    {
        load(to, bar, n, i, 0, one);
    }
    __device__ __forceinline__ void load_v(uint32_t to, uint32_t bar, int n, int i, bool one)
    {
        load(to, bar, n, i, 1, one);
    }

    __device__ __forceinline__ void start(typename S::state &t, int row) const
    {
        start_tile(a, t, tile->n, tile->pos, row);
    }
    __device__ __forceinline__ void store(const typename S::state &t, int row) const
    {
        ::store(a, t, tile->row, tile->n, tile->head, row);
    }
};

template <class S>
static __global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map,
                   const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        tma_prefetch(&kv_map);
    }
    paged_work<S> w(a, &q_map, &kv_map);
    prefill<S>(w, smem, a.tiles, a.tickets, a.scale_log2);
}

/* ---- launches ---- */

template <class S>
static cudaError_t launch(struct bt_attn *a, const CUtensorMap &q_map,
                          const struct prefill_args &args, cudaStream_t s)
{
    cudaError_t e = cudaFuncSetAttribute(
        prefill_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)S::bytes);
    if (e != cudaSuccess) {
        return e;
    }
    uint32_t grid = args.tiles < a->blocks ? args.tiles : a->blocks;
    prefill_kernel<S><<<grid, THREADS, S::bytes, s>>>(q_map, a->kv_plane, args);
    return cudaGetLastError();
}

template <class T>
static cudaError_t launch_dim(struct bt_attn *a, const CUtensorMap &q_map,
                              const struct prefill_args &args, cudaStream_t s)
{
    switch (a->pool.head_dim) {
    case 64: return launch<prefill_shape<T, 64, 64, 128, 3>>(a, q_map, args, s);
    case 128: return launch<prefill_shape<T, 128, 128, 128, 3>>(a, q_map, args, s);
    case 256: return launch<prefill_shape<T, 256, 256, 64, 2>>(a, q_map, args, s);
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
