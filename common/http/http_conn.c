/* A connection's output, deadlines and end. Loop thread. Whether there is TLS below (http_tls.c)
 * matters here only. A connection is closed, and its handler
 * is told, only in the loop's own callbacks, never inside a bt_http_ call of a handler. */
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
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
#define PULL_BELOW (BT_HTTP_PIECE / 2)

/* ---- TLS or plain TCP ---- */

ssize_t bt_http_conn_recv(struct bt_http_conn *c, void *buf, size_t cap)
{
    return c->crypt != NULL ? bt_http_crypt_recv(c->crypt, buf, cap) : recv(c->fd, buf, cap, 0);
}

ssize_t bt_http_conn_send(struct bt_http_conn *c, const void *buf, size_t len)
{
    return c->crypt != NULL ? bt_http_crypt_send(c->crypt, buf, len)
                            : send(c->fd, buf, len, MSG_NOSIGNAL);
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
    if (c->crypt != NULL && !c->trace.cut && bt_http_conn_unsent(c) == 0) {
        bt_http_crypt_close(c->crypt); /* otherwise its client shall see that it was cut off */
    }
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
    bt_http_crypt_destroy(c->crypt);
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
        events |= c->crypt != NULL && bt_http_crypt_wants_out(c->crypt) ? EPOLLOUT : 0;
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
    } else if (bt_http_conn_shaking(c)) {
        bool stranger = o->strangers_max > 0;
        bt_http_conn_timer(c, HTTP_TIMER_HANDSHAKE, o->header_timeout_ms / (stranger ? 2 : 1));
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
        BT_INFO("http_slow_reader", "unsent=%zu cut=yes", bt_http_conn_unsent(c));
        c->trace.cut = true;
        alive = false;
    }
    if (alive && !count_unsent(c)) {
        c->trace.cut = true;
        alive = false;
    }
    if (alive && c->state == HTTP_CLOSING && bt_http_conn_unsent(c) == 0) {
        if (c->crypt != NULL) {
            bt_http_crypt_close(c->crypt);
        }
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
