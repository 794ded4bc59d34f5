/* Arguments of calls that models write as elements; see front_elements.h. */
#include "conductor/front/front_elements.h"

#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_grammar.h"

#define LOOKS     64  /* schemas to look at for the kinds of one argument; beyond it: any kind */
#define DEPTH_MAX 16  /* depth of nested schemas */
#define REF_BYTES 512 /* bytes of a $ref */

/* ---- kinds ---- */

static unsigned kind_of_type(const json_t *type)
{
    static const struct {
        const char *name;
        unsigned kind;
    } types[] = {{"string", BT_REPLY_IS_STRING},  {"number", BT_REPLY_IS_NUMBER},
                 {"integer", BT_REPLY_IS_NUMBER}, {"boolean", BT_REPLY_IS_BOOLEAN},
                 {"null", BT_REPLY_IS_NULL},      {"object", BT_REPLY_IS_OBJECT},
                 {"array", BT_REPLY_IS_ARRAY}};
    const char *name = json_string_value(type);
    unsigned kinds = 0;
    for (size_t i = 0; i < json_array_size(type); i++) {
        const json_t *one = json_array_get(type, i);
        kinds |= json_is_string(one) ? kind_of_type(one) : 0;
    }
    for (size_t i = 0; name != NULL && i < BT_ARRAY_LEN(types); i++) {
        kinds |= strcmp(name, types[i].name) == 0 ? types[i].kind : 0;
    }
    return kinds;
}

static unsigned kind_of_value(const json_t *v)
{
    return json_is_string(v)    ? BT_REPLY_IS_STRING
           : json_is_number(v)  ? BT_REPLY_IS_NUMBER
           : json_is_boolean(v) ? BT_REPLY_IS_BOOLEAN
           : json_is_null(v)    ? BT_REPLY_IS_NULL
           : json_is_object(v)  ? BT_REPLY_IS_OBJECT
                                : BT_REPLY_IS_ARRAY;
}

/* The schema that "#/$defs/x" names within root. NULL: there is none. */
static const json_t *resolve(const json_t *root, const char *ref)
{
    char path[REF_BYTES], *at = path;
    if (ref == NULL || ref[0] != '#' || strlen(ref) >= sizeof(path)) {
        return NULL;
    }
    strcpy(path, ref + 1);
    while (root != NULL && at[0] == '/') {
        char *end = strchr(at + 1, '/');
        if (end != NULL) {
            *end = '\0';
        }
        root = json_object_get(root, at + 1);
        if (end == NULL) {
            return root;
        }
        *end = '/';
        at = end;
    }
    return at[0] == '\0' ? root : NULL;
}

struct look {
    const json_t *root;
    int left;
};

static unsigned kinds_in(const json_t *schema, struct look *l, int depth);

/* The kinds of a list of schemas: all together (anyOf, oneOf) or those in common (allOf). */
static unsigned kinds_of_list(const json_t *list, struct look *l, bool all, int depth)
{
    unsigned kinds = all ? BT_REPLY_IS_ANY : 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        unsigned k = kinds_in(json_array_get(list, i), l, depth);
        kinds = all ? kinds & k : kinds | k;
    }
    return kinds;
}

static unsigned kinds_in(const json_t *schema, struct look *l, int depth)
{
    unsigned kinds = BT_REPLY_IS_ANY, listed = 0;
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    const json_t *values = json_object_get(schema, "enum"), *v = json_object_get(schema, "const");
    if (depth == DEPTH_MAX || l->left-- <= 0) {
        return kinds;
    }
    if (ref != NULL) {
        const json_t *to = resolve(l->root, ref);
        kinds &= to != NULL ? kinds_in(to, l, depth + 1) : BT_REPLY_IS_ANY;
    }
    if (json_object_get(schema, "type") != NULL) {
        kinds &= kind_of_type(json_object_get(schema, "type"));
    }
    for (size_t i = 0; i < json_array_size(values); i++) {
        listed |= kind_of_value(json_array_get(values, i));
    }
    kinds &= json_array_size(values) > 0 ? listed : BT_REPLY_IS_ANY;
    kinds &= v != NULL ? kind_of_value(v) : BT_REPLY_IS_ANY;
    static const char *const either[] = {"anyOf", "oneOf"};
    for (size_t i = 0; i < BT_ARRAY_LEN(either); i++) {
        const json_t *list = json_object_get(schema, either[i]);
        kinds &=
            json_array_size(list) > 0 ? kinds_of_list(list, l, false, depth + 1) : BT_REPLY_IS_ANY;
    }
    return kinds & kinds_of_list(json_object_get(schema, "allOf"), l, true, depth + 1);
}

/* No kind at all would mean that no value is possible. Then any kind is allowed. */
static unsigned kinds_of(const json_t *schema, const json_t *root)
{
    struct look l = {.root = root, .left = LOOKS};
    unsigned kinds = kinds_in(schema, &l, 0);
    return kinds != 0 ? kinds : BT_REPLY_IS_ANY;
}

