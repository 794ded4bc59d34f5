/* Drafts of the model's own MTP layer (worker.speculate: mtp; engine.h: draft). The layer reads the
 * hidden state of the last token that ran, which the engine keeps. Its KV moves together with that
 * of the other layers. So a row that was handed off, preempted or replanned has drafts again from
 * its second step on, and they are the same as those of other rows. The engine thread waits for the
 * passes: one for each draft, for all rows at once. */
#include "common/base/clock.h"
#include "common/log/log.h"
#include "decode/decode.h"

#define PASS_STEP 0.1 /* weight of one pass in the mean time of passes */

/* Collects the rows for which the layer may draft. *room_p: how many drafts each of them may
 * have. */
static uint32_t collect(struct bt_wcore *c, struct bt_wmtp *m, float *rates, uint32_t *room_p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->batch.n && n < BT_WORKER_DRAFT_ROWS; i++) {
        struct bt_wreq *r = c->seq_reqs[i];
        uint32_t end = r->sub->len_max;
        if (c->batch.seqs[i].kind == BT_BATCH_DECODE && bt_decode_by_mtp(c, r) &&
            r->len + 1 < end) {
            *room_p = BT_MIN(*room_p, end - r->len - 1);
            rates[n] = bt_decode_draft_rate(c, r, 0);
            m->seqs[n++] = i;
        }
    }
    return n;
}

void bt_decode_draft_by_mtp(struct bt_wcore *c, const struct bt_batch_work *work, uint32_t most)
{
    struct bt_wmtp *m = &c->spec.mtp;
    float rates[BT_WORKER_DRAFT_ROWS];
    uint32_t room = BT_WORKER_MTP_DRAFTS, n = collect(c, m, rates, &room), ready = 0;
    if (n == 0) {
        return;
    }
    double pass_ns = m->pass_ns > 0 ? m->pass_ns : bt_batch_work_ns(&c->speed.fit.cost, work) / 4;
    uint32_t k = bt_spec_choose_passes(&c->speed.fit.cost, work, work->tokens,
                                       BT_MIN(room, most / n), rates, n, pass_ns, &c->spec.passes);
    for (uint32_t i = 0; i < n && k > 0; i++) { /* a row may have no free page */
        struct bt_wreq *r = c->seq_reqs[m->seqs[i]];
        if (bt_decode_draft_pages(c, r, k) == k && !c->fatal) {
            m->seqs[ready] = m->seqs[i];
            m->slots[ready++] = r->slot;
        }
    }
    if (ready == 0 || c->fatal) {
        return;
    }
    uint64_t at = bt_mono_ns();
    bt_status_t st = c->vt->draft(c->eng, m->slots, ready, k, m->outs, m->counts);
    if (st != BT_OK) {
        bt_wcore_fatal(c, st, "draft");
        return;
    }
    double ns = (double)(bt_mono_ns() - at);
    uint32_t all = 0;
    for (uint32_t i = 0; i < ready; i++) {
        struct bt_wreq *r = c->seq_reqs[m->seqs[i]];
        for (uint32_t p = 0; p < m->counts[i]; p++) {
            r->tokens[r->len + p] = m->outs[(size_t)i * k + p].token;
        }
        r->row->match = 0;
        c->batch.seqs[m->seqs[i]].drafts = m->counts[i];
        all += m->counts[i];
    }
    if (all > 0) { /* rows in their first step have no drafts, and take no time */
        m->pass_ns += (m->pass_ns > 0 ? PASS_STEP : 1) * (ns / k - m->pass_ns);
    }
    c->spec.drafting_ns += ns;
}
