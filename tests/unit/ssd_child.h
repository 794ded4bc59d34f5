/* A child that writes blocks to an SSD tier until it is ended, and what must be there afterwards.
 */
#ifndef TESTS_UNIT_SSD_CHILD_H
#define TESTS_UNIT_SSD_CHILD_H

#include "ssd_fixture.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

struct ledger {               /* shared with the child */
    _Atomic uint64_t next;    /* first id not yet begun */
    _Atomic uint64_t durable; /* ids below were found by the child */
};

/* The child: writes blocks and reads old ones until it is killed. */
static inline void writer(const char *dir, struct ledger *led, const struct bt_ssd_sys *sys)
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
static inline void check_after(const char *dir, const struct ledger *led)
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
static inline void await(const struct ledger *led, uint64_t id, uint32_t us)
{
    for (uint32_t ms = 0; led->next < id && ms < 10000; ms++) {
        usleep(1000);
    }
    usleep(us);
}

/* It may have ended between making its slab and unlinking it. */
static inline void unlink_slab_of(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-ssd-%d", (int)pid);
    unlink(path);
}

/* Starts this program again as `what` (see main): a fork alone would miss RocksDB's threads. */
static inline pid_t child(const char *what, const char *dir, int fd, uint64_t id, uint32_t us,
                          uint32_t seed)
{
    char args[4][24];
    snprintf(args[0], sizeof(args[0]), "%d", fd);
    snprintf(args[1], sizeof(args[1]), "%llu", (unsigned long long)id);
    snprintf(args[2], sizeof(args[2]), "%u", us);
    snprintf(args[3], sizeof(args[3]), "%u", seed);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", what, what, dir, args[0], args[1], args[2], args[3], NULL);
        _exit(1);
    }
    return pid;
}

static inline struct ledger *ledger_map(int fd)
{
    struct ledger *led = mmap(NULL, sizeof(*led), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(led != MAP_FAILED);
    return led;
}

/* fd is inherited by children. */
static inline struct ledger *ledger_create(int *fd_p)
{
    *fd_p = memfd_create("ledger", 0);
    assert_true(*fd_p >= 0);
    assert_int_equal(ftruncate(*fd_p, sizeof(struct ledger)), 0);
    return ledger_map(*fd_p);
}

#endif
