/* Finds stop strings in text that arrives in pieces. Text is released as soon as no stop string can
 * begin in it any more. The text that is held back is always the beginning of a stop string. Pure,
 * except for the memory of the matcher itself. */
#ifndef BT_CONDUCTOR_STOP_H
#define BT_CONDUCTOR_STOP_H

#include "common/base/base.h"
#include "common/base/buf.h"

struct bt_stop;

/* strings: NULL-terminated, copied; NULL or empty list: a matcher that passes everything. Empty
 * strings are ignored. include: the matched string stays in the text. */
struct bt_stop *bt_stop_create(char *const *strings, bool include);
void bt_stop_destroy(struct bt_stop *s);

/* Takes text[0..len) and appends to out the part that became final. Returns the string that matched
 * (valid as long as s), or NULL. The string that is complete first wins; of several that end at the
 * same byte the longest. After a match all input is dropped. */
const char *bt_stop_feed(struct bt_stop *s, const char *text, size_t len, struct bt_buf *out);
/* The same as feed, but does not search stop strings (min_tokens). Text that was held back comes
 * first. */
void bt_stop_pass(struct bt_stop *s, const char *text, size_t len, struct bt_buf *out);
/* The text has ended: appends the text that was held back. */
void bt_stop_flush(struct bt_stop *s, struct bt_buf *out);

#endif
