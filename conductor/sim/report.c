/* Summaries of a run, and its requests as CSV lines. */
#include "conductor/sim/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The index of a percentile in n sorted values: the smallest value that at least p percent do not
 * exceed, as in baton-bench. */
static uint32_t rank(uint64_t percent, uint32_t n)
{
    return (uint32_t)BT_DIV_UP(percent * n, 100) - 1;
}

static struct bt_sim_quantiles quantiles(double *v, uint32_t n)
{
    struct bt_sim_quantiles q = {0};
    if (n == 0) {
        return q;
    }
    qsort(v, n, sizeof(*v), by_value);
    for (uint32_t i = 0; i < n; i++) {
        q.mean += v[i] / n;
    }
    q.p50 = v[rank(50, n)];
    q.p90 = v[rank(90, n)];
    q.p99 = v[rank(99, n)];
    q.max = v[n - 1];
    return q;
}

/* Uses the samples until the last arrival: after it the load only falls, which would look like a
 * swing. */
static void loads(const struct bt_sim_result *r, struct bt_sim_summary *s)
{
    double n = 0, p = 0, d = 0, pp = 0, dd = 0, pd = 0;
    for (uint32_t i = 0; i < r->n_samples && r->samples[i].at_ms <= r->span_ms; i++) {
        double x = r->samples[i].prefill_load, y = r->samples[i].decode_load;
        n++;
        p += x;
        d += y;
        pp += x * x;
        dd += y * y;
        pd += x * y;
    }
    if (n < 2) {
        return;
    }
    double vp = pp / n - p / n * (p / n), vd = dd / n - d / n * (d / n);
    s->swing = vd > 0 ? sqrt(vd) : 0;
    s->phase = vp > 0 && vd > 0 ? (pd / n - p / n * (d / n)) / sqrt(vp * vd) : 0;
}

void bt_sim_summarize(const struct bt_sim_result *r, const struct bt_sim_options *o,
                      struct bt_sim_summary *s)
{
    memset(s, 0, sizeof(*s));
    double *ttft = bt_malloc((r->n + 1) * sizeof(*ttft)),
           *tbt = bt_malloc((r->n + 1) * sizeof(*tbt));
    uint32_t n_ttft = 0, n_tbt = 0;
    s->n = r->n;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct bt_sim_record *x = &r->records[i];
        s->outcomes[x->outcome]++;
        if (x->outcome != BT_SIM_SERVED) {
            continue;
        }
        ttft[n_ttft++] = x->ttft_ms;
        if (x->tbt_ms > 0) {
            tbt[n_tbt++] = x->tbt_ms;
        }
        s->good += (o->ttft_ms == 0 || x->ttft_ms <= o->ttft_ms) &&
                   (o->tbt_ms == 0 || x->tbt_ms <= o->tbt_ms);
    }
    s->ttft_ms = quantiles(ttft, n_ttft);
    s->tbt_ms = quantiles(tbt, n_tbt);
    s->goodput = r->span_ms > 0 ? 1e3 * s->good / r->span_ms : 0;
    s->hit_ratio = r->input_tokens != 0 ? (double)r->cached_tokens / (double)r->input_tokens : 0;
    s->fetched_ratio =
        r->input_tokens != 0 ? (double)r->fetched_tokens / (double)r->input_tokens : 0;
    s->ssd_ratio = r->input_tokens != 0 ? (double)r->ssd_tokens / (double)r->input_tokens : 0;
    s->prefill_busy = r->prefill_node_ms > 0 ? r->prefill_busy_ms / r->prefill_node_ms : 0;
    loads(r, s);
    free(ttft);
    free(tbt);
}

static void print_quantiles(FILE *f, const char *name, const struct bt_sim_quantiles *q)
{
    fprintf(f, "%-14s mean %.2f  p50 %.2f  p90 %.2f  p99 %.2f  max %.2f ms\n", name, q->mean,
            q->p50, q->p90, q->p99, q->max);
}

