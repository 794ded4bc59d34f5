/* Random sampling cases for a device's sampler, and the host's sampler as the judge: rows of many
 * kinds of logits, each with parameters, history, bias and mask of its own. */
#ifndef BT_TESTS_SAMPLE_CASES_H
#define BT_TESTS_SAMPLE_CASES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/philox.h"
#include "common/engine/cuda/sample/sample_params.h"
#include "common/engine/sampler.h"

#define SAMPLE_CASES_LEN 300 /* most tokens of a history */

struct sample_cases { /* row and slot i belong to case i */
    uint32_t vocab, n;
    uint64_t rng;
    float *logits; /* [n][vocab] */
    float *early;  /* [n][vocab]: every third case has DoLa */
    struct bt_engine_params *params;
    uint32_t *bias_ids; /* [n][BT_CU_BIAS_MAX] */
    float *bias;
    uint32_t *tokens; /* [n][SAMPLE_CASES_LEN] */
    uint32_t *n_tokens, *n_prompt;
    uint32_t *mask;  /* [n][vocab / 32 rounded up], or NULL */
    uint32_t *known; /* [vocab / 32 rounded up], or NULL: sample_cases_ids */
    uint32_t n_known, end_known;
    struct bt_cu_draw *draws;
    struct bt_cu_bias *biases; /* [n][BT_CU_BIAS_MAX] */
    uint32_t *counts;          /* [n][vocab] */
};

static inline uint32_t sample_cases_random(struct sample_cases *c, uint32_t below)
{
    c->rng += 0x9E3779B97F4A7C15ull;
    uint64_t x = c->rng;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)((x ^ x >> 31) >> 32) % below;
}
static inline float sample_cases_normal(struct sample_cases *c)
{
    float sum = 0;
    for (int i = 0; i < 12; i++) {
        sum += (float)sample_cases_random(c, 1u << 20) / (float)(1 << 20);
    }
    return sum - 6;
}
#define SAMPLE_CASES_PICK(c, ...)                                                                  \
    (((const float[]){__VA_ARGS__})[sample_cases_random(c, sizeof((const float[]){__VA_ARGS__}) /  \
                                                               sizeof(float))])

static inline void sample_cases_logits(struct sample_cases *c, float *l)
{
    uint32_t kind = sample_cases_random(c, 12);
    float scale = SAMPLE_CASES_PICK(c, 0.01f, 1, 2.5f, 2.5f, 6), base = SAMPLE_CASES_PICK(c, 0, 9);
    for (uint32_t i = 0; i < c->vocab; i++) {
        float v = base + scale * sample_cases_normal(c);
        switch (kind) {
        case 0: v = base; break;              /* all the same */
        case 1: v = roundf(v * 2) / 2; break; /* many ties */
        case 2: v = sample_cases_random(c, 3) ? -INFINITY : v; break;
        case 3: v *= 2000; break;
        case 4: v = base + (float)sample_cases_random(c, 4) * 1e-6f; break;
        case 5: v = i % 97 == 0 ? 20 + v : v - 10; break; /* few that matter */
        case 6: v = sample_cases_random(c, 2) ? 0.0f : -0.0f; break;
        default: break;
        }
        l[i] = v;
    }
    if (sample_cases_random(c, 60) == 0) {
        l[sample_cases_random(c, c->vocab)] = SAMPLE_CASES_PICK(c, NAN, INFINITY);
    } else if (sample_cases_random(c, 60) == 0) {
        for (uint32_t i = 0; i < c->vocab; i++) {
            l[i] = -INFINITY;
        }
    }
}

