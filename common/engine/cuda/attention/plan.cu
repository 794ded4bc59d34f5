/* Divides a decode step's KV over the multiprocessors (attention_priv.h): once for all layers, and
 * on the device, so that the step's graph never changes. */
#include "common/engine/cuda/attention/decode.cuh"

/* A run has at least this many tiles: starting a block costs as much as reading them. */
#define DECODE_RUN_MIN 2

/* One block computes the tiles of each sequence, their running sum, and the beginning of every
 * run. */
static __global__ void __launch_bounds__(1024)
    decode_plan_kernel(const struct bt_attn_queries *queries, int batch, int kv_heads, int window,
                       int blocks, struct bt_cu_decode_plan *plan, struct bt_cu_decode_seq *seqs,
                       struct bt_cu_decode_run *runs)
{
    __shared__ int warp_sum[32], carry;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        carry = 0;
    }
    __syncthreads();
    for (int at = 0; at < batch; at += 1024) {
        int i = at + threadIdx.x;
        struct bt_attn_queries q = {0, 0, 0, 0};
        if (i < batch) {
            q = queries[i];
        }
        int len = q.len, seen = len - q.n + 1; /* seen: by the first query */
        int tile0 = window && seen > window ? (seen - window) / DECODE_TILE : 0;
        int tiles = (len + DECODE_TILE - 1) / DECODE_TILE - tile0, sum = tiles;
        for (int d = 1; d < 32; d *= 2) {
            int v = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? v : 0;
        }
        if (lane == 31) {
            warp_sum[warp] = sum;
        }
        __syncthreads();
        int before = carry;
        for (int w = 0; w < warp; w++) {
            before += warp_sum[w];
        }
        if (i < batch) {
            seqs[i] = {before + sum - tiles, tiles, tile0, len, q.row, q.n, q.slot, 0};
        }
        __syncthreads();
        if (threadIdx.x == 1023) {
            carry = before + sum;
        }
        __syncthreads();
    }
    int total = carry * kv_heads;
    int n = min(blocks, (total + DECODE_RUN_MIN - 1) / DECODE_RUN_MIN);
    if (threadIdx.x == 0) {
        *plan = {total, n, {0, 0}};
    }
    for (int r = threadIdx.x; r < blocks; r += 1024) {
        struct bt_cu_decode_run run = {0, 0, 0, 0};
        if (r < n) {
            int begin = run_begin(r, total, n), lo = 0, hi = batch - 1;
            while (lo < hi) { /* the last sequence with tiles that begins at or before it */
                int mid = (lo + hi + 1) / 2;
                if (seqs[mid].first * kv_heads <= begin) {
                    lo = mid;
                } else {
                    hi = mid - 1;
                }
            }
            int in = begin - seqs[lo].first * kv_heads, tiles = max(seqs[lo].tiles, 1);
            run = {lo, in / tiles, in % tiles, run_begin(r + 1, total, n) - begin};
        }
        runs[r] = run;
    }
}

extern "C" cudaError_t bt_attn_decode_plan(struct bt_attn *a, const struct bt_attn_queries *queries,
                                           uint32_t n, uint32_t most, cudaStream_t s)
{
    if (n == 0 || n > a->max_batch || most == 0 || most > bt_attn_decode_most(a)) {
        return cudaErrorInvalidValue;
    }
    decode_plan_kernel<<<1, 1024, 0, s>>>(queries, (int)n, (int)a->pool.kv_heads,
                                          (int)a->pool.window, (int)a->blocks, a->plan, a->seqs,
                                          a->decode_runs);
    return cudaGetLastError();
}

/* Several tokens of a sequence: 16 columns, or twice 16 where there is room. */
template <bool E4M3, int D> static uint32_t columns_of(const struct bt_attn *a)
{
    uint32_t group = a->pool.heads / a->pool.kv_heads;
    uint32_t single = stages_of<E4M3, D>(a, group) > 0 ? group : 0;
    return single == 0                                            ? 0
           : two_sets<E4M3, D>() && stages_of<E4M3, D>(a, 32) > 1 ? 32
           : stages_of<E4M3, D>(a, 16) > 0                        ? 16
                                                                  : single;
}

template <int D> static uint32_t columns_of(const struct bt_attn *a)
{
    return a->pool.type == BT_CU_E4M3 ? columns_of<true, D>(a) : columns_of<false, D>(a);
}

extern "C" uint32_t bt_attn_decode_columns(const struct bt_attn *a)
{
    return a->pool.head_dim == 64    ? columns_of<64>(a)
           : a->pool.head_dim == 128 ? columns_of<128>(a)
                                     : columns_of<256>(a);
}

extern "C" uint32_t bt_attn_decode_most(const struct bt_attn *a)
{
    return a->columns / (a->pool.heads / a->pool.kv_heads);
}
