/* Turns bodies of /v1/completions and /v1/chat/completions into specs and checks every number.
 * front_fields.c says which fields a body may have. null means absent. */
#include "conductor/front/front_parse.h"

#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_adapt.h"
#include "conductor/front/front_contrast.h"
#include "conductor/front/front_elements.h"
#include "conductor/front/front_fields.h"
#include "conductor/front/front_forced.h"
#include "conductor/front/front_grammar.h"
#include "conductor/front/front_search.h"
#include "conductor/front/front_thinking.h"

#define STOPS_MAX      16
#define STOP_BYTES_MAX 1024
#define BIASES_MAX     1024

/* The API's ranges. The penalties are OpenAI's; an engine could do with more (sampling.h). */
#define API_MAX_TEMPERATURE 100
#define API_MAX_REPETITION  100
#define API_MAX_PENALTY     2
#define API_MAX_BIAS        100
_Static_assert(API_MAX_TEMPERATURE <= BT_ENGINE_MAX_TEMPERATURE &&
                   API_MAX_REPETITION <= BT_ENGINE_MAX_REPETITION &&
                   API_MAX_PENALTY <= BT_ENGINE_MAX_PENALTY,
               "workers must accept whatever the API accepts");

static void spec_cleanup(struct bt_gen_spec *spec)
{
    bt_tokens_cleanup(&spec->prompt);
    for (size_t i = 0; spec->stop != NULL && spec->stop[i] != NULL; i++) {
        free(spec->stop[i]);
    }
    free(spec->stop);
    free(spec->cache_salt);
    bt_gen_grammar_unref(spec->grammar);
    bt_tokens_cleanup(&spec->prediction);
    free(spec->tenant);
    free(spec->id);
    free((void *)spec->sampling.bias_ids);
    free((void *)spec->sampling.bias);
    *spec = (struct bt_gen_spec){0};
}

void bt_front_generation_cleanup(struct bt_front_generation *g)
{
    for (uint32_t i = 0; g->specs != NULL && i < g->prompts.n; i++) {
        spec_cleanup(&g->specs[i]);
    }
    free(g->specs);
    bt_buf_cleanup(&g->echoed);
    json_decref(g->kinds);
    bt_front_prompts_cleanup(&g->prompts);
    *g = (struct bt_front_generation){0};
}

static void *copy_of(const void *p, size_t len)
{
    void *copy = p != NULL ? bt_malloc(BT_MAX(len, (size_t)1)) : NULL;
    if (p != NULL) {
        memcpy(copy, p, len);
    }
    return copy;
}

/* Copies the options for another prompt. */
static struct bt_gen_spec spec_copy(const struct bt_gen_spec *s)
{
    struct bt_gen_spec c = *s;
    size_t n = 0;
    while (s->stop != NULL && s->stop[n] != NULL) {
        n++;
    }
    if (s->stop != NULL) {
        c.stop = bt_calloc(n + 1, sizeof(c.stop[0]));
        for (size_t i = 0; i < n; i++) {
            c.stop[i] = bt_strdup(s->stop[i]);
        }
    }
    c.grammar = bt_gen_grammar_ref(s->grammar);
    c.prediction.ids = copy_of(s->prediction.ids, s->prediction.n * sizeof(uint32_t));
    c.prediction.cap = s->prediction.n;
    c.cache_salt = s->cache_salt != NULL ? bt_strdup(s->cache_salt) : NULL;
    c.sampling.bias_ids = copy_of(s->sampling.bias_ids, s->sampling.n_bias * sizeof(uint32_t));
    c.sampling.bias = copy_of(s->sampling.bias, s->sampling.n_bias * sizeof(float));
    return c;
}

static bool check_model(const struct bt_front_model *m, const json_t *root,
                        struct bt_front_error *e)
{
    const char *model = m->id;
    if (!bt_front_get_str(root, "model", &model, e)) {
        return false;
    }
    if (model[0] != '\0' && strcmp(model, m->id) != 0) { /* without a name: the only model */
        return bt_front_fail(e, 404, "model", "model_not_found",
                             "the model '%.128s' does not exist; this server has '%.128s'", model,
                             m->id);
    }
    return true;
}

