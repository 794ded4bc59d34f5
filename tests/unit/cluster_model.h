/* A model of workers and kvstores for the request machine: no server, no waiting, the time is a
 * number. It takes the machine's actions as orders, answers them with events, loses what a broken
 * session loses, and keeps account: what was reserved is released once, nobody is told to end what
 * has ended. Everything is drawn from a seed.
 *
 * Each peer has one queue towards it and one from it, in order; between peers there is none. */
#ifndef BT_TESTS_CLUSTER_MODEL_H
#define BT_TESTS_CLUSTER_MODEL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "conductor/request/machine_priv.h"

#define MODEL_PEERS   8
#define MODEL_CHOICES 3
#define MODEL_PROMPT  80
#define MODEL_LANDED  256
#define FIRST_TOKEN   300 /* tokens of answers are FIRST_TOKEN .. FIRST_TOKEN + TOKENS - 1 */
#define TOKENS        100

struct model_job { /* what a worker has been told to do, or a kvstore to hold */
    uint64_t id;
    uint32_t epoch, life, n_tokens, n_prompt, choice, n, max_new;
    bt_phases_t phases;
    bool is_grant, flow, prompt_logprobs;
    bool silent;         /* forgotten: nothing comes of it any more */
    bool over;           /* all is said */
    bool cancelled;      /* told to end ... */
    bool cancel_ordered; /* ... or about to be */
    bool end_heard;      /* the machine knows that it has ended; a cancel is still on its way */
    bool received, prefill_said, answered;
    uint32_t prompt_said, said[MODEL_CHOICES];
    bool choice_over[MODEL_CHOICES];
};

struct model_order { /* an action on its way to a peer */
    struct model_job job;
    bt_action_type_t type;
    bool one_choice;
    uint32_t choice;
};

struct model_said { /* an event on its way from a peer */
    struct bt_event ev;
    struct bt_journal_entry token;
    uint32_t life;
};

struct model_queue {
    void *at;
    uint32_t first, n, cap;
};

struct model_peer {
    struct bt_peer p;
    char name[16], node[8];
    bool is_kv, prefill, decode;
    bool up, departed, leaving, gives_up;
    uint64_t output_ns;
    struct model_queue orders, said;
    struct model_job *jobs;
    uint32_t n_jobs, cap_jobs;
};

struct model {
    uint64_t seed, now_ns, steps;
    struct bt_machine *mc;
    struct model_peer peers[MODEL_PEERS];
    struct bt_sched_worker workers[MODEL_PEERS];
    struct bt_sched_kvstore kvstores[MODEL_PEERS];
    struct bt_peer *worker_of[MODEL_PEERS], *kvstore_of[MODEL_PEERS];
    bool calm; /* nothing fails any more */
    uint64_t first_seed;
    struct { /* plans whose KV has landed, as the machine knows: the newest */
        uint64_t id;
        uint32_t epoch;
    } landed[MODEL_LANDED];
    uint32_t n_landed;
    /* What the client of a life has got of a choice; the test keeps it. */
    const uint32_t *(*tokens_of)(struct model *w, uint32_t life, uint32_t choice, uint32_t n);
};

/* The run stops here, and says how to repeat it. */
#define model_check(w, cond)                                                                       \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fail_msg("seed %llu, step %llu: not true: %s", (unsigned long long)(w)->first_seed,    \
                     (unsigned long long)(w)->steps, #cond);                                       \
        }                                                                                          \
    } while (0)

static inline uint32_t draw(struct model *w, uint32_t n)
{
    w->seed = w->seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((w->seed >> 33) % n);
}

/* Token i of a choice's answer, from a plan of this epoch: after a failure it goes on otherwise. */
static inline uint32_t token_of(uint32_t life, uint32_t choice, uint32_t i, uint32_t epoch)
{
    return FIRST_TOKEN + (life * 37 + choice * 11 + i) % (TOKENS / 2) * 2 + epoch % 2;
}

