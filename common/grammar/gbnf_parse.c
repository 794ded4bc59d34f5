/* Reads GBNF, llama.cpp's EBNF: rules "name ::= ...", literals, classes, the dot, groups, ? * +
 * {}, comments, tokens <text>. A rule continues on the next line within parentheses, after
 * "::=", after "|" and before "|". Pure. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/map.h"
#include "common/grammar/gbnf.h"

#define DEPTH_MAX 200 /* depth of parentheses; the reader recurses */
#define NODES_MAX (1 << 20)
#define COUNT_MAX (1 << 24)

struct reader {
    struct bt_gbnf *g;
    const char *p, *end;
    uint32_t depth;
    uint32_t *table; /* of rules by name: index + 1; 0: free */
    uint32_t mask;
    bt_status_t status;
    char *err;
    size_t err_cap;
};

void bt_gbnf_place(const struct bt_gbnf *g, const char *at, uint32_t *line_p, uint32_t *column_p)
{
    *line_p = *column_p = 1;
    for (const char *q = g->text; q < at; q++) {
        *column_p = *q == '\n' ? 1 : *column_p + 1;
        *line_p += *q == '\n';
    }
}

/* Records the first error. Returns BT_GBNF_NO_NODE. */
__attribute__((format(printf, 4, 5))) static uint32_t fail(struct reader *r, bt_status_t status,
                                                           const char *at, const char *fmt, ...)
{
    if (r->status != BT_OK) {
        return BT_GBNF_NO_NODE;
    }
    r->status = status;
    uint32_t line, column;
    bt_gbnf_place(r->g, at, &line, &column);
    char what[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    snprintf(r->err, r->err_cap, "line %u, column %u: %s", line, column, what);
    return BT_GBNF_NO_NODE;
}

static char peek(const struct reader *r, size_t ahead)
{
    return (size_t)(r->end - r->p) > ahead ? r->p[ahead] : '\0';
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_';
}

static void skip(struct reader *r, bool lines)
{
    for (; r->p < r->end; r->p++) {
        if (*r->p == '#') {
            while (r->p + 1 < r->end && r->p[1] != '\n') {
                r->p++;
            }
        } else if (*r->p != ' ' && *r->p != '\t' && *r->p != '\r' && !(lines && *r->p == '\n')) {
            break;
        }
    }
}

/* ---- nodes and rules ---- */
static uint32_t node(struct reader *r, enum bt_gbnf_kind kind, uint32_t first, uint32_t n)
{
    struct bt_gbnf *g = r->g;
    if (g->n_nodes == NODES_MAX) {
        return fail(r, BT_ERR_EXHAUSTED, r->p, "the grammar is too large; make it smaller");
    }
    if (g->n_nodes == g->cap_nodes) {
        g->cap_nodes = g->cap_nodes > 0 ? 2 * g->cap_nodes : 64;
        g->nodes = bt_realloc(g->nodes, g->cap_nodes * sizeof(*g->nodes));
    }
    g->nodes[g->n_nodes] = (struct bt_gbnf_node){
        .kind = kind, .first = first, .n = n, .child = BT_GBNF_NO_NODE, .next = BT_GBNF_NO_NODE};
    return (uint32_t)g->n_nodes++;
}

static void rehash(struct reader *r)
{
    r->mask = r->mask == 0 ? 63 : 2 * r->mask + 1;
    free(r->table);
    r->table = bt_calloc(r->mask + 1, sizeof(*r->table));
    for (uint32_t i = 0; i < r->g->n_rules; i++) {
        uint64_t h = bt_hash64(r->g->rules[i].name, r->g->rules[i].len, 0);
        while (r->table[h & r->mask] != 0) {
            h++;
        }
        r->table[h & r->mask] = i + 1;
    }
}

/* Finds the rule of a name, or makes a new one. */
static uint32_t rule(struct reader *r, const char *name, size_t len)
{
    struct bt_gbnf *g = r->g;
    if (2 * g->n_rules >= r->mask) {
        rehash(r);
    }
    uint64_t h = bt_hash64(name, len, 0);
    for (; r->table[h & r->mask] != 0; h++) {
        uint32_t i = r->table[h & r->mask] - 1;
        if (g->rules[i].len == len && memcmp(g->rules[i].name, name, len) == 0) {
            return i;
        }
    }
    if (g->n_rules == g->cap_rules) {
        g->cap_rules = g->cap_rules > 0 ? 2 * g->cap_rules : 16;
        g->rules = bt_realloc(g->rules, g->cap_rules * sizeof(*g->rules));
    }
    g->rules[g->n_rules] = (struct bt_gbnf_rule){.name = name,
                                                 .len = len,
                                                 .body = BT_GBNF_NO_NODE,
                                                 .rx = BT_RX_FAILED,
                                                 .node = BT_NODE_FAILED};
    r->table[h & r->mask] = (uint32_t)++g->n_rules;
    return (uint32_t)g->n_rules - 1;
}

/* ---- characters ---- */
static bool hex(struct reader *r, size_t n, uint32_t *cp_p)
{
    uint32_t v = 0;
    for (size_t i = 0; i < n; i++) {
        char c = peek(r, i);
        uint32_t d = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                     : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                     : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                            : 16;
        if (d == 16) {
            fail(r, BT_ERR_INVALID, r->p, "this escape needs %zu hexadecimal digits", n);
            return false;
        }
        v = v << 4 | d;
    }
    if (v > BT_CHAR_MAX || (v >= 0xd800 && v <= 0xdfff)) {
        fail(r, BT_ERR_INVALID, r->p, "this escape is not a character of Unicode");
        return false;
    }
    r->p += n;
    *cp_p = v;
    return true;
}

/* One character of a literal or a class. */
static bool character(struct reader *r, uint32_t *cp_p)
{
    size_t n = bt_chars_decode(r->p, (size_t)(r->end - r->p), cp_p);
    if (n == 0) {
        fail(r, BT_ERR_INVALID, r->p, "%s", r->p < r->end ? "this is not UTF-8" : "the text ends");
        return false;
    }
    r->p += n;
    if (*cp_p != '\\') {
        return true;
    }
    static const char plain[] = "\\\"'[]/-^.";
    static const char escapes[][2] = {{'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'f', '\f'},
                                      {'v', '\v'}, {'b', '\b'}, {'0', '\0'}};
    char c = peek(r, 0);
    r->p += r->p < r->end;
    switch (c) {
    case 'x': return hex(r, 2, cp_p);
    case 'u': return hex(r, 4, cp_p);
    case 'U': return hex(r, 8, cp_p);
    default: break;
    }
    if (c != '\0' && strchr(plain, c) != NULL) {
        *cp_p = (uint32_t)c;
        return true;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(escapes); i++) {
        if (escapes[i][0] == c) {
            *cp_p = (uint32_t)escapes[i][1];
            return true;
        }
    }
    fail(r, BT_ERR_INVALID, r->p - 1,
         "this escape is not known; write \\xHH, \\uHHHH or \\UHHHHHHHH");
    return false;
}

static void put_utf8(struct bt_buf *b, uint32_t cp)
{
    char s[4];
    size_t n = 1;
    if (cp < 0x80) {
        s[0] = (char)cp;
    } else {
        n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
        for (size_t i = n - 1; i > 0; i--, cp >>= 6) {
            s[i] = (char)(0x80 | (cp & 0x3f));
        }
        s[0] = (char)(0xf00 >> n | cp);
    }
    bt_buf_append(b, s, n);
}

static uint32_t literal(struct reader *r)
{
    const char *at = r->p++;
    size_t first = r->g->pool.len;
    while (r->p < r->end && *r->p != '"') {
        uint32_t cp;
        if (*r->p == '\n') {
            return fail(r, BT_ERR_INVALID, at, "the literal has no end; write \\n for a new line");
        }
        if (!character(r, &cp)) {
            return BT_GBNF_NO_NODE;
        }
        put_utf8(&r->g->pool, cp);
    }
    if (r->p == r->end) {
        return fail(r, BT_ERR_INVALID, at, "the literal has no end");
    }
    r->p++;
    return node(r, BT_GBNF_TEXT, (uint32_t)first, (uint32_t)(r->g->pool.len - first));
}

static uint32_t put_chars(struct reader *r, struct bt_chars *c, bool negate)
{
    if (negate) {
        bt_chars_negate(c);
    }
    bt_chars_sort(c);
    size_t first = r->g->ranges.n;
    for (size_t i = 0; i < c->n; i++) {
        bt_chars_add(&r->g->ranges, c->v[i].first, c->v[i].last);
    }
    uint32_t n = (uint32_t)c->n;
    bt_chars_cleanup(c);
    return node(r, BT_GBNF_CHARS, (uint32_t)first, n);
}

static uint32_t class(struct reader *r)
{
    const char *at = r->p++;
    struct bt_chars c = {0};
    bool negate = peek(r, 0) == '^', ok = true;
    r->p += negate;
    while (ok && r->p < r->end && *r->p != ']') {
        uint32_t first, last;
        const char *from = r->p;
        ok = character(r, &first);
        last = first;
        if (ok && peek(r, 0) == '-' && peek(r, 1) != ']') {
            r->p++;
            ok = character(r, &last);
        }
        if (ok && last < first) {
            fail(r, BT_ERR_INVALID, from, "this range of the class ends before it begins");
            ok = false;
        }
        if (ok) {
            bt_chars_add(&c, first, last);
        }
    }
    if (!ok || r->p == r->end) {
        bt_chars_cleanup(&c);
        return fail(r, BT_ERR_INVALID, at, "the class has no closing ]");
    }
    r->p++;
    return put_chars(r, &c, negate);
}

/* <text>, at p. */
static uint32_t token(struct reader *r, bool without)
{
    const char *at = r->p;
    if (peek(r, 0) != '<') {
        return fail(r, BT_ERR_INVALID, at, "a token <text> must follow the !");
    }
    if (peek(r, 1) == '[') {
        return fail(r, BT_ERR_UNSUPPORTED, at,
                    "token ids are not supported; write the token's text: <think>");
    }
    while (r->p < r->end && *r->p != '>' && *r->p != '\n') {
        r->p++;
    }
    if (peek(r, 0) != '>' || r->p == at + 1) {
        return fail(r, BT_ERR_INVALID, at, "the token has no closing >");
    }
    r->p++;
    size_t first = r->g->pool.len;
    bt_buf_append(&r->g->pool, at, (size_t)(r->p - at));
    uint32_t id =
        node(r, without ? BT_GBNF_WITHOUT : BT_GBNF_TOKEN, (uint32_t)first, (uint32_t)(r->p - at));
    char q = peek(r, 0);
    if (without && q != '*' && q != '+') {
        return fail(
            r, BT_ERR_UNSUPPORTED, at,
            "a single token other than a given one is not supported; write !<text>* or !<text>+");
    }
    if (without && id != BT_GBNF_NO_NODE) {
        r->g->nodes[id].min = q == '+';
        r->p++;
    }
    return id;
}

/* ---- sequences ---- */
static uint32_t alternates(struct reader *r, bool nested);

static bool number(struct reader *r, uint32_t *v_p)
{
    uint64_t v = 0;
    const char *at = r->p;
    for (; peek(r, 0) >= '0' && peek(r, 0) <= '9'; r->p++) {
        v = BT_MIN(v * 10 + (uint64_t)(*r->p - '0'), COUNT_MAX + 1ull);
    }
    if (r->p == at) {
        fail(r, BT_ERR_INVALID, at, "a number must be here: {m}, {m,} or {m,n}");
    } else if (v > COUNT_MAX) {
        fail(r, BT_ERR_EXHAUSTED, at, "the repeat is too large; the limit is %d", COUNT_MAX);
    }
    *v_p = (uint32_t)v;
    return r->status == BT_OK;
}

/* {m} {m,} {m,n} at p. */
static bool braces(struct reader *r, uint32_t *min_p, uint32_t *max_p)
{
    const char *at = r->p++;
    skip(r, false);
    if (!number(r, min_p)) {
        return false;
    }
    skip(r, false);
    *max_p = *min_p;
    if (peek(r, 0) == ',') {
        r->p++;
        skip(r, false);
        *max_p = BT_RX_NO_MAX;
        if (peek(r, 0) != '}' && !number(r, max_p)) {
            return false;
        }
        skip(r, false);
    }
    if (peek(r, 0) != '}' || *max_p < *min_p) {
        fail(r, BT_ERR_INVALID, at, "a repeat is {m}, {m,} or {m,n} with m <= n");
        return false;
    }
    r->p++;
    return true;
}

/* Reads the quantifiers that directly follow a node, without white space: x* +. */
static uint32_t quantified(struct reader *r, uint32_t child)
{
    while (child != BT_GBNF_NO_NODE) {
        uint32_t min = 0, max = BT_RX_NO_MAX;
        char c = peek(r, 0);
        if (c == '{') {
            if (!braces(r, &min, &max)) {
                return BT_GBNF_NO_NODE;
            }
        } else if (c == '*' || c == '+' || c == '?') {
            r->p++;
            min = c == '+';
            max = c == '?' ? 1 : BT_RX_NO_MAX;
        } else {
            break;
        }
        uint32_t id = node(r, BT_GBNF_REPEAT, 0, 0);
        if (id != BT_GBNF_NO_NODE) {
            r->g->nodes[id].child = child;
            r->g->nodes[id].min = min;
            r->g->nodes[id].max = max;
        }
        child = id;
    }
    return child;
}

static uint32_t group(struct reader *r)
{
    const char *at = r->p++;
    if (r->depth == DEPTH_MAX) {
        return fail(r, BT_ERR_EXHAUSTED, at, "groups are nested more than %d deep; nest fewer",
                    DEPTH_MAX);
    }
    if (peek(r, 0) == '=' || peek(r, 0) == '!') {
        return fail(r, BT_ERR_UNSUPPORTED, at,
                    "look-ahead is not supported; write the rules without it");
    }
    r->depth++;
    skip(r, true);
    uint32_t id = alternates(r, true);
    r->depth--;
    if (id != BT_GBNF_NO_NODE && peek(r, 0) != ')') {
        return fail(r, BT_ERR_INVALID, at, "the group has no closing )");
    }
    r->p++;
    return id;
}

/* Reads one element. *there_p becomes false if none begins at p. */
static uint32_t element(struct reader *r, bool *there_p)
{
    char c = peek(r, 0);
    *there_p = true;
    switch (c) {
    case '"': return literal(r);
    case '[': return class(r);
    case '(': return group(r);
    case '<': return token(r, false);
    case '!': r->p++; return token(r, true);
    case '.': {
        struct bt_chars any = {0};
        r->p++;
        return put_chars(r, &any, true);
    }
    case '\'': return fail(r, BT_ERR_INVALID, r->p, "literals have double quotes: \"text\"");
    case '*':
    case '+':
    case '?':
    case '{': return fail(r, BT_ERR_INVALID, r->p, "there is nothing before the %c to repeat", c);
    default: break;
    }
    if (!is_name(c)) {
        *there_p = false;
        return BT_GBNF_NO_NODE;
    }
    const char *at = r->p;
    while (is_name(peek(r, 0))) {
        r->p++;
    }
    return node(r, BT_GBNF_RULE, rule(r, at, (size_t)(r->p - at)), 0);
}

/* Returns whether another rule begins at p: a name and "::=". */
static bool rule_begins(const struct reader *r)
{
    struct reader q = *r;
    while (is_name(peek(&q, 0))) {
        q.p++;
    }
    if (q.p == r->p) {
        return false;
    }
    skip(&q, false);
    return peek(&q, 0) == ':' && peek(&q, 1) == ':';
}

static uint32_t sequence(struct reader *r, bool nested)
{
    uint32_t cat = node(r, BT_GBNF_CAT, 0, 0), last = BT_GBNF_NO_NODE;
    while (cat != BT_GBNF_NO_NODE) {
        bool there;
        if (nested && rule_begins(r)) {
            return fail(r, BT_ERR_INVALID, r->p, "a rule begins in a group: a ) is missing");
        }
        uint32_t id = element(r, &there);
        if (!there) {
            break;
        }
        id = quantified(r, id);
        if (id == BT_GBNF_NO_NODE) {
            return id;
        }
        if (last == BT_GBNF_NO_NODE) {
            r->g->nodes[cat].child = id;
        } else {
            r->g->nodes[last].next = id;
        }
        last = id;
        skip(r, nested);
    }
    if (cat != BT_GBNF_NO_NODE && last == BT_GBNF_NO_NODE) {
        r->g->nodes[cat].kind = BT_GBNF_EMPTY;
    }
    return cat;
}

/* At the end of a line: returns whether the next line continues with "|", and moves p there. */
static bool goes_on(struct reader *r)
{
    struct reader q = *r;
    skip(&q, true);
    if (peek(&q, 0) != '|') {
        return false;
    }
    r->p = q.p;
    return true;
}

static uint32_t alternates(struct reader *r, bool nested)
{
    uint32_t alt = node(r, BT_GBNF_ALT, 0, 0), last = BT_GBNF_NO_NODE;
    while (alt != BT_GBNF_NO_NODE) {
        uint32_t id = sequence(r, nested);
        if (id == BT_GBNF_NO_NODE) {
            return id;
        }
        if (last == BT_GBNF_NO_NODE) {
            r->g->nodes[alt].child = id;
        } else {
            r->g->nodes[last].next = id;
        }
        last = id;
        if (peek(r, 0) != '|' && !goes_on(r)) {
            break;
        }
        r->p++;
        skip(r, true);
    }
    return alt;
}

static void definition(struct reader *r)
{
    const char *at = r->p;
    while (is_name(peek(r, 0))) {
        r->p++;
    }
    size_t len = (size_t)(r->p - at);
    skip(r, false);
    if (len == 0 || peek(r, 0) != ':' || peek(r, 1) != ':' || peek(r, 2) != '=') {
        bool lark = len > 0 ? peek(r, 0) == ':' && peek(r, 1) != ':' : *at == '%' || *at == '?';
        fail(r, lark ? BT_ERR_UNSUPPORTED : BT_ERR_INVALID, r->p,
             lark ? "this looks like Lark, which is not supported; write GBNF, llama.cpp's EBNF: "
                    "name ::= ..."
             : len > 0 ? "\"::=\" must follow the name of the rule"
                       : "a rule must begin here: name ::= ...");
        return;
    }
    r->p += 3;
    uint32_t i = rule(r, at, len);
    if (r->g->rules[i].body != BT_GBNF_NO_NODE) {
        uint32_t line, column;
        bt_gbnf_place(r->g, r->g->rules[i].name, &line, &column);
        fail(r, BT_ERR_INVALID, at, "the rule %.*s is defined twice, first in line %u",
             (int)BT_MIN(len, 60u), at, line);
        return;
    }
    r->g->rules[i].name = at;
    skip(r, true);
    if (rule_begins(r)) { /* a rule without a right side: name ::= */
        r->g->rules[i].body = node(r, BT_GBNF_EMPTY, 0, 0);
        return;
    }
    uint32_t body = alternates(r, false);
    r->g->rules[i].body = body;
    if (body != BT_GBNF_NO_NODE && r->p < r->end && *r->p != '\n') {
        fail(r, BT_ERR_INVALID, r->p, "'%c' is not expected here", *r->p);
    }
}

bt_status_t bt_gbnf_parse(struct bt_gbnf *g, const char *text, size_t len, char *err,
                          size_t err_cap)
{
    struct reader r = {.g = g, .p = text, .end = text + len, .err = err, .err_cap = err_cap};
    g->text = text;
    bt_buf_init(&g->pool);
    for (skip(&r, true); r.p < r.end && r.status == BT_OK; skip(&r, true)) {
        definition(&r);
    }
    for (size_t i = 0; i < g->n_rules && r.status == BT_OK; i++) {
        const struct bt_gbnf_rule *u = &g->rules[i];
        if (u->body == BT_GBNF_NO_NODE) {
            fail(&r, BT_ERR_INVALID, u->name, "the rule %.*s is not defined",
                 (int)BT_MIN(u->len, 60u), u->name);
        }
    }
    free(r.table);
    return r.status;
}

void bt_gbnf_cleanup(struct bt_gbnf *g)
{
    free(g->nodes);
    free(g->rules);
    bt_chars_cleanup(&g->ranges);
    bt_buf_cleanup(&g->pool);
}
