/* n, best_of and beam search in bodies, and which choices best_of returns. Fixture:
 * front_fixture.h. */
#include "tests/unit/front_fixture.h"

static void leave(int fd)
{
    int before = n_cancelled;
    close(fd);
    WAIT_FOR(n_cancelled > before);
}

static void test_fields_of_a_beam_search(void **state)
{
    (void)state;
    int fd = begin("/v1/completions",
                   "{\"prompt\":\"a\",\"use_beam_search\":true,\"n\":2,\"best_of\":5,"
                   "\"length_penalty\":-0.5,\"early_stopping\":\"never\",\"temperature\":1,"
                   "\"top_k\":-1,\"top_p\":1.0,\"min_p\":0,\"min_tokens\":3,\"seed\":4}");
    const struct bt_gen_spec *s = &now->spec;
    assert_true(s->n == 2 && s->beams.width == 5);
    assert_true(s->beams.length_penalty == -0.5f && s->beams.stop == BT_BEAM_NEVER);
    assert_int_equal(s->sampling.min_new, 3);
    assert_int_equal(s->sampling.logprobs, -1);
    leave(fd);
    fd = begin("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                       "\"use_beam_search\":true,\"n\":3,\"early_stopping\":true,"
                                       "\"temperature\":0,\"stream\":true}");
    s = &now->spec;
    assert_true(s->n == 3 && s->beams.width == 3 && s->beams.stop == BT_BEAM_FULL);
    assert_true(s->beams.length_penalty == 1);
    leave(fd);
    fd = begin("/v1/completions", "{\"prompt\":\"a\",\"use_beam_search\":false,\"best_of\":3,"
                                  "\"early_stopping\":false,\"length_penalty\":1}");
    s = &now->spec;
    assert_true(s->n == 3 && s->beams.width == 0);
    assert_int_equal(s->sampling.logprobs, 0); /* by them the best one is known */
    leave(fd);
    fd = begin("/v1/completions", "{\"prompt\":\"a\",\"use_beam_search\":true,\"max_tokens\":0,"
                                  "\"echo\":true}");
    assert_int_equal(now->spec.beams.width, 0); /* nothing is to be found */
    leave(fd);
}

static void say(struct bt_request *r, uint32_t choice, const char *text, float logprob)
{
    struct bt_gen_token t = {.id = 40, .logprob = logprob};
    delta_to(r, choice, text, &t, 1);
}

/* The mean of a choice's logprobs counts, not their sum. */
static void test_best_of_returns_the_best(void **state)
{
    (void)state;
    int first = n_started;
    int fd = begin("/v1/completions",
                   "{\"prompt\":[\"a\",\"ROMEO:\"],\"n\":2,\"best_of\":4,\"max_tokens\":9}");
    for (uint32_t p = 0; p < 2; p++) {
        struct bt_request *r = live[first + p];
        assert_int_equal(r->spec.n, 4);
        static const float lps[2][4] = {{-3, -1, -2, -4}, {NAN, -4, -2, -0.5f}};
        for (uint32_t k = 0; k < 4; k++) {
            char text[8];
            snprintf(text, sizeof(text), "%u%u", p, k);
            say(r, k, text, lps[p][k]);
            say(r, k, ";", k == 1 ? lps[p][k] - 0.5f : lps[p][k]);
            for (uint32_t i = 0; i < 2 && p == 0 && k == 2; i++) { /* long, with a low sum */
                say(r, k, "", lps[p][k]);
            }
            r->ops->on_finish(r->arg, k, k == 1 ? BT_FINISH_STOP : BT_FINISH_LENGTH, NULL);
        }
    }
    struct bt_request *second = live[first + 1];
    now = live[first];
    done(8, 0);
    now = second;
    done(8, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    static const char *const texts[] = {"01;", "02;", "13;", "12;"};
    assert_int_equal(json_array_size(at(j, "choices")), 4);
    for (size_t i = 0; i < 4; i++) {
        json_t *c = json_array_get(at(j, "choices"), i);
        assert_int_equal(json_integer_value(at(c, "index")), i);
        assert_string_equal(str_at(c, "text"), texts[i]);
        assert_true(json_is_null(at(c, "logprobs"))); /* nobody has asked for them */
        assert_string_equal(str_at(c, "finish_reason"), i == 0 ? "stop" : "length");
    }
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 16);
    json_decref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fields_of_a_beam_search, setup, teardown),
        cmocka_unit_test_setup_teardown(test_best_of_returns_the_best, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
