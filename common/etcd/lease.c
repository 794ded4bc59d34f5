/* A lease. It is kept alive over a stream every third of its time, and granted again after etcd
 * reports that it has expired. If etcd does not answer, the lease does not count as lost. Loop's
 * thread. */
#include <stdlib.h>

#include "common/etcd/etcd_priv.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"

#define BEAT_MIN_MS 300

struct bt_etcd_lease {
    struct bt_etcd *e;
    struct bt_list link; /* e->leases */
    int64_t ttl_s, id;   /* id 0: none */
    struct bt_etcd_lease_ops ops;
    void *arg;
    struct bt_rpc_stream *stream; /* NULL: none */
    size_t stream_ep;
    uint64_t unanswered_ns; /* when the oldest unanswered keepalive was sent; 0: none */
    uint64_t backoff_ms;
    struct bt_timer timer; /* next grant, next stream or next beat */
    bool granting, stopped;
};

static void grant(void *arg);
static void open_stream(void *arg);
static void beat(void *arg);

static uint64_t beat_ms(const struct bt_etcd_lease *l)
{
    return BT_MAX((uint64_t)l->ttl_s * 1000 / 3, (uint64_t)BEAT_MIN_MS);
}

static void again(struct bt_etcd_lease *l, bt_loop_fn fn)
{
    bt_timer_start(l->e->loop, &l->timer, bt_etcd_backoff(&l->backoff_ms), 0, fn, l);
}

static void drop_stream(struct bt_etcd_lease *l)
{
    if (l->stream != NULL) {
        bt_rpc_stream_close(l->stream, BT_GRPC_OK, "", false);
        l->stream = NULL;
    }
    l->unanswered_ns = 0;
}

/* etcd reports that the lease has expired. The owner may stop the lease inside on_lost, so the
 * timer starts the new grant. */
static void lost(struct bt_etcd_lease *l)
{
    BT_WARN("etcd_lease_lost", "lease=%llx why=%s", (unsigned long long)l->id,
            "etcd or this process stood still for longer than the lease; a new one is asked for");
    l->id = 0;
    drop_stream(l);
    bt_timer_start(l->e->loop, &l->timer, 0, 0, grant, l);
    if (l->ops.on_lost != NULL) {
        l->ops.on_lost(l->arg);
    }
}

/* ---- keepalive ---- */

static void on_alive(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct bt_etcd_lease *l = arg;
    (void)s;
    char why[256];
    Etcdserverpb__LeaseKeepAliveResponse *r = bt_alive_response_unpack(data, len, why, sizeof(why));
    if (r == NULL) {
        BT_WARN("etcd_bad_reply", "what=keepalive len=%zu why=%s", len, why);
        drop_stream(l);
        again(l, open_stream);
        return;
    }
    int64_t id = r->id, ttl = r->ttl;
    etcdserverpb__lease_keep_alive_response__free_unpacked(r, NULL);
    if (id != l->id) {
        return; /* the answer is for an earlier lease */
    }
    bt_etcd_note(l->e, l->stream_ep, false, "");
    l->unanswered_ns = 0;
    l->backoff_ms = 0;
    if (ttl <= 0) {
        lost(l);
    }
}

static void on_stream_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct bt_etcd_lease *l = arg;
    (void)s;
    l->stream = NULL;
    l->unanswered_ns = 0;
    if (l->e->dying) {
        return;
    }
    if (code == BT_GRPC_NOT_FOUND) {
        lost(l);
        return;
    }
    bt_etcd_note(l->e, l->stream_ep, true, detail);
    again(l, open_stream);
}

static void open_stream(void *arg)
{
    static const struct bt_rpc_stream_ops ops = {.on_message = on_alive,
                                                 .on_close = on_stream_close};
    struct bt_etcd_lease *l = arg;
    l->stream_ep = l->e->cur;
    bt_status_t st =
        bt_rpc_stream_open(l->e->eps[l->stream_ep].ch, "/etcdserverpb.Lease/LeaseKeepAlive", false,
                           &ops, l, &l->stream);
    if (st == BT_OK) {
        beat(l);
    }
}

static void beat(void *arg)
{
    struct bt_etcd_lease *l = arg;
    uint64_t now = bt_mono_ns();
    if (l->unanswered_ns != 0) {
        /* No answer for a whole interval: the endpoint hangs. Try the next one (or the same one
         * again). */
        drop_stream(l);
        bt_etcd_note(l->e, l->stream_ep, true, "no answer to a keepalive");
        again(l, open_stream);
        return;
    }
    Etcdserverpb__LeaseKeepAliveRequest req = ETCDSERVERPB__LEASE_KEEP_ALIVE_REQUEST__INIT;
    req.id = l->id;
    l->unanswered_ns = now;
    bt_status_t st = bt_rpc_stream_send_pb(l->stream, &req.base);
    if (st != BT_OK) {
        BT_DEBUG("etcd_keepalive", "status=%s", bt_status_name(st)); /* on_close follows */
    }
    bt_timer_start(l->e->loop, &l->timer, beat_ms(l), 0, beat, l);
}

/* ---- grant ---- */

