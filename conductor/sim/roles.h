/* Roles by load in a simulated cluster: the conductor's own rule (common/policy/sched/balance.h),
 * asked every second as in conductor/role_job.c. A node that is to change stops offering its role,
 * finishes what it has (a live worker's rest is planned elsewhere after some seconds) and then
 * offers the other one. */
#ifndef BT_CONDUCTOR_SIM_ROLES_H
#define BT_CONDUCTOR_SIM_ROLES_H

#include "common/policy/sched/balance.h"
#include "common/policy/sched/sched.h"

#define BT_SIM_ROLES_LOOK_MS 1000

struct bt_sim_roles {
    struct bt_balance balance;
    struct bt_balance_params params;
    struct bt_balance_worker *workers; /* [n] */
    uint32_t n, changing;              /* changing: BT_BALANCE_NONE: nobody */
    bool to_prefill;                   /* what that one becomes */
    uint32_t changes;
};

void bt_sim_roles_init(struct bt_sim_roles *r, uint32_t n, double window_ms);
void bt_sim_roles_cleanup(struct bt_sim_roles *r);
/* One look at workers [n], whose roles it takes away. idle: the one that is changing has nothing
 * left; returns then that it is to offer r->to_prefill now, its number in *worker_p. */
bool bt_sim_roles_look(struct bt_sim_roles *r, const struct bt_sched_params *params,
                       struct bt_sched_worker *workers, bool idle, double now_ms,
                       uint32_t *worker_p);

#endif
