/* Bodies of OpenAI's POST /v1/responses as bodies of chat. The input is a list of items; reasoning,
 * text and calls of the assistant in a row are one message of chat. Nothing is stored, so a body
 * has the whole conversation. Pure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_adapt.h"
#include "conductor/front/front_fields.h"

/* Texts up to this length are repeated in the answer (instructions, tools). */
#define ECHO_BYTES_MAX 65536
#define METADATA_MAX   16

static bool unsupported(const char *prefix, const json_t *type, const char *allowed,
                        struct bt_front_error *e)
{
    return bt_front_fail(e, 400, "input", "unsupported_parameter",
                         "'%stype' is '%.40s'; supported here: %s", prefix,
                         json_is_string(type) ? json_string_value(type) : "", allowed);
}

/* ---- content ---- */

/* A text of any of the two types (the second may be NULL). */
static bool take_part(const json_t *part, const char *prefix, const char *type, const char *other,
                      struct bt_buf *out, struct bt_front_error *e)
{
    const json_t *t = json_object_get(part, "type"), *text = json_object_get(part, "text");
    char allowed[64];
    if (!bt_front_adapt_is(t, type) && (other == NULL || !bt_front_adapt_is(t, other))) {
        snprintf(allowed, sizeof(allowed), "%s%s%s", type, other != NULL ? ", " : "",
                 other != NULL ? other : "");
        return unsupported(prefix, t, allowed, e);
    }
    if (!bt_front_fields_check(part, FRONT_RESPONSES_PART, prefix, e)) {
        return false;
    }
    if (!json_is_string(text)) {
        return bt_front_fail(e, 400, "input", "invalid_type", "'%stext' must be a string", prefix);
    }
    bt_buf_puts(out, out->len > 0 ? "\n" : "");
    bt_buf_append(out, json_string_value(text), json_string_length(text));
    return true;
}

/* The text of a member that is a string or an array of parts. NULL: e is set. */
static json_t *text_of(const json_t *item, const char *name, const char *prefix, const char *type,
                       const char *other, struct bt_front_error *e)
{
    const json_t *v = json_object_get(item, name);
    struct bt_buf text;
    bool ok = true;
    if (json_is_string(v)) {
        return json_incref((json_t *)v);
    }
    if (!json_is_array(v)) {
        bt_front_fail(e, 400, "input", "invalid_type",
                      "'%s%s' must be a string or an array of parts", prefix, name);
        return NULL;
    }
    bt_buf_init(&text);
    for (size_t i = 0; ok && i < json_array_size(v); i++) {
        char place[64];
        snprintf(place, sizeof(place), "%.30s%.10s[%zu].", prefix, name, i);
        ok = take_part(json_array_get(v, i), place, type, other, &text, e);
    }
    json_t *s = ok ? json_stringn(text.data != NULL ? text.data : "", text.len) : NULL;
    bt_buf_cleanup(&text);
    return s;
}

/* ---- items ---- */

static bool take_message(struct bt_front_turn *t, const json_t *item, const char *prefix,
                         struct bt_front_error *e)
{
    static const char *const roles[] = {"user", "assistant", "system", "developer"};
    const json_t *role = json_object_get(item, "role");
    const char *known = NULL;
    for (size_t i = 0; i < BT_ARRAY_LEN(roles); i++) {
        known = bt_front_adapt_is(role, roles[i]) ? roles[i] : known;
    }
    if (known == NULL) {
        return bt_front_fail(e, 400, "input", "invalid_value",
                             "'%srole' must be user, assistant, system or developer", prefix);
    }
    bool assistant = strcmp(known, "assistant") == 0;
    json_t *text = text_of(item, "content", prefix, assistant ? "output_text" : "input_text",
                           assistant ? NULL : "output_text", e);
    if (text == NULL) {
        return false;
    }
    if (!assistant || t->has_text || t->calls != NULL) { /* else it follows its own reasoning */
        bt_front_turn_end(t);
    }
    t->role = known;
    bt_front_turn_text(t, text);
    json_decref(text);
    return true;
}

static void to_assistant(struct bt_front_turn *t)
{
    if (t->role == NULL || strcmp(t->role, "assistant") != 0) {
        bt_front_turn_end(t);
    }
    t->role = "assistant";
}

