/* The block index: which kvstore has how much of a chain; its bound; forgetting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/view/holders.h"
#include "tests/tools/heap.h"

static struct bt_kv_key key(uint32_t i)
{
    struct bt_kv_key k;
    memset(&k, 0, sizeof(k));
    memcpy(k.b, &i, sizeof(i));
    k.b[31] = 1;
    return k;
}

static void fill_keys(struct bt_kv_key *keys, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key(i);
    }
}

static void test_match(void **state)
{
    (void)state;
    struct bt_holders *x = bt_holders_create(100);
    struct bt_kv_key keys[8];
    fill_keys(keys, 8);
    uint32_t m[BT_HOLDERS_KVSTORES_MAX];
    bt_holders_match(x, keys, 8, 1, m, 4);
    assert_int_equal(m[0] + m[1] + m[2] + m[3], 0);
    for (uint32_t i = 0; i < 5; i++) {
        assert_true(bt_holders_add(x, &keys[i], i, 0));
    }
    assert_true(bt_holders_add(x, &keys[0], 0, 2));
    assert_true(bt_holders_add(x, &keys[2], 2, 2)); /* behind a hole: of no use */
    assert_true(bt_holders_add(x, &keys[1], 1, 3)); /* without the first: of no use */
    assert_true(bt_holders_add(x, &keys[0], 0, 255));
    assert_true(bt_holders_add(x, &keys[1], 1, 255));
    bt_holders_match(x, keys, 8, 1, m, BT_HOLDERS_KVSTORES_MAX);
    assert_int_equal(m[0], 5);
    assert_int_equal(m[1], 0);
    assert_int_equal(m[2], 1);
    assert_int_equal(m[3], 0);
    assert_int_equal(m[255], 2);
    bt_holders_match(x, keys, 3, 1, m, 4); /* a shorter prompt */
    assert_int_equal(m[0], 3);
    bt_holders_match(x, keys, 0, 1, m, 4);
    assert_int_equal(m[0], 0);
    uint32_t ids[2];
    assert_int_equal(bt_holders_of(x, &keys[0], ids, 2), 3);
    assert_true((ids[0] == 0 || ids[0] == 2 || ids[0] == 255) && ids[0] != ids[1]);
    assert_int_equal(bt_holders_of(x, &keys[2], ids, 2), 2);
    assert_int_equal(bt_holders_of(x, &keys[6], ids, 2), 0);
    assert_int_equal(bt_holders_keys(x), 5);
    assert_int_equal(bt_holders_replicas(x), 10);
    bt_holders_destroy(x);
}

static void test_remove_and_forget(void **state)
{
    (void)state;
    struct bt_holders *x = bt_holders_create(1000);
    struct bt_kv_key keys[600];
    fill_keys(keys, 600);
    uint32_t m[4];
    for (uint32_t i = 0; i < 600; i++) {
        assert_true(bt_holders_add(x, &keys[i], i, 0));
        assert_true(bt_holders_add(x, &keys[i], i, 1));
        assert_true(bt_holders_add(x, &keys[i], i, 1)); /* twice is once */
    }
    assert_int_equal(bt_holders_replicas(x), 1200);
    bt_holders_remove(x, &keys[300], 0);
    bt_holders_remove(x, &keys[300], 0);
    bt_holders_remove(x, &keys[300], 3); /* never had it */
    assert_int_equal(bt_holders_replicas(x), 1199);
    bt_holders_match(x, keys, 600, 1, m, 4);
    assert_int_equal(m[0], 300);
    assert_int_equal(m[1], 600);
    bt_holders_forget(x, 1);
    bt_holders_match(x, keys, 600, 1, m, 4);
    assert_int_equal(m[0], 300);
    assert_int_equal(m[1], 0);
    assert_int_equal(bt_holders_keys(x), 599);
    bt_holders_forget(x, 0);
    assert_int_equal(bt_holders_keys(x), 0);
    assert_int_equal(bt_holders_replicas(x), 0);
    bt_holders_forget(x, 0);
    bt_holders_destroy(x);
}

static void test_bound(void **state)
{
    (void)state;
    struct bt_holders *x = bt_holders_create(10);
    struct bt_kv_key keys[12];
    fill_keys(keys, 12);
    for (uint32_t i = 0; i < 12; i++) {
        assert_int_equal(bt_holders_add(x, &keys[i], i, 0), i < 10);
    }
    assert_true(bt_holders_add(x, &keys[3], 3, 1)); /* a known block still gains holders */
    bt_holders_remove(x, &keys[9], 0);
    assert_false(bt_holders_add(x, &keys[10], 10, 0)); /* there is room for one that has less, */
    assert_true(bt_holders_add(x, &keys[10], 10, 1));  /* and it is used again */
    bt_holders_destroy(x);
}

static void test_iterate(void **state)
{
    (void)state;
    struct bt_holders *x = bt_holders_create(100);
    struct bt_kv_key keys[20];
    fill_keys(keys, 20);
    for (uint32_t i = 0; i < 20; i++) {
        assert_true(bt_holders_add(x, &keys[i], i, i % 3 * 100));
    }
    assert_true(bt_holders_add(x, &keys[7], 7, 9));
    size_t it = 0;
    uint8_t k[8];
    uint32_t depth, n, ids[4], seen = 0;
    while (bt_holders_next(x, &it, SIZE_MAX, k, &depth, ids, 4, &n)) {
        assert_memory_equal(k, &keys[depth], sizeof(k));
        assert_int_equal(n, depth == 7 ? 2 : 1);
        assert_int_equal(ids[0], depth % 3 * 100);
        seen |= 1u << depth;
    }
    assert_int_equal(seen, (1u << 20) - 1);
    bt_holders_destroy(x);
}

