/* The life of a request on the engine thread: its lists, its slot and flows, preemption, closing.
 * The roles (prefill.c, decode.c) decide what happens in between. Uses the engine, the page pool
 * and the requests, and nothing of the control thread. */
#include "common/worker/core.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/log/log.h"

bool bt_wreq_ending(const struct bt_wreq *r)
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
    case BT_WREQ_FORKING: return &c->reqs.n_waiting;
    case BT_WREQ_QUEUED: return &c->reqs.n_queue;
    case BT_WREQ_LOADING:
    case BT_WREQ_PROMPT:
    case BT_WREQ_ROW: return &c->reqs.n_active;
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

bool bt_wreq_lower_class(const struct bt_wreq *a, const struct bt_wreq *than)
{
    return a->order >> 48 > than->order >> 48;
}

/* Class in the upper 16 bits, arrival in the lower 48. The last class is for late requests; no
 * priority maps to it. */
static uint64_t order_of(const struct bt_wreq *r, uint64_t arrival)
{
    int32_t c = BT_MIN(BT_MAX(r->sub->priority, INT16_MIN), INT16_MAX - 1) - INT16_MIN;
    return (r->sub->late ? (uint64_t)UINT16_MAX : (uint64_t)c) << 48 | arrival;
}

/* Inserts r by rising order. Searches from the end, where new requests belong. */
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
    for (struct bt_wreq *r = lead; r != NULL; r = r->next_choice) {
        r->order = order_of(r, c->reqs.next_order++);
        r->stage = r == lead ? BT_WREQ_OPENING : BT_WREQ_FORKING;
        r->slot = BT_WORKER_NO_SLOT;
        r->len = r->sub->n;
        bt_list_insert_tail(&c->reqs.waiting, &r->link);
        c->reqs.n_waiting++;
        lead->group.n_left++;
    }
}

void bt_wcore_enqueue(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!bt_wmask_ready(r)) {
        return;
    }
    unlink_req(c, r);
    r->stage = BT_WREQ_QUEUED;
    insert_ordered(&c->reqs.queue, r);
    c->reqs.n_queue++;
}

void bt_wcore_activate(struct bt_wcore *c, struct bt_wreq *r)
{
    unlink_req(c, r);
    r->stage = BT_WREQ_LOADING;
    insert_ordered(&c->reqs.active, r);
    c->reqs.n_active++;
}

/* ---- slot, flows and closing ---- */

static uint32_t slot_of(const struct bt_wreq *r, uint32_t i)
{
    return i == 0 ? r->slot : r->more_slots[i - 1];
}

bt_status_t bt_wcore_slot_open(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; i < r->sub->n_slots && st == BT_OK; i++) {
        st = c->vt->slot_open(c->eng, slot_of(r, i), &r->sub->params, r->tokens, r->len,
                              r->sub->n_prompt);
    }
    return st == BT_OK ? c->vt->slot_pages(c->eng, r->slot, 0, r->pages, r->n_pages) : st;
}

void bt_wcore_flow_close(struct bt_wcore *c, struct bt_wreq *r, uint32_t *flow, bool abort)
{
    if (*flow == 0) {
        return;
    }
    bt_engine_ticket_t quiet;
    bt_status_t st = c->vt->flow_close(c->eng, *flow, abort, &quiet);
    if (st != BT_OK) {
        /* Without the flow's quiet ticket its slots and pages could never be used again. */
        bt_wcore_fatal(c, st, "flow_close");
        return;
    }
    *flow = 0;
    r->pending++;
    r->flows_pending++;
    bt_wcore_ticket(c, quiet, BT_WT_FLOW, r);
}

static void close_slots(struct bt_wcore *c, struct bt_wreq *r)
{
    for (uint32_t i = 0; i < r->sub->n_slots; i++) {
        bt_engine_ticket_t quiet;
        bt_status_t st = c->vt->slot_close(c->eng, slot_of(r, i), &quiet);
        if (st != BT_OK) {
            bt_wcore_fatal(c, st, "slot_close");
            return;
        }
        r->pending++;
        bt_wcore_ticket(c, quiet, BT_WT_SLOT, r);
    }
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

/* With the pages of beams, which belong to their slots. */
static void return_slots(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->slot != BT_WORKER_NO_SLOT) {
        r->lead->group.n_holding--;
        for (uint32_t i = 0; i < r->sub->n_slots; i++) {
            c->free_slots[c->n_free_slots++] = slot_of(r, i);
        }
        r->slot = BT_WORKER_NO_SLOT;
        if (r->sub->beams.width > 0) {
            c->decode->return_beam_pages(c, r);
        }
    }
}

