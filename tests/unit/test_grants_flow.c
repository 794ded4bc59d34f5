/* Flows of grants: what peers read and what the wire brings, prefixes that come from other nodes,
 * and the end of the kvstore in the middle of all that. */
#include "grant_rig.h"

static const struct src from_7 = {7, 0, 1000};

static bt_status_t lookup(uint64_t r, uint32_t e, uintptr_t snd, struct bt_wire_source *src)
{
    return bt_grants_wire_ops.lookup(node.grants, r, e, (struct bt_wire_send *)snd, src);
}

static void send_end(uintptr_t snd, const struct bt_wire_source *src, bt_status_t st)
{
    bt_grants_wire_ops.send_end(node.grants, src->grant, (struct bt_wire_send *)snd, st);
}

static void recv_quiet(struct node_recv *r)
{
    assert_true(r->active);
    r->active = false;
    r->ops.on_quiet(r->arg);
}

static void recv_done(struct node_recv *r, uint32_t items)
{
    struct bt_wire_trailer t = {.first_token = 9};
    bt_flow_raise(r->word, r->epoch, items);
    r->ops.on_done(r->arg, &t, 10, 20, 30, 40);
}

/* ---- sending ---- */

static void a_source_is_the_grant(void **state)
{
    struct bt_wire_source s;
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 3, 1, 3 * NODE_BT + 1, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 3, WRITER), BT_OK);
    assert_int_equal(lookup(1, 3, 100, &s), BT_OK);
    assert_int_equal(stats().sends, 1);
    const Baton__LocalOpened *a = TOLD(0, OPENED)->opened;
    struct bt_kv_key k;
    for (uint32_t b = 0; b < 4; b++) {
        assert_int_equal(s.slots[b], a->slots[b]);
        node_key(1, b, &k);
        if (b == 3) {
            bt_slab_private_key(1, 3, 3, &k); /* the block that is not full */
        }
        assert_memory_equal(&s.names[b], &k, sizeof(k));
    }
    assert_ptr_equal(s.word, &node.slab->flows[a->flow_word]);
    assert_int_equal(s.shape.n_tokens, 3 * NODE_BT + 1);
    assert_int_equal(s.shape.n_layers, node.layout.n_layers);
    send_end(100, &s, BT_OK);
    assert_int_equal(stats().sends, 0);
    raise_items(0, 1);
    bt_grants_bell(node.grants, wk[0].w);
    assert_int_equal(node.n_kicks, 0); /* there is nobody to send to */
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(lookup(1, 3, 100, &s), BT_ERR_STALE);
    assert_int_equal(node.n_aborts, 0);
}

static void revoked_sends_are_aborted(void **state)
{
    struct bt_wire_source s;
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(lookup(1, 1, 100, &s), BT_OK);
    say_trailer(0, 1, 1, 7);
    assert_int_equal(node.n_trailers, 1);
    assert_int_equal(lookup(1, 1, 200, &s), BT_OK); /* the trailer follows in the next turn */
    assert_int_equal(lookup(1, 1, 250, &s), BT_OK);
    send_end(250, &s, BT_ERR_PEER_LOST); /* before that */
    say_close(0, 1, 1, WRITER, true);
    assert_int_equal(node.aborted, BT_ERR_CANCELLED);
    assert_int_equal(node.n_aborts, 2);
    bt_loop_poll(node.loop, 0);
    bt_loop_poll(node.loop, 0);
    assert_int_equal(node.n_trailers, 1);                  /* not after the abort */
    assert_int_equal(lookup(1, 1, 300, &s), BT_ERR_STALE); /* failed, though still reserved */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node.n_aborts, 2);
    send_end(200, &s, BT_ERR_CANCELLED);
    assert_int_equal(node_counts(&node).leases, 3);
    send_end(100, &s, BT_ERR_CANCELLED);
    assert_all_back();
}

