/* From a Submit message to a request: everything a conductor could get wrong is checked here, on
 * the control thread, before the engine thread sees it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/sampler.h"
#include "common/worker/control.h"

#define LEFT_MS_MAX      (1ull << 40) /* more means no limit */
#define SEARCH_BYTES_MAX (64u << 20)  /* memory of one beam search */

/* 0 of a field that has no meaning at 0 is protobuf's "not given". */
static float or_default(float v, float def)
{
    return v == 0 ? def : v;
}

static struct bt_engine_params params_of(const Baton__Submit *m)
{
    const Baton__Sampling *s = m->sampling;
    struct bt_engine_params p = {
        .temperature = s->temperature,
        .top_p = or_default(s->top_p, 1),
        .min_p = s->min_p,
        .top_k = s->top_k,
        .repetition_penalty = or_default(s->repetition_penalty, 1),
        .frequency_penalty = s->frequency_penalty,
        .presence_penalty = s->presence_penalty,
        .seed = s->seed,
        .choice = m->choice,
        .logprobs = s->logprobs,
        .penalty_alpha = s->penalty_alpha,
        .typical_p = s->typical_p,
        .xtc_probability = s->xtc_probability,
        .xtc_threshold = s->xtc_threshold,
        .min_new = s->min_new,
        .n_eos = (uint32_t)s->n_stop_ids,
        .n_bias = (uint32_t)s->n_bias,
        .bias_ids = s->bias_ids,
        .bias = s->bias,
    };
    if (m->prompt_logprobs) { /* one number for both in the engine */
        p.logprobs = BT_MAX(p.logprobs, (int32_t)m->prompt_top);
    }
    for (size_t i = 0; i < s->n_stop_ids; i++) {
        p.eos[i] = s->stop_ids[i];
    }
    for (size_t i = 0; i < s->n_dola_layers; i++) {
        p.dola[p.n_dola++] = (uint16_t)s->dola_layers[i];
    }
    return p;
}

