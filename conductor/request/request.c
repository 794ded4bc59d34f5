/* The states of a request (states.def). Every function here runs on the loop's thread, may call the
 * front (which may cancel the request from inside), and never frees the request: that is done by
 * the pool once its flights are over. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

#define DEATHS_MAX     2   /* a request that has killed two workers is not tried on a third */
#define DEATH_DELAY_MS 50u /* a node's other sessions break at about the same time: let them */
#define RETRY_MS       20u
#define RETRY_MAX_MS   1000u
#define FULL_NS        1000000000ull /* how long a full daemon is gone around */

typedef void (*state_fn)(struct bt_request *r, const struct bt_request_input *in);

const char *bt_request_state_name(bt_request_state_t s)
{
    static const char *const names[REQ_STATES] = {"waiting",  "planning", "prefilling",
                                                  "decoding", "settling", "finishing"};
    return s < REQ_STATES ? names[s] : "?";
}

static void set_state(struct bt_request *r, bt_request_state_t s)
{
    BT_DEBUG("request_state", "req=%016" PRIx64 " epoch=%u from=%s to=%s", r->id, r->epoch,
             bt_request_state_name(r->state), bt_request_state_name(s));
    r->state = s;
}

static bool running(const struct bt_request *r)
{
    return r->state == REQ_PREFILLING || r->state == REQ_DECODING;
}

/* Every flight is wound up; the request only waits for their ends. */
static void finishing(struct bt_request *r, bool hard, uint64_t now_ns)
{
    bt_requests_unqueue(r); /* counts by the state that it leaves */
    bt_requests_fits(r);
    set_state(r, REQ_FINISHING);
    bt_requests_uncount(r);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &r->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        if (hard || f->wind == FLIGHT_ACTIVE) {
            bt_flight_wind(f, hard, now_ns);
        }
    }
}

static void observe_end(struct bt_request *r, int success, uint64_t now_ns)
{
    bt_metric_add(r->rs->m.finished[success], 1);
    bt_metric_observe(r->rs->m.e2e, (double)(now_ns - r->spec.received_ns) / 1e9);
}

void bt_request_fail(struct bt_request *r, int reject, int http, uint32_t retry_after_s,
                     const char *why)
{
    uint64_t now = bt_mono_ns();
    BT_WARN("request_failed", "req=%016" PRIx64 " id=%s http=%d tokens=%u why=%s", r->id,
            bt_log_q(r->spec.id != NULL ? r->spec.id : ""), http, r->journal.n, bt_log_q(why));
    bt_metric_add(r->rs->m.rejected[reject], 1);
    observe_end(r, SUCCESS_ERROR, now);
    finishing(r, true, now);
    const struct bt_gen_ops *ops = r->ops;
    r->ops = NULL;
    if (ops != NULL) {
        ops->on_error(r->arg, http, why, retry_after_s);
    }
}

/* ---- failure is re-planning ---- */

static void avoid_until(struct bt_request *r, const struct bt_session *s, uint64_t until_ns)
{
    if (s == NULL) {
        return;
    }
    for (uint32_t i = 0; i < r->n_avoid; i++) {
        if (r->avoid[i].incarnation == s->member->incarnation) {
            r->avoid[i].until_ns = BT_MAX(r->avoid[i].until_ns, until_ns);
            return;
        }
    }
    /* The oldest is forgotten: it may have recovered by now. */
    if (r->n_avoid == AVOID_MAX) {
        memmove(r->avoid, r->avoid + 1, (AVOID_MAX - 1) * sizeof(r->avoid[0]));
        r->n_avoid--;
    }
    r->avoid[r->n_avoid].incarnation = s->member->incarnation;
    r->avoid[r->n_avoid++].until_ns = until_ns;
}

static void avoid(struct bt_request *r, const struct bt_session *s)
{
    avoid_until(r, s, UINT64_MAX);
}

static void leave_plan(struct bt_request *r, uint64_t now_ns)
{
    struct bt_flight *f = r->flight;
    r->flight = NULL;
    if (f != NULL) {
        bt_flight_wind(f, true, now_ns);
    }
    r->no_worker_ns = 0;
    set_state(r, REQ_PLANNING);
}

