/* Grants as a state machine: epochs, references, transfers of the wire, seals, transit, and a
 * random walk in which every slot must come back, and none before its last user has gone. The
 * worker is this process (its own pidfd), the wire and the conductor are recorders. */
#include "kv_node.h"

#include <sys/syscall.h>

#include "common/base/philox.h"

static struct node node;
static int sess_a, sess_b;
#define SA ((void *)&sess_a)
#define SB ((void *)&sess_b)

struct test_worker {
    struct bt_grant_worker *w;
    uint32_t n_opened, n_trailers, n_revokes, n_bells, n_slots, flow, resident;
    int32_t status;
    uint32_t slots[64];
    uint64_t last_revoked;
};
static struct test_worker wk[2];

static void w_send(void *conn, const Baton__LocalMsg *m)
{
    struct test_worker *t = conn;
    if (m->m_case == BATON__LOCAL_MSG__M_OPENED) {
        t->n_opened++;
        t->status = m->opened->status;
        t->n_slots = (uint32_t)m->opened->n_slots;
        t->resident = m->opened->resident_blocks;
        t->flow = m->opened->flow_word;
        assert_true(t->n_slots <= 64);
        for (uint32_t i = 0; i < t->n_slots; i++) {
            t->slots[i] = m->opened->slots[i];
            assert_int_equal(
                bt_slot_generation(atomic_load(&node.slab->headers[t->slots[i]].state)),
                m->opened->generations[i]);
        }
    } else if (m->m_case == BATON__LOCAL_MSG__M_TRAILER) {
        t->n_trailers++;
    } else if (m->m_case == BATON__LOCAL_MSG__M_REVOKE) {
        t->n_revokes++;
        t->last_revoked = m->revoke->request;
    }
}

static void w_ring(void *conn)
{
    ((struct test_worker *)conn)->n_bells++;
}

static void w_drop(void *conn)
{
    (void)conn;
}

static const struct bt_grant_worker_ops w_ops = {.send = w_send, .ring = w_ring, .drop = w_drop};

static void attach(int i, uint64_t inc)
{
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    assert_true(fd >= 0);
    wk[i].w = bt_grants_attach(node.grants, i == 0 ? "p" : "d", inc, (uint32_t)getpid(), fd, &w_ops,
                               &wk[i]);
}

static int setup(void **state)
{
    (void)state;
    node_start(&node, 32, 3600000);
    memset(wk, 0, sizeof(wk));
    attach(0, 1);
    attach(1, 2);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    bt_grants_detach(node.grants, wk[0].w);
    bt_grants_detach(node.grants, wk[1].w);
    node_stop(&node);
    return 0;
}

static int32_t open_grant(int i, uint64_t r, uint32_t e, Baton__LocalMode mode)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalOpen o = BATON__LOCAL_OPEN__INIT;
    o.request = r;
    o.epoch = e;
    o.mode = mode;
    m.m_case = BATON__LOCAL_MSG__M_OPEN;
    m.open = &o;
    wk[i].status = 12345; /* no answer yet */
    assert_int_equal(bt_grants_message(node.grants, wk[i].w, &m), BT_OK);
    return wk[i].status;
}

static int32_t open_w(int i, uint64_t r, uint32_t e)
{
    return open_grant(i, r, e, BATON__LOCAL_MODE__WRITER);
}

static int32_t open_r(int i, uint64_t r, uint32_t e)
{
    return open_grant(i, r, e, BATON__LOCAL_MODE__READER);
}

static void close_grant(int i, uint64_t r, uint32_t e, Baton__LocalMode mode, bool abort_it)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalClose c = BATON__LOCAL_CLOSE__INIT;
    c.request = r;
    c.epoch = e;
    c.mode = mode;
    c.abort = abort_it;
    m.m_case = BATON__LOCAL_MSG__M_CLOSE;
    m.close = &c;
    assert_int_equal(bt_grants_message(node.grants, wk[i].w, &m), BT_OK);
}

