/* What prefills were asked for: against sums by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "conductor/sched/demand.h"

/* As often 10, 100 and 1000 ms: shares of the work 1, 10 and 100 of 111. */
static void test_shares(void **state)
{
    (void)state;
    struct bt_sched_demand d;
    bt_sched_demand_init(&d, 60000);
    assert_true(bt_sched_demand_below(&d, 500) == 0); /* nothing asked for: nothing is too long */
    for (int i = 0; i < 30; i++) {
        bt_sched_demand_note(&d, i, i % 3 == 0 ? 10 : i % 3 == 1 ? 100 : 1000);
    }
    assert_float_equal(bt_sched_demand_below(&d, 1), 0, 1e-9);
    assert_float_equal(bt_sched_demand_below(&d, 10), 0.5 / 111, 1e-9);
    assert_float_equal(bt_sched_demand_below(&d, 50), 1.0 / 111, 1e-9);
    assert_float_equal(bt_sched_demand_below(&d, 100), 6.0 / 111, 1e-9);
    assert_float_equal(bt_sched_demand_below(&d, 1000), 61.0 / 111, 1e-9);
    assert_float_equal(bt_sched_demand_below(&d, 1e9), 1, 1e-9);
    double last = 0; /* and back, to a bucket's width */
    for (double share = 0.001; share < 1; share += 0.01) {
        double ms = bt_sched_demand_at(&d, share);
        assert_true(ms >= last);
        last = ms;
    }
    assert_true(fabs(log2(bt_sched_demand_at(&d, 5.0 / 111) / 100)) < 0.26);
    assert_true(fabs(log2(bt_sched_demand_at(&d, 0.5) / 1000)) < 0.26);
    bt_sched_demand_note(&d, 30, 0); /* no prefill is too short or too long for it */
    bt_sched_demand_note(&d, 30, 1e12);
    assert_true(bt_sched_demand_below(&d, 1000) < 1e-6);
}

/* After some windows only what came since counts. */
static void test_fades(void **state)
{
    (void)state;
    struct bt_sched_demand d;
    bt_sched_demand_init(&d, 1000);
    for (int i = 0; i < 100; i++) {
        bt_sched_demand_note(&d, 0, 1000);
    }
    bt_sched_demand_note(&d, 1000, 1000);
    assert_float_equal(bt_sched_demand_below(&d, 100), 0, 1e-9);
    for (int i = 0; i < 10; i++) {
        bt_sched_demand_note(&d, 20000, 10);
    }
    assert_true(bt_sched_demand_below(&d, 100) > 0.99);
}

/* 300 ms of work every 100 ms keep three workers busy, from the first second on and as long as it
 * comes; before anything came, nobody. */
static void test_rate(void **state)
{
    (void)state;
    struct bt_sched_demand d;
    bt_sched_demand_init(&d, 60000);
    assert_true(bt_sched_demand_rate(&d, 5000) == 0);
    for (double now = 5000; now < 400000; now += 100) {
        bt_sched_demand_note(&d, now, 300);
        if (now >= 10000) {
            assert_float_equal(bt_sched_demand_rate(&d, now), 3, 0.1);
        }
    }
    for (int i = 0; i < 7; i++) { /* no more comes: seven windows on there is none */
        bt_sched_demand_note(&d, 400000 + 60000 * (i + 1), 0);
    }
    assert_true(bt_sched_demand_rate(&d, 820000) < 0.01);
    bt_sched_demand_init(&d, 60000); /* a burst is no rate: it counts as if it took a second */
    bt_sched_demand_note(&d, 7, 500);
    assert_float_equal(bt_sched_demand_rate(&d, 7), 0.5, 0.01);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_fades),
        cmocka_unit_test(test_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
