/* Regular languages over bytes: hash-consed expressions with intersection and complement, and the
 * automaton that their derivatives build while it is used (Brzozowski 1964; Owens, Reppy, Turon
 * 2009). Pure: no clock, no I/O. One thread at a time uses a set. */
#ifndef BT_GRAMMAR_RX_H
#define BT_GRAMMAR_RX_H

#include "common/base/base.h"

struct bt_rx_set;         /* owns expressions and automaton states, within a limit of bytes */
typedef uint32_t bt_rx_t; /* an expression of a set; equal numbers mean equal languages */

#define BT_RX_NONE   0u /* matches nothing */
#define BT_RX_EMPTY  1u /* matches the empty text */
#define BT_RX_NO_MAX UINT32_MAX
/* makers return it when the set is out of memory, or when an argument is BT_RX_FAILED */
#define BT_RX_FAILED UINT32_MAX

struct bt_rx_set *bt_rx_set_create(size_t max_bytes);
void bt_rx_set_destroy(struct bt_rx_set *s);
bool bt_rx_set_full(const struct bt_rx_set *s); /* a maker or a step has met a limit */
size_t bt_rx_set_bytes(const struct bt_rx_set *s);
/* Sets how much work makers and steps may still do (a unit is about 10 ns). Beyond it they fail. A
 * new set has a budget for one compilation. */
void bt_rx_set_budget(struct bt_rx_set *s, uint64_t work);

/* ---- makers ---- */
bt_rx_t bt_rx_class(struct bt_rx_set *s, const uint64_t bits[4]); /* one byte of a class */
bt_rx_t bt_rx_text(struct bt_rx_set *s, const void *bytes, size_t n);
/* Takes time in the length of a. So build a long sequence from its end, or use bt_rx_seq. */
bt_rx_t bt_rx_concat(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b);
bt_rx_t bt_rx_seq(struct bt_rx_set *s, const bt_rx_t *parts, size_t n);
bt_rx_t bt_rx_or_list(struct bt_rx_set *s, const bt_rx_t *parts, size_t n);
bt_rx_t bt_rx_or(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b);
bt_rx_t bt_rx_and(struct bt_rx_set *s, bt_rx_t a, bt_rx_t b);
bt_rx_t bt_rx_not(struct bt_rx_set *s, bt_rx_t a); /* all byte strings that a does not match */
bt_rx_t bt_rx_repeat(struct bt_rx_set *s, bt_rx_t a, uint32_t min, uint32_t max);

/* The texts of digits that make a multiple of m (at least 1), when they follow a number whose
 * remainder is `rest`. points: points may occur anywhere and change nothing. The states are the
 * remainders; a state is made when it is met. */
bt_rx_t bt_rx_multiple(struct bt_rx_set *s, uint32_t m, uint32_t rest, bool points);

/* How a character of a text becomes bytes. */
enum bt_rx_encoding {
    BT_RX_UTF8, /* UTF-8 without escapes */
    /* between the quotes of a JSON string: the character itself where JSON allows it, its short
     * escape, or \uXXXX with hexadecimal digits in any case; beyond U+FFFF also a surrogate pair */
    BT_RX_JSON_STRING
};
struct bt_rx_range {
    uint32_t first, last; /* code points; surrogates are skipped */
};
/* One character out of n ranges. */
bt_rx_t bt_rx_chars(struct bt_rx_set *s, enum bt_rx_encoding enc, const struct bt_rx_range *r,
                    size_t n);

/* ---- the automaton: a state is the expression of what may still follow ---- */
/* BT_RX_NONE: nothing can follow (this is proved). BT_RX_FAILED: a limit was met. */
bt_rx_t bt_rx_step(struct bt_rx_set *s, bt_rx_t a, uint8_t byte);
bool bt_rx_accepts(const struct bt_rx_set *s, bt_rx_t a); /* whether it matches the empty text */
/* Decides whether a matches no text. ERR_EXHAUSTED: not decided within max_states states. */
bt_status_t bt_rx_is_none(struct bt_rx_set *s, bt_rx_t a, uint32_t max_states,
                          bool *none_p) BT_MUST_CHECK;

/* ---- ECMA-262 patterns with the u flag, as JSON Schema uses them (rx_parse.c) ---- */
/* search: the pattern may match anywhere in the text unless it is anchored (JSON Schema). Otherwise
 * it must match the whole text. ERR_UNSUPPORTED: back references, or look-around and word
 * boundaries in places where they cannot be compiled. ERR_INVALID: wrong syntax. ERR_EXHAUSTED: too
 * large. err says where. */
bt_status_t bt_rx_parse(struct bt_rx_set *s, const char *pattern, size_t len, bool search,
                        enum bt_rx_encoding enc, bt_rx_t *out, char *err,
                        size_t err_cap) BT_MUST_CHECK;

#endif
