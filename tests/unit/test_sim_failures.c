/* Failures of simulated nodes: what they lose, and what becomes of whom they served. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/sim/decode.h"
#include "conductor/sim/sim.h"

struct lost {
    uint32_t n, id[8], generated[8];
    bool prompt[8];
};

static void note_lost(void *arg, uint32_t id, uint32_t generated, bool prompt)
{
    struct lost *l = arg;
    l->id[l->n] = id;
    l->generated[l->n] = generated;
    l->prompt[l->n++] = prompt;
}

static void test_decode_fails(void **state)
{
    (void)state;
    static const struct bt_batch_cost cost = {.base_ns = 10e6};
    struct bt_sim_decode *d = bt_sim_decode_create(&cost, 1000, 2);
    struct bt_sim_row rows[] = {{.id = 1, .tokens = 10, .steps = 3, .first_ms = 0},
                                {.id = 2, .tokens = 10, .steps = 100, .first_ms = 0},
                                {.id = 3, .tokens = 10, .steps = 100, .first_ms = 0},
                                {.id = 4, .tokens = 10, .steps = 9, .first_ms = 0}};
    struct bt_sim_done done[4];
    struct lost lost = {0};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        assert_true(bt_sim_decode_add(d, 0, &rows[i]));
    }
    assert_int_equal(bt_sim_decode_advance(d, done, 4), 1); /* at 30 ms row 1 ends, row 3 joins */
    bt_sim_decode_fail(d, 75, note_lost, &lost);
    assert_int_equal(lost.n, 3);
    for (uint32_t i = 0; i < 3; i++) { /* 7 steps, 4 of them with row 3; row 4 waits */
        static const uint32_t generated[] = {[2] = 7, [3] = 4, [4] = 0};
        assert_int_equal(lost.generated[i], generated[lost.id[i]]);
        assert_false(lost.prompt[i]);
    }
    assert_true(bt_sim_decode_next_ms(d) < 0 && bt_sim_decode_running(d).reserved == 0);
    assert_true(bt_sim_decode_add(d, 500, &rows[0])); /* it serves again */
    assert_float_equal(bt_sim_decode_next_ms(d), 530, 1e-9);
    bt_sim_decode_destroy(d);
}

static void run_failing(const struct bt_sim_failure *failures, uint32_t n, struct bt_sim_result *r)
{
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    char err[256];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 3;
    c.decode_nodes = 2;
    assert_int_equal(bt_sim_trace_load("tests/sim/small.jsonl", &t, err, sizeof(err)), BT_OK);
    struct bt_sim_options o = {.policy = &bt_sched_baton,
                               .admission = &bt_sched_admit_none,
                               .eviction = &bt_evict_lru,
                               .rate = 2,
                               .to = 1,
                               .seed = 1,
                               .fetch_ratio = 1.5,
                               .life_ms = 10000,
                               .tbt_ms = 100,
                               .mixed_step_ms = 50,
                               .pack_share = 0.75,
                               .failures = failures,
                               .n_failures = n};
    bt_sim_run(&c, &t, &o, r);
    bt_sim_trace_cleanup(&t);
}

