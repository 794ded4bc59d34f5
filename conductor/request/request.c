/* A request towards its client: tokens through the journals into text, the end of each choice,
 * usage, errors. Loop thread. The front may cancel from inside of every callback. */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/request_priv.h"

/* Between tenants a generated token counts as so many of a prompt (share.h). */
#define GENERATED_WEIGHT 2

static const char *log_id(const struct bt_request *r)
{
    return r->spec.id != NULL ? r->spec.id : "";
}

static uint64_t wire_id(const struct bt_request *r)
{
    return BT_CONTAINER_OF(r->lanes.next, struct bt_lane, link)->id;
}

static uint32_t tokens_of(const struct bt_request *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->spec.n; i++) {
        n += r->choices[i].journal.n;
    }
    return n;
}

/* ---- the end ---- */

static void observe_end(struct bt_request *r, int success, uint64_t now_ns)
{
    bt_metric_add(r->rs->m.finished[success], 1);
    bt_metric_observe(r->rs->m.e2e, (double)(now_ns - r->spec.received_ns) / 1e9);
}

/* Every lane is wound up; the request only waits for their ends. */
static void end_lanes(struct bt_request *r, uint64_t now_ns)
{
    struct bt_list *l;
    bt_list_for_each (l, &r->lanes) {
        bt_lane_finishing(BT_CONTAINER_OF(l, struct bt_lane, link), true, now_ns);
    }
    bt_requests_uncount(r);
}

/* As far as it came. */
static void fill_usage(struct bt_request *r)
{
    struct bt_gen_usage *u = &r->usage;
    u->prompt_tokens = (uint32_t)r->spec.prompt.n;
    u->completion_tokens = tokens_of(r);
    if (r->first_ns == 0) {
        return;
    }
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
}

void bt_request_fail(struct bt_request *r, int reject, int http, uint32_t retry_after_s,
                     const char *why)
{
    uint64_t now = bt_mono_ns();
    /* Under overload refusals are most of the answers: metrics count them, by reason. */
    bt_log_level_t level = http == 429 ? BT_LOG_DEBUG : BT_LOG_WARN;
    if (bt_log_enabled(level)) {
        bt_log(level, "request_failed", "req=%016" PRIx64 " id=%s http=%d tokens=%u why=%s",
               wire_id(r), log_id(r), http, tokens_of(r), why);
    }
    bt_metric_add(r->rs->m.rejected[reject], 1);
    observe_end(r, SUCCESS_ERROR, now);
    fill_usage(r);
    bt_explain_outcome(r, why);
    end_lanes(r, now);
    const struct bt_gen_ops *ops = r->ops;
    r->ops = NULL;
    if (ops != NULL) {
        ops->on_error(r->arg, http, why, retry_after_s);
    }
}

const struct bt_gen_usage *bt_request_usage(const struct bt_request *r)
{
    return &r->usage;
}

void bt_request_cancel(struct bt_request *r)
{
    uint64_t now = bt_mono_ns();
    observe_end(r, SUCCESS_ABORT, now);
    fill_usage(r);
    bt_explain_outcome(r, "cancelled by its client");
    BT_INFO("request_cancelled", "req=%016" PRIx64 " id=%s tokens=%u", wire_id(r), log_id(r),
            tokens_of(r));
    r->ops = NULL;
    end_lanes(r, now);
}

void bt_request_settled(struct bt_request *r, uint64_t now_ns)
{
    struct bt_list *l;
    bt_list_for_each (l, &r->lanes) {
        if (BT_CONTAINER_OF(l, struct bt_lane, link)->state != LANE_FINISHING) {
            return;
        }
    }
    const struct bt_gen_ops *ops = r->ops;
    r->ops = NULL;
    if (ops == NULL) {
        return;
    }
    struct bt_gen_usage *u = &r->usage;
    fill_usage(r);
    bt_explain_outcome(r, NULL);
    observe_end(r, r->success, now_ns);
    bt_metric_add(r->rs->m.cached, u->cached_tokens);
    BT_INFO("request_done",
            "req=%016" PRIx64 " id=%s n=%u prompt=%u completion=%u cached=%u ttft_ms=%.1f "
            "decode_ms=%.1f replans=%u prefill=%s decode=%s",
            wire_id(r), log_id(r), r->spec.n, u->prompt_tokens, u->completion_tokens,
            u->cached_tokens, u->ttft_ms, u->decode_ms, u->replans, u->prefill, u->decode);
    ops->on_done(r->arg, u);
}

