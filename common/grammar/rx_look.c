/* Compiles a parsed pattern (rx_ast.h) to the language of the texts in which it matches.
 * A node is compiled with its continuation: the language of the text that may follow its match. So
 * $ intersects the continuation with the empty text. A look-ahead intersects it with the language
 * that it looks for, or with the complement of that language.
 * ^, \b and a look-behind at one character depend on the text before them. For these, a
 * continuation is several languages: one for the start of the text, and one for each class of
 * characters before it that the pattern tells apart. Other look-behinds are possible at the top of
 * an alternative: there they intersect the text before them.
 * All languages consist of whole characters of the encoding, and complements stay within them. */
#include <stdlib.h>

#include "common/grammar/rx_ast.h"

/* most copies of a repeated node with assertions; the copies of nested repeats multiply */
#define UNROLL_MAX 256
#define SEARCH_MAX 2000      /* states that may be visited to prove that a language is empty */
#define STEPS_MAX  (1 << 18) /* visits of nodes with assertions and of their children */

/* contexts: the start of the text; class 0 and further classes of the character before */
enum { AT_START, AFTER };
#define CONTEXTS 9
struct rest { /* the continuation for each context */
    bt_rx_t v[CONTEXTS];
};

struct look {
    struct bt_ast *ast;
    struct bt_rx_set *s;
    enum bt_rx_encoding enc;
    struct bt_ast_err *err;
    bt_rx_t any;                      /* any text */
    bt_rx_t some;                     /* any text but the empty one */
    bt_rx_t word;                     /* any text that begins with a word character */
    int n;                            /* number of contexts in use */
    struct bt_chars before[CONTEXTS]; /* characters of each context but the first */
    bt_rx_t ends[CONTEXTS];           /* any text that ends with a character of the context */
    uint32_t after_word;              /* the contexts after a word character, as bits */
    /* product of the copies of all unrolled repeats around the node */
    uint32_t copies;
    uint32_t steps;
};

static struct rest after(struct look *l, uint32_t id, struct rest k);

static struct rest same(bt_rx_t x)
{
    struct rest out;
    for (int c = 0; c < CONTEXTS; c++) {
        out.v[c] = x;
    }
    return out;
}

static bool is_same(const struct rest *k)
{
    for (int c = 1; c < CONTEXTS; c++) {
        if (k->v[c] != k->v[0]) {
            return false;
        }
    }
    return true;
}

static void refuse(struct look *l, uint32_t id, const char *what)
{
    bt_ast_fail(l->err, BT_ERR_UNSUPPORTED, l->ast->nodes[id].at, "%s", what);
}

static bool stopped(struct look *l, uint32_t id)
{
    if (l->err->status == BT_OK && (bt_rx_set_full(l->s) || l->steps > STEPS_MAX)) {
        bt_ast_fail(l->err, BT_ERR_EXHAUSTED, l->ast->nodes[id].at,
                    "the pattern is too large; make it smaller");
    }
    return l->err->status != BT_OK;
}

static bt_rx_t either(struct look *l, bt_rx_t a, bt_rx_t b)
{
    return a == BT_RX_NONE || a == b ? b : b == BT_RX_NONE ? a : bt_rx_or(l->s, a, b);
}

static bt_rx_t both(struct look *l, bt_rx_t a, bt_rx_t b)
{
    return a == b ? a : bt_rx_and(l->s, a, b);
}

static bt_rx_t join(struct look *l, bt_rx_t a, bt_rx_t b)
{
    return a == BT_RX_NONE || b == BT_RX_NONE ? BT_RX_NONE : bt_rx_concat(l->s, a, b);
}

static bool makes_empty(const struct look *l, bt_rx_t x)
{
    return x != BT_RX_FAILED && bt_rx_accepts(l->s, x);
}

/* x without the empty text. */
static bt_rx_t non_empty(struct look *l, bt_rx_t x)
{
    return x == l->any ? l->some : makes_empty(l, x) ? both(l, x, l->some) : x;
}

/* ---- nodes without assertions ---- */
static bt_rx_t chars(struct look *l, const struct bt_ast_node *a)
{
    return a->n_ranges == 0
               ? BT_RX_NONE
               : bt_rx_chars(l->s, l->enc, l->ast->ranges.v + a->first_range, a->n_ranges);
}

static bt_rx_t plain(struct look *l, uint32_t id);

