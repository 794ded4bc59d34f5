/* make check-gpu: the kernels of a layer with latent attention against double precision on the CPU:
 * latents as they go to pages, norms of queries, queries of prompts, absorbed queries, values of
 * mixed latents, latents gathered from pages. Pages in e4m3 against common/kv/latent.h. Fresh
 * inputs; what must be written is NaN before, and what must not is the same afterwards. */
#include <time.h>

#include "common/engine/cuda/attention/latent.h"
#include "common/engine/cuda/attention/mla.h"
#include "common/kv/latent.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define POSITIONS 512
#define EPS       1e-6f

static double f16(uint16_t v)
{
    return to_float(v, BT_CU_F16);
}
static double bf16(uint16_t v)
{
    return to_float(v, BT_CU_BF16);
}

static uint32_t row_bytes(bool e4m3)
{
    return e4m3 ? BT_MLA_E4M3_ROW : BT_LATENT_ROW * 2;
}
/* What a latent in e4m3, or its key part, says. */
static double e4m3_value(const uint8_t *row, uint32_t i)
{
    if (i >= BT_LATENT) {
        return bf16(((const uint16_t *)(row + BT_MLA_E4M3_ROPE))[i - BT_LATENT]);
    }
    int e = row[i] >> 3 & 15, m = row[i] & 7;
    double f = e == 15 && m == 7 ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return (row[i] >> 7 ? -f : f) *
           (double)((const float *)(row + BT_MLA_E4M3_SCALES))[i / BT_KV_LATENT_GROUP];
}
static double row_value(const uint8_t *row, uint32_t i, bool e4m3)
{
    return e4m3 ? e4m3_value(row, i) : f16(((const uint16_t *)row)[i]);
}
static struct bt_kv_group e4m3_group(void)
{
    struct bt_kv_layout l;
    if (bt_kv_layout_mla(64, 1, BT_LATENT, BT_LATENT_ROPE, BT_DT_FP8_E4M3, &l) != BT_OK ||
        bt_kv_row_bytes(&l.groups[0]) != BT_MLA_E4M3_ROW ||
        bt_kv_latent_scales(&l.groups[0]) != BT_MLA_E4M3_SCALES ||
        bt_kv_latent_rope(&l.groups[0]) != BT_MLA_E4M3_ROPE) {
        fprintf(stderr, "the kernels have another row than common/kv/latent.h\n");
        exit(1);
    }
    return l.groups[0];
}

/* Device memory with a copy on the host: random (sigma above 0), or all bytes 0xff. */
struct array {
    void *d;
    union {
        void *h;
        float *f;
        uint16_t *u;
        int32_t *i;
    };
    size_t bytes;
};
static struct array array(size_t bytes)
{
    struct array a = {.h = malloc(bytes), .bytes = bytes};
    CHECK(cudaMalloc(&a.d, bytes));
    CHECK(cudaMemset(a.d, 0xff, bytes));
    memset(a.h, 0xff, bytes);
    return a;
}
static struct array random_f32(size_t n)
{
    struct array a = array(n * 4);
    for (size_t i = 0; i < n; i++) {
        a.f[i] = ((float)rnd(1 << 24) * 0x1p-23f - 1) * (rnd(50) ? 1 : 6);
    }
    CHECK(cudaMemcpy(a.d, a.h, a.bytes, cudaMemcpyHostToDevice));
    return a;
}
static struct array random_f16(size_t n, float sigma)
{
    struct array a = array(n * 2);
    ref_fill(a.d, n, BT_CU_F16, sigma, rnd(1 << 30));
    CHECK(cudaMemcpy(a.h, a.d, a.bytes, cudaMemcpyDeviceToHost));
    return a;
}
static struct array ints(const int32_t *v, size_t n)
{
    struct array a = array(n * 4);
    memcpy(a.h, v, n * 4);
    CHECK(cudaMemcpy(a.d, a.h, a.bytes, cudaMemcpyHostToDevice));
    return a;
}
static void fetch(struct array *a)
{
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(a->h, a->d, a->bytes, cudaMemcpyDeviceToHost));
}
static void drop(struct array *a, int n)
{
    for (int i = 0; i < n; i++) {
        cudaFree(a[i].d);
        free(a[i].h);
    }
}

