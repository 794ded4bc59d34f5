/* The paths of a session, on the control thread: which two cards a path connects, how it is made
 * (by the dialer; the first path is made with the hellos), which messages are sent again after its
 * loss, and when the dialer tries again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "kvstore/wire/wire_priv.h"

#define ANSWER_NS    (2000ull * 1000000) /* from LaneOpen to LaneOpened */
#define RETRY_NS     (500ull * 1000000)
#define RETRY_MAX_NS (5000ull * 1000000)
#define PATHS_MAX    (4u * BT_NICS_MAX) /* of a session, including paths that are ending */
/* A peer that ends loses its paths one after the other within this time. */
#define MISSED_NS     (1000ull * 1000000)
#define HAS_BYTES_MAX (8u << 20) /* half of a gRPC message */

/* ---- the state of a card ---- */

static void card_changed(struct bt_wire *w, uint32_t card, const char *peer, const char *why)
{
    struct bt_wire_card_state *k = &w->cards[card];
    bool good = k->link && k->missed_by == 0;
    if (good == k->good) {
        return;
    }
    k->good = good;
    bt_metric_set(k->up, good);
    if (!good) {
        bt_metric_add(k->failures, 1);
        BT_WARN("wire_card_down", "interface=%s address=%s peer=%s why=%s", k->card.ifname,
                k->card.address, peer, why);
    } else {
        BT_INFO("wire_card_up", "interface=%s address=%s", k->card.ifname, k->card.address);
    }
}

/* The session has lost its path over the card. If the session then goes on for a while without a
 * path there, the card counts as bad. */
static void card_missed(struct bt_wire_session *s, uint32_t card, const char *why)
{
    struct bt_wire_missed *m = &s->missed[card];
    if (m->since_ns == 0) {
        m->since_ns = bt_mono_ns();
        snprintf(m->why, sizeof(m->why), "%.*s", (int)sizeof(m->why) - 1, why);
    }
}

static void card_blame(struct bt_wire_session *s, uint32_t card, uint64_t now_ns)
{
    struct bt_wire_missed *m = &s->missed[card];
    if (m->since_ns != 0 && !m->told && now_ns > m->since_ns + MISSED_NS) {
        m->told = true;
        s->w->cards[card].missed_by++;
        card_changed(s->w, card, s->name, m->why);
    }
}

static void card_forgive(struct bt_wire_session *s, uint32_t card)
{
    s->w->cards[card].missed_by -= s->missed[card].told;
    s->missed[card] = (struct bt_wire_missed){.since_ns = 0};
}

/* ---- making and ending a path ---- */

static struct bt_wire_path *path_new(struct bt_wire_session *s, uint32_t number, uint32_t card)
{
    struct bt_wire_path *l = bt_calloc(1, sizeof(*l));
    l->session = s;
    l->begun_ns = bt_mono_ns();
    l->x.obj.kind = BT_WX_PATH;
    l->x.conn = &s->conn;
    l->x.number = number;
    l->x.card = card;
    bt_random(&l->x.nonce, sizeof(l->x.nonce));
    bt_list_insert_tail(&s->paths, &l->link);
    s->n_paths++;
    bt_wx_command(s->w->x, &l->x.obj, BT_WX_CMD_OPEN);
    return l;
}

static void path_free(struct bt_wire_path *l)
{
    struct bt_wire_session *s = l->session;
    while (l->x.has != NULL) {
        struct bt_wx_has *h = l->x.has;
        l->x.has = h->next;
        free(h);
    }
    bt_list_remove(&l->link);
    free(l->x.peer_address);
    free(l->x.address);
    free(l);
    s->n_paths--;
    bt_wire_session_unref_path(s);
}

static uint32_t live_paths(const struct bt_wire_session *s)
{
    const struct bt_list *i;
    uint32_t n = 0;
    bt_list_for_each (i, &s->paths) {
        n += !BT_CONTAINER_OF(i, struct bt_wire_path, link)->stopped;
    }
    return n;
}

