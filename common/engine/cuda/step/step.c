/* One forward step on the device: ragged rows of prompt chunks and single tokens over paged KV.
 * Steps of single tokens and drafts alone are replayed as CUDA graphs, one per number of tokens
 * (bucket_of) and class (bt_cu_class_of); other steps are launched kernel by kernel, with the
 * flows' events between the layers. Owner thread: the engine's. The only wait for the device is for
 * the staging memory of a much older step. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/ranges.h"
#include "common/engine/cuda/step/latent.h"

#define FETCH_MAX 16384u /* bytes of inputs that a kernel fetches */

/* bytes 0: NULL. */
static void *take(size_t bytes, cudaError_t *e)
{
    void *p = NULL;
    if (*e == cudaSuccess && bytes) {
        *e = cudaMalloc(&p, bytes);
    }
    return p;
}

static cudaError_t fill_rope(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t d = bt_model_rope_dim(c), half = d / 2;
    float *inv = bt_malloc(half * sizeof(*inv));
    float *cs = bt_malloc((size_t)c->max_model_len * d * sizeof(*cs));
    bt_model_rope_inv_freq(c, inv);
    for (uint32_t p = 0; p < c->max_model_len; p++) {
        for (uint32_t i = 0; i < half; i++) {
            float angle = c->gpt2 ? 0 : (float)p * inv[i]; /* GPT-2 turns nothing */
            cs[(size_t)p * d + i] = (float)cos((double)angle) * c->rope_scale;
            cs[(size_t)p * d + half + i] = (float)sin((double)angle) * c->rope_scale;
        }
    }
    cudaError_t err =
        cudaMemcpy(e->act.rope, cs, (size_t)c->max_model_len * d * 4, cudaMemcpyHostToDevice);
    free(inv);
    free(cs);
    return err;
}

void bt_cu_step_close(struct bt_engine *e)
{
    void *all[] = {e->inputs.step,    e->act.rope,
                   e->act.x,          e->act.qkv,
                   e->act.q,          e->act.o,
                   e->act.a,          e->act.gu,
                   e->act.logits,     e->act.e4m3.v,
                   e->act.e4m3.scale, e->table,
                   e->last_token,     e->results.prompt_rows};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        cudaFree(all[i]);
    }
    bt_cu_dola_close(e);
    bt_cu_contrast_close(e);
    bt_cu_experts_close(e);
    free(e->groups);
    bt_cu_latent_close(e);
    for (int i = 0; i < BT_CU_STAGING; i++) {
        cudaFreeHost(e->inputs.staging[i].host);
        if (e->inputs.staging[i].sent) {
            cudaEventDestroy(e->inputs.staging[i].sent);
        }
    }
    for (uint32_t i = 0; i < BT_CU_CLASSES * BT_CU_BUCKETS; i++) {
        cudaGraphExec_t g = e->graphs[i / BT_CU_BUCKETS][i % BT_CU_BUCKETS];
        if (g) {
            cudaGraphExecDestroy(g);
        }
    }
}

/* ---- open ---- */

