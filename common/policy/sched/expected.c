/* Forecasts and demand together. Pure: see expected.h. */
#include "common/policy/sched/expected.h"

#define DEMAND_MS 60000.0 /* time in which old demand fades */

void bt_sched_expected_init(struct bt_sched_expected *e, double bucket_ms, double life_ms,
                            double now_ms)
{
    bt_sched_forecast_init(&e->forecast, bucket_ms, life_ms, now_ms);
    bt_sched_forecast_init(&e->late_forecast, bucket_ms, life_ms, now_ms);
    bt_sched_demand_init(&e->demand, DEMAND_MS);
    bt_sched_demand_init(&e->let_in, DEMAND_MS);
    bt_sched_demand_init(&e->decodes, DEMAND_MS);
    bt_sched_demand_init(&e->late_demand, DEMAND_MS);
}

void bt_sched_expected_show(struct bt_sched_expected *e, double now_ms, struct bt_sched_snapshot *s)
{
    bt_sched_forecast_pass(&e->forecast, now_ms);
    bt_sched_forecast_pass(&e->late_forecast, now_ms);
    s->now_ms = now_ms;
    s->forecast = &e->forecast;
    s->late_forecast = &e->late_forecast;
    s->demand = &e->demand;
    s->let_in = &e->let_in;
    s->decodes = &e->decodes;
    s->late_demand = &e->late_demand;
}

void bt_sched_expected_row(struct bt_sched_expected *e, bool late, double now_ms, double ready_ms,
                           uint32_t kv_tokens, double life_ms, int sign)
{
    bt_sched_forecast_note(late ? &e->late_forecast : &e->forecast, now_ms, ready_ms, kv_tokens,
                           life_ms, sign);
}

void bt_sched_expected_let_in(struct bt_sched_expected *e, double now_ms, double compute_ms,
                              double decode_work)
{
    bt_sched_demand_note(&e->let_in, now_ms, compute_ms);
    bt_sched_demand_note(&e->decodes, now_ms, decode_work);
}
