/* Listener, connections' output, limits and timeouts of common/http. Loop thread. Plain TCP: a TLS
 * layer would replace bt_http_conn_recv and bt_http_conn_send and nothing else. What a connection
 * reads is http_input.c, the parser is http_parse.c, responses are http_reply.c. A connection is
 * closed, and its handler is told, only in the loop's own callbacks, never inside a bt_http_ call
 * of a handler. */
#include "common/http/http.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/http/http_priv.h"
#include "common/log/log.h"

#define LINGER_MS 1000
/* A client must read a waiting answer at least at this rate, averaged over the idle timeout.
 * Otherwise the connection is closed: else a few clients that read a byte a minute would hold
 * memory for days. 64 kbit/s is less than every usual link has, and as much as an event stream of
 * 40 tokens a second needs. */
#define READ_BYTES_PER_S 8192
#define LOOKS            2 /* checks during the idle timeout */
#define PROBE_MS         500
#define PROBES_MAX       2 /* the second one is for clients behind a proxy: see bt_http_conn_probe */
/* Time of a turn of the loop for output of handlers that answer later. Connections that get no time
 * are served in the next turn, in order. */
#define FLUSH_NS 4000000ull
/* A pulled answer gives its next piece when less than this is unsent. */
#define PULL_BELOW       (BT_HTTP_PIECE / 2)
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

/* ---- the place for TLS ---- */

ssize_t bt_http_conn_recv(struct bt_http_conn *c, void *buf, size_t cap)
{
    return recv(c->fd, buf, cap, 0);
}

ssize_t bt_http_conn_send(struct bt_http_conn *c, const void *buf, size_t len)
{
    return send(c->fd, buf, len, MSG_NOSIGNAL);
}

/* ---- end, deadlines, epoll events ---- */

void bt_http_conn_close(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    struct bt_http_req *r = c->req;
    bt_list_remove(&c->link);
    bt_list_remove(&c->dirty);
    bt_list_remove(&c->pull);
    bt_list_remove(&c->turn);
    h->unsent -= c->counted;
    bt_http_share_leave(c);
    bt_timer_stop(h->loop, &c->timer);
    bt_loop_fd_del(h->loop, c->w);
    close(c->fd);
    h->n_conns--;
    bt_http_parser_cleanup(&c->parser);
    bt_buf_cleanup(&c->in);
    if (r != NULL) {
        r->conn = NULL;
    }
    /* Without on_gone the handler ends the request later, and its output is dropped. */
    if (r != NULL && r->on_gone != NULL) {
        r->in_gone = true;
        r->note = c->trace.note; /* on_gone may complete it */
        r->on_gone(r->on_gone_arg);
        r->note = NULL;
        bt_http_req_free(r);
    }
    bt_http_record_settle(c, true);
    bt_buf_cleanup(&c->out);
    free(c);
}

void bt_http_conn_cut(struct bt_http_conn *c)
{
    c->trace.cut = true;
    bt_http_conn_close(c);
}

/* Output bytes that the client's machine has acknowledged. The part that the client has not read
 * yet is small. */
static uint64_t taken(const struct bt_http_conn *c)
{
    int left = 0;
    if (ioctl(c->fd, SIOCOUTQ, &left) != 0 || left < 0) {
        left = 0;
    }
    return c->sent - BT_MIN((uint64_t)left, c->sent);
}

/* Does its answer wait for the client to read? A pulled answer makes its next piece as soon as
 * there is room, so it waits for the client even if nothing is unsent now. A stream that has sent
 * all its events does not. */
static bool is_read(const struct bt_http_conn *c)
{
    const struct bt_http_req *r = c->req;
    return bt_http_conn_unsent(c) > 0 || (r != NULL && r->pull != NULL && !r->pull_waits);
}

/* Checks the rate again. False: the client has taken too little since the check before the last
 * one. */
