/* The local workers' side of grants: opens and trailers; attach, detach and proven death; killing a
 * worker that does not return revoked slots. Control thread. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/log/log.h"
#include "kvstore/grant/grant_priv.h"

void bt_grant_worker_send(struct bt_grant_worker *w, const Baton__LocalMsg *m)
{
    if (w != NULL && w->conn != NULL) {
        w->ops.send(w->conn, m);
    }
}

/* ---- opens ---- */

static void open_free(struct bt_grant_open *o)
{
    if (o->mode == BATON__LOCAL_MODE__WRITER) {
        bt_grant_overlap_end(o->g);
    }
    bt_list_remove(&o->in_grant);
    bt_list_remove(&o->in_worker);
    free(o);
}

static struct bt_grant_open *open_find(const struct bt_grant_worker *w, uint64_t request,
                                       uint32_t epoch, Baton__LocalMode mode)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_worker);
        if (o->g->req->id == request && o->g->epoch == epoch && o->mode == mode) {
            return o;
        }
    }
    return NULL;
}

void bt_grant_worker_revoke(struct bt_grant_open *o)
{
    if (o->w == NULL || o->revoked_ns != 0) {
        return;
    }
    o->revoked_ns = bt_mono_ns();
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalRevoke r = BATON__LOCAL_REVOKE__INIT;
    r.request = o->g->req->id;
    r.epoch = o->g->epoch;
    r.status = o->g->revoked.status;
    r.detail = o->g->revoked.why;
    m.m_case = BATON__LOCAL_MSG__M_REVOKE;
    m.revoke = &r;
    bt_grant_worker_send(o->w, &m);
}

void bt_grant_worker_send_trailer(struct bt_grant_open *o)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalTrailer t = BATON__LOCAL_TRAILER__INIT;
    t.request = o->g->req->id;
    t.epoch = o->g->epoch;
    t.first_token = o->g->flow.trailer.first_token;
    t.finished = o->g->flow.trailer.finished;
    t.last_compute_ns = o->g->flow.trailer.last_compute_ns;
    m.m_case = BATON__LOCAL_MSG__M_TRAILER;
    m.trailer = &t;
    bt_grant_worker_send(o->w, &m);
}

static void opened(struct bt_grant_worker *w, uint64_t request, uint32_t epoch,
                   Baton__LocalMode mode, bt_status_t st, const char *detail,
                   const struct bt_grant *g)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalOpened a = BATON__LOCAL_OPENED__INIT;
    uint32_t *gens = NULL;
    a.request = request;
    a.epoch = epoch;
    a.mode = mode;
    a.status = st;
    a.detail = (char *)(uintptr_t)detail;
    if (g != NULL) {
        gens = bt_malloc(g->blocks.n * sizeof(*gens));
        for (uint32_t b = 0; b < g->blocks.n; b++) {
            gens[b] = bt_pool_generation(g->gs->c.cache->pool, g->blocks.slots[b]);
        }
        a.n_tokens = g->blocks.shape.n_tokens;
        a.resident_blocks = g->blocks.resident;
        a.chunk_tokens = g->blocks.shape.chunk_tokens;
        a.flow_word = g->flow.index;
        a.n_slots = a.n_generations = g->blocks.n;
        a.slots = g->blocks.slots;
        a.generations = gens;
    }
    m.m_case = BATON__LOCAL_MSG__M_OPENED;
    m.opened = &a;
    bt_grant_worker_send(w, &m);
    free(gens);
}

