/* The table of members and sessions, and the snapshot that the scheduler gets. Loop thread. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "common/log/log.h"
#include "conductor/view/view_priv.h"

#define BEAT_NS      2000000ull        /* of a turn of the loop, for heartbeats */
#define SWEEP_PLACES ((size_t)1 << 20) /* of the index in each beat: a few ms at most */

static struct bt_session *session_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_session, link);
}

static struct bt_session *find(struct bt_view *v, const char *kind, const char *name)
{
    struct bt_list *l;
    bt_list_for_each (l, &v->sessions) {
        struct bt_session *s = session_of(l);
        if (strcmp(s->member->name, name) == 0 && strcmp(s->member->kind, kind) == 0) {
            return s;
        }
    }
    return NULL;
}

static void note_misnamed(struct bt_view *v, struct bt_session *s, bool is)
{
    if (s->misnamed != is) {
        s->misnamed = is;
        bt_metric_set(v->m.misnamed, bt_metric_value(v->m.misnamed) + (is ? 1 : -1));
    }
}

/* Warns if the peer serves the model under another name. It still gets requests, because weights
 * are compared, not names. But one model would have two names in metrics, logs and dashboards. */
static void look_at_name(struct bt_view *v, struct bt_session *s)
{
    const Baton__Member *m = s->next_member != NULL ? s->next_member : s->member;
    bool is = v->model[0] != '\0' && m->model[0] != '\0' && strcmp(m->model, v->model) != 0;
    if (is && !s->misnamed) {
        BT_WARN("served_name_differs",
                "kind=%s peer=%s peer_node=%s served_name=%s ours=%s remedy=%s", m->kind, m->name,
                m->node, m->model, v->model,
                "give all daemons of the cluster the same model.served_name, then restart those "
                "that have another one");
    }
    note_misnamed(v, s, is);
}

static void drop(struct bt_view *v, struct bt_session *s, const char *why)
{
    if (s->kv_id < BT_HOLDERS_KVSTORES_MAX) {
        bt_holders_forget(v->index, s->kv_id);
    }
    uint32_t id = s->kv_id;
    v->links_stale = true;
    note_misnamed(v, s, false);
    bt_session_destroy(s, why);
    if (id < BT_HOLDERS_KVSTORES_MAX) {
        v->kv_by_id[id] = NULL;
    }
    v->n_sessions--;
}

/* Sends a heartbeat to each peer, or ends the session of a silent one. A stream's first message
 * takes some tens of microseconds, so thousands of sessions take several turns of the loop. */
static void beat_some(void *arg)
{
    struct bt_view *v = arg;
    uint64_t until_ns = bt_loop_until(v->loop, BEAT_NS);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &v->sessions) {
        struct bt_session *s = session_of(l);
        if (s->beat_round == v->beat.round) {
            continue;
        }
        uint64_t now = bt_mono_ns();
        if (now >= until_ns) {
            bt_timer_start(v->loop, &v->beat.more, 0, 0, beat_some, v);
            return;
        }
        s->beat_round = v->beat.round;
        bt_session_beat(s, now, v->beat.asked);
        if (s->departed && bt_rpc_session_state(&s->rpc) == BT_RPC_SESSION_IDLE &&
            bt_list_empty(&s->peer.own_flights)) {
            drop(v, s, "left the cluster");
        }
    }
    v->beat.asked = false;
}

static void on_beat(void *arg)
{
    struct bt_view *v = arg;
    bt_holders_sweep(v->index, SWEEP_PLACES);
    bt_metric_set(v->m.index_keys, (double)bt_holders_keys(v->index));
    if (v->beat.more.heap_pos == 0) { /* else the last round goes on */
        v->beat.round++;
        beat_some(v);
    }
}

