/* Makes one plan of one request: snapshot, policy, and the messages that start the plan everywhere
 * at once. Pure. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine_priv.h"

/* Gathers the prompt and the tokens generated so far, with the keys of the full blocks. */
static void gather_tokens(struct bt_sequence *sq)
{
    const struct bt_request *r = sq->r;
    /* With several choices no journal has tokens yet. */
    const struct bt_journal *j = &r->choices[sq->first].journal;
    uint32_t n_prompt = (uint32_t)r->spec.prompt.n;
    uint32_t have = bt_sequence_have(sq), n = n_prompt + have;
    if (n > sq->tokens_cap) {
        sq->tokens_cap = n;
        sq->tokens = bt_realloc(sq->tokens, (size_t)n * sizeof(*sq->tokens));
    }
    if (sq->n_tokens == n) {
        return; /* planned before, and nothing was added since */
    }
    memcpy(sq->tokens, r->spec.prompt.ids, (size_t)n_prompt * sizeof(*sq->tokens));
    if (have != 0) {
        memcpy(sq->tokens + n_prompt, j->tokens, (size_t)have * sizeof(*sq->tokens));
    }
    sq->n_tokens = n;
    uint32_t bt = r->mc->conf.block_tokens;
    if (n / bt > sq->keys_cap) {
        sq->keys_cap = n / bt;
        sq->keys = bt_realloc(sq->keys, (size_t)sq->keys_cap * sizeof(*sq->keys));
    }
    sq->n_keys = n / bt != 0 ? bt_kv_keys(&r->root, sq->tokens, n, bt, sq->keys) : 0;
}

/* *full_p is set if p had no room a moment ago, even if it also failed. Another try at once would
 * not help. */
static bool avoided(const struct bt_sequence *sq, const struct bt_peer *p, uint64_t now_ns,
                    bool *full_p)
{
    for (uint32_t i = 0; i < sq->n_avoid; i++) {
        const struct bt_sequence_avoid *a = &sq->avoid[i];
        if (a->incarnation == p->incarnation) {
            bool full = now_ns < a->full_until_ns;
            *full_p = *full_p || full;
            return a->failed || full;
        }
    }
    return false;
}

/* The rest of the request's time limit; 0: it has none. A duration, because clocks of two hosts are
 * not compared. */
static uint64_t left_ms_of(const struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0) {
        return 0;
    }
    uint64_t due = r->spec.received_ns + r->spec.timeout_ms * 1000000;
    return due > now_ns ? BT_DIV_UP(due - now_ns, 1000000) : 1;
}

static struct bt_action *message(const struct bt_sequence *sq, bt_action_type_t type,
                                 struct bt_peer *to)
{
    struct bt_action *a = bt_action_add(sq->r->mc, type);
    a->to = to;
    a->id = sq->id;
    a->epoch = sq->epoch;
    return a;
}

/* The fields that all messages of the plan have in common. */
static struct bt_action_plan plan_of(const struct bt_sequence *sq, uint64_t now_ns)
{
    return (struct bt_action_plan){.r = sq->r,
                                   .keys = sq->keys,
                                   .tokens = sq->tokens,
                                   .n_tokens = sq->n_tokens,
                                   .block_tokens = sq->r->mc->conf.block_tokens,
                                   .left_ms = left_ms_of(sq->r, now_ns)};
}

/* n_tokens: the whole prompt, or whole blocks from its beginning. Only the prefill side fetches.
 * The hand-off gives the decode side everything; it sends the prefix as soon as it is there. */
static void reserve(const struct bt_sequence *sq, uint32_t n_tokens, bool keep,
                    struct bt_sources *from, double recompute_tokens_per_s, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    struct bt_action *a = message(sq, BT_ACT_RESERVE, f->kv_prefill);
    a->reserve.plan = plan_of(sq, now_ns);
    a->reserve.n_tokens = n_tokens;
    a->reserve.keep = true;
    a->reserve.streams = n_tokens < sq->n_tokens;
    a->reserve.prefill_tokens_per_s = recompute_tokens_per_s;
    a->reserve.from = bt_sources_take(from);
    if (!f->same_kv) {
        a = message(sq, BT_ACT_RESERVE, f->kv_decode);
        a->reserve.plan = plan_of(sq, now_ns);
        a->reserve.n_tokens = n_tokens;
        a->reserve.keep = keep;
        a->reserve.peer = f->kv_prefill;
    }
}

