/* From a Submit message to a request: everything a conductor could get wrong is checked here, on
 * the control thread, before the engine thread sees it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/worker/control.h"

static bool finite_in(float v, float lo, float hi)
{
    return isfinite(v) && v >= lo && v <= hi;
}

/* 0 of a field that has no meaning at 0 is protobuf's "not given". */
static float or_default(float v, float def)
{
    return v == 0 ? def : v;
}

static const char *check_sampling(const struct bt_wctl *w, const Baton__Sampling *s, uint32_t vocab)
{
    (void)w;
    if (s == NULL) {
        return "sampling is missing";
    }
    if (s->max_new == 0) {
        return "sampling.max_new is 0: ask for at least one token";
    }
    if (!finite_in(s->temperature, 0, 1e4f)) {
        return "sampling.temperature must be a number >= 0";
    }
    if (!finite_in(s->top_p, 0, 1) || !finite_in(s->min_p, 0, 1)) {
        return "sampling.top_p and min_p must be within 0 and 1";
    }
    if (!finite_in(s->repetition_penalty, 0, 1e4f) || !finite_in(s->frequency_penalty, -100, 100) ||
        !finite_in(s->presence_penalty, -100, 100)) {
        return "sampling: a penalty is out of range";
    }
    if (s->logprobs < -1 || s->logprobs > BT_ENGINE_MAX_TOP) {
        return "sampling.logprobs must be within -1 and 20";
    }
    if (s->n_stop_ids > BT_ENGINE_MAX_EOS) {
        return "sampling.stop_ids: more than 16";
    }
    if (s->n_bias_ids != s->n_bias) {
        return "sampling: bias_ids and bias differ in length";
    }
    for (size_t i = 0; i < s->n_stop_ids; i++) {
        if (s->stop_ids[i] >= vocab) {
            return "sampling.stop_ids: an id is outside the vocabulary";
        }
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] >= vocab || isnan(s->bias[i])) {
            return "sampling.bias: an id is outside the vocabulary, or a bias is no number";
        }
    }
    return NULL;
}

static const char *check(const struct bt_wctl *w, const Baton__Submit *m, char *text, size_t cap)
{
    const struct bt_engine_info *info = w->core.info;
    size_t n = m->tokens.len / 4;
    if (m->phases != BATON__PHASES__PREFILL && m->phases != BATON__PHASES__DECODE &&
        m->phases != BATON__PHASES__BOTH) {
        return "phases is none of PREFILL, DECODE, BOTH";
    }
    if (m->tokens.len % 4 != 0 || n == 0) {
        return "tokens must hold at least one token of 4 bytes";
    }
    if (n > info->max_model_len) {
        snprintf(text, cap, "%zu tokens exceed the model's context of %u", n, info->max_model_len);
        return text;
    }
    if (m->n_prompt == 0 || m->n_prompt > n) {
        snprintf(text, cap, "n_prompt %u is not within 1 and the %zu tokens", m->n_prompt, n);
        return text;
    }
    if (m->root_key.len != sizeof(struct bt_kv_key)) {
        return "root_key must have 32 bytes";
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t t;
        memcpy(&t, m->tokens.data + 4 * i, 4);
        if (t >= info->vocab) {
            snprintf(text, cap, "token %zu is %u, outside the vocabulary of %u", i, t, info->vocab);
            return text;
        }
    }
    return check_sampling(w, m->sampling, info->vocab);
}

static void fill_params(struct bt_engine_params *p, const Baton__Submit *m, uint32_t *bias_ids,
                        float *bias)
{
    const Baton__Sampling *s = m->sampling;
    p->temperature = s->temperature;
    p->top_p = or_default(s->top_p, 1);
    p->min_p = s->min_p;
    p->top_k = s->top_k;
    p->repetition_penalty = or_default(s->repetition_penalty, 1);
    p->frequency_penalty = s->frequency_penalty;
    p->presence_penalty = s->presence_penalty;
    p->seed = s->seed;
    p->choice = m->choice;
    p->logprobs = s->logprobs;
    p->min_new = s->min_new;
    p->n_eos = (uint32_t)s->n_stop_ids;
    for (size_t i = 0; i < s->n_stop_ids; i++) {
        p->eos[i] = s->stop_ids[i];
    }
    p->n_bias = (uint32_t)s->n_bias;
    for (size_t i = 0; i < s->n_bias; i++) {
        bias_ids[i] = s->bias_ids[i];
        bias[i] = s->bias[i];
    }
    p->bias_ids = s->n_bias > 0 ? bias_ids : NULL;
    p->bias = s->n_bias > 0 ? bias : NULL;
}

struct bt_wreq *bt_wreq_create(const struct bt_wctl *w, const Baton__Submit *m, bt_status_t *st_p,
                               char *err, size_t err_cap)
{
    const struct bt_engine_info *info = w->core.info;
    const char *why = check(w, m, err, err_cap);
    if (why != NULL) {
        if (why != err) {
            snprintf(err, err_cap, "%s", why);
        }
        *st_p = BT_ERR_INVALID;
        return NULL;
    }
    uint32_t n = (uint32_t)(m->tokens.len / 4), block = w->core.block_tokens;
    uint64_t end = BT_MIN((uint64_t)n + m->sampling->max_new, (uint64_t)info->max_model_len);
    uint32_t len_max = (uint32_t)BT_MAX(end, (uint64_t)n + 1);
    uint32_t last = m->phases == BATON__PHASES__PREFILL ? n : len_max;
    uint32_t pages = BT_DIV_UP(last, block), n_bias = (uint32_t)m->sampling->n_bias;
    if (pages > info->pages) {
        snprintf(err, err_cap,
                 "prompt and answer of up to %u tokens need %u KV pages, this worker has %u: raise "
                 "engine.pages or ask for fewer tokens",
                 last, pages, info->pages);
        *st_p = BT_ERR_TOO_LARGE;
        return NULL;
    }
    struct bt_wreq *r = bt_calloc(1, sizeof(*r) + 4 * ((size_t)len_max + 1 + pages + 2 * n_bias));
    r->pages = r->tokens + len_max + 1;
    uint32_t *bias_ids = r->pages + pages;
    fill_params(&r->params, m, bias_ids, (float *)(bias_ids + n_bias));
    r->request = m->request;
    r->epoch = m->epoch;
    r->choice = m->choice;
    r->phases = m->phases;
    r->deadline_ns = m->deadline_ns;
    r->arrived_ns = bt_mono_ns();
    r->n = n;
    r->n_prompt = m->n_prompt;
    r->max_new = m->sampling->max_new;
    r->len_max = len_max;
    r->no_cache = m->no_cache;
    memcpy(r->root.b, m->root_key.data, sizeof(r->root.b));
    memcpy(r->tokens, m->tokens.data, m->tokens.len);
    bt_list_init(&r->ctl_link);
    return r;
}
