/* Quotas: what a rule says, whose block goes under every policy, that nobody's bound costs anybody
 * else, that the slab and the SSD remember whose block is whose. */
#include "kv_node.h"

#include "common/kv/key.h"
#include "common/policy/evict/quota.h"
#include "common/policy/evict/tenants.h"
#include "kvstore/cache/adopt.h"

static char err[512];

/* Up to three rules; NULL: none. */
static struct bt_tenants *tenants(const char *a, const char *b, const char *c)
{
    const char *given[] = {a, b, c};
    char *rules[4] = {NULL};
    struct bt_tenants *t = NULL;
    size_t n = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(given); i++) {
        if (given[i] != NULL) {
            rules[n++] = (char *)(uintptr_t)given[i];
        }
    }
    if (bt_tenants_create(rules, &t, err, sizeof(err)) != BT_OK) {
        return NULL;
    }
    return t;
}

static void rules(void **state)
{
    (void)state;
    static const char *const bad[] = {"acme",     "acme=",      "=0.5",       "acme=0", "acme=1.5",
                                      "acme=-1",  "acme=0.5/",  "acme=0.5/0", "acme=x", "acme=0.5x",
                                      "a\"b=0.5", "acme=0.5/2", "acme=nan",   "*=2",    "*="};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        assert_null(tenants(bad[i], NULL, NULL));
        assert_non_null(strstr(err, "kvstore.quota.tenants"));
        assert_non_null(strstr(err, bad[i]));
    }
    assert_null(tenants("acme=0.5", "acme=0.6", NULL)); /* twice */
    assert_null(tenants("*=0.5", "acme=0.5", "*=0.5"));
    struct bt_tenants *t = tenants("acme=0.25/0.5", "-=0.75", "*=0.1");
    assert_non_null(t);
    uint8_t acme = bt_tenants_group(t, "acme"), named;
    assert_int_not_equal(acme, BT_TENANT_NOBODY);
    assert_float_equal(bt_tenants_share(t, acme, BT_TENANT_SLAB), 0.25, 0);
    assert_float_equal(bt_tenants_share(t, acme, BT_TENANT_SSD), 0.5, 0);
    assert_int_equal(bt_tenants_group(t, ""), BT_TENANT_NOBODY);
    assert_float_equal(bt_tenants_share(t, BT_TENANT_NOBODY, BT_TENANT_SLAB), 0.75, 0);
    assert_string_equal(bt_tenants_named(t, 0, &named), "acme");
    assert_int_equal(named, acme);
    assert_string_equal(bt_tenants_named(t, 1, &named), "-");
    assert_null(bt_tenants_named(t, 2, &named));
    /* A tag that is read before its name is heard. */
    uint8_t later = bt_tenants_by_tag(t, bt_kv_tenant_tag("later"));
    assert_int_equal(bt_tenants_group(t, "later"), later);
    assert_int_equal(bt_tenants_tag(t, later), bt_kv_tenant_tag("later"));
    assert_float_equal(bt_tenants_share(t, later, BT_TENANT_SSD), 0.1, 0);
    bt_tenants_destroy(t);
    t = tenants(NULL, NULL, NULL);
    assert_false(bt_tenants_bounded(t, BT_TENANT_SLAB));
    bt_tenants_destroy(t);
}

static void more_tenants_than_groups(void **state)
{
    (void)state;
    struct bt_tenants *t = tenants("acme=0.5", NULL, "*=0.2");
    bool shared = false;
    for (int i = 0; i < 1000; i++) {
        char name[32];
        snprintf(name, sizeof(name), "tenant-%d", i);
        uint8_t g = bt_tenants_group(t, name);
        assert_true(g > 0 && g < BT_EVICT_GROUPS);
        assert_int_equal(bt_tenants_group(t, name), g);
        bt_tenants_hold(t, g);
        shared = shared || g == BT_TENANT_OTHERS;
        assert_float_equal(bt_tenants_share(t, g, BT_TENANT_SLAB), 0.2, 0);
    }
    assert_true(shared);
    assert_int_equal(bt_tenants_by_tag(t, bt_tenants_tag(t, BT_TENANT_OTHERS)), BT_TENANT_OTHERS);
    /* One has nothing any more: the next who comes gets his group, and nobody else's. */
    uint8_t acme = bt_tenants_group(t, "acme"), left = bt_tenants_group(t, "tenant-7");
    bt_tenants_release(t, left);
    assert_int_equal(bt_tenants_group(t, "tenant-7"), left); /* it is his until somebody comes */
    assert_int_equal(bt_tenants_group(t, "late"), left);
    assert_int_equal(bt_tenants_tag(t, left), bt_kv_tenant_tag("late"));
    bt_tenants_hold(t, left);
    assert_int_equal(bt_tenants_group(t, "tenant-7"), BT_TENANT_OTHERS);
    assert_int_equal(bt_tenants_group(t, "acme"), acme); /* named: his without a block */
    bt_tenants_destroy(t);
}

