/* Hot prefixes: counts fade, the busiest keys stay, copies follow uses. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/policy/sched/hot.h"

static void test_fades(void **state)
{
    (void)state;
    struct bt_hot h;
    bt_hot_init(&h, 60000);
    for (int i = 1; i <= 8; i++) {
        assert_true(fabs(bt_hot_use(&h, 42, 1000) - i) < 1e-9);
    }
    assert_true(fabs(bt_hot_use(&h, 42, 61000) - (8 * exp(-1) + 1)) < 1e-6);
    assert_true(bt_hot_use(&h, 42, 1e7) < 1.001);
    assert_true(fabs(bt_hot_use(&h, 43, 1e7) - 1) < 1e-9);
}

/* Twenty hot keys among tens of thousands that are used once. */
static void test_the_busy_ones_stay(void **state)
{
    (void)state;
    struct bt_hot h;
    uint64_t s = 1;
    double uses[20] = {0};
    bt_hot_init(&h, 60000);
    for (int i = 0; i < 50000; i++) {
        s = s * 6364136223846793005ull + 1442695040888963407ull;
        (void)bt_hot_use(&h, s >> 8 | 1ull << 60, i);
        int k = i % 100;
        if (k < 20) {
            uses[k] = bt_hot_use(&h, 1000003ull * (uint64_t)(k + 1), i);
        }
    }
    for (int k = 0; k < 20; k++) { /* ten a second: six hundred within a window, less what fades */
        assert_true(uses[k] > 250);
    }
}

static void test_copies(void **state)
{
    (void)state;
    assert_int_equal(bt_hot_copies(3, 16, 8), 1);
    assert_int_equal(bt_hot_copies(16, 16, 8), 2);
    assert_int_equal(bt_hot_copies(70, 16, 8), 5);
    assert_int_equal(bt_hot_copies(1e12, 16, 8), 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fades),
                                       cmocka_unit_test(test_the_busy_ones_stay),
                                       cmocka_unit_test(test_copies)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
