/* One step of a decoder model on the CPU: ragged rows of prompt chunks and single tokens over paged
 * KV. The engine's thread owns it; loops use OpenMP threads. Every product and kernel computes a
 * row in a fixed order. So a result depends neither on the other rows nor on how a prompt is
 * divided into chunks. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cpu/cpu_priv.h"

void bt_cpu_phase(struct bt_engine *e, enum bt_cpu_phase ended)
{
    uint64_t now = bt_mono_ns();
    e->phase_ns[ended] += now - e->phase_at;
    e->phase_at = now;
}

void bt_cpu_phases(struct bt_engine *e, uint64_t ns[BT_CPU_PHASES])
{
    memcpy(ns, e->phase_ns, sizeof(e->phase_ns));
    memset(e->phase_ns, 0, sizeof(e->phase_ns));
}

void bt_cpu_rope_fill(struct bt_engine *e, uint32_t end)
{
    uint32_t d = bt_model_rope_dim(&e->model.config), half = d / 2;
    float scale = e->model.config.rope_scale;
    for (uint32_t p = e->rope_n; p < end; p++) {
        float *cs = e->rope + (size_t)p * d;
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)p * e->inv_freq[i];
            cs[i] = (float)cos((double)angle) * scale;
            cs[half + i] = (float)sin((double)angle) * scale;
        }
    }
    e->rope_n = BT_MAX(e->rope_n, end);
}

void bt_cpu_norm_rows(struct bt_cpu_step *s, const float *add, const float *w, const float *bias,
                      uint32_t parts)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    size_t h = c->hidden;
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *h)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        float *x = e->x + t * h;
        const float *more = add ? add + t * h : NULL;
        void *out = bt_cpu_act_row(e->k, e->a, t, c->hidden, parts);
        if (bias) {
            e->k->layer_norm(x, more, w, bias, out, parts, c->hidden, c->norm_eps);
        } else {
            e->k->norm(x, more, w, out, parts, c->hidden, c->norm_eps);
        }
    }
}

bt_status_t bt_cpu_project(struct bt_cpu_step *s, struct bt_linear *l, const void *act,
                           const float *bias)
{
    struct bt_engine *e = s->e;
    bool adds = bt_gemm_fuses(e->gemm);
    uint32_t h = e->model.config.hidden;
    float *to = adds ? e->x : e->y2;
    if (adds) {
        bt_linear_add(l, act, s->n, e->x);
    } else {
        bt_status_t st = bt_linear_run(l, act, s->n, e->y2);
        if (st != BT_OK) {
            return st;
        }
    }
    for (size_t i = 0; bias && i < (size_t)s->n * h; i++) {
        to[i] += bias[i % h];
    }
    return BT_OK;
}

static inline float widen(uint16_t bf16)
{
    uint32_t u = (uint32_t)bf16 << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

void bt_cpu_embed(const struct bt_engine *e, uint32_t id, float *x)
{
    uint32_t hidden = e->model.config.hidden;
    size_t at = (size_t)id * hidden;
    const uint16_t *hi = e->model.embed + at, *lo = e->model.embed_lo;
    for (uint32_t i = 0; i < hidden; i++) {
        x[i] = widen(hi[i]) + (lo ? widen(lo[at + i]) : 0.0f);
    }
}

/* Rows that the step has in front of batch row r's tokens. */
static uint32_t again(const struct bt_cpu_step *s, uint32_t r)
{
    return s->mtp && s->e->mtp.again[r] ? 1 : 0;
}

/* Assigns rows to the batch's tokens and puts the tokens' embeddings into x. */
static void gather(struct bt_cpu_step *s)
{
    struct bt_engine *e = s->e;
    uint32_t end = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_row *row = &s->b->rows[r];
        const struct bt_host_slot *slot = &e->host.slots[row->slot];
        uint32_t pos = bt_host_row_pos(&e->host, row), more = again(s, r);
        bt_cpu_attn_items(s, s->n, s->n, row->n + more, pos - more, row->slot);
        if (more) {
            e->tokens[s->n++] = (struct bt_cpu_token){.id = slot->tokens[pos - 1],
                                                      .pos = pos - 1,
                                                      .slot = row->slot,
                                                      .kv = BT_CPU_KV_SKIP};
        }
        for (uint32_t i = 0; i < row->n; i++) {
            uint32_t id = row->tokens ? row->tokens[i] : slot->tokens[slot->n_tokens - 1];
            e->tokens[s->n++] = (struct bt_cpu_token){.id = id, .pos = pos + i, .slot = row->slot};
        }
        end = BT_MAX(end, pos + row->n);
    }
    if (!e->model.config.gpt2) {
        bt_cpu_rope_fill(e, end);
    }
    uint32_t hidden = e->model.config.hidden;
    for (uint32_t t = 0; t < s->n; t++) {
        float *x = e->x + (size_t)t * hidden;
        bt_cpu_embed(e, e->tokens[t].id, x);
        const float *p = e->model.positions;
        for (uint32_t i = 0; p && i < hidden; i++) {
            x[i] += p[(size_t)e->tokens[t].pos * hidden + i];
        }
    }
}

