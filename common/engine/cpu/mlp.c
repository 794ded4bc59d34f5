/* The second half of a layer on the CPU: an MLP, or the experts that a router chooses for each
 * token. Runs on the engine's thread; loops use OpenMP threads.
 *
 * A token's result does not depend on the other tokens: products compute a row in one order
 * whatever rows stand beside it, and a token's experts are added in the order of their numbers. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"

/* a2 = the activation of m's first product of n rows of act; `width` columns. */
static bt_status_t swiglu(struct bt_engine *e, const struct bt_cpu_mlp *m, const void *act,
                          uint32_t n, uint32_t width)
{
    if (bt_gemm_fuses(e->gemm)) {
        bt_linear_swiglu(m->in, act, n, e->a2);
        return BT_OK;
    }
    bt_status_t st = bt_linear_run(m->in, act, n, e->y);
    if (st != BT_OK) {
        return st;
    }
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)n *width)) schedule(static)
    for (uint32_t t = 0; t < n; t++) {
        e->k->swiglu(e->y + (size_t)t * 2 * width, bt_cpu_act_row(e->k, e->a2, t, width, 2), width);
    }
    return BT_OK;
}

/* The same of GPT-2: a2 = gelu(the product + bias), of all rows of a. */
static bt_status_t gelu(struct bt_cpu_step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    uint32_t width = e->model.config.intermediate;
    bt_status_t st = bt_linear_run(y->mlp.in, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *width)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        e->k->gelu(e->y + (size_t)t * width, y->up_bias,
                   bt_cpu_act_row(e->k, e->a2, t, width, e->mlp_acts), e->mlp_acts, width);
    }
    return BT_OK;
}

static bt_status_t dense(struct bt_cpu_step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    bt_status_t st = e->model.config.gpt2
                         ? gelu(s, y)
                         : swiglu(e, &y->mlp, e->a, s->n, e->model.config.intermediate);
    bt_cpu_phase(e, BT_CPU_PHASE_GATE_UP);
    st = st == BT_OK ? bt_cpu_project(s, y->mlp.down, e->a2, y->down_bias) : st;
    bt_cpu_phase(e, BT_CPU_PHASE_DOWN);
    return st;
}

/* ---- router ---- */

/* Marks the groups that experts may be chosen from. choice: [experts] scores to compare. */
static void choose_groups(const struct bt_model_experts *x, const float *choice, bool *open)
{
    uint32_t size = x->n / x->groups;
    float best[BT_CPU_EXPERTS_MAX];
    for (uint32_t g = 0; g < x->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        best[g] = x->group_best == 2 ? first + second : first;
        open[g] = false;
    }
    for (uint32_t k = 0; k < x->groups_used; k++) {
        uint32_t at = UINT32_MAX;
        for (uint32_t g = 0; g < x->groups; g++) {
            if (!open[g] && (at == UINT32_MAX || best[g] > best[at])) {
                at = g;
            }
        }
        open[at] = true;
    }
}

static void softmax(float *v, uint32_t n)
{
    float most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        most = fmaxf(most, v[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        v[i] = expf(v[i] - most);
        sum += v[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        v[i] /= sum;
    }
}

/* A row of the router's product becomes the token's experts, by rising number. Among equal scores
 * the lower number is chosen; so are scores that are not numbers, last. */
static void route(const struct bt_model_experts *x, const float *bias, float *score,
                  struct bt_cpu_use *uses)
{
    float choice[BT_CPU_EXPERTS_MAX];
    bool open[BT_CPU_EXPERTS_MAX] = {true}, taken[BT_CPU_EXPERTS_MAX] = {false};
    if (x->router == BT_ROUTER_SOFTMAX) {
        softmax(score, x->n);
    }
    for (uint32_t i = 0; i < x->n; i++) {
        score[i] = x->router == BT_ROUTER_SIGMOID ? 1.0f / (1.0f + expf(-score[i])) : score[i];
        choice[i] = score[i] + (bias ? bias[i] : 0.0f);
        choice[i] = choice[i] == choice[i] ? choice[i] : -INFINITY;
    }
    if (x->groups > 1) {
        choose_groups(x, choice, open);
    }
    uint32_t size = x->n / x->groups;
    float sum = 0;
    for (uint32_t k = 0; k < x->used; k++) {
        uint32_t at = UINT32_MAX;
        for (uint32_t i = 0; i < x->n; i++) {
            if (open[i / size] && !taken[i] && (at == UINT32_MAX || choice[i] > choice[at])) {
                at = i;
            }
        }
        taken[at] = true;
        sum += score[at];
    }
    float factor = x->normalise ? x->scale / (sum + 1e-20f) : x->scale;
    for (uint32_t i = 0, k = 0; i < x->n; i++) {
        if (taken[i]) {
            uses[k++] = (struct bt_cpu_use){.expert = i, .weight = score[i] * factor};
        }
    }
}

static bt_status_t route_rows(struct bt_cpu_step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    const struct bt_model_experts *x = &e->model.config.experts;
    bt_status_t st = bt_linear_run(y->router, e->a, s->n, e->y);
    if (st != BT_OK) {
        return st;
    }
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n * x->n)) schedule(static)
    for (uint32_t t = 0; t < s->n; t++) {
        route(x, y->router_bias, e->y + (size_t)t * x->n, e->uses + (size_t)t * x->used);
    }
    /* All uses of an expert one behind the other, by rising row. */
    memset(e->first_use, 0, (x->n + 1) * sizeof(*e->first_use));
    for (uint32_t i = 0; i < s->n * x->used; i++) {
        e->first_use[e->uses[i].expert + 1]++;
    }
    for (uint32_t i = 0; i < x->n; i++) {
        e->first_use[i + 1] += e->first_use[i];
    }
    uint32_t at[BT_CPU_EXPERTS_MAX];
    memcpy(at, e->first_use, x->n * sizeof(*at));
    for (uint32_t i = 0; i < s->n * x->used; i++) {
        e->by_expert[at[e->uses[i].expert]++] = i;
    }
    return BT_OK;
}

