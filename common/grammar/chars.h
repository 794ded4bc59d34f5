/* Sets of Unicode characters, for the character classes of patterns and of GBNF. Pure. */
#ifndef BT_GRAMMAR_CHARS_H
#define BT_GRAMMAR_CHARS_H

#include "common/grammar/rx.h"

#define BT_CHAR_MAX 0x10ffffu

/* Ranges of code points; sorted and disjoint after bt_chars_sort. All zero: empty. One owner. */
struct bt_chars {
    struct bt_rx_range *v;
    size_t n, cap;
};
void bt_chars_cleanup(struct bt_chars *c);
void bt_chars_add(struct bt_chars *c, uint32_t first, uint32_t last);
void bt_chars_sort(struct bt_chars *c);
/* bt_chars_negate and bt_chars_fold also sort the set. */
void bt_chars_negate(struct bt_chars *c);
/* Adds all characters that differ only in case from a character of the set (simple case
 * folding). */
void bt_chars_fold(struct bt_chars *c);
/* Returns whether two sorted sets have a character in common. */
bool bt_chars_meet(const struct bt_rx_range *a, size_t n_a, const struct bt_rx_range *b,
                   size_t n_b);

/* Adds the characters that \p{name[0..n)} matches: general categories, Any, ASCII, Assigned,
 * White_Space and common scripts, by short or long names. false: the name is not known. */
bool bt_chars_property(struct bt_chars *c, const char *name, size_t n);
void bt_chars_digit(struct bt_chars *c); /* \d \w \s of ECMA-262 */
void bt_chars_word(struct bt_chars *c);
void bt_chars_space(struct bt_chars *c);

/* Decodes the character of UTF-8 at p[0..n). Returns its length; 0: it is not UTF-8. */
size_t bt_chars_decode(const char *p, size_t n, uint32_t *cp_p);

#endif
