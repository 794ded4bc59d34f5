/* One forward step on the device: ragged rows of prompt chunks and single tokens over paged KV.
 * Steps of single tokens alone are replayed as CUDA graphs, one per power-of-two batch; others are
 * launched kernel by kernel, with the flows' events between the layers. Owner thread: the
 * engine's. Nothing here waits for the device, but for staging memory of a step long past. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/cuda/ranges.h"
#include "common/engine/cuda/wide.h"

/* A step's small inputs, in one piece of memory laid out by its sizes: a graph's pointers depend on
 * its batch alone. Single tokens come first, then the chunks. */
struct layout {
    uint32_t tokens, singles, wanted, items, spans;
    size_t ids, pos, slots, lens, rows, item, span, bytes;
};
struct inputs { /* the same on the host or on the device */
    int32_t *ids, *pos, *slots, *lens, *rows;
    struct bt_attn_item *items;
    struct bt_attn_span *spans;
};

#define FETCH_MAX 16384u /* bytes of inputs that a kernel fetches */

static size_t put(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at = BT_ALIGN_UP(here + bytes, (size_t)64);
    return here;
}

static struct layout lay_out(uint32_t tokens, uint32_t singles, uint32_t wanted, uint32_t items,
                             uint32_t spans)
{
    struct layout l = {
        .tokens = tokens, .singles = singles, .wanted = wanted, .items = items, .spans = spans};
    l.ids = put(&l.bytes, tokens * 4);
    l.pos = put(&l.bytes, tokens * 4);
    l.slots = put(&l.bytes, tokens * 4);
    l.lens = put(&l.bytes, singles * 4);
    l.rows = put(&l.bytes, wanted * 4);
    l.item = put(&l.bytes, items * sizeof(struct bt_attn_item));
    l.span = put(&l.bytes, spans * sizeof(struct bt_attn_span));
    return l;
}

static struct inputs inputs_at(const struct layout *l, uint8_t *p)
{
    return (struct inputs){(int32_t *)(p + l->ids),
                           (int32_t *)(p + l->pos),
                           (int32_t *)(p + l->slots),
                           (int32_t *)(p + l->lens),
                           (int32_t *)(p + l->rows),
                           (struct bt_attn_item *)(p + l->item),
                           (struct bt_attn_span *)(p + l->span)};
}

static void *take(size_t bytes, cudaError_t *e)
{
    void *p = NULL;
    if (*e == cudaSuccess) {
        *e = cudaMalloc(&p, bytes);
    }
    return p;
}

static cudaError_t fill_rope(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t d = c->head_dim, half = d / 2;
    float *inv = bt_malloc(half * sizeof(*inv));
    float *cs = bt_malloc((size_t)c->max_model_len * d * sizeof(*cs));
    bt_model_rope_inv_freq(c, inv);
    for (uint32_t p = 0; p < c->max_model_len; p++) {
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)p * inv[i];
            cs[(size_t)p * d + i] = (float)cos((double)angle);
            cs[(size_t)p * d + half + i] = (float)sin((double)angle);
        }
    }
    cudaError_t err =
        cudaMemcpy(e->rope, cs, (size_t)c->max_model_len * d * 4, cudaMemcpyHostToDevice);
    free(inv);
    free(cs);
    return err;
}

/* A layer's products: QKV, o, gate and up, down. */
struct products {
    uint32_t n[4], k[4];
    void *y[4];
};

static struct products layer_products(const struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t q = c->heads * c->head_dim;
    return (struct products){
        .n = {q + 2 * c->kv_heads * c->head_dim, c->hidden, 2 * c->intermediate, c->hidden},
        .k = {c->hidden, q, c->hidden, c->intermediate},
        .y = {e->qkv, e->x, e->gu, e->x}};
}

/* Algorithms by timing for the batches of decode graphs and for whole chunks. */
static bt_status_t tune(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    const struct products l = layer_products(e);
    uint32_t layers = BT_MIN(c->layers, 8u);
    const void *w[4][8];
    for (uint32_t i = 0; i < layers; i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        const void *of_layer[4] = {y->qkv, y->o, y->gate_up, y->down};
        for (int p = 0; p < 4; p++) {
            w[p][i] = of_layer[p];
        }
    }
    uint32_t rows = BT_MAX(e->host.info.max_rows, e->max_batch);
    size_t in = (size_t)rows * BT_MAX(c->hidden, c->intermediate);
    BT_CU_TRY(e, bt_cu_dummy_bf16(e->a, in, 1.0f, 1, e->compute)); /* zeros would run faster */
    for (uint32_t m = 1;; m *= 2) {
        bool chunk = m > BT_MIN(e->max_batch, (uint32_t)BT_CU_GRAPH_MAX);
        uint32_t now = chunk ? e->host.info.max_rows : m;
        for (int p = 0; p < 4; p++) {
            if (bt_cu_gemv_fits(now, l.n[p], l.k[p])) {
                continue;
            }
            BT_CU_TRY(e, bt_cu_gemm_tune(e->gemm, w[p], layers, e->a, l.y[p], now, l.n[p], l.k[p],
                                         p == 2, p % 2 == 1, e->compute));
        }
        if (chunk) {
            return BT_OK;
        }
        const void *head = e->model.lm_head;
        if (bt_cu_gemv_fits(now, c->vocab, c->hidden)) {
            continue;
        }
        BT_CU_TRY(e, bt_cu_gemm_tune(e->gemm, &head, 1, e->a, e->logits, now, c->vocab, c->hidden,
                                     false, false, e->compute));
    }
}