/* Opens an existing grant, or answers why it cannot. */
static void open_now(struct bt_grant_worker *w, struct bt_grant *g, Baton__LocalMode mode)
{
    bt_status_t st = BT_OK;
    const char *why = "";
    if (g->revoked.on) {
        st = g->revoked.status;
        why = g->revoked.why;
    } else if (g->blocks.n == 0) {
        st = BT_ERR_STALE;
        why = "the blocks of this grant are written already";
    } else if (mode == BATON__LOCAL_MODE__WRITER && g->res.receive) {
        st = BT_ERR_INVALID;
        why = "this grant is filled by a peer: it has no local writer";
    } else if (mode == BATON__LOCAL_MODE__WRITER && g->flow.has_writer) {
        st = BT_ERR_EXISTS;
        why = "another worker writes this grant or has written it";
    } else if (open_find(w, g->req->id, g->epoch, mode) != NULL) {
        st = BT_ERR_EXISTS;
        why = "this worker has opened the grant already";
    }
    if (st != BT_OK) {
        opened(w, g->req->id, g->epoch, mode, st, why, NULL);
        return;
    }
    struct bt_grant_open *o = bt_calloc(1, sizeof(*o));
    o->g = g;
    o->w = w;
    o->mode = mode;
    bt_list_insert_tail(&g->opens, &o->in_grant);
    bt_list_insert_tail(&w->opens, &o->in_worker);
    g->flow.has_writer = g->flow.has_writer || mode == BATON__LOCAL_MODE__WRITER;
    opened(w, g->req->id, g->epoch, mode, BT_OK, "", g);
    if (mode == BATON__LOCAL_MODE__READER && g->flow.done) {
        bt_grant_worker_send_trailer(o);
    } else if (mode == BATON__LOCAL_MODE__WRITER) {
        bt_grant_overlap_tell(g);
    }
}

static void wait_free(struct bt_grant_worker *w, struct bt_grant_open_wait *q)
{
    bt_list_remove(&q->in_worker);
    w->n_waits--;
    free(q);
}

static void on_open(struct bt_grant_worker *w, const Baton__LocalOpen *m)
{
    struct bt_grants *gs = w->gs;
    struct bt_grant *g = bt_grant_find(gs, m->request, m->epoch);
    if (g != NULL && !(g->revoked.on && bt_grant_is_stale(gs, m->request, m->epoch))) {
        open_now(w, g, m->mode);
    } else if (bt_grant_is_stale(gs, m->request, m->epoch)) {
        opened(w, m->request, m->epoch, m->mode, BT_ERR_STALE, "this epoch is over", NULL);
    } else if (bt_grant_refusal(gs, m->request, m->epoch) != BT_OK) {
        opened(w, m->request, m->epoch, m->mode, bt_grant_refusal(gs, m->request, m->epoch),
               "the conductor's reservation was refused", NULL);
    } else if (w->n_waits >= GRANT_WAITS_MAX) {
        opened(w, m->request, m->epoch, m->mode, BT_ERR_EXHAUSTED,
               "too many opens of this worker wait for their reservation", NULL);
    } else {
        struct bt_grant_open_wait *q = bt_calloc(1, sizeof(*q));
        q->request = m->request;
        q->epoch = m->epoch;
        q->mode = m->mode;
        q->deadline_ns = bt_mono_ns() + BT_GRANT_OPEN_WAIT_MS * 1000000ull;
        bt_list_insert_tail(&w->waits, &q->in_worker);
        w->n_waits++;
    }
}

void bt_grant_worker_answer_waiting(struct bt_grants *gs, uint64_t request, uint32_t epoch,
                                    bt_status_t st, const char *why)
{
    struct bt_list *i, *k, *tmp;
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *w = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        bt_list_for_each_safe (k, tmp, &w->waits) {
            struct bt_grant_open_wait *q = BT_CONTAINER_OF(k, struct bt_grant_open_wait, in_worker);
            if (q->request != request || q->epoch > epoch) {
                continue;
            }
            struct bt_grant_open_wait was = *q;
            wait_free(w, q);
            if (was.epoch < epoch) {
                opened(w, request, was.epoch, was.mode, BT_ERR_STALE, "a newer epoch has begun",
                       NULL);
            } else if (st != BT_OK) {
                opened(w, request, was.epoch, was.mode, st, why, NULL);
            } else {
                open_now(w, bt_grant_find(gs, request, epoch), was.mode);
            }
        }
    }
}

/* ---- the writer ---- */

/* The writer has ended: seals the complete blocks. A flow that is not complete now will never
 * be. */
static void writer_ended(struct bt_grant *g, bt_status_t st, const char *why)
{
    bt_grant_hold(g);
    bt_grant_progress(g);
    if (!g->flow.done) {
        bt_grant_produced(g);
        bt_grant_fail(g, st, why);
    }
    bt_grant_unhold(g);
}