static inline void sample_cases_params(struct sample_cases *c, uint32_t i)
{
    struct bt_engine_params *p = &c->params[i];
    float v = (float)c->vocab;
    *p = (struct bt_engine_params){
        .temperature = SAMPLE_CASES_PICK(c, 0, 0.05f, 0.5f, 0.7f, 1, 1, 1.5f, 3, 100),
        .top_p = SAMPLE_CASES_PICK(c, 1, 1, 1, 1e-6f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999f, 0.9999999f),
        .min_p = SAMPLE_CASES_PICK(c, 0, 0, 0, 0.001f, 0.05f, 0.5f, 1),
        .top_k = (uint32_t)SAMPLE_CASES_PICK(c, 0, 0, 0, 1, 2, 20, 50, 700, v / 2, v - 1, v, v + 5),
        .typical_p = SAMPLE_CASES_PICK(c, 0, 0, 0, 1, 0.9f, 0.5f, 0.1f),
        .xtc_probability = SAMPLE_CASES_PICK(c, 0, 0, 0, 0.5f, 1),
        .xtc_threshold = SAMPLE_CASES_PICK(c, 0.5f, 0.1f, 0.05f, 0.001f),
        .repetition_penalty = SAMPLE_CASES_PICK(c, 1, 1, 1, 1.2f, 0.8f),
        .frequency_penalty = SAMPLE_CASES_PICK(c, 0, 0, 0, 0.5f, -0.7f),
        .presence_penalty = SAMPLE_CASES_PICK(c, 0, 0, 0, 1.1f, -0.3f),
        .seed =
            (uint64_t)sample_cases_random(c, UINT32_MAX) << 32 | sample_cases_random(c, UINT32_MAX),
        .choice = sample_cases_random(c, 3),
        .logprobs = (int32_t)SAMPLE_CASES_PICK(c, -1, -1, 0, 1, 5, 20),
        .bias_ids = c->bias_ids + (size_t)i * BT_CU_BIAS_MAX,
        .bias = c->bias + (size_t)i * BT_CU_BIAS_MAX};
    if (sample_cases_random(c, 3) == 0) {
        p->min_new = sample_cases_random(c, SAMPLE_CASES_LEN);
        p->n_eos = 1 + sample_cases_random(c, BT_ENGINE_MAX_EOS);
        for (uint32_t k = 0; k < p->n_eos; k++) {
            p->eos[k] = sample_cases_random(c, c->vocab + 3);
        }
    }
    if (sample_cases_random(c, 3) == 0) { /* each id once: the order of adding them is open */
        p->n_bias = (uint32_t)SAMPLE_CASES_PICK(c, 1, 7, BT_CU_BIAS_MAX);
        p->n_bias = BT_MIN(p->n_bias, c->vocab);
        uint32_t first = sample_cases_random(c, c->vocab);
        for (uint32_t k = 0; k < p->n_bias; k++) {
            size_t at = (size_t)i * BT_CU_BIAS_MAX + k;
            c->bias_ids[at] = (first + k) % c->vocab;
            c->bias[at] = SAMPLE_CASES_PICK(c, -100, -2, 0.25f, 3, 100);
        }
    }
}

static inline void sample_cases_history(struct sample_cases *c, uint32_t i)
{
    uint32_t n = sample_cases_random(c, SAMPLE_CASES_LEN), few = sample_cases_random(c, 2);
    c->n_tokens[i] = n;
    c->n_prompt[i] = n ? sample_cases_random(c, n + 1) : 0;
    for (uint32_t k = 0; k < n; k++) {
        c->tokens[(size_t)i * SAMPLE_CASES_LEN + k] =
            sample_cases_random(c, few ? BT_MIN(c->vocab, 20u) : c->vocab);
    }
}

