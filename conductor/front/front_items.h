/* Within front/: an answer as a list of items (text, reasoning, calls of tools) in the order in
 * which they begin, for APIs whose answers are such lists. Also long texts that repeat the items,
 * written in slices. Answers of these APIs have one choice. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ITEMS_H
#define BT_CONDUCTOR_FRONT_ITEMS_H

#include "common/base/base.h"
#include "common/base/buf.h"
#include "conductor/reply/reply.h"

struct bt_front_item {
    enum bt_reply_kind kind; /* BT_REPLY_TEXT, BT_REPLY_REASONING, BT_REPLY_CALL */
    uint32_t call;
    char *name;             /* name of the called function */
    struct bt_buf text;     /* text; arguments of a call */
    struct bt_buf logprobs; /* of a text: the inside of a JSON array */
};

struct bt_front_items {
    struct bt_front_item *list;
    uint32_t n, cap;
    bool open;    /* the last item may still grow */
    size_t bytes; /* bytes that the items use */
};

/* Returns whether the bit begins an item. */
bool bt_front_items_begins(const struct bt_front_items *items, const struct bt_reply_bit *bit);
/* The item to which the bit belongs; a new one if the bit begins it. NULL: the bit has no effect
 * (empty text, or arguments without a call). Does not add the bit's text. */
struct bt_front_item *bt_front_items_of(struct bt_front_items *items,
                                        const struct bt_reply_bit *bit);
/* Adds to the text of an item, or to its logprobs, between which it puts a comma. */
void bt_front_items_text(struct bt_front_items *items, struct bt_front_item *item, const char *text,
                         size_t len);
void bt_front_items_logprobs(struct bt_front_items *items, struct bt_front_item *item,
                             const struct bt_buf *more);
/* The item that may still grow. NULL: there is none. */
struct bt_front_item *bt_front_items_last(const struct bt_front_items *items);
void bt_front_items_cleanup(struct bt_front_items *items);

/* ---- long texts ---- */

struct bt_front_span {
    const struct bt_buf *from; /* NULL: the script's own text */
    size_t len;
    bool escaped; /* written as the inside of a JSON string */
};

/* A text made of its own parts and of buffers, which must not change until it is written. */
struct bt_front_script {
    struct bt_buf own;
    size_t marked; /* bytes of `own` that belong to a span already */
    struct bt_front_span *spans;
    uint32_t n, cap;
    /* the position up to which it is written */
    uint32_t span;
    size_t at, own_at;
};

/* These append JSON text to s->own, or refer to a buffer. */
void bt_front_script_string(struct bt_front_script *s, const struct bt_buf *text); /* "..." */
void bt_front_script_raw(struct bt_front_script *s, const struct bt_buf *text);
/* Writes the next slice. Returns true when all is written. */
bool bt_front_script_write(struct bt_front_script *s, struct bt_buf *out);
void bt_front_script_cleanup(struct bt_front_script *s);

#endif
