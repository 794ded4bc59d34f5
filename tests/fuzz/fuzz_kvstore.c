/* libFuzzer: a kvstore's core between its conductors, its node's workers and its peers, all of them
 * hostile. Conductors speak over sessions (baton.Kvstore), workers send packets of the local
 * protocol and write their flow words, peers want blocks and bring them. The tape chooses who does
 * what, mostly about the same few requests, blocks and puts, so that grants are made first and
 * broken then. What the kvstore sends is within the ranges of the protocols; slots and leases add
 * up at each step, and nothing is held at the end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvstore/serve/serve.h"
#include "tests/fuzz/fake_rpc.h"
#include "tests/fuzz/message.h"
#include "tests/fuzz/rig.h"

#define SLOTS    24u
#define TOKENS   16u /* of a block */
#define CHUNK    32u
#define WORKERS  3
#define RECVS    32
#define SENDS    32
#define SEALS    64
#define STEPS    80
#define SESSION  "/baton.Kvstore/Session"
#define BLOCKS   "/baton.Kvstore/Blocks"
#define INC_SELF 99u

struct bt_sealer { /* in place of the thread: the tape says when a job is done */
    struct {
        bt_sealer_done_fn done;
        void *arg;
        uint32_t n, slots[64];
        struct bt_kv_key names[64];
    } jobs[SEALS];
    uint32_t n;
};

struct bt_wire_recv { /* a receive or a fetch that the core has started */
    bool active, fetch, offered, taken, over, cancelled;
    uint32_t n, epoch, items;
    bt_flow_word_t *word;
    struct bt_wire_recv_ops ops;
    void *arg;
};

struct bt_wire_send { /* what a peer reads or wants */
    bool active, want, offered, aborted;
    void *handle;
};

struct worker {
    struct bt_grant_worker *w;
    bool broken;
    int pidfd; /* readable: it is dead */
    uint64_t incarnation;
};

static struct bt_loop *loop;
static struct bt_slab *slab;
static struct bt_kv_layout layout;
static struct bt_kv_key root;

static struct {
    struct bt_rpc *rpc;
    struct bt_rpc_server *server;
    struct bt_cache *cache;
    struct bt_grants *grants;
    struct bt_serve *serve;
    struct bt_sealer sealer;
    struct worker workers[WORKERS];
    struct bt_wire_recv recvs[RECVS];
    struct bt_wire_send sends[SENDS];
    uint64_t pidfds;
} x;

/* ---- what stands in for threads and peers ---- */

bt_status_t bt_sealer_create(struct bt_loop *l, struct bt_pool *pool, uint32_t n_layers,
                             struct bt_sealer **s_p)
{
    (void)l, (void)pool, (void)n_layers;
    *s_p = &x.sealer;
    return BT_OK;
}

void bt_sealer_destroy(struct bt_sealer *s)
{
    s->n = 0; /* jobs that are open are dropped */
}

static void seal_one(void)
{
    struct bt_sealer *s = &x.sealer;
    if (s->n == 0) {
        return;
    }
    bt_sealer_done_fn done = s->jobs[0].done;
    void *arg = s->jobs[0].arg;
    for (uint32_t i = 0; i < s->jobs[0].n; i++) {
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            (void)bt_pool_segment_crc(x.cache->pool, s->jobs[0].slots[i], l, &s->jobs[0].names[i]);
        }
    }
    memmove(&s->jobs[0], &s->jobs[1], --s->n * sizeof(s->jobs[0]));
    done(arg);
}

void bt_sealer_submit(struct bt_sealer *s, const uint32_t *slots, const struct bt_kv_key *names,
                      uint32_t n, bt_sealer_done_fn done, void *arg)
{
    BT_ASSERT(s->n < SEALS && n <= BT_ARRAY_LEN(s->jobs[0].slots));
    s->jobs[s->n].done = done;
    s->jobs[s->n].arg = arg;
    s->jobs[s->n].n = n;
    bt_copy(s->jobs[s->n].slots, slots, n * sizeof(*slots));
    bt_copy(s->jobs[s->n++].names, names, n * sizeof(*names));
}

