/* Sessions with conductors (common/rpc/session.h): Submit and Cancel come in; tokens and ends go
 * out. When a session ends, everything submitted through it is cancelled. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/session_hello.h"
#include "common/worker/control.h"

/* Request ids whose epochs are remembered: older ones come back only if a message was delayed by
 * thousands of requests, and 8192 take less than 1 MB. */
#define KNOWN_MAX 8192
/* Unread by a conductor; above it generation waits: some thousand tokens, so a conductor may pause
 * for several steps of a full batch. */
#define BEHIND_BYTES (256u << 10)
/* Above it a conductor that does not read loses its session. Steps wait for tokens that are not
 * read (BEHIND_BYTES) but not for prompts' logprobs, which are 2 MiB for 8,000 tokens with
 * logprobs=20: this holds a burst of thirty of them. */
#define UNREAD_MAX   ((size_t)64 << 20)
#define UNSENT_BYTES (32u << 10) /* of tokens in one message */

static struct bt_wsession *session_find(struct bt_wctl *w, uint64_t id)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (s->id == id && bt_rpc_session_met(&s->rpc)) {
            return s;
        }
    }
    return NULL;
}

/* FromWorker with the tokens that wait. A packed message of a repeated field is the packed messages
 * of its parts one behind the other, so all that is missing is the field's head. */
static void send_unsent(struct bt_wsession *s)
{
    uint8_t head[1 + 10];
    size_t n = 0;
    if (s->unsent.len == 0) {
        return;
    }
    head[n++] = BATON__FROM_WORKER__M_TOKENS << 3 | 2;
    for (size_t len = s->unsent.len; len > 0; len >>= 7) {
        head[n++] = (uint8_t)((len & 0x7f) | (len > 0x7f ? 0x80 : 0));
    }
    struct iovec iov[] = {{head, n}, {s->unsent.data, s->unsent.len}};
    (void)bt_rpc_session_send_iov(&s->rpc, iov, BT_ARRAY_LEN(iov));
    bt_buf_clear(&s->unsent);
}

static void session_send(struct bt_wsession *s, const Baton__FromWorker *m)
{
    send_unsent(s); /* what is said of a request comes behind its tokens */
    (void)bt_rpc_session_send(&s->rpc, &m->base);
}

static void send_ended(struct bt_wsession *s, uint64_t request, uint32_t epoch, bt_status_t st,
                       const char *detail)
{
    Baton__Ended e = BATON__ENDED__INIT;
    e.request = request;
    e.epoch = epoch;
    e.status = st;
    e.detail = (char *)(uintptr_t)detail;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_ENDED;
    m.ended = &e;
    session_send(s, &m);
}

static void say_heartbeat(void *arg, uint64_t seq)
{
    struct bt_wsession *s = arg;
    struct bt_wctl *w = s->ctl;
    struct bt_wload load;
    bt_wstats_load(w->stats, w->core.info->max_model_len, &load);
    load.load.max_rows = w->core.max_rows;
    Baton__MixedSteps mixed = BATON__MIXED_STEPS__INIT;
    mixed.step_ms = 1e-6 * (double)atomic_load(&w->core.mixed_step_ns);
    mixed.gap_ms = 1e-6 * (double)atomic_load(&w->core.mixed_gap_ns);
    load.load.mixed = &mixed;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    h.seq = seq;
    h.load = &load.load;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_HEARTBEAT;
    m.heartbeat = &h;
    session_send(s, &m);
}

/* Called when a conductor has sent limits. If that changes the limits in use, tells all conductors
 * at once, as their predictions depend on them. */
static bool mixed_changed(struct bt_wctl *w)
{
    struct bt_list *it;
    if (!bt_wmixed_apply(w)) {
        return false;
    }
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        bt_rpc_session_beat(&s->rpc);
    }
    return true;
}

static void cancel_all(struct bt_wctl *w, uint64_t session, const char *why)
{
    size_t it = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &it, NULL)) != NULL) {
        if (r->sub->session == session) {
            bt_wctl_cancel(w, r, BT_OK, why);
        }
    }
}

/* ---- hello ---- */

static struct bt_rpc_identity identity(const struct bt_wctl *w)
{
    return (struct bt_rpc_identity){.cluster = w->conf.common.cluster_name,
                                    .name = w->conf.name,
                                    .node = w->conf.common.node_id,
                                    .incarnation = w->incarnation,
                                    .root = &w->core.root,
                                    .layout_id = w->core.layout.layout_id};
}

