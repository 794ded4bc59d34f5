/* The role table: names, reading, watching. Loop's thread. */
#include "common/etcd/roles.h"

#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"

struct bt_roles_watch {
    struct bt_etcd_watch *watch;
    char *key;
    bt_roles_fn fn;
    void *arg;
    bool told;
};

uint32_t bt_roles_of_kind(const char *kind)
{
    return strcmp(kind, "prefill") == 0  ? BT_ROLES_PREFILL
           : strcmp(kind, "decode") == 0 ? BT_ROLES_DECODE
                                         : 0;
}

const char *bt_roles_name(uint32_t role)
{
    static const char *const names[] = {"none", "prefill", "decode", "both"};
    return names[role & BT_ROLES_BOTH];
}

bool bt_roles_parse(const char *name, uint32_t *role_p)
{
    for (uint32_t r = BT_ROLES_PREFILL; r <= BT_ROLES_BOTH; r++) {
        if (strcmp(name, bt_roles_name(r)) == 0) {
            *role_p = r;
            return true;
        }
    }
    *role_p = 0;
    return strcmp(name, "own") == 0;
}

uint32_t bt_roles_given(const Baton__RoleTable *t, const char *kind, const char *name,
                        uint64_t incarnation)
{
    for (size_t i = 0; i < t->n_entries; i++) {
        const Baton__RoleEntry *e = t->entries[i];
        if (strcmp(e->worker, name) == 0 && strcmp(e->kind, kind) == 0 &&
            (e->incarnation == 0 || incarnation == 0 || e->incarnation == incarnation)) {
            return e->role & BT_ROLES_BOTH;
        }
    }
    return 0;
}

char *bt_roles_key(const char *cluster)
{
    return bt_sprintf("/baton/%s/roles", cluster);
}

/* ---- the watch ---- */

static void tell_empty(struct bt_roles_watch *w)
{
    Baton__RoleTable none = BATON__ROLE_TABLE__INIT;
    w->told = true;
    w->fn(w->arg, &none, 0);
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_roles_watch *w = arg;
    if (strcmp(kv->key, w->key) != 0) {
        return;
    }
    char why[256];
    Baton__RoleTable *t = bt_role_table_unpack(kv->value, kv->value_len, why, sizeof(why));
    if (t == NULL) { /* the last table stays in use */
        BT_ERROR("roles_unreadable", "key=%s why=%s remedy=%s", kv->key, why,
                 "it is damaged or of another version; delete this key from etcd and set the roles "
                 "again");
        return;
    }
    w->told = true;
    w->fn(w->arg, t, kv->mod_revision);
    baton__role_table__free_unpacked(t, NULL);
}

static void on_delete(void *arg, const char *key)
{
    struct bt_roles_watch *w = arg;
    if (strcmp(key, w->key) == 0) {
        tell_empty(w);
    }
}

static void on_synced(void *arg)
{
    struct bt_roles_watch *w = arg;
    if (!w->told) {
        tell_empty(w);
    }
}

struct bt_roles_watch *bt_roles_watch_start(struct bt_etcd *e, const char *cluster, bt_roles_fn fn,
                                            void *arg)
{
    static const struct bt_etcd_watch_ops ops = {
        .on_put = on_put, .on_delete = on_delete, .on_synced = on_synced};
    struct bt_roles_watch *w = bt_calloc(1, sizeof(*w));
    w->key = bt_roles_key(cluster);
    w->fn = fn;
    w->arg = arg;
    w->watch = bt_etcd_watch_start(e, w->key, &ops, w);
    return w;
}

void bt_roles_watch_stop(struct bt_roles_watch *w)
{
    if (w == NULL) {
        return;
    }
    bt_etcd_watch_stop(w->watch);
    free(w->key);
    free(w);
}
