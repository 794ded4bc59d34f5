/* make bench-gpu: products of a prompt at the shapes of Llama-3-8B with what follows them: wide.cu
 * beside cuBLASLt's fastest algorithm and a pass over its rows. Each side runs for a second, in
 * turns, since what counts is the speed at the clock that power leaves; weights rotate. */
#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/gemm/wide.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define COPIES   4
#define HEADS    32
#define KV_HEADS 8
#define DIM      128
#define PAGE     64

enum what { QKV, GATE_UP };

struct bench {
    cudaStream_t s;
    struct bt_cu_gemm *g;
    void *w[COPIES], *x, *y, *z;
    struct bt_cu_append append;
    uint32_t m, n, k;
    enum what what;
};

/* One product and its pass. */
static void run(const struct bench *b, int i, int own)
{
    const void *w = b->w[i % COPIES];
    if (!own) {
        CHECK(
            bt_cu_gemm_run(b->g, w, b->x, b->y, b->m, b->n, b->k, b->what == GATE_UP, false, b->s));
    }
    if (b->what == QKV) {
        CHECK(own ? bt_cu_wide_append(w, b->x, b->k, &b->append, b->s)
                  : bt_cu_append(&b->append, b->s));
    } else {
        CHECK(own ? bt_cu_wide_swiglu(w, b->x, b->z, b->m, b->n, b->k, b->s)
                  : bt_cu_swiglu(b->y, b->m, b->n / 2, b->z, b->s));
    }
}

/* Time of one in us: the first tenth of a second, and what follows of a second. */
static void measure(const struct bench *b, int own, float *first, float *then)
{
    cudaEvent_t ev[3];
    float ms;
    for (int i = 0; i < 3; i++) {
        CHECK(cudaEventCreate(&ev[i]));
    }
    run(b, 0, own);
    CHECK(cudaEventRecord(ev[0], b->s));
    run(b, 1, own);
    CHECK(cudaEventRecord(ev[1], b->s));
    CHECK(cudaEventSynchronize(ev[1]));
    CHECK(cudaEventElapsedTime(&ms, ev[0], ev[1]));
    int some = (int)(60 / ms) + 1, more = (int)(600 / ms) + 1;
    CHECK(cudaEventRecord(ev[0], b->s));
    for (int i = 0; i < some + more; i++) {
        if (i == some) {
            CHECK(cudaEventRecord(ev[1], b->s));
        }
        run(b, i, own);
    }
    CHECK(cudaEventRecord(ev[2], b->s));
    CHECK(cudaEventSynchronize(ev[2]));
    CHECK(cudaEventElapsedTime(first, ev[0], ev[1]));
    CHECK(cudaEventElapsedTime(then, ev[1], ev[2]));
    *first *= 1000 / (float)some;
    *then *= 1000 / (float)more;
    for (int i = 0; i < 3; i++) {
        CHECK(cudaEventDestroy(ev[i]));
    }
}

/* One prompt whose pages lie in any order. */
static void append_open(struct bench *b, uint32_t most)
{
    enum { ROWS = KV_HEADS * 2 * PAGE };
    uint32_t pages = most / PAGE;
    int32_t *ints = malloc((2 * most + pages) * sizeof(*ints)), *d;
    for (uint32_t i = 0; i < most; i++) {
        ints[i] = (int32_t)i;
        ints[most + i] = 0;
    }
    for (uint32_t i = 0; i < pages; i++) {
        ints[2 * most + i] = (int32_t)(i * 37 % pages);
    }
    void *q, *pool, *rope;
    CHECK(cudaMalloc((void **)&d, (2 * most + pages) * sizeof(*ints)));
    CHECK(cudaMemcpy(d, ints, (2 * most + pages) * sizeof(*ints), cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&q, (size_t)most * HEADS * DIM * 2));
    CHECK(cudaMalloc(&pool, (size_t)pages * ROWS * DIM * 2));
    CHECK(cudaMalloc(&rope, (size_t)most * DIM * 4));
    CHECK(cudaMemset(rope, 0x3e, (size_t)most * DIM * 4));
    free(ints);
    b->append = (struct bt_cu_append){.qkv = b->y,
                                      .rope = rope,
                                      .pos = d,
                                      .slots = d + most,
                                      .table = d + 2 * most,
                                      .q = q,
                                      .pool = pool,
                                      .page_rows = ROWS,
                                      .heads = HEADS,
                                      .kv_heads = KV_HEADS,
                                      .head_dim = DIM,
                                      .page_tokens = PAGE,
                                      .table_stride = pages};
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        uint32_t n, k;
    } shapes[] = {[QKV] = {"qkv_append", 6144, 4096}, [GATE_UP] = {"gate_up_swiglu", 28672, 4096}};
    static const uint32_t all[] = {8192, 4096, 2048, 1024, 512};
    uint32_t sizes = argc > 1 ? (uint32_t)atoi(argv[1]) : 2; /* how many of them */
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess ||
        !bt_cu_wide_fits(all[0], shapes[QKV].n, shapes[QKV].k)) {
        printf("no Hopper GPU\n");
        return 0;
    }
    CHECK(bt_cu_gemm_create(&b.g));
    CHECK(cudaMalloc(&b.x, (size_t)all[0] * 4096 * 2));
    CHECK(cudaMalloc(&b.y, (size_t)all[0] * 28672 * 2));
    CHECK(cudaMalloc(&b.z, (size_t)all[0] * 14336 * 2));
    ref_fill(b.x, (size_t)all[0] * 4096, BT_CU_BF16, 1, 77);
    append_open(&b, all[0]);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        b.what = (enum what)i;
        b.n = shapes[i].n;
        b.k = shapes[i].k;
        for (int c = 0; c < COPIES; c++) {
            CHECK(cudaMalloc(&b.w[c], (size_t)b.n * b.k * 2));
            ref_fill(b.w[c], (size_t)b.n * b.k, BT_CU_BF16, 0.02f, (uint32_t)c);
        }
        for (uint32_t r = 0; r < sizes && r < sizeof(all) / sizeof(all[0]); r++) {
            float us[2][2][2]; /* turn; cuBLASLt, own; first, then */
            b.m = b.append.n = all[r];
            CHECK(bt_cu_gemm_tune(b.g, (const void *const *)b.w, COPIES, b.x, b.y, b.m, b.n, b.k,
                                  i == GATE_UP, false, BT_CU_GEMM_PROPOSALS, b.s));
            for (int t = 0; t < 4; t++) {
                measure(&b, t % 2, &us[t / 2][t % 2][0], &us[t / 2][t % 2][1]);
            }
            double flop = 2.0 * b.m * b.n * b.k;
            for (int own = 0; own < 2; own++) {
                printf("%-14s m %u %s: %7.1f us at first, then %7.1f, %7.1f us, %4.0f TFLOP/s\n",
                       shapes[i].name, b.m, own ? "wide.cu " : "cuBLASLt", us[0][own][0],
                       us[0][own][1], us[1][own][1], flop / us[1][own][1] * 1e-6);
            }
            printf("bench,wide_%s_m%u,%.1f,us,cuBLASLt and a pass,%.3f\n", shapes[i].name, b.m,
                   us[1][1][1], us[1][1][1] / us[1][0][1]);
            fflush(stdout);
        }
        for (int c = 0; c < COPIES; c++) {
            cudaFree(b.w[c]);
        }
    }
    bt_cu_gemm_destroy(b.g);
    return 0;
}
