/* A small etcd v3 client on common/rpc: lease with keepalive, put, range, compare-and-swap, watch
 * of a prefix that resumes by itself. Callbacks run on the loop's thread. All endpoints are tried
 * in turn; a lost etcd is retried for ever with backoff (serving goes on without it). */
#ifndef BT_ETCD_ETCD_H
#define BT_ETCD_ETCD_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/rpc/rpc.h"

struct bt_etcd;
struct bt_etcd_lease;
struct bt_etcd_watch;

struct bt_etcd_kv {
    const char *key; /* NUL-terminated copy */
    const void *value;
    size_t value_len;
    int64_t mod_revision; /* 0: does not exist */
    int64_t lease;
};

/* endpoints: host:port, or https://host:port, for which tls is used (it outlives e; NULL: such an
 * endpoint is ERR_CONFIG). ERR_INVALID: there is none, or one that cannot be dialed. */
bt_status_t bt_etcd_create(struct bt_rpc *rpc, char *const *endpoints, struct bt_tls *tls,
                           struct bt_etcd **e_p) BT_MUST_CHECK;
/* Ends everything that is still open. Watches and leases end without callbacks (and their handles
 * with them); pending calls end with ERR_CANCELLED before this returns. Leases that were stopped
 * are revoked. If etcd hangs this waits up to half a second for each. */
void bt_etcd_destroy(struct bt_etcd *e);
struct bt_loop *bt_etcd_loop(const struct bt_etcd *e);

typedef void (*bt_etcd_put_fn)(void *arg, bt_status_t st);
typedef void (*bt_etcd_range_fn)(void *arg, bt_status_t st, const struct bt_etcd_kv *kvs, size_t n,
                                 int64_t revision);
/* cas: if it succeeded, current has the key's new mod_revision; if not, current is the present
 * value (mod_revision 0 if the key is absent). current is NULL when st is not OK. */
typedef void (*bt_etcd_cas_fn)(void *arg, bt_status_t st, bool succeeded,
                               const struct bt_etcd_kv *current);

/* Unary calls copy their arguments and call done once, later (bt_etcd_destroy: before it returns).
 * The arguments of done are valid during the call. Deadline 3 s; ERR_TIMEOUT or ERR_UNAVAILABLE
 * when no endpoint answered. lease: 0: none. */
void bt_etcd_put(struct bt_etcd *e, const char *key, const void *value, size_t len, int64_t lease,
                 bt_etcd_put_fn done, void *arg);
void bt_etcd_delete(struct bt_etcd *e, const char *key, bt_etcd_put_fn done, void *arg);
void bt_etcd_range_prefix(struct bt_etcd *e, const char *prefix, bt_etcd_range_fn done, void *arg);
/* Puts (key, value, lease) iff the key's mod_revision equals expect (0: iff it does not exist). */
void bt_etcd_cas(struct bt_etcd *e, const char *key, int64_t expect, const void *value, size_t len,
                 int64_t lease, bt_etcd_cas_fn done, void *arg);

/* Writes all of sets if and only if each key of expects has that mod_revision (0: it does not
 * exist). Copies its arguments. */
struct bt_etcd_expect {
    const char *key;
    int64_t revision;
};
struct bt_etcd_set {
    const char *key;
    const void *value;
    size_t len;
};
typedef void (*bt_etcd_swap_fn)(void *arg, bt_status_t st, bool succeeded);
#define BT_ETCD_SWAP_MAX 4 /* of each */
void bt_etcd_swap(struct bt_etcd *e, const struct bt_etcd_expect *expects, size_t n_expects,
                  const struct bt_etcd_set *sets, size_t n_sets, bt_etcd_swap_fn done, void *arg);

/* A lease without keepalive: its keys are removed when ttl_s have passed. raft_term: of the etcd
 * that granted it. */
typedef void (*bt_etcd_grant_fn)(void *arg, bt_status_t st, int64_t lease, uint64_t raft_term);
void bt_etcd_grant(struct bt_etcd *e, int64_t ttl_s, bt_etcd_grant_fn done, void *arg);
/* The time that etcd has counted for a lease, by a monotonic clock. When its leader changes
 * it counts anew from the whole time; then raft_term is another. */
struct bt_etcd_lease_time {
    uint64_t granted_s, left_s;
    uint64_t raft_term;
};
/* t: valid during the call; NULL if st != OK. ERR_NOT_FOUND: there is no such lease (any more). */
typedef void (*bt_etcd_lease_time_fn)(void *arg, bt_status_t st,
                                      const struct bt_etcd_lease_time *t);
void bt_etcd_lease_time(struct bt_etcd *e, int64_t lease, bt_etcd_lease_time_fn done, void *arg);
/* Ends a lease and removes its keys; best effort. */
void bt_etcd_revoke(struct bt_etcd *e, int64_t lease);

/* A lease that is kept alive every ttl/3. on_granted: the first grant and each new grant after a
 * loss (the owner writes its keys again). on_lost: etcd reports that the lease is gone (TTL=0);
 * that etcd is unreachable is no loss. */
struct bt_etcd_lease_ops {
    void (*on_granted)(void *arg, int64_t lease);
    void (*on_lost)(void *arg);
};
/* ttl_s: how long it lives without keepalive. ops is copied; no callback comes before this has
 * returned. */
struct bt_etcd_lease *bt_etcd_lease_start(struct bt_etcd *e, int64_t ttl_s,
                                          const struct bt_etcd_lease_ops *ops, void *arg);
/* Revokes, best effort, and frees; no callback. NULL: nothing happens. */
void bt_etcd_lease_stop(struct bt_etcd_lease *l);

/* Watches all keys with a prefix: first a listing (one on_put per key, then on_synced), then
 * changes; after compaction or a lost stream it lists again and reports what differs (on_delete for
 * vanished keys), so the owner's table is right without knowing. */
struct bt_etcd_watch_ops {
    void (*on_put)(void *arg, const struct bt_etcd_kv *kv);
    void (*on_delete)(void *arg, const char *key);
    void (*on_synced)(void *arg); /* after each listing */
};
/* Prefix and ops are copied. kv and key of the callbacks are valid during the call. */
struct bt_etcd_watch *bt_etcd_watch_start(struct bt_etcd *e, const char *prefix,
                                          const struct bt_etcd_watch_ops *ops, void *arg);
void bt_etcd_watch_stop(struct bt_etcd_watch *w); /* no callback comes any more; NULL is fine */

#endif
