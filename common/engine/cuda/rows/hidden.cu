/* Kernels of hidden.h. They run for few rows, so none is tuned beyond reading memory in order. */
#include "common/engine/cuda/rows/hidden.h"

#include <cuda_bf16.h>
#include <math.h>

#include "common/engine/cuda/block_sum.cuh"

#define THREADS 512

static __global__ void early_row_kernel(const float *x, const float *add, uint32_t hidden,
                                        __nv_bfloat16 *a)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < hidden;
         i += gridDim.x * blockDim.x) {
        a[i] = __float2bfloat16_rn(x[i] + (add ? add[i] : 0.0f));
    }
}

extern "C" cudaError_t bt_cu_early_row(const float *x, const float *add, uint32_t hidden, void *a,
                                       cudaStream_t s)
{
    early_row_kernel<<<(hidden + 255) / 256, 256, 0, s>>>(x, add, hidden, (__nv_bfloat16 *)a);
    return cudaGetLastError();
}

/* ---- DoLa ---- */

static __device__ float block_max(float v)
{
    __shared__ float part[32];
    for (int d = 16; d > 0; d /= 2) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : -INFINITY;
    for (int d = 16; d > 0; d /= 2) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    }
    return v;
}

/* log sum exp of a row; NaN if a value is NaN or +inf. */
static __device__ float block_lse(const float *l, uint32_t vocab)
{
    float most = -INFINITY, sum = 0;
    bool bad = false;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        most = fmaxf(most, l[i]);
        bad |= !(l[i] < INFINITY);
    }
    bad = __syncthreads_or(bad);
    most = block_max(most);
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        sum += expf(l[i] - most);
    }
    sum = block_sum(sum);
    __syncthreads();
    return bad ? NAN : most + logf(sum);
}

static __global__ void __launch_bounds__(THREADS)
    divergence_kernel(const float *last, const float *early, uint32_t vocab, float *far)
{
    const float *other = early + (size_t)blockIdx.x * vocab;
    float lse = block_lse(last, vocab), other_lse = block_lse(other, vocab), sum = 0;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        float p = last[i] - lse, q = other[i] - other_lse, m = 0.5f * (expf(p) + expf(q));
        sum += m > 0 ? m * (2 * logf(m) - p - q) : 0;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        far[blockIdx.x] = isnan(lse) || isnan(other_lse) ? -INFINITY : sum;
    }
}

static __global__ void choose_kernel(const float *far, const float *early, uint32_t n,
                                     uint32_t vocab, float *to)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        best = far[i] > far[best] ? i : best;
    }
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab;
         i += gridDim.x * blockDim.x) {
        to[i] = early[(size_t)best * vocab + i];
    }
}

extern "C" cudaError_t bt_cu_early_choose(const float *last, const float *early, uint32_t n,
                                          uint32_t vocab, float *far, float *to, cudaStream_t s)
{
    if (n > 1) {
        divergence_kernel<<<n, THREADS, 0, s>>>(last, early, vocab, far);
    }
    choose_kernel<<<(vocab + 1023) / 1024, 256, 0, s>>>(far, early, n, vocab, to);
    return cudaGetLastError();
}

/* ---- contrastive search ---- */

static __global__ void __launch_bounds__(THREADS)
    states_kernel(const __grid_constant__ struct bt_cu_states a)
{
    const float *x = a.x + (size_t)blockIdx.x * a.hidden;
    float *to = a.to + (size_t)blockIdx.x * a.hidden, mean = 0, scale = 1, sum = 0;
    for (uint32_t i = threadIdx.x; a.bias && i < a.hidden; i += blockDim.x) {
        mean += x[i] + (a.add ? a.add[i] : 0.0f);
    }
    mean = a.bias ? block_sum(mean) / (float)a.hidden : 0;
    for (uint32_t i = threadIdx.x; a.bias && i < a.hidden; i += blockDim.x) {
        float v = x[i] + (a.add ? a.add[i] : 0.0f) - mean;
        sum += v * v;
    }
    __syncthreads(); /* block_sum's memory */
    scale = a.bias ? rsqrtf(block_sum(sum) / (float)a.hidden + a.eps) : 1;
    sum = 0;
    for (uint32_t i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = x[i] + (a.add ? a.add[i] : 0.0f) - mean;
        v = v * scale * a.w[i] + (a.bias ? a.bias[i] : 0.0f);
        to[i] = v;
        sum += v * v;
    }
    __syncthreads();
    scale = rsqrtf(block_sum(sum));
    for (uint32_t i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        to[i] *= scale;
    }
}

extern "C" cudaError_t bt_cu_states(const struct bt_cu_states *a, cudaStream_t s)
{
    if (a->n) {
        states_kernel<<<a->n, THREADS, 0, s>>>(*a);
    }
    return cudaGetLastError();
}

/* A warp takes one earlier token after the other. */
static __global__ void __launch_bounds__(THREADS)
    cosines_kernel(const float *states, const float *before, uint32_t n_before, uint32_t hidden,
                   uint32_t *most)
{
    const float *own = states + (size_t)blockIdx.x * hidden;
    const uint32_t warps = THREADS / 32, lane = threadIdx.x % 32;
    float best = -INFINITY;
    for (uint32_t t = blockIdx.y * warps + threadIdx.x / 32; t < n_before; t += gridDim.y * warps) {
        const float *other = before + (size_t)t * hidden;
        float sum = 0;
        for (uint32_t i = lane; i < hidden; i += 32) {
            sum += own[i] * other[i];
        }
        for (int d = 16; d > 0; d /= 2) {
            sum += __shfl_xor_sync(~0u, sum, d);
        }
        best = fmaxf(best, sum);
    }
    if (lane == 0) {
        atomicMax(&most[blockIdx.x], bt_cu_cosine_key(__float_as_uint(best)));
    }
}

extern "C" cudaError_t bt_cu_cosines(const float *states, uint32_t n, const float *before,
                                     uint32_t n_before, uint32_t hidden, uint32_t *most,
                                     cudaStream_t s)
{
    uint32_t parts = (n_before + 63) / 64;
    cudaError_t e = cudaMemsetAsync(most, 0, n * sizeof(*most), s); /* below all keys */
    if (e == cudaSuccess && n) {
        cosines_kernel<<<dim3(n, parts < 32 ? (parts ? parts : 1) : 32), THREADS, 0, s>>>(
            states, before, n_before, hidden, most);
        e = cudaGetLastError();
    }
    return e;
}
