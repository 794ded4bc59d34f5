/* The tier below the slab, by a clock that the test moves and a disk behind gates: how many blocks
 * are written at once, who waits, how long a read is waited for, and who is told. */
#include "kv_clock.h"
#include "kv_disk.h"
#include "kv_node.h"

#include <errno.h>
#include <pthread.h>

#define SLOTS 24u
#define SAVES (SLOTS / 8)

static struct node node;
static struct bt_tier *tier;
static char folder[64];

static void start(bt_tier_policy_t policy)
{
    struct node_ssd ssd = {
        .path = folder, .slots = 200, .policy = policy, .load_ms = 700, .sys = &kv_disk};
    strcpy(folder, "/tmp/baton-unit-tier-XXXXXX");
    assert_non_null(mkdtemp(folder));
    read_errno = write_errno = 0;
    node_start_ssd(&node, SLOTS, 60000, &ssd);
    tier = node.tier;
}

static int teardown(void **state)
{
    char cmd[128];
    (void)state;
    node_stop(&node);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", folder);
    return system(cmd);
}

static struct bt_ssd_stats ssd(void)
{
    struct bt_ssd_stats s;
    bt_ssd_stats(bt_tier_ssd(tier), &s);
    return s;
}

static bool on_ssd(uint32_t chain, uint32_t b)
{
    struct bt_kv_key k;
    node_key(chain, b, &k);
    return bt_ssd_has(bt_tier_ssd(tier), &k);
}

static uint32_t written(uint32_t chain, uint32_t n)
{
    uint32_t have = 0;
    for (uint32_t b = 0; b < n; b++) {
        have += on_ssd(chain, b);
    }
    return have;
}

static uint32_t find(uint32_t chain, uint32_t b)
{
    struct bt_kv_key k;
    node_key(chain, b, &k);
    return bt_index_find(node.cache->index, &k);
}

static uint32_t seal(uint32_t chain, uint32_t b, bool passing)
{
    struct bt_kv_key k;
    uint32_t slot;
    node_key(chain, b, &k);
    assert_int_equal(cache_take(node.cache, 1, &slot), BT_OK);
    memset(bt_slab_data(node.slab, slot), (int)(chain * 16 + b), node.layout.block_bytes);
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        bt_pool_segment_crc(node.cache->pool, slot, l, &k);
    }
    struct bt_cache_block block = {.key = &k, .n_tokens = NODE_BT, .depth = b, .passing = passing};
    assert_true(bt_cache_seal(node.cache, slot, &block));
    return slot;
}

static uint32_t compute(uint32_t chain, uint32_t b)
{
    uint32_t slot = seal(chain, b, false);
    bt_cache_put(node.cache, &slot, 1);
    return slot;
}

static void forget(uint32_t chain, uint32_t b)
{
    struct bt_kv_key k;
    node_key(chain, b, &k);
    uint32_t slot = bt_cache_hold(node.cache, &k);
    assert_int_not_equal(slot, UINT32_MAX);
    bt_cache_evict(node.cache, slot);
    assert_int_equal(find(chain, b), UINT32_MAX);
}

/* n blocks that are on the SSD and not in the slab. */
static void below(uint32_t chain, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        compute(chain, b);
        NODE_UNTIL(&node, on_ssd(chain, b) && node_counts(&node).leases == 0);
        forget(chain, b);
    }
}

/* ---- writing ---- */

static void few_are_written_at_once(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS);
    pthread_mutex_lock(&writes);
    for (uint32_t b = 0; b < 8; b++) {
        compute(1, b);
    }
    assert_int_equal(node_counts(&node).leases, SAVES);
    assert_int_equal(ssd().backlog, SAVES);
    for (uint32_t b = 0; b < 8; b++) {
        uint32_t slot = find(1, b);
        assert_int_equal(bt_pool_leases(node.cache->pool, slot), b < SAVES);
    }
    forget(1, 5); /* before its turn: it is not written */
    uint32_t slot = find(1, 6);
    forget(1, 6); /* and here another block has its slot by then */
    assert_int_equal(compute(2, 0), slot);
    assert_int_equal(bt_tier_save(tier, find(1, 7)), BT_AGAIN);
    assert_int_equal(node_counts(&node).leases, SAVES);
    pthread_mutex_unlock(&writes);
    NODE_UNTIL(&node, written(1, 8) == 6 && on_ssd(2, 0) && node_counts(&node).leases == 0);
    for (uint32_t b = 0; b < 8; b++) {
        assert_int_equal(on_ssd(1, b), b != 5 && b != 6);
    }
    assert_int_equal(ssd().written, 7);
}