static void trailer(int i, uint64_t r, uint32_t e, uint32_t token)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalTrailer t = BATON__LOCAL_TRAILER__INIT;
    t.request = r;
    t.epoch = e;
    t.first_token = token;
    m.m_case = BATON__LOCAL_MSG__M_TRAILER;
    m.trailer = &t;
    assert_int_equal(bt_grants_message(node.grants, wk[i].w, &m), BT_OK);
}

static void raise_word(uint32_t flow, uint32_t e, uint32_t items)
{
    bt_flow_raise(&node.slab->flows[flow], e, items);
}

#define W BATON__LOCAL_MODE__WRITER
#define R BATON__LOCAL_MODE__READER

static struct bt_grants_stats stats(void)
{
    struct bt_grants_stats s;
    bt_grants_stats(node.grants, &s);
    return s;
}

static void assert_all_back(void)
{
    struct bt_pool_counts c = node_counts(&node);
    struct bt_grants_stats s = stats();
    assert_int_equal(c.leases, 0);
    assert_int_equal(c.writing, 0);
    assert_int_equal(c.quarantine, 0);
    assert_int_equal(c.transit, 0);
    assert_int_equal(c.free + c.sealed, c.total);
    assert_int_equal(s.grants, 0);
    assert_int_equal(s.opens, 0);
    assert_int_equal(s.sends, 0);
    assert_int_equal(s.recvs, 0);
}

/* ---- epochs and references ---- */

static void epochs(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 2, 1, 48, 0), BT_OK);
    assert_int_equal(node_reserve(&node, SA, 1, 2, 1, 48, 0), BT_ERR_EXISTS);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_ERR_STALE);
    assert_int_equal(open_w(0, 1, 1), BT_ERR_STALE);
    assert_int_equal(open_w(0, 1, 2), BT_OK);
    assert_int_equal(node_counts(&node).writing, 3);
    /* A newer epoch takes the old one back, but the old writer's slots stay until it closes. */
    assert_int_equal(node_reserve(&node, SA, 1, 3, 1, 48, 0), BT_OK);
    assert_int_equal(wk[0].n_revokes, 1);
    assert_int_equal(node_counts(&node).writing, 6);
    trailer(0, 1, 2, 7); /* of an older epoch: dropped */
    close_grant(0, 1, 2, W, true);
    assert_int_equal(node_counts(&node).writing, 3);
    bt_grants_release(node.grants, SA, 1, 2); /* below the current one: touches nothing */
    assert_int_equal(node_counts(&node).writing, 3);
    bt_grants_release(node.grants, SA, 1, 3);
    assert_int_equal(node_reserve(&node, SA, 1, 3, 1, 48, 0), BT_ERR_STALE);
    assert_int_equal(open_r(1, 1, 3), BT_ERR_STALE);
    assert_all_back();
}

static void sessions_own_reservations(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(node_reserve(&node, SB, 2, 1, 2, 48, 0), BT_OK);
    bt_grants_release(node.grants, SB, 1, 1); /* not B's */
    assert_int_equal(stats().grants, 2);
    bt_grants_session_end(node.grants, SB);
    assert_int_equal(stats().grants, 1);
    assert_int_equal(open_w(0, 1, 1), BT_OK);
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(stats().grants, 1); /* the writer has it still */
    assert_int_equal(wk[0].n_revokes, 1);
    assert_int_equal(node.n_failed, 0); /* nobody is there to be told */
    close_grant(0, 1, 1, W, true);
    assert_all_back();
}

