/* A strict HTTP/1.1 server on a bt_loop. It knows framing, limits and timeouts, nothing of the API.
 * Everything runs on the loop's thread. Limits: header 16 KiB and 64 fields, body from options,
 * 10 s for the header, 30 s for the body, 60 s idle; unsent output of a connection and of all
 * (slow readers). A long answer should be pulled (bt_http_pull), so that it never waits in memory.
 * Output leaves at the end of the turn: many writes of one turn are one system call. on_gone and
 * closing happen in the loop only, never inside a bt_http_ call.
 *
 * A client that shuts its sending side during its request gets its answer. A client that has left
 * looks the same until bytes are sent to it, so some bytes are sent (not with HTTP/1.0, where the
 * client counts as gone). A client that acknowledges nothing for the idle time is gone. */
#ifndef BT_HTTP_HTTP_H
#define BT_HTTP_HTTP_H

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/loop/loop.h"

struct bt_http;
struct bt_http_tls; /* http_tls.h */
struct bt_http_req; /* one request and its response; the handler owns it until it ends it */

/* The header of a request is complete and its body is not read yet. True: the body may come, and
 * then the handler is called; req is not valid behind the call. False: the function has answered
 * req by bt_http_respond. Then nothing of the body is kept: a short one is skipped, otherwise the
 * connection closes. A client that waits for "100 Continue" gets it only after true. */
typedef bool (*bt_http_head_fn)(void *arg, struct bt_http_req *req);

typedef enum {
    BT_HTTP_COMPLETE, /* the kernel has taken the whole answer */
    BT_HTTP_GONE,     /* the client left before that */
    BT_HTTP_CUT       /* the server ended it: the client reads too slowly, or the answer failed */
} bt_http_ending_t;

#define BT_HTTP_ID_MAX   128
#define BT_HTTP_PATH_LOG 256

/* A request and its response, when both are over. Strings are valid during the call. */
struct bt_http_record {
    const char *method, *path; /* path: percent-decoded, without query, cut; "-": not received */
    const char *client;        /* address without port */
    const char *certificate;   /* name in the client's; NULL: it showed none */
    const char *request_id;
    int status;                   /* 0: the client left before a response began */
    uint64_t bytes_in, bytes_out; /* of the body; of the response with its header */
    uint64_t duration_ns;         /* from the request's first byte */
    uint64_t first_ns;            /* ... to the response's first byte; 0: none was sent */
    bt_http_ending_t ending;
    void *note; /* as bt_http_set_note left it, or NULL; the function frees it */
};
typedef void (*bt_http_ended_fn)(void *arg, const struct bt_http_record *r);

struct bt_http_options {
    const char *listen; /* "host:port", port 0: any free; [v6]:port */
    size_t body_max;    /* bytes; 413 above */
    uint32_t conns_max; /* 503 above */
    uint32_t header_timeout_ms, body_timeout_ms, idle_timeout_ms;
    size_t out_max;   /* bytes of unsent output per connection, then on_gone */
    size_t out_total; /* ... of all connections: beyond it the one with most unsent output is cut
                         off */
    bt_http_head_fn head; /* called with the handler's arg; NULL: every body may come */
    /* Called once for each request, with the handler's arg; it must not call any bt_http_
     * function. With it, every request has an id and every response the header x-request-id. NULL:
     * neither. */
    bt_http_ended_fn ended;
    /* Writes the body of an error that HTTP itself finds, for the APIs with a form of their own;
     * may change its status. path as in bt_http_record, request_id "": none. False: the usual
     * form. NULL: always that one. */
    bool (*error)(const char *path, int *status, const char *why, const char *request_id,
                  struct bt_buf *body);
    /* Static text before the names of body_max and conns_max where an answer names a limit; NULL:
     * they are no configuration keys. */
    const char *key_prefix;
    /* Bytes of request bodies that are held at once; 503 above. One owner may have as much as it
     * leaves free to others (429 above). What a header announces counts at once. At least 2 x
     * body_max. 0: no limit. */
    uint64_t body_total;
    /* TLS for all connections; outlives the server. NULL: plain TCP. */
    struct bt_http_tls *tls;
    /* Limit of connections without an accepted request. Beyond it the oldest is closed (of an
     * address that has a quarter of them, if there is one). They have half of the header's time. 0:
     * no limit. */
    uint32_t strangers_max;
};
/* 4 MiB, 4096, 10 s, 30 s, 60 s, 1 MiB, 128 MiB */
void bt_http_options_default(struct bt_http_options *o);

/* A complete request has arrived. The handler answers now or later (any number of them wait). */
typedef void (*bt_http_handler_fn)(void *arg, struct bt_http_req *req);

/* Listens from now on; fn is called with each request. o is copied. *port_p (or NULL) gets the
 * bound port. ERR_CONFIG: o->listen is no address, ERR_IO: it cannot be bound; the reason is
 * logged. */
bt_status_t bt_http_create(struct bt_loop *loop, const struct bt_http_options *o,
                           bt_http_handler_fn fn, void *arg, struct bt_http **h_p,
                           int *port_p) BT_MUST_CHECK;
