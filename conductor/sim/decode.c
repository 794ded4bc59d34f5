/* The rows of a node are in a heap, ordered by the step at which they end. A log has runs, which
 * are consecutive steps with the same rows; a row's gaps are read from it when the row ends. The
 * worker's batcher cuts steps with prompts one by one. Steps without prompts have all rows, and
 * their times are summed in closed form. */
#include "conductor/sim/decode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bt_sim_live {
    uint64_t end_step; /* the row ends with this step */
    uint32_t id, run;  /* index of its first run */
    uint32_t steps, full_tokens, before;
    double first_ms, joined_ms;
    bool late;
};

struct queue { /* ring */
    struct bt_sim_row *rows;
    uint32_t first, n, cap;
};

struct run { /* steps with the same rows */
    uint32_t steps;
    double ms; /* sum over all steps */
};

struct gap {
    double ms;
    uint32_t n;
};

#define PROMPTS 16 /* of those that wait: the ones that a step is cut from */

struct part {
    uint32_t prompt, n; /* index, tokens */
};

struct bt_sim_decode {
    struct bt_batch_cost cost;
    double kv_max, reserved;
    uint32_t rows_max;
    struct bt_sim_live *heap;
    uint32_t n, heap_cap;
    struct queue wait[2];             /* [1]: late ones */
    uint32_t n_late;                  /* of the n rows */
    struct bt_batch_cost prompt_cost; /* of steps without rows */
    struct bt_batch_cost mixed_cost;  /* of steps with rows and prompts */
    double mixed_ms;                  /* prompt tokens may fill a step with rows up to this time */
    double gap_ms;                    /* ... up to this time with the longest wait of a new row */
    double waited_ms;                 /* longest wait of the rows that join in the next step */
    uint32_t chunk_max;
    uint32_t landing;              /* rows on their way here */
    struct bt_sim_prompt *prompts; /* [0..n_prompts), in order of arrival, late ones last */
    uint32_t n_prompts, prompts_cap;
    double cut_ms;             /* the next step's time if it has prompts */
    struct bt_batch_seq *seqs; /* scratch: rows, then prompts */
    struct bt_batch_row *rows; /* scratch */
    uint32_t seqs_cap;
    struct part parts[PROMPTS]; /* of prompts in the next step */
    uint32_t n_parts;
    struct run *runs;
    uint32_t n_runs, runs_cap;
    struct gap *gaps; /* scratch */
    uint32_t gaps_cap;
    double at_ms;   /* a step's boundary at which the state below holds */
    uint64_t step;  /* steps done */
    double kv;      /* context of the rows */
    uint32_t ahead; /* steps until the next change, 0: there is none */
};

#define GROW(array, n, cap)                                                                        \
    do {                                                                                           \
        if ((n) == (cap)) {                                                                        \
            (cap) = (cap) != 0 ? 2 * (cap) : 64;                                                   \
            (array) = bt_realloc((array), (size_t)(cap) * sizeof(*(array)));                       \
        }                                                                                          \
    } while (0)

struct bt_sim_decode *bt_sim_decode_create(const struct bt_batch_cost *cost, double kv_tokens,
                                           uint32_t rows_max)
{
    struct bt_sim_decode *d = bt_calloc(1, sizeof(*d));
    d->cost = *cost;
    d->kv_max = kv_tokens;
    d->rows_max = rows_max;
    return d;
}

void bt_sim_decode_destroy(struct bt_sim_decode *d)
{
    if (d != NULL) {
        free(d->heap);
        free(d->wait[0].rows);
        free(d->wait[1].rows);
        free(d->runs);
        free(d->gaps);
        free(d->prompts);
        free(d->seqs);
        free(d->rows);
        free(d);
    }
}

/* ---- steps with prompts ---- */

