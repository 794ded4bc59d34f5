/* make check-gpu: wide_e4m3.cu against double precision on the CPU: sums, SwiGLU rounded to e4m3,
 * and queries and pages against such sums and bt_cu_append one after the other. Adversarial scales,
 * ragged sizes, poisoned outputs, twice the same bits. An error counts relative to the sum of the
 * magnitudes of a product's terms. */
#include "common/engine/cuda/gemm/wide_e4m3.h"

#include "tests/gpu/fp8_case.h"

#define TRIES 4000

static uint32_t failed, passed;

static void report(bool ok, const char *what, uint32_t m, uint32_t n, uint32_t k, double worst)
{
    printf("%s %-22s m %-4u n %5u k %5u: %.1e\n", ok ? "ok  " : "FAIL", what, m, n, k, worst);
    fflush(stdout);
    failed += !ok;
    passed += ok;
}

struct product {
    struct fp8_weights f;
    struct bt_cu_wide_e4m3 p;
    float *x; /* as rounded */
    void *dx;
};

static struct product product_open(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind,
                                   uint32_t seed)
{
    struct product y = {.f = fp8_weights_open(n, k, kind, false, seed)};
    free(fp8_random_rows(m, k, BT_CU_F16, &y.dx, seed + 1));
    y.p = (struct bt_cu_wide_e4m3){y.f.w, fp8_rows_open(m, k), m, n, k};
    CHECK(bt_cu_rows_e4m3(y.dx, m, k, &y.p.x, 0));
    y.x = fp8_rows_values(&y.p.x, m, k);
    return y;
}
static void product_close(struct product *y)
{
    fp8_weights_close(&y->f);
    fp8_rows_close(&y->p.x);
    cudaFree(y->dx);
    free(y->x);
}

/* The next place to look at: corners first, then anywhere. */
static void place(uint32_t t, uint32_t m, uint32_t n, uint32_t *seed, uint32_t *row, uint32_t *col)
{
    *row = t < 8 ? m - 1 : fp8_next(seed) % m;
    *col = t % 8 == 7 ? n - 1 : fp8_next(seed) % n;
}

static void check_sum(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind, bool add,
                      uint32_t seed)
{
    struct product y = product_open(m, n, k, kind, seed);
    const size_t bytes = (size_t)m * n * 4, behind = 4096;
    const uint8_t poison = add ? 0x3e : 0xff;
    uint8_t *out, *got[2];
    float old;
    double worst = 0;
    memset(&old, 0x3e, sizeof(old));
    CHECK(cudaMalloc((void **)&out, bytes + behind));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMemset(out, poison, bytes + behind));
        CHECK(bt_cu_wide_e4m3_sum(&y.p, (float *)out, add, 0));
        CHECK(cudaDeviceSynchronize());
        got[i] = host_copy(out, bytes + behind);
    }
    for (uint32_t t = 0; t < TRIES; t++) {
        uint32_t row, col;
        place(t, m, n, &seed, &row, &col);
        double all, to = fp8_dot(y.x + (size_t)row * k, y.f.values + (size_t)col * k, k, &all);
        double v = ((float *)got[0])[(size_t)row * n + col] - (add ? old : 0);
        double err = fabs(v - to) / (all + (add ? old : 0) + 1e-30);
        worst = err == err && worst < INFINITY ? fmax(worst, err) : INFINITY;
    }
    for (size_t i = bytes; i < bytes + behind; i++) {
        worst = got[0][i] == poison ? worst : INFINITY;
    }
    worst = memcmp(got[0], got[1], bytes) ? INFINITY : worst;
    report(worst < 1e-3, add ? "sum, added" : "sum", m, n, k, worst);
    cudaFree(out);
    free(got[0]);
    free(got[1]);
    product_close(&y);
}

/* An error counts in half of e4m3's last bit, plus what the product's own errors do to it. */
static void check_swiglu(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind,
                         uint32_t seed)
{
    struct product y = product_open(m, n, k, kind, seed);
    const uint32_t wide = n / 2;
    struct bt_cu_e4m3_rows to = fp8_rows_open(m, wide);
    CHECK(bt_cu_wide_e4m3_swiglu(&y.p, &to, 0));
    CHECK(cudaDeviceSynchronize());
    float *got = fp8_rows_values(&to, m, wide);
    double worst = 0;
    for (uint32_t t = 0; t < TRIES / 8; t++) {
        uint32_t row, col;
        place(t, m, wide, &seed, &row, &col);
        /* The scale is right if the largest value of the 128 columns is. */
        float top = 0;
        for (uint32_t c = col / 128 * 128; c < wide && c < col / 128 * 128 + 128; c++) {
            top = fmaxf(top, fabsf(got[(size_t)row * wide + c]));
        }
        const float *x = y.x + (size_t)row * k, *w = y.f.values + (size_t)col * k;
        double all[2], gate = fp8_dot(x, w, k, &all[0]),
                       up = fp8_dot(x, w + (size_t)wide * k, k, &all[1]);
        double want = gate / (1 + exp(-gate)) * up;
        double room = fmax(fabs(want) * 0x1p-4, top / 448.0 * 0x1p-10) * 1.01 +
                      1e-3 * (all[0] * fabs(up) + all[1] * fabs(gate));
        double err = fabs(got[(size_t)row * wide + col] - want) / room;
        worst = err == err && worst < INFINITY ? fmax(worst, err) : INFINITY;
    }
    report(worst < 1, "swiglu", m, n, k, worst);
    free(got);
    fp8_rows_close(&to);
    product_close(&y);
}