/* The language that the text on the side of a look-around must be in, for look-around that its own
 * sequence decides. */
static bt_rx_t condition(struct look *l, const struct bt_ast_node *a)
{
    bt_rx_t x = plain(l, a->last);
    x = a->behind ? join(l, l->any, x) : join(l, x, l->any);
    return a->negative ? bt_rx_not(l->s, x) : x;
}

/* Compiles a sequence that decides its look-around. A look-ahead is an intersection with the
 * nodes behind it. A look-behind is an intersection with the nodes before it, from the last
 * look-ahead on. */
static bt_rx_t deciding(struct look *l, uint32_t id)
{
    const struct bt_ast_node *nodes = l->ast->nodes;
    size_t n = 0;
    for (uint32_t i = nodes[id].last; i != BT_AST_NO_NODE; i = nodes[i].prev) {
        n++;
    }
    uint32_t *items = bt_calloc(n, sizeof(*items));
    bt_rx_t *parts = bt_calloc(n + 1, sizeof(*parts)); /* the part before each look-ahead */
    for (uint32_t i = nodes[id].last, k = (uint32_t)n; i != BT_AST_NO_NODE; i = nodes[i].prev) {
        items[--k] = i;
    }
    bt_rx_t x = BT_RX_EMPTY;
    for (size_t i = 0; i < n; i++) {
        const struct bt_ast_node *a = &nodes[items[i]];
        if (a->kind != BT_AST_LOOK) {
            x = join(l, x, plain(l, items[i]));
        } else if (a->behind) {
            x = both(l, x, condition(l, a));
        } else {
            parts[i] = x;
            x = BT_RX_EMPTY;
        }
    }
    for (size_t i = n; i > 0; i--) {
        const struct bt_ast_node *a = &nodes[items[i - 1]];
        if (a->kind == BT_AST_LOOK && !a->behind) {
            x = join(l, parts[i - 1], both(l, x, condition(l, a)));
        }
    }
    free(items);
    free(parts);
    return x;
}

static bt_rx_t plain(struct look *l, uint32_t id)
{
    struct bt_ast_node *a = &l->ast->nodes[id];
    if (a->rx != BT_RX_FAILED) {
        return a->rx;
    }
    if (stopped(l, id)) {
        return BT_RX_NONE;
    }
    bt_rx_t x;
    switch (a->kind) {
    case BT_AST_CHARS: x = chars(l, a); break;
    case BT_AST_CAT:
        x = BT_RX_EMPTY;
        if (a->decides) {
            x = deciding(l, id);
            break;
        }
        for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            x = join(l, plain(l, i), x);
        }
        break;
    case BT_AST_ALT:
        x = BT_RX_NONE;
        for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            x = either(l, plain(l, i), x);
        }
        break;
    case BT_AST_REPEAT: x = bt_rx_repeat(l->s, plain(l, a->last), a->min, a->max); break;
    case BT_AST_EMPTY:
    case BT_AST_START:
    case BT_AST_END:
    case BT_AST_EDGE:
    case BT_AST_NOT_EDGE:
    case BT_AST_LOOK:
    default: x = BT_RX_EMPTY; break;
    }
    l->ast->nodes[id].rx = x;
    return x;
}

/* The texts of x, followed by k. */
static struct rest put(struct look *l, bt_rx_t x, struct rest k)
{
    if (x == BT_RX_EMPTY) {
        return k;
    }
    if (is_same(&k)) {
        return same(join(l, x, k.v[0]));
    }
    bt_rx_t full = non_empty(l, x), tail = BT_RX_NONE;
    uint32_t done = 0;
    /* contexts with the same continuation are compiled together */
    for (int c = AFTER; c < l->n; c++) {
        bt_rx_t ends = BT_RX_NONE;
        uint32_t group = 0;
        for (int d = c; d < l->n && !(done >> c & 1); d++) {
            if (k.v[d] == k.v[c]) {
                group |= 1u << d;
                ends = either(l, ends, l->ends[d]);
            }
        }
        done |= group;
        bool all = group + 2 == 1u << l->n; /* all contexts but the start */
        if (group != 0 && k.v[c] != BT_RX_NONE) {
            bt_rx_t part = all ? full : both(l, full, ends);
            tail = either(l, tail, join(l, part, k.v[c]));
        }
    }
    struct rest out = same(tail);
    for (int c = 0; makes_empty(l, x) && c < CONTEXTS; c++) {
        out.v[c] = either(l, k.v[c], tail);
    }
    return out;
}

