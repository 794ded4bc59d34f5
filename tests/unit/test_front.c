/* The front over real HTTP with the real tokenizer and template; only the request machine is a
 * double (bt_request_start and its kin below), so that deltas, failures and their order are the
 * test's. The real path is covered by tests/cluster. Runs in the repository root. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "conductor/front/front.h"

#define MODEL       "deploy/models/shakespeare-llama-6m"
#define MODEL_ID    "shakespeare-llama-6m"
#define PATIENCE_MS 5000

/* ---- the request machine's double ---- */

struct bt_request {
    struct bt_gen_spec spec;
    const struct bt_gen_ops *ops;
    void *arg;
};

static struct bt_request *now; /* the last one started; NULL when it has ended */
static int n_started, n_cancelled;
static const char *not_serving;

static void request_free(struct bt_request *r)
{
    bt_tokens_cleanup(&r->spec.prompt);
    for (size_t i = 0; r->spec.stop != NULL && r->spec.stop[i] != NULL; i++) {
        free(r->spec.stop[i]);
    }
    free(r->spec.stop);
    free((void *)r->spec.sampling.bias_ids);
    free((void *)r->spec.sampling.bias);
    free(r->spec.cache_salt);
    free(r->spec.tenant);
    free(r->spec.id);
    free(r);
    now = NULL;
}

struct bt_request *bt_request_start(struct bt_requests *rs, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg)
{
    (void)rs;
    assert_null(now);
    now = bt_calloc(1, sizeof(*now));
    *now = (struct bt_request){*spec, ops, arg};
    n_started++;
    return now;
}

void bt_request_cancel(struct bt_request *r)
{
    assert_ptr_equal(r, now);
    n_cancelled++;
    request_free(r);
}

bool bt_requests_serving(const struct bt_requests *rs, const char **why_p)
{
    (void)rs;
    *why_p = not_serving;
    return not_serving == NULL;
}

static void delta(const char *text, const struct bt_gen_token *tokens, size_t n)
{
    struct bt_gen_delta d = {
        .text = text, .text_len = strlen(text), .tokens = tokens, .n_tokens = n};
    now->ops->on_delta(now->arg, &d);
}

static void token(const char *text, uint32_t id)
{
    struct bt_gen_token t = {.id = id, .logprob = -0.5f};
    delta(text, &t, 1);
}

static void done(uint32_t completion, uint32_t cached)
{
    struct bt_gen_usage u = {.prompt_tokens = (uint32_t)now->spec.prompt.n,
                             .completion_tokens = completion,
                             .cached_tokens = cached,
                             .ttft_ms = 12.5,
                             .queue_ms = -1,
                             .kv_bytes = 98304,
                             .kv_segments = 12,
                             .hidden_fraction = 0.75,
                             .prefill = "prefill-1",
                             .decode = "decode-\"2\""};
    struct bt_request *r = now;
    r->ops->on_done(r->arg, &u);
    request_free(r);
}

static void fail_now(int http, const char *message, uint32_t retry)
{
    struct bt_request *r = now;
    r->ops->on_error(r->arg, http, message, retry);
    request_free(r);
}

/* ---- the rig ---- */

static struct bt_loop *loop;
static struct bt_metrics *metrics;
static struct bt_tokenizer *tok;
static struct bt_template *tmpl;
static struct bt_model_config model;
static struct bt_front *front;
static int port;

