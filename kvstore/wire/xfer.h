/* The transfer thread as the control thread sees it, over UCX (ucx*.c) or gRPC (grpc.c).
 *
 * Four kinds of objects live on both sides: a connection (of a gRPC session), its paths (from a
 * network card here to one of the peer), and sending and receiving ends of flows. The control
 * thread allocates an object, gives it commands (bits, in ascending order) and gets events (bits)
 * back. The last command is STOP, the last event STOPPED: from then on the transfer thread touches
 * neither the object nor a flow's slots. Flows are stopped before the paths of their connection,
 * and paths before the connection.
 *
 * Each message of a flow takes the path that is expected to finish it first. Paths may come and go
 * during a flow; messages of a lost path are sent again over another (xfer_resend.c). */
#ifndef BT_KVSTORE_WIRE_XFER_H
#define BT_KVSTORE_WIRE_XFER_H

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/slab/crcs.h"
#include "kvstore/wire/msg.h"
#include "kvstore/wire/nics.h"
#include "kvstore/wire/wire.h"

#define BT_WX_PROOF_NS (1000ull * 1000000) /* from making the endpoint to the peer's echo */
#define BT_WX_GRACE_NS                                                                             \
    (1000ull * 1000000) /* a stopped flow's transfers, before the force-close                      \
                         */
#define BT_WX_CLASSES 4 /* hand-off, BT_WIRE_FETCH, BT_WIRE_WINDOW, BT_WIRE_REPLICA */

typedef enum { BT_WX_CONN = 1, BT_WX_SEND = 2, BT_WX_RECV = 3, BT_WX_PATH = 4 } bt_wx_kind_t;

enum {                        /* commands */
       BT_WX_CMD_OPEN = 1,    /* conn: from now on; path: make the worker; answer READY or LOST */
       BT_WX_CMD_ADD = 1,     /* flow: from now on */
       BT_WX_CMD_CONNECT = 2, /* path: peer_address and nonce_peer are set */
       BT_WX_CMD_STOP = 4,
       BT_WX_CMD_RESEND = 8 /* path, after STOPPED: `has` is set; answer RESENT */
};
enum {                        /* events */
       BT_WX_EV_READY = 1,    /* path: address is set */
       BT_WX_EV_PROVEN = 2,   /* path: the peer echoed our nonce */
       BT_WX_EV_PROGRESS = 1, /* recv: the flow word was raised */
       BT_WX_EV_LANDED = 2,   /* recv: the last item is in */
       BT_WX_EV_SENT = 2,     /* send: the last item's sends have completed */
       BT_WX_EV_LOST = 4,     /* conn, path: dead; recv: bad data. status and why are set */
       BT_WX_EV_STOPPED = 8,
       BT_WX_EV_RESENT = 16 /* path: nothing of `has` is read any more */
};

struct bt_wx_obj {
    bt_wx_kind_t kind;
    struct bt_wx_obj *cmd_next, *ev_next;
    uint32_t cmds, events;
    bool cmd_queued, ev_queued;
    uint32_t handle; /* in the wire process; 0: it has no such object */
    uint32_t seen;   /* events that came from there, in the kvstore */
};

struct bt_wx_bell { /* from every thread that has work for the transfer thread */
    _Atomic bool woken, kicked;
};

struct bt_wx_conn {
    struct bt_wx_obj obj;
    /* set by control before OPEN, constant from then on */
    char peer[BT_WIRE_NAME_BYTES];     /* for logs */
    char who[BT_WIRE_NAME_BYTES + 16]; /* by its certificate, where gRPC carries KV */
    bool dialer;
    bool several;               /* the peer understands paths, and there may be more than one */
    _Atomic uint32_t heard;     /* messages of the gRPC session, counted by control at: */
    _Atomic uint32_t *heard_at; /* heard, or a word that the wire process maps too */
    /* set by the transfer thread before LOST */
    bt_status_t lost;
    char why[160];
    /* the transfer thread's own */
    struct bt_wx *x;
    struct bt_list link; /* x->conns */
    struct bt_list paths;
    bool kill_wanted; /* set inside the transport's callbacks, which must not close anything */
    bool killed, stopping;
    struct bt_map *streams; /* u32 -> bt_wx_recv */
    struct bt_list sends, recvs;
    struct bt_list ready[BT_WX_CLASSES]; /* sends with something to send, round-robin */
    uint64_t bytes_in_flight;            /* over all paths */
    uint32_t n_stopping;                 /* flows told to stop, not yet quiet */
};

/* What a receiver had of a flow when a path ended: all items below `item`, and of later items the
 * segments whose bits are set (bt_wx_has_bit). */
struct bt_wx_has {
    struct bt_wx_has *next;
    uint32_t stream, item;
    size_t n; /* bytes of bits */
    uint8_t bits[];
};

struct bt_wx_path {
    struct bt_wx_obj obj;
    /* set by control before OPEN / CONNECT, constant from then on */
    struct bt_wx_conn *conn;
    uint32_t number, card; /* of the session; of bt_wx_config.cards */
    uint64_t nonce, nonce_peer;
    void *peer_address;
    size_t peer_address_len;
    /* set by the transfer thread before READY / LOST */
    void *address;
    size_t address_len;
    bt_status_t lost;
    char why[160];
    /* At a receiver the transfer thread sets it before STOPPED, at a sender control sets it before
     * RESEND. Control frees it. */
    struct bt_wx_has *has;
    /* the transfer thread's own */
    struct bt_wx_ucx_path *ucx; /* the transport's part; struct in ucx_priv.h */
    struct bt_wx_via *via;      /* or grpc.c */
    struct bt_list link;        /* conn->paths */
    struct bt_list hot_link;    /* x->hot: it wants a turn */
    bool connected;             /* messages can be sent */
    bool proven;                /* and the session's peer gets them */
    bool kill_wanted, killed, stopping, closing;
    uint64_t connect_ns, proven_ns, stop_ns;
    struct bt_nic_rate rate;
    uint64_t bytes_in_flight;
    uint32_t n_sends; /* messages that the transport still has */
};

