/* Sessions with conductors (common/rpc/session.h). A session owns the reservations that its
 * messages made; they end with the session. Control thread. */
#include "kvstore/serve/serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/log/log.h"
#include "common/rpc/session.h"
#include "common/rpc/session_hello.h"
#include "kvstore/cache/tier.h"

struct bt_serve_session {
    struct bt_list link;
    struct bt_serve *s;
    struct bt_rpc_session rpc;
    char *name;                      /* of the conductor, known after its hello */
    uint64_t incarnation;            /* of the conductor */
    uint64_t pins_version;           /* the last one sent to the conductor; 0: none */
    struct bt_blocks_reader *blocks; /* NULL: none */
};

struct bt_serve {
    struct bt_serve_config c;
    char *cluster, *name, *node;
    struct bt_rpc_identity self;
    struct bt_grants *grants;
    struct bt_blocks *blocks;
    struct bt_list sessions;
    uint32_t n_sessions;
    struct bt_timer tick;
};

void bt_serve_to_session(void *session, const Baton__FromKvstore *msg)
{
    struct bt_serve_session *x = session;
    (void)bt_rpc_session_send(&x->rpc, &msg->base);
}

/* Sends how much of each pin is protected, if that has changed since the conductor was told. */
static void send_pins(struct bt_serve_session *x)
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
    bt_serve_to_session(x, &m);
    free(list);
    free(items);
    free(states);
}

static void say_heartbeat(void *arg, uint64_t seq)
{
    struct bt_serve_session *x = arg;
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
    if (x->s->c.tier != NULL) {
        struct bt_ssd_stats ssd;
        bt_ssd_stats(bt_tier_ssd(x->s->c.tier), &ssd);
        p.ssd_slots = ssd.slots;
        p.ssd_blocks = ssd.blocks;
    }
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
    h.seq = seq;
    h.pool = &p;
    m.m_case = BATON__FROM_KVSTORE__M_HEARTBEAT;
    m.heartbeat = &h;
    bt_serve_to_session(x, &m);
    send_pins(x);
}

/* ---- callbacks of the session ---- */

static void say_hello(void *arg)
{
    struct bt_serve_session *x = arg;
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__SessionHello h;
    bt_rpc_hello_fill(&x->s->self, x->incarnation, &h);
    m.m_case = BATON__FROM_KVSTORE__M_HELLO;
    m.hello = &h;
    bt_serve_to_session(x, &m);
}

static const char *on_hello(void *arg, const void *hello, char *why, size_t cap)
{
    struct bt_serve_session *x = arg;
    const struct bt_serve *s = x->s;
    const Baton__SessionHello *h = hello;
    struct bt_rpc_hello theirs = bt_rpc_hello_read(h);
    x->name = bt_strdup(h->name);
    x->incarnation = h->incarnation;
    bt_hello_fault_t fault = bt_rpc_hello_compare(
        &s->self, &theirs, 0, bt_rpc_stream_peer_is(x->rpc.stream, "conductor", h->node));
    return bt_rpc_hello_why(fault, &s->self, &theirs, 0, why, cap);
}

static void on_up(void *arg)
{
    struct bt_serve_session *x = arg;
    BT_INFO("session_up", "conductor=%s incarnation=%016llx", x->name,
            (unsigned long long)x->incarnation);
    /* A conductor plans nothing here before it knows the state of the pool. */
    bt_rpc_session_beat(&x->rpc);
}

static void on_message(void *arg, ProtobufCMessage *msg)
{
    struct bt_serve_session *x = arg;
    const Baton__ToKvstore *m = (const Baton__ToKvstore *)msg;
    switch (m->m_case) {
    case BATON__TO_KVSTORE__M_RESERVE: bt_grants_reserve(x->s->grants, x, m->reserve); break;
    case BATON__TO_KVSTORE__M_RELEASE:
        bt_grants_release(x->s->grants, x, m->release->request, m->release->epoch);
        break;
    case BATON__TO_KVSTORE__M_REPLICATE: bt_grants_replicate(x->s->grants, x, m->replicate); break;
    case BATON__TO_KVSTORE__M_HELLO:
    case BATON__TO_KVSTORE__M_HEARTBEAT:
    case BATON__TO_KVSTORE__M__NOT_SET: /* a message of a later version */
    case _BATON__TO_KVSTORE__M__CASE_IS_INT_SIZE:
    default: break;
    }
}

