/* Beam searches. A search is one request with a slot for each of its beams. The beams share pages
 * by reference: the full pages of the prompt, and full pages of generated tokens that they have in
 * common. Each beam has a last page of its own. When several beams continue the same one, the first
 * keeps its pages. Each of the others copies the last page into the page of a beam that has ended.
 *
 * A step runs one row for each beam. The rows may run in different steps. When all have run, the
 * search (common/search/beam.h) makes the next beams. A preempted search keeps its tokens: it gets
 * the prompt's KV as other rows do, then the engine computes each beam's tokens in one piece. The
 * worker reports no token before the search ends, so after a failure the search begins again.
 * Engine thread. */
#include <string.h>

#include "decode/decode.h"

#define TOLD_NS 1000000000ull /* least time between two reports that a search goes on */

struct bt_beams {
    struct bt_beam_search *search;
    uint32_t cap; /* most blocks of a beam behind the full blocks of the prompt */
    /* blocks that each beam has there; 0: the search has neither slots nor pages */
    uint32_t n_blocks;
    /* place 0's first page is still in r->pages: it is the prompt's last, partial page */
    bool lent;
    bool over;
    uint32_t replay; /* the place whose tokens are computed again, up to replay_at; width: none */
    uint32_t replay_at;
    uint64_t told_ns;
    uint32_t tell, tell_at,
        tell_n; /* the next token to report: number of the answer, index in it, its length */
    bool tell_eos;
    uint32_t pages[]; /* [width][cap]; the search follows them */
};

static uint32_t width_of(const struct bt_wreq *r)
{
    return r->sub->beams.width;
}

static uint32_t *pages_of(const struct bt_wreq *r, uint32_t place)
{
    return r->row->beams->pages + (size_t)place * r->row->beams->cap;
}

static uint32_t slot_of(const struct bt_wreq *r, uint32_t place)
{
    return place == 0 ? r->slot : r->more_slots[place - 1];
}

/* Tokens of each beam, including the prompt. */
static uint32_t len_of(const struct bt_wreq *r)
{
    return r->sub->n + bt_beam_len(r->row->beams->search);
}

/* ---- memory ---- */

static uint32_t blocks_behind(const struct bt_wcore *c, const struct bt_submission *s,
                              uint32_t tokens)
{
    return BT_DIV_UP(tokens, c->block_tokens) - s->n / c->block_tokens;
}

static size_t search_at(const struct bt_wcore *c, const struct bt_submission *s)
{
    size_t pages = (size_t)s->beams.width * blocks_behind(c, s, s->len_max);
    return BT_ALIGN_UP(sizeof(struct bt_beams) + pages * sizeof(uint32_t), sizeof(uint64_t));
}

size_t bt_decode_beam_bytes(const struct bt_wcore *c, const struct bt_submission *s)
{
    return search_at(c, s) + bt_beam_bytes(&s->beams, s->len_max - s->n);
}

static struct bt_beams *beams_of(const struct bt_wcore *c, struct bt_wreq *r)
{
    const struct bt_submission *s = r->sub;
    struct bt_beams *b = r->row->beams;
    if (b == NULL) {
        b = r->row->beams = bt_decode_beam_memory(c, r);
        b->cap = blocks_behind(c, s, s->len_max);
        b->search = bt_beam_init((char *)b + search_at(c, s), &s->beams, s->len_max - s->n,
                                 s->params.eos, s->params.n_eos);
    }
    return b;
}

/* ---- pages ---- */

static void count_pages(struct bt_wreq *r)
{
    const struct bt_beams *b = r->row->beams;
    r->beam_pages = width_of(r) * b->n_blocks - b->lent;
}

uint32_t bt_decode_beam_pages(const struct bt_wcore *c, struct bt_wreq *r)
{
    (void)beams_of(c, r);
    uint32_t tokens = BT_MAX(len_of(r), r->sub->n + 1);
    bool lent = r->sub->n % c->block_tokens != 0;
    return width_of(r) * blocks_behind(c, r->sub, tokens) - lent;
}

