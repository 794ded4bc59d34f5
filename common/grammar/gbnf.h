/* A parsed GBNF grammar, between gbnf_parse.c, which reads its text, and gbnf.c, which builds a
 * program from it. Nothing else includes this. */
#ifndef BT_GRAMMAR_GBNF_H
#define BT_GRAMMAR_GBNF_H

#include "common/base/buf.h"
#include "common/grammar/chars.h"
#include "common/grammar/program.h"

enum bt_gbnf_kind {
    BT_GBNF_EMPTY,
    BT_GBNF_TEXT,    /* pool[first..+n) */
    BT_GBNF_CHARS,   /* one character of ranges[first..+n), sorted */
    BT_GBNF_TOKEN,   /* the token with the text pool[first..+n) */
    BT_GBNF_WITHOUT, /* text without that token; min characters or more (0 or 1) */
    BT_GBNF_RULE,    /* rules[first] */
    BT_GBNF_CAT,
    BT_GBNF_ALT,
    BT_GBNF_REPEAT /* the child, min to max times */
};
#define BT_GBNF_NO_NODE UINT32_MAX

struct bt_gbnf_node {
    enum bt_gbnf_kind kind;
    uint32_t first, n;
    uint32_t min, max;
    uint32_t child, next; /* first child; next sibling */
    /* gbnf.c, once known */
    bool known, regular, nullable;
    double size;
};

struct bt_gbnf_rule {
    /* place in the grammar's text: its definition, or its first use while it is not defined */
    const char *name;
    size_t len;
    uint32_t body; /* node; BT_GBNF_NO_NODE: not defined */
    /* gbnf.c */
    uint8_t colour; /* mark of a search */
    /* neither it nor a rule below it is recursive, and its expression is not too large */
    bool regular;
    bool nullable;  /* matches the empty text */
    double size;    /* atoms of its expression */
    bt_rx_t rx;     /* its expression, once it is made */
    bt_node_t node; /* its node, once it is made */
};

struct bt_gbnf {
    const char *text;
    struct bt_gbnf_node *nodes;
    size_t n_nodes, cap_nodes;
    struct bt_gbnf_rule *rules;
    size_t n_rules, cap_rules;
    struct bt_chars ranges;
    struct bt_buf pool;
};

/* Reads text[0..len). On success every rule that is used is defined. The caller cleans g up in
 * any case. */
bt_status_t bt_gbnf_parse(struct bt_gbnf *g, const char *text, size_t len, char *err,
                          size_t err_cap) BT_MUST_CHECK;
void bt_gbnf_cleanup(struct bt_gbnf *g);
/* The line and the column of a place in the text; both count from 1. */
void bt_gbnf_place(const struct bt_gbnf *g, const char *at, uint32_t *line_p, uint32_t *column_p);

#endif
