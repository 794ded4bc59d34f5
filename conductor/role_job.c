/* The role policy's single owner; see role_job.h. */
#include "conductor/role_job.h"

#include <stdlib.h>
#include <string.h>

#include "common/etcd/owner.h"
#include "common/log/log.h"
#include "common/policy/sched/balance.h"

#define LOOK_MS 1000
#define LEASE_S 5

struct bt_role_job {
    struct bt_loop *loop;
    struct bt_view *view;
    struct bt_role_job_config conf;
    char *cluster, *name;
    struct bt_owner *owner;
    int64_t epoch; /* 0: another conductor owns the job */
    struct bt_timer look;
    struct bt_balance balance;
    bool busy; /* a change is being written: on_set comes */
    bool ended;
    struct bt_balance_worker *workers;
    uint32_t cap;
    struct bt_metric *m_owner, *m_changes;
};

static void on_owner(void *arg, int64_t epoch)
{
    struct bt_role_job *j = arg;
    j->epoch = epoch;
    j->balance = (struct bt_balance){0};
    bt_metric_set(j->m_owner, 1);
}

static void on_lost(void *arg)
{
    struct bt_role_job *j = arg;
    j->epoch = 0;
    bt_metric_set(j->m_owner, 0);
}

static void on_set(void *arg, const struct bt_view_role_done *d)
{
    struct bt_role_job *j = arg;
    if (d->code == BT_GRPC_OK) {
        bt_metric_add(j->m_changes, 1);
    } else {
        BT_WARN("role_policy", "why=%s", d->why);
    }
    j->busy = false;
    if (j->ended) {
        free(j);
    }
}

static void apply(struct bt_role_job *j, const struct bt_session *s,
                  const struct bt_balance_change *c)
{
    uint32_t role = c->to_prefill ? BT_ROLES_PREFILL : BT_ROLES_DECODE;
    char *worker = bt_sprintf("%s/%s", s->member->kind, s->member->name);
    BT_INFO("role_policy", "worker=%s to=%s prefill=%.2f decode=%.2f epoch=%lld", s->member->name,
            bt_roles_name(role), c->prefill, c->decode, (long long)j->epoch);
    struct bt_view_role_wish wish = {
        .worker = worker,
        .role = role == bt_roles_of_kind(s->member->kind) ? 0 : role,
        .incarnation = s->member->incarnation,
        .by = j->name,
        .owner_epoch = j->epoch,
    };
    j->busy = true;
    bt_view_role_set(j->view, &wish, on_set, j);
    free(worker);
}

static void on_look(void *arg)
{
    struct bt_role_job *j = arg;
    if (j->epoch == 0 || j->busy) {
        return;
    }
    struct bt_view_snapshot v;
    bt_view_snapshot(j->view, NULL, 0, &v);
    uint32_t n = v.snap.n_workers;
    if (n > j->cap) {
        j->cap = n + 16;
        j->workers = bt_realloc(j->workers, j->cap * sizeof(*j->workers));
    }
    bool changing = false;
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_session *s = bt_session_of_peer(v.worker[i]);
        const struct bt_sched_worker *w = &v.workers[i];
        const char *by = NULL;
        uint32_t wanted = bt_view_role_wanted(j->view, s, &by);
        uint32_t has = (w->prefill ? BT_ROLES_PREFILL : 0) | (w->decode ? BT_ROLES_DECODE : 0);
        changing = changing || wanted != has;
        j->workers[i] = (struct bt_balance_worker){
            .prefill = w->prefill,
            .decode = w->decode,
            .fixed = wanted != has || w->draining || w->kvstore == BT_SCHED_NONE ||
                     (by != NULL && strcmp(by, "operator") == 0),
            .pressure = bt_sched_pressure(&j->conf.sched, w),
        };
    }
    if (changing) { /* the view does not show the change yet */
        j->balance = (struct bt_balance){0};
        return;
    }
    struct bt_balance_params p = {.window_ms = j->conf.window_ms, .high = BT_BALANCE_HIGH};
    struct bt_balance_change c;
    bt_balance_step(&j->balance, &p, j->workers, n, (double)bt_mono_ns() / 1e6, &c);
    if (c.worker != BT_BALANCE_NONE) {
        apply(j, bt_session_of_peer(v.worker[c.worker]), &c);
    }
}

struct bt_role_job *bt_role_job_create(struct bt_loop *loop, struct bt_etcd *etcd,
                                       struct bt_view *view, const struct bt_role_job_config *conf,
                                       struct bt_metrics *metrics)
{
    static const struct bt_owner_ops ops = {.on_owner = on_owner, .on_lost = on_lost};
    struct bt_role_job *j = bt_calloc(1, sizeof(*j));
    j->loop = loop;
    j->view = view;
    j->conf = *conf;
    j->conf.cluster = j->cluster = bt_strdup(conf->cluster);
    j->conf.name = j->name = bt_strdup(conf->name);
    j->m_owner = bt_metrics_gauge(metrics, "baton_role_policy_owner", NULL);
    j->m_changes = bt_metrics_counter(metrics, "baton_role_policy_changes_total", NULL);
    char *key = bt_sprintf("/baton/%s/jobs/roles", j->cluster);
    j->owner = bt_owner_start(etcd, key, j->name, LEASE_S, &ops, j);
    free(key);
    bt_timer_start(loop, &j->look, LOOK_MS, LOOK_MS, on_look, j);
    return j;
}

void bt_role_job_set_sched(struct bt_role_job *j, const struct bt_sched_params *sched)
{
    j->conf.sched = *sched;
}

void bt_role_job_destroy(struct bt_role_job *j)
{
    bt_timer_stop(j->loop, &j->look);
    bt_owner_stop(j->owner);
    free(j->workers);
    free(j->cluster);
    free(j->name);
    j->ended = true;
    if (!j->busy) {
        free(j);
    }
}
