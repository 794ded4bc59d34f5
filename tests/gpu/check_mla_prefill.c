/* make check-gpu: prefill attention of latent models against a slow kernel, over random ragged
 * batches: 1 to 128 heads, lengths 1 to 32k, whole prompts and chunks over a cached prefix,
 * sequences at any row. What no query may see is NaN, what the kernel must write is NaN before.
 * Every case runs twice and must give the same bits. Some results are checked against double
 * precision on the CPU, so that a common mistake of both kernels would show. */
#include <time.h>

#include "common/engine/cuda/attention/mla_prefill.h"
#include "tests/gpu/kit.h"
#include "tests/gpu/ref.h"

#define MAX_SEQS  8
#define MAX_ITEMS 4096
#define MAX_LEN   32768
#define MAX_ROWS  131072 /* tokens x heads of a sequence */
#define SAMPLES   96     /* query tokens that are compared with the slow kernel, all their heads */
#define WORST     4e-3   /* the result is bf16 */

struct setup {
    struct bt_mla_prefill f;
    uint32_t seqs;
    int len[MAX_SEQS], n[MAX_SEQS], first[MAX_SEQS], row[MAX_SEQS];
    uint32_t samples;
    struct ref_row sample[SAMPLES]; /* slot: first row of the KV */
    int32_t sample_row[SAMPLES];    /* of q and out */
};

static int random_len(int i)
{
    switch (rnd(5)) {
    case 0: return 1 + (int)rnd(5);
    case 1: return (int)(128 * (1 + rnd(4)) - 2 + rnd(5)); /* around tile edges */
    case 2: return 1 + (int)rnd(400);
    case 3: return 1 + (int)rnd(3000);
    default: return i % 6 == 5 ? 1 + (int)rnd(MAX_LEN) : 1 + (int)rnd(6000);
    }
}

static void random_shape(struct setup *s, int i)
{
    static const uint32_t heads[] = {16, 128, 3, 8, 1, 16, 64};
    struct bt_mla_prefill *f = &s->f;
    f->heads = heads[i % 7];
    f->scale = i % 3 == 0 ? 0.0722f : 0.135f;
    f->kv_stride = f->heads * BT_MLA_HEAD_KV + (i % 4 == 1 ? 64 : 0);
    f->rope_stride = i % 2 ? 576 : BT_MLA_HEAD_ROPE; /* a latent row's end, or on its own */
    f->q_stride = f->heads * BT_MLA_HEAD_Q + 64;
    f->out_stride = f->heads * BT_MLA_HEAD_VALUE + 64;
    s->seqs = 1 + rnd(MAX_SEQS - 1);
    f->rows = 0;
    f->kv_rows = rnd(200);
    for (uint32_t b = 0; b < s->seqs; b++) {
        s->len[b] = i % 12 == 11 && b == 0 ? MAX_LEN : random_len(i);
        s->n[b] = rnd(3) ? 1 + (int)rnd((uint32_t)s->len[b]) : s->len[b]; /* or the whole prompt */
        s->n[b] = s->n[b] > MAX_ROWS / (int)f->heads ? MAX_ROWS / (int)f->heads : s->n[b];
        s->first[b] = (int)f->kv_rows;
        s->row[b] = (int)f->rows;
        f->kv_rows += (uint32_t)s->len[b] + (b + 1 < s->seqs ? rnd(200) : rnd(2) * 40);
        f->rows += (uint32_t)s->n[b];
    }
}

/* KV of the sequences; all rows between them are NaN. */
static void make_tensors(struct setup *s, int i)
{
    struct bt_mla_prefill *f = &s->f;
    const size_t kv_bytes = f->kv_rows * f->kv_stride * 2;
    const size_t rope_bytes = f->kv_rows * f->rope_stride * 2, q_n = f->rows * f->q_stride;
    uint16_t *kv = device_memory(NULL, kv_bytes), *rope = device_memory(NULL, rope_bytes);
    void *q = device_memory(NULL, q_n * 2);
    CHECK(cudaMemset(kv, 0xff, kv_bytes));
    CHECK(cudaMemset(rope, 0xff, rope_bytes));
    for (uint32_t b = 0; b < s->seqs; b++) {
        size_t at = (size_t)s->first[b], rows = (size_t)s->len[b];
        ref_fill(kv + at * f->kv_stride, rows * f->kv_stride, BT_CU_F16, 1.0f, rnd(1u << 30));
        ref_fill(rope + at * f->rope_stride, rows * f->rope_stride, BT_CU_F16, 1.0f, rnd(1u << 30));
    }
    /* With a deviation of 15 scores leave what their row has seen before by any factor. */
    ref_fill(q, q_n, BT_CU_F16, i % 4 == 2 ? 15.0f : 1.0f, rnd(1u << 30));
    f->q = q;
    f->kv = kv;
    f->k_rope = rope;
    f->out = device_memory(NULL, f->rows * f->out_stride * 2);
    const uint32_t zero[2] = {0};
    f->tickets = device_memory(zero, sizeof(zero));
}