static void put_seqs(struct bt_sim_decode *d, struct bt_batch *b)
{
    while (d->seqs_cap < d->n + PROMPTS) {
        d->seqs_cap = BT_MAX(2 * d->seqs_cap, 64u);
        d->seqs = bt_realloc(d->seqs, d->seqs_cap * sizeof(*d->seqs));
        d->rows = bt_realloc(d->rows, d->seqs_cap * sizeof(*d->rows));
    }
    b->seqs = d->seqs;
    b->n = 0;
    for (uint32_t i = 0; i < d->n; i++) {
        const struct bt_sim_live *x = &d->heap[i];
        b->seqs[b->n] =
            (struct bt_batch_seq){.order = b->n,
                                  .pos = x->full_tokens - (uint32_t)(x->end_step - d->step),
                                  .kind = BT_BATCH_DECODE};
        b->n++;
    }
    if (d->n > 0) {
        b->seqs[0].waited_ns = 1e6 * d->waited_ms;
    }
    for (uint32_t i = 0; i < BT_MIN(d->n_prompts, (uint32_t)PROMPTS); i++) {
        const struct bt_sim_prompt *p = &d->prompts[i];
        b->seqs[b->n] = (struct bt_batch_seq){.order = b->n,
                                              .pos = p->from,
                                              .len = p->tokens,
                                              .chunk_tokens = d->chunk_max,
                                              .kind = BT_BATCH_PROMPT,
                                              .late = p->late};
        b->n++;
    }
}

/* Cuts the next step as the worker does (decode/mixed_step.c). */
static void cut_step(struct bt_sim_decode *d)
{
    struct bt_batch b = {.lim = {.max_rows = d->chunk_max + d->rows_max,
                                 .block_tokens = BT_MIN(BT_SIM_STEP_TOKENS, d->chunk_max),
                                 .mixed = true,
                                 .rows_due = d->landing > 0}};
    put_seqs(d, &b);
    bool beside = d->n > 0 || d->landing > 0;
    b.cost = d->n > 0 ? &d->mixed_cost : &d->prompt_cost;
    if (beside) {
        double budget = bt_batch_mixed_ns(&b, 1e6 * d->mixed_ms, 1e6 * d->gap_ms);
        b.lim.prompt_tokens = bt_batch_prompt_room(&b, b.cost, budget);
    }
    uint32_t n = bt_batch_decode(&b, d->rows, d->seqs_cap);
    d->n_parts = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (d->rows[i].seq >= d->n) {
            d->parts[d->n_parts++] = (struct part){d->rows[i].seq - d->n, d->rows[i].n};
        }
    }
    d->cut_ms = 1e-6 * bt_batch_step_ns(b.cost, &b, d->rows, n);
}

/* ---- steps of rows alone ---- */

/* The next k steps take a k^2 + b k ms: each step has n more tokens of context than the step
 * before. */
static void shape(const struct bt_sim_decode *d, double *a_p, double *b_p)
{
    struct bt_batch_work rows = {.tokens = d->n, .kv = d->kv};
    double grow = d->cost.kv_ns * d->n / 2;
    *a_p = 1e-6 * grow;
    *b_p = 1e-6 * (bt_batch_work_ns(&d->cost, &rows) - grow);
}

static double steps_ms(const struct bt_sim_decode *d, double k)
{
    double a, b;
    if (d->n_parts > 0) {
        return k * d->cut_ms; /* k is 1: each step is cut separately */
    }
    shape(d, &a, &b);
    return a * k * k + b * k;
}

/* The first boundary of a step at or after ms from now, in steps; at least 1. */
static uint32_t boundary(const struct bt_sim_decode *d, double ms)
{
    double a, b;
    if (d->n_parts > 0) {
        return 1;
    }
    shape(d, &a, &b);
    double k = a > 0 ? (-b + sqrt(b * b + 4 * a * ms)) / (2 * a) : ms / b;
    uint32_t n = (uint32_t)BT_MAX(1.0, floor(k));
    while (n > 1 && steps_ms(d, n - 1) >= ms) {
        n--;
    }
    while (steps_ms(d, n) < ms) {
        n++;
    }
    return n;
}

static void heap_down(struct bt_sim_decode *d, uint32_t i)
{
    struct bt_sim_live x = d->heap[i];
    for (uint32_t c; (c = 2 * i + 1) < d->n; i = c) {
        c += c + 1 < d->n && d->heap[c + 1].end_step < d->heap[c].end_step;
        if (x.end_step <= d->heap[c].end_step) {
            break;
        }
        d->heap[i] = d->heap[c];
    }
    d->heap[i] = x;
}

