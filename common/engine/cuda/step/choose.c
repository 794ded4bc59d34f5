/* Chooses each product's implementation by timing at the start: cuBLASLt's algorithms, the ways of
 * products of few rows, wide.h for prompts. Runs once in open, and waits for the device. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/gemm/wide_e4m3.h"
#include "common/engine/cuda/step/latent.h"

/* ---- cuBLASLt ---- */

#define TUNE_LAYERS 8u

static bool is_bf16(const struct bt_cu_layer_product *p)
{
    return p->end == BT_CU_SKINNY_SWIGLU;
}
static enum bt_cu_skinny_end end_of(const struct bt_engine *e, const struct bt_cu_layer_product *p)
{
    return e->deterministic && p->end == BT_CU_SKINNY_SWIGLU ? BT_CU_SKINNY_SWIGLU_ROUNDED : p->end;
}
static bool is_added(const struct bt_cu_layer_product *p)
{
    return p->end == BT_CU_SKINNY_ADD;
}

/* p's weights in the first layer that has them. */
static const struct bt_cu_weight *first_of(const struct bt_engine *e,
                                           const struct bt_cu_layer_product *p)
{
    uint32_t i = 0;
    while (i + 1 < e->model.config.layers && !bt_cu_weight_of(&e->model.layers[i], p)->w) {
        i++;
    }
    return bt_cu_weight_of(&e->model.layers[i], p);
}

/* Of p's weights: those of all layers are of one kind, but for the form of scales. */
static enum bt_cu_weight_kind kind_of(const struct bt_engine *e,
                                      const struct bt_cu_layer_product *p)
{
    return first_of(e, p)->kind;
}

/* The weights of p in the first layers that have it; returns their number. 0 also where there is no
 * room for its result of m rows. */
static uint32_t weights_of(const struct bt_engine *e, const struct bt_cu_layer_product *p,
                           uint32_t m, const void *w[TUNE_LAYERS])
{
    uint32_t n = 0;
    if (p->weight == offsetof(struct bt_cu_layer, latent.q_b) && !bt_cu_latent_sums_fit(e, m)) {
        return 0;
    }
    for (uint32_t i = 0; n < TUNE_LAYERS && i < e->model.config.layers; i++) {
        w[n] = bt_cu_weight_of(&e->model.layers[i], p)->w;
        n += w[n] != NULL;
    }
    return n;
}

/* Of a model whose layers are e4m3. Fewer rows do not use cuBLASLt. */
static bt_status_t tune_e4m3(struct bt_engine *e, const struct bt_cu_layer_product *p, uint32_t m,
                             uint32_t proposals)
{
    const struct bt_cu_e4m3_product q = {.a = e->act.e4m3,
                                         .y = p->y,
                                         .m = m,
                                         .n = p->n,
                                         .k = p->k,
                                         .bf16 = is_bf16(p),
                                         .add = is_added(p)};
    struct bt_cu_weight w[TUNE_LAYERS];
    uint32_t n = 0;
    for (uint32_t i = 0; n < TUNE_LAYERS && i < e->model.config.layers; i++) {
        w[n] = *bt_cu_weight_of(&e->model.layers[i], p);
        n += w[n].kind == kind_of(e, p);
    }
    BT_CU_TRY(e, bt_cu_rows_e4m3(e->act.a, m, p->k, &e->act.e4m3, e->compute));
    BT_CU_TRY(e, bt_cu_gemm_e4m3_tune(e->gemm, &q, w, n, proposals, e->compute));
    return BT_OK;
}

static bt_status_t tune_layer(struct bt_engine *e, uint32_t m, uint32_t proposals)
{
    struct bt_cu_layer_product of[BT_CU_LAYER_PRODUCTS_MAX];
    uint32_t n = bt_cu_layer_products(e, of);
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_cu_layer_product *p = &of[i];
        const void *w[TUNE_LAYERS];
        uint32_t layers = weights_of(e, p, m, w);
        if (kind_of(e, p) != BT_CU_WEIGHT_BF16) {
            bool many = bt_cu_takes_e4m3(first_of(e, p), m);
            bt_status_t st = many ? tune_e4m3(e, p, m, proposals) : BT_OK;
            if (st != BT_OK) {
                return st;
            }
        } else if (layers && !bt_cu_gemv_fits(m, p->n, p->k, BT_CU_WEIGHT_BF16)) {
            BT_CU_TRY(e, bt_cu_gemm_tune(e->gemm, w, layers, e->act.a, p->y, m, p->n, p->k,
                                         is_bf16(p), is_added(p), proposals, e->compute));
        }
    }
    return BT_OK;
}

