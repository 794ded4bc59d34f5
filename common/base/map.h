/* Hash map from a fixed-size key to a pointer: open addressing, linear probing, keys copied in.
 * One owner thread. Iteration order is unspecified; removing while iterating is not allowed. */
#ifndef BT_BASE_MAP_H
#define BT_BASE_MAP_H

#include <stddef.h>
#include <stdint.h>

struct bt_map;

struct bt_map *bt_map_create(size_t key_size);
void bt_map_destroy(struct bt_map *m); /* does not touch the values */
size_t bt_map_count(const struct bt_map *m);
/* Returns the value or NULL. */
void *bt_map_get(const struct bt_map *m, const void *key);
/* Sets key to value (not NULL); returns the previous value or NULL. */
void *bt_map_put(struct bt_map *m, const void *key, void *value);
/* Removes key; returns its value or NULL. */
void *bt_map_del(struct bt_map *m, const void *key);
/* Iterates: *it starts at 0; returns the next value, or NULL at the end. key_p may be NULL. */
void *bt_map_next(const struct bt_map *m, size_t *it, const void **key_p);

/* 64-bit hash of bytes (wyhash-style mixing), not for untrusted key floods of > 2^32 entries. */
uint64_t bt_hash64(const void *p, size_t n, uint64_t seed);

#endif
