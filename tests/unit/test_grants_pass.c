/* Blocks of prompts that no slab holds, on their way through the slab to the SSD: who gets a slot
 * of the window, who waits for one and how long, and when slots come back. */
#include "grant_rig.h"

#include <errno.h>
#include <pthread.h>

#define WINDOW (RIG_SLOTS / 8)

static char folder[64];
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* held: the disk writes nothing */
static _Atomic int write_errno;

static ssize_t disk_read(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    ssize_t n = pread(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static ssize_t disk_write(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    if (write_errno != 0) {
        return -write_errno;
    }
    ssize_t n = pwrite(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static int disk_flush(void *arg, int fd)
{
    (void)arg;
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static const struct bt_ssd_sys disk = {disk_read, disk_write, disk_flush, NULL};

static int setup_ssd(void **state)
{
    (void)state;
    struct node_ssd ssd = {
        .path = folder, .slots = 200, .policy = BT_TIER_ALWAYS, .load_ms = 2000, .sys = &disk};
    strcpy(folder, "/tmp/baton-unit-pass-XXXXXX");
    assert_non_null(mkdtemp(folder));
    write_errno = 0;
    rig_ssd = &ssd;
    rig_start(RIG_SLOTS);
    rig_ssd = NULL;
    return 0;
}

static int teardown_ssd(void **state)
{
    char cmd[128];
    int rc = teardown(state);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", folder);
    return rc | system(cmd);
}

static void ask(uint32_t i, uint64_t id, uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    SAY(i, PUT, put, Put, PUT, .put = id, .key = {.len = sizeof(k.b), .data = k.b}, .depth = block,
        .n_tokens = NODE_BT, .passing = true);
}

static void done(uint32_t i, uint64_t id, bool abort)
{
    const Baton__LocalPutSlot *a = TOLD(i, PUT_SLOT)->put_slot;
    if (a->put == id) {
        memset(bt_slab_data(node.slab, a->slot), (int)id, node.layout.block_bytes);
    }
    SAY(i, PUT_DONE, put_done, PutDone, PUT_DONE, .put = id, .abort = abort);
}

static bool on_ssd(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    return bt_ssd_has(bt_tier_ssd(node.tier), &k);
}

static int32_t told(uint32_t i, uint64_t id)
{
    assert_int_equal(TOLD(i, PUT_SLOT)->put_slot->put, id);
    return TOLD(i, PUT_SLOT)->put_slot->status;
}

/* Worker i asks for n blocks, numbers from `id` on: the window is free. */
static void fill(uint32_t i, uint64_t id, uint32_t chain, uint32_t n)
{
    uint32_t before = TOLDS(i, PUT_SLOT);
    for (uint32_t b = 0; b < n; b++) {
        ask(i, id + b, chain, b);
        assert_int_equal(TOLDS(i, PUT_SLOT), before + BT_MIN(b + 1, WINDOW));
    }
    assert_int_equal(told(i, id + BT_MIN(n, WINDOW) - 1), BT_OK);
}

static void a_slot_for_the_next(void **state)
{
    (void)state;
    pthread_mutex_lock(&gate);
    fill(0, 1, 1, 6);
    assert_int_equal(stats().puts, 6);
    assert_int_equal(node_counts(&node).writing, WINDOW);
    done(0, 2, true); /* given up: the next one has the slot at once */
    assert_int_equal(told(0, 5), BT_OK);
    done(0, 1, false); /* to be sealed, and written */
    NODE_UNTIL(&node, node_counts(&node).sealed == 1);
    assert_int_equal(TOLDS(0, PUT_SLOT), 5);
    pthread_mutex_unlock(&gate);
    NODE_UNTIL(&node, TOLDS(0, PUT_SLOT) == 6);
    assert_int_equal(told(0, 6), BT_OK);
    NODE_UNTIL(&node, on_ssd(1, 0));
    assert_int_equal(cached(1, 6), 0); /* it has left the slab */
    for (uint64_t id = 3; id <= 6; id++) {
        done(0, id, id == 3);
    }
    NODE_UNTIL(&node, stats().puts == 0);
    NODE_UNTIL(&node, on_ssd(1, 3) && on_ssd(1, 4) && on_ssd(1, 5));
    assert_false(on_ssd(1, 1) || on_ssd(1, 2));
    assert_all_back();
}

static void known_blocks_are_not_written_again(void **state)
{
    (void)state;
    ask(0, 1, 1, 0);
    done(0, 1, false);
    NODE_UNTIL(&node, on_ssd(1, 0));
    ask(0, 2, 1, 0);
    assert_int_equal(told(0, 2), BT_ERR_EXISTS);
    cache_prompt(1, 2, 1);
    ask(0, 3, 2, 0);
    assert_int_equal(told(0, 3), BT_ERR_EXISTS);
    /* It comes into the slab while it waits for room in the window. */
    NODE_UNTIL(&node, stats().puts == 0);
    fill(0, 10, 3, WINDOW);
    ask(1, 1, 5, 0);
    assert_int_equal(TOLDS(1, PUT_SLOT), 0);
    cache_prompt(2, 5, 1);
    done(0, 10, true);
    assert_int_equal(told(1, 1), BT_ERR_EXISTS);
    assert_int_equal(stats().puts, WINDOW - 1);
    fill(1, 2, 4, 1); /* its slot was not taken */
}

static void a_full_window_is_not_waited_for(void **state)
{
    (void)state;
    fill(0, 1, 1, WINDOW + 1);
    clock_skip(node.loop, 1000);
    ask(1, 1, 2, 0);
    clock_skip(node.loop, 8999);
    assert_int_equal(TOLDS(0, PUT_SLOT), WINDOW);
    clock_skip(node.loop, 1);
    assert_int_equal(told(0, WINDOW + 1), BT_ERR_EXHAUSTED);
    assert_int_equal(TOLDS(1, PUT_SLOT), 0);
    clock_skip(node.loop, 1000);
    assert_int_equal(told(1, 1), BT_ERR_EXHAUSTED);
    assert_int_equal(stats().puts, WINDOW);
}

/* Slots of the window are given as far as the slab has any. */
static void no_slot_is_free(void **state)
{
    (void)state;
    uint32_t slots[64], n = node_counts(&node).free;
    assert_int_equal(cache_take(node.cache, n, slots), BT_OK);
    ask(0, 1, 1, 0);
    clock_skip(node.loop, 100);
    assert_int_equal(TOLDS(0, PUT_SLOT), 0);
    bt_cache_put(node.cache, slots, n);
    assert_int_equal(TOLDS(0, PUT_SLOT), 0);
    clock_skip(node.loop, 100); /* the tick tries again */
    assert_int_equal(told(0, 1), BT_OK);
}

static void a_worker_goes(void **state)
{
    (void)state;
    fill(0, 1, 1, 6);
    ask(1, 1, 2, 0);
    assert_int_equal(stats().puts, 7);
    rig_detach(0); /* what it has a slot for may still be written */
    assert_int_equal(stats().puts, WINDOW + 1);
    assert_int_equal(stats().workers, 2);
    rig_attach(0);
    ask(0, 1, 1, 0);
    assert_int_equal(TOLDS(1, PUT_SLOT), 0);
    rig_attach(0); /* while it waits */
    assert_int_equal(stats().puts, WINDOW + 1);
    assert_int_equal(node_counts(&node).quarantine, WINDOW);
    clock_skip(node.loop, 1000);
    assert_int_equal(told(1, 1), BT_OK); /* the window is free again, all of it */
    assert_int_equal(stats().puts, 1);
    done(1, 1, true);
    fill(0, 10, 3, 5);
    rig_die(0);
    clock_skip(node.loop, 1000);
    assert_int_equal(stats().puts, 0);
    assert_all_back();
}

static void waiting_puts_are_bounded(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 4096 + WINDOW; b++) {
        ask(0, 1 + b, 1, b % 64); /* admitted by their depth */
    }
    assert_int_equal(TOLDS(0, PUT_SLOT), WINDOW);
    ask(0, 5000, 1, 1);
    assert_int_equal(told(0, 5000), BT_ERR_EXHAUSTED);
    done(0, 1, true); /* one of those that wait has its slot now */
    ask(0, 5001, 1, 1);
    assert_int_equal(told(0, WINDOW + 1), BT_OK);
    clock_skip(node.loop, 10000);
    assert_int_equal(stats().puts, WINDOW); /* they were told that it takes too long */
    ask(0, 5002, 1, 1);
    assert_int_equal(stats().puts, WINDOW + 1);
}

/* A disk that fails: the slot comes back all the same. */
static void a_write_that_fails(void **state)
{
    (void)state;
    fill(0, 1, 1, WINDOW + 2);
    write_errno = EIO;
    done(0, 1, false);
    NODE_UNTIL(&node, TOLDS(0, PUT_SLOT) == WINDOW + 1);
    assert_false(on_ssd(1, 0));
    assert_int_equal(stats().puts, WINDOW + 1);
    assert_int_equal(told(0, WINDOW + 1), BT_OK);
    struct bt_ssd_stats s;
    bt_ssd_stats(bt_tier_ssd(node.tier), &s);
    assert_false(s.up);
    done(0, 2, false); /* it cannot even be asked to write */
    NODE_UNTIL(&node, TOLDS(0, PUT_SLOT) == WINDOW + 2);
    assert_int_equal(stats().puts, WINDOW);
    assert_int_equal(cached(1, 8), 0);
    ask(0, 20, 1, 20);
    assert_int_equal(told(0, 20), BT_ERR_UNAVAILABLE);
}

/* The kvstore stops while blocks are sealed and written: nobody gets a slot any more. */
static void a_stop_in_the_middle(void **state)
{
    (void)state;
    pthread_mutex_lock(&gate);
    fill(0, 1, 1, WINDOW + 2);
    done(0, 1, false);
    NODE_UNTIL(&node, node_counts(&node).sealed == 1);
    bt_grants_stop(node.grants);
    done(0, 2, true);
    assert_int_equal(TOLDS(0, PUT_SLOT), WINDOW);
    ask(0, 10, 1, 10);
    assert_int_equal(told(0, 10), BT_ERR_UNAVAILABLE);
    done(0, 3, false);
    pthread_mutex_unlock(&gate);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_slot_for_the_next, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(known_blocks_are_not_written_again, setup_ssd,
                                        teardown_ssd),
        cmocka_unit_test_setup_teardown(a_full_window_is_not_waited_for, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(no_slot_is_free, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(a_worker_goes, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(waiting_puts_are_bounded, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(a_write_that_fails, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(a_stop_in_the_middle, setup_ssd, teardown_ssd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
