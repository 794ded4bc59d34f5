/* The attention half of a layer on the CPU: queries, keys and values of a step's rows, their KV in
 * pages, attention over the pages. Runs on the engine's thread; loops use OpenMP threads.
 *
 * MLA is computed in its absorbed form for prompts and for single tokens alike, so that both agree
 * bit for bit: a head's query is multiplied by its key matrix once (kv_rank values instead of
 * nope), then compared with the latents themselves; the weighted sum of latents goes through the
 * head's value matrix (DeepSeek-V2, 2.1.2 and appendix C). All heads read one K, and V is the first
 * part of K. The other form would expand every cached latent at every step. */
#include <omp.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"

/* Each attention item packs K and V again, so an item has at least this many query tokens. */
#define MIN_ITEM_TOKENS 32u

void bt_cpu_attn_items(struct bt_cpu_step *s, uint32_t first, uint32_t out, uint32_t n,
                       uint32_t pos, uint32_t slot)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint32_t most = e->attn_rows / e->attn_group, groups = c->heads / e->attn_group;
    /* Enough work items to give each thread some, with about the same number of tokens each. */
    uint32_t parts = BT_MAX(BT_DIV_UP(n, most), BT_DIV_UP((uint32_t)e->threads * 4, groups));
    uint32_t per = BT_MIN(BT_MAX(BT_DIV_UP(n, parts), MIN_ITEM_TOKENS), most);
    for (uint32_t i = 0; i < n; i += per) {
        uint32_t m = BT_MIN(per, n - i);
        e->items[s->n_items++] = (struct bt_cpu_item){
            .first = first + i, .out = out + i, .n = m, .pos = pos + i, .slot = slot};
        s->attn_work += (uint64_t)(pos + i + m) * m * c->heads * c->head_dim;
    }
}

/* Writes zeros behind the `width` columns of each row of a. An earlier product may have left NaN
 * there, and 0 * NaN is NaN. */
static void clear_tail(struct bt_cpu_step *s, uint32_t width)
{
    struct bt_engine *e = s->e;
    for (uint32_t t = 0; e->k->bf16 && width % 32 != 0 && t < s->n; t++) {
        uint16_t *at = (uint16_t *)e->a + bt_act_row(t, width, 2) + bt_act_col(width, 2);
        memset(at, 0, (32 - width % 32) * sizeof(*at));
        memset(at + BT_ACT_LO, 0, (32 - width % 32) * sizeof(*at));
    }
}

/* The first plane of a token's page in `layer`, at the token. */
static void *kv_row(const struct bt_engine *e, uint32_t layer, const struct bt_cpu_token *tok)
{
    const struct bt_host *h = &e->host;
    const struct bt_kv_layout *l = &h->info.layout;
    uint32_t page = h->slots[tok->slot].pages[tok->pos / l->page_tokens] - 1;
    return bt_host_segment(h, layer, page) +
           (size_t)(tok->pos % l->page_tokens) * bt_kv_row_bytes(&l->groups[0]);
}

/* Runs the step's items, each with `groups` groups of heads. For group g, kind's k_off and v_off
 * grow by kv_next bytes, its heads lie one behind the other in a row of queries. */
static void run_items(struct bt_cpu_step *s, const struct bt_cpu_attn *kind, uint32_t groups,
                      size_t kv_next)
{
    struct bt_engine *e = s->e;
    uint32_t work = s->n_items * groups;
#pragma omp parallel for num_threads(bt_cpu_threads(e, s->attn_work / 8)) schedule(dynamic, 1)
    for (uint32_t w = 0; w < work; w++) {
        /* from the end: the longest contexts first */
        const struct bt_cpu_item *it = &e->items[s->n_items - 1 - w / groups];
        uint32_t g = w % groups, head = g * kind->group;
        struct bt_cpu_attn a = *kind;
        a.q += it->first * a.q_stride + (size_t)head * a.head_dim;
        a.out += head * a.out_next;
        a.out_row = it->out;
        a.out_col = head * a.out_step;
        a.n = it->n;
        a.pos = it->pos;
        a.k_off += g * kv_next;
        a.v_off += g * kv_next;
        a.pages = e->host.slots[it->slot].pages;
        a.scratch = e->scratch + (size_t)omp_get_thread_num() * e->scratch_bytes;
        e->attn(&a);
    }
}

