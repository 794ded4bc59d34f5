/* Open-loop load on the front door: requests of /v1/completions at a rate, whatever becomes of the
 * ones before, each on a connection of its own, from one epoll loop that costs little beside what
 * it measures. open_load HOST:PORT RATE SECONDS TOKENS PROMPT_TOKENS VOCAB TTFT_MS Poisson
 * arrivals; PROMPT_TOKENS random ids below VOCAB, TOKENS to generate, x-slo-ttft-ms TTFT_MS. Times
 * begin when a request was due, so a generator that falls behind counts against nobody else. The
 * last line is JSON: sent, good (whole, first token within TTFT_MS), late, refused (429) with the
 * time until the refusal was there (ms: p50, p99, max) and whether each said Retry-After, failed,
 * how late the generator itself was, own CPU seconds. Exit status: 0, 2 usage. */
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/base/clock.h"

#define HEAD_MAX 4096
#define TAIL     16    /* bytes of the answer that are kept to see its end */
#define DRAIN_S  120.0 /* for the answers, after the last request */

struct call {
    int fd;
    uint64_t due_ns, first_ns;
    struct bt_buf head; /* until it is whole */
    char tail[TAIL + 1];
    size_t n_tail;
    int status; /* 0: the head is not whole yet */
    bool connected;
    char *out;
    size_t out_len;
};

static struct {
    const struct addrinfo *ai;
    const char *host;
    int epfd;
    double rate, seconds, ttft_ms;
    uint32_t tokens, prompt, vocab;
    uint64_t random;
    uint64_t sent, good, late, refused, failed, no_retry_after, open;
    float *refused_ms, *lag_ms;
    size_t cap;
} load;

static double uniform(void)
{
    load.random = load.random * 6364136223846793005ull + 1442695040888963407ull;
    return ((double)(load.random >> 33) + 1) / 2147483649.0;
}

static void end(struct call *c, uint64_t *count)
{
    (*count)++;
    load.open--;
    close(c->fd);
    bt_buf_cleanup(&c->head);
    free(c->out);
    free(c);
}

static void failed(struct call *c, const char *what)
{
    if (load.failed < 5) {
        fprintf(stderr, "failed: %s, status %d: %.*s\n", what, c->status,
                (int)BT_MIN(c->head.len, (size_t)300), c->head.len != 0 ? c->head.data : "");
    }
    end(c, &load.failed);
}

static void build(struct call *c)
{
    struct bt_buf body = {0}, out = {0};
    bt_buf_puts(&body, "{\"prompt\":[");
    for (uint32_t i = 0; i < load.prompt; i++) {
        bt_buf_printf(&body, i == 0 ? "%u" : ",%u", (uint32_t)(uniform() * (load.vocab - 1)));
    }
    bt_buf_printf(&body,
                  "],\"max_tokens\":%u,\"temperature\":0,\"ignore_eos\":true,\"stream\":true}",
                  load.tokens);
    bt_buf_printf(&out,
                  "POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
                  "x-slo-ttft-ms: %.0f\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
                  load.host, load.ttft_ms, body.len);
    bt_buf_append(&out, body.data, body.len);
    c->out_len = out.len;
    c->out = bt_buf_take(&out);
    bt_buf_cleanup(&body);
    bt_buf_cleanup(&out);
}

