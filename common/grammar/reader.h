/* Reads the JSON text inside arrays whose items must differ, beside the automaton: the values of
 * the items so far, and the part of the present item that was read. Values and places are nodes
 * of one table in which equal nodes have the same number. So equal values have the same number
 * in any spelling. */
#ifndef BT_GRAMMAR_READER_H
#define BT_GRAMMAR_READER_H

#include "common/base/base.h"
#include "common/grammar/rx_priv.h"

struct bt_automaton;

#define BT_READER_FAILED UINT32_MAX
/* A reader for masks, which knows no values: it assumes that no present item is the beginning of an
 * earlier one. Its bits BT_READER_OUT are the smallest level at which an item has ended since; all
 * ones: none has. */
#define BT_READER_ANY 0xF0000000u
#define BT_READER_OUT 0x00FFFFFFu

enum bt_reader_kind {
    BT_READER_K_EMPTY,  /* the empty value of a type */
    BT_READER_K_TEXT,   /* a: the last byte, b: number of bytes; strings are decoded */
    BT_READER_K_ITEM,   /* of an array. a: the last item, b: number of items */
    BT_READER_K_MEMBER, /* of an object, sorted by key. a: key, b: value */
    /* places: parent is the place around it */
    BT_READER_K_TOP,    /* around the outermost array. a: whether the array has ended */
    BT_READER_K_ARRAY,  /* a: its items, b: see reader.c */
    BT_READER_K_OBJECT, /* a: its members, b: the key whose value comes, or 0 */
    BT_READER_K_STRING, /* a: its text, b: see reader.c */
    BT_READER_K_SCALAR  /* a: its text as it is written */
};
struct bt_reader_node {
    uint8_t kind, type; /* type of a value: one of "SNWAO" */
    /* of a place: how many arrays of different items are around it, itself included */
    uint16_t level;
    uint32_t a, b, parent;
    uint32_t next; /* in its hash chain */
};

/* The place in which the next value is an array of different items. UINT32_MAX: a limit was met,
 * or no value can begin here. */
uint32_t bt_reader_expect(struct bt_automaton *m, uint32_t reader);
/* The place after one more byte. */
uint32_t bt_reader_step(struct bt_automaton *m, uint32_t reader, uint8_t byte);
/* Forgets all nodes from number n on. */
void bt_reader_drop(struct bt_automaton *m, uint32_t n);

/* For the array of different items at a level. bt_reader_is_double: whether the item that ends here
 * equals an earlier one. bt_reader_may_double: whether the present item can still become equal to
 * an earlier one (level 0: in any array). false with m->full: a limit was met. */
bool bt_reader_is_double(struct bt_automaton *m, uint32_t reader, uint32_t level);
bool bt_reader_may_double(struct bt_automaton *m, uint32_t reader, uint32_t level);
bool bt_reader_in_string(const struct bt_automaton *m, uint32_t reader);
/* Returns whether the place is within the exponent of a number. */
bool bt_reader_in_exponent(const struct bt_automaton *m, uint32_t reader);
/* One place for all numbers that differ only in zeros at their end, or in the exponent of zero. */
uint32_t bt_reader_without_zeros(struct bt_automaton *m, uint32_t reader);

#endif
