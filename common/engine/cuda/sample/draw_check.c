/* At the start, draws a few rows on the device and with common/engine/sampler.c. If more than one
 * token differs (one may, by the last bits of a logarithm), the device's sampler is not used: the
 * host then draws all tokens, which is slower but correct. Owner thread: the engine's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/cuda/sample/sample_params.h"
#include "common/log/log.h"

#define HISTORY 64u

static const uint32_t bias_ids[] = {0, 2, 3};
static const float bias[] = {2.5f, -100, 4};

static const struct bt_engine_params trials[] = {
    {.top_p = 1, .repetition_penalty = 1, .logprobs = 5},
    {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 1},
    {.temperature = 0.7f, .top_p = 1, .top_k = 50, .repetition_penalty = 1, .seed = 2},
    {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1, .seed = 3, .logprobs = -1},
    {.temperature = 0.8f,
     .top_p = 0.95f,
     .top_k = 40,
     .min_p = 0.02f,
     .repetition_penalty = 1,
     .seed = 4},
    {.temperature = 1,
     .top_p = 1,
     .repetition_penalty = 1.2f,
     .frequency_penalty = 0.5f,
     .presence_penalty = 0.7f,
     .seed = 5},
    {.temperature = 1.3f,
     .top_p = 0.999f,
     .repetition_penalty = 1,
     .seed = 6,
     .logprobs = BT_ENGINE_MAX_TOP,
     .n_bias = BT_ARRAY_LEN(bias),
     .bias_ids = bias_ids,
     .bias = bias},
    {.top_p = 1,
     .repetition_penalty = 1.1f,
     .logprobs = 1,
     .min_new = HISTORY,
     .n_eos = 1,
     .eos = {1}},
};

static bool agree(const struct bt_cu_drawn *d, const struct bt_engine_out *o)
{
    bool same = d->token == o->token && !d->bad == !o->bad && d->n_top == o->n_top &&
                fabsf(d->logprob - o->logprob) < 1e-3f;
    for (uint32_t i = 0; same && i < o->n_top; i++) {
        same = d->top_id[i] == o->top_id[i] && fabsf(d->top_logprob[i] - o->top_logprob[i]) < 1e-3f;
    }
    return same;
}

static bt_status_t trial(struct bt_engine *e, uint32_t n, float *logits, bool *same_p)
{
    struct bt_engine_params p = trials[n];
    uint32_t vocab = e->host.info.vocab, tokens[HISTORY];
    p.n_bias = vocab > 3 ? p.n_bias : 0;
    for (uint32_t i = 0; i < HISTORY; i++) {
        tokens[i] = i * i % vocab;
    }
    uint64_t x = n + 1;
    for (uint32_t i = 0; i < vocab; i++) { /* about as wide as a model's logits: a sum of four */
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        logits[i] = (float)((x >> 16 & 0xfff) + (x >> 28 & 0xfff) + (x >> 40 & 0xfff) + (x >> 52)) *
                    (1.0f / 512);
    }
    e->results.draws[0] = bt_cu_draw_make(&p, 0, 0, HISTORY, HISTORY / 2);
    bt_status_t st = bt_cu_draw_slot(e, 0, &p, tokens, HISTORY, HISTORY / 2);
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, cudaMemcpyAsync(e->act.logits, logits, vocab * sizeof(*logits),
                                 cudaMemcpyHostToDevice, e->compute));
    st = bt_cu_draw_rows(e, 0, 1, false, NULL);
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, cudaStreamSynchronize(e->compute));
    const struct bt_sampler_row row = {.logits = logits,
                                       .params = &p,
                                       .position = HISTORY,
                                       .tokens = tokens,
                                       .n_tokens = HISTORY,
                                       .n_prompt = HISTORY / 2,
                                       .known = e->host.ids.known};
    struct bt_engine_out want = {0};
    bt_sampler_run(e->host.sampler, &row, &want);
    *same_p = agree(&e->results.drawn[0], &want);
    return BT_OK;
}

bt_status_t bt_cu_draw_check(struct bt_engine *e)
{
    float *logits = bt_malloc(e->host.info.vocab * sizeof(*logits));
    uint32_t differ = 0;
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < BT_ARRAY_LEN(trials); i++) {
        bool same = false;
        st = trial(e, i, logits, &same);
        differ += !same;
    }
    free(logits);
    e->sampler.host_only = differ > 1;
    if (st == BT_OK && e->sampler.host_only) {
        BT_WARN("engine_draws_differ", "engine=cuda differ=%u of=%zu remedy=%s", differ,
                BT_ARRAY_LEN(trials),
                "the device's sampler does not agree with the host's: tokens are drawn on the "
                "host, which is slower; please report it");
    }
    return st;
}