static struct rest union_of(struct look *l, struct rest a, struct rest b)
{
    for (int c = 0; c < CONTEXTS; c++) {
        a.v[c] = either(l, a.v[c], b.v[c]);
    }
    return a;
}

/* ---- assertions ---- */
#define NOT_SIMPLE UINT32_MAX

static struct rest only_in(struct rest k, uint32_t contexts)
{
    for (int c = 0; c < CONTEXTS; c++) {
        k.v[c] = contexts >> c & 1 ? k.v[c] : BT_RX_NONE;
    }
    return k;
}

static struct rest at_end(struct look *l, struct rest k)
{
    for (int c = 0; c < CONTEXTS; c++) {
        k.v[c] = makes_empty(l, k.v[c]) ? BT_RX_EMPTY : BT_RX_NONE;
    }
    return k;
}

static struct rest at_edge(struct look *l, struct rest k, bool negative)
{
    bt_rx_t next[2] = {bt_rx_not(l->s, l->word), l->word};
    for (int c = 0; c < CONTEXTS; c++) {
        k.v[c] = both(l, k.v[c], next[!(l->after_word >> c & 1) != negative]);
    }
    return k;
}

/* What a look-ahead requires of the text that follows, for each context before it. */
static struct rest looked_for(struct look *l, const struct bt_ast_node *a)
{
    bool negative = a->negative;
    struct rest x = after(l, a->last, same(l->any));
    for (int c = 0; negative && c < CONTEXTS; c++) {
        x.v[c] = bt_rx_not(l->s, x.v[c]);
    }
    return x;
}

static struct rest look_ahead(struct look *l, uint32_t id, struct rest k)
{
    struct rest x = looked_for(l, &l->ast->nodes[id]);
    for (int c = 0; c < CONTEXTS; c++) {
        k.v[c] = both(l, k.v[c], x.v[c]);
    }
    return k;
}

/* ---- a node whose only assertions are ^ and $, in four languages ---- */
/* bits: the text must begin at the start, must reach the end */
enum { FREE, FROM_START, TO_END, WHOLE, WAYS };
struct ways {
    bt_rx_t v[WAYS];
};

static struct ways ways_cat(struct look *l, struct ways a, struct ways b)
{
    struct ways out = {{BT_RX_NONE, BT_RX_NONE, BT_RX_NONE, BT_RX_NONE}};
    for (unsigned i = 0; i < WAYS; i++) {
        for (unsigned j = 0; j < WAYS; j++) {
            bt_rx_t x = a.v[i], y = b.v[j];
            if (j & FROM_START) { /* no text may be before it */
                x = makes_empty(l, x) ? BT_RX_EMPTY : BT_RX_NONE;
            }
            if (i & TO_END) {
                y = makes_empty(l, y) ? BT_RX_EMPTY : BT_RX_NONE;
            }
            out.v[i | j] = either(l, out.v[i | j], join(l, x, y));
        }
    }
    return out;
}

/* a*, from the four languages of a. Of copies that are not empty, only the first can need the start
 * of the text, and only the last can need its end. */
static struct ways ways_star(struct look *l, struct ways a)
{
    bt_rx_t star = bt_rx_repeat(l->s, a.v[FREE], 0, BT_RX_NO_MAX);
    bt_rx_t first = join(l, a.v[FROM_START], star), last = join(l, star, a.v[TO_END]);
    return (struct ways){{star, first, last, either(l, a.v[WHOLE], join(l, first, a.v[TO_END]))}};
}

