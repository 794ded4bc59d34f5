/* Directory of the SSD slab: an open-addressing table of slot numbers over an array of entries, a
 * free list linked through the same array, and a policy over the slots. Pure, one owner thread. */
#include "common/policy/evict/ssd_dir.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"

enum { FREE = 0, BUSY = 1, VALID = 2 };

struct node {
    union {
        struct bt_ssd_entry e;
        struct { /* FREE: in the list; the generation is kept */
            uint32_t prev, next;
        } free;
    };
    uint8_t pins, state;
    bool counted; /* in the quota of e.group */
};
_Static_assert(offsetof(struct bt_ssd_entry, generation) >= 2 * sizeof(uint32_t),
               "a free slot keeps its generation beside the links of the list");

struct bt_ssd_dir {
    struct node *nodes;
    uint32_t n, free_head, n_free, n_valid;
    const struct bt_evict_policy *policy;
    struct bt_evict *evict; /* for VALID slots */
    struct bt_quota quota;  /* for VALID slots, and those taken for a group */
    uint32_t *table;        /* slot + 1; 0: empty */
    uint32_t mask;
};

struct bt_ssd_dir *bt_ssd_dir_create(uint32_t n_slots, const struct bt_evict_policy *policy,
                                     struct bt_tenants *tenants)
{
    struct bt_ssd_dir *d = bt_calloc(1, sizeof(*d));
    uint32_t cap = 16;
    while (cap < n_slots + n_slots / 2) {
        cap *= 2;
    }
    d->nodes = bt_calloc(n_slots, sizeof(*d->nodes));
    d->table = bt_calloc(cap, sizeof(*d->table));
    d->mask = cap - 1;
    d->n = d->n_free = n_slots;
    d->policy = policy;
    d->evict = policy->create(n_slots);
    bt_quota_init(&d->quota, tenants, BT_TENANT_SSD, n_slots);
    for (uint32_t i = 0; i < n_slots; i++) {
        d->nodes[i].free.next = i + 1 < n_slots ? i + 1 : BT_SSD_NONE;
        d->nodes[i].free.prev = i > 0 ? i - 1 : BT_SSD_NONE;
    }
    d->free_head = n_slots > 0 ? 0 : BT_SSD_NONE;
    return d;
}

void bt_ssd_dir_destroy(struct bt_ssd_dir *d)
{
    if (d == NULL) {
        return;
    }
    d->policy->destroy(d->evict);
    free(d->nodes);
    free(d->table);
    free(d);
}

static struct node *node_in(const struct bt_ssd_dir *d, uint32_t slot, int state)
{
    BT_ASSERT(slot < d->n && d->nodes[slot].state == state);
    return &d->nodes[slot];
}

/* ---- the table ---- */

static uint32_t home(const struct bt_ssd_dir *d, const struct bt_kv_key *key)
{
    return (uint32_t)bt_hash64(key->b, sizeof(key->b), 0) & d->mask;
}

/* Position of key's slot, or of the empty place where the search ends. */
static uint32_t probe(const struct bt_ssd_dir *d, const struct bt_kv_key *key)
{
    uint32_t i = home(d, key);
    while (d->table[i] != 0 && memcmp(&d->nodes[d->table[i] - 1].e.key, key, sizeof(*key)) != 0) {
        i = (i + 1) & d->mask;
    }
    return i;
}

/* Removes position i; moves later entries of the run back, so that no search ends too early. */
static void table_remove(struct bt_ssd_dir *d, uint32_t i)
{
    for (uint32_t j = (i + 1) & d->mask; d->table[j] != 0; j = (j + 1) & d->mask) {
        uint32_t h = home(d, &d->nodes[d->table[j] - 1].e.key);
        if (((j - h) & d->mask) >= ((j - i) & d->mask)) {
            d->table[i] = d->table[j];
            i = j;
        }
    }
    d->table[i] = 0;
}

uint32_t bt_ssd_dir_find(const struct bt_ssd_dir *d, const struct bt_kv_key *key)
{
    uint32_t at = d->table[probe(d, key)];
    return at == 0 ? BT_SSD_NONE : at - 1;
}

/* ---- slots ---- */

static void free_unlink(struct bt_ssd_dir *d, uint32_t slot)
{
    struct node *n = &d->nodes[slot];
    *(n->free.prev != BT_SSD_NONE ? &d->nodes[n->free.prev].free.next : &d->free_head) =
        n->free.next;
    if (n->free.next != BT_SSD_NONE) {
        d->nodes[n->free.next].free.prev = n->free.prev;
    }
    d->n_free--;
}

const struct bt_ssd_entry *bt_ssd_dir_entry(const struct bt_ssd_dir *d, uint32_t slot)
{
    BT_ASSERT(slot < d->n && d->nodes[slot].state != FREE);
    return &d->nodes[slot].e;
}

bool bt_ssd_dir_claim(struct bt_ssd_dir *d, uint32_t slot, uint32_t generation)
{
    if (slot >= d->n || d->nodes[slot].state != FREE) {
        return false;
    }
    free_unlink(d, slot);
    d->nodes[slot].state = BUSY;
    d->nodes[slot].counted = false;
    d->nodes[slot].e.generation = generation;
    return true;
}

