/* The least time that prompts and rows take of the nodes, and the price of that time at which the
 * bound is lowest. See capacity.h. */
#include "conductor/sim/capacity.h"

#include <math.h>
#include <stdlib.h>

#define TRIES 44 /* of a price: they narrow a range of 1 to 10^9 to a part in 10^7 */

/* The least cost of a token, in steps of any size. */
static double token_ns(const struct bt_batch_cost *c)
{
    double ns = c->token_ns[0];
    for (uint32_t s = 1; s < BT_BATCH_SEGMENTS; s++) {
        ns = BT_MIN(ns, c->token_ns[s]);
    }
    return ns;
}

static double prompt_ms(const struct bt_sim_cluster *c, double tokens)
{
    return 1e-6 * tokens * (token_ns(&c->prefill) + c->prefill.attn_ns * tokens / 2);
}

/* The cost of the first n steps of a row, without the base: step k reads input + k tokens. */
static double own_ms(const struct bt_sim_cluster *c, double input, double n)
{
    return 1e-6 * n * (token_ns(&c->decode) + c->decode.kv_ns * (input + (n + 1) / 2));
}

/* The cost that every decode step has: the experts of at least one row. */
static double base_ms(const struct bt_sim_cluster *c)
{
    return 1e-6 * (c->decode.base_ns + bt_batch_experts_ns(&c->decode, 1));
}

/* Why the share by TBT is a lower bound: let b be the base and T the objective. Let W be the time
 * that a step's rows would take together if each were at its first step. The step's length D is at
 * least b + W. The rows' shares of the base sum to
 *     b W / (T - b) <= b + b W (D - T) / (T - b)^2.
 * This holds because D - T >= -x with x = T - b - W, and (W - (T - b)) x = -x^2 <= 0. Summed over
 * all steps the last term is at most 0: each row has its own part of W in every step that it is in,
 * and over these steps the mean of D - T is at most 0. */
double bt_sim_rows_ms(const struct bt_sim_cluster *c, uint32_t input, uint32_t n, double tbt_ms,
                      bt_sim_share_t share)
{
    double base = base_ms(c), part = 0;
    switch (share) {
    case BT_SIM_BY_PLACE: part = n / c->rows_max; break;
    case BT_SIM_BY_CONTEXT: part = n * (input + (n + 1) / 2.0) / c->kv_tokens; break;
    case BT_SIM_BY_TBT: part = n * own_ms(c, input, 1) / (tbt_ms - base); break;
    case BT_SIM_SHARES: break;
    }
    return own_ms(c, input, n) + base * part;
}

/* How many of a good request's steps must be done left_ms after its first token. In a good request,
 * the mean of any tenth of the gaps, or of more, is at most the objective. */
static uint32_t made_by(double left_ms, uint32_t steps, double tbt_ms)
{
    double n = tbt_ms > 0 && left_ms > 0 ? BT_MIN(floor(left_ms / tbt_ms), (double)steps) : 0;
    return n >= BT_DIV_UP(steps, 10u) ? (uint32_t)n : 0;
}

struct prices { /* for a price of 1: of any node's time, and in addition of a decode node's */
    double any, decode;
};

static double worth(struct bt_sim_forest *f, const struct prices *p, double price, double node_ms,
                    double decode_ms)
{
    return bt_sim_forest_best(f, price * p->any, price * (p->any + p->decode)) +
           price * (p->any * node_ms + p->decode * decode_ms);
}

/* The least over all prices. It is convex in the price, so this uses golden sections of the price's
 * logarithm. */
