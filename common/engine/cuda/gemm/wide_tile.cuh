/* What large products on Hopper share (wide.cu, the experts of many rows), whose blocks run in
 * pairs: a ring of four stages of 64 columns of 128 and 256 rows, two warpgroups that multiply 64
 * rows each with 256, and SwiGLU. Device code only. */
#ifndef BT_CUDA_WIDE_TILE_CUH
#define BT_CUDA_WIDE_TILE_CUH

#include "common/engine/cuda/hopper.cuh"
#include "common/engine/cuda/mma.cuh"

#define BM      128
#define BN      256
#define BK      64
#define STAGES  4
#define GROUPS  2 /* computing warpgroups */
#define WARPS   (GROUPS * 4)
#define THREADS ((GROUPS + 1) * 128)
#define X_BYTES (BM * BK * 2)
#define W_BYTES (BN * BK * 2)
#define STAGE   (X_BYTES + W_BYTES)
#define STAGED  4096 /* a warp's 16 rows of 128 values before they are written */
#define SMEM    (STAGES * STAGE + WARPS * STAGED + 1024)

struct wide_bars {
    uint64_t full[STAGES], empty[STAGES];
};

/* Each warp releases separately, in both blocks. */
static __device__ __forceinline__ void release(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 < 2) {
        cluster_arrive(bar, threadIdx.x % 32);
    }
}

/* A warpgroup's position in the ring, and the stage whose products may still be running. */
struct place {
    struct ring r;
    uint32_t before;
};

/* After it, the products of the step before have ended. */
static __device__ __forceinline__ void settle(struct wide_bars *b, struct place &c, bool first)
{
    if (!first) {
        wgmma_wait<1>();
        release(c.before);
    }
    c.before = smem_addr(&b->empty[c.r.at]);
    c.r.next(STAGES);
}

static __device__ __forceinline__ float2 bf16_pair(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

#endif
