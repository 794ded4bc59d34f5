/* What this conductor knows of the cluster: the members (from etcd), a session with every worker
 * and kvstore (dialled here, heartbeats both ways), their loads, and the block index. When etcd is
 * away the last membership stays. Everything runs on the loop's thread. */
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

typedef enum {
    BT_SESSION_IDLE, /* no peer has been met, or it is lost */
    BT_SESSION_UP    /* from on_up to on_down */
} bt_session_state_t;

/* What a kvstore has, as its stream of block events says. */
struct bt_session_blocks {
    struct bt_rpc_stream *stream; /* NULL: none */
    uint64_t seq;                 /* expected next; 0: any */
    uint32_t unacked;             /* BlockEvents whose credit it has not got back */
    bool synced;                  /* an inventory has begun, and no gap since */
};

/* One member and the session with it. Outside view/ the fields are read only, but for what
 * peer.h says. */
struct bt_session {
    /* A snapshot of the view reads all of these sessions' first part, for each request (view.c). */
    struct bt_list link;
    struct bt_view *view;
    bt_session_kind_t kind;
    bt_session_state_t state;
    Baton__Member *member;      /* as registered last */
    bool ready;                 /* what member says: may be planned on */
    bool prefill, decode;       /* the roles that it offers */
    bool departed;              /* etcd says it is gone: nothing new is planned on it */
    bool draining;              /* its node is to be emptied (batonctl drain) */
    bool broken;                /* is about to end: takes no more messages */
    bool has_load, has_pool;    /* of load and said, of pool */
    uint32_t kv_id;             /* kvstores: id in the index */
    uint32_t snap_index;        /* kvstores: in the last snapshot */
    struct bt_session *node_kv; /* workers: the kvstore of its node, NULL: none; view.c keeps it */
    struct bt_sched_said said;  /* workers: its last heartbeat, if has_load */
    struct bt_peer peer;        /* as the request machine knows it */
    Baton__PoolLoad pool;       /* without its links */
    uint32_t n_links;           /* of links */

    uint32_t gives_up;    /* BT_ROLES_*: no longer offered, what runs of them is to end */
    uint64_t gives_up_ns; /* since when */

    struct bt_rpc_session rpc;       /* handshake, heartbeats, queue, dials */
    struct bt_session_blocks blocks; /* kvstores */
    uint64_t output_ns;              /* of the last message that was not a heartbeat */
    uint64_t beat_round;             /* view.c */
    Baton__Member *next_member;      /* in its place when own_flights is empty; NULL: none */

    Baton__WorkerLoad load; /* workers: last heard, for batonctl; its cost, if any, is load_cost */
    Baton__StepCost load_cost;
    Baton__MixedSteps load_mixed;
    double short_step_ms, short_gap_ms; /* ... that it was logged to be short of what is asked */
    struct bt_sched_link links[BT_SCHED_LINKS_MAX]; /* kvstores: what it measured of others */
    Baton__PinStates *pins; /* kvstores: what it protects of which pin; NULL: it has not said */

    bool misnamed; /* its model.served_name is another one */
};

struct bt_view_config { /* copied, strings too */
    const char *cluster, *name, *node;
    const char *model; /* model.served_name here */
    uint64_t incarnation;
    struct bt_kv_key root;
    uint64_t layout_id;
    uint32_t heartbeat_ms, silence_ms; /* 0: as of every session (session_core.h); tests */
    size_t index_keys_max;             /* extents */
    uint32_t extent_blocks;            /* every so many-th block of a chain is in the index; 0: 1 */
};

struct bt_view_ops {
    void (*on_up)(void *arg, struct bt_session *s);
    /* s was up and is not any more; it may be kept only while own_flights is not empty. why: for
     * logs and error messages. */
    void (*on_down)(void *arg, struct bt_session *s, const char *why);
    /* Messages other than hello and heartbeat. */
    void (*on_worker)(void *arg, struct bt_session *s, const Baton__FromWorker *m);
    void (*on_kvstore)(void *arg, struct bt_session *s, const Baton__FromKvstore *m);
};

/* Knows nobody until bt_view_watch (or bt_view_member_up). loop, rpc and metrics outlive it. */
struct bt_view *bt_view_create(struct bt_loop *loop, struct bt_rpc *rpc,
                               const struct bt_view_config *conf, struct bt_metrics *metrics);
/* Ends every session, with on_down for those that were up. NULL: nothing happens. */
void bt_view_destroy(struct bt_view *v);
/* Whom to tell; ops outlives the view. */
void bt_view_set_ops(struct bt_view *v, const struct bt_view_ops *ops, void *arg);
/* How long workers' steps with prompts beside rows may be, and those that a row joins with what it
 * has waited; 0: nothing is said of them. Told to all workers now, and to each when it comes. */
