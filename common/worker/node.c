/* The session with this node's kvstore, on the control thread. It sends opens, trailers, closes and
 * puts, and passes the kvstore's answers to the engine thread. The slab is mapped a second time for
 * the engine thread, so that the end of the kvstore never takes memory away during a copy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/worker/control.h"

static bt_status_t send_msg(struct bt_wctl *w, const Baton__LocalMsg *m)
{
    bt_status_t st = w->local != NULL ? bt_local_send(w->local, m) : BT_ERR_UNAVAILABLE;
    if (st != BT_OK && st != BT_ERR_UNAVAILABLE) {
        BT_ERROR("kvstore_send_failed", "status=%s case=%d", bt_status_name(st), (int)m->m_case);
    }
    return st;
}

bt_status_t bt_wnode_open(struct bt_wctl *w, const struct bt_wreq *r)
{
    Baton__LocalOpen o = BATON__LOCAL_OPEN__INIT;
    o.request = r->sub->request;
    o.epoch = r->sub->epoch;
    o.mode = r->sub->phases == BATON__PHASES__DECODE ? BATON__LOCAL_MODE__READER
                                                     : BATON__LOCAL_MODE__WRITER;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_OPEN;
    m.open = &o;
    return send_msg(w, &m);
}

static void send_close(struct bt_wctl *w, uint64_t request, uint32_t epoch, bool writer, bool abort)
{
    Baton__LocalClose o = BATON__LOCAL_CLOSE__INIT;
    o.request = request;
    o.epoch = epoch;
    o.mode = writer ? BATON__LOCAL_MODE__WRITER : BATON__LOCAL_MODE__READER;
    o.abort = abort;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_CLOSE;
    m.close = &o;
    /* If detached, the kvstore has forgotten the open already, or is dead. */
    bt_status_t st = send_msg(w, &m);
    (void)st;
}

static void send_tail_end(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalTailEnd t = BATON__LOCAL_TAIL_END__INIT;
    t.request = o->u.local.request;
    t.epoch = o->u.local.epoch;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_TAIL_END;
    m.tail_end = &t;
    bt_status_t st = send_msg(w, &m);
    (void)st; /* if detached, the kvstore has dropped it together with the open */
}

static void send_trailer(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalTrailer t = BATON__LOCAL_TRAILER__INIT;
    t.request = o->u.local.request;
    t.epoch = o->u.local.epoch;
    t.first_token = o->u.local.first_token;
    t.finished = o->u.local.finished;
    t.last_compute_ns = o->u.local.last_compute_ns;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_TRAILER;
    m.trailer = &t;
    bt_status_t st = send_msg(w, &m);
    (void)st; /* if detached, the engine thread is told and fails the request */
}

static void refuse_put(struct bt_wctl *w, uint64_t id)
{
    struct bt_wcmd c = {.kind = BT_WCMD_PUT_SLOT, .status = BT_ERR_UNAVAILABLE};
    c.u.put.id = id;
    bt_wctl_command(w, &c);
}

static void send_put(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalPut p = BATON__LOCAL_PUT__INIT;
    p.put = o->u.put.id;
    p.key.data = (uint8_t *)(uintptr_t)o->u.put.key.b;
    p.key.len = sizeof(o->u.put.key.b);
    p.depth = o->u.put.depth;
    p.n_tokens = o->u.put.n_tokens;
    p.tenant = o->u.put.tenant;
    p.passing = o->u.put.passing;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_PUT;
    m.put = &p;
    if (send_msg(w, &m) != BT_OK) {
        refuse_put(w, o->u.put.id);
    }
}

static void send_put_done(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalPutDone p = BATON__LOCAL_PUT_DONE__INIT;
    p.put = o->u.put.id;
    p.abort = o->u.put.abort;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_PUT_DONE;
    m.put_done = &p;
    bt_status_t st = send_msg(w, &m);
    (void)st;
}

