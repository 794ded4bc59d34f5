/* Messages between a kvstore and its wire process, over a socket pair, and a few words of shared
 * memory. Both are the same executable, so the bodies are plain structs. The wire process trusts
 * the kvstore. The kvstore checks what comes back, because the wire process reads messages of
 * strangers.
 *
 * The socket is a stream, not seqpacket: the flow of a long prompt names megabytes of slots and
 * keys, and many small messages go in one call. */
#ifndef BT_KVSTORE_WIRE_WX_IPC_H
#define BT_KVSTORE_WIRE_WX_IPC_H

#include <sys/uio.h>

#include "common/base/buf.h"
#include "common/log/log.h"
#include "kvstore/wire/xfer.h"

#define BT_WX_IPC_BYTES_MAX (64u << 20) /* of one message */
#define BT_WX_COUNTERS      64
#define BT_WX_HEARD         4096 /* connections that are counted; 0 is for those beyond */

/* Memory of both processes. It stays when the wire process is started again. */
struct bt_wx_board {
    struct bt_wx_bell bell;
    _Atomic bool posted; /* messages for the wire process were written to the socket */
    _Atomic uint64_t counters[BT_WX_COUNTERS]; /* of bt_wx_counters */
    _Atomic uint32_t heard[BT_WX_HEARD];       /* bt_wx_conn.heard */
};

/* The counters that the transfer code adds to, in one order: where conf points to them. */
uint32_t bt_wx_counters(struct bt_wx_config *conf, struct bt_metric **list_p[BT_WX_COUNTERS]);

typedef enum {
    /* to the wire process; see the structs below */
    BT_WX_M_START = 1,
    BT_WX_M_CARD,
    BT_WX_M_OPEN_CONN,
    BT_WX_M_OPEN_PATH,
    BT_WX_M_CONNECT, /* and the peer's address */
    BT_WX_M_ADD_SEND,
    BT_WX_M_ADD_RECV,
    BT_WX_M_STOP,   /* no body */
    BT_WX_M_RESEND, /* and what bt_wx_has_pack writes; the handle is new */
    BT_WX_M_PING,
    BT_WX_M_QUIT, /* no body */
    /* from it: answers, then events of xfer.h */
    BT_WX_M_CARD_STARTED = 32, /* and a text, if it was not */
    BT_WX_M_PONG,              /* no body */
    BT_WX_M_READY,             /* the path's address */
    BT_WX_M_PROVEN,            /* no body */
    BT_WX_M_PROGRESS,          /* u32 */
    BT_WX_M_LANDED,
    BT_WX_M_SENT,    /* no body */
    BT_WX_M_LOST,    /* i32 status, and a text */
    BT_WX_M_STOPPED, /* of a path: what bt_wx_has_pack writes */
    BT_WX_M_RESENT,  /* no body */
} bt_wx_ipc_type_t;

struct bt_wx_ipc_start { /* the first */
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    uint64_t bytes_in_flight_max;
    uint32_t n_cards;
    struct {
        char ifname[64];
        int32_t node;
        bool ipv6;
    } cards[BT_NICS_MAX];
    struct bt_log_settings log;
};

struct bt_wx_ipc_conn {
    char peer[BT_WIRE_NAME_BYTES];
    bool dialer, several;
    uint32_t heard; /* index in bt_wx_board.heard */
};

struct bt_wx_ipc_path {
    uint32_t conn, number, card; /* conn: its handle */
    uint64_t nonce;
};

struct bt_wx_ipc_connect {
    uint64_t nonce_peer;
};

#define BT_WX_WORD_PRIVATE UINT32_MAX

struct bt_wx_ipc_flow { /* and slots [n] u32, names [n] */
    struct bt_flow_shape shape;
    uint64_t request;
    uint32_t conn, epoch, stream, first_block, class;
    uint32_t word;       /* index of the flow word in the slab, or BT_WX_WORD_PRIVATE: */
    uint64_t word_value; /* of a sender's that does not change any more */
};

struct bt_wx_ipc_resend {
    uint32_t conn, number;
};

struct bt_wx_ipc_ping {
    int32_t log_level;
};

struct bt_wx_ipc_card {
    uint32_t card;
    int32_t status; /* of the answer */
};

struct bt_wx_ipc_landed {
    uint64_t first_ns, last_ns, bytes, segments;
};

/* ---- one end of the socket; one thread ---- */

struct bt_wx_pipe {
    int fd; /* not blocking; the owner's */
    struct bt_buf out, in;
    size_t out_at, in_at; /* bytes that were sent or handled already */
    bool broken;          /* a message that is none */
};

struct bt_wx_ipc_msg {
    uint32_t type, handle;
    const uint8_t *body; /* until the next call of the pipe; any alignment */
    size_t n;
};

void bt_wx_pipe_init(struct bt_wx_pipe *p, int fd);
void bt_wx_pipe_cleanup(struct bt_wx_pipe *p);
/* Queues a message whose body are the parts, one after another. */
void bt_wx_pipe_put(struct bt_wx_pipe *p, bt_wx_ipc_type_t type, uint32_t handle,
                    const struct iovec *parts, size_t n_parts);
size_t bt_wx_pipe_unsent(const struct bt_wx_pipe *p);
/* Writes the queued messages. AGAIN: the other end has to read first. ERR_PEER_LOST: it is gone. */
bt_status_t bt_wx_pipe_flush(struct bt_wx_pipe *p) BT_MUST_CHECK;
/* Reads the bytes that have arrived, about 1 MiB at most. AGAIN: there are none (any more).
 * ERR_PEER_LOST: the other end is gone. */
bt_status_t bt_wx_pipe_read(struct bt_wx_pipe *p) BT_MUST_CHECK;
/* The next message that was read. AGAIN: none is whole. ERR_PEER_PROTOCOL: bytes that are none. */
bt_status_t bt_wx_pipe_next(struct bt_wx_pipe *p, struct bt_wx_ipc_msg *m_p) BT_MUST_CHECK;

/* Copies n bytes off the front of the body; false: it has less. */
bool bt_wx_ipc_take(struct bt_wx_ipc_msg *m, void *to, size_t n);
/* The rest of the body as a text without control characters, cut to cap. */
void bt_wx_ipc_text(const struct bt_wx_ipc_msg *m, char *to, size_t cap);

/* ---- lists of what a receiver has ---- */

void bt_wx_has_pack(const struct bt_wx_has *list, struct bt_buf *out);
/* False: malformed. The caller frees the list. */
bool bt_wx_has_unpack(const uint8_t *p, size_t n, struct bt_wx_has **list_p);
void bt_wx_has_free(struct bt_wx_has *list);

#endif
