/* The weighted sums of what experts computed, added to the residual stream, and the norm of the
 * stream that the next layer reads: a block for each row, which it keeps in registers. */
#include "common/engine/cuda/block_sum.cuh"
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"

#define NONE 0xffffffffu

struct combine_args {
    const uint32_t *places;
    const float *weight;
    const void *y;
    float *out;
    uint32_t used, hidden;
    bool add;
    struct bt_cu_experts_next next; /* w NULL: no norm */
};

/* F32: of y, with few rows. A thread has `cols` neighbouring columns of each pass, and asks for
 * `batch` results at once: with many rows fewer, so that `blocks` run at once on a multiprocessor.
 */
template <bool F32> struct combining {
    typedef uint4 values; /* a thread's of y */
    static constexpr uint32_t cols = 8, batch = 4, blocks = 4;
};
template <> struct combining<true> {
    typedef float4 values;
    static constexpr uint32_t cols = 4, batch = 8, blocks = 1;
};

template <bool F32> static constexpr uint32_t threads_of(void)
{
    return 2048 / combining<F32>::cols;
}

static __device__ __forceinline__ float2 bf16_pair(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

/* Adds w times a thread's columns of a result. */
static __device__ __forceinline__ void add_result(float (&sum)[4], float w, const float4 &y)
{
    sum[0] += w * y.x;
    sum[1] += w * y.y;
    sum[2] += w * y.z;
    sum[3] += w * y.w;
}
static __device__ __forceinline__ void add_result(float (&sum)[8], float w, const uint4 &y)
{
    const float2 p[4] = {bf16_pair(y.x), bf16_pair(y.y), bf16_pair(y.z), bf16_pair(y.w)};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum[j] += w * (j % 2 ? p[j / 2].y : p[j / 2].x);
    }
}

/* Some of a row's results: their places and weights. */
template <uint32_t BATCH> struct batch {
    uint32_t n, place[BATCH];
    float weight[BATCH];
};
template <uint32_t BATCH>
static __device__ __forceinline__ struct batch<BATCH>
load_batch(const struct combine_args &a, size_t row, uint32_t used, uint32_t from) {
    struct batch<BATCH> b;
    b.n = min(used - from, BATCH);
#pragma unroll
    for (uint32_t k = 0; k < BATCH; k++) {
        b.place[k] = k < b.n ? __ldcg(a.places + row * a.used + from + k) : 0;
        b.weight[k] = k < b.n ? __ldcg(a.weight + row * a.used + from + k) : 0;
    }
    return b;
}

/* The sums of a batch's columns from `col` on. V: as many columns of y as a thread has. */
template <class V, int COLS, uint32_t BATCH>
static __device__ __forceinline__ void sum_batch(const struct combine_args &a,
                                                 const struct batch<BATCH> &b, uint32_t col,
                                                 float (&sum)[COLS])
{
    V y[BATCH];
#pragma unroll
    for (uint32_t k = 0; k < BATCH; k++) {
        if (k < b.n) {
            y[k] = ((const V *)a.y)[((size_t)b.place[k] * a.hidden + col) / COLS];
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < BATCH; k++) {
        if (k < b.n) {
            add_result(sum, b.weight[k], y[k]);
        }
    }
}

/* It runs after the experts' kernel, which lets it begin only once the kernels before that one have
 * ended. So it may read what they wrote (places, weights, out) before it waits, but not through the
 * L1 cache, which may still have older values until then. KEPT: passes over
 * the row whose values a thread keeps. */
template <bool F32, uint32_t KEPT>
static __global__ void __launch_bounds__(threads_of<F32>(), KEPT == 1 ? combining<F32>::blocks : 1)
    combine_kernel(const __grid_constant__ struct combine_args a)
{
    typedef combining<F32> of;
    typedef typename of::values V;
    constexpr uint32_t quads = of::cols / 4;
    const size_t row = blockIdx.x;
    const float *norm = a.next.w;
    float4 *to = (float4 *)(a.out + row * a.hidden);
    early_next();
    const uint32_t used = __ldcg(a.places + row * a.used) == NONE ? 0 : a.used;
    const struct batch<of::batch> first = load_batch<of::batch>(a, row, used, 0);
    for (uint32_t base = 0; base < a.hidden; base += KEPT * 2048) {
        float4 x[KEPT][quads], w[KEPT][quads];
        float square = 0;
#pragma unroll
        for (uint32_t i = 0; i < KEPT * quads; i++) {
            const uint32_t p = i / quads, j = i % quads;
            const uint32_t quad = (base + p * 2048) / 4 + threadIdx.x * quads + j;
            const bool in = quad < a.hidden / 4;
            x[p][j] = a.add && in ? __ldcg(to + quad) : make_float4(0, 0, 0, 0);
            w[p][j] = norm && in && F32 ? ((const float4 *)norm)[quad] : make_float4(0, 0, 0, 0);
        }
        if (base == 0) {
            early_wait();
        }
#pragma unroll
        for (uint32_t p = 0; p < KEPT; p++) {
            const uint32_t col = base + p * 2048 + threadIdx.x * of::cols;
            float sum[of::cols] = {};
            if (col >= a.hidden) {
                break;
            }
            sum_batch<V>(a, first, col, sum);
            for (uint32_t from = of::batch; from < used; from += of::batch) {
                sum_batch<V>(a, load_batch<of::batch>(a, row, used, from), col, sum);
            }
#pragma unroll
            for (uint32_t j = 0; j < quads; j++) {
                float4 &v = x[p][j];
                v = make_float4(v.x + sum[j * 4], v.y + sum[j * 4 + 1], v.z + sum[j * 4 + 2],
                                v.w + sum[j * 4 + 3]);
                square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                if (used > 0 || !a.add) {
                    to[col / 4 + j] = v;
                }
            }
        }
        if (!norm) {
            continue;
        }
        const float f = rsqrtf(block_sum(square) / (float)a.hidden + a.next.eps);
#pragma unroll
        for (uint32_t i = 0; i < KEPT * quads; i++) {
            const uint32_t p = i / quads, j = i % quads;
            const uint32_t quad = p * 512 + threadIdx.x * quads + j;
            if (quad < a.hidden / 4) {
                const float4 v = x[p][j], u = F32 ? w[p][j] : ((const float4 *)norm)[quad];
                ((uint2 *)a.next.a)[row * (a.hidden / 4) + quad] = pack4_as(
                    a.next.f16, v.x * f * u.x, v.y * f * u.y, v.z * f * u.z, v.w * f * u.w);
            }
        }
    }
}

template <bool F32>
static cudaError_t launch(const struct combine_args &a, uint32_t rows, cudaStream_t s)
{
    void (*kernel)(struct combine_args) = a.hidden <= 2048   ? combine_kernel<F32, 1>
                                          : a.hidden <= 4096 ? combine_kernel<F32, 2>
                                                             : combine_kernel<F32, 4>;
    static_assert(BT_CU_EXPERTS_NORM_MAX == 4 * 2048, "passes");
    return launch_early(kernel, rows, threads_of<F32>(), 0, s, a);
}

extern "C" cudaError_t bt_cu_experts_combine(const struct bt_cu_experts *x,
                                             const struct bt_cu_experts_plan *p, uint32_t rows,
                                             float *out, bool add,
                                             const struct bt_cu_experts_next *next, cudaStream_t s)
{
    struct combine_args a = {p->places, p->weight, p->y, out, x->used, x->hidden, add, {}};
    if (next) {
        a.next = *next;
    }
    return bt_cu_experts_few_rows(x, rows) ? launch<true>(a, rows, s) : launch<false>(a, rows, s);
}
