/* The fields that constrain an answer: OpenAI's response_format, vLLM's structured_outputs and
 * guided_*, llama-server's grammar and json_schema, sglang's regex and ebnf. All become one text
 * for common/grammar. The text is compiled here, so that the client learns of mistakes at once. The
 * workers compile it again. */
#include "conductor/front/front_grammar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/grammar/grammar.h"
#include "conductor/front/front_fields.h"

/* The field that constrains the answer. */
struct found {
    uint32_t kind; /* BT_GRAMMAR_ANY: none */
    char param[64];
    struct bt_buf text;
};

static const struct named { /* a field and the kind of its text */
    const char *name;
    enum bt_grammar_kind kind;
} fields[] =
    {
        {"guided_json", BT_GRAMMAR_JSON_SCHEMA},
        {"guided_regex", BT_GRAMMAR_REGEX},
        {"guided_choice", BT_GRAMMAR_CHOICE},
        {"guided_grammar", BT_GRAMMAR_GBNF},
        {"json_schema", BT_GRAMMAR_JSON_SCHEMA},
        {"grammar", BT_GRAMMAR_GBNF},
        {"regex", BT_GRAMMAR_REGEX},
        {"ebnf", BT_GRAMMAR_GBNF},
},
  members[] = {
      {"json", BT_GRAMMAR_JSON_SCHEMA},        {"regex", BT_GRAMMAR_REGEX},
      {"choice", BT_GRAMMAR_CHOICE},           {"grammar", BT_GRAMMAR_GBNF},
      {"json_object", BT_GRAMMAR_JSON_OBJECT},
};

const char *bt_front_grammar_name(uint32_t kind)
{
    static const char *const names[] = {[BT_GRAMMAR_ANY] = "any",
                                        [BT_GRAMMAR_JSON_SCHEMA] = "json_schema",
                                        [BT_GRAMMAR_JSON_OBJECT] = "json_object",
                                        [BT_GRAMMAR_REGEX] = "regex",
                                        [BT_GRAMMAR_CHOICE] = "choice",
                                        [BT_GRAMMAR_GBNF] = "grammar",
                                        [BT_GRAMMAR_TAGS] = "tags"};
    return kind < BT_ARRAY_LEN(names) ? names[kind] : "";
}

/* ---- JSON values back into text ---- */

/* Writes the shortest spelling that gives the same double. So 0.1 stays 0.1, which multipleOf and
 * bounds need. */
static void put_real(struct bt_buf *out, double v)
{
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, v);
        if (strtod(text, NULL) == v) {
            break;
        }
    }
    bt_buf_puts(out, text);
}

bool bt_front_put_json(struct bt_buf *out, const json_t *v)
{
    const char *key, *before = "";
    json_t *item;
    size_t i;
    bool ok = !bt_front_is_huge(v);
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        bt_buf_puts(out, "{");
        json_object_foreach((json_t *)v, key, item)
        {
            bt_buf_puts(out, before);
            bt_front_put_cstr(out, key);
            bt_buf_puts(out, ":");
            ok = bt_front_put_json(out, item) && ok;
            before = ",";
        }
        bt_buf_puts(out, "}");
        break;
    case JSON_ARRAY:
        bt_buf_puts(out, "[");
        json_array_foreach(v, i, item)
        {
            bt_buf_puts(out, i > 0 ? "," : "");
            ok = bt_front_put_json(out, item) && ok;
        }
        bt_buf_puts(out, "]");
        break;
    case JSON_STRING: bt_front_put_str(out, json_string_value(v), json_string_length(v)); break;
    case JSON_INTEGER: bt_buf_printf(out, "%lld", (long long)json_integer_value(v)); break;
    case JSON_REAL: put_real(out, json_real_value(v)); break;
    case JSON_TRUE: bt_buf_puts(out, "true"); break;
    case JSON_FALSE: bt_buf_puts(out, "false"); break;
    case JSON_NULL: bt_buf_puts(out, "null"); break;
    }
    return ok;
}

/* ---- one field ---- */

static bool take_text(struct found *f, const json_t *v, struct bt_front_error *e)
{
    if (!json_is_string(v)) {
        return bt_front_fail(e, 400, f->param, "invalid_type", "'%s' must be a string", f->param);
    }
    bt_buf_append(&f->text, json_string_value(v), json_string_length(v));
    return true;
}

