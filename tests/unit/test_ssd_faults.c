/* The SSD tier when things go wrong: a disk that refuses or does not answer, kill -9 at any moment.
 * A block that is found has the right bytes, always. */
#include "ssd_child.h"

#include <sys/stat.h>

#include "loop_wait.h"

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
    struct bt_ssd_stats stats;
    bt_ssd_stats(fix.ssd, &stats);
    assert_string_equal(stats.io, "threads");
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
    fix.conf.stall_ms = 1500; /* longer than a busy disk takes */
    ssd_reopen(&fix);
    ssd_put(&fix, 1);
    disk.delay_us = 6000000;
    assert_int_equal(ssd_write(&fix, 2, 0), BT_OK);
    uint64_t t = bt_mono_ns();
    SSD_UNTIL(&fix, !ssd_stats(&fix).up); /* long before it answers */
    assert_true(bt_mono_ns() - t < 5900000000ull);
    disk.delay_us = 0;
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_true(ssd_has(&fix, 2) || bt_mono_ns() - t > 5900000000ull); /* not before it answered */
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

/* The index cannot be opened for a while. */
static void index_that_cannot_be_opened(void **state)
{
    char cmd[300];
    (void)state;
    ssd_put(&fix, 1);
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
    snprintf(cmd, sizeof(cmd), "mv '%s/index' '%s/away' && mkdir -p '%s/index/CURRENT'", fix.dir,
             fix.dir, fix.dir);
    assert_int_equal(system(cmd), 0);
    char err[256];
    assert_int_equal(bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)), BT_OK);
    SSD_UNTIL(&fix, !ssd_stats(&fix).up);
    assert_int_equal(ssd_write(&fix, 2, 0), BT_ERR_UNAVAILABLE);
    snprintf(cmd, sizeof(cmd), "rm -r '%s/index' && mv '%s/away' '%s/index'", fix.dir, fix.dir,
             fix.dir);
    assert_int_equal(system(cmd), 0);
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    assert_int_equal(ssd_get(&fix, 1, 0), BT_OK); /* it was not emptied meanwhile */
    ssd_put(&fix, 2);
    assert_int_equal(ssd_get(&fix, 2, 0), BT_OK);
}

static void in_dir(const char *format)
{
    char cmd[400];
    snprintf(cmd, sizeof(cmd), format, fix.dir);
    assert_int_equal(system(cmd), 0);
}

static off_t blocks_bytes(void)
{
    struct stat st;
    char path[128];
    snprintf(path, sizeof(path), "%s/blocks", fix.dir);
    assert_int_equal(stat(path, &st), 0);
    return st.st_size;
}

/* Somebody empties the slab file: what was there is a miss, nothing wrong is served, and what is
 * written from then on is there after a restart. */
static void a_file_that_is_cut(void **state)
{
    (void)state;
    for (uint64_t id = 1; id <= 10; id++) {
        ssd_put(&fix, id);
    }
    off_t bytes = blocks_bytes();
    in_dir("truncate -s 0 '%s/blocks'");
    SSD_UNTIL(&fix, blocks_bytes() == bytes);
    assert_true(ssd_stats(&fix).up);
    for (uint64_t id = 1; id <= 10; id++) {
        bt_status_t st = ssd_get(&fix, id, 3);
        assert_true(st == BT_ERR_DATA_LOSS || st == BT_ERR_IO);
        assert_int_equal(ssd_get(&fix, id, 3), BT_ERR_NOT_FOUND);
    }
    for (uint64_t id = 1; id <= 10; id++) {
        ssd_put(&fix, id);
    }
    ssd_reopen(&fix);
    for (uint64_t id = 1; id <= 10; id++) {
        assert_int_equal(ssd_get(&fix, id, 3), BT_OK);
    }
}

/* Somebody removes the index: what can be found is recorded anew. */
static void an_index_that_is_removed(void **state)
{
    (void)state;
    for (uint64_t id = 1; id <= 10; id++) {
        ssd_put(&fix, id);
    }
    in_dir("rm -r '%s/index'");
    SSD_UNTIL(&fix, !ssd_stats(&fix).up);
    SSD_UNTIL(&fix, ssd_stats(&fix).up);
    for (uint64_t id = 5; id <= 15; id++) {
        if (id > 10) {
            ssd_put(&fix, id);
        }
        assert_int_equal(ssd_get(&fix, id, 3), BT_OK);
    }
    ssd_reopen(&fix);
    for (uint64_t id = 1; id <= 15; id++) {
        assert_int_equal(ssd_get(&fix, id, 3), BT_OK);
    }
}

/* Another file has its name: it serves on, and is taken up again once it is moved back. */
static void a_file_that_is_replaced(void **state)
{
    (void)state;
    ssd_put(&fix, 1);
    in_dir("cd '%s' && mv blocks away && : > blocks");
    loop_run_for(fix.loop, 600);
    ssd_put(&fix, 2);
    assert_int_equal(ssd_get(&fix, 1, 3), BT_OK);
    in_dir("cd '%s' && mv away blocks");
    loop_run_for(fix.loop, 600);
    ssd_reopen(&fix);
    assert_int_equal(ssd_get(&fix, 1, 3), BT_OK);
    assert_int_equal(ssd_get(&fix, 2, 3), BT_OK);
}

/* ---- kill -9 ---- */

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

/* argv: write FOLDER LEDGER_FD ... */
static int child_main(char **argv)
{
    close(2);
    writer(argv[2], ledger_map(atoi(argv[3])), NULL);
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
        cmocka_unit_test_setup_teardown(index_that_cannot_be_opened, setup, teardown),
        cmocka_unit_test_setup_teardown(a_file_that_is_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(an_index_that_is_removed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_file_that_is_replaced, setup, teardown),
        cmocka_unit_test(kill_at_any_moment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
