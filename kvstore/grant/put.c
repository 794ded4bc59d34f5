/* Blocks that local workers write without a grant (LocalPut, LocalPutDone). Generated blocks become
 * cache. Blocks of a pass-through prompt go to the SSD, by the write policy, through a window of
 * slots. While the window is full a put waits for its answer, which slows the worker down to the
 * speed of the disk. A put ends with the worker's LocalPutDone, or one quarantine after the
 * worker's proven death. Control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/grant/grant_priv.h"

#define PASS_WAIT_MS 10000 /* a disk that is this slow for one block is too slow for the rest */

struct put {
    struct bt_list link; /* in its worker, or in a list of gs->puts */
    struct bt_grants *gs;
    struct bt_grant_worker *w;        /* while the put waits: the worker that asked */
    uint64_t id, expire_ns, given_ns; /* given_ns: while the put waits, the time of the request */
    uint32_t slot, depth, n_tokens;
    uint32_t tenant;           /* tag */
    bool passing;              /* its slot counts in the window */
    struct bt_tier_save *save; /* while the block is written to the SSD */
    struct bt_kv_key key;
};

static void start_waiting(struct bt_grants *gs);

static void put_free(struct put *p)
{
    struct bt_grants *gs = p->gs;
    if (p->save != NULL) {
        bt_tier_pass_forget(p->save);
    }
    bt_cache_put(gs->c.cache, &p->slot, 1);
    gs->window.out -= p->passing;
    bt_list_remove(&p->link);
    free(p);
}

static void answer(struct bt_grant_worker *w, uint64_t id, bt_status_t st, uint32_t slot)
{
    Baton__LocalMsg msg = BATON__LOCAL_MSG__INIT;
    Baton__LocalPutSlot a = BATON__LOCAL_PUT_SLOT__INIT;
    a.put = id;
    a.status = st;
    if (st == BT_OK) {
        a.slot = slot;
        a.generation = bt_pool_generation(w->gs->c.cache->pool, slot);
    }
    msg.m_case = BATON__LOCAL_MSG__M_PUT_SLOT;
    msg.put_slot = &a;
    bt_grant_worker_send(w, &msg);
}

static struct put *put_find(const struct bt_grant_worker *w, uint64_t id)
{
    struct bt_list *i;
    bt_list_for_each (i, &w->puts) {
        struct put *p = BT_CONTAINER_OF(i, struct put, link);
        if (p->id == id) {
            return p;
        }
    }
    return NULL;
}

static bt_status_t take(struct put *p)
{
    struct bt_cache *cache = p->gs->c.cache;
    uint8_t group = cache->tenants != NULL ? bt_tenants_by_tag(cache->tenants, p->tenant)
                                           : (uint8_t)BT_TENANT_NOBODY;
    return bt_cache_take(cache, group, 1, &p->slot);
}

/* Gives p, whose slot is taken, to its worker. */
static void put_give(struct bt_grant_worker *w, struct put *p)
{
    p->given_ns = bt_mono_ns();
    bt_list_insert_tail(&w->puts, &p->link);
    w->n_puts++;
    answer(w, p->id, BT_OK, p->slot);
}

/* ---- pass-through blocks ---- */

static bool known(const struct bt_grants *gs, const struct bt_kv_key *key)
{
    return bt_index_find(gs->c.cache->index, key) != UINT32_MAX ||
           bt_ssd_has(bt_tier_ssd(gs->c.tier), key);
}

/* Gives slots to waiting puts as far as the window allows. If no slot is free the next tick tries
 * again. */
static void start_waiting(struct bt_grants *gs)
{
    while (!bt_list_empty(&gs->puts.waiting) && gs->window.out < gs->window.slots &&
           !gs->stopping) {
        struct put *p = BT_CONTAINER_OF(gs->puts.waiting.next, struct put, link);
        struct bt_grant_worker *w = p->w;
        bool done = known(gs, &p->key); /* another request has written the block */
        if (!done && take(p) != BT_OK) {
            return;
        }
        bt_list_remove(&p->link);
        w->n_put_waits--;
        if (done) {
            answer(w, p->id, BT_ERR_EXISTS, 0);
            free(p);
            continue;
        }
        p->passing = true;
        gs->window.out++;
        put_give(w, p);
    }
}

