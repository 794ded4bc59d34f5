/* Within front/: an answer as a list of items in the order of their beginning (text, reasoning,
 * calls of tools), for APIs whose answers are such lists; and long texts that repeat the items,
 * written in slices. Answers of these APIs have one choice. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ITEMS_H
#define BT_CONDUCTOR_FRONT_ITEMS_H

#include "common/base/base.h"
#include "common/base/buf.h"
#include "conductor/reply/reply.h"

struct bt_front_item {
    enum bt_reply_kind kind; /* BT_REPLY_TEXT, BT_REPLY_REASONING, BT_REPLY_CALL */
    uint32_t call;
    char *name;             /* of a call's function */
    struct bt_buf text;     /* of a call: its arguments */
    struct bt_buf logprobs; /* of text: the inside of a JSON array */
};

struct bt_front_items {
    struct bt_front_item *list;
    uint32_t n, cap;
    bool open;    /* the last item may still grow */
    size_t bytes; /* that they take */
};

/* Does the bit begin an item? */
bool bt_front_items_begins(const struct bt_front_items *items, const struct bt_reply_bit *bit);
/* The item that the bit belongs to, which is new if the bit begins one. NULL: the bit says nothing
 * (empty text, or arguments of no call). Does not add the bit's text. */
struct bt_front_item *bt_front_items_of(struct bt_front_items *items,
                                        const struct bt_reply_bit *bit);
/* Adds text to an item, or to its logprobs (a comma goes between two additions). */
void bt_front_items_text(struct bt_front_items *items, struct bt_front_item *item, const char *text,
                         size_t len);
void bt_front_items_logprobs(struct bt_front_items *items, struct bt_front_item *item,
                             const struct bt_buf *more);
/* The open item; NULL: none. */
struct bt_front_item *bt_front_items_last(const struct bt_front_items *items);
void bt_front_items_cleanup(struct bt_front_items *items);

/* ---- long texts ---- */

struct bt_front_span {
    const struct bt_buf *from; /* NULL: the script's own text */
    size_t len;
    bool escaped; /* as the inside of a JSON string */
};

/* A text made of its own words and of buffers that stay as they are until it is written. */
struct bt_front_script {
    struct bt_buf own;
    size_t marked; /* bytes of own that are in spans */
    struct bt_front_span *spans;
    uint32_t n, cap;
    /* how far it is written */
    uint32_t span;
    size_t at, own_at;
};

/* Append JSON text to s->own, or one of these. */
void bt_front_script_string(struct bt_front_script *s, const struct bt_buf *text); /* "..." */
void bt_front_script_raw(struct bt_front_script *s, const struct bt_buf *text);
/* Writes a slice behind what was written. True: all is written. */
bool bt_front_script_write(struct bt_front_script *s, struct bt_buf *out);
void bt_front_script_cleanup(struct bt_front_script *s);

#endif
