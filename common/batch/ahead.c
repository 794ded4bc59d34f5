/* Predicts the coming steps, and the place of one more prompt in them. Pure: see ahead.h. */
#include "common/batch/ahead.h"

static double prompt_ns(const struct bt_batch_cost *c, double tokens)
{
    struct bt_batch_work w = {.tokens = tokens, .prompt = true};
    return bt_batch_work_ns(c, &w);
}

static bool joins(const struct bt_batch *b, const struct bt_batch_work *work, uint32_t n_prompts,
                  uint32_t tokens)
{
    struct bt_batch_seq s = {.len = tokens, .kind = BT_BATCH_PROMPT};
    return work->tokens + tokens <= b->lim.max_rows &&
           bt_batch_joins(b, work, &s, tokens, n_prompts, 1);
}

/* The most tokens of a new prompt that would join the step; by bisection, because more tokens delay
 * the others more. */
static uint32_t most_to_join(const struct bt_batch *b, const struct bt_batch_work *work,
                             uint32_t n_prompts, uint32_t chunk)
{
    uint32_t least = 0, most = chunk;
    if (joins(b, work, n_prompts, chunk)) {
        return chunk;
    }
    while (least + 1 < most) {
        uint32_t n = least + (most - least) / 2;
        if (joins(b, work, n_prompts, n)) {
            least = n;
        } else {
            most = n;
        }
    }
    return least;
}

/* Notes the next step, which begins at `now` and has `work` of n prompts: of all that wait. */
static void note_join(const struct bt_batch *b, const struct bt_batch_work *work, uint32_t n,
                      uint32_t chunk, double now, struct bt_batch_ahead *out)
{
    uint32_t before = out->n_joins > 0 ? out->joins[out->n_joins - 1].most_tokens : 0;
    if (out->n_joins == BT_BATCH_AHEAD_JOINS || before == chunk) {
        return;
    }
    uint32_t most = most_to_join(b, work, n, chunk);
    if (most > before) {
        out->joins[out->n_joins].most_tokens = most;
        out->joins[out->n_joins].begin_ns = now;
        out->joins[out->n_joins].step_ns = bt_batch_work_ns(b->cost, work);
        out->joins[out->n_joins].tokens = work->tokens;
        out->n_joins++;
    }
}

/* A new prompt of several chunks during the steps of the others. */
struct newcomer {
    uint32_t chunks; /* begun */
    double beside_ns;
};

static void note_chunk(const struct bt_batch *b, const struct bt_batch_work *work, uint32_t n,
                       bool all, uint32_t chunk, double now, struct newcomer *x,
                       struct bt_batch_ahead *out)
{
    struct bt_batch_work with = *work;
    with.tokens += chunk;
    if (x->chunks == BT_BATCH_AHEAD_CHUNKS) {
        return;
    }
    if (all && joins(b, work, n, chunk)) {
        out->chunks_begin_ns = x->chunks == 0 ? now : out->chunks_begin_ns;
        x->beside_ns += bt_batch_work_ns(b->cost, &with) - prompt_ns(b->cost, chunk);
        out->chunks_beside_ns[x->chunks++] = x->beside_ns;
    } else if (x->chunks > 0) { /* it waits between two of its chunks */
        x->beside_ns += bt_batch_work_ns(b->cost, work);
    }
}

/* Returns when all waiting prompts are computed; behind the last simulated step they count one
 * after the other. No prompt overtakes: a new prompt joins a step only if all waiting prompts are
 * in it. */
static double roll(struct bt_batch *b, double now, uint32_t chunk, struct newcomer *x,
                   struct bt_batch_ahead *out)
{
    struct bt_batch_row rows[BT_BATCH_AHEAD_SEQS];
    for (uint32_t step = 0; step < BT_BATCH_AHEAD_STEPS; step++) {
        uint32_t n = bt_batch_prefill(b, rows, BT_BATCH_AHEAD_SEQS);
        if (n == 0) {
            return now;
        }
        bool all = n == bt_batch_waiting(b);
        struct bt_batch_work work = bt_batch_work_of(b, rows, n);
        if (all) {
            note_join(b, &work, n, chunk, now, out);
        }
        note_chunk(b, &work, n, all, chunk, now, x, out);
        now += bt_batch_work_ns(b->cost, &work);
        out->done_ns = !(out->done_ns > 0) && bt_batch_ends_one(rows, n) ? now : out->done_ns;
        bt_batch_apply(b, rows, n);
    }
    for (uint32_t i = 0; i < b->n; i++) {
        const struct bt_batch_seq *s = &b->seqs[i];
        now += s->kind == BT_BATCH_PROMPT
                   ? bt_batch_prefill_ns(b->cost, s->pos, s->len, s->chunk_tokens)
                   : 0;
    }
    return now;
}

void bt_batch_ahead(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n_rows,
                    uint32_t chunk, struct bt_batch_ahead *out)
{
    struct newcomer x = {0};
    *out = (struct bt_batch_ahead){0};
    if (n_rows > 0) {
        out->step_ns = bt_batch_step_ns(b->cost, b, rows, n_rows);
        out->done_ns = bt_batch_ends_one(rows, n_rows) ? out->step_ns : 0;
        bt_batch_apply(b, rows, n_rows);
    }
    chunk = BT_MIN(chunk > 0 ? chunk : b->lim.max_rows, b->lim.max_rows);
    out->all_ns = roll(b, out->step_ns, chunk, &x, out);
    out->done_ns = out->done_ns > 0 ? out->done_ns : out->all_ns;
    out->chunks_begin_ns = x.chunks > 0 ? out->chunks_begin_ns : out->all_ns;
    for (uint32_t i = x.chunks; i < BT_BATCH_AHEAD_CHUNKS; i++) {
        out->chunks_beside_ns[i] = x.beside_ns;
    }
}

double bt_batch_ahead_of(const struct bt_batch_ahead *a, const struct bt_batch_cost *c,
                         uint32_t from, uint32_t to, uint32_t chunk, double *beside_p)
{
    uint32_t tokens = to - from, chunks = chunk > 0 ? BT_DIV_UP(to, chunk) - from / chunk : 1;
    if (chunks > 1) {
        *beside_p = a->chunks_beside_ns[BT_MIN(chunks, (uint32_t)BT_BATCH_AHEAD_CHUNKS) - 1];
        return a->chunks_begin_ns;
    }
    *beside_p = 0;
    for (uint32_t i = 0; i < a->n_joins; i++) {
        if (tokens <= a->joins[i].most_tokens) {
            double with = prompt_ns(c, a->joins[i].tokens + tokens);
            *beside_p = a->joins[i].step_ns + with - prompt_ns(c, a->joins[i].tokens) -
                        prompt_ns(c, tokens);
            return a->joins[i].begin_ns;
        }
    }
    return a->all_ns;
}
