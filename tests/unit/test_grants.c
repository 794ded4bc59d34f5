/* Lives of grants by the clock: opens that wait, workers that keep slots, die, attach again or
 * detach; what every party is told, and when the slots come back. */
#include "grant_rig.h"

/* ---- opens and their answers ---- */

static void open_says_all_of_the_grant(void **state)
{
    (void)state;
    cache_prompt(1, 1, 3);
    assert_int_equal(node_reserve(&node, SA, 2, 4, 1, 5 * NODE_BT + 3, 0), BT_OK);
    assert_int_equal(open_grant(0, 2, 4, WRITER), BT_OK);
    const Baton__LocalOpened *a = TOLD(0, OPENED)->opened;
    assert_int_equal(a->n_tokens, 5 * NODE_BT + 3);
    assert_int_equal(a->resident_blocks, 3);
    assert_int_equal(a->chunk_tokens, NODE_CHUNK);
    assert_int_not_equal(a->flow_word, 0);
    assert_int_equal(a->n_slots, 6);
    assert_int_equal(a->n_generations, 6);
    for (uint32_t b = 0; b < 6; b++) {
        assert_int_equal(bt_pool_state(node.cache->pool, a->slots[b]),
                         b < 3 ? BT_SLOT_SEALED : BT_SLOT_WRITING);
        assert_int_equal(bt_pool_generation(node.cache->pool, a->slots[b]), a->generations[b]);
    }
    /* The chunk that is resident counts as filled. */
    assert_int_equal(bt_flow_read(&node.slab->flows[a->flow_word], 4), 2);
    uint32_t flow = a->flow_word;
    say_close(0, 2, 4, WRITER, true);
    bt_grants_release(node.grants, SA, 2, 4);
    assert_all_back();
    assert_true(node.slab->flows[flow] == 0); /* its next user starts from nothing */
}

static void a_late_reader_is_told_the_trailer(void **state)
{
    (void)state;
    write_prompt(1, 1, 4);
    assert_int_equal(TOLDS(1, TRAILER), 0);
    assert_int_equal(open_grant(1, 1, 1, READER), BT_OK);
    assert_int_equal(TOLDS(1, TRAILER), 1);
    const Baton__LocalTrailer *t = TOLD(1, TRAILER)->trailer;
    assert_int_equal(t->request, 1);
    assert_int_equal(t->epoch, 1);
    assert_int_equal(t->first_token, 7);
    assert_true(t->finished);
    assert_int_equal(t->last_compute_ns, 12345);
    say_close(1, 1, 1, READER, false);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0); /* a reader may close when it likes */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
}

static void readers_hear_of_progress(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 4 * NODE_BT, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(open_grant(1, 1, 1, READER), BT_OK);
    raise_items(0, 1);
    bt_grants_bell(node.grants, wk[1].w); /* not the writer's */
    assert_int_equal(wk[1].n_bells, 0);
    bt_grants_bell(node.grants, wk[0].w);
    bt_grants_bell(node.grants, wk[0].w); /* nothing new */
    assert_int_equal(wk[1].n_bells, 1);
    assert_int_equal(wk[0].n_bells, 0);
    say_trailer(0, 1, 1, 7);
    assert_int_equal(TOLDS(1, TRAILER), 0); /* not before all items are there */
    say_trailer(0, 1, 1, 8);                /* there is one trailer */
    raise_items(0, 4);
    bt_grants_bell(node.grants, wk[0].w);
    assert_int_equal(wk[1].n_bells, 2);
    assert_int_equal(TOLDS(1, TRAILER), 1);
    assert_int_equal(TOLD(1, TRAILER)->trailer->first_token, 7);
    assert_int_equal(TOLDS(0, TRAILER), 0);
    bt_grants_bell(node.grants, wk[0].w);
    assert_int_equal(TOLDS(1, TRAILER), 1);
    say_close(0, 1, 1, WRITER, false);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    NODE_UNTIL(&node, cached(1, 4) == 4);
    rig_detach(1); /* a reader without a socket hears nothing, and keeps its slots */
    assert_int_equal(stats().opens, 1);
    assert_int_equal(stats().workers, 2);
    bt_grants_session_end(node.grants, SA);
}