static struct bt_wire_recv *recv_new(const struct bt_wire_recv_ops *ops, void *arg)
{
    struct bt_wire_recv *r = x.recvs;
    while (r->active && r < &x.recvs[RECVS - 1]) {
        r++;
    }
    BT_ASSERT(!r->active);
    *r = (struct bt_wire_recv){.active = true, .ops = *ops, .arg = arg};
    return r;
}

static struct bt_wire_recv *recv_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                       uint64_t request, uint32_t epoch,
                                       const struct bt_flow_shape *shape, uint32_t first_block,
                                       const uint32_t *slots, const struct bt_kv_key *names,
                                       bt_flow_word_t *word, uint64_t timeout_ms,
                                       const struct bt_wire_recv_ops *ops, void *arg)
{
    struct bt_wire_recv *r = recv_new(ops, arg);
    (void)w, (void)peer, (void)request, (void)slots, (void)names, (void)timeout_ms;
    BT_ASSERT(first_block <= bt_flow_blocks(shape));
    r->word = word;
    r->epoch = epoch;
    r->items = bt_flow_items(shape);
    return r;
}

static struct bt_wire_recv *fetch_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                        const struct bt_wire_recv_ops *ops, void *arg)
{
    struct bt_wire_recv *r = recv_new(ops, arg);
    (void)w, (void)request, (void)epoch, (void)keys;
    BT_ASSERT(n > 0 && n <= BT_WIRE_FETCH_MAX && class >= 1 && class <= 3);
    BT_ASSERT(peer->incarnation != INC_SELF);
    r->fetch = true;
    r->n = n;
    return r;
}

static void fetch_take(struct bt_wire_recv *r, const uint32_t *slots)
{
    BT_ASSERT(r->active && r->offered && !r->taken && !r->cancelled && slots[0] < SLOTS + 2);
    r->taken = true;
}

static void recv_cancel(struct bt_wire_recv *r)
{
    BT_ASSERT(r->active && !r->cancelled && !r->over);
    r->cancelled = true;
}

static void kick(struct bt_wire *w)
{
    (void)w;
}

static void send_trailer(struct bt_wire_send *s, const struct bt_wire_trailer *t)
{
    (void)t;
    BT_ASSERT(s->active && !s->want);
}

static void send_abort(struct bt_wire_send *s, bt_status_t st, const char *why)
{
    BT_ASSERT(s->active && st != BT_OK && why != NULL);
    s->aborted = true;
}

static void send_offer(struct bt_wire_send *s, const struct bt_wire_source *src,
                       const uint8_t *have, uint32_t n)
{
    uint32_t there = 0;
    BT_ASSERT(s->active && s->want && !s->offered && !s->aborted);
    for (uint32_t i = 0; i < n; i++) {
        there += have[i] != BT_WIRE_LACKS;
    }
    BT_ASSERT(there == bt_flow_blocks(&src->shape) && there > 0);
    s->offered = true;
}

/* ---- workers ---- */

static void worker_send(void *conn, const Baton__LocalMsg *m)
{
    char why[256] = "";
    struct worker *w = conn;
    BT_ASSERT(w->w != NULL);
    BT_ASSERT(bt_message_check(&m->base, why, sizeof(why)) == BT_OK); /* a worker would refuse it */
}

static void worker_ring(void *conn)
{
    BT_ASSERT(((struct worker *)conn)->w != NULL);
}

static void worker_drop(void *conn)
{
    ((struct worker *)conn)->w = NULL;
}

static void worker_attach(struct worker *w, uint32_t i)
{
    static const struct bt_grant_worker_ops ops = {
        .send = worker_send, .ring = worker_ring, .drop = worker_drop};
    char name[16];
    snprintf(name, sizeof(name), "w%u", i);
    w->pidfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    BT_ASSERT(w->pidfd >= 0);
    w->w = bt_grants_attach(x.grants, name, w->incarnation + 1, 1000 + i, w->pidfd, &ops, w);
}

static void worker_detach(struct worker *w)
{
    struct bt_grant_worker *g = w->w;
    if (g != NULL) {
        w->w = NULL;
        bt_grants_detach(x.grants, g);
    }
}

