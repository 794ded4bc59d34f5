/* What a simulated conductor learns of answers' lengths, and what that is worth. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "conductor/sim/report.h"
#include "conductor/sim/sim.h"

enum { N_REQ = 1500, TBT_MS = 60 };

/* Prompts of one block have answers of 400 tokens, prompts of seven blocks answers of 12. Nothing
 * is shared. */
static void make_trace(struct bt_sim_trace *t, double gap_ms)
{
    static struct bt_sim_request req[N_REQ];
    static uint32_t blocks[7 * N_REQ];
    uint32_t n = 0;
    for (uint32_t i = 0; i < N_REQ; i++) {
        bool talks = i % 3 == 0;
        uint32_t k = talks ? 1 : 7;
        req[i] = (struct bt_sim_request){.at_ms = gap_ms * i,
                                         .input = 512 * k - 100,
                                         .output = talks ? 400 : 12,
                                         .first = n,
                                         .n_blocks = k};
        for (uint32_t b = 0; b < k; b++, n++) {
            blocks[n] = n;
        }
    }
    *t = (struct bt_sim_trace){
        .requests = req, .n = N_REQ, .blocks = blocks, .n_blocks = n, .n_unique = n};
}

/* More than the places of the decode node, which those with long answers fill. All alike: their
 * lives are told like the others', so too many of them are let in. By length of prompt: who takes
 * least comes in first, and no row waits for a place. */
static void test_short_answers_come_in(void **state)
{
    (void)state;
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    struct bt_sim_summary s[2];
    uint32_t talkers[2] = {0, 0};
    char err[256];
    make_trace(&t, 40);
    assert_int_equal(bt_sim_cluster_load("a800-70b", &c, err, sizeof(err)), BT_OK);
    c.prefill_nodes = 4;
    c.decode_nodes = 1;
    c.rows_max = 32;
    for (int learned = 0; learned < 2; learned++) {
        struct bt_sim_options o = {.policy = &bt_sched_kvcache,
                                   .admission = &bt_sched_admit_priced,
                                   .rate = 1,
                                   .to = 1,
                                   .seed = 1,
                                   .ttft_ms = 10000,
                                   .tbt_ms = TBT_MS,
                                   .demand_price = 0.4,
                                   .life_ms = 10000,
                                   .lengths = learned != 0};
        struct bt_sim_result r;
        bt_sim_run(&c, &t, &o, &r);
        bt_sim_summarize(&r, &o, &s[learned]);
        for (uint32_t i = 0; i < r.n; i += 3) {
            talkers[learned] += r.records[i].outcome == BT_SIM_SERVED;
        }
        bt_sim_result_cleanup(&r);
    }
    assert_true(s[1].tbt_ms.p99 < TBT_MS);
    assert_true(s[1].good > 1.15 * s[0].good);
    assert_true(talkers[1] < talkers[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_answers_come_in),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
