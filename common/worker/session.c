/* Sessions with conductors: hello, heartbeats, Submit and Cancel in; tokens and ends out. A session
 * that is silent for two seconds, breaks the protocol or does not take its messages is ended, and
 * everything it had submitted is cancelled. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "common/worker/control.h"

#define SILENCE_NS   2000000000ull
#define HEARTBEAT_NS 500000000ull
#define KNOWN_MAX    8192
#define BEHIND_BYTES (256u << 10)
/* Above it a conductor that does not read loses its session. Steps wait for tokens that are not
 * read (BEHIND_BYTES) but not for prompts' logprobs, which are 2 MiB for 8,000 tokens with
 * logprobs=20: this holds a burst of thirty of them. */
#define UNREAD_MAX ((size_t)64 << 20)
#define LATE_BYTES (32u << 10) /* of tokens in one message */

static struct bt_wsession *session_find(struct bt_wctl *w, uint64_t id)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (s->id == id && !s->broken) {
            return s;
        }
    }
    return NULL;
}

/* Marks the session; the sweep ends it once no message of it is on the stack. */
static void session_break(struct bt_wsession *s, int code, const char *why)
{
    if (!s->broken) {
        s->broken = true;
        s->broken_code = code;
        snprintf(s->broken_why, sizeof(s->broken_why), "%s", why);
    }
}

static void check_sent(struct bt_wsession *s, bt_status_t st)
{
    if (st != BT_OK) {
        session_break(s, BT_GRPC_EXHAUSTED, "it does not take its messages");
    }
}

/* FromWorker with the tokens that wait. A packed message of a repeated field is the packed messages
 * of its parts one behind the other, so all that is missing is the field's head. */
static void send_late(struct bt_wsession *s)
{
    uint8_t head[1 + 10];
    size_t n = 0;
    if (s->late.len == 0 || s->broken) {
        return;
    }
    head[n++] = BATON__FROM_WORKER__M_TOKENS << 3 | 2;
    for (size_t len = s->late.len; len > 0; len >>= 7) {
        head[n++] = (uint8_t)((len & 0x7f) | (len > 0x7f ? 0x80 : 0));
    }
    struct iovec iov[] = {{head, n}, {s->late.data, s->late.len}};
    check_sent(s, bt_rpc_stream_send_iov(s->s, iov, BT_ARRAY_LEN(iov)));
    bt_buf_clear(&s->late);
}

