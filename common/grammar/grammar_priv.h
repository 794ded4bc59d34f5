/* A grammar and its lock, for grammar.c, which compiles it, and matcher.c, which runs it. */
#ifndef BT_GRAMMAR_GRAMMAR_PRIV_H
#define BT_GRAMMAR_GRAMMAR_PRIV_H

#include <pthread.h>

#include "common/grammar/automaton.h"
#include "common/grammar/grammar.h"
#include "common/grammar/mask.h"

/* The memory of all grammars of a cache, including evicted ones that are in use. The cache and
 * each of its grammars have a reference. */
struct bt_grammar_account {
    uint32_t refs;
    size_t bytes;
};

enum bt_grammar_use { BT_GRAMMAR_IDLE, BT_GRAMMAR_SHORT, BT_GRAMMAR_LONG };
struct bt_grammar {
    uint32_t refs;
    pthread_mutex_t lock; /* for use, waiting and bytes; no other lock is taken under it */
    pthread_cond_t idle;
    enum bt_grammar_use use; /* the call under way; it owns all fields that follow `bytes` */
    uint32_t waiting;
    /* memory of the grammar and of all that it has built, after the last call */
    size_t bytes;
    struct bt_grammar_account *account; /* the account that includes bytes; NULL: none */
    struct bt_program *program;
    struct bt_automaton automaton;
    struct bt_mask_cache masks;
    /* counts resets of the automaton, from 1: a state's number is valid in one generation only */
    uint32_t generation;
};

/* Makes a grammar of the program, and takes the program, also on failure. Statuses: those of
 * bt_program_finish. */
bt_status_t bt_grammar_take(struct bt_program *p, bt_node_t start, struct bt_grammar **g_p,
                            char *err, size_t err_cap) BT_MUST_CHECK;

/* How much work one call may do, in units of bt_rx_set_budget. */
#define BT_GRAMMAR_CALL_WORK 8000000u

/* Begins and ends a call. bt_grammar_enter returns false if the call should be short (brief) while
 * a long one is under way: a short call does not wait for a long one. */
bool bt_grammar_enter(struct bt_grammar *g, bool brief);
void bt_grammar_leave(struct bt_grammar *g);

/* Forgets what the automaton has built. Within a call only. */
void bt_grammar_reset(struct bt_grammar *g);

#endif
