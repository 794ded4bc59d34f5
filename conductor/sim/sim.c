/* The event loop: arrivals from the trace, ends of prefills and hand-offs, boundaries of decode
 * nodes. */
#include "conductor/sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/sched/survival.h"
#include "conductor/sim/cache.h"
#include "conductor/sim/decode.h"
#include "conductor/sim/events.h"
#include "conductor/sim/replicate.h"
#include "conductor/sim/roles.h"

#define NONE         UINT32_MAX
#define FORECAST_MS  250
#define DEMAND_MS    60000
#define LIVES_GUESS  20 /* rows that have ended: so much does the first guess of a life count */
#define LIVES_MS     60000
#define LENGTHS_MS   500  /* how far rows have come is looked at */
#define MAX_NEW      4096 /* what a client allows; the real length is not known */
#define DONE_AT_ONCE 64
#define SHORT_CHUNK                                                                                \
    2048 /* tokens of a step that others wait for: a decode node's, a late prompt's */
#define PROGRESS_EACH 1024
#define NOTICE_MS     2000 /* silence after which a node counts as gone */
#define TRIES         60   /* of a re-plan that finds nobody, a second apart */

typedef enum {
    EV_PREFILL_END,
    EV_PREFILL_FREE,
    EV_HANDOFF_END,
    EV_DECODE,
    EV_PROMPT,
    EV_FAIL,
    EV_BACK,
    EV_REPLAN,
    EV_LOOK,
    EV_COPY
} event_t;

struct live {          /* a request beyond its record */
    double planned_ms; /* its prefill, as predicted: what others wait for */
    double start_ms, fetch_end_ms;
    double ready_ms; /* end of its prefill, as the forecast was told */
    double placed_ms, prefilled_ms;
    double last_ms, gap_ms; /* its last token before a failure; the longest such interruption */
    double row_ms;          /* how long it will decode, as the forecast was told */
    uint32_t told;          /* tokens that the estimate of lengths knows of */
    uint32_t given;         /* tokens given out before it was placed for the last time */
    uint32_t fetch_from, tries;
    uint32_t best_tokens, fetch_tokens;
    uint32_t held;      /* blocks of its prefix at its prefill node, while it computes */
    double read_end_ms; /* what of its prefix lay on that node's SSD is in memory */
    double handed_ms;   /* its KV, but for what is computed last, is where it will be decoded */
    uint32_t next;      /* in its node's queue */
    bool late;          /* in the background */
    double rest_ms;     /* of its computing, once it gave way; 0: all of it */
};

struct prefill_queue {
    uint32_t first, last; /* requests, NONE: empty */
    double ms;            /* as planned */
};

struct prefill_node {
    struct prefill_queue queue[2]; /* those to be in time, and late ones, which give way to them */
    uint32_t running;              /* NONE: none */
    uint32_t version;              /* counts its failures, and late prompts that gave way */
    double run_ms, run_end_ms;     /* running: since when in this go, until when */
    double run_chunk_ms;           /* ... its steps */
    double free_ms;                /* until then the step of one that gives way */
};

struct link { /* of a node, each direction */
    double send_free_ms, recv_free_ms;
};

struct decode_node {
    struct bt_sim_decode *d;
    uint32_t version, assigned;
    uint32_t coming; /* of those assigned: not rows yet, and their tokens */
    uint64_t coming_tokens;
};

struct sim {
    const struct bt_sim_cluster *c;
    const struct bt_sim_trace *t;
    const struct bt_sim_options *o;
    struct bt_sim_result *r;
    const struct bt_sim_request *req; /* the part of the trace */
    struct live *live;
    struct bt_sim_events events;
    uint32_t n, n_p;        /* nodes; those that prefill at first */
    struct prefill_node *p; /* these arrays: [n] */
    struct decode_node *d;  /* d->d NULL: it never decodes */
    struct link *links;
    double *failed_ms; /* when last, < 0: never */
    struct bt_sim_roles roles;
    struct bt_sim_replicate replicate;
    struct bt_sim_copy copy; /* on its way: */
    uint32_t copy_of;        /* a prefix of this request's */
    double copy_begun_ms;
    struct bt_sim_caches *caches;
    uint32_t *match;
    struct bt_sched_worker *workers;
    struct bt_sched_kvstore *kvstores;
    struct bt_sched_snapshot snap;
    struct bt_sched_params params;
    struct bt_sched_forecast forecast;
    struct bt_sched_demand demand, decodes;
    struct bt_sched_survival *survival; /* NULL: nothing is learned of lengths */
    double looked_ms;                   /* at how far rows have come */
    double now_ms, sample_at_ms;
    struct lives { /* of rows, faded: the time that they have had so far, and how many have ended */
        double ms, ended, at_ms;
    } lives;
    uint32_t sample_arrived, sample_refused, samples_cap, finished;
};

const char *const bt_sim_outcome_names[BT_SIM_OUTCOMES] = {
    "pending",       "served",         "refused_ttft",  "refused_tbt",
    "refused_price", "refused_decode", "refused_other", "lost"};

static void push(struct sim *s, double at_ms, event_t type, uint32_t id, uint32_t version)
{
    bt_sim_events_push(&s->events, at_ms, (uint32_t)type, id, version);
}

/* ---- what the policy sees ---- */

/* The end of the step at hand of a late prompt: there it gives way. */
static double step_end_ms(const struct sim *s, const struct prefill_node *p)
{
    double steps = ceil(BT_MAX(s->now_ms - p->run_ms, 0) / p->run_chunk_ms);
    return BT_MIN(p->run_ms + steps * p->run_chunk_ms, p->run_end_ms);
}

/* What a prompt that is to be in time waits for. */
static double queue_ms(const struct sim *s, const struct prefill_node *p)
{
    double ms = p->queue[0].ms + BT_MAX(p->free_ms - s->now_ms, 0);
    if (p->running != NONE) {
        ms += (s->live[p->running].late ? step_end_ms(s, p) : p->run_end_ms) - s->now_ms;
    }
    return ms;
}