static inline void sample_cases_make(struct sample_cases *c, uint64_t seed, uint32_t vocab,
                                     uint32_t n, bool masked)
{
    uint32_t words = (vocab + 31) / 32;
    *c = (struct sample_cases){.vocab = vocab, .n = n, .rng = seed};
    c->logits = bt_calloc((size_t)n * vocab, sizeof(float));
    c->early = bt_calloc((size_t)n * vocab, sizeof(float));
    c->params = bt_calloc(n, sizeof(*c->params));
    c->bias_ids = bt_calloc((size_t)n * BT_CU_BIAS_MAX, sizeof(uint32_t));
    c->bias = bt_calloc((size_t)n * BT_CU_BIAS_MAX, sizeof(float));
    c->tokens = bt_calloc((size_t)n * SAMPLE_CASES_LEN, sizeof(uint32_t));
    c->n_tokens = bt_calloc(n, sizeof(uint32_t));
    c->n_prompt = bt_calloc(n, sizeof(uint32_t));
    c->draws = bt_calloc(n, sizeof(*c->draws));
    c->biases = bt_calloc((size_t)n * BT_CU_BIAS_MAX, sizeof(*c->biases));
    c->counts = bt_calloc((size_t)n * vocab, sizeof(uint32_t));
    c->mask = masked ? bt_calloc((size_t)n * words, sizeof(uint32_t)) : NULL;
    for (uint32_t i = 0; i < n; i++) {
        sample_cases_logits(c, c->logits + (size_t)i * vocab);
        sample_cases_params(c, i);
        sample_cases_history(c, i);
        for (uint32_t k = 0; masked && k < words; k++) {
            c->mask[(size_t)i * words + k] =
                sample_cases_random(c, UINT32_MAX) & sample_cases_random(c, UINT32_MAX);
        }
        for (uint32_t k = 0; k < c->params[i].n_bias; k++) {
            size_t at = (size_t)i * BT_CU_BIAS_MAX + k;
            c->biases[at] = (struct bt_cu_bias){c->bias_ids[at], c->bias[at]};
        }
        for (uint32_t k = 0; bt_cu_penalizes(&c->params[i]) && k < c->n_tokens[i]; k++) {
            uint32_t *at = &c->counts[(size_t)i * vocab + c->tokens[i * SAMPLE_CASES_LEN + k]];
            *at = k < c->n_prompt[i] ? *at | BT_CU_COUNT_PROMPT : *at + 1;
        }
        c->draws[i] =
            bt_cu_draw_make(&c->params[i], i, i, c->n_tokens[i], c->n_tokens[i] - c->n_prompt[i]);
        if (i % 3 == 2) {
            sample_cases_logits(c, c->early + (size_t)i * vocab);
            c->draws[i].early = i + 1;
        }
    }
}

/* Some ids have no token: the last third, with holes also others. Their logits are the largest. */
static inline void sample_cases_ids(struct sample_cases *c, bool holes)
{
    c->known = bt_calloc((c->vocab + 31) / 32, sizeof(uint32_t));
    for (uint32_t id = 0; id < c->vocab; id++) {
        bool known =
            id == 0 || (id < c->vocab - c->vocab / 3 && !(holes && sample_cases_random(c, 5) == 0));
        c->known[id / 32] |= (uint32_t)known << id % 32;
        c->n_known += known;
        c->end_known = known ? id + 1 : c->end_known;
        for (uint32_t i = 0; !known && i < c->n; i++) {
            c->logits[(size_t)i * c->vocab + id] += 20;
        }
    }
}

static inline void sample_cases_free(struct sample_cases *c)
{
    void *all[] = {c->early,    c->logits, c->params, c->bias_ids, c->bias, c->tokens, c->n_tokens,
                   c->n_prompt, c->draws,  c->biases, c->counts,   c->mask, c->known};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}

/* scaled logit + Gumbel of a token, as the host's sampler computes it; l: adjusted. */
static inline double sample_cases_value(const struct sample_cases *c, uint32_t i, const float *l,
                                        uint32_t token)
{
    const struct bt_engine_params *p = &c->params[i];
    const uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)};
    const uint32_t counter[4] = {c->n_tokens[i], p->choice, token / 4, 0};
    uint32_t w[4];
    bt_philox4x32(key, counter, w);
    double u = ((double)(w[token % 4] >> 9) + 0.5) * 0x1p-23;
    return (double)l[token] * (p->temperature > 0 ? 1 / p->temperature : 1) -
           (p->temperature > 0 ? log(-log(u)) : 0);
}

/* Is it the host's token of case i with a top_p that differs in the last bits? Where two tokens
 * have half of the mass each, half of it is one token or two. l: room for a row. */
static inline bool sample_cases_cut(const struct sample_cases *c, uint32_t i, uint32_t token,
                                    const struct bt_sampler_row *row, struct bt_sampler *s,
                                    float *l)
{
    bool same = false;
    for (int up = 0; !same && c->params[i].top_p < 1 && up < 2; up++) {
        struct bt_engine_params p = c->params[i];
        struct bt_sampler_row r = *row;
        struct bt_engine_out o = {0};
        p.top_p = BT_MIN(p.top_p * (up ? 1 + 1e-6f : 1 - 1e-6f), 1.0f);
        r.params = &p;
        r.logits = l;
        memcpy(l, c->logits + (size_t)i * c->vocab, c->vocab * sizeof(float));
        bt_sampler_run(s, &r, &o);
        same = o.token == token;
    }
    return same;
}

