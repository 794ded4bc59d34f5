/* The kernels of latent attention in plain C on host memory: what latent.h, mla.h and
 * mla_prefill.h of cuda/attention say, slowly. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "common/engine/cuda/attention/latent.h"
#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/attention/mla_prefill.h"
#include "common/engine/cuda/device.h"
#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/safetensors.h"
#include "common/kv/latent.h"
#include "tests/cuda_host/products.h"
#include "tests/cuda_host/values.h"

#define KV_HEAD ((size_t)(BT_LATENT_NOPE + BT_LATENT_V))

bool bt_cu_hopper(void)
{
    return true;
}

static void to_half(const float *v, uint32_t n, half *to)
{
    for (uint32_t i = 0; i < n; i++) {
        to[i] = to_f16(v[i]);
    }
}

static struct bt_kv_group e4m3_group(void)
{
    struct bt_kv_layout l;
    BT_ASSERT(bt_kv_layout_mla(64, 1, BT_LATENT, BT_LATENT_ROPE, BT_DT_FP8_E4M3, &l) == BT_OK);
    return l.groups[0];
}

/* A row of a pool as f16 values. */
static void row_of(const void *pool, bool e4m3, size_t row, half *out)
{
    if (!e4m3) {
        memcpy(out, (const half *)pool + row * BT_LATENT_ROW, BT_LATENT_ROW * sizeof(*out));
        return;
    }
    const struct bt_kv_group g = e4m3_group();
    const uint8_t *from = (const uint8_t *)pool + row * bt_kv_row_bytes(&g);
    const float *scales = (const float *)(from + bt_kv_latent_scales(&g));
    const uint16_t *rope = (const uint16_t *)(from + bt_kv_latent_rope(&g));
    for (uint32_t i = 0; i < BT_LATENT; i++) {
        out[i] = to_f16(cuda_host_e4m3[from[i]] * scales[i / BT_KV_LATENT_GROUP]);
    }
    for (uint32_t i = 0; i < BT_LATENT_ROPE; i++) {
        out[BT_LATENT + i] = to_f16(bt_f32_of_bf16(rope[i]));
    }
}

static void turn_f32(const struct bt_cu_rope *r, uint32_t t, const float *in, float *out)
{
    const float *cs = r->table + (size_t)r->pos[t] * BT_LATENT_ROPE;
    for (uint32_t k = 0; k < BT_LATENT_ROPE / 2; k++) {
        uint32_t i = r->pairs ? 2 * k : k, j = r->pairs ? i + 1 : i + BT_LATENT_ROPE / 2;
        float c = cs[k], s = cs[BT_LATENT_ROPE / 2 + k], lo = in[i], hi = in[j];
        out[i] = lo * c - hi * s;
        out[j] = hi * c + lo * s;
    }
}
static void turn(const struct bt_cu_rope *r, uint32_t t, const float *in, half *out)
{
    float v[BT_LATENT_ROPE];
    turn_f32(r, t, in, v);
    to_half(v, BT_LATENT_ROPE, out);
}