static void show_prefill(struct sim *s, uint32_t i)
{
    const struct prefill_node *p = &s->p[i];
    bool late = p->running != NONE && s->live[p->running].late;
    s->workers[i].queue_ms = queue_ms(s, p);
    s->workers[i].late_ms = p->queue[1].ms + (late ? p->run_end_ms - step_end_ms(s, p) : 0);
}

static void show_kvstore(struct sim *s, uint32_t i)
{
    s->kvstores[i].send_busy_ms = BT_MAX(s->links[i].send_free_ms - s->now_ms, 0);
    s->kvstores[i].recv_busy_ms = BT_MAX(s->links[i].recv_free_ms - s->now_ms, 0);
    s->kvstores[i].match_blocks = s->match[i];
}

static void show_decode(struct sim *s, uint32_t i)
{
    const struct decode_node *d = &s->d[i];
    struct bt_sched_worker *w = &s->workers[i];
    w->running = bt_sim_decode_rows(d->d);
    w->waiting = bt_sim_decode_waiting(d->d);
    w->kv_tokens = (uint64_t)bt_sim_decode_kv_tokens(d->d);
    w->pages_free =
        (uint32_t)((s->c->kv_tokens - bt_sim_decode_reserved(d->d)) / BT_SIM_BLOCK_TOKENS);
    w->own_requests = d->assigned;
    w->own_coming = d->coming;
    w->own_coming_tokens = d->coming_tokens;
    w->queue_ms = bt_sim_decode_prompt_ms(d->d);
}

/* What is to be computed of it: its prompt, and what it has given out before its node failed. */
static uint32_t tokens_of(const struct sim *s, uint32_t id)
{
    return s->req[id].input + s->live[id].given;
}

static struct bt_survival_key key_of(const struct sim *s, uint32_t id)
{
    return bt_survival_key(0, s->req[id].input);
}

static struct bt_sched_request ask(const struct sim *s, uint32_t id)
{
    return (struct bt_sched_request){
        .n_tokens = tokens_of(s, id),
        .max_new = MAX_NEW,
        .mean_new = s->survival != NULL
                        ? bt_survival_mean(s->survival, key_of(s, id), s->live[id].given, MAX_NEW)
                        : 0,
        .n_choices = 1,
        .block_tokens = BT_SIM_BLOCK_TOKENS,
        .token_bytes = (uint32_t)s->c->token_bytes,
        .random = (s->o->seed + id + 1) * 0x9e3779b97f4a7c15ull,
        .sequence = id};
}

static uint32_t output_of(const struct sim *s, uint32_t id)
{
    return s->o->one_token ? 1 : s->req[id].output;
}

/* ---- the end of a request ---- */

static void wake_decode(struct sim *s, uint32_t node)
{
    double next = bt_sim_decode_next_ms(s->d[node].d);
    s->d[node].version++;
    if (next >= 0) {
        push(s, next, EV_DECODE, node, s->d[node].version);
    }
}

static void expect(struct sim *s, uint32_t id, int sign)
{
    const struct live *l = &s->live[id];
    const struct bt_sim_record *rec = &s->r->records[id];
    struct decode_node *d = &s->d[rec->decode];
    uint32_t tokens = s->req[id].input;
    bt_sched_forecast_note(&s->forecast, s->now_ms, l->ready_ms, tokens, l->row_ms, sign);
    d->coming += (uint32_t)sign;
    d->coming_tokens += sign > 0 ? tokens : -(uint64_t)tokens;
    if (rec->prefill != rec->decode && bt_sim_decode_expect(d->d, s->now_ms, sign)) {
        wake_decode(s, rec->decode);
    }
}

static void finish(struct sim *s, uint32_t id, bt_sim_outcome_t outcome)
{
    if (s->survival != NULL && outcome == BT_SIM_SERVED) {
        bt_survival_note(s->survival, key_of(s, id), s->live[id].told, output_of(s, id), true);
    }
    s->r->records[id].outcome = outcome;
    s->r->records[id].end_ms = s->now_ms;
    s->r->end_ms = BT_MAX(s->r->end_ms, s->now_ms);
    s->sample_refused += outcome != BT_SIM_SERVED;
    if (++s->finished % PROGRESS_EACH == 0 && s->o->progress != NULL) {
        s->o->progress(s->o->progress_arg, s->finished, s->r->n);
    }
}

/* ... of one that was placed. */
static void finish_placed(struct sim *s, uint32_t id, bt_sim_outcome_t outcome)
{
    s->d[s->r->records[id].decode].assigned--;
    finish(s, id, outcome);
}

/* ---- prefill ---- */

static double compute_ms(const struct sim *s, uint32_t n, uint32_t cached)
{
    double ms = 1e-6 * bt_batch_prefill_ns(&s->c->prefill, cached, n, s->c->chunk_tokens);
    return BT_MAX(ms, 1e3 * cached * s->c->token_bytes / s->c->load_bytes_per_s);
}

static uint32_t full_blocks(const struct sim *s, uint32_t id)
{
    return s->req[id].input / BT_SIM_BLOCK_TOKENS;
}

/* The computing begins: what its node has now of the prompt is used. Returns tokens; at least the
 * last one of a prompt is computed. */
static uint32_t hold_prefix(struct sim *s, uint32_t id, uint32_t node)
{
    const struct bt_sim_request *q = &s->req[id];
    uint32_t limit = (q->input - 1) / BT_SIM_BLOCK_TOKENS;
    uint32_t ssd;
    s->live[id].held =
        bt_sim_caches_use(s->caches, node, s->t->blocks + q->first, limit, s->now_ms, &ssd);
    s->r->ssd_tokens += (uint64_t)ssd * BT_SIM_BLOCK_TOKENS;
    return s->live[id].held * BT_SIM_BLOCK_TOKENS;
}

