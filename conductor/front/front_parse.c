/* Bodies of /v1/completions and /v1/chat/completions into a bt_gen_spec, every number checked.
 * A field that would change the result and is not built yet is refused by name; a field that is
 * only a hint, or unknown, is accepted and has no effect; null means absent. */
#include "conductor/front/front_parse.h"

#include <stdlib.h>
#include <string.h>

#define STOPS_MAX      16
#define STOP_BYTES_MAX 1024
#define SALT_BYTES_MAX 256
#define BIASES_MAX     1024

void front_spec_cleanup(struct bt_gen_spec *spec)
{
    bt_tokens_cleanup(&spec->prompt);
    for (size_t i = 0; spec->stop != NULL && spec->stop[i] != NULL; i++) {
        free(spec->stop[i]);
    }
    free(spec->stop);
    free(spec->cache_salt);
    free(spec->tenant);
    free(spec->id);
    free((void *)spec->sampling.bias_ids);
    free((void *)spec->sampling.bias);
    *spec = (struct bt_gen_spec){0};
}

static bool unsupported(struct front_error *e, const char *key)
{
    return front_fail(e, 400, key, "unsupported_parameter", "'%s' is not supported yet", key);
}

/* Set to anything but null, false, 0, "", [] and {}? */
static bool is_asked_for(const json_t *v)
{
    switch (v == NULL ? JSON_NULL : json_typeof(v)) {
    case JSON_NULL:
    case JSON_FALSE: return false;
    case JSON_INTEGER: return json_integer_value(v) != 0;
    case JSON_REAL: return json_real_value(v) != 0;
    case JSON_STRING: return json_string_length(v) > 0;
    case JSON_ARRAY: return json_array_size(v) > 0;
    case JSON_OBJECT: return json_object_size(v) > 0;
    case JSON_TRUE: return true;
    }
    return true;
}

static bool refuse_unsupported(const json_t *root, struct front_error *e)
{
    static const char *const keys[] = {
        "echo", "suffix", "use_beam_search", "prompt_embeds", "allowed_token_ids", "bad_words",
        "logits_processors", "truncate_prompt_tokens", "tools", "functions", "function_call",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
        "structured_outputs", "chat_template", "continue_final_message", "documents", "audio",
        "kv_transfer_params", "resume",
        /* 0 asks for it, too; 1 is no penalty */
        "prompt_logprobs", "length_penalty"};
    for (size_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        const json_t *v = json_object_get(root, keys[i]);
        bool zero_counts = strcmp(keys[i], "prompt_logprobs") == 0;
        if (strcmp(keys[i], "length_penalty") == 0 && json_is_number(v) &&
            json_number_value(v) == 1.0) {
            continue; /* no penalty */
        }
        if (is_asked_for(v) || (zero_counts && json_is_integer(v))) {
            return unsupported(e, keys[i]);
        }
    }
    const json_t *choice = json_object_get(root, "tool_choice");
    if (is_asked_for(choice) &&
        (!json_is_string(choice) || (strcmp(json_string_value(choice), "none") != 0 &&
                                     strcmp(json_string_value(choice), "auto") != 0))) {
        return unsupported(e, "tool_choice");
    }
    const json_t *format = json_object_get(root, "response_format");
    if (format != NULL && !json_is_null(format)) {
        const char *type = json_string_value(json_object_get(format, "type"));
        if (type == NULL) {
            return front_fail(e, 400, "response_format", "invalid_value",
                              "'response_format' must be an object with a 'type'");
        }
        if (strcmp(type, "text") != 0) {
            return unsupported(e, "response_format");
        }
    }
    return true;
}

/* n and best_of: only 1 until forks are built. */
static bool check_choices(const json_t *root, struct front_error *e)
{
    static const char *const keys[] = {"n", "best_of"};
    for (size_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        int64_t v = 1;
        if (!front_get_int(root, keys[i], 1, 16, &v, e)) {
            return false;
        }
        if (v != 1) {
            return front_fail(e, 400, keys[i], "unsupported_parameter",
                              "'%s' above 1 is not supported yet", keys[i]);
        }
    }
    return true;
}

static bool check_model(const struct front_model *m, const json_t *root, struct front_error *e)
{
    const char *model = m->id;
    if (!front_get_str(root, "model", &model, e)) {
        return false;
    }
    if (strcmp(model, m->id) != 0) {
        return front_fail(e, 404, "model", "model_not_found",
                          "the model '%.128s' does not exist; this server has '%.128s'", model,
                          m->id);
    }
    return true;
}

