/* Rate limits by token buckets, and fairness between tenants by virtual token counters (Sheng et
 * al., OSDI'24). Plain values in the caller's memory. PURE. */
#ifndef BT_POLICY_SCHED_SHARE_H
#define BT_POLICY_SCHED_SHARE_H

#include "common/base/base.h"

struct bt_sched_bucket {
    double per_s, burst; /* per_s 0: no limit */
    double level, at_ms; /* tokens left at at_ms; below 0: taken on credit */
};
void bt_sched_bucket_init(struct bt_sched_bucket *b, double per_s, double burst, double now_ms);
/* Takes n if the bucket has that much. A request for more than the burst may take n when the bucket
 * is full. Returns false otherwise; *wait_ms_p is the time until n are there, if no other request
 * takes any. */
bool bt_sched_bucket_take(struct bt_sched_bucket *b, double now_ms, double n, double *wait_ms_p);
/* Takes n that have been used already; the level may fall below 0. */
void bt_sched_bucket_charge(struct bt_sched_bucket *b, double now_ms, double n);

#define BT_SCHED_TENANTS 256 /* by hash: two tenants may share a counter */

struct bt_sched_fair {
    double served[BT_SCHED_TENANTS]; /* the tenant's counter: tokens over weight */
    uint32_t waiting[BT_SCHED_TENANTS];
    double floor; /* the largest counter of tenants that have left the queue */
};
/* A request of the tenant (any hash) waits, or no longer waits. A tenant that returns after an idle
 * time brings no credit: its counter begins at the smallest one of the waiting tenants.
 */
void bt_sched_fair_wait(struct bt_sched_fair *f, uint64_t tenant);
void bt_sched_fair_leave(struct bt_sched_fair *f, uint64_t tenant);
/* The tenant got service: tokens = computed prompt tokens + 2 * generated tokens. weight: its share
 * relative to others; 0 counts as 1. */
void bt_sched_fair_serve(struct bt_sched_fair *f, uint64_t tenant, double tokens, double weight);
double bt_sched_fair_counter(const struct bt_sched_fair *f, uint64_t tenant);

/* Order in a queue: smaller priority first, then the tenant with the smaller counter, then arrival.
 */
struct bt_sched_turn {
    int32_t priority;
    double counter;
    uint64_t arrival;
};
bool bt_sched_turn_before(const struct bt_sched_turn *a, const struct bt_sched_turn *b);

#endif
