/* The cache of a node through its own interface: what is counted, which callbacks come, when a
 * block leaves, and its pool alone. By a clock that the test moves. */
#include "kv_clock.h"
#include "kv_node.h"

#define SLOTS 24u

static struct node node;
static struct bt_cache *cache;

static struct { /* what the callbacks told */
    uint32_t sealed, hits, evicting, cached, dropped, last;
    bool save; /* evicting takes the block over */
} told;

static void on_sealed(void *arg, uint32_t slot)
{
    assert_ptr_equal(arg, &told);
    assert_int_equal(bt_pool_leases(cache->pool, slot), 1); /* its caller's */
    told.sealed++;
}

static void on_hit(void *arg, uint32_t slot)
{
    (void)arg;
    told.hits++;
    told.last = slot;
}

static bool on_evicting(void *arg, uint32_t slot)
{
    (void)arg;
    told.evicting++;
    told.last = slot;
    if (told.save) {
        struct bt_kv_key k = *bt_pool_key(cache->pool, slot);
        assert_int_equal(bt_cache_hold(cache, &k), slot);
    }
    return told.save;
}

static void on_cached(void *arg, uint32_t slot)
{
    (void)arg;
    assert_true(bt_index_has_slot(cache->index, slot));
    told.cached++;
}

static void on_dropped(void *arg, uint32_t slot)
{
    (void)arg;
    assert_int_equal(bt_pool_leases(cache->pool, slot), 0);
    told.dropped++;
    told.last = slot;
}

static int setup(void **state)
{
    (void)state;
    node_start(&node, SLOTS, 60000);
    cache = node.cache;
    memset(&told, 0, sizeof(told));
    cache->lower = (struct bt_cache_lower){on_sealed, on_hit, on_evicting, &told};
    cache->guard = (struct bt_cache_guard){on_cached, on_dropped, &told};
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    cache->lower = (struct bt_cache_lower){0};
    cache->guard = (struct bt_cache_guard){0};
    node_stop(&node);
    return 0;
}

static uint32_t take(void)
{
    uint32_t slot;
    assert_int_equal(cache_take(cache, 1, &slot), BT_OK);
    return slot;
}

enum { COMPUTED, COPY, PASSING, PASSING_COPY };

/* Seals block b of a chain in a slot that is held; true: it is in the index. */
static bool seal(uint32_t slot, uint32_t chain, uint32_t b, int kind)
{
    struct bt_kv_key k;
    node_key(chain, b, &k);
    memset(bt_slab_data(node.slab, slot), (int)(chain + b), node.layout.block_bytes);
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        bt_pool_segment_crc(cache->pool, slot, l, &k);
    }
    struct bt_cache_block block = {
        .key = &k, .n_tokens = NODE_BT, .depth = b, .passing = kind >= PASSING};
    return kind == COPY || kind == PASSING_COPY ? bt_cache_seal_copy(cache, slot, &block)
                                                : bt_cache_seal(cache, slot, &block);
}

static uint32_t add(uint32_t chain, uint32_t b, int kind)
{
    uint32_t slot = take();
    assert_true(seal(slot, chain, b, kind));
    bt_cache_put(cache, &slot, 1);
    return slot;
}

static uint32_t find(uint32_t chain, uint32_t b)
{
    struct bt_kv_key k;
    node_key(chain, b, &k);
    return bt_index_find(cache->index, &k);
}

/* A request for n blocks of a chain: so many of them are here. */
static uint32_t lookup(uint32_t chain, uint32_t n, uint32_t *slots)
{
    struct bt_kv_key keys[SLOTS];
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &keys[b]);
    }
    return bt_cache_prefix(cache, keys, n, slots);
}

static void use(uint32_t chain, uint32_t n)
{
    uint32_t slots[SLOTS], have = lookup(chain, n, slots);
    assert_int_equal(have, n);
    bt_cache_put(cache, slots, have);
}

