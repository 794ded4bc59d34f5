/* How much of the server each client uses. Connections and buffered request bytes are counted for
 * each owner (given by the head function, else the client's address), and for strangers:
 * connections with no accepted request yet. One owner may have at most as much as it leaves free
 * for others: half, if there is no other owner. So there is always room for a newcomer. Loop
 * thread. */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "common/http/http_priv.h"

#define BY_ADDRESS (1ull << 63) /* marks owners that the head function did not give */

static struct bt_http_owner *ref(struct bt_http *h, uint64_t id)
{
    struct bt_http_owner *o = bt_map_get(h->owners, &id);
    if (o == NULL) {
        o = bt_calloc(1, sizeof(*o));
        o->id = id;
        bt_map_put(h->owners, &id, o);
    }
    o->refs++;
    return o;
}

static void unref(struct bt_http *h, struct bt_http_owner *o)
{
    if (--o->refs == 0) {
        BT_ASSERT(o->conns == 0 && o->bytes == 0 && o->strangers == 0);
        bt_map_del(h->owners, &o->id);
        free(o);
    }
}

/* An IPv4 address, or the network of an IPv6 address, as a host can use all addresses with its last
 * 64 bits. */
static uint64_t address_id(const struct bt_http *h, const struct sockaddr_storage *at)
{
    const void *p = &((const struct sockaddr_in *)at)->sin_addr;
    size_t n = sizeof(struct in_addr);
    if (at->ss_family == AF_INET6) {
        const struct in6_addr *a = &((const struct sockaddr_in6 *)at)->sin6_addr;
        bool v4 = IN6_IS_ADDR_V4MAPPED(a);
        p = v4 ? &a->s6_addr[12] : &a->s6_addr[0];
        n = v4 ? 4 : 8;
    }
    return bt_hash64(p, n, h->seed) | BY_ADDRESS;
}

void bt_http_share_join(struct bt_http_conn *c, const struct sockaddr_storage *at)
{
    struct bt_http *h = c->h;
    c->address = ref(h, address_id(h, at));
    c->address->strangers++;
    h->n_strangers++;
    bt_list_insert_tail(&h->strangers, &c->stranger);
}

static void no_stranger(struct bt_http_conn *c)
{
    if (!bt_list_empty(&c->stranger)) {
        bt_list_remove(&c->stranger);
        c->address->strangers--;
        c->h->n_strangers--;
    }
}

static void disown(struct bt_http_conn *c)
{
    if (c->owner != NULL) {
        c->owner->conns--;
        c->owner->bytes -= c->held;
        unref(c->h, c->owner);
        c->owner = NULL;
    }
}

void bt_http_share_leave(struct bt_http_conn *c)
{
    no_stranger(c);
    disown(c);
    c->h->held -= c->held;
    c->held = 0;
    unref(c->h, c->address);
}

struct bt_http_conn *bt_http_share_victim(struct bt_http_conn *newest)
{
    const struct bt_http *h = newest->h;
    struct bt_http_conn *oldest = NULL;
    struct bt_list *l;
    if (h->o.strangers_max == 0 || h->n_strangers <= h->o.strangers_max) {
        return NULL;
    }
    bt_list_for_each (l, &h->strangers) {
        struct bt_http_conn *c = BT_CONTAINER_OF(l, struct bt_http_conn, stranger);
        if (c != newest && c->address->strangers > h->o.strangers_max / 4) {
            return c;
        }
        oldest = oldest == NULL && c != newest ? c : oldest;
    }
    return oldest;
}

bool bt_http_share_own(struct bt_http_conn *c, uint64_t id)
{
    struct bt_http *h = c->h;
    BT_ASSERT((id & BY_ADDRESS) == 0);
    id = id != 0 ? id : c->address->id;
    no_stranger(c);
    if (c->owner != NULL && c->owner->id == id) {
        return true;
    }
    disown(c);
    c->owner = ref(h, id);
    c->owner->conns++;
    c->owner->bytes += c->held;
    uint32_t free_conns = h->o.conns_max - BT_MIN(h->n_conns, h->o.conns_max);
    return h->o.head == NULL || c->owner->conns <= BT_MAX(free_conns, 1u);
}

/* Reserves the length that a header announces, so that an accepted body is not refused halfway
 * because other requests have come meanwhile. */
void bt_http_share_count(struct bt_http_conn *c)
{
    size_t held = BT_MAX(c->parser.body.len, c->announced) + (c->in.len - c->in_off) +
                  (c->req != NULL ? c->req->held : 0);
    c->h->held += held - c->held;
    if (c->owner != NULL) {
        c->owner->bytes += held - c->held;
    }
    c->held = held;
}

bt_http_room_t bt_http_share_room(const struct bt_http_conn *c, uint64_t more)
{
    const struct bt_http *h = c->h;
    if (h->o.body_total == 0) {
        return HTTP_ROOM;
    }
    if (h->held > h->o.body_total || more > h->o.body_total - h->held) {
        return HTTP_ROOM_NONE;
    }
    uint64_t left = h->o.body_total - h->held - more;
    return c->owner == NULL || c->owner->bytes + more <= left ? HTTP_ROOM : HTTP_ROOM_OTHERS;
}
