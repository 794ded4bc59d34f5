/* Records the stages of traced requests (record.h). A request that is not traced has no record, and
 * costs one comparison. Times from other hosts are moved into the time that this conductor has
 * seen, because their clocks may differ. Pure. */
#include "conductor/request/record.h"

#include <stdio.h>
#include <stdlib.h>

#include "conductor/request/machine_priv.h"

void bt_record_destroy(struct bt_record *rec)
{
    if (rec != NULL) {
        free(rec->at);
        free(rec);
    }
}

static void put_name(char *out, const struct bt_peer *p)
{
    snprintf(out, BT_STAGE_NAME, "%s", p != NULL ? p->name : "");
}

/* NULL: the request is not traced, or has too many stages. */
static struct bt_stage *add(struct bt_sequence *sq, bt_stage_kind_t kind, uint64_t start_ns,
                            uint64_t end_ns)
{
    struct bt_record *rec = sq->r->record;
    if (rec == NULL || rec->n == BT_STAGES_MAX) {
        if (rec != NULL) {
            rec->lost++;
        }
        return NULL;
    }
    if (rec->n == rec->cap) {
        rec->cap = rec->cap != 0 ? 2 * rec->cap : 8;
        rec->at = bt_realloc(rec->at, rec->cap * sizeof(*rec->at));
    }
    struct bt_stage *s = &rec->at[rec->n++];
    *s = (struct bt_stage){.kind = kind,
                           .epoch = sq->epoch,
                           .choice = sq->first,
                           .start_ns = start_ns,
                           .end_ns = BT_MAX(start_ns, end_ns),
                           .queue_ms = -1,
                           .prefill_ms = -1,
                           .ttft_ms = -1,
                           .tbt_ms = -1};
    return s;
}

void bt_record_begin(struct bt_request *r)
{
    if (r->spec.trace.sampled) {
        r->record = bt_calloc(1, sizeof(*r->record));
    }
}

void bt_record_waits(struct bt_sequence *sq, const char *why, uint64_t now_ns)
{
    sq->wait.from_ns = now_ns;
    sq->wait.again = why != NULL;
    snprintf(sq->wait.why, sizeof(sq->wait.why), "%s", why != NULL ? why : "");
}

/* The wait of the sequence is over. */
static void waited(struct bt_sequence *sq, uint64_t now_ns)
{
    if (sq->wait.from_ns == 0) {
        return;
    }
    struct bt_stage *s =
        add(sq, sq->wait.again ? BT_STAGE_REPLAN : BT_STAGE_QUEUE, sq->wait.from_ns, now_ns);
    if (s != NULL) {
        snprintf(s->why, sizeof(s->why), "%s", sq->wait.why);
    }
    sq->wait.from_ns = 0;
}

void bt_record_planned(struct bt_sequence *sq, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    waited(sq, now_ns);
    struct bt_stage *s = add(sq, BT_STAGE_PLAN, now_ns, now_ns);
    if (s == NULL) {
        return;
    }
    put_name(s->from, f->prefill);
    put_name(s->to, f->decode);
    snprintf(s->why, sizeof(s->why), "%s", bt_sched_reason_names[f->plan.reason]);
    s->tokens = sq->n_tokens;
    s->cached_tokens = f->plan.prefix.cached_tokens;
    s->fetch_tokens = f->plan.prefix.fetch_tokens;
    s->queue_ms = f->plan.first.queue_ms;
    s->prefill_ms = f->plan.first.beside_ms + f->plan.first.prefill_ms;
    s->ttft_ms = f->plan.first.ms;
    s->tbt_ms = f->plan.gaps.ms;
}

/* A time of another host's wall clock as one of ours, within [from_ns, now_ns]. */
static uint64_t here(const struct bt_machine *mc, uint64_t wall_ns, uint64_t from_ns,
                     uint64_t now_ns)
{
    uint64_t wall_now = bt_machine_wall_ns(mc);
    uint64_t ago = wall_now > wall_ns ? wall_now - wall_ns : 0;
    return ago < now_ns - from_ns ? now_ns - ago : from_ns;
}

void bt_record_prefilled(struct bt_sequence *sq, const struct bt_event *ev, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    if (sq->r->record == NULL || f == NULL) {
        return;
    }
    const struct bt_machine *mc = sq->r->mc;
    uint64_t start = here(mc, ev->prefill_done.start_ns, f->planned_ns, now_ns);
    struct bt_stage *s =
        add(sq, BT_STAGE_PREFILL, start, here(mc, ev->prefill_done.last_compute_ns, start, now_ns));
    if (s == NULL) {
        return;
    }
    put_name(s->from, f->prefill);
    s->cached_tokens = BT_MIN(ev->prefill_done.cached_tokens, sq->n_tokens);
    s->tokens = sq->n_tokens - s->cached_tokens;
    s->queue_ms = f->plan.first.queue_ms;
    s->prefill_ms = f->plan.first.beside_ms + f->plan.first.prefill_ms;
}

void bt_record_flow(struct bt_sequence *sq, const struct bt_event *ev, uint64_t now_ns)
{
    const struct bt_flight *f = sq->flight;
    if (sq->r->record == NULL || f == NULL) {
        return;
    }
    const struct bt_machine *mc = sq->r->mc;
    uint64_t start = here(mc, ev->flow_done.first_ns, f->planned_ns, now_ns);
    struct bt_stage *s =
        add(sq, BT_STAGE_FLOW, start, here(mc, ev->flow_done.last_ns, start, now_ns));
    if (s != NULL) {
        put_name(s->from, f->kv_prefill);
        put_name(s->to, f->kv_decode);
        s->bytes = ev->flow_done.bytes;
        s->segments = ev->flow_done.segments;
    }
}

void bt_record_token(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_flight *f = sq->flight;
    if (f != NULL) {
        f->given.from_ns = f->given.tokens++ == 0 ? now_ns : f->given.from_ns;
        f->given.to_ns = now_ns;
    }
}

void bt_record_left(struct bt_flight *f)
{
    struct bt_sequence *sq = f->sequence;
    if (f->given.tokens == 0 || sq->r->record == NULL) {
        return;
    }
    struct bt_stage *s = add(sq, BT_STAGE_DECODE, f->given.from_ns, f->given.to_ns);
    if (s != NULL) {
        s->epoch = f->epoch;
        put_name(s->from, f->decode);
        s->tokens = f->given.tokens;
        s->tbt_ms = f->plan.gaps.ms;
    }
}

void bt_record_end(struct bt_request *r, int success, int http, const char *why, uint64_t now_ns)
{
    struct bt_record *rec = r->record;
    if (rec == NULL) {
        return;
    }
    struct bt_list *l;
    bt_list_for_each (l, &r->sequences) { /* those that ended without a plan */
        waited(BT_CONTAINER_OF(l, struct bt_sequence, link), now_ns);
    }
    r->record = NULL;
    rec->received_ns = r->spec.received_ns;
    rec->ended_ns = now_ns;
    rec->first_ns = r->first_ns;
    rec->finish = bt_success_names[success];
    rec->http = http;
    snprintf(rec->error, sizeof(rec->error), "%s", why != NULL ? why : "");
    struct bt_action *a = bt_action_add(r->mc, BT_ACT_TRACED);
    a->r = r;
    a->traced.record = rec;
}
