/* Prefixes from other nodes: what is asked of whom and when, what becomes of a source that lacks
 * blocks, fails or hangs, and that nothing is left behind. And the other end: what a node offers.
 * The wire is a recorder, so that the tests decide what arrives. The clock stands but where a test
 * lets time pass. */
#include "kv_fetch.h"
#include "kvstore/grant/grant_priv.h"
#include "tests/unit/virtual_clock.h"

static void test_pieces_come_in_the_order_of_the_chain(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 1000};
    (void)state;
    node_start(&n, 200, 30000);
    reserve_from(&n, &c, 1, 1, 1, 100 * NODE_BT + 3, &s, 1, 0);
    assert_int_equal(n.n_reserved, 0); /* it waits */
    assert_int_equal(n.n_pulls, 2);    /* one moves, one is asked */
    assert_piece(&n, 0, 7, 0, PIECE);
    assert_piece(&n, 1, 7, PIECE, PIECE);
    assert_int_equal(node_counts(&n).writing, 0); /* no slot before something is offered */
    offer(&n.pulls[0], PIECE);
    assert_int_equal(node_counts(&n).writing, PIECE);
    land(&n, &n.pulls[0], PIECE);
    assert_piece(&n, 2, 7, 2 * PIECE, PIECE);
    pass(&n, 1);
    assert_piece(&n, 3, 7, 3 * PIECE, 4);
    pass(&n, 3);
    assert_int_equal(n.n_reserved, 0);
    pass(&n, 2);
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(n.reserved_status, BT_OK);
    assert_int_equal(n.resident, 100);
    assert_int_equal(n.n_pulls, 4);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, 100);
    /* The next one finds all of it here. */
    reserve_from(&n, &c, 2, 1, 1, 100 * NODE_BT + 3, &s, 1, 0);
    assert_int_equal(n.n_reserved, 2);
    assert_int_equal(n.resident, 100);
    bt_grants_release(n.grants, &c, 2, 1);
    node_stop(&n);
}

/* A request without cache takes nothing from others either. */
static void test_no_cache_asks_nobody(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 1000};
    (void)state;
    node_start(&n, 200, 30000);
    reserve_as(&n, &c, 1, 1, 1, 100 * NODE_BT + 3, &s, 1, 0, true);
    assert_int_equal(n.n_reserved, 1);
    assert_int_equal(n.reserved_status, BT_OK);
    assert_int_equal(n.resident, 0);
    assert_int_equal(n.n_pulls, 0);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, 0);
    node_stop(&n);
}

static void test_several_sources_at_once(void **state)
{
    struct node n;
    int c;
    struct src s[3] = {{7, 0, 40}, {8, 40, 60}, {9, 0, 40}};
    (void)state;
    node_start(&n, 200, 30000);
    reserve_from(&n, &c, 1, 1, 1, 101 * NODE_BT, s, 3, 0);
    assert_int_equal(n.n_pulls, 4);
    assert_piece(&n, 0, 7, 0, PIECE);
    assert_piece(&n, 1, 9, PIECE, 8); /* 7 has a piece already */
    assert_piece(&n, 2, 8, 40, PIECE);
    assert_piece(&n, 3, 8, 72, 28);
    for (uint32_t i = 4; i-- > 0;) {
        pass(&n, i);
    }
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(n.resident, 100);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, 100);
    node_stop(&n);
}

static void test_what_a_source_lacks_comes_from_another(void **state)
{
    struct node n;
    int c;
    struct src s[2] = {{7, 0, 30}, {8, 0, 20}};
    (void)state;
    node_start(&n, 100, 30000);
    reserve_from(&n, &c, 1, 1, 1, 31 * NODE_BT, s, 2, 0);
    assert_int_equal(n.n_pulls, 1);
    assert_piece(&n, 0, 7, 0, 30);
    offer(&n.pulls[0], 4);
    assert_int_equal(n.n_pulls, 2);
    assert_piece(&n, 1, 8, 4, 16); /* of the ten behind them there is nobody else */
    land(&n, &n.pulls[0], 4);
    pass(&n, 1);
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(n.resident, 20);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, 20);
    node_stop(&n);
}