static const char *on_hello(void *arg, const void *hello, char *buf, size_t cap)
{
    struct bt_wsession *s = arg;
    const Baton__SessionHello *h = hello;
    struct bt_rpc_identity self = identity(s->ctl);
    struct bt_rpc_hello theirs = bt_rpc_hello_read(h);
    bt_hello_fault_t fault = bt_rpc_hello_compare(
        &self, &theirs, 0, bt_rpc_stream_peer_is(s->rpc.stream, "conductor", h->node));
    if (fault != BT_HELLO_FITS) {
        return bt_rpc_hello_why(fault, &self, &theirs, 0, buf, cap);
    }
    s->name = bt_strdup(h->name);
    s->incarnation = h->incarnation;
    bt_wmixed_told(s, h->mixed);
    return NULL;
}

static void say_hello(void *arg)
{
    struct bt_wsession *s = arg;
    struct bt_rpc_identity self = identity(s->ctl);
    Baton__SessionHello me;
    bt_rpc_hello_fill(&self, 0, &me);
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_HELLO;
    m.hello = &me;
    session_send(s, &m);
}

static void on_up(void *arg)
{
    struct bt_wsession *s = arg;
    BT_INFO("session_up", "conductor=%s incarnation=%016llx", s->name,
            (unsigned long long)s->incarnation);
    if (!mixed_changed(s->ctl)) {
        bt_rpc_session_beat(&s->rpc);
    }
}

static void on_heartbeat(void *arg, const void *heartbeat)
{
    struct bt_wsession *s = arg;
    const Baton__Heartbeat *h = heartbeat;
    bt_wmixed_told(s, h->mixed);
    (void)mixed_changed(s->ctl);
}

/* ---- submit and cancel ---- */

/* The record of a request id; made if the id is new. Forgets old ids without active submissions
 * when there are too many. */
static struct bt_wknown *known_get(struct bt_wctl *w, uint64_t request)
{
    struct bt_wknown *k = bt_map_get(w->known, &request);
    if (k != NULL) {
        return k;
    }
    struct bt_list *it = w->known_list.next;
    while (bt_map_count(w->known) >= KNOWN_MAX && it != &w->known_list) {
        struct bt_wknown *old = BT_CONTAINER_OF(it, struct bt_wknown, link);
        it = it->next;
        if (bt_list_empty(&old->reqs)) {
            bt_map_del(w->known, &old->request);
            bt_list_remove(&old->link);
            free(old);
        }
    }
    k = bt_calloc(1, sizeof(*k));
    k->request = request;
    bt_list_init(&k->reqs);
    bt_list_insert_tail(&w->known_list, &k->link);
    bt_map_put(w->known, &request, k);
    return k;
}

static void cancel_below(struct bt_wctl *w, struct bt_wknown *k, uint32_t epoch, const char *why)
{
    struct bt_list *it;
    bt_list_for_each (it, &k->reqs) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, ctl.link);
        if (r->sub->epoch <= epoch) {
            bt_wctl_cancel(w, r, BT_OK, why);
        }
    }
}

static void on_compiled(void *arg, struct bt_wgrammar *g)
{
    struct bt_wctl *w = arg;
    struct bt_wreq *r = bt_wctl_find(w, g->request, g->epoch);
    if (r != NULL && r->sub->grammar == g) {
        struct bt_wcmd c = {.kind = BT_WCMD_COMPILED, .req = r, .status = g->status};
        _Static_assert(sizeof(c.detail) == sizeof(g->detail), "details are of one size");
        memcpy(c.detail, g->detail, sizeof(c.detail));
        bt_wctl_command(w, &c);
    }
    bt_wgrammar_unref(g);
}

void bt_wsession_mask_made(void *arg, struct bt_wahead *a)
{
    struct bt_wctl *w = arg;
    struct bt_wreq *r = bt_wctl_find(w, a->request, a->epoch);
    if (r == NULL) {
        bt_wahead_destroy(a);
        return;
    }
    struct bt_wcmd c = {.kind = BT_WCMD_MASK_MADE, .req = r};
    c.u.ahead = a;
    bt_wctl_command(w, &c);
}

static void compile(struct bt_wctl *w, struct bt_wgrammar *g)
{
    g->done = on_compiled;
    g->arg = w;
    bt_wmask_pool_compile(w->core.masks.pool, g);
}

