/* Which blocks are pinned, which of them are in a tier of this node, and which are protected. A
 * block that several pins name is one entry, owned by the oldest pin. Control thread. */
#include "kvstore/cache/pins.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/log/log.h"

#define TICK_MS   1000
#define SAVES_MAX 4096u /* blocks that a tick examines for writing to the SSD */
#define NOWHERE   UINT32_MAX

struct pin;

struct entry { /* a pinned block */
    struct bt_kv_key key;
    struct pin *owner;
    uint32_t depth;            /* its number in the chain, the same in every pin */
    uint32_t refs;             /* pins that name it */
    uint32_t at[BT_PIN_TIERS]; /* slot or position, NOWHERE */
    bool held[BT_PIN_TIERS];   /* protected */
};

struct pin {
    struct bt_list link; /* oldest first */
    uint64_t id, created_ns, ends_ns;
    struct entry **entries;
    uint32_t n;
    /* number of its entries that are protected; all of them lie below top */
    uint32_t held[BT_PIN_TIERS], top[BT_PIN_TIERS];
};

struct bt_pins {
    struct bt_pins_config c;
    struct bt_map *entries; /* key -> entry */
    struct bt_list pins;
    uint32_t n_pins, n_blocks;
    uint32_t held[BT_PIN_TIERS], present[BT_PIN_TIERS];
    uint64_t version;
    uint64_t save_at; /* where the next tick continues, counted over the blocks of all pins */
    struct bt_timer tick;
    struct {
        struct bt_metric *pins, *held[BT_PIN_TIERS], *beyond[BT_PIN_TIERS];
    } m;
};

static uint32_t slots_of(const struct bt_pins *p, bt_pin_tier_t t)
{
    if (t == BT_PIN_SLAB) {
        return bt_index_slots(p->c.cache->index);
    }
    return p->c.tier != NULL ? bt_ssd_slots(bt_tier_ssd(p->c.tier)) : 0;
}

static uint32_t held_max(const struct bt_pins *p, bt_pin_tier_t t)
{
    return (uint32_t)(p->c.pin_max * (double)slots_of(p, t));
}

/* Something that bt_pins_states returns has changed. */
static void changed(struct bt_pins *p)
{
    p->version++;
    if (p->m.pins == NULL) {
        return;
    }
    bt_metric_set(p->m.pins, p->n_pins);
    for (int t = 0; t < BT_PIN_TIERS; t++) {
        bt_metric_set(p->m.held[t], p->held[t]);
        bt_metric_set(p->m.beyond[t], p->present[t] - p->held[t]);
    }
}

/* ---- protection ---- */

static void hold(struct bt_pins *p, bt_pin_tier_t t, struct entry *e)
{
    BT_ASSERT(!e->held[t] && e->at[t] != NOWHERE);
    if (t == BT_PIN_SLAB) {
        BT_ASSERT(bt_cache_hold(p->c.cache, &e->key) == e->at[t]);
    } else {
        bt_ssd_protect(bt_tier_ssd(p->c.tier), e->at[t]);
    }
    e->held[t] = true;
    p->held[t]++;
    e->owner->held[t]++;
    e->owner->top[t] = BT_MAX(e->owner->top[t], e->depth + 1);
    changed(p);
}

static void let_go(struct bt_pins *p, bt_pin_tier_t t, struct entry *e)
{
    if (!e->held[t]) {
        return;
    }
    e->held[t] = false;
    p->held[t]--;
    e->owner->held[t]--;
    changed(p);
    if (t == BT_PIN_SLAB) {
        bt_cache_put(p->c.cache, &e->at[t], 1);
    } else {
        bt_ssd_unprotect(bt_tier_ssd(p->c.tier), e->at[t]);
    }
}

static struct entry *deepest_held(struct pin *x, bt_pin_tier_t t)
{
    while (x->top[t] > 0) {
        struct entry *e = x->entries[x->top[t] - 1];
        if (e->owner == x && e->held[t]) {
            return e;
        }
        x->top[t]--;
    }
    return NULL;
}

/* Unprotects the entry of the lowest rank to make room for e, if e ranks higher. */
static bool displace(struct bt_pins *p, bt_pin_tier_t t, const struct entry *e)
{
    for (struct bt_list *l = p->pins.prev; l != &p->pins; l = l->prev) {
        struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        struct entry *last = deepest_held(x, t);
        if (x == e->owner && (last == NULL || last->depth < e->depth)) {
            return false;
        }
        if (last != NULL) {
            let_go(p, t, last);
            return true;
        }
    }
    return false;
}