static void opens_wait_for_their_reservation(void **state)
{
    (void)state;
    say_open(0, 1, 2, WRITER);
    say_open(0, 1, 3, READER);
    say_open(1, 1, 1, READER);
    say_open(1, 2, 1, READER);
    assert_int_equal(stats().waiting_opens, 4);
    assert_int_equal(node_reserve(&node, SA, 1, 2, 1, 48, 0), BT_OK);
    assert_int_equal(TOLDS(0, OPENED), 1);
    assert_int_equal(TOLD(0, OPENED)->opened->status, BT_OK);
    assert_int_equal(TOLD(0, OPENED)->opened->mode, WRITER);
    assert_int_equal(TOLDS(1, OPENED), 1);
    assert_int_equal(TOLD(1, OPENED)->opened->status, BT_ERR_STALE);
    assert_int_equal(TOLD(1, OPENED)->opened->epoch, 1);
    assert_int_equal(stats().waiting_opens, 2); /* the later epoch, and the other request */
    /* A reservation that fails answers too, and a release. */
    assert_int_equal(node_reserve(&node, SA, 2, 1, 2, 1000 * NODE_BT, 0), BT_ERR_EXHAUSTED);
    assert_int_equal(TOLD(1, OPENED)->opened->request, 2);
    assert_int_equal(TOLD(1, OPENED)->opened->status, BT_ERR_EXHAUSTED);
    assert_non_null(strstr(TOLD(1, OPENED)->opened->detail, "1000 slots needed"));
    assert_non_null(strstr(HEARD(0, RESERVED)->reserved->detail, "1000 slots needed"));
    /* An open that comes after the refusal does not wait for what has been. */
    assert_int_equal(open_grant(1, 2, 1, READER), BT_ERR_EXHAUSTED);
    assert_int_equal(stats().waiting_opens, 1);
    say_open(1, 2, 2, READER); /* of a later epoch: it waits */
    assert_int_equal(stats().waiting_opens, 2);
    bt_grants_release(node.grants, SA, 2, 2);
    assert_int_equal(stats().waiting_opens, 1);
    bt_grants_release(node.grants, SA, 1, 3);
    assert_int_equal(TOLD(0, OPENED)->opened->epoch, 3);
    assert_int_equal(TOLD(0, OPENED)->opened->status, BT_ERR_STALE);
    assert_int_equal(stats().waiting_opens, 0);
    say_close(0, 1, 2, WRITER, true);
    assert_all_back();
}

static void opens_wait_two_seconds(void **state)
{
    (void)state;
    clock_skip(node.loop, 1000);
    say_open(0, 1, 1, READER);
    say_open(0, 1, 1, WRITER);
    clock_skip(node.loop, 1000);
    say_open(0, 2, 1, READER);
    say_close(0, 1, 1, WRITER, true); /* waits no more */
    assert_int_equal(stats().waiting_opens, 2);
    clock_skip(node.loop, 999);
    assert_int_equal(TOLDS(0, OPENED), 0);
    clock_skip(node.loop, 1);
    assert_int_equal(TOLDS(0, OPENED), 1);
    assert_int_equal(TOLD(0, OPENED)->opened->status, BT_ERR_NOT_FOUND);
    assert_int_equal(TOLD(0, OPENED)->opened->request, 1);
    assert_int_equal(TOLD(0, OPENED)->opened->mode, READER);
    clock_skip(node.loop, 1000);
    assert_int_equal(TOLDS(0, OPENED), 2);
    /* An attachment that has gone waits for nothing. */
    say_open(0, 3, 1, READER);
    rig_detach(0);
    assert_int_equal(node_reserve(&node, SA, 3, 1, 1, 48, 0), BT_OK);
    assert_int_equal(stats().opens, 0);
    bt_grants_session_end(node.grants, SA);
    assert_all_back();
}

static void only_so_many_opens_wait(void **state)
{
    (void)state;
    for (uint64_t r = 1; r <= 1024; r++) {
        say_open(0, r, 1, READER);
    }
    assert_int_equal(TOLDS(0, OPENED), 0);
    assert_int_equal(open_grant(0, 2000, 1, READER), BT_ERR_EXHAUSTED);
    say_open(1, 2000, 1, READER); /* another worker's */
    say_close(0, 1, 1, READER, false);
    say_open(0, 2000, 1, READER);
    assert_int_equal(TOLDS(0, OPENED), 1);
    assert_int_equal(stats().waiting_opens, 1025);
}

