/* make bench-gpu: attention kernels at the shape of Llama-3-8B (32 query heads, 8 KV heads, 128),
 * pages of 64 in random order. Decode runs inside CUDA graphs over layers that together exceed the
 * L2 cache; medians of replays. The floor is bytes of KV over the read bandwidth measured first. */
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define HEADS    32
#define KV_HEADS 8
#define DIM      128
#define PAGE     64
#define SEG      (KV_HEADS * 2 * PAGE) /* rows */

struct bed { /* a pool and tensors for one shape */
    struct bt_attn_pool pool;
    struct bt_attn *attn;
    uint32_t layers, pages, stride, batch, table_stride, each;
    void *kv, *q, *out;
    int32_t *table;
    struct bt_attn_queries *queries;
};

/* each: query tokens of a sequence in a decode. */
static void bed_open(struct bed *b, uint32_t batch, uint32_t len, uint32_t each, uint32_t q_rows,
                     int type, size_t rotate)
{
    *b = (struct bed){.batch = batch, .table_stride = (len + PAGE - 1) / PAGE};
    b->pages = batch * b->table_stride;
    int e4m3 = type == BT_CU_E4M3, q_type = e4m3 ? BT_CU_F16 : type;
    uint32_t seg = e4m3 ? SEG + SEG / DIM : SEG; /* scales: a byte a row */
    size_t row = e4m3 ? DIM : DIM * 2, layer = (size_t)b->pages * seg * row;
    b->layers = layer < rotate ? (uint32_t)(rotate / layer) + 1 : 1;
    CHECK(cudaMalloc(&b->kv, layer * b->layers));
    ref_fill(b->kv, layer * b->layers / (row / DIM), type, e4m3 ? 120.0f : 1.0f, 1);
    if (e4m3) { /* 2^-7 */
        CHECK(cudaMemset2D((uint8_t *)b->kv + SEG * row, seg * row, 120, SEG,
                           (size_t)b->pages * b->layers));
    }
    b->stride = (HEADS + 2 * KV_HEADS) * DIM;
    CHECK(cudaMalloc(&b->q, (size_t)q_rows * b->stride * 2));
    CHECK(cudaMalloc(&b->out, (size_t)q_rows * b->stride * 2));
    ref_fill(b->q, (size_t)q_rows * b->stride, q_type, 1.0f, 2);
    int32_t *t = random_order(b->pages);
    struct bt_attn_queries *queries = malloc(batch * sizeof(*queries));
    for (uint32_t i = 0; i < batch; i++) {
        queries[i] =
            (struct bt_attn_queries){(int32_t)(i * each), (int32_t)each, (int32_t)i, (int32_t)len};
    }
    b->table = device_memory(t, b->pages * 4);
    b->queries = device_memory(queries, batch * sizeof(*queries));
    b->each = each;
    free(t);
    free(queries);
    b->pool = (struct bt_attn_pool){.kv = b->kv,
                                    .rows = (uint64_t)b->pages * seg * b->layers,
                                    .page_rows = seg,
                                    .scale_row = SEG,
                                    .page_tokens = PAGE,
                                    .heads = HEADS,
                                    .kv_heads = KV_HEADS,
                                    .head_dim = DIM,
                                    .type = type,
                                    .out_type = q_type};
    CHECK(bt_attn_create(&b->pool, batch, &b->attn));
}

static void bed_close(struct bed *b)
{
    bt_attn_destroy(b->attn);
    cudaFree(b->kv);
    cudaFree(b->q);
    cudaFree(b->out);
    cudaFree(b->table);
    cudaFree(b->queries);
}

/* Median time in us of what is captured on s, replayed. */
static float replay(cudaStream_t s, void (*body)(void *, cudaStream_t), void *arg, int times)
{
    cudaGraph_t g;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float v[32];
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    body(arg, s);
    CHECK(cudaStreamEndCapture(s, &g));
    CHECK(cudaGraphInstantiate(&e, g, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = -2; i < times; i++) {
        CHECK(cudaEventRecord(t0, s));
        CHECK(cudaGraphLaunch(e, s));
        CHECK(cudaEventRecord(t1, s));
        CHECK(cudaEventSynchronize(t1));
        if (i >= 0) {
            CHECK(cudaEventElapsedTime(&v[i], t0, t1));
        }
    }
    qsort(v, (size_t)times, sizeof(v[0]), by_value);
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(g));
    return v[times / 2] * 1000;
}

