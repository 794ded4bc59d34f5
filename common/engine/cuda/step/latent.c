/* The first half of a layer with latent attention (MLA; DeepSeek-V2, 2.1). Pages hold latents. A
 * single token's queries are multiplied by their head's key matrix, and compared with the latents
 * themselves; the mixes of latents go through the heads' value matrices. Prompts are computed with
 * the keys and values of each head, which are made of the latents of the chunk and of what lies
 * before it: that is a third of the arithmetic. Memory for them is limited, so a chunk goes over
 * groups of heads where it does not hold all. Deterministic engines compute all tokens as single
 * ones, so that both agree in every bit. Asynchronous on the compute stream; owner thread: the
 * engine's. */
#include "common/engine/cuda/step/latent.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/attention/latent.h"
#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/attention/mla_prefill.h"

#define KV_HEAD (BT_LATENT_NOPE + BT_LATENT_V)
#ifndef BT_CU_LATENT_BYTES
#define BT_CU_LATENT_BYTES (1ull << 30) /* of keys and values of prompts, and of their queries */
#endif

struct bt_cu_latent {
    struct bt_mla *decode;
    void *q_low;    /* [rows][q_rank] bf16 or f16: what the queries' second product reads */
    float *sums;    /* of that product, for some heads: sum_values of them */
    void *absorbed; /* [max_batch][heads][576] f16; deterministic: [rows] */
    void *mix;      /* [max_batch][heads][512] f16; deterministic: [rows] */
    void *latent;   /* [room][512] f16: of a group of prompts */
    void *k_rope;   /* [room][64] f16 */
    void *kv;       /* [rows of the group][heads][256] f16: for some heads, kv_values of them */
    uint32_t *tickets;
    size_t sum_values, kv_values;
    uint32_t room;
};

/* ---- open ---- */

/* Of a deterministic step: single tokens and drafts, and chunks of which each may have a smaller
 * item. */
static uint32_t most_items(uint32_t heads, uint32_t slots, uint32_t rows)
{
    return 2 * slots + bt_cu_most_drafts(slots, rows) + rows / bt_mla_item_tokens(heads);
}

bt_status_t bt_cu_latent_check(const struct bt_engine_config *conf, const struct bt_model_config *c,
                               char *err, size_t err_cap)
{
    const struct bt_model_mla *m = &c->mla;
    if (m->kv_rank != BT_LATENT || m->rope != BT_LATENT_ROPE || m->nope != BT_LATENT_NOPE ||
        m->v != BT_LATENT_V || c->heads > BT_MLA_MAX_HEADS) {
        snprintf(err, err_cap,
                 "%s/config.json: kv_lora_rank %u, qk_rope_head_dim %u, qk_nope_head_dim %u, "
                 "v_head_dim %u, %u heads: the cuda engine has latent attention for 512, 64, 128, "
                 "128 and up to 128 heads; engine.device: cpu runs this model",
                 conf->model_dir, m->kv_rank, m->rope, m->nope, m->v, c->heads);
        return BT_ERR_UNSUPPORTED;
    }
    if (conf->page_tokens != BT_MLA_PAGE_TOKENS) {
        snprintf(err, err_cap,
                 "engine cuda: kv.block_tokens must be 64 for latent attention on a GPU");
        return BT_ERR_CONFIG;
    }
    if (conf->deterministic &&
        most_items(c->heads, conf->max_slots, conf->max_rows) > BT_MLA_MAX_BATCH) {
        snprintf(err, err_cap,
                 "engine.deterministic: engine.max_rows %u and engine.max_slots %u are too much "
                 "for latent attention with %u heads on a GPU; lower them",
                 conf->max_rows, conf->max_slots, c->heads);
        return BT_ERR_CONFIG;
    }
    return BT_OK;
}

uint32_t bt_cu_latent_first_rows(const struct bt_model_config *c)
{
    return (c->mla.q_rank ? c->mla.q_rank : c->heads * c->head_dim) + BT_LATENT_ROW;
}

float *bt_cu_latent_sums(const struct bt_engine *e)
{
    return e->latent ? e->latent->sums : NULL;
}

bool bt_cu_latent_sums_fit(const struct bt_engine *e, size_t tokens)
{
    const struct bt_model_config *c = &e->model.config;
    return c->mla.q_rank && tokens * c->heads * BT_LATENT_HEAD <= e->latent->sum_values;
}

