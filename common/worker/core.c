/* The life of a request on the engine thread: waiting, queue, slot and pages, closing. The roles
 * decide what happens in between. Touches the engine, the page pool and the requests; nothing of
 * the control thread's. */
#include "common/worker/core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"

void bt_wslab_put(struct bt_wslab *s)
{
    BT_ASSERT(s->refs > 0);
    if (--s->refs == 0 && s->dead) {
        if (s->vt->slab_close != NULL) {
            s->vt->slab_close(s->eng, s->slab->data);
        }
        bt_slab_unmap(s->slab);
        free(s);
    }
}

static bool ending(const struct bt_wreq *r)
{
    return r->doomed || r->stage == BT_WREQ_CLOSING || r->stage == BT_WREQ_ENDED;
}

/* ---- lists ---- */

static uint32_t *list_count(struct bt_wcore *c, bt_wreq_stage_t stage)
{
    static uint32_t ignored;
    switch (stage) {
    case BT_WREQ_OPENING:
    case BT_WREQ_LANDING:
    case BT_WREQ_FORKING: return &c->n_waiting;
    case BT_WREQ_QUEUED: return &c->n_queue;
    case BT_WREQ_LOADING:
    case BT_WREQ_PROMPT:
    case BT_WREQ_ROW: return &c->n_active;
    case BT_WREQ_PREEMPTING:
    case BT_WREQ_CLOSING:
    case BT_WREQ_ENDED: break;
    }
    return &ignored;
}

static void unlink_req(struct bt_wcore *c, struct bt_wreq *r)
{
    --*list_count(c, r->stage);
    bt_list_remove(&r->link);
}

/* Class, then arrival: 16 bits and 48. The last class is that of late requests: no priority leads
 * there. */
static uint64_t order_of(const struct bt_wreq *r, uint64_t arrival)
{
    int32_t c = BT_MIN(BT_MAX(r->sub->priority, INT16_MIN), INT16_MAX - 1) - INT16_MIN;
    return (r->sub->late ? (uint64_t)UINT16_MAX : (uint64_t)c) << 48 | arrival;
}

static bool lower_class(const struct bt_wreq *a, const struct bt_wreq *than)
{
    return a->order >> 48 > than->order >> 48;
}

/* By rising order; new ones belong near the tail. */
static void insert_ordered(struct bt_list *head, struct bt_wreq *r)
{
    struct bt_list *at = head->prev;
    while (at != head && BT_CONTAINER_OF(at, struct bt_wreq, link)->order > r->order) {
        at = at->prev;
    }
    bt_list_insert_head(at, &r->link);
}

void bt_wcore_submit(struct bt_wcore *c, struct bt_wreq *lead)
{
    bool reads = lead->sub->phases == BATON__PHASES__DECODE;
    for (struct bt_wreq *r = lead; r != NULL; r = r->next_choice) {
        r->order = order_of(r, c->next_order++);
        r->role = c->roles[reads || r != lead ? BT_ROLE_DECODE : BT_ROLE_PREFILL];
        r->stage = r == lead ? BT_WREQ_OPENING : BT_WREQ_FORKING;
        r->slot = BT_WORKER_NO_SLOT;
        r->len = r->sub->n;
        bt_list_insert_tail(&c->waiting, &r->link);
        c->n_waiting++;
        lead->n_left++;
    }
}

void bt_wcore_enqueue(struct bt_wcore *c, struct bt_wreq *r)
{
    unlink_req(c, r);
    r->stage = BT_WREQ_QUEUED;
    insert_ordered(&c->queue, r);
    c->n_queue++;
}

/* ---- the grant ---- */

static void emit_close(struct bt_wcore *c, const struct bt_wreq *r, bool abort)
{
    struct bt_wout o = {.kind = BT_WOUT_CLOSE, .attach = r->sub->attach};
    o.u.local.request = r->sub->request;
    o.u.local.epoch = r->sub->epoch;
    o.u.local.writer = r->sub->phases != BATON__PHASES__DECODE;
    o.u.local.abort = abort;
    bt_wcore_emit(c, &o);
}

