/* Slots and tickets of back ends in host memory, and their vtable calls; flows are in host_flow.c.
 * Owner thread: the engine's. Touches only its own memory. */
#include "common/engine/host.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/clock.h"
#include "common/engine/host_priv.h"

#define FLOWS_PER_SLOT 8 /* hand-off, prefix load, write-back, and their successors */

bt_status_t bt_host_init(struct bt_host *h, const struct bt_engine_info *info, uint64_t mem_limit,
                         char *err, size_t err_cap)
{
    *h = (struct bt_host){.info = *info, .next_ticket = 1};
    bt_list_init(&h->done);
    bt_list_init(&h->waiting);
    bt_list_init(&h->given);
    bt_list_init(&h->free);
    const struct bt_kv_layout *l = &h->info.layout;
    uint64_t page_bytes = (uint64_t)l->groups[0].seg_bytes * l->n_layers;
    h->max_pages_of_slot = BT_DIV_UP(h->info.max_model_len, l->page_tokens);
    if (h->info.pages == 0) {
        h->info.pages = (uint32_t)BT_MIN(mem_limit / page_bytes, (uint64_t)INT32_MAX);
    }
    if (h->info.pages == 0) {
        snprintf(err, err_cap,
                 "engine: the %llu bytes for KV pages are less than one page of %llu bytes; raise "
                 "engine.mem or set engine.pages",
                 (unsigned long long)mem_limit, (unsigned long long)page_bytes);
        return BT_ERR_CONFIG;
    }
    if (__builtin_mul_overflow(page_bytes, (uint64_t)h->info.pages + BT_HOST_SPARE, &h->kv_bytes)) {
        snprintf(err, err_cap, "engine.pages: %u pages overflow the address space", h->info.pages);
        return BT_ERR_CONFIG;
    }
    void *m = mmap(NULL, h->kv_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED) {
        snprintf(err, err_cap,
                 "engine: cannot map %zu bytes for %u KV pages: %s; lower "
                 "engine.pages",
                 h->kv_bytes, h->info.pages, strerror(errno));
        return BT_ERR_NO_MEMORY;
    }
    h->kv = m;
    h->slots = bt_calloc(h->info.max_slots + BT_HOST_SPARE, sizeof(*h->slots));
    h->n_flows = h->info.max_slots * FLOWS_PER_SLOT;
    h->flows = bt_calloc(h->n_flows, sizeof(*h->flows));
    h->sampler = bt_sampler_create(h->info.vocab);
    return bt_pace_open(&h->pace, err, err_cap);
}

static void ticket_free(struct bt_list *head)
{
    while (head->next && !bt_list_empty(head)) { /* NULL: bt_host_init was not called */
        struct bt_host_ticket *t = BT_CONTAINER_OF(head->next, struct bt_host_ticket, link);
        bt_list_remove(&t->link);
        free(t->out);
        free(t->logits);
        free(t->early);
        free(t->samples);
        free(t);
    }
}

static void slot_clear(struct bt_host_slot *s)
{
    free((void *)s->params.bias_ids);
    free((void *)s->params.bias);
    free(s->hidden);
    s->hidden = NULL;
    s->params = (struct bt_engine_params){0};
    s->open = false;
    s->n_tokens = s->n_prompt = s->next_pos = s->n_hidden = s->n_states = 0;
}

void bt_host_cleanup(struct bt_host *h)
{
    for (uint32_t i = 0; h->slots && i < h->info.max_slots + BT_HOST_SPARE; i++) {
        slot_clear(&h->slots[i]);
        free(h->slots[i].tokens);
        free(h->slots[i].states);
        free(h->slots[i].pages);
    }
    for (uint32_t i = 0; h->flows && i < h->n_flows; i++) {
        free(h->flows[i].blocks);
    }
    ticket_free(&h->done);
    ticket_free(&h->waiting);
    ticket_free(&h->given);
    ticket_free(&h->free);
    free(h->slots);
    free(h->flows);
    bt_sampler_destroy(h->sampler);
    bt_ids_cleanup(&h->ids);
    bt_pace_close(&h->pace);
    if (h->kv) {
        munmap(h->kv, h->kv_bytes);
    }
    *h = (struct bt_host){0};
}

