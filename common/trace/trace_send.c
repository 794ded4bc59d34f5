/* The connection to the collector: libcurl, used by the sending thread only. Answers are not read;
 * redirects are not followed, so that spans and secret headers go only where the operator says. */
#include <curl/curl.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/trace/trace_priv.h"

#define LOOK_MS    1000 /* between two looks at the time to stop */
#define WAIT_MAX_S 60   /* that a collector may ask for */
#define CONNECT_MS 5000

/* libcurl needs some thirty other libraries, and few conductors send traces: it is loaded by the
 * first that does. These are the functions that are used. */
#define FUNCTIONS(X)                                                                               \
    X(curl_global_init)                                                                            \
    X(curl_easy_init)                                                                              \
    X(curl_easy_setopt)                                                                            \
    X(curl_easy_getinfo)                                                                           \
    X(curl_easy_strerror)                                                                          \
    X(curl_easy_cleanup)                                                                           \
    X(curl_slist_append)                                                                           \
    X(curl_slist_free_all)                                                                         \
    X(curl_multi_init)                                                                             \
    X(curl_multi_add_handle)                                                                       \
    X(curl_multi_remove_handle)                                                                    \
    X(curl_multi_perform)                                                                          \
    X(curl_multi_poll)                                                                             \
    X(curl_multi_wakeup)                                                                           \
    X(curl_multi_info_read)                                                                        \
    X(curl_multi_cleanup)
#undef curl_easy_setopt /* macros that check types */
#undef curl_easy_getinfo

static struct {
#define X(function) typeof(&(function)) function;
    FUNCTIONS(X)
#undef X
    char why[256]; /* "": it is loaded */
} lib;

struct bt_trace_sender {
    const struct bt_trace_conf *conf;
    CURLM *multi;
    CURL *easy;
    struct curl_slist *headers;
    char error[CURL_ERROR_SIZE];
};

static size_t drop_answer(char *data, size_t size, size_t n, void *arg)
{
    (void)data;
    (void)arg;
    return size * n;
}

static void load(void)
{
    void *at = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    bool ok = at != NULL;
#define X(function) ok = ok && (lib.function = dlsym(at, #function)) != NULL;
    FUNCTIONS(X)
#undef X
    if (!ok) {
        snprintf(lib.why, sizeof(lib.why), "%.200s", dlerror());
    } else if (lib.curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        snprintf(lib.why, sizeof(lib.why), "libcurl does not start");
    }
}

static bool set_options(struct bt_trace_sender *s)
{
    CURL *e = s->easy;
    const struct bt_trace_conf *c = s->conf;
    bool ok = lib.curl_easy_setopt(e, CURLOPT_URL, c->url) == CURLE_OK &&
              lib.curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
    ok = ok && lib.curl_easy_setopt(e, CURLOPT_HTTPHEADER, s->headers) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, drop_answer) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_ERRORBUFFER, s->error) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_POST, 1L) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS) == CURLE_OK &&
         lib.curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, (long)c->timeout_ms) == CURLE_OK;
    /* An answer without end, slowly, is cut off by the timeout; at its end the thread that resolves
     * the name is not waited for. */
    (void)lib.curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L);
    return ok;
}

struct bt_trace_sender *bt_trace_sender_create(const struct bt_trace_conf *conf, char *err,
                                               size_t err_cap)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load);
    snprintf(
        err, err_cap,
        "traces need libcurl 7.85 or newer: %s; install it (Debian's package libcurl4), or unset "
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        lib.why[0] != '\0' ? lib.why : "this one is older");
    if (lib.why[0] != '\0') {
        return NULL;
    }
    struct bt_trace_sender *s = bt_calloc(1, sizeof(*s));
    s->conf = conf;
    s->multi = lib.curl_multi_init();
    s->easy = lib.curl_easy_init();
    s->headers = lib.curl_slist_append(NULL, "Content-Type: application/x-protobuf");
    for (uint32_t i = 0; conf->headers[i] != NULL; i++) {
        s->headers = lib.curl_slist_append(s->headers, conf->headers[i]);
    }
    s->headers = lib.curl_slist_append(s->headers, "Expect:"); /* no second round trip */
    if (s->multi == NULL || s->easy == NULL || !set_options(s)) {
        bt_trace_sender_destroy(s);
        return NULL;
    }
    return s;
}

