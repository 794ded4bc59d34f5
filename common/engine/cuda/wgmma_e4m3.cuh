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

#define WG_REGS24    WG_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_REGS40    WG_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_REGS56    WG_REGS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WG_F24(d, i) WG_F16(d, i), WG_F8(d, i + 16)
#define WG_F40(d, i) WG_F32(d, i), WG_F8(d, i + 32)
#define WG_F56(d, i) WG_F48(d, i), WG_F8(d, i + 48)

/* N columns, in the first N / 2 values of d. */
template <int N>
static __device__ __forceinline__ void wgmma_part_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b,
                                                       int accumulate)
{
    static_assert(N % 16 == 0 && N <= 128, "not made");
    if constexpr (N == 16) {
        WG_E4M3(16, WG_REGS8, WG_F8, 8, 9, 10);
    } else if constexpr (N == 32) {
        WG_E4M3(32, WG_REGS16, WG_F16, 16, 17, 18);
    } else if constexpr (N == 48) {
        WG_E4M3(48, WG_REGS24, WG_F24, 24, 25, 26);
    } else if constexpr (N == 64) {
        WG_E4M3(64, WG_REGS32, WG_F32, 32, 33, 34);
    } else if constexpr (N == 80) {
        WG_E4M3(80, WG_REGS40, WG_F40, 40, 41, 42);
    } else if constexpr (N == 96) {
        WG_E4M3(96, WG_REGS48, WG_F48, 48, 49, 50);
    } else if constexpr (N == 112) {
        WG_E4M3(112, WG_REGS56, WG_F56, 56, 57, 58);
    } else {
        WG_E4M3(128, WG_REGS64, WG_F64, 64, 65, 66);
    }
}

#endif
