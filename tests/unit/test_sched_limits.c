/* Prompts beside rows, packed rows, admission and late requests at their limits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sched_world.h"

/* ---- prompts beside rows ---- */

static void only_decode(void)
{
    for (uint32_t i = 0; i < P; i++) {
        make_worker(i, false, true);
    }
}

/* Nobody only prefills: all who decode are compared, as they would compute the prompt. */
static void test_everybody_does_both(void **state)
{
    (void)state;
    only_decode();
    mix(50, 0);
    for (uint32_t i = 0; i < N; i++) {
        set_rows(i, 10, 15000); /* 25 ms a step, so a prompt takes twice as long */
        set_queue(i, i == 2 ? 0 : 1000);
        set_coming(i, 15, 5, 0);
    }
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_true(p.at.both && p.at.decode == 2);
    NEAR(p.first.ms, 2000, 1);
    mix(50, 60); /* rows that join shorten steps; when they come nobody knows */
    NEAR(place(&bt_sched_baton).first.ms, 2000, 1);
    struct bt_sched_candidate c[2 * N];
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &X.c, &X.s, &X.req, NULL, c, 2 * N), 2 * N);
    mix(0, 0);
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &X.c, &X.s, &X.req, NULL, c, 2 * N), N);
}

static void test_room_beside_rows(void **state)
{
    (void)state;
    mix(50, 0);
    for (uint32_t i = 0; i < P; i++) {
        set_queue(i, 9000);
    }
    set_queue(3, 20000);
    /* No rows: a step with prompt tokens has the base of prompts. */
    static const struct bt_batch_cost based = {.base_ns = 25e6, .token_ns = BT_BATCH_TOKEN_NS(1e6)};
    set_cost(2, &rows, &based);
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_true(p.at.both && p.at.decode == 2);
    assert_int_equal(p.reason, BT_SCHED_MIXED);
    NEAR(p.first.ms, 2000, 1);
    set_cost(2, &rows, &prompts);
    /* The last place is one. */
    set_rows(2, 10, 15000);
    set_room(2, 11, 1000, 1000);
    assert_int_equal(place(&bt_sched_baton).at.prefill, 2);
    set_room(2, 10, 1000, 1000);
    assert_int_not_equal(place(&bt_sched_baton).at.prefill, 2);
    /* Rows on their way do not shorten steps where no gap is asked for. */
    set_room(2, 64, 1000, 1000);
    set_coming(2, 20, 10, 0);
    p = place(&bt_sched_baton);
    assert_int_equal(p.at.prefill, 2);
    NEAR(p.first.ms, 2000, 30);
    /* Who has the first token out no earlier leaves it to the others. */
    set_coming(2, 10, 0, 0);
    set_queue(0, 1000);
    assert_true(place(&bt_sched_baton).at.prefill < P);
    set_queue(0, 1001);
    assert_int_equal(place(&bt_sched_baton).at.prefill, 2);
    /* What the node has is what counts where others have as much. */
    X.k[2].match_blocks = X.k[1].match_blocks = 5;
    p = place(&bt_sched_baton);
    assert_int_equal(p.at.prefill, 2);
    assert_int_equal(p.prefix.fetch_from, BT_SCHED_NONE);
    assert_int_equal(p.prefix.cached_tokens, 500);
}

/* ---- packed rows ---- */

/* Worker 3 has rows, 2 has none; as fast as it gets prompts go apart. */
static void pack(void)
{
    again();
    mix(20, 0);
    X.c.mixed.pack_share = 0.5;
    X.c.objective.tbt_ms = 100;
    set_rows(3, 5, 1000);
}

static bool packed(void)
{
    return place(&bt_sched_baton).at.decode == 3;
}

