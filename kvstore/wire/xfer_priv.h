/* Inside the transfer thread: what its files share, whatever transport carries the messages.
 * xfer.c has connections and paths, xfer_send.c and xfer_recv.c the ends of flows, xfer_resend.c
 * what a lost path leaves to be done; ucx*.c and grpc.c are transports. Everything here runs on
 * that thread, unless it says otherwise. */
#ifndef BT_KVSTORE_WIRE_XFER_PRIV_H
#define BT_KVSTORE_WIRE_XFER_PRIV_H

#include <pthread.h>
#include <sys/uio.h>

#include "kvstore/wire/xfer.h"

#define BT_WX_SLICE_US 300 /* of the transfer thread, see bt_loop_short_slices */

struct bt_wx_mail;
struct bt_wx_ucx;   /* ucx_priv.h */
struct bt_wx_grpc;  /* grpc.c */
struct bt_wx_proxy; /* wx_priv.h */

struct bt_wx_out {          /* one message on its way out */
    struct bt_wx_out *next; /* free list; grpc.c: in the order of sending */
    struct bt_wx_path *path;
    struct bt_wx_send *send;
    uint64_t posted_ns;
    uint32_t magic; /* the transport's */
    uint32_t bytes;
    union {
        struct bt_wire_seg_hdr hdr;
        uint8_t raw[BT_WIRE_SEG_HDR_MAX];
    };
    struct iovec iov[BT_WIRE_SEGS_MAX]; /* of the segments, where they lie */
};

struct bt_wx_land { /* one message on its way in */
    struct bt_wx_recv *recv;
    struct bt_wx_path *path;
    struct bt_wire_seg_hdr hdr;
    const uint8_t *crcs; /* the CRCs that the sender has computed */
    uint64_t at;         /* payload bytes that are in the slots, in order */
    uint32_t crc;        /* of the segment that is at `at`, so far */
    bool loose;          /* a card wrote them, or they came out of order: CRCs at the end */
};

/* A transport: carries messages between two transfer threads. */
struct bt_wx_transport {
    void (*create)(struct bt_wx *x); /* control thread; sets header_max and alone_min */
    /* Control thread, once for each card; statuses as of bt_wx_card_start. */
    bt_status_t (*card_start)(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap);
    /* Takes commands instead of the thread's queue; may be NULL. Control thread. */
    void (*command)(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd);
    /* Ends the other process instead of the thread; may be NULL. Control thread. */
    void (*finish)(struct bt_wx *x);
    void (*destroy)(struct bt_wx *x); /* control thread; the thread has ended */
    void (*run)(struct bt_wx *x);     /* UCX's: the transfer thread, until bt_wx_over */
    /* Creates this side of the path. READY follows. */
    void (*path_open)(struct bt_wx_path *l);
    /* To peer_address. bt_wx_path_proven follows. */
    void (*path_connect)(struct bt_wx_path *l);
    /* Sends a message, header first; bt_wx_out_done follows, at once or later. */
    void (*post)(struct bt_wx_out *o, size_t header_len);
};
extern const struct bt_wx_transport bt_wx_over_ucx, bt_wx_over_grpc;
/* The kvstore's side of UCX, which is in a process of its own: wx_proxy.c. */
extern const struct bt_wx_transport bt_wx_over_process;

struct bt_wx {
    struct bt_wx_config conf;
    const struct bt_wx_transport *t;
    struct bt_wx_ucx *ucx; /* the transport's own, one of the three */
    struct bt_wx_grpc *grpc;
    struct bt_wx_proxy *proxy;
    size_t header_max;  /* bytes that the transport takes as a message's header */
    uint32_t alone_min; /* a segment of at least this size gets a message of its own */
    pthread_t thread;
    int wakefd;
    struct bt_wx_bell *bell, own_bell;
    struct bt_list conns, hot; /* hot: paths */
    /* receives about which the control thread gets an event at the end of the turn */
    struct bt_list notify;
    struct bt_wx_out *out_free;
    uint64_t now_ns;
    uint64_t handoff_ns;   /* when a message of class 0 was posted last */
    uint64_t background;   /* bytes of the other classes in flight, over all connections */
    bool background_waits; /* some connection's were held back */
    bool by_node;          /* the cards are not all on one NUMA node */
    bool quit;             /* seen by the thread */
    bool running;          /* the thread was started */

    pthread_mutex_t lock; /* commands */
    struct bt_wx_obj *cmd_head, **cmd_tail;
    bool quit_wanted;

    struct bt_wx_mail *mail; /* events, on their way to the loop */
};

