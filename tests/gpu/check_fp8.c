/* make check-gpu: products with e4m3 weights (gemv.cu, skinny.cu, cuBLASLt) and the kernels that
 * round to e4m3, against double precision on the CPU: adversarial scales, ragged edges of blocks, 1
 * to 8,192 rows. An error counts relative to the sum of the magnitudes of a product's terms. */
#include "tests/gpu/fp8_case.h"

#define BEHIND 64

static uint32_t failed, passed;

static void report(bool ok, const char *what, uint32_t m, uint32_t n, uint32_t k, double worst)
{
    printf("%s %-22s m %-4u n %5u k %5u: %.1e\n", ok ? "ok  " : "FAIL", what, m, n, k, worst);
    fflush(stdout);
    failed += !ok;
    passed += ok;
}

struct want { /* [m][n]: products and the magnitudes of their terms */
    double *sum, *all;
};

static struct want want_open(const float *x, const struct fp8_weights *f, uint32_t m)
{
    size_t values = (size_t)m * f->n;
    struct want w = {malloc(values * sizeof(double)), malloc(values * sizeof(double))};
    for (size_t i = 0; i < values; i++) {
        w.sum[i] = fp8_dot(x + i / f->n * f->k, f->values + i % f->n * f->k, f->k, &w.all[i]);
    }
    return w;
}

/* The largest error of a result of `end`; old: what an ADD adds to. NaN: infinite. */
static double worst_of(const uint8_t *got, const struct want *w, uint32_t m, uint32_t n,
                       enum bt_cu_skinny_end end, float old)
{
    bool pairs = end == BT_CU_SKINNY_SWIGLU;
    size_t wide = pairs ? n / 2 : n;
    double worst = 0;
    for (size_t i = 0; i < m * wide; i++) {
        size_t at = i / wide * n + i % wide;
        double to = w->sum[at], all = w->all[at], v;
        if (pairs) { /* the scale: of a value that f16 rounds, and of errors that up multiplies */
            double up = w->sum[at + n / 2], s = to / (1 + exp(-to));
            _Float16 h;
            memcpy(&h, (const uint16_t *)got + i, 2);
            v = (double)h;
            to = fmin(fmax(s * up, -65504), 65504); /* f16 has no more */
            all = fabs(to) * 0x1p-11 / 1e-5 + (all + 1) * (w->all[at + n / 2] + 1);
        } else {
            v = ((const float *)got)[i];
            all += end == BT_CU_SKINNY_ADD ? fabs((double)old) : 0;
            to += end == BT_CU_SKINNY_ADD ? (double)old : 0;
        }
        double err = fabs(v - to) / (all > 0 ? all : 1);
        worst = err == err && worst < INFINITY ? fmax(worst, err) : INFINITY;
    }
    return worst;
}

/* way -1: gemv.cu. rows: x rounded; NULL: x. Returns the worst error. */
static double try_way(int way, const struct fp8_weights *f, const void *x,
                      const struct bt_cu_e4m3_rows *rows, const struct want *w, uint32_t m,
                      enum bt_cu_skinny_end end)
{
    size_t bytes = (size_t)m * f->n * 4 + BEHIND;
    size_t used = end == BT_CU_SKINNY_SWIGLU ? (size_t)m * f->n : bytes - BEHIND;
    uint8_t poison = end == BT_CU_SKINNY_ADD ? 0x3e : 0xff, *y; /* 0.186 or NaN */
    float old;
    memset(&old, 0x3e, sizeof(old));
    CHECK(cudaMalloc((void **)&y, bytes));
    CHECK(cudaMemset(y, poison, bytes));
    if (rows) {
        CHECK(bt_cu_skinny_rounded((uint32_t)way, f->w, rows, y, m, f->n, f->k, end, 0));
    } else if (way >= 0) {
        CHECK(bt_cu_skinny((uint32_t)way, f->w, x, y, m, f->n, f->k, end, 0));
    } else if (end == BT_CU_SKINNY_SWIGLU) {
        CHECK(bt_cu_gemv_swiglu(f->w, x, y, m, f->n, f->k, 0));
    } else {
        CHECK(bt_cu_gemv(f->w, x, (float *)y, m, f->n, f->k, end == BT_CU_SKINNY_ADD, 0));
    }
    CHECK(cudaDeviceSynchronize());
    uint8_t *got = host_copy(y, bytes);
    double worst = worst_of(got, w, m, f->n, end, old);
    for (size_t i = used; i < bytes; i++) {
        worst = got[i] == poison ? worst : INFINITY;
    }
    cudaFree(y);
    free(got);
    return worst;
}

