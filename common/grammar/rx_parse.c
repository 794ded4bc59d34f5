/* Reads patterns of ECMA-262 with the u flag into a tree (rx_ast.h). Real schemas use more than
 * the standard allows. The reader takes this as the usual validators do: escapes of characters
 * that need none, a bare { } or ], \A \Z \z, (?P<name>...), (?#...), the flags i and s. Pure. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/grammar/rx_ast.h"

#define DEPTH_MAX  200       /* depth of groups; the reader recurses */
#define NODES_MAX  (1 << 20) /* a node takes about 80 bytes */
#define RANGES_MAX (1 << 17)
#define WORK_MAX   (1 << 20) /* a unit: about 10 ns */
#define COUNT_MAX  (1 << 24) /* count of a quantifier; also the product of nested ones */

struct flags {
    bool fold;    /* i */
    bool dot_all; /* s */
};

struct parser {
    const char *p;
    size_t len, i;
    struct flags flags;
    struct bt_ast *ast;
    struct bt_ast_err *err;
    uint32_t depth;
    size_t work;
};

bool bt_ast_fail(struct bt_ast_err *e, bt_status_t status, size_t at, const char *fmt, ...)
{
    if (e->status != BT_OK) {
        return false;
    }
    e->status = status;
    if (e->cap > 0) {
        int n = snprintf(e->text, e->cap, "at offset %zu of the pattern: ", at);
        va_list ap;
        va_start(ap, fmt);
        if (n > 0 && (size_t)n < e->cap) {
            vsnprintf(e->text + n, e->cap - (size_t)n, fmt, ap);
        }
        va_end(ap);
    }
    return false;
}

#define FAIL(p, status, ...) bt_ast_fail((p)->err, status, (p)->i, __VA_ARGS__)

static bool more(const struct parser *p)
{
    return p->i < p->len;
}

static char peek(const struct parser *p, size_t ahead)
{
    return p->i + ahead < p->len ? p->p[p->i + ahead] : '\0';
}

static bool eat(struct parser *p, const char *text)
{
    size_t n = strlen(text);
    if (p->len - p->i < n || memcmp(p->p + p->i, text, n) != 0) {
        return false;
    }
    p->i += n;
    return true;
}

static bool spend(struct parser *p, size_t work)
{
    p->work += work;
    return p->work <= WORK_MAX ||
           FAIL(p, BT_ERR_EXHAUSTED, "the pattern is too large; make it smaller");
}

/* ---- nodes ---- */
static uint32_t node(struct parser *p, enum bt_ast_kind kind)
{
    struct bt_ast *a = p->ast;
    if (a->n == NODES_MAX) {
        FAIL(p, BT_ERR_EXHAUSTED, "the pattern is too large; make it smaller");
        return BT_AST_NO_NODE;
    }
    if (a->n == a->cap) {
        a->cap = a->cap > 0 ? 2 * a->cap : 64;
        a->nodes = bt_realloc(a->nodes, a->cap * sizeof(*a->nodes));
    }
    a->nodes[a->n] = (struct bt_ast_node){.kind = kind,
                                          .plain = kind <= BT_AST_REPEAT,
                                          .edges = kind <= BT_AST_END,
                                          .last = BT_AST_NO_NODE,
                                          .prev = BT_AST_NO_NODE,
                                          .at = (uint32_t)p->i,
                                          .weight = kind == BT_AST_CHARS,
                                          .rx = BT_RX_FAILED};
    return (uint32_t)a->n++;
}

static void adopt(struct parser *p, uint32_t parent, uint32_t child)
{
    struct bt_ast_node *a = &p->ast->nodes[parent], *c = &p->ast->nodes[child];
    c->prev = a->last;
    a->last = child;
    a->plain = a->plain && c->plain;
    a->edges = a->edges && c->edges;
    a->weight += c->weight;
}

/* A list with one child becomes that child; a list without children becomes the empty text. */
static uint32_t simplify(struct parser *p, uint32_t list)
{
    struct bt_ast_node *a = &p->ast->nodes[list];
    if (a->last == BT_AST_NO_NODE) {
        a->kind = BT_AST_EMPTY;
        return list;
    }
    return p->ast->nodes[a->last].prev == BT_AST_NO_NODE ? a->last : list;
}

