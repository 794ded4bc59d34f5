/* Eviction by hit density: the victim is the block whose slot gives the fewest hits for the time
 * that it is kept.
 *
 * A block's class is the number of its uses. Before the second use, the class is the block's
 * origin: the start of a chain, behind a long known prefix, generated, or copied from another node.
 * The class and the age give a level (learn.h). There is a list of slots for each level, and the
 * victim is in the lowest list that is not empty. Levels change with age, so each event takes the
 * next few slots in turn and moves them to their present lists. Blocks with a successor in the
 * cache are in a separate list above all levels. So a chain is evicted from its end; its head is
 * evicted first only while all blocks behind it are in use. O(1) an event. Pure, one owner
 * thread. */
#include <math.h>
#include <stdlib.h>

#include "common/policy/evict/evict.h"
#include "common/policy/evict/learn.h"

#define HAND     8u /* slots that one event moves to their present lists */
#define LISTS    (BT_LEARN_LEVELS + 1)
#define INNER    BT_LEARN_LEVELS /* the list of blocks with successors */
#define NOWHERE  UINT16_MAX
#define WORDS    BT_DIV_UP(LISTS, 64u)
#define GHOSTS   (1u << 16) /* least number of evicted blocks that are remembered */
#define KIDS_MAX 0xffffffu
#define USES     4u /* the count does not rise above this */

/* Fetching a copy again costs an eighth of computing it: 3 octaves. */
#define COPY_LEVELS (3 * BT_LEARN_OCTAVE)

/* A token with more tokens before it costs more to compute: twice as much at 26,000 tokens for an
 * 8B model on one H200. Only a twentieth of that is counted. On the first halves of the traces,
 * counting all of it saved 1 % more time and cost 5 % of the hits in small caches. */
#define DEAR_TOKENS 500000.0
#define DEAR_MAX    63

enum {
    CLASS_PARTIAL, /* not full: only an equal prompt can use it again */
    CLASS_FIRST,   /* of a request with no cached prefix; the next ones by the length of the cached
                      prefix */
    CLASS_SHORT,
    CLASS_MIDDLE,
    CLASS_LONG,
    CLASS_GENERATED,
    CLASS_COPY,
    CLASS_USED, /* used twice; then three times, four times or more */
};
/* About a system prompt, and about a long document or a conversation of many turns. */
#define SHORT_TOKENS 1024u
#define LONG_TOKENS  8192u

struct node {
    uint32_t prev, next; /* in its list; slot numbers */
    uint32_t parent;     /* NONE or the slot before it in the chain ... */
    uint32_t kids : 24, group : 8;
    uint32_t hash, tick;  /* tick: of the last use */
    uint16_t life;        /* number of blocks that this slot has held */
    uint16_t parent_life; /* the parent is valid only if that slot's `life` is still equal */
    uint16_t list;
    uint8_t cls : 4, uses : 3, cached : 1;
    uint8_t copy : 1, pinned : 1, dear : 6; /* dear: in levels */
};

struct order {              /* of a group's slots that are not in use */
    uint64_t filled[WORDS]; /* lists that are not empty */
    struct {
        uint32_t head, tail;
    } lists[LISTS];
};

struct bt_evict {
    struct node *nodes;
    struct bt_learn *learn;
    uint32_t *ghosts; /* hash:29 | uses:3 of evicted blocks, by hash; 0: none */
    uint32_t n, ghost_mask, tick, hand, evictable;
    uint32_t n_groups;                     /* groups from this number on never had a slot */
    struct order *orders[BT_EVICT_GROUPS]; /* NULL: the group never had a slot */
};

static struct bt_evict *density_create(uint32_t n_slots)
{
    struct bt_evict *e = bt_calloc(1, sizeof(*e));
    e->n = n_slots;
    e->nodes = bt_calloc(n_slots, sizeof(*e->nodes));
    for (uint32_t i = 0; i < n_slots; i++) {
        e->nodes[i].list = NOWHERE;
    }
    e->learn = bt_learn_create(n_slots);
    for (e->ghost_mask = GHOSTS - 1; e->ghost_mask < n_slots - 1;) {
        e->ghost_mask = 2 * e->ghost_mask + 1;
    }
    e->ghosts = bt_calloc((size_t)e->ghost_mask + 1, sizeof(*e->ghosts));
    return e;
}

static void density_destroy(struct bt_evict *e)
{
    if (e != NULL) {
        for (uint32_t g = 0; g < e->n_groups; g++) {
            free(e->orders[g]);
        }
        bt_learn_destroy(e->learn);
        free(e->nodes);
        free(e->ghosts);
        free(e);
    }
}

static struct node *cached(struct bt_evict *e, uint32_t slot)
{
    BT_ASSERT(slot < e->n && e->nodes[slot].cached);
    return &e->nodes[slot];
}

