/* How many rows the decode pool will have at the time a prefill ends: those of now, thinned out as
 * rows end, and the requests in prefill as they come out of it. Mooncake (arXiv 2407.00079, section
 * 7.4) lets every row last the same time t_d. Here who runs is known and only who ends is
 * estimated: each row goes on with the same chance in every bucket, the mean life of those of now
 * measured, that of those to come told with them. Rows that wait for a place do not end. A plain
 * value in the caller's memory. Pure: time is an argument. */
#ifndef BT_POLICY_SCHED_FORECAST_H
#define BT_POLICY_SCHED_FORECAST_H

#include "common/base/base.h"

#define BT_FORECAST_BUCKETS 512 /* a power of two */

struct bt_sched_forecast {
    double bucket_ms;
    double life_ms;    /* mean time a row of now still decodes: the caller keeps it up to date */
    double kv_life_ms; /* ... and a token of their context stays: long rows may end sooner */
    bool one_life;     /* those to come have the same: what is told of each is passed over */
    /* Of requests that have not arrived yet some will be out of prefill first: as many as are
     * admitted, as far as it took less than the time in question until others were out. The rates
     * are those of rates_ms. */
    double rates_ms, rows_per_ms, kv_per_ms, square_per_ms, time_per_ms, kv_time_per_ms;
    double lead_weight, leads;         /* of the next one, of all */
    double lead[BT_FORECAST_BUCKETS];  /* came out within so many buckets; faded */
    int64_t first;                     /* number of the bucket that begins next to now */
    int64_t due, due_kv;               /* should have come out of prefill, and have not yet */
    int32_t rows[BT_FORECAST_BUCKETS]; /* come out in bucket b, at b % BUCKETS */
    int64_t kv[BT_FORECAST_BUCKETS];
    double due_time, time[BT_FORECAST_BUCKETS]; /* the sum of their lives */
    double due_kv_time, kv_time[BT_FORECAST_BUCKETS];
};

/* Time starts at now_ms. The horizon is BT_FORECAST_BUCKETS * bucket_ms; what is later counts at
 * its end. */
void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double life_ms,
                            double now_ms);
/* A row of kv_tokens context is expected at ready_ms, to decode for life_ms in the mean; sign 1
 * adds it, -1 takes it back with the same ready_ms, kv_tokens and life_ms (it is a row now, or will
 * never be). */
void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double ready_ms,
                            uint32_t kv_tokens, double life_ms, int sign);
/* Time has passed until now_ms: rows that were to come by then are due, and the rates fade. Without
 * it a forecast that nobody notes rows in would stay as it was. */
void bt_sched_forecast_pass(struct bt_sched_forecast *f, double now_ms);
/* What decode workers hold, all together. */
struct bt_sched_room {
    double places, kv; /* rows; tokens of context; 0: not known */
};
/* The pool's rows and their context, and how far both may be off as who ends is drawn: variances.
 */
struct bt_sched_load {
    double rows, kv, rows_var, kv_var;
};
/* load_p: in, what there is now, with the rows that wait for a place; out, what is expected at
 * at_ms, where everything takes `slow` times as long as was told (1: as long). */
void bt_sched_forecast_at(const struct bt_sched_forecast *f, const struct bt_sched_room *room,
                          double at_ms, double slow, struct bt_sched_load *load_p);

#endif
