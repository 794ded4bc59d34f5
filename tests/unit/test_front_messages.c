/* Anthropic's POST /v1/messages and count_tokens. Fixture: front_fixture.h. */
#include "tests/unit/front_prompts.h"

#define PATH   "/v1/messages"
#define COUNT  PATH "/count_tokens"
#define USER   "{\"role\":\"user\",\"content\":\"Hello\"}"
#define SIMPLE "{\"max_tokens\":8,\"messages\":[" USER "]"

/* ---- prompts ---- */

/* Both bodies make the same prompt. chat: the messages of a chat body. */
static void same_prompt(const char *members, const char *chat)
{
    char *body = bt_sprintf("{\"max_tokens\":8,%s}", members);
    char *chat_body = bt_sprintf("{\"max_tokens\":8,%s}", chat);
    same_prompt_as_chat(PATH, body, chat_body);
    free(body);
    free(chat_body);
}

static void test_prompts(void **state)
{
    (void)state;
    same_prompt("\"messages\":[" USER "]", "\"messages\":[" USER "]");
    /* system as a string and as blocks */
    same_prompt("\"system\":\"Be brief\",\"messages\":[" USER "]",
                "\"messages\":[{\"role\":\"system\",\"content\":\"Be brief\"}," USER "]");
    same_prompt("\"system\":[{\"type\":\"text\",\"text\":\"Be\",\"cache_control\":{\"type\":"
                "\"ephemeral\"}},{\"type\":\"text\",\"text\":\"brief\"}],\"messages\":[" USER "]",
                "\"messages\":[{\"role\":\"system\",\"content\":\"Be\\nbrief\"}," USER "]");
    same_prompt("\"system\":[],\"messages\":[" USER "]", "\"messages\":[" USER "]");
    /* turns in a row are one; reasoning goes to the template, which has no place for it */
    same_prompt("\"messages\":[" USER ",{\"role\":\"user\",\"content\":[{\"type\":\"text\","
                "\"text\":\"there\"}]},{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\","
                "\"thinking\":\"hm\",\"signature\":\"x\"},{\"type\":\"redacted_thinking\",\"data\":"
                "\"x\"},{\"type\":\"text\",\"text\":\"Hi\"}]}," USER "]",
                "\"messages\":[{\"role\":\"user\",\"content\":\"Hello\\nthere\"},"
                "{\"role\":\"assistant\",\"content\":\"Hi\"}," USER "]");
    /* later versions have it among the messages, too */
    same_prompt("\"messages\":[{\"role\":\"system\",\"content\":\"Be brief\"}," USER "]",
                "\"messages\":[{\"role\":\"system\",\"content\":\"Be brief\"}," USER "]");
    /* templates without that switch take no notice */
    same_prompt("\"thinking\":{\"type\":\"enabled\"},\"messages\":[" USER "]",
                "\"messages\":[" USER "]");
    /* the answer continues a last turn of the assistant */
    same_prompt("\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":\"Well,\"}]",
                "\"continue_final_message\":true,\"messages\":[" USER
                ",{\"role\":\"assistant\",\"content\":\"Well,\"}]");
}

static void test_parameters(void **state)
{
    (void)state;
    int fd =
        begin(PATH, SIMPLE ",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,"
                           "\"stop_sequences\":[\"a\",\"bc\"],\"metadata\":{\"user_id\":\"u\"},"
                           "\"seed\":3,\"priority\":-2,\"service_tier\":\"auto\"}");
    assert_true(now->spec.sampling.temperature == 0.5f);
    assert_true(now->spec.sampling.top_p == 0.25f);
    assert_int_equal(now->spec.sampling.top_k, 7);
    assert_int_equal(now->spec.sampling.seed, 3);
    assert_int_equal(now->spec.priority, -2);
    assert_int_equal(now->spec.max_tokens, 8);
    assert_string_equal(now->spec.stop[0], "a");
    assert_string_equal(now->spec.stop[1], "bc");
    assert_null(now->spec.stop[2]);
    fail_now(500, "enough", 0);
    receive(fd);
}

static void test_count(void **state)
{
    (void)state;
    json_t *mine = post_json(COUNT, "{\"system\":\"Be brief\",\"messages\":[" USER "]}");
    json_t *same = post_json(
        "/tokenize", "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief\"}," USER "]}");
    assert_int_equal(json_object_size(mine), 1);
    assert_int_equal(json_integer_value(at(mine, "input_tokens")),
                     json_integer_value(at(same, "count")));
    assert_true(json_integer_value(at(mine, "input_tokens")) > 5);
    json_decref(mine);
    json_decref(same);
    receive(post(COUNT, SIMPLE "}"));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "'max_tokens' is not a field of /v1/messages/count_tokens"));
}