static struct bt_wire_path *path_of(const struct bt_wire_session *s, uint32_t number)
{
    const struct bt_list *i;
    bt_list_for_each (i, &s->paths) {
        struct bt_wire_path *l = BT_CONTAINER_OF(i, struct bt_wire_path, link);
        if (l->x.number == number) {
            return l;
        }
    }
    return NULL;
}

static void send_path_close(struct bt_wire_path *l, const char *why)
{
    Baton__LaneClose c = BATON__LANE_CLOSE__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    c.lane = l->x.number;
    c.detail = (char *)(uintptr_t)why;
    m.m_case = BATON__PEER_MSG__M_LANE_CLOSE;
    m.lane_close = &c;
    bt_wire_session_send(l->session, &m);
}

/* Tells the sender which segments the receiver got on a path that has ended. false: the list is too
 * long for one message. */
static bool send_path_end(struct bt_wire_path *l)
{
    Baton__LaneEnd e = BATON__LANE_END__INIT;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    size_t n = 0, bytes = 0;
    for (struct bt_wx_has *h = l->x.has; h != NULL; h = h->next) {
        n++;
        bytes += h->n;
    }
    if (bytes > HAS_BYTES_MAX || n > BT_RANGE_FLOWS_MAX) {
        return false;
    }
    Baton__FlowHas *rows = bt_calloc(n + 1, sizeof(*rows)),
                   **list = bt_calloc(n + 1, sizeof(*list));
    for (struct bt_wx_has *h = l->x.has; h != NULL; h = h->next) {
        Baton__FlowHas *row = list[e.n_flows] = &rows[e.n_flows];
        baton__flow_has__init(row);
        row->stream = h->stream;
        row->item = h->item;
        row->segments.data = h->bits;
        row->segments.len = h->n;
        e.n_flows++;
    }
    e.lane = l->x.number;
    e.flows = list;
    m.m_case = BATON__PEER_MSG__M_LANE_END;
    m.lane_end = &e;
    bt_wire_session_send(l->session, &m);
    free(rows);
    free(list);
    return true;
}

/* Takes the path out of use. tell: the peer does not know yet. */
static void path_stop(struct bt_wire_path *l, bool tell, const char *why)
{
    struct bt_wire_session *s = l->session;
    if (l->stopped) {
        return;
    }
    l->stopped = true;
    if (l->up) {
        bt_metric_set(s->w->cards[l->x.card].paths, --s->w->cards[l->x.card].n_paths);
    }
    for (uint32_t i = 0; i < s->n_rails; i++) {
        struct bt_wire_rail *r = &s->rails[i];
        if (r->path == l) {
            r->path = NULL;
            r->wait_ns = l->up ? RETRY_NS : BT_MIN(r->wait_ns * 2, RETRY_MAX_NS);
            r->retry_ns = bt_mono_ns() + r->wait_ns;
        }
    }
    if (tell && s->n_peer_cards > 0) {
        send_path_close(l, why);
    }
    bt_wx_command(s->w->x, &l->x.obj, BT_WX_CMD_STOP);
}

/* A path has failed, here or at the peer. The session goes on with its other paths, if it has
 * any. */
static void path_failed(struct bt_wire_path *l, bool tell, const char *why, int code)
{
    struct bt_wire_session *s = l->session;
    char text[200];
    if (l->stopped || bt_wire_session_dead(s)) {
        return;
    }
    snprintf(text, sizeof(text), "%s", why);
    path_stop(l, tell, text);
    if (live_paths(s) > 0) {
        card_missed(s, l->x.card, text);
    } else if (s->n_peer_cards == 0 || s->dialer || bt_wire_session_up(s)) {
        bt_wire_session_fail(s, text, code);
    } else { /* the dialer may still find a path when it has this side's hello */
        bt_wire_session_ready(s, NULL);
    }
}

