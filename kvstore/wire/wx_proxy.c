/* The kvstore's side of the wire process: sends it the objects of xfer.h as messages and the cards
 * to use, and handles its death for each object. wx_events.c handles its messages. Control
 * thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvstore/wire/wx_priv.h"

#define CARD_RETRY_NS (1000ull * 1000000)
#define CARD_WAIT_NS  (60000ull * 1000000)
#define AWAY          "the wire process is being started again"

/* ---- objects that the wire process has ---- */

static bool up(const struct bt_wx_proxy *p)
{
    return p->process.pid != 0 && !p->process.told;
}

static void put(struct bt_wx_proxy *p, bt_wx_ipc_type_t type, uint32_t handle,
                const struct iovec *parts, size_t n)
{
    bt_wx_pipe_put(&p->process.pipe, type, handle, parts, n);
    bt_wx_process_post(p);
}

static void name(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    do {
        p->next_handle++;
    } while (p->next_handle == 0 || bt_map_get(p->objs, &p->next_handle) != NULL);
    o->handle = p->next_handle;
    bt_map_put(p->objs, &o->handle, o);
}

void bt_wx_proxy_unname(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    bt_map_del(p->objs, &o->handle);
    o->handle = 0;
}

/* ---- a session's received messages, counted in memory that the wire process sees ---- */

static uint32_t heard_take(struct bt_wx_proxy *p, struct bt_wx_conn *c)
{
    uint32_t i = 1;
    while (i < BT_WX_HEARD && p->heard_taken[i]) {
        i++;
    }
    if (i == BT_WX_HEARD) {
        return 0; /* the count is not shared, so the session's paths never count as silent */
    }
    p->heard_taken[i] = true;
    atomic_store(&p->board->heard[i], atomic_load(&c->heard));
    c->heard_at = &p->board->heard[i];
    return i;
}

void bt_wx_proxy_unhear(struct bt_wx_proxy *p, struct bt_wx_conn *c)
{
    if (c->heard_at != &c->heard) {
        p->heard_taken[c->heard_at - p->board->heard] = false;
        atomic_store(&c->heard, atomic_load(c->heard_at));
        c->heard_at = &c->heard;
    }
}

/* ---- commands ---- */

static void open_conn(struct bt_wx_proxy *p, struct bt_wx_conn *c)
{
    if (!up(p)) {
        c->lost = BT_ERR_PEER_LOST;
        snprintf(c->why, sizeof(c->why), AWAY);
        bt_wx_event(p->x, &c->obj, BT_WX_EV_LOST);
        return;
    }
    struct bt_wx_ipc_conn b = {.dialer = c->dialer, .several = c->several};
    memcpy(b.peer, c->peer, sizeof(b.peer));
    b.heard = heard_take(p, c);
    name(p, &c->obj);
    put(p, BT_WX_M_OPEN_CONN, c->obj.handle, &(struct iovec){&b, sizeof(b)}, 1);
}

/* false: the process lost this connection or never had it, so it gets no messages about it. */
static bool has_conn(const struct bt_wx_proxy *p, const struct bt_wx_conn *c)
{
    return up(p) && c->obj.handle != 0;
}

static void open_path(struct bt_wx_proxy *p, struct bt_wx_path *l)
{
    if (has_conn(p, l->conn)) {
        struct bt_wx_ipc_path b = {
            .conn = l->conn->obj.handle, .number = l->number, .card = l->card, .nonce = l->nonce};
        name(p, &l->obj);
        put(p, BT_WX_M_OPEN_PATH, l->obj.handle, &(struct iovec){&b, sizeof(b)}, 1);
    }
}

static void connect_path(struct bt_wx_proxy *p, const struct bt_wx_path *l)
{
    struct bt_wx_ipc_connect b = {.nonce_peer = l->nonce_peer};
    struct iovec parts[2] = {{&b, sizeof(b)}, {l->peer_address, l->peer_address_len}};
    if (up(p) && l->obj.handle != 0) {
        put(p, BT_WX_M_CONNECT, l->obj.handle, parts, 2);
    }
}