/* ---- options ---- */

static bool take_stops(const json_t *root, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const json_t *v = json_object_get(root, "stop");
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > STOPS_MAX) {
        return bt_front_fail(e, 400, "stop", "invalid_value", "'stop' has %zu entries; at most %d",
                             n, STOPS_MAX);
    }
    if (n == 0) {
        return true;
    }
    spec->stop = bt_calloc(n + 1, sizeof(spec->stop[0]));
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        size_t len = json_string_length(s);
        if (!json_is_string(s)) {
            return bt_front_fail(e, 400, "stop", "invalid_type",
                                 "'stop' must be a string or an array of strings");
        }
        if (len == 0 || len > STOP_BYTES_MAX) {
            return bt_front_fail(e, 400, "stop", "invalid_value",
                                 "a stop string has %zu bytes; allowed: 1 to %d", len,
                                 STOP_BYTES_MAX);
        }
        if (strlen(json_string_value(s)) != len) {
            return bt_front_fail(e, 400, "stop", "invalid_value",
                                 "a stop string must not contain a NUL character");
        }
        spec->stop[i] = bt_strdup(json_string_value(s));
    }
    return true;
}

/* Takes the model's EOS ids, unless ignored, and the client's own stop ids. */
static bool take_ends(const struct bt_front_model *m, const json_t *root,
                      struct bt_engine_params *s, struct bt_front_options *opt,
                      struct bt_front_error *e)
{
    bool ignore = false;
    const json_t *more = json_object_get(root, "stop_token_ids");
    if (!bt_front_get_bool(root, "ignore_eos", &ignore, e)) {
        return false;
    }
    for (uint32_t i = 0; !ignore && i < m->config->n_eos && i < BT_ENGINE_MAX_EOS; i++) {
        s->eos[s->n_eos++] = m->config->eos[i];
    }
    if (more == NULL || json_is_null(more)) {
        return true;
    }
    if (!json_is_array(more) || json_array_size(more) > BT_ENGINE_MAX_EOS - s->n_eos) {
        return bt_front_fail(e, 400, "stop_token_ids", "invalid_value",
                             "'stop_token_ids' must be an array of at most %u token ids",
                             BT_ENGINE_MAX_EOS - s->n_eos);
    }
    struct bt_tokens ids = {0};
    bool ok = bt_front_take_ids(m, "stop_token_ids", more, &ids, e);
    uint32_t n_model = s->n_eos;
    for (size_t i = 0; ok && i < ids.n; i++) {
        bool models = false;
        for (uint32_t k = 0; k < n_model; k++) {
            models |= s->eos[k] == ids.ids[i];
        }
        if (!models) {
            s->eos[s->n_eos++] = ids.ids[i];
            opt->stop_ids[opt->n_stop_ids++] = ids.ids[i];
        }
    }
    bt_tokens_cleanup(&ids);
    return ok;
}

/* Takes {"token id": -100..100, ...}. */
static bool take_bias(const struct bt_front_model *m, const json_t *root,
                      struct bt_engine_params *s, struct bt_front_error *e)
{
    json_t *v = json_object_get(root, "logit_bias");
    const char *key;
    json_t *item;
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    if (!json_is_object(v) || json_object_size(v) > BIASES_MAX) {
        return bt_front_fail(e, 400, "logit_bias", "invalid_value",
                             "'logit_bias' must be an object of at most %d token ids", BIASES_MAX);
    }
    if (json_object_size(v) == 0) {
        return true;
    }
    uint32_t *ids = bt_calloc(json_object_size(v), sizeof(*ids));
    float *bias = bt_calloc(json_object_size(v), sizeof(*bias));
    s->bias_ids = ids; /* the spec owns them from here */
    s->bias = bias;
    json_object_foreach(v, key, item)
    {
        size_t digits = strspn(key, "0123456789");
        bool is_id = digits > 0 && digits < 10 && key[digits] == '\0' &&
                     strtoul(key, NULL, 10) < m->config->vocab;
        double b = json_number_value(item);
        if (!is_id || !json_is_number(item) || !(b >= -API_MAX_BIAS && b <= API_MAX_BIAS)) {
            return bt_front_fail(
                e, 400, "logit_bias", "invalid_value",
                "'logit_bias[\"%.32s\"]': keys are token ids 0 to %u, values %d to %d", key,
                m->config->vocab - 1, -API_MAX_BIAS, API_MAX_BIAS);
        }
        ids[s->n_bias] = (uint32_t)strtoul(key, NULL, 10);
        bias[s->n_bias++] = (float)b;
    }
    return true;
}

