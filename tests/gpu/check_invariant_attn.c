/* make check-gpu: a token's attention has the same bits whatever the other tokens of the launch are
 * and however they are divided into items: what engine.deterministic rests on. Tokens alone, single
 * tokens together, and prompts in random pieces and orders, over segments of several sizes; the
 * first of these also against a plain kernel. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define PAGE   64
#define STRIDE 48 /* page ids of a sequence */
#define SLOTS  3
#define WORST  6e-3f /* P and the result are 16-bit */

static int failed;
static const int lens[SLOTS] = {2500, 700, 1290};

/* Consecutive tokens of a sequence. */
struct run {
    int slot, pos, n;
};
static const struct run runs[] = {{0, 2290, 210}, {0, 1000, 51}, {0, 0, 21},
                                  {1, 560, 140},  {2, 1200, 90}, {2, 255, 3}};
#define RUNS   ((int)(sizeof(runs) / sizeof(runs[0])))
#define TOKENS 515

/* The pool's pages, filled, and what a launch needs. */
struct bed {
    int32_t *table; /* device */
    struct bt_attn_item *items;
    struct ref_row *rows; /* device, [TOKENS] */
    void *kv, *q, *out;
    uint32_t heads, most; /* most: tokens of an item */
    size_t out_row;       /* bytes of a token's result */
    void *with;           /* bt_mla or bt_attn */
    /* Computes n items, of which the largest has `most` tokens. */
    void (*launch)(const struct bed *b, const struct bt_attn_item *items, uint32_t n,
                   uint32_t most);
    char name[96];
};

static int32_t *make_table(void)
{
    int32_t *order = random_order(SLOTS * STRIDE);
    int32_t *table = device_memory(order, SLOTS * STRIDE * 4);
    free(order);
    return table;
}

static struct ref_row *make_rows(void)
{
    struct ref_row rows[TOKENS];
    int n = 0;
    for (int r = 0; r < RUNS; r++) {
        for (int i = 0; i < runs[r].n; i++) {
            rows[n++] = (struct ref_row){runs[r].slot, runs[r].pos + i};
        }
    }
    return device_memory(rows, sizeof(rows));
}

/* Items of at most `most` tokens: of that size, or each of a random size and all in random order.
 */
static uint32_t divide(struct bt_attn_item *items, uint32_t most, bool shuffled)
{
    uint32_t n = 0;
    int first = 0;
    for (int r = 0; r < RUNS; first += runs[r].n, r++) {
        for (int at = 0, take; at < runs[r].n; at += take) {
            take = shuffled ? 1 + (int)rnd(most) : (int)most;
            take = take < runs[r].n - at ? take : runs[r].n - at;
            items[n++] = (struct bt_attn_item){.row = first + at,
                                               .n = take,
                                               .pos = runs[r].pos + at,
                                               .slot = runs[r].slot,
                                               .len = runs[r].pos + runs[r].n};
        }
    }
    for (uint32_t i = n; shuffled && i > 1; i--) {
        uint32_t j = rnd(i);
        struct bt_attn_item t = items[i - 1];
        items[i - 1] = items[j];
        items[j] = t;
    }
    return n;
}

static uint8_t *result(const struct bed *b, const struct bt_attn_item *items, uint32_t n,
                       uint32_t most)
{
    CHECK(cudaMemcpy(b->items, items, n * sizeof(*items), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(b->out, 0xff, TOKENS * b->out_row));
    b->launch(b, b->items, n, most);
    return host_copy(b->out, TOKENS * b->out_row);
}

static void report(const struct bed *b, const char *what, uint32_t differ, uint32_t of)
{
    failed += differ > 0;
    printf("%s %s, %s: %u of %u tokens differ\n", differ ? "FAIL" : "ok  ", b->name, what, differ,
           of);
    fflush(stdout);
}

static void compare(const struct bed *b, const char *what, const uint8_t *want, const uint8_t *got)
{
    uint32_t differ = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        differ += memcmp(want + t * b->out_row, got + t * b->out_row, b->out_row) != 0;
    }
    report(b, what, differ, TOKENS);
}

