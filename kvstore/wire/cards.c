/* The interfaces that UCX over TCP may bind to, and their properties on this machine. Plain UCX
 * authenticates no peer, so a routable address needs the configuration's permission. Control
 * thread, except for bt_wire_memory_node. */
#include "kvstore/wire/cards.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/mempolicy.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/rpc/address.h"

static bool addr_text(const struct sockaddr *sa, char *out, socklen_t cap)
{
    if (sa->sa_family == AF_INET) {
        return inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)sa)->sin_addr, out,
                         cap) != NULL;
    }
    return inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr, out,
                     cap) != NULL;
}

static bt_status_t fail(char *err, size_t cap, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, cap, fmt, ap);
    va_end(ap);
    return BT_ERR_CONFIG;
}

/* UCX never uses these addresses, whatever it is configured to. */
static bool ucx_skips(const struct sockaddr *sa)
{
    const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr;
    return sa->sa_family == AF_INET6 && (IN6_IS_ADDR_LOOPBACK(a) || IN6_IS_ADDR_LINKLOCAL(a));
}

static bool usable(const struct ifaddrs *i)
{
    return (i->ifa_flags & IFF_UP) && (i->ifa_flags & IFF_RUNNING);
}

/* Writes the address's bytes to out; returns their number. */
static uint32_t addr_bytes(const struct sockaddr *sa, uint8_t *out)
{
    if (sa->sa_family == AF_INET) {
        memcpy(out, &((const struct sockaddr_in *)(const void *)sa)->sin_addr, 4);
        return 4;
    }
    memcpy(out, &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr, 16);
    return 16;
}

/* The NUMA node of the card behind an interface; -1: the interface has none (bonds, tunnels). */
static int32_t node_of(const char *ifname)
{
    char path[128];
    int node = -1;
    snprintf(path, sizeof(path), "/sys/class/net/%s/device/numa_node", ifname);
    FILE *f = fopen(path, "r");
    if (f == NULL) {
        return -1;
    }
    if (fscanf(f, "%d", &node) != 1) {
        node = -1;
    }
    fclose(f);
    return node;
}

static void describe(const struct ifaddrs *i, struct bt_wire_card *card)
{
    uint8_t mask[16] = {0};
    uint32_t n = addr_bytes(i->ifa_addr, card->nic.addr);
    card->nic.family = n == 4 ? 4 : 6;
    card->nic.prefix = (uint8_t)(n * 8);
    if (i->ifa_netmask != NULL) {
        card->nic.prefix = 0;
        (void)addr_bytes(i->ifa_netmask, mask);
        while (card->nic.prefix < n * 8 &&
               (mask[card->nic.prefix / 8] << card->nic.prefix % 8 & 0x80) != 0) {
            card->nic.prefix++;
        }
    }
    snprintf(card->ifname, sizeof(card->ifname), "%s", i->ifa_name);
    card->nic.node = node_of(i->ifa_name);
    card->nic.up = usable(i);
}

/* UCX gets the name of an interface and binds to that interface's first address of the family. So
 * this must be the address that was checked. */