static void heap_add(struct bt_sim_decode *d, struct bt_sim_live x)
{
    GROW(d->heap, d->n, d->heap_cap);
    uint32_t i = d->n++;
    for (; i > 0 && x.end_step < d->heap[(i - 1) / 2].end_step; i = (i - 1) / 2) {
        d->heap[i] = d->heap[(i - 1) / 2];
    }
    d->heap[i] = x;
}

/* Removes entry i from the heap. */
static void heap_remove(struct bt_sim_decode *d, uint32_t i)
{
    struct bt_sim_live moved = d->heap[--d->n];
    if (i == d->n) {
        return;
    }
    for (; i > 0 && moved.end_step < d->heap[(i - 1) / 2].end_step; i = (i - 1) / 2) {
        d->heap[i] = d->heap[(i - 1) / 2];
    }
    d->heap[i] = moved;
    heap_down(d, i);
}

/* ---- rows join, and late ones make way ---- */

static void queue_push(struct queue *q, const struct bt_sim_row *row, bool front)
{
    if (q->n == q->cap) {
        uint32_t cap = q->cap != 0 ? 2 * q->cap : 64;
        struct bt_sim_row *ring = bt_malloc(cap * sizeof(*ring));
        for (uint32_t i = 0; i < q->n; i++) {
            ring[i] = q->rows[(q->first + i) % q->cap];
        }
        free(q->rows);
        *q = (struct queue){ring, 0, q->n, cap};
    }
    q->first = front ? (q->first + q->cap - 1) % q->cap : q->first;
    q->rows[(q->first + (front ? 0 : q->n)) % q->cap] = *row;
    q->n++;
}

static double full_of(const struct bt_sim_row *row)
{
    return (double)row->tokens + row->steps;
}

static double late_reserved(const struct bt_sim_decode *d)
{
    double reserved = 0;
    for (uint32_t i = 0; d->n_late > 0 && i < d->n; i++) {
        reserved += d->heap[i].late ? d->heap[i].full_tokens : 0;
    }
    return reserved;
}

/* Returns whether there is room for the row, or would be if late rows were preempted. */
static bool has_room(const struct bt_sim_decode *d, const struct bt_sim_row *row, bool with_late)
{
    uint32_t rows = d->n - (with_late ? d->n_late : 0);
    double reserved = d->reserved - (with_late ? late_reserved(d) : 0);
    return rows < d->rows_max && reserved + full_of(row) <= d->kv_max;
}

/* The late row that joined last waits again, in front of all other late rows. Its KV is in the
 * pool. */
static void make_way(struct bt_sim_decode *d)
{
    uint32_t last = UINT32_MAX;
    for (uint32_t i = 0; i < d->n; i++) {
        if (d->heap[i].late && (last == UINT32_MAX || d->heap[i].run >= d->heap[last].run)) {
            last = i;
        }
    }
    struct bt_sim_live x = d->heap[last];
    uint32_t left = (uint32_t)(x.end_step - d->step), done = x.steps - left;
    struct bt_sim_row row = {.id = x.id,
                             .tokens = x.full_tokens - left,
                             .steps = left,
                             .first_ms = done != 0 ? d->at_ms : x.first_ms,
                             .late = true,
                             .before = x.before + done};
    queue_push(&d->wait[1], &row, true);
    heap_remove(d, last);
    d->kv -= row.tokens;
    d->reserved -= x.full_tokens;
    d->n_late--;
}

static void join(struct bt_sim_decode *d, const struct bt_sim_row *w)
{
    heap_add(d, (struct bt_sim_live){.end_step = d->step + w->steps,
                                     .id = w->id,
                                     .run = d->n_runs,
                                     .steps = w->steps,
                                     .full_tokens = w->tokens + w->steps,
                                     .before = w->before,
                                     .first_ms = w->first_ms,
                                     .joined_ms = d->at_ms,
                                     .late = w->late});
    if (!w->late) { /* a late row makes no step shorter */
        d->waited_ms = BT_MAX(d->waited_ms, d->at_ms - w->first_ms);
    }
    d->n_late += w->late;
    d->kv += w->tokens;
    d->reserved += full_of(w);
}

/* The oldest waiting rows join while there is room for the prompt and the whole answer. Late rows
 * join only when no other row waits. */
