/* Within front/: room for answers. What an answer keeps in memory (prompts with their logprobs,
 * text that was generated, events that wait) is held until its client has read it. All of it
 * together has a limit, and so have one API key and one answer: a quarter of it. Loop thread. */
#ifndef BT_CONDUCTOR_FRONT_ROOM_H
#define BT_CONDUCTOR_FRONT_ROOM_H

#include "common/base/list.h"
#include "conductor/front/front_json.h"

struct front_room {
    struct bt_list held;
    size_t max, used; /* bytes */
};

struct front_hold {
    struct bt_list link;
    uint64_t tenant;
    size_t bytes;
};

void front_room_init(struct front_room *r, size_t max);
uint64_t front_tenant_hash(const char *tenant); /* NULL, no keys are asked for: 0 */
/* Is there room for a new answer of tenant (its hash)? False: e
 * is a 400 if it could never have so much, else a 503; both name the limit and its key. */
bool front_room_fits(const struct front_room *r, uint64_t tenant, size_t bytes,
                     struct front_error *e);
/* It has so much from now on. */
void front_room_take(struct front_room *r, struct front_hold *h, uint64_t tenant, size_t bytes);
/* The answer has grown to so many bytes. False: it may not; e is a 503. */
bool front_room_grow(struct front_room *r, struct front_hold *h, size_t bytes,
                     struct front_error *e);
void front_room_give_back(struct front_room *r, struct front_hold *h);

#endif
