/* Medians that follow, and the definition of TBT. Pure: see learn.h. */
#include "conductor/sched/learn.h"

#include <math.h>

/* Steps of this share of the value: about the median of the last tens of requests. The first few go
 * faster. */
static double rate(uint32_t n)
{
    return n < 8 ? 0.5 / (1 + n / 2.0) : 0.08;
}

void bt_sched_learn_ttft(struct bt_sched_learned *l, double work_ms, double actual_ms)
{
    double over = BT_MAX(actual_ms - work_ms, 0);
    if (l->n_ttft++ == 0) {
        l->overhead_ms = over;
        return;
    }
    double by = rate(l->n_ttft) * BT_MAX(l->overhead_ms, 0.5), miss = over - l->overhead_ms;
    l->overhead_ms += BT_MAX(BT_MIN(miss, by), -by);
}

void bt_sched_learn_tbt(struct bt_sched_learned *l, double step_ms, double actual_ms)
{
    if (!(step_ms > 0) || !(actual_ms > 0)) {
        return;
    }
    double ratio = BT_MIN(BT_MAX(actual_ms / step_ms, 0.1), 50);
    if (l->n_tbt++ == 0) {
        l->tail = ratio;
        return;
    }
    double by = rate(l->n_tbt), miss = log(ratio / l->tail);
    l->tail *= exp(BT_MAX(BT_MIN(miss, by), -by));
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
