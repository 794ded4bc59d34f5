/* What UCX's active messages alone do, for tests/bench/wire.py: ucx_perftest sends one buffer over
 * and over, from the cache into the cache; this one goes through SPAN bytes on either side, as
 * blocks lie in a slab. No checks, no priorities. Settings: UCX_* of the environment.
 *
 *   ucx_am MESSAGE_BYTES SPAN_BYTES TOTAL_BYTES WINDOW_BYTES
 *
 * Prints gbps=, cpu_sender= and cpu_receiver= (CPU s/GB). Sleeps as the kvstore's wire does. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/clock.h"

#define AM_ID      2
#define SPIN_TURNS 32

static ucp_worker_h worker;
static int worker_fd;
static size_t message, span, total, window;
static uint8_t *memory;
static size_t posted, done; /* bytes */

static double cpu_s(void)
{
    struct timespec t;
    BT_ASSERT(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void must(ucs_status_t st, const char *what)
{
    if (st != UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucs_status_string(st));
        _exit(1);
    }
}

/* Progress; sleeps when there is none, or until fd is readable. */
static void turn(int fd)
{
    for (int i = 0; i < SPIN_TURNS; i++) {
        if (ucp_worker_progress(worker) != 0) {
            return;
        }
    }
    if (ucp_worker_arm(worker) == UCS_OK) {
        struct pollfd p[2] = {{.fd = worker_fd, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
        BT_ASSERT(poll(p, 2, 10000) > 0);
    }
}

static void on_sent(void *request, ucs_status_t st, void *arg)
{
    (void)arg;
    must(st, "send");
    ucp_request_free(request);
    done += message;
}

static void on_received(void *request, ucs_status_t st, size_t length, void *arg)
{
    (void)arg;
    must(st, "receive");
    ucp_request_free(request);
    done += length;
}

static ucs_status_t on_am(void *arg, const void *header, size_t header_len, void *data, size_t len,
                          const ucp_am_recv_param_t *param)
{
    uint8_t *to = memory + posted % span;
    (void)arg;
    (void)header;
    (void)header_len;
    posted += len;
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        memcpy(to, data, len);
        done += len;
        return UCS_OK;
    }
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb.recv_am = on_received};
    ucs_status_ptr_t r = ucp_am_recv_data_nbx(worker, data, to, len, &p);
    if (r == NULL) {
        done += len;
    } else if (UCS_PTR_IS_ERR(r)) {
        must(UCS_PTR_STATUS(r), "ucp_am_recv_data_nbx");
    }
    return UCS_INPROGRESS;
}

static void open_worker(void)
{
    ucp_context_h context;
    ucp_params_t cp = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                       .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_am_handler_param_t hp = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                               UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                                               UCP_AM_HANDLER_PARAM_FIELD_CB,
                                 .id = AM_ID,
                                 .flags = UCP_AM_FLAG_WHOLE_MSG,
                                 .cb = on_am};
    must(ucp_init(&cp, NULL, &context), "ucp_init");
    must(ucp_worker_create(context, &wp, &worker), "ucp_worker_create");
    must(ucp_worker_get_efd(worker, &worker_fd), "ucp_worker_get_efd");
    must(ucp_worker_set_am_recv_handler(worker, &hp), "ucp_worker_set_am_recv_handler");
    memory = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    BT_ASSERT(memory != MAP_FAILED);
    memset(memory, 1, span);
}

static void run_sender(int fd)
{
    size_t len;
    char address[4096];
    ucp_ep_h ep;
    BT_ASSERT(read(fd, &len, sizeof(len)) == sizeof(len) && len <= sizeof(address) &&
              read(fd, address, len) == (ssize_t)len);
    open_worker();
    ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                               UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                                 .address = (const ucp_address_t *)address,
                                 .err_mode = UCP_ERR_HANDLING_MODE_PEER};
    must(ucp_ep_create(worker, &ep_params, &ep), "ucp_ep_create");
    double cpu = cpu_s();
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb.send = on_sent};
    while (done < total) {
        while (posted < total && posted - done < window) {
            ucs_status_ptr_t r =
                ucp_am_send_nbx(ep, AM_ID, NULL, 0, memory + posted % span, message, &p);
            posted += message;
            if (r == NULL) {
                done += message;
            } else if (UCS_PTR_IS_ERR(r)) {
                must(UCS_PTR_STATUS(r), "ucp_am_send_nbx");
            }
        }
        if (done < total) { /* the last may have been taken at once */
            turn(-1);
        }
    }
    cpu = cpu_s() - cpu;
    BT_ASSERT(write(fd, &cpu, sizeof(cpu)) == sizeof(cpu));
    struct pollfd end = {.fd = fd, .events = POLLIN};
    while (poll(&end, 1, 1) == 0) { /* the last messages may still be in our hands */
        ucp_worker_progress(worker);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    int pair[2];
    if (argc != 5 || (message = strtoull(argv[1], NULL, 10)) == 0 ||
        (span = strtoull(argv[2], NULL, 10)) % message != 0 || span == 0 ||
        (total = strtoull(argv[3], NULL, 10)) % message != 0 ||
        (window = strtoull(argv[4], NULL, 10)) == 0) {
        fprintf(stderr, "usage: ucx_am MESSAGE SPAN TOTAL WINDOW, bytes; SPAN and TOTAL are "
                        "multiples of MESSAGE\n");
        return 2;
    }
    BT_ASSERT(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t pid = fork();
    BT_ASSERT(pid >= 0);
    if (pid == 0) {
        close(pair[0]);
        run_sender(pair[1]);
    }
    close(pair[1]);
    open_worker();
    ucp_address_t *address;
    size_t len;
    must(ucp_worker_get_address(worker, &address, &len), "ucp_worker_get_address");
    BT_ASSERT(write(pair[0], &len, sizeof(len)) == sizeof(len) &&
              write(pair[0], address, len) == (ssize_t)len);
    while (done == 0) { /* wire-up does not count, and the first messages with it */
        turn(-1);
    }
    size_t before = done;
    uint64_t start = bt_mono_ns();
    double cpu = cpu_s(), sender;
    while (done < total) {
        turn(-1);
    }
    double s = (double)(bt_mono_ns() - start) * 1e-9, gb = (double)(total - before) * 1e-9;
    cpu = cpu_s() - cpu;
    struct pollfd sent = {.fd = pair[0], .events = POLLIN};
    while (poll(&sent, 1, 1) == 0) { /* it waits for our acknowledgements */
        ucp_worker_progress(worker);
    }
    BT_ASSERT(read(pair[0], &sender, sizeof(sender)) == sizeof(sender));
    close(pair[0]);
    waitpid(pid, NULL, 0);
    printf("gbps=%.3f cpu_sender=%.4f cpu_receiver=%.4f\n", gb / s, sender / ((double)total * 1e-9),
           cpu / gb);
    return 0;
}
