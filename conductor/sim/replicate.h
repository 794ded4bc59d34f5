/* Copies of hot prefixes ahead of need in a simulated cluster: the rule of
 * conductor/request/replicate.c over the same counts (conductor/sched/hot.h). */
#ifndef BT_CONDUCTOR_SIM_REPLICATE_H
#define BT_CONDUCTOR_SIM_REPLICATE_H

#include "conductor/sched/hot.h"
#include "conductor/sched/sched.h"

struct bt_sim_replicate {
    struct bt_hot hot;
    double bytes_per_s, uses_per_copy; /* as sched.replica_bytes_per_s and _uses; 0 bytes: none */
    double budget, filled_ms;
    bool pending; /* the caller's: a copy is on its way; one at a time */
};

struct bt_sim_copy {
    uint32_t from, to, blocks; /* kvstores; the first so many blocks of the request */
};

void bt_sim_replicate_init(struct bt_sim_replicate *r, double bytes_per_s, double uses_per_copy);
/* A request with these full blocks was placed under snap (match_blocks are its own). True: *copy_p
 * is to be made, and its bytes are spent. */
bool bt_sim_replicate_look(struct bt_sim_replicate *r, const struct bt_sched_params *params,
                           const struct bt_sched_snapshot *snap, const uint32_t *blocks, uint32_t n,
                           double block_bytes, struct bt_sim_copy *copy_p);

#endif