/* Protects a block that is in the tier, if its rank is high enough. */
static bool protect(struct bt_pins *p, bt_pin_tier_t t, struct entry *e)
{
    if (e->at[t] == NOWHERE || e->held[t]) {
        return true;
    }
    uint32_t max = held_max(p, t);
    if (max == 0 || (p->held[t] >= max && !displace(p, t, e))) {
        return false;
    }
    hold(p, t, e);
    return true;
}

/* Protects the entries of the highest ranks after room was freed or ranks have changed. */
static void refill(struct bt_pins *p, bt_pin_tier_t t)
{
    struct bt_list *l;
    if (p->held[t] == p->present[t]) {
        return;
    }
    bt_list_for_each (l, &p->pins) {
        struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        for (uint32_t i = 0; i < x->n; i++) {
            if (x->entries[i]->owner == x && !protect(p, t, x->entries[i])) {
                return; /* all further entries rank lower */
            }
        }
    }
}

static void here(struct bt_pins *p, bt_pin_tier_t t, struct entry *e, uint32_t at)
{
    p->present[t] += e->at[t] == NOWHERE;
    e->at[t] = at;
    (void)protect(p, t, e);
    changed(p);
}

static void gone(struct bt_pins *p, bt_pin_tier_t t, struct entry *e)
{
    let_go(p, t, e);
    p->present[t] -= e->at[t] != NOWHERE;
    e->at[t] = NOWHERE;
    changed(p);
}

/* ---- callbacks of the tiers ---- */

static void on_cached(void *arg, uint32_t slot)
{
    struct bt_pins *p = arg;
    struct entry *e = bt_map_count(p->entries) != 0
                          ? bt_map_get(p->entries, bt_pool_key(p->c.cache->pool, slot))
                          : NULL;
    if (e != NULL) {
        here(p, BT_PIN_SLAB, e, slot);
    }
}

static void on_dropped(void *arg, uint32_t slot)
{
    struct bt_pins *p = arg;
    struct entry *e = bt_map_count(p->entries) != 0
                          ? bt_map_get(p->entries, bt_pool_key(p->c.cache->pool, slot))
                          : NULL;
    if (e != NULL) {
        BT_ASSERT(!e->held[BT_PIN_SLAB]);
        gone(p, BT_PIN_SLAB, e);
    }
}

static void on_ssd(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key, uint32_t depth)
{
    struct bt_pins *p = arg;
    struct entry *e = bt_map_get(p->entries, key);
    (void)depth;
    if (e == NULL) {
        return;
    }
    if (added) {
        here(p, BT_PIN_SSD, e, pos);
    } else {
        gone(p, BT_PIN_SSD, e);
        refill(p, BT_PIN_SSD);
    }
}

/* ---- pins ---- */

static struct pin *find(const struct bt_pins *p, uint64_t id)
{
    struct bt_list *l;
    bt_list_for_each (l, &p->pins) {
        struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        if (x->id == id) {
            return x;
        }
    }
    return NULL;
}

/* Is a older than b? */
static bool older(const struct pin *a, const struct pin *b)
{
    return a->created_ns != b->created_ns ? a->created_ns < b->created_ns : a->id < b->id;
}

static void insert(struct bt_pins *p, struct pin *x)
{
    struct bt_list *l = p->pins.prev;
    while (l != &p->pins && older(x, BT_CONTAINER_OF(l, struct pin, link))) {
        l = l->prev;
    }
    bt_list_insert_tail(l->next, &x->link); /* behind l */
}

/* Makes x the owner of e; if e is protected, it counts for x. */
static void give(struct entry *e, struct pin *x)
{
    for (int t = 0; t < BT_PIN_TIERS; t++) {
        if (e->held[t]) {
            e->owner->held[t]--;
            x->held[t]++;
            x->top[t] = BT_MAX(x->top[t], e->depth + 1);
        }
    }
    e->owner = x;
}

static struct entry *entry_for(struct bt_pins *p, struct pin *x, const struct bt_kv_key *key,
                               uint32_t depth)
{
    struct entry *e = bt_map_get(p->entries, key);
    if (e == NULL) {
        e = bt_calloc(1, sizeof(*e));
        e->key = *key;
        e->depth = depth;
        e->owner = x;
        e->at[BT_PIN_SLAB] = e->at[BT_PIN_SSD] = NOWHERE;
        bt_map_put(p->entries, &e->key, e);
    } else if (e->depth != depth) {
        return NULL; /* the same key twice: not a chain of this model */
    } else if (older(x, e->owner)) {
        give(e, x);
    }
    e->refs++;
    return e;
}