static void on_trailer(struct bt_grant_worker *w, const Baton__LocalTrailer *m)
{
    struct bt_grant_open *o = open_find(w, m->request, m->epoch, BATON__LOCAL_MODE__WRITER);
    if (o == NULL || o->g->flow.has_trailer || o->g->revoked.on) {
        return; /* a late message of an old epoch */
    }
    struct bt_grant *g = o->g;
    bt_grant_hold(g);
    g->flow.has_trailer = true;
    g->flow.trailer = (struct bt_wire_trailer){.first_token = m->first_token,
                                               .finished = m->finished,
                                               .last_compute_ns = m->last_compute_ns};
    bt_grant_transfer_trailer(g);
    bt_grant_progress(g);
    bt_grant_unhold(g);
}

static void on_overlap_end(struct bt_grant_worker *w, const Baton__LocalTailEnd *m)
{
    struct bt_grant_open *o = open_find(w, m->request, m->epoch, BATON__LOCAL_MODE__WRITER);
    if (o != NULL) {
        bt_grant_overlap_end(o->g);
    }
}

static void on_close(struct bt_grant_worker *w, const Baton__LocalClose *m)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &w->waits) {
        struct bt_grant_open_wait *q = BT_CONTAINER_OF(i, struct bt_grant_open_wait, in_worker);
        if (q->request == m->request && q->epoch == m->epoch && q->mode == m->mode) {
            wait_free(w, q);
        }
    }
    struct bt_grant_open *o = open_find(w, m->request, m->epoch, m->mode);
    if (o == NULL) {
        return;
    }
    struct bt_grant *g = o->g;
    bt_grant_hold(g);
    open_free(o);
    if (m->mode == BATON__LOCAL_MODE__WRITER) {
        writer_ended(g, m->abort ? BT_ERR_CANCELLED : BT_ERR_PEER_PROTOCOL,
                     m->abort ? "the writer gave up"
                              : "the writer closed the grant before its flow was complete");
    }
    bt_grant_unhold(g);
}

/* ---- workers ---- */

/* The worker's last copies may still run for a moment, so everything it held stays unusable for one
 * quarantine. */
static void quarantine_holds(struct bt_grant_worker *w, const char *why)
{
    struct bt_grants *gs = w->gs;
    uint64_t until = bt_mono_ns() + BT_POOL_QUARANTINE_MS * 1000000ull;
    while (!bt_list_empty(&w->waits)) {
        wait_free(w, BT_CONTAINER_OF(w->waits.next, struct bt_grant_open_wait, in_worker));
    }
    bt_grant_put_void(w, until);
    bt_grant_lease_void(w, until);
    while (!bt_list_empty(&w->opens)) {
        struct bt_grant_open *o = BT_CONTAINER_OF(w->opens.next, struct bt_grant_open, in_worker);
        struct bt_grant *g = o->g;
        bt_list_remove(&o->in_worker);
        bt_list_insert_tail(&gs->workers.dead_opens, &o->in_worker);
        o->w = NULL;
        o->expire_ns = until;
        bt_grant_hold(g);
        if (o->mode == BATON__LOCAL_MODE__WRITER) {
            writer_ended(g, BT_ERR_PEER_LOST, why);
            if (!g->flow.done) {
                bt_grant_quarantine(g);
            }
        }
        bt_grant_unhold(g);
    }
}

static void worker_free(struct bt_grant_worker *w)
{
    bt_list_remove(&w->link);
    bt_loop_fd_del(w->gs->c.loop, w->pidfd_w);
    close(w->pidfd);
    free(w->name);
    free(w);
}

static bool holds_nothing(const struct bt_grant_worker *w)
{
    return bt_list_empty(&w->opens) && bt_list_empty(&w->puts) && bt_list_empty(&w->leases);
}

/* The pidfd became readable: the process has ended, with all its threads. */
static void on_death(void *arg, uint32_t events)
{
    struct bt_grant_worker *w = arg;
    (void)events;
    BT_INFO("worker_dead", "worker=%s pid=%u held=%s", w->name, w->pid,
            holds_nothing(w) ? "nothing" : "slots");
    quarantine_holds(w, "the worker died");
    if (w->conn != NULL) {
        w->ops.drop(w->conn);
        w->conn = NULL;
    }
    worker_free(w);
}

