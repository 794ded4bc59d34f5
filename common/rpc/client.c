/* The client side: channels, unary calls, opening streams, and the blocking call of the CLI. Loop's
 * thread, except bt_rpc_unary_blocking, which needs no loop and may run on any thread. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/tls_priv.h"

/* etcd refuses pings that come more often than every 5 s. */
#define KEEPALIVE_MS         10000 /* twice etcd's least */
#define KEEPALIVE_TIMEOUT_MS 5000  /* several repeats of a lost segment */
#define CONNECT_TIMEOUT_MS   2000  /* as a session's SILENCE: a silent peer is dead */
#define BACKOFF_MIN_MS       100   /* as a conductor's first pause between dials */
#define BACKOFF_MAX_MS       1000  /* sessions dial anew themselves; this is for etcd */
#define RESOLVE_MIN_MS       1000  /* a name of a restarted machine may change its address */

struct bt_rpc_channel {
    struct bt_rpc *rpc;
    struct bt_tls *tls;
    struct bt_list link; /* rpc->channels */
    grpc_channel *channel;
    bool dying;
    struct bt_list streams, unaries;
};

/* The data of one unary batch while it runs. */
struct unary_call {
    grpc_call *call;
    grpc_byte_buffer *send_bb, *recv_bb;
    grpc_metadata_array md_initial, md_trailing;
    grpc_status_code status;
    grpc_slice details;
};

struct unary {
    struct bt_list link; /* ch->unaries, until done was called */
    struct bt_rpc *rpc;
    struct bt_rpc_op op;
    struct unary_call u;
    struct bt_timer deadline; /* gRPC's own timers stop when the wall clock is set back */
    bt_rpc_reply_fn done;
    void *arg;
};

/* ---- channels ---- */

/* The target in gRPC's syntax. A numeric address gets a scheme that needs no resolver, and so has
 * no pauses between lookups; other targets are unchanged. The caller frees the result. */
static char *target_uri(const char *target)
{
    char host[64];
    const char *colon = strrchr(target, ':');
    struct in6_addr addr;
    if (colon != NULL && (size_t)(colon - target) < sizeof(host)) {
        snprintf(host, sizeof(host), "%.*s", (int)(colon - target), target);
        if (inet_pton(AF_INET, host, &addr) == 1) {
            return bt_sprintf("ipv4:%s", target);
        }
        if (host[0] == '[') {
            return bt_sprintf("ipv6:%s", target);
        }
    }
    return bt_strdup(target);
}

static grpc_channel *dial(const char *target, struct bt_tls *tls, const char *who, bool bulk)
{
    const struct {
        const char *key;
        int value;
    } ints[] = {
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, BT_RPC_MESSAGE_MAX_BYTES},
        {GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_TIMEOUT_MS},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MIN_MS},
        /* despite its name, this also limits the time of one attempt to connect */
        {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_TIMEOUT_MS},
        {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS},
        {GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, RESOLVE_MIN_MS},
        {GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1},
        {GRPC_ARG_ENABLE_HTTP_PROXY, 0}, /* connects within the cluster directly, whatever the
                                            environment says */
        {GRPC_ARG_ENABLE_RETRIES, 0},
        {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1}, /* so that destroying a channel closes its
                                                    connection */
        /* the last two: only for bulk channels */
        {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, BT_RPC_BULK_WINDOW_BYTES},
        {GRPC_ARG_HTTP2_MAX_FRAME_SIZE, BT_RPC_BULK_FRAME_BYTES},
    };
    grpc_arg args[BT_ARRAY_LEN(ints)];
    for (size_t i = 0; i < BT_ARRAY_LEN(ints); i++) {
        args[i] = (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)ints[i].key};
        args[i].value.integer = ints[i].value;
    }
    grpc_channel_args list = {.num_args = BT_ARRAY_LEN(args) - (bulk ? 0 : 2), .args = args};
    char *uri = target_uri(target);
    grpc_channel_credentials *creds = bt_tls_channel_credentials(tls, who);
    grpc_channel *ch = grpc_channel_create(uri, creds, &list);
    grpc_channel_credentials_release(creds);
    free(uri);
    return ch;
}

bt_status_t bt_rpc_channel_create(struct bt_rpc *rpc, const char *target, const char *who,
                                  struct bt_rpc_channel **ch_p)
{
    return bt_rpc_channel_create_tls(rpc, target, rpc->tls, who, ch_p);
}