static void test_without_another_source_the_prefix_ends(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 64};
    (void)state;
    node_start(&n, 200, 30000);
    reserve_from(&n, &c, 1, 1, 1, 70 * NODE_BT, &s, 1, 0);
    assert_int_equal(n.n_pulls, 2);
    pass(&n, 0);
    n.pulls[1].ops.on_failed(n.pulls[1].arg, BT_ERR_PEER_LOST, "gone");
    quiet(&n.pulls[1]);
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(n.reserved_status, BT_OK);
    assert_int_equal(n.resident, PIECE); /* what had come is used */
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, PIECE);
    node_stop(&n);
}

/* Nothing comes for stall_ms. */
static void stalls(struct node *x)
{
    uint32_t reserved = x->n_reserved, pulls = x->n_pulls;
    loop_pass(x->loop, NODE_FETCH_STALL_MS - 1000);
    assert_int_equal(x->n_reserved, reserved);
    assert_int_equal(x->n_pulls, pulls);
    loop_pass(x->loop, 2500);
}

static void test_hanging_source_is_replaced_and_keeps_its_slots(void **state)
{
    struct node n;
    int c;
    struct src s[2] = {{7, 0, 10}, {8, 0, 10}};
    (void)state;
    node_start(&n, 100, 30000);
    reserve_from(&n, &c, 1, 1, 1, 10 * NODE_BT + 1, s, 2, 0);
    assert_int_equal(n.n_pulls, 1);
    offer(&n.pulls[0], 10); /* and then nothing */
    stalls(&n);
    assert_int_equal(n.n_pulls, 2);
    assert_true(n.pulls[0].cancelled);
    assert_int_not_equal(n.pulls[1].incarnation, n.pulls[0].incarnation);
    assert_int_equal(node_counts(&n).writing, 10); /* somebody may still write there */
    pass(&n, 1);
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(n.resident, 10);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_int_equal(node_counts(&n).writing, 10);
    quiet(&n.pulls[0]);
    assert_nothing_held(&n, 10);
    node_stop(&n);
}

static void test_nobody_waits_for_ever(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 10};
    (void)state;
    node_start(&n, 100, 30000);
    reserve_from(&n, &c, 1, 1, 1, 10 * NODE_BT + 1, &s, 1, 0);
    stalls(&n);
    assert_int_equal(n.n_reserved, 1); /* no offer for stall_ms, and nobody else has it */
    assert_int_equal(n.resident, 0);
    assert_true(n.pulls[0].cancelled);
    quiet(&n.pulls[0]);
    bt_grants_release(n.grants, &c, 1, 1);
    assert_nothing_held(&n, 0);
    node_stop(&n);
}

/* Released, overtaken by an epoch, or its conductor gone: in each state of the transfers. */
static void test_end_in_every_state(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        struct node n;
        int c;
        struct src s = {7, 0, 64};
        node_start(&n, 300, 30000);
        reserve_from(&n, &c, 1, 1, 1, 64 * NODE_BT + 1, &s, 1, 0);
        offer(&n.pulls[0], PIECE); /* moving; the other is only asked */
        if (how == 0) {
            bt_grants_release(n.grants, &c, 1, 1);
        } else if (how == 1) {
            bt_grants_session_end(n.grants, &c);
        } else {
            reserve_from(&n, &c, 1, 2, 2, 3 * NODE_BT + 1, NULL, 0, 0);
            assert_int_equal(n.n_reserved, 2); /* STALE for the first, then the second's own */
            bt_grants_release(n.grants, &c, 1, 2);
        }
        assert_false(n.pulls[0].cancelled); /* what moves is sealed when it has come */
        assert_true(n.pulls[1].cancelled);
        quiet(&n.pulls[1]);
        assert_int_equal(node_counts(&n).leases, PIECE);
        land(&n, &n.pulls[0], PIECE);
        assert_nothing_held(&n, PIECE);
        assert_int_equal(n.n_pulls, 2);
        node_stop(&n);
    }
}

