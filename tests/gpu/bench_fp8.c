/* make bench-gpu: products with e4m3 weights at the shapes of Llama-3-8B. Few rows: the best way of
 * skinny.cu (from 33 rows on with rounded activations, without the time to round them) or gemv.cu,
 * beside the best with bf16 weights, in CUDA graphs over weights that
 * together exceed the L2 cache. Many rows: cuBLASLt with rounded activations beside bf16, each for
 * 0.3 s, since what counts is the speed at the clock that power leaves.
 * Arguments: `ways`: every way's time; `few`, `many` or `wide`: only those. */
#include "common/engine/cuda/gemm/wide_e4m3.h"
#include "tests/gpu/fp8_case.h"

#define COPIES 8
#define MOST   8192u

struct bench {
    cudaStream_t s;
    struct bt_cu_gemm *g;
    struct bt_cu_weight e4m3[COPIES], bf16[COPIES];
    void *x, *y;
    struct bt_cu_e4m3_rows rows;
    uint32_t m, n, k, turn;
    enum bt_cu_skinny_end end;
    bool own;
};

static bool rounded(const struct bench *b, const struct bt_cu_weight *w)
{
    return w->kind != BT_CU_WEIGHT_BF16 && b->m > BT_CU_F16_ROWS;
}

static void few(const struct bench *b, const struct bt_cu_weight *w, int way)
{
    if (way >= 0 && rounded(b, w)) {
        CHECK(bt_cu_skinny_rounded((uint32_t)way, *w, &b->rows, b->y, b->m, b->n, b->k, b->end,
                                   b->s));
    } else if (way >= 0) {
        CHECK(bt_cu_skinny((uint32_t)way, *w, b->x, b->y, b->m, b->n, b->k, b->end, b->s));
    } else if (b->end == BT_CU_SKINNY_SWIGLU) {
        CHECK(bt_cu_gemv_swiglu(*w, b->x, b->y, b->m, b->n, b->k, b->s));
    } else {
        CHECK(bt_cu_gemv(*w, b->x, b->y, b->m, b->n, b->k, b->end == BT_CU_SKINNY_ADD, b->s));
    }
}

/* Time of one product in us; way -1: gemv.cu. */
static float replay(const struct bench *b, const struct bt_cu_weight *w, int way)
{
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float best = 1e9f, ms;
    CHECK(cudaStreamBeginCapture(b->s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2 * COPIES; i++) {
        few(b, &w[i % COPIES], way);
    }
    CHECK(cudaStreamEndCapture(b->s, &graph));
    CHECK(cudaGraphInstantiate(&e, graph, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = 0; i < 9; i++) {
        CHECK(cudaEventRecord(t0, b->s));
        CHECK(cudaGraphLaunch(e, b->s));
        CHECK(cudaEventRecord(t1, b->s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&ms, t0, t1));
        best = ms < best ? ms : best;
    }
    CHECK(cudaEventDestroy(t0));
    CHECK(cudaEventDestroy(t1));
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(graph));
    return best * 1000 / (2 * COPIES);
}

static float best_few(const struct bench *b, const struct bt_cu_weight *w, bool print, int *way_p)
{
    float best = 1e9f;
    for (int way = -1; way < (int)bt_cu_skinny_ways(); way++) {
        bool fits = way < 0         ? bt_cu_gemv_fits(b->m, b->n, b->k, w->kind)
                    : rounded(b, w) ? bt_cu_skinny_rounded_fits((uint32_t)way, b->m, b->n, b->k)
                                    : bt_cu_skinny_fits((uint32_t)way, b->m, b->n, b->k, w->kind);
        float us = fits ? replay(b, w, way) : 1e9f;
        if (fits && print) {
            printf(" %d:%.1f", way, us);
        }
        *way_p = us < best ? way : *way_p;
        best = us < best ? us : best;
    }
    if (print) {
        printf("\n");
    }
    return best;
}

static void bench_few(struct bench *b, const char *name, bool print)
{
    static const uint32_t rows[] = {1, 8, 16, 32, 64, 128};
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        int way[2] = {-2, -2};
        b->m = rows[r];
        float us[2] = {best_few(b, b->bf16, false, &way[0]), best_few(b, b->e4m3, print, &way[1])};
        double bytes = (double)b->n * b->k;
        printf(
            "fp8 %-8s m %-3u: e4m3 way %2d %6.1f us %5.0f GB/s, bf16 way %2d %6.1f us %5.0f GB/s\n",
            name, b->m, way[1], us[1], bytes / us[1] * 1e-3, way[0], us[0],
            2 * bytes / us[0] * 1e-3);
        printf("bench,fp8_%s_m%u,%.1f,us,bf16 weights,%.2f\n", name, b->m, us[1], us[1] / us[0]);
        fflush(stdout);
    }
}

