/* DoLa (Chuang et al. 2023) on the CPU: the hidden states of early layers, which a step keeps of
 * the rows that it samples, and the logits of the layer whose distribution is furthest from the
 * last one's. The head reads early layers without the final norm, as Hugging Face's does. Owner
 * thread: the engine's. */
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/cpu/pages.h"

/* to_act takes 16 columns at a time. */
static uint32_t stride_of(const struct bt_engine *e)
{
    return BT_ALIGN_UP(e->model.config.hidden, 16u);
}

static const struct bt_engine_params *params_of(const struct bt_cpu_step *s,
                                                const struct bt_engine_row *row)
{
    const struct bt_engine_params *p = &s->e->host.slots[row->slot].params;
    return (row->flags & BT_ROW_SAMPLE) && p->n_dola ? p : NULL;
}

bool bt_cpu_dola_begin(struct bt_cpu_step *s)
{
    struct bt_engine *e = s->e;
    struct bt_cpu_dola *d = &e->dola;
    uint32_t rows = 0;
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        rows += params_of(s, &s->b->rows[r]) != NULL;
    }
    s->dola = rows > 0;
    if (rows > d->rows) {
        free(d->x);
        d->x = bt_calloc((size_t)rows * BT_ENGINE_DOLA_MAX * stride_of(e), sizeof(*d->x));
        d->rows = rows;
    }
    if (rows > 0 && !d->act) {
        uint32_t n = bt_gemm_rows(BT_ENGINE_DOLA_MAX);
        size_t bytes = bt_cpu_act_bytes(e->k, n, e->model.config.hidden, 2);
        d->act = bt_pages_alloc(bytes);
        d->logits = aligned_alloc(
            64, BT_ALIGN_UP((size_t)n * e->model.config.vocab * sizeof(float), (size_t)64));
        if (!d->act || !d->logits) {
            return false;
        }
        memset(d->act, 0, bytes); /* products read columns behind the last one */
    }
    return true;
}

void bt_cpu_dola_keep(struct bt_cpu_step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    size_t stride = stride_of(e), hidden = e->model.config.hidden;
    uint32_t at = 0, n = 0; /* at: the row of x behind the batch's row */
    for (uint32_t r = 0; r < s->b->n_rows; r++) {
        const struct bt_engine_params *p = params_of(s, &s->b->rows[r]);
        at += s->b->rows[r].n + (s->mtp && e->mtp.again[r]);
        for (uint32_t i = 0; p && i < p->n_dola; i++) {
            if (p->dola[i] == layer) {
                memcpy(e->dola.x + ((size_t)n * BT_ENGINE_DOLA_MAX + i) * stride,
                       e->x + (at - 1) * hidden, hidden * sizeof(float));
            }
        }
        n += p != NULL;
    }
}

/* The logits of n early layers of one row: e->dola.logits. */
static bt_status_t early_logits(struct bt_engine *e, const float *x, uint32_t n)
{
    struct bt_cpu_dola *d = &e->dola;
    uint32_t hidden = e->model.config.hidden, stride = stride_of(e);
    for (uint32_t i = 0; i < n; i++, x += stride) {
        void *to = bt_cpu_act_row(e->k, d->act, i, hidden, 2);
        if (e->k->bf16) {
            e->k->to_act(x, to, 0, stride);
        } else {
            memcpy(to, x, hidden * sizeof(*x));
        }
    }
    return bt_linear_run(e->model.lm_head, d->act, n, d->logits);
}

bt_status_t bt_cpu_dola_head(struct bt_cpu_step *s, struct bt_host_ticket *t)
{
    struct bt_engine *e = s->e;
    size_t vocab = e->model.config.vocab, row_floats = (size_t)BT_ENGINE_DOLA_MAX * stride_of(e);
    bt_host_ticket_early(&e->host, t);
    for (uint32_t i = 0; i < t->n_sample; i++) {
        const struct bt_host_sample *want = &t->samples[i];
        if (want->early == BT_HOST_NO_EARLY) {
            continue;
        }
        uint32_t n = e->host.slots[want->slot].params.n_dola, best = 0;
        double far[BT_ENGINE_DOLA_MAX] = {0};
        bt_status_t st = early_logits(e, e->dola.x + want->early * row_floats, n);
        if (st != BT_OK) {
            return st;
        }
        const float *last = t->logits + want->row * vocab;
#pragma omp parallel for num_threads(e->threads) schedule(dynamic) if (n > 1)
        for (uint32_t l = 0; l < n; l++) {
            far[l] = n > 1
                         ? bt_sampler_divergence(last, e->dola.logits + l * vocab, (uint32_t)vocab)
                         : 0;
        }
        for (uint32_t l = 1; l < n; l++) {
            best = far[l] > far[best] ? l : best;
        }
        memcpy(t->early + want->early * vocab, e->dola.logits + best * vocab,
               vocab * sizeof(float));
    }
    return BT_OK;
}

void bt_cpu_dola_cleanup(struct bt_engine *e)
{
    free(e->dola.x);
    free(e->dola.act);
    free(e->dola.logits);
}