/* Runs each product once for each number of rows that has an algorithm of its own, so that no step
 * waits for one to be chosen or loaded. */
static bt_status_t meet(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    const struct products l = layer_products(e);
    const struct bt_cu_layer *y = &e->model.layers[0];
    const void *w[4] = {y->qkv, y->o, y->gate_up, y->down};
    for (uint32_t m = 1; m <= e->host.info.max_rows; m = bt_cu_gemm_bucket(m + 1)) {
        for (int p = 0; p < 4; p++) {
            if (bt_cu_gemv_fits(m, l.n[p], l.k[p])) {
                continue;
            }
            BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, w[p], e->a, l.y[p], m, l.n[p], l.k[p], p == 2,
                                        p % 2 == 1, e->compute));
        }
        if (m <= e->max_batch && !bt_cu_gemv_fits(m, c->vocab, c->hidden)) {
            BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, e->model.lm_head, e->a, e->logits, m, c->vocab,
                                        c->hidden, false, false, e->compute));
        }
    }
    return BT_OK;
}

void bt_cu_step_close(struct bt_engine *e)
{
    void *all[] = {e->step, e->rope, e->x,      e->qkv,   e->q,          e->o,
                   e->a,    e->gu,   e->logits, e->table, e->last_token, e->out_rows};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        cudaFree(all[i]);
    }
    free(e->groups);
    for (int i = 0; i < BT_CU_STAGING; i++) {
        cudaFreeHost(e->staging[i].host);
        if (e->staging[i].sent) {
            cudaEventDestroy(e->staging[i].sent);
        }
    }
    for (int i = 0; i < BT_CU_BUCKETS; i++) {
        if (e->graphs[i]) {
            cudaGraphExecDestroy(e->graphs[i]);
        }
    }
}

/* ---- inputs ---- */

static int longest_first(const void *a, const void *b)
{
    const struct bt_attn_item *x = a, *y = b;
    return (y->pos > x->pos) - (y->pos < x->pos);
}

static void put_single(struct bt_engine *e, const struct bt_engine_row *row, uint32_t at,
                       const struct inputs *in)
{
    const struct bt_host_slot *s = &e->host.slots[row->slot];
    uint32_t pos = bt_host_row_pos(&e->host, row);
    in->ids[at] = row->tokens             ? (int32_t)row->tokens[0]
                  : e->pending[row->slot] ? BT_CU_ID_LAST
                                          : (int32_t)s->tokens[s->n_tokens - 1];
    in->pos[at] = (int32_t)pos;
    in->slots[at] = (int32_t)row->slot;
    in->lens[at] = (int32_t)pos + 1;
}

/* The group that a chunk of so many pages belongs to: e4m3 pages are expanded side by side, as many
 * as there is room for. */
static struct bt_cu_group *group_for(struct bt_engine *e, uint32_t pages, uint32_t n_items)
{
    struct bt_cu_group *g = e->n_groups ? &e->groups[e->n_groups - 1] : NULL;
    if (!g || (e->e4m3 && g->pages + pages > e->wide_pages)) {
        uint32_t span = g ? g->span + g->n_spans : 0;
        g = &e->groups[e->n_groups++];
        *g = (struct bt_cu_group){.item = n_items, .span = span};
    }
    return g;
}

static void put_chunk(struct bt_engine *e, const struct bt_engine_row *row, uint32_t at,
                      const struct inputs *in, uint32_t *n_items)
{
    uint32_t pos = bt_host_row_pos(&e->host, row), per = bt_attn_prefill_tokens(e->attn);
    uint32_t pages = BT_DIV_UP(pos + row->n, e->host.info.layout.page_tokens);
    struct bt_cu_group *g = group_for(e, pages, *n_items);
    int32_t slot = (int32_t)row->slot;
    if (e->e4m3) { /* the wide pages' table is the same for all: a slot is its first page */
        in->spans[g->span + g->n_spans++] = (struct bt_attn_span){slot, (int32_t)g->pages};
        slot = (int32_t)g->pages;
        g->pages += pages;
    }
    g->n_items += BT_DIV_UP(row->n, per);
    for (uint32_t i = 0; i < row->n; i++) {
        in->ids[at + i] = (int32_t)row->tokens[i];
        in->pos[at + i] = (int32_t)(pos + i);
        in->slots[at + i] = (int32_t)row->slot;
    }
    for (uint32_t i = 0; i < row->n; i += per) {
        in->items[(*n_items)++] = (struct bt_attn_item){.row = (int32_t)(at + i),
                                                        .n = (int32_t)BT_MIN(per, row->n - i),
                                                        .pos = (int32_t)(pos + i),
                                                        .slot = slot,
                                                        .len = (int32_t)(pos + row->n)};
    }
}

