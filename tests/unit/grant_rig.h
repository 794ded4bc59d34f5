/* Grants in one process: the real code over a real slab, cache and seal thread, by a clock that the
 * test moves. Conductors, the sockets of workers and the wire are recorders. A worker's pidfd is
 * an event descriptor: the worker is dead when the test says so. */
#ifndef TESTS_UNIT_GRANT_RIG_H
#define TESTS_UNIT_GRANT_RIG_H

#include "kv_clock.h"
#include "kv_fetch.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include "common/rpc/ranges.h"

#define RIG_SLOTS      32u
#define RIG_RECLAIM_MS 5000u
#define RIG_KINDS      24
#define RIG_WORKERS    4
#define WRITER         BATON__LOCAL_MODE__WRITER
#define READER         BATON__LOCAL_MODE__READER

struct rig_worker {
    struct bt_grant_worker *w;
    int pidfd;
    uint32_t n[RIG_KINDS]; /* messages to it, by their case */
    Baton__LocalMsg *last[RIG_KINDS];
    uint32_t n_bells, n_drops;
};

struct rig_session { /* of a conductor */
    uint32_t n[RIG_KINDS];
    Baton__FromKvstore *last[RIG_KINDS];
};

static struct node node;
static struct rig_worker wk[RIG_WORKERS];
static struct rig_session sess[2];
#define SA ((void *)&sess[0])
#define SB ((void *)&sess[1])

/* What worker i, or session s, was told last of a kind. */
#define TOLD(i, kind)   (wk[i].last[BATON__LOCAL_MSG__M_##kind])
#define TOLDS(i, kind)  (wk[i].n[BATON__LOCAL_MSG__M_##kind])
#define HEARD(s, kind)  (sess[s].last[BATON__FROM_KVSTORE__M_##kind])
#define HEARDS(s, kind) (sess[s].n[BATON__FROM_KVSTORE__M_##kind])

static inline void rig_send(void *conn, const Baton__LocalMsg *m)
{
    struct rig_worker *t = conn;
    assert_true((size_t)m->m_case < RIG_KINDS);
    t->n[m->m_case]++;
    if (t->last[m->m_case] != NULL) {
        baton__local_msg__free_unpacked(t->last[m->m_case], NULL);
    }
    t->last[m->m_case] = bt_message_copy(&m->base);
}

static inline void rig_ring(void *conn)
{
    ((struct rig_worker *)conn)->n_bells++;
}

static inline void rig_drop(void *conn)
{
    ((struct rig_worker *)conn)->n_drops++;
}

static inline void rig_hear(void *session, const Baton__FromKvstore *m)
{
    struct rig_session *s = session;
    assert_true((size_t)m->m_case < RIG_KINDS);
    s->n[m->m_case]++;
    if (s->last[m->m_case] != NULL) {
        baton__from_kvstore__free_unpacked(s->last[m->m_case], NULL);
    }
    s->last[m->m_case] = bt_message_copy(&m->base);
}

/* Worker i, "w0" to "w3", attaches (again). */
static inline void rig_attach(uint32_t i)
{
    static const struct bt_grant_worker_ops ops = {
        .send = rig_send, .ring = rig_ring, .drop = rig_drop};
    char name[8];
    snprintf(name, sizeof(name), "w%u", i);
    wk[i].pidfd = eventfd(0, EFD_CLOEXEC);
    assert_true(wk[i].pidfd >= 0);
    wk[i].w = bt_grants_attach(node.grants, name, 100 + i, 1000 + i, wk[i].pidfd, &ops, &wk[i]);
}

static inline bool rig_fd_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

/* Its process has ended. */
static inline void rig_die(uint32_t i)
{
    uint64_t one = 1;
    uint32_t drops = wk[i].n_drops;
    assert_int_equal(write(wk[i].pidfd, &one, sizeof(one)), sizeof(one));
    bt_loop_poll(node.loop, 0);
    assert_int_equal(wk[i].n_drops, drops + 1);
    wk[i].w = NULL;
}

static inline void rig_detach(uint32_t i)
{
    bt_grants_detach(node.grants, wk[i].w);
    wk[i].w = NULL;
}

static const struct node_ssd *rig_ssd; /* of the nodes started from here on; NULL: none */

static inline void rig_start(uint32_t n_slots)
{
    node_start_ssd(&node, n_slots, RIG_RECLAIM_MS, rig_ssd);
    node.to_real = rig_hear;
    memset(wk, 0, sizeof(wk));
    memset(sess, 0, sizeof(sess));
    rig_attach(0);
    rig_attach(1);
}

static inline void rig_stop(void)
{
    for (uint32_t i = 0; i < RIG_WORKERS; i++) {
        if (wk[i].w != NULL) {
            rig_detach(i);
        }
    }
    node_stop(&node);
    for (uint32_t k = 0; k < RIG_KINDS; k++) {
        for (uint32_t i = 0; i < RIG_WORKERS; i++) {
            if (wk[i].last[k] != NULL) {
                baton__local_msg__free_unpacked(wk[i].last[k], NULL);
            }
        }
        for (uint32_t s = 0; s < 2; s++) {
            if (sess[s].last[k] != NULL) {
                baton__from_kvstore__free_unpacked(sess[s].last[k], NULL);
            }
        }
    }
}

