/* Placement at its edges: values that are just within a limit and just beyond it, and what is not
 * known. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sched_world.h"

/* ---- who can hold a request ---- */

static void test_what_just_fits(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        set_context(i, 1000);
        set_room(i, 64, 10, 10);
        X.k[i].slots_total = X.k[i].slots_free = 10;
    }
    assert_false(place(&bt_sched_baton).at.both); /* context, pages and slots to the last one */
    X.req.n_tokens = 1001;
    struct bt_sched_reject r = refused(&bt_sched_baton, BT_SCHED_TOO_LARGE);
    assert_int_equal(r.fits_tokens, 1000);
    assert_non_null(strstr(r.reason, "longer than any worker's context")); /* both are 1000 */
    assert_int_equal(r.retry_after_s, 0);
    for (uint32_t i = 0; i < N; i++) {
        set_room(i, 64, 9, 9);
    }
    X.req.n_tokens = 1000;
    r = refused(&bt_sched_baton, BT_SCHED_TOO_LARGE);
    assert_int_equal(r.fits_tokens, 900);
    assert_non_null(strstr(r.reason, "no worker has KV pages"));
    set_room(2, 64, 9, 9); /* the largest of those with the role counts, and no others */
    set_room(3, 64, 8, 8);
    set_room(0, 64, 5, 5);
    assert_int_equal(refused(&bt_sched_baton, BT_SCHED_TOO_LARGE).fits_tokens, 900);
    X.w[2].kvstore = BT_SCHED_NONE; /* ... as long as it is there */
    assert_int_equal(refused(&bt_sched_baton, BT_SCHED_TOO_LARGE).fits_tokens, 800);
    X.w[2].kvstore = 2;
    set_room(2, 64, 10, 10); /* the only one that can hold it does both */
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_true(p.at.both && p.at.decode == 2);
    for (uint32_t i = 0; i < N; i++) {
        X.w[i].kvstore = BT_SCHED_NONE;
    }
    assert_non_null(
        strstr(refused(&bt_sched_baton, BT_SCHED_NO_KVSTORE).reason, "no kvstore is up"));
    X.s.n_workers = 0;
    assert_string_equal(refused(&bt_sched_baton, BT_SCHED_NO_DECODE).reason, "no worker is up");
}

/* No slab of a prefill worker holds the prompt, so one worker does both: of what the decode side's
 * slab would hold all but the last block goes through it. */
static void test_what_goes_through_the_slab(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        X.k[i].slots_total = X.k[i].slots_free = i < P ? 5 : 100;
    }
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_true(p.at.both && p.at.decode >= P);
    assert_int_equal(p.reason, BT_SCHED_LARGER_THAN_SLAB);
    assert_int_equal(p.prefix.grant_tokens, 900);
    for (uint32_t i = P; i < N; i++) {
        X.k[i].slots_total = 9;
    }
    assert_int_equal(place(&bt_sched_baton).prefix.grant_tokens,
                     400); /* half of it, whole blocks */
    for (uint32_t i = 0; i < N; i++) {
        X.k[i].slots_total = 1;
    }
    assert_int_equal(place(&bt_sched_baton).prefix.grant_tokens, 100);
    struct bt_sched_candidate c[N]; /* who has no room for all of it was not too small for that */
    p = place(&bt_sched_baton);
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &X.c, &X.s, &X.req, &p, c, N), N + 1);
    assert_true(c[0].chosen && c[1].chosen && c[0].worker == c[1].worker);
    assert_non_null(strstr(c[2].verdict, "the decode worker computes this prompt itself"));
    assert_int_equal(bt_sched_explain(&bt_sched_baton, &X.c, &X.s, &X.req, NULL, c, N), N);
    for (uint32_t i = 0; i < N; i++) {
        assert_non_null(strstr(c[i].verdict, "too small"));
    }
}

static void test_what_is_kept(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        X.k[i].slots_total = 100;
        X.k[i].slots_free = 55; /* half of the slab and half of the prompt */
    }
    assert_true(place(&bt_sched_baton).prefix.keep);
    for (uint32_t i = 0; i < N; i++) {
        X.k[i].slots_free = 54;
    }
    assert_false(place(&bt_sched_baton).prefix.keep);
}

/* ---- caches ---- */

static void test_hand_off_on_one_node_costs_nothing(void **state)
{
    (void)state;
    X.c.prior.link_bytes_per_s = 0.1e6; /* 10 ms a token: ten times what it takes to compute one */
    set_queue(1, 500);
    X.w[1].kvstore = 3; /* the decode workers' node ... */
    X.w[2].kvstore = 3;
    struct bt_sched_plan p = place(&bt_sched_cache_aware);
    assert_int_equal(p.at.prefill, 1);
    X.w[1].kvstore = 1; /* ... or another one */
    assert_int_equal(place(&bt_sched_cache_aware).at.prefill, 0);
}