static bool take_sampling(const struct bt_front_model *m, const json_t *root,
                          struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const struct bt_model_config *c = m->config;
    struct bt_engine_params *s = &spec->sampling;
    int64_t top_k = c->top_k > 0 ? c->top_k : 0, seed = 0;
    s->temperature = c->temperature >= 0 ? c->temperature : 1.0f;
    s->top_p = c->top_p > 0 && c->top_p <= 1 ? c->top_p : 1.0f;
    s->min_p = c->min_p > 0 ? c->min_p : 0;
    s->typical_p = 1;
    s->xtc_threshold = 0.1f;
    s->repetition_penalty = c->repetition_penalty > 0 ? c->repetition_penalty : 1.0f;
    if (!bt_front_get_num(root, "temperature", 0, false, API_MAX_TEMPERATURE, &s->temperature, e) ||
        !bt_front_get_num(root, "top_p", 0, true, 1, &s->top_p, e) ||
        !bt_front_get_num(root, "min_p", 0, false, 1, &s->min_p, e) ||
        !bt_front_get_num(root, "typical_p", 0, true, 1, &s->typical_p, e) ||
        !bt_front_get_num(root, "xtc_probability", 0, false, 1, &s->xtc_probability, e) ||
        !bt_front_get_num(root, "xtc_threshold", 0, true, 1, &s->xtc_threshold, e) ||
        !bt_front_get_int(root, "top_k", -1, INT32_MAX, &top_k, e) ||
        !bt_front_get_num(root, "repetition_penalty", 0, true, API_MAX_REPETITION,
                          &s->repetition_penalty, e) ||
        !bt_front_get_num(root, "frequency_penalty", -API_MAX_PENALTY, false, API_MAX_PENALTY,
                          &s->frequency_penalty, e) ||
        !bt_front_get_num(root, "presence_penalty", -API_MAX_PENALTY, false, API_MAX_PENALTY,
                          &s->presence_penalty, e) ||
        !bt_front_get_int(root, "seed", INT64_MIN, INT64_MAX, &seed, e)) {
        return false;
    }
    if (s->temperature > 0 && s->temperature < 0.01f) {
        s->temperature = 0.01f; /* with less, logits leave the range of floats */
    }
    s->top_k = top_k > 0 ? (uint32_t)top_k : 0; /* -1 and 0: off */
    s->seed = (uint64_t)seed;
    spec->unseeded = !bt_front_has(root, "seed");
    return true;
}

static bool take_logprobs(const json_t *root, bool chat, int32_t *out, struct bt_front_error *e)
{
    int64_t n = -1;
    bool on = false;
    if (!chat) {
        if (!bt_front_get_int(root, "logprobs", 0, BT_ENGINE_MAX_TOP, &n, e)) {
            return false;
        }
        *out = (int32_t)n;
        return true;
    }
    if (!bt_front_get_bool(root, "logprobs", &on, e) ||
        !bt_front_get_int(root, "top_logprobs", 0, BT_ENGINE_MAX_TOP, &n, e)) {
        return false;
    }
    if (!on && n > 0) {
        return bt_front_fail(e, 400, "top_logprobs", "invalid_value",
                             "'top_logprobs' needs 'logprobs': true");
    }
    *out = !on ? -1 : n > 0 ? (int32_t)n : 0;
    return true;
}

