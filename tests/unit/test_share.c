/* Rate limits and fairness between tenants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/sched/share.h"

static void test_bucket(void **state)
{
    (void)state;
    struct bt_sched_bucket b;
    double wait = -1;
    bt_sched_bucket_init(&b, 2, 4, 1000);
    for (int i = 0; i < 4; i++) {
        assert_true(bt_sched_bucket_take(&b, 1000, 1, &wait));
    }
    assert_false(bt_sched_bucket_take(&b, 1000, 1, &wait));
    assert_float_equal(wait, 500, 1e-6);
    assert_false(bt_sched_bucket_take(&b, 1400, 1, &wait));
    assert_float_equal(wait, 100, 1e-6);
    assert_true(bt_sched_bucket_take(&b, 1501, 1, &wait));
    assert_false(bt_sched_bucket_take(&b, 1501, 1, &wait));
    /* never more than the burst is saved up */
    int n = 0;
    while (bt_sched_bucket_take(&b, 1e6, 1, &wait)) {
        n++;
    }
    assert_int_equal(n, 4);
    /* more than the bucket holds: when it is full, and then it is in debt */
    assert_false(bt_sched_bucket_take(&b, 1e6, 10, &wait));
    assert_float_equal(wait, 2000, 1e-6);
    assert_true(bt_sched_bucket_take(&b, 1e6 + 2000, 10, &wait));
    assert_false(bt_sched_bucket_take(&b, 1e6 + 2000, 1, &wait));
    assert_float_equal(wait, 3500, 1e-6);
    bt_sched_bucket_charge(&b, 1e6 + 2000, 2);
    assert_false(bt_sched_bucket_take(&b, 1e6 + 2000, 1, &wait));
    assert_float_equal(wait, 4500, 1e-6);
    bt_sched_bucket_init(&b, 0, 0, 0); /* no limit */
    for (int i = 0; i < 1000; i++) {
        assert_true(bt_sched_bucket_take(&b, 0, 1e9, &wait));
    }
}

/* Two tenants that always wait get tokens in the ratio of their weights, whatever the size of their
 * requests; one of them sends ten times as many. */
static void test_shares(void **state)
{
    (void)state;
    struct bt_sched_fair f;
    memset(&f, 0, sizeof(f));
    const uint64_t a = 11, b = 12;
    double got[2] = {0, 0};
    bt_sched_fair_wait(&f, a);
    for (int i = 0; i < 10; i++) {
        bt_sched_fair_wait(&f, b);
    }
    for (int i = 0; i < 2000; i++) {
        struct bt_sched_turn ta = {0, bt_sched_fair_counter(&f, a), 1},
                             tb = {0, bt_sched_fair_counter(&f, b), 2};
        bool first = bt_sched_turn_before(&ta, &tb);
        double tokens = first ? 100 : 900;
        got[first ? 0 : 1] += tokens;
        bt_sched_fair_serve(&f, first ? a : b, tokens, first ? 1 : 3);
    }
    assert_true(got[1] / got[0] > 2.9 && got[1] / got[0] < 3.1);
}

static void test_idle_tenants_save_no_credit(void **state)
{
    (void)state;
    struct bt_sched_fair f;
    memset(&f, 0, sizeof(f));
    const uint64_t busy = 11, idle = 12, fresh = 13;
    bt_sched_fair_wait(&f, idle);
    bt_sched_fair_leave(&f, idle);
    bt_sched_fair_wait(&f, busy);
    bt_sched_fair_serve(&f, busy, 100000, 1);
    bt_sched_fair_wait(&f, idle); /* an hour later */
    assert_float_equal(bt_sched_fair_counter(&f, idle), 100000, 1e-6);
    bt_sched_fair_serve(&f, idle, 10, 0);
    bt_sched_fair_leave(&f, idle);
    bt_sched_fair_leave(&f, busy);
    bt_sched_fair_wait(&f, fresh); /* nobody waits: as the last that did */
    assert_float_equal(bt_sched_fair_counter(&f, fresh), 100010, 1e-6);
}

static void test_turns(void **state)
{
    (void)state;
    const struct bt_sched_turn order[] = {
        {-5, 900, 9}, {0, 10, 7}, {0, 20, 1}, {0, 20, 2}, {3, 0, 0}};
    for (size_t i = 0; i < BT_ARRAY_LEN(order); i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(order); k++) {
            assert_int_equal(bt_sched_turn_before(&order[i], &order[k]), i < k);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bucket),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_idle_tenants_save_no_credit),
        cmocka_unit_test(test_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