static void put_flow(struct bt_wx_proxy *p, bt_wx_ipc_type_t type, const struct bt_wx_obj *o,
                     struct bt_wx_ipc_flow *b, const uint32_t *slots, const struct bt_kv_key *names,
                     bt_flow_word_t *word)
{
    const struct bt_slab *slab = p->x->conf.slab;
    uint32_t n = bt_flow_blocks(&b->shape);
    b->word = BT_WX_WORD_PRIVATE;
    if (word >= slab->flows && word < slab->flows + slab->super->n_flow_words) {
        b->word = (uint32_t)(word - slab->flows);
    }
    b->word_value = atomic_load_explicit(word, memory_order_acquire);
    struct iovec parts[3] = {{b, sizeof(*b)},
                             {(void *)(uintptr_t)slots, n * sizeof(*slots)},
                             {(void *)(uintptr_t)names, n * sizeof(*names)}};
    put(p, type, o->handle, parts, 3);
}

static void add_send(struct bt_wx_proxy *p, struct bt_wx_send *s)
{
    if (has_conn(p, s->conn)) {
        struct bt_wx_ipc_flow b = {.shape = s->src.shape,
                                   .request = s->request,
                                   .conn = s->conn->obj.handle,
                                   .epoch = s->epoch,
                                   .stream = s->stream,
                                   .first_block = s->first_block,
                                   .class = s->class};
        name(p, &s->obj);
        put_flow(p, BT_WX_M_ADD_SEND, &s->obj, &b, s->src.slots, s->src.names, s->src.word);
    }
}

static void add_recv(struct bt_wx_proxy *p, struct bt_wx_recv *r)
{
    if (has_conn(p, r->conn)) {
        struct bt_wx_ipc_flow b = {.shape = r->shape,
                                   .request = r->request,
                                   .conn = r->conn->obj.handle,
                                   .epoch = r->epoch,
                                   .stream = r->stream,
                                   .first_block = r->first_block};
        name(p, &r->obj);
        put_flow(p, BT_WX_M_ADD_RECV, &r->obj, &b, r->slots, r->names, r->word);
    }
}

static void begin(struct bt_wx_proxy *p, struct bt_wx_obj *o)
{
    switch (o->kind) {
    case BT_WX_CONN: open_conn(p, BT_CONTAINER_OF(o, struct bt_wx_conn, obj)); break;
    case BT_WX_PATH: open_path(p, BT_CONTAINER_OF(o, struct bt_wx_path, obj)); break;
    case BT_WX_SEND: add_send(p, BT_CONTAINER_OF(o, struct bt_wx_send, obj)); break;
    case BT_WX_RECV: add_recv(p, BT_CONTAINER_OF(o, struct bt_wx_recv, obj)); break;
    }
}

static void resend(struct bt_wx_proxy *p, struct bt_wx_path *l)
{
    if (!has_conn(p, l->conn)) {
        bt_wx_event(p->x, &l->obj, BT_WX_EV_RESENT);
        return;
    }
    struct bt_wx_ipc_resend b = {.conn = l->conn->obj.handle, .number = l->number};
    struct bt_buf has;
    bt_buf_init(&has);
    bt_wx_has_pack(l->has, &has);
    struct iovec parts[2] = {{&b, sizeof(b)}, {has.data, has.len}};
    name(p, &l->obj);
    put(p, BT_WX_M_RESEND, l->obj.handle, parts, 2);
    bt_buf_cleanup(&has);
}

static void command(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd)
{
    struct bt_wx_proxy *p = x->proxy;
    o->cmds |= cmd;
    if (cmd & BT_WX_CMD_OPEN) { /* OPEN, or ADD */
        begin(p, o);
    }
    if (cmd & BT_WX_CMD_CONNECT) {
        connect_path(p, BT_CONTAINER_OF(o, struct bt_wx_path, obj));
    }
    if (cmd & BT_WX_CMD_RESEND) {
        resend(p, BT_CONTAINER_OF(o, struct bt_wx_path, obj));
    }
    if ((cmd & BT_WX_CMD_STOP) && o->handle == 0) {
        bt_wx_event(x, o, BT_WX_EV_STOPPED);
    } else if ((cmd & BT_WX_CMD_STOP) && up(p)) { /* otherwise its death completes the stop */
        put(p, BT_WX_M_STOP, o->handle, NULL, 0);
    }
}

