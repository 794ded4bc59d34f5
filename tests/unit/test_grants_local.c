/* What workers hold without a grant: blocks that they write (puts) and blocks that they read
 * (leases), until they say so, are told to give them back, hang, or die. */
#include "grant_local.h"

/* ---- puts ---- */

static void a_put_becomes_cache(void **state)
{
    (void)state;
    assert_int_equal(put(0, 1, 1, 5), BT_OK);
    const Baton__LocalPutSlot *a = TOLD(0, PUT_SLOT)->put_slot;
    uint32_t slot = a->slot;
    assert_int_equal(bt_pool_state(node.cache->pool, slot), BT_SLOT_WRITING);
    assert_int_equal(bt_pool_generation(node.cache->pool, slot), a->generation);
    memset(bt_slab_data(node.slab, slot), 9, node.layout.block_bytes);
    put_done(1, 1, false); /* another worker's number 1 */
    assert_int_equal(stats().puts, 1);
    put_done(0, 1, false);
    assert_int_equal(stats().puts, 1); /* it is being sealed */
    put_done(0, 1, true);              /* said twice */
    NODE_UNTIL(&node, stats().puts == 0);
    struct bt_kv_key k;
    node_key(1, 5, &k);
    assert_int_equal(bt_index_find(node.cache->index, &k), slot);
    assert_int_equal(bt_pool_depth(node.cache->pool, slot), 5);
    assert_int_equal(bt_pool_header(node.cache->pool, slot)->n_tokens, NODE_BT);
    assert_int_equal(bt_pool_verify(node.cache->pool, slot), BT_OK);
    assert_int_equal(put(0, 2, 1, 5), BT_ERR_EXISTS);
    assert_int_equal(put(0, 3, 1, 6), BT_OK);
    put_done(0, 3, true);
    assert_int_equal(cached(1, 7), 1);
    assert_all_back();
}

static void refused_puts(void **state)
{
    (void)state;
    struct bt_kv_key k;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalPut p = BATON__LOCAL_PUT__INIT;
    uint32_t total = node_counts(&node).total;
    node_key(1, 0, &k);
    p.put = 1;
    p.key.data = k.b;
    p.key.len = sizeof(k.b);
    p.n_tokens = NODE_BT - 1;
    m.m_case = BATON__LOCAL_MSG__M_PUT;
    m.put = &p;
    assert_int_equal(bt_grants_message(node.grants, wk[0].w, &m), BT_OK);
    assert_int_equal(TOLD(0, PUT_SLOT)->put_slot->status, BT_ERR_INVALID); /* a part has no key */
    p.n_tokens = NODE_BT;
    p.passing = true;
    assert_int_equal(bt_grants_message(node.grants, wk[0].w, &m), BT_OK);
    assert_int_equal(TOLD(0, PUT_SLOT)->put_slot->status, BT_ERR_UNAVAILABLE); /* no SSD */
    assert_int_equal(stats().puts, 0);
    for (uint32_t b = 0; b < total; b++) {
        assert_int_equal(put(0, 1 + b, 1, b), BT_OK);
    }
    assert_int_equal(put(0, 100, 1, total), BT_ERR_EXHAUSTED);
    assert_int_equal(stats().puts, total);
    p.passing = false; /* number 1 is open */
    assert_int_equal(bt_grants_message(node.grants, wk[0].w, &m), BT_ERR_PEER_PROTOCOL);
    put_done(0, 1, true);
    assert_int_equal(put(0, 1, 1, 0), BT_OK); /* now it is not */
}

static int setup_many(void **state)
{
    (void)state;
    rig_start(4200);
    return 0;
}

static void open_puts_are_bounded(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 4096; b++) {
        assert_int_equal(put(0, 1 + b, 1, b), BT_OK);
    }
    assert_int_equal(put(0, 5000, 1, 5000), BT_ERR_EXHAUSTED);
    assert_int_equal(put(1, 5000, 1, 5000), BT_OK);
    put_done(0, 7, true);
    assert_int_equal(put(0, 5000, 1, 5001), BT_OK);
    assert_int_equal(put(0, 5001, 1, 5002), BT_ERR_EXHAUSTED);
    rig_attach(0);
    assert_int_equal(put(0, 1, 1, 5002), BT_OK); /* of the new attachment */
}

