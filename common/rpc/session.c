/* Connects the state machine of a session with a stream: see session.h. Loop's thread. */
#include "common/rpc/session.h"

#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "peer.pb-c.h"
#include "session.pb-c.h"

/* The beginning of every message of a session, as protobuf-c lays it out. */
struct envelope {
    ProtobufCMessage base;
    int m_case; /* 0: a message of a newer release */
    void *m;
};
enum { CASE_HELLO = 1, CASE_HEARTBEAT = 2 };

#define IS_ENVELOPE(type, prefix)                                                                  \
    _Static_assert(offsetof(type, m_case) == offsetof(struct envelope, m_case) &&                  \
                       offsetof(type, hello) == offsetof(struct envelope, m) &&                    \
                       offsetof(type, heartbeat) == offsetof(struct envelope, m) &&                \
                       (int)prefix##__M_HELLO == CASE_HELLO &&                                     \
                       (int)prefix##__M_HEARTBEAT == CASE_HEARTBEAT,                               \
                   #type " is not an envelope message")
IS_ENVELOPE(Baton__ToWorker, BATON__TO_WORKER);
IS_ENVELOPE(Baton__FromWorker, BATON__FROM_WORKER);
IS_ENVELOPE(Baton__ToKvstore, BATON__TO_KVSTORE);
IS_ENVELOPE(Baton__FromKvstore, BATON__FROM_KVSTORE);
IS_ENVELOPE(Baton__PeerMsg, BATON__PEER_MSG);

static bool step(struct bt_rpc_session *s, const struct bt_rpc_session_event *e, uint64_t now_ns);

static bool happens(struct bt_rpc_session *s, bt_rpc_session_event_t kind)
{
    return step(s, &(struct bt_rpc_session_event){.kind = kind}, bt_mono_ns());
}

/* ---- actions ---- */

static void on_turn(void *arg)
{
    (void)happens(arg, BT_RPC_SESSION_EV_TURN);
}

static void end_with_turn(struct bt_rpc_session *s)
{
    bt_timer_start(s->loop, &s->timer, 0, 0, on_turn, s);
    if (s->ops->on_fail != NULL) {
        s->ops->on_fail(s->arg, &s->core.end);
    }
}

static void on_redial(void *arg)
{
    struct bt_rpc_session *s = arg;
    s->ops->on_redial(s->arg);
}

/* Tells on_message, which may be a caller, not to use s any more. */
static void note_over(struct bt_rpc_session *s)
{
    if (s->over != NULL) {
        *s->over = true;
        s->over = NULL;
    }
}

static void close_stream(struct bt_rpc_session *s, int code, const char *why, bool flush)
{
    struct bt_rpc_stream *stream = s->stream;
    s->stream = NULL;
    if (stream != NULL) {
        bt_rpc_stream_close(stream, code, why, flush);
    }
}

static void drop_channel(struct bt_rpc_channel *channel)
{
    if (channel != NULL) {
        bt_rpc_channel_destroy(channel);
    }
}

/* The user may free s. In on_end it closes its own streams on the channel. */
static void finish(struct bt_rpc_session *s, bool redial)
{
    const struct bt_rpc_session_end e = s->core.end;
    struct bt_rpc_channel *channel = s->channel;
    s->channel = NULL;
    note_over(s);
    bt_timer_stop(s->loop, &s->timer);
    close_stream(s, e.code, e.why, (s->core.rules->flush & 1u << e.cause) != 0);
    if (redial) {
        bt_rpc_session_redial_in(s, s->core.wait_ms);
    }
    s->ops->on_end(s->arg, &e);
    drop_channel(channel);
}

/* False: the session has ended, and s may be freed. */
static bool step(struct bt_rpc_session *s, const struct bt_rpc_session_event *e, uint64_t now_ns)
{
    uint32_t todo = bt_rpc_session_step(&s->core, e, now_ns);
    if (todo & BT_RPC_SESSION_DO_HELLO) {
        s->ops->say_hello(s->arg);
    }
    if (todo & BT_RPC_SESSION_DO_BEAT) {
        s->ops->say_heartbeat(s->arg, s->core.seq);
    }
    if (todo & BT_RPC_SESSION_DO_TURN) {
        end_with_turn(s);
    }
    if (todo & BT_RPC_SESSION_DO_UP) {
        s->ops->on_up(s->arg);
    }
    if (todo & BT_RPC_SESSION_DO_END) {
        finish(s, (todo & BT_RPC_SESSION_DO_REDIAL) != 0);
        return false;
    }
    return true;
}

/* ---- received messages ---- */

/* Callbacks may end the session and free s. */
static void hear(struct bt_rpc_session *s, struct envelope *m)
{
    struct bt_rpc_session_event e = {.kind = BT_RPC_SESSION_EV_MESSAGE,
                                     .hello = m->m_case == CASE_HELLO};
    uint32_t todo = bt_rpc_session_step(&s->core, &e, bt_mono_ns());
    if (todo & BT_RPC_SESSION_DO_TURN) {
        end_with_turn(s);
    } else if (todo & BT_RPC_SESSION_DO_CHECK) {
        char buf[BT_RPC_SESSION_WHY];
        e.kind = BT_RPC_SESSION_EV_HELLO;
        e.why = s->ops->on_hello(s->arg, m->m, buf, sizeof(buf));
        (void)step(s, &e, bt_mono_ns());
    } else if (todo & BT_RPC_SESSION_DO_DELIVER && m->m_case != CASE_HEARTBEAT) {
        s->ops->on_message(s->arg, &m->base);
    } else if (todo & BT_RPC_SESSION_DO_DELIVER && s->ops->on_heartbeat != NULL) {
        s->ops->on_heartbeat(s->arg, m->m);
    }
}

static void on_message(void *arg, struct bt_rpc_stream *stream, const void *data, size_t len)
{
    struct bt_rpc_session *s = arg;
    char why[BT_RPC_SESSION_WHY];
    bool over = false;
    (void)stream;
    if (s->core.state == BT_RPC_SESSION_ENDING) {
        return;
    }
    s->over = &over;
    ProtobufCMessage *m = bt_message_unpack(s->ops->incoming, data, len, why, sizeof(why));
    if (m == NULL) {
        bt_rpc_session_fail(s, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT, why);
    } else {
        hear(s, (struct envelope *)m);
        protobuf_c_message_free_unpacked(m, NULL);
    }
    if (over) {
        return;
    }
    s->over = NULL;
    if (s->core.state == BT_RPC_SESSION_ENDING) { /* no caller uses it, so it can end now */
        on_turn(s);
    }
}

static void on_close(void *arg, struct bt_rpc_stream *stream, int code, const char *detail)
{
    struct bt_rpc_session *s = arg;
    (void)stream;
    s->stream = NULL;
    (void)step(s,
               &(struct bt_rpc_session_event){
                   .kind = BT_RPC_SESSION_EV_CLOSED, .code = code, .why = detail},
               bt_mono_ns());
}

static void on_sent(void *arg, struct bt_rpc_stream *stream)
{
    struct bt_rpc_session *s = arg;
    (void)stream;
    s->ops->on_sent(s->arg);
}

static struct bt_rpc_stream_ops stream_ops(const struct bt_rpc_session *s)
{
    return (struct bt_rpc_stream_ops){.on_message = on_message,
                                      .on_close = on_close,
                                      .on_sent = s->ops->on_sent != NULL ? on_sent : NULL};
}

/* ---- life ---- */

void bt_rpc_session_init(struct bt_rpc_session *s, struct bt_loop *loop, bool dialer,
                         const struct bt_rpc_session_rules *rules,
                         const struct bt_rpc_session_ops *ops, void *arg)
{
    *s = (struct bt_rpc_session){.ops = ops, .arg = arg, .loop = loop};
    bt_rpc_session_core_init(&s->core, rules, dialer);
}

void bt_rpc_session_cleanup(struct bt_rpc_session *s)
{
    note_over(s);
    bt_timer_stop(s->loop, &s->timer);
    close_stream(s, BT_GRPC_CANCELLED, "session ended", false);
    drop_channel(s->channel);
    s->channel = NULL;
    s->core.state = BT_RPC_SESSION_IDLE;
}

void bt_rpc_session_begin(struct bt_rpc_session *s)
{
    (void)happens(s, BT_RPC_SESSION_EV_OPEN);
}

void bt_rpc_session_accept(struct bt_rpc_session *s, struct bt_rpc_stream *stream)
{
    struct bt_rpc_stream_ops ops = stream_ops(s);
    s->stream = stream;
    bt_rpc_stream_set_arg(stream, &ops, s);
    bt_rpc_session_begin(s);
}

void bt_rpc_session_redial_in(struct bt_rpc_session *s, uint32_t ms)
{
    BT_ASSERT(s->core.state == BT_RPC_SESSION_IDLE);
    bt_timer_start(s->loop, &s->timer, ms, 0, on_redial, s);
}

/* Opens the stream. The session has not begun, or its user is still preparing the hello. */
static bt_status_t open_stream(struct bt_rpc_session *s, struct bt_rpc *rpc, const char *target,
                               const char *who, const char *method)
{
    struct bt_rpc_stream_ops ops = stream_ops(s);
    bt_status_t st = bt_rpc_channel_create(rpc, target, who, &s->channel);
    if (st != BT_OK) {
        s->channel = NULL;
        return st;
    }
    st = bt_rpc_stream_open(s->channel, method, false, &ops, s, &s->stream);
    if (st != BT_OK) {
        s->stream = NULL;
        drop_channel(s->channel);
        s->channel = NULL;
    }
    return st;
}

void bt_rpc_session_redial_now(struct bt_rpc_session *s)
{
    s->core.backoff.failures = 0;
    bt_rpc_session_redial_in(s, 0);
}

bt_status_t bt_rpc_session_dial(struct bt_rpc_session *s, struct bt_rpc *rpc, const char *target,
                                const char *who, const char *method)
{
    BT_ASSERT(s->stream == NULL && s->channel == NULL);
    bt_status_t st = open_stream(s, rpc, target, who, method);
    bool idle = s->core.state == BT_RPC_SESSION_IDLE;
    if (st != BT_OK) {
        if (idle && s->ops->on_redial != NULL) {
            bt_rpc_session_redial_in(s, bt_rpc_backoff_next(&s->core.backoff));
        }
        return st;
    }
    if (idle) {
        bt_rpc_session_begin(s);
    }
    (void)happens(s, BT_RPC_SESSION_EV_READY);
    return BT_OK;
}

void bt_rpc_session_ready(struct bt_rpc_session *s)
{
    BT_ASSERT(!s->core.dialer);
    (void)happens(s, BT_RPC_SESSION_EV_READY);
}

void bt_rpc_session_joined(struct bt_rpc_session *s)
{
    (void)happens(s, BT_RPC_SESSION_EV_JOINED);
}

/* ---- sending ---- */

static bool can_send(const struct bt_rpc_session *s)
{
    return s->stream != NULL && s->core.state != BT_RPC_SESSION_ENDING;
}

static bool sent(struct bt_rpc_session *s, bt_status_t st)
{
    if (st != BT_OK) {
        (void)happens(s, BT_RPC_SESSION_EV_UNSENT);
    } else if (s->core.rules->beats_if_quiet) {
        (void)happens(s, BT_RPC_SESSION_EV_SENT);
    }
    return st == BT_OK;
}

bool bt_rpc_session_send(struct bt_rpc_session *s, const ProtobufCMessage *m)
{
    return can_send(s) && sent(s, bt_rpc_stream_send_pb(s->stream, m));
}

bool bt_rpc_session_send_iov(struct bt_rpc_session *s, const struct iovec *iov, size_t n)
{
    return can_send(s) && sent(s, bt_rpc_stream_send_iov(s->stream, iov, n));
}

void bt_rpc_session_beat(struct bt_rpc_session *s)
{
    (void)happens(s, BT_RPC_SESSION_EV_BEAT);
}

bool bt_rpc_session_tick(struct bt_rpc_session *s, uint64_t now_ns)
{
    return step(s, &(struct bt_rpc_session_event){.kind = BT_RPC_SESSION_EV_TICK}, now_ns);
}

/* ---- ends ---- */

void bt_rpc_session_fail(struct bt_rpc_session *s, bt_rpc_session_cause_t cause, int code,
                         const char *why)
{
    (void)step(s,
               &(struct bt_rpc_session_event){
                   .kind = BT_RPC_SESSION_EV_FAIL, .cause = cause, .code = code, .why = why},
               bt_mono_ns());
}

void bt_rpc_session_end(struct bt_rpc_session *s, bt_rpc_session_cause_t cause, int code,
                        const char *why)
{
    (void)step(s,
               &(struct bt_rpc_session_event){
                   .kind = BT_RPC_SESSION_EV_END, .cause = cause, .code = code, .why = why},
               bt_mono_ns());
}
