/* The front end for GBNF: builds a program from parsed rules. A rule that leads to no recursion
 * is a regular expression. Such rules and the runs of terminals beside them become one terminal
 * of the program each, because an automaton is faster than the parser above it. This file
 * refuses left recursion, because it knows the names of the rules. Pure. */
#include <stdio.h>

#include "common/grammar/front_end.h"
#include "common/grammar/gbnf.h"

#define ATOMS_MAX  20000   /* atoms of one expression; a larger one stays a rule */
#define DEPTH_MAX  5000    /* depth of rules and groups within each other; the builder recurses */
#define VISITS_MAX 4000000 /* visits of nodes while the builder looks for what can be empty */

enum { WHITE, GREY, BLACK };

struct builder {
    struct bt_gbnf *g;
    struct bt_program *p;
    struct bt_rx_set *s;
    bt_rx_t any; /* any text */
    uint32_t depth;
    bt_status_t status;
    char *err;
    size_t err_cap;
};

static bool enter(struct builder *b)
{
    if (b->depth == DEPTH_MAX && b->status == BT_OK) {
        b->status = BT_ERR_EXHAUSTED;
        snprintf(b->err, b->err_cap, "rules and groups refer to each other more than %d deep",
                 DEPTH_MAX);
    }
    if (b->status != BT_OK) {
        return false;
    }
    b->depth++;
    return true;
}

/* ---- which rules are regular ---- */
struct shape {
    bool regular, nullable;
    double size;
};

static struct shape shape_of(struct builder *b, uint32_t id);

static struct shape shape_of_rule(struct builder *b, struct bt_gbnf_rule *u)
{
    if (u->colour == WHITE) {
        u->colour = GREY;
        struct shape x = shape_of(b, u->body);
        u->colour = BLACK;
        u->regular = x.regular && x.size <= ATOMS_MAX;
        u->nullable = x.nullable;
        u->size = x.size;
    }
    return (struct shape){u->colour == BLACK && u->regular, u->nullable, u->size};
}

static struct shape shape_of(struct builder *b, uint32_t id)
{
    struct bt_gbnf_node *n = &b->g->nodes[id];
    struct shape out = {true, n->kind == BT_GBNF_CAT || n->kind == BT_GBNF_EMPTY, 0};
    if (n->known) {
        return (struct shape){n->regular, n->nullable, n->size};
    }
    if (!enter(b)) {
        return out;
    }
    switch (n->kind) {
    case BT_GBNF_TEXT:
    case BT_GBNF_TOKEN:
        out.size = n->n;
        out.nullable = n->n == 0;
        break;
    case BT_GBNF_CHARS:
    case BT_GBNF_WITHOUT:
        out.size = n->n;
        out.nullable = n->kind == BT_GBNF_WITHOUT && n->min == 0;
        break;
    case BT_GBNF_RULE: out = shape_of_rule(b, &b->g->rules[n->first]); break;
    case BT_GBNF_CAT:
    case BT_GBNF_ALT:
    case BT_GBNF_REPEAT:
        for (uint32_t i = n->child; i != BT_GBNF_NO_NODE; i = b->g->nodes[i].next) {
            struct shape x = shape_of(b, i);
            out.regular = out.regular && x.regular;
            out.nullable =
                n->kind == BT_GBNF_CAT ? out.nullable && x.nullable : out.nullable || x.nullable;
            out.size += x.size;
        }
        out.nullable = out.nullable || (n->kind == BT_GBNF_REPEAT && n->min == 0);
        out.regular = out.regular && out.size <= ATOMS_MAX;
        break;
    case BT_GBNF_EMPTY:
    default: break;
    }
    b->depth--;
    n->known = true;
    n->regular = out.regular;
    n->nullable = out.nullable;
    n->size = out.size;
    return out;
}

/* ---- left recursion ---- */
static bool nullable(struct builder *b, uint32_t id, uint32_t *visits)
{
    const struct bt_gbnf_node *n = &b->g->nodes[id];
    ++*visits;
    bool all = true, any = false;
    switch (n->kind) {
    case BT_GBNF_EMPTY: return true;
    case BT_GBNF_TEXT: return n->n == 0;
    case BT_GBNF_WITHOUT: return n->min == 0;
    case BT_GBNF_RULE: return b->g->rules[n->first].nullable;
    case BT_GBNF_CAT:
    case BT_GBNF_ALT:
    case BT_GBNF_REPEAT:
        for (uint32_t i = n->child; i != BT_GBNF_NO_NODE; i = b->g->nodes[i].next) {
            bool x = nullable(b, i, visits);
            all = all && x;
            any = any || x;
        }
        return n->kind == BT_GBNF_CAT ? all : any || (n->kind == BT_GBNF_REPEAT && n->min == 0);
    case BT_GBNF_CHARS:
    case BT_GBNF_TOKEN:
    default: return false;
    }
}

