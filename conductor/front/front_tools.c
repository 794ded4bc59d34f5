/* Reads tools and earlier calls of chat bodies; see front_tools.h. */
#include "conductor/front/front_tools.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/sha256.h"
#include "conductor/front/front_fields.h"

#define TOOLS_MAX  1024
#define CALLS_MAX  1024  /* of one message */
#define NAME_MAX   128   /* bytes of a function's name */
#define NESTED_MAX 65536 /* objects and arrays in the arguments of all messages */
#define MISTRAL_ID 9     /* its templates refuse ids of another length */
#define LETTERS    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

/* ---- tools ---- */

static bool is_name(const char *s)
{
    size_t n = strlen(s);
    return n > 0 && n <= NAME_MAX && strspn(s, LETTERS "_-.:/") == n;
}

/* The function of {"type":"function","function":{...}}; NULL: e is set. */
static const json_t *function_of(const json_t *tool, const char *param, const char *where,
                                 struct bt_front_error *e)
{
    const char *type = json_string_value(json_object_get(tool, "type"));
    const json_t *function = json_object_get(tool, "function");
    if (type != NULL && strcmp(type, "function") != 0) {
        bt_front_fail(e, 400, param, "unsupported_parameter",
                      "'%s.type' is '%.64s'; only 'function' is supported", where, type);
        return NULL;
    }
    if (type == NULL || !json_is_object(function)) {
        bt_front_fail(e, 400, param, "invalid_type",
                      "'%s' must be {\"type\":\"function\",\"function\":{\"name\":...}}", where);
        return NULL;
    }
    return function;
}

static const char *name_of(const json_t *function, const char *param, const char *where,
                           struct bt_front_error *e)
{
    const char *name = json_string_value(json_object_get(function, "name"));
    if (name == NULL || !is_name(name)) {
        bt_front_fail(e, 400, param, "invalid_value",
                      "'%s.function.name' must have 1 to %d letters, digits or characters of "
                      "'_-.:/'",
                      where, NAME_MAX);
        return NULL;
    }
    return name;
}

/* The template's form of a function: without fields that are not for the model. */
static json_t *clean_function(const json_t *function)
{
    json_t *clean = json_object(), *parameters = json_object_get(function, "parameters");
    json_object_set(clean, "name", json_object_get(function, "name"));
    if (bt_front_has(function, "description")) {
        json_object_set(clean, "description", json_object_get(function, "description"));
    }
    if (json_is_object(parameters)) {
        json_object_set(clean, "parameters", parameters);
    } else { /* templates expect a schema */
        json_t *none = json_object();
        json_object_set_new(none, "type", json_string("object"));
        json_object_set_new(none, "properties", json_object());
        json_object_set_new(clean, "parameters", none);
    }
    return clean;
}

static bool take_tool(const json_t *tool, size_t i, json_t *names, struct bt_front_tools *t,
                      struct bt_front_error *e)
{
    char where[32], prefix[48];
    bool strict = false;
    snprintf(where, sizeof(where), "tools[%zu]", i);
    snprintf(prefix, sizeof(prefix), "%s.", where);
    const json_t *function = function_of(tool, "tools", where, e);
    if (function == NULL || !bt_front_fields_check(tool, FRONT_TOOL, prefix, e)) {
        return false;
    }
    snprintf(prefix, sizeof(prefix), "%s.function.", where);
    const char *name = name_of(function, "tools", where, e);
    if (name == NULL || !bt_front_fields_check(function, FRONT_FUNCTION, prefix, e)) {
        return false;
    }
    const json_t *text = json_object_get(function, "description");
    if (text != NULL && !json_is_string(text) && !json_is_null(text)) {
        return bt_front_fail(e, 400, "tools", "invalid_type", "'%sdescription' must be a string",
                             prefix);
    }
    if (bt_front_has(function, "parameters") &&
        !json_is_object(json_object_get(function, "parameters"))) {
        return bt_front_fail(e, 400, "tools", "invalid_type",
                             "'%sparameters' must be an object: a JSON schema", prefix);
    }
    if (json_object_get(names, name) != NULL) {
        return bt_front_fail(
            e, 400, "tools", "invalid_value",
            "'%sname' is '%s', the name of an earlier tool; give each tool its own name", prefix,
            name);
    }
    if (!bt_front_get_bool(function, "strict", &strict, e)) {
        return false;
    }
    if (strict) {
        json_object_set_new(t->strict, name, json_true());
    }
    json_t *clean = json_object();
    json_object_set_new(clean, "type", json_string("function"));
    json_object_set_new(clean, "function", clean_function(function));
    json_object_set_new(names, name, json_true());
    json_array_append_new(t->list, clean);
    return true;
}