static int load_model(void **state)
{
    (void)state;
    char err[256] = "";
    if (bt_tokenizer_load(MODEL, &tok, err, sizeof(err)) != BT_OK ||
        bt_template_load(MODEL, &tmpl, err, sizeof(err)) != BT_OK ||
        bt_model_config_load(MODEL, &model, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return -1;
    }
    return 0;
}

static int unload_model(void **state)
{
    (void)state;
    bt_template_destroy(tmpl);
    bt_tokenizer_destroy(tok);
    return 0;
}

static void open_front(const char *keys_file, const struct bt_template *t)
{
    char err[256] = "";
    struct bt_front_config conf = {.model_path = MODEL "/",
                                   .model = &model,
                                   .api_keys_file = keys_file,
                                   .created_s = 1234567890};
    bt_http_options_default(&conf.http);
    conf.http.listen = "127.0.0.1:0";
    n_started = n_cancelled = 0;
    now = NULL;
    not_serving = NULL;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    metrics = bt_metrics_create();
    bt_status_t st =
        bt_front_create(loop, &conf, tok, t, NULL, metrics, &front, &port, err, sizeof(err));
    if (st != BT_OK) {
        fail_msg("%s", err);
    }
}

static int setup(void **state)
{
    (void)state;
    open_front(NULL, tmpl);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    bt_front_destroy(front);
    assert_null(now);
    bt_metrics_destroy(metrics);
    bt_loop_destroy(loop);
    return 0;
}

static int dial(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

#define WAIT_FOR(cond)                                                                             \
    do {                                                                                           \
        uint64_t until_ = bt_mono_ns() + PATIENCE_MS * 1000000ull;                                 \
        while (!(cond)) {                                                                          \
            assert_true(bt_mono_ns() < until_);                                                    \
            bt_loop_poll(loop, 1);                                                                 \
        }                                                                                          \
    } while (0)

/* Sends a request. HTTP/1.0: the answer ends with the connection and streams have no chunks. */
static int send_raw(const char *method, const char *path, const char *headers, const char *body,
                    size_t len)
{
    struct bt_buf b = {0};
    bt_buf_printf(&b, "%s %s HTTP/1.0\r\nContent-Length: %zu\r\n%s\r\n", method, path, len,
                  headers);
    bt_buf_append(&b, body, len);
    int fd = dial();
    for (size_t sent = 0; sent < b.len;) {
        ssize_t n = send(fd, b.data + sent, b.len - sent, MSG_NOSIGNAL);
        if (n > 0) {
            sent += (size_t)n;
        } else {
            assert_int_equal(errno, EAGAIN);
            bt_loop_poll(loop, 1);
        }
    }
    bt_buf_cleanup(&b);
    return fd;
}

static int post(const char *path, const char *body)
{
    return send_raw("POST", path, "Content-Type: application/json\r\n", body, strlen(body));
}

struct answer {
    int status;
    char head[2048];
    char body[65536];
};

static struct answer ans;

/* Reads the whole answer; closes fd. */
static void receive(int fd)
{
    static char text[sizeof(ans.head) + sizeof(ans.body)];
    size_t len = 0;
    uint64_t until = bt_mono_ns() + PATIENCE_MS * 1000000ull;
    for (;;) {
        ssize_t n = recv(fd, text + len, sizeof(text) - 1 - len, 0);
        if (n == 0) {
            break;
        }
        if (n > 0) {
            len += (size_t)n;
        } else {
            assert_true(bt_mono_ns() < until);
            bt_loop_poll(loop, 1);
        }
    }
    close(fd);
    text[len] = '\0';
    char *body = strstr(text, "\r\n\r\n");
    assert_non_null(body);
    assert_int_equal(sscanf(text, "HTTP/1.1 %d ", &ans.status), 1);
    snprintf(ans.head, sizeof(ans.head), "%.*s", (int)(body - text + 2), text);
    snprintf(ans.body, sizeof(ans.body), "%s", body + 4);
}

static json_t *parse(const char *text)
{
    json_error_t e;
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES, &e);
    if (j == NULL) {
        fail_msg("not JSON: %s: %s", e.text, text);
    }
    return j;
}

/* Member by path: "choices.0.text". */
static json_t *at(json_t *j, const char *path)
{
    char part[64];
    while (*path != '\0') {
        size_t n = strcspn(path, ".");
        snprintf(part, sizeof(part), "%.*s", (int)n, path);
        j = json_is_array(j) ? json_array_get(j, (size_t)atoi(part)) : json_object_get(j, part);
        path += n + (path[n] == '.');
    }
    return j;
}

static const char *str_at(json_t *j, const char *path)
{
    const char *s = json_string_value(at(j, path));
    return s != NULL ? s : "(no string)";
}

static json_t *get_json(const char *path)
{
    receive(send_raw("GET", path, "", "", 0));
    assert_int_equal(ans.status, 200);
    return parse(ans.body);
}

static json_t *post_json(const char *path, const char *body)
{
    receive(post(path, body));
    if (ans.status != 200) {
        fail_msg("%d: %s", ans.status, ans.body);
    }
    return parse(ans.body);
}

/* Starts a generation; returns its socket. */
static int begin(const char *path, const char *body)
{
    int fd = post(path, body);
    int before = n_started;
    uint64_t until = bt_mono_ns() + PATIENCE_MS * 1000000ull;
    while (n_started == before) {
        bt_loop_poll(loop, 1);
        if (bt_mono_ns() > until) {
            receive(fd);
            fail_msg("not started: %d %s", ans.status, ans.body);
        }
    }
    return fd;
}

/* ---- whole answers ---- */

static void test_completion_defaults(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"ROMEO:\\n\"}");
    const struct bt_gen_spec *s = &now->spec;
    static const uint32_t ids[] = {2043, 870, 266};
    assert_int_equal(s->prompt.n, 3);
    assert_memory_equal(s->prompt.ids, ids, sizeof(ids));
    assert_int_equal(s->max_tokens, 16);
    assert_int_equal(s->n, 1);
    assert_true(s->sampling.temperature == 1.0f && s->sampling.top_p == 1.0f);
    assert_true(s->sampling.repetition_penalty == 1.0f && s->sampling.min_p == 0.0f);
    assert_int_equal(s->sampling.top_k, 0);
    assert_int_equal(s->sampling.logprobs, -1);
    assert_int_equal(s->sampling.n_eos, 2);
    assert_int_equal(s->sampling.eos[0], 2044);
    assert_true(s->unseeded && s->skip_special && !s->include_stop && !s->no_cache);
    assert_null(s->stop);
    assert_null(s->tenant);
    assert_null(s->cache_salt);
    assert_true(s->received_ns > 0);
    assert_int_equal(strncmp(s->id, "cmpl-", 5), 0);
    char id[64];
    snprintf(id, sizeof(id), "%s", s->id);
    token("I will \"not\"\n", 40);
    token("", 41);
    delta(" do't", NULL, 0);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 1);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Content-Type: application/json\r\n"));
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "id"), id);
    assert_string_equal(str_at(j, "object"), "text_completion");
    assert_string_equal(str_at(j, "model"), MODEL_ID);
    assert_true(json_integer_value(at(j, "created")) > 1600000000);
    assert_string_equal(str_at(j, "choices.0.text"), "I will \"not\"\n do't");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    assert_true(json_is_null(at(j, "choices.0.logprobs")));
    assert_true(json_is_null(at(j, "choices.0.stop_reason")));
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens")), 3);
    assert_int_equal(json_integer_value(at(j, "usage.completion_tokens")), 2);
    assert_int_equal(json_integer_value(at(j, "usage.total_tokens")), 5);
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens_details.cached_tokens")), 1);
    assert_null(at(j, "timings"));
    json_decref(j);
    assert_int_equal(bt_front_open(front), 0);
}

