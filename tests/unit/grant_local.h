/* What workers ask for without a grant: puts and leases; and a prompt that no slab holds. */
#ifndef TESTS_UNIT_GRANT_LOCAL_H
#define TESTS_UNIT_GRANT_LOCAL_H

#include "grant_rig.h"

static inline void ask_put(uint32_t i, uint64_t id, uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    SAY(i, PUT, put, Put, PUT, .put = id, .key = {.len = sizeof(k.b), .data = k.b}, .depth = block,
        .n_tokens = NODE_BT);
}

/* The status of the answer, which comes at once. */
static inline int32_t put(uint32_t i, uint64_t id, uint32_t chain, uint32_t block)
{
    uint32_t before = TOLDS(i, PUT_SLOT);
    ask_put(i, id, chain, block);
    assert_int_equal(TOLDS(i, PUT_SLOT), before + 1);
    assert_int_equal(TOLD(i, PUT_SLOT)->put_slot->put, id);
    return TOLD(i, PUT_SLOT)->put_slot->status;
}

static inline void put_done(uint32_t i, uint64_t id, bool abort)
{
    SAY(i, PUT_DONE, put_done, PutDone, PUT_DONE, .put = id, .abort = abort);
}

struct ask {
    uint64_t id;
    uint32_t chain, first, n;
    uint64_t request; /* of a prompt that no slab holds; 0: not passing */
};

static inline bt_status_t ask_lease(uint32_t i, struct ask a)
{
    struct bt_kv_key keys[64];
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalLease l = BATON__LOCAL_LEASE__INIT;
    for (uint32_t b = 0; b < a.n; b++) {
        node_key(a.chain, a.first + b, &keys[b]);
    }
    l.lease = a.id;
    l.keys.data = (uint8_t *)keys;
    l.keys.len = a.n * sizeof(keys[0]);
    l.passing = a.request != 0;
    l.request = a.request;
    l.epoch = a.request != 0;
    l.first = a.first;
    m.m_case = BATON__LOCAL_MSG__M_LEASE;
    m.lease = &l;
    return bt_grants_message(node.grants, wk[i].w, &m);
}

/* The status of the answer, which comes at once. */
static inline int32_t lease(uint32_t i, struct ask a)
{
    uint32_t before = TOLDS(i, LEASED);
    assert_int_equal(ask_lease(i, a), BT_OK);
    assert_int_equal(TOLDS(i, LEASED), before + 1);
    assert_int_equal(TOLD(i, LEASED)->leased->lease, a.id);
    return TOLD(i, LEASED)->leased->status;
}

static inline void unlease(uint32_t i, uint64_t id)
{
    SAY(i, UNLEASE, unlease, Unlease, UNLEASE, .lease = id);
}

#define WINDOW (RIG_SLOTS / 8) /* four slots in each direction */

/* Request `request`: a prompt whose blocks other nodes have, in runs 0 to 3 and 8 to 99. */
static inline void begin_stream(uint64_t request)
{
    static const uint32_t runs[][2] = {{0, 4}, {8, UINT32_MAX}};
    struct far far;
    Baton__Reserve r = BATON__RESERVE__INIT;
    struct bt_kv_key k;
    node_key((uint32_t)request, 0, &k);
    far_init(&far, runs, BT_ARRAY_LEN(runs));
    cache_prompt(request + 1000, (uint32_t)request, 1); /* so that the grant need not wait */
    r.request = request;
    r.epoch = 1;
    r.n_tokens = NODE_BT;
    r.keys.data = k.b;
    r.keys.len = sizeof(k.b);
    r.streams = true;
    r.n_sources = 1;
    r.sources = &far.at;
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_OK);
    assert_int_equal(node.resident, 1);
}

#endif