static bool take_list(const json_t *root, struct bt_front_tools *t, struct bt_front_error *e)
{
    const json_t *list = json_object_get(root, "tools");
    if (!bt_front_has(root, "tools")) {
        return true;
    }
    if (!json_is_array(list) || json_array_size(list) > TOOLS_MAX) {
        return bt_front_fail(e, 400, "tools", "invalid_type",
                             "'tools' must be an array of at most %d tools", TOOLS_MAX);
    }
    if (json_array_size(list) == 0) {
        return true;
    }
    json_t *names = json_object();
    t->list = json_array();
    t->strict = json_object();
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        ok = take_tool(json_array_get(list, i), i, names, t, e);
    }
    json_decref(names);
    return ok;
}

static const json_t *tool_named(const json_t *list, const char *name)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *f = json_object_get(json_array_get(list, i), "function");
        if (strcmp(json_string_value(json_object_get(f, "name")), name) == 0) {
            return json_array_get(list, i);
        }
    }
    return NULL;
}

/* Adds a tool that {"type":"function","function":{"name":...}} names. */
static bool allow(struct bt_front_tools *t, const json_t *choice, const char *where,
                  json_t *allowed, struct bt_front_error *e)
{
    const json_t *function = function_of(choice, "tool_choice", where, e);
    const char *name = function != NULL ? name_of(function, "tool_choice", where, e) : NULL;
    if (name == NULL) {
        return false;
    }
    const json_t *tool = tool_named(t->list, name);
    if (tool == NULL) {
        return bt_front_fail(e, 400, "tool_choice", "invalid_value",
                             "'%s.function.name' is '%s', but 'tools' has no such function", where,
                             name);
    }
    if (tool_named(allowed, name) == NULL) { /* a template writes each as often as it is there */
        json_array_append(allowed, (json_t *)tool);
    }
    return true;
}

static bool take_word(const char *word, const char *where, struct bt_front_tools *t,
                      struct bt_front_error *e)
{
    static const char *const words[] = {"none", "auto", "required"};
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (strcmp(words[i], word) == 0) {
            t->choose = (enum bt_front_choose)i;
            return true;
        }
    }
    return bt_front_fail(e, 400, "tool_choice", "invalid_value",
                         "'%s' is '%.32s'; allowed: none, auto, required%s", where, word,
                         strcmp(where, "tool_choice") == 0 ? ", or an object that names a function"
                                                           : "");
}

/* {"type":"allowed_tools","allowed_tools":{"mode":...,"tools":[...]}} */
static bool take_allowed(const json_t *choice, json_t *allowed, struct bt_front_tools *t,
                         struct bt_front_error *e)
{
    const json_t *v = json_object_get(choice, "allowed_tools");
    const json_t *list = json_object_get(v, "tools");
    const char *mode = json_string_value(json_object_get(v, "mode"));
    char where[64];
    if (mode == NULL || !json_is_array(list) || json_array_size(list) == 0 ||
        json_array_size(list) > TOOLS_MAX) {
        return bt_front_fail(e, 400, "tool_choice", "invalid_type",
                             "'tool_choice.allowed_tools' must have a 'mode' and an array 'tools'");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        snprintf(where, sizeof(where), "tool_choice.allowed_tools.tools[%zu]", i);
        if (!allow(t, json_array_get(list, i), where, allowed, e)) {
            return false;
        }
    }
    return take_word(mode, "tool_choice.allowed_tools.mode", t, e);
}

static bool take_choice(const json_t *root, struct bt_front_tools *t, struct bt_front_error *e)
{
    const json_t *choice = json_object_get(root, "tool_choice");
    t->choose = t->list != NULL ? FRONT_TOOLS_AUTO : FRONT_TOOLS_NONE;
    if (!bt_front_has(root, "tool_choice")) {
        return true;
    }
    if (json_is_string(choice)) {
        return take_word(json_string_value(choice), "tool_choice", t, e);
    }
    const char *type = json_string_value(json_object_get(choice, "type"));
    json_t *allowed = json_array();
    bool ok;
    if (type != NULL && strcmp(type, "allowed_tools") == 0) {
        ok = take_allowed(choice, allowed, t, e);
    } else {
        ok = allow(t, choice, "tool_choice", allowed, e);
        t->choose = FRONT_TOOLS_REQUIRED;
        t->one = true;
    }
    json_decref(t->list);
    t->list = allowed;
    return ok;
}

