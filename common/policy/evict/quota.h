/* Slots of one tier by group, and whose block goes when room is needed. Work-conserving: a group
 * may have all slots as long as nobody else wants them; when somebody does, what it has beyond its
 * share goes first, by the policy's order among its own, then what those have that have no bound
 * (they share what the others' shares leave). Pure, one owner thread. */
#ifndef BT_POLICY_EVICT_QUOTA_H
#define BT_POLICY_EVICT_QUOTA_H

#include "common/policy/evict/evict.h"
#include "common/policy/evict/tenants.h"

#define BT_QUOTA_NONE UINT8_MAX /* no group */

struct bt_quota {
    struct bt_tenants *tenants; /* NULL: there are no bounds */
    bt_tenant_tier_t tier;
    uint32_t n_slots;
    uint32_t n_groups; /* those that have had a slot are below */
    uint32_t used[BT_EVICT_GROUPS];
};

void bt_quota_init(struct bt_quota *q, struct bt_tenants *tenants, bt_tenant_tier_t tier,
                   uint32_t n_slots);
/* A slot is the group's, which is held for it / is not any more. */
void bt_quota_add(struct bt_quota *q, uint8_t group);
void bt_quota_sub(struct bt_quota *q, uint8_t group);

/* The slot to give up so that group may have `more` slots beyond those it has: its own first if
 * that is more than its share, then of whoever is furthest beyond his, then the policy's choice
 * among those without a bound, then among all.
 * group BT_QUOTA_NONE: nobody in particular wants it. BT_EVICT_NONE: all are in use. */
uint32_t bt_quota_victim(const struct bt_quota *q, const struct bt_evict_policy *policy,
                         const struct bt_evict *e, uint8_t group, uint32_t more);

#endif
