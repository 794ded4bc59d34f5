/* The second half of a layer: an MLP, or the experts that a router chooses for each row. Its result
 * is added to the residual stream. choose.c has chosen what takes an MLP's products. Asynchronous
 * on the compute stream; owner thread: the engine's. */
#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/gemm/wide_e4m3.h"
#include "common/engine/cuda/step/step_priv.h"

static bt_status_t gelu(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t wide = c->intermediate;
    bt_status_t st =
        bt_cu_product(e, &y->mlp.in, e->act.a, e->act.gu, n, wide, c->hidden, false, false);
    if (st != BT_OK) {
        return st;
    }
    BT_CU_TRY(e, bt_cu_gelu(e->act.gu, y->bias.up, n, wide, e->act.a, e->compute));
    return bt_cu_product(e, &y->mlp.down, e->act.a, e->act.x, n, c->hidden, wide, false, true);
}

/* bt_cu_mlp_dense of e->act.e4m3 */
static bt_status_t mlp_e4m3(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n)
{
    const struct bt_cu_mlp_weights *w = &y->mlp;
    const struct bt_model_config *c = &e->model.config;
    const uint32_t wide = 2 * c->intermediate, inter = c->intermediate;
    int way = bt_cu_gemm_way(e->gemm, n, wide, c->hidden, w->in.kind, BT_CU_SKINNY_SWIGLU);
    struct bt_cu_e4m3_rows h = e->act.e4m3, apart = {e->act.gu, NULL};
    /* gu has room for four bytes of each value */
    apart.scale = (float *)(apart.v + (size_t)BT_DIV_UP(n, 4u) * 4 * inter);
    if (way >= 0 && bt_cu_skinny_rounds((uint32_t)way, n, wide, c->hidden)) {
        h = apart;
        BT_CU_TRY(e, bt_cu_skinny_rounded_swiglu((uint32_t)way, w->in, &e->act.e4m3, &h, n, wide,
                                                 c->hidden, e->compute));
    } else if (way >= 0) {
        BT_CU_TRY(e, bt_cu_skinny_rounded((uint32_t)way, w->in, &e->act.e4m3, e->act.gu, n, wide,
                                          c->hidden, BT_CU_SKINNY_SWIGLU, e->compute));
        BT_CU_TRY(e, bt_cu_rows_e4m3(e->act.gu, n, inter, &h, e->compute));
    } else if (bt_cu_takes_wide(e, BT_CU_WIDE_GATE_UP, n)) {
        const struct bt_cu_wide_e4m3 p = {w->in, e->act.e4m3, n, wide, c->hidden};
        h = apart;
        BT_CU_TRY(e, bt_cu_wide_e4m3_swiglu(&p, &h, e->compute));
    } else {
        bt_status_t st = bt_cu_product(e, &w->in, NULL, e->act.gu, n, wide, c->hidden, true, false);
        if (st != BT_OK) {
            return st;
        }
        BT_CU_TRY(e, bt_cu_swiglu_e4m3(e->act.gu, n, inter, &h, e->compute));
    }
    return bt_cu_product_e4m3(e, &w->down, &h, e->act.x, n, c->hidden, inter, false, true);
}

bt_status_t bt_cu_mlp_dense(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n)
{
    const struct bt_cu_mlp_weights *w = &y->mlp;
    const struct bt_model_config *c = &e->model.config;
    if (c->gpt2) {
        return gelu(e, y, n);
    }
    if (bt_cu_takes_e4m3(&w->in, n)) {
        return mlp_e4m3(e, y, n);
    }
    uint32_t wide = 2 * c->intermediate;
    int way = bt_cu_gemm_way(e->gemm, n, wide, c->hidden, w->in.kind, BT_CU_SKINNY_SWIGLU);
    void *h = e->act.a;
    if (e->deterministic) {
        h = e->act.gu;
        bt_status_t st = bt_cu_product_invariant(e, &w->in, e->act.a, h, n, wide, c->hidden,
                                                 BT_CU_SKINNY_SWIGLU_ROUNDED);
        if (st != BT_OK) {
            return st;
        }
    } else if (bt_cu_takes_wide(e, BT_CU_WIDE_GATE_UP, n)) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_wide_swiglu(w->in.w, e->act.a, h, n, wide, c->hidden, e->compute));
    } else if (way >= 0) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, w->in, e->act.a, h, n, wide, c->hidden,
                                  BT_CU_SKINNY_SWIGLU, e->compute));
    } else if (bt_cu_gemv_fits(n, wide, c->hidden, w->in.kind)) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_gemv_swiglu(w->in, e->act.a, h, n, wide, c->hidden, e->compute));
    } else {
        bt_status_t st =
            bt_cu_product(e, &w->in, e->act.a, e->act.gu, n, wide, c->hidden, true, false);
        if (st != BT_OK) {
            return st;
        }
        BT_CU_TRY(e, bt_cu_swiglu(e->act.gu, n, c->intermediate, h, e->compute));
    }
    return bt_cu_product(e, &w->down, h, e->act.x, n, c->hidden, c->intermediate, false, true);
}

