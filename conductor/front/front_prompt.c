/* Turns the prompts and chat messages in a request's JSON into token ids, for generations and for
 * the two routes that only tokenize. Pure, except for the tokenizer and the chat template. */
#include "conductor/front/front_prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_elements.h"
#include "conductor/front/front_fields.h"
#include "conductor/front/front_thinking.h"

#define BEHIND_LAST_MAX 256 /* bytes that a chat template may write behind the last message */
/* Templates read only a few variables; more would cost memory and time. */
#define KWARGS_MAX 256
#define LOOK       65536 /* elements between two checks whether to stop */

static void push_id(struct bt_tokens *t, uint32_t id)
{
    if (t->n == t->cap) {
        t->cap = t->cap == 0 ? 64 : t->cap * 2;
        t->ids = bt_realloc(t->ids, t->cap * sizeof(t->ids[0]));
    }
    t->ids[t->n++] = id;
}

/* True: reading was stopped, and e says so. */
static bool stopped(const struct bt_front_model *m, struct bt_front_error *e)
{
    return m->watch != NULL && m->watch->stop(m->watch->arg) &&
           !bt_front_fail(e, 503, NULL, NULL, "reading this body was stopped");
}

bool bt_front_take_ids(const struct bt_front_model *m, const char *key, const json_t *list,
                       struct bt_tokens *out, struct bt_front_error *e)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (bt_front_is_huge(v)) {
            return bt_front_fail(e, 400, key, "invalid_value",
                                 "'%s[%zu]' is a number that does not fit into 64 bits; token ids "
                                 "of this model are 0 to %u",
                                 key, i, m->config->vocab - 1);
        }
        if (i % LOOK == LOOK - 1 && stopped(m, e)) {
            return false;
        }
        if (!json_is_integer(v)) {
            return bt_front_fail(e, 400, key, "invalid_type", "'%s[%zu]' must be a token id", key,
                                 i);
        }
        int64_t id = json_integer_value(v);
        if (id < 0 || id >= (int64_t)m->config->vocab) {
            return bt_front_fail(e, 400, key, "invalid_value",
                                 "'%s[%zu]' is %lld; token ids of this model are 0 to %u", key, i,
                                 (long long)id, m->config->vocab - 1);
        }
        push_id(out, (uint32_t)id);
    }
    return true;
}

static bool encode(const struct bt_front_model *m, const char *key, const char *text, size_t len,
                   bool add_special, struct bt_tokens *out, struct bt_front_error *e)
{
    /* Tokenizing megabytes of text, only to refuse them, would delay every stream by half a second.
     * The factor 4 leaves room for a normalizer that shortens the text. */
    if (m->piece_max > 0 && len / 4 / m->piece_max >= m->max_model_len) {
        return bt_front_fail(
            e, 400, key, "context_length_exceeded",
            "this model's maximum context length is %u tokens; '%s' has %zu bytes and far more "
            "tokens",
            m->max_model_len, key, len);
    }
    if (m->text_bytes > 0 && len > m->text_bytes) {
        e->beyond = true;
        return bt_front_fail(e, 400, key, "invalid_value", "'%s' has %zu bytes", key, len);
    }
    bt_status_t st = bt_tokenizer_encode(m->tok, text, len, add_special, out);
    if (st != BT_OK) {
        return bt_front_fail(e, 400, key, "invalid_value", "'%s' cannot be tokenized: %s", key,
                             bt_status_text(st));
    }
    return true;
}

void bt_front_prompts_cleanup(struct bt_front_prompts *p)
{
    for (uint32_t i = 0; i < p->n; i++) {
        bt_tokens_cleanup(&p->list[i].ids);
        bt_buf_cleanup(&p->list[i].text);
    }
    free(p->list);
    *p = (struct bt_front_prompts){0};
}

/* One prompt: a string or token ids. */
static bool take_prompt(const struct bt_front_model *m, const json_t *v, bool special,
                        struct bt_tokens *out, struct bt_front_error *e)
{
    if (json_is_string(v)) {
        return encode(m, "prompt", json_string_value(v), json_string_length(v), special, out, e);
    }
    if (!json_is_array(v)) {
        return bt_front_fail(
            e, 400, "prompt", "invalid_type",
            "'prompt' must be a string, an array of token ids, or an array of either");
    }
    return bt_front_take_ids(m, "prompt", v, out, e);
}