static void a_save_that_is_asked_for(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE);
    for (uint32_t b = 0; b < SAVES + 1; b++) {
        compute(1, b);
    }
    assert_int_equal(ssd().backlog, 0); /* used once */
    pthread_mutex_lock(&writes);
    assert_int_equal(bt_tier_save(tier, find(1, 0)), BT_OK);
    assert_int_equal(bt_tier_save(tier, find(1, 0)), BT_ERR_EXISTS); /* it is being written */
    for (uint32_t b = 1; b < SAVES; b++) {
        assert_int_equal(bt_tier_save(tier, find(1, b)), BT_OK);
    }
    assert_int_equal(bt_tier_save(tier, find(1, SAVES)), BT_AGAIN);
    assert_int_equal(node_counts(&node).leases, SAVES);
    pthread_mutex_unlock(&writes);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    NODE_UNTIL(&node, written(1, SAVES + 1) == SAVES);
    assert_false(on_ssd(1, SAVES));
}

static void what_the_policy_admits(void **state)
{
    struct bt_kv_key k;
    (void)state;
    start(BT_TIER_SECOND_USE);
    node_key(1, 0, &k);
    assert_int_equal(bt_tier_admit(tier, &k, 0), BT_ERR_EXISTS); /* its first use */
    assert_int_equal(bt_tier_admit(tier, &k, 0), BT_OK);
    uint32_t half = ssd().slots / 2;
    assert_int_equal(bt_tier_admit(tier, &k, half), BT_ERR_EXHAUSTED);
    node_key(1, half - 1, &k);
    assert_int_equal(bt_tier_admit(tier, &k, half - 1), BT_ERR_EXISTS);
    assert_int_equal(bt_tier_admit(tier, &k, half - 1), BT_OK);
    node_key(1, 9, &k);
    assert_int_equal(bt_tier_save(tier, compute(1, 9)), BT_OK);
    NODE_UNTIL(&node, on_ssd(1, 9));
    assert_int_equal(bt_tier_admit(tier, &k, 9), BT_ERR_EXISTS);
    assert_int_equal(bt_tier_admit(tier, &k, 9), BT_ERR_EXISTS);
    node_key(1, 1, &k);
    assert_int_equal(bt_tier_admit(tier, &k, 1), BT_ERR_EXISTS);
    write_errno = EIO;
    assert_int_equal(bt_tier_save(tier, compute(1, 2)), BT_OK);
    NODE_UNTIL(&node, !ssd().up);
    assert_int_equal(bt_tier_admit(tier, &k, 1), BT_ERR_UNAVAILABLE);
    assert_int_equal(bt_tier_save(tier, find(1, 2)), BT_ERR_UNAVAILABLE);
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_not_equal(find(1, 2), UINT32_MAX); /* the block of the slab is as it was */
}

static void evict_writes_what_goes(void **state)
{
    (void)state;
    start(BT_TIER_EVICT);
    node.cache->low = 0;
    uint32_t total = node_counts(&node).total;
    for (uint32_t b = 0; b < total; b++) {
        compute(1, b);
    }
    struct bt_kv_key k;
    uint32_t slot;
    node_key(1, 0, &k);
    assert_int_equal(bt_cache_prefix(node.cache, &k, 1, &slot), 1); /* a use writes nothing */
    bt_cache_put(node.cache, &slot, 1);
    assert_int_equal(ssd().backlog, 0);
    pthread_mutex_lock(&writes);
    node.cache->low = 2;
    bt_cache_trim(node.cache, 1024);
    assert_int_equal(node_counts(&node).free, 0); /* they go when they are written */
    assert_int_equal(ssd().backlog, 2);
    node.cache->low = SAVES + 2; /* more than can be written at once: the others just go */
    bt_cache_trim(node.cache, 1024);
    assert_int_equal(ssd().backlog, SAVES);
    pthread_mutex_unlock(&writes);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    NODE_UNTIL(&node, written(1, total) == SAVES);
    assert_true(node_counts(&node).free >= SAVES + 2);
    uint32_t there = 0;
    for (uint32_t b = 0; b < total; b++) {
        there += on_ssd(1, b);
        assert_false(on_ssd(1, b) && find(1, b) != UINT32_MAX);
    }
    assert_int_equal(there, SAVES);
}

static void without_a_folder(void **state)
{
    char err[512] = "";
    struct bt_tier *t = NULL;
    (void)state;
    start(BT_TIER_ALWAYS);
    struct bt_tier_config tc = {
        .loop = node.loop, .cache = node.cache, .slab = node.slab, .block_tokens = NODE_BT};
    struct bt_ssd_config sc = {.path = "/nonexistent/baton", .bytes = 16u << 20, .queue_depth = 8};
    assert_int_not_equal(bt_tier_create(&tc, &sc, &t, err, sizeof(err)), BT_OK);
    assert_non_null(strstr(err, "/nonexistent/baton"));
    assert_null(t);
    bt_tier_destroy(NULL);
}

