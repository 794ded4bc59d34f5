/* Contrastive search (Su et al. 2022) on the device. A slot keeps the hidden states of its tokens;
 * candidates run in spare slots and pages, in a step of their own. The host chooses among them and
 * waits for the device meanwhile: few requests search this way, and the candidates' steps take most
 * of the time. Owner thread: the engine's. */
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/rows/hidden.h"
#include "common/engine/cuda/step/step_priv.h"

static bool searches(const struct bt_engine *e, uint32_t slot)
{
    return e->host.slots[slot].open && e->host.slots[slot].params.penalty_alpha > 0;
}

/* ---- memory: taken and given back with the slot, for which the driver may wait ---- */

static bt_status_t take(void **p, size_t bytes)
{
    if (!*p && cudaMalloc(p, bytes) != cudaSuccess) {
        (void)cudaGetLastError(); /* of this call alone: the device goes on */
        *p = NULL;
        return BT_ERR_NO_MEMORY;
    }
    return BT_OK;
}

bt_status_t bt_cu_contrast_open(struct bt_engine *e, uint32_t slot, uint32_t tokens)
{
    struct bt_cu_contrast *k = &e->act.contrast;
    size_t hidden = e->model.config.hidden * sizeof(float);
    if (!k->states) {
        k->states = bt_calloc(e->host.info.max_slots, sizeof(*k->states));
    }
    bt_status_t st = take((void **)&k->candidates, BT_HOST_SPARE * hidden);
    st = st == BT_OK ? take((void **)&k->most, BT_HOST_SPARE * sizeof(*k->most)) : st;
    return st == BT_OK ? take((void **)&k->states[slot], BT_MAX(tokens, 1u) * hidden) : st;
}

void bt_cu_contrast_drop(struct bt_engine *e, uint32_t slot)
{
    if (e->act.contrast.states && e->act.contrast.states[slot]) {
        cudaFree(e->act.contrast.states[slot]);
        e->act.contrast.states[slot] = NULL;
    }
}

void bt_cu_contrast_close(struct bt_engine *e)
{
    for (uint32_t i = 0; e->act.contrast.states && i < e->host.info.max_slots; i++) {
        bt_cu_contrast_drop(e, i);
    }
    free(e->act.contrast.states);
    cudaFree(e->act.contrast.candidates);
    cudaFree(e->act.contrast.most);
}

/* ---- hidden states ---- */

/* Of n rows of the residual stream behind the last layer. */
static bt_status_t states_of(struct bt_engine *e, uint32_t first, uint32_t n, float *to)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_cu_states a = {.x = e->act.x + (size_t)first * c->hidden,
                                   .add = e->model.layers[c->layers - 1].bias.down,
                                   .w = e->model.norm,
                                   .bias = e->model.norm_bias,
                                   .n = n,
                                   .hidden = c->hidden,
                                   .eps = c->norm_eps,
                                   .to = to};
    BT_CU_TRY(e, bt_cu_states(&a, e->compute));
    return BT_OK;
}

bt_status_t bt_cu_contrast_keep(struct bt_engine *e, const struct bt_engine_batch *b,
                                const struct bt_cu_layout *l)
{
    struct bt_cu_rows_at at = {0, l->singles};
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t first = bt_cu_next_rows(&at, row), pos = bt_host_row_pos(&e->host, row);
        if (row->slot >= e->host.info.max_slots || !searches(e, row->slot)) {
            continue;
        }
        struct bt_host_slot *s = &e->host.slots[row->slot];
        bt_status_t st =
            states_of(e, first, row->n,
                      e->act.contrast.states[row->slot] + (size_t)pos * e->model.config.hidden);
        if (st != BT_OK) {
            return st;
        }
        s->n_hidden = BT_MAX(s->n_hidden, pos + row->n);
    }
    return BT_OK;
}

/* ---- candidates ---- */

/* Lets spare slot i stand at `pos` of `slot`: the same pages, but the one of pos is a copy. */
static bt_status_t place(struct bt_engine *e, uint32_t i, uint32_t slot, uint32_t pos)
{
    const struct bt_kv_layout *l = &e->host.info.layout;
    size_t stride = e->host.max_pages_of_slot;
    int32_t *to = e->table + (e->host.info.max_slots + i) * stride;
    uint32_t last = pos / l->page_tokens, page = e->host.info.pages + i;
    if (last > 0) {
        BT_CU_TRY(e, cudaMemcpyAsync(to, e->table + slot * stride, last * sizeof(*to),
                                     cudaMemcpyDeviceToDevice, e->compute));
    }
    BT_CU_TRY(e, cudaMemcpyAsync(to + last, &page, sizeof(*to), cudaMemcpyHostToDevice,
                                 e->compute)); /* pageable: copied within the call */
    if (pos % l->page_tokens > 0) {
        uint32_t from = e->host.slots[slot].pages[last] - 1;
        BT_CU_TRY(e, cudaMemcpyAsync((uint8_t *)e->kv + (size_t)page * l->block_bytes,
                                     (uint8_t *)e->kv + (size_t)from * l->block_bytes,
                                     l->block_bytes, cudaMemcpyDeviceToDevice, e->compute));
    }
    return BT_OK;
}

