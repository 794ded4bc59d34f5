/* Turns messages of workers and kvstores into events of the request machine. Loop thread. */
#include "conductor/request/receive.h"

#include <stdlib.h>

static struct bt_event event_of(bt_event_type_t type, struct bt_session *s, uint64_t request,
                                uint32_t epoch)
{
    return (struct bt_event){.type = type, .from = &s->peer, .request = request, .epoch = epoch};
}

static bt_token_finish_t finish_of(Baton__Finish f)
{
    switch (f) {
    case BATON__FINISH__STOP: return BT_TOKEN_STOP;
    case BATON__FINISH__LENGTH: return BT_TOKEN_LENGTH;
    case BATON__FINISH__ERROR: return BT_TOKEN_ERROR;
    case BATON__FINISH__NOT_FINISHED:
    case _BATON__FINISH_IS_INT_SIZE: break;
    }
    return BT_TOKEN_GOES_ON;
}

static void take_token(struct bt_machine *mc, struct bt_session *s, const Baton__Token *t,
                       uint64_t now_ns)
{
    struct bt_journal_entry e;
    e.epoch = t->epoch;
    e.token = t->token;
    e.logprob = t->logprob;
    e.finish = finish_of(t->finish);
    e.n_top = (uint32_t)BT_MIN(t->n_top, (size_t)BT_ENGINE_MAX_TOP);
    for (uint32_t i = 0; i < e.n_top; i++) {
        e.top_id[i] = t->top[i]->id;
        e.top_logprob[i] = t->top[i]->logprob;
    }
    struct bt_event ev = event_of(BT_EV_TOKEN, s, t->request, t->epoch);
    ev.token.choice = t->choice;
    ev.token.offset = t->offset;
    ev.token.at = &e;
    bt_machine_event(mc, &ev, now_ns);
}

static void take_prompt(struct bt_machine *mc, struct bt_session *s, const Baton__PromptLogprobs *m,
                        uint64_t now_ns)
{
    size_t n = m->n_tokens, n_top = 0;
    for (size_t i = 0; i < n; i++) {
        n_top += m->tokens[i]->n_top;
    }
    struct bt_prompt_logprob *at = bt_malloc((n + 1) * sizeof(*at));
    uint32_t *id = bt_malloc((n_top + 1) * sizeof(*id)), *next_id = id;
    float *logprob = bt_malloc((n_top + 1) * sizeof(*logprob)), *next_logprob = logprob;
    for (size_t i = 0; i < n; i++) {
        const Baton__PromptLogprob *p = m->tokens[i];
        at[i] = (struct bt_prompt_logprob){.token = p->token,
                                           .rank = p->rank,
                                           .logprob = p->logprob,
                                           .n_top = (uint32_t)p->n_top,
                                           .top_id = next_id,
                                           .top_logprob = next_logprob};
        for (size_t k = 0; k < p->n_top; k++) {
            *next_id++ = p->top[k]->id;
            *next_logprob++ = p->top[k]->logprob;
        }
    }
    struct bt_event ev = event_of(BT_EV_PROMPT, s, m->request, m->epoch);
    ev.prompt.first = m->first;
    ev.prompt.n = (uint32_t)n;
    ev.prompt.at = at;
    bt_machine_event(mc, &ev, now_ns);
    free(at);
    free(id);
    free(logprob);
}

static void take_prefill_done(struct bt_machine *mc, struct bt_session *s,
                              const Baton__PrefillDone *m, uint64_t now_ns)
{
    struct bt_event ev = event_of(BT_EV_PREFILL_DONE, s, m->request, m->epoch);
    ev.prefill_done.cached_tokens = m->cached_tokens;
    ev.prefill_done.start_ns = m->start_ns;
    ev.prefill_done.last_compute_ns = m->last_compute_ns;
    bt_machine_event(mc, &ev, now_ns);
}

