/* Pins over a real slab and a real SSD tier: what is protected against a plain model, what eviction
 * does with it, how it ends. */
#include "kv_disk.h"
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
/* ... also if nobody calls bt_pins_tick: the loop's timer does. */
static void the_clock_ends_it(void **state)
{
    (void)state;
    start(NULL, 0.5);
    flood(1, 4);
    pin(1, 4, 1, bt_mono_ns() + 1);
    assert_int_equal(bt_pins_count(pins), 1);
    NODE_UNTIL(&node, bt_pins_count(pins) == 0);
    assert_int_equal(node_counts(&node).leases, 0);
}

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

/* What a pin says of itself, and when the number of its version rises. */
static void what_is_said(void **state)
{
    struct bt_pin_state all[4];
    (void)state;
    start(NULL, 0.25);
    uint32_t max = bt_index_slots(node.cache->index) / 4;
    assert_int_equal(bt_pins_states(pins, all, 4), 0);
    uint64_t v = bt_pins_version(pins), a = pin(1, 8, 5, UINT64_MAX), b = pin(2, 2, 5, UINT64_MAX);
    assert_true(bt_pins_version(pins) > v);
    assert_int_equal(bt_pins_count(pins), 2);
    assert_int_equal(bt_pins_states(pins, all, 4), 0); /* nothing of them is here */
    v = bt_pins_version(pins);
    assert_true(compute(9, 0)); /* of no pin */
    assert_true(bt_pins_version(pins) == v);
    flood(1, 8);
    assert_true(bt_pins_version(pins) > v);
    flood(2, 2);
    assert_int_equal(state_of(a).protected[BT_PIN_SLAB], max);
    assert_int_equal(state_of(a).beyond[BT_PIN_SLAB], 8 - max);
    assert_int_equal(state_of(a).beyond[BT_PIN_SSD], 0);
    assert_int_equal(state_of(b).protected[BT_PIN_SLAB], 0);
    assert_int_equal(state_of(b).beyond[BT_PIN_SLAB], 2);
    assert_int_equal(bt_pins_states(pins, all, 1), 1); /* as many as there is room for */
    assert_int_equal(all[0].id, a);                    /* of one age: by their number */
    assert_int_equal(bt_pins_states(pins, all, 4), 2);
    assert_int_equal(all[1].id, b);
    v = bt_pins_version(pins);
    assert_int_equal(pin(1, 8, 5, 700), a); /* said again, with another end */
    assert_true(bt_pins_version(pins) == v);
    bt_pins_until(pins, b, 600);
    bt_pins_until(pins, 4711, 1); /* nobody's */
    bt_pins_tick(pins, 599);
    assert_int_equal(bt_pins_count(pins), 2);
    bt_pins_tick(pins, 600);
    assert_int_equal(bt_pins_count(pins), 1);
    bt_pins_tick(pins, 700);
    assert_int_equal(bt_pins_count(pins), 0);
    assert_true(bt_pins_version(pins) > v);
}

/* The same blocks in several pins: the oldest counts, and the next one when it goes. */
static void shared_blocks(void **state)
{
    (void)state;
    start(NULL, 0.5);
    flood(1, 6);
    uint64_t young = pin(1, 6, 20, UINT64_MAX), old = pin(1, 4, 10, UINT64_MAX);
    assert_int_equal(state_of(young).protected[BT_PIN_SLAB], 6); /* each says what it names */
    assert_int_equal(state_of(old).protected[BT_PIN_SLAB], 4);
    assert_int_equal(node_counts(&node).leases, 6);
    bt_pins_remove(pins, old);
    assert_int_equal(state_of(young).protected[BT_PIN_SLAB], 6);
    assert_int_equal(node_counts(&node).leases, 6);
    old = pin(1, 4, 10, UINT64_MAX);
    bt_pins_remove(pins, young);
    assert_int_equal(state_of(old).protected[BT_PIN_SLAB], 4);
    assert_int_equal(node_counts(&node).leases, 4);
    /* Another chain under the same number, and one that is shorter: the old one is forgotten. */
    struct bt_kv_key keys[6];
    for (uint32_t b = 0; b < 6; b++) {
        node_key(b < 3 ? 1 : 2, b, &keys[b]);
    }
    struct bt_pin x = {.id = old, .keys = keys, .n = 4, .created_ns = 10, .ends_ns = UINT64_MAX};
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    assert_int_equal(state_of(old).protected[BT_PIN_SLAB], 3);
    x.n = 2;
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    assert_int_equal(state_of(old).protected[BT_PIN_SLAB], 2);
    x.created_ns = 5; /* of another age */
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    assert_int_equal(bt_pins_count(pins), 1);
    assert_int_equal(node_counts(&node).leases, 2);
}