uint32_t bt_cu_latent_room(const struct bt_engine *e)
{
    return e->latent->room;
}

cudaError_t bt_cu_latent_open(struct bt_engine *e, size_t rows)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_cu_latent *m = e->latent = bt_calloc(1, sizeof(*m));
    const bool all_rows = e->deterministic; /* are computed as single tokens */
    size_t singles = all_rows ? rows : e->max_batch, heads = c->heads,
           wide = BT_LATENT_HEAD * sizeof(float);
    /* One head of the longest sequence fits, and so do all heads of all single tokens. */
    m->room = all_rows ? 0 : c->max_model_len;
    size_t kv_head = (size_t)m->room * KV_HEAD * 2;
    size_t kv = BT_MAX(BT_MIN(heads * kv_head, BT_CU_LATENT_BYTES), kv_head);
    size_t sums = BT_MAX(BT_MIN(heads * rows * wide, BT_CU_LATENT_BYTES), heads * singles * wide);
    /* Some heads of an e4m3 matrix may begin within a block. */
    sums = e->model.e4m3_attention ? heads * rows * wide : sums;
    sums = c->mla.q_rank ? BT_MAX(sums, rows * wide) : 0;
    m->kv_values = kv / 2;
    m->sum_values = sums / sizeof(float);
    const struct {
        void **p;
        size_t bytes;
    } all[] = {{&m->q_low, rows * c->mla.q_rank * 2},
               {(void **)&m->sums, sums},
               {&m->absorbed, singles * heads * BT_LATENT_ROW * 2},
               {&m->mix, singles * heads * BT_LATENT * 2},
               {&m->latent, all_rows ? 0 : (size_t)m->room * BT_LATENT * 2},
               {&m->k_rope, all_rows ? 0 : (size_t)m->room * BT_LATENT_ROPE * 2},
               {&m->kv, all_rows ? 0 : kv},
               {(void **)&m->tickets, 2 * sizeof(*m->tickets)}};
    cudaError_t ce = cudaSuccess;
    for (size_t i = 0; ce == cudaSuccess && i < BT_ARRAY_LEN(all); i++) {
        ce = all[i].bytes ? cudaMalloc(all[i].p, all[i].bytes) : cudaSuccess;
    }
    ce = ce == cudaSuccess ? cudaMemset(m->tickets, 0, 2 * sizeof(*m->tickets)) : ce;
    /* Rows of a graph that stand for no sequence are not written. They must be numbers, not NaN. */
    return ce == cudaSuccess ? cudaMemset(m->mix, 0, singles * heads * BT_LATENT * 2) : ce;
}

cudaError_t bt_cu_latent_open_pages(struct bt_engine *e)
{
    const struct bt_mla_pool pool = {.kv = e->kv,
                                     .rows = e->pool.rows,
                                     .page_rows = e->page_rows,
                                     .heads = e->model.config.heads,
                                     .scale = e->model.config.attn_scale,
                                     .e4m3 = e->e4m3,
                                     .segment = e->deterministic ? BT_CU_SEGMENT_LATENT : 0};
    const struct bt_engine_info *info = &e->host.info;
    uint32_t most =
        e->deterministic ? most_items(pool.heads, info->max_slots, info->max_rows) : e->max_batch;
    return bt_mla_create(&pool, most, &e->latent->decode);
}

void bt_cu_latent_close(struct bt_engine *e)
{
    struct bt_cu_latent *m = e->latent;
    if (!m) {
        return;
    }
    bt_mla_destroy(m->decode);
    void *all[] = {m->q_low, m->sums, m->absorbed, m->mix, m->latent, m->k_rope, m->kv, m->tickets};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        cudaFree(all[i]);
    }
    free(m);
    e->latent = NULL;
}

/* ---- a layer ---- */

/* Deterministic: tokens of the largest item. */
static uint32_t most_of_item(const struct bt_engine *e, const struct bt_cu_layout *l)
{
    return l->tokens > l->singles ? bt_mla_item_tokens(e->model.config.heads) : 1;
}

