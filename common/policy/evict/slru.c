/* Segmented LRU over slots: two doubly linked lists by slot number for each group. Pure, one owner
 * thread. */
#include "common/policy/evict/evict.h"

#include <stdlib.h>
#include <string.h>

enum { PROBATION = 0, PROTECTED = 1 };

struct node {
    uint32_t prev, next; /* in its list; slot numbers */
    uint32_t tick;       /* when it became the youngest */
    uint8_t cached, pinned, cls, group;
};

struct list {
    uint32_t oldest, youngest;
};

struct bt_evict {
    struct node *nodes;
    uint32_t n, tick, evictable;
    uint32_t n_groups; /* groups from this number on never had a slot */
    struct list lists[BT_EVICT_GROUPS][2];
    uint32_t hot, hot_max; /* protected slots, pinned or not */
};

static struct bt_evict *slru_create(uint32_t n_slots)
{
    struct bt_evict *e = bt_calloc(1, sizeof(*e));
    e->nodes = bt_calloc(n_slots, sizeof(*e->nodes));
    e->n = n_slots;
    e->hot_max = n_slots - n_slots / 5;
    for (uint32_t g = 0; g < BT_EVICT_GROUPS; g++) {
        for (int i = 0; i < 2; i++) {
            e->lists[g][i].oldest = e->lists[g][i].youngest = BT_EVICT_NONE;
        }
    }
    return e;
}

static void slru_destroy(struct bt_evict *e)
{
    if (e != NULL) {
        free(e->nodes);
        free(e);
    }
}

static void unlink_node(struct bt_evict *e, uint32_t slot)
{
    struct node *n = &e->nodes[slot];
    struct list *l = &e->lists[n->group][n->cls];
    if (n->prev != BT_EVICT_NONE) {
        e->nodes[n->prev].next = n->next;
    } else {
        l->oldest = n->next;
    }
    if (n->next != BT_EVICT_NONE) {
        e->nodes[n->next].prev = n->prev;
    } else {
        l->youngest = n->prev;
    }
    e->evictable--;
}

static void link_youngest(struct bt_evict *e, uint32_t slot)
{
    struct node *n = &e->nodes[slot];
    struct list *l = &e->lists[n->group][n->cls];
    n->prev = l->youngest;
    n->next = BT_EVICT_NONE;
    if (l->youngest != BT_EVICT_NONE) {
        e->nodes[l->youngest].next = slot;
    } else {
        l->oldest = slot;
    }
    l->youngest = slot;
    n->tick = ++e->tick;
    e->evictable++;
}

static struct node *cached(struct bt_evict *e, uint32_t slot)
{
    BT_ASSERT(slot < e->n && e->nodes[slot].cached);
    return &e->nodes[slot];
}

static void slru_admit(struct bt_evict *e, uint32_t slot, const struct bt_evict_block *b)
{
    BT_ASSERT(slot < e->n && !e->nodes[slot].cached && b->group < BT_EVICT_GROUPS);
    e->nodes[slot] = (struct node){.cached = 1, .pinned = 1, .cls = PROBATION, .group = b->group};
    if (b->uses > 1) {
        e->nodes[slot].cls = PROTECTED;
        e->hot++;
    }
    e->n_groups = BT_MAX(e->n_groups, b->group + 1u);
}

static void slru_hit(struct bt_evict *e, uint32_t slot, uint32_t parent)
{
    (void)parent;
    struct node *n = cached(e, slot);
    if (n->cls == PROTECTED) {
        return;
    }
    if (!n->pinned) {
        unlink_node(e, slot);
    }
    n->cls = PROTECTED;
    e->hot++;
    if (!n->pinned) {
        link_youngest(e, slot);
    }
}

/* The oldest unpinned slot of a class, in some groups or (NULL) in all. */
static uint32_t oldest_of(const struct bt_evict *e, const struct bt_evict_groups *of, int cls)
{
    uint32_t best = BT_EVICT_NONE;
    for (uint32_t g = 0; g < e->n_groups; g++) {
        uint32_t s = e->lists[g][cls].oldest; /* ticks wrap around */
        if (s != BT_EVICT_NONE && (of == NULL || bt_evict_groups_has(of, g)) &&
            (best == BT_EVICT_NONE || (int32_t)(e->nodes[s].tick - e->nodes[best].tick) < 0)) {
            best = s;
        }
    }
    return best;
}

/* While too many slots are protected, moves the oldest unpinned one back to probation, as the
 * youngest there. */
static void demote(struct bt_evict *e)
{
    for (uint32_t old;
         e->hot > e->hot_max && (old = oldest_of(e, NULL, PROTECTED)) != BT_EVICT_NONE;) {
        unlink_node(e, old);
        e->nodes[old].cls = PROBATION;
        e->hot--;
        link_youngest(e, old);
    }
}

static void slru_pin(struct bt_evict *e, uint32_t slot)
{
    struct node *n = cached(e, slot);
    if (!n->pinned) {
        unlink_node(e, slot);
        n->pinned = 1;
    }
}

static void slru_unpin(struct bt_evict *e, uint32_t slot)
{
    struct node *n = cached(e, slot);
    if (n->pinned) {
        n->pinned = 0;
        link_youngest(e, slot);
        demote(e);
    }
}

static void slru_drop(struct bt_evict *e, uint32_t slot)
{
    struct node *n = cached(e, slot);
    if (!n->pinned) {
        unlink_node(e, slot);
    }
    if (n->cls == PROTECTED) {
        e->hot--;
    }
    n->cached = 0;
}

static uint32_t slru_victim(const struct bt_evict *e, const struct bt_evict_groups *of)
{
    uint32_t v = oldest_of(e, of, PROBATION);
    return v != BT_EVICT_NONE ? v : oldest_of(e, of, PROTECTED);
}

static uint32_t slru_victim_of(const struct bt_evict *e, uint8_t group)
{
    uint32_t v = e->lists[group][PROBATION].oldest;
    return v != BT_EVICT_NONE ? v : e->lists[group][PROTECTED].oldest;
}

static uint32_t slru_evictable(const struct bt_evict *e)
{
    return e->evictable;
}

const struct bt_evict_policy bt_evict_slru = {
    .name = "slru",
    .create = slru_create,
    .destroy = slru_destroy,
    .admit = slru_admit,
    .hit = slru_hit,
    .pin = slru_pin,
    .unpin = slru_unpin,
    .drop = slru_drop,
    .victim = slru_victim,
    .victim_of = slru_victim_of,
    .evictable = slru_evictable,
};

const char bt_evict_names[] = "density, slru, lru, lfu, length_aware";

const struct bt_evict_policy *bt_evict_by_name(const char *name)
{
    static const struct bt_evict_policy *const all[] = {
        &bt_evict_slru, &bt_evict_lru, &bt_evict_lfu, &bt_evict_length_aware, &bt_evict_density};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}
