/* When a prompt that comes now would be computed by a worker of the prefill role: its batcher
 * (batch.h) rolled forward over the prompts that wait. The conductor predicts queues with it, the
 * worker says with it how long its own is. PURE. */
#ifndef BT_BATCH_AHEAD_H
#define BT_BATCH_AHEAD_H

#include "common/batch/batch.h"

#define BT_BATCH_AHEAD_SEQS   16 /* prompts that are rolled forward; more wait one by one */
#define BT_BATCH_AHEAD_STEPS  32 /* steps in which prompts share; then they take turns */
#define BT_BATCH_AHEAD_JOINS  4
#define BT_BATCH_AHEAD_CHUNKS 8 /* of the newcomer; later ones are taken to share nothing */

/* Times in ns from the beginning of the step under way. Zeroed: nobody waits. */
struct bt_batch_ahead {
    double step_ns; /* the step under way is over; 0: there is none */
    double done_ns; /* the first of those that wait is computed */
    double all_ns;  /* ... and all of them */
    /* The first step that a newcomer of up to most_tokens shares, to be computed at once: with
     * `tokens` of others it takes step_ns, and begins at begin_ns. Later steps have room for more.
     */
    struct {
        uint32_t most_tokens;
        double begin_ns, step_ns, tokens;
    } joins[BT_BATCH_AHEAD_JOINS];
    uint32_t n_joins;
    /* A newcomer of several chunks: its first step begins, and its first 1, 2, ... of them take so
     * much longer than they would by themselves. */
    double chunks_begin_ns, chunks_beside_ns[BT_BATCH_AHEAD_CHUNKS];
};

/* Rolls b forward: at most BT_BATCH_AHEAD_SEQS seqs (they are changed), by rising order, and
 * b->cost, which is set. rows[0..n_rows): the step under way, which nobody joins any more. chunk:
 * most tokens of the newcomer in a step (0: no limit); it comes behind all others. */
void bt_batch_ahead(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n_rows,
                    uint32_t chunk, struct bt_batch_ahead *out);
/* Where a newcomer's tokens [from, to) would be computed: when its first step begins, and in
 * *beside_p how much longer its steps take than by themselves; ns. chunk: as before. */
double bt_batch_ahead_of(const struct bt_batch_ahead *a, const struct bt_batch_cost *c,
                         uint32_t from, uint32_t to, uint32_t chunk, double *beside_p);

#endif