static void check(const struct bed *b, const float *ref, uint32_t dim, int type)
{
    static struct bt_attn_item items[TOKENS];
    char what[64];
    uint32_t n = divide(items, 1, false), alone = 0, differ = 0;
    uint8_t *want = result(b, items, n, 1), *got;
    float worst = ref_worst(b->out, (uint32_t)(b->out_row / 2), type, ref, TOKENS, b->heads, dim);
    failed += !(worst < WORST);
    printf("%s %s: largest error %.1e\n", worst < WORST ? "ok  " : "FAIL", b->name, worst);
    for (uint32_t t = 0; t < TOKENS; t += 37, alone++) {
        got = result(b, items + t, 1, 1);
        differ += memcmp(want + t * b->out_row, got + t * b->out_row, b->out_row) != 0;
        free(got);
    }
    report(b, "alone", differ, alone);
    for (int i = 0; i < 4; i++) {
        uint32_t most = i == 0 ? b->most : 1 + rnd(b->most);
        n = divide(items, most, i > 0);
        got = result(b, items, n, most);
        snprintf(what, sizeof(what), "items of up to %u tokens%s", most, i ? ", shuffled" : "");
        compare(b, what, want, got);
        free(got);
    }
    free(want);
}

static void close_bed(struct bed *b)
{
    void *all[] = {b->table, b->items, b->rows, b->kv, b->q, b->out};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        CHECK(cudaFree(all[i]));
    }
}

static struct bed open_bed(size_t kv_bytes, size_t q_row, size_t out_row)
{
    struct bed b = {.table = make_table(), .rows = make_rows(), .out_row = out_row};
    b.items = device_memory(NULL, TOKENS * sizeof(*b.items));
    b.kv = device_memory(NULL, kv_bytes);
    b.q = device_memory(NULL, TOKENS * q_row);
    b.out = device_memory(NULL, TOKENS * out_row);
    CHECK(cudaMemset(b.kv, 0xff, kv_bytes)); /* what is no token is NaN */
    ref_fill(b.q, TOKENS * q_row / 2, BT_CU_F16, 1.0f, 3);
    return b;
}

/* ---- latent attention ---- */

static void launch_mla(const struct bed *b, const struct bt_attn_item *items, uint32_t n,
                       uint32_t most)
{
    const struct bt_mla_invariant d = {.q = b->q,
                                       .out = b->out,
                                       .tokens = TOKENS,
                                       .n_items = n,
                                       .most = most,
                                       .table = b->table,
                                       .table_stride = STRIDE};
    CHECK(bt_mla_invariant_plan(b->with, items, n, most, 0));
    CHECK(bt_mla_invariant(b->with, &d, 0, 0));
}

static void check_mla(uint32_t heads, uint32_t segment)
{
    const size_t rows = (size_t)SLOTS * STRIDE * PAGE;
    struct bed b = open_bed(rows * BT_MLA_ROW * 2, (size_t)heads * BT_MLA_ROW * 2,
                            (size_t)heads * BT_MLA_LATENT * 2);
    const struct bt_mla_pool pool = {.kv = b.kv,
                                     .rows = rows,
                                     .page_rows = PAGE,
                                     .heads = heads,
                                     .scale = 0.135f,
                                     .segment = segment};
    struct bt_mla *m;
    float *ref = device_memory(NULL, TOKENS * b.out_row * 2);
    for (int i = 0; i < SLOTS; i++) {
        ref_fill_mla(&pool, 0, b.table + i * STRIDE, lens[i], 11 + (uint32_t)i, false);
    }
    ref_mla(&pool, 0, b.q, b.rows, TOKENS, b.table, STRIDE, ref);
    CHECK(bt_mla_create(&pool, TOKENS, &m));
    b.heads = heads;
    b.most = bt_mla_item_tokens(heads);
    b.with = m;
    b.launch = launch_mla;
    snprintf(b.name, sizeof(b.name), "latent attention, %u heads, segments of %u", heads, segment);
    check(&b, ref, BT_MLA_LATENT, BT_CU_F16);
    bt_mla_destroy(m);
    CHECK(cudaFree(ref));
    close_bed(&b);
}

