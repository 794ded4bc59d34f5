/* A program's inside, for the automaton. program.c has the makers, program_finish.c the
 * analysis. */
#ifndef BT_GRAMMAR_PROGRAM_PRIV_H
#define BT_GRAMMAR_PROGRAM_PRIV_H

#include "common/grammar/program.h"

enum bt_node_kind {
    BT_NODE_K_NONE,
    BT_NODE_K_EMPTY,
    BT_NODE_K_RX,     /* a: the expression */
    BT_NODE_K_SEQ,    /* lists[a..a+b) */
    BT_NODE_K_ALT,    /* lists[a..a+b) */
    BT_NODE_K_REPEAT, /* a: item, b: separator, c to d times */
    BT_NODE_K_OBJECT, /* objects[a] */
    /* a: the array, whose items differ; b: least number of items; c: names[c] */
    BT_NODE_K_DISTINCT,
    BT_NODE_K_ITEM, /* a: an item of a DISTINCT */
    BT_NODE_K_RULE  /* a: body, BT_NODE_NONE until it is set */
};
#define BT_NODE_F_PRODUCTIVE 1u /* can produce a text */
#define BT_NODE_F_NULLABLE   2u /* can produce the empty text */
struct bt_node {
    uint8_t kind, flags;
    uint32_t a, b, c, d;
};

/* A key of an object: the bytes from its first character to the value. */
struct bt_object_key {
    bt_rx_t rx;         /* ends with the marker of the key's number, see BT_RX_MARK */
    bt_rx_t name, tail; /* of a pattern: rx is name, followed by tail */
    bt_node_t value;
    bool required, pattern;
};
struct bt_object {
    struct bt_object_key *keys; /* [n_props] sorted by name, then [n_patterns] */
    uint32_t n_props, n_patterns;
    uint32_t min, max;
    bt_rx_t open, comma;  /* { and , each with the spaces after it and the quote of a key */
    bt_rx_t close;        /* } with the marker 0 */
    bt_rx_t space, blank; /* before close; before comma */
    uint32_t *optional;   /* [words] bit i: key i is optional */
    uint32_t words;       /* of 32 keys each */
    uint32_t n_required;
    bool distinct; /* undeclared keys count towards the minimum, so each may come only once */
};

struct bt_program {
    struct bt_rx_set *rx;
    size_t max_bytes, bytes;
    bool full;
    struct bt_node *nodes;
    uint32_t n_nodes, nodes_cap;
    uint32_t *lists;
    uint32_t n_lists, lists_cap;
    struct bt_object *objects;
    uint32_t n_objects, objects_cap;
    char **names; /* names of places in the schema, for errors */
    uint32_t n_names, names_cap;
    bool has_distinct;
    bt_node_t start;
};

/* program.c: a decoded name in all its spellings, followed by tail. */
bt_rx_t bt_program_spelled(struct bt_rx_set *s, const char *name, size_t len, bt_rx_t tail);
bool bt_program_grow(struct bt_program *p, void *array_p, uint32_t n, uint32_t *cap, size_t size);
/* Takes bytes from the limit; false: there are not enough left. */
bool bt_program_take(struct bt_program *p, size_t bytes);

static inline bool bt_node_is(const struct bt_program *p, bt_node_t n, uint8_t flag)
{
    return p->nodes[n].flags & flag;
}

#endif
