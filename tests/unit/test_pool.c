/* Pool, index, eviction and the cache that joins them: the life of slots against a small model. */
#include "kv_node.h"

#include <sys/mman.h>
#include <sys/wait.h>

#include "common/base/philox.h"

struct fix {
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    struct bt_cache *cache;
    char path[96];
};

static int setup(void **state)
{
    struct fix *f = calloc(1, sizeof(*f));
    struct bt_kv_key root = {{1}};
    char err[256];
    snprintf(f->path, sizeof(f->path), "/dev/shm/baton-unit-pool-%d", (int)getpid());
    assert_int_equal(bt_kv_layout_gqa(NODE_BT, 2, 1, 32, BT_DT_BF16, 0, &f->layout), BT_OK);
    struct bt_slab_spec spec = {.path = f->path,
                                .bytes = 5 * 4096 + 20 * 4300,
                                .layout = &f->layout,
                                .root = &root,
                                .incarnation = 1};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &f->slab, err, sizeof(err)), BT_OK);
    assert_int_equal(unlink(f->path), 0); /* nothing is left behind by a test that crashes */
    f->cache = bt_cache_create(f->slab, &f->layout, 8, &bt_evict_slru);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fix *f = *state;
    bt_cache_destroy(f->cache);
    bt_slab_unmap(f->slab);
    free(f);
    return 0;
}

static uint64_t word(const struct fix *f, uint32_t slot)
{
    return atomic_load(&f->slab->headers[slot].state);
}

/* Computes the CRCs and seals. */
static bool seal(struct fix *f, uint32_t slot, const struct bt_kv_key *k, uint32_t depth)
{
    for (uint32_t l = 0; l < f->layout.n_layers; l++) {
        bt_pool_segment_crc(f->cache->pool, slot, l, k);
    }
    return cache_seal(f->cache, slot, k, NODE_BT, depth);
}

static void life_of_a_slot(void **state)
{
    struct fix *f = *state;
    struct bt_pool *p = f->cache->pool;
    struct bt_pool_counts c;
    struct bt_kv_key k;
    uint32_t s = bt_pool_take(p);
    uint32_t gen = bt_pool_generation(p, s);
    assert_int_equal(gen, 1);
    assert_int_equal(word(f, s), bt_slot_word(gen, BT_SLOT_WRITING));
    memset(bt_slab_data(f->slab, s), 0x31, f->layout.block_bytes);
    node_key(1, 0, &k);
    uint32_t crc = bt_pool_segment_crc(p, s, 1, &k);
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&f->layout, 1, &bytes);
    assert_int_equal(crc, bt_slab_segment_crc(&k, 1, f->layout.layout_id,
                                              (uint8_t *)bt_slab_data(f->slab, s) + off, bytes));
    assert_true(seal(f, s, &k, 5));
    assert_int_equal(word(f, s), bt_slot_word(gen, BT_SLOT_SEALED));
    assert_int_equal(f->slab->headers[s].depth, 5);
    assert_int_equal(f->slab->crcs[s * 2 + 1], crc);
    assert_int_equal(bt_pool_verify(p, s), BT_OK);
    ((uint8_t *)bt_slab_data(f->slab, s))[off + 3] ^= 1; /* one bit of the data */
    assert_int_equal(bt_pool_verify(p, s), BT_ERR_DATA_LOSS);
    ((uint8_t *)bt_slab_data(f->slab, s))[off + 3] ^= 1;
    f->slab->headers[s].depth++; /* the header */
    assert_int_equal(bt_pool_verify(p, s), BT_ERR_DATA_LOSS);
    f->slab->headers[s].depth--;
    bt_pool_counts(p, &c);
    assert_int_equal(c.sealed, 1);
    assert_int_equal(c.leases, 1);
    bt_cache_put(f->cache, &s, 1);
    bt_pool_counts(p, &c);
    assert_int_equal(c.leases, 0);
    assert_int_equal(c.sealed, 1); /* cached */
    assert_int_equal(bt_index_find(f->cache->index, &k), s);
}

