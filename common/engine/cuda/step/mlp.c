/* The second half of a layer: an MLP whose result is added to the residual stream. choose.c has
 * chosen the implementation for each number of rows. Asynchronous on the compute stream; owner
 * thread: the engine's. */
#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/step/step_priv.h"

bt_status_t bt_cu_mlp_dense(struct bt_engine *e, const struct bt_cu_mlp_weights *w, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t wide = 2 * c->intermediate;
    int way = bt_cu_gemm_way(e->gemm, n, wide, c->hidden, BT_CU_SKINNY_SWIGLU);
    void *h = e->act.a;
    if (bt_cu_takes_wide(e, BT_CU_WIDE_GATE_UP, n)) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_wide_swiglu(w->in.w, e->act.a, h, n, wide, c->hidden, e->compute));
    } else if (way >= 0) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, w->in.w, e->act.a, h, n, wide, c->hidden,
                                  BT_CU_SKINNY_SWIGLU, e->compute));
    } else if (bt_cu_gemv_fits(n, wide, c->hidden)) {
        h = e->act.gu;
        BT_CU_TRY(e, bt_cu_gemv_swiglu(w->in.w, e->act.a, h, n, wide, c->hidden, e->compute));
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

bt_status_t bt_cu_mlp(struct bt_engine *e, const struct bt_cu_layout *l, uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    BT_CU_TRY(e, bt_cu_norm(e->act.x, NULL, y->norm_mlp, l->tokens, c->hidden, c->norm_eps,
                            e->act.a, e->compute));
    return bt_cu_mlp_dense(e, &y->mlp, l->tokens);
}
