/* Reference-counted free list of engine pages. Pure; one owner thread. */
#include "common/kv/page_pool.h"

#include <stdlib.h>

struct bt_page_pool {
    uint32_t n_pages, n_free;
    uint32_t *free; /* stack of free page numbers */
    uint32_t *refs;
};

struct bt_page_pool *bt_page_pool_create(uint32_t n_pages)
{
    struct bt_page_pool *p = bt_calloc(1, sizeof(*p));
    p->n_pages = p->n_free = n_pages;
    p->free = bt_calloc(n_pages, sizeof(p->free[0]));
    p->refs = bt_calloc(n_pages, sizeof(p->refs[0]));
    for (uint32_t i = 0; i < n_pages; i++) {
        p->free[i] = n_pages - 1 - i;
    }
    return p;
}

void bt_page_pool_destroy(struct bt_page_pool *p)
{
    if (p != NULL) {
        free(p->free);
        free(p->refs);
        free(p);
    }
}

uint32_t bt_page_pool_free_count(const struct bt_page_pool *p)
{
    return p->n_free;
}

bt_status_t bt_page_pool_get(struct bt_page_pool *p, uint32_t n, uint32_t *pages)
{
    if (n > p->n_free) {
        return BT_ERR_EXHAUSTED;
    }
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = p->free[--p->n_free];
        p->refs[pages[i]] = 1;
    }
    return BT_OK;
}

void bt_page_pool_ref(struct bt_page_pool *p, uint32_t page)
{
    BT_ASSERT(page < p->n_pages && p->refs[page] > 0);
    p->refs[page]++;
}

void bt_page_pool_put(struct bt_page_pool *p, const uint32_t *pages, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        BT_ASSERT(pages[i] < p->n_pages && p->refs[pages[i]] > 0);
        if (--p->refs[pages[i]] == 0) {
            p->free[p->n_free++] = pages[i];
        }
    }
}
