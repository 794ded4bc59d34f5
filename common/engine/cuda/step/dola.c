/* DoLa (Chuang et al. 2023) on the device: what enters early layers in sampled rows, the logits of
 * it, and which layer's are furthest from the last one's. The draw subtracts them. Its memory is
 * taken when a sequence first asks for it. Asynchronous on the compute stream; owner thread: the
 * engine's. */
#include "common/engine/cuda/rows/hidden.h"
#include "common/engine/cuda/step/step_priv.h"

static const struct bt_engine_params *params_of(const struct bt_engine *e,
                                                const struct bt_engine_row *row)
{
    const struct bt_engine_params *p = &e->host.slots[row->slot].params;
    return (row->flags & BT_ROW_SAMPLE) && p->n_dola ? p : NULL;
}

bool bt_cu_has_dola(const struct bt_engine *e, const struct bt_engine_batch *b)
{
    bool any = false;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        any = any || params_of(e, &b->rows[r]);
    }
    return any;
}

bt_status_t bt_cu_dola_open(struct bt_engine *e)
{
    struct bt_cu_dola *d = &e->act.dola;
    const struct bt_model_config *c = &e->model.config;
    size_t slots = e->host.info.max_slots, vocab = c->vocab;
    const struct {
        void **p;
        size_t bytes;
    } all[] = {{&d->rows, slots * BT_ENGINE_DOLA_MAX * c->hidden * 2},
               {(void **)&d->logits, BT_ENGINE_DOLA_MAX * vocab * sizeof(float)},
               {(void **)&d->far, BT_ENGINE_DOLA_MAX * sizeof(float)},
               {(void **)&d->early, slots * vocab * sizeof(float)}};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (!*all[i].p && cudaMalloc(all[i].p, all[i].bytes) != cudaSuccess) {
            (void)cudaGetLastError(); /* of this call alone: the device goes on */
            *all[i].p = NULL;
            return BT_ERR_NO_MEMORY;
        }
    }
    return BT_OK;
}

void bt_cu_dola_close(struct bt_engine *e)
{
    void *all[] = {e->act.dola.rows, e->act.dola.logits, e->act.dola.far, e->act.dola.early};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        cudaFree(all[i]);
    }
}

static uint8_t *row_at(const struct bt_engine *e, uint32_t n, uint32_t layer)
{
    return (uint8_t *)e->act.dola.rows +
           ((size_t)n * BT_ENGINE_DOLA_MAX + layer) * e->model.config.hidden * 2;
}

bt_status_t bt_cu_dola_keep(struct bt_engine *e, const struct bt_engine_batch *b,
                            const struct bt_cu_layout *l, uint32_t layer)
{
    const struct bt_model_config *c = &e->model.config;
    const float *add = layer ? e->model.layers[layer - 1].bias.down : NULL;
    struct bt_cu_rows_at at = {0, l->singles};
    uint32_t n = 0;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        const struct bt_engine_params *p = params_of(e, row);
        uint32_t last = bt_cu_next_rows(&at, row) + row->n - 1;
        for (uint32_t i = 0; p && i < p->n_dola; i++) {
            if (p->dola[i] == layer) {
                BT_CU_TRY(e, bt_cu_early_row(e->act.x + (size_t)last * c->hidden, add, c->hidden,
                                             row_at(e, n, i), e->compute));
            }
        }
        n += p != NULL;
    }
    return BT_OK;
}

bt_status_t bt_cu_dola_head(struct bt_engine *e, const struct bt_host_ticket *t)
{
    const struct bt_model_config *c = &e->model.config;
    for (uint32_t i = 0; i < t->n_sample; i++) {
        const struct bt_host_sample *want = &t->samples[i];
        if (want->early == BT_HOST_NO_EARLY) {
            continue;
        }
        uint32_t n = e->host.slots[want->slot].params.n_dola;
        bt_status_t st = bt_cu_product(e, &e->model.lm_head, row_at(e, want->early, 0),
                                       e->act.dola.logits, n, c->vocab, c->hidden, false, false);
        if (st != BT_OK) {
            return st;
        }
        BT_CU_TRY(e, bt_cu_early_choose(e->act.logits + (size_t)want->row * c->vocab,
                                        e->act.dola.logits, n, c->vocab, e->act.dola.far,
                                        e->act.dola.early + (size_t)want->early * c->vocab,
                                        e->compute));
    }
    return BT_OK;
}
