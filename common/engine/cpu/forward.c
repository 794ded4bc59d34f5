/* One step of a decoder model on the CPU: ragged rows of prompt chunks and single tokens over paged
 * KV. Owner thread: the engine's; its loops use OpenMP threads. Every product and kernel computes a
 * row in a fixed order, so that results depend neither on the other rows nor on the chunks of a
 * prompt. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cpu/cpu_priv.h"

/* Light loops use other threads from about this many floats on. */
#define PARALLEL_FLOATS 32768u
/* Each attention item packs K and V again, so an item has at least this many query tokens. */
#define MIN_ITEM_TOKENS 32u

struct step {
    struct bt_engine *e;
    const struct bt_engine_batch *b;
    uint32_t n;       /* rows of the matrices */
    uint32_t n_items; /* attention blocks */
    uint32_t n_prompt_out;
    uint64_t attn_work;
};

/* Ends a phase. A step reads the clock some hundred times, which takes microseconds of its
 * milliseconds. */
static void phase(struct bt_engine *e, enum bt_cpu_phase ended)
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

static int threads_for(const struct bt_engine *e, uint64_t floats)
{
    return floats < PARALLEL_FLOATS ? 1 : e->threads;
}

static void rope_fill(struct bt_engine *e, uint32_t end)
{
    uint32_t d = e->model.config.head_dim, half = d / 2;
    for (uint32_t p = e->rope_n; p < end; p++) {
        float *cs = e->rope + (size_t)p * d;
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)p * e->inv_freq[i];
            cs[i] = (float)cos((double)angle);
            cs[half + i] = (float)sin((double)angle);
        }
    }
    e->rope_n = BT_MAX(e->rope_n, end);
}

static void add_items(struct step *s, uint32_t first, uint32_t out, uint32_t n, uint32_t pos,
                      uint32_t slot)
{
    const struct bt_model_config *c = &s->e->model.config;
    uint32_t most = s->e->attn_rows / (c->heads / c->kv_heads);
    /* Enough work items to give each thread some, with about the same number of tokens each. */
    uint32_t parts =
        BT_MAX(BT_DIV_UP(n, most), BT_DIV_UP((uint32_t)s->e->threads * 4, c->kv_heads));
    uint32_t per = BT_MIN(BT_MAX(BT_DIV_UP(n, parts), MIN_ITEM_TOKENS), most);
    for (uint32_t i = 0; i < n; i += per) {
        uint32_t m = BT_MIN(per, n - i);
        s->e->items[s->n_items++] = (struct bt_cpu_item){
            .first = first + i, .out = out + i, .n = m, .pos = pos + i, .slot = slot};
        s->attn_work += (uint64_t)(pos + i + m) * m * c->heads * c->head_dim;
    }
}

static inline float widen(uint16_t bf16)
{
    uint32_t u = (uint32_t)bf16 << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Assigns rows to the batch's tokens and puts the tokens' embeddings into x. */
static void gather(struct step *s)
{
    struct bt_engine *e = s->e;
    uint32_t end = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_row *row = &s->b->rows[r];
        const struct bt_host_slot *slot = &e->host.slots[row->slot];
        uint32_t pos = bt_host_row_pos(&e->host, row);
        add_items(s, s->n, s->n, row->n, pos, row->slot);
        for (uint32_t i = 0; i < row->n; i++) {
            uint32_t id = row->tokens ? row->tokens[i] : slot->tokens[slot->n_tokens - 1];
            e->tokens[s->n++] = (struct bt_cpu_token){.id = id, .pos = pos + i, .slot = row->slot};
        }
        end = BT_MAX(end, pos + row->n);
    }
    rope_fill(e, end);
    uint32_t hidden = e->model.config.hidden;
    for (uint32_t t = 0; t < s->n; t++) {
        size_t at = (size_t)e->tokens[t].id * hidden;
        const uint16_t *hi = e->model.embed + at, *lo = e->model.embed_lo;
        float *x = e->x + (size_t)t * hidden;
        for (uint32_t i = 0; i < hidden; i++) {
            x[i] = widen(hi[i]) + (lo ? widen(lo[at + i]) : 0.0f);
        }
    }
}

/* What norm must still add to x: the result of the last product, unless that product added it
 * itself. */
static const float *residual(const struct bt_engine *e)
{
    return bt_gemm_fuses(e->gemm) ? NULL : e->y2;
}

/* x += o's product of a. Without bf16 units the product stays in y2. */
static bt_status_t project(struct step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    if (!bt_gemm_fuses(e->gemm)) {
        return bt_linear_run(y->o, e->a, s->n, e->y2);
    }
    bt_linear_add(y->o, e->a, s->n, e->x);
    return BT_OK;
}

/* x += add; a = act(norm(x) * w) of `parts` parts, all rows. */
static void norm_rows(struct step *s, const float *add, const float *w, uint32_t parts)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    size_t h = c->hidden;
#pragma omp parallel for num_threads(threads_for(e, (uint64_t)s->n *h)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        e->k->norm(e->x + t * h, add ? add + t * h : NULL, w,
                   bt_cpu_act_row(e->k, e->a, t, c->hidden, parts), parts, c->hidden, c->norm_eps);
    }
}

