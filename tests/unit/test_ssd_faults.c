/* The SSD tier when things go wrong: a disk that refuses, lies about its cache or does not answer,
 * kill -9 at any moment, loss of power. A block that is found has the right bytes, always. */
#include "ssd_fixture.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static struct ssd_fix fix;

static int setup(void **state)
{
    (void)state;
    ssd_start(&fix, 40, &disk_sys);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ssd_stop(&fix);
    return 0;
}

static void threads_do_the_same(void **state)
{
    (void)state;
    assert_string_equal(bt_ssd_engine(fix.ssd), "threads");
    for (uint64_t id = 0; id < 60; id++) {
        ssd_put(&fix, id);
        assert_int_equal(ssd_get(&fix, id, 3), BT_OK);
    }
    assert_true(disk.flushes > 0); /* before records */
    ssd_reopen(&fix);
    assert_int_equal(ssd_get(&fix, 59, 3), BT_OK);
}

static void refused_write_and_healing(void **state)
{
    (void)state;
    ssd_put(&fix, 1);
    disk.write_errno = EIO;
    assert_int_equal(ssd_write(&fix, 2, 0), BT_OK);
    SSD_UNTIL(&fix, !ssd_stats(&fix).up);
    SSD_UNTIL(&fix, ssd_stats(&fix).backlog == 0);
    assert_int_equal(fix.last, BT_ERR_IO);
    assert_int_equal(ssd_write(&fix, 3, 0), BT_ERR_UNAVAILABLE);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_ERR_UNAVAILABLE);
    uint32_t writes = disk.writes;
    SSD_UNTIL(&fix, disk.writes >= writes + 3); /* it keeps trying */
    assert_false(ssd_stats(&fix).up);
    disk.write_errno = 0;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_OK); /* nothing that was there is lost */
    assert_int_equal(ssd_get(&fix, 2, 0), BT_ERR_NOT_FOUND);
    for (uint64_t id = 2; id < 100; id++) { /* no slot is lost either */
        ssd_put(&fix, id);
    }
}

static void a_failed_flush_is_no_durability(void **state)
{
    (void)state;
    ssd_put(&fix, 1);
    disk.flush_errno = EIO;
    assert_int_equal(ssd_write(&fix, 2, 0), BT_OK);
    SSD_UNTIL(&fix, !ssd_stats(&fix).up);
    assert_false(ssd_has(&fix, 2));
    assert_int_equal(ssd_get(&fix, 1, 1), BT_OK); /* reads go on */
    disk.flush_errno = 0;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_false(ssd_has(&fix, 2));
    ssd_put(&fix, 2);
    ssd_reopen(&fix);
    assert_int_equal(ssd_get(&fix, 2, 1), BT_OK);
    assert_int_equal(ssd_stats(&fix).recovered, 2);
}

/* One spot is bad: that block is gone, the disk stays in use. */
static void one_unreadable_block(void **state)
{
    (void)state;
    ssd_put(&fix, 1);
    ssd_put(&fix, 2);
    disk.read_errno = EIO;
    assert_int_equal(ssd_get(&fix, 1, 0), BT_ERR_IO);
    disk.read_errno = 0;
    assert_true(ssd_stats(&fix).up);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_ERR_NOT_FOUND);
    assert_int_equal(ssd_get(&fix, 2, 0), BT_OK);
    assert_int_equal(ssd_stats(&fix).read_errors, 1);
}

static void a_disk_that_does_not_answer(void **state)
{
    (void)state;
    fix.conf.stall_ms = 400;
    ssd_reopen(&fix);
    ssd_put(&fix, 1);
    disk.delay_us = 1500000;
    assert_int_equal(ssd_write(&fix, 2, 0), BT_OK);
    uint64_t t = bt_mono_ns();
    SSD_UNTIL(&fix, !ssd_stats(&fix).up); /* long before it answers */
    assert_true(bt_mono_ns() - t < 1400000000ull);
    disk.delay_us = 0;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_true(ssd_has(&fix, 2) || bt_mono_ns() - t > 1400000000ull); /* not before it answered */
    SSD_UNTIL(&fix, ssd_has(&fix, 2));                                 /* slow is not lost */
    assert_int_equal(ssd_get(&fix, 2, 1), BT_OK);
}

