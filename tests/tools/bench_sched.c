/* What a decision of the scheduler costs on one core: the view takes its snapshot and asks the
 * index, every policy places and admission is asked, on clusters of 16 and of 1,000 nodes; the
 * latter with ten million extents in the index. Each decision is timed for itself. And: updates of
 * the index, its memory, the hashing of a prompt's keys. Prints bench lines as it gets them.
 * Arguments: decisions (default 20000), extents of the large index (default 10000000), seconds that
 * all of it takes at most (default 25; 0: as long as it takes). When they run short the index is
 * smaller and fewer decisions are timed; the lines say how many. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/policy/sched/sched.h"
#include "conductor/view/view_priv.h"
#include "tests/tools/heap.h"

#define BLOCK_TOKENS 64
#define CHAINS       64 /* prompts that come again */

static struct bt_batch_cost prefill_cost = {.token_ns = BT_BATCH_TOKEN_NS(1e5), .attn_ns = 2};
static struct bt_batch_cost decode_cost = {.base_ns = 2e7, .kv_ns = 27};

struct world {
    uint32_t n, blocks, extent;
    struct bt_loop *loop;
    struct bt_metrics *metrics;
    struct bt_view *view;
    struct bt_session **worker, **kvstore;
    struct bt_kv_key *keys; /* [CHAINS][blocks] */
    struct bt_sched_forecast forecast;
    size_t index_bytes; /* of the view, nearly all of it its index */
};

/* Time that this thread has computed: what a neighbour on the machine takes is not ours. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static uint64_t end_ns; /* of the time that it may take; UINT64_MAX: any */

/* So much of the time that is left now. */
static uint64_t share_of_rest(double share)
{
    uint64_t now = bt_mono_ns();
    return end_ns == UINT64_MAX || end_ns <= now ? end_ns
                                                 : now + (uint64_t)(share * (double)(end_ns - now));
}

static uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

static struct bt_kv_key random_key(uint64_t *s)
{
    struct bt_kv_key k;
    for (size_t b = 0; b < sizeof(k.b); b += 4) {
        uint32_t word = (uint32_t)rng(s);
        memcpy(k.b + b, &word, 4);
    }
    return k;
}

/* A member whose session counts as up; it is never dialled, as the loop does not turn. */
static struct bt_session *join(struct world *x, const char *kind, uint32_t i)
{
    Baton__Member m = BATON__MEMBER__INIT;
    char name[32], node[32];
    snprintf(name, sizeof(name), "%s-%u", kind, i);
    snprintf(node, sizeof(node), "node-%u", i);
    m.kind = (char *)(uintptr_t)kind;
    m.name = name;
    m.node = node;
    m.state = BATON__MEMBER_STATE__READY;
    m.incarnation = i + 1;
    bt_view_member_up(x->view, &m);
    struct bt_session *s =
        BT_CONTAINER_OF(bt_view_sessions(x->view)->prev, struct bt_session, link);
    s->rpc.core.state = BT_RPC_SESSION_UP;
    return s;
}

static void world_init(struct world *x, uint32_t n, uint32_t prompt, uint32_t extent,
                       size_t index_max, uint64_t *s)
{
    memset(x, 0, sizeof(*x));
    x->n = n;
    x->extent = extent;
    x->blocks = prompt / BLOCK_TOKENS;
    x->worker = bt_calloc(n, sizeof(struct bt_session *));
    x->kvstore = bt_calloc(n, sizeof(struct bt_session *));
    x->keys = bt_calloc((size_t)CHAINS * x->blocks, sizeof(*x->keys));
    x->metrics = bt_metrics_create();
    if (bt_loop_create(&x->loop) != BT_OK) {
        exit(1);
    }
    struct bt_view_config vc = {.cluster = "bench",
                                .name = "c",
                                .node = "n",
                                .index_keys_max = index_max,
                                .extent_blocks = extent};
    size_t heap = heap_bytes();
    x->view = bt_view_create(x->loop, NULL, &vc, x->metrics);
    x->index_bytes = heap_bytes() - heap;
    for (size_t i = 0; i < (size_t)CHAINS * x->blocks; i++) {
        x->keys[i] = random_key(s);
    }
    for (uint32_t i = 0; i < n; i++) {
        bool prefill = i < n / 2;
        x->kvstore[i] = join(x, "kvstore", i);
        struct bt_session *w = x->worker[i] = join(x, prefill ? "prefill" : "decode", i);
        w->has_load = true;
        w->said.slots_total = 256;
        w->said.pages_total = prefill ? 0 : 20000;
        w->said.chunk_tokens = 8192;
        w->said.has_cost = true;
        w->said.cost = prefill ? prefill_cost : decode_cost;
        for (uint32_t c = 0; prefill && c < CHAINS; c++) {
            uint32_t have = rng(s) % 3 == 0 ? (uint32_t)rng(s) % x->blocks : 0;
            for (uint32_t b = extent - 1; b < have; b += extent) {
                (void)bt_holders_add(x->view->index, &x->keys[(size_t)c * x->blocks + b], b,
                                     x->kvstore[i]->kv_id);
            }
        }
    }
    bt_sched_forecast_init(&x->forecast, 250, 10000, 0);
}