static void bad_reservations(void **state)
{
    (void)state;
    Baton__Reserve r = BATON__RESERVE__INIT;
    uint8_t keys[96] = {0};
    assert_int_equal(node_reserve(&node, SA, 1, 0, 1, 48, 0), BT_ERR_INVALID);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 0, 0), BT_ERR_INVALID);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 16 * 1000, 0), BT_ERR_EXHAUSTED);
    assert_non_null(strstr(node.detail, "1000 slots needed; "));
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 16 * 30000, 0), BT_ERR_TOO_LARGE);
    r.request = 5;
    r.epoch = 1;
    r.n_tokens = 48;
    r.keys.data = keys;
    r.keys.len = 95;
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_ERR_INVALID);
    r.keys.len = 96;
    r.role = BATON__GRANT_ROLE__RECEIVE; /* without a peer */
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_ERR_INVALID);
    r.role = (Baton__GrantRole)9;
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_ERR_INVALID);
    assert_all_back();
}

static void one_writer(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_w(0, 1, 1), BT_OK);
    assert_int_equal(open_w(1, 1, 1), BT_ERR_EXISTS);
    assert_int_equal(open_r(1, 1, 1), BT_OK);
    assert_int_equal(open_r(1, 1, 1), BT_ERR_EXISTS);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(open_w(0, 2, 1), BT_ERR_INVALID);
    /* The writer says it is done although its flow is not: the grant has failed. */
    close_grant(0, 1, 1, W, false);
    assert_int_equal(node.n_failed, 1);
    assert_int_equal(node.failed_status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(wk[1].last_revoked, 1);
    assert_int_equal(open_w(0, 1, 1), BT_ERR_PEER_PROTOCOL); /* and stays so */
    close_grant(1, 1, 1, R, false);
}

/* ---- sealing ---- */

static void abort_keeps_whole_chunks(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 80, 0), BT_OK); /* 3 chunks of 2 layers */
    assert_int_equal(open_w(0, 1, 1), BT_OK);
    raise_word(wk[0].flow, 1, 5); /* two chunks and half of the third */
    close_grant(0, 1, 1, W, true);
    assert_int_equal(node.failed_status, BT_ERR_CANCELLED);
    NODE_UNTIL(&node, index_count(node.cache->index) == 4);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    assert_int_equal(node_counts(&node).sealed, 4);
    /* A word that claims too much seals no more than there is; the partial block never. */
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 40, 0), BT_OK);
    assert_int_equal(open_w(0, 2, 1), BT_OK);
    raise_word(wk[0].flow, 1, 4000000000u);
    close_grant(0, 2, 1, W, true);
    NODE_UNTIL(&node, index_count(node.cache->index) == 6);
    bt_grants_release(node.grants, SA, 2, 1);
    assert_all_back();
}

static void no_cache_is_honoured(void **state)
{
    (void)state;
    for (uint64_t r = 1; r <= 3; r++) { /* the first fills the cache, the others must not see it */
        assert_int_equal(
            node_reserve(&node, SA, r, 1, r == 3 ? 2 : 1, 64, r > 1 ? RES_NO_CACHE : 0), BT_OK);
        assert_int_equal(node.resident, 0);
        assert_int_equal(open_w(0, r, 1), BT_OK);
        raise_word(wk[0].flow, 1, 4);
        trailer(0, r, 1, 1);
        close_grant(0, r, 1, W, false);
        if (r == 1) {
            NODE_UNTIL(&node, index_count(node.cache->index) == 4);
        }
        bt_grants_release(node.grants, SA, r, 1);
    }
    node_poll_ms(&node, 50);
    assert_int_equal(index_count(node.cache->index), 4);
    assert_int_equal(node.n_failed, 0);
    assert_all_back();
}

/* Two requests compute the same prompt at once: the second copy is dropped. */
static void duplicates(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 64, 0), BT_OK);
    assert_int_equal(open_w(0, 1, 1), BT_OK);
    uint32_t f1 = wk[0].flow;
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 64, 0), BT_OK);
    assert_int_equal(node.resident, 0); /* WRITING blocks are nobody else's */
    assert_int_equal(open_w(0, 2, 1), BT_OK);
    raise_word(f1, 1, 4);
    raise_word(wk[0].flow, 1, 4);
    trailer(0, 1, 1, 1);
    trailer(0, 2, 1, 1);
    NODE_UNTIL(&node, node.cache->duplicates == 4);
    close_grant(0, 1, 1, W, false);
    close_grant(0, 2, 1, W, false);
    bt_grants_release(node.grants, SA, 1, 1);
    bt_grants_release(node.grants, SA, 2, 1);
    assert_all_back();
    assert_int_equal(node_counts(&node).sealed, 4);
}

