/* The MTP layer on the CPU (DeepSeek-V3, 2.2): a decoder layer behind the model's that predicts one
 * token further. For the token t at position p it reads
 *
 *   x = eh_proj [enorm(embedding of t); hnorm(hidden state of the token at p - 1)]
 *
 * where a hidden state is the last layer's behind the final norm, as in SGLang and vLLM. The
 * layer's output behind its own norm gives, with the model's head, the token at p + 1, and is the
 * hidden state for a further draft (as in SGLang; vLLM takes it from before that norm).
 *
 * KV: a token's row of the layer lies where the token's other rows lie, and depends on nothing
 * behind the token. So a block's bytes follow from its tokens, as those of all layers do, and
 * pages, flows and the pool need to know nothing of the layer but its number. Position 0 has no
 * hidden state before it: its row is zeros, and nothing attends to it.
 *
 * Each step computes these rows for all its tokens; only drafts need the rest of the layer. The
 * first row of a step may lack the hidden state before it, as no state travels with KV: then the
 * token before it runs once more, in front of the row, and stores nothing. Owner thread: the
 * engine's. */
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/cpu/pages.h"

static float *floats(size_t n)
{
    return aligned_alloc(64, BT_ALIGN_UP(n * sizeof(float), (size_t)64));
}

bool bt_cpu_mtp_open(struct bt_engine *e, size_t rows)
{
    struct bt_cpu_mtp *m = &e->mtp;
    uint32_t hidden = e->model.config.hidden, slots = e->host.info.max_slots;
    size_t act = bt_cpu_act_bytes(e->k, rows, 2 * hidden, 2);
    m->states = floats(rows * hidden);
    m->scratch = floats((size_t)e->threads * hidden);
    m->before = bt_calloc(rows, sizeof(*m->before));
    m->again = bt_calloc(e->host.info.max_rows, sizeof(*m->again));
    m->act = bt_pages_alloc(act);
    m->drafting = bt_calloc(slots, sizeof(*m->drafting));
    if (m->act) {
        memset(m->act, 0, act); /* products read rows behind the last one */
    }
    return m->states && m->scratch && m->act;
}

void bt_cpu_mtp_cleanup(struct bt_engine *e)
{
    free(e->mtp.states);
    free(e->mtp.scratch);
    free(e->mtp.before);
    free(e->mtp.again);
    free(e->mtp.act);
    free(e->mtp.drafting);
    free(e->mtp.logits);
}

uint32_t bt_cpu_mtp_begin(struct bt_engine *e, const struct bt_engine_batch *b)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t pos = bt_host_row_pos(&e->host, row);
        e->mtp.again[r] = pos > 0 && !(row->flags & BT_ROW_BEAM) &&
                          pos <= e->host.slots[row->slot].n_tokens &&
                          bt_host_state(&e->host, row->slot, pos - 1) == NULL;
        n += e->mtp.again[r];
    }
    return n;
}

/* Hidden states of all rows: x += add, then its norm. */
static void states(struct bt_cpu_step *s, const float *add, const float *norm)
{
    struct bt_engine *e = s->e;
    size_t hidden = e->model.config.hidden;
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *hidden)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        float *x = e->x + t * hidden, *out = e->mtp.states + t * hidden;
        for (size_t i = 0; add && i < hidden; i++) {
            x[i] += add[t * hidden + i];
        }
        memcpy(out, x, hidden * sizeof(*x));
        e->k->head(out, NULL, norm, NULL, (uint32_t)hidden, e->model.config.norm_eps);
    }
}

void bt_cpu_mtp_states(struct bt_cpu_step *s)
{
    states(s, bt_cpu_residual(s->e), s->e->model.norm);
}

