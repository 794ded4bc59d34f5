/* The first half of a layer: attention with a key and a value for each token and KV head, whose
 * result is added to the residual stream. Asynchronous on the compute stream; owner thread: the
 * engine's. */
#include "common/engine/cuda/step/step_priv.h"

/* e->act.q -> e->act.o over the pages of a layer */
static bt_status_t attend(struct bt_engine *e, const struct bt_cu_layout *l,
                          const struct bt_cu_inputs *in, uint32_t layer_row)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t q = c->heads * c->head_dim, stride = e->host.max_pages_of_slot;
    if (e->deterministic) { /* the kernel of chunks computes single tokens, too */
        const struct bt_attn_prefill all = {.q = e->act.q,
                                            .out = e->act.o,
                                            .q_stride = q,
                                            .out_stride = q,
                                            .rows = l->tokens,
                                            .items = in->items,
                                            .n_items = l->items,
                                            .table = e->table,
                                            .table_stride = stride,
                                            .invariant = true};
        BT_CU_TRY(e, bt_attn_prefill(e->attn, &all, layer_row, e->compute));
        return BT_OK;
    }
    if (l->singles) {
        const struct bt_attn_decode d = {.q = e->act.q,
                                         .out = e->act.o,
                                         .q_stride = q,
                                         .out_stride = q,
                                         .most = l->most,
                                         .table = e->table,
                                         .table_stride = stride,
                                         .fresh = l->fresh,
                                         .early = true};
        BT_CU_TRY(e, bt_attn_decode(e->attn, &d, layer_row, e->compute));
    }
    for (uint32_t i = 0; l->items && i < e->n_groups; i++) {
        const struct bt_cu_group *g = &e->groups[i];
        struct bt_attn_prefill f = {.q = e->act.q,
                                    .out = e->act.o,
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

bt_status_t bt_cu_attention(struct bt_engine *e, const struct bt_engine_batch *b,
                            const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                            uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_layer *y = &e->model.layers[layer];
    uint32_t n = l->tokens, q = c->heads * c->head_dim, bytes;
    uint32_t kv_row = (uint32_t)(bt_kv_segment(&e->host.info.layout, layer, &bytes) /
                                 bt_kv_row_bytes(&e->host.info.layout.groups[0]));
    const struct bt_cu_norm_of norm = {y->norm_attn, y->bias.norm_attn,
                                       layer ? y[-1].bias.down : NULL};
    bt_status_t st =
        bt_cu_experts_make_norm(e, layer, n) ? BT_OK : bt_cu_norm_for(e, &y->qkv, &norm, n);
    st = st == BT_OK ? bt_cu_qkv(e, y, n, in, kv_row) : st;
    st = st == BT_OK && b ? bt_cu_layer_fire(e, b, layer) : st;
    st = st == BT_OK ? attend(e, l, in, kv_row) : st;
    if (st == BT_OK && bt_cu_takes_e4m3(&y->o, n)) {
        BT_CU_TRY(e, bt_cu_rows_e4m3(e->act.o, n, q, &e->act.e4m3, e->compute));
    }
    return st == BT_OK ? bt_cu_product(e, &y->o, e->act.o, e->act.x, n, c->hidden, q, false, true)
                       : st;
}