static void test_asked_once_for_two(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 20};
    (void)state;
    node_start(&n, 100, 30000);
    reserve_from(&n, &c, 1, 1, 1, 20 * NODE_BT + 1, &s, 1, 0);
    reserve_from(&n, &c, 2, 1, 1, 20 * NODE_BT + 1, &s, 1, 0);
    assert_int_equal(n.n_pulls, 1);
    pass(&n, 0);
    NODE_UNTIL(&n, n.n_reserved == 2);
    assert_int_equal(n.resident, 20);
    assert_int_equal(n.n_pulls, 1);
    bt_grants_release(n.grants, &c, 1, 1);
    bt_grants_release(n.grants, &c, 2, 1);
    assert_nothing_held(&n, 20);
    /* The one that asked leaves: the other asks for itself. */
    reserve_from(&n, &c, 3, 1, 5, 20 * NODE_BT + 1, &s, 1, 0);
    reserve_from(&n, &c, 4, 1, 5, 20 * NODE_BT + 1, &s, 1, 0);
    assert_int_equal(n.n_pulls, 2);
    bt_grants_release(n.grants, &c, 3, 1);
    assert_int_equal(n.n_pulls, 3);
    quiet(&n.pulls[1]);
    pass(&n, 2);
    NODE_UNTIL(&n, n.n_reserved == 4);
    assert_int_equal(n.resident, 20);
    bt_grants_release(n.grants, &c, 4, 1);
    assert_nothing_held(&n, 40);
    node_stop(&n);
}

static void test_what_is_computed_sooner_is_not_fetched(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 20};
    (void)state;
    node_start(&n, 100, 30000);
    /* 4 KiB a block at the assumed 1 GB/s are 4 us: worth it below 4 million tokens a second. */
    double even = 16.0 * BT_RATES_PRIOR_SLAB / (double)n.layout.block_bytes;
    reserve_from(&n, &c, 1, 1, 1, 20 * NODE_BT + 1, &s, 1, even * 1.01);
    assert_int_equal(n.n_reserved, 1);
    assert_int_equal(n.n_pulls, 0);
    reserve_from(&n, &c, 2, 1, 1, 20 * NODE_BT + 1, &s, 1, even * 0.99);
    assert_int_equal(n.n_pulls, 1);
    pass(&n, 0);
    NODE_UNTIL(&n, n.n_reserved == 2);
    bt_grants_release(n.grants, &c, 1, 1);
    bt_grants_release(n.grants, &c, 2, 1);
    node_stop(&n);
}

static void test_no_room_ends_the_prefix(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 40};
    (void)state;
    node_start(&n, 44, 30000);
    assert_int_equal(node_reserve(&n, &c, 9, 1, 3, 20 * NODE_BT, 0), BT_OK); /* in use: 20 */
    reserve_from(&n, &c, 1, 1, 1, 20 * NODE_BT + 1, &s, 1, 0);
    assert_int_equal(n.n_pulls, 1);
    assert_int_equal(node_reserve(&n, &c, 8, 1, 4, 16 * NODE_BT, 0), BT_OK);
    offer(&n.pulls[0], 20);
    assert_true(n.pulls[0].cancelled);
    quiet(&n.pulls[0]);
    NODE_UNTIL(&n, n.n_reserved == 3); /* no room for the grant either: the conductor hears of it */
    assert_int_equal(n.reserved_status, BT_ERR_EXHAUSTED);
    bt_grants_release(n.grants, &c, 9, 1);
    bt_grants_release(n.grants, &c, 8, 1);
    assert_nothing_held(&n, 0);
    node_stop(&n);
}

