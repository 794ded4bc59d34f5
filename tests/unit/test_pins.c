/* Pins over a real slab and a real SSD tier: what is protected against a plain model, what eviction
 * does with it, how it ends. */
#include "kv_node.h"

#include "kvstore/cache/pins.h"

#define SLOTS  24u
#define CHAINS 5u
#define DEPTH  8u

static struct node node;
static struct bt_pins *pins;
static char folder[64];

static void start(const struct node_ssd *ssd, double pin_max)
{
    node_start_ssd(&node, SLOTS, 60000, ssd);
    struct bt_pins_config c = {
        .loop = node.loop, .cache = node.cache, .tier = node.tier, .pin_max = pin_max};
    pins = bt_pins_create(&c);
}

static int teardown(void **state)
{
    (void)state;
    bt_pins_destroy(pins);
    node_stop(&node); /* asserts that no lease is left */
    return 0;
}

/* Pins the first n blocks of a chain; the id tells both. */
static uint64_t pin(uint32_t chain, uint32_t n, uint64_t created_ns, uint64_t ends_ns)
{
    struct bt_kv_key keys[64];
    struct bt_pin x = {
        .id = chain * 100 + n, .keys = keys, .n = n, .created_ns = created_ns, .ends_ns = ends_ns};
    for (uint32_t i = 0; i < n; i++) {
        node_key(chain, i, &keys[i]);
    }
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    return x.id;
}

static uint32_t slot_of(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    return bt_index_find(node.cache->index, &k);
}

static bool in_slab(uint32_t chain, uint32_t block)
{
    return slot_of(chain, block) != UINT32_MAX;
}

/* A block computed here: sealed, cached, let go. False: all is in use. */
static bool compute(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    uint32_t slot;
    node_key(chain, block, &k);
    if (cache_take(node.cache, 1, &slot) != BT_OK) {
        return false;
    }
    memset(bt_slab_data(node.slab, slot), (int)(chain * 16 + block), node.layout.block_bytes);
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        bt_pool_segment_crc(node.cache->pool, slot, l, &k);
    }
    assert_true(cache_seal(node.cache, slot, &k, NODE_BT, block));
    bt_cache_put(node.cache, &slot, 1);
    return true;
}

static void flood(uint32_t chain, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        assert_true(compute(chain, b));
    }
}

static struct bt_pin_state state_of(uint64_t id)
{
    struct bt_pin_state all[64];
    uint32_t n = bt_pins_states(pins, all, 64);
    for (uint32_t i = 0; i < n; i++) {
        if (all[i].id == id) {
            return all[i];
        }
    }
    return (struct bt_pin_state){0};
}

static void outlives_a_flood(void **state)
{
    (void)state;
    start(NULL, 0.5);
    flood(1, 6);
    uint64_t id = pin(1, 8, 1, UINT64_MAX); /* two of them are not there yet */
    assert_int_equal(state_of(id).protected[BT_PIN_SLAB], 6);
    flood(2, 3 * SLOTS);
    assert_true(compute(1, 6));
    assert_true(compute(1, 7));
    flood(3, 3 * SLOTS);
    for (uint32_t b = 0; b < 8; b++) {
        assert_true(in_slab(1, b));
    }
    uint64_t version = bt_pins_version(pins);
    bt_pins_remove(pins, id);
    assert_true(bt_pins_version(pins) > version);
    assert_int_equal(node_counts(&node).leases, 0);
    flood(4, 3 * SLOTS);
    for (uint32_t b = 0; b < 8; b++) {
        assert_false(in_slab(1, b));
    }
    bt_pins_remove(pins, 4711); /* nobody */
}

static void time_ends_it(void **state)
{
    (void)state;
    start(NULL, 0.5);
    flood(1, 4);
    uint64_t id = pin(1, 4, 1, 1000);
    bt_pins_tick(pins, 999);
    assert_int_equal(bt_pins_count(pins), 1);
    assert_int_equal(pin(1, 4, 1, 2000), id); /* renewed */
    bt_pins_tick(pins, 1999);
    assert_int_equal(bt_pins_count(pins), 1);
    bt_pins_tick(pins, 2000);
    assert_int_equal(bt_pins_count(pins), 0);
    flood(2, 3 * SLOTS);
    assert_false(in_slab(1, 0));
}

