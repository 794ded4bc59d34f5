/* An SSD tier on a real folder with real RocksDB, a slab beside it, and a disk that obeys a test.
 */
#ifndef TESTS_UNIT_SSD_FIXTURE_H
#define TESTS_UNIT_SSD_FIXTURE_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/philox.h"
#include "kvstore/ssd/ssd.h"

#define SSD_SLOTS 16u /* of the slab */

struct ssd_fix {
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct bt_ssd *ssd;
    struct bt_ssd_config conf;
    char dir[64];
    uint32_t n_done, n_added, n_removed;
    bt_status_t last;
};

/* What the disk shall do from now on. */
struct ssd_disk {
    _Atomic int read_errno, write_errno, flush_errno;
    _Atomic uint32_t delay_us;
    _Atomic uint32_t reads, writes, flushes;
};
static struct ssd_disk disk;

static inline ssize_t disk_pread(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    disk.reads++;
    usleep(disk.delay_us);
    if (disk.read_errno != 0) {
        return -disk.read_errno;
    }
    ssize_t n = pread(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static inline ssize_t disk_pwrite(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    disk.writes++;
    usleep(disk.delay_us);
    if (disk.write_errno != 0) {
        return -disk.write_errno;
    }
    ssize_t n = pwrite(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static inline int disk_flush(void *arg, int fd)
{
    (void)arg;
    disk.flushes++;
    if (disk.flush_errno != 0) {
        return -disk.flush_errno;
    }
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static const struct bt_ssd_sys disk_sys = {disk_pread, disk_pwrite, disk_flush, NULL};

static inline uint32_t ssd_segment_crc(void *arg, uint32_t slot, uint32_t layer,
                                       const struct bt_kv_key *key)
{
    struct ssd_fix *f = arg;
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&f->layout, layer, &bytes);
    uint32_t crc = bt_slab_segment_crc(key, layer, f->layout.layout_id,
                                       (uint8_t *)bt_slab_data(f->slab, slot) + off, bytes);
    f->slab->crcs[slot * f->layout.n_layers + layer] = crc;
    return crc;
}

static inline void ssd_key(uint64_t id, struct bt_kv_key *k)
{
    memset(k, 0x11, sizeof(*k));
    memcpy(k->b, &id, sizeof(id));
}

/* The bytes of block id, in slot, with the CRC row of a sealed slot. */
static inline void ssd_fill(struct ssd_fix *f, uint32_t slot, uint64_t id)
{
    struct bt_kv_key k;
    uint64_t *p = bt_slab_data(f->slab, slot);
    ssd_key(id, &k);
    for (uint64_t i = 0; i < f->layout.block_bytes / 8; i++) {
        p[i] = (id + 1) * 0x9E3779B97F4A7C15ull + i;
    }
    for (uint32_t l = 0; l < f->layout.n_layers; l++) {
        ssd_segment_crc(f, slot, l, &k);
    }
}

static inline bool ssd_is(const struct ssd_fix *f, uint32_t slot, uint64_t id)
{
    const uint64_t *p = bt_slab_data(f->slab, slot);
    for (uint64_t i = 0; i < f->layout.block_bytes / 8; i++) {
        if (p[i] != (id + 1) * 0x9E3779B97F4A7C15ull + i) {
            return false;
        }
    }
    return true;
}

static inline void ssd_done(void *arg, bt_status_t st)
{
    struct ssd_fix *f = arg;
    f->n_done++;
    f->last = st;
}

static inline void ssd_change(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key,
                              uint32_t depth)
{
    struct ssd_fix *f = arg;
    (void)pos;
    (void)key;
    (void)depth;
    *(added ? &f->n_added : &f->n_removed) += 1;
}

#define SSD_UNTIL(f, cond)                                                                         \
    do {                                                                                           \
        uint64_t end_ = bt_mono_ns() + 60000000000ull; /* only a hang takes so long */             \
        while (!(cond)) {                                                                          \
            if (bt_mono_ns() > end_) {                                                             \
                fail_msg("%s:%d: never: %s", __FILE__, __LINE__, #cond);                           \
            }                                                                                      \
            bt_loop_poll((f)->loop, 20);                                                           \
        }                                                                                          \
    } while (0)

static inline struct bt_ssd_stats ssd_stats(const struct ssd_fix *f)
{
    struct bt_ssd_stats s;
    bt_ssd_stats(f->ssd, &s);
    return s;
}

static inline void ssd_reopen(struct ssd_fix *f)
{
    char err[512];
    bt_ssd_close(f->ssd);
    f->ssd = NULL;
    if (bt_ssd_open(&f->conf, &f->ssd, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

/* slots: of the file. sys NULL: io_uring or what the kernel allows. */
static inline void ssd_start_in(struct ssd_fix *f, const char *dir, uint32_t slots,
                                const struct bt_ssd_sys *sys)
{
    char err[512], path[128];
    memset(f, 0, sizeof(*f));
    memset(&disk, 0, sizeof(disk));
    snprintf(f->dir, sizeof(f->dir), "%s", dir);
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(16, 4, 2, 64, BT_DT_BF16, 0, &f->layout), BT_OK);
    memset(f->root.b, 9, sizeof(f->root.b));
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-ssd-%d", (int)getpid());
    uint64_t slot = BT_ALIGN_UP(f->layout.block_bytes, 4096);
    struct bt_slab_spec spec = {.path = path,
                                .bytes = 6 * 4096 + (SSD_SLOTS + 1) * (slot + 256),
                                .layout = &f->layout,
                                .root = &f->root,
                                .incarnation = 1};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &f->slab, err, sizeof(err)), BT_OK);
    assert_int_equal(unlink(path), 0);
    assert_true(f->slab->super->n_slots >= SSD_SLOTS);
    f->conf = (struct bt_ssd_config){.loop = f->loop,
                                     .path = f->dir,
                                     .bytes = (1u << 20) + slots * slot,
                                     .queue_depth = 4,
                                     .backlog_max = 8,
                                     .probe_ms = 50,
                                     .stall_ms = 30000,
                                     .slab = f->slab,
                                     .sys = sys,
                                     .segment_crc = ssd_segment_crc,
                                     .on_change = ssd_change,
                                     .arg = f};
    ssd_reopen(f);
}

static inline void ssd_start(struct ssd_fix *f, uint32_t slots, const struct bt_ssd_sys *sys)
{
    char dir[] = "/tmp/baton-unit-ssd-XXXXXX";
    assert_non_null(mkdtemp(dir));
    ssd_start_in(f, dir, slots, sys);
}

static inline void ssd_stop_in(struct ssd_fix *f)
{
    bt_ssd_close(f->ssd);
    bt_slab_unmap(f->slab);
    bt_loop_destroy(f->loop);
}

static inline void ssd_stop(struct ssd_fix *f)
{
    char cmd[128];
    ssd_stop_in(f);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", f->dir);
    assert_int_equal(system(cmd), 0);
}

/* After a restart blocks last used in one moment are given up in the order of their depth. */
static inline uint32_t ssd_depth(uint64_t id)
{
    return 0xffffffu - (uint32_t)id;
}

/* Starts writing block id from slot. */
static inline bt_status_t ssd_write(struct ssd_fix *f, uint64_t id, uint32_t slot)
{
    struct bt_kv_key k;
    ssd_key(id, &k);
    ssd_fill(f, slot, id);
    return bt_ssd_write(f->ssd, slot, &k, ssd_depth(id), 0, ssd_done, f);
}

static inline bool ssd_has(const struct ssd_fix *f, uint64_t id)
{
    struct bt_kv_key k;
    ssd_key(id, &k);
    return bt_ssd_has(f->ssd, &k);
}

/* Writes block id and waits until it can be found. */
static inline void ssd_put(struct ssd_fix *f, uint64_t id)
{
    bt_status_t st = BT_AGAIN;
    SSD_UNTIL(f, st != BT_AGAIN || (st = ssd_write(f, id, 0)) != BT_AGAIN);
    assert_int_equal(st, BT_OK);
    SSD_UNTIL(f, ssd_has(f, id));
}

/* Reads block id into slot and checks its bytes; how the read ended. */
static inline bt_status_t ssd_get(struct ssd_fix *f, uint64_t id, uint32_t slot)
{
    struct bt_kv_key k;
    uint32_t depth = 0, before = f->n_done;
    ssd_key(id, &k);
    memset(bt_slab_data(f->slab, slot), 0xEE, f->layout.block_bytes);
    bt_status_t st = bt_ssd_read(f->ssd, &k, slot, &depth, ssd_done, f);
    if (st != BT_OK) {
        return st;
    }
    assert_int_equal(depth, ssd_depth(id));
    SSD_UNTIL(f, f->n_done > before);
    if (f->last == BT_OK) {
        assert_true(ssd_is(f, slot, id));
    }
    return f->last;
}

#endif
