/* A session: what two daemons say to each other over one stream, from the first hello to the death
 * of either. Four users share these rules:
 *
 *   - The dialer speaks first. Both hellos name version, cluster, incarnation, root key and layout.
 *     A hello that does not fit ends the session with FAILED_PRECONDITION and the reason. With TLS
 *     the certificate must be of the role of the method and of the node in the hello.
 *   - No other message is taken before the hello, and a second hello is a fault.
 *   - Both sides send a heartbeat every 500 ms; 2 s without any message end the session. A side
 * that itself stood still for 1 s counts anew, since messages may lie unread.
 *   - The queue of unsent messages is bounded: a peer that does not read loses its session.
 *   - Each session ends once, with one cause (on_end). Nothing survives it: a new connection starts
 *     from zero, and on_up sends everything again. The incarnation in the hello tells a peer that
 *     came back from its successor.
 *   - A fault ends the session when the message that caused it has been handled. A fault inside any
 *     other call ends it with the next turn of the loop. So a session never ends inside a send.
 *
 * The users differ in struct bt_rpc_session_rules and in the callbacks:
 *
 *                        conductor          worker            kvstore (server)   kvstore (peer)
 *   file                 view/session.c     session.c         serve.c            wire/session.c
 *   side                 dials              listens           listens            both
 *   says in heartbeats   steps' length      its load          its pool           nothing
 *   sends a heartbeat    always             always            always             when quiet
 *   hello waits for      nothing            nothing           nothing            the first path's
 *                                                                                address (READY)
 *   up after             hellos             hellos            hellos             a proved path too
 *                                                                                (JOINED)
 *   queue                8 MiB              64 MiB            8 MiB              8 MiB
 *   dials again          100 ms to 2 s      never             never              its peer object
 *                        unless departed                                         does, if needed
 *   dies with it         plans are told,    its submissions   its reservations   its flows
 *                        load, block index  are cancelled     are released       fail
 *   two of one peer      one object         both stay         both stay          the newer stays
 *
 * session_core.h is the state machine, session_hello.h compares hellos, session.c here binds both
 * to a stream. Loop's thread. */
#ifndef BT_RPC_SESSION_H
#define BT_RPC_SESSION_H

#include <protobuf-c/protobuf-c.h>

#include "common/rpc/rpc.h"
#include "common/rpc/session_core.h"

struct bt_rpc_session;

struct bt_rpc_session_ops {
    /* Type of the messages that arrive: a oneof with hello as 1 and heartbeat as 2. */
    const ProtobufCMessageDescriptor *incoming;
    /* Sends our hello (a heartbeat with this number), by bt_rpc_session_send. */
    void (*say_hello)(void *arg);
    void (*say_heartbeat)(void *arg, uint64_t seq);
    /* The peer's hello. NULL: it fits; else the text of what does not, which may be in buf. */
    const char *(*on_hello)(void *arg, const void *hello, char *buf, size_t cap);
    void (*on_up)(void *arg);
    /* NULL: a heartbeat has no other effect. */
    void (*on_heartbeat)(void *arg, const void *heartbeat);
    /* Any other message; m_case is 0 if it is of a newer release. A callee that takes ownership of
     * a member sets it to NULL. */
    void (*on_message)(void *arg, ProtobufCMessage *m);
    /* May be NULL. The session is ENDING: it sends nothing any more, and on_end follows soon. */
    void (*on_fail)(void *arg, const struct bt_rpc_session_end *e);
    /* It is over; the stream is closed, and the channel goes when the callee returns. The callee
     * may free s. Not called by bt_rpc_session_cleanup. */
    void (*on_end)(void *arg, const struct bt_rpc_session_end *e);
    /* May be NULL. The pause has ended; the session dials again. */
    void (*on_redial)(void *arg);
    /* May be NULL. The same as in bt_rpc_stream_ops. */
    void (*on_sent)(void *arg);
};