bool bt_cu_experts_make_norm(const struct bt_engine *e, uint32_t layer, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    /* Deterministic engines take one kernel for the norm of any number of rows. */
    uint32_t rows = e->deterministic ? UINT32_MAX : n;
    return layer > 0 && layer < c->layers && bt_model_has_experts(c, layer - 1) &&
           c->hidden <= BT_CU_EXPERTS_NORM_MAX && rows <= bt_cu_experts_rows(&e->act.experts.x) &&
           !bt_cu_takes_e4m3(&e->model.layers[layer].qkv, n);
}

/* x += the layer's experts of norm(x), the shared expert among them (weights.c) */
static bt_status_t routed(struct bt_engine *e, const struct bt_cu_layout *l,
                          const struct bt_cu_inputs *in, uint32_t layer)
{
    const struct bt_cu_experts *x = &e->act.experts.x;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    const struct bt_cu_expert_weights *w = &y->experts;
    const struct bt_cu_experts_router router = {w->router.w, w->bias};
    uint32_t most = bt_cu_experts_rows(x), n = l->tokens;
    bool makes_norm = bt_cu_experts_make_norm(e, layer + 1, n);
    const struct bt_cu_experts_next next = {makes_norm ? y[1].norm_attn : NULL,
                                            e->model.config.norm_eps, e->act.a,
                                            makes_norm && y[1].qkv.kind != BT_CU_WEIGHT_BF16};
    for (uint32_t at = 0, m; at < n; at += m) {
        m = BT_MIN(n - at, most);
        float *rows = e->act.x + (size_t)at * x->hidden;
        const struct bt_cu_experts_norm norm = {rows, y->norm_mlp, e->model.config.norm_eps};
        BT_CU_TRY(e,
                  bt_cu_experts_choose(x, &norm, &router, in->slots + at, m, e->act.a,
                                       e->act.experts.scores, e->act.experts.scratch, e->compute));
        BT_CU_TRY(e, bt_cu_experts_run(x, w->in, w->down, e->act.a, m, e->act.experts.scratch, rows,
                                       true, makes_norm ? &next : NULL, e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_mlp(struct bt_engine *e, const struct bt_cu_layout *l,
                      const struct bt_cu_inputs *in, uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    if (bt_model_has_experts(c, layer)) {
        return routed(e, l, in, layer);
    }
    const struct bt_cu_norm_of norm = {y->norm_mlp, y->bias.norm_mlp, y->bias.o};
    bt_status_t st = bt_cu_norm_for(e, &y->mlp.in, &norm, l->tokens);
    return st == BT_OK ? bt_cu_mlp_dense(e, y, l->tokens) : st;
}

/* ---- open ---- */

struct bt_cu_experts bt_cu_experts_of(const struct bt_model_config *c)
{
    const struct bt_model_experts *e = &c->experts;
    uint32_t always = e->intermediate ? e->shared / e->intermediate : 0;
    return (struct bt_cu_experts){.n = e->n + always,
                                  .used = e->used + always,
                                  .hidden = c->hidden,
                                  .inter = e->intermediate,
                                  .groups = e->groups,
                                  .groups_used = e->groups > 1 ? e->groups_used : 1,
                                  .group_best = e->group_best,
                                  .sigmoid = e->router == BT_ROUTER_SIGMOID,
                                  .normalise = e->normalise,
                                  .scale = e->scale,
                                  .always = always};
}

cudaError_t bt_cu_experts_open(struct bt_engine *e, uint32_t rows)
{
    e->act.experts.x = bt_cu_experts_of(&e->model.config);
    e->act.experts.x.invariant = e->deterministic;
    e->act.experts.x.e4m3 = e->model.e4m3_experts;
    const struct bt_cu_experts *x = &e->act.experts.x;
    uint32_t most = BT_MIN(rows, bt_cu_experts_rows(x));
    size_t bytes = bt_cu_experts_scratch(x, most);
    cudaError_t ce = cudaMalloc(&e->act.experts.scratch, bytes);
    ce =
        ce == cudaSuccess ? cudaMemset(e->act.experts.scratch, 0, 256) : ce; /* as experts.h says */
    return ce == cudaSuccess ? cudaMalloc((void **)&e->act.experts.scores,
                                          (size_t)rows * (x->n - x->always) * sizeof(float))
                             : ce;
}

void bt_cu_experts_close(struct bt_engine *e)
{
    cudaFree(e->act.experts.scratch);
    cudaFree(e->act.experts.scores);
}
