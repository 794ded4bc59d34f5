/* What a kvstore that died leaves in its slab, and what the next one makes of it. */
#include "kv_life.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

static void blocks_come_back(void **state)
{
    struct life k;
    struct bt_pool_counts c;
    (void)state;
    live(&k, false);
    for (uint32_t b = 0; b < 10; b++) {
        seal(&k, 1, b);
    }
    uint32_t flow = k.slab->super->n_flow_words - 1, gen = bt_pool_generation(k.cache->pool, 0);
    bt_flow_raise(&k.slab->flows[flow], 5, 77);
    vanish(&k);
    live(&k, true);
    assert_int_equal(stats(&k).headers, 10);
    assert_int_equal(index_count(k.cache->index), 0); /* not before the bytes were compared */
    assert_int_equal(bt_flow_read(&k.slab->flows[flow], 5), 0);
    NODE_UNTIL(&k, stats(&k).pending == 0);
    assert_int_equal(stats(&k).blocks, 10);
    for (uint32_t b = 0; b < 10; b++) {
        assert_true(right(&k, 1, b));
    }
    bt_pool_counts(k.cache->pool, &c);
    assert_int_equal(c.sealed, 10);
    assert_int_equal(c.leases, 0);
    assert_int_equal(c.free, c.total - 10);
    assert_true(bt_pool_generation(k.cache->pool, 0) >= gen);
    for (uint32_t b = 0; b < c.total + 5; b++) { /* all slots are in use again */
        seal(&k, 2, b);
    }
    assert_true(right(&k, 2, c.total + 4));
    die(&k);
    live(&k, true); /* a clean end leaves the same */
    NODE_UNTIL(&k, stats(&k).pending == 0);
    assert_true(stats(&k).blocks >= 20);
    die(&k);
}

static void damage_is_dropped(void **state)
{
    struct life k;
    uint32_t slots[12];
    (void)state;
    live(&k, false);
    for (uint32_t b = 0; b < 12; b++) {
        slots[b] = seal(&k, 1, b);
    }
    ((uint8_t *)bt_slab_data(k.slab, slots[1]))[100] ^= 1; /* a byte */
    k.slab->headers[slots[2]].key.b[5] ^= 1;               /* a header */
    k.slab->headers[slots[3]].depth++;                     /* another field */
    k.slab->crcs[slots[4] * layout.n_layers] ^= 1;         /* a CRC */
    k.slab->headers[slots[5]].layout_id ^= 1;              /* of another model */
    memcpy(bt_slab_data(k.slab, slots[6]), bt_slab_data(k.slab, slots[7]), layout.block_bytes);
    vanish(&k);
    live(&k, true);
    assert_int_equal(stats(&k).headers, 8);
    NODE_UNTIL(&k, stats(&k).pending == 0);
    assert_int_equal(stats(&k).bad, 2);
    assert_int_equal(stats(&k).blocks, 6);
    for (uint32_t b = 0; b < 12; b++) {
        assert_int_equal(right(&k, 1, b), b == 0 || b >= 7);
    }
    struct bt_pool_counts c;
    bt_pool_counts(k.cache->pool, &c);
    assert_int_equal(c.free, c.total - 6);
    die(&k);
}

static void writing_slots_wait(void **state)
{
    struct life k;
    struct bt_pool_counts c;
    (void)state;
    live(&k, false);
    seal(&k, 1, 0);
    take(&k);
    take(&k);
    vanish(&k);
    live(&k, true);
    bt_pool_counts(k.cache->pool, &c);
    assert_int_equal(c.quarantine, 2);
    uint64_t t = bt_mono_ns();
    NODE_UNTIL(&k, stats(&k).quarantine == 0);
    assert_true(bt_mono_ns() - t > 800000000ull);
    bt_pool_counts(k.cache->pool, &c);
    assert_int_equal(c.quarantine, 0);
    assert_int_equal(c.free, c.total - 1);
    die(&k);
}

/* A worker that maps the slab and goes, or does not. */
static pid_t worker(const struct life *k)
{
    int ready[2];
    char b;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct bt_slab *m = NULL;
        bt_slab_unmap(k->slab); /* that is the kvstore's */
        int fd = open(life_path, O_RDWR | O_CLOEXEC);
        if (bt_slab_map(fd, &layout, &root, &m, life_err, sizeof(life_err)) == BT_OK) {
            close(fd);
            (void)!write(ready[1], "x", 1);
            pause();
        }
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &b, 1), 1);
    close(ready[0]);
    return pid;
}

