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
    const struct bt_reply_xml_form *xml; /* arguments are elements */
};
const struct bt_reply_form *bt_reply_form_of(enum bt_reply_tools tools);

/* ---- markers ---- */
enum bt_found { FOUND_NOT, FOUND_PART, FOUND };
/* Returns whether the text that comes next, p[0..n), begins with the marker (NULL: none). PART: it
 * may, depending on the text that follows; never if the text is complete. */
enum bt_found bt_reply_begins(const struct bt_reply *r, const char *p, size_t n,
                              const char *marker);
/* The kinds of an argument. */
unsigned bt_reply_kinds(const struct bt_reply *r, const struct bt_buf *function, const char *key,
                        size_t key_len);

/* ---- a call as elements ---- */

struct bt_reply_xml {
    const struct bt_reply_xml_form *f;
    uint8_t state;
    bool sure;           /* it is a call: its name may be given out */
    bool first, newline; /* of the value: nothing was taken; a newline is held back */
    uint32_t n;          /* members so far */
    unsigned kinds;      /* of the value */
    struct bt_buf name, key, value;
};
/* Behind call_open, or before the name. */
void bt_reply_xml_init(struct bt_reply_xml *x, const struct bt_reply_xml_form *f);
void bt_reply_xml_cleanup(struct bt_reply_xml *x);
/* Reads some of p[0..n), n > 0, and appends its part of the arguments. Returns 0 with MORE if it
 * needs more text or has changed its state. DONE: the call has ended. BAD: p[0] is not allowed
 * here. */
size_t bt_reply_xml_step(struct bt_reply_xml *x, const struct bt_reply *r, const char *p, size_t n,
                         struct bt_buf *out, enum bt_scan *result);
/* Returns whether the frame may end here. */
bool bt_reply_xml_between(const struct bt_reply_xml *x);
void bt_reply_xml_end(struct bt_reply_xml *x, struct bt_buf *out);
/* The answer ends within the call. */
void bt_reply_xml_cut(struct bt_reply_xml *x, struct bt_buf *out);

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
/* Reads a byte behind the '{'. Appends its part of the text of the arguments. DONE: it ends the
 * object. BAD: it is not allowed here, and o has not changed. */
enum bt_scan bt_reply_object_feed(struct bt_reply_object *o, char c, struct bt_buf *arguments);
/* Returns whether o is within the value of the arguments. */
bool bt_reply_object_in_arguments(const struct bt_reply_object *o);

#endif
