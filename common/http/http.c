/* The server of common/http: listens, accepts connections up to its limits, starts and ends. Loop
 * thread. What a connection reads is http_input.c, its output and deadlines are http_conn.c,
 * responses are http_reply.c. */
#include "common/http/http.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/http/http_priv.h"
#include "common/log/log.h"

#define ACCEPTS_PER_TURN 32
/* After accept failed because memory or descriptors were missing. */
#define ACCEPT_PAUSE_MS 100
/* At most one log line a minute; there may be ten failures a second. */
#define ACCEPT_SAY_NS 60000000000ull
/* Connections above conns_max that get a 503; further ones are closed at once. */
#define REFUSED_CONNS_MAX 128
/* Limit of bytes that the kernel has taken and not sent: enough to write one piece while the
 * previous one is being sent. What a client does not read then waits in the answer's source, not in
 * the kernel. */
#define KERNEL_UNSENT (128 * 1024)

/* To a client that is closed before its request was read. */
static const char no_place[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                               "Retry-After: 1\r\nConnection: close\r\n\r\n";

void bt_http_options_default(struct bt_http_options *o)
{
    *o = (struct bt_http_options){.body_max = 4 * 1024 * 1024,
                                  .conns_max = 4096,
                                  .header_timeout_ms = 10000,
                                  .body_timeout_ms = 30000,
                                  .idle_timeout_ms = 60000,
                                  .out_max = 1024 * 1024,
                                  .out_total = 128 * 1024 * 1024};
}

const char *bt_http_key_text(const struct bt_http *h, const char *name, char text[64])
{
    text[0] = '\0';
    if (h->o.key_prefix != NULL) {
        snprintf(text, 64, " (%s%s)", h->o.key_prefix, name);
    }
    return text;
}

/* ---- accepting ---- */

/* A client whose machine has gone sends no FIN. Its connection ends if it does not acknowledge data
 * for the idle time or, while there is no data to send, does not answer probes. */
static void miss_the_vanished(int fd, uint32_t idle_timeout_ms)
{
    unsigned ms = idle_timeout_ms;
    int on = 1, quiet_s = BT_MAX((int)(ms / 3000), 1), probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &quiet_s, sizeof(quiet_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &quiet_s, sizeof(quiet_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

static struct bt_http_conn *conn_create(struct bt_http *h, int fd,
                                        const struct sockaddr_storage *at)
{
    struct bt_http_conn *c = bt_calloc(1, sizeof(*c));
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* tokens must not wait for ACKs */
    int unsent = KERNEL_UNSENT;
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
    miss_the_vanished(fd, h->o.idle_timeout_ms);
    c->h = h;
    c->fd = fd;
    c->state = HTTP_READING;
    bt_list_init(&c->dirty);
    bt_list_init(&c->pull);
    bt_list_init(&c->turn);
    bt_list_init(&c->stranger);
    bt_http_share_join(c, at);
    bt_http_record_client(c, at);
    bt_list_insert_tail(&h->conns, &c->link);
    bt_http_parser_init(&c->parser, h->o.body_max);
    c->crypt = h->o.tls != NULL ? bt_http_crypt_create(h->o.tls, fd) : NULL;
    c->events = EPOLLIN;
    c->w = bt_loop_fd_add(h->loop, fd, EPOLLIN, bt_http_input_event, c);
    h->n_conns++;
    return c;
}

static void on_accept(void *arg, uint32_t events);

static void accept_again(void *arg)
{
    struct bt_http *h = arg;
    if (h->spare_fd < 0) {
        h->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    if (h->listen_w != NULL) {
        bt_loop_fd_mod(h->loop, h->listen_w, EPOLLIN);
    }
}

/* There is no descriptor (or memory) for a new client. With the spare descriptor the client gets an
 * answer. Then the listener pauses, because epoll would report the next client at once. */
static void accept_failed(struct bt_http *h, int error)
{
    uint32_t times = bt_log_due(&h->accept_pace, bt_mono_ns(), ACCEPT_SAY_NS);
    h->unheard++;
    if (times > 0) {
        BT_WARN("http_accept_failed", "err=%s times=%u remedy=%s", strerror(error), times,
                "raise LimitNOFILE or lower the connection limit");
    }
    if (h->spare_fd >= 0) {
        close(h->spare_fd);
        h->spare_fd = -1;
        int fd = bt_loop_accept(h->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            ssize_t n =
                h->o.tls != NULL ? 0 : send(fd, no_place, sizeof(no_place) - 1, MSG_NOSIGNAL);
            (void)n; /* best effort */
            shutdown(fd, SHUT_WR);
            close(fd);
        }
    }
    bt_loop_fd_mod(h->loop, h->listen_w, 0);
    bt_timer_start(h->loop, &h->accept_timer, ACCEPT_PAUSE_MS, 0, accept_again, h);
}

static void refuse_conn(struct bt_http_conn *c)
{
    char why[128], key[64];
    snprintf(why, sizeof(why), "there are %u connections already%s", c->h->o.conns_max,
             bt_http_key_text(c->h, "conns_max", key));
    bt_http_reply_error(c, 503, why);
}

/* Closes a stranger to make room for a newer one: a normal client is a stranger only for a
 * moment. */
static void evict(struct bt_http_conn *c)
{
    c->h->unheard++;
    if (c->state == HTTP_READING && bt_http_conn_unsent(c) == 0 && !bt_http_conn_shaking(c)) {
        ssize_t n = bt_http_conn_send(c, no_place, sizeof(no_place) - 1);
        (void)n; /* best effort */
    }
    bt_http_conn_close(c);
}

static void on_accept(void *arg, uint32_t events)
{
    struct bt_http *h = arg;
    (void)events;
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        struct sockaddr_storage at = {0};
        socklen_t at_len = sizeof(at);
        int fd = bt_loop_accept(h->listen_fd, (struct sockaddr *)&at, &at_len,
                                SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            int e = errno;
            if (e == EMFILE || e == ENFILE || e == ENOBUFS || e == ENOMEM) {
                accept_failed(h, e);
                return;
            }
            if (e == EAGAIN || e == EWOULDBLOCK) {
                return;
            }
            continue; /* an error of that client's connection only: ECONNABORTED, EPROTO, ... */
        }
        /* A handshake only to say no would cost more than a request. */
        if (h->n_conns >= h->o.conns_max + (h->o.tls != NULL ? 0 : REFUSED_CONNS_MAX)) {
            close(fd);
            h->unheard++;
            continue;
        }
        bool full = h->n_conns >= h->o.conns_max;
        struct bt_http_conn *c = conn_create(h, fd, &at);
        struct bt_http_conn *victim = bt_http_share_victim(c);
        if (victim != NULL) {
            evict(victim);
        }
        if (full) {
            refuse_conn(c);
        }
        bt_http_conn_settle(c);
    }
}

/* ---- creation and end ---- */

/* Splits "host:port" or "[v6]:port" into two strings. */
static bool split_listen(const char *listen, char *host, size_t host_cap, const char **port_p)
{
    const char *colon = strrchr(listen, ':');
    if (colon == NULL || colon[1] == '\0' || strspn(colon + 1, "0123456789") != strlen(colon + 1) ||
        strlen(colon + 1) > 5 || atoi(colon + 1) > 65535) {
        return false;
    }
    size_t n = (size_t)(colon - listen);
    bool brackets = n >= 2 && listen[0] == '[' && colon[-1] == ']';
    if (brackets) {
        listen++;
        n -= 2;
    }
    if (n == 0 || n >= host_cap || (!brackets && memchr(listen, ':', n) != NULL)) {
        return false;
    }
    memcpy(host, listen, n);
    host[n] = '\0';
    *port_p = colon + 1;
    return true;
}

static bt_status_t open_listener(const char *listen_at, int *fd_p, int *port_p)
{
    char host[256];
    const char *port;
    struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV,
                             .ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM};
    struct addrinfo *ai = NULL;
    if (listen_at == NULL || !split_listen(listen_at, host, sizeof(host), &port)) {
        BT_ERROR("http_listen_invalid", "listen=%s remedy=%s", listen_at != NULL ? listen_at : "",
                 "write host:port or [v6]:port, port 0 to 65535");
        return BT_ERR_CONFIG;
    }
    int rc = getaddrinfo(host, port, &hints, &ai);
    if (rc != 0) {
        BT_ERROR("http_listen_invalid", "listen=%s err=%s", listen_at, gai_strerror(rc));
        return BT_ERR_CONFIG;
    }
    int one = 1;
    struct sockaddr_storage at;
    socklen_t at_len = sizeof(at);
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
              bind(fd, ai->ai_addr, ai->ai_addrlen) == 0 && listen(fd, 4096) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &at_len) == 0;
    int e = errno;
    freeaddrinfo(ai);
    if (!ok) {
        BT_ERROR("http_listen_failed", "listen=%s err=%s", listen_at, strerror(e));
        if (fd >= 0) {
            close(fd);
        }
        return BT_ERR_IO;
    }
    *fd_p = fd;
    *port_p = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                             : ((struct sockaddr_in *)&at)->sin_port);
    return BT_OK;
}

bt_status_t bt_http_create(struct bt_loop *loop, const struct bt_http_options *o,
                           bt_http_handler_fn fn, void *arg, struct bt_http **h_p, int *port_p)
{
    int fd, port;
    bt_status_t st = open_listener(o->listen, &fd, &port);
    if (st != BT_OK) {
        return st;
    }
    struct bt_http *h = bt_calloc(1, sizeof(*h));
    h->loop = loop;
    h->o = *o;
    h->o.listen = NULL; /* the string belongs to the caller */
    h->fn = fn;
    h->arg = arg;
    h->listen_fd = fd;
    h->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bt_list_init(&h->conns);
    bt_list_init(&h->dirty);
    bt_list_init(&h->pulling);
    bt_list_init(&h->turns);
    bt_list_init(&h->strangers);
    h->owners = bt_map_create(sizeof(uint64_t));
    bt_random(&h->seed, sizeof(h->seed));
    h->scratch = bt_malloc(HTTP_READ_BYTES);
    h->listen_w = bt_loop_fd_add(loop, fd, EPOLLIN, on_accept, h);
    *h_p = h;
    if (port_p != NULL) {
        *port_p = port;
    }
    return BT_OK;
}

static void stop_listening(struct bt_http *h)
{
    if (h->listen_w == NULL) {
        return;
    }
    bt_timer_stop(h->loop, &h->accept_timer);
    bt_loop_fd_del(h->loop, h->listen_w);
    h->listen_w = NULL;
    close(h->listen_fd);
}

void bt_http_wind_down(struct bt_http *h)
{
    h->winding_down = true;
}

void bt_http_drain(struct bt_http *h)
{
    struct bt_list *pos, *tmp;
    h->draining = true;
    stop_listening(h);
    bt_list_for_each_safe (pos, tmp, &h->conns) {
        struct bt_http_conn *c = BT_CONTAINER_OF(pos, struct bt_http_conn, link);
        bool idle = c->state == HTTP_READING && !bt_http_parser_started(&c->parser) &&
                    c->in.len == c->in_off && bt_http_conn_unsent(c) == 0 &&
                    bt_list_empty(&c->turn);
        if (idle && c != h->current) {
            bt_http_conn_close(c);
        }
    }
}

void bt_http_destroy(struct bt_http *h)
{
    if (h == NULL) {
        return;
    }
    BT_ASSERT(h->current == NULL);
    stop_listening(h);
    bt_timer_stop(h->loop, &h->flush_timer);
    while (!bt_list_empty(&h->conns)) {
        bt_http_conn_cut(BT_CONTAINER_OF(h->conns.next, struct bt_http_conn, link));
    }
    bt_timer_stop(h->loop, &h->flush_timer);
    bt_timer_stop(h->loop, &h->pull_timer);
    bt_timer_stop(h->loop, &h->turns_timer);
    bt_buf_cleanup(&h->piece);
    if (h->spare_fd >= 0) {
        close(h->spare_fd);
    }
    bt_map_destroy(h->owners);
    free(h->scratch);
    free(h);
}

uint32_t bt_http_conns(const struct bt_http *h)
{
    return h->n_conns;
}

uint64_t bt_http_unheard(const struct bt_http *h)
{
    return h->unheard;
}

size_t bt_http_unsent(const struct bt_http *h)
{
    return h->unsent;
}
