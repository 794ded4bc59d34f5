/* One session with a worker or a kvstore (common/rpc/session.h): its life, its messages, and when
 * it is dialled. Loop thread. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "common/rpc/session_hello.h"
#include "conductor/view/view_priv.h"

#define BACKOFF_FIRST_MS 100u /* a dial that is refused costs little */
/* the same as SILENCE, so that a daemon is found again as fast as its loss is noticed */
#define BACKOFF_MAX_MS 2000u
/* Between two looks whether all plans know that the daemon was lost: a look is one comparison, and
 * it delays the dial by at most a twentieth of the shortest wait. */
#define FLIGHTS_MS 5u

static struct bt_metric *up_gauge(const struct bt_session *s)
{
    return s->view->m.up[s->kind == BT_SESSION_KVSTORE];
}

/* ---- hellos and heartbeats ---- */

static Baton__MixedSteps *fill_mixed(const struct bt_view *v, Baton__MixedSteps *m)
{
    baton__mixed_steps__init(m);
    m->step_ms = v->mixed.step_ms;
    m->gap_ms = v->mixed.gap_ms;
    return m;
}

static void say_hello(void *arg)
{
    struct bt_session *s = arg;
    const struct bt_view *v = s->view;
    struct bt_rpc_identity self = bt_view_identity(v);
    Baton__SessionHello h;
    Baton__MixedSteps mixed;
    bt_rpc_hello_fill(&self, s->member->incarnation, &h);
    if (s->kind == BT_SESSION_WORKER) {
        h.mixed = fill_mixed(v, &mixed);
        Baton__ToWorker m = BATON__TO_WORKER__INIT;
        m.m_case = BATON__TO_WORKER__M_HELLO;
        m.hello = &h;
        (void)bt_session_send_worker(s, &m);
    } else {
        Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
        m.m_case = BATON__TO_KVSTORE__M_HELLO;
        m.hello = &h;
        (void)bt_session_send_kvstore(s, &m);
    }
}

static void say_heartbeat(void *arg, uint64_t seq)
{
    struct bt_session *s = arg;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    Baton__MixedSteps mixed;
    h.seq = seq;
    if (s->kind == BT_SESSION_WORKER) {
        bt_session_note_mixed(s, bt_mono_ns());
        h.mixed = fill_mixed(s->view, &mixed);
        Baton__ToWorker m = BATON__TO_WORKER__INIT;
        m.m_case = BATON__TO_WORKER__M_HEARTBEAT;
        m.heartbeat = &h;
        (void)bt_session_send_worker(s, &m);
    } else {
        Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
        m.m_case = BATON__TO_KVSTORE__M_HEARTBEAT;
        m.heartbeat = &h;
        (void)bt_session_send_kvstore(s, &m);
        bt_session_blocks_more(s);
    }
}

static const char *on_hello(void *arg, const void *hello, char *buf, size_t cap)
{
    struct bt_session *s = arg;
    struct bt_rpc_identity self = bt_view_identity(s->view);
    struct bt_rpc_hello h = bt_rpc_hello_read(hello);
    bt_hello_fault_t fault = bt_rpc_hello_compare(&self, &h, s->member->incarnation,
                                                  true /* the channel checks the certificate */);
    if (fault == BT_HELLO_FITS) {
        return NULL;
    }
    const char *why = bt_rpc_hello_why(fault, &self, &h, s->member->incarnation, buf, cap);
    bt_metric_add(s->view->m.mismatch, 1);
    BT_WARN("session_refused", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    return why;
}

static void on_up(void *arg)
{
    struct bt_session *s = arg;
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) + 1);
    BT_INFO("session_up", "kind=%s peer=%s peer_node=%s incarnation=%016" PRIx64, s->member->kind,
            s->member->name, s->member->node, s->member->incarnation);
    if (s->kind == BT_SESSION_KVSTORE) {
        bt_session_blocks_open(s);
    }
    if (s->view->ops != NULL && bt_session_takes(s)) {
        s->view->ops->on_up(s->view->ops_arg, s);
    }
}

/* ---- messages ---- */

static void forget_pins(struct bt_session *s)
{
    if (s->pins != NULL) {
        baton__pin_states__free_unpacked(s->pins, NULL);
        s->pins = NULL;
    }
}

static void on_worker(void *arg, ProtobufCMessage *msg)
{
    struct bt_session *s = arg;
    const Baton__FromWorker *m = (const Baton__FromWorker *)msg;
    if (m->m_case != BATON__FROM_WORKER__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rpc.core.heard_ns;
        s->view->ops->on_worker(s->view->ops_arg, s, m);
    }
}

