/* The kvstore's side of local sessions: the UNIX socket in run_dir, attaching, packets, doorbells.
 * kvstore/grant/grant.h handles the messages. Control thread. */
#ifndef BT_KVSTORE_SERVE_LOCAL_H
#define BT_KVSTORE_SERVE_LOCAL_H

#include "kvstore/grant/grant.h"

struct bt_serve_local;

struct bt_serve_local_config {
    struct bt_loop *loop;
    const char *run_dir;
    const char *node;
    uint64_t incarnation;
    struct bt_slab *slab;
    struct bt_grants *grants;
};

/* Locks run_dir and listens in it. ERR_EXISTS: another kvstore has run_dir (err says so). */
bt_status_t bt_serve_local_create(const struct bt_serve_local_config *c,
                                  struct bt_serve_local **sl_p, char *err,
                                  size_t err_cap) BT_MUST_CHECK;
/* Ends all sessions, unlinks the socket. Before bt_grants_destroy. */
void bt_serve_local_destroy(struct bt_serve_local *sl);

#endif