/* x = the layer's input for each row, by the states in `before`; NULL: the row is nothing. */
static bt_status_t join(struct bt_cpu_step *s)
{
    struct bt_engine *e = s->e;
    const struct bt_cpu_model *m = &e->model;
    uint32_t hidden = m->config.hidden;
    float eps = m->config.norm_eps;
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *hidden * 2)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        float *x = e->mtp.scratch + (size_t)omp_get_thread_num() * hidden;
        void *row = bt_cpu_act_row(e->k, e->mtp.act, t, 2 * hidden, 2);
        const float *before = e->mtp.before[t];
        bt_cpu_embed(e, e->tokens[t].id, x);
        e->k->head(x, NULL, m->mtp.norm_embed, NULL, hidden, eps);
        e->k->to_act(x, row, 0, hidden);
        memset(x, 0, hidden * sizeof(*x));
        if (before) {
            memcpy(x, before, hidden * sizeof(*x));
            e->k->head(x, NULL, m->mtp.norm_state, NULL, hidden, eps);
        }
        e->k->to_act(x, row, hidden, hidden);
    }
    return bt_linear_run(m->mtp.join, e->mtp.act, s->n, e->x);
}

bt_status_t bt_cpu_mtp_latents(struct bt_cpu_step *s, uint32_t n)
{
    struct bt_engine *e = s->e;
    size_t hidden = e->model.config.hidden;
    const uint32_t layer = e->model.config.layers;
    uint32_t t = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_row *row = &s->b->rows[r];
        bool beam = row->flags & BT_ROW_BEAM;
        for (uint32_t i = 0; i < row->n + e->mtp.again[r]; i++, t++) {
            struct bt_cpu_token *tok = &e->tokens[t];
            const float *before = NULL;
            if (i > 0) {
                before = e->mtp.states + (size_t)(t - 1) * hidden;
            } else if (tok->pos > 0 && tok->kv == BT_CPU_KV_STORE) {
                before = bt_host_state(&e->host, tok->slot, tok->pos - 1);
            }
            e->mtp.before[t] = beam ? NULL : before;
            if (tok->kv == BT_CPU_KV_STORE && !e->mtp.before[t]) {
                tok->kv = BT_CPU_KV_ZERO;
            }
        }
    }
    s->n = n;
    bt_status_t st = join(s);
    if (st == BT_OK) {
        bt_cpu_norm_rows(s, NULL, e->model.layers[layer].norm_attn, NULL, 2);
        st = bt_cpu_attn_latents(s, layer);
    }
    t = 0;
    for (uint32_t r = 0; st == BT_OK && r < s->b->n_rows; r++) {
        const struct bt_engine_row *row = &s->b->rows[r];
        uint32_t some = 1 + row->n_draft;
        t += row->n + e->mtp.again[r];
        if (row->flags & BT_ROW_BEAM) {
            e->host.slots[row->slot].n_states = 0;
            continue;
        }
        if (some < row->n + e->mtp.again[r]) { /* the one before them, too: a row may run again */
            some++;
        }
        bt_host_keep_states(&e->host, row->slot, e->tokens[t - some].pos,
                            e->mtp.states + (t - some) * hidden, some);
    }
    return st;
}

/* ---- drafts ---- */

/* One pass: a draft behind each slot that is still drafting. */
static bt_status_t pass(struct bt_engine *e, uint32_t n)
{
    struct bt_cpu_step s = {.e = e, .n = n};
    const uint32_t layer = e->model.config.layers;
    const struct bt_cpu_layer *y = &e->model.layers[layer];
    uint32_t hidden = e->model.config.hidden;
    for (uint32_t t = 0; t < n; t++) {
        bt_cpu_attn_items(&s, t, t, 1, e->tokens[t].pos, e->tokens[t].slot);
    }
    bt_status_t st = join(&s);
    if (st == BT_OK) {
        bt_cpu_norm_rows(&s, NULL, y->norm_attn, NULL, 2);
        st = bt_cpu_attn_inputs(&s, layer);
    }
    st = st == BT_OK ? bt_cpu_attn_outputs(&s, layer) : st;
    st = st == BT_OK ? bt_cpu_mlp(&s, layer) : st;
    if (st != BT_OK) {
        return st;
    }
    states(&s, bt_cpu_residual(e), e->model.mtp.norm);
    for (uint32_t t = 0; t < n; t++) {
        e->k->to_act(e->mtp.states + (size_t)t * hidden, bt_cpu_act_row(e->k, e->a, t, hidden, 2),
                     0, hidden);
    }
    return bt_linear_run(e->model.lm_head, e->a, n, e->mtp.logits);
}