static void on_kvstore(void *arg, ProtobufCMessage *msg)
{
    struct bt_session *s = arg;
    Baton__FromKvstore *m = (Baton__FromKvstore *)msg;
    if (m->m_case == BATON__FROM_KVSTORE__M_PINS) {
        forget_pins(s);
        s->pins = m->pins; /* s owns them: they are taken out of the message */
        m->m_case = BATON__FROM_KVSTORE__M__NOT_SET;
        m->pins = NULL;
    } else if (m->m_case != BATON__FROM_KVSTORE__M__NOT_SET && s->view->ops != NULL) {
        s->output_ns = s->rpc.core.heard_ns;
        s->view->ops->on_kvstore(s->view->ops_arg, s, m);
    }
}

/* ---- life ---- */

static void on_fail(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_session *s = arg;
    (void)e; /* on_end tells it */
    s->broken = true;
}

/* Writes why the session ended, for logs and error messages. */
static void end_text(const struct bt_rpc_session_end *e, char *why, size_t cap)
{
    switch (e->cause) {
    case BT_RPC_SESSION_CLOSED:
        snprintf(why, cap, "stream closed (%d: %s)", e->code, e->why);
        return;
    case BT_RPC_SESSION_FULL:
    case BT_RPC_SESSION_VIOLATION:
    case BT_RPC_SESSION_REFUSED:
    case BT_RPC_SESSION_BROKEN: snprintf(why, cap, "broken by this conductor: %s", e->why); return;
    case BT_RPC_SESSION_SILENT:
    case BT_RPC_SESSION_STOPPED: snprintf(why, cap, "%s", e->why); return;
    }
}

/* The session has ended: all that the peer said is dropped. The session dials again by itself. */
static void on_end(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_session *s = arg;
    char why[BT_RPC_SESSION_WHY + 40];
    end_text(e, why, sizeof(why));
    s->has_load = s->has_pool = false;
    s->n_links = 0;
    s->said.classes = (struct bt_classes){0};
    forget_pins(s);
    bt_session_blocks_close(s);
    if (!e->was_up && (e->cause == BT_RPC_SESSION_VIOLATION || e->cause == BT_RPC_SESSION_BROKEN)) {
        BT_WARN("session_down", "kind=%s peer=%s was_up=0 why=%s", s->member->kind, s->member->name,
                why);
        return;
    }
    if (!e->was_up) {
        BT_DEBUG("session_dial_failed", "kind=%s peer=%s why=%s", s->member->kind, s->member->name,
                 why);
        return;
    }
    bt_metric_set(up_gauge(s), bt_metric_value(up_gauge(s)) - 1);
    bt_metric_add(s->view->m.down, 1);
    BT_WARN("session_down", "kind=%s peer=%s why=%s", s->member->kind, s->member->name, why);
    if (s->view->ops != NULL) {
        s->view->ops->on_down(s->view->ops_arg, s, why);
    }
}

void bt_session_break(struct bt_session *s, const char *why)
{
    bt_rpc_session_fail(&s->rpc, BT_RPC_SESSION_BROKEN, BT_GRPC_CANCELLED, why);
}

static void take_member(struct bt_session *s, Baton__Member *m);

static void dial(void *arg)
{
    struct bt_session *s = arg;
    if (!bt_list_empty(&s->peer.own_flights)) {
        bt_rpc_session_redial_in(&s->rpc, FLIGHTS_MS);
        return;
    }
    if (s->next_member != NULL) {
        take_member(s, s->next_member);
    }
    if (s->departed) {
        return; /* the peer has left; bt_session_update dials again */
    }
    char *who = bt_sprintf("%s/%s", s->member->kind, s->member->node);
    bt_status_t st = bt_rpc_session_dial(&s->rpc, s->view->rpc, s->member->rpc, who,
                                         s->kind == BT_SESSION_WORKER ? "/baton.Worker/Session"
                                                                      : "/baton.Kvstore/Session");
    free(who);
    if (st == BT_ERR_INVALID) {
        BT_WARN("session_bad_address", "kind=%s peer=%s addr=%s remedy=%s", s->member->kind,
                s->member->name, s->member->rpc,
                "the daemon has registered an address that cannot be dialed: correct its "
                "rpc.advertise");
    }
}

const struct bt_rpc_session_rules bt_session_rules = {
    .tick_ms = BT_RPC_SESSION_HEARTBEAT_MS,
    .backoff_first_ms = BACKOFF_FIRST_MS,
    .backoff_max_ms = BACKOFF_MAX_MS,
};

#define SESSION_OPS(type, message)                                                                 \
    {                                                                                              \
        .incoming = &type, .say_hello = say_hello, .say_heartbeat = say_heartbeat,                 \
        .on_hello = on_hello, .on_up = on_up, .on_heartbeat = bt_session_take_heartbeat,           \
        .on_message = message, .on_fail = on_fail, .on_end = on_end, .on_redial = dial,            \
    }