static bool reads_on(struct bt_http_conn *c)
{
    uint64_t now = taken(c), least = (uint64_t)READ_BYTES_PER_S * c->h->o.idle_timeout_ms / 1000;
    /* If nothing is unsent now, the client does not cause the delay. */
    bool slow =
        c->looks == LOOKS && bt_http_conn_unsent(c) > 0 && now - c->taken[LOOKS - 1] < least;
    c->taken[1] = c->taken[0];
    c->taken[0] = now;
    c->looks = (uint8_t)BT_MIN(c->looks + 1, LOOKS);
    return !slow;
}

static void on_timeout(void *arg);

void bt_http_conn_timer(struct bt_http_conn *c, bt_http_timer_t kind, uint32_t ms)
{
    if (c->timer_kind == kind) {
        return; /* the deadline counts from the beginning of the state */
    }
    c->timer_kind = kind;
    if (kind == HTTP_TIMER_NONE) {
        bt_timer_stop(c->h->loop, &c->timer);
    } else {
        bt_timer_start(c->h->loop, &c->timer, ms, 0, on_timeout, c);
    }
}

void bt_http_conn_update(struct bt_http_conn *c)
{
    const struct bt_http_options *o = &c->h->o;
    /* It is already in the list of connections with work to do. */
    bool waits = !bt_list_empty(&c->turn);
    uint32_t events = bt_http_conn_unsent(c) > 0 && !waits ? EPOLLOUT : 0;
    bool reading = c->state == HTTP_READING && c->in.len == c->in_off;
    if ((reading || c->state == HTTP_LINGERING) && !waits) {
        events |= EPOLLIN;
    }
    if (c->state == HTTP_ANSWERING && !c->half_closed) {
        events |= EPOLLRDHUP; /* so that the end of an idle stream's client is noticed at once */
    }
    if (events != c->events) {
        c->events = events;
        bt_loop_fd_mod(c->h->loop, c->w, events);
    }
    if (is_read(c)) {
        if (c->timer_kind != HTTP_TIMER_WRITE) {
            c->looks = 0;
            (void)reads_on(c);
        }
        bt_http_conn_timer(c, HTTP_TIMER_WRITE, o->idle_timeout_ms / LOOKS);
    } else if (c->state == HTTP_ANSWERING && c->half_closed && c->probes < PROBES_MAX) {
        bt_http_conn_timer(c, HTTP_TIMER_PROBE, PROBE_MS);
    } else if (c->state == HTTP_ANSWERING) {
        bt_http_conn_timer(c, HTTP_TIMER_NONE, 0);
    } else if (c->state == HTTP_LINGERING) {
        bt_http_conn_timer(c, HTTP_TIMER_LINGER, LINGER_MS);
    } else if (c->parser.phase == BT_HTTP_BODY) {
        bt_http_conn_timer(c, HTTP_TIMER_BODY, o->body_timeout_ms);
    } else if (bt_http_parser_started(&c->parser)) {
        bool stranger = o->strangers_max > 0 && !bt_list_empty(&c->stranger);
        bt_http_conn_timer(c, HTTP_TIMER_HEADER, o->header_timeout_ms / (stranger ? 2 : 1));
    } else {
        bt_http_conn_timer(c, HTTP_TIMER_IDLE, o->idle_timeout_ms);
    }
}

/* The client has closed its sending side. Either it is a program that has sent all its requests and
 * waits for the answer (nc -N, a socket in a script), or it has gone: the FIN is the same. Sending
 * bytes shows the difference, because a client that has gone resets the connection. The bytes must
 * not change the answer. Before the answer begins, an interim response is sent, which every
 * HTTP/1.1 client ignores; within the answer, the first digit of the next chunk's size (RFC 9112,
 * 7.1: any number of digits is allowed). A proxy that forwards a FIN gets its client's reset after
 * the first bytes, and resets this connection after the second ones. HTTP/1.0 has no such bytes, so
 * there a FIN counts as gone. */
