/* Speed of the SSD tier: ssd_bench FOLDER block_kib=1024 blocks=1024 depth=16 slots=32 write=1.
 * Writes so many blocks until all of them are durable and can be found (write=0: a run before has
 * done it), then reads them all with their CRCs checked. Prints "write GBPS CPU_S_PER_GB",
 * "read ..." and "crc ..." (of the blocks in memory, on one thread: it is part of both); the slab
 * has so many blocks of shared memory as `slots` says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log/log.h"
#include "kvstore/ssd/ssd.h"
#include "tests/tools/bench_arg.h"

#define SLOTS_MAX 64u

static struct bt_slab *slab;
static struct bt_kv_layout layout;
static uint32_t busy[SLOTS_MAX], n_slots, n_free, n_failed;

static uint32_t segment_crc(void *arg, uint32_t slot, uint32_t layer, const struct bt_kv_key *key)
{
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&layout, layer, &bytes);
    (void)arg;
    uint32_t crc = bt_slab_segment_crc(key, layer, layout.layout_id,
                                       (uint8_t *)bt_slab_data(slab, slot) + off, bytes);
    slab->crcs[slot * layout.n_layers + layer] = crc;
    return crc;
}

static void done(void *arg, bt_status_t st)
{
    busy[n_free++] = (uint32_t)(uintptr_t)arg;
    n_failed += st != BT_OK;
}

static void key_of(uint64_t i, struct bt_kv_key *k)
{
    memset(k, 3, sizeof(*k));
    memcpy(k->b, &i, sizeof(i));
}

static void run(struct bt_loop *loop, struct bt_ssd *ssd, bool write, uint64_t blocks)
{
    struct bt_ssd_stats s;
    uint64_t t = bt_mono_ns(), i = 0;
    double cpu = cpu_s();
    do {
        while (i < blocks && n_free > 0) {
            uint32_t slot = busy[n_free - 1], depth;
            struct bt_kv_key k;
            key_of(i, &k);
            for (uint32_t l = 0; write && l < layout.n_layers; l++) { /* as the seal thread would */
                segment_crc(NULL, slot, l, &k);
            }
            void *arg = (void *)(uintptr_t)slot;
            if ((write ? bt_ssd_write(ssd, slot, &k, 0, 0, done, arg)
                       : bt_ssd_read(ssd, &k, slot, &depth, done, arg)) != BT_OK) {
                break;
            }
            n_free--;
            i++;
        }
        bt_loop_poll(loop, 10);
        bt_ssd_stats(ssd, &s);
    } while (i < blocks || n_free < n_slots || (write && s.blocks < blocks));
    double seconds = 1e-9 * (double)(bt_mono_ns() - t);
    double gb = 1e-9 * (double)blocks * (double)layout.block_bytes;
    printf("%s %.3f %.4f\n", write ? "write" : "read", gb / seconds, (cpu_s() - cpu) / gb);
}

static void run_crc(void)
{
    uint64_t t = bt_mono_ns(), bytes = 0;
    double cpu = cpu_s();
    for (uint32_t i = 0; bytes < 1u << 30; i++) {
        struct bt_kv_key k;
        key_of(i, &k);
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            segment_crc(NULL, i % n_slots, l, &k);
        }
        bytes += layout.block_bytes;
    }
    double gb = 1e-9 * (double)bytes;
    printf("crc %.3f %.4f\n", gb / (1e-9 * (double)(bt_mono_ns() - t)), (cpu_s() - cpu) / gb);
}

int main(int argc, char **argv)
{
    struct bt_loop *loop;
    struct bt_ssd *ssd;
    struct bt_kv_key root = {{1}};
    char err[512], path[64];
    if (argc < 2) {
        fprintf(stderr, "usage: ssd_bench FOLDER [block_kib=N] [blocks=N] [depth=N]\n");
        return 2;
    }
    bt_log_init("ssd-bench", "-", BT_LOG_WARN, false);
    uint64_t kib = opt(argc, argv, "block_kib", 1024), blocks = opt(argc, argv, "blocks", 1024);
    snprintf(path, sizeof(path), "/dev/shm/baton-ssd-bench-%d", (int)getpid());
    /* 64 tokens, K and V of 128 dimensions in bf16: 32 KiB a head and layer */
    BT_ASSERT(bt_kv_layout_gqa(64, (uint32_t)BT_MAX(kib / 32, 1u), 1, 128, BT_DT_BF16, 0,
                               &layout) == BT_OK);
    struct bt_slab_spec spec = {.path = path,
                                .bytes = (SLOTS_MAX + 1) * (layout.block_bytes + 8192) + (1 << 20),
                                .layout = &layout,
                                .root = &root,
                                .incarnation = 1};
    if (bt_loop_create(&loop) != BT_OK ||
        bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    unlink(path);
    n_slots = (uint32_t)BT_MIN(BT_MAX(opt(argc, argv, "slots", 32), 1u), SLOTS_MAX);
    for (uint32_t i = 0; i < n_slots; i++) {
        bt_random(bt_slab_data(slab, i), layout.block_bytes);
        busy[n_free++] = i;
    }
    struct bt_ssd_config c = {.loop = loop,
                              .path = argv[1],
                              .bytes = (blocks + 256) * layout.block_bytes + (1u << 20),
                              .queue_depth = (uint32_t)opt(argc, argv, "depth", 16),
                              .backlog_max = SLOTS_MAX,
                              .probe_ms = 1000,
                              .stall_ms = 60000,
                              .slab = slab,
                              .segment_crc = segment_crc};
    if (bt_ssd_open(&c, &ssd, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    struct bt_ssd_stats opened;
    bt_ssd_stats(ssd, &opened);
    printf("engine %s\n", opened.io);
    if (opt(argc, argv, "write", 1) != 0) { /* else a run before has written them */
        run(loop, ssd, true, blocks);
    }
    run(loop, ssd, false, blocks);
    run_crc();
    struct bt_ssd_stats s;
    bt_ssd_stats(ssd, &s);
    printf("failed %u crc_errors %llu\n", n_failed, (unsigned long long)s.crc_errors);
    bt_ssd_close(ssd);
    bt_slab_unmap(slab);
    bt_loop_destroy(loop);
    return 0;
}
