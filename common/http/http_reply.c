/* Responses of common/http: status line, fields, bodies with a length, chunked streams. Everything
 * is appended to the connection's output; http.c sends it at the end of the loop's turn, so that
 * the writes of one turn need only one system call. Loop thread. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "common/http/http_priv.h"

static const char *reason(int status)
{
    static const struct {
        int status;
        const char *text;
    } table[] = {
        {200, "OK"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {505, "HTTP Version Not Supported"},
        {529, "Overloaded"},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        if (table[i].status == status) {
            return table[i].text;
        }
    }
    return "Status";
}

/* The Date field's value, updated once a second. */
static const char *date(struct bt_http *h)
{
    uint64_t now = bt_real_ns();
    if (h->date_ns == 0 || now - h->date_ns >= 1000000000ull) {
        static const char days[] = "SunMonTueWedThuFriSat";
        static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
        time_t t = (time_t)(now / 1000000000ull);
        struct tm tm;
        gmtime_r(&t, &tm);
        snprintf(h->date, sizeof(h->date), "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT",
                 days + 3 * tm.tm_wday, tm.tm_mday, months + 3 * tm.tm_mon,
                 (tm.tm_year + 1900) % 10000, tm.tm_hour, tm.tm_min, tm.tm_sec);
        h->date_ns = now - now % 1000000000ull;
    }
    return h->date;
}

/* Appends status line and fields. length < 0: unknown. */
static void put_head(struct bt_http_conn *c, int status, const char *type, int64_t length,
                     bool chunked, const struct bt_buf *more)
{
    struct bt_buf *out = &c->out;
    bt_http_record_status(c, status);
    bt_buf_printf(out, "HTTP/1.1 %d %s\r\nDate: %s\r\n", status, reason(status), date(c->h));
    if (type != NULL) {
        bt_buf_printf(out, "Content-Type: %s\r\n", type);
    }
    if (chunked) {
        bt_buf_puts(out, "Transfer-Encoding: chunked\r\n");
    } else if (length >= 0) {
        bt_buf_printf(out, "Content-Length: %lld\r\n", (long long)length);
    }
    if (c->close_after) {
        bt_buf_puts(out, "Connection: close\r\n");
    }
    if (c->trace.id[0] != '\0') {
        bt_buf_printf(out, "x-request-id: %s\r\n", c->trace.id);
    }
    if (more != NULL && more->len > 0) {
        bt_buf_append(out, more->data, more->len);
    }
    bt_buf_puts(out, "\r\n");
}

static void put_error(int status, const char *why, struct bt_buf *body)
{
    bt_buf_puts(body, "{\"error\":{\"message\":\"");
    for (const char *w = why; *w != '\0'; w++) { /* a text of this program, never client data */
        bt_buf_append(body, "\\", *w == '"' || *w == '\\');
        bt_buf_append(body, w, 1);
    }
    bt_buf_printf(body, "\",\"type\":\"%s\",\"param\":null,\"code\":%d}}\n",
                  status >= 500   ? "server_error"
                  : status == 429 ? "rate_limit_error"
                                  : "invalid_request_error",
                  status);
}

void bt_http_reply_error(struct bt_http_conn *c, int status, const char *why)
{
    struct bt_buf body;
    bt_buf_init(&body);
    static char retry_text[] = "Retry-After: 1\r\n";
    const struct bt_buf retry = {.data = retry_text, .len = sizeof(retry_text) - 1};
    bool later = status == 503 || status == 429;
    c->close_after = true;
    if (!c->trace.open || c->trace.answered) { /* there was no request, or no complete header */
        bt_http_record_begin(c);
    }
    if (c->h->o.error == NULL || !c->h->o.error(c->trace.path, &status, why, c->trace.id, &body)) {
        put_error(status, why, &body);
    }
    put_head(c, status, "application/json", (long)body.len, false, later ? &retry : NULL);
    bt_buf_append(&c->out, body.data, body.len);
    bt_buf_cleanup(&body);
    bt_http_record_answered(c);
    c->state = HTTP_CLOSING;
    c->announced = 0;
    bt_http_parser_reset(&c->parser); /* no more input is parsed, so free the memory now */
    bt_http_conn_dirty(c);
}

