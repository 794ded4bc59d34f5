/* Functions that the adapters of all other APIs use; see front_adapt.h. Pure. */
#include "conductor/front/front_adapt.h"

#include <stdio.h>
#include <string.h>

/* Chat fields that errors may name, and the names that the client uses for them. */
static const struct {
    enum bt_front_api api;
    const char *chat, *own;
} names[] = {
    {FRONT_API_MESSAGES, "stop", "stop_sequences"},
    {FRONT_API_MESSAGES, "continue_final_message", "messages"},
    {FRONT_API_MESSAGES, "response_format", "output_config.format"},
    {FRONT_API_MESSAGES, "reasoning_effort", "output_config.effort"},
    {FRONT_API_MESSAGES, "parallel_tool_calls", "tool_choice.disable_parallel_tool_use"},
    {FRONT_API_RESPONSES, "messages", "input"},
    {FRONT_API_RESPONSES, "max_tokens", "max_output_tokens"},
    {FRONT_API_RESPONSES, "max_completion_tokens", "max_output_tokens"},
    {FRONT_API_RESPONSES, "response_format.json_schema", "text.format"},
    {FRONT_API_RESPONSES, "response_format", "text.format"},
};

json_t *bt_front_adapt(enum bt_front_api api, const json_t *root, struct bt_front_error *e)
{
    return api == FRONT_API_MESSAGES    ? bt_front_messages_chat(root, false, e)
           : api == FRONT_API_RESPONSES ? bt_front_responses_chat(root, e)
                                        : json_incref((json_t *)root);
}

bool bt_front_adapt_is(const json_t *v, const char *text)
{
    const char *s = json_string_value(v);
    return s != NULL && strcmp(s, text) == 0;
}

const char *bt_front_adapt_text(const json_t *object, const char *name, const char *prefix,
                                struct bt_front_error *e)
{
    char param[64];
    const json_t *v = json_object_get(object, name);
    const char *s = json_string_value(v);
    if (s == NULL || strlen(s) != json_string_length(v)) {
        snprintf(param, sizeof(param), "%.40s%.20s", prefix, name);
        bt_front_fail(e, 400, param, "invalid_type", "'%s' must be a string without NUL", param);
        return NULL;
    }
    return s;
}

/* Returns whether s is the field `name` or a part of it. */
static bool is_field(const char *s, const char *name)
{
    size_t n = strlen(name);
    return strncmp(s, name, n) == 0 && strchr("'.[", s[n]) != NULL;
}

/* Replaces the name of a field at the beginning of s. quoted: also after every quote in s. */
static void rename_in(char *s, size_t cap, bool quoted, const char *from, const char *to)
{
    struct bt_buf out;
    bt_buf_init(&out);
    for (size_t i = 0; s[i] != '\0';) {
        bool here = quoted ? i > 0 && s[i - 1] == '\'' : i == 0;
        if (here && is_field(s + i, from)) {
            bt_buf_puts(&out, to);
            i += strlen(from);
        } else {
            bt_buf_append(&out, s + i++, 1);
        }
    }
    snprintf(s, cap, "%s", out.data != NULL ? out.data : "");
    bt_buf_cleanup(&out);
}

void bt_front_adapt_error(enum bt_front_api api, struct bt_front_error *e)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (names[i].api == api) {
            rename_in(e->param, sizeof(e->param), false, names[i].chat, names[i].own);
            rename_in(e->message, sizeof(e->message), true, names[i].chat, names[i].own);
        }
    }
}

void bt_front_adapt_copy(const json_t *from, json_t *to)
{
    static const char *const same[] = {"model",
                                       "stream",
                                       "temperature",
                                       "top_p",
                                       "top_k",
                                       "min_p",
                                       "min_tokens",
                                       "ignore_eos",
                                       "repetition_penalty",
                                       "logit_bias",
                                       "stop_token_ids",
                                       "frequency_penalty",
                                       "seed",
                                       "priority",
                                       "speculation",
                                       "presence_penalty",
                                       "cache_salt",
                                       "skip_special_tokens",
                                       "chat_template_kwargs"};
    for (size_t i = 0; i < BT_ARRAY_LEN(same); i++) {
        json_t *v = json_object_get(from, same[i]);
        if (v != NULL) {
            json_object_set(to, same[i], v);
        }
    }
}

/* ---- turns ---- */

static void join(struct bt_buf *b, const json_t *text)
{
    bt_buf_puts(b, b->len > 0 ? "\n" : "");
    bt_buf_append(b, json_string_value(text), json_string_length(text));
}

void bt_front_turn_text(struct bt_front_turn *t, const json_t *text)
{
    join(&t->text, text);
    t->has_text = true;
}

void bt_front_turn_reasoning(struct bt_front_turn *t, const json_t *text)
{
    join(&t->reasoning, text);
}

void bt_front_turn_call(struct bt_front_turn *t, const char *id, const char *name,
                        json_t *arguments)
{
    t->calls = t->calls != NULL ? t->calls : json_array();
    json_array_append_new(t->calls, json_pack("{s:s,s:s,s:{s:s,s:o}}", "id", id, "type", "function",
                                              "function", "name", name, "arguments", arguments));
}

static json_t *string_of(const struct bt_buf *b)
{
    return json_stringn(b->data != NULL ? b->data : "", b->len);
}

void bt_front_turn_end(struct bt_front_turn *t)
{
    if (t->has_text || t->calls != NULL || t->reasoning.len > 0) {
        json_t *m = json_object();
        json_object_set_new(m, "role", json_string(t->role));
        json_object_set_new(m, "content", t->has_text ? string_of(&t->text) : json_null());
        if (t->reasoning.len > 0) {
            json_object_set_new(m, "reasoning_content", string_of(&t->reasoning));
        }
        if (t->calls != NULL) {
            json_object_set_new(m, "tool_calls", t->calls);
        }
        json_array_append_new(t->messages, m);
    }
    bt_buf_clear(&t->text);
    bt_buf_clear(&t->reasoning);
    t->has_text = false;
    t->calls = NULL;
}

void bt_front_turn_result(struct bt_front_turn *t, const char *id, json_t *content)
{
    bt_front_turn_end(t);
    json_array_append_new(t->messages, json_pack("{s:s,s:s,s:o}", "role", "tool", "tool_call_id",
                                                 id, "content", content));
}

void bt_front_turn_cleanup(struct bt_front_turn *t)
{
    bt_buf_cleanup(&t->text);
    bt_buf_cleanup(&t->reasoning);
    json_decref(t->calls);
}

bool bt_front_adapt_tools(const json_t *root, json_t *chat, bt_front_tool_fn take_tool,
                          bt_front_choice_fn take_choice, struct bt_front_error *e)
{
    const json_t *list = json_object_get(root, "tools");
    if (bt_front_has(root, "tools") && !json_is_array(list)) {
        return bt_front_fail(e, 400, "tools", "invalid_type", "'tools' must be an array");
    }
    if (json_array_size(list) > 0) {
        json_t *tools = json_array();
        json_object_set_new(chat, "tools", tools);
        for (size_t i = 0; i < json_array_size(list); i++) {
            if (!take_tool(json_array_get(list, i), i, tools, e)) {
                return false;
            }
        }
    }
    return !bt_front_has(root, "tool_choice") ||
           take_choice(json_object_get(root, "tool_choice"), chat, e);
}