/* Whoever had something on a node that failed is planned again, and everybody is served. */
static void test_failures(void **state)
{
    (void)state;
    static const struct bt_sim_failure some[] = {
        {20e3, 10e3, 0}, {30e3, 5e3, 3}, {36e3, 5e3, 4}, {40e3, 1e9, 2}, {50e3, 1e3, 1}};
    struct bt_sim_result whole, r;
    run_failing(NULL, 0, &whole);
    run_failing(some, BT_ARRAY_LEN(some), &r);
    assert_int_equal(whole.replans, 0);
    assert_true(r.prefill_busy_ms > 0 && r.prefill_busy_ms <= r.prefill_node_ms);
    assert_true(r.replans > 10);
    uint32_t interrupted = 0;
    for (uint32_t i = 0; i < r.n; i++) {
        assert_int_equal(r.records[i].outcome, BT_SIM_SERVED);
        assert_true(r.records[i].ttft_ms > 0 && r.records[i].end_ms >= r.records[i].at_ms);
        bool went_on = r.records[i].prefill == 2 && r.records[i].at_ms > 45e3;
        assert_false(went_on); /* it never came back */
        interrupted += r.records[i].end_ms > whole.records[i].end_ms + 1900;
    }
    assert_true(interrupted >= 10);
    /* Failures that overlap are one, to the later return. */
    static const struct bt_sim_failure one = {20.3e3, 29.7e3, 0};
    static const struct bt_sim_failure overlap[] = {
        {20.3e3, 10e3, 0}, {25e3, 25e3, 0}, {26e3, 1e3, 0}};
    struct bt_sim_result as_one;
    run_failing(&one, 1, &as_one);
    bt_sim_result_cleanup(&r);
    run_failing(overlap, BT_ARRAY_LEN(overlap), &r);
    assert_true(as_one.replans > 0);
    assert_int_equal(r.replans, as_one.replans);
    assert_memory_equal(r.records, as_one.records, r.n * sizeof(*r.records));
    bt_sim_result_cleanup(&as_one);
    bt_sim_result_cleanup(&r);
    /* Nobody is left who could decode. */
    static const struct bt_sim_failure both[] = {{30e3, 1e9, 3}, {30e3, 1e9, 4}};
    run_failing(both, 2, &r);
    uint32_t n[BT_SIM_OUTCOMES] = {0};
    for (uint32_t i = 0; i < r.n; i++) {
        n[r.records[i].outcome]++;
    }
    assert_int_equal(n[BT_SIM_PENDING], 0);
    assert_true(n[BT_SIM_SERVED] > 10 && n[BT_SIM_SERVED] < r.n);
    bt_sim_result_cleanup(&r);
    bt_sim_result_cleanup(&whole);
}

/* Prompts of whole blocks, planned again with the token that they have given out: their last block
 * is used then, at another node too, as the policy says. All of them come from node 0, as node 1
 * was away. */
static void test_whole_blocks_again(void **state)
{
    (void)state;
    static const struct bt_sim_failure failures[] = {{0, 20e3, 1}, {25e3, 5e3, 2}};
    struct bt_sim_request requests[40];
    uint32_t blocks[BT_ARRAY_LEN(requests) * 8];
    for (uint32_t i = 0; i < BT_ARRAY_LEN(requests); i++) {
        requests[i] = (struct bt_sim_request){500.0 * i, 4096, 2000, 8 * i, 8};
    }
    for (uint32_t i = 0; i < BT_ARRAY_LEN(blocks); i++) {
        blocks[i] = i;
    }
    struct bt_sim_trace t = {.requests = requests,
                             .n = BT_ARRAY_LEN(requests),
                             .blocks = blocks,
                             .n_blocks = BT_ARRAY_LEN(blocks),
                             .n_unique = BT_ARRAY_LEN(blocks)};
    struct bt_sim_cluster c;
    struct bt_sim_result r;
    char err[256];
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 2;
    c.decode_nodes = 1;
    struct bt_sim_options o = {.policy = &bt_sched_kvcache,
                               .admission = &bt_sched_admit_none,
                               .rate = 1,
                               .to = 1,
                               .seed = 1,
                               .fetch_ratio = 1.5,
                               .life_ms = 10000,
                               .failures = failures,
                               .n_failures = BT_ARRAY_LEN(failures)};
    bt_sim_run(&c, &t, &o, &r);
    uint32_t fetched = 0;
    for (uint32_t i = 0; i < r.n; i++) {
        assert_int_equal(r.records[i].outcome, BT_SIM_SERVED);
        assert_true(r.records[i].end_ms < 300e3);
        fetched += r.records[i].fetched_tokens == 4096;
    }
    assert_true(r.replans > 10 && fetched > 0);
    bt_sim_result_cleanup(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_fails),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_whole_blocks_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
