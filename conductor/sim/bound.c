/* How many prompts could be in time if all nodes worked as one. See bound.h. */
#include "conductor/sim/bound.h"

#include <stdlib.h>

#include "conductor/sim/capacity.h"

struct slot { /* a job of the current busy period */
    double release_ms, work_ms, start_ms;
};

/* Returns the job whose removal makes the busy period end earliest. The time that it frees moves
 * later jobs forward, but none of them to before its release. */
static uint32_t most_in_the_way(const struct slot *s, uint32_t n)
{
    double passed = 1e300, best = -1;
    uint32_t at = n - 1;
    for (uint32_t k = n; k-- > 0;) {
        double gain = s[k].work_ms;
        if (k + 1 < n) {
            double next = BT_MAX(s[k + 1].release_ms, s[k].start_ms);
            gain = BT_MIN(passed, s[k + 1].start_ms - next);
            passed = BT_MIN(passed, s[k + 1].start_ms - s[k + 1].release_ms);
            gain = BT_MIN(gain, passed);
        }
        if (gain > best) {
            best = gain;
            at = k;
        }
    }
    return at;
}

uint32_t bt_sim_most_in_time(const struct bt_sim_due_job *jobs, uint32_t n, double due_ms)
{
    struct slot *s = bt_malloc(BT_MAX(n, 1u) * sizeof(*s));
    uint32_t in_time = 0, m = 0;
    double end = -1e300;
    for (uint32_t i = 0; i < n; i++) {
        if (jobs[i].work_ms > due_ms) {
            continue;
        }
        if (jobs[i].release_ms >= end) { /* idle: the jobs before are settled */
            in_time += m;
            m = 0;
            end = jobs[i].release_ms;
        }
        s[m++] = (struct slot){jobs[i].release_ms, jobs[i].work_ms, end};
        end += jobs[i].work_ms;
        if (end <= jobs[i].release_ms + due_ms) {
            continue;
        }
        uint32_t k = most_in_the_way(s, m);
        double at = s[k].start_ms;
        for (m--; k < m; k++) {
            s[k] = s[k + 1];
            s[k].start_ms = BT_MAX(at, s[k].release_ms);
            at = s[k].start_ms + s[k].work_ms;
        }
        end = m > 0 ? s[m - 1].start_ms + s[m - 1].work_ms : at;
    }
    free(s);
    return in_time + m;
}

uint32_t bt_sim_bound(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                      const struct bt_sim_options *o)
{
    uint32_t first = (uint32_t)(o->from * t->n), last = (uint32_t)(o->to * t->n), n = 0;
    if (o->ttft_ms == 0) {
        return last - first;
    }
    double nodes = (uint32_t)c->prefill_nodes + (uint32_t)c->decode_nodes;
    struct bt_sim_due_job *jobs = bt_malloc(BT_MAX(last - first, 1u) * sizeof(*jobs));
    bool *seen = bt_calloc(BT_MAX(t->n_unique, 1u), sizeof(*seen));
    struct bt_batch_cost cost = c->prefill;
    cost.base_ns = cost.experts_ns = 0; /* prompts may share steps */
    for (uint32_t i = first; i < last; i++) {
        const struct bt_sim_request *q = &t->requests[i];
        const uint32_t *blocks = t->blocks + q->first;
        uint32_t k = 0, limit = (q->input - 1) / BT_SIM_BLOCK_TOKENS;
        while (k < limit && seen[blocks[k]]) {
            k++;
        }
        for (uint32_t b = 0; b < q->input / BT_SIM_BLOCK_TOKENS; b++) {
            seen[blocks[b]] = true;
        }
        uint32_t cached = k * BT_SIM_BLOCK_TOKENS;
        double ms = 1e-6 * bt_batch_prefill_ns(&cost, cached, q->input, (uint32_t)c->chunk_tokens);
        if (ms <= o->ttft_ms) {
            double at = (q->at_ms - t->requests[first].at_ms) / o->rate;
            jobs[n++] = (struct bt_sim_due_job){at, ms / nodes};
        }
    }
    uint32_t most = bt_sim_most_in_time(jobs, n, o->ttft_ms);
    free(jobs);
    free(seen);
    return BT_MIN(most, bt_sim_capacity(c, t, o));
}