/* The id of the lease in a reply; 0 with *st_p changed: none. */
static int64_t granted(const void *data, size_t len, bt_status_t *st_p, uint64_t *term_p)
{
    int64_t id = 0;
    *term_p = 0;
    if (*st_p == BT_OK) {
        char why[256] = "the answer grants no lease";
        Etcdserverpb__LeaseGrantResponse *r = bt_grant_response_unpack(data, len, why, sizeof(why));
        if (r == NULL || r->id == 0) {
            BT_WARN("etcd_bad_reply", "what=grant len=%zu why=%s", len, why);
            *st_p = BT_ERR_PEER_PROTOCOL;
        } else {
            id = r->id;
            *term_p = r->header != NULL ? r->header->raft_term : 0;
        }
        if (r != NULL) {
            etcdserverpb__lease_grant_response__free_unpacked(r, NULL);
        }
    }
    return id;
}

static void on_grant(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct bt_etcd_lease *l = arg;
    uint64_t term;
    int64_t id = granted(data, len, &st, &term);
    l->granting = false;
    if (l->stopped) {
        if (id != 0) {
            bt_etcd_revoke(l->e, id);
        }
        free(l);
        return;
    }
    if (st == BT_ERR_CANCELLED && l->e->dying) {
        return;
    }
    if (st != BT_OK) {
        again(l, grant);
        return;
    }
    l->id = id;
    l->backoff_ms = 0;
    open_stream(l);
    if (l->ops.on_granted != NULL) {
        l->ops.on_granted(l->arg, id);
    }
}

static void grant(void *arg)
{
    struct bt_etcd_lease *l = arg;
    Etcdserverpb__LeaseGrantRequest req = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    req.ttl = l->ttl_s;
    l->granting = true;
    bt_etcd_call(l->e, "/etcdserverpb.Lease/LeaseGrant", &req.base, on_grant, l);
}

struct once { /* a lease that is not kept alive */
    bt_etcd_grant_fn done;
    void *arg;
};

static void on_granted_once(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct once *o = arg;
    uint64_t term;
    int64_t id = granted(data, len, &st, &term);
    o->done(o->arg, st, id, term);
    free(o);
}

void bt_etcd_grant(struct bt_etcd *e, int64_t ttl_s, bt_etcd_grant_fn done, void *arg)
{
    Etcdserverpb__LeaseGrantRequest req = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    struct once *o = bt_calloc(1, sizeof(*o));
    o->done = done;
    o->arg = arg;
    req.ttl = ttl_s;
    bt_etcd_call(e, "/etcdserverpb.Lease/LeaseGrant", &req.base, on_granted_once, o);
}

/* ---- remaining time of a lease ---- */

struct asked {
    bt_etcd_lease_time_fn done;
    void *arg;
};

static void on_time(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct asked *a = arg;
    struct bt_etcd_lease_time t = {0};
    if (st == BT_OK) {
        char why[256] = "the answer gives the lease more time than was granted";
        Etcdserverpb__LeaseTimeToLiveResponse *r =
            bt_time_response_unpack(data, len, why, sizeof(why));
        if (r == NULL || r->header == NULL || r->grantedttl < r->ttl) {
            BT_WARN("etcd_bad_reply", "what=lease_time len=%zu why=%s", len, why);
            st = BT_ERR_PEER_PROTOCOL;
        } else if (r->ttl < 0) {
            st = BT_ERR_NOT_FOUND;
        } else {
            t.granted_s = (uint64_t)r->grantedttl;
            t.left_s = (uint64_t)r->ttl;
            t.raft_term = r->header->raft_term;
        }
        if (r != NULL) {
            etcdserverpb__lease_time_to_live_response__free_unpacked(r, NULL);
        }
    }
    a->done(a->arg, st, st == BT_OK ? &t : NULL);
    free(a);
}

void bt_etcd_lease_time(struct bt_etcd *e, int64_t lease, bt_etcd_lease_time_fn done, void *arg)
{
    Etcdserverpb__LeaseTimeToLiveRequest req = ETCDSERVERPB__LEASE_TIME_TO_LIVE_REQUEST__INIT;
    struct asked *a = bt_calloc(1, sizeof(*a));
    a->done = done;
    a->arg = arg;
    req.id = lease;
    bt_etcd_call(e, "/etcdserverpb.Lease/LeaseTimeToLive", &req.base, on_time, a);
}

/* ---- start and end ---- */

struct bt_etcd_lease *bt_etcd_lease_start(struct bt_etcd *e, int64_t ttl_s,
                                          const struct bt_etcd_lease_ops *ops, void *arg)
{
    struct bt_etcd_lease *l = bt_calloc(1, sizeof(*l));
    l->e = e;
    l->ttl_s = ttl_s;
    l->ops = *ops;
    l->arg = arg;
    bt_list_insert_tail(&e->leases, &l->link);
    grant(l);
    return l;
}

void bt_etcd_lease_stop(struct bt_etcd_lease *l)
{
    if (l == NULL) {
        return;
    }
    bt_list_remove(&l->link);
    bt_timer_stop(l->e->loop, &l->timer);
    drop_stream(l);
    if (l->id != 0) {
        bt_etcd_revoke(l->e, l->id);
    }
    if (l->granting) {
        l->stopped = true; /* on_grant revokes and frees */
    } else {
        free(l);
    }
}

void bt_etcd_lease_end(struct bt_list *link)
{
    bt_etcd_lease_stop(BT_CONTAINER_OF(link, struct bt_etcd_lease, link));
}
