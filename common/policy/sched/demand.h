/* The recent demand for a stage, by the size of requests: of the work that arrives, how much is in
 * requests smaller than a given one. Work is either ms of prefill or decode work
 * (bt_sched_takes.decode_work). A plain value in the caller's memory. PURE: time is an argument. */
#ifndef BT_POLICY_SCHED_DEMAND_H
#define BT_POLICY_SCHED_DEMAND_H

#include "common/base/base.h"

#define BT_DEMAND_BUCKETS 68                 /* a quarter of an octave each, from 1 to 131,072 */
#define BT_DEMAND_STEP    0.8408964152537145 /* from one bucket to the one below */

struct bt_sched_demand {
    double window_ms;               /* the time in which old demand fades */
    double faded_ms;                /* time of the last fading */
    double began_ms;                /* time of the first request; < 0: none has come */
    double work[BT_DEMAND_BUCKETS]; /* faded work, by the work of a request */
};

void bt_sched_demand_init(struct bt_sched_demand *d, double window_ms);
/* A request of this work has arrived. */
void bt_sched_demand_note(struct bt_sched_demand *d, double now_ms, double work);
/* Recent demand: work that arrives in a ms, measured over at least least_ms, because a single first
 * request is no rate. For prefills this is the number of workers that it would keep busy. 0: no
 * demand. */
double bt_sched_demand_rate(const struct bt_sched_demand *d, double now_ms, double least_ms);
/* The share of the demand in smaller requests, plus half of the share in requests of about the same
 * size. 0: no demand. */
double bt_sched_demand_below(const struct bt_sched_demand *d, double work);
/* The inverse: the approximate size of a request that has this share below it. */
double bt_sched_demand_at(const struct bt_sched_demand *d, double share);

#endif