struct sum { /* of squares */
    double diff, norm;
};
static void add(struct sum *s, double got, double want)
{
    s->diff += (got - want) * (got - want);
    s->norm += want * want;
}
static uint32_t n_checks, n_failed;
static void report(const char *what, const struct sum *s, double limit, uint32_t bad, uint32_t n,
                   uint32_t heads)
{
    double e = sqrt(s->diff / s->norm);
    int ok = e < limit && bad == 0; /* false for NaN */
    n_checks++;
    n_failed += !ok;
    printf("%s %-8s n %4u heads %3u: %.1e, %u other\n", ok ? "ok  " : "FAIL", what, n, heads, e,
           bad);
}

/* Angles as a model has them; cosines and sines are scaled as with YaRN. */
static struct array rope_table(void)
{
    struct array a = array((size_t)POSITIONS * BT_LATENT_ROPE * 4);
    for (uint32_t i = 0; i < POSITIONS * BT_LATENT_ROPE; i++) {
        uint32_t k = i % 32;
        double angle = i / BT_LATENT_ROPE * pow(10000, -(double)k / 32);
        a.f[i] = (float)((i % BT_LATENT_ROPE < 32 ? cos(angle) : sin(angle)) * 1.1);
    }
    CHECK(cudaMemcpy(a.d, a.h, a.bytes, cudaMemcpyHostToDevice));
    return a;
}
static void turn(const float *in, const struct array *table, int32_t pos, bool pairs, double *out)
{
    const float *cs = table->f + (size_t)pos * BT_LATENT_ROPE;
    for (int k = 0; k < 32; k++) {
        int i = pairs ? 2 * k : k, j = pairs ? i + 1 : i + 32;
        out[i] = (double)in[i] * cs[k] - (double)in[j] * cs[32 + k];
        out[j] = (double)in[j] * cs[k] + (double)in[i] * cs[32 + k];
    }
}

static double normed(const float *in, const float *w, uint32_t n, uint32_t i)
{
    double sum = 0;
    for (uint32_t k = 0; k < n; k++) {
        sum += (double)in[k] * in[k];
    }
    return in[i] / sqrt(sum / n + EPS) * w[i];
}

/* Queries of no interest, absorbed in the same launch as `a`. */
static void append_beside(const struct bt_cu_latent_append *a)
{
    enum { HEADS = 2, N = 20 };
    struct array w = random_f16((size_t)HEADS * 256 * BT_LATENT, 1),
                 in = random_f32((size_t)N * HEADS * BT_LATENT_HEAD),
                 out = array((size_t)N * HEADS * BT_LATENT_ROW * 2), pos = array(N * 4);
    CHECK(cudaMemset(pos.d, 0, pos.bytes));
    const struct bt_cu_latent_queries q = {.in = in.d,
                                           .kv_b = w.d,
                                           .out = out.d,
                                           .rope = {a->rope.table, pos.d, true},
                                           .in_stride = HEADS * BT_LATENT_HEAD,
                                           .n = N,
                                           .heads = HEADS};
    CHECK(bt_cu_latent_absorb(&q, a, 0));
    CHECK(cudaDeviceSynchronize());
    struct array all[] = {w, in, out, pos};
    drop(all, 4);
}

