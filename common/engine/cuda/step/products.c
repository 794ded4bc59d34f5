/* A layer's products and the model's head. choose.c has chosen the implementation for each number
 * of rows. Asynchronous on the compute stream; owner thread: the engine's. */
#include <stddef.h>

#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/gemm/wide_e4m3.h"
#include "common/engine/cuda/step/latent.h"

uint32_t bt_cu_layer_products(const struct bt_engine *e,
                              struct bt_cu_layer_product p[BT_CU_LAYER_PRODUCTS_MAX])
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t q = c->heads * c->head_dim, qkv = q + 2 * c->kv_heads * c->head_dim, n = 0;
    const bool latent = c->mla.kv_rank;
    uint32_t out = latent ? c->heads * c->mla.v : q, wide = bt_cu_mlp_width(c);
    qkv = latent ? bt_cu_latent_first_rows(c) : qkv;
    p[n++] = (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, qkv), qkv, c->hidden,
                                          e->act.qkv, BT_CU_SKINNY_F32};
    p[n++] = (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, o), c->hidden, out, e->act.x,
                                          BT_CU_SKINNY_ADD};
    if (latent && c->mla.q_rank) {
        p[n++] =
            (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, latent.q_b), q, c->mla.q_rank,
                                         bt_cu_latent_sums(e), BT_CU_SKINNY_F32};
    }
    if (wide) {
        p[n++] = c->gpt2
                     ? (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, mlp.in), wide,
                                                    c->hidden, e->act.gu, BT_CU_SKINNY_F32}
                     : (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, mlp.in), 2 * wide,
                                                    c->hidden, e->act.gu, BT_CU_SKINNY_SWIGLU};
        p[n++] = (struct bt_cu_layer_product){offsetof(struct bt_cu_layer, mlp.down), c->hidden,
                                              wide, e->act.x, BT_CU_SKINNY_ADD};
    }
    return n;
}

bool bt_cu_takes_e4m3(const struct bt_cu_weight *w, uint32_t m)
{
    /* With more rows skinny.cu takes longer to convert weights to f16 than to read them. */
    return w->kind != BT_CU_WEIGHT_BF16 && m > BT_CU_F16_ROWS;
}

/* Which of wide_e4m3.h's products in a layer w is; BT_CU_WIDES: none that is written in f32. */
static enum bt_cu_wide wide_of(const struct bt_engine *e, const struct bt_cu_weight *w)
{
    const size_t at = ((uintptr_t)w - (uintptr_t)e->model.layers) % sizeof(struct bt_cu_layer);
    return at == offsetof(struct bt_cu_layer, o)          ? BT_CU_WIDE_O
           : at == offsetof(struct bt_cu_layer, mlp.down) ? BT_CU_WIDE_DOWN
                                                          : BT_CU_WIDES;
}

bt_status_t bt_cu_product_e4m3(struct bt_engine *e, const struct bt_cu_weight *w,
                               const struct bt_cu_e4m3_rows *a, void *y, uint32_t m, uint32_t n,
                               uint32_t k, bool bf16, bool add)
{
    enum bt_cu_skinny_end end = add ? BT_CU_SKINNY_ADD : BT_CU_SKINNY_F32;
    const enum bt_cu_wide wide = wide_of(e, w);
    int way = bf16 ? -1 : bt_cu_gemm_way(e->gemm, m, n, k, w->kind, end);
    if (way >= 0) {
        BT_CU_TRY(e, bt_cu_skinny_rounded((uint32_t)way, *w, a, y, m, n, k, end, e->compute));
    } else if (!bf16 && wide < BT_CU_WIDES && bt_cu_takes_wide(e, wide, m)) {
        const struct bt_cu_wide_e4m3 p = {*w, *a, m, n, k};
        BT_CU_TRY(e, bt_cu_wide_e4m3_sum(&p, y, add, e->compute));
    } else {
        const struct bt_cu_e4m3_product p = {*w, *a, y, m, n, k, bf16, add};
        BT_CU_TRY(e, bt_cu_gemm_e4m3_run(e->gemm, &p, e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_product(struct bt_engine *e, const struct bt_cu_weight *w, const void *a, void *y,
                          uint32_t m, uint32_t n, uint32_t k, bool bf16, bool add)
{
    enum bt_cu_skinny_end end = add ? BT_CU_SKINNY_ADD : BT_CU_SKINNY_F32;
    if (e->deterministic) {
        return bt_cu_product_invariant(e, w, a, y, m, n, k, end);
    }
    if (bt_cu_takes_e4m3(w, m)) {
        return bt_cu_product_e4m3(e, w, &e->act.e4m3, y, m, n, k, bf16, add);
    }
    int way = bf16 ? -1 : bt_cu_gemm_way(e->gemm, m, n, k, w->kind, end);
    if (way >= 0) {
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, *w, a, y, m, n, k, end, e->compute));
    } else if (!bf16 && bt_cu_gemv_fits(m, n, k, w->kind)) {
        BT_CU_TRY(e, bt_cu_gemv(*w, a, y, m, n, k, add, e->compute));
    } else {
        BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, w->w, a, y, m, n, k, bf16, add, e->compute));
    }
    return BT_OK;
}