/* Call after `stream` was read. */
static bool take_stream_options(const json_t *so, struct bt_front_options *opt,
                                struct bt_front_error *e)
{
    if (so == NULL || json_is_null(so)) {
        return true;
    }
    if (!json_is_object(so)) {
        return bt_front_fail(e, 400, "stream_options", "invalid_type",
                             "'stream_options' must be an object");
    }
    if (!opt->stream && bt_front_asked_for(so)) {
        return bt_front_fail(e, 400, "stream_options", "invalid_value",
                             "'stream_options' needs 'stream': true; leave it out of requests "
                             "without a stream");
    }
    if (!bt_front_fields_check(so, FRONT_STREAM_OPTIONS, "stream_options.", e) ||
        !bt_front_get_bool(so, "include_usage", &opt->include_usage, e) ||
        !bt_front_get_bool(so, "continuous_usage_stats", &opt->continuous_usage, e)) {
        return false;
    }
    opt->continuous_usage = opt->continuous_usage && opt->include_usage;
    return true;
}

static bool take_look(const json_t *root, bool chat, struct bt_gen_spec *spec,
                      struct bt_front_options *opt, struct bt_front_error *e)
{
    int64_t prompt_top = -1;
    spec->skip_special = true;
    if (!bt_front_get_bool(root, "stream", &opt->stream, e) ||
        !bt_front_get_bool(root, "return_tokens_as_token_ids", &opt->tokens_as_ids, e) ||
        !bt_front_get_bool(root, "skip_special_tokens", &spec->skip_special, e) ||
        !bt_front_get_bool(root, "include_stop_str_in_output", &spec->include_stop, e) ||
        !bt_front_get_bool(root, "echo", &opt->echo, e) ||
        !bt_front_get_int(root, "prompt_logprobs", 0, BT_ENGINE_MAX_TOP, &prompt_top, e) ||
        !take_logprobs(root, chat, &spec->sampling.logprobs, e)) {
        return false;
    }
    if (opt->stream && prompt_top >= 0) {
        return bt_front_fail(e, 400, "prompt_logprobs", "unsupported_parameter",
                             "'prompt_logprobs' is not supported with 'stream'; use 'echo' and "
                             "'logprobs', or leave 'stream' out");
    }
    opt->logprobs = spec->sampling.logprobs;
    opt->skip_special = spec->skip_special;
    opt->prompt_logprobs = (int32_t)prompt_top;
    return take_stream_options(json_object_get(root, "stream_options"), opt, e);
}

static bool take_speculation(const json_t *root, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const char *name = NULL;
    if (!bt_front_get_str(root, "speculation", &name, e)) {
        return false;
    }
    spec->speculation = name != NULL ? bt_spec_kind(name) : BT_SPEC_AUTO;
    return spec->speculation != BT_SPEC_KINDS ||
           bt_front_fail(e, 400, "speculation", "invalid_value",
                         "'speculation' is '%.40s'; allowed: auto, off, suffix, ngram, draft, mtp",
                         name);
}

static bool take_salt(const json_t *root, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const char *salt = NULL;
    int64_t priority = 0;
    if (!bt_front_get_int(root, "priority", INT32_MIN, INT32_MAX, &priority, e)) {
        return false;
    }
    spec->priority = (int32_t)priority;
    if (!bt_front_get_str(root, "cache_salt", &salt, e)) {
        return false;
    }
    if (salt != NULL) {
        size_t len = strlen(salt);
        if (len == 0 || len > BT_GEN_SALT_BYTES_MAX) {
            return bt_front_fail(e, 400, "cache_salt", "invalid_value",
                                 "'cache_salt' has %zu bytes; allowed: 1 to %d", len,
                                 BT_GEN_SALT_BYTES_MAX);
        }
        spec->cache_salt = bt_strdup(salt);
    }
    return true;
}

struct lengths {
    int64_t max, min;
    bool max_given; /* otherwise the answer ends with the context */
};

