/* The io_uring engine of the SSD tier's block I/O. One thread owns the ring. It first submits the
 * operations that the control thread has queued, then verifies the bytes that were read, so that
 * the disk is busy meanwhile. The slab's data area is registered once, in pieces of at most 1 GiB
 * (the kernel's limit), so that operations need not pin pages. */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kvstore/ssd/io.h"

#define PIECE_MAX   (1ull << 30)
#define CHECK_BYTES (1u << 20) /* bytes to verify before the thread looks at the ring again */
/* If the ring is full, its thread is woken when this fraction has ended. */
#define WAIT_DIVISOR 4u

struct ring {
    struct io_uring r;
    uint64_t piece; /* bytes of a registered piece; 0: nothing is registered */
    uint32_t in_flight;
    struct bt_ssd_queue ended; /* operations to be verified and given to the loop */
    bool kick_armed;
    uint64_t kick; /* the eventfd's value is read into this field */
};

/* Index of the registered piece that holds op's buffer, -1: none. */
static int piece_of(const struct bt_ssd_io *io, const struct ring *g, const struct bt_ssd_op *op)
{
    const uint8_t *mem = io->c.mem, *at = op->buf;
    if (g->piece == 0 || at < mem || at + op->len > mem + io->c.mem_bytes) {
        return -1;
    }
    return (int)((uint64_t)(at - mem) / g->piece);
}

static void prepare(const struct bt_ssd_io *io, struct ring *g, struct bt_ssd_op *op)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&g->r);
    BT_ASSERT(sqe != NULL); /* the ring has room for depth operations and the kick */
    uint8_t *at = (uint8_t *)op->buf + op->moved;
    uint32_t left = op->len - op->moved;
    uint64_t off = op->off + op->moved;
    int piece = piece_of(io, g, op);
    if (piece >= 0 && op->write) {
        io_uring_prep_write_fixed(sqe, io->c.fd, at, left, off, piece);
    } else if (piece >= 0) {
        io_uring_prep_read_fixed(sqe, io->c.fd, at, left, off, piece);
    } else if (op->write) {
        io_uring_prep_write(sqe, io->c.fd, at, left, off);
    } else {
        io_uring_prep_read(sqe, io->c.fd, at, left, off);
    }
    io_uring_sqe_set_data(sqe, op);
}

static void completed(const struct bt_ssd_io *io, struct ring *g, struct bt_ssd_op *op, int res)
{
    if (res > 0) {
        op->moved += (uint32_t)res;
    }
    if ((res > 0 && op->moved < op->len) || res == -EINTR || res == -EAGAIN) {
        prepare(io, g, op); /* submits the rest of the transfer */
        return;
    }
    op->res = res > 0 ? 0 : res < 0 ? res : -EIO;
    g->in_flight--;
    bt_ssd_queue_put(&g->ended, op);
}

static void reap(const struct bt_ssd_io *io, struct ring *g)
{
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&g->r, &cqe) == 0) {
        struct bt_ssd_op *op = io_uring_cqe_get_data(cqe);
        int res = cqe->res;
        io_uring_cqe_seen(&g->r, cqe);
        if (op == NULL) {
            g->kick_armed = false;
        } else {
            completed(io, g, op, res);
        }
    }
}

/* Prepares queued operations, up to the depth. false: the thread must stop. */
static bool fill(struct bt_ssd_io *io, struct ring *g)
{
    struct bt_ssd_op *op;
    pthread_mutex_lock(&io->lock);
    bool stop = io->stop;
    while (!stop && g->in_flight < io->c.depth && (op = bt_ssd_io_next(io)) != NULL) {
        prepare(io, g, op);
        g->in_flight++;
    }
    io->sleepy = g->in_flight < io->c.depth && g->ended.head == NULL;
    pthread_mutex_unlock(&io->lock);
    return !stop || g->in_flight > 0 || g->ended.head != NULL;
}

static void arm_kick(const struct bt_ssd_io *io, struct ring *g)
{
    if (!g->kick_armed) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&g->r);
        BT_ASSERT(sqe != NULL);
        io_uring_prep_read(sqe, io->kick_efd, &g->kick, sizeof(g->kick), 0);
        io_uring_sqe_set_data(sqe, NULL);
        g->kick_armed = true;
    }
}

