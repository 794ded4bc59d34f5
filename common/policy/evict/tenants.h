/* Tenants: their names, the small numbers (groups) that caches count them by, and the share of
 * each tier that a tenant keeps when others need room. Pure, one owner thread.
 *
 * A name comes with a reservation (Reserve.tenant). The slab and the SSD store a tag with each
 * block (bt_kv_tenant_tag). A tag gets a group even before its name is known. Group 0 has the
 * blocks of no tenant (tag 0). Groups are given in order of appearance, configured tenants first.
 * When none is left, a new tenant gets the group of one that has no blocks any more
 * (bt_tenants_hold), or shares the last group. */
#ifndef BT_POLICY_EVICT_TENANTS_H
#define BT_POLICY_EVICT_TENANTS_H

#include "common/base/base.h"
#include "common/policy/evict/evict.h"

#define BT_TENANT_NOBODY 0
#define BT_TENANT_OTHERS (BT_EVICT_GROUPS - 1)
#define BT_TENANT_NAME   64 /* bytes, with the NUL */

struct bt_tenants;

typedef enum { BT_TENANT_SLAB, BT_TENANT_SSD, BT_TENANT_TIERS } bt_tenant_tier_t;

/* rules: NULL-terminated "NAME=SHARE" or "NAME=SLAB/SSD", shares of the slots in (0, 1]. NAME "-":
 * blocks without a tenant; "*": every tenant that no rule names (without this rule: 1). ERR_CONFIG:
 * err says which rule is wrong and what one looks like. rules may be NULL. */
bt_status_t bt_tenants_create(char *const *rules, struct bt_tenants **t_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_tenants_destroy(struct bt_tenants *t);

/* The group of a name ("": no tenant) or of a tag; both give the same group. */
uint8_t bt_tenants_group(struct bt_tenants *t, const char *name);
uint8_t bt_tenants_by_tag(struct bt_tenants *t, uint32_t tag);
/* The tag that is stored with a block of the group. */
uint32_t bt_tenants_tag(const struct bt_tenants *t, uint8_t group);
/* A caller that counts blocks of a group, or expects some, holds the group: a held group stays with
 * its tenant. A group from bt_tenants_group or _by_tag is valid until the next of these calls, or
 * while it is held. t NULL: does nothing. */
void bt_tenants_hold(struct bt_tenants *t, uint8_t group);
void bt_tenants_release(struct bt_tenants *t, uint8_t group);
/* The group's share of the slots of a tier; 1: no bound. */
double bt_tenants_share(const struct bt_tenants *t, uint8_t group, bt_tenant_tier_t tier);
/* Returns whether the tier has any limit. */
bool bt_tenants_bounded(const struct bt_tenants *t, bt_tenant_tier_t tier);
/* Groups without a bound on the tier. */
const struct bt_evict_groups *bt_tenants_unbounded(const struct bt_tenants *t,
                                                   bt_tenant_tier_t tier);

/* Tenants that rules name, in their order, "-" among them: the groups that metrics show by name.
 * NULL: no more. */
const char *bt_tenants_named(const struct bt_tenants *t, uint32_t i, uint8_t *group_p);

#endif