static void look_up(struct bt_pins *p, struct entry *e)
{
    uint32_t slot = bt_index_find(p->c.cache->index, &e->key);
    if (slot != UINT32_MAX && e->at[BT_PIN_SLAB] == NOWHERE) {
        here(p, BT_PIN_SLAB, e, slot);
    }
    uint32_t pos = p->c.tier != NULL ? bt_ssd_find(bt_tier_ssd(p->c.tier), &e->key) : UINT32_MAX;
    if (pos != UINT32_MAX && e->at[BT_PIN_SSD] == NOWHERE) {
        here(p, BT_PIN_SSD, e, pos);
    }
}

/* Removes x from the pins that name e. */
static void leave(struct bt_pins *p, struct pin *x, struct entry *e)
{
    struct bt_list *l;
    if (--e->refs == 0) {
        gone(p, BT_PIN_SLAB, e);
        gone(p, BT_PIN_SSD, e);
        bt_map_del(p->entries, &e->key);
        free(e);
        return;
    }
    if (e->owner != x) {
        return;
    }
    bt_list_for_each (l, &p->pins) { /* oldest first, without x */
        struct pin *y = BT_CONTAINER_OF(l, struct pin, link);
        if (y->n > e->depth && y->entries[e->depth] == e) {
            give(e, y);
            return;
        }
    }
    BT_ASSERT(false);
}

static void drop(struct bt_pins *p, struct pin *x)
{
    bt_list_remove(&x->link);
    p->n_pins--;
    p->n_blocks -= x->n;
    for (uint32_t i = x->n; i-- > 0;) { /* last first, so that the chain is evicted from its end */
        leave(p, x, x->entries[i]);
    }
    free(x->entries);
    free(x);
}

void bt_pins_remove(struct bt_pins *p, uint64_t id)
{
    struct pin *x = find(p, id);
    if (x != NULL) {
        drop(p, x);
        refill(p, BT_PIN_SLAB);
        refill(p, BT_PIN_SSD);
        changed(p);
    }
}

bt_status_t bt_pins_put(struct bt_pins *p, const struct bt_pin *pin)
{
    struct pin *was = find(p, pin->id);
    if (was != NULL && was->n == pin->n && was->created_ns == pin->created_ns &&
        memcmp(&was->entries[pin->n - 1]->key, &pin->keys[pin->n - 1], sizeof(*pin->keys)) == 0) {
        was->ends_ns = pin->ends_ns; /* the pin is renewed; equal last keys mean equal chains */
        return BT_OK;
    }
    bt_pins_remove(p, pin->id);
    if (pin->n == 0 || p->n_pins >= BT_PINS_MAX || pin->n > BT_PINS_BLOCKS_MAX - p->n_blocks) {
        return BT_ERR_EXHAUSTED;
    }
    struct pin *x = bt_calloc(1, sizeof(*x));
    x->id = pin->id;
    x->created_ns = pin->created_ns;
    x->ends_ns = pin->ends_ns;
    x->entries = bt_calloc(pin->n, sizeof(struct entry *));
    insert(p, x);
    p->n_pins++;
    for (; x->n < pin->n; x->n++) {
        struct entry *e = entry_for(p, x, &pin->keys[x->n], x->n);
        if (e == NULL) {
            break;
        }
        x->entries[x->n] = e;
    }
    p->n_blocks += x->n;
    for (uint32_t i = 0; i < x->n; i++) {
        look_up(p, x->entries[i]);
    }
    refill(p, BT_PIN_SLAB); /* it may now own blocks of younger pins, which then rank higher */
    refill(p, BT_PIN_SSD);
    changed(p);
    return BT_OK;
}

/* ---- time ---- */

void bt_pins_until(struct bt_pins *p, uint64_t id, uint64_t ends_ns)
{
    struct pin *x = find(p, id);
    if (x != NULL) {
        x->ends_ns = ends_ns;
    }
}

