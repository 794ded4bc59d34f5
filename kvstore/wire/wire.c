/* The interface between the kvstore's core and the wire: start and end, peers to pull from,
 * receiving flows. Control thread, except bt_wire_kick. */
#include "kvstore/wire/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "kvstore/wire/wire_priv.h"

#define TIMEOUT_MS_MAX (1ull << 40) /* more means no limit */

/* ---- peers ---- */

static void peer_dial(struct bt_wire_peer *p)
{
    if (p->session == NULL && !p->w->destroying) {
        bt_timer_stop(p->w->loop, &p->retry);
        p->session = bt_wire_session_dial(p);
    }
}

static void on_redial(void *arg)
{
    struct bt_wire_peer *p = arg;
    if (bt_list_empty(&p->recvs)) {
        bt_wire_peer_idle(p);
    } else {
        peer_dial(p);
    }
}

static struct bt_wire_peer *peer_get(struct bt_wire *w, const struct bt_wire_peer_addr *a)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->peers) {
        struct bt_wire_peer *p = BT_CONTAINER_OF(i, struct bt_wire_peer, link);
        if (p->incarnation == a->incarnation && strcmp(p->name, a->name) == 0) {
            if (strcmp(p->rpc, a->rpc) != 0) {
                free(p->rpc);
                p->rpc = bt_strdup(a->rpc);
            }
            return p;
        }
    }
    struct bt_wire_peer *p = bt_calloc(1, sizeof(*p));
    p->w = w;
    p->name = bt_strdup(a->name);
    p->rpc = bt_strdup(a->rpc);
    p->incarnation = a->incarnation;
    p->backoff = (struct bt_rpc_backoff){BT_WIRE_BACKOFF_MS, BT_WIRE_BACKOFF_MAX, 0};
    bt_list_init(&p->recvs);
    bt_list_insert_tail(&w->peers, &p->link);
    return p;
}

void bt_wire_peer_idle(struct bt_wire_peer *p)
{
    /* When a retry is armed, its end calls this function again; until then the backoff is kept. */
    if (!p->pinned && p->session == NULL && bt_list_empty(&p->recvs) &&
        (p->retry.heap_pos == 0 || p->w->destroying)) {
        bt_timer_stop(p->w->loop, &p->retry);
        bt_list_remove(&p->link);
        free(p->name);
        free(p->rpc);
        free(p);
    }
}

void bt_wire_peer_up(struct bt_wire_peer *p)
{
    struct bt_list *i, *tmp;
    p->backoff.failures = 0;
    bt_list_for_each_safe (i, tmp, &p->recvs) {
        struct bt_wire_recv *r = BT_CONTAINER_OF(i, struct bt_wire_recv, link);
        if (r->session == NULL) {
            bt_wire_recv_attach(r, p->session);
        }
    }
}

void bt_wire_peer_lost(struct bt_wire_peer *p, bool was_up, bool final, const char *why)
{
    struct bt_list doomed;
    bt_list_init(&doomed);
    if (was_up || final || p->w->destroying) {
        while (!bt_list_empty(&p->recvs)) {
            struct bt_list *l = p->recvs.next;
            bt_list_remove(l);
            bt_list_insert_tail(&doomed, l);
        }
    }
    /* Armed before any callback, so that p is not freed and new flows wait. */
    bt_timer_start(p->w->loop, &p->retry, bt_rpc_backoff_next(&p->backoff), 0, on_redial, p);
    p->pinned = true;
    while (!bt_list_empty(&doomed)) {
        bt_wire_recv_fail(BT_CONTAINER_OF(doomed.next, struct bt_wire_recv, link), BT_ERR_PEER_LOST,
                          why);
    }
    p->pinned = false;
    bt_wire_peer_idle(p);
}

