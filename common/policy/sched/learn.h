/* What a conductor learns about one worker from its finished requests: the delays that the cost of
 * steps does not explain. A plain value in the caller's memory. PURE. */
#ifndef BT_POLICY_SCHED_LEARN_H
#define BT_POLICY_SCHED_LEARN_H

#include "common/base/base.h"

/* Consecutive errors of one value, all with the same sign, since the value was last set to one of
 * them. */
struct bt_sched_run {
    float least; /* the smallest of these errors, counted from the present value */
    int8_t n;    /* number of errors; negative: the actual values were below the prediction */
};

struct bt_sched_learned {
    double overhead_ms; /* time of a first token besides queue and computing: messages, grants,
                           sampling */
    double slow; /* actual over predicted time of queue and computing. Above 1 where other programs
                    use the machine, or where steps contain work that the cost does not count. 0:
                    not known, counts as 1 */
    double
        spread; /* ninth decile of actual over predicted first token. 0: not known, counts as 1 */
    /* The mean of the longest tenth of a request's gaps, without the first gap, is stall_ms + tail
     * * predicted step. stall_ms are delays that do not grow with the step (waiting threads,
     * messages), tail are those that do (neighbours). tail 0: not known, counts as 1 */
    double stall_ms, tail;
    /* Steps with prompts beside rows have a maximum length, whatever rows are in them, so stall_ms
     * and tail do not describe them. The longest tenth lies this share of the way from a step of
     * rows alone to that length, 0 to 1. */
    double filled;
    /* The first gap of a row whose first token came from another worker, without a step: the part
     * of the hand-off that is not hidden, and the wait for the step under way. */
    double land_ms;
    double life_ms; /* mean life of a row; 0: not known */
    uint32_t n_ttft, n_idle, n_tbt, n_land, n_life;
    struct bt_sched_run run_idle, run_slow, run_tbt, run_land;
};

/* Each value follows a median in small steps, because a single delayed request says little. After
 * five errors in a row with the same sign the value is set to the nearest of the five. So a first
 * request that took seconds, because the worker had just started, is forgotten after the sixth. */

/* A first token took actual_ms; queue and computing had been predicted as work_ms. computed_ms: the
 * time of its steps, if no queue was expected; < 0: a queue was expected, or the time is not known.
 * Without a queue, overhead_ms follows the median of the time that is not computing, and slow the
 * median of computing over prediction. With a queue, the request changes slow only; until a first
 * request without a queue has come, it changes overhead_ms as well, each by its share of the
 * prediction. One request that the machine delayed changes both only a little. */
void bt_sched_learn_ttft(struct bt_sched_learned *l, double work_ms, double computed_ms,
                         double actual_ms);
/* The predicted time of a first token, in ms, from learned values. */
double bt_sched_learned_ttft(const struct bt_sched_learned *l, double work_ms);
/* The mean of the longest tenth of a request's n_gaps gaps (without the first gap after a hand-off)
 * was actual_ms. A step of rows alone had been predicted as step_ms; steps with prompts beside rows
 * take at most mixed_ms (<= step_ms: the worker has none). A value between the predictions for the
 * two kinds of steps is no error. After an error stall_ms and tail both follow the ratio's median,
 * each by its share of the prediction; steps of different lengths separate them. With fewer than
 * ten gaps the longest one is nearer to the others, so it counts less. */
void bt_sched_learn_tbt(struct bt_sched_learned *l, double step_ms, double mixed_ms,
                        uint32_t n_gaps, double actual_ms);
/* The predicted mean of the longest tenth of ten gaps or more, ms, between steps of step_ms without
 * prompts beside rows. */
double bt_sched_learned_gap(const struct bt_sched_learned *l, double step_ms);
/* The first gap of a row whose first token came from another worker was actual_ms; a step had been
 * predicted as step_ms. */
void bt_sched_learn_landing(struct bt_sched_learned *l, double step_ms, double actual_ms);
/* A row lasted life_ms, from its first token to its last. */
void bt_sched_learn_life(struct bt_sched_learned *l, double life_ms);
/* The predicted TBT of an answer of n_gaps gaps, ms. mixed_ms: as in bt_sched_learn_tbt.
 * lands: the first token comes from another worker. In a short answer the first gap is then the
 * longest tenth. */
double bt_sched_learned_tbt(const struct bt_sched_learned *l, double step_ms, double mixed_ms,
                            uint32_t n_gaps, bool lands);

/* Relative error of a prediction, |predicted - actual| / actual; 0 where actual is not above 0. */
double bt_sched_error(double predicted, double actual);

/* TBT of a request: mean of the longest tenth (at least one) of its gaps. gaps[0..n) is reordered;
 * -1 for n = 0. */
double bt_sched_tbt_of(float *gaps_ms, uint32_t n);

#endif
