/* Within front/: models that write the arguments of calls as elements
 * (conductor/reply/reply_xml.c): what the tools' schemas say about the kinds of arguments, and
 * grammars of such calls. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ELEMENTS_H
#define BT_CONDUCTOR_FRONT_ELEMENTS_H

#include "conductor/front/front_json.h"
#include "conductor/reply/reply.h"

/* {function: {argument: kinds}} of the tools of a chat body (front_tools.h), for bt_front_kinds. */
json_t *bt_front_kinds_of(const json_t *tools);
size_t bt_front_kinds_bytes(const json_t *kinds); /* about; NULL: 0 */
/* The reply's function; arg: that object. */
unsigned bt_front_kinds(const void *arg, const char *function, size_t function_len, const char *key,
                        size_t key_len);

/* Appends the members of a tag (common/grammar/tags.c): the arguments that `parameters`, a schema,
 * describes, in its order. strict: they must follow it in every detail. "" : any text is allowed.
 * False: e says what of the schema cannot be enforced. */
bool bt_front_put_members(const struct bt_reply_xml_form *f, const json_t *parameters, bool strict,
                          struct bt_buf *out, struct bt_front_error *e);

#endif