static void many(const struct bench *b, int i, bool e4m3, bool bf16)
{
    const struct bt_cu_e4m3_product p = {
        b->e4m3[i % COPIES], b->rows, b->y, b->m, b->n, b->k, bf16, !bf16};
    CHECK(e4m3 ? bt_cu_gemm_e4m3_run(b->g, &p, b->s)
               : bt_cu_gemm_run(b->g, b->bf16[i % COPIES].w, b->x, b->y, b->m, b->n, b->k, bf16,
                                !bf16, b->s));
}

static float time_many(const struct bench *b, bool e4m3, bool bf16)
{
    cudaEvent_t ev[2];
    float ms, spent = 0;
    int n = 0;
    CHECK(cudaEventCreate(&ev[0]));
    CHECK(cudaEventCreate(&ev[1]));
    for (float total = 0; total < 300;) {
        CHECK(cudaEventRecord(ev[0], b->s));
        for (int i = 0; i < 10; i++) {
            many(b, i, e4m3, bf16);
        }
        CHECK(cudaEventRecord(ev[1], b->s));
        CHECK(cudaEventSynchronize(ev[1]));
        CHECK(cudaEventElapsedTime(&ms, ev[0], ev[1]));
        total += ms;
        spent += total > 150 ? ms : 0;
        n += total > 150 ? 10 : 0;
    }
    CHECK(cudaEventDestroy(ev[0]));
    CHECK(cudaEventDestroy(ev[1]));
    return spent * 1000 / (float)n;
}

/* wide_e4m3.cu with the ending that the engine wants, beside cuBLASLt and the pass after it. */
static void with_end(void *arg, cudaStream_t s)
{
    struct bench *b = arg;
    const struct bt_cu_e4m3_product p = {
        b->e4m3[b->turn++ % COPIES], b->rows, b->y, b->m, b->n, b->k, b->end == BT_CU_SKINNY_SWIGLU,
        b->end == BT_CU_SKINNY_ADD};
    const struct bt_cu_wide_e4m3 w = {p.w, p.a, p.m, p.n, p.k};
    const struct bt_cu_e4m3_rows to = {b->x, (float *)((uint8_t *)b->x + (size_t)MOST * 14336)};
    if (b->own) {
        CHECK(p.bf16 ? bt_cu_wide_e4m3_swiglu(&w, &to, s)
                     : bt_cu_wide_e4m3_sum(&w, b->y, p.add, s));
        return;
    }
    CHECK(bt_cu_gemm_e4m3_run(b->g, &p, s));
    if (p.bf16) {
        CHECK(bt_cu_swiglu_e4m3(b->y, b->m, b->n / 2, &to, s));
    }
}

/* At the clock that power leaves for 8,192 rows; else the median of nine. */
static void bench_wide(struct bench *b, const char *name)
{
    static const uint32_t rows[] = {8192, 4096, 2048, 1024, 512, 256, 192, 128};
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        float us[2];
        b->m = rows[r];
        for (int own = 0; own < 2; own++) {
            b->own = own;
            struct launch_times t = time_launches(with_end, b, r == 0 ? 0.2f : 0, b->s);
            us[own] = 1000 * (r == 0 ? t.hot : t.median);
            r == 0 ? printf("fp8 %-8s median of nine %.1f us\n", name, t.median * 1000) : 0;
        }
        double flop = 2.0 * b->m * b->n * b->k;
        printf(
            "fp8 %-8s m %-4u with its end: wide_e4m3 %7.1f us %5.0f TFLOP/s, cuBLASLt %7.1f us\n",
            name, b->m, us[1], flop / us[1] * 1e-6, us[0]);
        printf("bench,fp8_%s_end_m%u,%.1f,us,cuBLASLt and a pass,%.2f\n", name, b->m, us[1],
               us[1] / us[0]);
        fflush(stdout);
    }
}

