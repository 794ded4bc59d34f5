/* Reads and changes the role table. A change is written only if the table is still the one that it
 * was checked against. Loop thread. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "conductor/view/view_priv.h"

#define TRIES 8 /* others may change the table at the same time */

/* One change of a role, until it is written or refused. */
struct change {
    struct bt_view *v;
    char *worker, *by;
    struct bt_view_role_wish wish;
    void (*done)(void *arg, const struct bt_view_role_done *d);
    void *arg;
    uint32_t tries;
    char *kind, *name; /* of the worker that was found */
    uint32_t before, role;
    uint64_t epoch;
};

/* ---- reading ---- */

static void take_table(struct bt_view *v, Baton__RoleTable *t, int64_t revision)
{
    if (v->roles.table != NULL) {
        baton__role_table__free_unpacked(v->roles.table, NULL);
    }
    v->roles.table = t;
    v->roles.revision = revision;
}

bool bt_view_roles_take(struct bt_view *v, const struct bt_etcd_kv *kvs, size_t n)
{
    char *key = bt_roles_key(v->cluster);
    Baton__RoleTable *t = NULL;
    int64_t revision = 0;
    bool readable = true;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(kvs[i].key, key) == 0) {
            char why[256];
            t = bt_role_table_unpack(kvs[i].value, kvs[i].value_len, why, sizeof(why));
            revision = kvs[i].mod_revision;
            readable = t != NULL;
        }
    }
    free(key);
    if (readable && revision >= v->roles.revision) {
        take_table(v, t, revision);
    } else if (t != NULL) {
        baton__role_table__free_unpacked(t, NULL);
    }
    return readable;
}

static void on_table(void *arg, const Baton__RoleTable *t, int64_t revision)
{
    take_table(arg, bt_message_copy(&t->base), revision);
}

void bt_view_roles_watch(struct bt_view *v, struct bt_etcd *e)
{
    v->roles.watch = bt_roles_watch_start(e, v->cluster, on_table, v);
}

void bt_view_roles_cleanup(struct bt_view *v)
{
    bt_roles_watch_stop(v->roles.watch);
    v->roles.watch = NULL;
    take_table(v, NULL, 0);
}

static const Baton__RoleEntry *entry_of(const Baton__RoleTable *t, const Baton__Member *m)
{
    for (size_t i = 0; t != NULL && i < t->n_entries; i++) {
        const Baton__RoleEntry *e = t->entries[i];
        if (strcmp(e->worker, m->name) == 0 && strcmp(e->kind, m->kind) == 0 &&
            (e->incarnation == 0 || e->incarnation == m->incarnation)) {
            return e;
        }
    }
    return NULL;
}

uint32_t bt_view_role_wanted(const struct bt_view *v, const struct bt_session *s, const char **by_p)
{
    const Baton__RoleEntry *e = entry_of(v->roles.table, s->member);
    if (by_p != NULL) {
        *by_p = e != NULL ? e->by : NULL;
    }
    return e != NULL ? e->role & BT_ROLES_BOTH : bt_roles_of_kind(s->member->kind);
}

/* ---- checks ---- */

