/* What a conductor learns of a worker from its requests, and the definition of TBT. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "conductor/sched/learn.h"

static uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

static int longer_first(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void test_tbt_is_the_mean_of_the_longest_tenth(void **state)
{
    (void)state;
    assert_true(bt_sched_tbt_of(NULL, 0) == -1);
    float one[] = {7}, eleven[] = {1, 1, 9, 1, 1, 1, 1, 1, 5, 1, 1};
    assert_true(bt_sched_tbt_of(one, 1) == 7);
    assert_true(bt_sched_tbt_of(eleven, 11) == 7); /* two of eleven: 9 and 5 */
    uint64_t s = 1;
    for (int round = 0; round < 2000; round++) {
        uint32_t n = 1 + (uint32_t)rng(&s) % 60, values = 1 + (uint32_t)rng(&s) % 20;
        float v[64], sorted[64];
        for (uint32_t i = 0; i < n; i++) {
            sorted[i] = v[i] = (float)(rng(&s) % values);
        }
        qsort(sorted, n, sizeof(sorted[0]), longer_first);
        double sum = 0;
        uint32_t k = (n + 9) / 10;
        for (uint32_t i = 0; i < k; i++) {
            sum += sorted[i];
        }
        assert_true(fabs(bt_sched_tbt_of(v, n) - sum / k) < 1e-9);
    }
}

static void test_overhead_follows_the_median(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 1;
    for (int i = 0; i < 400; i++) {
        double extra = 8 + (double)(rng(&s) % 400) / 100; /* 8 to 12 ms */
        double held = i % 10 == 3 ? 500 : 0;              /* one in ten is held up */
        bt_sched_learn_ttft(&l, 100, 100 + extra + held);
    }
    assert_true(l.overhead_ms > 8 && l.overhead_ms < 13);
    for (int i = 0; i < 200; i++) {
        bt_sched_learn_ttft(&l, 100, 90); /* faster than predicted: nothing is below no overhead */
    }
    assert_true(l.overhead_ms >= 0 && l.overhead_ms < 1);
}

static void test_tail_follows_the_ratio(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    bt_sched_learn_tbt(&l, 0, 5);
    bt_sched_learn_tbt(&l, 5, 0);
    assert_true(l.tail == 0 && l.n_tbt == 0);
    for (int i = 0; i < 300; i++) {
        bt_sched_learn_tbt(&l, 10, i % 12 == 5 ? 300 : 14);
    }
    assert_true(fabs(l.tail - 1.4) < 0.15);
    for (int i = 0; i < 100; i++) {
        bt_sched_learn_tbt(&l, 10, 25);
    }
    assert_true(fabs(l.tail - 2.5) < 0.1);
}

static void test_error(void **state)
{
    (void)state;
    assert_true(bt_sched_error(90, 100) == 0.1);
    assert_true(bt_sched_error(110, 100) == 0.1);
    assert_true(bt_sched_error(5, 0) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tbt_is_the_mean_of_the_longest_tenth),
        cmocka_unit_test(test_overhead_follows_the_median),
        cmocka_unit_test(test_tail_follows_the_ratio),
        cmocka_unit_test(test_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
