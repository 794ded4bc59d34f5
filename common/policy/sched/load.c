/* Combines a worker's heartbeat and the work that was sent to it into the worker that policies see.
 * Pure: see load.h. */
#include "common/policy/sched/load.h"

#include <math.h>

static double slow_of(const struct bt_sched_learned *l)
{
    return l->slow > 0 ? l->slow : 1;
}

struct bt_sched_pace bt_sched_pace_of(const struct bt_sched_said *said,
                                      const struct bt_sched_learned *learned, bool prefill)
{
    struct bt_sched_pace pace = {.max_rows = UINT32_MAX, .slow = slow_of(learned)};
    if (said != NULL) {
        pace.cost = said->has_cost && prefill ? &said->cost : NULL;
        pace.max_rows = said->max_rows != 0 ? said->max_rows : UINT32_MAX;
        pace.chunk_tokens = said->chunk_tokens;
    }
    return pace;
}

/* ---- work that was sent to it ---- */

void bt_sched_own_init(struct bt_sched_own *own)
{
    *own = (struct bt_sched_own){0};
    bt_sched_backlog_init(&own->backlog);
}

void bt_sched_own_prompt(struct bt_sched_own *own, struct bt_sched_prompt *p,
                         const struct bt_sched_pace *pace, uint64_t now_ns)
{
    bt_sched_backlog_add(&own->backlog, p, pace, now_ns);
    bt_classes_join(&own->classes, p->priority)->queue_ns += 1e6 * p->alone_ms;
}

void bt_sched_own_prompt_done(struct bt_sched_own *own, struct bt_sched_prompt *p,
                              const struct bt_sched_pace *pace, uint64_t now_ns)
{
    bt_sched_backlog_done(&own->backlog, p, pace, now_ns);
    bt_classes_at(&own->classes, p->priority)->queue_ns -= 1e6 * p->alone_ms;
    bt_classes_leave(&own->classes, p->priority);
}

/* ---- what policies see ---- */

/* The queue: the time until the worker's prompts are computed, without those of lower classes. It
 * is the larger of two values: the queue in its last heartbeat minus the time since then, and this
 * conductor's own prompts there. The unit is predicted time; a slow worker does less than that in a
 * ms. */
static void show_queue(const struct bt_sched_said *said, const struct bt_sched_own *own,
                       double slow, uint64_t now_ns, double said_behind, double own_behind,
                       struct bt_sched_worker *w)
{
    const struct bt_sched_backlog *q = &own->backlog;
    double by_word = said->queue_ms - said_behind - (double)(now_ns - said->at_ns) / 1e6 / slow;
    double by_own = bt_sched_backlog_ms(q, own_behind, slow, now_ns);
    w->queue.ms = BT_MAX(BT_MAX(by_word, by_own), 0);
    /* A new prompt can share steps only if exactly the prompts before it were simulated. */
    double before_ms = q->alone_ms - own_behind;
    bool alike = fabs(before_ms - q->rolled_ms) <= 1e-6 * q->rolled_ms;
    w->queue.ahead = q->rolled_ms > 0 && alike ? &q->ahead : NULL;
    w->queue.ahead_past_ms =
        bt_sched_backlog_past_ms(q, slow, now_ns) - BT_MAX(by_word - by_own, 0);
}

/* Late rows on their way, by the worker's heartbeat, from any conductor: no row is preempted for
 * them. */
static uint32_t said_late(const struct bt_sched_said *said)
{
    const struct bt_classes *c = &said->classes;
    const struct bt_class *last = c->n != 0 ? &c->of[c->n - 1] : NULL;
    return last != NULL && last->priority == BT_SCHED_CLASS_LATE ? last->landing : 0;
}

void bt_sched_show_worker(const struct bt_sched_said *said, const struct bt_sched_own *own,
                          const struct bt_sched_learned *learned, uint64_t now_ns,
                          struct bt_sched_worker *w)
{
    uint32_t rows = own->rows - BT_MIN(own->late, own->rows);
    uint64_t kv = own->kv_tokens - BT_MIN(own->late_kv, own->kv_tokens);
    *w = (struct bt_sched_worker){
        .kvstore = BT_SCHED_NONE,
        .queue = {.own_tokens = own->prefill_tokens},
        .rows = {.own = rows,
                 .own_coming = rows - BT_MIN(own->decoding, rows),
                 .own_coming_tokens = kv - BT_MIN(own->decoding_kv, kv),
                 .own_late_tokens = own->late_kv},
        .learned = *learned,
    };
    if (said == NULL) {
        return;
    }
    w->rows.landing = BT_MIN(said->landing, said->waiting);
    w->rows.waiting = said->waiting - w->rows.landing;
    w->rows.landing -= BT_MIN(said_late(said), w->rows.landing);
    w->rows.running = BT_MAX(said->running, own->decoding);
    if (rows > w->rows.running + said->waiting) { /* sent since its last heartbeat */
        w->rows.landing = rows - w->rows.running - w->rows.waiting;
    }
    w->capacity.pages = said->pages_total;
    w->capacity.pages_free = said->pages_free;
    w->capacity.slots = said->slots_total;
    w->capacity.context_tokens = said->max_model_len;
    w->queue.tokens = said->queued_prefill_tokens;
    w->speed.prefill_tokens_per_s = said->prefill_tokens_per_s;
    w->speed.step_ms = said->step_ms;
    w->speed.row_tokens = said->row_tokens;
    w->speed.chunk_tokens = said->chunk_tokens;
    w->rows.kv_tokens = BT_MAX(said->kv_tokens, own->decoding_kv);
    w->speed.cost = said->has_cost ? &said->cost : NULL;
    w->speed.mixed_step_ms = said->mixed_step_ms;
    w->speed.mixed_gap_ms = said->mixed_gap_ms;
    show_queue(said, own, slow_of(learned), now_ns, 0, 0, w);
}

void bt_sched_show_class(const struct bt_sched_said *said, const struct bt_sched_own *own,
                         const struct bt_sched_learned *learned, uint64_t now_ns, int32_t priority,
                         struct bt_sched_worker *w)
{
    if (said == NULL) {
        return;
    }
    /* Workers distinguish classes of 16 bits. */
    struct bt_class below =
        bt_classes_below(&said->classes, BT_MIN(BT_MAX(priority, INT16_MIN), INT16_MAX));
    struct bt_class mine = bt_classes_below(&own->classes, priority);
    double all = w->queue.ms;
    if (mine.queue_ns > 0 || below.queue_ns > 0) {
        show_queue(said, own, slow_of(learned), now_ns, below.queue_ns / 1e6, mine.queue_ns / 1e6,
                   w);
        w->queue.late_ms = all - w->queue.ms;
    }
    w->rows.waiting -= BT_MIN(below.waiting - below.landing, w->rows.waiting);
    /* None of the counts includes late rows on their way, so they must not be subtracted. */
    uint32_t landing = below.landing - BT_MIN(said_late(said), below.landing);
    uint32_t rows = mine.rows - BT_MIN(own->late, mine.rows);
    w->rows.yield = BT_MAX(below.rows + landing, rows);
    w->rows.yield_pages = below.pages;
}