static void a_dead_putter(void **state)
{
    (void)state;
    assert_int_equal(put(0, 1, 1, 0), BT_OK);
    assert_int_equal(put(0, 2, 1, 1), BT_OK);
    assert_int_equal(put(0, 3, 1, 2), BT_OK);
    put_done(0, 2, false); /* what it has finished is good */
    rig_die(0);
    assert_int_equal(node_counts(&node).quarantine, 2);
    NODE_UNTIL(&node, cached(1, 3) == 1);
    clock_skip(node.loop, 999);
    assert_int_equal(stats().puts, 2);
    assert_int_equal(node_counts(&node).quarantine, 2);
    clock_skip(node.loop, 1);
    assert_all_back();
    assert_int_equal(cached(1, 3), 1);
}

static void a_putter_attaches_again(void **state)
{
    (void)state;
    assert_int_equal(put(0, 1, 1, 0), BT_OK);
    rig_detach(0); /* it has the slot still, and its process is known */
    assert_int_equal(stats().workers, 2);
    assert_int_equal(stats().puts, 1);
    rig_attach(0);
    assert_int_equal(node_counts(&node).quarantine, 1);
    put_done(0, 1, false); /* of the old attachment */
    assert_int_equal(stats().puts, 1);
    clock_skip(node.loop, 1000);
    assert_all_back();
    assert_int_equal(cached(1, 1), 0);
}