/* A table of bits says what is true; the index is driven at random beside it, kvstores are
 * forgotten in the middle, and many hold the same. */
#define KEYS 400
#define IDS  40
static void test_random(void **state)
{
    (void)state;
    static bool truth[KEYS][IDS];
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t s = seed;
        struct bt_holders *x = bt_holders_create(2 * KEYS);
        struct bt_kv_key keys[KEYS];
        fill_keys(keys, KEYS);
        memset(truth, 0, sizeof(truth));
        uint64_t replicas = 0;
        for (int round = 0; round < 6000; round++) {
            s = s * 6364136223846793005ull + 1442695040888963407ull;
            uint32_t k = (uint32_t)(s >> 33) % KEYS, id = (uint32_t)(s >> 45) % IDS;
            k = s >> 60 < 6 ? k % 24 : k; /* some are held by many */
            uint32_t what = (uint32_t)(s >> 20) % 100;
            if (what < 60) {
                assert_true(bt_holders_add(x, &keys[k], k, id));
                replicas += !truth[k][id];
                truth[k][id] = true;
            } else if (what < 98) {
                bt_holders_remove(x, &keys[k], id);
                replicas -= truth[k][id];
                truth[k][id] = false;
            } else {
                bt_holders_forget(x, id);
                for (uint32_t i = 0; i < KEYS; i++) {
                    replicas -= truth[i][id];
                    truth[i][id] = false;
                }
            }
            assert_int_equal(bt_holders_replicas(x), replicas);
            if (round % 50 != 0) {
                continue;
            }
            uint32_t m[IDS], from = k % 8, stride = 1 + k % 5, n = (KEYS - from) / stride;
            bt_holders_match(x, keys + from, n, stride, m, IDS);
            for (uint32_t i = 0; i < IDS; i++) {
                uint32_t want = 0;
                while (want < n && truth[from + want * stride][i]) {
                    want++;
                }
                assert_int_equal(m[i], want);
            }
        }
        bt_holders_destroy(x);
    }
}

/* More is forgotten than one call sweeps: it is not matched any more, its places come back, and a
 * kvstore of the same id that begins anew does not inherit it. */
static void test_forget_much(void **state)
{
    (void)state;
    uint32_t n = 1u << 19, m[2];
    size_t before = heap_bytes();
    struct bt_holders *x = bt_holders_create(n);
    struct bt_kv_key k;
    for (uint32_t i = 0; i < n; i++) {
        k = key(i);
        assert_true(bt_holders_add(x, &k, i, i % 2));
    }
    bt_holders_forget(x, 0);
    assert_int_equal(bt_holders_replicas(x), n / 2);
    assert_true(bt_holders_keys(x) > n / 2); /* still being swept */
    k = key(0);
    bt_holders_match(x, &k, 1, 1, m, 2);
    assert_int_equal(m[0], 0);
    k = key(2);
    assert_true(bt_holders_add(x, &k, 2, 0));
    k = key(4);
    bt_holders_match(x, &k, 1, 1, m, 2);
    assert_int_equal(m[0], 0);
    bt_holders_forget(x, 1); /* while the first sweep goes on */
    while (bt_holders_keys(x) > 1) {
        bt_holders_sweep(x, 1000);
    }
    k = key(2);
    bt_holders_match(x, &k, 1, 1, m, 2);
    assert_int_equal(m[0], 1);
    assert_int_equal(m[1], 0);
    assert_int_equal(bt_holders_replicas(x), 1);
    size_t bytes = heap_bytes() - before;
    assert_in_range(bytes, n, (size_t)n * 33 + (1 << 20));
    bt_holders_destroy(x);
}

/* One kvstore that announces more than there is, true or not, leaves the others a place each. */
static void test_one_cannot_fill_it(void **state)
{
    (void)state;
    struct bt_holders *x = bt_holders_create(400);
    struct bt_kv_key k = key(0);
    uint32_t alone = 0, second = 0, third = 0;
    assert_true(bt_holders_add(x, &k, 0, 1)); /* two that have little */
    assert_true(bt_holders_add(x, &k, 0, 2));
    for (uint32_t i = 1000; i < 3000; i++) {
        k = key(i);
        alone += bt_holders_add(x, &k, i, 0);
    }
    assert_int_equal(alone, 299); /* three quarters, with the one of the others */
    for (uint32_t i = 5000; i < 5050; i++) {
        k = key(i);
        second += bt_holders_add(x, &k, i, 1);
        k = key(i + 50);
        third += bt_holders_add(x, &k, i, 2);
    }
    assert_int_equal(second + third, 100);
    assert_int_equal(bt_holders_keys(x), 400);
    bt_holders_forget(x, 1); /* one that is alone may have all of it */
    bt_holders_forget(x, 2);
    bt_holders_sweep(x, 10000);
    alone = 0;
    for (uint32_t i = 8000; i < 8400; i++) {
        k = key(i);
        alone += bt_holders_add(x, &k, i, 0);
    }
    assert_int_equal(alone, 101);
    bt_holders_destroy(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_match),
        cmocka_unit_test(test_remove_and_forget),
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_iterate),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_forget_much),
        cmocka_unit_test(test_one_cannot_fill_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
