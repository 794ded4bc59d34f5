/* Requests that are served late: whom that is said of, where they go, whom they would delay. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/policy/sched/sched.h"

#define N_P 4 /* prefill workers 0..3 on nodes 0..3, decode workers 4 and 5 on nodes 4 and 5 */
#define N   6

/* 1 ms a token, nothing for attention: times are token counts. */
static const struct bt_batch_cost prefill_cost = {.token_ns = BT_BATCH_TOKEN_NS(1e6)};
/* 10 ms a step and 1 ms for each thousand tokens of context. */
static const struct bt_batch_cost decode_cost = {.base_ns = 10e6, .kv_ns = 1000};

struct world {
    struct bt_sched_worker w[N];
    struct bt_sched_kvstore k[N];
    struct bt_sched_snapshot s;
    struct bt_sched_request req;
    struct bt_sched_params c;
};

static void world_init(struct world *x)
{
    memset(x, 0, sizeof(*x));
    for (uint32_t i = 0; i < N; i++) {
        x->w[i] = (struct bt_sched_worker){.kvstore = i,
                                           .prefill = i < N_P,
                                           .decode = i >= N_P,
                                           .capacity.slots = 64,
                                           .capacity.pages = i < N_P ? 0 : 1000,
                                           .capacity.pages_free = 1000,
                                           .speed.cost = i < N_P ? &prefill_cost : &decode_cost};
    }
    x->s = (struct bt_sched_snapshot){
        .workers = x->w, .n_workers = N, .kvstores = x->k, .n_kvstores = N};
    /* 10 blocks of 100 tokens; a token's KV takes 0.1 ms on the link */
    x->req = (struct bt_sched_request){.n_tokens = 1000,
                                       .max_new = 100,
                                       .n_choices = 1,
                                       .block_tokens = 100,
                                       .token_bytes = 1000,
                                       .random = 5};
    x->c = (struct bt_sched_params){.prior.prefill_tokens_per_s = 1,
                                    .prior.step_ms = 1,
                                    .prior.link_bytes_per_s = 10e6,
                                    .place.fetch_ratio = 2};
}

#define DECIDE()                                                                                   \
    bt_sched_decide(&bt_sched_baton, &bt_sched_admit_priced, &x.c, &x.s, &x.req, &plan, &rej)

/* Who would miss the objective for the first token is served late, where that holds up nobody. */
static void test_late(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    static struct bt_sched_demand let_in;
    world_init(&x);
    x.c.objective.ttft_ms = 4000;
    x.c.late.wait_ms = 20000;
    x.req.n_tokens = 5000;
    x.w[4].capacity.pages = x.w[5].capacity.pages = 0;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED); /* nobody has it in time */
    assert_true(plan.background && plan.at.prefill < N_P && plan.first.ms >= 5000);
    assert_int_equal(plan.reason, BT_SCHED_BACKGROUND);
    x.c.late.wait_ms = 0;
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    assert_int_equal(rej.miss, BT_SCHED_MISS_TTFT);
    x.c.late.wait_ms = 20000;
    x.req.n_tokens = 3900; /* can be in time */
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_false(plan.background);
    x.req.waited_ms = 200; /* could have been */
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
    x.req.waited_ms = 0;
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 3000; /* in time but for the queue */
    }
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
    assert_float_equal(plan.first.queue_ms, 3000, 1e-6);
    x.s.let_in = &let_in; /* half of their time goes to those in time: the wait is twice as long */
    bt_sched_demand_init(&let_in, 60000);
    bt_sched_demand_note(&let_in, 0, 60000 * (1 - exp(-1.0 / 60)) * N_P / 2);
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_float_equal(plan.first.queue_ms, 6000, 1);
    bt_sched_demand_note(&let_in, 0, 60000 * (1 - exp(-1.0 / 60)) * N_P / 2);
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED); /* all of it: it would never have its turn */
    x.s.let_in = NULL;
    /* Who is in time does not wait for late ones, a late one waits for both. */
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 0;
        x.w[i].queue.late_ms = 9000;
    }
    x.w[2].queue.late_ms = 6000;
    x.req.n_tokens = 1000;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_false(plan.background);
    assert_float_equal(plan.first.ms, 1000, 1);
    /* The longer it would wait the shorter it must be: (1 - 6 / 20)^2 of 20 s. */
    x.req.n_tokens = 9799;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background && plan.at.prefill == 2);
    x.req.n_tokens = 9801;
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    x.w[3].queue.late_ms = 0; /* where nobody waits it may be as long as it is */
    x.req.n_tokens = 50000;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_int_equal(plan.at.prefill, 3);
    /* Other policies refuse it. */
    assert_int_equal(
        bt_sched_decide(&bt_sched_kvcache, &bt_sched_admit_priced, &x.c, &x.s, &x.req, &plan, &rej),
        BT_SCHED_OVERLOADED);
}

