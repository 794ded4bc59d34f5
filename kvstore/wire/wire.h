/* KV between nodes, the only user of UCX. Grants and slots belong to the kvstore's control thread.
 * The wire has a transfer thread of its own, for ucp_workers and CRCs. With UCX this thread runs
 * in a process of its own, so main() calls bt_wx_child_main_if_asked (wx_child.h) first. Functions
 * and callbacks below belong to the control thread unless marked. */
#ifndef BT_KVSTORE_WIRE_H
#define BT_KVSTORE_WIRE_H

#include "common/base/base.h"
#include "common/kv/flow.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "common/rpc/rpc.h"
#include "common/slab/crcs.h"

struct bt_wire;
struct bt_wire_recv; /* receiving end of one flow */
struct bt_wire_send; /* sending end of one flow */

#define BT_WIRE_NAME_BYTES                                                                         \
    256 /* of a kvstore's name, with the NUL; a node.id of 128 bytes fits                          \
         */

/* Bytes under way to one peer. 100 Gbit/s for 0.3 ms, a round trip with both sides' turns, are
 * 3.75 MB. */
#define BT_WIRE_IN_FLIGHT_BYTES (4ull << 20)

struct bt_wire_config {
    const char *cluster, *name;
    uint64_t incarnation;
    const struct bt_kv_layout *layout;
    const struct bt_kv_key *root;
    struct bt_slab_crcs *crcs; /* of the slab; NULL: CRCs are computed at each send */
    /* kvstore.wire.listen: addresses of the network cards that KV may use, NULL at the end;
     * loopback or private. Over gRPC a port may follow the address. */
    const char *const *listen;
    bool allow_routable; /* kvstore.wire.allow_routable: otherwise routable addresses need tls */
    bool over_grpc;      /* kvstore.wire.transport is grpc, with one address; otherwise UCX */
    struct bt_tls *tls;  /* of gRPC; must outlive the wire; NULL: plaintext */
    uint64_t bytes_in_flight_max; /* per peer, over all cards; 0: BT_WIRE_IN_FLIGHT_BYTES */
    const void *secret;           /* kv.salt_file, which proves addresses of members; not kept */
    size_t secret_len;            /* 0: none */
    uint64_t idle_ms;             /* a session without flows is closed after this time; 0: 300 s */
};

struct bt_wire_trailer {
    uint32_t first_token;
    bool finished;
    uint64_t last_compute_ns;
};

/* What the sending end of a flow reads; `lookup` fills it in. The slots stay leased until send_end.
 * word: progress of the local writer. Segments of items below it are sent. */
struct bt_wire_source {
    struct bt_flow_shape shape;
    const uint32_t *slots;         /* [bt_flow_blocks] of the local slab */
    const struct bt_kv_key *names; /* [bt_flow_blocks] seeds of the segment CRCs */
    /* A word of the slab. Any other word must have its last value already, since the wire process
     * does not see it change. */
    bt_flow_word_t *word;
    void *grant; /* the core's handle */
};

/* Classes of flows, in the order of their priority; 0 is a hand-off. */
enum { BT_WIRE_FETCH = 1, BT_WIRE_WINDOW = 2, BT_WIRE_REPLICA = 3 };

/* A peer wants sealed blocks by their keys. */
struct bt_wire_want {
    const char *peer; /* who asks: name and incarnation as of its checked hello */
    uint64_t incarnation;
    uint64_t request; /* for logs */
    uint32_t epoch, class;
    const struct bt_kv_key *keys; /* [n], valid during the call */
    uint32_t n;
};

enum { BT_WIRE_LACKS = 0, BT_WIRE_IN_SLAB = 1, BT_WIRE_FROM_SSD = 2 }; /* of one key in an offer */

struct bt_wire_ops {
    /* A peer asks for (request, epoch). OK: the source is filled in, and send_end follows exactly
     * once. ERR_NOT_FOUND: not reserved here. AGAIN: ask again. ERR_STALE: a newer epoch is known.
     */
    bt_status_t (*lookup)(void *arg, uint64_t request, uint32_t epoch, struct bt_wire_send *snd,
                          struct bt_wire_source *src_p);
    /* The wire no longer reads the source's slots. status OK: everything was sent and
     * acknowledged. */
    void (*send_end)(void *arg, void *grant, struct bt_wire_send *snd, bt_status_t status);
    /* A peer's fetch. OK: the callee answers later, not inside this call, by bt_wire_send_offer or
     * bt_wire_send_abort. want_end follows exactly once, maybe from inside those. Any other status
     * refuses the fetch. NULL: every fetch is refused. */
    bt_status_t (*want)(void *arg, const struct bt_wire_want *want, struct bt_wire_send *snd,
                        void **handle_p);
    /* The wire no longer reads the blocks. status OK: the receiver has all of them. DATA_LOSS: it
     * found a wrong CRC. */
    void (*want_end)(void *arg, void *handle, bt_status_t status);
};

