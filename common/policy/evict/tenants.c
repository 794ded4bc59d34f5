/* A table of at most 255 tenants; searched for each reservation, not for each block. Pure. */
#include "common/policy/evict/tenants.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/kv/key.h"

struct tenant {
    uint32_t tag;
    uint32_t held;
    bool named; /* named by a rule */
    double share[BT_TENANT_TIERS];
};

struct bt_tenants {
    struct tenant all[BT_EVICT_GROUPS];
    uint32_t n;    /* groups in use, without the last one */
    uint32_t hand; /* where the search for a free group continues */
    struct bt_evict_groups unbounded[BT_TENANT_TIERS];
    double otherwise[BT_TENANT_TIERS];
    bool bounded[BT_TENANT_TIERS];
    uint8_t last; /* result of the last search */
    char (*names)[BT_TENANT_NAME];
    uint8_t *named;
    uint32_t n_named;
};

/* Parses "0.3" or "0.3/0.5". */
static bool parse_shares(const char *text, double share[BT_TENANT_TIERS])
{
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') {
        return false;
    }
    share[BT_TENANT_SLAB] = share[BT_TENANT_SSD] = strtod(text, &end);
    if (*end == '/' && end[1] >= '0' && end[1] <= '9') {
        share[BT_TENANT_SSD] = strtod(end + 1, &end);
    }
    return *end == '\0' && share[BT_TENANT_SLAB] > 0 && share[BT_TENANT_SLAB] <= 1 &&
           share[BT_TENANT_SSD] > 0 && share[BT_TENANT_SSD] <= 1;
}

static void set_shares(struct bt_tenants *t, uint8_t group, const double share[BT_TENANT_TIERS])
{
    for (int i = 0; i < BT_TENANT_TIERS; i++) {
        t->all[group].share[i] = share[i];
        t->bounded[i] = t->bounded[i] || share[i] < 1;
        bt_evict_groups_set(&t->unbounded[i], group, share[i] >= 1);
    }
}

static bool name_ok(const char *name, size_t len)
{
    return len > 0 && len < BT_TENANT_NAME && memchr(name, '"', len) == NULL &&
           memchr(name, '\\', len) == NULL;
}

static bool is_for_others(const char *rule)
{
    return strncmp(rule, "*=", 2) == 0;
}

static bool add_rule(struct bt_tenants *t, const char *rule)
{
    if (is_for_others(rule)) {
        return true; /* read_otherwise has read it */
    }
    const char *eq = strrchr(rule, '=');
    double share[BT_TENANT_TIERS];
    if (eq == NULL || !name_ok(rule, (size_t)(eq - rule)) || !parse_shares(eq + 1, share)) {
        return false;
    }
    char *name = t->names[t->n_named];
    snprintf(name, BT_TENANT_NAME, "%.*s", (int)(eq - rule), rule);
    for (uint32_t i = 0; i < t->n_named; i++) {
        if (strcmp(t->names[i], name) == 0) {
            return false;
        }
    }
    uint8_t group = strcmp(name, "-") == 0 ? BT_TENANT_NOBODY : bt_tenants_group(t, name);
    set_shares(t, group, share);
    t->all[group].named = true;
    t->named[t->n_named++] = group;
    return group != BT_TENANT_OTHERS;
}

/* The share of tenants that no rule names: a tenant gets it when its group is made, so this rule is
 * read before the others. Returns the rule that is wrong, or NULL. */
static const char *read_otherwise(struct bt_tenants *t, char *const *rules, uint32_t n)
{
    bool found = false;
    for (int i = 0; i < BT_TENANT_TIERS; i++) {
        t->otherwise[i] = 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (is_for_others(rules[i])) {
            if (found || !parse_shares(rules[i] + 2, t->otherwise)) {
                return rules[i];
            }
            found = true;
        }
    }
    return NULL;
}

