/* Masks of states: which tokens may follow. Computed once a state, kept with it. The caller holds
 * the grammar's lock. */
#ifndef BT_GRAMMAR_MASK_H
#define BT_GRAMMAR_MASK_H

#include "common/grammar/automaton.h"
#include "common/grammar/vocab.h"

struct bt_mask_cache {
    size_t max_bytes, bytes; /* of the masks of all states */
    uint64_t serial;         /* of the vocabulary that the masks are for */
    struct bt_mask_level *levels;
    uint32_t n_levels;
    uint32_t *ids; /* tokens of the mask under way */
    uint32_t n_ids, ids_cap;
    uint32_t *later; /* nodes of the trie that it puts off */
    uint32_t n_later, later_cap;
    uint32_t n_frames, n_readers; /* of the automaton, before the mask */
};

/* bits[v->words] of a state. ERR_EXHAUSTED: a limit of the automaton. */
bt_status_t bt_mask_get(struct bt_mask_cache *c, struct bt_automaton *m,
                        const struct bt_grammar_vocab *v, uint32_t state,
                        uint32_t *bits) BT_MUST_CHECK;
/* Forgets all masks; before the automaton is reset or destroyed. */
void bt_mask_drop(struct bt_mask_cache *c, struct bt_automaton *m);
void bt_mask_cleanup(struct bt_mask_cache *c, struct bt_automaton *m);

#endif
