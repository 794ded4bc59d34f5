/* Pure: see choose.h. */
#include "common/spec/choose.h"

#include <math.h>
#include <string.h>

#define OWN_STEP     0.125f /* weight of one draft in the rates of a sequence, */
#define ALL_STEP     0.01f  /* and in those of the worker */
#define LEAST_GAIN   1.05   /* costs and rates are estimates: a smaller gain may be none */
#define TRIALS_FIRST 16     /* of a worker: its cost of larger steps may be a mere guess */
#define TRIAL_SHARE  0.01   /* of the time, later */
#define TRIAL_MOST   8      /* steps that one trial may cost, and that may be saved up */
#define TRIAL_LEAST  0.25f  /* probability of the last draft of a trial */
#define LEVELS       64
/* No row's pace falls below a half for the drafts of other rows, however many tokens these make. */
#define PACE_LEAST 0.5

/* Before anything is known. A trial or a long match corrects them soon. */
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
         i++) { /* behind the first refused one none counts */
        float hit = i < accepted ? 1.0f : 0.0f;
        *a += OWN_STEP * (hit - *a);
        *b += ALL_STEP * (hit - *b);
    }
}

/* The step with m drafts, each behind `kv` tokens of context in the mean. */
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

/* The drafts of r whose probability is of this level or higher; probabilities only fall. */
static uint32_t take_at(const struct bt_spec_row *r, uint32_t level)
{
    uint32_t k = 0;
    for (float p = r->rate; k < r->n && level_of(p) >= level; p *= r->rate) {
        k++;
    }
    return k;
}

/* A row that got no drafts, the next in turn, gets those that are accepted with some probability.
 */
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

/* One more step, of without_ns: is it time for a trial? */
static bool may_try(struct bt_spec_trial *t, double without_ns)
{
    t->without_ns = without_ns;
    t->credit_ns = BT_MIN(t->credit_ns + TRIAL_SHARE * without_ns, TRIAL_MOST * without_ns);
    return t->n < TRIALS_FIRST || t->credit_ns > 0;
}

void bt_spec_trial_over(struct bt_spec_trial *t, double step_ns)
{
    if (t->now) { /* a step that the machine delayed costs no more than some trials */
        t->credit_ns -= BT_MIN(BT_MAX(step_ns - t->without_ns, 0), TRIAL_MOST * t->without_ns);
        t->now = false;
        t->n++;
    }
}

/* Tokens that r is expected to have in a step with drafts of this level or higher. */
static double tokens_at(const struct bt_spec_row *r, uint32_t level)
{
    double sum = 1;
    float p = r->rate;
    for (uint32_t k = 0; k < r->n && level_of(p) >= level; k++, p *= r->rate) {
        sum += p;
    }
    return sum;
}

/* Those of the row that has the fewest; others: rows without drafts. */
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