static void check_append(uint32_t n, uint32_t q_rank, uint32_t page, bool pairs, bool e4m3)
{
    enum { PAGES = 8, LAYERS = 3, LAYER = 1 };
    uint32_t width = (q_rank ? q_rank : 384) + BT_LATENT_ROW, bad = 0, len = PAGES * page;
    struct array a[] = {random_f32((size_t)n * width),
                        random_f32(BT_LATENT),
                        random_f32(q_rank + 4),
                        rope_table(),
                        array((size_t)n * (q_rank + 1) * 2),
                        array((size_t)PAGES * LAYERS * page * row_bytes(e4m3))};
    int32_t *pos = malloc(n * 4), *slots = malloc(n * 4), table[2 * PAGES];
    for (uint32_t t = 0; t < n; t++) { /* slot 1's pages are in order, padding in between */
        pos[t] = (int32_t)(t * 7 % len);
        slots[t] = t % 5 == 3 ? -1 : 1;
    }
    for (int i = 0; i < 2 * PAGES; i++) {
        table[i] = i < PAGES ? PAGES - 1 : 2 * PAGES - 1 - i;
    }
    struct array b[] = {ints(pos, n), ints(slots, n), ints(table, 2 * PAGES)};
    const struct bt_cu_latent_append p = {.in = a[0].d,
                                          .in_stride = width,
                                          .latent_norm = a[1].d,
                                          .q_norm = a[2].d,
                                          .q = a[4].d,
                                          .q_rank = q_rank,
                                          .rope = {a[3].d, b[0].d, pairs},
                                          .slots = b[1].d,
                                          .table = b[2].d,
                                          .pool = a[5].d,
                                          .e4m3 = e4m3,
                                          .page_rows = LAYERS * page,
                                          .layer_row = LAYER * page,
                                          .n = n,
                                          .page_tokens = page,
                                          .table_stride = PAGES,
                                          .eps = EPS};
    if (q_rank) {
        CHECK(bt_cu_latent_append(&p, 0));
    } else {
        append_beside(&p);
    }
    fetch(&a[4]);
    fetch(&a[5]);
    struct sum latent = {0}, q = {0};
    double key[BT_LATENT_ROPE];
    uint8_t *written = calloc(len, 1);
    for (uint32_t t = 0; t < n; t++) {
        const float *in = a[0].f + (size_t)t * width, *lat = in + width - BT_LATENT_ROW;
        for (uint32_t i = 0; i < q_rank; i += 3) {
            add(&q, bf16(a[4].u[(size_t)t * q_rank + i]), normed(in, a[2].f, q_rank, i));
        }
        if (slots[t] < 0) {
            continue;
        }
        uint32_t at = (uint32_t)pos[t];
        size_t row = ((size_t)table[PAGES + at / page] * LAYERS + LAYER) * page + at % page;
        const uint8_t *got = (const uint8_t *)a[5].h + row * row_bytes(e4m3);
        turn(lat + BT_LATENT, &a[3], pos[t], pairs, key);
        for (uint32_t i = 0; i < BT_LATENT_ROW; i++) {
            add(&latent, row_value(got, i, e4m3),
                i < BT_LATENT ? normed(lat, a[1].f, BT_LATENT, i) : key[i - BT_LATENT]);
        }
        written[at] = 1;
    }
    for (size_t i = 0; i < a[5].bytes / 2; i++) { /* other rows are as they were */
        size_t row = i * 2 / row_bytes(e4m3), in = row % (LAYERS * page),
               pg = row / (LAYERS * page);
        size_t at = (size_t)(PAGES - 1 - pg) * page + in % page;
        bad += (in / page != LAYER || !written[at]) && a[5].u[i] != 0xffff;
    }
    report(e4m3 ? "e4m3" : "latent", &latent, e4m3 ? 0.04 : 4e-4, bad, n, q_rank);
    if (q_rank) {
        report("q norm", &q, 3e-3, 0, n, q_rank);
    }
    free(pos);
    free(slots);
    free(written);
    drop(a, 6);
    drop(b, 3);
}

/* Bit for bit what the CPU engine stores of the same f32 values. Of latents that are 1 or -1 the
 * norm makes the weights of the norm, and a RoPE without angle leaves the key part. So any value
 * can be stored: also the largest and smallest, infinite ones and NaN. */