/* Is one of two tokens of case i as likely as min_p allows, but for the last bits? Then one sampler
 * may drop it and the other not. l: adjusted. */
static inline bool sample_cases_at_min_p(const struct sample_cases *c, uint32_t i, const float *l,
                                         uint32_t a, uint32_t b)
{
    const struct bt_engine_params *p = &c->params[i];
    if (!(p->min_p > 0) || !(p->temperature > 0)) {
        return false;
    }
    float most = l[a];
    for (uint32_t t = 0; t < c->vocab; t++) {
        most = BT_MAX(most, l[t]);
    }
    double least = most + p->temperature * log(p->min_p), slack = 1e-5 * (1 + fabs(least));
    return fabs(l[a] - least) < slack || fabs(l[b] - least) < slack;
}

/* Holds out[i] against the host's sampler. *near_p counts other tokens that are as good but for the
 * last bits. Returns how many cases are wrong, and prints them. */
static inline uint32_t sample_cases_check(struct sample_cases *c, const struct bt_cu_drawn *out,
                                          uint32_t *near_p)
{
    struct bt_sampler *s = bt_sampler_create(c->vocab);
    float *l = bt_malloc(c->vocab * sizeof(float));
    uint32_t wrong = 0, words = (c->vocab + 31) / 32;
    for (uint32_t i = 0; i < c->n; i++) {
        const struct bt_cu_drawn *d = &out[i];
        struct bt_engine_out o = {0};
        memcpy(l, c->logits + (size_t)i * c->vocab, c->vocab * sizeof(float));
        const struct bt_sampler_row r = {
            .logits = l,
            .params = &c->params[i],
            .position = c->n_tokens[i],
            .tokens = c->tokens + (size_t)i * SAMPLE_CASES_LEN,
            .n_tokens = c->n_tokens[i],
            .n_prompt = c->n_prompt[i],
            .mask = c->mask ? c->mask + (size_t)i * words : NULL,
            .known = c->known,
            .early = c->draws[i].early ? c->early + (size_t)i * c->vocab : NULL};
        bt_sampler_run(s, &r, &o);
        const char *what = d->bad != o.bad        ? "bad"
                           : d->n_top != o.n_top  ? "n_top"
                           : d->token >= c->vocab ? "vocabulary"
                                                  : NULL;
        bool same = d->token == o.token;
        if (!what && !same) {
            double a = sample_cases_value(c, i, l, d->token),
                   b = sample_cases_value(c, i, l, o.token);
            bool tie = fabs(a - b) < 1e-5 * (1 + fabs(b)) ||
                       sample_cases_at_min_p(c, i, l, d->token, o.token) ||
                       sample_cases_cut(c, i, d->token, &r, s, l);
            *near_p += tie;
            what = tie ? NULL : "token";
        }
        if (!what && same && fabsf(d->logprob - o.logprob) > 1e-5f * (1 + fabsf(o.logprob))) {
            what = "logprob";
        }
        for (uint32_t k = 0; !what && k < o.n_top; k++) {
            bool equal = d->top_logprob[k] == o.top_logprob[k] || /* -inf */
                         fabsf(d->top_logprob[k] - o.top_logprob[k]) <=
                             1e-5f * (1 + fabsf(o.top_logprob[k]));
            what = d->top_id[k] != o.top_id[k] || !equal ? "top logprobs" : NULL;
        }
        if (what) {
            const struct bt_engine_params *p = &c->params[i];
            printf(
                "# case %u of vocabulary %u: %s: token %u (bad %u, logprob %f), not %u (%u, %f): T "
                "%g top_k %u top_p %.8g min_p %g penalties %g %g %g bias %u min_new %u\n",
                i, c->vocab, what, d->token, d->bad, d->logprob, o.token, o.bad, o.logprob,
                p->temperature, p->top_k, p->top_p, p->min_p, p->repetition_penalty,
                p->frequency_penalty, p->presence_penalty, p->n_bias, p->min_new);
            wrong++;
        }
    }
    free(l);
    bt_sampler_destroy(s);
    return wrong;
}

#endif
