/* Sessions with conductors. A session owns the reservations that its messages made; two seconds of
 * silence or a broken stream end it and them. Control thread. */
#include "kvstore/serve/serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"

#define SESSION_VERSION 1

struct session {
    struct bt_list link;
    struct bt_serve *s;
    struct bt_rpc_stream *stream;
    struct bt_timer timer; /* heartbeat and silence, or the end that must come later */
    char *name;            /* of the conductor, after its hello */
    uint64_t heard_ns, looked_ns, seq;
    uint64_t pins_version;           /* as the conductor was told; 0: never */
    struct bt_blocks_reader *blocks; /* NULL: none */
    bool hello, broken;
};

struct bt_serve {
    struct bt_serve_config c;
    char *cluster, *name, *node;
    struct bt_grants *grants;
    struct bt_blocks *blocks;
    struct bt_list sessions;
    uint32_t n_sessions;
};

static void session_free(struct session *x)
{
    bt_timer_stop(x->s->c.loop, &x->timer);
    bt_list_remove(&x->link);
    x->s->n_sessions--;
    bt_blocks_close(x->blocks, "its session has ended");
    if (x->hello) {
        bt_grants_session_end(x->s->grants, x);
    }
    free(x->name);
    free(x);
}

/* We end it: code and detail tell the conductor why. */
static void session_end(struct session *x, int code, const char *why)
{
    BT_WARN("session_end", "conductor=%s code=%d why=%s", x->name != NULL ? x->name : "?", code,
            why);
    bt_rpc_stream_close(x->stream, code, why, true);
    session_free(x);
}

static void session_overflow(void *arg)
{
    session_end(arg, BT_GRPC_EXHAUSTED,
                "the session's queue is full: the conductor reads too slowly");
}

static void session_send(struct session *x, const Baton__FromKvstore *m)
{
    if (!x->broken && bt_rpc_stream_send_pb(x->stream, &m->base) != BT_OK) {
        /* We may be inside of the grants: the end comes in a later turn of the loop. */
        x->broken = true;
        bt_timer_start(x->s->c.loop, &x->timer, 0, 0, session_overflow, x);
    }
}

void bt_serve_to_session(void *session, const Baton__FromKvstore *msg)
{
    session_send(session, msg);
}

static void send_heartbeat(struct session *x)
{
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__Heartbeat h = BATON__HEARTBEAT__INIT;
    Baton__PoolLoad p = BATON__POOL_LOAD__INIT;
    struct bt_pool_counts n;
    bt_pool_counts(x->s->c.cache->pool, &n);
    p.slots_total = n.total;
    p.slots_free = n.free;
    p.slots_writing = n.writing;
    p.slots_sealed = n.sealed;
    p.slots_quarantine = n.quarantine;
    p.leases = n.leases;
    Baton__LinkRate rate[BT_RATES_PEERS_MAX], *links[BT_RATES_PEERS_MAX];
    const struct bt_rates *r = bt_grants_rates(x->s->grants);
    p.links = links;
    for (uint32_t i = 0; i < r->n; i++) {
        if (r->at[i].incarnation == BT_RATES_OWN) {
            p.ssd_bytes_per_s = r->at[i].bytes_per_s[BT_RATE_SSD];
            continue;
        }
        Baton__LinkRate *l = links[p.n_links] = &rate[p.n_links];
        baton__link_rate__init(l);
        l->incarnation = r->at[i].incarnation;
        l->slab_bytes_per_s = r->at[i].bytes_per_s[BT_RATE_SLAB];
        l->ssd_bytes_per_s = r->at[i].bytes_per_s[BT_RATE_SSD];
        p.n_links++;
    }
    h.seq = ++x->seq;
    h.pool = &p;
    m.m_case = BATON__FROM_KVSTORE__M_HEARTBEAT;
    m.heartbeat = &h;
    session_send(x, &m);
}

/* What is protected of which pin, if the conductor does not know it. */
static void send_pins(struct session *x)
{
    const struct bt_pins *pins = x->s->c.pins;
    if (pins == NULL || bt_pins_version(pins) == x->pins_version) {
        return;
    }
    uint32_t cap = bt_pins_count(pins);
    struct bt_pin_state *states = bt_calloc(cap + 1, sizeof(*states));
    Baton__PinState *items = bt_calloc(cap + 1, sizeof(*items));
    Baton__PinState **list = bt_calloc(cap + 1, sizeof(Baton__PinState *));
    Baton__PinStates all = BATON__PIN_STATES__INIT;
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    all.n_pins = bt_pins_states(pins, states, cap);
    all.pins = list;
    for (uint32_t i = 0; i < all.n_pins; i++) {
        list[i] = &items[i];
        baton__pin_state__init(&items[i]);
        items[i].id = states[i].id;
        items[i].slab_blocks = states[i].protected[BT_PIN_SLAB];
        items[i].ssd_blocks = states[i].protected[BT_PIN_SSD];
        items[i].slab_beyond = states[i].beyond[BT_PIN_SLAB];
        items[i].ssd_beyond = states[i].beyond[BT_PIN_SSD];
    }
    m.m_case = BATON__FROM_KVSTORE__M_PINS;
    m.pins = &all;
    x->pins_version = bt_pins_version(pins);
    session_send(x, &m);
    free(list);
    free(items);
    free(states);
}

