/* Within front/: turns the fields of a body that constrain its answers into the text of a grammar.
 * Pure, except for the cache of compiled grammars. */
#ifndef BT_CONDUCTOR_FRONT_GRAMMAR_H
#define BT_CONDUCTOR_FRONT_GRAMMAR_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Reads response_format, structured_outputs, guided_* and similar fields, of which at most one may
 * constrain the answer. Sets spec->grammar if one does. Call it after the names of the fields were
 * checked. Returns false with e set; e->beyond: a reading thread has to do the work. */
bool bt_front_take_grammar(const struct bt_front_model *m, const json_t *root,
                           struct bt_gen_spec *spec, struct bt_front_error *e);
/* Sets spec->grammar to this text, for the field `param`, if it compiles. kind: enum
 * bt_grammar_kind. Returns false as above, and also if the spec already has a grammar. */
bool bt_front_set_grammar(const struct bt_front_model *m, uint32_t kind, const char *text,
                          size_t len, const char *param, struct bt_gen_spec *spec,
                          struct bt_front_error *e);
/* Appends a JSON value as text. Returns false if it contains a number that reading the body has
 * changed. The parser limits the depth. */
bool bt_front_put_json(struct bt_buf *out, const json_t *v);
/* Names a grammar's kind in metrics and logs. */
const char *bt_front_grammar_name(uint32_t kind);

#endif