static struct ways ways_of(struct look *l, uint32_t id)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    struct ways out = {{BT_RX_NONE, BT_RX_NONE, BT_RX_NONE, BT_RX_NONE}};
    l->steps++;
    if (stopped(l, id)) {
        return out;
    }
    if (a->plain) {
        out.v[FREE] = plain(l, id);
    } else if (a->kind == BT_AST_START) {
        out.v[FROM_START] = BT_RX_EMPTY;
    } else if (a->kind == BT_AST_END) {
        out.v[TO_END] = BT_RX_EMPTY;
    } else if (a->kind == BT_AST_ALT) {
        for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            struct ways w = ways_of(l, i);
            for (int k = 0; k < WAYS; k++) {
                out.v[k] = either(l, out.v[k], w.v[k]);
            }
        }
    } else if (a->kind == BT_AST_CAT) {
        out.v[FREE] = BT_RX_EMPTY;
        for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            out = ways_cat(l, ways_of(l, i), out);
        }
    } else {
        BT_ASSERT(a->kind == BT_AST_REPEAT);
        uint32_t n = a->max == BT_RX_NO_MAX ? a->min : a->max;
        if (n > UNROLL_MAX) {
            refuse(l, id, "a group with ^ or $ is repeated too often");
            return out;
        }
        struct ways w = ways_of(l, a->last), maybe = w;
        maybe.v[FREE] = either(l, BT_RX_EMPTY, w.v[FREE]);
        out = a->max == BT_RX_NO_MAX ? ways_star(l, w) : (struct ways){{BT_RX_EMPTY, 0, 0, 0}};
        for (uint32_t i = 0; i < n && !stopped(l, id); i++) {
            out = ways_cat(l, i < n - a->min ? maybe : w, out);
        }
    }
    return out;
}

static struct rest put_ways(struct look *l, const struct ways *w, struct rest k)
{
    struct rest end = at_end(l, k), out = put(l, w->v[FREE], k);
    out = union_of(l, out, put(l, w->v[TO_END], end));
    bt_rx_t first =
        either(l, put(l, w->v[FROM_START], k).v[AT_START], put(l, w->v[WHOLE], end).v[AT_START]);
    out.v[AT_START] = either(l, out.v[AT_START], first);
    return out;
}

/* ---- repeats of nodes with look-ahead ---- */
/* One character with look-aheads before and after it. A function that fills it in returns false
 * if the node has another form. */
struct step {
    bt_rx_t c, before, behind; /* BT_RX_FAILED: there is no condition */
    uint32_t chars;            /* the node of the character */
};

static bool add_condition(struct look *l, uint32_t id, bt_rx_t *cond)
{
    struct rest x = looked_for(l, &l->ast->nodes[id]);
    *cond = *cond == BT_RX_FAILED ? x.v[0] : both(l, *cond, x.v[0]);
    return is_same(&x);
}

static bool step_of(struct look *l, uint32_t id, struct step *st)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    *st = (struct step){BT_RX_FAILED, BT_RX_FAILED, BT_RX_FAILED, BT_AST_NO_NODE};
    bool cat = a->kind == BT_AST_CAT;
    for (uint32_t i = cat ? a->last : id; i != BT_AST_NO_NODE;
         i = cat ? l->ast->nodes[i].prev : BT_AST_NO_NODE) {
        const struct bt_ast_node *b = &l->ast->nodes[i];
        bool ahead = b->kind == BT_AST_LOOK && !b->behind;
        if (b->kind == BT_AST_CHARS && st->chars == BT_AST_NO_NODE) {
            st->chars = i;
            st->c = plain(l, i);
        } else if (!ahead ||
                   !add_condition(l, i, st->chars == BT_AST_NO_NODE ? &st->behind : &st->before)) {
            return false;
        }
    }
    return st->chars != BT_AST_NO_NODE;
}

static bool steps_meet(const struct look *l, uint32_t a, uint32_t b)
{
    const struct bt_ast_node *x = &l->ast->nodes[a], *y = &l->ast->nodes[b];
    const struct bt_rx_range *v = l->ast->ranges.v;
    return bt_chars_meet(v + x->first_range, x->n_ranges, v + y->first_range, y->n_ranges);
}

/* (step | step ...)* up to the end of the text. Its texts consist of the steps' characters, and
 * contain no character whose step's condition does not hold. The steps have no character in
 * common, so a character says which step it belongs to. false: the node has another form. */
static bool star_to_end(struct look *l, uint32_t id, bt_rx_t *out)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    struct step steps[8];
    size_t n = 0;
    bool alt = a->kind == BT_AST_ALT;
    for (uint32_t i = alt ? a->last : id; i != BT_AST_NO_NODE;
         i = alt ? l->ast->nodes[i].prev : BT_AST_NO_NODE) {
        if (n == BT_ARRAY_LEN(steps) || !step_of(l, i, &steps[n])) {
            return false;
        }
        for (size_t k = 0; k < n; k++) {
            if (steps_meet(l, steps[k].chars, steps[n].chars)) {
                return false;
            }
        }
        n++;
    }
    bt_rx_t one = BT_RX_NONE;
    for (size_t i = 0; i < n; i++) {
        one = either(l, one, steps[i].c);
    }
    bt_rx_t star = bt_rx_repeat(l->s, one, 0, BT_RX_NO_MAX), x = star;
    for (size_t i = 0; i < n; i++) {
        if (steps[i].behind != BT_RX_FAILED) {
            bt_rx_t bad = join(l, steps[i].c, bt_rx_not(l->s, steps[i].behind));
            x = both(l, x, bt_rx_not(l->s, join(l, star, bad)));
        }
        if (steps[i].before != BT_RX_FAILED) {
            bt_rx_t bad = both(l, join(l, steps[i].c, l->any), bt_rx_not(l->s, steps[i].before));
            x = both(l, x, bt_rx_not(l->s, join(l, star, bad)));
        }
    }
    *out = x;
    return true;
}

