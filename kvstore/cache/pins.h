/* Pins: prefixes whose blocks are not evicted until a given time. An operator sets a pin (batonctl
 * pin), etcd keeps it (kvstore/serve/pin_watch.h). Here it becomes leases of slab slots and
 * protected slots of the SSD, for blocks that are here now or come later. Blocks pinned in the
 * slab are also written to the SSD.
 *
 * At most pin_max of the slots of each tier are protected. If there are more pinned blocks, older
 * pins are served first, and within a pin its beginning. The other blocks can be evicted and are
 * counted in `beyond`. Control thread. */
#ifndef BT_KVSTORE_CACHE_PINS_H
#define BT_KVSTORE_CACHE_PINS_H

#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"

#define BT_PINS_MAX        4096u   /* limit of pins */
#define BT_PINS_BLOCKS_MAX 131072u /* limit of blocks, over all pins */

struct bt_pins;

struct bt_pins_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_tier *tier;       /* NULL: no SSD */
    double pin_max;             /* 0..1 of the slots of each tier */
    struct bt_metrics *metrics; /* may be NULL */
};

struct bt_pin { /* copied */
    uint64_t id;
    const struct bt_kv_key *keys; /* of a chain, from its first block on */
    uint32_t n;
    uint64_t created_ns; /* wall clock */
    uint64_t ends_ns;    /* bt_mono_ns */
};

typedef enum { BT_PIN_SLAB, BT_PIN_SSD, BT_PIN_TIERS } bt_pin_tier_t;

struct bt_pin_state {
    uint64_t id;
    uint32_t protected[BT_PIN_TIERS], beyond[BT_PIN_TIERS]; /* blocks */
};

/* Becomes the cache's guard and observes the tier. Both must outlive it. */
struct bt_pins *bt_pins_create(const struct bt_pins_config *c);
/* Ends all protection. */
void bt_pins_destroy(struct bt_pins *p);

/* Adds or replaces a pin. ERR_EXHAUSTED: a limit (BT_PINS_*) is reached; the pin is not known. */
bt_status_t bt_pins_put(struct bt_pins *p, const struct bt_pin *pin) BT_MUST_CHECK;
/* Removes a pin; does nothing if it is unknown. */
void bt_pins_remove(struct bt_pins *p, uint64_t id);
/* Sets the end of a pin (bt_mono_ns); does nothing if it is unknown. */
void bt_pins_until(struct bt_pins *p, uint64_t id, uint64_t ends_ns);
/* Ends pins that have expired by now_ns (bt_mono_ns) and writes pinned blocks to the SSD. A timer
 * calls it every second; tests call it too. */
void bt_pins_tick(struct bt_pins *p, uint64_t now_ns);

uint32_t bt_pins_count(const struct bt_pins *p);
/* Rises whenever the result of bt_pins_states changes. */
uint64_t bt_pins_version(const struct bt_pins *p);
/* At most cap pins that have blocks here, oldest first; returns their number. */
uint32_t bt_pins_states(const struct bt_pins *p, struct bt_pin_state *out, uint32_t cap);

#endif
