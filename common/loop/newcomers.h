/* Connections to a gRPC port on which no authorized peer has called yet. gRPC 1.51 takes any number
 * of them and keeps each until its handshake times out, so a stranger without a certificate could
 * use up a daemon's descriptors and memory. Here they are limited: the newest bt_newcomers_max()
 * stay, an older one is shut down. A member of the cluster calls within milliseconds, and then its
 * connection no longer counts. Any thread. */
#ifndef BT_COMMON_LOOP_NEWCOMERS_H
#define BT_COMMON_LOOP_NEWCOMERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

/* Connections that come to this TCP port from now on are newcomers. */
void bt_newcomers_guard(uint16_t port);
/* The last server on this port has ended. */
void bt_newcomers_unguard(uint16_t port);
/* accept has returned this connection. False: the caller closes it, because gRPC has not yet closed
 * what was shut down before it. Always true unless its port is guarded. */
bool bt_newcomers_came(int fd);
/* The peer at this address is authorized. peer: as from grpc_call_get_peer, "ipv4:10.0.0.1:4711" or
 * "ipv6:%5B::1%5D:4711" (also with plain brackets). */
void bt_newcomers_known(const char *peer);
/* The limit: at most 512, and an eighth of the descriptors that the process may have. Together with
 * those that are shut down and not yet closed they have at most twice as many descriptors. */
uint32_t bt_newcomers_max(void);

#endif