/* Repeats until nothing changes, because rules of a cycle depend on each other. */
static void settle_nullable(struct builder *b)
{
    uint32_t visits = 0;
    for (bool changed = true; changed && visits < VISITS_MAX;) {
        changed = false;
        for (size_t i = b->g->n_rules; i > 0; i--) {
            struct bt_gbnf_rule *u = &b->g->rules[i - 1];
            if (!u->nullable && !u->regular && nullable(b, u->body, &visits)) {
                u->nullable = changed = true;
            }
        }
    }
}

static void look_left_rule(struct builder *b, struct bt_gbnf_rule *u);

/* Visits the rules that can come first in what the node matches. */
static void look_left(struct builder *b, uint32_t id)
{
    const struct bt_gbnf_node *n = &b->g->nodes[id];
    uint32_t visits = 0;
    if (!enter(b)) {
        return;
    }
    if (n->kind == BT_GBNF_RULE) {
        look_left_rule(b, &b->g->rules[n->first]);
    }
    for (uint32_t i = n->child; i != BT_GBNF_NO_NODE; i = b->g->nodes[i].next) {
        look_left(b, i);
        if (n->kind == BT_GBNF_CAT && !nullable(b, i, &visits)) {
            break;
        }
    }
    b->depth--;
}

static void look_left_rule(struct builder *b, struct bt_gbnf_rule *u)
{
    if (u->colour == GREY && b->status == BT_OK) {
        uint32_t line, column;
        bt_gbnf_place(b->g, u->name, &line, &column);
        b->status = BT_ERR_UNSUPPORTED;
        snprintf(b->err, b->err_cap,
                 "line %u, column %u: the rule %.*s is left recursive: it may begin with itself; "
                 "write a repeat instead, x ::= y (\"+\" y)*",
                 line, column, (int)BT_MIN(u->len, 60u), u->name);
    }
    if (u->colour == WHITE && !u->regular) {
        u->colour = GREY;
        look_left(b, u->body);
        u->colour = BLACK;
    }
}

/* ---- building ---- */
static bt_rx_t token_rx(struct builder *b, const struct bt_gbnf_node *n)
{
    static const char mark[1] = {(char)0xff};
    const char *text = b->g->pool.data + n->first;
    bt_rx_t plain = bt_rx_text(b->s, text, n->n);
    return bt_rx_or(b->s, plain, bt_rx_concat(b->s, bt_rx_text(b->s, mark, 1), plain));
}

/* Any text that does not contain the token's text. Free text holds no special token. */
static bt_rx_t without_rx(struct builder *b, const struct bt_gbnf_node *n)
{
    bt_rx_t text = bt_rx_text(b->s, b->g->pool.data + n->first, n->n);
    bt_rx_t with = bt_rx_concat(b->s, b->any, bt_rx_concat(b->s, text, b->any));
    bt_rx_t x = bt_rx_and(b->s, b->any, bt_rx_not(b->s, with));
    return n->min == 0 ? x : bt_rx_and(b->s, x, bt_rx_not(b->s, BT_RX_EMPTY));
}

static bt_rx_t rx_of(struct builder *b, uint32_t id)
{
    const struct bt_gbnf_node *n = &b->g->nodes[id];
    bt_rx_t x = BT_RX_EMPTY;
    if (!enter(b)) {
        return x;
    }
    switch (n->kind) {
    case BT_GBNF_TEXT: x = bt_rx_text(b->s, b->g->pool.data + n->first, n->n); break;
    case BT_GBNF_CHARS:
        x = n->n == 0 ? BT_RX_NONE : bt_rx_chars(b->s, BT_RX_UTF8, b->g->ranges.v + n->first, n->n);
        break;
    case BT_GBNF_TOKEN: x = token_rx(b, n); break;
    case BT_GBNF_WITHOUT: x = without_rx(b, n); break;
    case BT_GBNF_RULE: {
        struct bt_gbnf_rule *u = &b->g->rules[n->first];
        if (u->rx == BT_RX_FAILED) {
            u->rx = rx_of(b, u->body);
        }
        x = u->rx;
        break;
    }
    case BT_GBNF_CAT:
    case BT_GBNF_ALT: {
        struct bt_buf parts;
        bt_buf_init(&parts);
        for (uint32_t i = n->child; i != BT_GBNF_NO_NODE; i = b->g->nodes[i].next) {
            bt_rx_t part = rx_of(b, i);
            bt_buf_append(&parts, &part, sizeof(part));
        }
        size_t count = parts.len / sizeof(bt_rx_t);
        x = n->kind == BT_GBNF_CAT
                ? bt_rx_seq(b->s, (const bt_rx_t *)(void *)parts.data, count)
                : bt_rx_or_list(b->s, (const bt_rx_t *)(void *)parts.data, count);
        bt_buf_cleanup(&parts);
        break;
    }
    case BT_GBNF_REPEAT: x = bt_rx_repeat(b->s, rx_of(b, n->child), n->min, n->max); break;
    case BT_GBNF_EMPTY:
    default: break;
    }
    b->depth--;
    return x;
}

static bt_node_t node_of(struct builder *b, uint32_t id);