static const struct bt_rpc_session_ops worker_ops =
    SESSION_OPS(baton__from_worker__descriptor, on_worker);
static const struct bt_rpc_session_ops kvstore_ops =
    SESSION_OPS(baton__from_kvstore__descriptor, on_kvstore);

bool bt_session_send_worker(struct bt_session *s, const Baton__ToWorker *m)
{
    BT_ASSERT(s->kind == BT_SESSION_WORKER);
    return bt_rpc_session_send(&s->rpc, &m->base);
}

bool bt_session_send_kvstore(struct bt_session *s, const Baton__ToKvstore *m)
{
    BT_ASSERT(s->kind == BT_SESSION_KVSTORE);
    return bt_rpc_session_send(&s->rpc, &m->base);
}

void bt_session_beat(struct bt_session *s, uint64_t now_ns, bool asked)
{
    if (asked) {
        bt_rpc_session_beat(&s->rpc);
    }
    (void)bt_rpc_session_tick(&s->rpc, now_ns);
}

/* ---- members ---- */

/* Reads what every plan asks of every member. */
static void read_member(struct bt_session *s)
{
    const Baton__Member *m = s->member;
    s->peer.kind = m->kind;
    s->peer.name = m->name;
    s->peer.node = m->node;
    s->peer.incarnation = m->incarnation;
    s->ready = m->state == BATON__MEMBER_STATE__READY;
    uint32_t role = m->role_epoch != 0 ? m->role : bt_roles_of_kind(m->kind);
    s->prefill = (role & BT_ROLES_PREFILL) != 0;
    s->decode = (role & BT_ROLES_DECODE) != 0;
    uint32_t gives_up = m->next_role != 0 ? BT_ROLES_BOTH & ~m->next_role : 0;
    if (gives_up != s->gives_up) {
        s->gives_up = gives_up;
        s->gives_up_ns = bt_mono_ns();
    }
}

struct bt_session *bt_session_create(struct bt_view *v, bt_session_kind_t kind,
                                     const Baton__Member *m)
{
    struct bt_session *s = bt_calloc(1, sizeof(*s));
    s->view = v;
    s->kind = kind;
    s->member = bt_message_copy(&m->base);
    read_member(s);
    s->kv_id = BT_HOLDERS_KVSTORES_MAX;
    bt_list_init(&s->link);
    bt_list_init(&s->peer.own_flights);
    bt_list_init(&s->peer.own_lost);
    bt_sched_own_init(&s->peer.own);
    bt_rpc_session_init(&s->rpc, v->loop, true, &v->rules,
                        kind == BT_SESSION_WORKER ? &worker_ops : &kvstore_ops, s);
    if (kind != BT_SESSION_OTHER) {
        bt_rpc_session_redial_now(&s->rpc);
    }
    return s;
}

void bt_session_destroy(struct bt_session *s, const char *why)
{
    BT_ASSERT(bt_list_empty(&s->peer.own_flights));
    BT_ASSERT(bt_list_empty(&s->peer.own_lost));
    bt_list_remove(&s->link);
    bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_CANCELLED, why);
    bt_rpc_session_cleanup(&s->rpc);
    baton__member__free_unpacked(s->member, NULL);
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
    }
    free(s);
}

/* The session takes ownership of m. */
static void take_member(struct bt_session *s, Baton__Member *m)
{
    baton__member__free_unpacked(s->member, NULL);
    s->member = m;
    s->next_member = NULL;
    s->view->links_stale = true;
    s->draining = bt_view_node_draining(s->view, m->node);
    read_member(s);
}

void bt_session_update(struct bt_session *s, const Baton__Member *m)
{
    bool anew = m->incarnation != s->member->incarnation || strcmp(m->rpc, s->member->rpc) != 0 ||
                strcmp(m->node, s->member->node) != 0;
    bool was_departed = s->departed;
    s->departed = false;
    if (anew) {
        bt_rpc_session_end(&s->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_CANCELLED,
                           "a new incarnation is up");
    }
    if (s->next_member != NULL) {
        baton__member__free_unpacked(s->next_member, NULL);
        s->next_member = NULL;
    }
    if (anew && !bt_list_empty(&s->peer.own_flights)) { /* the flights belong to the old one */
        s->next_member = bt_message_copy(&m->base);
    } else {
        take_member(s, bt_message_copy(&m->base));
    }
    if (s->kind != BT_SESSION_OTHER && (anew || was_departed) &&
        bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_IDLE) {
        bt_rpc_session_redial_now(&s->rpc);
    }
}
