/* Turns the request machine's actions into messages and callbacks. Only this file tells workers,
 * kvstores and clients about requests. Loop thread. */
#include "conductor/request/send.h"

#include "conductor/request/sources.h"
#include "conductor/view/view.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens travel as little-endian words");

/* The result needs no check: a session that can take no more messages breaks, and the daemon then
 * ends everything that came over it. */
static void to_worker(struct bt_peer *to, Baton__ToWorker__MCase what, void *message)
{
    Baton__ToWorker m = BATON__TO_WORKER__INIT;
    m.m_case = what;
    m.submit = message; /* the members of the union are pointers of one size */
    (void)bt_session_send_worker(bt_session_of_peer(to), &m);
}

static void to_kvstore(struct bt_peer *to, Baton__ToKvstore__MCase what, void *message)
{
    Baton__ToKvstore m = BATON__TO_KVSTORE__INIT;
    m.m_case = what;
    m.reserve = message;
    (void)bt_session_send_kvstore(bt_session_of_peer(to), &m);
}

/* Writes messages that point into s: source[BT_SOURCES_MAX], list[BT_SOURCES_MAX]. Returns their
 * number. */
static size_t pack_sources(const struct bt_sources *s, Baton__Source *source, Baton__Source **list)
{
    for (uint32_t i = 0; s != NULL && i < s->n; i++) {
        const struct bt_source *f = &s->at[i];
        const Baton__Member *peer = bt_session_of_peer(f->kv)->member;
        list[i] = &source[i];
        baton__source__init(list[i]);
        list[i]->peer = peer->name;
        list[i]->peer_rpc = peer->rpc;
        list[i]->peer_incarnation = peer->incarnation;
        list[i]->n_first = list[i]->n_count = f->n_runs;
        list[i]->first = f->first;
        list[i]->count = f->count;
    }
    return s != NULL ? s->n : 0;
}

static char *text_of(const char *tenant)
{
    return tenant != NULL ? (char *)tenant : (char *)"";
}

static void send_reserve(const struct bt_action *a)
{
    const struct bt_action_plan *p = &a->reserve.plan;
    Baton__Reserve v = BATON__RESERVE__INIT;
    Baton__Source source[BT_SOURCES_MAX], *sources[BT_SOURCES_MAX];
    v.request = a->id;
    v.epoch = a->epoch;
    v.role = BATON__GRANT_ROLE__WRITE;
    v.keys.data = (uint8_t *)p->keys;
    v.keys.len = (size_t)(a->reserve.n_tokens / p->block_tokens) * sizeof(*p->keys);
    v.n_tokens = a->reserve.n_tokens;
    v.keep = a->reserve.keep;
    v.streams = a->reserve.streams;
    v.no_cache = bt_request_spec(p->r)->no_cache;
    v.tenant = text_of(bt_request_spec(p->r)->tenant);
    v.left_ms = p->left_ms;
    v.prefill_tokens_per_s = a->reserve.prefill_tokens_per_s;
    v.sources = sources;
    v.n_sources = pack_sources(a->reserve.from, source, sources);
    if (a->reserve.peer != NULL) {
        const Baton__Member *peer = bt_session_of_peer(a->reserve.peer)->member;
        v.role = BATON__GRANT_ROLE__RECEIVE;
        v.peer = peer->name;
        v.peer_rpc = peer->rpc;
        v.peer_incarnation = peer->incarnation;
    }
    to_kvstore(a->to, BATON__TO_KVSTORE__M_RESERVE, &v);
}

/* dola: [BT_ENGINE_DOLA_MAX], which s points to. */
static void fill_sampling(const struct bt_action *a, Baton__Sampling *s, uint32_t *dola)
{
    const struct bt_engine_params *p = &bt_request_spec(a->submit.plan.r)->sampling;
    s->temperature = p->temperature;
    s->top_p = p->top_p;
    s->top_k = p->top_k;
    s->min_p = p->min_p;
    s->repetition_penalty = p->repetition_penalty;
    s->frequency_penalty = p->frequency_penalty;
    s->presence_penalty = p->presence_penalty;
    s->seed = p->seed;
    s->logprobs = p->logprobs;
    s->max_new = a->submit.max_new;
    s->min_new = p->min_new; /* both count from the prompt's end */
    s->n_stop_ids = p->n_eos;
    s->stop_ids = (uint32_t *)p->eos;
    s->n_bias_ids = s->n_bias = p->n_bias;
    s->bias_ids = (uint32_t *)p->bias_ids;
    s->bias = (float *)p->bias;
    s->penalty_alpha = p->penalty_alpha;
    s->typical_p = p->typical_p;
    s->xtc_probability = p->xtc_probability;
    s->xtc_threshold = p->xtc_threshold;
    s->n_dola_layers = p->n_dola;
    s->dola_layers = dola;
    for (uint32_t i = 0; i < p->n_dola; i++) {
        dola[i] = p->dola[i];
    }
}

static Baton__Marker marker_of(const struct bt_gen_marker *m)
{
    Baton__Marker v = BATON__MARKER__INIT;
    v.text = (char *)m->text;
    v.is_token = m->is_token;
    v.id = m->id;
    return v;
}