void bt_wire_peer_down(struct bt_wire *w, const char *name, uint64_t incarnation)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &w->sessions) {
        struct bt_wire_session *s = BT_CONTAINER_OF(i, struct bt_wire_session, link);
        if (!bt_wire_session_dead(s) && s->incarnation == incarnation &&
            strcmp(s->name, name) == 0) {
            bt_wire_session_fail(s, "etcd says that this kvstore has left the cluster",
                                 BT_GRPC_UNAVAILABLE);
            tmp = w->sessions.next; /* callbacks may have changed the lists; s is DEAD now */
        }
    }
    bt_list_for_each (i, &w->peers) {
        struct bt_wire_peer *p = BT_CONTAINER_OF(i, struct bt_wire_peer, link);
        if (p->incarnation == incarnation && strcmp(p->name, name) == 0) {
            bt_wire_peer_lost(p, false, true, "etcd says that this kvstore has left the cluster");
            return;
        }
    }
}

void bt_wire_count_up(struct bt_wire *w, int delta)
{
    w->n_up = (uint32_t)((int)w->n_up + delta);
    bt_metric_set(w->peers_up, w->n_up);
}

/* ---- receiving flows ---- */

static void on_deadline(void *arg)
{
    bt_wire_recv_fail(arg, BT_ERR_TIMEOUT, "deadline of the transfer");
}

static void on_reach(void *arg)
{
    bt_wire_recv_fail(arg, BT_ERR_PEER_LOST, "no session within two seconds");
}

void bt_wire_recv_begin(struct bt_wire_recv *r, const struct bt_wire_peer_addr *peer)
{
    struct bt_wire *w = r->w;
    r->peer = peer_get(w, peer);
    bt_list_insert_tail(&r->peer->recvs, &r->link);
    if (r->peer->session != NULL && bt_wire_session_up(r->peer->session)) {
        bt_wire_recv_attach(r, r->peer->session);
        return;
    }
    bt_timer_start(w->loop, &r->reach, BT_WIRE_REACH_MS, 0, on_reach, r);
    if (r->peer->retry.heap_pos == 0) {
        peer_dial(r->peer);
    }
}

struct bt_wire_recv *bt_wire_recv_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_flow_shape *shape, uint32_t first_block,
                                        const uint32_t *slots, const struct bt_kv_key *names,
                                        bt_flow_word_t *word, uint64_t timeout_ms,
                                        const struct bt_wire_recv_ops *ops, void *arg)
{
    uint32_t n = bt_flow_blocks(shape);
    BT_ASSERT(shape->block_tokens == w->layout.page_tokens && shape->n_tokens > 0 &&
              shape->n_layers == w->layout.n_layers && first_block <= n);
    struct bt_wire_recv *r = bt_calloc(1, sizeof(*r));
    r->w = w;
    r->ops = *ops;
    r->arg = arg;
    r->slots = bt_calloc(n, sizeof(*slots));
    r->names = bt_calloc(n, sizeof(*names));
    memcpy(r->slots, slots, n * sizeof(*slots));
    memcpy(r->names, names, n * sizeof(*names));
    r->x.obj.kind = BT_WX_RECV;
    r->x.shape = *shape;
    r->x.slots = r->slots;
    r->x.names = r->names;
    r->x.word = word;
    r->x.request = request;
    r->x.epoch = epoch;
    r->x.first_block = first_block;
    bt_flow_raise(word, epoch, bt_flow_resident_items(shape, first_block));
    if (timeout_ms != 0) {
        bt_timer_start(w->loop, &r->deadline, BT_MIN(timeout_ms, TIMEOUT_MS_MAX), 0, on_deadline,
                       r);
    }
    bt_wire_recv_begin(r, peer);
    return r;
}

/* ---- cards ---- */

bool bt_wire_card_ready(struct bt_wire *w, uint32_t card)
{
    struct bt_wire_card_state *k = &w->cards[card];
    char err[512];
    uint64_t now = bt_mono_ns();
    if (!k->started && k->link && now >= k->start_ns) {
        bt_status_t st = bt_wx_card_start(w->x, card, false, err, sizeof(err));
        k->started = st == BT_OK;
        if (st < 0) {
            k->start_ns = now + BT_WIRE_CARD_START_NS;
            BT_WARN("wire_card_start", "interface=%s why=%s", k->card.ifname, err);
        }
    }
    return k->started && (k->link || w->n_cards == 1);
}