static void send_lease(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalLease l = BATON__LOCAL_LEASE__INIT;
    l.lease = o->u.lease.id;
    l.keys.data = o->u.lease.keys->keys[0].b;
    l.keys.len = o->u.lease.keys->n * sizeof(o->u.lease.keys->keys[0]);
    l.passing = o->u.lease.passing;
    l.request = o->u.lease.request;
    l.epoch = o->u.lease.epoch;
    l.first = o->u.lease.first;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_LEASE;
    m.lease = &l;
    if (send_msg(w, &m) != BT_OK) {
        struct bt_wcmd c = {.kind = BT_WCMD_LEASED, .status = BT_ERR_UNAVAILABLE};
        c.u.lease.id = o->u.lease.id;
        bt_wctl_command(w, &c);
    }
}

static void send_unlease(struct bt_wctl *w, const struct bt_wout *o)
{
    Baton__LocalUnlease l = BATON__LOCAL_UNLEASE__INIT;
    l.lease = o->u.lease.id;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    m.m_case = BATON__LOCAL_MSG__M_UNLEASE;
    m.unlease = &l;
    bt_status_t st = send_msg(w, &m);
    (void)st; /* if detached, the next attachment voids it */
}

void bt_wnode_out(struct bt_wctl *w, const struct bt_wout *o)
{
    if (o->attach != w->attach || w->attach == 0) {
        if (o->kind == BT_WOUT_LEASE) {
            free(o->u.lease.keys);
        }
        return; /* of an earlier attachment: all its grants are void */
    }
    switch (o->kind) {
    case BT_WOUT_TRAILER: send_trailer(w, o); break;
    case BT_WOUT_CLOSE:
        send_close(w, o->u.local.request, o->u.local.epoch, o->u.local.writer, o->u.local.abort);
        break;
    case BT_WOUT_TAIL_END: send_tail_end(w, o); break;
    case BT_WOUT_PUT: send_put(w, o); break;
    case BT_WOUT_PUT_DONE: send_put_done(w, o); break;
    case BT_WOUT_LEASE:
        send_lease(w, o);
        free(o->u.lease.keys);
        break;
    case BT_WOUT_UNLEASE: send_unlease(w, o); break;
    case BT_WOUT_PROGRESS:
    case BT_WOUT_READY:
    case BT_WOUT_FAILED:
    case BT_WOUT_FATAL:
    case BT_WOUT_TOKENS:
    case BT_WOUT_PROMPT_LOGPROBS:
    case BT_WOUT_PREFILL_DONE:
    case BT_WOUT_SEARCHING:
    case BT_WOUT_ENDED: break;
    }
}

/* ---- messages of the kvstore ---- */

static void on_attached(void *arg, struct bt_slab *slab, uint64_t incarnation)
{
    struct bt_wctl *w = arg;
    char err[256] = "";
    struct bt_wslab *s = bt_calloc(1, sizeof(*s));
    bt_status_t st =
        bt_slab_map(slab->fd, &w->core.layout, &w->core.root, &s->slab, err, sizeof(err));
    if (st != BT_OK) {
        BT_ERROR("slab_map_failed", "status=%s why=%s", bt_status_name(st), err);
        free(s);
        return;
    }
    w->refused = false;
    w->attach = s->attach = ++w->next_attach;
    BT_INFO("kvstore_attached", "incarnation=%016llx slots=%u", (unsigned long long)incarnation,
            slab->super->n_slots);
    struct bt_wcmd c = {.kind = BT_WCMD_ATTACHED};
    c.u.slab = s;
    bt_wctl_command(w, &c);
    bt_wctl_update_state(w);
}

static void on_detached(void *arg)
{
    struct bt_wctl *w = arg;
    if (w->attach == 0) {
        return;
    }
    BT_WARN("kvstore_detached", "requests=%u then=%s", w->n_active,
            "requests that need its slots fail and are planned again; the worker attaches again "
            "when the kvstore is back");
    w->attach = 0;
    struct bt_wcmd c = {.kind = BT_WCMD_DETACHED};
    bt_wctl_command(w, &c);
    bt_wctl_update_state(w);
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    struct bt_wctl *w = arg;
    if (!w->refused) {
        BT_ERROR("kvstore_refuses", "status=%s why=%s", bt_status_name(st), why);
    }
    w->refused = true;
}

