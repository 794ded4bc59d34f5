/* The extent index: an open hash table of 24-byte entries with linear probing. Deletion shifts
 * entries back, so the table never has to be rebuilt. A kvstore has an inner id. When all its
 * extents are forgotten, the inner id dies at once. A sweep then removes it from the entries, and
 * only after that the id is used again. See holders.h. */
#include "conductor/view/holders.h"

#include <stdlib.h>
#include <string.h>

#define INNER        4096u /* inner ids: live ones, and dead ones that are not swept yet */
#define INLINE       4
#define MANY         255 /* entry.n: a bitmap has the holders */
#define NONE         UINT16_MAX
#define WORDS        (INNER / 64)
#define SWEEP_FORGET ((size_t)1 << 18) /* places in one call: about a millisecond */
#define SWEEP_ADD    16
#define AHEAD        8 /* how many entries ahead memory is fetched */

struct entry {
    uint64_t key;
    uint32_t depth : 24;
    uint32_t n : 8; /* 0: empty */
    uint16_t ids[INLINE];
    uint32_t bitmap; /* the number of its bitmap, if n is MANY */
};
_Static_assert(sizeof(struct entry) == 24, "what holders.h says of memory");

struct bitmap {
    uint64_t w[WORDS];
    uint32_t n, next_free;
};

typedef enum { ID_FREE = 0, ID_LIVE, ID_DEAD, ID_SWEPT } id_state_t;

struct bt_holders {
    struct entry *e;
    size_t places, keys, keys_max;
    struct bitmap *maps;
    uint32_t n_maps, maps_cap, free_map; /* free_map: UINT32_MAX none */
    uint64_t replicas;
    uint16_t inner_of[BT_HOLDERS_KVSTORES_MAX]; /* NONE: it has no extents */
    uint16_t outer_of[INNER];
    uint16_t unswept[BT_HOLDERS_KVSTORES_MAX]; /* how many of its inner ids are not swept yet */
    uint64_t held[INNER];
    uint8_t state[INNER]; /* id_state_t */
    uint64_t live[WORDS]; /* inner ids in ID_LIVE */
    uint32_t words;       /* inner ids in use are below 64 times this */
    uint32_t n_live, n_dead, n_swept;
    size_t cursor; /* of the sweep */
};

struct bt_holders *bt_holders_create(size_t keys_max)
{
    struct bt_holders *x = bt_calloc(1, sizeof(*x));
    x->keys_max = keys_max;
    x->places = keys_max + keys_max / 3 + 16; /* three quarters full at most */
    x->e = bt_calloc(x->places, sizeof(*x->e));
    x->free_map = UINT32_MAX;
    memset(x->inner_of, 0xff, sizeof(x->inner_of));
    return x;
}

void bt_holders_destroy(struct bt_holders *x)
{
    if (x != NULL) {
        free(x->e);
        free(x->maps);
        free(x);
    }
}

/* ---- places ---- */

static uint64_t word_of(const struct bt_kv_key *key)
{
    uint64_t w;
    memcpy(&w, key->b, sizeof(w));
    return w;
}

static size_t home_of(const struct bt_holders *x, uint64_t key)
{
    uint64_t h = (key ^ key >> 32) * 0x9e3779b97f4a7c15ull;
    return (size_t)((unsigned __int128)h * x->places >> 64);
}

static size_t after(const struct bt_holders *x, size_t i)
{
    return i + 1 == x->places ? 0 : i + 1;
}

/* Returns the key's entry, or the empty place where the key would go. */
static struct entry *find(const struct bt_holders *x, uint64_t key)
{
    size_t i = home_of(x, key);
    while (x->e[i].n != 0 && x->e[i].key != key) {
        i = after(x, i);
    }
    return &x->e[i];
}

/* Empties place i and moves back entries that a probe would no longer find. If an entry that is not
 * swept yet moves to a place that the sweep has passed, the sweep goes back to that place. */
