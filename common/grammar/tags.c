/* The front end for free text with constrained parts: answers that may call tools, or that begin
 * with reasoning.
 *
 * The spec is a JSON object. PARTS and CONTENT are explained below the list.
 *   tags              [{"begin": PARTS, CONTENT, "end": PARTS}, ...], at least one
 *   triggers          [text, ...]: free text contains none of them. By default the text of `open`,
 *                     or without `open` the texts of all "begin", each up to its first regex
 *   open, close       PARTS before and after a run of tags
 *   separator         PARTS between the tags of a run
 *   at_least_one      whether there must be a run (default: false)
 *   stop_after_first  whether the answer ends after one tag (default: false)
 *   free_text         whether text may precede the first run (default: true)
 *   text_after        whether text and further runs may follow a run (default: true, but false
 *                     with stop_after_first or without free_text)
 *   instead           {CONTENT, "end": PARTS}: the answer may be this, with no run or free text
 *   first             {"begin": PARTS, CONTENT, "end": PARTS, "optional": bool}: precedes the rest
 *
 * PARTS is a text, or an array of texts, of {"regex": pattern}, and of {"special": text}: a special
 * token of the model, or its text in plain tokens.
 *
 * CONTENT is one of "schema": a JSON schema; "regex": a pattern; "any": true, which is any text up
 * to the first `end`; "members": [{"begin": PARTS, CONTENT, "end": PARTS, "optional": bool}, ...],
 * which follow each other and have no members themselves.
 *
 *   answer = first? (text (run text)* | instead)      run = open tag (separator tag)* close
 *
 * Free text contains no special token. Pure. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/grammar/chars.h"
#include "common/grammar/front_end.h"

#define TAGS_MAX    4096
#define PARTS_MAX   64
#define MEMBERS_MAX 1024
#define GROUPS_MAX  64

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

/* Fails if o is not an object, or has a key that is not in names[]. */
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

/* ---- the JSON text of a value: numbers of a schema must stay exactly as they are written ---- */
struct span {
    const char *p, *end;
};

static void skip_space(struct span *s)
{
    while (s->p < s->end && strchr(" \t\r\n", *s->p) != NULL) {
        s->p++;
    }
}

/* Takes the first value off s, and the comma or colon that follows. The JSON must be valid. */
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
    s->p += s->p < s->end; /* the comma or colon */
    return out;
}

/* The values within an array, or the keys and values of an object, in turn. */
static struct span inside(struct span list)
{
    skip_space(&list);
    return (struct span){list.p + (list.p < list.end), list.end};
}

/* The value of a key in an object. The key must be written without escapes. Empty: there is no such
 * key. */
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

/* The parts from number `from` on. NULL: the empty text. */
static bt_node_t parts_node(struct builder *b, const json_t *parts, size_t from, const char *where)
{
    bt_node_t v[PARTS_MAX];
    size_t n = json_array_size(parts);
    if (parts == NULL) {
        return BT_NODE_EMPTY;
    }
    if (!json_is_array(parts)) {
        return from == 0 ? part_node(b, parts, where) : BT_NODE_EMPTY;
    }
    if (n > PARTS_MAX) {
        return fail(b, BT_ERR_EXHAUSTED, "%s has more than %d parts", where, PARTS_MAX);
    }
    for (size_t i = from; i < n; i++) {
        v[i - from] = part_node(b, json_array_get(parts, i), where);
    }
    return bt_program_seq(b->p, v, n - BT_MIN(from, n));
}

/* The text at the beginning of some parts, up to the first regular expression. A special token
 * becomes SPECIAL, its text and SPECIAL_END. */
#define SPECIAL     ((char)0xff)
#define SPECIAL_END ((char)0xfe)
struct head {
    struct bt_buf text;
    size_t parts; /* the number of parts that it covers */
};

