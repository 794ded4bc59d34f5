/* Recent keys, in memory of fixed size: answers "perhaps recent" or "certainly not". Two
 * generations of a Bloom filter; the older one is dropped when the younger one is full. Pure. */
#ifndef BT_POLICY_EVICT_RECENT_H
#define BT_POLICY_EVICT_RECENT_H

#include "common/base/base.h"
#include "common/kv/key.h"

struct bt_recent;

/* Remembers between n and 2 n of the last keys. Says "perhaps" for 1 % of the other keys. 20 bits
 * a key. */
struct bt_recent *bt_recent_create(uint32_t n);
void bt_recent_destroy(struct bt_recent *s);
/* true: key is perhaps recent. Remembers it in any case. */
bool bt_recent_again(struct bt_recent *s, const struct bt_kv_key *key);

#endif