/* ---- prompts ---- */

static void push_id(struct bt_tokens *t, uint32_t id)
{
    if (t->n == t->cap) {
        t->cap = t->cap == 0 ? 64 : t->cap * 2;
        t->ids = bt_realloc(t->ids, t->cap * sizeof(t->ids[0]));
    }
    t->ids[t->n++] = id;
}

static bool take_ids(const struct front_model *m, const char *key, const json_t *list,
                     struct bt_tokens *out, struct front_error *e)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v)) {
            return front_fail(e, 400, key, "invalid_type", "'%s[%zu]' must be a token id", key, i);
        }
        int64_t id = json_integer_value(v);
        if (id < 0 || id >= (int64_t)m->config->vocab) {
            return front_fail(e, 400, key, "invalid_value",
                              "'%s[%zu]' is %lld; token ids of this model are 0 to %u", key, i,
                              (long long)id, m->config->vocab - 1);
        }
        push_id(out, (uint32_t)id);
    }
    return true;
}

static bool encode(const struct front_model *m, const char *key, const char *text, size_t len,
                   bool add_special, struct bt_tokens *out, struct front_error *e)
{
    /* Megabytes of text would hold up every stream for half a second, only to be refused. The
     * factor leaves room for a normalizer that shortens. */
    if (m->piece_max > 0 && len / 4 / m->piece_max >= m->max_model_len) {
        return front_fail(
            e, 400, key, "context_length_exceeded",
            "the model's context is %u tokens; '%s' has %zu bytes and far more tokens",
            m->max_model_len, key, len);
    }
    bt_status_t st = bt_tokenizer_encode(m->tok, text, len, add_special, out);
    if (st != BT_OK) {
        return front_fail(e, 400, key, "invalid_value", "'%s' cannot be tokenized: %s", key,
                          bt_status_text(st));
    }
    return true;
}

/* A string, token ids, or a list of one of either. */
static bool take_prompt(const struct front_model *m, const json_t *root, struct bt_tokens *out,
                        struct front_error *e)
{
    bool special = true;
    const json_t *v = json_object_get(root, "prompt");
    if (v == NULL || json_is_null(v)) {
        return front_fail(e, 400, "prompt", "missing_required_parameter", "'prompt' is missing");
    }
    if (!front_get_bool(root, "add_special_tokens", &special, e)) {
        return false;
    }
    if (json_is_array(v) &&
        (json_is_string(json_array_get(v, 0)) || json_is_array(json_array_get(v, 0)))) {
        if (json_array_size(v) > 1) {
            return front_fail(e, 400, "prompt", "unsupported_parameter",
                              "several prompts in one request are not supported yet");
        }
        v = json_array_get(v, 0);
    }
    if (json_is_string(v)) {
        return encode(m, "prompt", json_string_value(v), json_string_length(v), special, out, e);
    }
    if (!json_is_array(v)) {
        return front_fail(e, 400, "prompt", "invalid_type",
                          "'prompt' must be a string or an array of token ids");
    }
    return take_ids(m, "prompt", v, out, e);
}

/* Text of a message's content: a string, null (an assistant's), or text parts joined by newlines.
 * NULL: e is set. */
static json_t *take_content(const json_t *content, const char *role, size_t i,
                            struct front_error *e)
{
    if (json_is_string(content)) {
        return json_incref((json_t *)content);
    }
    if ((content == NULL || json_is_null(content)) && strcmp(role, "assistant") == 0) {
        return json_string("");
    }
    if (!json_is_array(content)) {
        front_fail(e, 400, "messages", "invalid_type",
                   "'messages[%zu].content' must be a string or an array of text parts", i);
        return NULL;
    }
    struct bt_buf text;
    bt_buf_init(&text);
    for (size_t k = 0; k < json_array_size(content); k++) {
        const json_t *part = json_array_get(content, k);
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *words = json_object_get(part, "text");
        if (type == NULL || (strcmp(type, "text") == 0 && !json_is_string(words))) {
            front_fail(e, 400, "messages", "invalid_type",
                       "'messages[%zu].content[%zu]' must be {\"type\":\"text\",\"text\":...}", i,
                       k);
            bt_buf_cleanup(&text);
            return NULL;
        }
        if (strcmp(type, "text") != 0) {
            front_fail(e, 400, "messages", "unsupported_parameter",
                       "'messages[%zu].content[%zu].type' is '%.64s'; only 'text' is supported", i,
                       k, type);
            bt_buf_cleanup(&text);
            return NULL;
        }
        if (k > 0) {
            bt_buf_puts(&text, "\n");
        }
        bt_buf_append(&text, json_string_value(words), json_string_length(words));
    }
    json_t *s = json_stringn(text.data != NULL ? text.data : "", text.len);
    bt_buf_cleanup(&text);
    return s;
}

