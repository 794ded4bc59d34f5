/* Bodies of Anthropic's POST /v1/messages (version 2023-06-01) as bodies of chat. A user's turn may
 * hold results of tools, which are messages of their own in chat. Turns of the same role in a row
 * are one turn, and an answer continues a last turn of the assistant, as in Anthropic's API. Pure.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_adapt.h"
#include "conductor/front/front_fields.h"

/* Where an object stands, for errors: "messages[2].content[0]." */
typedef char place_t[64];

/* ---- content ---- */

/* Checks a block of text. */
static bool check_text(const json_t *block, const char *prefix, struct bt_front_error *e)
{
    if (!bt_front_adapt_is(json_object_get(block, "type"), "text")) {
        const char *type = json_string_value(json_object_get(block, "type"));
        return bt_front_fail(e, 400, "messages", "unsupported_parameter",
                             "'%stype' is '%.40s'; only 'text' blocks are supported here", prefix,
                             type != NULL ? type : "");
    }
    return bt_front_fields_check(block, FRONT_MESSAGES_BLOCK, prefix, e) &&
           (json_is_string(json_object_get(block, "text")) ||
            bt_front_fail(e, 400, "messages", "invalid_type", "'%stext' must be a string", prefix));
}

/* The text of a string or of text blocks, which newlines join. NULL: e is set. */
static json_t *text_blocks(const json_t *v, const char *name, struct bt_front_error *e)
{
    struct bt_buf text;
    if (json_is_string(v)) {
        return json_incref((json_t *)v);
    }
    if (!json_is_array(v)) {
        bt_front_fail(e, 400, name, "invalid_type", "'%s' must be a string or an array of blocks",
                      name);
        return NULL;
    }
    bt_buf_init(&text);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *block = json_array_get(v, i), *words = json_object_get(block, "text");
        place_t prefix;
        snprintf(prefix, sizeof(prefix), "%.40s[%zu].", name, i);
        if (!check_text(block, prefix, e)) {
            bt_buf_cleanup(&text);
            return NULL;
        }
        bt_buf_puts(&text, i > 0 ? "\n" : "");
        bt_buf_append(&text, json_string_value(words), json_string_length(words));
    }
    json_t *s = json_stringn(text.data != NULL ? text.data : "", text.len);
    bt_buf_cleanup(&text);
    return s;
}

/* Chat has no mark for a tool that failed, so the text says it. */
static json_t *failed(json_t *content)
{
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_puts(&text, "Error: ");
    bt_buf_append(&text, json_string_value(content), json_string_length(content));
    json_decref(content);
    content = json_stringn(text.data, text.len);
    bt_buf_cleanup(&text);
    return content;
}

static bool take_result(struct bt_front_turn *t, const json_t *block, const char *prefix,
                        struct bt_front_error *e)
{
    place_t name;
    const char *id = bt_front_adapt_text(block, "tool_use_id", prefix, e);
    const json_t *v = json_object_get(block, "content"),
                 *wrong = json_object_get(block, "is_error");
    snprintf(name, sizeof(name), "%.50scontent", prefix);
    if (id == NULL) {
        return false;
    }
    if (wrong != NULL && !json_is_boolean(wrong) && !json_is_null(wrong)) {
        return bt_front_fail(e, 400, "messages", "invalid_type",
                             "'%sis_error' must be true or false", prefix);
    }
    json_t *content = v != NULL && !json_is_null(v) ? text_blocks(v, name, e) : json_string("");
    if (content == NULL) {
        return false;
    }
    bt_front_turn_result(t, id, json_is_true(wrong) ? failed(content) : content);
    return true;
}

static bool take_use(struct bt_front_turn *t, const json_t *block, const char *prefix,
                     struct bt_front_error *e)
{
    const json_t *input = json_object_get(block, "input");
    const char *id = bt_front_adapt_text(block, "id", prefix, e);
    const char *name = id != NULL ? bt_front_adapt_text(block, "name", prefix, e) : NULL;
    if (name == NULL) {
        return false;
    }
    if (!json_is_object(input)) {
        return bt_front_fail(e, 400, "messages", "invalid_type", "'%sinput' must be an object",
                             prefix);
    }
    char *text = json_dumps(input, JSON_COMPACT);
    bt_front_turn_call(t, id, name, json_string(text));
    free(text);
    return true;
}