/* Only a request that echoes its prompt may ask for 0 tokens. */
static bool take_lengths(const struct bt_front_model *m, const json_t *root,
                         const struct bt_front_options *opt, struct lengths *l,
                         struct bt_front_error *e)
{
    uint32_t models = m->config->max_new_tokens;
    *l = (struct lengths){.max = !opt->chat   ? 16
                                 : models > 0 ? models
                                              : INT32_MAX,
                          .max_given = bt_front_has(root, "max_tokens") ||
                                       bt_front_has(root, "max_completion_tokens")};
    if (!bt_front_get_int(root, "max_tokens", opt->echo ? 0 : 1, INT32_MAX, &l->max, e) ||
        !bt_front_get_int(root, "max_completion_tokens", opt->echo ? 0 : 1, INT32_MAX, &l->max,
                          e) ||
        !bt_front_get_int(root, "min_tokens", 0, INT32_MAX, &l->min, e)) {
        return false;
    }
    if (l->min > l->max) {
        return bt_front_fail(e, 400, "min_tokens", "invalid_value",
                             "'min_tokens' is %lld, above the %lld of 'max_tokens'",
                             (long long)l->min, (long long)l->max);
    }
    return true;
}

/* Checks the lengths against the context that the prompt leaves. A number that the client gave must
 * fit: with fewer tokens, the client could not tell a cut answer from one that ended by itself. */
static bool fit(const struct bt_front_model *m, const struct bt_front_options *opt,
                const struct lengths *l, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const char *key = opt->chat ? "messages" : "prompt";
    int64_t room = (int64_t)m->max_model_len - (int64_t)spec->prompt.n;
    if (spec->prompt.n == 0) {
        return bt_front_fail(e, 400, key, "invalid_value",
                             "'%s' is empty: it has no tokens; send at least one", key);
    }
    if (room < BT_MIN(l->max, 1)) {
        return bt_front_fail(
            e, 400, key, "context_length_exceeded",
            "this model's maximum context length is %u tokens%s; '%s' has %zu", m->max_model_len,
            l->max > 0 ? ", and at least one must be left to generate" : "", key, spec->prompt.n);
    }
    int64_t asked = l->max_given ? l->max : l->min;
    if (asked > room) {
        return bt_front_fail(e, 400, key, "context_length_exceeded",
                             "this model's maximum context length is %u tokens, but %lld are asked "
                             "for: %zu in '%s' and %lld in '%s'; shorten the prompt or lower '%s'",
                             m->max_model_len, (long long)spec->prompt.n + asked, spec->prompt.n,
                             key, (long long)asked, l->max_given ? "max_tokens" : "min_tokens",
                             l->max_given ? "max_tokens" : "min_tokens");
    }
    spec->max_tokens = (uint32_t)BT_MIN(l->max, room);
    spec->sampling.min_new = (uint32_t)l->min;
    return true;
}

/* Makes one spec for each prompt. The prompts' ids move into the specs. */
static bool make_specs(const struct bt_front_model *m, const struct lengths *l,
                       const struct bt_gen_spec *base, struct bt_front_generation *g,
                       struct bt_front_error *e)
{
    if (g->prompts.n * g->opt.n > FRONT_ANSWER_CHOICES_MAX) {
        return bt_front_fail(e, 400, "n", "invalid_value",
                             "%u prompts with 'n' %u need more than %d choices, the most in one "
                             "answer; send fewer prompts or lower 'n'",
                             g->prompts.n, g->opt.n, FRONT_ANSWER_CHOICES_MAX);
    }
    g->specs = bt_calloc(g->prompts.n, sizeof(g->specs[0]));
    for (uint32_t i = 0; i < g->prompts.n; i++) {
        struct bt_gen_spec *s = &g->specs[i];
        *s = spec_copy(base);
        s->prompt = g->prompts.list[i].ids;
        g->prompts.list[i].ids = (struct bt_tokens){0};
        if (!fit(m, &g->opt, l, s, e)) {
            return false;
        }
    }
    return true;
}

/* The prompt's logprobs are needed for echo with logprobs and for the field prompt_logprobs. A
 * request without generated tokens needs them too: it would have nothing else to do. */