/* A receiver found wrong bytes: what is damaged leaves the cache, the rest stays. */
static void doubted_blocks_are_checked(void **state)
{
    struct bt_wire_source s;
    struct bt_kv_key k;
    (void)state;
    for (uint64_t r = 1; r <= 2; r++) {
        write_prompt(r, (uint32_t)r, 3);
        assert_int_equal(lookup(r, 1, 100, &s), BT_OK);
        node_key((uint32_t)r, 2, &k);
        *(uint8_t *)bt_slab_data(node.slab, bt_index_find(node.cache->index, &k)) ^= 1;
        assert_int_equal(lookup(r, 1, 200, &s), BT_OK);
        send_end(100, &s, r == 1 ? BT_ERR_DATA_LOSS : BT_ERR_PEER_LOST);
        send_end(200, &s, BT_OK);
        bt_grants_release(node.grants, SA, r, 1);
        assert_int_equal(cached((uint32_t)r, 3), r == 1 ? 2 : 3);
    }
    assert_all_back();
}

/* ---- receiving ---- */

static void a_receive_is_told_all(void **state)
{
    (void)state;
    struct bt_kv_key keys[3];
    Baton__Reserve r = BATON__RESERVE__INIT;
    cache_prompt(1, 1, 1);
    for (uint32_t b = 0; b < 3; b++) {
        node_key(1, b, &keys[b]);
    }
    r.request = 2;
    r.epoch = 5;
    r.role = BATON__GRANT_ROLE__RECEIVE;
    r.n_tokens = 3 * NODE_BT;
    r.keys.data = (uint8_t *)keys;
    r.keys.len = sizeof(keys);
    r.peer = "kvstore-n3";
    r.peer_rpc = "";
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_ERR_INVALID);
    r.peer = "";
    r.peer_rpc = "127.0.0.1:9";
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_ERR_INVALID);
    r.peer = "kvstore-n3";
    r.peer_incarnation = 77;
    r.left_ms = 4321;
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.reserved_status, BT_OK);
    const struct node_recv *rv = &node.recvs[0];
    assert_string_equal(rv->peer, "kvstore-n3");
    assert_string_equal(rv->rpc, "127.0.0.1:9");
    assert_int_equal(rv->incarnation, 77);
    assert_int_equal(rv->timeout_ms, 4321);
    assert_int_equal(rv->request, 2);
    assert_int_equal(rv->epoch, 5);
    assert_int_equal(rv->first_block, 1);
    assert_int_equal(stats().recvs, 1);
    assert_int_equal(node_counts(&node).transit, 2);
    recv_done(&node.recvs[0], items_of(3));
    assert_int_equal(HEARD(0, FLOW_DONE)->flow_done->request, 2);
    assert_int_equal(HEARD(0, FLOW_DONE)->flow_done->epoch, 5);
    assert_int_equal(HEARD(0, FLOW_DONE)->flow_done->last_ns, 20);
    assert_int_equal(HEARD(0, FLOW_DONE)->flow_done->segments, 40);
    recv_quiet(&node.recvs[0]);
    assert_int_equal(stats().recvs, 0);
    bt_grants_release(node.grants, SA, 2, 5);
    assert_false(rv->cancelled);
    assert_all_back();
    assert_int_equal(node_counts(&node).transit, 0);
}

static void a_receive_that_ends_too_early(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 64, RES_RECEIVE | RES_KEEP), BT_OK);
    recv_done(&node.recvs[0], 2); /* of four items */
    assert_int_equal(HEARDS(0, FLOW_DONE), 0);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_INTERNAL);
    assert_false(node.recvs[0].cancelled);
    assert_int_equal(cached(1, 4), 0); /* it may still be writing */
    recv_quiet(&node.recvs[0]);
    NODE_UNTIL(&node, cached(1, 4) == 2); /* whole chunks are kept */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
}

static bool no_receive(const struct bt_wire_recv_ops *ops, void *arg)
{
    (void)ops, (void)arg;
    return false;
}

static bool fails_inside(const struct bt_wire_recv_ops *ops, void *arg)
{
    ops->on_failed(arg, BT_ERR_TIMEOUT, "the peer is slow");
    return true;
}