/* Rows in the batch's order get their samples; their logits lie in the same order. */
static void fill(struct bt_engine *e, const struct bt_engine_batch *b, const struct layout *l,
                 const struct inputs *in, struct bt_host_ticket *t)
{
    uint32_t single = 0, chunk = l->singles, n_items = 0, sample = 0;
    e->n_groups = 0;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t last;
        if (row->n == 1) {
            last = single++;
            put_single(e, row, last, in);
        } else {
            put_chunk(e, row, chunk, in, &n_items);
            chunk += row->n;
            last = chunk - 1;
        }
        if (row->flags & BT_ROW_SAMPLE) {
            const struct bt_host_sample want = {
                .slot = row->slot, .pos = (uint32_t)in->pos[last] + 1, .row = sample};
            in->rows[sample++] = (int32_t)last;
            bt_host_ticket_sample(t, &want);
        }
    }
    t->n_rows = sample;
    for (uint32_t i = 0; i < e->n_groups; i++) {
        const struct bt_cu_group *g = &e->groups[i];
        qsort(in->items + g->item, g->n_items, sizeof(*in->items), longest_first);
    }
}

/* Sequences of the graph that are not there: no slot, no KV, logits that nobody reads. */
static void pad(const struct layout *l, const struct inputs *in, uint32_t from, uint32_t wanted)
{
    for (uint32_t i = from; i < l->singles; i++) {
        in->ids[i] = in->pos[i] = in->lens[i] = 0;
        in->slots[i] = -1;
    }
    for (uint32_t i = wanted; i < l->wanted; i++) {
        in->rows[i] = 0;
    }
}

/* ---- the model ---- */

static bt_status_t product(struct bt_engine *e, const void *w, const void *a, void *y, uint32_t m,
                           uint32_t n, uint32_t k, bool bf16, bool add)
{
    enum bt_cu_skinny_end end = add ? BT_CU_SKINNY_ADD : BT_CU_SKINNY_F32;
    int way = bf16 ? -1 : bt_cu_gemm_way(e->gemm, m, n, k, end);
    if (way >= 0) {
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, w, a, y, m, n, k, end, e->compute));
    } else if (!bf16 && bt_cu_gemv_fits(m, n, k)) {
        BT_CU_TRY(e, bt_cu_gemv(w, a, y, m, n, k, add, e->compute));
    } else {
        BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, w, a, y, m, n, k, bf16, add, e->compute));
    }
    return BT_OK;
}

/* a -> queries in e->q, keys and values in their pages */
static bt_status_t qkv(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n,
                       const struct inputs *in, uint32_t layer_row)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_append a = {.qkv = e->qkv,
                                   .bias = y->qkv_bias,
                                   .q_norm = y->q_norm,
                                   .k_norm = y->k_norm,
                                   .rope = e->rope,
                                   .pos = in->pos,
                                   .slots = in->slots,
                                   .table = e->table,
                                   .q = e->q,
                                   .pool = e->kv,
                                   .e4m3 = e->e4m3,
                                   .scale_row = e->pool.scale_row,
                                   .page_rows = e->page_rows,
                                   .layer_row = layer_row,
                                   .n = n,
                                   .heads = c->heads,
                                   .kv_heads = c->kv_heads,
                                   .head_dim = c->head_dim,
                                   .page_tokens = e->host.info.layout.page_tokens,
                                   .table_stride = e->host.max_pages_of_slot,
                                   .eps = c->norm_eps};
    if (n >= e->wide_from[BT_CU_WIDE_QKV]) {
        BT_CU_TRY(e, bt_cu_wide_append(y->qkv, e->a, c->hidden, &a, e->compute));
        return BT_OK;
    }
    bt_status_t st = product(e, y->qkv, e->a, e->qkv, n, (c->heads + 2 * c->kv_heads) * c->head_dim,
                             c->hidden, false, false);
    if (st == BT_OK) {
        BT_CU_TRY(e, bt_cu_append(&a, e->compute));
    }
    return st;
}