static bool take_call(struct bt_front_turn *t, const json_t *item, const char *prefix,
                      struct bt_front_error *e)
{
    const char *id = bt_front_adapt_text(item, "call_id", prefix, e);
    const char *name = id != NULL ? bt_front_adapt_text(item, "name", prefix, e) : NULL;
    json_t *arguments = json_object_get(item, "arguments");
    if (name == NULL) {
        return false;
    }
    if (!json_is_string(arguments)) {
        return bt_front_fail(e, 400, "input", "invalid_type",
                             "'%sarguments' must be a string of JSON", prefix);
    }
    to_assistant(t);
    bt_front_turn_call(t, id, name, json_incref(arguments));
    return true;
}

static bool take_output(struct bt_front_turn *t, const json_t *item, const char *prefix,
                        struct bt_front_error *e)
{
    const char *id = bt_front_adapt_text(item, "call_id", prefix, e);
    json_t *text =
        id != NULL ? text_of(item, "output", prefix, "input_text", "output_text", e) : NULL;
    if (text == NULL) {
        return false;
    }
    bt_front_turn_result(t, id, text);
    t->role = NULL;
    return true;
}

/* The reasoning itself, or its summary if there is nothing else. Encrypted reasoning was not made
 * here. */
static bool take_reasoning(struct bt_front_turn *t, const json_t *item, const char *prefix,
                           struct bt_front_error *e)
{
    bool own = json_array_size(json_object_get(item, "content")) > 0;
    if (!own && json_array_size(json_object_get(item, "summary")) == 0) {
        return true;
    }
    json_t *text = text_of(item, own ? "content" : "summary", prefix,
                           own ? "reasoning_text" : "summary_text", NULL, e);
    if (text == NULL) {
        return false;
    }
    to_assistant(t);
    if (t->has_text || t->calls != NULL) { /* reasoning goes before what it leads to */
        bt_front_turn_end(t);
    }
    bt_front_turn_reasoning(t, text);
    json_decref(text);
    return true;
}

static bool take_item(struct bt_front_turn *t, const json_t *item, size_t i,
                      struct bt_front_error *e)
{
    static const struct {
        const char *type;
        uint64_t kind;
        bool (*take)(struct bt_front_turn *t, const json_t *item, const char *prefix,
                     struct bt_front_error *e);
    } types[] = {{"message", FRONT_RESPONSES_MESSAGE, take_message},
                 {"function_call", FRONT_RESPONSES_CALL, take_call},
                 {"function_call_output", FRONT_RESPONSES_OUTPUT, take_output},
                 {"reasoning", FRONT_RESPONSES_REASONING, take_reasoning}};
    char prefix[64];
    const json_t *type = json_object_get(item, "type");
    snprintf(prefix, sizeof(prefix), "input[%zu].", i);
    for (size_t k = 0; k < BT_ARRAY_LEN(types); k++) {
        bool untyped = k == 0 && json_is_object(item) && !bt_front_has(item, "type");
        if (untyped || bt_front_adapt_is(type, types[k].type)) {
            return bt_front_fields_check(item, types[k].kind, prefix, e) &&
                   types[k].take(t, item, prefix, e);
        }
    }
    if (bt_front_adapt_is(type, "item_reference")) {
        return bt_front_fail(e, 400, "input", "unsupported_parameter",
                             "'%stype' is 'item_reference', but this server does not store items; "
                             "send the item itself (in many clients: set store to false)",
                             prefix);
    }
    return unsupported(prefix, type, "message, function_call, function_call_output, reasoning", e);
}

static bool take_input(const json_t *root, json_t *chat, struct bt_front_error *e)
{
    const char *instructions = NULL;
    const json_t *input = json_object_get(root, "input");
    json_t *messages = json_array();
    struct bt_front_turn t = {.messages = messages};
    bool ok = true;
    json_object_set_new(chat, "messages", messages);
    if (!bt_front_get_str(root, "instructions", &instructions, e)) {
        return false;
    }
    if (instructions != NULL && instructions[0] != '\0') {
        json_array_append_new(messages,
                              json_pack("{s:s,s:s}", "role", "system", "content", instructions));
    }
    if (json_is_string(input)) {
        t.role = "user";
        bt_front_turn_text(&t, input);
    } else if (!json_is_array(input) || json_array_size(input) == 0) {
        ok = bt_front_fail(e, 400, "input",
                           bt_front_has(root, "input") ? "invalid_value"
                                                       : "missing_required_parameter",
                           "'input' must be a string or an array of at least one item");
    }
    for (size_t i = 0; ok && i < json_array_size(input); i++) {
        ok = take_item(&t, json_array_get(input, i), i, e);
    }
    bt_front_turn_end(&t);
    bt_front_turn_cleanup(&t);
    return ok;
}

