/* Loss of power under the SSD tier: a disk whose cache is volatile. What was written and not
 * flushed has reached the medium in part: sectors of the data file (through the tier's table of
 * system calls), tails of RocksDB's files (this program's write, fdatasync and fsync stand in for
 * libc's, so RocksDB calls them too). Not simulated: directory entries that were not synced.
 *
 * A block that is found has the right bytes, always; what was found before is found again.
 * argv[1]: how many outages. */
#include "ssd_child.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static uint32_t n_outages = 50;

/* ---- the index: files that are written and synced ---- */

#define FILES_MAX 256u

static struct {
    bool on; /* in the child that will lose its power */
    char folder[96];
    struct {
        ino_t ino;
        off_t synced;
    } files[FILES_MAX];
    uint32_t n;
} tails;

static pthread_mutex_t power = PTHREAD_MUTEX_INITIALIZER; /* held for good when it is gone */

static bool in_index(int fd)
{
    char link[48], name[256];
    struct stat st;
    if (!tails.on || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return false;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof(name) - 1);
    name[n > 0 ? n : 0] = '\0';
    return strncmp(name, tails.folder, strlen(tails.folder)) == 0;
}

static off_t *synced_of(ino_t ino)
{
    for (uint32_t i = 0; i < tails.n; i++) {
        if (tails.files[i].ino == ino) {
            return &tails.files[i].synced;
        }
    }
    if (tails.n == FILES_MAX) {
        abort();
    }
    tails.files[tails.n].ino = ino;
    tails.files[tails.n].synced = 0;
    return &tails.files[tails.n++].synced;
}

ssize_t write(int fd, const void *buf, size_t n)
{
    bool index = in_index(fd);
    if (index) {
        pthread_mutex_lock(&power);
    }
    ssize_t rc = syscall(SYS_write, fd, buf, n);
    if (index) {
        pthread_mutex_unlock(&power);
    }
    return rc;
}

static int sync_file(long call, int fd)
{
    struct stat st;
    if (!in_index(fd)) {
        return (int)syscall(call, fd);
    }
    pthread_mutex_lock(&power);
    if (fstat(fd, &st) != 0) {
        abort();
    }
    *synced_of(st.st_ino) = st.st_size;
    pthread_mutex_unlock(&power);
    return 0; /* the machine goes on: nothing need really be flushed */
}

int fdatasync(int fd)
{
    return sync_file(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    return sync_file(SYS_fsync, fd);
}

/* Seeds of an outage's decisions. */
static uint32_t dice(uint32_t seed, uint32_t a, uint32_t b)
{
    uint32_t key[2] = {seed, 77}, counter[4] = {a, b, 0, 0}, out[4];
    bt_philox4x32(key, counter, out);
    return out[0];
}

/* Cuts a file behind what was synced, or loses some of its sectors there, or both, or nothing. */
static void tear_tail(const char *name, uint32_t seed, uint32_t nth)
{
    static const uint8_t zeros[512];
    struct stat st;
    int fd = open(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return; /* removed a moment ago */
    }
    if (fstat(fd, &st) != 0) {
        abort();
    }
    off_t from = *synced_of(st.st_ino), end = st.st_size;
    uint32_t how = dice(seed, 1000 + nth, 0) % 4;
    if (end > from && (how & 1)) {
        end = from + (off_t)(dice(seed, 1000 + nth, 1) % (uint32_t)(end - from + 1));
        if (ftruncate(fd, end) != 0) {
            abort();
        }
    }
    for (off_t at = from; (how & 2) && at < end; at = (at / 512 + 1) * 512) {
        size_t n = (size_t)BT_MIN((at / 512 + 1) * 512, end) - (size_t)at;
        if ((dice(seed, 2000 + nth, (uint32_t)(at / 512)) & 1) && pwrite(fd, zeros, n, at) < 0) {
            abort();
        }
    }
    close(fd);
}

static void for_each_file(void (*fn)(const char *name, uint32_t seed, uint32_t nth), uint32_t seed)
{
    char name[512];
    uint32_t nth = 0;
    struct dirent *e;
    DIR *d = opendir(tails.folder);
    while (d != NULL && (e = readdir(d)) != NULL) {
        if (e->d_type == DT_REG) {
            snprintf(name, sizeof(name), "%s/%s", tails.folder, e->d_name);
            fn(name, seed, nth++);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
}

/* What was there when the power came back is on the medium. */
static void is_on_medium(const char *name, uint32_t seed, uint32_t nth)
{
    struct stat st;
    (void)seed;
    (void)nth;
    if (stat(name, &st) == 0) {
        *synced_of(st.st_ino) = st.st_size;
    }
}

/* ---- the data file: sectors in a cache ---- */

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
    pthread_mutex_lock(&power);
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
    for_each_file(tear_tail, seed);
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

static uint32_t files_in(const char *dir)
{
    char index[64];
    uint32_t n = 0;
    snprintf(index, sizeof(index), "%s/index", dir);
    DIR *d = opendir(index);
    assert_non_null(d);
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    return n;
}

static void power_loss(void **state)
{
    int fd;
    char dir[] = "/tmp/baton-unit-ssd-XXXXXX", cmd[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    struct ledger *led = ledger_create(&fd);
    uint32_t key[2] = {5, 5}, out[4];
    for (uint32_t round = 0; round < n_outages; round++) {
        uint32_t counter[4] = {round, 1, 0, 0};
        bt_philox4x32(key, counter, out);
        bool early = out[2] % 4 == 0; /* while it opens what the outage before has left */
        pid_t pid =
            early ? child("power", dir, fd, 0, out[1] % 60000, round)
                  : child("power", dir, fd, led->durable + 1 + out[0] % 16, out[1] % 4000, round);
        int st;
        assert_int_equal(waitpid(pid, &st, 0), pid);
        unlink_slab_of(pid);
        if (!WIFEXITED(st) || WEXITSTATUS(st) != 9) {
            fail_msg("outage %u: the child ended with %d, signal %d", round, WEXITSTATUS(st),
                     WTERMSIG(st));
        }
        check_after(dir, led);
    }
    assert_true(led->durable > n_outages);
    assert_true(files_in(dir) < 40); /* what starts leave behind does not add up */
    print_message("%u outages, %llu blocks\n", n_outages, (unsigned long long)led->durable);
    munmap(led, sizeof(*led));
    close(fd);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
    assert_int_equal(system(cmd), 0);
}

/* argv: power FOLDER LEDGER_FD ID US SEED */
static int child_main(char **argv)
{
    struct ledger *led = ledger_map(atoi(argv[3]));
    pthread_t t;
    struct outage o = {led, strtoull(argv[4], NULL, 10), (uint32_t)atoi(argv[5]),
                       (uint32_t)atoi(argv[6])};
    close(2);
    snprintf(tails.folder, sizeof(tails.folder), "%s/index", argv[2]);
    for_each_file(is_on_medium, 0);
    tails.on = true;
    if (pthread_create(&t, NULL, power_thread, &o) == 0) {
        writer(argv[2], led, &cached_sys);
    }
    return 1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(power_loss)};
    if (argc == 7) {
        return child_main(argv);
    }
    if (argc > 1) {
        n_outages = (uint32_t)atoi(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