static inline uint32_t prompt_token_of(uint32_t life, uint32_t i)
{
    return 400 + (life * 13 + i) % 1000;
}

/* How many tokens the model's answer has; of them the last one ends it, if stops. */
static inline uint32_t length_of(uint32_t life, uint32_t choice, uint32_t max_tokens, bool *stops)
{
    uint32_t h = (life * 2654435761u + choice * 40503u) >> 8;
    *stops = h % 2 == 0;
    return *stops && max_tokens != 0 ? 1 + h / 2 % max_tokens : max_tokens;
}

/* ---- queues ---- */

static inline void *queue_put(struct model_queue *q, size_t size)
{
    if (q->first == q->n) {
        q->first = q->n = 0;
    }
    if (q->n == q->cap) {
        q->cap = q->cap != 0 ? 2 * q->cap : 16;
        q->at = bt_realloc(q->at, q->cap * size);
    }
    void *place = (char *)q->at + q->n++ * size;
    memset(place, 0, size);
    return place;
}

static inline bool queue_take(struct model_queue *q, size_t size, void *out)
{
    if (q->first == q->n) {
        return false;
    }
    memcpy(out, (char *)q->at + q->first++ * size, size);
    return true;
}

/* ---- what the machine asks ---- */

static inline struct model_peer *model_peer_of(const struct bt_peer *p)
{
    return BT_CONTAINER_OF(p, struct model_peer, p);
}

static inline void model_snapshot(void *arg, const struct bt_kv_key *keys, uint32_t n_keys,
                                  int32_t priority, struct bt_view_snapshot *out)
{
    struct model *w = arg;
    (void)keys;
    (void)priority;
    uint32_t nk = 0, nw = 0;
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        struct model_peer *p = &w->peers[i];
        if (p->is_kv && p->up && !p->departed) {
            w->kvstores[nk] = (struct bt_sched_kvstore){.draining = p->leaving,
                                                        .slots_total = 1000,
                                                        .slots_free = 1000,
                                                        .match_blocks = draw(w, n_keys + 1),
                                                        .incarnation = p->p.incarnation};
            w->kvstore_of[nk++] = &p->p;
        }
    }
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        struct model_peer *p = &w->peers[i];
        if (p->is_kv || !p->up || p->departed) {
            continue;
        }
        struct bt_sched_worker *s = &w->workers[nw];
        *s = (struct bt_sched_worker){.kvstore = BT_SCHED_NONE,
                                      .prefill = p->prefill,
                                      .decode = p->decode,
                                      .draining = p->leaving,
                                      .rows.own = p->p.own.rows - p->p.own.late,
                                      .queue.own_tokens = p->p.own.prefill_tokens,
                                      .capacity.slots = 16,
                                      .rows.running = p->p.own.decoding,
                                      .capacity.pages = 1000,
                                      .capacity.pages_free = 1000};
        for (uint32_t k = 0; k < nk; k++) {
            s->kvstore = strcmp(w->kvstore_of[k]->node, p->node) == 0 ? k : s->kvstore;
        }
        w->worker_of[nw++] = &p->p;
    }
    *out = (struct bt_view_snapshot){
        .snap = {.workers = w->workers, .n_workers = nw, .kvstores = w->kvstores, .n_kvstores = nk},
        .workers = w->workers,
        .kvstores = w->kvstores,
        .worker = w->worker_of,
        .kvstore = w->kvstore_of};
}

static inline void model_facts(void *arg, const struct bt_peer *of, struct bt_peer_facts *out)
{
    static const struct bt_classes none;
    struct model *w = arg;
    const struct model_peer *p = model_peer_of(of);
    *out = (struct bt_peer_facts){.up = p->up,
                                  .classes = &none,
                                  .departed = p->departed,
                                  .leaving = p->leaving,
                                  .gives_up_prefill = p->gives_up,
                                  .gives_up_decode = p->gives_up,
                                  .pace = {.max_rows = UINT32_MAX, .slow = 1},
                                  .output_ns = p->output_ns,
                                  .load_ns = w->now_ns,
                                  .slots_free = 16,
                                  .pages_free = 1000,
                                  .pages_total = 1000};
    for (uint32_t i = 0; i < p->n_jobs; i++) {
        out->running += !p->jobs[i].over && !p->jobs[i].silent;
    }
}

