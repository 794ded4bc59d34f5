/* The network cards of this machine that KV may use, as kvstore.wire.listen names them, and the
 * system's data about them. Nothing here needs UCX. */
#ifndef BT_KVSTORE_WIRE_CARDS_H
#define BT_KVSTORE_WIRE_CARDS_H

#include "kvstore/wire/nics.h"

struct bt_wire_card {
    char address[64]; /* numeric, one spelling */
    int port;         /* of KV over gRPC; 0: any */
    char ifname[64];
    struct bt_nic nic;
};

/* Finds the interfaces that have the addresses of listen (NULL-terminated; ADDRESS, ADDRESS:PORT or
 * [ADDRESS]:PORT) and checks that they may be used. cards_p [BT_NICS_MAX] in the order of listen. A
 * card may be down (nic.up), but not all of them. ERR_CONFIG: err names key, interface and remedy.
 */
bt_status_t bt_wire_cards(const char *const *listen, bool allow_routable,
                          struct bt_wire_card *cards_p, uint32_t *n_p, char *err,
                          size_t err_cap) BT_MUST_CHECK;

/* Checks the addresses as far as possible without this machine: their number, that they are
 * numeric, without a port unless over_grpc, and private unless allow_routable. ERR_CONFIG with err
 * as above. */
bt_status_t bt_wire_listen_check(const char *const *listen, bool over_grpc, bool allow_routable,
                                 char *err, size_t err_cap) BT_MUST_CHECK;

/* true: the interface exists, is up and has a carrier. */
bool bt_wire_link_up(const char *ifname);
/* NUMA node of the page at p, which is mapped; -1: not known. Any thread. */
int32_t bt_wire_memory_node(const void *p);

#endif
