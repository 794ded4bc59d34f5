/* Kernels of rows/hidden.h in plain C. */
#include <math.h>
#include <string.h>

#include "common/engine/cuda/rows/hidden.h"
#include "common/engine/sampler.h"
#include "tests/cuda_host/values.h"

struct early_row {
    const float *x, *add;
    uint32_t hidden;
    uint16_t *a;
};
static void run_early_row(const void *args)
{
    const struct early_row *p = args;
    for (uint32_t i = 0; i < p->hidden; i++) {
        p->a[i] = to_bf16(p->x[i] + (p->add ? p->add[i] : 0));
    }
}
cudaError_t bt_cu_early_row(const float *x, const float *add, uint32_t hidden, void *a,
                            cudaStream_t s)
{
    const struct early_row p = {x, add, hidden, a};
    cuda_host_launch(s, run_early_row, &p, sizeof(p));
    return cudaSuccess;
}

struct early_choose {
    const float *last, *early;
    uint32_t n, vocab;
    float *to;
};
static void run_early_choose(const void *args)
{
    const struct early_choose *p = args;
    uint32_t best = 0;
    double far = -INFINITY;
    for (uint32_t i = 0; i < p->n; i++) {
        double d = bt_sampler_divergence(p->last, p->early + (size_t)i * p->vocab, p->vocab);
        best = d > far ? i : best;
        far = d > far ? d : far;
    }
    memcpy(p->to, p->early + (size_t)best * p->vocab, p->vocab * sizeof(float));
}
cudaError_t bt_cu_early_choose(const float *last, const float *early, uint32_t n, uint32_t vocab,
                               float *far, float *to, cudaStream_t s)
{
    const struct early_choose p = {last, early, n, vocab, to};
    (void)far;
    cuda_host_launch(s, run_early_choose, &p, sizeof(p));
    return cudaSuccess;
}

static void run_states(const void *args)
{
    const struct bt_cu_states *p = args;
    for (uint32_t t = 0; t < p->n; t++) {
        const float *x = p->x + (size_t)t * p->hidden;
        float *to = p->to + (size_t)t * p->hidden;
        double mean = 0, square = 0;
        for (uint32_t i = 0; i < p->hidden; i++) {
            to[i] = x[i] + (p->add ? p->add[i] : 0);
            mean += p->bias ? to[i] / p->hidden : 0;
        }
        for (uint32_t i = 0; i < p->hidden; i++) {
            square += (to[i] - mean) * (to[i] - mean) / p->hidden;
        }
        for (uint32_t i = 0; i < p->hidden; i++) {
            to[i] = (float)((to[i] - mean) / sqrt(square + p->eps)) * p->w[i] +
                    (p->bias ? p->bias[i] : 0);
        }
        float length = sqrtf(dot(to, to, p->hidden));
        for (uint32_t i = 0; i < p->hidden; i++) {
            to[i] /= length;
        }
    }
}
cudaError_t bt_cu_states(const struct bt_cu_states *a, cudaStream_t s)
{
    cuda_host_launch(s, run_states, a, sizeof(*a));
    return cudaSuccess;
}

struct cosines {
    const float *states, *before;
    uint32_t n, n_before, hidden;
    uint32_t *most;
};
static void run_cosines(const void *args)
{
    const struct cosines *p = args;
    for (uint32_t i = 0; i < p->n; i++) {
        p->most[i] = 0;
        for (uint32_t t = 0; t < p->n_before; t++) {
            float c = dot(p->states + (size_t)i * p->hidden, p->before + (size_t)t * p->hidden,
                          p->hidden);
            uint32_t bits;
            memcpy(&bits, &c, 4);
            uint32_t key = bt_cu_cosine_key(bits);
            p->most[i] = key > p->most[i] ? key : p->most[i];
        }
    }
}
cudaError_t bt_cu_cosines(const float *states, uint32_t n, const float *before, uint32_t n_before,
                          uint32_t hidden, uint32_t *most, cudaStream_t s)
{
    const struct cosines p = {states, before, n, n_before, hidden, most};
    cuda_host_launch(s, run_cosines, &p, sizeof(p));
    return cudaSuccess;
}
