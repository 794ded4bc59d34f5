/* One bidirectional stream, on the client or server side: a queue of messages of which one is in
 * flight, a read that is always armed, and an end that the owner is told exactly once. Loop's
 * thread. A stream lives until its owner has released it and every started operation has
 * completed. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/tls_priv.h"

#define STREAM_MAGIC 0x73747265u

/* A client sends something as soon as it has opened a stream. A slow peer has seconds for that; one
 * that sends nothing holds the server's memory no longer than this. */
#define FIRST_MESSAGE_MS 5000

struct msg {
    struct msg *next;
    grpc_byte_buffer *bb;
    size_t len;
};

struct bt_rpc_stream {
    uint32_t magic;
    uint32_t refs; /* one for the owner, one for each op in flight */
    struct bt_rpc *rpc;
    grpc_call *call;
    struct bt_list link; /* in its server, its channel, or rpc->orphan_streams */
    struct bt_rpc_stream_ops ops;
    void *arg;
    struct bt_tls *tls;
    struct bt_timer tls_timer; /* checks whether the peer's certificate is still valid */
    bool server;
    bool owner_gone;    /* closed by the owner, or on_close was called: no more callbacks */
    bool ended;         /* the status (client) or the close (server) has arrived */
    bool broken;        /* a send failed: the end of the call will follow */
    bool recv_done;     /* no further message will come */
    bool sending;       /* op_send is in flight */
    bool finish_wanted; /* half-close or status is to be sent after the queue */
    bool finish_sent;
    bool want_writable;
    struct bt_timer first; /* server: runs until the first message has come */

    struct msg *head, **tail;
    size_t queued_bytes, queue_max_bytes;
    grpc_byte_buffer *sending_bb, *recv_bb;

    struct bt_rpc_op op_start, op_end, op_recv, op_send, op_finish;
    grpc_metadata_array md_initial, md_trailing;
    grpc_status_code status;
    grpc_slice details;
    int cancelled;
    int finish_code;
    char *finish_detail;
};

static void pump(struct bt_rpc_stream *s);

/* ---- references ---- */

static void drop_queue(struct bt_rpc_stream *s)
{
    while (s->head != NULL) {
        struct msg *m = s->head;
        s->head = m->next;
        grpc_byte_buffer_destroy(m->bb);
        free(m);
    }
    s->tail = &s->head;
    s->queued_bytes = 0;
}

static void stream_put(struct bt_rpc_stream *s)
{
    BT_ASSERT(s->magic == STREAM_MAGIC && s->refs > 0);
    if (--s->refs > 0) {
        return;
    }
    bt_timer_stop(s->rpc->loop, &s->first);
    bt_list_remove(&s->link);
    if (s->tls != NULL) {
        bt_timer_stop(s->rpc->loop, &s->tls_timer);
    }
    drop_queue(s);
    grpc_call_unref(s->call);
    grpc_metadata_array_destroy(&s->md_initial);
    grpc_metadata_array_destroy(&s->md_trailing);
    grpc_slice_unref(s->details);
    free(s->finish_detail);
    s->magic = 0;
    free(s);
}

static void start(struct bt_rpc_stream *s, const grpc_op *ops, size_t n, struct bt_rpc_op *op)
{
    s->refs++;
    bt_rpc_batch(s->rpc, s->call, ops, n, op);
}

static void arm_recv(struct bt_rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &s->recv_bb;
    start(s, &op, 1, &s->op_recv);
}

/* Releases the owner, after calling on_close if the owner has not closed the stream itself. */
static void tell_closed(struct bt_rpc_stream *s, int code, const char *detail, bool notify)
{
    if (s->owner_gone) {
        return;
    }
    s->owner_gone = true;
    if (notify && s->ops.on_close != NULL) {
        s->ops.on_close(s->arg, s, code, detail);
    }
    stream_put(s);
}

/* Client: messages that came before the status are delivered before on_close. */
static void client_maybe_closed(struct bt_rpc_stream *s)
{
    if (s->ended && s->recv_done && !s->owner_gone) {
        char *detail = grpc_slice_to_c_string(s->details);
        tell_closed(s, (int)s->status, detail, !s->rpc->dying);
        gpr_free(detail);
    }
}

