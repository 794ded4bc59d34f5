/* What this conductor expects, for admission: how long rows will go on (survival estimates), which
 * rows will come from prefill (forecast), and how much work is asked of both stages (demand;
 * decodes and let_in). Pure. */
#include "conductor/request/machine_priv.h"

#define BUCKET_MS 100.0        /* of the forecast: 51 s ahead */
#define LIFE_MS   5000.0       /* until something is known */
#define LOOK_NS   500000000ull /* between two looks at how far rows have come */
#define LOOK_PART 0.5          /* of a look, against those before */
#define ROWS_MAX  256          /* of a look */
/* Pages are planned for the length that nine of ten answers stay below. */
#define LENGTH_QUANTILE 0.9

static double ms_of(uint64_t ns)
{
    return (double)ns / 1e6;
}

void bt_expect_init(struct bt_machine *mc, uint64_t now_ns)
{
    bt_survival_init(&mc->expect.survival);
    bt_sched_expected_init(&mc->expect.stages, BUCKET_MS, LIFE_MS, ms_of(now_ns));
}

void bt_expect_show(struct bt_machine *mc, uint64_t now_ns, struct bt_sched_snapshot *s)
{
    bt_sched_expected_show(&mc->expect.stages, ms_of(now_ns), s);
}

void bt_expect_demand(struct bt_sequence *sq, uint64_t now_ns, double compute_ms,
                      double decode_work, bool let_in)
{
    if (!sq->demanded) {
        bt_sched_demand_note(&sq->r->mc->expect.stages.demand, ms_of(now_ns), compute_ms);
        sq->demanded = true;
    }
    if (let_in && !sq->let_in) {
        bt_sched_expected_let_in(&sq->r->mc->expect.stages, ms_of(now_ns), compute_ms, decode_work);
        sq->let_in = true;
    }
}

void bt_expect_late(struct bt_sequence *sq, uint64_t now_ns, double compute_ms)
{
    if (!sq->late_demanded) {
        bt_sched_demand_note(&sq->r->mc->expect.stages.late_demand, ms_of(now_ns), compute_ms);
        sq->late_demanded = true;
    }
}

static struct bt_survival_key key_of(const struct bt_request *r)
{
    return bt_survival_key(r->tenant, (uint32_t)r->spec.prompt.n);
}

void bt_expect_length(const struct bt_sequence *sq, struct bt_sched_request *req)
{
    const struct bt_request *r = sq->r;
    uint32_t have = bt_sequence_have(sq);
    uint32_t most = have + req->max_new;
    if (r->spec.sampling.n_eos == 0 && r->spec.stop == NULL) { /* only the limit ends it */
        req->expect_new = req->likely_new = req->max_new;
        req->mean_new = req->max_new;
        return;
    }
    req->expect_new =
        bt_survival_quantile(&r->mc->expect.survival, key_of(r), have, most, LENGTH_QUANTILE);
    req->likely_new = bt_survival_quantile(&r->mc->expect.survival, key_of(r), have, most, 0.5);
    req->mean_new = bt_survival_mean(&r->mc->expect.survival, key_of(r), have, most);
}

static void note_rows(const struct bt_flight *f, uint64_t now_ns, int sign)
{
    struct bt_machine *mc = f->sequence->r->mc;
    for (uint32_t i = 0; i < f->own_rows; i++) {
        bt_sched_expected_row(&mc->expect.stages, f->plan.background, ms_of(now_ns),
                              f->expect_ready_ms, f->sequence->n_tokens, f->plan.takes.row_ms,
                              sign);
    }
}

void bt_expect_planned(struct bt_flight *f, uint64_t now_ns)
{
    if (f->decode == NULL) {
        return;
    }
    double left = f->plan.first.ms - ms_of(now_ns - f->sequence->r->spec.received_ns);
    f->expect_ready_ms = ms_of(now_ns) + BT_MAX(left, 0);
    f->expected = true;
    note_rows(f, now_ns, 1);
}

/* The request has become a row, or will not become one: it leaves the forecast. */
void bt_expect_settled(struct bt_flight *f, uint64_t now_ns)
{
    if (f->expected) {
        note_rows(f, now_ns, -1);
    }
    f->expected = false;
}

void bt_expect_row(struct bt_flight *f, uint64_t now_ns)
{
    if (f->expected && f->decode != NULL && !f->decode_ended) {
        bt_flight_late_over(f);
        f->decode->own.decoding += f->own_rows;
        f->decode->own.decoding_kv += f->own_kv;
        f->decoding = true;
    }
    bt_expect_settled(f, now_ns);
}

void bt_expect_choice_over(struct bt_request *r, uint32_t choice, bool whole)
{
    struct bt_choice *c = &r->choices[choice];
    bt_survival_note(&r->mc->expect.survival, key_of(r), c->told, c->journal.n, whole);
}

/* Looks at the current rows: how far they have come (for the lengths), and how long they will go on
 * in the mean (for the forecast). */
void bt_expect_learn(struct bt_machine *mc, uint64_t now_ns)
{
    if (now_ns - mc->expect.learned_ns < LOOK_NS) {
        return;
    }
    mc->expect.learned_ns = now_ns;
    double sum = 0, kv = 0, kv_sum = 0;
    uint32_t n = 0;
    struct bt_list *l, *kl;
    bt_list_for_each (l, &mc->all) {
        struct bt_request *r = BT_CONTAINER_OF(l, struct bt_request, link);
        bt_list_for_each (kl, &r->sequences) {
            const struct bt_sequence *sq = BT_CONTAINER_OF(kl, struct bt_sequence, link);
            if (sq->state != BT_SEQ_DECODING || sq->flight == NULL || n == ROWS_MAX) {
                continue;
            }
            struct bt_choice *c = &r->choices[sq->first];
            uint32_t have = c->journal.n;
            bt_survival_reach(&mc->expect.survival, key_of(r), c->told, have);
            c->told = have;
            double ms = sq->flight->plan.gaps.step_ms *
                        bt_survival_mean(&mc->expect.survival, key_of(r), have, r->spec.max_tokens);
            sum += ms;
            kv += sq->flight->own_kv;
            kv_sum += ms * sq->flight->own_kv;
            n++;
        }
    }
    if (n != 0) {
        mc->expect.stages.forecast.life_ms +=
            LOOK_PART * (sum / n - mc->expect.stages.forecast.life_ms);
        double kv_life = kv > 0 ? kv_sum / kv : sum / n;
        mc->expect.stages.forecast.kv_life_ms +=
            LOOK_PART * (kv_life - mc->expect.stages.forecast.kv_life_ms);
    }
}