/* gemv.cu and every way of skinny.cu that fits, with every end. rounded: activations, too. */
static void check_few(uint32_t m, uint32_t n, uint32_t k, enum bt_cu_weight_kind kind, bool wide,
                      bool rounded, uint32_t seed)
{
    const double most = rounded ? 1e-3 : 1e-5; /* sums of 128 have 14 bits */
    struct bt_cu_e4m3_rows r = fp8_rows_open(m, k);
    struct fp8_weights f = fp8_weights_open(n, k, kind, wide, seed);
    const char *scales = kind == BT_CU_WEIGHT_ROWS ? "rows" : "blocks";
    void *dx;
    float *x = fp8_random_rows(m, k, BT_CU_F16, &dx, seed + 1);
    CHECK(bt_cu_rows_e4m3(dx, m, k, &r, 0));
    float *rx = fp8_rows_values(&r, m, k);
    struct want w = want_open(rounded ? rx : x, &f, m);
    char name[40];
    uint32_t ways = 0;
    double worst = 0;
    for (int way = -1; way < (int)bt_cu_skinny_ways(); way++) {
        bool fits = way < 0   ? !rounded && bt_cu_gemv_fits(m, n, k, kind)
                    : rounded ? bt_cu_skinny_rounded_fits((uint32_t)way, m, n, k)
                              : bt_cu_skinny_fits((uint32_t)way, m, n, k, kind);
        for (int end = 0; fits && end < 3; end++) {
            if (end == BT_CU_SKINNY_SWIGLU && kind == BT_CU_WEIGHT_BLOCKS && n / 2 % 128) {
                continue; /* the engine has no such blocks */
            }
            double err =
                try_way(way, &f, dx, rounded ? &r : NULL, &w, m, (enum bt_cu_skinny_end)end);
            if (!(err < most)) {
                snprintf(name, sizeof(name), "way %d end %d %s", way, end, scales);
                report(false, name, m, n, k, err);
            }
            worst = fmax(worst, err);
            ways++;
        }
    }
    snprintf(name, sizeof(name), "few %s%s%s, %u", scales, wide ? " wide" : "",
             rounded ? " rounded" : "", ways);
    report(ways > 0 && worst < most, name, m, n, k, worst);
    fp8_rows_close(&r);
    free(rx);
    fp8_weights_close(&f);
    cudaFree(dx);
    free(x);
    free(w.sum);
    free(w.all);
}

/* cuBLASLt with rounded activations: some values of the product of what they were rounded to. */
static void check_many(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                       enum bt_cu_weight_kind kind, bool bf16, bool add, uint32_t seed)
{
    struct fp8_weights f = fp8_weights_open(n, k, kind, false, seed);
    void *dx;
    float *x = fp8_random_rows(m, k, BT_CU_F16, &dx, seed + 1), old;
    struct bt_cu_e4m3_rows r = fp8_rows_open(m, k);
    size_t item = bf16 ? 2 : 4, bytes = (size_t)bt_cu_e4m3_stride(m) * n * item;
    uint8_t *y;
    CHECK(cudaMalloc((void **)&y, bytes));
    CHECK(cudaMemset(y, add ? 0x3e : 0xff, bytes));
    memset(&old, 0x3e, sizeof(old));
    CHECK(bt_cu_rows_e4m3(dx, m, k, &r, 0));
    const struct bt_cu_e4m3_product p = {f.w, r, y, m, n, k, bf16, add};
    cudaError_t e = bt_cu_gemm_e4m3_run(g, &p, 0);
    char name[40];
    snprintf(name, sizeof(name), "cuBLASLt %s%s %s", bf16 ? "bf16" : "f32", add ? " add" : "",
             kind == BT_CU_WEIGHT_ROWS ? "rows" : "blocks");
    if (e != cudaSuccess) {
        printf("%s: %s\n", name, cudaGetErrorString(e));
        report(false, name, m, n, k, INFINITY);
    } else {
        CHECK(cudaDeviceSynchronize());
        uint8_t *got = host_copy(y, bytes);
        float *rounded = fp8_rows_values(&r, m, k);
        double worst = 0, squares = 0, tries = 0;
        for (uint32_t t = 0; t < 4000; t++) {
            size_t row = fp8_next(&seed) % m, col = fp8_next(&seed) % n;
            row = t < 8 ? m - 1 : row;
            col = t % 8 == 7 ? n - 1 : col;
            double all, to = fp8_dot(rounded + row * k, f.values + col * k, k, &all);
            double v = bf16 ? fp8_bf16(((uint16_t *)got)[row * n + col])
                            : ((float *)got)[row * n + col] - (add ? old : 0);
            all += bf16 ? fabs(to) * 0x1p-8 / 1e-3 : 0;
            double err = fabs(v - to) / (all > 0 ? all : 1);
            worst = err == err && worst < INFINITY ? fmax(worst, err) : INFINITY;
            squares += err * err;
            tries++;
        }
        report(worst < 1e-3, name, m, n, k, worst);
        printf("     mean square %.1e\n", sqrt(squares / tries));
        free(got);
        free(rounded);
    }
    fp8_weights_close(&f);
    fp8_rows_close(&r);
    cudaFree(dx);
    cudaFree(y);
    free(x);
}

