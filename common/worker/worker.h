/* The worker runtime, shared by baton-prefill and baton-decode: both binaries hold both roles and
 * start in their own. Two threads: the control thread (loop: sessions with conductors, the session
 * with this node's kvstore, etcd, HTTP) and the engine thread (the one owner of the engine, its
 * pages and every request's state), with a bounded ring each way. */
#ifndef BT_WORKER_WORKER_H
#define BT_WORKER_WORKER_H

#include "common/base/base.h"
#include "common/batch/batch.h"
#include "common/engine/engine.h"

typedef enum { BT_ROLE_PREFILL = 0, BT_ROLE_DECODE = 1 } bt_role_t;

struct bt_wcore; /* the engine thread's state: common/worker/core.h */
struct bt_wreq;  /* one submission */

/* What a role does with a request at each turn of its life. All on the engine thread. The steps of
 * a PREFILL submission are the prefill role's, those of a DECODE submission the decode role's; a
 * BOTH submission starts with the former and goes on with the latter. */
struct bt_role_ops {
    const char *kind; /* member kind: "prefill" | "decode" */
    /* The kvstore has opened the grant. */
    void (*opened)(struct bt_wcore *c, struct bt_wreq *r);
    /* Reader: everything landed, and the first token is known. */
    void (*landed)(struct bt_wcore *c, struct bt_wreq *r);
    /* A slot and pages are taken: open the sequence and start. An error fails the request. */
    bt_status_t (*begin)(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap);
    /* A step is about to be planned: what the kvstore has brought meanwhile may move r on. Returns
     * a position that it need not compute beyond, 0: there is none. May be NULL. */
    uint32_t (*meet)(struct bt_wcore *c, struct bt_wreq *r);
    /* Completes the engine row of a planned row (flows); may be NULL. */
    void (*row)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                struct bt_engine_row *e);
    /* The step with this row is over; out is its sampled token or NULL. */
    void (*stepped)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                    const struct bt_engine_out *out);
    /* All flows of r are closed and quiet (and it is not ending). */
    void (*quiet)(struct bt_wcore *c, struct bt_wreq *r);
};

/* The two roles. prefill/ and decode/ define them, and both binaries link both: a worker can change
 * its role at run time, and a BOTH submission needs both. Only the two mains name them: neither
 * daemon includes the other. */
extern const struct bt_role_ops bt_prefill_role, bt_decode_role;

/* Runs a worker until it is told to stop; returns the exit status: 0 after SIGTERM, 1 failed to
 * start, 2 configuration, 3 may not join the cluster, 4 the device failed. */
int bt_worker_main(int argc, char **argv, bt_role_t start, const struct bt_role_ops *prefill,
                   const struct bt_role_ops *decode);

#endif
