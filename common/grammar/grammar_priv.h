/* A grammar and its lock. grammar.c compiles, matcher.c runs. */
#ifndef BT_GRAMMAR_GRAMMAR_PRIV_H
#define BT_GRAMMAR_GRAMMAR_PRIV_H

#include <pthread.h>

#include "common/grammar/automaton.h"
#include "common/grammar/grammar.h"
#include "common/grammar/mask.h"

/* Memory of all grammars of a cache, those in use included. References: the cache's and theirs. */
struct bt_grammar_account {
    uint32_t refs;
    size_t bytes;
};

enum bt_grammar_use { BT_GRAMMAR_IDLE, BT_GRAMMAR_SHORT, BT_GRAMMAR_LONG };
struct bt_grammar {
    uint32_t refs;
    pthread_mutex_t lock; /* of use, waiting and bytes; nothing else is locked while it is held */
    pthread_cond_t idle;
    enum bt_grammar_use use; /* the call under way, whose what follows `bytes` is */
    uint32_t waiting;
    size_t bytes;                       /* memory with all that was built, behind the last call */
    struct bt_grammar_account *account; /* that bytes are a part of; NULL: none */
    struct bt_program *program;
    struct bt_automaton automaton;
    struct bt_mask_cache masks;
    uint32_t generation; /* of the automaton's states, from 1: a reset makes all numbers of states
                            void */
};

/* Makes a grammar of a program that it takes, also in failure: as bt_program_finish. */
bt_status_t bt_grammar_take(struct bt_program *p, bt_node_t start, struct bt_grammar **g_p,
                            char *err, size_t err_cap) BT_MUST_CHECK;

/* How much work one call may do, in units of bt_rx_set_budget. */
#define BT_GRAMMAR_CALL_WORK 8000000u

/* A call begins, and ends. False: it is to be short, and one that is not is under way: nobody waits
 * for that. */
bool bt_grammar_enter(struct bt_grammar *g, bool brief);
void bt_grammar_leave(struct bt_grammar *g);

/* Forgets what the automaton has built. In a call. */
void bt_grammar_reset(struct bt_grammar *g);

#endif
