/* A layer's products and the model's head. choose.c has chosen the implementation for each number
 * of rows. Asynchronous on the compute stream; owner thread: the engine's. */
#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/step/latent.h"

struct bt_cu_products bt_cu_layer_products(const struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t q = c->heads * c->head_dim;
    struct bt_cu_products p = {
        .n = {q + 2 * c->kv_heads * c->head_dim, c->hidden, 2 * c->intermediate, c->hidden},
        .k = {c->hidden, q, c->hidden, c->intermediate},
        .y = {e->act.qkv, e->act.x, e->act.gu, e->act.x}};
    if (e->latent) {
        p.n[0] = bt_cu_latent_first_rows(c);
        p.k[1] = c->heads * c->mla.v;
        p.n[4] = c->mla.q_rank ? q : 0;
        p.k[4] = c->mla.q_rank;
        p.y[4] = bt_cu_latent_sums(e);
    }
    return p;
}

bt_status_t bt_cu_product(struct bt_engine *e, const struct bt_cu_weight *w, const void *a, void *y,
                          uint32_t m, uint32_t n, uint32_t k, bool bf16, bool add)
{
    enum bt_cu_skinny_end end = add ? BT_CU_SKINNY_ADD : BT_CU_SKINNY_F32;
    int way = bf16 ? -1 : bt_cu_gemm_way(e->gemm, m, n, k, end);
    if (way >= 0) {
        BT_CU_TRY(e, bt_cu_skinny((uint32_t)way, w->w, a, y, m, n, k, end, e->compute));
    } else if (!bf16 && bt_cu_gemv_fits(m, n, k)) {
        BT_CU_TRY(e, bt_cu_gemv(w->w, a, y, m, n, k, add, e->compute));
    } else {
        BT_CU_TRY(e, bt_cu_gemm_run(e->gemm, w->w, a, y, m, n, k, bf16, add, e->compute));
    }
    return BT_OK;
}

bool bt_cu_takes_wide(const struct bt_engine *e, enum bt_cu_wide what, uint32_t n)
{
    return n <= BT_CU_CLOSE_ROWS ? e->wide_at[what][BT_DIV_UP(n, BT_CU_CLOSE_STEP)]
                                 : n >= e->wide_from[what];
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

bt_status_t bt_cu_head(struct bt_engine *e, const int32_t *rows, uint32_t n)
{
    const struct bt_model_config *c = &e->model.config;
    BT_CU_TRY(e, bt_cu_norm(e->act.x, rows, e->model.norm, n, c->hidden, c->norm_eps, e->act.a,
                            e->compute));
    return bt_cu_product(e, &e->model.lm_head, e->act.a, e->act.logits, n, c->vocab, c->hidden,
                         false, false);
}
