/* baton-sim plan: should this load be disaggregated, in which ratio, what does it win, how sure.
 * The cost of a step comes from the model's shape and a GPU's data sheet; capacities are found by
 * simulating each split at rising rates. */
#ifndef BT_CONDUCTOR_SIM_PLAN_H
#define BT_CONDUCTOR_SIM_PLAN_H

#include <stdio.h>

#include "conductor/sim/sim.h"

struct bt_sim_plan_options {
    const char *config;        /* a preset of cluster.h, or a model directory with config.json */
    const char *gpu;           /* for a model directory: h200, h100, a800; NULL: h200 */
    uint32_t gpus;             /* all of them; instances of as many as the model needs are made */
    struct bt_sim_options sim; /* policy and admission are set here; rate: the load in question */
    const char *plot;          /* folder for plan.svg; NULL: none */
};

/* An instance's cost and memory: of c the costs, KV and cache sizes are set, gpus_p is how many
 * GPUs it has. ERR_NOT_FOUND, ERR_INVALID; err says what and the remedy. */
bt_status_t bt_sim_plan_instance(const char *config, const char *gpu, struct bt_sim_cluster *c,
                                 uint32_t *gpus_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Writes tables and the answer to out. ERR_INVALID: err says what and the remedy. */
bt_status_t bt_sim_plan(const struct bt_sim_trace *t, const struct bt_sim_plan_options *o,
                        FILE *out, char *err, size_t err_cap) BT_MUST_CHECK;

#endif