/* x += down(silu(gate(a)) * up(a)) */
static bt_status_t mlp(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t wide = 2 * c->intermediate;
    int way = bt_cu_gemm_way(e->gemm, n, wide, c->hidden, BT_CU_SKINNY_SWIGLU);
    void *h = e->a;
    if (n >= e->wide_from[BT_CU_WIDE_GATE_UP]) {
        h = e->gu;
        BT_CU_TRY(e, bt_cu_wide_swiglu(y->gate_up, e->a, h, n, wide, c->hidden, e->compute));
    } else if (way >= 0) {
        h = e->gu;
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, y->gate_up, e->a, h, n, wide, c->hidden,
                                  BT_CU_SKINNY_SWIGLU, e->compute));
    } else if (bt_cu_gemv_fits(n, wide, c->hidden)) {
        h = e->gu;
        BT_CU_TRY(e, bt_cu_gemv_swiglu(y->gate_up, e->a, h, n, wide, c->hidden, e->compute));
    } else {
        bt_status_t st = product(e, y->gate_up, e->a, e->gu, n, wide, c->hidden, true, false);
        if (st != BT_OK) {
            return st;
        }
        BT_CU_TRY(e, bt_cu_swiglu(e->gu, n, c->intermediate, h, e->compute));
    }
    return product(e, y->down, h, e->x, n, c->hidden, c->intermediate, false, true);
}

static bt_status_t head(struct bt_engine *e, const int32_t *rows, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    BT_CU_TRY(e,
              bt_cu_norm(e->x, rows, e->model.norm, n, c->hidden, c->norm_eps, e->a, e->compute));
    return product(e, e->model.lm_head, e->a, e->logits, n, c->vocab, c->hidden, false, false);
}

/* ---- ways of products of few rows, by timing ---- */

#define TRIAL_LAYERS 4u /* their weights together are far more than the L2 cache */

/* The products of some layers with the norms between them; another norm is in attention's place. */
static bt_status_t trial_layers(struct bt_engine *e, uint32_t m)
{
    const struct bt_model_config *c = &e->model.config;
    const struct products l = layer_products(e);
    for (uint32_t i = 0; i < BT_MIN(c->layers, TRIAL_LAYERS); i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        const float *norm[3] = {y->norm_attn, y->norm_attn, y->norm_mlp};
        for (int p = 0; p < 3; p++) {
            BT_CU_TRY(e,
                      bt_cu_norm(e->x, NULL, norm[p], m, c->hidden, c->norm_eps, e->a, e->compute));
            bt_status_t st = p == 0
                                 ? product(e, y->qkv, e->a, e->qkv, m, l.n[0], l.k[0], false, false)
                             : p == 1 ? product(e, y->o, e->o, e->x, m, l.n[1], l.k[1], false, true)
                                      : mlp(e, y, m);
            if (st != BT_OK) {
                return st;
            }
        }
    }
    return BT_OK;
}

static bt_status_t trial_head(struct bt_engine *e, uint32_t m)
{
    bt_status_t st = head(e, NULL, m);
    return st == BT_OK ? head(e, NULL, m) : st;
}

typedef bt_status_t trial_fn(struct bt_engine *e, uint32_t m);

static bt_status_t time_once(struct bt_engine *e, trial_fn *trial, uint32_t m, cudaEvent_t *ev,
                             float *ms_p)
{
    BT_CU_TRY(e, cudaEventRecord(ev[0], e->compute));
    bt_status_t st = trial(e, m);
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, cudaEventRecord(ev[1], e->compute));
    BT_CU_TRY(e, cudaEventSynchronize(ev[1]));
    BT_CU_TRY(e, cudaEventElapsedTime(ms_p, ev[0], ev[1]));
    return BT_OK;
}

/* The least time of some runs in ms. */
static bt_status_t time_trial(struct bt_engine *e, trial_fn *trial, uint32_t m, cudaEvent_t *ev,
                              float *ms_p)
{
    enum { RUNS = 4 };
    bt_status_t st = BT_OK;
    *ms_p = INFINITY;
    for (int i = 0; st == BT_OK && i < RUNS; i++) {
        float ms = INFINITY;
        st = time_once(e, trial, m, ev, &ms);
        *ms_p = BT_MIN(*ms_p, ms);
    }
    return st;
}

/* The time in ms at the speed that it keeps: what takes long draws so much power that the clock
 * falls within 0.2 s. heat: ms of runs, the second half of which count. */
static bt_status_t time_hot(struct bt_engine *e, trial_fn *trial, uint32_t m, float heat,
                            cudaEvent_t *ev, float *ms_p)
{
    const float little = 0.5f; /* ms; a run that heats nothing */
    float spent = 0, sum = 0, n = 0;
    bt_status_t st = time_trial(e, trial, m, ev, ms_p);
    if (*ms_p < little) {
        return st;
    }
    while (st == BT_OK && spent < heat) {
        float ms = INFINITY;
        st = time_once(e, trial, m, ev, &ms);
        spent += ms;
        sum += spent > heat / 2 ? ms : 0;
        n += spent > heat / 2 ? 1 : 0;
    }
    *ms_p = sum / n;
    return st;
}

/* Tries all ways of one product, the others as they are, and keeps the fastest. A way must be
 * faster by half a percent, or the choice is noise. */
