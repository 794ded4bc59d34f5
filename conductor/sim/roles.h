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
    uint32_t n, changing;              /* changing: BT_BALANCE_NONE: no node */
    bool to_prefill;                   /* the role that the changing worker gets */
    uint32_t changes;
};

void bt_sim_roles_init(struct bt_sim_roles *r, uint32_t n, double window_ms);
void bt_sim_roles_cleanup(struct bt_sim_roles *r);
/* Looks once at workers [n], and takes the role from one that is to change. idle: the changing
 * worker has no work left; then the call returns true, and worker *worker_p gets the role that
 * r->to_prefill says. */
bool bt_sim_roles_look(struct bt_sim_roles *r, const struct bt_sched_params *params,
                       struct bt_sched_worker *workers, bool idle, double now_ms,
                       uint32_t *worker_p);

#endif