static inline int setup(void **state)
{
    (void)state;
    rig_start(RIG_SLOTS);
    return 0;
}

static inline int teardown(void **state)
{
    (void)state;
    rig_stop();
    return 0;
}

static inline struct bt_grants_stats stats(void)
{
    struct bt_grants_stats s;
    bt_grants_stats(node.grants, &s);
    return s;
}

/* No grant, no slot in use, nobody who waits. */
static inline void assert_all_back(void)
{
    struct bt_pool_counts c = node_counts(&node);
    struct bt_grants_stats s = stats();
    assert_int_equal(c.leases + c.writing + c.quarantine + c.transit, 0);
    assert_int_equal(s.grants + s.opens + s.sends + s.recvs + s.puts + s.leases + s.pending, 0);
}

/* ---- what a worker says ---- */

#define SAY(i, kind, field, type, TYPE, ...)                                                       \
    do {                                                                                           \
        Baton__LocalMsg m_ = BATON__LOCAL_MSG__INIT;                                               \
        Baton__Local##type p_ = BATON__LOCAL_##TYPE##__INIT;                                       \
        const ProtobufCMessage base_ = p_.base;                                                    \
        p_ = (Baton__Local##type){.base = base_, __VA_ARGS__};                                     \
        m_.m_case = BATON__LOCAL_MSG__M_##kind;                                                    \
        m_.field = &p_;                                                                            \
        assert_int_equal(bt_grants_message(node.grants, wk[i].w, &m_), BT_OK);                     \
    } while (0)

static inline void say_open(uint32_t i, uint64_t r, uint32_t e, Baton__LocalMode mode)
{
    SAY(i, OPEN, open, Open, OPEN, .request = r, .epoch = e, .mode = mode);
}

/* Opens; the status of the answer, which comes at once. */
static inline int32_t open_grant(uint32_t i, uint64_t r, uint32_t e, Baton__LocalMode mode)
{
    uint32_t before = TOLDS(i, OPENED);
    say_open(i, r, e, mode);
    assert_int_equal(TOLDS(i, OPENED), before + 1);
    const Baton__LocalOpened *a = TOLD(i, OPENED)->opened;
    assert_int_equal(a->request, r);
    assert_int_equal(a->epoch, e);
    assert_int_equal(a->mode, mode);
    return a->status;
}

static inline void say_close(uint32_t i, uint64_t r, uint32_t e, Baton__LocalMode mode, bool abort)
{
    SAY(i, CLOSE, close, Close, CLOSE, .request = r, .epoch = e, .mode = mode, .abort = abort);
}

static inline void say_trailer(uint32_t i, uint64_t r, uint32_t e, uint32_t token)
{
    SAY(i, TRAILER, trailer, Trailer, TRAILER, .request = r, .epoch = e, .first_token = token,
        .finished = true, .last_compute_ns = 12345);
}

/* The writer that opened last has filled `items` items. */
static inline void raise_items(uint32_t i, uint32_t items)
{
    const Baton__LocalOpened *a = TOLD(i, OPENED)->opened;
    bt_flow_raise(&node.slab->flows[a->flow_word], a->epoch, items);
}

/* Items of n blocks: chunks of two blocks, two layers. */
static inline uint32_t items_of(uint32_t n_blocks)
{
    return BT_DIV_UP(n_blocks, NODE_CHUNK / NODE_BT) * node.layout.n_layers;
}

static inline uint32_t cached(uint32_t chain, uint32_t n)
{
    struct bt_kv_key k;
    uint32_t have = 0;
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &k);
        have += bt_index_find(node.cache->index, &k) != UINT32_MAX;
    }
    return have;
}

/* A prompt of n blocks, reserved, written by worker 0, sealed, and still reserved. */
static inline void write_prompt(uint64_t r, uint32_t chain, uint32_t n)
{
    assert_int_equal(node_reserve(&node, SA, r, 1, chain, n * NODE_BT, 0), BT_OK);
    assert_int_equal(open_grant(0, r, 1, WRITER), BT_OK);
    raise_items(0, items_of(n));
    say_trailer(0, r, 1, 7);
    say_close(0, r, 1, WRITER, false);
    NODE_UNTIL(&node, cached(chain, n) == n);
}

/* Blocks of a chain in the cache, held by nobody. */
static inline void cache_prompt(uint64_t r, uint32_t chain, uint32_t n)
{
    write_prompt(r, chain, n);
    bt_grants_release(node.grants, SA, r, 1);
}

/* Blocks that another kvstore has, in n runs. The message points into f. */
struct far {
    Baton__Source src, *at;
    uint32_t first[2], count[2];
};

/* runs: [n][2], their first blocks and lengths. */
static inline void far_init(struct far *f, const uint32_t (*runs)[2], size_t n)
{
    baton__source__init(&f->src);
    f->at = &f->src;
    f->src.peer = "kvstore-n9";
    f->src.peer_rpc = "127.0.0.1:1";
    f->src.peer_incarnation = 7;
    f->src.first = f->first;
    f->src.count = f->count;
    f->src.n_first = f->src.n_count = n;
    for (size_t i = 0; i < n; i++) {
        f->first[i] = runs[i][0];
        f->count[i] = runs[i][1];
    }
}

#endif
