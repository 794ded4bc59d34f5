/* rows/quant.h and the products that read its results, in plain C on host memory: the same results
 * as the kernels up to rounding. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/gemm/wide_e4m3.h"
#include "common/engine/cuda/rows/quant.h"
#include "common/engine/fp8.h"
#include "tests/cuda_host/values.h"

/* One row, rounded with a scale for each 128 columns. */
static void put_row(const struct bt_cu_e4m3_rows *to, uint32_t m, uint32_t row, const float *v,
                    uint32_t k)
{
    for (uint32_t b = 0; b * 128 < k; b++) {
        uint32_t end = BT_MIN(k, (b + 1) * 128);
        float top = 0;
        for (uint32_t i = b * 128; i < end; i++) {
            top = fmaxf(top, fabsf(v[i]));
        }
        float f = top > 0 ? fminf(448 / top, 0x1p126f) : 0;
        for (uint32_t i = b * 128; i < end; i++) {
            to->v[(size_t)row * k + e4m3_place(i)] = bt_e4m3_of_f32(v[i] * f);
        }
        to->scale[(size_t)b * bt_cu_e4m3_stride(m) + row] = f > 0 ? 1 / f : 0;
    }
}

struct rows {
    const void *in;
    const float *w;
    uint32_t m, k;
    float eps;
    struct bt_cu_e4m3_rows to;
};

static void run_norm(const void *args)
{
    const struct rows *p = args;
    float *v = malloc(p->k * sizeof(*v));
    for (uint32_t r = 0; r < p->m; r++) {
        const float *x = (const float *)p->in + (size_t)r * p->k;
        float sum = 0;
        for (uint32_t i = 0; i < p->k; i++) {
            sum += x[i] * x[i];
        }
        float f = 1 / sqrtf(sum / (float)p->k + p->eps);
        for (uint32_t i = 0; i < p->k; i++) {
            v[i] = x[i] * f * p->w[i];
        }
        put_row(&p->to, p->m, r, v, p->k);
    }
    free(v);
}
cudaError_t bt_cu_norm_e4m3(const float *x, const float *w, uint32_t m, uint32_t hidden, float eps,
                            const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    const struct rows p = {x, w, m, hidden, eps, *to};
    cuda_host_launch(s, run_norm, &p, sizeof(p));
    return cudaSuccess;
}

static void run_swiglu(const void *args)
{
    const struct rows *p = args;
    float *v = malloc(p->k * sizeof(*v));
    for (uint32_t r = 0; r < p->m; r++) {
        const uint16_t *gate = (const uint16_t *)p->in + (size_t)r * 2 * p->k, *up = gate + p->k;
        for (uint32_t i = 0; i < p->k; i++) {
            float g = from_bf16(gate[i]);
            v[i] = g / (1 + expf(-g)) * from_bf16(up[i]);
        }
        put_row(&p->to, p->m, r, v, p->k);
    }
    free(v);
}
cudaError_t bt_cu_swiglu_e4m3(const void *gu, uint32_t m, uint32_t inter,
                              const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    const struct rows p = {gu, NULL, m, inter, 0, *to};
    cuda_host_launch(s, run_swiglu, &p, sizeof(p));
    return cudaSuccess;
}

static void run_rows(const void *args)
{
    const struct rows *p = args;
    float *v = malloc(p->k * sizeof(*v));
    for (uint32_t r = 0; r < p->m; r++) {
        for (uint32_t i = 0; i < p->k; i++) {
            _Float16 h;
            memcpy(&h, (const uint16_t *)p->in + (size_t)r * p->k + i, sizeof(h));
            v[i] = (float)h;
        }
        put_row(&p->to, p->m, r, v, p->k);
    }
    free(v);
}
cudaError_t bt_cu_rows_e4m3(const void *a, uint32_t m, uint32_t k, const struct bt_cu_e4m3_rows *to,
                            cudaStream_t s)
{
    const struct rows p = {a, NULL, m, k, 0, *to};
    cuda_host_launch(s, run_rows, &p, sizeof(p));
    return cudaSuccess;
}

struct weights {
    const void *from;
    uint32_t n, k;
    uint8_t *w;
    float *scale;
    uint32_t *bad;
};

static void run_quantize(const void *args)
{
    const struct weights *p = args;
    size_t values = (size_t)p->n * p->k;
    uint32_t across = BT_DIV_UP(p->k, 128), down = BT_DIV_UP(p->n, 128);
    float *v = bt_calloc(values, sizeof(*v)),
          *scale = malloc((size_t)across * down * sizeof(*scale));
    uint8_t *e = malloc(values);
    for (size_t i = 0; i < values; i++) {
        v[i] = from_bf16(((const uint16_t *)p->from)[i]);
    }
    *p->bad |= !bt_fp8_quantize(v, p->n, p->k, e, scale);
    for (size_t i = 0; i < values; i++) {
        p->w[i / p->k * p->k + e4m3_place((uint32_t)(i % p->k))] = e[i];
    }
    for (uint32_t i = 0; i < across * down; i++) {
        p->scale[i / across * bt_cu_scale_stride(p->k) + i % across] = scale[i];
    }
    free(v);
    free(scale);
    free(e);
}
cudaError_t bt_cu_quantize(const void *from, uint32_t n, uint32_t k, uint8_t *w, float *scale,
                           uint32_t *bad, cudaStream_t s)
{
    const struct weights p = {from, n, k, w, scale, bad};
    cuda_host_launch(s, run_quantize, &p, sizeof(p));
    return cudaSuccess;
}

