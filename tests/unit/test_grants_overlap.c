/* Grants whose writer computes while the end of its prefix comes from another node: whom the
 * kvstore tells of blocks that have arrived, and until when it holds them. */
#include "grant_rig.h"

#define BOTH 2e6 /* tokens a second: as fast as blocks come at the assumed rate */

static struct src from_7 = {7, 0, 1000};

static int setup_overlap(void **state)
{
    (void)state;
    node_overlap = true;
    rig_start(160); /* overlaps may hold a quarter: 40 blocks */
    return 0;
}

static int teardown_overlap(void **state)
{
    node_overlap = false;
    return teardown(state);
}

/* Request 1 of 40 blocks and a bit; the last 32 come in the first piece, the others in a second. */
static void begin(void)
{
    reserve_from(&node, SA, 1, 1, 1, 40 * NODE_BT + 3, &from_7, 1, BOTH);
    assert_int_equal(node.reserved_status, BT_OK);
    assert_int_equal(node.n_reserved, 1);
    assert_int_equal(node.n_pulls, 2);
    assert_int_equal(node.pulls[0].n, 32);
    assert_int_equal(node.pulls[1].n, 8);
}

static void assert_tail(uint32_t i, uint32_t first, uint32_t n)
{
    const Baton__LocalTail *t = TOLD(i, TAIL)->tail;
    struct bt_kv_key k;
    assert_int_equal(t->request, 1);
    assert_int_equal(t->epoch, 1);
    assert_int_equal(t->first, first);
    assert_int_equal(t->n_slots, n);
    assert_int_equal(t->n_generations, n);
    for (uint32_t b = 0; b < n; b++) {
        node_key(1, first + b, &k);
        assert_int_equal(t->slots[b], bt_index_find(node.cache->index, &k));
        assert_int_equal(t->generations[b], bt_pool_generation(node.cache->pool, t->slots[b]));
    }
}

static void the_writer_is_told(void **state)
{
    (void)state;
    begin();
    assert_int_equal(open_grant(1, 1, 1, READER), BT_OK);
    pass(&node, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(1, TAIL), 0); /* a reader takes nothing of it */
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(TOLDS(0, TAIL), 1); /* what came before it opened */
    assert_tail(0, 8, 32);
    pass(&node, 1);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, TAIL), 2);
    assert_tail(0, 0, 8);
    assert_int_equal(TOLDS(1, TAIL), 0);
    assert_int_equal(node_counts(&node).leases, 81);
    SAY(0, TAIL_END, tail_end, TailEnd, TAIL_END, .request = 1, .epoch = 1);
    assert_int_equal(node_counts(&node).leases, 41);
    assert_int_equal(cached(1, 40), 40);
    raise_items(0, items_of(41));
    say_trailer(0, 1, 1, 7);
    say_close(0, 1, 1, WRITER, false);
    say_close(1, 1, 1, READER, false);
    bt_grants_release(node.grants, SA, 1, 1);
    NODE_UNTIL(&node, stats().grants == 0);
    assert_int_equal(TOLDS(0, TAIL), 2);
    assert_all_back();
}

static void nothing_new_is_not_told(void **state)
{
    (void)state;
    begin();
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(TOLDS(0, TAIL), 0); /* nothing has come yet */
    pass(&node, 1);                      /* not at the end */
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, TAIL), 0);
    pass(&node, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, TAIL), 1);
    assert_tail(0, 0, 40);
    say_close(0, 1, 1, WRITER, true);
    assert_int_equal(node_counts(&node).leases, 41); /* its writer reads no more */
    bt_grants_session_end(node.grants, SA);
    assert_all_back();
}

/* What the writer has computed meanwhile is not fetched. */
static void computed_blocks_are_not_fetched(void **state)
{
    (void)state;
    reserve_from(&node, SA, 1, 1, 1, 40 * NODE_BT + 3, &from_7, 1, BOTH);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    raise_items(0, items_of(4));
    bt_grants_bell(node.grants, wk[0].w);
    node.pulls[1].ops.on_failed(node.pulls[1].arg, BT_ERR_DATA_LOSS, "bad");
    quiet(&node.pulls[1]);
    pass(&node, 0);
    clock_skip(node.loop, 1);
    assert_tail(0, 8, 32);
    assert_int_equal(node.n_pulls, 2);
    bt_grants_session_end(node.grants, SA);
    say_close(0, 1, 1, WRITER, true);
    NODE_UNTIL(&node, stats().grants == 0);
    assert_all_back();
}

static void a_revoked_writer_is_told_no_more(void **state)
{
    (void)state;
    begin();
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    bt_grants_release(node.grants, SA, 1, 1);
    pass(&node, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, TAIL), 0);
    say_close(0, 1, 1, WRITER, true);
    quiet(&node.pulls[1]);
    assert_all_back();
}

/* A dead writer may still read: the blocks stay for a quarantine. */
static void a_dead_writer_keeps_its_tail(void **state)
{
    (void)state;
    begin();
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    pass(&node, 0);
    clock_skip(node.loop, 1);
    rig_die(0);
    assert_int_equal(TOLDS(0, TAIL), 1);
    bt_grants_release(node.grants, SA, 1, 1);
    clock_skip(node.loop, 999);
    assert_true(node_counts(&node).leases >= 41 + 32);
    clock_skip(node.loop, 1);
    assert_int_equal(node_counts(&node).leases, 0);
    if (node.pulls[1].active) {
        quiet(&node.pulls[1]);
    }
    assert_all_back();
}

/* The kvstore stops during that quarantine: the teardown does. */
static void a_kvstore_stops_with_a_dead_writer(void **state)
{
    (void)state;
    begin();
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    pass(&node, 0);
    quiet(&node.pulls[1]);
    rig_die(0);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(stats().grants, 1);
}

/* Who computes nothing, or wants nothing of the cache, waits or has no prefix. */
static void only_for_writers(void **state)
{
    (void)state;
    reserve_from(&node, SA, 1, 1, 1, 40 * NODE_BT + 3, &from_7, 1, 0); /* of unknown speed */
    assert_int_equal(node.n_reserved, 0);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 40 * NODE_BT + 3, 0), BT_OK); /* no source */
    assert_int_equal(stats().grants, 1);
    bt_grants_session_end(node.grants, SA);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_writer_is_told, setup_overlap, teardown_overlap),
        cmocka_unit_test_setup_teardown(nothing_new_is_not_told, setup_overlap, teardown_overlap),
        cmocka_unit_test_setup_teardown(computed_blocks_are_not_fetched, setup_overlap,
                                        teardown_overlap),
        cmocka_unit_test_setup_teardown(a_revoked_writer_is_told_no_more, setup_overlap,
                                        teardown_overlap),
        cmocka_unit_test_setup_teardown(a_dead_writer_keeps_its_tail, setup_overlap,
                                        teardown_overlap),
        cmocka_unit_test_setup_teardown(a_kvstore_stops_with_a_dead_writer, setup_overlap,
                                        teardown_overlap),
        cmocka_unit_test_setup_teardown(only_for_writers, setup_overlap, teardown_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