/* One row of the QKV product: bias, QK norm, RoPE. Then q stays in the row, K and V go to their
 * page. */
static void scatter_row(struct bt_engine *e, const struct bt_cpu_layer *y, uint32_t layer,
                        uint32_t t)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cpu_token *tok = &e->tokens[t];
    const struct bt_host *h = &e->host;
    uint32_t d = c->head_dim, page_tokens = h->info.layout.page_tokens;
    float *row = e->y + (size_t)t * (c->heads + 2 * c->kv_heads) * d;
    const float *cs = e->rope + (size_t)tok->pos * d, *bias = y->qkv_bias;
    for (uint32_t i = 0; i < c->heads; i++) {
        e->k->head(row + (size_t)i * d, bias ? bias + (size_t)i * d : NULL, y->q_norm, cs, d,
                   c->norm_eps);
    }
    uint32_t page = h->slots[tok->slot].pages[tok->pos / page_tokens] - 1;
    uint16_t *seg = (uint16_t *)bt_host_segment(h, layer, page);
    for (uint32_t i = 0; i < c->kv_heads; i++) {
        float *k = row + (size_t)(c->heads + i) * d, *v = k + (size_t)c->kv_heads * d;
        const float *bk = bias ? bias + (size_t)(c->heads + i) * d : NULL;
        uint16_t *out = seg + ((size_t)2 * i * page_tokens + tok->pos % page_tokens) * d;
        e->k->head(k, bk, y->k_norm, cs, d, c->norm_eps);
        e->k->to_f16(k, out, d);
        if (bk) {
            e->k->head(v, bk + (size_t)c->kv_heads * d, NULL, NULL, d, c->norm_eps);
        }
        e->k->to_f16(v, out + (size_t)page_tokens * d, d);
    }
}

static void scatter(struct step *s, const struct bt_cpu_layer *y, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint64_t work = (uint64_t)s->n * (c->heads + 2 * c->kv_heads) * c->head_dim;
#pragma omp parallel for num_threads(threads_for(e, work)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        scatter_row(e, y, layer, t);
    }
}

/* Writes zeros behind the `width` columns of each row. An earlier product may have left NaN there,
 * and 0 * NaN is NaN. */
static void clear_tail(struct step *s, uint32_t width)
{
    struct bt_engine *e = s->e;
    for (uint32_t t = 0; e->k->bf16 && width % 32 != 0 && t < s->n; t++) {
        uint16_t *at = (uint16_t *)e->a + bt_act_row(t, width, 2) + bt_act_col(width, 2);
        memset(at, 0, (32 - width % 32) * sizeof(*at));
        memset(at + BT_ACT_LO, 0, (32 - width % 32) * sizeof(*at));
    }
}

/* Attention of y's queries over the pages of `layer` -> a, [rows, heads * head_dim]. */
static void attention(struct step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    const struct bt_kv_layout *l = &e->host.info.layout;
    uint32_t d = c->head_dim, group = c->heads / c->kv_heads, work = s->n_items * c->kv_heads;
    size_t width = (size_t)c->heads * d;
    size_t qkv = width + (size_t)2 * c->kv_heads * d;
    const uint8_t *kv = bt_host_segment(&e->host, layer, 0);
#pragma omp parallel for num_threads(threads_for(e, s->attn_work / 8)) schedule(dynamic, 1)
    for (uint32_t w = 0; w < work; w++) {
        /* from the end: the longest contexts first */
        const struct bt_cpu_item *it = &e->items[s->n_items - 1 - w / c->kv_heads];
        uint32_t head = w % c->kv_heads;
        size_t off = (size_t)head * group * d;
        const struct bt_cpu_attn a = {
            .q = e->y + it->first * qkv + off,
            .q_stride = qkv,
            .out = e->a,
            .out_row = it->out,
            .out_col = (uint32_t)off,
            .out_width = (uint32_t)width,
            .n = it->n,
            .pos = it->pos,
            .group = group,
            .head_dim = d,
            .window = c->window,
            .kv = kv,
            .seg_bytes = l->groups[0].seg_bytes,
            .head_off = (size_t)head * 2 * l->page_tokens * d * 2,
            .pages = e->host.slots[it->slot].pages,
            .page_tokens = l->page_tokens,
            .scale = 1.0f / sqrtf((float)d),
            .scratch = e->scratch + (size_t)omp_get_thread_num() * e->scratch_bytes,
        };
        e->attn(&a);
    }
    clear_tail(s, (uint32_t)width);
}

