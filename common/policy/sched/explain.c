/* Explains a plan: its candidates, with the policy's own numbers. Pure: see sched.h. */
#include "common/policy/sched/sched_priv.h"

#include <string.h>

/* The rule of policy baton, because its estimates of decode workers were compared. */
static const struct bt_sched_rule mixing = {.use_cache = true, .fetch = true, .mixed = true};

/* Returns whether decode workers were compared with prefill workers. */
static bool was_compared(const struct bt_sched_plan *plan)
{
    return plan == NULL || (!plan->background && plan->reason != BT_SCHED_LARGER_THAN_SLAB &&
                            plan->reason != BT_SCHED_NO_DECODE_WORKER);
}

/* Why worker i was not chosen for this use. */
static const char *why_not(const struct bt_sched_job *j, uint32_t i, bt_sched_use_t use,
                           const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    if (w->kvstore == BT_SCHED_NONE) {
        return "no kvstore is up on its node";
    }
    if (!bt_sched_present(j, i)) {
        return "its node is being drained";
    }
    if (!bt_sched_fits(w, j->req) || (!bt_sched_fits_slab(j->s, w, j->req) &&
                                      (plan == NULL || plan->prefix.grant_tokens == 0))) {
        return "too small: context, pages or slots of its kvstore";
    }
    if (w->avoid || j->s->kvstores[w->kvstore].avoid) {
        return "the worker or its kvstore has failed this request before or was full";
    }
    if (plan == NULL) {
        return "the request was rejected";
    }
    /* If a decode worker computes the prompt because that is earlier, prefill workers were
     * compared. */
    bool compared =
        plan->background || plan->reason == BT_SCHED_MIXED || plan->reason == BT_SCHED_SPARE;
    if (use == BT_SCHED_FOR_PREFILL && plan->at.both && !compared) {
        return "the decode worker computes this prompt itself";
    }
    return use == BT_SCHED_FOR_PREFILL ? "no better: queue, prefill and hand-off"
                                       : "no better: load and pages";
}

/* Decode worker i as a candidate to compute the prompt beside its rows. */
static struct bt_sched_candidate beside(const struct bt_sched_job *j, uint32_t i,
                                        const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    struct bt_sched_candidate c = {
        .worker = i, .use = BT_SCHED_FOR_PREFILL, .queue_ms = -1, .ttft_ms = -1, .tbt_ms = -1};
    struct bt_sched_estimate e;
    c.cached_tokens = bt_sched_cached_at(j->s, w->kvstore, j->req);
    c.verdict = why_not(j, i, BT_SCHED_FOR_PREFILL, plan);
    if (w->kvstore != BT_SCHED_NONE && bt_sched_estimate_mixed(j, i, &e)) {
        c.queue_ms = e.queue_ms;
        c.ttft_ms = j->req->waited_ms + bt_sched_learned_ttft(&w->learned, e.ttft_ms);
    } else if (strncmp(c.verdict, "no better", 9) == 0) {
        c.verdict = "no room for a prompt beside its rows";
    }
    return c;
}

static struct bt_sched_candidate candidate(const struct bt_sched_job *j, uint32_t i,
                                           bt_sched_use_t use, const struct bt_sched_plan *plan)
{
    const struct bt_sched_worker *w = &j->s->workers[i];
    struct bt_sched_candidate c = {.worker = i, .use = use, .ttft_ms = -1, .tbt_ms = -1};
    c.cached_tokens = bt_sched_cached_at(j->s, w->kvstore, j->req);
    if (use == BT_SCHED_FOR_PREFILL) {
        double beside;
        c.queue_ms = bt_sched_wait_ms(j->c, w, c.cached_tokens, j->req->n_tokens, &beside);
        double work = c.queue_ms + beside +
                      bt_sched_prefill_ms(j->c, w, j->req, j->req->n_tokens, c.cached_tokens);
        c.ttft_ms = j->req->waited_ms + bt_sched_learned_ttft(&w->learned, work);
        c.chosen = plan != NULL && plan->at.prefill == i;
        if (c.chosen) { /* the values that were compared: with a fetch, beside rows */
            c.queue_ms = plan->first.queue_ms;
            c.ttft_ms = plan->first.ms;
        }
    } else {
        c.load = bt_sched_decode_load(w, j->req);
        c.tbt_ms = bt_sched_tbt_ms(j->c, w, j->req);
        c.chosen = plan != NULL && plan->at.decode == i;
        if (c.chosen) { /* the promised value: with its hand-off, at the end of the prefill */
            c.tbt_ms = plan->gaps.ms;
        }
    }
    c.verdict = c.chosen ? "chosen" : why_not(j, i, use, plan);
    return c;
}

uint32_t bt_sched_explain(const struct bt_sched_policy *policy,
                          const struct bt_sched_params *params,
                          const struct bt_sched_snapshot *snap, const struct bt_sched_request *req,
                          const struct bt_sched_plan *plan, struct bt_sched_candidate *out,
                          uint32_t cap)
{
    struct bt_sched_job j = {.c = params, .s = snap, .req = req, .rule = &mixing};
    j.allow_draining = plan != NULL && plan->draining;
    bool mixes = policy == &bt_sched_baton && params->mixed.step_ms > 0 && was_compared(plan) &&
                 bt_sched_survey_mixed(&j, plan != NULL ? plan->at.decode : BT_SCHED_NONE);
    uint32_t n = 0;
    for (int chosen = 1; chosen >= 0; chosen--) {
        for (uint32_t i = 0; i < snap->n_workers; i++) {
            const struct bt_sched_worker *w = &snap->workers[i];
            for (int use = BT_SCHED_FOR_PREFILL; use <= BT_SCHED_FOR_DECODE; use++) {
                bool for_prefill = use == BT_SCHED_FOR_PREFILL;
                bool role = for_prefill ? w->prefill || mixes : w->decode;
                bool taken =
                    plan != NULL && i == (for_prefill ? plan->at.prefill : plan->at.decode);
                if (taken != (chosen == 1) || (!role && !taken)) {
                    continue;
                }
                if (n < cap) { /* further candidates are only counted */
                    out[n] = for_prefill && !w->prefill && !taken
                                 ? beside(&j, i, plan)
                                 : candidate(&j, i, (bt_sched_use_t)use, plan);
                }
                n++;
            }
        }
    }
    return n;
}
