/* The table of members, by a watch of their keys: makes members of keys and values, and ignores
 * those that are not members of this cluster. While etcd cannot be reached the last table stays
 * valid. Loop's thread. */
#include <stdlib.h>
#include <string.h>

#include "common/etcd/member.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"

struct bt_member_table {
    struct bt_etcd_watch *watch;
    struct bt_member_table_ops ops;
    void *arg;
    size_t root_len; /* of "/baton/<cluster>/members/" */
};

/* Splits "<root><kind>/<name>" into heap copies; false: the key does not have this form. */
static bool split_key(const struct bt_member_table *t, const char *key, char **kind_p,
                      char **name_p)
{
    if (strlen(key) <= t->root_len) {
        return false;
    }
    const char *kind = key + t->root_len, *slash = strchr(kind, '/');
    if (slash == NULL || slash == kind || slash[1] == '\0' || strchr(slash + 1, '/') != NULL) {
        return false;
    }
    *kind_p = bt_strdup(kind);
    (*kind_p)[slash - kind] = '\0';
    *name_p = bt_strdup(slash + 1);
    return true;
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_member_table *t = arg;
    char *kind, *name;
    if (!split_key(t, kv->key, &kind, &name)) {
        BT_WARN("member_bad_key", "key=%s why=%s", kv->key,
                "no daemon writes such a key; it is ignored. Delete it from etcd");
        return;
    }
    char why[256] = "its kind or name differs from that in its key";
    Baton__Member *m = bt_member_unpack(kv->value, kv->value_len, why, sizeof(why));
    if (m == NULL || strcmp(m->kind, kind) != 0 || strcmp(m->name, name) != 0) {
        BT_WARN("member_bad_value", "key=%s why=%s", kv->key, why);
    } else if (t->ops.on_up != NULL) {
        t->ops.on_up(t->arg, m);
    }
    if (m != NULL) {
        baton__member__free_unpacked(m, NULL);
    }
    free(kind);
    free(name);
}

static void on_delete(void *arg, const char *key)
{
    struct bt_member_table *t = arg;
    char *kind, *name;
    if (!split_key(t, key, &kind, &name)) {
        return;
    }
    if (t->ops.on_down != NULL) {
        t->ops.on_down(t->arg, kind, name);
    }
    free(kind);
    free(name);
}

struct bt_member_table *bt_member_watch(struct bt_etcd *e, const char *cluster, const char *kind,
                                        const struct bt_member_table_ops *ops, void *arg)
{
    static const struct bt_etcd_watch_ops watch_ops = {.on_put = on_put, .on_delete = on_delete};
    struct bt_member_table *t = bt_calloc(1, sizeof(*t));
    t->ops = *ops;
    t->arg = arg;
    char *root = bt_sprintf("/baton/%s/members/", cluster);
    char *prefix = kind == NULL ? bt_strdup(root) : bt_sprintf("%s%s/", root, kind);
    t->root_len = strlen(root);
    t->watch = bt_etcd_watch_start(e, prefix, &watch_ops, t);
    free(prefix);
    free(root);
    return t;
}

void bt_member_unwatch(struct bt_member_table *t)
{
    if (t != NULL) {
        bt_etcd_watch_stop(t->watch);
        free(t);
    }
}