static void test_copies_are_on_probation_and_bounded(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 64};
    (void)state;
    node_start(&n, 60, 30000);
    n.cache->copies_max = 10;
    for (uint64_t i = 1; i <= 3; i++) { /* 8, 16, 24 blocks of three chains */
        reserve_from(&n, &c, i, 1, (uint32_t)i, 8 * NODE_BT + 1, &s, 1, 0);
        pass(&n, n.n_pulls - 1);
        NODE_UNTIL(&n, n.n_reserved == i);
        assert_int_equal(n.resident, 8);
        bt_grants_release(n.grants, &c, i, 1);
        assert_in_range(n.cache->copies, 1, 10);
    }
    uint32_t copies = n.cache->copies;
    assert_nothing_held(&n, copies);
    struct bt_kv_key k;
    node_key(1, 0, &k);
    assert_int_not_equal(bt_index_find(n.cache->index, &k), UINT32_MAX);
    /* A second use makes a block like any other of it. */
    assert_int_equal(node_reserve(&n, &c, 10, 1, 1, 9 * NODE_BT, 0), BT_OK);
    assert_int_equal(n.resident, 8);
    assert_int_equal(n.cache->copies, copies - 8);
    bt_grants_release(n.grants, &c, 10, 1);
    assert_nothing_held(&n, copies);
    /* A fetched block that nobody has used again goes before one that was computed and used again:
     * fill the slab with new ones. */
    reserve_from(&n, &c, 11, 1, 20, 8 * NODE_BT + 1, &s, 1, 0);
    pass(&n, n.n_pulls - 1);
    NODE_UNTIL(&n, n.n_reserved == 5);
    bt_grants_release(n.grants, &c, 11, 1);
    struct bt_pool_counts all = node_counts(&n);
    assert_int_equal(node_reserve(&n, &c, 12, 1, 30, (all.total - 8) * NODE_BT, 0), BT_OK);
    node_key(20, 0, &k);
    assert_int_equal(bt_index_find(n.cache->index, &k), UINT32_MAX);
    node_key(1, 0, &k);
    assert_int_not_equal(bt_index_find(n.cache->index, &k), UINT32_MAX);
    bt_grants_release(n.grants, &c, 12, 1);
    node_stop(&n);
}

/* ---- the other end ---- */

static struct bt_wire_send *const SND = (struct bt_wire_send *)(uintptr_t)8;

static void *ask(struct node *n, uint32_t chain, uint32_t first, uint32_t count)
{
    struct bt_kv_key keys[64];
    struct bt_wire_want w = {.peer = "kvstore-n9",
                             .incarnation = 9,
                             .request = 1,
                             .epoch = 1,
                             .class = 1,
                             .keys = keys,
                             .n = count};
    void *handle = NULL;
    for (uint32_t i = 0; i < count; i++) {
        node_key(chain, first + i, &keys[i]);
    }
    assert_int_equal(bt_grants_wire_ops.want(n->grants, &w, SND, &handle), BT_OK);
    return handle;
}

static void fill_cache(struct node *n, void *c, uint32_t chain, uint32_t blocks)
{
    static uint64_t request = 5000;
    struct src s = {7, 0, 64};
    uint32_t before = n->n_reserved;
    reserve_from(n, c, ++request, 1, chain, blocks * NODE_BT + 1, &s, 1, 0);
    pass(n, n->n_pulls - 1);
    NODE_UNTIL(n, n->n_reserved == before + 1);
    bt_grants_release(n->grants, c, request, 1);
}

static void test_offers(void **state)
{
    struct node n;
    int c;
    (void)state;
    node_start(&n, 60, 30000);
    fill_cache(&n, &c, 1, 10);
    void *h = ask(&n, 1, 6, 8);
    assert_int_equal(n.n_offers, 0); /* never from inside of the wire's call */
    NODE_UNTIL(&n, n.n_offers == 1);
    assert_int_equal(n.offered, 8);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(n.have[i], i < 4 ? BT_WIRE_IN_SLAB : BT_WIRE_LACKS);
    }
    assert_int_equal(n.source.shape.n_tokens, 4 * NODE_BT);
    assert_int_equal(bt_flow_read(n.source.word, 1), 2); /* both layers of its one chunk */
    assert_int_equal(node_counts(&n).leases, 4);
    bt_grants_wire_ops.want_end(n.grants, h, BT_OK);
    assert_nothing_held(&n, 10);
    h = ask(&n, 2, 0, 3); /* nothing of it */
    NODE_UNTIL(&n, n.n_aborts == 1);
    assert_int_equal(n.aborted, BT_ERR_NOT_FOUND);
    bt_grants_wire_ops.want_end(n.grants, h, BT_ERR_NOT_FOUND);
    h = ask(&n, 1, 0, 10); /* gone before it was answered */
    bt_grants_wire_ops.want_end(n.grants, h, BT_ERR_PEER_LOST);
    loop_pass(n.loop, 20);
    assert_int_equal(n.n_offers, 1);
    assert_nothing_held(&n, 10);
    node_stop(&n);
}