/* ---- the wire, sending ---- */

static bt_status_t lookup(uint64_t r, uint32_t e, uintptr_t snd, struct bt_wire_source *src)
{
    return bt_grants_wire_ops.lookup(node.grants, r, e, (struct bt_wire_send *)snd, src);
}

static void send_end(uintptr_t snd, const struct bt_wire_source *src, bt_status_t st)
{
    bt_grants_wire_ops.send_end(node.grants, src->grant, (struct bt_wire_send *)snd, st);
}

static void sends_hold_slots(void **state)
{
    struct bt_wire_source s1, s2;
    (void)state;
    assert_int_equal(lookup(1, 1, 100, &s1), BT_ERR_NOT_FOUND);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(lookup(1, 1, 100, &s1), BT_OK);
    assert_int_equal(s1.shape.n_tokens, 48);
    assert_int_equal(open_w(0, 1, 1), BT_OK);
    assert_memory_equal(s1.slots, wk[0].slots, 12);
    raise_word(wk[0].flow, 1, 2);
    bt_grants_bell(node.grants, wk[0].w);
    assert_int_equal(node.n_kicks, 1);
    bt_grants_bell(node.grants, wk[0].w); /* nothing moved */
    assert_int_equal(node.n_kicks, 1);
    /* The trailer overtakes the last bell: the wire must hear of the last items all the same. */
    raise_word(wk[0].flow, 1, 4);
    trailer(0, 1, 1, 77);
    assert_int_equal(node.n_kicks, 2);
    assert_int_equal(node.n_trailers, 1);
    assert_int_equal(node.trailer.first_token, 77);
    /* A peer that comes now gets the trailer too, though not from inside of lookup. */
    assert_int_equal(lookup(1, 1, 200, &s2), BT_OK);
    assert_int_equal(node.n_trailers, 1);
    NODE_UNTIL(&node, node.n_trailers == 2);
    close_grant(0, 1, 1, W, false);
    NODE_UNTIL(&node, node_counts(&node).sealed == 3);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node.n_aborts, 2);
    assert_int_equal(lookup(1, 1, 300, &s2), BT_ERR_STALE);
    assert_int_equal(node_counts(&node).leases, 3);
    send_end(100, &s1, BT_OK);
    assert_int_equal(node_counts(&node).leases, 3);
    send_end(200, &s1, BT_ERR_CANCELLED);
    assert_all_back();
    assert_int_equal(node.n_failed, 0);
}

static void lookup_of_epochs(void **state)
{
    struct bt_wire_source s;
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 2, 1, 48, 0), BT_OK);
    assert_int_equal(lookup(1, 1, 100, &s), BT_ERR_STALE);
    assert_int_equal(lookup(1, 3, 100, &s), BT_ERR_NOT_FOUND);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(lookup(2, 1, 100, &s), BT_ERR_NOT_FOUND); /* not a source */
}

/* ---- the wire, receiving ---- */

static void recv_land(struct node_recv *r, uint32_t items, bool done)
{
    for (uint32_t b = r->first_block; b < r->n_blocks; b++) { /* as the wire: data, then CRCs */
        memset(bt_slab_data(node.slab, r->slots[b]), (int)(b + 1), node.layout.block_bytes);
    }
    bt_flow_raise(r->word, r->epoch, items);
    r->ops.on_progress(r->arg);
    if (done) {
        struct bt_wire_trailer t = {.first_token = 9};
        r->ops.on_done(r->arg, &t, 10, 20, 30, 40);
    }
}

