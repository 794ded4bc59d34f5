/* The SSD tier on a real folder: what was written is found, also after a restart, is given up in
 * the order of use, and a block whose bytes or record are damaged is a miss. */
#include "ssd_fixture.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <rocksdb/c.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "common/base/crc32c.h"
#include "common/policy/evict/ssd_dir.h"

static struct ssd_fix fix;

/* The wall clock, which tests set ahead. */
static uint64_t ahead_ns;

int clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, id, t);
    if (rc == 0 && id == CLOCK_REALTIME) {
        uint64_t ns = (uint64_t)t->tv_sec * 1000000000u + (uint64_t)t->tv_nsec + ahead_ns;
        t->tv_sec = (time_t)(ns / 1000000000u);
        t->tv_nsec = (long)(ns % 1000000000u);
    }
    return rc;
}

/* While a test says so, the disk has no room. */
static _Atomic bool no_room;
static _Atomic uint32_t n_reserved;

int posix_fallocate(int fd, off_t at, off_t len)
{
    static int (*real)(int fd, off_t at, off_t len);
    n_reserved++;
    if (no_room) {
        return ENOSPC;
    }
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "posix_fallocate");
    }
    return real(fd, at, len);
}

static int setup(void **state)
{
    (void)state;
    ssd_start(&fix, 40, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ssd_stop(&fix);
    return 0;
}

static void written_found_and_read(void **state)
{
    (void)state;
    for (uint64_t id = 0; id < 20; id++) {
        assert_false(ssd_has(&fix, id));
        ssd_put(&fix, id);
    }
    assert_int_equal(fix.n_added, 20);
    for (uint64_t id = 20; id-- > 0;) {
        assert_int_equal(ssd_get(&fix, id, (uint32_t)(id % SSD_SLOTS)), BT_OK);
    }
    assert_int_equal(ssd_get(&fix, 99, 0), BT_ERR_NOT_FOUND);
    assert_int_equal(ssd_write(&fix, 3, 0), BT_ERR_EXISTS);
    struct bt_ssd_stats s = ssd_stats(&fix);
    assert_int_equal(s.written, 20);
    assert_int_equal(s.read, 20);
    assert_int_equal(s.blocks, 20);
    assert_int_equal(s.backlog + s.reading, 0);
    assert_int_equal(s.written_bytes, 20 * fix.slab->super->slot_bytes);
    assert_int_equal(s.read_errors + s.write_errors + s.crc_errors, 0);
}

static void many_at_once(void **state)
{
    uint32_t started = 0;
    struct bt_kv_key k;
    uint32_t depth;
    (void)state;
    bt_status_t st;
    for (uint64_t id = 0; id < SSD_SLOTS; id++) {
        st = ssd_write(&fix, id, (uint32_t)id);
        started += st == BT_OK;
        assert_true(st == BT_OK || st == BT_AGAIN); /* the backlog has a limit */
    }
    assert_true(started >= 5 && started <= 8);
    assert_int_equal(ssd_stats(&fix).dropped, SSD_SLOTS - started);
    assert_int_equal(ssd_write(&fix, 0, 0), BT_ERR_EXISTS); /* on its way */
    SSD_UNTIL(&fix, ssd_stats(&fix).blocks == started);
    assert_int_equal(fix.n_done, started);
    for (uint32_t id = 0; id < started; id++) {
        ssd_key(id, &k);
        memset(bt_slab_data(fix.slab, id), 0, fix.layout.block_bytes);
        assert_int_equal(bt_ssd_read(fix.ssd, &k, id, &depth, ssd_done, &fix), BT_OK);
    }
    ssd_key(0, &k);
    assert_int_equal(bt_ssd_read(fix.ssd, &k, 15, &depth, ssd_done, &fix), BT_AGAIN);
    SSD_UNTIL(&fix, fix.n_done == 2 * started);
    for (uint32_t id = 0; id < started; id++) {
        assert_true(ssd_is(&fix, id, id));
    }
}

static void survives_a_restart(void **state)
{
    (void)state;
    for (uint64_t id = 0; id < 20; id++) {
        ssd_put(&fix, id);
    }
    ssd_reopen(&fix);
    struct bt_ssd_stats s = ssd_stats(&fix);
    assert_int_equal(s.recovered, 20);
    for (uint64_t id = 0; id < 20; id++) {
        assert_int_equal(ssd_get(&fix, id, 1), BT_OK);
    }
    uint32_t n = 0, depth;
    for (uint32_t pos = 0; pos < s.slots; pos++) {
        n += bt_ssd_at(fix.ssd, pos, &depth) != NULL;
    }
    assert_int_equal(n, 20);
}

static void least_recently_used_goes(void **state)
{
    (void)state;
    for (uint64_t id = 0; id < 30; id++) {
        ssd_put(&fix, id);
    }
    for (int round = 0; round < 10; round++) { /* 0..4 stay in use */
        for (uint64_t id = 0; id < 5; id++) {
            assert_int_equal(ssd_get(&fix, id, 2), BT_OK);
        }
        for (uint64_t id = 0; id < 10; id++) {
            ssd_put(&fix, 100 + (uint64_t)round * 10 + id);
        }
    }
    struct bt_ssd_stats s = ssd_stats(&fix);
    assert_true(s.blocks <= s.slots);
    assert_int_equal(s.written - s.evicted, s.blocks);
    for (uint64_t id = 0; id < 5; id++) {
        assert_int_equal(ssd_get(&fix, id, 2), BT_OK);
    }
    for (uint64_t id = 5; id < 30; id++) {
        assert_int_equal(ssd_get(&fix, id, 2), BT_ERR_NOT_FOUND);
    }
    for (uint64_t id = 190; id < 200; id++) {
        assert_int_equal(ssd_get(&fix, id, 2), BT_OK);
    }
    assert_int_equal(fix.n_added - fix.n_removed, s.blocks);
    ssd_reopen(&fix);
    assert_int_equal(ssd_stats(&fix).recovered, s.blocks); /* deletes are durable too */
}

/* The slab file, opened beside the tier (its own descriptor is O_DIRECT). */
static int blocks_fd(void)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/blocks", fix.dir);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static uint64_t off_of(uint64_t id)
{
    struct bt_kv_key want;
    uint32_t depth;
    ssd_key(id, &want);
    for (uint32_t pos = 0;; pos++) {
        const struct bt_kv_key *k = bt_ssd_at(fix.ssd, pos, &depth);
        if (k != NULL && memcmp(k, &want, sizeof(want)) == 0) {
            return (1u << 20) + pos * fix.slab->super->slot_bytes;
        }
    }
}

static void flip(int fd, uint64_t off)
{
    uint8_t b;
    assert_int_equal(pread(fd, &b, 1, (off_t)off), 1);
    b ^= 0x10;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)off), 1);
    assert_int_equal(fdatasync(fd), 0);
}

