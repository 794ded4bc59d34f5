/* One plan of one request: snapshot, policy, and the messages that start it everywhere at once.
 * Loop thread. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"
#include "conductor/request/sources.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens travel as little-endian words");

/* Prompt and what was generated so far, with the keys of the full blocks. */
static void gather_tokens(struct bt_lane *k)
{
    const struct bt_request *r = k->r;
    const struct bt_journal *j = &r->choices[k->first].journal; /* all empty if it has several */
    uint32_t n_prompt = (uint32_t)r->spec.prompt.n;
    uint32_t n = n_prompt + j->n;
    if (n > k->tokens_cap) {
        k->tokens_cap = n;
        k->tokens = bt_realloc(k->tokens, (size_t)n * sizeof(*k->tokens));
    }
    if (k->n_tokens == n) {
        return; /* planned before, nothing was added since */
    }
    memcpy(k->tokens, r->spec.prompt.ids, (size_t)n_prompt * sizeof(*k->tokens));
    if (j->n != 0) {
        memcpy(k->tokens + n_prompt, j->tokens, (size_t)j->n * sizeof(*k->tokens));
    }
    k->n_tokens = n;
    uint32_t bt = r->rs->conf.block_tokens;
    if (n / bt > k->keys_cap) {
        k->keys_cap = n / bt;
        k->keys = bt_realloc(k->keys, (size_t)k->keys_cap * sizeof(*k->keys));
    }
    k->n_keys = n / bt != 0 ? bt_kv_keys(&r->root, k->tokens, n, bt, k->keys) : 0;
}

/* *full_p is set if it had no room a moment ago, whatever else is to be said against it: then
 * another try at once is of no use. */
static bool avoided(const struct bt_lane *k, const struct bt_session *s, uint64_t now_ns,
                    bool *full_p)
{
    for (uint32_t i = 0; i < k->n_avoid; i++) {
        const struct bt_lane_avoid *a = &k->avoid[i];
        if (a->incarnation == s->member->incarnation) {
            bool full = now_ns < a->full_until_ns;
            *full_p = *full_p || full;
            return a->failed || full;
        }
    }
    return false;
}

/* Of the request's time, 0: it has no limit. Clocks of two hosts are not compared. */
static uint64_t left_ms_of(const struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0) {
        return 0;
    }
    uint64_t due = r->spec.received_ns + r->spec.timeout_ms * 1000000;
    return due > now_ns ? BT_DIV_UP(due - now_ns, 1000000) : 1;
}

/* Reserves n_tokens (all of the prompt, or whole blocks of its beginning) at kv. v has what is of
 * its role; what all reservations of the lane have is filled in here. */
static void send_reserve(struct bt_lane *k, struct bt_session *kv, uint32_t n_tokens,
                         uint64_t left_ms, Baton__Reserve *v)
{
    v->request = k->id;
    v->epoch = k->epoch;
    v->keys.data = (uint8_t *)k->keys;
    v->keys.len = (size_t)(n_tokens / k->r->rs->conf.block_tokens) * sizeof(*k->keys);
    v->n_tokens = n_tokens;
    v->no_cache = k->r->spec.no_cache;
    v->tenant = k->r->spec.tenant != NULL ? k->r->spec.tenant : (char *)"";
    v->left_ms = left_ms;
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    m.m_case = BATON__TO_KVSTORE__M_RESERVE;
    m.reserve = v;
    (void)bt_session_send_kvstore(kv, &m);
}

/* Only the prefill side fetches: the decode side gets all of it by the hand-off, whose prefix
 * leaves as soon as it is there. */
static void reserve_prefill(struct bt_lane *k, struct bt_flight *f, uint32_t n_tokens,
                            uint64_t left_ms, const struct bt_sources *from,
                            double recompute_tokens_per_s)
{
    Baton__Reserve v = BATON__RESERVE__INIT;
    Baton__Source source[BT_SOURCES_MAX], *sources[BT_SOURCES_MAX];
    v.role = BATON__GRANT_ROLE__WRITE;
    v.keep = true;
    v.streams = n_tokens < k->n_tokens;
    v.prefill_tokens_per_s = recompute_tokens_per_s;
    v.sources = sources;
    v.n_sources = bt_sources_pack(from, source, sources);
    send_reserve(k, f->kv_prefill, n_tokens, left_ms, &v);
}