static inline void model_sources(void *arg, const struct bt_view_snapshot *v,
                                 const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                                 uint32_t n_keys, uint32_t n, struct bt_sources *out)
{
    (void)arg;
    (void)keys;
    (void)n_keys;
    memset(out, 0, sizeof(*out));
    if (plan->prefix.fetch_tokens == 0 || n == 0) {
        return;
    }
    struct bt_source *s = &out->at[out->n++];
    s->kv = v->kvstore[plan->prefix.fetch_from];
    s->first = bt_calloc(1, sizeof(*s->first));
    s->count = bt_calloc(1, sizeof(*s->count));
    s->count[0] = s->blocks = n;
    s->n_runs = 1;
}

static inline uint32_t model_spread(void *arg, const struct bt_view_snapshot *v,
                                    const struct bt_kv_key *keys, uint32_t n)
{
    (void)v;
    (void)keys;
    return draw(arg, n + 1);
}

static inline void model_random(void *arg, void *out, size_t n)
{
    uint8_t *at = out;
    for (size_t i = 0; i < n; i++) {
        at[i] = (uint8_t)draw(arg, 256);
    }
}

static const struct bt_machine_env model_env = {.snapshot = model_snapshot,
                                                .facts = model_facts,
                                                .sources = model_sources,
                                                .spread = model_spread,
                                                .random = model_random,
                                                .extent_blocks = 1};

/* ---- orders ---- */

static inline struct model_job *model_job_of(struct model_peer *p, uint64_t id, uint32_t epoch)
{
    for (uint32_t i = p->n_jobs; i-- > 0;) {
        if (p->jobs[i].id == id && p->jobs[i].epoch == epoch) {
            return &p->jobs[i];
        }
    }
    return NULL;
}

static inline void model_forget(struct model_peer *p, struct model_job *j)
{
    *j = p->jobs[--p->n_jobs];
}

static inline bool model_landed(const struct model *w, uint64_t id, uint32_t epoch)
{
    for (uint32_t i = 0; i < BT_MIN(w->n_landed, (uint32_t)MODEL_LANDED); i++) {
        if (w->landed[i].id == id && w->landed[i].epoch == epoch) {
            return true;
        }
    }
    return false;
}

/* The job as far as the machine has told it, on its way or there. NULL: it is not p's any more. */
static inline struct model_job *model_told(struct model_peer *p, uint64_t id, uint32_t epoch)
{
    for (uint32_t i = p->orders.first; i < p->orders.n; i++) {
        struct model_order *o = &((struct model_order *)p->orders.at)[i];
        bool begins = o->type == BT_ACT_SUBMIT || o->type == BT_ACT_RESERVE;
        if (begins && o->job.id == id && o->job.epoch == epoch) {
            return &o->job;
        }
    }
    return model_job_of(p, id, epoch);
}

/* A grant is given back when nobody uses it any more: whoever has not ended was told to; or it is
 * the sending side's, and all has landed. */
static inline void model_check_release(struct model *w, struct model_peer *kv,
                                       const struct bt_action *a)
{
    const struct model_job *grant = model_told(kv, a->id, a->epoch);
    model_check(w, grant != NULL);
    bool landed = model_landed(w, a->id, a->epoch);
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        struct model_peer *p = &w->peers[i];
        const struct model_job *j = p->is_kv ? NULL : model_told(p, a->id, a->epoch);
        bool uses = j != NULL && !j->end_heard &&
                    (grant->flow ? j->phases != BT_PHASES_PREFILL
                                 : j->phases != BT_PHASES_DECODE || !landed);
        model_check(w, !uses || j->cancel_ordered);
    }
}

