/* A kvstore's core in a test: real slab, cache, seal thread, grants and local socket; the wire and
 * the conductor are recorders, so that a test decides when a transfer ends. One loop, polled. */
#ifndef TESTS_UNIT_KV_NODE_H
#define TESTS_UNIT_KV_NODE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv_cache.h"
#include "kvstore/cache/sealer.h"
#include "kvstore/cache/tier.h"
#include "kvstore/grant/grant.h"
#include "kvstore/serve/local.h"

#define NODE_BT    16u /* tokens of a block */
#define NODE_CHUNK 32u
#define NODE_RECVS 16
#define NODE_PULLS 64
/* Limits that do not pass by themselves, however slow the machine is. */
#define NODE_FETCH_WAIT_MS  60000
#define NODE_FETCH_STALL_MS 10000

struct node_recv { /* a receive that the core has started on the wire */
    bool active, cancelled;
    uint64_t request;
    uint32_t epoch, first_block, n_blocks, slots[64];
    char peer[32], rpc[32];
    uint64_t incarnation, timeout_ms;
    bt_flow_word_t *word;
    struct bt_wire_recv_ops ops;
    void *arg;
};

struct node_pull { /* a fetch that the core has asked a peer for */
    bool active, cancelled, taken;
    uint64_t incarnation, request; /* incarnation: of the peer */
    uint32_t class, n, slots[64];
    struct bt_kv_key keys[64];
    struct bt_wire_recv_ops ops;
    void *arg;
};

struct node {
    struct bt_loop *loop;
    char dir[64], slab_path[96];
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct bt_slab *slab;
    struct bt_cache *cache;
    struct bt_sealer *sealer;
    struct bt_tier *tier; /* NULL but in node_start_ssd */
    struct bt_grants *grants;
    struct bt_serve_local *local;
    /* what conductors were told */
    uint32_t n_reserved, n_failed, n_done;
    int32_t reserved_status, failed_status;
    uint32_t resident;
    char detail[200];
    void *last_session;
    void (*to_real)(void *session, const Baton__FromKvstore *m); /* if set, there it goes too */
    Baton__FlowDone done;
    /* what the wire was asked */
    struct node_recv recvs[NODE_RECVS];
    bool (*on_recv_start)(const struct bt_wire_recv_ops *ops, void *arg); /* false: no receive */
    uint32_t n_recvs, last_recv, n_trailers, n_aborts, n_kicks;
    struct bt_wire_trailer trailer;
    struct node_pull pulls[NODE_PULLS];
    uint32_t n_pulls;
    /* what peers were answered */
    uint32_t n_offers, offered;
    uint8_t have[64];
    struct bt_wire_source source;
    bt_status_t aborted;
};

static struct node *node_current;       /* wire functions have no argument of ours */
static bool node_overlap;               /* kvstore.overlap of the nodes started from here on */
static struct bt_metrics *node_metrics; /* of the nodes started from here on; may be NULL */

static inline void node_to_session(void *session, const Baton__FromKvstore *m)
{
    struct node *n = node_current;
    n->last_session = session;
    if (n->to_real != NULL) {
        n->to_real(session, m);
    }
    if (m->m_case == BATON__FROM_KVSTORE__M_RESERVED) {
        n->n_reserved++;
        n->reserved_status = m->reserved->status;
        n->resident = m->reserved->resident_blocks;
        snprintf(n->detail, sizeof(n->detail), "%s", m->reserved->detail);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_GRANT_FAILED) {
        n->n_failed++;
        n->failed_status = m->grant_failed->status;
    } else if (m->m_case == BATON__FROM_KVSTORE__M_FLOW_DONE) {
        n->n_done++;
        n->done = *m->flow_done;
    }
}