static void erase(struct bt_holders *x, size_t i)
{
    x->keys--;
    for (size_t k = after(x, i); x->e[k].n != 0; k = after(x, k)) {
        size_t home = home_of(x, x->e[k].key);
        bool stays = i <= k ? (i < home && home <= k) : (i < home || home <= k);
        if (stays) {
            continue;
        }
        x->e[i] = x->e[k];
        if (k >= x->cursor && i < x->cursor) {
            x->cursor = i;
        }
        i = k;
    }
    x->e[i].n = 0;
}

/* ---- holders of an entry ---- */

static uint32_t take_map(struct bt_holders *x)
{
    uint32_t m = x->free_map;
    if (m != UINT32_MAX) {
        x->free_map = x->maps[m].next_free;
    } else {
        if (x->n_maps == x->maps_cap) {
            x->maps_cap = x->maps_cap != 0 ? 2 * x->maps_cap : 64;
            x->maps = bt_realloc(x->maps, x->maps_cap * sizeof(*x->maps));
        }
        m = x->n_maps++;
    }
    memset(&x->maps[m], 0, sizeof(x->maps[m]));
    return m;
}

static bool has(const struct bt_holders *x, const struct entry *e, uint16_t id)
{
    if (e->n == MANY) {
        return (x->maps[e->bitmap].w[id / 64] >> (id % 64) & 1) != 0;
    }
    for (uint32_t i = 0; i < e->n; i++) {
        if (e->ids[i] == id) {
            return true;
        }
    }
    return false;
}

static void put(struct bt_holders *x, struct entry *e, uint16_t id)
{
    if (e->n < INLINE) {
        e->ids[e->n++] = id;
        return;
    }
    if (e->n != MANY) {
        e->bitmap = take_map(x);
        for (uint32_t i = 0; i < INLINE; i++) {
            x->maps[e->bitmap].w[e->ids[i] / 64] |= (uint64_t)1 << (e->ids[i] % 64);
        }
        x->maps[e->bitmap].n = INLINE;
        e->n = MANY;
    }
    x->maps[e->bitmap].w[id / 64] |= (uint64_t)1 << (id % 64);
    x->maps[e->bitmap].n++;
}

/* Writes the bitmap's holders to ids, at most cap. */
static uint32_t list_map(const struct bitmap *m, uint16_t *ids, uint32_t cap)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < WORDS; w++) {
        for (uint64_t left = m->w[w]; left != 0 && n < cap; left &= left - 1) {
            ids[n++] = (uint16_t)(w * 64 + (uint32_t)__builtin_ctzll(left));
        }
    }
    return n;
}

/* Removes id from e, which must have it. */
static void drop(struct bt_holders *x, struct entry *e, uint16_t id)
{
    if (e->n != MANY) {
        uint32_t i = 0;
        while (e->ids[i] != id) {
            i++;
        }
        e->ids[i] = e->ids[--e->n];
        return;
    }
    struct bitmap *m = &x->maps[e->bitmap];
    m->w[id / 64] &= ~((uint64_t)1 << (id % 64));
    if (--m->n <= INLINE / 2) { /* only at half, so that it does not change back and forth */
        e->n = list_map(m, e->ids, INLINE);
        m->next_free = x->free_map;
        x->free_map = e->bitmap;
    }
}

/* ---- inner ids, and the sweep ---- */

/* Removes dead ids from the entry at place i. True: the entry was empty and is erased, so place i
 * may have another entry now. */
static bool clean(struct bt_holders *x, size_t i)
{
    struct entry *e = &x->e[i];
    uint16_t ids[INNER];
    uint32_t n = e->n;
    if (n == MANY) {
        n = list_map(&x->maps[e->bitmap], ids, INNER);
    } else {
        memcpy(ids, e->ids, sizeof(e->ids));
    }
    for (uint32_t k = 0; k < n; k++) {
        if (x->state[ids[k]] != ID_LIVE) {
            drop(x, e, ids[k]);
        }
    }
    if (n != 0 && e->n == 0) {
        erase(x, i);
        return true;
    }
    return false;
}

