/* How many rows the decode pool will have, and when: each request that is placed is expected from
 * the end of its prefill for a typical time of decoding (Mooncake, arXiv 2407.00079, section 7.4).
 * A plain value in the caller's memory. Pure: time is an argument. */
#ifndef BT_CONDUCTOR_SCHED_FORECAST_H
#define BT_CONDUCTOR_SCHED_FORECAST_H

#include "common/base/base.h"

#define BT_FORECAST_BUCKETS 1024 /* a power of two */

struct bt_sched_forecast {
    double bucket_ms;
    int64_t first;           /* number of the bucket that `rows` and `kv_tokens` describe */
    int64_t rows, kv_tokens; /* expected in it */
    int32_t d_rows[BT_FORECAST_BUCKETS]; /* change at the beginning of bucket b, at b % BUCKETS */
    int64_t d_kv[BT_FORECAST_BUCKETS];
};

/* Time starts at now_ms. The horizon is BT_FORECAST_BUCKETS * bucket_ms; what is later counts at
 * its end. */
void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double now_ms);
/* A request of kv_tokens context is expected in [from_ms, until_ms); sign 1 adds it, -1 takes back
 * what an earlier call with the same times has added (it was cancelled, or ended early). */
void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double from_ms,
                            double until_ms, uint32_t kv_tokens, int sign);
/* Rows and their context expected at at_ms. */
void bt_sched_forecast_at(const struct bt_sched_forecast *f, double at_ms, int64_t *rows_p,
                          int64_t *kv_tokens_p);

#endif