struct part { /* of a step: one layer's attention */
    const struct bt_cu_layout *l;
    const struct bt_cu_inputs *in;
    const struct bt_cu_layer *y;
    uint32_t layer_row;
    bool whole;    /* all queries of all tokens are made at once */
    bool together; /* latents go to their pages while queries are multiplied */
};

/* f32 queries of `heads` heads from `head` on, of `n` tokens from `row` on. */
struct queries {
    const float *at;
    uint32_t stride;
};

/* What the product with w reads is f16; else bf16. */
static bool reads_f16(const struct bt_cu_weight *w)
{
    return w->kind != BT_CU_WEIGHT_BF16;
}

static bt_status_t product_of_heads(struct bt_engine *e, const struct part *p, uint32_t row,
                                    uint32_t n, uint32_t head, uint32_t heads)
{
    const struct bt_model_config *c = &e->model.config;
    size_t rank = c->mla.q_rank;
    const struct bt_cu_weight *q_b = &p->y->latent.q_b;
    if (reads_f16(q_b)) { /* bt_cu_latent_open has left room for all heads of all tokens */
        if (bt_cu_takes_e4m3(q_b, n)) {
            BT_CU_TRY(
                e, bt_cu_rows_e4m3(e->latent->q_low, n, c->mla.q_rank, &e->act.e4m3, e->compute));
        }
        return bt_cu_product(e, q_b, e->latent->q_low, e->latent->sums, n, heads * BT_LATENT_HEAD,
                             c->mla.q_rank, false, false);
    }
    const struct bt_cu_weight w = {.w = (uint8_t *)q_b->w + head * BT_LATENT_HEAD * rank * 2};
    return bt_cu_product(e, &w, (uint8_t *)e->latent->q_low + row * rank * 2, e->latent->sums, n,
                         heads * BT_LATENT_HEAD, c->mla.q_rank, false, false);
}

static bt_status_t queries_of(struct bt_engine *e, const struct part *p, uint32_t row, uint32_t n,
                              uint32_t head, uint32_t heads, struct queries *q)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t all = c->heads * BT_LATENT_HEAD, first = bt_cu_latent_first_rows(c);
    const float *at = e->latent->sums;
    bt_status_t st = BT_OK;
    if (c->mla.q_rank == 0) {
        *q = (struct queries){e->act.qkv + (size_t)row * first + head * BT_LATENT_HEAD, first};
    } else if (p->whole) {
        *q = (struct queries){at + (size_t)row * all + head * BT_LATENT_HEAD, all};
    } else {
        st = product_of_heads(e, p, row, n, head, heads);
        *q = (struct queries){at, heads * BT_LATENT_HEAD};
    }
    return st;
}

static struct bt_cu_latent_append append_of(const struct bt_engine *e, const struct part *p)
{
    const struct bt_model_config *c = &e->model.config;
    return (struct bt_cu_latent_append){.in = e->act.qkv,
                                        .in_stride = bt_cu_latent_first_rows(c),
                                        .latent_norm = p->y->latent.kv_a_norm,
                                        .q_norm = p->y->latent.q_a_norm,
                                        .q = e->latent->q_low,
                                        .q_f16 = reads_f16(&p->y->latent.q_b),
                                        .q_rank = c->mla.q_rank,
                                        .rope = {e->act.rope, p->in->pos, c->rope_pairs},
                                        .slots = p->in->slots,
                                        .table = e->table,
                                        .pool = e->kv,
                                        .e4m3 = e->e4m3,
                                        .page_rows = e->page_rows,
                                        .layer_row = p->layer_row,
                                        .n = p->l->tokens,
                                        .page_tokens = e->host.info.layout.page_tokens,
                                        .table_stride = e->host.max_pages_of_slot,
                                        .eps = c->norm_eps};
}

/* e->act.a -> what queries and latents are made of; latents in their pages. */
static bt_status_t inputs(struct bt_engine *e, const struct part *p)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_latent_append a = append_of(e, p);
    bt_status_t st = bt_cu_product(e, &p->y->qkv, e->act.a, e->act.qkv, p->l->tokens, a.in_stride,
                                   c->hidden, false, false);
    if (st == BT_OK && !p->together) {
        BT_CU_TRY(e, bt_cu_latent_append(&a, e->compute));
    }
    return st;
}