static void a_slow_disk_drops_writes(void **state)
{
    uint32_t started = 0;
    (void)state;
    disk.delay_us = 20000;
    for (uint64_t id = 0; id < 200; id++) {
        started += ssd_write(&fix, id, (uint32_t)(id % SSD_SLOTS)) == BT_OK;
        bt_loop_poll(fix.loop, 0);
        assert_true(ssd_stats(&fix).backlog <= fix.conf.backlog_max);
    }
    assert_true(started < 100);
    assert_int_equal(ssd_stats(&fix).dropped, 200 - started);
    SSD_UNTIL(&fix, ssd_stats(&fix).backlog == 0);
}

/* The index's folder refuses: no file may be made or grow there. */
static void index_that_cannot_be_written(void **state)
{
    char cmd[300];
    (void)state;
    ssd_put(&fix, 1);
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    snprintf(cmd, sizeof(cmd), "mv '%s/index' '%s/away' && : > '%s/index'", fix.dir, fix.dir,
             fix.dir);
    assert_int_equal(system(cmd), 0);
    char err[256];
    assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
    SSD_UNTIL(&fix, !ssd_stats(&fix).up);
    assert_int_equal(ssd_write(&fix, 2, 0), BT_ERR_UNAVAILABLE);
    snprintf(cmd, sizeof(cmd), "rm '%s/index'", fix.dir);
    assert_int_equal(system(cmd), 0);
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    ssd_put(&fix, 2);
    assert_int_equal(ssd_get(&fix, 2, 0), BT_OK);
}

/* ---- kill -9 ---- */

struct ledger {               /* shared with the child */
    _Atomic uint64_t next;    /* first id not yet begun */
    _Atomic uint64_t durable; /* ids below were found by the child */
};

/* The child: writes blocks and reads old ones until it is killed. */
static void writer(const char *dir, struct ledger *led, const struct bt_ssd_sys *sys)
{
    static struct ssd_fix f;
    uint64_t id = led->durable;
    ssd_start_in(&f, dir, 24, sys);
    for (;;) {
        uint64_t from = id;
        for (uint32_t slot = 0; slot < 4; slot++) {
            led->next = id + 1;
            bt_status_t st; /* EXISTS: the one before was killed after writing it */
            while ((st = ssd_write(&f, id, slot)) != BT_OK && st != BT_ERR_EXISTS) {
                bt_loop_poll(f.loop, 1);
            }
            id++;
        }
        for (uint64_t i = from; i < id; i++) {
            while (!ssd_has(&f, i)) {
                bt_loop_poll(f.loop, 1);
            }
        }
        led->durable = id;
        if (from > 8) {
            ssd_get(&f, from - 6, 9);
        }
    }
}

/* Everything found is right; the youngest durable blocks are found. */
static void check_after(const char *dir, const struct ledger *led)
{
    static struct ssd_fix f;
    uint64_t durable = led->durable, next = led->next;
    ssd_start_in(&f, dir, 24, NULL);
    for (uint64_t id = durable > 40 ? durable - 40 : 0; id < next; id++) {
        bt_status_t st = ssd_get(&f, id, 1); /* checks the bytes */
        assert_true(st == BT_OK || st == BT_ERR_NOT_FOUND);
        /* 24 slots, 4 of which are kept free and 4 of which were being written or given up */
        if (id < durable && id + 12 >= durable) {
            assert_int_equal(st, BT_OK);
        }
    }
    assert_int_equal(ssd_stats(&f).crc_errors, 0); /* no record without its bytes */
    ssd_stop_in(&f);
}

/* Until the child has come to id (however busy the machine is), and a random time more. */
static void await(const struct ledger *led, uint64_t id, uint32_t us)
{
    for (uint32_t ms = 0; led->next < id && ms < 10000; ms++) {
        usleep(1000);
    }
    usleep(us);
}

/* It may have ended between making its slab and unlinking it. */
static void unlink_slab_of(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-ssd-%d", (int)pid);
    unlink(path);
}

