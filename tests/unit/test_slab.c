/* The slab file: creation, errors, ownership, and what a worker may do with its mapping. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/slab/slab.h"

static char path[128], err[512];
static struct bt_kv_layout layout;
static struct bt_kv_key root;

static int setup(void **state)
{
    (void)state;
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-slab-%d", (int)getpid());
    assert_int_equal(bt_kv_layout_gqa(16, 3, 2, 64, BT_DT_BF16, 0, &layout), BT_OK);
    memset(root.b, 3, sizeof(root.b));
    err[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

static bt_status_t try_create(const char *at, uint64_t bytes, uint64_t incarnation,
                              struct bt_slab **s_p)
{
    struct bt_slab_spec spec = {
        .path = at, .bytes = bytes, .layout = &layout, .root = &root, .incarnation = incarnation};
    return bt_slab_create(&spec, NULL, NULL, s_p, err, sizeof(err));
}

static struct bt_slab *create(uint64_t bytes)
{
    struct bt_slab *s = NULL;
    if (try_create(path, bytes, 42, &s) != BT_OK) {
        fail_msg("%s", err);
    }
    return s;
}

static int reopen(void)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static void note(void *arg, double fraction)
{
    double *last = arg;
    assert_true(fraction >= *last && fraction <= 1.0);
    *last = fraction;
}

/* For a test that ends the process: the file must not outlive it. */
static pid_t owner;
static void unlink_at_exit(void)
{
    if (getpid() == owner) { /* and not with the children that tests fork */
        unlink(path);
    }
}

static void create_and_map(void **state)
{
    (void)state;
    double last = 0;
    struct bt_slab *s = NULL, *m = NULL;
    assert_int_equal(bt_slab_create(&(struct bt_slab_spec){.path = path,
                                                           .bytes = 8u << 20,
                                                           .layout = &layout,
                                                           .root = &root,
                                                           .incarnation = 42},
                                    note, &last, &s, err, sizeof(err)),
                     BT_OK);
    assert_true(last > 0.99);
    assert_true(s->owner);
    const struct bt_slab_super *su = s->super;
    assert_true(su->file_bytes <= 8u << 20);
    assert_true(su->file_bytes + 3 * su->slot_bytes > 8u << 20); /* as many slots as fit */
    assert_int_equal(su->slot_bytes % 4096, 0);
    assert_true(su->slot_bytes >= layout.block_bytes);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, su->file_bytes);
    assert_true((uint64_t)st.st_blocks * 512 >= su->file_bytes); /* reserved, not sparse */
    assert_int_equal(st.st_mode & 0777, 0660);

    int fd = reopen();
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_OK);
    close(fd); /* it has its own */
    assert_false(m->owner);
    uint32_t lastslot = su->n_slots - 1;
    memset(bt_slab_data(s, lastslot), 0xAB, su->slot_bytes);
    assert_memory_equal(bt_slab_data(m, lastslot), bt_slab_data(s, lastslot), su->slot_bytes);
    bt_flow_raise(&m->flows[su->n_flow_words - 1], 3, 9);
    assert_int_equal(bt_flow_read(&s->flows[su->n_flow_words - 1], 3), 9);
    assert_int_equal(bt_flow_read(&s->flows[su->n_flow_words - 1], 2), 0); /* another epoch */
    atomic_store(&s->headers[lastslot].state, bt_slot_word(7, BT_SLOT_SEALED));
    assert_int_equal(bt_slot_generation(atomic_load(&m->headers[lastslot].state)), 7);
    assert_int_equal(bt_slot_state(atomic_load(&m->headers[lastslot].state)), BT_SLOT_SEALED);
    bt_slab_unmap(m);
    bt_slab_unmap(s);
}

/* In a child: does a write to p end the process by SIGSEGV? */
static bool write_faults(volatile uint8_t *p)
{
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL);
        *p = 1;
        _exit(0);
    }
    int st;
    assert_int_equal(waitpid(pid, &st, 0), pid);
    return !(WIFEXITED(st) && WEXITSTATUS(st) == 0);
}