static void test_completion_all_options(void **state)
{
    (void)state;
    int fd = begin(
        "/v1/completions",
        "{\"model\":\"" MODEL_ID "\",\"prompt\":[1,2,2047],\"max_tokens\":100000,"
        "\"temperature\":0,\"top_p\":0.5,\"top_k\":7,\"min_p\":0.1,\"seed\":-5,"
        "\"stop\":[\"a\",\"b\"],\"logprobs\":20,\"ignore_eos\":true,\"min_tokens\":3,"
        "\"repetition_penalty\":1.1,\"frequency_penalty\":-2,\"presence_penalty\":2,"
        "\"skip_special_tokens\":false,\"include_stop_str_in_output\":true,"
        "\"cache_salt\":\"s\",\"stop_token_ids\":[9],\"n\":1,\"best_of\":1,\"echo\":false,"
        "\"logit_bias\":{\"5\":-100,\"2047\":1.5},\"user\":\"u\",\"unknown_field\":{\"x\":[]},"
        "\"response_format\":{\"type\":\"text\"},\"length_penalty\":1.0,\"suffix\":null,"
        "\"guided_json\":null,\"tools\":[],\"stream_options\":null}");
    const struct bt_gen_spec *s = &now->spec;
    assert_int_equal(s->prompt.n, 3);
    assert_int_equal(s->prompt.ids[2], 2047);
    assert_int_equal(s->max_tokens, model.max_model_len - 3);
    assert_true(s->sampling.temperature == 0.0f && s->sampling.top_p == 0.5f);
    assert_true(s->sampling.min_p == 0.1f && s->sampling.repetition_penalty == 1.1f);
    assert_true(s->sampling.frequency_penalty == -2.0f && s->sampling.presence_penalty == 2.0f);
    assert_int_equal(s->sampling.top_k, 7);
    assert_true(s->sampling.seed == (uint64_t)-5 && !s->unseeded);
    assert_string_equal(s->stop[0], "a");
    assert_string_equal(s->stop[1], "b");
    assert_null(s->stop[2]);
    assert_int_equal(s->sampling.logprobs, 20);
    assert_int_equal(s->sampling.min_new, 3);
    assert_int_equal(s->sampling.n_eos, 1); /* the model's are ignored, the client's own is not */
    assert_int_equal(s->sampling.eos[0], 9);
    assert_false(s->skip_special);
    assert_true(s->include_stop);
    assert_string_equal(s->cache_salt, "s");
    assert_int_equal(s->sampling.n_bias, 2);
    for (int i = 0; i < 2; i++) {
        bool five = s->sampling.bias_ids[i] == 5;
        assert_true(five || s->sampling.bias_ids[i] == 2047);
        assert_true(s->sampling.bias[i] == (five ? -100.0f : 1.5f));
    }
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    /* null is absent, -1 of top_k is off, a list of one string is a string */
    fd = begin("/v1/completions",
               "{\"prompt\":[\"ROMEO:\\n\"],\"add_special_tokens\":false,\"logprobs\":null,"
               "\"stop\":null,\"seed\":null,\"max_tokens\":null,\"temperature\":null,"
               "\"top_k\":-1,\"stream\":null,\"model\":null,\"stop_token_ids\":null}");
    assert_int_equal(now->spec.prompt.n, 2);
    assert_int_equal(now->spec.max_tokens, 16);
    assert_int_equal(now->spec.sampling.top_k, 0);
    assert_true(now->spec.unseeded);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

static void test_chat(void **state)
{
    (void)state;
    int fd = begin(
        "/v1/chat/completions",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},"
        "{\"role\":\"user\",\"name\":null,\"content\":[{\"type\":\"text\",\"text\":\"Speak,\"},"
        "{\"type\":\"text\",\"text\":\"good sir.\"}]}],\"max_tokens\":5,"
        "\"max_completion_tokens\":9,\"stop\":\"\\n\"}");
    struct bt_buf text = {0};
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    assert_string_equal(text.data,
                        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief."
                        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSpeak,\ngood sir."
                        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    bt_buf_cleanup(&text);
    assert_int_equal(now->spec.max_tokens, 9);
    assert_int_equal(strncmp(now->spec.id, "chatcmpl-", 9), 0);
    token("Aye.", 40);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, "\n");
    done(2, 0);
    receive(fd);
    json_t *j = parse(ans.body);
    assert_string_equal(str_at(j, "object"), "chat.completion");
    assert_string_equal(str_at(j, "choices.0.message.role"), "assistant");
    assert_string_equal(str_at(j, "choices.0.message.content"), "Aye.");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "stop");
    assert_string_equal(str_at(j, "choices.0.stop_reason"), "\n");
    assert_true(json_is_null(at(j, "choices.0.logprobs")));
    json_decref(j);
    /* without a limit: all the context that is left; without the generation prompt: shorter */
    fd = begin("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}");
    size_t n = now->spec.prompt.n;
    assert_int_equal(now->spec.max_tokens, model.max_model_len - n);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    fd = begin("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                       "\"add_generation_prompt\":false}");
    assert_true(now->spec.prompt.n < n);
    close(fd);
    WAIT_FOR(n_cancelled == 2);
}

/* ---- streams ---- */

/* ans.body with id and created blanked: comparable. */
static const char *stream_text(void)
{
    static char out[sizeof(ans.body)];
    size_t n = 0;
    for (const char *s = ans.body; *s != '\0';) {
        if (strncmp(s, "\"id\":\"", 6) == 0) {
            n += (size_t)sprintf(out + n, "\"id\":\"I\"");
            s += 6 + strcspn(s + 6, "\"") + 1;
        } else if (strncmp(s, "\"created\":", 10) == 0) {
            n += (size_t)sprintf(out + n, "\"created\":0");
            s += 10 + strspn(s + 10, "0123456789");
        } else {
            out[n++] = *s++;
        }
    }
    out[n] = '\0';
    return out;
}

#define CHUNK(object)                                                                              \
    "data: {\"id\":\"I\",\"object\":\"" object "\",\"created\":0,\"model\":\"" MODEL_ID "\","
#define TC CHUNK("text_completion")
#define CC CHUNK("chat.completion.chunk")

static void test_completion_stream(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("", 40); /* the first event is the first token, whatever its text */
    bt_loop_poll(loop, 10);
    token("x", 41);
    token("\xe2\x82\xac", 42); /* two tokens in one turn are two events */
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    bt_loop_poll(loop, 10);
    done(3, 0);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Content-Type: text/event-stream\r\n"));
    assert_string_equal(
        stream_text(),
        TC "\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":null,"
           "\"stop_reason\":null}]}\n\n" TC
           "\"choices\":[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null,"
           "\"stop_reason\":null}]}\n\n" TC
           "\"choices\":[{\"index\":0,\"text\":\"\xe2\x82\xac\",\"logprobs\":null,"
           "\"finish_reason\":\"stop\",\"stop_reason\":null}]}\n\n"
           "data: [DONE]\n\n");
}

static void test_chat_stream_with_usage(void **state)
{
    (void)state;
    int fd = begin("/v1/chat/completions",
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"stream\":true,"
                   "\"stream_options\":{\"include_usage\":true}}");
    int n = (int)now->spec.prompt.n;
    token("Hi", 40);
    bt_loop_poll(loop, 10);
    bt_loop_poll(loop, 10);
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, "!"); /* comes alone */
    done(2, 16);
    receive(fd);
    char want[4096];
    snprintf(want, sizeof(want),
             CC "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"Hi\"},"
                "\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}],"
                "\"usage\":null}\n\n" CC
                "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,"
                "\"finish_reason\":\"stop\",\"stop_reason\":\"!\"}],\"usage\":null}\n\n" CC
                "\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":2,"
                "\"total_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n"
                "data: [DONE]\n\n",
             n, n + 2);
    assert_string_equal(stream_text(), want);
}