static void begin(uint64_t due_ns)
{
    struct call *c = bt_calloc(1, sizeof(*c));
    int one = 1;
    c->due_ns = due_ns;
    load.lag_ms[load.sent++] = (float)((double)(bt_mono_ns() - due_ns) / 1e6);
    load.open++;
    build(c);
    c->fd = socket(load.ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    BT_ASSERT(c->fd >= 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    struct epoll_event ev = {.events = EPOLLOUT, .data.ptr = c};
    if (connect(c->fd, load.ai->ai_addr, load.ai->ai_addrlen) != 0 && errno != EINPROGRESS) {
        failed(c, strerror(errno));
        return;
    }
    BT_ASSERT(epoll_ctl(load.epfd, EPOLL_CTL_ADD, c->fd, &ev) == 0);
}

static void on_writable(struct call *c)
{
    /* Smaller than a fresh socket's buffer: it goes as a whole. */
    ssize_t n = send(c->fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (n != (ssize_t)c->out_len) {
        failed(c, "it could not be sent");
        return;
    }
    c->connected = true;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    BT_ASSERT(epoll_ctl(load.epfd, EPOLL_CTL_MOD, c->fd, &ev) == 0);
}

/* True if the call goes on. */
static bool on_head(struct call *c, uint64_t now)
{
    bt_buf_append(&c->head, "", 1);
    c->head.len--;
    if (strstr(c->head.data, "\r\n\r\n") == NULL) {
        return c->head.len < HEAD_MAX;
    }
    c->status = strncmp(c->head.data, "HTTP/1.1 ", 9) == 0 ? atoi(c->head.data + 9) : -1;
    c->first_ns = now; /* a stream's head leaves with its first token */
    if (c->status == 429) {
        load.refused_ms[load.refused] = (float)((double)(now - c->due_ns) / 1e6);
        load.no_retry_after += strcasestr(c->head.data, "\r\nretry-after: ") == NULL;
        end(c, &load.refused);
        return true;
    }
    return c->status == 200;
}

static void keep_tail(struct call *c, const char *data, size_t len)
{
    size_t n = BT_MIN(len, (size_t)TAIL), old = BT_MIN(c->n_tail, TAIL - n);
    memmove(c->tail, c->tail + c->n_tail - old, old);
    memcpy(c->tail + old, data + len - n, n);
    c->n_tail = old + n;
    c->tail[c->n_tail] = '\0';
}

static void on_readable(struct call *c)
{
    char data[65536];
    ssize_t n = recv(c->fd, data, sizeof(data), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) { /* the last chunk of a stream that was not cut off */
        bool whole = n == 0 && c->status == 200 && c->n_tail >= 5 &&
                     strcmp(c->tail + c->n_tail - 5, "0\r\n\r\n") == 0;
        bool in_time = (double)(c->first_ns - c->due_ns) / 1e6 <= load.ttft_ms;
        if (!whole) {
            failed(c, n < 0 ? strerror(errno) : "the answer is cut off");
        } else {
            end(c, in_time ? &load.good : &load.late);
        }
        return;
    }
    if (c->status == 0) {
        bt_buf_append(&c->head, data, (size_t)n);
        keep_tail(c, data, (size_t)n);
        if (!on_head(c, bt_mono_ns())) {
            failed(c, "neither served nor refused");
            return;
        }
        return;
    }
    keep_tail(c, data, (size_t)n);
}

static void arm(int timer, uint64_t at_ns)
{
    struct itimerspec t = {.it_value = {(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)}};
    BT_ASSERT(timerfd_settime(timer, TFD_TIMER_ABSTIME, &t, NULL) == 0);
}

static void run(void)
{
    struct epoll_event events[256], ev = {.events = EPOLLIN, .data.ptr = NULL};
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    load.epfd = epoll_create1(EPOLL_CLOEXEC);
    BT_ASSERT(timer >= 0 && epoll_ctl(load.epfd, EPOLL_CTL_ADD, timer, &ev) == 0);
    uint64_t start = bt_mono_ns(), due = start, stop = start + (uint64_t)(load.seconds * 1e9);
    arm(timer, due);
    while (due < stop || load.open > 0) {
        int n = epoll_wait(load.epfd, events, BT_ARRAY_LEN(events), 1000);
        uint64_t now = bt_mono_ns();
        if (now > stop + (uint64_t)(DRAIN_S * 1e9)) {
            fprintf(stderr, "%llu answers have not ended after %.0f s\n",
                    (unsigned long long)load.open, DRAIN_S);
            load.failed += load.open;
            break;
        }
        for (int i = 0; i < n; i++) {
            struct call *c = events[i].data.ptr;
            if (c != NULL && c->connected) {
                on_readable(c);
            } else if (c != NULL) {
                on_writable(c);
            }
        }
        while (due < stop && due <= now && load.sent < load.cap) {
            begin(due);
            due += (uint64_t)(-log(uniform()) / load.rate * 1e9);
        }
        if (load.sent == load.cap) {
            due = stop;
        }
        if (due < stop) {
            arm(timer, due);
        } else {
            struct itimerspec none = {0};
            BT_ASSERT(timerfd_settime(timer, 0, &none, NULL) == 0);
        }
    }
    close(timer);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void put(const char *name, float *v, size_t n)
{
    qsort(v, n, sizeof(*v), by_value);
    printf(",\"%s\":{\"p50\":%.3f,\"p99\":%.3f,\"max\":%.3f}", name, n != 0 ? v[(n - 1) / 2] : 0,
           n != 0 ? v[(size_t)(0.99 * (double)(n - 1))] : 0, n != 0 ? v[n - 1] : 0);
}

static void report(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double cpu = (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec / 1e6 +
                 (double)u.ru_stime.tv_sec + (double)u.ru_stime.tv_usec / 1e6;
    printf("{\"sent\":%llu,\"good\":%llu,\"late\":%llu,\"refused\":%llu,\"failed\":%llu,"
           "\"no_retry_after\":%llu,\"cpu_s\":%.3f",
           (unsigned long long)load.sent, (unsigned long long)load.good,
           (unsigned long long)load.late, (unsigned long long)load.refused,
           (unsigned long long)load.failed, (unsigned long long)load.no_retry_after, cpu);
    put("refused_ms", load.refused_ms, load.refused);
    put("lag_ms", load.lag_ms, load.sent);
    printf("}\n");
}

static bool number(const char *text, double max, double *v_p)
{
    char *rest;
    *v_p = strtod(text, &rest);
    return *text != '\0' && *rest == '\0' && *v_p > 0 && *v_p <= max;
}

int main(int argc, char **argv)
{
    double tokens, prompt, vocab;
    if (argc != 8 || !number(argv[2], 1e5, &load.rate) || !number(argv[3], 3600, &load.seconds) ||
        !number(argv[4], 1e6, &tokens) || !number(argv[5], 1e4, &prompt) ||
        !number(argv[6], 1e7, &vocab) || !number(argv[7], 1e6, &load.ttft_ms)) {
        fprintf(stderr,
                "usage: open_load HOST:PORT RATE SECONDS TOKENS PROMPT_TOKENS VOCAB TTFT_MS\n");
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
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    load.ai = ai;
    load.host = argv[1];
    load.tokens = (uint32_t)tokens;
    load.prompt = (uint32_t)prompt;
    load.vocab = (uint32_t)vocab;
    load.cap = (size_t)(2 * load.rate * load.seconds) + 1000;
    load.refused_ms = bt_calloc(load.cap, sizeof(float));
    load.lag_ms = bt_calloc(load.cap, sizeof(float));
    bt_random(&load.random, sizeof(load.random));
    run();
    report();
    freeaddrinfo(ai);
    free(load.refused_ms);
    free(load.lag_ms);
    return 0;
}
