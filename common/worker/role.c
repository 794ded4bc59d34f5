/* The role that this worker offers. The code of both roles is always active, and every submission
 * names its role. So a change of role only changes what conductors are told: the worker stops to
 * offer the old role, waits until its work has ended or is planned elsewhere, then offers the new
 * one. It refuses nothing meanwhile, as a conductor may have planned before it heard of the
 * change. */
#include "common/log/log.h"
#include "common/worker/control.h"

#define LOOK_MS 50

static void tell(struct bt_wctl *w)
{
    /* The rows that remain run in steps of either kind. */
    atomic_store(&w->core.role, w->role.next != 0 ? w->role.next : w->role.now);
    bt_metric_set(w->stats->role[0], (w->role.now & BT_ROLES_PREFILL) != 0);
    bt_metric_set(w->stats->role[1], (w->role.now & BT_ROLES_DECODE) != 0);
    if (w->net.member != NULL) {
        bt_member_set_role(w->net.member, w->role.now, w->role.next, w->role.epoch);
    }
}

/* Number of submissions with work of a role that the worker gives up. */
static uint32_t left(struct bt_wctl *w)
{
    uint32_t n = 0, gone = BT_ROLES_BOTH & ~w->role.next;
    size_t it = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &it, NULL)) != NULL) {
        bool prefill = r->sub->phases != BATON__PHASES__DECODE,
             decode = r->sub->phases != BATON__PHASES__PREFILL;
        n += ((gone & BT_ROLES_PREFILL) && prefill) || ((gone & BT_ROLES_DECODE) && decode);
    }
    return n;
}

static void look(void *arg)
{
    struct bt_wctl *w = arg;
    uint64_t ms = (bt_mono_ns() - w->role.since_ns) / 1000000;
    uint32_t n = left(w);
    if (n != 0 && ms < BT_WORKER_ROLE_WAIT_MS) {
        return;
    }
    bt_timer_stop(w->loop, &w->role.timer);
    w->role.now = w->role.next;
    w->role.next = 0;
    BT_INFO("role_changed", "role=%s epoch=%llu ms=%llu left=%u", bt_roles_name(w->role.now),
            (unsigned long long)w->role.epoch, (unsigned long long)ms, n);
    tell(w);
}

static void change(struct bt_wctl *w, uint32_t role, uint64_t epoch)
{
    BT_INFO("role_change", "from=%s to=%s epoch=%llu", bt_roles_name(w->role.now),
            bt_roles_name(role), (unsigned long long)epoch);
    w->role.epoch = epoch;
    w->role.now &= role; /* a role that it keeps is offered without a break */
    w->role.next = role;
    w->role.since_ns = bt_mono_ns();
    tell(w);
    bt_timer_start(w->loop, &w->role.timer, 0, LOOK_MS, look, w);
}

static void on_table(void *arg, const Baton__RoleTable *t, int64_t revision)
{
    struct bt_wctl *w = arg;
    (void)revision;
    uint32_t given = bt_roles_given(t, w->kind, w->conf.name, w->incarnation);
    uint32_t role = given != 0 ? given : bt_roles_of_kind(w->kind);
    if (w->net.member == NULL) { /* the worker is not registered yet */
        w->role.now = role;
        w->role.epoch = given != 0 ? t->epoch : 0;
        if (given != 0) {
            BT_INFO("role_given", "role=%s started_as=%s epoch=%llu", bt_roles_name(role), w->kind,
                    (unsigned long long)t->epoch);
        }
        tell(w);
        bt_wctl_join(w);
    } else if (role != (w->role.next != 0 ? w->role.next : w->role.now)) {
        change(w, role, t->epoch);
    }
}

void bt_wrole_start(struct bt_wctl *w)
{
    w->role.watch = bt_roles_watch_start(w->net.etcd, w->conf.common.cluster_name, on_table, w);
}

void bt_wrole_stop(struct bt_wctl *w)
{
    bt_roles_watch_stop(w->role.watch);
    w->role.watch = NULL;
    bt_timer_stop(w->loop, &w->role.timer);
}
