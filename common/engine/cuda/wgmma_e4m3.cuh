/* Warpgroup matrix products of e4m3 (Hopper), as the PTX manual describes them: both operands in
 * shared memory, 32 values of k an instruction, k contiguous. The units keep about 14 bits of a
 * sum, so callers add sums of 128 columns in f32. Device code only. */
#ifndef BT_CUDA_WGMMA_E4M3_CUH
#define BT_CUDA_WGMMA_E4M3_CUH

#include "common/engine/cuda/hopper.cuh"

#define WG_E4M3(N, REGS, FREGS, A, B, P)                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, %" #A       \
                 ", %" #B ", p, 1, 1;\n}"                                                          \
                 : FREGS(d, 0)                                                                     \
                 : "l"(a), "l"(b), "r"(accumulate))

/* D[64 x N] (+)= A[64 x 32] * B[32 x N]; N is twice the length of d. */
static __device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[4], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_E4M3(8, WG_REGS4, WG_F4, 4, 5, 6);
}
static __device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[8], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_E4M3(16, WG_REGS8, WG_F8, 8, 9, 10);
}
static __device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[16], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_E4M3(32, WG_REGS16, WG_F16, 16, 17, 18);
}
static __device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[32], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_E4M3(64, WG_REGS32, WG_F32, 32, 33, 34);
}
static __device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[64], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_E4M3(128, WG_REGS64, WG_F64, 64, 65, 66);
}

#endif