static void admit(struct bt_sim_decode *d)
{
    for (int late = 0; late < 2; late++) {
        struct queue *q = &d->wait[late];
        for (; q->n > 0; q->n--, q->first = (q->first + 1) % q->cap) {
            const struct bt_sim_row *w = &q->rows[q->first];
            if (!has_room(d, w, late == 0)) {
                return;
            }
            while (!has_room(d, w, false)) {
                make_way(d);
            }
            join(d, w);
        }
    }
}

static void plan_next(struct bt_sim_decode *d)
{
    d->n_parts = 0;
    if (d->n_prompts > 0) {
        cut_step(d);
        d->ahead = 1;
        return;
    }
    d->ahead = d->n != 0 ? (uint32_t)(d->heap[0].end_step - d->step) : 0;
}

static bool idle(const struct bt_sim_decode *d)
{
    return d->n == 0 && d->n_prompts == 0;
}

void bt_sim_decode_mix(struct bt_sim_decode *d, const struct bt_batch_cost *prompt, double mixed_ms,
                       double gap_ms, uint32_t chunk_max)
{
    d->prompt_cost = *prompt;
    d->mixed_cost = *prompt;
    d->mixed_cost.base_ns = d->cost.base_ns;
    d->mixed_cost.kv_ns = d->cost.kv_ns;
    d->mixed_cost.experts_ns = d->cost.experts_ns;
    d->mixed_cost.missed = d->cost.missed;
    d->mixed_ms = mixed_ms;
    d->gap_ms = gap_ms;
    d->chunk_max = chunk_max;
}

/* The steps change at the next boundary. */
static void interrupt(struct bt_sim_decode *d, double now_ms)
{
    d->ahead = BT_MIN(d->ahead, boundary(d, now_ms - d->at_ms));
}

bool bt_sim_decode_expect(struct bt_sim_decode *d, double now_ms, int sign)
{
    d->landing += (uint32_t)sign;
    if (sign < 0 || d->landing > 1 || d->n != 0 || d->n_prompts == 0 || now_ms <= d->at_ms) {
        return false;
    }
    interrupt(d, now_ms);
    return true;
}

void bt_sim_decode_prompt(struct bt_sim_decode *d, double now_ms, const struct bt_sim_prompt *p)
{
    bool first = d->n_prompts == 0, was_idle = idle(d);
    bool between = now_ms <= d->at_ms && (d->n == 0 || d->heap[0].end_step != d->step);
    if (first && !was_idle && !between) {
        interrupt(d, now_ms); /* the steps do not change before the boundary */
    }
    GROW(d->prompts, d->n_prompts, d->prompts_cap);
    uint32_t at = d->n_prompts++;
    for (; !p->late && at > d->n_parts && d->prompts[at - 1].late; at--) {
        d->prompts[at] = d->prompts[at - 1];
    }
    d->prompts[at] = *p;
    if (first && (was_idle || between)) {
        d->at_ms = BT_MAX(d->at_ms, now_ms);
        plan_next(d);
    }
}

bool bt_sim_decode_add(struct bt_sim_decode *d, double now_ms, const struct bt_sim_row *row)
{
    if ((double)row->tokens + row->steps > d->kv_max) {
        return false;
    }
    bool next = d->wait[0].n + (row->late ? d->wait[1].n : 0) == 0;
    queue_push(&d->wait[row->late], row, false);
    if (idle(d) || (now_ms <= d->at_ms && (d->n == 0 || d->heap[0].end_step != d->step))) {
        /* idle or at a boundary: the row may join at once */
        d->at_ms = BT_MAX(d->at_ms, now_ms);
        admit(d);
        plan_next(d);
    } else if (next && has_room(d, row, !row->late)) {
        interrupt(d, now_ms);
    }
    return true;
}

double bt_sim_decode_next_ms(const struct bt_sim_decode *d)
{
    if (idle(d)) {
        return -1;
    }
    return d->ahead == 0 ? d->at_ms : d->at_ms + steps_ms(d, d->ahead);
}

static int longer_first(const void *a, const void *b)
{
    double x = ((const struct gap *)a)->ms, y = ((const struct gap *)b)->ms;
    return (x < y) - (x > y);
}