static struct bt_host_slot *slot_of(const struct bt_host *h, uint32_t slot)
{
    return slot < h->info.max_slots && h->slots[slot].open ? &h->slots[slot] : NULL;
}

static void slot_params(struct bt_host_slot *s, const struct bt_engine_params *p)
{
    s->params = *p;
    s->params.bias_ids = NULL;
    s->params.bias = NULL;
    if (p->n_bias) {
        uint32_t *ids = bt_malloc(p->n_bias * sizeof(*ids));
        float *bias = bt_malloc(p->n_bias * sizeof(*bias));
        memcpy(ids, p->bias_ids, p->n_bias * sizeof(*ids));
        memcpy(bias, p->bias, p->n_bias * sizeof(*bias));
        s->params.bias_ids = ids;
        s->params.bias = bias;
    }
}

bt_status_t bt_host_slot_open(struct bt_host *h, uint32_t slot, const struct bt_engine_params *p,
                              const uint32_t *tokens, uint32_t n, uint32_t n_prompt)
{
    const char *what;
    if (slot >= h->info.max_slots || n > h->info.max_model_len || n_prompt > n) {
        return BT_ERR_INVALID;
    }
    if (h->slots[slot].open) {
        return BT_ERR_EXISTS;
    }
    if (bt_sampler_check(p, h->info.vocab, &what) != BT_OK) {
        return BT_ERR_INVALID;
    }
    if ((p->n_dola || p->penalty_alpha > 0) && !(h->info.caps & BT_ENGINE_CAP_HIDDEN)) {
        return BT_ERR_UNSUPPORTED;
    }
    for (uint32_t i = 0; i < p->n_dola; i++) {
        if (p->dola[i] >= bt_engine_layers(&h->info)) {
            return BT_ERR_INVALID;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] >= h->info.vocab) {
            return BT_ERR_INVALID;
        }
    }
    struct bt_host_slot *s = &h->slots[slot];
    if (p->penalty_alpha > 0 && h->hidden > 0) {
        size_t floats = (size_t)BT_MAX(p->hidden_max, 1u) * h->hidden;
        s->hidden = malloc(floats * sizeof(*s->hidden));
        if (!s->hidden) {
            return BT_ERR_NO_MEMORY;
        }
    }
    /* Allocated at a slot's first use; the kernel backs calloc'd memory only as it is written. */
    if (!s->tokens) {
        s->tokens = bt_calloc(h->info.max_model_len, sizeof(*s->tokens));
        s->pages = bt_calloc(h->max_pages_of_slot, sizeof(*s->pages));
    }
    memset(s->pages, 0, h->max_pages_of_slot * sizeof(*s->pages));
    slot_params(s, p);
    if (n) {
        memcpy(s->tokens, tokens, n * sizeof(*tokens));
    }
    s->n_tokens = n;
    s->n_prompt = n_prompt;
    s->next_pos = 0;
    s->open = true;
    return BT_OK;
}

void bt_host_slot_undo(struct bt_host *h, uint32_t slot)
{
    slot_clear(&h->slots[slot]);
}