static void test_continuous_usage_and_timings(void **state)
{
    (void)state;
    static const char body[] = "{\"prompt\":[1,2],\"stream\":true,\"stream_options\":"
                               "{\"include_usage\":true,\"continuous_usage_stats\":true}}";
    int fd = send_raw("POST", "/v1/completions",
                      "Content-Type: application/json; charset=UTF-8\r\nX-Baton-Timings: 1\r\n"
                      "X-Request-Id: abc-1\r\n",
                      body, sizeof(body) - 1);
    WAIT_FOR(now != NULL);
    token("x", 41);
    token("y", 42);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 1);
    receive(fd);
    assert_non_null(strstr(ans.head, "x-request-id: abc-1\r\n"));
    const char *s = ans.body;
    for (int i = 1; i <= 2; i++) {
        char want[64];
        snprintf(want, sizeof(want), "\"completion_tokens\":%d,\"total_tokens\":%d}", i, i + 2);
        s = strstr(s, want);
        assert_non_null(s);
    }
    s = strstr(s, "data: ");
    char last[2048];
    snprintf(last, sizeof(last), "%.*s", (int)(strstr(s, "\n\n") - s - 6), s + 6);
    json_t *j = parse(last);
    assert_int_equal(json_array_size(at(j, "choices")), 0);
    assert_int_equal(json_integer_value(at(j, "usage.prompt_tokens_details.cached_tokens")), 1);
    assert_true(json_number_value(at(j, "timings.ttft_ms")) == 12.5);
    assert_true(json_is_null(at(j, "timings.queue_ms")));
    assert_int_equal(json_integer_value(at(j, "timings.kv_bytes")), 98304);
    assert_int_equal(json_integer_value(at(j, "timings.kv_segments")), 12);
    assert_int_equal(json_integer_value(at(j, "timings.replans")), 0);
    assert_int_equal(json_integer_value(at(j, "timings.cached_tokens")), 1);
    assert_true(json_number_value(at(j, "timings.hidden_fraction")) == 0.75);
    assert_string_equal(str_at(j, "timings.prefill"), "prefill-1");
    assert_string_equal(str_at(j, "timings.decode"), "decode-\"2\"");
    assert_string_equal(strstr(s, "\n\n"), "\n\ndata: [DONE]\n\n");
    json_decref(j);
}

static void test_errors_of_the_machine(void **state)
{
    (void)state;
    /* before the first token: a status, streamed or not */
    for (int stream = 0; stream <= 1; stream++) {
        int fd = begin("/v1/completions",
                       stream ? "{\"prompt\":\"a\",\"stream\":true}" : "{\"prompt\":\"a\"}");
        fail_now(503, "no decode worker", 7);
        receive(fd);
        assert_int_equal(ans.status, 503);
        assert_non_null(strstr(ans.head, "Retry-After: 7\r\n"));
        json_t *j = parse(ans.body);
        assert_string_equal(str_at(j, "error.message"), "no decode worker");
        assert_string_equal(str_at(j, "error.type"), "server_error");
        json_decref(j);
    }
    /* after it: what there is, an error event, no [DONE] */
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_loop_poll(loop, 10);
    token("y", 42);
    fail_now(500, "worker \"d\" died twice", 0);
    receive(fd);
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.body, "\"text\":\"x\""));
    const char *y = strstr(ans.body, "\"text\":\"y\"");
    assert_non_null(y);
    assert_string_equal(strstr(y, "data: "),
                        "data: {\"error\":{\"message\":\"worker \\\"d\\\" died twice\","
                        "\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n");
    assert_null(strstr(ans.body, "[DONE]"));
    fd = begin("/v1/completions", "{\"prompt\":\"a\"}");
    fail_now(429, "overloaded", 1);
    receive(fd);
    assert_int_equal(ans.status, 429);
    assert_non_null(strstr(ans.body, "\"rate_limit_error\""));
    assert_int_equal(bt_front_open(front), 0);
}

static void test_client_leaves(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\"}");
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_loop_poll(loop, 10);
    token("y", 42); /* an event is half written */
    close(fd);
    WAIT_FOR(n_cancelled == 2);
    assert_int_equal(bt_front_open(front), 0);
}

/* ---- logprobs ---- */

/* First id of the vocabulary whose bytes are no text by themselves. */
static uint32_t find_broken_id(void)
{
    for (uint32_t id = 0; id < model.vocab; id++) {
        struct bt_buf piece = {0};
        assert_int_equal(bt_tokenizer_piece(tok, id, &piece), BT_OK);
        bool broken = piece.len == 1 && (unsigned char)piece.data[0] >= 0x80;
        bt_buf_cleanup(&piece);
        if (broken) {
            return id;
        }
    }
    fail_msg("no such token");
    return 0;
}

static uint32_t id_of(const char *text)
{
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(tok, text, strlen(text), false, &ids), BT_OK);
    assert_int_equal(ids.n, 1);
    uint32_t id = ids.ids[0];
    bt_tokens_cleanup(&ids);
    return id;
}

static void feed_logprobs(void)
{
    uint32_t broken = find_broken_id();
    static uint32_t top_a[2], top_b[1];
    static float lp_a[2] = {-0.25f, -INFINITY}, lp_b[1] = {-0.125f};
    top_a[0] = id_of("I");
    top_a[1] = broken;
    top_b[0] = id_of("I");
    struct bt_gen_token t[2] = {
        {.id = id_of("I"), .logprob = -0.25f, .n_top = 2, .top_id = top_a, .top_logprob = lp_a},
        {.id = broken, .logprob = -3.5f, .n_top = 1, .top_id = top_b, .top_logprob = lp_b}};
    delta("I", t, 1);
    delta("\xef\xbf\xbd", t + 1, 1);
    now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
    done(2, 0);
}

static void test_completion_logprobs(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"logprobs\":2}");
    assert_int_equal(now->spec.sampling.logprobs, 2);
    feed_logprobs();
    receive(fd);
    json_t *j = parse(ans.body), *lp = at(j, "choices.0.logprobs");
    struct bt_buf piece = {0};
    char name[32];
    assert_int_equal(bt_tokenizer_piece(tok, find_broken_id(), &piece), BT_OK);
    snprintf(name, sizeof(name), "bytes:\\x%02x", (unsigned char)piece.data[0]);
    bt_buf_cleanup(&piece);
    assert_int_equal(json_array_size(at(lp, "tokens")), 2);
    assert_string_equal(str_at(lp, "tokens.0"), "I");
    assert_string_equal(str_at(lp, "tokens.1"), name);
    assert_true(json_number_value(at(lp, "token_logprobs.0")) == -0.25);
    assert_true(json_number_value(at(lp, "token_logprobs.1")) == -3.5);
    assert_int_equal(json_integer_value(at(lp, "text_offset.0")), 0);
    assert_int_equal(json_integer_value(at(lp, "text_offset.1")), 1);
    json_t *top = at(lp, "top_logprobs.0");
    assert_int_equal(json_object_size(top), 2);
    assert_true(json_number_value(json_object_get(top, "I")) == -0.25);
    assert_true(json_number_value(json_object_get(top, name)) == -9999.0); /* -inf */
    top = at(lp, "top_logprobs.1"); /* the chosen one is told though it is not among the top */
    assert_int_equal(json_object_size(top), 2);
    assert_true(json_number_value(json_object_get(top, name)) == -3.5);
    json_decref(j);
    /* as ids */
    fd = begin("/v1/completions",
               "{\"prompt\":\"a\",\"logprobs\":2,\"return_tokens_as_token_ids\":true}");
    feed_logprobs();
    receive(fd);
    j = parse(ans.body);
    snprintf(name, sizeof(name), "token_id:%u", id_of("I"));
    assert_string_equal(str_at(j, "choices.0.logprobs.tokens.0"), name);
    assert_non_null(json_object_get(at(j, "choices.0.logprobs.top_logprobs.1"), name));
    json_decref(j);
}

