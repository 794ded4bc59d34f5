/* make bench-gpu: the attention half of decode steps with latent attention, at the shapes of
 * DeepSeek-V2-Lite and of V3 without its queries' first product: norm, first product, absorb and
 * append, MLA decode, values, o. CUDA graphs over LAYERS layers of weights and KV, 1,024 tokens a
 * sequence. Then again without one kernel: the difference is what that kernel costs among its
 * neighbours. Floor: the bytes of weights and KV over 4.3 TB/s. */
#include "common/engine/cuda/attention/latent.h"
#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/gemm/skinny.h"
#include "common/engine/cuda/rows/rows.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define LAYERS 12
#define LEN    1024
#define BATCH  64
#define PAGES  (BATCH * LEN / BT_MLA_PAGE_TOKENS)

enum { NORM, FIRST, ABSORB, DECODE, VALUES, O, PARTS };
static const char *const names[PARTS] = {"norm",       "first product", "absorb and append",
                                         "MLA decode", "values",        "o"};

struct bench {
    cudaStream_t s;
    struct bt_mla *mla;
    void *first[LAYERS], *kv_b[LAYERS], *o[LAYERS];
    float *x, *norm, *in, *rope;
    void *a, *absorbed, *mix, *out, *kv;
    int32_t *pos, *slots, *table;
    struct bt_attn_queries *queries;
    uint32_t n, heads, hidden, width;
    int way[2]; /* of the first product and of o; -1: gemv.cu */
};

static void product(const struct bench *b, int which, const void *w, const void *x, float *y,
                    uint32_t n, uint32_t k)
{
    bool add = which == 1;
    if (b->way[which] < 0) {
        CHECK(bt_cu_gemv(bt_cu_bf16(w), x, y, b->n, n, k, add, b->s));
    } else {
        CHECK(bt_cu_skinny((uint32_t)b->way[which], bt_cu_bf16(w), x, y, b->n, n, k,
                           add ? BT_CU_SKINNY_ADD : BT_CU_SKINNY_F32, b->s));
    }
}

static bool fits(const struct bench *b, int way, uint32_t n, uint32_t k)
{
    return way < 0 ? bt_cu_gemv_fits(b->n, n, k, BT_CU_WEIGHT_BF16)
                   : bt_cu_skinny_fits((uint32_t)way, b->n, n, k, BT_CU_WEIGHT_BF16);
}

static void layer(const struct bench *b, uint32_t i, int without)
{
    const struct bt_cu_rope rope = {b->rope, b->pos, true};
    const struct bt_cu_latent_append append = {.in = b->in,
                                               .in_stride = b->width,
                                               .latent_norm = b->norm,
                                               .rope = rope,
                                               .slots = b->slots,
                                               .table = b->table,
                                               .pool = b->kv,
                                               .page_rows = LAYERS * BT_MLA_PAGE_TOKENS,
                                               .layer_row = i * BT_MLA_PAGE_TOKENS,
                                               .n = b->n,
                                               .page_tokens = BT_MLA_PAGE_TOKENS,
                                               .table_stride = LEN / BT_MLA_PAGE_TOKENS,
                                               .eps = 1e-6f};
    const struct bt_cu_latent_queries q = {b->in,    b->kv_b[i], b->absorbed, rope,
                                           b->width, b->n,       b->heads};
    const struct bt_mla_decode d = {.q = b->absorbed,
                                    .out = b->mix,
                                    .tokens = b->n,
                                    .most = 1,
                                    .table = b->table,
                                    .table_stride = LEN / BT_MLA_PAGE_TOKENS};
    if (without != NORM) {
        CHECK(bt_cu_norm(b->x, NULL, b->norm, b->n, b->hidden, 1e-6f, b->a, b->s));
    }
    if (without != FIRST) {
        product(b, 0, b->first[i], b->a, b->in, b->width, b->hidden);
    }
    if (without != ABSORB) {
        CHECK(bt_cu_latent_absorb(&q, &append, b->s));
    }
    if (without != DECODE) {
        CHECK(bt_mla_decode(b->mla, &d, i * BT_MLA_PAGE_TOKENS, b->s));
    }
    if (without != VALUES) {
        CHECK(bt_cu_latent_values(b->mix, b->kv_b[i], b->n, b->heads, b->out, false, b->s));
    }
    if (without != O) {
        product(b, 1, b->o[i], b->out, b->x, b->hidden, b->heads * BT_LATENT_V);
    }
}

