/* Products with few rows of activations (decode batches up to 8), bound by reading the weights
 * once, in bf16 or in e4m3, which becomes f16 in registers. The operands are swapped: 16 weight
 * rows are the M of an m16n8k16 product and tokens its N, so that tensor cores do the little
 * arithmetic. A dot product may run over k in any order: each thread reads 16 contiguous bytes of a
 * row and uses them as the columns that its fragments need. A block computes 16 rows; its warps
 * divide k, and add their sums in shared memory. Weights do not depend on the kernel before, so a
 * block requests its first weights before it waits for that kernel's end (programmatic dependent
 * launch). */
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/rows/rows.h"

#define WARPS 8

enum { F32 = 0, F32_ADD = 1, SWIGLU = 2 };

struct gemv_args {
    const uint8_t *w;
    const uint16_t *x;
    void *y;
    uint32_t m, n, k;
    /* The scale of row r and columns from 128 i on: scale[(r >> shift) * stride + i * step]. */
    const float *scale;
    uint32_t scale_shift, scale_stride, scale_step;
};

static __device__ __forceinline__ uint4 load_once(const uint8_t *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

static __device__ __forceinline__ void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* 16 rows x 32 columns times 32 x 8: two products, with the order of columns described above. */
static __device__ __forceinline__ void step32(float (&c)[4], const uint4 &lo, const uint4 &hi,
                                              const uint4 &x)
{
    const uint32_t a0[4] = {lo.x, hi.x, lo.y, hi.y}, a1[4] = {lo.z, hi.z, lo.w, hi.w};
    mma16816<__nv_bfloat16>(c, a0, x.x, x.y);
    mma16816<__nv_bfloat16>(c, a1, x.z, x.w);
}

/* 16 rows x 64 columns of e4m3 times 64 x 8: four products. x: columns in their natural order. */
static __device__ __forceinline__ void step64(float (&c)[4], const uint4 &lo, const uint4 &hi,
                                              const uint4 (&x)[2])
{
    const uint32_t w0[4] = {lo.x, lo.y, lo.z, lo.w}, w1[4] = {hi.x, hi.y, hi.z, hi.w};
    const uint32_t x0[4] = {x[0].x, x[0].y, x[0].z, x[0].w},
                   x1[4] = {x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t a[4];
        f16_of_e4m3(w0[i], a[0], a[2]);
        f16_of_e4m3(w1[i], a[1], a[3]);
        mma16816<__half>(c, a, x0[i], x1[i]);
    }
}

/* Adds a step's product; e4m3: with the scales of its two rows. */
template <bool E4M3, int XS>
static __device__ __forceinline__ void step(float (&c)[4], const uint4 &lo, const uint4 &hi,
                                            const uint4 (&x)[XS], float2 scale)
{
    if constexpr (!E4M3) {
        step32(c, lo, hi, x[0]);
    } else {
        float part[4] = {};
        step64(part, lo, hi, x);
        c[0] += part[0] * scale.x;
        c[1] += part[1] * scale.x;
        c[2] += part[2] * scale.y;
        c[3] += part[3] * scale.y;
    }
}

/* UNROLL: pairs of 16-byte loads in flight for each thread. A grid with three blocks for each
 * multiprocessor needs four; one with two blocks needs eight, for the same number of bytes in
 * flight. */
template <int MODE, uint32_t UNROLL, bool E4M3>
static __global__ void __launch_bounds__(WARPS * 32, UNROLL == 4 ? 3 : 2)
    gemv_kernel(const __grid_constant__ struct gemv_args a)
{
    /* A thread's columns in a step, 16 bytes of two rows; a warp's. */
    constexpr uint32_t EACH = E4M3 ? 16 : 8, COLS = 4 * EACH, XS = EACH / 8, SIZE = E4M3 ? 1 : 2;
    constexpr uint32_t GROUP = E4M3 ? 2 : UNROLL; /* steps whose x is loaded at once */
    __shared__ float sum[WARPS][16][9];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t row0 = MODE == SWIGLU ? blockIdx.x * 8 + g : blockIdx.x * 16 + g;
    const uint32_t row1 = MODE == SWIGLU ? a.n / 2 + row0 : row0 + 8;
    const uint32_t col = (warp * 4 + lane % 4) * EACH, steps = a.k / COLS;
    const uint8_t *w0 = a.w + ((size_t)row0 * a.k + col) * SIZE;
    const uint8_t *w1 = a.w + ((size_t)row1 * a.k + col) * SIZE;
    const float *s0 = a.scale + (size_t)(row0 >> a.scale_shift) * a.scale_stride;
    const float *s1 = a.scale + (size_t)(row1 >> a.scale_shift) * a.scale_stride;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float c[4] = {};
    uint4 lo[UNROLL], hi[UNROLL];
    const auto fetch = [&](uint32_t u, uint32_t s) {
        bool in = s < steps;
        size_t at = (size_t)(s - warp) * COLS * SIZE;
        lo[u] = in ? load_once(w0 + at) : zero;
        hi[u] = in ? load_once(w1 + at) : zero;
    };
    const auto block = [&](uint32_t s) { /* whose scale step s has */
                                         return min(s, steps - 1) * COLS / BT_CU_WEIGHT_BLOCK *
                                                a.scale_step;
    };
    early_next();
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) {
        fetch(u, u * WARPS + warp);
        if (E4M3 && lane == 0) {
            prefetch_l2(s0 + block(u * WARPS + warp));
            prefetch_l2(s1 + block(u * WARPS + warp));
        }
    }
    early_wait();
    for (uint32_t s = warp; s < steps; s += UNROLL * WARPS) {
#pragma unroll
        for (uint32_t v = 0; v < UNROLL; v += GROUP) {
            uint4 x[GROUP][XS];
            float2 scale[GROUP];
#pragma unroll
            for (uint32_t u = 0; u < GROUP; u++) {
                uint32_t at = (s - warp + (v + u) * WARPS) * COLS + col;
                bool in = g < a.m && s + (v + u) * WARPS < steps;
#pragma unroll
                for (uint32_t i = 0; i < XS; i++) {
                    x[u][i] = in ? *(const uint4 *)(a.x + (size_t)g * a.k + at + i * 8) : zero;
                }
                if constexpr (E4M3) {
                    uint32_t b = block(s + (v + u) * WARPS);
                    scale[u] = make_float2(__ldg(s0 + b), __ldg(s1 + b));
                }
            }
#pragma unroll
            for (uint32_t u = v; u < v + GROUP; u++) {
                step<E4M3>(c, lo[u], hi[u], x[u - v], scale[u - v]);
                fetch(u, s + (UNROLL + u) * WARPS);
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        sum[warp][g + i / 2 * 8][lane % 4 * 2 + i % 2] = c[i];
    }
    __syncthreads();
    uint32_t r = threadIdx.x % 16, token = threadIdx.x / 16;
    if (token < a.m && !(MODE == SWIGLU && r >= 8)) {
        float v[2] = {0, 0};
#pragma unroll
        for (uint32_t k = 0; k < WARPS; k++) {
            v[0] += sum[k][r][token];
            v[1] += MODE == SWIGLU ? sum[k][r + 8][token] : 0;
        }
        if (MODE == SWIGLU) {
            float h = v[0] / (1.0f + __expf(-v[0])) * v[1];
            size_t at = (size_t)token * (a.n / 2) + blockIdx.x * 8 + r;
            if constexpr (E4M3) {
                ((__half *)a.y)[at] = __float2half(f16_range(h));
            } else {
                ((__nv_bfloat16 *)a.y)[at] = __float2bfloat16(h);
            }
        } else {
            float *y = (float *)a.y + (size_t)token * a.n + blockIdx.x * 16 + r;
            *y = MODE == F32_ADD ? *y + v[0] : v[0];
        }
    }
}

extern "C" bool bt_cu_gemv_fits(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind)
{
    return m <= 8 && n % 16 == 0 && k % (kind == BT_CU_WEIGHT_BF16 ? 32 : 64) == 0;
}

template <int MODE>
static cudaError_t launch(struct bt_cu_weight w, const void *x, void *y, uint32_t m, uint32_t n,
                          uint32_t k, cudaStream_t s)
{
    const bool few = n / 16 <= 2 * multiprocessors(), blocks = w.kind == BT_CU_WEIGHT_BLOCKS;
    struct gemv_args a = {(const uint8_t *)w.w, (const uint16_t *)x, y, m, n, k};
    a.scale = w.scale;
    a.scale_shift = blocks ? 7 : 0;
    a.scale_stride = blocks ? bt_cu_scale_stride(k) : 1;
    a.scale_step = blocks ? 1 : 0;
    return launch_early(w.kind == BT_CU_WEIGHT_BF16
                            ? few ? gemv_kernel<MODE, 8, false> : gemv_kernel<MODE, 4, false>
                        : few ? gemv_kernel<MODE, 8, true>
                              : gemv_kernel<MODE, 4, true>,
                        n / 16, WARPS * 32, 0, s, a);
}

extern "C" cudaError_t bt_cu_gemv(struct bt_cu_weight w, const void *x, float *y, uint32_t m,
                                  uint32_t n, uint32_t k, bool add, cudaStream_t s)
{
    return add ? launch<F32_ADD>(w, x, y, m, n, k, s) : launch<F32>(w, x, y, m, n, k, s);
}

extern "C" cudaError_t bt_cu_gemv_swiglu(struct bt_cu_weight w, const void *x, void *y, uint32_t m,
                                         uint32_t n, uint32_t k, cudaStream_t s)
{
    return launch<SWIGLU>(w, x, y, m, n, k, s);
}
