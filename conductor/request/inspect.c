/* What operators can see of requests; see inspect.h. A ring of fixed size keeps the last plans.
 * Pure. */
#include "conductor/request/inspect.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/request/machine_priv.h"
#include "conductor/request/sources.h"

#define EXPLAINED_MAX 128

struct bt_explain_ring {
    uint32_t n, next;
    struct bt_explanation at[EXPLAINED_MAX];
};

static const char *name_of(const struct bt_peer *p)
{
    return p != NULL ? p->name : "";
}

static void info_of(const struct bt_sequence *sq, uint64_t now_ns, struct bt_request_info *out)
{
    const struct bt_request *r = sq->r;
    const struct bt_flight *f = sq->flight;
    *out = (struct bt_request_info){.id = r->spec.id != NULL ? r->spec.id : "",
                                    .wire_id = sq->id,
                                    .state =
                                        sq->starved ? "no room" : bt_sequence_state_name(sq->state),
                                    .choice = sq->first,
                                    .n = sq->n,
                                    .prompt_tokens = (uint32_t)r->spec.prompt.n,
                                    .epoch = sq->epoch,
                                    .replans = sq->replans,
                                    .prefill = f != NULL ? name_of(f->prefill) : "",
                                    .decode = f != NULL ? name_of(f->decode) : ""};
    out->age_ms = now_ns > r->spec.received_ns ? (now_ns - r->spec.received_ns) / 1000000 : 0;
    for (uint32_t i = sq->first; i < sq->first + sq->n; i++) {
        out->tokens += r->choices[i].journal.n;
    }
}

void bt_machine_each(struct bt_machine *mc, bt_request_info_fn fn, void *arg, uint64_t now_ns)
{
    struct bt_list *l, *kl;
    bt_list_for_each (l, &mc->all) {
        bt_list_for_each (kl, &BT_CONTAINER_OF(l, struct bt_request, link)->sequences) {
            const struct bt_sequence *sq = BT_CONTAINER_OF(kl, struct bt_sequence, link);
            if (sq->state != BT_SEQ_FINISHING || !bt_list_empty(&sq->flights)) {
                struct bt_request_info info;
                info_of(sq, now_ns, &info);
                fn(arg, &info);
            }
        }
    }
}

static bool on_node(const struct bt_peer *p, const char *node)
{
    return p != NULL && strcmp(p->node, node) == 0;
}

static bool uses_worker(const struct bt_flight *f, const void *peer)
{
    return (f->prefill == peer && !f->prefill_ended) || (f->decode == peer && !f->decode_ended);
}

static bool uses_node(const struct bt_flight *f, const void *node)
{
    return on_node(f->prefill, node) || on_node(f->decode, node) || on_node(f->kv_prefill, node) ||
           on_node(f->kv_decode, node);
}

/* Counts the sequences whose current plan uses what. */
static uint32_t count_flights(struct bt_machine *mc,
                              bool (*uses)(const struct bt_flight *f, const void *what),
                              const void *what)
{
    uint32_t n = 0;
    struct bt_list *l, *kl;
    bt_list_for_each (l, &mc->all) {
        bt_list_for_each (kl, &BT_CONTAINER_OF(l, struct bt_request, link)->sequences) {
            const struct bt_flight *f = BT_CONTAINER_OF(kl, struct bt_sequence, link)->flight;
            n += f != NULL && f->wind == BT_FLIGHT_ACTIVE && uses(f, what);
        }
    }
    return n;
}

uint32_t bt_machine_on_worker(struct bt_machine *mc, const struct bt_peer *p)
{
    return count_flights(mc, uses_worker, p);
}

uint32_t bt_machine_on_node(struct bt_machine *mc, const char *node)
{
    return count_flights(mc, uses_node, node);
}

/* ---- explanations ---- */

struct bt_explain_ring *bt_explain_create(void)
{
    return bt_calloc(1, sizeof(struct bt_explain_ring));
}

void bt_explain_destroy(struct bt_explain_ring *x)
{
    for (uint32_t i = 0; x != NULL && i < EXPLAINED_MAX; i++) {
        free(x->at[i].keys);
    }
    free(x);
}

/* Returns the place for a sequence's plan. Each sequence has one place: its later plan replaces the
 * earlier one. */
