/* Prefill and decode batchers and their cost model. Pure functions over struct bt_batch: they touch
 * their arguments only; the engine thread calls them for real. See batch.h. */
#include "common/batch/batch.h"

/* Tokens that the prompt at *s may compute within budget: up to the prompt's end or the end of its
 * flow chunk, and on a block boundary otherwise. 0: the budget is too small for one block. */
static uint32_t chunk_len(const struct bt_batch_limits *lim, const struct bt_batch_seq *s,
                          uint32_t budget)
{
    uint32_t n = s->len - s->pos;
    if (s->chunk_tokens > 0) {
        n = BT_MIN(n, s->chunk_tokens - s->pos % s->chunk_tokens);
    }
    if (s->stop > s->pos) {
        n = BT_MIN(n, s->stop - s->pos);
    }
    if (n <= budget) {
        /* the whole chunk; without a flow, up to the prompt's end; a step may end at both */
        return n;
    }
    uint32_t end = (s->pos + budget) / lim->block_tokens * lim->block_tokens;
    return end > s->pos ? end - s->pos : 0;
}

static void put_row(const struct bt_batch *b, uint32_t i, uint32_t n, struct bt_batch_row *row)
{
    const struct bt_batch_seq *s = &b->seqs[i];
    uint32_t end = s->pos + n;
    row->seq = i;
    row->pos = s->pos;
    row->n = n;
    row->last = s->kind == BT_BATCH_DECODE || end == s->len;
    row->chunk_end = s->kind == BT_BATCH_PROMPT && s->chunk_tokens > 0 &&
                     (end == s->len || end % s->chunk_tokens == 0);
}

static bool waits(const struct bt_batch_seq *s)
{
    return s->kind == BT_BATCH_PROMPT && s->pos < s->len;
}

uint32_t bt_batch_waiting(const struct bt_batch *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        n += waits(&b->seqs[i]);
    }
    return n;
}

bool bt_batch_ends_one(const struct bt_batch_row *rows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (rows[i].last) {
            return true;
        }
    }
    return false;
}

/* Adds the work of a row: n prompt tokens behind pos others. */
static void add_prompt(struct bt_batch_work *w, double pos, double n)
{
    w->tokens += n;
    w->attn += n * (pos + n / 2);
    w->prompt = true;
}

bool bt_batch_joins(const struct bt_batch *b, const struct bt_batch_work *w,
                    const struct bt_batch_seq *s, uint32_t n, uint32_t before, uint32_t behind)
{
    struct bt_batch_work with = *w;
    add_prompt(&with, s->pos, n);
    double later = bt_batch_work_ns(b->cost, &with) - bt_batch_work_ns(b->cost, w);
    double chunk = s->chunk_tokens > 0 ? s->chunk_tokens : b->lim.max_rows;
    double alone = bt_batch_prefill_ns(b->cost, s->pos, s->len, chunk);
    double rest = bt_batch_prefill_ns(b->cost, s->pos + n, s->len, chunk);
    return before * later < behind * (alone - rest - later);
}

/* The tokens, whole blocks of them, that a late prompt at *s computes within BT_BATCH_LATE_NS. */
static uint32_t late_room(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t budget)
{
    uint32_t least = 1, most = BT_MAX(budget / b->lim.block_tokens, 1u);
    while (b->cost != NULL && least < most) {
        uint32_t blocks = least + (most - least + 1) / 2;
        struct bt_batch_work w = {0};
        add_prompt(&w, s->pos, (double)blocks * b->lim.block_tokens);
        if (bt_batch_work_ns(b->cost, &w) <= BT_BATCH_LATE_NS) {
            least = blocks;
        } else {
            most = blocks - 1;
        }
    }
    return b->cost != NULL ? BT_MIN(budget, least * b->lim.block_tokens) : budget;
}

/* Prompts in order into budget tokens. A late one is in no step of others. A prompt that gets
 * nothing ends the round: a younger one must not overtake it into the room that it will need. cost:
 * only such as pay, or in a trial twice as many. */
static uint32_t fill_prompts(const struct bt_batch *b, uint32_t budget, bool cost,
                             struct bt_batch_row *rows, uint32_t max)
{
    struct bt_batch_work w = {0};
    uint32_t n_rows = 0, behind = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        behind += waits(&b->seqs[i]) && !b->seqs[i].late;
    }
    for (uint32_t i = 0; i < b->n && n_rows < max && budget > 0; i++) {
        const struct bt_batch_seq *s = &b->seqs[i];
        if (!waits(s)) {
            continue;
        }
        if (s->late && n_rows > 0) {
            break;
        }
        budget = s->late ? late_room(b, s, budget) : budget;
        uint32_t n = chunk_len(&b->lim, s, budget);
        if (n == 0) {
            break;
        }
        if (cost && n_rows > 0 && !bt_batch_joins(b, &w, s, n, n_rows, behind)) {
            if (!b->trial) {
                break;
            }
            max = BT_MIN(max, 2 * n_rows);
            cost = false;
        }
        add_prompt(&w, s->pos, n);
        put_row(b, i, n, &rows[n_rows++]);
        budget -= n;
        behind--;
    }
    return n_rows;
}