static void check_store(uint32_t round)
{
    enum { N = 5, PAGE = 64 };
    const struct bt_kv_group g = e4m3_group();
    uint8_t want[BT_MLA_E4M3_ROW];
    const int32_t pos[N] = {0, 63, 1, 62, 30}, slots[N] = {0}, table[1] = {0};
    struct array a[] = {array(N * BT_LATENT_ROW * 4), array(BT_LATENT * 4), rope_table(),
                        array(PAGE * BT_MLA_E4M3_ROW)};
    for (uint32_t i = 0; i < POSITIONS * BT_LATENT_ROPE; i++) {
        a[2].f[i] = i % BT_LATENT_ROPE < BT_LATENT_ROPE / 2 ? 1 : 0;
    }
    for (uint32_t i = 0; i < N * BT_LATENT_ROW; i++) {
        bool latent = i % BT_LATENT_ROW < BT_LATENT;
        a[0].f[i] = latent ? (rnd(2) ? 1 : -1) : ((float)rnd(1 << 24) - 0x1p23f) * 0x1p-20f;
    }
    for (uint32_t i = 0; i < BT_LATENT; i++) { /* all sizes, or those near one size */
        int size = round % 2 ? (int)rnd(276) - 148 : (int)(i / 128 * 9 + round) % 60 - 40;
        a[1].f[i] = ldexpf(1 + (float)rnd(1 << 23) * 0x1p-23f, size - (int)rnd(12));
        a[1].f[i] = rnd(9) ? a[1].f[i] : ldexpf(rnd(2) ? 448 : 464, size); /* a limit, a tie */
    }
    a[1].f[rnd(BT_LATENT)] = round % 5 == 1 ? INFINITY : 0;
    a[1].f[rnd(BT_LATENT)] = round % 5 == 2 ? NAN : 0;
    for (int i = 0; i < 3; i++) {
        CHECK(cudaMemcpy(a[i].d, a[i].h, a[i].bytes, cudaMemcpyHostToDevice));
    }
    struct array b[] = {ints(pos, N), ints(slots, N), ints(table, 1)};
    const struct bt_cu_latent_append p = {.in = a[0].d,
                                          .in_stride = BT_LATENT_ROW,
                                          .latent_norm = a[1].d,
                                          .rope = {a[2].d, b[0].d, true},
                                          .slots = b[1].d,
                                          .table = b[2].d,
                                          .pool = a[3].d,
                                          .e4m3 = true,
                                          .page_rows = PAGE,
                                          .n = N,
                                          .page_tokens = PAGE,
                                          .table_stride = 1};
    CHECK(bt_cu_latent_append(&p, 0));
    fetch(&a[3]);
    uint32_t bad = 0;
    for (uint32_t t = 0; t < N; t++) {
        float x[BT_LATENT_ROW];
        for (uint32_t i = 0; i < BT_LATENT_ROW; i++) {
            x[i] = a[0].f[t * BT_LATENT_ROW + i] * (i < BT_LATENT ? a[1].f[i] : 1);
        }
        bt_kv_latent_store(&g, x, want);
        const uint8_t *got = (const uint8_t *)a[3].h + (uint32_t)pos[t] * BT_MLA_E4M3_ROW;
        for (uint32_t i = 0; i < BT_MLA_E4M3_ROW; i++) {
            if (got[i] != want[i] && bad++ == 0) {
                printf("# token %u byte %u: %02x, not %02x of %a\n", t, i, got[i], want[i],
                       (double)x[i < BT_LATENT ? i : 0]);
            }
        }
    }
    report("store", &(struct sum){0, 1}, 1, bad, N, round);
    drop(a, 4);
    drop(b, 3);
}

