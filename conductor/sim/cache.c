/* Each node has an eviction policy over its slots and a hash table from block to slot. For all
 * nodes together there are two bitmaps per block: the nodes with the block in their slab, and its
 * holders (slab or SSD). Without SSDs these are one bitmap. */
#include "conductor/sim/cache.h"
#include "conductor/sim/trace.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

struct slot {
    uint32_t block, held, depth; /* held: requests that use it */
};

struct bt_sim_node {
    struct bt_evict *evict; /* evict and the arrays are made on first use */
    struct slot *slots;     /* [cap] */
    uint32_t *table;        /* [mask + 1] of slot numbers, open addressing */
    uint32_t used;
    struct bt_sim_disk *disk; /* NULL: none */
};

struct bt_sim_caches {
    const struct bt_evict_policy *policy;
    uint32_t n_nodes, cap, mask, words, n_unique;
    struct bt_sim_node *nodes;
    uint64_t *slabs, *holders; /* [n_unique][words] */
    struct bt_sim_disk_config disk;
    uint64_t replicas;
};

struct bt_sim_caches *bt_sim_caches_create(uint32_t n_nodes, uint32_t capacity, uint32_t n_unique,
                                           const struct bt_evict_policy *policy,
                                           const struct bt_sim_disk_config *disk)
{
    struct bt_sim_caches *c = bt_calloc(1, sizeof(*c));
    c->policy = policy;
    c->n_nodes = n_nodes;
    c->n_unique = BT_MAX(n_unique, 1u);
    c->cap = capacity == 0 ? c->n_unique : BT_MIN(capacity, c->n_unique);
    for (c->mask = 15; c->mask < 2 * c->cap; c->mask = 2 * c->mask + 1) {
    }
    c->words = BT_DIV_UP(n_nodes, 64u);
    c->nodes = bt_calloc(n_nodes, sizeof(*c->nodes));
    c->slabs = c->holders = bt_calloc((size_t)c->n_unique * c->words, sizeof(*c->slabs));
    if (disk != NULL && disk->blocks != 0) {
        c->disk = *disk;
        c->disk.blocks = BT_MIN(disk->blocks, c->n_unique);
        c->holders = bt_calloc((size_t)c->n_unique * c->words, sizeof(*c->holders));
    }
    return c;
}

void bt_sim_caches_destroy(struct bt_sim_caches *c)
{
    if (c == NULL) {
        return;
    }
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        if (c->nodes[i].evict != NULL) {
            c->policy->destroy(c->nodes[i].evict);
        }
        free(c->nodes[i].slots);
        free(c->nodes[i].table);
        bt_sim_disk_destroy(c->nodes[i].disk);
    }
    free(c->nodes);
    if (c->holders != c->slabs) {
        free(c->holders);
    }
    free(c->slabs);
    free(c);
}

static uint64_t *holders_of(const struct bt_sim_caches *c, uint32_t block)
{
    return &c->holders[(size_t)block * c->words];
}

static uint64_t *slabs_of(const struct bt_sim_caches *c, uint32_t block)
{
    return &c->slabs[(size_t)block * c->words];
}

static bool in_slab(const struct bt_sim_caches *c, uint32_t node, uint32_t block)
{
    return slabs_of(c, block)[node / 64] >> (node % 64) & 1;
}

/* Sets or clears the node's slab bit, and its holder bit (slab or SSD) with it. */
static void mark(struct bt_sim_caches *c, uint32_t node, uint32_t block, bool slab)
{
    uint64_t bit = 1ull << (node % 64), *s = &slabs_of(c, block)[node / 64];
    *s = slab ? *s | bit : *s & ~bit;
    if (c->holders != c->slabs) {
        const struct bt_sim_disk *d = c->nodes[node].disk;
        uint64_t *h = &holders_of(c, block)[node / 64];
        *h = slab || (d != NULL && bt_sim_disk_has(d, block)) ? *h | bit : *h & ~bit;
    }
}

bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block)
{
    return holders_of(c, block)[node / 64] >> (node % 64) & 1;
}

void bt_sim_caches_match(const struct bt_sim_caches *c, const uint32_t *blocks, uint32_t n,
                         uint32_t *match)
{
    memset(match, 0, c->n_nodes * sizeof(*match));
    for (uint32_t w = 0; w < c->words; w++) {
        uint64_t alive = n != 0 ? holders_of(c, blocks[0])[w] : 0;
        for (uint32_t k = 1; alive != 0; k++) {
            uint64_t next = k < n ? alive & holders_of(c, blocks[k])[w] : 0;
            for (uint64_t gone = alive & ~next; gone != 0; gone &= gone - 1) {
                match[w * 64 + (uint32_t)__builtin_ctzll(gone)] = k;
            }
            alive = next;
        }
    }
}