/* NULL: the engine can sample with it. */
static const char *check_sampling(const struct bt_engine_info *info, const Baton__Submit *m,
                                  char *text, size_t cap)
{
    const Baton__Sampling *s = m->sampling;
    const char *what;
    uint32_t vocab = info->vocab, layers = bt_engine_layers(info);
    if (s == NULL) {
        return "sampling is missing";
    }
    if (s->logprobs < -1) { /* params_of may hide it behind the prompt's */
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
    if (s->n_dola_layers > BT_ENGINE_DOLA_MAX) {
        return "sampling.dola_layers: more than 16";
    }
    if ((s->n_dola_layers > 0 || s->penalty_alpha > 0) && !(info->caps & BT_ENGINE_CAP_HIDDEN)) {
        return "sampling.dola_layers, penalty_alpha: this worker's engine has neither DoLa nor "
               "contrastive search; the cpu and cuda engines have them";
    }
    for (size_t i = 0; i < s->n_dola_layers; i++) {
        if (s->dola_layers[i] >= layers) {
            snprintf(text, cap, "sampling.dola_layers: layer %u of a model of %u layers",
                     s->dola_layers[i], layers);
            return text;
        }
    }
    struct bt_engine_params p = params_of(m);
    if (bt_sampler_check(&p, vocab, &what) != BT_OK) {
        snprintf(text, cap, "sampling.%s", what);
        return text;
    }
    return NULL;
}

static bool marker_ok(const Baton__Marker *m, uint32_t vocab)
{
    size_t n = m != NULL ? strlen(m->text) : 0;
    return n > 0 && n <= BT_WMARKER_BYTES && (!m->is_token || m->id < vocab);
}

static const char *check_thoughts(const Baton__Thoughts *t, uint32_t vocab)
{
    bool ok =
        t->n_ends >= 1 && t->n_ends <= BT_WTHOUGHTS_ENDS && (t->begun || marker_ok(t->open, vocab));
    for (size_t i = 0; ok && i < t->n_ends; i++) {
        ok = marker_ok(t->ends[i], vocab);
    }
    if (!ok) {
        return "thoughts: needs 1 to 4 ends, and if it has not begun an opening marker; a marker "
               "has a text of 1 to 48 bytes and an id within the vocabulary";
    }
    ok = t->n_force >= 1 && t->n_force <= BT_WTHOUGHTS_FORCE;
    for (size_t i = 0; ok && i < t->n_force; i++) {
        ok = t->force[i] < vocab;
    }
    return ok ? NULL : "thoughts.force must have 1 to 32 tokens of the vocabulary";
}

/* NULL: a beam search is possible with it. Its beams are chosen by the model's own logprobs. */
static const char *check_search(const struct bt_wctl *w, const Baton__Submit *m, char *text,
                                size_t cap)
{
    const Baton__Sampling *s = m->sampling;
    uint32_t tops = bt_beam_tops(BT_MIN(m->beams, BT_BEAM_WIDTH_MAX + 1), (uint32_t)s->n_stop_ids);
    uint32_t most = BT_MIN(w->core.info->vocab, BT_ENGINE_MAX_TOP);
    if (m->beams > BT_BEAM_WIDTH_MAX || BT_MAX(m->n, 1u) > m->beams) {
        snprintf(text, cap, "beams %u: at most %u, and n (%u) at most as many", m->beams,
                 BT_BEAM_WIDTH_MAX, m->n);
        return text;
    }
    if (tops > most) {
        snprintf(text, cap,
                 "%u beams and %zu ids that end an answer are together more than %u: use fewer",
                 m->beams, s->n_stop_ids, most);
        return text;
    }
    if (!(fabsf(m->length_penalty) <= BT_BEAM_PENALTY_MAX)) {
        return "length_penalty must be within -10 and 10";
    }
    if (m->early_stopping >= BT_BEAM_STOPS) {
        return "early_stopping is none of 0 to 2";
    }
    if (m->grammar_kind != BT_GRAMMAR_ANY || m->thoughts != NULL) {
        return "a beam search follows no grammar, and has no budget of reasoning";
    }
    if (or_default(s->repetition_penalty, 1) != 1 || s->frequency_penalty != 0 ||
        s->presence_penalty != 0 || s->n_bias > 0) {
        return "a beam search has neither penalties nor bias";
    }
    if (s->n_dola_layers > 0 || s->penalty_alpha != 0) {
        return "a beam search has neither dola_layers nor penalty_alpha";
    }
    return s->max_new > 0 ? NULL : "a beam search needs max_new";
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
    if (m->n > BT_WORKER_CHOICES) {
        snprintf(text, cap, "n is %u: at most %u choices", m->n, BT_WORKER_CHOICES);
        return text;
    }
    if (m->sampling != NULL && m->sampling->penalty_alpha > 0 &&
        (m->phases != BATON__PHASES__BOTH || !m->no_cache || m->n > 1)) {
        return "sampling.penalty_alpha: contrastive search needs BOTH, no_cache and one choice: "
               "its "
               "prompt's hidden states are where it generates";
    }
    if (m->prompt_logprobs && m->phases == BATON__PHASES__DECODE) {
        return "prompt_logprobs belong to the phase that computes the prompt";
    }
    if (m->prompt_top > BT_ENGINE_MAX_TOP) {
        return "prompt_top must be within 0 and 20";
    }
    if (m->sampling != NULL && m->sampling->max_new == 0 &&
        !(m->phases == BATON__PHASES__PREFILL && m->prompt_logprobs)) {
        return "sampling.max_new is 0: ask for at least one token, or for PREFILL with "
               "prompt_logprobs";
    }
    if (m->speculation >= BT_SPEC_KINDS) {
        return "speculation is none of 0 to 5";
    }
    if (m->grammar_kind > BT_GRAMMAR_TAGS) {
        snprintf(text, cap, "grammar_kind %u is unknown here: this worker may be too old for it",
                 m->grammar_kind);
        return text;
    }
    if (m->grammar.len > BT_GRAMMAR_TEXT_MAX) {
        snprintf(text, cap, "the grammar has %zu bytes: at most %d", m->grammar.len,
                 BT_GRAMMAR_TEXT_MAX);
        return text;
    }
    if (m->prediction.len % 4 != 0 || m->prediction.len / 4 > info->max_model_len) {
        snprintf(text, cap, "the prediction has %zu bytes: at most %u tokens of 4 bytes",
                 m->prediction.len, info->max_model_len);
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
    const char *why = m->thoughts != NULL ? check_thoughts(m->thoughts, info->vocab) : NULL;
    why = why != NULL ? why : check_sampling(info, m, text, cap);
    return why == NULL && m->beams > 0 ? check_search(w, m, text, cap) : why;
}

static struct bt_submission submission_of(const struct bt_wctl *w, const Baton__Submit *m,
                                          uint64_t session)
{
    uint32_t n = (uint32_t)(m->tokens.len / 4);
    uint64_t end =
        BT_MIN((uint64_t)n + m->sampling->max_new, (uint64_t)w->core.info->max_model_len);
    uint64_t now = bt_mono_ns();
    struct bt_submission s = {
        .request = m->request,
        .session = session,
        .epoch = m->epoch,
        .choice = m->choice,
        .phases = m->phases,
        .deadline_ns = m->left_ms == 0 ? 0 : now + BT_MIN(m->left_ms, LEFT_MS_MAX) * 1000000,
        .arrived_ns = now,
        .n = n,
        .n_prompt = m->n_prompt,
        .max_new = m->sampling->max_new,
        .len_max = m->sampling->max_new > 0 ? (uint32_t)BT_MAX(end, (uint64_t)n + 1) : n,
        .no_cache = m->no_cache,
        .prompt_logprobs = m->prompt_logprobs,
        .prompt_top = m->prompt_top,
        .logprobs = m->sampling->logprobs,
        .tenant = m->tenant,
        .priority = m->priority,
        .late = m->late,
        .speculation = (bt_spec_kind_t)m->speculation,
        .params = params_of(m),
        .attach = w->attach,
    };
    s.params.hidden_max = s.len_max;
    memcpy(s.root.b, m->root_key.data, sizeof(s.root.b));
    return s;
}

/* The engine draws nothing for a search: it tells the most likely tokens. */
static void add_search(struct bt_submission *s, const Baton__Submit *m)
{
    s->n_slots = 1;
    s->search = m->beams > 0;
    if (!s->search || s->phases == BATON__PHASES__PREFILL) {
        return;
    }
    struct bt_engine_params *p = &s->params;
    s->n_slots = m->beams;
    s->beams = (struct bt_beam_conf){.width = m->beams,
                                     .n = BT_MAX(m->n, 1u),
                                     .length_penalty = m->length_penalty,
                                     .stop = (bt_beam_stop_t)m->early_stopping,
                                     .min_new = p->min_new,
                                     .n_top = (uint32_t)BT_MAX(s->logprobs, 0)};
    p->temperature = p->min_p = 0;
    p->top_p = 1;
    p->top_k = p->min_new = 0;
    p->logprobs = BT_MAX(p->logprobs, (int32_t)bt_beam_tops(m->beams, p->n_eos));
}

/* Does the worker have the room that the search needs at its longest? */
static bool search_fits(const struct bt_wctl *w, const struct bt_submission *s, char *err,
                        size_t err_cap)
{
    const struct bt_engine_info *info = w->core.info;
    uint32_t block = w->core.block_tokens, shared = s->n / block;
    uint64_t pages = shared + (uint64_t)s->n_slots * (BT_DIV_UP(s->len_max, block) - shared);
    size_t bytes = w->core.decode->state_bytes(&w->core, s);
    if (s->n_slots > info->max_slots) {
        snprintf(err, err_cap,
                 "%u beams need as many slots, this worker has %u: raise engine.max_slots or use "
                 "fewer",
                 s->n_slots, info->max_slots);
    } else if (pages > info->pages) {
        snprintf(err, err_cap,
                 "%u beams of up to %u tokens need %llu KV pages, this worker has %u: raise "
                 "engine.pages or ask for fewer beams or tokens",
                 s->n_slots, s->len_max, (unsigned long long)pages, info->pages);
    } else if (bytes > SEARCH_BYTES_MAX) {
        snprintf(err, err_cap,
                 "%u beams of up to %u new tokens take %zu MiB with their logprobs: at most %u; "
                 "ask for fewer",
                 s->n_slots, s->len_max - s->n, bytes >> 20, SEARCH_BYTES_MAX >> 20);
    } else {
        return true;
    }
    return false;
}

static void take_marker(const Baton__Marker *m, struct bt_wmarker *to)
{
    to->id = m->is_token ? m->id : BT_WMARKER_AS_TEXT;
    to->len = (uint32_t)strlen(m->text);
    memcpy(to->text, m->text, to->len);
}

static void take_thoughts(const Baton__Thoughts *t, struct bt_wthoughts_rule *rule)
{
    rule->budget = t->budget;
    rule->begun = t->begun;
    if (!t->begun) {
        take_marker(t->open, &rule->open);
    }
    rule->n_ends = (uint32_t)t->n_ends;
    for (size_t i = 0; i < t->n_ends; i++) {
        take_marker(t->ends[i], &rule->ends[i]);
    }
    rule->n_force = (uint32_t)t->n_force;
    memcpy(rule->force, t->force, t->n_force * sizeof(rule->force[0]));
}

/* A decode worker's first token comes from elsewhere: there the matcher only catches up. */
static struct bt_wahead *first_mask(const struct bt_submission *s, const Baton__Submit *m,
                                    uint32_t vocab)
{
    uint32_t n = s->n - s->n_prompt, *tokens = bt_calloc(n + 1, sizeof(*tokens));
    memcpy(tokens, m->tokens.data + 4 * (size_t)s->n_prompt, n * sizeof(*tokens));
    struct bt_wahead *a =
        bt_wahead_create(tokens, n, s->phases == BATON__PHASES__DECODE ? 0 : BT_DIV_UP(vocab, 32u));
    free(tokens);
    return a;
}

/* The end of an answer is the grammar's: the engine need not hold EOS back (mask_make.c). */
static void add_constraints(struct bt_submission *s, const Baton__Submit *m, uint32_t vocab)
{
    bool any = m->grammar_kind == BT_GRAMMAR_ANY;
    if ((any && m->thoughts == NULL) || s->max_new == 0) {
        return;
    }
    struct bt_wgrammar *g = bt_wgrammar_create((enum bt_grammar_kind)m->grammar_kind,
                                               m->grammar.data, any ? 0 : m->grammar.len);
    if (!any) {
        g->min_new = s->params.min_new;
        s->params.min_new = 0;
        g->first = first_mask(s, m, vocab);
    }
    if (m->thoughts != NULL) {
        take_thoughts(m->thoughts, &g->thoughts);
    }
    g->n_stop = s->params.n_eos;
    memcpy(g->stop, s->params.eos, sizeof(g->stop));
    g->request = s->request;
    g->epoch = s->epoch;
    g->tenant = s->tenant;
    s->grammar = g;
}

/* A prediction's tokens need not be of the vocabulary: the engine's drafts must. */
static void add_prediction(struct bt_submission *s, const Baton__Submit *m, uint32_t vocab)
{
    uint32_t n = (uint32_t)(m->prediction.len / 4), token;
    if (n == 0 || s->max_new == 0) {
        return;
    }
    s->prediction = bt_malloc(n * sizeof(token));
    for (uint32_t i = 0; i < n; i++) {
        memcpy(&token, m->prediction.data + 4 * (size_t)i, sizeof(token));
        s->prediction[s->n_prediction++] = BT_MIN(token, vocab - 1);
    }
}

struct bt_wreq *bt_wreq_create(const struct bt_wctl *w, const Baton__Submit *m, uint64_t session,
                               bt_status_t *st_p, char *err, size_t err_cap)
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
    struct bt_submission s = submission_of(w, m, session);
    add_search(&s, m);
    uint32_t last = m->phases == BATON__PHASES__PREFILL ? s.n : s.len_max;
    uint32_t block = w->core.block_tokens, pages = BT_DIV_UP(last, block);
    if (pages > info->pages) {
        snprintf(err, err_cap,
                 "prompt and answer of up to %u tokens need %u KV pages, this worker has %u: raise "
                 "engine.pages or ask for fewer tokens",
                 last, pages, info->pages);
        *st_p = BT_ERR_TOO_LARGE;
        return NULL;
    }
    uint64_t hidden = bt_submission_hidden(&s, info);
    if (hidden > BT_WORKER_HIDDEN_BYTES) {
        snprintf(
            err, err_cap,
            "penalty_alpha: the hidden states of up to %u tokens take %llu bytes, and contrastive "
            "searches may keep %llu: shorten the prompt or lower max_tokens",
            s.len_max, (unsigned long long)hidden, (unsigned long long)BT_WORKER_HIDDEN_BYTES);
        *st_p = BT_ERR_TOO_LARGE;
        return NULL;
    }
    if (s.beams.width > 0 && !search_fits(w, &s, err, err_cap)) {
        *st_p = BT_ERR_TOO_LARGE;
        return NULL;
    }
    add_constraints(&s, m, info->vocab);
    add_prediction(&s, m, info->vocab);
    struct bt_wreq *r = bt_wreq_alloc(&w->core, &s, m->tokens.data);
    /* The prefill worker needs no other choices: its part ends with the first choice's first
     * token. */
    for (uint32_t i = 1; i < m->n && m->phases != BATON__PHASES__PREFILL && !s.search; i++) {
        bt_wreq_add_choice(&w->core, r, m->choice + i);
    }
    return r;
}
