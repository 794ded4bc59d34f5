/* The parts of prefill attention that do not depend on how data is copied and products are
 * computed. A tile is BM rows of one KV head, its query heads packed as rows (token-major), against
 * KV tiles of BN tokens, from the last to the first. A warp has sixteen rows. A thread has columns
 * of two of them; their layout is the same in the accumulators of mma.sync and WGMMA. */
#ifndef BT_CUDA_ATTN_TILE_CUH
#define BT_CUDA_ATTN_TILE_CUH

#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/ring.cuh"

#define BM 128

struct prefill_args {
    const uint8_t *q, *kv; /* kv: the pool */
    void *out;
    uint32_t q_stride, out_stride;
    const struct bt_attn_item *items;
    uint32_t n_items, tiles;
    const int32_t *table;
    uint32_t table_stride;
    uint32_t group, page_tokens, page_rows, layer_row, window;
    float scale_log2;
    bool out_bf16;
    uint32_t *tickets;
    struct bt_attn_segments seg; /* of kernels that sum segments */
};

/* The KV tiles that a tile of queries sees: [first, end). */
struct span {
    int first, end;
};
template <int BN>
static __device__ __forceinline__ struct span kv_span(const struct bt_attn_item &it,
                                                      uint32_t window)
{
    int lo = window && it.pos >= (int)window ? it.pos + 1 - (int)window : 0;
    return {lo / BN, (it.pos + it.n + BN - 1) / BN};
}

template <class T, int D, int BN> struct tile_state {
    float o[D / 2]; /* 64 x D over 128 threads */
    float s[BN / 2];
    uint32_t p[BN / 4];
    float m[2], l[2], fix[2]; /* of rows lane / 4 and + 8; fix: a factor that o must still be
                                 multiplied by */
    float base[2];            /* m, scaled; infinite for rows without a token */
    bool moved;               /* fix must be applied */
    int limit[2], from[2];    /* tokens a row sees: [from, limit) */
};

template <class T, int D, int BN>
static __device__ __forceinline__ void clear_state(struct tile_state<T, D, BN> &t)
{
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        t.o[i] = 0;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        t.m[r] = -INFINITY;
        t.base[r] = INFINITY;
        t.l[r] = 0;
    }
}

template <class T, int D, int BN>
static __device__ __forceinline__ void
start_tile(const struct prefill_args &a, struct tile_state<T, D, BN> &t, int n, int pos, int row)
{
    clear_state(t);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int token = (row + r * 8) / (int)a.group;
        /* Rows without a token hold a copy of another query. They see no token and must not affect
         * the maximum. */
        t.limit[r] = token < n && token < BM / (int)a.group ? pos + token + 1 : 0;
        t.from[r] = a.window ? max(pos + token + 1 - (int)a.window, 0) : 0;
    }
}

template <class T, int D, int BN>
static __device__ __forceinline__ void mask(struct tile_state<T, D, BN> &t, int base)
{
    int c0 = base + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        int c = c0 + i / 4 * 8 + i % 2, r = i / 2 % 2;
        t.s[i] = c < t.limit[r] && c >= t.from[r] ? t.s[i] : -INFINITY;
    }
}

/* exp2 of the scores against the base, and their sums in four chains: with one chain a warp would
 * wait for each addition. */
template <class T, int D, int BN>
static __device__ __forceinline__ void weigh(struct tile_state<T, D, BN> &t, float scale,
                                             float (&sum)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float part[4];
#pragma unroll
        for (int i = 0; i < BN / 2; i += 4) {
            float x = ex2(fmaf(t.s[i + r * 2], scale, -t.base[r]));
            float y = ex2(fmaf(t.s[i + r * 2 + 1], scale, -t.base[r]));
            part[i / 4 % 4] = i < 16 ? x + y : part[i / 4 % 4] + (x + y);
            t.s[i + r * 2] = x;
            t.s[i + r * 2 + 1] = y;
        }
        sum[r] = (part[0] + part[1]) + (part[2] + part[3]);
    }
}

/* Turns scores into weights. The reference is raised only when a score exceeds it by 2^8, so the
 * weights stay well inside the range of f16, and the output is rarely rescaled. APART: a row's
 * reference does not depend on the warp's other rows. */
