/* Tickets that wait for the device, and sampling. The device draws tokens with all their
 * parameters, and the next step may run before the host knows them. If the check at the start found
 * the device's sampler wrong (host_only), common/engine/sampler.c draws when the logits are in host
 * memory. Owner thread: the engine's. */
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/cuda/ranges.h"
#include "common/engine/cuda/sample/sample_params.h"

#define HISTORY 16384u /* tokens in one copy: as much as the driver takes without waiting */

static size_t mask_words(const struct bt_engine *e)
{
    return BT_DIV_UP(e->host.info.vocab, 32u);
}

bt_status_t bt_cu_draw_open(struct bt_engine *e)
{
    size_t slots = e->host.info.max_slots, n = e->max_batch, vocab = e->host.info.vocab;
    bt_list_init(&e->work);
    bt_list_init(&e->idle);
    e->sampler.pending = bt_calloc(slots, sizeof(*e->sampler.pending));
    BT_CU_TRY(e,
              cudaMalloc((void **)&e->sampler.mask, n * mask_words(e) * sizeof(*e->sampler.mask)));
    BT_CU_TRY(e, cudaMalloc((void **)&e->sampler.chosen, n * sizeof(*e->sampler.chosen)));
    BT_CU_TRY(e, cudaMalloc((void **)&e->sampler.bias,
                            slots * BT_CU_BIAS_MAX * sizeof(*e->sampler.bias)));
    BT_CU_TRY(e,
              cudaMalloc((void **)&e->sampler.counts, slots * vocab * sizeof(*e->sampler.counts)));
    BT_CU_TRY(e,
              cudaMalloc((void **)&e->sampler.adjusted, n * vocab * sizeof(*e->sampler.adjusted)));
    BT_CU_TRY(e, cudaMalloc((void **)&e->sampler.history, HISTORY * sizeof(*e->sampler.history)));
    BT_CU_TRY(e, cudaMallocHost((void **)&e->results.draws,
                                BT_CU_RESULTS * n * sizeof(*e->results.draws)));
    BT_CU_TRY(e, cudaMallocHost((void **)&e->results.drawn,
                                BT_CU_RESULTS * n * sizeof(*e->results.drawn)));
    if (e->host.ids.known) {
        size_t bytes = mask_words(e) * sizeof(*e->sampler.known);
        BT_CU_TRY(e, cudaMalloc((void **)&e->sampler.known, bytes));
        BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.known, e->host.ids.known, bytes,
                                     cudaMemcpyHostToDevice, e->compute));
    }
    return BT_OK;
}

static void work_free(struct bt_list *head)
{
    while (head->next && !bt_list_empty(head)) {
        struct bt_cu_work *w = BT_CONTAINER_OF(head->next, struct bt_cu_work, link);
        bt_list_remove(&w->link);
        cudaEventDestroy(w->start);
        cudaEventDestroy(w->end);
        free(w->samples);
        free(w->mask_copy);
        free(w);
    }
}

void bt_cu_draw_close(struct bt_engine *e)
{
    work_free(&e->work);
    work_free(&e->idle);
    free(e->sampler.pending);
    void *device[] = {e->sampler.mask,     e->sampler.known,   e->sampler.bias,  e->sampler.counts,
                      e->sampler.adjusted, e->sampler.history, e->sampler.chosen};
    for (size_t i = 0; i < BT_ARRAY_LEN(device); i++) {
        cudaFree(device[i]);
    }
    void *host[] = {e->results.draws, e->results.drawn, e->sampler.host_mask,
                    e->sampler.host_logits};
    for (size_t i = 0; i < BT_ARRAY_LEN(host); i++) {
        cudaFreeHost(host[i]);
    }
}

bt_status_t bt_cu_work_add(struct bt_engine *e, struct bt_host_ticket *t, enum bt_cu_kind kind,
                           cudaStream_t s, struct bt_cu_work **w_p)
{
    struct bt_cu_work *w;
    if (bt_list_empty(&e->idle)) {
        w = bt_calloc(1, sizeof(*w));
        bt_list_init(&w->link);
        cudaError_t ce = cudaEventCreate(&w->start);
        ce = ce == cudaSuccess ? cudaEventCreate(&w->end) : ce;
        if (ce != cudaSuccess) {
            free(w);
            return bt_cu_fail(e, ce, "event");
        }
    } else {
        w = BT_CONTAINER_OF(e->idle.next, struct bt_cu_work, link);
        bt_list_remove(&w->link);
    }
    w->kind = kind;
    w->t = t;
    w->n = w->flow = 0;
    w->mask = NULL;
    w->drafts = false;
    bt_list_insert_tail(&e->work, &w->link);
    cudaError_t ce = cudaEventRecord(w->end, s);
    if (ce != cudaSuccess) {
        bt_list_remove(&w->link);
        bt_list_insert_head(&e->idle, &w->link);
        return bt_cu_fail(e, ce, "event");
    }
    if (w_p) {
        *w_p = w;
    }
    return BT_OK;
}

