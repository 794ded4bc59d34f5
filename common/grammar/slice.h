/* Which tokens of a mask come from bitmaps: a state that allows every text over a set of characters
 * allows all tokens of the set's slice (vocab.h). Most patterns forbid a few characters ([^@],
 * [^/:]) and so allow no slice as a whole; then the slice has holes: it lacks the tokens with one
 * of these characters. The caller holds the grammar's lock. */
#ifndef BT_GRAMMAR_SLICE_H
#define BT_GRAMMAR_SLICE_H

#include "common/grammar/automaton.h"
#include "common/grammar/vocab.h"

struct bt_slice_choice {
    uint8_t set;       /* BT_SLICE_SETS: none */
    uint8_t chars;     /* only the tokens with at most this many characters */
    uint64_t holes[2]; /* ASCII characters that the tokens lack; only in LINE and GRAPHIC */
};

static inline bool bt_slice_has_holes(const struct bt_slice_choice *c)
{
    return (c->holes[0] | c->holes[1]) != 0;
}
/* Chooses for the threads arena[at..at+n). Tokens of the choice are allowed; others may be. */
void bt_slice_choose(struct bt_automaton *m, const struct bt_grammar_vocab *v, uint32_t at,
                     uint32_t n, struct bt_slice_choice *choice);
/* Of a choice with holes: adds its tokens to bits[v->words]. */
void bt_slice_bits(const struct bt_grammar_vocab *v, const struct bt_slice_choice *choice,
                   uint32_t *bits);
/* Of a choice with holes: a node of v->all whose `seen` has none of these bits has no other tokens
 * below it than those of the choice. */
uint64_t bt_slice_walked(const struct bt_slice_choice *choice);

#endif
