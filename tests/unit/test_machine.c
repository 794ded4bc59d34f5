/* The request machine with workers that say what the test tells them: what it orders and tells its
 * client, when, and what it counts. Each limit is looked at to the millisecond. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "machine_rig.h"

/* ---- one request ---- */

static void test_a_whole_life(void **state)
{
    struct bt_requests_stats s;
    (void)state;
    begin(3);
    assert_int_equal(ordered(BT_ACT_RESERVE, KV_P), 1);
    assert_int_equal(ordered(BT_ACT_RESERVE, KV_D), 1);
    assert_int_equal(ordered(BT_ACT_SUBMIT, PREFILL), 1);
    assert_int_equal(ordered(BT_ACT_SUBMIT, DECODE), 1);
    s = stats();
    assert_true(s.running == 1 && s.waiting == 0 && s.open == 1 && s.total == 1);
    assert_int_equal(bt_machine_on_worker(T.mc, &T.peers[PREFILL]), 1);
    assert_int_equal(bt_machine_on_worker(T.mc, &T.peers[DECODE]), 1);
    assert_int_equal(bt_machine_on_node(T.mc, "n0"), 1);
    assert_int_equal(bt_machine_on_node(T.mc, "n1"), 1);
    assert_int_equal(bt_machine_on_node(T.mc, "n2"), 0);
    say_status(BT_EV_RESERVED, KV_P, BT_OK, NULL);
    say_status(BT_EV_RESERVED, KV_D, BT_OK, NULL);
    T.now_ns += 100 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    assert_int_equal(T.n_delta, 1);
    say_prefilled(64, START + 30 * MS, START + 90 * MS); /* more than the prompt has */
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    assert_int_equal(bt_machine_on_worker(T.mc, &T.peers[PREFILL]), 0);
    assert_int_equal(ordered(BT_ACT_RELEASE, KV_P), 0); /* its slots are still read */
    say_flow(START + 40 * MS, START + 100 * MS);
    assert_int_equal(ordered(BT_ACT_RELEASE, KV_P), 1);
    T.now_ns += 50 * MS;
    say_token(DECODE, 1, BT_TOKEN_GOES_ON);
    say_token(DECODE, 1, BT_TOKEN_GOES_ON); /* once more: dropped */
    assert_int_equal(T.n_delta, 2);
    assert_true(metric("baton_stale_messages_total") == 1);
    T.now_ns += 30 * MS;
    assert_int_equal(T.n_finish, 0);
    say_token(DECODE, 2, BT_TOKEN_LENGTH);
    assert_int_equal(T.n_delta, 3);
    assert_true(T.n_finish == 1 && T.finish == BT_FINISH_LENGTH && T.n_done == 1);
    assert_int_equal(T.n_error, 0);
    const struct bt_gen_usage *u = &T.usage;
    assert_int_equal(u->prompt_tokens, 40);
    assert_int_equal(u->completion_tokens, 3);
    assert_int_equal(u->cached_tokens, 40);
    assert_int_equal(u->kv_bytes, 8192);
    assert_int_equal(u->kv_segments, 8);
    assert_int_equal(u->replans, 0);
    assert_string_equal(u->prefill, "p");
    assert_string_equal(u->decode, "d");
    assert_true(fabs(u->ttft_ms - 100) < 1e-6 && fabs(u->decode_ms - 80) < 1e-6);
    assert_true(fabs(u->queue_ms - 30) < 1e-6 && fabs(u->prefill_ms - 60) < 1e-6);
    assert_true(fabs(u->tbt_ms - 50) < 1e-3);
    assert_true(fabs(u->hidden_fraction - (1 - 10.0 / 60)) < 1e-6);
    assert_true(metric("vllm:prompt_tokens_total{model_name=\"m\"}") == 40);
    assert_true(metric("vllm:generation_tokens_total{model_name=\"m\"}") == 3);
    assert_true(metric("vllm:prompt_tokens_cached_total{model_name=\"m\"}") == 40);
    assert_true(metric("vllm:inter_token_latency_seconds_count{model_name=\"m\"}") == 2);
    assert_true(metric("vllm:time_to_first_token_seconds_count{model_name=\"m\"}") == 1);
    assert_true(metric("vllm:e2e_request_latency_seconds_count{model_name=\"m\"}") == 1);
    assert_true(metric("vllm:request_queue_time_seconds_count{model_name=\"m\"}") == 1);
    assert_true(metric("vllm:request_success_total{model_name=\"m\",finished_reason=\"length\"}") ==
                1);
    s = stats();
    assert_true(s.running == 0 && s.open == 1); /* its decode worker has yet to end */
    assert_int_equal(ordered(BT_ACT_CANCEL, DECODE), 0);
    say_status(BT_EV_ENDED, DECODE, BT_OK, NULL);
    tick();
    assert_int_equal(ordered(BT_ACT_RELEASE, KV_D), 1);
    assert_int_equal(stats().open, 0);
    assert_true(T.peers[DECODE].own.rows == 0 && bt_list_empty(&T.peers[DECODE].own_flights));
    assert_int_equal(T.n_orders, 6);
}