bt_status_t bt_host_slot_pages(struct bt_host *h, uint32_t slot, uint32_t first,
                               const uint32_t *pages, uint32_t n)
{
    struct bt_host_slot *s = slot_of(h, slot);
    if (!s || first > h->max_pages_of_slot || n > h->max_pages_of_slot - first) {
        return BT_ERR_INVALID;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (pages[i] >= h->info.pages) {
            return BT_ERR_INVALID;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        s->pages[first + i] = pages[i] + 1;
    }
    return BT_OK;
}

/* If a forward waits for its sample, samples the fork from the same logits. */
static void fork_pending(struct bt_list *head, uint32_t from, uint32_t to)
{
    struct bt_list *l;
    bt_list_for_each (l, head) {
        struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        for (uint32_t i = 0; t->forward && !t->sampled && i < t->n_sample; i++) {
            if (t->samples[i].slot == from) {
                struct bt_host_sample s = t->samples[i];
                s.slot = to;
                s.draft = BT_HOST_NO_DRAFT;
                bt_host_ticket_sample(t, &s);
                break;
            }
        }
    }
}

bt_status_t bt_host_slot_fork(struct bt_host *h, uint32_t from, uint32_t to, uint32_t choice)
{
    struct bt_host_slot *s = slot_of(h, from);
    if (!s) {
        return BT_ERR_INVALID;
    }
    struct bt_engine_params p = s->params;
    if (p.penalty_alpha > 0) {
        return BT_ERR_UNSUPPORTED;
    }
    p.choice = choice;
    bt_status_t st = bt_host_slot_open(h, to, &p, s->tokens, s->n_tokens, s->n_prompt);
    if (st == BT_OK) {
        memcpy(h->slots[to].pages, s->pages, h->max_pages_of_slot * sizeof(*s->pages));
        h->slots[to].next_pos = s->next_pos;
        if (s->n_states > 0) {
            bt_host_keep_states(h, to, s->state_pos, s->states, s->n_states);
        }
        fork_pending(&h->done, from, to);
        fork_pending(&h->given, from, to);
    }
    return st;
}

static void copy_page(struct bt_host *h, uint32_t from, uint32_t to, uint32_t toks)
{
    const struct bt_kv_layout *l = &h->info.layout;
    const struct bt_kv_group *g = &l->groups[0];
    size_t row = bt_kv_row_bytes(g);
    for (uint32_t layer = 0; from != to && layer < l->n_layers; layer++) {
        const uint8_t *src = bt_host_segment(h, layer, from);
        uint8_t *dst = bt_host_segment(h, layer, to);
        for (uint32_t p = 0; p < bt_kv_planes(g); p++) {
            memcpy(dst + p * row * l->page_tokens, src + p * row * l->page_tokens, row * toks);
        }
        for (uint32_t p = 0; g->scale_off && p < bt_kv_planes(g); p++) {
            size_t at = g->scale_off + (size_t)p * l->page_tokens;
            memcpy(dst + at, src + at, toks);
        }
    }
}

bt_status_t bt_host_page_copy(struct bt_host *h, uint32_t from, uint32_t to, uint32_t toks)
{
    if (from >= h->info.pages || to >= h->info.pages || toks > h->info.layout.page_tokens) {
        return BT_ERR_INVALID;
    }
    copy_page(h, from, to, toks);
    return BT_OK;
}

const float *bt_host_state(const struct bt_host *h, uint32_t slot, uint32_t pos)
{
    const struct bt_host_slot *s = &h->slots[slot];
    return pos >= s->state_pos && pos - s->state_pos < s->n_states
               ? s->states + (size_t)(pos - s->state_pos) * h->hidden
               : NULL;
}

void bt_host_keep_states(struct bt_host *h, uint32_t slot, uint32_t pos, const float *states,
                         uint32_t n)
{
    struct bt_host_slot *s = &h->slots[slot];
    const float *before = pos > 0 ? bt_host_state(h, slot, pos - 1) : NULL;
    size_t at = before ? (size_t)(before - s->states) : 0, one = h->hidden;
    uint32_t had = before ? 1 : 0;
    if (had + n > s->cap_states) {
        s->cap_states = had + n;
        s->states = bt_realloc(s->states, s->cap_states * one * sizeof(*s->states));
    }
    if (had && at > 0) {
        memmove(s->states, s->states + at, one * sizeof(*s->states));
    }
    memcpy(s->states + had * one, states, n * one * sizeof(*states));
    s->state_pos = pos - had;
    s->n_states = had + n;
}

void bt_host_spare(struct bt_host *h, uint32_t i, uint32_t slot, uint32_t pos)
{
    struct bt_host_slot *to = &h->slots[h->info.max_slots + i];
    const struct bt_host_slot *from = &h->slots[slot];
    uint32_t page_tokens = h->info.layout.page_tokens, last = pos / page_tokens;
    if (!to->pages) {
        to->pages = bt_calloc(h->max_pages_of_slot, sizeof(*to->pages));
    }
    memcpy(to->pages, from->pages, last * sizeof(*to->pages));
    to->pages[last] = h->info.pages + i + 1;
    if (pos % page_tokens > 0) {
        copy_page(h, from->pages[last] - 1, h->info.pages + i, pos % page_tokens);
    }
}

bt_status_t bt_host_slot_accept(struct bt_host *h, uint32_t slot, uint32_t token)
{
    struct bt_host_slot *s = slot_of(h, slot);
    if (!s || token >= h->info.vocab) {
        return BT_ERR_INVALID;
    }
    if (s->n_tokens == h->info.max_model_len) {
        return BT_ERR_TOO_LARGE;
    }
    s->tokens[s->n_tokens++] = token;
    return BT_OK;
}

bt_status_t bt_host_slot_close(struct bt_host *h, uint32_t slot, bt_engine_ticket_t *quiet_p)
{
    struct bt_host_slot *s = slot_of(h, slot);
    if (!s) {
        return BT_ERR_INVALID;
    }
    slot_clear(s); /* forward ran inside its call: no work uses the pages any more */
    struct bt_host_ticket *t = bt_host_ticket_new(h, 0);
    *quiet_p = t->id;
    bt_host_ticket_done(h, t, BT_OK);
    return BT_OK;
}

uint32_t bt_host_row_pos(const struct bt_host *h, const struct bt_engine_row *r)
{
    const struct bt_host_slot *s = &h->slots[r->slot];
    if (r->pos != BT_ENGINE_POS_NEXT) {
        return r->pos;
    }
    /* The last known token is at n_tokens - 1 even if the KV before it was loaded. */
    return r->tokens ? s->next_pos : s->n_tokens - 1;
}

uint32_t bt_host_row_prompt_outs(const struct bt_host *h, const struct bt_engine_row *r)
{
    uint32_t pos = bt_host_row_pos(h, r), n_prompt = h->slots[r->slot].n_prompt;
    if (!(r->flags & BT_ROW_PROMPT_LOGPROBS) || pos + 1 >= n_prompt) {
        return 0;
    }
    return BT_MIN(r->n, n_prompt - 1 - pos);
}

void bt_host_prompt_out(const struct bt_host *h, uint32_t slot, uint32_t pos, const float *logits,
                        struct bt_engine_out *out)
{
    const struct bt_host_slot *s = &h->slots[slot];
    *out = (struct bt_engine_out){.slot = slot, .pos = pos};
    bt_sampler_logprob(logits, h->info.vocab, h->ids.known, s->tokens[pos],
                       (uint32_t)BT_MAX(s->params.logprobs, 0), out);
}

static bt_status_t check_row(const struct bt_host *h, const struct bt_engine_row *r)
{
    const struct bt_host_slot *s = slot_of(h, r->slot);
    const bool contrastive = s && s->params.penalty_alpha > 0;
    if (!s || r->n == 0 ||
        (r->flags & ~(uint32_t)(BT_ROW_SAMPLE | BT_ROW_PROMPT_LOGPROBS | BT_ROW_BEAM))) {
        return BT_ERR_INVALID;
    }
    if (r->n_draft >= r->n ||
        (r->n_draft && (r->flags != BT_ROW_SAMPLE || s->params.n_dola || contrastive))) {
        return BT_ERR_INVALID;
    }
    if (!r->tokens && (r->n != 1 || s->n_tokens == 0 || (r->flags & BT_ROW_PROMPT_LOGPROBS))) {
        return BT_ERR_INVALID;
    }
    uint32_t pos = bt_host_row_pos(h, r);
    if (contrastive && (pos > s->n_hidden || pos + r->n > s->params.hidden_max)) {
        return pos > s->n_hidden ? BT_ERR_INVALID : BT_ERR_TOO_LARGE;
    }
    if (pos >= h->info.max_model_len || r->n > h->info.max_model_len - pos) {
        return BT_ERR_TOO_LARGE;
    }
    uint32_t page_tokens = h->info.layout.page_tokens;
    for (uint32_t i = 0; i < BT_DIV_UP(pos + r->n, page_tokens); i++) {
        if (!s->pages[i]) {
            return BT_ERR_INVALID;
        }
    }
    for (uint32_t i = 0; r->tokens && i < r->n; i++) {
        if (r->tokens[i] >= h->info.vocab) {
            return BT_ERR_INVALID;
        }
    }
    uint32_t flows[2] = {r->wait.flow, r->fire.flow};
    for (int d = 0; d < 2; d++) {
        if (flows[d] && (flows[d] > h->n_flows || !h->flows[flows[d] - 1].used ||
                         h->flows[flows[d] - 1].dir != (d ? BT_ENGINE_STORE : BT_ENGINE_LOAD))) {
            return BT_ERR_INVALID;
        }
    }
    return BT_OK;
}

bt_status_t bt_host_check_batch(const struct bt_host *h, const struct bt_engine_batch *b,
                                uint32_t *n_tokens_p, uint32_t *n_sample_p)
{
    uint32_t n = 0, sample = 0;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        bt_status_t st = check_row(h, &b->rows[i]);
        if (st != BT_OK) {
            return st;
        }
        if (b->rows[i].n > h->info.max_rows - n) {
            return BT_ERR_TOO_LARGE;
        }
        n += b->rows[i].n;
        sample += b->rows[i].flags & BT_ROW_SAMPLE ? 1 + b->rows[i].n_draft : 0;
    }
    *n_tokens_p = n;
    *n_sample_p = sample;
    return BT_OK;
}

