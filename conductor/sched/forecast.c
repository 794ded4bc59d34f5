/* Buckets of expected changes on a ring, and their sum up to the first one. Pure: see forecast.h.
 */
#include "conductor/sched/forecast.h"

#include <string.h>

#define MASK (BT_FORECAST_BUCKETS - 1)

static int64_t bucket_of(const struct bt_sched_forecast *f, double ms)
{
    return (int64_t)(ms / f->bucket_ms);
}

void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double now_ms)
{
    memset(f, 0, sizeof(*f));
    f->bucket_ms = bucket_ms;
    f->first = bucket_of(f, now_ms);
}

/* What has begun by now moves from the ring into the sum. */
static void advance(struct bt_sched_forecast *f, double now_ms)
{
    int64_t to = bucket_of(f, now_ms);
    for (int64_t n = 0; f->first < to && n < BT_FORECAST_BUCKETS; n++) {
        f->first++;
        f->rows += f->d_rows[f->first & MASK];
        f->kv_tokens += f->d_kv[f->first & MASK];
        f->d_rows[f->first & MASK] = 0;
        f->d_kv[f->first & MASK] = 0;
    }
    f->first = BT_MAX(f->first, to);
}

static void change(struct bt_sched_forecast *f, double at_ms, int64_t rows, int64_t kv)
{
    int64_t b = BT_MIN(bucket_of(f, at_ms), f->first + MASK);
    if (b <= f->first) {
        f->rows += rows;
        f->kv_tokens += kv;
        return;
    }
    f->d_rows[b & MASK] += (int32_t)rows;
    f->d_kv[b & MASK] += kv;
}

void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double from_ms,
                            double until_ms, uint32_t kv_tokens, int sign)
{
    advance(f, now_ms);
    change(f, from_ms, sign, (int64_t)sign * kv_tokens);
    change(f, until_ms, -sign, -(int64_t)sign * kv_tokens);
}

void bt_sched_forecast_at(const struct bt_sched_forecast *f, double at_ms, int64_t *rows_p,
                          int64_t *kv_tokens_p)
{
    int64_t rows = f->rows, kv = f->kv_tokens;
    int64_t to = BT_MIN(bucket_of(f, at_ms), f->first + MASK);
    for (int64_t b = f->first + 1; b <= to; b++) {
        rows += f->d_rows[b & MASK];
        kv += f->d_kv[b & MASK];
    }
    *rows_p = BT_MAX(rows, 0);
    *kv_tokens_p = BT_MAX(kv, 0);
}
