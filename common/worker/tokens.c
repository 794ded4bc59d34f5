/* The tokens of a step, on their way to the conductors: one buffer a step. Engine thread. */
#include <string.h>

#include "common/log/log.h"
#include "common/worker/core.h"

static struct bt_wtokens *free_buffer(const struct bt_wcore *c)
{
    for (uint32_t i = 0; i < BT_WORKER_TOKEN_BUFS; i++) {
        if (!atomic_load(&c->tokens.bufs[i].busy)) {
            return (struct bt_wtokens *)&c->tokens.bufs[i];
        }
    }
    return NULL;
}

bool bt_wcore_may_step(const struct bt_wcore *c)
{
    return free_buffer(c) != NULL;
}

void bt_wcore_emit_after(struct bt_wcore *c, const struct bt_wout *o)
{
    c->tokens.after[c->tokens.n_after++] = *o;
}

void bt_wcore_take_buffer(struct bt_wcore *c)
{
    c->tokens.now = free_buffer(c);
    BT_ASSERT(c->tokens.now != NULL); /* there was one before the step, and only this thread takes
                                         them */
    c->tokens.now->n = 0;
}

void bt_wcore_flush_tokens(struct bt_wcore *c)
{
    struct bt_wtokens *b = c->tokens.now;
    c->tokens.now = NULL;
    if (b->n > 0) {
        atomic_store(&b->busy, true);
        struct bt_wout o = {.kind = BT_WOUT_TOKENS, .u.tokens = b};
        bt_wcore_emit(c, &o);
    }
    for (uint32_t i = 0; i < c->tokens.n_after; i++) {
        bt_wcore_emit(c, &c->tokens.after[i]);
    }
    c->tokens.n_after = 0;
}

Baton__Finish bt_submission_finish(const struct bt_submission *s, uint32_t len, uint32_t token)
{
    for (uint32_t i = 0; i < s->params.n_eos; i++) {
        if (s->params.eos[i] == token) {
            return BATON__FINISH__STOP;
        }
    }
    return len >= s->len_max ? BATON__FINISH__LENGTH : BATON__FINISH__NOT_FINISHED;
}

bool bt_wcore_token(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out)
{
    if (out->bad || out->slot != r->slot || out->token >= c->info->vocab) {
        BT_ERROR("bad_token", "req=%016llx epoch=%u pos=%u token=%u",
                 (unsigned long long)r->sub->request, r->sub->epoch, r->pos, out->token);
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "the model produced no usable logits at position %u",
                     r->pos - 1);
        return false;
    }
    struct bt_wtoken *t = &c->tokens.now->t[c->tokens.now->n++];
    t->request = r->sub->request;
    t->session = r->sub->session;
    t->epoch = r->sub->epoch;
    t->choice = r->sub->choice;
    t->offset = r->len - r->sub->n;
    t->token = out->token;
    t->logprob = r->sub->logprobs >= 0 ? out->logprob : 0;
    t->n_top = r->sub->logprobs > 0 ? BT_MIN(out->n_top, (uint32_t)r->sub->logprobs) : 0;
    memcpy(t->top_id, out->top_id, t->n_top * sizeof(t->top_id[0]));
    memcpy(t->top_logprob, out->top_logprob, t->n_top * sizeof(t->top_logprob[0]));
    BT_ASSERT(r->len < r->sub->len_max);
    r->tokens[r->len++] = out->token;
    r->finish = bt_submission_finish(r->sub, r->len, out->token);
    t->finish = r->finish;
    bt_metric_add(c->stats->generation_tokens, 1);
    return true;
}
