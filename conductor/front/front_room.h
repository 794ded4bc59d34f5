/* Within front/: room for answers. What an answer keeps in memory (prompts with their logprobs,
 * text that was generated, events that wait) is held until its client has read it. All of it
 * together has a limit, and so have one answer and one API key: a quarter of it. Without keys the
 * clients of one address (of IPv6 one network of 64 bits) have as much as they leave free to
 * others: they may be many behind a proxy, so they are limited only when half is used. Loop thread.
 */
#ifndef BT_CONDUCTOR_FRONT_ROOM_H
#define BT_CONDUCTOR_FRONT_ROOM_H

#include "common/base/map.h"
#include "conductor/front/front_json.h"

struct bt_front_room {
    struct bt_map *owners; /* front_room.c: who holds how much */
    size_t max, used;      /* bytes */
};

struct bt_front_hold {
    uint64_t owner;
    size_t bytes;
};

void bt_front_room_init(struct bt_front_room *r, size_t max);
void bt_front_room_cleanup(struct bt_front_room *r); /* all is given back */
/* Owner of an answer: a key's tenant, or, without keys, the address (bt_http_peer). */
uint64_t bt_front_room_owner(const char *tenant, const char *peer);
/* Is there room for a new answer of owner? False: e is a 400 if it could never have so much, else a
 * 503; both name the limit and its key. */
bool bt_front_room_fits(const struct bt_front_room *r, uint64_t owner, size_t bytes,
                        struct bt_front_error *e);
/* It has so much from now on. */
void bt_front_room_take(struct bt_front_room *r, struct bt_front_hold *h, uint64_t owner,
                        size_t bytes);
/* The answer has grown to so many bytes. False: it may not; e is a 503, or a 400 if it could never
 * have so much. */
bool bt_front_room_grow(struct bt_front_room *r, struct bt_front_hold *h, size_t bytes,
                        struct bt_front_error *e);
void bt_front_room_give_back(struct bt_front_room *r, struct bt_front_hold *h);

#endif
