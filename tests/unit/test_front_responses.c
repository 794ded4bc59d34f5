/* OpenAI's POST /v1/responses. Fixture: front_fixture.h. */
#include "tests/unit/front_prompts.h"

#define PATH   "/v1/responses"
#define SIMPLE "{\"input\":\"Hello\",\"max_output_tokens\":8"
#define USER   "{\"role\":\"user\",\"content\":\"Hello\"}"

/* ---- prompts ---- */

/* Both bodies make the same prompt. chat: the messages of a chat body. */
static void same_prompt(const char *members, const char *messages)
{
    char *body = bt_sprintf("{%s}", members);
    char *chat = bt_sprintf("{\"messages\":[%s]}", messages);
    same_prompt_as_chat(PATH, body, chat);
    free(body);
    free(chat);
}

static void test_prompts(void **state)
{
    (void)state;
    same_prompt("\"input\":\"Hello\"", USER);
    same_prompt("\"input\":[" USER "]", USER);
    same_prompt("\"input\":[{\"type\":\"message\",\"role\":\"user\",\"content\":[{\"type\":"
                "\"input_text\",\"text\":\"Hel\"},{\"type\":\"input_text\",\"text\":\"lo\"}]}]",
                "{\"role\":\"user\",\"content\":\"Hel\\nlo\"}");
    same_prompt("\"instructions\":\"Be brief\",\"input\":\"Hello\"",
                "{\"role\":\"system\",\"content\":\"Be brief\"}," USER);
    same_prompt("\"input\":[{\"role\":\"developer\",\"content\":\"Be brief\"}," USER "]",
                "{\"role\":\"developer\",\"content\":\"Be brief\"}," USER);
    /* items of an earlier answer, as a client sends them back */
    same_prompt(
        "\"input\":[" USER
        ",{\"type\":\"reasoning\",\"id\":\"rs_1\",\"summary\":[],\"content\":[{\"type\":"
        "\"reasoning_text\",\"text\":\"hm\"}],\"encrypted_content\":\"x\"},{\"type\":\"message\","
        "\"id\":\"msg_1\",\"status\":\"completed\",\"role\":\"assistant\",\"content\":[{\"type\":"
        "\"output_text\",\"text\":\"Hi\",\"annotations\":[],\"logprobs\":[]}]}," USER "]",
        USER ",{\"role\":\"assistant\",\"content\":\"Hi\",\"reasoning_content\":\"hm\"}," USER);
}

static void test_parameters(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"temperature\":0.5,\"top_p\":0.25,\"seed\":3,\"store\":true,"
                                "\"include\":[\"message.output_text.logprobs\",\"x\"],"
                                "\"top_logprobs\":2,\"truncation\":\"disabled\",\"user\":\"u\"}");
    assert_true(now->spec.sampling.temperature == 0.5f);
    assert_true(now->spec.sampling.top_p == 0.25f);
    assert_int_equal(now->spec.sampling.seed, 3);
    assert_int_equal(now->spec.sampling.logprobs, 2);
    assert_int_equal(now->spec.max_tokens, 8);
    fail_now(500, "enough", 0);
    receive(fd);
    fd = begin(PATH, "{\"input\":\"Hello\"}"); /* the rest of the context */
    assert_int_equal(now->spec.max_tokens, model.max_model_len - now->spec.prompt.n);
    assert_int_equal(now->spec.sampling.logprobs, -1);
    fail_now(500, "enough", 0);
    receive(fd);
}

/* ---- whole responses ---- */

