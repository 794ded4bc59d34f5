/* Non-negative recursive least squares over eight features of a step. Pure: see fit.h. */
#include "common/batch/fit.h"

#include <math.h>
#include <string.h>

#define N            BT_BATCH_FIT_N
#define KEEP         (1 - 1.0 / 256) /* memory: some hundred steps of a kind */
#define PRIOR_PULL   0.01            /* of a step in which the coefficient is everything */
#define SEEN_SHARE   0.05            /* of what a step would make of the coefficient alone */
#define SHORT_MAX    4 /* a step that was believed to take so many times as long, or more */
#define FIRST_STEPS  32
#define FIRST_ROUNDS 8  /* until what steps say and the pull have settled */
#define SCALE_N      16 /* first steps that scale the prior */

enum { BASE, TOKENS, KV = TOKENS + BT_BATCH_SEGMENTS, ATTN, EXPERTS };

/* missed: of the cost, which is known and not fitted. */
static void features(const struct bt_batch_work *w, double missed, double x[N])
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
    x[EXPERTS] = 1 - pow(missed, w->tokens);
}

static void to_vector(const struct bt_batch_cost *c, double v[N])
{
    v[BASE] = c->base_ns;
    memcpy(v + TOKENS, c->token_ns, sizeof(c->token_ns));
    v[KV] = c->kv_ns;
    v[ATTN] = c->attn_ns;
    v[EXPERTS] = c->experts_ns;
}

static void from_vector(const double v[N], struct bt_batch_cost *c)
{
    c->base_ns = v[BASE];
    memcpy(c->token_ns, v + TOKENS, sizeof(c->token_ns));
    c->kv_ns = v[KV];
    c->attn_ns = v[ATTN];
    c->experts_ns = v[EXPERTS];
}

void bt_batch_fit_init(struct bt_batch_fit *f, const struct bt_batch_cost *prior)
{
    memset(f, 0, sizeof(*f));
    f->cost = *prior;
    to_vector(prior, f->prior);
    for (int i = 0; i < N; i++) {
        BT_ASSERT(f->prior[i] > 0 || i == EXPERTS);
    }
}

/* m x = b for the variables in `free` (the others are 0), m positive definite: Cholesky. */
static void solve_free(double m[N][N], const double b[N], const bool free[N], double x[N])
{
    double l[N][N], y[N];
    int at[N], n = 0;
    for (int i = 0; i < N; i++) {
        x[i] = 0;
        if (free[i]) {
            at[n++] = i;
        }
    }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k <= i; k++) {
            double sum = m[at[i]][at[k]];
            for (int j = 0; j < k; j++) {
                sum -= l[i][j] * l[k][j];
            }
            l[i][k] = i == k ? sqrt(BT_MAX(sum, 1e-12)) : sum / l[k][k];
        }
        y[i] = b[at[i]];
        for (int j = 0; j < i; j++) {
            y[i] -= l[i][j] * y[j];
        }
        y[i] /= l[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int j = i + 1; j < n; j++) {
            y[i] -= l[j][i] * y[j];
        }
        y[i] /= l[i][i];
        x[at[i]] = y[i];
    }
}

/* Steps from x towards z as far as nothing falls below 0; what reaches it is no longer free. True:
 * all the way. */
static bool step_to(double x[N], const double z[N], bool free[N])
{
    double by = 1;
    int stop = -1;
    for (int i = 0; i < N; i++) {
        if (free[i] && z[i] <= 0 && x[i] / (x[i] - z[i]) <= by) {
            by = x[i] / (x[i] - z[i]);
            stop = i;
        }
    }
    for (int i = 0; i < N; i++) {
        x[i] += free[i] ? by * (z[i] - x[i]) : 0;
    }
    if (stop >= 0) {
        x[stop] = 0;
        free[stop] = false;
    }
    return stop < 0;
}

/* min x'mx - 2b'x over x >= 0: the active sets of Lawson and Hanson (Solving Least Squares
 * Problems, 1974). Sweeping over the coordinates does not do: segments and attention are nearly
 * parallel, and it stays hundreds of steps away from the minimum. */
