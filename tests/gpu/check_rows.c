/* make check-gpu: the kernels for few rows against double precision on the CPU: products of 1 to 8
 * rows with and without addition, fused SwiGLU, all ways of skinny.h for up to 128 rows, norms,
 * GELU, embeddings, K and V as they go to pages. Fresh inputs, poisoned outputs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/gemm/skinny.h"
#include "common/engine/cuda/rows/rows.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

static double bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void *fetch(const void *d, size_t bytes)
{
    void *h = malloc(bytes);
    CHECK(cudaMemcpy(h, d, bytes, cudaMemcpyDeviceToHost));
    return h;
}

static int report(const char *what, uint32_t m, uint32_t n, uint32_t k, double diff, double norm,
                  double limit)
{
    double e = sqrt(diff / norm);
    int ok = e < limit; /* false for NaN */
    printf("%s %-8s m %u n %5u k %5u: %.1e\n", ok ? "ok  " : "FAIL", what, m, n, k, e);
    return ok;
}

static int check_product(uint32_t m, uint32_t n, uint32_t k, uint32_t seed)
{
    void *w, *x, *h;
    float *y;
    CHECK(cudaMalloc(&w, (size_t)n * k * 2));
    CHECK(cudaMalloc(&x, (size_t)m * k * 2));
    CHECK(cudaMalloc((void **)&y, (size_t)m * n * 4));
    CHECK(cudaMalloc(&h, (size_t)m * n));
    ref_fill(w, (size_t)n * k, BT_CU_BF16, 0.05f, seed);
    ref_fill(x, (size_t)m * k, BT_CU_BF16, 1, seed + 1);
    CHECK(cudaMemset(y, 0xff, (size_t)m * n * 4));
    CHECK(cudaMemset(h, 0xff, (size_t)m * n));
    CHECK(bt_cu_gemv(bt_cu_bf16(w), x, y, m, n, k, false, 0));
    CHECK(bt_cu_gemv(bt_cu_bf16(w), x, y, m, n, k, true, 0)); /* twice the product */
    CHECK(bt_cu_gemv_swiglu(bt_cu_bf16(w), x, h, m, n, k, 0));
    CHECK(cudaDeviceSynchronize());
    uint16_t *hw = fetch(w, (size_t)n * k * 2), *hx = fetch(x, (size_t)m * k * 2),
             *hh = fetch(h, (size_t)m * n);
    float *hy = fetch(y, (size_t)m * n * 4);
    double *want = malloc((size_t)m * n * sizeof(*want)), diff = 0, norm = 0;
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < n; j++) {
            double sum = 0;
            for (uint32_t c = 0; c < k; c++) {
                sum += bf16(hw[(size_t)j * k + c]) * bf16(hx[(size_t)i * k + c]);
            }
            want[(size_t)i * n + j] = sum;
            diff += pow(hy[(size_t)i * n + j] - 2 * sum, 2);
            norm += pow(2 * sum, 2);
        }
    }
    int ok = report("product", m, n, k, diff, norm, 1e-5);
    diff = norm = 0;
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < n / 2; j++) {
            double g = want[(size_t)i * n + j], u = want[(size_t)i * n + n / 2 + j];
            double v = g / (1 + exp(-g)) * u;
            diff += pow(bf16(hh[(size_t)i * (n / 2) + j]) - v, 2);
            norm += v * v;
        }
    }
    ok &= report("swiglu", m, n, k, diff, norm, 4e-3);
    void *device[] = {w, x, y, h}, *host[] = {hw, hx, hh, hy, want};
    for (int i = 0; i < 4; i++) {
        cudaFree(device[i]);
    }
    for (int i = 0; i < 5; i++) {
        free(host[i]);
    }
    return ok;
}