/* Its row would take the room of such that are in time: it comes in only where decode workers have
 * room to spare when it comes. The request's own objective says nothing of that. */
static void test_late_rows(void **state)
{
    (void)state;
    static struct bt_sched_forecast f;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.ttft_ms = 4000;
    x.c.objective.tbt_ms = x.c.late.others_tbt_ms = 30;
    x.c.late.wait_ms = 20000;
    x.req.n_tokens = 5000;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
    for (uint32_t i = N_P; i < N; i++) { /* the step of 10 ms is 25: more than 0.7 of its room */
        x.w[i].rows.running = 15;
        x.w[i].rows.kv_tokens = 15000;
    }
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    x.s.forecast = &f; /* rows last half a second, the prompt takes five */
    bt_sched_forecast_init(&f, 100, 500, 0);
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    for (int i = 0; i < 34; i++) {
        bt_sched_forecast_note(&f, 0, 4950, 1000, 500, 1);
    }
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    x.req.n_tokens = 3900; /* in time: as ever */
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    x.s.forecast = NULL;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].rows.running = 0;
        x.w[i].rows.kv_tokens = 0;
    }
    x.c.objective.tbt_ms =
        1; /* nobody has its rows in time, and on an idle worker they harm none */
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
}

/* Late rows on their way make way: they keep late ones out, and nobody who is in time. */
static void test_late_rows_refuse_nobody(void **state)
{
    (void)state;
    static struct bt_sched_forecast f, late;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.ttft_ms = 4000;
    x.c.objective.tbt_ms = x.c.late.others_tbt_ms = 30;
    x.c.late.wait_ms = 20000;
    x.s.forecast = &f;
    x.s.late_forecast = &late;
    bt_sched_forecast_init(&f, 100, 500, 0);
    bt_sched_forecast_init(&late, 100, 500, 0);
    for (int i = 0; i < 60; i++) {
        bt_sched_forecast_note(&late, 0, 900, 1000, 5000, 1);
    }
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED); /* a second of prefill */
    assert_false(plan.background);
    x.req.n_tokens = 5000;
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    bt_sched_forecast_init(&late, 100, 500, 0);
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
}

/* An objective that a single row misses already: late rows make nobody late. */
static void test_an_objective_out_of_reach(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.tbt_ms = x.c.late.others_tbt_ms = 1;
    x.c.late.wait_ms = 20000;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].rows.running = 2;
        x.w[i].rows.kv_tokens = 2000;
    }
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
}

/* Of late prompts that have to wait no more comes in than prefill workers have time for, what takes
 * least first. */
static void test_late_demand(void **state)
{
    (void)state;
    static struct bt_sched_demand late;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.ttft_ms = 400;
    x.c.late.wait_ms = 60000;
    x.s.late_demand = &late;
    bt_sched_demand_init(&late, 60000);
    for (int i = 0; i < 2; i++) { /* twice the time of four workers within a second */
        bt_sched_demand_note(&late, 0, 500);
        bt_sched_demand_note(&late, 0, 3500);
    }
    for (uint32_t i = 0; i < N_P; i++) {
        x.w[i].queue.ms = 2000;
    }
    x.req.n_tokens = 3500;
    assert_int_equal(DECIDE(), BT_SCHED_OVERLOADED);
    x.req.n_tokens = 500;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background);
    x.req.n_tokens = 3500;
    x.w[1].queue.ms = 0; /* nobody waits */
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background && plan.at.prefill == 1);
    x.w[1].queue.ms = 2000;
    x.s.late_demand = NULL;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
}

