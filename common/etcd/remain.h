/* How long a record lasts that was written under a lease which nobody keeps alive, where its time
 * is elapsed time: a wall clock that is set, here or on another host, neither ends it nor lets it
 * last. Who sees it written counts for himself. Who comes later (a restart) asks etcd, which has
 * counted; only where etcd has lost count as well (its leader has changed since) the wall clock is
 * what is left. Loop thread. */
#ifndef BT_ETCD_REMAIN_H
#define BT_ETCD_REMAIN_H

#include "common/etcd/etcd.h"

struct bt_remain;

struct bt_remain_term {  /* what the record says */
    uint64_t ttl_ms;     /* from its writing on */
    uint64_t expires_ns; /* the same by the wall clock of who wrote it */
    uint64_t raft_term;  /* of etcd when it granted the lease */
};

/* ms that are left of it by what etcd says of its lease, up to a second more (etcd counts in
 * seconds). wall_ns: now. Pure. */
uint64_t bt_remain_left_ms(const struct bt_remain_term *r, const struct bt_etcd_lease_time *t,
                           uint64_t wall_ns);

/* It ends earlier than bt_remain_follow has said: at ends_ns (bt_mono_ns). */
typedef void (*bt_remain_fn)(void *arg, uint64_t id, uint64_t ends_ns);
struct bt_remain *bt_remain_create(struct bt_etcd *e, bt_remain_fn fn, void *arg);
void bt_remain_destroy(struct bt_remain *m); /* before bt_etcd_destroy; NULL: nothing happens */
/* A record has come, or another one under its id. Returns when it ends (bt_mono_ns) if it was
 * written just now, and asks etcd, until it answers, if that was earlier: then fn is called. */
uint64_t bt_remain_follow(struct bt_remain *m, uint64_t id, int64_t lease,
                          const struct bt_remain_term *r);
/* It is gone; nothing happens if it is not known. */
void bt_remain_forget(struct bt_remain *m, uint64_t id);

#endif
