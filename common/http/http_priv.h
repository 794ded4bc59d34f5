/* Within common/http: what http.c (the server), http_conn.c and http_input.c (a connection's two
 * directions) and http_reply.c (responses) share. A connection reads one request at a time; while
 * its handler owns the request, nothing more is read, only the client's leaving is watched. Owned
 * by the loop's thread. */
#ifndef BT_HTTP_PRIV_H
#define BT_HTTP_PRIV_H

#include <netinet/in.h>
#include <sys/socket.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/http/http.h"
#include "common/http/http_parse.h"
#include "common/http/http_tls.h"
#include "common/log/log.h"

#define HTTP_REQ_MAGIC 0x48747071u
/* A refused request's body of at most this length is read to its end, so that the connection can be
 * used again: most refused clients ask again. */
#define HTTP_SKIP_BYTES (64 * 1024)
#define HTTP_READ_BYTES (64 * 1024) /* size of bt_http.scratch */

typedef enum {
    HTTP_READING,   /* waits for, or reads, a request */
    HTTP_ANSWERING, /* a handler owns conn->req */
    HTTP_CLOSING,   /* the last answer is being written */
    HTTP_LINGERING  /* our side is shut; input is thrown away, so that a RST does not destroy the
                       answer before the client has read it (RFC 9112, 9.6) */
} bt_http_state_t;

typedef enum {
    HTTP_TIMER_NONE,
    HTTP_TIMER_IDLE,
    HTTP_TIMER_HANDSHAKE,
    HTTP_TIMER_HEADER,
    HTTP_TIMER_BODY,
    HTTP_TIMER_WRITE, /* the client takes nothing of what we have for it */
    HTTP_TIMER_PROBE, /* it has ended its sending side; is it still there? */
    HTTP_TIMER_LINGER
} bt_http_timer_t;

struct bt_http_owner { /* an owner that has connections; http_share.c */
    uint64_t id;
    uint32_t refs, conns, strangers;
    uint64_t bytes;
};

/* What options.ended is told about a connection's current request; http_record.c. */
struct bt_http_trace {
    bool open;     /* its header is complete, or it is answered */
    bool answered; /* the response is over for the handler; its last bytes may be unsent */
    bool cut;      /* the server ends it early */
    int status;
    uint64_t began_ns, first_ns;
    uint64_t out_begin, out_end; /* of the response, as positions in the connection's output */
    uint64_t bytes_in;
    char method[16], path[BT_HTTP_PATH_LOG], id[BT_HTTP_ID_MAX + 1];
    void *note;
};

struct bt_http_conn {
    struct bt_http *h;
    struct bt_list link, dirty; /* in h->conns; in h->dirty while output waits for the flush */
    struct bt_list pull;        /* in h->pulling while its answer shall give the next piece */
    struct bt_list turn;        /* in h->turns while it waits to be served */
    bool readable;              /* ... and epoll has said that there is input */
    int fd;
    struct bt_http_crypt *crypt; /* NULL: plain TCP */
    struct bt_loop_fd *w;
    uint32_t events;
    bt_http_state_t state;
    bt_http_timer_t timer_kind;
    struct bt_timer timer;
    struct bt_http_parser parser;
    struct bt_buf in; /* requests sent ahead (pipelining), from in_off on */
    size_t in_off;
    struct bt_buf out; /* unsent output, from out_off on */
    size_t out_off;
    size_t counted;          /* of it in h->unsent */
    struct bt_http_req *req; /* ANSWERING */
    bool close_after;
    bool half_closed;  /* ANSWERING, and the client sends no more */
    uint8_t probes;    /* sent since then */
    size_t discarded;  /* while lingering */
    uint64_t taken[2]; /* what its client had at the last two looks; see reads_on */
    uint8_t looks;     /* since its answer waits for it */
    struct bt_http_owner *address, *owner; /* owner: of the last accepted request, or NULL */
    struct bt_list stranger;               /* in h->strangers until a request is accepted */
    size_t announced;                      /* length of the body that is being read */
    size_t held;                           /* bytes of requests, as counted */
    uint64_t sent;                         /* bytes of output that the kernel has taken */
    uint64_t first_byte_ns;                /* of the request that is being received; 0: none */
    char client[INET6_ADDRSTRLEN];         /* address; "": not known */
    struct bt_http_trace trace;
};

struct bt_http_req {
    uint32_t magic;
    struct bt_http_conn *conn; /* NULL: the client is gone and nobody asked to be told */
    struct bt_http_parser parser;
    uint64_t received_ns;
    void (*on_gone)(void *arg);
    void *on_gone_arg;
    struct bt_buf headers; /* added by the handler */
    bt_http_pull_fn pull;  /* NULL: the handler writes */
    void *pull_arg;
    bool pull_waits; /* until bt_http_resume */
    size_t held;     /* of the body, until bt_http_body_done */
    bool head_only, started, chunked, in_gone;
    bool accepted; /* bt_http_accept, by owner */
    uint64_t owner;
    void *note; /* of a request whose client is gone; else the connection's trace has it */
};