static struct head head_of(const json_t *parts)
{
    struct head h = {{0}, 0};
    bt_buf_init(&h.text);
    size_t n = json_is_array(parts) ? json_array_size(parts) : parts != NULL;
    for (; h.parts < n; h.parts++) {
        const json_t *part = json_is_array(parts) ? json_array_get(parts, h.parts) : parts;
        const json_t *special = json_object_get(part, "special");
        const json_t *text = json_is_string(part) ? part : special;
        if (!json_is_string(text) || (special != NULL && json_string_length(special) == 0)) {
            break;
        }
        bt_buf_append(&h.text, (char[]){SPECIAL}, special != NULL);
        bt_buf_append(&h.text, json_string_value(text), json_string_length(text));
        bt_buf_append(&h.text, (char[]){SPECIAL_END}, special != NULL);
    }
    return h;
}

/* The expression of the head's text p[0..n). Special tokens may also be spelled in plain tokens. */
static bt_rx_t head_rx(struct builder *b, const char *p, size_t n)
{
    static const char mark[1] = {SPECIAL};
    bt_rx_t out = BT_RX_EMPTY;
    for (size_t i = 0, k; i < n; i = k) {
        bool special = p[i] == SPECIAL;
        const char *end = memchr(p + i + 1, special ? SPECIAL_END : SPECIAL, n - i - 1);
        k = end == NULL ? n : (size_t)(end - p) + special;
        bt_rx_t x = bt_rx_text(b->s, p + i + special, k - i - 2u * special);
        if (special) {
            x = bt_rx_or(b->s, x, bt_rx_concat(b->s, bt_rx_text(b->s, mark, 1), x));
        }
        out = bt_rx_concat(b->s, out, x);
    }
    return out;
}