/* ---- grouped queries ---- */

/* One row of the QKV product: bias, QK norm, RoPE. Then q stays in the row, K and V go to their
 * page. */
static void scatter_row(struct bt_engine *e, const struct bt_cpu_layer *y, uint32_t layer,
                        uint32_t t)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cpu_token *tok = &e->tokens[t];
    uint32_t d = c->head_dim, page_tokens = e->host.info.layout.page_tokens;
    float *row = e->y + (size_t)t * (c->heads + 2 * c->kv_heads) * d;
    const float *cs = c->gpt2 ? NULL : e->rope + (size_t)tok->pos * d, *bias = y->qkv_bias;
    for (uint32_t i = 0; i < c->heads; i++) {
        e->k->head(row + (size_t)i * d, bias ? bias + (size_t)i * d : NULL, y->q_norm, cs, d,
                   c->norm_eps);
    }
    uint16_t *plane = kv_row(e, layer, tok);
    for (uint32_t i = 0; i < c->kv_heads; i++) {
        float *k = row + (size_t)(c->heads + i) * d, *v = k + (size_t)c->kv_heads * d;
        const float *bk = bias ? bias + (size_t)(c->heads + i) * d : NULL;
        uint16_t *out = plane + (size_t)2 * i * page_tokens * d;
        e->k->head(k, bk, y->k_norm, cs, d, c->norm_eps);
        e->k->to_f16(k, out, d);
        if (bk) {
            e->k->head(v, bk + (size_t)c->kv_heads * d, NULL, NULL, d, c->norm_eps);
        }
        e->k->to_f16(v, out + (size_t)page_tokens * d, d);
    }
}

static bt_status_t gqa_inputs(struct bt_cpu_step *s, const struct bt_cpu_layer *y, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    bt_status_t st = bt_linear_run(y->qkv, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
    bt_cpu_phase(e, BT_CPU_PHASE_QKV);
    uint64_t work = (uint64_t)s->n * (c->heads + 2 * c->kv_heads) * c->head_dim;
#pragma omp parallel for num_threads(bt_cpu_threads(e, work)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        scatter_row(e, y, layer, t);
    }
    return BT_OK;
}

/* Attention of y's queries over the pages of `layer` -> a, [rows, heads * head_dim]. */
static void gqa_attention(struct bt_cpu_step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    const struct bt_kv_layout *l = &e->host.info.layout;
    uint32_t d = c->head_dim, width = c->heads * d;
    size_t plane = (size_t)l->page_tokens * d * 2;
    const struct bt_cpu_attn a = {
        .q = e->y,
        .q_stride = (size_t)width + (size_t)2 * c->kv_heads * d,
        .out = e->a,
        .out_step = d,
        .out_width = width,
        .group = e->attn_group,
        .head_dim = d,
        .v_dim = d,
        .row_bytes = bt_kv_row_bytes(&l->groups[0]),
        .window = c->window,
        .kv = bt_host_segment(&e->host, layer, 0),
        .seg_bytes = l->groups[0].seg_bytes,
        .v_off = plane,
        .page_tokens = l->page_tokens,
        .scale = c->attn_scale,
    };
    run_items(s, &a, c->kv_heads, 2 * plane);
    clear_tail(s, width);
}

/* ---- latents ---- */

static uint16_t *head_act(const struct bt_engine *e, uint32_t head)
{
    return e->head_act + head * e->head_act_elems;
}

