/* Beam searches in the request machine: no token comes before the end, so other messages show that
 * a search goes on; after a failure it begins again, and its client gets each token once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "machine_rig.h"

#define BEAMS 4

static void begin_search(uint32_t n, uint32_t max_tokens)
{
    struct bt_gen_spec s = spec_of(40, max_tokens);
    s.n = n;
    s.beams = (struct bt_beam_conf){.width = BEAMS, .length_penalty = 1};
    begin_spec(s);
    say_status(BT_EV_RESERVED, KV_P, BT_OK, NULL);
    say_status(BT_EV_RESERVED, KV_D, BT_OK, NULL);
}

static void say_choice(uint32_t choice, uint32_t offset, uint32_t token, bt_token_finish_t finish)
{
    struct bt_journal_entry e = {.epoch = T.epoch, .token = token, .finish = finish};
    say(&(struct bt_event){.type = BT_EV_TOKEN,
                           .from = &T.peers[DECODE],
                           .request = T.id,
                           .epoch = T.epoch,
                           .token = {.choice = choice, .offset = offset, .at = &e}});
}

/* The prompt is computed and handed over. */
static void hand_over(void)
{
    say_prefilled(0, START + 30 * MS, START + 90 * MS);
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    say_flow(START + 40 * MS, START + 100 * MS);
    assert_int_equal(T.epoch, 1);
}

/* Both workers have ended when a plan is over. */
static void fails(void)
{
    uint32_t epoch = T.epoch;
    say_status(BT_EV_ENDED, DECODE, BT_ERR_INTERNAL, "it broke");
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    until_planned(epoch + 1);
    say_status(BT_EV_RESERVED, KV_P, BT_OK, NULL);
    say_status(BT_EV_RESERVED, KV_D, BT_OK, NULL);
}

static void test_a_whole_search(void **state)
{
    (void)state;
    begin_search(2, 3);
    assert_int_equal(T.peers[DECODE].own.rows, BEAMS);
    hand_over();
    for (uint32_t i = 0; i < 10; i++) { /* ten times as long as a worker may be silent */
        say_status(BT_EV_SEARCHING, DECODE, BT_OK, NULL);
        pass(950);
    }
    assert_int_equal(T.n_delta, 0);
    for (uint32_t k = 0; k < 2; k++) {
        say_choice(k, 0, TOKEN, BT_TOKEN_GOES_ON);
        say_choice(k, 1, TOKEN + 1, BT_TOKEN_GOES_ON);
        say_choice(k, 2, TOKEN + 2 + k, k == 0 ? BT_TOKEN_STOP : BT_TOKEN_LENGTH);
    }
    assert_true(T.epoch == 1 && T.n_delta == 6 && T.n_finish == 2 && T.n_done == 1);
    assert_int_equal(T.usage.completion_tokens, 6);
    assert_true(metric("vllm:inter_token_latency_seconds_count{model_name=\"m\"}") == 0);
    say_status(BT_EV_ENDED, DECODE, BT_OK, NULL);
    tick();
    assert_int_equal(stats().open, 0);
    assert_int_equal(ordered(BT_ACT_CANCEL, DECODE), 0);
    assert_int_equal(T.peers[DECODE].own.rows, 0);
}

static void test_a_silent_search_is_planned_again(void **state)
{
    (void)state;
    begin_search(2, 3);
    hand_over();
    say_status(BT_EV_SEARCHING, DECODE, BT_OK, NULL);
    pass(900);
    assert_int_equal(T.epoch, 1);
    pass(400);
    assert_int_equal(T.epoch, 2);
}

/* Its decode worker has other things to do first: nobody waits for the prefill worker, which has
 * ended. */
static void test_a_search_may_wait(void **state)
{
    (void)state;
    begin_search(2, 3);
    hand_over();
    T.running = 5;
    for (uint32_t i = 0; i < 10; i++) {
        T.output_ns = T.load_ns = T.now_ns;
        pass(500);
    }
    assert_int_equal(T.epoch, 1);
}

static void test_the_prefill_worker_cannot_search(void **state)
{
    (void)state;
    begin_search(1, 3);
    say_status(BT_EV_SEARCHING, PREFILL, BT_OK, NULL);
    pass(2500); /* is no sign of life of the decode worker's part */
    assert_int_equal(T.n_delta, 0);
    begin(3); /* of a request without beams it means nothing */
    say_status(BT_EV_SEARCHING, DECODE, BT_OK, NULL);
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    until_planned(2); /* its first token has not come */
}

static void test_a_search_begins_again(void **state)
{
    (void)state;
    begin_search(2, 3);
    hand_over();
    say_status(BT_EV_SEARCHING, DECODE, BT_OK, NULL);
    fails();
    assert_true(T.submit.n_tokens == 40 && T.submit.max_new == 3 && T.submit.n == 2);
    /* Half of the answers have come. */
    say_choice(0, 0, TOKEN, BT_TOKEN_GOES_ON);
    say_choice(0, 1, TOKEN + 1, BT_TOKEN_STOP);
    say_choice(1, 0, TOKEN + 2, BT_TOKEN_GOES_ON);
    assert_true(T.n_delta == 3 && T.n_finish == 1);
    fails();
    assert_true(T.submit.n_tokens == 40 && T.submit.max_new == 3 && T.submit.n == 2);
    assert_int_equal(ordered(BT_ACT_SUBMIT, DECODE), 1); /* its choices stay together */
    say_choice(0, 0, TOKEN, BT_TOKEN_GOES_ON);
    say_choice(0, 1, TOKEN + 1, BT_TOKEN_STOP);
    say_choice(1, 0, TOKEN + 2, BT_TOKEN_GOES_ON);
    assert_true(T.n_delta == 3 && T.n_finish == 1);
    say_choice(1, 1, TOKEN + 3, BT_TOKEN_GOES_ON);
    say_choice(1, 2, TOKEN + 4, BT_TOKEN_LENGTH);
    assert_true(T.n_delta == 5 && T.n_finish == 2 && T.n_error == 0);
    say_prefilled(0, START + 30 * MS, START + 90 * MS);
    pass(1000);
    assert_true(T.n_done == 1 && T.usage.completion_tokens == 5 && T.usage.replans == 2);
}

static void test_another_answer_is_no_answer(void **state)
{
    (void)state;
    begin_search(1, 3);
    hand_over();
    say_choice(0, 0, TOKEN, BT_TOKEN_GOES_ON);
    fails();
    say_choice(0, 0, TOKEN + 1, BT_TOKEN_GOES_ON);
    assert_true(T.n_error == 1 && T.http == 500 && T.n_delta == 1);
    assert_non_null(strstr(T.text, "beam search"));
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
        T_(test_a_whole_search),        T_(test_a_silent_search_is_planned_again),
        T_(test_a_search_may_wait),     T_(test_the_prefill_worker_cannot_search),
        T_(test_a_search_begins_again), T_(test_another_answer_is_no_answer),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