struct bt_view *bt_view_create(struct bt_loop *loop, struct bt_rpc *rpc,
                               const struct bt_view_config *conf, struct bt_metrics *metrics)
{
    struct bt_view *v = bt_calloc(1, sizeof(*v));
    v->loop = loop;
    v->rpc = rpc;
    v->conf = *conf;
    v->conf.extent_blocks = BT_MAX(conf->extent_blocks, 1u);
    v->cluster = bt_strdup(conf->cluster);
    v->name = bt_strdup(conf->name);
    v->node = bt_strdup(conf->node);
    v->model = bt_strdup(conf->model != NULL ? conf->model : "");
    v->conf.cluster = v->cluster;
    v->conf.name = v->name;
    v->conf.node = v->node;
    v->conf.model = v->model;
    bt_list_init(&v->sessions);
    v->index = bt_holders_create(conf->index_keys_max);
    v->m.down = bt_metrics_counter(metrics, "baton_sessions_down_total", NULL);
    v->m.mismatch = bt_metrics_counter(metrics, "baton_sessions_refused_total", NULL);
    v->m.gaps = bt_metrics_counter(metrics, "baton_block_event_gaps_total", NULL);
    v->m.index_keys = bt_metrics_gauge(metrics, "baton_index_blocks", NULL);
    v->m.index_full = bt_metrics_counter(metrics, "baton_index_refused_total", NULL);
    v->m.misnamed = bt_metrics_gauge(metrics, "baton_members_misnamed", NULL);
    v->m.up[0] = bt_metrics_gauge(metrics, "baton_sessions_up", "kind=\"worker\"");
    v->m.up[1] = bt_metrics_gauge(metrics, "baton_sessions_up", "kind=\"kvstore\"");
    v->rules = bt_session_rules;
    if (conf->heartbeat_ms != 0) {
        v->rules.heartbeat_ms = v->rules.tick_ms = conf->heartbeat_ms;
    }
    v->rules.silence_ms = conf->silence_ms;
    bt_timer_start(loop, &v->beat.timer, v->rules.tick_ms, v->rules.tick_ms, on_beat, v);
    return v;
}

struct bt_rpc_identity bt_view_identity(const struct bt_view *v)
{
    return (struct bt_rpc_identity){.cluster = v->cluster,
                                    .name = v->name,
                                    .node = v->node,
                                    .incarnation = v->conf.incarnation,
                                    .root = &v->conf.root,
                                    .layout_id = v->conf.layout_id};
}

void bt_view_destroy(struct bt_view *v)
{
    if (v == NULL) {
        return;
    }
    if (v->table != NULL) {
        bt_member_unwatch(v->table);
    }
    bt_view_drain_cleanup(v);
    bt_view_roles_cleanup(v);
    bt_timer_stop(v->loop, &v->beat.timer);
    bt_timer_stop(v->loop, &v->beat.more);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &v->sessions) {
        drop(v, session_of(l), "this conductor ends");
    }
    bt_holders_destroy(v->index);
    free(v->scratch.workers);
    free(v->scratch.kvstores);
    free(v->scratch.worker_of);
    free(v->scratch.kvstore_of);
    free(v->all_kvs);
    free(v->all_workers);
    free(v->cluster);
    free(v->name);
    free(v->node);
    free(v->model);
    free(v);
}

void bt_view_set_mixed(struct bt_view *v, double step_ms, double gap_ms)
{
    if (step_ms == v->mixed.step_ms && gap_ms == v->mixed.gap_ms) {
        return;
    }
    v->mixed.set_ns = bt_mono_ns();
    v->mixed.step_ms = step_ms;
    v->mixed.gap_ms = gap_ms;
    v->beat.asked = true;
    v->beat.round++;
    bt_timer_start(v->loop, &v->beat.more, 0, 0, beat_some, v);
}

void bt_view_set_ops(struct bt_view *v, const struct bt_view_ops *ops, void *arg)
{
    v->ops = ops;
    v->ops_arg = arg;
}