/* The text that `echo` returns: the client's own string, or the text of its ids. */
static bool take_text(const struct bt_front_model *m, const json_t *v, bool skip_special,
                      struct bt_front_prompt *p, struct bt_front_error *e)
{
    if (json_is_string(v)) {
        bt_buf_append(&p->text, json_string_value(v), json_string_length(v));
        return true;
    }
    bt_status_t st = bt_tokenizer_decode(m->tok, p->ids.ids, p->ids.n, skip_special, &p->text);
    return st == BT_OK ||
           bt_front_fail(e, 400, "echo", "invalid_value",
                         "'prompt' has an id that the tokenizer cannot turn into text");
}

bool bt_front_take_prompts(const struct bt_front_model *m, const json_t *root, bool with_text,
                           bool skip_special, struct bt_front_prompts *out,
                           struct bt_front_error *e)
{
    bool special = true;
    const json_t *v = json_object_get(root, "prompt");
    if (v == NULL || json_is_null(v)) {
        return bt_front_fail(e, 400, "prompt", "missing_required_parameter", "'prompt' is missing");
    }
    if (!bt_front_get_bool(root, "add_special_tokens", &special, e)) {
        return false;
    }
    const json_t *first = json_array_get(v, 0);
    bool several = json_is_string(first) || json_is_array(first);
    size_t n = several ? json_array_size(v) : 1;
    if (n > FRONT_ANSWER_CHOICES_MAX) {
        return bt_front_fail(e, 400, "prompt", "invalid_value",
                             "'prompt' has %zu prompts; at most %d in one request", n,
                             FRONT_ANSWER_CHOICES_MAX);
    }
    out->list = bt_calloc(n, sizeof(out->list[0]));
    for (size_t i = 0; i < n; i++) {
        const json_t *one = several ? json_array_get(v, i) : v;
        out->n++;
        if (stopped(m, e) || !take_prompt(m, one, special, &out->list[i].ids, e) ||
            (with_text && !take_text(m, one, skip_special, &out->list[i], e))) {
            return false;
        }
    }
    return true;
}

/* Checks one text part of a message's content. */
static bool check_part(const json_t *part, size_t i, size_t k, struct bt_front_error *e)
{
    char prefix[64];
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *words = json_object_get(part, "text");
    if (type == NULL || (strcmp(type, "text") == 0 && !json_is_string(words))) {
        return bt_front_fail(
            e, 400, "messages", "invalid_type",
            "'messages[%zu].content[%zu]' must be {\"type\":\"text\",\"text\":...}", i, k);
    }
    if (strcmp(type, "text") != 0) {
        return bt_front_fail(
            e, 400, "messages", "unsupported_parameter",
            "'messages[%zu].content[%zu].type' is '%.64s'; only 'text' is supported", i, k, type);
    }
    snprintf(prefix, sizeof(prefix), "messages[%zu].content[%zu].", i, k);
    return bt_front_fields_check(part, FRONT_PART, prefix, e);
}

enum { SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, ROLES };
static const char *const roles[ROLES] = {"system", "developer", "user", "assistant", "tool"};

/* Returns the text of a message's content: a string, null (only of an assistant), or text parts
 * joined by newlines. NULL: e is set. */
