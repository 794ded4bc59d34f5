/* What the metrics say of grants, of the slab and of workers. */
#include "grant_local.h"

#include "common/base/buf.h"

static int setup_metrics(void **state)
{
    node_metrics = bt_metrics_create();
    return setup(state);
}

static int teardown_metrics(void **state)
{
    int rc = teardown(state);
    struct bt_buf text = {0};
    bt_metrics_render(node_metrics, &text); /* after the end of the grants */
    free(bt_buf_take(&text));
    bt_metrics_destroy(node_metrics);
    node_metrics = NULL;
    return rc;
}

/* The value of a series in the text; -1: it is not there. */
static double series(const char *name)
{
    struct bt_buf text = {0};
    char line[128];
    bt_metrics_render(node_metrics, &text);
    snprintf(line, sizeof(line), "\n%s ", name);
    const char *at = strstr(text.data, line);
    double v = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    free(bt_buf_take(&text));
    return v;
}

#define ASSERT_SERIES(name, want) assert_int_equal((int)series(name), (int)(want))

static void metrics_tell_the_state(void **state)
{
    struct bt_wire_source src;
    uint32_t total = node_counts(&node).total;
    (void)state;
    begin_stream(1);                          /* one sealed slot, leased */
    assert_int_equal(put(0, 1, 5, 0), BT_OK); /* one WRITING */
    assert_int_equal(put(1, 1, 5, 1), BT_OK);
    rig_die(1);                                                                 /* in quarantine */
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 32, RES_RECEIVE), BT_OK); /* two more */
    assert_int_equal(open_grant(0, 2, 1, READER), BT_OK);
    assert_int_equal(lease(0, (struct ask){1, 1, 8, 20, 1}), BT_AGAIN);
    assert_int_equal(lease(0, (struct ask){2, 1, 0, 1, 1}), BT_OK);
    ASSERT_SERIES("baton_pool_slots{state=\"free\"}", total - 5);
    ASSERT_SERIES("baton_pool_slots{state=\"writing\"}", 3);
    ASSERT_SERIES("baton_pool_slots{state=\"sealed\"}", 1);
    ASSERT_SERIES("baton_pool_slots{state=\"quarantine\"}", 1);
    ASSERT_SERIES("baton_pool_transit_slots", 2);
    ASSERT_SERIES("baton_pool_leases", 6);
    ASSERT_SERIES("baton_pool_copies", 0);
    ASSERT_SERIES("baton_kvstore_fetching", 1);
    ASSERT_SERIES("baton_kvstore_offers", 0);
    ASSERT_SERIES("baton_kvstore_grants", 2);
    ASSERT_SERIES("baton_kvstore_opens", 1);
    ASSERT_SERIES("baton_kvstore_workers", 1);
    ASSERT_SERIES("baton_kvstore_stream_slots", 4); /* three are fetched, one is lent */
    ASSERT_SERIES("baton_kvstore_tail_slots", 0);
    ASSERT_SERIES("baton_kvstore_stream_blocks_total{way=\"in\"}", 1);
    ASSERT_SERIES("baton_kvstore_stream_blocks_total{way=\"out\"}", 0);
    ASSERT_SERIES("baton_kvstore_prefix_blocks_total{result=\"hit\"}", 1);
    ASSERT_SERIES("baton_kvstore_prefix_blocks_total{result=\"miss\"}", 2);
    ASSERT_SERIES("baton_kvstore_blocks_sealed_total", 1);
    ASSERT_SERIES("baton_kvstore_blocks_sealed_total", 1); /* counted once */
    ASSERT_SERIES("baton_kvstore_grants_failed_total", 0);
    ASSERT_SERIES("baton_kvstore_workers_killed_total", 0);
    pass(&node, 0);
    NODE_UNTIL(&node, TOLD(0, LEASED)->leased->n_slots == 3);
    ASSERT_SERIES("baton_kvstore_fetching", 0);
    ASSERT_SERIES("baton_kvstore_stream_blocks_total{way=\"in\"}", 4);
    node.recvs[0].ops.on_failed(node.recvs[0].arg, BT_ERR_PEER_LOST, "gone");
    node.recvs[0].active = false;
    node.recvs[0].ops.on_quiet(node.recvs[0].arg);
    ASSERT_SERIES("baton_kvstore_grants_failed_total", 1);
    clock_skip(node.loop, RIG_RECLAIM_MS);
    ASSERT_SERIES("baton_kvstore_workers_killed_total", 1); /* it was to close the grant */
    struct src s = {7, 0, 2};
    reserve_from(&node, SA, 12, 1, 12, 2 * NODE_BT + 1, &s, 1, 0);
    pass(&node, 1);
    NODE_UNTIL(&node, node.n_reserved == 4);
    bt_grants_release(node.grants, SA, 12, 1);
    ASSERT_SERIES("baton_pool_copies", 2);
    /* Two compute the same. */
    write_prompt(11, 7, 2);
    bt_grants_release(node.grants, SA, 11, 1);
    assert_int_equal(put(0, 9, 8, 0), BT_OK);
    assert_int_equal(put(0, 10, 8, 0), BT_OK);
    put_done(0, 9, false);
    put_done(0, 10, false);
    NODE_UNTIL(&node, stats().puts == 1); /* number 1 */
    ASSERT_SERIES("baton_kvstore_blocks_duplicate_total", 1);
    uint32_t slots[64];
    uint32_t n = node_counts(&node).free + 1;
    assert_int_equal(cache_take(node.cache, n, slots), BT_OK);
    ASSERT_SERIES("baton_kvstore_blocks_evicted_total", 1);
    bt_cache_put(node.cache, slots, n);
    struct bt_kv_key k;
    node_key(1, 0, &k);
    struct bt_wire_want want = {
        .peer = "kvstore-n1", .incarnation = 3, .keys = &k, .n = 1, .class = BT_WIRE_FETCH};
    void *handle;
    assert_int_equal(
        bt_grants_wire_ops.want(node.grants, &want, (struct bt_wire_send *)&src, &handle), BT_OK);
    ASSERT_SERIES("baton_kvstore_offers", 1);
    assert_int_equal(stats().served, 1);
    NODE_UNTIL(&node, node.n_offers == 1);
    bt_grants_wire_ops.want_end(node.grants, handle, BT_OK);
    assert_int_equal(stats().served, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(metrics_tell_the_state, setup_metrics, teardown_metrics),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
