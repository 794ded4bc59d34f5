/* make bench-gpu, or bench_experts MODEL ROWS: one layer's experts with uniform routing, in CUDA
 * graphs over several layers' weights, so that none is in the L2 cache. Two figures for each number
 * of rows: all of it (router, order, both products, weighted sum), and the same less a graph of the
 * router alone. The second stands beside torch's grouped products with SwiGLU, measured on an H200
 * (2026-11-23); torch's rows were in order already, and nothing was summed. The floor is the larger
 * of the bytes of the experts that were hit at 4.3 TB/s and the work at 790 TFLOP/s (weights in
 * e4m3: 1,580). */
#include "common/engine/cuda/experts/experts_priv.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define LAYERS  3
#define REPEATS 12 /* in a graph */
#define SIZES   5
#define MOST    8192u

struct bench {
    struct bt_cu_experts x;
    cudaStream_t s;
    struct bt_cu_weight gate_up[LAYERS], down[LAYERS];
    void *a, *scratch;
    float *scores, *out; /* scores: of REPEATS times all rows */
};

enum what { ALL, ROUTES, SMALL_ITEMS, LARGE_ITEMS };

static void enqueue(const struct bench *b, uint32_t rows, int i, enum what what)
{
    const struct bt_cu_experts *x = &b->x;
    const float *scores = b->scores + (size_t)(i % REPEATS) * rows % MOST * x->n;
    CHECK(bt_cu_experts_route(x, scores, NULL, NULL, rows, b->scratch, b->s));
    if (what == ALL) {
        CHECK(bt_cu_experts_run(x, b->gate_up[i % LAYERS], b->down[i % LAYERS], b->a, rows,
                                b->scratch, b->out, true, NULL, b->s));
    } else if (what != ROUTES) {
        struct bt_cu_experts_plan p = bt_cu_experts_plan(x, rows, b->scratch);
        struct bt_cu_experts_product w = {b->gate_up[i % LAYERS], b->down[i % LAYERS], b->a, rows};
        CHECK(bt_cu_experts_few(x, &p, &w, what == SMALL_ITEMS ? 32 : 64, b->s));
        CHECK(bt_cu_experts_combine(x, &p, rows, b->out, true, NULL, b->s));
    }
}

