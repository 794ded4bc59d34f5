/* What a conductor learns of a worker from its requests, and the definition of TBT. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/policy/sched/learn.h"

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
        double work = 2 + (double)(rng(&s) % 100);
        bt_sched_learn_ttft(&l, work, -1, work + extra + held);
    }
    assert_true(l.overhead_ms > 8 && l.overhead_ms < 13);
    assert_true(l.slow > 0.95 && l.slow < 1.1);
    for (int i = 0; i < 200; i++) {
        double work = 2 + (double)(rng(&s) % 100);
        bt_sched_learn_ttft(&l, work, -1, 0.9 * work); /* no overhead is the least */
    }
    assert_true(l.overhead_ms >= 0 && l.overhead_ms < 5);
    assert_true(fabs(bt_sched_learned_ttft(&l, 50) - 45) < 4);
}

/* A worker whose neighbours use its cores: everything takes half as long again, short and long. */
static void test_a_slow_worker(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 2;
    for (int round = 0; round < 3; round++) {
        double slow = round == 1 ? 4 : 1.5;
        for (int i = 0; i < 100; i++) {
            double work = i % 3 == 0 ? 5 : 50 + (double)(rng(&s) % 900);
            double noise = 0.9 + 0.2 * (double)(rng(&s) % 1000) / 1000;
            double held = i % 12 == 5 ? 3 : 1;
            bt_sched_learn_ttft(&l, work, -1, held * noise * (6 + slow * work));
        }
        assert_true(fabs(bt_sched_learned_ttft(&l, 500) / (6 + slow * 500) - 1) < 0.1);
        assert_true(fabs(bt_sched_learned_ttft(&l, 5) / (6 + slow * 5) - 1) < 0.3);
        assert_true(l.spread >= 1 && l.spread <= 1.6);
    }
    /* Only one kind of request: what was learned of it holds, whichever of the two explains it. */
    for (int i = 0; i < 100; i++) {
        bt_sched_learn_ttft(&l, 40, -1, 90);
    }
    assert_true(fabs(bt_sched_learned_ttft(&l, 40) - 90) < 3);
    struct bt_sched_learned before = l;
    bt_sched_learn_ttft(&l, 40, -1, 0); /* no time at all is no first token */
    assert_true(l.n_ttft == before.n_ttft);
}

/* What is computed at once tells the two apart, whatever the queues of the others do. */
static void test_idle_requests_tell_both_apart(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 4;
    for (int i = 0; i < 400; i++) {
        double work = 20 + (double)(rng(&s) % 100), held = i % 12 == 5 ? 80 : 0;
        if (i % 3 == 0) {
            bt_sched_learn_ttft(&l, work, 1.2 * work, 3 + 1.2 * work + held);
        } else { /* prompts that share steps: much is off, and none of it is overhead */
            double off = 0.7 + 0.6 * (double)(rng(&s) % 1000) / 1000;
            bt_sched_learn_ttft(&l, 3 * work, -1, 3 + off * 1.2 * 3 * work);
        }
    }
    assert_true(fabs(l.overhead_ms - 3) < 1);
    assert_true(l.slow > 1.1 && l.slow < 1.3);
}

/* The first requests of a worker that has just begun wait for seconds, and their first gaps are
 * long. Idle ones put the overhead right, short gaps the gaps, and a worker that gets three times
 * as slow is followed, too. Others are held up now and then, before and after: that moves nothing
 * far. */
static void test_a_bad_start_is_forgotten(void **state)
{
    (void)state;
    uint64_t s = 8;
    for (int bad = 1; bad <= 3; bad++) {
        struct bt_sched_learned l = {0};
        for (int i = 0; i < bad; i++) {
            bt_sched_learn_ttft(&l, 50, 60, 2500 + 50);
            bt_sched_learn_tbt(&l, 5, 0, 62, 900);
            bt_sched_learn_landing(&l, 5, 800);
        }
        assert_true(l.overhead_ms > 1000);
        for (int i = 0; i < 12; i++) {
            double noise = 0.7 + 0.6 * (double)(rng(&s) % 1000) / 1000;
            bt_sched_learn_ttft(&l, 50, 60, 60 + 3 * noise);
            bt_sched_learn_tbt(&l, 5, 0, 62, 7 * noise);
            bt_sched_learn_landing(&l, 5, 5 + 2 * noise);
        }
        assert_true(l.overhead_ms > 1 && l.overhead_ms < 6);
        assert_true(l.land_ms > 0.5 && l.land_ms < 4);
        double gap = bt_sched_learned_gap(&l, 5);
        assert_true(gap > 4 && gap < 12);
        for (int i = 0; i < 40; i++) {
            double held = i % 10 == 5 ? 2000 : 0;
            bt_sched_learn_ttft(&l, 50, 60, 60 + 3 + held);
        }
        assert_true(l.overhead_ms > 2 && l.overhead_ms < 5);
        for (int i = 0; i < 12; i++) {
            bt_sched_learn_ttft(&l, 50, 180, 183);
        }
        assert_true(l.slow > 3 && l.slow < 4);
    }
}

