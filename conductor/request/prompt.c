/* Logprobs of a prompt; see prompt.h. */
#include "conductor/request/prompt.h"

#include <math.h>
#include <stdlib.h>

struct bt_prompt {
    size_t n, got;
    uint32_t top;
    struct bt_gen_token *tokens; /* [n] */
    uint32_t *top_id;            /* [n, top] */
    float *top_logprob;          /* [n, top] */
};

struct bt_prompt *bt_prompt_create(const struct bt_tokens *prompt, uint32_t top)
{
    struct bt_prompt *p = bt_calloc(1, sizeof(*p));
    p->n = prompt->n;
    p->top = BT_MIN(top, (uint32_t)BT_ENGINE_MAX_TOP);
    p->tokens = bt_calloc(p->n, sizeof(*p->tokens));
    p->top_id = bt_calloc(p->n * p->top + 1, sizeof(*p->top_id));
    p->top_logprob = bt_calloc(p->n * p->top + 1, sizeof(*p->top_logprob));
    for (size_t i = 0; i < p->n; i++) {
        p->tokens[i].id = prompt->ids[i];
        p->tokens[i].logprob = NAN;
        p->tokens[i].top_id = p->top_id + i * p->top;
        p->tokens[i].top_logprob = p->top_logprob + i * p->top;
    }
    bt_prompt_begin(p);
    return p;
}

void bt_prompt_destroy(struct bt_prompt *p)
{
    if (p == NULL) {
        return;
    }
    free(p->tokens);
    free(p->top_id);
    free(p->top_logprob);
    free(p);
}

void bt_prompt_begin(struct bt_prompt *p)
{
    p->got = BT_MIN(p->n, (size_t)1);
}

bool bt_prompt_add(struct bt_prompt *p, const struct bt_prompt_logprob *at, uint32_t first,
                   uint32_t n)
{
    if (first != p->got || n > p->n - p->got) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        const struct bt_prompt_logprob *from = &at[i];
        struct bt_gen_token *to = &p->tokens[p->got + i];
        if (from->token != to->id) {
            return false;
        }
        to->logprob = from->logprob;
        to->rank = from->rank;
        to->n_top = (uint32_t)BT_MIN(from->n_top, p->top);
        for (uint32_t k = 0; k < to->n_top; k++) {
            p->top_id[(p->got + i) * p->top + k] = from->top_id[k];
            p->top_logprob[(p->got + i) * p->top + k] = from->top_logprob[k];
        }
    }
    p->got += n;
    return true;
}

bool bt_prompt_complete(const struct bt_prompt *p)
{
    return p->got == p->n;
}

const struct bt_gen_token *bt_prompt_tokens(const struct bt_prompt *p)
{
    return p->tokens;
}
