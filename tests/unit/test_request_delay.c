/* The pauses between the plans of one request whose workers fail again and again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "conductor/request/machine_priv.h"

/* A network that resets connections for three seconds may break each plan at once. Eight tries, the
 * default, have to last longer than that, and the first ones have to come at once. */
static void test_eight_tries_outlast_three_seconds(void **state)
{
    (void)state;
    for (int lost = 0; lost < 2; lost++) {
        uint32_t sum = 0, before = 0;
        for (uint32_t replans = 1; replans <= 8; replans++) {
            uint32_t ms = bt_replan_delay_ms(lost, replans);
            assert_true(ms >= before);
            assert_true(ms <= 1000);
            before = ms;
            sum += ms;
        }
        assert_true(bt_replan_delay_ms(lost, 1) <= 50);
        assert_true(sum > 3000);
    }
    assert_int_equal(bt_replan_delay_ms(true, UINT32_MAX), 1000);
    assert_int_equal(bt_replan_delay_ms(false, 0), bt_replan_delay_ms(false, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_eight_tries_outlast_three_seconds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
