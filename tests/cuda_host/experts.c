/* The launches of experts.h in plain C on host memory, as kernels.c has those of the other kernels.
 * Its scratch memory holds what a row uses: numbers and weights of experts. */
#include <math.h>
#include <stdlib.h>

#include "common/base/base.h"
#include "common/engine/cuda/experts/experts.h"
#include "common/engine/cuda/rows/rows.h"
#include "common/engine/safetensors.h"
#include "tests/cuda_host/products.h"
#include "tests/cuda_host/values.h"

#define SCRATCH_BEGIN 256 /* bytes that experts.h keeps for the kernels */

struct use {
    int32_t expert; /* -1: padding */
    float weight;
};

bool bt_cu_experts_fits(const struct bt_cu_experts *x)
{
    bool e4m3 = x->hidden % BT_CU_WEIGHT_BLOCK == 0 && x->inter % BT_CU_WEIGHT_BLOCK == 0;
    return x->hidden % 16 == 0 && x->inter % 8 == 0 && (!x->e4m3 || (e4m3 && !x->invariant));
}
/* Few, so that a step takes several calls. */
uint32_t bt_cu_experts_rows(const struct bt_cu_experts *x)
{
    (void)x;
    return 48;
}
size_t bt_cu_experts_scratch(const struct bt_cu_experts *x, uint32_t rows)
{
    return SCRATCH_BEGIN + (size_t)rows * x->used * sizeof(struct use);
}

struct scores {
    struct bt_cu_experts x;
    struct bt_cu_experts_norm norm;
    const uint16_t *router;
    uint16_t *a;
    float *scores;
    uint32_t rows;
};
static void run_scores(const void *args)
{
    const struct scores *p = args;
    uint32_t hidden = p->x.hidden, n = p->x.n - p->x.always;
    float *v = malloc(hidden * sizeof(*v));
    for (size_t t = 0; t < p->rows; t++) {
        const float *x = p->norm.x + t * hidden;
        double sum = 0;
        for (uint32_t i = 0; i < hidden; i++) {
            sum += (double)x[i] * x[i];
        }
        float f = (float)(1 / sqrt(sum / hidden + p->norm.eps));
        for (uint32_t i = 0; i < hidden; i++) {
            v[i] = x[i] * f * p->norm.w[i];
            p->a[t * hidden + i] = to_16(p->x.e4m3, v[i]);
        }
        for (uint32_t e = 0; e < n; e++) {
            double score = 0;
            for (uint32_t i = 0; i < hidden; i++) {
                score += v[i] * bt_f32_of_bf16(p->router[(size_t)e * hidden + i]);
            }
            p->scores[t * n + e] = (float)score;
        }
    }
    free(v);
}
cudaError_t bt_cu_experts_scores(const struct bt_cu_experts *x,
                                 const struct bt_cu_experts_norm *norm, const void *router,
                                 uint32_t rows, void *a, float *scores, cudaStream_t s)
{
    const struct scores p = {*x, *norm, router, a, scores, rows};
    cuda_host_launch(s, run_scores, &p, sizeof(p));
    return cudaSuccess;
}

struct route {
    struct bt_cu_experts x;
    const float *scores, *bias;
    const int32_t *slots;
    struct use *uses;
    uint32_t rows;
};

/* Marks what may be chosen: experts of the groups whose best experts' scores sum up to most. */
static void open_groups(const struct bt_cu_experts *x, const float *choice, uint32_t n, bool *open)
{
    uint32_t size = n / x->groups;
    for (uint32_t k = 0; k < x->groups_used; k++) {
        float best = -INFINITY;
        uint32_t at = 0;
        for (uint32_t g = 0; g < x->groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (uint32_t i = g * size; i < (g + 1) * size; i++) {
                second = choice[i] > first ? first : fmaxf(second, choice[i]);
                first = fmaxf(first, choice[i]);
            }
            float v = x->group_best == 2 ? first + second : first;
            if (!open[g * size] && v > best) {
                best = v;
                at = g;
            }
        }
        for (uint32_t i = at * size; i < (at + 1) * size; i++) {
            open[i] = true;
        }
    }
}