/* ---- results ---- */

/* The place of a token whose row has drafts is known when those before it are accepted. */
#define NO_PLACE UINT32_MAX

/* What the device drew. */
static void take_drawn(const struct bt_engine *e, const struct bt_cu_work *w, uint32_t i,
                       struct bt_engine_out *o)
{
    const struct bt_cu_drawn *d = e->results.drawn + (size_t)w->results * e->max_batch + i;
    o->token = d->token;
    o->logprob = d->logprob;
    o->n_top = d->n_top;
    memcpy(o->top_id, d->top_id, o->n_top * sizeof(o->top_id[0]));
    memcpy(o->top_logprob, d->top_logprob, o->n_top * sizeof(o->top_logprob[0]));
    o->bad = d->bad;
}

static void draw_here(struct bt_engine *e, const struct bt_cu_work *w, uint32_t i,
                      float *row_logits, struct bt_engine_out *o)
{
    const struct bt_host_sample *want = &w->samples[i];
    const struct bt_host_slot *s = &e->host.slots[want->slot];
    size_t vocab = e->host.info.vocab;
    memcpy(row_logits, e->sampler.host_logits + want->row * vocab, vocab * sizeof(*row_logits));
    const struct bt_sampler_row row = {
        .logits = row_logits,
        .params = &s->params,
        .position = want->pos,
        .tokens = s->tokens,
        .n_tokens = s->n_tokens,
        .n_prompt = s->n_prompt,
        .mask = w->mask ? w->mask + want->row * BT_DIV_UP(vocab, (size_t)32) : NULL,
        .known = e->host.ids.known,
    };
    bt_sampler_run(e->host.sampler, &row, o);
}

/* Puts a token into its sequence, at `place` if that was reserved when the draw was enqueued.
 * Returns whether it is an accepted draft. */
static bool put(struct bt_engine *e, const struct bt_host_sample *want, uint32_t place,
                const struct bt_engine_out *o)
{
    struct bt_host_slot *s = &e->host.slots[want->slot];
    if (place != NO_PLACE) {
        if (place < s->n_tokens) {
            s->tokens[place] = o->token;
        }
        return false;
    }
    if (o->bad || s->n_tokens == e->host.info.max_model_len) {
        return false;
    }
    s->tokens[s->n_tokens++] = o->token;
    return o->token == want->draft;
}

/* Draws behind a draft that was not accepted have no place in the sequence. */
static void finish_sample(struct bt_engine *e, struct bt_cu_work *w)
{
    bool drawn = w->kind == BT_CU_DRAW, refused = false, first = true;
    float *row_logits = drawn ? NULL : bt_malloc(e->host.info.vocab * sizeof(*row_logits));
    uint32_t n = 0;
    bt_host_ticket_outs(w->t, w->n);
    for (uint32_t i = 0; i < w->n; i++) {
        const struct bt_host_sample *want = &w->samples[i];
        struct bt_host_slot *s = &e->host.slots[want->slot];
        bool last = want->draft == BT_HOST_NO_DRAFT; /* of its row */
        if (!refused) {
            struct bt_engine_out *o = &w->t->out[n++];
            *o = (struct bt_engine_out){.slot = want->slot, .pos = want->pos, .bad = true};
            if (s->open) {
                o->bad = false;
                drawn ? take_drawn(e, w, i, o) : draw_here(e, w, i, row_logits, o);
                o->more = put(e, want, drawn ? want->row : NO_PLACE, o);
                s->next_pos = first && last ? s->next_pos : want->pos;
            }
            refused = !o->more;
        }
        if (last && drawn && s->open) {
            e->sampler.pending[want->slot]--;
        }
        refused = refused && !last;
        first = last;
    }
    w->t->n_out = n;
    free(row_logits);
}

