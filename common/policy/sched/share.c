/* Buckets and counters. Pure: see share.h. */
#include "common/policy/sched/share.h"

#include <math.h>

void bt_sched_bucket_init(struct bt_sched_bucket *b, double per_s, double burst, double now_ms)
{
    *b = (struct bt_sched_bucket){.per_s = per_s, .burst = BT_MAX(burst, 1), .at_ms = now_ms};
    b->level = b->burst;
}

static void refill(struct bt_sched_bucket *b, double now_ms)
{
    if (now_ms > b->at_ms) {
        b->level = BT_MIN(b->level + b->per_s * (now_ms - b->at_ms) / 1e3, b->burst);
        b->at_ms = now_ms;
    }
}

bool bt_sched_bucket_take(struct bt_sched_bucket *b, double now_ms, double n, double *wait_ms_p)
{
    if (b->per_s <= 0) {
        return true;
    }
    refill(b, now_ms);
    double need = BT_MIN(n, b->burst);
    if (b->level + 1e-9 < need) {
        *wait_ms_p = 1e3 * (need - b->level) / b->per_s;
        return false;
    }
    b->level -= n;
    return true;
}

void bt_sched_bucket_charge(struct bt_sched_bucket *b, double now_ms, double n)
{
    if (b->per_s > 0) {
        refill(b, now_ms);
        b->level -= n;
    }
}

static uint32_t place(uint64_t tenant)
{
    return (uint32_t)((tenant * 0x9e3779b97f4a7c15ull) >> 56) % BT_SCHED_TENANTS;
}

void bt_sched_fair_wait(struct bt_sched_fair *f, uint64_t tenant)
{
    uint32_t at = place(tenant);
    if (f->waiting[at]++ != 0) {
        return;
    }
    double least = INFINITY;
    for (uint32_t i = 0; i < BT_SCHED_TENANTS; i++) {
        least = i != at && f->waiting[i] != 0 ? BT_MIN(least, f->served[i]) : least;
    }
    f->served[at] = BT_MAX(f->served[at], isfinite(least) ? least : f->floor);
}

void bt_sched_fair_leave(struct bt_sched_fair *f, uint64_t tenant)
{
    uint32_t at = place(tenant);
    BT_ASSERT(f->waiting[at] > 0);
    f->waiting[at]--;
    f->floor = BT_MAX(f->floor, f->served[at]);
}

void bt_sched_fair_serve(struct bt_sched_fair *f, uint64_t tenant, double tokens, double weight)
{
    f->served[place(tenant)] += tokens / (weight > 0 ? weight : 1);
}

double bt_sched_fair_counter(const struct bt_sched_fair *f, uint64_t tenant)
{
    return f->served[place(tenant)];
}

bool bt_sched_turn_before(const struct bt_sched_turn *a, const struct bt_sched_turn *b)
{
    if (a->priority != b->priority) {
        return a->priority < b->priority;
    }
    if (a->counter != b->counter) {
        return a->counter < b->counter;
    }
    return a->arrival < b->arrival;
}