static void replan(struct bt_request *r, bool death, const char *why, uint64_t now_ns)
{
    struct bt_requests *rs = r->rs;
    r->deaths += death;
    r->usage.replans++;
    rs->replanned++;
    bt_metric_add(rs->m.replanned, 1);
    BT_WARN("request_replan",
            "req=%016" PRIx64 " epoch=%u tokens=%u deaths=%u replans=%u prefill=%s decode=%s "
            "why=%s",
            r->id, r->epoch, r->journal.n, r->deaths, r->usage.replans, r->usage.prefill,
            r->usage.decode, bt_log_q(why));
    char text[320];
    if (r->deaths >= DEATHS_MAX) {
        snprintf(text, sizeof(text),
                 "two workers were lost while they worked on this request; it is not tried again");
        bt_request_fail(r, REJECT_FAILED, 500, 0, text);
        return;
    }
    if (r->usage.replans > rs->conf.max_replans) {
        snprintf(text, sizeof(text), "failed %u times, the last time: %s", r->usage.replans, why);
        bt_request_fail(r, REJECT_FAILED, 500, 0, text);
        return;
    }
    uint32_t shift = BT_MIN(r->usage.replans - 1, 6u);
    uint32_t delay = death ? DEATH_DELAY_MS : BT_MIN(RETRY_MS << shift, RETRY_MAX_MS);
    leave_plan(r, now_ns);
    r->plan_at_ns = now_ns + (uint64_t)delay * 1000000;
    bt_requests_queue_planning(r);
}

static bool queued_too_long(struct bt_request *r, uint64_t now_ns)
{
    uint64_t limit_ns = (uint64_t)r->rs->conf.queue_timeout_ms * 1000000;
    if (limit_ns == 0 || r->queued_ns == 0 || now_ns < r->queued_ns + limit_ns) {
        return false;
    }
    char text[128];
    snprintf(text, sizeof(text), "no room for this request in %.1f s (conductor.queue_timeout_ms)",
             (double)(now_ns - r->queued_ns) / 1e9);
    bt_request_fail(r, REJECT_NO_ROOM, 503, bt_requests_retry_after_s(r->rs), text);
    return true;
}

/* s has no room now. Not a failure: elsewhere at once, or it waits until there is some. */
static void put_off(struct bt_request *r, const struct bt_session *s, const char *why,
                    uint64_t now_ns)
{
    BT_DEBUG("request_put_off", "req=%016" PRIx64 " epoch=%u why=%s", r->id, r->epoch,
             bt_log_q(why));
    avoid_until(r, s, now_ns + FULL_NS);
    r->flight->no_room = true;
    leave_plan(r, now_ns);
    if (r->queued_ns == 0) {
        r->queued_ns = now_ns;
    }
    if (queued_too_long(r, now_ns)) {
        return;
    }
    if (r->rs->probe == r) {
        bt_requests_starve(r, now_ns);
    } else {
        bt_requests_queue_planning(r);
    }
}

/* A worker or kvstore (s, may be NULL) refused or gave up with a status of its own. */
static void repair(struct bt_request *r, const struct bt_session *s, int32_t status,
                   const char *detail, uint64_t now_ns)
{
    char why[256];
    snprintf(why, sizeof(why), "%s: %s (%s)", s != NULL ? s->member->name : "a worker",
             detail != NULL && detail[0] != '\0' ? detail : bt_status_text((bt_status_t)status),
             bt_status_name((bt_status_t)status));
    if (status == BT_ERR_INVALID || status == BT_ERR_UNSUPPORTED || status == BT_ERR_TOO_LARGE) {
        bt_request_fail(r, REJECT_INVALID, 400, 0, why);
        return;
    }
    if (status == BT_ERR_EXHAUSTED || status == BT_AGAIN) {
        put_off(r, s, why, now_ns);
        return;
    }
    avoid(r, s);
    replan(r, false, why, now_ns);
}

/* ---- admission and planning ---- */

static void on_admit(struct bt_request *r, const struct bt_request_input *in)
{
    bt_requests_unqueue(r);
    r->admitted_ns = in->now_ns;
    r->counted = true;
    r->rs->n_active++;
    set_state(r, REQ_PLANNING);
    bt_requests_queue_planning(r);
}

