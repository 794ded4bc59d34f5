/* A sequence's parameters as the device's sampler wants them. */
#ifndef BT_CUDA_SAMPLE_PARAMS_H
#define BT_CUDA_SAMPLE_PARAMS_H

#include <math.h>

#include "common/engine/cuda/sample/sample_args.h"
#include "common/engine/engine.h"

static inline bool bt_cu_penalizes(const struct bt_engine_params *p)
{
    return p->repetition_penalty != 1.0f || p->frequency_penalty != 0.0f ||
           p->presence_penalty != 0.0f;
}

/* The draw of the token at `position`, the generated-th (from 0) of its sequence. p is in range
 * (bt_sampler_check), n_bias at most BT_CU_BIAS_MAX. */
static inline struct bt_cu_draw bt_cu_draw_make(const struct bt_engine_params *p, uint32_t row,
                                                uint32_t slot, uint32_t position,
                                                uint32_t generated)
{
    struct bt_cu_draw d = {.seed = p->seed,
                           .position = position,
                           .choice = p->choice,
                           .inv_temperature = p->temperature > 0 ? 1.0f / p->temperature : 0,
                           .top_p = p->top_p,
                           .floor = p->min_p > 0 ? logf(p->min_p) : -INFINITY,
                           .typical_p = p->typical_p > 0 ? p->typical_p : 1,
                           .xtc_probability = p->xtc_probability,
                           .xtc_floor = (float)log((double)p->xtc_threshold),
                           .repetition = p->repetition_penalty,
                           .frequency = p->frequency_penalty,
                           .presence = p->presence_penalty,
                           .top_k = p->top_k,
                           .row = row,
                           .slot = slot,
                           .logprobs = BT_MIN(p->logprobs, BT_CU_TOP_MAX),
                           .penalties = bt_cu_penalizes(p),
                           .n_bias = p->n_bias,
                           .n_banned = generated < p->min_new ? p->n_eos : 0};
    for (uint32_t i = 0; i < d.n_banned; i++) {
        d.banned[i] = p->eos[i];
    }
    return d;
}

_Static_assert(BT_CU_TOP_MAX == BT_ENGINE_MAX_TOP && BT_CU_EOS_MAX == BT_ENGINE_MAX_EOS,
               "sample_args.h");

#endif
