/* Prefill attention on Hopper: chunks of prompts over their cached prefix and themselves, causal,
 * from pages (prefill_hopper.cuh). A tile is 128 rows of one KV head, its query heads packed as
 * rows (token-major). A page's head is one box of the copy engine. Tiles are taken head by head and
 * the longest of a KV head first, so that a head's KV stays in the L2 cache. */
#include "common/engine/cuda/attention/prefill_hopper.cuh"

/* A tile: the rows of one item and KV head; with segments, it may be one of a single token's
 * segments. */
template <class S, bool FIXED_> struct paged_work {
    static constexpr bool FIXED = FIXED_;
    const struct prefill_args &a;
    const CUtensorMap *q_map, *kv_map;
    const struct prefill_work *tile;
    int pages_log2; /* of a KV tile */
    int ids;
    int unit; /* of segments, in KV tiles */

    __device__ paged_work(const struct prefill_args &args, const CUtensorMap *q,
                          const CUtensorMap *kv)
        : a(args), q_map(q), kv_map(kv), pages_log2(31 - __clz(S::BN / (int)args.page_tokens)),
          unit((int)args.seg.tokens / S::BN)
    {
    }

    __device__ __forceinline__ struct prefill_work make(int i) const
    {
        if constexpr (FIXED) {
            return make_fixed(i);
        }
        const struct bt_attn_item it = a.items[i % (int)a.n_items];
        const struct span kv = kv_span<S::BN>(it, a.window);
        int edge = a.window ? max(it.pos + it.n - (int)a.window + S::BN - 1, 0) / S::BN : 0;
        return {i / (int)a.n_items, it.row, it.n,   it.pos,  kv.first, kv.end - 1,
                it.pos / S::BN,     edge,   it.len, it.slot, {}};
    }

    /* From the plan's list, head by head. */
    __device__ __forceinline__ struct prefill_work make_fixed(int i) const
    {
        const int n = __ldcg(a.seg.n_units), head = i / n;
        const int4 u = __ldcg((const int4 *)a.seg.units + i % n); /* item, segment, part, parts */
        const struct bt_attn_item it = a.items[u.x];
        const struct span kv = kv_span<S::BN>(it, a.window);
        struct prefill_work w = {head, it.row, it.n,   it.pos,  kv.first, kv.end - 1,
                                 0,    0,      it.len, it.slot, {}};
        if (u.w > 0) {
            w.first = max(w.first, segment_begin(u.y, unit));
            w.last = min(w.last, segment_begin(u.y + 1, unit) - 1);
            w.part = {u.z + head * u.w, u.w, u.y - segment_of(kv.first, unit)};
        }
        return w;
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
    __device__ __forceinline__ void store(const typename S::state &t, const float (&sum)[2],
                                          int row) const
    {
        ::store(a, t, sum, tile->row, tile->n, tile->head, row);
    }

    __device__ __forceinline__ float4 *kept(int i) const
    {
        return (float4 *)a.seg.kept + ((size_t)blockIdx.x * (S::DV / 8) + i) * (GROUPS * 128) +
               threadIdx.x - 128;
    }

    /* Leaves what a single token's heads got from one segment; the warp that is last with them adds
     * up all segments. The first warp has all heads. */
    __device__ __forceinline__ void leave(const typename S::state &t,
                                          const struct segment_sums (&now)[2], int row) const
    {
        const int lane = threadIdx.x % 32, group = (int)a.group;
        const struct bt_attn_part part = tile->part;
        if (row - lane / 4 != 0) {
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int h = row + r * 8;
            float *to = a.seg.part_o + ((size_t)(part.first + part.at) * group + h) * S::DV;
            if (h >= group) {
                break;
            }
#pragma unroll
            for (int i = 0; i < S::DV / 8; i++) {
                __stcg((float2 *)(to + i * 8 + lane % 4 * 2),
                       make_float2(t.o[i * 4 + r * 2], t.o[i * 4 + r * 2 + 1]));
            }
            if (lane % 4 == 0) {
                __stcg((float2 *)a.seg.part_ml + (size_t)(part.first + part.at) * group + h,
                       make_float2(now[r].m, now[r].l));
            }
        }
        __syncwarp();
        uint32_t before = 0;
        if (lane == 0) {
            __threadfence();
            before = atomicAdd(a.seg.arrived + part.first, 1);
            __threadfence();
        }
        if (__shfl_sync(~0u, before, 0) == (uint32_t)part.n - 1) {
            add_parts(part);
        }
    }

    __device__ __forceinline__ void add_parts(const struct bt_attn_part &part) const
    {
        constexpr int PER = S::DV / 32, DEPTH = 8; /* values of a lane; parts on their way */
        const int lane = threadIdx.x % 32, group = (int)a.group;
        if (lane == 0) {
            a.seg.arrived[part.first] = 0; /* for the next launch */
        }
        for (int h = 0; h < group; h++) {
            struct segment_sums total = no_sums();
            float acc[PER] = {};
            for (int top = part.n - 1; top >= 0; top -= DEPTH) {
                float v[DEPTH][PER];
                float2 ml[DEPTH];
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    const size_t at = (size_t)(part.first + max(top - d, 0)) * group + h;
                    const float2 *from = (const float2 *)(a.seg.part_o + at * S::DV) + lane;
                    ml[d] = __ldcg((const float2 *)a.seg.part_ml + at);
#pragma unroll
                    for (int i = 0; i < PER; i += 2) {
                        const float2 x = __ldcg(from + i * 16);
                        v[d][i] = x.x;
                        v[d][i + 1] = x.y;
                    }
                }
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    if (top - d >= 0) {
                        const struct segment_factors f = add_sums(total, {ml[d].x, ml[d].y});
#pragma unroll
                        for (int i = 0; i < PER; i++) {
                            acc[i] = add_output(acc[i], v[d][i], f);
                        }
                    }
                }
            }
            const float f = total.l > 0 ? 1.0f / total.l : 0.0f;
            uint32_t *out = (uint32_t *)((uint16_t *)a.out + (size_t)tile->row * a.out_stride +
                                         ((size_t)tile->head * group + h) * S::DV) +
                            lane;
#pragma unroll
            for (int i = 0; i < PER; i += 2) {
                out[i * 16] = pack2_as(a.out_bf16, acc[i] * f, acc[i + 1] * f);
            }
        }
    }
};