static bt_status_t find_interface(const struct ifaddrs *list, int family, bool alone,
                                  struct bt_wire_card *card, char *err, size_t err_cap)
{
    char text[INET6_ADDRSTRLEN];
    const char *want = card->address;
    const struct ifaddrs *mine = NULL;
    for (const struct ifaddrs *i = list; i != NULL && mine == NULL; i = i->ifa_next) {
        if (i->ifa_addr != NULL && i->ifa_addr->sa_family == family &&
            addr_text(i->ifa_addr, text, sizeof(text)) && strcmp(text, want) == 0) {
            mine = i;
        }
    }
    if (mine == NULL) {
        return fail(err, err_cap,
                    "kvstore.wire.listen: no interface of this machine has the address %s; give "
                    "one that `ip addr` shows",
                    want);
    }
    if (ucx_skips(mine->ifa_addr)) {
        return fail(
            err, err_cap,
            "kvstore.wire.listen: UCX uses neither ::1 nor link-local IPv6 addresses such as "
            "%s; on a single machine give 127.0.0.1, else another address of interface %s "
            "(IPv4, or IPv6 as in fd00::/8)",
            want, mine->ifa_name);
    }
    if (alone && !(mine->ifa_flags & IFF_UP)) {
        return fail(err, err_cap, "kvstore.wire.listen: interface %s of %s is down", mine->ifa_name,
                    want);
    }
    for (const struct ifaddrs *i = list; i != mine; i = i->ifa_next) {
        if (i->ifa_addr != NULL && i->ifa_addr->sa_family == family &&
            strcmp(i->ifa_name, mine->ifa_name) == 0 && !ucx_skips(i->ifa_addr) &&
            addr_text(i->ifa_addr, text, sizeof(text))) {
            return fail(
                err, err_cap,
                "kvstore.wire.listen: UCX binds to the first address of interface %s, which "
                "is %s and not %s; give that one",
                mine->ifa_name, text, want);
        }
    }
    describe(mine, card);
    return BT_OK;
}

/* Splits "ADDRESS", "ADDRESS:PORT" or "[ADDRESS]:PORT". A bare IPv6 address has several colons and
 * no port. *port_p 0: there is no port. Returns false if the port is not a number from 1 to
 * 65535. */
static bool split_port(const char *listen, char address[64], int *port_p)
{
    const char *colon = strrchr(listen, ':'), *end = colon;
    *port_p = 0;
    if (colon == NULL || (listen[0] != '[' && strchr(listen, ':') != colon)) {
        snprintf(address, 64, "%.63s", listen);
        return true;
    }
    if (listen[0] == '[') {
        listen++;
        end = colon - 1;
        if (*end != ']') {
            return false;
        }
    }
    snprintf(address, 64, "%.*s", (int)BT_MIN(end - listen, 63), listen);
    size_t digits = strspn(colon + 1, "0123456789");
    *port_p = digits > 0 && digits <= 5 && colon[1 + digits] == '\0' ? atoi(colon + 1) : 0;
    return *port_p > 0 && *port_p <= 65535;
}

/* Reads one address of the list and checks what can be checked without this machine's interfaces.
 * text_p [64]: the address in canonical form. */
static bt_status_t read_address(const char *listen, bool allow_routable, int *family_p,
                                char *text_p, int *port_p, char *err, size_t err_cap)
{
    unsigned char bin[sizeof(struct in6_addr)];
    char address[64];
    int family = AF_INET;
    bool good = split_port(listen, address, port_p);
    if (!good || inet_pton(AF_INET, address, bin) != 1) {
        family = AF_INET6;
        if (!good || inet_pton(AF_INET6, address, bin) != 1) {
            return fail(err, err_cap,
                        "kvstore.wire.listen: \"%.80s\" is not a numeric address; give the address "
                        "of the interface that KV may use (with kvstore.wire.transport: grpc a "
                        "port of 1 to 65535 may follow, as in 10.0.0.1:7000 or [fd00::1]:7000)",
                        listen);
        }
    }
    inet_ntop(family, bin, text_p, 64);
    if (!allow_routable && !bt_address_private(text_p)) {
        return fail(
            err, err_cap,
            "kvstore.wire.listen: %s is a routable address, and UCX over TCP does not check who "
            "connects; give a loopback or private address (10/8, 172.16/12, 192.168/16, "
            "169.254/16, fd00::/8), or set kvstore.wire.allow_routable: true if the network keeps "
            "strangers out, or use kvstore.wire.transport: grpc with cluster.tls.*",
            text_p);
    }
    *family_p = family;
    return BT_OK;
}

static bt_status_t count(const char *const *listen, uint32_t *n_p, char *err, size_t err_cap)
{
    uint32_t n = 0;
    while (listen != NULL && listen[n] != NULL) {
        n++;
    }
    if (n == 0 || n > BT_NICS_MAX) {
        return fail(err, err_cap,
                    "kvstore.wire.listen: %u addresses; give one to %d, one of each interface that "
                    "KV may use",
                    n, BT_NICS_MAX);
    }
    *n_p = n;
    return BT_OK;
}

