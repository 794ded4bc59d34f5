/* libFuzzer: a kvstore's wire between itself and hostile kvstores, KV over gRPC: sessions, paths,
 * flows and fetches in both directions, with the transfer thread's code run a turn at a time. The
 * tape is the peers: it opens and answers sessions properly and then says anything, and it sends
 * segments that are right but for one thing. What this side sends is within the ranges of the
 * protocol; a flow that lands has every segment's right bytes; at the end each flow has ended once.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/rpc/ranges.h"
#include "common/rpc/session_hello.h"
#include "kvstore/wire/wire_priv.h"
#include "kvstore/wire/xfer_priv.h"
#include "tests/fuzz/fake_rpc.h"
#include "tests/fuzz/message.h"
#include "tests/fuzz/rig.h"

#define SLOTS    24u
#define TOKENS   16u /* of a block */
#define CHUNK    32u
#define FLOWS    12
#define STEPS    80
#define SESSION  "/baton.Peer/Session"
#define SEGMENTS "/baton.Peer/Segments"
#define KNOWN    12 /* numbers that our side has told */

struct pull { /* a flow that we receive */
    bool active, fetch, over, offered, cancelled;
    struct bt_wire_recv *r;
    uint64_t request;
    uint32_t n_blocks, n_offered, stream, first; /* first: those before are resident */
    struct bt_flow_shape shape;
    bt_flow_word_t word;
    struct bt_kv_key names[8];
    uint32_t slots[8];
};

struct push { /* one that we send */
    bool active, want;
    struct bt_wire_send *s;
    struct bt_kv_key names[8];
    uint32_t slots[8];
    bt_flow_word_t word;
};

const struct bt_wx_transport bt_wx_over_ucx; /* so that UCX is not linked */

static struct bt_loop *loop;
static struct bt_slab *slab;
static struct bt_kv_layout layout;
static struct bt_kv_key root;
static uint32_t segment_bytes;

static struct {
    struct bt_rpc *rpc, *far; /* of the control thread; of the transfer thread */
    struct bt_rpc_server *server;
    struct bt_metrics *metrics;
    struct bt_wire *w;
    struct pull pulls[FLOWS];
    struct push pushes[FLOWS];
    uint64_t nonces[KNOWN];
    uint32_t n_nonces;
    uint32_t streams[KNOWN];
    uint32_t n_streams;
    /* the transfer thread */
    void *(*thread)(void *x);
    struct bt_wx *wx;
    int turns; /* that it may still make; below zero: until its end */
} x;

/* ---- the transfer thread, a turn at a time ---- */

void __wrap_bt_wx_start_thread(struct bt_wx *wx, void *(*thread)(void *x));
bool __wrap_bt_wx_over(const struct bt_wx *wx);
bool __real_bt_wx_over(const struct bt_wx *wx);
void __wrap_bt_loop_poll(struct bt_loop *l, int timeout_ms);
void __real_bt_loop_poll(struct bt_loop *l, int timeout_ms);
void __wrap_bt_loop_short_slices(uint32_t us);
int __wrap_pthread_join(pthread_t thread, void **value);
bt_status_t __wrap_bt_wire_cards(const char *const *listen, bool allow_routable,
                                 struct bt_wire_card *cards_p, uint32_t *n_p, char *err,
                                 size_t err_cap);
bool __wrap_bt_wire_link_up(const char *ifname);

void __wrap_bt_wx_start_thread(struct bt_wx *wx, void *(*thread)(void *x))
{
    x.thread = thread;
    x.wx = wx;
    wx->running = true;
}

bool __wrap_bt_wx_over(const struct bt_wx *wx)
{
    return x.turns == 0 || (x.turns-- < 0 && __real_bt_wx_over(wx));
}

void __wrap_bt_loop_poll(struct bt_loop *l, int timeout_ms)
{
    (void)timeout_ms;
    if (x.turns < -1) {
        rig_pass_ms(5); /* only time can end what is left */
    }
    __real_bt_loop_poll(l, 0);
}

void __wrap_bt_loop_short_slices(uint32_t us)
{
    (void)us;
}