/* Both kinds of queries. */
static void check_queries(uint32_t n, uint32_t heads, bool pairs)
{
    enum { KV = BT_LATENT_NOPE + BT_LATENT_V };
    uint32_t stride = heads * BT_LATENT_HEAD + BT_LATENT_ROW;
    int32_t *pos = malloc(n * 4);
    for (uint32_t t = 0; t < n; t++) {
        pos[t] = (int32_t)(t * 13 % POSITIONS);
    }
    struct array a[] = {random_f32((size_t)n * stride),
                        random_f16((size_t)heads * KV * BT_LATENT, 0.05f),
                        rope_table(),
                        ints(pos, n),
                        array((size_t)n * heads * BT_LATENT_HEAD * 2),
                        array((size_t)n * heads * BT_LATENT_ROW * 2)};
    struct bt_cu_latent_queries p = {.in = a[0].d,
                                     .kv_b = a[1].d,
                                     .out = a[4].d,
                                     .rope = {a[2].d, a[3].d, pairs},
                                     .in_stride = stride,
                                     .n = n,
                                     .heads = heads};
    CHECK(bt_cu_latent_queries(&p, 0));
    p.out = a[5].d;
    CHECK(bt_cu_latent_absorb(&p, NULL, 0));
    fetch(&a[4]);
    fetch(&a[5]);
    struct sum plain = {0}, absorbed = {0};
    double key[BT_LATENT_ROPE];
    for (uint32_t i = 0; i < n * heads; i++) {
        uint32_t t = i / heads, h = i % heads;
        const float *in = a[0].f + (size_t)t * stride + h * BT_LATENT_HEAD;
        const uint16_t *w = a[1].u + (size_t)h * KV * BT_LATENT;
        const uint16_t *q = a[4].u + (size_t)i * BT_LATENT_HEAD,
                       *r = a[5].u + (size_t)i * BT_LATENT_ROW;
        turn(in + BT_LATENT_NOPE, &a[2], pos[t], pairs, key);
        for (uint32_t k = 0; k < BT_LATENT_HEAD; k++) {
            add(&plain, f16(q[k]), k < BT_LATENT_NOPE ? (double)in[k] : key[k - BT_LATENT_NOPE]);
        }
        for (uint32_t j = 0; j < BT_LATENT_ROW; j++) {
            double sum = j < BT_LATENT ? 0 : key[j - BT_LATENT];
            for (uint32_t k = 0; j < BT_LATENT && k < BT_LATENT_NOPE; k++) {
                sum += (double)in[k] * f16(w[(size_t)k * BT_LATENT + j]);
            }
            add(&absorbed, f16(r[j]), sum);
        }
    }
    report("queries", &plain, 4e-4, 0, n, heads);
    report("absorb", &absorbed, 6e-4, 0, n, heads);
    free(pos);
    drop(a, 6);
}

static void check_values(uint32_t n, uint32_t heads)
{
    enum { KV = BT_LATENT_NOPE + BT_LATENT_V };
    struct array a[] = {random_f16((size_t)n * heads * BT_LATENT, 1),
                        random_f16((size_t)heads * KV * BT_LATENT, 0.05f),
                        array((size_t)n * heads * BT_LATENT_V * 2 + 64)};
    CHECK(bt_cu_latent_values(a[0].d, a[1].d, n, heads, a[2].d, false, 0));
    fetch(&a[2]);
    struct sum s = {0};
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n * heads; i++) {
        const uint16_t *w = a[1].u + ((size_t)i % heads * KV + BT_LATENT_NOPE) * BT_LATENT;
        for (uint32_t d = 0; d < BT_LATENT_V; d++) {
            double sum = 0;
            for (uint32_t k = 0; k < BT_LATENT; k++) {
                sum += f16(a[0].u[(size_t)i * BT_LATENT + k]) * f16(w[(size_t)d * BT_LATENT + k]);
            }
            add(&s, bf16(a[2].u[(size_t)i * BT_LATENT_V + d]), sum);
        }
    }
    for (size_t i = (size_t)n * heads * BT_LATENT_V; i < a[2].bytes / 2; i++) {
        bad += a[2].u[i] != 0xffff;
    }
    report("values", &s, 3e-3, bad, n, heads);
    drop(a, 3);
}

/* Rows that bt_kv_latent_store makes of values that f16 has, too. */
static struct array random_rows(size_t n, bool e4m3)
{
    if (!e4m3) {
        return random_f16(n * BT_LATENT_ROW, 1);
    }
    const struct bt_kv_group g = e4m3_group();
    struct array x = random_f32(n * BT_LATENT_ROW), rows = array(n * BT_MLA_E4M3_ROW);
    for (size_t i = 0; i < n; i++) {
        float *v = x.f + i * BT_LATENT_ROW;
        for (uint32_t k = 0; k < BT_LATENT; k++) {
            v[k] = ldexpf(v[k], (int)(i * 7 + k / 128 * 5) % 38 - 24);
        }
        bt_kv_latent_store(&g, v, (uint8_t *)rows.h + i * BT_MLA_E4M3_ROW);
    }
    CHECK(cudaMemcpy(rows.d, rows.h, rows.bytes, cudaMemcpyHostToDevice));
    drop(&x, 1);
    return rows;
}