static bool take_message(const json_t *msg, size_t i, json_t *out, struct front_error *e)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant"};
    const char *role = json_string_value(json_object_get(msg, "role"));
    bool known = false;
    if (role == NULL) {
        return front_fail(e, 400, "messages", "invalid_type",
                          "'messages[%zu]' must be an object with a 'role' and a 'content'", i);
    }
    for (size_t k = 0; k < BT_ARRAY_LEN(roles); k++) {
        known = known || strcmp(role, roles[k]) == 0;
    }
    if (!known) {
        bool tool = strcmp(role, "tool") == 0 || strcmp(role, "function") == 0;
        return front_fail(e, 400, "messages", tool ? "unsupported_parameter" : "invalid_value",
                          "'messages[%zu].role' is '%.64s'; allowed: system, developer, user, "
                          "assistant%s",
                          i, role, tool ? " (tools are not supported yet)" : "");
    }
    if (is_asked_for(json_object_get(msg, "tool_calls"))) {
        return front_fail(e, 400, "messages", "unsupported_parameter",
                          "'messages[%zu].tool_calls' is not supported yet", i);
    }
    json_t *content = take_content(json_object_get(msg, "content"), role, i, e);
    if (content == NULL) {
        return false;
    }
    json_t *clean = json_object();
    json_object_set_new(clean, "role", json_string(role));
    json_object_set_new(clean, "content", content);
    if (json_is_string(json_object_get(msg, "name"))) {
        json_object_set(clean, "name", json_object_get(msg, "name"));
    }
    json_array_append_new(out, clean);
    return true;
}

/* The template's context from a chat body; NULL: e is set. */
static json_t *chat_context(const json_t *root, struct front_error *e)
{
    const json_t *list = json_object_get(root, "messages");
    const json_t *more = json_object_get(root, "chat_template_kwargs");
    bool generate = true;
    if (!json_is_array(list) || json_array_size(list) == 0) {
        front_fail(e, 400, "messages",
                   list == NULL || json_is_null(list) ? "missing_required_parameter"
                                                      : "invalid_value",
                   "'messages' must be an array of at least one message");
        return NULL;
    }
    if (!front_get_bool(root, "add_generation_prompt", &generate, e)) {
        return NULL;
    }
    if (more != NULL && !json_is_null(more) && !json_is_object(more)) {
        front_fail(e, 400, "chat_template_kwargs", "invalid_type",
                   "'chat_template_kwargs' must be an object");
        return NULL;
    }
    json_t *ctx = json_object(), *messages = json_array();
    json_object_set_new(ctx, "messages", messages);
    json_object_set_new(ctx, "add_generation_prompt", json_boolean(generate));
    if (json_is_object(more)) {
        json_object_update_missing(ctx, (json_t *)more);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (!take_message(json_array_get(list, i), i, messages, e)) {
            json_decref(ctx);
            return NULL;
        }
    }
    return ctx;
}

/* Messages through the chat template into tokens. */
static bool take_chat(const struct front_model *m, const json_t *root, struct bt_tokens *out,
                      struct front_error *e)
{
    bool special = false; /* templates write BOS themselves */
    char why[256] = "";
    if (m->tmpl == NULL) {
        return front_fail(e, 400, "messages", "unsupported_parameter",
                          "this model has no chat template; use /v1/completions");
    }
    if (!front_get_bool(root, "add_special_tokens", &special, e)) {
        return false;
    }
    json_t *ctx = chat_context(root, e);
    if (ctx == NULL) {
        return false;
    }
    char *text = json_dumps(ctx, JSON_COMPACT);
    json_decref(ctx);
    struct bt_buf prompt;
    bt_buf_init(&prompt);
    bt_status_t st = bt_template_render(m->tmpl, text, &prompt, why, sizeof(why));
    free(text);
    bool ok = st == BT_OK
                  ? encode(m, "messages", prompt.data != NULL ? prompt.data : "", prompt.len,
                           special, out, e)
                  : front_fail(e, 400, "messages", "invalid_value", "the chat template refused: %s",
                               why[0] != '\0' ? why : bt_status_text(st));
    bt_buf_cleanup(&prompt);
    return ok;
}