static void what_is_counted(void **state)
{
    uint32_t slots[SLOTS], twice = take();
    (void)state;
    for (uint32_t b = 0; b < 3; b++) {
        add(1, b, COMPUTED);
    }
    assert_int_equal(cache->sealed, 3);
    assert_int_equal(told.sealed, 3);
    assert_int_equal(told.cached, 3);
    add(1, 4, COMPUTED); /* behind a gap */
    assert_int_equal(lookup(1, 5, slots), 3);
    assert_int_equal(cache->hits, 3);
    assert_int_equal(cache->misses, 2);
    assert_int_equal(told.hits, 3);
    for (uint32_t b = 0; b < 3; b++) {
        assert_int_equal(slots[b], find(1, b));
        assert_int_equal(bt_pool_leases(cache->pool, slots[b]), 1);
    }
    bt_cache_put(cache, slots, 3);
    assert_int_equal(lookup(2, 4, slots), 0);
    assert_int_equal(cache->misses, 6);
    assert_false(seal(twice, 1, 0, COMPUTED)); /* it is here: the slot stays its holder's */
    assert_int_equal(cache->duplicates, 1);
    assert_int_equal(cache->sealed, 4);
    assert_int_equal(told.sealed, 4);
    uint32_t free = node_counts(&node).free;
    bt_cache_put(cache, &twice, 1);
    assert_int_equal(node_counts(&node).free, free + 1);
    assert_int_equal(told.dropped, 0);
    assert_int_equal(cache->evicted, 0);
    struct bt_kv_key k;
    node_key(7, 0, &k);
    assert_int_equal(bt_cache_hold(cache, &k), UINT32_MAX);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* A copy of another node's block: the request that fetched it is its first use. */
static void copies_are_on_probation(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 3; b++) {
        add(1, b, COPY);
    }
    assert_int_equal(cache->copies, 3);
    use(1, 2);
    assert_int_equal(told.hits, 0);
    assert_int_equal(cache->copies, 3);
    use(1, 1); /* by another one: it is an ordinary block now */
    assert_int_equal(told.hits, 1);
    assert_int_equal(cache->copies, 2);
    use(1, 1);
    assert_int_equal(told.hits, 2);
    assert_int_equal(cache->copies, 2);
    cache->copies_max = 2;
    add(2, 0, COPY); /* one too many: it leaves with its last lease */
    assert_int_equal(find(2, 0), UINT32_MAX);
    assert_int_equal(cache->copies, 2);
    assert_int_equal(cache->evicted, 1);
    assert_int_equal(told.dropped, 1);
    uint32_t slot = take();
    assert_true(seal(slot, 1, 9, COPY));
    assert_int_equal(cache->copies, 3);
    struct bt_kv_key k;
    node_key(1, 1, &k);
    uint32_t one = bt_cache_hold(cache, &k); /* of them, not used yet since */
    bt_cache_put(cache, &one, 1);
    assert_int_equal(find(1, 1), UINT32_MAX);
    bt_cache_put(cache, &slot, 1); /* two are as many as may be */
    assert_int_equal(find(1, 9), slot);
    uint32_t twice = take();
    assert_false(seal(twice, 1, 9, COPY));
    assert_int_equal(cache->copies, 2);
    bt_cache_put(cache, &twice, 1);
}

static void passing_blocks_leave(void **state)
{
    (void)state;
    add(1, 0, PASSING);
    assert_int_equal(find(1, 0), UINT32_MAX);
    assert_int_equal(told.sealed, 0); /* the tier below is not told */
    assert_int_equal(told.dropped, 1);
    assert_int_equal(cache->evicted, 0);
    assert_int_equal(cache->copies, 0);
    add(1, 1, PASSING_COPY);
    assert_int_equal(find(1, 1), UINT32_MAX);
    assert_int_equal(cache->copies, 0);
    uint32_t slot = take();
    assert_true(seal(slot, 2, 0, PASSING));
    use(2, 1); /* another request wants it: it stays */
    assert_int_equal(told.hits, 1);
    bt_cache_put(cache, &slot, 1);
    assert_int_equal(find(2, 0), slot);
}

static void room_is_made(void **state)
{
    uint32_t slots[64], n = node_counts(&node).total;
    (void)state;
    for (uint32_t b = 0; b < n; b++) {
        add(1, b, COMPUTED);
    }
    uint32_t held = find(1, 3);
    bt_pool_lease(cache->pool, held);
    cache->policy->pin(cache->evict, held);
    assert_int_equal(cache_take(cache, n, slots), BT_ERR_EXHAUSTED);
    assert_int_equal(cache->evicted, 0); /* nothing goes for nothing */
    assert_int_equal(cache_take(cache, n - 1, slots), BT_OK);
    assert_int_equal(cache->evicted, n - 1);
    assert_int_equal(told.dropped, n - 1);
    assert_int_equal(find(1, 3), held);
    assert_int_equal(cache_take(cache, 1, slots + n - 1), BT_ERR_EXHAUSTED);
    bt_cache_put(cache, slots, n - 1);
    assert_int_equal(node_counts(&node).free, n - 1);
    bt_cache_evict(cache, held);
    assert_int_equal(find(1, 3), UINT32_MAX);
    assert_int_equal(node_counts(&node).free, n);
    uint32_t slot = add(2, 0, COMPUTED);
    bt_pool_lease(cache->pool, slot);
    bt_pool_lease(cache->pool, slot);
    cache->policy->pin(cache->evict, slot);
    bt_cache_evict(cache, slot); /* somebody else has it */
    assert_int_equal(find(2, 0), slot);
    bt_cache_evict(cache, slot);
    assert_int_equal(find(2, 0), UINT32_MAX);
}