/* A slot that is used again has other CRCs: nothing of the earlier generation is remembered. */
static void crc_cache_forgets(void **state)
{
    struct fix *f = *state;
    struct bt_kv_key k;
    node_key(1, 0, &k);
    uint32_t s = bt_pool_take(f->cache->pool);
    memset(bt_slab_data(f->slab, s), 1, f->layout.block_bytes);
    uint32_t a = bt_pool_segment_crc(f->cache->pool, s, 0, &k);
    bt_cache_put(f->cache, &s, 1);
    uint32_t t = bt_pool_take(f->cache->pool);
    assert_int_equal(t, s);
    assert_int_equal(bt_pool_generation(f->cache->pool, t), 2);
    memset(bt_slab_data(f->slab, s), 2, f->layout.block_bytes);
    assert_int_not_equal(bt_pool_segment_crc(f->cache->pool, s, 0, &k), a);
    bt_cache_put(f->cache, &t, 1);
}

/* A CRC that another process has computed is known here, and the other way about. */
static void crcs_of_two_processes(void **state)
{
    struct fix *f = *state;
    struct bt_pool *p = f->cache->pool;
    struct bt_kv_key k, root = {{1}};
    char err[256];
    int st;
    node_key(1, 0, &k);
    uint32_t s = bt_pool_take(p), here = bt_pool_segment_crc(p, s, 0, &k);
    int fd = bt_slab_open_again(f->slab);
    pid_t pid = fork();
    if (pid == 0) {
        struct bt_slab *slab = NULL;
        struct bt_slab_crcs *c = NULL;
        bool good =
            bt_slab_map_rows(fd, &f->layout, &root, &slab, err, sizeof(err)) == BT_OK &&
            bt_slab_crcs_map(slab, &f->layout, bt_slab_crcs_fd(bt_pool_crcs(p)), &c) == BT_OK &&
            bt_slab_crcs_known(c, s, 0) && bt_slab_crcs_get(c, s, 0, &k) == here &&
            !bt_slab_crcs_known(c, s, 1);
        ((uint8_t *)bt_slab_data(slab, s))[0] = 1; /* behind the first CRC: nobody looks again */
        _exit(good && bt_slab_crcs_get(c, s, 0, &k) == here && bt_slab_crcs_get(c, s, 1, &k) != 0
                  ? 0
                  : 1);
    }
    close(fd);
    assert_int_equal(waitpid(pid, &st, 0), pid);
    assert_int_equal(st, 0);
    assert_true(bt_slab_crcs_known(bt_pool_crcs(p), s, 1));
    assert_true(seal(f, s, &k, 0)); /* both are known */
    bt_cache_put(f->cache, &s, 1);
}

static void *wait_for_crc(void *arg)
{
    struct fix *f = arg;
    struct bt_kv_key k;
    node_key(1, 0, &k);
    return (void *)(uintptr_t)bt_pool_segment_crc(f->cache->pool, 0, 0, &k);
}

/* It died between two steps of storing a CRC: who waits for that one goes on. */
static void crc_of_a_process_that_died(void **state)
{
    struct fix *f = *state;
    struct bt_slab_crcs *c = bt_pool_crcs(f->cache->pool);
    struct bt_kv_key k;
    pthread_t t;
    void *got;
    node_key(1, 0, &k);
    uint32_t s = bt_pool_take(f->cache->pool), bytes;
    assert_int_equal(s, 0);
    uint8_t *marks = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, bt_slab_crcs_fd(c), 0);
    assert_true(marks != MAP_FAILED);
    marks[0] = 3; /* STORING_OTHER, crcs.c */
    assert_int_equal(pthread_create(&t, NULL, wait_for_crc, f), 0);
    usleep(20000);
    assert_false(bt_slab_crcs_known(c, s, 0));
    bt_slab_crcs_other_ended(c);
    assert_int_equal(pthread_join(t, &got), 0);
    assert_true(bt_slab_crcs_known(c, s, 0));
    (void)bt_kv_segment(&f->layout, 0, &bytes);
    assert_int_equal(
        (uint32_t)(uintptr_t)got,
        bt_slab_segment_crc(&k, 0, f->layout.layout_id, bt_slab_data(f->slab, s), bytes));
    munmap(marks, 4096);
    bt_cache_put(f->cache, &s, 1);
}

static void count_sealed(void *arg, uint32_t slot, bool sealed)
{
    uint32_t *n = arg;
    assert_true(sealed && slot != 1);
    ++*n;
}

