/* A request from its arrival to its end: admission, its place, and a new place after a failure. */
#include "conductor/sim/sim_priv.h"

#define PROGRESS_EACH 1024
#define NOTICE_MS     2000 /* silence after which a node counts as lost */
#define TRIES         60   /* most tries of a replan, one each second */

/* ---- its end ---- */

static void finish(struct bt_sim *s, uint32_t id, bt_sim_outcome_t outcome)
{
    if (outcome == BT_SIM_SERVED) {
        bt_sim_lengths_served(s, id);
    }
    s->r->records[id].outcome = outcome;
    s->r->records[id].end_ms = s->now_ms;
    s->r->end_ms = BT_MAX(s->r->end_ms, s->now_ms);
    s->sample.refused += outcome != BT_SIM_SERVED;
    if (++s->finished % PROGRESS_EACH == 0 && s->o->progress != NULL) {
        s->o->progress(s->o->progress_arg, s->finished, s->r->n);
    }
}

void bt_sim_finish(struct bt_sim *s, uint32_t id, bt_sim_outcome_t outcome)
{
    bt_sim_row_over(s, id);
    finish(s, id, outcome);
}

void bt_sim_abandon(struct bt_sim *s, uint32_t id, uint32_t node, bool expected)
{
    struct bt_sim_live *l = &s->live[id];
    if (expected) {
        bt_sim_row_expect(s, id, -1);
    }
    bt_sim_compute_forget(s, id);
    bt_sim_row_over(s, id);
    l->held = l->fetch_tokens = l->best_tokens = 0;
    l->last_ms = BT_MIN(s->now_ms, s->failed_ms[node]);
    bt_sim_push(s, BT_MAX(s->now_ms, s->failed_ms[node] + NOTICE_MS), EV_REPLAN, id, 0);
}

/* ---- placing ---- */

/* False also if the plan decodes on a prefill node. If no node decodes, policies plan that, but
 * simulated prefill nodes cannot decode. */
static bool place(const struct bt_sim *s, const struct bt_sched_request *want,
                  struct bt_sched_plan *plan, struct bt_sched_reject *rej)
{
    return s->o->policy->place(&s->params, &s->snap, want, plan, rej) == BT_SCHED_PLANNED &&
           s->workers[plan->at.decode].decode;
}

static void go(struct bt_sim *s, uint32_t id, const struct bt_sched_plan *plan)
{
    struct bt_sim_record *rec = &s->r->records[id];
    struct bt_sim_live *l = &s->live[id];
    rec->prefill = plan->at.prefill;
    rec->decode = plan->at.decode;
    s->r->background += plan->background;
    l->told_plan = l->given == 0 && !plan->background;
    l->alone = !(plan->first.queue_ms > 0 || plan->first.beside_ms > 0);
    l->work_ms = plan->first.work_ms;
    l->step_ms = plan->gaps.step_ms;
    l->mixed_ms = plan->gaps.mixed_ms;
    l->lands = !plan->at.both;
    l->job = (struct bt_sim_job){.id = id,
                                 .late = plan->background,
                                 .pos = plan->prefix.cached_tokens,
                                 .len = bt_sim_tokens_of(s, id)};
    l->prompt = (struct bt_sched_prompt){.pos = plan->prefix.cached_tokens,
                                         .len = l->job.len,
                                         .alone_ms = plan->takes.alone_ms,
                                         .priority = plan->background ? BT_SCHED_CLASS_LATE : 0};
    bt_list_init(&l->prompt.link);
    struct bt_sched_pace pace = bt_sim_pace(s, rec->prefill);
    bt_sched_own_prompt(&s->nodes[rec->prefill].own, &l->prompt, &pace, bt_sim_now_ns(s));
    l->placed_ms = s->now_ms;
    l->ready_ms = s->now_ms + plan->first.ms - plan->first.waited_ms;
    l->row_ms = plan->takes.row_ms;
    bt_sim_row_placed(s, id);
    l->read_end_ms = bt_sim_caches_read(s->caches, plan->at.prefill, bt_sim_blocks_of(s, id),
                                        bt_sim_usable_blocks(s, id), s->now_ms);
    if (plan->prefix.fetch_from != BT_SCHED_NONE) {
        bt_sim_fetch(s, id, plan);
    }
    bt_sim_compute_queue(s, id);
}