static int by_pos(const void *a, const void *b)
{
    return ((const struct bt_mla_prefill_item *)b)->pos -
           ((const struct bt_mla_prefill_item *)a)->pos;
}

/* Items that are full, but for each sequence's last; or of any length. */
static void make_items(struct setup *s, int ragged)
{
    static struct bt_mla_prefill_item items[MAX_ITEMS];
    const int tokens = (int)bt_mla_prefill_tokens();
    uint32_t n = 0;
    for (uint32_t b = 0; b < s->seqs; b++) {
        for (int t = 0, in; t < s->n[b]; t += in) {
            in = ragged ? tokens - (int)rnd(8) : tokens;
            in = in < s->n[b] - t ? in : s->n[b] - t;
            items[n++] = (struct bt_mla_prefill_item){s->row[b] + t, in, s->len[b] - s->n[b] + t,
                                                      s->first[b]};
        }
    }
    qsort(items, n, sizeof(items[0]), by_pos);
    s->f.items = device_memory(items, n * sizeof(items[0]));
    s->f.n_items = n;
}

/* Query tokens to compare: the first and the last of each sequence, and any. */
static void choose_samples(struct setup *s)
{
    s->samples = 0;
    for (uint32_t k = 0; k < SAMPLES; k++) {
        uint32_t b = k < 2 * s->seqs ? k / 2 : rnd(s->seqs);
        int n = s->n[b], t = k < 2 * s->seqs ? (k % 2 ? n - 1 : 0) : (int)rnd((uint32_t)n);
        s->sample[k] = (struct ref_row){s->first[b], s->len[b] - n + t};
        s->sample_row[k] = s->row[b] + t;
        s->samples++;
    }
}

