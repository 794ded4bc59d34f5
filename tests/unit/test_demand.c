/* What a stage was asked for: against sums by hand, and what admission makes of it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/policy/sched/sched.h"

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
    assert_true(bt_sched_demand_rate(&d, 5000, 1000) == 0);
    for (double now = 5000; now < 400000; now += 100) {
        bt_sched_demand_note(&d, now, 300);
        if (now >= 10000) {
            assert_float_equal(bt_sched_demand_rate(&d, now, 1000), 3, 0.1);
        }
    }
    for (int i = 0; i < 7; i++) { /* no more comes: seven windows on there is none */
        bt_sched_demand_note(&d, 400000 + 60000 * (i + 1), 0);
    }
    assert_true(bt_sched_demand_rate(&d, 820000, 1000) < 0.01);
    bt_sched_demand_init(&d, 60000); /* a burst is no rate: it counts as if it took a second */
    bt_sched_demand_note(&d, 7, 500);
    assert_float_equal(bt_sched_demand_rate(&d, 7, 1000), 0.5, 0.01);
}

#define N_P 4 /* prefill workers, then decode workers */
#define N   6
static const struct bt_batch_cost prompts = {.token_ns = BT_BATCH_TOKEN_NS(1e6)};
static const struct bt_batch_cost rows = {.base_ns = 10e6, .kv_ns = 1000};

/* However long the queue is by now: what a prefill worker has time for within the objective comes
 * in. Beyond that the price of the queue counts, by which half of it would. */
static void test_priced_burst(void **state)
{
    (void)state;
    for (int fits = 0; fits < 2; fits++) {
        struct bt_sched_worker w[2] = {
            {.kvstore = 0, .prefill = true, .queue.ms = 15500, .speed.cost = &prompts},
            {.kvstore = 1, .decode = true, .capacity.slots = 100, .speed.cost = &rows}};
        struct bt_sched_kvstore stores[2] = {{0}};
        struct bt_sched_demand demand;
        struct bt_sched_snapshot snap = {
            .workers = w, .n_workers = 2, .kvstores = stores, .n_kvstores = 2, .demand = &demand};
        struct bt_sched_request req = {
            .n_tokens = 1000, .max_new = 10, .block_tokens = 100, .token_bytes = 1000};
        struct bt_sched_params params = {
            .prior.link_bytes_per_s = 10e6, .objective.ttft_ms = 30000, .price.demand = 1};
        struct bt_sched_plan plan;
        struct bt_sched_reject rej = {0};
        bt_sched_demand_init(&demand, 60000);
        for (uint32_t i = 0; i < (fits ? 40 : 60); i++) { /* 22 or 33 s; there are 23.6 */
            bt_sched_demand_note(&demand, 0, 100 * (1 + i % 10));
        }
        bt_sched_verdict_t v = bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &params,
                                               &snap, &req, &plan, &rej);
        assert_int_equal(v, fits ? BT_SCHED_PLANNED : BT_SCHED_OVERLOADED);
        assert_true(fits || (rej.miss == BT_SCHED_MISS_PRICE && !rej.by_decode));
    }
}

/* A worker may say of itself what it likes: what it has said leaves nothing behind. */
static void test_forecast_of_nonsense(void **state)
{
    (void)state;
    static const double nonsense[] = {1e300, INFINITY, -INFINITY, NAN, -1e300, 2.3e19};
    struct bt_sched_forecast f;
    struct bt_sched_room room = {.places = 10, .kv = 1e6};
    for (size_t i = 0; i < BT_ARRAY_LEN(nonsense); i++) {
        for (size_t j = 0; j < BT_ARRAY_LEN(nonsense); j++) {
            bt_sched_forecast_init(&f, 100, 1000, 0);
            bt_sched_forecast_note(&f, 10, nonsense[i], 100, nonsense[j], 1);
            bt_sched_forecast_note(&f, 20, nonsense[i], 100, nonsense[j], -1);
            struct bt_sched_load load = {.rows = 2, .kv = 200};
            bt_sched_forecast_at(&f, &room, 30, 1, &load);
            assert_true(load.rows >= 0 && load.rows <= 10 && load.kv >= 0 && load.kv <= 1e6);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_fades),
        cmocka_unit_test(test_rate),
        cmocka_unit_test(test_priced_burst),
        cmocka_unit_test(test_forecast_of_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
