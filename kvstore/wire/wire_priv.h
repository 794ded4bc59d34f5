/* The control thread's side of the wire: peers that we dial, sessions either way, ends of flows.
 * Everything here belongs to the control thread. */
#ifndef BT_KVSTORE_WIRE_PRIV_H
#define BT_KVSTORE_WIRE_PRIV_H

#include "common/rpc/ranges.h"
#include "common/rpc/session.h"
#include "kvstore/wire/cards.h"
#include "kvstore/wire/xfer.h"
#include "peer.pb-c.h"

#define BT_WIRE_METHOD      "/baton.Peer/Session"
#define BT_WIRE_ROLE        "kvstore"  /* whose certificate is asked for, with TLS */
#define BT_WIRE_NAME        "kvstore-" /* a kvstore's name is this and its node's */
#define BT_WIRE_TICK_MS     250
#define BT_WIRE_SLICE_US    200       /* of the control thread, see bt_loop_short_slices */
#define BT_WIRE_IDLE_MS     300000ull /* unless bt_wire_config says */
#define BT_WIRE_REACH_MS    2000      /* a flow waits as long for its session */
#define BT_WIRE_REFUSED_NS  (2000ull * 1000000)
#define BT_WIRE_RETRY_MS    50
#define BT_WIRE_BACKOFF_MS  50
#define BT_WIRE_TAKE_NS     (5000ull * 1000000) /* from an offer to its FlowTake */
#define BT_WIRE_CLOSED_NS   (2000ull * 1000000) /* from an abort to the receiver's FlowClose */
#define BT_WIRE_BACKOFF_MAX 1000

#define BT_WIRE_CARD_START_NS (10000ull * 1000000) /* between two tries of a card that was down */

struct bt_wire_card_state {
    struct bt_wire_card card;
    bool started;       /* UCX knows it */
    uint64_t start_ns;  /* not to be tried before */
    bool link;          /* as of the last tick */
    bool good;          /* the link is up, and no session misses a path over it */
    uint32_t missed_by; /* sessions */
    uint32_t n_paths;   /* up */
    struct bt_metric *up, *paths, *failures;
};

struct bt_wire {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_slab *slab;
    char *cluster, *name;
    uint64_t incarnation;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct bt_wire_ops ops;
    void *ops_arg;
    struct bt_wx *x;
    Baton__KvTransport transport;
    struct bt_wire_card_state cards[BT_NICS_MAX];
    uint32_t n_cards;
    bool has_secret;
    uint8_t secret[32]; /* derived from the cluster's */
    struct bt_list peers, sessions;
    struct bt_timer tick;
    uint32_t next_stream;
    uint64_t idle_ns;
    bool destroying;
    struct bt_metric *peers_up, *flow_seconds, *flows_failed;
    struct bt_metric *sessions_lost;
    uint32_t n_up;
};

struct bt_wire_peer { /* that we pull from: (name, incarnation) */
    struct bt_list link;
    struct bt_wire *w;
    char *name, *rpc;
    uint64_t incarnation;
    struct bt_wire_session *session; /* NULL: none, or the next dial is due */
    struct bt_list recvs;            /* not yet ended */
    struct bt_timer retry;
    struct bt_rpc_backoff backoff;
    bool pinned; /* a caller up the stack still uses it */
};

struct bt_wire_path {
    struct bt_list link; /* session->paths */
    struct bt_wire_session *session;
    struct bt_wx_path x;
    uint64_t begun_ns;
    bool up;        /* proved */
    bool stopped;   /* STOP was sent; not in use any more */
    bool gone;      /* STOPPED; a listener keeps it until the peer has reported what it received */
    bool ended;     /* the peer has */
    bool resending; /* told to RESEND */
};

struct bt_wire_rail { /* of a dialer: a card here and one there that belong together */
    uint32_t local, remote;
    struct bt_wire_path *path; /* NULL: none, try at retry_ns */
    uint64_t retry_ns, wait_ns;
};