/* Can the model do what was chosen? */
static bool check_choice(const struct bt_front_style *style, struct bt_front_tools *t,
                         struct bt_front_error *e)
{
    if (t->list == NULL && t->choose == FRONT_TOOLS_REQUIRED) {
        return bt_front_fail(e, 400, "tool_choice", "invalid_value",
                             "'tool_choice' asks for a call, but 'tools' is empty; send the tools");
    }
    if (t->choose == FRONT_TOOLS_NONE) {
        json_decref(t->list);
        t->list = NULL;
    }
    if (t->list == NULL) {
        t->choose = FRONT_TOOLS_NONE;
        return true;
    }
    if (!style->takes_tools) {
        return bt_front_fail(e, 400, "tools", "unsupported_parameter",
                             "this model's chat template does not know tools; leave 'tools' out, "
                             "or set 'tool_choice' to \"none\"");
    }
    if (style->reply.tools == BT_TOOLS_NONE) {
        return bt_front_fail(e, 400, "tools", "unsupported_parameter",
                             "this server does not know how the model writes tool calls "
                             "(conductor.answer_form); leave 'tools' out, or set 'tool_choice' to "
                             "\"none\"");
    }
    return true;
}

bool bt_front_take_tools(const struct bt_front_style *style, const json_t *root,
                         struct bt_front_tools *t, struct bt_front_error *e)
{
    bool parallel = true;
    *t = (struct bt_front_tools){0};
    if (take_list(root, t, e) && take_choice(root, t, e) && check_choice(style, t, e) &&
        bt_front_get_bool(root, "parallel_tool_calls", &parallel, e)) {
        t->one |= !parallel;
        return true;
    }
    bt_front_tools_cleanup(t);
    return false;
}

void bt_front_tools_cleanup(struct bt_front_tools *t)
{
    json_decref(t->list);
    json_decref(t->strict);
    *t = (struct bt_front_tools){0};
}

/* ---- earlier calls ---- */

json_t *bt_front_probe(bool text)
{
    json_t *arguments = json_pack("{s:i}", "probe", 1);
    if (text) {
        json_decref(arguments);
        arguments = json_string("{" FRONT_PROBE_TEXT "}");
    }
    json_t *called = json_pack("{s:s, s:o}", "name", "f", "arguments", arguments);
    json_t *call =
        json_pack("{s:s, s:s, s:o}", "id", "123456789", "type", "function", "function", called);
    json_t *asked = json_pack("{s:s, s:s}", "role", "user", "content", "a");
    json_t *calls =
        json_pack("{s:s, s:n, s:[o]}", "role", "assistant", "content", "tool_calls", call);
    json_t *result = json_pack("{s:s, s:s, s:s, s:s}", "role", "tool", "tool_call_id", "123456789",
                               "name", "f", "content", "b");
    json_t *tool =
        json_pack("{s:s, s:{s:s, s:s, s:{s:s, s:{}}}}", "type", "function", "function", "name", "f",
                  "description", "d", "parameters", "type", "object", "properties");
    return json_pack("{s:[o, o, o], s:[o], s:b}", "messages", asked, calls, result, "tools", tool,
                     "add_generation_prompt", 1);
}

void bt_front_calls_init(struct bt_front_calls *c, const struct bt_front_style *style)
{
    *c = (struct bt_front_calls){.style = style, .by_id = json_object()};
}

void bt_front_calls_cleanup(struct bt_front_calls *c)
{
    json_decref(c->by_id);
    *c = (struct bt_front_calls){0};
}

static bool is_mistral(enum bt_reply_tools style)
{
    return style == BT_TOOLS_MISTRAL || style == BT_TOOLS_MISTRAL_LIST;
}

/* An id in the form that the model's template takes. Clients send ids of this server or of another
 * one. */
static json_t *models_id(const struct bt_front_calls *c, const char *id, const char *name)
{
    if (c->style->reply.tools == BT_TOOLS_KIMI && name != NULL) {
        return json_sprintf("functions.%s:%u", name, c->n);
    }
    size_t len = strlen(id);
    if (!is_mistral(c->style->reply.tools) || (len == MISTRAL_ID && strspn(id, LETTERS) == len)) {
        return json_string(id);
    }
    uint8_t digest[BT_SHA256_LEN];
    char letters[MISTRAL_ID + 1];
    bt_sha256(id, len, digest);
    for (int i = 0; i < MISTRAL_ID; i++) {
        letters[i] = LETTERS[digest[i] % (sizeof(LETTERS) - 1)];
    }
    letters[MISTRAL_ID] = '\0';
    return json_string(letters);
}

/* The arguments as the template wants them, mostly as an object. A text that is no object stays a
 * text. */