static void take_ended(struct bt_machine *mc, struct bt_session *s, const Baton__Ended *m,
                       uint64_t now_ns)
{
    struct bt_event ev = event_of(BT_EV_ENDED, s, m->request, m->epoch);
    ev.status = m->status;
    ev.detail = m->detail;
    bt_machine_event(mc, &ev, now_ns);
}

void bt_receive_worker(struct bt_machine *mc, struct bt_session *s, const Baton__FromWorker *m,
                       uint64_t now_ns, void (*apply)(void *arg), void *arg)
{
    if (m->m_case == BATON__FROM_WORKER__M_TOKENS) {
        for (size_t i = 0; i < m->tokens->n_tokens; i++) {
            take_token(mc, s, m->tokens->tokens[i], now_ns);
            apply(arg);
        }
        return;
    }
    if (m->m_case == BATON__FROM_WORKER__M_PROMPT_LOGPROBS) {
        take_prompt(mc, s, m->prompt_logprobs, now_ns);
    } else if (m->m_case == BATON__FROM_WORKER__M_PREFILL_DONE) {
        take_prefill_done(mc, s, m->prefill_done, now_ns);
    } else if (m->m_case == BATON__FROM_WORKER__M_RECEIVED) {
        struct bt_event ev = event_of(BT_EV_RECEIVED, s, m->received->request, m->received->epoch);
        bt_machine_event(mc, &ev, now_ns);
    } else if (m->m_case == BATON__FROM_WORKER__M_SEARCHING) {
        const Baton__Searching *g = m->searching;
        struct bt_event ev = event_of(BT_EV_SEARCHING, s, g->request, g->epoch);
        bt_machine_event(mc, &ev, now_ns);
    } else if (m->m_case == BATON__FROM_WORKER__M_ENDED) {
        take_ended(mc, s, m->ended, now_ns);
    }
    apply(arg);
}

static void take_reserved(struct bt_machine *mc, struct bt_session *s, const Baton__Reserved *m,
                          uint64_t now_ns)
{
    struct bt_event ev = event_of(BT_EV_RESERVED, s, m->request, m->epoch);
    ev.status = m->status;
    ev.detail = m->detail;
    bt_machine_event(mc, &ev, now_ns);
}

static void take_flow_done(struct bt_machine *mc, struct bt_session *s, const Baton__FlowDone *m,
                           uint64_t now_ns)
{
    struct bt_event ev = event_of(BT_EV_FLOW_DONE, s, m->request, m->epoch);
    ev.flow_done.first_ns = m->first_ns;
    ev.flow_done.last_ns = m->last_ns;
    ev.flow_done.bytes = m->bytes;
    ev.flow_done.segments = m->segments;
    bt_machine_event(mc, &ev, now_ns);
}

static void take_grant_failed(struct bt_machine *mc, struct bt_session *s,
                              const Baton__GrantFailed *m, uint64_t now_ns)
{
    struct bt_event ev = event_of(BT_EV_GRANT_FAILED, s, m->request, m->epoch);
    ev.status = m->status;
    ev.detail = m->detail;
    bt_machine_event(mc, &ev, now_ns);
}

void bt_receive_kvstore(struct bt_machine *mc, struct bt_session *s, const Baton__FromKvstore *m,
                        uint64_t now_ns, void (*apply)(void *arg), void *arg)
{
    if (m->m_case == BATON__FROM_KVSTORE__M_RESERVED) {
        take_reserved(mc, s, m->reserved, now_ns);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_FLOW_DONE) {
        take_flow_done(mc, s, m->flow_done, now_ns);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_GRANT_FAILED) {
        take_grant_failed(mc, s, m->grant_failed, now_ns);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_REPLICATED) {
        struct bt_event ev = event_of(BT_EV_REPLICATED, s, m->replicated->id, 0);
        ev.replicated_blocks = m->replicated->blocks;
        bt_machine_event(mc, &ev, now_ns);
    }
    apply(arg);
}