static bt_status_t admit(struct bt_wctl *w, struct bt_wsession *s, const Baton__Submit *m,
                         char *err, size_t cap)
{
    if (w->state != BT_WCTL_SERVING) {
        snprintf(err, cap, "this worker is draining");
        return BT_ERR_UNAVAILABLE;
    }
    if (m->epoch == 0) {
        snprintf(err, cap, "epoch is 0: epochs start at 1");
        return BT_ERR_INVALID;
    }
    struct bt_wknown *k = known_get(w, m->request);
    if (m->epoch < k->epoch) {
        snprintf(err, cap, "epoch %u is over, %u is known", m->epoch, k->epoch);
        return BT_ERR_STALE;
    }
    if (m->epoch == k->epoch) {
        snprintf(err, cap, "epoch %u has been submitted or cancelled already", m->epoch);
        return BT_ERR_EXISTS;
    }
    uint32_t choices = m->phases == BATON__PHASES__PREFILL || m->beams > 0 ? 1 : BT_MAX(m->n, 1u);
    if (w->n_choices + choices > (uint64_t)w->conf.max_requests) {
        snprintf(err, cap, "%u sequences are here already (worker.max_requests)", w->n_choices);
        return BT_ERR_EXHAUSTED;
    }
    if (w->attach == 0) {
        snprintf(err, cap, "not attached to the kvstore of node %s", w->conf.common.node_id);
        return BT_ERR_PEER_LOST;
    }
    bt_status_t st;
    struct bt_wreq *r = bt_wreq_create(w, m, s->id, &st, err, cap);
    if (r == NULL) {
        return st;
    }
    st = bt_wnode_open(w, r);
    if (st != BT_OK) {
        snprintf(err, cap, "the kvstore of this node accepts no more messages");
        bt_wreq_free(r);
        return st == BT_AGAIN ? BT_ERR_UNAVAILABLE : st;
    }
    cancel_below(w, k, m->epoch, "a newer epoch was submitted");
    k->epoch = m->epoch;
    bt_list_insert_tail(&k->reqs, &r->ctl.link);
    struct bt_wkey key = {.request = r->sub->request, .epoch = r->sub->epoch};
    bt_map_put(w->active, &key, r);
    w->n_active++;
    w->n_choices += bt_wreq_choices(r);
    struct bt_wcmd c = {.kind = BT_WCMD_SUBMIT, .req = r};
    bt_wctl_command(w, &c);
    if (r->sub->grammar != NULL) {
        compile(w, r->sub->grammar);
    }
    return BT_OK;
}

static void send_received(struct bt_wsession *s, const Baton__Submit *m)
{
    Baton__Received r = BATON__RECEIVED__INIT;
    r.request = m->request;
    r.epoch = m->epoch;
    Baton__FromWorker f = BATON__FROM_WORKER__INIT;
    f.m_case = BATON__FROM_WORKER__M_RECEIVED;
    f.received = &r;
    session_send(s, &f);
}

static void on_submit(struct bt_wsession *s, const Baton__Submit *m)
{
    send_received(s, m);
    char err[BT_WORKER_DETAIL] = "";
    bt_status_t st = admit(s->ctl, s, m, err, sizeof(err));
    if (st != BT_OK) {
        BT_INFO("submit_refused", "req=%016llx epoch=%u status=%s why=%s",
                (unsigned long long)m->request, m->epoch, bt_status_name(st), err);
        send_ended(s, m->request, m->epoch, st, err);
    } else {
        BT_DEBUG("submit", "req=%016llx epoch=%u phases=%d tokens=%zu",
                 (unsigned long long)m->request, m->epoch, (int)m->phases, m->tokens.len / 4);
    }
}

static void cancel_choice(struct bt_wctl *w, const Baton__Cancel *m)
{
    struct bt_wreq *r = bt_wctl_find(w, m->request, m->epoch);
    while (r != NULL && r->sub->choice != m->choice) {
        r = r->next_choice;
    }
    if (r != NULL) {
        struct bt_wcmd c = {.kind = BT_WCMD_CANCEL_CHOICE, .req = r};
        bt_wctl_command(w, &c);
    }
}

static void on_cancel(struct bt_wsession *s, const Baton__Cancel *m)
{
    if (m->one_choice) {
        cancel_choice(s->ctl, m); /* unknown: the request has ended already */
        return;
    }
    struct bt_wknown *k = known_get(s->ctl, m->request);
    cancel_below(s->ctl, k, m->epoch, "cancelled");
    k->epoch = BT_MAX(k->epoch, m->epoch);
}

static void on_message(void *arg, ProtobufCMessage *msg)
{
    const Baton__ToWorker *m = (const Baton__ToWorker *)msg;
    if (m->m_case == BATON__TO_WORKER__M_SUBMIT) {
        on_submit(arg, m->submit);
    } else if (m->m_case == BATON__TO_WORKER__M_CANCEL) {
        on_cancel(arg, m->cancel);
    } /* a message of a newer release: it only shows that the conductor is alive */
}

