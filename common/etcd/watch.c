/* A watch of a prefix: lists the keys, then follows from the next revision. A lost stream continues
 * where it was. After a compaction (or if etcd has another history) it lists again, and reports the
 * differences from its table of known keys. Loop's thread. */
#include <stdlib.h>
#include <string.h>

#include "common/etcd/etcd_priv.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"

struct known {
    char *key;
    int64_t mod_revision;
    bool seen; /* found by the current listing */
};

struct bt_etcd_watch {
    struct bt_etcd *e;
    struct bt_list link; /* e->watches */
    uint32_t refs;       /* one for the owner, one for each callback or call in progress */
    bool stopped;
    char *prefix;
    struct bt_etcd_watch_ops ops;
    void *arg;
    struct known *known; /* sorted by key */
    size_t n_known, cap_known;
    int64_t next_revision;
    struct bt_rpc_stream *stream;
    size_t stream_ep;
    uint64_t backoff_ms;
    struct bt_timer timer;
};

static void list(void *arg);
static void follow(void *arg);

static void watch_put(struct bt_etcd_watch *w)
{
    if (--w->refs > 0) {
        return;
    }
    for (size_t i = 0; i < w->n_known; i++) {
        free(w->known[i].key);
    }
    free(w->known);
    free(w->prefix);
    free(w);
}

static void again(struct bt_etcd_watch *w, bt_loop_fn fn)
{
    bt_timer_start(w->e->loop, &w->timer, bt_etcd_backoff(&w->backoff_ms), 0, fn, w);
}

static void drop_stream(struct bt_etcd_watch *w)
{
    if (w->stream != NULL) {
        bt_rpc_stream_close(w->stream, BT_GRPC_OK, "", false);
        w->stream = NULL;
    }
}

/* ---- the table of keys that the owner knows ---- */

/* Position of key, or the position for inserting it; *found_p tells which. */
static size_t find(const struct bt_etcd_watch *w, const char *key, bool *found_p)
{
    size_t lo = 0, hi = w->n_known;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(w->known[mid].key, key);
        if (c == 0) {
            *found_p = true;
            return mid;
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    *found_p = false;
    return lo;
}

/* Tells the owner about a key unless it knows this revision of the key. */
static void learn(struct bt_etcd_watch *w, const struct bt_etcd_kv *kv)
{
    bool found;
    size_t i = find(w, kv->key, &found);
    if (!found) {
        if (w->n_known == w->cap_known) {
            w->cap_known = BT_MAX(w->cap_known * 2, (size_t)16);
            w->known = bt_realloc(w->known, w->cap_known * sizeof(w->known[0]));
        }
        memmove(&w->known[i + 1], &w->known[i], (w->n_known - i) * sizeof(w->known[0]));
        w->n_known++;
        w->known[i] = (struct known){.key = bt_strdup(kv->key)};
    }
    bool news = !found || w->known[i].mod_revision != kv->mod_revision;
    w->known[i].mod_revision = kv->mod_revision;
    w->known[i].seen = true;
    if (news && !w->stopped && w->ops.on_put != NULL) {
        w->ops.on_put(w->arg, kv);
    }
}

static void forget_at(struct bt_etcd_watch *w, size_t i)
{
    char *key = w->known[i].key;
    w->n_known--;
    memmove(&w->known[i], &w->known[i + 1], (w->n_known - i) * sizeof(w->known[0]));
    if (!w->stopped && w->ops.on_delete != NULL) {
        w->ops.on_delete(w->arg, key);
    }
    free(key);
}

/* ---- listing ---- */

static void on_list(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                    int64_t revision)
{
    struct bt_etcd_watch *w = arg;
    if (!w->stopped && st != BT_OK && !w->e->dying) {
        again(w, list);
    }
    if (w->stopped || st != BT_OK) {
        watch_put(w);
        return;
    }
    w->backoff_ms = 0;
    w->next_revision = bt_etcd_after(revision);
    for (size_t i = 0; i < w->n_known; i++) {
        w->known[i].seen = false;
    }
    for (size_t i = 0; i < n && !w->stopped; i++) {
        learn(w, &kvs[i]);
    }
    for (size_t i = 0; i < w->n_known && !w->stopped;) {
        if (w->known[i].seen) {
            i++;
        } else {
            forget_at(w, i);
        }
    }
    if (!w->stopped && w->ops.on_synced != NULL) {
        w->ops.on_synced(w->arg);
    }
    if (!w->stopped) {
        follow(w);
    }
    watch_put(w);
}

static void list(void *arg)
{
    struct bt_etcd_watch *w = arg;
    w->refs++;
    bt_etcd_range_prefix(w->e, w->prefix, on_list, w);
}

/* ---- following ---- */

static void on_event(struct bt_etcd_watch *w, const Etcdserverpb__Event *ev)
{
    struct bt_etcd_kv kv;
    if (ev->kv == NULL) {
        return;
    }
    int64_t rev = ev->kv->mod_revision;
    if (rev >= w->next_revision) {
        w->next_revision = bt_etcd_after(rev);
    }
    if (!bt_etcd_kv_open(ev->kv, &kv)) {
        return;
    }
    if (ev->type == ETCDSERVERPB__EVENT__EVENT_TYPE__DELETE) {
        bool found;
        size_t i = find(w, kv.key, &found);
        if (found && w->known[i].mod_revision < rev) {
            forget_at(w, i);
        }
    } else {
        learn(w, &kv);
    }
    bt_etcd_kv_close(&kv);
}

/* Returns false if the table cannot follow the stream's history. */
static bool usable(struct bt_etcd_watch *w, const Etcdserverpb__WatchResponse *r)
{
    int64_t revision = r->header == NULL ? 0 : r->header->revision;
    if (r->compact_revision > 0) {
        BT_INFO("etcd_watch_compacted", "prefix=%s compacted=%lld wanted=%lld", w->prefix,
                (long long)r->compact_revision, (long long)w->next_revision);
        return false;
    }
    if (r->canceled) {
        BT_WARN("etcd_watch_cancelled", "prefix=%s why=%s", w->prefix,
                r->cancel_reason == NULL ? "" : r->cancel_reason);
        return false;
    }
    if (r->created && bt_etcd_after(revision) < w->next_revision) {
        BT_WARN("etcd_history_lost", "prefix=%s revision=%lld seen=%lld why=%s", w->prefix,
                (long long)revision, (long long)w->next_revision - 1,
                "etcd was restored or replaced; the keys are read again");
        return false;
    }
    return true;
}

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct bt_etcd_watch *w = arg;
    (void)s;
    char why[256];
    Etcdserverpb__WatchResponse *r = bt_watch_response_unpack(data, len, why, sizeof(why));
    if (r == NULL) {
        BT_WARN("etcd_bad_reply", "what=watch len=%zu why=%s", len, why);
        drop_stream(w);
        again(w, list);
        return;
    }
    w->refs++;
    bt_etcd_note(w->e, w->stream_ep, false, "");
    if (!usable(w, r)) {
        drop_stream(w);
        again(w, list);
    } else {
        w->backoff_ms = 0;
        for (size_t i = 0; i < r->n_events && !w->stopped; i++) {
            on_event(w, r->events[i]);
        }
        if (r->n_events == 0 && !r->created && r->header != NULL) {
            /* A progress report: up to here there was no change under the prefix. */
            w->next_revision = BT_MAX(w->next_revision, bt_etcd_after(r->header->revision));
        }
    }
    etcdserverpb__watch_response__free_unpacked(r, NULL);
    watch_put(w);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct bt_etcd_watch *w = arg;
    (void)s;
    (void)code;
    w->stream = NULL;
    if (!w->e->dying) {
        bt_etcd_note(w->e, w->stream_ep, true, detail);
        again(w, follow);
    }
}