void bt_sim_print(FILE *f, const struct bt_sim_result *r, const struct bt_sim_summary *s)
{
    fprintf(f, "%-14s %u in %.1f s:", "requests", s->n, r->span_ms / 1e3);
    for (int i = BT_SIM_SERVED; i < BT_SIM_OUTCOMES; i++) {
        fprintf(f, " %s %u", bt_sim_outcome_names[i], s->outcomes[i]);
    }
    fputc('\n', f);
    print_quantiles(f, "TTFT", &s->ttft_ms);
    print_quantiles(f, "TBT", &s->tbt_ms);
    fprintf(f, "%-14s %u within the objectives", "goodput", s->good);
    if (r->span_ms > 0) { /* with a single arrival time there is no rate */
        fprintf(f, ", %.3f a second of arrivals", s->goodput);
    }
    fprintf(f, "; no scheduler can reach more than %u\n", s->bound);
    fprintf(f,
            "%-14s %.4f of %" PRIu64
            " prompt tokens: %.4f in the node's own slab, %.4f on its SSD, %.4f fetched\n",
            "hit ratio", s->hit_ratio, r->input_tokens,
            s->hit_ratio - s->fetched_ratio - s->ssd_ratio, s->ssd_ratio, s->fetched_ratio);
    fprintf(f, "%-14s fetch %.1f  hand-off %.1f  slab to GPU %.1f  written to SSD %.1f GB\n",
            "bytes", r->bytes_fetch / 1e9, r->bytes_handoff / 1e9, r->bytes_load / 1e9,
            r->bytes_written / 1e9);
    fprintf(f, "%-14s %.3f busy, %.1f s of it for requests refused afterwards\n", "prefill",
            s->prefill_busy, r->wasted_ms / 1e3);
    if (r->copies != 0) {
        fprintf(f, "%-14s %u of hot prefixes ahead of need, %.1f GB\n", "copies", r->copies,
                r->bytes_copied / 1e9);
    }
    if (r->role_changes != 0) {
        fprintf(f, "%-14s %u changes by load\n", "roles", r->role_changes);
    }
    if (r->replans != 0) {
        fprintf(f, "%-14s %u times, as a node had failed\n", "planned again", r->replans);
    }
    fprintf(f, "%-14s standard deviation %.3f, correlation with the prefill load %.2f\n",
            "decode load", s->swing, s->phase);
}

void bt_sim_write_requests(FILE *f, const struct bt_sim_result *r)
{
    fputs("request,at_ms,outcome,ttft_ms,tbt_ms,end_ms,plan_ttft_ms,plan_tbt_ms,cached_tokens,"
          "fetched_tokens,prefill,decode\n",
          f);
    for (uint32_t i = 0; i < r->n; i++) {
        const struct bt_sim_record *x = &r->records[i];
        fprintf(f, "%u,%.3f,%s,%.3f,%.4f,%.3f,%.3f,%.4f,%u,%u,%u,%u\n", i, x->at_ms,
                bt_sim_outcome_names[x->outcome], x->ttft_ms, x->tbt_ms, x->end_ms, x->plan_ttft_ms,
                x->plan_tbt_ms, x->cached_tokens, x->fetched_tokens, x->prefill, x->decode);
    }
}

void bt_sim_write_series(FILE *f, const struct bt_sim_result *r)
{
    fputs("at_ms,prefill_load,decode_load,arrived,refused,prefill_nodes,replicas\n", f);
    for (uint32_t i = 0; i < r->n_samples; i++) {
        const struct bt_sim_sample *x = &r->samples[i];
        fprintf(f, "%.0f,%.4f,%.4f,%u,%u,%u,%" PRIu64 "\n", x->at_ms, x->prefill_load,
                x->decode_load, x->arrived, x->refused, x->prefill_nodes, x->replicas);
    }
}
