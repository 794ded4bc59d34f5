/* Moving averages of transfer rates, in a small table. */
#include "kvstore/fetch/rates.h"

#define SAMPLE_BYTES_MIN (256u << 10)
#define WEIGHT           0.25 /* of a new sample: a few samples show a change of load */

static const struct bt_rates_peer *find(const struct bt_rates *r, uint64_t incarnation)
{
    for (uint32_t i = 0; i < r->n; i++) {
        if (r->at[i].incarnation == incarnation) {
            return &r->at[i];
        }
    }
    return NULL;
}

static struct bt_rates_peer *room(struct bt_rates *r)
{
    if (r->n < BT_RATES_PEERS_MAX) {
        return &r->at[r->n++];
    }
    struct bt_rates_peer *oldest = &r->at[0];
    for (uint32_t i = 1; i < r->n; i++) {
        oldest = r->at[i].used < oldest->used ? &r->at[i] : oldest;
    }
    return oldest;
}

void bt_rates_add(struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier, uint64_t bytes,
                  uint64_t ns)
{
    if (bytes < SAMPLE_BYTES_MIN || ns == 0) {
        return;
    }
    struct bt_rates_peer *p = (struct bt_rates_peer *)(uintptr_t)find(r, incarnation);
    if (p == NULL) {
        p = room(r);
        *p = (struct bt_rates_peer){.incarnation = incarnation};
    }
    double now = (double)bytes * 1e9 / (double)ns, *mean = &p->bytes_per_s[tier];
    *mean = *mean == 0 ? now : *mean + WEIGHT * (now - *mean);
    p->used = ++r->clock;
}

bool bt_rates_measured(const struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier)
{
    const struct bt_rates_peer *p = find(r, incarnation);
    return p != NULL && p->bytes_per_s[tier] > 0;
}

double bt_rates_get(const struct bt_rates *r, uint64_t incarnation, bt_rate_tier_t tier)
{
    const struct bt_rates_peer *p = find(r, incarnation);
    if (p != NULL && p->bytes_per_s[tier] > 0) {
        return p->bytes_per_s[tier];
    }
    return tier == BT_RATE_SLAB ? BT_RATES_PRIOR_SLAB : BT_RATES_PRIOR_SSD;
}
