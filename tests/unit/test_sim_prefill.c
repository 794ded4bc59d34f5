/* A simulated prefill node: the worker's batcher cuts its steps, late prompts give way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "conductor/sim/prefill.h"

#define CHUNK 2048

/* A step costs 5 ms and 0.1 ms a token. */
static const struct bt_batch_cost cost = {.base_ns = 5e6, .token_ns = BT_BATCH_TOKEN_NS(1e5)};

static void begin(void *arg, struct bt_sim_job *job)
{
    uint32_t *begun = arg;
    *begun = *begun * 10 + job->id;
}

static void test_gives_way(void **state)
{
    (void)state;
    struct bt_sim_prefill p;
    struct bt_sim_job late = {.id = 1, .late = true, .len = 1000}, prompt = {.id = 2, .len = 512};
    uint32_t begun = 0;
    bt_sim_prefill_init(&p, &cost, CHUNK);
    assert_true(bt_sim_prefill_idle(&p));
    assert_true(bt_sim_prefill_step(&p, 0, begin, &begun) < 0);
    bt_sim_prefill_add(&p, &late);
    /* A step of a late prompt is no longer than BT_BATCH_LATE_NS: whole blocks of 64 tokens. */
    assert_float_equal(bt_sim_prefill_step(&p, 10, begin, &begun), 10 + 5 + 44.8, 1e-9);
    bt_sim_prefill_add(&p, &prompt);
    assert_float_equal(bt_sim_prefill_step(&p, 20, begin, &begun), 59.8, 1e-9); /* under way */
    assert_null(bt_sim_prefill_end(&p));
    assert_int_equal(late.pos, 448);
    assert_float_equal(bt_sim_prefill_step(&p, 59.8, begin, &begun), 59.8 + 5 + 51.2, 1e-9);
    assert_ptr_equal(bt_sim_prefill_end(&p), &prompt);
    double now = 116;
    struct bt_sim_job *done = NULL;
    while (done == NULL) {
        now = bt_sim_prefill_step(&p, now, begin, &begun);
        assert_true(p.stepping);
        done = bt_sim_prefill_end(&p);
    }
    assert_ptr_equal(done, &late);
    assert_int_equal(begun, 12);
    assert_true(bt_sim_prefill_idle(&p));
}

/* Two short prompts share a step where that pays; both are over with it. */
static void test_shares_steps(void **state)
{
    (void)state;
    struct bt_sim_prefill p;
    struct bt_sim_job a = {.id = 1, .len = 10}, b = {.id = 2, .len = 10},
                      c = {.id = 3, .len = 2000};
    uint32_t begun = 0;
    bt_sim_prefill_init(&p, &cost, CHUNK);
    bt_sim_prefill_add(&p, &a);
    bt_sim_prefill_add(&p, &b);
    bt_sim_prefill_add(&p, &c);
    assert_float_equal(bt_sim_prefill_step(&p, 0, begin, &begun), 7, 1e-9);
    assert_int_equal(begun, 12); /* the long one would keep both of them waiting */
    assert_ptr_equal(bt_sim_prefill_end(&p), &a);
    assert_ptr_equal(a.next, &b);
    assert_null(b.next);
    assert_float_equal(bt_sim_prefill_step(&p, 7, begin, &begun), 7 + 205, 1e-9);
    assert_ptr_equal(bt_sim_prefill_end(&p), &c);
}

static void fetches(void *arg, struct bt_sim_job *job)
{
    (void)arg;
    if (job->id == 1) { /* its second half is fetched */
        job->stop = 1024;
        job->resume = 1536;
        job->fetch_ms = 500;
    }
}

/* A prompt that waits for its fetch lets others pass, and goes on behind what was fetched. */
static void test_waits_for_fetch(void **state)
{
    (void)state;
    struct bt_sim_prefill p;
    struct bt_sim_job a = {.id = 1, .len = 2000}, b = {.id = 2, .len = 512};
    bt_sim_prefill_init(&p, &cost, CHUNK);
    bt_sim_prefill_add(&p, &a);
    bt_sim_prefill_add(&p, &b);
    assert_float_equal(bt_sim_prefill_step(&p, 0, fetches, NULL), 5 + 102.4, 1e-9);
    assert_null(bt_sim_prefill_end(&p));
    assert_float_equal(bt_sim_prefill_step(&p, 107.4, fetches, NULL), 107.4 + 5 + 51.2, 1e-9);
    assert_ptr_equal(bt_sim_prefill_end(&p), &b);
    uint32_t version = p.version;
    assert_float_equal(bt_sim_prefill_step(&p, 163.6, fetches, NULL), 500, 1e-9);
    assert_true(!p.stepping && p.version != version);
    assert_float_equal(bt_sim_prefill_step(&p, 500, fetches, NULL), 500 + 5 + 46.4, 1e-9);
    assert_ptr_equal(bt_sim_prefill_end(&p), &a);
}

static void note(void *arg, uint32_t id)
{
    uint32_t *ids = arg;
    *ids = *ids * 10 + id;
}

static void test_loses_all(void **state)
{
    (void)state;
    struct bt_sim_prefill p;
    struct bt_sim_job jobs[] = {{.id = 1, .len = 900},
                                {.id = 2, .late = true, .len = 900},
                                {.id = 3, .len = 900},
                                {.id = 4, .len = 900}};
    uint32_t ids = 0;
    bt_sim_prefill_init(&p, &cost, CHUNK);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(jobs); i++) {
        bt_sim_prefill_add(&p, &jobs[i]);
    }
    (void)bt_sim_prefill_step(&p, 0, begin, &ids);
    uint32_t version = p.version;
    ids = 0;
    bt_sim_prefill_fail(&p, note, &ids);
    assert_int_equal(ids, 1342);
    assert_true(bt_sim_prefill_idle(&p) && p.version != version);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gives_way),
        cmocka_unit_test(test_shares_steps),
        cmocka_unit_test(test_waits_for_fetch),
        cmocka_unit_test(test_loses_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
