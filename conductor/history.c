/* A ring of samples; see history.h. Loop thread. */
#include "conductor/history.h"

#include <stdlib.h>

#define STEP_MS 5000
#define SAMPLES 360u /* half an hour */

struct sample {
    uint64_t at_ns; /* wall clock */
    struct bt_requests_stats s;
};

struct bt_history {
    struct bt_loop *loop;
    const struct bt_requests *rs;
    struct bt_timer timer;
    uint32_t n, next;
    struct sample at[SAMPLES];
};

static void take(const struct bt_history *h, struct sample *out)
{
    out->at_ns = bt_real_ns();
    bt_requests_stats(h->rs, &out->s);
}

static void on_step(void *arg)
{
    struct bt_history *h = arg;
    take(h, &h->at[h->next]);
    h->next = (h->next + 1) % SAMPLES;
    h->n = BT_MIN(h->n + 1, SAMPLES);
}

struct bt_history *bt_history_create(struct bt_loop *loop, const struct bt_requests *rs)
{
    struct bt_history *h = bt_calloc(1, sizeof(*h));
    h->loop = loop;
    h->rs = rs;
    on_step(h);
    bt_timer_start(loop, &h->timer, STEP_MS, STEP_MS, on_step, h);
    return h;
}

void bt_history_destroy(struct bt_history *h)
{
    bt_timer_stop(h->loop, &h->timer);
    free(h);
}

static void fill(Baton__AdminSample *m, const struct sample *x)
{
    baton__admin_sample__init(m);
    m->at_ns = x->at_ns;
    m->running = x->s.running;
    m->waiting = x->s.waiting;
    m->finished = x->s.finished;
    m->in_time = x->s.in_time;
    m->failed = x->s.failed;
    m->refused = x->s.refused;
    m->prompt_tokens = x->s.prompt_tokens;
    m->cached_tokens = x->s.cached_tokens;
    m->tokens = x->s.tokens;
    m->ttft_ms = x->s.ttft_ms;
    m->tbt_ms = x->s.tbt_ms;
}

void bt_history_make(const struct bt_history *h, void (*use)(void *arg, const ProtobufCMessage *m),
                     void *arg)
{
    const struct bt_sched_params *p = &bt_requests_config(h->rs)->sched;
    Baton__AdminSample *items = bt_calloc(SAMPLES + 1, sizeof(*items));
    Baton__AdminSample *list[SAMPLES + 1];
    Baton__AdminHistory m = BATON__ADMIN_HISTORY__INIT;
    struct sample now;
    m.step_ms = STEP_MS;
    m.ttft_objective_ms = p->objective.ttft_ms;
    m.tbt_objective_ms = p->objective.tbt_ms;
    m.list = list;
    for (uint32_t i = 0; i < h->n; i++) {
        list[m.n_list] = &items[m.n_list];
        fill(&items[m.n_list++], &h->at[(h->next + SAMPLES - h->n + i) % SAMPLES]);
    }
    take(h, &now);
    list[m.n_list] = &items[m.n_list];
    fill(&items[m.n_list++], &now);
    use(arg, &m.base);
    free(items);
}
