/* The wire process. Its main thread is the transfer thread (xfer*.c, ucx*.c), which also reads
 * commands from the socket and writes events to it. This file translates both. A second thread maps
 * the slab's pages ahead of their use, and then ends.
 *
 * The process trusts the kvstore's messages. It ends when the socket is closed. */
#include "kvstore/wire/wx_child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/log/last_words.h"
#include "common/loop/one_peer.h"
#include "kvstore/wire/wx_priv.h"

#define AHEAD_STEP    (16u << 20)
#define LAST_WORDS_MS 1000 /* time for the kvstore to read the last events */

struct flow {
    union {
        struct bt_wx_send send;
        struct bt_wx_recv recv;
    };
    bt_flow_word_t word; /* used if the word is not in the slab */
    uint32_t *slots;
    struct bt_kv_key *names;
};

static struct child {
    struct bt_wx *x;
    struct bt_kv_layout layout;
    struct bt_slab *slab;
    struct bt_slab_crcs *crcs;
    struct bt_wx_board *board;
    struct bt_wx_pipe pipe;
    struct bt_map *objs; /* u32 handle -> bt_wx_obj */
    struct bt_metrics *metrics;
    struct bt_wx_inside inside;
    uint32_t cards; /* bits: cards to be started */
    pthread_t ahead;
    _Atomic bool quit;
} C;

/* ---- events, to the kvstore ---- */

static void put(bt_wx_ipc_type_t type, const struct bt_wx_obj *o, const void *body, size_t n)
{
    struct iovec part = {(void *)(uintptr_t)body, n};
    bt_wx_pipe_put(&C.pipe, type, o->handle, &part, 1);
}

static void put_lost(const struct bt_wx_obj *o, bt_status_t st, const char *why)
{
    int32_t status = st;
    struct iovec parts[2] = {{&status, sizeof(status)}, {(void *)(uintptr_t)why, strlen(why)}};
    bt_wx_pipe_put(&C.pipe, BT_WX_M_LOST, o->handle, parts, 2);
}

static void forget(const struct bt_wx_obj *o)
{
    BT_ASSERT(bt_map_del(C.objs, &o->handle) == o);
}

static void conn_event(struct bt_wx_conn *c, uint32_t ev)
{
    if (ev & BT_WX_EV_LOST) {
        put_lost(&c->obj, c->lost, c->why);
    }
    if (ev & BT_WX_EV_STOPPED) {
        put(BT_WX_M_STOPPED, &c->obj, NULL, 0);
        forget(&c->obj);
        free(c);
    }
}

static void path_event(struct bt_wx_path *l, uint32_t ev)
{
    if (ev & BT_WX_EV_READY) {
        put(BT_WX_M_READY, &l->obj, l->address, l->address_len);
    }
    if (ev & BT_WX_EV_PROVEN) {
        put(BT_WX_M_PROVEN, &l->obj, NULL, 0);
    }
    if (ev & BT_WX_EV_LOST) {
        put_lost(&l->obj, l->lost, l->why);
    }
    if (ev & BT_WX_EV_RESENT) {
        put(BT_WX_M_RESENT, &l->obj, NULL, 0);
    } else if (ev & BT_WX_EV_STOPPED) {
        struct bt_buf has;
        bt_buf_init(&has);
        bt_wx_has_pack(l->has, &has);
        put(BT_WX_M_STOPPED, &l->obj, has.data, has.len);
        bt_buf_cleanup(&has);
    } else {
        return;
    }
    forget(&l->obj);
    bt_wx_has_free(l->has);
    free(l->peer_address);
    free(l->address);
    free(l);
}

static void flow_free(struct bt_wx_obj *o)
{
    struct flow *f = BT_CONTAINER_OF(o, struct flow, send.obj);
    put(BT_WX_M_STOPPED, o, NULL, 0);
    forget(o);
    free(f->slots);
    free(f->names);
    free(f);
}