int __wrap_pthread_join(pthread_t thread, void **value)
{
    (void)thread;
    (void)value;
    x.turns = -1;
    x.thread(x.wx);
    return 0;
}

static void transfer(int turns)
{
    x.turns = turns;
    x.thread(x.wx);
}

bt_status_t __wrap_bt_wire_cards(const char *const *listen, bool allow_routable,
                                 struct bt_wire_card *cards_p, uint32_t *n_p, char *err,
                                 size_t err_cap)
{
    (void)listen, (void)allow_routable, (void)err, (void)err_cap;
    cards_p[0] = (struct bt_wire_card){.address = "127.0.0.1", .ifname = "lo"};
    cards_p[0].nic =
        (struct bt_nic){.family = 4, .prefix = 8, .addr = {127, 0, 0, 1}, .node = -1, .up = true};
    *n_p = 1;
    return BT_OK;
}

bool __wrap_bt_wire_link_up(const char *ifname)
{
    (void)ifname;
    return true;
}

/* ---- the core ---- */

static void name_of(uint32_t chain, uint32_t block, struct bt_kv_key *k)
{
    memset(k, 0, sizeof(*k));
    k->b[0] = (uint8_t)chain;
    k->b[4] = (uint8_t)block;
    k->b[31] = 1;
}

static struct push *push_new(struct bt_wire_send *snd, bool want, struct bt_wire_source *src,
                             uint32_t blocks)
{
    for (int i = 0; i < FLOWS; i++) {
        struct push *p = &x.pushes[i];
        if (!p->active) {
            *p = (struct push){.active = true, .want = want, .s = snd};
            for (uint32_t b = 0; b < 8; b++) {
                p->slots[b] = b;
                name_of((uint32_t)i, b, &p->names[b]);
            }
            *src = (struct bt_wire_source){
                .slots = p->slots, .names = p->names, .word = &p->word, .grant = p};
            src->shape = (struct bt_flow_shape){.n_tokens = blocks * TOKENS,
                                                .block_tokens = TOKENS,
                                                .chunk_tokens = CHUNK,
                                                .n_layers = layout.n_layers};
            return p;
        }
    }
    return NULL;
}

static bt_status_t lookup(void *arg, uint64_t request, uint32_t epoch, struct bt_wire_send *snd,
                          struct bt_wire_source *src)
{
    (void)arg;
    if (request == 3) {
        return BT_ERR_STALE;
    }
    struct push *p = request < 3 ? push_new(snd, false, src, 4) : NULL;
    if (p == NULL) {
        return BT_ERR_NOT_FOUND;
    }
    bt_flow_raise(&p->word, epoch, 0);
    return BT_OK;
}

static void push_ended(struct push *p)
{
    BT_ASSERT(p->active);
    p->active = false;
}

static void send_end(void *arg, void *grant, struct bt_wire_send *snd, bt_status_t st)
{
    (void)arg, (void)st;
    BT_ASSERT(((struct push *)grant)->s == snd && !((struct push *)grant)->want);
    push_ended(grant);
}

static uint32_t segment_crc(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *name)
{
    uint32_t bytes;
    (void)arg;
    uint64_t at = bt_kv_segment(&layout, layer, &bytes);
    return bt_slab_segment_crc(name, layer, layout.layout_id,
                               (uint8_t *)bt_slab_data(slab, slot) + at, bytes);
}

static bt_status_t want(void *arg, const struct bt_wire_want *q, struct bt_wire_send *snd,
                        void **handle_p)
{
    struct bt_wire_source src;
    (void)arg;
    BT_ASSERT(q->n > 0 && q->n <= BT_WIRE_FETCH_MAX && q->class >= 1 && q->class <= 3);
    struct push *p = q->n <= 8 ? push_new(snd, true, &src, q->n) : NULL;
    if (p == NULL) {
        return BT_ERR_EXHAUSTED;
    }
    memcpy(p->names, q->keys, q->n * sizeof(p->names[0]));
    *handle_p = p;
    return BT_OK;
}

static void want_end(void *arg, void *handle, bt_status_t st)
{
    (void)arg, (void)st;
    BT_ASSERT(((struct push *)handle)->want);
    push_ended(handle);
}

