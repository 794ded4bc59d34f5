/* Arena of the template interpreter. Its owner is one compile or one render. */
#include <stdlib.h>
#include <string.h>

#include "common/token/jinja/jinja.h"

#define CHUNK 16384

struct bt_j_chunk {
    struct bt_j_chunk *next;
    size_t used, cap;
    _Alignas(16) char data[];
};

void *bt_j_alloc(struct bt_j_arena *a, size_t n)
{
    n = BT_ALIGN_UP(BT_MAX(n, (size_t)1), (size_t)16);
    struct bt_j_chunk *c = a->chunks;
    if (c == NULL || c->cap - c->used < n) {
        size_t cap = BT_MAX(n, BT_MIN((size_t)CHUNK + a->total / 4, (size_t)1 << 20));
        if (n > a->max || a->total > a->max - cap) {
            longjmp(*a->oom, 1);
        }
        struct bt_j_chunk *fresh = bt_malloc(sizeof(*fresh) + cap);
        fresh->used = 0;
        fresh->cap = cap;
        a->total += cap;
        /* A large allocation gets its own chunk; the old chunk stays in use. */
        if (c != NULL && n > CHUNK) {
            fresh->next = c->next;
            c->next = fresh;
        } else {
            fresh->next = c;
            a->chunks = fresh;
        }
        c = fresh;
    }
    void *p = c->data + c->used;
    c->used += n;
    memset(p, 0, n);
    return p;
}

void bt_j_arena_cleanup(struct bt_j_arena *a)
{
    while (a->chunks != NULL) {
        struct bt_j_chunk *c = a->chunks;
        a->chunks = c->next;
        free(c);
    }
    a->total = 0;
}

void *bt_j_grow(struct bt_j_arena *a, void *old, size_t n, size_t *cap, size_t size)
{
    if (n < *cap) {
        return old;
    }
    size_t more = *cap == 0 ? 8 : *cap * 2;
    void *p = bt_j_alloc(a, more * size);
    if (n > 0) {
        memcpy(p, old, n * size);
    }
    *cap = more;
    return p;
}

bool bt_j_str_eq(struct bt_j_str a, struct bt_j_str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool bt_j_str_is(struct bt_j_str a, const char *b)
{
    return bt_j_str_eq(a, j_cstr(b));
}