static void test_whole(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"instructions\":\"Be brief\",\"temperature\":0.7,\"metadata\":{"
                                "\"a\":\"b\"}}");
    token("Good \"mor", 5);
    token("row\"", 6);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    uint64_t prompt = now->spec.prompt.n;
    done(2, 4);
    receive(fd);
    assert_int_equal(ans.status, 200);
    json_t *j = parse(ans.body);
    assert_int_equal(strncmp(str_at(j, "id"), "resp_", 5), 0);
    assert_string_equal(str_at(j, "object"), "response");
    assert_string_equal(str_at(j, "status"), "completed");
    assert_string_equal(str_at(j, "model"), MODEL_ID);
    assert_true(json_is_null(at(j, "error")));
    assert_true(json_is_null(at(j, "incomplete_details")));
    assert_int_equal(json_array_size(at(j, "output")), 1);
    assert_string_equal(str_at(j, "output.0.type"), "message");
    assert_string_equal(str_at(j, "output.0.role"), "assistant");
    assert_string_equal(str_at(j, "output.0.status"), "completed");
    assert_int_equal(strncmp(str_at(j, "output.0.id"), "msg_", 4), 0);
    assert_string_equal(str_at(j, "output.0.content.0.type"), "output_text");
    assert_string_equal(str_at(j, "output.0.content.0.text"), "Good \"morrow\"");
    assert_int_equal(json_array_size(at(j, "output.0.content.0.annotations")), 0);
    assert_string_equal(str_at(j, "instructions"), "Be brief");
    assert_string_equal(str_at(j, "metadata.a"), "b");
    assert_string_equal(str_at(j, "text.format.type"), "text");
    assert_int_equal(json_integer_value(at(j, "max_output_tokens")), 8);
    assert_non_null(strstr(ans.body, "\"temperature\":0.7,"));
    assert_int_equal(json_integer_value(at(j, "usage.input_tokens")), prompt);
    assert_int_equal(json_integer_value(at(j, "usage.input_tokens_details.cached_tokens")), 4);
    assert_int_equal(json_integer_value(at(j, "usage.output_tokens")), 2);
    assert_int_equal(json_integer_value(at(j, "usage.total_tokens")), prompt + 2);
    json_decref(j);
}

static void test_incomplete(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"include\":[\"message.output_text.logprobs\"]}");
    token("Good", 5);
    token("", 6);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "status"), "incomplete");
    assert_string_equal(str_at(j, "incomplete_details.reason"), "max_output_tokens");
    assert_string_equal(str_at(j, "output.0.status"), "incomplete");
    /* the token without text has a logprob, too */
    assert_int_equal(json_array_size(at(j, "output.0.content.0.logprobs")), 2);
    assert_true(json_real_value(at(j, "output.0.content.0.logprobs.1.logprob")) == -0.5);
    json_decref(j);
}

/* ---- streams ---- */

/* The i-th event of ans.body; its number must be i. */
static json_t *numbered(int i)
{
    json_t *j = event(i);
    assert_int_equal(json_integer_value(at(j, "sequence_number")), i);
    return j;
}

static void has_event(int i, const char *type, const char *path, const char *expected)
{
    json_decref(numbered(i));
    is_event(i, type, path, expected);
}

static void test_stream(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"stream\":true,\"include\":[\"message.output_text.logprobs\"]}");
    token("", 4); /* the beginning of a character: no event */
    token("Good", 5);
    bt_loop_poll(loop, 1);
    token(" morrow", 6);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(3, 4);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "\r\nContent-Type: text/event-stream\r\n"));
    has_event(0, "response.created", "response.status", "in_progress");
    has_event(1, "response.in_progress", "response.status", "in_progress");
    has_event(2, "response.output_item.added", "item.status", "in_progress");
    has_event(3, "response.content_part.added", "part.text", "");
    json_t *j = numbered(4), *item;
    assert_string_equal(str_at(j, "type"), "response.output_text.delta");
    assert_string_equal(str_at(j, "delta"), "Good");
    assert_int_equal(json_array_size(at(j, "logprobs")), 2);
    assert_int_equal(json_integer_value(at(j, "output_index")), 0);
    assert_int_equal(json_integer_value(at(j, "content_index")), 0);
    json_decref(j);
    has_event(5, "response.output_text.delta", "delta", " morrow");
    has_event(6, "response.output_text.done", "text", "Good morrow");
    has_event(7, "response.content_part.done", "part.text", "Good morrow");
    has_event(8, "response.output_item.done", "item.content.0.text", "Good morrow");
    j = numbered(9);
    assert_string_equal(str_at(j, "type"), "response.completed");
    assert_string_equal(str_at(j, "response.status"), "completed");
    assert_string_equal(str_at(j, "response.output.0.content.0.text"), "Good morrow");
    assert_int_equal(json_array_size(at(j, "response.output.0.content.0.logprobs")), 3);
    assert_int_equal(json_integer_value(at(j, "response.usage.output_tokens")), 3);
    item = numbered(2);
    assert_string_equal(str_at(item, "item.id"), str_at(j, "response.output.0.id"));
    json_decref(item);
    item = numbered(4);
    assert_string_equal(str_at(item, "item_id"), str_at(j, "response.output.0.id"));
    json_decref(item);
    json_decref(j);
}