static struct bt_explanation *place_for(struct bt_explain_ring *x, uint64_t wire_id)
{
    uint32_t last = (x->next + EXPLAINED_MAX - 1) % EXPLAINED_MAX;
    for (uint32_t i = 0; i < x->n; i++) {
        if (x->at[i].wire_id == wire_id && i != last) {
            x->at[i].wire_id = 0; /* an old place: only the newest place is reused below */
            x->at[i].id[0] = '\0';
        }
    }
    if (x->n != 0 && x->at[last].wire_id == wire_id) {
        return &x->at[last];
    }
    struct bt_explanation *e = &x->at[x->next];
    x->next = (x->next + 1) % EXPLAINED_MAX;
    x->n = BT_MIN(x->n + 1, (uint32_t)EXPLAINED_MAX);
    return e;
}

static void note_prompt(struct bt_explanation *e, const struct bt_sequence *sq)
{
    const struct bt_request *r = sq->r;
    e->prompt_tokens = (uint32_t)r->spec.prompt.n;
    e->n_keys = BT_MIN(sq->n_keys, e->prompt_tokens / r->mc->conf.block_tokens);
    snprintf(e->tenant, sizeof(e->tenant), "%s", r->spec.tenant != NULL ? r->spec.tenant : "");
    if (e->n_keys != 0) {
        e->keys = bt_malloc((size_t)e->n_keys * sizeof(*e->keys));
        memcpy(e->keys, sq->keys, (size_t)e->n_keys * sizeof(*e->keys));
    }
}

void bt_explain_note(struct bt_sequence *sq, const struct bt_view_snapshot *v,
                     const struct bt_sched_params *params, const struct bt_sched_request *req,
                     const struct bt_sched_plan *plan, const struct bt_sched_reject *rej)
{
    struct bt_explanation *e = place_for(sq->r->mc->explained, sq->id);
    free(e->keys);
    memset(e, 0, sizeof(*e));
    note_prompt(e, sq);
    snprintf(e->id, sizeof(e->id), "%s", sq->r->spec.id != NULL ? sq->r->spec.id : "");
    e->wire_id = sq->id;
    e->epoch = sq->epoch + (plan != NULL);
    e->planned_ns = bt_machine_wall_ns(sq->r->mc);
    uint64_t age_ns = sq->r->mc->now_ns - sq->r->spec.received_ns;
    e->received_ns = e->planned_ns - BT_MIN(age_ns, e->planned_ns);
    e->n_tokens = req->n_tokens;
    e->n_choices = BT_MAX(req->n_choices, 1u);
    e->planned = plan != NULL;
    snprintf(e->reason, sizeof(e->reason), "%s",
             plan != NULL ? bt_sched_reason_names[plan->reason] : rej->reason);
    snprintf(e->meaning, sizeof(e->meaning), "%s",
             plan != NULL ? bt_sched_reason_meanings[plan->reason] : rej->reason);
    snprintf(e->again, sizeof(e->again), "%s", sq->r->usage.again);
    e->ttft_ms = e->tbt_ms = e->queue_ms = e->prefill_ms = -1;
    e->actual = (struct bt_explained_outcome){.ttft_ms = -1,
                                              .tbt_ms = -1,
                                              .queue_ms = -1,
                                              .prefill_ms = -1,
                                              .planned_ms = -1,
                                              .decode_ms = -1,
                                              .flow_from_ms = -1,
                                              .flow_to_ms = -1,
                                              .hidden_fraction = -1};
    /* The time to first token of a later plan is the time from now to the next token. */
    double before_ms = sq->epoch != 0 ? req->waited_ms : 0;
    if (plan != NULL) {
        e->queue_ms = plan->first.queue_ms;
        e->prefill_ms = plan->first.beside_ms + plan->first.prefill_ms;
        e->both = plan->at.both;
        e->draining = plan->draining;
        e->cached_tokens = plan->prefix.cached_tokens;
        e->ttft_ms = plan->first.ms - before_ms;
        e->tbt_ms = plan->gaps.ms;
        snprintf(e->prefill, sizeof(e->prefill), "%s", v->worker[plan->at.prefill]->name);
        snprintf(e->decode, sizeof(e->decode), "%s", v->worker[plan->at.decode]->name);
    }
    struct bt_sched_candidate list[BT_EXPLAIN_CANDIDATES];
    e->n_candidates = bt_sched_explain(sq->r->mc->conf.policy, params, &v->snap, req, plan, list,
                                       BT_EXPLAIN_CANDIDATES);
    e->n_listed = BT_MIN(e->n_candidates, (uint32_t)BT_EXPLAIN_CANDIDATES);
    for (uint32_t i = 0; i < e->n_listed; i++) {
        const struct bt_peer *m = v->worker[list[i].worker];
        e->candidates[i].c = list[i];
        e->candidates[i].c.ttft_ms -= list[i].ttft_ms >= 0 ? before_ms : 0;
        snprintf(e->candidates[i].name, BT_EXPLAIN_NAME, "%s", m->name);
        snprintf(e->candidates[i].node, BT_EXPLAIN_NAME, "%s", m->node);
    }
}

