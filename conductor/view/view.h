/* This conductor's knowledge of the cluster: the members (from etcd), a session with every worker
 * and kvstore (dialled here, heartbeats in both directions), their loads, and the block index.
 * While etcd is away, the last membership stays. Everything runs on the loop's thread. */
#ifndef BT_CONDUCTOR_VIEW_H
#define BT_CONDUCTOR_VIEW_H

#include "cluster.pb-c.h"
#include "common/base/base.h"
#include "common/base/list.h"
#include "common/etcd/member.h"
#include "common/etcd/roles.h"
#include "common/kv/key.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "common/policy/sched/load.h"
#include "common/rpc/session.h"
#include "conductor/view/holders.h"
#include "conductor/view/peer.h"
#include "session.pb-c.h"

struct bt_view;

typedef enum {
    BT_SESSION_WORKER,
    BT_SESSION_KVSTORE,
    BT_SESSION_OTHER /* a member that is not dialled (another conductor) */
} bt_session_kind_t;

/* The contents of a kvstore, by its stream of block events. */
struct bt_session_blocks {
    struct bt_rpc_stream *stream; /* NULL: none */
    uint64_t seq;                 /* expected next; 0: any */
    uint32_t unacked;             /* BlockEvents for which no credit was given back yet */
    bool synced;                  /* an inventory has begun, and there was no gap since */
};

/* One member and the session with it. Outside view/ the members are read only, except as peer.h
 * says. */
struct bt_session {
    /* A snapshot reads these first members of all sessions, for each request (view.c). */
    struct bt_list link;
    struct bt_view *view;
    bt_session_kind_t kind;
    Baton__Member *member;      /* as registered last */
    bool ready;                 /* as `member` says: new requests may run on it */
    bool prefill, decode;       /* the roles that it offers */
    bool departed;              /* etcd says it is gone: nothing new is planned on it */
    bool draining;              /* its node is to be emptied (batonctl drain) */
    bool broken;                /* is about to end: takes no more messages */
    bool has_load, has_pool;    /* `load` and `said`, and `pool`, are set */
    uint32_t kv_id;             /* kvstores: id in the index */
    uint32_t snap_index;        /* kvstores: in the last snapshot */
    struct bt_session *node_kv; /* workers: the kvstore of its node, NULL: none; view.c keeps it */
    struct bt_sched_said said;  /* workers: its last heartbeat, if has_load */
    struct bt_peer peer;        /* as the request machine knows it */
    Baton__PoolLoad pool;       /* without its links */
    uint32_t n_links;           /* of links */

    uint32_t gives_up; /* BT_ROLES_*: roles that it no longer offers; requests in them are to end */
    uint64_t gives_up_ns; /* since when */

    struct bt_rpc_session rpc;       /* handshake, heartbeats, queue, dials */
    struct bt_session_blocks blocks; /* kvstores */
    uint64_t output_ns;              /* of the last message that was not a heartbeat */
    uint64_t beat_round;             /* view.c */
    Baton__Member *next_member;      /* replaces `member` when own_flights is empty; NULL: none */

    Baton__WorkerLoad load; /* workers: the last load, for batonctl; a cost in it is in load_cost */
    Baton__StepCost load_cost;
    Baton__MixedSteps load_mixed;
    double short_step_ms, short_gap_ms; /* the last limits for which the log said that they are
                                           below those asked for */
    struct bt_sched_link links[BT_SCHED_LINKS_MAX]; /* kvstores: the rates that it has measured */
    Baton__PinStates *pins; /* kvstores: the protected blocks of each pin; NULL: not reported yet */

    bool misnamed; /* its model.served_name is another one */
};

/* From on_up to on_down. */
static inline bool bt_session_up(const struct bt_session *s)
{
    const struct bt_rpc_session_core *c = &s->rpc.core;
    return c->state == BT_RPC_SESSION_UP || (c->state == BT_RPC_SESSION_ENDING && c->end.was_up);
}
/* ... and not about to end: it takes messages. */
static inline bool bt_session_takes(const struct bt_session *s)
{
    return bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_UP;
}

struct bt_view_config { /* copied, strings too */
    const char *cluster, *name, *node;
    const char *model; /* model.served_name here */
    uint64_t incarnation;
    struct bt_kv_key root;
    uint64_t layout_id;
    /* 0: the times of every session (session_core.h); set by tests */
    uint32_t heartbeat_ms, silence_ms;
    size_t index_keys_max;  /* extents */
    uint32_t extent_blocks; /* the index has one of this many blocks of a chain; 0: 1 */
};

struct bt_view_ops {
    void (*on_up)(void *arg, struct bt_session *s);
    /* s went down. It may be kept only while own_flights is not empty. why: for logs and error
     * messages. */
    void (*on_down)(void *arg, struct bt_session *s, const char *why);
    /* Messages other than hello and heartbeat. */
    void (*on_worker)(void *arg, struct bt_session *s, const Baton__FromWorker *m);
    void (*on_kvstore)(void *arg, struct bt_session *s, const Baton__FromKvstore *m);
};

/* The view has no members before bt_view_watch (or bt_view_member_up). loop, rpc and metrics
 * outlive it. */
struct bt_view *bt_view_create(struct bt_loop *loop, struct bt_rpc *rpc,
                               const struct bt_view_config *conf, struct bt_metrics *metrics);
/* Ends every session, with on_down for those that were up. NULL: nothing happens. */
void bt_view_destroy(struct bt_view *v);
/* Sets the callbacks; ops outlives the view. */
void bt_view_set_ops(struct bt_view *v, const struct bt_view_ops *ops, void *arg);
/* Sets how long steps with prompts beside rows may last on workers, and how long a step that a row
 * joins may last together with the time that the row has waited; 0: no limit. It is sent to all
 * workers now, and to new ones when they come. */
