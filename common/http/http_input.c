/* A connection's input: bytes become requests, which get their handlers, in the time that a turn of
 * the loop has for them. Loop thread. The parser is http_parse.c. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "common/http/http_priv.h"
#include "common/log/log.h"

#define LINGER_BYTES (16 * 1024 * 1024)
/* Time of a turn of the loop for input, including its handlers. Connections that get no time are
 * served in the next turn, in order. */
#define INPUT_NS 4000000ull
#define VISIT_NS 200000ull /* for further requests of a connection that had to wait */
/* With this much unsent no further pipelined request is read. */
#define PIPELINE_OUT_BYTES (64 * 1024)

/* ---- requests ---- */

/* Makes the connection's request; the parser has read at least its header. */
static struct bt_http_req *req_create(struct bt_http_conn *c)
{
    struct bt_http_req *r = bt_calloc(1, sizeof(*r));
    r->magic = HTTP_REQ_MAGIC;
    r->conn = c;
    r->parser = c->parser; /* moves: strings are offsets into heap buffers */
    r->held = r->parser.body.len;
    c->announced = 0;
    r->received_ns = bt_mono_ns();
    bt_http_parser_init(&c->parser, c->h->o.body_max);
    r->head_only = strcmp(bt_http_method(r), "HEAD") == 0;
    c->req = r;
    c->state = HTTP_ANSWERING;
    c->half_closed = false;
    bt_http_conn_timer(c, HTTP_TIMER_NONE, 0);
    return r;
}

static void dispatch(struct bt_http_conn *c)
{
    struct bt_http_req *r = req_create(c);
    c->h->fn(c->h->arg, r);
}

/* Would `more` bytes of bodies exceed the limit? Then the request is answered. */
static bool no_room(struct bt_http_conn *c, uint64_t more)
{
    char why[192];
    bt_http_room_t room = bt_http_share_room(c, more);
    if (room == HTTP_ROOM) {
        return false;
    }
    snprintf(why, sizeof(why),
             room == HTTP_ROOM_NONE
                 ? "the request bodies being read have reached their total of %llu bytes"
                 : "your request bodies have reached your share of the total of %llu bytes: send "
                   "fewer at once",
             (unsigned long long)c->h->o.body_total);
    bt_http_reply_error(c, room == HTTP_ROOM_NONE ? 503 : 429, why);
    return true;
}

static bool too_many_conns(struct bt_http_conn *c, uint64_t owner)
{
    char why[192], key[64];
    if (bt_http_share_own(c, owner)) {
        return false;
    }
    snprintf(why, sizeof(why), "you have as many connections as one client may have of %u%s",
             c->h->o.conns_max, bt_http_key_text(c->h, "conns_max", key));
    bt_http_reply_error(c, 429, why);
    return true;
}

/* The header is complete: may the body come? False: the request was answered. */
static bool ask(struct bt_http_conn *c)
{
    bool accepted = c->h->o.head == NULL;
    uint64_t owner = 0;
    if (c->h->o.head != NULL) {
        struct bt_http_req *r = req_create(c);
        if (!c->h->o.head(c->h->arg, r)) {
            BT_ASSERT(c->req == NULL);
            return false;
        }
        accepted = r->accepted;
        owner = r->owner;
        c->parser = r->parser;
        r->parser = (struct bt_http_parser){0};
        bt_http_req_free(r);
        c->req = NULL;
        c->state = HTTP_READING;
    }
    if (accepted && too_many_conns(c, owner)) {
        return false;
    }
    uint64_t announced = bt_http_parser_announced(&c->parser);
    if (announced > 0 && no_room(c, announced)) {
        return false;
    }
    c->announced = (size_t)announced;
    return true;
}

static void refuse(struct bt_http_conn *c, const struct bt_http_parser *p)
{
    char why[160], key[64];
    BT_DEBUG("http_refused", "status=%d why=%s", p->status, p->why);
    snprintf(why, sizeof(why), "%s", p->why);
    if (p->status == 413) {
        snprintf(why, sizeof(why), "the body is larger than %zu bytes%s", c->h->o.body_max,
                 bt_http_key_text(c->h, "body_max", key));
    }
    bt_http_reply_error(c, p->status, why);
}