/* Takes c. negate: first negates the set. */
static uint32_t chars_node(struct parser *p, struct bt_chars *c, bool negate)
{
    uint32_t id = node(p, BT_AST_CHARS);
    if (id != BT_AST_NO_NODE) {
        if (p->flags.fold) {
            (void)spend(p, 4096);
            bt_chars_fold(c);
        }
        if (negate) {
            bt_chars_negate(c);
        }
        bt_chars_sort(c);
        struct bt_chars *all = &p->ast->ranges;
        p->ast->nodes[id].first_range = (uint32_t)all->n;
        p->ast->nodes[id].n_ranges = (uint32_t)c->n;
        for (size_t i = 0; i < c->n; i++) {
            bt_chars_add(all, c->v[i].first, c->v[i].last);
        }
        if (all->n > RANGES_MAX || !spend(p, c->n)) {
            FAIL(p, BT_ERR_EXHAUSTED, "the pattern is too large; make it smaller");
            id = BT_AST_NO_NODE;
        }
    }
    bt_chars_cleanup(c);
    return id;
}

/* ---- escapes ---- */
static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The n hexadecimal digits at p->i + from. UINT32_MAX: there are fewer. */
static uint32_t hex(const struct parser *p, size_t from, size_t n)
{
    uint32_t v = 0;
    for (size_t i = 0; i < n; i++) {
        int d = hex_digit(peek(p, from + i));
        if (d < 0) {
            return UINT32_MAX;
        }
        v = v << 4 | (uint32_t)d;
    }
    return v;
}

/* Reads the digits after "\u". */
static bool unicode_escape(struct parser *p, uint32_t *cp_p)
{
    if (peek(p, 0) == '{') {
        size_t n = 1;
        uint32_t v = 0;
        for (; hex_digit(peek(p, n)) >= 0 && v <= BT_CHAR_MAX; n++) {
            v = v << 4 | (uint32_t)hex_digit(peek(p, n));
        }
        if (n == 1 || peek(p, n) != '}' || v > BT_CHAR_MAX) {
            return FAIL(p, BT_ERR_INVALID, "\\u{...} needs a code point of at most 10FFFF");
        }
        p->i += n + 1;
        *cp_p = v;
        return true;
    }
    uint32_t v = hex(p, 0, 4);
    if (v == UINT32_MAX) {
        return FAIL(p, BT_ERR_INVALID, "\\u needs four hexadecimal digits, or {digits}");
    }
    p->i += 4;
    if (v >= 0xd800 && v < 0xdc00 && peek(p, 0) == '\\' && peek(p, 1) == 'u') {
        uint32_t low = hex(p, 2, 4);
        if (low != UINT32_MAX && low >= 0xdc00 && low < 0xe000) {
            p->i += 6;
            v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
        }
    }
    *cp_p = v;
    return true;
}

/* Reads the name after "\p" or "\P". */
static bool property_escape(struct parser *p, bool negate, struct bt_chars *c)
{
    const char *name = p->p + p->i;
    const char *close = peek(p, 0) == '{' ? memchr(name, '}', p->len - p->i) : NULL;
    if (close == NULL) {
        return FAIL(p, BT_ERR_INVALID, "\\p needs a property in braces: \\p{L}");
    }
    struct bt_chars set = {0};
    bool known = spend(p, 512) && bt_chars_property(&set, name + 1, (size_t)(close - name) - 1);
    if (!known) {
        bt_chars_cleanup(&set);
        return FAIL(p, BT_ERR_UNSUPPORTED,
                    "the property %.*s is not known; general categories, Any, ASCII, Assigned, "
                    "White_Space and common scripts are",
                    (int)BT_MIN(close + 1 - name, 40), name);
    }
    if (negate) {
        bt_chars_negate(&set);
    }
    for (size_t i = 0; i < set.n; i++) {
        bt_chars_add(c, set.v[i].first, set.v[i].last);
    }
    bt_chars_cleanup(&set);
    p->i += (size_t)(close + 1 - name);
    return true;
}

/* Reads \d \D \w \W \s \S \p \P; p->i is at the letter. false and no error: it is another
 * escape. */