static void receives_that_do_not_begin(void **state)
{
    (void)state;
    node.on_recv_start = no_receive;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_UNAVAILABLE);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    node.on_recv_start = fails_inside;
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_TIMEOUT);
    bt_grants_release(node.grants, SA, 2, 1);
    assert_false(node.recvs[0].cancelled); /* it has ended by itself */
    assert_int_equal(node_counts(&node).leases, 3);
    recv_quiet(&node.recvs[0]);
    assert_all_back();
}

/* A reader that died in the middle of a receive: the wire is stopped by the release only. */
static void a_receive_outlives_its_reader(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(open_grant(1, 1, 1, READER), BT_OK);
    rig_die(1);
    clock_skip(node.loop, 1000);
    assert_int_equal(stats().opens, 0);
    assert_false(node.recvs[0].cancelled);
    bt_grants_session_end(node.grants, SA);
    assert_true(node.recvs[0].cancelled);
    assert_int_equal(node_counts(&node).writing, 3);
    recv_quiet(&node.recvs[0]);
    assert_all_back();
}

/* ---- reservations that wait for blocks of other nodes ---- */

static void wait_for(uint64_t request, uint32_t epoch, uint32_t chain, uint32_t n_blocks)
{
    reserve_from(&node, SA, request, epoch, chain, n_blocks * NODE_BT + 1, &from_7, 1, 0);
}

static void a_reservation_waits_for_its_prefix(void **state)
{
    struct bt_wire_source s;
    (void)state;
    wait_for(1, 1, 1, 4);
    assert_int_equal(node.n_reserved, 0);
    assert_int_equal(stats().pending, 1);
    assert_int_equal(stats().pieces, 1);
    assert_int_equal(node.pulls[0].n, 4);
    assert_int_equal(lookup(1, 1, 100, &s), BT_AGAIN);
    assert_int_equal(lookup(1, 2, 100, &s), BT_ERR_NOT_FOUND);
    wait_for(1, 1, 1, 4); /* said twice */
    assert_int_equal(HEARD(0, RESERVED)->reserved->status, BT_ERR_EXISTS);
    say_open(0, 1, 1, WRITER);
    say_open(1, 2, 1, WRITER);
    for (uint32_t i = 0; i < 10; i++) { /* bytes move, so that the source is not given up */
        clock_skip(node.loop, 200);
        node.pulls[0].ops.on_progress(node.pulls[0].arg);
    }
    assert_int_equal(TOLDS(0, OPENED), 0); /* it waits as long as its reservation does */
    assert_int_equal(TOLD(1, OPENED)->opened->status, BT_ERR_NOT_FOUND);
    pass(&node, 0);
    NODE_UNTIL(&node, node.n_reserved == 2);
    assert_int_equal(HEARD(0, RESERVED)->reserved->status, BT_OK);
    assert_int_equal(HEARD(0, RESERVED)->reserved->resident_blocks, 4);
    assert_int_equal(TOLD(0, OPENED)->opened->status, BT_OK);
    assert_int_equal(TOLD(0, OPENED)->opened->resident_blocks, 4);
    assert_int_equal(stats().pending, 0);
    say_close(0, 1, 1, WRITER, true);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
}

static void a_wait_is_bounded(void **state)
{
    (void)state;
    wait_for(1, 1, 1, 4);
    for (uint32_t i = 1; i < NODE_FETCH_WAIT_MS / 100; i++) {
        clock_skip(node.loop, 100);
        node.pulls[0].ops.on_progress(node.pulls[0].arg);
    }
    assert_int_equal(node.n_reserved, 0);
    clock_skip(node.loop, 100);
    assert_int_equal(node.n_reserved, 1);
    assert_int_equal(node.reserved_status, BT_OK);
    assert_int_equal(node.resident, 0);
    bt_grants_session_end(node.grants, SA);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
}