struct bt_cu_decode_run {
    struct bed *b;
    int n;
};
static void decode_body(void *arg, cudaStream_t s)
{
    struct bt_cu_decode_run *r = arg;
    struct bed *b = r->b;
    const struct bt_attn_decode d = {.q = b->q,
                                     .out = b->out,
                                     .q_stride = b->stride,
                                     .out_stride = b->stride,
                                     .most = b->each,
                                     .table = b->table,
                                     .table_stride = b->table_stride,
                                     .fresh = b->each};
    for (int i = 0; i < r->n; i++) {
        CHECK(
            bt_attn_decode(b->attn, &d, (uint32_t)i % b->layers * b->pages * b->pool.page_rows, s));
    }
}

static void bench_decode(cudaStream_t s, uint32_t batch, uint32_t len, uint32_t each, float fa3,
                         float cudnn, float aim, float read_gbs, int type)
{
    struct bed b;
    bed_open(&b, batch, len, each, batch * each, type, 400u << 20);
    CHECK(bt_attn_decode_plan(b.attn, b.queries, batch, each, s));
    double bytes = (double)batch * len * KV_HEADS * 2 * (type == BT_CU_E4M3 ? DIM + 1 : DIM * 2);
    struct bt_cu_decode_run r = {&b, (int)(b.layers * 2 > 8 ? b.layers * 2 : 8)};
    float us = replay(s, decode_body, &r, 11) / (float)r.n;
    char name[32], tokens[16] = "";
    if (each > 1) {
        snprintf(tokens, sizeof(tokens), "_q%u", each);
    }
    snprintf(name, sizeof(name), "B%u %u%s", batch, len, tokens);
    printf("decode %s %-12s %8.1f us %6.0f GB/s  floor %.1f us (%.0f %%)  aim %.1f  FA3 %.1f cuDNN "
           "%.1f\n",
           type == BT_CU_E4M3 ? "e4m3" : "f16 ", name, us, bytes / us / 1e3, bytes / read_gbs / 1e3,
           bytes / read_gbs / 1e1 / us, aim, fa3, cudnn);
    printf("bench,decode_attention_%sb%u_%u%s,%.1f,us,%s,%.2f\n", type == BT_CU_E4M3 ? "e4m3_" : "",
           batch, len, tokens, us, fa3 > 0 ? "FA3 paged on the same kind of card with bf16" : "-",
           fa3 > 0 ? us / fa3 : 0);
    fflush(stdout);
    bed_close(&b);
}

struct prefill_run {
    struct bt_attn *attn;
    struct bt_attn_prefill f;
};
static void launch_prefill(void *arg, cudaStream_t s)
{
    const struct prefill_run *r = arg;
    CHECK(bt_attn_prefill(r->attn, &r->f, 0, s));
}

static void bench_prefill(cudaStream_t s, uint32_t len, float fa3, float cudnn, float aim, int type)
{
    struct bed b;
    bed_open(&b, 1, len, 1, len, type, 0);
    int tokens = (int)bt_attn_prefill_tokens(b.attn), n = 0;
    struct bt_attn_item *items = calloc(len, sizeof(*items));
    for (int t = (int)len - tokens; t >= 0; t -= tokens) {
        items[n++] = (struct bt_attn_item){t, tokens, t, 0, (int)len, {0}};
    }
    void *d_items = device_memory(items, (size_t)n * sizeof(*items));
    struct prefill_run r = {
        b.attn,
        {b.q, b.out, b.stride, b.stride, len, d_items, (uint32_t)n, b.table, b.table_stride}};
    struct launch_times ms = time_launches(launch_prefill, &r, 0.4f, s);
    double flop = 2.0 * len * len * DIM * HEADS, tf = flop / ms.median / 1e9;
    printf("prefill %s %-6u %8.3f ms %6.0f TFLOP/s, %.0f after 0.4 s  aim %.0f  FA3 %.0f cuDNN "
           "%.0f\n",
           type == BT_CU_F16 ? "f16 " : "bf16", len, ms.median, tf, flop / ms.hot / 1e9, aim, fa3,
           cudnn);
    printf("bench,prefill_attention_%s_%u,%.0f,TFLOP/s,FA3 on the same kind of card,%.2f\n",
           type == BT_CU_F16 ? "f16" : "bf16", len, tf, tf / fa3);
    fflush(stdout);
    cudaFree(d_items);
    free(items);
    bed_close(&b);
}