/* What can remain of a match of a plain node after its first character or more were removed. The
 * result of a repeat may contain more texts than that. */
static bt_rx_t cut(struct look *l, uint32_t id)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    bt_rx_t out = BT_RX_NONE, behind = BT_RX_EMPTY;
    switch (a->kind) {
    case BT_AST_CHARS: return BT_RX_EMPTY;
    case BT_AST_CAT:
    case BT_AST_ALT:
        for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            out = either(l, out, join(l, cut(l, i), behind));
            behind = a->kind == BT_AST_CAT ? join(l, plain(l, i), behind) : behind;
        }
        return out;
    case BT_AST_REPEAT:
        behind =
            bt_rx_repeat(l->s, plain(l, a->last), 0, a->max == BT_RX_NO_MAX ? a->max : a->max - 1);
        return a->max == 0 ? BT_RX_NONE : join(l, cut(l, a->last), behind);
    case BT_AST_EMPTY:
    case BT_AST_START:
    case BT_AST_END:
    case BT_AST_EDGE:
    case BT_AST_NOT_EDGE:
    case BT_AST_LOOK:
    default: return BT_RX_NONE;
    }
}

/* ((?!X)C)* before k: characters of C that contain no X, then k. This is right only if no X
 * begins before k and ends in it, as in ((?!-->).)*-->. false: an X may do so, or the node has
 * another form. */
static bool star_before(struct look *l, uint32_t id, bt_rx_t k, bt_rx_t *out)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    if (a->kind != BT_AST_CAT || l->ast->nodes[a->last].kind != BT_AST_CHARS) {
        return false;
    }
    bt_rx_t x = bt_rx_repeat(l->s, plain(l, a->last), 0, BT_RX_NO_MAX);
    for (uint32_t i = l->ast->nodes[a->last].prev; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
        const struct bt_ast_node *b = &l->ast->nodes[i];
        if (b->kind != BT_AST_LOOK || b->behind || !b->negative || !l->ast->nodes[b->last].plain ||
            l->ast->nodes[b->last].decides) {
            return false;
        }
        bt_rx_t ends = join(l, both(l, cut(l, b->last), l->some), l->any);
        bool none;
        if (bt_rx_is_none(l->s, both(l, ends, k), SEARCH_MAX, &none) != BT_OK || !none) {
            return false;
        }
        bt_rx_t with = join(l, l->any, join(l, plain(l, b->last), l->any));
        x = both(l, x, bt_rx_not(l->s, with));
    }
    *out = join(l, x, k);
    return true;
}

static struct rest repeated(struct look *l, uint32_t id, struct rest k)
{
    struct bt_ast_node a = l->ast->nodes[id];
    if (a.edges) {
        struct ways w = ways_of(l, id);
        return put_ways(l, &w, k);
    }
    uint32_t n = a.max == BT_RX_NO_MAX ? a.min : a.max;
    struct rest out = k;
    if (a.max == BT_RX_NO_MAX && !(is_same(&k) && k.v[0] == l->any)) {
        bt_rx_t star;
        bool ok = is_same(&k) && (k.v[0] == BT_RX_EMPTY ? star_to_end(l, a.last, &star)
                                                        : star_before(l, a.last, k.v[0], &star));
        if (!ok) {
            refuse(l, id,
                   "this group with look-around is repeated without a limit, which cannot "
                   "be enforced here");
            return k;
        }
        out = same(star);
    }
    uint32_t outer = l->copies;
    if ((uint64_t)outer * n > UNROLL_MAX) {
        bt_ast_fail(l->err, BT_ERR_EXHAUSTED, a.at,
                    "a group with look-around is repeated too often; the limit is %d", UNROLL_MAX);
        return k;
    }
    l->copies = outer * BT_MAX(n, 1);
    struct rest base = out; /* what follows the optional copies */
    for (uint32_t i = 0; i < n && !stopped(l, id); i++) {
        out = after(l, a.last, out);
        if (i < n - a.min) {
            out = union_of(l, base, out);
        }
    }
    l->copies = outer;
    return out;
}