static inline struct bt_wire_recv *
node_recv_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer, uint64_t request,
                uint32_t epoch, const struct bt_flow_shape *shape, uint32_t first_block,
                const uint32_t *slots, const struct bt_kv_key *names, bt_flow_word_t *word,
                uint64_t timeout_ms, const struct bt_wire_recv_ops *ops, void *arg)
{
    struct node *n = node_current;
    (void)w;
    (void)names;
    uint32_t at = 0;
    if (n->on_recv_start != NULL && !n->on_recv_start(ops, arg)) {
        return NULL;
    }
    while (at < n->n_recvs && (n->n_recvs < NODE_RECVS || n->recvs[at].active)) {
        at++; /* an old record is used again only when there is no new one */
    }
    assert_true(at < NODE_RECVS);
    n->n_recvs = BT_MAX(n->n_recvs, at + 1);
    n->last_recv = at;
    struct node_recv *r = &n->recvs[at];
    *r = (struct node_recv){.active = true,
                            .request = request,
                            .epoch = epoch,
                            .first_block = first_block,
                            .n_blocks = bt_flow_blocks(shape),
                            .incarnation = peer->incarnation,
                            .timeout_ms = timeout_ms,
                            .word = word,
                            .ops = *ops,
                            .arg = arg};
    assert_true(r->n_blocks <= BT_ARRAY_LEN(r->slots));
    memcpy(r->slots, slots, r->n_blocks * sizeof(*slots));
    snprintf(r->peer, sizeof(r->peer), "%s", peer->name);
    snprintf(r->rpc, sizeof(r->rpc), "%s", peer->rpc);
    return (struct bt_wire_recv *)(void *)r;
}

static inline struct bt_wire_recv *
node_fetch_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer, uint64_t request,
                 uint32_t epoch, const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                 const struct bt_wire_recv_ops *ops, void *arg)
{
    struct node *x = node_current;
    (void)w, (void)epoch;
    assert_true(x->n_pulls < NODE_PULLS && n <= BT_ARRAY_LEN(x->pulls[0].keys));
    struct node_pull *p = &x->pulls[x->n_pulls++];
    *p = (struct node_pull){.active = true,
                            .incarnation = peer->incarnation,
                            .request = request,
                            .class = class,
                            .n = n,
                            .ops = *ops,
                            .arg = arg};
    memcpy(p->keys, keys, n * sizeof(*keys));
    return (struct bt_wire_recv *)(void *)p;
}

static inline void node_fetch_take(struct bt_wire_recv *rv, const uint32_t *slots)
{
    struct node_pull *p = (struct node_pull *)(void *)rv;
    assert_true(p->active && !p->taken && !p->cancelled);
    p->taken = true;
    memcpy(p->slots, slots, p->n * sizeof(*slots)); /* fewer are meant, as many are there */
}

static inline void node_send_offer(struct bt_wire_send *s, const struct bt_wire_source *src,
                                   const uint8_t *have, uint32_t n)
{
    struct node *x = node_current;
    (void)s;
    x->n_offers++;
    x->offered = n;
    assert_true(n <= sizeof(x->have));
    memcpy(x->have, have, n);
    x->source = *src;
}

static inline void node_recv_cancel(struct bt_wire_recv *rv)
{
    struct node *n = node_current;
    struct node_pull *p = (struct node_pull *)(void *)rv;
    if (p >= n->pulls && p < n->pulls + NODE_PULLS) {
        assert_true(p->active && !p->cancelled);
        p->cancelled = true;
        return;
    }
    struct node_recv *r = (struct node_recv *)(void *)rv;
    assert_true(r->active);
    assert_false(r->cancelled);
    r->cancelled = true;
}

static inline void node_kick(struct bt_wire *w)
{
    (void)w;
    node_current->n_kicks++;
}

static inline void node_send_trailer(struct bt_wire_send *s, const struct bt_wire_trailer *t)
{
    (void)s;
    node_current->n_trailers++;
    node_current->trailer = *t;
}

static inline void node_send_abort(struct bt_wire_send *s, bt_status_t st, const char *why)
{
    (void)s;
    (void)why;
    node_current->aborted = st;
    node_current->n_aborts++;
}

/* An SSD tier below the slab: what node_start_ssd adds. */
struct node_ssd {
    const char *path;
    uint32_t slots;
    bt_tier_policy_t policy;
    uint64_t load_ms;
    const struct bt_ssd_sys *sys;
};