/* A chain is put back from its end, and so evicted from its end. */
static void chains_go_from_their_end(void **state)
{
    uint32_t slots[SLOTS], n = node_counts(&node).total;
    (void)state;
    for (uint32_t b = 0; b < n; b++) {
        slots[b] = take();
        assert_true(seal(slots[b], 1, b, COMPUTED));
    }
    bt_cache_put(cache, slots, n);
    for (uint32_t b = n; b-- > n - 4;) {
        uint32_t slot = take();
        assert_int_equal(find(1, b), UINT32_MAX);
        assert_true(b == 0 || find(1, b - 1) != UINT32_MAX);
        (void)slot;
        slots[b] = slot;
    }
    bt_cache_put(cache, slots + n - 4, 4);
}

static void trim_keeps_slots_free(void **state)
{
    uint32_t n = node_counts(&node).total;
    (void)state;
    for (uint32_t b = 0; b < n; b++) {
        add(1, b, COMPUTED);
    }
    bt_cache_trim(cache, 1024); /* none are asked for */
    assert_int_equal(node_counts(&node).free, 0);
    cache->low = 5;
    bt_cache_trim(cache, 0);
    assert_int_equal(node_counts(&node).free, 0);
    bt_cache_trim(cache, 3);
    assert_int_equal(node_counts(&node).free, 3);
    assert_int_equal(told.evicting, 3);
    told.save = true; /* the tier below takes them over: they count as free */
    bt_cache_trim(cache, 1024);
    assert_int_equal(told.evicting, 5);
    assert_int_equal(node_counts(&node).free, 3);
    assert_int_equal(node_counts(&node).leases, 2);
    bt_cache_evict(cache, told.last);
    assert_int_equal(node_counts(&node).free, 4);
    told.save = false;
    bt_cache_trim(cache, 1024);
    assert_int_equal(node_counts(&node).free, 5);
    bt_cache_trim(cache, 1024);
    assert_int_equal(node_counts(&node).free, 5);
    cache->low = n + 5; /* more than there are: as far as it goes */
    bt_cache_trim(cache, 1024);
    assert_int_equal(node_counts(&node).free, n - 1);
    for (uint32_t s = 0; s < n; s++) {
        if (bt_pool_leases(cache->pool, s) > 0) {
            bt_cache_put(cache, &s, 1);
        }
    }
}

static void a_dead_process_may_write(void **state)
{
    (void)state;
    uint32_t a = take(), b = take(), c = add(1, 0, COMPUTED);
    assert_false(seal(b, 1, 0, COMPUTED)); /* SEALED, but in no index */
    bt_cache_quarantine(cache, a);
    bt_cache_quarantine(cache, b);
    bt_cache_quarantine(cache, c); /* cached: others read it */
    assert_int_equal(bt_pool_state(cache->pool, a), BT_SLOT_QUARANTINE);
    assert_int_equal(bt_pool_state(cache->pool, b), BT_SLOT_QUARANTINE);
    assert_int_equal(bt_pool_state(cache->pool, c), BT_SLOT_SEALED);
    bt_cache_quarantine(cache, a); /* it is already */
    bt_cache_put(cache, &a, 1);
    bt_cache_quarantine(cache, a); /* free: nobody's */
    bt_cache_put(cache, &b, 1);
    assert_int_equal(node_counts(&node).quarantine, 0);
    assert_int_equal(node_counts(&node).free, node_counts(&node).total - 1);
}

static void doubted_blocks(void **state)
{
    uint32_t slots[3];
    (void)state;
    for (uint32_t b = 0; b < 2; b++) {
        slots[b] = take();
        assert_true(seal(slots[b], 1, b, COMPUTED));
    }
    slots[2] = take(); /* in no index: nothing to compare with */
    *(uint8_t *)bt_slab_data(node.slab, slots[1]) ^= 1;
    bt_pool_lease(cache->pool, slots[1]); /* somebody else reads it still */
    assert_int_equal(bt_pool_verify(cache->pool, slots[0]), BT_OK);
    assert_int_equal(bt_pool_verify(cache->pool, slots[1]), BT_ERR_DATA_LOSS);
    assert_int_equal(bt_pool_verify(cache->pool, slots[2]), BT_ERR_NOT_FOUND);
    bt_cache_put_doubted(cache, slots, 3);
    assert_int_equal(find(1, 0), slots[0]);
    assert_int_equal(find(1, 1), slots[1]); /* with its last lease */
    bt_cache_put_doubted(cache, slots + 1, 1);
    assert_int_equal(find(1, 1), UINT32_MAX);
    assert_int_equal(cache->evicted, 1);
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_equal(node_counts(&node).free, node_counts(&node).total - 1);
}