/* Fills in what has happened to a request since it arrived. Clocks of workers and kvstores may be
 * wrong, so times that lie before the request are left out. */
static void take_outcome(struct bt_explanation *e, const struct bt_request *r, const char *why)
{
    const struct bt_gen_usage *u = &r->usage;
    struct bt_explained_outcome *o = &e->actual;
    o->over = true;
    snprintf(o->error, sizeof(o->error), "%s", why != NULL ? why : "");
    o->cached_tokens = u->cached_tokens;
    o->tokens = u->completion_tokens;
    o->replans = u->replans;
    o->ttft_ms = u->ttft_ms;
    o->tbt_ms = u->tbt_ms;
    o->queue_ms = u->queue_ms;
    o->prefill_ms = u->prefill_ms;
    o->decode_ms = u->decode_ms;
    o->hidden_fraction = u->hidden_fraction;
    o->kv_bytes = u->kv_bytes;
    o->in_time = why == NULL && bt_request_in_time(r);
    if (e->planned_ns >= e->received_ns) {
        o->planned_ms = (double)(e->planned_ns - e->received_ns) / 1e6;
    }
    if (r->flow_first_ns >= e->received_ns && r->flow_last_ns >= r->flow_first_ns) {
        o->flow_from_ms = (double)(r->flow_first_ns - e->received_ns) / 1e6;
        o->flow_to_ms = (double)(r->flow_last_ns - e->received_ns) / 1e6;
    }
}

void bt_explain_outcome(const struct bt_request *r, const char *why)
{
    struct bt_explain_ring *x = r->mc->explained;
    const struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        uint64_t id = BT_CONTAINER_OF(l, struct bt_sequence, link)->id;
        for (uint32_t i = 0; i < x->n; i++) {
            struct bt_explanation *e = &x->at[i];
            if (e->wire_id == id) {
                take_outcome(e, r, why);
            }
        }
    }
}

void bt_explain_sources(struct bt_sequence *sq, uint32_t fetch_tokens,
                        const struct bt_sources *from)
{
    struct bt_explanation *e = place_for(sq->r->mc->explained, sq->id);
    e->fetch_tokens = fetch_tokens;
    e->n_sources = BT_MIN(from->n, (uint32_t)BT_EXPLAIN_SOURCES);
    for (uint32_t i = 0; i < e->n_sources; i++) {
        snprintf(e->sources[i].name, BT_EXPLAIN_NAME, "%s", from->at[i].kv->name);
        e->sources[i].blocks = from->at[i].blocks;
    }
}

/* A client that sent several prompts knows one id "cmpl-..." for all; the requests are "cmpl-...-0"
 * and so on. That id means the first request, as in the response header. */
static bool is_called(const struct bt_explanation *e, const char *id)
{
    size_t n = strlen(id);
    return strncmp(e->id, id, n) == 0 && (e->id[n] == '\0' || strcmp(e->id + n, "-0") == 0);
}

const struct bt_explanation *bt_machine_explain(const struct bt_machine *mc, const char *id)
{
    const struct bt_explain_ring *x = mc->explained;
    char *end = NULL;
    uint64_t wire = id != NULL ? strtoull(id, &end, 16) : 0;
    bool hex = id != NULL && end != id && *end == '\0';
    for (uint32_t i = 0; i < x->n; i++) { /* newest first */
        const struct bt_explanation *e = &x->at[(x->next + EXPLAINED_MAX - 1 - i) % EXPLAINED_MAX];
        if (e->wire_id != 0 && (id == NULL || is_called(e, id) || (hex && e->wire_id == wire))) {
            return e;
        }
    }
    return NULL;
}

const struct bt_explanation *bt_machine_recent(const struct bt_machine *mc, uint32_t i)
{
    const struct bt_explain_ring *x = mc->explained;
    for (uint32_t k = 0; k < x->n; k++) {
        const struct bt_explanation *e = &x->at[(x->next + EXPLAINED_MAX - 1 - k) % EXPLAINED_MAX];
        if (e->wire_id != 0 && i-- == 0) {
            return e;
        }
    }
    return NULL;
}
