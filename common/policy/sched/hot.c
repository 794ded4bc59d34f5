/* Faded counts in a small table; the least used key of a set gives its place. Pure: see hot.h. */
#include "common/policy/sched/hot.h"

#include <math.h>
#include <string.h>

void bt_hot_init(struct bt_hot *h, double window_ms)
{
    memset(h, 0, sizeof(*h));
    h->window_ms = window_ms;
}

static double faded(const struct bt_hot *h, const struct bt_hot_key *k, double now_ms)
{
    return k->uses * exp((k->at_ms - now_ms) / h->window_ms);
}

double bt_hot_use(struct bt_hot *h, uint64_t key, double now_ms)
{
    struct bt_hot_key *set = h->sets[(key ^ key >> 32) % BT_HOT_SETS], *at = &set[0];
    for (int i = 0; i < BT_HOT_WAYS; i++) {
        if (set[i].key == key && set[i].uses > 0) {
            at = &set[i];
            break;
        }
        if (faded(h, &set[i], now_ms) < faded(h, at, now_ms)) {
            at = &set[i];
        }
    }
    double before = at->key == key ? faded(h, at, now_ms) : 0;
    *at = (struct bt_hot_key){.key = key, .uses = before + 1, .at_ms = now_ms};
    return at->uses;
}

uint32_t bt_hot_copies(double uses, double uses_per_copy, uint32_t most)
{
    double n = floor(uses / uses_per_copy) + 1;
    return n < most ? (uint32_t)n : most;
}