void bt_host_ticket_outs(struct bt_host_ticket *t, uint32_t n)
{
    if (n > t->cap_out) {
        t->cap_out = n;
        t->out = bt_realloc(t->out, t->cap_out * sizeof(*t->out));
    }
    t->n_out = n;
}

void bt_host_ticket_sample(struct bt_host_ticket *t, const struct bt_host_sample *s)
{
    if (t->n_sample == t->cap_sample) {
        t->cap_sample = BT_MAX(2 * t->cap_sample, 16u);
        t->samples = bt_realloc(t->samples, t->cap_sample * sizeof(*t->samples));
    }
    t->samples[t->n_sample++] = *s;
}

void bt_host_ticket_sample_row(const struct bt_host *h, struct bt_host_ticket *t,
                               const struct bt_engine_row *r)
{
    uint32_t first = r->n - r->n_draft, pos = bt_host_row_pos(h, r) + first;
    bool dola = h->slots[r->slot].params.n_dola > 0;
    for (uint32_t i = 0; i <= r->n_draft; i++) {
        const struct bt_host_sample want = {.slot = r->slot,
                                            .pos = pos + i,
                                            .row = t->n_rows++,
                                            .early = dola ? t->n_early++ : BT_HOST_NO_EARLY,
                                            .draft = i < r->n_draft ? r->tokens[first + i]
                                                                    : BT_HOST_NO_DRAFT};
        bt_host_ticket_sample(t, &want);
    }
}

