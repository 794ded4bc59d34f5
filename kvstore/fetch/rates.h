/* Measured speed of block sources: per peer, of its slab and of its SSD, and of this node's SSD. A
 * bounded plain value of the control thread. Pure: durations are arguments. */
#ifndef BT_KVSTORE_FETCH_RATES_H
#define BT_KVSTORE_FETCH_RATES_H

#include "common/base/base.h"

/* A node fetches from few others at a time; one that is forgotten is measured again. */
#define BT_RATES_PEERS_MAX 64
#define BT_RATES_OWN       0u /* stands for this node in place of a peer's incarnation */

/* Bytes per second that are assumed before the first measurement: a 10 Gbit/s link, and a
 * SATA SSD. Low: a source that is slower than assumed would delay the request that is first. */
#define BT_RATES_PRIOR_SLAB 1e9
#define BT_RATES_PRIOR_SSD  5e8

typedef enum { BT_RATE_SLAB, BT_RATE_SSD } bt_rate_tier_t;

struct bt_rates {
    struct bt_rates_peer {
        uint64_t incarnation;
        double bytes_per_s[2]; /* 0: not measured */
        uint64_t used;         /* time of the last sample, by clock; the oldest peer makes room */
    } at[BT_RATES_PEERS_MAX];
    uint32_t n;
    uint64_t clock;
};

/* bytes arrived within ns, request included. Samples below 256 KiB are ignored: they measure
 * latency rather than bandwidth. */
void bt_rates_add(struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier, uint64_t bytes,
                  uint64_t ns);
bool bt_rates_measured(const struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier);
/* Bytes per second; the assumed value before the first measurement. */
double bt_rates_get(const struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier);

#endif