template <bool APART, class T, int D, int BN>
static __device__ __forceinline__ void softmax(struct tile_state<T, D, BN> &t, float scale)
{
    float top[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float mx[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mx[i] = fmaxf(t.s[i * 4 + r * 2], t.s[i * 4 + r * 2 + 1]);
        }
#pragma unroll
        for (int i = 16; i < BN / 2; i += 4) {
            float x = fmaxf(t.s[i + r * 2], t.s[i + r * 2 + 1]);
            mx[i / 4 % 4] = fmaxf(mx[i / 4 % 4], x);
        }
        top[r] = fmaxf(fmaxf(mx[0], mx[1]), fmaxf(mx[2], mx[3]));
    }
#pragma unroll
    for (int d = 1; d <= 2; d *= 2) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], d));
        top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], d));
    }
    const bool far[2] = {(top[0] - t.m[0]) * scale > 8.0f && t.limit[0] > 0,
                         (top[1] - t.m[1]) * scale > 8.0f && t.limit[1] > 0};
    /* Also if no score was seen before: inf > 8. */
    t.moved = __any_sync(~0u, far[0] || far[1]);
    if (t.moved) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (APART && !far[r]) {
                t.fix[r] = 1;
                continue;
            }
            float mx = fmaxf(t.m[r], top[r]), base = mx == -INFINITY ? 0.0f : mx * scale;
            t.fix[r] = ex2(t.m[r] * scale - base);
            t.base[r] = t.limit[r] > 0 ? base : INFINITY;
            t.m[r] = mx;
            t.l[r] *= t.fix[r];
        }
    }
    weigh(t, scale, sum);
    t.l[0] += sum[0];
    t.l[1] += sum[1];
}

template <class T, int D, int BN>
static __device__ __forceinline__ void to_weights(struct tile_state<T, D, BN> &t)
{
#pragma unroll
    /* The accumulators of two 8-column tiles form an A fragment. */
    for (int i = 0; i < BN / 4; i++) {
        t.p[i] = pack2<T>(t.s[i * 2], t.s[i * 2 + 1]);
    }
}
template <class T, int D, int BN>
static __device__ __forceinline__ void rescale(struct tile_state<T, D, BN> &t)
{
    if (t.moved) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            t.o[i] *= t.fix[i / 2 % 2];
        }
    }
}

/* The sum of a row's weights; each of its four threads has a part. */
static __device__ __forceinline__ float row_sum(float l)
{
    l += __shfl_xor_sync(~0u, l, 1);
    return l + __shfl_xor_sync(~0u, l, 2);
}

/* Writes row lane / 4 (r 0) or lane / 4 + 8 (1), of which `out` is the first value; NULL: no
 * row. l: sum of its weights. */
template <class T, int D, int BN>
static __device__ __forceinline__ void store_row(const struct tile_state<T, D, BN> &t, int r,
                                                 float l, uint16_t *out, bool bf16)
{
    float f = l > 0 ? 1.0f / l : 0.0f;
    if (!out) {
        return;
    }
    out += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        *(uint32_t *)(out + i * 8) =
            pack2_as(bf16, t.o[i * 4 + r * 2] * f, t.o[i * 4 + r * 2 + 1] * f);
    }
}

/* sum: of the weights of both rows. */
template <class T, int D, int BN>
static __device__ __forceinline__ void
store(const struct prefill_args &a, const struct tile_state<T, D, BN> &t, const float (&sum)[2],
      int first_row, int n, int head, int row)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int token = (row + r * 8) / (int)a.group, h = (row + r * 8) % (int)a.group;
        bool any = token < n && token < BM / (int)a.group;
        uint16_t *out = (uint16_t *)a.out + (size_t)(first_row + token) * a.out_stride +
                        (size_t)(head * (int)a.group + h) * D;
        store_row(t, r, sum[r], any ? out : NULL, a.out_bf16);
    }
}

/* Called by one thread of a block that takes no more tiles. The last block resets the counters for
 * the next launch. */
static __device__ __forceinline__ void end_tickets(uint32_t *tickets)
{
    __threadfence();
    if (atomicAdd(tickets + 1, 1) == gridDim.x - 1) {
        tickets[0] = 0;
        tickets[1] = 0;
    }
}

/* Each warp releases separately: another warp may still read the data. */
static __device__ __forceinline__ void release(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        bar_arrive(bar);
    }
}

static inline struct prefill_args
prefill_args_of(const struct bt_attn *a, const struct bt_attn_prefill *f, uint32_t layer_row)
{
    const struct bt_attn_pool *p = &a->pool;
    struct prefill_args args = {};
    args.q = (const uint8_t *)f->q;
    args.kv = (const uint8_t *)p->kv;
    args.out = f->out;
    args.q_stride = f->q_stride;
    args.out_stride = f->out_stride;
    args.items = f->items;
    args.n_items = f->n_items;
    args.tiles = f->n_items * p->kv_heads;
    args.table = f->table;
    args.table_stride = f->table_stride;
    args.group = p->heads / p->kv_heads;
    args.page_tokens = p->page_tokens;
    args.page_rows = p->page_rows;
    args.layer_row = layer_row;
    args.window = p->window;
    args.scale_log2 = a->scale_log2;
    args.out_bf16 = p->out_type == BT_CU_BF16;
    args.tickets = a->tickets;
    if (f->invariant) {
        args.seg = a->segments;
    }
    return args;
}

#endif
