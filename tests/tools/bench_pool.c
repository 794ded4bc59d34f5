/* What the pool's bookkeeping costs on one core: a lease and its release through the cache (index,
 * pool, eviction policy), in process; how many bytes of memory index and policy take for a block;
 * what a lookup, an admission and an eviction cost when 10 million blocks are cached. In CPU time.
 * Prints bench lines. Arguments: blocks (default 10000000). */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/policy/evict/ssd_dir.h"
#include "kvstore/cache/cache.h"
#include "tests/unit/kv_cache.h"

#define CHAIN  64u
#define SLOTS  4096u
#define PAIRS  4000000u
#define PAIR   100000.0 /* the target, pairs a second */
#define TARGET 100.0    /* bytes a block */

static struct bt_kv_key key_of(uint64_t i)
{
    struct bt_kv_key k;
    for (size_t b = 0; b < sizeof(k.b); b += 8) {
        i = (i ^ i >> 31) * 0x9e3779b97f4a7c15ull + b + 1;
        memcpy(k.b + b, &i, 8);
    }
    return k;
}

static double resident_bytes(void)
{
    long pages = 0, all;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f == NULL || fscanf(f, "%ld %ld", &all, &pages) != 2) {
        fprintf(stderr, "bench_pool: cannot read /proc/self/statm\n");
        exit(1);
    }
    fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

/* Of this thread on its core: other work on the machine does not count. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    BT_ASSERT(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static double seconds_since(uint64_t start_ns)
{
    return (double)(cpu_ns() - start_ns) / 1e9;
}

/* ---- lease and release ---- */

static void bench_leases(const struct bt_evict_policy *policy)
{
    struct bt_kv_layout layout;
    struct bt_kv_key root = key_of(0), keys[CHAIN];
    struct bt_slab *slab;
    uint32_t slots[CHAIN];
    char err[256] = "", path[96];
    snprintf(path, sizeof(path), "/dev/shm/baton-bench-pool-%d", (int)getpid());
    struct bt_slab_spec spec = {.path = path,
                                .bytes = SLOTS * 4400ull + (1 << 20),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = 1};
    if (bt_kv_layout_gqa(16, 2, 1, 32, BT_DT_BF16, 0, &layout) != BT_OK ||
        bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "bench_pool: %s\n", err);
        exit(1);
    }
    (void)unlink(path);
    struct bt_cache *c = bt_cache_create(slab, &layout, 8, policy);
    uint32_t chains = slab->super->n_slots / CHAIN;
    for (uint32_t ch = 0; ch < chains; ch++) {
        BT_ASSERT(cache_take(c, CHAIN, slots) == BT_OK);
        for (uint32_t i = 0; i < CHAIN; i++) {
            struct bt_kv_key k = key_of(ch * CHAIN + i + 1), before = key_of(ch * CHAIN + i);
            struct bt_cache_block b = {
                .key = &k, .parent = i > 0 ? &before : NULL, .n_tokens = 16, .depth = i};
            for (uint32_t l = 0; l < layout.n_layers; l++) {
                (void)bt_pool_segment_crc(c->pool, slots[i], l, &k);
            }
            BT_ASSERT(bt_cache_seal(c, slots[i], &b));
        }
        bt_cache_put(c, slots, CHAIN);
    }
    uint64_t start = cpu_ns();
    for (uint32_t n = 0; n < PAIRS; n += CHAIN) {
        uint32_t ch = n / CHAIN * 7u % chains;
        for (uint32_t i = 0; i < CHAIN; i++) {
            keys[i] = *bt_pool_key(c->pool, ch * CHAIN + i);
        }
        uint32_t got = bt_cache_prefix(c, keys, CHAIN, slots);
        BT_ASSERT(got == CHAIN);
        bt_cache_put(c, slots, got);
    }
    double rate = PAIRS / seconds_since(start);
    printf("bench,pool_lease_release_%s,%.0f,pairs/s,target %.0f,%.2f\n", policy->name, rate, PAIR,
           rate / PAIR);
    bt_cache_destroy(c);
    bt_slab_unmap(slab);
}

