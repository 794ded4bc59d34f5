/* Prefill attention of latent models on Hopper (prefill_hopper.cuh): keys of 192 dimensions, values
 * of 128. A tile is 128 query tokens of one head. The copy engine puts a key together in shared
 * memory: 128 columns from the head's part of kv, 64 from the row of k_rope that all heads share.
 * Tiles are taken head by head and the longest of a head first, so that a head's keys and values
 * stay in the L2 cache. */
#include "common/engine/cuda/attention/mla_prefill.h"
#include "common/engine/cuda/attention/prefill_hopper.cuh"
#include "common/engine/cuda/device.h"

typedef prefill_shape<__half, BT_MLA_HEAD_Q, BT_MLA_HEAD_VALUE, 128, 2> shape;

struct mla_args {
    const struct bt_mla_prefill_item *items;
    uint32_t n_items, tiles;
    uint64_t out_stride;
    uint16_t *out;
    uint32_t *tickets;
    float scale_log2;
    bool f16;
};

struct mla_maps {
    CUtensorMap q, kv, rope; /* boxes of 64 columns of a head and 128 rows */
};

/* A tile: the queries of one item and head. */
struct mla_work {
    static constexpr bool FIXED = false;
    const struct mla_args &a;
    const struct mla_maps &maps;
    const struct prefill_work *tile;

    __device__ mla_work(const struct mla_args &args, const struct mla_maps &m) : a(args), maps(m)
    {
    }

    __device__ __forceinline__ struct prefill_work make(int i) const
    {
        const struct bt_mla_prefill_item it = a.items[i % (int)a.n_items];
        const int end = it.pos + it.n;
        return {i / (int)a.n_items, it.row, it.n, it.pos,   0, (end - 1) / shape::BN,
                it.pos / shape::BN, 0,      end,  it.first, {}};
    }

    __device__ __forceinline__ void load_q(uint32_t to, uint32_t bar) const
    {
        bar_expect(bar, shape::q);
#pragma unroll
        for (int h = 0; h < shape::DK / 64; h++) {
            tma_load_3d(to + h * (BM * 128), &maps.q, bar, h * 64, tile->head, tile->row);
        }
    }
    __device__ __forceinline__ void load_k(uint32_t to, uint32_t bar, int n, int, bool one) const
    {
        if (one) {
            const int row = tile->place + n * shape::BN;
            tma_load_3d(to, &maps.kv, bar, 0, tile->head, row);
            tma_load_3d(to + shape::BN * 128, &maps.kv, bar, 64, tile->head, row);
            tma_load_2d(to + 2 * shape::BN * 128, &maps.rope, bar, 0, row, TMA_EVICT_NORMAL);
        }
    }
    __device__ __forceinline__ void load_v(uint32_t to, uint32_t bar, int n, int, bool one) const
    {
        if (one) {
            const int row = tile->place + n * shape::BN;
            tma_load_3d(to, &maps.kv, bar, BT_MLA_HEAD_NOPE, tile->head, row);
            tma_load_3d(to + shape::BN * 128, &maps.kv, bar, BT_MLA_HEAD_NOPE + 64, tile->head,
                        row);
        }
    }

    __device__ __forceinline__ void start(shape::state &t, int row) const
    {
        clear_state(t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int token = row + r * 8;
            t.limit[r] = token < tile->n ? tile->pos + token + 1 : 0;
            t.from[r] = 0;
        }
    }
    __device__ __forceinline__ void store(const shape::state &t, const float (&sum)[2],
                                          int row) const
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int token = row + r * 8;
            uint16_t *out =
                a.out + (size_t)(tile->row + token) * a.out_stride + tile->head * shape::DV;
            store_row(t, r, sum[r], token < tile->n ? out : NULL, !a.f16);
        }
    }
};

static __global__ void __launch_bounds__(THREADS, 1)
    mla_prefill_kernel(const __grid_constant__ mla_maps maps, const __grid_constant__ mla_args a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    if (threadIdx.x == 0) {
        tma_prefetch(&maps.q);
        tma_prefetch(&maps.kv);
        tma_prefetch(&maps.rope);
    }
    mla_work w(a, maps);
    prefill<shape>(w, smem, a.tiles, a.tickets, a.scale_log2);
}

/* ---- launches ---- */

/* [rows][heads][dim] f16. */
static cudaError_t map_heads(CUtensorMap *map, const void *base, uint32_t dim, uint32_t heads,
                             uint32_t rows, uint64_t stride)
{
    const uint64_t dims[3] = {dim, heads, rows}, strides[2] = {dim * 2ull, stride * 2};
    const uint32_t box[3] = {64, 1, 128};
    return bt_cu_tensor_map(map, BT_CU_F16, base, 3, dims, strides, box);
}

static cudaError_t make_maps(struct mla_maps *m, const struct bt_mla_prefill *f)
{
    const uint64_t dims[2] = {BT_MLA_HEAD_ROPE, f->kv_rows}, strides[1] = {f->rope_stride * 2};
    const uint32_t box[2] = {64, shape::BN};
    static_assert(BM == 128 && shape::BN == 128, "one box for queries and keys");
    cudaError_t e = map_heads(&m->q, f->q, BT_MLA_HEAD_Q, f->heads, f->rows, f->q_stride);
    if (e == cudaSuccess) {
        e = map_heads(&m->kv, f->kv, BT_MLA_HEAD_KV, f->heads, f->kv_rows, f->kv_stride);
    }
    return e == cudaSuccess
               ? bt_cu_tensor_map(&m->rope, BT_CU_F16, f->k_rope, 2, dims, strides, box)
               : e;
}

static bool valid(const struct bt_mla_prefill *f)
{
    uintptr_t read = (uintptr_t)f->q | (uintptr_t)f->kv | (uintptr_t)f->k_rope;
    uint64_t strides = f->q_stride | f->kv_stride | f->rope_stride;
    return read % 16 == 0 && strides % 8 == 0 && (uintptr_t)f->out % 4 == 0 &&
           f->out_stride % 2 == 0 && f->heads > 0 && f->rows > 0 && f->kv_rows > 0 && f->scale > 0;
}

extern "C" uint32_t bt_mla_prefill_tokens(void)
{
    return BM;
}

extern "C" cudaError_t bt_mla_prefill(const struct bt_mla_prefill *f, cudaStream_t s)
{
    struct mla_maps maps;
    if (f->n_items == 0) {
        return cudaSuccess;
    }
    if (!valid(f)) {
        return cudaErrorInvalidValue;
    }
    if (!bt_cu_hopper()) {
        return cudaErrorNotSupported;
    }
    cudaError_t e = make_maps(&maps, f);
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(mla_prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shape::bytes);
    }
    if (e != cudaSuccess) {
        return e;
    }
    const struct mla_args a = {
        f->items,           f->n_items, f->n_items * f->heads,  f->out_stride,
        (uint16_t *)f->out, f->tickets, f->scale * 1.44269504f, f->out_f16};
    const uint32_t blocks = multiprocessors(), grid = a.tiles < blocks ? a.tiles : blocks;
    mla_prefill_kernel<<<grid, THREADS, shape::bytes, s>>>(maps, a);
    return cudaGetLastError();
}