static void worker_cannot_write_headers(void **state)
{
    (void)state;
    struct bt_slab *s = create(1u << 20), *m = NULL;
    int fd = reopen();
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_OK);
    assert_true(write_faults((uint8_t *)(uintptr_t)m->super));
    assert_true(write_faults((uint8_t *)m->headers));
    assert_true(write_faults((uint8_t *)m->crcs));
    assert_false(write_faults((uint8_t *)m->flows));
    assert_false(write_faults(m->data));
    close(fd);
    bt_slab_unmap(m);
    bt_slab_unmap(s);
}

/* The process that moves KV for the kvstore stores CRCs, and no more than that. */
static void mover_writes_rows_only(void **state)
{
    (void)state;
    struct bt_slab *s = create(1u << 20), *m = NULL;
    int fd = bt_slab_open_again(s);
    assert_int_equal(bt_slab_map_rows(fd, &layout, &root, &m, err, sizeof(err)), BT_OK);
    const uint32_t last = m->super->n_slots * m->super->n_layers - 1;
    assert_true(write_faults((uint8_t *)(uintptr_t)m->super));
    assert_true(write_faults((uint8_t *)m->headers));
    assert_true(write_faults((uint8_t *)m->headers + m->super->n_slots * sizeof(*m->headers) - 1));
    assert_false(write_faults((uint8_t *)m->crcs));
    m->crcs[last] = 77;
    assert_int_equal(s->crcs[last], 77);
    assert_false(write_faults(m->data));
    close(fd);
    bt_slab_unmap(m);
    bt_slab_unmap(s);
}

static void larger_than_shm(void **state)
{
    (void)state;
    struct statvfs v;
    struct bt_slab *s = NULL;
    assert_int_equal(statvfs("/dev/shm", &v), 0);
    uint64_t total = (uint64_t)v.f_blocks * v.f_frsize;
    assert_int_equal(try_create(path, total + (1ull << 30), 1, &s), BT_ERR_EXHAUSTED);
    assert_null(s);
    assert_non_null(strstr(err, "--shm-size"));
    assert_non_null(strstr(err, "kvstore.slab_bytes"));
    char have[64];
    snprintf(have, sizeof(have), "has %llu MiB", (unsigned long long)(total >> 20));
    assert_non_null(strstr(err, have));
    assert_int_equal(access(path, F_OK), -1); /* nothing is left behind */
}

static void too_small(void **state)
{
    (void)state;
    struct bt_slab *s = NULL;
    assert_int_equal(try_create(path, 20000, 1, &s), BT_ERR_INVALID);
    assert_non_null(strstr(err, "at least"));
    assert_int_equal(access(path, F_OK), -1);
}

static void no_such_folder(void **state)
{
    (void)state;
    struct bt_slab *s = NULL;
    assert_int_equal(try_create("/nonexistent/slab", 1u << 20, 1, &s), BT_ERR_IO);
    assert_non_null(strstr(err, "/nonexistent/slab"));
}

/* A file that is no slab is somebody's: a wrong kvstore.slab_path must not cost it. */
static void what_is_no_slab_stays(void **state)
{
    (void)state;
    struct bt_slab *s = NULL;
    char text[64] = {0};
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs("somebody's only copy of something", f) > 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(try_create(path, 1u << 20, 1, &s), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "not a slab"));
    assert_non_null(strstr(err, "kvstore.slab_path"));
    f = fopen(path, "re");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    assert_int_equal(fclose(f), 0);
    assert_string_equal(text, "somebody's only copy of something");
    /* One that was being made when its kvstore was killed is none either, but nobody's. */
    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(truncate(path, 1u << 20), 0);
    bt_slab_unmap(create(1u << 20));
    assert_int_equal(unlink(path), 0);
}

/* While its owner lives nobody takes it, even if a mapping worker outlives nothing; afterwards the
 * next kvstore makes it anew and the worker's old mapping stays whole. */