static void waiting_reservations_are_dropped(void **state)
{
    (void)state;
    wait_for(1, 1, 1, 4);
    wait_for(2, 1, 2, 4);
    wait_for(3, 2, 3, 4);
    say_open(0, 1, 1, READER);
    bt_grants_release(node.grants, SB, 2, 1); /* B has not reserved it: nothing */
    assert_int_equal(stats().pending, 3);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(HEARDS(0, RESERVED), 1);
    assert_int_equal(HEARD(0, RESERVED)->reserved->request, 1);
    assert_int_equal(HEARD(0, RESERVED)->reserved->status, BT_ERR_STALE);
    assert_string_equal(HEARD(0, RESERVED)->reserved->detail, "released by the conductor");
    assert_int_equal(TOLD(0, OPENED)->opened->status, BT_ERR_STALE);
    assert_true(node.pulls[0].cancelled);
    assert_false(node.pulls[1].cancelled);
    /* A newer epoch; its Reserve may come from another session. */
    node_reserve_send(&node, SB, 3, 3, 3, 10, 0);
    assert_int_equal(HEARD(1, RESERVED)->reserved->status, BT_OK);
    assert_int_equal(HEARDS(0, RESERVED), 2);
    assert_int_equal(HEARD(0, RESERVED)->reserved->request, 3);
    assert_int_equal(HEARD(0, RESERVED)->reserved->epoch, 2);
    assert_int_equal(HEARD(0, RESERVED)->reserved->status, BT_ERR_STALE);
    assert_string_equal(HEARD(0, RESERVED)->reserved->detail, "a newer epoch has begun");
    assert_int_equal(stats().pending, 1);
    pass(&node, 1);
    NODE_UNTIL(&node, HEARDS(0, RESERVED) == 3);
    assert_int_equal(HEARD(0, RESERVED)->reserved->request, 2);
    assert_int_equal(HEARD(0, RESERVED)->reserved->status, BT_OK);
    assert_int_equal(HEARD(0, RESERVED)->reserved->resident_blocks, 4);
    wait_for(4, 1, 4, 4);
    bt_grants_session_end(node.grants, SB);
    assert_int_equal(stats().pending, 1);
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(stats().pending, 0);
    assert_int_equal(HEARDS(0, RESERVED), 3); /* nobody is there to be told */
    quiet(&node.pulls[0]);
    quiet(&node.pulls[2]);
    quiet(&node.pulls[3]);
    assert_nothing_held(&node, 4);
}

/* Beginnings that still wait for blocks count as held. */
static void waiting_beginnings_have_their_share(void **state)
{
    (void)state;
    uint32_t half = node_counts(&node).total / 2;
    struct bt_kv_key keys[64];
    static const uint32_t all[1][2] = {{0, 1000}};
    struct far far;
    Baton__Reserve r = BATON__RESERVE__INIT;
    far_init(&far, all, 1);
    for (uint32_t b = 0; b < half; b++) {
        node_key(1, b, &keys[b]);
    }
    r.request = 1;
    r.epoch = 1;
    r.n_tokens = half * NODE_BT;
    r.keys.data = (uint8_t *)keys;
    r.keys.len = half * sizeof(keys[0]);
    r.streams = true;
    r.n_sources = 1;
    r.sources = &far.at;
    bt_grants_reserve(node.grants, SA, &r);
    assert_int_equal(node.n_reserved, 0);
    assert_int_equal(stats().pending, 1);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, half * NODE_BT, RES_STREAMS), BT_OK);
    assert_int_equal(open_grant(0, 2, 1, WRITER), BT_OK);
    assert_int_equal(TOLD(0, OPENED)->opened->n_slots, half / 4);
    struct bt_wire_source s;
    assert_int_equal(lookup(2, 1, 100, &s), BT_ERR_NOT_FOUND); /* a beginning is handed to nobody */
    pass(&node, 0);
    NODE_UNTIL(&node, node.n_reserved == 2);
    assert_int_equal(node.resident, half); /* all of a beginning may be resident */
    assert_int_equal(node_reserve(&node, SA, 3, 1, 3, half * NODE_BT, RES_STREAMS), BT_OK);
    say_open(1, 4, 1, WRITER);
    assert_int_equal(node_reserve(&node, SA, 4, 1, 4, half * NODE_BT, RES_STREAMS),
                     BT_ERR_EXHAUSTED);
    assert_int_equal(TOLD(1, OPENED)->opened->status, BT_ERR_EXHAUSTED);
    assert_non_null(strstr(TOLD(1, OPENED)->opened->detail, "three quarters"));
    bt_grants_session_end(node.grants, SA);
    say_close(0, 2, 1, WRITER, true);
    assert_all_back();
}

