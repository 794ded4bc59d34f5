/* Non-negative recursive least squares over seven features of a step. Pure: see fit.h. */
#include "common/batch/fit.h"

#include <math.h>
#include <string.h>

#define N          BT_BATCH_FIT_N
#define KEEP       (1 - 1.0 / 256) /* memory: some hundred steps of a kind */
#define PRIOR_PULL 0.1             /* of a step in which the coefficient is everything */
#define SWEEPS     6
#define SCALE_N    16 /* first steps that scale the prior */

enum { BASE, TOKENS, KV = TOKENS + BT_BATCH_SEGMENTS, ATTN };

static void features(const struct bt_batch_work *w, double x[N])
{
    double from = 0;
    memset(x, 0, N * sizeof(x[0]));
    x[BASE] = 1;
    for (uint32_t s = 0; s < BT_BATCH_SEGMENTS && w->tokens > from; s++) {
        double end = BT_MIN((double)bt_batch_segment_end[s], w->tokens);
        x[TOKENS + s] = end - from;
        from = end;
    }
    x[KV] = w->kv;
    x[ATTN] = w->attn;
}

static void to_vector(const struct bt_batch_cost *c, double v[N])
{
    v[BASE] = c->base_ns;
    memcpy(v + TOKENS, c->token_ns, sizeof(c->token_ns));
    v[KV] = c->kv_ns;
    v[ATTN] = c->attn_ns;
}

static void from_vector(const double v[N], struct bt_batch_cost *c)
{
    c->base_ns = v[BASE];
    memcpy(c->token_ns, v + TOKENS, sizeof(c->token_ns));
    c->kv_ns = v[KV];
    c->attn_ns = v[ATTN];
}

void bt_batch_fit_init(struct bt_batch_fit *f, const struct bt_batch_cost *prior)
{
    memset(f, 0, sizeof(*f));
    f->cost = *prior;
    to_vector(prior, f->prior);
    for (int i = 0; i < N; i++) {
        BT_ASSERT(f->prior[i] > 0);
    }
}

/* Minimizes over v >= 0: the faded squares of both kinds and the pull to the prior. */
static void solve(const struct bt_batch_fit *f, double v[N])
{
    double scale = exp(f->log_scale);
    for (int sweep = 0; sweep < SWEEPS; sweep++) {
        for (int i = 0; i < N; i++) {
            double prior = f->prior[i] * scale, pull = PRIOR_PULL / (prior * prior);
            double left = f->seen[0].b[i] + f->seen[1].b[i] + pull * prior;
            double own = f->seen[0].a[i][i] + f->seen[1].a[i][i] + pull;
            for (int k = 0; k < N; k++) {
                left -= k != i ? (f->seen[0].a[i][k] + f->seen[1].a[i][k]) * v[k] : 0;
            }
            v[i] = BT_MAX(left / own, 0);
        }
    }
}

/* A prior that is off as a whole, a device a hundred times slower than was thought say, would hold
 * back what its coefficients are pulled to for as long as it is remembered. */
static void scale_prior(struct bt_batch_fit *f, const struct bt_batch_work *w, double ns)
{
    struct bt_batch_cost prior;
    if (f->n_scale == SCALE_N) {
        return;
    }
    from_vector(f->prior, &prior);
    double miss = log(ns / bt_batch_work_ns(&prior, w));
    f->log_scale += (miss - f->log_scale) / ++f->n_scale;
}

double bt_batch_fit_step(struct bt_batch_fit *f, const struct bt_batch_work *w, double ns)
{
    if (!(ns > 0) || !(w->tokens > 0)) {
        return 0;
    }
    double x[N], v[N], predicted = bt_batch_work_ns(&f->cost, w);
    features(w, x);
    to_vector(&f->cost, v);
    scale_prior(f, w, ns);
    int kind = w->prompt ? 1 : 0;
    /* By the larger of the two: a step that the machine held up ten times as long counts as an
     * error of one, not of nine. At first the prior may be off by far more: then by what was seen.
     */
    double scale = f->seen[kind].steps < 8 ? ns : BT_MAX(ns, predicted);
    double weight = 1 / (scale * scale);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            f->seen[kind].a[i][k] = KEEP * f->seen[kind].a[i][k] + weight * x[i] * x[k];
        }
        f->seen[kind].b[i] = KEEP * f->seen[kind].b[i] + weight * x[i] * ns;
    }
    f->seen[kind].steps++;
    solve(f, v);
    from_vector(v, &f->cost);
    return predicted / ns - 1;
}