static void damaged_bytes_are_a_miss(void **state)
{
    (void)state;
    int fd = blocks_fd();
    for (uint64_t id = 0; id < 20; id++) {
        ssd_put(&fix, id);
    }
    for (uint64_t id = 0; id < 20; id += 2) {
        uint32_t key[2] = {7, 0}, counter[4] = {(uint32_t)id, 0, 0, 0}, r[4];
        bt_philox4x32(key, counter, r);
        flip(fd, off_of(id) + r[0] % fix.layout.block_bytes);
    }
    for (uint64_t id = 0; id < 20; id++) {
        assert_int_equal(ssd_get(&fix, id, 0), id % 2 == 0 ? BT_ERR_DATA_LOSS : BT_OK);
    }
    assert_int_equal(ssd_stats(&fix).crc_errors, 10);
    assert_int_equal(ssd_get(&fix, 0, 0), BT_ERR_NOT_FOUND); /* and forgotten */
    ssd_put(&fix, 0);                                        /* and welcome again */
    assert_int_equal(ssd_get(&fix, 0, 1), BT_OK);
    close(fd);
}

static void another_blocks_bytes_are_a_miss(void **state)
{
    (void)state;
    int fd = blocks_fd();
    uint8_t *buf = malloc(fix.slab->super->slot_bytes);
    ssd_put(&fix, 1);
    ssd_put(&fix, 2);
    assert_true(pread(fd, buf, fix.slab->super->slot_bytes, (off_t)off_of(1)) > 0);
    assert_true(pwrite(fd, buf, fix.slab->super->slot_bytes, (off_t)off_of(2)) > 0);
    fdatasync(fd);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_OK);
    assert_int_equal(ssd_get(&fix, 2, 0), BT_ERR_DATA_LOSS);
    free(buf);
    close(fd);
}