/* ... and has ended: all full blocks of the prompt are in the node's cache. */
static void keep_prompt(struct sim *s, uint32_t id, uint32_t node)
{
    const struct live *l = &s->live[id];
    uint32_t fetched = s->r->records[id].fetched_tokens / BT_SIM_BLOCK_TOKENS;
    uint32_t end = l->best_tokens / BT_SIM_BLOCK_TOKENS;
    struct bt_sim_put put = {.blocks = s->t->blocks + s->req[id].first,
                             .n = full_blocks(s, id),
                             .held = l->held,
                             .copied = end - BT_MIN(fetched, end),
                             .copied_end = end};
    bt_sim_caches_put(s->caches, node, &put, s->now_ms);
}

/* Has this node failed since the request was placed? */
static bool failed_since(const struct sim *s, uint32_t id, uint32_t node)
{
    return s->failed_ms[node] >= s->live[id].placed_ms;
}

/* It is no longer where it was placed and will be planned again once that is noticed. expected: it
 * has not become a row yet. */
static void abandon(struct sim *s, uint32_t id, uint32_t node, bool expected)
{
    struct live *l = &s->live[id];
    if (expected) {
        expect(s, id, -1);
    }
    s->d[s->r->records[id].decode].assigned--;
    l->held = l->fetch_tokens = l->best_tokens = 0;
    l->last_ms = BT_MIN(s->now_ms, s->failed_ms[node]);
    push(s, BT_MAX(s->now_ms, s->failed_ms[node] + NOTICE_MS), EV_REPLAN, id, 0);
}

/* Its source failed before all of it was there. */
static bool fetch_lost(const struct sim *s, uint32_t id)
{
    const struct live *l = &s->live[id];
    return failed_since(s, id, l->fetch_from) && s->failed_ms[l->fetch_from] < l->fetch_end_ms;
}

/* A link's end is busy with one thing after the other, first come first served, and with each for
 * as long as its bytes take; streams share it piece by piece, so that an end does not wait for the
 * other one. Returns when both have done it. */
static double send(struct sim *s, uint32_t from, uint32_t to, double bytes)
{
    double *out = &s->links[from].send_free_ms, *in = &s->links[to].recv_free_ms;
    double ms = 1e3 * bytes / s->c->link_bytes_per_s;
    *out = BT_MAX(*out, s->now_ms) + ms;
    *in = BT_MAX(*in, s->now_ms) + ms;
    return BT_MAX(*out, *in);
}

/* Its KV streams to where it will be decoded from now on, whether it will be refused there or not:
 * the links' share of that is taken at once, though the computing spreads it out. */
static void start_handoff(struct sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    if (output_of(s, id) > s->live[id].given + 1) {
        double bytes = (double)s->req[id].input * s->c->token_bytes;
        s->live[id].handed_ms = send(s, rec->prefill, rec->decode, bytes);
        s->r->bytes_handoff += bytes;
    }
}

static uint32_t take(struct sim *s, struct prefill_queue *q)
{
    uint32_t id = q->first;
    q->first = s->live[id].next;
    q->ms = q->first != NONE ? q->ms - s->live[id].planned_ms : 0;
    return id;
}

/* The computing begins: returns its ms. */
static double compute_begin(struct sim *s, uint32_t node, uint32_t id)
{
    struct live *l = &s->live[id];
    struct bt_sim_record *rec = &s->r->records[id];
    uint32_t local = hold_prefix(s, id, node);
    double end = BT_MAX(s->now_ms, l->read_end_ms);
    if (l->fetch_tokens != 0 && l->best_tokens > local && !fetch_lost(s, id)) {
        uint32_t from = BT_MAX(l->best_tokens - l->fetch_tokens, local);
        end += from > local ? compute_ms(s, from, local) : 0;
        end = BT_MAX(end, l->fetch_end_ms) + compute_ms(s, tokens_of(s, id), l->best_tokens);
        rec->fetched_tokens = l->best_tokens - from;
    } else {
        end += compute_ms(s, tokens_of(s, id), local);
    }
    rec->cached_tokens = local + rec->fetched_tokens;
    s->r->input_tokens += s->req[id].input;
    s->r->cached_tokens += rec->cached_tokens;
    s->r->fetched_tokens += rec->fetched_tokens;
    s->r->bytes_load += (double)rec->cached_tokens * s->c->token_bytes;
    s->r->prefill_busy_ms += end - s->now_ms;
    l->start_ms = s->now_ms;
    start_handoff(s, id);
    return end - s->now_ms;
}

static void start_prefill(struct sim *s, uint32_t node)
{
    struct prefill_node *p = &s->p[node];
    uint32_t late = p->queue[0].first == NONE;
    if (p->running != NONE || p->queue[late].first == NONE || s->now_ms < p->free_ms) {
        return;
    }
    uint32_t id = take(s, &p->queue[late]);
    struct live *l = &s->live[id];
    p->running = id;
    double ms = l->rest_ms > 0 ? l->rest_ms : compute_begin(s, node, id);
    l->rest_ms = ms;
    uint32_t todo = tokens_of(s, id) - BT_MIN(s->r->records[id].cached_tokens, tokens_of(s, id));
    p->run_ms = s->now_ms;
    p->run_chunk_ms = ms / BT_DIV_UP(BT_MAX(todo, 1u), SHORT_CHUNK);
    p->run_end_ms = s->now_ms + ms;
    push(s, p->run_end_ms, EV_PREFILL_END, node, p->version);
}

/* One that is to be in time has come: a late one that is being computed ends its step and waits. */
static void give_way(struct sim *s, uint32_t node)
{
    struct prefill_node *p = &s->p[node];
    uint32_t id = p->running;
    if (id == NONE || !s->live[id].late) {
        return;
    }
    double end = step_end_ms(s, p);
    if (end >= p->run_end_ms) {
        return;
    }
    struct live *l = &s->live[id];
    l->rest_ms = l->planned_ms = p->run_end_ms - end;
    l->next = p->queue[1].first;
    p->queue[1].last = l->next == NONE ? id : p->queue[1].last;
    p->queue[1].first = id;
    p->queue[1].ms += l->planned_ms;
    p->running = NONE;
    p->version++;
    p->free_ms = end;
    push(s, end, EV_PREFILL_FREE, node, p->version);
}

