/* A binary heap. See events.h. */
#include "conductor/sim/events.h"

#include <stdlib.h>

static bool earlier(const struct bt_sim_event *a, const struct bt_sim_event *b)
{
    return a->at_ms < b->at_ms || (a->at_ms == b->at_ms && a->seq < b->seq);
}

void bt_sim_events_push(struct bt_sim_events *q, double at_ms, uint32_t type, uint32_t id,
                        uint32_t version)
{
    if (q->n == q->cap) {
        q->cap = q->cap != 0 ? 2 * q->cap : 256;
        q->heap = bt_realloc(q->heap, q->cap * sizeof(*q->heap));
    }
    struct bt_sim_event e = {at_ms, q->seq++, type, id, version};
    uint32_t i = q->n++;
    for (; i > 0 && earlier(&e, &q->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        q->heap[i] = q->heap[(i - 1) / 2];
    }
    q->heap[i] = e;
}

struct bt_sim_event bt_sim_events_pop(struct bt_sim_events *q)
{
    struct bt_sim_event top = q->heap[0], x = q->heap[--q->n];
    uint32_t i = 0;
    for (uint32_t c; (c = 2 * i + 1) < q->n; i = c) {
        c += c + 1 < q->n && earlier(&q->heap[c + 1], &q->heap[c]);
        if (!earlier(&q->heap[c], &x)) {
            break;
        }
        q->heap[i] = q->heap[c];
    }
    q->heap[i] = x;
    return top;
}

void bt_sim_events_cleanup(struct bt_sim_events *q)
{
    free(q->heap);
    *q = (struct bt_sim_events){0};
}