/* Parses up to the end of a header or request; returns the number of bytes used. */
static size_t conn_feed(struct bt_http_conn *c, const char *data, size_t len)
{
    struct bt_http_parser *p = &c->parser;
    size_t used = 0;
    if (len > 0 && p->phase == BT_HTTP_HEAD && !bt_http_parser_started(p)) {
        c->first_byte_ns = bt_mono_ns();
    }
    if (p->phase == BT_HTTP_HEAD) {
        used = bt_http_parse_head(p, data, len);
        bool complete = p->phase == BT_HTTP_BODY || p->phase == BT_HTTP_DONE;
        if (complete) {
            bt_http_record_begin(c);
        }
        if (complete && !ask(c)) {
            return c->state == HTTP_CLOSING ? len : used;
        }
        if (p->phase == BT_HTTP_BODY && p->expect_continue && !p->http10 && used == len) {
            bt_buf_puts(&c->out, "HTTP/1.1 100 Continue\r\n\r\n");
        }
    }
    if (p->phase == BT_HTTP_BODY) {
        used += bt_http_parse(p, data + used, len - used);
        bt_http_share_count(c);
        if (!c->trace.answered) {
            c->trace.bytes_in = p->body.len;
        }
        if (p->phase != BT_HTTP_REFUSE && !p->skip && c->announced == 0 && no_room(c, 0)) {
            return len;
        }
    }
    if (p->phase == BT_HTTP_REFUSE) {
        refuse(c, p);
        return len; /* the bytes after a bad request are not a request */
    }
    if (p->phase == BT_HTTP_DONE && p->skip) {
        bt_http_parser_reset(p);
        bt_http_conn_timer(c, HTTP_TIMER_NONE, 0);
    }
    return used;
}

/* Parses input from c->in, at most one request, and runs its handler. */
static void conn_advance(struct bt_http_conn *c)
{
    c->in_off += conn_feed(c, c->in.data + c->in_off, c->in.len - c->in_off);
    if (c->in_off == c->in.len) {
        bt_buf_cleanup(&c->in);
        c->in_off = 0;
    }
    if (c->state == HTTP_READING && c->parser.phase == BT_HTTP_DONE) {
        dispatch(c);
    }
}

/* ---- turns ---- */

static void serve_turns(void *arg);

/* Is there time for input in this turn of the loop? The time begins with the first input. */
static bool has_time(struct bt_http *h)
{
    uint64_t turn_ns = bt_loop_turn_ns(h->loop);
    if (h->turn_ns != turn_ns) {
        h->turn_ns = turn_ns;
        h->until_ns = bt_loop_until(h->loop, INPUT_NS);
    }
    return bt_mono_ns() < h->until_ns;
}

/* ... and does no other connection wait longer? */
static bool may_serve(struct bt_http *h)
{
    return bt_list_empty(&h->turns) && has_time(h);
}

/* May the connection that is being served have another request? */
static bool may_go_on(struct bt_http *h)
{
    return may_serve(h) || (bt_mono_ns() < h->visit_ns && has_time(h));
}

static void wait_turn(struct bt_http_conn *c)
{
    struct bt_http *h = c->h;
    if (bt_list_empty(&c->turn)) {
        bt_list_insert_tail(&h->turns, &c->turn);
    }
    if (h->turns_timer.heap_pos == 0) {
        bt_timer_start(h->loop, &h->turns_timer, 0, 0, serve_turns, h);
    }
}

/* Does it have input that can be read now: a request, or part of one, sent before the last
 * answer? */
static bool has_pipelined(const struct bt_http_conn *c)
{
    return c->state == HTTP_READING && c->in.len > c->in_off &&
           bt_http_conn_unsent(c) <= PIPELINE_OUT_BYTES;
}

bool bt_http_input_next(struct bt_http_conn *c)
{
    if (!has_pipelined(c)) {
        return false;
    }
    if (!may_go_on(c->h)) {
        wait_turn(c);
        return false;
    }
    conn_advance(c);
    return true;
}

