/* make bench-gpu: decode attention over latent KV, f16 or (--kv fp8) e4m3, pages of 64 in random
 * order. It runs inside CUDA graphs over layers that together exceed the L2
 * cache; medians of replays. The floor is bytes of KV over the read bandwidth measured first, or
 * the products at the peak of the card (989 TFLOP/s), whichever is later. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define PAGE   BT_MLA_PAGE_TOKENS
#define ROTATE ((size_t)400 << 20) /* bytes of KV between two uses of a layer */

struct bed { /* a pool and tensors for one shape */
    struct bt_mla *mla;
    uint32_t layers, pages, launches;
    void *kv, *q, *out;
    int32_t *table;
    struct bt_attn_queries *queries;
    struct bt_mla_decode decode;
};

static bool e4m3;

static void bed_open(struct bed *b, uint32_t heads, uint32_t batch, uint32_t len,
                     uint32_t n_queries)
{
    const uint32_t per_seq = (len + PAGE - 1) / PAGE;
    *b = (struct bed){.pages = batch * per_seq};
    size_t layer = (size_t)b->pages * PAGE * (e4m3 ? BT_MLA_E4M3_ROW : BT_MLA_ROW * 2); /* bytes */
    size_t q_n = (size_t)batch * n_queries * heads * BT_MLA_ROW;
    b->layers = layer < ROTATE ? (uint32_t)(ROTATE / layer) + 1 : 1;
    b->launches = b->layers * 2 > 8 ? b->layers * 2 : 8;
    CHECK(cudaMalloc(&b->kv, layer * b->layers));
    CHECK(cudaMalloc(&b->q, q_n * 2));
    CHECK(cudaMalloc(&b->out, q_n * 2));
    CHECK(cudaMalloc((void **)&b->table, b->pages * 4));
    ref_fill(b->q, q_n, BT_CU_F16, 1.0f, 2);
    int32_t *t = malloc(b->pages * 4);
    struct bt_attn_queries *queries = malloc(batch * sizeof(*queries));
    for (uint32_t i = 0; i < b->pages; i++) {
        t[i] = (int32_t)i;
    }
    for (uint32_t i = b->pages - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(rand() % (int)(i + 1));
        int32_t x = t[i];
        t[i] = t[j];
        t[j] = x;
    }
    for (uint32_t i = 0; i < batch; i++) {
        queries[i] = (struct bt_attn_queries){(int32_t)(i * n_queries), (int32_t)n_queries,
                                              (int32_t)i, (int32_t)len};
    }
    CHECK(cudaMemcpy(b->table, t, b->pages * 4, cudaMemcpyHostToDevice));
    b->queries = device_memory(queries, batch * sizeof(*queries));
    free(t);
    free(queries);
    const struct bt_mla_pool pool = {
        b->kv, (uint64_t)b->pages * PAGE * b->layers, PAGE, heads, 0.0722f, e4m3, 0};
    if (e4m3) {
        for (uint32_t i = 0; i < b->layers; i++) { /* all pages are one sequence's */
            ref_fill_mla(&pool, i * b->pages * PAGE, b->table, (int)(b->pages * PAGE), i + 1, true);
        }
    } else {
        ref_fill(b->kv, layer * b->layers / 2, BT_CU_F16, 1.0f, 1);
    }
    CHECK(bt_mla_create(&pool, batch, &b->mla));
    CHECK(cudaDeviceSynchronize()); /* the benchmark's stream does not wait for this one */
    b->decode =
        (struct bt_mla_decode){b->q, b->out, batch * n_queries, n_queries, b->table, per_seq};
}

static void bed_close(struct bed *b)
{
    bt_mla_destroy(b->mla);
    void *all[] = {b->kv, b->q, b->out, b->table, b->queries};
    for (int i = 0; i < 5; i++) {
        CHECK(cudaFree(all[i]));
    }
}

/* Median time in us of a decode, in replays of a graph. */
static float time_decode(const struct bed *b, cudaStream_t s)
{
    cudaGraph_t g;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float v[11];
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < b->launches; i++) {
        CHECK(bt_mla_decode(b->mla, &b->decode, i % b->layers * b->pages * PAGE, s));
    }
    CHECK(cudaStreamEndCapture(s, &g));
    CHECK(cudaGraphInstantiate(&e, g, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = -2; i < 11; i++) {
        CHECK(cudaEventRecord(t0, s));
        CHECK(cudaGraphLaunch(e, s));
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        if (i >= 0) {
            CHECK(cudaEventElapsedTime(&v[i], t0, t1));
        }
    }
    qsort(v, 11, sizeof(v[0]), by_value);
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(g));
    CHECK(cudaEventDestroy(t0));
    CHECK(cudaEventDestroy(t1));
    return v[5] * 1000 / (float)b->launches;
}

struct row {
    uint32_t heads, batch, len, queries;
    float aim, other; /* us; 0: none */
    const char *of;
};