/* ---- options ---- */

static bool take_stops(const json_t *root, struct bt_gen_spec *spec, struct front_error *e)
{
    const json_t *v = json_object_get(root, "stop");
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > STOPS_MAX) {
        return front_fail(e, 400, "stop", "invalid_value", "'stop' has %zu entries; at most %d", n,
                          STOPS_MAX);
    }
    if (n == 0) {
        return true;
    }
    spec->stop = bt_calloc(n + 1, sizeof(spec->stop[0]));
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        size_t len = json_string_length(s);
        if (!json_is_string(s)) {
            return front_fail(e, 400, "stop", "invalid_type",
                              "'stop' must be a string or an array of strings");
        }
        if (len == 0 || len > STOP_BYTES_MAX) {
            return front_fail(e, 400, "stop", "invalid_value",
                              "a stop string has %zu bytes; allowed: 1 to %d", len, STOP_BYTES_MAX);
        }
        spec->stop[i] = bt_strdup(json_string_value(s));
    }
    return true;
}

/* EOS of the model unless ignored, and the client's own stop ids. */
static bool take_ends(const struct front_model *m, const json_t *root, struct bt_engine_params *s,
                      struct front_error *e)
{
    bool ignore = false;
    const json_t *more = json_object_get(root, "stop_token_ids");
    if (!front_get_bool(root, "ignore_eos", &ignore, e)) {
        return false;
    }
    for (uint32_t i = 0; !ignore && i < m->config->n_eos && i < BT_ENGINE_MAX_EOS; i++) {
        s->eos[s->n_eos++] = m->config->eos[i];
    }
    if (more == NULL || json_is_null(more)) {
        return true;
    }
    if (!json_is_array(more) || json_array_size(more) > BT_ENGINE_MAX_EOS - s->n_eos) {
        return front_fail(e, 400, "stop_token_ids", "invalid_value",
                          "'stop_token_ids' must be an array of at most %u token ids",
                          BT_ENGINE_MAX_EOS - s->n_eos);
    }
    struct bt_tokens ids = {0};
    bool ok = take_ids(m, "stop_token_ids", more, &ids, e);
    for (size_t i = 0; ok && i < ids.n; i++) {
        s->eos[s->n_eos++] = ids.ids[i];
    }
    bt_tokens_cleanup(&ids);
    return ok;
}

/* {"token id": -100..100, ...} */
static bool take_bias(const struct front_model *m, const json_t *root, struct bt_engine_params *s,
                      struct front_error *e)
{
    json_t *v = json_object_get(root, "logit_bias");
    const char *key;
    json_t *item;
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    if (!json_is_object(v) || json_object_size(v) > BIASES_MAX) {
        return front_fail(e, 400, "logit_bias", "invalid_value",
                          "'logit_bias' must be an object of at most %d token ids", BIASES_MAX);
    }
    if (json_object_size(v) == 0) {
        return true;
    }
    uint32_t *ids = bt_calloc(json_object_size(v), sizeof(*ids));
    float *bias = bt_calloc(json_object_size(v), sizeof(*bias));
    s->bias_ids = ids; /* the spec's from here on */
    s->bias = bias;
    json_object_foreach(v, key, item)
    {
        size_t digits = strspn(key, "0123456789");
        bool is_id = digits > 0 && digits < 10 && key[digits] == '\0' &&
                     strtoul(key, NULL, 10) < m->config->vocab;
        double b = json_number_value(item);
        if (!is_id || !json_is_number(item) || !(b >= -100 && b <= 100)) {
            return front_fail(e, 400, "logit_bias", "invalid_value",
                              "'logit_bias[\"%.32s\"]': keys are token ids 0 to %u, values -100 to "
                              "100",
                              key, m->config->vocab - 1);
        }
        ids[s->n_bias] = (uint32_t)strtoul(key, NULL, 10);
        bias[s->n_bias++] = (float)b;
    }
    return true;
}

