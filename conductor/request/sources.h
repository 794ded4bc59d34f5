/* The kvstores from which a planned prefix may be fetched: the holders of its blocks, by the index.
 * This is a hint; the fetching kvstore finds out what they really have. Loop thread. */
#ifndef BT_CONDUCTOR_SOURCES_H
#define BT_CONDUCTOR_SOURCES_H

#include "common/kv/key.h"
#include "conductor/view/peer.h"

struct bt_view;

#define BT_SOURCES_MAX BT_KV_SOURCES_MAX

struct bt_sources {
    uint32_t n;
    struct bt_source {
        struct bt_peer *kv;
        uint32_t blocks;         /* blocks of the prefix that it has */
        uint32_t *first, *count; /* [n_runs]: runs of them; heap */
        uint32_t n_runs;
    } at[BT_SOURCES_MAX];
};

/* Finds sources for the first n of keys[0..n_keys): first the one that the plan names, then those
 * with most blocks. Empty if the plan fetches nothing. bt_sources_cleanup frees it. */
void bt_sources_find(const struct bt_view *view, const struct bt_view_snapshot *v,
                     const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                     uint32_t n_keys, uint32_t n, struct bt_sources *out);
void bt_sources_cleanup(struct bt_sources *s);
/* Moves the sources to the heap and leaves s empty. NULL: there are none. */
struct bt_sources *bt_sources_take(struct bt_sources *s);
/* The length of the prefix of keys[0..n) whose extents are all in kvstores of the snapshot. */
uint32_t bt_sources_spread(const struct bt_view *view, const struct bt_view_snapshot *v,
                           const struct bt_kv_key *keys, uint32_t n);

#endif