/* ---- whole responses ---- */

static void test_whole(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE "}");
    token("Good \"mor", 5);
    token("row\"", 6);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    uint64_t prompt = now->spec.prompt.n;
    done(2, 4);
    receive(fd);
    assert_int_equal(ans.status, 200);
    json_t *j = parse(ans.body);
    assert_int_equal(strncmp(str_at(j, "id"), "msg_", 4), 0);
    assert_string_equal(str_at(j, "type"), "message");
    assert_string_equal(str_at(j, "role"), "assistant");
    assert_string_equal(str_at(j, "model"), MODEL_ID);
    assert_int_equal(json_array_size(at(j, "content")), 1);
    assert_string_equal(str_at(j, "content.0.type"), "text");
    assert_string_equal(str_at(j, "content.0.text"), "Good \"morrow\"");
    assert_string_equal(str_at(j, "stop_reason"), "end_turn");
    assert_true(json_is_null(at(j, "stop_sequence")));
    assert_int_equal(json_integer_value(at(j, "usage.input_tokens")), prompt - 4);
    assert_int_equal(json_integer_value(at(j, "usage.cache_read_input_tokens")), 4);
    assert_int_equal(json_integer_value(at(j, "usage.cache_creation_input_tokens")), 0);
    assert_int_equal(json_integer_value(at(j, "usage.output_tokens")), 2);
    json_decref(j);
    assert_non_null(strstr(ans.head, "\r\nrequest-id: "));
}

static void ends(bt_finish_t reason, const char *stop, const char *expected)
{
    int fd = begin(PATH, SIMPLE ",\"stop_sequences\":[\"END\"]}");
    now->ops->on_finish(now->arg, 0, reason, stop);
    done(1, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "stop_reason"), expected);
    assert_int_equal(json_array_size(at(j, "content")), 0);
    assert_int_equal(json_is_string(at(j, "stop_sequence")), stop != NULL);
    json_decref(j);
}

static void test_ends(void **state)
{
    (void)state;
    ends(BT_FINISH_STOP, NULL, "end_turn");
    ends(BT_FINISH_LENGTH, NULL, "max_tokens");
    ends(BT_FINISH_STOP, "END", "stop_sequence");
}

static void test_long(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE "}");
    for (int i = 0; i < 5000; i++) {
        token("\xc3\xa9\n23456", 5); /* the slices must cut neither a character nor an escape */
    }
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(5000, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    const char *text = str_at(j, "content.0.text");
    assert_int_equal(strlen(text), 5000 * 8);
    for (int i = 0; i < 5000; i++) {
        assert_memory_equal(text + 8 * i, "\xc3\xa9\n23456", 8);
    }
    json_decref(j);
}

/* ---- streams ---- */

static void test_stream(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"stream\":true}");
    uint64_t prompt = now->spec.prompt.n;
    token("", 4); /* the beginning of a character: no event */
    token("Good", 5);
    bt_loop_poll(loop, 1);
    token(" morrow", 6);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(3, 4);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "\r\nContent-Type: text/event-stream\r\n"));
    json_t *j = event(0);
    assert_string_equal(str_at(j, "type"), "message_start");
    assert_string_equal(str_at(j, "message.role"), "assistant");
    assert_int_equal(json_array_size(at(j, "message.content")), 0);
    assert_true(json_is_null(at(j, "message.stop_reason")));
    assert_int_equal(json_integer_value(at(j, "message.usage.input_tokens")), prompt);
    json_decref(j);
    is_event(1, "ping", NULL, NULL);
    is_event(2, "content_block_start", "content_block.type", "text");
    is_event(3, "content_block_delta", "delta.text", "Good");
    is_event(4, "content_block_delta", "delta.text", " morrow");
    is_event(5, "content_block_stop", NULL, NULL);
    j = event(6);
    assert_string_equal(str_at(j, "type"), "message_delta");
    assert_string_equal(str_at(j, "delta.stop_reason"), "end_turn");
    assert_int_equal(json_integer_value(at(j, "usage.output_tokens")), 3);
    assert_int_equal(json_integer_value(at(j, "usage.cache_read_input_tokens")), 4);
    json_decref(j);
    is_event(7, "message_stop", NULL, NULL);
    assert_string_equal(ans.body + strlen(ans.body) - 25, "{\"type\":\"message_stop\"}\n\n");
}

static void test_stream_without_text(void **state)
{
    (void)state;
    int fd = begin(PATH, SIMPLE ",\"stream\":true}");
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(1, 0);
    receive(fd);
    is_event(0, "message_start", NULL, NULL);
    is_event(1, "ping", NULL, NULL);
    is_event(2, "message_delta", "delta.stop_reason", "end_turn");
    is_event(3, "message_stop", NULL, NULL);
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
    is_event(3, "content_block_delta", "delta.text", "Good");
    is_event(4, "error", "error.type", "overloaded_error");
    assert_null(strstr(ans.body, "message_stop"));
}

