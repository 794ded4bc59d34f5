/* Pins: prefixes whose blocks are not to be evicted until a time. A pin is an operator's intent
 * (batonctl pin), kept in etcd (kvstore/serve/pin_watch.h); here it becomes leases of slab slots
 * and protected slots of the SSD, for blocks that are in the cache now or come into it later. What
 * is pinned in the slab is written to the SSD as well.
 *
 * On each tier at most pin_max of the slots are protected. Where more is here, the older pin goes
 * first, and of a pin its head: the rest can be evicted like any block, and is counted (`beyond`).
 * Control thread. */
#ifndef BT_KVSTORE_CACHE_PINS_H
#define BT_KVSTORE_CACHE_PINS_H

#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"

#define BT_PINS_MAX        4096u   /* more are not taken */
#define BT_PINS_BLOCKS_MAX 131072u /* of all of them */

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

/* Takes the cache's guard and observes the tier; both outlive it. */
struct bt_pins *bt_pins_create(const struct bt_pins_config *c);
/* Nothing is protected any more. */
void bt_pins_destroy(struct bt_pins *p);

/* A pin is there, or is another one now. ERR_EXHAUSTED: too many (BT_PINS_*); the pin is unknown.
 */
bt_status_t bt_pins_put(struct bt_pins *p, const struct bt_pin *pin) BT_MUST_CHECK;
/* It is gone; nothing happens if it is not known. */
void bt_pins_remove(struct bt_pins *p, uint64_t id);
/* It ends then (bt_mono_ns); nothing happens if it is not known. */
void bt_pins_until(struct bt_pins *p, uint64_t id, uint64_t ends_ns);
/* Ends what has expired by now_ns (bt_mono_ns) and writes pinned blocks to the SSD. It is called by
 * itself every second, and by tests. */
void bt_pins_tick(struct bt_pins *p, uint64_t now_ns);

uint32_t bt_pins_count(const struct bt_pins *p);
/* Rises with everything that bt_pins_states would show. */
uint64_t bt_pins_version(const struct bt_pins *p);
/* Pins of which something is here, oldest first, at most cap; returns their number. */
uint32_t bt_pins_states(const struct bt_pins *p, struct bt_pin_state *out, uint32_t cap);

#endif
