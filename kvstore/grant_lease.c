/* Blocks that local workers read without a grant: a row that was preempted takes its KV back from
 * the slab (LocalLease, LocalUnlease). A leased slot cannot be evicted. A lease ends as an open
 * does: by the worker's word, or one quarantine after its proven death. Control thread. */
#include <stdlib.h>
#include <string.h>

#include "kvstore/grant_priv.h"

struct lease {
    struct bt_list in_worker; /* or in gs->void_leases */
    struct bt_grants *gs;
    uint64_t id, expire_ns;
    uint32_t n;
    uint32_t slots[];
};

static void lease_free(struct lease *l)
{
    bt_cache_put(l->gs->c.cache, l->slots, l->n);
    bt_list_remove(&l->in_worker);
    free(l);
}

static struct lease *lease_find(const struct bt_gworker *w, uint64_t id)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->leases) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (l->id == id) {
            return l;
        }
    }
    return NULL;
}

/* Leases the longest prefix of the keys that is here; NULL: not even the first. It counts as no use
 * of the blocks: nobody has asked for them but the row that they belong to. */
static struct lease *lease_make(struct bt_gworker *w, const Baton__LocalLease *m)
{
    struct bt_cache *cache = w->gs->c.cache;
    uint32_t n = (uint32_t)(m->keys.len / sizeof(struct bt_kv_key));
    struct lease *l = bt_calloc(1, sizeof(*l) + n * sizeof(l->slots[0]));
    for (; l->n < n; l->n++) {
        struct bt_kv_key key;
        memcpy(key.b, m->keys.data + l->n * sizeof(key.b), sizeof(key.b));
        uint32_t slot = bt_cache_hold(cache, &key);
        if (slot == UINT32_MAX) {
            break;
        }
        l->slots[l->n] = slot;
    }
    if (l->n == 0) {
        free(l);
        return NULL;
    }
    l->gs = w->gs;
    l->id = m->lease;
    bt_list_insert_tail(&w->leases, &l->in_worker);
    w->n_leases++;
    return l;
}

bt_status_t lease_ask(struct bt_gworker *w, const Baton__LocalLease *m)
{
    Baton__LocalMsg msg = BATON__LOCAL_MSG__INIT;
    Baton__LocalLeased a = BATON__LOCAL_LEASED__INIT;
    uint32_t *gens = NULL;
    size_t n = m->keys.len / sizeof(struct bt_kv_key);
    if (m->keys.len % sizeof(struct bt_kv_key) != 0 || n == 0 || n > BT_GRANT_BLOCKS_MAX ||
        lease_find(w, m->lease) != NULL) {
        return BT_ERR_PEER_PROTOCOL;
    }
    a.lease = m->lease;
    a.status = BT_ERR_EXHAUSTED;
    if (w->n_leases < GRANT_LEASES_MAX) {
        struct lease *l = lease_make(w, m);
        a.status = l != NULL ? BT_OK : BT_ERR_NOT_FOUND;
        if (l != NULL) {
            gens = bt_malloc(l->n * sizeof(*gens));
            for (uint32_t i = 0; i < l->n; i++) {
                gens[i] = bt_pool_generation(w->gs->c.cache->pool, l->slots[i]);
            }
            a.n_slots = a.n_generations = l->n;
            a.slots = l->slots;
            a.generations = gens;
        }
    }
    msg.m_case = BATON__LOCAL_MSG__M_LEASED;
    msg.leased = &a;
    local_send(w, &msg);
    free(gens);
    return BT_OK;
}

void lease_end(struct bt_gworker *w, const Baton__LocalUnlease *m)
{
    struct lease *l = lease_find(w, m->lease);
    if (l != NULL) { /* otherwise of an earlier attachment */
        lease_free(l);
        w->n_leases--;
    }
}

void lease_void(struct bt_gworker *w, uint64_t until)
{
    while (!bt_list_empty(&w->leases)) {
        struct lease *l = BT_CONTAINER_OF(w->leases.next, struct lease, in_worker);
        bt_list_remove(&l->in_worker);
        bt_list_insert_tail(&w->gs->void_leases, &l->in_worker);
        l->expire_ns = until;
        w->n_leases--;
    }
}

void lease_tick(struct bt_grants *gs, uint64_t now)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->void_leases) {
        struct lease *l = BT_CONTAINER_OF(i, struct lease, in_worker);
        if (now >= l->expire_ns) {
            lease_free(l);
        }
    }
}

static void free_list(struct bt_list *head)
{
    while (!bt_list_empty(head)) {
        lease_free(BT_CONTAINER_OF(head->next, struct lease, in_worker));
    }
}

void lease_destroy(struct bt_grants *gs)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers) {
        free_list(&BT_CONTAINER_OF(i, struct bt_gworker, link)->leases);
    }
    free_list(&gs->void_leases);
}

uint32_t lease_count(const struct bt_grants *gs)
{
    uint32_t n = 0;
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers) {
        n += BT_CONTAINER_OF(i, struct bt_gworker, link)->n_leases;
    }
    bt_list_for_each (i, &gs->void_leases) {
        n++;
    }
    return n;
}
