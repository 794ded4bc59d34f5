/* The front end for free text with constrained parts: answers that may call tools, or think first.
 *
 * The spec is a JSON object:
 *   tags              [{"begin": PARTS, CONTENT, "end": PARTS}, ...], at least one
 *   triggers          [text, ...]: free text contains none of them. By default `open`, or if there
 *                     is none the begins, each up to its first regular expression
 *   open, close       PARTS around a run of tags
 *   separator         PARTS between the tags of a run
 *   at_least_one      there must be a run (false)
 *   stop_after_first  the answer ends after one tag (false)
 *   free_text         text may stand before the first run (true)
 *   text_after        text, and further runs, may follow a run (as free_text)
 *   first             {"begin": PARTS, CONTENT, "end": PARTS, "optional": bool}: what precedes all
 * CONTENT is one of "schema": a JSON schema, "regex": a pattern, and "any": true, which is any text
 * up to the first `end`. PARTS is a text, or an array of texts, {"special": text}, a special token
 * of the model or its text in plain tokens, and {"regex": pattern}.
 *
 *   answer = first? text (run text)*      run = open tag (separator tag)* close
 *
 * Free text holds no special token. Pure. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/grammar/chars.h"
#include "common/grammar/front_end.h"

#define TAGS_MAX  4096
#define PARTS_MAX 64

struct builder {
    struct bt_program *p;
    struct bt_rx_set *s;
    bt_rx_t any; /* any text */
    bt_status_t status;
    char *err;
    size_t err_cap;
};

__attribute__((format(printf, 3, 4))) static bt_node_t fail(struct builder *b, bt_status_t status,
                                                            const char *fmt, ...)
{
    if (b->status == BT_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(b->err, b->err_cap, fmt, ap);
        va_end(ap);
        b->status = status;
    }
    return BT_NODE_NONE;
}

/* Puts "where: " before the message of a nested front end. */
static bt_node_t nested(struct builder *b, bt_status_t status, const char *where, const char *what)
{
    return fail(b, status, "%s: %s", where, what);
}

/* An object without keys but those of names[]. */
static bool check_keys(struct builder *b, const json_t *o, const char *where,
                       const char *const *names)
{
    const char *key;
    json_t *value;
    if (!json_is_object(o)) {
        fail(b, BT_ERR_INVALID, "%s must be an object", where);
        return false;
    }
    json_object_foreach((json_t *)o, key, value)
    {
        size_t i = 0;
        while (names[i] != NULL && strcmp(names[i], key) != 0) {
            i++;
        }
        if (names[i] == NULL) {
            fail(b, BT_ERR_INVALID, "%s has an unknown key \"%.60s\"", where, key);
            return false;
        }
    }
    return true;
}

static bool get_bool(struct builder *b, const json_t *o, const char *key, bool otherwise)
{
    const json_t *v = json_object_get(o, key);
    if (v != NULL && !json_is_boolean(v)) {
        fail(b, BT_ERR_INVALID, "\"%s\" must be true or false", key);
    }
    return v != NULL ? json_is_true(v) : otherwise;
}

/* ---- the text of a value: numbers of a schema must stay as they are written ---- */
struct span {
    const char *p, *end;
};

static void skip_space(struct span *s)
{
    while (s->p < s->end && strchr(" \t\r\n", *s->p) != NULL) {
        s->p++;
    }
}

/* Takes the value with which s begins, of valid JSON. */
static struct span take_value(struct span *s)
{
    skip_space(s);
    struct span out = {s->p, s->p};
    size_t depth = 0;
    bool text = false;
    for (; s->p < s->end; s->p++) {
        char c = *s->p;
        if (text) {
            s->p += c == '\\';
            text = c != '"';
        } else if (c == '"') {
            text = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        } else if (depth == 0 && strchr(",:}] \t\r\n", c) != NULL) {
            break;
        }
    }
    out.end = s->p;
    skip_space(s);
    s->p += s->p < s->end; /* the comma or colon behind it */
    return out;
}

