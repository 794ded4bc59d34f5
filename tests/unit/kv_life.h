/* Lives of a kvstore, one after the other over the same slab: as much of it as a restart touches.
 */
#ifndef TESTS_UNIT_KV_LIFE_H
#define TESTS_UNIT_KV_LIFE_H

#include "kv_cache.h"
#include "kv_node.h"

#include <fcntl.h>

#include "kvstore/cache/adopt.h"

#define BYTES (5u * 4096 + 40 * 4300) /* of the slab: 40 slots and a few more */

static char life_path[96], life_err[512];
static uint64_t life_bytes = BYTES;
static const struct bt_evict_policy *life_policy = &bt_evict_slru;
static struct bt_kv_layout layout;
static struct bt_kv_key root;

struct life { /* of one kvstore, as far as it matters here */
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_cache *cache;
    struct bt_sealer *sealer;
    struct bt_adopt *adopt;
};

static inline void live(struct life *k, bool adopted)
{
    assert_int_equal(bt_loop_create(&k->loop), BT_OK);
    struct bt_slab_spec spec = {.path = life_path,
                                .bytes = life_bytes,
                                .layout = &layout,
                                .root = &root,
                                .incarnation = adopted ? 2 : 1};
    bt_status_t st = adopted
                         ? bt_slab_adopt(&spec, 200, &k->slab, life_err, sizeof(life_err))
                         : bt_slab_create(&spec, NULL, NULL, &k->slab, life_err, sizeof(life_err));
    if (st != BT_OK) {
        fail_msg("%s", life_err);
    }
    k->cache = bt_cache_create(k->slab, &layout, 8, life_policy);
    assert_int_equal(bt_sealer_create(k->loop, k->cache->pool, layout.n_layers, &k->sealer), BT_OK);
    k->adopt = adopted ? bt_adopt_start(k->loop, k->cache, k->sealer) : NULL;
}

/* All that a dead process leaves is the file. */
static inline void die(struct life *k)
{
    bt_sealer_destroy(k->sealer);
    bt_adopt_destroy(k->adopt);
    bt_cache_destroy(k->cache);
    bt_slab_unmap(k->slab);
    bt_loop_destroy(k->loop);
    memset(k, 0, sizeof(*k));
}

/* As kill -9 does: nothing of it runs any more. */
static inline void vanish(struct life *k)
{
    struct bt_slab *slab = k->slab; /* what die would write is undone */
    size_t meta = slab->super->flows_off;
    void *copy = malloc(meta);
    memcpy(copy, slab->super, meta);
    int fd = open(life_path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    die(k);
    assert_int_equal(pwrite(fd, copy, meta, 0), (ssize_t)meta);
    close(fd);
    free(copy);
}

static inline struct bt_adopt_stats stats(const struct life *k)
{
    struct bt_adopt_stats s;
    bt_adopt_stats(k->adopt, &s);
    return s;
}

static inline void fill(uint32_t chain, uint32_t block, uint64_t *p)
{
    for (size_t i = 0; i < layout.block_bytes / 8; i++) {
        p[i] = ((uint64_t)chain << 40 | (uint64_t)block << 20) + i;
    }
}

static inline uint32_t take(struct life *k)
{
    uint32_t slot;
    assert_int_equal(cache_take(k->cache, 1, &slot), BT_OK);
    return slot;
}

static inline uint32_t seal(struct life *k, uint32_t chain, uint32_t block)
{
    struct bt_kv_key key;
    uint32_t slot = take(k);
    node_key(chain, block, &key);
    fill(chain, block, bt_slab_data(k->slab, slot));
    for (uint32_t l = 0; l < layout.n_layers; l++) {
        bt_pool_segment_crc(k->cache->pool, slot, l, &key);
    }
    cache_seal(k->cache, slot, &key, NODE_BT, block);
    bt_cache_put(k->cache, &slot, 1);
    return slot;
}

static inline bool right(const struct life *k, uint32_t chain, uint32_t block)
{
    struct bt_kv_key key;
    uint64_t want[512];
    node_key(chain, block, &key);
    uint32_t slot = bt_index_find(k->cache->index, &key);
    if (slot == UINT32_MAX) {
        return false;
    }
    assert_int_equal(layout.block_bytes, sizeof(want));
    fill(chain, block, want);
    assert_memory_equal(bt_slab_data(k->slab, slot), want, sizeof(want));
    assert_int_equal(bt_pool_verify(k->cache->pool, slot), BT_OK);
    assert_int_equal(bt_pool_depth(k->cache->pool, slot), block);
    return true;
}

static inline int setup(void **state)
{
    (void)state;
    snprintf(life_path, sizeof(life_path), "/dev/shm/baton-unit-restart-%d", (int)getpid());
    assert_int_equal(bt_kv_layout_gqa(NODE_BT, 2, 1, 32, BT_DT_BF16, 0, &layout), BT_OK);
    memset(root.b, 7, sizeof(root.b));
    return 0;
}

static inline int teardown(void **state)
{
    (void)state;
    unlink(life_path);
    return 0;
}

#endif