static void test_packed_rows(void **state)
{
    (void)state;
    static const struct bt_batch_cost cheap = {.token_ns = BT_BATCH_TOKEN_NS(1)};
    static const struct bt_batch_cost each = {.base_ns = 10e6, .token_ns = BT_BATCH_TOKEN_NS(1e6)};
    pack();
    assert_true(packed());
    set_room(3, 10, 1000, 1000); /* it would take the last of ten places */
    set_rows(3, 9, 1000);
    assert_false(packed());
    set_rows(3, 8, 1000);
    assert_true(packed());
    pack();
    set_room(3, 64, 100, 10); /* the last of a hundred pages */
    assert_false(packed());
    set_room(3, 64, 100, 11);
    assert_true(packed());
    pack(); /* the step may be half of the objective, with this row's token */
    set_rows(3, 5, 39000);
    assert_true(packed());
    set_rows(3, 5, 39100);
    assert_false(packed());
    set_cost(3, &each, &prompts);
    set_rows(3, 39, 1000);
    assert_true(packed());
    set_rows(3, 40, 1000);
    assert_false(packed());
    pack(); /* of the prefill workers' time 0.6 is asked for: the step may be 60 ms */
    static struct bt_sched_demand demand;
    bt_sched_demand_init(&demand, 60000);
    bt_sched_demand_note(&demand, 0, 60000 * (1 - exp(-1.0 / 60)) * P * 0.6001);
    X.s.demand = &demand;
    X.c.mixed.pack_share = 0.75;
    set_rows(3, 5, 49000);
    assert_true(packed());
    set_rows(3, 5, 49100);
    assert_false(packed());
    X.s.demand = NULL;
    pack(); /* a link that is too slow as long as it was not measured */
    static const struct bt_sched_link link = {.incarnation = 77, .slab_bytes_per_s = 1e9};
    X.c.prior.link_bytes_per_s = 1e3;
    assert_false(packed());
    X.k[X.w[3].kvstore].links = &link;
    X.k[X.w[3].kvstore].n_links = 1;
    assert_true(packed());
    pack(); /* a first token within 3 % of its objective is safe */
    X.c.objective.ttft_ms = 100000;
    X.req.n_tokens = 3000;
    assert_true(packed());
    X.req.n_tokens = 2999;
    assert_false(packed());
    X.c.prior.link_bytes_per_s = 1e15;
    set_cost(2, &rows, &cheap); /* as prefill workers compute it */
    set_cost(3, &rows, &cheap);
    X.req.n_tokens = 3000;
    assert_true(packed());
    X.k[0].match_blocks = 20; /* what one of them has need not be computed */
    assert_false(packed());
    X.c.place.fetch_ratio = 0; /* ... but nobody brings it to others */
    set_queue(0, 10000);
    assert_true(packed());
}

/* The worker without rows computes the prompt and hands it over if it is there in time. */
static void test_handed_over(void **state)
{
    (void)state;
    pack();
    set_queue(0, 900);
    set_queue(1, 900);
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_true(p.at.prefill == 2 && p.at.decode == 3);
    assert_int_equal(p.reason, BT_SCHED_SPARE);
    X.k[2].send_busy_ms = 900; /* 100 ms on the link: with the last token */
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    X.k[2].send_busy_ms = 901;
    assert_int_equal(place(&bt_sched_baton).at.decode, 2);
    X.c.mixed.pack_share = 0; /* spread: one without rows is as good as others for a prompt */
    X.k[2].send_busy_ms = 0;
    set_queue(0, 90000);
    set_queue(1, 90000);
    p = place(&bt_sched_baton);
    assert_true(p.at.both);
    assert_int_equal(p.reason, BT_SCHED_MIXED);
}

/* ---- admission ---- */

