/* The end of a prompt's prefix that the kvstore brings while its beginning is computed: where the
 * computing reaches what has landed it goes on behind it. What is late is computed; nobody waits.
 */
#ifndef BT_PREFILL_TAIL_H
#define BT_PREFILL_TAIL_H

#include "common/worker/core.h"

/* Does the part that has landed begin at r's next position, or before? */
bool bt_prefill_tail_met(const struct bt_wcore *c, const struct bt_wreq *r);
/* Writes the tail's blocks from r's next position on into b, as loads of item 0; their number. */
uint32_t bt_prefill_tail_blocks(const struct bt_wcore *c, const struct bt_wreq *r,
                                struct bt_engine_block *b);
/* r goes on behind the tail, whose blocks are being loaded. */
void bt_prefill_tail_skip(struct bt_wcore *c, struct bt_wreq *r);
/* bt_role_ops.meet. */
uint32_t bt_prefill_meet(struct bt_wcore *c, struct bt_wreq *r);

#endif
