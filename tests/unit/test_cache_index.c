/* The index of the cache against a model, and what the metrics say of tenants' slots. */
#include "kv_node.h"

#include "common/metrics/metrics.h"
#include "kvstore/cache/index.h"
#include "kvstore/cache/quota_metrics.h"

static struct node node;

static struct {
    uint32_t added, removed, slot, depth;
    struct bt_kv_key key;
} seen;

static void on_index(void *arg, bool added, uint32_t slot, const struct bt_kv_key *key,
                     uint32_t depth)
{
    (void)arg;
    *(added ? &seen.added : &seen.removed) += 1;
    seen.slot = slot;
    seen.depth = depth;
    seen.key = *key;
}

/* Ten of twenty keys at a time, in a table of sixteen places: many of them collide. */
static void index_against_a_model(void **state)
{
    struct bt_index *ix = bt_index_create(10);
    uint32_t at[20], depth, n_added = 0, n_removed = 0; /* slot + 1 of a key */
    uint64_t rng = 3;
    (void)state;
    memset(at, 0, sizeof(at));
    memset(&seen, 0, sizeof(seen));
    bt_index_observe(ix, on_index, NULL);
    assert_int_equal(bt_index_slots(ix), 10);
    for (int step = 0; step < 20000; step++) {
        rng = rng * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t k = (uint32_t)(rng >> 33) % 20, slot = (uint32_t)(rng >> 45) % 10;
        struct bt_kv_key key;
        node_key(1, k, &key);
        if (at[k] != 0 && slot % 2 == 0) {
            assert_memory_equal(bt_index_key(ix, at[k] - 1, &depth), &key, sizeof(key));
            assert_int_equal(depth, k + 5);
            bt_index_remove(ix, at[k] - 1);
            assert_int_equal(seen.slot, at[k] - 1);
            at[k] = 0;
            n_removed++;
        } else if (!bt_index_has_slot(ix, slot)) {
            bool expect = at[k] == 0;
            assert_int_equal(bt_index_add(ix, &key, k + 5, slot), expect);
            n_added += expect;
            at[k] = expect ? slot + 1 : at[k];
        }
        assert_true(seen.added == n_added && seen.removed == n_removed);
        for (uint32_t i = 0; i < 20; i++) {
            node_key(1, i, &key);
            assert_int_equal(bt_index_find(ix, &key), at[i] - 1);
        }
    }
    assert_memory_equal(&seen.key.b[0], "\1\0\0\0", 4);
    assert_true(n_removed > 1000);
    assert_false(bt_index_has_slot(ix, 10));
    bt_index_observe(ix, NULL, NULL);
    bt_index_destroy(ix);
    assert_true(seen.added == n_added && seen.removed == n_removed);
}

/* ---- metrics of tenants ---- */

static double series(struct bt_metrics *m, const char *name)
{
    struct bt_buf text = {0};
    char line[160];
    bt_metrics_render(m, &text);
    snprintf(line, sizeof(line), "\n%s ", name);
    const char *at = strstr(text.data, line);
    double v = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    free(bt_buf_take(&text));
    return v;
}

static void tenants_in_the_metrics(void **state)
{
    char *rules[] = {(char *)"a=0.5", (char *)"b=0.25", NULL};
    char err[200];
    struct bt_tenants *who;
    (void)state;
    node_start(&node, 24, 60000);
    struct bt_metrics *m = bt_metrics_create();
    assert_null(bt_quota_metrics_create(m, node.cache, NULL)); /* nobody is bounded */
    assert_int_equal(bt_tenants_create(rules, &who, err, sizeof(err)), BT_OK);
    bt_cache_set_tenants(node.cache, who);
    struct bt_quota_metrics *q = bt_quota_metrics_create(m, node.cache, NULL);
    assert_non_null(q);
    uint32_t slots[6], n = bt_index_slots(node.cache->index);
    assert_int_equal(bt_cache_take(node.cache, bt_tenants_group(who, "a"), 3, slots), BT_OK);
    assert_int_equal(bt_cache_take(node.cache, bt_tenants_group(who, "b"), 1, slots + 3), BT_OK);
    assert_int_equal(bt_cache_take(node.cache, bt_tenants_group(who, "c"), 2, slots + 4), BT_OK);
    const char *used = "baton_pool_tenant_blocks", *max = "baton_pool_tenant_quota_blocks";
    char name[128];
    static const struct {
        const char *tenant;
        uint32_t used;
        double share;
    } want[] = {{"a", 3, 0.5}, {"b", 1, 0.25}, {"(others)", 2, -1}};
    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        snprintf(name, sizeof(name), "%s{tenant=\"%s\",tier=\"slab\"}", used, want[i].tenant);
        assert_int_equal((int)series(m, name), want[i].used);
        snprintf(name, sizeof(name), "%s{tenant=\"%s\",tier=\"ssd\"}", used, want[i].tenant);
        assert_int_equal((int)series(m, name), 0);
        snprintf(name, sizeof(name), "%s{tenant=\"%s\",tier=\"slab\"}", max, want[i].tenant);
        assert_int_equal((int)series(m, name), want[i].share < 0 ? -1 : (int)(want[i].share * n));
    }
    assert_int_equal(bt_pool_header(node.cache->pool, slots[0])->tenant, bt_kv_tenant_tag("a"));
    bt_cache_put(node.cache, slots, 6);
    snprintf(name, sizeof(name), "%s{tenant=\"a\",tier=\"slab\"}", used);
    assert_int_equal((int)series(m, name), 0);
    bt_quota_metrics_destroy(q);
    (void)series(m, name);
    bt_quota_metrics_destroy(NULL);
    bt_metrics_destroy(m);
    node_stop(&node);
    bt_tenants_destroy(who);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(index_against_a_model),
        cmocka_unit_test(tenants_in_the_metrics),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