static void watch_pidfd(struct bt_grant_worker *w, int pidfd)
{
    w->pidfd = pidfd;
    w->pidfd_w = bt_loop_fd_add(w->gs->c.loop, pidfd, EPOLLIN, on_death, w);
}

struct bt_grant_worker *bt_grants_attach(struct bt_grants *gs, const char *name,
                                         uint64_t incarnation, uint32_t pid, int pidfd,
                                         const struct bt_grant_worker_ops *ops, void *conn)
{
    struct bt_grant_worker *w = NULL;
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *x = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        if (x->incarnation == incarnation && x->pid == pid && strcmp(x->name, name) == 0) {
            w = x;
            break;
        }
    }
    if (w == NULL) {
        w = bt_calloc(1, sizeof(*w));
        w->gs = gs;
        w->name = bt_strdup(name);
        w->incarnation = incarnation;
        w->pid = pid;
        bt_list_init(&w->opens);
        bt_list_init(&w->puts);
        bt_list_init(&w->waits);
        bt_list_init(&w->leases);
        bt_list_init(&w->asked);
        bt_list_insert_tail(&gs->workers.all, &w->link);
    } else {
        if (w->conn != NULL) {
            w->ops.drop(w->conn);
            w->conn = NULL;
        }
        quarantine_holds(w, "the worker attached again");
        bt_loop_fd_del(gs->c.loop, w->pidfd_w);
        close(w->pidfd);
    }
    watch_pidfd(w, pidfd);
    w->ops = *ops;
    w->conn = conn;
    return w;
}

void bt_grants_detach(struct bt_grants *gs, struct bt_grant_worker *w)
{
    (void)gs;
    w->conn = NULL;
    while (!bt_list_empty(&w->waits)) {
        wait_free(w, BT_CONTAINER_OF(w->waits.next, struct bt_grant_open_wait, in_worker));
    }
    bt_grant_lease_forget_asked(w);
    bt_grant_put_forget_waiting(w);
    /* Flows that it was writing cannot be completed, since the trailer would have come over this
     * socket. The worker still owns the slots. */
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &w->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_worker);
        if (o->mode == BATON__LOCAL_MODE__WRITER && !o->g->flow.has_trailer) {
            bt_grant_fail(o->g, BT_ERR_PEER_LOST, "the writer's session with the kvstore ended");
        }
    }
    if (holds_nothing(w)) {
        worker_free(w);
    }
}

bt_status_t bt_grants_message(struct bt_grants *gs, struct bt_grant_worker *w,
                              const Baton__LocalMsg *m)
{
    (void)gs;
    switch (m->m_case) {
    case BATON__LOCAL_MSG__M_OPEN: on_open(w, m->open); return BT_OK;
    case BATON__LOCAL_MSG__M_TRAILER: on_trailer(w, m->trailer); return BT_OK;
    case BATON__LOCAL_MSG__M_CLOSE: on_close(w, m->close); return BT_OK;
    case BATON__LOCAL_MSG__M_TAIL_END: on_overlap_end(w, m->tail_end); return BT_OK;
    case BATON__LOCAL_MSG__M_PUT: return bt_grant_put_ask(w, m->put);
    case BATON__LOCAL_MSG__M_PUT_DONE: bt_grant_put_end(w, m->put_done); return BT_OK;
    case BATON__LOCAL_MSG__M_LEASE: return bt_grant_lease_ask(w, m->lease);
    case BATON__LOCAL_MSG__M_UNLEASE: bt_grant_lease_end(w, m->unlease); return BT_OK;
    case BATON__LOCAL_MSG__M__NOT_SET: return BT_OK; /* a field of a later version */
    case BATON__LOCAL_MSG__M_ATTACH:
    case BATON__LOCAL_MSG__M_ATTACHED:
    case BATON__LOCAL_MSG__M_OPENED:
    case BATON__LOCAL_MSG__M_REVOKE:
    case BATON__LOCAL_MSG__M_PUT_SLOT:
    case BATON__LOCAL_MSG__M_LEASED:
    case BATON__LOCAL_MSG__M_RECALL:
    case BATON__LOCAL_MSG__M_TAIL:
    case _BATON__LOCAL_MSG__M__CASE_IS_INT_SIZE:
    default: return BT_ERR_PEER_PROTOCOL;
    }
}