/* Serving goes on when more is pinned than may be: there is always room for new blocks. */
static void never_all_of_it(void **state)
{
    (void)state;
    start(NULL, 0.5);
    uint64_t a = pin(1, 40, 1, UINT64_MAX), b = pin(2, 40, 2, UINT64_MAX);
    for (uint32_t i = 0; i < 40; i++) {
        if (!in_slab(2, i)) {
            assert_true(compute(2, i));
        }
        if (!in_slab(1, i)) {
            assert_true(compute(1, i));
        }
    }
    uint32_t max = bt_index_slots(node.cache->index) / 2;
    assert_int_equal(state_of(a).protected[BT_PIN_SLAB], max);
    assert_int_equal(state_of(b).protected[BT_PIN_SLAB], 0);
    for (uint32_t i = 0; i < max; i++) {
        assert_true(in_slab(1, i)); /* the head */
    }
}

static void what_cannot_be_taken(void **state)
{
    (void)state;
    start(NULL, 0.5);
    struct bt_kv_key k;
    node_key(1, 0, &k);
    struct bt_pin x = {.id = 1, .keys = &k, .n = 0};
    assert_int_equal(bt_pins_put(pins, &x), BT_ERR_EXHAUSTED);
    x.n = BT_PINS_BLOCKS_MAX + 1;
    assert_int_equal(bt_pins_put(pins, &x), BT_ERR_EXHAUSTED);
    struct bt_kv_key loop[3] = {k, k, k}; /* no chain: what repeats is left out */
    x.n = 3;
    x.keys = loop;
    x.ends_ns = UINT64_MAX;
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    assert_true(compute(1, 0));
    assert_int_equal(state_of(1).protected[BT_PIN_SLAB], 1);
}

/* ---- against a model ---- */

struct model_pin {
    uint32_t chain, n;
    uint64_t created_ns;
};

static struct model_pin model[16];
static uint32_t n_model;

static uint64_t rng_state = 7;
static uint32_t rnd(uint32_t n)
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(rng_state >> 33) % n;
}

/* By rank: pins by age, blocks by depth; the first `max` of those that are there are protected. */
static void check_model(void)
{
    bool seen[CHAINS][DEPTH] = {{0}};
    uint32_t left = bt_index_slots(node.cache->index) / 4, protected = 0;
    for (uint32_t i = 0; i < n_model; i++) { /* kept by age */
        for (uint32_t b = 0; b < model[i].n; b++) {
            uint32_t slot = slot_of(model[i].chain, b);
            if (slot == UINT32_MAX || seen[model[i].chain][b]) {
                continue;
            }
            seen[model[i].chain][b] = true;
            bool expect = left > 0;
            left -= expect;
            protected += expect;
            assert_int_equal(bt_pool_leases(node.cache->pool, slot), expect);
        }
    }
    assert_int_equal(node_counts(&node).leases, protected);
}

static void step_model(uint64_t now)
{
    uint32_t chain = rnd(CHAINS), at = n_model > 0 ? rnd(n_model) : 0, what = rnd(8);
    if (what == 0 && n_model < 12) {
        uint32_t n = 1 + rnd(DEPTH);
        for (uint32_t i = 0; i < n_model; i++) {
            if (model[i].chain == chain && model[i].n == n) {
                return;
            }
        }
        uint64_t created = rnd(4) == 0 && n_model > 0 ? model[0].created_ns - 1 : now;
        memmove(&model[1], &model[0], (created < now) * n_model * sizeof(model[0]));
        model[created < now ? 0 : n_model] = (struct model_pin){chain, n, created};
        n_model++;
        pin(chain, n, created, UINT64_MAX);
    } else if (what == 1 && n_model > 0) {
        bt_pins_remove(pins, model[at].chain * 100 + model[at].n);
        memmove(&model[at], &model[at + 1], (--n_model - at) * sizeof(model[0]));
    } else if (what == 2) {
        struct bt_kv_key k;
        node_key(chain, rnd(DEPTH), &k);
        uint32_t slot = bt_cache_hold(node.cache, &k); /* given up, unless it is protected */
        if (slot != UINT32_MAX) {
            bt_cache_evict(node.cache, slot);
        }
    } else {
        uint32_t b = rnd(DEPTH);
        assert_true(in_slab(chain, b) || compute(chain, b));
    }
}