static bool class_escape(struct parser *p, struct bt_chars *c, bool *is_one)
{
    char e = peek(p, 0);
    *is_one = e != '\0' && strchr("dDwWsSpP", e) != NULL;
    if (!*is_one) {
        return true;
    }
    p->i++;
    if (e == 'p' || e == 'P') {
        return property_escape(p, e == 'P', c);
    }
    struct bt_chars set = {0};
    switch (e) {
    case 'd':
    case 'D': bt_chars_digit(&set); break;
    case 'w':
    case 'W': bt_chars_word(&set); break;
    default: bt_chars_space(&set); break;
    }
    if (e < 'a') {
        if (p->flags.fold) {
            bt_chars_fold(&set);
        }
        bt_chars_negate(&set);
    }
    for (size_t i = 0; i < set.n; i++) {
        bt_chars_add(c, set.v[i].first, set.v[i].last);
    }
    bt_chars_cleanup(&set);
    return spend(p, e == 's' || e == 'S' ? 512 : 8);
}

/* Reads one character, with or without a backslash. */
static bool one_char(struct parser *p, uint32_t *cp_p)
{
    if (!more(p)) {
        return FAIL(p, BT_ERR_INVALID, "the pattern ends in a backslash");
    }
    size_t n = bt_chars_decode(p->p + p->i, p->len - p->i, cp_p);
    if (n == 0) {
        return FAIL(p, BT_ERR_INVALID, "this is not UTF-8");
    }
    p->i += n;
    return true;
}

static bool char_escape(struct parser *p, bool in_class, uint32_t *cp_p)
{
    uint32_t c;
    size_t at = p->i;
    if (!one_char(p, &c)) {
        return false;
    }
    *cp_p = c;
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!letter && !(c >= '0' && c <= '9')) {
        return true;
    }
    switch (c) {
    case 't': *cp_p = 9; return true;
    case 'n': *cp_p = 10; return true;
    case 'v': *cp_p = 11; return true;
    case 'f': *cp_p = 12; return true;
    case 'r': *cp_p = 13; return true;
    case 'u': return unicode_escape(p, cp_p);
    case 'x':
        *cp_p = hex(p, 0, 2);
        if (*cp_p == UINT32_MAX) {
            return FAIL(p, BT_ERR_INVALID, "\\x needs two hexadecimal digits");
        }
        p->i += 2;
        return true;
    case 'c':
        *cp_p = (uint32_t)(uint8_t)peek(p, 0) & 31;
        if (!((peek(p, 0) | 32) >= 'a' && (peek(p, 0) | 32) <= 'z')) {
            return FAIL(p, BT_ERR_INVALID, "\\c needs a letter");
        }
        p->i++;
        return true;
    case 'b':
        if (in_class) {
            *cp_p = 8;
            return true;
        }
        break;
    case '0':
        if (!(peek(p, 0) >= '0' && peek(p, 0) <= '9')) {
            *cp_p = 0;
            return true;
        }
        break;
    default: break;
    }
    p->i = at;
    if (c == 'k' || (c >= '1' && c <= '9')) {
        return FAIL(p, BT_ERR_UNSUPPORTED,
                    "back references cannot be enforced; write the pattern without them");
    }
    return FAIL(p, BT_ERR_INVALID, "\\%c is no escape of ECMA-262", (char)c);
}

/* ---- classes ---- */
/* Reads one item of a class: an escape for a set, which is added to c, or a character (*cp_p). */
static bool class_item(struct parser *p, struct bt_chars *c, uint32_t *cp_p, bool *is_set)
{
    *is_set = false;
    if (!eat(p, "\\")) {
        return one_char(p, cp_p);
    }
    if (!class_escape(p, c, is_set)) {
        return false;
    }
    return *is_set || char_escape(p, true, cp_p);
}

