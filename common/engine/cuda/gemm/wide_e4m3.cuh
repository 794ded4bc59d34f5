/* The main loop of large products in e4m3 on Hopper: a warpgroup's 64 rows of x times 256 rows of
 * w, over the ring of wide_tile.cuh, whose stages are 128 columns here. Sums of 128 columns, times
 * their scales, are added up in f32 (wgmma_e4m3.cuh says why). The 256 columns are two halves, one
 * after the other: their scales differ, and both sums would not fit in the registers. While a
 * warpgroup adds up one half, the tensor cores work for the other warpgroup. For that they take
 * turns: if both began at once, both would end at once. Device code only. */
#ifndef BT_CUDA_WIDE_E4M3_CUH
#define BT_CUDA_WIDE_E4M3_CUH

#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/wgmma_e4m3.cuh"

/* Where this thread finds its scales, a step of 128 columns after the other: those of its two rows
 * of x and of the two halves of w's rows. */
struct e4m3_scales {
    const float *x[2], *w[2];
    uint32_t x_step, w_step;
};
struct e4m3_scale {
    float x[2], w[2];
};
static __device__ __forceinline__ struct e4m3_scale load_scale(const struct e4m3_scales &s,
                                                               uint32_t step)
{
    struct e4m3_scale v;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v.x[i] = __ldg(s.x[i] + (size_t)step * s.x_step);
        v.w[i] = __ldg(s.w[i] + step * s.w_step);
    }
    return v;
}

/* Before the first sum_e4m3: the first computing warpgroup has the first turn. */
static __device__ __forceinline__ void begin_turns(void)
{
    if (threadIdx.x / 128 == 2) {
        named_arrive(1, GROUPS * 128);
    }
}

/* All computing warpgroups sum as many steps. acc[64 half + 4 i + 2 (row) + (column)], rows and
 * columns as in wide.cu. */
static __device__ __forceinline__ void sum_e4m3(struct wide_bars *b, uint32_t smem, struct place &c,
                                                const struct e4m3_scales &s, uint32_t steps,
                                                float (&acc)[128])
{
    const uint32_t group = threadIdx.x / 128; /* 1 or 2 */
    struct e4m3_scale now = load_scale(s, 0);
#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc[i] = 0;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step++) {
        const struct e4m3_scale next = load_scale(s, min(step + 1, steps - 1));
        const uint32_t at = smem + c.r.at * STAGE;
        const uint64_t x = wgmma_desc(at + (group - 1) * (64 * 128), 0, 1024);
        const uint64_t w = wgmma_desc(at + X_BYTES, 0, 1024);
        bar_wait(smem_addr(&b->full[c.r.at]), c.r.phase);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float f[2] = {now.x[0] * now.w[half], now.x[1] * now.w[half]};
            float part[64];
            named_sync(group, GROUPS * 128);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) { /* 32 columns are 32 bytes */
                wgmma_ss_e4m3(part, x + j * 2, w + half * (W_BYTES / 2 / 16) + j * 2, j > 0);
                j < 2 ? (void)0 : wgmma_commit();
            }
            wgmma_wait<1>(); /* the other's products begin when the last of these run */
            named_arrive(3 - group, GROUPS * 128);
            wgmma_wait<0>();
            wgmma_hold(part);
            if (half == 1) {
                release(smem_addr(&b->empty[c.r.at]));
            }
#pragma unroll
            for (int i = 0; i < 64; i++) {
                acc[half * 64 + i] += part[i] * f[i / 2 % 2];
            }
        }
        c.r.next(STAGES);
        now = next;
    }
}

#endif