static bt_status_t tune_head(struct bt_engine *e, uint32_t m)
{
    const struct bt_model_config *c = &e->model.config;
    const void *head = e->model.lm_head.w;
    if (!bt_cu_gemv_fits(m, c->vocab, c->hidden, BT_CU_WEIGHT_BF16)) {
        BT_CU_TRY(e, bt_cu_gemm_tune(e->gemm, &head, 1, e->act.a, e->act.logits, m, c->vocab,
                                     c->hidden, false, false, BT_CU_GEMM_PROPOSALS, e->compute));
    }
    return BT_OK;
}

/* Chooses algorithms by timing: for the batch sizes of decode graphs in powers of two, for whole
 * chunks, and, from a few proposals, for each size between where there are few tiles. There
 * cuBLASLt's first proposal for 448 rows took a fifth longer than the one for 512. */
static bt_status_t tune(struct bt_engine *e)
{
    enum { FEW = 8 };
    const struct bt_model_config *c = &e->model.config;
    uint32_t most = e->host.info.max_rows, rows = BT_MAX(most, e->max_batch);
    uint32_t graphs = BT_MIN(e->max_batch, BT_CU_GRAPH_MAX);
    size_t in = (size_t)rows * bt_cu_input_width(c);
    BT_CU_TRY(e, bt_cu_dummy_bf16(e->act.a, in, 1.0f, 1, e->compute)); /* zeros would run faster */
    bt_status_t st = BT_OK;
    for (uint32_t m = 1; st == BT_OK && m <= graphs; m *= 2) {
        st = tune_layer(e, m, BT_CU_GEMM_PROPOSALS);
        st = st == BT_OK ? tune_head(e, m) : st;
    }
    for (uint32_t m = BT_CU_SKINNY_ROWS + BT_CU_CLOSE_STEP;
         st == BT_OK && m <= BT_MIN(rows, BT_CU_CLOSE_ROWS); m += BT_CU_CLOSE_STEP) {
        bool done = m <= graphs && (m & (m - 1)) == 0;
        st = done ? BT_OK : tune_layer(e, m, FEW);
    }
    return st == BT_OK ? tune_layer(e, most, BT_CU_GEMM_PROPOSALS) : st;
}

/* Runs each product once for each number of rows that has its own algorithm, so that no step has to
 * wait until one is chosen or loaded. */
static bt_status_t meet(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_cu_layer_product of[BT_CU_LAYER_PRODUCTS_MAX];
    uint32_t n = bt_cu_layer_products(e, of);
    for (uint32_t m = 1; m <= e->host.info.max_rows; m = bt_cu_gemm_bucket(m + 1)) {
        for (uint32_t i = 0; i < n; i++) {
            const struct bt_cu_layer_product *p = &of[i];
            const void *w[TUNE_LAYERS];
            if (kind_of(e, p) != BT_CU_WEIGHT_BF16) {
                const struct bt_cu_weight *first = first_of(e, p);
                bt_status_t st = bt_cu_takes_e4m3(first, m)
                                     ? bt_cu_product(e, first, NULL, p->y, m, p->n, p->k,
                                                     is_bf16(p), is_added(p))
                                     : BT_OK;
                if (st != BT_OK) {
                    return st;
                }
            } else if (!bt_cu_gemv_fits(m, p->n, p->k, BT_CU_WEIGHT_BF16) &&
                       weights_of(e, p, m, w)) {
                BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, w[0], e->act.a, p->y, m, p->n, p->k,
                                            is_bf16(p), is_added(p), e->compute));
            }
        }
        if (m <= e->max_batch && !bt_cu_gemv_fits(m, c->vocab, c->hidden, BT_CU_WEIGHT_BF16)) {
            BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, e->model.lm_head.w, e->act.a, e->act.logits, m,
                                        c->vocab, c->hidden, false, false, e->compute));
        }
    }
    return BT_OK;
}