/* All tokens of a choice are out. by_worker: the worker itself stops here. */
static void finish(struct bt_lane *k, uint32_t choice, bt_finish_t reason, const char *stop_string,
                   bool by_worker, uint64_t now_ns)
{
    struct bt_request *r = k->r;
    r->choices[choice].finished = true;
    bt_outcome_choice(k, choice);
    bt_expect_choice_over(r, choice, reason == BT_FINISH_STOP);
    r->success = reason == BT_FINISH_STOP ? SUCCESS_STOP : SUCCESS_LENGTH;
    if (--r->n_unfinished == 0) {
        bt_requests_uncount(r);
    }
    if (r->ops != NULL) {
        r->ops->on_finish(r->arg, choice, reason, stop_string);
    }
    if (bt_lane_running(k)) { /* not cancelled from inside */
        bt_lane_choice_finished(k, choice, by_worker, now_ns);
    }
}

/* ---- tokens ---- */

static void observe_token(struct bt_lane *k, struct bt_choice *c, uint64_t now_ns)
{
    struct bt_request *r = k->r;
    struct bt_requests *rs = r->rs;
    bt_metric_add(rs->m.generation, 1);
    bt_sched_fair_serve(&rs->fair, r->tenant, GENERATED_WEIGHT, r->spec.weight);
    if (r->first_ns == 0) {
        r->first_ns = now_ns;
        bt_outcome_first_token(k, now_ns);
        bt_metric_observe(rs->m.ttft, (double)(now_ns - r->spec.received_ns) / 1e9);
        bt_metric_add(rs->m.prompt, r->spec.prompt.n);
    }
    if (c->last_ns != 0) {
        bt_metric_observe(rs->m.itl, (double)(now_ns - c->last_ns) / 1e9);
        bt_outcome_gap(c, now_ns);
    }
    r->last_ns = c->last_ns = now_ns;
}

/* Gives the client the token that was just journalled. */
static void deliver(struct bt_lane *k, uint32_t choice, const struct bt_journal_entry *e,
                    uint64_t now_ns)
{
    struct bt_request *r = k->r;
    struct bt_choice *c = &r->choices[choice];
    observe_token(k, c, now_ns);
    bool look = c->journal.n > r->spec.sampling.min_new;
    bool by_id = e->finish == BATON__FINISH__STOP;
    bool by_length = e->finish == BATON__FINISH__LENGTH || c->journal.n >= r->spec.max_tokens;
    struct bt_buf text;
    bt_buf_init(&text);
    const char *stop = NULL;
    struct bt_gen_token t = {.id = e->token,
                             .logprob = e->logprob,
                             .n_top = e->n_top,
                             .top_id = e->top_id,
                             .top_logprob = e->top_logprob};
    bt_status_t st = bt_emit_token(&c->emit, e->token, by_id, look, &text, &t.text_offset, &stop);
    BT_ASSERT(st == BT_OK); /* the journal has no token that the tokenizer does not have */
    if (stop == NULL && (by_id || by_length)) {
        bt_emit_end(&c->emit, look, &text, &stop);
    }
    struct bt_gen_delta d = {.choice = choice,
                             .text = text.len != 0 ? text.data : "",
                             .text_len = text.len,
                             .tokens = &t,
                             .n_tokens = 1};
    if (r->ops != NULL) {
        r->ops->on_delta(r->arg, &d);
    }
    bt_buf_cleanup(&text);
    if (!bt_lane_running(k)) {
        return; /* cancelled from inside */
    }
    if (stop != NULL || by_id) {
        finish(k, choice, BT_FINISH_STOP, stop, by_id || by_length, now_ns);
    } else if (by_length) {
        finish(k, choice, BT_FINISH_LENGTH, NULL, true, now_ns);
    }
}