/* An action of the machine: it is on its way, unless its session is broken. */
static inline void model_order(struct model *w, const struct bt_action *a, uint32_t life)
{
    struct model_peer *p = model_peer_of(a->to);
    if (!p->up) {
        return;
    }
    struct model_order new = {.type = a->type,
                              .job = {.id = a->id, .epoch = a->epoch, .life = life}},
                       *o = &new;
    if (a->type == BT_ACT_CANCEL) {
        struct model_job *j = model_told(p, a->id, a->epoch);
        model_check(w, j != NULL);
        o->one_choice = a->cancel.one_choice;
        o->choice = a->cancel.choice;
        j->cancel_ordered = j->cancel_ordered || !o->one_choice;
    } else if (a->type == BT_ACT_RELEASE) {
        model_check_release(w, p, a);
    } else if (a->type == BT_ACT_RESERVE) {
        model_check(w, p->is_kv && a->reserve.n_tokens != 0);
        o->job.is_grant = true;
        o->job.flow = a->reserve.peer != NULL;
    } else if (a->type == BT_ACT_SUBMIT) {
        const struct bt_action_plan *plan = &a->submit.plan;
        model_check(w, !p->is_kv);
        o->job.phases = a->submit.phases;
        o->job.n_tokens = plan->n_tokens;
        o->job.n_prompt = (uint32_t)bt_request_spec(plan->r)->prompt.n;
        o->job.choice = a->submit.choice;
        o->job.n = a->submit.n;
        o->job.max_new = a->submit.max_new;
        o->job.prompt_logprobs = a->submit.prompt_logprobs;
        /* It goes on exactly where the client's answer has come to. */
        uint32_t given = plan->n_tokens - o->job.n_prompt;
        const uint32_t *got = w->tokens_of(w, life, o->job.choice, given);
        for (uint32_t i = 0; i < plan->n_tokens; i++) {
            uint32_t t = i < o->job.n_prompt ? prompt_token_of(life, i) : got[i - o->job.n_prompt];
            model_check(w, plan->tokens[i] == t);
        }
        model_check(w, o->job.n == 1 || plan->n_tokens == o->job.n_prompt);
    }
    *(struct model_order *)queue_put(&p->orders, sizeof(*o)) = new;
}

static inline struct model_said *model_say(struct model_peer *p, const struct model_job *j,
                                           bt_event_type_t type)
{
    struct model_said *s = queue_put(&p->said, sizeof(*s));
    s->ev.type = type;
    s->ev.from = &p->p;
    s->ev.request = j->id;
    s->ev.epoch = j->epoch;
    s->ev.detail = "scripted";
    s->life = j->life;
    return s;
}

static inline void model_end(struct model_peer *p, struct model_job *j, int32_t status)
{
    j->over = true;
    model_say(p, j, BT_EV_ENDED)->ev.status = status;
}

static inline void model_take_release(struct model *w, struct model_peer *p,
                                      const struct model_order *o)
{
    struct model_job *j = model_job_of(p, o->job.id, o->job.epoch);
    model_check(w, j != NULL); /* reserved, and not released yet */
    model_forget(p, j);
}

static inline void model_take_cancel(struct model *w, struct model_peer *p,
                                     const struct model_order *o)
{
    struct model_job *j = model_job_of(p, o->job.id, o->job.epoch);
    model_check(w, j != NULL); /* submitted */
    if (o->one_choice) {
        model_check(w, o->choice >= j->choice && o->choice - j->choice < j->n);
        model_check(w, !j->choice_over[o->choice - j->choice]);
        j->choice_over[o->choice - j->choice] = true;
        return;
    }
    model_check(w, !j->cancelled);
    j->cancelled = true;
    if (!j->over && (w->calm || draw(w, 20) != 0)) { /* else it never says that it has ended */
        model_end(p, j, BT_ERR_CANCELLED);
    }
    j->silent = true;
}

