/* Prompts that share prefixes as a forest, and which of them are worth their computing. PURE.
 *
 * Of requests a set is computed, each from the longest prefix on that an earlier one of the set has
 * left. Caches forget nothing and are everywhere, and a prompt is computed by one node at a time,
 * so a token's computing begins once that of the token before it has ended, whoever did it. A
 * request of the set is good where that does not already make it late: with R(x) the first moment
 * at which anybody can have computed a prompt's first x tokens, and work(x, y) what [x, y) take,
 *     R(y) >= (arrival of the first of the set that has more than x of these tokens) + work(x, y).
 */
#ifndef BT_CONDUCTOR_SIM_FOREST_H
#define BT_CONDUCTOR_SIM_FOREST_H

#include "common/base/base.h"

struct bt_sim_want { /* a request; by rising at_ms */
    double at_ms;
    const uint32_t *blocks; /* [n_blocks] full blocks of its prompt: these it uses and leaves */
    uint32_t n_blocks;
    double prompt_ms; /* a node's time for the whole prompt, nothing cached */
    double rows_ms;   /* a node's time for its rows, where it is good */
    bool hopeless;    /* it cannot be good for another reason */
};

struct bt_sim_forest;

/* prefix_ms: [most n_blocks + 1], a node's time for that many blocks at a prompt's beginning; it
 * and what wants point to are read until destroy. due_ms: from arrival to the first token. Memory
 * goes with the sum over the requests of how often their prefixes branch. */
struct bt_sim_forest *bt_sim_forest_create(const struct bt_sim_want *wants, uint32_t n,
                                           const double *prefix_ms, double due_ms);
void bt_sim_forest_destroy(struct bt_sim_forest *f);

/* The most that a set is worth: 1 for each good one, less prompt_price for each ms of computing
 * prompts and row_price for each ms of the good ones' rows. At least that, as of what R asks only
 * x = the prefix found and x = the one before its branch are looked at. */
double bt_sim_forest_best(struct bt_sim_forest *f, double prompt_price, double row_price);

#endif