static void submit_to(const struct bt_sequence *sq, struct bt_peer *to, bt_phases_t phases,
                      uint64_t now_ns)
{
    const struct bt_request *r = sq->r;
    struct bt_action *a = message(sq, BT_ACT_SUBMIT, to);
    a->submit.plan = plan_of(sq, now_ns);
    a->submit.phases = phases;
    a->submit.choice = sq->first;
    a->submit.n = sq->n;
    a->submit.max_new = r->spec.max_tokens - bt_sequence_have(sq);
    a->submit.priority = bt_flight_class(sq->flight);
    a->submit.late = sq->flight->plan.background;
    a->submit.prompt_logprobs = r->prompt != NULL && phases != BT_PHASES_DECODE;
}

/* Reservations go first: a worker that has its Submit asks its kvstore for the grant at once. */
static void submit(const struct bt_sequence *sq, bool keep, struct bt_sources *from,
                   double recompute_tokens_per_s, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    uint32_t n = f->plan.prefix.grant_tokens != 0 ? f->plan.prefix.grant_tokens : sq->n_tokens;
    reserve(sq, n, keep, from, recompute_tokens_per_s, now_ns);
    if (f->both) {
        submit_to(sq, f->decode, BT_PHASES_BOTH, now_ns);
        return;
    }
    submit_to(sq, f->prefill, BT_PHASES_PREFILL, now_ns);
    if (f->decode != NULL) {
        submit_to(sq, f->decode, BT_PHASES_DECODE, now_ns);
    }
}

#define SHORT_LOG_NS 60000000000ull

/* Logs, once a minute, that decode workers have too few places (engine.max_slots). Only an operator
 * can change that. */
static void note_places(struct bt_machine *mc, const struct bt_sched_plan *plan,
                        const struct bt_view_snapshot *v, uint64_t now_ns)
{
    if (plan->places_wanted == 0) {
        return;
    }
    bt_metric_add(mc->m.places_short, 1);
    if (mc->short_log_ns != 0 && now_ns - mc->short_log_ns < SHORT_LOG_NS) {
        return;
    }
    mc->short_log_ns = now_ns;
    BT_WARN("places_short", "worker=%s places=%u wanted=%u remedy=%s",
            v->worker[plan->at.decode]->name, v->workers[plan->at.decode].capacity.slots,
            plan->places_wanted,
            "raise engine.max_slots of the decode workers: with more slots they could also compute "
            "prompts");
}

static void count_plan(struct bt_machine *mc, const struct bt_sched_plan *plan)
{
    if (mc->m.plan[plan->at.both][plan->reason] != NULL) {
        bt_metric_add(mc->m.plan[plan->at.both][plan->reason], 1);
    }
}

/* The plan becomes the sequence's current flight. */
static struct bt_flight *begin_flight(struct bt_sequence *sq, const struct bt_sched_plan *plan,
                                      const struct bt_view_snapshot *v, uint64_t now_ns)
{
    sq->epoch++;
    for (uint32_t i = sq->first; i < sq->first + sq->n; i++) {
        struct bt_journal *j = &sq->r->choices[i].journal;
        if (sq->r->spec.beams.width > 0) {
            bt_journal_again(j, sq->epoch);
        } else {
            bt_journal_begin(j, sq->epoch);
        }
    }
    if (sq->r->prompt != NULL) {
        bt_prompt_begin(sq->r->prompt);
    }
    struct bt_gen_usage *u = &sq->r->usage;
    struct bt_flight *f = sq->flight = bt_flight_create(sq);
    f->prefill = v->worker[plan->at.prefill];
    f->kv_prefill = v->kvstore[plan->at.kv_prefill];
    if (sq->r->spec.max_tokens == 0) { /* only the prompt's logprobs are wanted */
        f->same_kv = f->decode_ended = true;
    } else {
        f->both = plan->at.both;
        f->same_kv = plan->at.kv_prefill == plan->at.kv_decode;
        f->decode = v->worker[plan->at.decode];
        f->kv_decode = v->kvstore[plan->at.kv_decode];
        f->own_rows = bt_sequence_rows(sq);
        f->own_kv = (uint64_t)f->own_rows * sq->n_tokens;
        snprintf(u->decode, sizeof(u->decode), "%s", f->decode->name);
    }
    f->plan = *plan;
    f->plan.background =
        plan->background || sq->r->late; /* a late request stays late when it is planned again */
    if (f->plan.background && !sq->r->late) {
        sq->r->late = true;
        sq->r->mc->queues.n_late++;
    }
    f->planned_ns = now_ns;
    f->own_tokens = sq->n_tokens - plan->prefix.cached_tokens;
    bt_flight_count(f, now_ns);
    snprintf(u->prefill, sizeof(u->prefill), "%s", f->prefill->name);
    return f;
}

