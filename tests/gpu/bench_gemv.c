/* make bench-gpu: products of few rows at the shapes of Llama-3-8B, in CUDA graphs over weights
 * that together exceed the L2 cache: the best way of skinny.h beside gemv.cu, which ends at 8 rows,
 * or cuBLASLt's fastest algorithm. */
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/rows/rows.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define COPIES 8

struct bench {
    cudaStream_t s;
    struct bt_cu_gemm *g;
    void *w[COPIES], *x, *y;
    uint32_t m, n, k;
};

/* way -1: gemv.cu or cuBLASLt. */
static float replay(const struct bench *b, int way)
{
    cudaStream_t s = b->s;
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float best = 1e9f, ms;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2 * COPIES; i++) {
        const void *w = b->w[i % COPIES];
        if (way >= 0) {
            CHECK(bt_cu_skinny((uint32_t)way, bt_cu_bf16(w), b->x, b->y, b->m, b->n, b->k,
                               BT_CU_SKINNY_F32, s));
        } else if (bt_cu_gemv_fits(b->m, b->n, b->k, BT_CU_WEIGHT_BF16)) {
            CHECK(bt_cu_gemv(bt_cu_bf16(w), b->x, b->y, b->m, b->n, b->k, false, s));
        } else {
            CHECK(bt_cu_gemm_run(b->g, w, b->x, b->y, b->m, b->n, b->k, false, false, s));
        }
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
    static const uint32_t rows[] = {1, 8, 16, 64};
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(bt_cu_gemm_create(&b.g));
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        b.n = shapes[i].n;
        b.k = shapes[i].k;
        for (int c = 0; c < COPIES; c++) {
            CHECK(cudaMalloc(&b.w[c], (size_t)b.n * b.k * 2));
            ref_fill(b.w[c], (size_t)b.n * b.k, BT_CU_BF16, 0.02f, (uint32_t)c);
        }
        CHECK(cudaMalloc(&b.x, (size_t)64 * b.k * 2));
        CHECK(cudaMalloc(&b.y, (size_t)64 * b.n * 4));
        ref_fill(b.x, (size_t)64 * b.k, BT_CU_BF16, 1, 77);
        CHECK(cudaDeviceSynchronize());
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
            b.m = rows[r];
            CHECK(bt_cu_gemm_tune(b.g, (const void *const *)b.w, COPIES, b.x, b.y, b.m, b.n, b.k,
                                  false, false, BT_CU_GEMM_PROPOSALS, b.s));
            float other = replay(&b, -1), own = 1e9f;
            for (uint32_t way = 0; way < bt_cu_skinny_ways(); way++) {
                float us = bt_cu_skinny_fits(way, b.m, b.n, b.k, BT_CU_WEIGHT_BF16)
                               ? replay(&b, (int)way)
                               : own;
                own = us < own ? us : own;
            }
            double bytes = (double)b.n * b.k * 2;
            const char *name = b.m <= 8 ? "gemv.cu" : "cuBLASLt";
            printf("skinny %-8s m %-2u: %6.1f us %5.0f GB/s, %s %6.1f us %5.0f GB/s\n",
                   shapes[i].name, b.m, own, bytes / own * 1e-3, name, other, bytes / other * 1e-3);
            printf("bench,skinny_%s_m%u,%.1f,us,%s,%.2f\n", shapes[i].name, b.m, own, name,
                   own / other);
        }
        for (int c = 0; c < COPIES; c++) {
            cudaFree(b.w[c]);
        }
        cudaFree(b.x);
        cudaFree(b.y);
    }
    bt_cu_gemm_destroy(b.g);
    return 0;
}
