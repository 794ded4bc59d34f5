/* gRPC C core behind a small surface: the only folder that knows gRPC. Messages are bytes (users
 * pack and unpack protobuf-c). One completion-queue thread per bt_rpc hands events to the owner's
 * loop: every callback below runs on that loop's thread, and every function is called on it. */
#ifndef BT_RPC_RPC_H
#define BT_RPC_RPC_H

#include <sys/uio.h>

#include "common/base/base.h"
#include "common/loop/loop.h"

struct bt_rpc; /* completion queue, its thread, its loop */
struct bt_rpc_server;
struct bt_rpc_channel; /* client side: one target, reconnects by itself */
struct bt_rpc_stream;  /* one bidirectional stream, either side */
struct bt_rpc_call;    /* one unary call on the server, to be answered once */
struct bt_tls;         /* common/rpc/tls.h */

/* gRPC's own status numbers, in answers to and from other processes. */
enum {
    BT_GRPC_OK = 0,
    BT_GRPC_CANCELLED = 1,
    BT_GRPC_INVALID_ARGUMENT = 3,
    BT_GRPC_DEADLINE = 4,
    BT_GRPC_NOT_FOUND = 5,
    BT_GRPC_PERMISSION_DENIED = 7,
    BT_GRPC_EXHAUSTED = 8,
    BT_GRPC_FAILED_PRECONDITION = 9,
    BT_GRPC_UNIMPLEMENTED = 12,
    BT_GRPC_INTERNAL = 13,
    BT_GRPC_UNAVAILABLE = 14,
    BT_GRPC_UNAUTHENTICATED = 16
};

/* ERR_IO (logged): no eventfd or thread could be created. loop outlives rpc. */
bt_status_t bt_rpc_create(struct bt_loop *loop, struct bt_rpc **rpc_p) BT_MUST_CHECK;
/* Servers and channels that are made from now on use this TLS; it outlives rpc. NULL: plaintext. */
void bt_rpc_set_tls(struct bt_rpc *rpc, struct bt_tls *tls);
/* Servers and channels that are made from now on are tuned for many messages of a MiB. */
void bt_rpc_set_bulk(struct bt_rpc *rpc);
/* Ends everything still open (callbacks are not called any more) and joins the thread. Unary calls
 * not yet answered may not be answered afterwards. Not from inside a callback of this rpc. */
void bt_rpc_destroy(struct bt_rpc *rpc);
struct bt_loop *bt_rpc_loop(const struct bt_rpc *rpc); /* for timers of code built on rpc */

/* ---- streams, both sides ---- */
struct bt_rpc_stream_ops {
    /* A message of len bytes; data is valid during the call only. */
    void (*on_message)(void *arg, struct bt_rpc_stream *s, const void *data, size_t len);
    /* The stream has ended, by either side. This is the last callback; s is invalid after it
     * returns. code: a gRPC status number (client side: the server's status; server side: CANCELLED
     * when the client left, OK when it finished). Not called after the owner has called
     * bt_rpc_stream_close. */
    void (*on_close)(void *arg, struct bt_rpc_stream *s, int code, const char *detail);
    /* Optional: queued messages fell below half of the queue's bound after an AGAIN. */
    void (*on_writable)(void *arg, struct bt_rpc_stream *s);
    /* Optional, in place of on_message: a message of len bytes in the n pieces in which it came,
     * not copied together; valid during the call only. */
    void (*on_pieces)(void *arg, struct bt_rpc_stream *s, const struct iovec *pieces, size_t n,
                      size_t len);
    /* Optional: called once for each queued message, in order, when it has been written. */
    void (*on_sent)(void *arg, struct bt_rpc_stream *s);
};
/* Queues a copy of the message (one is in flight at a time, in order). AGAIN when the queue of
 * this stream holds queue_bytes_max (default 8 MiB): nothing queued; the owner drops or closes.
 * ERR_PEER_LOST when the stream is ending. */