/* ---- reading ---- */

/* Goes on with the TLS handshake. False: close. */
static bool conn_shake(struct bt_http_conn *c)
{
    switch (bt_http_crypt_shake(c->crypt, c->client)) {
    case BT_HTTP_SHAKE_FAILED: return false;
    case BT_HTTP_SHAKE_PLAIN:
        bt_http_crypt_destroy(c->crypt);
        c->crypt = NULL;
        bt_http_reply_error(c, 400, "this port serves HTTPS only: use https:// in the address");
        break;
    case BT_HTTP_SHAKE_MORE:
    case BT_HTTP_SHAKE_DONE: break;
    }
    return true;
}

/* False: close. */
static bool conn_read(struct bt_http_conn *c)
{
    if (bt_http_conn_shaking(c)) {
        return conn_shake(c);
    }
    ssize_t n = bt_http_conn_recv(c, c->h->scratch, HTTP_READ_BYTES);
    if (n < 0) {
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    }
    if (c->state == HTTP_LINGERING) {
        c->discarded += (size_t)n;
        return n > 0 && c->discarded <= LINGER_BYTES;
    }
    if (n == 0) {
        if (bt_http_conn_unsent(c) == 0) {
            return false;
        }
        c->state = HTTP_CLOSING; /* the client may still read the last answer */
        return true;
    }
    size_t used = conn_feed(c, c->h->scratch, (size_t)n);
    if (used < (size_t)n) {
        bt_buf_append(&c->in, c->h->scratch + used, (size_t)n - used);
    }
    if (c->state == HTTP_READING && c->parser.phase == BT_HTTP_DONE) {
        dispatch(c);
    }
    return true;
}

/* Reads once, if there is input, and continues. The connection may be freed afterwards. */
static void serve(struct bt_http_conn *c)
{
    bool reads = c->readable;
    c->readable = false;
    if (reads) {
        c->h->current = c;
        bool alive = conn_read(c);
        c->h->current = NULL;
        if (!alive) {
            bt_http_conn_close(c);
            return;
        }
    }
    bt_http_conn_settle(c);
}

/* Serves the connection that waits longest: at least one request. If it has more, it goes to the
 * end of the list. */
static void serve_first(struct bt_http *h)
{
    struct bt_http_conn *c = BT_CONTAINER_OF(h->turns.next, struct bt_http_conn, turn);
    bt_list_remove(&c->turn);
    h->visit_ns = bt_mono_ns() + VISIT_NS;
    if (has_pipelined(c)) {
        h->current = c;
        conn_advance(c);
        h->current = NULL;
        bt_http_conn_settle(c);
    } else {
        serve(c);
    }
    h->visit_ns = 0;
}

static void serve_turns(void *arg)
{
    struct bt_http *h = arg;
    while (!bt_list_empty(&h->turns) && has_time(h)) {
        serve_first(h);
    }
    if (!bt_list_empty(&h->turns)) {
        bt_timer_start(h->loop, &h->turns_timer, 0, 0, serve_turns, h);
    }
}

void bt_http_input_event(void *arg, uint32_t events)
{
    struct bt_http_conn *c = arg;
    bool half_closed = c->state == HTTP_ANSWERING && !c->half_closed && (events & EPOLLRDHUP) != 0;
    if ((events & (EPOLLERR | EPOLLHUP)) != 0 || (half_closed && c->req->parser.http10)) {
        bt_http_conn_close(c);
        return;
    }
    if (half_closed) {
        c->probes = 0;
        bt_http_conn_probe(c);
    }
    uint32_t readable =
        EPOLLIN | (c->crypt != NULL && bt_http_crypt_wants_out(c->crypt) ? EPOLLOUT : 0);
    c->readable = c->readable || ((events & readable) != 0 && (c->events & EPOLLIN) != 0);
    if (may_serve(c->h)) {
        serve(c);
    } else {
        wait_turn(c);
        bt_http_conn_update(c); /* epoll need not report it again */
    }
}