static void count_infos(void *arg, const struct bt_request_info *info)
{
    struct bt_request_info *last = arg;
    last->n++;
    last->age_ms = info->age_ms;
    last->tokens = info->tokens;
    last->prompt_tokens = info->prompt_tokens;
    last->epoch = info->epoch;
    last->wire_id = info->wire_id;
    assert_string_equal(info->id, "cmpl-1");
}

static struct bt_request_info infos(void)
{
    struct bt_request_info last = {0};
    bt_machine_each(T.mc, count_infos, &last, T.now_ns);
    return last;
}

/* What operators see of it while it lives, and afterwards why it was planned so and how it ended.
 */
static void test_what_operators_see(void **state)
{
    (void)state;
    assert_int_equal(infos().n, 0);
    assert_null(bt_machine_explain(T.mc, NULL));
    begin(5);
    T.now_ns += 70 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    struct bt_request_info i = infos();
    assert_true(metric("vllm:num_requests_running{model_name=\"m\"}") == 1);
    assert_true(metric("vllm:num_requests_waiting{model_name=\"m\"}") == 0);
    assert_true(i.n == 1 && i.age_ms == 70 && i.tokens == 1 && i.prompt_tokens == 40);
    assert_true(i.epoch == 1 && i.wire_id == T.id);
    const struct bt_explanation *e = bt_machine_explain(T.mc, "cmpl-1");
    assert_non_null(e);
    assert_ptr_equal(bt_machine_explain(T.mc, NULL), e);
    assert_null(bt_machine_explain(T.mc, "cmpl-2"));
    assert_true(e->planned && !e->both && e->wire_id == T.id && !e->actual.over);
    assert_int_equal(e->n_tokens, 40);
    assert_int_equal(e->planned_ns, START + WALL);
    bt_machine_cancel(T.mc, T.r, T.now_ns);
    apply();
    assert_int_equal(ordered(BT_ACT_CANCEL, PREFILL), 1);
    assert_int_equal(ordered(BT_ACT_CANCEL, DECODE), 1);
    assert_int_equal(ordered(BT_ACT_RELEASE, KV_P), 1);
    assert_int_equal(ordered(BT_ACT_RELEASE, KV_D), 1);
    e = bt_machine_explain(T.mc, "cmpl-1");
    assert_true(e->actual.over && e->actual.tokens == 1);
    assert_string_equal(e->actual.error, "cancelled by its client");
    assert_int_equal(T.n_done + T.n_error, 0);
    assert_int_equal(infos().n, 1); /* its workers have not ended */
    assert_true(metric("vllm:request_success_total{model_name=\"m\",finished_reason=\"abort\"}") ==
                1);
    all_end();
    tick();
    assert_int_equal(infos().n, 0);
    assert_int_equal(stats().open, 0);
}

/* ---- limits of time ---- */

static void test_nobody_is_there(void **state)
{
    (void)state;
    T.nobody = true;
    begin(5);
    assert_int_equal(stats().waiting, 1);
    assert_true(metric("vllm:num_requests_waiting{model_name=\"m\"}") == 1);
    pass(500);
    assert_int_equal(T.n_error, 0);
    pass(1);
    assert_int_equal(T.http, 503);
    assert_int_equal(T.retry_s, 1);
    assert_true(rejected("no_worker") == 1);
    assert_string_equal(bt_machine_explain(T.mc, NULL)->actual.error, T.text);
    assert_string_equal(T.text, "no worker is up");
}

static void test_the_time_limit_of_a_request(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) { /* with the workers, and before */
        struct bt_gen_spec s = spec_of(40, 5);
        s.timeout_ms = 333;
        T.nobody = i == 1;
        begin_spec(s);
        pass(332);
        assert_int_equal(T.n_error, 0);
        pass(1);
        assert_int_equal(T.n_error, 1);
        assert_int_equal(T.http, 504);
        assert_true(rejected("deadline") == 1 + i);
        all_end();
    }
}

