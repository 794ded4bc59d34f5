/* What the engine's host code launches, in plain C on host memory: the same results as the kernels
 * up to rounding, slowly. Sampling is the device's own text (sample_row.cuh) on fibers. Products
 * take weights and activations in bf16, keys and values are f16 or e4m3, as on the device. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/engine/cuda/attention/attention.h"
#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/gemm/wide.h"
#include "common/engine/cuda/rows/rows.h"
#include "common/engine/cuda/sample/sample.h"
#include "common/engine/sampler.h"
#include "tests/cuda_host/products.h"
#include "tests/cuda_host/values.h"

static uint8_t to_e4m3(float f)
{
    uint8_t sign = signbit(f) ? 0x80 : 0;
    float v = fabsf(f);
    if (!(v == v)) {
        return 0x7f;
    }
    int e = BT_MAX(v > 0 ? ilogbf(v) : -6, -6);
    int n = (int)rintf(ldexpf(v, 3 - e)); /* in units of the last bit; 16 of them: the next e */
    int bits = (e + 6) * 8 + n;
    return v >= 448 ? sign | 0x7e : (uint8_t)(sign | BT_MIN(bits, 0x7e));
}

/* ---- products ---- */

cudaError_t bt_cu_gemm_run(struct bt_cu_gemm *g, const void *w, const void *a, void *y, uint32_t m,
                           uint32_t n, uint32_t k, bool bf16, bool add, cudaStream_t s)
{
    (void)g;
    const struct cuda_host_product p = {bt_cu_bf16(w), a, {0}, y, m, n, k, bf16, add};
    cuda_host_launch(s, cuda_host_run_product, &p, sizeof(p));
    return cudaSuccess;
}
static struct cuda_host_product product_of(const struct bt_cu_e4m3_product *q)
{
    return (struct cuda_host_product){q->w, NULL, q->a, q->y, q->m, q->n, q->k, q->bf16, q->add};
}
void cuda_host_product_e4m3(const struct bt_cu_e4m3_product *q)
{
    const struct cuda_host_product p = product_of(q);
    cuda_host_run_product(&p);
}
cudaError_t bt_cu_gemm_e4m3_run(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *q,
                                cudaStream_t s)
{
    (void)g;
    const struct cuda_host_product p = product_of(q);
    cuda_host_launch(s, cuda_host_run_product, &p, sizeof(p));
    return cudaSuccess;
}
cudaError_t bt_cu_gemm_e4m3_tune(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *p,
                                 const struct bt_cu_weight *w, uint32_t layers, uint32_t proposals,
                                 cudaStream_t s)
{
    (void)g;
    (void)p;
    (void)w;
    (void)layers;
    (void)proposals;
    (void)s;
    return cudaSuccess;
}
bool bt_cu_gemm_e4m3_fits(uint32_t n, uint32_t k)
{
    return n % 16 == 0 && k % 128 == 0;
}
cudaError_t bt_cu_gemm_tune(struct bt_cu_gemm *g, const void *const *w, uint32_t layers,
                            const void *a, void *y, uint32_t m, uint32_t n, uint32_t k, bool bf16,
                            bool add, uint32_t proposals, cudaStream_t s)
{
    (void)layers;
    (void)proposals;
    return m > 1 ? cudaSuccess : bt_cu_gemm_run(g, w[0], a, y, m, n, k, bf16, add, s);
}

int bt_cu_gemm_way(const struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                   enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end)
{
    (void)g;
    (void)n;
    (void)k;
    (void)end;
    if (kind != BT_CU_WEIGHT_BF16 && m > 2 && m <= BT_CU_SKINNY_ROWS) {
        return 0;
    }
    return m == 3 || m == 4 ? 0 : -1; /* so that all three ways through the model are taken */
}
void bt_cu_gemm_set_way(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end, int way)
{
    (void)kind;
    (void)g;
    (void)m;
    (void)n;
    (void)k;
    (void)end;
    (void)way;
}
uint32_t bt_cu_skinny_ways(void)
{
    return 3;
}
uint32_t bt_cu_skinny_parts(uint32_t way)
{
    return 1u << way;
}
bool bt_cu_skinny_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k,
                       enum bt_cu_weight_kind kind)
{
    (void)way;
    (void)kind;
    (void)n;
    (void)k;
    return m == 1 || m == BT_CU_SKINNY_ROWS; /* trials run once */
}

