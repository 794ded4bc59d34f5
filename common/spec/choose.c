/* Pure: see choose.h. */
#include "common/spec/choose.h"

#include <math.h>
#include <string.h>

#define OWN_STEP 0.125f /* weight of one draft in the rates of its sequence */
#define ALL_STEP 0.01f  /* weight of one draft in the rates of the worker */
/* a step with drafts must be faster by this factor: costs and rates are estimates */
#define LEAST_GAIN 1.05
/* the first trials of a worker, whose cost of larger steps may be a guess */
#define TRIALS_FIRST 16
#define TRIAL_SHARE  0.01 /* share of the time that later trials may cost */
/* steps that one trial may cost, and that a worker may save up for trials */
#define TRIAL_MOST  8
#define TRIAL_LEAST 0.25f /* least probability of the last draft of a trial */
#define LEVELS      64
/* Drafts of other rows never make a row slower than half its pace, however many tokens they
 * bring. */
#define PACE_LEAST 0.5

/* The rates before anything is known. A trial or a long match soon corrects them. */
void bt_spec_rates_init(struct bt_spec_rates *r)
{
    static const float first[BT_SPEC_CLASSES] = {0.5f, 0.3f, 0.4f, 0.6f, 0.75f, 0.9f};
    memcpy(r->of, first, sizeof(first));
}

static uint32_t class_of(uint32_t match)
{
    return match == 0 ? 0 : match <= 2 ? 1 : match <= 4 ? 2 : match <= 8 ? 3 : match <= 16 ? 4 : 5;
}

float bt_spec_rate(const struct bt_spec_rates *r, uint32_t match)
{
    return r->of[class_of(match)];
}

void bt_spec_rates_learn(struct bt_spec_rates *own, struct bt_spec_rates *all, uint32_t match,
                         uint32_t n, uint32_t accepted)
{
    float *a = &own->of[class_of(match)], *b = &all->of[class_of(match)];
    for (uint32_t i = 0; i < n && i <= accepted;
         i++) { /* no draft counts after the first refused one */
        float hit = i < accepted ? 1.0f : 0.0f;
        *a += OWN_STEP * (hit - *a);
        *b += ALL_STEP * (hit - *b);
    }
}

/* The time of the step with m drafts. kv: mean number of tokens in front of each draft. */
static double with_drafts(const struct bt_batch_cost *c, const struct bt_batch_work *work, double m,
                          double kv)
{
    struct bt_batch_work w = *work;
    w.tokens += m;
    w.kv += m * kv;
    return bt_batch_work_ns(c, &w);
}

static uint32_t level_of(float p)
{
    return BT_MIN((uint32_t)(p * LEVELS), (uint32_t)LEVELS - 1);
}

/* How many drafts of r have a probability of this level or higher. Probabilities never rise from
 * one draft to the next. */
static uint32_t take_at(const struct bt_spec_row *r, uint32_t level)
{
    uint32_t k = 0;
    for (float p = r->rate; k < r->n && level_of(p) >= level; p *= r->rate) {
        k++;
    }
    return k;
}

/* Gives drafts to one row that got none, the next row in turn. They are those that are accepted
 * with some probability. */
static uint32_t try_one(uint32_t room, struct bt_spec_row *rows, uint32_t n,
                        struct bt_spec_trial *t)
{
    for (uint32_t i = 0; i < n; i++) {
        struct bt_spec_row *r = &rows[t->turn++ % n];
        if (r->take == 0 && r->n > 0) {
            r->take = BT_MIN(BT_MAX(take_at(r, level_of(TRIAL_LEAST)), 1u), room);
            t->now = r->take > 0;
            return r->take;
        }
    }
    return 0;
}

/* Counts one more step, which takes without_ns without drafts. Returns whether it is time for a
 * trial. */
static bool may_try(struct bt_spec_trial *t, double without_ns)
{
    t->without_ns = without_ns;
    t->credit_ns = BT_MIN(t->credit_ns + TRIAL_SHARE * without_ns, TRIAL_MOST * without_ns);
    return t->n < TRIALS_FIRST || t->credit_ns > 0;
}