static void worker_packet(struct worker *w, const void *data, size_t len)
{
    char why[256] = "";
    Baton__LocalMsg *m = bt_local_unpack(data, len, why, sizeof(why));
    if (m == NULL || (m->m_case != BATON__LOCAL_MSG__M_ATTACH &&
                      bt_grants_message(x.grants, w->w, m) != BT_OK)) {
        worker_detach(w); /* as serve_local.c does */
    }
    if (m != NULL) {
        baton__local_msg__free_unpacked(m, NULL);
    }
}

/* ---- messages about the same few things ---- */

static void put_keys(struct message_arena *a, ProtobufCMessage *m,
                     const ProtobufCFieldDescriptor *f, struct tape *t, uint32_t max)
{
    struct bt_kv_key keys[8];
    uint32_t n = tape_below(t, max + 1), chain = tape_below(t, 3);
    memset(keys, 0, sizeof(keys));
    for (uint32_t i = 0; i < n; i++) {
        keys[i].b[0] = (uint8_t)chain;
        keys[i].b[4] = (uint8_t)i;
        keys[i].b[31] = 1;
    }
    message_set_bytes(a, m, f, keys, n * sizeof(keys[0]));
}

/* Blocks of a chain from somewhere on: its keys as a put, a lease or a fetch names them. */
static bool likely(void *arg, struct message_arena *a, ProtobufCMessage *m,
                   const ProtobufCFieldDescriptor *f, struct tape *t)
{
    static const struct {
        const char *name;
        uint32_t from, n;
    } small[] = {{"request", 1, 4},
                 {"epoch", 1, 3},
                 {"put", 1, 6},
                 {"lease", 1, 6},
                 {"depth", 0, 8},
                 {"first", 0, 8},
                 {"peer_incarnation", 4, 3},
                 {"id", 1, 3},
                 {"count", 0, 8},
                 {"left_ms", 0, 200}};
    (void)arg;
    if (f->label == PROTOBUF_C_LABEL_REPEATED || tape_one_in(t, 24)) {
        return false;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(small); i++) {
        if (strcmp(f->name, small[i].name) == 0) {
            message_set_number(m, f, small[i].from + tape_below(t, small[i].n));
            return true;
        }
    }
    if (strcmp(f->name, "keys") == 0) {
        put_keys(a, m, f, t, 6);
    } else if (strcmp(f->name, "key") == 0) {
        struct bt_kv_key k = {.b = {[31] = 1}};
        k.b[0] = (uint8_t)tape_below(t, 3);
        k.b[4] = (uint8_t)tape_below(t, 8);
        message_set_bytes(a, m, f, &k, sizeof(k));
    } else if (strcmp(f->name, "n_tokens") == 0) {
        message_set_number(m, f,
                           m->descriptor == &baton__local_put__descriptor ? TOKENS : tape_u8(t));
    } else if (strcmp(f->name, "peer") == 0) {
        message_set_bytes(a, m, f, "kvstore-n2", 10);
    } else if (strcmp(f->name, "peer_rpc") == 0) {
        message_set_bytes(a, m, f, "n2:7100", 7);
    } else if (strcmp(f->name, "tenant") == 0 && f->type == PROTOBUF_C_TYPE_STRING) {
        message_set_bytes(a, m, f, "t", tape_below(t, 2));
    } else {
        return false;
    }
    return true;
}

static uint8_t *pack(const ProtobufCMessage *m, size_t *n_p)
{
    *n_p = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = bt_malloc(*n_p + 1);
    protobuf_c_message_pack(m, buf);
    return buf;
}

