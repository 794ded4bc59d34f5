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
    bool plain; /* no assertion in it that its context decides */
    bool edges; /* no assertion in it but ^ and $ */
    bool behind, negative;
    uint32_t last, prev; /* last child; previous sibling */
    uint32_t min, max;
    uint32_t first_range, n_ranges; /* sorted */
    uint32_t at;                    /* offset in the pattern */
    double weight;                  /* characters that a counted automaton of it would count */
    bt_rx_t rx;                     /* of a plain node, once it is made; BT_RX_FAILED before */
    /* rx_local.c */
    uint32_t shortest, longest; /* characters of what it matches; UINT32_MAX: no limit */
    bool decides;               /* a sequence with look-around that is plain nevertheless */
    /* rx_look.c: the contexts in which a look-behind at one character holds */
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
/* Records an error at an offset of the pattern if it is the first. Returns false. */
bool bt_ast_fail(struct bt_ast_err *e, bt_status_t status, size_t at, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Fills in what rx_local.c finds of a node and those below. */
void bt_ast_settle(struct bt_ast *ast, uint32_t id);
/* The language of the whole texts in which the pattern matches (rx_look.c). */
bool bt_ast_compile(struct bt_ast *ast, struct bt_rx_set *s, bool search, enum bt_rx_encoding enc,
                    bt_rx_t *out, struct bt_ast_err *e);

#endif
