/* The actions of the request machine: a queue that the machine's caller empties after each event.
 * Pure. */
#include <stdlib.h>
#include <string.h>

#include "conductor/request/machine_priv.h"

#define ACTIONS_FIRST 64

struct bt_action *bt_action_add(struct bt_machine *mc, bt_action_type_t type)
{
    struct bt_actions *q = &mc->actions;
    if (q->n == q->cap) {
        q->cap = q->cap != 0 ? 2 * q->cap : ACTIONS_FIRST;
        q->list = bt_realloc(q->list, q->cap * sizeof(*q->list));
    }
    struct bt_action *a = &q->list[q->n++];
    memset(a, 0, sizeof(*a));
    a->type = type;
    return a;
}

struct bt_action *bt_action_client(struct bt_request *r, bt_action_type_t type)
{
    if (r->ended) {
        return NULL;
    }
    struct bt_action *a = bt_action_add(r->mc, type);
    a->r = r;
    return a;
}

size_t bt_action_text(struct bt_machine *mc, const char *text)
{
    size_t at = mc->actions.text.len;
    bt_buf_append(&mc->actions.text, text, strlen(text) + 1);
    return at;
}

bool bt_machine_action(struct bt_machine *mc, struct bt_action *out)
{
    struct bt_actions *q = &mc->actions;
    if (q->first == q->n) {
        q->first = q->n = 0;
        bt_buf_clear(&q->text);
        return false;
    }
    *out = q->list[q->first++];
    if (out->type == BT_ACT_CLIENT_DELTA) {
        out->delta.d.text = out->delta.d.text_len != 0 ? q->text.data + out->delta.text_at : "";
    } else if (out->type == BT_ACT_CLIENT_ERROR) {
        out->error.text = q->text.data + out->error.text_at;
    } else if (out->type == BT_ACT_CLIENT_DONE) {
        out->done.usage = &out->r->usage;
    }
    return true;
}

static void free_sources(struct bt_sources *from)
{
    if (from != NULL) {
        bt_sources_cleanup(from);
        free(from);
    }
}

void bt_action_cleanup(struct bt_action *a)
{
    if (a->type == BT_ACT_RESERVE) {
        free_sources(a->reserve.from);
    } else if (a->type == BT_ACT_REPLICATE) {
        free_sources(a->replicate.from);
    } else if (a->type == BT_ACT_CLIENT_PROMPT) {
        bt_prompt_destroy(a->prompt.tokens);
    } else if (a->type == BT_ACT_TRACED) {
        bt_record_destroy(a->traced.record);
    }
}