static void on_opened(struct bt_wctl *w, const Baton__LocalOpened *m)
{
    struct bt_wreq *r = bt_wctl_find(w, m->request, m->epoch);
    bool writer = m->mode == BATON__LOCAL_MODE__WRITER;
    if (r == NULL || r->ctl.opened_seen || writer != (r->sub->phases != BATON__PHASES__DECODE)) {
        if (m->status == BT_OK && r == NULL) {
            send_close(w, m->request, m->epoch, writer, true);
        }
        return;
    }
    r->ctl.opened_seen = true;
    struct bt_wcmd c = {.kind = BT_WCMD_OPENED, .req = r, .status = (bt_status_t)m->status};
    snprintf(c.detail, sizeof(c.detail), "%s", m->detail != NULL ? m->detail : "");
    if (m->status == BT_OK && m->n_generations != m->n_slots) {
        c.status = BT_ERR_PEER_PROTOCOL;
        snprintf(c.detail, sizeof(c.detail), "%zu slots, %zu generations", m->n_slots,
                 m->n_generations);
        send_close(w, m->request, m->epoch, writer, true);
    } else if (m->status == BT_OK) {
        struct bt_wgrant *g = bt_malloc(sizeof(*g) + 2 * sizeof(uint32_t) * m->n_slots);
        g->n_tokens = m->n_tokens;
        g->resident_blocks = m->resident_blocks;
        g->chunk_tokens = m->chunk_tokens;
        g->flow_word = m->flow_word;
        g->n_slots = (uint32_t)m->n_slots;
        if (m->n_slots > 0) {
            memcpy(g->slots, m->slots, m->n_slots * sizeof(uint32_t));
            memcpy(g->slots + m->n_slots, m->generations, m->n_slots * sizeof(uint32_t));
        }
        c.u.grant = g;
    }
    bt_wctl_command(w, &c);
}

static void on_tail(struct bt_wctl *w, const Baton__LocalTail *m)
{
    struct bt_wreq *r = bt_wctl_find(w, m->request, m->epoch);
    if (r == NULL || m->n_slots == 0 || m->n_generations != m->n_slots) {
        return;
    }
    struct bt_wcmd c = {.kind = BT_WCMD_TAIL, .req = r};
    struct bt_wtail *t = bt_malloc(sizeof(*t) + 2 * sizeof(uint32_t) * m->n_slots);
    t->next = NULL;
    t->first = m->first;
    t->n = (uint32_t)m->n_slots;
    memcpy(t->slots, m->slots, m->n_slots * sizeof(uint32_t));
    memcpy(t->slots + m->n_slots, m->generations, m->n_slots * sizeof(uint32_t));
    c.u.tail = t;
    bt_wctl_command(w, &c);
}

static void on_leased(struct bt_wctl *w, const Baton__LocalLeased *m)
{
    struct bt_wcmd c = {.kind = BT_WCMD_LEASED, .status = (bt_status_t)m->status};
    c.u.lease.id = m->lease;
    if (m->status == BT_OK && m->n_generations == m->n_slots) {
        struct bt_wlease *l = bt_malloc(sizeof(*l) + 2 * sizeof(uint32_t) * m->n_slots);
        l->n = (uint32_t)m->n_slots;
        if (m->n_slots > 0) {
            memcpy(l->slots, m->slots, m->n_slots * sizeof(uint32_t));
            memcpy(l->slots + m->n_slots, m->generations, m->n_slots * sizeof(uint32_t));
        }
        c.u.lease.lease = l;
    }
    bt_wctl_command(w, &c);
}