void bt_wire_paths_stop(struct bt_wire_session *s)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->paths) {
        struct bt_wire_path *l = BT_CONTAINER_OF(i, struct bt_wire_path, link);
        path_stop(l, false, "");
        if (l->gone && !l->resending) { /* the path was waiting for the peer's answer */
            path_free(l);
        }
    }
    for (uint32_t card = 0; card < s->w->n_cards; card++) {
        card_forgive(s, card);
        if (s->w->cards[card].n_paths > 0) { /* otherwise the card has not proved itself yet */
            card_changed(s->w, card, s->name, "");
        }
    }
}

/* ---- the dialer's rails: pairs of cards with or without a path ---- */

static void rail_open(struct bt_wire_session *s, struct bt_wire_rail *r)
{
    if (s->n_paths < PATHS_MAX && bt_wire_card_ready(s->w, r->local)) {
        r->path = path_new(s, ++s->next_path, r->local);
    } else {
        r->wait_ns = BT_MIN(r->wait_ns * 2, RETRY_MAX_NS);
        r->retry_ns = bt_mono_ns() + r->wait_ns;
    }
}

void bt_wire_paths_dial(struct bt_wire_session *s)
{
    uint32_t card = bt_wire_first_card(s->w);
    struct bt_wire_path *l = path_new(s, 0, card);
    s->rails[0] = (struct bt_wire_rail){.local = card, .path = l, .wait_ns = RETRY_NS};
    s->n_rails = 1; /* the others follow when the peer's cards are known */
}

static bool take_cards(struct bt_wire_session *s, const Baton__PeerHello *h)
{
    if (h->n_cards > 0 && h->card >= h->n_cards) { /* common/rpc/peer.def limits n_cards */
        return false;
    }
    for (size_t i = 0; i < h->n_cards; i++) {
        struct bt_nic *nic = &s->peer_cards[i];
        size_t n = h->cards[i]->address.len;
        if ((n != 4 && n != 16) || h->cards[i]->prefix > n * 8) {
            return false;
        }
        *nic = (struct bt_nic){.family = n == 4 ? 4 : 6,
                               .prefix = (uint8_t)h->cards[i]->prefix,
                               .node = -1,
                               .up = h->cards[i]->up};
        memcpy(nic->addr, h->cards[i]->address.data, n);
    }
    s->n_peer_cards = (uint32_t)h->n_cards;
    return true;
}

static uint32_t match(const struct bt_wire_session *s, struct bt_nic_pair *pairs)
{
    struct bt_nic own[BT_NICS_MAX];
    for (uint32_t i = 0; i < s->w->n_cards; i++) {
        own[i] = s->w->cards[i].card.nic;
        own[i].up = s->w->cards[i].link;
    }
    return bt_nics_match(own, s->w->n_cards, s->peer_cards, s->n_peer_cards, pairs);
}

static void connect_path(struct bt_wire_path *l, const ProtobufCBinaryData *address, uint64_t nonce)
{
    l->x.nonce_peer = nonce;
    l->x.peer_address = bt_malloc(address->len);
    l->x.peer_address_len = address->len;
    memcpy(l->x.peer_address, address->data, address->len);
}

/* The listener's cards are known now: finds the listener's card of the first path, and other
 * pairs. */