static void check(struct bt_ssd_io *io, struct ring *g)
{
    struct bt_ssd_queue checked;
    struct bt_ssd_op *op;
    bt_ssd_queue_init(&checked);
    for (uint32_t bytes = 0; bytes < CHECK_BYTES && (op = bt_ssd_queue_get(&g->ended)) != NULL;) {
        bytes += op->finish != NULL ? BT_MIN(op->len, CHECK_BYTES) : 0;
        bt_ssd_io_finish(op);
        bt_ssd_queue_put(&checked, op);
    }
    bt_ssd_io_give(io, &checked);
}

static void *ring_thread(void *arg)
{
    struct bt_ssd_io *io = arg;
    struct ring *g = io->uring;
    if (g->r.flags & IORING_SETUP_R_DISABLED) { /* from now on only this thread may use it */
        BT_ASSERT(syscall(SYS_io_uring_register, g->r.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL,
                          0) == 0); /* the function for it in liburing 2.3 is not exported */
    }
    while (fill(io, g)) {
        /* Waits only when there is nothing to verify: for one completion or, while the ring is
         * full, for several, because each wake-up takes time and the disk has enough work. */
        bool idle = g->ended.head == NULL;
        uint32_t n = g->in_flight < io->c.depth ? 1 : BT_MAX(io->c.depth / WAIT_DIVISOR, 1u);
        arm_kick(io, g);
        int rc = idle ? io_uring_submit_and_wait(&g->r, n) : io_uring_submit_and_get_events(&g->r);
        BT_ASSERT(rc >= 0 || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
        reap(io, g);
        if (!idle) { /* otherwise first give work to the disk */
            check(io, g);
        }
    }
    return NULL;
}

/* Registers the slab. If that fails (locked memory is limited), buffers are pinned for each
 * operation. */
static void register_mem(const struct bt_ssd_io *io, struct ring *g)
{
    if (io->c.mem_bytes == 0 || io->c.mem_unit == 0 || io->c.mem_unit > PIECE_MAX) {
        return;
    }
    uint64_t piece = PIECE_MAX / io->c.mem_unit * io->c.mem_unit;
    uint32_t n = (uint32_t)BT_DIV_UP(io->c.mem_bytes, piece);
    struct iovec *iov = bt_calloc(n, sizeof(*iov));
    for (uint32_t i = 0; i < n; i++) {
        iov[i].iov_base = (uint8_t *)io->c.mem + i * piece;
        iov[i].iov_len = BT_MIN(piece, io->c.mem_bytes - i * piece);
    }
    if (io_uring_register_buffers(&g->r, iov, n) == 0) {
        g->piece = piece;
    }
    free(iov);
}

/* From kernel 6.1 on the kernel can hold completions until the thread asks for them; otherwise each
 * one interrupts the thread. */
static int ring_init(struct bt_ssd_io *io, struct ring *g)
{
    const unsigned quiet =
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
    int rc = io_uring_queue_init(io->c.depth + 2, &g->r, quiet);
    return rc == -EINVAL ? io_uring_queue_init(io->c.depth + 2, &g->r, 0) : rc;
}

bool bt_ssd_uring_start(struct bt_ssd_io *io, const char **why_p)
{
    struct ring *g = bt_calloc(1, sizeof(*g));
    int rc = ring_init(io, g);
    if (rc != 0) {
        *why_p = strerror(-rc);
        free(g);
        return false;
    }
    register_mem(io, g);
    bt_ssd_queue_init(&g->ended);
    io->uring = g;
    io->kind = g->piece != 0 ? "io_uring" : "io_uring without registered buffers";
    if (pthread_create(&io->threads[0], NULL, ring_thread, io) != 0) {
        *why_p = "no thread can be started";
        bt_ssd_uring_free(io);
        return false;
    }
    io->n_threads = 1;
    return true;
}

void bt_ssd_uring_free(struct bt_ssd_io *io)
{
    struct ring *g = io->uring;
    io_uring_queue_exit(&g->r); /* also ends the read of the kick */
    free(g);
    io->uring = NULL;
}
