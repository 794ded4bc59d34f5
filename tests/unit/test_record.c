/* What the request machine writes down of traced requests: their stages, with times and
 * predictions. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "machine_rig.h"

static void begin_traced(uint32_t max_tokens)
{
    struct bt_gen_spec s = spec_of(40, max_tokens);
    s.trace.sampled = true;
    begin_spec(s);
}

/* The i-th stage, which must be of this kind. */
static const struct bt_stage *stage(uint32_t i, bt_stage_kind_t kind)
{
    assert_non_null(T.record);
    assert_true(i < T.record->n);
    assert_int_equal(T.record->at[i].kind, kind);
    return &T.record->at[i];
}

static void lasts(const struct bt_stage *s, uint64_t from_ms, uint64_t to_ms)
{
    assert_int_equal((s->start_ns - START) / MS, from_ms);
    assert_int_equal((s->end_ns - START) / MS, to_ms);
}

static void test_stages_of_a_request(void **state)
{
    (void)state;
    begin_traced(3);
    T.now_ns += 100 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    say_prefilled(16, START + 30 * MS, START + 90 * MS);
    say_flow(START + 40 * MS,
             START + 500 * MS); /* that host's clock is wrong: it is not over yet */
    T.now_ns += 50 * MS;
    say_token(DECODE, 1, BT_TOKEN_GOES_ON);
    T.now_ns += 30 * MS;
    assert_null(T.record);
    say_token(DECODE, 2, BT_TOKEN_LENGTH);
    assert_int_equal(T.record->n, 5);
    lasts(stage(0, BT_STAGE_QUEUE), 0, 0);
    const struct bt_stage *s = stage(1, BT_STAGE_PLAN);
    assert_string_equal(s->from, "p");
    assert_string_equal(s->to, "d");
    assert_true(s->tokens == 40 && s->epoch == 1 && s->ttft_ms > 0 && s->prefill_ms > 0);
    s = stage(2, BT_STAGE_PREFILL);
    lasts(s, 30, 90);
    assert_true(s->tokens == 24 && s->cached_tokens == 16 && s->prefill_ms > 0);
    s = stage(3, BT_STAGE_FLOW);
    lasts(s, 40, 100);
    assert_true(s->bytes == 8192 && s->segments == 8);
    assert_string_equal(s->from, "kv-p");
    assert_string_equal(s->to, "kv-d");
    s = stage(4, BT_STAGE_DECODE);
    lasts(s, 100, 180);
    assert_int_equal(s->tokens, 3);
    assert_string_equal(T.record->finish, "length");
    assert_true(T.record->http == 0 && T.record->first_ns == START + 100 * MS);
}

static void test_a_plan_that_fails(void **state)
{
    (void)state;
    begin_traced(3);
    T.now_ns += 100 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    T.now_ns += 10 * MS;
    say_status(BT_EV_GRANT_FAILED, KV_D, BT_ERR_IO, "the disk burns");
    until_planned(2);
    uint64_t again_ms = (T.now_ns - START) / MS;
    T.now_ns += 10 * MS;
    say_token(PREFILL, 0, BT_TOKEN_GOES_ON);
    bt_machine_cancel(T.mc, T.r, T.now_ns);
    T.r = NULL;
    apply();
    lasts(stage(2, BT_STAGE_DECODE), 100, 100);
    const struct bt_stage *s = stage(3, BT_STAGE_REPLAN);
    lasts(s, 110, again_ms);
    assert_non_null(strstr(s->why, "the disk burns"));
    assert_int_equal(stage(4, BT_STAGE_PLAN)->epoch, 2);
    assert_int_equal(stage(5, BT_STAGE_DECODE)->epoch, 2);
    assert_int_equal(T.record->n, 6);
    assert_string_equal(T.record->finish, "abort");
}

static void test_a_request_that_is_refused(void **state)
{
    (void)state;
    T.nobody = true;
    begin_traced(3);
    pass(700);
    assert_int_equal(T.http, 503);
    assert_int_equal(T.record->n, 1);
    lasts(stage(0, BT_STAGE_QUEUE), 0, (T.record->ended_ns - START) / MS);
    assert_true(T.record->http == 503 && T.record->first_ns == 0 && T.record->error[0] != '\0');
}

static void test_an_untraced_one_has_none(void **state)
{
    (void)state;
    begin(1);
    say_token(PREFILL, 0, BT_TOKEN_LENGTH);
    pass(1000);
    assert_int_equal(T.n_done, 1);
    assert_null(T.record);
}

/* Many failures do not fill the memory. */
static void test_stages_are_bounded(void **state)
{
    struct bt_requests_config conf = config();
    (void)state;
    stop(NULL);
    conf.max_replans = 100;
    create(&conf);
    begin_traced(3);
    for (uint32_t epoch = 1; epoch < 60; epoch++) {
        until_planned(epoch);
        T.n_orders = 0; /* they are not looked at */
        say_status(BT_EV_GRANT_FAILED, KV_D, BT_ERR_IO, "again");
    }
    bt_machine_cancel(T.mc, T.r, T.now_ns);
    T.r = NULL;
    apply();
    assert_int_equal(T.record->n, BT_STAGES_MAX);
    assert_true(T.record->lost > 0);
}

static int load(void **state)
{
    char err[256];
    (void)state;
    bt_log_init("test", "record", BT_LOG_ERROR, false);
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
        T_(test_stages_of_a_request),       T_(test_a_plan_that_fails),
        T_(test_a_request_that_is_refused), T_(test_an_untraced_one_has_none),
        T_(test_stages_are_bounded),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