void bt_http_conn_probe(struct bt_http_conn *c)
{
    const struct bt_http_req *r = c->req;
    c->half_closed = true;
    c->probes++;
    if (r->started && (r->head_only || !r->chunked)) {
        return; /* the answer is complete except for its end, or has no place for additional
                   bytes */
    }
    bt_buf_puts(&c->out, r->started ? "0" : "HTTP/1.1 100 Continue\r\n\r\n");
}

/* ---- output ---- */

/* Sends as much as it can. False: the client is gone. */
static bool conn_flush(struct bt_http_conn *c)
{
    while (bt_http_conn_unsent(c) > 0) {
        ssize_t n = bt_http_conn_send(c, c->out.data + c->out_off, bt_http_conn_unsent(c));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        c->out_off += (size_t)n;
        bt_http_record_sent(c, (size_t)n);
        if (c->out_off > HTTP_READ_BYTES) {
            bt_buf_consume(&c->out, c->out_off);
            c->out_off = 0;
        }
    }
    c->out_off = 0;
    if (c->out.cap > 4096) {
        bt_buf_cleanup(&c->out);
    } else {
        bt_buf_clear(&c->out);
    }
    bt_http_record_settle(c, false);
    return true;
}

/* Updates h->unsent. False: all connections together have too much unsent, and this one has the
 * most. If another one has the most, that one is closed. */
static bool count_unsent(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    size_t n = bt_http_conn_unsent(c);
    h->unsent += n - c->counted;
    c->counted = n;
    if (h->unsent <= h->o.out_total) {
        return true;
    }
    struct bt_http_conn *most = c;
    struct bt_list *pos;
    bt_list_for_each (pos, &h->conns) {
        struct bt_http_conn *o = BT_CONTAINER_OF(pos, struct bt_http_conn, link);
        most = o->counted > most->counted ? o : most;
    }
    BT_DEBUG("http_unsent_total", "unsent=%zu cut=%zu", h->unsent, most->counted);
    if (most == c) {
        return false;
    }
    bt_http_conn_cut(most);
    return true;
}

static void pull_some(void *arg);

/* Is the answer pulled, and has the client taken the last piece? */
static bool wants_piece(const struct bt_http_conn *c)
{
    const struct bt_http_req *r = c->req;
    return r != NULL && r->pull != NULL && !r->pull_waits && bt_http_conn_unsent(c) < PULL_BELOW;
}

static void queue_pull(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    if (!wants_piece(c) || !bt_list_empty(&c->pull)) {
        return;
    }
    bt_list_insert_tail(&h->pulling, &c->pull);
    if (h->pull_timer.heap_pos == 0) {
        bt_timer_start(h->loop, &h->pull_timer, 0, 0, pull_some, h);
    }
}

void bt_http_conn_settle(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    h->current = c;
    bt_list_remove(&c->dirty);
    bool alive = conn_flush(c);
    while (alive && bt_http_input_next(c)) {
        alive = conn_flush(c);
    }
    h->current = NULL;
    if (alive && c->req != NULL && c->req->started && bt_http_conn_unsent(c) > h->o.out_max) {
        BT_DEBUG("http_slow_reader", "unsent=%zu", bt_http_conn_unsent(c));
        c->trace.cut = true;
        alive = false;
    }
    if (alive && !count_unsent(c)) {
        c->trace.cut = true;
        alive = false;
    }
    if (alive && c->state == HTTP_CLOSING && bt_http_conn_unsent(c) == 0) {
        alive = shutdown(c->fd, SHUT_WR) == 0;
        c->state = HTTP_LINGERING;
        bt_buf_cleanup(&c->in);
        c->in_off = 0;
    }
    if (alive) {
        queue_pull(c);
        bt_http_share_count(c);
        bt_http_conn_update(c);
    } else {
        bt_http_conn_close(c);
    }
}