static void another_model_empties_it(void **state)
{
    (void)state;
    ssd_put(&fix, 1);
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    struct bt_slab_super *su = (struct bt_slab_super *)(uintptr_t)fix.slab->super;
    su->root_key[0] ^= 1;
    ssd_reopen(&fix);
    assert_false(ssd_has(&fix, 1));
    assert_int_equal(ssd_stats(&fix).recovered, 0);
    ssd_put(&fix, 2);
    su->root_key[0] ^= 1;
    ssd_reopen(&fix); /* and the other way round */
    assert_int_equal(ssd_stats(&fix).recovered, 0);
}

/* Overwrites the middle of every file of the index that begins with prefix. */
static int damage(const char *prefix)
{
    char cmd[400];
    snprintf(cmd, sizeof(cmd),
             "n=0; for f in '%s'/index/%s*; do [ -f \"$f\" ] && s=$(stat -c %%s \"$f\") && "
             "printf garbage | dd of=\"$f\" bs=1 seek=$((s/2)) conv=notrunc status=none && "
             "n=$((n+1)); done; exit $n",
             fix.dir, prefix);
    int rc = system(cmd);
    return WEXITSTATUS(rc);
}

static void damaged_index_starts_over(void **state)
{
    static const char *const what[] = {"MANIFEST", "CURRENT", "IDENTITY", "OPTIONS"};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(what); i++) {
        ssd_put(&fix, 1 + i);
        bt_ssd_close(fix.ssd);
        fix.ssd = NULL;
        assert_true(damage(what[i]) > 0 ||
                    i >= 2); /* not every version of RocksDB writes all four */
        ssd_reopen(&fix);
        assert_true(ssd_stats(&fix).up);
        ssd_put(&fix, 100 + i); /* it works */
        assert_int_equal(ssd_get(&fix, 100 + i, 0), BT_OK);
        bt_status_t st = ssd_get(&fix, 1 + i, 0); /* there or not: never wrong */
        assert_true(st == BT_OK || st == BT_ERR_NOT_FOUND);
    }
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    char cmd[200];
    snprintf(cmd, sizeof(cmd), "rm -f '%s'/index/*", fix.dir);
    assert_int_equal(system(cmd), 0);
    ssd_reopen(&fix);
    ssd_put(&fix, 7);
}

/* Files that are gone or cut short, after enough blocks for more than one of each kind. */
static void mutilated_index(void **state)
{
    static const char *const how[] = {
        "rm '%s'/index/CURRENT",
        "rm '%s'/index/MANIFEST-*",
        "rm '%s'/index/*.sst",
        "cd '%s'/index && for f in *.sst; do truncate -s 100 $f; done",
        "cd '%s'/index && for f in *.log; do truncate -s 70 $f; done",
        "cd '%s'/index && for f in MANIFEST-*; do truncate -s 40 $f; done",
        ": > '%s'/index/CURRENT",
        "cd '%s'/index && for f in *; do : > $f; done",
    };
    uint64_t id = 0;
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(how); i++) {
        char cmd[300];
        uint64_t first = id;
        for (int life = 0; life < 2;
             life++) { /* what the first leaves in its log is a table in the next */
            for (int k = 0; k < 5; k++) {
                ssd_put(&fix, id++);
            }
            ssd_reopen(&fix);
        }
        bt_ssd_close(fix.ssd);
        fix.ssd = NULL;
        snprintf(cmd, sizeof(cmd), how[i], fix.dir);
        assert_int_equal(system(cmd), 0);
        ssd_reopen(&fix);
        SSD_UNTIL(&fix, ssd_stats(&fix).up);
        for (uint64_t b = first; b < id; b++) {
            bt_status_t st = ssd_get(&fix, b, 0); /* compares the bytes */
            assert_true(st == BT_OK || st == BT_ERR_NOT_FOUND);
        }
        ssd_put(&fix, id);
        assert_int_equal(ssd_get(&fix, id++, 0), BT_OK);
        ssd_reopen(&fix);
        assert_int_equal(ssd_get(&fix, id - 1, 0), BT_OK);
    }
}

/* No room for one block when it starts, then there is: used without another start. */
static void no_room_at_first(void **state)
{
    char err[512];
    (void)state;
    ssd_put(&fix, 1);
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    no_room = true;
    assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
    assert_false(ssd_stats(&fix).up);
    assert_int_equal(ssd_stats(&fix).slots, 0);
    assert_int_equal(ssd_write(&fix, 2, 0), BT_ERR_UNAVAILABLE);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_ERR_UNAVAILABLE);
    assert_false(ssd_has(&fix, 1));
    uint32_t tries = n_reserved;
    SSD_UNTIL(&fix, n_reserved >= tries + 10); /* it tries again, five sizes each time */
    assert_false(ssd_stats(&fix).up);
    uint32_t added = fix.n_added;
    no_room = false;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_int_equal(fix.n_added, added + 1); /* what it has is announced */
    assert_int_equal(ssd_get(&fix, 1, 0), BT_OK);
    ssd_put(&fix, 2);
    assert_int_equal(ssd_get(&fix, 2, 0), BT_OK);
}