static bool take_block(struct bt_front_turn *t, const json_t *block, const char *prefix,
                       struct bt_front_error *e)
{
    const json_t *type = json_object_get(block, "type"), *v;
    bool user = strcmp(t->role, "user") == 0, assistant = strcmp(t->role, "assistant") == 0;
    if (bt_front_adapt_is(type, "text")) {
        if (!check_text(block, prefix, e)) {
            return false;
        }
        bt_front_turn_text(t, json_object_get(block, "text"));
        return true;
    }
    bool known =
        (user && bt_front_adapt_is(type, "tool_result")) ||
        (assistant && (bt_front_adapt_is(type, "tool_use") || bt_front_adapt_is(type, "thinking") ||
                       bt_front_adapt_is(type, "redacted_thinking")));
    if (!known) {
        return bt_front_fail(e, 400, "messages", "unsupported_parameter",
                             "'%stype' is '%.40s'; supported in a message of the role %s are %s",
                             prefix, json_is_string(type) ? json_string_value(type) : "", t->role,
                             user        ? "text and tool_result"
                             : assistant ? "text, thinking, redacted_thinking and tool_use"
                                         : "blocks of text");
    }
    if (!bt_front_fields_check(block, FRONT_MESSAGES_BLOCK, prefix, e)) {
        return false;
    }
    if (bt_front_adapt_is(type, "tool_result")) {
        return take_result(t, block, prefix, e);
    }
    if (bt_front_adapt_is(type, "tool_use")) {
        return take_use(t, block, prefix, e);
    }
    if (bt_front_adapt_is(type, "thinking")) {
        v = json_object_get(block, "thinking");
        if (!json_is_string(v)) {
            return bt_front_fail(e, 400, "messages", "invalid_type",
                                 "'%sthinking' must be a string", prefix);
        }
        bt_front_turn_reasoning(t, v);
    }
    return true; /* the text of redacted thinking is not known to anyone here */
}

static bool take_message(struct bt_front_turn *t, const json_t *msg, size_t i,
                         struct bt_front_error *e)
{
    place_t prefix;
    const json_t *role = json_object_get(msg, "role"), *content = json_object_get(msg, "content");
    snprintf(prefix, sizeof(prefix), "messages[%zu].", i);
    bool user = bt_front_adapt_is(role, "user"), system = bt_front_adapt_is(role, "system");
    if (!user && !system && !bt_front_adapt_is(role, "assistant")) {
        return bt_front_fail(e, 400, "messages", "invalid_value",
                             "'%srole' must be user, assistant or system", prefix);
    }
    if (!bt_front_fields_check(msg, FRONT_MESSAGES_TURN, prefix, e)) {
        return false;
    }
    if (t->role == NULL || !bt_front_adapt_is(role, t->role)) {
        bt_front_turn_end(t);
    }
    t->role = user ? "user" : system ? "system" : "assistant";
    if (json_is_string(content)) {
        bt_front_turn_text(t, content);
        return true;
    }
    if (!json_is_array(content) || json_array_size(content) == 0) {
        return bt_front_fail(e, 400, "messages", "invalid_type",
                             "'%scontent' must be a string or an array of at least one block",
                             prefix);
    }
    for (size_t k = 0; k < json_array_size(content); k++) {
        snprintf(prefix, sizeof(prefix), "messages[%zu].content[%zu].", i, k);
        if (!take_block(t, json_array_get(content, k), prefix, e)) {
            return false;
        }
    }
    return true;
}

static bool take_system(const json_t *root, json_t *messages, struct bt_front_error *e)
{
    if (!bt_front_has(root, "system")) {
        return true;
    }
    json_t *text = text_blocks(json_object_get(root, "system"), "system", e);
    if (text != NULL && json_string_length(text) > 0) {
        json_array_append_new(messages, json_pack("{s:s,s:O}", "role", "system", "content", text));
    }
    json_decref(text);
    return text != NULL;
}

static bool take_messages(const json_t *root, json_t *chat, struct bt_front_error *e)
{
    const json_t *list = json_object_get(root, "messages");
    json_t *messages = json_array();
    struct bt_front_turn t = {.messages = messages};
    json_object_set_new(chat, "messages", messages);
    if (!json_is_array(list) || json_array_size(list) == 0) {
        return bt_front_fail(e, 400, "messages",
                             bt_front_has(root, "messages") ? "invalid_value"
                                                            : "missing_required_parameter",
                             "'messages' must be an array of at least one message");
    }
    bool ok = take_system(root, messages, e);
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        ok = take_message(&t, json_array_get(list, i), i, e);
    }
    bool assistant = ok && strcmp(t.role, "assistant") == 0;
    if (assistant && t.calls != NULL) {
        ok = bt_front_fail(e, 400, "messages", "invalid_value",
                           "the last message calls a tool; a message of the role user with its "
                           "tool_result must follow");
    }
    bt_front_turn_end(&t);
    bt_front_turn_cleanup(&t);
    if (assistant) {
        json_object_set_new(chat, "continue_final_message", json_true());
    }
    return ok;
}

/* ---- tools ---- */