static struct rest after(struct look *l, uint32_t id, struct rest k)
{
    struct bt_ast_node a = l->ast->nodes[id];
    l->steps++;
    if (stopped(l, id)) {
        return k;
    }
    if (a.plain) {
        return put(l, plain(l, id), k);
    }
    switch (a.kind) {
    case BT_AST_CAT:
        for (uint32_t i = a.last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            k = after(l, i, k);
        }
        return k;
    case BT_AST_ALT: {
        struct rest out = same(BT_RX_NONE);
        for (uint32_t i = a.last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
            out = union_of(l, out, after(l, i, k));
        }
        return out;
    }
    case BT_AST_REPEAT: return repeated(l, id, k);
    case BT_AST_START: return only_in(k, 1u << AT_START);
    case BT_AST_END: return at_end(l, k);
    case BT_AST_EDGE: return at_edge(l, k, false);
    case BT_AST_NOT_EDGE: return at_edge(l, k, true);
    case BT_AST_LOOK:
        if (a.behind && a.holds_in == NOT_SIMPLE) {
            refuse(l, id, "a look-behind at several characters in a group cannot be enforced");
            return k;
        }
        return a.behind ? only_in(k, a.holds_in) : look_ahead(l, id, k);
    case BT_AST_EMPTY:
    case BT_AST_CHARS:
    default: return k;
    }
}

/* ---- the top: alternatives, with look-behind ---- */
/* The nodes of a sequence, in their order. */
struct items {
    uint32_t v[64];
    size_t n;
};

static bool items_of(const struct look *l, uint32_t id, struct items *out)
{
    out->n = 0;
    if (l->ast->nodes[id].kind != BT_AST_CAT) {
        out->v[out->n++] = id;
        return true;
    }
    for (uint32_t i = l->ast->nodes[id].last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
        if (out->n == BT_ARRAY_LEN(out->v)) {
            return false;
        }
        out->v[out->n++] = i;
    }
    for (size_t i = 0; i < out->n / 2; i++) {
        uint32_t x = out->v[i];
        out->v[i] = out->v[out->n - 1 - i];
        out->v[out->n - 1 - i] = x;
    }
    return true;
}

static bool is_simple(const struct look *l, uint32_t id)
{
    return l->ast->nodes[id].behind && l->ast->nodes[id].holds_in != NOT_SIMPLE;
}

static bt_rx_t before(struct look *l, const uint32_t *v, size_t n, bool search);

/* All texts that end with a match of node id, whatever stands before it. */
static bt_rx_t ends_in(struct look *l, uint32_t id)
{
    bt_rx_t out = BT_RX_NONE;
    const struct bt_ast_node *a = &l->ast->nodes[id];
    bool alt = a->kind == BT_AST_ALT;
    for (uint32_t i = alt ? a->last : id; i != BT_AST_NO_NODE;
         i = alt ? l->ast->nodes[i].prev : BT_AST_NO_NODE) {
        struct items it;
        if (!items_of(l, i, &it)) {
            refuse(l, i, "this look-behind is too long");
            return BT_RX_NONE;
        }
        out = either(l, out, before(l, it.v, it.n, true));
    }
    return out;
}

/* Returns whether a node's match depends on the text behind it. */
static bool looks_ahead(const struct look *l, uint32_t id)
{
    const struct bt_ast_node *a = &l->ast->nodes[id];
    if (a->plain || a->kind == BT_AST_START || (a->kind == BT_AST_LOOK && a->behind)) {
        return false;
    }
    if (a->kind != BT_AST_CAT && a->kind != BT_AST_ALT && a->kind != BT_AST_REPEAT) {
        return true;
    }
    for (uint32_t i = a->last; i != BT_AST_NO_NODE; i = l->ast->nodes[i].prev) {
        if (looks_ahead(l, i)) {
            return true;
        }
    }
    return false;
}

/* The texts up to the end of a match of the sequence v[0..n), which depends on no text behind
 * it. search: the match may begin anywhere in the text. */