static const char *dialer_rails(struct bt_wire_session *s, const Baton__PeerHello *h)
{
    struct bt_nic_pair pairs[BT_NICS_MAX];
    struct bt_wire_path *first = s->rails[0].path;
    bool has_first = h->ucx_address.len > 0;
    uint32_t own = s->rails[0].local, n = match(s, pairs), to = has_first ? 1 : 0;
    if (first == NULL) { /* the path was lost before the hello came */
        to = 0;
    } else if (has_first) {
        s->rails[0].remote = h->card;
        connect_path(first, &h->ucx_address, h->nonce);
        bt_wx_command(s->w->x, &first->x.obj, BT_WX_CMD_CONNECT);
    } else {
        path_stop(first, false, "");
    }
    for (uint32_t i = 0; i < n; i++) {
        if (to > 0 && (pairs[i].local == own || pairs[i].remote == h->card)) {
            continue; /* the first path uses this card */
        }
        s->rails[to++] = (struct bt_wire_rail){
            .local = pairs[i].local, .remote = pairs[i].remote, .wait_ns = RETRY_NS};
    }
    s->n_rails = to;
    for (uint32_t i = 0; i < s->n_rails; i++) {
        if (s->rails[i].path == NULL) {
            rail_open(s, &s->rails[i]);
        }
    }
    return live_paths(s) > 0 ? NULL
                             : "no network card in kvstore.wire.listen can reach a card of the "
                               "peer; give addresses of a common network";
}

const char *bt_wire_paths_hello(struct bt_wire_session *s, const Baton__PeerHello *h)
{
    if (!take_cards(s, h)) {
        return "the peer's hello has a malformed list of network cards";
    }
    if (s->dialer) {
        return dialer_rails(s, h);
    }
    struct bt_nic_pair pairs[BT_NICS_MAX];
    uint32_t card = bt_wire_first_card(s->w);
    if (s->n_peer_cards > 0 &&
        s->n_peer_cards + s->w->n_cards > 2) { /* otherwise there is only one pair */
        uint32_t n = match(s, pairs);
        card = BT_NICS_MAX;
        for (uint32_t i = 0; i < n; i++) {
            card = pairs[i].remote == h->card ? pairs[i].local : card;
        }
    }
    if (card == BT_NICS_MAX || !bt_wire_card_ready(s->w, card)) {
        return NULL; /* the dialer tries other pairs */
    }
    connect_path(path_new(s, 0, card), &h->ucx_address, h->nonce);
    return NULL;
}

/* ---- messages ---- */

