/* Simulates a worker's steps. Each report of a computed prompt corrects the simulation. Pure: see
 * backlog.h. */
#include "common/policy/sched/backlog.h"

#include "common/policy/sched/sched.h"

void bt_sched_backlog_init(struct bt_sched_backlog *q)
{
    *q = (struct bt_sched_backlog){0};
    bt_list_init(&q->prompts);
}

/* The batcher's state: prompts of the queue by class and arrival. */
struct steps {
    struct bt_batch b;
    struct bt_batch_seq seqs[BT_BATCH_AHEAD_SEQS];
    struct bt_batch_row rows[BT_BATCH_AHEAD_SEQS]; /* of the step under way */
    uint32_t n_rows;
    struct bt_sched_prompt *who[BT_BATCH_AHEAD_SEQS];
};

static void insert(struct steps *s, struct bt_sched_prompt *p)
{
    uint32_t i = s->b.n++;
    while (i > 0 && s->who[i - 1]->priority > p->priority) {
        s->who[i] = s->who[i - 1];
        i--;
    }
    s->who[i] = p;
}

/* Takes the first prompts of the queue, without late ones: no prompt waits for those, and they
 * share no step. Returns the sum of their times. */
static double take_first(struct bt_sched_backlog *q, struct steps *s)
{
    double alone_ms = 0;
    struct bt_list *l;
    s->b.n = 0;
    bt_list_for_each (l, &q->prompts) {
        struct bt_sched_prompt *p = BT_CONTAINER_OF(l, struct bt_sched_prompt, link);
        if (s->b.n == BT_BATCH_AHEAD_SEQS) {
            break;
        }
        if (p->priority < BT_SCHED_CLASS_LATE) {
            insert(s, p);
            alone_ms += p->alone_ms;
        }
    }
    return alone_ms;
}

static void fill(struct steps *s, const struct bt_sched_pace *pace)
{
    s->n_rows = 0;
    for (uint32_t i = 0; i < s->b.n; i++) {
        const struct bt_sched_prompt *p = s->who[i];
        s->seqs[i] = (struct bt_batch_seq){.order = i,
                                           .pos = p->pos,
                                           .len = p->len,
                                           .chunk_tokens = pace->chunk_tokens,
                                           .kind = BT_BATCH_PROMPT};
        if (p->in_step > 0) {
            s->rows[s->n_rows++] = (struct bt_batch_row){
                .seq = i, .pos = p->pos, .n = p->in_step, .last = p->pos + p->in_step == p->len};
        }
    }
}

static void begin_step(struct steps *s)
{
    s->n_rows = bt_batch_prefill(&s->b, s->rows, BT_BATCH_AHEAD_SEQS);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        s->who[s->rows[i].seq]->in_step = s->rows[i].n;
    }
}

static void end_step(struct steps *s)
{
    bt_batch_apply(&s->b, s->rows, s->n_rows);
    for (uint32_t i = 0; i < s->b.n; i++) {
        s->who[i]->pos += s->who[i]->in_step;
        s->who[i]->in_step = 0;
    }
    s->n_rows = 0;
}

/* Ends the steps that should be over by now, but none that completes a prompt, because the worker
 * reports those. If no step is under way, the next one begins now. */
static void pass_time(struct bt_sched_backlog *q, struct steps *s, const struct bt_sched_pace *pace,
                      uint64_t now_ns)
{
    if (s->n_rows == 0) {
        q->from_ns = now_ns;
        begin_step(s);
    }
    while (s->n_rows > 0 && !bt_batch_ends_one(s->rows, s->n_rows)) {
        double ns = pace->slow * bt_batch_step_ns(pace->cost, &s->b, s->rows, s->n_rows);
        if (q->from_ns + (uint64_t)ns > now_ns) {
            return;
        }
        end_step(s);
        begin_step(s);
        q->from_ns += (uint64_t)ns;
    }
}

static void open_steps(struct bt_sched_backlog *q, struct steps *s,
                       const struct bt_sched_pace *pace)
{
    s->b = (struct bt_batch){.lim = {.max_rows = pace->max_rows, .block_tokens = 1},
                             .seqs = s->seqs,
                             .cost = pace->cost};
    q->rolled_ms = take_first(q, s);
    fill(s, pace);
}

/* Predicts the coming steps from the step under way. */
static void look_ahead(struct bt_sched_backlog *q, const struct bt_sched_pace *pace,
                       uint64_t now_ns)
{
    struct steps s;
    q->rolled_ms = 0;
    q->ahead = (struct bt_batch_ahead){0};
    if (pace->cost == NULL) {
        return;
    }
    open_steps(q, &s, pace);
    pass_time(q, &s, pace, now_ns);
    bt_batch_ahead(&s.b, s.rows, s.n_rows, pace->chunk_tokens, &q->ahead);
}

void bt_sched_backlog_add(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                          const struct bt_sched_pace *pace, uint64_t now_ns)
{
    if (bt_list_empty(&q->prompts)) {
        q->alone_ms = 0;
        q->from_ns = now_ns;
    }
    bt_list_insert_tail(&q->prompts, &p->link);
    p->in_step = 0;
    q->alone_ms += p->alone_ms;
    look_ahead(q, pace, now_ns);
}

static bool is_in(const struct steps *s, const struct bt_sched_prompt *p)
{
    for (uint32_t i = 0; i < s->b.n; i++) {
        if (s->who[i] == p) {
            return true;
        }
    }
    return false;
}

/* The worker reports p as computed: the steps that p still needed are over, also for the prompts
 * beside and before it, and a new step begins. */
static void catch_up(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                     const struct bt_sched_pace *pace, uint64_t now_ns)
{
    struct steps s;
    open_steps(q, &s, pace);
    while (is_in(&s, p) && p->pos < p->len && s.n_rows > 0) {
        end_step(&s);
        begin_step(&s);
    }
    for (uint32_t i = 0; i < s.b.n; i++) {
        s.who[i]->in_step = 0;
    }
    q->from_ns = now_ns;
}

void bt_sched_backlog_done(struct bt_sched_backlog *q, struct bt_sched_prompt *p,
                           const struct bt_sched_pace *pace, uint64_t now_ns)
{
    bool head = q->prompts.next == &p->link;
    if (pace->cost != NULL && p->priority < BT_SCHED_CLASS_LATE) {
        catch_up(q, p, pace, now_ns);
    } else if (head) { /* in order of arrival */
        q->from_ns = now_ns;
    }
    bt_list_remove(&p->link);
    q->alone_ms = bt_list_empty(&q->prompts) ? 0 : q->alone_ms - p->alone_ms;
    look_ahead(q, pace, now_ns);
}

double bt_sched_backlog_past_ms(const struct bt_sched_backlog *q, double slow, uint64_t now_ns)
{
    double ms = (double)(now_ns - q->from_ns) / 1e6 / slow;
    return q->rolled_ms > 0 ? BT_MIN(ms, q->ahead.done_ns / 1e6) : ms;
}

double bt_sched_backlog_ms(const struct bt_sched_backlog *q, double without_ms, double slow,
                           uint64_t now_ns)
{
    double ms = q->alone_ms - q->rolled_ms + q->ahead.all_ns / 1e6 - without_ms;
    return ms > 0 ? BT_MAX(ms - bt_sched_backlog_past_ms(q, slow, now_ns), 0) : 0;
}
