/* Within front/: grammars of answers with tool calls or reasoning. They enforce tool_choice and
 * `strict` in the form in which the model writes calls, and let reasoning precede a constrained
 * answer. */
#ifndef BT_CONDUCTOR_FRONT_FORCED_H
#define BT_CONDUCTOR_FRONT_FORCED_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Sets spec->grammar if tool_choice requires a call, or if some tool is strict. If another field
 * has set the grammar, lets the model's reasoning come before it, and calls replace it. Returns
 * false with e set; e->beyond: a reading thread has to do the work. */
bool bt_front_force(const struct bt_front_model *m, const json_t *root,
                    const struct bt_front_chat *chat, const struct bt_front_tools *tools,
                    struct bt_gen_spec *spec, struct bt_front_error *e);

#endif