static bool refuse(struct change *c, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static bool refuse(struct change *c, int code, const char *fmt, ...)
{
    char why[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    struct bt_view_role_done d = {.code = code, .why = why};
    c->done(c->arg, &d);
    return false;
}

static bool is_named(const struct bt_session *s, const char *name)
{
    const char *slash = strchr(name, '/');
    if (slash == NULL) {
        return strcmp(s->member->name, name) == 0;
    }
    size_t n = (size_t)(slash - name);
    return strlen(s->member->kind) == n && strncmp(s->member->kind, name, n) == 0 &&
           strcmp(s->member->name, slash + 1) == 0;
}

static void list_workers(const struct bt_view *v, struct bt_buf *b)
{
    struct bt_list *l;
    bt_list_for_each (l, &v->sessions) {
        const struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (s->kind == BT_SESSION_WORKER && b->len < 300) {
            bt_buf_printf(b, " %s", s->member->name);
        }
    }
}

static struct bt_session *find_worker(struct change *c)
{
    struct bt_session *found = NULL;
    struct bt_list *l;
    bt_list_for_each (l, &c->v->sessions) {
        struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (s->kind != BT_SESSION_WORKER || s->departed || !is_named(s, c->worker)) {
            continue;
        }
        if (found != NULL) {
            (void)refuse(c, BT_GRPC_INVALID_ARGUMENT,
                         "two workers are called '%.100s'; name the one you mean: prefill/%.100s "
                         "or decode/%.100s",
                         c->worker, c->worker, c->worker);
            return NULL;
        }
        found = s;
    }
    if (found == NULL) {
        struct bt_buf names;
        bt_buf_init(&names);
        list_workers(c->v, &names);
        char *text = bt_buf_take(&names);
        (void)refuse(c, BT_GRPC_NOT_FOUND, "no worker is called '%.100s'; there are:%s", c->worker,
                     text != NULL && text[0] != '\0' ? text : " none");
        free(text);
        bt_buf_cleanup(&names);
    }
    return found;
}

/* Returns whether other workers can take over the role (one bit) that s gives up. If not, the
 * answer was sent. */
static bool others_take(struct change *c, const Baton__RoleTable *t, const struct bt_session *s,
                        uint32_t role)
{
    uint32_t others = 0, longest = 0, n = s->has_load ? s->load.max_model_len : 0;
    struct bt_list *l;
    bt_list_for_each (l, &c->v->sessions) {
        const struct bt_session *o = BT_CONTAINER_OF(l, struct bt_session, link);
        const Baton__RoleEntry *e = entry_of(t, o->member);
        uint32_t has = e != NULL ? e->role : bt_roles_of_kind(o->member->kind);
        if (o != s && bt_session_serves(o) && (has & role) != 0) {
            others++;
            uint32_t len = o->has_load ? o->load.max_model_len : 0; /* 0: unknown */
            longest = BT_MAX(longest, len != 0 ? len : UINT32_MAX);
        }
    }
    const char *stage = role == BT_ROLES_PREFILL ? "prefill" : "decode";
    if (others == 0) {
        return refuse(c, BT_GRPC_FAILED_PRECONDITION,
                      "%s is the last worker for %s, and the workers of the other role would have "
                      "to do both. First give another worker this role, or give this one the role "
                      "both; --force changes it anyway",
                      s->member->name, stage);
    }
    if (longest < n) {
        return refuse(
            c, BT_GRPC_FAILED_PRECONDITION,
            "%s serves requests of up to %u tokens, but the workers that would remain for its role "
            "only up to %u; raise model.max_len of those, or give this worker the role both",
            s->member->name, n, longest);
    }
    return true;
}

static bool may_change(struct change *c, const Baton__RoleTable *t, const struct bt_session *s)
{
    const Baton__RoleEntry *e = entry_of(t, s->member);
    const char *name = s->member->name;
    if (c->wish.owner_epoch != 0 && c->wish.owner_epoch < t->owner_epoch) {
        return refuse(c, BT_GRPC_FAILED_PRECONDITION,
                      "another conductor has taken over the role policy");
    }
    if (c->wish.owner_epoch != 0 && e != NULL && strcmp(e->by, "operator") == 0) {
        return refuse(c, BT_GRPC_FAILED_PRECONDITION,
                      "an operator has chosen the role of %s, so the policy does not change it",
                      name);
    }
    if (c->wish.incarnation != 0 && c->wish.incarnation != s->member->incarnation) {
        return refuse(c, BT_GRPC_FAILED_PRECONDITION, "%s has restarted in the meantime", name);
    }
    if (!bt_session_up(s) || !s->ready) {
        return refuse(
            c, BT_GRPC_FAILED_PRECONDITION,
            "%s is not serving, so its role cannot change; 'batonctl nodes' shows its state", name);
    }
    if (bt_session_leaving(s)) {
        return refuse(c, BT_GRPC_FAILED_PRECONDITION,
                      "%s is on node %s, which is being drained; run 'batonctl undrain %s' first",
                      name, s->member->node, s->member->node);
    }
    for (uint32_t role = BT_ROLES_PREFILL; role <= BT_ROLES_DECODE && !c->wish.force; role <<= 1) {
        if ((c->before & ~c->role & role) != 0 && !others_take(c, t, s, role)) {
            return false;
        }
    }
    return true;
}

/* ---- changing ---- */

static void free_change(struct change *c)
{
    free(c->worker);
    free(c->by);
    free(c->kind);
    free(c->name);
    free(c);
}

static void finish(struct change *c, const struct bt_session *s)
{
    struct bt_view_role_done d = {
        .code = BT_GRPC_OK, .worker = s, .before = c->before, .role = c->role, .epoch = c->epoch};
    c->done(c->arg, &d);
}

static void attempt(struct change *c);

static void on_refreshed(void *arg, bt_status_t st)
{
    struct change *c = arg;
    if (st == BT_OK) {
        attempt(c);
        return;
    }
    if (st == BT_ERR_PEER_PROTOCOL) {
        (void)refuse(c, BT_GRPC_FAILED_PRECONDITION,
                     "the role table in etcd cannot be read: it is damaged or of another version; "
                     "delete it and set the roles again");
    } else {
        (void)refuse(
            c, BT_GRPC_FAILED_PRECONDITION,
            "etcd did not return the role table (%s), so nothing has changed; check that etcd runs",
            bt_status_name(st));
    }
    free_change(c);
}

static void on_written(void *arg, bt_status_t st, bool succeeded)
{
    struct change *c = arg;
    struct bt_view *v = c->v;
    if (st != BT_OK) {
        (void)refuse(c, BT_GRPC_FAILED_PRECONDITION,
                     "etcd did not confirm the new role of %.100s (%s), so it may or may not be "
                     "stored; check that etcd runs, then look with 'batonctl nodes'",
                     c->name, bt_status_name(st));
        free_change(c);
        return;
    }
    if (!succeeded) {
        bt_view_refresh(v, on_refreshed, c);
        return;
    }
    char *full = bt_sprintf("%s/%s", c->kind, c->name);
    struct bt_session *s = NULL;
    struct bt_list *l;
    bt_list_for_each (l, &v->sessions) {
        struct bt_session *x = BT_CONTAINER_OF(l, struct bt_session, link);
        s = is_named(x, full) ? x : s;
    }
    free(full);
    BT_INFO("role_set", "worker=%s from=%s to=%s by=%s epoch=%llu", c->name,
            bt_roles_name(c->before), bt_roles_name(c->role), c->by, (unsigned long long)c->epoch);
    if (s != NULL) {
        finish(c, s);
    } else {
        (void)refuse(c, BT_GRPC_FAILED_PRECONDITION, "%s has left the cluster in the meantime",
                     c->name);
    }
    free_change(c);
}

/* Writes t without the worker's entries, of earlier incarnations too, and with its new role. */
static void write_table(struct change *c, const Baton__RoleTable *t, const struct bt_session *s)
{
    struct bt_view *v = c->v;
    Baton__RoleTable n = BATON__ROLE_TABLE__INIT;
    Baton__RoleEntry e = BATON__ROLE_ENTRY__INIT;
    Baton__RoleEntry **entries = bt_calloc(t->n_entries + 1, sizeof(Baton__RoleEntry *));
    n.entries = entries;
    for (size_t i = 0; i < t->n_entries; i++) {
        Baton__RoleEntry *x = t->entries[i];
        if (strcmp(x->worker, s->member->name) != 0 || strcmp(x->kind, s->member->kind) != 0) {
            entries[n.n_entries++] = x;
        }
    }
    if (c->wish.role != 0) {
        e.kind = s->member->kind;
        e.worker = s->member->name;
        e.role = c->role;
        e.incarnation = c->wish.incarnation;
        e.by = c->by;
        e.at_ns = bt_real_ns();
        entries[n.n_entries++] = &e;
    }
    n.epoch = c->epoch = t->epoch + 1;
    n.owner_epoch = BT_MAX(t->owner_epoch, c->wish.owner_epoch);
    size_t len = baton__role_table__get_packed_size(&n);
    uint8_t *bytes = bt_malloc(len + 1);
    baton__role_table__pack(&n, bytes);
    char *key = bt_roles_key(v->cluster), *turn = bt_view_drain_turn_key(v);
    const struct bt_etcd_expect seen[] = {{key, v->roles.revision}, {turn, v->drain.turn}};
    const struct bt_etcd_set table = {key, bytes, len};
    bt_etcd_swap(v->etcd, seen, BT_ARRAY_LEN(seen), &table, 1, on_written, c);
    free(key);
    free(turn);
    free(bytes);
    free(entries);
}

static void attempt(struct change *c)
{
    static const Baton__RoleTable none = BATON__ROLE_TABLE__INIT;
    struct bt_view *v = c->v;
    const Baton__RoleTable *t = v->roles.table != NULL ? v->roles.table : &none;
    if (c->tries++ == TRIES) {
        (void)refuse(c, BT_GRPC_FAILED_PRECONDITION,
                     "the role was not stored, because other role changes came first at every "
                     "attempt; try again");
        free_change(c);
        return;
    }
    struct bt_session *s = find_worker(c);
    if (s == NULL) {
        free_change(c);
        return;
    }
    const Baton__RoleEntry *e = entry_of(t, s->member);
    uint32_t own = bt_roles_of_kind(s->member->kind);
    c->before = e != NULL ? e->role & BT_ROLES_BOTH : own;
    c->role = c->wish.role != 0 ? c->wish.role & BT_ROLES_BOTH : own;
    if (!may_change(c, t, s)) {
        free_change(c);
        return;
    }
    bool same_by = e == NULL ? c->wish.role == 0 : c->wish.role != 0 && strcmp(e->by, c->by) == 0;
    if (c->before == c->role && same_by) {
        c->epoch = t->epoch;
        finish(c, s);
        free_change(c);
        return;
    }
    free(c->kind);
    free(c->name);
    c->kind = bt_strdup(s->member->kind);
    c->name = bt_strdup(s->member->name);
    write_table(c, t, s);
}

void bt_view_role_set(struct bt_view *v, const struct bt_view_role_wish *wish,
                      void (*done)(void *arg, const struct bt_view_role_done *d), void *arg)
{
    struct change *c = bt_calloc(1, sizeof(*c));
    c->v = v;
    c->worker = bt_strdup(wish->worker);
    c->by = bt_strdup(wish->by);
    c->wish = *wish;
    c->done = done;
    c->arg = arg;
    if (v->etcd == NULL) {
        (void)refuse(c, BT_GRPC_FAILED_PRECONDITION,
                     "this conductor has no etcd in which it could store roles");
        free_change(c);
        return;
    }
    attempt(c);
}
