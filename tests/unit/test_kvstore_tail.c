/* Prefixes that come from their end while a worker computes from their beginning: when that is
 * chosen, in which order blocks come, what the worker is told, and what becomes of the slots that
 * it may be reading. The wire is a recorder, the worker a process (tests/tools/kv_worker). */
#include "kv_child.h"
#include "kv_fetch.h"

#define SLOTS 440u /* of which tails may have a quarter: 100 blocks, and ten more */
#define BOTH  2e6  /* tokens a second: 4 KiB a block at the assumed 1 GB/s take half as long */

static struct node node;
static int conductor;

static int setup(void **state)
{
    (void)state;
    node_overlap = true;
    node_start(&node, SLOTS, 30000);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    node_stop(&node);
    node_overlap = false;
    return 0;
}

/* Request 10 of 100 blocks and a bit, with its writer. */
static void begin(struct child *p, const struct src *s, size_t n_src)
{
    child_start(p, "p", 1, NULL);
    child_wait(p, "attached");
    reserve_from(&node, &conductor, 10, 1, 1, 100 * NODE_BT + 3, s, n_src, BOTH);
    assert_int_equal(node.n_reserved, 1); /* nobody waits */
    assert_int_equal(node.reserved_status, BT_OK);
    child_say(p, "open 10 1 w");
    assert_non_null(strstr(child_wait(p, "opened"), "status=OK n=101"));
}

/* All that the worker was told to do is done, and the kvstore has heard of it and has answered:
 * what it asks for comes back behind that. */
static void settle(struct child *p)
{
    static unsigned id = 1000;
    char want[32];
    size_t mark = p->mark;
    child_say(p, "lease %u 255 1", ++id);
    snprintf(want, sizeof(want), "leased %u status=ERR_NOT_FOUND", id);
    child_wait(p, want);
    p->mark = mark; /* what was said meanwhile is still to be looked at */
}

/* What the worker was told last holds block `block`'s bytes in its first slot. */
static void assert_told(struct child *p, uint32_t first, uint32_t n)
{
    char want[64];
    struct bt_kv_key k;
    snprintf(want, sizeof(want), "tail 10 1 first=%u n=%u slots=", first, n);
    const char *said = child_wait(p, want);
    uint32_t slot = (uint32_t)strtoul(said + strlen(want), NULL, 10);
    node_key(1, first, &k);
    assert_int_equal(bt_index_find(node.cache->index, &k), slot);
    assert_int_equal(*(uint8_t *)bt_slab_data(node.slab, slot), k.b[4] + 1);
}

