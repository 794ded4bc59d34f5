/* Reads a daemon's load, pool and links from its heartbeats. Loop thread. */
#include <math.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "conductor/view/view_priv.h"

#define MIXED_TELL_NS     1000000000ull /* two heartbeats: all workers have heard and answered */
#define MIXED_ROUNDING_MS 0.01          /* a worker keeps nanoseconds */

/* Takes a worker's step cost. A worker of another version may have fewer segments: the missing ones
 * get the last price. A cost that is not finite or is negative is ignored. */
static void take_cost(struct bt_session *s, const Baton__StepCost *c)
{
    s->load.cost = NULL;
    s->said.has_cost = false;
    if (c == NULL || c->n_token_ns == 0) {
        return;
    }
    struct bt_batch_cost x = {.base_ns = c->base_ns,
                              .kv_ns = c->kv_ns,
                              .attn_ns = c->attn_ns,
                              .experts_ns = c->experts_ns,
                              .missed = c->missed};
    const double more[] = {x.base_ns, x.kv_ns, x.attn_ns, x.experts_ns, x.missed};
    double sum = 0, least = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(more); i++) {
        sum += more[i];
        least = BT_MIN(least, more[i]);
    }
    for (size_t i = 0; i < BT_BATCH_SEGMENTS; i++) {
        x.token_ns[i] = c->token_ns[BT_MIN(i, c->n_token_ns - 1)];
        sum += x.token_ns[i];
        least = BT_MIN(least, x.token_ns[i]);
    }
    if (!isfinite(sum) || least < 0) {
        return;
    }
    s->said.has_cost = true;
    s->said.cost = x;
    s->load_cost = *c;
    s->load_cost.base.n_unknown_fields = 0;
    s->load_cost.base.unknown_fields = NULL;
    s->load_cost.n_token_ns = BT_BATCH_SEGMENTS;
    s->load_cost.token_ns = s->said.cost.token_ns;
    s->load.cost = &s->load_cost;
}

/* Takes the limits of mixed steps that are in force at the worker. A worker that reports none may
 * have any limit, or none: plans then do not rely on it. */
static void take_mixed(struct bt_session *s, const Baton__MixedSteps *m)
{
    bool some = m != NULL && isfinite(m->step_ms) && m->step_ms > 0;
    s->said.mixed_step_ms = some ? m->step_ms : -1;
    s->said.mixed_gap_ms = some && isfinite(m->gap_ms) && m->gap_ms > 0 ? m->gap_ms : 0;
    baton__mixed_steps__init(&s->load_mixed);
    s->load_mixed.step_ms = some ? s->said.mixed_step_ms : 0;
    s->load_mixed.gap_ms = s->said.mixed_gap_ms;
    s->load.mixed = m != NULL ? &s->load_mixed : NULL;
}

void bt_session_note_mixed(struct bt_session *s, uint64_t now_ns)
{
    const struct bt_view *v = s->view;
    bool is_short = v->mixed.step_ms > 0 && s->has_load && s->decode &&
                    (s->said.mixed_step_ms < v->mixed.step_ms - MIXED_ROUNDING_MS ||
                     s->said.mixed_gap_ms < v->mixed.gap_ms - MIXED_ROUNDING_MS);
    if (now_ns - v->mixed.set_ns < MIXED_TELL_NS) {
        return; /* it may not have heard yet */
    }
    double step = is_short ? s->said.mixed_step_ms : 0, gap = is_short ? s->said.mixed_gap_ms : 0;
    if (is_short && (step != s->short_step_ms || gap != s->short_gap_ms)) {
        BT_WARN("mixed_steps_short",
                "worker=%s step_ms=%.1f gap_ms=%.1f asked_step_ms=%.1f asked_gap_ms=%.1f why=%s",
                s->member->name, BT_MAX(step, 0), gap, v->mixed.step_ms, v->mixed.gap_ms,
                s->load.mixed == NULL
                    ? "it runs an older release that takes no limit from conductors, so it gets no "
                      "prompts beside its rows; update it"
                    : "a shorter limit applies there: its own engine.mixed_step_ms or "
                      "engine.mixed_gap_ms, or another conductor's objective");
    }
    s->short_step_ms = step;
    s->short_gap_ms = gap;
}

/* Takes the load of each class. A worker reports at most as many classes as there are places. */
static void take_classes(struct bt_session *s, const Baton__WorkerLoad *l)
{
    s->load.n_classes = 0;
    s->load.classes = NULL;
    s->said.classes = (struct bt_classes){0};
    for (size_t i = 0; i < l->n_classes; i++) {
        const Baton__ClassLoad *k = l->classes[i];
        struct bt_class *to = bt_classes_at(&s->said.classes, k->priority);
        to->queue_ns += k->queue_ms > 0 ? 1e6 * k->queue_ms : 0;
        to->rows += k->rows;
        to->pages += k->pages;
        to->waiting += BT_MAX(k->waiting, k->landing);
        to->landing += k->landing;
    }
}

static void take_load(struct bt_session *s, const Baton__WorkerLoad *l)
{
    struct bt_sched_said *to = &s->said;
    to->at_ns = bt_mono_ns();
    to->running = l->running;
    to->waiting = l->waiting;
    to->landing = l->landing;
    to->pages_total = l->pages_total;
    to->pages_free = l->pages_free;
    to->slots_total = l->slots_total;
    to->max_model_len = l->max_model_len;
    to->max_rows = l->max_rows;
    to->chunk_tokens = l->chunk_tokens;
    to->queued_prefill_tokens = l->queued_prefill_tokens;
    to->kv_tokens = l->kv_tokens;
    to->prefill_tokens_per_s = l->prefill_tokens_per_s;
    to->step_ms = l->step_ms;
    to->row_tokens = l->row_tokens;
    to->queue_ms = l->queue_ms;
}

void bt_session_take_heartbeat(void *arg, const void *heartbeat)
{
    struct bt_session *s = arg;
    const Baton__Heartbeat *h = heartbeat;
    if (h->load != NULL) {
        s->load = *h->load;
        s->load.base.n_unknown_fields = 0;
        s->load.base.unknown_fields = NULL;
        take_load(s, h->load);
        take_cost(s, h->load->cost);
        take_mixed(s, h->load->mixed);
        take_classes(s, h->load);
        s->has_load = true;
    }
    if (h->pool != NULL) {
        s->pool = *h->pool;
        s->pool.base.n_unknown_fields = 0;
        s->pool.base.unknown_fields = NULL;
        s->pool.n_links = 0;
        s->pool.links = NULL;
        s->has_pool = true;
        s->n_links = (uint32_t)BT_MIN(h->pool->n_links, (size_t)BT_SCHED_LINKS_MAX);
        for (uint32_t i = 0; i < s->n_links; i++) {
            const Baton__LinkRate *l = h->pool->links[i];
            s->links[i] =
                (struct bt_sched_link){l->incarnation, l->slab_bytes_per_s, l->ssd_bytes_per_s};
        }
    }
}