/* What a worker may not say closes its connection; fields of later versions are passed over. */
static void messages_of_the_other_side(void **state)
{
    (void)state;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    assert_int_equal(bt_grants_message(node.grants, wk[0].w, &m), BT_OK);
    m.m_case = BATON__LOCAL_MSG__M_ATTACHED;
    assert_int_equal(bt_grants_message(node.grants, wk[0].w, &m), BT_ERR_PEER_PROTOCOL);
    /* About what there is not: nothing happens. */
    say_close(0, 9, 1, WRITER, true);
    say_trailer(0, 9, 1, 1);
    SAY(0, TAIL_END, tail_end, TailEnd, TAIL_END, .request = 9, .epoch = 1);
    SAY(0, PUT_DONE, put_done, PutDone, PUT_DONE, .put = 9);
    SAY(0, UNLEASE, unlease, Unlease, UNLEASE, .lease = 9);
    assert_all_back();
}

/* ---- revoked grants ---- */

static void released_means_stale(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(TOLD(0, REVOKE)->revoke->status, BT_ERR_CANCELLED);
    assert_int_equal(TOLD(0, REVOKE)->revoke->request, 1);
    assert_int_equal(TOLD(0, REVOKE)->revoke->epoch, 1);
    assert_string_equal(TOLD(0, REVOKE)->revoke->detail, "released by the conductor");
    assert_int_equal(open_grant(1, 1, 1, READER), BT_ERR_STALE); /* while the writer has it */
    raise_items(0, 2);
    say_trailer(0, 1, 1, 7); /* too late, but what was computed is kept */
    say_close(0, 1, 1, WRITER, true);
    assert_int_equal(TOLDS(0, REVOKE), 1);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    NODE_UNTIL(&node, stats().grants == 0);
    assert_int_equal(cached(1, 3), 2);
    assert_all_back();
}

static void a_failure_is_told_once(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 3, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 3, WRITER), BT_OK);
    assert_int_equal(open_grant(1, 1, 3, READER), BT_OK);
    say_close(0, 1, 3, WRITER, true);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 1);
    const Baton__GrantFailed *f = HEARD(0, GRANT_FAILED)->grant_failed;
    assert_int_equal(f->request, 1);
    assert_int_equal(f->epoch, 3);
    assert_int_equal(f->status, BT_ERR_CANCELLED);
    assert_string_equal(f->detail, "the writer gave up");
    assert_int_equal(TOLD(1, REVOKE)->revoke->status, BT_ERR_CANCELLED);
    assert_string_equal(TOLD(1, REVOKE)->revoke->detail, "the writer gave up");
    assert_int_equal(open_grant(0, 1, 3, READER), BT_ERR_CANCELLED); /* the first reason stays */
    bt_grants_release(node.grants, SA, 1, 3);
    assert_int_equal(TOLDS(1, REVOKE), 1);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 1);
    assert_int_equal(node_counts(&node).writing, 3); /* the reader's still */
    say_close(1, 1, 3, READER, false);
    assert_all_back();
}

static void released_while_it_is_sealed(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 4 * NODE_BT + 1, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    raise_items(0, items_of(5));
    say_trailer(0, 1, 1, 7);
    say_close(0, 1, 1, WRITER, false);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node_counts(&node).leases, 5); /* the seal thread's */
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(cached(1, 4), 4);
    for (uint32_t b = 0; b < 4; b++) {
        struct bt_kv_key k;
        node_key(1, b, &k);
        uint32_t slot = bt_index_find(node.cache->index, &k);
        assert_int_equal(bt_pool_depth(node.cache->pool, slot), b);
        assert_int_equal(bt_pool_verify(node.cache->pool, slot), BT_OK);
    }
    assert_all_back();
}

/* ---- workers that keep what was revoked ---- */

