/* What a decision of the scheduler costs on one core: the index is asked, every policy places and
 * admission is asked, on snapshots of 16 and of 1,000 nodes. Times each decision for itself and
 * prints bench lines. Arguments: decisions (default 20000). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/sched/sched.h"
#include "conductor/view/holders.h"

#define BLOCK_TOKENS 64
#define CHAINS       64 /* prompts that come again */

static const struct bt_batch_cost prefill_cost = {.token_ns = BT_BATCH_TOKEN_NS(1e5), .attn_ns = 2};
static const struct bt_batch_cost decode_cost = {.base_ns = 2e7, .kv_ns = 27};

struct world {
    uint32_t n, blocks;
    struct bt_sched_worker *w;
    struct bt_sched_kvstore *k;
    struct bt_holders *index; /* NULL: more nodes than it takes; matches are drawn */
    struct bt_kv_key *keys;   /* [CHAINS][blocks] */
    struct bt_sched_forecast forecast;
};

static uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

static void world_init(struct world *x, uint32_t n, uint32_t prompt, uint64_t *s)
{
    memset(x, 0, sizeof(*x));
    x->n = n;
    x->blocks = prompt / BLOCK_TOKENS;
    x->w = bt_calloc(n, sizeof(*x->w));
    x->k = bt_calloc(n, sizeof(*x->k));
    x->keys = bt_calloc((size_t)CHAINS * x->blocks, sizeof(*x->keys));
    x->index = n <= BT_HOLDERS_KVSTORES_MAX ? bt_holders_create(1 << 20) : NULL;
    for (size_t i = 0; i < (size_t)CHAINS * x->blocks; i++) {
        for (size_t b = 0; b + 8 <= sizeof(x->keys[i].b); b += 4) {
            uint32_t word = (uint32_t)rng(s);
            memcpy(x->keys[i].b + b, &word, 4);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        bool prefill = i < n / 2;
        x->w[i] = (struct bt_sched_worker){.node = i,
                                           .kvstore = i,
                                           .prefill = prefill,
                                           .decode = !prefill,
                                           .slots_total = 256,
                                           .pages_total = prefill ? 0 : 20000,
                                           .cost = prefill ? &prefill_cost : &decode_cost};
        for (uint32_t c = 0; prefill && x->index != NULL && c < CHAINS; c++) {
            uint32_t have = rng(s) % 3 == 0 ? (uint32_t)rng(s) % x->blocks : 0;
            for (uint32_t b = 0; b < have; b++) {
                (void)bt_holders_add(x->index, &x->keys[(size_t)c * x->blocks + b], b, i);
            }
        }
    }
    bt_sched_forecast_init(&x->forecast, 250, 10000, 0);
}

static void shake(struct world *x, uint64_t *s)
{
    for (uint32_t i = 0; i < x->n; i++) {
        x->w[i].queue_ms = (double)(rng(s) % 4000);
        x->w[i].running = (uint32_t)rng(s) % 30;
        x->w[i].kv_tokens = 12000ull * x->w[i].running;
        x->w[i].pages_free = (uint32_t)rng(s) % 20000;
        x->k[i].send_busy_ms = (double)(rng(s) % 50);
        x->k[i].match_blocks = rng(s) % 8 == 0 ? (uint32_t)rng(s) % x->blocks : 0;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct world *x, const char *name, uint32_t prompt, uint32_t decisions,
                    double target_us, uint64_t *s)
{
    const struct bt_sched_policy *policy = bt_sched_policy_find(name);
    struct bt_sched_params c = {.prefill_tokens_per_s = 1,
                                .step_ms = 1,
                                .link_bytes_per_s = 87e9,
                                .load_bytes_per_s = 160e9,
                                .chunk_tokens = 8192,
                                .fetch_ratio = 1.5,
                                .work_weight = 0.5,
                                .ttft_objective_ms = 30000,
                                .tbt_objective_ms = 100};
    struct bt_sched_snapshot snap = {.workers = x->w,
                                     .n_workers = x->n,
                                     .kvstores = x->k,
                                     .n_kvstores = x->n,
                                     .forecast = &x->forecast};
    double *us = bt_calloc(decisions, sizeof(*us));
    uint32_t match[BT_HOLDERS_KVSTORES_MAX], planned = 0;
    for (uint32_t i = 0; i < decisions; i++) {
        struct bt_sched_request req = {.n_tokens = prompt,
                                       .max_new = 512,
                                       .n_choices = 1,
                                       .block_tokens = BLOCK_TOKENS,
                                       .token_bytes = 327680,
                                       .random = rng(s),
                                       .sequence = i};
        struct bt_sched_plan plan;
        struct bt_sched_reject rej;
        shake(x, s);
        const struct bt_kv_key *keys = x->keys + rng(s) % CHAINS * x->blocks;
        uint64_t start = bt_mono_ns();
        if (x->index != NULL) {
            bt_holders_match(x->index, keys, x->blocks, match, x->n);
            for (uint32_t k = 0; k < x->n; k++) {
                x->k[k].match_blocks = match[k];
            }
        }
        planned += bt_sched_decide(policy, &bt_sched_admit_predict, &c, &snap, &req, &plan, &rej) ==
                   BT_SCHED_PLANNED;
        us[i] = (double)(bt_mono_ns() - start) / 1e3;
    }
    qsort(us, decisions, sizeof(*us), by_value);
    double p50 = us[decisions / 2], p99 = us[decisions / 100 * 99];
    printf("%-12s %4u nodes, %6u tokens%s: p50 %.2f us, p99 %.2f us, %u of %u planned\n", name,
           x->n, prompt, x->index != NULL ? " with the index" : "", p50, p99, planned, decisions);
    printf("bench,sched_%s_%u_nodes_p50,%.2f,us,aim %g us,%.2f\n", name, x->n, p50, target_us,
           p50 / target_us);
    free(us);
}

static void world_cleanup(struct world *x)
{
    free(x->w);
    free(x->k);
    free(x->keys);
    if (x->index != NULL) {
        bt_holders_destroy(x->index);
    }
}

int main(int argc, char **argv)
{
    uint32_t decisions = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20000;
    if (decisions < 100) {
        fprintf(stderr, "bench_sched: the number of decisions is at least 100\n");
        return 2;
    }
    static const char *const names[] = {"cache-aware", "kvcache", "baton"};
    static const struct {
        uint32_t nodes, prompt;
        double target_us;
    } sizes[] = {{16, 12000, 10}, {1000, 128000, 100}};
    uint64_t s = 1;
    for (size_t z = 0; z < BT_ARRAY_LEN(sizes); z++) {
        static struct world x;
        world_init(&x, sizes[z].nodes, sizes[z].prompt, &s);
        for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
            measure(&x, names[i], sizes[z].prompt, decisions, sizes[z].target_us, &s);
        }
        world_cleanup(&x);
    }
    return 0;
}