static void test_stream_without_text(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"stream\":true}");
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(1, 0);
    receive(fd);
    has_event(0, "response.created", "response.status", "in_progress");
    has_event(1, "response.in_progress", "response.status", "in_progress");
    has_event(2, "response.incomplete", "response.incomplete_details.reason", "max_output_tokens");
}

static void test_stream_fails(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"stream\":true}");
    token("Good", 5);
    bt_loop_poll(loop, 1);
    fail_now(503, "no worker is left", 1);
    receive(fd);
    assert_int_equal(ans.status, 200);
    has_event(4, "response.output_text.delta", "delta", "Good");
    has_event(5, "response.failed", "response.error.message", "no worker is left");
    has_event(6, "error", "message", "no worker is left");
    assert_null(strstr(ans.body, "response.completed"));
}

/* The text occurs four times in the end of a stream, which is longer than what may be unsent. */
static void test_long_stream(void **state)
{
    (void)state;
    enum { N = 60000 };
    int fd = begin(PATH, SIMPLE ",\"stream\":true}");
    size_t len = 0, cap = 32 << 20;
    char *text = bt_malloc(cap);
    for (int i = 0; i < N; i++) {
        token("\xc3\xa9\n23456", 5);
        if (i % 100 == 0) {
            bt_loop_poll(loop, 0);
            ssize_t n = recv(fd, text + len, cap - len, 0);
            len += n > 0 ? (size_t)n : 0;
        }
    }
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(N, 0);
    uint64_t until = bt_mono_ns() + PATIENCE_MS * 1000000ull;
    for (ssize_t n = -1; n != 0;) {
        n = recv(fd, text + len, cap - 1 - len, 0);
        len += n > 0 ? (size_t)n : 0;
        assert_true(bt_mono_ns() < until);
        bt_loop_poll(loop, 1);
    }
    close(fd);
    text[len] = '\0';
    char *last = strstr(text, "event: response.completed\ndata: ");
    assert_non_null(last);
    json_t *j = parse(last + 32);
    const char *whole = str_at(j, "response.output.0.content.0.text");
    assert_int_equal(strlen(whole), N * 8);
    for (int i = 0; i < N; i++) {
        assert_memory_equal(whole + 8 * i, "\xc3\xa9\n23456", 8);
    }
    json_decref(j);
    free(text);
}

/* ---- errors ---- */

static void refused(const char *body, const char *word)
{
    receive(post(PATH, body));
    json_t *j = parse(ans.body);
    if (ans.status != 400 || strstr(str_at(j, "error.message"), word) == NULL) {
        fail_msg("no 400 with %s: %d %s", word, ans.status, ans.body);
    }
    assert_string_equal(str_at(j, "error.type"), "invalid_request_error");
    json_decref(j);
}

