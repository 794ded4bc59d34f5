/* Running medians, and the definition of TBT. Pure: see learn.h. */
#include "common/policy/sched/learn.h"

#include <math.h>
#include <stdlib.h>

#define OVERHEAD_MIN 0.1  /* ms: a value of 0 could not grow by a factor */
#define SLOW_MAX     16.0 /* a factor cannot correct a model that is wrong by more */
/* How far a request moves a mean or a quantile: about those of the last 20 requests. */
#define STEP      0.05
#define STALL_MIN 0.01 /* ms, as OVERHEAD_MIN */
#define TAIL_MIN  1.0  /* the longest tenth of gaps is at least as long as their mean */
#define TAIL_MAX  50.0 /* steps: a longer gap is a standstill, which steps do not explain */
/* A machine with more cannot be predicted, and refusing requests does not help it. */
#define SPREAD_MAX 1.6

/* Each request moves the value by this share: it is about the median of the last tens of requests.
 * The first few move it further. */
static double rate(uint32_t n)
{
    return n < 8 ? 0.5 / (1 + n / 2.0) : 0.08;
}

/* The share of a small error that is taken over: later errors are mostly noise. */
static double gain(uint32_t n)
{
    return n < 8 ? 1 : 0.3;
}

/* How far an error moves a value: the gain times the error, at most `most`; or, with the fifth
 * error of the same sign, the smallest of the five. */
#define RUN_LONG 5
static double limited(double miss, double gain, double most, struct bt_sched_run *run)
{
    int side = miss > 0 ? 1 : miss < 0 ? -1 : 0;
    double size = fabs(miss), move = BT_MIN(gain * size, most);
    if (run->n * side > 0) {
        run->n = (int8_t)(run->n + side);
        run->least = (float)BT_MIN(run->least, size);
    } else {
        *run = (struct bt_sched_run){.least = (float)size, .n = (int8_t)side};
    }
    if (abs(run->n) >= RUN_LONG) {
        move = BT_MAX(move, run->least);
        *run = (struct bt_sched_run){0};
    }
    run->least = (float)BT_MAX(run->least - move, 0);
    return side * move;
}

double bt_sched_learned_ttft(const struct bt_sched_learned *l, double work_ms)
{
    return l->overhead_ms + (l->slow > 0 ? l->slow : 1) * work_ms;
}

static void slow_by(struct bt_sched_learned *l, double log_miss)
{
    l->slow = BT_MIN(BT_MAX(l->slow * exp(log_miss), 1 / SLOW_MAX), SLOW_MAX);
}

/* There was no queue: overhead and slowness are seen separately. */
static void learn_idle(struct bt_sched_learned *l, double work_ms, double computed_ms,
                       double rest_ms)
{
    double by = rate(++l->n_idle), miss = rest_ms - l->overhead_ms;
    if (l->n_idle > 1) {
        double most = by * BT_MAX(l->overhead_ms, 10 * OVERHEAD_MIN);
        miss = limited(miss, gain(l->n_idle), most, &l->run_idle);
    }
    l->overhead_ms = BT_MAX(l->overhead_ms + miss, 0);
    if (work_ms > 0 && computed_ms > 0) {
        miss = log(computed_ms / (l->slow * work_ms));
        slow_by(l, limited(miss, gain(l->n_idle), by, &l->run_slow));
    }
}

void bt_sched_learn_ttft(struct bt_sched_learned *l, double work_ms, double computed_ms,
                         double actual_ms)
{
    if (!(actual_ms > 0) || !(work_ms >= 0)) {
        return;
    }
    bool idle = computed_ms >= 0 && computed_ms <= actual_ms;
    if (l->n_ttft++ == 0) {
        l->overhead_ms = BT_MAX(actual_ms - work_ms, 0);
        l->slow = 1;
    }
    double predicted = BT_MAX(bt_sched_learned_ttft(l, work_ms), 1e-3);
    double by = rate(l->n_ttft), miss = log(actual_ms / predicted);
    if (l->n_ttft > 8) { /* a quantile by steps: nine steps down for one up */
        double up = miss > log(BT_MAX(l->spread, 1)) ? 0.9 : -0.1;
        l->spread = BT_MIN(BT_MAX(BT_MAX(l->spread, 1) * exp(up * STEP), 1), SPREAD_MAX);
    }
    if (idle) {
        learn_idle(l, work_ms, computed_ms, actual_ms - computed_ms);
        return;
    }
    miss = limited(miss, gain(l->n_ttft), by, &l->run_slow);
    double share = BT_MIN(l->overhead_ms / predicted, 1);
    if (l->n_idle == 0) {
        l->overhead_ms = BT_MAX(l->overhead_ms, OVERHEAD_MIN) * exp(miss * BT_MAX(share, 0.05));
    }
    slow_by(l, miss * (1 - share));
}

double bt_sched_learned_gap(const struct bt_sched_learned *l, double step_ms)
{
    return l->stall_ms + (l->tail > 0 ? l->tail : 1) * step_ms;
}