static void on_offer(void *arg, const uint8_t *have, uint32_t n)
{
    struct pull *p = arg;
    BT_ASSERT(p->active && p->fetch && !p->offered && !p->over && n == p->n_blocks);
    p->offered = true;
    for (uint32_t i = 0; i < n; i++) {
        BT_ASSERT(have[i] <= BT_WIRE_FROM_SSD);
        if (have[i] != BT_WIRE_LACKS) {
            p->names[p->n_offered++] = p->names[i];
        }
    }
    BT_ASSERT(p->n_offered > 0);
    p->shape.n_tokens = p->n_offered * TOKENS;
    p->shape.chunk_tokens = p->n_offered * TOKENS;
    if (p->request == 2) {
        p->cancelled = true;
        bt_wire_recv_cancel(p->r);
    } else {
        bt_wire_fetch_take(p->r, p->slots);
    }
}

static void on_progress(void *arg)
{
    BT_ASSERT(((struct pull *)arg)->active);
}

/* All of it is here: so it is in the slots, with the right checksums. */
static void on_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns, uint64_t last_ns,
                    uint64_t bytes, uint64_t segments)
{
    struct pull *p = arg;
    uint32_t n = p->fetch ? p->n_offered : p->n_blocks;
    (void)t, (void)first_ns, (void)last_ns, (void)bytes, (void)segments;
    BT_ASSERT(p->active && !p->over && !p->cancelled);
    p->over = true;
    for (uint32_t b = p->first; b < n; b++) {
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            BT_ASSERT(slab->crcs[p->slots[b] * layout.n_layers + l] ==
                      segment_crc(NULL, p->slots[b], l, &p->names[b]));
        }
    }
}

static void on_failed(void *arg, bt_status_t st, const char *why)
{
    struct pull *p = arg;
    BT_ASSERT(p->active && !p->over && !p->cancelled && st != BT_OK && why[0] != '\0');
    p->over = true;
}

static void on_quiet(void *arg)
{
    struct pull *p = arg;
    BT_ASSERT(p->active && (p->over || p->cancelled));
    p->active = false;
}

static const struct bt_wire_recv_ops pull_ops = {.on_offer = on_offer,
                                                 .on_progress = on_progress,
                                                 .on_done = on_done,
                                                 .on_failed = on_failed,
                                                 .on_quiet = on_quiet};

/* We ask a peer for something. */
static void pull(struct tape *t)
{
    static const struct bt_wire_peer_addr peers[] = {{"kvstore-n2", "n2:7100", 4},
                                                     {"kvstore-n3", "n3:7100", 5}};
    uint32_t at = tape_below(t, 3), blocks = 1 + tape_below(t, 4);
    struct pull *p = &x.pulls[at];
    const struct bt_wire_peer_addr *peer = &peers[tape_below(t, 4) == 3];
    if (p->active) {
        if (!p->over && !p->cancelled) {
            p->cancelled = true;
            bt_wire_recv_cancel(p->r);
        }
        return;
    }
    *p = (struct pull){.active = true, .fetch = tape_bool(t), .request = 1 + at};
    p->n_blocks = blocks;
    p->first = p->fetch ? 0 : tape_below(t, 2);
    p->shape = (struct bt_flow_shape){.n_tokens = blocks * TOKENS - tape_below(t, TOKENS),
                                      .block_tokens = TOKENS,
                                      .chunk_tokens = CHUNK,
                                      .n_layers = layout.n_layers};
    for (uint32_t b = 0; b < 8; b++) {
        p->slots[b] = 8 + at * 4 + b % 4;
        name_of(at, b, &p->names[b]);
    }
    p->r = p->fetch ? bt_wire_fetch_start(x.w, peer, p->request, 1, p->names, blocks,
                                          1 + tape_below(t, 3), &pull_ops, p)
                    : bt_wire_recv_start(x.w, peer, p->request, 1, &p->shape, p->first, p->slots,
                                         p->names, &p->word, tape_u8(t) * 20u, &pull_ops, p);
}