/* Rounded values are as near as e4m3 allows: half of its last bit, which is 2^-3 of a value, or of
 * the smallest number times the scale. */
static double rounding(const struct bt_cu_e4m3_rows *r, const double *want, uint32_t m, uint32_t k)
{
    float *got = fp8_rows_values(r, m, k);
    double worst = 0;
    for (size_t i = 0; i < (size_t)m * k; i++) {
        double top = 0;
        for (uint32_t c = i % k / 128 * 128; c < k && c < i % k / 128 * 128 + 128; c++) {
            top = fmax(top, fabs(want[i / k * k + c]));
        }
        double room = fmax(fabs(want[i]) * 0x1p-4, top / 448 * 0x1p-10) * 1.001 + top * 1e-5;
        double err = room > 0 ? fabs(got[i] - want[i]) / room : fabs((double)got[i]);
        worst = err == err ? fmax(worst, err) : INFINITY;
    }
    free(got);
    return worst;
}

/* SwiGLU that ends in e4m3: as the same way's result in f16, rounded afterwards. */
static void check_rounds(uint32_t m, uint32_t n, uint32_t k, uint32_t seed)
{
    struct fp8_weights f = fp8_weights_open(n, k, BT_CU_WEIGHT_BLOCKS, false, seed);
    const uint32_t wide = n / 2;
    struct bt_cu_e4m3_rows x = fp8_rows_open(m, k), to = fp8_rows_open(m, wide);
    void *dx, *h = device_memory(NULL, (size_t)m * wide * 2);
    double *want = malloc((size_t)m * wide * sizeof(*want));
    uint32_t ways = 0;
    double worst = 0;
    free(fp8_random_rows(m, k, BT_CU_F16, &dx, seed + 1));
    CHECK(bt_cu_rows_e4m3(dx, m, k, &x, 0));
    for (uint32_t way = 0; way < bt_cu_skinny_ways(); way++) {
        if (!bt_cu_skinny_rounds(way, m, n, k)) {
            continue;
        }
        CHECK(bt_cu_skinny_rounded(way, f.w, &x, h, m, n, k, BT_CU_SKINNY_SWIGLU, 0));
        CHECK(bt_cu_skinny_rounded_swiglu(way, f.w, &x, &to, m, n, k, 0));
        CHECK(cudaDeviceSynchronize());
        uint16_t *half = host_copy(h, (size_t)m * wide * 2);
        for (size_t i = 0; i < (size_t)m * wide; i++) {
            want[i] = to_float(half[i], BT_CU_F16);
        }
        worst = fmax(worst, rounding(&to, want, m, wide));
        free(half);
        ways++;
    }
    report(ways > 0 && worst < 1.02, "swiglu in e4m3", m, n, k, worst);
    fp8_weights_close(&f);
    fp8_rows_close(&x);
    fp8_rows_close(&to);
    cudaFree(dx);
    cudaFree(h);
    free(want);
}