static void worker_says(struct tape *t)
{
    static const Baton__LocalMsg__MCase usual[] = {
        BATON__LOCAL_MSG__M_OPEN,    BATON__LOCAL_MSG__M_OPEN,    BATON__LOCAL_MSG__M_TRAILER,
        BATON__LOCAL_MSG__M_CLOSE,   BATON__LOCAL_MSG__M_PUT,     BATON__LOCAL_MSG__M_PUT_DONE,
        BATON__LOCAL_MSG__M_LEASE,   BATON__LOCAL_MSG__M_UNLEASE, BATON__LOCAL_MSG__M_TAIL_END,
        BATON__LOCAL_MSG__M__NOT_SET};
    uint32_t i = tape_below(t, WORKERS);
    struct worker *w = &x.workers[i];
    struct message_arena a = {0};
    if (w->w == NULL) {
        worker_attach(w, i);
    }
    Baton__LocalMsg__MCase which = usual[tape_below(t, BT_ARRAY_LEN(usual))];
    ProtobufCMessage *m = NULL;
    Baton__LocalMsg outer = BATON__LOCAL_MSG__INIT;
    if (which == BATON__LOCAL_MSG__M__NOT_SET) {
        m = message_make(&a, &baton__local_msg__descriptor, t, likely, NULL);
    } else {
        const ProtobufCFieldDescriptor *f =
            protobuf_c_message_descriptor_get_field(&baton__local_msg__descriptor, which);
        outer.m_case = which;
        outer.open = (Baton__LocalOpen *)(void *)message_make(&a, f->descriptor, t, likely, NULL);
        m = &outer.base;
    }
    size_t n;
    uint8_t *buf = pack(m, &n);
    if (n > 0 && tape_one_in(t, 16)) {
        buf[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
    }
    worker_packet(w, buf, n);
    free(buf);
    message_free(&a);
}

/* A worker may write any flow word, and ring. */
static void worker_writes(struct tape *t)
{
    struct worker *w = &x.workers[tape_below(t, WORKERS)];
    uint32_t i = tape_below(t, 8);
    uint64_t v =
        tape_one_in(t, 8) ? tape_u64(t) : bt_flow_pack(1 + tape_below(t, 3), tape_below(t, 20));
    atomic_store(&slab->flows[i], v);
    if (w->w != NULL) {
        bt_grants_bell(x.grants, w->w);
    }
}

static void worker_leaves(struct tape *t)
{
    struct worker *w = &x.workers[tape_below(t, WORKERS)];
    uint64_t one = 1;
    switch (tape_u8(t) % 4) {
    case 0: worker_detach(w); break;
    case 1:
        worker_attach(w, (uint32_t)(w - x.workers)); /* again: the old connection is dropped */
        break;
    case 2:
        worker_detach(w);
        w->incarnation++;
        break;
    default:
        if (w->w != NULL) { /* its process dies; the pidfd is the grants' and is open */
            BT_ASSERT(write(w->pidfd, &one, sizeof(one)) == sizeof(one));
        }
        break;
    }
}

/* ---- conductors ---- */

static struct bt_rpc_stream *session(struct tape *t)
{
    uint32_t n = fake_rpc_streams(x.rpc);
    struct bt_rpc_stream *s = n > 0 ? fake_rpc_stream(x.rpc, tape_below(t, n)) : NULL;
    if (s != NULL && strcmp(fake_rpc_stream_method(s), SESSION) == 0 && !tape_one_in(t, 16)) {
        return s;
    }
    s = n < 6 ? fake_rpc_open(x.rpc, SESSION) : NULL;
    if (s == NULL) {
        return NULL;
    }
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    Baton__SessionHello h = BATON__SESSION_HELLO__INIT;
    size_t len;
    h.version = 1;
    h.cluster = (char *)(uintptr_t) "c";
    h.name = (char *)(uintptr_t) "conductor-1";
    h.node = (char *)(uintptr_t) "n9";
    h.incarnation = 5 + n;
    h.root_key = (ProtobufCBinaryData){.data = root.b, .len = sizeof(root.b)};
    h.layout_id = layout.layout_id;
    h.expect_incarnation = INC_SELF;
    m.m_case = BATON__TO_KVSTORE__M_HELLO;
    m.hello = &h;
    uint8_t *buf = pack(&m.base, &len);
    fake_rpc_deliver(s, buf, len, 0);
    free(buf);
    return fake_rpc_stands(x.rpc, s) ? s : NULL;
}

static void conductor_says(struct tape *t)
{
    static const Baton__ToKvstore__MCase usual[] = {
        BATON__TO_KVSTORE__M_RESERVE,   BATON__TO_KVSTORE__M_RESERVE,
        BATON__TO_KVSTORE__M_RESERVE,   BATON__TO_KVSTORE__M_RELEASE,
        BATON__TO_KVSTORE__M_REPLICATE, BATON__TO_KVSTORE__M_HEARTBEAT};
    struct bt_rpc_stream *s = session(t);
    struct message_arena a = {0};
    Baton__ToKvstore outer = BATON__TO_KVSTORE__INIT;
    ProtobufCMessage *m = &outer.base;
    if (s == NULL) {
        return;
    }
    if (tape_one_in(t, 12)) {
        m = message_make(&a, &baton__to_kvstore__descriptor, t, likely, NULL);
    } else {
        outer.m_case = usual[tape_below(t, BT_ARRAY_LEN(usual))];
        const ProtobufCFieldDescriptor *f =
            protobuf_c_message_descriptor_get_field(m->descriptor, outer.m_case);
        outer.reserve = (Baton__Reserve *)(void *)message_make(&a, f->descriptor, t, likely, NULL);
    }
    size_t n;
    uint8_t *buf = pack(m, &n);
    if (n > 0 && tape_one_in(t, 16)) {
        buf[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
    }
    fake_rpc_deliver(s, buf, n, 0);
    free(buf);
    message_free(&a);
}

static void blocks_stream(struct tape *t)
{
    Baton__BlocksCredit c = BATON__BLOCKS_CREDIT__INIT;
    size_t n;
    uint32_t streams = fake_rpc_streams(x.rpc);
    struct bt_rpc_stream *s = streams > 0 ? fake_rpc_stream(x.rpc, tape_below(t, streams)) : NULL;
    if (s == NULL || strcmp(fake_rpc_stream_method(s), BLOCKS) != 0) {
        s = streams < 6 ? fake_rpc_open(x.rpc, BLOCKS) : NULL;
    }
    if (s != NULL) {
        struct message_arena a = {0};
        ProtobufCMessage *m = message_make(&a, c.base.descriptor, t, NULL, NULL);
        uint8_t *buf = pack(m, &n);
        fake_rpc_deliver(s, buf, n, 0);
        free(buf);
        message_free(&a);
    }
}

static void stream_event(struct tape *t)
{
    uint32_t n = fake_rpc_streams(x.rpc);
    if (n == 0) {
        return;
    }
    struct bt_rpc_stream *s = fake_rpc_stream(x.rpc, tape_below(t, n));
    if (tape_one_in(t, 4)) {
        fake_rpc_end(s, BT_GRPC_CANCELLED, "the client left");
    } else {
        fake_rpc_full(s, tape_one_in(t, 8));
    }
}

/* Conductors read what they were sent, and it is what they understand. */
static void drain(void)
{
    char why[256] = "";
    size_t len;
    const void *data;
    for (uint32_t i = 0; i < fake_rpc_streams(x.rpc); i++) {
        struct bt_rpc_stream *s = fake_rpc_stream(x.rpc, i);
        bool of_session = strcmp(fake_rpc_stream_method(s), SESSION) == 0;
        while (fake_rpc_stands(x.rpc, s) && (data = fake_rpc_sent(s, &len)) != NULL) {
            if (of_session) {
                Baton__FromKvstore *m = bt_from_kvstore_unpack(data, len, why, sizeof(why));
                BT_ASSERT(m != NULL);
                baton__from_kvstore__free_unpacked(m, NULL);
            }
            fake_rpc_sent_done(s);
        }
    }
}

/* ---- peers ---- */

static void recv_event(struct bt_wire_recv *r, uint32_t what)
{
    static const bt_status_t why[] = {BT_ERR_PEER_LOST, BT_ERR_NOT_FOUND, BT_ERR_DATA_LOSS,
                                      BT_ERR_TIMEOUT};
    struct bt_wire_trailer trailer = {.first_token = 7, .last_compute_ns = 9};
    if (r->cancelled || r->over) {
        r->active = false;
        r->ops.on_quiet(r->arg);
    } else if (r->fetch && !r->offered && what % 4 != 0) {
        uint8_t have[64];
        for (uint32_t i = 0; i < r->n; i++) {
            have[i % sizeof(have)] = (uint8_t)((what + i) % 3);
        }
        have[what % BT_MIN(r->n, 64u)] = BT_WIRE_IN_SLAB;
        r->offered = true;
        if (r->n <= sizeof(have)) {
            r->ops.on_offer(r->arg, have, r->n);
        }
    } else if (what % 4 == 0) {
        r->over = true;
        r->ops.on_failed(r->arg, why[what / 4 % 4], "the tape");
    } else if (what % 4 == 1 && r->word != NULL) {
        bt_flow_raise(r->word, r->epoch, what / 4 % (r->items + 1));
        r->ops.on_progress(r->arg);
    } else if (!r->fetch || r->taken) {
        r->over = true;
        if (r->word != NULL) {
            bt_flow_raise(r->word, r->epoch, r->items);
        }
        r->ops.on_done(r->arg, &trailer, 1, 2, 4096, 4);
    }
}

static void peer_brings(struct tape *t)
{
    struct bt_wire_recv *r = &x.recvs[tape_below(t, 4)];
    if (r->active) {
        recv_event(r, tape_u8(t));
    }
}

static struct bt_wire_send *send_new(bool want)
{
    for (uint32_t i = 0; i < SENDS; i++) {
        if (!x.sends[i].active) {
            x.sends[i] = (struct bt_wire_send){.active = true, .want = want};
            return &x.sends[i];
        }
    }
    return NULL;
}

static void send_ended(struct bt_wire_send *s, bt_status_t st)
{
    s->active = false;
    if (s->want) {
        bt_grants_wire_ops.want_end(x.grants, s->handle, st);
    } else {
        bt_grants_wire_ops.send_end(x.grants, s->handle, s, st);
    }
}

static void peer_asks(struct tape *t)
{
    struct bt_kv_key keys[8] = {0};
    struct bt_wire_send *s = &x.sends[tape_below(t, 4)];
    if (s->active && tape_bool(t)) {
        send_ended(s, tape_bool(t) ? BT_OK : BT_ERR_DATA_LOSS);
        return;
    }
    bool want = tape_bool(t);
    s = send_new(want);
    if (s == NULL) {
        return;
    }
    bt_status_t st;
    if (want) {
        uint32_t n = 1 + tape_below(t, 8), chain = tape_below(t, 3);
        for (uint32_t i = 0; i < n; i++) {
            keys[i].b[0] = (uint8_t)chain;
            keys[i].b[4] = (uint8_t)i;
            keys[i].b[31] = 1;
        }
        struct bt_wire_want w = {.peer = "kvstore-n2",
                                 .incarnation = 4,
                                 .request = 1,
                                 .epoch = 1,
                                 .class = 1 + tape_below(t, 3),
                                 .keys = keys,
                                 .n = n};
        st = bt_grants_wire_ops.want(x.grants, &w, s, &s->handle);
    } else {
        struct bt_wire_source src = {0};
        st = bt_grants_wire_ops.lookup(x.grants, 1 + tape_below(t, 4), 1 + tape_below(t, 3), s,
                                       &src);
        s->handle = src.grant;
    }
    s->active = st == BT_OK;
}

/* ---- start, end, steps ---- */

static void first_start(void)
{
    char err[512], path[128];
    BT_ASSERT(bt_loop_create(&loop) == BT_OK);
    BT_ASSERT(bt_kv_layout_gqa(TOKENS, 2, 1, 32, BT_DT_BF16, 0, &layout) == BT_OK);
    memset(root.b, 7, sizeof(root.b));
    snprintf(path, sizeof(path), "%s/slab", rig_dir());
    uint64_t slot = BT_ALIGN_UP(layout.block_bytes, 4096);
    struct bt_slab_spec spec = {.path = path,
                                .bytes = 5 * 4096 + SLOTS * (slot + 128 + 8),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = INC_SELF};
    BT_ASSERT(bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) == BT_OK);
    BT_ASSERT(unlink(path) == 0);
}

static void start(uint8_t how)
{
    if (loop == NULL) {
        first_start();
    }
    memset(&x, 0, sizeof(x));
    memset((void *)slab->headers, 0, slab->super->n_slots * sizeof(slab->headers[0]));
    memset(slab->crcs, 0, (size_t)slab->super->n_slots * layout.n_layers * sizeof(uint32_t));
    memset((void *)slab->flows, 0, slab->super->n_flow_words * sizeof(slab->flows[0]));
    x.rpc = fake_rpc_create(loop);
    BT_ASSERT(bt_rpc_server_create(x.rpc, "x", &x.server, NULL) == BT_OK);
    x.cache = bt_cache_create(slab, &layout, SLOTS / 2, &bt_evict_slru);
    x.cache->low = how % 4;
    x.cache->copies_max = SLOTS / 2;
    struct bt_grants_config gc = {.loop = loop,
                                  .slab = slab,
                                  .layout = layout,
                                  .flow_chunk_tokens = CHUNK,
                                  .reclaim_ms = 500,
                                  .cache = x.cache,
                                  .sealer = &x.sealer,
                                  .fetch_wait_ms = 1000,
                                  .fetch_stall_ms = 300,
                                  .stream_max = 0.125,
                                  .overlap = (how & 4) != 0,
                                  .to_session = bt_serve_to_session};
    x.grants = bt_grants_create(&gc);
    struct bt_grants_wire wire = {.recv_start = recv_start,
                                  .recv_cancel = recv_cancel,
                                  .kick = kick,
                                  .send_trailer = send_trailer,
                                  .send_abort = send_abort,
                                  .fetch_start = fetch_start,
                                  .fetch_take = fetch_take,
                                  .send_offer = send_offer};
    bt_grants_set_wire(x.grants, &wire);
    struct bt_serve_config sc = {.loop = loop,
                                 .cluster = "c",
                                 .name = "kvstore-n1",
                                 .node = "n1",
                                 .incarnation = INC_SELF,
                                 .root = root,
                                 .layout_id = layout.layout_id,
                                 .cache = x.cache};
    x.serve = bt_serve_create(&sc);
    bt_serve_register(x.serve, x.server);
    bt_serve_set_grants(x.serve, x.grants);
    bt_rpc_server_start(x.server);
}

/* In the order in which kvstore/main.c does it. */
static void finish(void)
{
    struct bt_pool_counts c;
    bt_rpc_server_destroy(x.server);
    bt_serve_destroy(x.serve);
    bt_grants_stop(x.grants);
    for (int i = 0; i < WORKERS; i++) {
        worker_detach(&x.workers[i]);
    }
    for (int i = 0; i < SENDS; i++) {
        if (x.sends[i].active) {
            send_ended(&x.sends[i], BT_ERR_PEER_LOST);
        }
    }
    for (int i = 0; i < RECVS; i++) {
        if (x.recvs[i].active) {
            x.recvs[i].active = false;
            x.recvs[i].ops.on_quiet(x.recvs[i].arg);
        }
    }
    bt_sealer_destroy(&x.sealer);
    bt_grants_destroy(x.grants);
    bt_pool_counts(x.cache->pool, &c);
    BT_ASSERT(c.leases == 0 && c.transit == 0);
    bt_cache_destroy(x.cache);
    bt_rpc_destroy(x.rpc);
    bt_loop_poll(loop, 0);
}

static void check(void)
{
    struct bt_pool_counts c;
    struct bt_grants_stats s;
    bt_pool_counts(x.cache->pool, &c);
    BT_ASSERT(c.free + c.writing + c.sealed + c.quarantine == c.total);
    bt_grants_stats(x.grants, &s);
    BT_ASSERT(s.recvs <= RECVS && s.workers <= 4 * STEPS);
}

static void step(struct tape *t)
{
    switch (tape_u8(t) % 16) {
    case 0:
    case 1:
    case 2: conductor_says(t); break;
    case 3:
    case 4:
    case 5:
    case 6: worker_says(t); break;
    case 7: worker_writes(t); break;
    case 8: worker_leaves(t); break;
    case 9:
    case 10: peer_brings(t); break;
    case 11: peer_asks(t); break;
    case 12: seal_one(); break;
    case 13: blocks_stream(t); break;
    case 14: stream_event(t); break;
    default: rig_pass_ms(tape_u8(t) * 20u); break;
    }
    bt_loop_poll(loop, 0);
    drain();
    check();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tape t = tape_of(data, size);
    rig_reset();
    start(tape_u8(&t));
    for (int i = 0; i < STEPS && tape_left(&t) > 0; i++) {
        step(&t);
    }
    finish();
    return 0;
}
