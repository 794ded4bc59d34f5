/* What the front ends (schema.c, gbnf.c, regex, choice, tags.c) build and the automaton
 * (automaton.c) runs: a program, a context-free grammar over bytes whose terminals are regular
 * expressions (rx.h), with two more kinds of nodes, repeats with a counter and JSON objects. */
#ifndef BT_GRAMMAR_PROGRAM_H
#define BT_GRAMMAR_PROGRAM_H

#include "common/grammar/rx.h"

struct bt_program;
typedef uint32_t bt_node_t;
#define BT_NODE_FAILED UINT32_MAX /* out of memory or over a limit; makers pass it on */
#define BT_NODE_NONE   0u         /* matches nothing; makers simplify with it */
#define BT_NODE_EMPTY  1u         /* matches the empty text */

struct bt_program *bt_program_create(size_t max_bytes); /* owns a bt_rx_set */
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
/* A rule to be defined later, for recursion. */
bt_node_t bt_program_rule(struct bt_program *p);
void bt_program_rule_set(struct bt_program *p, bt_node_t rule, bt_node_t body);

/* A JSON object whose properties come in any order, each at most once. */
struct bt_program_property {
    const char *name; /* UTF-8, decoded; copied */
    size_t name_len;
    bt_node_t value; /* BT_NODE_NONE: must not occur */
    bool required;
};
struct bt_program_pattern { /* properties that are not declared and match key */
    bt_rx_t key;            /* over the JSON-escaped bytes between the quotes */
    bt_node_t value;
};
struct bt_program_object {
    const struct bt_program_property *props;
    size_t n_props;
    /* Classes of undeclared keys. The caller makes them disjoint (intersections with their values
     * merged), without the declared names; the last one may be the additional properties. */
    const struct bt_program_pattern *patterns;
    size_t n_patterns;
    uint32_t min, max; /* number of properties; max BT_RX_NO_MAX: no limit */
    /* White space: behind { and , and before }, where lines begin; around : and before a comma. */
    bt_rx_t space, blank;
};
bt_node_t bt_program_object(struct bt_program *p, const struct bt_program_object *o);

/* A JSON array of any items no two of which are equal: the array, body, in which each item is made
 * by bt_program_item, and which has min items or more. where: names it in an error; copied. */
bt_node_t bt_program_item(struct bt_program *p, bt_node_t value);
bt_node_t bt_program_distinct(struct bt_program *p, bt_node_t body, uint32_t min,
                              const char *where);

/* Ends building with the start node: removes nodes that can produce nothing (a required property
 * without a value, a rule that never ends) and whatever needs them, refuses left recursion
 * (ERR_UNSUPPORTED; only gbnf.c knows names of rules) and a start that can produce nothing
 * (ERR_INVALID). */
bt_status_t bt_program_finish(struct bt_program *p, bt_node_t start, char *err,
                              size_t err_cap) BT_MUST_CHECK;

#endif
