/* The choices of a submission (n > 1): one prefill, then every choice is a sequence of its own. A
 * choice shares the prompt's blocks by page reference but for the last one, the tail: of that it
 * gets a copy, since it writes there. Its first row is the last prompt token, from which it samples
 * its own first token. Engine thread, but for the making and freeing of requests. */
#include <stdlib.h>
#include <string.h>

#include "common/worker/core.h"

struct bt_wreq *bt_wreq_alloc(uint32_t n, uint32_t len_max, uint32_t block_tokens, uint32_t n_bias)
{
    uint32_t last = BT_MAX(n, len_max), pages = BT_DIV_UP(last, block_tokens),
             shared = BT_DIV_UP(n, block_tokens);
    struct bt_wreq *r =
        bt_calloc(1, sizeof(*r) + 4 * ((size_t)last + 1 + pages + shared + 2 * (size_t)n_bias));
    r->pages = r->tokens + last + 1;
    r->shared = r->pages + pages;
    r->n = n;
    r->len_max = len_max;
    r->wb_from = n / block_tokens;
    r->lead = r;
    if (n_bias > 0) {
        r->params.n_bias = n_bias;
        r->params.bias_ids = r->shared + shared;
        r->params.bias = (const float *)(r->shared + shared + n_bias);
    }
    bt_list_init(&r->ctl_link);
    bt_list_init(&r->link);
    bt_list_init(&r->shared_link);
    return r;
}

void bt_wreq_add_choice(struct bt_wreq *lead, uint32_t choice, uint32_t block_tokens)
{
    struct bt_wreq *r = bt_wreq_alloc(lead->n, lead->len_max, block_tokens, 0), *last = lead;
    r->request = lead->request;
    r->epoch = lead->epoch;
    r->choice = choice;
    r->phases = lead->phases;
    r->session = lead->session;
    r->deadline_ns = lead->deadline_ns;
    r->arrived_ns = lead->arrived_ns;
    r->n_prompt = lead->n_prompt;
    r->max_new = lead->max_new;
    r->no_cache = lead->no_cache;
    r->tenant = lead->tenant;
    r->priority = lead->priority;
    r->late = lead->late;
    r->logprobs = lead->logprobs;
    r->root = lead->root;
    r->params = lead->params;
    r->params.choice = choice;
    r->attach = lead->attach;
    memcpy(r->tokens, lead->tokens, lead->n * sizeof(r->tokens[0]));
    while (last->next_choice != NULL) {
        last = last->next_choice;
    }
    last->next_choice = r;
    r->lead = lead;
}

uint32_t bt_wreq_choices(const struct bt_wreq *lead)
{
    uint32_t n = 0;
    for (; lead != NULL; lead = lead->next_choice) {
        n++;
    }
    return n;
}

void bt_wreq_free(struct bt_wreq *lead)
{
    while (lead != NULL) {
        struct bt_wreq *next = lead->next_choice;
        bt_wreq_tail_free(lead);
        free(lead->grant);
        free(lead->lease);
        free(lead);
        lead = next;
    }
}

/* ---- the shared pages ---- */

void bt_wfork_keep(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_wreq *lead = r->lead;
    if (lead->next_choice == NULL || lead->n_left < 2 || lead->n_shared > 0) {
        return;
    }
    lead->n_shared = BT_DIV_UP(r->n, c->block_tokens);
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
    r->pos = r->n - 1;
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