static void bench(cudaStream_t s, const struct row *r, float read_gbs)
{
    struct bed b;
    bed_open(&b, r->heads, r->batch, r->len, r->queries);
    CHECK(bt_mla_decode_plan(b.mla, b.queries, r->batch, r->queries, s));
    double tokens = (double)r->batch * r->len;
    double bytes = tokens * (e4m3 ? BT_MLA_E4M3_ROW : BT_MLA_ROW * 2);
    double flop = tokens * r->heads * r->queries * 2 * (BT_MLA_ROW + BT_MLA_LATENT);
    float us = time_decode(&b, s);
    double floor_us = bytes / read_gbs / 1e3, products = flop / 989e6;
    floor_us = products > floor_us ? products : floor_us;
    printf(
        "mla decode%s h%-3u s%u b%-3u %-5u %8.1f us %5.0f GB/s %4.0f TFLOP/s  floor %.1f us (%.0f "
        "%%)  aim %.0f  other %.0f\n",
        e4m3 ? " fp8" : "", r->heads, r->queries, r->batch, r->len, us, bytes / us / 1e3,
        flop / us / 1e6, floor_us, floor_us / us * 100, r->aim, r->other);
    printf("bench,mla_decode%s_h%u_s%u_b%u_%u,%.1f,us,%s,%.2f\n", e4m3 ? "_fp8" : "", r->heads,
           r->queries, r->batch, r->len, us, r->other > 0 ? r->of : "-",
           r->other > 0 ? us / r->other : 0);
    fflush(stdout);
    bed_close(&b);
}

#define MLA  "FlashMLA on the same kind of card with bf16"
#define H100 "FA3 on an H100 with bf16 (quoted)"

/* [--kv fp8] [HEADS BATCH LENGTH]: that row alone, for a profiler. */
int main(int argc, char **argv)
{
    static const struct row rows[] = {
        {16, 128, 1024, 1, 45, 71, H100},     {16, 32, 4096, 1, 45, 71, MLA},
        {16, 64, 8192, 1, 145, 171, MLA},     {16, 128, 8192, 1, 280, 304, MLA},
        {16, 128, 32768, 1, 1080, 1110, MLA}, {64, 64, 8192, 1, 165, 192, MLA},
        {64, 128, 8192, 1, 285, 310, MLA},    {64, 128, 32768, 1, 1120, 1196, MLA},
        {128, 32, 4096, 1, 80, 95, MLA},      {128, 64, 8192, 1, 235, 256, MLA},
        {128, 128, 8192, 1, 450, 497, MLA},   {128, 128, 32768, 1, 1640, 1734, MLA},
        {16, 64, 8192, 2, 0, 0, NULL},        {16, 64, 8192, 4, 0, 0, NULL},
        {16, 1, 32768, 1, 0, 0, NULL},        {128, 8, 4096, 1, 0, 0, NULL}};
    /* No other kernel reads whole sequences of fp8 latents on Hopper. */
    static const struct row fp8_rows[] = {
        {16, 128, 1024, 1, 0, 0, NULL},   {16, 32, 4096, 1, 0, 0, NULL},
        {16, 64, 8192, 1, 0, 0, NULL},    {16, 128, 8192, 1, 170, 0, NULL},
        {16, 128, 32768, 1, 0, 0, NULL},  {32, 128, 8192, 1, 0, 0, NULL},
        {64, 128, 8192, 1, 0, 0, NULL},   {128, 32, 4096, 1, 0, 0, NULL},
        {128, 64, 8192, 1, 0, 0, NULL},   {128, 128, 8192, 1, 400, 0, NULL},
        {128, 128, 32768, 1, 0, 0, NULL}, {16, 64, 8192, 4, 0, 0, NULL},
        {16, 1, 32768, 1, 0, 0, NULL},    {128, 8, 4096, 1, 0, 0, NULL}};
    cudaStream_t s;
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    float read_gbs = ref_read_gbs(s);
    printf("%s, %d multiprocessors, read bandwidth %.0f GB/s\n", p.name, p.multiProcessorCount,
           read_gbs);
    uint32_t only[3] = {0, 0, 0};
    e4m3 = argc > 2 && strcmp(argv[1], "--kv") == 0 && strcmp(argv[2], "fp8") == 0;
    const int skip = e4m3 ? 2 : 0;
    for (int i = 1; i + skip < argc && i <= 3; i++) {
        only[i - 1] = (uint32_t)strtoul(argv[i + skip], NULL, 10);
    }
    const struct row *r = e4m3 ? fp8_rows : rows;
    const size_t n = e4m3 ? sizeof(fp8_rows) / sizeof(*r) : sizeof(rows) / sizeof(*r);
    for (size_t i = 0; i < n; i++) {
        if (argc < 2 + skip ||
            (r[i].heads == only[0] && r[i].batch == only[1] && r[i].len == only[2])) {
            bench(s, &r[i], read_gbs);
        }
    }
    return 0;
}