uint32_t bt_cu_gemm_bucket(uint32_t m)
{
    return m <= 1 ? m : UINT32_MAX; /* nothing to be met ahead */
}

bool bt_cu_gemv_fits(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind)
{
    (void)n;
    (void)k;
    (void)kind;
    return m <= 2;
}
cudaError_t bt_cu_gemv(struct bt_cu_weight w, const void *x, float *y, uint32_t m, uint32_t n,
                       uint32_t k, bool add, cudaStream_t s)
{
    const struct cuda_host_product p = {w, x, {0}, y, m, n, k, false, add};
    cuda_host_launch(s, cuda_host_run_product, &p, sizeof(p));
    return cudaSuccess;
}

struct swiglu {
    const uint16_t *gu;
    uint16_t *a;
    uint32_t n, inter;
};
static uint16_t silu_mul(float g, float u)
{
    return to_bf16(g / (1 + expf(-g)) * u);
}
static void run_swiglu(const void *args)
{
    const struct swiglu *p = args;
    for (size_t t = 0; t < p->n; t++) {
        const uint16_t *row = p->gu + t * 2 * p->inter;
        for (uint32_t i = 0; i < p->inter; i++) {
            p->a[t * p->inter + i] = silu_mul(from_bf16(row[i]), from_bf16(row[p->inter + i]));
        }
    }
}
cudaError_t bt_cu_swiglu(const void *gu, uint32_t n, uint32_t inter, void *a, cudaStream_t s)
{
    const struct swiglu p = {gu, a, n, inter};
    cuda_host_launch(s, run_swiglu, &p, sizeof(p));
    return cudaSuccess;
}

static void run_gemv_swiglu(const void *args)
{
    struct cuda_host_product p = *(const struct cuda_host_product *)args;
    float *y = malloc((size_t)p.m * p.n * 4);
    uint16_t *a = p.y;
    p.y = y;
    cuda_host_run_product(&p);
    for (uint32_t r = 0; r < p.m; r++) {
        for (uint32_t i = 0; i < p.n / 2; i++) {
            const float *row = y + (size_t)r * p.n;
            float g = row[i], h = g / (1 + expf(-g)) * row[p.n / 2 + i];
            a[(size_t)r * (p.n / 2) + i] =
                p.w.kind == BT_CU_WEIGHT_BF16 ? to_bf16(h) : half_bits(h);
        }
    }
    free(y);
}
cudaError_t bt_cu_gemv_swiglu(struct bt_cu_weight w, const void *x, void *y, uint32_t m, uint32_t n,
                              uint32_t k, cudaStream_t s)
{
    const struct cuda_host_product p = {w, x, {0}, y, m, n, k, false, false};
    cuda_host_launch(s, run_gemv_swiglu, &p, sizeof(p));
    return cudaSuccess;
}
cudaError_t bt_cu_skinny(uint32_t way, struct bt_cu_weight w, const void *x, void *y, uint32_t m,
                         uint32_t n, uint32_t k, enum bt_cu_skinny_end end, cudaStream_t s)
{
    (void)way;
    return end == BT_CU_SKINNY_SWIGLU || end == BT_CU_SKINNY_SWIGLU_ROUNDED
               ? bt_cu_gemv_swiglu(w, x, y, m, n, k, s)
               : bt_cu_gemv(w, x, y, m, n, k, end == BT_CU_SKINNY_ADD, s);
}

/* ---- rows ---- */

static void run_embed(const void *args)
{
    const struct bt_cu_embed *p = args;
    const uint16_t *embed = p->embed, *positions = p->positions;
    for (uint32_t t = 0; t < p->n; t++) {
        int32_t slot = p->slots[t], id = slot < 0 ? 0 : p->ids[t];
        id = id == BT_CU_ID_LAST ? p->last_token[slot] : id;
        for (uint32_t i = 0; i < p->hidden; i++) {
            float v = from_bf16(embed[(size_t)id * p->hidden + i]);
            v += positions ? from_bf16(positions[(size_t)p->pos[t] * p->hidden + i]) : 0;
            p->x[(size_t)t * p->hidden + i] = slot < 0 ? 0 : v;
        }
    }
}
cudaError_t bt_cu_embed(const struct bt_cu_embed *a, cudaStream_t s)
{
    cuda_host_launch(s, run_embed, a, sizeof(*a));
    return cudaSuccess;
}

