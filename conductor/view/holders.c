/* The block index: key -> set of kvstores; see holders.h. */
#include "conductor/view/holders.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"

#define WORDS (BT_HOLDERS_KVSTORES_MAX / 64)

struct entry {
    uint64_t holds[WORDS];
    uint32_t depth;
};

struct bt_holders {
    struct bt_map *map; /* bt_kv_key -> struct entry */
    size_t keys_max;
    uint64_t replicas, dropped;
};

struct bt_holders *bt_holders_create(size_t keys_max)
{
    struct bt_holders *x = bt_calloc(1, sizeof(*x));
    x->map = bt_map_create(sizeof(struct bt_kv_key));
    x->keys_max = keys_max;
    return x;
}

void bt_holders_destroy(struct bt_holders *x)
{
    if (x == NULL) {
        return;
    }
    size_t it = 0;
    void *e;
    while ((e = bt_map_next(x->map, &it, NULL)) != NULL) {
        free(e);
    }
    bt_map_destroy(x->map);
    free(x);
}

static bool none(const struct entry *e)
{
    uint64_t any = 0;
    for (size_t i = 0; i < WORDS; i++) {
        any |= e->holds[i];
    }
    return any == 0;
}

bool bt_holders_add(struct bt_holders *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    struct entry *e = bt_map_get(x->map, key);
    if (e == NULL) {
        if (bt_map_count(x->map) >= x->keys_max) {
            x->dropped++;
            return false;
        }
        e = bt_calloc(1, sizeof(*e));
        e->depth = depth;
        (void)bt_map_put(x->map, key, e);
    }
    uint64_t bit = (uint64_t)1 << (id % 64);
    if ((e->holds[id / 64] & bit) == 0) {
        e->holds[id / 64] |= bit;
        x->replicas++;
    }
    return true;
}

void bt_holders_remove(struct bt_holders *x, const struct bt_kv_key *key, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    struct entry *e = bt_map_get(x->map, key);
    uint64_t bit = (uint64_t)1 << (id % 64);
    if (e == NULL || (e->holds[id / 64] & bit) == 0) {
        return;
    }
    e->holds[id / 64] &= ~bit;
    x->replicas--;
    if (none(e)) {
        (void)bt_map_del(x->map, key);
        free(e);
    }
}

void bt_holders_forget(struct bt_holders *x, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    /* The map may not change while it is walked: gather the keys first. */
    size_t n = 0, cap = 0, it = 0;
    struct bt_kv_key *gone = NULL;
    const void *key;
    struct entry *e;
    while ((e = bt_map_next(x->map, &it, &key)) != NULL) {
        if ((e->holds[id / 64] >> (id % 64) & 1) == 0) {
            continue;
        }
        if (n == cap) {
            cap = cap != 0 ? cap * 2 : 256;
            gone = bt_realloc(gone, cap * sizeof(*gone));
        }
        memcpy(&gone[n++], key, sizeof(*gone));
    }
    for (size_t i = 0; i < n; i++) {
        bt_holders_remove(x, &gone[i], id);
    }
    free(gone);
}

void bt_holders_match(const struct bt_holders *x, const struct bt_kv_key *keys, uint32_t n,
                      uint32_t *match, uint32_t n_ids)
{
    uint64_t alive[WORDS];
    memset(alive, 0xff, sizeof(alive));
    for (uint32_t id = 0; id < n_ids; id++) {
        match[id] = 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct entry *e = bt_map_get(x->map, &keys[i]);
        if (e == NULL) {
            return;
        }
        uint64_t any = 0;
        for (size_t w = 0; w < WORDS; w++) {
            alive[w] &= e->holds[w];
            any |= alive[w];
            for (uint64_t left = alive[w]; left != 0; left &= left - 1) {
                uint32_t id = (uint32_t)(w * 64) + (uint32_t)__builtin_ctzll(left);
                if (id < n_ids) {
                    match[id] = i + 1;
                }
            }
        }
        if (any == 0) {
            return;
        }
    }
}

size_t bt_holders_keys(const struct bt_holders *x)
{
    return bt_map_count(x->map);
}

uint64_t bt_holders_replicas(const struct bt_holders *x)
{
    return x->replicas;
}

uint64_t bt_holders_dropped(const struct bt_holders *x)
{
    return x->dropped;
}

bool bt_holders_next(const struct bt_holders *x, size_t *it, const struct bt_kv_key **key_p,
                     uint32_t *depth_p, const uint64_t **holds_p)
{
    const void *key;
    const struct entry *e = bt_map_next(x->map, it, &key);
    if (e == NULL) {
        return false;
    }
    *key_p = key;
    *depth_p = e->depth;
    *holds_p = e->holds;
    return true;
}