static bool take_sampling(const struct front_model *m, const json_t *root, struct bt_gen_spec *spec,
                          struct front_error *e)
{
    const struct bt_model_config *c = m->config;
    struct bt_engine_params *s = &spec->sampling;
    int64_t top_k = c->top_k > 0 ? c->top_k : 0, seed = 0;
    s->temperature = c->temperature >= 0 ? c->temperature : 1.0f;
    s->top_p = c->top_p > 0 && c->top_p <= 1 ? c->top_p : 1.0f;
    s->repetition_penalty = c->repetition_penalty > 0 ? c->repetition_penalty : 1.0f;
    if (!front_get_num(root, "temperature", 0, false, 100, &s->temperature, e) ||
        !front_get_num(root, "top_p", 0, true, 1, &s->top_p, e) ||
        !front_get_num(root, "min_p", 0, false, 1, &s->min_p, e) ||
        !front_get_int(root, "top_k", -1, INT32_MAX, &top_k, e) ||
        !front_get_num(root, "repetition_penalty", 0, true, 100, &s->repetition_penalty, e) ||
        !front_get_num(root, "frequency_penalty", -2, false, 2, &s->frequency_penalty, e) ||
        !front_get_num(root, "presence_penalty", -2, false, 2, &s->presence_penalty, e) ||
        !front_get_int(root, "seed", INT64_MIN, INT64_MAX, &seed, e)) {
        return false;
    }
    if (s->temperature > 0 && s->temperature < 0.01f) {
        s->temperature = 0.01f; /* logits over less than that leave the range of floats */
    }
    s->top_k = top_k > 0 ? (uint32_t)top_k : 0; /* -1 and 0: off */
    s->seed = (uint64_t)seed;
    spec->unseeded = !front_has(root, "seed");
    return true;
}

static bool take_logprobs(const json_t *root, bool chat, int32_t *out, struct front_error *e)
{
    int64_t n = -1;
    bool on = false;
    if (!chat) {
        if (!front_get_int(root, "logprobs", 0, BT_ENGINE_MAX_TOP, &n, e)) {
            return false;
        }
        *out = (int32_t)n;
        return true;
    }
    if (!front_get_bool(root, "logprobs", &on, e) ||
        !front_get_int(root, "top_logprobs", 0, BT_ENGINE_MAX_TOP, &n, e)) {
        return false;
    }
    if (!on && n > 0) {
        return front_fail(e, 400, "top_logprobs", "invalid_value",
                          "'top_logprobs' needs 'logprobs': true");
    }
    *out = !on ? -1 : n > 0 ? (int32_t)n : 0;
    return true;
}

static bool take_look(const json_t *root, bool chat, struct bt_gen_spec *spec,
                      struct front_options *opt, struct front_error *e)
{
    const json_t *so = json_object_get(root, "stream_options");
    spec->skip_special = true;
    spec->n = opt->n = 1;
    opt->chat = chat;
    if (!front_get_bool(root, "stream", &opt->stream, e) ||
        !front_get_bool(root, "return_tokens_as_token_ids", &opt->tokens_as_ids, e) ||
        !front_get_bool(root, "skip_special_tokens", &spec->skip_special, e) ||
        !front_get_bool(root, "include_stop_str_in_output", &spec->include_stop, e) ||
        !take_logprobs(root, chat, &spec->sampling.logprobs, e)) {
        return false;
    }
    opt->logprobs = spec->sampling.logprobs;
    opt->skip_special = spec->skip_special;
    if (so == NULL || json_is_null(so)) {
        return true;
    }
    if (!json_is_object(so)) {
        return front_fail(e, 400, "stream_options", "invalid_type",
                          "'stream_options' must be an object");
    }
    if (!front_get_bool(so, "include_usage", &opt->include_usage, e) ||
        !front_get_bool(so, "continuous_usage_stats", &opt->continuous_usage, e)) {
        return false;
    }
    opt->continuous_usage = opt->continuous_usage && opt->include_usage;
    return true;
}

static bool take_salt(const json_t *root, struct bt_gen_spec *spec, struct front_error *e)
{
    const char *salt = NULL;
    if (!front_get_str(root, "cache_salt", &salt, e)) {
        return false;
    }
    if (salt != NULL) {
        size_t len = strlen(salt);
        if (len == 0 || len > SALT_BYTES_MAX) {
            return front_fail(e, 400, "cache_salt", "invalid_value",
                              "'cache_salt' has %zu bytes; allowed: 1 to %d", len, SALT_BYTES_MAX);
        }
        spec->cache_salt = bt_strdup(salt);
    }
    return true;
}

