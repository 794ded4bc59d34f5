/* Private addresses. Pure; any thread. */
#include "common/rpc/address.h"

#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static bool v4_private(uint32_t a) /* host order */
{
    return a >> 24 == 127 || a >> 24 == 10 || a >> 20 == 0xAC1 || a >> 16 == 0xC0A8 ||
           a >> 16 == 0xA9FE;
}

static bool v6_private(const struct in6_addr *a)
{
    return IN6_IS_ADDR_LOOPBACK(a) || IN6_IS_ADDR_LINKLOCAL(a) || a->s6_addr[0] == 0xfd ||
           (IN6_IS_ADDR_V4MAPPED(a) &&
            v4_private((uint32_t)a->s6_addr[12] << 24 | (uint32_t)a->s6_addr[13] << 16 |
                       (uint32_t)a->s6_addr[14] << 8 | a->s6_addr[15]));
}

bool bt_address_private(const char *text)
{
    struct in_addr a4;
    struct in6_addr a6;
    if (inet_pton(AF_INET, text, &a4) == 1) {
        return v4_private(ntohl(a4.s_addr));
    }
    return inet_pton(AF_INET6, text, &a6) == 1 && v6_private(&a6);
}

bool bt_address_port_private(const char *text)
{
    char host[80];
    const char *colon = strrchr(text, ':');
    size_t len = colon != NULL ? (size_t)(colon - text) : strlen(text);
    if (len >= 2 && text[0] == '[' && text[len - 1] == ']') {
        text++;
        len -= 2;
    }
    if (len >= sizeof(host)) {
        return false;
    }
    snprintf(host, sizeof(host), "%.*s", (int)len, text);
    return strcmp(host, "localhost") == 0 || bt_address_private(host);
}
