/* How long a record lasts that was written under a lease without keepalive. Its time is elapsed
 * time: setting a wall clock, here or on another host, neither ends nor extends it. A daemon that
 * sees the record being written counts by itself. A daemon that comes later (after a restart) asks
 * etcd, which has counted. Only if etcd has lost its count too (its leader has changed since) the
 * wall clock is used. Loop thread. */
#ifndef BT_ETCD_REMAIN_H
#define BT_ETCD_REMAIN_H

#include "common/etcd/etcd.h"

struct bt_remain;

struct bt_remain_term {  /* the record's contents */
    uint64_t ttl_ms;     /* from its writing on */
    uint64_t expires_ns; /* the same by the writer's wall clock */
    uint64_t raft_term;  /* of etcd when it granted the lease */
};

/* The remaining time in ms by what etcd reports of its lease, up to a second too long (etcd counts
 * in seconds). wall_ns: now. Pure. */
uint64_t bt_remain_left_ms(const struct bt_remain_term *r, const struct bt_etcd_lease_time *t,
                           uint64_t wall_ns);

/* The record ends earlier than bt_remain_follow has returned: at ends_ns (bt_mono_ns). */
typedef void (*bt_remain_fn)(void *arg, uint64_t id, uint64_t ends_ns);
struct bt_remain *bt_remain_create(struct bt_etcd *e, bt_remain_fn fn, void *arg);
void bt_remain_destroy(struct bt_remain *m); /* before bt_etcd_destroy; NULL: nothing happens */
/* A record was read, or replaced under its id. Returns when it ends (bt_mono_ns) if it was written
 * just now. Also asks etcd, until it answers, whether it was written earlier; then fn is called. */
uint64_t bt_remain_follow(struct bt_remain *m, uint64_t id, int64_t lease,
                          const struct bt_remain_term *r);
/* The record is gone; nothing happens if it is not known. */
void bt_remain_forget(struct bt_remain *m, uint64_t id);

#endif