static void test_what_is_no_request(void **state)
{
    (void)state;
    struct bt_gen_spec bad[5];
    for (uint32_t i = 0; i < 5; i++) {
        bad[i] = spec_of(i == 0 ? 0 : 40, 5);
    }
    bad[1].max_tokens = 0;
    bad[2].n = 17;
    bad[3].prompt.ids[39] = TOKEN + 50; /* of the vocabulary the first that is not */
    bad[4].prompt.ids[0] = UINT32_MAX;
    for (uint32_t i = 0; i < 5; i++) {
        begin_spec(bad[i]);
        assert_int_equal(T.n_error, 1);
        assert_int_equal(T.http, 400);
        assert_true(rejected("invalid") == i + 1);
    }
    assert_int_equal(T.n_orders, 0);
    struct bt_gen_spec good = spec_of(1, 1);
    good.n = 16;
    good.prompt.ids[0] = TOKEN + 49;
    begin_spec(good);
    assert_int_equal(T.n_error, 0);
    assert_true(T.n_orders > 0);
}

/* A grant that fails ends the request only if the request is at fault; without a reason it does not
 * count as a good one. */
static void test_a_grant_that_fails(void **state)
{
    (void)state;
    begin(5);
    say_status(BT_EV_RESERVED, KV_P, BT_OK, NULL);
    say_status(BT_EV_RESERVED, KV_D, BT_OK, NULL);
    say_status(BT_EV_GRANT_FAILED, KV_P, BT_OK, NULL);
    until_planned(2);
    assert_int_equal(T.n_error, 0);
    say_status(BT_EV_RESERVED, KV_P, BT_OK, NULL);
    say_status(BT_EV_RESERVED, KV_D, BT_OK, NULL);
    say_status(BT_EV_GRANT_FAILED, KV_D, BT_ERR_TOO_LARGE, "larger than the slab");
    assert_int_equal(T.n_error, 1);
    assert_int_equal(T.http, 400);
}

/* The answer is complete, but nothing was said of the prefill: the client waits for that so long.
 */
static void test_numbers_that_do_not_come(void **state)
{
    (void)state;
    begin(1);
    say_token(PREFILL, 0, BT_TOKEN_STOP);
    assert_true(T.n_finish == 1 && T.finish == BT_FINISH_STOP && T.n_done == 0);
    assert_int_equal(ordered(BT_ACT_CANCEL, DECODE), 1); /* it has nothing to do */
    pass(300);
    assert_int_equal(T.n_done, 0);
    pass(1);
    assert_int_equal(T.n_done, 1);
    assert_true(T.usage.prefill_ms < 0 && T.usage.queue_ms < 0);
    all_end();
}

/* A worker that never says that it has ended is given up. */
static void test_a_worker_that_does_not_end(void **state)
{
    (void)state;
    begin(5);
    bt_machine_cancel(T.mc, T.r, T.now_ns);
    apply();
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    pass(700);
    assert_int_equal(stats().open, 1);
    assert_true(metric("baton_requests_never_ended_total") == 0);
    pass(1);
    tick();
    assert_int_equal(stats().open, 0);
    assert_true(metric("baton_requests_never_ended_total") == 1);
    assert_int_equal(T.peers[DECODE].own.rows, 0);
}

/* A worker that finishes nothing at all hangs: behind a first token for a stall, before it for
 * twice the predicted time more. The request is planned again with what the client has. */
static void test_a_worker_that_hangs(void **state)
{
    (void)state;
    begin(5);
    pass(1000 + 2 * 40); /* the prior: a token a millisecond */
    assert_int_equal(stats().replanned, 0);
    pass(1);
    assert_int_equal(stats().replanned, 1);
    assert_true(metric("baton_requests_replanned_total") == 1);
    uint64_t lost_ns = T.now_ns;
    until_planned(2); /* longer after a death than after a failure */
    assert_in_range(T.now_ns - lost_ns, 50 * MS, 55 * MS);
    assert_non_null(strstr(bt_machine_explain(T.mc, NULL)->again, "p has not finished anything"));
    T.now_ns += 10 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    pass(1000);
    assert_int_equal(stats().replanned, 1);
    pass(1);
    assert_int_equal(stats().replanned, 2);
    until_planned(3);
    assert_non_null(strstr(bt_machine_explain(T.mc, NULL)->again, "d has not finished anything"));
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON); /* the answer goes on where it was */
    assert_int_equal(T.n_delta, 2);
    assert_int_equal(T.n_error, 0);
}

