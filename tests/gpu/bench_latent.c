/* make bench-gpu: the two products of each head around MLA decode, at the shapes of
 * DeepSeek-V2-Lite (16 heads) and V3 (128), in CUDA graphs over weights that together exceed the L2
 * cache. Floor: the bytes of weights and rows over 4.3 TB/s. */
#include "common/engine/cuda/attention/latent.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define COPIES 40 /* 168 MB of the smaller model */

struct bench {
    cudaStream_t s;
    void *kv_b[COPIES], *in, *rope, *pos, *q, *mix, *out;
    uint32_t n, heads, copies;
};

static void launch(const struct bench *b, int what, const void *kv_b)
{
    const struct bt_cu_latent_queries p = {.in = b->in,
                                           .kv_b = kv_b,
                                           .out = b->q,
                                           .rope = {b->rope, b->pos, true},
                                           .in_stride = b->heads * BT_LATENT_HEAD,
                                           .n = b->n,
                                           .heads = b->heads};
    if (what == 0) {
        CHECK(bt_cu_latent_absorb(&p, NULL, b->s));
    } else {
        CHECK(bt_cu_latent_values(b->mix, kv_b, b->n, b->heads, b->out, false, b->s));
    }
}

/* us of one launch; several follow each other, so that each asks for weights ahead. */
static float replay(const struct bench *b, int what)
{
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float best = 1e9f, ms;
    CHECK(cudaStreamBeginCapture(b->s, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < 2 * b->copies; i++) {
        launch(b, what, b->kv_b[i % b->copies]);
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
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(graph));
    return best * 1000 / (float)(2 * b->copies);
}

static void run(struct bench *b, const char *model)
{
    static const char *const names[] = {"absorb", "values"};
    static const uint32_t rows[] = {1, 8, 64, 256};
    for (int what = 0; what < 2; what++) {
        for (int r = 0; r < 4; r++) {
            b->n = rows[r];
            double width =
                what ? BT_LATENT * 2 + BT_LATENT_V * 2 : BT_LATENT_HEAD * 4 + BT_LATENT_ROW * 2;
            double bytes = b->heads * (128.0 * BT_LATENT * 2 + b->n * width);
            float us = replay(b, what);
            printf("bench,mla_%s_%s_b%u,%.2f,us,floor,%.2f\n", names[what], model, b->n, us,
                   us / (bytes / 4.3e6));
        }
    }
}

int main(void)
{
    static const struct {
        const char *model;
        uint32_t heads, copies;
    } shapes[] = {{"v2lite", 16, COPIES}, {"v3", 128, 5}};
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    size_t most = (size_t)256 * 128;
    CHECK(cudaMalloc(&b.in, most * BT_LATENT_HEAD * 4));
    CHECK(cudaMalloc(&b.q, most * BT_LATENT_ROW * 2));
    CHECK(cudaMalloc(&b.mix, most * BT_LATENT * 2));
    CHECK(cudaMalloc(&b.out, most * BT_LATENT_V * 2));
    CHECK(cudaMalloc(&b.rope, 64 * BT_LATENT_ROPE * 4));
    CHECK(cudaMalloc(&b.pos, 256 * 4));
    CHECK(cudaMemset(b.pos, 0, 256 * 4));
    CHECK(cudaMemset(b.rope, 0, 64 * BT_LATENT_ROPE * 4));
    CHECK(cudaMemset(b.in, 0, most * BT_LATENT_HEAD * 4));
    ref_fill(b.mix, most * BT_LATENT, BT_CU_F16, 1, 3);
    for (int i = 0; i < 2; i++) {
        size_t n = (size_t)shapes[i].heads * 256 * BT_LATENT;
        b.heads = shapes[i].heads;
        b.copies = shapes[i].copies;
        for (uint32_t c = 0; c < b.copies; c++) {
            CHECK(cudaMalloc(&b.kv_b[c], n * 2));
            ref_fill(b.kv_b[c], n, BT_CU_F16, 0.05f, c);
        }
        CHECK(cudaDeviceSynchronize());
        run(&b, shapes[i].model);
        for (uint32_t c = 0; c < b.copies; c++) {
            CHECK(cudaFree(b.kv_b[c]));
        }
    }
    return 0;
}