/* ---- the process's death ---- */

/* A copy of its objects as a list: the events for them may change the map. */
static struct bt_wx_obj **orphans(struct bt_wx_proxy *p, size_t *n_p)
{
    struct bt_wx_obj **list = bt_calloc(bt_map_count(p->objs) + 1, sizeof(*list)), *o;
    size_t it = 0, n = 0;
    while ((o = bt_map_next(p->objs, &it, NULL)) != NULL) {
        list[n++] = o;
    }
    bt_map_destroy(p->objs);
    p->objs = bt_map_create(sizeof(uint32_t));
    for (size_t i = 0; i < n; i++) {
        list[i]->handle = 0;
    }
    *n_p = n;
    return list;
}

static void lose_conn(struct bt_wx_proxy *p, struct bt_wx_conn *c, const char *why)
{
    bt_wx_proxy_unhear(p, c);
    if (!(c->obj.cmds & BT_WX_CMD_STOP) && !(c->obj.seen & BT_WX_EV_LOST)) {
        c->lost = BT_ERR_PEER_LOST;
        snprintf(c->why, sizeof(c->why), "%s", why);
        bt_wx_event(p->x, &c->obj, BT_WX_EV_LOST);
    }
}

/* Connections first: this ends their sessions, so no session tries to go on over another path. Then
 * objects that were told to stop get STOPPED. The others are stopped when their session ends. */
