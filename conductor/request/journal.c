/* The journal of one choice; see journal.h. */
#include "conductor/request/journal.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(BT_JOURNAL_WINDOW == 64, "present has one bit for each place of the window");

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
    j->present = 0;
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
    uint32_t i = (uint32_t)(at % BT_JOURNAL_WINDOW);
    if ((j->present >> i & 1) != 0) {
        return BT_ERR_EXISTS;
    }
    if (j->window == NULL) {
        j->window = bt_calloc(BT_JOURNAL_WINDOW, sizeof(*j->window));
    }
    j->window[i] = *e;
    j->present |= (uint64_t)1 << i;
    return BT_OK;
}

const struct bt_journal_entry *bt_journal_take(struct bt_journal *j)
{
    uint32_t i = j->n % BT_JOURNAL_WINDOW;
    if ((j->present >> i & 1) == 0) {
        return NULL;
    }
    if (j->n == j->cap) {
        j->cap = j->cap != 0 ? j->cap * 2 : 64;
        j->tokens = bt_realloc(j->tokens, j->cap * sizeof(*j->tokens));
    }
    j->present &= ~((uint64_t)1 << i);
    j->tokens[j->n++] = j->window[i].token;
    return &j->window[i];
}

bool bt_journal_gap(const struct bt_journal *j)
{
    return j->present != 0 && (j->present >> (j->n % BT_JOURNAL_WINDOW) & 1) == 0;
}