static void push(struct tape *t)
{
    struct push *p = &x.pushes[tape_below(t, 4)];
    struct bt_wire_trailer trailer = {.first_token = 5};
    uint8_t have[8] = {BT_WIRE_IN_SLAB};
    struct bt_wire_source src = {.slots = p->slots,
                                 .names = p->names,
                                 .word = &p->word,
                                 .grant = p,
                                 .shape = {.n_tokens = TOKENS,
                                           .block_tokens = TOKENS,
                                           .chunk_tokens = TOKENS,
                                           .n_layers = layout.n_layers}};
    if (!p->active) {
        return;
    }
    switch (tape_u8(t) % 4) {
    case 0: bt_wire_send_abort(p->s, BT_ERR_STALE, "the tape"); break;
    case 1:
        if (p->want && p->s->offered_ns == 0 && !p->s->ended) {
            bt_flow_raise(&p->word, p->s->x.epoch, bt_flow_items(&src.shape));
            bt_wire_send_offer(p->s, &src, have, p->s->n_keys);
        }
        break;
    case 2:
        if (!p->want) {
            bt_wire_send_trailer(p->s, &trailer);
        }
        break;
    default:
        if (!p->want) {
            uint32_t epoch = (uint32_t)(atomic_load(&p->word) >> 32);
            bt_flow_raise(&p->word, epoch, tape_below(t, 5));
            bt_wire_kick(x.w);
        }
        break;
    }
}

/* ---- what our side says: remembered, so that the peers can answer ---- */

static void remember(const Baton__PeerMsg *m)
{
    if (m->m_case == BATON__PEER_MSG__M_HELLO) {
        x.nonces[x.n_nonces++ % KNOWN] = m->hello->nonce;
    } else if (m->m_case == BATON__PEER_MSG__M_LANE_OPEN) {
        x.nonces[x.n_nonces++ % KNOWN] = m->lane_open->nonce;
    } else if (m->m_case == BATON__PEER_MSG__M_FLOW_OPEN) {
        x.streams[x.n_streams++ % KNOWN] = m->flow_open->stream;
        if (m->flow_open->request >= 1 && m->flow_open->request <= 3) {
            x.pulls[m->flow_open->request - 1].stream = m->flow_open->stream;
        }
    }
}

static void drain_rpc(struct bt_rpc *rpc, bool control)
{
    char why[256] = "";
    size_t len;
    const void *data;
    for (uint32_t i = 0; i < fake_rpc_streams(rpc); i++) {
        struct bt_rpc_stream *s = fake_rpc_stream(rpc, i);
        while (fake_rpc_stands(rpc, s) && (data = fake_rpc_sent(s, &len)) != NULL) {
            if (control) {
                Baton__PeerMsg *m = bt_peer_unpack(data, len, why, sizeof(why));
                BT_ASSERT(m != NULL);
                remember(m);
                baton__peer_msg__free_unpacked(m, NULL);
            }
            fake_rpc_sent_done(s);
        }
    }
}

/* ---- the peers ---- */

static void deliver(struct bt_rpc_stream *s, const ProtobufCMessage *m, struct tape *t)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(m, buf);
    if (n > 0 && tape_one_in(t, 24)) {
        buf[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
    }
    fake_rpc_deliver(s, buf, n, 0);
    free(buf);
}

static uint64_t nonce_of(struct tape *t)
{
    uint32_t n = BT_MIN(x.n_nonces, (uint32_t)KNOWN);
    return n == 0 || tape_one_in(t, 16) ? tape_u64(t)
                                        : x.nonces[(x.n_nonces - 1 - tape_below(t, n)) % KNOWN];
}

