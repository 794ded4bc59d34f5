/* What common/http reports about a request at its end (options.ended): an id, bytes, times and how
 * it ended. A connection has one record at a time: the next pipelined request completes the
 * previous one, whose answer is earlier in the output. Loop thread. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "common/base/sha256.h"
#include "common/http/http_priv.h"

#define ID_BYTES 12 /* random bytes of an id that is made here */

static uint64_t out_end(const struct bt_http_conn *c)
{
    return c->sent + (c->out.len - c->out_off);
}

static bool is_id(const char *id)
{
    size_t n = id != NULL ? strlen(id) : 0;
    if (n == 0 || n > BT_HTTP_ID_MAX) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (id[i] <= ' ' || id[i] >= 0x7f || strchr("\"\\<>", id[i]) != NULL) {
            return false;
        }
    }
    return true;
}

void bt_http_record_client(struct bt_http_conn *c, const struct sockaddr_storage *at)
{
    if (at->ss_family == AF_INET) {
        inet_ntop(AF_INET, &((const struct sockaddr_in *)at)->sin_addr, c->client,
                  sizeof(c->client));
    } else if (at->ss_family == AF_INET6) {
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)at)->sin6_addr, c->client,
                  sizeof(c->client));
    }
}

/* Reports the record. end: the output position up to which the response was sent. */
static void tell(struct bt_http_conn *c, bt_http_ending_t ending, uint64_t end)
{
    struct bt_http_trace *t = &c->trace;
    struct bt_http_record r = {
        .method = t->method,
        .path = t->path,
        .client = c->client,
        .certificate = c->crypt != NULL ? bt_http_crypt_client(c->crypt) : NULL,
        .request_id = t->id,
        .status = t->status,
        .bytes_in = t->bytes_in,
        .bytes_out = t->status != 0 && end > t->out_begin ? end - t->out_begin : 0,
        .duration_ns = bt_mono_ns() - t->began_ns,
        .first_ns = t->first_ns != 0 ? t->first_ns - t->began_ns : 0,
        .ending = ending,
        .note = t->note};
    t->note = NULL;
    c->h->o.ended(c->h->arg, &r);
    *t = (struct bt_http_trace){0};
}

void bt_http_record_begin(struct bt_http_conn *c)
{
    const struct bt_http_parser *p = &c->parser;
    struct bt_http_trace *t = &c->trace;
    if (c->h->o.ended == NULL) {
        return;
    }
    if (t->open) { /* the previous request; the client has sent this one behind it */
        tell(c, t->cut ? BT_HTTP_CUT : BT_HTTP_COMPLETE, t->out_end);
    }
    t->open = true;
    t->bytes_in = 0;
    t->began_ns = c->first_byte_ns != 0 ? c->first_byte_ns : bt_mono_ns();
    c->first_byte_ns = 0;
    const char *id = NULL;
    if (p->path > 0) { /* the request line was read, and the fields before the bad one */
        const char *text = p->head.data;
        snprintf(t->method, sizeof(t->method), "%s", text + p->method);
        snprintf(t->path, sizeof(t->path), "%s", text + p->path);
        /* If there are two different ids, neither is used. */
        id = bt_http_parser_ambiguous(p, "x-request-id") ? NULL
                                                         : bt_http_parser_field(p, "x-request-id");
    } else {
        strcpy(t->method, "-");
        strcpy(t->path, "-");
    }
    if (is_id(id)) {
        memcpy(t->id, id, strlen(id) + 1);
    } else {
        uint8_t random[ID_BYTES];
        bt_random(random, sizeof(random));
        bt_hex(random, sizeof(random), t->id);
    }
}

void bt_http_record_status(struct bt_http_conn *c, int status)
{
    c->trace.status = status;
    c->trace.out_begin = out_end(c);
}

void bt_http_record_sent(struct bt_http_conn *c, size_t n)
{
    struct bt_http_trace *t = &c->trace;
    c->sent += n;
    if (t->status != 0 && t->first_ns == 0 && c->sent > t->out_begin) {
        t->first_ns = bt_mono_ns();
    }
}

void bt_http_record_answered(struct bt_http_conn *c)
{
    c->trace.answered = true;
    c->trace.out_end = out_end(c);
}

void bt_http_record_settle(struct bt_http_conn *c, bool closed)
{
    struct bt_http_trace *t = &c->trace;
    if (!t->open || (!closed && (!t->answered || c->sent < t->out_end))) {
        return;
    }
    bool complete = t->answered && c->sent >= t->out_end;
    tell(c,
         t->cut     ? BT_HTTP_CUT
         : complete ? BT_HTTP_COMPLETE
                    : BT_HTTP_GONE,
         complete ? t->out_end : c->sent);
}

/* ---- for handlers ---- */

const char *bt_http_request_id(const struct bt_http_req *r)
{
    return r->conn != NULL ? r->conn->trace.id : "";
}

void bt_http_set_note(struct bt_http_req *r, void *note)
{
    BT_ASSERT(r->conn != NULL && r->conn->trace.open && r->conn->trace.note == NULL);
    r->conn->trace.note = note;
}

void *bt_http_note(const struct bt_http_req *r)
{
    return r->conn != NULL ? r->conn->trace.note : r->note;
}
