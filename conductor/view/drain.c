/* Nodes to drain: a mark in etcd that every conductor follows. Loop thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/view/view_priv.h"

static char *drain_key(const struct bt_view *v, const char *node)
{
    return bt_sprintf("/baton/%s/drain/%s", v->cluster, node);
}

char *bt_view_drain_turn_key(const struct bt_view *v)
{
    return drain_key(v, "");
}

static uint32_t find(const struct bt_view *v, const char *node)
{
    for (uint32_t i = 0; i < v->drain.n; i++) {
        if (strcmp(v->drain.nodes[i], node) == 0) {
            return i;
        }
    }
    return v->drain.n;
}

bool bt_view_node_draining(const struct bt_view *v, const char *node)
{
    return find(v, node) != v->drain.n;
}

bool bt_session_leaving(const struct bt_session *s)
{
    return s->draining || s->member->state == BATON__MEMBER_STATE__DRAINING;
}

const char bt_all_drained_text[] =
    "every worker that could take this request is on a node that is being drained; run 'batonctl "
    "undrain NODE', or start a worker on another node";

bool bt_session_serves(const struct bt_session *s)
{
    return s->kind == BT_SESSION_WORKER && bt_session_takes(s) && !s->departed && s->ready &&
           !s->draining;
}

/* How many workers take new requests, on the node and elsewhere, by role. */
struct staff {
    uint32_t here[2], elsewhere[2], all_elsewhere; /* [0] prefill, [1] decode */
    const char *name[2];                           /* of one worker here */
};

static struct staff staff_of(const struct bt_view *v, const char *node)
{
    struct staff n = {0};
    struct bt_list *l;
    bt_list_for_each (l, &v->sessions) {
        const struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (!bt_session_serves(s)) {
            continue;
        }
        bool here = strcmp(s->member->node, node) == 0;
        uint32_t roles = bt_view_role_wanted(v, s, NULL);
        n.all_elsewhere += !here;
        for (int i = 0; i < 2; i++) {
            bool has = (roles & (i == 0 ? BT_ROLES_PREFILL : BT_ROLES_DECODE)) != 0;
            n.here[i] += here && has;
            n.elsewhere[i] += !here && has;
            n.name[i] = here && has ? s->member->name : n.name[i];
        }
    }
    return n;
}

bool bt_view_drain_takes_last(const struct bt_view *v, const char *node, char *why, size_t cap)
{
    struct staff n = staff_of(v, node);
    bool last[2];
    for (int i = 0; i < 2; i++) {
        last[i] = n.here[i] != 0 && n.elsewhere[i] == 0;
    }
    if (!last[0] && !last[1]) {
        return false;
    }
    int which = last[0] ? 0 : 1;
    const char *stages = last[0] && last[1] ? "prefill and decode" : last[0] ? "prefill" : "decode";
    if (n.all_elsewhere == 0) {
        snprintf(why, cap,
                 "draining %.64s would stop the last worker for %s (%.64s), and new requests would "
                 "get 503. Start workers on another node first; --force drains it anyway",
                 node, stages, n.name[which]);
    } else {
        snprintf(why, cap,
                 "draining %.64s would stop the last worker for %s (%.64s), and the other workers "
                 "(%u) would have to do both. First give one of them the role both ('batonctl "
                 "role'), or start another worker; --force drains it anyway",
                 node, stages, n.name[which], n.all_elsewhere);
    }
    return true;
}

void bt_view_node_set(struct bt_view *v, const char *node, bool draining)
{
    uint32_t at = find(v, node);
    if ((at != v->drain.n) == draining) {
        return;
    }
    if (draining && v->drain.n == BT_VIEW_DRAINED_MAX) {
        BT_ERROR("view_full", "what=drain node=%s why=%s", node,
                 "this conductor can follow no more drained nodes: undrain others");
        return;
    }
    if (draining) {
        v->drain.nodes = bt_realloc(v->drain.nodes, (v->drain.n + 1) * sizeof(char *));
        v->drain.nodes[v->drain.n++] = bt_strdup(node);
    } else {
        free(v->drain.nodes[at]);
        v->drain.nodes[at] = v->drain.nodes[--v->drain.n];
    }
    BT_INFO("node_drain", "of=%s draining=%d", node, draining);
    struct bt_list *l;
    bt_list_for_each (l, &v->sessions) {
        struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (strcmp(s->member->node, node) == 0) {
            s->draining = draining;
        }
    }
}

static void on_key(struct bt_view *v, const char *key, bool draining)
{
    char *prefix = drain_key(v, "");
    size_t n = strlen(prefix);
    if (strncmp(key, prefix, n) == 0 && key[n] != '\0') {
        bt_view_node_set(v, key + n, draining);
    }
    free(prefix);
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_view *v = arg;
    char *turn = bt_view_drain_turn_key(v);
    if (strcmp(kv->key, turn) == 0) {
        v->drain.turn = BT_MAX(v->drain.turn, kv->mod_revision);
    }
    free(turn);
    on_key(v, kv->key, true);
}

static void on_delete(void *arg, const char *key)
{
    on_key(arg, key, false);
}

void bt_view_drain_watch(struct bt_view *v, struct bt_etcd *e)
{
    static const struct bt_etcd_watch_ops ops = {.on_put = on_put, .on_delete = on_delete};
    char *prefix = drain_key(v, "");
    v->etcd = e;
    v->drain.watch = bt_etcd_watch_start(e, prefix, &ops, v);
    free(prefix);
}