struct fetch {
    const void *pinned;
    void *to;
    size_t bytes;
};
static void run_fetch(const void *args)
{
    const struct fetch *p = args;
    memcpy(p->to, p->pinned, p->bytes);
}
cudaError_t bt_cu_fetch(const void *pinned, void *to, size_t bytes, cudaStream_t s)
{
    const struct fetch p = {pinned, to, bytes};
    cuda_host_launch(s, run_fetch, &p, sizeof(p));
    return cudaSuccess;
}

struct norm {
    const float *x, *w;
    const int32_t *rows;
    uint16_t *a;
    uint32_t n, hidden;
    float eps;
    bool f16;
};
static void run_norm(const void *args)
{
    const struct norm *p = args;
    for (uint32_t t = 0; t < p->n; t++) {
        const float *x = p->x + (size_t)(p->rows ? (uint32_t)p->rows[t] : t) * p->hidden;
        float f = 1 / sqrtf(dot(x, x, p->hidden) / (float)p->hidden + p->eps);
        for (uint32_t i = 0; i < p->hidden; i++) {
            float v = x[i] * f * p->w[i];
            p->a[(size_t)t * p->hidden + i] = p->f16 ? half_bits(v) : to_bf16(v);
        }
    }
}
cudaError_t bt_cu_norm(const float *x, const int32_t *rows, const float *w, uint32_t n,
                       uint32_t hidden, float eps, void *a, cudaStream_t s)
{
    const struct norm p = {x, w, rows, a, n, hidden, eps, false};
    cuda_host_launch(s, run_norm, &p, sizeof(p));
    return cudaSuccess;
}
cudaError_t bt_cu_norm_f16(const float *x, const int32_t *rows, const float *w, uint32_t n,
                           uint32_t hidden, float eps, void *a, cudaStream_t s)
{
    const struct norm p = {x, w, rows, a, n, hidden, eps, true};
    cuda_host_launch(s, run_norm, &p, sizeof(p));
    return cudaSuccess;
}

static void run_layer_norm(const void *args)
{
    const struct bt_cu_layer_norm *p = args;
    float *v = malloc(p->hidden * sizeof(*v));
    for (uint32_t t = 0; t < p->n; t++) {
        float *x = p->x + (size_t)(p->rows ? (uint32_t)p->rows[t] : t) * p->hidden;
        double mean = 0, square = 0;
        for (uint32_t i = 0; i < p->hidden; i++) {
            v[i] = x[i] + (p->add ? p->add[i] : 0);
            x[i] = p->keep ? v[i] : x[i];
            mean += v[i] / p->hidden;
        }
        for (uint32_t i = 0; i < p->hidden; i++) {
            square += (v[i] - mean) * (v[i] - mean) / p->hidden;
        }
        for (uint32_t i = 0; i < p->hidden; i++) {
            double a = (v[i] - mean) / sqrt(square + p->eps) * p->w[i] + p->bias[i];
            ((uint16_t *)p->a)[(size_t)t * p->hidden + i] = to_bf16((float)a);
        }
    }
    free(v);
}
cudaError_t bt_cu_layer_norm(const struct bt_cu_layer_norm *a, cudaStream_t s)
{
    cuda_host_launch(s, run_layer_norm, a, sizeof(*a));
    return a->keep && a->rows ? cudaErrorInvalidValue : cudaSuccess;
}

struct gelu {
    const float *y, *bias;
    uint16_t *a;
    uint32_t n, width;
};
static void run_gelu(const void *args)
{
    const struct gelu *p = args;
    for (size_t i = 0; i < (size_t)p->n * p->width; i++) {
        float v = p->y[i] + p->bias[i % p->width];
        p->a[i] = to_bf16(0.5f * v * (1 + tanhf(0.7978846f * (v + 0.044715f * v * v * v))));
    }
}
cudaError_t bt_cu_gelu(const float *y, const float *bias, uint32_t n, uint32_t width, void *a,
                       cudaStream_t s)
{
    const struct gelu p = {y, bias, a, n, width};
    cuda_host_launch(s, run_gelu, &p, sizeof(p));
    return cudaSuccess;
}