static void reserve_decode(struct bt_lane *k, struct bt_flight *f, uint32_t n_tokens,
                           uint64_t left_ms, bool keep)
{
    const Baton__Member *peer = f->kv_prefill->member;
    Baton__Reserve v = BATON__RESERVE__INIT;
    v.role = BATON__GRANT_ROLE__RECEIVE;
    v.keep = keep;
    v.peer = peer->name;
    v.peer_rpc = peer->rpc;
    v.peer_incarnation = peer->incarnation;
    send_reserve(k, f->kv_decode, n_tokens, left_ms, &v);
}

static void fill_sampling(const struct bt_lane *k, Baton__Sampling *s)
{
    const struct bt_request *r = k->r;
    const struct bt_engine_params *p = &r->spec.sampling;
    s->temperature = p->temperature;
    s->top_p = p->top_p;
    s->top_k = p->top_k;
    s->min_p = p->min_p;
    s->repetition_penalty = p->repetition_penalty;
    s->frequency_penalty = p->frequency_penalty;
    s->presence_penalty = p->presence_penalty;
    s->seed = p->seed;
    s->logprobs = p->logprobs;
    s->max_new = r->spec.max_tokens - r->choices[k->first].journal.n;
    s->min_new = p->min_new; /* counts from the prompt's end, as the engine does */
    s->n_stop_ids = p->n_eos;
    s->stop_ids = (uint32_t *)p->eos;
    s->n_bias_ids = s->n_bias = p->n_bias;
    s->bias_ids = (uint32_t *)p->bias_ids;
    s->bias = (float *)p->bias;
}

static void send_submit(struct bt_lane *k, struct bt_session *w, Baton__Phases phases,
                        uint64_t left_ms)
{
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    fill_sampling(k, &sampling);
    Baton__Submit v = BATON__SUBMIT__INIT;
    v.request = k->id;
    v.epoch = k->epoch;
    v.phases = phases;
    v.tokens.data = (uint8_t *)k->tokens;
    v.tokens.len = (size_t)k->n_tokens * sizeof(*k->tokens);
    v.n_prompt = (uint32_t)k->r->spec.prompt.n;
    v.choice = k->first;
    v.n = k->n;
    v.sampling = &sampling;
    v.left_ms = left_ms;
    v.root_key.data = k->r->root.b;
    v.root_key.len = sizeof(k->r->root.b);
    v.no_cache = k->r->spec.no_cache;
    v.priority = bt_flight_class(k->flight);
    v.late = k->flight->plan.background;
    v.tenant = bt_kv_tenant_tag(k->r->spec.tenant != NULL ? k->r->spec.tenant : "");
    v.prompt_logprobs = k->r->prompt != NULL && phases != BATON__PHASES__DECODE;
    v.prompt_top = v.prompt_logprobs ? k->r->spec.prompt_top : 0;
    Baton__ToWorker m = BATON__TO_WORKER__INIT;
    m.m_case = BATON__TO_WORKER__M_SUBMIT;
    m.submit = &v;
    (void)bt_session_send_worker(w, &m);
}

/* Reservations first: a worker asks its kvstore for the grant as soon as it has its Submit. */
static void submit(struct bt_lane *k, struct bt_flight *f, bool keep, const struct bt_sources *from,
                   double recompute_tokens_per_s, uint64_t now_ns)
{
    uint64_t left_ms = left_ms_of(k->r, now_ns);
    uint32_t n = f->plan.grant_tokens != 0 ? f->plan.grant_tokens : k->n_tokens;
    reserve_prefill(k, f, n, left_ms, from, recompute_tokens_per_s);
    if (!f->same_kv) {
        reserve_decode(k, f, n, left_ms, keep);
    }
    if (f->both) {
        send_submit(k, f->decode, BATON__PHASES__BOTH, left_ms);
    } else {
        send_submit(k, f->prefill, BATON__PHASES__PREFILL, left_ms);
        if (f->decode != NULL) {
            send_submit(k, f->decode, BATON__PHASES__DECODE, left_ms);
        }
    }
}

