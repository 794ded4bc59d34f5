/* Dicts and scopes of the template interpreter: entries in order of insertion, with a hash index
 * once there are more than a few. The hash has a random seed and every probe counts as work, so
 * that neither many keys nor keys that collide make a lookup expensive. All memory is in the
 * render's arena. */
#include <stdatomic.h>
#include <string.h>

#include "common/base/map.h"
#include "common/token/jinja/jinja.h"

#define SCAN_MAX 8 /* up to this many entries comparing all hashes is as fast as an index */

/* One random seed for the process, so that a client cannot choose keys that collide. */
static uint64_t hash_seed(void)
{
    static _Atomic uint64_t seed; /* 0: none yet */
    uint64_t s = atomic_load_explicit(&seed, memory_order_relaxed);
    if (s == 0) {
        uint64_t fresh;
        bt_random(&fresh, sizeof(fresh));
        fresh |= 1;
        s = atomic_compare_exchange_strong(&seed, &s, fresh) ? fresh : s;
    }
    return s;
}

static uint64_t hash_bytes(const void *p, size_t n)
{
    return bt_hash64(p, n, hash_seed());
}

static uint64_t hash_int(int64_t i)
{
    return hash_bytes(&i, sizeof(i));
}

/* Equal keys have equal hashes, also 1, 1.0 and true. */
static uint64_t hash_of(struct bt_j_render *r, struct bt_j_value key)
{
    uint64_t h = 0;
    j_work(r, J_STEP);
    switch (key.kind) {
    case J_STR: j_work(r, key.s.n); return hash_bytes(key.s.p, key.s.n);
    case J_BOOL:
    case J_INT: return hash_int(bt_j_as_int(key));
    case J_FLOAT:
        if (key.f >= -9e18 && key.f <= 9e18 && (double)(int64_t)key.f == key.f) {
            return hash_int((int64_t)key.f);
        }
        return hash_bytes(&key.f, sizeof(key.f));
    case J_TUPLE:
        bt_j_enter(r);
        for (size_t i = 0; i < key.list->n; i++) {
            uint64_t pair[2] = {h, hash_of(r, key.list->v[i])};
            h = hash_bytes(pair, sizeof(pair));
        }
        bt_j_leave(r);
        return h;
    case J_LIST:
    case J_DICT: bt_j_fail(r, "unhashable type: '%s'", bt_j_type_name(key));
    case J_UNDEFINED:
    case J_NONE: return hash_int(key.kind);
    case J_NAMESPACE:
    case J_LOOP:
    case J_MACRO:
    case J_METHOD:
    case J_GLOBAL: return hash_bytes(&key.global, sizeof(key.global));
    }
    return h;
}

static bool matches(struct bt_j_render *r, const struct bt_j_entry *e, struct bt_j_value key)
{
    if (key.kind == J_STR) {
        return e->key.kind == J_STR && bt_j_str_eq(e->key.s, key.s);
    }
    return e->key.kind != J_STR && bt_j_equal(r, e->key, key);
}

/* The entry of a key with this hash; SIZE_MAX: none. r may be NULL if the key is a str. */
static size_t locate(struct bt_j_render *r, const struct bt_j_dict *d, struct bt_j_value key,
                     uint64_t hash)
{
    if (d->slots == NULL) {
        for (size_t i = 0; i < d->n; i++) {
            if (d->v[i].hash == hash && matches(r, &d->v[i], key)) {
                return i;
            }
        }
        return SIZE_MAX;
    }
    for (size_t at = hash & d->mask; d->slots[at] != 0; at = (at + 1) & d->mask) {
        size_t i = d->slots[at] - 1;
        if (r != NULL) {
            j_work(r, 1);
        }
        if (d->v[i].hash == hash && matches(r, &d->v[i], key)) {
            return i;
        }
    }
    return SIZE_MAX;
}

static void put_slot(struct bt_j_dict *d, size_t i)
{
    size_t at = d->v[i].hash & d->mask;
    while (d->slots[at] != 0) {
        at = (at + 1) & d->mask;
    }
    d->slots[at] = (uint32_t)i + 1;
}

/* Makes a new index, with room for twice as many entries. */
static void index_all(struct bt_j_render *r, struct bt_j_dict *d)
{
    size_t slots = 4 * SCAN_MAX;
    while (slots < 4 * d->n) {
        slots *= 2;
    }
    j_work(r, J_ELEMENT * d->n);
    if (d->slots == NULL || slots != (size_t)d->mask + 1) {
        d->slots = bt_j_alloc(&r->arena, slots * sizeof(*d->slots));
        d->mask = (uint32_t)(slots - 1);
    } else {
        memset(d->slots, 0, slots * sizeof(*d->slots));
    }
    for (size_t i = 0; i < d->n; i++) {
        put_slot(d, i);
    }
}

static void append(struct bt_j_render *r, struct bt_j_dict *d, struct bt_j_value key, uint64_t hash,
                   struct bt_j_value v)
{
    d->v = bt_j_grow(&r->arena, d->v, d->n, &d->cap, sizeof(*d->v));
    d->v[d->n++] = (struct bt_j_entry){key, v, hash};
    if (d->slots == NULL ? d->n > SCAN_MAX : 2 * d->n > d->mask) {
        index_all(r, d);
    } else if (d->slots != NULL) {
        put_slot(d, d->n - 1);
    }
}

const struct bt_j_value *bt_j_dict_get_str(const struct bt_j_dict *d, struct bt_j_str key)
{
    if (d->n == 0) {
        return NULL;
    }
    size_t i = locate(NULL, d, bt_j_string(key), hash_bytes(key.p, key.n));
    return i == SIZE_MAX ? NULL : &d->v[i].value;
}

const struct bt_j_value *bt_j_dict_get(struct bt_j_render *r, const struct bt_j_dict *d,
                                       struct bt_j_value key)
{
    size_t i = locate(r, d, key, hash_of(r, key));
    return i == SIZE_MAX ? NULL : &d->v[i].value;
}

void bt_j_dict_set(struct bt_j_render *r, struct bt_j_dict *d, struct bt_j_value key,
                   struct bt_j_value v)
{
    uint64_t hash = hash_of(r, key);
    size_t i = locate(r, d, key, hash);
    if (i != SIZE_MAX) {
        d->v[i].value = v;
    } else {
        append(r, d, key, hash, v);
    }
}

bool bt_j_dict_del(struct bt_j_render *r, struct bt_j_dict *d, struct bt_j_value key)
{
    size_t i = locate(r, d, key, hash_of(r, key));
    if (i == SIZE_MAX) {
        return false;
    }
    j_work(r, J_ELEMENT * (d->n - i));
    memmove(&d->v[i], &d->v[i + 1], (d->n - i - 1) * sizeof(*d->v));
    d->n--;
    if (d->slots != NULL) { /* the entries after it have moved */
        index_all(r, d);
    }
    return true;
}

void bt_j_scope_set(struct bt_j_render *r, struct bt_j_scope *s, struct bt_j_str name,
                    struct bt_j_value v)
{
    bt_j_dict_set(r, &s->vars, bt_j_string(name), v);
}

const struct bt_j_value *bt_j_scope_get(struct bt_j_render *r, const struct bt_j_scope *s,
                                        struct bt_j_str name)
{
    struct bt_j_value key = bt_j_string(name);
    uint64_t hash = hash_of(r, key);
    for (; s != NULL; s = s->parent) {
        size_t i = locate(r, &s->vars, key, hash);
        j_work(r, J_ELEMENT);
        if (i != SIZE_MAX) {
            return &s->vars.v[i].value;
        }
    }
    return NULL;
}