void bt_view_set_mixed(struct bt_view *v, double step_ms, double gap_ms);
/* Follows the members in etcd until the view is destroyed. */
void bt_view_watch(struct bt_view *v, struct bt_etcd *e);

/* The watch calls these; tests call them directly. */
void bt_view_member_up(struct bt_view *v, const Baton__Member *m);
void bt_view_member_down(struct bt_view *v, const char *kind, const char *name);

/* Queue a message. The stream's queue is bounded: when it is full the session is broken, which the
 * owner sees as on_down later, not inside this call. False: not sent. */
bool bt_session_send_worker(struct bt_session *s, const Baton__ToWorker *m);
bool bt_session_send_kvstore(struct bt_session *s, const Baton__ToKvstore *m);
/* Ends a session that violated the protocol; it is dialled again. on_down comes later, not inside
 * this call. */
void bt_session_break(struct bt_session *s, const char *why);

/* ---- nodes that are to be emptied (drain.c): keys /baton/<cluster>/drain/<node> in etcd ---- */
/* Returns whether this conductor should do the daemon's work elsewhere, because its node is drained
 * or the daemon reports that it is leaving. */
bool bt_session_leaving(const struct bt_session *s);
bool bt_view_node_draining(const struct bt_view *v, const char *node);
/* Would draining the node take the last worker of a role? Then why: the role, what would be left.
 */
bool bt_view_drain_takes_last(const struct bt_view *v, const char *node, char *why, size_t cap);
/* What the watch calls; tests call it themselves. */
void bt_view_node_set(struct bt_view *v, const char *node, bool draining);
/* Writes the mark, by compare-and-swap on all marks in etcd. All conductors follow it, this one at
 * once. Without force it checks, against all marks and roles in etcd, that the node does not have
 * the last worker of a role. done: ERR_INVALID with the reason, ERR_UNAVAILABLE or ERR_TIMEOUT when
 * etcd does not answer, ERR_UNSUPPORTED without etcd. */
typedef void (*bt_view_drain_fn)(void *arg, bt_status_t st, const char *why);
void bt_view_drain(struct bt_view *v, const char *node, bool force, bt_view_drain_fn done,
                   void *arg);
/* Removes the mark. */
void bt_view_undrain(struct bt_view *v, const char *node, bt_view_drain_fn done, void *arg);

/* ---- roles of running workers (roles.c): the table in etcd ---- */
struct bt_view_role_wish {
    const char *worker;   /* its name, or kind/name */
    uint32_t role;        /* BT_ROLES_*; 0: the role in which it was started */
    uint64_t incarnation; /* only for this process; 0: for every one of the name */
    const char *by;       /* "operator", or the conductor whose policy wishes it */
    int64_t owner_epoch;  /* epoch of that conductor as owner of the policy; 0: an operator */
    bool force;           /* also of the last worker of a role */
};
struct bt_view_role_done {
    int code;        /* BT_GRPC_*: OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION */
    const char *why; /* the fault and the remedy; not set if OK */
    const struct bt_session *worker; /* the rest with OK only */
    uint32_t before, role;
    uint64_t epoch;
};
/* Writes the wish into the table, by compare-and-swap. So the checks hold for the table that it
 * changes, also if others change it: the worker is there, others can take the requests of the role
 * that it gives up, no newer owner of the policy has written. The worker follows by itself. done
 * comes later. */
void bt_view_role_set(struct bt_view *v, const struct bt_view_role_wish *wish,
                      void (*done)(void *arg, const struct bt_view_role_done *d), void *arg);
/* The role that the worker should have: the table's, or the one in which it was started. by_p (may
 * be NULL): who chose it; NULL if it was not chosen. */
uint32_t bt_view_role_wanted(const struct bt_view *v, const struct bt_session *s,
                             const char **by_p);
/* How worker s computes prompts, if it has reported that. */
struct bt_sched_pace bt_session_pace(const struct bt_session *s);
/* The known state of the session's peer, for the request machine (peer.c). */
void bt_session_facts(const struct bt_session *s, struct bt_peer_facts *out);
static inline struct bt_session *bt_session_of_peer(const struct bt_peer *p)
{
    return BT_CONTAINER_OF(p, struct bt_session, peer);
}

/* keys[0..n_keys): the blocks of the prompt, whose prefix on each kvstore is looked up. */
void bt_view_snapshot(struct bt_view *v, const struct bt_kv_key *keys, uint32_t n_keys,
                      struct bt_view_snapshot *out);

/* Adapts the snapshot to a request of this class. It does not wait for prefills of lower classes,
 * nor for their rows if those can be preempted, whichever conductor they belong to. It waits for
 * the step that a worker has under way. */
void bt_view_overtake(struct bt_view_snapshot *s, int32_t priority);

/* Index in the view's latest snapshot of the kvstore with this id in the index; BT_SCHED_NONE: it
 * is not among those that can be planned on. */
uint32_t bt_view_kvstore_at(const struct bt_view *v, const struct bt_view_snapshot *snap,
                            uint32_t kv_id);

/* Returns whether there is a prefill worker and a decode worker, with their kvstores. why: static
 * text if not. */
bool bt_view_serving(struct bt_view *v, const char **why_p);
struct bt_list *bt_view_sessions(struct bt_view *v); /* of struct bt_session.link */
const struct bt_holders *bt_view_index(const struct bt_view *v);
uint32_t bt_view_extent_blocks(const struct bt_view *v); /* of an extent of the index */
const char *bt_view_kvstore_name(const struct bt_view *v, uint32_t kv_id); /* NULL: none */

#endif