static void test_bad_bodies(void **state)
{
    (void)state;
    refused("{", "not valid JSON");
    refused("{}", "'input' must be");
    refused("{\"input\":[]}", "'input' must be");
    refused("{\"input\":5}", "'input' must be");
    refused("{\"input\":[5]}", "'input[0].type' is ''");
    refused("{\"input\":[{\"role\":\"tool\",\"content\":\"x\"}]}", "'input[0].role' must be");
    refused("{\"input\":[{\"role\":\"user\",\"content\":5}]}", "'input[0].content' must be");
    refused("{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\"}]}]}",
            "'input[0].content[0].type' is 'input_image'");
    refused("{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_text\"}]}]}",
            "'input[0].content[0].text' must be");
    refused("{\"input\":[{\"role\":\"user\",\"content\":\"x\",\"nmae\":1}]}", "input[0].nmae");
    refused("{\"input\":[{\"type\":\"item_reference\",\"id\":\"x\"}]}", "set store to false");
    refused("{\"input\":[{\"type\":\"web_search_call\"}]}", "'input[0].type' is 'web_search_call'");
    refused("{\"input\":[{\"type\":\"function_call\",\"name\":\"x\",\"arguments\":\"{}\"}]}",
            "input[0].call_id");
    refused("{\"input\":[{\"type\":\"function_call_output\",\"call_id\":\"x\"}]}",
            "'input[0].output' must be");
    refused(SIMPLE ",\"previous_response_id\":\"resp_1\"}", "send the whole conversation");
    refused(SIMPLE ",\"conversation\":\"conv_1\"}", "send the whole conversation");
    refused(SIMPLE ",\"background\":true}", "'background' is not supported");
    refused(SIMPLE ",\"truncation\":\"auto\"}", "'truncation' is not supported");
    refused(SIMPLE ",\"prompt\":{\"id\":\"x\"}}", "'prompt' is not supported");
    refused(SIMPLE ",\"messages\":[]}", "'messages' is not a field of /v1/responses");
    refused(SIMPLE ",\"max_tokens\":8}", "'max_tokens' is not a field of /v1/responses");
    refused(SIMPLE ",\"tools\":[{\"type\":\"web_search\"}]}", "'tools[0].type' is 'web_search'");
    refused(SIMPLE ",\"tools\":[{\"type\":\"function\"}]}", "tools[0].name");
    refused(SIMPLE ",\"tool_choice\":{\"type\":\"file_search\"}}", "'tool_choice' must be");
    refused(SIMPLE ",\"metadata\":{\"a\":1}}", "'metadata' must be");
    refused(SIMPLE ",\"include\":\"x\"}", "'include' must be");
    refused(SIMPLE ",\"top_logprobs\":21}", "top_logprobs");
    refused(SIMPLE ",\"text\":{\"format\":{\"type\":\"xml\"}}}", "'text.format'");
    refused(SIMPLE ",\"reasoning\":5}", "'reasoning' must be an object");
    refused(SIMPLE ",\"temperature\":-1}", "temperature");
    refused("{\"input\":\"Hello\",\"max_output_tokens\":0}", "'max_output_tokens'");
    refused("{\"input\":\"Hello\",\"max_output_tokens\":9999999}", "lower 'max_output_tokens'");
    receive(post(PATH, "{\"input\":\"Hello\",\"max_output_tokens\":9999999}"));
    assert_non_null(strstr(ans.body, "\"param\":\"input\",\"code\":\"context_length_exceeded\""));
}

static void test_count(void **state)
{
    (void)state;
    json_t *j =
        post_json(PATH "/input_tokens", "{\"instructions\":\"Be brief\",\"input\":\"Hello\"}");
    json_t *same = post_json(
        "/tokenize", "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief\"}," USER "]}");
    assert_string_equal(str_at(j, "object"), "response.input_tokens");
    assert_int_equal(json_integer_value(at(j, "input_tokens")),
                     json_integer_value(at(same, "count")));
    json_decref(j);
    json_decref(same);
    receive(post(PATH "/input_tokens", "{}"));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "'input' must be"));
}

static void test_nothing_is_stored(void **state)
{
    (void)state;
    static const char *const methods[][2] = {{"GET", PATH "/resp_1"},
                                             {"DELETE", PATH "/resp_1"},
                                             {"POST", PATH "/resp_1/cancel"},
                                             {"GET", PATH "/resp_1/input_items"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(methods); i++) {
        receive(send_raw(methods[i][0], methods[i][1], "", "", 0));
        assert_int_equal(ans.status, 404);
        assert_non_null(strstr(ans.body, "this server does not store responses"));
    }
    receive(send_raw("GET", PATH, "", "", 0));
    assert_int_equal(ans.status, 405);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_prompts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_parameters, setup, teardown),
        cmocka_unit_test_setup_teardown(test_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_incomplete, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream_without_text, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream_fails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_bodies, setup, teardown),
        cmocka_unit_test_setup_teardown(test_count, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nothing_is_stored, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