void bt_cu_work_advance(struct bt_engine *e, bool wait)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &e->work) {
        struct bt_cu_work *w = BT_CONTAINER_OF(l, struct bt_cu_work, link);
        cudaError_t ce = wait ? cudaEventSynchronize(w->end) : cudaEventQuery(w->end);
        if (ce == cudaErrorNotReady) {
            continue;
        }
        if (ce != cudaSuccess) {
            (void)bt_cu_fail(e, ce, "a step on the device");
        } else if (w->kind == BT_CU_DRAW || w->kind == BT_CU_HOST_SAMPLE) {
            finish_sample(e, w);
        } else if (w->kind == BT_CU_FORWARD) {
            float ms = 0;
            ce = cudaEventElapsedTime(&ms, w->start, w->end);
            w->t->run_us = ce == cudaSuccess ? ms * 1000 : 0;
        }
        if (w->flow) {
            bt_cu_flow_free(e, w->flow);
        }
        bt_list_remove(&w->link);
        bt_list_insert_head(&e->idle, &w->link);
        bt_host_ticket_done(&e->host, w->t,
                            e->failed != cudaSuccess ? BT_ERR_DEVICE : w->t->status);
    }
}

/* ---- a slot's parameters and tokens on the device ---- */

bt_status_t bt_cu_draw_slot(struct bt_engine *e, uint32_t slot, const struct bt_engine_params *p,
                            const uint32_t *tokens, uint32_t n, uint32_t n_prompt)
{
    size_t vocab = e->host.info.vocab;
    if (p->n_bias) { /* pageable memory of at most 8 KiB: the driver copies it within the call */
        struct bt_cu_bias b[BT_CU_BIAS_MAX];
        for (uint32_t i = 0; i < p->n_bias; i++) {
            b[i] = (struct bt_cu_bias){p->bias_ids[i], p->bias[i]};
        }
        BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.bias + (size_t)slot * BT_CU_BIAS_MAX, b,
                                     p->n_bias * sizeof(b[0]), cudaMemcpyHostToDevice, e->compute));
    }
    if (!bt_cu_penalizes(p)) {
        return BT_OK;
    }
    uint32_t *counts = e->sampler.counts + slot * vocab;
    BT_CU_TRY(e, cudaMemsetAsync(counts, 0, vocab * sizeof(*counts), e->compute));
    for (uint32_t at = 0; at < n; at += HISTORY) {
        uint32_t m = BT_MIN(n - at, HISTORY), prompt = n_prompt > at ? n_prompt - at : 0;
        BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.history, tokens + at, m * sizeof(*tokens),
                                     cudaMemcpyHostToDevice, e->compute));
        BT_CU_TRY(e, bt_cu_sample_count(counts, (uint32_t)vocab, e->sampler.history, m,
                                        BT_MIN(prompt, m), e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_draw_fork(struct bt_engine *e, uint32_t from, uint32_t to)
{
    const struct bt_engine_params *p = &e->host.slots[to].params;
    size_t vocab = e->host.info.vocab;
    if (p->n_bias) {
        BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.bias + (size_t)to * BT_CU_BIAS_MAX,
                                     e->sampler.bias + (size_t)from * BT_CU_BIAS_MAX,
                                     p->n_bias * sizeof(*e->sampler.bias), cudaMemcpyDeviceToDevice,
                                     e->compute));
    }
    if (bt_cu_penalizes(p)) {
        BT_CU_TRY(e, cudaMemcpyAsync(
                         e->sampler.counts + to * vocab, e->sampler.counts + from * vocab,
                         vocab * sizeof(*e->sampler.counts), cudaMemcpyDeviceToDevice, e->compute));
    }
    return BT_OK;
}

bt_status_t bt_cu_draw_accept(struct bt_engine *e, uint32_t slot, uint32_t token)
{
    if (bt_cu_penalizes(&e->host.slots[slot].params)) {
        BT_CU_TRY(e, bt_cu_sample_count_one(e->sampler.counts + (size_t)slot * e->host.info.vocab,
                                            token, e->compute));
    }
    return BT_OK;
}

/* ---- sampling ---- */

static struct bt_host_ticket *forward_of(struct bt_engine *e, bt_engine_ticket_t id)
{
    struct bt_list *lists[] = {&e->host.done, &e->host.given}, *l;
    for (int i = 0; i < 2; i++) {
        bt_list_for_each (l, lists[i]) {
            struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
            if (t->id == id) {
                return t;
            }
        }
    }
    bt_list_for_each (l, &e->work) {
        struct bt_cu_work *w = BT_CONTAINER_OF(l, struct bt_cu_work, link);
        if (w->t->id == id) {
            return w->t;
        }
    }
    return NULL;
}