bool bt_cu_takes_wide(const struct bt_engine *e, enum bt_cu_wide what, uint32_t n)
{
    return n <= BT_CU_CLOSE_ROWS ? e->wides.at[what][BT_DIV_UP(n, BT_CU_CLOSE_STEP)]
                                 : n >= e->wides.from[what];
}

/* a -> queries in e->act.q, keys and values in their pages */
bt_status_t bt_cu_qkv(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n,
                      const struct bt_cu_inputs *in, uint32_t layer_row)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_append a = {.qkv = e->act.qkv,
                                   .bias = y->qkv_bias,
                                   .q_norm = y->q_norm,
                                   .k_norm = y->k_norm,
                                   .rope = e->act.rope,
                                   .pos = in->pos,
                                   .slots = in->slots,
                                   .table = e->table,
                                   .q = e->act.q,
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
    if (bt_cu_takes_wide(e, BT_CU_WIDE_QKV, n) && bt_cu_takes_e4m3(&y->qkv, n)) {
        const struct bt_cu_wide_e4m3 p = {y->qkv, e->act.e4m3, n,
                                          (c->heads + 2 * c->kv_heads) * c->head_dim, c->hidden};
        BT_CU_TRY(e, bt_cu_wide_e4m3_append(&p, &a, e->compute));
        return BT_OK;
    }
    if (bt_cu_takes_wide(e, BT_CU_WIDE_QKV, n)) {
        BT_CU_TRY(e, bt_cu_wide_append(y->qkv.w, e->act.a, c->hidden, &a, e->compute));
        return BT_OK;
    }
    bt_status_t st =
        bt_cu_product(e, &y->qkv, e->act.a, e->act.qkv, n,
                      (c->heads + 2 * c->kv_heads) * c->head_dim, c->hidden, false, false);
    if (st == BT_OK) {
        BT_CU_TRY(e, bt_cu_append(&a, e->compute));
    }
    return st;
}

bt_status_t bt_cu_norm_rows(struct bt_engine *e, const struct bt_cu_norm_of *norm,
                            const int32_t *rows, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    if (!norm->bias) {
        BT_CU_TRY(e, bt_cu_norm(e->act.x, rows, norm->w, n, c->hidden, c->norm_eps, e->act.a,
                                e->compute));
        return BT_OK;
    }
    const struct bt_cu_layer_norm a = {.x = e->act.x,
                                       .rows = rows,
                                       .add = norm->add,
                                       .keep = !rows && norm->add,
                                       .w = norm->w,
                                       .bias = norm->bias,
                                       .n = n,
                                       .hidden = c->hidden,
                                       .eps = c->norm_eps,
                                       .a = e->act.a};
    BT_CU_TRY(e, bt_cu_layer_norm(&a, e->compute));
    return BT_OK;
}

bt_status_t bt_cu_norm_for(struct bt_engine *e, const struct bt_cu_weight *w,
                           const struct bt_cu_norm_of *norm, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    if (w->kind == BT_CU_WEIGHT_BF16) {
        return bt_cu_norm_rows(e, norm, NULL, n);
    }
    if (bt_cu_takes_e4m3(w, n)) {
        BT_CU_TRY(e, bt_cu_norm_e4m3(e->act.x, norm->w, n, c->hidden, c->norm_eps, &e->act.e4m3,
                                     e->compute));
    } else {
        BT_CU_TRY(e, bt_cu_norm_f16(e->act.x, NULL, norm->w, n, c->hidden, c->norm_eps, e->act.a,
                                    e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_head(struct bt_engine *e, const int32_t *rows, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_norm_of norm = {e->model.norm, e->model.norm_bias,
                                       e->model.layers[c->layers - 1].bias.down};
    bt_status_t st = bt_cu_norm_rows(e, &norm, rows, n);
    return st == BT_OK ? bt_cu_product(e, &e->model.lm_head, e->act.a, e->act.logits, n, c->vocab,
                                       c->hidden, false, false)
                       : st;
}
