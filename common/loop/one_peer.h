/* Listening sockets that serve one peer each, as UCX's do (a port for every network path). UCX
 * keeps every connection there, also silent ones, so a stranger could use up all descriptors of the
 * process. Any thread. */
#ifndef BT_COMMON_LOOP_ONE_PEER_H
#define BT_COMMON_LOOP_ONE_PEER_H

#include <stdbool.h>
#include <stdint.h>

#define BT_ONE_PEER_MAX 8 /* a peer makes one or two */

/* From now on each listening socket of this process has at most `limit` connections at once, 1 to
 * BT_ONE_PEER_MAX; 0: any number, as at the start. Earlier ones stay and are not counted. */
void bt_one_peer_limit(uint32_t max);
/* accept has returned a connection of this listening socket. False: it has enough of them, and the
 * caller closes this one. */
bool bt_one_peer_came(int listener, int fd);

#endif