static void set_samples(struct bt_cu_work *w, const struct bt_host_ticket *f)
{
    if (f->n_sample > w->cap) {
        w->cap = f->n_sample;
        w->samples = bt_realloc(w->samples, w->cap * sizeof(*w->samples));
    }
    if (f->n_sample) {
        memcpy(w->samples, f->samples, f->n_sample * sizeof(*w->samples));
    }
    w->n = f->n_sample;
}

/* From now on the sequences are one token longer, though the host does not know that token yet. How
 * much longer those of rows with drafts are is not known. samples[].row, which had the row of the
 * logits before, becomes the token's place. */
static void take_places(struct bt_engine *e, struct bt_cu_work *w)
{
    bool first = true;
    for (uint32_t i = 0; i < w->n; i++) {
        struct bt_host_slot *s = &e->host.slots[w->samples[i].slot];
        bool last = w->samples[i].draft == BT_HOST_NO_DRAFT, single = first && last;
        w->samples[i].row = single ? s->n_tokens : NO_PLACE;
        if (single && s->n_tokens < e->host.info.max_model_len) {
            s->tokens[s->n_tokens++] = 0;
        }
        w->drafts |= !single;
        e->sampler.pending[w->samples[i].slot] += last;
        first = last;
    }
}

bt_status_t bt_cu_draw_rows(struct bt_engine *e, uint32_t at, uint32_t n, bool drafts,
                            const uint32_t *mask)
{
    size_t first = (size_t)at * e->max_batch;
    const struct bt_cu_sampling a = {.logits = e->act.logits,
                                     .early = e->act.dola.early,
                                     .draws = e->results.draws + first,
                                     .mask = mask,
                                     .bias = e->sampler.bias,
                                     .counts = e->sampler.counts,
                                     .adjusted = e->sampler.adjusted,
                                     .out = e->results.drawn + first,
                                     .chosen = drafts ? e->sampler.chosen : NULL,
                                     .last_token = e->last_token,
                                     .vocab = e->host.info.vocab,
                                     .known = e->sampler.known,
                                     .n_known = e->host.ids.n,
                                     .end_known = e->host.ids.end};
    BT_CU_TRY(e, bt_cu_sample_rows(&a, n, e->compute));
    return BT_OK;
}

/* The caller's mask is copied through pinned memory, at this sample's place in the ring. */
static bt_status_t send_mask(struct bt_engine *e, const uint32_t *mask, uint32_t rows, size_t at)
{
    size_t all = e->max_batch * mask_words(e), n = rows * mask_words(e);
    if (!e->sampler.host_mask) {
        BT_CU_TRY(
            e, cudaMallocHost((void **)&e->sampler.host_mask, BT_CU_RESULTS * all * sizeof(*mask)));
    }
    memcpy(e->sampler.host_mask + at * all, mask, n * sizeof(*mask));
    BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.mask, e->sampler.host_mask + at * all,
                                 n * sizeof(*mask), cudaMemcpyHostToDevice, e->compute));
    return BT_OK;
}

/* The draws of f's samples. Returns whether drafts are among them. */
static bool make_draws(const struct bt_engine *e, const struct bt_host_ticket *f,
                       struct bt_cu_draw *d)
{
    bool any = false;
    uint32_t before = 0;
    for (uint32_t i = 0; i < f->n_sample; i++) {
        const struct bt_host_sample *s = &f->samples[i];
        const struct bt_host_slot *slot = &e->host.slots[s->slot];
        bool last = s->draft == BT_HOST_NO_DRAFT;
        d[i] = bt_cu_draw_make(&slot->params, s->row, s->slot, s->pos,
                               slot->n_tokens - slot->n_prompt + before);
        d[i].drafts = before > 0 || !last;
        d[i].n_before = before;
        d[i].draft = s->draft;
        d[i].early = s->early != BT_HOST_NO_EARLY ? s->early + 1 : 0;
        /* A search replaces the token, so it does not count. */
        d[i].penalties = slot->params.penalty_alpha > 0 ? 0 : d[i].penalties;
        any |= d[i].drafts != 0;
        before = last ? 0 : before + 1;
    }
    return any;
}
_Static_assert(BT_HOST_NO_DRAFT == BT_CU_NO_DRAFT && BT_CU_DRAFTS_MAX == BT_ATTN_FRESH - 1,
               "sample_args.h");

