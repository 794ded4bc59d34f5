/* Metrics of what tenants use of each tier. Each tenant that the configuration names has a series;
 * all others together have one. So the number of series does not depend on the number of
 * tenants. */
#ifndef BT_KVSTORE_CACHE_QUOTA_METRICS_H
#define BT_KVSTORE_CACHE_QUOTA_METRICS_H

#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"

struct bt_quota_metrics;

/* NULL where nothing is bounded: then there is nothing to show. tier NULL: no SSD. All outlive it.
 */
struct bt_quota_metrics *bt_quota_metrics_create(struct bt_metrics *m, const struct bt_cache *cache,
                                                 const struct bt_tier *tier);
void bt_quota_metrics_destroy(struct bt_quota_metrics *q);

#endif
