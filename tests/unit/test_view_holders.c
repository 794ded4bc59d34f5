/* The block index: which kvstore has how much of a chain; its bound; forgetting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/view/holders.h"

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
    bt_holders_match(x, keys, 8, m, 4);
    assert_int_equal(m[0] + m[1] + m[2] + m[3], 0);
    for (uint32_t i = 0; i < 5; i++) {
        assert_true(bt_holders_add(x, &keys[i], i, 0));
    }
    assert_true(bt_holders_add(x, &keys[0], 0, 2));
    assert_true(bt_holders_add(x, &keys[2], 2, 2)); /* behind a hole: of no use */
    assert_true(bt_holders_add(x, &keys[1], 1, 3)); /* without the first: of no use */
    assert_true(bt_holders_add(x, &keys[0], 0, 255));
    assert_true(bt_holders_add(x, &keys[1], 1, 255));
    bt_holders_match(x, keys, 8, m, BT_HOLDERS_KVSTORES_MAX);
    assert_int_equal(m[0], 5);
    assert_int_equal(m[1], 0);
    assert_int_equal(m[2], 1);
    assert_int_equal(m[3], 0);
    assert_int_equal(m[255], 2);
    bt_holders_match(x, keys, 3, m, 4); /* a shorter prompt */
    assert_int_equal(m[0], 3);
    bt_holders_match(x, keys, 0, m, 4);
    assert_int_equal(m[0], 0);
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
    bt_holders_match(x, keys, 600, m, 4);
    assert_int_equal(m[0], 300);
    assert_int_equal(m[1], 600);
    bt_holders_forget(x, 1);
    bt_holders_match(x, keys, 600, m, 4);
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
    assert_int_equal(bt_holders_dropped(x), 2);
    assert_true(bt_holders_add(x, &keys[3], 3, 1)); /* a known block still gains holders */
    bt_holders_remove(x, &keys[9], 0);
    assert_true(bt_holders_add(x, &keys[10], 10, 0)); /* and room is used again */
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
    size_t it = 0;
    const struct bt_kv_key *k;
    uint32_t depth, seen = 0;
    const uint64_t *holds;
    while (bt_holders_next(x, &it, &k, &depth, &holds)) {
        assert_memory_equal(k, &keys[depth], sizeof(*k));
        uint32_t id = depth % 3 * 100;
        assert_true((holds[id / 64] >> (id % 64) & 1) == 1);
        seen |= 1u << depth;
    }
    assert_int_equal(seen, (1u << 20) - 1);
    bt_holders_destroy(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_match),
        cmocka_unit_test(test_remove_and_forget),
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_iterate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