void bt_trace_sender_destroy(struct bt_trace_sender *s)
{
    if (s != NULL) {
        lib.curl_easy_cleanup(s->easy);
        lib.curl_multi_cleanup(s->multi);
        lib.curl_slist_free_all(s->headers);
        free(s);
    }
}

void bt_trace_sender_wake(struct bt_trace_sender *s)
{
    (void)lib.curl_multi_wakeup(s->multi);
}

/* The meaning of the collector's answer (OTLP specification, "OTLP/HTTP Response"). */
static bt_send_result_t judge(struct bt_trace_sender *s, char *why, size_t cap, uint64_t *wait_ms_p)
{
    long status = 0;
    curl_off_t after_s = 0;
    (void)lib.curl_easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &status);
    (void)lib.curl_easy_getinfo(s->easy, CURLINFO_RETRY_AFTER, &after_s);
    if (status >= 200 && status < 300) {
        return BT_SENT;
    }
    snprintf(why, cap, "the collector answered %ld", status);
    if (status == 429 || status == 502 || status == 503 || status == 504) {
        *wait_ms_p =
            (uint64_t)BT_MIN(BT_MAX(after_s, (curl_off_t)0), (curl_off_t)WAIT_MAX_S) * 1000;
        return BT_SEND_LATER;
    }
    return BT_SEND_REFUSED;
}

/* Runs the transfer to its end. False: the time to stop has come. */
static bool run(struct bt_trace_sender *s, _Atomic uint64_t *until_ns, CURLcode *code_p)
{
    int running = 1, left;
    while (lib.curl_multi_perform(s->multi, &running) == CURLM_OK && running > 0) {
        uint64_t until = atomic_load(until_ns), now = bt_mono_ns();
        if (until != 0 && now >= until) {
            return false;
        }
        uint64_t ms = until != 0 ? (until - now) / 1000000 + 1 : LOOK_MS;
        if (lib.curl_multi_poll(s->multi, NULL, 0, (int)BT_MIN(ms, (uint64_t)LOOK_MS), NULL) !=
            CURLM_OK) {
            break;
        }
    }
    *code_p = CURLE_FAILED_INIT;
    for (CURLMsg *m; (m = lib.curl_multi_info_read(s->multi, &left)) != NULL;) {
        if (m->msg == CURLMSG_DONE) {
            *code_p = m->data.result;
        }
    }
    return true;
}

bt_send_result_t bt_trace_send(struct bt_trace_sender *s, const void *body, size_t len,
                               _Atomic uint64_t *until_ns, char *why, size_t cap,
                               uint64_t *wait_ms_p)
{
    *wait_ms_p = 0;
    s->error[0] = '\0';
    CURLcode code = CURLE_OK;
    if (lib.curl_easy_setopt(s->easy, CURLOPT_POSTFIELDS, body) != CURLE_OK ||
        lib.curl_easy_setopt(s->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)len) != CURLE_OK ||
        lib.curl_multi_add_handle(s->multi, s->easy) != CURLM_OK) {
        snprintf(why, cap, "libcurl does not take the request");
        return BT_SEND_LATER;
    }
    bool ended = run(s, until_ns, &code);
    (void)lib.curl_multi_remove_handle(s->multi, s->easy);
    if (!ended) {
        snprintf(why, cap, "the daemon ends");
        return BT_SEND_STOPPED;
    }
    if (code != CURLE_OK) {
        snprintf(why, cap, "%s", s->error[0] != '\0' ? s->error : lib.curl_easy_strerror(code));
        return BT_SEND_LATER;
    }
    return judge(s, why, cap, wait_ms_p);
}