static void end_of_pass(struct bt_holders *x)
{
    x->cursor = 0;
    x->n_swept = x->n_dead;
    x->n_dead = 0;
    for (uint32_t id = 0; id < INNER; id++) {
        if (x->state[id] == ID_SWEPT) {
            x->state[id] = ID_FREE;
            x->unswept[x->outer_of[id]]--;
        } else if (x->state[id] == ID_DEAD) { /* dead since the pass began: needs one whole pass */
            x->state[id] = ID_SWEPT;
        }
    }
}

void bt_holders_sweep(struct bt_holders *x, size_t places)
{
    for (; places > 0 && x->n_swept + x->n_dead != 0; places--) {
        if (x->cursor == x->places) {
            end_of_pass(x);
            continue;
        }
        if (x->e[x->cursor].n == 0 || !clean(x, x->cursor)) {
            x->cursor++;
        }
    }
}

void bt_holders_forget(struct bt_holders *x, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    uint16_t in = x->inner_of[id];
    if (in == NONE) {
        return;
    }
    x->inner_of[id] = NONE;
    x->replicas -= x->held[in];
    x->held[in] = 0;
    x->live[in / 64] &= ~((uint64_t)1 << (in % 64));
    x->n_live--;
    x->unswept[id]++;
    bool first = x->n_swept + x->n_dead == 0;
    x->state[in] = first ? ID_SWEPT : ID_DEAD;
    x->n_swept += first;
    x->n_dead += !first;
    if (first) {
        x->cursor = 0;
    }
    bt_holders_sweep(x, SWEEP_FORGET);
}

uint32_t bt_holders_unswept(const struct bt_holders *x, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    return x->unswept[id];
}

static uint16_t inner(struct bt_holders *x, uint32_t id)
{
    if (x->inner_of[id] != NONE) {
        return x->inner_of[id];
    }
    for (;;) {
        for (uint32_t in = 0; in < INNER; in++) {
            if (x->state[in] == ID_FREE) {
                x->state[in] = ID_LIVE;
                x->outer_of[in] = (uint16_t)id;
                x->inner_of[id] = (uint16_t)in;
                x->live[in / 64] |= (uint64_t)1 << (in % 64);
                x->n_live++;
                x->words = BT_MAX(x->words, in / 64 + 1);
                return (uint16_t)in;
            }
        }
        bt_holders_sweep(x, x->places + 1); /* thousands were forgotten faster than the sweep ran */
    }
}

/* ---- operations of the view ---- */

/* Returns whether the kvstore may add a key. The last quarter is for kvstores that have less than
 * an equal share, so that a kvstore that announces too much does not keep out the others'
 * extents. */
static bool has_room(const struct bt_holders *x, uint16_t in)
{
    size_t last = x->keys_max / 4;
    return x->keys < x->keys_max - last ||
           (x->keys < x->keys_max && x->held[in] < x->keys_max / x->n_live);
}

bool bt_holders_add(struct bt_holders *x, const struct bt_kv_key *key, uint32_t depth, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    bt_holders_sweep(x, SWEEP_ADD);
    uint16_t in = inner(x, id);
    uint64_t w = word_of(key);
    struct entry *e = find(x, w);
    if (e->n == 0) {
        if (!has_room(x, in)) {
            return false;
        }
        e->key = w;
        e->depth = BT_MIN(depth, (1u << 24) - 1);
        x->keys++;
    } else if (has(x, e, in)) {
        return true;
    }
    put(x, e, in);
    x->held[in]++;
    x->replicas++;
    return true;
}

void bt_holders_remove(struct bt_holders *x, const struct bt_kv_key *key, uint32_t id)
{
    BT_ASSERT(id < BT_HOLDERS_KVSTORES_MAX);
    uint16_t in = x->inner_of[id];
    struct entry *e = find(x, word_of(key));
    if (in == NONE || e->n == 0 || !has(x, e, in)) {
        return;
    }
    drop(x, e, in);
    x->held[in]--;
    x->replicas--;
    if (e->n == 0) {
        erase(x, (size_t)(e - x->e));
    }
}

