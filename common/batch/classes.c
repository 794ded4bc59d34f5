/* A short sorted table. Pure: see classes.h. */
#include "common/batch/classes.h"

#include <string.h>

static void add(struct bt_class *to, const struct bt_class *from)
{
    to->users += from->users;
    to->queue_ns += from->queue_ns;
    to->rows += from->rows;
    to->pages += from->pages;
    to->waiting += from->waiting;
    to->landing += from->landing;
}

/* The first entry whose classes do not all come before priority. */
static uint32_t place_of(const struct bt_classes *c, int32_t priority)
{
    uint32_t i = 0;
    while (i < c->n && c->of[i].lowest < priority) {
        i++;
    }
    return i;
}

struct bt_class *bt_classes_at(struct bt_classes *c, int32_t priority)
{
    uint32_t i = place_of(c, priority);
    if (i < c->n && c->of[i].priority <= priority) {
        return &c->of[i];
    }
    if (c->n == BT_CLASSES_MAX && i == c->n) { /* lower than all: the lowest takes it */
        c->of[i - 1].lowest = priority;
        return &c->of[i - 1];
    }
    if (c->n == BT_CLASSES_MAX && i == c->n - 1) { /* just above the lowest, which it takes */
        c->of[i].priority = priority;
        return &c->of[i];
    }
    if (c->n == BT_CLASSES_MAX) {
        struct bt_class *last = &c->of[c->n - 1];
        add(last - 1, last);
        (last - 1)->lowest = last->lowest;
        c->n--;
    }
    memmove(&c->of[i + 1], &c->of[i], (c->n - i) * sizeof(c->of[0]));
    c->of[i] = (struct bt_class){.priority = priority, .lowest = priority};
    c->n++;
    return &c->of[i];
}

struct bt_class *bt_classes_join(struct bt_classes *c, int32_t priority)
{
    struct bt_class *k = bt_classes_at(c, priority);
    k->users++;
    return k;
}

void bt_classes_leave(struct bt_classes *c, int32_t priority)
{
    uint32_t i = place_of(c, priority);
    BT_ASSERT(i < c->n && c->of[i].users > 0);
    if (--c->of[i].users == 0) {
        c->n--;
        memmove(&c->of[i], &c->of[i + 1], (c->n - i) * sizeof(c->of[0]));
    }
}

struct bt_class bt_classes_below(const struct bt_classes *c, int32_t priority)
{
    struct bt_class sum = {0};
    for (uint32_t i = c->n; i > 0 && c->of[i - 1].priority > priority; i--) {
        add(&sum, &c->of[i - 1]);
    }
    return sum;
}
