/* The contents of an engine step, and its cost. PURE plain values: the worker fits a cost to its
 * own steps (fit.h), heartbeats carry it, and the conductor's scheduler and the simulator predict
 * with it. */
#ifndef BT_BATCH_COST_H
#define BT_BATCH_COST_H

#include "common/base/base.h"

/* Segments of the number of tokens in a step: 1 to 8, to 64, to 256, and beyond. A few rows cost
 * almost nothing beside reading the weights; many are bound by arithmetic. Where the one becomes
 * the other depends on the machine. */
#define BT_BATCH_SEGMENTS 4
extern const uint32_t bt_batch_segment_end[BT_BATCH_SEGMENTS]; /* last token of each */

/* Time of a step: a[bucket] + b KV + c sum(n) + d sum(n (h + n/2)) + experts, in ns, over prompts
 * of n tokens behind h cached ones. a[bucket]
 * and c are one curve here, piecewise linear in sum(n): base plus token_ns[s] for each token of
 * segment s. A mixture of experts reads the experts that the step's N = sum(n) tokens hit: of all
 * of them a share of 1 - missed^N, if routing is uniform and tokens are routed on their own. */
struct bt_batch_cost {
    double base_ns;
    double token_ns[BT_BATCH_SEGMENTS];
    double kv_ns;      /* each token of context that a decode row reads */
    double attn_ns;    /* each pair of a prompt token and one before it */
    double experts_ns; /* reading all experts of all layers; 0: the model has none */
    double missed;     /* share of the experts that one token does not use, [0, 1); not fitted */
};
/* The same price for every token of a step. */
#define BT_BATCH_TOKEN_NS(x)                                                                       \
    {                                                                                              \
        (x), (x), (x), (x)                                                                         \
    }

struct bt_batch_work { /* of one step */
    double tokens;     /* sum(n) over all rows */
    double kv;         /* sum of the context of decode rows, of each of a row's tokens */
    double attn;       /* sum of n (h + n/2) over prompt rows, h: tokens before the row */
    bool prompt;       /* has a prompt row */
};

/* The experts' part of a step of this number of tokens. */
double bt_batch_experts_ns(const struct bt_batch_cost *c, double tokens);
/* 0 for a step without tokens. */
double bt_batch_work_ns(const struct bt_batch_cost *c, const struct bt_batch_work *w);
/* A prompt's tokens [from, to) alone, in steps that end at multiples of chunk (0: all in one); ns.
 */
double bt_batch_prefill_ns(const struct bt_batch_cost *c, double from, double to, double chunk);

#endif