/* Pinned blocks are also written to the SSD, as far as there is room, some in each tick. */
static void save_some(struct bt_pins *p)
{
    uint64_t number = 0;
    uint32_t looked = 0;
    struct bt_list *l;
    if (p->c.tier == NULL) {
        return;
    }
    bt_list_for_each (l, &p->pins) {
        struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        uint32_t i = p->save_at > number ? (uint32_t)BT_MIN(p->save_at - number, x->n) : 0;
        for (; i < x->n; i++) {
            struct entry *e = x->entries[i];
            p->save_at = number + i;
            if (looked++ == SAVES_MAX || p->held[BT_PIN_SSD] >= held_max(p, BT_PIN_SSD)) {
                return;
            }
            if (e->at[BT_PIN_SSD] == NOWHERE) {
                look_up(p, e); /* a disk that was unavailable has sent no event */
            }
            if (e->at[BT_PIN_SLAB] != NOWHERE && e->at[BT_PIN_SSD] == NOWHERE) {
                bt_status_t st = bt_tier_save(p->c.tier, e->at[BT_PIN_SLAB]);
                if (st == BT_AGAIN || st == BT_ERR_UNAVAILABLE) {
                    return; /* the next tick continues here */
                }
            }
        }
        number += x->n;
    }
    p->save_at = 0;
}

void bt_pins_tick(struct bt_pins *p, uint64_t now_ns)
{
    struct bt_list *l = p->pins.next;
    while (l != &p->pins) {
        struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        l = l->next;
        if (x->ends_ns <= now_ns) {
            BT_INFO("pin_expired", "id=%016llx blocks=%u", (unsigned long long)x->id, x->n);
            bt_pins_remove(p, x->id);
        }
    }
    refill(p, BT_PIN_SSD); /* the disk may have become available */
    save_some(p);
}

static void on_tick(void *arg)
{
    struct bt_pins *p = arg;
    if (p->n_pins != 0) {
        bt_pins_tick(p, bt_mono_ns());
    }
}

/* ---- create and destroy ---- */

struct bt_pins *bt_pins_create(const struct bt_pins_config *c)
{
    struct bt_pins *p = bt_calloc(1, sizeof(*p));
    p->c = *c;
    p->entries = bt_map_create(sizeof(struct bt_kv_key));
    bt_list_init(&p->pins);
    c->cache->guard = (struct bt_cache_guard){.cached = on_cached, .dropped = on_dropped, .arg = p};
    if (c->tier != NULL) {
        bt_tier_observe(c->tier, on_ssd, p);
    }
    if (c->metrics != NULL) {
        static const char *const tiers[] = {"tier=\"slab\"", "tier=\"ssd\""};
        p->m.pins = bt_metrics_gauge(c->metrics, "baton_pool_pins", NULL);
        for (int t = 0; t < BT_PIN_TIERS; t++) {
            p->m.held[t] = bt_metrics_gauge(c->metrics, "baton_pool_pinned_blocks", tiers[t]);
            p->m.beyond[t] = bt_metrics_gauge(c->metrics, "baton_pool_pin_beyond_blocks", tiers[t]);
        }
    }
    bt_timer_start(c->loop, &p->tick, TICK_MS, TICK_MS, on_tick, p);
    return p;
}

void bt_pins_destroy(struct bt_pins *p)
{
    if (p == NULL) {
        return;
    }
    bt_timer_stop(p->c.loop, &p->tick);
    p->c.cache->guard = (struct bt_cache_guard){0};
    if (p->c.tier != NULL) {
        bt_tier_observe(p->c.tier, NULL, p);
    }
    while (!bt_list_empty(&p->pins)) {
        drop(p, BT_CONTAINER_OF(p->pins.prev, struct pin, link));
    }
    bt_map_destroy(p->entries);
    free(p);
}

uint32_t bt_pins_count(const struct bt_pins *p)
{
    return p->n_pins;
}

uint64_t bt_pins_version(const struct bt_pins *p)
{
    return p->version;
}

uint32_t bt_pins_states(const struct bt_pins *p, struct bt_pin_state *out, uint32_t cap)
{
    struct bt_list *l;
    uint32_t n = 0;
    bt_list_for_each (l, &p->pins) {
        const struct pin *x = BT_CONTAINER_OF(l, struct pin, link);
        struct bt_pin_state s = {.id = x->id};
        uint32_t here_blocks = 0;
        for (uint32_t i = 0; i < x->n; i++) {
            for (int t = 0; t < BT_PIN_TIERS; t++) {
                const struct entry *e = x->entries[i];
                here_blocks += e->at[t] != NOWHERE;
                s.protected[t] += e->held[t];
                s.beyond[t] += e->at[t] != NOWHERE && !e->held[t];
            }
        }
        if (here_blocks > 0 && n < cap) {
            out[n++] = s;
        }
    }
    return n;
}