/* Makes room for n floats; their old values are lost. */
static void grow(float **p, size_t *cap, size_t n)
{
    if (n > *cap) {
        free(*p);
        *p = aligned_alloc(64, BT_ALIGN_UP(n * sizeof(float), (size_t)64));
        BT_ASSERT(*p);
        *cap = n;
    }
}

struct bt_host_ticket *bt_host_ticket_new(struct bt_host *h, size_t cap_logits)
{
    struct bt_host_ticket *t;
    if (bt_list_empty(&h->free)) {
        t = bt_calloc(1, sizeof(*t));
        bt_list_init(&t->link);
    } else {
        t = BT_CONTAINER_OF(h->free.next, struct bt_host_ticket, link);
        bt_list_remove(&t->link);
    }
    t->id = h->next_ticket++;
    t->status = BT_OK;
    t->run_us = 0;
    t->n_out = t->n_sample = t->n_rows = t->n_early = 0;
    t->forward = t->sampled = t->close_flow = false;
    t->flow = t->seq = 0;
    grow(&t->logits, &t->cap_logits, cap_logits);
    return t;
}

void bt_host_ticket_early(const struct bt_host *h, struct bt_host_ticket *t)
{
    grow(&t->early, &t->cap_early, (size_t)t->n_early * h->info.vocab);
}

