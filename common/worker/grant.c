/* Grants: the slots that the node's kvstore has opened for a request in its slab, and the slab
 * itself. A writer (prefill) fills its grant, a reader (decode) loads from it. This file checks,
 * opens and closes grants for both. Engine thread. */
#include <stdatomic.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "common/worker/core.h"

/* ---- the grant ---- */

void bt_wgrant_emit_close(struct bt_wcore *c, const struct bt_wreq *r, bool abort)
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
    /* If a prompt is larger than the slab, only its beginning goes through the slab. Such a prompt
     * is not handed off. */
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

void bt_wgrant_opened(struct bt_wcore *c, const struct bt_wcmd *cmd)
{
    struct bt_wreq *r = cmd->req;
    struct bt_wgrant *g = cmd->u.grant;
    bool here = c->slab != NULL && c->slab->attach == r->sub->attach;
    if (r->stage != BT_WREQ_OPENING || !here) {
        free(g); /* the request ended before the answer came; LocalClose has been sent */
        return;
    }
    if (g == NULL) {
        bt_wcore_end(c, r, cmd->status, "kvstore: %s", cmd->detail);
        return;
    }
    r->grant.terms = g;
    r->grant.open = true;
    r->grant.slab = c->slab;
    r->grant.slab->refs++;
    if (!grant_fits(c, r, g)) {
        bt_wcore_end(c, r, BT_ERR_PEER_PROTOCOL,
                     "the kvstore's grant does not fit the submission: tokens %u/%u, slots %u, "
                     "resident %u, chunk %u; set the same kv.block_tokens in conductor and kvstore",
                     g->n_tokens, r->sub->n, g->n_slots, g->resident_blocks, g->chunk_tokens);
        return;
    }
    if (!bt_wgrant_valid(r, 0, g->n_slots)) {
        bt_wcore_end(c, r, BT_ERR_STALE,
                     "the kvstore has given a slot of the grant to another request");
        return;
    }
    r->oversized = g->n_tokens < r->sub->n && !r->sub->no_cache;
    for (struct bt_wreq *k = r; k != NULL; k = k->next_choice) {
        /* If only part of the prompt is in the grant, blocks generated behind it cannot be found in
         * the pool: there is a gap. So write-back is off for them ... */
        bt_wback_restart(k, k->wback.from, g->n_tokens < r->sub->n);
    }
    if (r->oversized) { /* ... except for this request: it writes the missing blocks itself */
        bt_wback_restart(r, g->n_slots, false);
    }
    r->role->opened(c, r);
}

bool bt_wgrant_slot_valid(const struct bt_wreq *r, uint32_t slot, uint32_t generation)
{
    uint64_t w =
        atomic_load_explicit(&r->grant.slab->slab->headers[slot].state, memory_order_acquire);
    bt_slot_state_t s = bt_slot_state(w);
    return bt_slot_generation(w) == generation && (s == BT_SLOT_WRITING || s == BT_SLOT_SEALED);
}

bool bt_wgrant_valid(const struct bt_wreq *r, uint32_t first, uint32_t end)
{
    const struct bt_wgrant *g = r->grant.terms;
    for (uint32_t i = first; i < end; i++) {
        if (!bt_wgrant_slot_valid(r, g->slots[i], bt_wgrant_gens(g)[i])) {
            return false;
        }
    }
    return true;
}

void bt_wgrant_trailer(struct bt_wreq *r, uint32_t first_token)
{
    r->grant.trailer_due = true;
    r->grant.first_token = first_token;
}

void bt_wgrant_close(struct bt_wcore *c, struct bt_wreq *r)
{
    if (!r->grant.open) {
        return;
    }
    BT_ASSERT(r->load_flow == 0 && r->store_flow == 0 && r->flows_pending == 0);
    bool abort = r->end_status != BT_OK;
    if (r->grant.trailer_due && !abort) {
        struct bt_wout o = {.kind = BT_WOUT_TRAILER, .attach = r->sub->attach};
        o.u.local.request = r->sub->request;
        o.u.local.epoch = r->sub->epoch;
        o.u.local.first_token = r->grant.first_token;
        o.u.local.finished = r->finish != BATON__FINISH__NOT_FINISHED;
        o.u.local.last_compute_ns = r->last_compute_ns;
        bt_wcore_emit(c, &o);
    }
    r->grant.trailer_due = false;
    bt_wgrant_emit_close(c, r, abort);
    r->grant.open = false;
    bt_wslab_put(r->grant.slab);
    r->grant.slab = NULL;
    free(r->grant.terms);
    r->grant.terms = NULL;
}

/* ---- the kvstore comes and goes ---- */

void bt_wcore_attached(struct bt_wcore *c, struct bt_wslab *s)
{
    BT_ASSERT(c->slab == NULL);
    c->slab = s;
    s->refs = 1; /* the worker's own reference, until it detaches */
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
        if ((r->grant.open || r->stage == BT_WREQ_OPENING) && !bt_wreq_ending(r)) {
            return r;
        }
    }
    return NULL;
}

/* Starts again at the list's head after each end, as an end also removes the request's other
 * choices. Rows that use only engine pages go on. */
static void fail_grants(struct bt_wcore *c, const struct bt_list *head)
{
    struct bt_wreq *r;
    while ((r = next_with_grant(head)) != NULL) {
        bt_wcore_end(c, r, BT_ERR_PEER_LOST, "the kvstore of this node has ended");
    }
}

void bt_wcore_detached(struct bt_wcore *c)
{
    struct bt_wslab *s = c->slab;
    if (s == NULL) {
        return;
    }
    fail_grants(c, &c->reqs.waiting);
    fail_grants(c, &c->reqs.queue);
    fail_grants(c, &c->reqs.active);
    fail_grants(c, &c->reqs.closing); /* rows that are being preempted; requests that close need no
                                         help */
    bt_wlease_detached(c);
    bt_wback_detached(c);
    c->slab = NULL;
    s->dead = true;
    bt_wslab_put(s);
}

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