/* One row of the latent product: norm and RoPE, then to its page. */
static void latent_row(struct bt_engine *e, const struct bt_cpu_mla *m, uint32_t layer, uint32_t t)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cpu_token *tok = &e->tokens[t];
    const struct bt_kv_group *g = &e->host.info.layout.groups[0];
    uint32_t rank = c->mla.kv_rank, rope = c->mla.rope, width = rank + rope;
    float *row = e->y + (size_t)t * width;
    void *to = kv_row(e, layer, tok);
    if (tok->kv != BT_CPU_KV_STORE) {
        memset(to, 0, tok->kv == BT_CPU_KV_ZERO ? bt_kv_row_bytes(g) : 0);
        return;
    }
    e->k->head(row, NULL, m->kv_a_norm, NULL, rank, c->norm_eps);
    bt_cpu_rope(row + rank, e->rope + (size_t)tok->pos * rope, rope, c->rope_pairs);
    if (g->dtype == BT_DT_FP8_E4M3) {
        bt_kv_latent_store(g, row, to);
    } else {
        e->k->to_f16(row, to, width);
    }
}

/* One row of the query product: a head's part without position becomes a row of the head's act, the
 * part with position goes behind the place of the absorbed query. */
static void query_row(struct bt_engine *e, uint32_t t)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t nope = c->mla.nope, rope = c->mla.rope, width = c->mla.kv_rank + rope;
    const float *cs = e->rope + (size_t)e->tokens[t].pos * rope;
    for (uint32_t i = 0; i < c->heads; i++) {
        float *from = e->y + ((size_t)t * c->heads + i) * c->head_dim;
        float *to = e->q + ((size_t)t * c->heads + i) * width + c->mla.kv_rank;
        e->k->to_act(from, bt_cpu_act_row(e->k, head_act(e, i), t, nope, 2), 0, nope);
        memcpy(to, from + nope, rope * sizeof(*to));
        bt_cpu_rope(to, cs, rope, c->rope_pairs);
    }
}

/* Takes a head's product: up[head] x act[head] -> f32 [rows, n]. */
typedef void (*take_head_fn)(struct bt_engine *e, uint32_t head, uint32_t t, const float *row);

static void take_query(struct bt_engine *e, uint32_t head, uint32_t t, const float *row)
{
    const struct bt_model_config *c = &e->model.config;
    size_t width = c->mla.kv_rank + c->mla.rope;
    memcpy(e->q + ((size_t)t * c->heads + head) * width, row, c->mla.kv_rank * sizeof(*row));
}

static void take_value(struct bt_engine *e, uint32_t head, uint32_t t, const float *row)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t v = c->mla.v;
    e->k->to_act(row, bt_cpu_act_row(e->k, e->a, t, c->heads * v, 2), head * v, v);
}

/* The products of all heads, each with its own matrix, n columns wide. Heads are shared out over
 * threads: one head's product is small. oneDNN's products share state and divide themselves. */
static bt_status_t per_head(struct bt_cpu_step *s, struct bt_linear *const *up, uint32_t n,
                            take_head_fn take)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint64_t work = (uint64_t)s->n * c->heads * n;
    int threads = bt_gemm_fuses(e->gemm) ? bt_cpu_threads(e, work) : 1;
    bool failed = false;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(|| : failed)
    for (uint32_t i = 0; i < c->heads; i++) {
        float *out = e->head_out + (size_t)omp_get_thread_num() * e->head_out_floats;
        failed = failed || bt_linear_run(up[i], head_act(e, i), s->n, out) != BT_OK;
        for (uint32_t t = 0; t < s->n; t++) {
            take(e, i, t, out + (size_t)t * n);
        }
    }
    return failed ? BT_ERR_DEVICE : BT_OK;
}

/* a = norm(x) -> the product that makes queries, in y. */
static bt_status_t query_product(struct bt_cpu_step *s, const struct bt_cpu_mla *m)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint32_t rank = c->mla.q_rank;
    if (!m->q_a) {
        return bt_linear_run(m->q_b, e->a, s->n, e->y);
    }
    bt_status_t st = bt_linear_run(m->q_a, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *rank)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        e->k->norm(e->y + (size_t)t * rank, NULL, m->q_a_norm,
                   bt_cpu_act_row(e->k, e->ae, t, rank, 2), 2, rank, c->norm_eps);
    }
    return bt_linear_run(m->q_b, e->ae, s->n, e->y);
}