/* ---- the slab, by every policy ---- */

#define SLOTS 40u

static struct node node;
static struct bt_tenants *who;

/* A new kvstore's cache over the node's slab, with a policy of its own. */
static void with_policy(const char *policy)
{
    bt_cache_destroy(node.cache);
    node.cache = bt_cache_create(node.slab, &node.layout, SLOTS / 2, bt_evict_by_name(policy));
    node.cache->low = 0;
    bt_cache_set_tenants(node.cache, who);
}

static void start(const char *policy)
{
    struct bt_kv_layout layout;
    struct bt_kv_key root = {{1}};
    char path[96];
    memset(&node, 0, sizeof(node));
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-quota-%d", (int)getpid());
    assert_int_equal(bt_kv_layout_gqa(NODE_BT, 2, 1, 32, BT_DT_BF16, 0, &layout), BT_OK);
    node.layout = layout;
    struct bt_slab_spec spec = {.path = path,
                                .bytes = 5 * 4096 + SLOTS * (4096 + 136),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = 1};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &node.slab, err, sizeof(err)), BT_OK);
    assert_int_equal(unlink(path), 0);
    with_policy(policy);
}

static void stop(void)
{
    bt_cache_destroy(node.cache);
    bt_slab_unmap(node.slab);
    bt_tenants_destroy(who);
}

/* A block of a tenant is computed: a chain of blocks without parents known. */
static void compute(uint8_t group, uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    uint32_t slot;
    node_key(chain, block, &k);
    assert_int_equal(bt_cache_take(node.cache, group, 1, &slot), BT_OK);
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        bt_pool_segment_crc(node.cache->pool, slot, l, &k);
    }
    assert_true(cache_seal(node.cache, slot, &k, NODE_BT, block));
    bt_cache_put(node.cache, &slot, 1);
}

static uint32_t cached(uint32_t chain, uint32_t n)
{
    uint32_t have = 0;
    for (uint32_t b = 0; b < n; b++) {
        struct bt_kv_key k;
        node_key(chain, b, &k);
        have += bt_index_find(node.cache->index, &k) != UINT32_MAX;
    }
    return have;
}

static void check_counts(void)
{
    uint32_t sum = 0;
    struct bt_pool_counts c = node_counts(&node);
    for (uint32_t g = 0; g < BT_EVICT_GROUPS; g++) {
        sum += node.cache->quota.used[g];
    }
    assert_int_equal(sum, c.total - c.free);
}

static void a_flood_leaves_others_their_share(void **state)
{
    (void)state;
    static const char *const policies[] = {"lru", "lfu", "slru", "length_aware", "density"};
    for (size_t i = 0; i < BT_ARRAY_LEN(policies); i++) {
        who = tenants("a=0.5", "b=0.5", NULL);
        start(policies[i]);
        uint32_t n = bt_index_slots(node.cache->index), half = n / 2;
        uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
        for (uint32_t x = 0; x < half; x++) {
            compute(b, 1, x);
        }
        for (uint32_t x = 0; x < 5 * n; x++) { /* turns the slab over, were it not for quotas */
            compute(a, 2, x);
            check_counts();
        }
        assert_int_equal(cached(1, half), half);
        assert_int_equal(node.cache->quota.used[a], n - half);
        stop();
    }
}

/* Who has no share takes from those who have none, by the policy's order, and from what others
 * have beyond theirs: never from what they have within it, as long as there is anything else. */
