/* The connection to the collector: libcurl, used by the sending thread only. Answers are not read;
 * redirects are not followed, so that spans and secret headers go only where the operator says. */
#include <curl/curl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/trace/trace_priv.h"

#define LOOK_MS    1000 /* between two looks at the time to stop */
#define WAIT_MAX_S 60   /* that a collector may ask for */
#define CONNECT_MS 5000

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

static void start_curl(void)
{
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
}

static bool set_options(struct bt_trace_sender *s)
{
    CURL *e = s->easy;
    const struct bt_trace_conf *c = s->conf;
    bool ok = curl_easy_setopt(e, CURLOPT_URL, c->url) == CURLE_OK &&
              curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
    ok = ok && curl_easy_setopt(e, CURLOPT_HTTPHEADER, s->headers) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, drop_answer) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_ERRORBUFFER, s->error) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_POST, 1L) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, (long)c->timeout_ms) == CURLE_OK;
    /* An answer without end, slowly, is cut off by the timeout; at its end the thread that resolves
     * the name is not waited for. */
    (void)curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L);
    return ok;
}

struct bt_trace_sender *bt_trace_sender_create(const struct bt_trace_conf *conf)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, start_curl);
    struct bt_trace_sender *s = bt_calloc(1, sizeof(*s));
    s->conf = conf;
    s->multi = curl_multi_init();
    s->easy = curl_easy_init();
    s->headers = curl_slist_append(NULL, "Content-Type: application/x-protobuf");
    for (uint32_t i = 0; conf->headers[i] != NULL; i++) {
        s->headers = curl_slist_append(s->headers, conf->headers[i]);
    }
    s->headers = curl_slist_append(s->headers, "Expect:"); /* no second round trip */
    if (s->multi == NULL || s->easy == NULL || !set_options(s)) {
        bt_trace_sender_destroy(s);
        return NULL;
    }
    return s;
}

void bt_trace_sender_destroy(struct bt_trace_sender *s)
{
    if (s != NULL) {
        curl_easy_cleanup(s->easy);
        curl_multi_cleanup(s->multi);
        curl_slist_free_all(s->headers);
        free(s);
    }
}

void bt_trace_sender_wake(struct bt_trace_sender *s)
{
    (void)curl_multi_wakeup(s->multi);
}

/* What the collector's answer means (OTLP specification, "OTLP/HTTP Response"). */
static bt_send_result_t judge(struct bt_trace_sender *s, char *why, size_t cap, uint64_t *wait_ms_p)
{
    long status = 0;
    curl_off_t after_s = 0;
    (void)curl_easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &status);
    (void)curl_easy_getinfo(s->easy, CURLINFO_RETRY_AFTER, &after_s);
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
    while (curl_multi_perform(s->multi, &running) == CURLM_OK && running > 0) {
        uint64_t until = atomic_load(until_ns), now = bt_mono_ns();
        if (until != 0 && now >= until) {
            return false;
        }
        uint64_t ms = until != 0 ? (until - now) / 1000000 + 1 : LOOK_MS;
        if (curl_multi_poll(s->multi, NULL, 0, (int)BT_MIN(ms, (uint64_t)LOOK_MS), NULL) !=
            CURLM_OK) {
            break;
        }
    }
    *code_p = CURLE_FAILED_INIT;
    for (CURLMsg *m; (m = curl_multi_info_read(s->multi, &left)) != NULL;) {
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
    if (curl_easy_setopt(s->easy, CURLOPT_POSTFIELDS, body) != CURLE_OK ||
        curl_easy_setopt(s->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)len) != CURLE_OK ||
        curl_multi_add_handle(s->multi, s->easy) != CURLM_OK) {
        snprintf(why, cap, "libcurl does not take the request");
        return BT_SEND_LATER;
    }
    bool ended = run(s, until_ns, &code);
    (void)curl_multi_remove_handle(s->multi, s->easy);
    if (!ended) {
        snprintf(why, cap, "the daemon ends");
        return BT_SEND_STOPPED;
    }
    if (code != CURLE_OK) {
        snprintf(why, cap, "%s", s->error[0] != '\0' ? s->error : curl_easy_strerror(code));
        return BT_SEND_LATER;
    }
    return judge(s, why, cap, wait_ms_p);
}