/* ---- completions ---- */

/* A certificate that expires or is revoked ends existing streams too, not only new connections. */
static void check_peer(void *arg)
{
    struct bt_rpc_stream *s = arg;
    char why[BT_CERT_URI_MAX + 100];
    if (!s->ended && !bt_tls_call_counts(s->tls, s->call, why, sizeof(why))) {
        drop_queue(s);
        grpc_call_cancel_with_status(s->call, GRPC_STATUS_UNAUTHENTICATED, why, NULL);
    }
}

static void on_start(void *owner, bool success)
{
    struct bt_rpc_stream *s = owner;
    if (success && s->tls != NULL) { /* a failure also ends the call */
        check_peer(s);
    }
    stream_put(s);
}

static void on_end(void *owner, bool success)
{
    struct bt_rpc_stream *s = owner;
    (void)success;
    s->ended = true;
    drop_queue(s);
    if (s->server) {
        tell_closed(s, s->cancelled ? BT_GRPC_CANCELLED : BT_GRPC_OK,
                    s->cancelled ? "cancelled by the client or connection lost" : "",
                    !s->rpc->dying);
    } else {
        client_maybe_closed(s);
    }
    stream_put(s);
}

static void on_recv(void *owner, bool success)
{
    struct bt_rpc_stream *s = owner;
    grpc_byte_buffer *bb = s->recv_bb;
    s->recv_bb = NULL;
    bt_timer_stop(s->rpc->loop, &s->first);
    if (!success || bb == NULL) {
        s->recv_done = true;
        if (s->server && !s->ended) {
            /* The client has half-closed, or is gone (then RECV_CLOSE follows). Send OK after the
             * queue. */
            s->finish_wanted = true;
            pump(s);
        } else if (!s->server) {
            client_maybe_closed(s);
        }
    } else {
        if (!s->owner_gone && !s->rpc->dying && s->ops.on_pieces != NULL) {
            size_t n;
            struct iovec *pieces = bt_rpc_pieces(bb, &n);
            s->ops.on_pieces(s->arg, s, pieces, n, grpc_byte_buffer_length(bb));
            free(pieces);
        } else if (!s->owner_gone && !s->rpc->dying && s->ops.on_message != NULL) {
            struct bt_rpc_bytes b;
            bt_rpc_bytes_open(bb, &b);
            s->ops.on_message(s->arg, s, b.data, b.len);
            bt_rpc_bytes_close(&b);
        }
        if (s->server && s->owner_gone) {
            s->recv_done = true; /* no one reads, and the status ends the call */
        } else {
            arm_recv(s);
        }
    }
    if (bb != NULL) {
        grpc_byte_buffer_destroy(bb);
    }
    stream_put(s);
}

static void on_sent(void *owner, bool success)
{
    struct bt_rpc_stream *s = owner;
    s->sending = false;
    grpc_byte_buffer_destroy(s->sending_bb);
    s->sending_bb = NULL;
    if (!success) {
        s->broken = true;
        drop_queue(s);
    } else {
        pump(s);
        if (s->ops.on_sent != NULL && !s->owner_gone && !s->rpc->dying) {
            s->ops.on_sent(s->arg, s);
        }
        if (s->want_writable && s->queued_bytes < s->queue_max_bytes / 2 && !s->owner_gone &&
            !s->ended && !s->finish_wanted && !s->rpc->dying) {
            s->want_writable = false;
            if (s->ops.on_writable != NULL) {
                s->ops.on_writable(s->arg, s);
            }
        }
    }
    stream_put(s);
}

static void on_finish(void *owner, bool success)
{
    (void)success;
    stream_put(owner);
}

/* ---- sending ---- */

static void send_finish(struct bt_rpc_stream *s)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    grpc_slice detail =
        grpc_slice_from_copied_string(s->finish_detail == NULL ? "" : s->finish_detail);
    if (s->server) {
        op.op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        op.data.send_status_from_server.status = (grpc_status_code)s->finish_code;
        op.data.send_status_from_server.status_details = &detail;
    }
    s->finish_sent = true;
    start(s, &op, 1, &s->op_finish);
    grpc_slice_unref(detail);
}