static void send_submit(const struct bt_action *a)
{
    static const Baton__Phases phases[] = {[BT_PHASES_PREFILL] = BATON__PHASES__PREFILL,
                                           [BT_PHASES_DECODE] = BATON__PHASES__DECODE,
                                           [BT_PHASES_BOTH] = BATON__PHASES__BOTH};
    const struct bt_action_plan *p = &a->submit.plan;
    const struct bt_gen_spec *spec = bt_request_spec(p->r);
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    uint32_t dola[BT_ENGINE_DOLA_MAX];
    fill_sampling(a, &sampling, dola);
    Baton__Submit v = BATON__SUBMIT__INIT;
    v.request = a->id;
    v.epoch = a->epoch;
    v.phases = phases[a->submit.phases];
    v.tokens.data = (uint8_t *)p->tokens;
    v.tokens.len = (size_t)p->n_tokens * sizeof(*p->tokens);
    v.n_prompt = (uint32_t)spec->prompt.n;
    v.choice = a->submit.choice;
    v.n = a->submit.n;
    v.sampling = &sampling;
    v.left_ms = p->left_ms;
    v.root_key.data = (uint8_t *)bt_request_root(p->r)->b;
    v.root_key.len = sizeof(struct bt_kv_key);
    v.no_cache = spec->no_cache;
    v.priority = a->submit.priority;
    v.late = a->submit.late;
    v.speculation = spec->speculation;
    v.tenant = bt_kv_tenant_tag(text_of(spec->tenant));
    v.prompt_logprobs = a->submit.prompt_logprobs;
    v.prompt_top = v.prompt_logprobs ? spec->prompt_top : 0;
    v.beams = spec->beams.width;
    v.length_penalty = spec->beams.length_penalty;
    v.early_stopping = spec->beams.stop;
    if (spec->grammar != NULL) {
        v.grammar_kind = spec->grammar->kind;
        v.grammar.data = (uint8_t *)spec->grammar->text;
        v.grammar.len = spec->grammar->len;
    }
    v.prediction.data = (uint8_t *)spec->prediction.ids;
    v.prediction.len = spec->prediction.n * sizeof(uint32_t);
    const struct bt_gen_thoughts *t = &spec->thoughts;
    Baton__Thoughts thoughts = BATON__THOUGHTS__INIT;
    Baton__Marker open, ends[BT_GEN_THOUGHTS_ENDS], *list[BT_GEN_THOUGHTS_ENDS];
    if (t->n_force > 0) {
        open = marker_of(&t->open);
        for (uint32_t i = 0; i < t->n_ends; i++) {
            ends[i] = marker_of(&t->ends[i]);
            list[i] = &ends[i];
        }
        thoughts.budget = t->budget;
        thoughts.begun = t->begun;
        thoughts.open = &open;
        thoughts.n_ends = t->n_ends;
        thoughts.ends = list;
        thoughts.n_force = t->n_force;
        thoughts.force = (uint32_t *)t->force;
        v.thoughts = &thoughts;
    }
    to_worker(a->to, BATON__TO_WORKER__M_SUBMIT, &v);
}

static void send_cancel(const struct bt_action *a)
{
    Baton__Cancel v = BATON__CANCEL__INIT;
    v.request = a->id;
    v.epoch = a->epoch;
    v.one_choice = a->cancel.one_choice;
    v.choice = a->cancel.choice;
    to_worker(a->to, BATON__TO_WORKER__M_CANCEL, &v);
}

static void send_release(const struct bt_action *a)
{
    Baton__Release v = BATON__RELEASE__INIT;
    v.request = a->id;
    v.epoch = a->epoch;
    to_kvstore(a->to, BATON__TO_KVSTORE__M_RELEASE, &v);
}

static void send_replicate(const struct bt_action *a)
{
    Baton__Source source[BT_SOURCES_MAX], *sources[BT_SOURCES_MAX];
    Baton__Replicate v = BATON__REPLICATE__INIT;
    v.id = a->id;
    v.keys.data = (uint8_t *)a->replicate.keys;
    v.keys.len = a->replicate.blocks * sizeof(*a->replicate.keys);
    v.tenant = text_of(a->replicate.tenant);
    v.sources = sources;
    v.n_sources = pack_sources(a->replicate.from, source, sources);
    to_kvstore(a->to, BATON__TO_KVSTORE__M_REPLICATE, &v);
}

static void call_client(struct bt_action *a)
{
    void *arg;
    bool last = a->type == BT_ACT_CLIENT_DONE || a->type == BT_ACT_CLIENT_ERROR;
    const struct bt_gen_ops *ops = bt_request_client(a->r, &arg, last);
    if (ops == NULL) {
        return; /* the client left while other actions were applied */
    }
    if (a->type == BT_ACT_CLIENT_DELTA) {
        a->delta.d.tokens = &a->delta.t;
        ops->on_delta(arg, &a->delta.d);
    } else if (a->type == BT_ACT_CLIENT_FINISH) {
        ops->on_finish(arg, a->finish.choice, a->finish.reason, a->finish.stop_string);
    } else if (a->type == BT_ACT_CLIENT_PROMPT) {
        ops->on_prompt(arg, bt_prompt_tokens(a->prompt.tokens), bt_request_spec(a->r)->prompt.n);
    } else if (a->type == BT_ACT_CLIENT_DONE) {
        ops->on_done(arg, a->done.usage);
    } else {
        ops->on_error(arg, a->error.http, a->error.text, a->error.retry_after_s);
    }
}

void bt_action_apply(struct bt_action *a)
{
    switch (a->type) {
    case BT_ACT_RESERVE: send_reserve(a); break;
    case BT_ACT_SUBMIT: send_submit(a); break;
    case BT_ACT_CANCEL: send_cancel(a); break;
    case BT_ACT_RELEASE: send_release(a); break;
    case BT_ACT_REPLICATE: send_replicate(a); break;
    case BT_ACT_CLIENT_PROMPT:
    case BT_ACT_CLIENT_DELTA:
    case BT_ACT_CLIENT_FINISH:
    case BT_ACT_CLIENT_DONE:
    case BT_ACT_CLIENT_ERROR: call_client(a); break;
    case BT_ACT_TRACED: break; /* requests.c has made spans of it */
    }
    bt_action_cleanup(a);
}