#define SHORT_LOG_NS 60000000000ull

/* Decode workers whose places would not last are an operator's to give more: tells it, once a
 * minute. */
static void note_places(struct bt_requests *rs, const struct bt_sched_plan *plan,
                        const struct bt_view_snapshot *v, uint64_t now_ns)
{
    if (plan->places_wanted == 0) {
        return;
    }
    bt_metric_add(rs->m.places_short, 1);
    if (rs->short_log_ns != 0 && now_ns - rs->short_log_ns < SHORT_LOG_NS) {
        return;
    }
    rs->short_log_ns = now_ns;
    BT_WARN("places_short", "worker=%s places=%u wanted=%u remedy=%s",
            v->worker[plan->decode]->member->name, v->workers[plan->decode].slots_total,
            plan->places_wanted,
            "raise engine.max_slots of the decode workers: prompts would be computed "
            "beside rows there if their places lasted");
}

static void count_plan(struct bt_requests *rs, const struct bt_sched_plan *plan)
{
    for (size_t i = 0; i < BT_PLAN_REASONS; i++) {
        if (rs->m.plan[plan->both][i] != NULL && strcmp(bt_plan_reasons[i], plan->reason) == 0) {
            bt_metric_add(rs->m.plan[plan->both][i], 1);
        }
    }
}

/* The plan becomes the lane's current flight. */
static struct bt_flight *begin_flight(struct bt_lane *k, const struct bt_sched_plan *plan,
                                      const struct bt_view_snapshot *v, uint64_t now_ns)
{
    k->epoch++;
    for (uint32_t i = k->first; i < k->first + k->n; i++) {
        bt_journal_begin(&k->r->choices[i].journal, k->epoch);
    }
    if (k->r->prompt != NULL) {
        bt_prompt_begin(k->r->prompt);
    }
    struct bt_gen_usage *u = &k->r->usage;
    struct bt_flight *f = k->flight = bt_flight_create(k);
    f->prefill = v->worker[plan->prefill];
    f->kv_prefill = v->kvstore[plan->kv_prefill];
    if (k->r->spec.max_tokens == 0) { /* only the prompt's logprobs are wanted */
        f->same_kv = f->decode_ended = true;
    } else {
        f->both = plan->both;
        f->same_kv = plan->kv_prefill == plan->kv_decode;
        f->decode = v->worker[plan->decode];
        f->kv_decode = v->kvstore[plan->kv_decode];
        f->own_rows = k->n;
        f->own_kv = (uint64_t)k->n * k->n_tokens;
        snprintf(u->decode, sizeof(u->decode), "%s", f->decode->member->name);
    }
    f->plan = *plan;
    f->plan.background = plan->background || k->r->late; /* planned again: it still is */
    if (f->plan.background && !k->r->late) {
        k->r->late = true;
        k->r->rs->n_late++;
    }
    f->planned_ns = now_ns;
    f->own_tokens = k->n_tokens - plan->cached_tokens;
    bt_flight_count(f, now_ns);
    snprintf(u->prefill, sizeof(u->prefill), "%s", f->prefill->member->name);
    return f;
}

double bt_request_objective(double own_ms, double all_ms)
{
    return own_ms > 0 ? own_ms : all_ms;
}

struct bt_sched_params bt_request_params(const struct bt_requests *rs, double slo_ttft_ms,
                                         double slo_tbt_ms)
{
    struct bt_sched_params p = rs->conf.sched;
    p.ttft_objective_ms = bt_request_objective(slo_ttft_ms, p.ttft_objective_ms);
    p.tbt_objective_ms = bt_request_objective(slo_tbt_ms, p.tbt_objective_ms);
    /* The other half of the places is for those in time. */
    p.late_wait_ms = 2 * rs->n_late < rs->conf.max_running ? p.late_wait_ms : 0;
    return p;
}

