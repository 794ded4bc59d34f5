/* Eviction by an order of slots: each group has a binary heap of its slots that are not in use,
 * with the next victim on top. LRU, LFU and LengthAware differ only in the order. O(log slots) an
 * event. Pure, one owner thread. */
#include <stdlib.h>

#include "common/policy/evict/evict.h"

#define OUTSIDE UINT32_MAX /* not in the heap */

struct node {
    uint64_t used; /* tick of the last use */
    uint32_t uses, depth;
    uint32_t pos; /* in its group's heap */
    uint8_t cached, group;
};

/* true: a is evicted before b. */
typedef bool (*before_fn)(const struct node *a, const struct node *b);

struct heap {
    uint32_t *slots, count, cap;
};

struct bt_evict {
    struct node *nodes;
    uint32_t n, count;
    uint32_t n_groups; /* groups from this number on never had a slot */
    struct heap heaps[BT_EVICT_GROUPS];
    uint64_t tick;
    before_fn before;
};

/* The least recently used slot is evicted first. */
static bool lru_before(const struct node *a, const struct node *b)
{
    return a->used < b->used;
}

/* The least often used slot is evicted first; among equal ones the least recently used. */
static bool lfu_before(const struct node *a, const struct node *b)
{
    return a->uses != b->uses ? a->uses < b->uses : lru_before(a, b);
}

/* The same as LFU. Among blocks with equal use, the one that is latest in its request goes first
 * (Mooncake, section 4.2: "LFU, but prioritizing evicting cache blocks occurring later in
 * requests"). */
static bool length_aware_before(const struct node *a, const struct node *b)
{
    if (a->uses != b->uses) {
        return a->uses < b->uses;
    }
    return a->depth != b->depth ? a->depth > b->depth : lru_before(a, b);
}

static struct bt_evict *heap_create(uint32_t n_slots, before_fn before)
{
    struct bt_evict *e = bt_calloc(1, sizeof(*e));
    e->nodes = bt_calloc(n_slots, sizeof(*e->nodes));
    e->n = n_slots;
    e->before = before;
    return e;
}

static struct bt_evict *lru_create(uint32_t n_slots)
{
    return heap_create(n_slots, lru_before);
}

static struct bt_evict *lfu_create(uint32_t n_slots)
{
    return heap_create(n_slots, lfu_before);
}

static struct bt_evict *length_aware_create(uint32_t n_slots)
{
    return heap_create(n_slots, length_aware_before);
}

static void heap_destroy(struct bt_evict *e)
{
    if (e != NULL) {
        for (uint32_t g = 0; g < e->n_groups; g++) {
            free(e->heaps[g].slots);
        }
        free(e->nodes);
        free(e);
    }
}

static struct node *cached(struct bt_evict *e, uint32_t slot)
{
    BT_ASSERT(slot < e->n && e->nodes[slot].cached);
    return &e->nodes[slot];
}

static void place(struct bt_evict *e, struct heap *h, uint32_t pos, uint32_t slot)
{
    h->slots[pos] = slot;
    e->nodes[slot].pos = pos;
}

static void sift_up(struct bt_evict *e, struct heap *h, uint32_t pos)
{
    uint32_t slot = h->slots[pos];
    while (pos > 0) {
        uint32_t up = (pos - 1) / 2;
        if (!e->before(&e->nodes[slot], &e->nodes[h->slots[up]])) {
            break;
        }
        place(e, h, pos, h->slots[up]);
        pos = up;
    }
    place(e, h, pos, slot);
}

static void sift_down(struct bt_evict *e, struct heap *h, uint32_t pos)
{
    uint32_t slot = h->slots[pos];
    for (;;) {
        uint32_t kid = 2 * pos + 1;
        if (kid >= h->count) {
            break;
        }
        if (kid + 1 < h->count &&
            e->before(&e->nodes[h->slots[kid + 1]], &e->nodes[h->slots[kid]])) {
            kid++;
        }
        if (!e->before(&e->nodes[h->slots[kid]], &e->nodes[slot])) {
            break;
        }
        place(e, h, pos, h->slots[kid]);
        pos = kid;
    }
    place(e, h, pos, slot);
}