/* ---- memory, and what an event costs, with many blocks ---- */

static void bench_memory(const struct bt_evict_policy *policy, uint32_t n)
{
    double before = resident_bytes();
    struct bt_index *ix = bt_index_create(n);
    struct bt_evict *e = policy->create(n);
    uint64_t start = cpu_ns();
    for (uint32_t i = 0; i < n; i++) {
        struct bt_kv_key k = key_of(i);
        struct bt_evict_block b = {.hash = bt_index_hash(&k),
                                   .depth = i % CHAIN,
                                   .start_tokens = i % CHAIN * 64,
                                   .parent = i % CHAIN != 0 ? i - 1 : BT_EVICT_NONE};
        BT_ASSERT(bt_index_add(ix, &k, i % CHAIN, i));
        policy->admit(e, i, &b);
        policy->unpin(e, i);
    }
    double fill = seconds_since(start), bytes = (resident_bytes() - before) / n;
    start = cpu_ns();
    uint32_t turns = BT_MIN(n / CHAIN * CHAIN, 2000000u);
    for (uint32_t i = 0; i < turns; i++) { /* one goes, another comes */
        uint32_t slot = policy->victim(e, NULL);
        struct bt_kv_key k = key_of((uint64_t)n + i);
        struct bt_evict_block b = {.hash = bt_index_hash(&k), .parent = BT_EVICT_NONE};
        policy->drop(e, slot);
        bt_index_remove(ix, slot);
        BT_ASSERT(bt_index_add(ix, &k, 0, slot));
        policy->admit(e, slot, &b);
        policy->unpin(e, slot);
    }
    double turn = seconds_since(start);
    bytes = BT_MAX(bytes, (resident_bytes() - before) / n); /* what is remembered of the evicted */
    printf("bench,pool_memory_%s_%u,%.1f,bytes/block,target %.0f,%.2f\n", policy->name, n, bytes,
           TARGET, bytes / TARGET);
    printf("bench,pool_admit_%s_%u,%.0f,ns,-,-\n", policy->name, n, 1e9 * fill / n);
    printf("bench,pool_turnover_%s_%u,%.0f,ns,-,-\n", policy->name, n, 1e9 * turn / turns);
    policy->destroy(e);
    bt_index_destroy(ix);
    (void)malloc_trim(0);
}

static void bench_ssd_memory(const struct bt_evict_policy *policy, uint32_t n)
{
    double before = resident_bytes();
    struct bt_ssd_dir *d = bt_ssd_dir_create(n, policy, NULL);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = bt_ssd_dir_take(d, 0);
        struct bt_ssd_entry e = {.key = key_of(i), .depth = i % CHAIN};
        bt_ssd_dir_add(d, slot, &e);
    }
    double bytes = (resident_bytes() - before) / n;
    printf("bench,ssd_directory_memory_%s_%u,%.1f,bytes/block,target %.0f,%.2f\n", policy->name, n,
           bytes, TARGET, bytes / TARGET);
    bt_ssd_dir_destroy(d);
    (void)malloc_trim(0);
}

int main(int argc, char **argv)
{
    char *end = NULL;
    unsigned long n = argc > 1 ? strtoul(argv[1], &end, 10) : 10000000;
    if (argc > 2 || (end != NULL && *end != '\0') || n < 1000 || n > 100000000) {
        fprintf(stderr, "usage: bench_pool [blocks, 1000 to 100000000]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    static const struct bt_evict_policy *const all[] = {&bt_evict_density, &bt_evict_slru,
                                                        &bt_evict_lru, &bt_evict_lfu};
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        bench_leases(all[i]);
        bench_memory(all[i], (uint32_t)n);
        bench_ssd_memory(all[i], (uint32_t)n);
    }
    return 0;
}
