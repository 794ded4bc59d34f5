/* What a conductor expects for both stages: the rows that will come out of prefill, and the recent
 * demand. The conductor and the simulator keep one each and show it to policies. A plain value in
 * the caller's memory. PURE: time is an argument. */
#ifndef BT_POLICY_SCHED_EXPECTED_H
#define BT_POLICY_SCHED_EXPECTED_H

#include "common/policy/sched/sched.h"

struct bt_sched_expected {
    struct bt_sched_forecast forecast;      /* rows, without late ones */
    struct bt_sched_forecast late_forecast; /* late rows */
    struct bt_sched_demand demand;      /* ms of prefill, of all requests that could be in time */
    struct bt_sched_demand let_in;      /* ms of prefill, of requests that prefill workers admit */
    struct bt_sched_demand decodes;     /* decode work of the same requests */
    struct bt_sched_demand late_demand; /* ms of prefill, of requests that admission refused */
};

/* Starts without knowledge. The forecasts' buckets are bucket_ms long, and rows last life_ms until
 * the caller writes measured values into forecast. */
void bt_sched_expected_init(struct bt_sched_expected *e, double bucket_ms, double life_ms,
                            double now_ms);
/* It is now_ms: fills the snapshot's clock, forecasts and demand; e outlives its use. */
void bt_sched_expected_show(struct bt_sched_expected *e, double now_ms,
                            struct bt_sched_snapshot *s);
/* Notes a row, as bt_sched_forecast_note does. Late rows are preempted for all others, so they have
 * a forecast of their own. */
void bt_sched_expected_row(struct bt_sched_expected *e, bool late, double now_ms, double ready_ms,
                           uint32_t kv_tokens, double life_ms, int sign);
/* Prefill workers admit a request, so it also counts as demand for decode workers. */
void bt_sched_expected_let_in(struct bt_sched_expected *e, double now_ms, double compute_ms,
                              double decode_work);

#endif