static void return_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_page_pool_put(c->pages, r->pages, r->n_pages);
    r->n_pages = 0;
}

void bt_wcore_drained(struct bt_wcore *c, struct bt_wreq *r)
{
    bt_list_remove(&r->link);
    c->puts.drain_pages -= r->n_pages;
    r->draining = false;
    return_pages(c, r);
    bt_wback_leave(c, r);
    if (r->forgotten) {
        bt_wreq_free(r);
    }
}

void bt_wcore_forget(struct bt_wcore *c, struct bt_wreq *r)
{
    (void)c;
    r->forgotten = true;
    if (!r->draining) { /* choices other than the lead are never set to drain */
        bt_wreq_free(r);
    }
}

static void finish_end(struct bt_wcore *c, struct bt_wreq *r)
{
    return_slots(c, r);
    bt_wgrant_close(c, r);
    bt_wlease_drop(c, r);
    count_end(c, r);
    bt_list_remove(&r->link);
    r->stage = BT_WREQ_ENDED;
    r->draining = bt_wback_drain(c, r);
    if (r->draining) {
        bt_list_insert_tail(&c->puts.draining, &r->link);
        c->puts.drain_pages += r->n_pages;
    } else {
        return_pages(c, r);
        bt_wback_leave(c, r);
    }
    struct bt_wreq *lead = r->lead;
    if (--lead->group.n_left > 0) {
        return;
    }
    c->decode->release_kept(c, lead);
    struct bt_wout o = {.kind = BT_WOUT_ENDED, .req = lead};
    o.status = lead->group.status == BT_ERR_CANCELLED ? BT_OK : lead->group.status;
    memcpy(o.detail, lead->group.detail, sizeof(o.detail));
    bt_wcore_emit(c, &o);
}

static void close_now(struct bt_wcore *c, struct bt_wreq *r)
{
    bool slot_closing = r->stage == BT_WREQ_PREEMPTING;
    if (r->stage == BT_WREQ_OPENING && !r->grant.open) {
        bt_wgrant_emit_close(c, r, true); /* the kvstore may still be preparing its answer */
    }
    unlink_req(c, r);
    r->stage = BT_WREQ_CLOSING;
    bt_list_insert_tail(&c->reqs.closing, &r->link);
    bt_wcore_flow_close(c, r, &r->load_flow, r->end_status != BT_OK);
    bt_wcore_flow_close(c, r, &r->store_flow, r->end_status != BT_OK);
    if (r->slot != BT_WORKER_NO_SLOT && !slot_closing) {
        close_slots(c, r);
    }
    if (r->pending == 0 && !c->fatal) {
        finish_end(c, r);
    }
}

static void end_choice(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st)
{
    if (bt_wreq_ending(r)) {
        return;
    }
    r->end_status = st;
    r->doomed = true;
    if (!r->in_step) { /* otherwise the end of the step closes it */
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
    if (lead->group.status == BT_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(lead->group.detail, sizeof(lead->group.detail), fmt, ap);
        va_end(ap);
        lead->group.status = st;
    }
    for (r = lead; r != NULL; r = next) {
        next = r->next_choice;
        end_choice(c, r, st);
    }
}

/* Returns whether r, a choice whose prompt the lead computes, has its prompt already. */
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
    if (bt_wreq_ending(r)) {
        return;
    }
    if (lead->group.n_left == 1 || (lead->group.n_left == 2 && lead->leaving && r != lead)) {
        bt_wcore_end(c, r, BT_ERR_CANCELLED, "cancelled"); /* that cancels the other choices too */
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

void bt_wcore_requeue(struct bt_wcore *c, struct bt_wreq *r)
{
    BT_ASSERT(r->stage == BT_WREQ_ROW && !r->in_step && r->load_flow == 0);
    unlink_req(c, r);
    r->stage = BT_WREQ_PREEMPTING;
    bt_list_insert_tail(&c->reqs.closing, &r->link);
    close_slots(c, r);
}

/* Called after each ticket of r: goes on once nothing of r is in use any more. */
static void settle(struct bt_wcore *c, struct bt_wreq *r)
{
    if (r->pending > 0) {
        return;
    }
    if (r->stage == BT_WREQ_CLOSING) {
        finish_end(c, r);
    } else if (r->stage == BT_WREQ_PREEMPTING) {
        return_pages(c, r);
        return_slots(c, r);
        r->role = &c->decode->role;
        r->resumed = true;
        bt_wlease_drop(c, r);
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
            bt_wgrant_close(c, r);
        } else if (!r->doomed) {
            r->role->quiet(c, r);
        }
    }
    settle(c, r);
}
