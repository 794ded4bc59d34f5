/* make bench-gpu: products of few rows at the shapes of Llama-3-8B: our kernel beside cuBLASLt's
 * fastest algorithm, both in CUDA graphs over weights that together exceed the L2 cache. */
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/gemm.h"
#include "common/engine/cuda/rows.h"
#include "tests/gpu/ref.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define COPIES 8

static float replay(cudaStream_t s, struct bt_cu_gemm *g, void *const *w, const void *x, void *y,
                    uint32_t m, uint32_t n, uint32_t k, int own)
{
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float best = 1e9f, ms;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2 * COPIES; i++) {
        CHECK(own ? bt_cu_gemv(w[i % COPIES], x, y, m, n, k, false, s)
                  : bt_cu_gemm_run(g, w[i % COPIES], x, y, m, n, k, false, false, s));
    }
    CHECK(cudaStreamEndCapture(s, &graph));
    CHECK(cudaGraphInstantiate(&e, graph, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = 0; i < 9; i++) {
        CHECK(cudaEventRecord(t0, s));
        CHECK(cudaGraphLaunch(e, s));
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&ms, t0, t1));
        best = ms < best ? ms : best;
    }
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(graph));
    return best * 1000 / (2 * COPIES);
}

int main(void)
{
    static const struct {
        const char *name;
        uint32_t n, k;
    } shapes[] = {
        {"qkv", 6144, 4096}, {"o", 4096, 4096}, {"gate_up", 28672, 4096}, {"down", 4096, 14336}};
    static const uint32_t rows[] = {1, 4, 8};
    cudaStream_t s;
    struct bt_cu_gemm *g;
    if (cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(bt_cu_gemm_create(&g));
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        uint32_t n = shapes[i].n, k = shapes[i].k;
        void *w[COPIES], *x, *y;
        for (int c = 0; c < COPIES; c++) {
            CHECK(cudaMalloc(&w[c], (size_t)n * k * 2));
            ref_fill(w[c], (size_t)n * k, BT_CU_BF16, 0.02f, (uint32_t)c);
        }
        CHECK(cudaMalloc(&x, (size_t)8 * k * 2));
        CHECK(cudaMalloc(&y, (size_t)8 * n * 4));
        ref_fill(x, (size_t)8 * k, BT_CU_BF16, 1, 77);
        CHECK(cudaDeviceSynchronize());
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
            const void *const *cw = (const void *const *)w;
            uint32_t m = rows[r];
            CHECK(bt_cu_gemm_tune(g, cw, COPIES, x, y, m, n, k, false, false, s));
            float lt = replay(s, g, w, x, y, m, n, k, 0), own = replay(s, g, w, x, y, m, n, k, 1);
            double bytes = (double)n * k * 2;
            printf("gemv %-8s m %-2u: %6.1f us %5.0f GB/s, cuBLASLt %6.1f us %5.0f GB/s\n",
                   shapes[i].name, m, own, bytes / own * 1e-3, lt, bytes / lt * 1e-3);
            printf("bench,gemv_%s_m%u,%.1f,us,cuBLASLt's fastest,%.2f\n", shapes[i].name, m, own,
                   own / lt);
        }
        for (int c = 0; c < COPIES; c++) {
            cudaFree(w[c]);
        }
        cudaFree(x);
        cudaFree(y);
    }
    bt_cu_gemm_destroy(g);
    return 0;
}
