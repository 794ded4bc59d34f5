/* An engine for tests of the worker's engine thread: computes nothing, finishes nothing at once,
 * and checks every rule of common/engine/engine.h that the owner has to keep: pages and slots are
 * used again only after their quiet ticket was polled, a page that several sequences hold is only
 * read, a flow is closed once. Each page remembers which token stands where (loaded ones are taken
 * on trust), so a row that runs over anything but the KV of its own tokens is noticed. The next
 * token is a function of the last one, its position and the choice. Of a beam search, the most
 * likely tokens are a function of all tokens before them, as the KV has them. */
#ifndef BT_TEST_WORKER_ENGINE_H
#define BT_TEST_WORKER_ENGINE_H

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/engine/engine.h"
#include "common/engine/model_config.h"

#define FE_MODEL   "deploy/models/shakespeare-llama-6m"
#define FE_BLOCK   16u
#define FE_VOCAB   2048u
#define FE_CONTEXT 512u
#define FE_SLOTS   8u
#define FE_PAGES   40u
#define FE_FLOWS   64u
#define FE_TICKETS 256u
#define FE_ROWS    48u
#define FE_BAD     666u /* seed whose tokens are NaN */
#define FE_DEVICE  777u /* seed whose forward loses the device */
#define FE_BEAM    888u /* seed of beam searches */

struct fe_slot {
    bool open, closing, beam; /* beam: its rows bring their tokens */
    uint64_t seed;
    uint32_t choice, n_prompt, n_top;
    uint32_t n; /* known tokens */
    uint32_t tokens[FE_CONTEXT + 1];
    uint32_t pages[FE_CONTEXT / FE_BLOCK + 1], n_pages;
};
struct fe_flow {
    bool open, closing;
    int dir;
    bt_flow_word_t *word;
    uint32_t epoch, n, begin, end, pages[FE_CONTEXT / FE_BLOCK + 1];
};
struct fe_ticket {
    bt_engine_ticket_t id;
    int slot, flow; /* freed when polled; -1: none */
    bool forward, sampled;
    uint32_t n_out;
    struct bt_engine_out out[FE_ROWS];
};
struct bt_engine {
    struct fe_slot slots[FE_SLOTS];
    struct fe_flow flows[FE_FLOWS];
    uint32_t page_slots[FE_PAGES];       /* sequences that hold it */
    uint32_t page_flows[FE_PAGES];       /* flows that use it */
    uint64_t kv[FE_PAGES][FE_BLOCK];     /* what was computed there: FE_CHAIN, or FE_LOADED */
    uint64_t behind[FE_PAGES][FE_BLOCK]; /* ... and the chain before it */
    uint64_t chain[FE_SLOTS];            /* of the last row of a slot */
    struct fe_ticket t[FE_TICKETS];
    uint32_t head, tail; /* not yet polled: [head, tail) */
    bt_engine_ticket_t next;
    struct bt_engine_out given[FE_ROWS], prompt[FE_CONTEXT];
    uint32_t n_prompt_out;
    bt_engine_ticket_t fwd; /* not released */
    uint32_t n_sample, sample_slot[FE_SLOTS];
    struct {
        uint32_t n, tokens[FE_ROWS];
    } drafts[FE_SLOTS]; /* of the rows that are sampled */
    uint64_t rng;
    uint64_t steps, max_pages, prompt_rows; /* tokens run other than one at a time */
    uint32_t max_row;                       /* most of them at a time */
    struct bt_engine_info info;
};
static struct bt_engine *fe_last; /* the engine that was opened last, for the test's end */
static bool fe_drafts;            /* engines to come take drafts, and their texts nearly repeat */
static uint64_t fe_accepted, fe_refused;
static uint64_t fe_copies;           /* pages copied */
static uint32_t fe_pages = FE_PAGES; /* of engines to come */
static atomic_bool fe_hold, fe_held; /* a step does not begin while held; held: one waits */