/* The mean of the longest tenth of all gaps; they are sorted. */
static double longest_tenth(const struct gap *gaps, uint32_t n_gaps)
{
    uint32_t want = BT_DIV_UP(n_gaps, 10u), have = 0;
    double sum = 0;
    for (uint32_t i = 0; have < want; i++) {
        uint32_t k = BT_MIN(gaps[i].n, want - have);
        sum += k * gaps[i].ms;
        have += k;
    }
    return want != 0 ? sum / want : 0;
}

/* Collects the row's gaps in d->gaps, the first one of all alone in front; it also holds the wait
 * for its step. Steps of one run count with the run's mean. Returns entries. */
static uint32_t collect_gaps(struct bt_sim_decode *d, const struct bt_sim_live *x)
{
    uint32_t n = 0, left = x->steps;
    double wait = x->joined_ms - x->first_ms;
    for (uint32_t r = x->run; left > 0; r++) {
        struct run *run = &d->runs[r];
        double ms = run->ms / run->steps;
        uint32_t k = BT_MIN(run->steps, left);
        left -= k;
        for (int part = 0; part < 2; part++) {
            uint32_t steps = part == 0 ? (r == x->run ? 1 : 0) : k - (r == x->run ? 1 : 0);
            if (steps == 0) {
                continue;
            }
            GROW(d->gaps, n, d->gaps_cap);
            d->gaps[n++] = (struct gap){part == 0 ? ms + wait : ms, steps};
        }
    }
    return n;
}

/* Describes the row, which ends now. */
static struct bt_sim_done end_row(struct bt_sim_decode *d, const struct bt_sim_live *x)
{
    uint32_t n = collect_gaps(d, x), i = 0;
    struct gap first = d->gaps[0];
    struct bt_sim_done done = {.id = x->id,
                               .end_ms = d->at_ms,
                               .n_gaps = x->steps,
                               .first_gap_ms = first.ms,
                               .life_ms = d->at_ms - x->first_ms};
    qsort(d->gaps + 1, n - 1, sizeof(*d->gaps), longer_first);
    done.others_ms = longest_tenth(d->gaps + 1, x->steps - 1);
    for (; i + 1 < n && d->gaps[i + 1].ms > first.ms; i++) {
        d->gaps[i] = d->gaps[i + 1];
    }
    d->gaps[i] = first;
    done.tbt_ms = longest_tenth(d->gaps, x->steps);
    return done;
}

/* Removes the prompts that are completely computed. */
static uint32_t take_computed(struct bt_sim_decode *d, struct bt_sim_done *done, uint32_t max)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < BT_MIN(d->n_prompts, (uint32_t)PROMPTS) && n < max;) {
        if (d->prompts[i].from < d->prompts[i].tokens) {
            i++;
            continue;
        }
        done[n++] =
            (struct bt_sim_done){.id = d->prompts[i].id, .prompt = true, .end_ms = d->at_ms};
        memmove(d->prompts + i, d->prompts + i + 1, (--d->n_prompts - i) * sizeof(*d->prompts));
    }
    return n;
}

uint32_t bt_sim_decode_advance(struct bt_sim_decode *d, struct bt_sim_done *done, uint32_t max)
{
    if (d->ahead > 0) {
        double ms = steps_ms(d, d->ahead);
        for (uint32_t i = 0; i < d->n_parts; i++) {
            d->prompts[d->parts[i].prompt].from += d->parts[i].n;
        }
        d->n_parts = 0;
        GROW(d->runs, d->n_runs, d->runs_cap);
        d->runs[d->n_runs++] = (struct run){d->ahead, ms};
        d->at_ms += ms;
        d->kv += (double)d->n * d->ahead;
        d->step += d->ahead;
        d->ahead = 0;
        d->waited_ms = 0;
    }
    uint32_t n = take_computed(d, done, max);
    while (d->n > 0 && d->heap[0].end_step == d->step && n < max) {
        struct bt_sim_live x = d->heap[0];
        done[n++] = end_row(d, &x);
        d->kv -= x.full_tokens;
        d->reserved -= x.full_tokens;
        d->n_late -= x.late;
        heap_remove(d, 0);
    }
    if (d->n == 0 || d->heap[0].end_step != d->step) {
        admit(d);
        plan_next(d);
    }
    return n;
}

