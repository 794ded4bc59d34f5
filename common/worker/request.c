/* Makes and frees requests. Each choice is one allocation with the submission, its tokens and its
 * page table. Any thread that owns the request. */
#include "common/worker/core.h"

#include <stdlib.h>
#include <string.h>

/* One allocation: the request, its submission, the roles' states, then 32-bit words. */
struct bt_wreq_mem {
    struct bt_wreq r;
    struct bt_submission sub;
    uint64_t states[];
};

static size_t words64(size_t bytes)
{
    return BT_DIV_UP(bytes, sizeof(uint64_t));
}

static struct bt_wreq *alloc(const struct bt_wcore *c, const struct bt_submission *s,
                             uint32_t n_bias)
{
    uint32_t last = BT_MAX(s->n, s->len_max), pages = BT_DIV_UP(last, c->block_tokens);
    size_t words = (size_t)last + 1 + pages + 2 * (size_t)n_bias + s->n_slots,
           prompt = words64(c->prefill->state_bytes), row = words64(c->decode->state_bytes(c, s));
    struct bt_wreq_mem *m = bt_calloc(1, sizeof(*m) + 8 * (prompt + row) + 4 * words);
    struct bt_wreq *r = &m->r;
    m->sub = *s;
    r->sub = &m->sub;
    r->prompt = (struct bt_prompt *)m->states;
    r->row = (struct bt_row *)(m->states + prompt);
    r->tokens = (uint32_t *)(m->states + prompt + row);
    r->pages = r->tokens + last + 1;
    r->more_slots = r->pages + pages;
    if (n_bias > 0) {
        uint32_t *ids = r->more_slots + s->n_slots;
        float *bias = (float *)(ids + n_bias);
        memcpy(ids, s->params.bias_ids, n_bias * sizeof(ids[0]));
        memcpy(bias, s->params.bias, n_bias * sizeof(bias[0]));
        m->sub.params.bias_ids = ids;
        m->sub.params.bias = bias;
    }
    r->wback.from = s->n / c->block_tokens;
    bt_list_init(&r->ctl.link);
    bt_list_init(&r->link);
    return r;
}

struct bt_wreq *bt_wreq_alloc(const struct bt_wcore *c, const struct bt_submission *s,
                              const void *tokens)
{
    struct bt_wreq *r = alloc(c, s, s->params.n_bias);
    r->lead = r;
    r->role = s->phases == BATON__PHASES__DECODE ? &c->decode->role : &c->prefill->role;
    memcpy(r->tokens, tokens, s->n * sizeof(r->tokens[0]));
    return r;
}

void bt_wreq_add_choice(const struct bt_wcore *c, struct bt_wreq *lead, uint32_t choice)
{
    struct bt_submission s = *lead->sub; /* the lead keeps the bias arrays */
    struct bt_wreq *last = lead;
    s.choice = s.params.choice = choice;
    s.prompt_logprobs = false;
    s.prompt_top = 0;
    struct bt_wreq *r = alloc(c, &s, 0);
    r->lead = lead;
    r->role = &c->decode->role;
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
        if (lead->role->release != NULL) {
            lead->role->release(lead);
        }
        if (lead == lead->lead) {
            bt_wgrammar_unref(lead->sub->grammar);
            free(lead->sub->prediction);
        }
        bt_matcher_destroy(lead->match.matcher);
        bt_wahead_destroy(lead->match.ahead);
        free(lead->grant.terms);
        free(lead->lease.got);
        free(lead);
        lead = next;
    }
}