void bt_decode_take_beam_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_beams *b = beams_of(c, r);
    BT_ASSERT(b->n_blocks == 0);
    b->lent = r->sub->n % c->block_tokens != 0;
    b->n_blocks = blocks_behind(c, r->sub, BT_MAX(len_of(r), r->sub->n + 1));
    for (uint32_t p = 0; p < width_of(r); p++) {
        uint32_t skip = p == 0 && b->lent;
        bt_status_t st = bt_page_pool_get(c->pages, b->n_blocks - skip, pages_of(r, p) + skip);
        BT_ASSERT(st == BT_OK); /* the search was admitted only with enough pages */
    }
    count_pages(r);
}

uint32_t bt_decode_beam_growth(const struct bt_wcore *c, struct bt_wreq *r, uint32_t tokens)
{
    const struct bt_beams *b = beams_of(c, r);
    uint64_t last = BT_MIN((uint64_t)len_of(r) + tokens, (uint64_t)r->sub->len_max);
    uint32_t blocks = blocks_behind(c, r->sub, (uint32_t)last);
    uint32_t have = BT_MAX(b->n_blocks, blocks_behind(c, r->sub, len_of(r)));
    return blocks > have && !b->over ? width_of(r) * (blocks - have) : 0;
}

void bt_decode_return_beam_pages(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_beams *b = beams_of(c, r);
    for (uint32_t p = 0; p < width_of(r) && b->n_blocks > 0; p++) {
        uint32_t skip = p == 0 && b->lent;
        bt_page_pool_put(c->pages, pages_of(r, p) + skip, b->n_blocks - skip);
    }
    b->n_blocks = 0;
    b->lent = false;
    count_pages(r);
}

uint32_t bt_decode_beam_missing(const struct bt_wcore *c, const struct bt_wreq *r)
{
    const struct bt_beams *b = r->row->beams;
    bool has = b->over || blocks_behind(c, r->sub, len_of(r)) <= b->n_blocks;
    return has ? 0 : width_of(r);
}

bt_status_t bt_decode_beam_grow(struct bt_wcore *c, struct bt_wreq *r, const uint32_t *pages)
{
    struct bt_beams *b = r->row->beams;
    bt_status_t st = BT_OK;
    for (uint32_t p = 0; p < width_of(r); p++) {
        pages_of(r, p)[b->n_blocks] = pages[p];
        if (st == BT_OK) {
            st = c->vt->slot_pages(c->eng, slot_of(r, p), r->sub->n / c->block_tokens + b->n_blocks,
                                   &pages[p], 1);
        }
    }
    b->n_blocks++;
    count_pages(r);
    return st;
}

bool bt_decode_beams_over(const struct bt_wreq *r)
{
    return r->row->beams != NULL && r->row->beams->over;
}

/* Starts the beams. The prompt's KV is in r->pages, which the slot of place 0 already has. The
 * other slots get the full pages, and a copy of the partial one. */
static bt_status_t open_beams(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_beams *b = r->row->beams;
    uint32_t full = r->sub->n / c->block_tokens, part = r->sub->n % c->block_tokens;
    bt_status_t st = BT_OK;
    if (b->lent) {
        b->lent = false;
        pages_of(r, 0)[0] = r->pages[--r->n_pages];
    }
    BT_ASSERT(r->n_pages == full);
    for (uint32_t p = 0; p < width_of(r) && st == BT_OK; p++) {
        uint32_t known = p == 0 && part > 0;
        if (p > 0 && full > 0) {
            st = c->vt->slot_pages(c->eng, slot_of(r, p), 0, r->pages, full);
        }
        if (st == BT_OK) {
            st = c->vt->slot_pages(c->eng, slot_of(r, p), full + known, pages_of(r, p) + known,
                                   b->n_blocks - known);
        }
        if (st == BT_OK && p > 0 && part > 0) {
            st = c->vt->page_copy(c->eng, pages_of(r, 0)[0], pages_of(r, p)[0], part);
        }
    }
    count_pages(r);
    return st;
}

/* Lets the beam at `place` continue the one at `from`: takes its full pages by reference, and
 * copies its last page if that is partial. */