static void one_owner(void **state)
{
    (void)state;
    struct bt_slab *s = create(1u << 20), *t = NULL, *m = NULL;
    char uuid[40];
    memcpy(uuid, s->super->uuid, sizeof(uuid));
    assert_int_equal(try_create(path, 1u << 20, 2, &t), BT_ERR_EXISTS);
    assert_non_null(strstr(err, "another running kvstore"));
    int fd = reopen();
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_OK);
    close(fd);
    memset(m->data, 0x5A, 64);
    bt_slab_unmap(s); /* the owner is gone without unlinking, as after kill -9 */

    assert_int_equal(try_create(path, 1u << 20, 3, &t), BT_OK);
    assert_int_equal(t->super->incarnation, 3);
    assert_memory_not_equal(t->super->uuid, uuid, sizeof(uuid));
    assert_int_equal(t->data[0], 0);
    m->data[0] = 0x77; /* goes to the old file */
    assert_int_equal(t->data[0], 0);
    assert_int_equal(m->data[1], 0x5A);
    bt_slab_unmap(m);
    bt_slab_unmap(t);
}

static void map_refuses_others(void **state)
{
    (void)state;
    struct bt_slab *s = create(1u << 20), *m = NULL;
    struct bt_kv_layout other;
    struct bt_kv_key other_root = root;
    int fd = reopen();
    assert_int_equal(bt_kv_layout_gqa(16, 3, 2, 128, BT_DT_BF16, 0, &other), BT_OK);
    assert_int_equal(bt_slab_map(fd, &other, &root, &m, err, sizeof(err)), BT_ERR_MISMATCH);
    assert_non_null(strstr(err, "layout"));
    other_root.b[0] ^= 1;
    assert_int_equal(bt_slab_map(fd, &layout, &other_root, &m, err, sizeof(err)), BT_ERR_MISMATCH);
    assert_non_null(strstr(err, "root key"));

    struct bt_slab_super *su = (struct bt_slab_super *)(uintptr_t)s->super;
    su->n_slots += 1000; /* a damaged page, then one that lies consistently */
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_ERR_MISMATCH);
    assert_non_null(strstr(err, "checksum"));
    su->n_slots -= 1000;
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_OK);
    bt_slab_unmap(m);
    assert_int_equal(ftruncate(fd, (off_t)su->file_bytes - 4096), 0);
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_ERR_MISMATCH);
    assert_non_null(strstr(err, "sizes"));
    assert_int_equal(ftruncate(fd, 100), 0);
    assert_int_equal(bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)), BT_ERR_MISMATCH);
    close(fd);
    bt_slab_unmap(s);
}

static void crc_is_seeded(void **state)
{
    (void)state;
    uint8_t seg[256];
    struct bt_kv_key a, b;
    memset(seg, 9, sizeof(seg));
    bt_slab_private_key(1, 1, 4, &a);
    bt_slab_private_key(1, 2, 4, &b);
    assert_memory_not_equal(&a, &b, sizeof(a)); /* another epoch, another name */
    bt_slab_private_key(1, 1, 4, &b);
    assert_memory_equal(&a, &b, sizeof(a));
    uint32_t c = bt_slab_segment_crc(&a, 1, 77, seg, sizeof(seg));
    assert_int_equal(c, bt_slab_segment_crc(&b, 1, 77, seg, sizeof(seg)));
    b.b[31] ^= 1;
    assert_int_not_equal(c, bt_slab_segment_crc(&b, 1, 77, seg, sizeof(seg)));
    assert_int_not_equal(c, bt_slab_segment_crc(&a, 2, 77, seg, sizeof(seg)));
    assert_int_not_equal(c, bt_slab_segment_crc(&a, 1, 78, seg, sizeof(seg)));
    assert_int_not_equal(c, bt_slab_segment_crc(&a, 1, 77, seg, sizeof(seg) - 1));
    seg[100] ^= 4;
    assert_int_not_equal(c, bt_slab_segment_crc(&a, 1, 77, seg, sizeof(seg)));
}

