/* The state machine of one session, pure: an event and the time go in, actions come out. It reads
 * no clock, sends nothing and owns no memory, so that tests run hours of a session in a moment.
 * session.c executes the actions on a stream; session.h says what a session is.
 *
 *   IDLE --open--> PREPARING --ready--> AWAITING --hello--> [JOINING --joined-->] UP     (dialer)
 *   IDLE --open--> AWAITING --hello--> [PREPARING --ready-->] [JOINING --joined-->] UP (listener)
 *   any of them --fail--> ENDING --next turn--> IDLE; --closed, end, silence--> IDLE at once */
#ifndef BT_RPC_SESSION_CORE_H
#define BT_RPC_SESSION_CORE_H

#include "common/base/base.h"

/* The two times of every session in the cluster.
 *
 * SILENCE: a session on which nothing was heard for 2 s is dead. A client whose worker died waits
 * for as long before its request is planned again, so it should be short. But it must exceed what a
 * healthy peer needs: TCP repeats a lost segment after 0.2, 0.6 and 1.4 s, and a daemon may stand
 * still for up to 1 s (SILENCE / 2) before it stops to trust its own watch over others.
 *
 * HEARTBEAT: a quarter of it, so that three in a row may be lost or late. A conductor with a
 * thousand sessions sends 2,000 heartbeats a second then, some 4 % of one core; half the period
 * would cost twice as much and would not find a dead peer sooner. */
#define BT_RPC_SESSION_HEARTBEAT_MS 500u
#define BT_RPC_SESSION_SILENCE_MS   2000u

#define BT_RPC_SESSION_WHY 256 /* bytes of a reason, with its end */

typedef enum {
    BT_RPC_SESSION_IDLE,      /* not begun, or over */
    BT_RPC_SESSION_PREPARING, /* what our hello says is still being made */
    BT_RPC_SESSION_AWAITING,  /* waits for the peer's hello */
    BT_RPC_SESSION_JOINING,   /* both hellos are good; the user proves another path to the peer */
    BT_RPC_SESSION_UP,
    BT_RPC_SESSION_ENDING /* its end is decided and comes with the next turn of the loop */
} bt_rpc_session_state_t;

typedef enum {
    BT_RPC_SESSION_CLOSED,    /* the peer ended the stream, or the connection broke */
    BT_RPC_SESSION_SILENT,    /* nothing was heard for SILENCE */
    BT_RPC_SESSION_FULL,      /* the queue took no more: the peer reads too slowly */
    BT_RPC_SESSION_VIOLATION, /* the peer broke the protocol */
    BT_RPC_SESSION_REFUSED,   /* the peer's hello does not fit */
    BT_RPC_SESSION_BROKEN,    /* the user gave it up */
    BT_RPC_SESSION_STOPPED    /* the user ended it in good order */
} bt_rpc_session_cause_t;

/* How a session ended; reported once. The state machine gives the code and the reason of these
 * causes itself, the same in every daemon: SILENT DEADLINE, FULL EXHAUSTED, REFUSED
 * FAILED_PRECONDITION, VIOLATION INVALID_ARGUMENT (a user that finds one gives this code, too). A
 * dialer of kvstores takes FAILED_PRECONDITION as final: the listener will refuse it again. */
struct bt_rpc_session_end {
    bt_rpc_session_cause_t cause;
    int code; /* BT_GRPC_*: the status for the peer; CLOSED: the status from the peer */
    bool was_up;
    char why[BT_RPC_SESSION_WHY];
};

/* Pauses between dials: each is twice the one before, up to max_ms. */
struct bt_rpc_backoff {
    uint32_t first_ms, max_ms;
    uint32_t failures; /* in a row; 0 after a success */
};
/* How long to wait now, ms; the next wait is longer. */
uint32_t bt_rpc_backoff_next(struct bt_rpc_backoff *b);
/* The next wait is the longest: another try will hardly help. */
void bt_rpc_backoff_longest(struct bt_rpc_backoff *b);

