/* Fits a step's cost to the steps as they happen: recursive least squares of relative errors with
 * coefficients >= 0, a prior, and a memory that fades. A plain value in the caller's memory. PURE.
 *
 * Prompt steps and decode steps fade apart: a worker that decodes for an hour keeps what it knew of
 * prefill. The minimum is found exactly, by active sets on the normal equations (a few thousand
 * flops a step). */
#ifndef BT_BATCH_FIT_H
#define BT_BATCH_FIT_H

#include "common/batch/cost.h"

#define BT_BATCH_FIT_N (1 + BT_BATCH_SEGMENTS + 3)

struct bt_batch_fit {
    struct bt_batch_cost cost; /* the present estimate */
    double prior[BT_BATCH_FIT_N];
    double log_scale; /* scale of the prior, from the first steps: the mean logarithm of measured
                         over predicted time */
    uint32_t n_scale;
    struct {
        double a[BT_BATCH_FIT_N][BT_BATCH_FIT_N], b[BT_BATCH_FIT_N];
        uint64_t steps;
    } seen[2];          /* decode steps; steps with a prompt in them */
    double most_tokens; /* of any step seen */
};

/* prior: each coefficient > 0; experts_ns 0: the model has no experts, and it stays 0. Once steps
 * were seen only its ratios count, because the first steps set its scale. The prior weighs a
 * hundredth of a step, and decides only what the steps leave open. */
void bt_batch_fit_init(struct bt_batch_fit *f, const struct bt_batch_cost *prior);
/* Records that a step took ns. Returns the relative error of the prediction: predicted / ns - 1. ns
 * or tokens <= 0: ignored, returns 0. */
double bt_batch_fit_step(struct bt_batch_fit *f, const struct bt_batch_work *w, double ns);

#endif