static bool grant_fits(const struct bt_wcore *c, const struct bt_wreq *r, const struct bt_wgrant *g)
{
    const struct bt_slab_super *sup = c->slab->slab->super;
    uint32_t blocks = BT_DIV_UP(g->n_tokens, c->block_tokens);
    /* Of a prompt that is larger than the slab only the beginning goes through it, which is no
     * hand-off to anybody. */
    bool partial = g->n_tokens < r->sub->n && g->n_tokens % c->block_tokens == 0 &&
                   g->n_tokens > 0 &&
                   (r->sub->phases == BATON__PHASES__BOTH ||
                    (r->sub->phases == BATON__PHASES__PREFILL && r->sub->max_new == 0));
    if ((g->n_tokens != r->sub->n && !partial) || g->n_slots != blocks ||
        g->resident_blocks > blocks || g->chunk_tokens == 0 ||
        g->chunk_tokens % c->block_tokens != 0 || g->flow_word >= sup->n_flow_words) {
        return false;
    }
    for (uint32_t i = 0; i < g->n_slots; i++) {
        if (g->slots[i] >= sup->n_slots) {
            return false;
        }
    }
    return true;
}

void bt_wcore_opened(struct bt_wcore *c, const struct bt_wcmd *cmd)
{
    struct bt_wreq *r = cmd->req;
    struct bt_wgrant *g = cmd->u.grant;
    bool here = c->slab != NULL && c->slab->attach == r->sub->attach;
    if (r->stage != BT_WREQ_OPENING || !here) {
        free(g); /* it ended while the answer was on its way; LocalClose has been sent */
        return;
    }
    if (g == NULL) {
        bt_wcore_end(c, r, cmd->status, "kvstore: %s", cmd->detail);
        return;
    }
    r->grant = g;
    r->grant_open = true;
    r->slab = c->slab;
    r->slab->refs++;
    if (!grant_fits(c, r, g)) {
        bt_wcore_end(c, r, BT_ERR_PEER_PROTOCOL,
                     "the kvstore's grant does not fit the submission: tokens %u/%u, slots %u, "
                     "resident %u, chunk %u: do conductor and kvstore agree on kv.block_tokens?",
                     g->n_tokens, r->sub->n, g->n_slots, g->resident_blocks, g->chunk_tokens);
        return;
    }
    if (!bt_wcore_slots_valid(r, 0, g->n_slots)) {
        bt_wcore_end(c, r, BT_ERR_STALE, "a slot of the grant has been given away");
        return;
    }
    r->streams = g->n_tokens < r->sub->n && !r->sub->no_cache;
    for (struct bt_wreq *k = r; k != NULL; k = k->next_choice) {
        k->wb_off = g->n_tokens < r->sub->n; /* what is generated lies behind a gap ... */
    }
    if (r->streams) { /* ... but for the one who fills it */
        r->wb_off = false;
        r->wb_from = g->n_slots;
    }
    r->role->opened(c, r);
}

static bool slot_valid(const struct bt_wreq *r, uint32_t slot, uint32_t generation)
{
    uint64_t w = atomic_load_explicit(&r->slab->slab->headers[slot].state, memory_order_acquire);
    bt_slot_state_t s = bt_slot_state(w);
    return bt_slot_generation(w) == generation && (s == BT_SLOT_WRITING || s == BT_SLOT_SEALED);
}

bool bt_wcore_slots_valid(const struct bt_wreq *r, uint32_t first, uint32_t end)
{
    const struct bt_wgrant *g = r->grant;
    for (uint32_t i = first; i < end; i++) {
        if (!slot_valid(r, g->slots[i], bt_wgrant_gens(g)[i])) {
            return false;
        }
    }
    return true;
}

/* ---- the tail ---- */

bool bt_wcore_tail_valid(const struct bt_wreq *r)
{
    for (const struct bt_wtail *t = r->tail; t != NULL; t = t->next) {
        for (uint32_t i = 0; i < t->n; i++) {
            if (!slot_valid(r, t->slots[i], t->slots[t->n + i])) {
                return false;
            }
        }
    }
    return true;
}

/* Pieces come from the end backwards, each right in front of the one before; the prompt's last
 * token is nobody's but ours to compute. */