void bt_http_req_free(struct bt_http_req *r)
{
    r->magic = 0;
    bt_http_parser_cleanup(&r->parser);
    bt_buf_cleanup(&r->headers);
    BT_ASSERT(r->note == NULL);
    free(r);
}

/* The handler has finished r: the connection continues with the next request, or closes. */
static void finish(struct bt_http_req *r)
{
    struct bt_http_conn *c = r->conn;
    if (r->in_gone) {
        return; /* the caller of on_gone frees it */
    }
    if (c != NULL) {
        bt_http_record_answered(c);
        c->req = NULL;
        c->state = c->close_after ? HTTP_CLOSING : HTTP_READING;
        if (c->state == HTTP_READING && r->parser.phase == BT_HTTP_BODY) { /* see decide_close */
            c->parser = r->parser;
            r->parser = (struct bt_http_parser){0};
            bt_http_parser_skip_body(&c->parser);
        }
        bt_http_conn_dirty(c);
    }
    bt_http_req_free(r);
}

static struct bt_http_req *check(struct bt_http_req *r)
{
    BT_ASSERT(r != NULL && r->magic == HTTP_REQ_MAGIC);
    return r;
}

static void decide_close(struct bt_http_req *r)
{
    bool skips =
        r->parser.phase != BT_HTTP_BODY || bt_http_parser_can_skip(&r->parser, HTTP_SKIP_BYTES);
    if (!r->parser.keep_alive || r->conn->h->draining || r->conn->h->winding_down || !skips) {
        r->conn->close_after = true;
    }
}

void bt_http_add_header(struct bt_http_req *r, const char *name, const char *value)
{
    BT_ASSERT(!check(r)->started);
    bt_buf_printf(&r->headers, "%s: ", name);
    size_t from = r->headers.len;
    bt_buf_puts(&r->headers, value);
    /* A line break in a value would end the field. */
    for (size_t i = from; i < r->headers.len; i++) {
        unsigned char ch = (unsigned char)r->headers.data[i];
        if (ch < 0x20 || ch == 0x7f) {
            r->headers.data[i] = ' ';
        }
    }
    bt_buf_puts(&r->headers, "\r\n");
}

void bt_http_respond(struct bt_http_req *r, int status, const char *content_type, const void *body,
                     size_t len)
{
    BT_ASSERT(!check(r)->started);
    struct bt_http_conn *c = r->conn;
    if (c != NULL) {
        decide_close(r);
        put_head(c, status, content_type, (int64_t)len, false, &r->headers);
        if (!r->head_only) {
            bt_buf_append(&c->out, body, len);
        }
    }
    finish(r);
}

void bt_http_start(struct bt_http_req *r, int status, const char *content_type)
{
    BT_ASSERT(!check(r)->started);
    r->started = true;
    r->chunked = !r->parser.http10;
    if (r->conn != NULL) {
        if (!r->chunked) {
            r->conn->close_after = true;
        }
        decide_close(r);
        put_head(r->conn, status, content_type, -1, r->chunked, &r->headers);
        bt_http_conn_dirty(r->conn);
    }
}

void bt_http_start_sized(struct bt_http_req *r, int status, const char *content_type, size_t len)
{
    BT_ASSERT(!check(r)->started);
    r->started = true;
    if (r->conn != NULL) {
        decide_close(r);
        put_head(r->conn, status, content_type, (int64_t)len, false, &r->headers);
        bt_http_conn_dirty(r->conn);
    }
}

void bt_http_write(struct bt_http_req *r, const void *data, size_t len)
{
    BT_ASSERT(check(r)->started);
    struct bt_http_conn *c = r->conn;
    if (c == NULL || len == 0 || r->head_only) {
        return; /* an empty chunk would end the stream */
    }
    if (r->chunked) {
        bt_buf_printf(&c->out, "%zx\r\n", len);
    }
    bt_buf_append(&c->out, data, len);
    if (r->chunked) {
        bt_buf_append(&c->out, "\r\n", 2);
    }
    bt_http_conn_dirty(c);
}

void bt_http_end(struct bt_http_req *r)
{
    BT_ASSERT(check(r)->started);
    if (r->conn != NULL && r->chunked && !r->head_only) {
        bt_buf_append(&r->conn->out, "0\r\n\r\n", 5);
    }
    finish(r);
}

