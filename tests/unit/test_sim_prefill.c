/* A simulated prefill node: its order, and who gives way to whom. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "conductor/sim/prefill.h"

static void test_gives_way(void **state)
{
    (void)state;
    struct bt_sim_prefill p = {0};
    struct bt_sim_job late = {.id = 1, .late = true, .planned_ms = 100};
    struct bt_sim_job other = {.id = 2, .late = true, .planned_ms = 40};
    struct bt_sim_job prompt = {.id = 3, .planned_ms = 20}, last = {.id = 4, .planned_ms = 5};
    assert_true(bt_sim_prefill_idle(&p));
    assert_false(bt_sim_prefill_add(&p, &late, 0));
    assert_ptr_equal(bt_sim_prefill_next(&p, 0), &late);
    bt_sim_prefill_run(&p, 0, 100, 10);
    assert_false(bt_sim_prefill_add(&p, &other, 5)); /* late ones wait for each other */
    assert_float_equal(bt_sim_prefill_queue_ms(&p, 25), 5, 1e-9); /* its step at hand */
    assert_float_equal(bt_sim_prefill_late_ms(&p, 25), 40 + 70, 1e-9);

    uint32_t version = p.version;
    assert_true(bt_sim_prefill_add(&p, &prompt, 25));
    assert_true(p.version != version); /* its end is void */
    assert_float_equal(p.free_ms, 30, 1e-9);
    assert_float_equal(bt_sim_prefill_queue_ms(&p, 25), 20 + 5, 1e-9);
    assert_float_equal(bt_sim_prefill_late_ms(&p, 25), 40 + 70, 1e-9);
    assert_null(bt_sim_prefill_next(&p, 25));
    assert_ptr_equal(bt_sim_prefill_next(&p, 30), &prompt);
    bt_sim_prefill_run(&p, 30, 20, 1);
    assert_null(bt_sim_prefill_next(&p, 40)); /* one after the other */
    assert_ptr_equal(bt_sim_prefill_end(&p), &prompt);

    assert_ptr_equal(bt_sim_prefill_next(&p, 50), &late); /* before all other late ones */
    assert_float_equal(late.rest_ms, 70, 1e-9);
    bt_sim_prefill_run(&p, 50, late.rest_ms, 7);
    assert_false(bt_sim_prefill_add(&p, &last, 115)); /* it is in its last step */
    assert_float_equal(p.run_end_ms, 120, 1e-9);
    assert_ptr_equal(bt_sim_prefill_end(&p), &late);
    assert_ptr_equal(bt_sim_prefill_next(&p, 120), &last);
}

static void note(void *arg, uint32_t id)
{
    uint32_t *ids = arg;
    *ids = *ids * 10 + id;
}

static void test_loses_all(void **state)
{
    (void)state;
    struct bt_sim_prefill p = {0};
    struct bt_sim_job jobs[] = {{.id = 1, .planned_ms = 10},
                                {.id = 2, .late = true, .planned_ms = 10},
                                {.id = 3, .planned_ms = 10},
                                {.id = 4, .planned_ms = 10}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(jobs); i++) {
        assert_false(bt_sim_prefill_add(&p, &jobs[i], 0));
    }
    assert_ptr_equal(bt_sim_prefill_next(&p, 0), &jobs[0]);
    bt_sim_prefill_run(&p, 0, 10, 1);
    uint32_t ids = 0, version = p.version;
    bt_sim_prefill_fail(&p, note, &ids);
    assert_int_equal(ids, 1342);
    assert_true(bt_sim_prefill_idle(&p) && p.version != version);
    assert_true(bt_sim_prefill_queue_ms(&p, 5) == 0 && bt_sim_prefill_late_ms(&p, 5) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gives_way),
        cmocka_unit_test(test_loses_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