/* The scale: the smallest power of two with which no value exceeds 448. */
static void append_e4m3(uint8_t *out, uint8_t *scale, const float *v, uint32_t d)
{
    float top = 0;
    for (uint32_t i = 0; i < d; i++) {
        top = fmaxf(top, fabsf(v[i]));
    }
    int e = top > 0 ? BT_MAX(ilogbf(top) - 8, -126) : -127;
    e += top > 0 && ldexpf(top, -e) > 448;
    for (uint32_t i = 0; i < d; i++) {
        out[i] = to_e4m3(e == -127 ? v[i] : ldexpf(v[i], -e));
    }
    *scale = (uint8_t)(e + 127);
}

static void append_head(const struct bt_cu_append *a, uint32_t t, uint32_t head)
{
    uint32_t d = a->head_dim, all = a->heads + 2 * a->kv_heads;
    bool is_q = head < a->heads, is_v = head >= a->heads + a->kv_heads;
    const float *in = a->qkv + ((size_t)t * all + head) * d;
    const float *norm = is_q ? a->q_norm : is_v ? NULL : a->k_norm;
    uint32_t pos = (uint32_t)a->pos[t];
    float v[256];
    for (uint32_t i = 0; i < d; i++) {
        v[i] = in[i] + (a->bias ? a->bias[(size_t)head * d + i] : 0);
    }
    if (norm) {
        float f = 1 / sqrtf(dot(v, v, d) / (float)d + a->eps);
        for (uint32_t i = 0; i < d; i++) {
            v[i] *= f * norm[i];
        }
    }
    const float *cs = a->rope + (size_t)pos * d;
    for (uint32_t i = 0; i < d / 2; i++) {
        float c = is_v ? 1 : cs[i], s = is_v ? 0 : cs[d / 2 + i], lo = v[i], hi = v[d / 2 + i];
        v[i] = lo * c - hi * s;
        v[d / 2 + i] = hi * c + lo * s;
    }
    half *out = (half *)a->q + ((size_t)t * a->heads + head) * d;
    if (!is_q) {
        uint32_t plane = (head - a->heads - (is_v ? a->kv_heads : 0)) * 2 + is_v;
        size_t page =
            (size_t)a->table[(size_t)a->slots[t] * a->table_stride + pos / a->page_tokens];
        size_t segment = page * a->page_rows + a->layer_row;
        size_t row = plane * a->page_tokens + pos % a->page_tokens;
        if (a->e4m3) {
            append_e4m3((uint8_t *)a->pool + (segment + row) * d,
                        (uint8_t *)a->pool + (segment + a->scale_row) * d + row, v, d);
            return;
        }
        out = (half *)a->pool + (segment + row) * d;
    }
    for (uint32_t i = 0; i < d; i++) {
        out[i] = to_f16(v[i]);
    }
}
static void run_append(const void *args)
{
    const struct bt_cu_append *a = args;
    for (uint32_t t = 0; t < a->n; t++) {
        for (uint32_t h = 0; a->slots[t] >= 0 && h < a->heads + 2 * a->kv_heads; h++) {
            append_head(a, t, h);
        }
    }
}
cudaError_t bt_cu_append(const struct bt_cu_append *a, cudaStream_t s)
{
    cuda_host_launch(s, run_append, a, sizeof(*a));
    return cudaSuccess;
}

/* ---- products of many rows ---- */

bool bt_cu_wide_fits(uint32_t m, uint32_t n, uint32_t k)
{
    (void)n;
    (void)k;
    return m == 16; /* one trial, and then all with as many rows or more */
}
cudaError_t bt_cu_wide_swiglu(const void *w, const void *x, void *y, uint32_t m, uint32_t n,
                              uint32_t k, cudaStream_t s)
{
    return bt_cu_gemv_swiglu(bt_cu_bf16(w), x, y, m, n, k, s);
}

cudaError_t bt_cu_wide_sum(const void *w, const void *x, float *y, uint32_t m, uint32_t n,
                           uint32_t k, struct bt_cu_wide_part part, bool add, cudaStream_t s)
{
    bool whole = part.first == 0 && part.end == (k + 63) / 64;
    return whole ? bt_cu_gemm_run(NULL, w, x, y, m, n, k, false, add, s) : cudaErrorInvalidValue;
}

