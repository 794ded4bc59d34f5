/* Per node: slots in a list by age and a hash table from block to slot; over all nodes: a bitmap of
 * holders per block. */
#include "conductor/sim/cache.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

struct slot {
    uint32_t block, older, younger;
};

struct node {
    struct slot *slots; /* [cap]; made on first use */
    uint32_t *table;    /* [mask + 1] of slot numbers, open addressing */
    uint32_t used, oldest, youngest;
};

struct bt_sim_caches {
    uint32_t n_nodes, cap, mask, words, n_unique;
    struct node *nodes;
    uint64_t *holders; /* [n_unique][words] */
    uint64_t replicas;
};

struct bt_sim_caches *bt_sim_caches_create(uint32_t n_nodes, uint32_t capacity, uint32_t n_unique)
{
    struct bt_sim_caches *c = bt_calloc(1, sizeof(*c));
    c->n_nodes = n_nodes;
    c->n_unique = BT_MAX(n_unique, 1u);
    c->cap = capacity == 0 ? c->n_unique : BT_MIN(capacity, c->n_unique);
    for (c->mask = 15; c->mask < 2 * c->cap; c->mask = 2 * c->mask + 1) {
    }
    c->words = BT_DIV_UP(n_nodes, 64u);
    c->nodes = bt_calloc(n_nodes, sizeof(*c->nodes));
    c->holders = bt_calloc((size_t)c->n_unique * c->words, sizeof(*c->holders));
    return c;
}

void bt_sim_caches_destroy(struct bt_sim_caches *c)
{
    if (c == NULL) {
        return;
    }
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        free(c->nodes[i].slots);
        free(c->nodes[i].table);
    }
    free(c->nodes);
    free(c->holders);
    free(c);
}

static uint64_t *holders_of(const struct bt_sim_caches *c, uint32_t block)
{
    return &c->holders[(size_t)block * c->words];
}

bool bt_sim_caches_has(const struct bt_sim_caches *c, uint32_t node, uint32_t block)
{
    return holders_of(c, block)[node / 64] >> (node % 64) & 1;
}

uint32_t bt_sim_caches_match_one(const struct bt_sim_caches *c, uint32_t node,
                                 const uint32_t *blocks, uint32_t n)
{
    uint32_t k = 0;
    while (k < n && bt_sim_caches_has(c, node, blocks[k])) {
        k++;
    }
    return k;
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

static uint32_t find(const struct bt_sim_caches *c, const struct node *d, uint32_t block)
{
    uint32_t i = home_of(c, block);
    while (d->table[i] == NONE || d->slots[d->table[i]].block != block) {
        BT_ASSERT(d->table[i] != NONE);
        i = (i + 1) & c->mask;
    }
    return i;
}

static void table_add(const struct bt_sim_caches *c, struct node *d, uint32_t slot)
{
    uint32_t i = home_of(c, d->slots[slot].block);
    while (d->table[i] != NONE) {
        i = (i + 1) & c->mask;
    }
    d->table[i] = slot;
}

/* Entries behind the hole move up unless that would put them before their home. */
static void table_remove(const struct bt_sim_caches *c, struct node *d, uint32_t block)
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

/* ---- the list ---- */

static void unlink_slot(struct node *d, uint32_t s)
{
    struct slot *x = &d->slots[s];
    *(x->older != NONE ? &d->slots[x->older].younger : &d->oldest) = x->younger;
    *(x->younger != NONE ? &d->slots[x->younger].older : &d->youngest) = x->older;
}

static void link_youngest(struct node *d, uint32_t s)
{
    d->slots[s].older = d->youngest;
    d->slots[s].younger = NONE;
    *(d->youngest != NONE ? &d->slots[d->youngest].younger : &d->oldest) = s;
    d->youngest = s;
}

static void touch(struct bt_sim_caches *c, uint32_t node, uint32_t block)
{
    struct node *d = &c->nodes[node];
    uint64_t bit = 1ull << (node % 64);
    uint32_t s;
    if (holders_of(c, block)[node / 64] & bit) {
        s = d->table[find(c, d, block)];
        unlink_slot(d, s);
        link_youngest(d, s);
        return;
    }
    if (d->used < c->cap) {
        s = d->used++;
        c->replicas++;
    } else {
        s = d->oldest;
        uint32_t old = d->slots[s].block;
        unlink_slot(d, s);
        table_remove(c, d, old);
        holders_of(c, old)[node / 64] &= ~bit;
    }
    d->slots[s].block = block;
    table_add(c, d, s);
    link_youngest(d, s);
    holders_of(c, block)[node / 64] |= bit;
}

void bt_sim_caches_put(struct bt_sim_caches *c, uint32_t node, const uint32_t *blocks, uint32_t n)
{
    struct node *d = &c->nodes[node];
    if (d->slots == NULL) {
        d->slots = bt_malloc(c->cap * sizeof(*d->slots));
        d->table = bt_malloc(((size_t)c->mask + 1) * sizeof(*d->table));
        memset(d->table, 0xff, ((size_t)c->mask + 1) * sizeof(*d->table));
        d->oldest = d->youngest = NONE;
    }
    for (uint32_t k = BT_MIN(n, c->cap); k-- > 0;) {
        touch(c, node, blocks[k]);
    }
}

uint64_t bt_sim_caches_replicas(const struct bt_sim_caches *c)
{
    return c->replicas;
}