static void recv_event(struct bt_wx_recv *r, uint32_t ev)
{
    if (ev & BT_WX_EV_PROGRESS) {
        put(BT_WX_M_PROGRESS, &r->obj, &r->progress, sizeof(r->progress));
    }
    if (ev & BT_WX_EV_LANDED) {
        struct bt_wx_ipc_landed l = {r->first_ns, r->last_ns, r->bytes, r->segments};
        put(BT_WX_M_LANDED, &r->obj, &l, sizeof(l));
    }
    if (ev & BT_WX_EV_LOST) {
        put_lost(&r->obj, r->lost, r->why);
    }
    if (ev & BT_WX_EV_STOPPED) {
        flow_free(&r->obj);
    }
}

static void on_event(void *arg, struct bt_wx_obj *o, uint32_t ev)
{
    (void)arg;
    switch (o->kind) {
    case BT_WX_CONN: conn_event(BT_CONTAINER_OF(o, struct bt_wx_conn, obj), ev); break;
    case BT_WX_PATH: path_event(BT_CONTAINER_OF(o, struct bt_wx_path, obj), ev); break;
    case BT_WX_RECV: recv_event(BT_CONTAINER_OF(o, struct bt_wx_recv, obj), ev); break;
    case BT_WX_SEND:
        if (ev & BT_WX_EV_SENT) {
            put(BT_WX_M_SENT, o, NULL, 0);
        }
        if (ev & BT_WX_EV_STOPPED) {
            flow_free(o);
        }
        break;
    }
}

static bool flush(void *arg)
{
    (void)arg;
    return bt_wx_pipe_unsent(&C.pipe) == 0 || bt_wx_pipe_flush(&C.pipe) == BT_OK;
}

/* ---- commands, from the kvstore ---- */

static void *obj_of(uint32_t handle, bt_wx_kind_t kind)
{
    struct bt_wx_obj *o = bt_map_get(C.objs, &handle);
    BT_ASSERT(o != NULL && (kind == 0 || o->kind == kind));
    return o;
}

static struct bt_wx_conn *conn_of(uint32_t handle)
{
    return BT_CONTAINER_OF(obj_of(handle, BT_WX_CONN), struct bt_wx_conn, obj);
}

static void add(struct bt_wx_obj *o, bt_wx_kind_t kind, uint32_t handle, uint32_t cmd)
{
    o->kind = kind;
    o->handle = handle;
    BT_ASSERT(handle != 0 && bt_map_put(C.objs, &handle, o) == NULL);
    bt_wx_enqueue(C.x, o, cmd);
}

static void on_conn(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_conn b;
    struct bt_wx_conn *c = bt_calloc(1, sizeof(*c));
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)) && b.heard < BT_WX_HEARD);
    memcpy(c->peer, b.peer, sizeof(c->peer));
    c->dialer = b.dialer;
    c->several = b.several;
    c->heard_at = &C.board->heard[b.heard];
    add(&c->obj, BT_WX_CONN, m->handle, BT_WX_CMD_OPEN);
}

static void on_path(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_path b;
    struct bt_wx_path *l = bt_calloc(1, sizeof(*l));
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)) && b.card < BT_NICS_MAX);
    l->conn = conn_of(b.conn);
    l->number = b.number;
    l->card = b.card;
    l->nonce = b.nonce;
    add(&l->obj, BT_WX_PATH, m->handle, BT_WX_CMD_OPEN);
}

static void on_connect(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_connect b;
    struct bt_wx_path *l = BT_CONTAINER_OF(obj_of(m->handle, BT_WX_PATH), struct bt_wx_path, obj);
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)) && l->peer_address == NULL);
    l->nonce_peer = b.nonce_peer;
    l->peer_address = bt_malloc(m->n + 1);
    l->peer_address_len = m->n;
    bt_copy(l->peer_address, m->body, m->n);
    bt_wx_enqueue(C.x, &l->obj, BT_WX_CMD_CONNECT);
}

