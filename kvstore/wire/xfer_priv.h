/* Inside the transfer thread: what its files share. Everything here runs on that thread. */
#ifndef BT_KVSTORE_WIRE_XFER_PRIV_H
#define BT_KVSTORE_WIRE_XFER_PRIV_H

#include "kvstore/wire/xfer.h"

/* A run of so many bytes or more is sent from where it lies (ucx_context.c tells UCX so). */
#define BT_WX_ZCOPY_MIN (128u << 10)

#define BT_WX_MSG_MAGIC  0x4d534758u
#define BT_WX_LAND_MAGIC 0x4c4e4458u
#define BT_WX_CONN_MAGIC 0x434e4e58u

struct bt_wx_mail;
struct bt_wx_stream; /* stream.c */

struct bt_wx_out { /* one message on its way out */
    uint32_t magic;
    struct bt_wx_out *next; /* free list; stream.c: in the order of sending */
    struct bt_wx_lane *lane;
    struct bt_wx_send *send;
    uint64_t posted_ns;
    uint32_t bytes;
    union {
        struct bt_wire_seg_hdr hdr;
        uint8_t raw[BT_WIRE_SEG_HDR_MAX];
    };
    ucp_dt_iov_t iov[BT_WIRE_SEGS_MAX];
};

struct bt_wx {
    struct bt_wx_config conf;
    struct bt_wx_stream *stream;         /* NULL: UCX, else what is UCX's here is not used */
    ucp_context_h contexts[BT_NICS_MAX]; /* by card; NULL: not started */
    pthread_t thread;
    int epfd, wakefd;
    struct bt_list conns, hot; /* hot: lanes */
    struct bt_list notify;     /* receives that control hears of at the end of the turn */
    struct bt_wx_out *out_free;
    uint32_t eager_max;      /* payload bytes; above it rendezvous: the receiver reads */
    bool copies;             /* TCP: UCX hands us what it receives, and we copy it into the slots */
    ucp_datatype_t unpacked; /* of such receives */
    size_t am_header_max;
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
    _Atomic bool woken, kicked;

    struct bt_wx_mail *mail; /* events, on their way to the loop */
};

void bt_wx_event(struct bt_wx *x, struct bt_wx_obj *o, uint32_t ev);
/* Takes the connection and its lanes down as soon as no UCX callback is running. First reason wins.
 */
void bt_wx_conn_kill(struct bt_wx_conn *c, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void bt_wx_conn_hot(struct bt_wx_conn *c);                  /* every lane of it */
uint32_t bt_wx_conn_open_lanes(const struct bt_wx_conn *c); /* that messages may take */
/* Flows that control has added but the command queue still holds. */
void bt_wx_absorb_adds(struct bt_wx *x);

void bt_wx_take_commands(struct bt_wx *x);
void bt_wx_look_at_words(struct bt_wx *x);  /* after a kick */
void bt_wx_conn_step(struct bt_wx_conn *c); /* behind its lanes' steps; c may be gone then */

/* stream.c: what ucx.c and ucx_lane.c do, over gRPC. create: ERR_CONFIG with err naming the
 * setting; starts nothing yet. */
bt_status_t bt_wx_stream_create(struct bt_wx *x, char *err, size_t err_cap) BT_MUST_CHECK;
void bt_wx_stream_destroy(struct bt_wx *x); /* the thread has ended */
void *bt_wx_stream_main(void *x);
void bt_wx_stream_apply(struct bt_wx_lane *l, uint32_t cmds);
void bt_wx_stream_post(struct bt_wx_out *o, size_t header_len); /* bt_wx_out_done follows */

/* ucx.c, control thread */
void bt_wx_start_thread(struct bt_wx *x, void *(*thread)(void *x));

/* ucx_lane.c */
void bt_wx_lane_apply(struct bt_wx_lane *l, uint32_t cmds);
bool bt_wx_lane_open(const struct bt_wx_lane *l); /* messages may take it */
/* The same as bt_wx_conn_kill for one lane: it ends, the flows do not. */
void bt_wx_lane_kill(struct bt_wx_lane *l, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void bt_wx_lane_hot(struct bt_wx_lane *l);
void bt_wx_lane_step(struct bt_wx_lane *l); /* timers and changes of state; l may be gone then */
bool bt_wx_lane_progress(struct bt_wx_lane *l);      /* returns whether anything moved */
void bt_wx_lane_woken(struct bt_wx_lane *l);         /* its descriptor is ready */
bool bt_wx_lane_arm(struct bt_wx_lane *l);           /* false: it wants to be progressed first */
int bt_wx_lane_sleep_ms(const struct bt_wx_lane *l); /* -1: as long as you like */

/* ucx_send.c */
void bt_wx_send_add(struct bt_wx_send *s);
void bt_wx_send_stop(struct bt_wx_send *s);
void bt_wx_send_look(struct bt_wx_send *s); /* the word may have moved */
void bt_wx_send_pump(struct bt_wx_conn *c);
void bt_wx_send_reap(struct bt_wx_conn *c); /* stopped flows whose requests have ended */
void bt_wx_send_free_pool(struct bt_wx *x);
/* The transport has let go of the message: UCS_OK, it was sent. */
void bt_wx_out_done(struct bt_wx_out *o, ucs_status_t status);

/* ucx_resend.c: what was sent over a lane, and what has to go again when the lane is lost. */
void bt_wx_send_log(struct bt_wx_send *s, const struct bt_wx_sent *sent);
void bt_wx_send_resend(const struct bt_wx_lane *l); /* by l->has */
void bt_wx_recv_report(struct bt_wx_lane *l);       /* fills l->has */

static inline bool bt_wx_recv_begun(const struct bt_wx_recv *r, uint32_t item, uint32_t block)
{
    uint64_t bit = (uint64_t)block * r->shape.n_layers + item % r->shape.n_layers;
    return (r->started[bit / 64] >> bit % 64 & 1) != 0;
}

/* ucx_recv.c */
void bt_wx_recv_add(struct bt_wx_recv *r);
void bt_wx_recv_stop(struct bt_wx_recv *r);
void bt_wx_recv_reap(struct bt_wx_conn *c);
void bt_wx_recv_notify(struct bt_wx *x);
/* A message from stream.c, its header apart; the payload is what follows skip bytes of pieces. */
void bt_wx_recv_pieces(struct bt_wx_lane *l, const void *header, size_t header_len,
                       const struct iovec *pieces, size_t n, size_t skip, size_t payload);
ucs_status_t bt_wx_recv_datatype(ucp_datatype_t *dt_p);
ucs_status_t bt_wx_recv_am(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param);

#endif