static void hung_writer_is_killed(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    clock_skip(node.loop, 60000); /* as long as nobody wants it back */
    assert_int_equal(stats().killed, 0);
    bt_grants_release(node.grants, SA, 1, 1);
    clock_skip(node.loop, RIG_RECLAIM_MS - 1);
    assert_int_equal(stats().killed, 0);
    clock_skip(node.loop, 1);
    assert_int_equal(stats().killed, 1);
    clock_skip(node.loop, 4999); /* its death may take a moment */
    assert_int_equal(stats().killed, 1);
    clock_skip(node.loop, 1);
    assert_int_equal(stats().killed, 2);
    assert_int_equal(node_counts(&node).writing, 3); /* never taken from a living process */
    rig_die(0);
    assert_int_equal(node_counts(&node).quarantine, 3);
    clock_skip(node.loop, 1000);
    assert_all_back();
}

static void dead_writer(void **state)
{
    (void)state;
    cache_prompt(1, 1, 1);
    assert_int_equal(node_reserve(&node, SA, 2, 1, 1, 4 * NODE_BT, 0), BT_OK);
    assert_int_equal(open_grant(0, 2, 1, WRITER), BT_OK);
    raise_items(0, 2);
    int fd = wk[0].pidfd;
    rig_die(0);
    assert_false(rig_fd_open(fd));
    assert_int_equal(stats().workers, 1);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_PEER_LOST);
    assert_string_equal(HEARD(0, GRANT_FAILED)->grant_failed->detail, "the worker died");
    /* Blocks 0 and 1 are whole and kept. The rest may still be written. */
    assert_int_equal(node_counts(&node).quarantine, 2);
    NODE_UNTIL(&node, cached(1, 4) == 2);
    assert_int_equal(TOLDS(0, REVOKE), 0);
    bt_grants_release(node.grants, SA, 2, 1);
    clock_skip(node.loop, 999);
    assert_int_equal(node_counts(&node).leases, 4);
    assert_int_equal(stats().opens, 1);
    clock_skip(node.loop, 1);
    assert_all_back();
    assert_int_equal(node_counts(&node).sealed, 2);
}

/* A reader that died may still read: nobody may write there before the quarantine is over. */
static void dead_reader(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 4 * NODE_BT, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(open_grant(1, 1, 1, READER), BT_OK);
    rig_die(1);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 0);
    assert_int_equal(node_counts(&node).quarantine, 0); /* the writer goes on */
    raise_items(0, 2);
    bt_grants_bell(node.grants, wk[0].w);
    assert_int_equal(wk[1].n_bells, 0);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node_counts(&node).quarantine, 0);
    say_close(0, 1, 1, WRITER, true);
    NODE_UNTIL(&node, cached(1, 2) == 2);
    assert_int_equal(node_counts(&node).quarantine, 2);
    assert_int_equal(node_counts(&node).leases, 4);
    clock_skip(node.loop, 1000);
    assert_all_back();
}

static void a_dead_worker_kept_nothing(void **state)
{
    (void)state;
    int fd = wk[0].pidfd;
    say_open(0, 1, 1, READER);
    rig_die(0);
    assert_false(rig_fd_open(fd));
    assert_int_equal(stats().workers, 1);
    assert_int_equal(stats().waiting_opens, 0);
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
}

/* ---- sockets that end, and new ones ---- */

static void detached_writer_fails_its_grant(void **state)
{
    (void)state;
    for (uint64_t r = 1; r <= 3; r++) {
        assert_int_equal(node_reserve(&node, SA, r, 1, (uint32_t)r, 4 * NODE_BT, 0), BT_OK);
    }
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    assert_int_equal(open_grant(0, 2, 1, READER), BT_OK);
    assert_int_equal(open_grant(0, 3, 1, WRITER), BT_OK);
    say_trailer(0, 3, 1, 7); /* all was said: its word may still rise */
    struct bt_grant_worker *w = wk[0].w;
    rig_detach(0);
    assert_int_equal(HEARDS(0, GRANT_FAILED), 1);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->request, 1);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_PEER_LOST);
    assert_int_equal(stats().opens, 3); /* the end of a socket proves nothing */
    assert_int_equal(stats().workers, 2);
    assert_int_equal(TOLDS(0, REVOKE), 0);
    raise_items(0, 4);
    bt_grants_bell(node.grants, w);
    NODE_UNTIL(&node, cached(3, 4) == 4);
    /* The same process attaches again: what it held before ends a second later. */
    int fd = wk[0].pidfd;
    rig_attach(0);
    assert_ptr_equal(wk[0].w, w);
    assert_false(rig_fd_open(fd));
    assert_int_equal(wk[0].n_drops, 0);
    assert_int_equal(stats().workers, 2);
    bt_grants_session_end(node.grants, SA);
    clock_skip(node.loop, 999);
    assert_int_equal(stats().opens, 3);
    clock_skip(node.loop, 1);
    assert_all_back();
    assert_int_equal(stats().killed, 0);
}

