/* Attention over segments of KV, for engine.deterministic: a row's sums over each segment are made
 * apart and then added up one by one, in one order. So the same bits come out whether one block
 * does all of it or several share the segments. Segments of which a row sees nothing change
 * nothing.
 * Segments are the same for all sequences: four of a `unit` of tokens or tiles, then six of twice
 * that, then all of four times that. Short sequences need small ones to use many multiprocessors;
 * prompts of long ones would pay for them, as what ends a segment keeps no tensor core busy.
 * Device code only. */
#ifndef BT_CUDA_ATTN_SEGMENTS_CUH
#define BT_CUDA_ATTN_SEGMENTS_CUH

#include <math.h>

#include "common/engine/cuda/mma.cuh"

/* The segment of a position, and where a segment begins; positions and unit in tokens or tiles. */
static __device__ __forceinline__ int segment_of(int at, int unit)
{
    return at < 4 * unit ? at / unit : at < 16 * unit ? 2 + at / (2 * unit) : 6 + at / (4 * unit);
}
static __device__ __forceinline__ int segment_begin(int segment, int unit)
{
    return segment < 4    ? segment * unit
           : segment < 10 ? (segment - 2) * (2 * unit)
                          : (segment - 6) * (4 * unit);
}

/* Of a query row: the reference of its weights (log2; -INFINITY: it saw nothing), their sum. */
struct segment_sums {
    float m, l;
};
/* What outputs are to be multiplied by: of the segments before, and of this one. */
struct segment_factors {
    float before, now;
};

static __device__ __forceinline__ struct segment_sums no_sums(void)
{
    return {-INFINITY, 0};
}

/* Rounds as red does, which flushes small numbers to zero. */
static __device__ __forceinline__ float add_ftz(float a, float b)
{
    float c;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

/* Adds the sums of the next segment. The reference stays that of the first segment, and outputs
 * that are summed need no factor, unless weights would become too large for f32. */
static __device__ __forceinline__ struct segment_factors add_sums(struct segment_sums &total,
                                                                  const struct segment_sums &now)
{
    constexpr float FAR = 64; /* log2 */
    struct segment_factors f = {1, now.m == -INFINITY ? 0.0f : 1.0f};
    if (total.m == -INFINITY) {
        total = now;
        return f;
    }
    const float up = now.m - total.m;
    if (up > FAR) {
        f.before = ex2(-up);
        total.m = now.m;
    } else {
        f.now = ex2(up);
    }
    total.l = add_ftz(__fmul_rn(total.l, f.before), __fmul_rn(now.l, f.now));
    return f;
}
static __device__ __forceinline__ float add_output(float before, float now,
                                                   const struct segment_factors &f)
{
    return add_ftz(__fmul_rn(before, f.before), __fmul_rn(now, f.now));
}

/* Four outputs of a thread, two of each of its rows, and their sums in memory that no other thread
 * uses. To add some needs no wait for what is there. The factor `before` is applied first, which is
 * rare. */
static __device__ __forceinline__ void add_kept(float4 *kept, const float *o,
                                                const struct segment_factors (&f)[2])
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(kept),
                 "f"(__fmul_rn(o[0], f[0].now)), "f"(__fmul_rn(o[1], f[0].now)),
                 "f"(__fmul_rn(o[2], f[1].now)), "f"(__fmul_rn(o[3], f[1].now))
                 : "memory");
}
/* The last segment's outputs become the sums of all. */
static __device__ __forceinline__ void take_kept(const float4 *kept, float *o,
                                                 const struct segment_factors (&f)[2])
{
    const float4 v = __ldcg(kept);
    o[0] = add_ftz(v.x, __fmul_rn(o[0], f[0].now));
    o[1] = add_ftz(v.y, __fmul_rn(o[1], f[0].now));
    o[2] = add_ftz(v.z, __fmul_rn(o[2], f[1].now));
    o[3] = add_ftz(v.w, __fmul_rn(o[3], f[1].now));
}
static __device__ __forceinline__ void scale_kept(float4 *kept,
                                                  const struct segment_factors (&f)[2])
{
    const float4 v = __ldcg(kept);
    __stcg(kept, make_float4(__fmul_rn(v.x, f[0].before), __fmul_rn(v.y, f[0].before),
                             __fmul_rn(v.z, f[1].before), __fmul_rn(v.w, f[1].before)));
}
static __device__ __forceinline__ bool any_scale(const struct segment_factors (&f)[2])
{
    return f[0].before != 1.0f || f[1].before != 1.0f;
}

#endif
