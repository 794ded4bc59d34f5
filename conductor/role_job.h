/* Roles by policy (sched.roles: auto). One conductor of the cluster owns the job. Every second it
 * looks at the load of prefill and decode, and changes the role of a worker if
 * common/policy/sched/balance.h says so. Loop thread. */
#ifndef BT_CONDUCTOR_ROLE_JOB_H
#define BT_CONDUCTOR_ROLE_JOB_H

#include "common/metrics/metrics.h"
#include "common/policy/sched/sched.h"
#include "conductor/view/view.h"

struct bt_role_job;

struct bt_role_job_config {     /* strings are copied */
    const char *cluster, *name; /* the conductor's */
    uint32_t window_ms;
    struct bt_sched_params sched; /* its objectives are the limits that the load is compared with */
};

/* view, etcd and metrics outlive it. */
struct bt_role_job *bt_role_job_create(struct bt_loop *loop, struct bt_etcd *etcd,
                                       struct bt_view *view, const struct bt_role_job_config *conf,
                                       struct bt_metrics *metrics);
/* Sets other objectives. */
void bt_role_job_set_sched(struct bt_role_job *j, const struct bt_sched_params *sched);
void bt_role_job_destroy(struct bt_role_job *j);

#endif