/* us of a layer: the best of some runs. */
static float replay(const struct bench *b, int without)
{
    cudaGraph_t graph;
    cudaGraphExec_t e;
    cudaEvent_t t0, t1;
    float best = 1e9f, ms;
    CHECK(cudaStreamBeginCapture(b->s, cudaStreamCaptureModeThreadLocal));
    CHECK(bt_mla_decode_plan(b->mla, b->queries, b->n, 1, b->s));
    for (uint32_t i = 0; i < LAYERS; i++) {
        layer(b, i, without);
    }
    CHECK(cudaStreamEndCapture(b->s, &graph));
    CHECK(cudaGraphInstantiate(&e, graph, 0));
    CHECK(cudaEventCreate(&t0));
    CHECK(cudaEventCreate(&t1));
    for (int i = 0; i < 7; i++) {
        CHECK(cudaEventRecord(t0, b->s));
        CHECK(cudaGraphLaunch(e, b->s));
        CHECK(cudaEventRecord(t1, b->s));
        CHECK(cudaEventSynchronize(t1));
        CHECK(cudaEventElapsedTime(&ms, t0, t1));
        best = ms < best ? ms : best;
    }
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(graph));
    return best * 1000 / LAYERS;
}

/* As the engine does: each product's fastest way while the other stays. */
static void choose(struct bench *b)
{
    const uint32_t n[2] = {b->width, b->hidden}, k[2] = {b->hidden, b->heads * BT_LATENT_V};
    for (int p = 0; p < 2; p++) {
        for (b->way[p] = -1; !fits(b, b->way[p], n[p], k[p]); b->way[p]++) {
        }
    }
    for (int p = 0; p < 2; p++) {
        int best = b->way[p];
        float least = replay(b, -1);
        for (int way = best + 1; way < (int)bt_cu_skinny_ways(); way++) {
            if (fits(b, way, n[p], k[p])) {
                b->way[p] = way;
                float us = replay(b, -1);
                best = us < least ? way : best;
                least = us < least ? us : least;
            }
        }
        b->way[p] = best;
    }
}

static void run(struct bench *b, const char *model)
{
    static const uint32_t rows[] = {1, 8, 64};
    for (int r = 0; r < 3; r++) {
        b->n = rows[r];
        choose(b);
        float all = replay(b, -1);
        double weights = 2.0 * b->hidden * (b->width + b->heads * BT_LATENT_V) +
                         2.0 * b->heads * 256 * BT_LATENT;
        double us = (weights + (double)b->n * LEN * BT_LATENT_ROW * 2) / 4.3e6;
        printf("%s B%u: a layer's half %.1f us, floor %.1f;", model, b->n, all, us);
        for (int p = 0; p < PARTS; p++) {
            printf(" %s %.1f%s", names[p], all - replay(b, p), p + 1 < PARTS ? "," : "\n");
        }
        printf("bench,mla_half_%s_b%u,%.1f,us,floor,%.2f\n", model, b->n, all, all / us);
        fflush(stdout);
    }
}

static void *bf16_weights(size_t n)
{
    void *w = device_memory(NULL, n * 2);
    ref_fill(w, n, BT_CU_BF16, 0.02f, rnd(1 << 30));
    return w;
}