static void on_plan(struct bt_request *r, const struct bt_request_input *in)
{
    if (in->now_ns < r->plan_at_ns) {
        return;
    }
    struct bt_sched_reject rej = {0};
    switch (bt_request_plan(r, in->now_ns, &rej)) {
    case PLAN_SUBMITTED:
        bt_requests_unqueue(r);
        r->no_worker_ns = 0;
        r->progress_ns = in->now_ns;
        set_state(r, REQ_PREFILLING);
        return;
    case PLAN_REFUSED:
        if (rej.verdict == BT_SCHED_TOO_LARGE) {
            bt_request_fail(r, REJECT_TOO_LARGE, 400, 0, rej.reason);
        } else {
            bt_request_fail(r, REJECT_OVERLOADED, 429, rej.retry_after_s, rej.reason);
        }
        return;
    case PLAN_NO_ROOM: bt_requests_starve(r, in->now_ns); return;
    case PLAN_WAIT:
        if (r->rs->probe == r) {
            bt_requests_queue_planning(r);
            bt_requests_nobody(r->rs);
        }
        break;
    }
    if (r->no_worker_ns == 0) {
        r->no_worker_ns = in->now_ns;
    }
    if (in->now_ns - r->no_worker_ns > (uint64_t)r->rs->conf.no_worker_ms * 1000000) {
        bt_request_fail(r, REJECT_NO_WORKER, 503, BT_MAX(rej.retry_after_s, 1u), rej.reason);
    }
}

static bool past_deadline(struct bt_request *r, uint64_t now_ns)
{
    if (r->spec.timeout_ms == 0 || now_ns < r->spec.received_ns + r->spec.timeout_ms * 1000000) {
        return false;
    }
    bt_request_fail(r, REJECT_DEADLINE, 504, 0, "the request's time limit has passed");
    return true;
}

static void on_tick_waiting(struct bt_request *r, const struct bt_request_input *in)
{
    if (!past_deadline(r, in->now_ns)) {
        (void)queued_too_long(r, in->now_ns);
    }
}

static void on_cancel(struct bt_request *r, const struct bt_request_input *in)
{
    observe_end(r, SUCCESS_ABORT, in->now_ns);
    BT_INFO("request_cancelled", "req=%016" PRIx64 " id=%s state=%s tokens=%u", r->id,
            bt_log_q(r->spec.id != NULL ? r->spec.id : ""), bt_request_state_name(r->state),
            r->journal.n);
    r->ops = NULL;
    finishing(r, true, in->now_ns);
}

/* ---- the end ---- */

static void settle(struct bt_request *r, uint64_t now_ns)
{
    struct bt_gen_usage *u = &r->usage;
    u->prompt_tokens = (uint32_t)r->spec.prompt.n;
    u->completion_tokens = r->journal.n;
    u->ttft_ms = (double)(r->first_ns - r->spec.received_ns) / 1e6;
    u->decode_ms = (double)(r->last_ns - r->first_ns) / 1e6;
    /* What the transfer took after the compute's end, as a share of all of it. */
    if (r->flow_first_ns != 0 && r->flow_last_ns > r->flow_first_ns && r->last_compute_ns != 0) {
        double all = (double)(r->flow_last_ns - r->flow_first_ns);
        double late = r->flow_last_ns > r->last_compute_ns
                          ? (double)(r->flow_last_ns - r->last_compute_ns)
                          : 0;
        u->hidden_fraction = late < all ? 1 - late / all : 0;
    }
    observe_end(r, r->success, now_ns);
    bt_metric_add(r->rs->m.cached, u->cached_tokens);
    BT_INFO("request_done",
            "req=%016" PRIx64 " id=%s prompt=%u completion=%u cached=%u ttft_ms=%.1f "
            "decode_ms=%.1f replans=%u prefill=%s decode=%s",
            r->id, bt_log_q(r->spec.id != NULL ? r->spec.id : ""), u->prompt_tokens,
            u->completion_tokens, u->cached_tokens, u->ttft_ms, u->decode_ms, u->replans,
            u->prefill, u->decode);
    finishing(r, false, now_ns);
    const struct bt_gen_ops *ops = r->ops;
    r->ops = NULL;
    if (ops != NULL) {
        ops->on_done(r->arg, u);
    }
}

static void settle_if_known(struct bt_request *r, uint64_t now_ns)
{
    if (r->state == REQ_SETTLING && r->have_prefill_done && !r->want_flow) {
        settle(r, now_ns);
    }
}

static void on_tick_settling(struct bt_request *r, const struct bt_request_input *in)
{
    if (in->now_ns - r->settle_ns > (uint64_t)r->rs->conf.settle_ms * 1000000) {
        settle(r, in->now_ns);
    }
}

