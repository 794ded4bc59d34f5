/* Queues, completions and the thread engine of the SSD tier's block I/O. */
#include "kvstore/ssd/io.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/log/log.h"

#define IO_THREADS 4

void bt_ssd_queue_init(struct bt_ssd_queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

void bt_ssd_queue_put(struct bt_ssd_queue *q, struct bt_ssd_op *op)
{
    op->next = NULL;
    *q->tail = op;
    q->tail = &op->next;
}

struct bt_ssd_op *bt_ssd_queue_get(struct bt_ssd_queue *q)
{
    struct bt_ssd_op *op = q->head;
    if (op != NULL) {
        q->head = op->next;
        if (q->head == NULL) {
            q->tail = &q->head;
        }
    }
    return op;
}

static void ring_bell(int efd)
{
    uint64_t one = 1;
    ssize_t n = write(efd, &one, sizeof(one));
    (void)n; /* the counter cannot be full */
}

struct bt_ssd_op *bt_ssd_io_next(struct bt_ssd_io *io)
{
    struct bt_ssd_op *op = bt_ssd_queue_get(&io->reads);
    return op != NULL ? op : bt_ssd_queue_get(&io->writes);
}

void bt_ssd_io_finish(struct bt_ssd_op *op)
{
    if (op->res == 0 && op->finish != NULL) {
        op->finish(op);
    }
}

/* Appends all operations of `from` to `to`. */
static void queue_move(struct bt_ssd_queue *to, struct bt_ssd_queue *from)
{
    if (from->head != NULL) {
        *to->tail = from->head;
        to->tail = from->tail;
        bt_ssd_queue_init(from);
    }
}

void bt_ssd_io_give(struct bt_ssd_io *io, struct bt_ssd_queue *q)
{
    if (q->head == NULL) {
        return;
    }
    pthread_mutex_lock(&io->lock);
    bool first = io->ready.head == NULL;
    queue_move(&io->ready, q);
    pthread_mutex_unlock(&io->lock);
    if (first) { /* otherwise the loop was told already and will take these too */
        ring_bell(io->ready_efd);
    }
}

/* ---- threads ---- */

/* Transfers all bytes, in as many calls as necessary. */
static int transfer(const struct bt_ssd_io *io, struct bt_ssd_op *op)
{
    const struct bt_ssd_sys *sys = io->c.sys;
    while (op->moved < op->len) {
        uint8_t *at = (uint8_t *)op->buf + op->moved;
        size_t left = op->len - op->moved;
        off_t off = (off_t)(op->off + op->moved);
        ssize_t n;
        if (sys != NULL) {
            n = op->write ? sys->pwrite(sys->arg, io->c.fd, at, left, off)
                          : sys->pread(sys->arg, io->c.fd, at, left, off);
        } else {
            n = op->write ? pwrite(io->c.fd, at, left, off) : pread(io->c.fd, at, left, off);
            n = n < 0 ? -errno : n;
        }
        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) {
            /* 0 bytes are an error: the file is as long as its slots. */
            return n < 0 ? (int)n : -EIO;
        }
        op->moved += (uint32_t)n;
    }
    return 0;
}