/* What is inside an array or an object: values, or keys and values in turn. */
static struct span inside(struct span list)
{
    skip_space(&list);
    return (struct span){list.p + (list.p < list.end), list.end};
}

/* The value of a key that is written without escapes; empty: there is none. */
static struct span member_of(struct span object, const char *key)
{
    size_t n = strlen(key);
    for (struct span in = inside(object); in.p < in.end;) {
        struct span name = take_value(&in), value = take_value(&in);
        if ((size_t)(name.end - name.p) == n + 2 && memcmp(name.p + 1, key, n) == 0) {
            return value;
        }
    }
    return (struct span){object.end, object.end};
}

/* ---- parts ---- */
static bt_node_t text_node(struct builder *b, const json_t *text)
{
    return bt_program_regex(b->p,
                            bt_rx_text(b->s, json_string_value(text), json_string_length(text)));
}

static bt_node_t regex_node(struct builder *b, const json_t *text, const char *where)
{
    char err[256];
    bt_node_t node = BT_NODE_NONE;
    bt_status_t st = bt_grammar_build_regex(b->p, json_string_value(text), json_string_length(text),
                                            &node, err, sizeof(err));
    return st == BT_OK ? node : nested(b, st, where, err);
}

static bt_node_t part_node(struct builder *b, const json_t *part, const char *where)
{
    if (json_is_string(part)) {
        return text_node(b, part);
    }
    const json_t *special = json_object_get(part, "special");
    const json_t *regex = json_object_get(part, "regex");
    if (json_object_size(part) == 1 && json_string_length(special) > 0) {
        bt_node_t two[2] = {bt_program_special(b->p, json_string_value(special)),
                            text_node(b, special)};
        return bt_program_alt(b->p, two, 2);
    }
    if (json_object_size(part) == 1 && json_is_string(regex)) {
        return regex_node(b, regex, where);
    }
    return fail(b, BT_ERR_INVALID,
                "%s must be a text, or an array of texts, {\"special\": text} and "
                "{\"regex\": pattern}",
                where);
}