/* Reads a schema: an object, or its JSON text. */
static bool take_schema(struct found *f, const json_t *v, struct bt_front_error *e)
{
    if (json_is_string(v)) {
        return take_text(f, v, e);
    }
    if (!json_is_object(v) && !json_is_boolean(v)) {
        return bt_front_fail(e, 400, f->param, "invalid_type",
                             "'%s' must be a JSON schema: an object, or a string with its text",
                             f->param);
    }
    return bt_front_put_json(&f->text, v) ||
           bt_front_fail(
               e, 400, f->param, "invalid_value",
               "'%s' has a number that does not fit into 64 bits; send the schema as a string",
               f->param);
}

static bool take_choices(struct found *f, const json_t *v, struct bt_front_error *e)
{
    bool ok = json_array_size(v) > 0; /* 0 if it is not an array */
    for (size_t i = 0; i < json_array_size(v); i++) {
        ok = ok && json_is_string(json_array_get(v, i));
    }
    if (!ok) {
        return bt_front_fail(e, 400, f->param, "invalid_type",
                             "'%s' must be an array of one or more strings", f->param);
    }
    return bt_front_put_json(&f->text, v);
}

/* Clients send null or "" if they want no grammar. */
static bool is_set(const json_t *v, enum bt_grammar_kind kind)
{
    if (v == NULL || json_is_null(v) || (json_is_string(v) && json_string_length(v) == 0)) {
        return false;
    }
    return kind != BT_GRAMMAR_JSON_OBJECT || !json_is_false(v);
}

/* prefix: precedes the field's name in errors. */
static bool take(struct found *f, enum bt_grammar_kind kind, const char *prefix, const char *name,
                 const json_t *v, struct bt_front_error *e)
{
    char param[sizeof(f->param)];
    snprintf(param, sizeof(param), "%.32s%.30s", prefix, name);
    if (!is_set(v, kind)) {
        return true;
    }
    if (f->kind != BT_GRAMMAR_ANY) {
        return bt_front_fail(e, 400, param, "invalid_value",
                             "'%s' and '%s' both constrain the answer; leave one of them out",
                             f->param, param);
    }
    f->kind = kind;
    memcpy(f->param, param, sizeof(param));
    switch (kind) {
    case BT_GRAMMAR_JSON_SCHEMA: return take_schema(f, v, e);
    case BT_GRAMMAR_CHOICE: return take_choices(f, v, e);
    case BT_GRAMMAR_REGEX:
    case BT_GRAMMAR_GBNF: return take_text(f, v, e);
    case BT_GRAMMAR_JSON_OBJECT:
        return json_is_boolean(v) || json_is_object(v) ||
               bt_front_fail(e, 400, param, "invalid_type", "'%s' must be true or false", param);
    case BT_GRAMMAR_ANY:
    case BT_GRAMMAR_TAGS: break;
    }
    return false;
}

/* ---- response_format ---- */

/* Reads {"type": "json_schema", "json_schema": {"name", "strict", "schema"}}. llama-server and the
 * Responses API have these fields beside the type. The schema is enforced with and without
 * `strict`. */
static bool take_format_schema(struct found *f, const json_t *format, struct bt_front_error *e)
{
    const json_t *js = json_object_get(format, "json_schema");
    const char *prefix = "response_format.";
    bool strict;
    if (js != NULL && !json_is_null(js)) {
        if (!json_is_object(js)) {
            return bt_front_fail(e, 400, "response_format.json_schema", "invalid_type",
                                 "'response_format.json_schema' must be an object");
        }
        prefix = "response_format.json_schema.";
        format = js;
        if (!bt_front_fields_check(js, FRONT_JSON_SCHEMA, prefix, e)) {
            return false;
        }
    }
    if (!bt_front_get_bool(format, "strict", &strict, e)) {
        return false;
    }
    const json_t *schema = json_object_get(format, "schema");
    if (!is_set(schema, BT_GRAMMAR_JSON_SCHEMA)) {
        return bt_front_fail(e, 400, "response_format", "invalid_value",
                             "'%sschema' is missing: type 'json_schema' needs it", prefix);
    }
    return take(f, BT_GRAMMAR_JSON_SCHEMA, prefix, "schema", schema, e);
}

