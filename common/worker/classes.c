/* A short sorted table. Pure: see classes.h. */
#include "common/worker/classes.h"

#include <string.h>

static void join(struct bt_wclass *to, const struct bt_wclass *from)
{
    to->queue_ns += from->queue_ns;
    to->rows += from->rows;
    to->pages += from->pages;
    to->waiting += from->waiting;
    to->landing += from->landing;
}

struct bt_wclass *bt_wclasses_at(struct bt_wclasses *c, int32_t priority)
{
    uint32_t i = 0;
    while (i < c->n && c->of[i].priority < priority) {
        i++;
    }
    if (i < c->n && c->of[i].priority == priority) {
        return &c->of[i];
    }
    if (c->n == BT_WORKER_CLASSES) {
        if (i == c->n) { /* lower than all: the lowest takes it */
            return &c->of[i - 1];
        }
        c->n--;
        if (i == c->n) { /* above the lowest, which it takes */
            c->of[i].priority = priority;
            c->n++;
            return &c->of[i];
        }
        join(&c->of[c->n - 1], &c->of[c->n]);
    }
    memmove(&c->of[i + 1], &c->of[i], (c->n - i) * sizeof(c->of[0]));
    c->of[i] = (struct bt_wclass){.priority = priority};
    c->n++;
    return &c->of[i];
}