static void recv_quiet(struct node_recv *r)
{
    assert_true(r->active);
    r->active = false;
    r->ops.on_quiet(r->arg);
}

static void receive_transit(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, RES_RECEIVE), BT_OK);
    struct node_recv *r = &node.recvs[0];
    assert_int_equal(r->first_block, 0);
    assert_int_equal(node_counts(&node).transit, 3);
    assert_int_equal(open_r(1, 1, 1), BT_OK);
    recv_land(r, 2, false);
    assert_int_equal(wk[1].n_bells, 1);
    assert_int_equal(wk[1].n_trailers, 0);
    recv_land(r, 4, true);
    assert_int_equal(wk[1].n_bells, 2);
    assert_int_equal(wk[1].n_trailers, 1);
    assert_int_equal(node.n_done, 1);
    assert_int_equal(node.done.first_ns, 10);
    assert_int_equal(node.done.bytes, 30);
    recv_quiet(r);
    close_grant(1, 1, 1, R, false);
    node_poll_ms(&node, 50);
    assert_int_equal(node_counts(&node).writing, 3); /* reserved still */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    assert_int_equal(node_counts(&node).sealed, 0); /* not kept */
    assert_false(r->cancelled);
}

static void receive_keep(void **state)
{
    struct bt_kv_key k;
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 40, RES_RECEIVE | RES_KEEP), BT_OK);
    struct node_recv *r = &node.recvs[0];
    node_key(1, 0, &k);
    recv_land(r, 4, false);
    for (uint32_t b = 0; b < 2; b++) { /* CRCs as the wire stores them */
        node_key(1, b, &k);
        for (uint32_t l = 0; l < 2; l++) {
            uint32_t bytes;
            uint64_t off = bt_kv_segment(&node.layout, l, &bytes);
            node.slab->crcs[r->slots[b] * 2 + l] =
                bt_slab_segment_crc(&k, l, node.layout.layout_id,
                                    (uint8_t *)bt_slab_data(node.slab, r->slots[b]) + off, bytes);
        }
    }
    recv_land(r, 4, true);
    recv_quiet(r);
    NODE_UNTIL(&node, index_count(node.cache->index) == 2);
    assert_int_equal(node_counts(&node).writing, 1); /* the private block is in no index */
    for (uint32_t b = 0; b < 2; b++) {
        assert_int_equal(bt_pool_verify(node.cache->pool, r->slots[b]), BT_OK);
    }
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    /* Everything resident: the next one receives from block 2 on, its reader reads all. */
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 32, RES_RECEIVE | RES_KEEP), BT_OK);
    assert_int_equal(node.resident, 2);
    assert_int_equal(node.recvs[1].first_block, 2);
    assert_int_equal(bt_flow_read(node.recvs[1].word, 1), 2);
}

/* A cancelled receive may write until it is quiet, whoever else has let go. */
static void cancelled_receive_holds_until_quiet(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(open_r(1, 1, 1), BT_OK);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_true(node.recvs[0].cancelled);
    assert_int_equal(wk[1].n_revokes, 1);
    close_grant(1, 1, 1, R, true);
    node_poll_ms(&node, 300);
    assert_int_equal(node_counts(&node).writing, 3);
    recv_quiet(&node.recvs[0]);
    assert_all_back();
}

static void failed_receive(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(open_r(1, 1, 1), BT_OK);
    node.recvs[0].ops.on_failed(node.recvs[0].arg, BT_ERR_PEER_LOST, "gone");
    assert_int_equal(node.n_failed, 1);
    assert_int_equal(node.failed_status, BT_ERR_PEER_LOST);
    assert_int_equal(wk[1].n_revokes, 1);
    assert_false(node.recvs[0].cancelled); /* it has ended by itself */
    recv_quiet(&node.recvs[0]);
    close_grant(1, 1, 1, R, true);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    assert_int_equal(node.n_failed, 1);
}