bt_status_t bt_cu_step_open(struct bt_engine *e, char *err, size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_engine_info *info = &e->host.info;
    size_t wide = bt_cu_mlp_width(c);
    size_t table_bytes = ((size_t)info->max_slots + BT_HOST_SPARE) * e->host.max_pages_of_slot * 4;
    /* A multiple of four: bt_cu_e4m3_stride. */
    size_t rows = BT_DIV_UP(BT_MAX(info->max_rows, e->max_batch), 4u) * 4,
           q = (size_t)c->heads * c->head_dim;
    size_t qkv =
        c->mla.kv_rank ? bt_cu_latent_first_rows(c) : q + (size_t)2 * c->kv_heads * c->head_dim;
    struct bt_cu_layout all = {.tokens = (uint32_t)rows,
                               .singles = e->max_batch,
                               .queries = e->max_batch,
                               .wanted = e->max_batch,
                               .items = info->max_rows + e->max_batch,
                               .spans = info->max_rows};
    bt_cu_lay_out(&all);
    cudaError_t ce = cudaSuccess;
    for (int i = 0; i < BT_CU_WIDES; i++) {
        e->wides.from[i] = UINT32_MAX;
    }
    e->inputs.step_bytes = all.bytes;
    e->groups = bt_calloc(info->max_rows, sizeof(*e->groups));
    e->inputs.step = take(all.bytes, &ce);
    e->act.rope = take((size_t)c->max_model_len * bt_model_rope_dim(c) * 4, &ce);
    e->act.x = take(rows * c->hidden * 4, &ce);
    e->act.qkv = take(rows * qkv * 4, &ce);
    e->act.q = take(rows * q * 2, &ce);
    e->act.o = take(rows * q * 2, &ce);
    e->act.a = take(rows * bt_cu_input_width(c) * 2, &ce); /* trials put all inputs there */
    e->act.gu = take(rows * 2 * wide * 2, &ce);
    if (e->model.e4m3_attention || e->model.e4m3_mlp) {
        size_t most = bt_cu_input_width(c);
        e->act.e4m3.v = take(rows * most, &ce);
        e->act.e4m3.scale = take(rows * BT_DIV_UP(most, BT_CU_WEIGHT_BLOCK) * 4, &ce);
    }
    e->act.logits = take((size_t)e->max_batch * c->vocab * 4, &ce);
    e->table = take(table_bytes, &ce);
    e->last_token = take(info->max_slots * 4, &ce);
    e->results.prompt_rows = take(e->max_batch * 4, &ce);
    if (ce == cudaSuccess && bt_cu_has_experts(c)) {
        ce = bt_cu_experts_open(e, (uint32_t)rows);
    }
    if (ce == cudaSuccess) {
        ce = cudaMemset(e->table, 0, table_bytes);
    }
    if (ce == cudaSuccess) {
        ce = fill_rope(e);
    }
    if (ce == cudaSuccess && c->mla.kv_rank) {
        ce = bt_cu_latent_open(e, rows);
    }
    for (int i = 0; ce == cudaSuccess && i < BT_CU_STAGING; i++) {
        ce = cudaMallocHost((void **)&e->inputs.staging[i].host, all.bytes);
        if (ce == cudaSuccess) {
            ce = cudaEventCreateWithFlags(&e->inputs.staging[i].sent, cudaEventDisableTiming);
        }
    }
    if (ce != cudaSuccess) {
        snprintf(err, err_cap,
                 "engine: no memory for steps of %u tokens and %u sequences: %s; lower "
                 "engine.max_rows or engine.max_slots",
                 info->max_rows, info->max_slots, cudaGetErrorString(ce));
        return ce == cudaErrorMemoryAllocation ? BT_ERR_NO_MEMORY : BT_ERR_DEVICE;
    }
    /* The memory above is set on the default stream, for which the engine's streams do not wait. */
    if (cudaDeviceSynchronize() != cudaSuccess || bt_cu_choose_products(e) != BT_OK) {
        snprintf(err, err_cap, "engine cuda: timing of products: %s", e->fault);
        return BT_ERR_DEVICE;
    }
    return BT_OK;
}

/* b: NULL if there are no flows (in a graph). */
static bt_status_t run_layer(struct bt_engine *e, const struct bt_engine_batch *b,
                             const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                             uint32_t layer)
{
    bt_status_t st = b ? bt_cu_layer_wait(e, b, layer) : BT_OK;
    st = st != BT_OK ? st
         : e->latent ? bt_cu_latent_attention(e, b, l, in, layer)
                     : bt_cu_attention(e, b, l, in, layer);
    return st == BT_OK ? bt_cu_mlp(e, l, in, layer) : st;
}

static bt_status_t run_model(struct bt_engine *e, const struct bt_engine_batch *b,
                             const struct bt_cu_layout *l, const struct bt_cu_inputs *in)
{
    const struct bt_model_config *c = &e->model.config;
    /* The order matters. embed is launched normally, so it begins only when the plan, the step's
     * inputs and the KV of earlier steps are complete. Each following kernel may begin early
     * (mma.cuh), but not before the kernel in front of it has begun. So decode attention may read
     * all these before it waits (attention.h). For the same reason a flow's wait comes before its
     * layer's first kernel. */
    if (e->latent) {
        bt_status_t st = bt_cu_latent_plan(e, l, in);
        if (st != BT_OK) {
            return st;
        }
    } else if (e->deterministic) {
        BT_CU_TRY(e, bt_attn_segments_plan(e->attn, in->items, l->items, e->compute));
    } else if (l->singles) {
        BT_CU_TRY(e, bt_attn_decode_plan(e->attn, in->queries, l->queries, l->most, e->compute));
    }
    const struct bt_cu_embed embed = {.ids = in->ids,
                                      .slots = in->slots,
                                      .pos = in->pos,
                                      .last_token = e->last_token,
                                      .embed = e->model.embed.w,
                                      .positions = e->model.positions.w,
                                      .n = l->tokens,
                                      .hidden = c->hidden,
                                      .x = e->act.x};
    BT_CU_TRY(e, bt_cu_embed(&embed, e->compute));
    const bool dola = b && bt_cu_has_dola(e, b);
    for (uint32_t i = 0; i < c->layers; i++) {
        bt_cu_range_push("layer", i);
        bt_status_t st = dola ? bt_cu_dola_keep(e, b, l, i) : BT_OK;
        st = st == BT_OK ? run_layer(e, b, l, in, i) : st;
        bt_cu_range_pop();
        if (st != BT_OK) {
            return st;
        }
    }
    return l->wanted ? bt_cu_head(e, in->rows, l->wanted) : BT_OK;
}