static void on_written(void *arg, bt_status_t st)
{
    struct put *p = arg;
    struct bt_grants *gs = p->gs;
    p->save = NULL;
    if (st == BT_OK && gs->m.passed_out != NULL) {
        bt_metric_add(gs->m.passed_out, 1);
    }
    put_free(p);
    start_waiting(gs);
}

static bt_status_t may_pass(const struct bt_grant_worker *w, const struct put *p)
{
    const struct bt_grants *gs = w->gs;
    if (gs->c.tier == NULL || gs->stopping) {
        return BT_ERR_UNAVAILABLE;
    }
    if (w->n_put_waits >= GRANT_PUTS_MAX) {
        return BT_ERR_EXHAUSTED;
    }
    return bt_index_find(gs->c.cache->index, &p->key) != UINT32_MAX
               ? BT_ERR_EXISTS
               : bt_tier_admit(gs->c.tier, &p->key, p->depth);
}

/* ---- messages of workers ---- */

static bt_status_t may_stay(const struct bt_grant_worker *w, struct put *p)
{
    const struct bt_cache *cache = w->gs->c.cache;
    if (bt_index_find(cache->index, &p->key) != UINT32_MAX) {
        return BT_ERR_EXISTS;
    }
    return w->n_puts >= GRANT_PUTS_MAX ? BT_ERR_EXHAUSTED : take(p);
}

bt_status_t bt_grant_put_ask(struct bt_grant_worker *w, const Baton__LocalPut *m)
{
    struct bt_grants *gs = w->gs;
    if (put_find(w, m->put) != NULL) {
        return BT_ERR_PEER_PROTOCOL;
    }
    struct put *p = bt_calloc(1, sizeof(*p));
    p->gs = gs;
    p->w = w;
    p->id = m->put;
    p->depth = m->depth;
    p->n_tokens = m->n_tokens;
    p->tenant = m->tenant;
    memcpy(p->key.b, m->key.data, sizeof(p->key.b));
    bt_list_init(&p->link);
    bt_status_t st = m->n_tokens != gs->c.layout.page_tokens
                         ? BT_ERR_INVALID /* a partial block has no key */
                     : m->passing ? may_pass(w, p)
                                  : may_stay(w, p);
    if (st != BT_OK) {
        answer(w, p->id, st, 0);
        free(p);
    } else if (m->passing) {
        p->given_ns = bt_mono_ns();
        bt_list_insert_tail(&gs->puts.waiting, &p->link);
        w->n_put_waits++;
        start_waiting(gs);
    } else {
        put_give(w, p);
    }
    return BT_OK;
}

static void on_sealed(void *arg)
{
    struct put *p = arg;
    struct bt_grants *gs = p->gs;
    struct bt_cache_block b = {.key = &p->key,
                               .n_tokens = p->n_tokens,
                               .depth = p->depth,
                               .origin = BT_EVICT_GENERATED,
                               .passing = p->passing};
    bt_cache_seal(gs->c.cache, p->slot, &b);
    p->save = p->passing ? bt_tier_pass(gs->c.tier, p->slot, on_written, p) : NULL;
    if (p->save == NULL) {
        put_free(p);
        start_waiting(gs);
    }
}

void bt_grant_put_end(struct bt_grant_worker *w, const Baton__LocalPutDone *m)
{
    struct bt_grants *gs = w->gs;
    struct put *p = put_find(w, m->put);
    if (p == NULL) {
        return; /* it is of an earlier attachment */
    }
    bt_list_remove(&p->link);
    w->n_puts--;
    if (m->abort) {
        put_free(p);
        start_waiting(gs);
        return;
    }
    bt_list_insert_tail(&gs->puts.sealing, &p->link);
    bt_sealer_submit(gs->c.sealer, &p->slot, &p->key, 1, on_sealed, p);
}