static bt_status_t mla_latents(struct bt_cpu_step *s, const struct bt_cpu_mla *m, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint64_t latent = (uint64_t)s->n * (c->mla.kv_rank + c->mla.rope);
    bt_status_t st = bt_linear_run(m->kv_a, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
    bt_cpu_phase(e, BT_CPU_PHASE_QKV);
#pragma omp parallel for num_threads(bt_cpu_threads(e, latent)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        latent_row(e, m, layer, t);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_SCATTER);
    return BT_OK;
}

static bt_status_t mla_inputs(struct bt_cpu_step *s, const struct bt_cpu_mla *m, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    uint64_t query = (uint64_t)s->n * c->heads * c->head_dim;
    bt_status_t st = mla_latents(s, m, layer);
    st = st == BT_OK ? query_product(s, m) : st;
    if (st != BT_OK) {
        return st;
    }
    bt_cpu_phase(e, BT_CPU_PHASE_QKV);
#pragma omp parallel for num_threads(bt_cpu_threads(e, query)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        query_row(e, t);
    }
    return per_head(s, m->k_up, c->mla.kv_rank, take_query);
}

/* Attention of q over the latents of `layer` -> a, [rows, heads * v]. */
static bt_status_t mla_attention(struct bt_cpu_step *s, const struct bt_cpu_mla *m, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    const struct bt_kv_layout *l = &e->host.info.layout;
    uint32_t width = c->mla.kv_rank + c->mla.rope;
    const struct bt_cpu_attn a = {
        .q = e->q,
        .q_stride = (size_t)c->heads * width,
        .out = e->head_act,
        .out_next = e->head_act_elems,
        .out_width = c->mla.kv_rank,
        .group = e->attn_group,
        .head_dim = width,
        .v_dim = c->mla.kv_rank,
        .row_bytes = bt_kv_row_bytes(&l->groups[0]),
        .latents = l->groups[0].dtype == BT_DT_FP8_E4M3 ? &l->groups[0] : NULL,
        .latent = e->k->latent,
        .kv = bt_host_segment(&e->host, layer, 0),
        .seg_bytes = l->groups[0].seg_bytes,
        .page_tokens = l->page_tokens,
        .first = layer == c->layers ? 1 : 0, /* the MTP layer has no row at position 0 */
        .scale = c->attn_scale,
    };
    run_items(s, &a, c->heads / e->attn_group, 0);
    bt_status_t st = per_head(s, m->v_up, c->mla.v, take_value);
    clear_tail(s, c->heads * c->mla.v);
    return st;
}

/* ---- both ---- */

bt_status_t bt_cpu_attn_inputs(struct bt_cpu_step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_cpu_layer *y = &e->model.layers[layer];
    bt_status_t st =
        e->model.config.mla.kv_rank ? mla_inputs(s, &y->mla, layer) : gqa_inputs(s, y, layer);
    bt_cpu_phase(e, BT_CPU_PHASE_SCATTER);
    return st;
}

bt_status_t bt_cpu_attn_latents(struct bt_cpu_step *s, uint32_t layer)
{
    return mla_latents(s, &s->e->model.layers[layer].mla, layer);
}

bt_status_t bt_cpu_attn_outputs(struct bt_cpu_step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_cpu_layer *y = &e->model.layers[layer];
    bt_status_t st = BT_OK;
    if (e->model.config.mla.kv_rank) {
        st = mla_attention(s, &y->mla, layer);
    } else {
        gqa_attention(s, layer);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_ATTN);
    st = st == BT_OK ? bt_cpu_project(s, y->o, e->a, y->o_bias) : st;
    bt_cpu_phase(e, BT_CPU_PHASE_O);
    return st;
}
