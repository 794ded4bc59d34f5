/* Roles by load: what it takes for a worker to be changed, and that nothing swings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/policy/sched/balance.h"
#include "common/policy/sched/sched.h"

static const struct bt_balance_params params = {.window_ms = 10000, .high = 0.6};

struct cluster {
    struct bt_balance b;
    struct bt_balance_worker w[8];
    uint32_t n, prefills;
    double now_ms;
};

static void form(struct cluster *c, uint32_t prefills, uint32_t decodes)
{
    *c = (struct cluster){.n = prefills + decodes, .prefills = prefills};
    for (uint32_t i = 0; i < c->n; i++) {
        c->w[i].prefill = i < prefills;
        c->w[i].decode = !c->w[i].prefill;
    }
}

/* Samples of a second each with this load; the first change that comes of it. */
static struct bt_balance_change run(struct cluster *c, double seconds, double prefill,
                                    double decode)
{
    struct bt_balance_change ch = {.worker = BT_BALANCE_NONE};
    for (double s = 0; s < seconds && ch.worker == BT_BALANCE_NONE; s++) {
        for (uint32_t i = 0; i < c->n; i++) {
            c->w[i].pressure = c->w[i].prefill ? prefill : decode;
        }
        c->now_ms += 1000;
        bt_balance_step(&c->b, &params, c->w, c->n, c->now_ms, &ch);
    }
    return ch;
}

static void test_two_windows(void **state)
{
    (void)state;
    struct cluster c;
    form(&c, 2, 3);
    assert_int_equal(run(&c, 20, 1.5, 0.2).worker, BT_BALANCE_NONE); /* one window and a half */
    struct bt_balance_change ch = run(&c, 3, 1.5, 0.2);
    assert_int_not_equal(ch.worker, BT_BALANCE_NONE);
    assert_true(ch.to_prefill && c.w[ch.worker].decode);
    assert_true(ch.prefill == 1 && ch.decode < 0.3);
    /* A burst within one window is none of a stage's size. */
    form(&c, 2, 3);
    assert_int_equal(run(&c, 11, 2, 0.2).worker, BT_BALANCE_NONE);
    assert_int_equal(run(&c, 60, 0.3, 0.2).worker, BT_BALANCE_NONE);
}

static void test_who_gives(void **state)
{
    (void)state;
    struct cluster c;
    /* Decode would be above `high` with one less: 0.4 * 2 / 1. */
    form(&c, 2, 2);
    assert_int_equal(run(&c, 100, 1.5, 0.4).worker, BT_BALANCE_NONE);
    /* The last one of a stage stays, idle or not. */
    form(&c, 3, 1);
    assert_int_equal(run(&c, 100, 1.5, 0).worker, BT_BALANCE_NONE);
    /* Both are short: nobody has anything to give. */
    form(&c, 3, 3);
    assert_int_equal(run(&c, 100, 1.5, 1.5).worker, BT_BALANCE_NONE);
    /* Those that may not be changed are left alone. */
    form(&c, 2, 3);
    c.w[2].fixed = c.w[3].fixed = true;
    struct bt_balance_change ch = run(&c, 100, 1.5, 0.1);
    assert_int_equal(ch.worker, 4);
    form(&c, 2, 3);
    c.w[2].fixed = c.w[3].fixed = c.w[4].fixed = true;
    assert_int_equal(run(&c, 100, 1.5, 0.1).worker, BT_BALANCE_NONE);
    /* Of several the least busy one. */
    form(&c, 2, 3);
    for (int s = 0; s < 60; s++) {
        struct bt_balance_change one;
        c.w[0].pressure = c.w[1].pressure = 1.5;
        c.w[2].pressure = 0.3;
        c.w[3].pressure = 0.1;
        c.w[4].pressure = 0.2;
        bt_balance_step(&c.b, &params, c.w, c.n, s * 1000.0, &one);
        if (one.worker != BT_BALANCE_NONE) {
            ch = one;
        }
    }
    assert_int_equal(ch.worker, 3);
}

/* A load of fixed size in worker-times, split by how many do it: as many changes as are needed,
 * then none, whichever side the load is on. */
static void test_it_settles(void **state)
{
    (void)state;
    const double work[][2] = {{3.2, 0.8}, {0.7, 3.0}, {2.0, 2.0}, {2.9, 1.2}, {1.1, 2.6}};
    struct cluster c;
    form(&c, 3, 3);
    for (size_t k = 0; k < BT_ARRAY_LEN(work); k++) {
        int changes = 0, late = 0;
        for (int s = 0; s < 1200; s++) {
            uint32_t p = 0;
            for (uint32_t i = 0; i < c.n; i++) {
                p += c.w[i].prefill;
            }
            for (uint32_t i = 0; i < c.n; i++) {
                c.w[i].pressure = c.w[i].prefill ? work[k][0] / p : work[k][1] / (c.n - p);
            }
            struct bt_balance_change ch;
            c.now_ms += 1000;
            bt_balance_step(&c.b, &params, c.w, c.n, c.now_ms, &ch);
            if (ch.worker != BT_BALANCE_NONE) {
                c.w[ch.worker].prefill = ch.to_prefill;
                c.w[ch.worker].decode = !ch.to_prefill;
                changes++;
                late += s > 300;
            }
        }
        assert_in_range(changes, 0, 3);
        assert_int_equal(late, 0);
    }
}

static void test_pressure(void **state)
{
    (void)state;
    struct bt_sched_params p = {
        .prior.prefill_tokens_per_s = 1000, .prior.step_ms = 20, .objective.ttft_ms = 500};
    struct bt_sched_worker w = {.prefill = true, .queue.tokens = 250};
    assert_float_equal(bt_sched_pressure(&p, &w), 0.5, 1e-9);
    p.objective.ttft_ms = 0;
    assert_float_equal(bt_sched_pressure(&p, &w), 0.25, 1e-9);
    struct bt_sched_worker d = {.decode = true,
                                .rows.running = 4,
                                .capacity.slots = 16,
                                .capacity.pages = 100,
                                .capacity.pages_free = 40};
    assert_float_equal(bt_sched_pressure(&p, &d), 0.6, 1e-9);
    d.rows.waiting = 2;
    assert_float_equal(bt_sched_pressure(&p, &d), 1.6, 1e-9);
    d.rows.waiting = 0;
    p.objective.tbt_ms = 25;
    assert_float_equal(bt_sched_pressure(&p, &d), 0.8, 1e-9);
    /* The step of one is no load: 21 ms of 25 with four rows, 19 with one, is a third of the room.
     */
    static const struct bt_batch_cost cost = {.base_ns = 18e6, .token_ns = {5e5, 5e5, 5e5, 5e5}};
    d.capacity.pages_free = 100;
    d.speed.cost = &cost;
    d.rows.running = 5;
    p.objective.tbt_ms = 26;
    assert_float_equal(bt_sched_pressure(&p, &d), 2.5 / 7.5, 1e-9);
    d.rows.running = 0; /* what was learned of an idle one's steps is no load */
    assert_float_equal(bt_sched_pressure(&p, &d), 0, 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_windows), cmocka_unit_test(test_who_gives),
        cmocka_unit_test(test_it_settles), cmocka_unit_test(test_pressure)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