/* ---- ends ---- */

void bt_grant_put_forget_waiting(struct bt_grant_worker *w)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &w->gs->puts.waiting) {
        struct put *p = BT_CONTAINER_OF(i, struct put, link);
        if (p->w == w) {
            bt_list_remove(&p->link);
            free(p);
        }
    }
    w->n_put_waits = 0;
}

void bt_grant_put_void(struct bt_grant_worker *w, uint64_t until)
{
    bt_grant_put_forget_waiting(w);
    while (!bt_list_empty(&w->puts)) {
        struct put *p = BT_CONTAINER_OF(w->puts.next, struct put, link);
        bt_list_remove(&p->link);
        bt_list_insert_tail(&w->gs->puts.dead, &p->link);
        p->expire_ns = until;
        bt_cache_quarantine(w->gs->c.cache, p->slot);
        w->n_puts--;
    }
}

/* A copy takes milliseconds and cannot be cancelled. If a worker has not sent LocalPutDone for
 * twice reclaim_ms, it does not run any more. It still owns the slot until one quarantine after its
 * death. */
void bt_grant_put_reclaim(struct bt_grant_worker *w, uint64_t now)
{
    if (bt_list_empty(&w->puts)) {
        return;
    }
    const struct put *oldest = BT_CONTAINER_OF(w->puts.next, struct put, link);
    if (now - oldest->given_ns >= 2 * w->gs->c.reclaim_ms * 1000000ull) {
        char what[64];
        snprintf(what, sizeof(what), "put=%llu open_puts=%u", (unsigned long long)oldest->id,
                 w->n_puts);
        bt_grant_worker_kill(w, what, now);
    }
}

static void give_up_late(struct bt_grants *gs, uint64_t now)
{
    while (!bt_list_empty(&gs->puts.waiting)) { /* oldest first */
        struct put *p = BT_CONTAINER_OF(gs->puts.waiting.next, struct put, link);
        if (now - p->given_ns < PASS_WAIT_MS * 1000000ull) {
            return;
        }
        bt_list_remove(&p->link);
        p->w->n_put_waits--;
        answer(p->w, p->id, BT_ERR_EXHAUSTED, 0);
        free(p);
    }
}

void bt_grant_put_tick(struct bt_grants *gs, uint64_t now)
{
    struct bt_list *i, *tmp;
    bt_list_for_each_safe (i, tmp, &gs->puts.dead) {
        struct put *p = BT_CONTAINER_OF(i, struct put, link);
        if (now >= p->expire_ns) {
            put_free(p);
        }
    }
    start_waiting(gs);
    give_up_late(gs, now);
}

static void free_list(struct bt_list *head)
{
    while (!bt_list_empty(head)) {
        put_free(BT_CONTAINER_OF(head->next, struct put, link));
    }
}

void bt_grant_put_destroy(struct bt_grants *gs)
{
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        struct bt_grant_worker *w = BT_CONTAINER_OF(i, struct bt_grant_worker, link);
        bt_grant_put_forget_waiting(w);
        free_list(&w->puts);
    }
    free_list(&gs->puts.dead);
    free_list(&gs->puts.sealing);
}

static uint32_t length(const struct bt_list *head)
{
    uint32_t n = 0;
    for (const struct bt_list *i = head->next; i != head; i = i->next) {
        n++;
    }
    return n;
}

uint32_t bt_grant_put_count(const struct bt_grants *gs)
{
    uint32_t n = length(&gs->puts.waiting) + length(&gs->puts.dead) + length(&gs->puts.sealing);
    struct bt_list *i;
    bt_list_for_each (i, &gs->workers.all) {
        n += BT_CONTAINER_OF(i, struct bt_grant_worker, link)->n_puts;
    }
    return n;
}
