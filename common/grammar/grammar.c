/* Compiles a spec by its front end, and keeps compiled grammars by their text. */
#include "common/grammar/grammar.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/base/sha256.h"
#include "common/grammar/front_end.h"
#include "common/grammar/grammar_priv.h"

#define IN_USE_MAX   4        /* grammars in use may have this many times the memory of a cache */
#define COMPILE_WORK 4000000u /* work of one compilation; about 100 ms for the slowest specs */

static bt_status_t build(struct bt_program *p, const struct bt_grammar_spec *spec, bt_node_t *start,
                         char *err, size_t err_cap)
{
    static const char object[] = "{\"type\":\"object\"}";
    switch (spec->kind) {
    case BT_GRAMMAR_JSON_SCHEMA:
        return bt_grammar_build_schema(p, spec->text, spec->len, start, err, err_cap);
    case BT_GRAMMAR_JSON_OBJECT:
        return bt_grammar_build_schema(p, object, sizeof(object) - 1, start, err, err_cap);
    case BT_GRAMMAR_REGEX:
        return bt_grammar_build_regex(p, spec->text, spec->len, start, err, err_cap);
    case BT_GRAMMAR_CHOICE:
        return bt_grammar_build_choice(p, spec->text, spec->len, start, err, err_cap);
    case BT_GRAMMAR_GBNF:
        return bt_grammar_build_gbnf(p, spec->text, spec->len, start, err, err_cap);
    case BT_GRAMMAR_TAGS:
        return bt_grammar_build_tags(p, spec->text, spec->len, start, err, err_cap);
    case BT_GRAMMAR_ANY: break;
    }
    snprintf(err, err_cap, "grammar kind %d is not known", (int)spec->kind);
    return BT_ERR_INVALID;
}

bt_status_t bt_grammar_compile(const struct bt_grammar_spec *spec, struct bt_grammar **g_p,
                               char *err, size_t err_cap)
{
    if (spec->len > BT_GRAMMAR_TEXT_MAX) {
        snprintf(err, err_cap, "the text has %zu bytes, but at most %d are allowed: shorten it",
                 spec->len, BT_GRAMMAR_TEXT_MAX);
        return BT_ERR_EXHAUSTED;
    }
    struct bt_program *p = bt_program_create(BT_GRAMMAR_BYTES_MAX);
    bt_rx_set_budget(bt_program_rx(p), COMPILE_WORK);
    bt_node_t start = BT_NODE_NONE;
    bt_status_t st = build(p, spec, &start, err, err_cap);
    if (st != BT_OK) {
        bt_program_destroy(p);
        return st;
    }
    return bt_grammar_take(p, start, g_p, err, err_cap);
}

static void account_unref(struct bt_grammar_account *a)
{
    if (a && __atomic_sub_fetch(&a->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(a);
    }
}

/* The caller holds the lock of g, or no other thread has g yet. */
static void set_bytes(struct bt_grammar *g, size_t bytes)
{
    if (g->account) {
        __atomic_add_fetch(&g->account->bytes, bytes - g->bytes, __ATOMIC_RELAXED);
    }
    g->bytes = bytes;
}

static size_t bytes_of(const struct bt_grammar *g)
{
    return sizeof(*g) + bt_rx_set_bytes(g->program->rx) + g->program->bytes + g->automaton.bytes +
           g->masks.bytes;
}

/* Checks that each array with a minimum can have so many different items. The analysis of the
 * program has assumed this. */
static bt_status_t check_distinct(struct bt_automaton *m, char *err, size_t err_cap)
{
    const struct bt_program *p = m->p;
    for (uint32_t i = 0; p->has_distinct && i < p->n_nodes; i++) {
        const struct bt_node *n = &p->nodes[i];
        if (n->kind != BT_NODE_K_DISTINCT || n->b < 2 || !(n->flags & BT_NODE_F_PRODUCTIVE) ||
            bt_distinct_exists(m, i)) {
            continue;
        }
        snprintf(err, err_cap,
                 m->full ? "%s: the search for %u different items takes too long; lower minItems"
                         : "%s: there are not %u different items; lower minItems",
                 p->names[n->c], n->b);
        return m->full ? BT_ERR_EXHAUSTED : BT_ERR_UNSUPPORTED;
    }
    return BT_OK;
}

bt_status_t bt_grammar_take(struct bt_program *p, bt_node_t start, struct bt_grammar **g_p,
                            char *err, size_t err_cap)
{
    bt_status_t st = bt_program_finish(p, start, err, err_cap);
    if (st != BT_OK) {
        bt_program_destroy(p);
        return st;
    }
    struct bt_grammar *g = bt_calloc(1, sizeof(*g));
    g->refs = 1;
    g->generation = 1;
    g->program = p;
    g->masks.max_bytes = BT_GRAMMAR_BYTES_MAX / 8;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->idle, NULL);
    bool ok = bt_automaton_init(&g->automaton, p, BT_GRAMMAR_BYTES_MAX / 8);
    BT_ASSERT(ok);
    st = check_distinct(&g->automaton, err, err_cap);
    if (st != BT_OK) {
        bt_grammar_unref(g);
        return st;
    }
    g->bytes = bytes_of(g);
    *g_p = g;
    return BT_OK;
}