static void test_chat_logprobs(void **state)
{
    (void)state;
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                               "\"logprobs\":true,\"top_logprobs\":2}";
    int fd = begin("/v1/chat/completions", body);
    assert_int_equal(now->spec.sampling.logprobs, 2);
    feed_logprobs();
    receive(fd);
    json_t *j = parse(ans.body), *c = at(j, "choices.0.logprobs.content");
    assert_int_equal(json_array_size(c), 2);
    assert_string_equal(str_at(c, "0.token"), "I");
    assert_true(json_number_value(at(c, "0.logprob")) == -0.25);
    assert_int_equal(json_integer_value(at(c, "0.bytes.0")), 'I');
    assert_int_equal(json_array_size(at(c, "0.top_logprobs")), 2);
    assert_int_equal(json_array_size(at(c, "0.top_logprobs.1.bytes")), 1);
    assert_int_equal(json_array_size(at(c, "1.top_logprobs")), 1);
    assert_string_equal(str_at(c, "1.top_logprobs.0.token"), "I");
    json_decref(j);
    fd = begin("/v1/chat/completions",
               "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logprobs\":true,"
               "\"stream\":true}");
    assert_int_equal(now->spec.sampling.logprobs, 0);
    feed_logprobs();
    receive(fd);
    assert_non_null(strstr(ans.body,
                           "\"logprobs\":{\"content\":[{\"token\":\"I\",\"logprob\":-0.25,"
                           "\"bytes\":[73],\"top_logprobs\":["));
    /* each event has its own token only */
    const char *second = strstr(strstr(ans.body, "\n\n"), "\"content\":[");
    assert_null(strstr(second, "\"token\":\"I\",\"logprob\":-0.25"));
}

/* Text that is hostile to JSON comes back as it was. */
static void test_escaping(void **state)
{
    (void)state;
    static const char text[] = "\x01\x1f\"\\/\b\f\n\r\t\x7f</script> \xf0\x9f\x98\x80";
    for (int stream = 0; stream <= 1; stream++) {
        int fd = begin("/v1/completions",
                       stream ? "{\"prompt\":\"a\",\"stream\":true}" : "{\"prompt\":\"a\"}");
        token(text, 1);
        token("\xff\xc0\x80\xed\xa0\x80", 2); /* never from our detokenizer: still valid JSON */
        now->ops->on_finish(now->arg, 0, BT_FINISH_LENGTH, NULL);
        done(2, 0);
        receive(fd);
        char *body = ans.body + (stream ? 6 : 0);
        if (stream) {
            *strstr(body, "\n\n") = '\0';
        }
        json_t *j = parse(body);
        assert_int_equal(strncmp(str_at(j, "choices.0.text"), text, sizeof(text) - 1), 0);
        json_decref(j);
    }
}

/* ---- bad input ---- */