/* Reads a class, after "[". */
static uint32_t class_node(struct parser *p)
{
    struct bt_chars c = {0};
    size_t at = p->i - 1;
    bool negate = eat(p, "^"), ok = true;
    while (ok && more(p) && peek(p, 0) != ']') {
        uint32_t first = 0, last = 0;
        bool set, set_2 = false;
        ok = class_item(p, &c, &first, &set) && spend(p, 1);
        last = first;
        if (ok && peek(p, 0) == '-' && p->i + 1 < p->len && peek(p, 1) != ']') {
            p->i++;
            ok = class_item(p, &c, &last, &set_2);
            /* [\w-.]: without the u flag this is a set, a minus and the rest */
            if (ok && (set || set_2)) {
                bt_chars_add(&c, '-', '-');
                if (!set_2) {
                    bt_chars_add(&c, last, last);
                }
                last = first;
            }
        }
        if (ok && last < first) {
            ok = FAIL(p, BT_ERR_INVALID, "a range of the class ends before it begins");
        }
        if (ok && !set) {
            bt_chars_add(&c, first, last);
        }
    }
    if (ok && !eat(p, "]")) {
        ok = bt_ast_fail(p->err, BT_ERR_INVALID, at, "the class has no closing ]");
    }
    if (!ok) {
        bt_chars_cleanup(&c);
        return BT_AST_NO_NODE;
    }
    return chars_node(p, &c, negate);
}

/* ---- groups ---- */
static uint32_t parse_alt(struct parser *p);

/* Reads the flags of "(?" at p->i, up to ":" or ")". */
static bool group_flags(struct parser *p, bool *scoped)
{
    bool on = true;
    for (;; p->i++) {
        switch (peek(p, 0)) {
        case '-': on = false; break;
        case 'i': p->flags.fold = on; break;
        case 's': p->flags.dot_all = on; break;
        case 'u':
        case 'a': break;
        case ':':
        case ')':
            *scoped = peek(p, 0) == ':';
            p->i++;
            return true;
        default:
            return FAIL(p, BT_ERR_UNSUPPORTED,
                        "this kind of group, or flag, cannot be enforced; the flags i and s can");
        }
    }
}

static bool group_name(struct parser *p)
{
    const char *close = memchr(p->p + p->i, '>', p->len - p->i);
    if (close == NULL || close == p->p + p->i) {
        return FAIL(p, BT_ERR_INVALID, "the group's name has no end");
    }
    p->i = (size_t)(close + 1 - p->p);
    return true;
}

/* Reads the inside of a group, up to its closing parenthesis. */
static uint32_t group_body(struct parser *p, size_t at)
{
    uint32_t id = parse_alt(p);
    if (id != BT_AST_NO_NODE && !eat(p, ")")) {
        bt_ast_fail(p->err, BT_ERR_INVALID, at, "the group has no closing )");
        id = BT_AST_NO_NODE;
    }
    return id;
}

static uint32_t look_node(struct parser *p, bool behind, bool negative, size_t at)
{
    uint32_t id = node(p, BT_AST_LOOK);
    uint32_t child = id == BT_AST_NO_NODE ? id : group_body(p, at);
    if (child == BT_AST_NO_NODE) {
        return child;
    }
    adopt(p, id, child);
    struct bt_ast_node *a = &p->ast->nodes[id];
    a->plain = a->edges = false;
    a->behind = behind;
    a->negative = negative;
    a->at = (uint32_t)at;
    a->weight = 0;
    return id;
}

/* Reads a group, after "(". */
static uint32_t group_node(struct parser *p)
{
    size_t at = p->i - 1;
    struct flags outer = p->flags;
    bool scoped = true, behind = false;
    uint32_t id;
    if (eat(p, "?=") || eat(p, "?!") || (behind = eat(p, "?<=") || eat(p, "?<!"))) {
        id = look_node(p, behind, p->p[p->i - 1] == '!', at);
    } else if (eat(p, "?#")) {
        const char *close = memchr(p->p + p->i, ')', p->len - p->i);
        if (close == NULL) {
            bt_ast_fail(p->err, BT_ERR_INVALID, at, "the group has no closing )");
            return BT_AST_NO_NODE;
        }
        p->i = (size_t)(close + 1 - p->p);
        return node(p, BT_AST_EMPTY);
    } else if (eat(p, "?<") || eat(p, "?P<")) {
        id = group_name(p) ? group_body(p, at) : BT_AST_NO_NODE;
    } else if (eat(p, "?P=")) {
        FAIL(p, BT_ERR_UNSUPPORTED,
             "back references cannot be enforced; write the pattern without them");
        return BT_AST_NO_NODE;
    } else if (eat(p, "?")) {
        if (!group_flags(p, &scoped)) {
            return BT_AST_NO_NODE;
        }
        if (!scoped) { /* the flags hold up to the end of the group around them */
            return node(p, BT_AST_EMPTY);
        }
        id = group_body(p, at);
    } else {
        id = group_body(p, at);
    }
    p->flags = outer;
    return id;
}

