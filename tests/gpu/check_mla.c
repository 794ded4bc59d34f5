/* make check-gpu: decode attention over latent KV against a slow kernel, over random ragged
 * batches: latents in f16 and e4m3, 1 to 128 heads, 1 to 8 query tokens of a sequence (the same
 * number of each, or not), lengths 0 to
 * 32k, page edges, both orders of the pool. What the kernel may not read is NaN, what it must write
 * is NaN before. Every step runs twice and must give the same bits. Some results are checked
 * against double precision on the CPU, so that a common mistake of both kernels would show. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define LAYERS    3
#define LAYER     1
#define PAGE      BT_MLA_PAGE_TOKENS
#define MAX_BATCH 320
#define MAX_LEN   32768
#define MAX_ROWS  (MAX_BATCH * BT_MLA_MAX_QUERIES)
#define BEHIND    ((size_t)64 * BT_MLA_LATENT * 2) /* bytes; a group of query rows */
#define WORST     4e-3                             /* P and the result are f16 */

struct setup {
    struct bt_mla_pool pool;
    uint32_t layer_row, batch, queries, table_stride;
    int len[MAX_BATCH];
    int32_t *table;      /* device */
    int32_t *host_table; /* [batch][table_stride] */
    void *kv;
};

static size_t row_bytes(const struct setup *s)
{
    return s->pool.e4m3 ? BT_MLA_E4M3_ROW : BT_MLA_ROW * 2;
}

static int random_len(void)
{
    switch (rnd(6)) {
    case 0: return 1 + (int)rnd(9);
    case 1: return (int)(PAGE * (1 + rnd(6)) - 3 + rnd(7)); /* around page edges */
    case 2: return 1 + (int)rnd(300);
    case 3: return 1 + (int)rnd(2000);
    case 4: return 1 + (int)rnd(8000);
    default: return rnd(8) ? 1 + (int)rnd(1000) : 1 + (int)rnd(MAX_LEN);
    }
}

/* Pages in random order; everything that is not a token of a sequence is NaN. */
static void make_pool(struct setup *s)
{
    struct bt_mla_pool *p = &s->pool;
    uint32_t pages = 3, by_page = rnd(2);
    s->table_stride = MAX_LEN / PAGE;
    for (uint32_t i = 0; i < s->batch; i++) {
        pages += (uint32_t)(s->len[i] + PAGE - 1) / PAGE;
    }
    p->rows = (uint64_t)pages * PAGE * LAYERS;
    p->page_rows = by_page ? PAGE * LAYERS : PAGE;
    s->layer_row = by_page ? PAGE * LAYER : pages * PAGE * LAYER;
    uint32_t *perm = malloc(pages * sizeof(*perm));
    for (uint32_t i = 0; i < pages; i++) {
        perm[i] = i;
    }
    for (uint32_t i = pages - 1; i > 0; i--) {
        uint32_t j = rnd(i + 1), t = perm[i];
        perm[i] = perm[j];
        perm[j] = t;
    }
    size_t table_n = (size_t)s->batch * s->table_stride;
    s->host_table = malloc(table_n * 4);
    memset(s->host_table, 0x7f, table_n * 4); /* page ids that do not exist */
    for (uint32_t i = 0, next = 0; i < s->batch; i++) {
        for (int t = 0; t < s->len[i]; t += PAGE) {
            s->host_table[i * s->table_stride + (uint32_t)t / PAGE] = (int32_t)perm[next++];
        }
    }
    free(perm);
    CHECK(cudaMalloc((void **)&s->table, table_n * 4));
    CHECK(cudaMemcpy(s->table, s->host_table, table_n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&s->kv, p->rows * row_bytes(s)));
    CHECK(cudaMemset(s->kv, 0xff, p->rows * row_bytes(s)));
    p->kv = s->kv;
    for (uint32_t i = 0; i < s->batch; i++) {
        ref_fill_mla(p, s->layer_row, s->table + i * s->table_stride, s->len[i], rnd(1u << 30),
                     false);
    }
}

static void free_pool(struct setup *s)
{
    cudaFree(s->kv);
    cudaFree(s->table);
    free(s->host_table);
}

