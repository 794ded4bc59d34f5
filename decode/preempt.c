/* Preemption. When pages are short, a row gives back its own and waits in the queue. Before that
 * the worker offers the row's blocks to the pool, from which they can be loaded again (reload.c).
 * Engine thread. */
#include "common/log/log.h"
#include "decode/decode.h"

/* The row to preempt first: the youngest of the lowest class, but no search that has ended and will
 * soon give its pages back. NULL: there is no such row. */
static struct bt_wreq *last_row(const struct bt_wcore *c)
{
    for (struct bt_list *it = c->reqs.active.prev; it != &c->reqs.active; it = it->prev) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->stage == BT_WREQ_ROW && !bt_decode_beams_over(r)) {
            return r;
        }
    }
    return NULL;
}

/* Takes r's pages and slot away. The other choices of its submission go on. */
static void preempt(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_metric_add(c->stats->preemptions, 1);
    BT_INFO("preempted", "req=%016llx epoch=%u priority=%d tokens=%u pages=%u",
            (unsigned long long)r->sub->request, r->sub->epoch, r->sub->priority, r->len,
            r->n_pages + r->beam_pages);
    bt_wback_preempt(c, r);
    r->row->page_wait = false;
    r->row->model_owner = 0;
    bt_wcore_requeue(c, r);
}

/* Counts the pages, and in *slots_p the slots, of the requests in list. With `of`, counts only rows
 * of a lower class than `of`. A page that choices share is counted for each of them, so the sum may
 * be too high: the caller checks again in a later step. */
static uint32_t held(const struct bt_list *list, const struct bt_wreq *of, uint32_t *slots_p)
{
    uint32_t pages = 0;
    struct bt_list *it;
    bt_list_for_each (it, list) {
        const struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (of == NULL || (a->stage == BT_WREQ_ROW && bt_wreq_lower_class(a, of))) {
            pages += a->n_pages + a->beam_pages;
            *slots_p += a->slot != BT_WORKER_NO_SLOT ? a->sub->n_slots : 0;
        }
    }
    return pages;
}

void bt_decode_make_way(struct bt_wcore *c, const struct bt_wreq *r, uint32_t want)
{
    struct bt_wreq *last = last_row(c);
    if (last == NULL || !bt_wreq_lower_class(last, r)) {
        return;
    }
    uint32_t slots = c->n_free_slots;
    uint32_t pages = bt_page_pool_free_count(c->pages) + held(&c->reqs.closing, NULL, &slots);
    uint32_t their_slots = 0, theirs = held(&c->reqs.active, r, &their_slots);
    if (pages + theirs < want || slots + their_slots < r->sub->n_slots) {
        return;
    }
    while ((pages < want || slots < r->sub->n_slots) && last != NULL &&
           bt_wreq_lower_class(last, r)) {
        pages += last->n_pages + last->beam_pages;
        slots += last->sub->n_slots;
        preempt(c, last);
        last = last_row(c);
    }
}

/* The number of pages that r needs for its next position: one, or one for each of its beams. */
static uint32_t pages_due(const struct bt_wcore *c, const struct bt_wreq *r)
{
    if (r->sub->search) {
        return bt_decode_beam_missing(c, r);
    }
    return r->pos / c->block_tokens < r->n_pages ? 0 : 1;
}

/* Gives r the pages that it needs. */
static bt_status_t give_pages(struct bt_wcore *c, struct bt_wreq *r, const uint32_t *pages)
{
    if (r->sub->search) {
        return bt_decode_beam_grow(c, r, pages);
    }
    r->pages[r->n_pages++] = pages[0];
    return c->vt->slot_pages(c->eng, r->slot, r->n_pages - 1, pages, 1);
}

/* Takes the pages for r's next position. If too few are free, it first takes pages that are only
 * kept for choices that have not begun, then preempts the last row. r skips this step (page_wait)
 * until pages come back. The first row is never preempted while others hold pages, so one row
 * always advances. Returns true if requests have left the list of active ones. */
static bool want_page(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t pages[BT_BEAM_WIDTH_MAX], n = pages_due(c, r);
    r->row->page_wait = false;
    if (n == 0) {
        return false;
    }
    bt_status_t st;
    while ((st = bt_page_pool_get(c->pages, n, pages)) != BT_OK &&
           (bt_decode_fork_drop(c, NULL) || bt_wback_expire(c))) {
    }
    if (st == BT_OK) {
        st = give_pages(c, r, pages);
        if (st != BT_OK) {
            bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: slot_pages: %s", bt_status_text(st));
        }
        return st != BT_OK;
    }
    r->row->page_wait = true;
    if (!bt_list_empty(&c->reqs.closing) || bt_wcore_rows(c) < 2) {
        return false; /* pages will come back soon */
    }
    struct bt_wreq *last = last_row(c);
    if (last == NULL) {
        return false; /* the other rows are searches that have ended */
    }
    preempt(c, last);
    return true;
}

void bt_decode_provide_pages(struct bt_wcore *c)
{
    struct bt_list *it = c->reqs.active.next;
    while (it != &c->reqs.active && !c->fatal) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        bool changed = r->stage == BT_WREQ_ROW && want_page(c, r);
        it = changed ? c->reqs.active.next : it->next;
    }
}
