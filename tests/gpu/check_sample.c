/* make check-gpu: the device's sampler against the host's on random rows: every parameter, mask,
 * history and kind of logits; counts of histories; the same bits twice. Fresh seeds, poisoned
 * outputs; a failing case prints its seed. Argument: the seed. */
#include <time.h>

#include "common/engine/cuda/sample/sample.h"
#include "tests/gpu/kit.h"
#include "tests/unit/sample_cases.h"

/* n items of src on the device (NULL: poison). */
static void *on_device(const void *src, size_t bytes)
{
    void *d;
    CHECK(cudaMalloc(&d, bytes));
    CHECK(src ? cudaMemcpy(d, src, bytes, cudaMemcpyHostToDevice) : cudaMemset(d, 0xff, bytes));
    return d;
}
static void *fetch(const void *d, size_t bytes)
{
    void *h = bt_malloc(bytes);
    CHECK(cudaMemcpy(h, d, bytes, cudaMemcpyDeviceToHost));
    return h;
}

/* The counts that bt_cu_sample_count makes of the cases' histories. */
static uint32_t *count(const struct sample_cases *c)
{
    uint32_t *counts = on_device(NULL, (size_t)c->n * c->vocab * 4);
    CHECK(cudaMemset(counts, 0, (size_t)c->n * c->vocab * 4));
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t *tokens = c->tokens + (size_t)i * SAMPLE_CASES_LEN;
        uint32_t *row = counts + (size_t)i * c->vocab, n = c->n_tokens[i];
        if (!bt_cu_penalizes(&c->params[i]) || n == 0) {
            continue;
        }
        uint32_t *t = on_device(tokens, n * 4);
        uint32_t all = n - (n > c->n_prompt[i]); /* the last one alone, as at a hand-off */
        CHECK(bt_cu_sample_count(row, c->vocab, t, all, c->n_prompt[i], 0));
        if (all < n) {
            CHECK(bt_cu_sample_count_one(row, tokens[n - 1], 0));
        }
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaFree(t));
    }
    return counts;
}

static uint32_t check(uint64_t seed, uint32_t vocab, uint32_t n, bool masked, uint32_t *near_p)
{
    struct sample_cases c;
    sample_cases_make(&c, seed, vocab, n, masked);
    if (seed % 3) {
        sample_cases_ids(&c, seed % 3 == 2);
    }
    size_t row = (size_t)n * vocab * 4, words = (size_t)n * ((vocab + 31) / 32) * 4;
    struct bt_cu_sampling a = {.logits = on_device(c.logits, row),
                               .early = on_device(c.early, row),
                               .draws = on_device(c.draws, n * sizeof(*c.draws)),
                               .mask = masked ? on_device(c.mask, words) : NULL,
                               .bias = on_device(c.biases, n * BT_CU_BIAS_MAX * sizeof(*c.biases)),
                               .counts = count(&c),
                               .adjusted = on_device(NULL, row),
                               .out = on_device(NULL, n * sizeof(struct bt_cu_drawn)),
                               .last_token = on_device(NULL, n * 4),
                               .vocab = vocab,
                               .known = c.known ? on_device(c.known, (vocab + 31) / 32 * 4) : NULL,
                               .n_known = c.n_known,
                               .end_known = c.end_known};
    uint32_t *counts = fetch(a.counts, row);
    uint32_t wrong = memcmp(counts, c.counts, row) != 0;
    if (wrong) {
        printf("# counts of histories differ\n");
    }
    CHECK(bt_cu_sample_rows(&a, n, 0));
    struct bt_cu_drawn *first = fetch(a.out, n * sizeof(*first));
    wrong += sample_cases_check(&c, first, near_p);
    free(counts);
    counts = fetch(a.counts, row);
    for (uint32_t i = 0; i < n; i++) {
        bool counted = bt_cu_penalizes(&c.params[i]) && !first[i].bad;
        uint32_t *at = &c.counts[(size_t)i * vocab + first[i].token];
        *at += counted;
    }
    if (memcmp(counts, c.counts, row) != 0) {
        printf("# counts after the draws differ\n");
        wrong++;
    }
    /* once more, from the same counts */
    for (uint32_t i = 0; i < n; i++) {
        c.counts[(size_t)i * vocab + first[i].token] -=
            bt_cu_penalizes(&c.params[i]) && !first[i].bad;
    }
    CHECK(cudaMemcpy(a.counts, c.counts, row, cudaMemcpyHostToDevice));
    CHECK(bt_cu_sample_rows(&a, n, 0));
    struct bt_cu_drawn *second = fetch(a.out, n * sizeof(*second));
    for (uint32_t i = 0; i < n; i++) {
        if (first[i].token != second[i].token || first[i].logprob != second[i].logprob) {
            printf("# case %u: token %u, then %u\n", i, first[i].token, second[i].token);
            wrong++;
        }
    }
    free(counts);
    free(first);
    free(second);
    const void *all[] = {a.logits, a.early,    a.draws, a.mask,      a.bias,
                         a.counts, a.adjusted, a.out,   a.last_token};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        CHECK(cudaFree((void *)(uintptr_t)all[i]));
    }
    sample_cases_free(&c);
    return wrong;
}

int main(int argc, char **argv)
{
    static const uint32_t vocabs[] = {1, 31, 1024, 5003, 32000, 128256};
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    uint32_t n = 0, wrong = 0, near = 0;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    for (uint32_t v = 0; v < sizeof(vocabs) / sizeof(vocabs[0]); v++) {
        for (int round = 0; round < (vocabs[v] > 100000 ? 4 : 12); round++) {
            wrong += check(seed + n, vocabs[v], 64, round % 4 == 3, &near);
            n += 64;
        }
        printf("vocabulary %u: %u rows so far, %u ties, %u wrong\n", vocabs[v], n, near, wrong);
    }
    bool ok = wrong == 0 && near <= 2 + n / 1000;
    printf("%s sampler: %u rows, seed %llu\n", ok ? "ok  " : "FAIL", n, (unsigned long long)seed);
    return !ok;
}