static void run_order(const void *args)
{
    const struct weights *p = args;
    const uint8_t *from = p->from;
    for (size_t i = 0; i < (size_t)p->n * p->k; i++) {
        p->w[i / p->k * p->k + e4m3_place((uint32_t)(i % p->k))] = from[i];
        *p->bad |= (from[i] & 0x7f) == 0x7f;
    }
}
cudaError_t bt_cu_order(const uint8_t *from, uint32_t n, uint32_t k, uint8_t *w, uint32_t *bad,
                        cudaStream_t s)
{
    const struct weights p = {from, n, k, w, NULL, bad};
    cuda_host_launch(s, run_order, &p, sizeof(p));
    return cudaSuccess;
}

/* ---- products that read e4m3 ---- */

bool bt_cu_skinny_rounded_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    (void)n;
    return way == 0 && m == BT_CU_SKINNY_ROWS && k % 128 == 0;
}

/* A product whose two halves become SwiGLU's result. A graph runs it more than once, so its memory
 * is taken where it runs. */
struct gated {
    struct bt_cu_e4m3_product p;
    _Float16 *h;
};
static void run_gated(const void *args)
{
    const struct gated *g = args;
    struct bt_cu_e4m3_product p = g->p;
    uint32_t inter = p.n / 2;
    float *gu = malloc((size_t)p.m * p.n * sizeof(*gu));
    p.y = gu;
    cuda_host_product_e4m3(&p);
    for (size_t i = 0; i < (size_t)p.m * inter; i++) {
        const float *at = gu + i / inter * p.n + i % inter;
        g->h[i] = (_Float16)(at[0] / (1 + expf(-at[0])) * at[inter]);
    }
    free(gu);
}
cudaError_t bt_cu_skinny_rounded(uint32_t way, struct bt_cu_weight w,
                                 const struct bt_cu_e4m3_rows *x, void *y, uint32_t m, uint32_t n,
                                 uint32_t k, enum bt_cu_skinny_end end, cudaStream_t s)
{
    const struct gated g = {{w, *x, y, m, n, k, false, end == BT_CU_SKINNY_ADD}, y};
    (void)way;
    if (end != BT_CU_SKINNY_SWIGLU) {
        return bt_cu_gemm_e4m3_run(NULL, &g.p, s);
    }
    cuda_host_launch(s, run_gated, &g, sizeof(g));
    return cudaSuccess;
}

bool bt_cu_skinny_rounds(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    (void)way;
    (void)n;
    (void)k;
    return m > 64; /* and fewer take the other way */
}
struct gated_rows {
    struct gated g;
    struct rows to;
};
static void run_gated_rows(const void *args)
{
    struct gated_rows x = *(const struct gated_rows *)args;
    void *h = malloc((size_t)x.g.p.m * x.g.p.n);
    x.g.h = h;
    x.to.in = h;
    run_gated(&x.g);
    run_rows(&x.to);
    free(h);
}
cudaError_t bt_cu_skinny_rounded_swiglu(uint32_t way, struct bt_cu_weight w,
                                        const struct bt_cu_e4m3_rows *x,
                                        const struct bt_cu_e4m3_rows *to, uint32_t m, uint32_t n,
                                        uint32_t k, cudaStream_t s)
{
    const struct gated_rows g = {{{w, *x, NULL, m, n, k, false, false}, NULL},
                                 {NULL, NULL, m, n / 2, 0, *to}};
    (void)way;
    cuda_host_launch(s, run_gated_rows, &g, sizeof(g));
    return cudaSuccess;
}

/* check_wide_e4m3 checks these on a GPU; without one, cuBLASLt's take their products. */
bool bt_cu_wide_e4m3_fits(uint32_t m, uint32_t n, uint32_t k)
{
    (void)m;
    (void)n;
    (void)k;
    return false;
}
cudaError_t bt_cu_wide_e4m3_sum(const struct bt_cu_wide_e4m3 *p, float *y, bool add, cudaStream_t s)
{
    (void)p;
    (void)y;
    (void)add;
    (void)s;
    return cudaErrorInvalidValue;
}
cudaError_t bt_cu_wide_e4m3_swiglu(const struct bt_cu_wide_e4m3 *p,
                                   const struct bt_cu_e4m3_rows *to, cudaStream_t s)
{
    (void)p;
    (void)to;
    (void)s;
    return cudaErrorInvalidValue;
}
cudaError_t bt_cu_wide_e4m3_append(const struct bt_cu_wide_e4m3 *p, const struct bt_cu_append *a,
                                   cudaStream_t s)
{
    (void)p;
    (void)a;
    (void)s;
    return cudaErrorInvalidValue;
}