/* The rules of one user's sessions. Constant while a session uses them. */
struct bt_rpc_session_rules {
    bool prepares;       /* a listener's hello waits for READY */
    bool joins;          /* the session is up only when JOINED has come too */
    bool beats_if_quiet; /* any message that is sent counts as a heartbeat */
    uint32_t tick_ms;    /* between two TICKs: a heartbeat may go half as much too early */
    uint32_t heartbeat_ms, silence_ms;         /* 0: the constants above; tests have others */
    uint32_t backoff_first_ms, backoff_max_ms; /* 0: the session does not dial again by itself */
    uint32_t flush; /* for these causes (1 << cause) the peer gets the reason behind the queued
                       messages */
};

struct bt_rpc_session_core {
    const struct bt_rpc_session_rules *rules;
    bt_rpc_session_state_t state;
    bool dialer;
    bool ready, said;   /* our hello can be said, was said */
    bool heard, joined; /* the peer's hello was good; JOINED has come */
    uint64_t heard_ns;  /* of the last message; later if this process stood still */
    uint64_t sent_ns;   /* of the last message */
    uint64_t beat_ns;   /* of the last heartbeat */
    uint64_t looked_ns; /* of the last TICK */
    uint64_t seq;       /* of the last heartbeat; goes on from one connection to the next */
    uint32_t wait_ms;   /* with REDIAL: until the next dial */
    struct bt_rpc_backoff backoff;
    struct bt_rpc_session_end end; /* ENDING: the coming end. IDLE: the last one */
};

typedef enum {
    BT_RPC_SESSION_EV_OPEN,    /* dialer: the attempt begins; listener: a stream was accepted */
    BT_RPC_SESSION_EV_READY,   /* our hello can be said (dialer: the stream is open, too) */
    BT_RPC_SESSION_EV_MESSAGE, /* arrived; `hello`: it is one */
    BT_RPC_SESSION_EV_HELLO,   /* the user has checked it; why NULL: it is good */
    BT_RPC_SESSION_EV_JOINED,  /* the other path is proved; may come before the peer's hello */
    BT_RPC_SESSION_EV_SENT,    /* a message was queued */
    BT_RPC_SESSION_EV_UNSENT,  /* ... was not */
    BT_RPC_SESSION_EV_BEAT,    /* the user wants a heartbeat now */
    BT_RPC_SESSION_EV_TICK,    /* time has passed */
    BT_RPC_SESSION_EV_FAIL,    /* ends with the next turn: cause, code, why */
    BT_RPC_SESSION_EV_TURN,    /* the next turn */
    BT_RPC_SESSION_EV_CLOSED,  /* the stream has ended: code, why */
    BT_RPC_SESSION_EV_END      /* ends now: cause, code, why */
} bt_rpc_session_event_t;

struct bt_rpc_session_event {
    bt_rpc_session_event_t kind;
    bool hello;
    bt_rpc_session_cause_t cause;
    int code;
    const char *why;
};

/* Actions, to be executed in this order. */
enum {
    BT_RPC_SESSION_DO_CHECK = 1 << 0,   /* check the hello, then EV_HELLO */
    BT_RPC_SESSION_DO_DELIVER = 1 << 1, /* give the message to the user */
    BT_RPC_SESSION_DO_HELLO = 1 << 2,   /* say our hello */
    BT_RPC_SESSION_DO_BEAT = 1 << 3,    /* send heartbeat number seq */
    /* EV_TURN in the next turn, when the user learns of the fault */
    BT_RPC_SESSION_DO_TURN = 1 << 4,
    BT_RPC_SESSION_DO_UP = 1 << 5,     /* tell the user that the session is up */
    BT_RPC_SESSION_DO_REDIAL = 1 << 6, /* with END: dial again after wait_ms */
    BT_RPC_SESSION_DO_END = 1 << 7     /* close the stream, tell the user; `end` says why */
};

void bt_rpc_session_core_init(struct bt_rpc_session_core *c,
                              const struct bt_rpc_session_rules *rules, bool dialer);
/* One event; returns the actions (BT_RPC_SESSION_DO_*). Messages that arrive when the session is
 * IDLE or ENDING get none: they are dropped. */
uint32_t bt_rpc_session_step(struct bt_rpc_session_core *c, const struct bt_rpc_session_event *e,
                             uint64_t now_ns);

#endif
