/* What DoLa and contrastive search read of the residual stream. All pointers are device memory;
 * every launch is asynchronous on its stream. */
#ifndef BT_CUDA_HIDDEN_H
#define BT_CUDA_HIDDEN_H

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* a[hidden] = x + add (NULL: nothing), in bf16. */
cudaError_t bt_cu_early_row(const float *x, const float *add, uint32_t hidden, void *a,
                            cudaStream_t s);
/* Copies to `to` [vocab] the row of early [n][vocab] whose distribution is furthest from that of
 * last [vocab], as bt_sampler_divergence of sampler.h says; far: [n], scratch. */
cudaError_t bt_cu_early_choose(const float *last, const float *early, uint32_t n, uint32_t vocab,
                               float *far, float *to, cudaStream_t s);

struct bt_cu_states {
    const float *x;        /* [n][hidden] */
    const float *add;      /* [hidden], or NULL: the bias of the product that x was added to */
    const float *w, *bias; /* of the final norm; bias: LayerNorm's, NULL: RMSNorm */
    uint32_t n, hidden;
    float eps;
    float *to; /* [n][hidden] */
};
/* to[t] = norm(x[t] + add), of length 1. */
cudaError_t bt_cu_states(const struct bt_cu_states *a, cudaStream_t s);
/* most[i] = the largest product of states[i] [hidden] with one of before [n_before][hidden], for n
 * states. Written as bt_cu_cosine reads it. */
cudaError_t bt_cu_cosines(const float *states, uint32_t n, const float *before, uint32_t n_before,
                          uint32_t hidden, uint32_t *most, cudaStream_t s);

#ifdef __cplusplus
}
#endif

/* Numbers that rise with the float, so that threads may take their maximum. */
#ifdef __CUDACC__
__device__
#endif
    static inline uint32_t
    bt_cu_cosine_key(uint32_t bits)
{
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
static inline float bt_cu_cosine(uint32_t key)
{
    union {
        uint32_t u;
        float f;
    } v = {.u = key >> 31 ? key & 0x7fffffffu : ~key};
    return v.f;
}

#endif
