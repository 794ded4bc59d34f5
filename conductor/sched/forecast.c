/* Buckets of what comes out of prefill, on a ring. Pure: see forecast.h. */
#include "conductor/sched/forecast.h"

#include <math.h>
#include <string.h>

#define RATE_MS 20000.0 /* over which the rate of admission is taken */
#define LEADS   50.0    /* requests over which the time until they come out is taken */
#define MASK    (BT_FORECAST_BUCKETS - 1)

static int64_t bucket_of(const struct bt_sched_forecast *f, double ms)
{
    return (int64_t)(ms / f->bucket_ms);
}

void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double life_ms,
                            double now_ms)
{
    memset(f, 0, sizeof(*f));
    f->bucket_ms = bucket_ms;
    f->life_ms = life_ms;
    f->first = bucket_of(f, now_ms);
    f->lead_weight = 1;
}

static void advance(struct bt_sched_forecast *f, double now_ms)
{
    int64_t to = bucket_of(f, now_ms);
    for (int64_t n = 0; f->first < to && n < BT_FORECAST_BUCKETS; n++) {
        f->first++;
        f->due += f->rows[f->first & MASK];
        f->due_kv += f->kv[f->first & MASK];
        f->rows[f->first & MASK] = 0;
        f->kv[f->first & MASK] = 0;
    }
    f->first = BT_MAX(f->first, to);
}

static void learn(struct bt_sched_forecast *f, double now_ms, double ready_ms, uint32_t kv_tokens)
{
    double old = exp((f->admitted_ms - now_ms) / RATE_MS);
    f->rows_per_ms = f->rows_per_ms * old + 1 / RATE_MS;
    f->kv_per_ms = f->kv_per_ms * old + kv_tokens / RATE_MS;
    f->admitted_ms = now_ms;
    /* Later ones weigh more: all the others fade. */
    double lead = BT_MAX((ready_ms - now_ms) / f->bucket_ms, 0);
    f->lead[(int)BT_MIN(lead, (double)MASK)] += f->lead_weight;
    f->leads += f->lead_weight;
    f->lead_weight *= 1 + 1 / LEADS;
    if (f->lead_weight > 1e9) {
        for (int i = 0; i < BT_FORECAST_BUCKETS; i++) {
            f->lead[i] /= f->lead_weight;
        }
        f->leads /= f->lead_weight;
        f->lead_weight = 1;
    }
}

void bt_sched_forecast_note(struct bt_sched_forecast *f, double now_ms, double ready_ms,
                            uint32_t kv_tokens, int sign)
{
    advance(f, now_ms);
    if (sign > 0) {
        learn(f, now_ms, ready_ms, kv_tokens);
    }
    int64_t b = BT_MIN(bucket_of(f, ready_ms), f->first + MASK);
    if (b <= f->first) {
        f->due += sign;
        f->due_kv += (int64_t)sign * kv_tokens;
    } else {
        f->rows[b & MASK] += sign;
        f->kv[b & MASK] += (int64_t)sign * kv_tokens;
    }
}

void bt_sched_forecast_at(const struct bt_sched_forecast *f, double at_ms, double *rows_p,
                          double *kv_p)
{
    double rows = *rows_p + (double)f->due, kv = *kv_p + (double)f->due_kv;
    double stay = f->life_ms > 0 ? exp(-f->bucket_ms / f->life_ms) : 0;
    int64_t to = BT_MIN(bucket_of(f, at_ms), f->first + MASK);
    double sooner = 0; /* share of those that come out within the time up to the bucket */
    for (int64_t b = f->first + 1; b <= to; b++) {
        sooner += f->leads > 0 ? f->lead[b - f->first - 1] / f->leads : 0;
        double unseen = sooner * f->bucket_ms;
        rows = rows * stay + f->rows[b & MASK] + unseen * f->rows_per_ms;
        kv = kv * stay + (double)f->kv[b & MASK] + unseen * f->kv_per_ms;
    }
    *rows_p = BT_MAX(rows, 0);
    *kv_p = BT_MAX(kv, 0);
}
