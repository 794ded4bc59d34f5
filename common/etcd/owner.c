/* Owning a job. The compare-and-swap only tries to get it; the watch reports who has it. So an
 * answer that is lost changes nothing. Loop's thread. */
#include "common/etcd/owner.h"

#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"

#define RETRY_MS 1000

struct bt_owner {
    struct bt_etcd *e;
    struct bt_etcd_lease *lease;
    struct bt_etcd_watch *watch;
    struct bt_timer retry;
    struct bt_owner_ops ops;
    void *arg;
    char *key, *name;
    int64_t lease_id;
    bool synced, taken, owner, busy, stopped;
    bool again; /* a new try was wanted before the last try was answered */
};

static void attempt(void *arg);

static void owner_free(struct bt_owner *o)
{
    free(o->key);
    free(o->name);
    free(o);
}

static void lose(struct bt_owner *o)
{
    if (o->owner) {
        o->owner = false;
        BT_INFO("job_lost", "key=%s", o->key);
        o->ops.on_lost(o->arg);
    }
}

static void on_swapped(void *arg, bt_status_t st, bool succeeded, const struct bt_etcd_kv *cur)
{
    struct bt_owner *o = arg;
    (void)succeeded;
    (void)cur;
    o->busy = false;
    if (o->stopped) {
        owner_free(o);
    } else if (st == BT_OK && o->again) {
        attempt(o);
    } else if (st != BT_OK && !o->taken) {
        bt_timer_start(bt_etcd_loop(o->e), &o->retry, RETRY_MS, 0, attempt, o);
    }
}

static void attempt(void *arg)
{
    struct bt_owner *o = arg;
    o->again = o->busy; /* the watch may be earlier than the answer */
    if (!o->busy && o->synced && !o->taken && o->lease_id != 0) {
        o->busy = true;
        bt_etcd_cas(o->e, o->key, 0, o->name, strlen(o->name), o->lease_id, on_swapped, o);
    }
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_owner *o = arg;
    if (strcmp(kv->key, o->key) != 0) {
        return;
    }
    o->taken = true;
    bool ours = o->lease_id != 0 && kv->lease == o->lease_id;
    if (!ours) {
        lose(o);
    } else if (!o->owner) {
        o->owner = true;
        BT_INFO("job_owned", "key=%s epoch=%lld", o->key, (long long)kv->mod_revision);
        o->ops.on_owner(o->arg, kv->mod_revision);
    }
}

static void on_delete(void *arg, const char *key)
{
    struct bt_owner *o = arg;
    if (strcmp(key, o->key) == 0) {
        o->taken = false;
        lose(o);
        attempt(o);
    }
}

static void on_synced(void *arg)
{
    struct bt_owner *o = arg;
    o->synced = true;
    attempt(o);
}

static void on_granted(void *arg, int64_t lease)
{
    struct bt_owner *o = arg;
    o->lease_id = lease;
    attempt(o);
}

static void on_lost(void *arg)
{
    struct bt_owner *o = arg;
    o->lease_id = 0;
    lose(o);
}

struct bt_owner *bt_owner_start(struct bt_etcd *e, const char *key, const char *name, int64_t ttl_s,
                                const struct bt_owner_ops *ops, void *arg)
{
    static const struct bt_etcd_lease_ops lease_ops = {.on_granted = on_granted,
                                                       .on_lost = on_lost};
    static const struct bt_etcd_watch_ops watch_ops = {
        .on_put = on_put, .on_delete = on_delete, .on_synced = on_synced};
    struct bt_owner *o = bt_calloc(1, sizeof(*o));
    o->e = e;
    o->ops = *ops;
    o->arg = arg;
    o->key = bt_strdup(key);
    o->name = bt_strdup(name);
    o->lease = bt_etcd_lease_start(e, ttl_s, &lease_ops, o);
    o->watch = bt_etcd_watch_start(e, key, &watch_ops, o);
    return o;
}

void bt_owner_stop(struct bt_owner *o)
{
    if (o == NULL) {
        return;
    }
    bt_timer_stop(bt_etcd_loop(o->e), &o->retry);
    bt_etcd_watch_stop(o->watch);
    /* Revokes it: the key is deleted, so the next owner need not wait. */
    bt_etcd_lease_stop(o->lease);
    o->stopped = true;
    if (!o->busy) {
        owner_free(o);
    }
}
