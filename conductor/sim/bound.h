/* An upper bound for every scheduler: how many requests of a trace can have their first token
 * within the objective. */
#ifndef BT_CONDUCTOR_SIM_BOUND_H
#define BT_CONDUCTOR_SIM_BOUND_H

#include "conductor/sim/sim.h"

struct bt_sim_due_job { /* by rising release_ms */
    double release_ms, work_ms;
};

/* The largest number of jobs that one machine can finish within due_ms after their release; the
 * others are left out (Kise, Ibaraki and Mine, Operations Research 1978: release and due times in
 * the same order). */
uint32_t bt_sim_most_in_time(const struct bt_sim_due_job *jobs, uint32_t n, double due_ms);

/* An upper bound of the requests within o's objectives, for the part of the trace and the rate in
 * o. It is the smaller of two. By due times: all nodes of the cluster only prefill, all of them
 * together on each prompt; every full block of every earlier request is cached everywhere, also if
 * that request was refused; a step costs nothing but its tokens. But a prompt that a single node
 * cannot prefill within the objective counts as lost. By the nodes' time: capacity.h. TTFT
 * objective 0: all requests. */
uint32_t bt_sim_bound(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                      const struct bt_sim_options *o);

#endif