uint32_t bt_batch_prefill(const struct bt_batch *b, struct bt_batch_row *rows, uint32_t max)
{
    return fill_prompts(b, b->lim.max_rows, b->cost != NULL, rows, max);
}

static uint32_t n_decodes(const struct bt_batch *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        n += b->seqs[i].kind == BT_BATCH_DECODE;
    }
    return n;
}

uint32_t bt_batch_decode(struct bt_batch *b, struct bt_batch_row *rows, uint32_t max)
{
    uint32_t prompts = bt_batch_waiting(b), decodes = n_decodes(b);
    uint32_t n_rows = 0, budget = b->lim.max_rows, used = 0;
    /* Too little room for a block beside a row counts as not mixed: turns are fair to both. */
    bool mixed = b->lim.mixed && budget > b->lim.block_tokens && max > 1;
    if (!mixed && prompts > 0 && decodes > 0) {
        b->prompt_turn = !b->prompt_turn;
        if (b->prompt_turn) {
            return fill_prompts(b, budget, false, rows, max);
        }
        prompts = 0;
    }
    uint32_t room = BT_MIN(max, budget), drafts = budget - BT_MIN(decodes, budget);
    if (prompts > 0) {
        /* Keep a block (and a row) for the oldest prompt. */
        room = BT_MIN(budget - BT_MIN(budget, b->lim.block_tokens), max - BT_MIN(max, 1u));
        drafts -= BT_MIN(drafts, b->lim.block_tokens);
    }
    uint32_t start = decodes > room && b->n > 0 ? b->cursor % b->n : 0;
    for (uint32_t k = 0; k < b->n && n_rows < room; k++) {
        uint32_t i = (start + k) % b->n;
        if (b->seqs[i].kind == BT_BATCH_DECODE) {
            uint32_t more = BT_MIN(b->seqs[i].drafts, drafts);
            put_row(b, i, 1 + more, &rows[n_rows++]);
            b->cursor = i + 1;
            drafts -= more;
            used += 1 + more;
        }
    }
    budget -= used;
    if (prompts > 0) {
        if ((n_rows > 0 || b->lim.rows_due) && b->lim.prompt_tokens > 0) {
            budget = BT_MIN(budget, BT_MAX(b->lim.prompt_tokens, b->lim.block_tokens));
        }
        n_rows += fill_prompts(b, budget, false, rows + n_rows, max - n_rows);
    }
    return n_rows;
}

void bt_batch_apply(struct bt_batch *b, const struct bt_batch_row *rows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct bt_batch_seq *s = &b->seqs[rows[i].seq];
        s->pos = rows[i].pos + rows[i].n;
        if (!rows[i].last) {
            continue;
        }
        /* The step sampled one token. */
        if (s->left > 0) {
            s->left--;
        }
        s->kind = s->left > 0 ? BT_BATCH_DECODE : BT_BATCH_DONE;
    }
}

struct bt_batch_work bt_batch_work_of(const struct bt_batch *b, const struct bt_batch_row *rows,
                                      uint32_t n)
{
    struct bt_batch_work w = {0};
    for (uint32_t i = 0; i < n; i++) {
        if (b->seqs[rows[i].seq].kind == BT_BATCH_DECODE) {
            w.tokens += rows[i].n;
            w.kv += (double)rows[i].n * rows[i].pos;
        } else {
            add_prompt(&w, rows[i].pos, rows[i].n);
        }
    }
    return w;
}

double bt_batch_mixed_ns(const struct bt_batch *b, double step_ns, double gap_ns)
{
    double waited = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        waited = b->seqs[i].kind == BT_BATCH_DECODE ? BT_MAX(waited, b->seqs[i].waited_ns) : waited;
    }
    return gap_ns > 0 && waited > 0 ? BT_MIN(step_ns, gap_ns - waited) : step_ns;
}

uint32_t bt_batch_prompt_room(const struct bt_batch *b, const struct bt_batch_cost *c,
                              double budget_ns)
{
    struct bt_batch_work w = {.prompt = true};
    const struct bt_batch_seq *oldest = NULL;
    for (uint32_t i = 0; i < b->n; i++) {
        const struct bt_batch_seq *s = &b->seqs[i];
        if (s->kind == BT_BATCH_DECODE) {
            w.tokens += 1 + s->drafts;
            w.kv += (1.0 + s->drafts) * s->pos;
        } else if (waits(s) && !oldest) {
            oldest = s;
        }
    }
    double rows = w.tokens, before = oldest ? oldest->pos : 0;
    uint32_t least = 1, most = BT_MAX(b->lim.max_rows / b->lim.block_tokens, 1u);
    while (least < most) { /* more tokens never cost less */
        uint32_t blocks = least + (most - least + 1) / 2;
        double n = (double)blocks * b->lim.block_tokens;
        w.tokens = rows + n;
        w.attn = n * (before + n / 2);
        if (bt_batch_work_ns(c, &w) <= budget_ns) {
            least = blocks;
        } else {
            most = blocks - 1;
        }
    }
    return least * b->lim.block_tokens;
}

double bt_batch_step_ns(const struct bt_batch_cost *c, const struct bt_batch *b,
                        const struct bt_batch_row *rows, uint32_t n)
{
    struct bt_batch_work w = bt_batch_work_of(b, rows, n);
    return bt_batch_work_ns(c, &w);
}
