/* Room for answers; see front_room.h. */
#include "conductor/front/front_room.h"

#include <string.h>

#include "common/base/map.h"

#define OF_ONE    4 /* one key, and one answer, may have this part of all */
#define SMALL     (256 * 1024)
#define GRANULE   (16 * 1024) /* an answer grows by so much at once: sums are rarely made */
#define RETRY_S   5
#define MIB       (1024.0 * 1024.0)
#define LIMIT_KEY "conductor.http.answers_max"

void front_room_init(struct front_room *r, size_t max)
{
    bt_list_init(&r->held);
    r->max = max;
    r->used = 0;
}

uint64_t front_tenant_hash(const char *tenant)
{
    return tenant != NULL ? bt_hash64(tenant, strlen(tenant), 0) : 0;
}

static size_t of_tenant(const struct front_room *r, uint64_t tenant)
{
    size_t sum = 0;
    const struct bt_list *l;
    bt_list_for_each (l, &r->held) {
        const struct front_hold *h = BT_CONTAINER_OF(l, struct front_hold, link);
        sum += h->tenant == tenant ? h->bytes : 0;
    }
    return sum;
}

static bool busy(struct front_error *e, const char *whose, size_t limit)
{
    e->retry_after_s = RETRY_S;
    return front_fail(
        e, 503, NULL, NULL,
        "%s would take more than the %.1f MiB of memory that it may have until clients "
        "have read them (" LIMIT_KEY "); read answers faster, or ask for fewer "
        "logprobs at once",
        whose, (double)limit / MIB);
}

/* Of all, for an answer of so many bytes. New ones leave a quarter to those that there are, and
 * all but the small ones an eighth to the small ones: whoever keeps much and reads slowly does not
 * keep ordinary requests out. */
static size_t limit_for(const struct front_room *r, size_t bytes, bool is_new)
{
    return bytes <= SMALL ? r->max : r->max - r->max / (is_new ? 4 : 8);
}

/* more: beyond what the tenant has now; limit: of all. */
static bool fits(const struct front_room *r, uint64_t tenant, size_t more, size_t limit,
                 struct front_error *e)
{
    size_t share = r->max / OF_ONE;
    if (tenant != 0 && of_tenant(r, tenant) + more > share) {
        return busy(e, "the answers of your API key", share);
    }
    if (r->used + more > limit) {
        return busy(e, "the answers of this server", limit);
    }
    return true;
}

bool front_room_fits(const struct front_room *r, uint64_t tenant, size_t bytes,
                     struct front_error *e)
{
    size_t share = r->max / OF_ONE;
    if (bytes > share) {
        return front_fail(e, 400, NULL, NULL,
                          "this answer would take %.1f MiB of memory, the logprobs of its prompts "
                          "included; one answer may have %.1f MiB of " LIMIT_KEY
                          ": send less at once, or ask for fewer logprobs",
                          (double)bytes / MIB, (double)share / MIB);
    }
    return fits(r, tenant, bytes, limit_for(r, bytes, true), e);
}

void front_room_take(struct front_room *r, struct front_hold *h, uint64_t tenant, size_t bytes)
{
    h->tenant = tenant;
    h->bytes = bytes;
    r->used += bytes;
    bt_list_insert_tail(&r->held, &h->link);
}

bool front_room_grow(struct front_room *r, struct front_hold *h, size_t bytes,
                     struct front_error *e)
{
    if (bytes <= h->bytes) {
        return true;
    }
    size_t share = r->max / OF_ONE, more = bytes - h->bytes + BT_MIN((size_t)GRANULE, share / 64);
    if (bytes > share) {
        return busy(e, "this answer", share);
    }
    if (!fits(r, h->tenant, more, limit_for(r, bytes, false), e)) {
        return false;
    }
    h->bytes += more;
    r->used += more;
    return true;
}

void front_room_give_back(struct front_room *r, struct front_hold *h)
{
    r->used -= h->bytes;
    h->bytes = 0;
    bt_list_remove(&h->link);
}