/* The next order reaches its peer. */
static inline void model_take_order(struct model *w, struct model_peer *p)
{
    struct model_order o;
    if (!queue_take(&p->orders, sizeof(o), &o)) {
        return;
    }
    if (o.type == BT_ACT_RELEASE) {
        model_take_release(w, p, &o);
    } else if (o.type == BT_ACT_CANCEL) {
        model_take_cancel(w, p, &o);
    } else if (o.type != BT_ACT_REPLICATE) {
        model_check(w, model_job_of(p, o.job.id, o.job.epoch) == NULL);
        if (p->n_jobs == p->cap_jobs) {
            p->cap_jobs = p->cap_jobs != 0 ? 2 * p->cap_jobs : 16;
            p->jobs = bt_realloc(p->jobs, p->cap_jobs * sizeof(*p->jobs));
        }
        p->jobs[p->n_jobs++] = o.job;
    }
}

/* ---- progress ---- */

static inline void model_say_prompt(struct model *w, struct model_peer *p, struct model_job *j)
{
    struct model_said *s = model_say(p, j, BT_EV_PROMPT);
    uint32_t first = BT_MAX(j->prompt_said, 1u);
    s->ev.prompt.first = first;
    s->ev.prompt.n = 1 + draw(w, j->n_tokens - first);
    j->prompt_said = first + s->ev.prompt.n;
}

/* Says the next token of one of the job's choices. False: it has said all that are its. */
static inline bool model_say_token(struct model *w, struct model_peer *p, struct model_job *j,
                                   uint32_t max_tokens)
{
    uint32_t from = draw(w, j->n);
    for (uint32_t i = 0; i < j->n; i++) {
        uint32_t c = (from + i) % j->n, have = j->n_tokens - j->n_prompt;
        bool stops, decode = j->phases == BT_PHASES_DECODE;
        uint32_t length = length_of(j->life, j->choice + c, max_tokens, &stops) - have;
        /* The prefill worker says the first choice's first token, the decode worker the rest. */
        uint32_t end = j->phases != BT_PHASES_PREFILL ? length : c == 0 ? BT_MIN(1u, length) : 0;
        j->said[c] = BT_MAX(j->said[c], decode && c == 0 ? 1u : 0u);
        if (j->choice_over[c] || j->said[c] >= end) {
            continue;
        }
        uint32_t at = j->said[c]++;
        struct model_said *s = model_say(p, j, BT_EV_TOKEN);
        s->ev.token.choice = j->choice + c;
        s->ev.token.offset = at;
        s->token = (struct bt_journal_entry){
            .epoch = j->epoch, .token = token_of(j->life, j->choice + c, have + at, j->epoch)};
        if (at + 1 == length) {
            s->token.finish = stops ? BT_TOKEN_STOP : BT_TOKEN_LENGTH;
        }
        return true;
    }
    return false;
}

/* One thing more of a job. max_tokens: of its request. */
static inline void model_progress(struct model *w, struct model_peer *p, struct model_job *j,
                                  uint32_t max_tokens)
{
    if (j->over || j->silent) {
        return;
    }
    if (j->is_grant && !j->answered) {
        j->answered = true;
        bool full = !w->calm && draw(w, 40) == 0;
        model_say(p, j, BT_EV_RESERVED)->ev.status = full ? BT_ERR_EXHAUSTED : BT_OK;
        j->over = full || !j->flow;
    } else if (j->is_grant) {
        struct model_said *s = model_say(p, j, BT_EV_FLOW_DONE);
        s->ev.flow_done.bytes = 8192;
        j->over = true;
    } else if (!j->received) {
        j->received = true;
        (void)model_say(p, j, BT_EV_RECEIVED);
    } else if (j->prompt_logprobs && j->prompt_said < j->n_tokens && j->n_tokens > 1) {
        model_say_prompt(w, p, j);
    } else if (model_say_token(w, p, j, max_tokens)) {
        return;
    } else if (j->phases != BT_PHASES_DECODE && !j->prefill_said) {
        j->prefill_said = true;
        (void)model_say(p, j, BT_EV_PREFILL_DONE);
    } else {
        model_end(p, j, BT_OK);
    }
}