static void a_hung_putter_is_killed(void **state)
{
    (void)state;
    assert_int_equal(put(0, 1, 1, 0), BT_OK);
    clock_skip(node.loop, RIG_RECLAIM_MS);
    assert_int_equal(put(0, 2, 1, 1), BT_OK);
    put_done(0, 1, true); /* number 2 is the oldest now */
    clock_skip(node.loop, 2 * RIG_RECLAIM_MS - 1);
    assert_int_equal(stats().killed, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(stats().killed, 1);
    assert_int_equal(node_counts(&node).writing, 1);
}

/* ---- leases ---- */

static void a_lease_holds_what_is_there(void **state)
{
    (void)state;
    cache_prompt(1, 1, 3);
    assert_int_equal(lease(1, (struct ask){1, 1, 0, 5, 0}), BT_OK);
    const Baton__LocalLeased *l = TOLD(1, LEASED)->leased;
    assert_int_equal(l->n_slots, 3);
    assert_int_equal(l->n_generations, 3);
    for (uint32_t b = 0; b < 3; b++) {
        struct bt_kv_key k;
        node_key(1, b, &k);
        assert_int_equal(l->slots[b], bt_index_find(node.cache->index, &k));
        assert_int_equal(l->generations[b], bt_pool_generation(node.cache->pool, l->slots[b]));
    }
    assert_int_equal(node_counts(&node).leases, 3);
    assert_int_equal(stats().leases, 1);
    assert_int_equal(lease(1, (struct ask){2, 2, 0, 3, 0}), BT_ERR_NOT_FOUND);
    assert_int_equal(TOLD(1, LEASED)->leased->n_slots, 0);
    assert_int_equal(ask_lease(1, (struct ask){1, 1, 0, 1, 0}), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(lease(0, (struct ask){1, 1, 0, 1, 0}), BT_OK); /* numbers are a worker's own */
    unlease(0, 2);
    assert_int_equal(stats().leases, 2);
    unlease(0, 1);
    assert_int_equal(node_counts(&node).leases, 3);
    unlease(1, 1);
    assert_all_back();
}

static void leases_are_bounded(void **state)
{
    (void)state;
    cache_prompt(1, 1, 1);
    for (uint64_t id = 1; id <= 1024; id++) {
        assert_int_equal(lease(0, (struct ask){id, 1, 0, 1, 0}), BT_OK);
    }
    assert_int_equal(lease(0, (struct ask){2000, 1, 0, 1, 0}), BT_ERR_EXHAUSTED);
    assert_int_equal(lease(1, (struct ask){2000, 1, 0, 1, 0}), BT_OK);
    unlease(0, 3);
    assert_int_equal(lease(0, (struct ask){2000, 1, 0, 1, 0}), BT_OK);
    assert_int_equal(stats().leases, 1025);
    rig_attach(0); /* the new attachment has its own */
    assert_int_equal(lease(0, (struct ask){1, 1, 0, 1, 0}), BT_OK);
}

static void old_leases_are_recalled(void **state)
{
    (void)state;
    cache_prompt(1, 1, 2);
    assert_int_equal(lease(0, (struct ask){1, 1, 0, 1, 0}), BT_OK);
    clock_skip(node.loop, 1000);
    assert_int_equal(lease(0, (struct ask){2, 1, 0, 2, 0}), BT_OK);
    clock_skip(node.loop, RIG_RECLAIM_MS - 1001);
    assert_int_equal(TOLDS(0, RECALL), 0);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, RECALL), 1);
    assert_int_equal(TOLD(0, RECALL)->recall->lease, 1);
    unlease(0, 1);
    clock_skip(node.loop, 1000);
    assert_int_equal(TOLDS(0, RECALL), 2);
    assert_int_equal(TOLD(0, RECALL)->recall->lease, 2);
    clock_skip(node.loop, RIG_RECLAIM_MS - 1);
    assert_int_equal(stats().killed, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(stats().killed, 1);
    assert_int_equal(TOLDS(0, RECALL), 2);
    assert_int_equal(node_counts(&node).leases, 2);
    rig_die(0);
    clock_skip(node.loop, 999);
    assert_int_equal(node_counts(&node).leases, 2);
    assert_int_equal(stats().leases, 1);
    clock_skip(node.loop, 1);
    assert_all_back();
    assert_int_equal(cached(1, 2), 2);
}

/* ---- blocks of prompts that no slab holds ---- */

static void assert_asked(uint32_t at, uint32_t chain, uint32_t first, uint32_t n)
{
    struct bt_kv_key k;
    assert_int_equal(node.n_pulls, at + 1);
    node_key(chain, first, &k);
    assert_memory_equal(&node.pulls[at].keys[0], &k, sizeof(k));
    assert_int_equal(node.pulls[at].n, n);
    assert_int_equal(node.pulls[at].class, BT_WIRE_WINDOW);
    assert_int_equal(node.pulls[at].incarnation, 7);
}

/* Blocks 2 and 3, then 4 to 7 that nobody has, then from 8 on: pieces as large as the window. */
static void pieces_come_from_the_sources(void **state)
{
    (void)state;
    begin_stream(1);
    assert_int_equal(lease(0, (struct ask){1, 1, 2, 20, 1}), BT_AGAIN);
    assert_asked(0, 1, 2, 2);
    assert_int_equal(node.pulls[0].request, 1);
    assert_int_equal(stats().leases, 1);
    assert_int_equal(ask_lease(0, (struct ask){1, 1, 2, 20, 1}), BT_ERR_PEER_PROTOCOL);
    pass(&node, 0);
    NODE_UNTIL(&node, TOLDS(0, LEASED) == 2);
    assert_int_equal(TOLD(0, LEASED)->leased->status, BT_OK);
    assert_int_equal(TOLD(0, LEASED)->leased->n_slots, 2);
    unlease(0, 1);
    assert_int_equal(cached(1, 100), 1); /* they leave the slab with their lease */
    assert_int_equal(lease(0, (struct ask){2, 1, 4, 20, 1}), BT_ERR_NOT_FOUND);
    assert_int_equal(lease(0, (struct ask){3, 1, 8, 20, 1}), BT_AGAIN);
    assert_asked(1, 1, 8, 3); /* the window less a quarter */
    /* Nobody's prompt has no sources; nor has another epoch, or a row of the engine. */
    assert_int_equal(lease(1, (struct ask){1, 9, 8, 1, 9}), BT_ERR_NOT_FOUND);
    assert_int_equal(lease(1, (struct ask){2, 1, 12, 1, 0}), BT_ERR_NOT_FOUND);
    pass(&node, 1);
    NODE_UNTIL(&node, TOLD(0, LEASED)->leased->status == BT_OK);
    assert_int_equal(TOLD(0, LEASED)->leased->n_slots, 3);
    unlease(0, 3);
    bt_grants_session_end(node.grants, SA);
    assert_all_back();
}

static void a_full_window_is_waited_for(void **state)
{
    (void)state;
    begin_stream(1);
    assert_int_equal(lease(0, (struct ask){1, 1, 8, 20, 1}), BT_AGAIN);
    assert_int_equal(lease(0, (struct ask){2, 1, 20, 20, 1}), BT_AGAIN);
    assert_asked(1, 1, 20, 1); /* the last slot of the window */
    pass(&node, 0);
    pass(&node, 1);
    NODE_UNTIL(&node, TOLDS(0, LEASED) == 4);
    clock_skip(node.loop, 100);
    assert_int_equal(lease(1, (struct ask){1, 1, 30, 20, 1}), BT_AGAIN); /* there is no room */
    assert_int_equal(node.n_pulls, 2);
    assert_int_equal(ask_lease(1, (struct ask){1, 1, 30, 20, 1}), BT_ERR_PEER_PROTOCOL);
    clock_skip(node.loop, 100);
    assert_int_equal(lease(1, (struct ask){2, 1, 40, 20, 1}), BT_AGAIN);
    clock_skip(node.loop, 1699);
    assert_int_equal(TOLDS(1, LEASED), 2);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(1, LEASED), 3);
    assert_int_equal(TOLD(1, LEASED)->leased->lease, 1);
    assert_int_equal(TOLD(1, LEASED)->leased->status, BT_ERR_EXHAUSTED);
    assert_int_equal(stats().leases, 3);
    unlease(0, 2); /* room for the one that waits */
    assert_int_equal(TOLDS(1, LEASED), 4);
    assert_int_equal(TOLD(1, LEASED)->leased->status, BT_AGAIN);
    assert_asked(2, 1, 40, 1);
    assert_int_equal(lease(1, (struct ask){3, 1, 50, 20, 1}), BT_AGAIN);
    unlease(1, 3); /* given up while it waits for room */
    unlease(1, 2); /* and while it is fetched */
    assert_true(node.pulls[2].cancelled);
    quiet(&node.pulls[2]);
    unlease(0, 1);
    assert_int_equal(stats().leases, 0);
    /* Room that was given back can be had again, all of it. */
    assert_int_equal(lease(0, (struct ask){5, 1, 60, 20, 1}), BT_AGAIN);
    assert_asked(3, 1, 60, 3);
    rig_detach(0);
    quiet(&node.pulls[3]);
    assert_int_equal(lease(1, (struct ask){5, 1, 60, 20, 1}), BT_AGAIN);
    assert_asked(4, 1, 60, 3);
    rig_die(1);
    quiet(&node.pulls[4]);
    bt_grants_session_end(node.grants, SA);
    assert_all_back();
}