/* ---- the end ---- */

/* Once the kvstore stops it says nothing and starts nothing. */
static void a_stopped_node_is_silent(void **state)
{
    struct bt_wire_source s, t;
    struct bt_wire_want want = {.peer = "kvstore-n1", .incarnation = 3};
    void *handle;
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(lookup(1, 1, 100, &s), BT_OK);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 48, RES_RECEIVE), BT_OK);
    assert_int_equal(node_reserve(&node, SA, 3, 1, 3, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 3, 1, WRITER), BT_OK);
    say_trailer(0, 3, 1, 7);
    assert_int_equal(lookup(3, 1, 200, &t), BT_OK);
    wait_for(4, 1, 4, 4);
    bt_grants_stop(node.grants);
    raise_items(0, 2);
    bt_grants_bell(node.grants, wk[0].w);
    say_trailer(0, 1, 1, 7);
    bt_loop_poll(node.loop, 0); /* the trailer that was due */
    say_close(0, 1, 1, WRITER, true);
    assert_int_equal(lookup(1, 1, 300, &s), BT_ERR_STALE); /* leaves s as it was */
    assert_int_equal(lookup(3, 1, 300, &t), BT_ERR_STALE);
    assert_int_equal(bt_grants_wire_ops.want(node.grants, &want, NULL, &handle),
                     BT_ERR_UNAVAILABLE);
    uint32_t heard = node.n_reserved;
    node_reserve_send(&node, SA, 5, 1, 5, 48, RES_RECEIVE);
    wait_for(6, 1, 6, 1);
    Baton__Replicate copy = BATON__REPLICATE__INIT;
    struct bt_kv_key key = {{9}};
    copy.keys.data = key.b;
    copy.keys.len = sizeof(key);
    bt_grants_replicate(node.grants, SA, &copy);
    assert_int_equal(HEARD(0, REPLICATED)->replicated->status, BT_ERR_EXHAUSTED);
    bt_grants_session_end(node.grants, SA);
    assert_int_equal(node.n_reserved, heard);
    assert_int_equal(node.n_failed, 0);
    assert_int_equal(node.n_kicks + node.n_trailers + node.n_aborts, 0);
    assert_int_equal(node.n_recvs, 1);
    assert_int_equal(node.n_pulls, 1);
    assert_false(node.recvs[0].cancelled);
    assert_false(node.pulls[0].cancelled);
    send_end(100, &s, BT_OK); /* the wire's callbacks may still come */
    send_end(200, &t, BT_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_source_is_the_grant, setup, teardown),
        cmocka_unit_test_setup_teardown(revoked_sends_are_aborted, setup, teardown),
        cmocka_unit_test_setup_teardown(doubted_blocks_are_checked, setup, teardown),
        cmocka_unit_test_setup_teardown(a_receive_is_told_all, setup, teardown),
        cmocka_unit_test_setup_teardown(a_receive_that_ends_too_early, setup, teardown),
        cmocka_unit_test_setup_teardown(receives_that_do_not_begin, setup, teardown),
        cmocka_unit_test_setup_teardown(a_receive_outlives_its_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(a_reservation_waits_for_its_prefix, setup, teardown),
        cmocka_unit_test_setup_teardown(a_wait_is_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(waiting_reservations_are_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(waiting_beginnings_have_their_share, setup, teardown),
        cmocka_unit_test_setup_teardown(a_stopped_node_is_silent, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
