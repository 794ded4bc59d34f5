/* Copies of prefixes that a conductor orders ahead of need: what is fetched for them, what the
 * conductor is told, and how many there may be. */
#include "grant_rig.h"

static void order(void *session, uint64_t id, uint32_t chain, uint32_t n, size_t spare_bytes)
{
    struct bt_kv_key keys[64];
    static const uint32_t all[1][2] = {{0, 1000}};
    struct far far;
    Baton__Replicate m = BATON__REPLICATE__INIT;
    far_init(&far, all, 1);
    for (uint32_t b = 0; b < n + 1; b++) {
        node_key(chain, b, &keys[b]);
    }
    m.id = id;
    m.keys.data = (uint8_t *)keys;
    m.keys.len = n * sizeof(keys[0]) + spare_bytes;
    m.n_sources = 1;
    m.sources = &far.at;
    bt_grants_replicate(node.grants, session, &m);
}

static int32_t replicated(uint32_t s, uint64_t id)
{
    const Baton__Replicated *r = HEARD(s, REPLICATED)->replicated;
    assert_int_equal(r->id, id);
    return r->status;
}

static void copies_are_ordered(void **state)
{
    (void)state;
    cache_prompt(1, 1, 2);
    order(SA, 10, 1, 6, 0);
    assert_int_equal(node.n_pulls, 1);
    assert_int_equal(node.pulls[0].class, BT_WIRE_REPLICA);
    assert_int_equal(node.pulls[0].request, 10);
    assert_int_equal(node.pulls[0].n, 4);
    assert_int_equal(HEARDS(0, REPLICATED), 0);
    pass(&node, 0);
    NODE_UNTIL(&node, HEARDS(0, REPLICATED) == 1);
    assert_int_equal(replicated(0, 10), BT_OK);
    assert_int_equal(HEARD(0, REPLICATED)->replicated->blocks, 4); /* of six, two were here */
    assert_int_equal(cached(1, 6), 6);
    assert_int_equal(node_counts(&node).leases, 0);
    order(SA, 11, 1, 6, 0); /* there is nothing to do */
    assert_int_equal(HEARDS(0, REPLICATED), 2);
    assert_int_equal(replicated(0, 11), BT_OK);
    assert_int_equal(HEARD(0, REPLICATED)->replicated->blocks, 0);
    /* An order without a meaning. */
    order(SA, 12, 2, 0, 0);
    assert_int_equal(replicated(0, 12), BT_ERR_INVALID);
    order(SA, 13, 2, 1, 1);
    assert_int_equal(replicated(0, 13), BT_ERR_INVALID);
    order(SA, 14, 2, node_counts(&node).total + 1, 0); /* more than the slab holds */
    assert_int_equal(replicated(0, 14), BT_ERR_INVALID);
    assert_int_equal(node.n_pulls, 1);
    order(SA, 15, 3, node_counts(&node).total, 0);
    assert_int_equal(HEARDS(0, REPLICATED), 5);
    assert_true(node.n_pulls > 1);
    bt_grants_session_end(node.grants, SA);
}

static void copies_are_few_and_end_with_their_session(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        order(i < 3 ? SA : SB, 10 + i, 1 + i, 4, 0);
    }
    assert_int_equal(HEARDS(0, REPLICATED), 0);
    order(SA, 20, 9, 4, 0);
    assert_int_equal(replicated(0, 20), BT_ERR_EXHAUSTED);
    bt_grants_session_end(node.grants, SA);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(node.pulls[i].cancelled);
        quiet(&node.pulls[i]);
    }
    assert_false(node.pulls[3].cancelled);
    assert_int_equal(HEARDS(0, REPLICATED), 1);
    for (uint32_t i = 0; i < 3; i++) {
        order(SB, 30 + i, 20 + i, 4, 0);
    }
    assert_int_equal(HEARDS(1, REPLICATED), 0);
    node.pulls[3].ops.on_failed(node.pulls[3].arg, BT_ERR_PEER_LOST, "gone");
    quiet(&node.pulls[3]);
    NODE_UNTIL(&node, HEARDS(1, REPLICATED) == 1);
    assert_int_equal(replicated(1, 13), BT_OK);
    assert_int_equal(HEARD(1, REPLICATED)->replicated->blocks, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(copies_are_ordered, setup, teardown),
        cmocka_unit_test_setup_teardown(copies_are_few_and_end_with_their_session, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
