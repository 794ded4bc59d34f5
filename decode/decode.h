/* The decode role's steps of a request: wait until its KV has landed in the node's slab, load it,
 * join the batch, generate. And the write-back of generated blocks to the pool. Runs on the engine
 * thread. */
#ifndef BT_DECODE_DECODE_H
#define BT_DECODE_DECODE_H

#include "common/worker/worker.h"

extern const struct bt_role_ops bt_decode_role;
extern const struct bt_writeback_ops bt_decode_writeback;

/* Asks the kvstore for slots for the blocks of r that have become full and are not in the pool, as
 * far as the limit of blocks in flight allows. */
void bt_decode_write_back(struct bt_wcore *c, struct bt_wreq *r);

#endif