static void test_bad_bodies(void **state)
{
    (void)state;
#define COMPLETION "/v1/completions"
#define CHAT       "/v1/chat/completions"
#define USER       "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
    static const struct {
        const char *path, *body;
        int status;
        const char *param;
    } cases[] = {
        {COMPLETION, "", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\"", 400, NULL},
        {COMPLETION, "[]", 400, NULL},
        {COMPLETION, "\"a\"", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\",\"prompt\":\"b\"}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"\xff\"}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"\\ud800\"}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\",\"temperature\":NaN}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\",\"temperature\":1e999}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\"} x", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\",}", 400, NULL},
        {COMPLETION, "{}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":null}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":5}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":\"\",\"add_special_tokens\":false}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[\"a\",\"b\"]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[[1],[2]]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[1,\"a\"]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[2048]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[-1]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":[1.5]}", 400, "prompt"},
        {COMPLETION, "{\"prompt\":\"a\",\"model\":\"gpt-4\"}", 404, "model"},
        {COMPLETION, "{\"prompt\":\"a\",\"model\":5}", 400, "model"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":0}", 400, "max_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":-1}", 400, "max_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":4294967296}", 400, "max_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":1.5}", 400, "max_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":\"9\"}", 400, "max_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":4,\"min_tokens\":5}", 400, "min_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"min_tokens\":-1}", 400, "min_tokens"},
        {COMPLETION, "{\"prompt\":\"a\",\"n\":0}", 400, "n"},
        {COMPLETION, "{\"prompt\":\"a\",\"n\":2}", 400, "n"},
        {COMPLETION, "{\"prompt\":\"a\",\"n\":1000000000}", 400, "n"},
        {COMPLETION, "{\"prompt\":\"a\",\"best_of\":2}", 400, "best_of"},
        {COMPLETION, "{\"prompt\":\"a\",\"temperature\":-1}", 400, "temperature"},
        {COMPLETION, "{\"prompt\":\"a\",\"temperature\":\"hot\"}", 400, "temperature"},
        {COMPLETION, "{\"prompt\":\"a\",\"top_p\":0}", 400, "top_p"},
        {COMPLETION, "{\"prompt\":\"a\",\"top_p\":1.1}", 400, "top_p"},
        {COMPLETION, "{\"prompt\":\"a\",\"top_k\":-2}", 400, "top_k"},
        {COMPLETION, "{\"prompt\":\"a\",\"min_p\":1.5}", 400, "min_p"},
        {COMPLETION, "{\"prompt\":\"a\",\"repetition_penalty\":0}", 400, "repetition_penalty"},
        {COMPLETION, "{\"prompt\":\"a\",\"frequency_penalty\":3}", 400, "frequency_penalty"},
        {COMPLETION, "{\"prompt\":\"a\",\"presence_penalty\":-3}", 400, "presence_penalty"},
        {COMPLETION, "{\"prompt\":\"a\",\"seed\":1.5}", 400, "seed"},
        {COMPLETION, "{\"prompt\":\"a\",\"seed\":99999999999999999999}", 400, NULL},
        {COMPLETION, "{\"prompt\":\"a\",\"stop\":\"\"}", 400, "stop"},
        {COMPLETION, "{\"prompt\":\"a\",\"stop\":[\"a\",\"\"]}", 400, "stop"},
        {COMPLETION, "{\"prompt\":\"a\",\"stop\":[1]}", 400, "stop"},
        {COMPLETION,
         "{\"prompt\":\"a\",\"stop\":[\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
         "\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\"]}",
         400, "stop"},
        {COMPLETION, "{\"prompt\":\"a\",\"stop_token_ids\":[2048]}", 400, "stop_token_ids"},
        {COMPLETION, "{\"prompt\":\"a\",\"stop_token_ids\":5}", 400, "stop_token_ids"},
        {COMPLETION, "{\"prompt\":\"a\",\"logprobs\":21}", 400, "logprobs"},
        {COMPLETION, "{\"prompt\":\"a\",\"logprobs\":true}", 400, "logprobs"},
        {COMPLETION, "{\"prompt\":\"a\",\"stream\":1}", 400, "stream"},
        {COMPLETION, "{\"prompt\":\"a\",\"stream_options\":1}", 400, "stream_options"},
        {COMPLETION, "{\"prompt\":\"a\",\"echo\":true}", 400, "echo"},
        {COMPLETION, "{\"prompt\":\"a\",\"suffix\":\"b\"}", 400, "suffix"},
        {COMPLETION, "{\"prompt\":\"a\",\"prompt_logprobs\":0}", 400, "prompt_logprobs"},
        {COMPLETION, "{\"prompt\":\"a\",\"guided_regex\":\"(a+)+$\"}", 400, "guided_regex"},
        {COMPLETION, "{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}", 400,
         "response_format"},
        {COMPLETION, "{\"prompt\":\"a\",\"response_format\":\"json\"}", 400, "response_format"},
        {COMPLETION, "{\"prompt\":\"a\",\"cache_salt\":\"\"}", 400, "cache_salt"},
        {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"5\":101}}", 400, "logit_bias"},
        {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"2048\":1}}", 400, "logit_bias"},
        {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"x\":1}}", 400, "logit_bias"},
        {COMPLETION, "{\"prompt\":\"a\",\"logit_bias\":{\"1\":null}}", 400, "logit_bias"},
        {CHAT, "{}", 400, "messages"},
        {CHAT, "{\"messages\":[]}", 400, "messages"},
        {CHAT, "{\"messages\":\"a\"}", 400, "messages"},
        {CHAT, "{\"messages\":[5]}", 400, "messages"},
        {CHAT, "{\"messages\":[{\"content\":\"a\"}]}", 400, "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"user\"}]}", 400, "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"king\",\"content\":\"a\"}]}", 400, "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", 400, "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
         "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", 400,
         "messages"},
        {CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", 400, "messages"},
        {CHAT, "{" USER ",\"logprobs\":5}", 400, "logprobs"},
        {CHAT, "{" USER ",\"top_logprobs\":2}", 400, "top_logprobs"},
        {CHAT, "{" USER ",\"logprobs\":true,\"top_logprobs\":21}", 400, "top_logprobs"},
        {CHAT, "{" USER ",\"tools\":[{\"type\":\"function\"}]}", 400, "tools"},
        {CHAT, "{" USER ",\"tool_choice\":\"required\"}", 400, "tool_choice"},
        {CHAT, "{" USER ",\"functions\":[{}]}", 400, "functions"},
        {CHAT, "{" USER ",\"chat_template_kwargs\":5}", 400, "chat_template_kwargs"},
        {CHAT, "{" USER ",\"max_completion_tokens\":0}", 400, "max_completion_tokens"},
        {"/tokenize", "{}", 400, "prompt"},
        {"/tokenize", "{\"prompt\":\"a\",\"model\":\"x\"}", 404, "model"},
        {"/detokenize", "{}", 400, "tokens"},
        {"/detokenize", "{\"tokens\":\"a\"}", 400, "tokens"},
        {"/detokenize", "{\"tokens\":[4294967296]}", 400, "tokens"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        receive(post(cases[i].path, cases[i].body));
        if (ans.status != cases[i].status) {
            fail_msg("%s: got %d %s", cases[i].body, ans.status, ans.body);
        }
        json_t *j = parse(ans.body);
        assert_true(strlen(str_at(j, "error.message")) > 10);
        assert_true(strlen(str_at(j, "error.message")) < 512);
        assert_string_equal(str_at(j, "error.type"), "invalid_request_error");
        assert_non_null(at(j, "error.code"));
        if (cases[i].param == NULL) {
            assert_true(json_is_null(at(j, "error.param")));
        } else if (strcmp(str_at(j, "error.param"), cases[i].param) != 0) {
            fail_msg("%s: %s", cases[i].body, ans.body);
        }
        json_decref(j);
    }
    assert_int_equal(n_started, 0);
}

static void test_monstrous_bodies(void **state)
{
    (void)state;
    struct bt_buf b = {0};
    for (int kind = 0; kind < 6; kind++) {
        bt_buf_clear(&b);
        bt_buf_puts(&b, "{\"prompt\":");
        if (kind == 0) { /* 10^4 deep */
            for (int i = 0; i < 10000; i++) {
                bt_buf_puts(&b, "[");
            }
        } else if (kind == 1) { /* very many empty arrays */
            bt_buf_puts(&b, "[");
            for (int i = 0; i < 100000; i++) {
                bt_buf_puts(&b, "[],");
            }
        } else if (kind == 2) { /* a million ids, the context is 8192 */
            bt_buf_puts(&b, "[1");
            for (int i = 1; i < 1000000; i++) {
                bt_buf_puts(&b, ",1");
            }
            bt_buf_puts(&b, "]}");
        } else if (kind == 3) { /* exactly the context: nothing is left to generate */
            bt_buf_puts(&b, "[1");
            for (uint32_t i = 1; i < model.max_model_len; i++) {
                bt_buf_puts(&b, ",1");
            }
            bt_buf_puts(&b, "]}");
        } else if (kind == 5) { /* 4 MB of text are refused before they are tokenized */
            bt_buf_puts(&b, "\"");
            for (int i = 0; i < 1000000; i++) {
                bt_buf_puts(&b, "ab, ");
            }
            bt_buf_puts(&b, "\"}");
        } else { /* a long name is cut in the answer, and stays valid UTF-8 */
            bt_buf_puts(&b, "\"a\",\"model\":\"");
            for (int i = 0; i < 1000; i++) {
                bt_buf_puts(&b, "x\xf0\x9f\x98\x80");
            }
            bt_buf_puts(&b, "\"}");
        }
        receive(send_raw("POST", "/v1/completions", "Content-Type: application/json\r\n", b.data,
                         b.len));
        assert_int_equal(ans.status, kind == 4 ? 404 : 400);
        json_t *j = parse(ans.body);
        if (kind == 2 || kind == 3) {
            assert_string_equal(str_at(j, "error.code"), "context_length_exceeded");
            assert_non_null(strstr(str_at(j, "error.message"), "8192"));
            assert_non_null(strstr(str_at(j, "error.message"), kind == 2 ? "1000000" : "8192"));
        } else if (kind == 5) {
            assert_string_equal(str_at(j, "error.code"), "context_length_exceeded");
            assert_non_null(strstr(str_at(j, "error.message"), "4000000 bytes"));
        }
        json_decref(j);
    }
    bt_buf_cleanup(&b);
    /* one token less than the context is served */
    bt_buf_puts(&b, "{\"max_tokens\":5,\"prompt\":[1");
    for (uint32_t i = 2; i < model.max_model_len; i++) {
        bt_buf_puts(&b, ",1");
    }
    bt_buf_puts(&b, "]}");
    int fd = begin("/v1/completions", b.data);
    assert_int_equal(now->spec.max_tokens, 1);
    close(fd);
    WAIT_FOR(n_cancelled == 1);
    bt_buf_cleanup(&b);
}

