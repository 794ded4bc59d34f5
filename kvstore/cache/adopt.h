/* After a restart: the blocks that the predecessor left in the slab come back into the cache.
 * Headers are read at once; bytes are compared with their CRCs by the seal thread, in the order in
 * which the blocks were sealed, and only then can a block be found. Slots that were being written
 * stay in quarantine for a moment. Control thread. */
#ifndef BT_KVSTORE_CACHE_ADOPT_H
#define BT_KVSTORE_CACHE_ADOPT_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/sealer.h"

struct bt_adopt;

struct bt_adopt_stats {
    uint32_t headers; /* with a right CRC */
    uint32_t pending; /* of them, bytes not compared yet */
    uint32_t blocks;  /* back in the cache */
    uint32_t bad;     /* wrong bytes: given up */
    uint32_t quarantine;
};

/* The slab was adopted (bt_slab_adopt) and nobody has used the cache yet. */
struct bt_adopt *bt_adopt_start(struct bt_loop *loop, struct bt_cache *cache,
                                struct bt_sealer *sealer);
void bt_adopt_stats(const struct bt_adopt *a, struct bt_adopt_stats *s_p);
/* After bt_sealer_destroy, before bt_cache_destroy: gives back what is still held. */
void bt_adopt_destroy(struct bt_adopt *a);

#endif