/* The cluster as it is for the lane. *full_p: somebody is left out who had no room a moment ago. */
static void look(struct bt_lane *k, uint64_t now_ns, struct bt_view_snapshot *v, bool *full_p)
{
    const struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    /* Logprobs of the prompt need all of it computed. */
    bool use_cache = !r->spec.no_cache && r->prompt == NULL;
    bt_view_snapshot(rs->view, k->keys, use_cache ? k->n_keys : 0, v);
    bt_view_overtake(v, r->spec.priority);
    for (uint32_t i = 0; i < v->snap.n_workers; i++) {
        v->workers[i].avoid = avoided(k, v->worker[i], now_ns, full_p);
    }
    for (uint32_t i = 0; i < v->snap.n_kvstores; i++) {
        v->kvstores[i].avoid = avoided(k, v->kvstore[i], now_ns, full_p);
    }
    bt_expect_show(rs, now_ns, &v->snap);
    if (rs->conf.policy->fetches && rs->conf.sched.fetch_ratio > 0 && use_cache) {
        v->snap.spread_blocks = bt_sources_spread(rs->view, v, k->keys, k->n_keys);
    }
}

static struct bt_sched_request request_of(const struct bt_lane *k, uint64_t now_ns, double wait_ms)
{
    const struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    struct bt_sched_request req = {.n_tokens = k->n_tokens,
                                   .n_choices = k->n,
                                   .max_new = r->spec.max_tokens - r->choices[k->first].journal.n,
                                   .block_tokens = rs->conf.block_tokens,
                                   .token_bytes = rs->conf.token_bytes,
                                   .waited_ms =
                                       wait_ms + (double)(now_ns - r->spec.received_ns) / 1e6};
    bt_random(&req.random, sizeof(req.random));
    req.sequence = rs->decisions++;
    bt_expect_length(k, &req);
    return req;
}

/* What the policy says of the lane as it is now, or would if it had to wait_ms more. explain: it is
 * kept for batonctl explain. */
static bt_sched_verdict_t ask_policy(struct bt_lane *k, uint64_t now_ns, double wait_ms,
                                     bool explain, struct bt_view_snapshot *v,
                                     struct bt_sched_plan *plan, struct bt_sched_reject *rej,
                                     bool *full_p)
{
    const struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    gather_tokens(k);
    look(k, now_ns, v, full_p);
    struct bt_sched_request req = request_of(k, now_ns, wait_ms);
    struct bt_sched_params params = bt_request_params(rs, r->spec.slo_ttft_ms, r->spec.slo_tbt_ms);
    if (k->epoch != 0) { /* admitted already: an objective is no reason to drop it now */
        params.ttft_objective_ms = params.tbt_objective_ms = 0;
    }
    if (wait_ms > 0) { /* it waits for a place, or for room: there is none for late ones */
        params.late_wait_ms = 0;
    }
    bt_sched_verdict_t verdict =
        bt_sched_decide(rs->conf.policy, rs->conf.admission, &params, &v->snap, &req, plan, rej);
    if (verdict == BT_SCHED_PLANNED && plan->draining && k->epoch == 0) {
        /* What runs may stay on a drained node where nobody else can take it. New work never goes
         * there: it would keep the node from becoming empty. */
        verdict = BT_SCHED_NO_DECODE;
        *rej = (struct bt_sched_reject){.verdict = verdict, .retry_after_s = 1};
        rej->reason = bt_all_drained_text;
    }
    bool planned = verdict == BT_SCHED_PLANNED, in_time = planned && !plan->background;
    /* Late ones count as refused. Who could never be in time does not compete with others. */
    bool counts = !planned || !plan->background || rej->compute_ms <= params.ttft_objective_ms;
    if (counts && (planned || verdict == BT_SCHED_OVERLOADED)) {
        bt_expect_demand(k, now_ns, in_time ? plan->compute_ms : rej->compute_ms,
                         in_time ? plan->decode_work : rej->decode_work, in_time || rej->by_decode);
    }
    if (verdict == BT_SCHED_OVERLOADED || (planned && plan->background)) {
        bt_expect_late(k, now_ns, rej->compute_ms);
    }
    if (explain) {
        bt_explain_note(k, v, &params, &req, planned ? plan : NULL, rej);
    }
    return verdict;
}

