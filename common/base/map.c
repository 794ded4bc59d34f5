/* Open-addressing hash map, linear probing, backward-shift deletion (no tombstones). One owner. */
#include "common/base/map.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

struct bt_map {
    size_t key_size, cap, count; /* cap is 0 or a power of two */
    uint64_t seed;
    uint8_t *keys;
    void **values; /* NULL: a free cell */
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    __uint128_t p = (__uint128_t)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
}

uint64_t bt_hash64(const void *data, size_t n, uint64_t seed)
{
    const uint8_t *p = data;
    uint64_t h = seed ^ 0x9E3779B97F4A7C15ull ^ n;
    while (n >= 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        h = mix(h ^ v, 0xD6E8FEB86659FD93ull);
        p += 8;
        n -= 8;
    }
    uint64_t tail = 0;
    if (n > 0) {
        memcpy(&tail, p, n);
    }
    h = mix(h ^ tail, 0xA0761D6478BD642Full);
    return mix(h, 0xE7037ED1A0B428DBull);
}

struct bt_map *bt_map_create(size_t key_size)
{
    BT_ASSERT(key_size > 0);
    struct bt_map *m = bt_calloc(1, sizeof(*m));
    m->key_size = key_size;
    bt_random(&m->seed, sizeof(m->seed));
    return m;
}

void bt_map_destroy(struct bt_map *m)
{
    if (m != NULL) {
        free(m->keys);
        free(m->values);
        free(m);
    }
}

size_t bt_map_count(const struct bt_map *m)
{
    return m->count;
}

static size_t home(const struct bt_map *m, const void *key)
{
    return (size_t)bt_hash64(key, m->key_size, m->seed) & (m->cap - 1);
}

/* The cell of key, or the free cell for it. cap > count always. */
static size_t find(const struct bt_map *m, const void *key)
{
    size_t i = home(m, key);
    while (m->values[i] != NULL && memcmp(m->keys + i * m->key_size, key, m->key_size) != 0) {
        i = (i + 1) & (m->cap - 1);
    }
    return i;
}

static void grow(struct bt_map *m)
{
    struct bt_map old = *m;
    m->cap = old.cap == 0 ? 16 : old.cap * 2;
    m->keys = bt_malloc(m->cap * m->key_size);
    m->values = bt_calloc(m->cap, sizeof(void *));
    for (size_t i = 0; i < old.cap; i++) {
        if (old.values[i] != NULL) {
            size_t j = find(m, old.keys + i * m->key_size);
            memcpy(m->keys + j * m->key_size, old.keys + i * m->key_size, m->key_size);
            m->values[j] = old.values[i];
        }
    }
    free(old.keys);
    free(old.values);
}

void *bt_map_get(const struct bt_map *m, const void *key)
{
    return m->count == 0 ? NULL : m->values[find(m, key)];
}

void *bt_map_put(struct bt_map *m, const void *key, void *value)
{
    BT_ASSERT(value != NULL);
    if ((m->count + 1) * 4 > m->cap * 3) {
        grow(m);
    }
    size_t i = find(m, key);
    void *old = m->values[i];
    if (old == NULL) {
        memcpy(m->keys + i * m->key_size, key, m->key_size);
        m->count++;
    }
    m->values[i] = value;
    return old;
}

void *bt_map_del(struct bt_map *m, const void *key)
{
    if (m->count == 0) {
        return NULL;
    }
    size_t i = find(m, key), mask = m->cap - 1;
    void *old = m->values[i];
    if (old == NULL) {
        return NULL;
    }
    /* Closes the gap: moves back every later cell of the run whose home is at or before the gap. */
    for (size_t j = (i + 1) & mask; m->values[j] != NULL; j = (j + 1) & mask) {
        size_t h = home(m, m->keys + j * m->key_size);
        if (((j - h) & mask) >= ((j - i) & mask)) {
            memcpy(m->keys + i * m->key_size, m->keys + j * m->key_size, m->key_size);
            m->values[i] = m->values[j];
            i = j;
        }
    }
    m->values[i] = NULL;
    m->count--;
    return old;
}

void *bt_map_next(const struct bt_map *m, size_t *it, const void **key_p)
{
    while (*it < m->cap) {
        size_t i = (*it)++;
        if (m->values[i] != NULL) {
            if (key_p != NULL) {
                *key_p = m->keys + i * m->key_size;
            }
            return m->values[i];
        }
    }
    return NULL;
}