static void session_send(struct bt_wsession *s, const Baton__FromWorker *m)
{
    send_late(s); /* what is said of a request comes behind its tokens */
    if (!s->broken) {
        check_sent(s, bt_rpc_stream_send_pb(s->s, &m->base));
    }
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

static void send_heartbeat(struct bt_wctl *w, struct bt_wsession *s)
{
    struct bt_wload load;
    bt_wstats_load(w->stats, w->core.info->max_model_len, &load);
    load.load.max_rows = w->core.max_rows;
    Baton__MixedSteps mixed = BATON__MIXED_STEPS__INIT;
    mixed.step_ms = 1e-6 * (double)atomic_load(&w->core.mixed_step_ns);
    mixed.gap_ms = 1e-6 * (double)atomic_load(&w->core.mixed_gap_ns);
    load.load.mixed = &mixed;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    h.seq = ++s->hb_seq;
    h.load = &load.load;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_HEARTBEAT;
    m.heartbeat = &h;
    session_send(s, &m);
}

/* A conductor has said how long steps may be. Where that changes what is in force all hear of it at
 * once, as they predict by it. */
static bool mixed_changed(struct bt_wctl *w)
{
    struct bt_list *it;
    if (!bt_wmixed_apply(w)) {
        return false;
    }
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (s->hello && !s->broken) {
            send_heartbeat(w, s);
        }
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

static void session_free(struct bt_wsession *s)
{
    struct bt_wctl *w = s->ctl;
    cancel_all(w, s->id, "its conductor's session ended");
    bt_list_remove(&s->link);
    w->n_sessions--;
    (void)bt_wmixed_apply(w); /* the others hear of it with the next heartbeat */
    bt_buf_cleanup(&s->late);
    free(s->name);
    free(s);
}

void bt_wsession_sweep(struct bt_wctl *w)
{
    struct bt_list *it, *tmp;
    bt_list_for_each_safe (it, tmp, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (s->broken) {
            BT_WARN("session_ended", "conductor=%s why=%s", s->name != NULL ? s->name : "?",
                    s->broken_why);
            bt_rpc_stream_close(s->s, s->broken_code, s->broken_why, false);
            session_free(s);
        }
    }
}

/* ---- hello ---- */

static const char *check_hello(const struct bt_wctl *w, const struct bt_rpc_stream *stream,
                               const Baton__SessionHello *h)
{
    if (h->version != 1) {
        return "session version is not 1: run the same release everywhere";
    }
    if (strcmp(h->cluster, w->conf.common.cluster_name) != 0) {
        return "another cluster.name";
    }
    if (!bt_rpc_stream_peer_is(stream, "conductor", h->node)) {
        return "your certificate is not of the conductor of the node that you name";
    }
    if (h->expect_incarnation != 0 && h->expect_incarnation != w->incarnation) {
        return "I am not the incarnation you expect";
    }
    if (h->root_key.len != sizeof(struct bt_kv_key) ||
        memcmp(h->root_key.data, w->core.root.b, h->root_key.len) != 0) {
        return "root keys differ: same model.path contents, model.activations and kv.block_tokens "
               "everywhere";
    }
    if (h->layout_id != w->core.layout.layout_id) {
        return "KV layouts differ: same model and kv.block_tokens everywhere";
    }
    return NULL;
}

static void on_hello(struct bt_wsession *s, const Baton__SessionHello *h)
{
    struct bt_wctl *w = s->ctl;
    const char *why = s->hello ? "a second hello" : check_hello(w, s->s, h);
    if (why != NULL) {
        session_break(s, BT_GRPC_FAILED_PRECONDITION, why);
        return;
    }
    s->hello = true;
    s->name = bt_strdup(h->name);
    bt_wmixed_told(s, h->mixed);
    BT_INFO("session_up", "conductor=%s incarnation=%016llx", s->name,
            (unsigned long long)h->incarnation);
    Baton__SessionHello me = BATON__SESSION_HELLO__INIT;
    me.version = 1;
    me.cluster = w->conf.common.cluster_name;
    me.name = w->conf.name;
    me.node = w->conf.common.node_id;
    me.incarnation = w->incarnation;
    me.root_key.data = w->core.root.b;
    me.root_key.len = sizeof(w->core.root.b);
    me.layout_id = w->core.layout.layout_id;
    Baton__FromWorker m = BATON__FROM_WORKER__INIT;
    m.m_case = BATON__FROM_WORKER__M_HELLO;
    m.hello = &me;
    session_send(s, &m);
    if (!mixed_changed(w)) {
        send_heartbeat(w, s);
    }
}

static void on_heartbeat(struct bt_wsession *s, const Baton__Heartbeat *h)
{
    bt_wmixed_told(s, h->mixed);
    (void)mixed_changed(s->ctl);
}

/* ---- submit and cancel ---- */

/* What is known of a request id; made if it is new. Old ids without active submissions are
 * forgotten when there are too many. */
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
    uint32_t choices = m->phases == BATON__PHASES__PREFILL ? 1 : BT_MAX(m->n, 1u);
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
        snprintf(err, cap, "the kvstore of this node takes no more messages");
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
        cancel_choice(s->ctl, m); /* not known any more: it has ended */
        return;
    }
    struct bt_wknown *k = known_get(s->ctl, m->request);
    cancel_below(s->ctl, k, m->epoch, "cancelled");
    k->epoch = BT_MAX(k->epoch, m->epoch);
}

static void on_message(void *arg, struct bt_rpc_stream *stream, const void *data, size_t len)
{
    struct bt_wsession *s = arg;
    (void)stream;
    if (s->broken) {
        return;
    }
    s->heard_ns = bt_mono_ns();
    char why[256];
    Baton__ToWorker *m = bt_to_worker_unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        session_break(s, BT_GRPC_INVALID_ARGUMENT, why);
    } else if (m->m_case == BATON__TO_WORKER__M_HELLO) {
        on_hello(s, m->hello);
    } else if (!s->hello) {
        session_break(s, BT_GRPC_FAILED_PRECONDITION, "the first message is not a hello");
    } else if (m->m_case == BATON__TO_WORKER__M_SUBMIT) {
        on_submit(s, m->submit);
    } else if (m->m_case == BATON__TO_WORKER__M_CANCEL) {
        on_cancel(s, m->cancel);
    } else if (m->m_case == BATON__TO_WORKER__M_HEARTBEAT) {
        on_heartbeat(s, m->heartbeat);
    } /* something newer than this release: being heard is all */
    if (m != NULL) {
        baton__to_worker__free_unpacked(m, NULL);
    }
    if (s->broken) {
        bt_wsession_sweep(s->ctl);
    }
}

