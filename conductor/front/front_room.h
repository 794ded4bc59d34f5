/* Within front/: the memory of answers. An answer keeps prompts with their logprobs, generated text
 * and waiting events until its client has read them. All answers together have a limit. One answer,
 * and all answers of one API key, may use a quarter of it. Without keys, the clients of one address
 * (IPv6: one /64 network) may use as much as they leave free, because many clients may share a
 * proxy. Loop thread. */
#ifndef BT_CONDUCTOR_FRONT_ROOM_H
#define BT_CONDUCTOR_FRONT_ROOM_H

#include "common/base/map.h"
#include "conductor/front/front_json.h"

struct bt_front_room {
    struct bt_map *owners; /* front_room.c: bytes held by each owner */
    size_t max, used;      /* bytes */
};

struct bt_front_hold {
    uint64_t owner;
    size_t bytes;
};

void bt_front_room_init(struct bt_front_room *r, size_t max);
void bt_front_room_cleanup(struct bt_front_room *r); /* nothing may be held any more */
/* Owner of an answer: a key's tenant, or, without keys, the address (bt_http_peer). */
uint64_t bt_front_room_owner(const char *tenant, const char *peer);
/* Is there memory for a new answer of owner? False: e is a 400 if it could never have that much,
 * else a 503; both name the limit and its key. */
bool bt_front_room_fits(const struct bt_front_room *r, uint64_t owner, size_t bytes,
                        struct bt_front_error *e);
/* Sets the bytes that the answer holds. */
void bt_front_room_take(struct bt_front_room *r, struct bt_front_hold *h, uint64_t owner,
                        size_t bytes);
/* Sets the bytes of an answer that has grown. False: it may not have them; e is a 503, or a 400 if
 * it could never have that much. */
bool bt_front_room_grow(struct bt_front_room *r, struct bt_front_hold *h, size_t bytes,
                        struct bt_front_error *e);
void bt_front_room_give_back(struct bt_front_room *r, struct bt_front_hold *h);

#endif