static void start_fetch(struct sim *s, uint32_t id, const struct bt_sched_plan *plan)
{
    struct live *l = &s->live[id];
    uint32_t best = BT_MIN(s->match[plan->fetch_from] * BT_SIM_BLOCK_TOKENS,
                           (s->req[id].input - 1) / BT_SIM_BLOCK_TOKENS * BT_SIM_BLOCK_TOKENS);
    double bytes = (double)plan->fetch_tokens * s->c->token_bytes;
    l->best_tokens = best;
    l->fetch_from = plan->fetch_from;
    l->fetch_tokens = plan->fetch_tokens;
    l->fetch_end_ms = send(s, plan->fetch_from, plan->prefill, bytes);
    s->r->bytes_fetch += bytes;
    const uint32_t *blocks = s->t->blocks + s->req[id].first; /* used there too */
    uint32_t n = best / BT_SIM_BLOCK_TOKENS, ssd;
    double read = bt_sim_caches_read(s->caches, plan->fetch_from, blocks, n, s->now_ms);
    l->fetch_end_ms = BT_MAX(l->fetch_end_ms, read);
    uint32_t used = bt_sim_caches_use(s->caches, plan->fetch_from, blocks, n, s->now_ms, &ssd);
    bt_sim_caches_release(s->caches, plan->fetch_from, blocks, used);
}

/* At a decode node: once what is fetched is there, the rest is computed beside the rows. */
static void queue_at_decode(struct sim *s, uint32_t id)
{
    const struct live *l = &s->live[id];
    push(s, BT_MAX(s->now_ms, BT_MAX(l->fetch_end_ms, l->read_end_ms)), EV_PROMPT, id, 0);
}

static void queue_at_prefill(struct sim *s, uint32_t id, uint32_t node)
{
    struct prefill_node *p = &s->p[node];
    struct live *l = &s->live[id];
    struct prefill_queue *q = &p->queue[l->late];
    l->next = NONE;
    if (q->first == NONE) {
        q->first = id;
    } else {
        s->live[q->last].next = id;
    }
    q->last = id;
    q->ms += l->planned_ms;
    if (!l->late) {
        give_way(s, node);
    }
    start_prefill(s, node);
}

/* How long rows go on: those that still run count with what they have had, or else only short
 * answers would be known at the start. */
static double life_ms(struct lives *l, double now_ms, double rows)
{
    double took = now_ms - l->at_ms, old = exp(-took / LIVES_MS);
    l->ms = l->ms * old + rows * took;
    l->ended *= old;
    l->at_ms = now_ms;
    return l->ended > 0 ? l->ms / l->ended : 0;
}

struct rows { /* looked at */
    struct sim *s;
    double n, kv;         /* rows, tokens of their context */
    double rest, kv_rest; /* tokens still to come of a row, for as many a token of context stays */
    bool known[BT_SURVIVAL_CLASSES];
    double of[BT_SURVIVAL_CLASSES][BT_SURVIVAL_BUCKETS];
};

static void reached(void *arg, uint32_t id, uint32_t generated)
{
    struct rows *r = arg;
    struct sim *s = r->s;
    struct live *l = &s->live[id];
    struct bt_survival_key k = key_of(s, id);
    uint32_t n = l->given + generated;
    bt_survival_reach(s->survival, k, l->told, n);
    l->told = n;
    if (!r->known[k.prompt_class]) {
        bt_survival_rest(s->survival, k, MAX_NEW, r->of[k.prompt_class]);
        r->known[k.prompt_class] = true;
    }
    double rest = r->of[k.prompt_class][bt_survival_bucket(n)], kv = s->req[id].input + n;
    r->n++;
    r->kv += kv;
    r->rest += rest;
    r->kv_rest += rest * kv;
}

/* How far rows have come. */
static void look_at_rows(struct sim *s)
{
    if (s->survival == NULL || s->now_ms - s->looked_ms < LENGTHS_MS) {
        return;
    }
    s->looked_ms = s->now_ms;
    struct rows r = {.s = s};
    struct bt_sched_request one = {.n_tokens = 1, .block_tokens = BT_SIM_BLOCK_TOKENS};
    double step = 0, n = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        if (s->workers[i].decode) {
            bt_sim_decode_each(s->d[i].d, reached, &r);
            step += bt_sched_full_step_ms(&s->params, &s->workers[i], &one);
            n++;
        }
    }
    if (r.n > 0) {
        s->forecast.life_ms = step / n * r.rest / r.n;
        s->forecast.kv_life_ms = step / n * r.kv_rest / r.kv;
    }
}

/* The nodes as they are now. */
static void show(struct sim *s)
{
    double rows = 0;
    look_at_rows(s);
    for (uint32_t i = 0; i < s->n; i++) {
        show_kvstore(s, i);
        if (s->workers[i].prefill) {
            show_prefill(s, i);
        }
        if (!s->workers[i].decode) {
            continue;
        }
        show_decode(s, i);
        rows += s->workers[i].running;
    }
    double life = life_ms(&s->lives, s->now_ms, rows);
    s->forecast.life_ms = s->survival != NULL ? s->forecast.life_ms : life;
    s->snap.now_ms = s->now_ms;
}

/* The snapshot for a request. */
static void look(struct sim *s, uint32_t id)
{
    const struct bt_sim_request *q = &s->req[id];
    bt_sim_caches_match(s->caches, s->t->blocks + q->first, full_blocks(s, id), s->match);
    show(s);
}

/* Where nobody decodes, policies let prefill workers do both: here they cannot. */
static bool place(const struct sim *s, const struct bt_sched_request *want,
                  struct bt_sched_plan *plan, struct bt_sched_reject *rej)
{
    return s->o->policy->place(&s->params, &s->snap, want, plan, rej) == BT_SCHED_PLANNED &&
           s->workers[plan->decode].decode;
}