static void minimize(double m[N][N], const double b[N], double x[N])
{
    double z[N];
    bool free[N] = {false};
    memset(x, 0, N * sizeof(x[0]));
    for (int turn = 0; turn < 3 * N; turn++) {
        double best = 1e-9;
        int add = -1;
        for (int i = 0; i < N; i++) {
            double gain = b[i];
            for (int k = 0; k < N; k++) {
                gain -= m[i][k] * x[k];
            }
            if (!free[i] && gain > best) {
                best = gain;
                add = i;
            }
        }
        if (add < 0) {
            break;
        }
        free[add] = true;
        do {
            solve_free(m, b, free, z);
        } while (!step_to(x, z, free));
    }
}

/* The mean of that share over the steps that coefficient i had a part in: 0 without any. */
static double seen_unit(const struct bt_batch_fit *f, int i)
{
    double squares = f->seen[0].a[i][i] + f->seen[1].a[i][i];
    double sum = f->seen[0].b[i] + f->seen[1].b[i];
    return squares > 0 ? SEEN_SHARE * sum / squares : 0;
}

/* The faded squares of both kinds, and a pull to the prior: by its own size, or by the
 * coefficient's where that is larger. By the prior's alone a coefficient twenty times above it
 * would have to pay for four hundred; the shape of a device is not known that well. Nor is it known
 * to orders of magnitude: against a prior that has next to nothing for tokens, what steps say of
 * them could never begin to grow, so a part of what would explain a step alone is the least size.
 */
static void solve(const struct bt_batch_fit *f, double v[N])
{
    double m[N][N], b[N], x[N], unit[N], scale = exp(f->log_scale);
    int rounds = f->seen[0].steps + f->seen[1].steps < FIRST_STEPS ? FIRST_ROUNDS : 1;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < N; i++) {
            unit[i] = BT_MAX(BT_MAX(f->prior[i] * scale, v[i]), seen_unit(f, i));
            unit[i] = unit[i] > 0 ? unit[i] : 1; /* no experts: nothing is seen of them */
        }
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < N; k++) {
                m[i][k] = (f->seen[0].a[i][k] + f->seen[1].a[i][k]) * unit[i] * unit[k];
            }
            m[i][i] += PRIOR_PULL;
            b[i] = (f->seen[0].b[i] + f->seen[1].b[i]) * unit[i] +
                   PRIOR_PULL * f->prior[i] * scale / unit[i];
        }
        minimize(m, b, x);
        for (int i = 0; i < N; i++) {
            v[i] = x[i] * unit[i];
        }
    }
}

/* Tokens beyond all that was seen: rooflines bend up, so there none is cheaper than the mean of
 * those in the largest step. A prior that knows of no price there would have every prompt that
 * waits join one step. */
static void extend(const struct bt_batch_fit *f, double v[N])
{
    double x[N], ns = 0;
    features(&(struct bt_batch_work){.tokens = f->most_tokens}, 1, x);
    for (int i = TOKENS; i < KV; i++) {
        ns += x[i] * v[i];
        if (x[i] == 0) {
            v[i] = BT_MAX(v[i], ns / f->most_tokens);
        }
    }
}

/* A prior that is off as a whole, a device a hundred times slower than was thought say, would hold
 * back what its coefficients are pulled to for as long as it is remembered. */
static void scale_prior(struct bt_batch_fit *f, const struct bt_batch_work *w, double ns)
{
    struct bt_batch_cost prior = {.missed = f->cost.missed};
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
    features(w, f->prior[EXPERTS] > 0 ? f->cost.missed : 1, x);
    to_vector(&f->cost, v);
    scale_prior(f, w, ns);
    int kind = w->prompt ? 1 : 0;
    /* Errors relative to what was seen: a step that the machine held up ten times as long counts as
     * an error of one, not of nine. One that took less than was believed counts for more than one:
     * a machine holds steps up and never makes them shorter, so what was learned while it did gives
     * way to them soon. At first the prior may be off by any factor, later a clock may. */
    double scale = f->seen[kind].steps < 8 ? ns : BT_MAX(ns, predicted / SHORT_MAX);
    double weight = 1 / (scale * scale);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            f->seen[kind].a[i][k] = KEEP * f->seen[kind].a[i][k] + weight * x[i] * x[k];
        }
        f->seen[kind].b[i] = KEEP * f->seen[kind].b[i] + weight * x[i] * ns;
    }
    f->seen[kind].steps++;
    f->most_tokens = BT_MAX(f->most_tokens, w->tokens);
    solve(f, v);
    extend(f, v);
    from_vector(v, &f->cost);
    return predicted / ns - 1;
}
