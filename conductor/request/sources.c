/* Sources of a planned prefix; see sources.h. The index knows an extent by its last block: a
 * kvstore that has this block is assumed to have the whole extent. */
#include "conductor/request/sources.h"

#include <stdlib.h>
#include <string.h>

#include "conductor/view/view.h"

#define HOLDERS_MAX 64 /* most holders of one extent that are looked at */

/* The kvstores of the snapshot that have extent e; returns their number. */
static uint32_t holders(const struct bt_view *view, const struct bt_view_snapshot *v,
                        const struct bt_kv_key *keys, uint32_t e, uint32_t *at)
{
    uint32_t ids[HOLDERS_MAX], n = 0, extent = bt_view_extent_blocks(view);
    const struct bt_kv_key *last = &keys[(size_t)(e + 1) * extent - 1];
    uint32_t all = bt_holders_of(bt_view_index(view), last, ids, HOLDERS_MAX);
    for (uint32_t i = 0; i < BT_MIN(all, (uint32_t)HOLDERS_MAX); i++) {
        uint32_t k = bt_view_kvstore_at(view, v, ids[i]);
        if (k != BT_SCHED_NONE) {
            at[n++] = k;
        }
    }
    return n;
}

uint32_t bt_sources_spread(const struct bt_view *view, const struct bt_view_snapshot *v,
                           const struct bt_kv_key *keys, uint32_t n)
{
    uint32_t at[HOLDERS_MAX], extent = bt_view_extent_blocks(view), e = 0;
    while (e < n / extent && holders(view, v, keys, e, at) != 0) {
        e++;
    }
    return e * extent;
}

/* Adds blocks [first, first + count) to the blocks that s has. */
static void add_run(struct bt_source *s, uint32_t first, uint32_t count)
{
    s->blocks += count;
    if (s->n_runs != 0 && s->first[s->n_runs - 1] + s->count[s->n_runs - 1] == first) {
        s->count[s->n_runs - 1] += count;
        return;
    }
    s->first = bt_realloc(s->first, (s->n_runs + 1) * sizeof(*s->first));
    s->count = bt_realloc(s->count, (s->n_runs + 1) * sizeof(*s->count));
    s->first[s->n_runs] = first;
    s->count[s->n_runs++] = count;
}

/* Chooses the kvstores to ask: first the plan's, then those with the most extents of the prefix. */
static void choose(const struct bt_view_snapshot *v, const struct bt_sched_plan *plan,
                   uint32_t *extents, struct bt_sources *out, uint8_t *place)
{
    uint32_t next = plan->prefix.fetch_from;
    while (out->n < BT_SOURCES_MAX && next != BT_SCHED_NONE) {
        if (extents[next] != 0) {
            out->at[out->n++].kv = v->kvstore[next];
            place[next] = (uint8_t)out->n;
            extents[next] = 0;
        }
        next = BT_SCHED_NONE;
        uint32_t most = 0;
        for (uint32_t k = 0; k < v->snap.n_kvstores; k++) {
            if (!v->kvstores[k].avoid && extents[k] > most) {
                most = extents[k];
                next = k;
            }
        }
    }
}

void bt_sources_find(const struct bt_view *view, const struct bt_view_snapshot *v,
                     const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                     uint32_t n_keys, uint32_t n, struct bt_sources *out)
{
    memset(out, 0, sizeof(*out));
    if (plan->prefix.fetch_tokens == 0) {
        return;
    }
    uint32_t extent = bt_view_extent_blocks(view), at[HOLDERS_MAX];
    uint32_t n_extents = BT_MIN(BT_DIV_UP(n, extent), n_keys / extent);
    uint32_t *extents = bt_calloc(v->snap.n_kvstores, sizeof(*extents));
    uint8_t *place = bt_calloc(v->snap.n_kvstores, 1); /* 1 + its place in out; 0: not asked */
    for (uint32_t e = 0; e < n_extents; e++) {
        for (uint32_t i = holders(view, v, keys, e, at); i-- > 0;) {
            extents[at[i]]++;
        }
    }
    extents[plan->at.kv_prefill] = 0; /* it looks at itself first anyway */
    choose(v, plan, extents, out, place);
    for (uint32_t e = 0; e < n_extents; e++) {
        for (uint32_t i = holders(view, v, keys, e, at); i-- > 0;) {
            if (place[at[i]] != 0) {
                add_run(&out->at[place[at[i]] - 1], e * extent, BT_MIN(extent, n - e * extent));
            }
        }
    }
    free(extents);
    free(place);
}

void bt_sources_cleanup(struct bt_sources *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        free(s->at[i].first);
        free(s->at[i].count);
    }
    s->n = 0;
}

struct bt_sources *bt_sources_take(struct bt_sources *s)
{
    if (s->n == 0) {
        return NULL;
    }
    struct bt_sources *own = bt_malloc(sizeof(*own));
    *own = *s;
    s->n = 0;
    return own;
}