/* ---- the pool ---- */

static void uses_stand_in_the_header(void **state)
{
    uint32_t count, slot = add(1, 0, COMPUTED);
    uint64_t made = bt_mono_ns();
    (void)state;
    assert_true(bt_pool_last_use(cache->pool, slot, &count) == made);
    assert_int_equal(count, 1);
    clock_skip(node.loop, 10);
    use(1, 1);
    assert_true(bt_pool_last_use(cache->pool, slot, &count) == made + 10000000);
    assert_int_equal(count, 2);
    clock_skip(node.loop, 10);
    uint32_t slots[1];
    assert_int_equal(lookup(1, 1, slots), 1);
    clock_skip(node.loop, 10);
    bt_cache_put(cache, slots, 1); /* it was in use until now, which is no other use */
    assert_true(bt_pool_last_use(cache->pool, slot, &count) == made + 30000000);
    assert_int_equal(count, 3);
    /* Its slot's next block begins anew. */
    bt_pool_lease(cache->pool, slot);
    cache->policy->pin(cache->evict, slot);
    bt_cache_evict(cache, slot);
    assert_int_equal(take(), slot);
    assert_true(seal(slot, 2, 0, COMPUTED));
    assert_true(bt_pool_last_use(cache->pool, slot, &count) == made + 30000000);
    assert_int_equal(count, 1);
    bt_cache_put(cache, &slot, 1);
    use(2, 1);
    (void)bt_pool_last_use(cache->pool, slot, &count);
    assert_int_equal(count, 2);
}

static void slots_in_transit(void **state)
{
    (void)state;
    uint32_t most = node_counts(&node).total / 2;
    assert_int_equal(bt_pool_transit_get(cache->pool, most + 1), BT_ERR_EXHAUSTED);
    assert_int_equal(bt_pool_transit_get(cache->pool, most - 1), BT_OK);
    assert_int_equal(bt_pool_transit_get(cache->pool, 2), BT_ERR_EXHAUSTED);
    assert_int_equal(bt_pool_transit_get(cache->pool, 1), BT_OK);
    assert_int_equal(node_counts(&node).transit, most);
    bt_pool_transit_put(cache->pool, most);
    assert_int_equal(node_counts(&node).transit, 0);
}

static void headers_have_a_checksum(void **state)
{
    (void)state;
    uint32_t slot = add(1, 0, COMPUTED);
    struct bt_slot_header *h = &node.slab->headers[slot];
    assert_true(bt_pool_header_ok(cache->pool, slot));
    h->depth++;
    assert_false(bt_pool_header_ok(cache->pool, slot));
    assert_int_equal(bt_pool_verify(cache->pool, slot), BT_ERR_DATA_LOSS);
    h->depth--;
    h->layout_id++; /* of another model */
    assert_false(bt_pool_header_ok(cache->pool, slot));
    h->layout_id--;
    node.slab->crcs[slot * node.layout.n_layers + 1] ^= 1;
    assert_false(bt_pool_header_ok(cache->pool, slot));
    node.slab->crcs[slot * node.layout.n_layers + 1] ^= 1;
    assert_int_equal(bt_pool_verify(cache->pool, slot), BT_OK);
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&node.layout, node.layout.n_layers - 1, &bytes);
    ((uint8_t *)bt_slab_data(node.slab, slot))[off + bytes - 1] ^= 1; /* the last byte */
    assert_int_equal(bt_pool_verify(cache->pool, slot), BT_ERR_DATA_LOSS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_counted, setup, teardown),
        cmocka_unit_test_setup_teardown(copies_are_on_probation, setup, teardown),
        cmocka_unit_test_setup_teardown(passing_blocks_leave, setup, teardown),
        cmocka_unit_test_setup_teardown(room_is_made, setup, teardown),
        cmocka_unit_test_setup_teardown(chains_go_from_their_end, setup, teardown),
        cmocka_unit_test_setup_teardown(trim_keeps_slots_free, setup, teardown),
        cmocka_unit_test_setup_teardown(a_dead_process_may_write, setup, teardown),
        cmocka_unit_test_setup_teardown(doubted_blocks, setup, teardown),
        cmocka_unit_test_setup_teardown(uses_stand_in_the_header, setup, teardown),
        cmocka_unit_test_setup_teardown(slots_in_transit, setup, teardown),
        cmocka_unit_test_setup_teardown(headers_have_a_checksum, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
