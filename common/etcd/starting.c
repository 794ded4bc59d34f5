/* Daemons that start; see starting.h. */
#include "common/etcd/starting.h"

#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/ranges.h"

#define LEASE_S 10

static char *prefix_of(const char *cluster)
{
    return bt_sprintf("/baton/%s/starting/", cluster);
}

/* ---- this process's record ---- */

struct bt_starting {
    struct bt_etcd *e;
    struct bt_etcd_lease *lease;
    int64_t lease_id; /* 0: not granted */
    Baton__Starting *self;
    char *key;
    bool busy;  /* a put is in flight */
    bool again; /* there is something newer to say */
    bool ended;
};

static void starting_free(struct bt_starting *s)
{
    baton__starting__free_unpacked(s->self, NULL);
    free(s->key);
    free(s);
}

static void put(struct bt_starting *s);

static void on_written(void *arg, bt_status_t st)
{
    struct bt_starting *s = arg;
    s->busy = false;
    if (s->ended) {
        starting_free(s);
    } else if (s->again && st == BT_OK) {
        put(s);
    }
}

static void put(struct bt_starting *s)
{
    s->again = s->busy;
    if (s->busy || s->lease_id == 0) {
        return;
    }
    size_t len = baton__starting__get_packed_size(s->self);
    uint8_t *data = bt_malloc(len + 1);
    baton__starting__pack(s->self, data);
    s->busy = true;
    bt_etcd_put(s->e, s->key, data, len, s->lease_id, on_written, s);
    free(data);
}

static void on_granted(void *arg, int64_t lease)
{
    struct bt_starting *s = arg;
    s->lease_id = lease;
    put(s);
}

static void on_lost(void *arg)
{
    struct bt_starting *s = arg;
    s->lease_id = 0;
}

struct bt_starting *bt_starting_begin(struct bt_etcd *e, const char *cluster,
                                      const Baton__Starting *self)
{
    static const struct bt_etcd_lease_ops ops = {.on_granted = on_granted, .on_lost = on_lost};
    struct bt_starting *s = bt_calloc(1, sizeof(*s));
    char *prefix = prefix_of(cluster);
    size_t len = baton__starting__get_packed_size(self);
    uint8_t *data = bt_malloc(len + 1);
    baton__starting__pack(self, data);
    s->e = e;
    char why[256];
    s->self = bt_starting_unpack(data, len, why, sizeof(why));
    BT_ASSERT(s->self != NULL);
    s->key = bt_sprintf("%s%s/%s", prefix, self->kind, self->name);
    s->lease = bt_etcd_lease_start(e, LEASE_S, &ops, s);
    free(data);
    free(prefix);
    return s;
}

void bt_starting_say(struct bt_starting *s, const char *what, uint32_t percent)
{
    if (strcmp(s->self->what, what) == 0 && s->self->percent == percent) {
        return;
    }
    free(s->self->what);
    s->self->what = bt_strdup(what);
    s->self->percent = percent;
    put(s);
}

void bt_starting_end(struct bt_starting *s)
{
    if (s == NULL) {
        return;
    }
    bt_etcd_lease_stop(s->lease); /* removes the key */
    s->ended = true;
    if (!s->busy) {
        starting_free(s);
    }
}

/* ---- what all say ---- */

struct row {
    char *key;
    Baton__Starting *record;
};

struct bt_starting_table {
    struct bt_etcd_watch *watch;
    struct row *rows;
    size_t n;
    bool full_said;
};

static size_t find(const struct bt_starting_table *t, const char *key)
{
    size_t i = 0;
    while (i < t->n && strcmp(t->rows[i].key, key) != 0) {
        i++;
    }
    return i;
}

static void drop(struct bt_starting_table *t, size_t i)
{
    free(t->rows[i].key);
    baton__starting__free_unpacked(t->rows[i].record, NULL);
    t->rows[i] = t->rows[--t->n];
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_starting_table *t = arg;
    char why[256];
    Baton__Starting *record = bt_starting_unpack(kv->value, kv->value_len, why, sizeof(why));
    size_t i = find(t, kv->key);
    if (i < t->n) {
        drop(t, i);
    }
    if (record == NULL) {
        BT_WARN("etcd_record", "key=%s why=%s", kv->key, why);
        return;
    }
    if (t->n == BT_STARTING_MAX) {
        baton__starting__free_unpacked(record, NULL);
        if (!t->full_said) {
            BT_WARN("starting_full", "max=%d", BT_STARTING_MAX);
            t->full_said = true;
        }
        return;
    }
    t->rows = bt_realloc(t->rows, (t->n + 1) * sizeof(*t->rows));
    t->rows[t->n++] = (struct row){.key = bt_strdup(kv->key), .record = record};
}

static void on_delete(void *arg, const char *key)
{
    struct bt_starting_table *t = arg;
    size_t i = find(t, key);
    if (i < t->n) {
        drop(t, i);
    }
}

struct bt_starting_table *bt_starting_watch(struct bt_etcd *e, const char *cluster)
{
    static const struct bt_etcd_watch_ops ops = {.on_put = on_put, .on_delete = on_delete};
    struct bt_starting_table *t = bt_calloc(1, sizeof(*t));
    char *prefix = prefix_of(cluster);
    t->watch = bt_etcd_watch_start(e, prefix, &ops, t);
    free(prefix);
    return t;
}

void bt_starting_unwatch(struct bt_starting_table *t)
{
    if (t == NULL) {
        return;
    }
    bt_etcd_watch_stop(t->watch);
    while (t->n > 0) {
        drop(t, t->n - 1);
    }
    free(t->rows);
    free(t);
}

size_t bt_starting_count(const struct bt_starting_table *t)
{
    return t->n;
}

const Baton__Starting *bt_starting_at(const struct bt_starting_table *t, size_t i)
{
    return t->rows[i].record;
}