/* Extents of other prompts, one in three with a second holder; then removals and additions in turn.
 */
static void fill_index(struct world *x, size_t extents, uint64_t *s)
{
    struct bt_holders *h = x->view->index;
    uint64_t seed = *s, replicas = bt_holders_replicas(h), start = cpu_ns();
    uint32_t prefills = x->n / 2;
    size_t heap = heap_bytes();
    uint64_t until = share_of_rest(0.5);
    for (uint32_t i = 0; bt_holders_keys(h) < extents && (i % 4096 != 0 || bt_mono_ns() < until);
         i++) {
        struct bt_kv_key k = random_key(s);
        uint32_t at = (uint32_t)rng(s) % prefills;
        (void)bt_holders_add(h, &k, 7, x->kvstore[at]->kv_id);
        if (rng(s) % 3 == 0) {
            (void)bt_holders_add(h, &k, 7, x->kvstore[(at + 1) % prefills]->kv_id);
        }
    }
    double secs = (double)(cpu_ns() - start) / 1e9;
    double adds = (double)(bt_holders_replicas(h) - replicas) / secs;
    uint64_t n = BT_MIN(bt_holders_keys(h) / 4, (size_t)1000000);
    start = cpu_ns();
    for (uint64_t i = 0; i < n; i++) { /* what was added first goes, something new comes */
        struct bt_kv_key old = random_key(&seed), fresh = random_key(s);
        uint32_t at = (uint32_t)rng(&seed) % prefills;
        bt_holders_remove(h, &old, x->kvstore[at]->kv_id);
        if (rng(&seed) % 3 == 0) {
            bt_holders_remove(h, &old, x->kvstore[(at + 1) % prefills]->kv_id);
        }
        (void)bt_holders_add(h, &fresh, 7, x->kvstore[at]->kv_id);
    }
    double turns = 2.0 * (double)n / ((double)(cpu_ns() - start) / 1e9);
    double bytes = (double)(x->index_bytes + heap_bytes() - heap);
    printf(
        "index: %zu extents, %llu replicas, %.1f bytes an extent; %.2f million additions a second, "
        "%.2f million removals and additions in turn\n",
        bt_holders_keys(h), (unsigned long long)bt_holders_replicas(h),
        bytes / (double)bt_holders_keys(h), adds / 1e6, turns / 1e6);
    printf("bench,index_add,%.0f,extents/s,aim 1000000,%.2f\n", adds, adds / 1e6);
    printf("bench,index_turnover,%.0f,extents/s,aim 1000000,%.2f\n", turns, turns / 1e6);
    printf("bench,index_extent_bytes,%.1f,bytes,-,-\n", bytes / (double)bt_holders_keys(h));
    printf("bench,index_replica_bytes,%.1f,bytes,-,-\n", bytes / (double)bt_holders_replicas(h));
    uint64_t worst = 0;
    for (uint32_t i = 0; i < 3; i++) {
        start = cpu_ns();
        bt_holders_forget(h, x->kvstore[prefills - 1 - i]->kv_id);
        worst = BT_MAX(worst, cpu_ns() - start);
    }
    printf("bench,index_forget_kvstore,%.2f,ms,-,-\n", (double)worst / 1e6);
}

