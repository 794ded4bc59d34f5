/* Choosing the next token from one row of logits. Pure; shared by all back ends that sample on the
 * host, and the reference for those that do it on a device.
 *
 * For logits l[0..V), in this order:
 *   raw logprobs   lp[i] = l[i] - log sum_j exp(l[j])           (before everything below; over
 *                  all rows of the model, those without a token too, as vLLM has it)
 *   mask           l[i] = -inf where the bit of i is 0, in mask or in known
 *   minimum length l[eos] = -inf while fewer than min_new tokens were generated
 *   DoLa           with p = softmax(l) and e = log softmax(early): l[i] = log p[i] - e[i] where
 *                  p[i] is at least a tenth of the largest p that is left, else -inf
 *                  (Chuang et al., DoLa)
 *   bias           l[id] += bias
 *   repetition     for i in prompt or generated: l[i] = l[i] > 0 ? l[i] / r : l[i] * r
 *                  (Keskar et al., CTRL, section 4.1, with the sign rule of Hugging Face)
 *   frequency, presence  l[i] -= f * count[i] + p * (count[i] > 0), count over generated tokens
 *   greedy (temperature 0): the largest l, lowest id first
 *   temperature    s[i] = l[i] / T
 *   min_p          keep p[i] >= min_p * max p                   (Nguyen et al., Min-p sampling)
 *   top_k          keep the k first in the order (falling s, rising id)
 *   top_p          of those, keep the shortest prefix whose renormalised mass reaches top_p
 *                  (Holtzman et al., nucleus sampling); at least one token stays
 *   typical_p      of those, by rising |-log p[i] - their entropy|, then by id, keep the shortest
 *                  prefix whose mass reaches typical_p (Meister et al., Locally Typical Sampling)
 *   XTC            with probability xtc_probability, if at least two of those have p[i] >=
 *                  xtc_threshold: leave out all of these but the least likely one (the sampler of
 *                  that name of text-generation-webui and llama.cpp); this draws word 0 of the
 *                  generator below at counter (position, choice, 0, 1)
 *   choose         argmax over the kept of s[i] + g[i], g[i] = -log(-log(u[i])), which is a draw
 *                  from softmax(s) (Gumbel-max); u[i] = (w >> 9 + 1/2) * 2^-23, w = word i % 4 of
 *                  Philox4x32-10(key = seed, counter = (position, choice, i / 4, 0)).
 * The draw depends on seed, position and choice only, not on where or with whom it runs.
 *
 * Contrastive search (Su et al. 2022) takes, instead of all from greedy on, the top_k of softmax(l)
 * in the order (falling p, rising id). Of these it chooses the first with the largest
 *   (1 - penalty_alpha) * p[i] - penalty_alpha * c[i]
 * where c[i] is the largest cosine of the hidden state behind i with one before. */
#ifndef BT_ENGINE_SAMPLER_H
#define BT_ENGINE_SAMPLER_H

#include "common/base/base.h"
#include "common/engine/engine.h"

struct bt_sampler; /* scratch for one vocabulary size; one thread at a time */

struct bt_sampler_row {
    float *logits;                         /* [vocab]; changed */
    const struct bt_engine_params *params; /* bias_ids/bias valid */
    uint32_t position;                     /* of the token to be chosen, in the sequence */
    const uint32_t *tokens;                /* [n_tokens] known so far, n_prompt of them prompt */
    uint32_t n_tokens, n_prompt;
    const uint32_t *mask;  /* [vocab / 32 rounded up] bits, or NULL */
    const uint32_t *known; /* the same of ids that have a token (ids.h), or NULL */
    const float *early;    /* [vocab] of the layer that DoLa has chosen; NULL: no DoLa */
};

#define BT_SAMPLER_DOLA_TOP 0.1f /* of the largest probability: less likely tokens are left out */

struct bt_sampler *bt_sampler_create(uint32_t vocab);
void bt_sampler_destroy(struct bt_sampler *s);

/* Fills *out (slot is left alone). out->bad: a logit was NaN or +inf, or nothing could be chosen;
 * then token is 0 and no logprob is given. logprob is 0 unless params->logprobs >= 0. */
void bt_sampler_run(struct bt_sampler *s, const struct bt_sampler_row *row,
                    struct bt_engine_out *out);

struct bt_sampler_candidates { /* of contrastive search, the most likely first */
    uint32_t n;                /* fewer than top_k if fewer tokens may be drawn */
    uint32_t id[BT_ENGINE_CANDIDATES];
    float p[BT_ENGINE_CANDIDATES];
    float logprob[BT_ENGINE_CANDIDATES]; /* raw, if params->logprobs >= 0 */
};
/* Fills *c, and bad, n_top and top_* of *out as bt_sampler_run does; bad: n is 0. */
void bt_sampler_candidates(struct bt_sampler *s, const struct bt_sampler_row *row,
                           struct bt_sampler_candidates *c, struct bt_engine_out *out);
/* The token of *out: cosine[i] is candidate i's largest one. */
void bt_sampler_contrast(const struct bt_sampler_candidates *c, const float *cosine, float alpha,
                         struct bt_engine_out *out);

/* Logprob of `token` by one row of logits [vocab], and the n_top most likely ones, as raw logprobs
 * above: fills token, logprob, rank, n_top, top_* and bad of *out. known: as in a row; others are
 * not among the most likely. Logits are only read; any thread. */
void bt_sampler_logprob(const float *logits, uint32_t vocab, const uint32_t *known, uint32_t token,
                        uint32_t n_top, struct bt_engine_out *out);

/* How far the distribution of an early layer's logits is from the last layer's: KL(m || p) + KL(m
 * || q), m the mean of p and q, as Hugging Face and the authors of DoLa compute it (the paper's
 * Jensen-Shannon divergence has p and q in m's place). DoLa takes the layer that is furthest away,
 * the first of equal ones. Pure; any thread. */
double bt_sampler_divergence(const float *last, const float *early, uint32_t vocab);

/* ERR_INVALID if a parameter is out of its range for this vocabulary; *what_p names it. */
bt_status_t bt_sampler_check(const struct bt_engine_params *p, uint32_t vocab,
                             const char **what_p) BT_MUST_CHECK;

#endif
