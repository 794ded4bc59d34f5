/* Masks of states: which tokens may follow. The mask of a state is computed once and kept with
 * it. The caller holds the grammar's lock. */
#ifndef BT_GRAMMAR_MASK_H
#define BT_GRAMMAR_MASK_H

#include "common/grammar/automaton.h"
#include "common/grammar/vocab.h"

struct bt_mask_cache {
    size_t max_bytes, bytes; /* memory of the masks of all states */
    uint64_t serial;         /* of the vocabulary that the masks are for */
    struct bt_mask_level *levels;
    uint32_t n_levels;
    uint32_t *ids; /* tokens of the mask that is being made */
    uint32_t n_ids, ids_cap;
    uint32_t *later; /* nodes of the trie that the mask puts off */
    uint32_t n_later, later_cap;
    uint64_t walked;              /* bits of `seen`, of nodes that are walked; 0: all nodes are */
    uint32_t n_frames, n_readers; /* the automaton's numbers before the mask */
};

/* bits[v->words] become the mask of the state. ERR_EXHAUSTED: a limit of the automaton was met. */
bt_status_t bt_mask_get(struct bt_mask_cache *c, struct bt_automaton *m,
                        const struct bt_grammar_vocab *v, uint32_t state,
                        uint32_t *bits) BT_MUST_CHECK;
/* Forgets all masks. Must be called before the automaton is reset or destroyed. */
void bt_mask_drop(struct bt_mask_cache *c, struct bt_automaton *m);
void bt_mask_cleanup(struct bt_mask_cache *c, struct bt_automaton *m);

#endif