/* All tokens are out. by_worker: the worker itself stops here. */
static void finish(struct bt_request *r, bt_finish_t reason, const char *stop_string,
                   bool by_worker, uint64_t now_ns)
{
    r->success = reason == BT_FINISH_STOP ? SUCCESS_STOP : SUCCESS_LENGTH;
    set_state(r, REQ_SETTLING);
    r->settle_ns = now_ns;
    bt_requests_uncount(r);
    struct bt_flight *f = r->flight;
    r->want_flow = !f->both && !f->same_kv && f->got_decode && !f->flow_done;
    f->decode_useless = !by_worker || (!f->both && !f->got_decode);
    bt_flight_wind(f, false, now_ns);
    if (r->ops != NULL) {
        r->ops->on_finish(r->arg, 0, reason, stop_string);
    }
    settle_if_known(r, now_ns);
}

/* ---- tokens ---- */

static void observe_token(struct bt_request *r, uint64_t now_ns)
{
    struct bt_requests *rs = r->rs;
    bt_metric_add(rs->m.generation, 1);
    if (r->journal.n == 1) {
        r->first_ns = now_ns;
        bt_metric_observe(rs->m.ttft, (double)(now_ns - r->spec.received_ns) / 1e9);
        bt_metric_add(rs->m.prompt, r->spec.prompt.n);
    } else {
        bt_metric_observe(rs->m.itl, (double)(now_ns - r->last_ns) / 1e9);
    }
    r->last_ns = now_ns;
}

/* Gives the client the token that was just journalled. */
static void deliver(struct bt_request *r, const struct bt_journal_entry *e, uint64_t now_ns)
{
    observe_token(r, now_ns);
    bool look = r->journal.n > r->spec.sampling.min_new;
    bool by_id = e->finish == BATON__FINISH__STOP;
    bool by_length = e->finish == BATON__FINISH__LENGTH || r->journal.n >= r->spec.max_tokens;
    struct bt_buf text;
    bt_buf_init(&text);
    const char *stop = NULL;
    struct bt_gen_token t = {.id = e->token,
                             .logprob = e->logprob,
                             .n_top = e->n_top,
                             .top_id = e->top_id,
                             .top_logprob = e->top_logprob};
    bt_status_t st = bt_emit_token(&r->emit, e->token, by_id, look, &text, &t.text_offset, &stop);
    if (st != BT_OK) {
        bt_buf_cleanup(&text);
        bt_request_fail(r, REJECT_FAILED, 500, 0,
                        "a worker sent a token that the tokenizer does not have");
        return;
    }
    if (stop == NULL && (by_id || by_length)) {
        bt_emit_end(&r->emit, look, &text, &stop);
    }
    struct bt_gen_delta d = {.choice = 0,
                             .text = text.len != 0 ? text.data : "",
                             .text_len = text.len,
                             .tokens = &t,
                             .n_tokens = 1};
    if (r->ops != NULL) {
        r->ops->on_delta(r->arg, &d);
    }
    bt_buf_cleanup(&text);
    if (!running(r)) {
        return; /* cancelled from inside */
    }
    if (stop != NULL || by_id) {
        finish(r, BT_FINISH_STOP, stop, by_id || by_length, now_ns);
    } else if (by_length) {
        finish(r, BT_FINISH_LENGTH, NULL, true, now_ns);
    }
}

/* The worker that should go on has ended, and no token is missing before that end. */
static bool ended_short(const struct bt_request *r)
{
    const struct bt_flight *f = r->flight;
    return running(r) && f != NULL && f->decode_ended && f->decode != NULL &&
           (f->both || f->got_first) && !bt_journal_gap(&r->journal);
}

