/* Drafts from the sequence itself: what followed the last time that its text ended like this. Needs
 * no weights. PURE: plain memory of the caller, no clock, no allocation.
 *
 * suffix: of the places where the last two tokens occur, the latest one with the longest common
 * suffix; what followed there is the draft. A suffix automaton finds the same place, but takes 60
 * bytes a token or more, which is 8 MB for a prompt of 128k. Hash chains, as LZ77 compressors use
 * them, take 6 to 8 bytes a token, and a search looks at BT_SPEC_CHAIN places at most.
 * ngram: the latest place where the last three tokens occur (prompt lookup decoding). */
#ifndef BT_SPEC_MATCH_H
#define BT_SPEC_MATCH_H

#include "common/base/base.h"
#include "common/spec/spec.h"

#define BT_SPEC_CHAIN     32 /* places that a search looks at */
#define BT_SPEC_MATCH_MAX 64 /* tokens of a common suffix that are compared */

struct bt_spec_match {
    uint32_t len_max; /* tokens that the sequence may have */
    uint32_t mask;    /* heads - 1 */
    uint32_t gram;    /* tokens that are hashed: 2 or 3 */
    uint32_t chain;   /* places that a search looks at */
    uint32_t n;       /* tokens [0, n) are in the index */
    uint32_t links[]; /* heads [mask + 1], then the place before each place [len_max]; place + 1 */
};

/* Bytes of the index of a sequence of up to len_max tokens; all zero before bt_spec_match_init. */
size_t bt_spec_match_bytes(uint32_t len_max);
/* kind: BT_SPEC_SUFFIX or BT_SPEC_NGRAM. */
void bt_spec_match_init(struct bt_spec_match *m, bt_spec_kind_t kind, uint32_t len_max);
/* Adds known tokens up to n, at most `most` of them. True: all are in the index. */
bool bt_spec_match_extend(struct bt_spec_match *m, const uint32_t *tokens, uint32_t n,
                          uint32_t most);
/* Fills *d with at most `most` tokens that may follow tokens[0, n), and sets d->match to the length
 * of the common suffix. All n tokens must be in the index. */
void bt_spec_match_find(const struct bt_spec_match *m, const uint32_t *tokens, uint32_t n,
                        uint32_t most, struct bt_spec_draft *d);

#endif