/* The next event of a peer reaches the machine. False: there is none. */
static inline bool model_hear(struct model *w, struct model_peer *p)
{
    struct model_said s;
    struct bt_prompt_logprob part[MODEL_PROMPT];
    if (!queue_take(&p->said, sizeof(s), &s)) {
        return false;
    }
    p->output_ns = w->now_ns;
    if (s.ev.type == BT_EV_TOKEN) {
        s.ev.token.at = &s.token;
    } else if (s.ev.type == BT_EV_PROMPT) {
        for (uint32_t i = 0; i < s.ev.prompt.n; i++) {
            uint32_t at = s.ev.prompt.first + i;
            part[i] = (struct bt_prompt_logprob){.token = prompt_token_of(s.life, at),
                                                 .logprob = -(float)at};
        }
        s.ev.prompt.at = part;
    } else if (s.ev.type == BT_EV_FLOW_DONE) {
        uint32_t at = w->n_landed++ % MODEL_LANDED;
        w->landed[at].id = s.ev.request;
        w->landed[at].epoch = s.ev.epoch;
    } else if (s.ev.type == BT_EV_ENDED) { /* from now on nobody may tell it to end */
        struct model_job *j = model_job_of(p, s.ev.request, s.ev.epoch);
        bool cancel_comes = false;
        for (uint32_t i = p->orders.first; i < p->orders.n; i++) {
            const struct model_order *o = &((const struct model_order *)p->orders.at)[i];
            cancel_comes = cancel_comes || (o->type == BT_ACT_CANCEL && o->job.id == s.ev.request &&
                                            o->job.epoch == s.ev.epoch);
        }
        if (j != NULL && cancel_comes) {
            j->end_heard = true;
        } else if (j != NULL) {
            model_forget(p, j);
        }
    }
    bt_machine_event(w->mc, &s.ev, w->now_ns);
    return true;
}

/* ---- sessions ---- */

static inline void model_break(struct model *w, struct model_peer *p)
{
    p->up = false;
    p->orders.first = p->orders.n = p->said.first = p->said.n = p->n_jobs = 0;
    bt_machine_down(w->mc, &p->p);
}

/* The session comes back when all plans have been told, with the process or a new one. */
static inline void model_return(struct model *w, struct model_peer *p)
{
    if (!p->up && bt_list_empty(&p->p.own_flights)) {
        p->p.incarnation += draw(w, 2);
        p->departed = p->departed && !w->calm;
        p->up = true;
        bt_machine_up(w->mc, &p->p);
    }
}

static inline void model_init(struct model *w, uint64_t seed)
{
    memset(w, 0, sizeof(*w));
    w->first_seed = w->seed = seed;
    w->now_ns = 1000000000ull;
    for (uint32_t i = 0; i < MODEL_PEERS; i++) { /* 3 kvstores, 2 prefill and 3 decode workers */
        struct model_peer *p = &w->peers[i];
        p->is_kv = i < 3;
        p->prefill = i == 3 || i == 4;
        p->decode = i >= 5;
        snprintf(p->name, sizeof(p->name), "%s-%u", p->is_kv ? "kv" : p->prefill ? "p" : "d", i);
        snprintf(p->node, sizeof(p->node), "n%u", i < 3 ? i : i < 5 ? i - 3 : i - 5);
        p->p.kind = p->is_kv ? "kvstore" : p->prefill ? "prefill" : "decode";
        p->p.name = p->name;
        p->p.node = p->node;
        p->p.incarnation = 1000 * (i + 1);
        bt_list_init(&p->p.own_flights);
        bt_list_init(&p->p.own_lost);
        bt_sched_own_init(&p->p.own);
        p->up = true;
    }
}

static inline void model_cleanup(struct model *w)
{
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        free(w->peers[i].orders.at);
        free(w->peers[i].said.at);
        free(w->peers[i].jobs);
    }
}

#endif