static void transit_is_capped(void **state)
{
    (void)state;
    uint32_t cap = node.slab->super->n_slots / 2;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, (cap + 1) * NODE_BT, RES_RECEIVE),
                     BT_ERR_EXHAUSTED);
    assert_non_null(strstr(node.detail, "hand-offs may take half of the slots"));
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, cap * NODE_BT, RES_RECEIVE), BT_OK);
    assert_int_equal(node_reserve(&node, SA, 3, 1, 2, NODE_BT, RES_RECEIVE), BT_ERR_EXHAUSTED);
    assert_int_equal(node_reserve(&node, SA, 4, 1, 2, NODE_BT, RES_RECEIVE | RES_KEEP), BT_OK);
    bt_grants_release(node.grants, SA, 2, 1);
    recv_quiet(&node.recvs[0]);
    assert_int_equal(node_reserve(&node, SA, 5, 1, 2, NODE_BT, RES_RECEIVE), BT_OK);
}

/* ---- a random walk ---- */

#define REQS 6

struct model {
    bool reserved, receive, writer, reader, sending, complete;
    uint32_t epoch, flow, n_slots, recv;
    struct bt_wire_source src;
    uint32_t slots[64], gens[64];
};

static uint32_t rnd(uint64_t *seq, uint32_t below)
{
    uint32_t key[2] = {77, 3}, ctr[4] = {(uint32_t)*seq, 0, 0, 0}, out[4];
    (*seq)++;
    bt_philox4x32(key, ctr, out);
    return out[0] % below;
}

/* Is the wire still receiving for request i's last epoch? Records are used again. */
static bool receiving(const struct model *x, uint32_t i)
{
    const struct node_recv *r = x->recv != UINT32_MAX ? &node.recvs[x->recv] : NULL;
    return r != NULL && r->active && r->request == i + 1 && r->epoch == x->epoch;
}

/* While anybody holds a grant, its slots keep their generation and are not free. */
static void check_held(const struct model *m)
{
    for (uint32_t i = 0; i < REQS; i++) {
        bool held =
            m[i].reserved || m[i].writer || m[i].reader || m[i].sending || receiving(&m[i], i);
        for (uint32_t b = 0; held && b < m[i].n_slots; b++) {
            uint32_t s = m[i].slots[b];
            assert_int_equal(bt_pool_generation(node.cache->pool, s), m[i].gens[b]);
            assert_int_not_equal(bt_pool_state(node.cache->pool, s), BT_SLOT_FREE);
            for (uint32_t k = 0; k < i; k++) { /* no WRITING slot is in two grants */
                for (uint32_t c = 0; c < m[k].n_slots; c++) {
                    if (bt_pool_state(node.cache->pool, s) == BT_SLOT_WRITING &&
                        m[k].gens[c] == m[i].gens[b]) {
                        assert_int_not_equal(m[k].slots[c], s);
                    }
                }
            }
        }
    }
}

static void take_slots(struct model *m, const struct test_worker *w)
{
    m->n_slots = w->n_slots;
    m->flow = w->flow;
    for (uint32_t b = 0; b < w->n_slots; b++) {
        m->slots[b] = w->slots[b];
        m->gens[b] = bt_pool_generation(node.cache->pool, w->slots[b]);
    }
}