/* Moves rows [first, first + n) of the step, which continue to the logits, to row `out`. */
static void keep_run(struct bt_cpu_step *s, uint32_t first, uint32_t out, uint32_t n)
{
    struct bt_engine *e = s->e;
    size_t h = e->model.config.hidden;
    const struct bt_cpu_token *tok = &e->tokens[first];
    memmove(e->x + out * h, e->x + first * h, n * h * sizeof(*e->x));
    bt_cpu_attn_items(s, first, out, n, tok->pos, tok->slot);
}

static bool keeps_hidden(const struct bt_cpu_step *s, const struct bt_engine_row *b)
{
    return s->states || s->e->host.slots[b->slot].params.penalty_alpha > 0;
}

/* All rows of a slot with contrastive search continue, for their hidden states; the first `prompt`
 * of them have prompt logprobs. */
static void keep_hidden(struct bt_cpu_step *s, struct bt_host_ticket *t,
                        const struct bt_engine_row *b, uint32_t row, uint32_t prompt, uint32_t out)
{
    struct bt_cpu_kept *kept = &s->e->kept[out];
    s->contrast = true;
    keep_run(s, row, out, b->n);
    for (uint32_t i = 0; i < b->n; i++) {
        kept[i] = (struct bt_cpu_kept){.prompt = i < prompt ? ++s->n_prompt_out : 0,
                                       .slot = b->slot,
                                       .pos = s->e->tokens[row + i].pos + 1,
                                       .hidden = true};
    }
    if (b->flags & BT_ROW_SAMPLE) {
        bt_host_ticket_sample_row(&s->e->host, t, b);
        kept[b->n - 1].sample = t->n_rows;
    }
}

/* From here on only rows whose logits are wanted are computed: the last layer's KV is complete. */
static void keep_wanted(struct bt_cpu_step *s, struct bt_host_ticket *t)
{
    struct bt_cpu_kept *kept = s->e->kept;
    uint32_t row = 0, out = 0;
    s->n_items = 0;
    s->attn_work = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_row *b = &s->b->rows[r];
        row += again(s, r);
        uint32_t prompt = bt_host_row_prompt_outs(&s->e->host, b), last = row + b->n - 1;
        if (keeps_hidden(s, b)) {
            keep_hidden(s, t, b, row, prompt, out);
            out += b->n;
            row += b->n;
            continue;
        }
        if (prompt) {
            keep_run(s, row, out, prompt);
        }
        for (uint32_t i = 0; i < prompt; i++) {
            kept[out++] = (struct bt_cpu_kept){
                .prompt = ++s->n_prompt_out, .slot = b->slot, .pos = s->e->tokens[row + i].pos + 1};
        }
        if (b->flags & BT_ROW_SAMPLE) {
            uint32_t wanted = 1 + b->n_draft, sample = t->n_rows;
            bt_host_ticket_sample_row(&s->e->host, t, b);
            if (prompt < b->n) { /* a row with drafts reports no prompt tokens */
                keep_run(s, last - b->n_draft, out, wanted);
                memset(&kept[out], 0, wanted * sizeof(kept[0]));
                out += wanted;
            }
            for (uint32_t i = 0; i < wanted; i++) {
                kept[out - wanted + i].sample = ++sample;
            }
        }
        row += b->n;
    }
    s->n = out;
}

/* The head with prompt logprobs. It takes a limited number of rows at a time, as rows x vocab
 * floats would be too much memory. */
static bt_status_t head_in_parts(struct bt_cpu_step *s, struct bt_host_ticket *t)
{
    struct bt_engine *e = s->e;
    size_t vocab = e->model.config.vocab;
    if (!e->logits) {
        e->logits = aligned_alloc(64, BT_CPU_LOGIT_ROWS * vocab * sizeof(float));
        BT_ASSERT(e->logits);
    }
    bt_host_ticket_outs(t, s->n_prompt_out);
    bt_status_t st = BT_OK;
    for (uint32_t at = 0; st == BT_OK && at < s->n; at += BT_CPU_LOGIT_ROWS) {
        uint32_t m = BT_MIN(s->n - at, (uint32_t)BT_CPU_LOGIT_ROWS);
        st = bt_linear_run(e->model.lm_head,
                           bt_cpu_act_row(e->k, e->a, at, e->model.config.hidden, 2), m, e->logits);
#pragma omp parallel for num_threads(e->threads) schedule(dynamic, 4)
        for (uint32_t i = 0; i < (st == BT_OK ? m : 0); i++) {
            const struct bt_cpu_kept *k = &e->kept[at + i];
            const float *logits = e->logits + i * vocab;
            if (k->prompt) {
                bt_host_prompt_out(&e->host, k->slot, k->pos, logits, &t->out[k->prompt - 1]);
            }
            if (k->sample) {
                memcpy(t->logits + (k->sample - 1) * vocab, logits, vocab * sizeof(*logits));
            }
        }
    }
    return st;
}

