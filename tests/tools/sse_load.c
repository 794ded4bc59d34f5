/* Load on the front door: keeps N SSE streams of /v1/completions open at once from one epoll loop,
 * checks every one of them, and says what it cost.
 *   sse_load HOST:PORT STREAMS TOKENS PROMPT_TOKENS REQUESTS VOCAB [order]
 * Each stream sends REQUESTS requests, one after another on its connection (PROMPT_TOKENS random
 * ids below VOCAB, TOKENS to generate, EOS ignored). order: asks for usage with each event and
 * checks that it counts 1, 2, 3... The last line is JSON: tokens, errors, seconds (first event to
 * last, and all), TTFT and gaps in microseconds (p50, p90, p99, max), events that shared a read,
 * own CPU seconds. Exit status: 0 every stream was whole, 1 not, 2 usage. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/base/clock.h"

#define READ_BYTES  (256 * 1024)
#define SAMPLES_MAX (8u << 20)

struct stream {
    int fd;
    struct bt_buf in;  /* body bytes of events that are not whole yet */
    struct bt_buf raw; /* bytes of a head or chunk that is not whole yet */
    bool in_body;
    size_t chunk_left; /* of the current chunk, its CRLF included */
    uint32_t requests, tokens, order;
    bool finished, done; /* finish_reason, [DONE] came */
    uint64_t sent_ns, last_ns;
};

struct samples {
    float *us;
    size_t n;
};

static struct {
    int epfd;
    uint32_t n_streams, tokens, prompt, requests, vocab;
    bool order;
    const char *host;
    struct stream *streams;
    struct samples ttft, gap;
    uint64_t events, joined, errors, finished;
    uint64_t start_ns, first_ns, last_ns;
    uint32_t open;
    uint64_t random;
    char *scratch;
} load;

static void complain(const struct stream *s, const char *what, const char *text, size_t len)
{
    if (load.errors++ < 5) {
        fprintf(stderr, "stream %td: %s: %.*s\n", s - load.streams, what, (int)BT_MIN(len, 300u),
                text);
    }
}

static void sample(struct samples *s, uint64_t ns)
{
    if (s->n < SAMPLES_MAX) {
        s->us[s->n++] = (float)((double)ns / 1e3);
    }
}

static uint32_t random_id(void)
{
    load.random = load.random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(load.random >> 33) % load.vocab;
}

static bool send_all(int fd, const char *data, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false; /* a request is smaller than a socket's buffer: never EAGAIN */
        }
        data += n;
        len -= (size_t)n;
    }
    return true;
}

static void send_request(struct stream *s)
{
    struct bt_buf body = {0}, out = {0};
    bt_buf_puts(&body, "{\"prompt\":[");
    for (uint32_t i = 0; i < load.prompt; i++) {
        bt_buf_printf(&body, i == 0 ? "%u" : ",%u", random_id());
    }
    bt_buf_printf(&body,
                  "],\"max_tokens\":%u,\"temperature\":0,\"ignore_eos\":true,\"stream\":true",
                  load.tokens);
    bt_buf_puts(&body, load.order ? ",\"stream_options\":{\"include_usage\":true,"
                                    "\"continuous_usage_stats\":true}}"
                                  : "}");
    bt_buf_printf(&out,
                  "POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
                  "Content-Length: %zu\r\n\r\n",
                  load.host, body.len);
    bt_buf_append(&out, body.data, body.len);
    s->tokens = s->order = 0;
    s->finished = s->done = s->in_body = false;
    s->chunk_left = 0;
    s->requests++;
    s->sent_ns = bt_mono_ns();
    if (!send_all(s->fd, out.data, out.len)) {
        complain(s, "cannot send", strerror(errno), strlen(strerror(errno)));
    }
    bt_buf_cleanup(&body);
    bt_buf_cleanup(&out);
}

/* ---- events ---- */

static bool has(const char *s, size_t len, const char *what)
{
    return memmem(s, len, what, strlen(what)) != NULL;
}

static void on_token(struct stream *s, const char *event, size_t len, uint64_t now)
{
    static const char count[] = "\"completion_tokens\":";
    s->tokens++;
    load.events++;
    load.first_ns = load.first_ns == 0 ? now : load.first_ns;
    load.last_ns = now;
    if (s->tokens == 1) {
        sample(&load.ttft, now - s->sent_ns);
    } else {
        sample(&load.gap, now - s->last_ns);
        load.joined += now == s->last_ns;
    }
    s->last_ns = now;
    const char *at = load.order ? memmem(event, len, count, sizeof(count) - 1) : NULL;
    if (load.order && (at == NULL || strtoul(at + sizeof(count) - 1, NULL, 10) != s->tokens)) {
        complain(s, "out of order", event, len);
    }
    if (has(event, len, "\"finish_reason\":\"")) {
        s->finished = true;
        if (!has(event, len, "\"finish_reason\":\"length\"")) {
            complain(s, "ended early", event, len);
        }
    }
}