/* Makes the parts that both ends of flows have. */
static struct flow *flow_new(struct bt_wx_ipc_msg *m, struct bt_wx_ipc_flow *b,
                             bt_flow_word_t **word_p)
{
    struct flow *f = bt_calloc(1, sizeof(*f));
    BT_ASSERT(bt_wx_ipc_take(m, b, sizeof(*b)));
    uint32_t n = bt_flow_blocks(&b->shape);
    f->slots = bt_calloc(n + 1u, sizeof(*f->slots));
    f->names = bt_calloc(n + 1u, sizeof(*f->names));
    BT_ASSERT(bt_wx_ipc_take(m, f->slots, n * sizeof(*f->slots)) &&
              bt_wx_ipc_take(m, f->names, n * sizeof(*f->names)));
    if (b->word != BT_WX_WORD_PRIVATE) {
        BT_ASSERT(b->word < C.slab->super->n_flow_words);
        *word_p = &C.slab->flows[b->word];
    } else {
        atomic_store(&f->word, b->word_value);
        *word_p = &f->word;
    }
    return f;
}

static void on_send(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_flow b;
    bt_flow_word_t *word;
    struct flow *f = flow_new(m, &b, &word);
    struct bt_wx_send *s = &f->send;
    s->conn = conn_of(b.conn);
    s->src = (struct bt_wire_source){
        .shape = b.shape, .slots = f->slots, .names = f->names, .word = word};
    s->request = b.request;
    s->epoch = b.epoch;
    s->stream = b.stream;
    s->first_block = b.first_block;
    s->class = b.class;
    add(&s->obj, BT_WX_SEND, m->handle, BT_WX_CMD_ADD);
}

static void on_recv(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_flow b;
    bt_flow_word_t *word;
    struct flow *f = flow_new(m, &b, &word);
    struct bt_wx_recv *r = &f->recv;
    r->conn = conn_of(b.conn);
    r->shape = b.shape;
    r->slots = f->slots;
    r->names = f->names;
    r->word = word;
    r->request = b.request;
    r->epoch = b.epoch;
    r->stream = b.stream;
    r->first_block = b.first_block;
    add(&r->obj, BT_WX_RECV, m->handle, BT_WX_CMD_ADD);
}

/* The path itself was freed when it stopped; this object replaces it. */
static void on_resend(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_resend b;
    struct bt_wx_path *l = bt_calloc(1, sizeof(*l));
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)) && bt_wx_has_unpack(m->body, m->n, &l->has));
    l->conn = conn_of(b.conn);
    l->number = b.number;
    add(&l->obj, BT_WX_PATH, m->handle, BT_WX_CMD_RESEND);
}

static void on_card(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_card b;
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)) && b.card < BT_NICS_MAX);
    C.cards |= 1u << b.card;
}

static void on_ping(struct bt_wx_ipc_msg *m)
{
    struct bt_wx_ipc_ping b;
    struct bt_log_settings log;
    BT_ASSERT(bt_wx_ipc_take(m, &b, sizeof(b)));
    bt_log_settings_get(&log);
    if ((int32_t)log.level != b.log_level) {
        log.level = (bt_log_level_t)b.log_level;
        bt_log_settings_set(&log);
    }
    bt_wx_pipe_put(&C.pipe, BT_WX_M_PONG, 0, NULL, 0);
}

static void on_message(struct bt_wx_ipc_msg *m)
{
    switch (m->type) {
    case BT_WX_M_CARD: on_card(m); break;
    case BT_WX_M_OPEN_CONN: on_conn(m); break;
    case BT_WX_M_OPEN_PATH: on_path(m); break;
    case BT_WX_M_CONNECT: on_connect(m); break;
    case BT_WX_M_ADD_SEND: on_send(m); break;
    case BT_WX_M_ADD_RECV: on_recv(m); break;
    case BT_WX_M_STOP: bt_wx_enqueue(C.x, obj_of(m->handle, 0), BT_WX_CMD_STOP); break;
    case BT_WX_M_RESEND: on_resend(m); break;
    case BT_WX_M_PING: on_ping(m); break;
    case BT_WX_M_QUIT: bt_wx_quit(C.x); break;
    default: BT_ASSERT(!"a message of another executable");
    }
}

