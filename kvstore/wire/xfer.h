/* The transfer thread (ucx.c, ucx_send.c, ucx_recv.c) as the control thread sees it.
 *
 * Three kinds of objects live on both sides: a connection (a UCP worker and its one endpoint,
 * inside a gRPC session), and sending and receiving ends of flows. The control thread allocates
 * one, gives it commands (bits, in ascending order) and gets events (bits) back. The last command
 * is STOP, the last event STOPPED: from then on the transfer thread does not touch the object, nor,
 * for a flow, its slots. Flows of a connection are stopped before the connection.
 *
 * Each connection has a ucp_worker of its own. UCX pairs endpoints of two workers by a counter that
 * goes out of step once a handshake is broken off, and then data arrive through an endpoint that
 * nobody can force-close. With one worker per session there is nothing to confuse, and destroying
 * it ends every transfer for certain. It costs 4 descriptors and 0.7 ms. */
#ifndef BT_KVSTORE_WIRE_XFER_H
#define BT_KVSTORE_WIRE_XFER_H

#include <pthread.h>
#include <ucp/api/ucp.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "kvstore/wire/msg.h"
#include "kvstore/wire/wire.h"

#define BT_WX_PROOF_NS (1000ull * 1000000) /* from making the endpoint to the peer's echo */
#define BT_WX_GRACE_NS                                                                             \
    (1000ull * 1000000) /* a stopped flow's transfers, before the force-close                      \
                         */
#define BT_WX_CLASSES 3 /* hand-off, fetch, replica */

typedef enum { BT_WX_CONN = 1, BT_WX_SEND = 2, BT_WX_RECV = 3 } bt_wx_kind_t;

enum {                        /* commands */
       BT_WX_CMD_OPEN = 1,    /* conn: make the worker; answered by READY or LOST */
       BT_WX_CMD_ADD = 1,     /* flow: from now on */
       BT_WX_CMD_CONNECT = 2, /* conn: peer_address and nonce_peer are set */
       BT_WX_CMD_STOP = 4
};
enum {                        /* events */
       BT_WX_EV_READY = 1,    /* conn: address is set */
       BT_WX_EV_PROVEN = 2,   /* conn: the peer echoed our nonce */
       BT_WX_EV_PROGRESS = 1, /* recv: the flow word was raised */
       BT_WX_EV_LANDED = 2,   /* recv: the last item is in */
       BT_WX_EV_SENT = 2,     /* send: the last item's sends have completed */
       BT_WX_EV_LOST = 4,     /* conn: dead; recv: bad data. status and why are set */
       BT_WX_EV_STOPPED = 8
};

struct bt_wx_obj {
    bt_wx_kind_t kind;
    struct bt_wx_obj *cmd_next, *ev_next;
    uint32_t cmds, events;
    bool cmd_queued, ev_queued;
};

struct bt_wx_conn {
    struct bt_wx_obj obj;
    /* set by control before OPEN / CONNECT, constant from then on */
    char peer[64]; /* for logs */
    uint64_t nonce, nonce_peer;
    void *peer_address;
    size_t peer_address_len;
    /* set by the transfer thread before READY / LOST */
    void *address;
    size_t address_len;
    bt_status_t lost;
    char why[160];
    /* the transfer thread's own */
    struct bt_wx *x;
    struct bt_list link;     /* x->conns */
    struct bt_list hot_link; /* x->hot: to be progressed and armed again */
    ucp_worker_h worker;
    ucp_ep_h ep;
    int efd;
    void *close_req;
    bool killed, closing, stopping, proven, throttled, broken_close;
    bool kill_wanted; /* set inside UCX callbacks, which must not close endpoints */
    uint32_t empty_wakes;
    uint64_t connect_ns, proven_ns, stop_ns, close_ns;
    struct bt_wire_proof proof;
    struct bt_map *streams; /* u32 -> bt_wx_recv */
    struct bt_list sends, recvs;
    struct bt_list ready[BT_WX_CLASSES]; /* sends with something to send, round-robin */
    uint64_t bytes_in_flight;
    uint32_t n_sends, n_recvs; /* UCX requests that have not called back */
    uint32_t n_stopping;       /* flows told to stop, not yet quiet */
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
    bool added, stopping, failed;
    uint64_t stop_ns;
};

struct bt_wx_metrics {
    struct bt_metric *sent_bytes, *recv_bytes, *sent_segs, *recv_segs, *crc_errors;
    struct bt_metric *drop_unknown, *drop_stale, *drop_garbled, *drop_duplicate;
};

struct bt_wx_config {
    struct bt_slab *slab;
    const struct bt_kv_layout *layout;
    uint64_t bytes_in_flight_max;
    const char *ifname;
    bool ipv6;
    uint32_t (*segment_crc)(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *name);
    void *crc_arg;
    struct bt_wx_metrics m;
    /* Runs on the control thread (a task of loop). */
    struct bt_loop *loop;
    void (*on_event)(void *arg, struct bt_wx_obj *o, uint32_t events);
    void *arg;
};

struct bt_wx;

bt_status_t bt_wx_create(const struct bt_wx_config *conf, struct bt_wx **x_p, char *err,
                         size_t err_cap) BT_MUST_CHECK;
/* Every object has been told to STOP: ends the thread and delivers the last events. */
void bt_wx_destroy(struct bt_wx *x);
void bt_wx_command(struct bt_wx *x, struct bt_wx_obj *o, uint32_t cmd);
void bt_wx_kick(struct bt_wx *x); /* any thread */

#endif