json_t *bt_front_kinds_of(const json_t *tools)
{
    json_t *all = json_object();
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *f = json_object_get(json_array_get(tools, i), "function");
        const json_t *parameters = json_object_get(f, "parameters");
        json_t *properties = json_object_get(parameters, "properties"), *schema;
        json_t *kinds = json_object();
        const char *key;
        json_object_foreach(properties, key, schema)
        {
            json_object_set_new(kinds, key, json_integer(kinds_of(schema, parameters)));
        }
        json_object_set_new(all, json_string_value(json_object_get(f, "name")), kinds);
    }
    return all;
}

#define ENTRY_BYTES 128 /* memory of one member of an object */

size_t bt_front_kinds_bytes(const json_t *kinds)
{
    size_t bytes = 0;
    const char *key;
    json_t *of;
    json_object_foreach((json_t *)kinds, key, of)
    {
        bytes += ENTRY_BYTES + strlen(key);
        const char *name;
        json_t *value;
        json_object_foreach(of, name, value)
        {
            bytes += ENTRY_BYTES + strlen(name);
        }
    }
    return bytes;
}

unsigned bt_front_kinds(const void *arg, const char *function, size_t function_len, const char *key,
                        size_t key_len)
{
    const json_t *of = json_object_getn(arg, function, function_len);
    const json_t *kinds = json_object_getn(of, key, key_len);
    return kinds != NULL ? (unsigned)json_integer_value(kinds) : BT_REPLY_IS_ANY;
}

/* ---- grammars ---- */

/* Writes a marker in both spellings, because it may be a special token. */
static void put_marker(const char *marker, const char *before, struct bt_buf *out)
{
    bt_buf_puts(out, before);
    bt_buf_puts(out, "{\"special\":");
    bt_front_put_cstr(out, marker);
    bt_buf_puts(out, "}");
}

static void put_begin(const struct bt_reply_xml_form *f, const char *key, struct bt_buf *out)
{
    bt_buf_puts(out, "{\"begin\":[");
    put_marker(f->key_open, "", out);
    bt_buf_puts(out, ",");
    bt_front_put_cstr(out, key);
    put_marker(f->key_close, ",", out);
    bt_buf_puts(out, ",\"\\n\"");
    if (f->value_open != NULL) {
        put_marker(f->value_open, ",", out);
    }
    bt_buf_puts(out, "],");
}

/* line: the value ends with a line break, which is not part of a text that the grammar leaves
 * free. */
static void put_end(const struct bt_reply_xml_form *f, bool line, struct bt_buf *out)
{
    bt_buf_puts(out, line && f->lines ? ",\"end\":[\"\\n\"," : ",\"end\":[");
    put_marker(f->value_close, "", out);
    bt_buf_puts(out, ",\"\\n\"]");
}

/* Writes the strings of enum or const as a pattern. */
static void put_strings(const json_t *schema, struct bt_buf *out)
{
    const json_t *list = json_object_get(schema, "enum"), *only = json_object_get(schema, "const");
    size_t n = only != NULL ? 1 : json_array_size(list);
    struct bt_buf text;
    bt_buf_init(&text);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = only != NULL ? only : json_array_get(list, i);
        const char *s = json_string_value(v);
        bt_buf_puts(&text, i > 0 ? "|" : "");
        for (size_t k = 0; k < json_string_length(v); k++) {
            bt_buf_puts(&text,
                        s[k] != '\0' && strchr("^$\\.*+?()[]{}|/", s[k]) != NULL ? "\\" : "");
            bt_buf_append(&text, &s[k], 1);
        }
    }
    bt_buf_puts(out, "\"regex\":");
    bt_front_put_str(out, text.data != NULL ? text.data : "", text.len);
    bt_buf_cleanup(&text);
}

/* Writes the schema of an argument, with the definitions that it may refer to. */
static bool put_schema(const json_t *schema, const json_t *root, struct bt_buf *out)
{
    static const char *const names[] = {"$defs", "definitions"};
    json_t *own =
        json_is_object(schema) ? json_copy((json_t *)schema) : json_incref((json_t *)schema);
    for (size_t i = 0; json_is_object(own) && i < BT_ARRAY_LEN(names); i++) {
        json_t *defs = json_object_get(root, names[i]);
        if (defs != NULL && json_object_get(own, names[i]) == NULL) {
            json_object_set(own, names[i], defs);
        }
    }
    bt_buf_puts(out, "\"schema\":");
    bool ok = bt_front_put_json(out, own);
    json_decref(own);
    return ok;
}

/* The name of a keyword that constrains a string, other than type, enum and const. */
static const char *constraint(const json_t *schema)
{
    static const char *const words[] = {"pattern", "format", "minLength", "maxLength",
                                        "not",     "if",     "allOf"};
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (json_object_get(schema, words[i]) != NULL) {
            return words[i];
        }
    }
    return NULL;
}

/* Returns NULL if every text is a valid value. Otherwise returns the keyword that a grammar of text
 * without quotes cannot enforce. Where the schema allows null or booleans, a text that looks like
 * one counts as one. */