/* ---- terms ---- */
static uint32_t chars_of(struct parser *p, uint32_t cp)
{
    struct bt_chars c = {0};
    bt_chars_add(&c, cp, cp);
    return chars_node(p, &c, false);
}

static uint32_t dot_node(struct parser *p)
{
    struct bt_chars c = {0};
    if (p->flags.dot_all) {
        bt_chars_add(&c, 0, BT_CHAR_MAX);
        return chars_node(p, &c, false);
    }
    bt_chars_add(&c, '\n', '\n');
    bt_chars_add(&c, '\r', '\r');
    bt_chars_add(&c, 0x2028, 0x2029);
    return chars_node(p, &c, true);
}

/* Reads an escape, after the backslash. */
static uint32_t escape_node(struct parser *p)
{
    switch (peek(p, 0)) {
    case 'b': p->i++; return node(p, BT_AST_EDGE);
    case 'B': p->i++; return node(p, BT_AST_NOT_EDGE);
    case 'A': p->i++; return node(p, BT_AST_START);
    case 'Z':
    case 'z': p->i++; return node(p, BT_AST_END);
    default: break;
    }
    struct bt_chars c = {0};
    bool set;
    if (!class_escape(p, &c, &set)) {
        bt_chars_cleanup(&c);
        return BT_AST_NO_NODE;
    }
    if (set) {
        return chars_node(p, &c, false);
    }
    uint32_t cp;
    return char_escape(p, false, &cp) ? chars_of(p, cp) : BT_AST_NO_NODE;
}

static uint32_t parse_atom(struct parser *p)
{
    uint32_t cp;
    switch (peek(p, 0)) {
    case '^': p->i++; return node(p, BT_AST_START);
    case '$': p->i++; return node(p, BT_AST_END);
    case '.': p->i++; return dot_node(p);
    case '[': p->i++; return class_node(p);
    case '\\': p->i++; return escape_node(p);
    case '*':
    case '+':
    case '?':
        FAIL(p, BT_ERR_INVALID, "there is nothing before the %c to repeat", peek(p, 0));
        return BT_AST_NO_NODE;
    case '(': {
        if (p->depth == DEPTH_MAX) {
            FAIL(p, BT_ERR_EXHAUSTED, "groups are nested more than %d deep; nest fewer", DEPTH_MAX);
            return BT_AST_NO_NODE;
        }
        p->i++;
        p->depth++;
        uint32_t id = group_node(p);
        p->depth--;
        return id;
    }
    default: return one_char(p, &cp) ? chars_of(p, cp) : BT_AST_NO_NODE;
    }
}

/* Reads digits at p->i + *n. false: there are none. */
static bool digits(const struct parser *p, size_t *n, uint32_t *v_p)
{
    size_t from = *n;
    uint64_t v = 0;
    for (; peek(p, *n) >= '0' && peek(p, *n) <= '9'; (*n)++) {
        v = BT_MIN(v * 10 + (uint64_t)(peek(p, *n) - '0'), UINT32_MAX - 1);
    }
    *v_p = (uint32_t)v;
    return *n > from;
}

/* Reads {n} {n,} {n,m} at p->i. Returns the length; 0: the brace is an ordinary character. */
static size_t braces(const struct parser *p, uint32_t *min_p, uint32_t *max_p)
{
    size_t n = 1;
    if (!digits(p, &n, min_p)) {
        return 0;
    }
    *max_p = *min_p;
    if (peek(p, n) == ',') {
        n++;
        if (!digits(p, &n, max_p)) {
            *max_p = BT_RX_NO_MAX;
        }
    }
    return peek(p, n) == '}' ? n + 1 : 0;
}

