/* The values are updated when the metrics are read. Control thread. */
#include "kvstore/cache/quota_metrics.h"

#include <stdlib.h>

struct row {
    uint8_t group; /* of a named tenant */
    struct bt_metric *used[BT_TENANT_TIERS], *max[BT_TENANT_TIERS];
};

struct bt_quota_metrics {
    struct bt_metrics *m;
    const struct bt_cache *cache;
    const struct bt_tier *tier;
    struct row *rows; /* of named tenants, then of all others */
    uint32_t n;       /* named ones */
};

static uint32_t used(const struct bt_quota_metrics *q, int tier, uint8_t group)
{
    return tier == BT_TENANT_SLAB ? q->cache->quota.used[group]
           : q->tier != NULL      ? bt_ssd_used(bt_tier_ssd(q->tier), group)
                                  : 0;
}

static uint32_t slots(const struct bt_quota_metrics *q, int tier)
{
    return tier == BT_TENANT_SLAB ? q->cache->quota.n_slots
           : q->tier != NULL      ? bt_ssd_slots(bt_tier_ssd(q->tier))
                                  : 0;
}

static void update(void *arg)
{
    struct bt_quota_metrics *q = arg;
    for (int t = 0; t < BT_TENANT_TIERS; t++) {
        uint32_t others = 0;
        for (uint32_t g = 0; g < BT_EVICT_GROUPS; g++) {
            others += used(q, t, (uint8_t)g);
        }
        for (uint32_t i = 0; i < q->n; i++) {
            const struct row *r = &q->rows[i];
            double share = bt_tenants_share(q->cache->tenants, r->group, (bt_tenant_tier_t)t);
            others -= used(q, t, r->group);
            bt_metric_set(r->used[t], used(q, t, r->group));
            bt_metric_set(r->max[t], (double)(uint32_t)(share * slots(q, t)));
        }
        bt_metric_set(q->rows[q->n].used[t], others);
    }
}

static void row_create(struct bt_quota_metrics *q, struct row *r, const char *tenant, bool named)
{
    static const char *const tiers[] = {"slab", "ssd"};
    char *label = bt_metrics_label("tenant", tenant);
    for (int t = 0; t < BT_TENANT_TIERS; t++) {
        char *labels = bt_sprintf("%s,tier=\"%s\"", label, tiers[t]);
        r->used[t] = bt_metrics_gauge(q->m, "baton_pool_tenant_blocks", labels);
        if (named) {
            r->max[t] = bt_metrics_gauge(q->m, "baton_pool_tenant_quota_blocks", labels);
        }
        free(labels);
    }
    free(label);
}

struct bt_quota_metrics *bt_quota_metrics_create(struct bt_metrics *m, const struct bt_cache *cache,
                                                 const struct bt_tier *tier)
{
    const struct bt_tenants *t = cache->tenants;
    if (t == NULL ||
        (!bt_tenants_bounded(t, BT_TENANT_SLAB) && !bt_tenants_bounded(t, BT_TENANT_SSD))) {
        return NULL;
    }
    struct bt_quota_metrics *q = bt_calloc(1, sizeof(*q));
    uint8_t group;
    q->m = m;
    q->cache = cache;
    q->tier = tier;
    while (bt_tenants_named(t, q->n, &group) != NULL) {
        q->n++;
    }
    q->rows = bt_calloc(q->n + 1, sizeof(*q->rows));
    for (uint32_t i = 0; i < q->n; i++) {
        row_create(q, &q->rows[i], bt_tenants_named(t, i, &q->rows[i].group), true);
    }
    row_create(q, &q->rows[q->n], "(others)", false);
    bt_metrics_refresh(m, update, q);
    return q;
}

void bt_quota_metrics_destroy(struct bt_quota_metrics *q)
{
    if (q != NULL) {
        bt_metrics_refresh(q->m, NULL, q);
        free(q->rows);
        free(q);
    }
}