static const char *beyond(const json_t *schema, struct look *l, int depth)
{
    static const char *const either[] = {"anyOf", "oneOf"};
    const char *ref = json_string_value(json_object_get(schema, "$ref")), *word = NULL;
    if (depth == DEPTH_MAX || l->left-- <= 0) {
        return "$ref";
    }
    word = constraint(schema);
    if (word != NULL) {
        return word;
    }
    if (json_object_get(schema, "enum") != NULL || json_object_get(schema, "const") != NULL) {
        return "enum";
    }
    if (ref != NULL) {
        const json_t *to = resolve(l->root, ref);
        return to != NULL ? beyond(to, l, depth + 1) : "$ref";
    }
    for (size_t i = 0; word == NULL && i < BT_ARRAY_LEN(either); i++) {
        const json_t *list = json_object_get(schema, either[i]);
        for (size_t k = 0; word == NULL && k < json_array_size(list); k++) {
            const json_t *one = json_array_get(list, k);
            unsigned kinds = kinds_in(one, l, depth + 1);
            bool word_only = (kinds & ~(unsigned)(BT_REPLY_IS_NULL | BT_REPLY_IS_BOOLEAN)) == 0;
            word = (kinds & BT_REPLY_IS_STRING) != 0 ? beyond(one, l, depth + 1)
                   : word_only                       ? NULL
                                                     : either[i];
        }
    }
    return word;
}

static bool put_member(const struct bt_reply_xml_form *f, const char *key, const json_t *schema,
                       const json_t *root, bool strict, struct bt_buf *out,
                       struct bt_front_error *e)
{
    unsigned kinds = kinds_of(schema, root);
    bool text = (kinds & BT_REPLY_IS_STRING) != 0;
    bool listed =
        json_object_get(schema, "enum") != NULL || json_object_get(schema, "const") != NULL;
    struct look l = {.root = root, .left = LOOKS};
    const unsigned words = BT_REPLY_IS_STRING | BT_REPLY_IS_NULL | BT_REPLY_IS_BOOLEAN;
    const char *word = text ? beyond(schema, &l, 0) : NULL;
    if (text && word == NULL && (kinds & ~words) != 0 && kinds != BT_REPLY_IS_ANY) {
        word = "type"; /* a text that looks like a number counts as a number */
    }
    put_begin(f, key, out);
    if (listed && kinds == BT_REPLY_IS_STRING && constraint(schema) == NULL) {
        put_strings(schema, out);
        put_end(f, true, out);
        return true;
    }
    if (text && strict && word != NULL) {
        return bt_front_fail(
            e, 400, "tools", "unsupported_parameter",
            "this model writes calls in a form in which '%s' of the argument '%.64s' cannot be "
            "enforced; leave 'strict' out, or move the rule to the argument's description",
            word, key);
    }
    if (text) {
        bt_buf_puts(out, "\"any\":true");
        put_end(f, false, out);
        return true;
    }
    bool ok = put_schema(schema, root, out);
    put_end(f, true, out);
    return ok || bt_front_fail(e, 400, "tools", "invalid_value",
                               "a schema in 'tools' has a number that does not fit into 64 bits");
}

static bool is_required(const json_t *parameters, const char *key)
{
    const json_t *list = json_object_get(parameters, "required");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s != NULL && strcmp(s, key) == 0) {
            return true;
        }
    }
    return false;
}

/* The name of a keyword that constrains arguments, other than `properties`. */
static const char *beside_properties(const json_t *parameters)
{
    static const char *const words[] = {"$ref",
                                        "anyOf",
                                        "oneOf",
                                        "allOf",
                                        "not",
                                        "if",
                                        "minProperties",
                                        "enum",
                                        "maxProperties",
                                        "patternProperties",
                                        "propertyNames",
                                        "const",
                                        "then",
                                        "dependentSchemas",
                                        "dependentRequired"};
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (json_object_get(parameters, words[i]) != NULL) {
            return words[i];
        }
    }
    return NULL;
}

bool bt_front_put_members(const struct bt_reply_xml_form *f, const json_t *parameters, bool strict,
                          struct bt_buf *out, struct bt_front_error *e)
{
    json_t *properties = json_object_get(parameters, "properties"), *schema;
    const char *key, *word = beside_properties(parameters);
    size_t n = 0;
    bool ok = true;
    if (word != NULL && strict) {
        return bt_front_fail(e, 400, "tools", "unsupported_parameter",
                             "this model writes calls in a form in which '%s' of a tool's "
                             "parameters cannot be enforced; leave 'strict' out",
                             word);
    }
    bool closed = json_is_false(json_object_get(parameters, "additionalProperties"));
    if (word != NULL || (!strict && !closed && json_object_size(properties) == 0)) {
        return true; /* any arguments */
    }
    bt_buf_puts(out, "\"members\":[");
    json_object_foreach(properties, key, schema)
    {
        bt_buf_puts(out, n++ > 0 ? "," : "");
        ok = ok && put_member(f, key, schema, parameters, strict, out, e);
        bt_buf_puts(out, is_required(parameters, key) ? "}" : ",\"optional\":true}");
    }
    bt_buf_puts(out, "]");
    return ok;
}
