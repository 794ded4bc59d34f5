/* The SSD tier's block I/O by itself, on the engine that this machine gives and on threads: every
 * operation ends once, whatever the depth; the ring's thread does not let the disk wait. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvstore/ssd/io.h"
#include "loop_wait.h"

#define PAGE  4096u
#define PAGES 64u

struct fix {
    struct bt_loop *loop;
    struct bt_ssd_io *io;
    uint8_t *mem; /* PAGES pages */
    int fd;       /* page i of the file: all bytes i */
    char path[64];
};

struct op {
    struct bt_ssd_op op;
    struct fix *f;
    uint32_t page, left; /* left: so often it is submitted again */
    uint32_t finished, done;
};

static ssize_t sys_pread(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    return pread(fd, buf, len, off);
}

static ssize_t sys_pwrite(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    return pwrite(fd, buf, len, off);
}

static const struct bt_ssd_sys on_threads = {.pread = sys_pread, .pwrite = sys_pwrite};

static void start(struct fix *f, uint32_t depth, const struct bt_ssd_sys *sys)
{
    memset(f, 0, sizeof(*f));
    snprintf(f->path, sizeof(f->path), "/tmp/baton-ssd-io-XXXXXX");
    f->fd = mkstemp(f->path);
    assert_true(f->fd >= 0);
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(posix_memalign((void **)&f->mem, PAGE, (size_t)PAGES * PAGE), 0);
    for (uint32_t i = 0; i < PAGES; i++) {
        memset(f->mem, (int)i, PAGE);
        assert_int_equal(pwrite(f->fd, f->mem, PAGE, (off_t)i * PAGE), PAGE);
    }
    memset(f->mem, 0xff, (size_t)PAGES * PAGE);
    struct bt_ssd_io_config c = {.loop = f->loop,
                                 .fd = f->fd,
                                 .depth = depth,
                                 .mem = f->mem,
                                 .mem_bytes = (size_t)PAGES * PAGE,
                                 .mem_unit = PAGE,
                                 .sys = sys};
    assert_int_equal(bt_ssd_io_create(&c, &f->io), BT_OK);
}

static void stop(struct fix *f)
{
    bt_ssd_io_destroy(f->io);
    bt_loop_destroy(f->loop);
    free(f->mem);
    close(f->fd);
    unlink(f->path);
}

static void on_finish(struct bt_ssd_op *op)
{
    struct op *o = BT_CONTAINER_OF(op, struct op, op);
    const uint8_t *p = op->buf;
    o->finished++;
    if (p[0] != (uint8_t)o->page || p[PAGE - 1] != (uint8_t)o->page) {
        op->res = -EBADMSG;
    }
}

static void submit(struct op *o)
{
    memset(o->op.buf, 0xff, PAGE);
    bt_ssd_io_submit(o->f->io, &o->op);
}

static void on_done(struct bt_ssd_op *op)
{
    struct op *o = BT_CONTAINER_OF(op, struct op, op);
    assert_int_equal(op->res, 0);
    o->done++;
    assert_int_equal(o->finished, o->done); /* checked before it is told */
    if (o->left > 0) {
        o->left--;
        submit(o);
    }
}

static void prepare(struct fix *f, struct op *o, uint32_t page)
{
    *o = (struct op){.f = f, .page = page};
    o->op.buf = f->mem + (size_t)page * PAGE;
    o->op.off = (uint64_t)page * PAGE;
    o->op.len = PAGE;
    o->op.finish = on_finish;
    o->op.done = on_done;
}

/* `width` operations that each come again: below the depth (the ring's thread sleeps with room), at
 * it and far above it (others wait in the queue, nobody wakes the thread for them). */
static void rounds(uint32_t depth, uint32_t width, const struct bt_ssd_sys *sys)
{
    struct fix f;
    struct op ops[PAGES];
    uint64_t n;
    start(&f, depth, sys);
    for (uint32_t i = 0; i < width; i++) {
        prepare(&f, &ops[i], i);
        ops[i].left = 200;
        submit(&ops[i]);
    }
    do {
        bt_loop_poll(f.loop, 1000);
        n = 0;
        for (uint32_t i = 0; i < width; i++) {
            n += ops[i].done;
        }
    } while (n < width * 201ull);
    for (uint32_t i = 0; i < 50; i++) { /* one at a time, each to a thread that sleeps */
        submit(&ops[0]);
        LOOP_UNTIL(f.loop, ops[0].done == 202 + i);
    }
    stop(&f);
}

static void every_operation_ends_once(void **state)
{
    (void)state;
    static const uint32_t depth_width[][2] = {{1, 1}, {1, 7},  {3, 2},   {4, 4},
                                              {4, 5}, {8, 64}, {16, 15}, {16, 64}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(depth_width); i++) {
        rounds(depth_width[i][0], depth_width[i][1], NULL);
        rounds(depth_width[i][0], depth_width[i][1], &on_threads);
    }
}

static struct op pair[2];
static _Atomic bool second_came;

/* I/O THREAD: the check of the first takes until the disk has read the second. */
static void slow_check(struct bt_ssd_op *op)
{
    const volatile uint8_t *at = pair[1].op.buf;
    (void)op;
    for (uint32_t ms = 0; ms < 10000 && *at == 0xff; ms++) {
        usleep(1000);
    }
    second_came = *at == pair[1].page;
}

static void mark_done(struct bt_ssd_op *op)
{
    BT_CONTAINER_OF(op, struct op, op)->done++;
}

/* With a depth of one: the second is submitted when the first has ended, before it is checked. */
static void disk_works_while_it_checks(void **state)
{
    (void)state;
    struct fix f;
    start(&f, 1, NULL);
    if (strcmp(bt_ssd_io_kind(f.io), "threads") == 0) {
        stop(&f);
        skip();
    }
    prepare(&f, &pair[0], 1);
    prepare(&f, &pair[1], 2);
    pair[0].op.finish = slow_check;
    pair[1].op.finish = NULL;
    pair[0].op.done = pair[1].op.done = mark_done;
    submit(&pair[0]);
    submit(&pair[1]);
    LOOP_UNTIL(f.loop, pair[0].done == 1 && pair[1].done == 1);
    assert_true(second_came);
    stop(&f);
}

static void end(struct bt_ssd_op *op)
{
    struct op *o = BT_CONTAINER_OF(op, struct op, op);
    assert_true(op->res == 0 || op->res == -ECANCELED);
    o->done++;
}

/* Destroyed with a full ring and a queue: what is under way ends, the rest is cancelled. */
static void nothing_is_lost_at_the_end(void **state)
{
    (void)state;
    struct op ops[PAGES];
    for (uint32_t round = 0; round < 40; round++) {
        struct fix f;
        start(&f, 4, round % 4 == 3 ? &on_threads : NULL);
        for (uint32_t i = 0; i < PAGES; i++) {
            prepare(&f, &ops[i], i);
            ops[i].op.done = end;
            submit(&ops[i]);
        }
        if (round % 2 == 1) {
            bt_loop_poll(f.loop, 1);
        }
        stop(&f);
        for (uint32_t i = 0; i < PAGES; i++) {
            assert_int_equal(ops[i].done, 1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_ends_once),
        cmocka_unit_test(disk_works_while_it_checks),
        cmocka_unit_test(nothing_is_lost_at_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