void bt_host_ticket_done(struct bt_host *h, struct bt_host_ticket *t, bt_status_t status)
{
    t->status = status;
    t->n_out = status == BT_OK ? t->n_out : 0;
    bt_list_remove(&t->link);
    bt_list_insert_tail(&h->done, &t->link);
}

static struct bt_host_ticket *find(struct bt_list *head, bt_engine_ticket_t id)
{
    struct bt_list *l;
    bt_list_for_each (l, head) {
        struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        if (t->id == id) {
            return t;
        }
    }
    return NULL;
}

bt_status_t bt_host_sample_by(struct bt_host *h, bt_engine_ticket_t fwd, bt_host_draw_fn draw,
                              void *arg, bt_engine_ticket_t *out_p)
{
    struct bt_host_ticket *f = find(&h->done, fwd);
    f = f ? f : find(&h->given, fwd);
    if (!f || !f->forward || f->sampled) {
        return BT_ERR_INVALID;
    }
    uint64_t t0 = bt_mono_ns();
    struct bt_host_ticket *t = bt_host_ticket_new(h, 0);
    f->sampled = true;
    uint32_t n = 0, n_sample = f->status == BT_OK ? f->n_sample : 0;
    bool refused = false; /* a draft of this row: what follows it has no place in the sequence */
    bool first = true;    /* of its row */
    bt_host_ticket_outs(t, n_sample);
    for (uint32_t i = 0; i < n_sample; i++) {
        const struct bt_host_sample *want = &f->samples[i];
        struct bt_host_slot *s = slot_of(h, want->slot);
        if (!refused) {
            struct bt_engine_out *o = &t->out[n++];
            *o = (struct bt_engine_out){.slot = want->slot, .pos = want->pos};
            o->bad = s == NULL; /* closed between forward and sample */
            if (s) {
                draw(arg, f, want, o);
            }
            if (!o->bad && s->n_tokens < h->info.max_model_len) {
                s->tokens[s->n_tokens++] = o->token;
                s->next_pos = first && want->draft == BT_HOST_NO_DRAFT ? s->next_pos : want->pos;
                o->more = o->token == want->draft;
            }
            refused = !o->more;
        }
        first = want->draft == BT_HOST_NO_DRAFT;
        refused = refused && !first;
    }
    t->n_out = n;
    t->run_us = (float)(bt_mono_ns() - t0) * 1e-3f;
    *out_p = t->id;
    bt_host_ticket_done(h, t, f->status);
    return BT_OK;
}

struct host_draw {
    struct bt_host *h;
    const uint32_t *mask;
    bt_host_cosines_fn cosines;
    void *arg;
    float *row_logits; /* [vocab], or NULL: the ticket's own may be changed */
};

static void search(const struct host_draw *d, const struct bt_host_sample *want,
                   const struct bt_sampler_row *row, struct bt_engine_out *o)
{
    struct bt_sampler_candidates c;
    float cosines[BT_ENGINE_CANDIDATES];
    bt_sampler_candidates(d->h->sampler, row, &c, o);
    if (c.n > 0 && d->cosines(d->arg, want->slot, want->pos, c.id, c.n, cosines) != BT_OK) {
        c.n = 0;
    }
    bt_sampler_contrast(&c, cosines, row->params->penalty_alpha, o);
}