struct wide_append {
    struct cuda_host_product p;
    struct bt_cu_append a;
};
static void run_wide_append(const void *args)
{
    struct wide_append w = *(const struct wide_append *)args;
    float *y = malloc((size_t)w.p.m * w.p.n * 4);
    w.p.y = y;
    w.a.qkv = y;
    cuda_host_run_product(&w.p);
    run_append(&w.a);
    free(y);
}
cudaError_t bt_cu_wide_append(const void *w, const void *x, uint32_t k,
                              const struct bt_cu_append *a, cudaStream_t s)
{
    const struct wide_append p = {{bt_cu_bf16(w),
                                   x,
                                   {0},
                                   NULL,
                                   a->n,
                                   (a->heads + 2 * a->kv_heads) * a->head_dim,
                                   k,
                                   false,
                                   false},
                                  *a};
    cuda_host_launch(s, run_wide_append, &p, sizeof(p));
    return a->e4m3 ? cudaErrorInvalidValue : cudaSuccess;
}

struct dummy {
    uint16_t *w;
    size_t n;
    float sigma;
    uint32_t seed;
};
static void run_dummy(const void *args)
{
    const struct dummy *p = args;
    uint64_t x = p->seed;
    for (size_t i = 0; i < p->n; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        p->w[i] = to_bf16((float)(int32_t)(x >> 32) * 0x1p-31f * p->sigma);
    }
}
cudaError_t bt_cu_dummy_bf16(void *w, size_t n, float sigma, uint32_t seed, cudaStream_t s)
{
    const struct dummy p = {w, n, sigma, seed};
    cuda_host_launch(s, run_dummy, &p, sizeof(p));
    return cudaSuccess;
}

struct f16 {
    uint16_t *w;
    size_t n;
};
static void run_f16(const void *args)
{
    const struct f16 *p = args;
    for (size_t i = 0; i < p->n; i++) {
        half h = to_f16(from_bf16(p->w[i]));
        memcpy(&p->w[i], &h, 2);
    }
}
cudaError_t bt_cu_bf16_to_f16(void *w, size_t n, cudaStream_t s)
{
    const struct f16 p = {w, n};
    cuda_host_launch(s, run_f16, &p, sizeof(p));
    return cudaSuccess;
}

/* ---- attention ---- */

