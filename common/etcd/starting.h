/* Daemons that start: /baton/<cluster>/starting/<kind>/<name> -> proto baton.Starting, under a
 * lease of the daemon. It shows people what a daemon does before it is a member (loading a large
 * model takes minutes). It decides nothing. Loop's thread. */
#ifndef BT_ETCD_STARTING_H
#define BT_ETCD_STARTING_H

#include "cluster.pb-c.h"
#include "common/etcd/etcd.h"

struct bt_starting;       /* this process's record */
struct bt_starting_table; /* what all daemons say */

/* self is copied. */
struct bt_starting *bt_starting_begin(struct bt_etcd *e, const char *cluster,
                                      const Baton__Starting *self);
/* Reports the daemon's present activity, and how much of it is done. Each new percent is written;
 * while etcd is away, the last one waits. */
void bt_starting_say(struct bt_starting *s, const char *what, uint32_t percent);
/* The daemon is a member now, or ends: removes the record. NULL: nothing happens. */
void bt_starting_end(struct bt_starting *s);

#define BT_STARTING_MAX 1024 /* records that a table keeps */

struct bt_starting_table *bt_starting_watch(struct bt_etcd *e, const char *cluster);
void bt_starting_unwatch(struct bt_starting_table *t); /* NULL: nothing happens */
size_t bt_starting_count(const struct bt_starting_table *t);
/* i: below the count. Valid until the loop goes on. */
const Baton__Starting *bt_starting_at(const struct bt_starting_table *t, size_t i);

#endif
