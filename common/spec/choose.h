/* Decides how many drafts each sequence gets in a step: the number that gives the most tokens a
 * second. This follows from the share of drafts that was accepted so far and from the cost of a
 * step (common/batch/cost.h). PURE. */
#ifndef BT_SPEC_CHOOSE_H
#define BT_SPEC_CHOOSE_H

#include "common/batch/cost.h"
#include "common/spec/spec.h"

#define BT_SPEC_CLASSES 6 /* by the length of the match: a model's, 2, 3-4, 5-8, 9-16, longer */

/* Probability that a draft is accepted if all before it were, by class: means that fade. A sequence
 * begins with the worker's rates. */
struct bt_spec_rates {
    float of[BT_SPEC_CLASSES];
};
void bt_spec_rates_init(struct bt_spec_rates *r);
/* n drafts were checked, the first `accepted` of them accepted. own: of the sequence; all: of the
 * worker, which moves more slowly. */
void bt_spec_rates_learn(struct bt_spec_rates *own, struct bt_spec_rates *all, uint32_t match,
                         uint32_t n, uint32_t accepted);
float bt_spec_rate(const struct bt_spec_rates *r, uint32_t match);

struct bt_spec_row { /* a sequence that has drafts */
    float rate;
    uint32_t n;    /* drafts that it has */
    uint32_t pos;  /* tokens before it: their KV is read for each draft */
    uint32_t take; /* result: drafts that it gets, the first ones */
};

/* Trials: drafts that do not pay by what is known. Without them a rate or a cost that is too
 * pessimistic would never be corrected. They may take a hundredth of the time. Zeroed at first. */
struct bt_spec_trial {
    double credit_ns;  /* time that trials may take; below 0: they took more */
    double without_ns; /* the step under way, without its trial */
    uint32_t turn, n;
    bool now; /* the step under way has one */
};
/* The step that bt_spec_choose has filled took step_ns. */
void bt_spec_trial_over(struct bt_spec_trial *t, double step_ns);

/* Chooses rows[].take of n rows; most: tokens that the step has room for beside `work`, which is
 * the step without drafts and gives `tokens` tokens. Drafts are taken only if they make at least 5
 * % more tokens a second and leave every row half of its own, and in trials. Returns the number of
 * drafts. */
uint32_t bt_spec_choose(const struct bt_batch_cost *c, const struct bt_batch_work *work,
                        double tokens, uint32_t most, struct bt_spec_row *rows, uint32_t n,
                        struct bt_spec_trial *trial);

/* The same for a draft model, which drafts for all n rows at once, in a pass of draft_ns for each
 * draft. rates: of the rows. Returns how many drafts each row gets, at most `most`. */
uint32_t bt_spec_choose_passes(const struct bt_batch_cost *c, const struct bt_batch_work *work,
                               double tokens, uint32_t most, const float *rates, uint32_t n,
                               double draft_ns, struct bt_spec_trial *trial);

#endif