/* Workers that do both serve late, too. */
static void test_late_both(void **state)
{
    (void)state;
    struct world x;
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    world_init(&x);
    x.c.objective.ttft_ms = 4000;
    x.c.late.wait_ms = 20000;
    x.req.n_tokens = 5000;
    x.s.workers = x.w + N_P;
    x.s.n_workers = N - N_P;
    for (uint32_t i = N_P; i < N; i++) {
        x.w[i].speed.cost = &prefill_cost;
    }
    x.w[4].queue.late_ms = 3000;
    assert_int_equal(DECIDE(), BT_SCHED_PLANNED);
    assert_true(plan.background && plan.at.both && plan.at.decode == 1);
}

struct told {
    struct bt_sched_coming coming;
    int calls;
};

static void tell(void *arg, struct bt_sched_coming *coming_p)
{
    struct told *t = arg;
    *coming_p = t->coming;
    t->calls++;
}

/* Who waits for a prefix that another request is computing: 30 s late by itself, 1 s with 290 of
 * 300 blocks. */
static void test_follows(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        const struct bt_sched_policy *policy;
        uint32_t blocks;
        double ready_ms, waited_ms, compute_ms, late_ms; /* late_ms < 0: it has no late plan */
        bool by_decode, follows;
        int calls;
    } rows[] = {
        {"sooner", &bt_sched_baton, 290, 20000, 0, 30000, 30000, false, true, 1},
        {"it should be there by now", &bt_sched_baton, 290, 0, 0, 30000, 30000, false, true, 1},
        {"refused otherwise", &bt_sched_baton, 290, 50000, 0, 30000, -1, false, true, 1},
        {"computing is sooner", &bt_sched_baton, 290, 29500, 0, 30000, 30000, false, false, 1},
        {"waited before", &bt_sched_baton, 290, 19500, 10000, 30000, 30000, false, false, 1},
        {"nobody computes it", &bt_sched_baton, 0, 0, 0, 30000, 30000, false, false, 1},
        {"saves little", &bt_sched_baton, 5, 0, 0, 30000, -1, false, false, 1},
        {"for too long", &bt_sched_baton, 290, 50000, 9500, 30000, -1, false, false, 1},
        {"short by itself", &bt_sched_baton, 290, 0, 0, 900, -1, false, false, 0},
        {"no place to decode", &bt_sched_baton, 290, 0, 0, 30000, -1, true, false, 0},
        {"no late class", &bt_sched_kvcache, 290, 0, 0, 30000, -1, false, false, 0},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct world x;
        world_init(&x);
        x.c.late.wait_ms = 60000;
        x.w[4].speed.prompt_cost = x.w[5].speed.prompt_cost = &prefill_cost;
        x.req.n_tokens = 30000;
        x.req.waited_ms = rows[i].waited_ms;
        struct told t = {.coming = {rows[i].blocks, rows[i].ready_ms}};
        struct bt_sched_plan late = {.background = true, .first.ms = rows[i].late_ms};
        struct bt_sched_reject rej = {.compute_ms = rows[i].compute_ms,
                                      .by_decode = rows[i].by_decode};
        bool follows = bt_sched_follows(rows[i].policy, &x.c, &x.s, &x.req,
                                        rows[i].late_ms < 0 ? NULL : &late, &rej, tell, &t);
        if (follows != rows[i].follows || t.calls != rows[i].calls) {
            fail_msg("%s: %d, %d calls", rows[i].what, follows, t.calls);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_late_rows),
        cmocka_unit_test(test_late_rows_refuse_nobody),
        cmocka_unit_test(test_an_objective_out_of_reach),
        cmocka_unit_test(test_late_demand),
        cmocka_unit_test(test_follows),
        cmocka_unit_test(test_late_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
