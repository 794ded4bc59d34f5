/* Stages in shared memory between copying and computing warps: mbarriers, the position in a ring,
 * named barriers. Device code for sm_80 and newer. */
#ifndef BT_CUDA_RING_CUH
#define BT_CUDA_RING_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarriers: 64-bit words in shared memory, named by their shared address ---- */

static __device__ __forceinline__ void bar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
static __device__ __forceinline__ void bar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
#if __CUDA_ARCH__ >= 900
#define MBARRIER_WAIT "try_wait" /* sleeps for a while */
#else
#define MBARRIER_WAIT "test_wait"
#endif
/* Waits until the phase with this parity has ended. */
static __device__ __forceinline__ void bar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again:\n"
                 "mbarrier." MBARRIER_WAIT ".parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra.uni done;\n"
                 "bra.uni again;\n"
                 "done:\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* Position in a ring of stages: the stage, and the parity of the current round. */
struct ring {
    uint32_t at, phase;
    __device__ __forceinline__ void next(uint32_t stages)
    {
        if (++at == stages) {
            at = 0;
            phase ^= 1;
        }
    }
};

/* ---- named barriers of some warps of the block ---- */

static __device__ __forceinline__ void named_sync(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Arrives without waiting. */
static __device__ __forceinline__ void named_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* named_sync; returns whether any of the threads has v. */
static __device__ __forceinline__ bool named_any(uint32_t id, uint32_t threads, bool v)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.u32 p, %3, 0;\n"
                 "bar.red.or.pred q, %1, %2, p;\n"
                 "selp.u32 %0, 1, 0, q;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)v)
                 : "memory");
    return any != 0;
}

#endif
