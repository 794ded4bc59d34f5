/* The sending end of fetches: a peer names sealed blocks, this node leases those that are in its
 * slab, reads those that are on its SSD into it, says which it has, and lets the wire send them. It
 * needs no reservation. The leases end with the flow. Control thread. */
#ifndef BT_KVSTORE_FETCH_SOURCE_H
#define BT_KVSTORE_FETCH_SOURCE_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"
#include "kvstore/wire/wire.h"

struct bt_offers; /* all of a node */

struct bt_offers_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_tier *tier; /* NULL: no SSD */
    uint32_t n_layers, block_tokens;
    /* Is this a member of the cluster, as far as is known here? NULL: everybody is. */
    bool (*peer_known)(void *arg, const char *name, uint64_t incarnation);
    void *arg;
    struct bt_metrics *metrics; /* may be NULL */
    void (*send_offer)(struct bt_wire_send *s, const struct bt_wire_source *src,
                       const uint8_t *have, uint32_t n);
    void (*send_abort)(struct bt_wire_send *s, bt_status_t st, const char *why);
};

struct bt_offers *bt_offers_create(const struct bt_offers_config *c);
/* Every want has ended. */
void bt_offers_destroy(struct bt_offers *o);
/* bt_wire_ops.want and want_end. While half of the slab is on offer a want waits for others to end,
 * a quarter of a second at most, and is then aborted with ERR_EXHAUSTED. ERR_UNAVAILABLE: the peer
 * is not known; ERR_EXHAUSTED: as much waits already. */
bt_status_t bt_offers_want(struct bt_offers *o, const struct bt_wire_want *want,
                           struct bt_wire_send *snd, void **handle_p) BT_MUST_CHECK;
void bt_offers_want_end(struct bt_offers *o, void *handle, bt_status_t status);
uint32_t bt_offers_count(const struct bt_offers *o);

#endif