/* max_tokens against the context that the prompt leaves. */
static bool take_lengths(const struct front_model *m, const json_t *root, bool chat,
                         struct bt_gen_spec *spec, struct front_error *e)
{
    int64_t max = chat ? INT32_MAX : 16, min = 0;
    if (!front_get_int(root, "max_tokens", 1, INT32_MAX, &max, e) ||
        (chat && !front_get_int(root, "max_completion_tokens", 1, INT32_MAX, &max, e)) ||
        !front_get_int(root, "min_tokens", 0, INT32_MAX, &min, e)) {
        return false;
    }
    const char *key = chat ? "messages" : "prompt";
    if (spec->prompt.n == 0) {
        return front_fail(e, 400, key, "invalid_value", "'%s' has no tokens", key);
    }
    if (spec->prompt.n >= m->max_model_len) {
        return front_fail(e, 400, key, "context_length_exceeded",
                          "the model's context is %u tokens, and at least one must be left to "
                          "generate; '%s' has %zu",
                          m->max_model_len, key, spec->prompt.n);
    }
    if (min > max) {
        return front_fail(e, 400, "min_tokens", "invalid_value",
                          "'min_tokens' is %lld, above the %lld of 'max_tokens'", (long long)min,
                          (long long)max);
    }
    int64_t room = (int64_t)m->max_model_len - (int64_t)spec->prompt.n;
    spec->max_tokens = (uint32_t)BT_MIN(max, room);
    spec->sampling.min_new = (uint32_t)BT_MIN(min, room);
    return true;
}

/* Cheap checks first: nothing is tokenized for a request that will be refused anyway. */
static bool take_generation(const struct front_model *m, bool chat, const json_t *root,
                            struct bt_gen_spec *spec, struct front_options *opt,
                            struct front_error *e)
{
    return check_model(m, root, e) && refuse_unsupported(root, e) && check_choices(root, e) &&
           take_look(root, chat, spec, opt, e) && take_sampling(m, root, spec, e) &&
           take_ends(m, root, &spec->sampling, e) && take_bias(m, root, &spec->sampling, e) &&
           take_stops(root, spec, e) && take_salt(root, spec, e) &&
           (chat ? take_chat(m, root, &spec->prompt, e) : take_prompt(m, root, &spec->prompt, e)) &&
           take_lengths(m, root, chat, spec, e);
}

bool front_parse_generation(const struct front_model *m, bool chat, const void *body, size_t len,
                            struct bt_gen_spec *spec, struct front_options *opt,
                            struct front_error *e)
{
    json_t *root = front_json_parse(body, len, e);
    *spec = (struct bt_gen_spec){0};
    *opt = (struct front_options){0};
    if (root == NULL) {
        return false;
    }
    bool ok = take_generation(m, chat, root, spec, opt, e);
    json_decref(root);
    if (!ok) {
        front_spec_cleanup(spec);
    }
    return ok;
}

bool front_parse_tokenize(const struct front_model *m, const void *body, size_t len,
                          struct bt_tokens *out, bool *want_strings_p, struct front_error *e)
{
    json_t *root = front_json_parse(body, len, e);
    if (root == NULL) {
        return false;
    }
    *want_strings_p = false;
    struct front_model any_length = *m;
    any_length.piece_max = 0;
    m = &any_length;
    bool chat = front_has(root, "messages");
    bool ok = check_model(m, root, e) &&
              front_get_bool(root, "return_token_strs", want_strings_p, e) &&
              (chat ? take_chat(m, root, out, e) : take_prompt(m, root, out, e));
    json_decref(root);
    return ok;
}

bool front_parse_detokenize(const struct front_model *m, const void *body, size_t len,
                            struct bt_tokens *out, struct front_error *e)
{
    json_t *root = front_json_parse(body, len, e);
    if (root == NULL) {
        return false;
    }
    const json_t *list = json_object_get(root, "tokens");
    bool ok = check_model(m, root, e) &&
              (json_is_array(list) ||
               front_fail(e, 400, "tokens", "invalid_type", "'tokens' must be an array of ids")) &&
              take_ids(m, "tokens", list, out, e);
    json_decref(root);
    return ok;
}