static void shake(struct world *x, uint64_t *s)
{
    uint64_t now = bt_mono_ns();
    for (uint32_t i = 0; i < x->n; i++) {
        struct bt_session *w = x->worker[i];
        w->said.at_ns = now;
        w->said.queue_ms = (double)(rng(s) % 4000);
        w->said.running = (uint32_t)rng(s) % 30;
        w->said.kv_tokens = 12000ull * w->said.running;
        w->said.pages_free = (uint32_t)rng(s) % 20000;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct world *x, const char *name, uint32_t prompt, uint32_t decisions,
                    double target_us, uint64_t until_ns, uint64_t *s)
{
    const struct bt_sched_policy *policy = bt_sched_policy_find(name);
    struct bt_sched_params c = {.prior.prefill_tokens_per_s = 1,
                                .prior.step_ms = 1,
                                .prior.link_bytes_per_s = 87e9,
                                .prior.load_bytes_per_s = 160e9,
                                .prior.chunk_tokens = 8192,
                                .place.fetch_ratio = 1.5,
                                .place.work_weight = 0.5,
                                .objective.ttft_ms = 30000,
                                .objective.tbt_ms = 100};
    double *us = bt_calloc(decisions, sizeof(*us)), view_us = 0;
    uint32_t planned = 0, n = 0;
    for (; n < decisions && (n < 100 || n % 64 != 0 || bt_mono_ns() < until_ns); n++) {
        struct bt_sched_request req = {.n_tokens = prompt,
                                       .max_new = 512,
                                       .n_choices = 1,
                                       .block_tokens = BLOCK_TOKENS,
                                       .token_bytes = 327680,
                                       .random = rng(s),
                                       .sequence = n};
        struct bt_sched_plan plan;
        struct bt_sched_reject rej;
        struct bt_view_snapshot v;
        if (n % 16 == 0) { /* heartbeats come every 500 ms, requests more often */
            shake(x, s);
        }
        const struct bt_kv_key *keys = x->keys + rng(s) % CHAINS * x->blocks;
        uint64_t start = cpu_ns();
        bt_view_snapshot(x->view, keys, x->blocks, &v);
        uint64_t seen = cpu_ns();
        v.snap.forecast = &x->forecast;
        planned += bt_sched_decide(policy, &bt_sched_admit_predict, &c, &v.snap, &req, &plan,
                                   &rej) == BT_SCHED_PLANNED;
        us[n] = (double)(cpu_ns() - start) / 1e3;
        view_us += (double)(seen - start) / 1e3;
    }
    qsort(us, n, sizeof(*us), by_value);
    double p50 = us[n / 2], p99 = us[n / 100 * 99];
    printf(
        "%-12s %4u nodes, %6u tokens: p50 %.2f us, p99 %.2f us (snapshot with the index %.2f us in "
        "the mean), %u of %u planned\n",
        name, x->n, prompt, p50, p99, view_us / n, planned, n);
    printf("bench,sched_%s_%u_nodes_p50,%.2f,us,aim %g us,%.2f\n", name, x->n, p50, target_us,
           p50 / target_us);
    printf("bench,sched_%s_%u_nodes_p99,%.2f,us,%s,%.2f\n", name, x->n, p99,
           x->n == 1000 ? "aim 1000 us" : "p50", x->n == 1000 ? p99 / 1000 : p99 / p50);
    free(us);
}

static void measure_hash(uint32_t prompt)
{
    uint32_t *tokens = bt_calloc(prompt, sizeof(*tokens));
    struct bt_kv_key root = {{0}}, *keys = bt_calloc(prompt / BLOCK_TOKENS, sizeof(*keys));
    uint64_t start = cpu_ns();
    int rounds = 20;
    for (int i = 0; i < rounds; i++) {
        tokens[0] = (uint32_t)i;
        (void)bt_kv_keys(&root, tokens, prompt, BLOCK_TOKENS, keys);
    }
    double us = (double)(cpu_ns() - start) / 1e3 / rounds;
    printf("bench,hash_keys_%u_tokens,%.1f,us,-,-\n", prompt, us);
    free(tokens);
    free(keys);
}

static void world_cleanup(struct world *x)
{
    for (uint32_t i = 0; i < x->n; i++) {
        x->worker[i]->rpc.core.state = x->kvstore[i]->rpc.core.state = BT_RPC_SESSION_IDLE;
        x->worker[i]->said.has_cost = false;
    }
    bt_view_destroy(x->view);
    bt_loop_destroy(x->loop);
    bt_metrics_destroy(x->metrics);
    free(x->worker);
    free(x->kvstore);
    free(x->keys);
}

int main(int argc, char **argv)
{
    uint32_t decisions = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20000;
    size_t extents = argc > 2 ? strtoull(argv[2], NULL, 10) : 10000000;
    double seconds = argc > 3 ? strtod(argv[3], NULL) : 25;
    if (decisions < 100 || extents < 1000 || !(seconds >= 0)) {
        fprintf(stderr,
                "bench_sched: decisions are at least 100, extents at least 1000, seconds at "
                "least 0\n");
        return 2;
    }
    end_ns = seconds > 0 ? bt_mono_ns() + (uint64_t)(1e9 * seconds) : UINT64_MAX;
    setvbuf(stdout, NULL, _IOLBF, 0); /* what is measured is seen, even if somebody stops it */
    static const char *const names[] = {"cache-aware", "kvcache", "baton"};
    static const struct {
        uint32_t nodes, prompt, extent;
        double target_us;
    } sizes[] = {{16, 12000, 1, 10}, {1000, 128000, 8, 100}};
    uint64_t s = 1;
    for (size_t z = 0; z < BT_ARRAY_LEN(sizes); z++) {
        static struct world x;
        bool large = sizes[z].nodes == 1000;
        world_init(&x, sizes[z].nodes, sizes[z].prompt, sizes[z].extent,
                   large ? extents + extents / 10 + 100000 : 1 << 20, &s);
        if (large) {
            fill_index(&x, extents, &s);
        }
        for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
            uint64_t until = share_of_rest(large ? 0.9 / (double)(BT_ARRAY_LEN(names) - i) : 0.1);
            measure(&x, names[i], sizes[z].prompt, decisions, sizes[z].target_us, until, &s);
        }
        measure_hash(sizes[z].prompt);
        world_cleanup(&x);
    }
    return 0;
}