bt_status_t bt_rpc_channel_create_tls(struct bt_rpc *rpc, const char *target, struct bt_tls *tls,
                                      const char *who, struct bt_rpc_channel **ch_p)
{
    if (target == NULL || target[0] == '\0') {
        BT_ERROR("rpc_bad_target", "target=%s remedy=%s", target, "give host:port or unix:/path");
        return BT_ERR_INVALID;
    }
    struct bt_rpc_channel *ch = bt_calloc(1, sizeof(*ch));
    ch->rpc = rpc;
    ch->tls = tls;
    ch->channel = dial(target, tls, who, rpc->bulk);
    bt_list_init(&ch->streams);
    bt_list_init(&ch->unaries);
    bt_list_insert_tail(&rpc->channels, &ch->link);
    *ch_p = ch;
    return BT_OK;
}

struct bt_rpc_channel *bt_rpc_channel_of(struct bt_list *link)
{
    return BT_CONTAINER_OF(link, struct bt_rpc_channel, link);
}

void bt_rpc_channel_end(struct bt_rpc_channel *ch, bool notify)
{
    BT_ASSERT(!ch->dying);
    ch->dying = true;
    bt_list_remove(&ch->link);
    bt_rpc_streams_abort(ch->rpc, &ch->streams, notify);
    while (!bt_list_empty(&ch->unaries)) {
        struct unary *u = BT_CONTAINER_OF(ch->unaries.next, struct unary, link);
        bt_list_remove(&u->link); /* freed when its op has completed */
        bt_timer_stop(ch->rpc->loop, &u->deadline);
        bt_rpc_reply_fn done = u->done;
        u->done = NULL;
        grpc_call_cancel(u->u.call, NULL);
        if (notify) {
            done(u->arg, BT_GRPC_CANCELLED, "this side is shutting down", "", 0);
        }
    }
    grpc_channel_destroy(ch->channel);
    free(ch);
}

void bt_rpc_channel_destroy(struct bt_rpc_channel *ch)
{
    if (ch != NULL) {
        bt_rpc_channel_end(ch, true);
    }
}

void bt_rpc_channel_dial_again(struct bt_rpc_channel *ch)
{
    grpc_channel_reset_connect_backoff(ch->channel);
}

/* ---- unary calls ---- */

static gpr_timespec deadline_in(uint64_t ms)
{
    if (ms == 0) {
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    }
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_millis((int64_t)ms, GPR_TIMESPAN));
}

static grpc_call *make_call(grpc_channel *ch, grpc_completion_queue *cq, const char *method,
                            gpr_timespec deadline)
{
    grpc_slice name = grpc_slice_from_copied_string(method);
    grpc_call *call =
        grpc_channel_create_call(ch, NULL, GRPC_PROPAGATE_DEFAULTS, cq, name, NULL, deadline, NULL);
    grpc_slice_unref(name);
    return call;
}

static void unary_call_init(struct unary_call *u, grpc_call *call, const void *data, size_t len)
{
    *u = (struct unary_call){.call = call, .details = grpc_empty_slice()};
    u->send_bb = bt_rpc_byte_buffer(data, len);
    grpc_metadata_array_init(&u->md_initial);
    grpc_metadata_array_init(&u->md_trailing);
}

/* Sets the six ops of a complete unary call. */
static void unary_call_ops(struct unary_call *u, grpc_op ops[6])
{
    memset(ops, 0, 6 * sizeof(ops[0]));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = u->send_bb;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &u->md_initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &u->recv_bb;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &u->md_trailing;
    ops[5].data.recv_status_on_client.status = &u->status;
    ops[5].data.recv_status_on_client.status_details = &u->details;
}

static void unary_call_cleanup(struct unary_call *u)
{
    grpc_byte_buffer_destroy(u->send_bb);
    if (u->recv_bb != NULL) {
        grpc_byte_buffer_destroy(u->recv_bb);
    }
    grpc_metadata_array_destroy(&u->md_initial);
    grpc_metadata_array_destroy(&u->md_trailing);
    grpc_slice_unref(u->details);
    grpc_call_unref(u->call);
}

static void on_unary(void *owner, bool success)
{
    struct unary *u = owner;
    (void)success; /* the status has this information */
    bt_list_remove(&u->link);
    bt_timer_stop(u->rpc->loop, &u->deadline);
    if (u->done != NULL) {
        struct bt_rpc_bytes b = {.data = ""};
        int code = (int)u->u.status;
        char *text = grpc_slice_to_c_string(u->u.details);
        const char *detail = text;
        if (code == BT_GRPC_OK && u->u.recv_bb == NULL) {
            code = BT_GRPC_INTERNAL;
            detail = "the server answered OK without a message";
        } else if (code == BT_GRPC_OK) {
            bt_rpc_bytes_open(u->u.recv_bb, &b);
        }
        u->done(u->arg, code, detail, b.data, b.len);
        bt_rpc_bytes_close(&b);
        gpr_free(text);
    }
    unary_call_cleanup(&u->u);
    free(u);
}