static void attached_again(void **state)
{
    (void)state;
    assert_int_equal(node_reserve(&node, SA, 1, 1, 1, 48, 0), BT_OK);
    assert_int_equal(open_grant(0, 1, 1, WRITER), BT_OK);
    say_open(0, 2, 1, READER);
    rig_attach(0); /* over the first connection */
    assert_int_equal(wk[0].n_drops, 1);
    assert_int_equal(stats().waiting_opens, 0);
    assert_int_equal(HEARD(0, GRANT_FAILED)->grant_failed->status, BT_ERR_PEER_LOST);
    assert_string_equal(HEARD(0, GRANT_FAILED)->grant_failed->detail, "the worker attached again");
    assert_int_equal(node_counts(&node).quarantine, 3);
    assert_int_equal(stats().opens, 1);
    clock_skip(node.loop, 1000);
    assert_int_equal(stats().opens, 0);
    assert_int_equal(node_counts(&node).quarantine, 3); /* reserved still */
    bt_grants_release(node.grants, SA, 1, 1);
    assert_all_back();
    rig_die(0); /* the new descriptor is watched */
    assert_int_equal(stats().workers, 1);
}

/* Another process of the same name, or the same number with another name, is another worker. */
static void others_are_others(void **state)
{
    (void)state;
    static const struct bt_grant_worker_ops ops = {
        .send = rig_send, .ring = rig_ring, .drop = rig_drop};
    static const struct {
        const char *name;
        uint64_t incarnation;
        uint32_t pid;
    } who[] = {{"w0", 100, 1001}, {"w0", 101, 1000}, {"w1", 100, 1000}};
    struct bt_grant_worker *w[3];
    for (uint32_t i = 0; i < 3; i++) {
        w[i] = bt_grants_attach(node.grants, who[i].name, who[i].incarnation, who[i].pid,
                                eventfd(0, EFD_CLOEXEC), &ops, &wk[2]);
        assert_int_equal(stats().workers, 3 + i);
    }
    assert_int_equal(wk[0].n_drops + wk[1].n_drops + wk[2].n_drops, 0);
    for (uint32_t i = 0; i < 3; i++) {
        bt_grants_detach(node.grants, w[i]);
        assert_int_equal(stats().workers, 4 - i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(open_says_all_of_the_grant, setup, teardown),
        cmocka_unit_test_setup_teardown(a_late_reader_is_told_the_trailer, setup, teardown),
        cmocka_unit_test_setup_teardown(readers_hear_of_progress, setup, teardown),
        cmocka_unit_test_setup_teardown(opens_wait_for_their_reservation, setup, teardown),
        cmocka_unit_test_setup_teardown(opens_wait_two_seconds, setup, teardown),
        cmocka_unit_test_setup_teardown(only_so_many_opens_wait, setup, teardown),
        cmocka_unit_test_setup_teardown(messages_of_the_other_side, setup, teardown),
        cmocka_unit_test_setup_teardown(released_means_stale, setup, teardown),
        cmocka_unit_test_setup_teardown(a_failure_is_told_once, setup, teardown),
        cmocka_unit_test_setup_teardown(released_while_it_is_sealed, setup, teardown),
        cmocka_unit_test_setup_teardown(hung_writer_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(dead_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(dead_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(a_dead_worker_kept_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(detached_writer_fails_its_grant, setup, teardown),
        cmocka_unit_test_setup_teardown(attached_again, setup, teardown),
        cmocka_unit_test_setup_teardown(others_are_others, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