void bt_view_set_mixed(struct bt_view *v, double step_ms, double gap_ms);
/* Follows the members in etcd until the view is destroyed. */
void bt_view_watch(struct bt_view *v, struct bt_etcd *e);

/* What the watch calls; tests call it themselves. */
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
/* Is what the session's daemon has for us to be done elsewhere: its node is drained, or it says
 * itself that it is leaving? */
bool bt_session_leaving(const struct bt_session *s);
bool bt_view_node_draining(const struct bt_view *v, const char *node);
/* Would draining the node take the last worker of a role? Then why: the role, what would be left.
 */
bool bt_view_drain_takes_last(const struct bt_view *v, const char *node, char *why, size_t cap);
/* What the watch calls; tests call it themselves. */
void bt_view_node_set(struct bt_view *v, const char *node, bool draining);
/* Writes the mark, by compare-and-swap behind all marks that etcd has; all conductors follow it,
 * this one at once. Without force it is checked that the node has not the last worker of a role,
 * against all marks and roles that etcd has. done:
 * ERR_INVALID with the reason, or ERR_UNAVAILABLE, ERR_TIMEOUT when etcd does not answer,
 * ERR_UNSUPPORTED without one. */
typedef void (*bt_view_drain_fn)(void *arg, bt_status_t st, const char *why);
void bt_view_drain(struct bt_view *v, const char *node, bool force, bt_view_drain_fn done,
                   void *arg);
/* Removes the mark. */
void bt_view_undrain(struct bt_view *v, const char *node, bt_view_drain_fn done, void *arg);

/* ---- roles of running workers (roles.c): the table in etcd ---- */
struct bt_view_role_wish {
    const char *worker;   /* its name, or kind/name */
    uint32_t role;        /* BT_ROLES_*; 0: what it was started for */
    uint64_t incarnation; /* only for this process; 0: for every one of the name */
    const char *by;       /* "operator", or the conductor whose policy wishes it */
    int64_t owner_epoch;  /* of that conductor as owner of the policy; 0: an operator */
    bool force;           /* also of the last worker of a role */
};
struct bt_view_role_done {
    int code;        /* BT_GRPC_*: OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION */
    const char *why; /* unless OK: what is wrong and the remedy */
    const struct bt_session *worker; /* the rest with OK only */
    uint32_t before, role;
    uint64_t epoch;
};
/* Writes the wish into the table, by compare-and-swap: what was checked (it is there, may leave its
 * role to others who can take its requests, no newer owner of the policy has written) holds for the
 * table that it changes, whoever else changes it. The worker follows by itself. done comes later.
 */
void bt_view_role_set(struct bt_view *v, const struct bt_view_role_wish *wish,
                      void (*done)(void *arg, const struct bt_view_role_done *d), void *arg);
/* What the worker is to do: the table's word, or what it was started for. by_p (or NULL): who said
 * so, NULL if nobody did. */
uint32_t bt_view_role_wanted(const struct bt_view *v, const struct bt_session *s,
                             const char **by_p);
/* How worker s computes prompts, as far as it has said. */
struct bt_sched_pace bt_session_pace(const struct bt_session *s);
/* What is known of the session's peer now, for the request machine (peer.c). */
void bt_session_facts(const struct bt_session *s, struct bt_peer_facts *out);
static inline struct bt_session *bt_session_of_peer(const struct bt_peer *p)
{
    return BT_CONTAINER_OF(p, struct bt_session, peer);
}

/* keys[0..n_keys): the blocks of the prompt, whose prefix on each kvstore is looked up. */
void bt_view_snapshot(struct bt_view *v, const struct bt_kv_key *keys, uint32_t n_keys,
                      struct bt_view_snapshot *out);

/* The snapshot as it is for a request of this class, whichever conductor the others belong to: it
 * does not wait for prefills of lower ones, nor for their rows where those would make way. What a
 * worker has under way it waits for. */
void bt_view_overtake(struct bt_view_snapshot *s, int32_t priority);

/* Index in the view's latest snapshot of the kvstore with this id in the index; BT_SCHED_NONE: it
 * is not among those that can be planned on. */
uint32_t bt_view_kvstore_at(const struct bt_view *v, const struct bt_view_snapshot *snap,
                            uint32_t kv_id);

/* Is there a prefill, a decode and their kvstores? why: static text when not. */
bool bt_view_serving(struct bt_view *v, const char **why_p);
struct bt_list *bt_view_sessions(struct bt_view *v); /* of struct bt_session.link */
const struct bt_holders *bt_view_index(const struct bt_view *v);
uint32_t bt_view_extent_blocks(const struct bt_view *v); /* of an extent of the index */
const char *bt_view_kvstore_name(const struct bt_view *v, uint32_t kv_id); /* NULL: none */

#endif
