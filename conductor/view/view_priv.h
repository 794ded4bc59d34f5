/* Inside view/: the view's own state, and sessions (session.c, session_blocks.c, session_load.c).
 */
#ifndef BT_CONDUCTOR_VIEW_PRIV_H
#define BT_CONDUCTOR_VIEW_PRIV_H

#include "common/rpc/session_hello.h"
#include "conductor/view/view.h"

struct bt_view {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_view_config conf;
    char *cluster, *name, *node;
    const struct bt_view_ops *ops;
    void *ops_arg;
    struct bt_member_table *table;
    struct bt_etcd *etcd; /* NULL: not watched */
    struct {              /* drain.c */
        struct bt_etcd_watch *watch;
        char **nodes; /* names of drained nodes */
        uint32_t n;
        /* revision of the key that every drain also writes; 0: none has written it */
        int64_t turn;
    } drain;
    struct { /* roles.c */
        struct bt_roles_watch *watch;
        Baton__RoleTable *table; /* NULL: none */
        int64_t revision;
    } roles;
    struct bt_list sessions;
    uint32_t n_sessions;
    struct bt_session *kv_by_id[BT_HOLDERS_KVSTORES_MAX];
    uint32_t kv_ids; /* ids in use are smaller */
    struct bt_holders *index;
    struct { /* limits of mixed steps, for all workers */
        double step_ms, gap_ms;
        uint64_t set_ns;
    } mixed;
    struct {                         /* heartbeats */
        struct bt_timer timer, more; /* more: for the rest, when a turn had no time for all */
        uint64_t round;
        bool asked; /* this round also sends heartbeats that are not due yet */
    } beat;
    struct bt_rpc_session_rules rules; /* of sessions */
    bool links_stale; /* members changed: the following members and node_kv must be found again */
    struct bt_session **all_kvs, **all_workers; /* by kind, in order of arrival */
    uint32_t n_all_kvs, n_all_workers;
    struct { /* of bt_view_snapshot: arrays of cap entries */
        struct bt_sched_worker *workers;
        struct bt_sched_kvstore *kvstores;
        struct bt_peer **worker_of, **kvstore_of;
        uint32_t cap;
    } scratch;
    char *model;
    struct {
        struct bt_metric *down, *gaps, *mismatch, *index_keys, *index_full, *up[2], *misnamed;
    } m;
};

#define BT_VIEW_SESSIONS_MAX 4096
#define BT_VIEW_DRAINED_MAX  4096

void bt_view_drain_watch(struct bt_view *v, struct bt_etcd *e);
void bt_view_drain_cleanup(struct bt_view *v);
/* The key that every drain writes beside its mark. A command that takes workers away compares this
 * key and the role table with the versions that it checked. So of two such commands, at any
 * conductors, one fails and checks again. The caller frees the text. */
char *bt_view_drain_turn_key(const struct bt_view *v);
/* Reads marks and role table from etcd, as the watches will. done: ERR_PEER_PROTOCOL if the table
 * is not readable. */
void bt_view_refresh(struct bt_view *v, bt_etcd_put_fn done, void *arg);
/* Applies the role table from etcd; false: it is not readable. */
bool bt_view_roles_take(struct bt_view *v, const struct bt_etcd_kv *kvs, size_t n);
void bt_view_roles_watch(struct bt_view *v, struct bt_etcd *e);
void bt_view_roles_cleanup(struct bt_view *v);

struct bt_session *bt_session_create(struct bt_view *v, bt_session_kind_t kind,
                                     const Baton__Member *m);
/* Ends the session (on_down if it was up) and frees it. */
void bt_session_destroy(struct bt_session *s, const char *why);
/* Applies the record from etcd. Another incarnation or address starts the session anew. */
void bt_session_update(struct bt_session *s, const Baton__Member *m);
/* Sends a heartbeat if it is due or asked for, or ends the session when it was silent for too long.
 */
void bt_session_beat(struct bt_session *s, uint64_t now_ns, bool asked);
extern const struct bt_rpc_session_rules bt_session_rules; /* but for the times of tests */
struct bt_rpc_identity bt_view_identity(const struct bt_view *v);

/* session_blocks.c: the stream of a kvstore's block events. */
/* Opens it; the session is up. */
void bt_session_blocks_open(struct bt_session *s);
/* Closes it if it is open. The index forgets the kvstore's blocks. */
void bt_session_blocks_close(struct bt_session *s);
/* Gives credit back. Each time a kvstore's contents are forgotten, the index has to sweep once. A
 * kvstore that announces them again and again gets no more credit until the sweeps are over. */
void bt_session_blocks_more(struct bt_session *s);

/* session_load.c */
/* bt_rpc_session_ops.on_heartbeat of a session. */
void bt_session_take_heartbeat(void *arg, const void *heartbeat);
/* Warns if a worker's mixed steps are shorter than this conductor asks for. Predictions use the
 * worker's own limits, but the operator probably did not want them. */
void bt_session_note_mixed(struct bt_session *s, uint64_t now_ns);

/* Returns whether the daemon takes new requests: it is up, and its node is not drained. */
bool bt_session_serves(const struct bt_session *s);

#endif
