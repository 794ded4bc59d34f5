/* Late requests whose prefix another request is computing. Pure: see sched.h. */
#include "common/policy/sched/sched_priv.h"

#include <math.h>

/* The time to compute the rest on the fastest worker. */
static double rest_ms(const struct bt_sched_params *c, const struct bt_sched_snapshot *s,
                      const struct bt_sched_request *req, uint32_t cached)
{
    double least = INFINITY;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        const struct bt_sched_worker *w = &s->workers[i];
        if (w->prefill || w->decode) {
            least = BT_MIN(least, bt_sched_compute_ms(c, w, req, cached));
        }
    }
    return least;
}

bool bt_sched_follows(const struct bt_sched_policy *policy, const struct bt_sched_params *c,
                      const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                      const struct bt_sched_plan *late, const struct bt_sched_reject *reject,
                      bt_sched_coming_fn coming, void *arg)
{
    struct bt_sched_coming first = {0};
    if (policy->late == NULL || reject->by_decode || reject->compute_ms <= BT_SCHED_BURST_MS) {
        return false;
    }
    coming(arg, &first);
    double rest = rest_ms(c, snap, req, bt_sched_usable(req, first.blocks));
    double then = first.ready_ms + rest;
    bool sooner = late == NULL || then < late->first.ms - req->waited_ms;
    return first.blocks != 0 && sooner && reject->compute_ms - rest > BT_SCHED_BURST_MS &&
           req->waited_ms + then < c->late.wait_ms;
}
