/* Room for answers; see front_room.h. */
#include "conductor/front/front_room.h"

#include <stdlib.h>
#include <string.h>

#define OF_ONE     4 /* all answers of a key, and one answer, get this fraction of the whole */
#define SMALL      (256 * 1024)
#define GRANULE    (16 * 1024) /* step by which an answer grows: sums are rarely made */
#define RETRY_S    5
#define BY_ADDRESS (1ull << 63)
#define MIB        (1024.0 * 1024.0)
#define LIMIT_KEY  "conductor.http.answers_max"

struct owner {
    uint32_t answers;
    size_t bytes;
};

void bt_front_room_init(struct bt_front_room *r, size_t max)
{
    r->owners = bt_map_create(sizeof(uint64_t));
    r->max = max;
    r->used = 0;
}

void bt_front_room_cleanup(struct bt_front_room *r)
{
    BT_ASSERT(r->used == 0);
    bt_map_destroy(r->owners);
}

uint64_t bt_front_room_owner(const char *tenant, const char *peer)
{
    const char *name = tenant != NULL ? tenant : peer;
    uint64_t hash = bt_hash64(name, strlen(name), 0);
    return tenant != NULL ? hash & ~BY_ADDRESS : hash | BY_ADDRESS;
}

static size_t of_owner(const struct bt_front_room *r, uint64_t id)
{
    const struct owner *o = bt_map_get(r->owners, &id);
    return o != NULL ? o->bytes : 0;
}

static bool busy(struct bt_front_error *e, const char *whose, size_t limit)
{
    e->retry_after_s = RETRY_S;
    return bt_front_fail(
        e, 503, NULL, NULL,
        "%s would need more than the %.1f MiB of memory that they may use at present (" LIMIT_KEY
        "). Memory becomes free when clients read their answers; read faster, or ask for fewer "
        "logprobs at once",
        whose, (double)limit / MIB);
}

/* The limit on all answers' memory for one more answer of this size. New answers leave a quarter
 * for those that exist. Large ones leave an eighth for small ones: clients that keep much and read
 * slowly must not keep ordinary requests out. */
static size_t limit_for(const struct bt_front_room *r, size_t bytes, bool is_new)
{
    return bytes <= SMALL ? r->max : r->max - r->max / (is_new ? 4 : 8);
}

/* more: in addition to what the owner has now; limit: on all answers. */
static bool fits(const struct bt_front_room *r, uint64_t owner, size_t more, size_t limit,
                 struct bt_front_error *e)
{
    size_t share = r->max / OF_ONE, own = of_owner(r, owner);
    bool address = (owner & BY_ADDRESS) != 0;
    if (!address && own + more > share) {
        return busy(e, "the answers of your API key", share);
    }
    if (r->used + more > limit) {
        return busy(e, "the answers of this server", limit);
    }
    size_t others = r->used - own;
    if (address && own + more > (r->max - others) / 2) {
        return busy(e, "the answers of the clients at your address", (r->max - others) / 2);
    }
    return true;
}

static bool never(struct bt_front_error *e, const char *what, size_t bytes, size_t share)
{
    return bt_front_fail(e, 400, NULL, NULL,
                         "%s %.1f MiB of memory, including the logprobs of its prompts, but one "
                         "answer may use %.1f MiB of " LIMIT_KEY
                         "; send less at once, or ask for fewer logprobs",
                         what, (double)bytes / MIB, (double)share / MIB);
}

bool bt_front_room_fits(const struct bt_front_room *r, uint64_t owner, size_t bytes,
                        struct bt_front_error *e)
{
    size_t share = r->max / OF_ONE;
    if (bytes > share) {
        return never(e, "this answer would need", bytes, share);
    }
    return fits(r, owner, bytes, limit_for(r, bytes, true), e);
}

static void count(struct bt_front_room *r, struct bt_front_hold *h, size_t more)
{
    struct owner *o = bt_map_get(r->owners, &h->owner);
    o->bytes += more;
    h->bytes += more;
    r->used += more;
}

void bt_front_room_take(struct bt_front_room *r, struct bt_front_hold *h, uint64_t owner,
                        size_t bytes)
{
    struct owner *o = bt_map_get(r->owners, &owner);
    if (o == NULL) {
        o = bt_calloc(1, sizeof(*o));
        (void)bt_map_put(r->owners, &owner, o);
    }
    o->answers++;
    *h = (struct bt_front_hold){.owner = owner};
    count(r, h, bytes);
}

bool bt_front_room_grow(struct bt_front_room *r, struct bt_front_hold *h, size_t bytes,
                        struct bt_front_error *e)
{
    if (bytes <= h->bytes) {
        return true;
    }
    size_t share = r->max / OF_ONE, more = bytes - h->bytes + BT_MIN((size_t)GRANULE, share / 64);
    if (bytes > share) {
        return never(e, "this answer has grown and now needs", bytes, share);
    }
    if (!fits(r, h->owner, more, limit_for(r, bytes, false), e)) {
        return false;
    }
    count(r, h, more);
    return true;
}

void bt_front_room_give_back(struct bt_front_room *r, struct bt_front_hold *h)
{
    struct owner *o = bt_map_get(r->owners, &h->owner);
    r->used -= h->bytes;
    o->bytes -= h->bytes;
    h->bytes = 0;
    if (--o->answers == 0) {
        (void)bt_map_del(r->owners, &h->owner);
        free(o);
    }
}