/* A proper hello, but for one thing perhaps. */
static void say_hello(struct bt_rpc_stream *s, struct tape *t)
{
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    Baton__PeerHello h = BATON__PEER_HELLO__INIT;
    bool second = tape_below(t, 4) == 3;
    char address[] = "127.0.0.1:77";
    h.version = BT_RPC_SESSION_VERSION;
    h.cluster = (char *)(uintptr_t) "c";
    h.name = (char *)(uintptr_t)(second ? "kvstore-n3" : "kvstore-n2");
    h.incarnation = second ? 5 : 4;
    h.expect_incarnation = 99;
    h.layout_id = layout.layout_id;
    h.root_key = (ProtobufCBinaryData){.data = root.b, .len = sizeof(root.b)};
    h.ucx_address = (ProtobufCBinaryData){.data = (uint8_t *)address, .len = strlen(address)};
    h.nonce = 1000 + tape_below(t, 4);
    h.transport = BATON__KV_TRANSPORT__GRPC;
    switch (tape_u8(t) % 32) {
    case 27: h.ucx_address.len = tape_below(t, 13); break;
    case 28: h.transport = BATON__KV_TRANSPORT__UCX; break;
    case 29: h.card = tape_u8(t); break;
    case 30: h.incarnation = tape_u64(t); break;
    case 31: h.expect_incarnation = 0; break;
    default: break;
    }
    m.m_case = BATON__PEER_MSG__M_HELLO;
    m.hello = &h;
    deliver(s, &m.base, t);
}

static struct bt_rpc_stream *any_stream(struct bt_rpc *rpc, struct tape *t)
{
    uint32_t n = fake_rpc_streams(rpc);
    return n > 0 ? fake_rpc_stream(rpc, tape_below(t, n)) : NULL;
}

static void hello(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(x.rpc, t);
    if (s == NULL || tape_bool(t)) {
        s = fake_rpc_streams(x.rpc) < 8 ? fake_rpc_open(x.rpc, SESSION) : NULL;
    }
    if (s != NULL) {
        say_hello(s, t);
    }
}

static void prove(struct tape *t)
{
    struct bt_wire_proof p = {BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, nonce_of(t)};
    struct bt_rpc_stream *s = any_stream(x.far, t);
    if (s == NULL || tape_bool(t)) {
        s = fake_rpc_streams(x.far) < 8 ? fake_rpc_open(x.far, SEGMENTS) : NULL;
    }
    if (s != NULL) {
        p.version += tape_one_in(t, 32);
        fake_rpc_deliver(s, &p, sizeof(p) - tape_one_in(t, 32), tape_u8(t));
    }
}

static bool likely(void *arg, struct message_arena *a, ProtobufCMessage *m,
                   const ProtobufCFieldDescriptor *f, struct tape *t)
{
    static const struct {
        const char *name;
        uint32_t from, n;
    } small[] = {{"request", 1, 4},     {"epoch", 1, 2}, {"lane", 0, 3},     {"card", 0, 2},
                 {"first_block", 0, 3}, {"item", 0, 5},  {"priority", 0, 4}, {"n_tokens", 49, 16}};
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
    if (strcmp(f->name, "stream") == 0) {
        uint32_t n = BT_MIN(x.n_streams, (uint32_t)KNOWN);
        message_set_number(m, f,
                           n > 0 && tape_bool(t) ? x.streams[tape_below(t, n)] : tape_below(t, 4));
    } else if (strcmp(f->name, "chunk_tokens") == 0) {
        message_set_number(m, f, CHUNK);
    } else if (strcmp(f->name, "keys") == 0) {
        struct bt_kv_key keys[8];
        uint32_t n = tape_below(t, 9);
        for (uint32_t i = 0; i < n; i++) {
            name_of(1, i, &keys[i]);
        }
        message_set_bytes(a, m, f, keys, n * sizeof(keys[0]));
    } else if (strcmp(f->name, "have") == 0) {
        uint8_t have[8];
        uint32_t n = 1 + tape_below(t, 8);
        for (uint32_t i = 0; i < n; i++) {
            have[i] = (uint8_t)tape_below(t, 3);
        }
        message_set_bytes(a, m, f, have, n);
    } else {
        return false;
    }
    return true;
}

static void say(struct tape *t)
{
    struct bt_rpc_stream *s = any_stream(x.rpc, t);
    struct message_arena a = {0};
    if (s != NULL) {
        deliver(s, message_make(&a, &baton__peer_msg__descriptor, t, likely, NULL), t);
        message_free(&a);
    }
}