static void on_close(void *arg, struct bt_rpc_stream *stream, int code, const char *detail)
{
    struct bt_wsession *s = arg;
    (void)stream;
    BT_INFO("session_ended", "conductor=%s code=%d why=%s", s->name != NULL ? s->name : "?", code,
            detail != NULL ? detail : "");
    session_free(s);
}

static void on_sent(void *arg, struct bt_rpc_stream *stream)
{
    if (!bt_rpc_stream_sending(stream)) {
        send_late(arg);
    }
}

void bt_wsession_accept(void *ctl, struct bt_rpc_stream *stream)
{
    static const struct bt_rpc_stream_ops ops = {
        .on_message = on_message, .on_close = on_close, .on_sent = on_sent};
    struct bt_wctl *w = ctl;
    struct bt_wsession *s = bt_calloc(1, sizeof(*s));
    s->ctl = w;
    s->s = stream;
    s->id = ++w->next_session;
    s->heard_ns = bt_mono_ns();
    bt_buf_init(&s->late);
    bt_list_insert_tail(&w->sessions, &s->link);
    w->n_sessions++;
    bt_rpc_stream_set_arg(stream, &ops, s);
    bt_rpc_stream_set_queue_max(stream, UNREAD_MAX);
    if (w->n_sessions > BT_WORKER_SESSIONS_MAX) {
        session_break(s, BT_GRPC_EXHAUSTED, "this worker has as many sessions as it can have (64)");
    }
}

void bt_wsession_tick(struct bt_wctl *w)
{
    uint64_t now = bt_mono_ns();
    struct bt_list *it;
    bool still = bt_stood_still(&w->ticked_ns, now, SILENCE_NS / 2);
    bool beat = now >= w->beat_ns;
    if (beat) {
        w->beat_ns = now + HEARTBEAT_NS - BT_WCTL_TICK_MS * 500000ull; /* ticks are not exact */
    }
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (still) {
            s->heard_ns = now;
        }
        if (now - s->heard_ns > SILENCE_NS) {
            session_break(s, BT_GRPC_DEADLINE, "silent for two seconds");
        } else if (s->hello && beat) {
            send_heartbeat(w, s);
        }
    }
    bt_wsession_sweep(w);
    size_t i = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &i, NULL)) != NULL) {
        if (r->sub->deadline_ns != 0 && now > r->sub->deadline_ns) {
            bt_wctl_cancel(w, r, BT_ERR_TIMEOUT, "the request's deadline has passed");
        }
    }
}

/* ---- what the engine thread says ---- */

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

/* One message of a stream is on its way at a time, and its end is two threads' turns away: with a
 * message a step, steps that are shorter than that would queue up. What comes meanwhile goes
 * together. */
void bt_wsession_tokens(struct bt_wctl *w, struct bt_wtokens *t)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        uint32_t n = 0;
        for (uint32_t i = 0; i < t->n; i++) {
            if (t->t[i].session == s->id && !s->broken) {
                pack_token(w, n++, &t->t[i]);
            }
        }
        if (n > 0) {
            Baton__Tokens msg = BATON__TOKENS__INIT;
            msg.n_tokens = n;
            msg.tokens = w->tok_ptr;
            size_t len = baton__tokens__get_packed_size(&msg);
            s->late.len += baton__tokens__pack(&msg, (uint8_t *)bt_buf_reserve(&s->late, len));
            if (!bt_rpc_stream_sending(s->s) || s->late.len >= LATE_BYTES) {
                send_late(s);
            }
        }
    }
}

bool bt_wsession_behind(const struct bt_wctl *w)
{
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        const struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (!s->broken && bt_rpc_stream_queued(s->s) > BEHIND_BYTES) {
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
        send_late(s);
        bt_rpc_stream_close(s->s, BT_GRPC_UNAVAILABLE, why, true);
        session_free(s);
    }
}