static void test_objectives_to_the_millisecond(void **state)
{
    (void)state;
    X.c.objective.ttft_ms = 1000;
    decided(&bt_sched_baton, &bt_sched_admit_early, BT_SCHED_PLANNED);
    set_queue(0, 1);
    set_queue(1, 1);
    struct bt_sched_reject r = decided(&bt_sched_baton, &bt_sched_admit_early, BT_SCHED_OVERLOADED);
    assert_int_equal(r.retry_after_s, 1); /* without the queue it would do */
    assert_int_equal(r.miss, BT_SCHED_MISS_TTFT);
    NEAR(r.predicted_ms, 1001, 1e-6);
    X.req.n_tokens = 1001;
    assert_int_equal(
        decided(&bt_sched_baton, &bt_sched_admit_early, BT_SCHED_OVERLOADED).retry_after_s, 0);
    again();
    X.c.objective.tbt_ms = 11;
    decided(&bt_sched_baton, &bt_sched_admit_early, BT_SCHED_PLANNED); /* 10 and 1 of context */
    X.c.objective.tbt_ms = 10.99;
    decided(&bt_sched_baton, &bt_sched_admit_early, BT_SCHED_OVERLOADED);
}

/* Only the step of now is known, not what makes it: it grows with the rows that are expected. */
static void test_prediction_without_a_cost(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    for (uint32_t i = P; i < N; i++) {
        set_rates(i, 0, 10);
        set_rows(i, 10, 1000);
    }
    bt_sched_forecast_init(&f, 100, 1e9, 0);
    X.s.forecast = &f;
    X.c.objective.tbt_ms = 25;
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_PLANNED);
    for (uint32_t i = 0; i < 40; i++) { /* 20 more each: 30 ms */
        bt_sched_forecast_note(&f, 0, 500, 100, 1e9, 1);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_OVERLOADED);
    for (uint32_t i = P; i < N; i++) { /* nothing is known: the prior, which does not grow */
        set_rates(i, 0, 0);
        set_rows(i, 10, 1000);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_PLANNED);
}

/* Places, pages and who would make way are those of all decode workers together. */
static void test_the_room_of_the_pool(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    bt_sched_forecast_init(&f, 100, 1e9, 0);
    X.c.objective.tbt_ms = 1000;
    X.s.forecast = &f;
    for (uint32_t i = P; i < N; i++) {
        set_room(i, 20, 1000, 900);
        set_rows(i, 18, 1800);
    }
    for (uint32_t i = 0; i < 4; i++) { /* two more each, and this one */
        bt_sched_forecast_note(&f, 0, 500, 100, 1e9, 1);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_OVERLOADED);
    for (uint32_t i = P; i < N; i++) {
        set_yield(i, 4, 4);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_PLANNED);
    for (uint32_t i = P; i < N; i++) { /* pages: 96 of 100 */
        set_room(i, 1000, 100, 4);
        set_rows(i, 18, 9600);
        set_yield(i, 0, 0);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_OVERLOADED);
    for (uint32_t i = P; i < N; i++) { /* one of them would be free: too few */
        set_yield(i, 1, 1);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_OVERLOADED);
    for (uint32_t i = P; i < N; i++) {
        set_yield(i, 5, 40);
    }
    decided(&bt_sched_baton, &bt_sched_admit_predict, BT_SCHED_PLANNED);
}

/* Rows that wait for a place, or for pages, do not end meanwhile. */
static void test_rows_that_wait_do_not_end(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    bt_sched_forecast_init(&f, 10, 1000, 0);
    X.c.objective.tbt_ms = 1000;
    X.s.forecast = &f;
    for (uint32_t limited = 0; limited < 3; limited++) {
        for (uint32_t i = P; i < N; i++) { /* as many wait as run; a second later a third is left */
            set_room(i, limited == 1 ? 10 : 11, 100 + 1000 * (limited != 2), 100 + 1000);
            set_rows(i, limited == 1 ? 10 : 5, 10000);
            set_waiting(i, limited == 1 ? 10 : 5);
        }
        decided(&bt_sched_baton, &bt_sched_admit_predict,
                limited == 0 ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
    }
}

/* Without a record of what is asked for nothing has a price, however full workers are. */
static void test_prices_without_demand(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    bt_sched_forecast_init(&f, 100, 1e9, 0);
    X.s.forecast = &f;
    X.c.objective.ttft_ms = 30000;
    X.c.objective.tbt_ms = 1000;
    X.c.price.demand = 1;
    set_queue(0, 15000);
    set_queue(1, 15000);
    for (uint32_t i = P; i < N; i++) {
        set_room(i, 100, 1000, 200);
        set_rows(i, 85, 80000);
    }
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_PLANNED);
    /* with one, the least that is asked for comes in even where there is hardly room */
    static struct bt_sched_demand d;
    bt_sched_demand_init(&d, 60000);
    for (uint32_t i = 0; i < 2000; i++) {
        bt_sched_demand_note(&d, 0, 100000);
    }
    X.s.decodes = &d;
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_PLANNED);
    X.s.decodes = NULL;
    X.s.demand = &d;
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_PLANNED);
    static struct bt_sched_demand small;
    bt_sched_demand_init(&small, 60000);
    for (uint32_t i = 0; i < 200000; i++) {
        bt_sched_demand_note(&small, 0, 10);
    }
    X.s.demand = &small;
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_OVERLOADED);
    X.c.price.demand = 0;
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_PLANNED);
    X.c.price.demand = 1;
    X.s.demand = NULL;
    X.s.decodes = &small;
    decided(&bt_sched_baton, &bt_sched_admit_priced, BT_SCHED_OVERLOADED);
}