/* Closes every connection; on_gone is called for open ones. NULL: nothing happens. */
void bt_http_destroy(struct bt_http *h);
/* Continues to accept, but every response from now on closes its connection. So clients that keep
 * connections open connect anew, to this server or another one. */
void bt_http_wind_down(struct bt_http *h);
/* Stops accepting; open responses may finish. */
void bt_http_drain(struct bt_http *h);
uint32_t bt_http_conns(const struct bt_http *h); /* open now */
/* Number of connections that were closed before a request of theirs was read: no descriptor was
 * left, there were too many, or a stranger was closed for a newer one. options.ended is not called
 * for these. */
uint64_t bt_http_unheard(const struct bt_http *h);
size_t bt_http_unsent(const struct bt_http *h); /* bytes of output that wait for their clients */

/* ---- the request; strings are valid until it is ended ---- */
const char *bt_http_method(const struct bt_http_req *r); /* "GET" */
const char *bt_http_path(const struct bt_http_req *r);   /* percent-decoded, without query */
const char *bt_http_header(const struct bt_http_req *r, const char *name); /* NULL if absent */
/* Does the header occur more than once, with different values? bt_http_header gives the first. */
bool bt_http_header_ambiguous(const struct bt_http_req *r, const char *name);
const void *bt_http_body(const struct bt_http_req *r, size_t *len_p); /* bytes, no NUL behind */
/* The caller owns the body from now on (free); it counts towards body_total until
 * bt_http_body_done. */
char *bt_http_take_body(struct bt_http_req *r, size_t *len_p);
/* The body is not needed any more. */
void bt_http_body_done(struct bt_http_req *r);
/* In bt_http_head_fn, before it returns true: sets the owner of the request (1 to 2^63 - 1; 0: the
 * client's address). Shares are counted by owner, and the connection is no longer a stranger.
 * Without a head function every complete header does that. */
void bt_http_accept(struct bt_http_req *r, uint64_t owner);
/* In bt_http_head_fn: the body's length as the header gives it; 0: none, or in chunks. */
uint64_t bt_http_body_announced(const struct bt_http_req *r);
/* The client's address without its port ("192.0.2.7"); of IPv6 only the network half, because one
 * client has all its addresses. "": not known. */
#define BT_HTTP_PEER_LEN 48
void bt_http_peer(const struct bt_http_req *r, char out[BT_HTTP_PEER_LEN]);
uint64_t bt_http_received_ns(const struct bt_http_req *r); /* bt_mono_ns at the body's last byte */

/* The client's x-request-id if it is 1 to BT_HTTP_ID_MAX visible ASCII characters other than "\<>,
 * otherwise one made here. "" without options.ended, or when the client is gone. */
const char *bt_http_request_id(const struct bt_http_req *r);
/* Keeps note (malloc) for options.ended; a note set in bt_http_head_fn stays for the handler. Only
 * with options.ended, and once for a request. */
void bt_http_set_note(struct bt_http_req *r, void *note);
void *bt_http_note(const struct bt_http_req *r); /* NULL: none */

/* Called once if the client goes away (or reads too slowly) before the response is ended; the
 * request is invalid after it returns, and the handler must not touch it again. */
void bt_http_on_gone(struct bt_http_req *r, void (*fn)(void *arg), void *arg);

/* ---- the response ---- */
/* Adds a header of the response (before respond or start); copies both. */
void bt_http_add_header(struct bt_http_req *r, const char *name, const char *value);
/* Whole response with Content-Length; ends the request. */
void bt_http_respond(struct bt_http_req *r, int status, const char *content_type, const void *body,
                     size_t len);
/* Streamed response (chunked transfer coding for HTTP/1.1, close for 1.0): start, any number of
 * writes, which copy, and end, which ends the request. */
void bt_http_start(struct bt_http_req *r, int status, const char *content_type);
/* The same with a Content-Length: exactly this many bytes are written then. */
void bt_http_start_sized(struct bt_http_req *r, int status, const char *content_type, size_t len);
void bt_http_write(struct bt_http_req *r, const void *data, size_t len);
void bt_http_end(struct bt_http_req *r);

/* A response that is made as fast as its client reads it. Behind bt_http_start and instead of
 * writes: fn appends the next piece to out, about BT_HTTP_PIECE bytes, and must not take longer
 * than a part of BT_LOOP_SLICE_NS. It is called from the loop, only while next to nothing is
 * unsent, and must not call any bt_http_ function of its request. The request needs an on_gone,
 * which tells that fn is not called any more. */
typedef enum {
    BT_HTTP_MORE, /* call again when there is room */
    BT_HTTP_WAIT, /* nothing now: bt_http_resume says when */
    BT_HTTP_END   /* that was all: the request is ended, fn's arg may be gone already */
} bt_http_pull_t;
typedef bt_http_pull_t (*bt_http_pull_fn)(void *arg, struct bt_buf *out);
#define BT_HTTP_PIECE (32 * 1024)
void bt_http_pull(struct bt_http_req *r, bt_http_pull_fn fn, void *arg);
/* A waiting pull has more to send. If no pull waits nothing happens. */
void bt_http_resume(struct bt_http_req *r);
/* Bytes of its response that the client has not taken. */
size_t bt_http_req_unsent(const struct bt_http_req *r);

#endif
