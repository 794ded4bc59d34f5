/* Reservations: what is remembered of their requests, whose they are, how far a release reaches,
 * and what there is only so much of. */
#include "grant_rig.h"

/* ---- what is remembered of requests ---- */

static void requests_are_forgotten_in_time(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 2, 1, 48, 0), BT_OK);
    clock_skip(node.loop, 100000);
    assert_int_equal(stats().requests_known, 1); /* it has a grant */
    bt_grants_release(node.grants, SA, 1, 2);
    clock_skip(node.loop, 10000);
    bt_grants_release(node.grants, SA, 2, 5); /* nobody reserved that here */
    assert_int_equal(stats().requests_known, 2);
    assert_int_equal(node_reserve(&node, SA, 2, 5, 1, 48, 0), BT_ERR_STALE);
    clock_skip(node.loop, 19999);
    assert_int_equal(stats().requests_known, 2);
    assert_int_equal(open_grant(0, 1, 2, WRITER), BT_ERR_STALE);
    clock_skip(node.loop, 1);
    assert_int_equal(stats().requests_known, 1);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK); /* as if it were new */
    assert_int_equal(node_reserve(&node, SA, 2, 6, 1, 48, 0), BT_OK);
    clock_skip(node.loop, 60000);
    assert_int_equal(stats().requests_known, 2);
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(node_reserve(&node, SB, 2, 6, 1, 48, 0), BT_ERR_STALE);
    clock_skip(node.loop, 30000);
    assert_int_equal(stats().requests_known, 0);
}

static void so_many_requests_are_remembered(void **state)
{
    (void)state;
    for (uint64_t r = 1; r <= 65537; r++) {
        bt_grants_release(node.grants, SA, r, 1);
    }
    assert_int_equal(stats().requests_known, 65536);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 48, 0), BT_ERR_STALE);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK); /* the oldest is forgotten */
}

/* ---- sessions of conductors ---- */

static void a_session_ends(void **state)
{
    (void)state;
    for (uint64_t r = 1; r <= 3; r++) {
        assert_int_equal(node_reserve(&node, SA, r, 1, (uint32_t)r, 48, 0), BT_OK);
    }
    assert_int_equal(node_reserve(&node, SB, 4, 1, 4, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 2, 1, WRITER), BT_OK);
    assert_int_equal(open_grant(1, 4, 1, WRITER), BT_OK);
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(stats().grants, 2);
    assert_int_equal(TOLD(0, REVOKE)->revoke->status, BT_ERR_PEER_LOST);
    assert_int_equal(TOLDS(1, REVOKE), 0);
    assert_int_equal(node_reserve(&node, SB, 1, 1, 1, 48, 0), BT_ERR_STALE);
    assert_int_equal(open_grant(1, 2, 1, READER), BT_ERR_STALE);
    say_close(0, 2, 1, WRITER, true);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    assert_int_equal(node_reserve(&node, SB, 1, 2, 1, 48, 0), BT_OK); /* a new epoch is new */
    say_close(1, 4, 1, WRITER, true);
    assert_int_equal(HEARDS(1, GRANT_FAILED), 1);
    bt_grants_session_end(node.grants, SB);
    assert_all_back();
}

static void releases_reach_down(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(node_reserve(&node, SA, 1, 4, 1, 48, 0), BT_OK);
    assert_int_equal(TOLD(0, REVOKE)->revoke->status, BT_ERR_STALE);
    assert_int_equal(open_grant(1, 1, 4, WRITER), BT_OK);
    bt_grants_release(node.grants, SB, 1, 4); /* not its own: nothing */
    assert_int_equal(TOLDS(1, REVOKE), 0);
    assert_int_equal(open_grant(0, 1, 4, READER), BT_OK);
    say_close(0, 1, 4, READER, false);
    bt_grants_release(node.grants, SA, 1, 6); /* more than was reserved: all of it, and 5 and 6 */
    assert_int_equal(TOLDS(1, REVOKE), 1);
    say_close(0, 1, 1, WRITER, true);
    say_close(1, 1, 4, WRITER, true);
    assert_int_equal(node_reserve(&node, SA, 1, 6, 1, 48, 0), BT_ERR_STALE);
    assert_non_null(strstr(node.detail, "epoch 6 of this request is over"));
    assert_int_equal(node_reserve(&node, SA, 1, 5, 1, 48, 0), BT_ERR_STALE);
    assert_int_equal(node_reserve(&node, SA, 1, 7, 1, 48, 0), BT_OK);
    bt_grants_release(node.grants, SB, 1, 6); /* below it: nobody's */
    assert_int_equal(node_reserve(&node, SA, 1, 7, 1, 48, 0), BT_ERR_EXISTS);
    bt_grants_release(node.grants, SA, 1, 7);
    assert_all_back();
}

/* ---- what there is only so much of ---- */