/* ---- routes ---- */

static void test_routes(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path, *headers;
        int status;
        const char *allow;
    } cases[] = {
        {"GET", "/", "", 404, NULL},
        {"GET", "/v1", "", 404, NULL},
        {"POST", "/v1/embeddings", "", 404, NULL},
        {"GET", "/v1/models/x", "", 404, NULL},
        {"GET", "/health/", "", 404, NULL},
        {"GET", "/v1/completions", "", 405, "POST"},
        {"DELETE", "/v1/chat/completions", "", 405, "POST"},
        {"POST", "/v1/models", "", 405, "GET, HEAD"},
        {"PUT", "/health", "", 405, "GET, HEAD"},
        {"POST", "/v1/completions", "Content-Type: text/plain\r\n", 415, NULL},
        {"POST", "/v1/completions", "Content-Type: application/x-www-form-urlencoded\r\n", 415,
         NULL},
        {"POST", "/tokenize", "Content-Type: application/json; charset=latin1\r\n", 415, NULL},
        {"POST", "/tokenize", "Content-Type: application/jsonx\r\n", 415, NULL},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        receive(send_raw(cases[i].method, cases[i].path, cases[i].headers, "{}", 2));
        if (ans.status != cases[i].status) {
            fail_msg("%s %s: %d", cases[i].method, cases[i].path, ans.status);
        }
        if (cases[i].allow != NULL) {
            char want[64];
            snprintf(want, sizeof(want), "Allow: %s\r\n", cases[i].allow);
            assert_non_null(strstr(ans.head, want));
        }
        json_t *j = parse(ans.body);
        assert_true(json_is_string(at(j, "error.message")));
        json_decref(j);
    }
    receive(send_raw("HEAD", "/v1/models", "", "", 0));
    assert_int_equal(ans.status, 200);
    assert_string_equal(ans.body, "");
    /* an id that could do harm is not echoed */
    receive(send_raw("GET", "/health", "x-request-id: a\"b\r\n", "", 0));
    assert_null(strstr(ans.head, "x-request-id"));
}

static void test_small_routes(void **state)
{
    (void)state;
    json_t *j = get_json("/v1/models");
    assert_string_equal(str_at(j, "object"), "list");
    assert_string_equal(str_at(j, "data.0.id"), MODEL_ID);
    assert_string_equal(str_at(j, "data.0.object"), "model");
    assert_string_equal(str_at(j, "data.0.root"), MODEL "/");
    assert_int_equal(json_integer_value(at(j, "data.0.created")), 1234567890);
    assert_int_equal(json_integer_value(at(j, "data.0.max_model_len")), 8192);
    json_decref(j);
    j = get_json("/v1/models/" MODEL_ID);
    assert_string_equal(str_at(j, "id"), MODEL_ID);
    json_decref(j);
    j = get_json("/version");
    assert_true(strlen(str_at(j, "version")) > 0);
    json_decref(j);
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 200);
    not_serving = "no decode worker";
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 503);
    assert_string_equal(ans.body, "no decode worker");
    receive(send_raw("GET", "/metrics", "", "", 0));
    assert_non_null(strstr(ans.head, "Content-Type: text/plain; version=0.0.4\r\n"));
    assert_non_null(strstr(ans.body, "baton_http_responses_total{code=\"200\"} 4\n"));
    assert_non_null(strstr(ans.body, "baton_http_responses_total{code=\"503\"} 1\n"));
}

static void test_tokenize(void **state)
{
    (void)state;
    json_t *j = post_json("/tokenize", "{\"prompt\":\"ROMEO:\\n\"}");
    assert_int_equal(json_integer_value(at(j, "count")), 3);
    assert_int_equal(json_integer_value(at(j, "max_model_len")), 8192);
    assert_int_equal(json_array_size(at(j, "tokens")), 3);
    assert_int_equal(json_integer_value(at(j, "tokens.0")), 2043);
    json_decref(j);
    j = post_json("/tokenize", "{\"prompt\":\"ROMEO:\\n\",\"add_special_tokens\":false,"
                               "\"return_token_strs\":true}");
    assert_int_equal(json_integer_value(at(j, "count")), 2);
    assert_string_equal(str_at(j, "token_strs.0"), "ROMEO");
    json_decref(j);
    j = post_json("/tokenize", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}");
    json_int_t with = json_integer_value(at(j, "count"));
    json_decref(j);
    j = post_json("/tokenize", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                               "\"add_generation_prompt\":false}");
    assert_true(json_integer_value(at(j, "count")) < with);
    json_decref(j);
    j = post_json("/detokenize", "{\"tokens\":[2043,870,266]}");
    assert_string_equal(str_at(j, "prompt"), "<|begin_of_text|>ROMEO:\n");
    json_decref(j);
    j = post_json("/detokenize", "{\"tokens\":[]}");
    assert_string_equal(str_at(j, "prompt"), "");
    json_decref(j);
}

/* ---- keys ---- */

static char keys_path[] = "/tmp/test_front_keys_XXXXXX";

static void write_keys(const char *text, mode_t mode)
{
    FILE *file = fopen(keys_path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(keys_path, mode), 0);
}

