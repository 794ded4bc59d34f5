/* Segmented LRU over slots: two doubly linked lists by slot number. Pure, one owner thread. */
#include "kvstore/evict.h"

#include <stdlib.h>
#include <string.h>

enum { PROBATION = 0, PROTECTED = 1 };

struct node {
    uint32_t prev, next; /* in its list; slot numbers */
    uint8_t cached, pinned, cls;
};

struct list {
    uint32_t oldest, youngest, count;
};

struct bt_evict {
    struct node *nodes;
    uint32_t n;
    struct list lists[2];
    uint32_t hot, hot_max; /* protected slots, pinned or not */
};

static struct bt_evict *slru_create(uint32_t n_slots)
{
    struct bt_evict *e = bt_calloc(1, sizeof(*e));
    e->nodes = bt_calloc(n_slots, sizeof(*e->nodes));
    e->n = n_slots;
    e->hot_max = n_slots - n_slots / 5;
    for (int i = 0; i < 2; i++) {
        e->lists[i].oldest = e->lists[i].youngest = BT_EVICT_NONE;
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
    struct list *l = &e->lists[n->cls];
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
    l->count--;
}

static void link_youngest(struct bt_evict *e, uint32_t slot)
{
    struct node *n = &e->nodes[slot];
    struct list *l = &e->lists[n->cls];
    n->prev = l->youngest;
    n->next = BT_EVICT_NONE;
    if (l->youngest != BT_EVICT_NONE) {
        e->nodes[l->youngest].next = slot;
    } else {
        l->oldest = slot;
    }
    l->youngest = slot;
    l->count++;
}

static struct node *cached(struct bt_evict *e, uint32_t slot)
{
    BT_ASSERT(slot < e->n && e->nodes[slot].cached);
    return &e->nodes[slot];
}

static void slru_admit(struct bt_evict *e, uint32_t slot, const struct bt_evict_block *b)
{
    (void)b;
    BT_ASSERT(slot < e->n && !e->nodes[slot].cached);
    e->nodes[slot] = (struct node){.cached = 1, .pinned = 1, .cls = PROBATION};
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

/* Too many are protected: the oldest unpinned ones go back on probation, as its youngest. */
static void demote(struct bt_evict *e)
{
    while (e->hot > e->hot_max && e->lists[PROTECTED].count > 0) {
        uint32_t old = e->lists[PROTECTED].oldest;
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

static uint32_t slru_victim(const struct bt_evict *e)
{
    uint32_t v = e->lists[PROBATION].oldest;
    return v != BT_EVICT_NONE ? v : e->lists[PROTECTED].oldest;
}

static uint32_t slru_evictable(const struct bt_evict *e)
{
    return e->lists[PROBATION].count + e->lists[PROTECTED].count;
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
