/* Within reply/: the forms of tool calls, as the parser sees them, and its reader of JSON objects.
 */
#ifndef BT_CONDUCTOR_REPLY_PRIV_H
#define BT_CONDUCTOR_REPLY_PRIV_H

#include "conductor/reply/reply.h"
#include "conductor/reply/reply_json.h"

#define BT_REPLY_CALL_ID "[CALL_ID]" /* Mistral: an id between name and arguments */

struct bt_reply_form {
    const char *name;
    struct bt_reply_frame frame;
    const char *between; /* characters that may stand between calls, besides white space */
    bool object;         /* a call is {"name":...,"arguments":...} */
    bool bare;           /* ... which may begin the answer without a marker */
    bool list;           /* ... and may be in an array */
    bool names;          /* a call may also be a name, name_end, arguments */
    bool fenced;         /* arguments may be a block of code behind a second name */
    bool numbered;       /* names are functions.NAME:NUMBER */
    bool ends_thoughts;  /* calls may begin without the end of the reasoning */
};
const struct bt_reply_form *bt_reply_form_of(enum bt_reply_tools tools);

/* ---- a call as a JSON object, byte by byte ---- */

struct bt_reply_object {
    uint8_t state, key;           /* of the walk through the object; which key's value this is */
    bool strict;                  /* only known keys, and the arguments are required */
    bool text;                    /* the value is a string */
    bool has_name, has_arguments; /* ... completely; or begun */
    struct bt_buf name, word;     /* word: the key */
    struct bt_json_scan scan;
    struct bt_json_string string;
};
void bt_reply_object_init(struct bt_reply_object *o, bool strict);
void bt_reply_object_cleanup(struct bt_reply_object *o);
/* Takes a byte behind the '{'. Appends what it adds to the text of the arguments. DONE: it ends
 * the object. BAD: it cannot stand here, and o has not moved. */
enum bt_scan bt_reply_object_feed(struct bt_reply_object *o, char c, struct bt_buf *arguments);
/* Within the value of the arguments? */
bool bt_reply_object_in_arguments(const struct bt_reply_object *o);

#endif