/* A slot whose header is damaged is free in the slab as well: whoever adopts it next must not find
 * it sealed. */
static void damaged_header_is_free(void **state)
{
    struct fix *f = *state;
    struct bt_pool_counts c;
    struct bt_kv_key k;
    uint32_t slots[3], sealed = 0;
    assert_int_equal(cache_take(f->cache, 3, slots), BT_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(slots[i], i);
        node_key(1, i, &k);
        assert_true(seal(f, i, &k, i));
    }
    bt_cache_put(f->cache, slots, 3);
    bt_cache_destroy(f->cache);
    f->slab->headers[1].crc ^= 1;
    struct bt_pool *p = bt_pool_create(f->slab, &f->layout, 8);
    bt_pool_adopt(p, count_sealed, &sealed);
    assert_int_equal(sealed, 2);
    assert_int_equal(bt_slot_state(word(f, 0)), BT_SLOT_SEALED);
    assert_int_equal(bt_slot_state(word(f, 1)), BT_SLOT_FREE);
    bt_pool_counts(p, &c);
    assert_int_equal(c.sealed, 2);
    bt_pool_destroy(p);
    f->cache = bt_cache_create(f->slab, &f->layout, 8, &bt_evict_slru);
}

static void duplicate_is_dropped(void **state)
{
    struct fix *f = *state;
    struct bt_kv_key k;
    node_key(1, 0, &k);
    uint32_t s[2] = {bt_pool_take(f->cache->pool), bt_pool_take(f->cache->pool)};
    assert_true(seal(f, s[0], &k, 0));
    assert_false(seal(f, s[1], &k, 0));
    bt_cache_put(f->cache, s, 2);
    assert_int_equal(bt_index_find(f->cache->index, &k), s[0]);
    assert_int_equal(bt_pool_state(f->cache->pool, s[1]), BT_SLOT_FREE);
    assert_int_equal(f->cache->duplicates, 1);
}

static void cached_chain(struct fix *f, uint32_t chain, uint32_t n)
{
    uint32_t slots[64];
    struct bt_kv_key k;
    assert_int_equal(cache_take(f->cache, n, slots), BT_OK);
    for (uint32_t i = 0; i < n; i++) {
        node_key(chain, i, &k);
        assert_true(seal(f, slots[i], &k, i));
    }
    bt_cache_put(f->cache, slots, n);
}

static uint32_t resident(struct fix *f, uint32_t chain, uint32_t n)
{
    uint32_t i = 0;
    for (struct bt_kv_key k; i < n; i++) {
        node_key(chain, i, &k);
        if (bt_index_find(f->cache->index, &k) == UINT32_MAX) {
            break;
        }
    }
    return i;
}

static void eviction_order(void **state)
{
    struct fix *f = *state;
    uint32_t slots[64], n = f->slab->super->n_slots;
    struct bt_kv_key keys[4];
    cached_chain(f, 1, 4);
    cached_chain(f, 2, 4);
    cached_chain(f, 3, 4);
    for (uint32_t i = 0; i < 4; i++) {
        node_key(1, i, &keys[i]);
    }
    /* Chain 1 is hit once, so 2 and 3 go first, although 1 is the oldest; tails before heads. */
    assert_int_equal(bt_cache_prefix(f->cache, keys, 4, slots), 4);
    bt_cache_put(f->cache, slots, 4);
    assert_int_equal(cache_take(f->cache, n - 12 + 2, slots), BT_OK);
    assert_int_equal(resident(f, 2, 4), 2);
    assert_int_equal(resident(f, 1, 4), 4);
    assert_int_equal(resident(f, 3, 4), 4);
    uint32_t more[64];
    assert_int_equal(cache_take(f->cache, 6, more), BT_OK);
    assert_int_equal(resident(f, 2, 4), 0);
    assert_int_equal(resident(f, 3, 4), 0);
    assert_int_equal(resident(f, 1, 4), 4);
    /* Leased blocks never go: with chain 1 in use nothing is left to give. */
    uint32_t held[4];
    assert_int_equal(bt_cache_prefix(f->cache, keys, 4, held), 4);
    uint32_t one;
    assert_int_equal(cache_take(f->cache, 1, &one), BT_ERR_EXHAUSTED);
    bt_cache_put(f->cache, held, 4);
    assert_int_equal(cache_take(f->cache, 1, &one), BT_OK);
    assert_int_equal(resident(f, 1, 4), 3);
    assert_int_equal(cache_take(f->cache, 4, held), BT_ERR_EXHAUSTED); /* takes none */
    assert_int_equal(resident(f, 1, 4), 3);
    bt_cache_put(f->cache, &one, 1);
    bt_cache_put(f->cache, more, 6);
    bt_cache_put(f->cache, slots, n - 12 + 2);
}