/* The wire has nothing to fetch: it ends inside the call. */
static bool received_at_once(const struct bt_wire_recv_ops *ops, void *arg)
{
    struct bt_wire_trailer t = {.first_token = 5};
    ops->on_done(arg, &t, 0, 0, 0, 0);
    ops->on_quiet(arg);
    return false;
}

/* Prompts that are resident need no slot of their own, but each grant a flow word. */
static void flow_words(void **state)
{
    (void)state;
    uint32_t words = node.slab->super->n_flow_words - 1; /* word 0 is none */
    cache_prompt(1000, 1, 1);
    node.on_recv_start = received_at_once;
    for (uint32_t r = 1; r <= words; r++) {
        assert_int_equal(node_reserve(&node, SA, r, 1, 1, NODE_BT, RES_RECEIVE), BT_OK);
        assert_int_equal(node.resident, 1);
    }
    assert_int_equal(HEARDS(0, FLOW_DONE), words);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    assert_int_equal(node_reserve(&node, SA, 9999, 1, 1, NODE_BT, RES_RECEIVE), BT_ERR_EXHAUSTED);
    assert_non_null(strstr(node.detail, "no flow word is free"));
    assert_int_equal(node_counts(&node).leases, words); /* none of the one that failed */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node_reserve(&node, SA, 9998, 1, 1, NODE_BT, RES_RECEIVE), BT_OK);
    assert_int_equal(open_grant(0, 9998, 1, READER), BT_OK);
    assert_in_range(TOLD(0, OPENED)->opened->flow_word, 1, words);
    assert_int_equal(TOLD(0, TRAILER)->trailer->first_token, 5);
    say_close(0, 9998, 1, READER, false);
    bt_grants_session_end(node.grants, SA);
    assert_all_back();
}

/* The writer computes at least the last token: the block of it is its own. */
static void a_writer_has_something_to_compute(void **state)
{
    (void)state;
    cache_prompt(1, 1, 3);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 3 * NODE_BT, 0), BT_OK);
    assert_int_equal(node.resident, 2);
    assert_int_equal(node_reserve(&node, SA, 3, 1, 1, 3 * NODE_BT + 1, 0), BT_OK);
    assert_int_equal(node.resident, 3);
    assert_int_equal(node_reserve(&node, SA, 4, 1, 1, 3 * NODE_BT, RES_RECEIVE), BT_OK);
    assert_int_equal(node.resident, 3);
    assert_int_equal(node_counts(&node).transit, 0);
}

/* A newer epoch ends the older ones, whoever reserved them. */
static void epochs_follow_each_other(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 0, 1, 48, 0), BT_ERR_INVALID);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 0, 0), BT_ERR_INVALID);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(node_reserve(&node, SB, 1, 2, 1, 48, 0), BT_OK);
    assert_int_equal(stats().grants, 1); /* nobody had opened the first one */
    assert_int_equal(node_reserve(&node, SB, 1, 3, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 3, WRITER), BT_OK);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    bt_grants_release(node.grants, SB, 1, 3);
    assert_int_equal(TOLD(0, REVOKE)->revoke->epoch, 3);
    say_close(0, 1, 3, WRITER, true);
    assert_all_back();
}

/* The most blocks of a prompt, and one more. */
static void longest_prompt(void **state)
{
    (void)state;
    uint32_t most = BT_GRANT_BLOCKS_MAX * NODE_BT;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, most, 0), BT_ERR_EXHAUSTED);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, most + 1, 0), BT_ERR_TOO_LARGE);
}

/* The tick keeps slots free ahead of demand. */
static void tick_makes_room(void **state)
{
    (void)state;
    uint32_t total = node_counts(&node).total;
    for (uint32_t b = 0; b < total; b++) {
        struct bt_kv_key k;
        uint32_t slot;
        node_key(9, b, &k);
        assert_int_equal(cache_take(node.cache, 1, &slot), BT_OK);
        for (uint32_t l = 0; l < node.layout.n_layers; l++) {
            bt_pool_segment_crc(node.cache->pool, slot, l, &k);
        }
        assert_true(cache_seal(node.cache, slot, &k, NODE_BT, b));
        bt_cache_put(node.cache, &slot, 1);
    }
    assert_int_equal(node_counts(&node).free, 0);
    node.cache->low = 5;
    clock_skip(node.loop, 100);
    assert_int_equal(node_counts(&node).free, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(requests_are_forgotten_in_time, setup, teardown),
        cmocka_unit_test_setup_teardown(so_many_requests_are_remembered, setup, teardown),
        cmocka_unit_test_setup_teardown(a_session_ends, setup, teardown),
        cmocka_unit_test_setup_teardown(releases_reach_down, setup, teardown),
        cmocka_unit_test_setup_teardown(flow_words, setup, teardown),
        cmocka_unit_test_setup_teardown(a_writer_has_something_to_compute, setup, teardown),
        cmocka_unit_test_setup_teardown(epochs_follow_each_other, setup, teardown),
        cmocka_unit_test_setup_teardown(longest_prompt, setup, teardown),
        cmocka_unit_test_setup_teardown(tick_makes_room, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
