/* A program: what the front ends (schema.c, gbnf.c, pattern.c, tags.c) build and the automaton
 * (automaton.c) runs. It is a context-free grammar over bytes whose terminals are regular
 * expressions (rx.h). It has further kinds of nodes: repeats with a counter, JSON objects, and
 * arrays whose items differ. */
#ifndef BT_GRAMMAR_PROGRAM_H
#define BT_GRAMMAR_PROGRAM_H

#include "common/grammar/rx.h"

struct bt_program;
typedef uint32_t bt_node_t;
#define BT_NODE_FAILED UINT32_MAX /* no memory, or a limit was met; makers given it return it */
#define BT_NODE_NONE   0u         /* matches nothing; makers simplify with it */
#define BT_NODE_EMPTY  1u         /* matches the empty text */

struct bt_program *bt_program_create(size_t max_bytes); /* The program owns a bt_rx_set. */
void bt_program_destroy(struct bt_program *p);
struct bt_rx_set *bt_program_rx(struct bt_program *p);

bt_node_t bt_program_regex(struct bt_program *p, bt_rx_t rx);
bt_node_t bt_program_seq(struct bt_program *p, const bt_node_t *nodes, size_t n);
bt_node_t bt_program_alt(struct bt_program *p, const bt_node_t *nodes, size_t n);
bt_node_t bt_program_repeat(struct bt_program *p, bt_node_t item, uint32_t min,
                            uint32_t max); /* max BT_RX_NO_MAX: no limit */
/* The same with a separator between items. */
bt_node_t bt_program_repeat_sep(struct bt_program *p, bt_node_t item, bt_node_t sep, uint32_t min,
                                uint32_t max);
/* A special token of the model by its text ("<tool_call>"). In a vocabulary's trie a special token
 * is the byte 0xFF and its text, which no UTF-8 text contains; so this is a regex node of these
 * bytes. alt with the plain text where a model may spell it in either way. */
bt_node_t bt_program_special(struct bt_program *p, const char *text);
/* A rule, which is defined later. For recursion. */
bt_node_t bt_program_rule(struct bt_program *p);
void bt_program_rule_set(struct bt_program *p, bt_node_t rule, bt_node_t body);

/* A JSON object whose properties come in any order, each at most once. */
struct bt_program_property {
    const char *name; /* UTF-8, decoded; copied */
    size_t name_len;
    bt_node_t value; /* BT_NODE_NONE: must not occur */
    bool required;
};
struct bt_program_pattern { /* undeclared properties whose key matches */
    bt_rx_t key;            /* over the bytes between the quotes, with JSON's escapes */
    bt_node_t value;
};
struct bt_program_object {
    const struct bt_program_property *props;
    size_t n_props;
    /* Classes of undeclared keys, without the declared names. The caller makes them disjoint: a
     * class that is an intersection has the merged value. The last class may be the additional
     * properties. */
    const struct bt_program_pattern *patterns;
    size_t n_patterns;
    uint32_t min, max; /* number of properties; max BT_RX_NO_MAX: no limit */
    /* White space. space: after { and , and before }, where a line may begin. blank: around :
     * and before a comma. */
    bt_rx_t space, blank;
};
bt_node_t bt_program_object(struct bt_program *p, const struct bt_program_object *o);

/* A JSON array of any items of which no two are equal. body: the array itself, with at least min
 * items, each made by bt_program_item. where: the array's name in an error; copied. */
bt_node_t bt_program_item(struct bt_program *p, bt_node_t value);
bt_node_t bt_program_distinct(struct bt_program *p, bt_node_t body, uint32_t min,
                              const char *where);

/* Ends the building; start is the start node. Removes nodes that can produce no text (a required
 * property without a value, a rule that never ends) and all nodes that need them.
 * ERR_UNSUPPORTED: left recursion (only gbnf.c knows the names of rules). ERR_INVALID: the start
 * can produce no text. */
bt_status_t bt_program_finish(struct bt_program *p, bt_node_t start, char *err,
                              size_t err_cap) BT_MUST_CHECK;

#endif