static bt_rx_t parts_head_rx(struct builder *b, const json_t *parts)
{
    struct head h = head_of(parts);
    bt_rx_t x = head_rx(b, h.text.data, h.text.len);
    bt_buf_cleanup(&h.text);
    return x;
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

static bt_node_t content_node(struct builder *b, const json_t *tag, struct span text,
                              const char *where);

/* One of the members, or `first`. */
static bt_node_t member_node(struct builder *b, const json_t *member, struct span text,
                             const char *where)
{
    bt_node_t v[2] = {parts_node(b, json_object_get(member, "begin"), 0, where),
                      content_node(b, member, text, where)};
    bt_node_t node = bt_program_seq(b->p, v, 2);
    return get_bool(b, member, "optional", false) ? bt_program_repeat(b->p, node, 0, 1) : node;
}

static bt_node_t members_node(struct builder *b, const json_t *members, struct span text,
                              const char *where)
{
    size_t n = json_array_size(members);
    if (n > MEMBERS_MAX) {
        return fail(b, BT_ERR_EXHAUSTED, "%s has more than %d members", where, MEMBERS_MAX);
    }
    bt_node_t *v = bt_calloc(n + 1, sizeof(*v));
    text = inside(text);
    for (size_t i = 0; i < n && b->status == BT_OK; i++) {
        char name[64];
        snprintf(name, sizeof(name), "%.40s/members/%zu", where, i);
        v[i] = member_node(b, json_array_get(members, i), take_value(&text), name);
    }
    bt_node_t node = b->status == BT_OK ? bt_program_seq(b->p, v, n) : BT_NODE_NONE;
    free(v);
    return node;
}

/* Any text up to the end. Text and end are one expression, because the program's automaton is
 * slower. */
static bt_node_t any_node(struct builder *b, const json_t *end, const char *where)
{
    struct head h = head_of(end);
    bt_rx_t stop = head_rx(b, h.text.data, h.text.len);
    bt_buf_cleanup(&h.text);
    if (stop == BT_RX_EMPTY) {
        return fail(b, BT_ERR_INVALID, "%s: any text needs an end that begins with a text", where);
    }
    bt_node_t v[2] = {bt_program_regex(b->p, bt_rx_concat(b->s, text_without(b, stop), stop)),
                      parts_node(b, end, h.parts, where)};
    return bt_program_seq(b->p, v, 2);
}

/* The content and the end of a tag or a member. text: the JSON text of that tag or member. */
static bt_node_t content_node(struct builder *b, const json_t *tag, struct span text,
                              const char *where)
{
    static const char *const keys[] = {"begin", "schema", "regex", "any", "members", "end", NULL};
    static const char *const member_keys[] = {"begin", "schema",   "regex", "any",
                                              "end",   "optional", NULL};
    bool is_tag = strncmp(where, "tags/", 5) == 0 && strchr(where + 5, '/') == NULL;
    if (!check_keys(b, tag, where, is_tag ? keys : member_keys)) {
        return BT_NODE_NONE;
    }
    const json_t *schema = json_object_get(tag, "schema"), *regex = json_object_get(tag, "regex");
    const json_t *end = json_object_get(tag, "end"), *members = json_object_get(tag, "members");
    bool any = get_bool(b, tag, "any", false);
    if ((schema != NULL) + (regex != NULL) + any + (members != NULL) != 1 ||
        (regex != NULL && !json_is_string(regex)) || (members != NULL && !json_is_array(members))) {
        return fail(b, BT_ERR_INVALID,
                    "%s must have one of schema, regex, members and \"any\": true", where);
    }
    if (any) {
        return any_node(b, end, where);
    }
    bt_node_t v[2];
    v[0] = schema != NULL  ? schema_node(b, member_of(text, "schema"), where)
           : regex != NULL ? regex_node(b, regex, where)
                           : members_node(b, members, member_of(text, "members"), where);
    v[1] = parts_node(b, end, 0, where);
    return bt_program_seq(b->p, v, 2);
}

/* Tags whose "begin" starts with the same text, the head. With `open`, the only group is what opens
 * a run. Free text and the head that ends it become one expression, so that the program's automaton
 * has little to do during free text. */
struct group {
    struct bt_buf head;
    size_t first_tag;
    bt_node_t rest; /* what follows the head, up to the end of one tag */
};

struct tags {
    struct head *heads; /* [n] the beginning of each tag */
    size_t *group;      /* [n] the group of each tag */
    bt_node_t *rest;    /* [n] scratch */
    size_t n;
    struct group groups[GROUPS_MAX];
    size_t n_groups;
};

static void tags_cleanup(struct tags *t)
{
    for (size_t i = 0; i < t->n; i++) {
        bt_buf_cleanup(&t->heads[i].text);
    }
    for (size_t i = 0; i < t->n_groups; i++) {
        bt_buf_cleanup(&t->groups[i].head);
    }
    free(t->heads);
    free(t->group);
    free(t->rest);
}

/* Returns how many bytes both texts have in common at their beginnings. Does not end within a
 * special token. */
static size_t common_length(const struct bt_buf *x, const struct bt_buf *y)
{
    size_t n = 0, whole = 0;
    bool special = false;
    while (n < x->len && n < y->len && x->data[n] == y->data[n]) {
        special = (special || x->data[n] == SPECIAL) && x->data[n] != SPECIAL_END;
        n++;
        whole = special ? whole : n;
    }
    return whole;
}

/* Puts each tag into the first group that shares a beginning with it. If there are too many groups,
 * the last one takes all further tags. */
static void make_groups(struct tags *t)
{
    for (size_t i = 0; i < t->n; i++) {
        size_t k = 0;
        while (k < t->n_groups && common_length(&t->groups[k].head, &t->heads[i].text) == 0) {
            k++;
        }
        if (k == GROUPS_MAX) {
            k--;
        }
        t->group[i] = k;
        struct group *g = &t->groups[k];
        if (k == t->n_groups) {
            t->n_groups++;
            *g = (struct group){.first_tag = i};
            bt_buf_init(&g->head);
            bt_buf_append(&g->head, t->heads[i].text.data, t->heads[i].text.len);
        }
        g->head.len = common_length(&g->head, &t->heads[i].text);
    }
}

/* Reads the tags, and builds `rest` of all groups. */
static bool read_tags(struct builder *b, const json_t *tags, struct span text, struct tags *t)
{
    size_t n = json_array_size(tags);
    if (n == 0 || n > TAGS_MAX) {
        fail(b, n == 0 ? BT_ERR_INVALID : BT_ERR_EXHAUSTED,
             "\"tags\" must be an array of 1 to %d tags", TAGS_MAX);
        return false;
    }
    t->heads = bt_calloc(n, sizeof(*t->heads));
    t->group = bt_calloc(n, sizeof(*t->group));
    t->rest = bt_calloc(n, sizeof(*t->rest));
    for (; t->n < n; t->n++) {
        t->heads[t->n] = head_of(json_object_get(json_array_get(tags, t->n), "begin"));
    }
    make_groups(t);
    text = inside(text);
    bt_node_t *all = bt_calloc(n, sizeof(*all));
    for (size_t i = 0; i < n && b->status == BT_OK; i++) {
        const json_t *tag = json_array_get(tags, i);
        const struct bt_buf *head = &t->heads[i].text;
        size_t from = t->groups[t->group[i]].head.len;
        char where[32];
        snprintf(where, sizeof(where), "tags/%zu", i);
        bt_node_t v[3] = {BT_NODE_EMPTY, BT_NODE_EMPTY,
                          content_node(b, tag, take_value(&text), where)};
        const char *p = head->len > from ? (const char *)head->data + from : "";
        v[0] = bt_program_regex(b->p, head_rx(b, p, head->len - from));
        v[1] = parts_node(b, json_object_get(tag, "begin"), t->heads[i].parts, where);
        all[i] = bt_program_seq(b->p, v, 3);
    }
    for (size_t k = 0; k < t->n_groups && b->status == BT_OK; k++) {
        size_t m = 0;
        for (size_t i = 0; i < n; i++) {
            if (t->group[i] == k) {
                t->rest[m++] = all[i];
            }
        }
        t->groups[k].rest = bt_program_alt(b->p, t->rest, m);
    }
    free(all);
    return b->status == BT_OK;
}

/* `text` with the head of each group as one expression, then the rest of that group and `more`. */
static bt_node_t entry(struct builder *b, const struct tags *t, bt_rx_t text, bt_node_t more)
{
    bt_node_t out[GROUPS_MAX];
    for (size_t k = 0; k < t->n_groups; k++) {
        const struct bt_buf *head = &t->groups[k].head;
        bt_rx_t x = bt_rx_concat(b->s, text, head_rx(b, head->data, head->len));
        bt_node_t v[3] = {bt_program_regex(b->p, x), t->groups[k].rest, more};
        out[k] = bt_program_seq(b->p, v, 3);
    }
    return bt_program_alt(b->p, out, t->n_groups);
}

/* Builds what follows the first tag of a run, up to the end of the run (*more_p). With `open`,
 * makes it the only group. once: a run has one tag. */
static void open_run(struct builder *b, const json_t *spec, struct tags *t, bool once,
                     bt_node_t *more_p)
{
    const json_t *open = json_object_get(spec, "open");
    bt_node_t sep = parts_node(b, json_object_get(spec, "separator"), 0, "separator");
    bt_node_t close = parts_node(b, json_object_get(spec, "close"), 0, "close");
    bt_node_t again[2] = {sep, entry(b, t, BT_RX_EMPTY, BT_NODE_EMPTY)};
    bt_node_t more[2] = {BT_NODE_EMPTY, close};
    if (!once) {
        more[0] = bt_program_repeat(b->p, bt_program_seq(b->p, again, 2), 0, BT_RX_NO_MAX);
    }
    *more_p = bt_program_seq(b->p, more, 2);
    if (open != NULL) {
        struct head h = head_of(open);
        bt_node_t rest[2] = {parts_node(b, open, h.parts, "open"), again[1]};
        for (size_t k = 0; k < t->n_groups; k++) {
            bt_buf_cleanup(&t->groups[k].head);
        }
        t->n_groups = 1;
        t->groups[0] = (struct group){.head = h.text, .rest = bt_program_seq(b->p, rest, 2)};
    }
}

/* The triggers: free text must not contain any of them. */
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
        v[i] = triggers != NULL ? (json_is_string(item) ? parts_head_rx(b, item) : BT_RX_EMPTY)
               : open != NULL   ? parts_head_rx(b, open)
                                : parts_head_rx(b, json_object_get(item, "begin"));
        if (v[i] == BT_RX_EMPTY) {
            fail(b, BT_ERR_INVALID,
                 triggers != NULL
                     ? "trigger %zu is not a text"
                     : "tag %zu does not begin with a text, so its beginning cannot be found in "
                       "free text; begin it with a text, or set \"free_text\": false",
                 i);
        }
    }
    bt_rx_t out = b->status == BT_OK ? bt_rx_or_list(b->s, v, n) : BT_RX_NONE;
    free(v);
    return out;
}

