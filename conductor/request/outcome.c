/* Compares what a plan predicted with what happened: errors go into metrics, and the conductor
 * learns from them about its workers. Requests that were planned again, or in the background, do
 * not count. Pure. */
#include <stdio.h>
#include <stdlib.h>

#include "conductor/request/machine_priv.h"
#include "conductor/request/sources.h"

static const char *name_of(const struct bt_peer *p)
{
    return p != NULL ? p->name : "";
}

void bt_outcome_planned(struct bt_sequence *sq, const struct bt_flight *f)
{
    struct bt_gen_plan *p = &sq->r->usage.plan;
    if (p->reason[0] != '\0') {
        return; /* the client receives only the first plan */
    }
    snprintf(p->prefill, sizeof(p->prefill), "%s", name_of(f->prefill));
    snprintf(p->decode, sizeof(p->decode), "%s", name_of(f->decode));
    snprintf(p->reason, sizeof(p->reason), "%s", bt_sched_reason_names[f->plan.reason]);
    p->cached_tokens = f->plan.prefix.cached_tokens;
    p->fetch_tokens = f->plan.prefix.fetch_tokens;
    p->queue_ms = f->plan.first.queue_ms;
    p->prefill_ms = f->plan.first.beside_ms + f->plan.first.prefill_ms;
    p->ttft_ms = f->plan.first.ms;
    p->tbt_ms = f->plan.gaps.ms;
}

void bt_outcome_source(struct bt_sequence *sq, const struct bt_sources *from)
{
    struct bt_gen_plan *p = &sq->r->usage.plan;
    if (sq->epoch == 1) {
        snprintf(p->source, sizeof(p->source), "%s", name_of(from->at[0].kv));
    }
}

/* True: the sequence's first plan runs, and its times can be predicted. Background work lets others
 * go first, so its times cannot. */
static bool is_told(const struct bt_sequence *sq)
{
    return sq->flight != NULL && sq->epoch == 1 && !sq->flight->plan.background;
}

void bt_outcome_first_token(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_flight *f = sq->flight;
    if (!is_told(sq) || sq->r->spec.prompt_logprobs || sq->r->spec.beams.width > 0) {
        return;
    }
    double actual = (double)(now_ns - sq->r->spec.received_ns) / 1e6;
    bt_metric_observe(sq->r->mc->m.ttft_error, bt_sched_error(f->plan.first.ms, actual));
    f->first_token_ms = (double)(now_ns - f->planned_ns) / 1e6;
}

void bt_outcome_prefilled(struct bt_sequence *sq)
{
    const struct bt_flight *f = sq->flight;
    if (f != NULL && f->first_token_ms > 0 && is_told(sq) && f->prefill != NULL) {
        bool alone = !(f->plan.first.queue_ms > 0 || f->plan.first.beside_ms > 0);
        double computed = alone ? sq->r->usage.prefill_ms : -1;
        bt_sched_learn_ttft(&f->prefill->learned, f->plan.first.work_ms, computed,
                            f->first_token_ms);
    }
}

void bt_outcome_gap(struct bt_choice *c, uint64_t now_ns)
{
    if (c->n_gaps == c->gaps_cap) {
        c->gaps_cap = c->gaps_cap != 0 ? 2 * c->gaps_cap : 64;
        c->gaps_ms = bt_realloc(c->gaps_ms, c->gaps_cap * sizeof(*c->gaps_ms));
    }
    c->gaps_ms[c->n_gaps++] = (float)((double)(now_ns - c->last_ns) / 1e6);
}

static double sum_of(const float *v, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += v[i];
    }
    return sum;
}

void bt_outcome_choice(struct bt_sequence *sq, uint32_t choice)
{
    struct bt_choice *c = &sq->r->choices[choice];
    const struct bt_flight *f = sq->flight;
    if (c->n_gaps == 0) {
        return;
    }
    /* Each of these puts the gaps into another order: the first one is looked at before. */
    bool landing = is_told(sq) && !f->plan.at.both && choice == sq->first;
    if (landing && f->decode != NULL) {
        bt_sched_learn_landing(&f->decode->learned, f->plan.gaps.step_ms, c->gaps_ms[0]);
    }
    double others = bt_sched_tbt_of(c->gaps_ms + landing, c->n_gaps - landing);
    double actual = bt_sched_tbt_of(c->gaps_ms, c->n_gaps);
    struct bt_gen_usage *u = &sq->r->usage;
    u->tbt_ms = BT_MAX(u->tbt_ms, actual);
    if (actual <= 0 || !is_told(sq)) {
        return;
    }
    bt_metric_observe(sq->r->mc->m.tbt_error, bt_sched_error(f->plan.gaps.ms, actual));
    if (f->decode != NULL) {
        bt_sched_learn_tbt(&f->decode->learned, f->plan.gaps.step_ms, f->plan.gaps.mixed_ms,
                           c->n_gaps - landing, others);
        bt_sched_learn_life(&f->decode->learned, sum_of(c->gaps_ms, c->n_gaps));
    }
}