void bt_grants_bell(struct bt_grants *gs, struct bt_grant_worker *w)
{
    struct bt_list *i, *tmp;
    (void)gs;
    bt_list_for_each_safe (i, tmp, &w->opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_worker);
        if (o->mode == BATON__LOCAL_MODE__WRITER && !o->g->flow.done) {
            bt_grant_progress(o->g);
        }
    }
}

/* ---- time ---- */

void bt_grant_worker_kill(struct bt_grant_worker *w, const char *what, uint64_t now)
{
    if (w->killed_ns != 0 && now - w->killed_ns < GRANT_KILL_AGAIN_MS * 1000000ull) {
        return;
    }
    w->killed_ns = now;
    w->gs->workers.killed++;
    if (w->gs->m.killed != NULL) {
        bt_metric_add(w->gs->m.killed, 1);
    }
    BT_ERROR("worker_killed", "worker=%s pid=%u held=%s why=%s", w->name, w->pid, what,
             "the worker kept slots longer than kvstore.reclaim_ms");
    if (syscall(SYS_pidfd_send_signal, w->pidfd, SIGKILL, NULL, 0) != 0) {
        BT_ERROR("worker_kill_failed", "worker=%s why=%s", w->name, strerror(errno));
    }
}

void bt_grant_worker_tick(struct bt_grants *gs, uint64_t now)
{
    struct bt_list *i, *k, *tmp;
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *w = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        bt_list_for_each_safe (k, tmp, &w->waits) {
            struct bt_grant_open_wait *q = BT_CONTAINER_OF(k, struct bt_grant_open_wait, in_worker);
            if (now >= q->deadline_ns && !bt_grant_pending_has(gs, q->request, q->epoch)) {
                char why[96];
                snprintf(why, sizeof(why),
                         "no conductor has reserved slots for this request here within %d ms",
                         BT_GRANT_OPEN_WAIT_MS);
                opened(w, q->request, q->epoch, q->mode, BT_ERR_NOT_FOUND, why, NULL);
                wait_free(w, q);
            }
        }
        bt_list_for_each (k, &w->opens) {
            struct bt_grant_open *o = BT_CONTAINER_OF(k, struct bt_grant_open, in_worker);
            if (o->revoked_ns != 0 && now - o->revoked_ns >= gs->c.reclaim_ms * 1000000ull) {
                char what[64];
                snprintf(what, sizeof(what), "req=%016llx epoch=%u",
                         (unsigned long long)o->g->req->id, o->g->epoch);
                bt_grant_worker_kill(w, what, now);
            }
        }
        bt_grant_put_reclaim(w, now);
    }
    bt_list_for_each_safe (i, tmp, &gs->workers.dead_opens) {
        struct bt_grant_open *o = BT_CONTAINER_OF(i, struct bt_grant_open, in_worker);
        if (now >= o->expire_ns) {
            struct bt_grant *g = o->g;
            bt_grant_hold(g);
            open_free(o);
            bt_grant_unhold(g);
        }
    }
    bt_grant_put_tick(gs, now);
    bt_grant_lease_tick(gs, now);
}

void bt_grant_worker_destroy(struct bt_grants *gs)
{
    bt_grant_lease_destroy(gs);
    bt_grant_put_destroy(gs);
    while (!bt_list_empty(&gs->workers.all)) {
        struct bt_grant_worker *w =
            BT_CONTAINER_OF(gs->workers.all.next, struct bt_grant_worker, link);
        while (!bt_list_empty(&w->waits)) {
            wait_free(w, BT_CONTAINER_OF(w->waits.next, struct bt_grant_open_wait, in_worker));
        }
        while (!bt_list_empty(&w->opens)) {
            open_free(BT_CONTAINER_OF(w->opens.next, struct bt_grant_open, in_worker));
        }
        worker_free(w);
    }
    while (!bt_list_empty(&gs->workers.dead_opens)) {
        open_free(BT_CONTAINER_OF(gs->workers.dead_opens.next, struct bt_grant_open, in_worker));
    }
}