static void *io_thread(void *arg)
{
    struct bt_ssd_io *io = arg;
    struct bt_ssd_queue ended;
    bt_ssd_queue_init(&ended);
    pthread_mutex_lock(&io->lock);
    while (!io->stop) {
        struct bt_ssd_op *op = bt_ssd_io_next(io);
        if (op == NULL) {
            pthread_cond_wait(&io->wake, &io->lock);
            continue;
        }
        pthread_mutex_unlock(&io->lock);
        op->res = transfer(io, op);
        bt_ssd_io_finish(op);
        bt_ssd_queue_put(&ended, op);
        bt_ssd_io_give(io, &ended);
        pthread_mutex_lock(&io->lock);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static bool threads_start(struct bt_ssd_io *io)
{
    io->kind = "threads";
    while (io->n_threads < BT_MIN((uint32_t)IO_THREADS, io->c.depth)) {
        if (pthread_create(&io->threads[io->n_threads], NULL, io_thread, io) != 0) {
            break;
        }
        io->n_threads++;
    }
    return io->n_threads > 0;
}

/* ---- control thread ---- */

static void run_ready(struct bt_ssd_io *io)
{
    struct bt_ssd_queue q;
    bt_ssd_queue_init(&q);
    pthread_mutex_lock(&io->lock);
    queue_move(&q, &io->ready);
    pthread_mutex_unlock(&io->lock);
    for (struct bt_ssd_op *op; (op = bt_ssd_queue_get(&q)) != NULL;) {
        op->done(op);
    }
}

static void on_ready(void *arg, uint32_t events)
{
    struct bt_ssd_io *io = arg;
    uint64_t n;
    (void)events;
    if (read(io->ready_efd, &n, sizeof(n)) == (ssize_t)sizeof(n)) {
        run_ready(io);
    }
}

bt_status_t bt_ssd_io_create(const struct bt_ssd_io_config *c, struct bt_ssd_io **io_p)
{
    struct bt_ssd_io *io = bt_calloc(1, sizeof(*io));
    const char *why = NULL;
    io->c = *c;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->wake, NULL);
    bt_ssd_queue_init(&io->reads);
    bt_ssd_queue_init(&io->writes);
    bt_ssd_queue_init(&io->ready);
    io->ready_efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    io->kick_efd = eventfd(0, EFD_CLOEXEC);
    bool up = io->ready_efd >= 0 && io->kick_efd >= 0;
    if (up && c->sys == NULL && !bt_ssd_uring_start(io, &why)) {
        BT_WARN("ssd_no_io_uring", "why=%s instead=%s", why,
                "pread and pwrite on threads are used instead, which is slower");
    }
    if (!up || (io->uring == NULL && !threads_start(io))) {
        if (io->ready_efd >= 0) {
            close(io->ready_efd);
        }
        if (io->kick_efd >= 0) {
            close(io->kick_efd);
        }
        free(io);
        return BT_ERR_IO;
    }
    io->w = bt_loop_fd_add(c->loop, io->ready_efd, EPOLLIN, on_ready, io);
    *io_p = io;
    return BT_OK;
}

void bt_ssd_io_use(struct bt_ssd_io *io, int fd)
{
    BT_ASSERT(io->c.fd == -1);
    io->c.fd = fd; /* I/O threads use it only for operations, which they get under the lock */
}

void bt_ssd_io_submit(struct bt_ssd_io *io, struct bt_ssd_op *op)
{
    op->moved = 0;
    op->res = 0;
    op->submitted_ns = bt_mono_ns();
    pthread_mutex_lock(&io->lock);
    bt_ssd_queue_put(op->write ? &io->writes : &io->reads, op);
    bool kick = io->sleepy;
    io->sleepy = false;
    if (io->uring == NULL) {
        pthread_cond_signal(&io->wake);
    }
    pthread_mutex_unlock(&io->lock);
    if (kick) {
        ring_bell(io->kick_efd);
    }
}

const char *bt_ssd_io_kind(const struct bt_ssd_io *io)
{
    return io->kind;
}

void bt_ssd_io_destroy(struct bt_ssd_io *io)
{
    if (io == NULL) {
        return;
    }
    pthread_mutex_lock(&io->lock);
    io->stop = true;
    pthread_cond_broadcast(&io->wake);
    pthread_mutex_unlock(&io->lock);
    ring_bell(io->kick_efd);
    for (uint32_t i = 0; i < io->n_threads; i++) {
        pthread_join(io->threads[i], NULL);
    }
    if (io->uring != NULL) {
        bt_ssd_uring_free(io);
    }
    bt_loop_fd_del(io->c.loop, io->w);
    run_ready(io);
    for (struct bt_ssd_op *op; (op = bt_ssd_io_next(io)) != NULL;) {
        op->res = -ECANCELED;
        op->done(op);
    }
    close(io->ready_efd);
    close(io->kick_efd);
    pthread_cond_destroy(&io->wake);
    pthread_mutex_destroy(&io->lock);
    free(io);
}