bool bt_lane_movable(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    bool full = false;
    if (ask_policy(k, now_ns, 0, false, &v, &plan, &rej, &full) != BT_SCHED_PLANNED ||
        plan.draining) {
        return false;
    }
    /* Where nobody else has a role, one that gives it up is planned on all the same. */
    return (v.worker[plan.prefill]->gives_up & BT_ROLES_PREFILL) == 0 &&
           (v.worker[plan.decode]->gives_up & BT_ROLES_DECODE) == 0;
}

/* A place in a queue is for who will keep it: one that would just make its objective misses it by
 * what any forecast is wrong, and its refusal would come when it has waited. */
#define QUEUE_MARGIN 0.1

bool bt_lane_hopeless(struct bt_lane *k, uint64_t now_ns, double wait_ms,
                      struct bt_sched_reject *rej)
{
    const struct bt_requests *rs = k->r->rs;
    double objective_ms =
        bt_request_objective(k->r->spec.slo_ttft_ms, rs->conf.sched.ttft_objective_ms);
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    bool full = false;
    if (k->epoch != 0 || objective_ms == 0) {
        return false;
    }
    wait_ms += k->starved ? 0 : QUEUE_MARGIN * objective_ms;
    return ask_policy(k, now_ns, wait_ms, false, &v, &plan, rej, &full) == BT_SCHED_OVERLOADED;
}

double bt_request_tokens_per_s(const struct bt_sched_worker *w, uint32_t n,
                               const struct bt_sched_params *c)
{
    if (w->cost == NULL) {
        return w->prefill_tokens_per_s;
    }
    uint32_t chunk = w->chunk_tokens != 0 ? w->chunk_tokens : c->chunk_tokens;
    return 1e9 * n / bt_batch_prefill_ns(w->cost, 0, n, chunk);
}

bt_plan_result_t bt_lane_plan(struct bt_lane *k, uint64_t now_ns, struct bt_sched_reject *rej)
{
    struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    struct bt_view_snapshot v;
    struct bt_sched_plan plan;
    bool full = false;
    bt_sched_verdict_t verdict = ask_policy(k, now_ns, 0, true, &v, &plan, rej, &full);
    if (verdict != BT_SCHED_PLANNED) {
        return verdict == BT_SCHED_TOO_LARGE || verdict == BT_SCHED_OVERLOADED ? PLAN_REFUSED
                                                                               : PLAN_WAIT;
    }
    if (full && plan.last_resort && rs->probe != k) {
        return PLAN_NO_ROOM;
    }
    struct bt_flight *f = begin_flight(k, &plan, &v, now_ns);
    count_plan(rs, &plan);
    note_places(rs, &plan, &v, now_ns);
    bt_outcome_planned(k, f);
    k->charged = k->n_tokens - plan.cached_tokens;
    bt_sched_fair_serve(&rs->fair, r->tenant, k->charged, r->spec.weight);
    bt_expect_planned(f, now_ns);
    BT_DEBUG("request_planned",
             "req=%016" PRIx64 " epoch=%u tokens=%u cached=%u prefill=%s decode=%s why=%s "
             "ttft_ms=%.1f",
             k->id, k->epoch, k->n_tokens, plan.cached_tokens, r->usage.prefill, r->usage.decode,
             plan.reason, plan.ttft_ms);
    /* What only passes through has a limit of its own; for the probe all slots count. */
    struct bt_sources from;
    bt_sources_find(rs->view, &v, &plan, k->keys, k->n_keys,
                    plan.prefix_tokens / rs->conf.block_tokens, &from);
    if (from.n != 0) {
        bt_metric_add(rs->m.fetch_plans, 1);
        bt_metric_add(rs->m.fetch_tokens, plan.fetch_tokens);
        bt_explain_sources(k, plan.fetch_tokens, &from);
        bt_outcome_source(k, &from);
    }
    /* For what lies on its own SSD the kvstore weighs loading against computing by itself. */
    double recompute =
        plan.recompute_tokens_per_s > 0 || from.n != 0
            ? plan.recompute_tokens_per_s
            : bt_request_tokens_per_s(&v.workers[plan.prefill], k->n_tokens, &rs->conf.sched);
    submit(k, f, plan.keep || rs->probe == k, &from, recompute, now_ns);
    bt_sources_cleanup(&from);
    bt_replicate_look(k, &v, now_ns);
    return PLAN_SUBMITTED;
}