/* Reads all available messages. If the kvstore has ended, this process ends too. */
static void read_socket(void)
{
    if (bt_wx_pipe_read(&C.pipe) == BT_ERR_PEER_LOST) {
        _exit(0);
    }
}

static void pull(void *arg, bool sure)
{
    struct bt_wx_ipc_msg m;
    (void)arg;
    if (!atomic_exchange(&C.board->posted, false) && !sure) {
        return;
    }
    read_socket();
    bt_status_t st;
    while ((st = bt_wx_pipe_next(&C.pipe, &m)) == BT_OK) {
        on_message(&m);
    }
    BT_ASSERT(st == BT_AGAIN);
}

static void start_card(uint32_t card)
{
    char err[512] = "";
    struct bt_wx_ipc_card b = {.card = card};
    b.status = bt_wx_card_start(C.x, card, true, err, sizeof(err));
    struct iovec parts[2] = {{&b, sizeof(b)}, {err, b.status == BT_OK ? 0 : strlen(err)}};
    bt_wx_pipe_put(&C.pipe, BT_WX_M_CARD_STARTED, 0, parts, 2);
}

static void turn(void *arg)
{
    pull(arg, false);
    for (uint32_t card = 0; C.cards != 0; card++) {
        if (C.cards & 1u << card) {
            C.cards &= ~(1u << card);
            start_card(card);
        }
    }
}

/* ---- start ---- */

/* The kvstore has written to every page of the slab, but each process has its own page tables.
 * Without this, the first write to each page would cause a page fault during a transfer. */
static void *map_ahead(void *arg)
{
    (void)arg;
#ifdef MADV_POPULATE_WRITE
    uint8_t *data = C.slab->data;
    uint64_t bytes = C.slab->super->n_slots * C.slab->super->slot_bytes;
    (void)setpriority(PRIO_PROCESS, 0, 10); /* on Linux this affects only this thread */
    for (uint64_t at = 0; at < bytes && !C.quit; at += AHEAD_STEP) {
        if (madvise(data + at, BT_MIN((uint64_t)AHEAD_STEP, bytes - at), MADV_POPULATE_WRITE)) {
            break; /* an older kernel, or no memory for page tables: each page is mapped at its
                      first use */
        }
    }
#endif
    return NULL;
}

