/* make bench-gpu: prefill attention of latent models (keys of 192 dimensions, values of 128),
 * causal, at the heads of DeepSeek-V3 (128) and V2-Lite (16): one prompt, or a chunk of one over
 * its cached prefix. TFLOP/s count the causal half: 2 * (192 + 128) for each pair of tokens. */
#include "common/engine/cuda/attention/mla_prefill.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

struct row {
    uint32_t heads, len, cached;
    float aim; /* TFLOP/s; 0: none */
};

static void launch(void *arg, cudaStream_t s)
{
    CHECK(bt_mla_prefill(arg, s));
}

static void bench(const struct row *r, cudaStream_t s)
{
    const uint32_t n = r->len - r->cached, tokens = bt_mla_prefill_tokens();
    const size_t q_n = (size_t)n * r->heads * BT_MLA_HEAD_Q;
    const size_t kv_n = (size_t)r->len * r->heads * BT_MLA_HEAD_KV;
    struct bt_mla_prefill_item *items = calloc(n / tokens, sizeof(*items));
    uint32_t tickets[2] = {0}, n_items = 0;
    for (uint32_t t = n / tokens * tokens; t > 0; t -= tokens) {
        uint32_t row = t - tokens;
        items[n_items++] =
            (struct bt_mla_prefill_item){(int)row, (int)tokens, (int)(r->cached + row), 0};
    }
    void *q = device_memory(NULL, q_n * 2), *kv = device_memory(NULL, kv_n * 2);
    void *rope = device_memory(NULL, (size_t)r->len * BT_MLA_HEAD_ROPE * 2);
    void *out = device_memory(NULL, (size_t)n * r->heads * BT_MLA_HEAD_VALUE * 2);
    ref_fill(q, q_n, BT_CU_F16, 1.0f, 1);
    ref_fill(kv, kv_n, BT_CU_F16, 1.0f, 2);
    ref_fill(rope, (size_t)r->len * BT_MLA_HEAD_ROPE, BT_CU_F16, 1.0f, 3);
    struct bt_mla_prefill f = {.q = q,
                               .out = out,
                               .kv = kv,
                               .k_rope = rope,
                               .q_stride = r->heads * BT_MLA_HEAD_Q,
                               .out_stride = r->heads * BT_MLA_HEAD_VALUE,
                               .kv_stride = r->heads * BT_MLA_HEAD_KV,
                               .rope_stride = BT_MLA_HEAD_ROPE,
                               .heads = r->heads,
                               .rows = n,
                               .kv_rows = r->len,
                               .items = device_memory(items, n_items * sizeof(*items)),
                               .n_items = n_items,
                               .scale = 0.0722f,
                               .tickets = device_memory(tickets, sizeof(tickets))};
    struct launch_times ms = time_launches(launch, &f, 0.4f, s);
    double pairs = ((double)r->len * r->len - (double)r->cached * r->cached) / 2;
    double flop = 2.0 * (BT_MLA_HEAD_Q + BT_MLA_HEAD_VALUE) * r->heads * pairs;
    double tf = flop / ms.median / 1e9;
    printf(
        "mla prefill h%-3u %-5u cached %-5u %8.3f ms %4.0f TFLOP/s, %.0f after 0.4 s  aim %.0f\n",
        r->heads, r->len, r->cached, ms.median, tf, flop / ms.hot / 1e9, r->aim);
    printf("bench,mla_prefill_h%u_%u_cached%u,%.0f,TFLOP/s,%s,%.2f\n", r->heads, r->len, r->cached,
           tf, r->aim > 0 ? "aim" : "-", r->aim > 0 ? tf / r->aim : 0);
    fflush(stdout);
    free(items);
    void *all[] = {q, kv, rope, out, (void *)f.items, f.tickets};
    for (int i = 0; i < 6; i++) {
        CHECK(cudaFree(all[i]));
    }
}

/* Arguments HEADS LENGTH: that row alone, for a profiler. */
int main(int argc, char **argv)
{
    static const struct row rows[] = {
        {128, 2048, 0, 0},    {128, 4096, 0, 0}, {128, 8192, 0, 600}, {128, 16384, 0, 0},
        {128, 32768, 0, 620}, {16, 2048, 0, 0},  {16, 4096, 0, 0},    {16, 8192, 0, 0},
        {16, 16384, 0, 0},    {16, 32768, 0, 0}, {16, 8320, 8192, 0}, {128, 20480, 16384, 0},
        {16, 20480, 16384, 0}};
    cudaStream_t s;
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    printf("%s, %d multiprocessors\n", p.name, p.multiProcessorCount);
    uint32_t only[2] = {0, 0};
    for (int i = 1; i < argc && i <= 2; i++) {
        only[i - 1] = (uint32_t)strtoul(argv[i], NULL, 10);
    }
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (argc < 2 || (rows[i].heads == only[0] && rows[i].len == only[1])) {
            bench(&rows[i], s);
        }
    }
    return 0;
}