/* ---- prompt logprobs: rare, so the host waits for them ---- */

static bt_status_t prompt_logprobs(struct bt_engine *e, const struct bt_engine_batch *b,
                                   const struct bt_cu_layout *l, struct bt_host_ticket *t)
{
    uint32_t vocab = e->model.config.vocab, out = 0, total = 0;
    struct bt_cu_rows_at next = {0, l->singles};
    for (uint32_t r = 0; r < b->n_rows; r++) {
        total += bt_host_row_prompt_outs(&e->host, &b->rows[r]);
    }
    if (total == 0) {
        return BT_OK;
    }
    bt_host_ticket_outs(t, total);
    float *logits = bt_malloc((size_t)e->max_batch * vocab * sizeof(*logits));
    int32_t *rows = bt_malloc(e->max_batch * sizeof(*rows));
    bt_status_t st = BT_OK;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t first = bt_cu_next_rows(&next, row), n = bt_host_row_prompt_outs(&e->host, row);
        for (uint32_t at = 0; st == BT_OK && at < n; at += e->max_batch) {
            uint32_t m = BT_MIN(n - at, e->max_batch), pos = bt_host_row_pos(&e->host, row) + at;
            for (uint32_t i = 0; i < m; i++) {
                rows[i] = (int32_t)(first + at + i);
            }
            cudaError_t ce = cudaMemcpyAsync(e->results.prompt_rows, rows, m * 4,
                                             cudaMemcpyHostToDevice, e->compute);
            st = ce == cudaSuccess ? bt_cu_head(e, e->results.prompt_rows, m)
                                   : bt_cu_fail(e, ce, "prompt rows");
            if (st == BT_OK) {
                ce = cudaMemcpyAsync(logits, e->act.logits, (size_t)m * vocab * 4,
                                     cudaMemcpyDeviceToHost, e->compute);
                ce = ce == cudaSuccess ? cudaStreamSynchronize(e->compute) : ce;
                st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "prompt logits");
            }
            for (uint32_t i = 0; st == BT_OK && i < m; i++) {
                bt_host_prompt_out(&e->host, row->slot, pos + i + 1, logits + (size_t)i * vocab,
                                   &t->out[out++]);
            }
        }
    }
    free(logits);
    free(rows);
    return st;
}

/* ---- a step ---- */

/* The number of tokens in the graph for n. Up to 128 rows a product's cost is reading its weights,
 * so a few sizes are enough (one for 96 saved nothing); above 128 each row costs time. */
static uint32_t bucket_of(uint32_t n, int *index_p)
{
    uint32_t bucket = 1;
    int index = 0;
    while (bucket < n) {
        bucket += bucket < BT_CU_SKINNY_ROWS ? bucket : BT_CU_CLOSE_STEP;
        index++;
    }
    *index_p = index;
    return bucket;
}

/* The graph of a layout, captured at its first use. */
static bt_status_t graph_for(struct bt_engine *e, const struct bt_cu_layout *l,
                             cudaGraphExec_t *graph_p)
{
    if (*graph_p) {
        return BT_OK;
    }
    struct bt_cu_inputs in = bt_cu_inputs_at(l, e->inputs.step);
    cudaGraph_t g = NULL;
    BT_CU_TRY(e, cudaStreamBeginCapture(e->compute, cudaStreamCaptureModeThreadLocal));
    bt_status_t st = run_model(e, NULL, l, &in);
    cudaError_t ce = cudaStreamEndCapture(e->compute, &g);
    if (st == BT_OK && ce == cudaSuccess) {
        ce = cudaGraphInstantiate(graph_p, g, 0);
    }
    if (g) {
        cudaGraphDestroy(g);
    }
    return st == BT_OK && ce != cudaSuccess ? bt_cu_fail(e, ce, "capture of a decode step") : st;
}

/* Whether a graph has this batch: single tokens and drafts alone, no flows. */
static bool decode_only(const struct bt_engine *e, const struct bt_engine_batch *b,
                        uint32_t n_tokens)
{
    bool flat = n_tokens <= BT_MIN(e->max_batch, BT_CU_GRAPH_MAX);
    for (uint32_t r = 0; flat && r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        flat = bt_cu_is_single(row) && !row->wait.flow && !row->fire.flow &&
               !(row->flags & BT_ROW_PROMPT_LOGPROBS);
    }
    return flat && !bt_cu_has_dola(e, b);
}

