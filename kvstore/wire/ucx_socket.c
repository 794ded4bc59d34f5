/* How UCX writes what lies in memory of ours to a TCP socket: our function in place of libucs's,
 * which libuct finds first because a program comes before its libraries. Transfer thread. */
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <ucs/sys/sock.h>

#include "kvstore/wire/ucx_priv.h"

#define KNOWN_MAJOR 1
#define KNOWN_MINOR 13

/* The same but for one thing: writing never learns of a connection's end. UCX 1.13.1 completes a
 * message that is sent without a copy twice when it does (tcp_ep.c: uct_tcp_ep_sendv does so behind
 * uct_tcp_ep_handle_disconnected, which has), and then ends with an assertion or completes another
 * message in its place. Reading completes it once. So what cannot be written "would block", and the
 * socket is shut down, so that reading, which UCX always waits for, says so at once, whatever the
 * error was, when it has brought what the peer had sent before.
 *
 * Other ways to the same: a copy of each message, which costs a third of the rate; a look at the
 * socket before a write, which a reset may follow; requests that stay until the endpoint is gone,
 * which the assertion does not heed. */
ucs_status_t ucs_socket_sendv_nb(int fd, struct iovec *iov, size_t iov_cnt, size_t *length_p)
{
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = iov_cnt};
    ssize_t n = sendmsg(fd, &m, MSG_NOSIGNAL);
    if (n > 0) {
        *length_p = (size_t)n;
        return UCS_OK;
    }
    *length_p = 0;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        (void)shutdown(fd, SHUT_RDWR); /* fails where the connection has ended already */
    }
    return UCS_ERR_NO_PROGRESS;
}

/* Another version may write by another function: tests/cluster/test_wire_faults.py would tell. */
bool bt_ucx_may_send_from_memory(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major == KNOWN_MAJOR && minor == KNOWN_MINOR &&
           dlsym(RTLD_DEFAULT, "ucs_socket_sendv_nb") == (void *)ucs_socket_sendv_nb;
}