static void heap_insert(struct bt_evict *e, uint32_t slot)
{
    struct heap *h = &e->heaps[e->nodes[slot].group];
    if (h->count == h->cap) {
        h->cap = BT_MIN(BT_MAX(64u, h->cap + h->cap / 2), e->n);
        h->slots = bt_realloc(h->slots, h->cap * sizeof(*h->slots));
    }
    place(e, h, h->count, slot);
    e->count++;
    sift_up(e, h, h->count++);
}

static void heap_remove(struct bt_evict *e, uint32_t slot)
{
    struct heap *h = &e->heaps[e->nodes[slot].group];
    uint32_t pos = e->nodes[slot].pos;
    e->nodes[slot].pos = OUTSIDE;
    e->count--;
    if (pos == --h->count) {
        return;
    }
    place(e, h, pos, h->slots[h->count]);
    sift_up(e, h, pos);
    sift_down(e, h, e->nodes[h->slots[pos]].pos);
}

static void heap_admit(struct bt_evict *e, uint32_t slot, const struct bt_evict_block *b)
{
    BT_ASSERT(slot < e->n && !e->nodes[slot].cached && b->group < BT_EVICT_GROUPS);
    e->nodes[slot] = (struct node){.used = ++e->tick,
                                   .uses = BT_MAX(b->uses, 1u),
                                   .depth = b->depth,
                                   .pos = OUTSIDE,
                                   .cached = 1,
                                   .group = b->group};
    e->n_groups = BT_MAX(e->n_groups, b->group + 1u);
}

static void heap_hit(struct bt_evict *e, uint32_t slot, uint32_t parent)
{
    (void)parent;
    struct node *n = cached(e, slot);
    bool inside = n->pos != OUTSIDE;
    if (inside) {
        heap_remove(e, slot);
    }
    n->uses++;
    n->used = ++e->tick;
    if (inside) {
        heap_insert(e, slot);
    }
}

static void heap_pin(struct bt_evict *e, uint32_t slot)
{
    if (cached(e, slot)->pos != OUTSIDE) {
        heap_remove(e, slot);
    }
}

static void heap_unpin(struct bt_evict *e, uint32_t slot)
{
    struct node *n = cached(e, slot);
    if (n->pos == OUTSIDE) {
        n->used = ++e->tick; /* it was in use until now */
        heap_insert(e, slot);
    }
}

static void heap_drop(struct bt_evict *e, uint32_t slot)
{
    heap_pin(e, slot);
    e->nodes[slot].cached = 0;
}

static uint32_t heap_victim_of(const struct bt_evict *e, uint8_t group)
{
    return e->heaps[group].count > 0 ? e->heaps[group].slots[0] : BT_EVICT_NONE;
}

static uint32_t heap_victim(const struct bt_evict *e, const struct bt_evict_groups *of)
{
    uint32_t best = BT_EVICT_NONE;
    for (uint32_t g = 0; g < e->n_groups; g++) {
        uint32_t v = heap_victim_of(e, (uint8_t)g);
        if (v != BT_EVICT_NONE && (of == NULL || bt_evict_groups_has(of, g)) &&
            (best == BT_EVICT_NONE || e->before(&e->nodes[v], &e->nodes[best]))) {
            best = v;
        }
    }
    return best;
}

static uint32_t heap_evictable(const struct bt_evict *e)
{
    return e->count;
}

#define HEAP_POLICY(name_, create_)                                                                \
    {                                                                                              \
        .name = (name_), .create = (create_), .destroy = heap_destroy, .admit = heap_admit,        \
        .hit = heap_hit, .pin = heap_pin, .unpin = heap_unpin, .drop = heap_drop,                  \
        .victim = heap_victim, .victim_of = heap_victim_of, .evictable = heap_evictable,           \
    }

const struct bt_evict_policy bt_evict_lru = HEAP_POLICY("lru", lru_create);
const struct bt_evict_policy bt_evict_lfu = HEAP_POLICY("lfu", lfu_create);
const struct bt_evict_policy bt_evict_length_aware =
    HEAP_POLICY("length_aware", length_aware_create);