/* ---- ways of products of few rows, by timing ---- */

#define TRIAL_LAYERS 4u /* their weights together are much larger than the L2 cache */

/* The products of some layers with the norms between them; a second norm replaces attention. */
static bt_status_t trial_layers(struct bt_engine *e, uint32_t m)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_cu_layer_product of[BT_CU_LAYER_PRODUCTS_MAX];
    uint32_t n = bt_cu_layer_products(e, of);
    for (uint32_t i = 0; i < BT_MIN(c->layers, TRIAL_LAYERS); i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        for (uint32_t k = 0; k < n; k++) {
            const struct bt_cu_layer_product *p = &of[k];
            const void *w[TUNE_LAYERS];
            bool first = p->weight == offsetof(struct bt_cu_layer, mlp.in);
            if (!bt_cu_weight_of(y, p)->w || !weights_of(e, p, m, w) ||
                p->weight == offsetof(struct bt_cu_layer, mlp.down)) {
                continue;
            }
            const struct bt_cu_norm_of norm = {.w = first ? y->norm_mlp : y->norm_attn};
            bt_status_t st = bt_cu_norm_for(e, bt_cu_weight_of(y, p), &norm, m);
            if (st != BT_OK) {
                return st;
            }
            const void *a = is_added(p) || p->k != c->hidden ? e->act.o : e->act.a;
            st = first ? bt_cu_mlp_dense(e, y, m)
                       : bt_cu_product(e, bt_cu_weight_of(y, p), a, p->y, m, p->n, p->k, false,
                                       is_added(p));
            if (st != BT_OK) {
                return st;
            }
        }
    }
    return BT_OK;
}

