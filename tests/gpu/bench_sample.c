/* make bench-gpu: time of drawing a batch on the device at Llama 3's vocabulary, by what the rows
 * ask for. The floor is one read of the logits at 4.3 TB/s. */
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/cuda/sample/sample.h"
#include "common/engine/cuda/sample/sample_params.h"

#define VOCAB 128256u
#define MOST  256u
#define TIMES 20

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));            \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static const struct {
    const char *name;
    struct bt_engine_params p;
} kinds[] = {
    {"greedy", {.top_p = 1, .repetition_penalty = 1, .logprobs = -1}},
    {"temperature", {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .logprobs = -1}},
    {"top_p 0.9", {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1, .logprobs = -1}},
    {"top_k 50 top_p 0.9",
     {.temperature = 1, .top_p = 0.9f, .top_k = 50, .repetition_penalty = 1, .logprobs = -1}},
    {"penalties", {.temperature = 1, .top_p = 1, .repetition_penalty = 1.1f, .logprobs = -1}},
    {"20 logprobs", {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .logprobs = 20}},
};

/* About as wide as a model's: sums of four. */
static float *random_logits(void)
{
    float *l = bt_malloc((size_t)MOST * VOCAB * sizeof(*l));
    uint64_t x = 1;
    for (size_t i = 0; i < (size_t)MOST * VOCAB; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        l[i] =
            (float)((x >> 16 & 0xfff) + (x >> 28 & 0xfff) + (x >> 40 & 0xfff) + (x >> 52)) / 1000;
    }
    return l;
}

int main(void)
{
    static struct bt_cu_draw draws[MOST];
    struct bt_cu_sampling a = {.vocab = VOCAB};
    struct bt_cu_draw *d;
    void *logits;
    cudaEvent_t from, to;
    size_t row = (size_t)VOCAB * 4;
    CHECK(cudaMalloc(&logits, MOST * row));
    CHECK(cudaMalloc((void **)&d, sizeof(draws)));
    CHECK(cudaMalloc((void **)&a.bias, MOST * BT_CU_BIAS_MAX * sizeof(*a.bias)));
    CHECK(cudaMalloc((void **)&a.counts, MOST * row));
    CHECK(cudaMalloc((void **)&a.adjusted, MOST * row));
    CHECK(cudaMalloc((void **)&a.out, MOST * sizeof(*a.out)));
    CHECK(cudaMalloc((void **)&a.last_token, MOST * 4));
    CHECK(cudaMemset(a.counts, 0, MOST * row));
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    float *l = random_logits();
    CHECK(cudaMemcpy(logits, l, MOST * row, cudaMemcpyHostToDevice));
    free(l);
    a.logits = logits;
    a.draws = d;
    for (uint32_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        for (uint32_t n = 1; n <= MOST; n *= n == 1 ? 64 : 4) {
            for (uint32_t i = 0; i < n; i++) {
                draws[i] = bt_cu_draw_make(&kinds[k].p, i, i, 1000, 100);
            }
            CHECK(cudaMemcpy(d, draws, sizeof(draws), cudaMemcpyHostToDevice));
            CHECK(bt_cu_sample_rows(&a, n, 0));
            CHECK(cudaEventRecord(from, 0));
            for (int i = 0; i < TIMES; i++) {
                CHECK(bt_cu_sample_rows(&a, n, 0));
            }
            CHECK(cudaEventRecord(to, 0));
            CHECK(cudaEventSynchronize(to));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, from, to));
            double us = (double)ms * 1e3 / TIMES, floor = (double)(n * row) / 4.3e12 * 1e6;
            printf("bench,sample %s of %u rows,%.1f,us,one read of the logits,%.1f\n",
                   kinds[k].name, n, us, us / floor);
        }
    }
    return 0;
}
