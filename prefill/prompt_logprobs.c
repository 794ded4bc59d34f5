/* Logprobs of prompt tokens: the engine reports them while it computes a prompt, and the worker
 * sends them to the conductor in order. Engine thread. */
#include <string.h>

#include "prefill/prefill.h"

/* Copies the logprobs of one row's prompt tokens into messages of a bounded size. */
static void report_prompt(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out,
                          uint32_t n)
{
    for (uint32_t at = 0; at < n; at += BT_WORKER_PROMPT_MSG) {
        uint32_t m = BT_MIN(n - at, (uint32_t)BT_WORKER_PROMPT_MSG);
        struct bt_wprompt *p = bt_calloc(1, sizeof(*p) + m * sizeof(p->t[0]));
        p->request = r->sub->request;
        p->session = r->sub->session;
        p->epoch = r->sub->epoch;
        p->first = out[at].pos;
        p->n = m;
        for (uint32_t i = 0; i < m; i++) {
            const struct bt_engine_out *o = &out[at + i];
            p->t[i].token = o->token;
            p->t[i].logprob = o->logprob;
            p->t[i].rank = o->rank;
            p->t[i].n_top = BT_MIN(o->n_top, r->sub->prompt_top);
            memcpy(p->t[i].top_id, o->top_id, p->t[i].n_top * sizeof(o->top_id[0]));
            memcpy(p->t[i].top_logprob, o->top_logprob, p->t[i].n_top * sizeof(o->top_logprob[0]));
        }
        struct bt_wout w = {.kind = BT_WOUT_PROMPT_LOGPROBS, .u.prompt = p};
        bt_wcore_emit(c, &w);
    }
}

void bt_prefill_logprobs(struct bt_wcore *c, const struct bt_engine_event *ev)
{
    const struct bt_wstep *s = &c->step;
    uint32_t at = 0;
    for (uint32_t i = 0; i < s->n_rows && at < ev->n_out; i++) {
        struct bt_wreq *r = s->reqs[i];
        uint32_t n = 0;
        bool bad = false;
        if (!(s->erows[i].flags & BT_ROW_PROMPT_LOGPROBS)) {
            continue;
        }
        while (at + n < ev->n_out && ev->out[at + n].slot == s->erows[i].slot) {
            bad = bad || ev->out[at + n].bad;
            n++;
        }
        if (bad) {
            bt_wcore_end(c, r, BT_ERR_INTERNAL,
                         "the model produced no usable logits for the "
                         "prompt");
        } else if (!r->doomed) {
            report_prompt(c, r, ev->out + at, n);
        }
        at += n;
    }
}