/* Closed while it still tries. */
static void never_any_room(void **state)
{
    struct rlimit old, small;
    char err[512], cmd[200];
    (void)state;
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    snprintf(cmd, sizeof(cmd), "rm '%s/blocks'", fix.dir);
    assert_int_equal(system(cmd), 0);
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    fix.conf.probe_ms = 1;
    for (int polls = 0; polls < 30; polls++) {
        assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
        for (int i = 0; i < polls; i++) {
            bt_loop_poll(fix.loop, 1);
        }
        assert_false(ssd_stats(&fix).up);
        bt_ssd_close(fix.ssd);
        fix.ssd = NULL;
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    ssd_reopen(&fix);
    ssd_put(&fix, 3);
}

static void one_kvstore_a_folder(void **state)
{
    struct bt_ssd *other = NULL;
    char err[512];
    (void)state;
    assert_int_equal(bt_ssd_open(&fix.conf, &other, err, sizeof(err)), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "another kvstore"));
    struct bt_ssd_config c = fix.conf;
    c.path = "/proc/nowhere";
    assert_int_equal(bt_ssd_open(&c, &other, err, sizeof(err)), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "kvstore.ssd.path"));
    c = fix.conf;
    c.path = "/tmp";
    c.bytes = 4096;
    c.path = fix.dir;
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    assert_int_equal(bt_ssd_open(&c, &other, err, sizeof(err)), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "kvstore.ssd.bytes"));
    ssd_reopen(&fix);
}