static void bench_many(struct bench *b, const char *name, bool bf16)
{
    static const uint32_t rows[] = {8192, 2048, 512, 128};
    const void *w[COPIES];
    for (int i = 0; i < COPIES; i++) {
        w[i] = b->bf16[i].w;
    }
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        b->m = rows[r];
        const struct bt_cu_e4m3_product p = {b->e4m3[0], b->rows, b->y, b->m,
                                             b->n,       b->k,    bf16, !bf16};
        CHECK(bt_cu_gemm_e4m3_tune(b->g, &p, b->e4m3, COPIES, 8, b->s));
        CHECK(bt_cu_gemm_tune(b->g, w, COPIES, b->x, b->y, b->m, b->n, b->k, bf16, !bf16, 8, b->s));
        float us[2] = {time_many(b, false, bf16), time_many(b, true, bf16)};
        double flop = 2.0 * b->m * b->n * b->k;
        printf("fp8 %-8s m %-4u: e4m3 %7.1f us %5.0f TFLOP/s, bf16 %7.1f us %5.0f TFLOP/s\n", name,
               b->m, us[1], flop / us[1] * 1e-6, us[0], flop / us[0] * 1e-6);
        printf("bench,fp8_%s_m%u,%.1f,us,bf16 cuBLASLt,%.2f\n", name, b->m, us[1], us[1] / us[0]);
    }
}

static void weights_open(struct bench *b)
{
    uint32_t zero = 0, *bad = device_memory(&zero, 4);
    size_t values = (size_t)b->n * b->k;
    for (int c = 0; c < COPIES; c++) {
        void *w, *v, *scale;
        CHECK(cudaMalloc(&w, values * 2));
        CHECK(cudaMalloc(&v, values));
        CHECK(cudaMalloc(&scale, (size_t)BT_DIV_UP(b->n, 128) * bt_cu_scale_stride(b->k) * 4));
        ref_fill(w, values, BT_CU_BF16, 0.02f, (uint32_t)c);
        CHECK(bt_cu_quantize(w, b->n, b->k, v, scale, bad, 0));
        b->bf16[c] = bt_cu_bf16(w);
        b->e4m3[c] = (struct bt_cu_weight){v, scale, BT_CU_WEIGHT_BLOCKS};
    }
    CHECK(cudaDeviceSynchronize());
    cudaFree(bad);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        uint32_t n, k;
        enum bt_cu_skinny_end end;
    } shapes[] = {{"qkv", 6144, 4096, BT_CU_SKINNY_F32},
                  {"o", 4096, 4096, BT_CU_SKINNY_ADD},
                  {"gate_up", 28672, 4096, BT_CU_SKINNY_SWIGLU},
                  {"down", 4096, 14336, BT_CU_SKINNY_ADD}};
    bool print = false, only[3] = {false, false, false};
    for (int i = 1; i < argc; i++) {
        print |= strcmp(argv[i], "ways") == 0;
        only[0] |= strcmp(argv[i], "few") == 0;
        only[1] |= strcmp(argv[i], "many") == 0;
        only[2] |= strcmp(argv[i], "wide") == 0;
    }
    bool all = !only[0] && !only[1] && !only[2];
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(bt_cu_gemm_create(&b.g));
    CHECK(cudaMalloc(&b.x, (size_t)MOST * 14336 * 2));
    CHECK(cudaMalloc(&b.y, (size_t)MOST * 28672 * 4));
    CHECK(cudaMalloc((void **)&b.rows.v, (size_t)MOST * 14336));
    CHECK(cudaMalloc((void **)&b.rows.scale, (size_t)MOST * 112 * 4));
    ref_fill(b.x, (size_t)MOST * 14336, BT_CU_F16, 1, 77); /* as bf16, finite too */
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        b.n = shapes[i].n;
        b.k = shapes[i].k;
        b.end = shapes[i].end;
        weights_open(&b);
        CHECK(bt_cu_rows_e4m3(b.x, MOST, b.k, &b.rows, 0));
        CHECK(cudaDeviceSynchronize());
        if (all || only[0]) {
            bench_few(&b, shapes[i].name, print);
        }
        if (all || only[1]) {
            bench_many(&b, shapes[i].name, shapes[i].end == BT_CU_SKINNY_SWIGLU);
        }
        if (all || only[2]) {
            bench_wide(&b, shapes[i].name);
        }
        for (int c = 0; c < COPIES; c++) {
            cudaFree((void *)b.bf16[c].w);
            cudaFree((void *)b.e4m3[c].w);
            cudaFree((void *)b.e4m3[c].scale);
        }
    }
    bt_cu_gemm_destroy(b.g);
    return 0;
}