void bt_spec_trial_over(struct bt_spec_trial *t, double step_ns)
{
    if (t->now) { /* a step that the machine delayed must not use up the time of many trials */
        t->credit_ns -= BT_MIN(BT_MAX(step_ns - t->without_ns, 0), TRIAL_MOST * t->without_ns);
        t->now = false;
        t->n++;
    }
}

/* How many tokens r is expected to get in a step with drafts of this level or higher. */
static double tokens_at(const struct bt_spec_row *r, uint32_t level)
{
    double sum = 1;
    float p = r->rate;
    for (uint32_t k = 0; k < r->n && level_of(p) >= level; k++, p *= r->rate) {
        sum += p;
    }
    return sum;
}

/* The expected tokens of the row that gets fewest. others: there are rows without drafts. */
static double fewest_at(const struct bt_spec_row *rows, uint32_t n, bool others, uint32_t level)
{
    double least = others || n == 0 ? 1 : tokens_at(&rows[0], level);
    for (uint32_t i = 1; i < n && least > 1; i++) {
        least = BT_MIN(least, tokens_at(&rows[i], level));
    }
    return least;
}

uint32_t bt_spec_choose(const struct bt_batch_cost *c, const struct bt_batch_work *work,
                        double tokens, uint32_t most, struct bt_spec_row *rows, uint32_t n,
                        struct bt_spec_trial *trial)
{
    uint32_t count[LEVELS] = {0}, all = 0, best = LEVELS;
    double sum[LEVELS] = {0}, up_to[LEVELS] = {0}, kv = 0;
    for (uint32_t i = 0; i < n; i++) {
        float p = rows[i].rate;
        for (uint32_t k = 0; k < rows[i].n; k++, p *= rows[i].rate) {
            count[level_of(p)]++;
            sum[level_of(p)] += p;
        }
        rows[i].take = 0;
        all += rows[i].n;
        kv += (double)rows[i].n * rows[i].pos;
    }
    if (all == 0) {
        return 0;
    }
    kv /= all;
    double alone = bt_batch_work_ns(c, work);
    double m = 0, gain = 0, best_rate = LEAST_GAIN * tokens / alone;
    for (uint32_t level = LEVELS; level-- > 0 && m + count[level] <= most;) {
        m += count[level];
        up_to[level] = m;
        gain += sum[level];
        double rate = (tokens + gain) / with_drafts(c, work, m, kv);
        if (count[level] > 0 && rate > best_rate) {
            best_rate = rate;
            best = level;
        }
    }
    while (best < LEVELS && fewest_at(rows, n, tokens > n, best) * alone <
                                PACE_LEAST * with_drafts(c, work, up_to[best], kv)) {
        best++;
    }
    uint32_t taken = 0;
    for (uint32_t i = 0; i < n && best < LEVELS; i++) {
        rows[i].take = take_at(&rows[i], best);
        taken += rows[i].take;
    }
    bool may = may_try(trial, with_drafts(c, work, taken, kv));
    return taken + (may ? try_one(most - taken, rows, n, trial) : 0);
}

uint32_t bt_spec_choose_passes(const struct bt_batch_cost *c, const struct bt_batch_work *work,
                               double tokens, uint32_t most, const float *rates, uint32_t n,
                               double draft_ns, struct bt_spec_trial *trial)
{
    double alone = bt_batch_work_ns(c, work), best_rate = LEAST_GAIN * tokens / alone;
    double kv = work->tokens > 0 ? work->kv / work->tokens : 0, gain = 0;
    double fewest = 1;
    float lowest = tokens > n ? 0 : 1;
    uint32_t best = 0;
    for (uint32_t i = 0; i < n; i++) {
        lowest = BT_MIN(lowest, rates[i]);
    }
    for (uint32_t k = 1; k <= most; k++) {
        for (uint32_t i = 0; i < n; i++) {
            gain += pow(rates[i], k);
        }
        fewest += pow(lowest, k);
        double step = with_drafts(c, work, (double)k * n, kv) + k * draft_ns;
        double rate = (tokens + gain) / step;
        if (rate > best_rate && fewest * alone >= PACE_LEAST * step) {
            best_rate = rate;
            best = k;
        }
    }
    if (best == 0 && most > 0 && may_try(trial, alone)) {
        trial->now = true;
        best = BT_MIN(most, 2u);
    }
    return best;
}