static bool tail_fits(const struct bt_wcore *c, const struct bt_wreq *r, const struct bt_wtail *t)
{
    uint64_t end = (uint64_t)t->first + t->n;
    if (t->n == 0 || t->first < r->grant->resident_blocks || end * c->block_tokens >= r->sub->n ||
        (r->tail != NULL && end != r->tail->first)) {
        return false;
    }
    for (uint32_t i = 0; i < t->n; i++) {
        if (t->slots[i] >= r->slab->slab->super->n_slots) {
            return false;
        }
    }
    return true;
}

void bt_wcore_tail(struct bt_wcore *c, struct bt_wreq *r, struct bt_wtail *t)
{
    if (!r->grant_open || r->tail_over || ending(r)) {
        free(t); /* the kvstore has been told, or will be as the grant is closed */
        return;
    }
    if (!tail_fits(c, r, t)) {
        BT_WARN("tail_refused", "req=%016llx epoch=%u first=%u blocks=%u",
                (unsigned long long)r->sub->request, r->sub->epoch, t->first, t->n);
        free(t);
        return;
    }
    r->tail_end = r->tail != NULL ? r->tail_end : t->first + t->n;
    t->next = r->tail;
    r->tail = t;
}

void bt_wreq_tail_free(struct bt_wreq *r)
{
    while (r->tail != NULL) {
        struct bt_wtail *t = r->tail;
        r->tail = t->next;
        free(t);
    }
}

void bt_wcore_tail_past(struct bt_wcore *c, struct bt_wreq *r, uint32_t pos)
{
    if (r->tail == NULL || r->load_flow != 0 || pos < r->tail_end * c->block_tokens) {
        return;
    }
    bt_wreq_tail_free(r);
    r->tail_over = true;
    struct bt_wout o = {.kind = BT_WOUT_TAIL_END, .attach = r->sub->attach};
    o.u.local.request = r->sub->request;
    o.u.local.epoch = r->sub->epoch;
    bt_wcore_emit(c, &o);
}

void bt_wcore_grant_close(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!r->grant_open) {
        return;
    }
    BT_ASSERT(r->load_flow == 0 && r->store_flow == 0 && r->flows_pending == 0);
    bool abort = r->grant_abort;
    if (r->trailer_due && !abort) {
        struct bt_wout o = {.kind = BT_WOUT_TRAILER, .attach = r->sub->attach};
        o.u.local.request = r->sub->request;
        o.u.local.epoch = r->sub->epoch;
        o.u.local.first_token = r->first_token;
        o.u.local.finished = r->finish != BATON__FINISH__NOT_FINISHED;
        o.u.local.last_compute_ns = r->last_compute_ns;
        bt_wcore_emit(c, &o);
    }
    r->trailer_due = false;
    emit_close(c, r, abort);
    r->grant_open = false;
    bt_wreq_tail_free(r);
    bt_wslab_put(r->slab);
    r->slab = NULL;
    free(r->grant);
    r->grant = NULL;
}

/* ---- admission ---- */

static uint32_t pages_needed(const struct bt_wcore *c, const struct bt_wreq *r)
{
    /* A decode row's first step writes the position behind the prompt. */
    uint32_t tokens = r->len;
    if (r->sub->phases == BATON__PHASES__DECODE && r == r->lead && !r->resumed) {
        tokens = BT_MIN(r->len + 1, r->sub->len_max);
    }
    return BT_DIV_UP(tokens, c->block_tokens);
}

/* Pages beyond `have` that r needs to grow by `tokens`. */
static uint32_t growth(const struct bt_wcore *c, const struct bt_wreq *r, uint32_t have,
                       uint32_t tokens)
{
    uint32_t last = (uint32_t)BT_MIN((uint64_t)r->len + tokens, (uint64_t)r->sub->len_max);
    uint32_t pages = BT_DIV_UP(last, c->block_tokens);
    return pages > have ? pages - have : 0;
}

/* Pages that have to stay free beside r's own when it starts among others, so that work done for it
 * is not soon lost by a preemption. A new one: what the next block of everybody needs. One that was
 * preempted: what everybody needs while it generates half as many tokens as are to be computed
 * again for it, so that under pressure recomputation stays within a small multiple of generation.
 * Rows of a lower class do not count: they make way. */