static void on_token(struct bt_request *r, const struct bt_request_input *in)
{
    const Baton__Token *t = in->msg;
    struct bt_flight *f = r->flight;
    if (t->choice != 0 || t->finish == BATON__FINISH__ERROR ||
        (in->session != f->prefill && in->session != f->decode)) {
        return; /* an ERROR is followed by Ended with the reason */
    }
    struct bt_journal_entry e = {.epoch = t->epoch,
                                 .token = t->token,
                                 .logprob = t->logprob,
                                 .finish = (uint32_t)t->finish,
                                 .n_top = (uint32_t)BT_MIN(t->n_top, (size_t)BT_ENGINE_MAX_TOP)};
    for (uint32_t i = 0; i < e.n_top; i++) {
        e.top_id[i] = t->top[i]->id;
        e.top_logprob[i] = t->top[i]->logprob;
    }
    bt_status_t st = bt_journal_put(&r->journal, t->offset, &e);
    if (st == BT_ERR_EXHAUSTED) {
        avoid(r, in->session);
        replan(r, false, "a worker's tokens ran ahead of one that is missing", in->now_ns);
        return;
    }
    if (st != BT_OK) {
        bt_metric_add(r->rs->m.stale, 1);
        return;
    }
    r->progress_ns = in->now_ns;
    r->queued_ns = 0;
    f->got_first = f->got_first || t->offset == 0;
    f->got_decode = f->got_decode || (!f->both && t->offset > 0);
    const struct bt_journal_entry *next;
    while (running(r) && (next = bt_journal_take(&r->journal)) != NULL) {
        if (r->state == REQ_PREFILLING) {
            set_state(r, REQ_DECODING);
        }
        deliver(r, next, in->now_ns);
    }
    if (ended_short(r)) {
        replan(r, false, "the decode worker ended before the request's end", in->now_ns);
    }
}

static void on_prefill_done(struct bt_request *r, const struct bt_request_input *in)
{
    const Baton__PrefillDone *p = in->msg;
    if (r->flight != NULL) {
        bt_flight_prefilled(r->flight);
    }
    r->progress_ns = in->now_ns;
    r->last_compute_ns = p->last_compute_ns;
    if (!r->have_prefill_done) { /* later plans find what this one has left in the caches */
        r->have_prefill_done = true;
        r->usage.cached_tokens = BT_MIN(p->cached_tokens, (uint32_t)r->spec.prompt.n);
        if (p->start_ns != 0 && p->last_compute_ns >= p->start_ns) {
            r->usage.prefill_ms = (double)(p->last_compute_ns - p->start_ns) / 1e6;
        }
        uint64_t waited_ns = bt_real_ns() - (in->now_ns - r->spec.received_ns);
        if (p->start_ns > waited_ns) {
            r->usage.queue_ms = (double)(p->start_ns - waited_ns) / 1e6;
        }
    }
    settle_if_known(r, in->now_ns);
}

static void on_flow_done(struct bt_request *r, const struct bt_request_input *in)
{
    const Baton__FlowDone *d = in->msg;
    r->progress_ns = in->now_ns;
    r->usage.kv_bytes += d->bytes;
    r->usage.kv_segments += d->segments;
    r->flow_first_ns = d->first_ns;
    r->flow_last_ns = d->last_ns;
    r->want_flow = false;
    if (r->flight != NULL && in->session == r->flight->kv_decode) {
        r->flight->flow_done = true;
        bt_flight_step(r->flight, in->now_ns);
    }
    settle_if_known(r, in->now_ns);
}

/* ---- failures ---- */

/* Does the current plan still need what this session does? */
static bool needed(const struct bt_flight *f, const struct bt_session *s)
{
    bool landed = f->flow_done || f->got_decode;
    if (s == f->decode) {
        return true;
    }
    if (s == f->prefill || s == f->kv_prefill) {
        return f->both ? !f->got_first : !landed;
    }
    return s == f->kv_decode && !f->got_decode;
}

static void on_reserved(struct bt_request *r, const struct bt_request_input *in)
{
    const Baton__Reserved *v = in->msg;
    struct bt_flight *f = r->flight;
    r->progress_ns = in->now_ns;
    if (v->status == BT_OK) {
        f->reserved++;
        if (f->reserved == (f->same_kv ? 1 : 2)) {
            bt_requests_fits(r);
        }
    } else if (needed(f, in->session)) {
        repair(r, in->session, v->status, v->detail, in->now_ns);
    }
}

static void on_grant_failed(struct bt_request *r, const struct bt_request_input *in)
{
    const Baton__GrantFailed *g = in->msg;
    struct bt_flight *f = r->flight;
    if (!needed(f, in->session)) {
        return;
    }
    /* The receiving side tells of its peer: it is the peer that the next plan should avoid. */
    const struct bt_session *at = in->session;
    if (at == f->kv_decode && !f->same_kv && g->status <= BT_ERR_PEER_LOST &&
        g->status > BT_ERR_NO_MEMORY) {
        avoid(r, f->kv_prefill);
        at = NULL;
    }
    int32_t status = g->status != BT_OK ? g->status : BT_ERR_INTERNAL;
    repair(r, at, status, g->detail, in->now_ns);
}

