/* What follows from the objectives that an operator gives: parameters, and notes on keys that do
 * not do what they seem to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "conductor/sched_conf.h"

static struct bt_conductor_conf conf_of(const char *policy, const char *admission, uint64_t ttft_ms,
                                        uint64_t tbt_ms)
{
    return (struct bt_conductor_conf){.policy = (char *)(uintptr_t)policy,
                                      .admission = (char *)(uintptr_t)admission,
                                      .ttft_objective_ms = ttft_ms,
                                      .tbt_objective_ms = tbt_ms,
                                      .queue_timeout_ms = 7000};
}

static void test_params(void **state)
{
    (void)state;
    struct bt_sched_params p;
    struct bt_conductor_conf c = conf_of("baton", "priced", 1000, 100);
    bt_sched_conf_params(&c, &p);
    assert_true(p.objective.ttft_ms == 1000 && p.objective.tbt_ms == 100);
    assert_true(p.mixed.step_ms == 75 && p.mixed.gap_ms == 95 && p.late.wait_ms == 7000);
    assert_true(p.mixed.pack_share == 0.75 && p.objective.tbt_margin == 0.95);
    c = conf_of("baton", "priced", 1000, 0);
    bt_sched_conf_params(&c, &p);
    assert_true(p.mixed.step_ms == 0 && p.mixed.gap_ms == 0);
    c = conf_of("kvcache", "early", 1000, 100); /* has no use for them */
    bt_sched_conf_params(&c, &p);
    assert_true(p.mixed.step_ms == 0 && p.mixed.gap_ms == 0);
}

static void test_notes(void **state)
{
    (void)state;
    static const struct {
        const char *policy, *admission;
        uint64_t ttft_ms, tbt_ms;
        const char *notes[3]; /* parts of them, in order */
    } rows[] = {
        {"cache-aware", "early", 0, 0, {NULL}},
        {"baton", "priced", 0, 0, {NULL}}, /* the defaults */
        {"baton", "priced", 1000, 100, {NULL}},
        {"baton", "early", 1000, 0, {"without sched.tbt_objective_ms"}},
        {"baton", "priced", 0, 100, {"baton without sched.ttft_", "priced without sched.ttft_"}},
        {"kvcache", "none", 0, 100, {"no request is refused"}},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct bt_conductor_conf c =
            conf_of(rows[i].policy, rows[i].admission, rows[i].ttft_ms, rows[i].tbt_ms);
        char text[2048];
        uint32_t n = 0;
        bt_sched_conf_describe(&c, text, sizeof(text));
        for (; rows[i].notes[n] != NULL; n++) {
            const char *note = bt_sched_conf_note(&c, n);
            assert_non_null(note);
            assert_non_null(strstr(note, rows[i].notes[n]));
            assert_non_null(strstr(text, note));
        }
        assert_null(bt_sched_conf_note(&c, n));
        assert_non_null(strstr(text, rows[i].policy));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_notes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