/* Our side can only answer what it was asked: the offer of a fetch, the trailer of a flow. */
static void answer(struct tape *t)
{
    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    Baton__FlowOffer o = BATON__FLOW_OFFER__INIT;
    Baton__FlowTrailer r = BATON__FLOW_TRAILER__INIT;
    const struct pull *p = &x.pulls[tape_below(t, 3)];
    struct bt_rpc_stream *s = any_stream(x.rpc, t);
    uint8_t have[8];
    if (s == NULL || !p->active) {
        return;
    }
    for (uint32_t i = 0; i < p->n_blocks; i++) {
        have[i] = (uint8_t)tape_below(t, 3);
    }
    have[0] = BT_WIRE_IN_SLAB;
    o.stream = r.stream = p->stream;
    o.have = (ProtobufCBinaryData){.data = have, .len = p->n_blocks};
    if (p->fetch && !p->offered) {
        m.m_case = BATON__PEER_MSG__M_FLOW_OFFER;
        m.flow_offer = &o;
    } else {
        m.m_case = BATON__PEER_MSG__M_FLOW_TRAILER;
        m.flow_trailer = &r;
    }
    deliver(s, &m.base, t);
}

/* Segments of an item, right but for what the tape breaks. */
static void bring(struct tape *t)
{
    union {
        struct bt_wire_seg_hdr h;
        uint8_t raw[BT_WIRE_SEG_HDR_MAX + 8 * 2048];
    } u;
    const struct pull *p = &x.pulls[tape_below(t, 3)];
    struct bt_rpc_stream *s = any_stream(x.far, t);
    uint32_t first, end;
    if (s == NULL || !p->active || segment_bytes > 2048) {
        return;
    }
    memset(&u, 0, sizeof(u));
    u.h.item = tape_below(t, bt_flow_items(&p->shape));
    bt_flow_item_blocks(&p->shape, u.h.item, &first, &end);
    u.h.first_block = first + tape_below(t, end - first);
    u.h.n_segs = (uint16_t)(1 + tape_below(t, end - u.h.first_block));
    u.h.nonce = nonce_of(t);
    u.h.request = p->request;
    u.h.epoch = 1;
    u.h.stream = p->stream;
    u.h.seg_bytes = segment_bytes;
    uint32_t layer = u.h.item % layout.n_layers;
    size_t head = sizeof(u.h) + 4u * u.h.n_segs, len = head + (size_t)u.h.n_segs * segment_bytes;
    memset(u.raw + head, (int)(u.h.item + 1), len - head);
    for (uint32_t i = 0; i < u.h.n_segs; i++) {
        uint32_t crc =
            bt_slab_segment_crc(&p->names[(u.h.first_block + i) % 8], layer, layout.layout_id,
                                u.raw + head + (size_t)i * segment_bytes, segment_bytes);
        memcpy(u.raw + sizeof(u.h) + 4u * i, &crc, 4);
    }
    switch (tape_u8(t) % 24) {
    case 16: u.h.item = (uint32_t)tape_u64(t); break;
    case 17: u.h.first_block = (uint32_t)tape_u64(t); break;
    case 18: u.h.n_segs = (uint16_t)tape_u64(t); break;
    case 19: u.h.seg_bytes = (uint32_t)tape_u64(t); break;
    case 20: u.h.stream = (uint32_t)tape_u64(t); break;
    case 21: u.raw[head + tape_u8(t)] ^= 1; break;
    case 22: len -= 1 + tape_below(t, (uint32_t)len - 1); break;
    default: break;
    }
    if (!tape_one_in(t, 24) && u.h.n_segs <= BT_WIRE_SEGS_MAX) {
        (void)bt_wire_seg_finish(&u.h);
    }
    fake_rpc_deliver(s, u.raw, len, tape_u8(t));
}

static void garbage(struct tape *t)
{
    struct bt_rpc *rpc = tape_bool(t) ? x.rpc : x.far;
    struct bt_rpc_stream *s = any_stream(rpc, t);
    size_t n;
    const uint8_t *p = tape_blob(t, 80, &n);
    if (s != NULL) {
        fake_rpc_deliver(s, p, n, tape_u8(t));
    }
}