static uint32_t reserve(const struct bt_wcore *c, const struct bt_wreq *r, uint32_t need)
{
    uint32_t tokens = c->block_tokens, pages;
    if (c->n_active == 0) {
        return 0; /* nobody to wait for */
    }
    if (r->resumed) {
        tokens = BT_MAX(4 * c->block_tokens, bt_wreload_missing(c, r) / 2);
    }
    pages = r->resumed ? growth(c, r, need, tokens) : 0;
    struct bt_list *it;
    bt_list_for_each (it, &c->active) {
        const struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        bool grows = a->sub->phases != BATON__PHASES__PREFILL && !lower_class(a, r);
        pages += grows ? growth(c, a, a->n_pages, tokens) : 0;
    }
    return pages;
}

/* Are `own` pages free for r, and what has to stay free beside them? */
static bool make_room(struct bt_wcore *c, struct bt_wreq *r, uint32_t own, uint32_t need)
{
    uint32_t want = own + reserve(c, r, need);
    while (bt_page_pool_free_count(c->pages) < want) {
        if (!bt_wfork_drop(c, r) && !bt_wback_expire(c)) {
            return false;
        }
    }
    return true;
}

/* All pages of r: those that its submission keeps, and its own. Nobody overtakes the head: that
 * would starve long prompts. */
static bool take_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    uint32_t shared = r->lead->n_shared > 0 ? r->lead->n_shared - 1 : 0, need = pages_needed(c, r);
    BT_ASSERT(shared < need);
    /* The kvstore is asked what it has of r once there is room; its answer may ask for more. */
    if (!make_room(c, r, need - shared, need) || !bt_wreload_ready(c, r) ||
        !make_room(c, r, need - shared, need)) {
        return false;
    }
    if (bt_page_pool_get(c->pages, need - shared, r->pages + shared) != BT_OK) {
        return false;
    }
    uint32_t taken = bt_wfork_take(c, r);
    BT_ASSERT(taken == shared);
    r->n_pages = need;
    r->lead->n_holding++;
    return true;
}

/* Pages, and in *slots_p slots, of the requests in list that `of` (NULL: any) is before by class.
 * Pages that choices share count for each; who relies on the sum looks again later. */
static uint32_t held(const struct bt_list *list, const struct bt_wreq *of, uint32_t *slots_p)
{
    uint32_t pages = 0;
    struct bt_list *it;
    bt_list_for_each (it, list) {
        const struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (of == NULL || (a->stage == BT_WREQ_ROW && lower_class(a, of))) {
            pages += a->n_pages;
            *slots_p += a->slot != BT_WORKER_NO_SLOT;
        }
    }
    return pages;
}

/* Rows of a lower class than r's are preempted, the last first, until what is free and on its way
 * back is enough for r; none if all of theirs would not be. */
static void make_way(struct bt_wcore *c, const struct bt_wreq *r)
{
    struct bt_wreq *last = bt_wcore_last_row(c);
    if (last == NULL || !lower_class(last, r)) {
        return;
    }
    uint32_t shared = r->lead->n_shared > 0 ? r->lead->n_shared - 1 : 0, need = pages_needed(c, r);
    uint32_t want = need - shared + reserve(c, r, need), slots = c->n_free_slots;
    uint32_t pages = bt_page_pool_free_count(c->pages) + held(&c->closing, NULL, &slots);
    uint32_t their_slots = 0, theirs = held(&c->active, r, &their_slots);
    if (pages + theirs < want || slots + their_slots == 0) {
        return;
    }
    while ((pages < want || slots == 0) && last != NULL && lower_class(last, r)) {
        pages += last->n_pages;
        slots++;
        bt_wcore_preempt(c, last);
        last = bt_wcore_last_row(c);
    }
}

/* A late request's prompt: it keeps slot and pages until it is computed. Rows make way. */
static bool late_prompt(const struct bt_wreq *r)
{
    return r->sub->late && r->sub->phases != BATON__PHASES__DECODE && !r->resumed &&
           (r->stage == BT_WREQ_QUEUED || r->stage == BT_WREQ_LOADING ||
            r->stage == BT_WREQ_PROMPT);
}

