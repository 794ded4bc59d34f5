/* What a conductor expects of both stages: rows on their way out of prefill, and the work that it
 * was asked for lately. The conductor and the simulator keep one each and show it to policies. A
 * plain value in the caller's memory. PURE: time is an argument. */
#ifndef BT_POLICY_SCHED_EXPECTED_H
#define BT_POLICY_SCHED_EXPECTED_H

#include "common/policy/sched/sched.h"

struct bt_sched_expected {
    struct bt_sched_forecast forecast;      /* rows, but late ones */
    struct bt_sched_forecast late_forecast; /* late rows */
    struct bt_sched_demand demand;          /* ms of prefill, of all that could be in time */
    struct bt_sched_demand let_in;          /* ... of those that prefill workers let in */
    struct bt_sched_demand decodes;         /* decode work, of the same */
    struct bt_sched_demand late_demand;     /* ms of prefill, of those that admission refused */
};

/* Nothing is known. The forecasts' buckets are bucket_ms long, and rows last life_ms until the
 * caller writes what it has seen into forecast. */
void bt_sched_expected_init(struct bt_sched_expected *e, double bucket_ms, double life_ms,
                            double now_ms);
/* It is now_ms: fills the snapshot's clock, forecasts and demand; e outlives its use. */
void bt_sched_expected_show(struct bt_sched_expected *e, double now_ms,
                            struct bt_sched_snapshot *s);
/* A row, as of bt_sched_forecast_note. Late rows make way for all others, so those are not told to
 * expect them. */
void bt_sched_expected_row(struct bt_sched_expected *e, bool late, double now_ms, double ready_ms,
                           uint32_t kv_tokens, double life_ms, int sign);
/* Prefill workers let a request in, so that it asks for decode workers too. */
void bt_sched_expected_let_in(struct bt_sched_expected *e, double now_ms, double compute_ms,
                              double decode_work);

#endif