static uint32_t repeat(struct parser *p, uint32_t child, uint32_t min, uint32_t max)
{
    if (max < min) {
        FAIL(p, BT_ERR_INVALID, "the quantifier's maximum is below its minimum");
        return BT_AST_NO_NODE;
    }
    /* an assertion that holds once also holds many times */
    if (p->ast->nodes[child].kind >= BT_AST_START) {
        return min > 0 ? child : node(p, BT_AST_EMPTY);
    }
    uint32_t id = node(p, BT_AST_REPEAT);
    if (id == BT_AST_NO_NODE) {
        return id;
    }
    adopt(p, id, child);
    struct bt_ast_node *a = &p->ast->nodes[id];
    a->min = min;
    a->max = max;
    double times = max != BT_RX_NO_MAX ? max : min;
    a->weight *= BT_MAX(times, 1.0);
    if (times > COUNT_MAX || a->weight > COUNT_MAX) {
        FAIL(p, BT_ERR_EXHAUSTED, "the repeats are too large: together more than %d characters",
             COUNT_MAX);
        return BT_AST_NO_NODE;
    }
    return id;
}

static uint32_t parse_term(struct parser *p)
{
    uint32_t id = parse_atom(p);
    if (id == BT_AST_NO_NODE) {
        return id;
    }
    uint32_t min = 0, max = BT_RX_NO_MAX;
    size_t n = 1;
    switch (peek(p, 0)) {
    case '*': break;
    case '+': min = 1; break;
    case '?': max = 1; break;
    case '{':
        n = braces(p, &min, &max);
        if (n == 0 && peek(p, 1) == ',' && peek(p, 2) >= '0' && peek(p, 2) <= '9') {
            FAIL(p, BT_ERR_UNSUPPORTED, "a quantifier without a minimum; write {0,n}");
            return BT_AST_NO_NODE;
        }
        break;
    default: n = 0; break;
    }
    if (n == 0) {
        return id;
    }
    id = repeat(p, id, min, max);
    p->i += n;
    if (peek(p, 0) == '+') {
        FAIL(p, BT_ERR_UNSUPPORTED, "a possessive quantifier cannot be enforced; remove its +");
        return BT_AST_NO_NODE;
    }
    p->i += peek(p, 0) == '?'; /* a lazy quantifier has the same language */
    if (id != BT_AST_NO_NODE && (peek(p, 0) == '*' || peek(p, 0) == '?')) {
        FAIL(p, BT_ERR_INVALID, "a quantifier follows a quantifier");
        return BT_AST_NO_NODE;
    }
    return id;
}

static uint32_t parse_cat(struct parser *p)
{
    uint32_t cat = node(p, BT_AST_CAT);
    while (cat != BT_AST_NO_NODE && more(p) && peek(p, 0) != '|' && peek(p, 0) != ')') {
        uint32_t id = parse_term(p);
        if (id == BT_AST_NO_NODE) {
            return id;
        }
        if (p->ast->nodes[id].kind != BT_AST_EMPTY) {
            adopt(p, cat, id);
        }
    }
    return cat == BT_AST_NO_NODE ? cat : simplify(p, cat);
}

static uint32_t parse_alt(struct parser *p)
{
    uint32_t alt = node(p, BT_AST_ALT);
    if (alt == BT_AST_NO_NODE) {
        return alt;
    }
    do {
        uint32_t id = parse_cat(p);
        if (id == BT_AST_NO_NODE) {
            return id;
        }
        adopt(p, alt, id);
    } while (eat(p, "|"));
    return simplify(p, alt);
}

bt_status_t bt_rx_parse(struct bt_rx_set *s, const char *pattern, size_t len, bool search,
                        enum bt_rx_encoding enc, bt_rx_t *out, char *err, size_t err_cap)
{
    struct bt_ast ast = {0};
    struct bt_ast_err e = {.status = BT_OK, .text = err, .cap = err_cap};
    struct parser p = {.p = pattern, .len = len, .ast = &ast, .err = &e};
    if (len >= UINT32_MAX) {
        FAIL(&p, BT_ERR_EXHAUSTED, "the pattern is too large; make it smaller");
    } else {
        ast.root = parse_alt(&p);
        if (ast.root != BT_AST_NO_NODE && more(&p)) {
            FAIL(&p, BT_ERR_INVALID, "this ) closes no group");
        }
    }
    bt_rx_t rx = BT_RX_FAILED;
    if (e.status == BT_OK && bt_ast_compile(&ast, s, search, enc, &rx, &e)) {
        *out = rx;
    }
    free(ast.nodes);
    bt_chars_cleanup(&ast.ranges);
    return e.status;
}
