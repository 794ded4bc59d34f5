/* The run: the trace's arrivals and all events in order of time, with samples between them. */
#include "conductor/sim/sim.h"

#include <stdlib.h>
#include <string.h>

#include "conductor/sim/sim_priv.h"

/* The series ends here if a link or node is so slow that the run takes simulated years. */
#define SAMPLES_MAX 1000000

const char *const bt_sim_outcome_names[BT_SIM_OUTCOMES] = {
    "pending",       "served",         "refused_ttft",  "refused_tbt",
    "refused_price", "refused_decode", "refused_other", "lost"};

/* ---- samples ---- */

static void sample(struct bt_sim *s)
{
    struct bt_sim_result *r = s->r;
    if (r->n_samples == s->sample.cap) {
        s->sample.cap = s->sample.cap != 0 ? 2 * s->sample.cap : 1024;
        r->samples = bt_realloc(r->samples, s->sample.cap * sizeof(*r->samples));
    }
    double p = 0, d = 0;
    uint32_t n_p = 0, n_d = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        p += s->workers[i].prefill ? bt_sim_queue_ms(s, i) : 0;
        d += s->workers[i].decode ? bt_sim_decode_step_ms(s->d[i].d) : 0;
        n_p += s->workers[i].prefill;
        n_d += s->workers[i].decode;
    }
    p /= BT_MAX(n_p, 1u);
    d /= BT_MAX(n_d, 1u);
    r->samples[r->n_samples++] =
        (struct bt_sim_sample){.at_ms = s->now_ms,
                               .prefill_load = s->o->ttft_ms != 0 ? p / s->o->ttft_ms : 0,
                               .decode_load = s->o->tbt_ms != 0 ? d / s->o->tbt_ms : 0,
                               .arrived = s->sample.arrived,
                               .refused = s->sample.refused,
                               .prefill_nodes = n_p,
                               .replicas = bt_sim_caches_replicas(s->caches)};
    s->sample.arrived = s->sample.refused = 0;
    s->sample.at_ms += s->o->sample_ms;
}

/* Moves the time to at_ms and takes the samples that lie before it. */
static void advance_to(struct bt_sim *s, double at_ms)
{
    while (s->o->sample_ms != 0 && s->sample.at_ms <= at_ms && s->r->n_samples < SAMPLES_MAX) {
        s->now_ms = s->sample.at_ms;
        sample(s);
    }
    s->now_ms = at_ms;
}

/* ---- the run ---- */

static void step(struct bt_sim *s)
{
    struct bt_sim_event e = bt_sim_events_pop(&s->events);
    if ((e.type == EV_DECODE && e.version != s->d[e.id].version) ||
        (e.type == EV_PREFILL && e.version != s->p[e.id].version) ||
        ((e.type == EV_FAIL || e.type == EV_BACK || e.type == EV_LOOK) && s->finished == s->r->n)) {
        return;
    }
    advance_to(s, e.at_ms);
    switch ((bt_sim_event_t)e.type) {
    case EV_PREFILL: bt_sim_compute_step(s, e.id); break;
    case EV_HANDOFF_END: bt_sim_row_handed(s, e.id); break;
    case EV_PROMPT: bt_sim_compute_beside(s, e.id); break;
    case EV_DECODE: bt_sim_rows_step(s, e.id); break;
    case EV_FAIL: bt_sim_node_fail(s, &s->o->failures[e.id]); break;
    case EV_BACK: bt_sim_node_back(s, e.id); break;
    case EV_REPLAN: bt_sim_replan(s, e.id); break;
    case EV_AGAIN: bt_sim_decide(s, e.id); break;
    case EV_LOOK: bt_sim_nodes_look_at_roles(s); break;
    case EV_COPY: bt_sim_copy_end(s); break;
    }
}

void bt_sim_run(const struct bt_sim_cluster *cluster, const struct bt_sim_trace *trace,
                const struct bt_sim_options *o, struct bt_sim_result *r)
{
    memset(r, 0, sizeof(*r));
    uint32_t first = (uint32_t)(o->from * trace->n), last = (uint32_t)(o->to * trace->n);
    struct bt_sim s = {.c = cluster,
                       .t = trace,
                       .o = o,
                       .r = r,
                       .req = trace->requests + first,
                       .n_p = (uint32_t)cluster->prefill_nodes,
                       .n = (uint32_t)cluster->prefill_nodes + (uint32_t)cluster->decode_nodes,
                       .sample.at_ms = o->sample_ms};
    r->n = last - first;
    r->records = bt_calloc(BT_MAX(r->n, 1u), sizeof(*r->records));
    s.live = bt_calloc(r->n, sizeof(*s.live));
    bt_sim_nodes_init(&s);
    bt_sched_copies_init(&s.copies, o->replica_bytes_per_s, o->replica_uses, 0);
    bt_sim_lengths_init(&s);
    bt_sim_show_init(&s);
    for (uint32_t id = 0; id < r->n; id++) {
        double at = (s.req[id].at_ms - s.req[0].at_ms) / o->rate;
        while (s.events.n > 0 && s.events.heap[0].at_ms <= at) {
            step(&s);
        }
        advance_to(&s, at);
        r->records[id].at_ms = at;
        r->span_ms = at;
        bt_sim_arrive(&s, id);
    }
    while (s.events.n > 0) {
        step(&s);
    }
    if (o->progress != NULL) {
        o->progress(o->progress_arg, s.finished, r->n);
    }
    bt_sim_nodes_cleanup(&s);
    bt_sim_lengths_cleanup(&s);
    bt_sim_events_cleanup(&s.events);
    free(s.live);
}

void bt_sim_result_cleanup(struct bt_sim_result *r)
{
    free(r->records);
    free(r->samples);
    memset(r, 0, sizeof(*r));
}