#define FE_LOADED 1ull
static inline uint32_t fe_next(uint32_t token, uint32_t pos, uint32_t choice)
{
    uint32_t any = (token * 31 + pos * 7 + choice * 101 + 11) % FE_VOCAB;
    return fe_drafts && any % 8 != 0 ? (pos % 13 * 31 + choice * 101 + 11) % FE_VOCAB : any;
}
/* KV at a position stands for all tokens up to it. */
static inline uint64_t fe_chain(uint64_t before, uint32_t token)
{
    uint64_t h = (before ^ (token + 1)) * 0x9e3779b97f4a7c15ull;
    return (h ^ h >> 29) | 2;
}
/* The n most likely tokens behind this chain. One of them may be the lowest id. */
static inline void fe_top(uint64_t chain, uint32_t n, struct bt_engine_out *o)
{
    float lp = -0.2f;
    uint32_t zero = chain >> 20 & 255;
    o->n_top = n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t h = fe_chain(chain, i);
        o->top_id[i] = i == zero ? 0 : 1 + (uint32_t)(h >> 40) % 64 * 24 + i;
        o->top_logprob[i] = lp;
        lp -= 0.01f + (float)(h >> 44) / (1u << 20);
    }
}
static inline uint32_t fe_rnd(struct bt_engine *e, uint32_t n)
{
    e->rng = e->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(e->rng >> 33) % n;
}
static struct fe_ticket *fe_ticket(struct bt_engine *e, bt_engine_ticket_t *p)
{
    BT_ASSERT(e->tail - e->head < FE_TICKETS);
    struct fe_ticket *t = &e->t[e->tail++ % FE_TICKETS];
    memset(t, 0, sizeof(*t));
    t->slot = t->flow = -1;
    t->id = *p = ++e->next;
    return t;
}

static bt_status_t fe_open(const struct bt_engine_config *c, struct bt_engine **e_p,
                           const struct bt_engine_info **i_p, char *err, size_t cap)
{
    struct bt_engine *e = bt_calloc(1, sizeof(*e));
    struct bt_kv_key root;
    bt_status_t st = bt_model_root_key(
        FE_MODEL, &(struct bt_model_settings){.load_format = "dummy", .block_tokens = FE_BLOCK},
        &e->info.layout, &root, err, cap);
    BT_ASSERT(st == BT_OK);
    c->progress(c->progress_arg, "nothing", 1);
    e->info.caps =
        BT_ENGINE_CAP_MIXED | BT_ENGINE_CAP_EXACT | (fe_drafts ? BT_ENGINE_CAP_DRAFTS : 0);
    e->info.vocab = FE_VOCAB;
    e->info.max_model_len = FE_CONTEXT;
    e->info.pages = fe_pages;
    e->info.max_slots = FE_SLOTS;
    e->info.max_rows = FE_ROWS;
    e->info.max_drafts = fe_drafts ? FE_ROWS : 0;
    e->rng = 12345;
    fe_last = e;
    *e_p = e;
    *i_p = &e->info;
    return BT_OK;
}
static void fe_close(struct bt_engine *e)
{
    (void)e; /* the test looks at it afterwards, and frees it */
}

