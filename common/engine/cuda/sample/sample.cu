/* Kernels of sample.h; a row's work is in sample_row.cuh. */
#include "common/engine/cuda/sample/sample.h"

#include "common/engine/cuda/sample/sample_row.cuh"

static __global__ void __launch_bounds__(BT_CU_SAMPLE_THREADS)
    sample_kernel(const __grid_constant__ struct bt_cu_sampling a)
{
    sample_draw(&a, blockIdx.x);
}

static __global__ void __launch_bounds__(128)
    accept_kernel(const __grid_constant__ struct bt_cu_sampling a, uint32_t n)
{
    uint32_t i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) {
        sample_accept(&a, i);
    }
}

extern "C" cudaError_t bt_cu_sample_rows(const struct bt_cu_sampling *a, uint32_t n, cudaStream_t s)
{
    if (n) {
        sample_kernel<<<n, BT_CU_SAMPLE_THREADS, 0, s>>>(*a);
    }
    if (n && a->chosen) {
        accept_kernel<<<(n + 127) / 128, 128, 0, s>>>(*a, n);
    }
    return cudaGetLastError();
}

static __global__ void count_kernel(uint32_t *counts, uint32_t vocab, const uint32_t *tokens,
                                    uint32_t n, uint32_t n_prompt)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        if (tokens[i] >= vocab) {
            continue;
        }
        if (i < n_prompt) {
            atomicOr(&counts[tokens[i]], BT_CU_COUNT_PROMPT);
        } else {
            atomicAdd(&counts[tokens[i]], 1u);
        }
    }
}

extern "C" cudaError_t bt_cu_sample_count(uint32_t *counts, uint32_t vocab, const uint32_t *tokens,
                                          uint32_t n, uint32_t n_prompt, cudaStream_t s)
{
    if (n) {
        count_kernel<<<(n + 4095) / 4096, 256, 0, s>>>(counts, vocab, tokens, n, n_prompt);
    }
    return cudaGetLastError();
}

static __global__ void count_one_kernel(uint32_t *counts, uint32_t token)
{
    counts[token]++;
}

extern "C" cudaError_t bt_cu_sample_count_one(uint32_t *counts, uint32_t token, cudaStream_t s)
{
    count_one_kernel<<<1, 1, 0, s>>>(counts, token);
    return cudaGetLastError();
}