static void step(struct model *m, uint64_t *seq)
{
    uint32_t i = rnd(seq, REQS);
    struct model *x = &m[i];
    uint64_t req = i + 1;
    bool recv_active = receiving(x, i);
    switch (rnd(seq, 9)) {
    case 0:
        if (!x->reserved && !x->writer && !x->reader && !x->sending && !recv_active) {
            x->receive = rnd(seq, 2) == 0;
            int flags = x->receive ? RES_RECEIVE : 0;
            flags |= rnd(seq, 2) == 0 ? RES_KEEP : 0;
            x->epoch++;
            uint32_t tokens = 1 + rnd(seq, 7 * NODE_BT);
            x->recv = UINT32_MAX;
            x->n_slots = 0;
            x->complete = false;
            x->reserved =
                node_reserve(&node, SA, req, x->epoch, rnd(seq, 8), tokens, flags) == BT_OK;
            if (x->reserved && x->receive) {
                x->recv = node.last_recv;
            }
        }
        return;
    case 1:
        if (x->reserved && !x->receive && !x->writer && open_w(0, req, x->epoch) == BT_OK) {
            x->writer = true;
            take_slots(x, &wk[0]);
        }
        return;
    case 2:
        if (x->reserved && !x->reader && open_r(1, req, x->epoch) == BT_OK) {
            x->reader = true;
            take_slots(x, &wk[1]);
        }
        return;
    case 3:
        if (x->reserved && !x->receive && !x->sending) {
            x->sending = lookup(req, x->epoch, 1000 + i, &x->src) == BT_OK;
        }
        return;
    case 4:
        if (x->writer && !x->complete && x->reserved) {
            uint32_t chunks = BT_DIV_UP(x->n_slots, NODE_CHUNK / NODE_BT);
            raise_word(x->flow, x->epoch, chunks * 2);
            trailer(0, req, x->epoch, 1);
            x->complete = true;
        }
        return;
    case 5:
        if (x->writer) {
            close_grant(0, req, x->epoch, W, !x->complete);
            x->writer = false;
        }
        return;
    case 6:
        if (x->reader) {
            close_grant(1, req, x->epoch, R, false);
            x->reader = false;
        }
        return;
    case 7:
        if (x->sending) {
            send_end(1000 + i, &x->src, BT_OK);
            x->sending = false;
        } else if (recv_active) {
            struct node_recv *r = &node.recvs[x->recv];
            if (!r->cancelled && rnd(seq, 2) == 0) {
                recv_land(r, BT_DIV_UP(r->n_blocks, 2) * 2, true);
            } else if (!r->cancelled) {
                r->ops.on_failed(r->arg, BT_ERR_PEER_LOST, "walk");
            }
            recv_quiet(r);
        }
        return;
    default:
        if (x->reserved) {
            bt_grants_release(node.grants, SA, req, x->epoch);
            x->reserved = false;
        }
        return;
    }
}

/* Has the walk been everywhere? */
static bool walked(void)
{
    return node.cache->sealed > 50 && node.cache->evicted > 50 && node.n_failed > 50 &&
           node.n_done > 50;
}

static void random_walk(void **state)
{
    struct model m[REQS] = {0};
    uint64_t seq = 0;
    (void)state;
    for (int i = 0; i < REQS; i++) {
        m[i].recv = UINT32_MAX;
    }
    /* On a busy machine the seal thread may get no turn during the first steps: then more. */
    uint64_t end = bt_mono_ns() + 20000000000ull;
    for (int n = 0; n < 20000 || (!walked() && bt_mono_ns() < end); n++) {
        step(m, &seq);
        check_held(m);
        if (n % 16 == 0) {
            bt_loop_poll(node.loop, n < 20000 ? 0 : 1);
        }
    }
    assert_true(walked());
    for (uint32_t i = 0; i < REQS; i++) {
        uint64_t req = i + 1;
        if (m[i].sending) {
            send_end(1000 + i, &m[i].src, BT_OK);
        }
        if (receiving(&m[i], i)) {
            recv_quiet(&node.recvs[m[i].recv]);
        }
        close_grant(0, req, m[i].epoch, W, true);
        close_grant(1, req, m[i].epoch, R, true);
    }
    bt_grants_session_end(node.grants, SA);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_all_back();
}

/* ---- prompts that no slab holds ---- */

/* Reserves the beginning of such a prompt, of `want` blocks, and opens it; its slots, 0: refused.
 */