static void draw_of_logits(void *arg, const struct bt_host_ticket *f,
                           const struct bt_host_sample *want, struct bt_engine_out *o)
{
    const struct host_draw *d = arg;
    const struct bt_host_slot *s = &d->h->slots[want->slot];
    size_t vocab = d->h->info.vocab;
    float *logits = f->logits + (size_t)want->row * vocab;
    if (d->row_logits) {
        logits = memcpy(d->row_logits, logits, vocab * sizeof(float));
    }
    const struct bt_sampler_row row = {
        .logits = logits,
        .params = &s->params,
        .position = want->pos,
        .tokens = s->tokens,
        .n_tokens = s->n_tokens,
        .n_prompt = s->n_prompt,
        .mask = d->mask ? d->mask + (size_t)want->row * BT_DIV_UP(vocab, (size_t)32) : NULL,
        .known = d->h->ids.known,
        .early = want->early != BT_HOST_NO_EARLY ? f->early + (size_t)want->early * vocab : NULL,
    };
    if (s->params.penalty_alpha > 0) {
        search(d, want, &row, o);
    } else {
        bt_sampler_run(d->h->sampler, &row, o);
    }
}

bt_status_t bt_host_sample(struct bt_host *h, bt_engine_ticket_t fwd, const uint32_t *mask,
                           bt_host_cosines_fn cosines, void *arg, bt_engine_ticket_t *out_p)
{
    const struct bt_host_ticket *f = find(&h->done, fwd);
    f = f ? f : find(&h->given, fwd);
    struct host_draw d = {.h = h, .mask = mask, .cosines = cosines, .arg = arg};
    if (f &&
        f->n_rows < f->n_sample) { /* the sampler changes logits, and a fork needs them again */
        d.row_logits = bt_malloc(h->info.vocab * sizeof(float));
    }
    bt_status_t st = bt_host_sample_by(h, fwd, draw_of_logits, &d, out_p);
    free(d.row_logits);
    return st;
}

void bt_host_draft(struct bt_host *h, uint32_t slot, float *logits, struct bt_engine_out *out)
{
    struct bt_host_slot *s = &h->slots[slot];
    const struct bt_sampler_row row = {.logits = logits,
                                       .params = &s->params,
                                       .position = s->n_tokens,
                                       .tokens = s->tokens,
                                       .n_tokens = s->n_tokens,
                                       .n_prompt = s->n_prompt,
                                       .known = h->ids.known};
    *out = (struct bt_engine_out){.slot = slot, .pos = s->n_tokens};
    bt_sampler_run(h->sampler, &row, out);
    if (!out->bad && s->n_tokens < h->info.max_model_len) {
        s->tokens[s->n_tokens++] = out->token;
    } else {
        out->bad = true;
    }
}

void bt_host_undraft(struct bt_host *h, uint32_t slot, uint32_t n)
{
    h->slots[slot].n_tokens -= n;
}

uint32_t bt_host_poll(struct bt_host *h, struct bt_engine_event *ev, uint32_t max,
                      uint32_t timeout_us)
{
    uint64_t end = bt_mono_ns() + (uint64_t)timeout_us * 1000;
    uint32_t n = 0;
    for (;;) {
        bt_host_flows_advance(h);
        while (n < max && !bt_list_empty(&h->done)) {
            struct bt_host_ticket *t = BT_CONTAINER_OF(h->done.next, struct bt_host_ticket, link);
            bt_list_remove(&t->link);
            bt_list_insert_tail(&h->given, &t->link);
            ev[n++] = (struct bt_engine_event){.ticket = t->id,
                                               .status = t->status,
                                               .n_out = t->n_out,
                                               .out = t->n_out ? t->out : NULL,
                                               .run_us = t->run_us};
        }
        if (n || max == 0 || bt_list_empty(&h->waiting) || bt_mono_ns() >= end) {
            return n;
        }
        /* Another process raises the word that a LOAD waits for, and cannot wake this thread. */
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

void bt_host_release(struct bt_host *h, bt_engine_ticket_t ticket)
{
    struct bt_host_ticket *t = find(&h->given, ticket);
    if (t) {
        bt_list_remove(&t->link);
        bt_list_insert_head(&h->free, &t->link);
    }
}