/* ---- the table ---- */

static uint32_t home_of(const struct bt_sim_caches *c, uint32_t block)
{
    return (uint32_t)(block * 0x9e3779b97f4a7c15ull >> 32) & c->mask;
}

static uint32_t find(const struct bt_sim_caches *c, const struct bt_sim_node *d, uint32_t block)
{
    uint32_t i = home_of(c, block);
    while (d->table[i] == NONE || d->slots[d->table[i]].block != block) {
        BT_ASSERT(d->table[i] != NONE);
        i = (i + 1) & c->mask;
    }
    return i;
}

static void table_add(const struct bt_sim_caches *c, struct bt_sim_node *d, uint32_t slot)
{
    uint32_t i = home_of(c, d->slots[slot].block);
    while (d->table[i] != NONE) {
        i = (i + 1) & c->mask;
    }
    d->table[i] = slot;
}

/* Later entries move into the hole, unless that puts them before their home. */
static void table_remove(const struct bt_sim_caches *c, struct bt_sim_node *d, uint32_t block)
{
    uint32_t hole = find(c, d, block);
    for (uint32_t i = (hole + 1) & c->mask; d->table[i] != NONE; i = (i + 1) & c->mask) {
        uint32_t home = home_of(c, d->slots[d->table[i]].block);
        if (((i - home) & c->mask) >= ((i - hole) & c->mask)) {
            d->table[hole] = d->table[i];
            hole = i;
        }
    }
    d->table[hole] = NONE;
}

/* ---- what requests do ---- */

static uint32_t slot_of(const struct bt_sim_caches *c, const struct bt_sim_node *d, uint32_t block)
{
    return d->table[find(c, d, block)];
}

static void hold(const struct bt_sim_caches *c, struct bt_sim_node *d, uint32_t slot)
{
    if (d->slots[slot].held++ == 0) {
        c->policy->pin(d->evict, slot);
    }
}

void bt_sim_caches_release(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n)
{
    struct bt_sim_node *d = &c->nodes[node];
    while (n-- > 0) {
        uint32_t s = slot_of(c, d, blocks[n]);
        BT_ASSERT(d->slots[s].held > 0);
        if (--d->slots[s].held == 0) {
            c->policy->unpin(d->evict, s);
        }
    }
}

/* Offers a block of the slab to the SSD. */
static void offer(struct bt_sim_caches *c, uint32_t node, uint32_t block, uint32_t depth,
                  bt_sim_disk_event_t event, double now_ms)
{
    struct bt_sim_node *d = &c->nodes[node];
    uint32_t old;
    if (c->disk.blocks != 0 && bt_sim_disk_offer(d->disk, block, depth, event, now_ms, &old) &&
        old != BT_SIM_DISK_NONE) {
        mark(c, node, old, in_slab(c, node, old));
    }
}

/* NONE: requests hold all slots. */
static uint32_t take_slot(struct bt_sim_caches *c, uint32_t node, double now_ms)
{
    struct bt_sim_node *d = &c->nodes[node];
    if (d->used < c->cap) {
        c->replicas++;
        return d->used++;
    }
    uint32_t s = c->policy->victim(d->evict, NULL);
    if (s != BT_EVICT_NONE) {
        uint32_t old = d->slots[s].block;
        offer(c, node, old, d->slots[s].depth, BT_SIM_DISK_GIVEN_UP, now_ms);
        c->policy->drop(d->evict, s);
        table_remove(c, d, old);
        mark(c, node, old, false);
    }
    return s;
}

static void first_use(struct bt_sim_caches *c, struct bt_sim_node *d)
{
    if (d->slots == NULL) {
        d->slots = bt_malloc(c->cap * sizeof(*d->slots));
        d->table = bt_malloc(((size_t)c->mask + 1) * sizeof(*d->table));
        memset(d->table, 0xff, ((size_t)c->mask + 1) * sizeof(*d->table));
        d->evict = c->policy->create(c->cap);
    }
    if (c->disk.blocks != 0 && d->disk == NULL) { /* as much memory as in kvstore/cache/tier.c */
        d->disk = bt_sim_disk_create(&c->disk, 8 * c->cap);
    }
}

