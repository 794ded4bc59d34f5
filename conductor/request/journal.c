/* The journal of one choice; see journal.h. */
#include "conductor/request/journal.h"

#include <stdlib.h>
#include <string.h>

#define WINDOW_FIRST 8

_Static_assert((BT_JOURNAL_WINDOW & (BT_JOURNAL_WINDOW - 1)) == 0, "a power of two");

void bt_journal_init(struct bt_journal *j)
{
    memset(j, 0, sizeof(*j));
}

void bt_journal_cleanup(struct bt_journal *j)
{
    free(j->tokens);
    free(j->window);
    memset(j, 0, sizeof(*j));
}

void bt_journal_begin(struct bt_journal *j, uint32_t epoch)
{
    BT_ASSERT(epoch > j->epoch);
    j->epoch = epoch;
    j->base = j->n;
    for (uint32_t i = 0; j->waiting != 0 && i < j->window_cap; i++) {
        j->window[i].epoch = 0;
    }
    j->waiting = 0;
}

void bt_journal_again(struct bt_journal *j, uint32_t epoch)
{
    bt_journal_begin(j, epoch);
    j->base = 0;
}

/* Makes room for a token `ahead` places behind the next one. */
static void window_grow(struct bt_journal *j, uint32_t ahead)
{
    uint32_t cap = j->window_cap != 0 ? j->window_cap : WINDOW_FIRST;
    while (cap <= ahead) {
        cap *= 2;
    }
    if (cap == j->window_cap) {
        return;
    }
    struct bt_journal_entry *w = bt_calloc(cap, sizeof(*w));
    for (uint32_t i = 0; i < j->window_cap; i++) {
        w[(j->n + i) % cap] = j->window[(j->n + i) % j->window_cap];
    }
    free(j->window);
    j->window = w;
    j->window_cap = cap;
}

bt_status_t bt_journal_put(struct bt_journal *j, uint32_t offset, const struct bt_journal_entry *e)
{
    if (e->epoch != j->epoch || j->epoch == 0) {
        return BT_ERR_STALE;
    }
    uint64_t at = (uint64_t)j->base + offset;
    if (at < j->n) {
        return BT_ERR_EXISTS;
    }
    if (at - j->n >= BT_JOURNAL_WINDOW) {
        return BT_ERR_EXHAUSTED;
    }
    window_grow(j, (uint32_t)(at - j->n));
    struct bt_journal_entry *place = &j->window[at % j->window_cap];
    if (place->epoch != 0) {
        return BT_ERR_EXISTS;
    }
    *place = *e;
    j->waiting++;
    return BT_OK;
}

const struct bt_journal_entry *bt_journal_take(struct bt_journal *j)
{
    if (j->waiting == 0 || j->window[j->n % j->window_cap].epoch == 0) {
        return NULL;
    }
    struct bt_journal_entry *e = &j->window[j->n % j->window_cap];
    if (j->n == j->cap) {
        j->cap = j->cap != 0 ? j->cap * 2 : 64;
        j->tokens = bt_realloc(j->tokens, j->cap * sizeof(*j->tokens));
    }
    j->waiting--;
    e->epoch = 0;
    j->tokens[j->n++] = e->token;
    return e;
}