/* Keeps the candidates that e has. For the others the match ends at n. False: no candidate is
 * left. */
static bool narrow(const struct bt_holders *x, const struct entry *e, uint64_t *cand, uint32_t n,
                   uint32_t *match, uint32_t n_ids)
{
    uint64_t few[WORDS], any = 0;
    const uint64_t *has_it = few;
    if (e->n == MANY) {
        has_it = x->maps[e->bitmap].w;
    } else {
        memset(few, 0, x->words * sizeof(few[0]));
        for (uint32_t i = 0; i < e->n; i++) {
            few[e->ids[i] / 64] |= (uint64_t)1 << (e->ids[i] % 64);
        }
    }
    for (uint32_t w = 0; w < x->words; w++) {
        uint64_t out = cand[w] & ~has_it[w];
        cand[w] &= has_it[w];
        any |= cand[w];
        for (; out != 0; out &= out - 1) {
            uint32_t id = x->outer_of[w * 64 + (uint32_t)__builtin_ctzll(out)];
            if (id < n_ids) {
                match[id] = n;
            }
        }
    }
    return any != 0;
}

void bt_holders_match(const struct bt_holders *x, const struct bt_kv_key *keys, uint32_t n,
                      uint32_t stride, uint32_t *match, uint32_t n_ids)
{
    static const struct entry empty;
    uint64_t cand[WORDS];
    memcpy(cand, x->live, x->words * sizeof(cand[0]));
    memset(match, 0, n_ids * sizeof(*match));
    for (uint32_t i = 0; i < BT_MIN(n, (uint32_t)AHEAD); i++) {
        __builtin_prefetch(&x->e[home_of(x, word_of(&keys[(size_t)i * stride]))]);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) {
            size_t far = (size_t)(i + AHEAD) * stride;
            __builtin_prefetch(&x->e[home_of(x, word_of(&keys[far]))]);
        }
        const struct entry *e = find(x, word_of(&keys[(size_t)i * stride]));
        if (!narrow(x, e, cand, i, match, n_ids)) {
            return;
        }
    }
    (void)narrow(x, &empty, cand, n, match, n_ids);
}

/* Writes up to cap holders of e that are not forgotten to ids. Returns how many there are. */
static uint32_t live_of(const struct bt_holders *x, const struct entry *e, uint32_t *ids,
                        uint32_t cap)
{
    uint16_t in[INNER];
    uint32_t n = e->n == MANY ? list_map(&x->maps[e->bitmap], in, INNER) : e->n, live = 0;
    if (e->n != MANY) {
        memcpy(in, e->ids, sizeof(e->ids));
    }
    for (uint32_t i = 0; i < n; i++) {
        if (x->state[in[i]] == ID_LIVE) {
            if (live < cap) {
                ids[live] = x->outer_of[in[i]];
            }
            live++;
        }
    }
    return live;
}

uint32_t bt_holders_of(const struct bt_holders *x, const struct bt_kv_key *key, uint32_t *ids,
                       uint32_t cap)
{
    return live_of(x, find(x, word_of(key)), ids, cap);
}

size_t bt_holders_keys(const struct bt_holders *x)
{
    return x->keys;
}

uint64_t bt_holders_replicas(const struct bt_holders *x)
{
    return x->replicas;
}

bool bt_holders_next(const struct bt_holders *x, size_t *it, size_t end, uint8_t key8[8],
                     uint32_t *depth_p, uint32_t *ids, uint32_t cap, uint32_t *n_p)
{
    for (; *it < BT_MIN(end, x->places); ++*it) {
        const struct entry *e = &x->e[*it];
        uint32_t live = live_of(x, e, ids, cap);
        if (live != 0) {
            memcpy(key8, &e->key, 8);
            *depth_p = e->depth;
            *n_p = live;
            ++*it;
            return true;
        }
    }
    return false;
}
