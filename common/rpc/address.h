/* Tells private addresses from those that strangers can reach. Pure. */
#ifndef BT_RPC_ADDRESS_H
#define BT_RPC_ADDRESS_H

#include <stdbool.h>

/* Returns whether text is a private address: loopback, RFC 1918, link local, fd00::/8. text: a
 * numeric address, IPv4 or IPv6 without brackets. Any other text is not private. */
bool bt_address_private(const char *text);
/* The same of host:port, [v6]:port, or localhost:port. */
bool bt_address_port_private(const char *text);

#endif
