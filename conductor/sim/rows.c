/* Rows of decode nodes: rows on their way, a request's first token, its row and its end. */
#include "conductor/sim/sim_priv.h"

#define DONE_AT_ONCE 64

void bt_sim_rows_wake(struct bt_sim *s, uint32_t node)
{
    double next = bt_sim_decode_next_ms(s->d[node].d);
    s->d[node].version++;
    if (next >= 0) {
        bt_sim_push(s, next, EV_DECODE, node, s->d[node].version);
    }
}

void bt_sim_row_placed(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_live *l = &s->live[id];
    struct bt_sched_own *own = &s->nodes[s->r->records[id].decode].own;
    own->rows++;
    own->kv_tokens += s->req[id].input;
    bt_classes_join(&own->classes, l->prompt.priority)->rows++;
    bt_sim_row_expect(s, id, 1);
}

void bt_sim_row_over(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_live *l = &s->live[id];
    struct bt_sched_own *own = &s->nodes[s->r->records[id].decode].own;
    own->rows--;
    own->kv_tokens -= s->req[id].input;
    bt_classes_at(&own->classes, l->prompt.priority)->rows--;
    bt_classes_leave(&own->classes, l->prompt.priority);
}

void bt_sim_row_expect(struct bt_sim *s, uint32_t id, int sign)
{
    const struct bt_sim_live *l = &s->live[id];
    const struct bt_sim_record *rec = &s->r->records[id];
    struct bt_sim_decode_node *d = &s->d[rec->decode];
    uint32_t tokens = s->req[id].input;
    bt_sched_expected_row(&s->stages, l->job.late, s->now_ms, l->ready_ms, tokens, l->row_ms, sign);
    if (l->job.late) { /* no row is preempted for it before it has landed */
        d->late_coming += (uint32_t)sign;
        s->nodes[rec->decode].own.late_kv += sign > 0 ? tokens : -(uint64_t)tokens;
        return;
    }
    d->coming_tokens += sign > 0 ? tokens : -(uint64_t)tokens;
    if (rec->prefill != rec->decode && bt_sim_decode_expect(d->d, s->now_ms, sign)) {
        bt_sim_rows_wake(s, rec->decode);
    }
}

void bt_sim_row_first(struct bt_sim *s, uint32_t id)
{
    struct bt_sim_record *rec = &s->r->records[id];
    struct bt_sim_live *l = &s->live[id];
    l->prefilled_ms = s->now_ms;
    if (l->told_plan) {
        bt_sched_learn_ttft(&s->nodes[rec->prefill].learned, l->work_ms,
                            l->alone ? s->now_ms - l->begun_ms : -1, s->now_ms - l->placed_ms);
    }
    if (l->given == 0) {
        rec->ttft_ms = s->now_ms - rec->at_ms;
    } else {
        l->gap_ms = BT_MAX(l->gap_ms, s->now_ms - l->last_ms);
    }
}

bool bt_sim_row_needless(const struct bt_sim *s, uint32_t id)
{
    return bt_sim_output_of(s, id) <= s->live[id].given + 1;
}

/* A request's TBT if an interruption is one of its longest gaps. The gaps before the interruption
 * count as equal to those after it. */
static double with_gap(const struct bt_sim *s, uint32_t id, double tbt_ms)
{
    const struct bt_sim_live *l = &s->live[id];
    uint32_t gaps = bt_sim_output_of(s, id) - 1, k = BT_DIV_UP(gaps, 10u);
    return l->gap_ms > 0 ? (l->gap_ms + (k - 1) * tbt_ms) / k : tbt_ms;
}

static void served(struct bt_sim *s, uint32_t id, double tbt_ms)
{
    s->r->records[id].tbt_ms = with_gap(s, id, tbt_ms);
    bt_sim_finish(s, id, BT_SIM_SERVED);
}

bool bt_sim_row_begin(struct bt_sim *s, uint32_t id)
{
    bt_sim_row_expect(s, id, -1);
    if (bt_sim_row_needless(s, id)) {
        served(s, id, 0);
        return false;
    }
    struct bt_sim_row row = {.id = id,
                             .tokens = bt_sim_tokens_of(s, id) + 1,
                             .steps = bt_sim_output_of(s, id) - s->live[id].given - 1,
                             .first_ms = s->live[id].prefilled_ms,
                             .late = s->live[id].job.late};
    if (!bt_sim_decode_add(s->d[s->r->records[id].decode].d, s->now_ms, &row)) {
        bt_sim_finish(s, id, BT_SIM_REFUSED_OTHER);
        return false;
    }
    return true;
}

void bt_sim_row_handed(struct bt_sim *s, uint32_t id)
{
    const struct bt_sim_record *rec = &s->r->records[id];
    bool decode_gone = bt_sim_failed_since(s, id, rec->decode);
    if (decode_gone || bt_sim_failed_since(s, id, rec->prefill)) {
        s->live[id].given++;
        bt_sim_abandon(s, id, decode_gone ? rec->decode : rec->prefill, true);
        return;
    }
    if (bt_sim_row_begin(s, id)) {
        bt_sim_rows_wake(s, rec->decode);
    }
}

/* Learns from a row that has ended what bt_outcome_choice learns on a live conductor. */
static void learn_gaps(struct bt_sim *s, uint32_t node, const struct bt_sim_done *done)
{
    const struct bt_sim_live *l = &s->live[done->id];
    struct bt_sched_learned *to = &s->nodes[node].learned;
    bool landing = l->lands;
    if (!l->told_plan) {
        return;
    }
    if (landing) {
        bt_sched_learn_landing(to, l->step_ms, done->first_gap_ms);
    }
    bt_sched_learn_tbt(to, l->step_ms, l->mixed_ms, done->n_gaps - landing,
                       landing ? done->others_ms : done->tbt_ms);
    bt_sched_learn_life(to, done->life_ms);
}

void bt_sim_rows_step(struct bt_sim *s, uint32_t node)
{
    struct bt_sim_done done[DONE_AT_ONCE];
    uint32_t n = bt_sim_decode_advance(s->d[node].d, done, DONE_AT_ONCE);
    for (uint32_t i = 0; i < n; i++) {
        if (done[i].prompt) {
            bt_sim_compute_beside_end(s, done[i].id);
            continue;
        }
        s->lengths.ended++;
        learn_gaps(s, node, &done[i]);
        served(s, done[i].id, done[i].tbt_ms);
    }
    bt_sim_rows_wake(s, node);
}