static void check_rows(uint32_t m, uint32_t k, uint32_t seed)
{
    void *da, *dgu;
    float *a = fp8_random_rows(m, k, BT_CU_F16, &da, seed),
          *gu = fp8_random_rows(m, 2 * k, BT_CU_BF16, &dgu, seed + 1);
    double *want = malloc((size_t)m * k * sizeof(*want));
    struct bt_cu_e4m3_rows r = fp8_rows_open(m, k);
    /* One row of zeros, and values of very different sizes. */
    uint16_t zero[16] = {0};
    for (uint32_t c = 0; c < k; c += 16) {
        CHECK(cudaMemcpy((uint16_t *)da + c, zero, sizeof(zero), cudaMemcpyHostToDevice));
    }
    for (size_t i = 0; i < (size_t)m * k; i++) {
        want[i] = i < k ? 0 : a[i];
    }
    CHECK(bt_cu_rows_e4m3(da, m, k, &r, 0));
    CHECK(cudaDeviceSynchronize());
    double worst = rounding(&r, want, m, k);
    report(worst < 1, "rows_e4m3", m, 0, k, worst);
    CHECK(bt_cu_swiglu_e4m3(dgu, m, k, &r, 0));
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < (size_t)m * k; i++) {
        double g = gu[i / k * 2 * k + i % k], u = gu[i / k * 2 * k + k + i % k];
        want[i] = g / (1 + exp(-g)) * u;
    }
    worst = rounding(&r, want, m, k);
    report(worst < 1, "swiglu_e4m3", m, 0, k, worst);
    /* The norm of x = a, with weights that grow. */
    float *w = malloc(k * sizeof(*w));
    for (uint32_t c = 0; c < k; c++) {
        w[c] = ldexpf(1, (int)(c % 7) - 3);
    }
    float *dw = device_memory(w, k * 4), *dx = device_memory(a, (size_t)m * k * 4);
    CHECK(bt_cu_norm_e4m3(dx, dw, m, k, 1e-5f, &r, 0));
    CHECK(cudaDeviceSynchronize());
    for (uint32_t i = 0; i < m; i++) {
        double sum = 0;
        for (uint32_t c = 0; c < k; c++) {
            sum += (double)a[(size_t)i * k + c] * a[(size_t)i * k + c];
        }
        for (uint32_t c = 0; c < k; c++) {
            want[(size_t)i * k + c] = a[(size_t)i * k + c] / sqrt(sum / k + 1e-5) * w[c];
        }
    }
    worst = rounding(&r, want, m, k);
    report(worst < 1, "norm_e4m3", m, 0, k, worst);
    fp8_rows_close(&r);
    void *device[] = {da, dgu, dw, dx}, *host[] = {a, gu, want, w};
    for (int i = 0; i < 4; i++) {
        cudaFree(device[i]);
        free(host[i]);
    }
}