static void count(struct bt_ssd_dir *d, struct node *n)
{
    bt_quota_add(&d->quota, (uint8_t)n->e.group);
    n->counted = true;
}

static void uncount(struct bt_ssd_dir *d, struct node *n)
{
    bt_quota_sub(&d->quota, (uint8_t)n->e.group);
    n->counted = false;
}

uint32_t bt_ssd_dir_take(struct bt_ssd_dir *d, uint8_t group)
{
    uint32_t slot = d->free_head;
    if (slot != BT_SSD_NONE) {
        BT_ASSERT(bt_ssd_dir_claim(d, slot, d->nodes[slot].e.generation + 1));
        d->nodes[slot].e.group = group;
        count(d, &d->nodes[slot]);
    }
    return slot;
}

/* uses: the number before a restart; 0: a new block. */
static void add(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e, uint32_t uses)
{
    struct node *n = node_in(d, slot, BUSY);
    uint32_t at = probe(d, &e->key), generation = n->e.generation;
    BT_ASSERT(d->table[at] == 0 && (!n->counted || n->e.group == e->group));
    n->e = *e;
    n->e.generation = generation;
    n->state = VALID;
    d->table[at] = slot + 1;
    d->n_valid++;
    struct bt_evict_block b = {.hash = bt_hash64(e->key.b, sizeof(e->key.b), 0),
                               .depth = e->depth,
                               .parent = BT_EVICT_NONE,
                               .uses = uses,
                               .group = (uint8_t)e->group};
    d->policy->admit(d->evict, slot, &b);
    if (!n->counted) {
        count(d, n);
    }
    if (n->pins == 0) {
        d->policy->unpin(d->evict, slot);
    }
}

void bt_ssd_dir_add(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e)
{
    add(d, slot, e, 0);
}

void bt_ssd_dir_restore(struct bt_ssd_dir *d, uint32_t slot, const struct bt_ssd_entry *e)
{
    add(d, slot, e, 1); /* the record does not have the number of uses */
}

void bt_ssd_dir_remove(struct bt_ssd_dir *d, uint32_t slot)
{
    struct node *n = node_in(d, slot, VALID);
    uint32_t at = probe(d, &n->e.key);
    BT_ASSERT(d->table[at] == slot + 1);
    table_remove(d, at);
    d->policy->drop(d->evict, slot);
    uncount(d, n);
    n->state = BUSY;
    d->n_valid--;
}

void bt_ssd_dir_free(struct bt_ssd_dir *d, uint32_t slot)
{
    struct node *n = node_in(d, slot, BUSY);
    BT_ASSERT(n->pins == 0);
    if (n->counted) {
        uncount(d, n);
    }
    n->state = FREE;
    n->free.prev = BT_SSD_NONE;
    n->free.next = d->free_head;
    if (d->free_head != BT_SSD_NONE) {
        d->nodes[d->free_head].free.prev = slot;
    }
    d->free_head = slot;
    d->n_free++;
}

void bt_ssd_dir_set_used(struct bt_ssd_dir *d, uint32_t slot, uint32_t used)
{
    node_in(d, slot, VALID)->e.used = used;
}

void bt_ssd_dir_touch(struct bt_ssd_dir *d, uint32_t slot)
{
    BT_ASSERT(bt_ssd_dir_is_valid(d, slot));
    d->policy->hit(d->evict, slot, BT_EVICT_NONE);
}

void bt_ssd_dir_pin(struct bt_ssd_dir *d, uint32_t slot)
{
    BT_ASSERT(slot < d->n && d->nodes[slot].state != FREE && d->nodes[slot].pins < UINT8_MAX);
    if (d->nodes[slot].pins++ == 0 && d->nodes[slot].state == VALID) {
        d->policy->pin(d->evict, slot);
    }
}

void bt_ssd_dir_unpin(struct bt_ssd_dir *d, uint32_t slot)
{
    BT_ASSERT(slot < d->n && d->nodes[slot].pins > 0);
    if (--d->nodes[slot].pins == 0 && d->nodes[slot].state == VALID) {
        d->policy->unpin(d->evict, slot);
    }
}

uint32_t bt_ssd_dir_victim(const struct bt_ssd_dir *d)
{
    return bt_quota_victim(&d->quota, d->policy, d->evict, BT_QUOTA_NONE, 0);
}

uint32_t bt_ssd_dir_used(const struct bt_ssd_dir *d, uint8_t group)
{
    return d->quota.used[group];
}

uint32_t bt_ssd_dir_valid(const struct bt_ssd_dir *d)
{
    return d->n_valid;
}

uint32_t bt_ssd_dir_free_count(const struct bt_ssd_dir *d)
{
    return d->n_free;
}

bool bt_ssd_dir_is_valid(const struct bt_ssd_dir *d, uint32_t slot)
{
    return slot < d->n && d->nodes[slot].state == VALID;
}