/* A disk with less room than configured: fewer slots, no error. */
static void full_disk_is_a_smaller_tier(void **state)
{
    struct rlimit old, small;
    (void)state;
    for (uint64_t id = 0; id < 5; id++) {
        ssd_put(&fix, id);
    }
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = (1u << 20) + 60 * fix.slab->super->slot_bytes;
    fix.conf.bytes = (1u << 20) + 200 * fix.slab->super->slot_bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    ssd_reopen(&fix);
    assert_in_range(ssd_stats(&fix).slots, 30, 60);
    assert_int_equal(ssd_stats(&fix).recovered, 5);
    for (uint64_t id = 0; id < 200; id++) {
        ssd_put(&fix, 1000 + id);
        assert_int_equal(ssd_get(&fix, 1000 + id, 0), BT_OK);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    ssd_reopen(&fix); /* there is room again */
    assert_int_equal(ssd_stats(&fix).slots, 200);
}

/* Rewrites every record of the present version as it was before tenants (version 1, no tag) or
 * before moments (2): with the last use in whole seconds. Returns how many. */
static uint32_t make_records_old(uint32_t version)
{
    struct {
        uint32_t version, slot, generation, depth, digest, used, tag[2];
    } r;
    char path[128];
    char *err = NULL;
    uint32_t n = 0;
    snprintf(path, sizeof(path), "%s/index", fix.dir);
    rocksdb_options_t *o = rocksdb_options_create();
    rocksdb_t *db = rocksdb_open(o, path, &err);
    assert_null(err);
    rocksdb_readoptions_t *ro = rocksdb_readoptions_create();
    rocksdb_writeoptions_t *wo = rocksdb_writeoptions_create();
    rocksdb_iterator_t *it = rocksdb_create_iterator(db, ro);
    for (rocksdb_iter_seek_to_first(it); rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
        size_t kl, vl;
        const char *k = rocksdb_iter_key(it, &kl), *v = rocksdb_iter_value(it, &vl);
        if (kl != sizeof(struct bt_kv_key)) {
            continue; /* the identity */
        }
        memcpy(&r, v, BT_MIN(vl, sizeof(r)));
        if (r.version != 3) {
            continue; /* rewritten already */
        }
        assert_int_equal(vl, sizeof(r));
        r.version = version;
        r.used = r.used / BT_SSD_TICKS_S + BT_SSD_EPOCH_S;
        size_t len = version == 1 ? sizeof(r) - 4 : sizeof(r);
        r.tag[version - 1] = bt_crc32c(bt_crc32c(0, k, kl), &r, len - 4);
        rocksdb_put(db, wo, k, kl, (const char *)&r, len, &err);
        assert_null(err);
        n++;
    }
    rocksdb_iter_destroy(it);
    rocksdb_writeoptions_destroy(wo);
    rocksdb_readoptions_destroy(ro);
    rocksdb_close(db);
    rocksdb_options_destroy(o);
    return n;
}

static void records_from_before_tenants(void **state)
{
    (void)state;
    char err[512];
    for (uint64_t id = 0; id < 5; id++) {
        ssd_put(&fix, id);
    }
    bt_ssd_close(fix.ssd);
    assert_int_equal(make_records_old(1), 5);
    assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
    assert_int_equal(ssd_stats(&fix).recovered, 5);
    for (uint64_t id = 0; id < 5; id++) {
        assert_int_equal(ssd_get(&fix, id, 0), BT_OK);
    }
    assert_int_equal(bt_ssd_used(fix.ssd, 0), 5); /* nobody's */
}

/* Puts blocks until sixteen of the thirty that were there have gone. */
static void push_sixteen_out(void)
{
    ssd_reopen(&fix);
    assert_int_equal(ssd_stats(&fix).recovered, 30);
    for (uint64_t id = 0; id < 20; id++) { /* six slots are kept free */
        ssd_put(&fix, 1000 + id);
    }
    SSD_UNTIL(&fix, ssd_stats(&fix).evicted == 16);
}

/* Written within a few seconds, deeper ones later. */
static void order_within_a_second(void **state)
{
    (void)state;
    for (uint64_t id = 30; id-- > 0;) {
        ssd_put(&fix, id);
        ahead_ns += 100000000;
    }
    push_sixteen_out();
    for (uint64_t id = 0; id < 30; id++) {
        assert_int_equal(ssd_has(&fix, id), id < 14);
    }
}

/* Also a block that is used all the time: its record is not of the first use for ever. */
static void order_of_what_is_used_often(void **state)
{
    (void)state;
    for (uint64_t id = 0; id < 30; id++) {
        ssd_put(&fix, id);
    }
    for (int i = 0; i < 5; i++) {
        ahead_ns += 30000000000u;
        for (uint64_t id = 0; id < 5; id++) {
            assert_int_equal(ssd_get(&fix, id, 2), BT_OK);
        }
    }
    push_sixteen_out();
    for (uint64_t id = 0; id < 30; id++) {
        assert_int_equal(ssd_has(&fix, id), id < 5 || id >= 21);
    }
}

/* Records of three versions side by side keep their order, and so do those that are read
 * with a clock behind that of their writing. */
static void order_of_mixed_versions(void **state)
{
    char err[512];
    (void)state;
    for (uint64_t id = 30; id-- > 0;) {
        ssd_put(&fix, id);
        ahead_ns += 2000000000u;
        if (id == 20 || id == 10) {
            bt_ssd_close(fix.ssd);
            assert_int_equal(make_records_old(id / 10 == 2 ? 1 : 2), 10);
            assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
        }
    }
    ahead_ns -= 50000000000u;
    push_sixteen_out();
    for (uint64_t id = 0; id < 30; id++) {
        assert_int_equal(ssd_has(&fix, id), id < 14);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(order_within_a_second, setup, teardown),
        cmocka_unit_test_setup_teardown(order_of_what_is_used_often, setup, teardown),
        cmocka_unit_test_setup_teardown(order_of_mixed_versions, setup, teardown),
        cmocka_unit_test_setup_teardown(records_from_before_tenants, setup, teardown),
        cmocka_unit_test_setup_teardown(written_found_and_read, setup, teardown),
        cmocka_unit_test_setup_teardown(many_at_once, setup, teardown),
        cmocka_unit_test_setup_teardown(survives_a_restart, setup, teardown),
        cmocka_unit_test_setup_teardown(least_recently_used_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(damaged_bytes_are_a_miss, setup, teardown),
        cmocka_unit_test_setup_teardown(another_blocks_bytes_are_a_miss, setup, teardown),
        cmocka_unit_test_setup_teardown(another_model_empties_it, setup, teardown),
        cmocka_unit_test_setup_teardown(damaged_index_starts_over, setup, teardown),
        cmocka_unit_test_setup_teardown(mutilated_index, setup, teardown),
        cmocka_unit_test_setup_teardown(no_room_at_first, setup, teardown),
        cmocka_unit_test_setup_teardown(never_any_room, setup, teardown),
        cmocka_unit_test_setup_teardown(one_kvstore_a_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(full_disk_is_a_smaller_tier, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