static void test_of_equal_holders_the_one_that_is_free(void **state)
{
    (void)state;
    for (uint32_t busy = 1; busy < 4; busy++) {
        again();
        X.k[1].match_blocks = X.k[2].match_blocks = X.k[3].match_blocks = 8;
        X.k[1].send_busy_ms = X.k[2].send_busy_ms = X.k[3].send_busy_ms = 50;
        X.k[busy].send_busy_ms = 5;
        set_queue(1, 5000);
        assert_int_equal(place(&bt_sched_kvcache).prefix.fetch_from, busy);
        X.k[busy].avoid = true; /* it has failed this request: not asked again */
        uint32_t from = place(&bt_sched_kvcache).prefix.fetch_from;
        assert_true(from != busy && from >= 1);
        X.k[busy == 3 ? 2 : 3].match_blocks = 9; /* the longest counts first */
        assert_int_equal(place(&bt_sched_kvcache).prefix.fetch_from, busy == 3 ? 2 : 3);
    }
}

/* A fetch that gains nothing is none, and where a prefix ends is then what is there. */
static void test_fetches_that_gain_nothing(void **state)
{
    (void)state;
    static const struct bt_batch_cost free_tokens = {.base_ns = 10e6};
    X.c.place.tail_load = true;
    X.c.prior.link_bytes_per_s = 0.01e6; /* 100 ms a token */
    X.k[0].match_blocks = 2;
    X.k[1].match_blocks = 8;
    set_queue(1, 50000);
    struct bt_sched_plan p = place(&bt_sched_baton);
    assert_int_equal(p.at.prefill, 0);
    assert_int_equal(p.prefix.fetch_tokens, 0);
    assert_int_equal(p.prefix.fetch_from, BT_SCHED_NONE);
    assert_int_equal(p.prefix.cached_tokens, 200);
    assert_int_equal(p.prefix.cached_tokens, 200);
    assert_true(p.prefix.recompute_tokens_per_s == 0);
    again(); /* tokens cost nothing: no rate at which they could be computed instead */
    set_cost(0, &free_tokens, &free_tokens);
    set_cost(1, &free_tokens, &free_tokens);
    X.k[1].match_blocks = 8;
    set_queue(1, 50000);
    p = place(&bt_sched_kvcache);
    assert_int_equal(p.prefix.fetch_tokens, 800);
    assert_true(p.prefix.recompute_tokens_per_s == 0);
    again(); /* of what is there as much as anywhere nothing is fetched */
    X.k[0].match_blocks = X.k[1].match_blocks = 8;
    for (uint32_t i = 0; i < 16; i++) {
        X.req.random = i;
        p = place(&bt_sched_kvcache);
        assert_int_equal(p.prefix.fetch_from, BT_SCHED_NONE);
        assert_int_equal(p.prefix.cached_tokens, 800);
    }
}

/* ---- prefill workers ---- */

/* A worker whose steps a prompt can share is looked at however long its queue is. */
static void test_who_shares_a_step_is_not_passed_over(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 5e6, .token_ns = BT_BATCH_TOKEN_NS(2e5)};
    /* ten chunks of 30.6 ms */
    struct bt_batch_seq seq = {.len = 1280, .chunk_tokens = 128, .kind = BT_BATCH_PROMPT};
    struct bt_batch b = {
        .lim = {.max_rows = 2048, .block_tokens = 16}, .seqs = &seq, .n = 1, .cost = &cost};
    struct bt_batch_row row = {.n = 128};
    struct bt_batch_ahead ahead;
    bt_batch_ahead(&b, &row, 1, 128, &ahead);
    for (uint32_t sharer = 0; sharer < P; sharer++) {
        again();
        X.req.n_tokens = 16;
        X.req.block_tokens = 16;
        for (uint32_t i = 0; i < P; i++) {
            set_cost(i, &cost, &cost);
            set_queue(i, i == sharer ? 306 : 100);
        }
        set_ahead(sharer, &ahead);
        struct bt_sched_plan p = place(&bt_sched_cache_aware);
        assert_int_equal(p.at.prefill, sharer);
        assert_true(p.first.queue_ms < 31);
        /* one that shares nothing waits for all, by the worker's own word */
        X.req.n_tokens = 4000;
        set_queue(sharer, 400);
        set_queue(1 - sharer, 5000);
        p = place(&bt_sched_cache_aware);
        assert_int_equal(p.at.prefill, sharer);
        NEAR(p.first.queue_ms, 400, 1e-9);
        NEAR(p.first.beside_ms, 0, 1e-9);
    }
}

/* A contrastive search is computed where it generates, whatever the roles and the policy are. */
static void test_one_worker(void **state)
{
    (void)state;
    static const struct bt_sched_policy *const all[] = {&bt_sched_round_robin, &bt_sched_least_load,
                                                        &bt_sched_cache_aware, &bt_sched_kvcache,
                                                        &bt_sched_baton};
    X.req.n_tokens = 4000;
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        X.req.one_worker = false;
        assert_false(place(all[i]).at.both);
        X.req.one_worker = true;
        struct bt_sched_plan p = place(all[i]);
        assert_true(p.at.both && p.at.prefill == p.at.decode && p.at.decode >= P);
        assert_int_equal(p.reason, BT_SCHED_ONE_WORKER);
    }
}