static bt_status_t send_inputs(struct bt_engine *e, const struct bt_engine_batch *b,
                               const struct bt_cu_layout *l, struct bt_host_ticket *t)
{
    struct bt_cu_staging *s = &e->inputs.staging[e->inputs.next++ % BT_CU_STAGING];
    if (s->used) {
        BT_CU_TRY(e, cudaEventSynchronize(s->sent));
    }
    struct bt_cu_inputs in = bt_cu_inputs_at(l, s->host);
    bt_cu_inputs_fill(e, b, l, &in, t);
    if (l->bytes <= FETCH_MAX) { /* a copy between two kernels would take 10 us longer */
        BT_CU_TRY(e, bt_cu_fetch(s->host, e->inputs.step, l->bytes, e->compute));
    } else {
        BT_CU_TRY(e, cudaMemcpyAsync(e->inputs.step, s->host, l->bytes, cudaMemcpyHostToDevice,
                                     e->compute));
    }
    BT_CU_TRY(e, cudaEventRecord(s->sent, e->compute));
    s->used = true;
    return BT_OK;
}

static struct bt_cu_layout batch_layout(const struct bt_engine *e, const struct bt_engine_batch *b,
                                        uint32_t n_tokens)
{
    uint32_t per = bt_cu_item_tokens(e), class_ = bt_cu_class_of(e, b);
    struct bt_cu_layout l = {.tokens = n_tokens,
                             .most = bt_cu_class_most(e, class_),
                             .fresh = class_ ? BT_ATTN_FRESH : 1};
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        bool single = bt_cu_is_single(row);
        l.singles += single ? row->n : 0;
        l.queries += single && !e->deterministic ? BT_DIV_UP(row->n, l.most) : 0;
        l.wanted += row->flags & BT_ROW_SAMPLE ? 1 + row->n_draft : 0;
        l.items += !single            ? BT_DIV_UP(row->n, per)
                   : e->deterministic ? BT_DIV_UP(row->n, l.most)
                                      : 0;
        l.spans += !single && e->group_room;
    }
    bt_cu_lay_out(&l);
    return l;
}

/* With an entry for each token there are enough, however many drafts the rows have. */
static bt_status_t replay(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                          struct bt_cu_layout *l, struct bt_host_ticket *t)
{
    int index;
    uint32_t n = BT_MIN(bucket_of(n_tokens, &index), e->max_batch), class_ = bt_cu_class_of(e, b);
    *l = (struct bt_cu_layout){.tokens = n,
                               .singles = n,
                               .queries = e->deterministic ? 0 : n,
                               .most = bt_cu_class_most(e, class_),
                               .fresh = class_ ? BT_ATTN_FRESH : 1,
                               .wanted = n,
                               .items = e->deterministic ? n : 0};
    cudaGraphExec_t *graph = &e->graphs[class_][index];
    bt_cu_lay_out(l);
    bt_status_t st = graph_for(e, l, graph);
    st = st == BT_OK ? send_inputs(e, b, l, t) : st;
    if (st == BT_OK) {
        BT_CU_TRY(e, cudaGraphLaunch(*graph, e->compute));
    }
    return st;
}

static bt_status_t enqueue(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t)
{
    struct bt_cu_layout l;
    bt_status_t st;
    if (decode_only(e, b, n_tokens)) {
        st = replay(e, b, n_tokens, &l, t);
    } else {
        l = batch_layout(e, b, n_tokens);
        st = send_inputs(e, b, &l, t);
        struct bt_cu_inputs in = bt_cu_inputs_at(&l, e->inputs.step);
        st = st == BT_OK ? run_model(e, b, &l, &in) : st;
        st = st == BT_OK ? bt_cu_dola_head(e, t) : st;
        st = st == BT_OK ? prompt_logprobs(e, b, &l, t) : st;
        /* Prompt logprobs have overwritten the sample's logits. */
        if (st == BT_OK && t->n_out && l.wanted) {
            st = bt_cu_head(e, in.rows, l.wanted);
        }
    }
    st = st == BT_OK ? bt_cu_contrast_keep(e, b, &l) : st;
    return st == BT_OK ? bt_cu_step_end(e, b) : st;
}

bt_status_t bt_cu_step_run(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t)
{
    if (n_tokens == 0) {
        return BT_OK;
    }
    bt_cu_range_push("step", n_tokens);
    bt_status_t st = enqueue(e, b, n_tokens, t);
    bt_cu_range_pop();
    return st;
}
