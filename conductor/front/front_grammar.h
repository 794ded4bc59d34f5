/* Within front/: turns what a body says about the form of its answers into the text of a grammar.
 * Pure, but for the cache of compiled grammars. */
#ifndef BT_CONDUCTOR_FRONT_GRAMMAR_H
#define BT_CONDUCTOR_FRONT_GRAMMAR_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Reads response_format, structured_outputs, guided_* and their like; at most one of them may
 * constrain the answer. Sets spec->grammar if one does. Call it with the fields checked by name.
 * False: e is set; e->beyond if a reading thread has to do it. */
bool bt_front_take_grammar(const struct bt_front_model *m, const json_t *root,
                           struct bt_gen_spec *spec, struct bt_front_error *e);
/* Sets spec->grammar to this text if it compiles, for the field `param`. kind: enum
 * bt_grammar_kind. False: as above; also if the spec has a grammar already. */
bool bt_front_set_grammar(const struct bt_front_model *m, uint32_t kind, const char *text,
                          size_t len, const char *param, struct bt_gen_spec *spec,
                          struct bt_front_error *e);
/* Appends a JSON value as text. False: a number that the reading of the body has not kept. The
 * parser bounds the depth. */
bool bt_front_put_json(struct bt_buf *out, const json_t *v);
/* Names a grammar's kind in metrics and logs. */
const char *bt_front_grammar_name(uint32_t kind);

#endif