void bt_http_pull(struct bt_http_req *r, bt_http_pull_fn fn, void *arg)
{
    BT_ASSERT(check(r)->started && r->pull == NULL && r->on_gone != NULL);
    r->pull = fn;
    r->pull_arg = arg;
    if (r->conn != NULL) {
        bt_http_conn_dirty(r->conn);
    }
}

void bt_http_resume(struct bt_http_req *r)
{
    BT_ASSERT(check(r)->pull != NULL);
    if (r->pull_waits && r->conn != NULL) {
        r->pull_waits = false;
        bt_http_conn_dirty(r->conn);
    }
}

void bt_http_req_pull(struct bt_http_req *r)
{
    struct bt_buf *piece = &r->conn->h->piece;
    bt_buf_clear(piece);
    bt_http_pull_t what = r->pull(r->pull_arg, piece);
    bt_http_write(r, piece->data, piece->len);
    if (piece->cap > 4 * BT_HTTP_PIECE) {
        bt_buf_cleanup(piece); /* if it is much longer than requested */
    }
    if (what == BT_HTTP_END) {
        bt_http_end(r);
    } else {
        r->pull_waits = what == BT_HTTP_WAIT;
    }
}

size_t bt_http_req_unsent(const struct bt_http_req *r)
{
    return r->conn != NULL ? bt_http_conn_unsent(r->conn) : 0;
}

/* ---- the request for the handler ---- */

const char *bt_http_method(const struct bt_http_req *r)
{
    return r->parser.head.data + r->parser.method;
}

const char *bt_http_path(const struct bt_http_req *r)
{
    return r->parser.head.data + r->parser.path;
}

const char *bt_http_header(const struct bt_http_req *r, const char *name)
{
    return bt_http_parser_field(&r->parser, name);
}

bool bt_http_header_ambiguous(const struct bt_http_req *r, const char *name)
{
    return bt_http_parser_ambiguous(&r->parser, name);
}

const void *bt_http_body(const struct bt_http_req *r, size_t *len_p)
{
    *len_p = r->parser.body.len;
    return r->parser.body.data != NULL ? r->parser.body.data : "";
}

char *bt_http_take_body(struct bt_http_req *r, size_t *len_p)
{
    bt_buf_reserve(&r->parser.body, 0); /* so that the pointer is not NULL */
    *len_p = r->parser.body.len;
    return bt_buf_take(&r->parser.body);
}

void bt_http_body_done(struct bt_http_req *r)
{
    bt_buf_cleanup(&check(r)->parser.body);
    r->held = 0;
    if (r->conn != NULL) {
        bt_http_share_count(r->conn);
    }
}

void bt_http_accept(struct bt_http_req *r, uint64_t owner)
{
    r->accepted = true;
    r->owner = owner;
}

uint64_t bt_http_body_announced(const struct bt_http_req *r)
{
    return bt_http_parser_announced(&r->parser);
}

void bt_http_peer(const struct bt_http_req *r, char out[BT_HTTP_PEER_LEN])
{
    struct sockaddr_storage at;
    socklen_t len = sizeof(at);
    out[0] = '\0';
    if (r->conn == NULL || getpeername(r->conn->fd, (struct sockaddr *)&at, &len) != 0) {
        return;
    }
    if (at.ss_family == AF_INET) {
        inet_ntop(AF_INET, &((struct sockaddr_in *)&at)->sin_addr, out, BT_HTTP_PEER_LEN);
    } else if (at.ss_family == AF_INET6) {
        struct in6_addr a = ((struct sockaddr_in6 *)&at)->sin6_addr;
        if (!IN6_IS_ADDR_V4MAPPED(&a)) {
            memset(&a.s6_addr[8], 0, 8);
        }
        inet_ntop(AF_INET6, &a, out, BT_HTTP_PEER_LEN);
    }
}

uint64_t bt_http_received_ns(const struct bt_http_req *r)
{
    return r->received_ns;
}

void bt_http_on_gone(struct bt_http_req *r, void (*fn)(void *arg), void *arg)
{
    check(r)->on_gone = fn;
    r->on_gone_arg = arg;
}