static void trim_keeps_some_free(void **state)
{
    struct fix *f = *state;
    struct bt_pool_counts c;
    cached_chain(f, 1, f->slab->super->n_slots);
    f->cache->low = 3;
    bt_cache_trim(f->cache, 2);
    bt_pool_counts(f->cache->pool, &c);
    assert_int_equal(c.free, 2);
    bt_cache_trim(f->cache, 100);
    bt_pool_counts(f->cache->pool, &c);
    assert_int_equal(c.free, 3);
}

static void transit_cap(void **state)
{
    struct fix *f = *state;
    struct bt_pool *p = f->cache->pool;
    assert_int_equal(bt_pool_transit_get(p, 5), BT_OK);
    assert_int_equal(bt_pool_transit_get(p, 4), BT_ERR_EXHAUSTED);
    assert_int_equal(bt_pool_transit_get(p, 3), BT_OK);
    bt_pool_transit_put(p, 8);
    assert_int_equal(bt_pool_transit_get(p, UINT32_MAX), BT_ERR_EXHAUSTED);
}

static void quarantine(void **state)
{
    struct fix *f = *state;
    struct bt_kv_key k;
    node_key(1, 0, &k);
    uint32_t s[2];
    assert_int_equal(cache_take(f->cache, 2, s), BT_OK);
    assert_true(seal(f, s[1], &k, 0));
    bt_cache_quarantine(f->cache, s[0]);
    bt_cache_quarantine(f->cache, s[1]); /* cached: stays, nobody writes to it again */
    assert_int_equal(bt_pool_state(f->cache->pool, s[0]), BT_SLOT_QUARANTINE);
    assert_int_equal(bt_pool_state(f->cache->pool, s[1]), BT_SLOT_SEALED);
    bt_cache_put(f->cache, s, 2);
    assert_int_equal(bt_pool_state(f->cache->pool, s[0]), BT_SLOT_FREE);
}

/* ---- a random walk against a model ---- */

#define HOLDERS 24
#define CHAINS  5
#define CHAIN   6

struct holder {
    uint32_t n, n_prefix, chain;
    uint32_t slots[CHAIN];
    bool sealed;
};

static uint32_t rnd(uint64_t *seq, uint32_t below)
{
    uint32_t key[2] = {0x5eed, 1}, ctr[4] = {(uint32_t)*seq, (uint32_t)(*seq >> 32), 0, 0}, out[4];
    (*seq)++;
    bt_philox4x32(key, ctr, out);
    return out[0] % below;
}

static void check_all(const struct fix *f, const struct holder *h, const uint32_t *gens)
{
    const struct bt_pool *p = f->cache->pool;
    uint32_t n = f->slab->super->n_slots, held[64] = {0}, by[4] = {0}, leases = 0, cached = 0;
    struct bt_pool_counts c;
    for (int i = 0; i < HOLDERS; i++) {
        for (uint32_t b = 0; b < h[i].n; b++) {
            held[h[i].slots[b]]++;
            leases++;
        }
    }
    uint32_t idle = 0;
    for (uint32_t s = 0; s < n; s++) {
        bt_slot_state_t st = bt_pool_state(p, s);
        by[st]++;
        assert_int_equal(bt_pool_leases(p, s), held[s]); /* leases are the sum of holders */
        assert_int_equal(word(f, s), bt_slot_word(bt_pool_generation(p, s), st));
        assert_true(bt_pool_generation(p, s) >= gens[s]); /* it never falls */
        if (st == BT_SLOT_FREE) {
            assert_int_equal(held[s], 0);
        }
        if (bt_index_has_slot(f->cache->index, s)) {
            uint32_t depth;
            assert_int_equal(st, BT_SLOT_SEALED); /* only sealed blocks are in the index */
            const struct bt_kv_key *k = bt_index_key(f->cache->index, s, &depth);
            assert_int_equal(bt_index_find(f->cache->index, k), s);
            assert_memory_equal(k, bt_pool_key(p, s), sizeof(*k));
            cached++;
            idle += held[s] == 0;
        } else if (st != BT_SLOT_FREE) {
            assert_true(held[s] > 0); /* neither cached nor held: lost */
        }
    }
    bt_pool_counts(p, &c);
    assert_int_equal(c.free, by[BT_SLOT_FREE]);
    assert_int_equal(c.writing, by[BT_SLOT_WRITING]);
    assert_int_equal(c.sealed, by[BT_SLOT_SEALED]);
    assert_int_equal(c.quarantine, by[BT_SLOT_QUARANTINE]);
    assert_int_equal(c.leases, leases);
    assert_int_equal(index_count(f->cache->index), cached);
    assert_int_equal(f->cache->policy->evictable(f->cache->evict), idle);
}