/* ---- experts ---- */

/* Copies row `from` of a to row `to` of ae: acts of k columns. */
static void copy_row(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t k)
{
    uint32_t parts = e->mlp_acts;
    const uint8_t *src = bt_cpu_act_row(e->k, e->a, from, k, parts);
    uint8_t *dst = bt_cpu_act_row(e->k, e->ae, to, k, parts);
    if (!e->k->bf16) {
        memcpy(dst, src, (size_t)k * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < BT_DIV_UP(k, 32u) * parts; i++) {
        memcpy(dst + (size_t)i * BT_ACT_LO * 2, src + (size_t)i * BT_ACT_LO * 2, 64);
    }
}

/* sum += weight x expert(a), for the tokens that use it. */
static bt_status_t one_expert(struct bt_engine *e, const struct bt_cpu_mlp *m, uint32_t expert)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t used = c->experts.used, n = e->first_use[expert + 1] - e->first_use[expert];
    const uint32_t *mine = e->by_expert + e->first_use[expert];
    if (n == 0) {
        return BT_OK;
    }
    for (uint32_t i = 0; i < n; i++) {
        copy_row(e, mine[i] / used, i, c->hidden);
    }
    bt_status_t st = swiglu(e, m, e->ae, n, c->experts.intermediate);
    st = st == BT_OK ? bt_linear_run(m->down, e->a2, n, e->y) : st;
    for (uint32_t i = 0; st == BT_OK && i < n; i++) {
        float w = e->uses[mine[i]].weight, *to = e->sum + (size_t)(mine[i] / used) * c->hidden;
        const float *from = e->y + (size_t)i * c->hidden;
        for (uint32_t j = 0; j < c->hidden; j++) {
            to[j] += w * from[j];
        }
    }
    return st;
}

static bt_status_t experts(struct bt_cpu_step *s, const struct bt_cpu_layer *y)
{
    struct bt_engine *e = s->e;
    const struct bt_model_config *c = &e->model.config;
    size_t all = (size_t)s->n * c->hidden;
    bool adds = bt_gemm_fuses(e->gemm);
    bt_status_t st = route_rows(s, y);
    if (e->mlp_acts != 2) { /* the router read two parts */
        bt_cpu_norm_rows(s, NULL, y->norm_mlp, NULL, e->mlp_acts);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_ROUTER);
    memset(e->sum, 0, all * sizeof(*e->sum));
    for (uint32_t i = 0; st == BT_OK && i < c->experts.n; i++) {
        st = one_expert(e, &y->experts[i], i);
    }
    bt_cpu_phase(e, BT_CPU_PHASE_EXPERTS);
    if (st == BT_OK && c->experts.shared) {
        st = swiglu(e, &y->shared, e->a, s->n, c->experts.shared);
        st = st == BT_OK ? bt_cpu_project(s, y->shared.down, e->a2, NULL) : st;
    } else if (!adds) {
        memset(e->y2, 0, all * sizeof(*e->y2));
    }
    float *to = adds ? e->x : e->y2;
    for (size_t i = 0; i < all; i++) {
        to[i] += e->sum[i];
    }
    bt_cpu_phase(e, BT_CPU_PHASE_DOWN);
    return st;
}

bt_status_t bt_cpu_mlp(struct bt_cpu_step *s, uint32_t layer)
{
    struct bt_engine *e = s->e;
    const struct bt_cpu_layer *y = &e->model.layers[layer];
    bool routed = y->router != NULL;
    bt_cpu_norm_rows(s, bt_cpu_residual(e), y->norm_mlp, y->norm_mlp_bias,
                     routed ? 2 : e->mlp_acts);
    bt_cpu_phase(e, BT_CPU_PHASE_NORM);
    return routed ? experts(s, y) : dense(s, y);
}