static bt_status_t mlp(struct step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    size_t inter = e->model.config.intermediate;
    norm_rows(s, residual(e), y->norm_mlp, e->mlp_acts);
    phase(e, BT_CPU_PHASE_NORM);
    if (bt_gemm_fuses(e->gemm)) {
        bt_linear_swiglu(y->gate_up, e->a, s->n, e->a2);
        phase(e, BT_CPU_PHASE_GATE_UP);
        bt_linear_add(y->down, e->a2, s->n, e->x);
        phase(e, BT_CPU_PHASE_DOWN);
        return BT_OK;
    }
    bt_status_t st = bt_linear_run(y->gate_up, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
#pragma omp parallel for num_threads(threads_for(e, s->n *inter)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        e->k->swiglu(e->y + t * 2 * inter, bt_cpu_act_row(e->k, e->a, t, (uint32_t)inter, 2),
                     (uint32_t)inter);
    }
    phase(e, BT_CPU_PHASE_GATE_UP);
    st = bt_linear_run(y->down, e->a, s->n, e->y2);
    phase(e, BT_CPU_PHASE_DOWN);
    return st;
}

/* Moves rows [first, first + n) of the step, which continue to the logits, to row `out`. */
static void keep_run(struct step *s, uint32_t first, uint32_t out, uint32_t n)
{
    struct bt_engine *e = s->e;
    size_t h = e->model.config.hidden;
    const struct bt_cpu_token *tok = &e->tokens[first];
    memmove(e->x + out * h, e->x + first * h, n * h * sizeof(*e->x));
    add_items(s, first, out, n, tok->pos, tok->slot);
}

/* From here on only rows whose logits are wanted are computed: the last layer's KV is complete. */
static void keep_wanted(struct step *s, struct bt_host_ticket *t)
{
    struct bt_cpu_kept *kept = s->e->kept;
    uint32_t row = 0, out = 0, sample = 0;
    s->n_items = 0;
    s->attn_work = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_row *b = &s->b->rows[r];
        uint32_t prompt = bt_host_row_prompt_outs(&s->e->host, b), last = row + b->n - 1;
        if (prompt) {
            keep_run(s, row, out, prompt);
        }
        for (uint32_t i = 0; i < prompt; i++) {
            kept[out++] = (struct bt_cpu_kept){
                .prompt = ++s->n_prompt_out, .slot = b->slot, .pos = s->e->tokens[row + i].pos + 1};
        }
        if (b->flags & BT_ROW_SAMPLE) {
            const struct bt_host_sample want = {
                .slot = b->slot, .pos = s->e->tokens[last].pos + 1, .row = sample};
            bt_host_ticket_sample(t, &want);
            if (prompt < b->n) {
                keep_run(s, last, out, 1);
                kept[out++] = (struct bt_cpu_kept){0};
            }
            kept[out - 1].sample = ++sample;
        }
        row += b->n;
    }
    s->n = out;
    t->n_rows = sample;
}

/* The head with prompt logprobs. It takes a limited number of rows at a time, as rows x vocab
 * floats would be too much memory. */
static bt_status_t head_in_parts(struct step *s, struct bt_host_ticket *t)
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

bt_status_t bt_cpu_forward(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t)
{
    const struct bt_model_config *c = &e->model.config;
    struct step s = {.e = e, .b = b};
    if (n_tokens == 0) {
        return BT_OK;
    }
    e->phase_at = bt_mono_ns();
    gather(&s);
    phase(e, BT_CPU_PHASE_GATHER);
    for (uint32_t l = 0; l < c->layers; l++) {
        const struct bt_cpu_layer *y = &e->model.layers[l];
        bt_status_t st = bt_host_layer_wait(&e->host, b, l);
        if (st != BT_OK) {
            return st;
        }
        phase(e, BT_CPU_PHASE_WAIT);
        norm_rows(&s, l ? residual(e) : NULL, y->norm_attn, 2);
        phase(e, BT_CPU_PHASE_NORM);
        st = bt_linear_run(y->qkv, e->a, s.n, e->y);
        if (st != BT_OK) {
            return st;
        }
        phase(e, BT_CPU_PHASE_QKV);
        scatter(&s, y, l);
        phase(e, BT_CPU_PHASE_SCATTER);
        bt_host_layer_fire(&e->host, b, l); /* K and V of the layer are complete */
        phase(e, BT_CPU_PHASE_WAIT);
        if (l + 1 == c->layers) {
            keep_wanted(&s, t);
            if (s.n == 0) {
                break;
            }
        }
        attention(&s, l);
        phase(e, BT_CPU_PHASE_ATTN);
        st = project(&s, y);
        phase(e, BT_CPU_PHASE_O);
        if (st == BT_OK) {
            st = mlp(&s, y);
        }
        if (st != BT_OK) {
            return st;
        }
    }
    bt_host_step_end(&e->host, b);
    if (s.n == 0) {
        return BT_OK;
    }
    norm_rows(&s, residual(e), e->model.norm, 2);
    phase(e, BT_CPU_PHASE_NORM);
    bt_status_t st = s.n_prompt_out ? head_in_parts(&s, t)
                                    : bt_linear_run(e->model.lm_head, e->a, s.n, t->logits);
    phase(e, BT_CPU_PHASE_HEAD);
    return st;
}