static uint32_t free_kv_id(const struct bt_view *v)
{
    for (uint32_t i = 0; i < BT_HOLDERS_KVSTORES_MAX; i++) {
        if (v->kv_by_id[i] == NULL) {
            return i;
        }
    }
    return BT_HOLDERS_KVSTORES_MAX;
}

static bt_session_kind_t kind_of(const char *kind)
{
    if (strcmp(kind, "kvstore") == 0) {
        return BT_SESSION_KVSTORE;
    }
    if (strcmp(kind, "prefill") == 0 || strcmp(kind, "decode") == 0) {
        return BT_SESSION_WORKER;
    }
    return BT_SESSION_OTHER;
}

void bt_view_member_up(struct bt_view *v, const Baton__Member *m)
{
    struct bt_session *s = find(v, m->kind, m->name);
    if (s != NULL) {
        bt_session_update(s, m);
        look_at_name(v, s);
        return;
    }
    bt_session_kind_t kind = kind_of(m->kind);
    uint32_t id = kind == BT_SESSION_KVSTORE ? free_kv_id(v) : BT_HOLDERS_KVSTORES_MAX;
    if (v->n_sessions >= BT_VIEW_SESSIONS_MAX ||
        (kind == BT_SESSION_KVSTORE && id == BT_HOLDERS_KVSTORES_MAX)) {
        BT_ERROR("view_full", "kind=%s peer=%s sessions=%u why=%s", m->kind, m->name, v->n_sessions,
                 "this conductor can follow no more daemons and ignores this one");
        return;
    }
    s = bt_session_create(v, kind, m);
    s->draining = bt_view_node_draining(v, m->node);
    s->beat_round = v->beat.round; /* from the next one on */
    s->kv_id = id;
    if (kind == BT_SESSION_KVSTORE) {
        v->kv_by_id[id] = s;
        v->kv_ids = BT_MAX(v->kv_ids, id + 1);
    }
    v->n_sessions++;
    v->links_stale = true;
    bt_list_insert_tail(&v->sessions, &s->link);
    look_at_name(v, s);
}

void bt_view_member_down(struct bt_view *v, const char *kind, const char *name)
{
    struct bt_session *s = find(v, kind, name);
    if (s == NULL) {
        return;
    }
    s->departed = true;
    v->links_stale = true;
    BT_INFO("member_gone", "kind=%s peer=%s session_up=%d", kind, name, bt_session_up(s));
    /* A session that is up may finish its work; beat_some drops it when it is idle. */
}

static void table_up(void *arg, const Baton__Member *m)
{
    bt_view_member_up(arg, m);
}

static void table_down(void *arg, const char *kind, const char *name)
{
    bt_view_member_down(arg, kind, name);
}

void bt_view_watch(struct bt_view *v, struct bt_etcd *e)
{
    static const struct bt_member_table_ops ops = {.on_up = table_up, .on_down = table_down};
    BT_ASSERT(v->table == NULL);
    v->table = bt_member_watch(e, v->cluster, NULL, &ops, v);
    bt_view_drain_watch(v, e);
    bt_view_roles_watch(v, e);
}

static bool plannable(const struct bt_session *s)
{
    return bt_session_takes(s) && !s->departed && s->ready;
}

static void reserve_scratch(struct bt_view *v)
{
    if (v->n_sessions <= v->scratch.cap) {
        return;
    }
    uint32_t n = v->scratch.cap = v->n_sessions + 16;
    v->scratch.workers = bt_realloc(v->scratch.workers, n * sizeof(*v->scratch.workers));
    v->scratch.kvstores = bt_realloc(v->scratch.kvstores, n * sizeof(*v->scratch.kvstores));
    v->scratch.worker_of = bt_realloc(v->scratch.worker_of, n * sizeof(struct bt_peer *));
    v->scratch.kvstore_of = bt_realloc(v->scratch.kvstore_of, n * sizeof(struct bt_peer *));
    v->all_kvs = bt_realloc(v->all_kvs, n * sizeof(struct bt_session *));
    v->all_workers = bt_realloc(v->all_workers, n * sizeof(struct bt_session *));
}