static void comes_from_its_end(void **state)
{
    struct child p;
    struct src s = {7, 0, 1000};
    (void)state;
    begin(&p, &s, 1);
    assert_int_equal(node.resident, 0);
    assert_int_equal(node.n_pulls, 2);
    assert_piece(&node, 0, 7, 68, PIECE);
    assert_piece(&node, 1, 7, 36, PIECE);
    pass(&node, 1); /* not at the end: of no use yet */
    assert_piece(&node, 2, 7, 4, PIECE);
    settle(&p);
    assert_false(child_said(&p, "tail"));
    pass(&node, 0);
    assert_told(&p, 36, 64);
    pass(&node, 2);
    assert_told(&p, 4, 32); /* right in front of what it knows */
    assert_piece(&node, 3, 7, 0, 4);
    pass(&node, 3);
    assert_told(&p, 0, 4);
    /* Both the grant's own slots and the tail's are held until the writer has closed. */
    assert_int_equal(node_counts(&node).leases, 201);
    assert_int_equal(node_counts(&node).writing, 101);
    child_say(&p, "fill 10 1 5");
    child_wait(&p, "filled");
    child_say(&p, "raise 10 1 102"); /* 51 chunks of 2 layers: all of it */
    child_say(&p, "trailer 10 1 5");
    child_say(&p, "close 10 1 w 0");
    NODE_UNTIL(&node, node_counts(&node).leases == 101);
    bt_grants_release(node.grants, &conductor, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_nothing_held(&node, 100); /* the second copies are not kept */
    child_quit(&p);
}

/* Loaded: the second slots are cache then, however long the worker takes for the rest. */
static void ends_when_it_is_loaded(void **state)
{
    struct child p;
    struct src s = {7, 0, 1000};
    (void)state;
    begin(&p, &s, 1);
    pass(&node, 0);
    assert_told(&p, 68, 32);
    assert_int_equal(node_counts(&node).leases, 101 + 32);
    uint32_t evictable = node.cache->policy->evictable(node.cache->evict);
    child_say(&p, "tailend 10 1");
    NODE_UNTIL(&node, node_counts(&node).leases == 101);
    assert_int_equal(node.cache->policy->evictable(node.cache->evict), evictable + 32);
    quiet(&node.pulls[1]); /* what was asked for and did not move is given up */
    settle(&p);
    assert_int_equal(node_counts(&node).leases, 101);
    child_read(&p);
    assert_null(strstr(p.text + p.mark, "tail 10"));
    child_say(&p, "tailend 10 1"); /* once more: nothing */
    child_say(&p, "close 10 1 w 1");
    NODE_UNTIL(&node, node.n_failed == 1);
    bt_grants_release(node.grants, &conductor, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    child_quit(&p);
}

/* Tails together take no more than a quarter of the slots: the second one reaches ten blocks down,
 * and the rest of it is computed; the third has none. */
static void tails_share_a_quarter(void **state)
{
    struct src s = {7, 0, 1000};
    (void)state;
    reserve_from(&node, &conductor, 10, 1, 1, 100 * NODE_BT + 3, &s, 1, BOTH);
    uint32_t left = node_counts(&node).total / 4 - 100;
    assert_in_range(left, 10, 12);
    reserve_from(&node, &conductor, 11, 1, 2, 100 * NODE_BT + 3, &s, 1, BOTH);
    assert_int_equal(node.n_pulls, 3);
    struct bt_kv_key k;
    node_key(2, 100 - left, &k);
    assert_int_equal(node.pulls[2].n, left);
    assert_memory_equal(&node.pulls[2].keys[0], &k, sizeof(k));
    pass(&node, 2);
    NODE_UNTIL(&node, node_counts(&node).sealed == left);
    bt_loop_poll(node.loop, 0);
    assert_int_equal(node.n_pulls, 3);
    reserve_from(&node, &conductor, 12, 1, 3, 100 * NODE_BT + 3, &s, 1, BOTH);
    assert_int_equal(node.n_pulls, 3);
    assert_int_equal(node.n_reserved, 3); /* all of them go on */
    assert_int_equal(node.reserved_status, BT_OK);
    bt_grants_session_end(node.grants, &conductor);
}

/* What the worker has passed is not asked for any more. */
static void ends_where_the_worker_is(void **state)
{
    struct child p;
    struct src s = {7, 0, 1000};
    (void)state;
    begin(&p, &s, 1);
    child_say(&p, "raise 10 1 60"); /* 30 chunks: blocks before 60 are computed */
    settle(&p);
    pass(&node, 0);
    assert_told(&p, 68, 32);
    pass(&node, 1);                    /* was under way: 36 to 67 */
    assert_told(&p, 60, 8);            /* ... of which these are of use */
    assert_int_equal(node.n_pulls, 2); /* nothing in front of them is asked for */
    child_say(&p, "close 10 1 w 1");
    NODE_UNTIL(&node, node.n_failed == 1);
    bt_grants_release(node.grants, &conductor, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    child_quit(&p);
}

/* Blocks at the end that nobody has after all: the tail ends before them. Lost in its middle: it
 * begins behind them. */
static void ends_and_begins_at_what_is_lost(void **state)
{
    struct child p;
    struct src s = {7, 0, 1000};
    (void)state;
    begin(&p, &s, 1);
    offer(&node.pulls[0], 20); /* of 68 to 99 it lacks 88 to 99 */
    land(&node, &node.pulls[0], 20);
    assert_told(&p, 68, 20);
    node.pulls[1].ops.on_failed(node.pulls[1].arg, BT_ERR_PEER_LOST, "gone");
    quiet(&node.pulls[1]);
    settle(&p);
    assert_int_equal(node.n_pulls, 3); /* 4 to 35 were asked for before; nothing is since */
    pass(&node, 2);                    /* behind a hole they are of no use */
    settle(&p);
    assert_int_equal(node.n_pulls, 3);
    assert_int_equal(node.n_failed, 0);
    child_read(&p);
    assert_null(strstr(p.text + p.mark, "tail"));
    child_say(&p, "close 10 1 w 1");
    NODE_UNTIL(&node, node.n_failed == 1);
    bt_grants_release(node.grants, &conductor, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    child_quit(&p);
}

/* A source that is lost is replaced, from the same block backwards. */
static void another_source_goes_on(void **state)
{
    struct child p;
    struct src s[2] = {{7, 0, 1000}, {8, 0, 1000}};
    (void)state;
    begin(&p, s, 2);
    assert_int_equal(node.n_pulls, 4);
    uint64_t first = node.pulls[0].incarnation;
    node.pulls[0].ops.on_failed(node.pulls[0].arg, BT_ERR_PEER_LOST, "gone");
    quiet(&node.pulls[0]);
    for (uint32_t i = 1; i < node.n_pulls; i++) { /* whatever is asked of the other one */
        if (node.pulls[i].incarnation != first) {
            pass(&node, i);
        } else if (node.pulls[i].active) {
            quiet(&node.pulls[i]);
        }
    }
    NODE_UNTIL(&node, child_said(&p, "first=0"));
    child_quit(&p);
    bt_grants_release(node.grants, &conductor, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
}

/* The writer may still be reading: its tail is held for a quarantine after its death. */
static void killed_writer_keeps_its_tail_for_a_quarantine(void **state)
{
    struct child p;
    struct src s = {7, 0, 1000};
    (void)state;
    begin(&p, &s, 1);
    pass(&node, 0);
    assert_told(&p, 68, 32);
    uint64_t t0 = bt_mono_ns();
    kill(p.pid, SIGKILL);
    child_reap(&p, SIGKILL);
    NODE_UNTIL(&node, node.n_failed == 1);
    bt_grants_release(node.grants, &conductor, 10, 1);
    while (bt_mono_ns() - t0 < 900000000ull) {
        bt_loop_poll(node.loop, 20);
        uint32_t leases = node_counts(&node).leases;
        if (bt_mono_ns() - t0 < 1000000000ull) { /* that turn may have taken long */
            assert_true(leases >= 101 + 32);
        }
    }
    NODE_UNTIL(&node, node_counts(&node).quarantine == 0 && node_counts(&node).leases <= PIECE);
    assert_true(bt_mono_ns() - t0 >= 1000000000ull);
}

/* Released, without that its writer ever came, and with blocks under way. */
static void release_ends_it(void **state)
{
    struct src s = {7, 0, 1000};
    (void)state;
    reserve_from(&node, &conductor, 10, 1, 1, 100 * NODE_BT + 3, &s, 1, BOTH);
    offer(&node.pulls[0], PIECE);
    bt_grants_release(node.grants, &conductor, 10, 1);
    assert_int_equal(node_counts(&node).leases, PIECE); /* bytes may arrive */
    land(&node, &node.pulls[0], PIECE);
    quiet(&node.pulls[1]);
    assert_nothing_held(&node, PIECE);
}

/* Where loading is much faster, and where nobody says how fast computing is, it is waited for. */
static void only_where_it_is_dear(void **state)
{
    struct src s = {7, 0, 1000};
    (void)state;
    double even = 16.0 * BT_RATES_PRIOR_SLAB / (double)node.layout.block_bytes;
    reserve_from(&node, &conductor, 1, 1, 1, 30 * NODE_BT + 3, &s, 1, even / 4 * 0.99);
    assert_int_equal(node.n_reserved, 0);
    reserve_from(&node, &conductor, 2, 1, 2, 30 * NODE_BT + 3, &s, 1, 0);
    assert_int_equal(node.n_reserved, 0);
    reserve_from(&node, &conductor, 3, 1, 3, 30 * NODE_BT + 3, &s, 1, even / 4 * 1.01);
    assert_int_equal(node.n_reserved, 1);
    assert_int_equal(node.n_pulls, 3);
    reserve_from(&node, &conductor, 4, 1, 4, 30 * NODE_BT + 3, &s, 1, even * 8 * 1.01);
    assert_int_equal(node.n_reserved, 2);
    assert_int_equal(node.n_pulls, 3); /* so slow that it is left alone */
    for (uint32_t r = 1; r <= 4; r++) {
        bt_grants_release(node.grants, &conductor, r, 1);
    }
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(node.pulls[i].cancelled);
        quiet(&node.pulls[i]);
    }
    assert_nothing_held(&node, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(comes_from_its_end, setup, teardown),
        cmocka_unit_test_setup_teardown(ends_when_it_is_loaded, setup, teardown),
        cmocka_unit_test_setup_teardown(tails_share_a_quarter, setup, teardown),
        cmocka_unit_test_setup_teardown(ends_where_the_worker_is, setup, teardown),
        cmocka_unit_test_setup_teardown(ends_and_begins_at_what_is_lost, setup, teardown),
        cmocka_unit_test_setup_teardown(another_source_goes_on, setup, teardown),
        cmocka_unit_test_setup_teardown(killed_writer_keeps_its_tail_for_a_quarantine, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(release_ends_it, setup, teardown),
        cmocka_unit_test_setup_teardown(only_where_it_is_dear, setup, teardown),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
