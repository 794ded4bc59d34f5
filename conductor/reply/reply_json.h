/* Within reply/: where a JSON value ends, found byte by byte, and strings without their escapes. */
#ifndef BT_CONDUCTOR_REPLY_JSON_H
#define BT_CONDUCTOR_REPLY_JSON_H

#include "common/base/base.h"
#include "common/base/buf.h"

#define BT_REPLY_DEPTH 512 /* of nested objects and arrays */

enum bt_scan { BT_SCAN_MORE, BT_SCAN_DONE, BT_SCAN_BAD };

struct bt_json_scan { /* of an object or array */
    uint8_t state;
    uint16_t depth;
    uint8_t objects[BT_REPLY_DEPTH / 8]; /* bit: the level is an object */
};
/* At the beginning, before the first '{' or '['. */
void bt_json_scan_init(struct bt_json_scan *s);
/* DONE: c ends the value. BAD: c cannot stand here; s has not moved. Control characters are
 * allowed in strings, and every word counts as a number: models write both. */
enum bt_scan bt_json_scan(struct bt_json_scan *s, char c);

/* The kind of the JSON value p[0..n), an enum bt_reply_is. 0: it is not a JSON value, or nested too
 * deep. */
unsigned bt_json_kind(const char *p, size_t n);

struct bt_json_string { /* the inside of a string */
    uint8_t state;
    uint16_t code, high; /* of \u; a high surrogate that waits for its other half */
};
/* Appends what c adds to the text. DONE: c is the closing quote. Unknown escapes stay as they
 * are. */
enum bt_scan bt_json_string(struct bt_json_string *s, char c, struct bt_buf *out);

#endif
