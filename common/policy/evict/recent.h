/* A memory of keys that passed by, of fixed size: says "perhaps" or "certainly not lately". Two
 * generations of a Bloom filter; the older one is dropped when the younger one is full. Pure. */
#ifndef BT_POLICY_EVICT_RECENT_H
#define BT_POLICY_EVICT_RECENT_H

#include "common/base/base.h"
#include "common/kv/key.h"

struct bt_recent;

/* Remembers at least the last n keys, at most 2 n; wrong in 1 % of "perhaps". 20 bits a key. */
struct bt_recent *bt_recent_create(uint32_t n);
void bt_recent_destroy(struct bt_recent *s);
/* Was key here lately? It is from now on. */
bool bt_recent_again(struct bt_recent *s, const struct bt_kv_key *key);

#endif