static bt_status_t trial_head(struct bt_engine *e, uint32_t m)
{
    bt_status_t st = bt_cu_head(e, NULL, m);
    return st == BT_OK ? bt_cu_head(e, NULL, m) : st;
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

/* The shortest time of some runs in ms. */
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

/* The shortest time of some runs as a graph, as steps of single tokens run. Launched one by one,
 * the kernels of so short a trial would wait for the host, and what is quickest to enqueue would
 * win. */
static bt_status_t time_graph(struct bt_engine *e, trial_fn *trial, uint32_t m, cudaEvent_t *ev,
                              float *ms_p)
{
    enum { RUNS = 4 };
    cudaGraph_t g = NULL;
    cudaGraphExec_t x = NULL;
    *ms_p = INFINITY;
    BT_CU_TRY(e, cudaStreamBeginCapture(e->compute, cudaStreamCaptureModeThreadLocal));
    bt_status_t st = trial(e, m);
    cudaError_t ce = cudaStreamEndCapture(e->compute, &g);
    ce = st == BT_OK && ce == cudaSuccess ? cudaGraphInstantiate(&x, g, 0) : ce;
    for (int i = 0; st == BT_OK && ce == cudaSuccess && i <= RUNS; i++) { /* the first uploads it */
        float ms = INFINITY;
        ce = cudaEventRecord(ev[0], e->compute);
        ce = ce == cudaSuccess ? cudaGraphLaunch(x, e->compute) : ce;
        ce = ce == cudaSuccess ? cudaEventRecord(ev[1], e->compute) : ce;
        ce = ce == cudaSuccess ? cudaEventSynchronize(ev[1]) : ce;
        ce = ce == cudaSuccess ? cudaEventElapsedTime(&ms, ev[0], ev[1]) : ce;
        *ms_p = BT_MIN(*ms_p, ms);
    }
    if (x) {
        cudaGraphExecDestroy(x);
    }
    if (g) {
        cudaGraphDestroy(g);
    }
    return st == BT_OK && ce != cudaSuccess ? bt_cu_fail(e, ce, "trial of products") : st;
}

/* The time in ms at the clock that the GPU can keep: long work draws so much power that the clock
 * falls within 0.2 s. heat: ms of runs; the second half of them counts. */
static bt_status_t time_hot(struct bt_engine *e, trial_fn *trial, uint32_t m, float heat,
                            cudaEvent_t *ev, float *ms_p)
{
    const float little = 0.5f; /* ms; a run this short does not heat the GPU */
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

/* -1: cuBLASLt or gemv.cu. */
static bool way_allowed(const struct bt_engine *e, int way, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_weight_kind kind)
{
    if (e->deterministic) {
        return way >= 0 && bt_cu_invariant_way((uint32_t)way, m, n, k);
    }
    if (kind != BT_CU_WEIGHT_BF16 && m > BT_CU_F16_ROWS) {
        return way < 0 || bt_cu_skinny_rounded_fits((uint32_t)way, m, n, k);
    }
    return way < 0 || bt_cu_skinny_fits((uint32_t)way, m, n, k, kind);
}

/* Tries all ways of one product while the other products stay unchanged, and keeps the fastest. A
 * way must be faster by half a percent; a smaller difference is noise. */
static bt_status_t try_product(struct bt_engine *e, uint32_t m, uint32_t n, uint32_t k,
                               enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end,
                               trial_fn *trial, cudaEvent_t *ev)
{
    int best = bt_cu_gemm_way(e->gemm, m, n, k, kind, end), now = best;
    float least, ms;
    bool any = false;
    for (uint32_t way = 0; way < bt_cu_skinny_ways(); way++) {
        any |= way_allowed(e, (int)way, m, n, k, kind);
    }
    if (!any) {
        return BT_OK;
    }
    bt_status_t st = time_graph(e, trial, m, ev, &least);
    for (int way = -1; st == BT_OK && way < (int)bt_cu_skinny_ways(); way++) {
        if (way == now || !way_allowed(e, way, m, n, k, kind)) {
            continue;
        }
        bt_cu_gemm_set_way(e->gemm, m, n, k, kind, end, way);
        st = time_graph(e, trial, m, ev, &ms);
        if (st == BT_OK && ms < least * 0.995f) {
            least = ms;
            best = way;
        }
    }
    bt_cu_gemm_set_way(e->gemm, m, n, k, kind, end, best);
    return st;
}

/* Chooses which products of few rows use skinny.h. They are timed together with their neighbours,
 * as what counts is their speed while those kernels run. The other algorithms are already
 * chosen. */
static bt_status_t choose_ways(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_cu_layer_product of[BT_CU_LAYER_PRODUCTS_MAX];
    uint32_t n = bt_cu_layer_products(e, of);
    uint32_t most = BT_MIN(e->deterministic ? e->host.info.max_rows : e->max_batch,
                           (uint32_t)BT_CU_SKINNY_ROWS);
    cudaEvent_t ev[2] = {0};
    BT_CU_TRY(e, bt_cu_dummy_bf16(e->act.x, (size_t)most * c->hidden * 2, 1.0f, 2, e->compute));
    BT_CU_TRY(
        e, bt_cu_dummy_bf16(e->act.o, (size_t)most * c->heads * c->head_dim, 1.0f, 3, e->compute));
    BT_CU_TRY(e, cudaEventCreate(&ev[0]));
    cudaError_t ce = cudaEventCreate(&ev[1]);
    bt_status_t st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "event");
    for (uint32_t m = 1; st == BT_OK && m <= most; m *= 2) {
        /* Two rounds: each depends on its neighbours. */
        for (uint32_t i = 0; st == BT_OK && i < 2 * n; i++) {
            const struct bt_cu_layer_product *p = &of[n - 1 - i % n];
            const void *w[TUNE_LAYERS];
            if (!weights_of(e, p, m, w)) {
                continue;
            }
            st = try_product(e, m, p->n, p->k, kind_of(e, p), end_of(e, p), trial_layers, ev);
        }
        if (st == BT_OK && m <= e->max_batch) {
            st = try_product(e, m, c->vocab, c->hidden, BT_CU_WEIGHT_BF16, BT_CU_SKINNY_F32,
                             trial_head, ev);
        }
    }
    cudaEventDestroy(ev[0]);
    if (ev[1]) {
        cudaEventDestroy(ev[1]);
    }
    return st;
}

bt_status_t bt_cu_choose_products(struct bt_engine *e)
{
    bt_status_t st = e->deterministic ? BT_OK : tune(e);
    st = st == BT_OK && !e->deterministic ? meet(e) : st;
    return st == BT_OK ? choose_ways(e) : st;
}

/* ---- wide.h or cuBLASLt, by timing ---- */

static bt_status_t trial_qkv(struct bt_engine *e, uint32_t m)
{
    struct bt_cu_layout l = {.tokens = e->host.info.max_rows};
    bt_cu_lay_out(&l);
    const struct bt_cu_inputs in = bt_cu_inputs_at(&l, e->inputs.step);
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < BT_MIN(e->model.config.layers, TRIAL_LAYERS); i++) {
        st = bt_cu_qkv(e, &e->model.layers[i], m, &in, 0);
    }
    return st;
}
static bt_status_t trial_mlp(struct bt_engine *e, uint32_t m)
{
    bt_status_t st = BT_OK;
    const struct bt_model_config *c = &e->model.config;
    for (uint32_t i = 0, n = 0; st == BT_OK && n < TRIAL_LAYERS && i < c->layers; i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        if (!y->mlp.in.w) {
            continue;
        }
        n++;
        const struct bt_cu_norm_of norm = {.w = y->norm_mlp};
        st = bt_cu_norm_for(e, &y->mlp.in, &norm, m);
        st = st == BT_OK ? bt_cu_mlp_dense(e, y, m) : st;
    }
    return st;
}

