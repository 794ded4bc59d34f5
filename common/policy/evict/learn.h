/* Learns how soon blocks of a class are used again, and says what keeping one is worth. Pure.
 *
 * Time is counted in uses (ticks). Of every use of a sampled key (by hash, as in SHARDS,
 * Waldspurger et al., FAST'15) class and tick are remembered, whether the block stays cached or
 * not, so a small cache also learns what it gave up too early. From that follow, for each class,
 * the chance r(a) to be used again in each range of ages (Kaplan and Meier: blocks that were
 * forgotten, or have not been used again yet, count for as long as they were watched). What a block
 * of age a is worth is the best rate that waiting for it can bring:
 *
 *     value(a) = max over t of  P(used again before t | not until a) / E[time it is kept until
 * then]
 *
 * hits per slot and tick (Gittins' index; LHD, Beckmann et al., NSDI'18, takes the rate without the
 * maximum). With nothing learned it falls with age: LRU. */
#ifndef BT_POLICY_EVICT_LEARN_H
#define BT_POLICY_EVICT_LEARN_H

#include "common/base/base.h"

#define BT_LEARN_CLASSES 16u
#define BT_LEARN_LEVELS  1024u /* of value: the higher, the longer to keep; a 20th of an octave */
#define BT_LEARN_OCTAVE  20

struct bt_learn;

/* For a cache of n_slots blocks. 12 to 200 bytes of memory a slot up to 64 Ki of them, less than 3
 * from a million on. */
struct bt_learn *bt_learn_create(uint32_t n_slots);
void bt_learn_destroy(struct bt_learn *l);
/* A block whose key hashes to hash is used, from now on it is of class cls; now: ticks, rising, may
 * wrap around. */
void bt_learn_use(struct bt_learn *l, uint32_t hash, uint32_t cls, uint32_t now);
/* Level of a block of cls last used age ticks ago; in [0, BT_LEARN_LEVELS). */
uint32_t bt_learn_level(const struct bt_learn *l, uint32_t cls, uint32_t age);

#endif
