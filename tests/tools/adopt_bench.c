/* How fast a kvstore that starts takes over what its predecessor left: adopt_bench SLOTS. A child
 * seals that many blocks of 4 KiB in a slab and is killed; the slab is adopted, headers first, then
 * every block's bytes. Prints "headers N SECONDS" and "bytes N SECONDS". */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/log/log.h"
#include "kvstore/cache/adopt.h"
#include "tests/unit/kv_cache.h"

static struct bt_kv_layout layout;
static struct bt_kv_key root;
static char path[64], err[512];
static uint64_t bytes;

static void key_of(uint32_t i, struct bt_kv_key *k)
{
    memset(k, 5, sizeof(*k));
    memcpy(k->b, &i, sizeof(i));
}

static void fill_and_die(void)
{
    struct bt_slab *slab;
    struct bt_slab_spec spec = {
        .path = path, .bytes = bytes, .layout = &layout, .root = &root, .incarnation = 1};
    if (bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        _exit(1);
    }
    struct bt_cache *c = bt_cache_create(slab, &layout, 1, &bt_evict_slru);
    for (uint32_t i = 0; i < slab->super->n_slots; i++) {
        struct bt_kv_key k;
        uint32_t slot;
        BT_ASSERT(cache_take(c, 1, &slot) == BT_OK);
        key_of(i, &k);
        memcpy(bt_slab_data(slab, slot), &k, sizeof(k));
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            bt_pool_segment_crc(c->pool, slot, l, &k);
        }
        cache_seal(c, slot, &k, 16, i % 64);
        bt_cache_put(c, &slot, 1);
    }
    kill(getpid(), SIGKILL);
}

static double since(uint64_t ns)
{
    return 1e-9 * (double)(bt_mono_ns() - ns);
}

int main(int argc, char **argv)
{
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_sealer *sealer;
    struct bt_adopt_stats s;
    uint64_t slots = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
    bt_log_init("adopt-bench", "-", BT_LOG_WARN, false);
    /* 16 tokens, K and V of one head of 32 in bf16, two layers: 4 KiB */
    BT_ASSERT(bt_kv_layout_gqa(16, 2, 1, 32, BT_DT_BF16, 0, &layout) == BT_OK);
    bytes = (slots + 1) * (BT_ALIGN_UP(layout.block_bytes, 4096ull) + 128 + 8) + (1 << 20);
    snprintf(path, sizeof(path), "/dev/shm/baton-adopt-bench-%d", (int)getpid());
    pid_t pid = fork();
    if (pid == 0) {
        fill_and_die();
    }
    int st;
    waitpid(pid, &st, 0);
    if (!WIFSIGNALED(st)) {
        unlink(path);
        return 1;
    }
    uint64_t t = bt_mono_ns();
    struct bt_slab_spec spec = {
        .path = path, .bytes = bytes, .layout = &layout, .root = &root, .incarnation = 2};
    bt_status_t rc = bt_slab_adopt(&spec, 0, &slab, err, sizeof(err));
    unlink(path);
    if (rc != BT_OK || bt_loop_create(&loop) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    struct bt_cache *c = bt_cache_create(slab, &layout, 1, &bt_evict_slru);
    BT_ASSERT(bt_sealer_create(loop, c->pool, layout.n_layers, &sealer) == BT_OK);
    struct bt_adopt *a = bt_adopt_start(loop, c, sealer);
    double headers_s = since(t);
    do {
        bt_loop_poll(loop, 10);
        bt_adopt_stats(a, &s);
    } while (s.pending > 0);
    printf("headers %u %.3f\nbytes %u %.3f\n", s.headers, headers_s, s.blocks, since(t));
    bt_sealer_destroy(sealer);
    bt_adopt_destroy(a);
    bt_cache_destroy(c);
    bt_slab_unmap(slab);
    bt_loop_destroy(loop);
    return s.headers >= slots && s.blocks == s.headers && s.bad == 0 ? 0 : 1;
}