/* ---- tools ---- */

static bool take_tool(const json_t *tool, size_t i, json_t *tools, struct bt_front_error *e)
{
    static const char *const same[] = {"name", "description", "parameters", "strict"};
    char prefix[64];
    const json_t *type = json_object_get(tool, "type");
    snprintf(prefix, sizeof(prefix), "tools[%zu].", i);
    if (!bt_front_adapt_is(type, "function")) {
        return bt_front_fail(e, 400, "tools", "unsupported_parameter",
                             "'%stype' is '%.40s'; only tools of the type function are supported",
                             prefix, json_is_string(type) ? json_string_value(type) : "");
    }
    if (!bt_front_fields_check(tool, FRONT_RESPONSES_TOOL, prefix, e) ||
        bt_front_adapt_text(tool, "name", prefix, e) == NULL) {
        return false;
    }
    json_t *function = json_object();
    for (size_t k = 0; k < BT_ARRAY_LEN(same); k++) {
        if (bt_front_has(tool, same[k])) {
            json_object_set(function, same[k], json_object_get(tool, same[k]));
        }
    }
    json_array_append_new(tools, json_pack("{s:s,s:o}", "type", "function", "function", function));
    return true;
}

/* A word, or {"type":"function","name":...}, which chat has one level deeper. */
static bool take_choice(json_t *choice, json_t *chat, struct bt_front_error *e)
{
    if (json_is_string(choice)) {
        json_object_set(chat, "tool_choice", choice);
        return true;
    }
    if (!bt_front_adapt_is(json_object_get(choice, "type"), "function")) {
        return bt_front_fail(e, 400, "tool_choice", "unsupported_parameter",
                             "'tool_choice' must be none, auto, required or an object of the type "
                             "function");
    }
    const char *name = bt_front_adapt_text(choice, "name", "tool_choice.", e);
    if (name == NULL || !bt_front_fields_check(choice, FRONT_RESPONSES_CHOICE, "tool_choice.", e)) {
        return false;
    }
    json_object_set_new(chat, "tool_choice",
                        json_pack("{s:s,s:{s:s}}", "type", "function", "function", "name", name));
    return true;
}

/* ---- the rest of the body ---- */

/* text.format: as chat's response_format, but with its members side by side. */
static bool take_format(const json_t *root, json_t *chat, struct bt_front_error *e)
{
    const json_t *text = json_object_get(root, "text"), *format = json_object_get(text, "format");
    if (!bt_front_has(root, "text")) {
        return true;
    }
    if (!json_is_object(text)) {
        return bt_front_fail(e, 400, "text", "invalid_type", "'text' must be an object");
    }
    if (!bt_front_fields_check(text, FRONT_RESPONSES_TEXT, "text.", e)) {
        return false;
    }
    if (!bt_front_has(text, "format")) {
        return true;
    }
    if (!bt_front_adapt_is(json_object_get(format, "type"), "json_schema")) {
        json_object_set(chat, "response_format", (json_t *)format);
        return true;
    }
    if (!bt_front_fields_check(format, FRONT_RESPONSES_FORMAT, "text.format.", e)) {
        return false;
    }
    json_t *schema = json_deep_copy(format);
    json_object_del(schema, "type");
    json_object_set_new(chat, "response_format",
                        json_pack("{s:s,s:o}", "type", "json_schema", "json_schema", schema));
    return true;
}

/* What the answer shall contain besides its text: only logprobs can. */
static bool take_include(const json_t *root, json_t *chat, struct bt_front_error *e)
{
    const json_t *list = json_object_get(root, "include");
    bool logprobs = false;
    int64_t top = 0;
    if (bt_front_has(root, "include") && !json_is_array(list)) {
        return bt_front_fail(e, 400, "include", "invalid_type", "'include' must be an array");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        logprobs = logprobs || bt_front_adapt_is(v, "message.output_text.logprobs");
        if (!json_is_string(v)) {
            return bt_front_fail(e, 400, "include", "invalid_type",
                                 "'include[%zu]' must be a string", i);
        }
    }
    if (!bt_front_get_int(root, "top_logprobs", 0, BT_ENGINE_MAX_TOP, &top, e)) {
        return false;
    }
    if (logprobs || top > 0) {
        json_object_set_new(chat, "logprobs", json_true());
        json_object_set_new(chat, "top_logprobs", json_integer(top));
    }
    return true;
}