/* Serves connections with pulled answers in turn, for one slice of a turn of the loop. */
static void pull_some(void *arg)
{
    struct bt_http *h = arg;
    uint64_t until_ns = bt_mono_ns() + BT_LOOP_SLICE_NS;
    while (!bt_list_empty(&h->pulling) && bt_mono_ns() < until_ns) {
        struct bt_http_conn *c = BT_CONTAINER_OF(h->pulling.next, struct bt_http_conn, pull);
        bt_list_remove(&c->pull);
        if (wants_piece(c)) { /* else its handler has ended it meanwhile */
            h->current = c;
            bt_http_req_pull(c->req);
            h->current = NULL;
        }
        bt_http_conn_settle(c); /* adds it at the end of the list if it wants more */
    }
    if (!bt_list_empty(&h->pulling)) {
        bt_timer_start(h->loop, &h->pull_timer, 0, 0, pull_some, h);
    }
}

/* Connections that become dirty meanwhile are added at the end of the list. */
static void flush_all(void *arg)
{
    struct bt_http *h = arg;
    uint64_t until_ns = bt_loop_until(h->loop, FLUSH_NS);
    while (!bt_list_empty(&h->dirty) && bt_mono_ns() < until_ns) {
        bt_http_conn_settle(BT_CONTAINER_OF(h->dirty.next, struct bt_http_conn, dirty));
    }
    if (!bt_list_empty(&h->dirty)) {
        bt_timer_start(h->loop, &h->flush_timer, 0, 0, flush_all, h);
    }
}

void bt_http_conn_dirty(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    if (c == h->current || !bt_list_empty(&c->dirty)) {
        return;
    }
    if (h->flush_timer.heap_pos == 0) {
        bt_timer_start(h->loop, &h->flush_timer, 0, 0, flush_all, h);
    }
    bt_list_insert_tail(&h->dirty, &c->dirty);
}

static void on_timeout(void *arg)
{
    struct bt_http_conn *c = arg;
    bt_http_timer_t kind = c->timer_kind;
    c->timer_kind = HTTP_TIMER_NONE;
    if (kind == HTTP_TIMER_WRITE && reads_on(c)) {
        bt_http_conn_timer(c, kind, c->h->o.idle_timeout_ms / LOOKS);
        return;
    }
    /* The client has sent input, and waits for this server. */
    if (kind != HTTP_TIMER_WRITE && !bt_list_empty(&c->turn)) {
        bt_http_conn_update(c);
        return;
    }
    if (kind == HTTP_TIMER_HEADER) {
        bt_http_reply_error(c, 408, "the header did not arrive in time");
    } else if (kind == HTTP_TIMER_BODY && !c->parser.skip) {
        bt_http_reply_error(c, 408, "the body did not arrive in time");
    } else if (kind == HTTP_TIMER_PROBE) {
        bt_http_conn_probe(c);
    } else {
        bt_http_conn_cut(c);
        return;
    }
    bt_http_conn_settle(c);
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
    static const char answer[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                                 "Retry-After: 1\r\nConnection: close\r\n\r\n";
    uint64_t now = bt_mono_ns();
    h->unheard++;
    h->accept_unsaid++;
    if (h->accept_said_ns == 0 || now - h->accept_said_ns >= ACCEPT_SAY_NS) {
        BT_WARN("http_accept_failed", "err=%s times=%u remedy=%s", strerror(error),
                h->accept_unsaid, "raise LimitNOFILE or lower the connection limit");
        h->accept_said_ns = now;
        h->accept_unsaid = 0;
    }
    if (h->spare_fd >= 0) {
        close(h->spare_fd);
        h->spare_fd = -1;
        int fd = bt_loop_accept(h->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            ssize_t n = send(fd, answer, sizeof(answer) - 1, MSG_NOSIGNAL);
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
    static const char answer[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                                 "Retry-After: 1\r\nConnection: close\r\n\r\n";
    c->h->unheard++;
    if (c->state == HTTP_READING && bt_http_conn_unsent(c) == 0) {
        ssize_t n = bt_http_conn_send(c, answer, sizeof(answer) - 1);
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
        if (h->n_conns >= h->o.conns_max + REFUSED_CONNS_MAX) {
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