static int setup_keys(void **state)
{
    (void)state;
    strcpy(keys_path, "/tmp/test_front_keys_XXXXXX");
    int fd = mkstemp(keys_path);
    assert_true(fd >= 0);
    close(fd);
    write_keys("# the team's\n\n  sk-one  \r\nsk-two\n", 0600);
    open_front(keys_path, NULL);
    return 0;
}

static int teardown_keys(void **state)
{
    unlink(keys_path);
    return teardown(state);
}

static void test_keys(void **state)
{
    (void)state;
    static const char *const guarded[] = {"/v1/models", "/v1/models/x", "/v1/nothing",
                                          "/tokenize",  "/detokenize",  "/v1/completions"};
    static const char *const bad[] = {"",
                                      "Authorization: sk-one\r\n",
                                      "Authorization: Bearer\r\n",
                                      "Authorization: Bearer sk\r\n",
                                      "Authorization: Bearer sk-onex\r\n",
                                      "Authorization: Bearer # the team's\r\n",
                                      "Authorization: Basic sk-one\r\n"};
    for (size_t i = 0; i < BT_ARRAY_LEN(guarded); i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(bad); k++) {
            receive(send_raw("GET", guarded[i], bad[k], "", 0));
            assert_int_equal(ans.status, 401);
            assert_non_null(strstr(ans.head, "WWW-Authenticate: Bearer\r\n"));
            json_t *j = parse(ans.body);
            assert_string_equal(str_at(j, "error.code"), "invalid_api_key");
            assert_null(strstr(ans.body, "sk-"));
            json_decref(j);
        }
    }
    receive(send_raw("GET", "/v1/models", "Authorization: bearer sk-two\r\n", "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("GET", "/health", "", "", 0));
    assert_int_equal(ans.status, 200);
    receive(send_raw("GET", "/metrics", "", "", 0));
    assert_int_equal(ans.status, 200);
    /* each key is a tenant of its own */
    char tenants[2][64];
    static const char body[] = "{\"prompt\":\"a\"}";
    for (int i = 0; i < 2; i++) {
        int fd = send_raw("POST", "/v1/completions",
                          i == 0 ? "Authorization: Bearer sk-one\r\n"
                                 : "Authorization: Bearer sk-two\r\n",
                          body, sizeof(body) - 1);
        WAIT_FOR(now != NULL);
        snprintf(tenants[i], sizeof(tenants[i]), "%s", now->spec.tenant);
        assert_null(strstr(tenants[i], "sk-"));
        close(fd);
        WAIT_FOR(n_cancelled == i + 1);
    }
    assert_string_not_equal(tenants[0], tenants[1]);
    /* this front has no template either */
    static const char chat[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}";
    receive(send_raw("POST", "/v1/chat/completions", "Authorization: Bearer sk-one\r\n", chat,
                     sizeof(chat) - 1));
    assert_int_equal(ans.status, 400);
    assert_non_null(strstr(ans.body, "chat template"));
}

static void expect_refused(const char *path, const char *word)
{
    char err[256] = "";
    struct bt_front *other = NULL;
    struct bt_front_config conf = {.model_path = MODEL, .model = &model, .api_keys_file = path};
    bt_http_options_default(&conf.http);
    conf.http.listen = "127.0.0.1:0";
    struct bt_metrics *m = bt_metrics_create();
    assert_int_equal(
        bt_front_create(loop, &conf, tok, NULL, NULL, m, &other, NULL, err, sizeof(err)),
        BT_ERR_CONFIG);
    bt_metrics_destroy(m);
    if (strstr(err, word) == NULL || strstr(err, path) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, word);
    }
}

static void test_bad_key_files(void **state)
{
    (void)state;
    char err[256] = "";
    expect_refused("/nonexistent/keys", "No such file");
    expect_refused("/tmp", "regular file");
    write_keys("sk-one\n", 0644);
    expect_refused(keys_path, "chmod");
    write_keys("# nothing\n\n", 0600);
    expect_refused(keys_path, "no key");
    char line[1024];
    memset(line, 'k', sizeof(line));
    line[sizeof(line) - 1] = '\0';
    write_keys(line, 0600);
    expect_refused(keys_path, "512");
    /* an address in use is named, too */
    struct bt_front *other = NULL;
    char taken[32];
    struct bt_front_config conf = {.model_path = MODEL, .model = &model};
    bt_http_options_default(&conf.http);
    snprintf(taken, sizeof(taken), "127.0.0.1:%d", port);
    conf.http.listen = taken;
    struct bt_metrics *m = bt_metrics_create();
    assert_int_equal(
        bt_front_create(loop, &conf, tok, NULL, NULL, m, &other, NULL, err, sizeof(err)),
        BT_ERR_IO);
    bt_metrics_destroy(m);
    assert_non_null(strstr(err, taken));
}

/* ---- the end ---- */

static void test_drain(void **state)
{
    (void)state;
    int kept = dial();
    assert_int_equal(send(kept, "GET /heal", 9, 0), 9); /* a request is on its way */
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    assert_int_equal(bt_front_open(front), 1);
    bt_front_drain(front);
    static const char rest[] = "th HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_int_equal(send(kept, rest, sizeof(rest) - 1, 0), sizeof(rest) - 1);
    receive(kept);
    assert_int_equal(ans.status, 503);
    assert_string_equal(ans.body, "shutting down");
    token("x", 41); /* the open one goes on */
    now->ops->on_finish(now->arg, 0, BT_FINISH_STOP, NULL);
    done(1, 0);
    receive(fd);
    assert_non_null(strstr(ans.body, "data: [DONE]\n\n"));
    assert_int_equal(bt_front_open(front), 0);
}

static void test_destroy_cancels(void **state)
{
    (void)state;
    int fd = begin("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    token("x", 41);
    bt_front_destroy(front);
    front = NULL;
    assert_int_equal(n_cancelled, 1);
    assert_null(now);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_completion_defaults),
        T(test_completion_all_options),
        T(test_chat),
        T(test_completion_stream),
        T(test_chat_stream_with_usage),
        T(test_continuous_usage_and_timings),
        T(test_errors_of_the_machine),
        T(test_client_leaves),
        T(test_completion_logprobs),
        T(test_chat_logprobs),
        T(test_escaping),
        T(test_bad_bodies),
        T(test_monstrous_bodies),
        T(test_routes),
        T(test_small_routes),
        T(test_tokenize),
        cmocka_unit_test_setup_teardown(test_keys, setup_keys, teardown_keys),
        cmocka_unit_test_setup_teardown(test_bad_key_files, setup_keys, teardown_keys),
        T(test_drain),
        T(test_destroy_cancels),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