static bt_status_t draw_on_device(struct bt_engine *e, const struct bt_host_ticket *f,
                                  const uint32_t *mask, struct bt_host_ticket *t)
{
    size_t at = e->results.next++ % BT_CU_RESULTS;
    struct bt_list *l;
    bt_list_for_each (l, &e->work) { /* an earlier draw may still use this place in the ring */
        struct bt_cu_work *w = BT_CONTAINER_OF(l, struct bt_cu_work, link);
        if (w->kind == BT_CU_DRAW && w->results == at) {
            bt_cu_work_advance(e, true);
            break;
        }
    }
    bool drafts = make_draws(e, f, e->results.draws + at * e->max_batch);
    uint32_t n = f->n_sample;
    if (n) {
        bt_status_t sent = mask ? send_mask(e, mask, f->n_rows, at) : BT_OK;
        if (sent != BT_OK) {
            return sent;
        }
        sent = bt_cu_draw_rows(e, (uint32_t)at, n, drafts, mask ? e->sampler.mask : NULL);
        if (sent != BT_OK) {
            return sent;
        }
    }
    struct bt_cu_work *w;
    bt_status_t st = bt_cu_work_add(e, t, BT_CU_DRAW, e->compute, &w);
    if (st == BT_OK) {
        w->results = (uint32_t)at;
        set_samples(w, f);
        take_places(e, w);
    }
    return st;
}

static bt_status_t draw_on_host(struct bt_engine *e, const struct bt_host_ticket *f,
                                const uint32_t *mask, struct bt_host_ticket *t)
{
    size_t vocab = e->host.info.vocab, n = f->n_rows * vocab;
    bt_cu_work_advance(e, true); /* earlier samples use the same memory */
    if (n > e->sampler.cap_host_logits) {
        cudaFreeHost(e->sampler.host_logits);
        e->sampler.host_logits = NULL;
        BT_CU_TRY(e, cudaMallocHost((void **)&e->sampler.host_logits, n * sizeof(float)));
        e->sampler.cap_host_logits = n;
    }
    if (n) {
        BT_CU_TRY(e, cudaMemcpyAsync(e->sampler.host_logits, e->act.logits, n * sizeof(float),
                                     cudaMemcpyDeviceToHost, e->compute));
    }
    struct bt_cu_work *w;
    bt_status_t st = bt_cu_work_add(e, t, BT_CU_HOST_SAMPLE, e->compute, &w);
    if (st == BT_OK) {
        set_samples(w, f);
        if (mask) {
            size_t words = f->n_rows * BT_DIV_UP(vocab, (size_t)32);
            w->mask_copy = bt_realloc(w->mask_copy, BT_MAX(words, (size_t)1) * sizeof(*mask));
            memcpy(w->mask_copy, mask, words * sizeof(*mask));
            w->mask = w->mask_copy;
        }
    }
    return st;
}

bt_status_t bt_cu_sample(struct bt_engine *e, bt_engine_ticket_t fwd, const uint32_t *mask,
                         bt_engine_ticket_t *out_p)
{
    struct bt_host_ticket *f = forward_of(e, fwd);
    if (!f || !f->forward || f->sampled || (f->n_sample && e->logits_of != fwd)) {
        return BT_ERR_INVALID;
    }
    if (e->failed != cudaSuccess) {
        return BT_ERR_DEVICE;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(&e->host, 0);
    f->sampled = true;
    *out_p = t->id;
    bt_cu_range_push("sample", f->n_sample);
    bt_status_t st =
        e->sampler.host_only ? draw_on_host(e, f, mask, t) : draw_on_device(e, f, mask, t);
    if (st == BT_OK && bt_cu_contrasts(e, f)) {
        bt_cu_work_advance(e, true); /* a search needs the device: it goes on when t is finished */
        st = bt_cu_contrast_draw(e, f, mask, t);
        bt_cu_range_pop();
        return st == BT_ERR_DEVICE ? BT_OK : st; /* the ticket reports it */
    }
    bt_cu_range_pop();
    if (st != BT_OK) { /* the device failed: the ticket reports it */
        bt_host_ticket_done(&e->host, t, st);
    }
    return BT_OK;
}