/* The device rounds weights to the same bits as the host. */
static void check_quantize(uint32_t n, uint32_t k, uint32_t seed)
{
    void *d;
    float *w = fp8_random_rows(n, k, BT_CU_BF16, &d, seed);
    uint32_t across = BT_DIV_UP(k, 128), stride = bt_cu_scale_stride(k), down = BT_DIV_UP(n, 128);
    for (size_t i = 0; i < (size_t)n * k; i++) { /* some blocks are tiny, one is 0 */
        size_t block = i / k / 128 * across + i % k / 128;
        w[i] = block == 1 ? 0 : block % 3 == 2 ? ldexpf(w[i], -100) : w[i];
    }
    uint16_t *b = malloc((size_t)n * k * 2);
    for (size_t i = 0; i < (size_t)n * k; i++) {
        uint32_t u;
        memcpy(&u, &w[i], 4);
        b[i] = (uint16_t)(u >> 16);
    }
    uint8_t *want = malloc((size_t)n * k), *v;
    float *scale = malloc((size_t)down * across * 4), *dscale;
    uint32_t zero = 0, *bad = device_memory(&zero, 4), wrong = 0;
    if (!bt_fp8_quantize(w, n, k, want, scale)) {
        report(false, "quantize on the host", 0, n, k, INFINITY);
    }
    CHECK(cudaMemcpy(d, b, (size_t)n * k * 2, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc((void **)&v, (size_t)n * k));
    CHECK(cudaMalloc((void **)&dscale, (size_t)down * stride * 4));
    CHECK(bt_cu_quantize(d, n, k, v, dscale, bad, 0));
    CHECK(cudaDeviceSynchronize());
    uint8_t *got = host_copy(v, (size_t)n * k);
    float *gots = host_copy(dscale, (size_t)down * stride * 4);
    for (size_t i = 0; i < (size_t)n * k; i++) {
        wrong += got[i] != want[i / k * k + fp8_column(i % k)];
    }
    for (uint32_t i = 0; i < down * across; i++) {
        wrong += gots[i / across * stride + i % across] != scale[i];
    }
    CHECK(cudaMemcpy(&zero, bad, 4, cudaMemcpyDeviceToHost));
    report(wrong == 0 && zero == 0, "quantize", 0, n, k, wrong);
    b[(size_t)n * k / 2] = 0x7f80; /* infinite */
    CHECK(cudaMemcpy(d, b, (size_t)n * k * 2, cudaMemcpyHostToDevice));
    CHECK(bt_cu_quantize(d, n, k, v, dscale, bad, 0));
    CHECK(cudaMemcpy(&zero, bad, 4, cudaMemcpyDeviceToHost));
    report(zero == 1, "quantize, an infinity", 0, n, k, zero);
    void *device[] = {d, v, dscale, bad}, *host[] = {w, b, want, scale, got, gots};
    for (int i = 0; i < 4; i++) {
        cudaFree(device[i]);
    }
    for (int i = 0; i < 6; i++) {
        free(host[i]);
    }
}

int main(void)
{
    static const uint32_t few[][3] = {{1, 256, 512},  {3, 16, 128},    {8, 272, 1088},
                                      {1, 512, 64},   {5, 768, 2048},  {9, 256, 144},
                                      {16, 400, 528}, {31, 512, 1024}, {64, 1024, 896},
                                      {65, 272, 656}, {128, 512, 1040}};
    static const uint32_t rounded[][3] = {
        {3, 256, 128}, {33, 512, 640}, {64, 400, 1024}, {65, 272, 768}, {127, 768, 512}};
    struct bt_cu_gemm *g;
    if (cudaFree(0) != cudaSuccess || !bt_cu_skinny_fits(0, 1, 16, 64, BT_CU_WEIGHT_BF16)) {
        printf("no GPU\n");
        return 0;
    }
    for (uint32_t i = 0; i < sizeof(few) / sizeof(few[0]); i++) {
        for (int j = 0; j < 4; j++) {
            check_few(few[i][0], few[i][1], few[i][2],
                      j / 2 ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BLOCKS, j % 2, false, 100 * i + 7);
        }
    }
    for (uint32_t i = 0; i < sizeof(rounded) / sizeof(rounded[0]); i++) {
        for (int j = 0; j < 4; j++) {
            check_few(rounded[i][0], rounded[i][1], rounded[i][2],
                      j / 2 ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BLOCKS, j % 2, true, 100 * i + 9);
        }
    }
    check_rounds(33, 1024, 512, 21);
    check_rounds(64, 28672, 1024, 22);
    check_quantize(384, 1024, 1);
    check_quantize(272, 400, 2);
    check_rows(5, 256, 3);
    check_rows(129, 4096, 4);
    check_rows(7, 14336, 5);
    check_rows(3, 1168, 6);
    CHECK(bt_cu_gemm_create(&g));
    for (int i = 0; i < 6; i++) {
        enum bt_cu_weight_kind kind = i % 2 ? BT_CU_WEIGHT_ROWS : BT_CU_WEIGHT_BLOCKS;
        check_many(g, 1, 256, 512, kind, i / 2 == 1, i / 2 == 2, 11);
        check_many(g, 129, 1536, 1024, kind, i / 2 == 1, i / 2 == 2, 12);
        check_many(g, 1000, 400, 640, kind, i / 2 == 1, i / 2 == 2, 13);
        check_many(g, 8192, 1024, 4096, kind, i / 2 == 1, i / 2 == 2, 14);
    }
    bt_cu_gemm_destroy(g);
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