/* Notes the demand for both stages. Only requests that prefill nodes admit count for decode nodes.
 */
static void note_demand(struct bt_sim *s, double compute_ms, double decode_work, bool let_in)
{
    bt_sched_demand_note(&s->stages.demand, s->now_ms, compute_ms);
    if (let_in) {
        bt_sched_expected_let_in(&s->stages, s->now_ms, compute_ms, decode_work);
    }
}

/* The prompt of a node's queue that has most of the request's blocks in front. The conductor finds
 * it by its keys (conductor/request/plan.c). */
struct follower {
    const struct bt_sim *s;
    uint32_t id;
};

static void find_coming(void *arg, struct bt_sched_coming *coming_p)
{
    const struct follower *f = arg;
    const struct bt_sim *s = f->s;
    const uint32_t *blocks = bt_sim_blocks_of(s, f->id);
    struct bt_list *l;
    for (uint32_t i = 0; i < s->n; i++) {
        bt_list_for_each (l, &s->nodes[i].own.backlog.prompts) {
            const struct bt_sim_live *o = BT_CONTAINER_OF(l, struct bt_sim_live, prompt.link);
            uint32_t id = (uint32_t)(o - s->live), n = 0;
            uint32_t most = BT_MIN(bt_sim_full_blocks(s, f->id), bt_sim_full_blocks(s, id));
            while (n < most && blocks[n] == bt_sim_blocks_of(s, id)[n]) {
                n++;
            }
            if (n > coming_p->blocks) {
                coming_p->blocks = n;
                coming_p->ready_ms = BT_MAX(o->ready_ms - s->now_ms, 0);
            }
        }
    }
}

void bt_sim_arrive(struct bt_sim *s, uint32_t id)
{
    s->sample.arrived++;
    bt_sim_decide(s, id);
}

void bt_sim_decide(struct bt_sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    struct bt_sched_request want = bt_sim_show_request(s, id);
    struct bt_sched_plan plan;
    struct bt_sched_reject rej = {0};
    if (!place(s, &want, &plan, &rej)) {
        finish(s, id, BT_SIM_REFUSED_OTHER);
        return;
    }
    rec->plan_ttft_ms = plan.first.ms;
    rec->plan_tbt_ms = plan.gaps.ms;
    bool in = s->o->admission->admit(&s->params, &s->snap, &want, &plan, &rej) == BT_SCHED_PLANNED;
    double compute_ms = plan.takes.compute_ms, decode_work = plan.takes.decode_work;
    bool late = !in && bt_sched_late(s->o->policy, &s->params, &s->snap, &want, &plan);
    if (!in) {
        rej.compute_ms = compute_ms;
        if (bt_sched_follows(s->o->policy, &s->params, &s->snap, &want, late ? &plan : NULL, &rej,
                             find_coming, &(struct follower){s, id})) {
            bt_sim_push(s, s->now_ms + BT_SCHED_FOLLOW_MS, EV_AGAIN, id, 0);
            return;
        }
        bt_sched_demand_note(&s->stages.late_demand, s->now_ms, compute_ms);
    }
    if (!late || compute_ms <= s->o->ttft_ms) {
        note_demand(s, compute_ms, decode_work, in || rej.by_decode);
    }
    if (!in && !late) {
        static const bt_sim_outcome_t why[] = {[BT_SCHED_MISS_TTFT] = BT_SIM_REFUSED_TTFT,
                                               [BT_SCHED_MISS_TBT] = BT_SIM_REFUSED_TBT,
                                               [BT_SCHED_MISS_PRICE] = BT_SIM_REFUSED_PRICE};
        finish(s, id, why[rej.miss]);
        return;
    }
    bt_sim_copy_begin(s, id);
    go(s, id, &plan);
}

void bt_sim_replan(struct bt_sim *s, uint32_t id)
{
    struct bt_sched_request want = bt_sim_show_request(s, id);
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    if (place(s, &want, &plan, &rej)) {
        s->r->replans++;
        s->live[id].tries = 0;
        go(s, id, &plan);
    } else if (++s->live[id].tries < TRIES) {
        bt_sim_push(s, s->now_ms + 1000, EV_REPLAN, id, 0);
    } else {
        finish(s, id, BT_SIM_LOST);
    }
}
