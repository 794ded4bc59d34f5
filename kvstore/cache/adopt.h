/* Adoption after a restart: blocks that the previous kvstore left in the slab come back into the
 * cache. Headers are read at once. The seal thread compares the bytes with their CRCs, the longest
 * unused first, and only then a block can be found. Slots that were being written stay in
 * quarantine for a moment. Control thread. */
#ifndef BT_KVSTORE_CACHE_ADOPT_H
#define BT_KVSTORE_CACHE_ADOPT_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/sealer.h"

struct bt_adopt;

struct bt_adopt_stats {
    uint32_t headers; /* with a right CRC */
    uint32_t pending; /* of these, bytes not compared yet */
    uint32_t blocks;  /* back in the cache */
    uint32_t bad;     /* wrong bytes: freed */
    uint32_t quarantine;
};

/* Call after bt_slab_adopt and before the cache is used. */
struct bt_adopt *bt_adopt_start(struct bt_loop *loop, struct bt_cache *cache,
                                struct bt_sealer *sealer);
void bt_adopt_stats(const struct bt_adopt *a, struct bt_adopt_stats *s_p);
/* Call after bt_sealer_destroy and before bt_cache_destroy. Drops the leases that are left. */
void bt_adopt_destroy(struct bt_adopt *a);

#endif