static bt_status_t follow(struct bt_wcore *c, struct bt_wreq *r, uint32_t place, uint32_t from)
{
    uint32_t *to = pages_of(r, place), first = r->sub->n / c->block_tokens;
    const uint32_t *of = pages_of(r, from);
    /* `known`: tokens that have KV */
    uint32_t known = len_of(r) - 1, part = known % c->block_tokens;
    uint32_t full = known / c->block_tokens - first, lo = full;
    bt_status_t st = BT_OK;
    while (lo > 0 && to[lo - 1] != of[lo - 1]) { /* earlier pages are the same ones already */
        lo--;
        bt_page_pool_ref(c->pages, of[lo]);
        bt_page_pool_put(c->pages, &to[lo], 1);
        to[lo] = of[lo];
    }
    if (lo < full) {
        st = c->vt->slot_pages(c->eng, slot_of(r, place), first + lo, to + lo, full - lo);
    }
    if (st == BT_OK && part > 0) {
        bt_metric_add(c->stats->beam_copies, 1);
        st = c->vt->page_copy(c->eng, of[full], to[full], part);
    }
    return st;
}

/* ---- turns ---- */

static void tell_that_it_goes_on(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_beams *b = r->row->beams;
    uint64_t now = bt_mono_ns();
    if (b->told_ns != 0 && now - b->told_ns < TOLD_NS) {
        return;
    }
    b->told_ns = now;
    struct bt_wout o = {.kind = BT_WOUT_SEARCHING};
    o.u.searching.request = r->sub->request;
    o.u.searching.session = r->sub->session;
    o.u.searching.epoch = r->sub->epoch;
    o.u.searching.tokens = bt_beam_len(b->search);
    bt_wcore_emit_after(c, &o);
}

/* Makes the next beams, once all rows of the turn are there. */
static void next_turn(struct bt_wcore *c, struct bt_wreq *r)
{
    struct bt_beams *b = r->row->beams;
    uint32_t from[BT_BEAM_WIDTH_MAX];
    bool first = bt_beam_len(b->search) == 0;
    bt_status_t st = BT_OK;
    b->over = !bt_beam_choose(b->search, from);
    bt_metric_add(c->stats->generation_tokens, width_of(r));
    tell_that_it_goes_on(c, r);
    /* The first beams all continue the prompt, whose pages they have. */
    for (uint32_t p = 0; p < width_of(r) && !first && !b->over && st == BT_OK; p++) {
        st = from[p] != p ? follow(c, r, p, from[p]) : BT_OK;
    }
    if (st != BT_OK) {
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: pages of a beam: %s", bt_status_text(st));
    }
}

/* Passes the row of a place to the search. */
static void give(struct bt_wcore *c, struct bt_wreq *r, uint32_t place,
                 const struct bt_engine_out *out)
{
    struct bt_beams *b = r->row->beams;
    bool good = !out->bad && out->slot == slot_of(r, place);
    for (uint32_t i = 0; good && i < out->n_top; i++) {
        good = out->top_id[i] < c->info->vocab;
    }
    if (!good || !bt_beam_put(b->search, place, out->top_id, out->top_logprob, out->n_top)) {
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "the model produced no usable logits at position %u",
                     len_of(r) - 1);
        return;
    }
    if (bt_beam_ready(b->search)) {
        next_turn(c, r);
    }
}

/* Begins to compute the tokens of `place` again, except the last one, which a turn computes. */
static void replay(struct bt_wreq *r, uint32_t place)
{
    struct bt_beams *b = r->row->beams;
    b->replay = place;
    b->replay_at = r->sub->n;
    if (len_of(r) - 1 == r->sub->n) {
        b->replay = width_of(r);
    } else if (place < width_of(r)) {
        bt_beam_path(b->search, place, r->tokens + r->sub->n);
    }
}

void bt_decode_search(struct bt_wcore *c, struct bt_wreq *r, const struct bt_engine_out *out)
{
    struct bt_beams *b = beams_of(c, r);
    bool begun = bt_beam_len(b->search) > 0;
    r->stage = BT_WREQ_ROW;
    r->row->landed_ns = 0;
    bt_status_t st = open_beams(c, r);
    if (st != BT_OK) {
        bt_wcore_end(c, r, BT_ERR_INTERNAL, "engine: pages of a beam: %s", bt_status_text(st));
        return;
    }
    if (begun) { /* the search was preempted */
        replay(r, 0);
        return;
    }
    b->replay = width_of(r);
    bt_metric_add(c->stats->beam_searches, 1);
    give(c, r, 0, out);
}