static uint32_t begin_stream(uint64_t request, uint32_t want)
{
    int32_t st =
        node_reserve(&node, SA, request, 1, (uint32_t)request, want * NODE_BT, RES_STREAMS);
    if (st != BT_OK) {
        assert_int_equal(st, BT_ERR_EXHAUSTED);
        return 0;
    }
    assert_int_equal(open_w(0, request, 1), BT_OK);
    return wk[0].n_slots;
}

/* Several at once: the first has what it wants, half of the slots, others a quarter of that each,
 * and what nobody holds is left for windows and for prompts that the slab does hold. */
static void beginnings_share_the_slab(void **state)
{
    (void)state;
    uint32_t total = node_counts(&node).total, half = total / 2, quarter = half / 4;
    assert_int_equal(begin_stream(1, half), half);
    uint32_t flow = wk[0].flow;
    assert_int_equal(begin_stream(2, half), quarter);
    assert_int_equal(begin_stream(3, half), quarter);
    assert_int_equal(begin_stream(4, half), 0);
    assert_non_null(strstr(node.detail, "three quarters"));
    assert_int_equal(node_counts(&node).writing, half + 2 * quarter);
    assert_int_equal(node_reserve(&node, SA, 100, 1, 100, 3 * NODE_BT, 0), BT_OK);
    bt_grants_release(node.grants, SA, 100, 1);

    /* Once it is written it is cache like any other, and the next one begins. */
    uint32_t leases = node_counts(&node).leases;
    raise_word(flow, 1, BT_DIV_UP(half * NODE_BT, NODE_CHUNK) * node.layout.n_layers);
    trailer(0, 1, 1, 7);
    close_grant(0, 1, 1, BATON__LOCAL_MODE__WRITER, false);
    NODE_UNTIL(&node, node_counts(&node).leases == leases - half);
    for (uint32_t b = 0; b < half; b++) {
        struct bt_kv_key k;
        node_key(1, b, &k);
        assert_true(bt_index_find(node.cache->index, &k) != UINT32_MAX);
    }
    assert_int_equal(open_w(0, 1, 1), BT_ERR_STALE); /* the reservation is still there */
    assert_int_equal(begin_stream(200, half), half - 2 * quarter);
    bt_grants_session_end(node.grants, SA);
}

/* Its writer dies: what it may still write is nobody's for a quarantine, and goes then, although
 * the conductor has not released it yet. */
static void a_dead_beginning_lets_go(void **state)
{
    (void)state;
    uint32_t half = node_counts(&node).total / 2;
    assert_int_equal(begin_stream(1, half), half);
    attach(0, 1); /* again: what it held before is given up */
    assert_int_equal(node.n_failed, 1);
    assert_int_equal(node_counts(&node).leases, half);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(node_counts(&node).quarantine, 0);
    bt_grants_release(node.grants, SA, 1, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(epochs, setup, teardown),
        cmocka_unit_test_setup_teardown(sessions_own_reservations, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_reservations, setup, teardown),
        cmocka_unit_test_setup_teardown(one_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(abort_keeps_whole_chunks, setup, teardown),
        cmocka_unit_test_setup_teardown(no_cache_is_honoured, setup, teardown),
        cmocka_unit_test_setup_teardown(duplicates, setup, teardown),
        cmocka_unit_test_setup_teardown(sends_hold_slots, setup, teardown),
        cmocka_unit_test_setup_teardown(lookup_of_epochs, setup, teardown),
        cmocka_unit_test_setup_teardown(receive_transit, setup, teardown),
        cmocka_unit_test_setup_teardown(receive_keep, setup, teardown),
        cmocka_unit_test_setup_teardown(cancelled_receive_holds_until_quiet, setup, teardown),
        cmocka_unit_test_setup_teardown(failed_receive, setup, teardown),
        cmocka_unit_test_setup_teardown(transit_is_capped, setup, teardown),
        cmocka_unit_test_setup_teardown(random_walk, setup, teardown),
        cmocka_unit_test_setup_teardown(beginnings_share_the_slab, setup, teardown),
        cmocka_unit_test_setup_teardown(a_dead_beginning_lets_go, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