/* e->latent->absorbed -> e->latent->mix */
static bt_status_t attend(struct bt_engine *e, const struct part *p)
{
    if (e->deterministic) {
        const struct bt_mla_invariant all = {.q = e->latent->absorbed,
                                             .out = e->latent->mix,
                                             .tokens = p->l->tokens,
                                             .n_items = p->l->items,
                                             .most = most_of_item(e, p->l),
                                             .table = e->table,
                                             .table_stride = e->host.max_pages_of_slot};
        BT_CU_TRY(e, bt_mla_invariant(e->latent->decode, &all, p->layer_row, e->compute));
        return BT_OK;
    }
    const struct bt_mla_decode d = {.q = e->latent->absorbed,
                                    .out = e->latent->mix,
                                    .tokens = p->l->singles,
                                    .most = p->l->most,
                                    .table = e->table,
                                    .table_stride = e->host.max_pages_of_slot};
    BT_CU_TRY(e, bt_mla_decode(e->latent->decode, &d, p->layer_row, e->compute));
    return BT_OK;
}

/* The single tokens' part of e->act.o, or all of it. */
static bt_status_t decode(struct bt_engine *e, const struct part *p)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t n = e->deterministic ? p->l->tokens : p->l->singles;
    struct queries q;
    bt_status_t st = queries_of(e, p, 0, n, 0, c->heads, &q);
    if (st != BT_OK) {
        return st;
    }
    const struct bt_cu_latent_queries a = {.in = q.at,
                                           .kv_b = p->y->latent.kv_b.w,
                                           .out = e->latent->absorbed,
                                           .rope = {e->act.rope, p->in->pos, c->rope_pairs},
                                           .in_stride = q.stride,
                                           .n = n,
                                           .heads = c->heads};
    const struct bt_cu_latent_append append = append_of(e, p);
    BT_CU_TRY(e, bt_cu_latent_absorb(&a, p->together ? &append : NULL, e->compute));
    st = attend(e, p);
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, bt_cu_latent_values(e->latent->mix, p->y->latent.kv_b.w, n, c->heads, e->act.o,
                                     reads_f16(&p->y->o), e->compute));
    return BT_OK;
}

/* Some heads of the chunks of group g, whose latents lie side by side. */
static bt_status_t prefill_heads(struct bt_engine *e, const struct part *p,
                                 const struct bt_cu_group *g, uint32_t head, uint32_t heads)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t from = p->l->singles, n = p->l->tokens - from;
    size_t wide = (size_t)heads * BT_LATENT_HEAD;
    struct queries q;
    bt_status_t st = queries_of(e, p, from, n, head, heads, &q);
    if (st != BT_OK) {
        return st;
    }
    const struct bt_cu_latent_queries a = {.in = q.at,
                                           .out = (uint16_t *)e->act.q + from * wide,
                                           .rope = {e->act.rope, p->in->pos + from, c->rope_pairs},
                                           .in_stride = q.stride,
                                           .n = n,
                                           .heads = heads};
    const void *kv_b = (const uint16_t *)p->y->latent.kv_b.w + (size_t)head * KV_HEAD * BT_LATENT;
    const struct bt_mla_prefill f = {.q = e->act.q,
                                     .out = (uint16_t *)e->act.o + head * BT_LATENT_V,
                                     .out_f16 = reads_f16(&p->y->o),
                                     .kv = e->latent->kv,
                                     .k_rope = e->latent->k_rope,
                                     .q_stride = wide,
                                     .out_stride = (uint64_t)c->heads * BT_LATENT_V,
                                     .kv_stride = heads * KV_HEAD,
                                     .rope_stride = BT_LATENT_ROPE,
                                     .heads = heads,
                                     .rows = p->l->tokens,
                                     .kv_rows = g->pages,
                                     .items = p->in->latent_items + g->item,
                                     .n_items = g->n_items,
                                     .scale = c->attn_scale,
                                     .tickets = e->latent->tickets};
    BT_CU_TRY(e, bt_cu_latent_queries(&a, e->compute));
    BT_CU_TRY(e, bt_cu_gemm_run_f16(e->gemm, kv_b, e->latent->latent, e->latent->kv, g->pages,
                                    heads * KV_HEAD, BT_LATENT, e->compute));
    BT_CU_TRY(e, bt_mla_prefill(&f, e->compute));
    return BT_OK;
}