static void on_end(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_wsession *s = arg;
    struct bt_wctl *w = s->ctl;
    const char *name = s->name != NULL ? s->name : "?";
    if (e->cause == BT_RPC_SESSION_CLOSED) {
        BT_INFO("session_down", "conductor=%s code=%d why=%s", name, e->code, e->why);
    } else if (e->cause != BT_RPC_SESSION_STOPPED) {
        BT_WARN("session_down", "conductor=%s why=%s", name, e->why);
    }
    cancel_all(w, s->id, "its conductor's session ended");
    bt_list_remove(&s->link);
    w->n_sessions--;
    (void)bt_wmixed_apply(w); /* the others hear of it with the next heartbeat */
    bt_buf_cleanup(&s->unsent);
    free(s->name);
    free(s);
}

static void on_sent(void *arg)
{
    struct bt_wsession *s = arg;
    if (!bt_rpc_stream_sending(s->rpc.stream)) {
        send_unsent(s);
    }
}

static const struct bt_rpc_session_rules rules = {
    .tick_ms = BT_WCTL_TICK_MS,
    .flush = 1u << BT_RPC_SESSION_STOPPED,
};
static const struct bt_rpc_session_ops session_ops = {
    .incoming = &baton__to_worker__descriptor,
    .say_hello = say_hello,
    .say_heartbeat = say_heartbeat,
    .on_hello = on_hello,
    .on_up = on_up,
    .on_heartbeat = on_heartbeat,
    .on_message = on_message,
    .on_end = on_end,
    .on_sent = on_sent,
};

void bt_wsession_accept(void *ctl, struct bt_rpc_stream *stream)
{
    struct bt_wctl *w = ctl;
    struct bt_wsession *s = bt_calloc(1, sizeof(*s));
    s->ctl = w;
    s->id = ++w->next_session;
    bt_buf_init(&s->unsent);
    bt_list_insert_tail(&w->sessions, &s->link);
    w->n_sessions++;
    bt_rpc_session_init(&s->rpc, w->loop, false, &rules, &session_ops, s);
    bt_rpc_session_accept(&s->rpc, stream);
    bt_rpc_stream_set_queue_max(stream, UNREAD_MAX);
    if (w->n_sessions > BT_WORKER_SESSIONS_MAX) {
        bt_rpc_session_fail(&s->rpc, BT_RPC_SESSION_BROKEN, BT_GRPC_EXHAUSTED,
                            "this worker has as many sessions as it can have (64)");
    }
}

void bt_wsession_tick(struct bt_wctl *w)
{
    uint64_t now = bt_mono_ns();
    struct bt_list *it, *tmp;
    bt_list_for_each_safe (it, tmp, &w->sessions) {
        (void)bt_rpc_session_tick(&BT_CONTAINER_OF(it, struct bt_wsession, link)->rpc, now);
    }
    size_t i = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &i, NULL)) != NULL) {
        if (r->sub->deadline_ns != 0 && now > r->sub->deadline_ns) {
            bt_wctl_cancel(w, r, BT_ERR_TIMEOUT, "the request's deadline has passed");
        }
    }
}

/* ---- messages of the engine thread ---- */

static void pack_token(struct bt_wctl *w, uint32_t i, const struct bt_wtoken *t)
{
    Baton__Token *k = &w->tok[i];
    baton__token__init(k);
    k->request = t->request;
    k->epoch = t->epoch;
    k->choice = t->choice;
    k->offset = t->offset;
    k->token = t->token;
    k->logprob = t->logprob;
    k->finish = t->finish;
    k->n_top = t->n_top;
    k->top = &w->top_ptr[(size_t)i * BT_ENGINE_MAX_TOP];
    for (uint32_t j = 0; j < t->n_top; j++) {
        Baton__Top *p = &w->top[(size_t)i * BT_ENGINE_MAX_TOP + j];
        baton__top__init(p);
        p->id = t->top_id[j];
        p->logprob = t->top_logprob[j];
        k->top[j] = p;
    }
    w->tok_ptr[i] = k;
}

/* gRPC writes one message of a stream at a time, and two threads must run before it can write the
 * next. With one message a step, shorter steps would queue up. So tokens that come meanwhile are
 * collected into one message. */