/* A message sent over one of several paths: it may have to be sent again. */
struct bt_wx_sent {
    uint32_t path, item, first_block, n_segs;
};

struct bt_wx_send {
    struct bt_wx_obj obj;
    struct bt_wx_conn *conn;
    struct bt_wire_source src;
    uint64_t request;
    uint32_t epoch, stream, first_block, class;
    /* the transfer thread's own */
    struct bt_list link, ready_link;
    uint32_t n_items, next_item, next_block, available;
    uint32_t outstanding;
    bool added, stopping, sent;
    uint64_t stop_ns;
    struct bt_wx_sent *log, *again; /* sent; lost with a path, to be sent before anything else */
    uint32_t n_log, log_cap, n_again, again_cap;
};

struct bt_wx_recv {
    struct bt_wx_obj obj;
    struct bt_wx_conn *conn;
    struct bt_flow_shape shape;
    const uint32_t *slots;
    const struct bt_kv_key *names;
    bt_flow_word_t *word;
    uint64_t request;
    uint32_t epoch, stream, first_block;
    /* valid for control after LOST / LANDED */
    bt_status_t lost;
    char why[160];
    uint64_t first_ns, last_ns, bytes, segments;
    /* the transfer thread's own */
    struct bt_list link;
    struct bt_list notify_link; /* x->notify while `notify` waits */
    uint32_t notify;
    uint64_t *started; /* bitmap [block][layer] */
    uint32_t *landed;  /* segments in, per item */
    uint32_t n_items, progress, outstanding;
    uint32_t touched; /* no item from here on has a segment that has begun to arrive */
    bool added, stopping, failed;
    uint64_t stop_ns;
};

struct bt_wx_metrics {
    struct bt_metric *sent_bytes, *recv_bytes, *sent_segs, *recv_segs, *crc_errors;
    struct bt_metric *drop_unknown, *drop_stale, *drop_garbled, *drop_duplicate;
    struct bt_metric *resent_segs, *unordered;
};

struct bt_wx_card { /* a network card of this machine */
    char ifname[64];
    bool ipv6;
    int node; /* NUMA; -1: not known */
    struct bt_metric *sent_bytes, *recv_bytes, *sent_segs, *recv_segs;
};

struct bt_wx_config {
    struct bt_slab *slab;
    const struct bt_kv_layout *layout;
    uint64_t bytes_in_flight_max;
    struct bt_wx_card cards[BT_NICS_MAX];
    uint32_t n_cards;
    const char *grpc_listen;   /* host:port: KV goes in messages of gRPC; NULL: over UCX */
    struct bt_tls *tls;        /* of that; NULL: plaintext */
    struct bt_slab_crcs *crcs; /* NULL: each CRC is computed when it is needed */
    struct bt_wx_metrics m;
    struct bt_metric *process_restarts; /* of the wire process */
    /* Runs on the control thread (a task of loop); in the wire process on the transfer thread, at
     * once. */
    struct bt_loop *loop;
    void (*on_event)(void *arg, struct bt_wx_obj *o, uint32_t events);
    void *arg;
    const struct bt_wx_inside *inside; /* NULL: this is not the wire process */
};

/* The wire process has no control thread. Its main thread, the transfer thread, gets this instead
 * (wx_child.c). */
struct bt_wx_inside {
    int wakefd, sock; /* it looks for commands when one of them is readable, */
    struct bt_wx_bell *bell;
    /* Passes commands to bt_wx_enqueue; also called inside the transport's callbacks. sure: sock
     * is readable. */
    void (*pull)(void *arg, bool sure);
    void (*turn)(void *arg);  /* pull, and what may take its time */
    bool (*flush)(void *arg); /* writes events out; false: not all can be written yet */
    void *arg;
};

struct bt_wx;

struct bt_wx *bt_wx_create(const struct bt_wx_config *conf);
/* Starts UCX's context of a card, or gRPC's server; once for each card, before a path over it.
 * ERR_CONFIG: err names the setting; may be tried again. AGAIN, unless `wait`: it is under way,
 * ask again. */
bt_status_t bt_wx_card_start(struct bt_wx *x, uint32_t card, bool wait, char *err,
                             size_t err_cap) BT_MUST_CHECK;
/* Every object must have been told to STOP. Ends the thread and delivers the last events. */
void bt_wx_destroy(struct bt_wx *x);
void bt_wx_command(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd);
void bt_wx_kick(struct bt_wx *x); /* any thread */

/* Position of a segment among the bits of a bt_wx_has that begins with item `item`. */
static inline uint64_t bt_wx_has_bit(const struct bt_flow_shape *s, uint32_t item, uint32_t of_item,
                                     uint32_t block)
{
    uint32_t per = s->chunk_tokens / s->block_tokens;
    return (uint64_t)(of_item - item) * per + (block - of_item / s->n_layers * per);
}

#endif