/* ---- lists ---- */

static void make_order(struct bt_evict *e, uint8_t group)
{
    BT_ASSERT(group < BT_EVICT_GROUPS);
    if (e->orders[group] == NULL) {
        struct order *o = e->orders[group] = bt_calloc(1, sizeof(*o));
        for (uint32_t i = 0; i < LISTS; i++) {
            o->lists[i].head = o->lists[i].tail = BT_EVICT_NONE;
        }
        e->n_groups = BT_MAX(e->n_groups, group + 1u);
    }
}

static void unlink_node(struct bt_evict *e, uint32_t slot)
{
    struct node *x = &e->nodes[slot];
    struct order *o = e->orders[x->group];
    uint32_t l = x->list;
    *(x->prev != BT_EVICT_NONE ? &e->nodes[x->prev].next : &o->lists[l].head) = x->next;
    *(x->next != BT_EVICT_NONE ? &e->nodes[x->next].prev : &o->lists[l].tail) = x->prev;
    if (o->lists[l].head == BT_EVICT_NONE) {
        o->filled[l / 64] &= ~(1ull << (l % 64));
    }
    x->list = NOWHERE;
    e->evictable--;
}

static uint32_t list_of(const struct bt_evict *e, const struct node *x)
{
    if (x->kids > 0) {
        return INNER;
    }
    uint32_t level = bt_learn_level(e->learn, x->cls, e->tick - x->tick) + x->dear;
    uint32_t less = x->copy ? COPY_LEVELS : 0;
    return BT_MIN(level - BT_MIN(level, less), BT_LEARN_LEVELS - 1);
}

static void link_node(struct bt_evict *e, uint32_t slot)
{
    struct node *x = &e->nodes[slot];
    struct order *o = e->orders[x->group];
    uint32_t l = list_of(e, x);
    x->list = (uint16_t)l;
    x->prev = o->lists[l].tail;
    x->next = BT_EVICT_NONE;
    *(x->prev != BT_EVICT_NONE ? &e->nodes[x->prev].next : &o->lists[l].head) = slot;
    o->lists[l].tail = slot;
    o->filled[l / 64] |= 1ull << (l % 64);
    e->evictable++;
}

static void relink(struct bt_evict *e, uint32_t slot)
{
    struct node *x = &e->nodes[slot];
    if (x->list != NOWHERE && x->list != list_of(e, x)) {
        unlink_node(e, slot);
        link_node(e, slot);
    }
}

/* ---- chains ---- */

static struct node *parent_of(struct bt_evict *e, const struct node *x)
{
    if (x->parent == BT_EVICT_NONE) {
        return NULL;
    }
    struct node *p = &e->nodes[x->parent];
    return p->cached && p->life == x->parent_life ? p : NULL;
}

static void join(struct bt_evict *e, struct node *x, uint32_t parent)
{
    x->parent = parent;
    if (parent == BT_EVICT_NONE) {
        return;
    }
    struct node *p = cached(e, parent);
    if (p->kids == KIDS_MAX) {
        x->parent = BT_EVICT_NONE; /* it has enough successors: they keep it until the last one is
                                      evicted */
        return;
    }
    x->parent_life = p->life;
    if (p->kids++ == 0) {
        relink(e, parent);
    }
}

static void leave(struct bt_evict *e, struct node *x)
{
    struct node *p = parent_of(e, x);
    if (p != NULL && --p->kids == 0) {
        relink(e, x->parent);
    }
    x->parent = BT_EVICT_NONE;
}

/* ---- events ---- */

static uint32_t ghost_at(const struct bt_evict *e, uint32_t hash)
{
    return (uint32_t)(hash * 0x9e3779b97f4a7c15ull >> 29) & e->ghost_mask;
}

static uint32_t class_of(const struct bt_evict_block *b)
{
    switch (b->origin) {
    case BT_EVICT_PARTIAL: return CLASS_PARTIAL;
    case BT_EVICT_GENERATED: return CLASS_GENERATED;
    case BT_EVICT_COPY: return CLASS_COPY;
    case BT_EVICT_COMPUTED: break;
    }
    return b->reused_tokens == 0              ? CLASS_FIRST
           : b->reused_tokens <= SHORT_TOKENS ? CLASS_SHORT
           : b->reused_tokens < LONG_TOKENS   ? CLASS_MIDDLE
                                              : CLASS_LONG;
}

static uint8_t dear(uint32_t start_tokens)
{
    double levels = BT_LEARN_OCTAVE * log2(1 + start_tokens / DEAR_TOKENS);
    return (uint8_t)BT_MIN(levels, DEAR_MAX);
}