/* Puts block k of a chain into the slab and holds it. Returns its slot; NONE if there is no
 * room. */
static uint32_t admit(struct bt_sim_caches *c, uint32_t node, uint32_t block, uint32_t k,
                      uint32_t parent, uint32_t reused, bool copy, double now_ms)
{
    struct bt_sim_node *d = &c->nodes[node];
    uint32_t s = take_slot(c, node, now_ms);
    if (s == BT_EVICT_NONE) {
        return s;
    }
    struct bt_evict_block b = {.hash = block * 0x9e3779b97f4a7c15ull >> 16,
                               .depth = k,
                               .start_tokens = k * BT_SIM_BLOCK_TOKENS,
                               .parent = parent,
                               .reused_tokens = reused * BT_SIM_BLOCK_TOKENS,
                               .origin = copy ? BT_EVICT_COPY : BT_EVICT_COMPUTED};
    d->slots[s] = (struct slot){.block = block, .held = 1, .depth = k};
    table_add(c, d, s);
    mark(c, node, block, true);
    c->policy->admit(d->evict, s, &b);
    return s;
}

uint32_t bt_sim_caches_use(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                           uint32_t n, double now_ms, uint32_t *ssd_p)
{
    struct bt_sim_node *d = &c->nodes[node];
    uint32_t k = 0, parent = BT_EVICT_NONE;
    *ssd_p = 0;
    for (; k < n && bt_sim_caches_has(c, node, blocks[k]); k++) {
        uint32_t s;
        if (in_slab(c, node, blocks[k])) {
            s = slot_of(c, d, blocks[k]);
            hold(c, d, s);
            c->policy->hit(d->evict, s, parent);
            offer(c, node, blocks[k], k, BT_SIM_DISK_HIT, now_ms);
        } else {
            first_use(c, d); /* a node that failed has only its SSD */
            bt_sim_disk_touch(d->disk, blocks[k]);
            s = admit(c, node, blocks[k], k, parent, 0, false, now_ms);
            if (s == BT_EVICT_NONE) {
                break;
            }
            ++*ssd_p;
        }
        parent = s;
    }
    return k;
}

double bt_sim_caches_read(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks,
                          uint32_t n, double now_ms)
{
    uint32_t there = 0;
    if (c->disk.blocks == 0 || c->nodes[node].disk == NULL) {
        return now_ms;
    }
    for (uint32_t k = 0; k < n && bt_sim_caches_has(c, node, blocks[k]); k++) {
        there += !in_slab(c, node, blocks[k]);
    }
    return bt_sim_disk_read(c->nodes[node].disk, there, now_ms);
}

void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const struct bt_sim_put *p,
                       double now_ms)
{
    struct bt_sim_node *d = &c->nodes[node];
    first_use(c, d);
    uint32_t k = p->held, parent = k > 0 ? slot_of(c, d, p->blocks[k - 1]) : BT_EVICT_NONE;
    for (; k < p->n; k++) {
        uint32_t block = p->blocks[k];
        if (in_slab(c, node, block)) { /* computed again: the old copy stays */
            parent = slot_of(c, d, block);
            hold(c, d, parent);
            continue;
        }
        bool copy = k >= p->copied && k < p->copied_end;
        uint32_t s = admit(c, node, block, k, parent, p->held, copy, now_ms);
        if (s == BT_EVICT_NONE) {
            break;
        }
        offer(c, node, block, k, BT_SIM_DISK_NEW, now_ms);
        parent = s;
    }
    bt_sim_caches_release(c, node, p->blocks, k);
}

void bt_sim_caches_clear(struct bt_sim_caches *c, uint32_t node)
{
    struct bt_sim_node *d = &c->nodes[node];
    for (uint32_t s = 0; s < d->used; s++) {
        mark(c, node, d->slots[s].block, false);
    }
    if (d->evict != NULL) {
        c->policy->destroy(d->evict);
        free(d->slots);
        free(d->table);
    }
    c->replicas -= d->used;
    *d = (struct bt_sim_node){.disk = d->disk};
}

uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c)
{
    return c->replicas;
}

double bt_sim_caches_written(const struct bt_sim_caches *c)
{
    double bytes = 0;
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        bytes += c->nodes[i].disk != NULL ? bt_sim_disk_written(c->nodes[i].disk) : 0;
    }
    return bytes;
}