/* ---- late ---- */

static struct bt_sched_plan late(bool want)
{
    struct bt_sched_plan plan = {0};
    assert_int_equal(bt_sched_late(&bt_sched_baton, &X.c, &X.s, &X.req, &plan), want);
    assert_true(!want || (plan.background && isfinite(plan.first.ms)));
    return plan;
}

static void test_late_ones(void **state)
{
    (void)state;
    static struct bt_sched_demand d, all;
    X.c.late.wait_ms = 20000;
    /* Prompts that are in time take all of the time: who meets no queue has it all the same. */
    bt_sched_demand_init(&all, 60000);
    bt_sched_demand_note(&all, 0, 1e9);
    X.s.let_in = &all;
    NEAR(late(true).first.ms, 1000, 1);
    X.s.let_in = NULL;
    /* Far more late work is asked for than there is time for. */
    bt_sched_demand_init(&d, 60000);
    for (uint32_t i = 0; i < 1000; i++) {
        bt_sched_demand_note(&d, 0, 100);
    }
    X.s.late_demand = &d;
    set_queue(0, 1000);
    set_queue(1, 1000);
    late(false);
    X.s.late_demand = NULL;
    late(true);
    /* where nobody only prefills any of them may */
    again();
    only_decode();
    X.c.late.wait_ms = 20000;
    for (uint32_t i = 0; i < N; i++) {
        set_rows(i, 5 + i, 1000);
        set_queue(i, i == 3 ? 0 : 5000);
    }
    struct bt_sched_plan p = late(true);
    assert_true(p.at.both && p.at.decode == 3);
}

/* The rows that are expected, late ones too, must leave room. */
static void test_late_rows_that_are_expected(void **state)
{
    (void)state;
    static struct bt_sched_forecast f, late_f;
    X.c.late.wait_ms = 20000;
    bt_sched_forecast_init(&f, 100, 1e9, 0);
    bt_sched_forecast_init(&late_f, 100, 1e9, 0);
    X.s.forecast = &f;
    for (uint32_t i = P; i < N; i++) {
        set_room(i, 20, 1000, 1000);
        set_rows(i, 12, 1200);
    }
    late(true); /* 13 of 20 */
    X.s.late_forecast = &late_f;
    for (uint32_t i = 0; i < 6; i++) {
        bt_sched_forecast_note(&late_f, 0, 500, 100, 1e9, 1);
    }
    late(false); /* three more each */
}

#define T(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_everybody_does_both),
        T(test_room_beside_rows),
        T(test_packed_rows),
        T(test_handed_over),
        T(test_objectives_to_the_millisecond),
        T(test_prediction_without_a_cost),
        T(test_the_room_of_the_pool),
        T(test_rows_that_wait_do_not_end),
        T(test_prices_without_demand),
        T(test_late_ones),
        T(test_late_rows_that_are_expected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
