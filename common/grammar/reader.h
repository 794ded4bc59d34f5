/* Reads the JSON text inside arrays whose items must differ, beside the automaton: the values of
 * the items so far and the part of the present one. Values and places are nodes of one table; equal
 * ones have equal numbers, so equal values are one number whatever their spelling is. */
#ifndef BT_GRAMMAR_READER_H
#define BT_GRAMMAR_READER_H

#include "common/base/base.h"
#include "common/grammar/rx_priv.h"

struct bt_automaton;

#define BT_READER_FAILED UINT32_MAX
/* A reader without values, for masks: the present items are no beginnings of earlier ones. The bits
 * BT_READER_OUT are the least level at which an item has ended since; all of them: none has. */
#define BT_READER_ANY 0xF0000000u
#define BT_READER_OUT 0x00FFFFFFu

enum bt_reader_kind {
    BT_READER_K_EMPTY,  /* the empty value of a type */
    BT_READER_K_TEXT,   /* a: the last byte, b: bytes; of strings decoded */
    BT_READER_K_ITEM,   /* of an array. a: the last item, b: items */
    BT_READER_K_MEMBER, /* of an object, sorted by key. a: key, b: value */
    /* places: parent is the place around it */
    BT_READER_K_TOP,    /* around the outermost array. a: it has ended */
    BT_READER_K_ARRAY,  /* a: its items, b: see reader.c */
    BT_READER_K_OBJECT, /* a: its members, b: the key whose value comes, or 0 */
    BT_READER_K_STRING, /* a: its text, b: see reader.c */
    BT_READER_K_SCALAR  /* a: its text as it is written */
};
struct bt_reader_node {
    uint8_t kind, type; /* type of a value: one of "SNWAO" */
    uint16_t level;     /* of a place: arrays of different items around it, with itself */
    uint32_t a, b, parent;
    uint32_t next; /* in its hash chain */
};

/* The place in which an array of different items begins as the next value. UINT32_MAX: a limit, or
 * no value can begin here. */
uint32_t bt_reader_expect(struct bt_automaton *m, uint32_t reader);
/* The place after one more byte. */
uint32_t bt_reader_step(struct bt_automaton *m, uint32_t reader, uint8_t byte);
/* Forgets the nodes from number n on. */
void bt_reader_drop(struct bt_automaton *m, uint32_t n);

/* Of the array of different items of a level: whether the item that ends here is like an earlier
 * one; whether the present item may become like one (level 0: of any array). false with m->full: a
 * limit. */
bool bt_reader_is_double(struct bt_automaton *m, uint32_t reader, uint32_t level);
bool bt_reader_may_double(struct bt_automaton *m, uint32_t reader, uint32_t level);
bool bt_reader_in_string(const struct bt_automaton *m, uint32_t reader);
/* Within the exponent of a number. */
bool bt_reader_in_exponent(const struct bt_automaton *m, uint32_t reader);
/* The same place for all numbers that differ in zeros at their end only, or in the exponent of
 * zero. */
uint32_t bt_reader_without_zeros(struct bt_automaton *m, uint32_t reader);

#endif