/* May r start beside what is active? Late prompts have at most half of the slots and of the pages,
 * and leave pages for the longest prompt: one that is in time does not wait for them. Alone a late
 * prompt may have what it needs. */
static bool late_may_start(const struct bt_wcore *c, const struct bt_wreq *r)
{
    uint32_t slots = 1, longest = BT_DIV_UP(c->info->max_model_len, c->block_tokens);
    uint64_t pages = pages_needed(c, r);
    if (!late_prompt(r) || c->n_active == 0) {
        return true;
    }
    struct bt_list *it;
    bt_list_for_each (it, &c->active) {
        const struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        slots += late_prompt(a);
        pages += late_prompt(a) ? a->n_pages : 0;
    }
    uint32_t left = c->info->pages - BT_MIN(longest, c->info->pages);
    return slots <= BT_MAX(c->max_slots / 2, 1u) && pages <= BT_MIN(c->info->pages / 2, left);
}

void bt_wcore_admit(struct bt_wcore *c)
{
    while (!bt_list_empty(&c->queue)) {
        struct bt_wreq *r = BT_CONTAINER_OF(c->queue.next, struct bt_wreq, link);
        if (!late_may_start(c, r)) { /* nobody else waits: late ones are the last */
            return;
        }
        if (c->n_free_slots == 0 || !take_pages(c, r)) {
            make_way(c, r);
            return;
        }
        r->slot = c->free_slots[--c->n_free_slots];
        unlink_req(c, r);
        r->stage = BT_WREQ_LOADING;
        insert_ordered(&c->active, r);
        c->n_active++;
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

bt_status_t bt_wcore_slot_open(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_status_t st =
        c->vt->slot_open(c->eng, r->slot, &r->sub->params, r->tokens, r->len, r->sub->n_prompt);
    return st == BT_OK ? c->vt->slot_pages(c->eng, r->slot, 0, r->pages, r->n_pages) : st;
}

/* ---- closing ---- */

void bt_wcore_flow_close(struct bt_wcore *c, struct bt_wreq *r, uint32_t *flow, bool abort)
{
    if (*flow == 0) {
        return;
    }
    bt_engine_ticket_t quiet;
    bt_status_t st = c->vt->flow_close(c->eng, *flow, abort, &quiet);
    if (st != BT_OK) {
        /* Without quiescence neither slots nor pages could ever be used again. */
        bt_wcore_fatal(c, st, "flow_close");
        return;
    }
    *flow = 0;
    r->pending++;
    r->flows_pending++;
    bt_wcore_ticket(c, quiet, BT_WT_FLOW, r);
}

static void close_slot(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_engine_ticket_t quiet;
    bt_status_t st = c->vt->slot_close(c->eng, r->slot, &quiet);
    if (st != BT_OK) {
        bt_wcore_fatal(c, st, "slot_close");
        return;
    }
    r->pending++;
    bt_wcore_ticket(c, quiet, BT_WT_SLOT, r);
}

static void count_end(struct bt_wcore *c, const struct bt_wreq *r)
{
    int reason = BT_REASON_ERROR;
    if (r->end_status == BT_ERR_CANCELLED) {
        reason = BT_REASON_ABORT;
    } else if (r->end_status == BT_OK) {
        reason = r->finish == BATON__FINISH__STOP     ? BT_REASON_STOP
                 : r->finish == BATON__FINISH__LENGTH ? BT_REASON_LENGTH
                                                      : BT_REASON_HANDOFF;
    }
    bt_metric_add(c->stats->finished[reason], 1);
}

static void return_slot(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->slot != BT_WORKER_NO_SLOT) {
        r->lead->n_holding--;
        c->free_slots[c->n_free_slots++] = r->slot;
        r->slot = BT_WORKER_NO_SLOT;
    }
}

static void return_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_page_pool_put(c->pages, r->pages, r->n_pages);
    r->n_pages = 0;
}

/* Puts go on without r. */
static void leave_puts(struct bt_wcore *c, const struct bt_wreq *r)
{
    for (uint32_t i = 0; i < c->all_puts; i++) {
        if (c->puts[i].req == r) {
            c->puts[i].req = NULL;
        }
    }
}