/* An older pin takes the room of younger ones, from their ends; it comes back when it goes. */
static void older_pins_go_first(void **state)
{
    (void)state;
    start(NULL, 0.25);
    uint32_t max = bt_index_slots(node.cache->index) / 4;
    flood(1, 4);
    flood(2, 4);
    uint64_t young = pin(1, 4, 20, UINT64_MAX), old = pin(2, 4, 10, UINT64_MAX);
    assert_int_equal(state_of(old).protected[BT_PIN_SLAB], 4);
    assert_int_equal(state_of(young).protected[BT_PIN_SLAB], max - 4);
    assert_int_equal(bt_pool_leases(node.cache->pool, slot_of(1, 0)), 1);
    assert_int_equal(bt_pool_leases(node.cache->pool, slot_of(1, 3)), 0);
    bt_pins_remove(pins, old);
    assert_int_equal(state_of(young).protected[BT_PIN_SLAB], 4);
    bt_pins_remove(pins, young);
    assert_int_equal(node_counts(&node).leases, 0);
    /* None at all may be pinned. */
    bt_pins_destroy(pins);
    struct bt_pins_config c = {.loop = node.loop, .cache = node.cache, .pin_max = 0};
    pins = bt_pins_create(&c);
    young = pin(1, 4, 20, UINT64_MAX);
    assert_int_equal(state_of(young).protected[BT_PIN_SLAB], 0);
    assert_int_equal(state_of(young).beyond[BT_PIN_SLAB], 4);
}

static void so_many_pins(void **state)
{
    (void)state;
    start(NULL, 0.25);
    struct bt_kv_key *keys = calloc(BT_PINS_BLOCKS_MAX, sizeof(*keys));
    for (uint32_t i = 0; i < BT_PINS_BLOCKS_MAX; i++) {
        node_key(7, i, &keys[i]);
    }
    struct bt_pin x = {.id = 1, .keys = keys, .n = BT_PINS_BLOCKS_MAX, .ends_ns = UINT64_MAX};
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    x.id = 2;
    x.n = 1;
    assert_int_equal(bt_pins_put(pins, &x), BT_ERR_EXHAUSTED); /* not one block more */
    bt_pins_remove(pins, 1);
    for (uint32_t i = 1; i <= BT_PINS_MAX; i++) {
        x.id = i;
        assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    }
    x.id = BT_PINS_MAX + 1;
    assert_int_equal(bt_pins_put(pins, &x), BT_ERR_EXHAUSTED);
    x.id = 5; /* in the place of one that is known */
    x.n = 2;
    assert_int_equal(bt_pins_put(pins, &x), BT_OK);
    assert_int_equal(bt_pins_count(pins), BT_PINS_MAX);
    free(keys);
}