static bool take_tool(const json_t *tool, size_t i, json_t *tools, struct bt_front_error *e)
{
    place_t prefix;
    snprintf(prefix, sizeof(prefix), "tools[%zu].", i);
    const json_t *type = json_object_get(tool, "type");
    if (bt_front_has(tool, "type") && !bt_front_adapt_is(type, "custom")) {
        return bt_front_fail(e, 400, "tools", "unsupported_parameter",
                             "'%stype' is '%.40s'; tools that the server runs itself are not "
                             "supported, only those with an 'input_schema'",
                             prefix, json_is_string(type) ? json_string_value(type) : "");
    }
    if (!bt_front_fields_check(tool, FRONT_MESSAGES_TOOL, prefix, e) ||
        bt_front_adapt_text(tool, "name", prefix, e) == NULL) {
        return false;
    }
    if (!json_is_object(json_object_get(tool, "input_schema"))) {
        return bt_front_fail(e, 400, "tools", "invalid_type", "'%sinput_schema' must be an object",
                             prefix);
    }
    json_t *function = json_object();
    json_object_set(function, "name", json_object_get(tool, "name"));
    if (bt_front_has(tool, "description")) {
        json_object_set(function, "description", json_object_get(tool, "description"));
    }
    json_object_set(function, "parameters", json_object_get(tool, "input_schema"));
    if (bt_front_has(tool, "strict")) {
        json_object_set(function, "strict", json_object_get(tool, "strict"));
    }
    json_array_append_new(tools, json_pack("{s:s,s:o}", "type", "function", "function", function));
    return true;
}

static bool take_choice(json_t *choice, json_t *chat, struct bt_front_error *e)
{
    static const char *const words[][2] = {{"auto", "auto"}, {"any", "required"}, {"none", "none"}};
    bool alone = false;
    const json_t *type = json_object_get(choice, "type");
    json_t *chosen = NULL;
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        chosen = bt_front_adapt_is(type, words[i][0]) ? json_string(words[i][1]) : chosen;
    }
    if (bt_front_adapt_is(type, "tool")) {
        const char *name = bt_front_adapt_text(choice, "name", "tool_choice.", e);
        if (name == NULL) {
            return false;
        }
        chosen = json_pack("{s:s,s:{s:s}}", "type", "function", "function", "name", name);
    }
    if (chosen == NULL) {
        return bt_front_fail(e, 400, "tool_choice", "invalid_value",
                             "'tool_choice' must be an object of the type auto, any, tool or none");
    }
    json_object_set_new(chat, "tool_choice", chosen);
    if (!bt_front_fields_check(choice, FRONT_MESSAGES_CHOICE, "tool_choice.", e) ||
        !bt_front_get_bool(choice, "disable_parallel_tool_use", &alone, e)) {
        return false;
    }
    if (alone) {
        json_object_set_new(chat, "parallel_tool_calls", json_false());
    }
    return true;
}

/* ---- the body ---- */

/* {"type":"json_schema","schema":...}, and its place before it moved into output_config. */
static bool take_format(const json_t *root, json_t *chat, struct bt_front_error *e)
{
    const json_t *config = json_object_get(root, "output_config");
    const json_t *format = json_object_get(root, "output_format");
    if (bt_front_has(root, "output_config") &&
        (!json_is_object(config)
             ? !bt_front_fail(e, 400, "output_config", "invalid_type",
                              "'output_config' must be an object")
             : !bt_front_fields_check(config, FRONT_MESSAGES_OUTPUT, "output_config.", e))) {
        return false;
    }
    if (bt_front_has(config, "effort")) {
        json_object_set(chat, "reasoning_effort", json_object_get(config, "effort"));
    }
    format = bt_front_has(config, "format") ? json_object_get(config, "format") : format;
    if (format == NULL || json_is_null(format)) {
        return true;
    }
    if (!bt_front_adapt_is(json_object_get(format, "type"), "json_schema") ||
        !json_is_object(json_object_get(format, "schema"))) {
        return bt_front_fail(e, 400, "output_config", "invalid_value",
                             "'output_config.format' must be {\"type\":\"json_schema\","
                             "\"schema\":{...}}");
    }
    json_object_set_new(chat, "response_format",
                        json_pack("{s:s,s:{s:s,s:O,s:b}}", "type", "json_schema", "json_schema",
                                  "name", "answer", "schema", json_object_get(format, "schema"),
                                  "strict", 1));
    return true;
}

json_t *bt_front_messages_chat(const json_t *root, bool count, struct bt_front_error *e)
{
    json_t *chat = json_object();
    bt_front_adapt_copy(root, chat);
    static const char *const moved[][2] = {
        {"max_tokens", "max_tokens"}, {"thinking", "thinking"}, {"stop_sequences", "stop"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(moved); i++) {
        if (bt_front_has(root, moved[i][0])) {
            json_object_set(chat, moved[i][1], json_object_get(root, moved[i][0]));
        }
    }
    bool ok = bt_front_fields_check(root, count ? FRONT_MESSAGES_COUNT : FRONT_MESSAGES, "", e) &&
              (count || bt_front_has(root, "max_tokens") ||
               bt_front_fail(e, 400, "max_tokens", "missing_required_parameter",
                             "'max_tokens' is missing")) &&
              take_messages(root, chat, e) &&
              bt_front_adapt_tools(root, chat, take_tool, take_choice, e) &&
              take_format(root, chat, e);
    if (!ok) {
        json_decref(chat);
        return NULL;
    }
    return chat;
}