static void stream_event(struct tape *t)
{
    struct bt_rpc *rpc = tape_bool(t) ? x.rpc : x.far;
    struct bt_rpc_stream *s = any_stream(rpc, t);
    if (s == NULL) {
        return;
    }
    if (tape_below(t, 4) == 0) {
        fake_rpc_end(s, tape_bool(t) ? BT_GRPC_UNAVAILABLE : BT_GRPC_FAILED_PRECONDITION, "tape");
    } else {
        fake_rpc_full(s, tape_one_in(t, 8));
    }
}

/* ---- start, end, steps ---- */

static void first_start(void)
{
    char err[512], path[128];
    BT_ASSERT(bt_loop_create(&loop) == BT_OK);
    BT_ASSERT(bt_kv_layout_gqa(TOKENS, 2, 1, 16, BT_DT_BF16, 0, &layout) == BT_OK);
    (void)bt_kv_segment(&layout, 0, &segment_bytes);
    memset(root.b, 7, sizeof(root.b));
    snprintf(path, sizeof(path), "%s/slab", rig_dir());
    uint64_t slot = BT_ALIGN_UP(layout.block_bytes, 4096);
    struct bt_slab_spec spec = {.path = path,
                                .bytes = 5 * 4096 + SLOTS * (slot + 128 + 8),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = 99};
    BT_ASSERT(bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) == BT_OK);
    BT_ASSERT(unlink(path) == 0);
}

static void start(void)
{
    static const struct bt_wire_ops ops = {
        .lookup = lookup, .send_end = send_end, .want = want, .want_end = want_end};
    static const char *const listen[] = {"127.0.0.1", NULL};
    char err[512];
    if (loop == NULL) {
        first_start();
    }
    memset(&x, 0, sizeof(x));
    memset(slab->crcs, 0, (size_t)slab->super->n_slots * layout.n_layers * sizeof(uint32_t));
    x.metrics = bt_metrics_create();
    x.rpc = fake_rpc_create(loop);
    BT_ASSERT(bt_rpc_server_create(x.rpc, "x", &x.server, NULL) == BT_OK);
    struct bt_wire_config conf = {.cluster = "c",
                                  .name = "kvstore-n1",
                                  .incarnation = 99,
                                  .layout = &layout,
                                  .root = &root,
                                  .listen = listen,
                                  .over_grpc = true,
                                  .bytes_in_flight_max = 8192,
                                  .idle_ms = 3000};
    bt_status_t st = bt_wire_create(loop, x.rpc, x.server, slab, &conf, &ops, NULL, x.metrics, &x.w,
                                    err, sizeof(err));
    BT_ASSERT(st == BT_OK);
    x.far = fake_rpc_last();
    bt_rpc_server_start(x.server);
}

static void finish(void)
{
    bt_rpc_server_destroy(x.server);
    bt_wire_destroy(x.w);
    __real_bt_loop_poll(loop, 0);
    for (int i = 0; i < FLOWS; i++) {
        BT_ASSERT(!x.pulls[i].active && !x.pushes[i].active);
    }
    bt_rpc_destroy(x.rpc);
    bt_metrics_destroy(x.metrics);
    __real_bt_loop_poll(loop, 0);
}

static void step(struct tape *t)
{
    switch (tape_u8(t) % 16) {
    case 0:
    case 1: hello(t); break;
    case 2:
    case 3: prove(t); break;
    case 4:
    case 5: pull(t); break;
    case 6:
    case 7: say(t); break;
    case 8: answer(t); break;
    case 9:
    case 10:
    case 11: bring(t); break;
    case 12: push(t); break;
    case 13: stream_event(t); break;
    case 14: garbage(t); break;
    default: rig_pass_ms(tape_u8(t) * 10u); break;
    }
    for (int i = 0; i < 2; i++) {
        __real_bt_loop_poll(loop, 0);
        transfer(1);
        drain_rpc(x.rpc, true);
        drain_rpc(x.far, false);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tape t = tape_of(data, size);
    rig_reset();
    start();
    for (int i = 0; i < STEPS && tape_left(&t) > 0; i++) {
        step(&t);
    }
    finish();
    return 0;
}