/* Every way that fits, with every end; what lies behind the output stays as it was. */
static uint32_t check_skinny(uint32_t m, uint32_t n, uint32_t k, uint32_t seed)
{
    enum { BEHIND = 64 };
    const size_t values = (size_t)m * n, bytes = values * 4 + BEHIND;
    uint32_t failed = 0, ways = 0;
    void *w, *x;
    uint8_t *y;
    CHECK(cudaMalloc(&w, (size_t)n * k * 2));
    CHECK(cudaMalloc(&x, (size_t)m * k * 2));
    CHECK(cudaMalloc((void **)&y, bytes));
    ref_fill(w, (size_t)n * k, BT_CU_BF16, 0.05f, seed);
    ref_fill(x, (size_t)m * k, BT_CU_BF16, 1, seed + 1);
    uint16_t *hw = fetch(w, (size_t)n * k * 2), *hx = fetch(x, (size_t)m * k * 2);
    double *want = malloc(values * sizeof(*want));
    for (size_t i = 0; i < values; i++) {
        want[i] = 0;
        for (uint32_t c = 0; c < k; c++) {
            want[i] += bf16(hw[i % n * k + c]) * bf16(hx[i / n * k + c]);
        }
    }
    for (uint32_t i = 0; i < bt_cu_skinny_ways() * 3; i++) {
        uint32_t way = i / 3;
        enum bt_cu_skinny_end end = i % 3;
        uint8_t poison = end == BT_CU_SKINNY_ADD ? 0x3e : 0xff; /* 0.186 or NaN */
        if (!bt_cu_skinny_fits(way, m, n, k, BT_CU_WEIGHT_BF16)) {
            continue;
        }
        size_t wide = end == BT_CU_SKINNY_SWIGLU ? n / 2 : n, item = wide == n ? 4 : 2, off = 0;
        CHECK(cudaMemset(y, poison, bytes));
        CHECK(bt_cu_skinny(way, bt_cu_bf16(w), x, y, m, n, k, end, 0));
        CHECK(cudaDeviceSynchronize());
        uint8_t *got = fetch(y, bytes);
        double diff = 0, norm = 0;
        float old;
        memset(&old, 0x3e, sizeof(old));
        for (size_t j = 0; j < m * wide; j++) {
            const double *at = want + j / wide * n + j % wide;
            double v = bf16(((uint16_t *)got)[j]), to;
            if (wide == n) {
                v = ((float *)got)[j];
                to = *at + (end == BT_CU_SKINNY_ADD ? (double)old : 0);
            } else {
                to = at[0] / (1 + exp(-at[0])) * at[n / 2];
            }
            diff += (v - to) * (v - to);
            norm += to * to;
        }
        for (size_t j = m * wide * item; j < bytes; j++) {
            off += got[j] != poison;
        }
        if (!(sqrt(diff / norm) < (wide == n ? 1e-5 + k * 1e-9 : 4e-3)) || off) {
            printf("FAIL skinny way %u end %d m %u n %u k %u: %.1e, %zu bytes behind\n", way,
                   (int)end, m, n, k, sqrt(diff / norm), off);
            failed++;
        }
        free(got);
        ways++;
    }
    printf("%s skinny   m %u n %5u k %5u: %u ways and ends\n", failed ? "FAIL" : "ok  ", m, n, k,
           ways);
    cudaFree(w);
    cudaFree(x);
    cudaFree(y);
    free(hw);
    free(hx);
    free(want);
    return failed || ways == 0;
}

