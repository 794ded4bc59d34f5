/* Prefixes from other nodes in a test: reservations with sources, and what the recorded wire
 * brings.
 */
#ifndef TESTS_UNIT_KV_FETCH_H
#define TESTS_UNIT_KV_FETCH_H

#include "kv_node.h"

#define PIECE 32u /* blocks of a piece: an extent of 512 tokens */

struct src {
    uint64_t incarnation;
    uint32_t first, count;
};

/* A Reserve of a chain, WRITE, with sources. */
static inline void reserve_as(struct node *n, void *session, uint64_t request, uint32_t epoch,
                              uint32_t chain, uint32_t n_tokens, const struct src *src,
                              size_t n_src, double prefill_tokens_per_s, bool no_cache)
{
    Baton__Reserve r = BATON__RESERVE__INIT;
    Baton__Source list[8], *at[8];
    uint32_t full = n_tokens / NODE_BT;
    struct bt_kv_key *keys = calloc(full + 1, sizeof(*keys));
    for (uint32_t i = 0; i < full; i++) {
        node_key(chain, i, &keys[i]);
    }
    for (size_t i = 0; i < n_src; i++) {
        baton__source__init(&list[i]);
        list[i].peer = "kvstore-n9";
        list[i].peer_rpc = "127.0.0.1:1";
        list[i].peer_incarnation = src[i].incarnation;
        list[i].n_first = list[i].n_count = 1;
        list[i].first = (uint32_t *)&src[i].first;
        list[i].count = (uint32_t *)&src[i].count;
        at[i] = &list[i];
    }
    r.request = request;
    r.epoch = epoch;
    r.keys.data = full > 0 ? (uint8_t *)keys : NULL; /* as protobuf-c has it */
    r.keys.len = full * 32;
    r.n_tokens = n_tokens;
    r.keep = true;
    r.n_sources = n_src;
    r.sources = at;
    r.prefill_tokens_per_s = prefill_tokens_per_s;
    r.no_cache = no_cache;
    bt_grants_reserve(n->grants, session, &r);
    free(keys);
}

static inline void reserve_from(struct node *n, void *session, uint64_t request, uint32_t epoch,
                                uint32_t chain, uint32_t n_tokens, const struct src *src,
                                size_t n_src, double prefill_tokens_per_s)
{
    reserve_as(n, session, request, epoch, chain, n_tokens, src, n_src, prefill_tokens_per_s,
               false);
}

/* The peer answers: it has those blocks of the piece below n_have. */
static inline void offer(struct node_pull *p, uint32_t n_have)
{
    uint8_t have[64] = {0};
    memset(have, BT_WIRE_IN_SLAB, n_have);
    p->ops.on_offer(p->arg, have, p->n);
}

/* Everything that was taken arrives, as the wire does it: bytes and CRCs, then the callbacks. */
static inline void land(struct node *n, struct node_pull *p, uint32_t n_have)
{
    assert_true(p->taken);
    for (uint32_t i = 0; i < n_have; i++) {
        memset(bt_slab_data(n->slab, p->slots[i]), p->keys[i].b[4] + 1, n->layout.block_bytes);
        for (uint32_t l = 0; l < n->layout.n_layers; l++) {
            uint32_t bytes;
            uint64_t off = bt_kv_segment(&n->layout, l, &bytes);
            n->slab->crcs[p->slots[i] * n->layout.n_layers + l] =
                bt_slab_segment_crc(&p->keys[i], l, n->layout.layout_id,
                                    (uint8_t *)bt_slab_data(n->slab, p->slots[i]) + off, bytes);
        }
    }
    struct bt_wire_trailer t = {0};
    p->ops.on_progress(p->arg);
    p->ops.on_done(p->arg, &t, 1, 2, 3, 4);
    p->active = false;
    p->ops.on_quiet(p->arg);
}

static inline void quiet(struct node_pull *p)
{
    assert_true(p->active);
    p->active = false;
    p->ops.on_quiet(p->arg);
}

static inline void pass(struct node *n, uint32_t i)
{
    offer(&n->pulls[i], n->pulls[i].n);
    land(n, &n->pulls[i], n->pulls[i].n);
}

static inline void assert_piece(const struct node *n, uint32_t i, uint64_t incarnation,
                                uint32_t first, uint32_t count)
{
    struct bt_kv_key k;
    assert_true(i < n->n_pulls);
    node_key(1, first, &k);
    assert_int_equal(n->pulls[i].incarnation, incarnation);
    assert_int_equal(n->pulls[i].class, BT_WIRE_FETCH);
    assert_int_equal(n->pulls[i].n, count);
    assert_memory_equal(&n->pulls[i].keys[0], &k, sizeof(k));
}

static inline void assert_nothing_held(struct node *n, uint32_t sealed)
{
    struct bt_pool_counts c = node_counts(n);
    struct bt_grants_stats s;
    bt_grants_stats(n->grants, &s);
    assert_int_equal(c.leases, 0);
    assert_int_equal(c.writing, 0);
    assert_int_equal(c.sealed, sealed);
    assert_int_equal(s.pieces + s.pending + s.grants, 0);
}

#endif