/* NULL: the empty text. */
static bt_node_t parts_node(struct builder *b, const json_t *parts, const char *where)
{
    bt_node_t v[PARTS_MAX];
    size_t n = json_array_size(parts);
    if (parts == NULL) {
        return BT_NODE_EMPTY;
    }
    if (!json_is_array(parts)) {
        return part_node(b, parts, where);
    }
    if (n > PARTS_MAX) {
        return fail(b, BT_ERR_EXHAUSTED, "%s has more than %d parts", where, PARTS_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        v[i] = part_node(b, json_array_get(parts, i), where);
    }
    return bt_program_seq(b->p, v, n);
}

/* The text with which parts begin, up to the first regular expression, as one expression in both
 * spellings. BT_RX_EMPTY: none. */
static bt_rx_t head_rx(struct builder *b, const json_t *parts)
{
    static const char mark[1] = {(char)0xff};
    size_t n = json_is_array(parts) ? json_array_size(parts) : parts != NULL;
    bt_rx_t out = BT_RX_EMPTY;
    for (size_t i = 0; i < n; i++) {
        const json_t *part = json_is_array(parts) ? json_array_get(parts, i) : parts;
        const json_t *special = json_object_get(part, "special");
        const json_t *text = json_is_string(part) ? part : special;
        if (text == NULL) {
            break;
        }
        bt_rx_t x = bt_rx_text(b->s, json_string_value(text), json_string_length(text));
        if (special != NULL) {
            x = bt_rx_or(b->s, x, bt_rx_concat(b->s, bt_rx_text(b->s, mark, 1), x));
        }
        out = bt_rx_concat(b->s, out, x);
    }
    return out;
}

/* Any text that contains no match of x. */
static bt_rx_t text_without(struct builder *b, bt_rx_t x)
{
    if (x == BT_RX_NONE) {
        return b->any;
    }
    bt_rx_t with = bt_rx_concat(b->s, b->any, bt_rx_concat(b->s, x, b->any));
    return bt_rx_and(b->s, b->any, bt_rx_not(b->s, with));
}

/* ---- tags ---- */
static bt_node_t schema_node(struct builder *b, struct span schema, const char *where)
{
    char err[512];
    bt_node_t node = BT_NODE_NONE;
    bt_status_t st = bt_grammar_build_schema(b->p, schema.p, (size_t)(schema.end - schema.p), &node,
                                             err, sizeof(err));
    return st == BT_OK ? node : nested(b, st, where, err);
}

/* begin, content and end of a tag, whose text is in `text`. */
static bt_node_t tag_node(struct builder *b, const json_t *tag, struct span text, const char *where)
{
    static const char *const keys[] = {"begin", "schema", "regex", "any", "end", NULL};
    static const char *const first_keys[] = {"begin", "schema",   "regex", "any",
                                             "end",   "optional", NULL};
    bool is_first = strcmp(where, "first") == 0;
    if (!check_keys(b, tag, where, is_first ? first_keys : keys)) {
        return BT_NODE_NONE;
    }
    const json_t *schema = json_object_get(tag, "schema"), *regex = json_object_get(tag, "regex");
    const json_t *end = json_object_get(tag, "end");
    bool any = get_bool(b, tag, "any", false);
    bt_node_t v[3];
    v[0] = parts_node(b, json_object_get(tag, "begin"), where);
    v[2] = parts_node(b, end, where);
    if ((schema != NULL) + (regex != NULL) + any != 1 ||
        (regex != NULL && !json_is_string(regex))) {
        return fail(b, BT_ERR_INVALID, "%s must have one of schema, regex and \"any\": true",
                    where);
    }
    if (any) {
        bt_rx_t stop = head_rx(b, end);
        if (stop == BT_RX_EMPTY) {
            return fail(b, BT_ERR_INVALID, "%s: any text needs an end that begins with a text",
                        where);
        }
        v[1] = bt_program_regex(b->p, text_without(b, stop));
    } else {
        v[1] = schema != NULL ? schema_node(b, member_of(text, "schema"), where)
                              : regex_node(b, regex, where);
    }
    return bt_program_seq(b->p, v, 3);
}

static bt_node_t any_tag(struct builder *b, const json_t *tags, struct span text)
{
    size_t n = json_array_size(tags);
    if (n == 0 || n > TAGS_MAX) {
        return fail(b, n == 0 ? BT_ERR_INVALID : BT_ERR_EXHAUSTED,
                    "\"tags\" must be an array of 1 to %d tags", TAGS_MAX);
    }
    bt_node_t *v = bt_calloc(n, sizeof(*v));
    text = inside(text);
    for (size_t i = 0; i < n && b->status == BT_OK; i++) {
        char where[32];
        snprintf(where, sizeof(where), "tags/%zu", i);
        v[i] = tag_node(b, json_array_get(tags, i), take_value(&text), where);
    }
    bt_node_t out = b->status == BT_OK ? bt_program_alt(b->p, v, n) : BT_NODE_NONE;
    free(v);
    return out;
}

/* What free text does not contain. */
static bt_rx_t triggers_rx(struct builder *b, const json_t *spec)
{
    const json_t *triggers = json_object_get(spec, "triggers"),
                 *tags = json_object_get(spec, "tags");
    const json_t *open = json_object_get(spec, "open");
    const json_t *from = triggers != NULL ? triggers : tags;
    size_t n = triggers == NULL && open != NULL ? 1 : json_array_size(from);
    if (n == 0 || n > TAGS_MAX) {
        fail(b, BT_ERR_INVALID, "\"triggers\" must be an array of 1 to %d texts", TAGS_MAX);
        return BT_RX_NONE;
    }
    bt_rx_t *v = bt_calloc(n, sizeof(*v));
    for (size_t i = 0; i < n && b->status == BT_OK; i++) {
        const json_t *item = json_array_get(from, i);
        v[i] = triggers != NULL ? (json_is_string(item) ? head_rx(b, item) : BT_RX_EMPTY)
               : open != NULL   ? head_rx(b, open)
                                : head_rx(b, json_object_get(item, "begin"));
        if (v[i] == BT_RX_EMPTY) {
            fail(b, BT_ERR_INVALID,
                 triggers != NULL ? "trigger %zu is no text"
                                  : "tag %zu begins with no text, by which it would be noticed in "
                                    "free text; give it one, or \"free_text\": false",
                 i);
        }
    }
    bt_rx_t out = b->status == BT_OK ? bt_rx_or_list(b->s, v, n) : BT_RX_NONE;
    free(v);
    return out;
}

static bt_node_t answer(struct builder *b, const json_t *spec, struct span text_of)
{
    static const char *const keys[] = {"tags",      "triggers",   "open",
                                       "close",     "separator",  "at_least_one",
                                       "free_text", "text_after", "stop_after_first",
                                       "first",     NULL};
    if (!check_keys(b, spec, "the spec", keys)) {
        return BT_NODE_NONE;
    }
    bool once = get_bool(b, spec, "stop_after_first", false);
    bool before = get_bool(b, spec, "free_text", true);
    bool after = get_bool(b, spec, "text_after", before && !once);
    bool must = get_bool(b, spec, "at_least_one", false);
    const json_t *first = json_object_get(spec, "first");
    if (once && after) {
        return fail(b, BT_ERR_INVALID, "\"text_after\" contradicts \"stop_after_first\"");
    }
    bt_node_t tag = any_tag(b, json_object_get(spec, "tags"), member_of(text_of, "tags"));
    bt_node_t sep = parts_node(b, json_object_get(spec, "separator"), "separator");
    bt_node_t run[3] = {parts_node(b, json_object_get(spec, "open"), "open"), tag,
                        parts_node(b, json_object_get(spec, "close"), "close")};
    if (!once) {
        run[1] = bt_program_repeat_sep(b->p, tag, sep, 1, BT_RX_NO_MAX);
    }
    bt_node_t text = BT_NODE_EMPTY, runs = bt_program_seq(b->p, run, 3);
    if (before || after) {
        text = bt_program_regex(b->p, text_without(b, triggers_rx(b, spec)));
    }
    bt_node_t all[3] = {BT_NODE_EMPTY, before ? text : BT_NODE_EMPTY, runs};
    if (after) {
        bt_node_t again[2] = {runs, text};
        all[2] =
            bt_program_repeat(b->p, bt_program_seq(b->p, again, 2), must ? 1 : 0, BT_RX_NO_MAX);
    } else if (!must) {
        all[2] = bt_program_repeat(b->p, runs, 0, 1);
    }
    if (first != NULL) {
        all[0] = tag_node(b, first, member_of(text_of, "first"), "first");
        if (get_bool(b, first, "optional", false)) {
            all[0] = bt_program_repeat(b->p, all[0], 0, 1);
        }
    }
    return bt_program_seq(b->p, all, 3);
}

bt_status_t bt_grammar_build_tags(struct bt_program *p, const char *text, size_t len,
                                  bt_node_t *start, char *err, size_t err_cap)
{
    struct builder b = {.p = p, .s = bt_program_rx(p), .err = err, .err_cap = err_cap};
    const struct bt_rx_range all = {0, BT_CHAR_MAX};
    json_error_t e;
    json_t *spec = json_loadb(text, len, JSON_REJECT_DUPLICATES, &e);
    b.any = bt_rx_repeat(b.s, bt_rx_chars(b.s, BT_RX_UTF8, &all, 1), 0, BT_RX_NO_MAX);
    bt_node_t node =
        spec != NULL ? answer(&b, spec, (struct span){text, text + len})
                     : fail(&b, BT_ERR_INVALID, "the spec is no JSON: line %d: %s", e.line, e.text);
    if (b.status == BT_OK) {
        *start = node;
    }
    json_decref(spec);
    return b.status;
}
