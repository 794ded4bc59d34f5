/* Which interface UCX over TCP may bind to. Plain UCX authenticates nobody, so a routable address
 * needs the configuration's word. Called once at start, on the control thread. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/rpc/address.h"
#include "kvstore/wire/msg.h"

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

/* UCX passes over these, whatever it is told. */
static bool ucx_skips(const struct sockaddr *sa)
{
    const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr;
    return sa->sa_family == AF_INET6 && (IN6_IS_ADDR_LOOPBACK(a) || IN6_IS_ADDR_LINKLOCAL(a));
}

/* UCX is told an interface and binds to that interface's first address of the family, so this must
 * be the address that was checked. */
static bt_status_t find_interface(const struct ifaddrs *list, const char *want, int family,
                                  char *ifname, size_t cap, char *err, size_t err_cap)
{
    char text[INET6_ADDRSTRLEN];
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
    if (!(mine->ifa_flags & IFF_UP)) {
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
    snprintf(ifname, cap, "%s", mine->ifa_name);
    return BT_OK;
}

bt_status_t bt_wire_interface(const char *listen, bool allow_routable, char *ifname, size_t cap,
                              bool *ipv6_p, char *err, size_t err_cap)
{
    unsigned char bin[sizeof(struct in6_addr)];
    char want[INET6_ADDRSTRLEN];
    int family = AF_INET;
    if (listen == NULL || inet_pton(AF_INET, listen, bin) != 1) {
        family = AF_INET6;
        if (listen == NULL || inet_pton(AF_INET6, listen, bin) != 1) {
            return fail(err, err_cap,
                        "kvstore.wire.listen: \"%s\" is not a numeric address; give the address of "
                        "the interface that KV may use, without a port",
                        listen == NULL ? "" : listen);
        }
    }
    inet_ntop(family, bin, want, sizeof(want)); /* one spelling */
    if (!allow_routable && !bt_address_private(want)) {
        return fail(err, err_cap,
                    "kvstore.wire.listen: %s is a routable address, and UCX over TCP authenticates "
                    "nobody; give a loopback or private address (10/8, 172.16/12, 192.168/16, "
                    "169.254/16, fd00::/8), or set kvstore.wire.allow_routable: true if "
                    "the network keeps strangers out",
                    want);
    }
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0) {
        return fail(err, err_cap, "kvstore.wire.listen: the interfaces cannot be listed");
    }
    bt_status_t st = find_interface(list, want, family, ifname, cap, err, err_cap);
    freeifaddrs(list);
    if (st == BT_OK) {
        *ipv6_p = family == AF_INET6;
    }
    return st;
}