static void go(struct sim *s, uint32_t id, const struct bt_sched_plan *plan)
{
    struct bt_sim_record *rec = &s->r->records[id];
    struct live *l = &s->live[id];
    rec->prefill = plan->prefill;
    rec->decode = plan->decode;
    s->r->background += plan->background;
    s->d[rec->decode].assigned++;
    l->planned_ms = plan->prefill_ms;
    l->late = plan->background;
    l->rest_ms = 0;
    l->placed_ms = s->now_ms;
    l->ready_ms = s->now_ms + plan->ttft_ms;
    l->row_ms = plan->row_ms;
    expect(s, id, 1);
    l->read_end_ms = bt_sim_caches_read(s->caches, plan->prefill, s->t->blocks + s->req[id].first,
                                        (s->req[id].input - 1) / BT_SIM_BLOCK_TOKENS, s->now_ms);
    if (plan->fetch_from != BT_SCHED_NONE) {
        start_fetch(s, id, plan);
    }
    if (s->workers[plan->prefill].decode) {
        queue_at_decode(s, id);
    } else {
        queue_at_prefill(s, id, plan->prefill);
    }
}

/* Behind all that the links have to do, and in nobody's way. */
static void copy_begin(struct sim *s, uint32_t id)
{
    double block_bytes = BT_SIM_BLOCK_TOKENS * s->c->token_bytes;
    const uint32_t *blocks = s->t->blocks + s->req[id].first;
    if (!bt_sim_replicate_look(&s->replicate, &s->params, &s->snap, blocks, full_blocks(s, id),
                               block_bytes, &s->copy)) {
        return;
    }
    const struct link *src = &s->links[s->copy.from], *dst = &s->links[s->copy.to];
    double bytes = s->copy.blocks * block_bytes;
    double start = BT_MAX(s->now_ms, BT_MAX(src->send_free_ms, dst->recv_free_ms));
    s->copy_of = id;
    s->copy_begun_ms = s->now_ms;
    s->replicate.pending = true;
    s->r->copies++;
    s->r->bytes_copied += bytes;
    push(s, start + 1e3 * bytes / s->c->link_bytes_per_s, EV_COPY, 0, 0);
}

static void copy_end(struct sim *s)
{
    const struct bt_sim_copy *c = &s->copy;
    const uint32_t *blocks = s->t->blocks + s->req[s->copy_of].first;
    s->replicate.pending = false;
    if (s->failed_ms[c->from] >= s->copy_begun_ms || s->failed_ms[c->to] >= s->copy_begun_ms) {
        return;
    }
    uint32_t ssd, held = bt_sim_caches_use(s->caches, c->to, blocks, c->blocks, s->now_ms, &ssd);
    struct bt_sim_put put = {
        .blocks = blocks, .n = c->blocks, .held = held, .copied = held, .copied_end = c->blocks};
    bt_sim_caches_put(s->caches, c->to, &put, s->now_ms);
}

static void arrive(struct sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    look(s, id);
    s->sample_arrived++;
    struct bt_sched_request want = ask(s, id);
    struct bt_sched_plan plan;
    struct bt_sched_reject rej = {0};
    if (!place(s, &want, &plan, &rej)) {
        finish(s, id, BT_SIM_REFUSED_OTHER);
        return;
    }
    if (!plan.background) {
        bt_sched_demand_note(&s->demand, s->now_ms, plan.compute_ms);
        bt_sched_demand_note(&s->decodes, s->now_ms, plan.decode_work);
    }
    rec->plan_ttft_ms = plan.ttft_ms;
    rec->plan_tbt_ms = plan.tbt_ms;
    if (s->o->admission->admit(&s->params, &s->snap, &want, &plan, &rej) != BT_SCHED_PLANNED) {
        static const bt_sim_outcome_t why[] = {[BT_SCHED_MISS_TTFT] = BT_SIM_REFUSED_TTFT,
                                               [BT_SCHED_MISS_TBT] = BT_SIM_REFUSED_TBT,
                                               [BT_SCHED_MISS_PRICE] = BT_SIM_REFUSED_PRICE};
        finish(s, id, why[rej.miss]);
        return;
    }
    copy_begin(s, id);
    go(s, id, &plan);
}

/* Its node failed: whoever can take it now, whatever the objectives say. */
static void replan(struct sim *s, uint32_t id)
{
    struct bt_sched_plan plan;
    struct bt_sched_reject rej;
    look(s, id);
    struct bt_sched_request want = ask(s, id);
    if (place(s, &want, &plan, &rej)) {
        s->r->replans++;
        s->live[id].tries = 0;
        go(s, id, &plan);
    } else if (++s->live[id].tries < TRIES) {
        push(s, s->now_ms + 1000, EV_REPLAN, id, 0);
    } else {
        finish(s, id, BT_SIM_LOST);
    }
}

/* ---- decode ---- */

/* The prefill gives out a token: the first, or the one behind an interruption. */
static void give_first(struct sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    struct live *l = &s->live[id];
    l->prefilled_ms = s->now_ms;
    if (l->given == 0) {
        rec->ttft_ms = s->now_ms - rec->at_ms;
    } else {
        l->gap_ms = BT_MAX(l->gap_ms, s->now_ms - l->last_ms);
    }
}

/* A request's TBT, where an interruption is one of its longest gaps; what came before that counts
 * as what came after. */
static double with_gap(const struct sim *s, uint32_t id, double tbt_ms)
{
    const struct live *l = &s->live[id];
    uint32_t gaps = output_of(s, id) - 1, k = BT_DIV_UP(gaps, 10u);
    return l->gap_ms > 0 ? (l->gap_ms + (k - 1) * tbt_ms) / k : tbt_ms;
}

/* Its first token is out: what is left of its KV goes to where it will be decoded. */
static void hand_off(struct sim *s, uint32_t id)
{
    uint32_t decode = s->r->records[id].decode;
    if (failed_since(s, id, decode)) {
        s->live[id].given++;
        abandon(s, id, decode, true);
        return;
    }
    double bytes = (double)s->req[id].input * s->c->token_bytes;
    double layer = 1e3 * bytes / s->c->link_bytes_per_s / s->c->layers; /* the last one */
    push(s, BT_MAX(s->now_ms + layer, s->live[id].handed_ms), EV_HANDOFF_END, id, 0);
}