/* It finishes something, but not this request: that is looked at by its own limits. */
static void test_a_request_that_is_forgotten(void **state)
{
    (void)state;
    begin(5);
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    for (uint32_t second = 0; second < 2; second++) {
        until_planned(1 + second);
        T.running = 0; /* its worker has no request, by its own word */
        for (uint64_t ms = 0; ms < 2000; ms += 50) {
            T.output_ns = T.now_ns;
            T.load_ns = T.now_ns;
            pass(50);
        }
        T.load_ns = T.output_ns = T.now_ns;
        tick();
        assert_true(metric("baton_requests_stuck_total") == second);
        T.now_ns += MS;
        T.load_ns = T.output_ns = T.now_ns;
        tick();
        assert_true(metric("baton_requests_stuck_total") == 1 + second);
    }
    assert_int_equal(T.n_error, 1); /* the second time without progress */
    assert_int_equal(T.http, 500);
    assert_non_null(strstr(T.text, "in two attempts in a row"));
    assert_true(rejected("failed") == 1);
}

/* ---- places ---- */

static void test_places_and_queue(void **state)
{
    (void)state;
    struct bt_request *all[13];
    for (uint32_t i = 0; i < 12; i++) { /* 4 run, 8 wait */
        begin(5);
        all[i] = T.r;
        assert_int_equal(T.n_error, 0);
        assert_int_equal(stats().running, BT_MIN(i + 1, 4u));
        assert_int_equal(stats().waiting, i < 4 ? 0 : i - 3);
    }
    begin(5);
    assert_int_equal(T.http, 429);
    assert_true(rejected("queue_full") == 1);
    assert_int_equal(T.retry_s, 1);
    struct bt_gen_spec s = spec_of(40, 5); /* a higher class takes the place of a lower one */
    s.priority = -1;
    begin_spec(s);
    all[12] = T.r;
    assert_true(rejected("queue_full") == 2);
    assert_int_equal(stats().waiting, 8);
    bt_machine_cancel(T.mc, all[0], T.now_ns); /* ... and the next place among the running */
    apply();
    uint32_t before = T.n_orders;
    turn();
    assert_int_equal(stats().waiting, 7);
    assert_true(T.n_orders > before);
    assert_int_equal(bt_machine_prompts_max(T.mc, false), 12);
    assert_int_equal(bt_machine_prompts_max(T.mc, true), 8);
    pass(2000); /* conductor.queue_timeout_ms */
    assert_true(rejected("no_room") + rejected("queue_full") >= 2);
    bt_machine_drain(T.mc);
    assert_true(bt_machine_draining(T.mc));
    begin(5);
    assert_int_equal(T.http, 503);
    assert_true(rejected("draining") == 1);
}

/* What is planned from now on follows the new policy. */
static void test_another_policy(void **state)
{
    (void)state;
    struct bt_sched_params p = bt_machine_config(T.mc)->sched;
    begin(5);
    assert_int_equal(ordered(BT_ACT_SUBMIT, PREFILL), 1);
    bt_machine_cancel(T.mc, T.r, T.now_ns);
    apply();
    all_end();
    p.objective.ttft_ms = 1; /* its 40 tokens take 40 ms */
    bt_machine_set_sched(T.mc, &bt_sched_least_load, &bt_sched_admit_early, &p);
    assert_ptr_equal(bt_machine_config(T.mc)->policy, &bt_sched_least_load);
    assert_ptr_equal(bt_machine_config(T.mc)->admission, &bt_sched_admit_early);
    T.http = 0;
    begin(5);
    assert_int_equal(T.http, 429);
}

static int load(void **state)
{
    char err[256];
    (void)state;
    bt_log_init("test", "machine", BT_LOG_ERROR, false);
    return bt_tokenizer_load(MODEL_DIR, &tok, err, sizeof(err));
}

static int unload(void **state)
{
    (void)state;
    bt_tokenizer_destroy(tok);
    return 0;
}

#define T_(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T_(test_a_whole_life),
        T_(test_what_operators_see),
        T_(test_nobody_is_there),
        T_(test_the_time_limit_of_a_request),
        T_(test_what_is_no_request),
        T_(test_a_grant_that_fails),
        T_(test_numbers_that_do_not_come),
        T_(test_a_worker_that_does_not_end),
        T_(test_a_worker_that_hangs),
        T_(test_a_request_that_is_forgotten),
        T_(test_places_and_queue),
        T_(test_another_policy),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