static bt_node_t answer(struct builder *b, const json_t *spec, struct tags *t)
{
    bool once = get_bool(b, spec, "stop_after_first", false);
    bool before = get_bool(b, spec, "free_text", true);
    bool after = get_bool(b, spec, "text_after", before && !once);
    bool must = get_bool(b, spec, "at_least_one", false);
    if (once && after) {
        return fail(b, BT_ERR_INVALID, "\"text_after\" contradicts \"stop_after_first\"");
    }
    bt_rx_t text = BT_RX_EMPTY;
    if (before || after) {
        text = text_without(b, triggers_rx(b, spec));
    }
    bt_node_t more;
    open_run(b, spec, t, once, &more);
    bt_node_t end = bt_program_regex(b->p, text);
    bt_node_t one = entry(b, t, before ? text : BT_RX_EMPTY, more);
    bt_node_t out;
    if (after) {
        bt_node_t again = before ? one : entry(b, t, text, more);
        bt_node_t v[3] = {one, bt_program_repeat(b->p, again, 0, BT_RX_NO_MAX), end};
        out = bt_program_seq(b->p, v, 3);
    } else {
        out = one;
    }
    bt_node_t two[2] = {out, before ? end : BT_NODE_EMPTY};
    return must ? out : bt_program_alt(b->p, two, 2);
}

