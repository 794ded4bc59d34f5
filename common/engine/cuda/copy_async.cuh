/* Copies to shared memory by cp.async (PTX for sm_80 and newer). Device code only. */
#ifndef BT_CUDA_COPY_ASYNC_CUH
#define BT_CUDA_COPY_ASYNC_CUH

#include <stdint.h>

/* Copies 16 bytes, bypassing the L1 cache. */
static __device__ __forceinline__ void async_load(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
/* Writes 16 bytes of zeros. */
static __device__ __forceinline__ void async_zero(uint32_t to, const void *any)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 0;" ::"r"(to), "l"(any) : "memory");
}
/* Makes one of the barrier's expected arrivals when this thread's copies so far are done. */
static __device__ __forceinline__ void async_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

/* Ends a group of this thread's copies; waits until all groups but the last N are done. */
static __device__ __forceinline__ void async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* The place of 16-byte piece c of row r, for rows of ROW bytes (128 or 64) from a multiple of 1,024
 * on. The pieces of a row are permuted as in the copy engine's 128- and 64-byte swizzles, so that
 * pieces c of eight rows are in different banks. */
template <uint32_t ROW> static __device__ __forceinline__ uint32_t swizzled(uint32_t r, uint32_t c)
{
    static_assert(ROW == 128 || ROW == 64, "no such swizzle");
    return r * ROW + (c ^ (ROW == 128 ? r % 8 : r / 2 % 4)) * 16;
}

#endif
