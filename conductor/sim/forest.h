/* Prompts that share prefixes, as a forest, and which of them are worth computing. PURE.
 *
 * A set of the requests is computed. Each prompt of the set begins after the longest prefix that an
 * earlier request of the set has computed. Caches forget nothing and are everywhere. One node at a
 * time computes a prompt, so the computing of a token begins after that of the token before it. A
 * request of the set is good unless this alone makes it late. Let R(x) be the first moment at which
 * a prompt's first x tokens can have been computed, and work(x, y) the time for [x, y). Then
 *     R(y) >= (arrival of the first of the set that has more than x of these tokens) + work(x, y).
 */
#ifndef BT_CONDUCTOR_SIM_FOREST_H
#define BT_CONDUCTOR_SIM_FOREST_H

#include "common/base/base.h"

struct bt_sim_want { /* a request; by rising at_ms */
    double at_ms;
    const uint32_t *blocks; /* [n_blocks] full blocks of its prompt, which it uses and caches */
    uint32_t n_blocks;
    double prompt_ms; /* a node's time for the whole prompt, nothing cached */
    double rows_ms;   /* a node's time for its rows, if it is good */
    bool hopeless;    /* it cannot be good for another reason */
};

struct bt_sim_forest;

/* prefix_ms: [largest n_blocks + 1], a node's time for that many blocks at a prompt's beginning. It
 * and what wants point to are read until destroy. due_ms: from arrival to the first token. Memory
 * grows with the number of branches on the prefixes of all requests. */
struct bt_sim_forest *bt_sim_forest_create(const struct bt_sim_want *wants, uint32_t n,
                                           const double *prefix_ms, double due_ms);
void bt_sim_forest_destroy(struct bt_sim_forest *f);

/* An upper bound of what a set is worth: 1 for each good request, less prompt_price for each ms of
 * computing prompts and row_price for each ms of the good requests' rows. It is not exact, because
 * of the conditions on R only two are checked: x = the prefix found, and x = the one before its
 * branch. */
double bt_sim_forest_best(struct bt_sim_forest *f, double prompt_price, double row_price);

#endif