/* Products of e4m3 that are added to the residual stream. */
static bt_status_t trial_added(struct bt_engine *e, uint32_t m, bool down)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t k = down ? c->intermediate : c->heads * (c->mla.kv_rank ? c->mla.v : c->head_dim);
    bt_status_t st = BT_OK;
    for (uint32_t i = 0, n = 0; st == BT_OK && i < c->layers && n < TRIAL_LAYERS; i++) {
        const struct bt_cu_layer *y = &e->model.layers[i];
        const struct bt_cu_weight *w = down ? &y->mlp.down : &y->o;
        if (!w->w) {
            continue;
        }
        n++;
        st = bt_cu_product_e4m3(e, w, &e->act.e4m3, e->act.x, m, c->hidden, k, false, true);
    }
    return st;
}
static bt_status_t trial_o(struct bt_engine *e, uint32_t m)
{
    return trial_added(e, m, false);
}
static bt_status_t trial_down(struct bt_engine *e, uint32_t m)
{
    return trial_added(e, m, true);
}

static bool is_e4m3(const struct bt_engine *e, enum bt_cu_wide what)
{
    const bool attention = what == BT_CU_WIDE_QKV || what == BT_CU_WIDE_O;
    return attention ? e->model.e4m3_attention : e->model.e4m3_mlp;
}

static bool wide_fits(const struct bt_engine *e, enum bt_cu_wide what, uint32_t m)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t qkv = (c->heads + 2 * c->kv_heads) * c->head_dim, wide = bt_cu_mlp_width(c);
    if (is_e4m3(e, what)) { /* whose sizes fit cuBLASLt's product, so these, too */
        return bt_cu_wide_e4m3_fits(m, c->hidden, c->hidden);
    }
    return what == BT_CU_WIDE_QKV ? bt_cu_wide_fits(m, qkv, c->hidden)
                                  : wide && bt_cu_wide_fits(m, 2 * wide, c->hidden);
}

/* Many rows: halves their number as long as wide.h is not slower. */
static bt_status_t find_wide_from(struct bt_engine *e, enum bt_cu_wide what, trial_fn *trial,
                                  cudaEvent_t *ev)
{
    uint32_t best = UINT32_MAX;
    float ms[2] = {0, 0}, heat = 250;
    for (uint32_t m = e->host.info.max_rows; ms[1] <= ms[0] && m > BT_CU_CLOSE_ROWS; m /= 2) {
        if (!wide_fits(e, what, m)) {
            continue;
        }
        for (int own = 0; own < 2; own++) {
            e->wides.from[what] = own ? 1 : UINT32_MAX;
            bt_status_t st = time_hot(e, trial, m, heat, ev, &ms[own]);
            if (st != BT_OK) {
                return st;
            }
        }
        best = ms[1] <= ms[0] ? m : best;
        heat = 60; /* the GPU is hot by now */
    }
    e->wides.from[what] = best;
    return BT_OK;
}