static bool check_metadata(const json_t *root, struct bt_front_error *e)
{
    json_t *map = json_object_get(root, "metadata"), *v;
    const char *name;
    if (!bt_front_has(root, "metadata")) {
        return true;
    }
    bool ok = json_is_object(map) && json_object_size(map) <= METADATA_MAX;
    json_object_foreach(map, name, v)
    {
        ok = ok && json_is_string(v) && json_string_length(v) <= 512 && strlen(name) <= 64;
    }
    return ok || bt_front_fail(e, 400, "metadata", "invalid_value",
                               "'metadata' must be an object of at most %d strings of up to 512 "
                               "bytes, with names of up to 64",
                               METADATA_MAX);
}

json_t *bt_front_responses_chat(const json_t *root, struct bt_front_error *e)
{
    json_t *chat = json_object();
    bt_front_adapt_copy(root, chat);
    static const char *const moved[][2] = {{"max_output_tokens", "max_completion_tokens"},
                                           {"parallel_tool_calls", "parallel_tool_calls"},
                                           {"reasoning", "reasoning"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(moved); i++) {
        if (bt_front_has(root, moved[i][0])) {
            json_object_set(chat, moved[i][1], json_object_get(root, moved[i][0]));
        }
    }
    bool ok = bt_front_fields_check(root, FRONT_RESPONSES, "", e) && check_metadata(root, e) &&
              take_input(root, chat, e) &&
              bt_front_adapt_tools(root, chat, take_tool, take_choice, e) &&
              take_format(root, chat, e) && take_include(root, chat, e);
    if (!ok) {
        json_decref(chat);
        return NULL;
    }
    return chat;
}

/* ---- what the answer repeats of the request ---- */

/* The member, or `other` (owned) if it is absent, null or long. */
static void repeat(const json_t *root, const char *name, json_t *other, json_t *to)
{
    json_t *v = json_object_get(root, name);
    if (v != NULL && !json_is_null(v) &&
        json_dumpb(v, NULL, 0, JSON_ENCODE_ANY) <= ECHO_BYTES_MAX) {
        json_object_set(to, name, v);
        json_decref(other);
    } else {
        json_object_set_new(to, name, other);
    }
}

/* text.format and reasoning.effort stay what they were; all else in these objects has no effect. */
static void repeat_objects(const json_t *root, json_t *to)
{
    json_t *text = json_object(), *reasoning = json_object();
    repeat(json_object_get(root, "text"), "format", json_pack("{s:s}", "type", "text"), text);
    repeat(json_object_get(root, "reasoning"), "effort", json_null(), reasoning);
    json_object_set_new(reasoning, "summary", json_null());
    json_object_set_new(to, "text", text);
    json_object_set_new(to, "reasoning", reasoning);
}

/* Writes 0.7, not 0.699999988: the shortest text of the same float. */
static json_t *real_of(float v)
{
    char text[32];
    snprintf(text, sizeof(text), "%.7g", (double)v);
    return json_real(strtod(text, NULL));
}

void bt_front_responses_echo(const json_t *root, float temperature, float top_p, struct bt_buf *out)
{
    json_t *to = json_object();
    json_object_set_new(to, "background", json_false());
    repeat(root, "instructions", json_null(), to);
    repeat(root, "max_output_tokens", json_null(), to);
    repeat(root, "max_tool_calls", json_null(), to);
    repeat(root, "metadata", json_object(), to);
    repeat(root, "parallel_tool_calls", json_true(), to);
    json_object_set_new(to, "previous_response_id", json_null());
    json_object_set_new(to, "service_tier", json_string("default"));
    json_object_set_new(to, "store", json_false());
    json_object_set_new(to, "temperature", real_of(temperature));
    repeat_objects(root, to);
    repeat(root, "tool_choice", json_string("auto"), to);
    repeat(root, "tools", json_array(), to);
    repeat(root, "top_logprobs", json_integer(0), to);
    json_object_set_new(to, "top_p", real_of(top_p));
    json_object_set_new(to, "truncation", json_string("disabled"));
    repeat(root, "user", json_null(), to);
    char *text = json_dumps(to, JSON_COMPACT | JSON_REAL_PRECISION(15));
    bt_buf_append(out, text + 1, strlen(text) - 2); /* without the braces */
    free(text);
    json_decref(to);
}
