/* Who a kvstore may fetch a planned prefix from: the holders of its blocks, as far as the index
 * says. A hint; what it is worth the kvstore finds out. Loop thread. */
#ifndef BT_CONDUCTOR_SOURCES_H
#define BT_CONDUCTOR_SOURCES_H

#include "common/kv/key.h"
#include "conductor/view/peer.h"

struct bt_view;

#define BT_SOURCES_MAX 8

struct bt_sources {
    uint32_t n;
    struct bt_source {
        struct bt_peer *kv;
        uint32_t blocks;         /* of the prefix, that it has */
        uint32_t *first, *count; /* [n_runs]: runs of them; heap */
        uint32_t n_runs;
    } at[BT_SOURCES_MAX];
};

/* For the first n of keys[0..n_keys): the one that the plan names first, then those that have most.
 * Empty if the plan fetches nothing. bt_sources_cleanup ends it. */
void bt_sources_find(const struct bt_view *view, const struct bt_view_snapshot *v,
                     const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                     uint32_t n_keys, uint32_t n, struct bt_sources *out);
void bt_sources_cleanup(struct bt_sources *s);
/* Moves them to the heap, s is empty then; NULL: there are none. */
struct bt_sources *bt_sources_take(struct bt_sources *s);
/* How many of keys[0..n) from the first on are, extent by extent, with one of the snapshot's
 * kvstores.
 */
uint32_t bt_sources_spread(const struct bt_view *view, const struct bt_view_snapshot *v,
                           const struct bt_kv_key *keys, uint32_t n);

#endif
