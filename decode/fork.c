/* The choices of a submission (n > 1). The prompt is computed once, then each choice is a sequence
 * of its own. A choice shares the prompt's pages by reference. It writes into the last, partial
 * page, so it gets a copy of that one. Its first row is the last prompt token, from which it
 * samples a first token of its own. Engine thread. */
#include "decode/decode.h"

void bt_decode_fork_keep(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wreq *lead = r->lead;
    if (lead->next_choice == NULL || lead->group.n_left < 2 || lead->row->n_shared > 0) {
        return;
    }
    lead->row->n_shared = BT_DIV_UP(r->sub->n, c->block_tokens);
    for (uint32_t i = 0; i < lead->row->n_shared; i++) {
        lead->row->shared[i] = r->pages[i];
        bt_page_pool_ref(c->pages, r->pages[i]);
    }
    lead->row->lead = lead;
    bt_list_insert_tail(&c->kept_prompts, &lead->row->shared_link);
}

uint32_t bt_decode_fork_blocks(const struct bt_wreq *r)
{
    uint32_t n = r->lead->row->n_shared;
    return n > 0 ? n - 1 : 0;
}

void bt_decode_fork_take(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_row *lead = r->lead->row;
    for (uint32_t i = 0; i < bt_decode_fork_blocks(r); i++) {
        r->pages[i] = lead->shared[i];
        bt_page_pool_ref(c->pages, r->pages[i]);
    }
}

bt_status_t bt_decode_fork_copy(struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_wreq *lead = r->lead;
    uint32_t last = lead->row->n_shared - 1;
    if (lead->row->n_shared == 0) {
        r->pos = 0;
        return BT_OK;
    }
    /* The owner of the page may have written tokens behind the prompt. The prompt's tokens are
     * unchanged. */
    r->pos = r->sub->n - 1;
    uint32_t toks = r->pos - last * c->block_tokens;
    return toks > 0 ? c->vt->page_copy(c->eng, lead->row->shared[last], r->pages[last], toks)
                    : BT_OK;
}

void bt_decode_fork_start(struct bt_wcore *c, struct bt_wreq *lead)
{
    bt_decode_fork_keep(c, lead);
    for (struct bt_wreq *r = lead->next_choice; r != NULL; r = r->next_choice) {
        if (r->stage == BT_WREQ_FORKING) {
            bt_wcore_enqueue(c, r);
        }
    }
}

void bt_decode_fork_release(struct bt_wcore *c, struct bt_wreq *lead)
{
    if (lead->row->n_shared > 0) {
        bt_page_pool_put(c->pages, lead->row->shared, lead->row->n_shared);
        lead->row->n_shared = 0;
        bt_list_remove(&lead->row->shared_link);
    }
}

bool bt_decode_fork_drop(struct bt_wcore *c, const struct bt_wreq *except)
{
    for (struct bt_list *it = c->kept_prompts.prev; it != &c->kept_prompts; it = it->prev) {
        struct bt_wreq *lead = BT_CONTAINER_OF(it, struct bt_row, shared_link)->lead;
        /* While a choice has a slot, it also holds these pages, so releasing them would free
         * none. */
        if (lead->group.n_holding == 0 && (except == NULL || lead != except->lead)) {
            bt_decode_fork_release(c, lead);
            return true;
        }
    }
    return false;
}