static void test_spread_is_a_quantile(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 3;
    for (int i = 0; i < 2000; i++) {
        double u = (double)(rng(&s) % 1000) / 1000; /* 0.8 to 1.2 of what the line says */
        bt_sched_learn_ttft(&l, 100 + (double)(rng(&s) % 900), -1, 0);
        double work = 100 + (double)(rng(&s) % 900);
        bt_sched_learn_ttft(&l, work, -1, (0.8 + 0.4 * u) * work);
    }
    assert_true(l.spread > 1.08 && l.spread < 1.25); /* 1.16 */
}

static void test_tail_follows_the_ratio(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    assert_true(bt_sched_learned_gap(&l, 10) == 10);
    bt_sched_learn_tbt(&l, 0, 0, 62, 5);
    bt_sched_learn_tbt(&l, 5, 0, 62, 0);
    assert_true(l.tail == 0 && l.stall_ms == 0 && l.n_tbt == 0);
    for (int i = 0; i < 300; i++) {
        bt_sched_learn_tbt(&l, 10, 0, 62, i % 12 == 5 ? 300 : 14);
    }
    assert_true(fabs(bt_sched_learned_gap(&l, 10) - 14) < 1.5);
    for (int i = 0; i < 100; i++) {
        bt_sched_learn_tbt(&l, 10, 0, 62, 25);
    }
    assert_true(fabs(bt_sched_learned_gap(&l, 10) - 25) < 1);
}

/* Gaps that hardly have to do with the step, as where threads wait for each other, and such as do:
 * steps of different lengths tell, and both can be taken back. */
static void test_stalls_and_steps_are_told_apart(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 7;
    for (int round = 0; round < 4; round++) {
        double stall = round % 2 == 0 ? 8 : 0.2, times = round % 2 == 0 ? 1 : 1.5;
        for (int i = 0; i < 600; i++) {
            double step = 1 + (double)(rng(&s) % 900) / 100;
            double noise = 0.8 + 0.4 * (double)(rng(&s) % 1000) / 1000;
            bt_sched_learn_tbt(&l, step, 0, 62, noise * (stall + times * step));
        }
        for (double step = 1; step <= 10; step *= 3) {
            assert_true(fabs(bt_sched_learned_gap(&l, step) / (stall + times * step) - 1) < 0.25);
        }
    }
}

/* Prompts beside rows fill each step up to 37.5 ms, whatever rows are in it. That is no tail: of a
 * step of 36 ms less than 38 ms is expected, and not 36 times the ratio that short steps show.
 * Answers are promised what they get, with such prompts and without. What is longer than the worker
 * lets its steps be is held up, and counts. */
static void test_prompts_beside_rows_are_no_tail(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 9;
    for (int i = 0; i < 400; i++) {
        double step = 20 + (double)(rng(&s) % 1600) / 100;
        bt_sched_learn_tbt(&l, step, 37.5, 62, 37.2);
    }
    assert_true(bt_sched_learned_gap(&l, 36) < 38 && bt_sched_learned_gap(&l, 20) < 22);
    assert_true(fabs(bt_sched_learned_tbt(&l, 20, 37.5, 62, false) - 37) < 1);
    assert_true(bt_sched_learned_tbt(&l, 20, -1, 62, false) < 22); /* a worker that takes none */
    for (int i = 0; i < 400; i++) { /* the prompts have gone; some gaps are a little short */
        bt_sched_learn_tbt(&l, 20, 37.5, 62, i % 3 == 0 ? 19 : 20.5);
    }
    assert_true(bt_sched_learned_gap(&l, 36) >= 36);
    assert_true(fabs(bt_sched_learned_tbt(&l, 20, 37.5, 62, false) - 20.5) < 1);
    for (int i = 0; i < 400; i++) {
        double step = 20 + (double)(rng(&s) % 1600) / 100;
        bt_sched_learn_tbt(&l, step, 37.5, 62, 60);
    }
    assert_true(fabs(bt_sched_learned_gap(&l, 37.5) - 60) < 3);
}

