/* What no scheduler can exceed: how many requests of a trace can have their first token within the
 * objective. */
#ifndef BT_CONDUCTOR_SIM_BOUND_H
#define BT_CONDUCTOR_SIM_BOUND_H

#include "conductor/sim/sim.h"

struct bt_sim_due_job { /* by rising release_ms */
    double release_ms, work_ms;
};

/* The most jobs that one machine can finish within due_ms of their release each, others being left
 * out (Kise, Ibaraki and Mine, Operations Research 1978: release and due times in the same order).
 */
uint32_t bt_sim_most_in_time(const struct bt_sim_due_job *jobs, uint32_t n, double due_ms);

/* An upper bound of the requests within o's objectives, for the part of the trace and the rate in
 * o: the lesser of two. By due times: all of the cluster's nodes do nothing but prefill, together
 * on every prompt; every full block of every earlier request is cached everywhere, whether it was
 * served or not; a step has no cost beside its tokens. But no prompt is computed by two nodes at
 * once: one that a single node cannot prefill within the objective counts as lost. By the nodes'
 * time: capacity.h. 0 TTFT objective: all of them. */
uint32_t bt_sim_bound(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                      const struct bt_sim_options *o);

#endif
