/* How many rows the decode pool will have at the time a prefill ends: those of now, thinned out as
 * rows end, and the requests in prefill as they come out of it. Mooncake (arXiv 2407.00079, section
 * 7.4) lets every row last the same time t_d. Here who runs is known and only who ends is
 * estimated: each row goes on with the same chance in every bucket, its mean life measured. A plain
 * value in the caller's memory. Pure: time is an argument. */
#ifndef BT_CONDUCTOR_SCHED_FORECAST_H
#define BT_CONDUCTOR_SCHED_FORECAST_H

#include "common/base/base.h"

#define BT_FORECAST_BUCKETS 512 /* a power of two */

struct bt_sched_forecast {
    double bucket_ms;
    double life_ms; /* mean time a row decodes: the caller keeps it up to date */
    /* Of requests that have not arrived yet some will be out of prefill first: as many as are
     * admitted, as far as it took less than the time in question until others were out. */
    double admitted_ms, rows_per_ms, kv_per_ms;
    double lead_weight, leads;         /* of the next one, of all */
    double lead[BT_FORECAST_BUCKETS];  /* came out within so many buckets; faded */
    int64_t first;                     /* number of the bucket that begins next to now */
    int64_t due, due_kv;               /* should have come out of prefill, and have not yet */
    int32_t rows[BT_FORECAST_BUCKETS]; /* come out in bucket b, at b % BUCKETS */
    int64_t kv[BT_FORECAST_BUCKETS];
};

/* Time starts at now_ms. The horizon is BT_FORECAST_BUCKETS * bucket_ms; what is later counts at
 * its end. */
void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double life_ms,
                            double now_ms);
/* A request of kv_tokens context is expected at ready_ms; sign 1 adds it, -1 takes it back with the
 * same ready_ms (it is a row now, or will never be). */
void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double ready_ms,
                            uint32_t kv_tokens, int sign);
/* rows_p, kv_p: in, the pool's rows and their context now; out, what is expected at at_ms. */
void bt_sched_forecast_at(const struct bt_sched_forecast *f, double at_ms, double *rows_p,
                          double *kv_p);

#endif
