/* Block I/O of the SSD tier, outside the control thread: io_uring with registered buffers if the
 * kernel allows it, otherwise pread and pwrite on a few threads. The caller owns the memory of an
 * operation and keeps it until `done` has run. `done` runs exactly once for each submitted
 * operation. Control thread unless marked. */
#ifndef BT_KVSTORE_SSD_IO_H
#define BT_KVSTORE_SSD_IO_H

#include <pthread.h>
#include <sys/types.h>

#include "common/base/base.h"
#include "common/loop/loop.h"

/* The system calls, replaceable by a test that wants a failing, slow or forgetful disk. Called on
 * I/O threads; return bytes or -errno. */
struct bt_ssd_sys {
    ssize_t (*pread)(void *arg, int fd, void *buf, size_t len, off_t off);
    ssize_t (*pwrite)(void *arg, int fd, const void *buf, size_t len, off_t off);
    int (*flush)(void *arg, int fd); /* fdatasync */
    void *arg;
};

struct bt_ssd_op {
    struct bt_ssd_op *next;
    bool write;
    void *buf; /* 4 KiB aligned, as off and len */
    uint64_t off;
    uint32_t len;
    uint32_t moved; /* bytes done */
    int res;        /* 0 or -errno, -ECANCELED: never tried */
    uint64_t submitted_ns;
    void (*finish)(
        struct bt_ssd_op *op);          /* I/O THREAD, after success; may set res. NULL: nothing */
    void (*done)(struct bt_ssd_op *op); /* the loop's thread; op is the caller's again */
};

struct bt_ssd_io_config {
    struct bt_loop *loop;
    int fd;         /* -1: bt_ssd_io_use says it later */
    uint32_t depth; /* operations under way at once */
    void *mem;      /* most buffers lie here: registered with the kernel in pieces */
    uint64_t mem_bytes;
    uint32_t mem_unit;            /* no buffer crosses a multiple of it */
    const struct bt_ssd_sys *sys; /* not NULL: threads that call these */
};

struct bt_ssd_io;

/* ERR_IO: no thread or descriptor to be had. */
bt_status_t bt_ssd_io_create(const struct bt_ssd_io_config *c,
                             struct bt_ssd_io **io_p) BT_MUST_CHECK;
/* Waits for operations under way; the others end with -ECANCELED. Every done runs inside. */
void bt_ssd_io_destroy(struct bt_ssd_io *io);
/* The file; before the first operation. */
void bt_ssd_io_use(struct bt_ssd_io *io, int fd);
/* Reads go before writes; otherwise first come, first served. */
void bt_ssd_io_submit(struct bt_ssd_io *io, struct bt_ssd_op *op);
/* "io_uring", "io_uring without registered buffers", "threads": for the log. */
const char *bt_ssd_io_kind(const struct bt_ssd_io *io);

/* ---- between io.c and its two engines; I/O threads ---- */
struct bt_ssd_queue {
    struct bt_ssd_op *head, **tail;
};
struct bt_ssd_io {
    struct bt_ssd_io_config c;
    pthread_mutex_t lock; /* of the queues and stop */
    pthread_cond_t wake;
    struct bt_ssd_queue reads, writes, ready;
    bool stop;
    bool sleepy; /* the ring's thread has room, waits and must be woken for an operation */
    int ready_efd, kick_efd;
    struct bt_loop_fd *w;
    const char *kind;
    pthread_t threads[8];
    uint32_t n_threads;
    void *uring; /* the ring of uring.c, NULL: threads */
};
void bt_ssd_queue_init(struct bt_ssd_queue *q);
void bt_ssd_queue_put(struct bt_ssd_queue *q, struct bt_ssd_op *op);
struct bt_ssd_op *bt_ssd_queue_get(struct bt_ssd_queue *q); /* NULL: it is empty */
/* Next operation or NULL; lock held. */
struct bt_ssd_op *bt_ssd_io_next(struct bt_ssd_io *io);
/* op has ended and its finish is due. */
void bt_ssd_io_finish(struct bt_ssd_op *op);
/* Hands finished operations to the loop with one wake-up; q is empty afterwards. */
void bt_ssd_io_give(struct bt_ssd_io *io, struct bt_ssd_queue *q);
/* false: the kernel refuses io_uring (why_p says how). */
bool bt_ssd_uring_start(struct bt_ssd_io *io, const char **why_p);
void bt_ssd_uring_free(struct bt_ssd_io *io); /* after its thread has ended */

#endif