uint32_t bt_wire_first_card(const struct bt_wire *w)
{
    uint32_t any = 0;
    for (uint32_t i = w->n_cards; i-- > 0;) {
        any = w->cards[i].started ? i : any;
    }
    for (uint32_t i = 0; i < w->n_cards; i++) {
        if (w->cards[i].started && w->cards[i].link) {
            return i;
        }
    }
    return any;
}

static void card_metrics(struct bt_metrics *m, struct bt_wire_card_state *k, struct bt_wx_card *x)
{
    char sent[128], received[128], *name = bt_metrics_label("interface", k->card.ifname);
    snprintf(sent, sizeof(sent), "%s,dir=\"sent\"", name);
    snprintf(received, sizeof(received), "%s,dir=\"received\"", name);
    x->sent_bytes = bt_metrics_counter(m, "baton_kv_card_bytes_total", sent);
    x->recv_bytes = bt_metrics_counter(m, "baton_kv_card_bytes_total", received);
    x->sent_segs = bt_metrics_counter(m, "baton_kv_card_segments_total", sent);
    x->recv_segs = bt_metrics_counter(m, "baton_kv_card_segments_total", received);
    k->up = bt_metrics_gauge(m, "baton_kv_card_up", name);
    k->paths = bt_metrics_gauge(m, "baton_kv_card_lanes", name);
    k->failures = bt_metrics_counter(m, "baton_kv_card_failures_total", name);
    free(name);
    bt_metric_set(k->up, k->good);
}

/* Linux sends to a network through one of its interfaces there, whichever address UCX is bound
 * to. */
static void warn_of_one_net(const struct bt_wire *w)
{
    for (uint32_t i = 0; i < w->n_cards; i++) {
        for (uint32_t j = 0; j < i; j++) {
            const struct bt_wire_card *a = &w->cards[j].card, *b = &w->cards[i].card;
            if (bt_nics_same_net(&a->nic, &b->nic)) {
                BT_WARN("wire_one_net", "interface=%s other=%s why=%s", a->ifname, b->ifname,
                        "both cards are on one network, so Linux sends over one of them unless "
                        "there are routing "
                        "rules by source address; give each card its own network");
            }
        }
    }
}

static bt_status_t start_cards(struct bt_wire *w, struct bt_metrics *metrics,
                               const char *const *listen, bool allow_routable,
                               struct bt_wx_config *xc, char *err, size_t err_cap)
{
    struct bt_wire_card cards[BT_NICS_MAX];
    bt_status_t st = bt_wire_cards(listen, allow_routable, cards, &w->n_cards, err, err_cap);
    for (uint32_t i = 0; i < w->n_cards && st == BT_OK; i++) {
        struct bt_wire_card_state *k = &w->cards[i];
        struct bt_wx_card *x = &xc->cards[i];
        k->card = cards[i];
        k->link = k->good = cards[i].nic.up;
        snprintf(x->ifname, sizeof(x->ifname), "%s", cards[i].ifname);
        x->ipv6 = cards[i].nic.family == 6;
        x->node = cards[i].nic.node;
        card_metrics(metrics, k, x);
        if (!k->link) {
            BT_WARN("wire_card_down", "interface=%s address=%s peer=- why=%s", k->card.ifname,
                    k->card.address, "link is down");
        }
    }
    xc->n_cards = w->n_cards;
    return st;
}

/* ---- life ---- */

static void on_event(void *arg, struct bt_wx_obj *o, uint32_t events)
{
    (void)arg;
    switch (o->kind) {
    case BT_WX_PATH:
        bt_wire_path_event(BT_CONTAINER_OF(o, struct bt_wire_path, x.obj), events);
        break;
    case BT_WX_CONN:
        bt_wire_session_event(BT_CONTAINER_OF(o, struct bt_wire_session, conn.obj), events);
        break;
    case BT_WX_SEND:
        bt_wire_send_event(BT_CONTAINER_OF(o, struct bt_wire_send, x.obj), events);
        break;
    case BT_WX_RECV:
        bt_wire_recv_event(BT_CONTAINER_OF(o, struct bt_wire_recv, x.obj), events);
        break;
    }
}

