/* Predicts when a prefill worker would compute a prompt that comes now: rolls its batcher (batch.h)
 * forward over the waiting prompts. The conductor predicts queues with it, and the worker reports
 * the length of its own queue with it. PURE. */
#ifndef BT_BATCH_AHEAD_H
#define BT_BATCH_AHEAD_H

#include "common/batch/batch.h"

#define BT_BATCH_AHEAD_SEQS   16 /* prompts that are rolled forward; then one after the other */
#define BT_BATCH_AHEAD_STEPS  32 /* steps that prompts may share; then one after the other */
#define BT_BATCH_AHEAD_JOINS  4
#define BT_BATCH_AHEAD_CHUNKS 8 /* chunks of the new prompt; later ones share no step */

/* Times in ns from the beginning of the current step. Zeroed: no prompt waits. */
struct bt_batch_ahead {
    double step_ns; /* end of the current step; 0: there is none */
    double done_ns; /* the first waiting prompt is computed */
    double all_ns;  /* ... and all of them */
    /* The first step that a new prompt of up to most_tokens can share so that it is computed at
     * once. With `tokens` of others it takes step_ns, and it begins at begin_ns. Later steps have
     * room for more. */
    struct {
        uint32_t most_tokens;
        double begin_ns, step_ns, tokens;
    } joins[BT_BATCH_AHEAD_JOINS];
    uint32_t n_joins;
    /* A new prompt of several chunks: when its first step begins, and how much longer its first 1,
     * 2, ... steps take than without others. */
    double chunks_begin_ns, chunks_beside_ns[BT_BATCH_AHEAD_CHUNKS];
};

/* Rolls b forward over at most BT_BATCH_AHEAD_SEQS seqs (they are changed), by rising order.
 * b->cost must be set. rows[0..n_rows): the current step, which no prompt can join. chunk: most
 * tokens of the new prompt in a step (0: no limit). The new prompt comes after all others. */
void bt_batch_ahead(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n_rows,
                    uint32_t chunk, struct bt_batch_ahead *out);
/* When the first step with tokens [from, to) of a new prompt begins, in ns. *beside_p: how much
 * longer its steps take than without others. chunk: as above. */
double bt_batch_ahead_of(const struct bt_batch_ahead *a, const struct bt_batch_cost *c,
                         uint32_t from, uint32_t to, uint32_t chunk, double *beside_p);

#endif