static double from_f16(uint16_t v)
{
    int e = v >> 10 & 31, m = v & 1023;
    double f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return v >> 15 ? -f : f;
}

static double from_e4m3(uint8_t v)
{
    int e = v >> 3 & 15, m = v & 7;
    double f = e == 15 && m == 7 ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return v >> 7 ? -f : f;
}

/* A token's row in double. */
static void row_values(const struct setup *s, const uint8_t *row, double *k)
{
    const uint16_t *half = (const uint16_t *)row,
                   *rope = (const uint16_t *)(row + BT_MLA_E4M3_ROPE);
    const float *scale = (const float *)(row + BT_MLA_E4M3_SCALES);
    for (int d = 0; d < BT_MLA_ROW; d++) {
        k[d] = !s->pool.e4m3       ? from_f16(half[d])
               : d < BT_MLA_LATENT ? from_e4m3(row[d]) * (double)scale[d / 128]
                                   : (double)to_float(rope[d - BT_MLA_LATENT], BT_CU_BF16);
    }
}

/* |out - ref| / |ref| of one query row and head, in double on the CPU. */
static double cpu_error(const struct setup *s, const uint16_t *q, const uint16_t *out, int slot,
                        int pos)
{
    static _Alignas(16) uint8_t page[PAGE * BT_MLA_ROW * 2];
    const size_t bytes = row_bytes(s);
    double m = -INFINITY, l = 0, o[BT_MLA_LATENT] = {0}, qd[BT_MLA_ROW], k[BT_MLA_ROW];
    for (int d = 0; d < BT_MLA_ROW; d++) {
        qd[d] = from_f16(q[d]);
    }
    for (int i = 0; i <= pos; i++) {
        if (i % PAGE == 0) {
            int32_t id = s->host_table[(size_t)slot * s->table_stride + (uint32_t)(i / PAGE)];
            size_t row = (size_t)id * s->pool.page_rows + s->layer_row;
            CHECK(cudaMemcpy(page, (uint8_t *)s->kv + row * bytes, PAGE * bytes,
                             cudaMemcpyDeviceToHost));
        }
        double x = 0;
        row_values(s, page + (size_t)(i % PAGE) * bytes, k);
        for (int d = 0; d < BT_MLA_ROW; d++) {
            x += qd[d] * k[d];
        }
        x *= (double)s->pool.scale;
        double top = fmax(m, x), f = exp(m - top), w = exp(x - top);
        l = l * f + w;
        for (int d = 0; d < BT_MLA_LATENT; d++) {
            o[d] = o[d] * f + w * k[d];
        }
        m = top;
    }
    double diff = 0, norm = 0;
    for (int d = 0; d < BT_MLA_LATENT; d++) {
        double r = l > 0 ? o[d] / l : 0, e = from_f16(out[d]) - r;
        diff += e * e;
        norm += r * r;
    }
    return diff == 0 ? 0 : diff == diff && norm > 0 ? sqrt(diff / norm) : 1e9;
}