struct bt_wire_recv_ops {
    /* Fetches only: have[i] is BT_WIRE_* of key i; the peer has at least one. The callee calls
     * bt_wire_fetch_take or bt_wire_recv_cancel, inside or later. */
    void (*on_offer)(void *arg, const uint8_t *have, uint32_t n);
    /* The flow word was raised: items below its progress are in the slab, and their CRCs are
     * checked and stored. */
    void (*on_progress)(void *arg);
    /* Everything has arrived, with the sender's trailer (zeros for a fetch). Times are wall-clock
     * ns. */
    void (*on_done)(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns, uint64_t last_ns,
                    uint64_t bytes, uint64_t segments);
    /* The flow cannot complete: ERR_PEER_LOST, ERR_NOT_FOUND (after 2 s of retries),
     * ERR_DATA_LOSS, ERR_TIMEOUT. */
    void (*on_failed)(void *arg, bt_status_t st, const char *why);
    /* Always the last callback: no transfer can write to the slots any more. It follows on_done,
     * on_failed or bt_wire_recv_cancel. r is freed after it returns. */
    void (*on_quiet)(void *arg);
};

/* server: this registers /baton.Peer/Session on it, so it must not have started. Starts the
 * transfer thread. ERR_CONFIG: a listen address is routable although this is not allowed, an
 * interface does not exist or is named twice, or all interfaces are down. err names it and the
 * remedy. */
bt_status_t bt_wire_create(struct bt_loop *loop, struct bt_rpc *rpc, struct bt_rpc_server *server,
                           struct bt_slab *slab, const struct bt_wire_config *conf,
                           const struct bt_wire_ops *ops, void *ops_arg, struct bt_metrics *metrics,
                           struct bt_wire **w_p, char *err, size_t err_cap) BT_MUST_CHECK;
void bt_wire_destroy(struct bt_wire *w);

struct bt_wire_peer_addr {
    const char *name, *rpc; /* rpc: host:port of its gRPC server */
    uint64_t incarnation;
};
/* Pulls blocks [first_block, end) of (request, epoch) from the peer into WRITING slots of the
 * caller. names seed the CRCs. Blocks below first_block are resident; items that they complete
 * count as done. Only the wire writes `word`, as (epoch, progress). timeout_ms: for the whole
 * flow; 0: none. */
struct bt_wire_recv *bt_wire_recv_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_flow_shape *shape, uint32_t first_block,
                                        const uint32_t *slots, const struct bt_kv_key *names,
                                        bt_flow_word_t *word, uint64_t timeout_ms,
                                        const struct bt_wire_recv_ops *ops, void *arg);
void bt_wire_recv_cancel(struct bt_wire_recv *r); /* on_quiet follows, maybe at once */

#define BT_WIRE_FETCH_MAX 4096 /* keys of one fetch */
/* Asks the peer for sealed blocks of either tier. keys [n] are copied. class: BT_WIRE_FETCH for a
 * request that waits, BT_WIRE_WINDOW for a piece of a pass-through prompt, BT_WIRE_REPLICA for a
 * copy ahead of need. on_failed comes in place of on_offer if the peer cannot be reached within
 * two seconds, has none of the blocks (NOT_FOUND), or has no room to serve (EXHAUSTED). The only
 * time limit is the session's two seconds of silence; the caller cancels. */
struct bt_wire_recv *bt_wire_fetch_start(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                         uint64_t request, uint32_t epoch,
                                         const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                         const struct bt_wire_recv_ops *ops, void *arg);
/* slots: WRITING slots of the caller, one for each key that the peer has, in the order of the
 * keys. */
void bt_wire_fetch_take(struct bt_wire_recv *r, const uint32_t *slots);

/* The local writer has moved flow words: the wire looks at them. ANY THREAD; cheap. */
void bt_wire_kick(struct bt_wire *w);
/* The local writer has finished: sends the trailer behind the last item. */
void bt_wire_send_trailer(struct bt_wire_send *s, const struct bt_wire_trailer *t);
/* Stops sending, because the grant is revoked. send_end follows once UCX no longer uses the slots
 * and the receiver has answered, or 2 s later. The receiver may already have found the bytes
 * damaged (DATA_LOSS). If it reports that before the end, that is the status. */
void bt_wire_send_abort(struct bt_wire_send *s, bt_status_t st, const char *why);

/* Answers `want`. have[n]: BT_WIRE_* of each key. src: a flow of the blocks that are here, as one
 * chunk whose word has its last value. */
void bt_wire_send_offer(struct bt_wire_send *s, const struct bt_wire_source *src,
                        const uint8_t *have, uint32_t n);

/* A peer has certainly gone (its etcd lease ended, or a new incarnation is up): drops its session.
 */
void bt_wire_peer_down(struct bt_wire *w, const char *name, uint64_t incarnation);

#endif
