/* Fixture of the front's unit tests: the front over real HTTP with the real tokenizer and template;
 * only the request machine is a double (bt_request_start and its kin below), so that deltas,
 * failures and their order are the test's. The real path is covered by tests/cluster. The programs
 * run in the repository root. */
#ifndef TESTS_FRONT_FIXTURE_H
#define TESTS_FRONT_FIXTURE_H

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
#define PATIENCE_MS 30000 /* a bound for what hangs, not for what is slow */

/* ---- the request machine's double ---- */

struct bt_request {
    struct bt_gen_spec spec;
    const struct bt_gen_ops *ops;
    void *arg;
};

#define LIVE_MAX 2048

static struct bt_request *live[LIVE_MAX]; /* in the order of their start; ended ones are NULL */
static struct bt_request *now;            /* the last one that has not ended; NULL: none */
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
    bt_gen_grammar_unref(r->spec.grammar);
    free(r->spec.id);
    now = NULL;
    for (int i = 0; i < LIVE_MAX; i++) {
        live[i] = live[i] == r ? NULL : live[i];
        now = live[i] != NULL ? live[i] : now;
    }
    free(r);
}

struct bt_request *bt_request_start(struct bt_requests *rs, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg)
{
    (void)rs;
    assert_true(n_started < LIVE_MAX);
    now = bt_calloc(1, sizeof(*now));
    *now = (struct bt_request){*spec, ops, arg};
    live[n_started++] = now;
    return now;
}

const struct bt_gen_usage *bt_request_usage(const struct bt_request *r)
{
    static const struct bt_gen_usage u = {.plan = {.prefill = "prefill-1",
                                                   .decode = "decode-1",
                                                   .reason = "apart",
                                                   .queue_ms = 0,
                                                   .prefill_ms = 4,
                                                   .ttft_ms = 5.5,
                                                   .tbt_ms = -1}};
    (void)r;
    return &u;
}

void bt_request_cancel(struct bt_request *r)
{
    bool known = false;
    for (int i = 0; i < n_started; i++) {
        known |= live[i] == r;
    }
    assert_true(known); /* neither ended nor cancelled before */
    n_cancelled++;
    request_free(r);
}

/* What turns requests away before they are read, if a test wants that. */
static const char *turn_away_why;
static struct bt_gen_terms turn_away_terms;
bool bt_requests_turn_away(struct bt_requests *rs, const struct bt_gen_terms *t, char *why,
                           size_t cap, uint32_t *retry_after_s_p)
{
    (void)rs;
    turn_away_terms = *t;
    if (turn_away_why == NULL) {
        return false;
    }
    snprintf(why, cap, "%s", turn_away_why);
    *retry_after_s_p = 7;
    return true;
}

static uint32_t prompts_max = UINT32_MAX;

uint32_t bt_requests_prompts_max(const struct bt_requests *rs, bool has_tenant)
{
    (void)rs;
    return has_tenant ? prompts_max : UINT32_MAX;
}

bool bt_requests_serving(const struct bt_requests *rs, const char **why_p)
{
    (void)rs;
    *why_p = not_serving;
    return not_serving == NULL;
}

void bt_requests_trace(const struct bt_requests *rs, const char *traceparent,
                       struct bt_trace_context *out)
{
    (void)rs;
    (void)traceparent;
    *out = (struct bt_trace_context){0};
}

static inline void delta_to(struct bt_request *r, uint32_t choice, const char *text,
                            const struct bt_gen_token *tokens, size_t n)
{
    struct bt_gen_delta d = {
        .choice = choice, .text = text, .text_len = strlen(text), .tokens = tokens, .n_tokens = n};
    r->ops->on_delta(r->arg, &d);
}

static inline void delta(const char *text, const struct bt_gen_token *tokens, size_t n)
{
    delta_to(now, 0, text, tokens, n);
}

static inline void token(const char *text, uint32_t id)
{
    struct bt_gen_token t = {.id = id, .logprob = -0.5f};
    delta(text, &t, 1);
}

static inline void done_with(struct bt_request *r, uint32_t completion, uint32_t cached)
{
    struct bt_gen_usage u = {.prompt_tokens = (uint32_t)r->spec.prompt.n,
                             .completion_tokens = completion,
                             .cached_tokens = cached,
                             .ttft_ms = 12.5,
                             .queue_ms = -1,
                             .kv_bytes = 98304,
                             .kv_segments = 12,
                             .hidden_fraction = 0.75,
                             .prefill = "prefill-1",
                             .decode = "decode-\"2\""};
    r->ops->on_done(r->arg, &u);
    request_free(r);
}

static inline void done(uint32_t completion, uint32_t cached)
{
    done_with(now, completion, cached);
}

static inline void fail_with(struct bt_request *r, int http, const char *message, uint32_t retry)
{
    r->ops->on_error(r->arg, http, message, retry);
    request_free(r);
}

static inline void fail_now(int http, const char *message, uint32_t retry)
{
    fail_with(now, http, message, retry);
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

static const char *allowed_origins = "*";
static size_t answers_max; /* 0: as the front has it */
static double access_share;

static void open_front(const char *keys_file, const struct bt_template *t)
{
    char err[256] = "";
    struct bt_front_config conf = {.model_path = MODEL "/",
                                   .model = &model,
                                   .allowed_origins = allowed_origins,
                                   .api_keys_file = keys_file,
                                   .created_s = 1234567890,
                                   .answers_max = answers_max,
                                   .access_share = access_share};
    bt_http_options_default(&conf.http);
    conf.http.listen = "127.0.0.1:0";
    n_started = n_cancelled = 0;
    now = NULL;
    memset(live, 0, sizeof(live));
    not_serving = NULL;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    metrics = bt_metrics_create();
    struct bt_front_parts parts = {.loop = loop, .tok = tok, .tmpl = t, .metrics = metrics};
    bt_status_t st = bt_front_create(&parts, &conf, &front, &port, err, sizeof(err));
    if (st != BT_OK) {
        fail_msg("%s", err);
    }
}

static inline int setup(void **state)
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

/* A front with a chat template of the test's own, and its end. */
static struct bt_template *own_template;

static inline void open_with_template(const char *text)
{
    char err[256];
    assert_int_equal(bt_template_compile(text, &own_template, err, sizeof(err)), BT_OK);
    open_front(NULL, own_template);
}

static inline int close_own(void **state)
{
    teardown(state);
    bt_template_destroy(own_template);
    own_template = NULL;
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

static inline const char *str_at(json_t *j, const char *path)
{
    const char *s = json_string_value(at(j, path));
    return s != NULL ? s : "(no string)";
}

static inline json_t *get_json(const char *path)
{
    receive(send_raw("GET", path, "", "", 0));
    assert_int_equal(ans.status, 200);
    return parse(ans.body);
}

static inline json_t *post_json(const char *path, const char *body)
{
    receive(post(path, body));
    if (ans.status != 200) {
        fail_msg("%d: %s", ans.status, ans.body);
    }
    return parse(ans.body);
}

/* Starts a generation; returns its socket. */
static inline int begin(const char *path, const char *body)
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

#endif
