/* The metrics of grants, of the slab and of pass-through prompts. Control thread. */
#include "kvstore/grant/grant_priv.h"

static void add_since(struct bt_metric *m, uint64_t now, uint64_t *last)
{
    bt_metric_add(m, now - *last);
    *last = now;
}

static void metrics_update(void *arg)
{
    struct bt_grants *gs = arg;
    const struct bt_cache *c = gs->c.cache;
    struct bt_pool_counts n;
    struct bt_grants_stats s;
    bt_pool_counts(c->pool, &n);
    bt_grants_stats(gs, &s);
    bt_metric_set(gs->m.slots[BT_SLOT_FREE], n.free);
    bt_metric_set(gs->m.slots[BT_SLOT_WRITING], n.writing);
    bt_metric_set(gs->m.slots[BT_SLOT_SEALED], n.sealed);
    bt_metric_set(gs->m.slots[BT_SLOT_QUARANTINE], n.quarantine);
    bt_metric_set(gs->m.transit, n.transit);
    bt_metric_set(gs->m.leases, n.leases);
    bt_metric_set(gs->m.copies, c->copies);
    bt_metric_set(gs->m.fetching, s.pieces);
    bt_metric_set(gs->m.served, s.served);
    bt_metric_set(gs->m.grants, s.grants);
    bt_metric_set(gs->m.opens, s.opens);
    bt_metric_set(gs->m.workers, s.workers);
    bt_metric_set(gs->m.passing, gs->window.out + gs->window.in);
    bt_metric_set(gs->m.overlaps, bt_fetches_backward_slots(gs->fetches));
    add_since(gs->m.hits, c->hits, &gs->m.last.hits);
    add_since(gs->m.misses, c->misses, &gs->m.last.misses);
    add_since(gs->m.sealed, c->sealed, &gs->m.last.sealed);
    add_since(gs->m.duplicates, c->duplicates, &gs->m.last.duplicates);
    add_since(gs->m.evicted, c->evicted, &gs->m.last.evicted);
}

void bt_grant_metrics_create(struct bt_grants *gs, struct bt_metrics *ms)
{
    static const char *const states[4] = {"state=\"free\"", "state=\"writing\"", "state=\"sealed\"",
                                          "state=\"quarantine\""};
    for (int i = 0; i < 4; i++) {
        gs->m.slots[i] = bt_metrics_gauge(ms, "baton_pool_slots", states[i]);
    }
    gs->m.transit = bt_metrics_gauge(ms, "baton_pool_transit_slots", NULL);
    gs->m.leases = bt_metrics_gauge(ms, "baton_pool_leases", NULL);
    gs->m.copies = bt_metrics_gauge(ms, "baton_pool_copies", NULL);
    gs->m.fetching = bt_metrics_gauge(ms, "baton_kvstore_fetching", NULL);
    gs->m.served = bt_metrics_gauge(ms, "baton_kvstore_offers", NULL);
    gs->m.grants = bt_metrics_gauge(ms, "baton_kvstore_grants", NULL);
    gs->m.opens = bt_metrics_gauge(ms, "baton_kvstore_opens", NULL);
    gs->m.workers = bt_metrics_gauge(ms, "baton_kvstore_workers", NULL);
    gs->m.passing = bt_metrics_gauge(ms, "baton_kvstore_stream_slots", NULL);
    gs->m.overlaps = bt_metrics_gauge(ms, "baton_kvstore_tail_slots", NULL);
    const char *passed = "baton_kvstore_stream_blocks_total";
    gs->m.passed_out = bt_metrics_counter(ms, passed, "way=\"out\"");
    gs->m.passed_in = bt_metrics_counter(ms, passed, "way=\"in\"");
    gs->m.hits = bt_metrics_counter(ms, "baton_kvstore_prefix_blocks_total", "result=\"hit\"");
    gs->m.misses = bt_metrics_counter(ms, "baton_kvstore_prefix_blocks_total", "result=\"miss\"");
    gs->m.sealed = bt_metrics_counter(ms, "baton_kvstore_blocks_sealed_total", NULL);
    gs->m.duplicates = bt_metrics_counter(ms, "baton_kvstore_blocks_duplicate_total", NULL);
    gs->m.evicted = bt_metrics_counter(ms, "baton_kvstore_blocks_evicted_total", NULL);
    gs->m.killed = bt_metrics_counter(ms, "baton_kvstore_workers_killed_total", NULL);
    gs->m.failed = bt_metrics_counter(ms, "baton_kvstore_grants_failed_total", NULL);
    bt_metrics_refresh(ms, metrics_update, gs);
}