static inline void node_tier(struct node *n, const struct node_ssd *ssd)
{
    char err[512];
    struct bt_tier_config tc = {.loop = n->loop,
                                .cache = n->cache,
                                .slab = n->slab,
                                .block_tokens = NODE_BT,
                                .policy = ssd->policy,
                                .load_ms = ssd->load_ms};
    struct bt_ssd_config sc = {.path = ssd->path,
                               .bytes = (1u << 20) + ssd->slots * n->slab->super->slot_bytes,
                               .queue_depth = 8,
                               .backlog_max = 64,
                               .probe_ms = 50,
                               .stall_ms = 30000,
                               .sys = ssd->sys};
    if (bt_tier_create(&tc, &sc, &n->tier, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

/* ssd: NULL without one; tenants: NULL without quotas. */
static inline void node_start_tenants(struct node *n, uint32_t n_slots, uint64_t reclaim_ms,
                                      const struct node_ssd *ssd, struct bt_tenants *tenants)
{
    char err[512];
    memset(n, 0, sizeof(*n));
    node_current = n;
    assert_int_equal(bt_loop_create(&n->loop), BT_OK);
    snprintf(n->dir, sizeof(n->dir), "/tmp/baton-unit-XXXXXX");
    assert_non_null(mkdtemp(n->dir));
    snprintf(n->slab_path, sizeof(n->slab_path), "/dev/shm/baton-unit-%d-%s", (int)getpid(),
             n->dir + strlen("/tmp/baton-unit-"));
    assert_int_equal(bt_kv_layout_gqa(NODE_BT, 2, 1, 32, BT_DT_BF16, 0, &n->layout), BT_OK);
    memset(n->root.b, 7, sizeof(n->root.b));
    uint64_t slot = BT_ALIGN_UP(n->layout.block_bytes, 4096);
    /* 512 flow words, or one for 16 KiB, and the rounding of four areas; what is too much by
     * less than a slot */
    uint64_t bytes = 5 * 4096 + (uint64_t)n_slots * (slot + 128 + 8 + (n_slots > 2048 ? 2 : 0));
    struct bt_slab_spec spec = {.path = n->slab_path,
                                .bytes = bytes,
                                .layout = &n->layout,
                                .root = &n->root,
                                .incarnation = 99};
    if (bt_slab_create(&spec, NULL, NULL, &n->slab, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    /* Workers get it by descriptor: without a name it cannot outlive a test that crashes. */
    assert_int_equal(unlink(n->slab_path), 0);
    assert_in_range(n->slab->super->n_slots, n_slots, n_slots + 2);
    n_slots = n->slab->super->n_slots;
    n->cache = bt_cache_create(n->slab, &n->layout, n_slots / 2, &bt_evict_slru);
    n->cache->low = 0;
    bt_cache_set_tenants(n->cache, tenants);
    assert_int_equal(bt_sealer_create(n->loop, n->cache->pool, n->layout.n_layers, &n->sealer),
                     BT_OK);
    if (ssd != NULL) {
        node_tier(n, ssd);
    }
    struct bt_grants_config gc = {.loop = n->loop,
                                  .slab = n->slab,
                                  .layout = n->layout,
                                  .flow_chunk_tokens = NODE_CHUNK,
                                  .reclaim_ms = reclaim_ms,
                                  .cache = n->cache,
                                  .sealer = n->sealer,
                                  .tier = n->tier,
                                  .fetch_wait_ms = NODE_FETCH_WAIT_MS,
                                  .fetch_stall_ms = NODE_FETCH_STALL_MS,
                                  .stream_max = 0.125,
                                  .overlap = node_overlap,
                                  .metrics = node_metrics,
                                  .to_session = node_to_session};
    n->grants = bt_grants_create(&gc);
    struct bt_grants_wire wire = {.recv_start = node_recv_start,
                                  .recv_cancel = node_recv_cancel,
                                  .kick = node_kick,
                                  .send_trailer = node_send_trailer,
                                  .send_abort = node_send_abort,
                                  .fetch_start = node_fetch_start,
                                  .fetch_take = node_fetch_take,
                                  .send_offer = node_send_offer};
    bt_grants_set_wire(n->grants, &wire);
    struct bt_serve_local_config lc = {.loop = n->loop,
                                       .run_dir = n->dir,
                                       .node = "n1",
                                       .incarnation = 99,
                                       .slab = n->slab,
                                       .grants = n->grants};
    if (bt_serve_local_create(&lc, &n->local, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

static inline void node_start_ssd(struct node *n, uint32_t n_slots, uint64_t reclaim_ms,
                                  const struct node_ssd *ssd)
{
    node_start_tenants(n, n_slots, reclaim_ms, ssd, NULL);
}

static inline void node_start(struct node *n, uint32_t n_slots, uint64_t reclaim_ms)
{
    node_start_ssd(n, n_slots, reclaim_ms, NULL);
}

static inline void node_stop(struct node *n)
{
    char path[128];
    bt_grants_stop(n->grants);
    bt_serve_local_destroy(n->local);
    for (uint32_t i = 0; i < n->n_recvs; i++) {
        if (n->recvs[i].active) {
            n->recvs[i].active = false;
            n->recvs[i].ops.on_quiet(n->recvs[i].arg);
        }
    }
    for (uint32_t i = 0; i < n->n_pulls; i++) {
        if (n->pulls[i].active) {
            n->pulls[i].active = false;
            n->pulls[i].ops.on_quiet(n->pulls[i].arg);
        }
    }
    bt_sealer_destroy(n->sealer);
    bt_grants_destroy(n->grants);
    bt_tier_destroy(n->tier);
    struct bt_pool_counts c;
    bt_pool_counts(n->cache->pool, &c);
    assert_int_equal(c.leases, 0); /* the end leaves no lease, whatever was going on */
    assert_int_equal(c.transit, 0);
    bt_cache_destroy(n->cache);
    bt_slab_unmap(n->slab);
    snprintf(path, sizeof(path), "%s/kvstore.lock", n->dir);
    unlink(path);
    assert_int_equal(rmdir(n->dir), 0); /* so is the socket gone */
    bt_loop_destroy(n->loop);
    node_current = NULL;
}

static inline struct bt_pool_counts node_counts(const struct node *n)
{
    struct bt_pool_counts c;
    bt_pool_counts(n->cache->pool, &c);
    return c;
}

/* The machine's time, also where the test has a clock of its own (virtual_clock.h, kv_clock.h). */
static inline uint64_t node_machine_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Polls the loop until cond holds; only a hang takes so long. */
#define NODE_UNTIL(n, cond)                                                                        \
    do {                                                                                           \
        uint64_t end_ = node_machine_ns() + 60000000000ull;                                        \
        while (!(cond)) {                                                                          \
            if (node_machine_ns() > end_) {                                                        \
                fail_msg("%s:%d: never: %s", __FILE__, __LINE__, #cond);                           \
            }                                                                                      \
            bt_loop_poll((n)->loop, 20);                                                           \
        }                                                                                          \
    } while (0)

static inline void node_poll_ms(struct node *n, uint64_t ms)
{
    for (uint64_t end = bt_mono_ns() + ms * 1000000; bt_mono_ns() < end;) {
        bt_loop_poll(n->loop, 10);
    }
}

/* Keys of a prompt: chain `chain`, so that prompts of one chain share prefixes. */
static inline void node_key(uint32_t chain, uint32_t block, struct bt_kv_key *k)
{
    memset(k, 0, sizeof(*k));
    memcpy(k->b, &chain, 4);
    memcpy(k->b + 4, &block, 4);
    k->b[31] = 1;
}

enum { RES_KEEP = 1, RES_NO_CACHE = 2, RES_RECEIVE = 4, RES_STREAMS = 8 };

/* Sends a Reserve; with an SSD below the answer may come later. */
static inline void node_reserve_send(struct node *n, void *session, uint64_t request,
                                     uint32_t epoch, uint32_t chain, uint32_t n_tokens, int flags)
{
    Baton__Reserve r = BATON__RESERVE__INIT;
    uint32_t full = n_tokens / NODE_BT;
    struct bt_kv_key *keys = calloc(full + 1, sizeof(*keys));
    for (uint32_t i = 0; i < full; i++) {
        node_key(chain, i, &keys[i]);
    }
    r.request = request;
    r.epoch = epoch;
    r.role = (flags & RES_RECEIVE) ? BATON__GRANT_ROLE__RECEIVE : BATON__GRANT_ROLE__WRITE;
    r.keys.data = (uint8_t *)keys;
    r.keys.len = full * 32;
    r.n_tokens = n_tokens;
    r.keep = (flags & RES_KEEP) != 0;
    r.no_cache = (flags & RES_NO_CACHE) != 0;
    r.streams = (flags & RES_STREAMS) != 0;
    if (flags & RES_RECEIVE) {
        r.peer = "kvstore-n0";
        r.peer_rpc = "127.0.0.1:1";
        r.peer_incarnation = 5;
    }
    bt_grants_reserve(n->grants, session, &r);
    free(keys);
}

static inline int32_t node_reserve(struct node *n, void *session, uint64_t request, uint32_t epoch,
                                   uint32_t chain, uint32_t n_tokens, int flags)
{
    uint32_t before = n->n_reserved;
    node_reserve_send(n, session, request, epoch, chain, n_tokens, flags);
    assert_int_equal(n->n_reserved, before + 1); /* always answered, and at once */
    return n->reserved_status;
}

#endif