static const struct bt_sched_said *said_of(const struct bt_session *s)
{
    return s->has_load ? &s->said : NULL;
}

struct bt_sched_pace bt_session_pace(const struct bt_session *s)
{
    return bt_sched_pace_of(said_of(s), &s->peer.learned, s->prefill && !s->decode);
}

/* Lists the members by kind, and finds the kvstore of each worker's node. If a node has two
 * kvstores, the one that has not left counts. */
static void link_members(struct bt_view *v)
{
    struct bt_map *by_node = bt_map_create(sizeof(uint64_t));
    struct bt_list *l;
    v->n_all_kvs = v->n_all_workers = 0;
    bt_list_for_each (l, &v->sessions) {
        struct bt_session *s = session_of(l);
        uint64_t node = bt_hash64(s->member->node, strlen(s->member->node), 0);
        struct bt_session *other = bt_map_get(by_node, &node);
        if (s->kind == BT_SESSION_KVSTORE) {
            v->all_kvs[v->n_all_kvs++] = s;
            if (other == NULL || other->departed) {
                (void)bt_map_put(by_node, &node, s);
            }
        } else if (s->kind == BT_SESSION_WORKER) {
            v->all_workers[v->n_all_workers++] = s;
        }
    }
    for (uint32_t i = 0; i < v->n_all_workers; i++) {
        struct bt_session *s = v->all_workers[i];
        uint64_t node = bt_hash64(s->member->node, strlen(s->member->node), 0);
        struct bt_session *kv = bt_map_get(by_node, &node);
        /* two node names with the same hash are two nodes */
        s->node_kv = kv != NULL && strcmp(kv->member->node, s->member->node) == 0 ? kv : NULL;
    }
    bt_map_destroy(by_node);
    v->links_stale = false;
}

/* A thousand sessions do not fit into the nearest caches, so this fetches what will be read of a
 * later one. */
static void ask_ahead(struct bt_session *const *list, uint32_t i, uint32_t n)
{
    if (i + 4 < n) {
        const char *p = (const char *)list[i + 4];
        size_t said = offsetof(struct bt_session, said.classes.of);
        size_t own = offsetof(struct bt_session, peer.own.backlog.ahead.joins);
        for (size_t at = 0; at < said; at += 64) {
            __builtin_prefetch(p + at);
        }
        for (size_t at = offsetof(struct bt_session, peer.learned); at < own; at += 64) {
            __builtin_prefetch(p + at);
        }
    }
}

static uint32_t list_kvstores(struct bt_view *v, const uint32_t *match)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->n_all_kvs; i++) {
        struct bt_session *s = v->all_kvs[i];
        ask_ahead(v->all_kvs, i, v->n_all_kvs);
        if (!plannable(s)) {
            continue;
        }
        struct bt_sched_kvstore *k = &v->scratch.kvstores[n];
        *k = (struct bt_sched_kvstore){.draining = s->draining,
                                       .match_blocks = v->conf.extent_blocks * match[s->kv_id],
                                       .incarnation = s->member->incarnation,
                                       .links = s->links,
                                       .n_links = s->n_links};
        if (s->has_pool) {
            k->slots_total = s->pool.slots_total;
            k->slots_free = s->pool.slots_free;
        }
        s->snap_index = n;
        v->scratch.kvstore_of[n++] = &s->peer;
    }
    return n;
}

static uint32_t list_workers(struct bt_view *v)
{
    uint32_t n = 0;
    uint64_t now = bt_mono_ns();
    for (uint32_t i = 0; i < v->n_all_workers; i++) {
        struct bt_session *s = v->all_workers[i];
        ask_ahead(v->all_workers, i, v->n_all_workers);
        if (!plannable(s)) {
            continue;
        }
        struct bt_sched_worker *w = &v->scratch.workers[n];
        bt_sched_show_worker(said_of(s), &s->peer.own, &s->peer.learned, now, w);
        w->prefill = s->prefill;
        w->decode = s->decode;
        w->draining = s->draining;
        if (s->node_kv != NULL && plannable(s->node_kv)) {
            w->kvstore = s->node_kv->snap_index;
        }
        v->scratch.worker_of[n++] = &s->peer;
    }
    return n;
}