void bt_wsession_tokens(struct bt_wctl *w, struct bt_wtokens *t)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        uint32_t n = 0;
        for (uint32_t i = 0; i < t->n; i++) {
            if (t->t[i].session == s->id && bt_rpc_session_met(&s->rpc)) {
                pack_token(w, n++, &t->t[i]);
            }
        }
        if (n > 0) {
            Baton__Tokens msg = BATON__TOKENS__INIT;
            msg.n_tokens = n;
            msg.tokens = w->tok_ptr;
            size_t len = baton__tokens__get_packed_size(&msg);
            s->unsent.len += baton__tokens__pack(&msg, (uint8_t *)bt_buf_reserve(&s->unsent, len));
            if (!bt_rpc_stream_sending(s->rpc.stream) || s->unsent.len >= UNSENT_BYTES) {
                send_unsent(s);
            }
        }
    }
}

bool bt_wsession_behind(const struct bt_wctl *w)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        const struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (bt_rpc_session_met(&s->rpc) && bt_rpc_stream_queued(s->rpc.stream) > BEHIND_BYTES) {
            return true;
        }
    }
    return false;
}

void bt_wsession_prompt_logprobs(struct bt_wctl *w, struct bt_wprompt *p)
{
    struct bt_wsession *s = session_find(w, p->session);
    Baton__PromptLogprob t[BT_WORKER_PROMPT_MSG], *tp[BT_WORKER_PROMPT_MSG];
    Baton__Top *top = bt_calloc((size_t)p->n * BT_ENGINE_MAX_TOP, sizeof(*top));
    Baton__Top **top_p = bt_calloc((size_t)p->n * BT_ENGINE_MAX_TOP, sizeof(Baton__Top *));
    for (uint32_t i = 0; i < p->n; i++) {
        baton__prompt_logprob__init(&t[i]);
        t[i].token = p->t[i].token;
        t[i].logprob = p->t[i].logprob;
        t[i].rank = p->t[i].rank;
        t[i].n_top = p->t[i].n_top;
        t[i].top = &top_p[(size_t)i * BT_ENGINE_MAX_TOP];
        tp[i] = &t[i];
        for (uint32_t j = 0; j < p->t[i].n_top; j++) {
            Baton__Top *k = &top[(size_t)i * BT_ENGINE_MAX_TOP + j];
            baton__top__init(k);
            k->id = p->t[i].top_id[j];
            k->logprob = p->t[i].top_logprob[j];
            t[i].top[j] = k;
        }
    }
    Baton__PromptLogprobs msg = BATON__PROMPT_LOGPROBS__INIT;
    msg.request = p->request;
    msg.epoch = p->epoch;
    msg.first = p->first;
    msg.n_tokens = p->n;
    msg.tokens = tp;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_PROMPT_LOGPROBS;
    m.prompt_logprobs = &msg;
    if (s != NULL) {
        session_send(s, &m);
    }
    free(top);
    free(top_p);
    free(p);
}

void bt_wsession_prefill_done(struct bt_wctl *w, const struct bt_wout *o)
{
    struct bt_wsession *s = session_find(w, o->u.prefill.session);
    if (s == NULL) {
        return;
    }
    Baton__PrefillDone p = BATON__PREFILL_DONE__INIT;
    p.request = o->u.prefill.request;
    p.epoch = o->u.prefill.epoch;
    p.cached_tokens = o->u.prefill.cached;
    p.computed_tokens = o->u.prefill.computed;
    p.start_ns = o->u.prefill.start_ns;
    p.last_compute_ns = o->u.prefill.last_compute_ns;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_PREFILL_DONE;
    m.prefill_done = &p;
    session_send(s, &m);
}

void bt_wsession_searching(struct bt_wctl *w, const struct bt_wout *o)
{
    struct bt_wsession *s = session_find(w, o->u.searching.session);
    if (s == NULL) {
        return;
    }
    Baton__Searching p = BATON__SEARCHING__INIT;
    p.request = o->u.searching.request;
    p.epoch = o->u.searching.epoch;
    p.tokens = o->u.searching.tokens;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_SEARCHING;
    m.searching = &p;
    session_send(s, &m);
}

void bt_wsession_ended(struct bt_wctl *w, struct bt_wreq *r, bt_status_t st, const char *detail)
{
    struct bt_wsession *s = session_find(w, r->sub->session);
    if (st != BT_OK) {
        BT_WARN("request_failed", "req=%016llx epoch=%u status=%s why=%s",
                (unsigned long long)r->sub->request, r->sub->epoch, bt_status_name(st), detail);
    }
    if (s != NULL) {
        send_ended(s, r->sub->request, r->sub->epoch, st, detail);
    }
}

void bt_wsession_close_all(struct bt_wctl *w, const char *why)
{
    struct bt_list *it, *tmp;
    bt_list_for_each_safe (it, tmp, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        send_unsent(s);
        bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_UNAVAILABLE, why);
    }
}