double bt_request_objective(double own_ms, double all_ms)
{
    return own_ms > 0 ? own_ms : all_ms;
}

struct bt_sched_params bt_request_params(const struct bt_machine *mc, double slo_ttft_ms,
                                         double slo_tbt_ms)
{
    struct bt_sched_params p = mc->conf.sched;
    p.objective.ttft_ms = bt_request_objective(slo_ttft_ms, p.objective.ttft_ms);
    p.objective.tbt_ms = bt_request_objective(slo_tbt_ms, p.objective.tbt_ms);
    /* At most half of the places are for late requests. */
    p.late.wait_ms = 2 * mc->queues.n_late < mc->conf.max_running ? p.late.wait_ms : 0;
    return p;
}

/* Takes the snapshot for the sequence. *full_p: the snapshot avoids a daemon that had no room a
 * moment ago. */
static void look(struct bt_sequence *sq, uint64_t now_ns, struct bt_view_snapshot *v, bool *full_p)
{
    const struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    /* Logprobs of the prompt need the whole prompt computed. */
    bool use_cache = !r->spec.no_cache && r->prompt == NULL;
    mc->env->snapshot(mc->env_arg, sq->keys, use_cache ? sq->n_keys : 0, r->spec.priority, v);
    for (uint32_t i = 0; i < v->snap.n_workers; i++) {
        v->workers[i].avoid = avoided(sq, v->worker[i], now_ns, full_p);
    }
    for (uint32_t i = 0; i < v->snap.n_kvstores; i++) {
        v->kvstores[i].avoid = avoided(sq, v->kvstore[i], now_ns, full_p);
    }
    bt_expect_show(mc, now_ns, &v->snap);
    if (mc->conf.policy->fetches && mc->conf.sched.place.fetch_ratio > 0 && use_cache) {
        v->snap.spread_blocks = mc->env->spread(mc->env_arg, v, sq->keys, sq->n_keys);
    }
}

static struct bt_sched_request request_of(const struct bt_sequence *sq, uint64_t now_ns,
                                          double wait_ms)
{
    const struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    struct bt_sched_request req = {.n_tokens = sq->n_tokens,
                                   .n_choices = bt_sequence_rows(sq),
                                   .one_worker = r->spec.sampling.penalty_alpha > 0,
                                   .max_new = r->spec.max_tokens - bt_sequence_have(sq),
                                   .block_tokens = mc->conf.block_tokens,
                                   .token_bytes = mc->conf.token_bytes,
                                   .waited_ms =
                                       wait_ms + (double)(now_ns - r->spec.received_ns) / 1e6};
    mc->env->random(mc->env_arg, &req.random, sizeof(req.random));
    req.sequence = mc->decisions++;
    bt_expect_length(sq, &req);
    return req;
}

/* ---- a prefix that another request is computing ---- */

/* A prompt's blocks can be found once they are sealed, some seconds behind its first token. */
#define SEAL_MS 5000.0

/* The number of blocks that two chains of keys have in common. A key stands for all blocks before
 * it. */