/* All layers of the model; then only rows that are needed behind them are in the step. */
static bt_status_t run_layers(struct bt_cpu_step *s, struct bt_host_ticket *t)
{
    struct bt_engine *e = s->e;
    const struct bt_engine_batch *b = s->b;
    const struct bt_model_config *c = &e->model.config;
    e->phase_at = bt_mono_ns();
    gather(s);
    bt_cpu_phase(e, BT_CPU_PHASE_GATHER);
    for (uint32_t l = 0; l < c->layers; l++) {
        const struct bt_cpu_layer *y = &e->model.layers[l];
        bt_status_t st = bt_host_layer_wait(&e->host, b, l);
        if (st != BT_OK) {
            return st;
        }
        bt_cpu_phase(e, BT_CPU_PHASE_WAIT);
        bt_cpu_norm_rows(s, l ? bt_cpu_residual(e) : NULL, y->norm_attn, y->norm_attn_bias, 2);
        if (s->dola) { /* x is whole now */
            bt_cpu_dola_keep(s, l);
        }
        bt_cpu_phase(e, BT_CPU_PHASE_NORM);
        st = bt_cpu_attn_inputs(s, l);
        if (st != BT_OK) {
            return st;
        }
        bt_host_layer_fire(&e->host, b, l); /* K and V of the layer are complete */
        bt_cpu_phase(e, BT_CPU_PHASE_WAIT);
        if (l + 1 == c->layers && !s->mtp) {
            keep_wanted(s, t);
            if (s->n == 0) {
                break;
            }
        }
        st = bt_cpu_attn_outputs(s, l);
        if (st == BT_OK) {
            st = bt_cpu_mlp(s, l);
        }
        if (st != BT_OK) {
            return st;
        }
    }
    if (s->mtp) {
        bt_cpu_mtp_states(s);
        keep_wanted(s, t);
    } else {
        bt_host_step_end(&e->host, b);
    }
    if (s->n > 0 && s->contrast) {
        bt_cpu_contrast_keep(s);
    }
    return BT_OK;
}

/* The final norm, and logits of the rows that are left. */
static bt_status_t head(struct bt_cpu_step *s, struct bt_host_ticket *t)
{
    struct bt_engine *e = s->e;
    bt_cpu_norm_rows(s, bt_cpu_last_residual(s), e->model.norm, e->model.norm_bias, 2);
    bt_cpu_phase(e, BT_CPU_PHASE_NORM);
    bt_status_t st = s->n_prompt_out ? head_in_parts(s, t)
                                     : bt_linear_run(e->model.lm_head, e->a, s->n, t->logits);
    if (st == BT_OK && s->dola) {
        st = bt_cpu_dola_head(s, t);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_HEAD);
    return st;
}

/* The MTP layer's KV of the step's n rows: one more layer, behind the logits. */
static bt_status_t mtp(struct bt_cpu_step *s, uint32_t n)
{
    struct bt_engine *e = s->e;
    const uint32_t layer = e->model.config.layers;
    bt_status_t st = bt_host_layer_wait(&e->host, s->b, layer);
    bt_cpu_phase(e, BT_CPU_PHASE_WAIT);
    st = st == BT_OK ? bt_cpu_mtp_latents(s, n) : st;
    if (st == BT_OK) {
        bt_host_layer_fire(&e->host, s->b, layer);
        bt_host_step_end(&e->host, s->b);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_WAIT);
    return st;
}

bt_status_t bt_cpu_forward(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t)
{
    struct bt_cpu_step s = {.e = e, .b = b, .mtp = e->model.config.mtp};
    if (n_tokens == 0) {
        return BT_OK;
    }
    n_tokens += s.mtp ? bt_cpu_mtp_begin(e, b) : 0;
    if (n_tokens > bt_cpu_step_rows(e)) {
        return BT_ERR_TOO_LARGE;
    }
    if (!bt_cpu_dola_begin(&s)) {
        return BT_ERR_NO_MEMORY;
    }
    bt_status_t st = run_layers(&s, t);
    if (st == BT_OK && s.n > 0) {
        st = head(&s, t);
    }
    return st == BT_OK && s.mtp ? mtp(&s, n_tokens) : st;
}

bt_status_t bt_cpu_states(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n,
                          float *states)
{
    struct bt_cpu_step s = {.e = e, .b = b, .states = states};
    BT_ASSERT(n > 0);
    return run_layers(&s, NULL);
}