/* Returns whether slot may have drafts. Slots that are not open or have no page get none. */
static bool fits(const struct bt_engine *e, uint32_t slot, uint32_t k)
{
    const struct bt_host *h = &e->host;
    const struct bt_host_slot *s = &h->slots[slot];
    uint32_t page_tokens = h->info.layout.page_tokens;
    if (slot >= h->info.max_slots || !s->open || s->params.n_dola || s->params.penalty_alpha > 0) {
        return false;
    }
    uint32_t end = BT_MIN(s->n_tokens + k - 1, h->info.max_model_len);
    for (uint32_t i = 0; i < BT_DIV_UP(end, page_tokens); i++) {
        if (!s->pages[i]) {
            return false;
        }
    }
    return true;
}

static bool draft_logits(struct bt_engine *e, uint32_t n)
{
    size_t want = (size_t)bt_gemm_rows(n) * e->model.config.vocab;
    if (want > e->mtp.cap_logits) {
        free(e->mtp.logits);
        e->mtp.logits = floats(want);
        e->mtp.cap_logits = e->mtp.logits ? want : 0;
    }
    return want <= e->mtp.cap_logits;
}

/* The slots' k passes; those whose text cannot grow any more leave. */
static bt_status_t passes(struct bt_engine *e, uint32_t n, uint32_t k, struct bt_engine_out *outs,
                          uint32_t *counts)
{
    size_t hidden = e->model.config.hidden, vocab = e->model.config.vocab;
    for (uint32_t p = 0; n > 0 && p < k; p++) {
        bt_status_t st = pass(e, n);
        if (st != BT_OK) {
            return st;
        }
        uint32_t stay = 0;
        for (uint32_t t = 0; t < n; t++) {
            uint32_t i = e->mtp.drafting[t], slot = e->tokens[t].slot;
            struct bt_engine_out *o = &outs[(size_t)i * k + p];
            bt_host_draft(&e->host, slot, e->mtp.logits + t * vocab, o);
            if (o->bad || o->pos + 1 == e->host.info.max_model_len) {
                counts[i] += !o->bad;
                continue;
            }
            counts[i]++;
            e->mtp.drafting[stay] = i;
            e->mtp.before[stay] = e->mtp.states + t * hidden;
            e->tokens[stay++] = (struct bt_cpu_token){.id = o->token, .pos = o->pos, .slot = slot};
        }
        n = stay;
    }
    return BT_OK;
}

bt_status_t bt_cpu_draft(struct bt_engine *e, const uint32_t *slots, uint32_t n, uint32_t k,
                         struct bt_engine_out *outs, uint32_t *counts)
{
    uint32_t ready = 0, end = 0;
    if (n > e->host.info.max_rows) {
        return BT_ERR_TOO_LARGE;
    }
    if (n > e->host.info.max_slots || k == 0) {
        return BT_ERR_INVALID;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_host_slot *s = &e->host.slots[slots[i]];
        if (!fits(e, slots[i], k)) {
            return BT_ERR_INVALID;
        }
        counts[i] = 0;
        const float *before =
            s->n_tokens >= 2 ? bt_host_state(&e->host, slots[i], s->n_tokens - 2) : NULL;
        if (before && s->n_tokens < e->host.info.max_model_len) {
            e->mtp.drafting[ready] = i;
            e->mtp.before[ready] = before;
            e->tokens[ready++] = (struct bt_cpu_token){
                .id = s->tokens[s->n_tokens - 1], .pos = s->n_tokens - 1, .slot = slots[i]};
            end = BT_MAX(end, BT_MIN(s->n_tokens + k, e->host.info.max_model_len));
        }
    }
    if (!draft_logits(e, BT_MAX(ready, 1u))) {
        return BT_ERR_NO_MEMORY;
    }
    e->phase_at = bt_mono_ns();
    bt_cpu_rope_fill(e, end);
    bt_status_t st = passes(e, ready, k, outs, counts);
    for (uint32_t i = 0; i < n; i++) {
        bt_host_undraft(&e->host, slots[i], counts[i]);
    }
    return st;
}