struct bt_wire_session {
    struct bt_list link;
    struct bt_wire *w;
    struct bt_wire_peer *peer; /* dialer's side; NULL once dead */
    bool dialer;
    struct bt_rpc_session rpc; /* PREPARING: the first path is being made. JOINING: until a
                                  path is proved */
    const struct bt_wire_path
        *first; /* while the hello is sent: the path whose address it carries */
    char name[BT_WIRE_NAME_BYTES];
    uint64_t incarnation;
    struct bt_wx_conn conn;
    bool conn_open, conn_stopped;
    uint32_t n_flows; /* of either kind, until STOPPED */
    struct bt_list sends;
    struct bt_list paths;
    uint32_t n_paths, next_path;
    struct bt_nic peer_cards[BT_NICS_MAX];
    uint32_t n_peer_cards; /* 0: it knows of one path only */
    struct bt_wire_rail rails[BT_NICS_MAX];
    uint32_t n_rails;
    struct bt_wire_missed { /* by our card */
        uint64_t since_ns;  /* its path was lost then; 0: it was not */
        bool told;          /* the card counts as bad for it */
        char why[96];
    } missed[BT_NICS_MAX];
    uint64_t busy_ns; /* a flow was under way then */
};

struct bt_wire_recv {
    struct bt_list link; /* peer->recvs until ended */
    struct bt_wire *w;
    struct bt_wire_peer *peer;       /* until ended */
    struct bt_wire_session *session; /* NULL: waits for one */
    struct bt_wx_recv x;
    struct bt_wire_recv_ops ops;
    void *arg;
    uint32_t *slots;
    struct bt_kv_key *names;
    struct bt_timer deadline, reach, retry;
    uint64_t opened_ns; /* the first FlowOpen */
    bool ended, landed, has_trailer;
    bool added; /* the transfer thread knows it */
    struct bt_wire_trailer trailer;
    /* a fetch: */
    uint32_t n_keys, class; /* n_keys 0: a hand-off */
    bool offered, taken;
    bt_flow_word_t own_word;
};

struct bt_wire_send {
    struct bt_list link; /* session->sends until ended and not closing */
    struct bt_wire *w;
    struct bt_wire_session *session;
    struct bt_wx_send x;
    void *grant;
    bool open, ended, sent, has_trailer, trailer_sent;
    bool stopped; /* the transfer thread has left it */
    bool closing; /* aborted here since closing_ns: the receiver's FlowClose is still to come */
    uint64_t closing_ns;
    bool want; /* a fetch */
    uint64_t offered_ns;
    uint32_t n_keys;
    bt_status_t status;
    struct bt_wire_trailer trailer;
    char why[160];
};

/* session.c */
static inline bool bt_wire_session_dead(const struct bt_wire_session *s)
{
    return bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_IDLE;
}
static inline bool bt_wire_session_up(const struct bt_wire_session *s)
{
    return bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_UP;
}
struct bt_wire_session *bt_wire_session_dial(struct bt_wire_peer *p);
void bt_wire_session_accept(void *arg, struct bt_rpc_stream *s);
/* Ends it: flows fail with PEER_LOST, the endpoint is closed by force. */
void bt_wire_session_fail(struct bt_wire_session *s, const char *why, int code);
void bt_wire_session_send(struct bt_wire_session *s, const Baton__PeerMsg *msg);
void bt_wire_session_event(struct bt_wire_session *s, uint32_t events);
void bt_wire_session_tick(struct bt_wire_session *s, uint64_t now_ns);
/* A flow of s has STOPPED. */
void bt_wire_session_unref(struct bt_wire_session *s);
void bt_wire_session_unref_path(struct bt_wire_session *s); /* a path is gone */
/* The first path has its address, so the hellos can be sent. NULL: there is no path. */
void bt_wire_session_ready(struct bt_wire_session *s, const struct bt_wire_path *first);

/* member.c */
#define BT_WIRE_MAC_BYTES 32
struct bt_wire_way { /* how an end of a path is reached */
    uint32_t path, card;
    uint64_t nonce;
    const void *address;
    size_t address_len;
};
/* ERR_CONFIG: members cannot be told from strangers; err says what to do. */
bt_status_t bt_wire_member_init(struct bt_wire *w, const struct bt_wire_config *conf, char *err,
                                size_t err_cap) BT_MUST_CHECK;