static struct fe_slot *fe_slot(struct bt_engine *e, uint32_t slot)
{
    BT_ASSERT(slot < FE_SLOTS && e->slots[slot].open && !e->slots[slot].closing);
    return &e->slots[slot];
}
static bt_status_t fe_slot_open(struct bt_engine *e, uint32_t slot,
                                const struct bt_engine_params *p, const uint32_t *tokens,
                                uint32_t n, uint32_t n_prompt)
{
    struct fe_slot *s = &e->slots[slot];
    BT_ASSERT(slot < FE_SLOTS && !s->open && n <= FE_CONTEXT && n_prompt <= n && n_prompt > 0);
    memset(s, 0, sizeof(*s));
    s->open = true;
    s->seed = p->seed;
    s->choice = p->choice;
    s->n_prompt = n_prompt;
    s->n_top = p->logprobs > 0 ? (uint32_t)p->logprobs : 0;
    s->beam = p->seed == FE_BEAM;
    s->n = n;
    memcpy(s->tokens, tokens, n * sizeof(tokens[0]));
    return BT_OK;
}
/* Is page i of s a full block of KV of its tokens? */
static bool fe_holds_mine(const struct bt_engine *e, const struct fe_slot *s, uint32_t i)
{
    uint64_t chain = 0;
    if ((i + 1) * FE_BLOCK > s->n) {
        return false;
    }
    for (uint32_t k = 0; k < (i + 1) * FE_BLOCK; k++) {
        uint64_t kv = e->kv[s->pages[i]][k % FE_BLOCK];
        chain = fe_chain(chain, s->tokens[k]);
        if (k / FE_BLOCK == i && kv != FE_LOADED && kv != chain) {
            return false;
        }
    }
    return true;
}
static bt_status_t fe_slot_pages(struct bt_engine *e, uint32_t slot, uint32_t first,
                                 const uint32_t *pages, uint32_t n)
{
    struct fe_slot *s = fe_slot(e, slot);
    BT_ASSERT(first == s->n_pages || (s->beam && first < s->n_pages && first + n <= s->n_pages));
    for (uint32_t i = 0; i < n; i++) {
        BT_ASSERT(pages[i] < FE_PAGES);
        if (first + i < s->n_pages) { /* a beam continues another one: rows check what it has */
            e->page_slots[s->pages[first + i]]--;
            e->page_slots[pages[i]]++;
            s->pages[first + i] = pages[i];
            continue;
        }
        s->pages[s->n_pages++] = pages[i];
        /* Nobody's: its last owner is quiet, and no copy reads or writes it. Or it is shared. */
        bool fresh = e->page_slots[pages[i]]++ == 0 && e->page_flows[pages[i]] == 0;
        BT_ASSERT(fresh || fe_holds_mine(e, s, s->n_pages - 1));
    }
    return BT_OK;
}
static bt_status_t fe_page_copy(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t toks)
{
    BT_ASSERT(from < FE_PAGES && to < FE_PAGES && from != to && toks > 0 && toks < FE_BLOCK);
    BT_ASSERT(e->page_slots[to] == 1 && e->page_flows[to] == 0);
    fe_copies++;
    memcpy(e->behind[to], e->behind[from], toks * sizeof(e->kv[to][0]));
    memcpy(e->kv[to], e->kv[from], toks * sizeof(e->kv[to][0]));
    return BT_OK;
}
static bt_status_t fe_slot_accept(struct bt_engine *e, uint32_t slot, uint32_t token)
{
    struct fe_slot *s = fe_slot(e, slot);
    s->tokens[s->n++] = token;
    return BT_OK;
}
static bt_status_t fe_slot_close(struct bt_engine *e, uint32_t slot, bt_engine_ticket_t *quiet)
{
    struct fe_slot *s = fe_slot(e, slot);
    s->closing = true;
    fe_ticket(e, quiet)->slot = (int)slot;
    return BT_OK;
}
static bt_status_t fe_flow_open(struct bt_engine *e, int dir, int prio, bt_flow_word_t *word,
                                uint32_t epoch, void (*bell)(void *), void *bell_arg, uint32_t *p)
{
    (void)prio;
    (void)bell;
    (void)bell_arg;
    for (uint32_t i = 0; i < FE_FLOWS; i++) {
        if (!e->flows[i].open) {
            e->flows[i] = (struct fe_flow){.open = true, .dir = dir, .word = word, .epoch = epoch};
            *p = i + 1;
            return BT_OK;
        }
    }
    return BT_ERR_EXHAUSTED;
}
static struct fe_flow *fe_flow(struct bt_engine *e, uint32_t flow)
{
    BT_ASSERT(flow > 0 && flow <= FE_FLOWS && e->flows[flow - 1].open &&
              !e->flows[flow - 1].closing);
    return &e->flows[flow - 1];
}
static bt_status_t fe_flow_add(struct bt_engine *e, uint32_t flow, const struct bt_engine_block *b,
                               uint32_t n)
{
    struct fe_flow *f = fe_flow(e, flow);
    for (uint32_t i = 0; i < n; i++) {
        BT_ASSERT(b[i].page < FE_PAGES && b[i].toks > 0 && b[i].toks <= FE_BLOCK && b[i].mem);
        e->page_flows[b[i].page]++;
        for (uint32_t t = 0; t < b[i].toks && f->dir == BT_ENGINE_LOAD; t++) {
            BT_ASSERT(e->page_slots[b[i].page] == 1);
            e->kv[b[i].page][t] = FE_LOADED;
        }
        f->begin = f->n == 0 ? b[i].seq : f->begin;
        f->pages[f->n++] = b[i].page;
        f->end = BT_MAX(f->end, b[i].seq + e->info.layout.n_layers);
    }
    return BT_OK;
}
static bt_status_t fe_flow_release(struct bt_engine *e, uint32_t flow, uint32_t seq,
                                   bt_engine_ticket_t *done)
{
    BT_ASSERT(seq == fe_flow(e, flow)->end);
    fe_ticket(e, done);
    return BT_OK;
}
static bt_status_t fe_flow_close(struct bt_engine *e, uint32_t flow, bool abort,
                                 bt_engine_ticket_t *quiet)
{
    struct fe_flow *f = fe_flow(e, flow);
    if (f->dir == BT_ENGINE_STORE && f->word != NULL && !abort) {
        bt_flow_raise(f->word, f->epoch, f->end);
    }
    f->closing = true;
    fe_ticket(e, quiet)->flow = (int)flow - 1;
    return BT_OK;
}
/* The row of a beam behind its prompt: its KV is one chain. */
static void fe_check_beam(struct bt_engine *e, const struct bt_engine_row *r)
{
    struct fe_slot *s = fe_slot(e, r->slot);
    uint64_t chain = 0;
    BT_ASSERT(r->n_draft == 0 && BT_DIV_UP(r->pos + r->n, FE_BLOCK) <= s->n_pages);
    for (uint32_t i = 0; i < r->pos + r->n; i++) {
        uint32_t page = s->pages[i / FE_BLOCK];
        uint64_t *kv = &e->kv[page][i % FE_BLOCK], *behind = &e->behind[page][i % FE_BLOCK];
        if (i < s->n_prompt) {
            chain = fe_chain(chain, s->tokens[i]);
            BT_ASSERT(*kv == FE_LOADED || *kv == chain);
        } else if (i < r->pos) {
            BT_ASSERT(*behind == chain);
            chain = *kv;
        } else {
            BT_ASSERT(e->page_slots[page] == 1);
            *behind = chain;
            *kv = chain = fe_chain(chain, r->tokens[i - r->pos]);
        }
    }
    e->chain[r->slot] = chain;
}
static void fe_check_row(struct bt_engine *e, const struct bt_engine_row *r)
{
    struct fe_slot *s = fe_slot(e, r->slot);
    if (s->beam && r->pos >= s->n_prompt) {
        fe_check_beam(e, r);
        return;
    }
    uint32_t end = r->pos + r->n, known = end - r->n_draft;
    uint64_t chain = 0;
    BT_ASSERT(r->n > r->n_draft && known <= s->n && end < FE_CONTEXT);
    BT_ASSERT(BT_DIV_UP(end, FE_BLOCK) <= s->n_pages);
    BT_ASSERT(memcmp(r->tokens, s->tokens + r->pos, (known - r->pos) * 4) == 0);
    BT_ASSERT(!(r->flags & BT_ROW_SAMPLE) || known == s->n);
    BT_ASSERT(r->n_draft == 0 || (fe_drafts && (r->flags & BT_ROW_SAMPLE)));
    for (uint32_t i = 0; i < end; i++) {
        uint32_t page = s->pages[i / FE_BLOCK];
        uint64_t *kv = &e->kv[page][i % FE_BLOCK];
        chain = fe_chain(chain, i < known ? s->tokens[i] : r->tokens[i - r->pos]);
        if (i < r->pos) {
            BT_ASSERT(*kv == FE_LOADED || *kv == chain); /* the KV of my tokens */
        } else {
            BT_ASSERT(e->page_slots[page] == 1); /* nobody else reads what I write */
            *kv = chain;
        }
    }
    e->chain[r->slot] = chain;
    e->prompt_rows += r->n - r->n_draft > 1 ? r->n : 0;
    for (uint32_t i = r->pos; (r->flags & BT_ROW_PROMPT_LOGPROBS) && i < end; i++) {
        if (i + 1 < s->n_prompt) {
            struct bt_engine_out *o = &e->prompt[e->n_prompt_out++];
            *o = (struct bt_engine_out){.slot = r->slot, .pos = i + 1, .token = s->tokens[i + 1]};
            o->logprob = -(float)(i + 1);
            o->n_top = s->n_top;
            o->bad = s->seed == FE_BAD;
        }
    }
    if (r->wait.flow != 0) {
        BT_ASSERT(fe_flow(e, r->wait.flow)->dir == BT_ENGINE_LOAD);
    }
    if (r->fire.flow != 0) {
        const struct fe_flow *f = fe_flow(e, r->fire.flow);
        /* Below would lower the word that the kvstore has raised over what is resident. */
        BT_ASSERT(r->fire.seq >= f->begin && r->fire.seq < f->end);
    }
}
static bt_status_t fe_forward(struct bt_engine *e, const struct bt_engine_batch *b,
                              bt_engine_ticket_t *fwd)
{
    while (atomic_load(&fe_hold)) {
        atomic_store(&fe_held, true);
        usleep(100);
    }
    uint32_t tokens = 0;
    bool used[FE_SLOTS] = {false};
    e->n_sample = e->n_prompt_out = 0;
    BT_ASSERT(e->fwd == 0);
    for (uint32_t i = 0; i < b->n_rows; i++) {
        fe_check_row(e, &b->rows[i]);
        BT_ASSERT(!used[b->rows[i].slot]);
        used[b->rows[i].slot] = true;
        tokens += b->rows[i].n;
        e->max_row = BT_MAX(e->max_row, b->rows[i].n);
        if (e->slots[b->rows[i].slot].seed == FE_DEVICE) {
            return BT_ERR_DEVICE;
        }
        if (b->rows[i].flags & BT_ROW_SAMPLE) {
            e->drafts[e->n_sample].n = b->rows[i].n_draft;
            memcpy(e->drafts[e->n_sample].tokens,
                   b->rows[i].tokens + b->rows[i].n - b->rows[i].n_draft, b->rows[i].n_draft * 4);
            e->sample_slot[e->n_sample++] = b->rows[i].slot;
        }
    }
    BT_ASSERT(tokens <= e->info.max_rows && b->n_rows > 0);
    uint32_t pages = 0;
    for (uint32_t i = 0; i < FE_PAGES; i++) {
        pages += e->page_slots[i] != 0;
    }
    e->max_pages = BT_MAX(e->max_pages, pages);
    e->steps++;
    fe_ticket(e, fwd)->forward = true;
    BT_ASSERT(e->n_prompt_out <= BT_ARRAY_LEN(e->prompt));
    e->fwd = *fwd;
    return BT_OK;
}
static bt_status_t fe_sample(struct bt_engine *e, bt_engine_ticket_t fwd, const uint32_t *mask,
                             bt_engine_ticket_t *out)
{
    (void)mask;
    BT_ASSERT(e->fwd == fwd && e->n_sample > 0); /* its logits have not been released */
    struct fe_ticket *t = fe_ticket(e, out);
    for (uint32_t i = 0; i < e->n_sample; i++) {
        struct fe_slot *s = fe_slot(e, e->sample_slot[i]);
        struct bt_engine_out *o;
        uint32_t k = 0;
        do {
            o = &t->out[t->n_out++];
            o->slot = e->sample_slot[i];
            o->token = fe_next(s->tokens[s->n - 1], s->n, s->choice);
            o->bad = s->seed == FE_BAD;
            s->tokens[s->n++] = o->token;
            if (s->beam) {
                fe_top(e->chain[o->slot], s->n_top, o);
            }
            o->more = !o->bad && k < e->drafts[i].n && e->drafts[i].tokens[k] == o->token;
            k += o->more;
        } while (o->more);
        fe_accepted += k;
        fe_refused += e->drafts[i].n - k;
    }
    return BT_OK;
}
static uint32_t fe_poll(struct bt_engine *e, struct bt_engine_event *ev, uint32_t max,
                        uint32_t timeout_us)
{
    uint32_t n = 0;
    (void)timeout_us;
    while (e->head != e->tail && n < max && n < 1 && fe_rnd(e, 3) != 0) {
        struct fe_ticket *t = &e->t[e->head++ % FE_TICKETS];
        memset(&ev[n], 0, sizeof(ev[n]));
        ev[n].ticket = t->id;
        if (t->n_out > 0) {
            memcpy(e->given, t->out, sizeof(e->given));
            ev[n].n_out = t->n_out;
            ev[n].out = e->given;
        }
        if (t->forward) {
            ev[n].n_out = e->n_prompt_out;
            ev[n].out = e->prompt;
        }
        if (t->slot >= 0) {
            struct fe_slot *s = &e->slots[t->slot];
            for (uint32_t i = 0; i < s->n_pages; i++) {
                e->page_slots[s->pages[i]]--;
            }
            s->open = s->closing = false;
        }
        if (t->flow >= 0) {
            struct fe_flow *f = &e->flows[t->flow];
            for (uint32_t i = 0; i < f->n; i++) {
                e->page_flows[f->pages[i]]--;
            }
            f->open = f->closing = false;
        }
        n++;
    }
    return n;
}
static void fe_release(struct bt_engine *e, bt_engine_ticket_t t)
{
    if (t == e->fwd) {
        e->fwd = 0;
    }
}

static const struct bt_engine_vtable fe_vtable = {
    .abi = BT_ENGINE_ABI,
    .name = "scripted",
    .open = fe_open,
    .close = fe_close,
    .slot_open = fe_slot_open,
    .slot_pages = fe_slot_pages,
    .page_copy = fe_page_copy,
    .slot_accept = fe_slot_accept,
    .slot_close = fe_slot_close,
    .flow_open = fe_flow_open,
    .flow_add = fe_flow_add,
    .flow_release = fe_flow_release,
    .flow_close = fe_flow_close,
    .forward = fe_forward,
    .sample = fe_sample,
    .poll = fe_poll,
    .release = fe_release,
};

#endif