static int check_norm(uint32_t n, uint32_t hidden, uint32_t seed)
{
    float *x, *w;
    void *a;
    CHECK(cudaMalloc((void **)&x, (size_t)n * hidden * 4));
    CHECK(cudaMalloc((void **)&w, hidden * 4));
    CHECK(cudaMalloc(&a, (size_t)n * hidden * 2));
    float *hx = malloc((size_t)n * hidden * 4), *hw = malloc(hidden * 4);
    for (uint32_t i = 0; i < (n + 1) * hidden; i++) {
        seed = seed * 1664525u + 1013904223u;
        *(i < hidden ? hw + i : hx + i - hidden) = (float)(int32_t)seed * 0x1p-30f;
    }
    CHECK(cudaMemcpy(x, hx, (size_t)n * hidden * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(w, hw, hidden * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(a, 0xff, (size_t)n * hidden * 2));
    CHECK(bt_cu_norm(x, NULL, w, n, hidden, 1e-5f, a, 0));
    CHECK(cudaDeviceSynchronize());
    uint16_t *ha = fetch(a, (size_t)n * hidden * 2);
    double diff = 0, norm = 0;
    for (uint32_t t = 0; t < n; t++) {
        double sum = 0;
        for (uint32_t i = 0; i < hidden; i++) {
            sum += (double)hx[t * hidden + i] * hx[t * hidden + i];
        }
        for (uint32_t i = 0; i < hidden; i++) {
            double v = hx[t * hidden + i] / sqrt(sum / hidden + 1e-5) * hw[i];
            diff += pow(bf16(ha[t * hidden + i]) - v, 2);
            norm += v * v;
        }
    }
    int ok = report("norm", n, hidden, 1, diff, norm, 4e-3);
    void *device[] = {x, w, a}, *host[] = {hx, hw, ha};
    for (int i = 0; i < 3; i++) {
        cudaFree(device[i]);
        free(host[i]);
    }
    return ok;
}

static float *random_floats(size_t n, float by, float plus, uint32_t *seed)
{
    float *v = malloc(n * 4);
    for (size_t i = 0; i < n; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        v[i] = (float)(int32_t)*seed * 0x1p-31f * by + plus;
    }
    return v;
}
static void *on_device(const void *h, size_t bytes)
{
    void *d;
    CHECK(cudaMalloc(&d, bytes));
    CHECK(cudaMemcpy(d, h, bytes, cudaMemcpyHostToDevice));
    return d;
}

/* All rows with a bias to be added and kept, then two of them chosen, whose x must stay. The mean
 * is much larger than the deviations. */
static int check_layer_norm(uint32_t n, uint32_t hidden, uint32_t seed)
{
    const size_t all = (size_t)n * hidden;
    float *hx = random_floats(all, 1, 30, &seed), *hadd = random_floats(hidden, 1, 0, &seed);
    float *hw = random_floats(hidden, 1, 0, &seed), *hb = random_floats(hidden, 1, 0, &seed);
    const int32_t chosen[2] = {(int32_t)n - 1, 0};
    float *x = on_device(hx, all * 4), *add = on_device(hadd, hidden * 4);
    float *w = on_device(hw, hidden * 4), *b = on_device(hb, hidden * 4);
    int32_t *rows = on_device(chosen, sizeof(chosen));
    void *a = on_device(hx, all * 2), *a2 = on_device(hx, all * 4);
    struct bt_cu_layer_norm p = {.x = x, .add = add, .keep = true, .w = w, .bias = b};
    p.n = n;
    p.hidden = hidden;
    p.eps = 1e-5f;
    p.a = a;
    CHECK(bt_cu_layer_norm(&p, 0));
    p.rows = rows;
    p.keep = false;
    p.n = 2;
    p.a = a2;
    CHECK(bt_cu_layer_norm(&p, 0)); /* x has got the bias twice then */
    CHECK(cudaDeviceSynchronize());
    uint16_t *ha = fetch(a, all * 2), *ha2 = fetch(a2, 2 * hidden * 2);
    float *kept = fetch(x, all * 4);
    double diff = 0, norm = 0;
    for (uint32_t t = 0; t < n + 2; t++) {
        size_t row = t < n ? t : (size_t)chosen[t - n], at = row * hidden;
        double mean = 0, square = 0, times = t < n ? 1 : 2;
        for (uint32_t i = 0; i < hidden; i++) {
            mean += (hx[at + i] + times * hadd[i]) / hidden;
            diff += pow(kept[at + i] - (hx[at + i] + hadd[i]), 2) * 1e6; /* f32 */
        }
        for (uint32_t i = 0; i < hidden; i++) {
            square += pow(hx[at + i] + times * hadd[i] - mean, 2) / hidden;
        }
        for (uint32_t i = 0; i < hidden; i++) {
            double v = (hx[at + i] + times * hadd[i] - mean) / sqrt(square + 1e-5) * hw[i] + hb[i];
            diff += pow(bf16(t < n ? ha[at + i] : ha2[(t - n) * hidden + i]) - v, 2);
            norm += v * v;
        }
    }
    int ok = report("layer norm", n, hidden, 1, diff, norm, 4e-3);
    void *device[] = {x, add, w, b, rows, a, a2}, *host[] = {hx, hadd, hw, hb, ha, ha2, kept};
    for (int i = 0; i < 7; i++) {
        cudaFree(device[i]);
        free(host[i]);
    }
    return ok;
}

static int check_gelu(uint32_t n, uint32_t width, uint32_t seed)
{
    const size_t all = (size_t)n * width;
    float *hy = random_floats(all, 6, 0, &seed), *hb = random_floats(width, 1, 0, &seed);
    float *y = on_device(hy, all * 4), *b = on_device(hb, width * 4);
    void *a = on_device(hy, all * 2);
    CHECK(bt_cu_gelu(y, b, n, width, a, 0));
    CHECK(cudaDeviceSynchronize());
    uint16_t *ha = fetch(a, all * 2);
    double diff = 0, norm = 0;
    for (size_t i = 0; i < all; i++) {
        double v = hy[i] + hb[i % width];
        double want = 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
        diff += pow(bf16(ha[i]) - want, 2);
        norm += want * want;
    }
    int ok = report("gelu", n, width, 1, diff, norm, 4e-3);
    void *device[] = {y, b, a}, *host[] = {hy, hb, ha};
    for (int i = 0; i < 3; i++) {
        cudaFree(device[i]);
        free(host[i]);
    }
    return ok;
}

/* Tokens' rows with and without those of positions, exactly; padding and last tokens. */
static int check_embed(uint32_t hidden, uint32_t seed)
{
    enum { N = 5, VOCAB = 40 };
    static const int32_t ids[N] = {3, BT_CU_ID_LAST, 39, 0, 7}, slots[N] = {0, 2, 1, -1, 0},
                         pos[N] = {9, 0, 3, 0, 39}, last[3] = {1, 2, 21};
    const size_t table = (size_t)VOCAB * hidden;
    void *embed, *positions;
    int32_t *ints[4] = {on_device(ids, sizeof(ids)), on_device(slots, sizeof(slots)),
                        on_device(pos, sizeof(pos)), on_device(last, sizeof(last))};
    float *x;
    uint32_t bad = 0;
    CHECK(cudaMalloc(&embed, table * 2));
    CHECK(cudaMalloc(&positions, table * 2));
    CHECK(cudaMalloc((void **)&x, N * hidden * 4));
    ref_fill(embed, table, BT_CU_BF16, 1, seed);
    ref_fill(positions, table, BT_CU_BF16, 1, seed + 1);
    uint16_t *he = fetch(embed, table * 2), *hp = fetch(positions, table * 2);
    for (int with = 0; with < 2; with++) {
        const struct bt_cu_embed a = {
            ints[0], ints[1], ints[2], ints[3], embed, with ? positions : NULL, N, hidden, x};
        CHECK(cudaMemset(x, 0xff, N * hidden * 4));
        CHECK(bt_cu_embed(&a, 0));
        CHECK(cudaDeviceSynchronize());
        float *got = fetch(x, N * hidden * 4);
        for (uint32_t i = 0; i < N * hidden; i++) {
            uint32_t t = i / hidden, id = (uint32_t)(t == 1 ? last[2] : ids[t]);
            double want = bf16(he[id * hidden + i % hidden]);
            want += with ? bf16(hp[(uint32_t)pos[t] * hidden + i % hidden]) : 0;
            bad += got[i] != (slots[t] < 0 ? 0 : (float)want);
        }
        free(got);
    }
    printf("%s embed    hidden %u: %u values off\n", bad ? "FAIL" : "ok  ", hidden, bad);
    for (int i = 0; i < 4; i++) {
        cudaFree(ints[i]);
    }
    cudaFree(embed);
    cudaFree(positions);
    cudaFree(x);
    free(he);
    free(hp);
    return bad == 0;
}

/* One head's row of f16 or e4m3 pages as doubles. */
static void row_of(const uint8_t *kv, const struct bt_cu_append *a, uint32_t page, uint32_t row,
                   double *to)
{
    size_t segment = page * a->page_rows + a->layer_row;
    for (uint32_t i = 0; i < a->head_dim; i++) {
        size_t at = (segment + row) * a->head_dim + i;
        if (a->e4m3) {
            uint8_t v = kv[at], e = kv[(segment + a->scale_row) * a->head_dim + row];
            int x = v >> 3 & 15, m = v & 7;
            double f = x ? ldexp(8 + m, x - 10) : ldexp(m, -9);
            f = (v & 0x7f) == 0x7f ? NAN : v & 0x80 ? -f : f;
            to[i] = e ? ldexp(f, e - 127) : 0;
        } else {
            uint16_t h = ((const uint16_t *)kv)[at];
            int x = h >> 10 & 31, m = h & 1023;
            double f = x ? ldexp(1024 + m, x - 25) : ldexp(m, -24);
            to[i] = x == 31 ? NAN : h & 0x8000 ? -f : f;
        }
    }
}

/* The same K and V as f16 and as e4m3: each value within half a step of three bits of mantissa, the
 * largest of a row not cut, rows of zeros zero. */
static int check_append(uint32_t head_dim, uint32_t seed)
{
    enum { N = 50, HEADS = 4, KV = 2, PAGE = 16, PAGES = 4, ROWS = KV * 2 * PAGE };
    uint32_t all = HEADS + 2 * KV, extra = (ROWS + head_dim - 1) / head_dim, bad = 0;
    float *qkv, *rope;
    int32_t *ints, host[N * 2 + PAGES];
    void *q, *kv;
    size_t bytes = (size_t)PAGES * (ROWS + extra) * head_dim * 2;
    CHECK(cudaMalloc((void **)&qkv, (size_t)N * all * head_dim * 4));
    CHECK(cudaMalloc((void **)&rope, (size_t)N * head_dim * 4));
    CHECK(cudaMalloc((void **)&ints, sizeof(host)));
    CHECK(cudaMalloc(&q, (size_t)N * HEADS * head_dim * 2));
    CHECK(cudaMalloc(&kv, bytes));
    float *h = malloc((size_t)N * all * head_dim * 4), *cs = malloc((size_t)N * head_dim * 4);
    for (uint32_t i = 0; i < N * all * head_dim; i++) {
        seed = seed * 1664525u + 1013904223u;
        float v = (float)(int32_t)seed * 0x1p-31f;
        h[i] = i / head_dim % 11 == 3 ? 0 : v * v * v * ldexpf(1, (int)(i / head_dim % 9) * 2 - 8);
    }
    for (uint32_t i = 0; i < N * head_dim; i++) {
        float angle = (float)(i / head_dim) * (float)(i % (head_dim / 2) + 1) * 0.1f;
        cs[i] = i % head_dim < head_dim / 2 ? cosf(angle) : sinf(angle);
    }
    for (int i = 0; i < N; i++) {
        host[i] = i; /* positions; then slots, the table */
        host[N + i] = 0;
    }
    for (int i = 0; i < PAGES; i++) {
        host[2 * N + i] = (i + 1) % PAGES;
    }
    CHECK(cudaMemcpy(qkv, h, (size_t)N * all * head_dim * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(rope, cs, (size_t)N * head_dim * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(ints, host, sizeof(host), cudaMemcpyHostToDevice));
    uint8_t *pages[2];
    struct bt_cu_append a = {.qkv = qkv,
                             .rope = rope,
                             .pos = ints,
                             .slots = ints + N,
                             .table = ints + 2 * N,
                             .q = q,
                             .pool = kv,
                             .page_rows = ROWS + extra,
                             .scale_row = ROWS,
                             .n = N,
                             .heads = HEADS,
                             .kv_heads = KV,
                             .head_dim = head_dim,
                             .page_tokens = PAGE,
                             .table_stride = PAGES,
                             .eps = 1e-5f};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        a.e4m3 = e4m3;
        CHECK(cudaMemset(kv, 0xff, bytes));
        CHECK(bt_cu_append(&a, 0));
        CHECK(cudaDeviceSynchronize());
        pages[e4m3] = fetch(kv, bytes);
    }
    double want[256], got[256];
    for (uint32_t i = 0; i < N * KV * 2; i++) {
        uint32_t t = i / (KV * 2), row = i % (KV * 2) * PAGE + t % PAGE;
        uint32_t page = (t / PAGE + 1) % PAGES;
        double top = 0;
        a.e4m3 = false;
        row_of(pages[0], &a, page, row, want);
        a.e4m3 = true;
        row_of(pages[1], &a, page, row, got);
        for (uint32_t d = 0; d < head_dim; d++) {
            top = fmax(top, fabs(want[d]));
        }
        for (uint32_t d = 0; d < head_dim;
             d++) { /* NaN is bad too; 2^-11, 2^-24: f16's own rounding */
            double near = fabs(want[d]) * (0x1p-4 + 0x1p-11) + top * 0x1p-17 + 0x1p-24;
            bad += !(fabs(got[d] - want[d]) <= near);
        }
    }
    printf("%s append   d %3u: %u values off\n", bad ? "FAIL" : "ok  ", head_dim, bad);
    void *device[] = {qkv, rope, ints, q, kv}, *mine[] = {h, cs, pages[0], pages[1]};
    for (int i = 0; i < 5; i++) {
        cudaFree(device[i]);
    }
    for (int i = 0; i < 4; i++) {
        free(mine[i]);
    }
    return bad == 0;
}

int main(void)
{
    static const uint32_t shapes[][2] = {
        {16, 32}, {768, 256}, {1536, 192}, {6144, 4096}, {48, 8192}};
    uint32_t seed = (uint32_t)time(NULL), failed = 0, n = 0;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    for (uint32_t s = 0; s < 5; s++) {
        for (uint32_t m = 1; m <= 8; m += s == 3 ? 7 : 1) {
            failed += !check_product(m, shapes[s][0], shapes[s][1], seed + n++ * 3);
        }
    }
    static const uint32_t skinny[][2] = {{64, 64}, {336, 200}, {1536, 520}, {2064, 1032}};
    for (uint32_t s = 0; s < 4 && bt_cu_hopper(); s++) {
        for (uint32_t m = 1; m <= 128; m += m / 2 + 1 + seed % 3, n++) {
            failed += check_skinny(m, skinny[s][0], skinny[s][1], seed + n * 3);
        }
        failed += check_skinny(128, skinny[s][0], skinny[s][1], seed + n++ * 3);
    }
    if (bt_cu_hopper()) {
        failed += check_skinny(11, 4096, 4096, seed + n++ * 3);
        failed += check_skinny(9, 512, 14336, seed + n++ * 3);
    }
    for (uint32_t hidden = 64; hidden <= 12288; hidden = hidden * 5 / 4 / 4 * 4, n++) {
        failed += !check_norm(3, hidden, seed + n);
    }
    for (uint32_t hidden = 64; hidden <= 2048; hidden = hidden * 3 / 2, n += 3) {
        failed += !check_layer_norm(2 + hidden % 5, hidden, seed + n);
        failed += !check_gelu(3, hidden, seed + n);
        failed += !check_embed(hidden / 2 * 2, seed + n);
    }
    for (uint32_t d = 64; d <= 256; d *= 2, n++) {
        failed += !check_append(d, seed + n);
    }
    printf("%u passed, %u failed\n", n - failed, failed);
    return failed != 0;
}