static bool take_format(struct found *f, const json_t *root, struct bt_front_error *e)
{
    const json_t *format = json_object_get(root, "response_format");
    if (!bt_front_has(root, "response_format")) {
        return true;
    }
    const char *type = json_string_value(json_object_get(format, "type"));
    if (type == NULL) {
        return bt_front_fail(e, 400, "response_format", "invalid_value",
                             "'response_format' must be an object with a 'type'");
    }
    if (!bt_front_fields_check(format, FRONT_RESPONSE_FORMAT, "response_format.", e)) {
        return false;
    }
    const json_t *schema = json_object_get(format, "schema");
    if (strcmp(type, "json_schema") == 0) {
        return take_format_schema(f, format, e);
    }
    const char *other = bt_front_asked_for(json_object_get(format, "json_schema")) ? "json_schema"
                        : strcmp(type, "text") == 0 && bt_front_asked_for(schema)  ? "schema"
                                                                                   : NULL;
    if (other != NULL) {
        char param[64];
        snprintf(param, sizeof(param), "response_format.%s", other);
        return bt_front_fail(e, 400, param, "invalid_value",
                             "'%s' does nothing for type '%.32s'; set the type to 'json_schema'",
                             param, type);
    }
    if (strcmp(type, "json_object") == 0) {
        return is_set(schema, BT_GRAMMAR_JSON_SCHEMA)
                   ? take(f, BT_GRAMMAR_JSON_SCHEMA, "response_format.", "schema", schema, e)
                   : take(f, BT_GRAMMAR_JSON_OBJECT, "", "response_format", format, e);
    }
    return strcmp(type, "text") == 0 ||
           bt_front_fail(e, 400, "response_format", "unsupported_parameter",
                         "'response_format' of type '%.32s' is not supported; supported are "
                         "'text', 'json_object' and 'json_schema'",
                         type);
}

static bool take_structured(struct found *f, const json_t *root, struct bt_front_error *e)
{
    const json_t *so = json_object_get(root, "structured_outputs");
    if (!bt_front_has(root, "structured_outputs")) {
        return true;
    }
    if (!json_is_object(so)) {
        return bt_front_fail(e, 400, "structured_outputs", "invalid_type",
                             "'structured_outputs' must be an object");
    }
    bool ok = bt_front_fields_check(so, FRONT_STRUCTURED, "structured_outputs.", e);
    for (size_t i = 0; ok && i < BT_ARRAY_LEN(members); i++) {
        ok = take(f, members[i].kind, "structured_outputs.", members[i].name,
                  json_object_get(so, members[i].name), e);
    }
    return ok;
}

/* ---- white space ---- */

/* Writes what the request says about white space before the schema's members (schema.c,
 * "x-guidance"). */
static void put_guidance(struct found *f, const char *member, const char *pattern, size_t len)
{
    const char *text = f->text.data != NULL ? (const char *)f->text.data : "";
    size_t n = f->text.len, at = 0;
    struct bt_buf out;
    bt_buf_init(&out);
    bt_buf_printf(&out, "{\"x-guidance\":{\"%s\":", member);
    if (pattern != NULL) {
        bt_front_put_str(&out, pattern, len);
    } else {
        bt_buf_puts(&out, "false");
    }
    bt_buf_puts(&out, "}");
    while (at < n && strchr(" \t\r\n", text[at]) != NULL && text[at] != '\0') {
        at++;
    }
    if (f->kind == BT_GRAMMAR_JSON_OBJECT) {
        bt_buf_puts(&out, ",\"type\":\"object\"}");
        f->kind = BT_GRAMMAR_JSON_SCHEMA;
    } else if (at < n && text[at] == '{') {
        size_t next = at + 1;
        while (next < n && strchr(" \t\r\n", text[next]) != NULL && text[next] != '\0') {
            next++;
        }
        bt_buf_puts(&out, next < n && text[next] == '}' ? "" : ",");
        bt_buf_append(&out, text + at + 1, n - at - 1);
    } else if (n - at >= 4 && memcmp(text + at, "true", 4) == 0) {
        bt_buf_puts(&out, "}");
    } else { /* it is not a schema; the compiler reports that */
        bt_buf_cleanup(&out);
        return;
    }
    bt_buf_cleanup(&f->text);
    f->text = out;
}

