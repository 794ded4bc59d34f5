/* The core of common/rpc: one completion queue, one thread that waits for it, and an eventfd that
 * passes completed operations to the owner's loop. The thread uses only the queue of completed
 * operations. */
#include "common/rpc/rpc.h"

#include <errno.h>
#include <grpc/support/log.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/log/log.h"
#include "common/rpc/tls_priv.h"

#define OP_MAGIC 0x6f705f52u

/* ---- gRPC as a whole ---- */

static void on_grpc_log(gpr_log_func_args *args)
{
    if (args->severity == GPR_LOG_SEVERITY_ERROR && !bt_tls_log(args->file, args->message)) {
        const char *file = strrchr(args->file, '/');
        BT_WARN("grpc", "at=%s:%d msg=%s", file == NULL ? args->file : file + 1, args->line,
                args->message);
    }
}

void bt_rpc_grpc_init(void)
{
    gpr_set_log_function(on_grpc_log);
    grpc_init();
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
}

void bt_rpc_grpc_shutdown(void)
{
    grpc_shutdown_blocking();
}

/* ---- operations ---- */

void bt_rpc_op_init(struct bt_rpc_op *op, void (*fn)(void *owner, bool success), void *owner)
{
    *op = (struct bt_rpc_op){.fn = fn, .owner = owner};
}

void bt_rpc_op_begin(struct bt_rpc *rpc, struct bt_rpc_op *op)
{
    BT_ASSERT(atomic_load_explicit(&op->magic, memory_order_relaxed) == 0);
    atomic_store_explicit(&op->magic, OP_MAGIC, memory_order_release);
    rpc->n_ops++;
}

void bt_rpc_batch(struct bt_rpc *rpc, grpc_call *call, const grpc_op *ops, size_t n,
                  struct bt_rpc_op *op)
{
    bt_rpc_op_begin(rpc, op);
    grpc_call_error err = grpc_call_start_batch(call, ops, n, op, NULL);
    if (err != GRPC_CALL_OK) {
        BT_ERROR("grpc_batch_refused", "err=%d first_op=%d", err, ops[0].op);
    }
    BT_ASSERT(err == GRPC_CALL_OK);
}

