/* What a conductor learns of one worker from requests that have gone through it: what the cost of
 * steps does not hold. A plain value in the caller's memory. PURE. */
#ifndef BT_CONDUCTOR_SCHED_LEARN_H
#define BT_CONDUCTOR_SCHED_LEARN_H

#include "common/base/base.h"

struct bt_sched_learned {
    double
        overhead_ms; /* of a first token, beside queue and computing: messages, grants, sampling */
    double slow;     /* queue and computing took so many times what was predicted: others use the
                        machine, or steps hold what nobody counts. 0: not known, counts as 1 */
    double spread;   /* one first token in ten takes longer than so many times the prediction.
                        0: not known, counts as 1 */
    double tail;     /* TBT (mean of a request's longest tenth of gaps) over the predicted step;
                        0: not known, counts as 1 */
    uint32_t n_ttft, n_tbt;
};

/* A first token took actual_ms where queue and computing were predicted to take work_ms. Overhead
 * and slowness follow the median of the ratio, each by its share of the prediction: short requests
 * tell of the one, long queues of the other, and one that the machine held up moves both by little.
 */
void bt_sched_learn_ttft(struct bt_sched_learned *l, double work_ms, double actual_ms);
/* What follows from it. */
double bt_sched_learned_ttft(const struct bt_sched_learned *l, double work_ms);
/* A request's TBT was actual_ms where the step was predicted as step_ms. */
void bt_sched_learn_tbt(struct bt_sched_learned *l, double step_ms, double actual_ms);

/* Relative error of a prediction, |predicted - actual| / actual; 0 where actual is not above 0. */
double bt_sched_error(double predicted, double actual);

/* TBT of a request: mean of the longest tenth (at least one) of its gaps. gaps[0..n) is reordered;
 * -1 for n = 0. DESIGN.md, section 5. */
double bt_sched_tbt_of(float *gaps_ms, uint32_t n);

#endif