static void on_end(void *arg, const struct bt_rpc_session_end *e)
{
    struct bt_serve_session *x = arg;
    const char *name = x->name != NULL ? x->name : "?";
    if (e->cause == BT_RPC_SESSION_CLOSED) {
        BT_INFO("session_down", "conductor=%s code=%d why=%s", name, e->code, e->why);
    } else if (e->cause != BT_RPC_SESSION_STOPPED) {
        BT_WARN("session_down", "conductor=%s why=%s", name, e->why);
    }
    bt_list_remove(&x->link);
    x->s->n_sessions--;
    bt_blocks_close(x->blocks, "its session has ended");
    if (e->was_up) {
        bt_grants_session_end(x->s->grants, x);
    }
    free(x->name);
    free(x);
}

static const struct bt_rpc_session_rules rules = {
    .tick_ms = BT_RPC_SESSION_HEARTBEAT_MS,
    .flush = UINT32_MAX,
};
static const struct bt_rpc_session_ops session_ops = {
    .incoming = &baton__to_kvstore__descriptor,
    .say_hello = say_hello,
    .say_heartbeat = say_heartbeat,
    .on_hello = on_hello,
    .on_up = on_up,
    .on_message = on_message,
    .on_end = on_end,
};

static void on_tick(void *arg)
{
    struct bt_serve *s = arg;
    uint64_t now = bt_mono_ns();
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->sessions) {
        (void)bt_rpc_session_tick(&BT_CONTAINER_OF(i, struct bt_serve_session, link)->rpc, now);
    }
}

/* ---- streams of block events ---- */

static void on_blocks_gone(void *arg)
{
    struct bt_serve_session *x = arg;
    x->blocks = NULL;
}

/* Block events belong to a session: a peer gets them only after its hello over this connection, and
 * only once. */
static void on_blocks_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_serve *s = arg;
    struct bt_list *i;
    bt_list_for_each (i, &s->sessions) {
        struct bt_serve_session *x = BT_CONTAINER_OF(i, struct bt_serve_session, link);
        if (bt_rpc_session_met(&x->rpc) && x->blocks == NULL &&
            bt_rpc_stream_same_connection(x->rpc.stream, stream)) {
            x->blocks = bt_blocks_open(s->blocks, stream, on_blocks_gone, x);
            return;
        }
    }
    BT_WARN("blocks_refused", "why=%s",
            "its connection has no session, or one with a stream of block events already");
    bt_rpc_stream_close(stream, BT_GRPC_FAILED_PRECONDITION,
                        "block events need a session: send SessionHello on a Session stream of "
                        "this connection first, and read only one stream of events",
                        true);
}

static void on_accept(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_serve *s = arg;
    if (s->n_sessions >= BT_SERVE_SESSIONS_MAX) {
        bt_rpc_stream_close(stream, BT_GRPC_EXHAUSTED, "too many sessions of conductors", true);
        return;
    }
    struct bt_serve_session *x = bt_calloc(1, sizeof(*x));
    x->s = s;
    bt_list_insert_tail(&s->sessions, &x->link);
    s->n_sessions++;
    bt_rpc_session_init(&x->rpc, s->c.loop, false, &rules, &session_ops, x);
    bt_rpc_session_accept(&x->rpc, stream);
}

struct bt_serve *bt_serve_create(const struct bt_serve_config *c)
{
    struct bt_serve *s = bt_calloc(1, sizeof(*s));
    s->c = *c;
    s->cluster = bt_strdup(c->cluster);
    s->name = bt_strdup(c->name);
    s->node = bt_strdup(c->node);
    s->self = (struct bt_rpc_identity){.cluster = s->cluster,
                                       .name = s->name,
                                       .node = s->node,
                                       .incarnation = c->incarnation,
                                       .root = &s->c.root,
                                       .layout_id = c->layout_id};
    bt_list_init(&s->sessions);
    s->blocks = bt_blocks_create(c->loop, c->cache->index, c->tier, c->incarnation);
    bt_timer_start(c->loop, &s->tick, rules.tick_ms, rules.tick_ms, on_tick, s);
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

void bt_serve_destroy(struct bt_serve *s)
{
    if (s == NULL) {
        return;
    }
    bt_timer_stop(s->c.loop, &s->tick);
    while (!bt_list_empty(&s->sessions)) {
        struct bt_serve_session *x =
            BT_CONTAINER_OF(s->sessions.next, struct bt_serve_session, link);
        bt_rpc_session_end(&x->rpc, BT_RPC_SESSION_STOPPED, BT_GRPC_UNAVAILABLE,
                           "the kvstore stops");
    }
    bt_blocks_destroy(s->blocks);
    free(s->cluster);
    free(s->name);
    free(s->node);
    free(s);
}