static json_t *take_content(const json_t *content, const char *role, size_t i,
                            struct bt_front_error *e)
{
    if (json_is_string(content)) {
        return json_incref((json_t *)content);
    }
    if ((content == NULL || json_is_null(content)) && strcmp(role, "assistant") == 0) {
        return json_string("");
    }
    if (!json_is_array(content)) {
        bt_front_fail(e, 400, "messages", "invalid_type",
                      "'messages[%zu].content' must be a string or an array of text parts", i);
        return NULL;
    }
    struct bt_buf text;
    bt_buf_init(&text);
    for (size_t k = 0; k < json_array_size(content); k++) {
        const json_t *part = json_array_get(content, k);
        const json_t *words = json_object_get(part, "text");
        if (!check_part(part, i, k, e)) {
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

/* Checks the other fields of a message that the template gets. */
static bool check_strings(const json_t *msg, const char *prefix, struct bt_front_error *e)
{
    static const char *const names[] = {"name", "reasoning_content", "reasoning"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (bt_front_has(msg, names[i]) && !json_is_string(json_object_get(msg, names[i]))) {
            return bt_front_fail(e, 400, "messages", "invalid_type", "'%s%s' must be a string",
                                 prefix, names[i]);
        }
    }
    return true;
}

static bool take_message(const json_t *msg, size_t i, struct bt_front_calls *calls, json_t *out,
                         struct bt_front_error *e)
{
    const char *role = json_string_value(json_object_get(msg, "role"));
    char prefix[64];
    int r = 0;
    if (role == NULL) {
        return bt_front_fail(e, 400, "messages", "invalid_type",
                             "'messages[%zu]' must be an object with a 'role' and a 'content'", i);
    }
    while (r < ROLES && strcmp(role, roles[r]) != 0) {
        r++;
    }
    if (r == ROLES) {
        return bt_front_fail(e, 400, "messages", "invalid_value",
                             "'messages[%zu].role' is '%.64s'; allowed: system, developer, user, "
                             "assistant, tool",
                             i, role);
    }
    snprintf(prefix, sizeof(prefix), "messages[%zu].", i);
    if (!bt_front_fields_check(msg, FRONT_MESSAGE, prefix, e) || !check_strings(msg, prefix, e)) {
        return false;
    }
    json_t *content = take_content(json_object_get(msg, "content"), role, i, e);
    if (content == NULL) {
        return false;
    }
    json_t *clean = json_object();
    json_object_set_new(clean, "role", json_string(role));
    json_object_set_new(clean, "content", content);
    const json_t *thoughts = json_object_get(
        msg, bt_front_has(msg, "reasoning_content") ? "reasoning_content" : "reasoning");
    if (bt_front_has(msg, "name")) {
        json_object_set(clean, "name", json_object_get(msg, "name"));
    }
    if (json_is_string(thoughts)) { /* templates use one name or the other */
        json_object_set(clean, "reasoning_content", (json_t *)thoughts);
        json_object_set(clean, "reasoning", (json_t *)thoughts);
    }
    json_array_append_new(out, clean);
    if (r == TOOL) {
        return bt_front_take_result(calls, msg, prefix, clean, e);
    }
    if (r != ASSISTANT && bt_front_asked_for(json_object_get(msg, "tool_calls"))) {
        return bt_front_fail(e, 400, "messages", "invalid_value",
                             "'%stool_calls' must be in a message of role assistant", prefix);
    }
    return bt_front_take_calls(calls, msg, prefix, clean, e);
}

/* continue_final_message: cuts the rendered prompt behind the last message's own text, so that the
 * model continues that message. Templates may trim a message, so its trimmed text counts too. */
static bool cut_behind_last(const json_t *messages, struct bt_buf *prompt, struct bt_front_error *e)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const json_t *content = json_object_get(last, "content");
    const char *text = json_string_value(content);
    size_t len = json_string_length(content), from = strspn(text, " \t\r\n");
    const char *found = NULL;
    for (int trimmed = 0; trimmed <= 1 && found == NULL; trimmed++) {
        if (trimmed) {
            text += BT_MIN(from, len);
            len -= BT_MIN(from, len);
            while (len > 0 && memchr(" \t\r\n", text[len - 1], 4) != NULL) {
                len--;
            }
        }
        size_t end = prompt->len > BEHIND_LAST_MAX ? prompt->len - BEHIND_LAST_MAX : 0;
        for (size_t at = prompt->len; len > 0 && found == NULL && at >= BT_MAX(len, end); at--) {
            found = memcmp(prompt->data + at - len, text, len) == 0 ? prompt->data + at : NULL;
        }
    }
    if (found == NULL) {
        return bt_front_fail(e, 400, "continue_final_message", "invalid_value",
                             "'continue_final_message': the last message is empty, or the chat "
                             "template changes its text");
    }
    prompt->len = (size_t)(found - prompt->data);
    prompt->data[prompt->len] = '\0';
    return true;
}

static bool among(const char *const *names, size_t n, const char *name)
{
    size_t i = 0;
    while (i < n && strcmp(names[i], name) != 0) {
        i++;
    }
    return i < n;
}

/* Checks the name of one of chat_template_kwargs. They may set variables that the model's authors
 * made for users. They may not set what the server or the model's files set. They may not switch on
 * what the server cannot do: it could not return the model's tool calls, for example. */
static bool check_kwarg(const char *name, struct bt_front_error *e)
{
    static const char *const of_request[] = {
        "messages", "add_generation_prompt", "continue_final_message",
        "tools",    "tool_choice",           "parallel_tool_calls"};
    static const char *const other_tools[] = {"functions",    "function_call",  "documents",
                                              "custom_tools", "builtin_tools",  "xml_tools",
                                              "python_tools", "available_tools"};
    static const char *const of_renderer[] = {"chat_template", "tokenize", "loop",  "self",
                                              "caller",        "varargs",  "kwargs"};
    const char *why = NULL, *word;
    if (among(of_request, BT_ARRAY_LEN(of_request), name)) {
        why = "it is a field of the request itself";
    } else if (among(other_tools, BT_ARRAY_LEN(other_tools), name)) {
        why = "send tools in the field 'tools'; documents are not supported";
    } else if (among(of_renderer, BT_ARRAY_LEN(of_renderer), name)) {
        why = "the server sets it";
    }
    for (size_t i = 0; (word = bt_template_word(BT_TEMPLATE_TOKENS, i)) != NULL; i++) {
        why = strcmp(word, name) == 0 ? "the model's files set it" : why;
    }
    for (size_t i = 0; (word = bt_template_word(BT_TEMPLATE_FUNCTIONS, i)) != NULL; i++) {
        why = strcmp(word, name) == 0 ? "it is a function of templates" : why;
    }
    return why == NULL ||
           bt_front_fail(e, 400, "chat_template_kwargs", "unsupported_parameter",
                         "'chat_template_kwargs' must not contain '%s': %s", name, why);
}

static bool take_kwargs(const json_t *root, json_t *ctx, struct bt_front_error *e)
{
    json_t *more = json_object_get(root, "chat_template_kwargs"), *v;
    const char *name;
    if (more == NULL || json_is_null(more)) {
        return true;
    }
    if (!json_is_object(more)) {
        return bt_front_fail(e, 400, "chat_template_kwargs", "invalid_type",
                             "'chat_template_kwargs' must be an object");
    }
    if (json_object_size(more) > KWARGS_MAX) {
        return bt_front_fail(e, 400, "chat_template_kwargs", "invalid_value",
                             "'chat_template_kwargs' has %zu members; at most %d are allowed",
                             json_object_size(more), KWARGS_MAX);
    }
    json_object_foreach(more, name, v)
    {
        if (!check_kwarg(name, e)) {
            return false;
        }
        json_object_set(ctx, name, v);
    }
    return true;
}

static bool take_messages(const json_t *list, const struct bt_front_style *style, json_t *messages,
                          struct bt_front_error *e)
{
    struct bt_front_calls calls;
    bool ok = true;
    bt_front_calls_init(&calls, style);
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        ok = take_message(json_array_get(list, i), i, &calls, messages, e);
    }
    bt_front_calls_cleanup(&calls);
    return ok;
}

/* Makes the template's context from a chat body. NULL: e is set. */
static json_t *chat_context(const struct bt_front_model *m, const json_t *root, bool go_on,
                            const struct bt_front_tools *tools, struct bt_front_chat *chat,
                            struct bt_front_error *e)
{
    const json_t *list = json_object_get(root, "messages");
    bool generate = !go_on;
    if (!json_is_array(list) || json_array_size(list) == 0) {
        bt_front_fail(e, 400, "messages",
                      list == NULL || json_is_null(list) ? "missing_required_parameter"
                                                         : "invalid_value",
                      "'messages' must be an array of at least one message");
        return NULL;
    }
    if (!bt_front_get_bool(root, "add_generation_prompt", &generate, e)) {
        return NULL;
    }
    if (go_on && generate) {
        bt_front_fail(e, 400, "continue_final_message", "invalid_value",
                      "'continue_final_message' and 'add_generation_prompt' cannot both be true");
        return NULL;
    }
    json_t *ctx = json_object(), *messages = json_array();
    json_object_set_new(ctx, "messages", messages);
    json_object_set_new(ctx, "add_generation_prompt", json_boolean(generate));
    if (tools->list != NULL) {
        json_object_set(ctx, "tools", tools->list);
    }
    if (!take_kwargs(root, ctx, e) || !bt_front_take_thinking(root, ctx, chat, e) ||
        !take_messages(list, &m->style, messages, e)) {
        json_decref(ctx);
        return NULL;
    }
    return ctx;
}

/* What the answer is taken apart into; but for whether the prompt has opened the reasoning. */
static bool take_reply(const struct bt_front_model *m, const json_t *root,
                       const struct bt_front_tools *tools, struct bt_front_chat *chat,
                       struct bt_front_error *e)
{
    bool separate = true, include = true;
    if (!bt_front_get_bool(root, "separate_reasoning", &separate, e) ||
        !bt_front_get_bool(root, "include_reasoning", &include, e)) {
        return false;
    }
    *chat = (struct bt_front_chat){.reply = {.style = m->style.reply,
                                             .tokens = m->style.tokens,
                                             .tools = tools->list != NULL,
                                             .one_call = tools->one,
                                             .kinds = bt_front_kinds,
                                             .keep_thoughts = !separate},
                                   .hides_thoughts = separate && !include};
    if (tools->list == NULL) {
        chat->reply.style.tools = BT_TOOLS_NONE;
    }
    return true;
}

/* Does the last message, which the answer continues, end inside its reasoning? */
static bool last_thinks(const struct bt_reply_style *style, const json_t *messages)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *text = json_string_value(json_object_get(last, "content"));
    return text != NULL && bt_reply_text_thinks(style, text);
}

