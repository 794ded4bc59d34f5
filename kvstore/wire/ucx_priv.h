/* The transfer thread over UCX: what ucx.c (its loop), ucx_path.c (workers and endpoints),
 * ucx_msg.c (messages of segments), ucx_socket.c (how TCP is written) and ucx_context.c (set-up)
 * share. */
#ifndef BT_KVSTORE_WIRE_UCX_PRIV_H
#define BT_KVSTORE_WIRE_UCX_PRIV_H

#include <ucp/api/ucp.h>

#include "kvstore/wire/xfer_priv.h"

/* A run of at least this many bytes is sent (RDMA: read) from where it lies; ucx_context.c tells
 * UCX so. */
#define BT_UCX_ZCOPY_MIN (128u << 10)

struct bt_wx_ucx {
    ucp_context_h contexts[BT_NICS_MAX]; /* by card; NULL: not started */
    int epfd;
    uint32_t eager_max; /* payload bytes; above it rendezvous: the receiver reads */
    /* TCP: UCX passes received messages to this code, which copies them into the slots */
    bool copies;
    ucp_datatype_t unpacked; /* of such receives */
};

/* Each path has a ucp_worker of its own. UCX pairs endpoints of two workers by a counter that goes
 * out of step once a handshake is broken off, and then data arrive through an endpoint that cannot
 * be closed by force. With one worker per path there is nothing to confuse, and destroying it ends
 * every transfer for certain. It costs 4 descriptors and 0.7 ms. */
struct bt_wx_ucx_path {
    ucp_worker_h worker;
    ucp_ep_h ep;
    int efd;
    void *close_req;
    bool throttled, broken_close;
    bool failed; /* UCX says so of the endpoint */
    uint32_t empty_wakes;
    uint32_t n_recvs; /* UCX requests that have not called back */
    uint64_t close_ns;
    uint64_t moved_ns; /* UCX last had anything to do here */
    uint64_t asked_ns; /* an echo was asked for and has not come; 0: none */
    uint32_t heard;    /* conn->heard then */
    struct bt_wire_proof proof, echo;
};

/* ---- ucx_context.c ---- */
bt_status_t bt_ucx_card_start(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap);

/* ---- ucx_socket.c ---- */
/* Whether UCX over TCP is safe with messages that are not copied first: it is a version that is
 * known, and writes them by our function. */
bool bt_ucx_may_send_from_memory(void);

/* ---- ucx_path.c ---- */
void bt_ucx_path_open(struct bt_wx_path *l);
void bt_ucx_path_connect(struct bt_wx_path *l);
void bt_ucx_path_step(struct bt_wx_path *l); /* timers and changes of state; l may be gone then */
bool bt_ucx_path_progress(struct bt_wx_path *l);      /* returns whether anything moved */
void bt_ucx_path_woken(struct bt_wx_path *l);         /* its descriptor is ready */
void bt_ucx_path_look(struct bt_wx_path *l);          /* whatever has woken the thread */
bool bt_ucx_path_arm(struct bt_wx_path *l);           /* false: it wants to be progressed first */
int bt_ucx_path_sleep_ms(const struct bt_wx_path *l); /* -1: as long as you like */

/* ---- ucx_msg.c ---- */
void bt_ucx_post(struct bt_wx_out *o, size_t header_len);
ucs_status_t bt_ucx_datatype(ucp_datatype_t *dt_p); /* struct bt_wx_ucx.unpacked */
ucs_status_t bt_ucx_on_segments(void *path, const void *header, size_t header_len, void *data,
                                size_t len, const ucp_am_recv_param_t *param);

#endif
