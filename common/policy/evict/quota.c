/* Counts slots and chooses groups; see quota.h. Pure. */
#include "common/policy/evict/quota.h"

void bt_quota_init(struct bt_quota *q, struct bt_tenants *tenants, bt_tenant_tier_t tier,
                   uint32_t n_slots)
{
    *q = (struct bt_quota){.tenants = tenants, .tier = tier, .n_slots = n_slots};
}

void bt_quota_add(struct bt_quota *q, uint8_t group)
{
    BT_ASSERT(group < BT_EVICT_GROUPS);
    q->used[group]++;
    q->n_groups = BT_MAX(q->n_groups, group + 1u);
    bt_tenants_hold(q->tenants, group);
}

void bt_quota_sub(struct bt_quota *q, uint8_t group)
{
    BT_ASSERT(group < BT_EVICT_GROUPS && q->used[group] > 0);
    q->used[group]--;
    bt_tenants_release(q->tenants, group);
}

/* The number of slots in the group's share. */
static uint32_t share_of(const struct bt_quota *q, uint8_t group)
{
    double share = q->tenants != NULL ? bt_tenants_share(q->tenants, group, q->tier) : 1;
    return (uint32_t)(share * (double)q->n_slots);
}

/* The number of slots beyond its share if the group gets `more` slots. */
static uint32_t beyond(const struct bt_quota *q, uint8_t group, uint32_t more)
{
    uint32_t max = share_of(q, group), want = q->used[group] + more;
    return want > max ? want - max : 0;
}

uint32_t bt_quota_victim(const struct bt_quota *q, const struct bt_evict_policy *policy,
                         const struct bt_evict *e, uint8_t group, uint32_t more)
{
    if (q->tenants == NULL || !bt_tenants_bounded(q->tenants, q->tier)) {
        return policy->victim(e, NULL);
    }
    uint32_t victim = BT_EVICT_NONE, most = 0;
    if (group != BT_QUOTA_NONE && beyond(q, group, more) > 0) {
        victim = policy->victim_of(e, group);
    }
    if (victim != BT_EVICT_NONE) {
        return victim;
    }
    for (uint32_t g = 0; g < q->n_groups; g++) {
        uint32_t n = beyond(q, (uint8_t)g, 0);
        uint32_t v = n > most ? policy->victim_of(e, (uint8_t)g) : BT_EVICT_NONE;
        if (v != BT_EVICT_NONE) {
            most = n;
            victim = v;
        }
    }
    if (victim == BT_EVICT_NONE) {
        victim = policy->victim(e, bt_tenants_unbounded(q->tenants, q->tier));
    }
    return victim != BT_EVICT_NONE ? victim : policy->victim(e, NULL);
}
