/* Ports of loopback that stay a test's while nobody listens on them. Include after cmocka.h. */
#ifndef BT_TESTS_HOLD_PORT_H
#define BT_TESTS_HOLD_PORT_H

#include <arpa/inet.h>
#include <sys/socket.h>

/* Binds a socket to *port_p (0: to any, which it becomes) and does not listen: dials are refused,
 * no other process gets the port for a server or a connection, and a server with SO_REUSEADDR
 * (gRPC, etcd) may listen there. The caller closes what is returned. */
static inline int hold_port(int *port_p)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)*port_p),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    *port_p = ntohs(at.sin_port);
    return fd;
}

#endif