/* Starts the next send, if none is in flight. */
static void pump(struct bt_rpc_stream *s)
{
    if (s->sending || s->ended || s->broken || s->finish_sent) {
        return;
    }
    if (s->head != NULL) {
        struct msg *m = s->head;
        s->head = m->next;
        if (s->head == NULL) {
            s->tail = &s->head;
        }
        s->queued_bytes -= m->len;
        s->sending = true;
        s->sending_bb = m->bb;
        free(m);
        grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
        op.data.send_message.send_message = s->sending_bb;
        start(s, &op, 1, &s->op_send);
    } else if (s->finish_wanted) {
        send_finish(s);
    }
}

bt_status_t bt_rpc_stream_send(struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct iovec iov = {(void *)(uintptr_t)data, len};
    return bt_rpc_stream_send_iov(s, &iov, len > 0);
}

bt_status_t bt_rpc_stream_send_iov(struct bt_rpc_stream *s, const struct iovec *iov, size_t n)
{
    BT_ASSERT(s->magic == STREAM_MAGIC);
    size_t len = 0;
    for (size_t i = 0; i < n; i++) {
        len += iov[i].iov_len;
    }
    if (s->owner_gone || s->ended || s->broken || s->finish_wanted) {
        return BT_ERR_PEER_LOST;
    }
    if (len > BT_RPC_MESSAGE_MAX_BYTES) {
        return BT_ERR_TOO_LARGE;
    }
    /* A message that is larger than the limit may be queued if the queue is empty. */
    if (s->queued_bytes > 0 && s->queued_bytes + len > s->queue_max_bytes) {
        s->want_writable = true;
        return BT_AGAIN;
    }
    struct msg *m = bt_malloc(sizeof(*m));
    *m = (struct msg){.bb = bt_rpc_byte_buffer_iov(iov, n, len), .len = len};
    *s->tail = m;
    s->tail = &m->next;
    s->queued_bytes += len;
    pump(s);
    return BT_OK;
}

/* ---- owner's view ---- */

size_t bt_rpc_stream_queued(const struct bt_rpc_stream *s)
{
    return s->queued_bytes;
}

bool bt_rpc_stream_sending(const struct bt_rpc_stream *s)
{
    return s->sending || s->head != NULL;
}

void bt_rpc_stream_set_queue_max(struct bt_rpc_stream *s, size_t bytes)
{
    s->queue_max_bytes = bytes;
}

void bt_rpc_stream_set_arg(struct bt_rpc_stream *s, const struct bt_rpc_stream_ops *ops, void *arg)
{
    s->ops = *ops;
    s->arg = arg;
}

bool bt_rpc_stream_same_connection(const struct bt_rpc_stream *a, const struct bt_rpc_stream *b)
{
    char *x = grpc_call_get_peer(a->call), *y = grpc_call_get_peer(b->call);
    bool same = strcmp(x, y) == 0; /* the other end as "ipv4:ADDRESS:PORT" */
    gpr_free(x);
    gpr_free(y);
    return same;
}

bool bt_rpc_stream_peer_is(const struct bt_rpc_stream *s, const char *role, const char *node)
{
    return bt_tls_call_is(s->tls, s->call, role, node);
}

void bt_rpc_stream_close(struct bt_rpc_stream *s, int code, const char *detail, bool flush)
{
    BT_ASSERT(s->magic == STREAM_MAGIC && !s->owner_gone);
    s->owner_gone = true;
    if (!flush) {
        drop_queue(s);
    }
    if (s->server) {
        if (!s->finish_sent) {
            s->finish_code = code;
            free(s->finish_detail);
            s->finish_detail = bt_strdup(detail == NULL ? "" : detail);
        }
        s->finish_wanted = true;
        if (!flush && s->sending && !s->ended) {
            /* The status must not wait for a message that the peer does not take. */
            grpc_call_cancel_with_status(
                s->call, code == BT_GRPC_OK ? GRPC_STATUS_CANCELLED : (grpc_status_code)code,
                s->finish_detail, NULL);
        }
        pump(s);
    } else if (flush) {
        s->finish_wanted = true;
        pump(s);
    } else if (!s->ended) {
        grpc_call_cancel(s->call, NULL);
    }
    stream_put(s);
}