/* Renders the prompt and makes tokens of it. */
static bool render(const struct bt_front_model *m, const json_t *ctx, bool go_on, bool special,
                   struct bt_tokens *out, struct bt_front_chat *chat, struct bt_front_error *e)
{
    const json_t *messages = json_object_get(ctx, "messages");
    char why[256] = "";
    struct bt_buf prompt;
    bt_buf_init(&prompt);
    bt_status_t st = bt_template_render_object(m->tmpl, ctx, m->template_steps, m->watch, &prompt,
                                               why, sizeof(why));
    e->beyond = st == BT_ERR_EXHAUSTED;
    bt_buf_reserve(&prompt, 0);
    bool ok = st == BT_OK || bt_front_fail(e, 400, "messages", "invalid_value",
                                           "the chat template refused these messages: %s",
                                           why[0] != '\0' ? why : bt_status_text(st));
    ok = ok && (!go_on || cut_behind_last(messages, &prompt, e)) &&
         encode(m, "messages", prompt.data, prompt.len, special, out, e);
    if (ok) {
        chat->reply.thinks = go_on
                                 ? last_thinks(&m->style.reply, messages)
                                 : bt_reply_prompt_thinks(&m->style.reply, prompt.data, prompt.len);
    }
    chat->may_think = ok && m->style.reply.thoughts != BT_THOUGHTS_NONE &&
                      !bt_reply_prompt_thought(&m->style.reply, prompt.data, prompt.len);
    bt_buf_cleanup(&prompt);
    return ok;
}

