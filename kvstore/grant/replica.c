/* Copies of prefixes that a conductor orders before they are needed: fetches of the lowest class
 * for which no request waits. The blocks stay in the cache, on probation like every fetched block.
 * Control thread. */
#include <stdlib.h>
#include <string.h>

#include "kvstore/grant/grant_priv.h"

#define REPLICAS_MAX 4 /* at once: with more of them all would arrive late */

struct replica {
    struct bt_list link;
    struct bt_grants *gs;
    void *session;
    uint64_t id;
    struct bt_kv_key *keys;
    uint32_t n, had;
    struct bt_fetch *fetch;
};

static void answer(const struct bt_grants *gs, void *session, uint64_t id, bt_status_t st,
                   uint32_t blocks)
{
    Baton__Replicated r = BATON__REPLICATED__INIT;
    r.id = id;
    r.status = st;
    r.blocks = blocks;
    Baton__FromKvstore m = BATON__FROM_KVSTORE__INIT;
    m.m_case = BATON__FROM_KVSTORE__M_REPLICATED;
    m.replicated = &r;
    gs->c.to_session(session, &m);
}

static void replica_free(struct replica *x)
{
    bt_list_remove(&x->link);
    x->gs->replicas.n--;
    if (x->fetch != NULL) {
        bt_fetch_end(x->fetch);
    }
    free(x->keys);
    free(x);
}

/* Number of blocks at the beginning of the chain that are in the slab. */
static uint32_t resident(const struct bt_grants *gs, const struct bt_kv_key *keys, uint32_t n)
{
    uint32_t have = 0;
    while (have < n && bt_index_find(gs->c.cache->index, &keys[have]) != UINT32_MAX) {
        have++;
    }
    return have;
}

static void on_done(void *arg)
{
    struct replica *x = arg;
    uint32_t now = resident(x->gs, x->keys, x->n);
    answer(x->gs, x->session, x->id, BT_OK, now - BT_MIN(x->had, now));
    replica_free(x);
}

void bt_grants_replicate(struct bt_grants *gs, void *session, const Baton__Replicate *m)
{
    size_t n = m->keys.len / sizeof(struct bt_kv_key);
    if (n == 0 || m->keys.len % sizeof(struct bt_kv_key) != 0 ||
        n > bt_index_slots(gs->c.cache->index)) {
        answer(gs, session, m->id, BT_ERR_INVALID, 0);
        return;
    }
    if (gs->stopping || gs->replicas.n == REPLICAS_MAX) {
        answer(gs, session, m->id, BT_ERR_EXHAUSTED, 0);
        return;
    }
    struct bt_fetch_source sources[BT_FETCH_SOURCES_MAX];
    struct replica *x = bt_calloc(1, sizeof(*x));
    x->gs = gs;
    x->session = session;
    x->id = m->id;
    x->n = (uint32_t)n;
    x->keys = bt_malloc(m->keys.len);
    memcpy(x->keys, m->keys.data, m->keys.len);
    x->had = resident(gs, x->keys, x->n);
    bt_list_insert_tail(&gs->replicas.all, &x->link);
    gs->replicas.n++;
    struct bt_fetch_ask ask = {.request = m->id,
                               .epoch = 1,
                               .keys = x->keys,
                               .n = x->n,
                               .sources = sources,
                               .n_sources =
                                   bt_grant_fetch_sources(m->sources, m->n_sources, sources),
                               .group = bt_grant_group(gs, m->tenant),
                               .class = BT_WIRE_REPLICA};
    x->fetch = bt_fetch_start(gs->fetches, &ask, on_done, x);
    if (x->fetch == NULL) { /* all blocks are in the slab, or no source has more */
        answer(gs, session, m->id, BT_OK, 0);
        replica_free(x);
    }
}

void bt_grant_replicas_drop(struct bt_grants *gs, const void *session)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->replicas.all) {
        struct replica *x = BT_CONTAINER_OF(i, struct replica, link);
        if (session == NULL || x->session == session) {
            replica_free(x);
        }
    }
}