/* ---- making and ending ---- */

struct bt_rpc_stream *bt_rpc_stream_new(struct bt_rpc *rpc, grpc_call *call, struct bt_tls *tls,
                                        bool server, struct bt_list *parent)
{
    struct bt_rpc_stream *s = bt_calloc(1, sizeof(*s));
    s->magic = STREAM_MAGIC;
    s->refs = 1;
    s->rpc = rpc;
    s->call = call;
    s->tls = tls;
    s->server = server;
    s->tail = &s->head;
    s->queue_max_bytes = BT_RPC_QUEUE_MAX_BYTES;
    s->details = grpc_empty_slice();
    grpc_metadata_array_init(&s->md_initial);
    grpc_metadata_array_init(&s->md_trailing);
    bt_rpc_op_init(&s->op_start, on_start, s);
    bt_rpc_op_init(&s->op_end, on_end, s);
    bt_rpc_op_init(&s->op_recv, on_recv, s);
    bt_rpc_op_init(&s->op_send, on_sent, s);
    bt_rpc_op_init(&s->op_finish, on_finish, s);
    bt_list_insert_tail(parent, &s->link);
    if (tls != NULL) {
        bt_timer_start(rpc->loop, &s->tls_timer, BT_TLS_LOOK_S * 1000, BT_TLS_LOOK_S * 1000,
                       check_peer, s);
    }
    return s;
}

void bt_rpc_stream_start_client(struct bt_rpc_stream *s, bool wait_ready)
{
    grpc_op open[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                       {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    if (wait_ready) {
        open[0].flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                        GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    }
    open[1].data.recv_initial_metadata.recv_initial_metadata = &s->md_initial;
    start(s, open, 2, &s->op_start);

    grpc_op end = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    end.data.recv_status_on_client.trailing_metadata = &s->md_trailing;
    end.data.recv_status_on_client.status = &s->status;
    end.data.recv_status_on_client.status_details = &s->details;
    start(s, &end, 1, &s->op_end);
    arm_recv(s);
}

/* on_end tells its owner. */
static void on_first_timeout(void *arg)
{
    struct bt_rpc_stream *s = arg;
    if (!s->ended) {
        grpc_call_cancel_with_status(s->call, GRPC_STATUS_DEADLINE_EXCEEDED,
                                     "the client sent nothing on this stream within 5 s", NULL);
    }
}

void bt_rpc_stream_start_server(struct bt_rpc_stream *s, bt_rpc_accept_fn fn, void *arg)
{
    /* In its own batch: only this op reports that the client is gone. */
    grpc_op end = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    end.data.recv_close_on_server.cancelled = &s->cancelled;
    start(s, &end, 1, &s->op_end);
    grpc_op open = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    start(s, &open, 1, &s->op_start);

    s->refs++; /* fn may close the stream */
    fn(arg, s);
    BT_ASSERT(s->owner_gone || s->ops.on_close != NULL); /* accept must have set ops */
    if (s->owner_gone) {
        s->recv_done = true;
    } else {
        bt_timer_start(s->rpc->loop, &s->first, FIRST_MESSAGE_MS, 0, on_first_timeout, s);
        arm_recv(s);
    }
    stream_put(s);
}

void bt_rpc_streams_abort(struct bt_rpc *rpc, struct bt_list *list, bool notify)
{
    while (!bt_list_empty(list)) {
        struct bt_rpc_stream *s = BT_CONTAINER_OF(list->next, struct bt_rpc_stream, link);
        bt_list_remove(&s->link);
        bt_list_insert_tail(&rpc->orphan_streams, &s->link);
        s->refs++;
        if (!s->ended) {
            grpc_call_cancel_with_status(
                s->call, s->server ? GRPC_STATUS_UNAVAILABLE : GRPC_STATUS_CANCELLED,
                s->server ? "the server is shutting down" : "cancelled", NULL);
        }
        tell_closed(s, BT_GRPC_CANCELLED, "this side is shutting down", notify);
        stream_put(s);
    }
}
