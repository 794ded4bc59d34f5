/* Within front/: models that write the arguments of calls as elements
 * (conductor/reply/reply_xml.c). These functions find the kinds of arguments in the tools' schemas,
 * and write grammars for such calls. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ELEMENTS_H
#define BT_CONDUCTOR_FRONT_ELEMENTS_H

#include "conductor/front/front_json.h"
#include "conductor/reply/reply.h"

/* Returns {function: {argument: kinds}} for the tools of a chat body (front_tools.h);
 * bt_front_kinds reads it. */
json_t *bt_front_kinds_of(const json_t *tools);
size_t bt_front_kinds_bytes(const json_t *kinds); /* approximate memory; NULL: 0 */
/* The reply calls this function. arg: the object of bt_front_kinds_of. */
unsigned bt_front_kinds(const void *arg, const char *function, size_t function_len, const char *key,
                        size_t key_len);

/* Appends the members of a tag (common/grammar/tags.c): the arguments that the schema `parameters`
 * describes, in its order. strict: the arguments must follow the schema in every detail. Appends ""
 * if any text is allowed. Returns false if a part of the schema cannot be enforced; e names it. */
bool bt_front_put_members(const struct bt_reply_xml_form *f, const json_t *parameters, bool strict,
                          struct bt_buf *out, struct bt_front_error *e);

#endif