static void on_event(struct stream *s, const char *event, size_t len, uint64_t now)
{
    if (len >= 6 && memcmp(event, "data: ", 6) == 0 && !s->done) {
        if (has(event, len, "\"choices\":[{")) {
            on_token(s, event, len, now);
            return;
        }
        if (has(event, len, "\"choices\":[]")) {
            return; /* usage */
        }
        if (len == 12 && memcmp(event, "data: [DONE]", 12) == 0) {
            s->done = true;
            return;
        }
    }
    complain(s, "not an event of a token", event, len);
}

/* Whole events of s->in. */
static void take_events(struct stream *s, uint64_t now)
{
    size_t at = 0;
    while (at < s->in.len) {
        const char *end = memmem(s->in.data + at, s->in.len - at, "\n\n", 2);
        if (end == NULL) {
            break;
        }
        on_event(s, s->in.data + at, (size_t)(end - s->in.data) - at, now);
        at = (size_t)(end - s->in.data) + 2;
    }
    bt_buf_consume(&s->in, at);
}

/* ---- HTTP ---- */

/* The line that ends a head or says a chunk's size, whole in s->raw. NULL: not yet. */
static char *take_until(struct stream *s, const char *mark, size_t *used_p)
{
    char *end = s->raw.len > 0 ? memmem(s->raw.data, s->raw.len, mark, strlen(mark)) : NULL;
    if (end != NULL) {
        *used_p = (size_t)(end - s->raw.data) + strlen(mark);
    }
    return end;
}

/* One step of head or chunk framing; false: more bytes are needed. over: the answer has ended. */
static bool step(struct stream *s, bool *over)
{
    size_t used;
    if (!s->in_body) {
        if (take_until(s, "\r\n\r\n", &used) == NULL) {
            return false;
        }
        if (strncmp(s->raw.data, "HTTP/1.1 200 ", 13) != 0) {
            complain(s, "refused", s->raw.data, s->raw.len);
            *over = true;
        }
        s->in_body = true;
    } else if (s->chunk_left > 0) {
        used = BT_MIN(s->chunk_left, s->raw.len);
        size_t data = s->chunk_left > 2 ? BT_MIN(used, s->chunk_left - 2) : 0;
        bt_buf_append(&s->in, s->raw.data, data);
        s->chunk_left -= used;
        if (used == 0) {
            return false;
        }
    } else {
        if (take_until(s, "\r\n", &used) == NULL) {
            return false;
        }
        size_t size = strtoul(s->raw.data, NULL, 16);
        if (size == 0) {
            if (s->raw.len < used + 2) {
                return false;
            }
            used += 2;
            *over = true;
        } else {
            s->chunk_left = size + 2;
        }
    }
    bt_buf_consume(&s->raw, used);
    return !*over;
}

static void hang_up(struct stream *s)
{
    close(s->fd);
    s->fd = -1;
    load.open--;
}

static void on_over(struct stream *s)
{
    if (!s->done || !s->finished || s->tokens != load.tokens) {
        char text[64];
        int n = snprintf(text, sizeof(text), "%u tokens, done=%d finished=%d", s->tokens, s->done,
                         s->finished);
        complain(s, "not whole", text, (size_t)n);
    } else {
        load.finished++;
    }
    if (s->requests < load.requests) {
        send_request(s);
    } else {
        hang_up(s);
    }
}

static void on_readable(struct stream *s)
{
    ssize_t n = recv(s->fd, load.scratch, READ_BYTES, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        complain(s, "closed", "", 0);
        hang_up(s);
        return;
    }
    uint64_t now = bt_mono_ns();
    bool over = false;
    bt_buf_append(&s->raw, load.scratch, (size_t)n);
    while (step(s, &over)) {
    }
    take_events(s, now);
    if (over) {
        on_over(s);
    }
}

/* ---- the run ---- */

static int dial(const struct addrinfo *ai)
{
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0 || connect(fd, ai->ai_addr, ai->ai_addrlen) != 0) {
        fprintf(stderr, "connect: %s\n", strerror(errno));
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return fd;
}