static void want_prompt_logprobs(const struct bt_front_options *opt, const struct lengths *l,
                                 struct bt_gen_spec *spec)
{
    int32_t top = BT_MAX(opt->prompt_logprobs, opt->echo ? opt->logprobs : -1);
    spec->prompt_logprobs = top >= 0 || l->max == 0;
    spec->prompt_top = top > 0 ? (uint32_t)top : 0;
}

/* Makes the cheap checks first: no prompt is tokenized for a request that is refused anyway. */
static bool take_generation(const struct bt_front_model *m, bool chat, const json_t *root,
                            struct bt_gen_spec *base, struct bt_front_generation *g,
                            struct bt_front_error *e)
{
    struct bt_front_options *opt = &g->opt;
    struct bt_tokens ids = {0};
    struct lengths l;
    if (!check_model(m, root, e) ||
        !bt_front_fields_check(root, chat ? FRONT_CHAT : FRONT_COMPLETION, "", e) ||
        !take_look(root, chat, base, opt, e) || !bt_front_take_choices(root, base, opt, e) ||
        !take_sampling(m, root, base, e) || !bt_front_take_contrast(m, root, opt->n, base, e) ||
        !take_ends(m, root, &base->sampling, opt, e) || !take_bias(m, root, &base->sampling, e) ||
        !take_stops(root, base, e) || !take_salt(root, base, e) ||
        !take_speculation(root, base, e) || !take_lengths(m, root, opt, &l, e) ||
        !bt_front_take_grammar(m, root, base, e)) {
        return false;
    }
    want_prompt_logprobs(opt, &l, base);
    bool ok;
    if (chat) {
        struct bt_front_tools tools = {0};
        ok = bt_front_take_prediction(m, root, &base->prediction, e) &&
             bt_front_take_chat(m, root, &ids, &opt->parts, &tools, e) &&
             bt_front_force(m, root, &opt->parts, &tools, base, e);
        if (ok) {
            bt_front_set_budget(m, &opt->parts, base);
        }
        if (base->grammar != NULL) { /* it lets markers be spelled in any tokens */
            opt->parts.reply.tokens = NULL;
        }
        if (ok && bt_reply_xml_form(opt->parts.reply.style.tools) != NULL) {
            g->kinds = bt_front_kinds_of(tools.list);
        }
        bt_front_tools_cleanup(&tools);
        base->kept = opt->parts.reply.tools ? m->kept_tools : m->kept_thoughts;
        g->prompts =
            (struct bt_front_prompts){.list = bt_calloc(1, sizeof(struct bt_front_prompt)), .n = 1};
        g->prompts.list[0].ids = ids;
    } else {
        ok = bt_front_take_prompts(m, root, opt->echo, opt->skip_special, &g->prompts, e);
    }
    return ok && bt_front_finish_choices(root, l.max, base, opt, e) &&
           make_specs(m, &l, base, g, e);
}

bool bt_front_parse_generation(const struct bt_front_model *m, enum bt_front_api api,
                               const void *body, size_t len, struct bt_front_generation *g,
                               struct bt_front_error *e)
{
    struct bt_gen_spec base = {0};
    json_t *root = bt_front_json_parse(body, len, e);
    json_t *adapted = root != NULL ? bt_front_adapt(api, root, e) : NULL;
    *g = (struct bt_front_generation){.opt = {.api = api, .chat = api != FRONT_API_COMPLETIONS}};
    bool ok = adapted != NULL && take_generation(m, g->opt.chat, adapted, &base, g, e);
    if (ok && api == FRONT_API_RESPONSES) {
        const struct bt_engine_params *s = &g->specs[0].sampling;
        bt_front_responses_echo(root, s->temperature, s->top_p, &g->echoed);
    }
    if (!ok && adapted != NULL) {
        bt_front_adapt_error(api, e);
    }
    json_decref(adapted);
    json_decref(root);
    spec_cleanup(&base);
    if (!ok) {
        bt_front_generation_cleanup(g);
    }
    return ok;
}

/* ---- /tokenize and /detokenize ---- */