static void norm(const float *in, const float *w, uint32_t n, float eps, float *out)
{
    float f = 1 / sqrtf(dot(in, in, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) {
        out[i] = in[i] * f * w[i];
    }
}

static void run_append(const void *args)
{
    const struct bt_cu_latent_append *a = args;
    float *v = malloc((a->in_stride + BT_LATENT_ROW) * sizeof(*v));
    for (uint32_t t = 0; t < a->n; t++) {
        const float *in = a->in + (size_t)t * a->in_stride;
        if (a->q_rank) {
            norm(in, a->q_norm, a->q_rank, a->eps, v);
        }
        for (uint32_t i = 0; i < a->q_rank; i++) {
            ((uint16_t *)a->q)[(size_t)t * a->q_rank + i] = to_16(a->q_f16, v[i]);
        }
        if (a->slots[t] < 0) {
            continue;
        }
        uint32_t pos = (uint32_t)a->rope.pos[t];
        size_t page =
            (size_t)a->table[(size_t)a->slots[t] * a->table_stride + pos / a->page_tokens];
        size_t row = page * a->page_rows + a->layer_row + pos % a->page_tokens;
        in += a->in_stride - BT_LATENT_ROW;
        norm(in, a->latent_norm, BT_LATENT, a->eps, v);
        turn_f32(&a->rope, t, in + BT_LATENT, v + BT_LATENT);
        if (a->e4m3) {
            const struct bt_kv_group g = e4m3_group();
            bt_kv_latent_store(&g, v, (uint8_t *)a->pool + row * bt_kv_row_bytes(&g));
        } else {
            to_half(v, BT_LATENT_ROW, (half *)a->pool + row * BT_LATENT_ROW);
        }
    }
    free(v);
}
cudaError_t bt_cu_latent_append(const struct bt_cu_latent_append *a, cudaStream_t s)
{
    cuda_host_launch(s, run_append, a, sizeof(*a));
    return cudaSuccess;
}

/* ---- queries and values ---- */

static void run_queries(const void *args)
{
    const struct bt_cu_latent_queries *a = args;
    for (uint32_t i = 0; i < a->n * a->heads; i++) {
        const float *in =
            a->in + (size_t)(i / a->heads) * a->in_stride + i % a->heads * BT_LATENT_HEAD;
        half *out = (half *)a->out + (size_t)i * BT_LATENT_HEAD;
        to_half(in, BT_LATENT_NOPE, out);
        turn(&a->rope, i / a->heads, in + BT_LATENT_NOPE, out + BT_LATENT_NOPE);
    }
}
cudaError_t bt_cu_latent_queries(const struct bt_cu_latent_queries *a, cudaStream_t s)
{
    cuda_host_launch(s, run_queries, a, sizeof(*a));
    return cudaSuccess;
}

static void run_absorb(const void *args)
{
    const struct bt_cu_latent_queries *a = args;
    const float *kv_b = cuda_host_weights_f16(a->kv_b, a->heads * KV_HEAD * BT_LATENT);
    float sum[BT_LATENT];
    for (uint32_t i = 0; i < a->n * a->heads; i++) {
        uint32_t head = i % a->heads;
        const float *in = a->in + (size_t)(i / a->heads) * a->in_stride + head * BT_LATENT_HEAD;
        const float *w = kv_b + head * KV_HEAD * BT_LATENT;
        half *out = (half *)a->out + (size_t)i * BT_LATENT_ROW;
        memset(sum, 0, sizeof(sum));
        for (uint32_t k = 0; k < BT_LATENT_NOPE; k++) {
            add_scaled(sum, in[k], w + (size_t)k * BT_LATENT, BT_LATENT);
        }
        to_half(sum, BT_LATENT, out);
        turn(&a->rope, i / a->heads, in + BT_LATENT_NOPE, out + BT_LATENT);
    }
}
cudaError_t bt_cu_latent_absorb(const struct bt_cu_latent_queries *a,
                                const struct bt_cu_latent_append *append, cudaStream_t s)
{
    cuda_host_launch(s, run_absorb, a, sizeof(*a));
    return append ? bt_cu_latent_append(append, s) : cudaSuccess;
}

struct values {
    const half *mix, *kv_b;
    uint16_t *out;
    uint32_t n, heads;
    bool f16;
};
static void run_values(const void *args)
{
    const struct values *a = args;
    const float *kv_b = cuda_host_weights_f16(a->kv_b, a->heads * KV_HEAD * BT_LATENT);
    float mix[BT_LATENT];
    for (uint32_t i = 0; i < a->n * a->heads; i++) {
        const float *w = kv_b + (i % a->heads * KV_HEAD + BT_LATENT_NOPE) * BT_LATENT;
        from_half(a->mix + (size_t)i * BT_LATENT, BT_LATENT, mix);
        for (uint32_t d = 0; d < BT_LATENT_V; d++) {
            a->out[(size_t)i * BT_LATENT_V + d] =
                to_16(a->f16, dot(mix, w + (size_t)d * BT_LATENT, BT_LATENT));
        }
    }
}
cudaError_t bt_cu_latent_values(const void *mix, const void *kv_b, uint32_t n, uint32_t heads,
                                void *out, bool f16, cudaStream_t s)
{
    const struct values a = {mix, kv_b, out, n, heads, f16};
    cuda_host_launch(s, run_values, &a, sizeof(a));
    return cudaSuccess;
}

/* ---- keys and values of prompts ---- */

static void run_gather(const void *args)
{
    const struct bt_cu_latent_gather *a = args;
    for (uint32_t r = 0, at = 0; r < a->rows; r++) {
        at += at + 1 < a->n_spans && a->spans[at + 1].first <= (int32_t)r;
        const struct bt_attn_span *s = &a->spans[at];
        uint32_t pos = r - (uint32_t)s->first;
        size_t page = (size_t)a->table[(size_t)s->slot * a->table_stride + pos / a->page_tokens];
        half from[BT_LATENT_ROW];
        row_of(a->pool, a->e4m3, page * a->page_rows + a->layer_row + pos % a->page_tokens, from);
        memcpy((half *)a->latent + (size_t)r * BT_LATENT, from, BT_LATENT * sizeof(half));
        memcpy((half *)a->k_rope + (size_t)r * BT_LATENT_ROPE, from + BT_LATENT,
               BT_LATENT_ROPE * sizeof(half));
    }
}
cudaError_t bt_cu_latent_gather(const struct bt_cu_latent_gather *a, cudaStream_t s)
{
    cuda_host_launch(s, run_gather, a, sizeof(*a));
    return cudaSuccess;
}

cudaError_t bt_cu_gemm_run_f16(struct bt_cu_gemm *g, const void *w, const void *a, void *y,
                               uint32_t m, uint32_t n, uint32_t k, cudaStream_t s)
{
    (void)g;
    const struct cuda_host_product_f16 p = {w, a, y, m, n, k};
    cuda_host_launch(s, cuda_host_run_product_f16, &p, sizeof(p));
    return cudaSuccess;
}

/* ---- attention ---- */

/* One head's query over keys of two parts, and values. */
struct seen {
    const float *key, *rope, *value; /* strides in values from token to token */
    size_t key_stride, rope_stride, value_stride;
    uint32_t key_n, value_n, n;
    float scale;
};

static void attend(const struct seen *s, const half *q, float *out)
{
    float query[BT_LATENT_ROW], top = -INFINITY, sum = 0;
    float *score = malloc((s->n + 1) * sizeof(*score));
    from_half(q, s->key_n + BT_LATENT_ROPE, query);
    memset(out, 0, s->value_n * sizeof(*out));
    for (uint32_t t = 0; t < s->n; t++) {
        score[t] = s->scale * (dot(query, s->key + t * s->key_stride, s->key_n) +
                               dot(query + s->key_n, s->rope + t * s->rope_stride, BT_LATENT_ROPE));
        top = fmaxf(top, score[t]);
    }
    for (uint32_t t = 0; t < s->n; t++) {
        float e = expf(score[t] - top);
        sum += e;
        add_scaled(out, e, s->value + t * s->value_stride, s->value_n);
    }
    for (uint32_t i = 0; i < s->value_n && s->n; i++) {
        out[i] /= sum;
    }
    free(score);
}

struct bt_mla {
    struct bt_mla_pool pool;
    const struct bt_attn_queries *queries; /* of the last plan */
    uint32_t n;
};
cudaError_t bt_mla_create(const struct bt_mla_pool *pool, uint32_t max_batch, struct bt_mla **m_p)
{
    (void)max_batch;
    *m_p = malloc(sizeof(**m_p));
    (*m_p)->pool = *pool;
    return cudaSuccess;
}
void bt_mla_destroy(struct bt_mla *m)
{
    free(m);
}
cudaError_t bt_mla_decode_plan(struct bt_mla *m, const struct bt_attn_queries *queries, uint32_t n,
                               uint32_t most, cudaStream_t s)
{
    (void)s;
    m->queries = queries;
    m->n = n;
    return n && most && most <= BT_MLA_MAX_QUERIES ? cudaSuccess : cudaErrorInvalidValue;
}

/* `queries` tokens of a sequence of `len`, which are its last: q and out begin with theirs. */
static void attend_last(const struct bt_mla_pool *pool, uint32_t layer_row, const int32_t *table,
                        int32_t len, uint32_t queries, const half *q, half *out)
{
    float *kv = malloc(((size_t)len + 1) * BT_LATENT_ROW * sizeof(*kv)), v[BT_LATENT];
    half row[BT_LATENT_ROW];
    for (int32_t t = 0; t < len; t++) {
        size_t page = (size_t)table[t / BT_MLA_PAGE_TOKENS];
        row_of(pool->kv, pool->e4m3,
               page * pool->page_rows + layer_row + (size_t)t % BT_MLA_PAGE_TOKENS, row);
        from_half(row, BT_LATENT_ROW, kv + (size_t)t * BT_LATENT_ROW);
    }
    for (uint32_t k = 0; len > 0 && k < queries * pool->heads; k++) {
        int32_t n = len - (int32_t)(queries - k / pool->heads - 1);
        const struct seen s = {.key = kv,
                               .rope = kv + BT_LATENT,
                               .value = kv,
                               .key_stride = BT_LATENT_ROW,
                               .rope_stride = BT_LATENT_ROW,
                               .value_stride = BT_LATENT_ROW,
                               .key_n = BT_LATENT,
                               .value_n = BT_LATENT,
                               .n = n > 0 ? (uint32_t)n : 0,
                               .scale = pool->scale};
        attend(&s, q + (size_t)k * BT_LATENT_ROW, v);
        to_half(v, BT_LATENT, out + (size_t)k * BT_LATENT);
    }
    free(kv);
}

struct decode {
    struct bt_mla_pool pool;
    struct bt_mla_decode d;
    const struct bt_attn_queries *queries;
    uint32_t n, layer_row;
};
static void run_decode(const void *args)
{
    const struct decode *p = args;
    for (uint32_t i = 0; i < p->n; i++) {
        const struct bt_attn_queries *q = &p->queries[i];
        size_t at = (size_t)q->row * p->pool.heads;
        BT_ASSERT(q->len == 0 || (q->n > 0 && q->n <= (int32_t)p->d.most));
        attend_last(&p->pool, p->layer_row, p->d.table + (size_t)q->slot * p->d.table_stride,
                    q->len, (uint32_t)q->n, (const half *)p->d.q + at * BT_LATENT_ROW,
                    (half *)p->d.out + at * BT_LATENT);
    }
}
cudaError_t bt_mla_decode(struct bt_mla *m, const struct bt_mla_decode *d, uint32_t layer_row,
                          cudaStream_t s)
{
    const struct decode p = {m->pool, *d, m->queries, m->n, layer_row};
    cuda_host_launch(s, run_decode, &p, sizeof(p));
    return cudaSuccess;
}

uint32_t bt_mla_item_tokens(uint32_t heads)
{
    (void)heads;
    return 5;
}
static const struct bt_attn_item *planned; /* the items of the last plan */
cudaError_t bt_mla_invariant_plan(struct bt_mla *m, const struct bt_attn_item *items,
                                  uint32_t n_items, uint32_t most, cudaStream_t s)
{
    (void)s;
    planned = items;
    return m->pool.segment && n_items && most <= 5 ? cudaSuccess : cudaErrorInvalidValue;
}

struct invariant {
    struct bt_mla_pool pool;
    struct bt_mla_invariant d;
    const struct bt_attn_item *items;
    uint32_t layer_row;
};
static void run_invariant(const void *args)
{
    const struct invariant *p = args;
    for (uint32_t i = 0; i < p->d.n_items; i++) {
        const struct bt_attn_item *it = &p->items[i];
        size_t at = (size_t)it->row * p->pool.heads;
        attend_last(&p->pool, p->layer_row, p->d.table + (size_t)it->slot * p->d.table_stride,
                    it->pos + it->n, (uint32_t)it->n, (const half *)p->d.q + at * BT_LATENT_ROW,
                    (half *)p->d.out + at * BT_LATENT);
    }
}
cudaError_t bt_mla_invariant(struct bt_mla *m, const struct bt_mla_invariant *d, uint32_t layer_row,
                             cudaStream_t s)
{
    const struct invariant p = {m->pool, *d, planned, layer_row};
    cuda_host_launch(s, run_invariant, &p, sizeof(p));
    return cudaSuccess;
}

uint32_t bt_mla_prefill_tokens(void)
{
    return 24;
}
/* Rows of n values as f32, one behind the other. */
static float *rows_of(const half *from, uint64_t stride, uint32_t n, uint32_t rows)
{
    float *to = malloc((size_t)n * rows * sizeof(*to));
    for (uint32_t r = 0; r < rows; r++) {
        from_half(from + r * stride, n, to + (size_t)r * n);
    }
    return to;
}
static void run_prefill(const void *args)
{
    const struct bt_mla_prefill *f = args;
    const uint32_t width = f->heads * (uint32_t)KV_HEAD;
    float out[BT_LATENT_V];
    for (uint32_t i = 0; i < f->n_items; i++) {
        const struct bt_mla_prefill_item *it = &f->items[i];
        const uint32_t first = (uint32_t)it->first, pos = (uint32_t)it->pos, n = (uint32_t)it->n;
        float *kv =
            rows_of((const half *)f->kv + first * f->kv_stride, f->kv_stride, width, pos + n);
        float *rope = rows_of((const half *)f->k_rope + first * f->rope_stride, f->rope_stride,
                              BT_LATENT_ROPE, pos + n);
        for (uint32_t k = 0; k < n * f->heads; k++) {
            size_t row = (size_t)it->row + k / f->heads, head = k % f->heads;
            const float *key = kv + head * KV_HEAD;
            const struct seen s = {key,
                                   rope,
                                   key + BT_LATENT_NOPE,
                                   width,
                                   BT_LATENT_ROPE,
                                   width,
                                   BT_LATENT_NOPE,
                                   BT_LATENT_V,
                                   pos + k / f->heads + 1,
                                   f->scale};
            attend(&s, (const half *)f->q + row * f->q_stride + head * BT_LATENT_HEAD, out);
            for (uint32_t d = 0; d < BT_LATENT_V; d++) {
                ((uint16_t *)f->out)[row * f->out_stride + head * BT_LATENT_V + d] =
                    to_16(f->out_f16, out[d]);
            }
        }
        free(kv);
        free(rope);
    }
}
cudaError_t bt_mla_prefill(const struct bt_mla_prefill *f, cudaStream_t s)
{
    cuda_host_launch(s, run_prefill, f, sizeof(*f));
    return cudaSuccess;
}