/* Sequences of 1 to 200 tokens side by side, every value exactly. */
static void check_gather(uint32_t page, bool e4m3)
{
    enum { SPANS = 7, PER = 16, LAYERS = 2, LAYER = 1 };
    struct bt_attn_span spans[SPANS];
    int32_t table[SPANS * PER];
    uint32_t rows = 0, bad = 0;
    for (int i = 0; i < SPANS; i++) {
        spans[i] = (struct bt_attn_span){.slot = SPANS - 1 - i, .first = (int32_t)rows};
        rows += i % 3 == 0 ? 1 : 1 + rnd(200 < PER * page ? 200 : PER * page);
    }
    for (int i = 0; i < SPANS * PER; i++) {
        table[i] = i * 37 % (SPANS * PER);
    }
    struct array a[] = {random_rows((size_t)SPANS * PER * LAYERS * page, e4m3),
                        ints((const int32_t *)spans, SPANS * 2), ints(table, SPANS * PER),
                        array((size_t)rows * BT_LATENT * 2),
                        array((size_t)rows * BT_LATENT_ROPE * 2)};
    const struct bt_cu_latent_gather g = {.pool = a[0].d,
                                          .e4m3 = e4m3,
                                          .page_rows = LAYERS * page,
                                          .layer_row = LAYER * page,
                                          .spans = a[1].d,
                                          .n_spans = SPANS,
                                          .rows = rows,
                                          .table = a[2].d,
                                          .table_stride = PER,
                                          .page_tokens = page,
                                          .latent = a[3].d,
                                          .k_rope = a[4].d};
    CHECK(bt_cu_latent_gather(&g, 0));
    fetch(&a[3]);
    fetch(&a[4]);
    for (uint32_t r = 0, s = 0; r < rows; r++) {
        s += s + 1 < SPANS && spans[s + 1].first <= (int32_t)r;
        uint32_t pos = r - (uint32_t)spans[s].first;
        size_t id = (size_t)table[(uint32_t)spans[s].slot * PER + pos / page];
        const uint8_t *from =
            (const uint8_t *)a[0].h + ((id * LAYERS + LAYER) * page + pos % page) * row_bytes(e4m3);
        for (uint32_t i = 0; i < BT_LATENT_ROW; i++) {
            uint16_t got = i < BT_LATENT ? a[3].u[(size_t)r * BT_LATENT + i]
                                         : a[4].u[(size_t)r * BT_LATENT_ROPE + i - BT_LATENT];
            bad += f16(got) != row_value(from, i, e4m3);
        }
    }
    report(e4m3 ? "g. e4m3" : "gather", &(struct sum){0, 1}, 1, bad, rows, page);
    drop(a, 5);
}

int main(void)
{
    static const uint32_t shapes[][2] = {{1, 16},  {3, 4},   {8, 128}, {9, 1},  {64, 4},
                                         {65, 16}, {200, 7}, {130, 3}, {17, 64}};
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    rng = (uint64_t)time(NULL);
    for (uint32_t i = 0; i < 12; i++) {
        check_append(1 + i % 6 * 9,
                     i % 3 == 0   ? 0
                     : i % 3 == 1 ? 128
                                  : 1536,
                     16u << i % 3, i % 2, i >= 6);
    }
    for (uint32_t i = 0; i < 40; i++) {
        check_store(i);
    }
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check_queries(shapes[i][0], shapes[i][1], i % 2);
        check_values(shapes[i][0], shapes[i][1]);
    }
    for (uint32_t page = 16; page <= 64; page *= 2) {
        check_gather(page, false);
        check_gather(page, true);
    }
    printf("%u passed, %u failed\n", n_checks - n_failed, n_failed);
    return n_failed != 0;
}
