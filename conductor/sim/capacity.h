/* How many requests of a trace fit into the nodes' time, with any scheduler. */
#ifndef BT_CONDUCTOR_SIM_CAPACITY_H
#define BT_CONDUCTOR_SIM_CAPACITY_H

#include "conductor/sim/forest.h"
#include "conductor/sim/sim.h"

/* How the base of a step is divided among its rows. The shares together never exceed the base,
 * whatever rows and prompts are in the step; with BY_TBT over all steps, not in each: */
typedef enum {
    BT_SIM_BY_PLACE,   /* each row pays one part of rows_max */
    BT_SIM_BY_CONTEXT, /* each row pays by the part of a node's pages that its context takes */
    BT_SIM_BY_TBT, /* each row pays by its own work at its beginning, as part of the TBT objective
                      without the base */
    BT_SIM_SHARES
} bt_sim_share_t;

/* A lower bound, in ms, of a node's time for the first n steps of a row behind a prompt of `input`
 * tokens, if the mean of the gaps before these steps is at most tbt_ms. The sum over any such rows
 * of a node, with one kind of share, is at most the node's time less that of prompts in the same
 * steps (without a base). BT_SIM_BY_TBT: tbt_ms is longer than the base. */
double bt_sim_rows_ms(const struct bt_sim_cluster *c, uint32_t input, uint32_t n, double tbt_ms,
                      bt_sim_share_t share);

/* An upper bound of the requests within o's objectives (TTFT not 0), for the part of the trace and
 * the rate in o. Why it is one: docs/SIMULATION.md, "Bounds". */
uint32_t bt_sim_capacity(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                         const struct bt_sim_options *o);

/* An upper bound of the good requests of a forest, where all nodes together have node_ms, and the
 * nodes that may have rows have decode_ms of it. */
uint32_t bt_sim_capacity_of(struct bt_sim_forest *f, double node_ms, double decode_ms);

#endif