static uint32_t n_done;
static bt_status_t last_done;

static void on_done(void *arg, bt_status_t st)
{
    assert_ptr_equal(arg, &n_done);
    n_done++;
    last_done = st;
}

static void passing_blocks_have_their_turn(void **state)
{
    uint32_t slots[SAVES + 3];
    struct bt_tier_save *v[SAVES + 3];
    (void)state;
    start(BT_TIER_ALWAYS);
    n_done = 0;
    pthread_mutex_lock(&writes);
    for (uint32_t b = 0; b < SAVES + 3; b++) {
        slots[b] = seal(1, b, true);
        v[b] = bt_tier_pass(tier, slots[b], on_done, &n_done);
        assert_non_null(v[b]);
    }
    assert_int_equal(ssd().backlog, SAVES);
    compute(2, 0);                     /* behind those */
    bt_tier_pass_forget(v[0]);         /* is being written */
    bt_tier_pass_forget(v[SAVES + 1]); /* waits */
    bt_cache_put(node.cache, &slots[SAVES + 1], 1);
    assert_int_equal(find(1, SAVES + 1), UINT32_MAX);
    pthread_mutex_unlock(&writes);
    NODE_UNTIL(&node, n_done == SAVES + 1);
    assert_int_equal(last_done, BT_OK);
    NODE_UNTIL(&node, on_ssd(2, 0) && written(1, SAVES + 3) == SAVES + 2);
    for (uint32_t b = 0; b < SAVES + 3; b++) {
        assert_int_equal(on_ssd(1, b), b != SAVES + 1);
        if (b != SAVES + 1) {
            bt_cache_put(node.cache, &slots[b], 1);
        }
    }
    assert_int_equal(n_done, SAVES + 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0); /* block 2.0's own */
    /* A disk that fails says so, and then takes nothing. */
    write_errno = EIO;
    slots[0] = seal(3, 0, true);
    assert_non_null(bt_tier_pass(tier, slots[0], on_done, &n_done));
    NODE_UNTIL(&node, n_done == SAVES + 2);
    assert_int_not_equal(last_done, BT_OK);
    assert_null(bt_tier_pass(tier, slots[0], on_done, &n_done));
    bt_cache_put(node.cache, &slots[0], 1);
}

/* ---- reading ---- */

static void on_read(void *arg)
{
    ++*(uint32_t *)arg;
}

static struct bt_tier_read *read_chain(uint32_t chain, uint32_t n, bool passing, uint32_t *done)
{
    struct bt_kv_key keys[SLOTS];
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &keys[b]);
    }
    *done = 0;
    return bt_tier_read(tier, keys, n, passing, on_read, done);
}

static void blocks_come_back(void **state)
{
    uint32_t a, b;
    (void)state;
    start(BT_TIER_ALWAYS);
    assert_null(read_chain(1, 4, false, &a)); /* nowhere */
    below(1, 4);
    compute(1, 1); /* one of them is in the slab */
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    pthread_mutex_lock(&reads);
    struct bt_tier_read *x = read_chain(1, 6, false, &a); /* two more than there are */
    assert_non_null(x);
    assert_int_equal(ssd().reading, 3);
    assert_int_equal(node_counts(&node).leases, 1 + 3);
    struct bt_tier_read *y = read_chain(1, 2, true, &b); /* shares the reads */
    assert_non_null(y);
    assert_int_equal(ssd().reading, 3);
    pthread_mutex_unlock(&reads);
    NODE_UNTIL(&node, a == 1 && b == 1);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t slot = find(1, i);
        assert_int_not_equal(slot, UINT32_MAX);
        assert_int_equal(bt_pool_leases(node.cache->pool, slot), i < 2 ? 2 : 1);
        assert_int_equal(*(uint8_t *)bt_slab_data(node.slab, slot), 16 + i);
        assert_int_equal(bt_pool_depth(node.cache->pool, slot), i);
    }
    bt_tier_read_end(x);
    bt_tier_read_end(y);
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_not_equal(find(1, 0), UINT32_MAX); /* one of the readers did not only pass */
    assert_null(read_chain(1, 4, false, &a));     /* all of it is here */
    clock_skip(node.loop, 2000);
    assert_true(a == 0 && b == 1);
}

static void passing_reads_leave(void **state)
{
    uint32_t a;
    (void)state;
    start(BT_TIER_ALWAYS);
    below(1, 2);
    struct bt_tier_read *x = read_chain(1, 2, true, &a);
    NODE_UNTIL(&node, a == 1);
    assert_int_not_equal(find(1, 1), UINT32_MAX);
    bt_tier_read_end(x);
    assert_int_equal(find(1, 0), UINT32_MAX);
    assert_int_equal(find(1, 1), UINT32_MAX);
    assert_true(on_ssd(1, 0));
}