struct bt_attn {
    struct bt_attn_pool pool;
    const struct bt_attn_queries *queries; /* of the last plan */
    uint32_t n;
};
cudaError_t bt_attn_create(const struct bt_attn_pool *pool, uint32_t max_batch,
                           struct bt_attn **attn_p)
{
    (void)max_batch;
    *attn_p = malloc(sizeof(**attn_p));
    (*attn_p)->pool = *pool;
    return cudaSuccess;
}
void bt_attn_destroy(struct bt_attn *a)
{
    free(a);
}
uint32_t bt_attn_prefill_tokens(const struct bt_attn *a)
{
    (void)a;
    return 24;
}
/* Fewer than the device's kernels have, so that rows with drafts take several entries. */
uint32_t bt_attn_decode_most(const struct bt_attn *a)
{
    return BT_MAX(12 / (a->pool.heads / a->pool.kv_heads), 1u);
}
cudaError_t bt_attn_decode_plan(struct bt_attn *a, const struct bt_attn_queries *queries,
                                uint32_t n, uint32_t most, cudaStream_t s)
{
    (void)s;
    a->queries = queries; /* read when the step runs, as the device reads what it made of them */
    a->n = n;
    return n && most && most <= bt_attn_decode_most(a) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t bt_attn_segments_plan(struct bt_attn *a, const struct bt_attn_item *items,
                                  uint32_t n_items, cudaStream_t s)
{
    (void)items;
    (void)s;
    return a->pool.segment && n_items && n_items <= a->pool.items ? cudaSuccess
                                                                  : cudaErrorInvalidValue;
}

/* One row of the pool as f32, counted in its segment. */
static void kv_row(const struct bt_attn_pool *p, size_t segment, size_t row, float *to)
{
    if (p->type != BT_CU_E4M3) {
        from_half((const half *)p->kv + (segment + row) * p->head_dim, p->head_dim, to);
        return;
    }
    const uint8_t *v = (const uint8_t *)p->kv + (segment + row) * p->head_dim;
    int e = ((const uint8_t *)p->kv + (segment + p->scale_row) * p->head_dim)[row];
    float scale = e ? ldexpf(1, e - 127) : 0;
    for (uint32_t i = 0; i < p->head_dim; i++) {
        to[i] = cuda_host_e4m3[v[i]] * scale;
    }
}

/* One query token that sees `len` tokens; a KV head serves a group of up to 16 query heads. */
static void attend(const struct bt_attn_pool *p, uint32_t layer_row, const half *q, uint16_t *out,
                   const int32_t *table, uint32_t len)
{
    uint32_t d = p->head_dim, group = p->heads / p->kv_heads;
    uint32_t from = p->window && len > p->window ? len - p->window : 0;
    float scale = p->scale > 0 ? p->scale : 1 / sqrtf((float)d);
    float *score = malloc((size_t)group * len * sizeof(*score));
    float query[16][256], mean[16][256], sum[16], top[16], kv[256];
    for (uint32_t k = 0; k < p->kv_heads; k++) {
        for (uint32_t g = 0; g < group; g++) {
            from_half(q + (k * group + g) * d, d, query[g]);
            memset(mean[g], 0, sizeof(mean[g]));
            sum[g] = 0;
            top[g] = -INFINITY;
        }
        for (uint32_t t = 2 * from; t < 2 * len; t++) { /* all keys, then all values */
            bool value = t >= from + len;
            uint32_t at = value ? t - len : t - from;
            kv_row(p, (size_t)table[at / p->page_tokens] * p->page_rows + layer_row,
                   ((size_t)k * 2 + value) * p->page_tokens + at % p->page_tokens, kv);
            for (uint32_t g = 0; g < group; g++) {
                float *s = &score[(size_t)g * len + at];
                if (value) {
                    float e = expf(*s - top[g]);
                    sum[g] += e;
                    add_scaled(mean[g], e, kv, d);
                } else {
                    *s = scale * dot(query[g], kv, d);
                    top[g] = fmaxf(top[g], *s);
                }
            }
        }
        for (uint32_t i = 0; i < group * d; i++) {
            float v = mean[i / d][i % d] / sum[i / d];
            out[k * group * d + i] = p->out_type == BT_CU_F16 ? half_bits(v) : to_bf16(v);
        }
    }
    free(score);
}

struct decode {
    struct bt_attn_pool pool;
    struct bt_attn_decode d;
    const struct bt_attn_queries *queries;
    uint32_t n, layer_row;
};
static void run_decode(const void *args)
{
    const struct decode *p = args;
    for (uint32_t i = 0; i < p->n; i++) {
        const struct bt_attn_queries *q = &p->queries[i];
        BT_ASSERT(q->len == 0 || (q->n > 0 && q->n <= (int32_t)p->d.most));
        for (int32_t j = 0; q->len > 0 && j < q->n; j++) {
            size_t row = (size_t)(q->row + j);
            attend(&p->pool, p->layer_row, (const half *)p->d.q + row * p->d.q_stride,
                   (uint16_t *)p->d.out + row * p->d.out_stride,
                   p->d.table + (size_t)q->slot * p->d.table_stride,
                   (uint32_t)(q->len - q->n + 1 + j));
        }
    }
}
cudaError_t bt_attn_decode(struct bt_attn *a, const struct bt_attn_decode *d, uint32_t layer_row,
                           cudaStream_t s)
{
    const struct decode p = {a->pool, *d, a->queries, a->n, layer_row};
    cuda_host_launch(s, run_decode, &p, sizeof(p));
    return cudaSuccess;
}

struct prefill {
    struct bt_attn_pool pool;
    struct bt_attn_prefill f;
    uint32_t layer_row;
};
static void run_prefill(const void *args)
{
    const struct prefill *p = args;
    for (uint32_t i = 0; i < p->f.n_items; i++) {
        const struct bt_attn_item *it = &p->f.items[i];
        for (int32_t k = 0; k < it->n; k++) {
            size_t row = (size_t)(it->row + k);
            attend(&p->pool, p->layer_row, (const half *)p->f.q + row * p->f.q_stride,
                   (uint16_t *)p->f.out + row * p->f.out_stride,
                   p->f.table + (size_t)it->slot * p->f.table_stride, (uint32_t)(it->pos + k + 1));
        }
    }
}
cudaError_t bt_attn_prefill(struct bt_attn *a, const struct bt_attn_prefill *f, uint32_t layer_row,
                            cudaStream_t s)
{
    const struct prefill p = {a->pool, *f, layer_row};
    cuda_host_launch(s, run_prefill, &p, sizeof(p));
    return cudaSuccess;
}

struct expand {
    struct bt_attn_pool pool;
    half *to;
    const struct bt_attn_span *spans;
    const int32_t *table;
    uint32_t layer_row, n_spans, pages, table_stride;
};
static void run_expand(const void *args)
{
    const struct expand *x = args;
    const struct bt_attn_pool *p = &x->pool;
    uint32_t rows = p->kv_heads * 2 * p->page_tokens, at = 0;
    float v[256];
    for (uint32_t page = 0; page < x->pages; page++) {
        at += at + 1 < x->n_spans && x->spans[at + 1].first <= (int32_t)page;
        const struct bt_attn_span *s = &x->spans[at];
        int32_t from = x->table[(size_t)s->slot * x->table_stride + page - (uint32_t)s->first];
        for (size_t row = 0; row < rows; row++) {
            kv_row(p, (size_t)from * p->page_rows + x->layer_row, row, v);
            for (uint32_t i = 0; i < p->head_dim; i++) {
                x->to[(page * rows + row) * p->head_dim + i] = to_f16(v[i]);
            }
        }
    }
}
cudaError_t bt_attn_expand(const struct bt_attn *from, uint32_t layer_row, void *to,
                           const struct bt_attn_span *spans, uint32_t n_spans, uint32_t pages,
                           const int32_t *table, uint32_t table_stride, cudaStream_t s)
{
    const struct expand x = {from->pool, to, spans, table, layer_row, n_spans, pages, table_stride};
    cuda_host_launch(s, run_expand, &x, sizeof(x));
    return cudaSuccess;
}

/* ---- sampling ---- */

struct draw {
    struct bt_cu_sampling a;
    uint32_t n;
};

/* A history with these counts: prompt tokens first. */
static void history(const uint32_t *counts, uint32_t vocab, struct bt_sampler_row *r)
{
    uint32_t total = 0, n = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        total += (counts[i] >> 31) + (counts[i] & ~BT_CU_COUNT_PROMPT);
    }
    uint32_t *tokens = malloc((total + 1) * sizeof(*tokens));
    for (uint32_t i = 0; i < vocab; i++) {
        if (counts[i] & BT_CU_COUNT_PROMPT) {
            tokens[n++] = i;
        }
    }
    r->n_prompt = n;
    for (uint32_t i = 0; i < vocab; i++) {
        for (uint32_t k = 0; k < (counts[i] & ~BT_CU_COUNT_PROMPT); k++) {
            tokens[n++] = i;
        }
    }
    r->n_tokens = n;
    r->tokens = tokens;
}