static void on_tick(void *arg)
{
    struct bt_wire *w = arg;
    struct bt_list *i, *tmp;
    uint64_t now = bt_mono_ns();
    bt_wire_links_tick(w);
    bt_list_for_each_safe (i, tmp, &w->sessions) {
        bt_wire_session_tick(BT_CONTAINER_OF(i, struct bt_wire_session, link), now);
    }
}

static void make_metrics(struct bt_wire *w, struct bt_metrics *m, struct bt_wx_metrics *x)
{
    static const double bounds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                    0.2,   0.5,   1,     2,    5,    10};
    x->sent_bytes = bt_metrics_counter(m, "baton_kv_sent_bytes_total", NULL);
    x->recv_bytes = bt_metrics_counter(m, "baton_kv_received_bytes_total", NULL);
    x->sent_segs = bt_metrics_counter(m, "baton_kv_segments_total", "dir=\"sent\"");
    x->recv_segs = bt_metrics_counter(m, "baton_kv_segments_total", "dir=\"received\"");
    x->resent_segs = bt_metrics_counter(m, "baton_kv_resent_segments_total", NULL);
    x->unordered = bt_metrics_counter(m, "baton_kv_unordered_messages_total", NULL);
    x->crc_errors = bt_metrics_counter(m, "baton_kv_crc_errors_total", NULL);
    const char *name = "baton_kv_dropped_messages_total";
    x->drop_unknown = bt_metrics_counter(m, name, "reason=\"unknown_stream\"");
    x->drop_stale = bt_metrics_counter(m, name, "reason=\"stale\"");
    x->drop_garbled = bt_metrics_counter(m, name, "reason=\"garbled\"");
    x->drop_duplicate = bt_metrics_counter(m, name, "reason=\"duplicate\"");
    w->peers_up = bt_metrics_gauge(m, "baton_kv_peer_sessions", NULL);
    w->sessions_lost = bt_metrics_counter(m, "baton_kv_peer_sessions_lost_total", NULL);
    w->flows_failed = bt_metrics_counter(m, "baton_kv_flows_failed_total", NULL);
    w->flow_seconds =
        bt_metrics_histogram(m, "baton_kv_transfer_seconds", NULL, bounds, BT_ARRAY_LEN(bounds));
}

/* The host:port where KV over gRPC is received. */
static bt_status_t grpc_address(const struct bt_wire *w, char *out, size_t cap, char *err,
                                size_t err_cap)
{
    const struct bt_wire_card *card = &w->cards[0].card;
    if (w->n_cards > 1) {
        snprintf(
            err, err_cap,
            "kvstore.wire.listen: kvstore.wire.transport: grpc uses one address; give %s alone",
            card->address);
        return BT_ERR_CONFIG;
    }
    snprintf(out, cap, card->nic.family == 6 ? "[%s]:%d" : "%s:%d", card->address, card->port);
    return BT_OK;
}