/* ---- xfer.c ---- */
/* Wire process: a command without waking the transfer thread, which calls this itself. */
void bt_wx_enqueue(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd);
void bt_wx_quit(struct bt_wx *x); /* the thread ends once all objects have been stopped */
/* Wire process: writes events out. false: some have to wait. */
bool bt_wx_flush(struct bt_wx *x);
/* Control thread. The transport's loop: until bt_wx_over says so. */
void bt_wx_start_thread(struct bt_wx *x, void *(*thread)(void *x));
bool bt_wx_over(const struct bt_wx *x);
void bt_wx_unwake(struct bt_wx *x); /* wakefd is readable */
void bt_wx_event(struct bt_wx *x, struct bt_wx_obj *o, uint32_t ev);
void bt_wx_take_commands(struct bt_wx *x);
/* Flows that control has added but the command queue still holds. */
void bt_wx_absorb_adds(struct bt_wx *x);
void bt_wx_look_at_words(struct bt_wx *x); /* after a kick */

/* Ends the connection and its paths as soon as no callback of the transport is running. The first
 * reason is kept. */
void bt_wx_conn_kill(struct bt_wx_conn *c, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void bt_wx_conn_hot(struct bt_wx_conn *c);                  /* every path of it */
uint32_t bt_wx_conn_open_paths(const struct bt_wx_conn *c); /* that messages may take */
void bt_wx_conn_step(struct bt_wx_conn *c); /* behind its paths' steps; c may be gone then */

void bt_wx_path_hot(struct bt_wx_path *l);
bool bt_wx_path_open(const struct bt_wx_path *l); /* messages may take it */
/* The same as bt_wx_conn_kill for one path: it ends, the flows do not. */
void bt_wx_path_kill(struct bt_wx_path *l, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void bt_wx_path_proven(struct bt_wx_path *l); /* the peer has echoed our nonce */
/* Reports the path if it is lost. true: close it. */
bool bt_wx_path_ends(struct bt_wx_path *l);
/* The path is closed and no callback will run. This is the transport's last call for it. */
void bt_wx_path_gone(struct bt_wx_path *l);

/* ---- xfer_send.c ---- */
void bt_wx_send_add(struct bt_wx_send *s);
void bt_wx_send_stop(struct bt_wx_send *s);
void bt_wx_send_look(struct bt_wx_send *s); /* the word may have moved */
void bt_wx_send_pump(struct bt_wx_conn *c);
void bt_wx_send_reap(struct bt_wx_conn *c); /* stopped flows whose requests have ended */
void bt_wx_send_free_pool(struct bt_wx *x);
/* The transport no longer uses the message. lost: why it was not sent; NULL: it was sent. */
void bt_wx_out_done(struct bt_wx_out *o, const char *lost);

/* ---- xfer_resend.c: what was sent over a path, and what has to go again when it is lost ---- */
void bt_wx_send_log(struct bt_wx_send *s, const struct bt_wx_sent *sent);
void bt_wx_send_resend(const struct bt_wx_path *l); /* by l->has */
void bt_wx_recv_report(struct bt_wx_path *l);       /* fills l->has */

static inline bool bt_wx_recv_begun(const struct bt_wx_recv *r, uint32_t item, uint32_t block)
{
    uint64_t bit = (uint64_t)block * r->shape.n_layers + item % r->shape.n_layers;
    return (r->started[bit / 64] >> bit % 64 & 1) != 0;
}

/* ---- xfer_recv.c ---- */
void bt_wx_recv_add(struct bt_wx_recv *r);
void bt_wx_recv_stop(struct bt_wx_recv *r);
void bt_wx_recv_reap(struct bt_wx_conn *c);
void bt_wx_recv_notify(struct bt_wx *x);
/* Reads a message's header and finds where its bytes belong. false: nowhere. ours: it certainly
 * came from the session's peer; messages of strangers are dropped silently. land->crcs points into
 * the header. */
bool bt_wx_land_begin(struct bt_wx_path *l, const void *header, size_t header_len, size_t payload,
                      bool ours, struct bt_wx_land *land);
/* Where the message's i-th segment belongs. */
uint8_t *bt_wx_land_segment(const struct bt_wx_land *l, uint32_t i);
/* Takes n more bytes of the payload. Does nothing for a flow that has ended. */
void bt_wx_land_bytes(struct bt_wx_land *l, const uint8_t *from, size_t n);
/* The same for a message (loose) whose bytes come in any order. */
void bt_wx_land_loose(const struct bt_wx_land *l, uint64_t at, const uint8_t *from, size_t n);
void bt_wx_land_end(const struct bt_wx_land *l);  /* all bytes of the message are in the slots */
void bt_wx_land_undo(const struct bt_wx_land *l); /* it may be sent again, over another path */

#endif