static float *vector(size_t n, float about, uint32_t *seed)
{
    float *h = malloc(n * sizeof(*h)), *d;
    for (size_t i = 0; i < n; i++) {
        h[i] = about + (float)(fp8_next(seed) % 1024) / 1024 - 0.5f;
    }
    d = device_memory(h, n * sizeof(*h));
    free(h);
    return d;
}

/* One sequence with pages in any order, every seventh row padding. */
static void check_append(uint32_t m, uint32_t head_dim, bool extras, uint32_t seed)
{
    enum { HEADS = 6, KV = 1, PAGE = 16, ROWS = KV * 2 * PAGE, K = 384 };
    const uint32_t all = HEADS + 2 * KV, n = all * head_dim, pages = m / PAGE + 1;
    struct product y = product_open(m, n, K, BT_CU_WEIGHT_BLOCKS, seed);
    const size_t q_bytes = (size_t)m * HEADS * head_dim * 2,
                 bytes = q_bytes + (size_t)pages * ROWS * head_dim * 2;
    int32_t *ints = malloc((2 * m + pages) * sizeof(*ints));
    uint16_t *got[2];
    for (uint32_t i = 0; i < m; i++) {
        ints[i] = (int32_t)i;
        ints[m + i] = i % 7 == 6 ? -1 : 0;
    }
    for (uint32_t i = 0; i < pages; i++) {
        ints[2 * m + i] = (int32_t)(pages - 1 - i);
    }
    int32_t *d = device_memory(ints, (2 * m + pages) * sizeof(*ints));
    float *qkv = device_memory(NULL, (size_t)m * n * 4), *bias = vector(n, 0, &seed);
    float *norms[2] = {vector(head_dim, 1, &seed), vector(head_dim, 1, &seed)};
    float *rope = vector((size_t)m * head_dim, 0, &seed);
    uint8_t *out = device_memory(NULL, bytes);
    struct bt_cu_append a = {.qkv = qkv,
                             .bias = extras ? bias : NULL,
                             .q_norm = extras ? norms[0] : NULL,
                             .k_norm = extras ? norms[1] : NULL,
                             .rope = rope,
                             .pos = d,
                             .slots = d + m,
                             .table = d + 2 * m,
                             .q = out,
                             .pool = out + q_bytes,
                             .page_rows = ROWS,
                             .n = m,
                             .heads = HEADS,
                             .kv_heads = KV,
                             .head_dim = head_dim,
                             .page_tokens = PAGE,
                             .table_stride = pages,
                             .eps = 1e-5f};
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMemset(out, 0x7f, bytes));
        if (i == 0) {
            CHECK(bt_cu_wide_e4m3_sum(&y.p, qkv, false, 0));
            CHECK(bt_cu_append(&a, 0));
        } else {
            CHECK(bt_cu_wide_e4m3_append(&y.p, &a, 0));
        }
        CHECK(cudaDeviceSynchronize());
        got[i] = host_copy(out, bytes);
    }
    double worst = 0;
    uint32_t written = 0;
    for (size_t i = 0; i < bytes / 2; i++) {
        double want = to_float(got[0][i], BT_CU_F16), v = to_float(got[1][i], BT_CU_F16);
        bool put = got[0][i] != 0x7f7f;
        written += put;
        double err = put                   ? fabs(v - want) / (fabs(want) * 0x1p-10 + 0x1p-10)
                     : got[1][i] == 0x7f7f ? 0
                                           : INFINITY;
        worst = err == err && worst < INFINITY ? fmax(worst, err) : INFINITY;
    }
    report(worst <= 1 && written >= m * 6 / 7 * n, extras ? "append, bias, norms" : "append", m, n,
           K, worst);
    void *device[] = {d, qkv, bias, norms[0], norms[1], rope, out};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++) {
        cudaFree(device[i]);
    }
    free(ints);
    free(got[0]);
    free(got[1]);
    product_close(&y);
}

int main(void)
{
    static const uint32_t sizes[][3] = {
        {1, 256, 128}, {65, 272, 640}, {129, 1536, 1024}, {1000, 400, 384}, {8192, 1024, 4096}};
    if (cudaFree(0) != cudaSuccess || !bt_cu_wide_e4m3_fits(1, 256, 128)) {
        printf("no GPU\n");
        return 0;
    }
    for (uint32_t i = 0; i < 10; i++) {
        const uint32_t *z = sizes[i / 2];
        enum bt_cu_weight_kind kind = i % 2 ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BLOCKS;
        check_sum(z[0], z[1], z[2], kind, false, 10 * i + 1);
        check_sum(z[0], z[1], z[2], kind, true, 10 * i + 2);
        uint32_t n = kind == BT_CU_WEIGHT_BLOCKS ? BT_DIV_UP(z[1], 256) * 256 : z[1] / 32 * 32;
        check_swiglu(z[0], n, z[2], kind, 10 * i + 3);
    }
    for (uint32_t d = 64; d <= 256; d *= 2) {
        check_append(100, d, false, d);
        check_append(1031, d, true, d + 1);
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
