/* Matrix products in plain C, and the f32 values of weights that they read (products.h). One
 * thread, but for the table of e4m3, which is filled before main. */
#include "tests/cuda_host/products.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

/* e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f is NaN, 448 the largest. Each value
 * once: attention reads every key and value again for each row. */
float cuda_host_e4m3[256];
__attribute__((constructor)) static void fill_e4m3(void)
{
    for (int v = 0; v < 256; v++) {
        int e = v >> 3 & 15, m = v & 7;
        float f = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
        cuda_host_e4m3[v] = (v & 0x7f) == 0x7f ? NAN : v & 0x80 ? -f : f;
    }
}

/* ---- weights in f32 ---- */

/* Weights are converted at their first use and kept while the engine is open. A product may read
 * just the first rows of a matrix, so their number counts, too. */
static struct weights {
    struct weights *next;
    const void *w;
    size_t n;
    bool panels;
    float values[];
} * known;

/* NULL: not converted yet. */
static const float *find(const void *w, size_t n, bool panels)
{
    for (const struct weights *x = known; x; x = x->next) {
        if (x->w == w && x->n == n && x->panels == panels) {
            return x->values;
        }
    }
    return NULL;
}
/* room: values that the result needs. */
static float *keep(const void *w, size_t n, bool panels, size_t room)
{
    struct weights *x = calloc(1, sizeof(*x) + room * sizeof(float));
    BT_ASSERT(x);
    x->next = known;
    x->w = w;
    x->n = n;
    x->panels = panels;
    known = x;
    return x->values;
}

/* For products, weights stand in panels of WIDE rows: [n / WIDE][k][WIDE], zeros behind the last
 * row. So a product adds vectors up and needs no sum across a vector. */
enum { WIDE = 32 };
static const float *to_panels(const void *w, const float *from, uint32_t n, uint32_t k)
{
    float *to = keep(w, (size_t)n * k, true, (size_t)BT_DIV_UP(n, WIDE) * WIDE * k);
    for (uint32_t j = 0; j < n; j++) {
        float *row = to + (size_t)(j / WIDE) * WIDE * k + j % WIDE;
        for (uint32_t i = 0; i < k; i++) {
            row[(size_t)i * WIDE] = from[(size_t)j * k + i];
        }
    }
    return to;
}

/* The column of a place in a row of e4m3 (weight.h). */
static uint32_t column_of(uint32_t at)
{
    uint32_t in = at % 16;
    return at / 16 * 16 + in / 4 * 2 + in % 2 + in % 4 / 2 * 8;
}

/* Values of e4m3 [n][k]. */
static void from_e4m3(const struct bt_cu_weight *w, uint32_t n, uint32_t k, float *to)
{
    const bool blocks = w->kind == BT_CU_WEIGHT_BLOCKS;
    const uint8_t *v = w->w;
    for (uint32_t r = 0; r < n; r++) {
        for (uint32_t i = 0; i < k; i++) {
            uint32_t c = column_of(i);
            float scale = blocks ? w->scale[r / 128 * bt_cu_scale_stride(k) + c / 128]
                                 : w->scale[(size_t)c / 128 * n + r];
            to[(size_t)r * k + c] = cuda_host_e4m3[v[(size_t)r * k + i]] * scale;
        }
    }
}

FAST static void from_bf16_row(const uint16_t *v, size_t n, float *to)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = from_bf16(v[i]);
    }
}

static void to_f32(const struct bt_cu_weight *of, uint32_t n, uint32_t k, float *to)
{
    if (of->kind == BT_CU_WEIGHT_BF16) {
        from_bf16_row(of->w, (size_t)n * k, to);
    } else {
        from_e4m3(of, n, k, to);
    }
}

static const float *panels_of(const struct bt_cu_weight *of, uint32_t n, uint32_t k)
{
    const float *there = find(of->w, (size_t)n * k, true);
    if (!there) {
        float *v = malloc((size_t)n * k * sizeof(*v));
        to_f32(of, n, k, v);
        there = to_panels(of->w, v, n, k);
        free(v);
    }
    return there;
}

const float *cuda_host_weights(const struct bt_cu_weight *of, uint32_t n, uint32_t k)
{
    const float *there = find(of->w, (size_t)n * k, false);
    if (!there) {
        float *to = keep(of->w, (size_t)n * k, false, (size_t)n * k);
        to_f32(of, n, k, to);
        there = to;
    }
    return there;
}

const float *cuda_host_weights_f16(const half *w, size_t n)
{
    const float *there = find(w, n, false);
    if (!there) {
        float *to = keep(w, n, false, n);
        from_half(w, (uint32_t)n, to);
        there = to;
    }
    return there;
}

struct bt_cu_gemm {
    int nothing;
};
cudaError_t bt_cu_gemm_create(struct bt_cu_gemm **g_p)
{
    *g_p = calloc(1, sizeof(**g_p));
    return cudaSuccess;
}
void bt_cu_gemm_destroy(struct bt_cu_gemm *g)
{
    for (struct weights *next; known; known = next) {
        next = known->next;
        free(known);
    }
    free(g);
}