/* ---- keys and values ---- */

struct pages {
    struct bt_attn_pool pool;
    struct bt_attn *attn;
};

static void launch_pages(const struct bed *b, const struct bt_attn_item *items, uint32_t n,
                         uint32_t most)
{
    const struct pages *p = b->with;
    const uint32_t stride = p->pool.heads * p->pool.head_dim;
    const struct bt_attn_prefill f = {.q = b->q,
                                      .out = b->out,
                                      .q_stride = stride,
                                      .out_stride = stride,
                                      .rows = TOKENS,
                                      .items = items,
                                      .n_items = n,
                                      .table = b->table,
                                      .table_stride = STRIDE,
                                      .invariant = true};
    (void)most;
    CHECK(bt_attn_segments_plan(p->attn, items, n, 0));
    CHECK(bt_attn_prefill(p->attn, &f, 0, 0));
}

static void check_pages(struct bt_attn_pool pool)
{
    const uint32_t wide = pool.heads * pool.head_dim;
    struct pages p = {.pool = pool};
    pool.page_tokens = PAGE;
    pool.page_rows = pool.kv_heads * 2 * PAGE;
    pool.rows = (uint64_t)SLOTS * STRIDE * pool.page_rows;
    pool.type = BT_CU_F16;
    pool.out_type = BT_CU_BF16;
    pool.items = TOKENS;
    struct bed b = open_bed(pool.rows * pool.head_dim * 2, wide * 2, wide * 2);
    float *ref = device_memory(NULL, (size_t)TOKENS * wide * 4);
    pool.kv = b.kv;
    for (int i = 0; i < SLOTS; i++) {
        ref_fill_kv(&pool, 0, b.table + i * STRIDE, lens[i], 21 + (uint32_t)i);
    }
    ref_attn(&pool, 0, b.q, wide, b.rows, TOKENS, b.table, STRIDE, ref);
    p.pool = pool;
    CHECK(bt_attn_create(&pool, 1, &p.attn));
    b.heads = pool.heads;
    b.most = bt_attn_prefill_tokens(p.attn);
    b.with = &p;
    b.launch = launch_pages;
    snprintf(b.name, sizeof(b.name), "%u heads of %u over %u, window %u, scale %g, segments of %u",
             pool.heads, pool.head_dim, pool.kv_heads, pool.window, (double)pool.scale,
             pool.segment);
    check(&b, ref, pool.head_dim, BT_CU_BF16);
    bt_attn_destroy(p.attn);
    CHECK(cudaFree(ref));
    close_bed(&b);
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("no GPU\n");
        return 0;
    }
    static const uint32_t heads[] = {16, 128, 5}, segments[] = {256, 64};
    for (int h = 0; h < 3; h++) {
        for (int s = 0; s < 2; s++) {
            check_mla(heads[h], segments[s]);
        }
    }
    static const struct bt_attn_pool shapes[] = {
        {.heads = 32, .kv_heads = 8, .head_dim = 128, .segment = 512},
        {.heads = 32, .kv_heads = 2, .head_dim = 128, .segment = 128},
        {.heads = 8, .kv_heads = 2, .head_dim = 64, .segment = 512},
        {.heads = 6, .kv_heads = 2, .head_dim = 64, .segment = 128},
        {.heads = 4, .kv_heads = 1, .head_dim = 256, .segment = 256},
        {.heads = 4, .kv_heads = 2, .head_dim = 128, .window = 600, .segment = 256},
        /* segments whose weights differ by more than f32 should hold */
        {.heads = 8, .kv_heads = 2, .head_dim = 128, .scale = 20, .segment = 128}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check_pages(shapes[i]);
    }
    printf("%d failed\n", failed);
    return failed > 0;
}