static void who_has_no_share_takes_nobodys(void **state)
{
    (void)state;
    static const char *const policies[] = {"lru", "lfu", "slru", "length_aware", "density"};
    for (size_t i = 0; i < BT_ARRAY_LEN(policies); i++) {
        who = tenants("a=0.5", NULL, NULL);
        start(policies[i]);
        uint32_t n = bt_index_slots(node.cache->index), half = n / 2, slots[SLOTS];
        uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
        for (uint32_t x = 0; x < n; x++) {
            compute(a, 1, x);
        }
        for (uint32_t x = 0; x < 3 * n; x++) {
            compute(b, 2, x);
            compute(BT_TENANT_NOBODY, 3, x);
            check_counts();
        }
        assert_int_equal(node.cache->quota.used[a], half);
        assert_int_equal(node.cache->quota.used[b] + node.cache->quota.used[BT_TENANT_NOBODY],
                         n - half);
        assert_true(node.cache->quota.used[b] > 0);
        assert_true(node.cache->quota.used[BT_TENANT_NOBODY] > 0);
        /* All that have no share is in use: then a's go, nobody fails. */
        assert_int_equal(bt_cache_take(node.cache, b, n - half + 2, slots), BT_OK);
        assert_int_equal(node.cache->quota.used[a], half - 2);
        bt_cache_put(node.cache, slots, n - half + 2);
        check_counts();
        stop();
    }
}

/* Far more tenants than groups, each with a few blocks for a while: each is counted alone. */
static void groups_are_given_on(void **state)
{
    (void)state;
    who = tenants("a=0.1", NULL, "*=0.9");
    start("density");
    for (uint32_t i = 0; i < 2000; i++) {
        char name[32];
        snprintf(name, sizeof(name), "tenant-%u", i);
        uint8_t g = bt_tenants_group(who, name);
        assert_int_not_equal(g, BT_TENANT_OTHERS);
        assert_int_equal(node.cache->quota.used[g], 0); /* nothing of the tenant before him */
        compute(g, i % 200, i);
        assert_int_equal(bt_tenants_group(who, name), g);
        assert_int_equal(node.cache->quota.used[g], 1);
        check_counts();
    }
    stop();
}

/* Nobody else wants them: one may have all slots. What is beyond his share goes first when others,
 * within theirs, want room; who has all of his share takes his own. */
static void what_is_borrowed_goes_first(void **state)
{
    (void)state;
    who = tenants("a=0.25", "b=0.5", "*=0.25");
    start("lru");
    uint32_t n = bt_index_slots(node.cache->index);
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    uint8_t c = bt_tenants_group(who, "c");
    for (uint32_t x = 0; x < n; x++) {
        compute(a, 1, x);
    }
    assert_int_equal(node.cache->quota.used[a], n);
    for (uint32_t x = 0; x < 4 * n; x++) {
        compute(b, 2, x);
    }
    assert_int_equal(node.cache->quota.used[b], n / 2);
    assert_int_equal(cached(1, n), n - n / 2); /* nobody within his share wants more of it */
    for (uint32_t x = 0; x < 4 * n; x++) {
        compute(c, 3, x);
    }
    assert_int_equal(node.cache->quota.used[b], n / 2);
    assert_int_equal(node.cache->quota.used[c], n / 4);
    assert_in_range(cached(1, n), n / 4, n / 4 + 3); /* what rounding leaves */
    check_counts();
    stop();
}

/* Under its bound a tenant's blocks go by the policy's order among all, as without quotas. */
static void within_quotas_the_policy_decides(void **state)
{
    (void)state;
    who = tenants("a=0.9", "b=0.9", NULL);
    start("lru");
    uint32_t n = bt_index_slots(node.cache->index);
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    for (uint32_t x = 0; x < n / 2; x++) {
        compute(a, 1, x);
    }
    for (uint32_t x = 0; x < n - n / 2; x++) {
        compute(b, 2, x);
    }
    for (uint32_t x = 0; x < 3; x++) {
        compute(b, 3, x);
    }
    assert_int_equal(cached(1, n / 2), n / 2 - 3); /* the oldest of all */
    stop();
}

/* A quota never makes anybody fail: when a's own are all in use, others' go. */
static void never_without_room(void **state)
{
    (void)state;
    who = tenants("a=0.25", "b=0.75", NULL);
    start("density");
    uint32_t n = bt_index_slots(node.cache->index), slots[SLOTS + 2];
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    for (uint32_t x = 0; x < n; x++) {
        compute(b, 1, x);
    }
    assert_int_equal(bt_cache_take(node.cache, a, n, slots), BT_OK);
    assert_int_equal(node.cache->quota.used[a], n);
    uint32_t one;
    assert_int_equal(bt_cache_take(node.cache, b, 1, &one), BT_ERR_EXHAUSTED); /* all in use */
    bt_cache_put(node.cache, slots, n);
    check_counts();
    stop();
}

