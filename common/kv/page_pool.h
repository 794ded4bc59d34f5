/* Free list of an engine's pages with reference counts. One owner thread. Pure. */
#ifndef BT_KV_PAGE_POOL_H
#define BT_KV_PAGE_POOL_H

#include "common/base/base.h"

struct bt_page_pool;

struct bt_page_pool *bt_page_pool_create(uint32_t n_pages);
void bt_page_pool_destroy(struct bt_page_pool *p);
uint32_t bt_page_pool_free_count(const struct bt_page_pool *p);
/* Takes n pages, each with one reference, into pages[0..n); ERR_EXHAUSTED takes none. */
bt_status_t bt_page_pool_get(struct bt_page_pool *p, uint32_t n, uint32_t *pages) BT_MUST_CHECK;
/* One reference more of a page that has one. */
void bt_page_pool_ref(struct bt_page_pool *p, uint32_t page);
/* Drops one reference of each of pages[0..n); a page without any is free again. */
void bt_page_pool_put(struct bt_page_pool *p, const uint32_t *pages, uint32_t n);

#endif