void bt_wire_path_asked(struct bt_wire_session *s, const Baton__LaneOpen *o)
{
    if (o->lane <= s->next_path || s->n_paths >= PATHS_MAX) {
        bt_wire_session_fail(s, "malformed LaneOpen", BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    struct bt_wire_way way = {.path = o->lane,
                              .card = o->card,
                              .nonce = o->nonce,
                              .address = o->ucx_address.data,
                              .address_len = o->ucx_address.len};
    if (!bt_wire_member_is(s, &way, &o->address_mac)) {
        bt_wire_session_fail(s, "the peer's LaneOpen has no proof that it belongs to this cluster",
                             BT_GRPC_PERMISSION_DENIED);
        return;
    }
    s->next_path = o->lane;
    if (o->card >= s->w->n_cards || !bt_wire_card_ready(s->w, o->card)) {
        struct bt_wire_path no = {.session = s, .x.number = o->lane};
        send_path_close(&no, "that card is down here");
        return;
    }
    connect_path(path_new(s, o->lane, o->card), &o->ucx_address, o->nonce);
}

void bt_wire_path_answered(struct bt_wire_session *s, const Baton__LaneOpened *o)
{
    struct bt_wire_path *l = path_of(s, o->lane);
    if (l == NULL || l->stopped) {
        return; /* given up, but the message was already on its way */
    }
    if (l->x.peer_address != NULL) {
        bt_wire_session_fail(s, "malformed LaneOpened", BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    struct bt_wire_way way = {.path = o->lane,
                              .nonce = o->nonce,
                              .address = o->ucx_address.data,
                              .address_len = o->ucx_address.len};
    if (!bt_wire_member_is(s, &way, &o->address_mac)) {
        bt_wire_session_fail(s,
                             "the peer's LaneOpened has no proof that it belongs to this cluster",
                             BT_GRPC_PERMISSION_DENIED);
        return;
    }
    connect_path(l, &o->ucx_address, o->nonce);
    bt_wx_command(s->w->x, &l->x.obj, BT_WX_CMD_CONNECT);
}

void bt_wire_path_closed(struct bt_wire_session *s, const Baton__LaneClose *c)
{
    struct bt_wire_path *l = path_of(s, c->lane);
    char text[200];
    if (l != NULL) {
        snprintf(text, sizeof(text), "peer: %s", c->detail);
        path_failed(l, false, text, BT_GRPC_UNAVAILABLE);
    }
}

static void path_resend(struct bt_wire_path *l)
{
    if (l->gone && l->ended && !l->resending) {
        l->resending = true;
        bt_wx_command(l->session->w->x, &l->x.obj, BT_WX_CMD_RESEND);
    }
}

void bt_wire_path_ended(struct bt_wire_session *s, const Baton__LaneEnd *e)
{
    struct bt_wire_path *l = path_of(s, e->lane);
    size_t bytes = 0;
    if (l == NULL) { /* this side never had this path */
        return;
    }
    for (size_t i = 0; i < e->n_flows; i++) {
        bytes += e->flows[i]->segments.len;
    }
    if (l->ended || bytes > HAS_BYTES_MAX) {
        bt_wire_session_fail(s, "malformed LaneEnd", BT_GRPC_INVALID_ARGUMENT);
        return;
    }
    l->ended = true;
    for (size_t i = 0; i < e->n_flows; i++) {
        const Baton__FlowHas *f = e->flows[i];
        struct bt_wx_has *h = bt_malloc(sizeof(*h) + f->segments.len);
        *h = (struct bt_wx_has){
            .next = l->x.has, .stream = f->stream, .item = f->item, .n = f->segments.len};
        if (h->n > 0) {
            memcpy(h->bits, f->segments.data, h->n);
        }
        l->x.has = h;
    }
    if (!l->stopped) {
        path_failed(l, false, "the peer ended this path", BT_GRPC_UNAVAILABLE);
    } else {
        path_resend(l);
    }
}

/* ---- events of the transfer thread ---- */

/* Sends the address of this side's end of a path: the dialer asks for a path to one of the peer's
 * cards, the listener answers. */
static void send_address(struct bt_wire_path *l)
{
    struct bt_wire_session *s = l->session;
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    Baton__LaneOpen ask = BATON__LANE_OPEN__INIT;
    Baton__LaneOpened answer = BATON__LANE_OPENED__INIT;
    uint8_t mac[BT_WIRE_MAC_BYTES];
    ask.lane = answer.lane = l->x.number;
    ask.nonce = answer.nonce = l->x.nonce;
    ask.ucx_address = answer.ucx_address =
        (ProtobufCBinaryData){.data = l->x.address, .len = l->x.address_len};
    for (uint32_t i = 0; i < s->n_rails; i++) { /* empty for a listener */
        ask.card = s->rails[i].path == l ? s->rails[i].remote : ask.card;
    }
    if (s->w->has_secret) {
        struct bt_wire_way way = {.path = l->x.number,
                                  .card = s->dialer ? ask.card : 0,
                                  .nonce = l->x.nonce,
                                  .address = l->x.address,
                                  .address_len = l->x.address_len};
        bt_wire_member_mac(s, true, &way, mac);
        ask.address_mac = answer.address_mac =
            (ProtobufCBinaryData){.data = mac, .len = sizeof(mac)};
    }
    if (s->dialer) {
        m.m_case = BATON__PEER_MSG__M_LANE_OPEN;
        m.lane_open = &ask;
    } else {
        m.m_case = BATON__PEER_MSG__M_LANE_OPENED;
        m.lane_opened = &answer;
    }
    bt_wire_session_send(s, &m);
}

static void on_ready(struct bt_wire_path *l)
{
    struct bt_wire_session *s = l->session;
    if (!s->dialer) {
        bt_wx_command(s->w->x, &l->x.obj, BT_WX_CMD_CONNECT);
    }
    if (l->x.number == 0) {
        bt_wire_session_ready(s, l);
    } else {
        send_address(l);
    }
}

static void on_proven(struct bt_wire_path *l)
{
    struct bt_wire_session *s = l->session;
    struct bt_wire_card_state *k = &s->w->cards[l->x.card];
    l->up = true;
    bt_metric_set(k->paths, ++k->n_paths);
    for (uint32_t i = 0; i < s->n_rails; i++) {
        if (s->rails[i].path == l) {
            s->rails[i].wait_ns = RETRY_NS;
        }
    }
    card_forgive(s, l->x.card);
    card_changed(s->w, l->x.card, s->name, "");
    bt_rpc_session_joined(&s->rpc);
}

static void on_stopped(struct bt_wire_path *l)
{
    struct bt_wire_session *s = l->session;
    l->gone = true;
    if (bt_wire_session_dead(s) || s->n_peer_cards == 0) {
        path_free(l);
    } else if (s->dialer) {
        s->n_flows++; /* keeps s alive until the end of this function */
        bool told = send_path_end(l);
        path_free(l); /* before the session ends and frees its paths */
        if (!told) {
            bt_wire_session_fail(s,
                                 "a path failed, and too many segments are under way to send them "
                                 "again over another",
                                 BT_GRPC_UNAVAILABLE);
        }
        bt_wire_session_unref(s);
    } else {
        path_resend(l);
    }
}

void bt_wire_path_event(struct bt_wire_path *l, uint32_t events)
{
    if ((events & BT_WX_EV_READY) && !l->stopped) {
        on_ready(l);
    }
    if ((events & BT_WX_EV_PROVEN) && !l->stopped) {
        on_proven(l);
    }
    if ((events & BT_WX_EV_LOST) && !l->stopped) {
        path_failed(l, true, l->x.why, BT_GRPC_UNAVAILABLE);
        return; /* STOPPED cannot be among these events, since STOP was sent only now */
    }
    if (events & BT_WX_EV_STOPPED) {
        on_stopped(l);
    } else if (events & BT_WX_EV_RESENT) {
        path_free(l);
    }
}

/* ---- time ---- */

void bt_wire_paths_tick(struct bt_wire_session *s, uint64_t now_ns)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &s->paths) {
        struct bt_wire_path *l = BT_CONTAINER_OF(i, struct bt_wire_path, link);
        bool link = s->w->cards[l->x.card].link;
        if (l->stopped) {
            continue;
        }
        if (l->x.number != 0 && l->x.peer_address == NULL && now_ns > l->begun_ns + ANSWER_NS) {
            path_failed(l, true, "the peer did not answer LaneOpen in time", BT_GRPC_UNAVAILABLE);
        } else if (!link && s->w->n_cards > 1) {
            path_failed(l, true, "link is down", BT_GRPC_UNAVAILABLE);
        }
        if (bt_wire_session_dead(s)) {
            return;
        }
    }
    for (uint32_t card = 0; card < s->w->n_cards; card++) {
        card_blame(s, card, now_ns);
    }
    for (uint32_t k = 0; k < s->n_rails && s->dialer && bt_wire_session_up(s); k++) {
        struct bt_wire_rail *r = &s->rails[k];
        if (r->path == NULL && now_ns >= r->retry_ns && s->n_peer_cards > 0) {
            rail_open(s, r);
        }
    }
}

void bt_wire_links_tick(struct bt_wire *w)
{
    struct bt_list *j;
    for (uint32_t i = 0; i < w->n_cards; i++) {
        struct bt_wire_card_state *k = &w->cards[i];
        bool link = bt_wire_link_up(k->card.ifname);
        if (link == k->link) {
            continue;
        }
        k->link = link;
        card_changed(w, i, "-", "link is down");
        bt_list_for_each (j, &w->sessions) {
            struct bt_wire_session *s = BT_CONTAINER_OF(j, struct bt_wire_session, link);
            for (uint32_t n = 0; n < s->n_rails && link; n++) {
                if (s->rails[n].local == i) {
                    s->rails[n].retry_ns = 0;
                }
            }
        }
    }
}