static json_t *arguments_of(struct bt_front_calls *c, const json_t *v)
{
    if (c->style->text_arguments && json_is_object(v)) {
        char *text = json_dumps(v, 0);
        json_t *s = json_string(text);
        free(text);
        return s;
    }
    if (c->style->text_arguments || json_is_object(v)) {
        return json_string_length(v) > 0 || json_is_object(v) ? json_incref((json_t *)v)
                                                              : json_string("{}");
    }
    const char *text = json_string_value(v);
    size_t len = json_string_length(v);
    for (size_t i = 0; i < len; i++) {
        c->nested += text[i] == '{' || text[i] == '[';
    }
    json_t *object =
        c->nested <= NESTED_MAX ? json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (len == 0) {
        object = json_object();
    }
    if (!json_is_object(object)) {
        json_decref(object);
        object = json_incref((json_t *)v);
    }
    return object;
}

static bool take_call(struct bt_front_calls *c, const json_t *call, const char *where, json_t *out,
                      struct bt_front_error *e)
{
    char prefix[160];
    const json_t *function = function_of(call, "messages", where, e);
    const char *name = function != NULL ? name_of(function, "messages", where, e) : NULL;
    const char *id = json_string_value(json_object_get(call, "id"));
    if (name == NULL) {
        return false;
    }
    snprintf(prefix, sizeof(prefix), "%s.", where);
    if (id == NULL || id[0] == '\0') {
        return bt_front_fail(e, 400, "messages", "invalid_type", "'%sid' must be a string", prefix);
    }
    if (!bt_front_fields_check(call, FRONT_TOOL_CALL, prefix, e)) {
        return false;
    }
    snprintf(prefix, sizeof(prefix), "%s.function.", where);
    const json_t *arguments = json_object_get(function, "arguments");
    if (!json_is_string(arguments) && !json_is_object(arguments)) {
        return bt_front_fail(e, 400, "messages", "invalid_type",
                             "'%sarguments' must be a string with a JSON object", prefix);
    }
    if (!bt_front_fields_check(function, FRONT_CALLED, prefix, e)) {
        return false;
    }
    json_t *its = models_id(c, id, name), *known = json_object(), *clean = json_object();
    json_object_set(known, "id", its);
    json_object_set_new(known, "name", json_string(name));
    json_object_set_new(c->by_id, id, known);
    c->n++;
    json_object_set_new(clean, "id", its);
    json_object_set_new(clean, "type", json_string("function"));
    json_t *called = json_object();
    json_object_set_new(called, "name", json_string(name));
    json_object_set_new(called, "arguments", arguments_of(c, arguments));
    json_object_set_new(clean, "function", called);
    json_array_append_new(out, clean);
    return true;
}

bool bt_front_take_calls(struct bt_front_calls *c, const json_t *msg, const char *prefix,
                         json_t *out, struct bt_front_error *e)
{
    const json_t *list = json_object_get(msg, "tool_calls");
    if (!bt_front_asked_for(list)) {
        return true;
    }
    if (!json_is_array(list) || json_array_size(list) > CALLS_MAX) {
        return bt_front_fail(e, 400, "messages", "invalid_type",
                             "'%stool_calls' must be an array of at most %d calls", prefix,
                             CALLS_MAX);
    }
    json_t *calls = json_array();
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        char where[96];
        snprintf(where, sizeof(where), "%stool_calls[%zu]", prefix, i);
        ok = take_call(c, json_array_get(list, i), where, calls, e);
    }
    json_object_set_new(out, "tool_calls", calls);
    const json_t *content = json_object_get(out, "content");
    if (json_is_string(content) && json_string_length(content) == 0) {
        json_object_set_new(out, "content", json_null()); /* some templates look for it */
    }
    return ok;
}

bool bt_front_take_result(struct bt_front_calls *c, const json_t *msg, const char *prefix,
                          json_t *out, struct bt_front_error *e)
{
    const char *id = json_string_value(json_object_get(msg, "tool_call_id"));
    if (id == NULL || id[0] == '\0') {
        return bt_front_fail(e, 400, "messages", "missing_required_parameter",
                             "'%stool_call_id' must be the id of the call that this message "
                             "answers",
                             prefix);
    }
    json_t *known = json_object_get(c->by_id, id);
    if (known != NULL) {
        json_object_set(out, "tool_call_id", json_object_get(known, "id"));
        if (!bt_front_has(out, "name")) {
            json_object_set(out, "name", json_object_get(known, "name"));
        }
    } else {
        json_object_set_new(out, "tool_call_id", models_id(c, id, NULL));
    }
    return true;
}
