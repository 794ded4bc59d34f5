/* What a conductor learns of one worker from requests that have gone through it: what the cost of
 * steps does not hold. A plain value in the caller's memory. PURE. */
#ifndef BT_POLICY_SCHED_LEARN_H
#define BT_POLICY_SCHED_LEARN_H

#include "common/base/base.h"

/* Misses of one value, all to the same side since it was last jumped to. */
struct bt_sched_run {
    float least; /* of them, from where the value is now */
    int8_t n;    /* so many; below 0: less came than was predicted */
};

struct bt_sched_learned {
    double
        overhead_ms; /* of a first token, beside queue and computing: messages, grants, sampling */
    double slow;     /* queue and computing took so many times what was predicted: others use the
                        machine, or steps hold what nobody counts. 0: not known, counts as 1 */
    double spread;   /* one first token in ten takes longer than so many times the prediction.
                        0: not known, counts as 1 */
    /* the mean of the longest tenth of a request's gaps, the first one left out, is stall_ms + tail
     * predicted steps: what holds tokens up does not grow with the step (threads that wait for
     * their turn, messages), or it does (neighbours). tail 0: not known, counts as 1 */
    double stall_ms, tail;
    /* Prompts beside rows fill a step up to a length that the worker keeps to, whatever rows are
     * in it. So they are in neither of the two: the longest tenth lies this share of the way from a
     * step of rows alone to that length, 0 to 1. */
    double filled;
    /* of the gap behind a first token from elsewhere, beside the steps that it has to wait for:
     * what of the hand-off is not hidden. [1]: the worker had rows: loading begins when a step
     * ends, and the step after may begin without the row. [0]: it had none */
    double land_ms[2];
    double life_ms; /* of a row, in the mean; 0: not known */
    uint32_t n_ttft, n_idle, n_tbt, n_land[2], n_life;
    struct bt_sched_run run_idle, run_slow, run_tbt, run_land[2];
};

/* All of these follow a median by small steps, as one request that was held up says little. Where
 * five in a row miss to the same side the value goes to the nearest of them: a first request that
 * was held up for seconds, by a worker that had just begun, is forgotten with the sixth. */

/* A first token took actual_ms where queue and computing were predicted to take work_ms.
 * computed_ms: its steps took so long, if it was expected to meet no queue; < 0: it was, or that is
 * not known. Where nobody was before it, overhead follows the median of what is not computing, and
 * slowness that of computing over prediction. Others tell of slowness only, and, until there was
 * one that met no queue, of the overhead too: each follows the ratio's median by its share of the
 * prediction. One that the machine held up moves both by little. */
void bt_sched_learn_ttft(struct bt_sched_learned *l, double work_ms, double computed_ms,
                         double actual_ms);
/* What follows from it. */
double bt_sched_learned_ttft(const struct bt_sched_learned *l, double work_ms);
/* The mean of the longest tenth of a request's n_gaps gaps, a first one behind a hand-off left out,
 * was actual_ms where a step of rows alone was predicted as step_ms, and the worker's steps with
 * prompts beside rows take mixed_ms at most (<= step_ms: it has none). What lies between the
 * predictions for the two is no miss. Of a miss both parts follow the ratio's median, each by its
 * share of the prediction: steps of different lengths tell them apart. Fewer than ten gaps have a
 * longest one that is nearer to the others, and tell less. */
void bt_sched_learn_tbt(struct bt_sched_learned *l, double step_ms, double mixed_ms,
                        uint32_t n_gaps, double actual_ms);
/* What follows of it for the longest tenth of ten gaps or more between steps of step_ms, without
 * prompts beside rows. */
double bt_sched_learned_gap(const struct bt_sched_learned *l, double step_ms);
/* The gap behind a first token that came from elsewhere was actual_ms where its steps were
 * predicted as steps_ms, of step_ms each: more than one step where the worker had rows. */
void bt_sched_learn_landing(struct bt_sched_learned *l, double step_ms, double steps_ms,
                            double actual_ms);
/* A row was there for life_ms, from its first token to its last. */
void bt_sched_learn_life(struct bt_sched_learned *l, double life_ms);
/* The TBT that follows for an answer of n_gaps gaps. mixed_ms: as of bt_sched_learn_tbt.
 * landing_ms: steps in the first gap, where the first token comes from elsewhere, else 0. With few
 * gaps that one is the longest tenth. */
double bt_sched_learned_tbt(const struct bt_sched_learned *l, double step_ms, double mixed_ms,
                            uint32_t n_gaps, double landing_ms);

/* Relative error of a prediction, |predicted - actual| / actual; 0 where actual is not above 0. */
double bt_sched_error(double predicted, double actual);

/* TBT of a request: mean of the longest tenth (at least one) of its gaps. gaps[0..n) is reordered;
 * -1 for n = 0. */
double bt_sched_tbt_of(float *gaps_ms, uint32_t n);

#endif