static void *map_board(int fd)
{
    void *p = mmap(NULL, sizeof(struct bt_wx_board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    BT_ASSERT(p != MAP_FAILED);
    close(fd);
    return p;
}

static void share_counters(struct bt_wx_config *conf)
{
    struct bt_metric **list[BT_WX_COUNTERS];
    uint32_t n = bt_wx_counters(conf, list);
    char label[32];
    C.metrics = bt_metrics_create();
    for (uint32_t i = 0; i < n; i++) {
        snprintf(label, sizeof(label), "i=\"%u\"", i);
        *list[i] = bt_metrics_counter(C.metrics, "shared", label);
        bt_metric_share(*list[i], &C.board->counters[i]);
    }
}

static void wait_for_start(struct bt_wx_ipc_start *s)
{
    struct pollfd p = {.fd = C.pipe.fd, .events = POLLIN};
    struct bt_wx_ipc_msg m;
    while (bt_wx_pipe_next(&C.pipe, &m) != BT_OK) {
        (void)poll(&p, 1, -1);
        read_socket();
    }
    BT_ASSERT(m.type == BT_WX_M_START && bt_wx_ipc_take(&m, s, sizeof(*s)) &&
              s->n_cards <= BT_NICS_MAX);
}

static void create(const struct bt_wx_child_fds *fds)
{
    struct bt_wx_ipc_start s;
    char err[512];
    bt_wx_pipe_init(&C.pipe, fds->sock);
    wait_for_start(&s);
    bt_log_settings_set(&s.log);
    bt_log_last_words(); /* again, now with the daemon's name */
    C.layout = s.layout;
    C.board = map_board(fds->board);
    C.objs = bt_map_create(sizeof(uint32_t));
    if (bt_slab_map_rows(fds->slab, &C.layout, &s.root, &C.slab, err, sizeof(err)) != BT_OK ||
        (fds->crcs >= 0 && bt_slab_crcs_map(C.slab, &C.layout, fds->crcs, &C.crcs) != BT_OK)) {
        BT_ERROR("wire_process", "why=%s", C.slab == NULL ? err : "the CRC marks do not fit");
        exit(1);
    }
    close(fds->slab);
    C.inside = (struct bt_wx_inside){.wakefd = fds->wake,
                                     .sock = fds->sock,
                                     .bell = &C.board->bell,
                                     .pull = pull,
                                     .turn = turn,
                                     .flush = flush};
    struct bt_wx_config conf = {.slab = C.slab,
                                .layout = &C.layout,
                                .bytes_in_flight_max = s.bytes_in_flight_max,
                                .n_cards = s.n_cards,
                                .crcs = C.crcs,
                                .on_event = on_event,
                                .inside = &C.inside};
    for (uint32_t i = 0; i < s.n_cards; i++) {
        memcpy(conf.cards[i].ifname, s.cards[i].ifname, sizeof(conf.cards[i].ifname));
        conf.cards[i].ipv6 = s.cards[i].ipv6;
        conf.cards[i].node = s.cards[i].node;
    }
    share_counters(&conf);
    C.x = bt_wx_create(&conf);
}

static void destroy(void)
{
    struct pollfd p = {.fd = C.pipe.fd, .events = POLLOUT};
    uint64_t end = bt_mono_ns() + LAST_WORDS_MS * 1000000ull;
    while (!flush(NULL) && bt_mono_ns() < end && poll(&p, 1, LAST_WORDS_MS) >= 0) {
    }
    atomic_store(&C.quit, true);
    pthread_join(C.ahead, NULL);
    bt_wx_destroy(C.x);
    bt_slab_crcs_destroy(C.crcs);
    bt_slab_unmap(C.slab);
    bt_metrics_destroy(C.metrics);
    bt_map_destroy(C.objs);
    bt_wx_pipe_cleanup(&C.pipe);
    munmap(C.board, sizeof(*C.board));
}

/* The kvstore handles signals to the whole control group or terminal, and then sends commands. */
static void leave_signals(void)
{
    static const int all[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        (void)signal(all[i], SIG_IGN);
    }
}

void bt_wx_child_main_if_asked(int argc, char **argv)
{
    struct bt_wx_child_fds fds;
    long parent;
    if (argc < 2 || strcmp(argv[1], BT_WX_CHILD_ARG) != 0) {
        return;
    }
    if (!bt_wx_child_args(argc, argv, &parent, &fds)) {
        (void)fprintf(stderr, BT_WX_CHILD_ARG ": this is how a kvstore starts its wire process; it "
                                              "is of no use otherwise\n");
        exit(2);
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != (pid_t)parent) {
        _exit(0); /* the kvstore ended before this process could watch it */
    }
    (void)prctl(PR_SET_NAME, "baton-wire");
    leave_signals();
    (void)bt_loop_process_limits();
    bt_one_peer_limit(BT_ONE_PEER_MAX);
    create(&fds);
    BT_ASSERT(pthread_create(&C.ahead, NULL, map_ahead, NULL) == 0);
    C.x->t->run(C.x);
    destroy();
    exit(0);
}