static void on_deadline(void *arg)
{
    struct unary *u = arg;
    grpc_call_cancel_with_status(u->u.call, GRPC_STATUS_DEADLINE_EXCEEDED, "no answer in time",
                                 NULL);
}

void bt_rpc_unary(struct bt_rpc_channel *ch, const char *method, const void *data, size_t len,
                  uint64_t deadline_ms, bt_rpc_reply_fn done, void *arg)
{
    if (ch->dying) { /* called from a callback of bt_rpc_channel_destroy */
        done(arg, BT_GRPC_CANCELLED, "this side is shutting down", "", 0);
        return;
    }
    struct unary *u = bt_calloc(1, sizeof(*u));
    u->rpc = ch->rpc;
    u->done = done;
    u->arg = arg;
    if (deadline_ms != 0) {
        bt_timer_start(ch->rpc->loop, &u->deadline, deadline_ms, 0, on_deadline, u);
    }
    bt_rpc_op_init(&u->op, on_unary, u);
    unary_call_init(&u->u, make_call(ch->channel, ch->rpc->cq, method, deadline_in(deadline_ms)),
                    data, len);
    bt_list_insert_tail(&ch->unaries, &u->link);
    grpc_op ops[6];
    unary_call_ops(&u->u, ops);
    bt_rpc_batch(ch->rpc, u->u.call, ops, 6, &u->op);
}

bt_status_t bt_rpc_stream_open(struct bt_rpc_channel *ch, const char *method, bool wait_ready,
                               const struct bt_rpc_stream_ops *ops, void *arg,
                               struct bt_rpc_stream **s_p)
{
    if (ch->dying) {
        return BT_ERR_CANCELLED;
    }
    grpc_call *call =
        make_call(ch->channel, ch->rpc->cq, method, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    struct bt_rpc_stream *s = bt_rpc_stream_new(ch->rpc, call, ch->tls, false, &ch->streams);
    bt_rpc_stream_set_arg(s, ops, arg);
    bt_rpc_stream_start_client(s, wait_ready);
    *s_p = s;
    return BT_OK;
}

/* ---- without a loop ---- */

int bt_rpc_unary_blocking(const struct bt_rpc_question *q, void **reply_p, size_t *reply_len_p,
                          char *detail, size_t detail_cap)
{
    bt_rpc_grpc_init();
    grpc_completion_queue *cq = grpc_completion_queue_create_for_next(NULL);
    grpc_channel *ch = dial(q->target, q->tls, q->who, false);
    struct unary_call u;
    unary_call_init(&u, make_call(ch, cq, q->method, deadline_in(q->deadline_ms)), q->data, q->len);
    grpc_op ops[6];
    unary_call_ops(&u, ops);
    grpc_metadata md = {.key = grpc_slice_from_static_string("authorization")};
    if (q->authorization != NULL) {
        md.value = grpc_slice_from_copied_string(q->authorization);
        ops[0].data.send_initial_metadata.metadata = &md;
        ops[0].data.send_initial_metadata.count = 1;
    }
    grpc_call_error err = grpc_call_start_batch(u.call, ops, 6, &u, NULL);
    BT_ASSERT(err == GRPC_CALL_OK);
    grpc_event ev = grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    BT_ASSERT(ev.type == GRPC_OP_COMPLETE && ev.tag == &u);

    int code = (int)u.status;
    char *text = grpc_slice_to_c_string(u.details);
    const char *why = text;
    if (code == BT_GRPC_OK && u.recv_bb == NULL) {
        code = BT_GRPC_INTERNAL;
        why = "the server answered OK without a message";
    } else if (code == BT_GRPC_OK) {
        struct bt_rpc_bytes b;
        bt_rpc_bytes_open(u.recv_bb, &b);
        *reply_p = bt_malloc(b.len + 1);
        bt_copy(*reply_p, b.data, b.len);
        ((char *)*reply_p)[b.len] = '\0';
        *reply_len_p = b.len;
        bt_rpc_bytes_close(&b);
    }
    if (detail != NULL && detail_cap > 0) {
        snprintf(detail, detail_cap, "%s", why);
    }
    gpr_free(text);
    if (q->authorization != NULL) {
        grpc_slice_unref(md.value);
    }
    unary_call_cleanup(&u);
    grpc_channel_destroy(ch);
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(cq);
    bt_rpc_grpc_shutdown();
    return code;
}