static void *cq_thread(void *arg)
{
    struct bt_rpc *rpc = arg;
    bt_loop_short_slices(BT_LOOP_SLICE_US);
    for (;;) {
        grpc_event ev =
            grpc_completion_queue_next(rpc->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (ev.type == GRPC_QUEUE_SHUTDOWN) {
            return NULL;
        }
        struct bt_rpc_op *op = ev.tag;
        BT_ASSERT(ev.type == GRPC_OP_COMPLETE &&
                  atomic_load_explicit(&op->magic, memory_order_acquire) == OP_MAGIC);
        pthread_mutex_lock(&rpc->lock);
        op->success = ev.success != 0;
        op->next = NULL;
        bool first = rpc->done_head == NULL;
        *rpc->done_tail = op;
        rpc->done_tail = &op->next;
        pthread_cond_signal(&rpc->done_cond);
        pthread_mutex_unlock(&rpc->lock);
        if (first) {
            uint64_t one = 1;
            ssize_t n = write(rpc->efd, &one, sizeof(one));
            BT_ASSERT(n == sizeof(one) || errno == EAGAIN);
        }
    }
}

static struct bt_rpc_op *take_done(struct bt_rpc *rpc, bool wait)
{
    pthread_mutex_lock(&rpc->lock);
    while (wait && rpc->done_head == NULL) {
        pthread_cond_wait(&rpc->done_cond, &rpc->lock);
    }
    struct bt_rpc_op *op = rpc->done_head;
    rpc->done_head = NULL;
    rpc->done_tail = &rpc->done_head;
    pthread_mutex_unlock(&rpc->lock);
    return op;
}

static void complete(struct bt_rpc *rpc, struct bt_rpc_op *op, bool success)
{
    BT_ASSERT(rpc->n_ops > 0);
    rpc->n_ops--;
    atomic_store_explicit(&op->magic, 0, memory_order_relaxed);
    op->fn(op->owner, success);
}

static void dispatch(struct bt_rpc *rpc, struct bt_rpc_op *op)
{
    rpc->dispatching = true;
    while (op != NULL) {
        struct bt_rpc_op *next = op->next; /* fn may start the op again, or free it */
        complete(rpc, op, op->success);
        op = next;
    }
    rpc->dispatching = false;
}

/* Takes completed operations directly from gRPC's queue for up to this time. A stream reads one
 * message at a time, and the next one is usually there when the read is armed again. If the thread
 * and the loop had to take turns for each message, a busy machine would deliver messages later than
 * they come, with a growing delay of a tenth of a second and more. The thread takes what is
 * left. */
#define AT_ONCE_NS 1000000ull

static void take_at_once(struct bt_rpc *rpc)
{
    uint64_t until_ns = bt_mono_ns() + AT_ONCE_NS; /* the loop has other work too */
    rpc->dispatching = true;
    do {
        grpc_event ev = grpc_completion_queue_next(rpc->cq, gpr_time_0(GPR_CLOCK_MONOTONIC), NULL);
        if (ev.type != GRPC_OP_COMPLETE) {
            break;
        }
        struct bt_rpc_op *op = ev.tag;
        BT_ASSERT(atomic_load_explicit(&op->magic, memory_order_acquire) == OP_MAGIC);
        complete(rpc, op, ev.success != 0);
    } while (bt_mono_ns() < until_ns);
    rpc->dispatching = false;
}

static void on_efd(void *arg, uint32_t events)
{
    struct bt_rpc *rpc = arg;
    uint64_t n;
    (void)events;
    if (read(rpc->efd, &n, sizeof(n)) < 0) {
        BT_ASSERT(errno == EAGAIN || errno == EINTR);
    }
    dispatch(rpc, take_done(rpc, false));
    take_at_once(rpc);
}

/* ---- life ---- */

bt_status_t bt_rpc_create(struct bt_loop *loop, struct bt_rpc **rpc_p)
{
    int efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (efd < 0) {
        BT_ERROR("rpc_create_failed", "what=eventfd errno=%d", errno);
        return BT_ERR_IO;
    }
    struct bt_rpc *rpc = bt_calloc(1, sizeof(*rpc));
    rpc->loop = loop;
    rpc->efd = efd;
    rpc->done_tail = &rpc->done_head;
    pthread_mutex_init(&rpc->lock, NULL);
    pthread_cond_init(&rpc->done_cond, NULL);
    bt_list_init(&rpc->servers);
    bt_list_init(&rpc->channels);
    bt_list_init(&rpc->orphan_streams);
    bt_list_init(&rpc->orphan_calls);

    /* Threads of gRPC and of this file must not take signals that the loop reads from its
     * signalfd. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bt_rpc_grpc_init();
    rpc->cq = grpc_completion_queue_create_for_next(NULL);
    int err = pthread_create(&rpc->thread, NULL, cq_thread, rpc);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err != 0) {
        BT_ERROR("rpc_create_failed", "what=pthread_create errno=%d", err);
        grpc_completion_queue_shutdown(rpc->cq);
        grpc_completion_queue_destroy(rpc->cq);
        bt_rpc_grpc_shutdown();
        pthread_cond_destroy(&rpc->done_cond);
        pthread_mutex_destroy(&rpc->lock);
        close(efd);
        free(rpc);
        return BT_ERR_IO;
    }
    rpc->watcher = bt_loop_fd_add(loop, efd, EPOLLIN, on_efd, rpc);
    *rpc_p = rpc;
    return BT_OK;
}

void bt_rpc_destroy(struct bt_rpc *rpc)
{
    if (rpc == NULL) {
        return;
    }
    /* Inside a callback, the calling functions would continue with freed memory. */
    BT_ASSERT(!rpc->dispatching);
    rpc->dying = true;
    while (!bt_list_empty(&rpc->servers)) {
        bt_rpc_server_end(bt_rpc_server_of(rpc->servers.next), false);
    }
    while (!bt_list_empty(&rpc->channels)) {
        bt_rpc_channel_end(bt_rpc_channel_of(rpc->channels.next), false);
    }
    bt_rpc_calls_abandon(rpc);
    /* Streams whose server or channel was destroyed were cancelled then: wait for their ops. */
    while (rpc->n_ops > 0) {
        dispatch(rpc, take_done(rpc, true));
    }
    BT_ASSERT(bt_list_empty(&rpc->orphan_streams) && bt_list_empty(&rpc->orphan_calls));
    grpc_completion_queue_shutdown(rpc->cq);
    pthread_join(rpc->thread, NULL);
    grpc_completion_queue_destroy(rpc->cq);
    bt_loop_fd_del(rpc->loop, rpc->watcher);
    close(rpc->efd);
    pthread_cond_destroy(&rpc->done_cond);
    pthread_mutex_destroy(&rpc->lock);
    bt_rpc_grpc_shutdown();
    free(rpc);
}

void bt_rpc_set_tls(struct bt_rpc *rpc, struct bt_tls *tls)
{
    rpc->tls = tls;
}

void bt_rpc_set_bulk(struct bt_rpc *rpc)
{
    rpc->bulk = true;
}

struct bt_loop *bt_rpc_loop(const struct bt_rpc *rpc)
{
    return rpc->loop;
}

/* ---- bytes ---- */

void bt_rpc_bytes_open(grpc_byte_buffer *bb, struct bt_rpc_bytes *b)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *first;
    *b = (struct bt_rpc_bytes){.data = ""};
    if (grpc_byte_buffer_length(bb) == 0 || !grpc_byte_buffer_reader_init(&reader, bb)) {
        return;
    }
    /* A message in one piece, the usual case, is read without a copy. */
    if (grpc_byte_buffer_reader_peek(&reader, &first) &&
        GRPC_SLICE_LENGTH(*first) == grpc_byte_buffer_length(bb)) {
        b->data = GRPC_SLICE_START_PTR(*first);
        b->len = GRPC_SLICE_LENGTH(*first);
        grpc_byte_buffer_reader_destroy(&reader);
        return;
    }
    grpc_byte_buffer_reader_destroy(&reader);
    BT_ASSERT(grpc_byte_buffer_reader_init(&reader, bb));
    b->copy = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    b->copied = true;
    b->data = GRPC_SLICE_START_PTR(b->copy);
    b->len = GRPC_SLICE_LENGTH(b->copy);
}