static void test_bad_block_is_not_offered_twice(void **state)
{
    struct node n;
    int c;
    (void)state;
    node_start(&n, 60, 30000);
    fill_cache(&n, &c, 1, 10);
    void *h = ask(&n, 1, 0, 10);
    NODE_UNTIL(&n, n.n_offers == 1);
    ((uint8_t *)bt_slab_data(n.slab, n.source.slots[3]))[100] ^= 4;
    bt_grants_wire_ops.want_end(n.grants, h, BT_ERR_DATA_LOSS);
    assert_nothing_held(&n, 9);
    h = ask(&n, 1, 0, 10);
    NODE_UNTIL(&n, n.n_offers == 2);
    assert_int_equal(n.have[3], BT_WIRE_LACKS);
    assert_int_equal(n.source.shape.n_tokens, 9 * NODE_BT);
    bt_grants_wire_ops.want_end(n.grants, h, BT_OK);
    node_stop(&n);
}

/* Half of the slab is on offer at most; the next waits until others have ended. */
static void test_offers_are_bounded(void **state)
{
    struct node n;
    int c;
    (void)state;
    node_start(&n, 60, 30000);
    fill_cache(&n, &c, 1, 20);
    void *first = ask(&n, 1, 0, 20);
    NODE_UNTIL(&n, n.n_offers == 1);
    void *second = ask(&n, 1, 0, 20), *small = ask(&n, 1, 0, 10);
    struct bt_kv_key keys[20] = {0};
    struct bt_wire_want w = {.peer = "x", .epoch = 1, .keys = keys, .n = 20};
    void *none = NULL;
    assert_int_equal(bt_grants_wire_ops.want(n.grants, &w, SND, &none), BT_ERR_EXHAUSTED);
    bt_grants_wire_ops.want_end(n.grants, first, BT_OK);
    NODE_UNTIL(&n, n.n_offers == 3); /* both have room now */
    assert_int_equal(n.offered, 10);
    assert_int_equal(n.n_aborts, 0);
    bt_grants_wire_ops.want_end(n.grants, small, BT_OK);
    bt_grants_wire_ops.want_end(n.grants, second, BT_OK);
    assert_nothing_held(&n, 20);
    node_stop(&n);
}

static void test_no_offer_waits_for_ever(void **state)
{
    struct node n;
    int c;
    (void)state;
    node_start(&n, 60, 30000);
    fill_cache(&n, &c, 1, 20);
    void *hangs = ask(&n, 1, 0, 20), *late = ask(&n, 1, 0, 20), *gone = ask(&n, 1, 0, 5);
    bt_grants_wire_ops.want_end(n.grants, gone, BT_ERR_PEER_LOST);
    PASS_UNTIL(&n, n.n_aborts == 1);
    assert_int_equal(n.aborted, BT_ERR_EXHAUSTED);
    assert_int_equal(n.n_offers, 1);
    bt_grants_wire_ops.want_end(n.grants, late, BT_ERR_EXHAUSTED);
    void *fits = ask(&n, 1, 0, 5);
    NODE_UNTIL(&n, n.n_offers == 2);
    bt_grants_wire_ops.want_end(n.grants, hangs, BT_OK);
    bt_grants_wire_ops.want_end(n.grants, fits, BT_OK);
    assert_nothing_held(&n, 20);
    node_stop(&n);
}

static void test_rates(void **state)
{
    struct bt_rates r = {0};
    (void)state;
    assert_true(bt_rates_get(&r, 5, BT_RATE_SLAB) == BT_RATES_PRIOR_SLAB);
    bt_rates_add(&r, 5, BT_RATE_SLAB, 1000, 1); /* too little to tell */
    assert_int_equal(r.n, 0);
    bt_rates_add(&r, 5, BT_RATE_SLAB, 4 << 20, 4 << 20);
    assert_true(bt_rates_get(&r, 5, BT_RATE_SLAB) == 1e9);
    assert_true(bt_rates_get(&r, 5, BT_RATE_SSD) == BT_RATES_PRIOR_SSD);
    for (int i = 0; i < 40; i++) {
        bt_rates_add(&r, 5, BT_RATE_SLAB, 4 << 20, 8 << 20);
    }
    assert_in_range((uint64_t)bt_rates_get(&r, 5, BT_RATE_SLAB), 499000000, 501000000);
    for (uint64_t i = 100; i < 100 + BT_RATES_PEERS_MAX; i++) { /* the oldest makes room */
        bt_rates_add(&r, i, BT_RATE_SSD, 4 << 20, 1 << 20);
    }
    assert_int_equal(r.n, BT_RATES_PEERS_MAX);
    assert_true(bt_rates_get(&r, 5, BT_RATE_SLAB) == BT_RATES_PRIOR_SLAB);
    assert_true(bt_rates_get(&r, 100, BT_RATE_SSD) == 4e9);
}

