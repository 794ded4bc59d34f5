/* The choices of a submission (n > 1): one prefill, then every choice is a sequence of its own. A
 * choice shares the prompt's blocks by page reference but for the last one, the tail: of that it
 * gets a copy, since it writes there. Its first row is the last prompt token, from which it samples
 * its own first token. Engine thread. */
#include "common/worker/core.h"

void bt_wfork_keep(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wreq *lead = r->lead;
    if (lead->next_choice == NULL || lead->n_left < 2 || lead->n_shared > 0) {
        return;
    }
    lead->n_shared = BT_DIV_UP(r->sub->n, c->block_tokens);
    for (uint32_t i = 0; i < lead->n_shared; i++) {
        lead->shared[i] = r->pages[i];
        bt_page_pool_ref(c->pages, r->pages[i]);
    }
    bt_list_insert_tail(&c->shared, &lead->shared_link);
}

uint32_t bt_wfork_take(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wreq *lead = r->lead;
    uint32_t n = lead->n_shared > 0 ? lead->n_shared - 1 : 0;
    for (uint32_t i = 0; i < n; i++) {
        r->pages[i] = lead->shared[i];
        bt_page_pool_ref(c->pages, r->pages[i]);
    }
    return n;
}

bt_status_t bt_wfork_copy(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wreq *lead = r->lead;
    uint32_t tail = lead->n_shared - 1;
    if (lead->n_shared == 0) {
        r->pos = 0;
        return BT_OK;
    }
    /* Whoever owns the tail may have gone on behind the prompt: its tokens are still there. */
    r->pos = r->sub->n - 1;
    uint32_t toks = r->pos - tail * c->block_tokens;
    return toks > 0 ? c->vt->page_copy(c->eng, lead->shared[tail], r->pages[tail], toks) : BT_OK;
}

void bt_wfork_start(struct bt_wcore *c, struct bt_wreq *lead)
{
    bt_wfork_keep(c, lead);
    for (struct bt_wreq *r = lead->next_choice; r != NULL; r = r->next_choice) {
        if (r->stage == BT_WREQ_FORKING) {
            bt_wcore_enqueue(c, r);
        }
    }
}

void bt_wfork_release(struct bt_wcore *c, struct bt_wreq *lead)
{
    if (lead->n_shared > 0) {
        bt_page_pool_put(c->pages, lead->shared, lead->n_shared);
        lead->n_shared = 0;
        bt_list_remove(&lead->shared_link);
    }
}

bool bt_wfork_drop(struct bt_wcore *c, const struct bt_wreq *except)
{
    for (struct bt_list *it = c->shared.prev; it != &c->shared; it = it->prev) {
        struct bt_wreq *lead = BT_CONTAINER_OF(it, struct bt_wreq, shared_link);
        /* While a choice holds a slot it holds these pages too: nothing would come free. */
        if (lead->n_holding == 0 && (except == NULL || lead != except->lead)) {
            bt_wfork_release(c, lead);
            return true;
        }
    }
    return false;
}