/* Turns go round however many workers there are. */
static void test_turns_of_three(void **state)
{
    (void)state;
    make_worker(1, false, true); /* 0 prefills, 1 to 3 decode */
    for (uint64_t i = 0; i < 9; i++) {
        X.req.sequence = i;
        struct bt_sched_plan p = place(&bt_sched_round_robin);
        assert_int_equal(p.at.prefill, 0);
        assert_int_equal(p.at.decode, 1 + i % 3);
    }
    again();
    make_worker(2, true, false); /* 0 to 2 prefill, 3 decodes */
    for (uint64_t i = 0; i < 9; i++) {
        X.req.sequence = i;
        assert_int_equal(place(&bt_sched_round_robin).at.prefill, i % 3);
    }
}

/* ---- decode workers ---- */

static void test_places_and_pages_in_use(void **state)
{
    (void)state;
    /* Nothing is known of pages: places decide; and the other way round. */
    for (uint32_t i = P; i < N; i++) {
        set_room(i, 64, 0, 0);
    }
    set_rows(2, 20, 1000);
    set_rows(3, 10, 9000);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    set_rows(2, 10, 1000);
    set_rows(3, 20, 9000);
    assert_int_equal(place(&bt_sched_baton).at.decode, 2);
    again();
    set_room(2, 0, 1000, 400);
    set_room(3, 0, 1000, 700);
    set_rows(2, 10, 60000);
    set_rows(3, 10, 30000);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    /* Late rows on their way take room, too. */
    again();
    set_rows(2, 10, 20000);
    set_rows(3, 10, 10000);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    set_late(3, 30000);
    assert_int_equal(place(&bt_sched_baton).at.decode, 2);
    /* Who is on the way counts without a forecast as well. */
    again();
    set_queue(0, 100);
    set_queue(1, 100);
    set_rows(2, 30, 3000);
    set_rows(3, 10, 1000);
    set_coming(2, 31, 1, 100);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
}

/* Rows of lower classes make way only where there is no room. */
static void test_rows_that_make_way(void **state)
{
    (void)state;
    set_room(2, 10, 1000, 900);
    set_room(3, 10, 1000, 900);
    set_rows(2, 12, 1200); /* full; half of them would go */
    set_rows(3, 11, 1100); /* full, and stays so */
    set_yield(2, 6, 60);
    assert_int_equal(place(&bt_sched_baton).at.decode, 2);
    set_yield(2, 0, 0);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    /* Where there is room those that would go count like others. */
    set_rows(2, 8, 800);
    set_rows(3, 5, 500);
    set_yield(2, 8, 80);
    assert_int_equal(place(&bt_sched_baton).at.decode, 3);
    assert_int_equal(place(&bt_sched_cache_aware).at.decode, 3);
    /* Of two full ones, where rows of both would go, neither is better than the other for it. */
    set_rows(2, 10, 1000);
    set_rows(3, 10, 1000);
    set_yield(2, 1, 10);
    set_yield(3, 10, 100);
    bool seen[N] = {false};
    for (uint32_t i = 0; i < 32; i++) {
        X.req.random = i * 0x9e3779b97f4a7c15ull;
        seen[place(&bt_sched_baton).at.decode] = true;
    }
    assert_true(seen[2] && seen[3]);
}

static void test_full_step(void **state)
{
    (void)state;
    static const struct bt_batch_cost each = {.base_ns = 10e6, .token_ns = BT_BATCH_TOKEN_NS(1e6)};
    set_cost(2, &each, &each);
    set_room(2, 0, 0, 0); /* places are not known: a row more than now */
    set_rows(2, 4, 400);
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 15, 1e-9);
    set_room(2, 8, 0, 0);
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 18, 1e-9);
    set_room(2, 8, 6, 6); /* pages for six rows as long as those of now */
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 16, 1e-9);
    set_rows(2, 0, 0); /* ... or as the request, which takes more than there is */
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 11, 1e-9);
    set_rates(2, 0, 0);
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 20, 1e-9);
    set_rates(2, 0, 7);
    NEAR(bt_sched_full_step_ms(&X.c, &X.w[2], &X.req), 7, 1e-9);
    /* The context of what is on its way is in no step before it is there. */
    again();
    set_rows(2, 2, 5000);
    set_rows(3, 60, 5000);
    set_coming(2, 2, 0, 30000);
    NEAR(place(&bt_sched_least_load).gaps.step_ms, 10 + 5 + 1, 1e-9);
}

#define T(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_what_just_fits),
        T(test_what_goes_through_the_slab),
        T(test_what_is_kept),
        T(test_hand_off_on_one_node_costs_nothing),
        T(test_of_equal_holders_the_one_that_is_free),
        T(test_fetches_that_gain_nothing),
        T(test_who_shares_a_step_is_not_passed_over),
        T(test_one_worker),
        T(test_turns_of_three),
        T(test_places_and_pages_in_use),
        T(test_rows_that_make_way),
        T(test_full_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