struct bt_http {
    struct bt_loop *loop;
    struct bt_http_options o;
    bt_http_handler_fn fn;
    void *arg;
    int listen_fd, spare_fd; /* spare: given up to refuse a client when descriptors run out */
    struct bt_loop_fd *listen_w;
    struct bt_timer accept_timer, flush_timer, pull_timer, turns_timer;
    struct bt_list conns, dirty, pulling;
    struct bt_list turns; /* connections that got no time; they are served in this order */
    uint64_t turn_ns;     /* the turn of the loop that until_ns is of */
    uint64_t until_ns;    /* it serves input until then */
    uint64_t visit_ns;    /* the connection that is served (it had to wait) has until then */
    uint32_t n_conns;
    uint64_t unheard;               /* connections closed for want of room, without a record */
    size_t unsent;                  /* bytes of output of all connections */
    struct bt_buf piece;            /* scratch of a pull */
    struct bt_log_pace accept_pace; /* of lines about clients that no descriptor was left for */
    bool draining;
    bool winding_down;
    struct bt_http_conn *current; /* being settled: needs no flush timer */
    char date[40];
    uint64_t date_ns;
    char *scratch; /* input is read here first */
    struct bt_map *owners;
    struct bt_list strangers; /* the oldest first */
    uint32_t n_strangers;
    uint64_t held, seed;
};

/* http_share.c */
typedef enum {
    HTTP_ROOM,
    HTTP_ROOM_OTHERS, /* there is, but it is for other owners */
    HTTP_ROOM_NONE
} bt_http_room_t;
/* A new connection: a stranger's. */
void bt_http_share_join(struct bt_http_conn *c, const struct sockaddr_storage *at);
void bt_http_share_leave(struct bt_http_conn *c);
/* The stranger to close because there are too many; NULL: none. */
struct bt_http_conn *bt_http_share_victim(struct bt_http_conn *newest);
/* A request of owner id (0: of the client's address) is accepted. False: the owner has more
 * connections than it leaves free. */
bool bt_http_share_own(struct bt_http_conn *c, uint64_t id);
/* Counts anew what the connection holds. */
void bt_http_share_count(struct bt_http_conn *c);
/* Is there room for what the connection holds and `more` bytes? */
bt_http_room_t bt_http_share_room(const struct bt_http_conn *c, uint64_t more);

/* http_record.c. All of them do nothing without options.ended. */
void bt_http_record_client(struct bt_http_conn *c, const struct sockaddr_storage *at);
/* A request begins: its header is complete in c->parser, or is refused with what was read of it. */
void bt_http_record_begin(struct bt_http_conn *c);
/* The response's status line is next. */
void bt_http_record_status(struct bt_http_conn *c, int status);
/* Output was sent. */
void bt_http_record_sent(struct bt_http_conn *c, size_t n);
/* The handler has ended the response. */
void bt_http_record_answered(struct bt_http_conn *c);
/* Tells options.ended if the response is over. closed: it is, whatever is unsent. */
void bt_http_record_settle(struct bt_http_conn *c, bool closed);

/* http_reply.c */
void bt_http_reply_error(struct bt_http_conn *c, int status, const char *why);
void bt_http_req_free(struct bt_http_req *r);
/* The next piece of a pulled answer; may end the request. */
void bt_http_req_pull(struct bt_http_req *r);

/* http.c */
/* Returns " (conductor.http.NAME)", written to text, if the limits are keys of a configuration;
 * otherwise "". */
const char *bt_http_key_text(const struct bt_http *h, const char *name, char text[64]);

/* http_conn.c */
static inline size_t bt_http_conn_unsent(const struct bt_http_conn *c)
{
    return c->out.len - c->out_off;
}
/* Is there TLS, and is its handshake not over? */
static inline bool bt_http_conn_shaking(const struct bt_http_conn *c)
{
    return c->crypt != NULL && !bt_http_crypt_ready(c->crypt);
}
/* As recv and send on the connection's socket: -1 and errno, or the number of bytes. */
ssize_t bt_http_conn_recv(struct bt_http_conn *c, void *buf, size_t cap);
ssize_t bt_http_conn_send(struct bt_http_conn *c, const void *buf, size_t len);
/* Tells on_gone, ends the record, frees the connection. */
void bt_http_conn_close(struct bt_http_conn *c);
/* The same, because of the client's behaviour or the server's end: the record says so. */
void bt_http_conn_cut(struct bt_http_conn *c);
/* Starts the deadline of a state; no change while that state's deadline runs. */
void bt_http_conn_timer(struct bt_http_conn *c, bt_http_timer_t kind, uint32_t ms);
/* Sets the epoll events and the deadline by the connection's state. */
void bt_http_conn_update(struct bt_http_conn *c);
/* Completes the work of a connection after any event: sends, continues with pipelined input while
 * there is time, closes it if it has ended. The connection may be freed afterwards. */
void bt_http_conn_settle(struct bt_http_conn *c);
/* Its output leaves at the end of the turn. */
void bt_http_conn_dirty(struct bt_http_conn *c);
/* The client has sent FIN: sends bytes that show whether it has gone. */
void bt_http_conn_probe(struct bt_http_conn *c);

/* http_input.c */
/* An event of a connection's socket. arg: the connection, which may be freed afterwards. */
void bt_http_input_event(void *arg, uint32_t events);
/* Handles a request that was sent ahead. False: there is none, or it waits for its turn. */
bool bt_http_input_next(struct bt_http_conn *c);

#endif
