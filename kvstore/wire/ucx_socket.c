/* How UCX writes to a TCP socket. This function replaces the one of libucs: libuct finds it first,
 * because the program's symbols come before those of its libraries. Transfer thread. */
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <ucs/sys/sock.h>

#include "kvstore/wire/ucx_priv.h"

#define KNOWN_MAJOR 1
#define KNOWN_MINOR 13

/* Does the same as the function of libucs, except that it never reports the end of a connection.
 * The reason is a bug: if writing reports the end, UCX 1.13.1 completes a message that is sent
 * without a copy twice (in tcp_ep.c: uct_tcp_ep_handle_disconnected, then uct_tcp_ep_sendv). Then
 * it fails an assertion, or completes another message by mistake. If reading reports the end, UCX
 * completes the message once. So after an error this function returns "would block" and shuts the
 * socket down. Reading, which UCX always does, then reports the end, after it has delivered what
 * the peer had sent before.
 *
 * Alternatives: copying each message, which costs a third of the rate; testing the socket before
 * each write, but a reset may come in between; keeping requests until the endpoint is gone, but the
 * assertion fails all the same. */
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
        (void)shutdown(fd, SHUT_RDWR); /* an error means that the connection has ended already */
    }
    return UCS_ERR_NO_PROGRESS;
}

/* Another version of UCX may write with another function; tests/cluster/test_wire_faults.py checks
 * that. */
bool bt_ucx_may_send_from_memory(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major == KNOWN_MAJOR && minor == KNOWN_MINOR &&
           dlsym(RTLD_DEFAULT, "ucs_socket_sendv_nb") == (void *)ucs_socket_sendv_nb;
}
