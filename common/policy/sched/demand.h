/* What a stage has been asked for lately, by how much a request takes of it: of the work that
 * arrives, how much lies in requests that take less than a given one. Work is ms of prefill, or
 * what rows take of decode workers (bt_sched_takes.decode_work); one value of this kind has one of
 * them. A plain value in the caller's memory. PURE: time is an argument. */
#ifndef BT_POLICY_SCHED_DEMAND_H
#define BT_POLICY_SCHED_DEMAND_H

#include "common/base/base.h"

#define BT_DEMAND_BUCKETS 68                 /* a quarter of an octave each, from 1 to 131,072 */
#define BT_DEMAND_STEP    0.8408964152537145 /* from one bucket to the one below */

struct bt_sched_demand {
    double window_ms;               /* over which what was asked for fades */
    double faded_ms;                /* when it was faded last */
    double began_ms;                /* when the first request came; < 0: none has */
    double work[BT_DEMAND_BUCKETS]; /* by work of a request, faded */
};

void bt_sched_demand_init(struct bt_sched_demand *d, double window_ms);
/* A request has arrived that would take so much. */
void bt_sched_demand_note(struct bt_sched_demand *d, double now_ms, double work);
/* Work asked for in a ms, of late, over no less than least_ms: one request at the start is no rate.
 * Of prefills: so many workers it would keep busy. 0 if nothing was. */
double bt_sched_demand_rate(const struct bt_sched_demand *d, double now_ms, double least_ms);
/* The share of the work asked for that lies in requests which take less than this one, and half of
 * that in those which take about as much. 0 if nothing was asked for. */
double bt_sched_demand_below(const struct bt_sched_demand *d, double work);
/* The other way round: about how much a request takes that has this share below it. */
double bt_sched_demand_at(const struct bt_sched_demand *d, double share);

#endif