static void on_ended_old(struct bt_request *r, const struct bt_request_input *in)
{
    (void)r;
    bt_flight_ended(in->flight, in->session);
    bt_flight_step(in->flight, in->now_ns);
}

static void on_lost_old(struct bt_request *r, const struct bt_request_input *in)
{
    (void)r;
    bt_flight_lose(in->flight, in->session);
    bt_flight_step(in->flight, in->now_ns);
}

static void on_ended_settling(struct bt_request *r, const struct bt_request_input *in)
{
    on_ended_old(r, in);
}

static void on_lost_settling(struct bt_request *r, const struct bt_request_input *in)
{
    if (in->flight == r->flight) {
        r->want_flow = r->want_flow && in->session != in->flight->kv_decode;
        /* A numbers' source is gone: they stay unknown. */
        r->have_prefill_done = r->have_prefill_done || in->session == in->flight->prefill;
    }
    on_lost_old(r, in);
    settle_if_known(r, in->now_ns);
}

static void on_ended(struct bt_request *r, const struct bt_request_input *in)
{
    struct bt_flight *f = in->flight;
    const Baton__Ended *e = in->msg;
    if (f != r->flight) {
        on_ended_old(r, in);
        return;
    }
    r->progress_ns = in->now_ns;
    bool need = needed(f, in->session);
    bt_flight_ended(f, in->session);
    if (e->status != BT_OK && need) {
        repair(r, in->session, e->status, e->detail, in->now_ns);
        return;
    }
    if (in->session == f->prefill && !f->both && !f->got_first) {
        avoid(r, in->session);
        replan(r, false, "the prefill worker ended without a token", in->now_ns);
        return;
    }
    if (ended_short(r)) {
        avoid(r, in->session);
        replan(r, false, "the decode worker ended before the request's end", in->now_ns);
        return;
    }
    bt_flight_step(f, in->now_ns);
}

static void on_lost(struct bt_request *r, const struct bt_request_input *in)
{
    struct bt_flight *f = in->flight;
    if (f != r->flight) {
        on_lost_old(r, in);
        return;
    }
    bool need = needed(f, in->session);
    bool ended = (in->session == f->decode && f->decode_ended) ||
                 (in->session == f->prefill && f->prefill_ended);
    bt_flight_lose(f, in->session);
    if (!need) {
        return;
    }
    char why[128];
    snprintf(why, sizeof(why), "%s %s was lost", in->session->member->kind,
             in->session->member->name);
    avoid(r, in->session);
    replan(r, in->session->kind == BT_SESSION_WORKER && !ended, why, in->now_ns);
}

static void on_tick_running(struct bt_request *r, const struct bt_request_input *in)
{
    if (past_deadline(r, in->now_ns)) {
        return;
    }
    struct bt_flight *f = r->flight;
    struct bt_session *s = r->state == REQ_PREFILLING ? f->prefill : f->decode;
    if (s == NULL) {
        return;
    }
    /* A queue is no hang: what counts is whether this worker finishes anything at all. */
    uint64_t last = BT_MAX(r->progress_ns, s->output_ns);
    double limit_ms = r->rs->conf.stall_ms;
    if (r->state == REQ_PREFILLING) {
        limit_ms += 2 * f->ttft_ms;
    }
    if (in->now_ns > last && (double)(in->now_ns - last) / 1e6 > limit_ms) {
        avoid(r, s);
        char why[128];
        snprintf(why, sizeof(why), "%s has not finished anything for %.0f s", s->member->name,
                 (double)(in->now_ns - last) / 1e9);
        replan(r, true, why, in->now_ns);
    }
}

/* ---- the table ---- */

static const state_fn table[REQ_STATES][EV_EVENTS] = {
#define BT_REQUEST_ROW(state, event, fn) [REQ_##state][EV_##event] = fn,
#include "states.def"
#undef BT_REQUEST_ROW
};

void bt_request_event(struct bt_request *r, bt_request_event_t ev,
                      const struct bt_request_input *in)
{
    BT_ASSERT(r->state < REQ_STATES && ev < EV_EVENTS);
    state_fn fn = table[r->state][ev];
    if (fn != NULL) {
        fn(r, in);
    }
}