bt_status_t bt_wire_create(struct bt_loop *loop, struct bt_rpc *rpc, struct bt_rpc_server *server,
                           struct bt_slab *slab, const struct bt_wire_config *conf,
                           const struct bt_wire_ops *ops, void *ops_arg, struct bt_metrics *metrics,
                           struct bt_wire **w_p, char *err, size_t err_cap)
{
    struct bt_wx_config xc = {
        .slab = slab,
        .bytes_in_flight_max =
            conf->bytes_in_flight_max != 0 ? conf->bytes_in_flight_max : BT_WIRE_IN_FLIGHT_BYTES,
        .crcs = conf->crcs,
        .loop = loop,
        .on_event = on_event,
    };
    struct bt_wire *w = bt_calloc(1, sizeof(*w));
    char grpc_listen[80];
    /* With certificates a peer needs one to read or write, so any address may be used. */
    bool anywhere = conf->allow_routable || (conf->over_grpc && conf->tls != NULL);
    bt_status_t st = start_cards(w, metrics, conf->listen, anywhere, &xc, err, err_cap);
    if (st == BT_OK) {
        st = bt_wire_member_init(w, conf, err, err_cap);
    }
    if (st == BT_OK && conf->over_grpc) {
        st = grpc_address(w, grpc_listen, sizeof(grpc_listen), err, err_cap);
        xc.grpc_listen = grpc_listen;
        xc.tls = conf->tls;
    }
    if (st != BT_OK) {
        free(w);
        return st;
    }
    w->loop = loop;
    w->rpc = rpc;
    w->slab = slab;
    w->cluster = bt_strdup(conf->cluster);
    w->name = bt_strdup(conf->name);
    w->incarnation = conf->incarnation;
    w->idle_ns = (conf->idle_ms != 0 ? conf->idle_ms : BT_WIRE_IDLE_MS) * 1000000ull;
    w->layout = *conf->layout;
    w->root = *conf->root;
    w->transport = conf->over_grpc ? BATON__KV_TRANSPORT__GRPC : BATON__KV_TRANSPORT__UCX;
    w->ops = *ops;
    w->ops_arg = ops_arg;
    bt_list_init(&w->peers);
    bt_list_init(&w->sessions);
    make_metrics(w, metrics, &xc.m);
    if (!conf->over_grpc) {
        xc.process_restarts =
            bt_metrics_counter(metrics, "baton_kv_wire_process_losses_total", NULL);
    }
    xc.layout = &w->layout;
    xc.arg = w;
    w->x = bt_wx_create(&xc);
    for (uint32_t i = 0; i < w->n_cards && st == BT_OK; i++) {
        if (w->cards[i].link || w->n_cards == 1) {
            st = bt_wx_card_start(w->x, i, true, err, err_cap);
            w->cards[i].started = st == BT_OK;
        }
    }
    if (st != BT_OK) {
        bt_wx_destroy(w->x);
        free(w->cluster);
        free(w->name);
        free(w);
        return st;
    }
    bt_loop_short_slices(BT_WIRE_SLICE_US); /* received events wait for this thread */
    bt_rpc_server_stream(server, BT_WIRE_METHOD, BT_WIRE_ROLE, bt_wire_session_accept, w);
    bt_timer_start(loop, &w->tick, BT_WIRE_TICK_MS, BT_WIRE_TICK_MS, on_tick, w);
    for (uint32_t i = 0; i < w->n_cards; i++) {
        BT_INFO("wire_start", "transport=%s listen=%s interface=%s numa=%d in_flight_max=%llu",
                !conf->over_grpc    ? "ucx"
                : conf->tls == NULL ? "grpc-plaintext"
                                    : "grpc-tls",
                w->cards[i].card.address, w->cards[i].card.ifname, w->cards[i].card.nic.node,
                (unsigned long long)xc.bytes_in_flight_max);
    }
    warn_of_one_net(w);
    *w_p = w;
    return BT_OK;
}

void bt_wire_destroy(struct bt_wire *w)
{
    struct bt_list *i, *tmp;
    if (w == NULL) {
        return;
    }
    w->destroying = true;
    bt_timer_stop(w->loop, &w->tick);
    bt_list_for_each_safe (i, tmp, &w->sessions) {
        bt_wire_session_fail(BT_CONTAINER_OF(i, struct bt_wire_session, link), "shutting down",
                             BT_GRPC_UNAVAILABLE);
    }
    while (!bt_list_empty(&w->peers)) { /* peers that wait for their next dial */
        bt_wire_peer_lost(BT_CONTAINER_OF(w->peers.next, struct bt_wire_peer, link), false, true,
                          "shutting down");
    }
    bt_wx_destroy(w->x); /* calls on_quiet and send_end of the remaining flows */
    BT_ASSERT(bt_list_empty(&w->sessions) && bt_list_empty(&w->peers));
    free(w->cluster);
    free(w->name);
    free(w);
}

void bt_wire_kick(struct bt_wire *w)
{
    bt_wx_kick(w->x);
}
