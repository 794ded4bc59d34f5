/* Quotas: slots of one tier by group, and whose block goes when room is needed. A group may use
 * all slots while no other group needs them. When one does, blocks beyond a group's share go
 * first, in the policy's order, then blocks of groups without a bound. Pure, one owner thread. */
#ifndef BT_POLICY_EVICT_QUOTA_H
#define BT_POLICY_EVICT_QUOTA_H

#include "common/policy/evict/evict.h"
#include "common/policy/evict/tenants.h"

#define BT_QUOTA_NONE UINT8_MAX /* no group */

struct bt_quota {
    struct bt_tenants *tenants; /* NULL: there are no limits */
    bt_tenant_tier_t tier;
    uint32_t n_slots;
    uint32_t n_groups; /* groups that have had a slot lie below */
    uint32_t used[BT_EVICT_GROUPS];
};

void bt_quota_init(struct bt_quota *q, struct bt_tenants *tenants, bt_tenant_tier_t tier,
                   uint32_t n_slots);
/* Counts a slot for the group and holds the group / stops counting and releases it. */
void bt_quota_add(struct bt_quota *q, uint8_t group);
void bt_quota_sub(struct bt_quota *q, uint8_t group);

/* The slot to give up so that group may have `more` slots. If that exceeds its share, one of its
 * own slots; otherwise one of the group that is furthest beyond its share; otherwise the policy's
 * choice among groups without a bound, then among all. group BT_QUOTA_NONE: no group in particular
 * needs it. BT_EVICT_NONE: all are in use. */
uint32_t bt_quota_victim(const struct bt_quota *q, const struct bt_evict_policy *policy,
                         const struct bt_evict *e, uint8_t group, uint32_t more);

#endif