/* Fewer rows: times each size separately. */
static bt_status_t find_wide_at(struct bt_engine *e, enum bt_cu_wide what, trial_fn *trial,
                                cudaEvent_t *ev)
{
    uint32_t most = BT_MIN(e->host.info.max_rows, BT_CU_CLOSE_ROWS);
    for (uint32_t m = BT_CU_SKINNY_ROWS + BT_CU_CLOSE_STEP; m <= most; m += BT_CU_CLOSE_STEP) {
        bool *at = &e->wides.at[what][m / BT_CU_CLOSE_STEP];
        float ms[2] = {0, 0};
        for (int own = 0; own < 2 && wide_fits(e, what, m); own++) {
            *at = own;
            bt_status_t st = time_trial(e, trial, m, ev, &ms[own]);
            if (st != BT_OK) {
                return st;
            }
        }
        *at = ms[1] < ms[0] * 0.995f;
    }
    return BT_OK;
}

/* Rows of slot 0 (all its pages are page 0 so far) at rising positions, with random activations. */
static cudaError_t trial_inputs(struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t rows = e->host.info.max_rows, *pos = bt_malloc(rows * sizeof(*pos));
    struct bt_cu_layout l = {.tokens = rows};
    bt_cu_lay_out(&l);
    const struct bt_cu_inputs in = bt_cu_inputs_at(&l, e->inputs.step);
    for (uint32_t i = 0; i < rows; i++) {
        pos[i] = i % c->max_model_len;
    }
    cudaError_t ce = cudaMemset(in.slots, 0, rows * 4);
    ce = ce == cudaSuccess ? cudaMemcpy(in.pos, pos, rows * 4, cudaMemcpyHostToDevice) : ce;
    free(pos);
    size_t wide = bt_cu_input_width(c);
    ce = ce == cudaSuccess
             ? bt_cu_dummy_bf16(e->act.x, (size_t)rows * c->hidden * 2, 1.0f, 2, e->compute)
             : ce;
    ce = ce == cudaSuccess ? bt_cu_dummy_bf16(e->act.a, rows * wide, 1.0f, 4, e->compute) : ce;
    return ce == cudaSuccess && e->act.e4m3.v
               ? bt_cu_rows_e4m3(e->act.a, rows, (uint32_t)wide, &e->act.e4m3, e->compute)
               : ce;
}

bt_status_t bt_cu_choose_wide(struct bt_engine *e, char *err, size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    cudaEvent_t ev[2] = {0};
    if (e->deterministic) {
        return BT_OK;
    }
    cudaError_t ce = trial_inputs(e);
    for (int i = 0; ce == cudaSuccess && i < 2; i++) {
        ce = cudaEventCreate(&ev[i]);
    }
    bt_status_t st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "inputs");
    static trial_fn *const trials[BT_CU_WIDES] = {trial_qkv, trial_mlp, trial_o, trial_down};
    for (int i = 0; st == BT_OK && i < BT_CU_WIDES; i++) {
        bool has = i == BT_CU_WIDE_QKV       ? !(e->e4m3 || e->latent)
                   : i == BT_CU_WIDE_GATE_UP ? bt_cu_mlp_width(c) && !c->gpt2
                                             : is_e4m3(e, (enum bt_cu_wide)i);
        if (has) {
            st = find_wide_from(e, (enum bt_cu_wide)i, trials[i], ev);
            st = st == BT_OK ? find_wide_at(e, (enum bt_cu_wide)i, trials[i], ev) : st;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (ev[i]) {
            cudaEventDestroy(ev[i]);
        }
    }
    if (st == BT_OK) { /* as before: positions that no token has written are finite numbers */
        ce = cudaMemsetAsync(e->kv, 0, e->host.info.layout.block_bytes, e->compute);
        st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "first page");
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "engine cuda: timing of prompts' products: %s", e->fault);
    }
    return st;
}