/* Builds the children of a sequence or of alternatives. Regular children become one expression:
 * all of them in alternatives, neighbours in a sequence. */
static bt_node_t list_of(struct builder *b, const struct bt_gbnf_node *n)
{
    struct bt_buf nodes, run;
    bool cat = n->kind == BT_GBNF_CAT;
    double size = 0;
    bt_buf_init(&nodes);
    bt_buf_init(&run);
    for (uint32_t i = n->child; true; i = b->g->nodes[i].next) {
        struct shape x = {0};
        if (i != BT_GBNF_NO_NODE) {
            x = shape_of(b, i);
        }
        bool ends = i == BT_GBNF_NO_NODE || (cat && !x.regular) || size + x.size > ATOMS_MAX;
        if (ends && run.len > 0) {
            const bt_rx_t *v = (const bt_rx_t *)(void *)run.data;
            size_t count = run.len / sizeof(*v);
            bt_rx_t rx = cat ? bt_rx_seq(b->s, v, count) : bt_rx_or_list(b->s, v, count);
            bt_node_t node = bt_program_regex(b->p, rx);
            bt_buf_append(&nodes, &node, sizeof(node));
            bt_buf_clear(&run);
            size = 0;
        }
        if (i == BT_GBNF_NO_NODE) {
            break;
        }
        if (x.regular) {
            bt_rx_t rx = rx_of(b, i);
            bt_buf_append(&run, &rx, sizeof(rx));
            size += x.size;
        } else {
            bt_node_t node = node_of(b, i);
            bt_buf_append(&nodes, &node, sizeof(node));
        }
    }
    const bt_node_t *v = (const bt_node_t *)(void *)nodes.data;
    size_t count = nodes.len / sizeof(*v);
    bt_node_t out = cat ? bt_program_seq(b->p, v, count) : bt_program_alt(b->p, v, count);
    bt_buf_cleanup(&nodes);
    bt_buf_cleanup(&run);
    return out;
}

static bt_node_t node_of(struct builder *b, uint32_t id)
{
    const struct bt_gbnf_node *n = &b->g->nodes[id];
    if (shape_of(b, id).regular) {
        return bt_program_regex(b->p, rx_of(b, id));
    }
    bt_node_t x = BT_NODE_EMPTY;
    if (!enter(b)) {
        return x;
    }
    if (n->kind == BT_GBNF_RULE) {
        struct bt_gbnf_rule *u = &b->g->rules[n->first];
        if (u->node == BT_NODE_FAILED) {
            u->node = bt_program_rule(b->p);
            bt_node_t body = node_of(b, u->body);
            bt_program_rule_set(b->p, u->node, body);
        }
        x = u->node;
    } else if (n->kind == BT_GBNF_REPEAT) {
        x = bt_program_repeat(b->p, node_of(b, n->child), n->min, n->max);
    } else {
        x = list_of(b, n);
    }
    b->depth--;
    return x;
}

static const struct bt_gbnf_rule *root_of(const struct bt_gbnf *g)
{
    for (size_t i = 0; i < g->n_rules; i++) {
        if (g->rules[i].len == 4 && memcmp(g->rules[i].name, "root", 4) == 0) {
            return &g->rules[i];
        }
    }
    return NULL;
}

bt_status_t bt_grammar_build_gbnf(struct bt_program *p, const char *text, size_t len,
                                  bt_node_t *start, char *err, size_t err_cap)
{
    struct bt_gbnf g = {0};
    struct builder b = {.g = &g, .p = p, .s = bt_program_rx(p), .err = err, .err_cap = err_cap};
    b.status = bt_gbnf_parse(&g, text, len, err, err_cap);
    const struct bt_gbnf_rule *root = root_of(&g);
    if (b.status == BT_OK && root == NULL) {
        snprintf(err, err_cap, "there is no rule named root; add it: the answer begins with it");
        b.status = BT_ERR_INVALID;
    }
    for (size_t i = 0; i < g.n_rules && b.status == BT_OK; i++) {
        (void)shape_of_rule(&b, &g.rules[i]);
    }
    if (b.status == BT_OK) {
        const struct bt_rx_range all = {0, BT_CHAR_MAX};
        b.any = bt_rx_repeat(b.s, bt_rx_chars(b.s, BT_RX_UTF8, &all, 1), 0, BT_RX_NO_MAX);
        settle_nullable(&b);
        for (size_t i = 0; i < g.n_rules; i++) {
            g.rules[i].colour = WHITE;
        }
        for (size_t i = 0; i < g.n_rules; i++) {
            look_left_rule(&b, &g.rules[i]);
        }
    }
    if (b.status == BT_OK) {
        for (size_t i = 0; i < g.n_rules; i++) {
            g.rules[i].colour = BLACK; /* whether rules are regular is known from here on */
        }
        *start =
            root->regular ? bt_program_regex(p, rx_of(&b, root->body)) : node_of(&b, root->body);
    }
    bt_gbnf_cleanup(&g);
    return b.status;
}