/* Samples of the result against the CPU. */
static double cpu_samples(const struct setup *s, const void *q, const void *out,
                          const struct ref_row *rows, uint32_t n_rows, int samples)
{
    double worst = 0;
    uint16_t hq[BT_MLA_ROW], ho[BT_MLA_LATENT];
    for (int i = 0; i < samples; i++) {
        uint32_t r = rnd(n_rows);
        size_t at = (size_t)r * s->pool.heads + rnd(s->pool.heads);
        if (s->len[rows[r].slot] == 0) {
            continue; /* left out */
        }
        CHECK(cudaMemcpy(hq, (const uint16_t *)q + at * BT_MLA_ROW, sizeof(hq),
                         cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(ho, (const uint16_t *)out + at * BT_MLA_LATENT, sizeof(ho),
                         cudaMemcpyDeviceToHost));
        worst = fmax(worst, cpu_error(s, hq, ho, rows[r].slot, rows[r].pos));
    }
    return worst;
}

/* The batch's lengths: random; or all the same, which cuts no or every sequence. */
static void random_shape(struct setup *s, int i)
{
    static const uint32_t heads[] = {16, 128, 64, 32}, batches[] = {0, 0, 0, 132, 0, 1, 257};
    s->pool.heads = i % 9 < 5 ? heads[i % 4] : 1 + rnd(rnd(2) ? 17 : BT_MLA_MAX_HEADS);
    s->pool.scale = i % 3 == 0 ? 0.0722f : 0.135f;
    s->pool.e4m3 = rnd(2);
    s->queries = i % 8 < 4 ? 1 : 1 + rnd(BT_MLA_MAX_QUERIES);
    s->batch = batches[i % 7] ? batches[i % 7] : 1 + rnd(40);
    int same = i % 5 == 4 ? 1 + (int)rnd(1000) : 0;
    for (uint32_t b = 0; b < s->batch; b++) {
        s->len[b] = same ? same : s->batch > 40 ? 1 + (int)rnd(400) : random_len();
        s->len[b] = s->batch > 1 && rnd(12) == 0 ? 0 : s->len[b];
    }
    if (i % 7 == 5) { /* one sequence, cut many times */
        s->len[0] = i % 2 ? MAX_LEN : 1 + (int)rnd(MAX_LEN);
    }
}

/* Largest error of the result, of which `host` is a copy with the bytes behind it. 1e9 if bytes
 * changed that must not: those behind it, and sequences of length 0. */
static float worst_of(const struct setup *s, const struct bt_attn_queries *q, const uint8_t *host,
                      const void *out, const float *ref)
{
    const uint32_t heads = s->pool.heads;
    const size_t per_row = (size_t)heads * BT_MLA_LATENT;
    float worst = 0;
    for (uint32_t b = 0; b <= s->batch; b++) {
        const struct bt_attn_queries *last = &q[s->batch - 1];
        size_t row = (size_t)(b < s->batch ? q[b].row : last->row + last->n);
        size_t n = b < s->batch ? (size_t)q[b].n * per_row * 2 : BEHIND;
        if (b < s->batch && q[b].len > 0) {
            worst = fmaxf(worst, ref_worst((const uint16_t *)out + row * per_row, (uint32_t)per_row,
                                           BT_CU_F16, ref + row * per_row, (uint32_t)q[b].n, heads,
                                           BT_MLA_LATENT));
            continue;
        }
        for (size_t k = 0; k < n; k++) {
            worst = host[row * per_row * 2 + k] == 0xff ? worst : 1e9f;
        }
    }
    return worst;
}

static int check(int i)
{
    struct setup s = {0};
    random_shape(&s, i);
    make_pool(&s);
    static struct ref_row host_rows[MAX_ROWS];
    static struct bt_attn_queries host_queries[MAX_BATCH];
    const uint32_t heads = s.pool.heads;
    uint32_t n_rows = 0;
    for (uint32_t b = 0; b < s.batch; b++) { /* entries in another order than slots */
        int slot = s.batch % 7 == 0 ? (int)b : (int)((b * 7 + 3) % s.batch), len = s.len[slot];
        int n = i % 16 < 8 ? (int)s.queries : 1 + (int)rnd(s.queries); /* all the same, or not */
        host_queries[b] = (struct bt_attn_queries){(int32_t)n_rows, n, slot, len};
        for (int j = 0; j < n; j++) {
            host_rows[n_rows++] = (struct ref_row){slot, len - n + j};
        }
    }
    const size_t q_n = (size_t)n_rows * heads * BT_MLA_ROW;
    const size_t out_bytes = (size_t)n_rows * heads * BT_MLA_LATENT * 2;
    void *q, *out;
    float *ref;
    struct bt_attn_queries *queries = device_memory(host_queries, s.batch * sizeof(*queries));
    struct ref_row *rows = device_memory(host_rows, n_rows * sizeof(*rows));
    CHECK(cudaMalloc(&q, q_n * 2));
    CHECK(cudaMalloc(&out, out_bytes + BEHIND));
    CHECK(cudaMalloc((void **)&ref, out_bytes * 2));
    ref_fill(q, q_n, BT_CU_F16, 1.0f, rnd(1u << 30));
    ref_mla(&s.pool, s.layer_row, q, rows, n_rows, s.table, s.table_stride, ref);
    struct bt_mla *m;
    CHECK(bt_mla_create(&s.pool, MAX_BATCH, &m));
    struct bt_mla_decode d = {q, out, n_rows, s.queries, s.table, s.table_stride};
    uint8_t *first = malloc(out_bytes + BEHIND), *again = malloc(out_bytes + BEHIND);
    for (int run = 0; run < 2; run++) {
        CHECK(cudaMemset(out, 0xff, out_bytes + BEHIND));
        CHECK(bt_mla_decode_plan(m, queries, s.batch, s.queries, 0));
        CHECK(bt_mla_decode(m, &d, s.layer_row, 0));
        CHECK(cudaMemcpy(run ? again : first, out, out_bytes + BEHIND, cudaMemcpyDeviceToHost));
    }
    float worst = worst_of(&s, host_queries, first, out, ref);
    double cpu = cpu_samples(&s, q, out, host_rows, n_rows, 3);
    int same = memcmp(first, again, out_bytes) == 0, ok = worst < WORST && cpu < WORST && same;
    int longest = 0;
    for (uint32_t b = 0; b < s.batch; b++) {
        longest = s.len[b] > longest ? s.len[b] : longest;
    }
    printf("%s %s %3u heads %u queries batch %3u longest %5d: worst %.1e cpu %.1e%s\n",
           ok ? "ok  " : "FAIL", s.pool.e4m3 ? "e4m3" : "f16 ", heads, s.queries, s.batch, longest,
           worst, cpu, same ? "" : " NOT REPEATABLE");
    fflush(stdout);
    bt_mla_destroy(m);
    free(first);
    free(again);
    void *all[] = {q, out, ref, queries, rows};
    for (int k = 0; k < 5; k++) {
        cudaFree(all[k]);
    }
    free_pool(&s);
    return ok;
}

/* Shapes that the kernel lacks and tensors that are not aligned are refused. */
static int check_refusals(void)
{
    struct bt_mla *m = NULL;
    void *kv;
    CHECK(cudaMalloc(&kv, 1 << 20));
    const struct bt_mla_pool good = {
        .kv = kv, .rows = 128, .page_rows = 64, .heads = 16, .scale = 0.1f};
    struct bt_mla_pool heads = good, none = good, scale = good, rows = good;
    heads.heads = BT_MLA_MAX_HEADS + 1;
    none.heads = 0;
    scale.scale = 0;
    rows.rows = 1ull << 31;
    struct bt_mla_decode d = {.most = 9, .tokens = 1}, none_of = {.most = 1},
                         odd_q = {.q = (char *)kv + 8, .most = 1, .tokens = 1},
                         odd_out = {.q = kv, .out = (char *)kv + 4, .most = 1, .tokens = 1};
    int ok = bt_mla_create(&heads, 4, &m) == cudaErrorInvalidValue &&
             bt_mla_create(&none, 4, &m) == cudaErrorInvalidValue &&
             bt_mla_create(&scale, 4, &m) == cudaErrorInvalidValue &&
             bt_mla_create(&rows, 4, &m) == cudaErrorInvalidValue &&
             bt_mla_create(&good, 0, &m) == cudaErrorInvalidValue && !m;
    CHECK(bt_mla_create(&good, 4, &m));
    ok = ok && bt_mla_decode(m, &d, 0, 0) == cudaErrorInvalidValue &&
         bt_mla_decode(m, &none_of, 0, 0) == cudaErrorInvalidValue &&
         bt_mla_decode_plan(m, kv, 5, 1, 0) == cudaErrorInvalidValue &&
         bt_mla_decode_plan(m, kv, 1, 9, 0) == cudaErrorInvalidValue &&
         bt_mla_decode(m, &odd_q, 0, 0) == cudaErrorInvalidValue &&
         bt_mla_decode(m, &odd_out, 0, 0) == cudaErrorInvalidValue;
    bt_mla_destroy(m);
    cudaFree(kv);
    printf("%s refusals\n", ok ? "ok  " : "FAIL");
    return ok;
}

/* [CASES [SEED]] */
int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 84, devices = 0;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    printf("# seed %llu\n", (unsigned long long)seed);
    int failed = !check_refusals();
    for (int i = 0; i < n; i++) {
        rng = seed + (uint64_t)i;
        failed += !check(i);
    }
    printf("%d passed, %d failed\n", n + 1 - failed, failed);
    return failed != 0;
}