/* A source that is too slow: after 1800 ms the worker computes. */
static void a_piece_is_not_waited_for_long(void **state)
{
    (void)state;
    begin_stream(1);
    assert_int_equal(lease(0, (struct ask){1, 1, 8, 20, 1}), BT_AGAIN);
    for (uint32_t i = 0; i < 17; i++) {
        clock_skip(node.loop, 100);
        node.pulls[0].ops.on_progress(node.pulls[0].arg);
    }
    clock_skip(node.loop, 99);
    assert_int_equal(TOLDS(0, LEASED), 1);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, LEASED), 2);
    assert_int_equal(TOLD(0, LEASED)->leased->status, BT_ERR_NOT_FOUND);
    assert_int_equal(stats().leases, 0);
}

/* ---- a row's lease, when the wire brings the block to somebody else ---- */

static void a_lease_shares_a_fetch(void **state)
{
    (void)state;
    struct src s = {7, 0, 1000};
    reserve_from(&node, SA, 1, 1, 1, 2 * NODE_BT + 1, &s, 1, 0);
    assert_int_equal(lease(0, (struct ask){1, 1, 0, 3, 0}), BT_AGAIN); /* no second transfer */
    assert_int_equal(node.n_pulls, 1);
    pass(&node, 0);
    NODE_UNTIL(&node, TOLDS(0, LEASED) == 2 && node.n_reserved == 1);
    assert_int_equal(TOLD(0, LEASED)->leased->n_slots, 2);
    assert_int_equal(node.resident, 2);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node_counts(&node).leases, 2);
    unlease(0, 1);
    assert_all_back();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_put_becomes_cache, setup, teardown),
        cmocka_unit_test_setup_teardown(refused_puts, setup, teardown),
        cmocka_unit_test_setup_teardown(open_puts_are_bounded, setup_many, teardown),
        cmocka_unit_test_setup_teardown(a_dead_putter, setup, teardown),
        cmocka_unit_test_setup_teardown(a_putter_attaches_again, setup, teardown),
        cmocka_unit_test_setup_teardown(a_hung_putter_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_lease_holds_what_is_there, setup, teardown),
        cmocka_unit_test_setup_teardown(leases_are_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(old_leases_are_recalled, setup, teardown),
        cmocka_unit_test_setup_teardown(pieces_come_from_the_sources, setup, teardown),
        cmocka_unit_test_setup_teardown(a_full_window_is_waited_for, setup, teardown),
        cmocka_unit_test_setup_teardown(a_piece_is_not_waited_for_long, setup, teardown),
        cmocka_unit_test_setup_teardown(a_lease_shares_a_fetch, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