/* True: the client has them, or does not want them. */
static bool give_prompt(struct bt_request *r)
{
    struct bt_prompt *p = r->prompt;
    if (p == NULL) {
        return true;
    }
    if (!bt_prompt_complete(p)) {
        return false;
    }
    r->prompt = NULL;
    if (r->ops != NULL) {
        r->ops->on_prompt(r->arg, bt_prompt_tokens(p), r->spec.prompt.n);
    }
    bt_prompt_destroy(p);
    return true;
}

void bt_request_no_tokens(struct bt_lane *k, uint64_t now_ns)
{
    struct bt_request *r = k->r;
    if (!give_prompt(r)) {
        return;
    }
    r->first_ns = r->last_ns = now_ns;
    bt_metric_observe(r->rs->m.ttft, (double)(now_ns - r->spec.received_ns) / 1e9);
    bt_metric_add(r->rs->m.prompt, r->spec.prompt.n);
    for (uint32_t i = 0; i < r->spec.n && bt_lane_running(k); i++) {
        finish(k, i, BT_FINISH_LENGTH, NULL, true, now_ns);
    }
}

void bt_request_deliver(struct bt_lane *k, uint32_t choice, uint64_t now_ns)
{
    struct bt_choice *c = &k->r->choices[choice];
    if (!give_prompt(k->r)) {
        return;
    }
    const struct bt_journal_entry *next;
    while (bt_lane_running(k) && !c->finished && (next = bt_journal_take(&c->journal)) != NULL) {
        if (k->state == LANE_PREFILLING) {
            bt_lane_set_state(k, LANE_DECODING);
        }
        deliver(k, choice, next, now_ns);
    }
}

bt_status_t bt_request_put(struct bt_request *r, const Baton__Token *t)
{
    struct bt_choice *c = &r->choices[t->choice];
    if (c->finished) {
        return BT_OK; /* beyond its stop string: neither given nor billed */
    }
    if (t->token >= bt_tokenizer_vocab(r->rs->tok)) {
        return BT_ERR_INVALID;
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
    return bt_journal_put(&c->journal, t->offset, &e);
}

/* ---- numbers ---- */

void bt_request_prefill_done(struct bt_request *r, const Baton__PrefillDone *p, uint64_t now_ns)
{
    r->last_compute_ns = p->last_compute_ns;
    if (r->have_prefill_done) {
        return; /* later plans find what the first one has left in the caches */
    }
    r->have_prefill_done = true;
    r->usage.cached_tokens = BT_MIN(p->cached_tokens, (uint32_t)r->spec.prompt.n);
    /* No part of a request is longer than all of it, whatever a worker's clock says. */
    double life_ms = (double)(now_ns - r->spec.received_ns) / 1e6;
    if (p->start_ns != 0 && p->last_compute_ns >= p->start_ns) {
        double ms = (double)(p->last_compute_ns - p->start_ns) / 1e6;
        r->usage.prefill_ms = BT_MIN(ms, life_ms);
    }
    uint64_t received_wall_ns = bt_real_ns() - (now_ns - r->spec.received_ns);
    if (p->start_ns > received_wall_ns) {
        double ms = (double)(p->start_ns - received_wall_ns) / 1e6;
        r->usage.queue_ms = BT_MIN(ms, life_ms);
    }
    bt_metric_observe(r->rs->m.queue, BT_MAX(r->usage.queue_ms, 0.0) / 1e3);
}

void bt_request_flow_done(struct bt_request *r, const Baton__FlowDone *d)
{
    r->usage.kv_bytes += d->bytes;
    r->usage.kv_segments += d->segments;
    r->flow_first_ns = d->first_ns;
    r->flow_last_ns = d->last_ns;
}
