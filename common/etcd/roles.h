/* The role table in etcd, /baton/<cluster>/roles -> proto baton.RoleTable: workers whose role
 * differs from the one that they were started in. Workers follow it, conductors change it
 * (view/roles.c). Roles are bits, so that a worker may have both. */
#ifndef BT_ETCD_ROLES_H
#define BT_ETCD_ROLES_H

#include "cluster.pb-c.h"
#include "common/etcd/etcd.h"

#define BT_ROLES_PREFILL 1u
#define BT_ROLES_DECODE  2u
#define BT_ROLES_BOTH    3u

/* The role of a worker that was started as kind; 0: members of that kind are not workers. */
uint32_t bt_roles_of_kind(const char *kind);
const char *bt_roles_name(uint32_t role); /* "prefill", "decode", "both", "none" */
/* Reads "prefill", "decode", "both", or "own" (0: the role in which it was started). Returns false
 * for any other text. */
bool bt_roles_parse(const char *name, uint32_t *role_p);
/* The role that t gives the worker; 0: t does not name it. incarnation 0: of any process. */
uint32_t bt_roles_given(const Baton__RoleTable *t, const char *kind, const char *name,
                        uint64_t incarnation);

struct bt_roles_watch;
/* Calls back with the table (an empty one while etcd has none) and the revision to compare with
 * when it is changed (0: it does not exist), as soon as it is known and with each change. t is the
 * watch's own. */
typedef void (*bt_roles_fn)(void *arg, const Baton__RoleTable *t, int64_t revision);
struct bt_roles_watch *bt_roles_watch_start(struct bt_etcd *e, const char *cluster, bt_roles_fn fn,
                                            void *arg);
void bt_roles_watch_stop(struct bt_roles_watch *w); /* NULL: nothing happens */

/* The table's key; the caller frees it. */
char *bt_roles_key(const char *cluster);

#endif