bt_status_t bt_rpc_stream_send(struct bt_rpc_stream *s, const void *data, size_t len) BT_MUST_CHECK;
/* The same of a message in n pieces, which are copied together. */
bt_status_t bt_rpc_stream_send_iov(struct bt_rpc_stream *s, const struct iovec *iov,
                                   size_t n) BT_MUST_CHECK;
size_t bt_rpc_stream_queued(const struct bt_rpc_stream *s); /* bytes not yet handed to gRPC */
/* Returns whether a message is on its way, so that a further one would wait for on_sent. */
bool bt_rpc_stream_sending(const struct bt_rpc_stream *s);
void bt_rpc_stream_set_queue_max(struct bt_rpc_stream *s, size_t bytes);
/* Replaces the callbacks; ops is copied. */
void bt_rpc_stream_set_arg(struct bt_rpc_stream *s, const struct bt_rpc_stream_ops *ops, void *arg);
/* Returns whether the certificate at the other end names this role and node. Without TLS: true. On
 * the client side it is valid from the first message on. */
bool bt_rpc_stream_peer_is(const struct bt_rpc_stream *s, const char *role, const char *node);
/* Server side: returns whether both came over the same connection. */
bool bt_rpc_stream_same_connection(const struct bt_rpc_stream *a, const struct bt_rpc_stream *b);
/* The owner ends the stream. The server side sends (code, detail), with flush after the queued
 * messages. The client side half-closes (flush) or cancels. There are no further callbacks. */
void bt_rpc_stream_close(struct bt_rpc_stream *s, int code, const char *detail, bool flush);

/* ---- server ---- */
/* Listens on "host:port" (port 0: any free) without SO_REUSEPORT; also "unix:/path". *port_p (may
 * be NULL) gets the bound port. ERR_IO with the reason logged when it cannot. */
bt_status_t bt_rpc_server_create(struct bt_rpc *rpc, const char *listen,
                                 struct bt_rpc_server **srv_p, int *port_p) BT_MUST_CHECK;
/* A stream on which the client says nothing within 5 s ends with DEADLINE, and so does a unary call
 * whose message does not come. A connection has at most 128 calls and streams, a server 1024 of
 * either kind; further ones get EXHAUSTED. */
/* Register before start. Other methods are answered with UNIMPLEMENTED. method: "/pkg.Svc/M".
 * caller: the role that the client's certificate must name, otherwise the answer is
 * PERMISSION_DENIED; NULL: any daemon of the cluster. Without TLS there is no check. */
typedef void (*bt_rpc_unary_fn)(void *arg, struct bt_rpc_call *call, const void *data, size_t len);
typedef void (*bt_rpc_accept_fn)(void *arg,
                                 struct bt_rpc_stream *s); /* must set ops with set_arg */
void bt_rpc_server_unary(struct bt_rpc_server *srv, const char *method, const char *caller,
                         bt_rpc_unary_fn fn, void *arg);
void bt_rpc_server_stream(struct bt_rpc_server *srv, const char *method, const char *caller,
                          bt_rpc_accept_fn fn, void *arg);
/* Begins to answer calls. Once. */
void bt_rpc_server_start(struct bt_rpc_server *srv);
/* Answers the call, now or later; code != 0 ignores data. The call is gone afterwards. */
void bt_rpc_call_reply(struct bt_rpc_call *call, int code, const char *detail, const void *data,
                       size_t len);
/* The name of the caller: the one in its certificate, as "cert:baton://CLUSTER/ROLE/NODE", or else
 * its address, as "addr:192.0.2.7". */
void bt_rpc_call_caller(const struct bt_rpc_call *call, char *text, size_t cap);
/* Returns whether the caller has shown a certificate (which the method's role check has
 * accepted). */
bool bt_rpc_call_has_certificate(const struct bt_rpc_call *call);
/* The call's metadata `authorization`. NULL: absent; "": longer than 1 KiB, or there are two. Valid
 * as long as the call. */
const char *bt_rpc_call_authorization(const struct bt_rpc_call *call);
/* fn is called once, when the call is answered, also if that happens at the server's end; detail
 * may be NULL. */
