/* Pairs the network cards of two machines, and chooses the pair for the next message. Pure: cards,
 * load and clock are arguments. */
#ifndef BT_KVSTORE_WIRE_NICS_H
#define BT_KVSTORE_WIRE_NICS_H

#include "common/base/base.h"

#define BT_NICS_MAX 8 /* cards of one machine */

struct bt_nic {
    uint8_t family;   /* 4 or 6 */
    uint8_t prefix;   /* bits of addr that name its network */
    uint8_t addr[16]; /* network order; 4 or 16 bytes of it */
    int32_t node;     /* NUMA; -1: not known */
    bool up;          /* its link is up, as its machine reports */
};

struct bt_nic_pair {
    uint32_t local, remote; /* indices of the two lists */
};

/* Returns whether both are in one network, by the longer of their prefixes. */
bool bt_nics_same_net(const struct bt_nic *a, const struct bt_nic *b);

/* Pairs each local card with at most one remote card and vice versa. First cards on one network,
 * those whose links are up before others, and those at equal positions of the lists before others.
 * Then the remaining cards of one address family, in the order of the lists: a router may connect
 * them. Loopback is paired with loopback only. Returns the number of pairs; pairs_p [BT_NICS_MAX]
 * is ordered by `local`. */
uint32_t bt_nics_match(const struct bt_nic *local, uint32_t n_local, const struct bt_nic *remote,
                       uint32_t n_remote, struct bt_nic_pair *pairs_p);

/* Speed of a path: bytes and the time that they took. Both decay, so that recent messages count
 * most. */
struct bt_nic_rate {
    double bytes, seconds;
    uint64_t done_ns; /* the last message's end */
};

/* A message of n bytes, posted at posted_ns, was done at now_ns. If it waited behind another one,
 * the time counts from the end of that one. */
void bt_nic_rate_add(struct bt_nic_rate *r, uint64_t bytes, uint64_t posted_ns, uint64_t now_ns);
/* Bytes a second; 0: unknown. An old estimate rises, so that a path that was slow is tried again.
 */
double bt_nic_rate_get(const struct bt_nic_rate *r, uint64_t now_ns);

struct bt_nic_load { /* of one path */
    uint64_t in_flight;
    double rate;  /* bt_nic_rate_get */
    int32_t node; /* of the local card */
};

/* The path that is expected to finish a message of n bytes first. node: NUMA node of its memory
 * (-1: unknown); a card of another node must be faster by a third. n > 0. */
uint32_t bt_nics_pick(const struct bt_nic_load *paths, uint32_t n, uint64_t bytes, int32_t node);

#endif
