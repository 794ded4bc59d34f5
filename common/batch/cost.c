/* The cost of a step as a function of its contents. Pure: see cost.h. */
#include "common/batch/cost.h"

#include <math.h>

const uint32_t bt_batch_segment_end[BT_BATCH_SEGMENTS] = {8, 64, 256, UINT32_MAX};

double bt_batch_experts_ns(const struct bt_batch_cost *c, double tokens)
{
    return c->experts_ns > 0 ? c->experts_ns * (1 - pow(c->missed, tokens)) : 0;
}

static double tokens_ns(const struct bt_batch_cost *c, double tokens)
{
    double ns = c->base_ns + bt_batch_experts_ns(c, tokens), from = 0;
    for (uint32_t s = 0; s < BT_BATCH_SEGMENTS && tokens > from; s++) {
        double end = BT_MIN((double)bt_batch_segment_end[s], tokens);
        ns += c->token_ns[s] * (end - from);
        from = end;
    }
    return ns;
}

double bt_batch_work_ns(const struct bt_batch_cost *c, const struct bt_batch_work *w)
{
    return w->tokens > 0 ? tokens_ns(c, w->tokens) + c->kv_ns * w->kv + c->attn_ns * w->attn : 0;
}

double bt_batch_prefill_ns(const struct bt_batch_cost *c, double from, double to, double chunk)
{
    double n = to - from;
    if (n <= 0) {
        return 0;
    }
    /* Chunks end at multiples of their length (a flow's items do): a prefix that ends between two
     * makes the first one shorter and may make one more. */
    double first = chunk > 0 ? (floor(from / chunk) + 1) * chunk - from : n;
    double ns = tokens_ns(c, BT_MIN(first, n));
    if (n > first) {
        double whole = floor((n - first) / chunk), rest = n - first - whole * chunk;
        ns += whole * tokens_ns(c, chunk) + (rest > 0 ? tokens_ns(c, rest) : 0);
    }
    /* The sum of n (h + n/2) over the chunks is that of the whole. */
    return ns + c->attn_ns * n * (from + n / 2);
}