static bt_status_t run_candidates(struct bt_engine *e, uint32_t slot, uint32_t pos,
                                  const uint32_t *tokens, uint32_t n, float *states)
{
    struct bt_engine_row rows[BT_HOST_SPARE] = {0};
    struct bt_host_ticket nothing = {0}; /* no row is sampled */
    for (uint32_t i = 0; i < n; i++) {
        bt_status_t st = place(e, i, slot, pos);
        if (st != BT_OK) {
            return st;
        }
        rows[i] = (struct bt_engine_row){
            .slot = e->host.info.max_slots + i, .pos = pos, .n = 1, .tokens = &tokens[i]};
    }
    const struct bt_engine_batch b = {.n_rows = n, .rows = rows};
    bt_status_t st = bt_cu_step_run(e, &b, n, &nothing);
    return st == BT_OK ? states_of(e, 0, n, states) : st;
}

static bt_status_t cosines_of(struct bt_engine *e, uint32_t slot, uint32_t pos,
                              const struct bt_sampler_candidates *c, float *cosines)
{
    size_t hidden = e->model.config.hidden;
    uint32_t most[BT_HOST_SPARE], some = BT_MIN(c->n, e->max_batch);
    for (uint32_t at = 0; at < c->n; at += some) {
        bt_status_t st = run_candidates(e, slot, pos, c->id + at, BT_MIN(some, c->n - at),
                                        e->act.contrast.candidates + at * hidden);
        if (st != BT_OK) {
            return st;
        }
    }
    BT_CU_TRY(e, bt_cu_cosines(e->act.contrast.candidates, c->n, e->act.contrast.states[slot], pos,
                               (uint32_t)hidden, e->act.contrast.most, e->compute));
    BT_CU_TRY(e, cudaMemcpyAsync(most, e->act.contrast.most, c->n * sizeof(*most),
                                 cudaMemcpyDeviceToHost, e->compute));
    BT_CU_TRY(e, cudaStreamSynchronize(e->compute));
    for (uint32_t i = 0; i < c->n; i++) {
        cosines[i] = bt_cu_cosine(most[i]);
    }
    return BT_OK;
}

bool bt_cu_contrasts(const struct bt_engine *e, const struct bt_host_ticket *f)
{
    bool any = false;
    for (uint32_t i = 0; i < f->n_sample; i++) {
        any = any || searches(e, f->samples[i].slot);
    }
    return any;
}

/* Replaces the result of one row, which was drawn as any other. */
static bt_status_t search(struct bt_engine *e, const struct bt_host_sample *want, float *logits,
                          const uint32_t *mask, struct bt_engine_out *o)
{
    struct bt_host_slot *s = &e->host.slots[want->slot];
    size_t vocab = e->host.info.vocab;
    struct bt_sampler_candidates c;
    float cosines[BT_HOST_SPARE];
    const struct bt_sampler_row row = {
        .logits = logits,
        .params = &s->params,
        .position = want->pos,
        .tokens = s->tokens,
        .n_tokens = want->pos,
        .n_prompt = s->n_prompt,
        .mask = mask ? mask + want->row * BT_DIV_UP(vocab, (size_t)32) : NULL,
        .known = e->host.ids.known,
    };
    bt_sampler_candidates(e->host.sampler, &row, &c, o);
    bt_status_t st = c.n > 0 ? cosines_of(e, want->slot, want->pos, &c, cosines) : BT_OK;
    if (st == BT_OK) {
        bt_sampler_contrast(&c, cosines, s->params.penalty_alpha, o);
        s->tokens[want->pos] = o->token;
    }
    return st;
}

bt_status_t bt_cu_contrast_draw(struct bt_engine *e, const struct bt_host_ticket *f,
                                const uint32_t *mask, struct bt_host_ticket *t)
{
    size_t vocab = e->host.info.vocab;
    float *logits = bt_malloc(f->n_rows * vocab * sizeof(*logits));
    cudaError_t ce = cudaSuccess;
    bt_status_t st = BT_OK;
    /* All of them first: the candidates' steps write logits, too. */
    for (uint32_t i = 0; ce == cudaSuccess && i < f->n_sample; i++) {
        size_t at = f->samples[i].row * vocab;
        if (searches(e, f->samples[i].slot)) {
            ce = cudaMemcpyAsync(logits + at, e->act.logits + at, vocab * sizeof(*logits),
                                 cudaMemcpyDeviceToHost, e->compute);
        }
    }
    ce = ce == cudaSuccess ? cudaStreamSynchronize(e->compute) : ce;
    st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "logits of a search");
    for (uint32_t i = 0; st == BT_OK && i < f->n_sample; i++) {
        const struct bt_host_sample *want = &f->samples[i];
        for (uint32_t k = 0; searches(e, want->slot) && st == BT_OK && k < t->n_out; k++) {
            struct bt_engine_out *o = &t->out[k];
            if (o->slot == want->slot && !o->bad) {
                st = search(e, want, logits + want->row * vocab, mask, o);
            }
        }
    }
    free(logits);
    t->status = st == BT_OK ? t->status : st;
    return st;
}