void bt_wcore_drained(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_list_remove(&r->link);
    c->drain_pages -= r->n_pages;
    r->draining = false;
    return_pages(c, r);
    leave_puts(c, r);
    if (r->forgotten) {
        bt_wreq_free(r);
    }
}

void bt_wcore_forget(struct bt_wcore *c, struct bt_wreq *r)
{
    (void)c;
    r->forgotten = true;
    if (!r->draining) { /* choices other than the lead never do */
        bt_wreq_free(r);
    }
}

static void finish_end(struct bt_wcore *c, struct bt_wreq *r)
{
    return_slot(c, r);
    bt_wcore_grant_close(c, r);
    bt_wreload_drop(c, r);
    count_end(c, r);
    bt_list_remove(&r->link);
    r->stage = BT_WREQ_ENDED;
    r->draining = bt_wback_drain(c, r);
    if (r->draining) {
        bt_list_insert_tail(&c->draining, &r->link);
        c->drain_pages += r->n_pages;
    } else {
        return_pages(c, r);
        leave_puts(c, r);
    }
    struct bt_wreq *lead = r->lead;
    if (--lead->n_left > 0) {
        return;
    }
    bt_wfork_release(c, lead);
    struct bt_wout o = {.kind = BT_WOUT_ENDED, .req = lead};
    o.status = lead->status == BT_ERR_CANCELLED ? BT_OK : lead->status;
    memcpy(o.detail, lead->detail, sizeof(o.detail));
    bt_wcore_emit(c, &o);
}

static void close_now(struct bt_wcore *c, struct bt_wreq *r)
{
    bool slot_closing = r->stage == BT_WREQ_PREEMPTING;
    if (r->stage == BT_WREQ_OPENING && !r->grant_open) {
        emit_close(c, r, true); /* the kvstore may be holding the answer */
    }
    unlink_req(c, r);
    r->stage = BT_WREQ_CLOSING;
    bt_list_insert_tail(&c->closing, &r->link);
    r->grant_abort = r->end_status != BT_OK;
    bt_wcore_flow_close(c, r, &r->load_flow, r->grant_abort);
    bt_wcore_flow_close(c, r, &r->store_flow, r->grant_abort);
    if (r->slot != BT_WORKER_NO_SLOT && !slot_closing) {
        close_slot(c, r);
    }
    if (r->pending == 0 && !c->fatal) {
        finish_end(c, r);
    }
}

static void end_choice(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st)
{
    if (ending(r)) {
        return;
    }
    r->end_status = st;
    r->doomed = true;
    if (!r->in_step) { /* otherwise the end of the step does it */
        close_now(c, r);
    }
}

void bt_wcore_end(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st, const char *fmt, ...)
{
    struct bt_wreq *lead = r->lead, *next;
    if (st == BT_OK) {
        end_choice(c, r, st);
        return;
    }
    if (lead->status == BT_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(lead->detail, sizeof(lead->detail), fmt, ap);
        va_end(ap);
        lead->status = st;
    }
    for (r = lead; r != NULL; r = next) {
        next = r->next_choice;
        end_choice(c, r, st);
    }
}

/* The prompt of the other choices comes through their lead: has that happened? */
static bool has_forked(const struct bt_wreq *r)
{
    switch (r->stage) {
    case BT_WREQ_OPENING:
    case BT_WREQ_LANDING: return false;
    case BT_WREQ_QUEUED:
    case BT_WREQ_LOADING:
    case BT_WREQ_PROMPT: return r->resumed;
    case BT_WREQ_FORKING:
    case BT_WREQ_ROW:
    case BT_WREQ_PREEMPTING:
    case BT_WREQ_CLOSING:
    case BT_WREQ_ENDED: break;
    }
    return true;
}

void bt_wcore_end_choice(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wreq *lead = r->lead;
    bool prompt = r == lead && !has_forked(r);
    if (ending(r)) {
        return;
    }
    if (lead->n_left == 1 || (lead->n_left == 2 && lead->leaving && r != lead)) {
        bt_wcore_end(c, r, BT_ERR_CANCELLED, "cancelled"); /* nobody goes on */
        return;
    }
    r->finish = BATON__FINISH__STOP;
    r->leaving = prompt;
    if (!prompt) {
        bt_wcore_end(c, r, BT_OK, "%s", "");
    }
}