static bt_status_t try_product(struct bt_engine *e, uint32_t m, uint32_t n, uint32_t k,
                               enum bt_cu_skinny_end end, trial_fn *trial, cudaEvent_t *ev)
{
    int best = bt_cu_gemm_way(e->gemm, m, n, k, end), now = best;
    float least, ms;
    bool any = false;
    for (uint32_t way = 0; way < bt_cu_skinny_ways(); way++) {
        any |= bt_cu_skinny_fits(way, m, n, k);
    }
    if (!any) {
        return BT_OK;
    }
    bt_status_t st = time_trial(e, trial, m, ev, &least);
    for (int way = -1; st == BT_OK && way < (int)bt_cu_skinny_ways(); way++) {
        if (way == now || (way >= 0 && !bt_cu_skinny_fits((uint32_t)way, m, n, k))) {
            continue;
        }
        bt_cu_gemm_set_way(e->gemm, m, n, k, end, way);
        st = time_trial(e, trial, m, ev, &ms);
        if (st == BT_OK && ms < least * 0.995f) {
            least = ms;
            best = way;
        }
    }
    bt_cu_gemm_set_way(e->gemm, m, n, k, end, best);
    return st;
}

/* Which products of few rows skinny.h takes, timed in their surroundings: what counts is what they
 * do while the kernels beside them run. The other algorithms are chosen. */
static bt_status_t choose_ways(struct bt_engine *e)
{
    static const enum bt_cu_skinny_end ends[4] = {BT_CU_SKINNY_F32, BT_CU_SKINNY_ADD,
                                                  BT_CU_SKINNY_SWIGLU, BT_CU_SKINNY_ADD};
    const struct bt_model_config *c = &e->model.config;
    const struct products l = layer_products(e);
    uint32_t most = BT_MIN(e->max_batch, (uint32_t)BT_CU_SKINNY_ROWS);
    cudaEvent_t ev[2] = {0};
    BT_CU_TRY(e, bt_cu_dummy_bf16(e->x, (size_t)most * c->hidden * 2, 1.0f, 2, e->compute));
    BT_CU_TRY(e,
              bt_cu_dummy_bf16(e->o, (size_t)most * c->heads * c->head_dim, 1.0f, 3, e->compute));
    BT_CU_TRY(e, cudaEventCreate(&ev[0]));
    cudaError_t ce = cudaEventCreate(&ev[1]);
    bt_status_t st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "event");
    for (uint32_t m = 1; st == BT_OK && m <= most; m *= 2) {
        for (int i = 0; st == BT_OK && i < 8; i++) { /* twice: each depends on its neighbours */
            int p = 3 - i % 4;
            st = try_product(e, m, l.n[p], l.k[p], ends[p], trial_layers, ev);
        }
        st = st == BT_OK ? try_product(e, m, c->vocab, c->hidden, BT_CU_SKINNY_F32, trial_head, ev)
                         : st;
    }
    cudaEventDestroy(ev[0]);
    if (ev[1]) {
        cudaEventDestroy(ev[1]);
    }
    return st;
}

/* ---- wide.h or cuBLASLt, by timing ---- */

static bt_status_t trial_qkv(struct bt_engine *e, uint32_t m)
{
    const struct layout l = lay_out(e->host.info.max_rows, 0, 0, 0, 0);
    const struct inputs in = inputs_at(&l, e->step);
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < BT_MIN(e->model.config.layers, TRIAL_LAYERS); i++) {
        st = qkv(e, &e->model.layers[i], m, &in, 0);
    }
    return st;
}
static bt_status_t trial_mlp(struct bt_engine *e, uint32_t m)
{
    bt_status_t st = BT_OK;
    const struct bt_model_config *c = &e->model.config;
    for (uint32_t i = 0; st == BT_OK && i < BT_MIN(c->layers, TRIAL_LAYERS); i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        BT_CU_TRY(e,
                  bt_cu_norm(e->x, NULL, y->norm_mlp, m, c->hidden, c->norm_eps, e->a, e->compute));
        st = mlp(e, y, m);
    }
    return st;
}

/* Halves the rows for as long as wide.h is not slower. */
static bt_status_t find_wide_from(struct bt_engine *e, enum bt_cu_wide what, cudaEvent_t *ev)
{
    trial_fn *trial = what == BT_CU_WIDE_QKV ? trial_qkv : trial_mlp;
    const struct products p = layer_products(e);
    uint32_t best = UINT32_MAX, is = what == BT_CU_WIDE_QKV ? 0 : 2, n = p.n[is], k = p.k[is];
    float ms[2] = {0, 0}, heat = 250;
    for (uint32_t m = e->host.info.max_rows; ms[1] <= ms[0] && m > 0; m /= 2) {
        if (!bt_cu_wide_fits(m, n, k)) {
            continue;
        }
        for (int own = 0; own < 2; own++) {
            e->wide_from[what] = own ? 1 : UINT32_MAX;
            bt_status_t st = time_hot(e, trial, m, heat, ev, &ms[own]);
            if (st != BT_OK) {
                return st;
            }
        }
        best = ms[1] <= ms[0] ? m : best;
        heat = 60; /* it is hot by now */
    }
    e->wide_from[what] = best;
    return BT_OK;
}

