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
struct bt_wreq;  /* one choice of a submission: common/worker/request.h */
struct bt_wtail; /* likewise */

/* What a role does with a request at each turn of its life. All on the engine thread. The steps of
 * a PREFILL submission are the prefill role's, those of a DECODE submission the decode role's; a
 * BOTH submission starts with the former and goes on with the latter. */
struct bt_role_ops {
    const char *kind; /* member kind: "prefill" | "decode" */
    /* The kvstore has opened the grant. */
    void (*opened)(struct bt_wcore *c, struct bt_wreq *r);
    /* Reader: everything has landed. finished: the first token ends the answer. NULL: the role
     * reads no grant. */
    void (*landed)(struct bt_wcore *c, struct bt_wreq *r, uint32_t first_token, bool finished);
    /* A slot and pages are taken: open the sequence and start. An error fails the request. */
    bt_status_t (*begin)(struct bt_wcore *c, struct bt_wreq *r, char *err, size_t err_cap);
    /* A step is about to be planned, r in stage PROMPT or ROW. Sets of s what it has to say (stop,
     * waited_ns) and may move r on; false: r has no part in this step. */
    bool (*plan)(struct bt_wcore *c, struct bt_wreq *r, struct bt_batch_seq *s);
    /* Completes the engine row of a planned row (flows); may be NULL. */
    void (*row)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                struct bt_engine_row *e);
    /* The step with this row is over; out is its sampled token or NULL. */
    void (*stepped)(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                    const struct bt_engine_out *out);
    /* All flows of r are closed and quiet (and it is not ending). */
    void (*quiet)(struct bt_wcore *c, struct bt_wreq *r);
    /* r is about to be freed: frees what the role's state of r points to. Either thread. May be
     * NULL. */
    void (*release)(struct bt_wreq *r);
};

/* The prefill role, and what the engine thread passes on to it. */
struct bt_prefill_ops {
    struct bt_role_ops role;
    size_t state_bytes; /* of struct bt_prompt: zeroed, a part of each request */
    /* The kvstore has brought more blocks from the end of r's prefix. Takes t. */
    void (*tail)(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t);
    /* A forward is done: reports the logprobs of prompt tokens that it has computed. */
    void (*logprobs)(struct bt_wcore *c, const struct bt_engine_event *ev);
};

/* The decode role, and what the engine thread asks of it. */
struct bt_decode_ops {
    struct bt_role_ops role;
};

/* The two roles. prefill/ and decode/ define them, and both binaries link both: a worker can change
 * its role at run time, and a BOTH submission needs both. Only the two mains name them: neither
 * daemon includes the other. */
extern const struct bt_prefill_ops bt_prefill;
extern const struct bt_decode_ops bt_decode;

/* Runs a worker until it is told to stop; returns the exit status: 0 after SIGTERM, 1 failed to
 * start, 2 configuration, 3 may not join the cluster, 4 the device failed. */
int bt_worker_main(int argc, char **argv, bt_role_t start, const struct bt_prefill_ops *prefill,
                   const struct bt_decode_ops *decode);

#endif
