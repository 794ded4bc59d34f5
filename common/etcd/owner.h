/* One owner of a job among several daemons: a key under the owner's lease. The daemon that creates
 * the key owns the job. When the lease ends the key goes, and another daemon takes over. The
 * revision of the key's creation is the fencing epoch. It is higher with each owner, and is stored
 * with everything that the job writes. So a former owner that has not noticed its loss is refused.
 * Loop's thread. */
#ifndef BT_ETCD_OWNER_H
#define BT_ETCD_OWNER_H

#include "common/etcd/etcd.h"

struct bt_owner;

struct bt_owner_ops {
    void (*on_owner)(void *arg, int64_t epoch); /* this process owns the job now */
    void (*on_lost)(void *arg);                 /* this process does not own it any more */
};
/* Tries to own the job `key` until bt_owner_stop. name: this daemon, for people who look into etcd.
 * If etcd is away the job is not lost: nothing can be written then, and the epoch decides once etcd
 * is back. */
struct bt_owner *bt_owner_start(struct bt_etcd *e, const char *key, const char *name, int64_t ttl_s,
                                const struct bt_owner_ops *ops, void *arg);
/* Gives the job up if this process owns it. No callback. NULL: nothing happens. */
void bt_owner_stop(struct bt_owner *o);

#endif