static void prefill_end(struct sim *s, uint32_t node)
{
    struct prefill_node *p = &s->p[node];
    uint32_t id = p->running;
    struct bt_sim_record *rec = &s->r->records[id];
    p->running = NONE;
    give_first(s, id);
    keep_prompt(s, id, node);
    start_prefill(s, node);
    if (output_of(s, id) == s->live[id].given + 1) {
        expect(s, id, -1);
        rec->tbt_ms = with_gap(s, id, 0);
        finish_placed(s, id, BT_SIM_SERVED);
        return;
    }
    double took = s->now_ms - s->live[id].start_ms;
    if (s->o->admission->at_decode && !failed_since(s, id, rec->decode)) {
        struct bt_sched_request want = ask(s, id);
        struct bt_sched_reject rej;
        show_decode(s, rec->decode);
        if (bt_sched_admit_decode(&s->params, &s->snap, &want, rec->decode, &rej) !=
            BT_SCHED_PLANNED) {
            s->r->wasted_ms += took;
            expect(s, id, -1);
            finish_placed(s, id, BT_SIM_REFUSED_DECODE);
            return;
        }
    }
    hand_off(s, id);
}

static void handoff_end(struct sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    struct live *l = &s->live[id];
    bool decode_gone = failed_since(s, id, rec->decode);
    if (decode_gone || failed_since(s, id, rec->prefill)) {
        l->given++;
        abandon(s, id, decode_gone ? rec->decode : rec->prefill, true);
        return;
    }
    struct bt_sim_row row = {.id = id,
                             .tokens = tokens_of(s, id) + 1,
                             .steps = output_of(s, id) - l->given - 1,
                             .first_ms = l->prefilled_ms};
    expect(s, id, -1);
    if (!bt_sim_decode_add(s->d[rec->decode].d, s->now_ms, &row)) {
        finish_placed(s, id, BT_SIM_REFUSED_OTHER);
        return;
    }
    wake_decode(s, rec->decode);
}

static void prompt_begin(struct sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    const struct bt_sim_request *q = &s->req[id];
    const struct live *l = &s->live[id];
    if (failed_since(s, id, rec->prefill)) {
        abandon(s, id, rec->prefill, true);
        return;
    }
    uint32_t local = hold_prefix(s, id, rec->prefill);
    bool fetched = l->best_tokens > local && !fetch_lost(s, id);
    rec->fetched_tokens = fetched ? BT_MIN(l->fetch_tokens, l->best_tokens - local) : 0;
    rec->cached_tokens = BT_MAX(local, rec->fetched_tokens != 0 ? l->best_tokens : 0);
    s->r->input_tokens += q->input;
    s->r->cached_tokens += rec->cached_tokens;
    s->r->fetched_tokens += rec->fetched_tokens;
    s->r->bytes_load += (double)rec->cached_tokens * s->c->token_bytes;
    if (rec->decode != rec->prefill) {
        start_handoff(s, id);
    }
    struct bt_sim_prompt p = {.id = id, .from = rec->cached_tokens, .tokens = tokens_of(s, id)};
    bt_sim_decode_prompt(s->d[rec->prefill].d, s->now_ms, &p);
    wake_decode(s, rec->prefill);
}

/* Its row goes on where it is, or where rows are packed. */
static void prompt_end(struct sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    give_first(s, id);
    s->r->mixed_prompts++;
    keep_prompt(s, id, rec->prefill);
    if (rec->decode != rec->prefill && output_of(s, id) > s->live[id].given + 1) {
        hand_off(s, id);
        return;
    }
    expect(s, id, -1);
    struct bt_sim_row row = {.id = id,
                             .tokens = tokens_of(s, id) + 1,
                             .steps = output_of(s, id) - s->live[id].given - 1,
                             .first_ms = s->now_ms};
    if (row.steps == 0) {
        rec->tbt_ms = with_gap(s, id, 0);
        finish_placed(s, id, BT_SIM_SERVED);
    } else if (!bt_sim_decode_add(s->d[rec->decode].d, s->now_ms, &row)) {
        finish_placed(s, id, BT_SIM_REFUSED_OTHER);
    }
}

static void decode_event(struct sim *s, uint32_t node)
{
    struct bt_sim_done done[DONE_AT_ONCE];
    uint32_t n = bt_sim_decode_advance(s->d[node].d, done, DONE_AT_ONCE);
    for (uint32_t i = 0; i < n; i++) {
        struct bt_sim_record *rec = &s->r->records[done[i].id];
        if (done[i].prompt) {
            prompt_end(s, done[i].id);
            continue;
        }
        rec->tbt_ms = with_gap(s, done[i].id, done[i].tbt_ms);
        s->lives.ended++;
        finish_placed(s, done[i].id, BT_SIM_SERVED);
    }
    wake_decode(s, node);
}

/* ---- failures ---- */

static void lose_row(void *arg, uint32_t id, uint32_t generated, bool prompt)
{
    struct sim *s = arg;
    const struct bt_sim_record *rec = &s->r->records[id];
    s->live[id].given += prompt ? 0 : 1 + generated;
    abandon(s, id, prompt ? rec->prefill : rec->decode, prompt);
}

static void fail_prefill(struct sim *s, uint32_t node)
{
    struct prefill_node *p = &s->p[node];
    if (p->running != NONE) {
        abandon(s, p->running, node, true);
    }
    for (int late = 0; late < 2; late++) {
        uint32_t id = p->queue[late].first;
        while (id != NONE) {
            uint32_t following = s->live[id].next;
            abandon(s, id, node, true);
            id = following;
        }
        p->queue[late] = (struct prefill_queue){NONE, NONE, 0};
    }
    p->running = NONE;
    p->free_ms = 0;
    p->version++;
}