static double least(struct bt_sim_forest *f, const struct prices *p, double node_ms,
                    double decode_ms)
{
    const double part = (sqrt(5) - 1) / 2;
    double free = worth(f, p, 0, node_ms, decode_ms), low = log(1e-9), high = 0;
    double a = worth(f, p, exp(low), node_ms, decode_ms);
    if (a >= free) {
        return free; /* the time is not scarce */
    }
    double x = high - part * (high - low), y = low + part * (high - low), b;
    a = worth(f, p, exp(x), node_ms, decode_ms);
    b = worth(f, p, exp(y), node_ms, decode_ms);
    for (uint32_t i = 0; i < TRIES; i++) {
        if (a < b) {
            high = y;
            y = x;
            b = a;
            x = high - part * (high - low);
            a = worth(f, p, exp(x), node_ms, decode_ms);
        } else {
            low = x;
            x = y;
            a = b;
            y = low + part * (high - low);
            b = worth(f, p, exp(y), node_ms, decode_ms);
        }
    }
    return BT_MIN(free, BT_MIN(a, b));
}

uint32_t bt_sim_capacity_of(struct bt_sim_forest *f, double node_ms, double decode_ms)
{
    /* Any prices give a bound. These are for a shortage of either stage and of both. */
    static const struct prices prices[] = {{1, 0}, {1, 1}, {1, 4}, {0, 1}};
    double most = 1e300;
    for (size_t i = 0; i < BT_ARRAY_LEN(prices); i++) {
        most = BT_MIN(most, least(f, &prices[i], node_ms, decode_ms));
    }
    return (uint32_t)(most + 1e-6);
}

uint32_t bt_sim_capacity(const struct bt_sim_cluster *c, const struct bt_sim_trace *t,
                         const struct bt_sim_options *o)
{
    uint32_t first = (uint32_t)(o->from * t->n), n = (uint32_t)(o->to * t->n) - first, deep = 0;
    const struct bt_sim_request *q = t->requests + first;
    struct bt_sim_want *wants = bt_calloc(BT_MAX(n, 1u), sizeof(*wants));
    double span = n != 0 ? (q[n - 1].at_ms - q[0].at_ms) / o->rate : 0, end = span + o->ttft_ms;
    double base = base_ms(c);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t steps = o->one_token ? 0 : q[i].output - 1;
        double alone = own_ms(c, q[i].input, steps) + steps * base;
        wants[i] = (struct bt_sim_want){.at_ms = (q[i].at_ms - q[0].at_ms) / o->rate,
                                        .blocks = t->blocks + q[i].first,
                                        .n_blocks = q[i].input / BT_SIM_BLOCK_TOKENS,
                                        .prompt_ms = prompt_ms(c, q[i].input),
                                        .hopeless = o->tbt_ms > 0 &&
                                                    alone > steps * (double)o->tbt_ms * (1 + 1e-9)};
        deep = BT_MAX(deep, wants[i].n_blocks);
    }
    double *prefix_ms = bt_malloc((deep + 1) * sizeof(*prefix_ms));
    for (uint32_t d = 0; d <= deep; d++) {
        prefix_ms[d] = prompt_ms(c, (double)d * BT_SIM_BLOCK_TOKENS);
    }
    struct bt_sim_forest *f = bt_sim_forest_create(wants, n, prefix_ms, o->ttft_ms);
    double nodes = c->prefill_nodes + c->decode_nodes;
    double decoding = o->roles_window_ms > 0 ? nodes : c->decode_nodes;
    uint32_t most = n;
    for (uint32_t share = 0; share < BT_SIM_SHARES; share++) {
        if (share == BT_SIM_BY_TBT && o->tbt_ms <= base) {
            continue;
        }
        for (uint32_t i = 0; i < n; i++) {
            uint32_t steps = o->one_token ? 0 : q[i].output - 1;
            uint32_t made = made_by(span - wants[i].at_ms, steps, o->tbt_ms);
            wants[i].rows_ms =
                bt_sim_rows_ms(c, q[i].input, made, o->tbt_ms, (bt_sim_share_t)share);
        }
        most = BT_MIN(most, bt_sim_capacity_of(f, nodes * end, decoding * end));
    }
    bt_sim_forest_destroy(f);
    free(prefix_ms);
    free(wants);
    return most;
}