void bt_rpc_bytes_close(struct bt_rpc_bytes *b)
{
    if (b->copied) {
        grpc_slice_unref(b->copy);
    }
}

grpc_byte_buffer *bt_rpc_byte_buffer(const void *data, size_t len)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(data == NULL ? "" : data, len);
    grpc_byte_buffer *bb = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return bb;
}

grpc_byte_buffer *bt_rpc_byte_buffer_iov(const struct iovec *iov, size_t n, size_t len)
{
    grpc_slice slice = grpc_slice_malloc(len);
    uint8_t *to = GRPC_SLICE_START_PTR(slice);
    for (size_t i = 0; i < n; i++) {
        bt_copy(to, iov[i].iov_base, iov[i].iov_len);
        to += iov[i].iov_len;
    }
    grpc_byte_buffer *bb = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return bb;
}

struct iovec *bt_rpc_pieces(grpc_byte_buffer *bb, size_t *n_p)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;
    size_t n = 0, cap = 0;
    struct iovec *pieces = NULL;
    bool readable = grpc_byte_buffer_reader_init(&reader, bb);
    while (readable && grpc_byte_buffer_reader_peek(&reader, &slice)) {
        if (n == cap) {
            cap = cap == 0 ? 64 : 2 * cap;
            pieces = bt_realloc(pieces, cap * sizeof(*pieces));
        }
        pieces[n++] = (struct iovec){GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice)};
    }
    if (readable) {
        grpc_byte_buffer_reader_destroy(&reader);
    }
    *n_p = n;
    return pieces;
}