static void fail_node(struct sim *s, const struct bt_sim_failure *f)
{
    uint32_t node = f->node;
    s->failed_ms[node] = s->now_ms;
    s->workers[node].kvstore = BT_SCHED_NONE;
    s->kvstores[node].avoid = true;
    s->links[node] = (struct link){0};
    fail_prefill(s, node);
    if (s->d[node].d != NULL) {
        bt_sim_decode_fail(s->d[node].d, s->now_ms, lose_row, s);
        s->d[node].version++;
    }
    bt_sim_caches_clear(s->caches, node);
    push(s, s->now_ms + f->down_ms, EV_BACK, node, 0);
}

/* ---- roles ---- */

static void give_role(struct sim *s, uint32_t i, bool prefill)
{
    const struct bt_sim_cluster *c = s->c;
    s->workers[i] = (struct bt_sched_worker){.node = i,
                                             .kvstore = s->workers[i].kvstore,
                                             .prefill = prefill,
                                             .decode = !prefill,
                                             .cost = prefill ? &c->prefill : &c->decode,
                                             .prompt_cost = &c->prefill};
    if (!prefill) {
        s->workers[i].chunk_tokens = SHORT_CHUNK;
        s->workers[i].slots_total = (uint32_t)c->rows_max;
        s->workers[i].pages_total = (uint32_t)(c->kv_tokens / BT_SIM_BLOCK_TOKENS);
    }
}

static bool has_nothing(const struct sim *s, uint32_t i)
{
    const struct prefill_node *p = &s->p[i];
    const struct decode_node *d = &s->d[i];
    return p->running == NONE && p->queue[0].first == NONE && p->queue[1].first == NONE &&
           d->assigned == 0 && !(bt_sim_decode_prompt_ms(d->d) > 0);
}

static void look_at_roles(struct sim *s)
{
    uint32_t node, changing = s->roles.changing;
    show(s);
    if (bt_sim_roles_look(&s->roles, &s->params, s->workers,
                          changing != BT_BALANCE_NONE && has_nothing(s, changing), s->now_ms,
                          &node)) {
        give_role(s, node, s->roles.to_prefill);
    }
    if (s->finished < s->r->n) {
        push(s, s->now_ms + BT_SIM_ROLES_LOOK_MS, EV_LOOK, 0, 0);
    }
}

/* ---- the run ---- */

static void sample(struct sim *s)
{
    struct bt_sim_result *r = s->r;
    if (r->n_samples == s->samples_cap) {
        s->samples_cap = s->samples_cap != 0 ? 2 * s->samples_cap : 1024;
        r->samples = bt_realloc(r->samples, s->samples_cap * sizeof(*r->samples));
    }
    double p = 0, d = 0;
    uint32_t n_p = 0, n_d = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        p += s->workers[i].prefill ? queue_ms(s, &s->p[i]) : 0;
        d += s->workers[i].decode ? bt_sim_decode_step_ms(s->d[i].d) : 0;
        n_p += s->workers[i].prefill;
        n_d += s->workers[i].decode;
    }
    p /= BT_MAX(n_p, 1u);
    d /= BT_MAX(n_d, 1u);
    r->samples[r->n_samples++] =
        (struct bt_sim_sample){.at_ms = s->now_ms,
                               .prefill_load = s->o->ttft_ms != 0 ? p / s->o->ttft_ms : 0,
                               .decode_load = s->o->tbt_ms != 0 ? d / s->o->tbt_ms : 0,
                               .arrived = s->sample_arrived,
                               .refused = s->sample_refused,
                               .prefill_nodes = n_p,
                               .replicas = bt_sim_caches_replicas(s->caches)};
    s->sample_arrived = s->sample_refused = 0;
    s->sample_at_ms += s->o->sample_ms;
}

static void advance_to(struct sim *s, double at_ms)
{
    while (s->o->sample_ms != 0 && s->sample_at_ms <= at_ms) {
        s->now_ms = s->sample_at_ms;
        sample(s);
    }
    s->now_ms = at_ms;
}

static void step(struct sim *s)
{
    struct bt_sim_event e = bt_sim_events_pop(&s->events);
    if ((e.type == EV_DECODE && e.version != s->d[e.id].version) ||
        ((e.type == EV_PREFILL_END || e.type == EV_PREFILL_FREE) &&
         e.version != s->p[e.id].version) ||
        ((e.type == EV_FAIL || e.type == EV_BACK || e.type == EV_LOOK) && s->finished == s->r->n)) {
        return;
    }
    advance_to(s, e.at_ms);
    switch ((event_t)e.type) {
    case EV_PREFILL_END: prefill_end(s, e.id); break;
    case EV_PREFILL_FREE: start_prefill(s, e.id); break;
    case EV_HANDOFF_END: handoff_end(s, e.id); break;
    case EV_PROMPT: prompt_begin(s, e.id); break;
    case EV_DECODE: decode_event(s, e.id); break;
    case EV_FAIL: fail_node(s, &s->o->failures[e.id]); break;
    case EV_BACK:
        s->workers[e.id].kvstore = e.id;
        s->kvstores[e.id].avoid = false;
        break;
    case EV_REPLAN: replan(s, e.id); break;
    case EV_LOOK: look_at_roles(s); break;
    case EV_COPY: copy_end(s); break;
    }
}