/* ours: the code for this side's messages; otherwise for the peer's. */
void bt_wire_member_mac(const struct bt_wire_session *s, bool ours, const struct bt_wire_way *way,
                        uint8_t out[BT_WIRE_MAC_BYTES]);
/* true: a member has sent this, or the cluster has no secret. */
bool bt_wire_member_is(const struct bt_wire_session *s, const struct bt_wire_way *way,
                       const ProtobufCBinaryData *mac);

/* path.c */
void bt_wire_paths_dial(struct bt_wire_session *s); /* the first, before the hello */
/* Reads from the peer's hello which paths are possible. NULL, or why there is none. */
const char *bt_wire_paths_hello(struct bt_wire_session *s, const Baton__PeerHello *h);
void bt_wire_paths_stop(struct bt_wire_session *s); /* the session has ended */
void bt_wire_paths_tick(struct bt_wire_session *s, uint64_t now_ns);
void bt_wire_path_asked(struct bt_wire_session *s, const Baton__LaneOpen *m);
void bt_wire_path_answered(struct bt_wire_session *s, const Baton__LaneOpened *m);
void bt_wire_path_closed(struct bt_wire_session *s, const Baton__LaneClose *m);
void bt_wire_path_ended(struct bt_wire_session *s, const Baton__LaneEnd *m);
void bt_wire_path_event(struct bt_wire_path *l, uint32_t events);
void bt_wire_links_tick(struct bt_wire *w); /* which cards' links are up */

/* flow.c */
void bt_wire_recv_attach(struct bt_wire_recv *r, struct bt_wire_session *s);
void bt_wire_recv_fail(struct bt_wire_recv *r, bt_status_t st, const char *why);
void bt_wire_recv_event(struct bt_wire_recv *r, uint32_t events);
void bt_wire_recv_refused(struct bt_wire_session *s, const Baton__FlowRefused *m);
void bt_wire_recv_trailer(struct bt_wire_session *s, const Baton__FlowTrailer *m);
void bt_wire_recv_closed(struct bt_wire_session *s, const Baton__FlowClose *m);
void bt_wire_send_open(struct bt_wire_session *s, const Baton__FlowOpen *m);
void bt_wire_send_closed(struct bt_wire_session *s, const Baton__FlowClose *m);
/* The flow has ended by itself, by the receiver, or with its session. */
void bt_wire_send_end(struct bt_wire_send *snd, bt_status_t st);
/* Ends the wait of an aborted flow whose receiver does not answer. May free snd. */
void bt_wire_send_tick(struct bt_wire_send *snd, uint64_t now_ns);
void bt_wire_send_event(struct bt_wire_send *snd, uint32_t events);
struct bt_wire_recv *bt_wire_recv_of(struct bt_wire_session *s, uint32_t stream); /* or NULL */
struct bt_wire_send *bt_wire_send_of(struct bt_wire_session *s, uint32_t stream);
void bt_wire_refuse(struct bt_wire_session *s, uint32_t stream, bt_status_t st, const char *why);

/* fetch_flow.c */
void bt_wire_want_open(struct bt_wire_session *s, const Baton__FlowOpen *m);
void bt_wire_want_taken(struct bt_wire_session *s, const Baton__FlowTake *m);
void bt_wire_fetch_offered(struct bt_wire_session *s, const Baton__FlowOffer *m);
void bt_wire_sends_tick(struct bt_wire_session *s, uint64_t now_ns);

/* wire.c */
/* Joins the peer's session, or waits for one. */
void bt_wire_recv_begin(struct bt_wire_recv *r, const struct bt_wire_peer_addr *peer);
/* The session of p is up: its waiting flows start. */
void bt_wire_peer_up(struct bt_wire_peer *p);
/* The session of p has ended. final: the waiting flows fail without another try. */
void bt_wire_peer_lost(struct bt_wire_peer *p, bool was_up, bool final, const char *why);
void bt_wire_peer_idle(struct bt_wire_peer *p); /* frees it if it is not needed */
void bt_wire_count_up(struct bt_wire *w, int delta);
/* true: a path can be opened over the card. Gives UCX a card whose link has just come up. */
bool bt_wire_card_ready(struct bt_wire *w, uint32_t card);
uint32_t bt_wire_first_card(const struct bt_wire *w); /* the first whose link is up */

#endif