static uint32_t common_blocks(const struct bt_sequence *a, const struct bt_sequence *b)
{
    uint32_t lo = 0, hi = BT_MIN(a->n_keys, b->n_keys);
    if (hi == 0 || memcmp(&a->keys[0], &b->keys[0], sizeof(a->keys[0])) != 0) {
        return 0;
    }
    while (lo < hi) { /* the first at which they differ */
        uint32_t mid = (lo + hi) / 2;
        if (memcmp(&a->keys[mid], &b->keys[mid], sizeof(a->keys[mid])) == 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

static bool is_computing(const struct bt_sequence *sq, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    if (f == NULL || sq->r->spec.no_cache) {
        return false;
    }
    double ms = (double)(now_ns - f->planned_ns) / 1e6;
    return sq->state == BT_SEQ_PREFILLING ||
           (f->first_token_ms > 0 && ms < f->first_token_ms + SEAL_MS);
}

static void find_coming(void *arg, struct bt_sched_coming *coming_p)
{
    const struct bt_sequence *sq = arg;
    const struct bt_machine *mc = sq->r->mc;
    double now_ms = (double)mc->now_ns / 1e6;
    const struct bt_list *l, *k;
    bt_list_for_each (l, &mc->all) {
        const struct bt_request *r = BT_CONTAINER_OF(l, struct bt_request, link);
        bt_list_for_each (k, &r->sequences) {
            const struct bt_sequence *other = BT_CONTAINER_OF(k, struct bt_sequence, link);
            uint32_t n = is_computing(other, mc->now_ns) ? common_blocks(sq, other) : 0;
            if (n > coming_p->blocks) {
                coming_p->blocks = n;
                coming_p->ready_ms = BT_MAX(other->flight->expect_ready_ms - now_ms, 0);
            }
        }
    }
}

/* While it waits for a prefix a request has a place among those that run, as a late one does. */
static void count_follower(struct bt_sequence *sq, bool follows)
{
    struct bt_request *r = sq->r;
    if (sq->follows != follows) {
        sq->follows = r->late = follows;
        r->mc->queues.n_late += follows ? 1 : -1u;
    }
}

/* One attempt: the snapshot and the policy's answer. Valid until the next snapshot. */
struct attempt {
    struct bt_view_snapshot v;
    struct bt_sched_request req;
    struct bt_sched_params params;
    struct bt_sched_plan plan; /* PLANNED */
    struct bt_sched_reject rej;
    bt_sched_verdict_t verdict;
    bool full;    /* the snapshot avoids a daemon that had no room a moment ago */
    bool follows; /* it waits for a prefix that another request is computing */
};

/* Counts the demand for both stages, once a request. Late requests count as refused. Requests that
 * could never meet their objective are not counted. */
static void note_demand(struct bt_sequence *sq, const struct attempt *a, uint64_t now_ns)
{
    bool planned = a->verdict == BT_SCHED_PLANNED, refused = a->verdict == BT_SCHED_OVERLOADED;
    bool in_time = planned && !a->plan.background, late = planned && a->plan.background;
    if ((planned || refused) && (!late || a->rej.compute_ms <= a->params.objective.ttft_ms)) {
        bt_expect_demand(sq, now_ns, in_time ? a->plan.takes.compute_ms : a->rej.compute_ms,
                         in_time ? a->plan.takes.decode_work : a->rej.decode_work,
                         in_time || a->rej.by_decode);
    }
    if (refused || late) {
        bt_expect_late(sq, now_ns, a->rej.compute_ms);
    }
}

/* The probe does not wait: others wait for it. */
static bool follows(struct bt_sequence *sq, const struct attempt *a)
{
    const struct bt_request *r = sq->r;
    bool late = a->verdict == BT_SCHED_PLANNED && a->plan.background;
    if ((!late && a->verdict != BT_SCHED_OVERLOADED) || sq->epoch != 0 || r->spec.no_cache ||
        r->prompt != NULL || r->mc->queues.probe == sq) {
        return false;
    }
    return bt_sched_follows(r->mc->conf.policy, &a->params, &a->v.snap, &a->req,
                            late ? &a->plan : NULL, &a->rej, find_coming, sq);
}

/* Takes the snapshot and asks the policy. wait_ms 0: for the sequence as it is now; otherwise as if
 * it had waited so much longer. */
static void ask_policy(struct bt_sequence *sq, uint64_t now_ns, double wait_ms, struct attempt *a)
{
    const struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    a->full = false;
    gather_tokens(sq);
    look(sq, now_ns, &a->v, &a->full);
    a->req = request_of(sq, now_ns, wait_ms);
    a->params = bt_request_params(mc, r->spec.slo_ttft_ms, r->spec.slo_tbt_ms);
    /* the sequence was admitted before, so an objective is no reason to drop it now */
    if (sq->epoch != 0) {
        a->params.objective.ttft_ms = a->params.objective.tbt_ms = 0;
    }
    if (wait_ms > 0) { /* it waits for a place or for room, and late requests do not wait */
        a->params.late.wait_ms = 0;
    }
    a->verdict = bt_sched_decide(mc->conf.policy, mc->conf.admission, &a->params, &a->v.snap,
                                 &a->req, &a->plan, &a->rej);
    if (a->verdict == BT_SCHED_PLANNED && a->plan.draining && sq->epoch == 0) {
        /* A running request may stay on a drained node if no other node can take it. A new request
         * never goes there, because it would keep the node from becoming empty. */
        a->verdict = BT_SCHED_NO_DECODE;
        a->rej = (struct bt_sched_reject){
            .verdict = a->verdict, .retry_after_s = 1, .reason = bt_all_drained_text};
    }
    a->follows = wait_ms <= 0 && follows(sq, a);
    if (!a->follows) {
        note_demand(sq, a, now_ns);
    }
}

/* A request that would only just meet its objective will probably miss it, because every forecast
 * has an error, and would be refused after the wait. So it must have this share of the objective to
 * spare. */
#define QUEUE_MARGIN 0.1

/* The wait to compare with the objective; < 0: the request has no objective. */
static double wait_with_margin(const struct bt_sequence *sq, double wait_ms)
{
    double objective_ms =
        bt_request_objective(sq->r->spec.slo_ttft_ms, sq->r->mc->conf.sched.objective.ttft_ms);
    if (sq->epoch != 0 || objective_ms == 0) {
        return -1;
    }
    return wait_ms + (sq->starved ? 0 : QUEUE_MARGIN * objective_ms);
}

bool bt_sequence_hopeless(struct bt_sequence *sq, uint64_t now_ns, double wait_ms,
                          struct bt_sched_reject *rej)
{
    struct attempt a;
    wait_ms = wait_with_margin(sq, wait_ms);
    if (wait_ms < 0) {
        return false;
    }
    ask_policy(sq, now_ns, wait_ms, &a);
    *rej = a.rej;
    return a.verdict == BT_SCHED_OVERLOADED;
}

/* A daemon of the plan had no room a moment ago, and no other daemon is eligible. */
static bool no_room(const struct attempt *a)
{
    return a->full && a->plan.last_resort;
}

/* The same as bt_sequence_hopeless, for a plan that is made and has to wait for room. It uses the
 * same snapshot and the same workers, and asks only admission again, with the wait. */
static bool hopeless_behind(struct bt_sequence *sq, struct attempt *a, double wait_ms,
                            uint64_t now_ns)
{
    const struct bt_machine *mc = sq->r->mc;
    wait_ms = wait_with_margin(sq, wait_ms);
    if (wait_ms < 0 || a->plan.background) {
        return wait_ms >= 0; /* a background plan: admission refused it, and late requests do not
                                wait for room */
    }
    a->req.waited_ms += wait_ms;
    a->plan.first.waited_ms += wait_ms;
    a->plan.first.ms += wait_ms;
    a->plan.first.most_ms += wait_ms;
    a->verdict = mc->conf.admission->admit(&a->params, &a->v.snap, &a->req, &a->plan, &a->rej);
    if (a->verdict == BT_SCHED_PLANNED) {
        return false;
    }
    bt_expect_late(sq, now_ns, a->plan.takes.compute_ms);
    return true;
}

double bt_request_tokens_per_s(const struct bt_sched_worker *w, uint32_t n,
                               const struct bt_sched_params *c)
{
    if (w->speed.cost == NULL) {
        return w->speed.prefill_tokens_per_s;
    }
    uint32_t chunk = w->speed.chunk_tokens != 0 ? w->speed.chunk_tokens : c->prior.chunk_tokens;
    return 1e9 * n / bt_batch_prefill_ns(w->speed.cost, 0, n, chunk);
}

/* Finds the kvstores from which the prefill side may fetch the prefix. *per_s_p: how many tokens a
 * second the prefill worker would compute instead. */
static void find_sources(struct bt_sequence *sq, const struct attempt *a, struct bt_sources *from,
                         double *per_s_p)
{
    struct bt_machine *mc = sq->r->mc;
    mc->env->sources(mc->env_arg, &a->v, &a->plan, sq->keys, sq->n_keys,
                     a->plan.prefix.end_tokens / mc->conf.block_tokens, from);
    if (from->n != 0) {
        bt_metric_add(mc->m.fetch_plans, 1);
        bt_metric_add(mc->m.fetch_tokens, a->plan.prefix.fetch_tokens);
        bt_explain_sources(sq, a->plan.prefix.fetch_tokens, from);
        bt_outcome_source(sq, from);
    }
    /* The kvstore compares loading from its own SSD with computing, so it needs the rate. */
    *per_s_p = a->plan.prefix.recompute_tokens_per_s > 0 || from->n != 0
                   ? a->plan.prefix.recompute_tokens_per_s
                   : bt_request_tokens_per_s(&a->v.workers[a->plan.at.prefill], sq->n_tokens,
                                             &mc->conf.sched);
}

/* The attempt becomes the sequence's plan, and its messages are sent. */
static void carry_out(struct bt_sequence *sq, struct attempt *a, uint64_t now_ns)
{
    struct bt_request *r = sq->r;
    struct bt_machine *mc = r->mc;
    struct bt_flight *f = begin_flight(sq, &a->plan, &a->v, now_ns);
    count_plan(mc, &a->plan);
    note_places(mc, &a->plan, &a->v, now_ns);
    bt_outcome_planned(sq, f);
    bt_record_planned(sq, now_ns);
    sq->charged = sq->n_tokens - a->plan.prefix.cached_tokens;
    bt_sched_fair_serve(&mc->queues.fair, r->tenant, sq->charged, r->spec.weight);
    bt_expect_planned(f, now_ns);
    BT_DEBUG("request_planned",
             "req=%016" PRIx64 " epoch=%u tokens=%u cached=%u prefill=%s decode=%s why=%s "
             "ttft_ms=%.1f",
             sq->id, sq->epoch, sq->n_tokens, a->plan.prefix.cached_tokens, r->usage.prefill,
             r->usage.decode, bt_sched_reason_names[a->plan.reason], a->plan.first.ms);
    struct bt_sources from;
    double recompute_tokens_per_s;
    find_sources(sq, a, &from, &recompute_tokens_per_s);
    /* Transit blocks have a limit of their own in the kvstore. The probe may use all slots, so its
     * blocks are kept. */
    submit(sq, a->plan.prefix.keep || mc->queues.probe == sq, &from, recompute_tokens_per_s,
           now_ns);
    bt_sources_cleanup(&from);
    bt_replicate_look(sq, &a->v, now_ns);
    sq->no_worker_ns = 0;
    sq->progress_ns = now_ns;
    bt_sequence_set_state(sq, BT_SEQ_PREFILLING);
}

bt_plan_result_t bt_sequence_plan(struct bt_sequence *sq, uint64_t now_ns,
                                  struct bt_sched_reject *rej)
{
    struct bt_machine *mc = sq->r->mc;
    struct attempt a;
    count_follower(sq, false);
    ask_policy(sq, now_ns, 0, &a);
    if (a.follows) {
        count_follower(sq, true);
        sq->plan_at_ns = now_ns + BT_SCHED_FOLLOW_MS * 1000000ull;
        return BT_PLAN_FOLLOW;
    }
    bool planned = a.verdict == BT_SCHED_PLANNED;
    bt_explain_note(sq, &a.v, &a.params, &a.req, planned ? &a.plan : NULL, &a.rej);
    *rej = a.rej;
    if (!planned) {
        bool refused = a.verdict == BT_SCHED_TOO_LARGE || a.verdict == BT_SCHED_OVERLOADED;
        return refused ? BT_PLAN_REFUSED : BT_PLAN_WAIT;
    }
    if (no_room(&a) && mc->queues.probe != sq) {
        bool hopeless = hopeless_behind(sq, &a, bt_queue_wait_ms(mc, sq->r->spec.priority), now_ns);
        *rej = a.rej;
        return hopeless ? BT_PLAN_REFUSED : BT_PLAN_NO_ROOM;
    }
    carry_out(sq, &a, now_ns);
    return BT_PLAN_SUBMITTED;
}

/* Returns whether the plan avoids daemons that are leaving or give up their role. If no other
 * worker has the role, the policy plans on one that gives it up. */
static bool is_away(const struct bt_machine *mc, const struct attempt *a)
{
    return a->verdict == BT_SCHED_PLANNED && !a->plan.draining && !no_room(a) &&
           !bt_machine_facts(mc, a->v.worker[a->plan.at.prefill]).gives_up_prefill &&
           !bt_machine_facts(mc, a->v.worker[a->plan.at.decode]).gives_up_decode;
}

bool bt_sequence_plan_away(struct bt_sequence *sq, uint64_t now_ns)
{
    struct attempt a;
    ask_policy(sq, now_ns, 0, &a);
    if (!is_away(sq->r->mc, &a)) {
        return false;
    }
    bt_sequence_leave_plan(sq, now_ns);
    bt_record_waits(sq, "a daemon of the plan is leaving or has given up its role", now_ns);
    if (!bt_sequence_splits(sq)) {
        bt_explain_note(sq, &a.v, &a.params, &a.req, &a.plan, &a.rej);
        carry_out(sq, &a, now_ns);
    }
    return true;
}