/* |out - ref| / |ref| of one query token and head, in double on the CPU. */
static double cpu_error(const struct setup *s, uint32_t k, uint32_t head)
{
    const struct bt_mla_prefill *f = &s->f;
    const int tokens = s->sample[k].pos + 1;
    const size_t row = (size_t)s->sample_row[k], first = (size_t)s->sample[k].slot;
    uint16_t q[BT_MLA_HEAD_Q], out[BT_MLA_HEAD_VALUE];
    uint16_t *kv = malloc((size_t)tokens * BT_MLA_HEAD_KV * 2);
    uint16_t *rope = malloc((size_t)tokens * BT_MLA_HEAD_ROPE * 2);
    CHECK(cudaMemcpy(q, (const uint16_t *)f->q + row * f->q_stride + head * BT_MLA_HEAD_Q,
                     sizeof(q), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(out, (uint16_t *)f->out + row * f->out_stride + head * BT_MLA_HEAD_VALUE,
                     sizeof(out), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy2D(kv, BT_MLA_HEAD_KV * 2,
                       (const uint16_t *)f->kv + first * f->kv_stride + head * BT_MLA_HEAD_KV,
                       f->kv_stride * 2, BT_MLA_HEAD_KV * 2, (size_t)tokens,
                       cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy2D(rope, BT_MLA_HEAD_ROPE * 2,
                       (const uint16_t *)f->k_rope + first * f->rope_stride, f->rope_stride * 2,
                       BT_MLA_HEAD_ROPE * 2, (size_t)tokens, cudaMemcpyDeviceToHost));
    double m = -INFINITY, l = 0, o[BT_MLA_HEAD_VALUE] = {0}, diff = 0, norm = 0;
    for (int i = 0; i < tokens; i++) {
        const uint16_t *nope = kv + (size_t)i * BT_MLA_HEAD_KV, *v = nope + BT_MLA_HEAD_NOPE;
        double x = 0;
        for (int d = 0; d < BT_MLA_HEAD_Q; d++) {
            uint16_t key =
                d < BT_MLA_HEAD_NOPE ? nope[d] : rope[i * BT_MLA_HEAD_ROPE + d - BT_MLA_HEAD_NOPE];
            x += (double)to_float(q[d], BT_CU_F16) * to_float(key, BT_CU_F16);
        }
        x *= (double)f->scale;
        double top = fmax(m, x), fix = exp(m - top), w = exp(x - top);
        l = l * fix + w;
        for (int d = 0; d < BT_MLA_HEAD_VALUE; d++) {
            o[d] = o[d] * fix + w * to_float(v[d], BT_CU_F16);
        }
        m = top;
    }
    for (int d = 0; d < BT_MLA_HEAD_VALUE; d++) {
        double r = o[d] / l, e = to_float(out[d], BT_CU_BF16) - r;
        diff += e * e;
        norm += r * r;
    }
    free(kv);
    free(rope);
    return diff == diff ? sqrt(diff / norm) : 1e9;
}

/* The worst sample; 1e9 if a value is not finite, or one beside the heads was written. */
static double compare(const struct setup *s, const uint16_t *out)
{
    const struct bt_mla_prefill *f = &s->f;
    const uint32_t cols = f->heads * BT_MLA_HEAD_VALUE;
    double worst = 0;
    for (size_t i = 0; i < f->rows * f->out_stride; i++) {
        int finite = (out[i] >> 7 & 255) != 255;
        worst = finite == (i % f->out_stride < cols) ? worst : 1e9;
    }
    float *ref = device_memory(NULL, (size_t)s->samples * cols * sizeof(*ref));
    struct ref_row *rows = device_memory(s->sample, sizeof(s->sample));
    int32_t *at = device_memory(s->sample_row, sizeof(s->sample_row));
    ref_mla_prefill(f, rows, at, s->samples, ref);
    for (uint32_t k = 0; k < s->samples; k++) {
        const uint16_t *row = (uint16_t *)f->out + (size_t)s->sample_row[k] * f->out_stride;
        worst = fmax(worst, ref_worst(row, 0, BT_CU_BF16, ref + (size_t)k * cols, 1, f->heads,
                                      BT_MLA_HEAD_VALUE));
    }
    cudaFree(ref);
    cudaFree(rows);
    cudaFree(at);
    return worst;
}

static int check(int i)
{
    static struct setup s;
    s = (struct setup){0};
    random_shape(&s, i);
    make_tensors(&s, i);
    choose_samples(&s);
    const size_t bytes = s.f.rows * s.f.out_stride * 2;
    uint16_t *first = malloc(bytes), *again = malloc(bytes);
    make_items(&s, i % 5 == 3);
    for (int run = 0; run < 2; run++) {
        CHECK(cudaMemset(s.f.out, 0xff, bytes));
        CHECK(bt_mla_prefill(&s.f, 0));
        CHECK(cudaMemcpy(run ? again : first, s.f.out, bytes, cudaMemcpyDeviceToHost));
    }
    double worst = compare(&s, first), cpu = 0;
    for (int k = 0; k < 3; k++) {
        cpu = fmax(cpu, cpu_error(&s, rnd(s.samples), rnd(s.f.heads)));
    }
    int same = memcmp(first, again, bytes) == 0, ok = worst < WORST && cpu < WORST && same;
    int longest = 0;
    for (uint32_t b = 0; b < s.seqs; b++) {
        longest = s.len[b] > longest ? s.len[b] : longest;
    }
    printf("%s %3u heads, %u sequences, longest %5d, %5u rows, %4u items: worst %.1e cpu %.1e%s\n",
           ok ? "ok  " : "FAIL", s.f.heads, s.seqs, longest, s.f.rows, s.f.n_items, worst, cpu,
           same ? "" : " NOT REPEATABLE");
    fflush(stdout);
    free(first);
    free(again);
    const void *all[] = {s.f.q, s.f.kv, s.f.k_rope, s.f.out, s.f.items, s.f.tickets};
    for (int k = 0; k < 6; k++) {
        CHECK(cudaFree((void *)all[k]));
    }
    return ok;
}

/* Tensors that are not aligned and sizes of 0 are refused; no items are no work. */
static int check_refusals(void)
{
    char *p = device_memory(NULL, 1 << 20);
    const struct bt_mla_prefill good = {.q = p,
                                        .out = p,
                                        .kv = p,
                                        .k_rope = p,
                                        .q_stride = 192,
                                        .out_stride = 128,
                                        .kv_stride = 256,
                                        .rope_stride = 64,
                                        .heads = 1,
                                        .rows = 1,
                                        .kv_rows = 1,
                                        .n_items = 1,
                                        .scale = 1};
    struct bt_mla_prefill bad[9];
    for (int i = 0; i < 9; i++) {
        bad[i] = good;
    }
    bad[0].q = p + 8;
    bad[1].kv = p + 2;
    bad[2].k_rope = p + 4;
    bad[3].out = p + 2;
    bad[4].kv_stride = 257;
    bad[5].heads = 0;
    bad[6].rows = 0;
    bad[7].kv_rows = 0;
    bad[8].scale = 0;
    int ok = 1;
    for (int i = 0; i < 9; i++) {
        ok = ok && bt_mla_prefill(&bad[i], 0) == cudaErrorInvalidValue;
    }
    struct bt_mla_prefill none = good;
    none.n_items = 0;
    ok = ok && bt_mla_prefill(&none, 0) == cudaSuccess;
    cudaFree(p);
    printf("%s refusals\n", ok ? "ok  " : "FAIL");
    return ok;
}

/* [CASES [SEED]] */
int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 48, devices = 0;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    printf("# seed %llu\n", (unsigned long long)seed);
    int failed = !check_refusals();
    for (int i = 0; i < n; i++) {
        rng = seed + (uint64_t)i;
        failed += !check(i);
    }
    printf("%d passed, %d failed\n", n + 1 - failed, failed);
    return failed != 0;
}