static void draw_row(const struct bt_cu_sampling *a, uint32_t n, struct bt_sampler *s)
{
    const struct bt_cu_draw *w = &a->draws[n];
    uint32_t ids[BT_CU_BIAS_MAX];
    float bias[BT_CU_BIAS_MAX], *l = malloc(a->vocab * sizeof(*l));
    struct bt_engine_params p = {.temperature = w->inv_temperature > 0 ? 1 / w->inv_temperature : 0,
                                 .top_p = w->top_p,
                                 .min_p = expf(w->floor),
                                 .top_k = w->top_k,
                                 .typical_p = w->typical_p,
                                 .xtc_probability = w->xtc_probability,
                                 .xtc_threshold = expf(w->xtc_floor),
                                 .repetition_penalty = w->repetition,
                                 .frequency_penalty = w->frequency,
                                 .presence_penalty = w->presence,
                                 .seed = w->seed,
                                 .choice = w->choice,
                                 .logprobs = w->logprobs,
                                 .min_new = UINT32_MAX,
                                 .n_eos = w->n_banned,
                                 .n_bias = w->n_bias,
                                 .bias_ids = ids,
                                 .bias = bias};
    memcpy(p.eos, w->banned, sizeof(p.eos));
    for (uint32_t i = 0; i < w->n_bias; i++) {
        ids[i] = a->bias[(size_t)w->slot * BT_CU_BIAS_MAX + i].id;
        bias[i] = a->bias[(size_t)w->slot * BT_CU_BIAS_MAX + i].value;
    }
    memcpy(l, a->logits + (size_t)w->row * a->vocab, a->vocab * sizeof(*l));
    uint32_t *counts = a->counts + (size_t)w->slot * a->vocab;
    struct bt_sampler_row r = {
        .logits = l,
        .params = &p,
        .position = w->position,
        .mask = a->mask ? a->mask + (size_t)w->row * ((a->vocab + 31) / 32) : NULL,
        .known = a->known,
        .early = w->early ? a->early + (size_t)(w->early - 1) * a->vocab : NULL};
    for (uint32_t k = w->n_before; w->penalties && k > 0; k--) {
        counts[a->draws[n - k].draft]++;
    }
    if (w->penalties) {
        history(counts, a->vocab, &r);
    }
    for (uint32_t k = w->n_before; w->penalties && k > 0; k--) {
        counts[a->draws[n - k].draft]--;
    }
    struct bt_engine_out o = {0};
    bt_sampler_run(s, &r, &o);
    struct bt_cu_drawn *d = &a->out[n];
    d->token = o.token;
    d->bad = o.bad;
    d->logprob = o.logprob;
    d->n_top = o.n_top;
    memcpy(d->top_id, o.top_id, sizeof(d->top_id));
    memcpy(d->top_logprob, o.top_logprob, sizeof(d->top_logprob));
    if (!w->drafts) {
        a->last_token[w->slot] = (int32_t)o.token;
        counts[o.token] += w->penalties && !o.bad;
    }
    free((void *)(uintptr_t)r.tokens);
    free(l);
}
/* Draws of a row with drafts count as long as the token before is the draft. */
static void accept_row(const struct bt_cu_sampling *a, uint32_t first)
{
    for (uint32_t i = first;; i++) {
        const struct bt_cu_draw *w = &a->draws[i];
        const struct bt_cu_drawn *d = &a->out[i];
        a->last_token[w->slot] = (int32_t)d->token;
        a->counts[(size_t)w->slot * a->vocab + d->token] += w->penalties && !d->bad;
        if (d->bad || d->token != w->draft) {
            return;
        }
    }
}
static void run_draw(const void *args)
{
    const struct draw *d = args;
    struct bt_sampler *s = bt_sampler_create(d->a.vocab);
    for (uint32_t i = 0; i < d->n; i++) {
        draw_row(&d->a, i, s);
    }
    for (uint32_t i = 0; d->a.chosen && i < d->n; i++) {
        if (d->a.draws[i].drafts && d->a.draws[i].n_before == 0) {
            accept_row(&d->a, i);
        }
    }
    bt_sampler_destroy(s);
}
cudaError_t bt_cu_sample_rows(const struct bt_cu_sampling *a, uint32_t n, cudaStream_t s)
{
    const struct draw d = {*a, n};
    cuda_host_launch(s, run_draw, &d, sizeof(d));
    return cudaSuccess;
}

struct count {
    uint32_t *counts;
    const uint32_t *tokens;
    uint32_t vocab, n, n_prompt, one;
};
static void run_count(const void *args)
{
    const struct count *p = args;
    for (uint32_t i = 0; i < p->n; i++) {
        uint32_t token = p->tokens ? p->tokens[i] : p->one;
        if (token < p->vocab) {
            uint32_t *at = &p->counts[token];
            *at = i < p->n_prompt ? *at | BT_CU_COUNT_PROMPT : *at + 1;
        }
    }
}
cudaError_t bt_cu_sample_count(uint32_t *counts, uint32_t vocab, const uint32_t *tokens, uint32_t n,
                               uint32_t n_prompt, cudaStream_t s)
{
    const struct count p = {counts, tokens, vocab, n, n_prompt, 0};
    cuda_host_launch(s, run_count, &p, sizeof(p));
    return cudaSuccess;
}
cudaError_t bt_cu_sample_count_one(uint32_t *counts, uint32_t token, cudaStream_t s)
{
    const struct count p = {counts, NULL, UINT32_MAX, 1, 0, token};
    cuda_host_launch(s, run_count, &p, sizeof(p));
    return cudaSuccess;
}