typedef void (*bt_rpc_replied_fn)(void *arg, int code, const char *detail);
void bt_rpc_call_on_reply(struct bt_rpc_call *call, bt_rpc_replied_fn fn, void *arg);
/* The arg of bt_rpc_call_on_reply while the call is not answered, if it was set with this fn; else
 * NULL. */
void *bt_rpc_call_watcher(const struct bt_rpc_call *call, bt_rpc_replied_fn fn);
/* Stops accepting and cancels open calls and streams (on_close is called for each before this
 * returns; clients see UNAVAILABLE). The port is free a moment later, when the loop has turned. */
void bt_rpc_server_destroy(struct bt_rpc_server *srv);

/* ---- client ---- */
/* who: "role" or "role/node" that the server's certificate must name before anything is sent to the
 * server; NULL: any daemon of the cluster. Without TLS there is no check. The first call dials.
 * ERR_INVALID (logged): target is empty. */
bt_status_t bt_rpc_channel_create(struct bt_rpc *rpc, const char *target, const char *who,
                                  struct bt_rpc_channel **ch_p) BT_MUST_CHECK;
/* The same, with another TLS than rpc's; NULL: plaintext. */
bt_status_t bt_rpc_channel_create_tls(struct bt_rpc *rpc, const char *target, struct bt_tls *tls,
                                      const char *who, struct bt_rpc_channel **ch_p) BT_MUST_CHECK;
/* Cancels its streams and calls: on_close, or done with CANCELLED, is called for each before this
 * returns, and no callback comes afterwards. */
void bt_rpc_channel_destroy(struct bt_rpc_channel *ch);
/* Ends the pause after a failed attempt to connect, so that the next attempt begins now; nothing
 * happens if there is no such pause. For an owner that does not rely on gRPC's timers: they stand
 * still after this host's wall clock was set back, until it shows the old time again. */
void bt_rpc_channel_dial_again(struct bt_rpc_channel *ch);
/* Unary call; data is copied. done is called exactly once (code, detail, reply bytes valid during
 * the call), later unless the channel is being destroyed: then at once, with CANCELLED. After
 * deadline_ms (0: never) its code is DEADLINE. */
typedef void (*bt_rpc_reply_fn)(void *arg, int code, const char *detail, const void *data,
                                size_t len);
void bt_rpc_unary(struct bt_rpc_channel *ch, const char *method, const void *data, size_t len,
                  uint64_t deadline_ms, bt_rpc_reply_fn done, void *arg);
/* Opens a stream; a target that cannot be reached shows as on_close(UNAVAILABLE). wait_ready: keep
 * trying to connect instead. Streams carry no deadline. ERR_CANCELLED: the channel is being
 * destroyed. */
bt_status_t bt_rpc_stream_open(struct bt_rpc_channel *ch, const char *method, bool wait_ready,
                               const struct bt_rpc_stream_ops *ops, void *arg,
                               struct bt_rpc_stream **s_p) BT_MUST_CHECK;

/* ---- blocking client for the CLI and tests: no loop ---- */
struct bt_rpc_question {
    const char *target; /* host:port */
    struct bt_tls *tls; /* NULL: plaintext */
    const char *who;    /* as in bt_rpc_channel_create_tls; NULL: any daemon of the cluster */
    const char *method; /* "/pkg.Svc/M" */
    const char *authorization; /* metadata of this name; NULL: none */
    const void *data;          /* the packed message, len bytes */
    size_t len;
    uint64_t deadline_ms;
};
/* One unary call on a fresh channel. Returns a gRPC code. OK: *reply_p is heap memory of
 * *reply_len_p bytes, which the caller frees; else both stay as they are. detail (NULL: not wanted)
 * gets the text that came with the code. */
int bt_rpc_unary_blocking(const struct bt_rpc_question *q, void **reply_p, size_t *reply_len_p,
                          char *detail, size_t detail_cap);

#endif