void bt_sim_decode_fail(struct bt_sim_decode *d, double now_ms,
                        void (*lost)(void *arg, uint32_t id, uint32_t generated, bool prompt),
                        void *arg)
{
    uint32_t k = 0; /* whole steps since the last change */
    if (d->ahead > 0 && now_ms > d->at_ms) {
        k = boundary(d, now_ms - d->at_ms);
        k -= steps_ms(d, k) > now_ms - d->at_ms;
        k = BT_MIN(k, d->ahead);
    }
    for (uint32_t i = 0; i < d->n; i++) {
        const struct bt_sim_live *x = &d->heap[i];
        uint32_t left = (uint32_t)(x->end_step - d->step);
        lost(arg, x->id, x->before + x->steps - left + BT_MIN(k, left), false);
    }
    for (int late = 0; late < 2; late++) {
        struct queue *q = &d->wait[late];
        for (; q->n > 0; q->n--, q->first = (q->first + 1) % q->cap) {
            lost(arg, q->rows[q->first].id, q->rows[q->first].before, false);
        }
    }
    for (uint32_t i = 0; i < d->n_prompts; i++) {
        lost(arg, d->prompts[i].id, 0, true);
    }
    d->n = d->n_late = d->n_prompts = d->n_parts = d->ahead = 0;
    d->kv = d->reserved = d->waited_ms = 0;
    d->step += k;
    d->at_ms = now_ms;
}

void bt_sim_decode_each(const struct bt_sim_decode *d,
                        void (*row)(void *arg, uint32_t id, uint32_t generated), void *arg)
{
    for (uint32_t i = 0; i < d->n; i++) {
        const struct bt_sim_live *x = &d->heap[i];
        uint32_t left = (uint32_t)BT_MAX(x->end_step - d->step, 1u); /* the row has not ended */
        row(arg, x->id, x->before + x->steps + 1 - left);
    }
}

/* Rows of the first queue that find room now, late rows making way. */
static struct bt_sim_held joining(const struct bt_sim_decode *d)
{
    const struct queue *q = &d->wait[0];
    struct bt_sim_held j = {0};
    uint32_t rows = d->n - d->n_late;
    double reserved = q->n > 0 ? d->reserved - late_reserved(d) : 0;
    while (j.rows < q->n) {
        const struct bt_sim_row *w = &q->rows[(q->first + j.rows) % q->cap];
        if (rows + j.rows >= d->rows_max || reserved + j.reserved + full_of(w) > d->kv_max) {
            break;
        }
        j.rows++;
        j.kv += w->tokens;
        j.reserved += full_of(w);
    }
    return j;
}

struct bt_sim_held bt_sim_decode_running(const struct bt_sim_decode *d)
{
    struct bt_sim_held j = joining(d);
    return (struct bt_sim_held){d->n + j.rows, d->kv + j.kv, d->reserved + j.reserved};
}

struct bt_sim_held bt_sim_decode_waiting(const struct bt_sim_decode *d)
{
    const struct queue *q = &d->wait[0];
    uint32_t joins = joining(d).rows;
    struct bt_sim_held w = {.rows = q->n - joins};
    for (uint32_t i = joins; i < q->n; i++) {
        w.kv += q->rows[(q->first + i) % q->cap].tokens;
    }
    return w;
}

struct bt_sim_late bt_sim_decode_late(const struct bt_sim_decode *d)
{
    return (struct bt_sim_late){d->n_late, d->wait[1].n, late_reserved(d)};
}

double bt_sim_decode_step_ms(const struct bt_sim_decode *d)
{
    return idle(d) ? 0 : steps_ms(d, 1);
}

uint64_t bt_sim_decode_steps(const struct bt_sim_decode *d)
{
    return d->step;
}

double bt_sim_decode_prompt_ms(const struct bt_sim_decode *d)
{
    double ns = 0;
    for (uint32_t i = 0; i < d->n_prompts; i++) {
        ns += bt_batch_prefill_ns(&d->prompt_cost, d->prompts[i].from, d->prompts[i].tokens,
                                  d->chunk_max);
    }
    return ns / 1e6;
}
