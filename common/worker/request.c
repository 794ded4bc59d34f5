/* Making and freeing requests: one allocation for each choice, with what was asked for, its tokens
 * and its page table. Either thread: whoever has the request. */
#include "common/worker/request.h"

#include <stdlib.h>
#include <string.h>

/* The allocation: u holds tokens [tokens_max], pages [pages_max], shared [blocks of the prompt] and
 * the two bias arrays. */
struct bt_wreq_mem {
    struct bt_wreq r;
    struct bt_submission sub;
    uint32_t u[];
};

static struct bt_wreq *alloc(const struct bt_submission *s, uint32_t n_bias, uint32_t block_tokens)
{
    uint32_t last = BT_MAX(s->n, s->len_max), pages = BT_DIV_UP(last, block_tokens),
             shared = BT_DIV_UP(s->n, block_tokens);
    struct bt_wreq_mem *m =
        bt_calloc(1, sizeof(*m) + 4 * ((size_t)last + 1 + pages + shared + 2 * (size_t)n_bias));
    struct bt_wreq *r = &m->r;
    m->sub = *s;
    r->sub = &m->sub;
    r->tokens = m->u;
    r->pages = r->tokens + last + 1;
    r->shared = r->pages + pages;
    if (n_bias > 0) {
        uint32_t *ids = r->shared + shared;
        float *bias = (float *)(ids + n_bias);
        memcpy(ids, s->params.bias_ids, n_bias * sizeof(ids[0]));
        memcpy(bias, s->params.bias, n_bias * sizeof(bias[0]));
        m->sub.params.bias_ids = ids;
        m->sub.params.bias = bias;
    }
    r->wb_from = s->n / block_tokens;
    bt_list_init(&r->ctl.link);
    bt_list_init(&r->link);
    bt_list_init(&r->shared_link);
    return r;
}

struct bt_wreq *bt_wreq_alloc(const struct bt_submission *s, const void *tokens,
                              uint32_t block_tokens)
{
    struct bt_wreq *r = alloc(s, s->params.n_bias, block_tokens);
    r->lead = r;
    memcpy(r->tokens, tokens, s->n * sizeof(r->tokens[0]));
    return r;
}

void bt_wreq_add_choice(struct bt_wreq *lead, uint32_t choice, uint32_t block_tokens)
{
    struct bt_submission s = *lead->sub; /* its bias arrays stay the lead's */
    struct bt_wreq *last = lead;
    s.choice = s.params.choice = choice;
    s.prompt_logprobs = false;
    s.prompt_top = 0;
    struct bt_wreq *r = alloc(&s, 0, block_tokens);
    r->lead = lead;
    memcpy(r->tokens, lead->tokens, s.n * sizeof(r->tokens[0]));
    while (last->next_choice != NULL) {
        last = last->next_choice;
    }
    last->next_choice = r;
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
