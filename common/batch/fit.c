/* Non-negative recursive least squares over eight features of a step. Pure: see fit.h. */
#include "common/batch/fit.h"

#include <math.h>
#include <string.h>

#define N            BT_BATCH_FIT_N
#define KEEP         (1 - 1.0 / 256) /* memory: some hundred steps of each kind */
#define PRIOR_PULL   0.01            /* of a step that consists of this coefficient alone */
#define SEEN_SHARE   0.05            /* of the coefficient that would explain a step alone */
#define SHORT_MAX    4               /* a step is too short if predicted this many times as long */
#define FIRST_STEPS  32
#define FIRST_ROUNDS 8  /* rounds until steps and prior balance */
#define SCALE_N      16 /* first steps that scale the prior */

enum { BASE, TOKENS, KV = TOKENS + BT_BATCH_SEGMENTS, ATTN, EXPERTS };

/* missed: from the cost; it is known and not fitted. */
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

/* Moves x towards z as far as no variable falls below 0. A variable that reaches 0 is no longer
 * free. True: x has reached z. */
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
 * Problems, 1974). Coordinate descent is too slow: segments and attention are nearly parallel, so
 * it would need hundreds of sweeps. */
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

/* The mean of that value over the steps in which coefficient i had a part; 0 if there was none. */
static double seen_unit(const struct bt_batch_fit *f, int i)
{
    double squares = f->seen[0].a[i][i] + f->seen[1].a[i][i];
    double sum = f->seen[0].b[i] + f->seen[1].b[i];
    return squares > 0 ? SEEN_SHARE * sum / squares : 0;
}

/* Minimizes the faded squares of both kinds of steps plus a pull to the prior. The pull is relative
 * to the prior or to the coefficient, whichever is larger: relative to the prior alone, a
 * coefficient 20 times as large would cost 400, and priors are not that exact. A prior may also be
 * wrong by orders of magnitude. If it were almost 0 for tokens, their coefficient could never grow.
 * So the pull is relative to at least a part of the value that would explain a step alone.
 */
static void solve(const struct bt_batch_fit *f, double v[N])
{
    double m[N][N], b[N], x[N], unit[N], scale = exp(f->log_scale);
    int rounds = f->seen[0].steps + f->seen[1].steps < FIRST_STEPS ? FIRST_ROUNDS : 1;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < N; i++) {
            unit[i] = BT_MAX(BT_MAX(f->prior[i] * scale, v[i]), seen_unit(f, i));
            unit[i] = unit[i] > 0 ? unit[i] : 1; /* no experts: no step has a part of them */
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

/* Segments beyond all steps seen: costs rise with the number of tokens, so a token there is at
 * least as dear as the mean in the largest step. With a price of 0 there, all waiting prompts would
 * join one step. */
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

/* Scales the prior by the first steps. Otherwise a prior that is wrong as a whole, for example for
 * a device a hundred times slower, would pull the coefficients for as long as it is remembered. */
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
    /* Errors are relative to the measured time: a step that the machine delayed to ten times its
     * time counts as an error of one, not of nine. A step shorter than predicted counts for more
     * than one: a machine delays steps but never shortens them, so values that were learned during
     * a delay are soon corrected. At first the prior may be wrong by any factor, later a clock may.
     */
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