uint32_t bt_decode_plan_beams(struct bt_wcore *c, struct bt_wreq *r, uint32_t first)
{
    const struct bt_beams *b = r->row->beams;
    struct bt_batch_seq *s = &c->batch.seqs[first];
    uint32_t n = 0, width = width_of(r);
    if (b->over || r->row->page_wait) {
        return 0;
    }
    if (b->replay < width) {
        *s = (struct bt_batch_seq){.order = r->order,
                                   .pos = b->replay_at,
                                   .len = len_of(r) - 1,
                                   .late = r->sub->late,
                                   .kind = BT_BATCH_PROMPT};
        c->seq_reqs[first] = r;
        c->step.places[first] = b->replay;
        return 1;
    }
    for (uint32_t p = 0; p < width; p++) {
        if (bt_beam_wants(b->search, p)) {
            s[n] = (struct bt_batch_seq){
                .order = r->order, .pos = len_of(r) - 1, .kind = BT_BATCH_DECODE};
            c->seq_reqs[first + n] = r;
            c->step.places[first + n++] = p;
        }
    }
    return n;
}

void bt_decode_beam_row(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                        struct bt_engine_row *e)
{
    uint32_t place = c->step.places[b->seq];
    e->slot = slot_of(r, place);
    e->flags |= BT_ROW_BEAM;
    e->tokens = r->row->beams->replay == place ? r->tokens + b->pos
                                               : bt_beam_last(r->row->beams->search, place);
}

void bt_decode_beam_stepped(struct bt_wcore *c, struct bt_wreq *r, const struct bt_batch_row *b,
                            const struct bt_engine_out *out)
{
    struct bt_beams *s = r->row->beams;
    if (out != NULL) {
        give(c, r, c->step.places[b->seq], out);
        return;
    }
    bt_metric_add(c->stats->recomputed, b->n);
    s->replay_at = b->pos + b->n;
    if (s->replay_at == len_of(r) - 1) {
        replay(r, s->replay + 1);
    }
}

/* ---- answers ---- */

static void tell_token(struct bt_wreq *r, struct bt_wtoken *t)
{
    struct bt_beams *b = r->row->beams;
    struct bt_beam_token k;
    if (b->tell_at == 0) {
        b->tell_n = bt_beam_answer(b->search, b->tell, &b->tell_eos);
    }
    bt_beam_answer_token(b->search, b->tell_at, &k);
    *t = (struct bt_wtoken){.request = r->sub->request,
                            .session = r->sub->session,
                            .epoch = r->sub->epoch,
                            .choice = r->sub->choice + b->tell,
                            .offset = b->tell_at,
                            .token = k.token,
                            .logprob = r->sub->logprobs >= 0 ? k.logprob : 0,
                            .n_top = k.n_top};
    memcpy(t->top_id, k.top_id, k.n_top * sizeof(t->top_id[0]));
    memcpy(t->top_logprob, k.top_logprob, k.n_top * sizeof(t->top_logprob[0]));
    if (++b->tell_at == b->tell_n) {
        t->finish = b->tell_eos ? BATON__FINISH__STOP : BATON__FINISH__LENGTH;
        r->finish = b->tell == 0 ? t->finish : r->finish;
        b->tell++;
        b->tell_at = 0;
    }
}

bool bt_decode_tell(struct bt_wcore *c)
{
    struct bt_wreq *r = NULL;
    struct bt_list *it;
    bt_list_for_each (it, &c->reqs.active) {
        struct bt_wreq *a = BT_CONTAINER_OF(it, struct bt_wreq, link);
        if (a->stage == BT_WREQ_ROW && bt_decode_beams_over(a)) {
            r = a;
            break;
        }
    }
    if (r == NULL) {
        return false;
    }
    bt_wcore_take_buffer(c);
    struct bt_wtokens *to = c->tokens.now;
    while (to->n < c->max_tokens && r->row->beams->tell < r->sub->beams.n) {
        tell_token(r, &to->t[to->n++]);
    }
    bt_wcore_flush_tokens(c);
    if (r->row->beams->tell == r->sub->beams.n) {
        bt_wcore_end(c, r, BT_OK, "%s", "");
    }
    return true;
}