static void open_shape(struct bench *b, uint32_t heads, uint32_t hidden)
{
    const struct bt_mla_pool pool = {.kv = b->kv,
                                     .rows = (uint64_t)PAGES * LAYERS * BT_MLA_PAGE_TOKENS,
                                     .page_rows = LAYERS * BT_MLA_PAGE_TOKENS,
                                     .heads = heads,
                                     .scale = 0.1f};
    b->heads = heads;
    b->hidden = hidden;
    b->width = heads * BT_LATENT_HEAD + BT_LATENT_ROW;
    CHECK(bt_mla_create(&pool, BATCH, &b->mla));
    for (int i = 0; i < LAYERS; i++) {
        b->first[i] = bf16_weights((size_t)b->width * hidden);
        b->o[i] = bf16_weights((size_t)hidden * heads * BT_LATENT_V);
        b->kv_b[i] = device_memory(NULL, (size_t)heads * 256 * BT_LATENT * 2);
        ref_fill(b->kv_b[i], (size_t)heads * 256 * BT_LATENT, BT_CU_F16, 0.02f, (uint32_t)i);
    }
    b->x = device_memory(NULL, (size_t)BATCH * hidden * 4);
    CHECK(cudaMemset(b->x, 0, (size_t)BATCH * hidden * 4));
    b->a = bf16_weights((size_t)BATCH * hidden);
    b->in = device_memory(NULL, (size_t)BATCH * b->width * 4);
    CHECK(cudaMemset(b->in, 0, (size_t)BATCH * b->width * 4));
    b->absorbed = device_memory(NULL, (size_t)BATCH * heads * BT_LATENT_ROW * 2);
    b->mix = device_memory(NULL, (size_t)BATCH * heads * BT_LATENT * 2);
    b->out = bf16_weights((size_t)BATCH * heads * BT_LATENT_V);
    CHECK(cudaDeviceSynchronize());
}

static void close_shape(struct bench *b)
{
    void *all[] = {b->x, b->a, b->in, b->absorbed, b->mix, b->out};
    for (int i = 0; i < 6; i++) {
        cudaFree(all[i]);
    }
    for (int i = 0; i < LAYERS; i++) {
        cudaFree(b->first[i]);
        cudaFree(b->o[i]);
        cudaFree(b->kv_b[i]);
    }
    bt_mla_destroy(b->mla);
}

int main(void)
{
    static int32_t table[PAGES], pos[BATCH], slots[BATCH];
    static struct bt_attn_queries queries[BATCH];
    static float ones[8192];
    struct bench b = {0};
    if (cudaStreamCreateWithFlags(&b.s, cudaStreamNonBlocking) != cudaSuccess) {
        printf("no GPU\n");
        return 0;
    }
    for (int i = 0; i < 8192; i++) {
        ones[i] = 1;
    }
    for (int i = 0; i < PAGES; i++) {
        table[i] = i;
    }
    for (int i = 0; i < BATCH; i++) {
        queries[i] = (struct bt_attn_queries){i, 1, i, LEN};
        pos[i] = LEN - 1;
        slots[i] = i;
    }
    size_t kv = (size_t)PAGES * LAYERS * BT_MLA_PAGE_TOKENS * BT_LATENT_ROW;
    b.kv = device_memory(NULL, kv * 2);
    ref_fill(b.kv, kv, BT_CU_F16, 1, 1);
    b.norm = device_memory(ones, sizeof(ones));
    b.rope = device_memory(NULL, (size_t)LEN * BT_LATENT_ROPE * 4);
    CHECK(cudaMemset(b.rope, 0, (size_t)LEN * BT_LATENT_ROPE * 4));
    b.table = device_memory(table, sizeof(table));
    b.queries = device_memory(queries, sizeof(queries));
    b.pos = device_memory(pos, sizeof(pos));
    b.slots = device_memory(slots, sizeof(slots));
    open_shape(&b, 16, 2048);
    run(&b, "v2lite");
    close_shape(&b);
    open_shape(&b, 128, 7168);
    run(&b, "v3");
    close_shape(&b);
    return 0;
}