static void session_tick(void *arg)
{
    struct session *x = arg;
    uint64_t now = bt_mono_ns();
    if (bt_stood_still(&x->looked_ns, now, BT_SERVE_SILENCE_MS * 500000ull)) {
        x->heard_ns = now;
    }
    if (now - x->heard_ns > BT_SERVE_SILENCE_MS * 1000000ull) {
        session_end(x, BT_GRPC_DEADLINE, "nothing was heard for 2 s");
    } else if (x->hello) {
        send_heartbeat(x);
        send_pins(x);
    }
}

/* NULL: welcome; else what differs. */
static const char *hello_check(const struct session *x, const Baton__SessionHello *h, char *why,
                               size_t cap)
{
    const struct bt_serve *s = x->s;
    if (h->version != SESSION_VERSION) {
        snprintf(why, cap, "session version %u, this kvstore speaks %d", h->version,
                 SESSION_VERSION);
    } else if (strcmp(h->cluster, s->cluster) != 0) {
        snprintf(why, cap, "cluster \"%.64s\", this kvstore belongs to \"%.64s\"", h->cluster,
                 s->cluster);
    } else if (!bt_rpc_stream_peer_is(x->stream, "conductor", h->node)) {
        snprintf(why, cap, "your certificate is not of the conductor of node \"%.64s\"", h->node);
    } else if (h->root_key.len != sizeof(s->c.root.b) ||
               memcmp(h->root_key.data, s->c.root.b, sizeof(s->c.root.b)) != 0) {
        snprintf(why, cap,
                 "root key differs: not the same model weights or settings (model.activations)");
    } else if (h->layout_id != s->c.layout_id) {
        snprintf(why, cap, "layout_id %016llx, this kvstore has %016llx: same kv.block_tokens?",
                 (unsigned long long)h->layout_id, (unsigned long long)s->c.layout_id);
    } else if (h->expect_incarnation != 0 && h->expect_incarnation != s->c.incarnation) {
        snprintf(why, cap, "incarnation %016llx is gone, this is %016llx",
                 (unsigned long long)h->expect_incarnation, (unsigned long long)s->c.incarnation);
    } else if (h->name[0] == '\0') {
        snprintf(why, cap, "the hello has no name");
    } else {
        return NULL;
    }
    return why;
}

static void on_hello(struct session *x, const Baton__SessionHello *h)
{
    struct bt_serve *s = x->s;
    char buf[256];
    const char *why = hello_check(x, h, buf, sizeof(buf));
    x->name = bt_strdup(h->name);
    if (why != NULL) {
        session_end(x, BT_GRPC_FAILED_PRECONDITION, why);
        return;
    }
    x->hello = true;
    BT_INFO("session_up", "conductor=%s incarnation=%016llx", x->name,
            (unsigned long long)h->incarnation);
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__SessionHello a = BATON__SESSION_HELLO__INIT;
    a.version = SESSION_VERSION;
    a.cluster = s->cluster;
    a.name = s->name;
    a.node = s->node;
    a.incarnation = s->c.incarnation;
    a.root_key.data = s->c.root.b;
    a.root_key.len = sizeof(s->c.root.b);
    a.layout_id = s->c.layout_id;
    a.expect_incarnation = h->incarnation;
    m.m_case = BATON__FROM_KVSTORE__M_HELLO;
    m.hello = &a;
    session_send(x, &m);
    send_heartbeat(x);
    send_pins(x);
}

