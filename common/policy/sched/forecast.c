/* A ring of buckets: rows by the time at which their prefill ends. Pure: see forecast.h. */
#include "common/policy/sched/forecast.h"

#include <math.h>
#include <string.h>

#define RATE_MS 20000.0 /* time over which the rate of admission is averaged */
#define SANE_MS 1e12    /* 31 years */
#define LEADS   50.0    /* number of requests over which the length of prefills is averaged */
#define MASK    (BT_FORECAST_BUCKETS - 1)

/* Times come from workers' reports. A sum that contains an infinity never recovers, so a value that
 * is not a number becomes 0. */
static double sane_ms(double ms)
{
    return ms > 0 ? BT_MIN(ms, SANE_MS) : 0;
}

static int64_t bucket_of(const struct bt_sched_forecast *f, double ms)
{
    return (int64_t)(sane_ms(ms) / f->bucket_ms);
}

void bt_sched_forecast_init(struct bt_sched_forecast *f, double bucket_ms, double life_ms,
                            double now_ms)
{
    memset(f, 0, sizeof(*f));
    f->bucket_ms = bucket_ms;
    f->life_ms = f->kv_life_ms = life_ms;
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
        f->due_time += f->time[f->first & MASK];
        f->time[f->first & MASK] = 0;
        f->due_kv_time += f->kv_time[f->first & MASK];
        f->kv_time[f->first & MASK] = 0;
    }
    f->first = BT_MAX(f->first, to);
}

void bt_sched_forecast_pass(struct bt_sched_forecast *f, double now_ms)
{
    double old = exp(BT_MIN(f->rates_ms - now_ms, 0) / RATE_MS);
    advance(f, now_ms);
    f->rows_per_ms *= old;
    f->kv_per_ms *= old;
    f->time_per_ms *= old;
    f->kv_time_per_ms *= old;
    f->square_per_ms *= old;
    f->rates_ms = BT_MAX(f->rates_ms, now_ms);
}

static void learn(struct bt_sched_forecast *f, double now_ms, double ready_ms, uint32_t kv_tokens,
                  double life_ms)
{
    f->rows_per_ms += 1 / RATE_MS;
    f->kv_per_ms += kv_tokens / RATE_MS;
    f->time_per_ms += life_ms / RATE_MS;
    f->kv_time_per_ms += life_ms * kv_tokens / RATE_MS;
    f->square_per_ms += (double)kv_tokens * kv_tokens / RATE_MS;
    /* Later requests weigh more, which is the same as fading the earlier ones. */
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
                            uint32_t kv_tokens, double life_ms, int sign)
{
    life_ms = sane_ms(life_ms);
    bt_sched_forecast_pass(f, now_ms);
    if (sign > 0) {
        learn(f, now_ms, ready_ms, kv_tokens, life_ms);
    }
    int64_t b = BT_MIN(bucket_of(f, ready_ms), f->first + MASK);
    if (b <= f->first) {
        f->due += sign;
        f->due_kv += (int64_t)sign * kv_tokens;
        f->due_time += sign * life_ms;
        f->due_kv_time += sign * life_ms * kv_tokens;
    } else {
        f->rows[b & MASK] += sign;
        f->kv[b & MASK] += (int64_t)sign * kv_tokens;
        f->time[b & MASK] += sign * life_ms;
        f->kv_time[b & MASK] += sign * life_ms * kv_tokens;
    }
}

/* The share of the rows that have a slot. */
static double placed_share(const struct bt_sched_room *room, double rows, double kv)
{
    double share = room->places > 0 && rows > room->places ? room->places / rows : 1;
    return room->kv > 0 && kv > room->kv ? BT_MIN(share, room->kv / kv) : share;
}

/* The share of rows that ends within a bucket: 1 - exp(-x), about x / (1 + x / 2) if a bucket is
 * short compared with a life.
 */
static double ends(double decoded, double time)
{
    return time > 0 ? BT_MIN(decoded / (time + decoded / 2), 1) : 1;
}

void bt_sched_forecast_at(const struct bt_sched_forecast *f, const struct bt_sched_room *room,
                          double at_ms, double slow, struct bt_sched_load *load_p)
{
    double rows = load_p->rows + (double)f->due, kv = load_p->kv + (double)f->due_kv;
    double rows_var = load_p->rows_var, kv_var = load_p->kv_var;
    /* Most of the context is in long rows: the mean length of the row of a token. */
    double each = f->kv_per_ms > 0 ? f->square_per_ms / f->kv_per_ms : 0;
    /* The remaining life of rows, and of their context. */
    double time = load_p->rows * f->life_ms + f->due_time;
    double kv_time = load_p->kv * f->kv_life_ms + f->due_kv_time;
    double bucket_ms = f->bucket_ms / slow;
    double end = f->life_ms > 0 ? 1 - exp(-bucket_ms / f->life_ms) : 1, kv_end = end;
    int64_t to = BT_MIN(bucket_of(f, at_ms), f->first + MASK);
    double sooner = 0; /* share of later requests whose prefill ends before the bucket */
    for (int64_t b = f->first + 1; b <= to; b++) {
        sooner += f->leads > 0 ? f->lead[b - f->first - 1] / f->leads : 0;
        double unseen = sooner * f->bucket_ms;
        if (!f->one_life) {
            end = ends(bucket_ms * rows, time);
            kv_end = ends(bucket_ms * kv, kv_time);
        }
        double share = placed_share(room, rows, kv);
        double stay = 1 - end * share, kv_stay = 1 - kv_end * share;
        rows_var = (rows_var * stay + rows * (1 - stay)) * stay;
        kv_var = (kv_var * kv_stay + each * kv * (1 - kv_stay)) * kv_stay;
        rows = rows * stay + f->rows[b & MASK] + unseen * f->rows_per_ms;
        kv = kv * kv_stay + (double)f->kv[b & MASK] + unseen * f->kv_per_ms;
        time = time * stay + f->time[b & MASK] + unseen * f->time_per_ms;
        kv_time = kv_time * kv_stay + f->kv_time[b & MASK] + unseen * f->kv_time_per_ms;
    }
    *load_p = (struct bt_sched_load){BT_MAX(rows, 0), BT_MAX(kv, 0), rows_var, kv_var};
}