static void run(const struct addrinfo *ai)
{
    struct epoll_event events[256];
    load.epfd = epoll_create1(EPOLL_CLOEXEC);
    load.streams = bt_calloc(load.n_streams, sizeof(load.streams[0]));
    for (uint32_t i = 0; i < load.n_streams; i++) {
        struct stream *s = &load.streams[i];
        struct epoll_event ev = {.events = EPOLLIN, .data.ptr = s};
        s->fd = dial(ai);
        BT_ASSERT(epoll_ctl(load.epfd, EPOLL_CTL_ADD, s->fd, &ev) == 0);
        load.open++;
    }
    load.start_ns = bt_mono_ns();
    for (uint32_t i = 0; i < load.n_streams; i++) {
        send_request(&load.streams[i]);
    }
    while (load.open > 0) {
        int n = epoll_wait(load.epfd, events, BT_ARRAY_LEN(events), 30000);
        if (n == 0) {
            fprintf(stderr, "nothing came for 30 s\n");
            load.errors++;
            return;
        }
        for (int i = 0; i < n; i++) {
            on_readable(events[i].data.ptr);
        }
    }
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void put_samples(const char *name, struct samples *s)
{
    static const double at[] = {0.5, 0.9, 0.99};
    static const char *const labels[] = {"p50", "p90", "p99"};
    qsort(s->us, s->n, sizeof(s->us[0]), by_value);
    printf(",\"%s_us\":{\"n\":%zu", name, s->n);
    for (size_t i = 0; i < BT_ARRAY_LEN(at); i++) {
        printf(",\"%s\":%.1f", labels[i],
               s->n > 0 ? s->us[(size_t)(at[i] * (double)(s->n - 1))] : 0);
    }
    printf(",\"max\":%.1f}", s->n > 0 ? s->us[s->n - 1] : 0);
}

static void report(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double user = (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec / 1e6;
    double sys = (double)u.ru_stime.tv_sec + (double)u.ru_stime.tv_usec / 1e6;
    printf("{\"tokens\":%llu,\"requests\":%llu,\"errors\":%llu,\"stream_s\":%.6f,\"all_s\":%.6f,"
           "\"joined\":%llu,\"cpu_user_s\":%.3f,\"cpu_sys_s\":%.3f",
           (unsigned long long)load.events, (unsigned long long)load.finished,
           (unsigned long long)load.errors, (double)(load.last_ns - load.first_ns) / 1e9,
           (double)(load.last_ns - load.start_ns) / 1e9, (unsigned long long)load.joined, user,
           sys);
    put_samples("ttft", &load.ttft);
    put_samples("gap", &load.gap);
    printf("}\n");
}

static bool number(const char *text, uint32_t max, uint32_t *v_p)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    *v_p = (uint32_t)v;
    return *text != '\0' && *end == '\0' && v >= 1 && v <= max;
}

int main(int argc, char **argv)
{
    if (argc < 7 || argc > 8 || !number(argv[2], 16384, &load.n_streams) ||
        !number(argv[3], 1u << 20, &load.tokens) || !number(argv[4], 1u << 20, &load.prompt) ||
        !number(argv[5], 1u << 20, &load.requests) || !number(argv[6], 1u << 20, &load.vocab) ||
        (argc == 8 && strcmp(argv[7], "order") != 0)) {
        fprintf(stderr, "usage: sse_load HOST:PORT STREAMS TOKENS PROMPT_TOKENS REQUESTS VOCAB "
                        "[order]\n");
        return 2;
    }
    char host[256];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *ai = NULL;
    snprintf(host, sizeof(host), "%s", argv[1]);
    char *colon = strrchr(host, ':');
    if (colon != NULL) {
        *colon = '\0';
    }
    if (colon == NULL || getaddrinfo(host, colon + 1, &hints, &ai) != 0) {
        fprintf(stderr, "%s is not HOST:PORT\n", argv[1]);
        return 2;
    }
    load.host = argv[1];
    load.order = argc == 8;
    bt_random(&load.random, sizeof(load.random));
    load.scratch = bt_malloc(READ_BYTES);
    load.ttft.us = bt_malloc(SAMPLES_MAX * sizeof(float));
    load.gap.us = bt_malloc(SAMPLES_MAX * sizeof(float));
    run(ai);
    freeaddrinfo(ai);
    report();
    bool whole = load.errors == 0 && load.finished == (uint64_t)load.n_streams * load.requests;
    return whole ? 0 : 1;
}
