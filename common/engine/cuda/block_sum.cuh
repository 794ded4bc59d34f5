/* The sum over a block's threads, the same in all of them. Device code only. */
#ifndef BT_CUDA_BLOCK_SUM_CUH
#define BT_CUDA_BLOCK_SUM_CUH

#include <stdint.h>

static __device__ __forceinline__ float block_sum(float v)
{
    __shared__ float s[33];
    for (int d = 16; d > 0; d /= 2) {
        v += __shfl_xor_sync(~0u, v, d);
    }
    if (threadIdx.x % 32 == 0) {
        s[threadIdx.x / 32] = v;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float w = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
        for (int d = 16; d > 0; d /= 2) {
            w += __shfl_xor_sync(~0u, w, d);
        }
        if (threadIdx.x == 0) {
            s[32] = w;
        }
    }
    __syncthreads();
    return s[32];
}

#endif