static void on_message(void *arg, struct bt_rpc_stream *stream, const void *data, size_t len)
{
    struct session *x = arg;
    (void)stream;
    if (x->broken) {
        return;
    }
    char why[256];
    Baton__ToKvstore *m = bt_to_kvstore_unpack(data, len, why, sizeof(why));
    x->heard_ns = bt_mono_ns();
    if (m == NULL) {
        session_end(x, BT_GRPC_INVALID_ARGUMENT, why);
        return;
    }
    if (!x->hello && m->m_case != BATON__TO_KVSTORE__M_HELLO) {
        session_end(x, BT_GRPC_FAILED_PRECONDITION, "a session begins with SessionHello");
    } else {
        switch (m->m_case) {
        case BATON__TO_KVSTORE__M_HELLO:
            if (x->hello) {
                session_end(x, BT_GRPC_FAILED_PRECONDITION, "SessionHello came twice");
            } else {
                on_hello(x, m->hello);
            }
            break;
        case BATON__TO_KVSTORE__M_RESERVE: bt_grants_reserve(x->s->grants, x, m->reserve); break;
        case BATON__TO_KVSTORE__M_RELEASE:
            bt_grants_release(x->s->grants, x, m->release->request, m->release->epoch);
            break;
        case BATON__TO_KVSTORE__M_REPLICATE:
            bt_grants_replicate(x->s->grants, x, m->replicate);
            break;
        case BATON__TO_KVSTORE__M_HEARTBEAT:
        case BATON__TO_KVSTORE__M__NOT_SET: /* of a later version */
        case _BATON__TO_KVSTORE__M__CASE_IS_INT_SIZE:
        default: break;
        }
    }
    baton__to_kvstore__free_unpacked(m, NULL);
}

static void on_close(void *arg, struct bt_rpc_stream *stream, int code, const char *detail)
{
    struct session *x = arg;
    (void)stream;
    BT_INFO("session_down", "conductor=%s code=%d detail=%s", x->name != NULL ? x->name : "?", code,
            detail != NULL ? detail : "");
    session_free(x);
}

static const struct bt_rpc_stream_ops session_ops = {.on_message = on_message,
                                                     .on_close = on_close};

static void on_blocks_gone(void *arg)
{
    struct session *x = arg;
    x->blocks = NULL;
}

/* Block events are part of a session: only who has said its hello over this connection gets them,
 * and once. */
static void on_blocks_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_serve *s = arg;
    struct bt_list *i;
    bt_list_for_each (i, &s->sessions) {
        struct session *x = BT_CONTAINER_OF(i, struct session, link);
        if (x->hello && !x->broken && x->blocks == NULL &&
            bt_rpc_stream_same_connection(x->stream, stream)) {
            x->blocks = bt_blocks_open(s->blocks, stream, on_blocks_gone, x);
            return;
        }
    }
    BT_WARN("blocks_refused", "why=%s", "no session of its connection");
    bt_rpc_stream_close(
        stream, BT_GRPC_FAILED_PRECONDITION,
        "block events go to a session: say SessionHello on a Session stream of this "
        "connection first, and read one stream of events",
        true);
}

static void on_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_serve *s = arg;
    if (s->n_sessions >= BT_SERVE_SESSIONS_MAX) {
        bt_rpc_stream_close(stream, BT_GRPC_EXHAUSTED, "too many sessions of conductors", true);
        return;
    }
    struct session *x = bt_calloc(1, sizeof(*x));
    x->s = s;
    x->stream = stream;
    x->heard_ns = bt_mono_ns();
    bt_list_insert_tail(&s->sessions, &x->link);
    s->n_sessions++;
    bt_rpc_stream_set_arg(stream, &session_ops, x);
    bt_timer_start(s->c.loop, &x->timer, BT_SERVE_HEARTBEAT_MS, BT_SERVE_HEARTBEAT_MS, session_tick,
                   x);
}

struct bt_serve *bt_serve_create(const struct bt_serve_config *c)
{
    struct bt_serve *s = bt_calloc(1, sizeof(*s));
    s->c = *c;
    s->cluster = bt_strdup(c->cluster);
    s->name = bt_strdup(c->name);
    s->node = bt_strdup(c->node);
    bt_list_init(&s->sessions);
    s->blocks = bt_blocks_create(c->loop, c->cache->index, c->tier, c->incarnation);
    return s;
}

void bt_serve_set_grants(struct bt_serve *s, struct bt_grants *grants)
{
    s->grants = grants;
}

void bt_serve_register(struct bt_serve *s, struct bt_rpc_server *server)
{
    bt_rpc_server_stream(server, "/baton.Kvstore/Session", "conductor", on_accept, s);
    bt_rpc_server_stream(server, "/baton.Kvstore/Blocks", "conductor", on_blocks_accept, s);
}

uint32_t bt_serve_sessions(const struct bt_serve *s)
{
    return s->n_sessions;
}

void bt_serve_destroy(struct bt_serve *s)
{
    if (s == NULL) {
        return;
    }
    while (!bt_list_empty(&s->sessions)) {
        struct session *x = BT_CONTAINER_OF(s->sessions.next, struct session, link);
        bt_rpc_stream_close(x->stream, BT_GRPC_UNAVAILABLE, "the kvstore stops", true);
        session_free(x);
    }
    bt_blocks_destroy(s->blocks);
    free(s->cluster);
    free(s->name);
    free(s->node);
    free(s);
}