/* ---- products ---- */

/* Each sum is one lane's, in the order of k, in both functions: a row's result depends on nothing
 * else. */
typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { TALL = 6 };

FAST static void one_row(const float *x, const float *w, size_t k, float *y)
{
    lanes a = {0}, b = {0};
    for (size_t i = 0; i < k; i++) {
        const lanes *v = (const lanes *)(w + i * WIDE);
        a += x[i] * v[0];
        b += x[i] * v[1];
    }
    memcpy(y, &a, sizeof(a));
    memcpy(y + WIDE / 2, &b, sizeof(b));
}

/* TALL rows of x, so that what is read of w serves all of them. */
FAST static void some_rows(const float *x, const float *w, size_t k, float *y)
{
    const float *x1 = x + k, *x2 = x1 + k, *x3 = x2 + k, *x4 = x3 + k, *x5 = x4 + k;
    lanes a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, a4 = {0}, a5 = {0};
    lanes b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0}, b4 = {0}, b5 = {0};
    for (size_t i = 0; i < k; i++) {
        const lanes *v = (const lanes *)(w + i * WIDE), left = v[0], right = v[1];
        a0 += x[i] * left, b0 += x[i] * right;
        a1 += x1[i] * left, b1 += x1[i] * right;
        a2 += x2[i] * left, b2 += x2[i] * right;
        a3 += x3[i] * left, b3 += x3[i] * right;
        a4 += x4[i] * left, b4 += x4[i] * right;
        a5 += x5[i] * left, b5 += x5[i] * right;
    }
    const lanes all[2 * TALL] = {a0, b0, a1, b1, a2, b2, a3, b3, a4, b4, a5, b5};
    memcpy(y, all, sizeof(all));
}

/* Takes n results of row r from column j on. */
typedef void put_fn(const void *to, uint32_t r, uint32_t j, uint32_t n, const float *v);

/* x [m, k] times weights in panels. */
static void multiply(const float *x, uint32_t m, const float *w, uint32_t n, uint32_t k,
                     put_fn *put, const void *to)
{
    float y[TALL * WIDE];
    for (uint32_t j = 0; j < n; j += WIDE, w += (size_t)WIDE * k) {
        for (uint32_t r = 0, rows; r < m; r += rows) {
            rows = m - r < TALL ? 1 : TALL;
            (rows == 1 ? one_row : some_rows)(x + (size_t)r * k, w, k, y);
            for (uint32_t i = 0; i < rows; i++) {
                put(to, r + i, j, BT_MIN(n - j, (uint32_t)WIDE), y + (size_t)i * WIDE);
            }
        }
    }
}

static void put(const void *to, uint32_t r, uint32_t j, uint32_t n, const float *v)
{
    const struct cuda_host_product *p = to;
    const size_t at = (size_t)r * p->n + j;
    for (uint32_t i = 0; p->bf16 && i < n; i++) {
        ((uint16_t *)p->y)[at + i] = to_bf16(v[i]);
    }
    float *y = p->bf16 ? NULL : (float *)p->y + at;
    for (uint32_t i = 0; y && i < n; i++) {
        y[i] = p->add ? y[i] + v[i] : v[i];
    }
}

void cuda_host_run_product(const void *args)
{
    const struct cuda_host_product *p = args;
    const size_t values = (size_t)p->m * p->k;
    float *a = malloc(values * sizeof(*a));
    for (size_t i = 0; p->e.v && i < values; i++) {
        size_t row = i / p->k, c = column_of((uint32_t)(i % p->k));
        a[row * p->k + c] =
            cuda_host_e4m3[p->e.v[i]] * p->e.scale[c / 128 * bt_cu_e4m3_stride(p->m) + row];
    }
    if (!p->e.v && p->w.kind == BT_CU_WEIGHT_BF16) {
        from_bf16_row(p->a, values, a);
    } else if (!p->e.v) {
        from_half((const half *)p->a, (uint32_t)values, a);
    }
    multiply(a, p->m, panels_of(&p->w, p->n, p->k), p->n, p->k, put, p);
    free(a);
}

static void put_f16(const void *to, uint32_t r, uint32_t j, uint32_t n, const float *v)
{
    const struct cuda_host_product_f16 *p = to;
    for (uint32_t i = 0; i < n; i++) {
        p->y[(size_t)r * p->n + j + i] = to_f16(v[i]);
    }
}
void cuda_host_run_product_f16(const void *args)
{
    const struct cuda_host_product_f16 *p = args;
    const size_t values = (size_t)p->n * p->k;
    const float *w = find(p->w, values, true);
    w = w ? w : to_panels(p->w, cuda_host_weights_f16(p->w, values), p->n, p->k);
    float *a = malloc((size_t)p->m * p->k * sizeof(*a));
    from_half(p->a, p->m * p->k, a);
    multiply(a, p->m, w, p->n, p->k, put_f16, p);
    free(a);
}