/* Parts of about the same size, as few as there may be. */
static uint32_t heads_at_once(const struct bt_engine *e, const struct part *p,
                              const struct bt_cu_group *g)
{
    const struct bt_model_config *c = &e->model.config;
    size_t fit = e->latent->kv_values / ((size_t)g->pages * KV_HEAD);
    if (c->mla.q_rank && !p->whole) {
        size_t tokens = p->l->tokens - p->l->singles;
        fit = BT_MIN(fit, e->latent->sum_values / (tokens * BT_LATENT_HEAD));
    }
    uint32_t parts = (uint32_t)BT_DIV_UP(c->heads, BT_MIN(fit, c->heads));
    return BT_DIV_UP(c->heads, parts);
}

/* The chunks' part of e->act.o. */
static bt_status_t prefill(struct bt_engine *e, const struct part *p)
{
    const struct bt_model_config *c = &e->model.config;
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < e->n_groups; i++) {
        const struct bt_cu_group *g = &e->groups[i];
        const struct bt_cu_latent_gather a = {.pool = e->kv,
                                              .e4m3 = e->e4m3,
                                              .page_rows = e->page_rows,
                                              .layer_row = p->layer_row,
                                              .spans = p->in->spans + g->span,
                                              .n_spans = g->n_spans,
                                              .rows = g->pages,
                                              .table = e->table,
                                              .table_stride = e->host.max_pages_of_slot,
                                              .page_tokens = e->host.info.layout.page_tokens,
                                              .latent = e->latent->latent,
                                              .k_rope = e->latent->k_rope};
        BT_CU_TRY(e, bt_cu_latent_gather(&a, e->compute));
        uint32_t at_once = heads_at_once(e, p, g);
        for (uint32_t h = 0; st == BT_OK && h < c->heads; h += at_once) {
            st = prefill_heads(e, p, g, h, BT_MIN(at_once, c->heads - h));
        }
    }
    return st;
}

bt_status_t bt_cu_latent_plan(struct bt_engine *e, const struct bt_cu_layout *l,
                              const struct bt_cu_inputs *in)
{
    if (e->deterministic) {
        BT_CU_TRY(e, bt_mla_invariant_plan(e->latent->decode, in->items, l->items,
                                           most_of_item(e, l), e->compute));
    } else if (l->singles) {
        BT_CU_TRY(
            e, bt_mla_decode_plan(e->latent->decode, in->queries, l->queries, l->most, e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_latent_attention(struct bt_engine *e, const struct bt_engine_batch *b,
                                   const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                                   uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    uint32_t bytes, heads = c->heads;
    struct part p = {.l = l,
                     .in = in,
                     .y = y,
                     .layer_row = (uint32_t)(bt_kv_segment(&e->host.info.layout, layer, &bytes) /
                                             bt_kv_row_bytes(&e->host.info.layout.groups[0])),
                     .whole = bt_cu_latent_sums_fit(e, l->tokens),
                     .together = !b && c->mla.q_rank == 0};
    const struct bt_cu_norm_of norm = {.w = y->norm_attn};
    bt_status_t st = bt_cu_experts_make_norm(e, layer, l->tokens)
                         ? BT_OK
                         : bt_cu_norm_for(e, &y->qkv, &norm, l->tokens);
    st = st == BT_OK ? inputs(e, &p) : st;
    st = st == BT_OK && b ? bt_cu_layer_fire(e, b, layer) : st;
    st = st == BT_OK && p.whole ? product_of_heads(e, &p, 0, l->tokens, 0, heads) : st;
    st = st == BT_OK && (l->singles || e->deterministic) ? decode(e, &p) : st;
    st = st == BT_OK && l->items && !e->deterministic ? prefill(e, &p) : st;
    if (st == BT_OK && bt_cu_takes_e4m3(&y->o, l->tokens)) {
        BT_CU_TRY(
            e, bt_cu_rows_e4m3(e->act.o, l->tokens, heads * BT_LATENT_V, &e->act.e4m3, e->compute));
    }
    return st == BT_OK ? bt_cu_product(e, &y->o, e->act.o, e->act.x, l->tokens, c->hidden,
                                       heads * BT_LATENT_V, false, true)
                       : st;
}