static void random_walk(void **state)
{
    struct fix *f = *state;
    struct holder h[HOLDERS] = {0};
    uint32_t gens[64] = {0}, full = 0;
    uint64_t seq = 0;
    for (int step = 0; step < 20000; step++) {
        struct holder *x = &h[rnd(&seq, HOLDERS)];
        if (x->n == 0) { /* a new plan: prefix, then room for the rest */
            struct bt_kv_key keys[CHAIN];
            uint32_t n = 1 + rnd(&seq, CHAIN);
            x->chain = rnd(&seq, CHAINS);
            for (uint32_t i = 0; i < n; i++) {
                node_key(x->chain, i, &keys[i]);
            }
            x->n_prefix = bt_cache_prefix(f->cache, keys, n, x->slots);
            uint32_t *rest = x->slots + x->n_prefix;
            if (cache_take(f->cache, n - x->n_prefix, rest) != BT_OK) {
                bt_cache_put(f->cache, x->slots, x->n_prefix);
                full++;
            } else {
                x->n = n;
                x->sealed = false;
                for (uint32_t i = 0; i < n - x->n_prefix; i++) {
                    uint32_t g = bt_pool_generation(f->cache->pool, rest[i]);
                    assert_true(g > gens[rest[i]]); /* strictly up at every use */
                    gens[rest[i]] = g;
                }
            }
        } else if (!x->sealed && rnd(&seq, 3) > 0) {
            for (uint32_t i = x->n_prefix; i < x->n; i++) {
                struct bt_kv_key k;
                node_key(x->chain, i, &k);
                seal(f, x->slots[i], &k, i);
            }
            x->sealed = true;
        } else {
            if (!x->sealed && rnd(&seq, 2) == 0) {
                for (uint32_t i = x->n_prefix; i < x->n; i++) {
                    bt_cache_quarantine(f->cache, x->slots[i]);
                }
            }
            bt_cache_put(f->cache, x->slots, x->n);
            x->n = 0;
        }
        check_all(f, h, gens);
    }
    assert_true(full > 100 && f->cache->evicted > 100 && f->cache->duplicates > 100 &&
                f->cache->hits > 100); /* the walk went everywhere */
    for (int i = 0; i < HOLDERS; i++) {
        bt_cache_put(f->cache, h[i].slots, h[i].n);
        h[i].n = 0;
    }
    check_all(f, h, gens);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(life_of_a_slot, setup, teardown),
        cmocka_unit_test_setup_teardown(crc_cache_forgets, setup, teardown),
        cmocka_unit_test_setup_teardown(crcs_of_two_processes, setup, teardown),
        cmocka_unit_test_setup_teardown(crc_of_a_process_that_died, setup, teardown),
        cmocka_unit_test_setup_teardown(damaged_header_is_free, setup, teardown),
        cmocka_unit_test_setup_teardown(duplicate_is_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(eviction_order, setup, teardown),
        cmocka_unit_test_setup_teardown(trim_keeps_some_free, setup, teardown),
        cmocka_unit_test_setup_teardown(transit_cap, setup, teardown),
        cmocka_unit_test_setup_teardown(quarantine, setup, teardown),
        cmocka_unit_test_setup_teardown(random_walk, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
