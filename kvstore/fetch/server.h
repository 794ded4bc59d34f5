/* Serves the fetches of other nodes. A peer names blocks; this node leases those that are in its
 * slab, reads those that are on its SSD into it, tells the peer which blocks it has, and lets the
 * wire send them. No reservation is needed. The leases end with the flow. Control thread. */
#ifndef BT_KVSTORE_FETCH_SERVER_H
#define BT_KVSTORE_FETCH_SERVER_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"
#include "kvstore/wire/wire.h"

struct bt_fetch_server; /* one per node */

struct bt_fetch_server_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_tier *tier; /* NULL: no SSD */
    uint32_t n_layers, block_tokens;
    /* Returns whether this node is a known member of the cluster. NULL: all nodes count as
     * known. */
    bool (*peer_known)(void *arg, const char *name, uint64_t incarnation);
    void *arg;
    struct bt_metrics *metrics; /* may be NULL */
    void (*send_offer)(struct bt_wire_send *s, const struct bt_wire_source *src,
                       const uint8_t *have, uint32_t n);
    void (*send_abort)(struct bt_wire_send *s, bt_status_t st, const char *why);
};

struct bt_fetch_server *bt_fetch_server_create(const struct bt_fetch_server_config *c);
/* Every fetch must have ended. */
void bt_fetch_server_destroy(struct bt_fetch_server *sv);
/* bt_wire_ops.want and want_end. While fetches being served cover half of the slab, another one
 * waits for at most 250 ms and is then aborted with ERR_EXHAUSTED. ERR_UNAVAILABLE: the peer is not
 * a known member. ERR_EXHAUSTED: as much as half of the slab waits already. */
bt_status_t bt_fetch_server_want(struct bt_fetch_server *sv, const struct bt_wire_want *want,
                                 struct bt_wire_send *snd, void **handle_p) BT_MUST_CHECK;
void bt_fetch_server_want_end(struct bt_fetch_server *sv, void *handle, bt_status_t status);
uint32_t bt_fetch_server_count(const struct bt_fetch_server *sv);

#endif