void bt_wcore_close_doomed(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->doomed && r->stage != BT_WREQ_CLOSING && r->stage != BT_WREQ_ENDED) {
        close_now(c, r);
    }
}

struct bt_wreq *bt_wcore_last_row(const struct bt_wcore *c)
{
    for (struct bt_list *it = c->active.prev; it != &c->active; it = it->prev) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (r->stage == BT_WREQ_ROW) {
            return r;
        }
    }
    return NULL;
}

void bt_wcore_preempt(struct bt_wcore *c, struct bt_wreq *r)
{
    BT_ASSERT(r->stage == BT_WREQ_ROW && !r->in_step && r->load_flow == 0);
    bt_metric_add(c->stats->preemptions, 1);
    BT_INFO("preempted", "req=%016llx epoch=%u priority=%d tokens=%u pages=%u",
            (unsigned long long)r->sub->request, r->sub->epoch, r->sub->priority, r->len,
            r->n_pages);
    bt_wback_preempt(c, r);
    unlink_req(c, r);
    r->stage = BT_WREQ_PREEMPTING;
    r->page_wait = false;
    bt_list_insert_tail(&c->closing, &r->link);
    close_slot(c, r);
}

/* Called after each of r's tickets: goes on once nothing of r is in use any more. */
static void settle(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->pending > 0) {
        return;
    }
    if (r->stage == BT_WREQ_CLOSING) {
        finish_end(c, r);
    } else if (r->stage == BT_WREQ_PREEMPTING) {
        return_pages(c, r);
        return_slot(c, r);
        r->role = c->roles[BT_ROLE_DECODE];
        r->resumed = true;
        r->reload = BT_WRELOAD_NONE;
        bt_wcore_enqueue(c, r);
    }
}

void bt_wcore_slot_ticket(struct bt_wcore *c, struct bt_wreq *r)
{
    r->pending--;
    settle(c, r);
}

void bt_wcore_flow_ticket(struct bt_wcore *c, struct bt_wreq *r)
{
    r->pending--;
    r->flows_pending--;
    if (r->flows_pending == 0 && r->load_flow == 0 && r->store_flow == 0) {
        if (r->stage == BT_WREQ_CLOSING) {
            bt_wcore_grant_close(c, r);
        } else if (!r->doomed) {
            r->role->quiet(c, r);
        }
    }
    settle(c, r);
}

/* ---- the kvstore comes and goes ---- */

void bt_wcore_attached(struct bt_wcore *c, struct bt_wslab *s)
{
    BT_ASSERT(c->slab == NULL);
    c->slab = s;
    s->refs = 1; /* ours, until it detaches */
    s->vt = c->vt;
    s->eng = c->eng;
    if (c->vt->slab_open != NULL) {
        const struct bt_slab_super *sup = s->slab->super;
        c->vt->slab_open(c->eng, s->slab->data, sup->n_slots * sup->slot_bytes);
    }
}

static struct bt_wreq *next_with_grant(const struct bt_list *head)
{
    for (struct bt_list *it = head->next; it != head; it = it->next) {
        struct bt_wreq *r = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if ((r->grant_open || r->stage == BT_WREQ_OPENING) && !ending(r)) {
            return r;
        }
    }
    return NULL;
}

/* From the start each time: an end takes the other choices out of the lists as well. Rows that live
 * on engine pages alone go on. */
static void fail_grants(struct bt_wcore *c, const struct bt_list *head)
{
    struct bt_wreq *r;
    while ((r = next_with_grant(head)) != NULL) {
        bt_wcore_end(c, r, BT_ERR_PEER_LOST, "the kvstore of this node has gone");
    }
}

void bt_wcore_detached(struct bt_wcore *c)
{
    struct bt_wslab *s = c->slab;
    if (s == NULL) {
        return;
    }
    fail_grants(c, &c->waiting);
    fail_grants(c, &c->queue);
    fail_grants(c, &c->active);
    fail_grants(c, &c->closing); /* those being preempted; closing ones go on by themselves */
    bt_wreload_detached(c);
    bt_wback_detached(c);
    c->slab = NULL;
    s->dead = true;
    bt_wslab_put(s);
}