int main(int argc, char **argv)
{
    cudaStream_t s;
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    printf("%s, %d multiprocessors, L2 %d MB\n", p.name, p.multiProcessorCount,
           p.l2CacheSize >> 20);
    float read_gbs = ref_read_gbs(s);
    printf("read bandwidth %.0f GB/s\n", read_gbs);
    static const struct {
        uint32_t batch, len;
        float fa3, cudnn, aim;
    } d[] = {{1, 1024, 0, 0, 0},
             {1, 8192, 18.1f, 15.9f, 16.5f},
             {1, 32768, 43.2f, 39.6f, 0},
             {8, 8192, 72.1f, 69.7f, 69},
             {8, 32768, 252, 244.7f, 0},
             {32, 4096, 136.5f, 0, 128},
             {64, 1024, 82.6f, 70.1f, 0},
             {64, 8192, 503.5f, 473.9f, 480},
             {256, 1024, 317, 243.9f, 250},
             {256, 8192, 1997, 1877.8f, 1900}};
    /* Arguments "BATCH LENGTH": that decode alone, for a profiler; "prefill [LENGTH]": no decode.
     */
    const int prefill = argc > 1 && strcmp(argv[1], "prefill") == 0;
    uint32_t only[2] = {0, 0};
    for (int i = 1; i < argc && i <= 2; i++) {
        only[i - 1] = (uint32_t)strtoul(argv[i], NULL, 10);
    }
    for (size_t i = 0; i < sizeof(d) / sizeof(d[0]); i++) {
        if (argc > 1 && (d[i].batch != only[0] || d[i].len != only[1])) {
            continue;
        }
        bench_decode(s, d[i].batch, d[i].len, 1, d[i].fa3, d[i].cudnn, d[i].aim, read_gbs,
                     BT_CU_F16);
        bench_decode(s, d[i].batch, d[i].len, 1, d[i].fa3, d[i].cudnn, 0, read_gbs, BT_CU_E4M3);
        if (d[i].batch <= 64 && d[i].len <= 8192) { /* with one, three and seven drafts */
            bench_decode(s, d[i].batch, d[i].len, 2, 0, 0, 0, read_gbs, BT_CU_F16);
            bench_decode(s, d[i].batch, d[i].len, 4, 0, 0, 0, read_gbs, BT_CU_F16);
            bench_decode(s, d[i].batch, d[i].len, 8, 0, 0, 0, read_gbs, BT_CU_F16);
            bench_decode(s, d[i].batch, d[i].len, 4, 0, 0, 0, read_gbs, BT_CU_E4M3);
        }
    }
    static const struct {
        uint32_t len;
        float fa3, cudnn, aim;
    } f[] = {{4096, 609, 459, 560},
             {8192, 716, 587, 640},
             {16384, 758, 649, 680},
             {32768, 686, 590, 640}};
    for (size_t i = 0; i < sizeof(f) / sizeof(f[0]); i++) {
        if ((argc > 1 && !prefill) || (argc > 2 && f[i].len != only[1])) {
            continue;
        }
        bench_prefill(s, f[i].len, f[i].fa3, f[i].cudnn, f[i].aim, BT_CU_BF16);
        bench_prefill(s, f[i].len, f[i].fa3, f[i].cudnn, f[i].aim, BT_CU_F16);
    }
    return 0;
}