/* Whose block it is stands in the slab: the next kvstore counts it as this one did. */
static void a_restart_remembers(void **state)
{
    (void)state;
    who = tenants("a=0.5", "b=0.5", NULL);
    start("density");
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    for (uint32_t x = 0; x < 7; x++) {
        compute(a, 1, x);
    }
    for (uint32_t x = 0; x < 5; x++) {
        compute(b, 2, x);
    }
    compute(BT_TENANT_NOBODY, 3, 0);
    bt_tenants_destroy(who);
    who = tenants("b=0.5", "a=0.5", NULL); /* in another order */
    assert_int_not_equal(bt_tenants_group(who, "a"), a);
    a = bt_tenants_group(who, "a");
    b = bt_tenants_group(who, "b");
    with_policy("density");
    struct bt_adopt *ad;
    assert_int_equal(bt_loop_create(&node.loop), BT_OK);
    assert_int_equal(
        bt_sealer_create(node.loop, node.cache->pool, node.layout.n_layers, &node.sealer), BT_OK);
    ad = bt_adopt_start(node.loop, node.cache, node.sealer);
    NODE_UNTIL(&node, index_count(node.cache->index) == 13);
    bt_sealer_destroy(node.sealer);
    bt_adopt_destroy(ad);
    bt_loop_destroy(node.loop);
    assert_int_equal(node.cache->quota.used[a], 7);
    assert_int_equal(node.cache->quota.used[b], 5);
    assert_int_equal(node.cache->quota.used[BT_TENANT_NOBODY], 1);
    check_counts();
    stop();
}

/* ---- the SSD ---- */

static char folder[64];

static void wait_disk(void)
{
    struct bt_ssd_stats s;
    do {
        bt_loop_poll(node.loop, 5);
        bt_ssd_stats(bt_tier_ssd(node.tier), &s);
    } while (s.backlog > 0);
}

static void start_ssd(void)
{
    struct node_ssd ssd = {
        .path = folder, .slots = 100, .policy = BT_TIER_ALWAYS, .load_ms = 20000};
    node_start_tenants(&node, SLOTS, 60000, &ssd, who);
}

static void both_tiers(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/baton-unit-quota-XXXXXX");
    assert_non_null(mkdtemp(folder));
    who = tenants("a=0.3", "b=0.5", NULL);
    start_ssd();
    uint8_t a = bt_tenants_group(who, "a"), b = bt_tenants_group(who, "b");
    struct bt_ssd *ssd = bt_tier_ssd(node.tier);
    for (uint32_t x = 0; x < 30; x++) {
        compute(b, 1, x);
        wait_disk();
    }
    NODE_UNTIL(&node, bt_ssd_used(ssd, b) == 30);
    struct bt_ssd_stats s;
    bt_ssd_stats(ssd, &s);
    for (uint32_t x = 0; x < 3 * s.slots; x++) {
        compute(a, 2, x);
        wait_disk();
    }
    assert_int_equal(bt_ssd_used(ssd, b), 30);
    assert_true(bt_ssd_used(ssd, a) > 30); /* borrowed: b has not wanted more */
    node_stop(&node);
    bt_tenants_destroy(who);
    who = tenants("b=0.5", NULL, "*=0.3"); /* a has no rule any more, and no name yet */
    start_ssd();
    ssd = bt_tier_ssd(node.tier);
    b = bt_tenants_group(who, "b");
    assert_int_equal(bt_ssd_used(ssd, b), 30);
    assert_true(bt_ssd_used(ssd, bt_tenants_group(who, "a")) > 30);
    struct bt_kv_key k;
    node_key(1, 3, &k);
    uint32_t pos = bt_ssd_find(ssd, &k);
    assert_int_not_equal(pos, UINT32_MAX);
    assert_int_equal(bt_ssd_group(ssd, pos), b);
    node_stop(&node);
    bt_tenants_destroy(who);
    char cmd[128];
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", folder);
    assert_int_equal(system(cmd), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules),
        cmocka_unit_test(more_tenants_than_groups),
        cmocka_unit_test(a_flood_leaves_others_their_share),
        cmocka_unit_test(who_has_no_share_takes_nobodys),
        cmocka_unit_test(groups_are_given_on),
        cmocka_unit_test(what_is_borrowed_goes_first),
        cmocka_unit_test(within_quotas_the_policy_decides),
        cmocka_unit_test(never_without_room),
        cmocka_unit_test(a_restart_remembers),
        cmocka_unit_test(both_tiers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