/* The gap of a hand-off is all of a short answer's longest tenth, and one of seven of a long one's.
 */
static void test_the_gap_of_a_landing(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    assert_true(bt_sched_learned_tbt(&l, 10, 0, 1, true) == 10); /* nothing is known */
    bt_sched_learn_landing(&l, 0, 5);
    bt_sched_learn_landing(&l, 5, 0);
    assert_true(l.land_ms == 0 && l.n_land == 0);
    for (int i = 0; i < 200; i++) {
        bt_sched_learn_landing(&l, 10, i % 12 == 5 ? 300 : 24);
        bt_sched_learn_tbt(&l, 10, 0, 62, 12);
    }
    assert_true(fabs(l.land_ms - 14) < 2);
    assert_true(fabs(bt_sched_learned_tbt(&l, 20, 0, 3, true) - (l.land_ms + 20)) < 1e-9);
    assert_true(fabs(bt_sched_learned_tbt(&l, 10, 0, 64, true) - (24 + 6 * 12) / 7.0) < 0.6);
    assert_true(fabs(bt_sched_learned_tbt(&l, 10, 0, 64, false) - 12) < 0.2);
    for (int i = 0; i < 300; i++) {
        bt_sched_learn_landing(&l, 10, 8); /* less than a step is no hand-off's time */
    }
    assert_true(l.land_ms < 0.1);
    assert_true(fabs(bt_sched_learned_tbt(&l, 10, 0, 64, true) - 12) < 0.2);
}

/* One gap in ten is five times as long: the longest of few is mostly a step. */
static void test_short_answers(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    uint64_t s = 8;
    for (int i = 0; i < 2000; i++) {
        float gaps[60];
        uint32_t n = i % 2 == 0 ? 60 : 1 + (uint32_t)(rng(&s) % 5);
        for (uint32_t k = 0; k < n; k++) {
            gaps[k] = rng(&s) % 10 == 0 ? 50 : 10;
        }
        bt_sched_learn_tbt(&l, 10, 0, n, bt_sched_tbt_of(gaps, n));
    }
    double all = bt_sched_learned_tbt(&l, 10, 0, 60, false),
           few = bt_sched_learned_tbt(&l, 10, 0, 2, false);
    print_message("longest tenth of 60 gaps %.1f, longest of 2 %.1f\n", all, few);
    assert_true(all > 35 && few > 12 && few < 20); /* 44 and 17.6 in the mean */
    /* The longest tenth of ten gaps is one gap, and without a hand-off all ten are steps. */
    assert_true(fabs(bt_sched_learned_tbt(&l, 10, 0, 10, false) - bt_sched_learned_gap(&l, 10)) <
                1e-9);
}

static void test_life_is_a_mean(void **state)
{
    (void)state;
    struct bt_sched_learned l = {0};
    bt_sched_learn_life(&l, 0); /* one token, or none: no row was there */
    assert_true(l.life_ms == 0);
    bt_sched_learn_life(&l, 100);
    bt_sched_learn_life(&l, 300);
    assert_true(fabs(l.life_ms - 200) < 1e-9);
    for (int i = 0; i < 300; i++) {
        bt_sched_learn_life(&l, i % 2 == 0 ? 1000 : 2000);
    }
    assert_true(fabs(l.life_ms - 1500) < 50);
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
        cmocka_unit_test(test_a_slow_worker),
        cmocka_unit_test(test_idle_requests_tell_both_apart),
        cmocka_unit_test(test_a_bad_start_is_forgotten),
        cmocka_unit_test(test_spread_is_a_quantile),
        cmocka_unit_test(test_tail_follows_the_ratio),
        cmocka_unit_test(test_stalls_and_steps_are_told_apart),
        cmocka_unit_test(test_prompts_beside_rows_are_no_tail),
        cmocka_unit_test(test_the_gap_of_a_landing),
        cmocka_unit_test(test_short_answers),
        cmocka_unit_test(test_life_is_a_mean),
        cmocka_unit_test(test_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