static void only_the_own_file_goes(void **state)
{
    (void)state;
    struct bt_slab *s = create(1u << 20);
    char moved[160];
    snprintf(moved, sizeof(moved), "%s-moved", path);
    assert_int_equal(rename(path, moved), 0);
    assert_int_equal(bt_slab_unlink(s, path, err, sizeof(err)), BT_ERR_NOT_FOUND);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(bt_slab_unlink(s, path, err, sizeof(err)), BT_ERR_EXISTS);
    assert_non_null(strstr(err, "left as it is"));
    assert_int_equal(access(path, F_OK), 0);
    unlink(path);
    assert_int_equal(symlink(moved, path), 0); /* to the slab, but somebody else's */
    assert_int_equal(bt_slab_unlink(s, path, err, sizeof(err)), BT_ERR_EXISTS);
    unlink(path);
    assert_int_equal(rename(moved, path), 0);
    assert_int_equal(bt_slab_unlink(s, path, err, sizeof(err)), BT_OK);
    assert_int_not_equal(access(path, F_OK), 0);
    bt_slab_unmap(s);
}

/* `test_slab cut WHO AREA FILE`: a process of its own, because cmocka has SIGBUS for itself. Maps a
 * slab, cuts the file, touches what is gone: does not come back. Areas: the first page, data, and a
 * file that is no slab, mapped where one was. */
static bt_status_t adopt(struct bt_slab **s_p)
{
    struct bt_slab_spec spec = {
        .path = path, .bytes = 1u << 20, .layout = &layout, .root = &root, .incarnation = 43};
    return bt_slab_adopt(&spec, 0, s_p, err, sizeof(err));
}

/* Whoever else may write to the file may write into everybody's cache. */
static void only_an_own_slab_is_adopted(void **state)
{
    struct bt_slab *s = create(1u << 20);
    char other[160];
    (void)state;
    snprintf(other, sizeof(other), "%s-other", path);
    bt_slab_unmap(s);
    assert_int_equal(chmod(path, 0666), 0);
    assert_int_equal(adopt(&s), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(err, "lets other users open it"));
    assert_int_equal(chmod(path, 0660), 0);
    assert_int_equal(link(path, other), 0);
    assert_int_equal(adopt(&s), BT_ERR_NOT_FOUND);
    assert_non_null(strstr(err, "more than one name"));
    unlink(other);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, 1, (gid_t)-1), 0);
        assert_int_equal(adopt(&s), BT_ERR_NOT_FOUND);
        assert_non_null(strstr(err, "another user"));
        assert_int_equal(chown(path, 0, 54321), 0);
        assert_int_equal(adopt(&s), BT_ERR_NOT_FOUND);
        assert_non_null(strstr(err, "a group that is not"));
        assert_int_equal(chown(path, 0, getegid()), 0);
    }
    assert_int_equal(adopt(&s), BT_OK);
    bt_slab_unmap(s);
    /* An empty file that everybody may have open is replaced, not filled. */
    struct stat before, after;
    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(chmod(path, 0666), 0);
    assert_int_equal(stat(path, &before), 0);
    int held = open(path, O_RDWR | O_CLOEXEC);
    s = create(1u << 20);
    assert_int_equal(stat(path, &after), 0);
    assert_int_not_equal(before.st_ino, after.st_ino);
    assert_int_equal(after.st_mode & 07777, 0660);
    close(held);
    assert_int_equal(bt_slab_unlink(s, path, err, sizeof(err)), BT_OK);
    bt_slab_unmap(s);
}

