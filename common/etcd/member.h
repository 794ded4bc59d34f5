/* Membership of the cluster in etcd: every daemon registers itself under a lease, and daemons that
 * need the table watch it. Keys: /baton/<cluster>/members/<kind>/<name> -> proto baton.Member;
 * /baton/<cluster>/settings -> proto baton.ClusterSettings, written once by compare-and-swap: a
 * daemon whose root hash, layout or salt id differs may not join. */
#ifndef BT_ETCD_MEMBER_H
#define BT_ETCD_MEMBER_H

#include "cluster.pb-c.h"
#include "common/etcd/etcd.h"

#define BT_MEMBER_LEASE_S 5

struct bt_member;       /* this process's registration */
struct bt_member_table; /* a watch of all members of one kind or all kinds */

struct bt_member_ops {
    void (*on_joined)(void *arg); /* registered (again) */
    /* The daemon may not join. ERR_MISMATCH with a message that names what differs; ERR_EXISTS: a
     * live member has this name with another incarnation. The daemon logs this and exits with
     * status 3. A predecessor that is proved dead (same machine, process gone) is replaced at once;
     * another one when its lease has ended. */
    void (*on_refused)(void *arg, bt_status_t st, const char *why);
    void (*on_lost)(void *arg); /* the lease is gone: registration is being renewed */
};
/* Copies self and settings. self->incarnation is chosen by the caller (random 64 bit, not 0). If
 * self->pid is this process, boot_id, pid_ns and start_ticks are filled in. */
struct bt_member *bt_member_join(struct bt_etcd *e, const char *cluster, const Baton__Member *self,
                                 const Baton__ClusterSettings *settings,
                                 const struct bt_member_ops *ops, void *arg);
/* Changes the advertised state (READY, DRAINING...) of this member. */
void bt_member_set_state(struct bt_member *m, Baton__MemberState state);
/* Changes the role that this worker reports (cluster.proto, Member). */
void bt_member_set_role(struct bt_member *m, uint32_t role, uint32_t next_role,
                        uint64_t role_epoch);
/* Ends the registration: the lease is revoked, best effort, and the key goes with it. No callback
 * comes any more. NULL: nothing happens. */
void bt_member_leave(struct bt_member *m);

struct bt_member_table_ops {
    void (*on_up)(void *arg, const Baton__Member *m); /* new, or changed, or a new incarnation */
    void (*on_down)(void *arg, const char *kind, const char *name);
};
/* Reports every present member, then changes, until bt_member_unwatch. ops is copied; m of on_up
 * is valid during the call. Members that left while etcd was away are reported down when it is
 * back. */
struct bt_member_table *bt_member_watch(struct bt_etcd *e, const char *cluster,
                                        const char *kind /* NULL: all */,
                                        const struct bt_member_table_ops *ops, void *arg);
void bt_member_unwatch(struct bt_member_table *t); /* NULL: nothing happens */

#endif