/* Rows of slot 0, whose pages are all page 0 as yet, in rising positions; random activations. */
static cudaError_t trial_inputs(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t rows = e->host.info.max_rows, *pos = bt_malloc(rows * sizeof(*pos));
    const struct layout l = lay_out(rows, 0, 0, 0, 0);
    const struct inputs in = inputs_at(&l, e->step);
    for (uint32_t i = 0; i < rows; i++) {
        pos[i] = i % c->max_model_len;
    }
    cudaError_t ce = cudaMemset(in.slots, 0, rows * 4);
    ce = ce == cudaSuccess ? cudaMemcpy(in.pos, pos, rows * 4, cudaMemcpyHostToDevice) : ce;
    free(pos);
    size_t wide = BT_MAX(c->hidden, c->intermediate);
    ce = ce == cudaSuccess
             ? bt_cu_dummy_bf16(e->x, (size_t)rows * c->hidden * 2, 1.0f, 2, e->compute)
             : ce;
    return ce == cudaSuccess ? bt_cu_dummy_bf16(e->a, rows * wide, 1.0f, 4, e->compute) : ce;
}

bt_status_t bt_cu_step_choose(struct bt_engine *e, char *err, size_t err_cap)
{
    cudaEvent_t ev[2] = {0};
    cudaError_t ce = trial_inputs(e);
    for (int i = 0; ce == cudaSuccess && i < 2; i++) {
        ce = cudaEventCreate(&ev[i]);
    }
    bt_status_t st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "inputs");
    for (int i = 0; st == BT_OK && i < BT_CU_WIDES; i++) {
        if (i != BT_CU_WIDE_QKV || !e->e4m3) {
            st = find_wide_from(e, (enum bt_cu_wide)i, ev);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (ev[i]) {
            cudaEventDestroy(ev[i]);
        }
    }
    if (st == BT_OK) { /* as it was: what no token has written is finite */
        ce = cudaMemsetAsync(e->kv, 0, e->host.info.layout.block_bytes, e->compute);
        st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "first page");
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine cuda: timing of prompts' products: %s", e->fault);
    }
    return st;
}

/* ---- open ---- */

bt_status_t bt_cu_step_open(struct bt_engine *e, char *err, size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_engine_info *info = &e->host.info;
    size_t rows = BT_MAX(info->max_rows, e->max_batch), q = (size_t)c->heads * c->head_dim;
    size_t qkv = q + (size_t)2 * c->kv_heads * c->head_dim;
    struct layout all = lay_out((uint32_t)rows, e->max_batch, info->max_slots,
                                info->max_rows + info->max_slots, info->max_rows);
    cudaError_t ce = cudaSuccess;
    for (int i = 0; i < BT_CU_WIDES; i++) {
        e->wide_from[i] = UINT32_MAX;
    }
    e->step_bytes = all.bytes;
    e->groups = bt_calloc(info->max_rows, sizeof(*e->groups));
    e->step = take(all.bytes, &ce);
    e->rope = take((size_t)c->max_model_len * c->head_dim * 4, &ce);
    e->x = take(rows * c->hidden * 4, &ce);
    e->qkv = take(rows * qkv * 4, &ce);
    e->q = take(rows * q * 2, &ce);
    e->o = take(rows * q * 2, &ce);
    e->a = take(rows * BT_MAX(c->hidden, c->intermediate) * 2, &ce);
    e->gu = take(rows * 2 * c->intermediate * 2, &ce);
    e->logits = take((size_t)e->max_batch * c->vocab * 4, &ce);
    e->table = take((size_t)info->max_slots * e->host.max_pages_of_slot * 4, &ce);
    e->last_token = take(info->max_slots * 4, &ce);
    e->out_rows = take(e->max_batch * 4, &ce);
    if (ce == cudaSuccess) {
        ce = cudaMemset(e->table, 0, (size_t)info->max_slots * e->host.max_pages_of_slot * 4);
    }
    if (ce == cudaSuccess) {
        ce = fill_rope(e);
    }
    for (int i = 0; ce == cudaSuccess && i < BT_CU_STAGING; i++) {
        ce = cudaMallocHost((void **)&e->staging[i].host, all.bytes);
        if (ce == cudaSuccess) {
            ce = cudaEventCreateWithFlags(&e->staging[i].sent, cudaEventDisableTiming);
        }
    }
    if (ce != cudaSuccess) {
        snprintf(err, err_cap,
                 "engine: memory for steps of %u tokens and %u sequences: %s; lower "
                 "the step size or max_slots",
                 info->max_rows, info->max_slots, cudaGetErrorString(ce));
        return ce == cudaErrorMemoryAllocation ? BT_ERR_NO_MEMORY : BT_ERR_DEVICE;
    }
    if (tune(e) != BT_OK || meet(e) != BT_OK || choose_ways(e) != BT_OK) {
        snprintf(err, err_cap, "engine cuda: timing of products: %s", e->fault);
        return BT_ERR_DEVICE;
    }
    return BT_OK;
}

