/* The SSD tier's index on a disk that refuses: RocksDB's own writes and syncs fail (this program's
 * write, fdatasync and fsync stand in for libc's, for files in the index's folder). Serving goes
 * on, nothing wrong is served, and the index is used again when the disk takes writes. */
#include "ssd_fixture.h"

#include <sys/stat.h>
#include <sys/syscall.h>

static struct {
    char folder[96];
    _Atomic int write_errno, sync_errno;
    _Atomic int32_t good; /* so many calls still succeed */
    _Atomic uint32_t refused;
} faulty;

static bool in_index(int fd)
{
    char link[48], name[256];
    struct stat st;
    if (faulty.folder[0] == '\0' || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return false;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof(name) - 1);
    name[n > 0 ? n : 0] = '\0';
    return strncmp(name, faulty.folder, strlen(faulty.folder)) == 0;
}

static int refuse(int fd, int why)
{
    if (why == 0 || !in_index(fd) || faulty.good-- > 0) {
        return 0;
    }
    faulty.refused++;
    return why;
}

ssize_t write(int fd, const void *buf, size_t n)
{
    int why = refuse(fd, faulty.write_errno);
    if (why != 0) {
        errno = why;
        return -1;
    }
    return syscall(SYS_write, fd, buf, n);
}

static int sync_or_refuse(long call, int fd)
{
    int why = refuse(fd, faulty.sync_errno);
    if (why != 0) {
        errno = why;
        return -1;
    }
    return (int)syscall(call, fd);
}

int fdatasync(int fd)
{
    return sync_or_refuse(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    return sync_or_refuse(SYS_fsync, fd);
}

static struct ssd_fix fix;

static int setup(void **state)
{
    (void)state;
    memset(&faulty, 0, sizeof(faulty));
    ssd_start(&fix, 40, NULL);
    snprintf(faulty.folder, sizeof(faulty.folder), "%s/index", fix.dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    faulty.write_errno = faulty.sync_errno = 0;
    ssd_stop(&fix);
    return 0;
}

/* From the call number `good` on the disk refuses, for a while. */
static void refuses(int write_errno, int sync_errno, int32_t good)
{
    static uint64_t id = 1000;
    uint64_t kept = id++;
    ssd_put(&fix, kept);
    faulty.good = good;
    faulty.refused = 0;
    faulty.write_errno = write_errno;
    faulty.sync_errno = sync_errno;
    /* The first that is refused may be RocksDB's own work, which is no block's: so until it is
     * down. */
    for (int tries = 0; ssd_stats(&fix).up; tries++, id++) {
        assert_true(tries < 30); /* the oldest of 40 slots would be given up */
        bt_status_t st = BT_AGAIN;
        SSD_UNTIL(&fix, st != BT_AGAIN || (st = ssd_write(&fix, id, 1)) != BT_AGAIN);
        assert_true(st == BT_OK || st == BT_ERR_UNAVAILABLE);
        SSD_UNTIL(&fix, !ssd_stats(&fix).up || (ssd_stats(&fix).backlog == 0 && ssd_has(&fix, id)));
    }
    assert_true(faulty.refused > 0);
    SSD_UNTIL(&fix, ssd_stats(&fix).backlog == 0);
    assert_int_equal(ssd_get(&fix, kept, 2), BT_OK); /* reads go on */
    assert_int_equal(ssd_write(&fix, id, 0), BT_ERR_UNAVAILABLE);
    uint32_t refused = faulty.refused;
    SSD_UNTIL(&fix, faulty.refused > refused + 2); /* it keeps trying */
    assert_false(ssd_stats(&fix).up);
    faulty.write_errno = faulty.sync_errno = 0;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_int_equal(ssd_get(&fix, kept, 2), BT_OK);
    ssd_put(&fix, id);
    ssd_reopen(&fix);
    assert_int_equal(ssd_get(&fix, id++, 2), BT_OK);
    assert_int_equal(ssd_stats(&fix).crc_errors, 0);
}

static void full(void **state)
{
    (void)state;
    for (int32_t good = 0; good < 12; good += 1 + good) {
        refuses(ENOSPC, 0, good);
    }
}

static void broken(void **state)
{
    (void)state;
    for (int32_t good = 0; good < 12; good += 1 + good) {
        refuses(EIO, 0, good);
    }
}

static void not_synced(void **state)
{
    (void)state;
    for (int32_t good = 0; good < 12; good += 1 + good) {
        refuses(0, EIO, good);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(full, setup, teardown),
        cmocka_unit_test_setup_teardown(broken, setup, teardown),
        cmocka_unit_test_setup_teardown(not_synced, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