static void follow(void *arg)
{
    static const struct bt_rpc_stream_ops ops = {.on_message = on_message, .on_close = on_close};
    struct bt_etcd_watch *w = arg;
    w->stream_ep = w->e->cur;
    if (bt_rpc_stream_open(w->e->eps[w->stream_ep].ch, "/etcdserverpb.Watch/Watch", false, &ops, w,
                           &w->stream) != BT_OK) {
        return; /* happens only while the client is being destroyed */
    }
    Etcdserverpb__WatchRequest req = ETCDSERVERPB__WATCH_REQUEST__INIT;
    Etcdserverpb__WatchCreateRequest create = ETCDSERVERPB__WATCH_CREATE_REQUEST__INIT;
    size_t end_len;
    uint8_t *end = bt_etcd_prefix_end(w->prefix, &end_len);
    create.key = bt_etcd_bytes(w->prefix, w->prefix[0] == '\0' ? 1 : strlen(w->prefix));
    create.range_end = bt_etcd_bytes(end, end_len);
    create.start_revision = w->next_revision;
    create.progress_notify = true;
    req.request_union_case = ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_CREATE_REQUEST;
    req.create_request = &create;
    bt_status_t st = bt_rpc_stream_send_pb(w->stream, &req.base);
    BT_ASSERT(st == BT_OK); /* the first message of a stream is always accepted */
    free(end);
}

/* ---- start and end ---- */

struct bt_etcd_watch *bt_etcd_watch_start(struct bt_etcd *e, const char *prefix,
                                          const struct bt_etcd_watch_ops *ops, void *arg)
{
    struct bt_etcd_watch *w = bt_calloc(1, sizeof(*w));
    w->e = e;
    w->refs = 1;
    w->prefix = bt_strdup(prefix);
    w->ops = *ops;
    w->arg = arg;
    bt_list_insert_tail(&e->watches, &w->link);
    list(w);
    return w;
}

void bt_etcd_watch_stop(struct bt_etcd_watch *w)
{
    if (w == NULL) {
        return;
    }
    w->stopped = true;
    bt_list_remove(&w->link);
    bt_timer_stop(w->e->loop, &w->timer);
    drop_stream(w);
    watch_put(w);
}

void bt_etcd_watch_end(struct bt_list *link)
{
    bt_etcd_watch_stop(BT_CONTAINER_OF(link, struct bt_etcd_watch, link));
}