static bt_rx_t before(struct look *l, const uint32_t *v, size_t n, bool search)
{
    size_t from = n; /* the place after the last look-behind */
    while (from > 0 &&
           (l->ast->nodes[v[from - 1]].kind != BT_AST_LOOK || is_simple(l, v[from - 1]))) {
        from--;
    }
    struct rest k = same(BT_RX_EMPTY);
    for (size_t i = n; i > from; i--) {
        if (looks_ahead(l, v[i - 1])) {
            refuse(l, v[i - 1],
                   "an assertion about the text behind it, before a look-behind or in "
                   "one, cannot be enforced");
            return BT_RX_NONE;
        }
        k = after(l, v[i - 1], k);
    }
    if (from == 0) {
        return search ? put(l, l->any, k).v[AT_START] : k.v[AT_START];
    }
    const struct bt_ast_node a = l->ast->nodes[v[from - 1]];
    if (!a.behind) {
        refuse(l, v[from - 1], "a look-ahead before a look-behind, or in one, cannot be enforced");
        return BT_RX_NONE;
    }
    bt_rx_t x = before(l, v, from - 1, search), y = ends_in(l, a.last);
    x = both(l, x, a.negative ? bt_rx_not(l->s, y) : y);
    return put(l, x, k).v[AT_START];
}

static bt_rx_t alternative(struct look *l, uint32_t id, bool search)
{
    struct rest k = same(search ? l->any : BT_RX_EMPTY);
    struct items it;
    size_t from = 0;
    if (items_of(l, id, &it)) {
        for (from = it.n; from > 0; from--) {
            const struct bt_ast_node *a = &l->ast->nodes[it.v[from - 1]];
            if (a->kind == BT_AST_LOOK && a->behind && !is_simple(l, it.v[from - 1])) {
                break;
            }
        }
    }
    /* Without a look-behind there is nothing to intersect. In a sequence that is too long,
     * compiling it reports the look-behind. */
    if (from == 0) {
        k = after(l, id, k);
        return search ? put(l, l->any, k).v[AT_START] : k.v[AT_START];
    }
    for (size_t i = it.n; i > from; i--) {
        k = after(l, it.v[i - 1], k);
    }
    return put(l, before(l, it.v, from, search), k).v[AT_START];
}

/* ---- contexts ---- */
/* What a look-behind at one character accepts: the characters, and whether the start of the
 * text. false: it looks at more than one character. */
static bool one_behind(const struct look *l, uint32_t child, struct bt_chars *set, bool *start)
{
    const struct bt_ast_node *a = &l->ast->nodes[child];
    bool alt = a->kind == BT_AST_ALT;
    *start = false;
    for (uint32_t i = alt ? a->last : child; i != BT_AST_NO_NODE;
         i = alt ? l->ast->nodes[i].prev : BT_AST_NO_NODE) {
        const struct bt_ast_node *b = &l->ast->nodes[i];
        if (b->kind != BT_AST_CHARS && b->kind != BT_AST_START) {
            return false;
        }
        *start = *start || b->kind == BT_AST_START;
        for (uint32_t k = 0; k < b->n_ranges; k++) {
            const struct bt_rx_range *r = &l->ast->ranges.v[b->first_range + k];
            bt_chars_add(set, r->first, r->last);
        }
    }
    bt_chars_sort(set);
    return true;
}

static struct bt_chars common_chars(const struct bt_chars *a, const struct bt_chars *b)
{
    struct bt_chars out = {0};
    for (size_t i = 0, j = 0; i < a->n && j < b->n;) {
        uint32_t first = BT_MAX(a->v[i].first, b->v[j].first);
        uint32_t last = BT_MIN(a->v[i].last, b->v[j].last);
        if (first <= last) {
            bt_chars_add(&out, first, last);
        }
        if (a->v[i].last < b->v[j].last) {
            i++;
        } else {
            j++;
        }
    }
    return out;
}

/* Makes contexts tell characters of the set from others, by splitting each context that has
 * both. Takes the set. false: there are too many contexts. */