bt_status_t bt_wire_listen_check(const char *const *listen, bool over_grpc, bool allow_routable,
                                 char *err, size_t err_cap)
{
    char text[64];
    uint32_t n = 0;
    int family, port;
    bt_status_t st = count(listen, &n, err, err_cap);
    for (uint32_t i = 0; st == BT_OK && i < n; i++) {
        st = read_address(listen[i], allow_routable, &family, text, &port, err, err_cap);
        if (st == BT_OK && port != 0 && !over_grpc) {
            st = fail(err, err_cap,
                      "kvstore.wire.listen: UCX chooses its own ports; give %s without port %d, or "
                      "use kvstore.wire.transport: grpc",
                      text, port);
        }
    }
    return st;
}

static bt_status_t find_card(const struct ifaddrs *list, const char *listen, bool alone,
                             bool allow_routable, struct bt_wire_card *card, char *err,
                             size_t err_cap)
{
    int family;
    memset(card, 0, sizeof(*card));
    bt_status_t st =
        read_address(listen, allow_routable, &family, card->address, &card->port, err, err_cap);
    return st != BT_OK ? st : find_interface(list, family, alone, card, err, err_cap);
}

static bt_status_t find_cards(const struct ifaddrs *list, const char *const *listen, uint32_t n,
                              bool allow_routable, struct bt_wire_card *cards, char *err,
                              size_t err_cap)
{
    uint32_t n_up = 0;
    for (uint32_t i = 0; i < n; i++) {
        bt_status_t st =
            find_card(list, listen[i], n == 1, allow_routable, &cards[i], err, err_cap);
        if (st != BT_OK) {
            return st;
        }
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(cards[j].ifname, cards[i].ifname) == 0) {
                return fail(err, err_cap,
                            "kvstore.wire.listen: %s and %s are both of interface %s; give one "
                            "address of each interface",
                            cards[j].address, cards[i].address, cards[i].ifname);
            }
        }
        n_up += cards[i].nic.up;
    }
    if (n > 1 && n_up == 0) {
        return fail(err, err_cap,
                    "kvstore.wire.listen: all its interfaces are down (%s and %u more); set one up",
                    cards[0].ifname, n - 1);
    }
    return BT_OK;
}

bt_status_t bt_wire_cards(const char *const *listen, bool allow_routable,
                          struct bt_wire_card *cards_p, uint32_t *n_p, char *err, size_t err_cap)
{
    struct bt_wire_card cards[BT_NICS_MAX];
    struct ifaddrs *list;
    uint32_t n = 0;
    bt_status_t st = count(listen, &n, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    if (getifaddrs(&list) != 0) {
        return fail(err, err_cap, "kvstore.wire.listen: the interfaces cannot be listed");
    }
    st = find_cards(list, listen, n, allow_routable, cards, err, err_cap);
    freeifaddrs(list);
    if (st == BT_OK) {
        memcpy(cards_p, cards, n * sizeof(*cards));
        *n_p = n;
    }
    return st;
}

bool bt_wire_link_up(const char *ifname)
{
    struct ifreq r = {.ifr_flags = 0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return true; /* no properties are known */
    }
    snprintf(r.ifr_name, sizeof(r.ifr_name), "%s", ifname);
    bool up =
        ioctl(fd, SIOCGIFFLAGS, &r) == 0 && (r.ifr_flags & IFF_UP) && (r.ifr_flags & IFF_RUNNING);
    close(fd);
    return up;
}

int32_t bt_wire_memory_node(const void *p)
{
    int node = -1;
    if (syscall(SYS_get_mempolicy, &node, NULL, 0ul, p, (unsigned long)MPOL_F_NODE | MPOL_F_ADDR) !=
        0) {
        return -1;
    }
    return node;
}