static void ranks_decide(void **state)
{
    (void)state;
    start(NULL, 0.25);
    n_model = 0;
    for (uint64_t now = 1000000; now < 1020000; now++) {
        step_model(now);
        check_model();
    }
}

/* ---- with an SSD below ---- */

static struct bt_ssd_stats ssd(void)
{
    struct bt_ssd_stats s;
    bt_ssd_stats(bt_tier_ssd(node.tier), &s);
    return s;
}

static bool on_ssd(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    return bt_ssd_has(bt_tier_ssd(node.tier), &k);
}

static void start_ssd(void)
{
    struct node_ssd conf = {.path = folder, .slots = 80, .policy = BT_TIER_ALWAYS, .load_ms = 1000};
    start(&conf, 0.25);
}

static int setup_ssd(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/baton-unit-pins-XXXXXX");
    assert_non_null(mkdtemp(folder));
    return 0;
}

static int teardown_ssd(void **state)
{
    char cmd[128];
    teardown(state);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", folder);
    return system(cmd);
}

/* Turns both tiers over, in the pace of the disk. */
static void flood_both(uint32_t chain)
{
    uint64_t until = ssd().evicted + 2 * ssd().slots;
    for (uint32_t b = 0; ssd().evicted < until; b++) {
        assert_true(compute(chain, b));
        NODE_UNTIL(&node, ssd().backlog == 0);
        bt_loop_poll(node.loop, 0);
    }
}

static void both_tiers(void **state)
{
    (void)state;
    start_ssd();
    for (uint32_t b = 0; b < 10; b++) { /* more than a quarter of the slab, less than of the SSD */
        assert_true(compute(1, b));
        NODE_UNTIL(&node, ssd().backlog == 0);
    }
    NODE_UNTIL(&node, on_ssd(1, 9));
    uint64_t id = pin(1, 10, 1, UINT64_MAX);
    struct bt_pin_state s = state_of(id);
    uint32_t slab_max = bt_index_slots(node.cache->index) / 4;
    assert_int_equal(s.protected[BT_PIN_SLAB], slab_max);
    assert_int_equal(s.beyond[BT_PIN_SLAB], 10 - slab_max);
    assert_int_equal(s.protected[BT_PIN_SSD], 10);
    flood_both(2);
    for (uint32_t b = 0; b < 10; b++) {
        assert_true(on_ssd(1, b));
        assert_int_equal(in_slab(1, b), b < slab_max);
    }
    assert_int_equal(state_of(id).beyond[BT_PIN_SLAB], 0); /* they are not in the slab any more */
    bt_pins_remove(pins, id);
    flood_both(3);
    for (uint32_t b = 0; b < 10; b++) {
        assert_false(on_ssd(1, b));
    }
}

/* With second_use nobody would have written them. */
static void what_is_pinned_is_written(void **state)
{
    struct node_ssd conf = {
        .path = folder, .slots = 80, .policy = BT_TIER_SECOND_USE, .load_ms = 1000};
    (void)state;
    start(&conf, 0.25);
    flood(1, 5);
    uint64_t id = pin(1, 5, 1, UINT64_MAX);
    assert_false(on_ssd(1, 0));
    for (uint64_t end = bt_mono_ns() + 30000000000ull; state_of(id).protected[BT_PIN_SSD] < 5;) {
        assert_true(bt_mono_ns() < end);
        bt_pins_tick(pins, 1);
        bt_loop_poll(node.loop, 10);
    }
    assert_int_equal(ssd().written, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(outlives_a_flood, teardown),
        cmocka_unit_test_teardown(time_ends_it, teardown),
        cmocka_unit_test_teardown(never_all_of_it, teardown),
        cmocka_unit_test_teardown(what_cannot_be_taken, teardown),
        cmocka_unit_test_teardown(ranks_decide, teardown),
        cmocka_unit_test_setup_teardown(both_tiers, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(what_is_pinned_is_written, setup_ssd, teardown_ssd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