/* ---- a layer ---- */

static bt_status_t attention(struct bt_engine *e, const struct layout *l, const struct inputs *in,
                             uint32_t layer_row)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t q = c->heads * c->head_dim, stride = e->host.max_pages_of_slot;
    if (l->singles) {
        const struct bt_attn_decode d = {e->q,     e->o,      q,        q,      l->singles,
                                         in->lens, in->slots, e->table, stride, true};
        BT_CU_TRY(e, bt_attn_decode(e->attn, &d, layer_row, e->compute));
    }
    for (uint32_t i = 0; l->items && i < e->n_groups; i++) {
        const struct bt_cu_group *g = &e->groups[i];
        struct bt_attn_prefill f = {.q = e->q,
                                    .out = e->o,
                                    .q_stride = q,
                                    .out_stride = q,
                                    .rows = l->tokens,
                                    .items = in->items + g->item,
                                    .n_items = g->n_items,
                                    .table = e->table,
                                    .table_stride = stride};
        if (!e->e4m3) {
            BT_CU_TRY(e, bt_attn_prefill(e->attn, &f, layer_row, e->compute));
            continue;
        }
        BT_CU_TRY(e, bt_attn_expand(e->attn, layer_row, e->wide, in->spans + g->span, g->n_spans,
                                    g->pages, e->table, stride, e->compute));
        f.table = e->wide_table;
        f.table_stride = 1;
        BT_CU_TRY(e, bt_attn_prefill(e->wide_attn, &f, 0, e->compute));
    }
    return BT_OK;
}

/* b NULL: no flows (a graph). */
static bt_status_t run_layer(struct bt_engine *e, const struct bt_engine_batch *b,
                             const struct layout *l, const struct inputs *in, uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    uint32_t n = l->tokens, q = c->heads * c->head_dim, bytes;
    uint32_t kv_row = (uint32_t)(bt_kv_segment(&e->host.info.layout, layer, &bytes) /
                                 bt_kv_row_bytes(&e->host.info.layout.groups[0]));
    bt_status_t st = b ? bt_cu_layer_wait(e, b, layer) : BT_OK;
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, bt_cu_norm(e->x, NULL, y->norm_attn, n, c->hidden, c->norm_eps, e->a, e->compute));
    st = qkv(e, y, n, in, kv_row);
    st = st == BT_OK && b ? bt_cu_layer_fire(e, b, layer) : st;
    st = st == BT_OK ? attention(e, l, in, kv_row) : st;
    st = st == BT_OK ? product(e, y->o, e->o, e->x, n, c->hidden, q, false, true) : st;
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, bt_cu_norm(e->x, NULL, y->norm_mlp, n, c->hidden, c->norm_eps, e->a, e->compute));
    return mlp(e, y, n);
}

static bt_status_t run_model(struct bt_engine *e, const struct bt_engine_batch *b,
                             const struct layout *l, const struct inputs *in)
{
    const struct bt_model_config *c = &e->model.config;
    /* In this order: embed is launched in the plain way, so it begins when the plan, the step's
     * inputs and the KV of earlier steps are there. What follows begins early (mma.cuh), but never
     * before the kernel in front has begun, so decode attention may read all these before it waits
     * (attn.h). A flow's wait is in front of its layer's first kernel, for the same reason. */
    if (l->singles) {
        BT_CU_TRY(e, bt_attn_decode_plan(e->attn, in->lens, l->singles, e->compute));
    }
    BT_CU_TRY(e, bt_cu_embed(in->ids, in->slots, e->last_token, e->model.embed, l->tokens,
                             c->hidden, e->x, e->compute));
    for (uint32_t i = 0; i < c->layers; i++) {
        bt_cu_range_push("layer", i);
        bt_status_t st = run_layer(e, b, l, in, i);
        bt_cu_range_pop();
        if (st != BT_OK) {
            return st;
        }
    }
    return l->wanted ? head(e, in->rows, l->wanted) : BT_OK;
}

/* ---- prompt logprobs: rare, so the host waits for them ---- */