static void on_message(void *arg, const Baton__LocalMsg *m)
{
    struct bt_wctl *w = arg;
    struct bt_wcmd c = {0};
    switch (m->m_case) {
    case BATON__LOCAL_MSG__M_OPENED: on_opened(w, m->opened); break;
    case BATON__LOCAL_MSG__M_TRAILER:
        c.req = bt_wctl_find(w, m->trailer->request, m->trailer->epoch);
        if (c.req != NULL && !c.req->ctl.trailer_seen &&
            c.req->sub->phases == BATON__PHASES__DECODE) {
            c.req->ctl.trailer_seen = true;
            c.kind = BT_WCMD_TRAILER;
            c.u.trailer.first_token = m->trailer->first_token;
            c.u.trailer.finished = m->trailer->finished;
            bt_wctl_command(w, &c);
        }
        break;
    case BATON__LOCAL_MSG__M_REVOKE:
        c.req = bt_wctl_find(w, m->revoke->request, m->revoke->epoch);
        if (c.req != NULL && !c.req->ctl.revoke_seen) {
            c.req->ctl.revoke_seen = true;
            c.kind = BT_WCMD_REVOKE;
            c.status = m->revoke->status < 0 ? (bt_status_t)m->revoke->status : BT_ERR_CANCELLED;
            snprintf(c.detail, sizeof(c.detail), "%s",
                     m->revoke->detail != NULL ? m->revoke->detail : "");
            bt_wctl_command(w, &c);
        }
        break;
    case BATON__LOCAL_MSG__M_PUT_SLOT:
        c.kind = BT_WCMD_PUT_SLOT;
        c.status = (bt_status_t)m->put_slot->status;
        c.u.put.id = m->put_slot->put;
        c.u.put.slot = m->put_slot->slot;
        c.u.put.generation = m->put_slot->generation;
        bt_wctl_command(w, &c);
        break;
    case BATON__LOCAL_MSG__M_LEASED: on_leased(w, m->leased); break;
    case BATON__LOCAL_MSG__M_TAIL: on_tail(w, m->tail); break;
    case BATON__LOCAL_MSG__M_RECALL:
        c.kind = BT_WCMD_RECALL;
        c.u.lease.id = m->recall->lease;
        bt_wctl_command(w, &c);
        break;
    case BATON__LOCAL_MSG__M__NOT_SET:
    case BATON__LOCAL_MSG__M_ATTACH:
    case BATON__LOCAL_MSG__M_ATTACHED:
    case BATON__LOCAL_MSG__M_OPEN:
    case BATON__LOCAL_MSG__M_CLOSE:
    case BATON__LOCAL_MSG__M_TAIL_END:
    case BATON__LOCAL_MSG__M_PUT:
    case BATON__LOCAL_MSG__M_PUT_DONE:
    case BATON__LOCAL_MSG__M_LEASE:
    case BATON__LOCAL_MSG__M_UNLEASE:
    case _BATON__LOCAL_MSG__M__CASE_IS_INT_SIZE:
        BT_WARN("kvstore_message", "what=unexpected case=%d", (int)m->m_case);
        break;
    }
}

/* Nothing to do: flow words are read when the trailer says that everything has come. */
static void on_bell(void *arg)
{
    (void)arg;
}

void bt_wnode_start(struct bt_wctl *w)
{
    static const struct bt_local_ops ops = {
        .on_attached = on_attached,
        .on_detached = on_detached,
        .on_refused = on_refused,
        .on_message = on_message,
        .on_bell = on_bell,
    };
    w->local = bt_local_start(w->loop, w->conf.common.run_dir, w->conf.name, w->incarnation,
                              &w->core.layout, &w->core.root, &ops, w);
    char err[256];
    uid_t uid;
    if (w->conf.kvstore_user != NULL &&
        bt_conf_user("worker.kvstore_user", w->conf.kvstore_user, &uid, err, sizeof(err))) {
        bt_local_trust(w->local, uid);
    }
}
