/* A faded histogram over the logarithm of a request's work. Pure: see demand.h. */
#include "common/policy/sched/demand.h"

#include <math.h>
#include <string.h>

#define PER_OCTAVE 4.0 /* buckets */

void bt_sched_demand_init(struct bt_sched_demand *d, double window_ms)
{
    memset(d, 0, sizeof(*d));
    d->window_ms = window_ms;
    d->began_ms = -1;
}

static uint32_t bucket_of(double work)
{
    double b = work > 1 ? PER_OCTAVE * log2(work) : 0;
    return (uint32_t)BT_MIN(b, (double)(BT_DEMAND_BUCKETS - 1));
}

void bt_sched_demand_note(struct bt_sched_demand *d, double now_ms, double work)
{
    /* All buckets fade together, and not with every request. */
    if (now_ms - d->faded_ms > d->window_ms / 64) {
        double left = exp((d->faded_ms - now_ms) / d->window_ms);
        for (uint32_t i = 0; i < BT_DEMAND_BUCKETS; i++) {
            d->work[i] *= left;
        }
        d->faded_ms = now_ms;
    }
    d->work[bucket_of(work)] += work;
    d->began_ms = d->began_ms < 0 ? now_ms : d->began_ms;
}

static double whole(const struct bt_sched_demand *d)
{
    double all = 0;
    for (uint32_t i = 0; i < BT_DEMAND_BUCKETS; i++) {
        all += d->work[i];
    }
    return all;
}

double bt_sched_demand_rate(const struct bt_sched_demand *d, double now_ms, double least_ms)
{
    /* If work had come steadily since the first request, the sum would stand for this time. */
    double since = d->began_ms < 0 ? 0 : now_ms - d->began_ms;
    double kept = d->window_ms * (1 - exp(-BT_MAX(since, least_ms) / d->window_ms));
    return whole(d) / kept;
}

double bt_sched_demand_below(const struct bt_sched_demand *d, double work)
{
    uint32_t own = bucket_of(work);
    double below = d->work[own] / 2, all = whole(d);
    for (uint32_t i = 0; i < own; i++) {
        below += d->work[i];
    }
    return all > 0 ? below / all : 0;
}

double bt_sched_demand_at(const struct bt_sched_demand *d, double share)
{
    double left = share * whole(d);
    uint32_t i = 0;
    while (i + 1 < BT_DEMAND_BUCKETS && left >= d->work[i]) {
        left -= d->work[i++];
    }
    return exp2(i / PER_OCTAVE);
}
