/* A worker's session with the kvstore of its node: a UNIX SOCK_SEQPACKET socket in run_dir carrying
 * proto baton.LocalMsg (proto/local.proto), with the slab, doorbells and the worker's own pidfd
 * passed at attach. The socket's end proves nothing about the worker's memory accesses: only its
 * pidfd does. This is the worker's side; the kvstore's side is kvstore/serve/local.c. Runs on the
 * loop's thread. */
#ifndef BT_SLAB_LOCAL_H
#define BT_SLAB_LOCAL_H

#include <sys/types.h>

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/slab/slab.h"
#include "local.pb-c.h"

/* The version in LocalAttach: a kvstore refuses a worker with another one. Raise it when a message
 * of proto/local.proto changes its meaning. */
#define BT_LOCAL_VERSION 1

/* Bytes of one packet: slot lists of long prompts are split. */
#define BT_LOCAL_MSG_MAX (1u << 20)

struct bt_local;

struct bt_local_ops {
    /* Attached (again): slab is mapped; slots and flow words of an earlier attachment are void. The
     * callback receives ownership of nothing; slab lives until on_detached returns. */
    void (*on_attached)(void *arg, struct bt_slab *slab, uint64_t kvstore_incarnation);
    /* The kvstore went away: stop using slots at once. Reconnects by itself every 200 ms. */
    void (*on_detached)(void *arg);
    /* The worker may not attach: ERR_MISMATCH (layout, root) or ERR_CONFIG (the kvstore belongs to
     * another user), with the reason. It tries again every 2 s. */
    void (*on_refused)(void *arg, bt_status_t st, const char *why);
    void (*on_message)(void *arg, const Baton__LocalMsg *msg); /* valid during the call */
    /* The kvstore rang: a flow word of ours has moved. */
    void (*on_bell)(void *arg);
};

/* Connects, and again whenever the socket ends, until bt_local_stop: never fails, and calls nothing
 * back before it has returned. Strings, layout, root and ops are copied; loop outlives it.
 * worker_name and incarnation: as the worker is registered. */
struct bt_local *bt_local_start(struct bt_loop *loop, const char *run_dir, const char *worker_name,
                                uint64_t incarnation, const struct bt_kv_layout *layout,
                                const struct bt_kv_key *root, const struct bt_local_ops *ops,
                                void *arg);
/* Attaches to a kvstore of this user as well; by itself only to one of root or of its own user. To
 * be called right after bt_local_start. */
void bt_local_trust(struct bt_local *l, uid_t uid);
/* Closes the socket and frees l, from inside a callback too; no callback comes any more. NULL:
 * nothing happens. */
void bt_local_stop(struct bt_local *l);
/* Sends one message, in order; ERR_UNAVAILABLE while detached, ERR_TOO_LARGE above
 * BT_LOCAL_MSG_MAX. A full socket buffer queues (bounded, then AGAIN: nothing was taken). */
bt_status_t bt_local_send(struct bt_local *l, const Baton__LocalMsg *msg) BT_MUST_CHECK;
/* Rings the kvstore: a flow word that this worker writes has moved. Any thread. */
void bt_local_ring(struct bt_local *l);

#endif
