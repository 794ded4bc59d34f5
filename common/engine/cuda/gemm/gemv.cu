/* Products with few rows of activations (decode batches up to 8), bound by reading the weights
 * once. The operands are swapped: 16 weight rows are the M of an m16n8k16 product and tokens its N,
 * so that tensor cores do the little arithmetic. A dot product may run over k in any order: each
 * thread reads 16 contiguous bytes of a row and uses them as the columns that its fragments need. A
 * block computes 16 rows; its warps divide k, and add their sums in shared memory. Weights do not
 * depend on the kernel before, so a block requests its first weights before it waits for that
 * kernel's end (programmatic dependent launch). */
#include "common/engine/cuda/mma.cuh"
#include "common/engine/cuda/rows/rows.h"

#define WARPS 8

enum { F32 = 0, F32_ADD = 1, SWIGLU = 2 };

struct gemv_args {
    const uint16_t *w, *x;
    void *y;
    uint32_t m, n, k;
};

static __device__ __forceinline__ uint4 load_once(const uint16_t *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* 16 rows x 32 columns times 32 x 8: two products, with the order of columns described above. */
static __device__ __forceinline__ void step32(float (&c)[4], const uint4 &lo, const uint4 &hi,
                                              const uint4 &x)
{
    const uint32_t a0[4] = {lo.x, hi.x, lo.y, hi.y}, a1[4] = {lo.z, hi.z, lo.w, hi.w};
    mma16816<__nv_bfloat16>(c, a0, x.x, x.y);
    mma16816<__nv_bfloat16>(c, a1, x.z, x.w);
}

/* UNROLL: pairs of 16-byte loads in flight for each thread. A grid with three blocks for each
 * multiprocessor needs four; one with two blocks needs eight, for the same number of bytes in
 * flight. */
template <int MODE, uint32_t UNROLL>
static __global__ void __launch_bounds__(WARPS * 32, UNROLL == 4 ? 3 : 2)
    gemv_kernel(const __grid_constant__ struct gemv_args a)
{
    __shared__ float sum[WARPS][16][9];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t row0 = MODE == SWIGLU ? blockIdx.x * 8 + g : blockIdx.x * 16 + g;
    const uint32_t row1 = MODE == SWIGLU ? a.n / 2 + row0 : row0 + 8;
    const uint32_t col = (warp * 4 + lane % 4) * 8, steps = a.k / 32;
    const uint16_t *w0 = a.w + (size_t)row0 * a.k + col, *w1 = a.w + (size_t)row1 * a.k + col;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float c[4] = {};
    uint4 lo[UNROLL], hi[UNROLL];
    early_next();
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) {
        bool in = u * WARPS + warp < steps;
        lo[u] = in ? load_once(w0 + u * WARPS * 32) : zero;
        hi[u] = in ? load_once(w1 + u * WARPS * 32) : zero;
    }
    early_wait();
    for (uint32_t s = warp; s < steps; s += UNROLL * WARPS) {
        uint4 x[UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            uint32_t at = (s - warp + u * WARPS) * 32 + col;
            bool in = g < a.m && s + u * WARPS < steps;
            x[u] = in ? *(const uint4 *)(a.x + (size_t)g * a.k + at) : zero;
        }
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            step32(c, lo[u], hi[u], x[u]);
            uint32_t next = s + (UNROLL + u) * WARPS;
            size_t at = (size_t)(next - warp) * 32;
            lo[u] = next < steps ? load_once(w0 + at) : zero;
            hi[u] = next < steps ? load_once(w1 + at) : zero;
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
            ((__nv_bfloat16 *)a.y)[(size_t)token * (a.n / 2) + blockIdx.x * 8 + r] =
                __float2bfloat16(h);
        } else {
            float *y = (float *)a.y + (size_t)token * a.n + blockIdx.x * 16 + r;
            *y = MODE == F32_ADD ? *y + v[0] : v[0];
        }
    }
}

extern "C" bool bt_cu_gemv_fits(uint32_t m, uint32_t n, uint32_t k)
{
    return m <= 8 && n % 16 == 0 && k % 32 == 0;
}

template <int MODE> static cudaError_t launch(const struct gemv_args &a, cudaStream_t s)
{
    bool few = a.n / 16 <= 2 * multiprocessors();
    return launch_early(few ? gemv_kernel<MODE, 8> : gemv_kernel<MODE, 4>, a.n / 16, WARPS * 32, 0,
                        s, a);
}

extern "C" cudaError_t bt_cu_gemv(const void *w, const void *x, float *y, uint32_t m, uint32_t n,
                                  uint32_t k, bool add, cudaStream_t s)
{
    const struct gemv_args a = {(const uint16_t *)w, (const uint16_t *)x, y, m, n, k};
    return add ? launch<F32_ADD>(a, s) : launch<F32>(a, s);
}

extern "C" cudaError_t bt_cu_gemv_swiglu(const void *w, const void *x, void *y, uint32_t m,
                                         uint32_t n, uint32_t k, cudaStream_t s)
{
    const struct gemv_args a = {(const uint16_t *)w, (const uint16_t *)x, y, m, n, k};
    return launch<SWIGLU>(a, s);
}
