/* Short forms for tests of the kvstore's cache: slots of nobody, blocks of which only the key is
 * known, the number of blocks in the index. */
#ifndef TESTS_UNIT_KV_CACHE_H
#define TESTS_UNIT_KV_CACHE_H

#include "kvstore/cache/cache.h"

static inline bt_status_t cache_take(struct bt_cache *c, uint32_t n, uint32_t *slots)
{
    return bt_cache_take(c, BT_TENANT_NOBODY, n, slots);
}

static inline bool cache_seal(struct bt_cache *c, uint32_t slot, const struct bt_kv_key *key,
                              uint32_t n_tokens, uint32_t depth)
{
    struct bt_cache_block b = {.key = key, .n_tokens = n_tokens, .depth = depth};
    return bt_cache_seal(c, slot, &b);
}

static inline uint32_t index_count(const struct bt_index *ix)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < bt_index_slots(ix); i++) {
        n += bt_index_has_slot(ix, i);
    }
    return n;
}

#endif