static void route_row(const struct bt_cu_experts *x, const float *raw, const float *bias,
                      struct use *uses)
{
    float score[BT_CU_EXPERTS_MAX], choice[BT_CU_EXPERTS_MAX], all = 0, sum = 0;
    bool open[BT_CU_EXPERTS_MAX] = {false}, taken[BT_CU_EXPERTS_MAX] = {false};
    uint32_t n = x->n - x->always, used = x->used - x->always, k = 0;
    for (uint32_t i = 0; i < n; i++) {
        score[i] = x->sigmoid ? 1 / (1 + expf(-raw[i])) : expf(raw[i]);
        all += x->sigmoid ? 0 : score[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        score[i] /= x->sigmoid ? 1 : all;
        choice[i] = score[i] + (bias ? bias[i] : 0);
    }
    open_groups(x, choice, n, open);
    for (uint32_t j = 0; j < used; j++) {
        uint32_t at = UINT32_MAX;
        for (uint32_t i = 0; i < n; i++) {
            if (open[i] && !taken[i] && (at == UINT32_MAX || choice[i] > choice[at])) {
                at = i;
            }
        }
        taken[at] = true;
        sum += score[at];
    }
    for (uint32_t i = 0; i < n; i++) {
        if (taken[i]) {
            uses[k++] = (struct use){(int32_t)i, score[i] * x->scale / (x->normalise ? sum : 1)};
        }
    }
    for (uint32_t i = n; i < x->n; i++) {
        uses[k++] = (struct use){(int32_t)i, 1};
    }
}

static void run_route(const void *args)
{
    const struct route *p = args;
    uint32_t n = p->x.n - p->x.always;
    for (size_t t = 0; t < p->rows; t++) {
        struct use *uses = p->uses + t * p->x.used;
        if (p->slots[t] < 0) {
            for (uint32_t k = 0; k < p->x.used; k++) {
                uses[k] = (struct use){-1, 0};
            }
        } else {
            route_row(&p->x, p->scores + t * n, p->bias, uses);
        }
    }
}
cudaError_t bt_cu_experts_route(const struct bt_cu_experts *x, const float *scores,
                                const float *bias, const int32_t *slots, uint32_t rows,
                                void *scratch, cudaStream_t s)
{
    struct use *uses = (struct use *)((uint8_t *)scratch + SCRATCH_BEGIN);
    const struct route p = {*x, scores, bias, slots, uses, rows};
    cuda_host_launch(s, run_route, &p, sizeof(p));
    return rows <= bt_cu_experts_rows(x) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t bt_cu_experts_choose(const struct bt_cu_experts *x,
                                 const struct bt_cu_experts_norm *norm,
                                 const struct bt_cu_experts_router *router, const int32_t *slots,
                                 uint32_t rows, void *a, float *scores, void *scratch,
                                 cudaStream_t s)
{
    bt_cu_experts_scores(x, norm, router->w, rows, a, scores, s);
    return bt_cu_experts_route(x, scores, router->bias, slots, rows, scratch, s);
}

struct run {
    struct bt_cu_experts x;
    struct bt_cu_weight gate_up, down;
    const uint16_t *a;
    const struct use *uses;
    float *out;
    uint32_t rows;
};

/* out += weight * expert(a); h: memory for inter values. */
static void add_expert(const struct run *p, const struct use *u, const float *a, float *h,
                       float *out)
{
    uint32_t hidden = p->x.hidden, inter = p->x.inter;
    const uint32_t expert = (uint32_t)u->expert, n = p->x.n;
    const size_t values = (size_t)inter * hidden;
    const float *gate = cuda_host_weights(&p->gate_up, n * 2 * inter, hidden) + expert * 2 * values;
    const float *up = gate + values;
    const float *down = cuda_host_weights(&p->down, n * hidden, inter) + expert * values;
    for (uint32_t i = 0; i < inter; i++) {
        float g = dot(gate + (size_t)i * hidden, a, hidden);
        float v = g / (1 + expf(-g)) * dot(up + (size_t)i * hidden, a, hidden);
        h[i] = from_16(p->x.e4m3, to_16(p->x.e4m3, v));
    }
    for (uint32_t i = 0; i < hidden; i++) {
        out[i] += u->weight * dot(down + (size_t)i * inter, h, inter);
    }
}

static void run_experts(const void *args)
{
    const struct run *p = args;
    uint32_t hidden = p->x.hidden;
    float *a = malloc((hidden + p->x.inter) * sizeof(*a));
    for (size_t t = 0; t < p->rows; t++) {
        for (uint32_t i = 0; i < hidden; i++) {
            a[i] = from_16(p->x.e4m3, p->a[t * hidden + i]);
        }
        for (uint32_t k = 0; k < p->x.used; k++) {
            const struct use *u = &p->uses[t * p->x.used + k];
            if (u->expert >= 0) {
                add_expert(p, u, a, a + hidden, p->out + t * hidden);
            }
        }
    }
    free(a);
}
cudaError_t bt_cu_experts_run(const struct bt_cu_experts *x, struct bt_cu_weight gate_up,
                              struct bt_cu_weight down, const void *a, uint32_t rows, void *scratch,
                              float *out, bool add, const struct bt_cu_experts_next *next,
                              cudaStream_t s)
{
    const enum bt_cu_weight_kind kind = x->e4m3 ? BT_CU_WEIGHT_BLOCKS : BT_CU_WEIGHT_BF16;
    const struct use *uses = (const struct use *)((uint8_t *)scratch + SCRATCH_BEGIN);
    const struct run p = {*x, gate_up, down, a, uses, out, rows};
    cuda_host_launch(s, run_experts, &p, sizeof(p));
    if (next && (next->f16 ? bt_cu_norm_f16 : bt_cu_norm)(out, NULL, next->w, rows, x->hidden,
                                                          next->eps, next->a, s)) {
        return cudaErrorInvalidValue;
    }
    return add && gate_up.kind == kind && down.kind == kind && rows <= bt_cu_experts_rows(x)
               ? cudaSuccess
               : cudaErrorInvalidValue;
}
