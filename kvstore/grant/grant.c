/* The life of a grant: references, revocation, failure, the end. Control thread. */
#include <stdio.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "kvstore/grant/grant_priv.h"

void bt_grant_free(struct bt_grant *g)
{
    if (g->res.rest != NULL) {
        baton__reserve__free_unpacked(g->res.rest, NULL);
    }
    free(g->blocks.slots);
    free(g->blocks.names);
    free(g->transfer.peer);
    free(g->transfer.peer_rpc);
    free(g);
}

void bt_grant_hold(struct bt_grant *g)
{
    g->busy++;
}

void bt_grant_unhold(struct bt_grant *g)
{
    BT_ASSERT(g->busy > 0);
    g->busy--;
    bt_grant_unref(g);
}

/* true: the only opens left are those in quarantine. */
static bool only_dead_opens(const struct bt_grant *g)
{
    struct bt_list *i;
    bt_list_for_each (i, &g->opens) {
        if (BT_CONTAINER_OF(i, struct bt_grant_open, in_grant)->w != NULL) {
            return false;
        }
    }
    return true;
}

/* The beginning of a pass-through prompt is written and cached. The rest of the prompt needs this
 * grant only to find it by its name, so its slots become ordinary cache. */
static void release_beginning(struct bt_grant *g)
{
    if (g->res.beginning && g->seal.produced && bt_list_empty(&g->opens)) {
        bt_cache_put(g->gs->c.cache, g->blocks.slots, g->blocks.n);
        g->blocks.n = g->blocks.n_full = g->blocks.resident = 0;
    }
}

void bt_grant_unref(struct bt_grant *g)
{
    struct bt_grants *gs = g->gs;
    if (g->busy > 0 || !bt_list_empty(&g->transfer.sends) || g->transfer.receiving ||
        g->seal.active) {
        return;
    }
    if (g->res.session != NULL) {
        release_beginning(g);
        return;
    }
    if (!bt_list_empty(&g->opens)) {
        if (only_dead_opens(g)) {
            bt_grant_quarantine(g);
        }
        return;
    }
    bt_grant_overlap_end(g);
    BT_DEBUG("grant_end", "req=%016llx epoch=%u blocks=%u resident=%u",
             (unsigned long long)g->req->id, g->epoch, g->blocks.n, g->blocks.resident);
    (g->transfer.doubted ? bt_cache_put_doubted : bt_cache_put)(gs->c.cache, g->blocks.slots,
                                                                g->blocks.n);
    bt_pool_transit_put(gs->c.cache->pool, g->blocks.n_transit);
    atomic_store_explicit(g->flow.word, 0, memory_order_release);
    gs->flows.free[gs->flows.n_free++] = g->flow.index;
    bt_list_remove(&g->in_all);
    gs->n_grants--;
    bt_grant_request_remove(g);
    bt_grant_free(g);
}

void bt_grant_quarantine(struct bt_grant *g)
{
    for (uint32_t b = g->blocks.resident; b < g->blocks.n; b++) {
        if (!g->seal.active || b >= g->seal.end) {
            bt_cache_quarantine(g->gs->c.cache, g->blocks.slots[b]);
        }
    }
}

void bt_grant_revoke(struct bt_grant *g, bt_status_t st, const char *why)
{
    if (g->revoked.on) {
        return;
    }
    g->revoked.on = true;
    g->revoked.status = st;
    snprintf(g->revoked.why, sizeof(g->revoked.why), "%s", why);
    bt_grant_hold(g);
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &g->opens) {
        bt_grant_worker_revoke(BT_CONTAINER_OF(i, struct bt_grant_open, in_grant));
    }
    bt_grant_transfer_revoke(g);
    bt_grant_unhold(g);
}

void bt_grant_tell(const struct bt_grant *g, const Baton__FromKvstore *m)
{
    if (g->res.session != NULL && !g->gs->stopping) {
        g->gs->c.to_session(g->res.session, m);
    }
}

void bt_grant_fail(struct bt_grant *g, bt_status_t st, const char *why)
{
    if (g->revoked.on) {
        return;
    }
    BT_WARN("grant_failed", "req=%016llx epoch=%u role=%s status=%s why=%s",
            (unsigned long long)g->req->id, g->epoch, g->res.receive ? "receive" : "write",
            bt_status_name(st), why);
    if (g->gs->m.failed != NULL) {
        bt_metric_add(g->gs->m.failed, 1);
    }
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    Baton__GrantFailed f = BATON__GRANT_FAILED__INIT;
    char text[sizeof(g->revoked.why)];
    snprintf(text, sizeof(text), "%s", why);
    f.request = g->req->id;
    f.epoch = g->epoch;
    f.status = st;
    f.detail = text;
    m.m_case = BATON__FROM_KVSTORE__M_GRANT_FAILED;
    m.grant_failed = &f;
    bt_grant_tell(g, &m);
    bt_grant_revoke(g, st, text);
}