template <class S>
static __global__ void __launch_bounds__(THREADS, 1)
    segments_kernel(const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap kv_map,
                    const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    if (threadIdx.x == 0) {
        tma_prefetch(&q_map);
        tma_prefetch(&kv_map);
    }
    early_next();
    early_wait();
    paged_work<S, true> w(a, &q_map, &kv_map);
    const uint32_t heads = a.tiles / a.n_items;
    prefill<S>(w, smem, (uint32_t)__ldcg(a.seg.n_units) * heads, a.tickets, a.scale_log2);
}

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
    paged_work<S, false> w(a, &q_map, &kv_map);
    prefill<S>(w, smem, a.tiles, a.tickets, a.scale_log2);
}

/* ---- launches ---- */

template <class S>
static cudaError_t launch(struct bt_attn *a, const CUtensorMap &q_map,
                          const struct prefill_args &args, cudaStream_t s)
{
    const bool fixed = args.seg.tokens > 0;
    cudaError_t e =
        cudaFuncSetAttribute(fixed ? segments_kernel<S> : prefill_kernel<S>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)S::bytes);
    if (e != cudaSuccess) {
        return e;
    }
    if (fixed) { /* blocks without a tile end at once */
        return launch_early(segments_kernel<S>, a->blocks, THREADS, S::bytes, s, q_map, a->kv_plane,
                            args);
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
