/* How many requests of a trace the nodes' time suffices for, whoever schedules them. */
#ifndef BT_CONDUCTOR_SIM_CAPACITY_H
#define BT_CONDUCTOR_SIM_CAPACITY_H

#include "conductor/sim/forest.h"
#include "conductor/sim/sim.h"

/* A step's base is paid by its rows, in shares that are never more than it together, whatever the
 * rows and prompts in it; by the TBT objective over all steps and not in each: */
typedef enum {
    BT_SIM_BY_PLACE,   /* one place of rows_max each */
    BT_SIM_BY_CONTEXT, /* the part of a node's pages that its context takes */
    BT_SIM_BY_TBT,     /* as its own work when it begins, of what fits beside the base */
    BT_SIM_SHARES
} bt_sim_share_t;

/* A lower bound of what the first n steps of a row behind a prompt of `input` tokens take of a
 * node's time, in ms, where the gaps that they end are tbt_ms in the mean at most. Over any such
 * rows of a node and one kind of share the sum is at most its time less that of prompts in the same
 * steps (without a base). By TBT: tbt_ms is longer than the base. */
double bt_sim_rows_ms(const struct bt_sim_cluster *c, uint32_t input, uint32_t n, double tbt_ms,
                      bt_sim_share_t share);

/* An upper bound of the requests within o's objectives (TTFT not 0), for the part of the trace and
 * the rate in o. Why it is one: docs/SIMULATION.md, "Bounds". */
uint32_t bt_sim_capacity(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                         const struct bt_sim_options *o);

/* No more of a forest are good where all nodes have node_ms together, and those that may have rows
 * decode_ms of it. */
uint32_t bt_sim_capacity_of(struct bt_sim_forest *f, double node_ms, double decode_ms);

#endif