static void a_read_is_not_waited_for_long(void **state)
{
    uint32_t a, b;
    (void)state;
    start(BT_TIER_ALWAYS);
    below(1, 3);
    pthread_mutex_lock(&reads);
    struct bt_tier_read *x = read_chain(1, 3, false, &a), *y = read_chain(1, 3, false, &b);
    clock_skip(node.loop, 699);
    assert_int_equal(a, 0);
    bt_tier_read_end(y); /* given up: nobody calls it */
    clock_skip(node.loop, 1);
    assert_int_equal(a, 1);
    pthread_mutex_unlock(&reads);
    NODE_UNTIL(&node, ssd().reading == 0 && find(1, 2) != UINT32_MAX);
    assert_true(a == 1 && b == 0);
    assert_int_equal(node_counts(&node).leases, 0); /* they came too late for it */
    bt_tier_read_end(x);
    assert_int_equal(node_counts(&node).leases, 0);
}

static void a_read_that_fails(void **state)
{
    uint32_t a;
    (void)state;
    start(BT_TIER_ALWAYS);
    below(1, 3);
    read_errno = EIO;
    struct bt_tier_read *x = read_chain(1, 3, false, &a);
    assert_non_null(x);
    NODE_UNTIL(&node, a == 1);
    bt_tier_read_end(x);
    assert_int_equal(find(1, 0), UINT32_MAX);
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_equal(node_counts(&node).writing, 0);
}

static void no_slot_to_read_into(void **state)
{
    uint32_t slots[64], a, n;
    (void)state;
    start(BT_TIER_ALWAYS);
    below(1, 3);
    n = node_counts(&node).total;
    assert_int_equal(cache_take(node.cache, n, slots), BT_OK);
    assert_null(read_chain(1, 3, false, &a));
    assert_int_equal(node_counts(&node).leases, n);
    bt_cache_put(node.cache, slots + 1, 1); /* for the first one */
    struct bt_tier_read *x = read_chain(1, 3, false, &a);
    assert_non_null(x);
    NODE_UNTIL(&node, a == 1);
    assert_int_not_equal(find(1, 0), UINT32_MAX);
    assert_int_equal(find(1, 1), UINT32_MAX);
    bt_tier_read_end(x);
    bt_cache_put(node.cache, slots, 1);
    bt_cache_put(node.cache, slots + 2, n - 2);
}

/* ---- who is told ---- */

static struct {
    uint32_t added, gone, depth;
} first, second;

static void on_change(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                      uint32_t depth)
{
    struct bt_kv_key k;
    (void)pos;
    node_key(1, depth, &k);
    assert_memory_equal(key, &k, sizeof(k));
    if (arg == &first) {
        *(added ? &first.added : &first.gone) += 1;
        first.depth = depth;
    } else {
        *(added ? &second.added : &second.gone) += 1;
    }
}

static void observers(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS);
    memset(&first, 0, sizeof(first));
    memset(&second, 0, sizeof(second));
    bt_tier_observe(tier, on_change, &first);
    compute(1, 0);
    NODE_UNTIL(&node, first.added == 1);
    bt_tier_observe(tier, on_change, &second);
    bt_tier_observe(tier, on_change, &second); /* said twice: told once */
    compute(1, 1);
    NODE_UNTIL(&node, first.added == 2);
    assert_int_equal(first.depth, 1);
    assert_int_equal(second.added, 1);
    bt_tier_observe(tier, NULL, &first);
    compute(1, 2);
    NODE_UNTIL(&node, second.added == 2);
    assert_int_equal(first.added, 2);
    bt_tier_observe(tier, on_change, &first); /* there is room for two */
    compute(1, 3);
    NODE_UNTIL(&node, second.added == 3);
    assert_int_equal(first.added, 3);
    assert_int_equal(first.gone + second.gone, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(few_are_written_at_once, teardown),
        cmocka_unit_test_teardown(a_save_that_is_asked_for, teardown),
        cmocka_unit_test_teardown(what_the_policy_admits, teardown),
        cmocka_unit_test_teardown(evict_writes_what_goes, teardown),
        cmocka_unit_test_teardown(without_a_folder, teardown),
        cmocka_unit_test_teardown(passing_blocks_have_their_turn, teardown),
        cmocka_unit_test_teardown(blocks_come_back, teardown),
        cmocka_unit_test_teardown(passing_reads_leave, teardown),
        cmocka_unit_test_teardown(a_read_is_not_waited_for_long, teardown),
        cmocka_unit_test_teardown(a_read_that_fails, teardown),
        cmocka_unit_test_teardown(no_slot_to_read_into, teardown),
        cmocka_unit_test_teardown(observers, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