/* fields: an enum bt_front_object; which fields the body may have. */
static bool tokenize(const struct bt_front_model *m, uint64_t fields, const void *body, size_t len,
                     struct bt_tokens *out, bool *want_strings_p, struct bt_front_error *e)
{
    json_t *root = bt_front_json_parse(body, len, e);
    if (root == NULL) {
        return false;
    }
    *want_strings_p = false;
    struct bt_front_model any_length = *m; /* this route has no limit on tokens, only on the time to
                                            * read */
    any_length.piece_max = 0;
    m = &any_length;
    bool chat = bt_front_has(root, "messages");
    struct bt_front_prompts prompts = {0};
    struct bt_front_chat parts;
    struct bt_front_tools tools = {0};
    if (chat && bt_front_has(root, "prompt")) {
        json_decref(root);
        return bt_front_fail(e, 400, "prompt", "invalid_value",
                             "'prompt' and 'messages' cannot be combined; leave one of them out");
    }
    bool ok = check_model(m, root, e) && bt_front_fields_check(root, fields, "", e) &&
              bt_front_get_bool(root, "return_token_strs", want_strings_p, e) &&
              (chat ? bt_front_take_chat(m, root, out, &parts, &tools, e)
                    : bt_front_take_prompts(m, root, false, false, &prompts, e));
    if (ok && prompts.n > 1) {
        ok = bt_front_fail(e, 400, "prompt", "invalid_value",
                           "'prompt' has %u prompts; this route accepts one", prompts.n);
    }
    if (ok && !chat) {
        *out = prompts.list[0].ids;
        prompts.list[0].ids = (struct bt_tokens){0};
    }
    bt_front_prompts_cleanup(&prompts);
    bt_front_tools_cleanup(&tools);
    json_decref(root);
    return ok;
}

bool bt_front_parse_tokenize(const struct bt_front_model *m, const void *body, size_t len,
                             struct bt_tokens *out, bool *want_strings_p, struct bt_front_error *e)
{
    return tokenize(m, FRONT_TOKENIZE, body, len, out, want_strings_p, e);
}

bool bt_front_parse_count(const struct bt_front_model *m, enum bt_front_api api, const void *body,
                          size_t len, struct bt_tokens *out, struct bt_front_error *e)
{
    struct bt_front_model any_length = *m;
    struct bt_front_chat parts;
    struct bt_front_tools tools = {0};
    any_length.piece_max = 0;
    json_t *root = bt_front_json_parse(body, len, e);
    json_t *chat = root == NULL                ? NULL
                   : api == FRONT_API_MESSAGES ? bt_front_messages_chat(root, true, e)
                                               : bt_front_adapt(api, root, e);
    bool ok = chat != NULL && check_model(m, chat, e) &&
              bt_front_fields_check(chat, FRONT_CHAT, "", e) &&
              bt_front_take_chat(&any_length, chat, out, &parts, &tools, e);
    if (!ok && chat != NULL) {
        bt_front_adapt_error(api, e);
    }
    bt_front_tools_cleanup(&tools);
    json_decref(root);
    json_decref(chat);
    return ok;
}

bool bt_front_parse_prompt(const struct bt_front_model *m, const void *body, size_t len,
                           struct bt_tokens *out, struct bt_front_error *e)
{
    bool strings;
    return tokenize(m, FRONT_TOKENIZE | FRONT_COMPLETION | FRONT_CHAT, body, len, out, &strings, e);
}

bool bt_front_parse_detokenize(const struct bt_front_model *m, const void *body, size_t len,
                               struct bt_tokens *out, struct bt_front_error *e)
{
    json_t *root = bt_front_json_parse(body, len, e);
    if (root == NULL) {
        return false;
    }
    const json_t *list = json_object_get(root, "tokens");
    bool ok = check_model(m, root, e) && bt_front_fields_check(root, FRONT_DETOKENIZE, "", e) &&
              (json_is_array(list) || bt_front_fail(e, 400, "tokens", "invalid_type",
                                                    "'tokens' must be an array of ids")) &&
              bt_front_take_ids(m, "tokens", list, out, e);
    json_decref(root);
    return ok;
}