static void set_up(struct sim *s)
{
    const struct bt_sim_cluster *c = s->c;
    uint32_t n = s->n;
    s->p = bt_calloc(n, sizeof(*s->p));
    s->d = bt_calloc(n, sizeof(*s->d));
    s->workers = bt_calloc(n, sizeof(*s->workers));
    s->kvstores = bt_calloc(n, sizeof(*s->kvstores));
    s->match = bt_calloc(n, sizeof(*s->match));
    s->live = bt_calloc(s->r->n, sizeof(*s->live));
    s->links = bt_calloc(n, sizeof(*s->links));
    s->failed_ms = bt_calloc(n, sizeof(*s->failed_ms));
    for (uint32_t i = 0; i < s->o->n_failures; i++) {
        push(s, s->o->failures[i].at_ms, EV_FAIL, i, 0);
    }
    /* Only prompts that decode nodes compute themselves enter their caches. */
    struct bt_sim_disk_config disk = {.blocks = (uint32_t)(c->ssd_tokens / BT_SIM_BLOCK_TOKENS),
                                      .block_bytes = BT_SIM_BLOCK_TOKENS * c->token_bytes,
                                      .read_bytes_per_s = c->ssd_read_bytes_per_s,
                                      .write_bytes_per_s = c->ssd_write_bytes_per_s,
                                      .write = s->o->ssd_write};
    s->caches =
        bt_sim_caches_create(n, (uint32_t)(c->cache_tokens / BT_SIM_BLOCK_TOKENS), s->t->n_unique,
                             s->o->eviction != NULL ? s->o->eviction : &bt_evict_density, &disk);
    for (uint32_t i = 0; i < n; i++) {
        s->kvstores[i].node = i;
        s->failed_ms[i] = -1;
        s->p[i].queue[0] = s->p[i].queue[1] = (struct prefill_queue){NONE, NONE, 0};
        s->p[i].running = NONE;
        if (i >= s->n_p || s->o->roles_window_ms > 0) {
            s->d[i].d = bt_sim_decode_create(&c->decode, c->kv_tokens, (uint32_t)c->rows_max);
            bt_sim_decode_mix(s->d[i].d, &c->prefill, s->o->mixed_step_ms, s->o->mixed_gap_ms,
                              SHORT_CHUNK);
        }
        give_role(s, i, i < s->n_p);
        s->workers[i].kvstore = i;
    }
    bt_sim_replicate_init(&s->replicate, s->o->replica_bytes_per_s, s->o->replica_uses);
    if (s->o->roles_window_ms > 0) {
        bt_sim_roles_init(&s->roles, n, s->o->roles_window_ms);
        push(s, BT_SIM_ROLES_LOOK_MS, EV_LOOK, 0, 0);
    }
    bt_sched_forecast_init(&s->forecast, FORECAST_MS, s->o->life_ms, 0);
    s->forecast.one_life = !s->o->lengths;
    if (s->o->lengths) {
        s->survival = bt_calloc(1, sizeof(*s->survival));
        bt_survival_init(s->survival);
    }
    s->lives = (struct lives){.ms = LIVES_GUESS * s->o->life_ms, .ended = LIVES_GUESS};
    bt_sched_demand_init(&s->demand, DEMAND_MS);
    bt_sched_demand_init(&s->decodes, DEMAND_MS);
    s->snap = (struct bt_sched_snapshot){.workers = s->workers,
                                         .n_workers = n,
                                         .kvstores = s->kvstores,
                                         .n_kvstores = n,
                                         .forecast = &s->forecast,
                                         .demand = &s->demand,
                                         .decodes = &s->decodes};
    s->params = (struct bt_sched_params){.prefill_tokens_per_s = 1,
                                         .step_ms = 1,
                                         .link_bytes_per_s = c->link_bytes_per_s,
                                         .load_bytes_per_s = c->load_bytes_per_s,
                                         .chunk_tokens = (uint32_t)c->chunk_tokens,
                                         .ttft_objective_ms = s->o->ttft_ms,
                                         .tbt_objective_ms = s->o->tbt_ms,
                                         .tbt_margin = s->o->tbt_margin,
                                         .fetch_ratio = s->o->fetch_ratio,
                                         .tail_load = true,
                                         .work_weight = s->o->work_weight,
                                         .work_price = s->o->work_price,
                                         .demand_price = s->o->demand_price,
                                         .background_share = s->o->background_share,
                                         .background_ms = s->o->background_ms,
                                         .pack_share = s->o->pack_share,
                                         .mixed_step_ms = s->o->mixed_step_ms,
                                         .mixed_gap_ms = s->o->mixed_gap_ms};
}

static void tear_down(struct sim *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        s->r->decode_steps += s->d[i].d != NULL ? bt_sim_decode_steps(s->d[i].d) : 0;
        bt_sim_decode_destroy(s->d[i].d);
    }
    s->r->role_changes = s->roles.changes;
    bt_sim_roles_cleanup(&s->roles);
    s->r->bytes_written = bt_sim_caches_written(s->caches);
    bt_sim_caches_destroy(s->caches);
    free(s->p);
    free(s->d);
    free(s->links);
    free(s->failed_ms);
    free(s->workers);
    free(s->kvstores);
    free(s->match);
    free(s->survival);
    free(s->live);
    bt_sim_events_cleanup(&s->events);
}

void bt_sim_run(const struct bt_sim_cluster *cluster, const struct bt_sim_trace *trace,
                const struct bt_sim_options *o, struct bt_sim_result *r)
{
    memset(r, 0, sizeof(*r));
    uint32_t first = (uint32_t)(o->from * trace->n), last = (uint32_t)(o->to * trace->n);
    struct sim s = {.c = cluster,
                    .t = trace,
                    .o = o,
                    .r = r,
                    .req = trace->requests + first,
                    .n_p = (uint32_t)cluster->prefill_nodes,
                    .n = (uint32_t)cluster->prefill_nodes + (uint32_t)cluster->decode_nodes,
                    .sample_at_ms = o->sample_ms};
    r->n = last - first;
    r->records = bt_calloc(BT_MAX(r->n, 1u), sizeof(*r->records));
    set_up(&s);
    for (uint32_t id = 0; id < r->n; id++) {
        double at = (s.req[id].at_ms - s.req[0].at_ms) / o->rate;
        while (s.events.n > 0 && s.events.heap[0].at_ms <= at) {
            step(&s);
        }
        advance_to(&s, at);
        r->records[id].at_ms = at;
        r->span_ms = at;
        arrive(&s, id);
    }
    while (s.events.n > 0) {
        step(&s);
    }
    if (o->progress != NULL) {
        o->progress(o->progress_arg, s.finished, r->n);
    }
    tear_down(&s);
}

void bt_sim_result_cleanup(struct bt_sim_result *r)
{
    free(r->records);
    free(r->samples);
    memset(r, 0, sizeof(*r));
}