/* ---- errors ---- */

static void is_error(int status, const char *type, const char *word)
{
    json_t *j = parse(ans.body);
    if (ans.status != status || strstr(ans.body, word) == NULL) {
        fail_msg("not %d with %s: %d %s", status, word, ans.status, ans.body);
    }
    assert_string_equal(str_at(j, "type"), "error");
    assert_string_equal(str_at(j, "error.type"), type);
    assert_true(strlen(str_at(j, "error.message")) > 5);
    char *line = bt_sprintf("\r\nx-request-id: %s\r\n", str_at(j, "request_id"));
    assert_non_null(strstr(ans.head, line));
    free(line);
    json_decref(j);
}

static void refused(const char *body, const char *word)
{
    receive(post(PATH, body));
    is_error(400, "invalid_request_error", word);
}

#define WITH(content)                                                                              \
    "{\"max_tokens\":8,\"messages\":[{\"role\":\"user\",\"content\":[" content "]}]}"

static void test_bad_bodies(void **state)
{
    (void)state;
    refused("{", "not valid JSON");
    refused("{\"messages\":[" USER "]}", "'max_tokens' is missing");
    refused("{\"max_tokens\":0,\"messages\":[" USER "]}", "'max_tokens'");
    refused("{\"max_tokens\":8}", "'messages' must be");
    refused("{\"max_tokens\":8,\"messages\":[]}", "'messages' must be");
    refused("{\"max_tokens\":8,\"messages\":[1]}", "'messages[0].role'");
    refused("{\"max_tokens\":8,\"messages\":[{\"role\":\"tool\",\"content\":\"x\"}]}",
            "'messages[0].role' must be");
    refused("{\"max_tokens\":8,\"messages\":[{\"role\":\"user\",\"content\":[]}]}",
            "'messages[0].content'");
    refused("{\"max_tokens\":8,\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":1}]}",
            "messages[0].name");
    refused(SIMPLE ",\"system\":5}", "'system' must be");
    refused(SIMPLE ",\"system\":[{\"type\":\"image\"}]}", "'system[0].type' is 'image'");
    refused(WITH("{\"type\":\"image\",\"source\":{}}"), "'messages[0].content[0].type' is 'image'");
    refused(WITH("{\"type\":\"document\"}"), "'messages[0].content[0].type' is 'document'");
    refused(WITH("{\"type\":\"text\"}"), "'messages[0].content[0].text'");
    refused(WITH("{\"type\":\"text\",\"text\":\"x\",\"txt\":1}"), "messages[0].content[0].t");
    refused(WITH("{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"b\",\"input\":{}}"),
            "text and tool_result");
    refused(WITH("{\"type\":\"tool_result\"}"), "tool_use_id");
    refused(
        WITH("{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":[{\"type\":\"image\"}]}"),
        "'messages[0].content[0].content[0].type' is 'image'");
    refused(SIMPLE ",\"stop_sequences\":[\"\"]}", "stop string");
    refused(SIMPLE ",\"stop_sequences\":5}", "'stop_sequences' must be");
    refused(SIMPLE ",\"stop\":\"x\"}", "'stop' is not a field of /v1/messages");
    refused(SIMPLE ",\"temperature\":-1}", "temperature");
    refused(SIMPLE ",\"mcp_servers\":[{\"url\":\"x\"}]}", "'mcp_servers' is not supported");
    refused(SIMPLE ",\"container\":\"x\"}", "'container' is not supported");
    refused(SIMPLE ",\"tools\":[{\"type\":\"web_search_20250305\",\"name\":\"web_search\"}]}",
            "'tools[0].type' is 'web_search_20250305'");
    refused(SIMPLE ",\"tools\":[{\"name\":\"x\"}]}", "'tools[0].input_schema'");
    refused(SIMPLE ",\"tool_choice\":\"auto\"}", "'tool_choice' must be an object");
    refused(SIMPLE ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":-5}}",
            "'thinking.budget_tokens' must be a number of tokens from 0 to");
    refused(SIMPLE ",\"thinking\":{\"type\":\"on\"}}", "'thinking' must be");
    refused(SIMPLE ",\"output_config\":{\"format\":{\"type\":\"xml\"}}}", "output_config.format");
    refused("{\"max_tokens\":8,\"messages\":[" USER
            ",{\"role\":\"assistant\",\"content\":[{\"type\":"
            "\"tool_use\",\"id\":\"a\",\"name\":\"b\",\"input\":{}}]}]}",
            "tool_result must follow");
    refused("{\"max_tokens\":9999999,\"messages\":[" USER "]}", "maximum context length");
}

static void test_other_errors(void **state)
{
    (void)state;
    receive(post(PATH, "{\"model\":\"x\",\"max_tokens\":8,\"messages\":[" USER "]}"));
    is_error(404, "not_found_error", "the model 'x' does not exist");
    receive(post(PATH "/batches", "{}"));
    is_error(404, "not_found_error", "there is no");
    receive(send_raw("GET", PATH, "", "", 0));
    is_error(405, "invalid_request_error", "use POST");
    receive(send_raw("POST", PATH, "Content-Type: text/plain\r\n", "{}", 2));
    is_error(415, "invalid_request_error", "Content-Type");
    receive(send_raw("POST", PATH, "anthropic-version: 2020-01-01\r\n", "{}", 2));
    is_error(400, "invalid_request_error", "anthropic-version: '2020-01-01'");
    turn_away_why = "the queue is full";
    receive(post(PATH, SIMPLE "}"));
    is_error(429, "rate_limit_error", "the queue is full");
    assert_non_null(strstr(ans.head, "\r\nRetry-After: 7\r\n"));
    turn_away_why = NULL;
    int fd = begin(PATH, SIMPLE "}");
    fail_now(503, "no worker is left", 3);
    receive(fd);
    is_error(529, "overloaded_error", "no worker is left");
    assert_non_null(strstr(ans.head, "HTTP/1.1 529 Overloaded\r\n"));
    fd = begin(PATH, SIMPLE "}");
    fail_now(500, "it broke", 0);
    receive(fd);
    is_error(500, "api_error", "it broke");
    fd = begin(PATH, SIMPLE "}");
    fail_now(504, "too late", 0);
    receive(fd);
    is_error(504, "timeout_error", "too late");
    receive(send_raw("POST", PATH, "", "", 0));
    is_error(400, "invalid_request_error", "the body is empty");
    /* HTTP itself refuses a body above the limit */
    fd = dial();
    static const char head[] = "POST " PATH " HTTP/1.0\r\nContent-Length: 5242880\r\n\r\n";
    assert_int_equal(send(fd, head, sizeof(head) - 1, MSG_NOSIGNAL), sizeof(head) - 1);
    receive(fd);
    is_error(413, "request_too_large", "the body is larger than");
    /* other paths keep OpenAI's form */
    receive(post("/v1/messagesx", "{}"));
    assert_int_equal(ans.status, 404);
    assert_non_null(strstr(ans.body, "{\"error\":{\"message\":"));
}

/* ---- keys ---- */

#define KEYS_FILE "build/test_front_messages.keys"

static int setup_keys(void **state)
{
    (void)state;
    FILE *f = fopen(KEYS_FILE, "w");
    assert_non_null(f);
    fputs("sk-one tenant=one\nsk-two tenant=two\n", f);
    fclose(f);
    assert_int_equal(chmod(KEYS_FILE, 0600), 0);
    open_front(KEYS_FILE, tmpl);
    return 0;
}

static void with_headers(const char *headers, bool ok)
{
    int before = n_started, fd = send_raw("POST", PATH, headers, SIMPLE "}", strlen(SIMPLE "}"));
    if (ok) {
        WAIT_FOR(n_started == before + 1);
        assert_string_equal(now->spec.tenant, "one");
        now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
        done(1, 0);
    }
    receive(fd);
    if (!ok) {
        is_error(401, "authentication_error", "x-api-key: KEY");
    } else {
        assert_int_equal(ans.status, 200);
    }
}

static void test_keys(void **state)
{
    (void)state;
    with_headers("x-api-key: sk-one\r\n", true);
    with_headers("Authorization: Bearer sk-one\r\n", true);
    with_headers("Authorization: Bearer sk-one\r\nx-api-key: sk-one\r\n", true);
    with_headers("", false);
    with_headers("x-api-key: sk-three\r\n", false);
    with_headers("x-api-key: \r\n", false);
    with_headers("Authorization: Bearer sk-one\r\nx-api-key: sk-two\r\n", false);
    with_headers("Authorization: Basic sk-one\r\nx-api-key: sk-one\r\n", false);
    receive(send_raw("POST", PATH, "x-api-key: sk-one\r\nx-api-key: sk-two\r\n", "{}", 2));
    is_error(400, "invalid_request_error", "the header x-api-key occurs more than once");
    receive(send_raw("GET", "/v1/models", "x-api-key: sk-two\r\n", "", 0));
    assert_int_equal(ans.status, 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_prompts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_parameters, setup, teardown),
        cmocka_unit_test_setup_teardown(test_count, setup, teardown),
        cmocka_unit_test_setup_teardown(test_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ends, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream_without_text, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream_fails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_bodies, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keys, setup_keys, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
