/* The main loop of large products on Hopper, for kernels whose blocks run in pairs: a tile of 128
 * rows of x times 256 of w, a ring of four stages of 64 columns, two warpgroups of 64 rows each,
 * and what their endings share. Device code only. */
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

/* Starts the products of 64 columns, or only waits for their data where they are not needed. After
 * settle, those of the step before have ended. */
static __device__ __forceinline__ void begin(struct wide_bars *b, uint32_t smem,
                                             const struct place &c, float (&acc)[128], bool first,
                                             bool needed = true)
{
    uint32_t at = smem + c.r.at * STAGE;
    uint64_t x = wgmma_desc(at + (threadIdx.x / 128 - 1) * (64 * 128), 0, 1024);
    uint64_t w = wgmma_desc(at + X_BYTES, 0, 1024);
    bar_wait(smem_addr(&b->full[c.r.at]), c.r.phase);
    if (!needed) {
        return;
    }
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BK / 16; j++) { /* 16 columns are 32 bytes */
        wgmma_ss_bf16(acc, x + j * 2, w + j * 2, !first || j > 0);
    }
    wgmma_commit();
}
static __device__ __forceinline__ void settle(struct wide_bars *b, struct place &c, bool first)
{
    if (!first) {
        wgmma_wait<1>();
        release(c.before);
    }
    c.before = smem_addr(&b->empty[c.r.at]);
    c.r.next(STAGES);
}

/* ---- endings ----
 * A thread holds rows lane / 4 and + 8 of its warp's 16, columns 8 i + lane % 4 * 2 and the next:
 * acc[4 i + 2 (row) + (column)]. */

/* The place in shared memory where this warp writes 128 columns of 16-bit values: 16 rows of 16
 * pieces of 16 bytes. The pieces are permuted by row, so that neither writing nor reading has bank
 * conflicts. */
static __device__ __forceinline__ uint32_t *staged(uint8_t *stage, uint32_t row, uint32_t piece)
{
    return (uint32_t *)(stage + row * 256 + (piece ^ row % 8) * 16);
}

static __device__ __forceinline__ float swiglu(float gate, float up)
{
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

static __device__ __forceinline__ float2 bf16_pair(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

/* v[4 i + 2 (row)] is gate; up follows it. */
static __device__ __forceinline__ void pack_swiglu(uint32_t (&v)[64], const float (&acc)[128])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        v[i * 2] = pack2<__nv_bfloat16>(acc[i * 2], acc[i * 2 + 1]);
        v[i * 2 + 1] = pack2<__nv_bfloat16>(acc[i * 2 + 64], acc[i * 2 + 65]);
    }
}

/* Puts a quarter of a warp's results into shared memory: 16 rows of 128 columns after four parts.
 */
static __device__ __forceinline__ void stage_swiglu(const uint32_t (&v)[64], uint8_t *stage,
                                                    int part)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = part * 4; i < part * 4 + 4; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 g = bf16_pair(v[i * 4 + r * 2]), u = bf16_pair(v[i * 4 + r * 2 + 1]);
            staged(stage, lane / 4 + r * 8, i)[lane % 4] =
                pack2<__nv_bfloat16>(swiglu(g.x, u.x), swiglu(g.y, u.y));
        }
    }
}

#endif
