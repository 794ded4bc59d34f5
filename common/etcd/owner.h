/* One owner of a job among several daemons: a key under the owner's lease. Whoever creates it owns
 * the job; it goes with the owner's lease, and another one takes over. The revision of its creation
 * is the fencing epoch: higher with each owner, to be written beside what the job writes, so that a
 * predecessor who has not noticed yet is refused. Loop's thread. */
#ifndef BT_ETCD_OWNER_H
#define BT_ETCD_OWNER_H

#include "common/etcd/etcd.h"

struct bt_owner;

struct bt_owner_ops {
    void (*on_owner)(void *arg, int64_t epoch); /* this process owns the job now */
    void (*on_lost)(void *arg);                 /* ... and does not any more */
};
/* Runs for the job `key` until bt_owner_stop. name: who, for people who look into etcd. An etcd
 * that is away is no loss: nothing can be written then, and the epoch decides once it is back. */
struct bt_owner *bt_owner_start(struct bt_etcd *e, const char *key, const char *name, int64_t ttl_s,
                                const struct bt_owner_ops *ops, void *arg);
/* Gives the job up, if it is ours. No callback. NULL: nothing happens. */
void bt_owner_stop(struct bt_owner *o);

#endif