static int cut_and_touch(char **argv)
{
    char other[160];
    struct bt_slab *s = NULL, *m = NULL;
    setup(NULL);
    snprintf(path, sizeof(path), "%s", argv[4]);
    snprintf(other, sizeof(other), "%s-other", path);
    (void)signal(SIGBUS, SIG_DFL); /* not a sanitizer's report */
    int fd = try_create(path, 1u << 20, 42, &s) == BT_OK ? reopen() : -1;
    if (fd < 0 || bt_slab_map(fd, &layout, &root, &m, err, sizeof(err)) != BT_OK) {
        return 3;
    }
    struct bt_slab *by = strcmp(argv[2], "worker") == 0 ? m : s;
    volatile uint8_t *p = (uint8_t *)(uintptr_t)by->super;
    if (strcmp(argv[3], "data") == 0) {
        p = bt_slab_data(by, 1);
    } else if (strcmp(argv[3], "other") == 0) {
        bt_slab_unmap(by);
        fd = open(other, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, 4096) != 0 ||
            mmap((void *)(uintptr_t)p, 4096, PROT_READ, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0) !=
                p) {
            return 4;
        }
        return ftruncate(fd, 0) != 0 ? 5 : *p;
    }
    return truncate(path, 0) != 0 ? 6 : *p;
}

/* How that ended, as by waitpid; what it said on stderr goes to text. */
static int run_cut(char *who, char *area, char *text, size_t cap)
{
    int ends[2], st;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        char *argv[] = {"test_slab", "cut", who, area, path, NULL};
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execv("/proc/self/exe", argv);
        _exit(7);
    }
    close(ends[1]);
    size_t n = 0;
    ssize_t got;
    while ((got = read(ends[0], text + n, cap - 1 - n)) > 0) {
        n += (size_t)got;
    }
    text[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &st, 0), pid);
    unlink(path);
    return st;
}

/* The time of a line, as the log writes it. */
static time_t line_time(const char *line)
{
    struct tm tm = {0};
    assert_non_null(strptime(line, "ts=%Y-%m-%dT%H:%M:%S.", &tm));
    return timegm(&tm);
}

static void cut_while_mapped(void **state)
{
    static char *const cases[][2] = {
        {"owner", "first"}, {"owner", "data"}, {"worker", "first"}, {"worker", "data"}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char text[8192];
        time_t from = time(NULL);
        int st = run_cut(cases[i][0], cases[i][1], text, sizeof(text));
        assert_true(WIFSIGNALED(st) && WTERMSIG(st) == SIGBUS);
        assert_non_null(strstr(text, " level=error "));
        assert_non_null(strstr(text, " ev=slab_cut "));
        assert_non_null(strstr(text, path));
        assert_non_null(strstr(text, "start this daemon again"));
        assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); /* one line */
        assert_in_range(line_time(text), from, time(NULL));
    }
}

/* Another file's SIGBUS is not the slab's, although it lies where a slab was. */
static void cut_elsewhere(void **state)
{
    (void)state;
    char text[8192], other[160];
    snprintf(other, sizeof(other), "%s-other", path);
    int st = run_cut("worker", "other", text, sizeof(text));
    unlink(other);
    assert_true(WIFSIGNALED(st) && WTERMSIG(st) == SIGBUS);
    assert_string_equal(text, "");
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "cut") == 0) {
        return cut_and_touch(argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(create_and_map, setup, teardown),
        cmocka_unit_test_setup_teardown(worker_cannot_write_headers, setup, teardown),
        cmocka_unit_test_setup_teardown(mover_writes_rows_only, setup, teardown),
        cmocka_unit_test_setup_teardown(larger_than_shm, setup, teardown),
        cmocka_unit_test_setup_teardown(too_small, setup, teardown),
        cmocka_unit_test_setup_teardown(no_such_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_no_slab_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(one_owner, setup, teardown),
        cmocka_unit_test_setup_teardown(map_refuses_others, setup, teardown),
        cmocka_unit_test_setup_teardown(crc_is_seeded, setup, teardown),
        cmocka_unit_test_setup_teardown(only_the_own_file_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(only_an_own_slab_is_adopted, setup, teardown),
        cmocka_unit_test_setup_teardown(cut_while_mapped, setup, teardown),
        cmocka_unit_test_setup_teardown(cut_elsewhere, setup, teardown),
    };
    owner = getpid();
    atexit(unlink_at_exit);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