bt_status_t bt_tenants_create(char *const *rules, struct bt_tenants **t_p, char *err,
                              size_t err_cap)
{
    static const double all[BT_TENANT_TIERS] = {1, 1};
    struct bt_tenants *t = bt_calloc(1, sizeof(*t));
    uint32_t n = 0;
    while (rules != NULL && rules[n] != NULL) {
        n++;
    }
    t->names = bt_calloc(n + 1, sizeof(*t->names));
    t->named = bt_calloc(n + 1, sizeof(*t->named));
    t->n = 1;
    const char *wrong = read_otherwise(t, rules, n);
    set_shares(t, BT_TENANT_NOBODY, all);
    set_shares(t, BT_TENANT_OTHERS, t->otherwise);
    t->all[BT_TENANT_OTHERS].tag = UINT32_MAX;
    for (uint32_t i = 0; wrong == NULL && i < n; i++) {
        wrong = add_rule(t, rules[i]) ? NULL : rules[i];
    }
    if (wrong != NULL) {
        snprintf(err, err_cap,
                 "kvstore.quota.tenants: \"%.80s\": write NAME=SHARE or NAME=SLAB/SSD with "
                 "shares above 0 up to 1, each name once, at most %u of them",
                 wrong, BT_TENANT_OTHERS - 1);
        bt_tenants_destroy(t);
        return BT_ERR_CONFIG;
    }
    *t_p = t;
    return BT_OK;
}

void bt_tenants_destroy(struct bt_tenants *t)
{
    if (t != NULL) {
        free(t->names);
        free(t->named);
        free(t);
    }
}

/* A group for a new tenant: an unused one, or one whose tenant has no blocks any more. */
static uint32_t new_group(struct bt_tenants *t)
{
    if (t->n < BT_TENANT_OTHERS) {
        return t->n++;
    }
    for (uint32_t i = 1; i < BT_TENANT_OTHERS; i++) {
        t->hand = t->hand + 1 < BT_TENANT_OTHERS ? t->hand + 1 : 1;
        if (t->all[t->hand].held == 0 && !t->all[t->hand].named) {
            return t->hand;
        }
    }
    return BT_TENANT_OTHERS;
}

uint8_t bt_tenants_by_tag(struct bt_tenants *t, uint32_t tag)
{
    if (tag == 0) {
        return BT_TENANT_NOBODY;
    }
    if (tag == t->all[BT_TENANT_OTHERS].tag) {
        return BT_TENANT_OTHERS;
    }
    if (t->all[t->last].tag == tag) {
        return t->last;
    }
    uint32_t g = 1;
    while (g < t->n && t->all[g].tag != tag) {
        g++;
    }
    if (g == t->n) {
        g = new_group(t);
        if (g == BT_TENANT_OTHERS) {
            return BT_TENANT_OTHERS;
        }
        t->all[g].tag = tag;
        set_shares(t, (uint8_t)g, t->otherwise);
    }
    t->last = (uint8_t)g;
    return (uint8_t)g;
}

uint8_t bt_tenants_group(struct bt_tenants *t, const char *name)
{
    return bt_tenants_by_tag(t, bt_kv_tenant_tag(name));
}

void bt_tenants_hold(struct bt_tenants *t, uint8_t group)
{
    if (t != NULL) {
        BT_ASSERT(group < BT_EVICT_GROUPS);
        t->all[group].held++;
    }
}

void bt_tenants_release(struct bt_tenants *t, uint8_t group)
{
    if (t != NULL) {
        BT_ASSERT(group < BT_EVICT_GROUPS && t->all[group].held > 0);
        t->all[group].held--;
    }
}

uint32_t bt_tenants_tag(const struct bt_tenants *t, uint8_t group)
{
    BT_ASSERT(group < BT_EVICT_GROUPS);
    return t->all[group].tag;
}

double bt_tenants_share(const struct bt_tenants *t, uint8_t group, bt_tenant_tier_t tier)
{
    BT_ASSERT(group < BT_EVICT_GROUPS);
    return t->all[group].share[tier];
}

bool bt_tenants_bounded(const struct bt_tenants *t, bt_tenant_tier_t tier)
{
    return t->bounded[tier];
}

const struct bt_evict_groups *bt_tenants_unbounded(const struct bt_tenants *t,
                                                   bt_tenant_tier_t tier)
{
    return &t->unbounded[tier];
}

const char *bt_tenants_named(const struct bt_tenants *t, uint32_t i, uint8_t *group_p)
{
    if (i >= t->n_named) {
        return NULL;
    }
    *group_p = t->named[i];
    return t->names[i];
}