/* The flow's receiver must not give up while the prefix is on its way. */
static void test_flow_of_a_waiting_reservation(void **state)
{
    struct node n;
    int c;
    struct src s = {7, 0, 10};
    struct bt_wire_source src;
    (void)state;
    node_start(&n, 100, 30000);
    assert_int_equal(bt_grants_wire_ops.lookup(n.grants, 1, 1, SND, &src), BT_ERR_NOT_FOUND);
    reserve_from(&n, &c, 1, 1, 1, 10 * NODE_BT + 1, &s, 1, 0);
    assert_int_equal(bt_grants_wire_ops.lookup(n.grants, 1, 1, SND, &src), BT_AGAIN);
    pass(&n, 0);
    NODE_UNTIL(&n, n.n_reserved == 1);
    assert_int_equal(bt_grants_wire_ops.lookup(n.grants, 1, 1, SND, &src), BT_OK);
    struct bt_grant *g = src.grant;
    bt_grants_wire_ops.send_end(n.grants, g, SND, BT_OK);
    bt_grants_release(n.grants, &c, 1, 1);
    node_stop(&n);
}

/* A prompt of less than a block has no keys: protobuf-c gives no address for no bytes. (A build
 * with sanitizers ends where one is read all the same.) A run may end behind the last number there
 * is. */
static void test_no_keys_and_runs_to_the_end_of_numbers(void **state)
{
    struct node n;
    int c;
    struct src s[2] = {{7, 0, UINT32_MAX}, {8, UINT32_MAX, UINT32_MAX}};
    (void)state;
    node_start(&n, 100, 30000);
    reserve_from(&n, &c, 1, 1, 1, 5, s, 2, 0);
    assert_int_equal(n.n_reserved, 1);
    assert_int_equal(n.reserved_status, BT_OK);
    assert_int_equal(n.n_pulls, 0);
    reserve_from(&n, &c, 2, 1, 1, 3 * NODE_BT + 1, s, 2, 0);
    assert_piece(&n, 0, 7, 0, 3);
    pass(&n, 0);
    NODE_UNTIL(&n, n.n_reserved == 2);
    assert_int_equal(n.resident, 3);
    bt_grants_release(n.grants, &c, 1, 1);
    bt_grants_release(n.grants, &c, 2, 1);
    node_stop(&n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces_come_in_the_order_of_the_chain),
        cmocka_unit_test(test_no_cache_asks_nobody),
        cmocka_unit_test(test_several_sources_at_once),
        cmocka_unit_test(test_no_keys_and_runs_to_the_end_of_numbers),
        cmocka_unit_test(test_what_a_source_lacks_comes_from_another),
        cmocka_unit_test(test_without_another_source_the_prefix_ends),
        cmocka_unit_test(test_hanging_source_is_replaced_and_keeps_its_slots),
        cmocka_unit_test(test_nobody_waits_for_ever),
        cmocka_unit_test(test_end_in_every_state),
        cmocka_unit_test(test_asked_once_for_two),
        cmocka_unit_test(test_what_is_computed_sooner_is_not_fetched),
        cmocka_unit_test(test_no_room_ends_the_prefix),
        cmocka_unit_test(test_copies_are_on_probation_and_bounded),
        cmocka_unit_test(test_offers),
        cmocka_unit_test(test_bad_block_is_not_offered_twice),
        cmocka_unit_test(test_offers_are_bounded),
        cmocka_unit_test(test_no_offer_waits_for_ever),
        cmocka_unit_test(test_rates),
        cmocka_unit_test(test_flow_of_a_waiting_reservation),
    };
    clock_stop();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
