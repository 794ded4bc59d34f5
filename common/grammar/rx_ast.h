/* A parsed pattern, between rx_parse.c, which reads its text, and rx_look.c, which compiles it.
 * Nothing else includes this. */
#ifndef BT_GRAMMAR_RX_AST_H
#define BT_GRAMMAR_RX_AST_H

#include "common/grammar/chars.h"

enum bt_ast_kind {
    BT_AST_EMPTY,
    BT_AST_CHARS,    /* one character of ranges[first_range..+n_ranges) */
    BT_AST_CAT,      /* children */
    BT_AST_ALT,      /* children */
    BT_AST_REPEAT,   /* child, min to max times */
    BT_AST_START,    /* ^ */
    BT_AST_END,      /* $ */
    BT_AST_EDGE,     /* \b */
    BT_AST_NOT_EDGE, /* \B */
    BT_AST_LOOK      /* look-around at child */
};
#define BT_AST_NO_NODE UINT32_MAX

struct bt_ast_node {
    enum bt_ast_kind kind;
    bool plain; /* contains no assertion that depends on text around it */
    bool edges; /* contains no assertions except ^ and $ */
    bool behind, negative;
    uint32_t last, prev; /* last child; previous sibling */
    uint32_t min, max;
    uint32_t first_range, n_ranges; /* sorted */
    uint32_t at;                    /* offset in the pattern */
    double weight; /* number of characters that its automaton counts, for its limit */
    bt_rx_t rx;    /* of a plain node: its expression; BT_RX_FAILED: not made yet */
    /* rx_local.c */
    /* least and most characters that it matches; UINT32_MAX: no limit */
    uint32_t shortest, longest;
    bool decides; /* it is a sequence that has look-around and is plain nevertheless */
    /* rx_look.c: as bits, the contexts in which a look-behind at one character holds */
    uint32_t holds_in;
};

struct bt_ast {
    struct bt_ast_node *nodes;
    size_t n, cap;
    struct bt_chars ranges; /* of all CHARS nodes, one after the other */
    uint32_t root;
};

struct bt_ast_err { /* the first error */
    bt_status_t status;
    char *text;
    size_t cap;
};
/* Records an error at an offset of the pattern, unless there was one before. Returns false. */
bool bt_ast_fail(struct bt_ast_err *e, bt_status_t status, size_t at, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Fills in the fields that rx_local.c computes, for the node and all nodes below it. */
void bt_ast_settle(struct bt_ast *ast, uint32_t id);
/* Compiles the pattern to the language of all whole texts in which it matches (rx_look.c). */
bool bt_ast_compile(struct bt_ast *ast, struct bt_rx_set *s, bool search, enum bt_rx_encoding enc,
                    bt_rx_t *out, struct bt_ast_err *e);

#endif