void bt_view_snapshot(struct bt_view *v, const struct bt_kv_key *keys, uint32_t n_keys,
                      struct bt_view_snapshot *out)
{
    uint32_t match[BT_HOLDERS_KVSTORES_MAX], extent = v->conf.extent_blocks;
    /* the last block of each extent */
    const struct bt_kv_key *lasts = n_keys >= extent ? keys + (extent - 1) : keys;
    bt_holders_match(v->index, lasts, n_keys / extent, extent, match, v->kv_ids);
    reserve_scratch(v);
    if (v->links_stale) {
        link_members(v);
    }
    uint32_t nk = list_kvstores(v, match), nw = list_workers(v);
    out->workers = v->scratch.workers;
    out->kvstores = v->scratch.kvstores;
    out->worker = v->scratch.worker_of;
    out->kvstore = v->scratch.kvstore_of;
    out->snap = (struct bt_sched_snapshot){.workers = v->scratch.workers,
                                           .n_workers = nw,
                                           .kvstores = v->scratch.kvstores,
                                           .n_kvstores = nk};
}

void bt_view_overtake(struct bt_view_snapshot *v, int32_t priority)
{
    uint64_t now = bt_mono_ns();
    for (uint32_t i = 0; i < v->snap.n_workers; i++) {
        const struct bt_session *s = bt_session_of_peer(v->worker[i]);
        bt_sched_show_class(said_of(s), &s->peer.own, &s->peer.learned, now, priority,
                            &v->workers[i]);
    }
}

/* One worker with a kvstore on its node is enough: any worker can do both phases. */
bool bt_view_serving(struct bt_view *v, const char **why_p)
{
    struct bt_view_snapshot s;
    bt_view_snapshot(v, NULL, 0, &s);
    bool able = false, stays = false;
    for (uint32_t i = 0; i < s.snap.n_workers; i++) {
        const struct bt_sched_worker *w = &s.workers[i];
        if (w->kvstore != BT_SCHED_NONE && (w->prefill || w->decode)) {
            able = true;
            stays = stays || !w->draining;
        }
    }
    const char *why = NULL;
    if (!able) {
        why = s.snap.n_workers == 0 ? "no worker is up" : "no kvstore is up on the workers' nodes";
    } else if (!stays) {
        why = bt_all_drained_text;
    }
    if (why_p != NULL) {
        *why_p = why;
    }
    return why == NULL;
}

struct bt_list *bt_view_sessions(struct bt_view *v)
{
    return &v->sessions;
}

const struct bt_holders *bt_view_index(const struct bt_view *v)
{
    return v->index;
}

uint32_t bt_view_kvstore_at(const struct bt_view *v, const struct bt_view_snapshot *snap,
                            uint32_t kv_id)
{
    const struct bt_session *s = kv_id < BT_HOLDERS_KVSTORES_MAX ? v->kv_by_id[kv_id] : NULL;
    /* snap_index is old if no plan can use the session now. */
    return s != NULL && s->snap_index < snap->snap.n_kvstores &&
                   snap->kvstore[s->snap_index] == &s->peer
               ? s->snap_index
               : BT_SCHED_NONE;
}

uint32_t bt_view_extent_blocks(const struct bt_view *v)
{
    return v->conf.extent_blocks;
}

const char *bt_view_kvstore_name(const struct bt_view *v, uint32_t kv_id)
{
    return kv_id < BT_HOLDERS_KVSTORES_MAX && v->kv_by_id[kv_id] != NULL
               ? v->kv_by_id[kv_id]->member->name
               : NULL;
}