/* The share of the way from the step to the mean of the longest tenth at which the longest of n
 * gaps lies. */
static double share_of(uint32_t n_gaps)
{
    return BT_MIN(n_gaps / 10.0, 1);
}

static double longest(const struct bt_sched_learned *l, double step_ms, uint32_t n_gaps)
{
    return step_ms + share_of(n_gaps) * (bt_sched_learned_gap(l, step_ms) - step_ms);
}

/* A step between one of rows alone and the longest with prompts; step_ms, if no step has prompts.
 */
static double filled_ms(const struct bt_sched_learned *l, double step_ms, double mixed_ms)
{
    return step_ms + l->filled * BT_MAX(mixed_ms - step_ms, 0);
}

void bt_sched_learn_tbt(struct bt_sched_learned *l, double step_ms, double mixed_ms,
                        uint32_t n_gaps, double actual_ms)
{
    if (!(step_ms > 0) || !(actual_ms > 0)) {
        return;
    }
    mixed_ms = BT_MAX(mixed_ms, step_ms);
    if (l->n_tbt++ == 0) { /* rarely is a whole request delayed evenly: it counts as a stall */
        l->stall_ms = BT_MIN(BT_MAX(actual_ms - mixed_ms, 0), TAIL_MAX * step_ms);
        l->tail = 1;
    }
    double least = longest(l, step_ms, n_gaps), most = longest(l, mixed_ms, n_gaps);
    double predicted = BT_MIN(BT_MAX(actual_ms, least), most);
    if (most > least) {
        double at = (predicted - least) / (most - least);
        l->filled += BT_MAX(1.0 / l->n_tbt, STEP) * (at - l->filled);
    }
    if (l->n_tbt == 1) {
        return;
    }
    step_ms = predicted > least ? mixed_ms : step_ms;
    double by = rate(l->n_tbt);
    double miss = limited(log(actual_ms / predicted), gain(l->n_tbt), by, &l->run_tbt);
    double share = l->stall_ms / bt_sched_learned_gap(l, step_ms);
    miss *= share_of(n_gaps);
    l->stall_ms = BT_MAX(l->stall_ms, STALL_MIN) * exp(miss * BT_MAX(share, 0.05));
    l->tail *= exp(miss * BT_MAX(1 - share, 0.05));
    l->tail = BT_MIN(BT_MAX(l->tail, TAIL_MIN), TAIL_MAX);
}

void bt_sched_learn_landing(struct bt_sched_learned *l, double step_ms, double actual_ms)
{
    if (!(step_ms > 0) || !(actual_ms > 0)) {
        return;
    }
    double predicted = l->land_ms + step_ms, miss = actual_ms - predicted;
    double by = rate(++l->n_land) * predicted;
    if (l->n_land > 1) {
        miss = limited(miss, gain(l->n_land), by, &l->run_land);
    }
    l->land_ms = BT_MAX(l->land_ms + miss, 0);
}

void bt_sched_learn_life(struct bt_sched_learned *l, double life_ms)
{
    if (life_ms > 0) { /* first the mean of all, later that of the last tens */
        l->n_life++;
        l->life_ms += BT_MAX(1.0 / l->n_life, STEP) * (life_ms - l->life_ms);
    }
}

double bt_sched_learned_tbt(const struct bt_sched_learned *l, double step_ms, double mixed_ms,
                            uint32_t n_gaps, bool lands)
{
    double others =
        longest(l, filled_ms(l, step_ms, mixed_ms), n_gaps - BT_MIN(lands ? 1u : 0u, n_gaps));
    double first = step_ms + l->land_ms;
    uint32_t k = BT_MAX(BT_DIV_UP(n_gaps, 10u), 1u);
    return lands && first > others ? (first + (k - 1) * others) / k : others;
}

double bt_sched_error(double predicted, double actual)
{
    return actual > 0 ? fabs(predicted - actual) / actual : 0;
}

/* The k largest go to the front (Hoare's selection). */
static void select_longest(float *v, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n - 1;
    while (lo < hi) {
        float pivot = v[lo + (hi - lo) / 2];
        uint32_t i = lo, j = hi;
        for (;;) {
            while (v[i] > pivot) {
                i++;
            }
            while (v[j] < pivot) {
                j--;
            }
            if (i >= j) {
                break;
            }
            float t = v[i];
            v[i++] = v[j];
            v[j--] = t;
        }
        if (k <= j + 1) {
            hi = j;
        } else {
            lo = j + 1;
        }
    }
}

double bt_sched_tbt_of(float *gaps_ms, uint32_t n)
{
    if (n == 0) {
        return -1;
    }
    uint32_t k = BT_DIV_UP(n, 10u);
    select_longest(gaps_ms, n, k);
    double sum = 0;
    for (uint32_t i = 0; i < k; i++) {
        sum += gaps_ms[i];
    }
    return sum / k;
}