static void pins_in_the_metrics(void **state)
{
    struct bt_buf text = {0};
    (void)state;
    node_start_ssd(&node, SLOTS, 60000, NULL);
    struct bt_metrics *m = bt_metrics_create();
    struct bt_pins_config c = {
        .loop = node.loop, .cache = node.cache, .pin_max = 0.25, .metrics = m};
    pins = bt_pins_create(&c);
    flood(1, 8);
    pin(1, 8, 1, UINT64_MAX);
    bt_metrics_render(m, &text);
    uint32_t max = bt_index_slots(node.cache->index) / 4;
    char want[3][80];
    snprintf(want[0], sizeof(want[0]), "\nbaton_pool_pins 1\n");
    snprintf(want[1], sizeof(want[1]), "\nbaton_pool_pinned_blocks{tier=\"slab\"} %u\n", max);
    snprintf(want[2], sizeof(want[2]), "\nbaton_pool_pin_beyond_blocks{tier=\"slab\"} %u\n",
             8 - max);
    for (int i = 0; i < 3; i++) {
        assert_non_null(strstr(text.data, want[i]));
    }
    free(bt_buf_take(&text));
    bt_pins_remove(pins, 108);
    bt_metrics_render(m, &text);
    assert_non_null(strstr(text.data, "\nbaton_pool_pins 0\n"));
    assert_non_null(strstr(text.data, "\nbaton_pool_pinned_blocks{tier=\"slab\"} 0\n"));
    free(bt_buf_take(&text));
    bt_pins_destroy(pins);
    pins = NULL;
    bt_metrics_destroy(m);
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
    struct node_ssd conf = {
        .path = folder, .slots = 80, .policy = BT_TIER_ALWAYS, .load_ms = 20000};
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
    id = pin(1, 10, 1, UINT64_MAX); /* again, from what stands on the SSD */
    assert_int_equal(state_of(id).protected[BT_PIN_SSD], 10);
    bt_pins_remove(pins, id);
    assert_int_equal(state_of(id).protected[BT_PIN_SSD], 0);
    flood_both(3);
    for (uint32_t b = 0; b < 10; b++) {
        assert_false(on_ssd(1, b));
    }
}

/* With second_use nobody would have written them. */
static void what_is_pinned_is_written(void **state)
{
    struct node_ssd conf = {
        .path = folder, .slots = 80, .policy = BT_TIER_SECOND_USE, .load_ms = 20000};
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

/* The SSD does not work when the pin comes. Its blocks are protected when it works again. */
static void a_disk_that_comes_back(void **state)
{
    struct node_ssd conf = {
        .path = folder, .slots = 80, .policy = BT_TIER_ALWAYS, .load_ms = 20000, .sys = &kv_disk};
    (void)state;
    start(&conf, 0.25);
    flood(1, 5);
    NODE_UNTIL(&node, ssd().written == 5);
    read_errno = write_errno = EIO;
    assert_true(compute(2, 0));
    NODE_UNTIL(&node, !ssd().up);
    uint64_t id = pin(1, 5, 1, UINT64_MAX);
    assert_int_equal(state_of(id).protected[BT_PIN_SSD], 0);
    read_errno = write_errno = 0;
    NODE_UNTIL(&node, ssd().up);
    bt_pins_tick(pins, 1);
    assert_int_equal(state_of(id).protected[BT_PIN_SSD], 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(outlives_a_flood, teardown),
        cmocka_unit_test_teardown(time_ends_it, teardown),
        cmocka_unit_test_teardown(the_clock_ends_it, teardown),
        cmocka_unit_test_teardown(never_all_of_it, teardown),
        cmocka_unit_test_teardown(what_cannot_be_taken, teardown),
        cmocka_unit_test_teardown(what_is_said, teardown),
        cmocka_unit_test_teardown(shared_blocks, teardown),
        cmocka_unit_test_teardown(older_pins_go_first, teardown),
        cmocka_unit_test_teardown(so_many_pins, teardown),
        cmocka_unit_test_teardown(pins_in_the_metrics, teardown),
        cmocka_unit_test_teardown(ranks_decide, teardown),
        cmocka_unit_test_setup_teardown(both_tiers, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(what_is_pinned_is_written, setup_ssd, teardown_ssd),
        cmocka_unit_test_setup_teardown(a_disk_that_comes_back, setup_ssd, teardown_ssd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