/* Makes x the youngest of class cls. */
static void renew(struct bt_evict *e, struct node *x, uint32_t cls)
{
    x->cls = (uint8_t)cls;
    x->tick = ++e->tick;
    for (uint32_t i = 0; i < HAND; i++) {
        e->hand = e->hand + 1 < e->n ? e->hand + 1 : 0;
        relink(e, e->hand);
    }
}

static void use(struct bt_evict *e, struct node *x, uint32_t cls)
{
    bt_learn_use(e->learn, x->hash, cls, e->tick + 1);
    renew(e, x, cls);
}

static uint32_t class_by_uses(const struct node *x)
{
    return CLASS_USED + x->uses - 2u;
}

static void density_admit(struct bt_evict *e, uint32_t slot, const struct bt_evict_block *b)
{
    BT_ASSERT(slot < e->n && !e->nodes[slot].cached);
    struct node *x = &e->nodes[slot];
    uint32_t hash = (uint32_t)b->hash, ghost = e->ghosts[ghost_at(e, hash)];
    uint32_t before = (ghost ^ hash) >> 3 == 0 ? ghost & 7 : 0;
    make_order(e, b->group);
    *x = (struct node){.life = (uint16_t)(x->life + 1),
                       .group = b->group,
                       .list = NOWHERE,
                       .hash = hash,
                       .uses = (uint8_t)BT_MIN(b->uses > 0 ? b->uses : before + 1, USES),
                       .copy = b->origin == BT_EVICT_COPY,
                       .dear = dear(b->start_tokens) & DEAR_MAX,
                       .cached = 1,
                       .pinned = 1};
    join(e, x, b->parent);
    bool first = x->uses == 1 || b->origin == BT_EVICT_PARTIAL;
    uint32_t cls = first ? class_of(b) : class_by_uses(x);
    if (b->uses > 0) { /* many adopted blocks come at once, and would distort the samples */
        renew(e, x, cls);
    } else {
        use(e, x, cls);
    }
}

static void density_hit(struct bt_evict *e, uint32_t slot, uint32_t parent)
{
    struct node *x = cached(e, slot);
    x->uses = (uint8_t)BT_MIN(x->uses + 1u, USES);
    if (parent != BT_EVICT_NONE && parent_of(e, x) == NULL) {
        join(e, x, parent); /* it was cached without the block before it, or before a restart */
    }
    use(e, x, x->cls == CLASS_PARTIAL ? (uint32_t)CLASS_PARTIAL : class_by_uses(x));
    relink(e, slot);
}

static void density_pin(struct bt_evict *e, uint32_t slot)
{
    struct node *x = cached(e, slot);
    if (!x->pinned) {
        unlink_node(e, slot);
        x->pinned = 1;
    }
}

static void density_unpin(struct bt_evict *e, uint32_t slot)
{
    struct node *x = cached(e, slot);
    if (x->pinned) {
        x->pinned = 0;
        link_node(e, slot);
    }
}

static void density_drop(struct bt_evict *e, uint32_t slot)
{
    struct node *x = cached(e, slot);
    density_pin(e, slot);
    leave(e, x);
    x->cached = 0;
    e->ghosts[ghost_at(e, x->hash)] = (x->hash & ~7u) | x->uses;
}

/* The lowest list of a group that is not empty; LISTS: all are empty. */
static uint32_t lowest(const struct order *o)
{
    for (uint32_t w = 0; o != NULL && w < WORDS; w++) {
        if (o->filled[w] != 0) {
            return w * 64 + (uint32_t)__builtin_ctzll(o->filled[w]);
        }
    }
    return LISTS;
}

static uint32_t density_victim_of(const struct bt_evict *e, uint8_t group)
{
    uint32_t l = lowest(e->orders[group]);
    return l < LISTS ? e->orders[group]->lists[l].head : BT_EVICT_NONE;
}

static uint32_t density_victim(const struct bt_evict *e, const struct bt_evict_groups *of)
{
    uint32_t best = LISTS, group = 0;
    for (uint32_t g = 0; g < e->n_groups; g++) {
        uint32_t l = of == NULL || bt_evict_groups_has(of, g) ? lowest(e->orders[g]) : LISTS;
        if (l < best) {
            best = l;
            group = g;
        }
    }
    return best < LISTS ? e->orders[group]->lists[best].head : BT_EVICT_NONE;
}

static uint32_t density_evictable(const struct bt_evict *e)
{
    return e->evictable;
}

const struct bt_evict_policy bt_evict_density = {
    .name = "density",
    .create = density_create,
    .destroy = density_destroy,
    .admit = density_admit,
    .hit = density_hit,
    .pin = density_pin,
    .unpin = density_unpin,
    .drop = density_drop,
    .victim = density_victim,
    .victim_of = density_victim_of,
    .evictable = density_evictable,
};
