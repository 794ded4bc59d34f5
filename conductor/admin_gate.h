/* The way into the Admin service: who may call, and the audit log. Where the configuration has API
 * keys, a caller needs a key with the scope admin in the call's metadata (`authorization: Bearer
 * KEY`) or, with cluster.tls.*, a certificate with the role admin. Every call gets a line ev=audit
 * when it is answered: who, what, target, result. Loop thread. */
#ifndef BT_CONDUCTOR_ADMIN_GATE_H
#define BT_CONDUCTOR_ADMIN_GATE_H

#include "common/rpc/rpc.h"
#include "conductor/front/front.h"

#define BT_ADMIN_METHODS_MAX 16

struct bt_admin_gate { /* the caller's memory; outlives the server */
    struct bt_rpc_server *server;
    struct bt_front *front; /* has the keys; NULL: none are needed */
    bool closed;            /* calls get UNAVAILABLE: the front is gone */
    size_t n_methods;
    struct bt_admin_method {
        struct bt_admin_gate *gate;
        const char *name;
        bt_rpc_unary_fn fn;
        void *arg;
    } methods[BT_ADMIN_METHODS_MAX];
};

/* Serves /baton.Admin/NAME by fn, before the server's start. name is static text. */
void bt_admin_gate_serve(struct bt_admin_gate *g, const char *name, bt_rpc_unary_fn fn, void *arg);
/* Names the object of the call for its line in the log: "node=n1 force=0". The last text counts.
 * Has no effect after the answer. */
void bt_admin_gate_target(struct bt_rpc_call *call, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#endif
