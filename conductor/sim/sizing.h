/* The memory that a plan needs: pages of a worker, slab and SSD of a node, and workers for the
 * load. */
#ifndef BT_CONDUCTOR_SIM_SIZING_H
#define BT_CONDUCTOR_SIM_SIZING_H

#include <stdio.h>

#include "conductor/sim/sim.h"

/* Simulates the cluster, whose numbers of nodes are set, under the options' load with slabs of
 * several sizes, and writes the results to out. gpus: of an instance. capacity: requests a second
 * that all instances carry together. per_s: those of the load. */
void bt_sim_sizing(FILE *out, const struct bt_sim_trace *t, const struct bt_sim_cluster *c,
                   const struct bt_sim_options *o, uint32_t gpus, double capacity, double per_s);

#endif