/* whitespace_pattern, disable_any_whitespace, guided_whitespace_pattern. */
static bool take_white_space(struct found *f, const json_t *root, struct bt_front_error *e)
{
    const json_t *so = json_object_get(root, "structured_outputs");
    const json_t *guided = json_object_get(root, "guided_whitespace_pattern");
    const json_t *pattern = json_object_get(so, "whitespace_pattern");
    bool tight = false, old = guided != NULL && !json_is_null(guided);
    const char *param = old ? "guided_whitespace_pattern" : "structured_outputs.whitespace_pattern";
    if (so != NULL && !bt_front_get_bool(so, "disable_any_whitespace", &tight, e)) {
        return false;
    }
    pattern = old ? guided : pattern;
    if (pattern == NULL || json_is_null(pattern)) {
        pattern = NULL;
        param = "structured_outputs.disable_any_whitespace";
    } else if (!json_is_string(pattern) || tight) {
        return bt_front_fail(
            e, 400, param, tight ? "invalid_value" : "invalid_type",
            tight ? "'%s' cannot be combined with 'disable_any_whitespace'; leave one of them out"
                  : "'%s' must be a string",
            param);
    }
    if (pattern == NULL && !tight) {
        return true;
    }
    if (f->kind != BT_GRAMMAR_JSON_SCHEMA && f->kind != BT_GRAMMAR_JSON_OBJECT) {
        return bt_front_fail(e, 400, param, "invalid_value",
                             "'%s' needs an answer in JSON: add a JSON schema or leave it out",
                             param);
    }
    put_guidance(f, pattern != NULL ? "whitespace_pattern" : "whitespace_flexible",
                 json_string_value(pattern), json_string_length(pattern));
    return true;
}

/* ---- compiling ---- */

/* The reason may be long. What does not fit into the message is cut. */
static bool compiles(const struct bt_front_model *m, const struct bt_grammar_spec *spec,
                     const char *param, struct bt_front_error *e)
{
    char why[360] = "";
    struct bt_grammar *g = NULL;
    bt_status_t st = m->grammars != NULL
                         ? bt_grammar_cache_get(m->grammars, spec, &g, why, sizeof(why))
                         : bt_grammar_compile(spec, &g, why, sizeof(why));
    if (st != BT_OK) {
        return bt_front_fail(e, 400, param,
                             st == BT_ERR_UNSUPPORTED ? "unsupported_parameter" : "invalid_value",
                             "'%s': %s", param, why[0] != '\0' ? why : bt_status_text(st));
    }
    bt_grammar_unref(g);
    return true;
}

bool bt_front_set_grammar(const struct bt_front_model *m, uint32_t kind, const char *text,
                          size_t len, const char *param, struct bt_gen_spec *spec,
                          struct bt_front_error *e)
{
    const struct bt_grammar_spec what = {
        .kind = (enum bt_grammar_kind)kind, .text = text, .len = len};
    if (spec->grammar != NULL) {
        return bt_front_fail(e, 400, param, "invalid_value",
                             "'%s' and another field (%s) both constrain the answer; leave one of "
                             "them out",
                             param, bt_front_grammar_name(spec->grammar->kind));
    }
    if (m->config->n_eos == 0) {
        return bt_front_fail(e, 400, param, "unsupported_parameter",
                             "'%s': this model has no end-of-text token (eos_token_id), so a "
                             "constrained answer could not end",
                             param);
    }
    if (len > BT_GRAMMAR_TEXT_MAX) {
        return bt_front_fail(e, 400, param, "invalid_value",
                             "'%s' has %zu bytes; at most %d are allowed", param, len,
                             BT_GRAMMAR_TEXT_MAX);
    }
    if (m->on_loop) { /* even a short text may take 100 ms */
        e->beyond = true;
        return false;
    }
    if (!compiles(m, &what, param, e)) {
        return false;
    }
    spec->grammar = bt_gen_grammar_create(kind, text, len);
    return true;
}

bool bt_front_take_grammar(const struct bt_front_model *m, const json_t *root,
                           struct bt_gen_spec *spec, struct bt_front_error *e)
{
    struct found f = {.kind = BT_GRAMMAR_ANY};
    bt_buf_init(&f.text);
    bool ok = take_format(&f, root, e) && take_structured(&f, root, e);
    for (size_t i = 0; ok && i < BT_ARRAY_LEN(fields); i++) {
        ok = take(&f, fields[i].kind, "", fields[i].name, json_object_get(root, fields[i].name), e);
    }
    ok = ok && take_white_space(&f, root, e);
    if (ok && f.kind != BT_GRAMMAR_ANY && json_is_true(json_object_get(root, "ignore_eos"))) {
        ok = bt_front_fail(e, 400, "ignore_eos", "invalid_value",
                           "'ignore_eos' cannot be combined with '%s': a constrained answer ends "
                           "where its grammar ends",
                           f.param);
    }
    ok = ok && (f.kind == BT_GRAMMAR_ANY ||
                bt_front_set_grammar(m, f.kind, f.text.data != NULL ? (char *)f.text.data : "",
                                     f.text.len, f.param, spec, e));
    bt_buf_cleanup(&f.text);
    return ok;
}