/* The node of the whole spec. */
static bt_node_t whole(struct builder *b, const json_t *spec, struct span text)
{
    static const char *const keys[] = {"tags",      "triggers",   "open",
                                       "close",     "separator",  "at_least_one",
                                       "free_text", "text_after", "stop_after_first",
                                       "first",     "instead",    NULL};
    const json_t *first = json_object_get(spec, "first");
    struct tags t = {0};
    bt_node_t v[2] = {BT_NODE_EMPTY, BT_NODE_NONE};
    if (check_keys(b, spec, "the spec", keys) &&
        read_tags(b, json_object_get(spec, "tags"), member_of(text, "tags"), &t)) {
        v[1] = answer(b, spec, &t);
    }
    const json_t *instead = json_object_get(spec, "instead");
    if (instead != NULL && b->status == BT_OK) {
        bt_node_t either[2] = {v[1],
                               content_node(b, instead, member_of(text, "instead"), "instead")};
        v[1] = bt_program_alt(b->p, either, 2);
    }
    if (first != NULL && b->status == BT_OK) {
        v[0] = member_node(b, first, member_of(text, "first"), "first");
    }
    tags_cleanup(&t);
    return bt_program_seq(b->p, v, 2);
}

bt_status_t bt_grammar_build_tags(struct bt_program *p, const char *text, size_t len,
                                  bt_node_t *start, char *err, size_t err_cap)
{
    struct builder b = {.p = p, .s = bt_program_rx(p), .err = err, .err_cap = err_cap};
    const struct bt_rx_range all = {0, BT_CHAR_MAX};
    json_error_t e;
    json_t *spec = json_loadb(text, len, JSON_REJECT_DUPLICATES, &e);
    b.any = bt_rx_repeat(b.s, bt_rx_chars(b.s, BT_RX_UTF8, &all, 1), 0, BT_RX_NO_MAX);
    bt_node_t node = spec != NULL ? whole(&b, spec, (struct span){text, text + len})
                                  : fail(&b, BT_ERR_INVALID,
                                         "the spec is not valid JSON: line %d: %s", e.line, e.text);
    if (b.status == BT_OK) {
        *start = node;
    }
    json_decref(spec);
    return b.status;
}