struct bt_grammar *bt_grammar_ref(struct bt_grammar *g)
{
    __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED);
    return g;
}

void bt_grammar_unref(struct bt_grammar *g)
{
    if (!g || __atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    set_bytes(g, 0);
    account_unref(g->account);
    bt_mask_cleanup(&g->masks, &g->automaton);
    bt_automaton_cleanup(&g->automaton);
    bt_program_destroy(g->program);
    pthread_cond_destroy(&g->idle);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

bool bt_grammar_enter(struct bt_grammar *g, bool brief)
{
    pthread_mutex_lock(&g->lock);
    while (g->use == BT_GRAMMAR_SHORT || (g->use == BT_GRAMMAR_LONG && !brief)) {
        g->waiting++;
        pthread_cond_wait(&g->idle, &g->lock);
        g->waiting--;
    }
    bool ok = g->use == BT_GRAMMAR_IDLE;
    if (ok) {
        g->use = brief ? BT_GRAMMAR_SHORT : BT_GRAMMAR_LONG;
    }
    pthread_mutex_unlock(&g->lock);
    return ok;
}

void bt_grammar_leave(struct bt_grammar *g)
{
    size_t bytes = bytes_of(g);
    pthread_mutex_lock(&g->lock);
    set_bytes(g, bytes);
    g->use = BT_GRAMMAR_IDLE;
    if (g->waiting > 0) { /* wakes all, so that a short call sees a long one that waits before it */
        pthread_cond_broadcast(&g->idle);
    }
    pthread_mutex_unlock(&g->lock);
}

void bt_grammar_reset(struct bt_grammar *g)
{
    bt_mask_drop(&g->masks, &g->automaton);
    bt_automaton_reset(&g->automaton);
    g->generation++;
}

/* ---- cache ---- */

struct entry {
    struct bt_list link; /* the list is sorted by use, the most recent first */
    uint8_t key[32];     /* SHA-256 of kind and text */
    struct bt_grammar *g;
};
struct bt_grammar_cache {
    pthread_mutex_t lock;
    struct bt_list entries;
    struct bt_map *by_key;
    size_t max_bytes;
    struct bt_grammar_account *account;
};

struct bt_grammar_cache *bt_grammar_cache_create(size_t max_bytes)
{
    struct bt_grammar_cache *c = bt_calloc(1, sizeof(*c));
    c->max_bytes = max_bytes;
    c->by_key = bt_map_create(sizeof(((struct entry *)0)->key));
    c->account = bt_calloc(1, sizeof(*c->account));
    c->account->refs = 1;
    pthread_mutex_init(&c->lock, NULL);
    bt_list_init(&c->entries);
    return c;
}

static size_t used(const struct bt_grammar_cache *c)
{
    return __atomic_load_n(&c->account->bytes, __ATOMIC_RELAXED);
}

static void drop(struct bt_grammar_cache *c, struct entry *e)
{
    bt_list_remove(&e->link);
    (void)bt_map_del(c->by_key, e->key);
    bt_grammar_unref(e->g);
    free(e);
}

void bt_grammar_cache_destroy(struct bt_grammar_cache *c)
{
    if (!c) {
        return;
    }
    while (!bt_list_empty(&c->entries)) {
        drop(c, BT_CONTAINER_OF(c->entries.next, struct entry, link));
    }
    account_unref(c->account);
    bt_map_destroy(c->by_key);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Drops the oldest grammars that only the cache holds, until the rest fits. */
static void evict(struct bt_grammar_cache *c)
{
    for (struct bt_list *l = c->entries.prev; l != &c->entries && used(c) > c->max_bytes;) {
        struct entry *e = BT_CONTAINER_OF(l, struct entry, link);
        l = l->prev;
        if (__atomic_load_n(&e->g->refs, __ATOMIC_ACQUIRE) == 1) {
            drop(c, e);
        }
    }
}

static void key_of(const struct bt_grammar_spec *spec, uint8_t key[32])
{
    struct bt_sha256 *h = bt_sha256_create();
    uint8_t kind = (uint8_t)spec->kind;
    bt_sha256_update(h, &kind, 1);
    bt_sha256_update(h, spec->text, spec->kind == BT_GRAMMAR_JSON_OBJECT ? 0 : spec->len);
    bt_sha256_finish(h, key);
}

/* Finds the entry of key and moves it to the front. The caller holds the lock. */
static struct entry *find(struct bt_grammar_cache *c, const uint8_t key[32])
{
    struct entry *e = bt_map_get(c->by_key, key);
    if (e) {
        bt_list_remove(&e->link);
        bt_list_insert_head(&c->entries, &e->link);
    }
    return e;
}

/* Adds g, with a reference of the cache's own. The caller holds the lock. */
static struct entry *insert(struct bt_grammar_cache *c, const uint8_t key[32], struct bt_grammar *g)
{
    struct entry *e = bt_calloc(1, sizeof(*e));
    memcpy(e->key, key, sizeof(e->key));
    e->g = bt_grammar_ref(g);
    bt_list_insert_head(&c->entries, &e->link);
    (void)bt_map_put(c->by_key, e->key, e);
    __atomic_add_fetch(&c->account->refs, 1, __ATOMIC_RELAXED);
    g->account = c->account;
    __atomic_add_fetch(&c->account->bytes, g->bytes, __ATOMIC_RELAXED);
    return e;
}

bt_status_t bt_grammar_cache_get(struct bt_grammar_cache *c, const struct bt_grammar_spec *spec,
                                 struct bt_grammar **g_p, char *err, size_t err_cap)
{
    uint8_t key[32];
    key_of(spec, key);
    pthread_mutex_lock(&c->lock);
    struct entry *e = find(c, key);
    if (e) {
        *g_p = bt_grammar_ref(e->g);
    }
    pthread_mutex_unlock(&c->lock);
    if (e) {
        return BT_OK;
    }
    /* two threads may compile the same text: the cache keeps the first result */
    struct bt_grammar *g;
    bt_status_t st = bt_grammar_compile(spec, &g, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    pthread_mutex_lock(&c->lock);
    e = find(c, key);
    if (e) {
        bt_grammar_unref(g);
        g = bt_grammar_ref(e->g);
    } else {
        e = insert(c, key, g);
    }
    evict(c); /* cannot evict this grammar, which is in use */
    bool fits = used(c) <= c->max_bytes * IN_USE_MAX;
    if (!fits) {
        drop(c, e);
    }
    pthread_mutex_unlock(&c->lock);
    if (!fits) {
        bt_grammar_unref(g);
        snprintf(err, err_cap, "the grammars in use fill the memory for grammars: try again later");
        return BT_ERR_EXHAUSTED;
    }
    *g_p = g;
    return BT_OK;
}
