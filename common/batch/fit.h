/* Fits a step's cost to the steps as they happen: recursive least squares of relative errors with
 * coefficients >= 0, a prior, and a memory that fades. A plain value in the caller's memory. PURE.
 *
 * Prompt steps and decode steps fade apart: a worker that decodes for an hour keeps what it knew of
 * prefill. The minimum is found exactly, by active sets on the normal equations (a few thousand
 * flops a step). */
#ifndef BT_BATCH_FIT_H
#define BT_BATCH_FIT_H

#include "common/batch/cost.h"

#define BT_BATCH_FIT_N (1 + BT_BATCH_SEGMENTS + 2)

struct bt_batch_fit {
    struct bt_batch_cost cost; /* what is believed now */
    double prior[BT_BATCH_FIT_N];
    double log_scale; /* of the prior, by the first steps: their mean logarithm of ns over it */
    uint32_t n_scale;
    struct {
        double a[BT_BATCH_FIT_N][BT_BATCH_FIT_N], b[BT_BATCH_FIT_N];
        uint64_t steps;
    } seen[2];          /* decode steps; steps with a prompt in them */
    double most_tokens; /* of any step seen */
};

/* prior: each coefficient > 0. Only their ratios count once steps were seen: the first of them say
 * how large it is as a whole. It counts as much as a hundredth of a step does for what steps tell,
 * and decides what they do not tell. */
void bt_batch_fit_init(struct bt_batch_fit *f, const struct bt_batch_cost *prior);
/* A step took ns. Returns the relative error of what was believed: predicted / ns - 1. ns or tokens
 * <= 0: ignored, 0. */
double bt_batch_fit_step(struct bt_batch_fit *f, const struct bt_batch_work *w, double ns);

#endif
