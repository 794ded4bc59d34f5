/* The memory that a plan needs; see sizing.h. */
#include "conductor/sim/sizing.h"

#include <math.h>

#include "conductor/sim/report.h"

#define GIB       0x1p30
#define LEAST_GIB 4    /* the smallest slab that is tried */
#define MOST_GIB  4096 /* the largest one */
/* a slab that saves this share of what an unlimited slab saves is large enough */
#define NEAR  0.95
#define SPARE 1.25 /* workers for this multiple of the load, so that one may fail */

static double hit_ratio(const struct bt_sim_trace *t, const struct bt_sim_cluster *base,
                        const struct bt_sim_options *options, double slab_gib, double ssd_gib)
{
    struct bt_sim_cluster c = *base;
    struct bt_sim_options o = *options;
    struct bt_sim_summary sum;
    struct bt_sim_result r;
    c.cache_tokens = slab_gib * GIB / c.token_bytes;
    c.ssd_tokens = ssd_gib * GIB / c.token_bytes;
    o.sample_ms = 0;
    o.progress = NULL;
    bt_sim_run(&c, t, &o, &r);
    bt_sim_summarize(&r, &o, &sum);
    bt_sim_result_cleanup(&r);
    return sum.hit_ratio;
}

void bt_sim_sizing(FILE *out, const struct bt_sim_trace *t, const struct bt_sim_cluster *c,
                   const struct bt_sim_options *o, uint32_t gpus, double capacity, double per_s)
{
    uint32_t instances = (uint32_t)(c->prefill_nodes + c->decode_nodes);
    double all = hit_ratio(t, c, o, 0, 0), got = 0, tried = 0,
           pages = c->kv_tokens * c->token_bytes;
    fprintf(out, "workers        %.0f instances carry this load with %.0f %% to spare\n",
            BT_MAX(ceil(SPARE * per_s * instances / capacity), 2.0), 100 * (SPARE - 1));
    fprintf(out, "engine.mem     %.0f GiB a GPU: %.0f tokens of rows on an instance\n",
            pages / gpus / GIB, c->kv_tokens);
    if (all < 0.01) {
        fprintf(out, "slab           no two prompts of this trace share a prefix worth keeping: "
                     "kvstore.slab_bytes is for hand-off alone (docs/SIZING.md)\n");
        return;
    }
    fprintf(
        out,
        "slab           kvstore.slab_bytes for each instance, and the prompt tokens that are not "
        "computed:\n");
    for (double gib = LEAST_GIB; gib <= MOST_GIB && got < NEAR * all; gib *= 2) {
        got = hit_ratio(t, c, o, gib, 0);
        tried = gib;
        fprintf(out, "               %6.0f GiB  %5.1f %%\n", gib, 100 * got);
    }
    fprintf(out, "               no limit    %5.1f %%\n", 100 * all);
    double small = BT_MAX(tried / 8, (double)LEAST_GIB);
    if (tried > LEAST_GIB) {
        fprintf(out,
                "ssd            a slab of %.0f GiB with kvstore.ssd.bytes of %.0f GiB: %.1f %%\n",
                small, tried, 100 * hit_ratio(t, c, o, small, tried));
    }
}