struct bt_rpc_session { /* caller memory; fields are read only outside of session.c */
    struct bt_rpc_session_core core;
    const struct bt_rpc_session_ops *ops;
    void *arg;
    struct bt_loop *loop;
    struct bt_rpc_channel *channel; /* dialer; goes with the stream, as gRPC's own pauses would
                                       decide else when a restarted peer is found */
    struct bt_rpc_stream *stream;   /* NULL: IDLE, or a dialer that prepares */
    struct bt_timer timer;          /* the turn after a fault, or the next dial */
    bool *over;                     /* of a message that is being handled: set when s ends */
};

/* rules and ops outlive s. */
void bt_rpc_session_init(struct bt_rpc_session *s, struct bt_loop *loop, bool dialer,
                         const struct bt_rpc_session_rules *rules,
                         const struct bt_rpc_session_ops *ops, void *arg);
/* Ends it without a callback; nothing happens if it is over. */
void bt_rpc_session_cleanup(struct bt_rpc_session *s);

/* Dialer: the attempt begins, silence counts. bt_rpc_session_dial does this too where it was not
 * done. */
void bt_rpc_session_begin(struct bt_rpc_session *s);
/* Opens a channel and a stream for `method` and says hello. target, who: as in
 * bt_rpc_channel_create. ERR_INVALID: target is no address. ERR_CANCELLED: rpc is ending. After an
 * error a session that was begun stays as it is, and the caller ends it; else on_redial comes after
 * the pause of the rules. */
bt_status_t bt_rpc_session_dial(struct bt_rpc_session *s, struct bt_rpc *rpc, const char *target,
                                const char *who, const char *method) BT_MUST_CHECK;
/* on_redial in ms, if the session is IDLE. */
void bt_rpc_session_redial_in(struct bt_rpc_session *s, uint32_t ms);
/* on_redial with the next turn; pauses start anew: the peer is another one now. */
void bt_rpc_session_redial_now(struct bt_rpc_session *s);
/* Listener: takes a stream that a server has accepted. */
void bt_rpc_session_accept(struct bt_rpc_session *s, struct bt_rpc_stream *stream);

/* Listener whose rules say `prepares`: the hello can be said. */
void bt_rpc_session_ready(struct bt_rpc_session *s);
/* Rules say `joins`: the other path is proved. */
void bt_rpc_session_joined(struct bt_rpc_session *s);

/* Queues a message. False: the session has no stream or is ENDING, or the queue is full, which ends
 * it. */
bool bt_rpc_session_send(struct bt_rpc_session *s, const ProtobufCMessage *m);
/* The same of a packed message in n pieces. */
bool bt_rpc_session_send_iov(struct bt_rpc_session *s, const struct iovec *iov, size_t n);
/* Sends a heartbeat now, if both hellos are said; the next one is due 500 ms later. */
void bt_rpc_session_beat(struct bt_rpc_session *s);
/* Call this every tick_ms of the rules. It sends what is due, and ends a silent session. Returns
 * false if the session has ended; s may then be freed. */
bool bt_rpc_session_tick(struct bt_rpc_session *s, uint64_t now_ns);

/* Ends it soon (see above); on_fail is called at once. Nothing happens if it is over. */
void bt_rpc_session_fail(struct bt_rpc_session *s, bt_rpc_session_cause_t cause, int code,
                         const char *why);
/* Ends it now: on_end is called before this returns, and may have freed s. Not from on_hello or
 * say_*. */
void bt_rpc_session_end(struct bt_rpc_session *s, bt_rpc_session_cause_t cause, int code,
                        const char *why);

static inline bt_rpc_session_state_t bt_rpc_session_state(const struct bt_rpc_session *s)
{
    return s->core.state;
}

/* Both hellos are good and the session is not about to end: heartbeats go. */
static inline bool bt_rpc_session_met(const struct bt_rpc_session *s)
{
    return s->core.state == BT_RPC_SESSION_JOINING || s->core.state == BT_RPC_SESSION_UP;
}

#endif