void bt_wx_proxy_lost(struct bt_wx_proxy *p, const char *why)
{
    size_t n;
    struct bt_wx_obj **list = orphans(p, &n);
    if (p->x->conf.crcs != NULL) {
        bt_slab_crcs_other_ended(p->x->conf.crcs);
    }
    for (uint32_t i = 0; i < p->x->conf.n_cards; i++) {
        p->cards[i].started = p->cards[i].asked = false;
    }
    for (size_t i = 0; i < n; i++) {
        if (list[i]->kind == BT_WX_CONN) {
            lose_conn(p, BT_CONTAINER_OF(list[i], struct bt_wx_conn, obj), why);
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (list[i]->kind == BT_WX_PATH && (list[i]->cmds & BT_WX_CMD_RESEND)) {
            bt_wx_event(p->x, list[i], BT_WX_EV_RESENT);
        } else if (list[i]->cmds & BT_WX_CMD_STOP) {
            bt_wx_event(p->x, list[i], BT_WX_EV_STOPPED);
        }
    }
    free(list);
}

/* ---- cards ---- */

static void ask_card(struct bt_wx_proxy *p, uint32_t card)
{
    struct bt_wx_ipc_card b = {.card = card};
    p->cards[card].asked = true;
    p->cards[card].asked_ns = bt_mono_ns();
    put(p, BT_WX_M_CARD, 0, &(struct iovec){&b, sizeof(b)}, 1);
}

bool bt_wx_proxy_cards_asked(const struct bt_wx_proxy *p)
{
    bool asked = false;
    for (uint32_t i = 0; i < p->x->conf.n_cards; i++) {
        asked |= p->cards[i].asked;
    }
    return asked;
}

void bt_wx_proxy_greet(struct bt_wx_proxy *p)
{
    const struct bt_wx_config *conf = &p->x->conf;
    struct bt_wx_ipc_start b = {.layout = *conf->layout,
                                .bytes_in_flight_max = conf->bytes_in_flight_max,
                                .n_cards = conf->n_cards};
    memcpy(b.root.b, conf->slab->super->root_key, sizeof(b.root.b));
    bt_log_settings_get(&b.log);
    for (uint32_t i = 0; i < conf->n_cards; i++) {
        memcpy(b.cards[i].ifname, conf->cards[i].ifname, sizeof(b.cards[i].ifname));
        b.cards[i].node = conf->cards[i].node;
        b.cards[i].ipv6 = conf->cards[i].ipv6;
    }
    put(p, BT_WX_M_START, 0, &(struct iovec){&b, sizeof(b)}, 1);
    for (uint32_t i = 0; i < conf->n_cards; i++) {
        if (p->cards[i].kept) {
            ask_card(p, i);
        }
    }
}

/* Starts cards again that an earlier process had and this process could not start. */
void bt_wx_proxy_tick(struct bt_wx_proxy *p, uint64_t now_ns)
{
    for (uint32_t i = 0; i < p->x->conf.n_cards && up(p); i++) {
        const struct bt_wx_proxy_card *k = &p->cards[i];
        if (k->kept && !k->started && !k->asked && now_ns > k->asked_ns + CARD_RETRY_NS) {
            ask_card(p, i);
        }
    }
}

static bt_status_t card_start(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap)
{
    struct bt_wx_proxy *p = x->proxy;
    struct bt_wx_proxy_card *k = &p->cards[card];
    uint64_t end = bt_mono_ns() + CARD_WAIT_NS;
    if (wait && p->process.pid == 0) {
        bt_status_t st = bt_wx_process_start(p, err, err_cap);
        if (st != BT_OK) {
            return st;
        }
    }
    if (up(p) && !k->started && !k->asked && !k->failed) {
        ask_card(p, card);
    }
    while (wait && k->asked && bt_mono_ns() < end && bt_wx_process_wait(p, 100)) {
    }
    if (wait && !k->started && !k->failed) {
        snprintf(err, err_cap, "UCX does not start on interface %s: %s", x->conf.cards[card].ifname,
                 p->process.pid == 0 ? "the wire process has ended, see above"
                                     : "no answer within a minute");
        return BT_ERR_IO;
    }
    if (k->failed && !k->kept) {
        k->failed = false;
        snprintf(err, err_cap, "%s", k->why);
        return BT_ERR_CONFIG;
    }
    return k->kept ? BT_OK : BT_AGAIN; /* kept: the process will have the card again, even if it is
                                          restarting now */
}

/* ---- start and end ---- */

static void create(struct bt_wx *x)
{
    struct bt_wx_proxy *p = bt_calloc(1, sizeof(*p));
    struct bt_metric **list[BT_WX_COUNTERS];
    x->proxy = p;
    p->x = x;
    p->process.backoff_ms = 100;
    p->objs = bt_map_create(sizeof(uint32_t));
    p->board_fd = memfd_create("baton-wire", MFD_CLOEXEC);
    BT_ASSERT(p->board_fd >= 0 && ftruncate(p->board_fd, sizeof(*p->board)) == 0);
    void *at = mmap(NULL, sizeof(*p->board), PROT_READ | PROT_WRITE, MAP_SHARED, p->board_fd, 0);
    BT_ASSERT(at != MAP_FAILED);
    p->board = at;
    x->bell = &p->board->bell;
    uint32_t n = bt_wx_counters(&x->conf, list);
    for (uint32_t i = 0; i < n; i++) {
        bt_metric_share(*list[i], &p->board->counters[i]);
    }
}

static void finish(struct bt_wx *x)
{
    bt_wx_process_finish(x->proxy);
}

static void destroy(struct bt_wx *x)
{
    struct bt_wx_proxy *p = x->proxy;
    struct bt_metric **list[BT_WX_COUNTERS];
    uint32_t n = bt_wx_counters(&x->conf, list);
    for (uint32_t i = 0; i < n; i++) {
        bt_metric_share(*list[i], NULL);
    }
    munmap(p->board, sizeof(*p->board));
    close(p->board_fd);
    bt_map_destroy(p->objs);
    free(p);
}

const struct bt_wx_transport bt_wx_over_process = {.create = create,
                                                   .card_start = card_start,
                                                   .command = command,
                                                   .finish = finish,
                                                   .destroy = destroy};
