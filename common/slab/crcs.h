/* Which segment CRCs in the slab's rows are known. A CRC is computed once for each slot, layer and
 * generation, by the thread that needs it first: the seal thread, the SSD's, or the process that
 * sends it to another node. So the marks lie in memory that such a process can map. */
#ifndef BT_SLAB_CRCS_H
#define BT_SLAB_CRCS_H

#include "common/slab/slab.h"

struct bt_slab_crcs;

/* The kvstore: nothing is known. The slab outlives it. */
struct bt_slab_crcs *bt_slab_crcs_create(const struct bt_slab *slab,
                                         const struct bt_kv_layout *layout);
/* Another process: fd as of bt_slab_crcs_fd, over its own mapping of the slab
 * (bt_slab_map_rows). ERR_IO: it cannot be mapped, or is of another slab. */
bt_status_t bt_slab_crcs_map(const struct bt_slab *slab, const struct bt_kv_layout *layout, int fd,
                             struct bt_slab_crcs **c_p) BT_MUST_CHECK;
void bt_slab_crcs_destroy(struct bt_slab_crcs *c);
int bt_slab_crcs_fd(const struct bt_slab_crcs *c); /* stays c's */

/* CRC of a segment whose bytes are final. Any thread of any process that has the marks; somebody
 * holds a lease of the slot meanwhile. */
uint32_t bt_slab_crcs_get(struct bt_slab_crcs *c, uint32_t slot, uint32_t layer,
                          const struct bt_kv_key *name);
bool bt_slab_crcs_known(const struct bt_slab_crcs *c, uint32_t slot, uint32_t layer);
/* All segments of the slot: the rows are right already, or belong to an earlier generation. */
void bt_slab_crcs_set_known(struct bt_slab_crcs *c, uint32_t slot);
void bt_slab_crcs_forget(struct bt_slab_crcs *c, uint32_t slot);
/* The kvstore: the process that mapped the marks has ended, perhaps while it stored a CRC. Other
 * processes no longer wait for that CRC. */
void bt_slab_crcs_other_ended(struct bt_slab_crcs *c);

#endif