/* The next kvstore's try to take over what lies at life_path; life_err says why not. */
static bt_status_t adopt(uint64_t bytes, const struct bt_kv_layout *l, const struct bt_kv_key *key,
                         uint32_t wait_ms, struct bt_slab **s_p)
{
    struct bt_slab_spec spec = {
        .path = life_path, .bytes = bytes, .layout = l, .root = key, .incarnation = 2};
    return bt_slab_adopt(&spec, wait_ms, s_p, life_err, sizeof(life_err));
}

static void not_under_a_live_worker(void **state)
{
    struct life k;
    struct bt_slab *s = NULL;
    (void)state;
    live(&k, false);
    seal(&k, 1, 0);
    pid_t pid = worker(&k);
    vanish(&k);
    assert_int_equal(adopt(BYTES, &layout, &root, 50, &s), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(life_err, "worker"));
    kill(pid, SIGSTOP); /* hung is not gone */
    assert_int_equal(adopt(BYTES, &layout, &root, 50, &s), BT_ERR_NOT_FOUND);
    kill(pid, SIGKILL);
    live(&k, true); /* it waits for the last one to go */
    waitpid(pid, NULL, 0);
    NODE_UNTIL(&k, stats(&k).pending == 0);
    assert_true(right(&k, 1, 0));
    die(&k);
}

static void only_what_fits(void **state)
{
    struct life k;
    struct bt_slab *s = NULL;
    struct bt_kv_layout other;
    struct bt_kv_key key = root;
    (void)state;
    assert_int_equal(adopt(BYTES, &layout, &root, 0, &s), BT_ERR_NOT_FOUND);
    live(&k, false);
    assert_int_equal(adopt(BYTES, &layout, &root, 0, &s), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(life_err, "running"));
    die(&k);
    assert_int_equal(adopt(2 * BYTES, &layout, &root, 0, &s), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(life_err, "size"));
    assert_int_equal(bt_kv_layout_gqa(NODE_BT, 4, 1, 32, BT_DT_BF16, 0, &other), BT_OK);
    assert_int_equal(adopt(BYTES, &other, &root, 0, &s), BT_ERR_NOT_FOUND);
    key.b[0] ^= 1;
    assert_int_equal(adopt(BYTES, &layout, &key, 0, &s), BT_ERR_NOT_FOUND);
    struct stat st;
    assert_int_equal(stat(life_path, &st), 0);
    assert_int_equal(truncate(life_path, st.st_size / 2), 0);
    assert_int_equal(adopt(BYTES, &layout, &root, 0, &s), BT_ERR_NOT_FOUND);
    assert_int_equal(truncate(life_path, 0), 0);
    assert_int_equal(truncate(life_path, st.st_size), 0); /* as long as it should be, but hollow */
    assert_int_equal(adopt(BYTES, &layout, &root, 0, &s), BT_ERR_NOT_FOUND);
    assert_null(s);
}

/* A kvstore that dies right after it wrote its incarnation into the slab it takes over. */
static void killed_while_taking_over(void **state)
{
    struct life k;
    uint64_t inc = 77;
    (void)state;
    live(&k, false);
    seal(&k, 1, 0);
    vanish(&k);
    int fd = open(life_path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, &inc, sizeof(inc), offsetof(struct bt_slab_super, incarnation)),
                     sizeof(inc));
    close(fd);
    live(&k, true);
    NODE_UNTIL(&k, stats(&k).pending == 0);
    assert_true(right(&k, 1, 0));
    die(&k);
}

/* A request finds the first n blocks of a chain and lets go of them. */
static void find(const struct life *k, uint32_t chain, uint32_t n)
{
    struct bt_kv_key keys[16];
    uint32_t slots[16];
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &keys[b]);
    }
    assert_int_equal(bt_cache_prefix(k->cache, keys, n, slots), n);
    bt_cache_put(k->cache, slots, n);
}

/* What was used last stays longest after a restart as well, under every policy: not what was sealed
 * last, and it is no sign against young blocks that thousands came back at once and were not used
 * at once. More blocks than the density policy waits for before it learns. */