/* Starts this program again as `what` (see main): a fork alone would miss RocksDB's threads. */
static pid_t child(const char *what, const char *dir, int fd, uint64_t id, uint32_t us,
                   uint32_t seed)
{
    char args[4][24];
    snprintf(args[0], sizeof(args[0]), "%d", fd);
    snprintf(args[1], sizeof(args[1]), "%llu", (unsigned long long)id);
    snprintf(args[2], sizeof(args[2]), "%u", us);
    snprintf(args[3], sizeof(args[3]), "%u", seed);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", "test_ssd_faults", what, dir, args[0], args[1], args[2], args[3],
              NULL);
        _exit(1);
    }
    return pid;
}

static struct ledger *ledger_map(int fd)
{
    struct ledger *led = mmap(NULL, sizeof(*led), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(led != MAP_FAILED);
    return led;
}

/* fd is inherited by children. */
static struct ledger *ledger_create(int *fd_p)
{
    *fd_p = memfd_create("ledger", 0);
    assert_true(*fd_p >= 0);
    assert_int_equal(ftruncate(*fd_p, sizeof(struct ledger)), 0);
    return ledger_map(*fd_p);
}

static void kill_at_any_moment(void **state)
{
    int fd;
    char dir[] = "/tmp/baton-unit-ssd-XXXXXX", cmd[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    struct ledger *led = ledger_create(&fd);
    uint32_t key[2] = {2024, 11}, out[4];
    uint64_t total = 0;
    for (uint32_t round = 0; round < 40; round++) {
        uint32_t counter[4] = {round, 0, 0, 0};
        bt_philox4x32(key, counter, out);
        uint64_t from = led->durable;
        pid_t pid = child("write", dir, fd, 0, 0, 0);
        await(led, from + out[0] % 16, out[1] % 4000);
        assert_int_equal(kill(pid, SIGKILL), 0);
        int st;
        assert_int_equal(waitpid(pid, &st, 0), pid);
        unlink_slab_of(pid);
        assert_true(WIFSIGNALED(st) && WTERMSIG(st) == SIGKILL); /* not by an assertion */
        check_after(dir, led);
        total = led->durable;
    }
    assert_true(total > 100);
    print_message("40 kills, %llu blocks\n", (unsigned long long)total);
    munmap(led, sizeof(*led));
    close(fd);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
    assert_int_equal(system(cmd), 0);
}

/* ---- loss of power: a disk with a volatile cache ---- */

#define CACHE_OPS 256u
#define SECTOR    512u

static struct {
    pthread_mutex_t lock;
    struct {
        off_t off;
        size_t len;
        uint8_t *bytes;
    } ops[CACHE_OPS];
    uint32_t n;
    int fd;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

static ssize_t cached_pwrite(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    pthread_mutex_lock(&cache.lock);
    if (cache.n == CACHE_OPS) { /* as large as it is; the oldest goes to the medium */
        if (pwrite(fd, cache.ops[0].bytes, cache.ops[0].len, cache.ops[0].off) < 0) {
            abort();
        }
        free(cache.ops[0].bytes);
        memmove(cache.ops, cache.ops + 1, (CACHE_OPS - 1) * sizeof(cache.ops[0]));
        cache.n--;
    }
    cache.fd = fd;
    cache.ops[cache.n].off = off;
    cache.ops[cache.n].len = len;
    if (posix_memalign((void **)&cache.ops[cache.n].bytes, 4096, len) != 0) {
        abort();
    }
    memcpy(cache.ops[cache.n++].bytes, buf, len);
    pthread_mutex_unlock(&cache.lock);
    return (ssize_t)len;
}

static ssize_t cached_pread(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    pthread_mutex_lock(&cache.lock);
    ssize_t n = pread(fd, buf, len, off);
    for (uint32_t i = 0; i < cache.n; i++) { /* operations are whole slots or the probe's page */
        if (cache.ops[i].off == off && cache.ops[i].len == len) {
            memcpy(buf, cache.ops[i].bytes, len);
            n = (ssize_t)len;
        }
    }
    pthread_mutex_unlock(&cache.lock);
    return n < 0 ? -errno : n;
}

static int cached_flush(void *arg, int fd)
{
    (void)arg;
    pthread_mutex_lock(&cache.lock);
    for (uint32_t i = 0; i < cache.n; i++) {
        if (pwrite(fd, cache.ops[i].bytes, cache.ops[i].len, cache.ops[i].off) < 0) {
            abort();
        }
        free(cache.ops[i].bytes);
    }
    cache.n = 0;
    pthread_mutex_unlock(&cache.lock);
    return 0;
}

static const struct bt_ssd_sys cached_sys = {cached_pread, cached_pwrite, cached_flush, NULL};

/* The power goes: of what the cache holds, some sectors have reached the medium and some not. */
static void power_off(uint32_t seed)
{
    uint32_t key[2] = {seed, 77}, out[4];
    pthread_mutex_lock(&cache.lock); /* for good: nothing is written any more */
    for (uint32_t i = 0; i < cache.n; i++) {
        uint8_t *old = NULL;
        if (posix_memalign((void **)&old, 4096, cache.ops[i].len) != 0 ||
            pread(cache.fd, old, cache.ops[i].len, cache.ops[i].off) < 0) {
            abort();
        }
        for (size_t s = 0; s < cache.ops[i].len / SECTOR; s++) {
            uint32_t counter[4] = {i, (uint32_t)s, 0, 0};
            bt_philox4x32(key, counter, out);
            if (out[0] & 1) {
                memcpy(old + s * SECTOR, cache.ops[i].bytes + s * SECTOR, SECTOR);
            }
        }
        if (pwrite(cache.fd, old, cache.ops[i].len, cache.ops[i].off) < 0) {
            abort();
        }
    }
    _exit(9);
}

struct outage {
    const struct ledger *led;
    uint64_t id;
    uint32_t us, seed;
};

static void *power_thread(void *arg)
{
    const struct outage *o = arg;
    await(o->led, o->id, o->us);
    power_off(o->seed);
    return NULL;
}

static void power_loss(void **state)
{
    int fd;
    char dir[] = "/tmp/baton-unit-ssd-XXXXXX", cmd[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    struct ledger *led = ledger_create(&fd);
    uint32_t key[2] = {5, 5}, out[4];
    for (uint32_t round = 0; round < 40; round++) {
        uint32_t counter[4] = {round, 1, 0, 0};
        bt_philox4x32(key, counter, out);
        pid_t pid = child("power", dir, fd, led->durable + out[0] % 16, out[1] % 4000, round);
        int st;
        assert_int_equal(waitpid(pid, &st, 0), pid);
        unlink_slab_of(pid);
        assert_true(WIFEXITED(st) && WEXITSTATUS(st) == 9);
        check_after(dir, led);
    }
    assert_true(led->durable > 100);
    munmap(led, sizeof(*led));
    close(fd);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
    assert_int_equal(system(cmd), 0);
}

/* argv: write|power FOLDER LEDGER_FD ID US SEED */
static int child_main(char **argv)
{
    struct ledger *led = ledger_map(atoi(argv[3]));
    pthread_t t;
    struct outage o = {led, strtoull(argv[4], NULL, 10), (uint32_t)atoi(argv[5]),
                       (uint32_t)atoi(argv[6])};
    close(2);
    if (strcmp(argv[1], "write") == 0) {
        writer(argv[2], led, NULL);
    } else if (pthread_create(&t, NULL, power_thread, &o) == 0) {
        writer(argv[2], led, &cached_sys);
    }
    return 1;
}

int main(int argc, char **argv)
{
    if (argc == 7) {
        return child_main(argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(threads_do_the_same, setup, teardown),
        cmocka_unit_test_setup_teardown(refused_write_and_healing, setup, teardown),
        cmocka_unit_test_setup_teardown(a_failed_flush_is_no_durability, setup, teardown),
        cmocka_unit_test_setup_teardown(one_unreadable_block, setup, teardown),
        cmocka_unit_test_setup_teardown(a_disk_that_does_not_answer, setup, teardown),
        cmocka_unit_test_setup_teardown(a_slow_disk_drops_writes, setup, teardown),
        cmocka_unit_test_setup_teardown(index_that_cannot_be_written, setup, teardown),
        cmocka_unit_test(kill_at_any_moment),
        cmocka_unit_test(power_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