static bt_status_t prompt_logprobs(struct bt_engine *e, const struct bt_engine_batch *b,
                                   const struct layout *l, struct bt_host_ticket *t)
{
    uint32_t vocab = e->model.config.vocab, chunk = l->singles, single = 0, out = 0, total = 0;
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
        uint32_t first = row->n == 1 ? single++ : chunk, n = bt_host_row_prompt_outs(&e->host, row);
        chunk += row->n == 1 ? 0 : row->n;
        for (uint32_t at = 0; st == BT_OK && at < n; at += e->max_batch) {
            uint32_t m = BT_MIN(n - at, e->max_batch), pos = bt_host_row_pos(&e->host, row) + at;
            for (uint32_t i = 0; i < m; i++) {
                rows[i] = (int32_t)(first + at + i);
            }
            cudaError_t ce =
                cudaMemcpyAsync(e->out_rows, rows, m * 4, cudaMemcpyHostToDevice, e->compute);
            st = ce == cudaSuccess ? head(e, e->out_rows, m) : bt_cu_fail(e, ce, "prompt rows");
            if (st == BT_OK) {
                ce = cudaMemcpyAsync(logits, e->logits, (size_t)m * vocab * 4,
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

/* A graph for `bucket` single tokens, captured at its first use. */
static bt_status_t graph_for(struct bt_engine *e, uint32_t bucket, int index)
{
    if (e->graphs[index]) {
        return BT_OK;
    }
    struct layout l = lay_out(bucket, bucket, bucket, 0, 0);
    struct inputs in = inputs_at(&l, e->step);
    cudaGraph_t g = NULL;
    BT_CU_TRY(e, cudaStreamBeginCapture(e->compute, cudaStreamCaptureModeThreadLocal));
    bt_status_t st = run_model(e, NULL, &l, &in);
    cudaError_t ce = cudaStreamEndCapture(e->compute, &g);
    if (st == BT_OK && ce == cudaSuccess) {
        ce = cudaGraphInstantiate(&e->graphs[index], g, 0);
    }
    if (g) {
        cudaGraphDestroy(g);
    }
    return st == BT_OK && ce != cudaSuccess ? bt_cu_fail(e, ce, "capture of a decode step") : st;
}

static bool decode_only(const struct bt_engine *e, const struct bt_engine_batch *b)
{
    bool flat = b->n_rows > 0 && b->n_rows <= BT_MIN(e->max_batch, (uint32_t)BT_CU_GRAPH_MAX);
    for (uint32_t r = 0; flat && r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        flat = row->n == 1 && !row->wait.flow && !row->fire.flow &&
               !(row->flags & BT_ROW_PROMPT_LOGPROBS);
    }
    return flat;
}

static bt_status_t send_inputs(struct bt_engine *e, const struct bt_engine_batch *b,
                               const struct layout *l, struct bt_host_ticket *t)
{
    struct bt_cu_staging *s = &e->staging[e->next_staging++ % BT_CU_STAGING];
    if (s->used) {
        BT_CU_TRY(e, cudaEventSynchronize(s->sent));
    }
    struct inputs in = inputs_at(l, s->host);
    fill(e, b, l, &in, t);
    pad(l, &in, l->items ? l->singles : b->n_rows, t->n_rows);
    if (l->bytes <= FETCH_MAX) { /* between two kernels the copy engine takes 10 us longer */
        BT_CU_TRY(e, bt_cu_fetch(s->host, e->step, l->bytes, e->compute));
    } else {
        BT_CU_TRY(e,
                  cudaMemcpyAsync(e->step, s->host, l->bytes, cudaMemcpyHostToDevice, e->compute));
    }
    BT_CU_TRY(e, cudaEventRecord(s->sent, e->compute));
    s->used = true;
    return BT_OK;
}

static struct layout batch_layout(const struct bt_engine *e, const struct bt_engine_batch *b,
                                  uint32_t n_tokens)
{
    uint32_t singles = 0, wanted = 0, items = 0, chunks = 0, per = bt_attn_prefill_tokens(e->attn);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        singles += b->rows[r].n == 1;
        wanted += b->rows[r].flags & BT_ROW_SAMPLE ? 1 : 0;
        items += b->rows[r].n == 1 ? 0 : BT_DIV_UP(b->rows[r].n, per);
        chunks += b->rows[r].n > 1;
    }
    return lay_out(n_tokens, singles, wanted, items, e->e4m3 ? chunks : 0);
}

static bt_status_t enqueue(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t)
{
    struct layout l;
    bt_status_t st;
    if (decode_only(e, b)) {
        uint32_t bucket = 1;
        int index = 0;
        for (; bucket < b->n_rows; bucket *= 2) {
            index++;
        }
        bucket = BT_MIN(bucket, e->max_batch);
        l = lay_out(bucket, bucket, bucket, 0, 0);
        st = graph_for(e, bucket, index);
        st = st == BT_OK ? send_inputs(e, b, &l, t) : st;
        if (st == BT_OK) {
            BT_CU_TRY(e, cudaGraphLaunch(e->graphs[index], e->compute));
        }
    } else {
        l = batch_layout(e, b, n_tokens);
        st = send_inputs(e, b, &l, t);
        struct inputs in = inputs_at(&l, e->step);
        st = st == BT_OK ? run_model(e, b, &l, &in) : st;
        st = st == BT_OK ? prompt_logprobs(e, b, &l, t) : st;
        if (st == BT_OK && t->n_out && l.wanted) { /* they overwrote the sample's logits */
            st = head(e, in.rows, l.wanted);
        }
    }
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
