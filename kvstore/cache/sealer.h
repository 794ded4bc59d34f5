/* A thread that computes the segment CRCs of finished blocks, so that the control thread does not.
 * Jobs are done in order; the control thread seals the blocks when a job is done. */
#ifndef BT_KVSTORE_CACHE_SEALER_H
#define BT_KVSTORE_CACHE_SEALER_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "kvstore/cache/pool.h"

struct bt_sealer;

/* On the loop's thread: all CRCs of the job's slots are in the slab. */
typedef void (*bt_sealer_done_fn)(void *arg);

bt_status_t bt_sealer_create(struct bt_loop *loop, struct bt_pool *pool, uint32_t n_layers,
                             struct bt_sealer **s_p) BT_MUST_CHECK;
/* Jobs still open are dropped without done. */
void bt_sealer_destroy(struct bt_sealer *s);
/* slots and names ([n]) are copied; the caller keeps the slots leased until done. */
void bt_sealer_submit(struct bt_sealer *s, const uint32_t *slots, const struct bt_kv_key *names,
                      uint32_t n, bt_sealer_done_fn done, void *arg);

#endif