void bt_view_drain_cleanup(struct bt_view *v)
{
    if (v->drain.watch != NULL) {
        bt_etcd_watch_stop(v->drain.watch);
    }
    for (uint32_t i = 0; i < v->drain.n; i++) {
        free(v->drain.nodes[i]);
    }
    free(v->drain.nodes);
    v->drain.watch = NULL;
    v->drain.nodes = NULL;
    v->drain.n = 0;
}

/* ---- what etcd has now ---- */

struct refresh {
    struct bt_view *v;
    bt_etcd_put_fn done;
    void *arg;
};

static void on_roles_listed(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                            int64_t revision)
{
    struct refresh *r = arg;
    (void)revision;
    if (st == BT_OK && !bt_view_roles_take(r->v, kvs, n)) {
        st = BT_ERR_PEER_PROTOCOL;
    }
    r->done(r->arg, st);
    free(r);
}

static void on_marks_listed(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                            int64_t revision)
{
    struct refresh *r = arg;
    (void)revision;
    if (st != BT_OK) {
        r->done(r->arg, st);
        free(r);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        on_put(r->v, &kvs[i]);
    }
    char *key = bt_roles_key(r->v->cluster);
    bt_etcd_range_prefix(r->v->etcd, key, on_roles_listed, r);
    free(key);
}

void bt_view_refresh(struct bt_view *v, bt_etcd_put_fn done, void *arg)
{
    struct refresh *r = bt_calloc(1, sizeof(*r));
    *r = (struct refresh){v, done, arg};
    char *prefix = drain_key(v, "");
    bt_etcd_range_prefix(v->etcd, prefix, on_marks_listed, r);
    free(prefix);
}

/* ---- the commands ---- */

#define TRIES 8 /* others may drain and change roles at the same time */

struct drain {
    struct bt_view *v;
    char *node;
    bool force, marked;
    uint32_t tries;
    bt_view_drain_fn done;
    void *arg;
};

static void end_drain(struct drain *d, bt_status_t st, const char *why)
{
    d->done(d->arg, st, why);
    free(d->node);
    free(d);
}

static void attempt(struct drain *d);

static void on_refreshed(void *arg, bt_status_t st)
{
    struct drain *d = arg;
    bool damaged = st == BT_ERR_PEER_PROTOCOL; /* the role table is damaged; with force it is not
                                                * needed */
    if (st != BT_OK && !(d->force && damaged)) {
        end_drain(d, st, NULL);
        return;
    }
    attempt(d);
}

static void on_written(void *arg, bt_status_t st, bool succeeded)
{
    struct drain *d = arg;
    if (st == BT_OK && succeeded) {
        end_drain(d, BT_OK, NULL);
        return;
    }
    if (d->marked) {
        bt_view_node_set(d->v, d->node, false);
    }
    if (st != BT_OK) {
        end_drain(d, st, NULL);
    } else if (++d->tries == TRIES) {
        end_drain(d, BT_ERR_INVALID,
                  "the change was not stored, because other drains or role changes came first at "
                  "every attempt; try again");
    } else {
        bt_view_refresh(d->v, on_refreshed, d);
    }
}

/* Sets the mark in the view before etcd has it, so that the second of two commands at this
 * conductor is checked against the result of the first one. Of two commands at different
 * conductors, etcd refuses the later one until its conductor has seen the other's mark. This also
 * holds with force. Force only skips the check of which workers would be left, so with force the
 * roles may change meanwhile. */
static void attempt(struct drain *d)
{
    struct bt_view *v = d->v;
    char why[512];
    if (!d->force && bt_view_drain_takes_last(v, d->node, why, sizeof(why))) {
        end_drain(d, BT_ERR_INVALID, why);
        return;
    }
    d->marked = !bt_view_node_draining(v, d->node);
    bt_view_node_set(v, d->node, true);
    char *mark = drain_key(v, d->node), *turn = drain_key(v, ""), *roles = bt_roles_key(v->cluster);
    const struct bt_etcd_expect seen[] = {{turn, v->drain.turn}, {roles, v->roles.revision}};
    const struct bt_etcd_set sets[] = {{mark, v->name, strlen(v->name)},
                                       {turn, v->name, strlen(v->name)}};
    bt_etcd_swap(v->etcd, seen, d->force ? 1 : BT_ARRAY_LEN(seen), sets, BT_ARRAY_LEN(sets),
                 on_written, d);
    free(mark);
    free(turn);
    free(roles);
}

void bt_view_drain(struct bt_view *v, const char *node, bool force, bt_view_drain_fn done,
                   void *arg)
{
    if (v->etcd == NULL) {
        done(arg, BT_ERR_UNSUPPORTED, NULL);
        return;
    }
    struct drain *d = bt_calloc(1, sizeof(*d));
    *d = (struct drain){.v = v, .node = bt_strdup(node), .force = force, .done = done, .arg = arg};
    attempt(d);
}

static void on_removed(void *arg, bt_status_t st)
{
    struct drain *d = arg;
    end_drain(d, st, NULL);
}

void bt_view_undrain(struct bt_view *v, const char *node, bt_view_drain_fn done, void *arg)
{
    if (v->etcd == NULL) {
        done(arg, BT_ERR_UNSUPPORTED, NULL);
        return;
    }
    struct drain *d = bt_calloc(1, sizeof(*d));
    *d = (struct drain){.v = v, .node = bt_strdup(node), .done = done, .arg = arg};
    char *key = drain_key(v, node);
    bt_etcd_delete(v->etcd, key, on_removed, d);
    free(key);
}