static void the_longest_unused_goes_first(void **state)
{
    static const char *const policies[] = {"density", "slru", "lru", "lfu", "length_aware"};
    (void)state;
    life_bytes = 5u * 4096 + 720ull * 4300;
    for (size_t p = 0; p < BT_ARRAY_LEN(policies); p++) {
        struct life k;
        struct bt_pool_counts c;
        life_policy = bt_evict_by_name(policies[p]);
        live(&k, false);
        bt_pool_counts(k.cache->pool, &c);
        const uint32_t n = c.total - 10, gone = 100;
        assert_true(n > 600);
        for (uint32_t b = 0; b < 10; b++) { /* the oldest */
            seal(&k, 1, b);
        }
        for (uint32_t i = 0; i < n; i++) {
            seal(&k, 100 + i, 0);
        }
        find(&k, 1, 10);
        vanish(&k);
        live(&k, true); /* killed once more, in the middle of taking over */
        NODE_UNTIL(&k, stats(&k).pending < c.total / 2);
        vanish(&k);
        live(&k, true);
        NODE_UNTIL(&k, stats(&k).pending == 0);
        assert_int_equal(stats(&k).blocks, c.total);
        for (uint32_t i = 0; i < gone; i++) {
            take(&k);
        }
        for (uint32_t b = 0; b < 10; b++) {
            assert_true(right(&k, 1, b));
        }
        uint32_t left = 0;
        for (uint32_t i = 0; i < n; i++) {
            bool is = right(&k, 100 + i, 0);
            left += is;
            assert_true(is || i < 2 * gone); /* density: ages are ranges */
        }
        assert_int_equal(left, n - gone);
        die(&k);
        teardown(NULL);
    }
    life_bytes = BYTES;
    life_policy = &bt_evict_slru;
}

struct ledger {
    _Atomic uint64_t sealed; /* blocks below are sealed */
};

/* Seals block after block of one endless chain until it is killed. */
static void child(struct ledger *led, bool adopted)
{
    struct life k;
    live(&k, adopted);
    while (adopted && stats(&k).pending > 0) {
        bt_loop_poll(k.loop, 1);
    }
    for (uint64_t b = led->sealed;; b++) {
        seal(&k, 9, (uint32_t)b);
        led->sealed = b + 1;
        bt_loop_poll(k.loop, 0);
    }
}

static void kill_at_any_moment(void **state)
{
    struct ledger *led =
        mmap(NULL, sizeof(*led), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    (void)state;
    for (uint32_t round = 0; round < 60; round++) {
        uint64_t from = led->sealed, want = from + round * 7 % 90;
        pid_t pid = fork();
        if (pid == 0) {
            close(2);
            child(led, round > 0);
        }
        for (int ms = 0; led->sealed < want && ms < 10000; ms++) {
            usleep(1000);
        }
        usleep(round * 37 % 500);
        kill(pid, SIGKILL);
        int st;
        assert_int_equal(waitpid(pid, &st, 0), pid);
        assert_true(WIFSIGNALED(st) && WTERMSIG(st) == SIGKILL);
        if (led->sealed == 0) {
            unlink(life_path);
            round = UINT32_MAX; /* it had no time to make a slab: begin anew */
            continue;
        }
        struct life k;
        live(&k, true);
        NODE_UNTIL(&k, stats(&k).pending == 0);
        assert_int_equal(stats(&k).bad, 0);
        uint64_t sealed = led->sealed;
        for (uint64_t b = sealed > 60 ? sealed - 60 : 0; b < sealed; b++) {
            bool is = right(&k, 9, (uint32_t)b); /* checks the bytes */
            assert_true(is || b + 30 < sealed);  /* 40 slots, some of them in quarantine */
        }
        die(&k);
    }
    assert_true(led->sealed > 1000);
    munmap(led, sizeof(*led));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(blocks_come_back, setup, teardown),
        cmocka_unit_test_setup_teardown(damage_is_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(writing_slots_wait, setup, teardown),
        cmocka_unit_test_setup_teardown(not_under_a_live_worker, setup, teardown),
        cmocka_unit_test_setup_teardown(only_what_fits, setup, teardown),
        cmocka_unit_test_setup_teardown(killed_while_taking_over, setup, teardown),
        cmocka_unit_test_setup_teardown(the_longest_unused_goes_first, setup, teardown),
        cmocka_unit_test_setup_teardown(kill_at_any_moment, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
