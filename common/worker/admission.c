/* Admission: which queued request gets a slot and pages, and when. The order is by class, then by
 * arrival; no request overtakes the head of the queue. Engine thread. */
#include "common/log/log.h"
#include "common/worker/core.h"

static uint32_t pages_needed(const struct bt_wcore *c, const struct bt_wreq *r)
{
    /* A decode row's first step writes the KV of the position behind the prompt. */
    uint32_t tokens = r->len;
    if (r->sub->phases == BATON__PHASES__DECODE && r == r->lead && !r->resumed &&
        r->sub->beams.width == 0) {
        tokens = BT_MIN(r->len + 1, r->sub->len_max);
    }
    return BT_DIV_UP(tokens, c->block_tokens);
}

/* Pages beyond `have` that r needs to grow by `tokens`. */
static uint32_t growth(const struct bt_wcore *c, struct bt_wreq *r, uint32_t have, uint32_t tokens)
{
    if (r->sub->beams.width > 0) {
        return c->decode->beam_growth(c, r, tokens);
    }
    uint32_t last = (uint32_t)BT_MIN((uint64_t)r->len + tokens, (uint64_t)r->sub->len_max);
    uint32_t pages = BT_DIV_UP(last, c->block_tokens);
    return pages > have ? pages - have : 0;
}

/* Pages that must stay free beside r's own when r starts, so that a preemption does not soon undo
 * the work done for it. For a new request: the pages that all active requests need for their next
 * block. For a preempted request: the pages that they need while r generates half as many tokens as
 * its recomputation needs. So under pressure the worker recomputes at most a small multiple of what
 * it generates. Rows of a lower class do not count: they are preempted for r. */
static uint32_t reserve(const struct bt_wcore *c, struct bt_wreq *r, uint32_t need)
{
    uint32_t tokens = c->block_tokens, pages;
    if (c->reqs.n_active == 0) {
        return 0; /* there is no active request to wait for */
    }
    if (r->resumed) {
        tokens = BT_MAX(4 * c->block_tokens, c->decode->missing(c, r) / 2);
    }
    pages = r->resumed ? growth(c, r, need, tokens) : 0;
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.active) {
        struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        bool grows = a->sub->phases != BATON__PHASES__PREFILL && !bt_wreq_lower_class(a, r);
        pages += grows ? growth(c, a, a->n_pages, tokens) : 0;
    }
    return pages;
}

/* Are `own` pages free for r, and the reserve beside them? Takes back pages that are only kept for
 * write-back. */
static bool make_room(struct bt_wcore *c, struct bt_wreq *r, uint32_t own, uint32_t need)
{
    uint32_t want = own + reserve(c, r, need);
    while (bt_page_pool_free_count(c->pages) < want) {
        if (!c->decode->reclaim(c, r) && !bt_wback_expire(c)) {
            return false;
        }
    }
    return true;
}

/* Takes all pages of r: those that its submission keeps, and its own. */
static bool take_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t shared = c->decode->kept_blocks(r), need = pages_needed(c, r);
    uint32_t beams = r->sub->beams.width > 0 ? c->decode->beam_pages(c, r) : 0;
    BT_ASSERT(shared < need);
    /* Asks the kvstore which blocks of r it has only once there is room. Its answer may need more
     * pages. */
    if (!make_room(c, r, need - shared + beams, need) || !c->decode->ready(c, r) ||
        !make_room(c, r, need - shared + beams, need)) {
        return false;
    }
    if (bt_page_pool_get(c->pages, need - shared, r->pages + shared) != BT_OK) {
        return false;
    }
    c->decode->take_kept(c, r);
    if (r->sub->beams.width > 0) {
        c->decode->take_beam_pages(c, r);
    }
    r->n_pages = need;
    r->lead->group.n_holding++;
    return true;
}

/* Is there room for r's hidden states beside those of the active requests? */
static bool hidden_fit(const struct bt_wcore *c, const struct bt_wreq *r)
{
    uint64_t bytes = bt_submission_hidden(r->sub, c->info);
    struct bt_list *it;
    if (bytes == 0) {
        return true;
    }
    bt_list_for_each (it, &c->reqs.active) {
        bytes += bt_submission_hidden(BT_CONTAINER_OF(it, struct bt_wreq, link)->sub, c->info);
    }
    bt_list_for_each (it, &c->reqs.closing) {
        bytes += bt_submission_hidden(BT_CONTAINER_OF(it, struct bt_wreq, link)->sub, c->info);
    }
    return bytes <= BT_WORKER_HIDDEN_BYTES;
}

/* Preempts rows of a lower class than r's if that gets r its slot and pages. */
static void make_way(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t need = pages_needed(c, r);
    uint32_t beams = r->sub->beams.width > 0 ? c->decode->beam_pages(c, r) : 0;
    c->decode->make_way(c, r, need - c->decode->kept_blocks(r) + beams + reserve(c, r, need));
}

/* Is r a late request's prompt? It keeps slot and pages until it is computed; rows are preempted
 * for it. */
static bool late_prompt(const struct bt_wreq *r)
{
    return r->sub->late && r->sub->phases != BATON__PHASES__DECODE && !r->resumed &&
           (r->stage == BT_WREQ_QUEUED || r->stage == BT_WREQ_LOADING ||
            r->stage == BT_WREQ_PROMPT);
}

/* May r start beside the active requests? Late prompts get at most half of the slots and of the
 * pages, and leave pages for the longest prompt, so that a prompt that is in time does not wait for
 * them. A late prompt that is alone may have all that it needs. */
static bool late_may_start(const struct bt_wcore *c, const struct bt_wreq *r)
{
    uint32_t slots = 1, longest = BT_DIV_UP(c->info->max_model_len, c->block_tokens);
    uint64_t pages = pages_needed(c, r);
    if (!late_prompt(r) || c->reqs.n_active == 0) {
        return true;
    }
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.active) {
        const struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        slots += late_prompt(a);
        pages += late_prompt(a) ? a->n_pages : 0;
    }
    uint32_t left = c->info->pages - BT_MIN(longest, c->info->pages);
    return slots <= BT_MAX(c->max_slots / 2, 1u) && pages <= BT_MIN(c->info->pages / 2, left);
}

void bt_wcore_admit(struct bt_wcore *c)
{
    while (!bt_list_empty(&c->reqs.queue)) {
        struct bt_wreq *r = BT_CONTAINER_OF(c->reqs.queue.next, struct bt_wreq, link);
        if (!late_may_start(c, r)) { /* late requests are the end of the queue */
            return;
        }
        if (!hidden_fit(c, r)) {
            return; /* until another contrastive search has ended */
        }
        if (c->n_free_slots < r->sub->n_slots || !take_pages(c, r)) {
            make_way(c, r);
            return;
        }
        r->slot = c->free_slots[--c->n_free_slots];
        for (uint32_t i = 1; i < r->sub->n_slots; i++) {
            r->more_slots[i - 1] = c->free_slots[--c->n_free_slots];
        }
        bt_wcore_activate(c, r);
        if (!r->resumed) {
            bt_metric_observe(c->stats->queue_time,
                              (double)(bt_mono_ns() - r->sub->arrived_ns) / 1e9);
        }
        char err[BT_WORKER_DETAIL] = "";
        bt_status_t st = r->role->begin(c, r, err, sizeof(err));
        if (st == BT_ERR_DEVICE) {
            bt_wcore_fatal(c, st, "begin");
            return;
        }
        if (st != BT_OK) {
            bt_wcore_end(c, r, st, "%s", err);
        }
    }
}
