/* How many rows the decode workers will have when a prefill ends: the present rows that have not
 * ended by then, and the requests whose prefill has ended by then. Mooncake (arXiv 2407.00079,
 * section 7.4) lets every row last the same time t_d. Here each row continues with the same chance
 * in every bucket. The mean life of present rows is measured; the caller gives that of each row to
 * come. Rows that wait for a slot do not end. A plain value in the caller's memory. Pure: time is
 * an argument. */
#ifndef BT_POLICY_SCHED_FORECAST_H
#define BT_POLICY_SCHED_FORECAST_H

#include "common/base/base.h"

#define BT_FORECAST_BUCKETS 512 /* a power of two */

struct bt_sched_forecast {
    double bucket_ms;
    double life_ms; /* mean time that a present row still lasts; the caller keeps it up to date */
    double kv_life_ms; /* the same, weighted by context, because long rows may end sooner */
    bool one_life;     /* rows to come have the same life; the life given with each is ignored */
    /* Some requests that have not arrived yet will end their prefill before the time in question:
     * their number follows from the rate of admission and from how long earlier requests took. The
     * rates are as of rates_ms. */
    double rates_ms, rows_per_ms, kv_per_ms, square_per_ms, time_per_ms, kv_time_per_ms;
    double lead_weight, leads; /* weight of the next request, sum over all */
    double
        lead[BT_FORECAST_BUCKETS]; /* requests whose prefill took this number of buckets; faded */
    int64_t first;                 /* number of the bucket that contains the present time */
    int64_t due, due_kv;           /* expected out of prefill by now, and not yet out */
    int32_t rows[BT_FORECAST_BUCKETS]; /* rows expected in bucket b, at index b % BUCKETS */
    int64_t kv[BT_FORECAST_BUCKETS];
    double due_time, time[BT_FORECAST_BUCKETS]; /* sums of their lives */
    double due_kv_time, kv_time[BT_FORECAST_BUCKETS];
};

/* Time starts at now_ms. The horizon is BT_FORECAST_BUCKETS * bucket_ms; later rows count at its
 * end. */
void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double life_ms,
                            double now_ms);
/* A row with kv_tokens of context is expected at ready_ms, to last life_ms in the mean. sign 1 adds
 * it; -1 removes it, with the same ready_ms, kv_tokens and life_ms, because it has begun or will
 * never begin. */
void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double ready_ms,
                            uint32_t kv_tokens, double life_ms, int sign);
/* It is now_ms: rows expected by now become due, and the rates fade. Must be called regularly, also
 * if no rows are noted. */
void bt_sched_forecast_pass(struct bt_sched_forecast *f, double now_ms);
/* The capacity of all decode workers together. */
struct bt_sched_room {
    double places, kv; /* rows; tokens of context; 0: not known */
};
/* Rows of all decode workers and their context, with variances, because it is chance which rows
 * end.
 */
struct bt_sched_load {
    double rows, kv, rows_var, kv_var;
};
/* load_p: in, the present load, with the rows that wait for a slot; out, the expected load at
 * at_ms, if everything takes `slow` times as long as predicted. */
void bt_sched_forecast_at(const struct bt_sched_forecast *f, const struct bt_sched_room *room,
                          double at_ms, double slow, struct bt_sched_load *load_p);

#endif
