/* Attention over segments of KV, for engine.deterministic: a row's sums over each segment, a
 * multiple of a fixed number of tokens, are made apart and then added up one by one, in one order.
 * So the same bits come out whether one block does all of it or several share the segments.
 * Segments of which a row sees nothing change nothing. Device code only. */
#ifndef BT_CUDA_ATTN_SEGMENTS_CUH
#define BT_CUDA_ATTN_SEGMENTS_CUH

#include <math.h>

#include "common/engine/cuda/mma.cuh"

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

/* Adds the sums of the next segment. */
static __device__ __forceinline__ struct segment_factors add_sums(struct segment_sums &total,
                                                                  const struct segment_sums &now)
{
    const float top = fmaxf(total.m, now.m), base = top == -INFINITY ? 0.0f : top;
    const struct segment_factors f = {ex2(total.m - base), ex2(now.m - base)};
    total.l = __fmaf_rn(now.l, f.now, __fmul_rn(total.l, f.before));
    total.m = top;
    return f;
}
static __device__ __forceinline__ float add_output(float before, float now,
                                                   const struct segment_factors &f)
{
    return __fmaf_rn(now, f.now, __fmul_rn(before, f.before));
}

#endif
