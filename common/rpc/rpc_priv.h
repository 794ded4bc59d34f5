/* Inside common/rpc: the pieces that rpc.c, stream.c, server.c and client.c share. Everything is
 * owned by the loop's thread; the completion-queue thread touches only struct bt_rpc's queue of
 * completed operations, under its lock. */
#ifndef BT_RPC_RPC_PRIV_H
#define BT_RPC_RPC_PRIV_H

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <pthread.h>

#include "common/base/list.h"
#include "common/rpc/rpc.h"

#define BT_RPC_MESSAGE_MAX_BYTES (16 << 20)
#define BT_RPC_QUEUE_MAX_BYTES   (8u << 20)
/* bt_rpc_set_bulk: the size of HTTP/2's frames, and how much a receiver accepts before it has
 * read */
#define BT_RPC_BULK_FRAME_BYTES  (1 << 20)
#define BT_RPC_BULK_WINDOW_BYTES (8 << 20)

/* One operation in flight in gRPC: its address is the tag. An owner holds a reference on itself
 * for each op that was started, and drops it in fn. */
struct bt_rpc_op {
    _Atomic uint32_t magic; /* OP_MAGIC while in flight; stored last, loaded first */
    bool success;
    struct bt_rpc_op *next;
    void (*fn)(void *owner, bool success);
    void *owner;
};

struct bt_rpc {
    struct bt_loop *loop;
    struct bt_tls *tls; /* NULL: plaintext */
    bool bulk;
    grpc_completion_queue *cq;
    pthread_t thread;
    int efd; /* readable while completed ops wait */
    struct bt_loop_fd *watcher;

    pthread_mutex_t lock; /* guards done_head, done_tail */
    pthread_cond_t done_cond;
    struct bt_rpc_op *done_head, **done_tail;

    size_t n_ops; /* started and not yet handed to fn */
    bool dying, dispatching;
    struct bt_list servers, channels;
    struct bt_list orphan_streams; /* whose server or channel is gone, until their ops are back */
    struct bt_list orphan_calls;
};

void bt_rpc_op_init(struct bt_rpc_op *op, void (*fn)(void *owner, bool success), void *owner);
/* Counts op as started; call right before the gRPC function that takes it as a tag. */
void bt_rpc_op_begin(struct bt_rpc *rpc, struct bt_rpc_op *op);
/* Starts a batch; a refusal by gRPC is a bug of ours. */
void bt_rpc_batch(struct bt_rpc *rpc, grpc_call *call, const grpc_op *ops, size_t n,
                  struct bt_rpc_op *op);

/* gRPC is initialised once per user of it (counted), with its log handed to ours. */
void bt_rpc_grpc_init(void);
void bt_rpc_grpc_shutdown(void);

/* A received message as contiguous bytes. */
struct bt_rpc_bytes {
    const void *data;
    size_t len;
    grpc_slice copy;
    bool copied;
};
void bt_rpc_bytes_open(grpc_byte_buffer *bb, struct bt_rpc_bytes *b);
void bt_rpc_bytes_close(struct bt_rpc_bytes *b);
grpc_byte_buffer *bt_rpc_byte_buffer(const void *data, size_t len);
grpc_byte_buffer *bt_rpc_byte_buffer_iov(const struct iovec *iov, size_t n, size_t len);
/* The pieces of a message as they lie in it; the caller frees the array. */
struct iovec *bt_rpc_pieces(grpc_byte_buffer *bb, size_t *n_p);

/* stream.c: takes call; the new stream is on list `parent`. Client: call is fresh. */
struct bt_rpc_stream *bt_rpc_stream_new(struct bt_rpc *rpc, grpc_call *call, struct bt_tls *tls,
                                        bool server, struct bt_list *parent);
void bt_rpc_stream_start_client(struct bt_rpc_stream *s, bool wait_ready);
/* Starts the server side and hands it to accept. */
void bt_rpc_stream_start_server(struct bt_rpc_stream *s, bt_rpc_accept_fn fn, void *arg);
/* Cancels all streams on the list, after on_close(CANCELLED) if notify, and empties it. */
void bt_rpc_streams_abort(struct bt_rpc *rpc, struct bt_list *list, bool notify);

/* client.c, server.c: ends of bt_rpc_destroy. */
void bt_rpc_channel_end(struct bt_rpc_channel *ch, bool notify);
void bt_rpc_server_end(struct bt_rpc_server *srv, bool notify);
/* ends unary calls that will get no answer any more */
void bt_rpc_calls_abandon(struct bt_rpc *rpc);
struct bt_rpc_channel *bt_rpc_channel_of(struct bt_list *link);
struct bt_rpc_server *bt_rpc_server_of(struct bt_list *link);

#endif
