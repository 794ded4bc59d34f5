/* What an invariant prefill computes at a time (attention_priv.h): once for all layers, and on the
 * device, so that the step's graph never changes. A single token that sees several segments is
 * divided into them where there are few tiles for the multiprocessors; no result depends on it. */
#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/attention/segments.cuh"

#define THREADS 1024
#define ENOUGH  2 /* tiles for each multiprocessor, with which nothing is divided */

struct segments_args {
    const struct bt_attn_item *items;
    int n, kv_heads, window, tokens, blocks;
    struct bt_attn_unit *units;
    int32_t *n_units;
};

/* The sum of the values of the threads before this one; *all_p: of all threads. */
static __device__ int sum_before(int v, int *all_p)
{
    __shared__ int warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v, before = 0, all = 0;
    for (int d = 1; d < 32; d *= 2) {
        int u = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? u : 0;
    }
    __syncthreads(); /* the sums before this one have been read */
    if (lane == 31) {
        warps[warp] = sum;
    }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) {
        before += w < warp ? warps[w] : 0;
        all += warps[w];
    }
    *all_p = all;
    return before + sum - v;
}

/* The segments that an item sees: [first, first + n). */
struct seen {
    int first, n;
};
static __device__ struct seen seen_by(const struct segments_args &a, const struct bt_attn_item &it)
{
    const int from = a.window ? max(it.pos + 1 - a.window, 0) : 0,
              first = segment_of(from, a.tokens);
    return {first, segment_of(it.pos + it.n - 1, a.tokens) - first + 1};
}

static __global__ void __launch_bounds__(THREADS) segments_plan_kernel(struct segments_args a)
{
    const int each = (a.n + THREADS - 1) / THREADS, begin = threadIdx.x * each;
    const int end = min(begin + each, a.n);
    const bool few = a.n * a.kv_heads < ENOUGH * a.blocks;
    int mine = 0, all;
    for (int i = begin; i < end; i++) {
        const struct seen s = seen_by(a, a.items[i]);
        mine += a.items[i].n == 1 && s.n > 1 ? s.n : 0;
    }
    const int parts0 = sum_before(mine, &all);
    int units = 0;
    for (int pass = 0; pass < 2; pass++) { /* counts; writes */
        int parts = parts0, at = pass ? sum_before(units, &all) : 0;
        for (int i = begin; i < end; i++) {
            const struct seen s = seen_by(a, a.items[i]);
            const bool may = a.items[i].n == 1 && s.n > 1;
            const bool divided = may && few && (parts + s.n) * a.kv_heads <= (int)BT_ATTN_PARTS;
            for (int k = 0; pass && k < (divided ? s.n : 1); k++) {
                a.units[at + k] = {i, s.first + k, parts * a.kv_heads, divided ? s.n : 0};
            }
            at += divided ? s.n : 1;
            parts += may ? s.n : 0;
        }
        units = at;
    }
    if (threadIdx.x == 0) {
        *a.n_units = all;
    }
}

extern "C" cudaError_t bt_attn_segments_plan(struct bt_attn *a, const struct bt_attn_item *items,
                                             uint32_t n_items, cudaStream_t s)
{
    const struct bt_attn_pool *p = &a->pool;
    if (p->segment == 0 || n_items == 0 || n_items > p->items) {
        return cudaErrorInvalidValue;
    }
    const struct segments_args args = {
        items,           (int)n_items,   (int)p->kv_heads,  (int)p->window,
        (int)p->segment, (int)a->blocks, a->segments.units, a->segments.n_units};
    segments_plan_kernel<<<1, THREADS, 0, s>>>(args);
    return cudaGetLastError();
}