/* The median time of one in us. */
static float replay(const struct bench *b, uint32_t rows, enum what what)
{
    enum { TIMES = 11 };
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float ms[TIMES];
    CHECK(cudaStreamBeginCapture(b->s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < REPEATS; i++) {
        enqueue(b, rows, i, what);
    }
    CHECK(cudaStreamEndCapture(b->s, &graph));
    CHECK(cudaGraphInstantiate(&e, graph, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    CHECK(cudaGraphLaunch(e, b->s));
    for (int i = 0; i < TIMES; i++) {
        float v;
        int at = i;
        CHECK(cudaEventRecord(t0, b->s));
        CHECK(cudaGraphLaunch(e, b->s));
        CHECK(cudaEventRecord(t1, b->s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&v, t0, t1));
        for (; at > 0 && ms[at - 1] > v; at--) {
            ms[at] = ms[at - 1];
        }
        ms[at] = v;
    }
    CHECK(cudaEventDestroy(t0));
    CHECK(cudaEventDestroy(t1));
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(graph));
    return ms[TIMES / 2] * 1000 / REPEATS;
}

/* The mean number of experts that the repeats hit. */
static double hit(const struct bench *b, uint32_t rows)
{
    uint32_t first[BT_CU_EXPERTS_MAX + 1];
    double n = 0;
    struct bt_cu_experts_routes r = bt_cu_experts_routes(&b->x, rows, b->scratch);
    for (int i = 0; i < REPEATS; i++) {
        enqueue(b, rows, i, ROUTES);
        CHECK(cudaStreamSynchronize(b->s));
        CHECK(cudaMemcpy(first, r.first, (b->x.n + 1) * sizeof(*first), cudaMemcpyDeviceToHost));
        for (uint32_t e = 0; e < b->x.n; e++) {
            n += first[e + 1] > first[e];
        }
    }
    return n / REPEATS;
}

/* A matrix of rows x cols for each expert. */
static struct bt_cu_weight matrices(const struct bt_cu_experts *x, size_t rows, uint32_t cols,
                                    uint32_t seed)
{
    const float sigma = 1 / sqrtf((float)cols);
    struct bt_cu_weight w = {.kind = x->e4m3 ? BT_CU_WEIGHT_BLOCKS : BT_CU_WEIGHT_BF16};
    CHECK(cudaMalloc(&w.w, x->n * rows * cols * (x->e4m3 ? 1 : 2)));
    if (x->e4m3) {
        size_t scales = x->n * rows / BT_CU_WEIGHT_BLOCK * bt_cu_scale_stride(cols);
        CHECK(cudaMalloc((void **)&w.scale, scales * sizeof(*w.scale)));
        ref_fill_e4m3(&w, NULL, x->n * rows, cols, sigma, seed);
    } else {
        ref_fill(w.w, x->n * rows * cols, BT_CU_BF16, sigma, seed);
    }
    return w;
}

static void fill_scores(struct bench *b)
{
    size_t n = (size_t)2 * MOST * b->x.n;
    float *h = malloc(n * 4);
    for (size_t i = 0; i < n; i++) {
        h[i] = (float)rand() / (float)RAND_MAX;
    }
    CHECK(cudaMalloc((void **)&b->scores, n * 4));
    CHECK(cudaMemcpy(b->scores, h, n * 4, cudaMemcpyHostToDevice));
    free(h);
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : "";
    uint32_t only_rows = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    static const uint32_t sizes[SIZES] = {1, 8, 32, 128, MOST};
    static const struct {
        const char *name;
        struct bt_cu_experts x;
        float torch[SIZES];
    } shapes[] = {
        {"v2lite",
         {64, 6, 2048, 1408, 1, 1, 1, false, false, 1, 0, false, false},
         {67.9f, 239, 364, 409, 1695}},
        {"qwen3_30b",
         {128, 8, 2048, 768, 1, 1, 1, false, true, 1, 0, false, false},
         {59.3f, 199, 397, 427, 1358}},
        {"v3_32",
         {32, 8, 7168, 2048, 4, 3, 2, true, true, 2.5f, 0, false, false},
         {291, 962, 963, 953, 9557}},
        {"v2lite_fp8", {64, 6, 2048, 1408, 1, 1, 1, false, false, 1, 0, false, true}, {NAN}},
        {"qwen3_30b_fp8", {128, 8, 2048, 768, 1, 1, 1, false, true, 1, 0, false, true}, {NAN}},
        {"v3_32_fp8", {32, 8, 7168, 2048, 4, 3, 2, true, true, 2.5f, 0, false, true}, {NAN}},
    };
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess ||
        !bt_cu_experts_fits(&shapes[0].x)) {
        printf("no GPU of the Hopper kind\n");
        return 0;
    }
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        const struct bt_cu_experts *x = &shapes[i].x;
        if (!strstr(shapes[i].name, only)) {
            continue;
        }
        size_t room = bt_cu_experts_scratch(x, MOST);
        b.x = *x;
        fill_scores(&b);
        for (int l = 0; l < LAYERS; l++) {
            b.gate_up[l] = matrices(x, 2 * x->inter, x->hidden, 2u * l);
            b.down[l] = matrices(x, x->hidden, x->inter, 2u * l + 1);
        }
        CHECK(cudaMalloc(&b.a, (size_t)MOST * x->hidden * 2));
        CHECK(cudaMalloc((void **)&b.out, (size_t)MOST * x->hidden * 4));
        CHECK(cudaMalloc(&b.scratch, room));
        CHECK(cudaMemset(b.scratch, 0, room));
        CHECK(cudaMemset(b.out, 0, (size_t)MOST * x->hidden * 4));
        ref_fill(b.a, (size_t)MOST * x->hidden, x->e4m3 ? BT_CU_F16 : BT_CU_BF16, 1, 77);
        CHECK(cudaDeviceSynchronize());
        for (int r = 0; r < SIZES; r++) {
            if (only_rows > 0 && sizes[r] != only_rows) {
                continue;
            }
            double n = hit(&b, sizes[r]), bytes = n * (x->e4m3 ? 3 : 6) * x->hidden * x->inter;
            double flop = 6.0 * sizes[r] * x->used * x->hidden * x->inter;
            double floor = fmax(bytes / 4.3e6, flop / (x->e4m3 ? 1580e6 : 790e6));
            float all = replay(&b, sizes[r], ALL), own = all - replay(&b, sizes[r], ROUTES);
            printf("experts %-13s %4u rows, %5.1f experts: %7.1f us with routing, %7.1f without; "
                   "floor %6.1f us (%3.0f %%), torch %6.1f us; %4.0f GB/s, %3.0f TFLOP/s\n",
                   shapes[i].name, sizes[r], n, all, own, floor, 100 * floor / own,
                   shapes[i].torch[r], bytes / own * 1e-3, flop / own * 1e-6);
            printf("bench,experts_%s_b%u,%.1f,us,torch grouped,%.3f\n", shapes[i].name, sizes[r],
                   own, own / shapes[i].torch[r]);
            printf("bench,experts_%s_b%u_with_routing,%.1f,us,floor,%.3f\n", shapes[i].name,
                   sizes[r], all, all / floor);
            if (bt_cu_experts_few_rows(x, sizes[r]) && !x->e4m3) {
                printf("        with routing, items of 32 weight rows: %7.1f us, of 64: %7.1f us\n",
                       replay(&b, sizes[r], SMALL_ITEMS), replay(&b, sizes[r], LARGE_ITEMS));
            }
            fflush(stdout);
        }
        for (int l = 0; l < LAYERS; l++) {
            cudaFree(b.gate_up[l].w);
            cudaFree(b.gate_up[l].scale);
            cudaFree(b.down[l].w);
            cudaFree(b.down[l].scale);
        }
        void *rest[] = {b.a, b.out, b.scratch, b.scores};
        for (int j = 0; j < 4; j++) {
            cudaFree(rest[j]);
        }
    }
    return 0;
}