static bool split_contexts(struct look *l, struct bt_chars *set)
{
    struct bt_chars others = {0};
    for (size_t i = 0; i < set->n; i++) {
        bt_chars_add(&others, set->v[i].first, set->v[i].last);
    }
    bt_chars_negate(&others);
    bool ok = true;
    for (int c = AFTER, n = l->n; c < n && ok; c++) {
        struct bt_chars in = common_chars(&l->before[c], set);
        struct bt_chars out = common_chars(&l->before[c], &others);
        ok = in.n == 0 || out.n == 0 || l->n < CONTEXTS;
        if (in.n > 0 && out.n > 0 && ok) {
            bt_chars_cleanup(&l->before[c]);
            l->before[c] = in;
            l->before[l->n++] = out;
        } else {
            bt_chars_cleanup(&in);
            bt_chars_cleanup(&out);
        }
    }
    bt_chars_cleanup(&others);
    bt_chars_cleanup(set);
    return ok;
}

/* The contexts after a character of the set. Each context has either only characters of the set
 * or none. */
static uint32_t contexts_of(const struct look *l, const struct bt_chars *set)
{
    uint32_t out = 0;
    for (int c = AFTER; c < l->n; c++) {
        out |= (uint32_t)bt_chars_meet(l->before[c].v, l->before[c].n, set->v, set->n) << c;
    }
    return out;
}

static void find_contexts(struct look *l)
{
    struct bt_chars words = {0};
    bool start, too_many = false;
    l->n = 2;
    bt_chars_add(&l->before[AFTER], 0, BT_CHAR_MAX);
    bt_chars_word(&words);
    for (size_t i = 0; i < l->ast->n; i++) {
        struct bt_ast_node *a = &l->ast->nodes[i];
        struct bt_chars set = {0};
        a->holds_in = NOT_SIMPLE;
        if (a->kind == BT_AST_EDGE || a->kind == BT_AST_NOT_EDGE) {
            bt_chars_word(&set);
        } else if (a->kind != BT_AST_LOOK || !a->behind || !one_behind(l, a->last, &set, &start)) {
            bt_chars_cleanup(&set);
            continue;
        }
        if (!too_many && !split_contexts(l, &set)) {
            refuse(l, (uint32_t)i,
                   "the pattern looks behind itself at too many classes of "
                   "characters");
            too_many = true;
        }
        bt_chars_cleanup(&set);
    }
    l->after_word = contexts_of(l, &words);
    for (size_t i = 0; i < l->ast->n; i++) {
        struct bt_ast_node *a = &l->ast->nodes[i];
        struct bt_chars set = {0};
        if (a->kind == BT_AST_LOOK && a->behind && one_behind(l, a->last, &set, &start)) {
            uint32_t in = contexts_of(l, &set) | (start ? 1u << AT_START : 0);
            a->holds_in = a->negative ? ~in & ((1u << CONTEXTS) - 1) : in;
        }
        bt_chars_cleanup(&set);
    }
    l->word = join(l, bt_rx_chars(l->s, l->enc, words.v, words.n), l->any);
    for (int c = AFTER; c < l->n; c++) {
        l->ends[c] = join(l, l->any, bt_rx_chars(l->s, l->enc, l->before[c].v, l->before[c].n));
    }
    bt_chars_cleanup(&words);
}

bool bt_ast_compile(struct bt_ast *ast, struct bt_rx_set *s, bool search, enum bt_rx_encoding enc,
                    bt_rx_t *out, struct bt_ast_err *e)
{
    struct look l = {.ast = ast, .s = s, .enc = enc, .err = e, .copies = 1};
    const struct bt_rx_range all = {0, BT_CHAR_MAX};
    bt_rx_t one = bt_rx_chars(s, enc, &all, 1);
    l.any = bt_rx_repeat(s, one, 0, BT_RX_NO_MAX);
    l.some = bt_rx_repeat(s, one, 1, BT_RX_NO_MAX);
    bt_ast_settle(ast, ast->root);
    const struct bt_ast_node *root = &ast->nodes[ast->root];
    bt_rx_t x = BT_RX_NONE;
    if (root->plain) {
        x = plain(&l, ast->root);
        x = search ? join(&l, l.any, join(&l, x, l.any)) : x;
    } else {
        find_contexts(&l);
        bool alt = root->kind == BT_AST_ALT;
        for (uint32_t i = alt ? root->last : ast->root; i != BT_AST_NO_NODE;
             i = alt ? ast->nodes[i].prev : BT_AST_NO_NODE) {
            x = either(&l, x, alternative(&l, i, search));
        }
    }
    for (int c = 0; c < CONTEXTS; c++) {
        bt_chars_cleanup(&l.before[c]);
    }
    if (stopped(&l, ast->root)) {
        return false;
    }
    *out = x;
    return true;
}