/* Turns messages into tokens with the chat template. */
bool bt_front_take_chat(const struct bt_front_model *m, const json_t *root, struct bt_tokens *out,
                        struct bt_front_chat *chat, struct bt_front_tools *tools,
                        struct bt_front_error *e)
{
    bool special = false; /* templates write BOS themselves */
    bool go_on = false;
    *tools = (struct bt_front_tools){0};
    if (m->tmpl == NULL) {
        return bt_front_fail(e, 400, "messages", "unsupported_parameter",
                             "this model has no chat template; use /v1/completions");
    }
    if (!bt_front_get_bool(root, "add_special_tokens", &special, e) ||
        !bt_front_get_bool(root, "continue_final_message", &go_on, e) ||
        !bt_front_take_tools(&m->style, root, tools, e)) {
        return false;
    }
    json_t *ctx =
        take_reply(m, root, tools, chat, e) ? chat_context(m, root, go_on, tools, chat, e) : NULL;
    bool ok = ctx != NULL && render(m, ctx, go_on, special, out, chat, e);
    json_decref(ctx);
    return ok;
}

bool bt_front_take_prediction(const struct bt_front_model *m, const json_t *root,
                              struct bt_tokens *out, struct bt_front_error *e)
{
    const json_t *v = json_object_get(root, "prediction"), *content = json_object_get(v, "content");
    const char *type = json_string_value(json_object_get(v, "type"));
    bool parts = json_is_array(content), ok = true;
    struct bt_buf text;
    if (!bt_front_has(root, "prediction")) {
        return true;
    }
    if (type == NULL || strcmp(type, "content") != 0 || (!parts && !json_is_string(content))) {
        return bt_front_fail(e, 400, "prediction", "invalid_type",
                             "'prediction' must be {\"type\":\"content\",\"content\":...} with a "
                             "string or text parts");
    }
    bt_buf_init(&text);
    for (size_t i = 0; ok && i < (parts ? json_array_size(content) : 1); i++) {
        const json_t *part = parts ? json_object_get(json_array_get(content, i), "text") : content;
        ok = json_is_string(part) ||
             bt_front_fail(e, 400, "prediction", "invalid_type",
                           "'prediction.content[%zu]' must be {\"type\":\"text\",\"text\":...}", i);
        if (ok) {
            bt_buf_append(&text, json_string_value(part), json_string_length(part));
        }
    }
    ok = ok && (text.len == 0 || encode(m, "prediction", text.data, text.len, false, out, e));
    out->n = ok ? BT_MIN(out->n, (size_t)m->max_model_len) : 0; /* no answer is longer */
    bt_buf_cleanup(&text);
    return ok;
}
